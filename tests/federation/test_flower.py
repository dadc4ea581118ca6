"""Flower carries a federation: over TLS on loopback, with the server and its clients in this process."""

import math
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from clock import Clock
from command import free_port
from federated import CLASSES, DIM, FEATURES, NAMES, config, party
from flwr.app import MessageType, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.run import Run
from processes import until

from fednormec.config.schema import Config
from fednormec.data import Examples
from fednormec.errors import UserError
from fednormec.federation import keys, node
from fednormec.federation import transport as link
from fednormec.federation.agreement import for_client, for_server
from fednormec.federation.client import answering, client_app
from fednormec.federation.messages import (
    DONE,
    Report,
    Request,
    read_reply,
    read_request,
    request_record,
)
from fednormec.federation.provision import make
from fednormec.federation.reports import as_report


def test_bytes_that_flower_cannot_decode_are_no_message():
    class State:
        object_store = property(lambda self: self)
        get_object_tree = staticmethod(lambda key: ObjectTree(object_id=key))
        get_object = staticmethod(lambda run, key: b"ConfigRecord  3\0\xff\xff\xff")

    grid = link.LinkGrid(State(), Run.create_empty(1))
    reply = SimpleNamespace(metadata=SimpleNamespace(message_id="0" * 64))
    assert grid._content(reply) == RecordDict()


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "LONGEST", 0.2)


class Running:
    """A server's link on loopback, with TLS, and clients that connect to it from threads."""

    def __init__(self, folder: Path, asked: Config) -> None:
        self.folder, self.asked, self.port = folder, asked, free_port()
        self.authority = (folder / "ca.crt").read_bytes()
        public = [public_key_to_bytes(keys.public_key(folder / "keys" / f"{name}.pub")) for name in NAMES]
        self.link, self.over = link.Link(public), threading.Event()
        self.said: list[str] = []
        self.threads: list[threading.Thread] = []
        self.connections: list[Connection] = []

    def where(self) -> link.Listen:
        return link.Listen("127.0.0.1", self.port, str(self.folder / "server.key"), str(self.folder / "server.crt"))

    def join(self, client: int, key: Any = None) -> threading.Thread:
        home = self.folder / "clients" / NAMES[client]
        app = client_app(party(self.asked, client), client, home, self.said.append, self.over.set)
        server = node.Server(f"localhost:{self.port}", self.authority)
        mine = key or keys.private_key(home / "node.key")
        work = threading.Thread(
            target=node.take_part,
            args=(server, mine, app, self.over.is_set, lambda: False, self.said.append),
            daemon=True,
        )
        work.start()
        self.threads.append(work)
        return work

    def by_hand(self, client: int) -> "Connection":
        self.connections.append(Connection(self, client))
        return self.connections[-1]

    def leave(self) -> None:
        """All clients go before the server does."""
        self.over.set()
        for one in self.threads:
            one.join(10.0)
        for other in self.connections:
            other.client.close()


@contextmanager
def running(tmp_path: Path, asked: Config) -> Any:
    folder = make(tmp_path / "fed", NAMES, [FEATURES], CLASSES, "localhost:1", None)
    found = Running(folder, asked)
    with link.listening(found.link, found.where(), 10_000), found.link.grid() as grid:
        try:
            yield found, grid
        finally:
            found.leave()


class Asking:
    """Asks clients from a thread, as the server does, by default without a deadline."""

    def __init__(self, found: Running, grid: Any, contents: dict[int, RecordDict], deadline: float = math.inf) -> None:
        self.came: list[Any] = []  # replies, as soon as they are there
        self._answers: dict[int, Any] = {}
        self._looks = threading.Semaphore(0)
        pull = type(grid).pull_messages

        def pull_messages(message_ids: Any) -> Any:
            replies = pull(grid, message_ids)
            self.came += replies
            self._looks.release()
            return replies

        grid.pull_messages = pull_messages
        self._thread = threading.Thread(
            target=lambda: self._answers.update(link.asked(found.link, grid, contents, deadline)), daemon=True
        )
        self._thread.start()

    def looks_again(self) -> None:
        """Returns when it has looked for replies and decided whether to wait, with all that is so by now."""
        while self._looks.acquire(blocking=False):
            pass
        for _ in range(2):
            assert self._looks.acquire(timeout=60)

    def ended(self) -> bool:
        return not self._thread.is_alive()

    def answers(self) -> dict[int, Any]:
        """When it has ended by itself."""
        self._thread.join(60)
        assert self.ended(), "it waits for ever"
        return self._answers


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The server's."""
    found = Clock()
    monkeypatch.setattr(link, "time", found)
    return found


