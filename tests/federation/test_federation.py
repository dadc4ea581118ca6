"""A federation is the same training: what both sides say and keep, who counts, and what is refused. Real processes are
tried in federation_processes.py."""

import contextlib
import datetime
import io
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from command import Command, sentence
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from federated import (
    DIM,
    LOCAL,
    NAMES,
    PRIVATE,
    ROUNDS,
    Network,
    config,
    data,
    in_process,
    mean_of_memories,
    party,
    request_for,
)
from hostile import HOSTILE, NO_ANSWER
from hypothesis import given, settings
from hypothesis import strategies as st

import fednormec as fn
from fednormec.algorithms.methods import METHODS
from fednormec.algorithms.optimizers import OPTIMIZERS
from fednormec.config.schema import dump
from fednormec.data import Examples
from fednormec.engine.round import Round, record
from fednormec.errors import Stopped, UserError, visible
from fednormec.federation import client as at_client
from fednormec.federation import keys
from fednormec.federation.agreement import for_client, for_server, read_federation
from fednormec.federation.client import answering, longest_request, own_data
from fednormec.federation.client_state import Kept, Store
from fednormec.federation.disclosure import besides, promise
from fednormec.federation.log import Log
from fednormec.federation.messages import (
    DONE,
    LOST,
    MOST_SAID,
    MOST_TEXT,
    REFUSED,
    Refused,
    Reply,
    Request,
    kind_of,
    packed,
    read_reply,
    read_report,
    read_request,
    reply_bytes,
    request_bytes,
    unpacked,
)
from fednormec.federation.provision import add, make, remove, renew, revoke, sign
from fednormec.federation.releases import Releases
from fednormec.federation.sessions import roster
from fednormec.federation.wire import Wire, longest, taken
from fednormec.privacy.mechanism import Mechanism
from fednormec.privacy.statement import state
from fednormec.runs import checkpoint as checkpoints
from fednormec.runs.runner import Site, go_on, perform


