"""A federation over HTTPS on loopback, with the server and its clients in this process: who is let in, who is asked,
who is waited for, and what a hostile peer can do."""

import contextlib
import http.client
import json
import math
import socket
import ssl
import threading
import time

import numpy as np
import pytest
import torch
from federated import CLASSES, DIM, FEATURES, NAMES, config, party
from processes import until
from wired import MOST, Asking, ByHand, Running, advance, running

from fednormec.data import Examples
from fednormec.errors import UserError, note
from fednormec.federation import https, keys, node, transport
from fednormec.federation.agreement import for_client
from fednormec.federation.client import answering, client_of
from fednormec.federation.ending import ending
from fednormec.federation.https import Listen
from fednormec.federation.log import Seldom
from fednormec.federation.messages import DONE, REPORT, Request, read_reply, read_request, request_bytes
from fednormec.federation.node import Server, Taking, ask_once, take_part
from fednormec.federation.provision import make, revoke, sign
from fednormec.federation.reports import as_report
from fednormec.federation.transport import differences


@pytest.fixture(autouse=True)
def _short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "POLL", 0.5)
    monkeypatch.setattr(node, "LONGEST", 0.3)


# what is carried


def test_the_wire_carries_requests_and_answers(tmp_path):
    with running(tmp_path) as found:
        for client in range(3):
            found.join(client)
        until(lambda: len(found.link.here()) == 3)
        answers = Asking(found, {i: found.request(1) for i in range(4)}).ended()
        assert sorted(answers) == [0, 1, 2]  # nobody waits for one that never came
        for client, data in answers.items():
            (tmp_path / NAMES[client]).mkdir()
            direct = answering(party(found.asked, client), client, tmp_path / NAMES[client])(
                read_request(found.request(1), DIM, 0, torch.float64)
            )
            assert torch.equal(read_reply(data, DIM, torch.float64).message, direct.message)
        found.link.finish(ending(tmp_path / "none"))
        for thread in found.threads:
            thread.join(20)
            assert not thread.is_alive()
    assert [line.split(",")[0] for line in found.log[:3]] == [f"{line.split()[0]} has joined" for line in found.log[:3]]


def test_the_wire_carries_reports(tmp_path):
    """Clients that let themselves be asked answer; one whose settings say no is not let in."""
    asked = config()
    yes = asked | {"federation": asked["federation"] | {"report": True}}
    with running(tmp_path, yes) as found:
        found.join(0)
        until(lambda: len(found.link.here()) == 1)
        x = torch.ones(DIM, dtype=torch.float64)
        request = Request("a", found.server.agreed, 0, 0, False, b"n" * 16, x)
        answers = Asking(found, {i: request_bytes(request, REPORT) for i in (0, 1)}).ended()
        found.asked = asked
        with pytest.raises(UserError, match="federation.report is true with the server and not set with the client"):
            take_part(Server(f"localhost:{found.port}", found.secured(1)), found.taking(1))
    assert set(answers) == {0}
    own = party(yes, 0).report(x)
    report = as_report(answers[0])
    assert (report.name, report.value) == ("accuracy", own.values[0])


def test_the_wire_carries_little_more_than_the_vectors(tmp_path):
    """What the server counts against d numbers each way, in float32; headers and TLS are not in it."""
    features = 5_000
    asked = config(run={"rounds": 3, "seed": 0}, participation={"name": "full"}, local={"name": "gd", "step": 0.1})
    asked["federation"] = asked["federation"] | {"inputs": [features]}
    folder = make(tmp_path / "fed", NAMES, [features], CLASSES, "localhost:1", None)
    dim, rng = (features + 1) * CLASSES, np.random.default_rng(0)
    found = Running(folder, asked)
    own = Examples(rng.standard_normal((4, features)).astype(np.float32), np.array([0, 1, 2, 0]))
    mine = for_client(asked, NAMES[0], own)
    answer = client_of(mine, 0, found.home(0), found.said.append)
    found.taking = lambda client: Taking(  # type: ignore[method-assign]
        mine.agreed, mine.terms, answer, MOST, found.stopped.is_set, found.said.append
    )
    with found.link.listening(Listen("127.0.0.1", 0, keys.for_serving(folder))) as found.port:
        found.join(0)
        until(lambda: bool(found.link.here()))
        request = Request("a", mine.agreed, 1, 0, True, b"n" * 16, torch.randn(dim))
        answers = found.link.ask({0: request_bytes(request)}, 20.0)
        down, up, payload = found.link.sent, found.link.received, 4 * dim
        found.leave()
    assert read_reply(answers[0], dim, torch.float32).status == DONE
    assert payload < down < payload + 300
    assert payload < up < payload + 300