def content_for(found: Running, round: int, base: int = 0, dim: int = DIM) -> RecordDict:
    agreed = for_server(found.asked, found.folder).agreed
    x = torch.full((dim,), 0.1, dtype=torch.float64)
    return request_record(Request("a", agreed, round, base, True, b"n" * 16, x))


@pytest.mark.long
def test_flower_carries_requests_and_answers(tmp_path):
    with running(tmp_path, config()) as (found, grid):
        for client in range(3):
            found.join(client)
        until(lambda: len(found.link.here()) == 3)
        answers = Asking(found, grid, {i: content_for(found, 1) for i in range(4)}).answers()
        assert sorted(answers) == [0, 1, 2]  # nobody waits for one that never came
        for client, message in answers.items():
            request = read_request(content_for(found, 1), DIM, 0, torch.float64)
            (tmp_path / NAMES[client]).mkdir()
            direct = answering(party(found.asked, client), client, tmp_path / NAMES[client])(request)
            assert torch.equal(read_reply(message.content, DIM, torch.float64).message, direct.message)


@pytest.mark.long
def test_flower_carries_reports(tmp_path):
    """Clients that let themselves be asked answer; one whose settings say no refuses, and who is away says nothing."""
    asked = config()
    yes = asked | {"federation": asked["federation"] | {"report": True}}
    with running(tmp_path, yes) as (found, grid):
        found.join(0)
        found.asked = asked
        found.join(1)
        until(lambda: len(found.link.here()) == 2)
        server = for_server(yes, tmp_path)
        x = torch.ones(DIM, dtype=torch.float64)
        requests = {i: Request("a", server.agreed, 0, 0, False, b"n" * 16, x) for i in range(3)}
        contents = {i: request_record(request) for i, request in requests.items()}
        answers = link.asked(found.link, grid, contents, 60.0, MessageType.EVALUATE)
        reports = {i: as_report(message) for i, message in answers.items()}
    assert set(reports) == {0, 1}
    own = party(yes, 0).report(x)
    assert reports[0] == Report(b"n" * 16, name="accuracy", value=own.values[0])
    assert reports[1].status == "refused" and "nothing was reported: " in " ".join(found.said)


@pytest.mark.long
def test_a_round_has_a_deadline_and_the_next_does_not_wait(tmp_path, clock):
    """A client fetches its request and is never heard of again."""
    with running(tmp_path, config()) as (found, grid):
        for client in (0, 1):
            found.join(client)
        until(lambda: len(found.link.here()) == 2)
        silent = found.by_hand(2)
        first = Asking(found, grid, {i: content_for(found, 1) for i in (0, 1, 2)}, deadline=2.0)
        until(silent.pull)
        until(lambda: len(first.came) == 2)
        clock.advance(1.9)
        first.looks_again()
        assert not first.ended()
        clock.advance(0.2)
        assert sorted(first.answers()) == [0, 1]
        clock.advance(link.SILENCE)
        until(lambda: len(found.link.here()) == 2)
        second = Asking(found, grid, {i: content_for(found, 2, 1) for i in (0, 1, 2)})
        assert sorted(second.answers()) == [0, 1]  # and no clock has moved


class Connection:
    """A client by hand."""

    def __init__(self, found: Running, client: int) -> None:
        home = found.folder / "clients" / NAMES[client]
        self.key = keys.private_key(home / "node.key")
        self.client = node._connection(node.Server(f"localhost:{found.port}", found.authority), self.key)
        self.node = node._joined(self.client, public_key_to_bytes(self.key.public_key()))

    def pull(self) -> Any:
        from flwr.proto.fleet_pb2 import PullMessagesRequest

        found = self.client.PullMessages(PullMessagesRequest(node=self.node))
        return found if found.messages_list else None