def assert_same(wire: list[Round], process: list[Round]) -> None:
    assert len(wire) == len(process) == ROUNDS
    for one, other in zip(wire, process, strict=True):
        torch.testing.assert_close(one.x, other.x, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(one.server.memory, other.server.memory, rtol=1e-6, atol=1e-12)
        assert (one.computed, one.sent, one.left_out) == (other.computed, other.sent, other.left_out)


# the same training


@pytest.mark.long
@pytest.mark.parametrize("idle", ["advance", "sleep"])
@pytest.mark.parametrize("method", METHODS)
def test_over_the_wire_every_method_trains_as_in_process(tmp_path, method, idle):
    asked = config(method={"name": method}, participation={"name": "poisson", "p": 0.7, "idle": idle})
    if method == "alpha_normec":
        asked["participation"] = {"name": "full"}
    network = Network(asked, tmp_path)
    assert_same(list(network.rounds()), in_process(asked))
    assert network.said == []


@pytest.mark.parametrize("server", OPTIMIZERS)
def test_over_the_wire_every_optimiser_trains_as_in_process(tmp_path, server):
    """Clients know the schedules of their own step and of beta, and compute at the point that they are told."""
    falling = {"schedule": "cosine", "local_schedule": "linear", "beta_schedule": "cooldown", "average": "ema"}
    asked = config(server={"name": server, **falling}, privacy=PRIVATE)
    wire, process = list(Network(asked, tmp_path).rounds()), in_process(asked)
    assert_same(wire, process)
    for one, other in zip(wire, process, strict=True):
        torch.testing.assert_close(one.average, other.average, rtol=1e-6, atol=1e-12)


def test_over_the_wire_scales_are_those_in_process(tmp_path):
    asked = config(method={"name": "dp_fed_avg_clip"}, server={"scaling": True}, privacy=PRIVATE)
    assert_same(list(Network(asked, tmp_path).rounds()), in_process(asked))


@pytest.mark.long
def test_with_the_servers_noise_as_in_process(tmp_path):
    asked = config(privacy=PRIVATE)
    assert_same(list(Network(asked, tmp_path).rounds()), in_process(asked))


@pytest.mark.parametrize("idle", ["advance", "sleep"])
def test_with_the_clients_own_noise_as_in_process(tmp_path, monkeypatch, idle):
    asked = config(privacy=LOCAL, participation={"name": "poisson", "p": 0.7, "idle": idle})
    wire = list(Network(asked, tmp_path).rounds())

    def sum_of_all(self: Mechanism, dim: int, senders: int, seed: int, round: int) -> np.ndarray:
        drawn = self.cohort(seed, round)
        who = drawn.computing[drawn.sending]
        assert len(who) == senders
        return sum((alone(self, dim, 1, seed, round, int(i)) for i in who), np.zeros(dim))

    alone = Mechanism.noise
    monkeypatch.setattr(Mechanism, "noise", sum_of_all)
    assert_same(wire, in_process(asked))


def test_every_client_draws_noise_of_its_own():
    mechanism = Mechanism(3, fn.full(), 1.0, trust="local")
    first, second = (mechanism.noise(4, 1, 0, 1, client) for client in (0, 1))
    assert not np.allclose(first, second)
    assert np.array_equal(first, mechanism.noise(4, 1, 0, 1, 0))


def test_what_clients_send_is_paid_for_before_they_are_asked(tmp_path):
    """Under local trust the message is the release; under central trust the noisy sum is."""
    for privacy, paid_when_asked in ((LOCAL, 1), (PRIVATE, 0)):
        network, paid = Network(config(privacy=privacy), tmp_path), list[int]()
        seen: list[int] = []
        ask = network.ask

        def watched(requests: Mapping[int, Request], ask: Any = ask, paid: Any = paid, seen: Any = seen) -> Any:
            seen.append(len(paid))
            return ask(requests)

        network.ask = watched  # type: ignore[method-assign]
        experiment = network.server.experiment
        place = Wire(NAMES, lambda: "b", network.server.agreed, watched, network.said.append)
        next(fn.simulate(
            experiment.problem, experiment.algorithm, experiment.participation, experiment.privacy, rounds=ROUNDS,
            seed=3, on=place, before_release=lambda number, plan, paid=paid: paid.append(number),
        ))  # fmt: skip
        assert (seen, paid) == ([paid_when_asked], [1])


# the memory


def test_a_late_answer_counts_on_neither_side(tmp_path):
    """The server's memory stays the mean of the clients', whoever was late: the rule for sleeping clients."""
    network = Network(config(), tmp_path)
    network.between = lambda client, request, reply: None if (client + request.round) % 3 == 0 else reply
    missed = 0
    for r in network.rounds():
        missed += r.missed
        torch.testing.assert_close(r.server.memory, mean_of_memories(network, r), rtol=1e-9, atol=1e-12)
    assert missed > 3


def test_without_the_rule_a_late_answer_would_be_lost(tmp_path):
    """The same with clients that do not take their last step back: the memories drift apart."""
    network = Network(config(), tmp_path)
    network.between = lambda client, request, reply: None if (client + request.round) % 3 == 0 else reply
    apart = 0.0
    for r in network.rounds():
        last = [
            Store(tmp_path / name, "a", DIM, DIM, torch.float64).load().memory for name in NAMES
        ]  # after the last round, whether it counted or not
        apart = max(apart, float((r.server.memory - sum(last) / len(NAMES)).norm()))
    assert apart > 0.01


def test_a_client_that_missed_rounds_goes_on_where_it_was(tmp_path):
    """Idle clients advance; one is away for three rounds, and its memory waits."""
    asked = config(participation={"name": "poisson", "p": 0.5, "idle": "advance"})
    network = Network(asked, tmp_path)
    away = range(2, 5)
    network.between = lambda client, request, reply: None if client == 1 and request.round in away else reply
    before = None
    for r in network.rounds():
        counted = int(r.memory[1, 0])
        assert counted == (1 if r.number in away else r.number)
        if r.number == 1:
            before = network.memory(1, 1)
        if r.number in away:
            assert torch.equal(network.memory(1, 1), before)
            assert r.missed == 1
            assert r.computed == len(NAMES) - 1


@pytest.mark.parametrize("privacy", [None, LOCAL | {"randomness": "secure"}])
def test_whoever_asks_again_gets_the_same_answer(tmp_path, privacy):
    """A reply that was lost after the memory moved: it does not move twice, and secure noise is not drawn twice."""
    network = Network(config() | ({} if privacy is None else {"privacy": privacy}), tmp_path)
    first = network.clients[0](request_for(network, 1, 0))
    moved = network.memory(0, 1)
    again = answering(party(network.asked, 0), 0, tmp_path / NAMES[0])  # the process was restarted, too
    second = again(request_for(network, 1, 0)._replace(nonce=b"m" * 16))
    assert torch.equal(first.message, second.message)
    assert second.nonce == b"m" * 16
    assert torch.equal(network.memory(0, 1), moved)
    other = again(request_for(network, 1, 0, x=0.2))
    assert not torch.equal(first.message, other.message)


def test_idle_at_first_and_drawn_later_it_is_the_same_message(tmp_path):
    network = Network(config(privacy=LOCAL | {"randomness": "secure"}), tmp_path)
    idle = network.clients[0](request_for(network, 1, 0, sends=False))
    assert idle.message is None
    assert idle.status == DONE
    store = Store(tmp_path / NAMES[0], "a", DIM, DIM, torch.float64)
    assert store.load().sent == 0
    drawn = network.clients[0](request_for(network, 1, 0))
    assert torch.equal(drawn.message, store.load().message)
    assert store.load().sent == 1


@pytest.mark.parametrize("privacy", [{}, {"privacy": PRIVATE}, {"privacy": LOCAL}])
def test_an_update_that_is_not_finite_is_counted_where_the_server_may_know(tmp_path, privacy):
    """As in process. Under local trust that a client's data did it is the client's own business, and its owner's."""
    asked = config(participation={"name": "full"}, local={"name": "gd", "step": 0.5, "steps": 3}, **privacy)
    network, told = Network(asked, tmp_path), list[str]()
    x, y = data()[0]
    broken = for_client(asked, NAMES[0], Examples(np.sign(x) * 1e308, y))
    network.clients[0] = answering(broken, 0, tmp_path / NAMES[0], told.append)
    counts = [(r.sent, r.left_out) for r in network.rounds()]
    local = privacy.get("privacy") is LOCAL
    assert counts == [(4, 0 if local else 1)] * ROUNDS
    assert len(told) == ROUNDS and "is not finite" in told[0]


def test_a_client_sends_no_more_than_the_budget_pays_for(tmp_path):
    """Whatever the server asks: under local trust a client counts for itself."""
    network = Network(config(privacy=LOCAL | {"randomness": "secure"}), tmp_path)
    answers = [network.clients[0](request_for(network, 1, 0, x=float(i))) for i in range(ROUNDS + 1)]
    assert [reply.status for reply in answers] == [DONE] * ROUNDS + [REFUSED]
    assert "budget" in answers[-1].why
    assert answers[-1].message is None


def test_another_name_for_the_training_buys_no_more_messages(tmp_path):
    """Nor does a memory that was moved away: what has left the client has left."""
    asked = config(privacy=LOCAL | {"randomness": "secure"})
    for run in ("a", "b"):
        network = Network(asked, tmp_path, run)
        answers = [network.clients[0](request_for(network, 1, 0, x=float(i))) for i in range(ROUNDS)]
        assert [reply.status for reply in answers] == [DONE if run == "a" else REFUSED] * ROUNDS
        for path in (tmp_path / NAMES[0]).glob("memory-*"):
            path.unlink()


@pytest.mark.parametrize("then", ["the same request", "another request"])
@pytest.mark.parametrize("killed_in", ["save", "may_leave"])
def test_a_kill_between_counting_and_leaving_counts_once(tmp_path, monkeypatch, killed_in, then):
    """In every round but the last, so that counting twice would refuse that one. A memory that is moved away after the
    answer left does not make the answer count as still here."""
    network = Network(config(privacy=LOCAL | {"randomness": "secure"}), tmp_path)
    owner = Store if killed_in == "save" else Releases
    for number in range(ROUNDS):
        request = request_for(network, 1, 0, x=float(number))
        if number < ROUNDS - 1:
            with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
                patch.setattr(owner, killed_in, lambda *given: 1 / 0)
                network.clients[0](request)
        if then == "another request":
            request = request_for(network, 1, 0, x=number + 0.5)
        assert network.clients[0](request).status == DONE
    assert Releases(tmp_path / NAMES[0], network.server.agreed).count() == ROUNDS
    for path in (tmp_path / NAMES[0]).glob("memory-*"):
        path.unlink()
    assert network.clients[0](request).status == REFUSED


def test_two_trainings_do_not_share_one_count_after_a_kill(tmp_path, monkeypatch):
    """The message that was stored before the kill leaves as well, when its training asks for it again."""
    asked = config(privacy=LOCAL | {"randomness": "secure"})
    first, second = Network(asked, tmp_path, "a"), Network(asked, tmp_path, "b")
    request = request_for(first, 1, 0)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Releases, "may_leave", lambda *given: 1 / 0)
        first.clients[0](request)
    for network, asked_for in ((second, request_for(second, 1, 0)), (first, request)):
        assert network.clients[0](asked_for).message is not None
    assert Releases(tmp_path / NAMES[0], first.server.agreed).count() == 2