# who is waited for


def test_a_round_has_a_deadline_and_patience_with_the_silent_shrinks(tmp_path):
    """A client fetches its requests and never answers."""
    with running(tmp_path) as found:
        for client in (0, 1):
            found.join(client)
        until(lambda: len(found.link.here()) == 2)
        silent = ByHand(found, 2)
        first = Asking(found, {i: found.request(1) for i in (0, 1, 2)}, deadline=40.0)
        silent.fetch()
        until(lambda: [seat.asked is not None and seat.asked.answer is not None
                       for seat in found.link._seats[:2]] == [True] * 2)  # fmt: skip
        advance(found, 30.0)
        time.sleep(1.0)
        assert first.goes_on()
        advance(found, 15.0)
        assert sorted(first.ended()) == [0, 1]
        second = Asking(found, {i: found.request(2, 1) for i in (0, 1, 2)}, deadline=40.0)
        silent.fetch()
        advance(found, 20.5)  # half the deadline, this time
        assert sorted(second.ended()) == [0, 1]
        assert [one.missed for one in found.link.status()] == [0, 0, 2, 0]


def test_a_client_that_comes_back_within_a_round_is_asked_again(tmp_path):
    """It fetched its request and died; started anew with the same key it answers in the same round."""
    with running(tmp_path) as found:
        first = ByHand(found, 0)
        asking = Asking(found, {0: found.request(1)})
        first.fetch()
        first.close()
        assert asking.goes_on()
        found.join(0)
        assert list(asking.ended()) == [0]
        assert [line.split(",")[0] for line in found.log] == ["north has joined", "north is back"]
        assert found.log[1].endswith("a new process")


def test_a_round_that_nobody_can_be_asked_in_waits(tmp_path):
    """However long that takes; it can be stopped, and then there was no round."""
    with running(tmp_path) as found:
        stop = threading.Event()
        asking = Asking(found, {0: found.request(1), 1: found.request(1)}, 5.0, stop.is_set)
        advance(found, 1e6)
        time.sleep(1.0)
        assert asking.goes_on()
        assert found.log == ["nobody of the 2 clients that are asked is here: the round waits"]
        stop.set()
        assert asking.ended() == {}
        assert isinstance(asking.failed, KeyboardInterrupt)
        asking = Asking(found, {0: found.request(1), 1: found.request(1)}, 5.0)
        found.join(1)
        assert list(asking.ended()) == [1]


def test_time_that_the_server_slept_does_not_count(tmp_path, monkeypatch):
    """As if it had been stopped for an hour: nobody is taken for gone. No clock on a wall is asked."""
    with running(tmp_path) as found:
        found.join(0)
        until(lambda: found.link.here() == {0})
        real = time.monotonic
        monkeypatch.setattr(transport.time, "monotonic", lambda: real() + 3600)
        monkeypatch.setattr(transport.time, "time", lambda: 0.0)
        time.sleep(1.0)
        assert found.link.here() == {0}
        assert list(Asking(found, {0: found.request(1)}, 5.0).ended()) == [0]


def test_a_client_that_computes_for_long_hands_in_its_answer_all_the_same(tmp_path, monkeypatch):
    """Longer than a connection may be idle, and without computing anything twice."""
    monkeypatch.setattr(https, "IDLE", 0.8)
    computed = []

    def slowly(data: bytes) -> bytes:
        computed.append(data)
        time.sleep(2.0)
        return b"x"

    with running(tmp_path) as found:
        found.join(0, answer=slowly)
        until(lambda: found.link.here() == {0})
        assert Asking(found, {0: found.request(1)}).ended() == {0: b"x"}
        assert len(computed) == 1
        assert not any("does not answer" in line for line in found.said)