def test_a_client_that_comes_back_within_a_round_is_asked_again(tmp_path):
    """It fetched its request and died; started anew with the same key it answers in the same round."""
    with running(tmp_path, config()) as (found, grid):
        first = found.by_hand(0)
        asking = Asking(found, grid, {0: content_for(found, 1)})
        until(first.pull)
        asking.looks_again()
        assert not asking.ended()
        found.join(0)
        assert list(asking.answers()) == [0]


def test_a_key_that_is_not_on_the_roster_is_refused(tmp_path):
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    keys.make_client(stranger)
    with running(tmp_path, config()) as (found, _):
        server = node.Server(f"localhost:{found.port}", found.authority)
        key = keys.private_key(stranger / "node.key")
        app = client_app(party(found.asked, 0), 0, stranger, found.said.append, found.over.set)
        with pytest.raises(UserError, match="does not know this key"):
            node.take_part(server, key, app, lambda: False, lambda: False, found.said.append)
        assert found.link.here() == set()


def test_one_client_cannot_speak_for_another(tmp_path):
    """With its own key, but another's number."""
    from flwr.proto.fleet_pb2 import PullMessagesRequest

    with running(tmp_path, config()) as (found, _):
        mine, other = found.by_hand(0), found.by_hand(1)
        with pytest.raises(httpx.HTTPStatusError) as refused:
            mine.client.PullMessages(PullMessagesRequest(node=other.node))
        assert refused.value.response.status_code == 401


def test_a_server_with_another_certificate_is_not_believed(tmp_path):
    (tmp_path / "x").mkdir()
    with running(tmp_path, config()) as (found, _):
        keys.make_server(tmp_path / "x", ["localhost"])
        wrong = node.Server(f"localhost:{found.port}", (tmp_path / "x" / "ca.crt").read_bytes())
        home = found.folder / "clients" / "north"
        app = client_app(party(found.asked, 0), 0, home, found.said.append, found.over.set)
        key = keys.private_key(home / "node.key")
        with pytest.raises(UserError, match="does not prove that it is the federation's server"):
            node.take_part(wrong, key, app, lambda: False, lambda: False, found.said.append)


def test_the_server_opens_nothing_else(tmp_path):
    """Flower's Control and Runtime APIs, which start code, registration, documentation, and what is too long."""
    with running(tmp_path, config()) as (found, _):
        import ssl

        trust = ssl.create_default_context(cadata=found.authority.decode())
        with httpx.Client(verify=trust, base_url=f"https://localhost:{found.port}") as client:
            for path in (
                "/v1/control/start-run", "/v1/control/register-node", "/v1/fleet/register-node", "/v1/fleet/get-fab",
                "/v1/runtime/acquire-task", "/docs", "/openapi.json", "/",
            ):  # fmt: skip
                assert client.post(path, content=b"").status_code == 404, path
            proto = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE}
            assert client.post("/v1/fleet/pull-messages", content=b"", headers=proto).status_code == 401
            assert client.post("/v1/fleet/pull-messages", content=bytes(10**6), headers=proto).status_code == 413