def test_as_many_hostile_clients_as_honest_ones_end_no_run(tmp_path):
    network = Network(config(participation={"name": "full"}), tmp_path)
    network.between = lambda client, request, reply: reply._replace(round=99) if client < 2 else reply
    assert [(r.left_out, r.sent) for r in network.rounds()] == [(2, 2)] * ROUNDS


def test_nothing_is_paid_for_before_a_client_is_there_that_can_take_part(tmp_path):
    network = Network(config(privacy=LOCAL | {"randomness": "secure"}, participation={"name": "full"}), tmp_path)
    experiment, happened = network.server.experiment, list[Any]()
    place = Wire(
        NAMES, lambda: "a", network.server.agreed, network.ask, network.said.append,
        lambda some, count: happened.append(some),
    )  # fmt: skip
    for r in fn.simulate(
        experiment.problem, experiment.algorithm, experiment.participation, experiment.privacy, rounds=3, on=place,
        before_release=lambda number, plan: happened.append(number),
    ):  # fmt: skip
        if r.number == 1:
            (tmp_path / NAMES[2] / "memory-a.safetensors").unlink()
    assert happened == [{0, 1, 2, 3}, 1, {0, 1, 2, 3}, 2, {0, 1, 3}, 3]


def test_a_client_that_lost_its_disk_is_set_aside(tmp_path):
    """What it would send from zero would come on top of what it sent before."""
    network = Network(config(participation={"name": "full"}), tmp_path)
    seen = []
    for r in network.rounds():
        seen.append((r.computed, r.missed))
        if r.number == 3:
            (tmp_path / NAMES[2] / "memory-a.safetensors").unlink()
        if r.number > 3:
            assert 2 not in r.cohort.computing
            assert r.memory[2, 0] == 3
    assert seen == [(4, 0)] * 3 + [(3, 1)] * 3
    assert len(network.said) == 1
    assert network.said[0].startswith("east has lost its memory after round 3 (it has that after round 0)")
    assert len(network.requests[3]) == 4  # asked once more, then no longer
    assert len(network.requests[4]) == 3


def test_a_method_without_memory_needs_none(tmp_path):
    network = Network(config(method={"name": "dp_fed_avg_clip"}, participation={"name": "full"}), tmp_path)
    for r in network.rounds():
        (tmp_path / NAMES[2] / "memory-a.safetensors").unlink()
        assert r.missed == 0


def test_all_memories_can_start_over(tmp_path):
    """After a loss, at the operator's word: the server's memory is the clients' mean again, all of them zero."""
    network = Network(config(participation={"name": "full"}), tmp_path)
    rounds = network.rounds()
    for r in rounds:
        if r.number == 3:
            checkpoints.save(tmp_path / "c", r)
            break
    (tmp_path / NAMES[2] / "memory-a.safetensors").unlink()
    for r in network.rounds(resume=checkpoints.load(tmp_path / "c").without_memories()):
        assert r.missed == 0
        torch.testing.assert_close(r.server.memory, mean_of_memories(network, r), rtol=1e-9, atol=1e-12)
    assert network.said == []
    assert all(request.base == 0 for request in network.requests[3].values())