def test_a_client_at_work_is_here_and_keeps_its_place(tmp_path):
    """However long it computes: a second process with its key does not get in, and the log does not say that it is
    gone. Once its connection has ended it is."""
    with running(tmp_path) as found:
        working = ByHand(found, 0, "honest")
        asking = Asking(found, {0: found.request(1)}, deadline=600.0)
        working.fetch()
        advance(found, 400.0)
        time.sleep(0.6)
        assert found.link.here() == {0}
        assert ByHand(found, 0, joins=False).join("a copy")[0] == 423
        working.post("/answer", b"x", request=working.name)
        assert asking.ended() == {0: b"x"}
        assert [line.split(",")[0] for line in found.log] == ["north has joined", "refused north"]
        asking = Asking(found, {0: found.request(2)}, deadline=600.0)
        working.fetch()
        advance(found, 100.0)
        working.close()
        until(lambda: any("is gone (" in line for line in found.log))
        assert found.link.here() == set()
        assert ByHand(found, 0, "started anew").fetch()
        advance(found, 700.0)
        asking.ended()


def test_the_log_says_who_comes_goes_and_comes_back(tmp_path):
    with running(tmp_path) as found:
        one = ByHand(found, 0, "first")
        assert one.post("/next")[0] == 204
        advance(found, 40.0)
        until(lambda: len(found.log) == 2)
        assert one.post("/next")[0] == 204
        one.post("/leave")
        ByHand(found, 0, "second")
        said = [line.replace("40 s", "N s").replace("41 s", "N s") for line in found.log]
        port = one.connection.sock.getsockname()[1]
        assert said[:4] == [
            f"north has joined, from 127.0.0.1:{port}", "north is gone (last heard of N s ago)",
            f"north is back, from 127.0.0.1:{port}", "north has left",
        ]  # fmt: skip
        assert said[4].startswith("north is back, from 127.0.0.1:") and said[4].endswith("a new process")


@pytest.mark.parametrize("state", ["never came", "revoked", "gone"])
def test_a_round_of_clients_that_cannot_come_ends_while_others_are_here(tmp_path, state):
    """Where few are drawn they may all be away: that is a round without them, not the end of the training."""
    with running(tmp_path) as found:
        if state != "never came":
            ByHand(found, 0).connection.close()
        if state == "revoked":
            revoke(found.folder, "north")
            until(lambda: any("no longer served" in line for line in found.log))
        found.join(1)
        until(lambda: 1 in found.link.here())
        asking = Asking(found, {0: found.request(1)}, 600.0)
        if state == "gone":  # its link may be cut
            advance(found, 60.0)
            time.sleep(0.6)
            assert asking.goes_on()
            advance(found, 60.0)
        assert asking.ended() == {}
        assert found.link.ask({}, 600.0) == {}


@pytest.mark.parametrize("how", ["asks for work that it does not take", "joins again and again"])
def test_a_client_that_is_here_and_does_not_answer_is_waited_for_less_each_time(tmp_path, how):
    """Whatever it does instead. Who only sends answers to nothing is not heard of."""
    with running(tmp_path) as found:
        member, honest = ByHand(found, 0), ByHand(found, 1)
        for number, patience in enumerate((40.0, 20.0, 10.0), 1):
            asking = Asking(found, {0: found.request(number), 1: found.request(number)}, 40.0)
            honest.fetch()
            honest.post("/answer", b"x", request=honest.name)
            if how.startswith("joins"):
                member.session = json.loads(member.join("i")[1])["session"]
            else:
                member.fetch()
            advance(found, patience - 3.0)
            for _ in range(2):
                assert member.post("/answer", b"y", request="of nothing")[0] == 410
            time.sleep(0.4)
            assert asking.goes_on()
            advance(found, 4.0)
            assert asking.ended() == {1: b"x"}
            assert found.link.status()[0].missed == number


def test_answers_to_nothing_keep_nobody_waited_for(tmp_path):
    with running(tmp_path) as found:
        member, honest = ByHand(found, 0), ByHand(found, 1)
        asking = Asking(found, {0: found.request(1), 1: found.request(1)}, 600.0)
        honest.fetch()
        honest.post("/answer", b"x", request=honest.name)
        for _ in range(4):
            advance(found, 30.0)
            assert member.post("/answer", b"y", request="of nothing")[0] in (401, 410)
        assert asking.ended() == {1: b"x"}


