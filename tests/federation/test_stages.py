"""Secure aggregation in a federation: exact sums, drop-outs, attempts, what is counted, and what an attacker gets."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from masked import SECAGG, Summed, settings

import fednormec as fn
from fednormec.config.schema import read
from fednormec.core.participation import Cohort
from fednormec.engine.together import ATTEMPTS, STAGES
from fednormec.errors import UserError
from fednormec.federation.agreement import for_server
from fednormec.federation.messages import REFUSED, framed, read_stage_reply, stage_bytes, unframed
from fednormec.federation.provision import needs_keys, remove
from fednormec.federation.stages import keys_of
from fednormec.privacy.mechanism import Mechanism, Plan
from fednormec.privacy.statement import state
from fednormec.secagg.member import Member


@pytest.fixture
def network(tmp_path: Path) -> Summed:
    return Summed(settings(tmp_path), tmp_path)


def plan_of(network: Summed) -> Plan:
    assert network.server.plan is not None
    return network.server.plan


def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mechanism, "own_noise", lambda self, dim: np.zeros(dim, np.int64))


def test_the_sum_is_that_of_the_messages_to_the_last_unit(network: Summed, monkeypatch: pytest.MonkeyPatch) -> None:
    without_noise(monkeypatch)
    for r in network.rounds():
        assert r.sent == 4 and r.releases == r.number
        assert torch.equal(r.released, sum(network.message(i) for i in range(4)))
        mean = sum(network.store(i).load().memory for i in range(4)) / 4
        assert torch.allclose(r.server.memory, mean, rtol=0, atol=1e-12)


def test_noise_is_each_clients_own_and_has_the_std_that_was_agreed(network: Summed) -> None:
    rest = [(r.released - sum(network.message(i) for i in range(4))).numpy() for r in network.rounds()]
    plan = network.server.plan
    assert plan is not None and plan.mechanism.grid is not None
    scaled = np.concatenate(rest) / (plan.mechanism.noise_std * plan.mechanism.radius * 2)
    assert 0.6 < scaled.std() < 1.5 and len(set(scaled.tolist())) > 50
    units = np.concatenate(rest) / plan.mechanism.grid.unit
    assert (units == units.round()).all()


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_goes_missing_at_any_stage_is_no_trouble(
    network: Summed, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four are enough; whoever is in the sum counts, and nobody else's memory moves."""
    without_noise(monkeypatch)
    network.before = lambda client, name: client != 2 or STAGES.index(name) < STAGES.index(stage)
    rounds = network.rounds()
    r = next(rounds)
    heard = {0, 1, 3} | ({2} if STAGES.index(stage) > STAGES.index("masked") else set())
    assert set(r.cohort.computing.tolist()) == heard and r.sent == len(heard) and r.missed == 4 - len(heard)
    assert torch.equal(r.released, sum(network.message(i) for i in heard))
    assert r.memory[:, 0].tolist() == [1.0, 1.0, 1.0 if 2 in heard else 0.0, 1.0]
    network.before = lambda client, name: True
    for r in rounds:
        counted = [network.store(i).load() for i in range(4)]
        mean = sum(kept.memory for kept in counted) / 4
        assert r.sent == 4 and torch.allclose(r.server.memory, mean, rtol=0, atol=1e-12)