@pytest.mark.long
@pytest.mark.parametrize("after", range(1, ROUNDS))
def test_a_server_that_goes_on_from_its_checkpoint_asks_for_the_same_again(tmp_path, after):
    """Killed after the clients moved and before its checkpoint: it ends as if nothing had happened."""
    expected = in_process(config())
    network = Network(config(), tmp_path)
    for r in network.rounds():
        if r.number == after:
            checkpoints.save(tmp_path / "c", r)
        if r.number == after + 1:
            break
    rest = list(network.rounds(resume=checkpoints.load(tmp_path / "c")))
    assert len(rest) == ROUNDS - after
    torch.testing.assert_close(rest[-1].x, expected[-1].x, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(rest[-1].server.memory, mean_of_memories(network, rest[-1]), rtol=1e-9, atol=1e-12)


def test_lost_is_what_a_client_says_who_lost(tmp_path):
    network = Network(config(), tmp_path)
    reply = network.clients[0](request_for(network, 5, 4))
    assert (reply.status, reply.round, reply.message) == (LOST, 0, None)


def test_when_all_have_lost_their_memory_nobody_pays_for_empty_rounds(tmp_path):
    network = Network(config(participation={"name": "full"}), tmp_path)
    with pytest.raises(UserError, match="--forget-memories"):
        for r in network.rounds():
            if r.number == 2:
                for name in NAMES:
                    (tmp_path / name / "memory-a.safetensors").unlink()
    assert len(network.said) == len(NAMES)


def test_a_run_of_a_federation_stops_forgets_and_goes_on(tmp_path):
    """The whole way of `serve` but for the network: folder, records, ledger, checkpoint, statement."""
    asked = config(participation={"name": "full"}, privacy=LOCAL)
    network = Network(asked, tmp_path)
    place = Wire(NAMES, lambda: "a", network.server.agreed, network.ask, network.said.append)
    says = besides(network.server.plan.mechanism)
    site = Site(lambda found: for_server(found, tmp_path).experiment, place, says, "serve again")
    stops = iter([False, False, True])
    with pytest.raises(Stopped, match=r"stopped after round 3. To go on: serve again"):
        perform(asked, "run", tmp_path / "run", quiet=True, stop=lambda: next(stops), site=site)
    (tmp_path / NAMES[2] / "memory-a.safetensors").unlink()
    summary = go_on(tmp_path / "run", quiet=True, site=site._replace(forgets=True))
    assert (summary["rounds"], summary["status"]) == (ROUNDS, "done")
    assert all(request.base == 0 for request in network.requests[3].values())
    assert network.said == []
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["not_private"]["missed"] for line in lines] == [0] * ROUNDS
    assert "drop-outs" in summary["statement"]
    assert fn.read_ledger(tmp_path / "run" / "ledger.jsonl").rounds == ROUNDS


def test_what_a_client_keeps_is_whole_or_not_there(tmp_path, monkeypatch):
    store = Store(tmp_path, "a", 3, 2, torch.float32)
    assert store.load().round == 0
    kept = Kept(2, 1, 1, 0, "d", torch.ones(3), torch.zeros(3), torch.full((2,), 0.5))
    store.save(kept)
    found = store.load()
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(found, kept, strict=True))
    content = store.path.read_bytes()
    for damaged in (content[:-1], content[:40], content[:-2] + bytes([content[-2] ^ 1]) + content[-1:], b""):
        store.path.write_bytes(damaged)
        with pytest.raises(UserError, match="cannot be used"):
            store.load()
    store.path.write_bytes(content)
    with pytest.raises(UserError, match="of another model"):
        Store(tmp_path, "a", 4, 2, torch.float32).load()
    assert Store(tmp_path, "b", 4, 2, torch.float32).load().round == 0  # another training's


def test_a_client_of_a_federation_does_not_send_what_its_bound_does_not_give(tmp_path, monkeypatch):
    net = Network(config(privacy=LOCAL, participation={"name": "full"}), tmp_path)
    right = at_client.computed

    def longer(problem, algorithm, *rest):
        message, left_out = right(problem, algorithm, *rest)
        return fn.Messages(message.whole() * 5), left_out

    next(rounds := net.rounds())
    monkeypatch.setattr(at_client, "computed", longer)
    after = next(rounds)
    assert after.left_out == len(NAMES) and any("the method here broke its bound" in said for said in net.said)
    assert not any("length" in said for said in net.said)  # a figure of the client's data: for its owner alone
    told = []
    alone = at_client.answering(party(net.asked, 0), 0, tmp_path / NAMES[0], told.append)
    alone(next(iter(net.requests[-1].values()))._replace(round=9))
    assert any("longer than its bound" in said for said in told)


# hostile messages


@pytest.mark.long
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_messages_are_refused_and_counted(tmp_path, what):
    """The others go on as if that client had not been there, and its bad message leaves no trace."""
    asked = config(participation={"name": "full"})
    hostile, away = Network(asked, tmp_path), Network(asked, tmp_path, "other")
    hostile.between = lambda client, request, reply: HOSTILE[what](reply) if client == 1 else reply
    away.between = lambda client, request, reply: None if client == 1 else reply
    for one, other in zip(hostile.rounds(), away.rounds(), strict=True):
        assert torch.equal(one.x, other.x)
        assert (one.computed, one.sent, one.left_out, one.missed) == (4, 3, 1, 0)
        assert (other.computed, other.sent, other.left_out, other.missed) == (3, 3, 0, 1)
        assert record(one)["not_private"]["left_out"] == 1
    assert len(hostile.said) == 1
    assert hostile.said[0].startswith("south sent what was refused: ")


ORDERS = ["\x1b[2J", "\n", "\r", "\x9b", "\u202e", "\u2028", "\x00", "[red]", "a" * 99]


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(ORDERS) | st.text()))
def test_a_clients_reason_is_one_line_of_the_servers_log(parts):
    """Whatever it says, the server's screen shows one note with nothing in it that cannot be seen."""
    why = "".join(parts)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()) as log:
        network = Network(config(run={"rounds": 1, "seed": 3, "dtype": "float64"}), Path(folder))
        network.said = SimpleNamespace(append=Log())
        refusing = {"status": REFUSED, "why": why, "message": None}
        network.between = lambda client, request, reply: reply._replace(**refusing) if client == 1 else reply
        assert [r.left_out for r in network.rounds()] == [1]
    text = log.getvalue()
    assert re.match(r"note: \d\d:\d\d:\d\d south sent what was refused: it says: ", text)
    assert text.endswith(".\n")
    assert visible(text[:-1]) == text[:-1]
    assert len(text) < MOST_TEXT + 70
    assert len(text) > 65 + min(len(visible(why)), MOST_TEXT) - 20