def test_a_round_waits_for_a_client_whose_link_was_cut_for_a_minute_and_not_for_ever(tmp_path):
    with running(tmp_path) as found:
        there, away = ByHand(found, 0), ByHand(found, 1)
        asking = Asking(found, {0: found.request(1), 1: found.request(1)})
        there.fetch()
        there.post("/answer", b"x", request=there.name)
        away.close()  # without a goodbye
        advance(found, 60.0)
        assert found.link.here() == set()
        assert not asking.answers
        back = ByHand(found, 1, instance="another process")
        back.fetch()
        back.post("/answer", b"y", request=back.name)
        assert asking.ended() == {0: b"x", 1: b"y"}
        asking = Asking(found, {0: found.request(2), 1: found.request(2)})
        back.fetch()
        back.post("/answer", b"z", request=back.name)
        advance(found, 91.0)
        assert asking.ended() == {1: b"z"}


def test_an_answer_after_the_end_of_a_round_is_not_taken(tmp_path):
    with running(tmp_path) as found:
        late = ByHand(found, 0)
        first = Asking(found, {0: found.request(1)}, deadline=8.0)
        late.fetch()
        name = late.name
        advance(found, 9.0)
        assert first.ended() == {}
        assert late.post("/answer", b"x", request=name)[0] == 410
        second = Asking(found, {0: found.request(1)})
        late.fetch()
        assert late.post("/answer", b"x", request=name)[0] == 410
        late.connection.close()  # what was not read is not wanted
        assert late.post("/answer", b"y", request=late.name)[0] == 200
        assert second.ended() == {0: b"y"}
        assert late.post("/answer", b"y", request=late.name)[0] == 410


def test_nothing_piles_up_at_the_server(tmp_path):
    """Answered, withdrawn, for a client that never came: after a round the server holds nothing of it."""
    with running(tmp_path) as found:
        found.join(0)
        until(lambda: found.link.here() == {0})
        for round in (1, 2, 3):
            assert list(Asking(found, {i: found.request(round, round - 1) for i in range(3)}).ended()) == [0]
            assert [seat.asked for seat in found.link._seats] == [None] * 4


# who is who


def test_a_certificate_that_is_not_on_the_roster_is_refused(tmp_path):
    """Although the authority has signed it."""
    with running(tmp_path) as found:
        home = found.home(0)
        (home / "client.key").unlink()
        key = keys.read_request(keys.make_request(home, "north"))[1]
        (home / "client.crt").write_bytes(keys.sign_client(found.folder, "north", key))
        with pytest.raises(UserError, match="of nobody on the roster"):
            take_part(Server(f"localhost:{found.port}", found.secured(0)), found.taking(0))
        assert found.link.here() == set()
        assert found.log[0].startswith("refused north, from 127.0.0.1:")
        assert found.link.status()[0].refused == 1


def test_a_client_of_another_federation_is_not_let_in(tmp_path):
    other = make(tmp_path / "other", NAMES, [FEATURES], CLASSES, "localhost:1", None)
    with running(tmp_path) as found:
        home = other / "clients" / "north"
        (home / "ca.crt").write_bytes((found.folder / "ca.crt").read_bytes())  # it believes the server
        server = Server(f"localhost:{found.port}", keys.for_joining(home))
        with pytest.raises(UserError, match="(it|that) is of another federation"):
            take_part(server, found.taking(0))
        with pytest.raises(UserError, match="(it|that) is of another federation"):
            node.ask_once(server, found.server.agreed, found.server.terms)
        assert found.link.here() == set()


def test_a_server_with_another_certificate_is_not_believed(tmp_path):
    other = make(tmp_path / "other", NAMES, [FEATURES], CLASSES, "localhost:1", None)
    with running(tmp_path) as found:
        (found.home(0) / "ca.crt").write_bytes((other / "ca.crt").read_bytes())
        with pytest.raises(UserError, match="does not prove that it is the federation's server"):
            take_part(Server(f"localhost:{found.port}", found.secured(0)), found.taking(0))