def test_the_wire_carries_little_more_than_the_vectors(tmp_path):
    """Flower's own count of what went down and up, against d numbers each way, in float32."""
    features = 5_000
    asked = config(run={"rounds": 3, "seed": 0}, participation={"name": "full"}, local={"name": "gd", "step": 0.1})
    asked["federation"] = asked["federation"] | {"inputs": [features]}
    folder = make(tmp_path / "fed", NAMES, [features], CLASSES, "localhost:1", None)
    dim = (features + 1) * CLASSES
    found = Running(folder, asked)
    rng = np.random.default_rng(0)
    with link.listening(found.link, found.where(), 10**6), found.link.grid() as grid:
        own = Examples(rng.standard_normal((4, features)).astype(np.float32), np.array([0, 1, 2, 0]))
        federation = for_client(asked, NAMES[0], own)
        home = folder / "clients" / NAMES[0]
        app = client_app(federation, 0, home, found.said.append, found.over.set)
        server = node.Server(f"localhost:{found.port}", found.authority)
        work = (server, keys.private_key(home / "node.key"), app, found.over.is_set, lambda: False, found.said.append)
        found.threads.append(threading.Thread(target=node.take_part, args=work, daemon=True))
        found.threads[0].start()
        until(lambda: bool(found.link.here()))
        x = torch.randn(dim)
        request = Request("a", federation.agreed, 1, 0, True, b"n" * 16, x)
        before = grid.run
        answers = link.asked(found.link, grid, {0: request_record(request)}, 20.0)
        after = grid.run
        found.leave()
    assert read_reply(answers[0].content, dim, torch.float32).status == DONE
    down, up, payload = after.bytes_sent - before.bytes_sent, after.bytes_recv - before.bytes_recv, 4 * dim
    print(f"down {down} up {up} payload {payload}: {down / payload:.4f} {up / payload:.4f}")
    assert payload < down < 1.05 * payload
    assert payload < up < 1.05 * payload


def test_a_port_in_use_is_said_in_a_sentence(tmp_path):
    with (
        running(tmp_path, config()) as (found, _),
        pytest.raises(UserError, match="nothing can listen on"),
        link.listening(found.link, found.where(), 1000),
    ):
        pass


def test_a_request_that_is_withdrawn_while_it_is_fetched_harms_nobody(tmp_path, clock):
    """The round ends between a client's two steps: it goes on, and answers the next."""
    with running(tmp_path, config()) as (found, grid):
        late = found.by_hand(0)
        first = Asking(found, grid, {0: content_for(found, 1)}, deadline=0.5)
        pulled = until(late.pull)
        clock.advance(0.6)
        assert first.answers() == {}
        run = pulled.messages_list[0].metadata.run_id
        with pytest.raises(ObjectPullError):
            node._fetched(late.client, late.node, run, pulled.message_object_trees[0])
        pulling, real = threading.Event(), node._fetched

        def slowly(*given: Any) -> Any:
            pulling.set()
            withdrawn.wait(60)
            return real(*given)

        withdrawn = threading.Event()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(node, "_fetched", slowly)
            found.join(0)
            until(lambda: bool(found.said))
            second = Asking(found, grid, {0: content_for(found, 1)}, deadline=0.5)
            assert pulling.wait(60)
            clock.advance(0.6)
            assert second.answers() == {}
            withdrawn.set()
            assert list(Asking(found, grid, {0: content_for(found, 1)}).answers()) == [0]


@pytest.mark.long
def test_nothing_piles_up_at_the_server(tmp_path, clock):
    """Answered, withdrawn, for a client that never came: after a round Flower holds nothing of it."""
    with running(tmp_path, config()) as (found, grid):
        found.join(0)
        found.by_hand(1)
        until(lambda: len(found.link.here()) == 2)
        for round in (1, 2, 3):
            asking = Asking(found, grid, {i: content_for(found, round, round - 1) for i in range(3)}, deadline=1.0)
            until(lambda asking=asking: asking.came)
            clock.advance(1.1)
            assert list(asking.answers()) == [0]
            state = found.link.state
            assert (state.num_message_ins(), state.num_message_res(), len(state.object_store.store)) == (0, 0, 0)


def test_the_grid_is_flowers(tmp_path):
    """Whoever writes a ServerApp of their own finds the grid that Flower describes."""
    from flwr.app import Message, MessageType

    with running(tmp_path, config()) as (found, grid):
        found.join(1)
        until(lambda: len(found.link.here()) == 1)
        assert list(grid.get_node_ids()) == [found.link.nodes[1]]
        messages = [Message(content_for(found, 1), found.link.nodes[i], MessageType.TRAIN) for i in (1, 2)]
        (reply,) = grid.send_and_receive(messages, timeout=20.0)
        assert reply.metadata.src_node_id == found.link.nodes[1]
        assert read_reply(reply.content, DIM, torch.float64).status == DONE