def test_a_failed_attempt_is_a_release_of_its_own_with_new_noise_and_the_same_message(
    network: Summed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each vector, before it is masked, what is left without the message is noise that was never drawn before."""
    paid, noises, messages = list[int](), list[np.ndarray](), set[bytes]()
    network.before = lambda client, name: (
        not (name == "unmask" and client > 1 and network.calls.count((0, "keys")) == 1)
    )
    masked, mechanism = Member.masked, plan_of(network).mechanism
    assert mechanism.grid is not None
    unit = mechanism.grid.unit

    def seen(self: Member, boxes: bytes, vector: np.ndarray) -> bytes:
        answer = masked(self, boxes, vector)
        if len(noises) == network.calls.count((0, "masked")) - 1:  # client 0 is asked first
            message = network.message(0)
            messages.add(message.numpy().tobytes())
            noises.append(vector.view(np.int32) - (message / unit).numpy().astype(np.int64))
        return answer

    monkeypatch.setattr(Member, "masked", seen)
    r = next(network.rounds(pay=lambda number, plan: paid.append(number)))
    assert paid == [1, 1] and r.releases == 2 and r.number == 1 and r.sent == 4
    assert len(noises) == 2 and len(messages) == 1
    assert min(np.mean(noises[0] != 0), np.mean(noises[1] != 0), np.mean(noises[0] != noises[1])) > 0.8
    assert json.loads((network.home(0) / "releases.json").read_text())[network.server.agreed]["releases"] == 2
    assert any("attempt 1 of 3" in said for said in network.said)


def test_a_round_that_comes_to_no_sum_is_paid_for_and_moves_no_memory(network: Summed) -> None:
    network.before = lambda client, name: name != "agree" or client == 0
    r = next(network.rounds())
    assert (
        r.sent == 0
        and not r.released.any()
        and r.releases == ATTEMPTS
        and r.missed == 4
        and r.memory[:, 0].tolist() == [0.0] * 4
    )


def test_attempts_stop_where_the_budget_does(tmp_path: Path) -> None:
    private = {"epsilon": 2.0, "trust": "secagg", "min_survivors": 3}
    network = Summed(settings(tmp_path, privacy=private), tmp_path)
    network.before = lambda client, name: not (name == "unmask" and client)
    rounds = list(network.rounds())
    assert rounds[-1].releases == 6 and len(rounds) == 2 and rounds[-1].last
    assert rounds[-1].epsilon <= 2.0
    for client in range(4):  # and clients count for themselves
        count = json.loads((network.home(client) / "releases.json").read_text())
        assert count[network.server.agreed]["releases"] == 6


def test_a_client_refuses_beyond_its_budget_whatever_the_server_asks(tmp_path: Path) -> None:
    network = Summed(settings(tmp_path), tmp_path)
    list(network.rounds())
    network.run = "b"  # the server gives the training another name
    assert next(network.rounds()).sent == 0
    assert any("budget" in said for said in network.told)


def test_a_client_sends_no_message_of_its_own(network: Summed) -> None:
    """A server that asks as under another trust model gets nothing."""
    seen = list[bytes]()
    network.between = lambda client, stage, asked, answer: seen.append(asked) or answer  # type: ignore[func-returns-value]
    next(network.rounds())
    first = next(data for data in seen if unframed(data)[0]["kind"] == "keys")
    said, vectors = unframed(first)
    for kind in ("train", "report"):
        answer = network.clients[0](framed(said | {"kind": kind}) + vectors)
        assert unframed(answer)[0]["status"] == REFUSED and len(answer) < 400


def test_a_client_that_was_restarted_in_the_middle_has_dropped_out(network: Summed) -> None:
    def before(client: int, stage: str) -> bool:
        if client == 3 and stage == "agree":
            network.clients[3] = network.started(3)
        return True

    network.before = before
    r = next(network.rounds())
    assert r.sent == 4  # its masked vector came; the others open the sum
    assert any("restarted" in said for said in network.told)
    network.before = lambda client, stage: True


def test_the_same_request_again_gets_the_same_bytes(network: Summed) -> None:
    twice = dict[str, bool]()

    def between(client: int, stage: str, asked: bytes, answer: bytes) -> bytes:
        twice[stage] = twice.get(stage, True) and network.clients[client](asked) == answer
        return answer

    network.between = between
    r = next(network.rounds())
    assert r.sent == 4 and twice == dict.fromkeys(STAGES, True)
    count = json.loads((network.home(0) / "releases.json").read_text())
    assert count[network.server.agreed]["releases"] == 1


@pytest.mark.parametrize("stage", STAGES)
def test_garbage_from_a_client_leaves_it_out_and_harms_nobody(network: Summed, stage: str) -> None:
    def between(client: int, name: str, asked: bytes, answer: bytes) -> bytes:
        return answer[: len(answer) // 2] if client == 1 and name == stage else answer

    network.between = between
    r = next(network.rounds())
    assert r.sent >= 3


def test_a_sum_that_cannot_be_one_is_paid_for_and_not_used(network: Summed, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]

    def loud(self: Mechanism, dim: int) -> np.ndarray:
        calls[0] += 1
        return np.full(dim, 2**29 if calls[0] == 1 else 0, np.int64)

    monkeypatch.setattr(Mechanism, "own_noise", loud)
    rounds = network.rounds()
    r = next(rounds)
    assert r.sent == 0 and not r.released.any() and r.releases == 1
    assert any("cannot be one of 4 messages" in said for said in network.said)
    assert next(rounds).sent == 4


def test_a_request_of_another_cohort_or_roster_is_refused(network: Summed) -> None:
    seen = list[bytes]()
    network.between = lambda client, stage, asked, answer: seen.append(asked) or answer  # type: ignore[func-returns-value]
    next(network.rounds())
    first = next(data for data in seen if unframed(data)[0]["kind"] == "keys")
    said, vectors = unframed(first)
    for wrong in ({"cohort": "e"}, {"cohort": "3"}, {"cohort": "1f"}, {"cohort": "x"}, {"cohort": ""}, {"attempt": -1},
                  {"agreed": "other"}, {"attempt": True}, {"cohort": 15}, {"run": "../x"}):  # fmt: skip
        answer = read_stage_reply(network.clients[0](framed(said | wrong) + vectors))
        assert answer.status == REFUSED and not answer.body, wrong
    for stage in STAGES[1:]:
        answer = read_stage_reply(network.clients[0](stage_bytes(stage, b"n" * 16, b"")))
        assert answer.status == REFUSED and not answer.body


def test_idle_clients_move_their_memory_and_are_in_no_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cohorts are fixed here: in each of these rounds enough clients are drawn."""
    without_noise(monkeypatch)
    drawn = [[0, 1, 2], [1, 3], [0, 1, 2, 3], [2, 3], [0, 3], [1, 2, 3]]
    monkeypatch.setattr(
        Mechanism, "cohort", lambda self, seed, number: Cohort(np.arange(4), np.isin(np.arange(4), drawn[number - 1]))
    )
    asked = settings(
        tmp_path, participation={"name": "poisson", "p": 0.8, "idle": "advance"}, privacy=SECAGG | {"min_survivors": 2}
    )
    network = Summed(asked, tmp_path)
    for r, expected in zip(network.rounds(), drawn, strict=True):
        senders = r.cohort.computing[r.cohort.sending].tolist()
        assert r.computed == 4 and senders == expected
        total = sum((network.message(i) for i in senders), torch.zeros(len(r.released), dtype=torch.float64))
        assert torch.equal(r.released, total)


def test_keys_are_part_of_what_all_agree_on(tmp_path: Path) -> None:
    asked = settings(tmp_path)
    assert needs_keys(asked) and len(asked["federation"]["keys"]) == 4
    other = asked | {"federation": asked["federation"] | {"keys": asked["federation"]["keys"][::-1]}}
    assert for_server(asked, tmp_path).agreed != for_server(other, tmp_path).agreed
    with pytest.raises(UserError, match="is not the key that federation.toml has"):
        Summed(other, tmp_path)
    for keys, why in (
        ([f"0{n}" * 33 for n in range(5, 9)], "is no public key"),
        (asked["federation"]["keys"][:3], "none there: west"),
        ([*asked["federation"]["keys"], "02"], "there are 5 for 4"),
        (asked["federation"]["keys"][:1] * 4, "north and south have the same key"),
    ):
        wrong = asked | {"federation": asked["federation"] | {"keys": keys}}
        with pytest.raises(UserError, match=why):
            keys_of(for_server(wrong, tmp_path))
    remove(tmp_path / "fed", "east")
    assert len(read(tmp_path / "fed" / "federation.toml")["federation"]["keys"]) == 3


@pytest.mark.parametrize("colluders, sent", [(0, 3), (2, 0)])
def test_with_colluders_more_must_stay(tmp_path: Path, colluders: int, sent: int) -> None:
    """All four must sign where two may collude, ⌊(4 + 2)/2⌋ + 1; three are enough where none does."""
    network = Summed(settings(tmp_path, privacy=SECAGG | {"colluders": colluders}), tmp_path)
    rounds = network.rounds()
    assert next(rounds).sent == 4
    network.before = lambda client, name: client != 2 or name == "keys"
    assert next(rounds).sent == sent


def test_the_statement_says_what_the_protocol_promises_and_what_it_takes_to_be_so(network: Summed) -> None:
    *_, last = network.rounds()
    assert last.plan is not None
    statement = state(last.plan, last.releases, one_program=False)
    said = " ".join(statement.text.split())
    for part in (
        "noisy sums alone, over 3 messages or more", "ask whom it likes", "a sum has 3 messages or more",
        "discrete Gaussian", "what secure aggregation takes to be so", "one of them can spoil a sum",
    ):  # fmt: skip
        assert part in said, part
    assert "gaps between floating-point" not in said and "drawn honestly" not in said
    assert "whoever runs the program" not in said and not statement.facts["one_program"]
    facts = last.statement.facts
    assert facts["protocol"] and facts["min_survivors"] == 3 and facts["p_accounted"] == 1.0


def test_epsilon_counts_the_noise_of_the_least_honest_sum() -> None:
    """Whoever is asked in every round, with 3 of 4 in the sum of whom 1 colludes, is hidden by two noises."""
    problem = fn.random_quadratic(4, 6, seed=0)
    asked = fn.Privacy(noise_std=3.0, trust="secagg", protocol=True, min_survivors=3, colluders=1)
    last = fn.train(problem, fn.dp_fed_avg_clip(fn.gd(0.1)), fn.full(), asked, rounds=2)
    plain = fn.Mechanism(4, fn.full(), 3.0 * 2**0.5)
    assert last.statement.epsilon == pytest.approx(plain.epsilon(2, 1e-5), rel=1e-9)