def test_an_honest_message_at_the_radius_is_taken():
    request = Request("a", "b", 1, 0, True, b"n", torch.zeros(4))
    row = fn.clip(1.0)(torch.full((1, 4), 7.0))[0]
    assert taken(Reply(1, b"n", message=row), request, 4, 1.0) is row
    with pytest.raises(Refused, match="longer than 1"):
        taken(Reply(1, b"n", message=row * (1 + 1e-4)), request, 4, 1.0)


def test_honest_noise_is_taken_and_ten_times_as_much_is_not():
    mechanism = Mechanism(3, fn.full(), 2.0, trust="local")
    most = longest(1.0, 200, mechanism)
    request = Request("a", "b", 1, 0, True, b"n", torch.zeros(200))
    for client in range(200):
        message = torch.from_numpy(mechanism.noise(200, 1, 0, 1, client)).float()
        message[0] += 1
        assert taken(Reply(1, b"n", message=message), request, 200, most) is message
        with pytest.raises(Refused, match="is longer than"):
            taken(Reply(1, b"n", message=10 * message), request, 200, most)


@pytest.mark.parametrize("what", NO_ANSWER)
def test_what_is_no_answer_is_refused(what):
    honest = reply_bytes(Reply(1, b"n", message=torch.zeros(3)))
    assert read_reply(honest, 3, torch.float32).round == 1
    with pytest.raises(Refused):
        read_reply(NO_ANSWER[what](honest), 3, torch.float32)


@given(st.binary(max_size=200))
def test_whatever_bytes_arrive_are_a_message_or_refused(content):
    for read in (
        lambda: read_reply(content, 3, torch.float32), lambda: read_request(content, 3, 0, torch.float32),
        lambda: read_report(content), lambda: kind_of(content),
    ):  # fmt: skip
        with contextlib.suppress(Refused):
            read()


def test_a_client_refuses_other_settings(tmp_path):
    """Less noise than was agreed on, say: then nothing is computed, and nothing sent."""
    network = Network(config(privacy=LOCAL), tmp_path)
    weaker = for_server(config(privacy=LOCAL | {"noise_std": 0.1}), tmp_path)
    reply = network.clients[0](request_for(network, 1, 0)._replace(agreed=weaker.agreed))
    assert (reply.status, reply.message) == (REFUSED, None)
    assert "other settings" in reply.why
    assert list((tmp_path / NAMES[0]).iterdir()) == []


@pytest.mark.parametrize("name", ["../up", "", "a/b", "x" * 65])
def test_a_client_writes_only_into_its_folder(tmp_path, name):
    network = Network(config(), tmp_path)
    assert network.clients[0](request_for(network, 1, 0)._replace(run=name)).status == REFUSED
    assert [path.name for path in tmp_path.iterdir()] == [
        *sorted(NAMES, key=list(p.name for p in tmp_path.iterdir()).index)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_vector_survives_its_journey(dtype):
    vector = torch.randn(50, dtype=dtype)
    assert torch.equal(unpacked(packed(vector), 50, dtype, "it"), vector)
    with pytest.raises(Refused, match="bytes"):
        unpacked(packed(vector), 49, dtype, "it")


# settings


def test_what_all_must_agree_on_is_the_same_for_all(tmp_path):
    asked = config(privacy=LOCAL)
    agreed = for_server(asked, tmp_path).agreed
    assert {party(asked, i).agreed for i in range(len(NAMES))} == {agreed}
    free = config(privacy=LOCAL, federation=asked["federation"] | {"deadline": 3.0, "address": "a:1"})
    assert for_server(free, tmp_path).agreed == agreed
    for other in (
        config(privacy=LOCAL | {"noise_std": 0.1}), config(privacy=PRIVATE), config(),
        config(privacy=LOCAL, run={"rounds": 7, "seed": 3, "dtype": "float64"}),
        config(privacy=LOCAL, server={"beta_schedule": "linear"}),
        config(privacy=LOCAL, federation=asked["federation"] | {"clients": [*NAMES, "more"]}),
    ):  # fmt: skip
        assert for_server(other, tmp_path).agreed != agreed


def test_server_and_client_compute_the_same_noise(tmp_path):
    asked = config(privacy={"epsilon": 3.0, "trust": "local"})
    assert for_server(asked, tmp_path).plan.mechanism.noise_std == party(asked, 2).plan.mechanism.noise_std


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"privacy": {"noise_std": 1.0, "trust": "secagg", "protocol": False}}, "a federation runs the protocol"),
        ({"problem": {"name": "quadratic"}}, "clients' examples"),
        ({"method": {"name": "fed_normec", "initial_memory": "local_updates"}}, "start from zero"),
        ({"faults": {"kind": "huge"}}, r"no use for \[faults\]"),
        ({"run": {"checkpoint_rounds": 5}}, "keeps every round"),
        ({"federation": {"clients": ["a", "a"], "inputs": [5], "classes": 3}}, "the same name"),
        ({"federation": {"clients": ["a/b"], "inputs": [5], "classes": 3}}, "letters, digits"),
        ({"federation": {"clients": [], "inputs": [5], "classes": 3}}, "at least one client"),
        ({"federation": {"clients": ["a"], "inputs": [5], "classes": 3, "address": "here"}}, "host:port"),
        ({"federation": {"clients": ["a"], "inputs": [5], "classes": 3, "dedline": 3.0}}, "did you mean 'deadline'"),
    ],
)
def test_what_does_not_fit_is_said_in_a_sentence(tmp_path, sections, said):
    with pytest.raises(UserError, match=said):
        for_server(config(**sections), tmp_path)