def test_a_server_at_another_address_is_not_believed(tmp_path):
    folder = make(tmp_path / "fed", NAMES, [FEATURES], CLASSES, "localhost:1", None)
    keys.make_server(folder, ["fl.example.org"])
    found = Running(folder, config())
    with (
        found.link.listening(Listen("127.0.0.1", 0, keys.for_serving(folder))) as found.port,
        pytest.raises(UserError, match="names other addresses"),
    ):
        take_part(Server(f"localhost:{found.port}", found.secured(1)), found.taking(1))


@pytest.mark.parametrize("whose", ["server", "client"])
def test_an_expired_certificate_gets_a_sentence(tmp_path, whose):
    folder = make(tmp_path / "fed", NAMES, [FEATURES], CLASSES, "localhost:1", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "VALID", -keys.LEEWAY / 2)
        if whose == "server":
            keys.make_server(folder, ["localhost"])
        else:
            key = keys.public_key(folder / "keys" / "north.pub")
            (folder / "clients" / "north" / "client.crt").write_bytes(keys.sign_client(folder, "north", key))
    found = Running(folder, config())
    with (
        found.link.listening(Listen("127.0.0.1", 0, keys.for_serving(folder))) as found.port,
        pytest.raises(UserError, match="has expired, by the clock here|has expired by the server's clock"),
    ):
        take_part(Server(f"localhost:{found.port}", found.secured(0)), found.taking(0))


def test_a_client_that_is_revoked_is_no_longer_served(tmp_path):
    with running(tmp_path) as found:
        thread = found.join(0)
        until(lambda: found.link.here() == {0})
        revoke(found.folder, "north")
        until(lambda: found.link.here() == set())
        assert "north was revoked and is no longer served" in found.log
        thread.join(30)
        assert not thread.is_alive()
        assert found.said[-1].endswith("this certificate is of nobody on the roster, or was revoked.")


def test_a_key_that_was_replaced_is_no_longer_served(tmp_path):
    """Its question that waits gets no request any more."""
    with running(tmp_path) as found:
        old = ByHand(found, 0)
        (found.home(0) / "client.key").rename(tmp_path / "old.key")
        sign(found.folder, keys.make_request(found.home(0), "north"))
        until(lambda: any("another key now" in line for line in found.log))
        asking = Asking(found, {0: found.request(1)}, 20.0)
        assert old.post("/next")[0] == 403
        ByHand(found, 0, "the new key").fetch()
        advance(found, 1000.0)
        assert asking.ended() == {}


def test_a_roster_that_the_system_does_not_show_stops_nothing(tmp_path, monkeypatch):
    with running(tmp_path) as found:
        monkeypatch.setattr(found.link, "_roster", lambda: (_ for _ in ()).throw(OSError("no handle left")))
        until(lambda: any("the roster stays as it was: no handle left" in line for line in found.log))
        found.join(0)
        assert list(Asking(found, {0: found.request(1)}).ended()) == [0]


def test_a_terminal_that_is_gone_stops_nothing(tmp_path, monkeypatch):
    """Notes are for a person; the server's clock goes on without one."""

    class Gone:
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        flush = write

    monkeypatch.setattr("sys.stderr", Gone())
    note("somebody has joined")
    with running(tmp_path) as found:
        monkeypatch.setattr(found.link, "_log", note)
        one = ByHand(found, 0)
        asking = Asking(found, {0: found.request(1)}, 600.0)
        one.fetch()
        until(lambda: advance(found, 601.0) or not asking.goes_on())
        assert asking.ended() == {}


def test_a_key_that_cannot_be_read_stops_nothing(tmp_path):
    """A file of the roster that is just being written: the server's clock goes on, and so does everybody."""
    with running(tmp_path) as found:
        found.join(0)
        until(lambda: found.link.here() == {0})
        kept = (found.folder / "keys" / "south.pub").read_bytes()
        (found.folder / "keys" / "south.pub").write_bytes(b"")
        until(lambda: any(line.startswith("the roster stays as it was: ") for line in found.log))
        then = found.link._now
        until(lambda: found.link._now > then + 3)
        assert list(Asking(found, {0: found.request(1)}).ended()) == [0]
        (found.folder / "keys" / "south.pub").write_bytes(kept)
        found.join(1)
        until(lambda: found.link.here() == {0, 1})
        assert sum("the roster stays" in line for line in found.log) == 1


def test_other_settings_are_refused_at_once_by_name(tmp_path):
    with running(tmp_path) as found:
        found.asked = config(method=config()["method"] | {"beta": 0.2})
        with pytest.raises(UserError, match="method.beta is 0.3 with the server and 0.2 with the client"):
            take_part(Server(f"localhost:{found.port}", found.secured(0)), found.taking(0))
        assert found.link.here() == set()
        assert sum("refused north" in line for line in found.log) == 1
        assert found.link.status()[0].why_refused.endswith("0.2 with the client")


def test_differences_are_named():
    assert differences({"a": 1, "b": 2}, {"a": 1, "c": "x"}) == (
        'b is 2 with the server and not set with the client; c is not set with the server and "x" with the client'
    )
    assert differences({"a": 1}, {"a": 1}).startswith("the versions of this program")
    server = {"federation.clients": ["north", "south", "east"], "federation.keys": ["02a", "02b", "02c"]}
    assert differences(server, server | {"federation.keys": ["02a", "02c", "02b"]}) == (
        "federation.keys has other keys with the client for south, east"
    )
    assert "south, east, one more" in differences(server, server | {"federation.keys": ["02a", "", "", "02d"]})
    assert differences(server, {}).endswith("federation.keys are not set with the client")
    assert differences({str(i): i for i in range(9)}, {}).endswith(", and 6 more")
    assert "\x1b" not in differences({}, {"\x1b[2J": 1})  # nothing that a terminal would obey


def test_two_processes_with_one_identity_are_told_apart(tmp_path):
    """Whoever was first stays, as long as it is there; both addresses are named."""
    with running(tmp_path) as found:
        first = ByHand(found, 0, "first")
        second = ByHand(found, 0, joins=False)
        status, why = second.join("second")
        assert status == 423
        assert why.decode().startswith("two processes take part as north, one from 127.0.0.1, one from 127.0.0.1:")
        assert first.post("/next")[0] == 204
        first.close()
        until(lambda: second.join("second")[0] == 200)
        assert sum("two processes take part as north" in line for line in found.log) == 1


def test_one_client_cannot_speak_for_another(tmp_path):
    """With its own key, but another's session, or to another's request."""
    with running(tmp_path) as found:
        mine, other = ByHand(found, 0), ByHand(found, 1)
        asking = Asking(found, {1: found.request(1)})
        other.fetch()
        assert mine.post("/answer", b"x", request=other.name)[0] == 410
        mine.close()
        for session in (other.session, "", "\xe9"):
            mine.session = session
            assert mine.post("/next")[0] == 401
        other.post("/answer", b"y", request=other.name)
        assert asking.ended() == {1: b"y"}


# what a hostile peer can do


def test_the_server_opens_nothing_else(tmp_path):
    with running(tmp_path) as found:
        one = ByHand(found, 0)
        for path in ("/", "/docs", "/model", "/status.json", "/../fed", "/next/", "/v1/fleet/pull-messages"):
            assert one.post(path)[0] == 404, path
        one.connection.request("GET", "/next")
        assert one.connection.getresponse().status == 404


def test_only_tls_13_with_a_certificate_gets_through(tmp_path):
    with running(tmp_path) as found:
        trusting = ssl.create_default_context(cafile=str(found.folder / "ca.crt"))
        for context, most in ((trusting, ssl.TLSVersion.TLSv1_3), (found.secured(0), ssl.TLSVersion.TLSv1_2)):
            context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1_2, most
            connection = http.client.HTTPSConnection("localhost", found.port, timeout=20, context=context)
            with pytest.raises((ssl.SSLError, OSError, http.client.HTTPException)):
                connection.request("POST", "/join", b"{}")
                connection.getresponse()
            connection.close()
        plain = http.client.HTTPConnection("localhost", found.port, timeout=20)
        with pytest.raises((OSError, http.client.HTTPException)):
            plain.request("POST", "/join", b"{}")
            plain.getresponse()
        plain.close()