def test_a_clients_data_must_be_what_was_agreed_on():
    with pytest.raises(UserError, match=r"agreed on examples of shape \(5,\)"):
        for_client(config(), "north", Examples(np.zeros((3, 4)), np.zeros(3)))
    with pytest.raises(UserError, match="expected labels from 0 to 2, got 7"):
        for_client(config(), "north", Examples(np.zeros((3, 5)), np.full(3, 7)))
    with pytest.raises(UserError, match="none of the clients"):
        for_client(config(), "who", Examples(np.zeros((3, 5)), np.zeros(3)))


LOAD = """
from pathlib import Path
import numpy as np

def own():
    found = np.load(Path(__file__).with_name("own.npz"))
    return found["x"], found["y"]

def broken():
    raise RuntimeError("no")
"""


def test_a_client_brings_data_as_a_file_or_a_function(tmp_path):
    x, y = data()[0]
    np.savez(tmp_path / "own.npz", x=x, y=y)
    (tmp_path / "load.py").write_text(LOAD)
    own = str(tmp_path / "own.npz")
    for source in (own, f"{tmp_path / 'load.py'}:own"):
        assert np.array_equal(own_data(source, config()).x, x)
    np.savez(tmp_path / "nan.npz", x=np.where(np.arange(len(x)) == 2, np.nan, x.T).T, y=y)
    with pytest.raises(
        UserError, match="1 of 8 examples have a number in x that is not finite, the first of them is number 2"
    ):
        own_data(str(tmp_path / "nan.npz"), config())
    with pytest.raises(UserError, match="load.py:broken raised RuntimeError: no"):
        own_data(f"{tmp_path / 'load.py'}:broken", config())
    with pytest.raises(UserError, match="there is no file"):
        own_data(f"{tmp_path / 'none.py'}:own", config())
    with pytest.raises(UserError, match="nowhere.to_be_found cannot be imported: it raised ModuleNotFoundError"):
        own_data("nowhere.to_be_found:own", config())


# folders and keys


def test_init_makes_what_each_party_needs(tmp_path):
    folder = make(tmp_path / "fed", ["a", "b"], [5], 3, "fl.example.org:9443", None)
    assert read_federation(folder)["federation"]["clients"] == ["a", "b"]
    for name in ("a", "b"):
        handed = folder / "clients" / name
        handed_over = ["ca.crt", "client.crt", "client.key", "federation.toml"]
        assert sorted(path.name for path in handed.iterdir()) == handed_over
        assert (handed / "client.key").stat().st_mode & 0o777 == 0o600
        assert (handed / "federation.toml").read_text() == (folder / "federation.toml").read_text()
        pair = keys.private_key(handed / "client.key").public_key(), keys.public_key(folder / "keys" / f"{name}.pub")
        assert keys.fingerprint(pair[0]) == keys.fingerprint(pair[1])
        certificate = x509.load_pem_x509_certificate((handed / "client.crt").read_bytes())
        assert keys.fingerprint(certificate.public_bytes(serialization.Encoding.DER)) == keys.fingerprint(pair[0])
    for secret in ("server.key", "authority.key"):
        assert (folder / secret).stat().st_mode & 0o777 == 0o600
    assert not list((folder / "clients").rglob("authority.key"))
    with pytest.raises(UserError, match="is not empty"):
        make(folder, ["a"], [5], 3, "localhost:1", None)


def test_the_certificate_names_the_host_and_this_machine(tmp_path):
    folder = make(tmp_path / "fed", ["a"], [5], 3, "fl.example.org:9443", None)
    leaf = x509.load_pem_x509_certificate((folder / "server.crt").read_bytes())
    root = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    leaf.verify_directly_issued_by(root)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert list(map(str, names.get_values_for_type(x509.IPAddress))) == ["127.0.0.1", "::1"]


def test_one_more_client_is_another_federation(tmp_path):
    folder = make(tmp_path / "fed", ["a"], [5], 3, "localhost:9443", None)
    before = for_server(read_federation(folder), folder).agreed
    assert add(folder, "b") == folder / "clients" / "b"
    assert for_server(read_federation(folder), folder).agreed != before
    assert for_server(read_federation(folder / "clients" / "a"), folder).agreed != before
    own = tmp_path / "own"
    own.mkdir()
    assert add(folder, "c", keys.make_request(own, "c")) == folder / "clients" / "c"
    assert not (folder / "clients" / "c" / "client.key").exists()
    assert keys.fingerprint(keys.public_key(folder / "keys" / "c.pub")) == keys.fingerprint(
        keys.private_key(own / "client.key").public_key()
    )
    assert read_federation(folder)["federation"]["clients"] == ["a", "b", "c"]
    with pytest.raises(UserError, match="the same name"):
        add(folder, "a")
    (folder / "keys" / "gone.pub").write_text("of a client that was removed")
    with pytest.raises(UserError, match="is there already"):
        add(folder, "gone")
    with pytest.raises(UserError, match="no signing request"):
        add(folder, "d", folder / "federation.toml")
    with pytest.raises(UserError, match="is the request of c, not of d"):
        add(folder, "d", own / "client.csr")


def test_one_client_less_is_another_federation(tmp_path):
    folder = make(tmp_path / "fed", ["a", "b"], [5], 3, "localhost:9443", None)
    before = for_server(read_federation(folder), folder).agreed
    remove(folder, "b")
    assert read_federation(folder)["federation"]["clients"] == ["a"]
    assert for_server(read_federation(folder / "clients" / "a"), folder).agreed != before
    assert sorted(path.name for path in (folder / "keys").iterdir()) == ["a.pub"]
    with pytest.raises(UserError, match="at least one client"):
        remove(folder, "a")
    with pytest.raises(UserError, match="unknown client"):
        remove(folder, "b")