def test_what_is_too_long_is_refused_before_it_is_read(tmp_path):
    with running(tmp_path) as found:
        one = ByHand(found, 0)
        asking = Asking(found, {0: found.request(1)})
        one.fetch()
        for headers in (
            {"content-length": str(MOST + 1)},
            {"transfer-encoding": "chunked"},
            {"content-length": "9" * 18},
        ):
            one.connection.close()
            one.connection.connect()
            one.connection.putrequest("POST", "/answer")
            for name, value in {"session": one.session, "request": one.name, **headers}.items():
                one.connection.putheader(name, value)
            one.connection.endheaders()  # and nothing follows
            assert one.connection.getresponse().status == 413, headers
        one.connection.close()
        assert one.post("/answer", b"y", request=one.name)[0] == 200
        assert asking.ended() == {0: b"y"}
        one.connection.close()
        with pytest.raises((OSError, http.client.HTTPException)):
            one.post("/next", more="x" * 10**7)


def test_too_many_requests_of_one_client_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(transport, "PENALTY", 0.0)
    with running(tmp_path) as found:
        one, other = ByHand(found, 0), ByHand(found, 1)
        found_out = [one.post("/nowhere")[0] for _ in range(int(transport.BURST) + 50)]
        assert 429 in found_out and found.link.status()[0].refused > 0
        assert other.post("/next")[0] == 204


def test_more_connections_than_a_client_may_have_are_turned_away_in_a_sentence(tmp_path):
    """A copy of its key that holds them all: the log says whose they are, and from where; its owner reads why."""
    with running(tmp_path) as found:
        held = [ByHand(found, 0, joins=False) for _ in range(https.EACH)]
        assert [one.post("/nowhere")[0] for one in held] == [404] * https.EACH
        status, why = ByHand(found, 0, joins=False).join()
        assert (status, why) == (423, https.TOO_MANY.encode())
        assert len(found.log) == 1 and found.log[0].startswith("refused north, from 127.0.0.1:")
        assert found.link.status()[0].refused == 1
        for one in held:
            one.close()
        until(lambda: ByHand(found, 0, joins=False).join()[0] == 200)


def test_who_is_refused_by_tls_is_in_the_log_once(tmp_path):
    """With a certificate of another federation, or with none at all."""
    with running(tmp_path / "one") as found, running(tmp_path / "two") as other:
        for _ in range(3):
            with pytest.raises(UserError):
                ask_once(Server(f"localhost:{found.port}", other_key(found, other)), "", {})
            nobody = ssl.create_default_context()
            nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", found.port), 10) as plain,
                nobody.wrap_socket(plain) as wrapped,
            ):
                wrapped.recv(1)
        until(lambda: len(found.log) >= 2)
        time.sleep(0.3)
        assert sorted(line.partition(": ")[2] for line in found.log) == [
            "certificate verify failed (unable to get local issuer certificate)", "peer did not return a certificate",
        ]  # fmt: skip