def test_a_key_is_revoked_and_another_takes_its_place(tmp_path):
    folder = make(tmp_path / "fed", ["a", "b"], [5], 3, "localhost:9443", None)
    agreed = for_server(read_federation(folder), folder).agreed
    first = roster(folder, ["a", "b"])
    revoke(folder, "b")
    assert roster(folder, ["a", "b"]) == [first[0], None]
    with pytest.raises(UserError, match="revoked before"):
        revoke(folder, "b")
    (tmp_path / "b").mkdir()
    made = sign(folder, keys.make_request(tmp_path / "b", "b"))
    assert roster(folder, ["a", "b"])[1] not in (None, first[1])
    assert sorted(path.name for path in made.iterdir()) == ["ca.crt", "client.crt", "federation.toml"]
    assert for_server(read_federation(folder), folder).agreed == agreed
    with pytest.raises(UserError, match="unknown client"):
        sign(folder, keys.make_request(tmp_path / "b", "who"))


def test_a_new_key_leaves_a_clients_memory_where_it_is(tmp_path):
    """Also one whose folder is used on this machine; and a key that is asked for from there stays."""
    folder = make(tmp_path / "fed", ["a", "b"], [5], 3, "localhost:9443", None)
    home = folder / "clients" / "b"
    (home / "memory-x.safetensors").write_bytes(b"needed")
    sign(folder, keys.make_request(home, "b"))
    assert (home / "client.key").exists()
    (tmp_path / "b").mkdir()
    sign(folder, keys.make_request(tmp_path / "b", "b"))
    assert not (home / "client.key").exists()
    remove(folder, "b")
    assert (home / "memory-x.safetensors").read_bytes() == b"needed"


@pytest.mark.parametrize("method", ["fed_normec", "scaffold", "centred", "fed_normec_adaptive", "dp_fed_avg_clip"])
def test_a_client_takes_requests_as_long_as_the_server_makes_them(tmp_path, method):
    scaling = {"server": {"scaling": True}} if method == "dp_fed_avg_clip" else {}
    asked = config(method={"name": method}, **scaling)
    network = Network(asked, tmp_path)
    next(network.rounds())
    longest = [len(request_bytes(request)) for request in network.requests[-1].values()]
    assert max(longest, default=1) <= longest_request(party(asked, 0)) <= max(longest, default=1) + MOST_SAID


def test_certificates_are_renewed_for_the_same_keys(tmp_path):
    folder = make(tmp_path / "fed", ["a", "b"], [5], 3, "fl.example.org:9443", None)
    before, known = (folder / "server.crt").read_bytes(), roster(folder, ["a", "b"])
    shutil.rmtree(folder / "clients" / "b")  # handed over
    made = renew(folder, ["10.0.0.7"])
    assert [path.relative_to(folder).as_posix() for path in made] == [
        "server.crt", "clients/a/client.crt", "clients/b/client.crt"
    ]  # fmt: skip
    assert (folder / "server.crt").read_bytes() != before
    assert keys.certified_hosts(folder / "server.crt") == [
        "10.0.0.7",
        "fl.example.org",
        "localhost",
        "127.0.0.1",
        "::1",
    ]
    for client, path in enumerate(made[1:]):
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        assert keys.fingerprint(certificate.public_bytes(serialization.Encoding.DER)) == known[client]


def test_a_certificate_says_when_it_ends():
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    for begins, ends, wrong, soon in (
        (now - day, now + 31 * day, None, None),
        (now - day, now + 29 * day, None, "it expires on "),
        (now - 2 * day, now - day, "it expired on ", None),
        (now + day, now + 2 * day, "it holds from ", None),
    ):
        found = keys.Validity(begins, ends).trouble("it", "make a new one")
        for said, expected in zip(found, (wrong, soon), strict=True):
            assert (said is None) == (expected is None)
            assert said is None or said.startswith(expected)


def test_the_statement_says_who_must_be_trusted_and_what_drop_outs_mean(tmp_path):
    for privacy, trust, drop_outs in (
        (PRIVATE, "an aggregator is trusted", "noise is, whatever arrives"),
        (LOCAL, "nobody is trusted with an exact message", "a message that does not come"),
    ):
        plan = for_server(config(privacy=privacy), tmp_path).plan
        text = " ".join(state(plan, 3, 0, besides(plan)).text.split())
        assert trust in text
        assert drop_outs in text
        assert "drop-outs" in text
        assert "HTTPS" in text


def test_under_local_trust_the_promise_is_that_of_being_asked_in_every_round(tmp_path):
    """The server draws who is asked, and nobody trusts it: noise and ε are those of full participation."""
    for asked in ({"epsilon": 3.0}, {"noise_std": 2.0}):
        half = party(config(privacy={"trust": "local"} | asked), 0).plan
        every = party(config(privacy={"trust": "local"} | asked, participation={"name": "full"}), 0).plan
        assert half.mechanism.participation.rate(4) == 0.7
        assert half.mechanism.release() == every.mechanism.release()
        assert half.epsilon(6) == every.epsilon(6) == half.mechanism.epsilon(6, 1e-5)
        assert promise(half) == promise(every)
        said = " ".join(state(half, 3).text.split())
        assert "it may ask whom it likes" in said and "a share of 0.7 in a round if the server draws as agreed" in said
        assert "drawn honestly" not in said and state(half, 3).facts["p_accounted"] == 1.0
    central = party(config(privacy={"epsilon": 3.0, "trust": "central"}), 0).plan
    assert central.mechanism.p == 0.7
    with pytest.raises(UserError, match="nobody trusts the server"):
        for_server(config(privacy={"epsilon": 3.0, "trust": "local", "draws": "honest"}), tmp_path)


def test_a_client_is_told_what_is_promised_and_whom_it_trusts():
    said = promise(party(config(privacy={"epsilon": 3.0, "trust": "local"}), 0).plan)
    assert said.startswith("this federation promises, after 6 rounds, ε ≤ 3.00 at δ = 1e-05 for each client (local")
    assert "nobody is trusted with an exact message" in said
    assert "nothing" in promise(None)


# the commands


def test_mistakes_get_a_sentence(fednormec_: Command, tmp_path):
    words = ("--clients", "north,south", "--inputs", "5", "--classes", "3", "--not-private")
    made = fednormec_("federation", "init", "fed", *words)
    assert made.code == 0
    assert "fed/clients/north: for north" in made.out
    np.savez(tmp_path / "own.npz", x=data()[0][0], y=data()[0][1])
    for arguments, said in (
        (("init", "fed", "--not-private"), "is not empty"),
        (("init", "other", "--inputs", "a"), "--inputs takes whole numbers"),
        (("init", "other", "--inputs", "99999999999", "--classes", "3"), "one example would take"),
        (("init", "other", "--clients", "a b"), "letters, digits"),
        (("serve", "nowhere"), "there is no config file"),
        (("serve", "fed", "--wait-for", "3", "--not-private"), "--wait-for must be from 1 to 2"),
        (("serve", "fed", "--port", "99999", "--not-private"), "--port must be from 1 to 65535"),
        (("serve", "fed", "--port", "0", "--not-private"), "--port must be from 1 to 65535"),
        (("join", "fed/clients/north", "--data", "none.npz"), "none.npz"),
        (("join", "fed/clients/north", "--data", "own.npz", "--address", "https://fl.example.org:1", "--not-private"),
         "without a scheme: fl.example.org:1"),
        (("join", "fed/clients/north", "--data", "own.npz", "--name", "who"), "none of the clients"),
        (("add", "fed", "north"), "the same name"),
    ):  # fmt: skip
        found = fednormec_("federation", *arguments)
        assert found.code == 2, arguments
        assert said in sentence(found.err)


def test_init_says_what_can_be_learnt(fednormec_: Command, tmp_path):
    asked = {"method": {"name": "fed_normec"}, "privacy": {"epsilon": 8.0, "trust": "local"}, "run": {"rounds": 60}}
    (tmp_path / "few.toml").write_text(
        dump({"model": {"name": "linear"}, "local": {"name": "gd", "step": 0.5}} | asked)
    )
    few = fednormec_("federation", "init", "few", "few.toml", "--clients", "3", "--inputs", "20", "--classes", "2")
    ratio, warning = few.err.splitlines()
    assert few.code == 0
    assert ratio == "note: noise to signal: at least 17 in a round, 2.2 over all 60 rounds."
    assert warning.startswith("note: nothing can be learnt: ")
    (tmp_path / "many.toml").write_text("[local]\nstep = 0.1\n[privacy]\nnoise_std = 0.01\n")
    many = fednormec_("federation", "init", "many", "many.toml", "--clients", "9", "--inputs", "5", "--classes", "3")
    assert many.code == 0
    assert len(many.err.splitlines()) == 1
    (tmp_path / "poor.toml").write_text("[local]\nstep = 0.1\n[privacy]\nnoise_std = 0.01\nepsilon = 1.0\n")
    poor = fednormec_("federation", "init", "poor", "poor.toml", "--clients", "9", "--inputs", "5", "--classes", "3")
    assert poor.code == 2
    assert "does not pay for one round" in sentence(poor.err)
    assert not (tmp_path / "poor").exists()


def test_nobody_takes_part_in_what_protects_nobody_unasked(fednormec_: Command, tmp_path):
    plain = "[local]\nstep = 0.1\n"
    (tmp_path / "plain.toml").write_text(plain)
    (tmp_path / "seeded.toml").write_text(plain + "[privacy]\nnoise_std = 1.0\n")
    np.savez(tmp_path / "own.npz", x=data()[0][0], y=data()[0][1])
    total = '[privacy]\nnoise_std = 1.0\nnoise_scale = "total_norm"\nrandomness = "secure"\n'
    (tmp_path / "total.toml").write_text(plain + total)
    for name, said in (("seeded", "seeded noise"), ("plain", "no [privacy]"), ("total", "protects nobody")):
        fednormec_("federation", "init", name, f"{name}.toml", "--clients", "2", "--inputs", "5", "--classes", "3")
        for arguments in (("serve", name), ("join", f"{name}/clients/client-1", "--data", "own.npz")):
            found = fednormec_("federation", *arguments)
            assert found.code == 2
            assert said in sentence(found.err)
            assert "--not-private" in found.err


def test_a_federation_that_has_come_to_its_end_says_so(fednormec_: Command, tmp_path):
    """Without waiting for clients."""
    fednormec_("federation", "init", "fed", "--clients", "2", "--inputs", "5", "--classes", "3", "--not-private")
    run = tmp_path / "fed" / "run"
    run.mkdir()
    for name in ("config.toml", "metrics.jsonl"):
        (run / name).write_text("")
    summary = {"method": "m", "rounds": 1, "metrics": {}, "status": "done", "left_out": 0, "privacy": "p", "clients": 2}
    (run / "summary.json").write_text(json.dumps(summary | {"parameters": 3, "not_private": []}))
    found = fednormec_("federation", "serve", "fed", "--not-private")
    assert found.code == 0
    assert "has come to its end already" in found.err


def test_without_what_it_needs_the_commands_say_how_to_get_it(fednormec_: Command, monkeypatch):
    monkeypatch.setattr("fednormec.cli.federation.find_spec", lambda name: None)
    found = fednormec_("federation", "serve", "fed")
    assert (found.code, sentence(found.err)) == (2, "a federation needs h11: pip install 'fednormec[federation]'.")