def other_key(found: Running, other: Running) -> ssl.SSLContext:
    """Believes this server, and shows the certificate of another federation's client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(found.home(0) / "ca.crt")
    context.load_cert_chain(other.home(0) / "client.crt", other.home(0) / "client.key")
    return context


def test_a_member_cannot_fill_the_log(tmp_path):
    """It is refused with other settings each time, and asks too often."""
    with running(tmp_path) as found:
        one = ByHand(found, 0, joins=False)
        for number in range(int(transport.BURST) - 10):
            assert one.join(agreed="another", terms={"a": number})[0] == 409
        assert len(found.log) == 1 and "a is not set with the server and 0 with the client" in found.log[0]
        assert found.link.status()[0].refused == int(transport.BURST) - 10
        assert f"and {int(transport.BURST) - 11} with the client" in found.link.status()[0].why_refused
        for _ in range(20):
            if one.post("/next")[0] == 429:
                break
        assert any("north, from" in line and "too many requests" in line for line in found.log)


def test_what_others_provoke_is_said_seldom():
    said: list[str] = []
    seldom = Seldom(said.append, 3)
    for hour in range(3):
        for i in range(100):
            seldom(f"kind {i % 5}", f"{hour}, {i}", 3600.0 * hour + i)
    assert said == [f"{hour}, {i}" for hour in range(3) for i in range(3)]


def test_a_crowd_at_one_address_keeps_nobody_else_out(tmp_path, monkeypatch):
    """Connections from elsewhere, more than may come and more than have a place."""
    monkeypatch.setattr(https, "BURST", 60.0)
    monkeypatch.setattr(https, "NEW", 0.1)
    monkeypatch.setattr(https, "STRANGERS", 40)
    with running(tmp_path) as found, contextlib.ExitStack() as stack:
        for _ in range(200):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection(("127.0.0.1", found.port), 10, ("127.0.0.2", 0)))
        found.join(0)
        until(lambda: found.link.here() == {0})


def test_a_fast_training_is_not_too_many_requests(tmp_path):
    with running(tmp_path) as found:
        found.join(0, answer=lambda data: b"x")
        until(lambda: found.link.here() == {0})
        for _ in range(3 * int(transport.BURST)):
            assert found.link.ask({0: b"\0\0\0\x02{}"}, 20.0) == {0: b"x"}
        assert [line for line in found.said if "connected" not in line] == []
        assert len(found.said) == 1  # one connection carried it all


def test_strangers_hold_no_more_than_a_few_places(tmp_path, monkeypatch):
    """Connections without a word, and with half a handshake: clients are served all the same."""
    monkeypatch.setattr(https, "STRANGERS", 20)
    with running(tmp_path) as found:
        idle = []
        for number in range(100):
            idle.append(socket.create_connection(("127.0.0.1", found.port), 20))
            if number % 2:
                idle[-1].sendall(b"\x16\x03\x01")
        found.join(0)
        until(lambda: found.link.here() == {0})
        assert list(Asking(found, {0: found.request(1)}).ended()) == [0]
        gone = 0
        for one in idle:
            one.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                with contextlib.suppress(ConnectionError):
                    assert one.recv(100) == b""
                gone += 1
            one.close()
        assert gone >= 70


@pytest.mark.parametrize(
    "given", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"instance": 1, "agreed": 2, "terms": 3}']
)
def test_whatever_a_client_says_when_it_joins_the_server_goes_on(tmp_path, given):
    with running(tmp_path) as found:
        one = ByHand(found, 0, joins=False)
        assert one.post("/join", given)[0] == 400
        assert one.join()[0] == 200


def test_a_port_in_use_is_said_in_a_sentence(tmp_path):
    with (
        running(tmp_path) as found,
        pytest.raises(UserError, match="nothing can listen on 127.0.0.1:"),
        found.link.listening(Listen("127.0.0.1", found.port, keys.for_serving(found.folder))),
    ):
        pass


def test_a_server_that_is_not_there_is_waited_for_and_one_that_restarts_is_joined_again(tmp_path):
    folder = make(tmp_path / "fed", NAMES, [FEATURES], CLASSES, "localhost:1", None)
    first, second = Running(folder, config()), Running(folder, config())
    with socket.create_server(("127.0.0.1", 0)) as free:
        first.port = second.port = free.getsockname()[1]
    thread = first.join(0)
    until(lambda: any("does not answer" in line for line in first.said))
    for found in (first, second):
        with found.link.listening(Listen("127.0.0.1", found.port, keys.for_serving(folder))):
            until(lambda found=found: found.link.here() == {0})
            assert list(found.link.ask({0: found.request(1)}, math.inf)) == [0]
    with second.link.listening(Listen("127.0.0.1", second.port, keys.for_serving(folder))):
        until(lambda: second.link.here() == {0})
        second.link.finish(ending(tmp_path / "none"))
        thread.join(30)
    assert not thread.is_alive()


def test_the_clients_limits_hold_against_a_server_that_sends_too_much(tmp_path):
    with running(tmp_path) as found:
        found.join(0, most=100)
        until(lambda: found.link.here() == {0})
        asking = Asking(found, {0: bytes(1000)}, deadline=5.0)
        until(lambda: any("does not answer" in line for line in found.said))
        advance(found, 100.0)
        assert asking.ended() == {}
    assert node.MOST_SAID < 10_000
