"""A federation over HTTPS on loopback, with the server and its clients in this process, and clients by hand."""

import contextlib
import http.client
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from federated import CLASSES, DIM, FEATURES, NAMES, config, party

from fednormec.config.schema import Config
from fednormec.errors import UserError
from fednormec.federation import keys
from fednormec.federation.agreement import for_server
from fednormec.federation.client import client_of
from fednormec.federation.https import Listen
from fednormec.federation.messages import Request, request_bytes
from fednormec.federation.node import Server, Taking, take_part
from fednormec.federation.provision import make
from fednormec.federation.sessions import roster
from fednormec.federation.transport import Link

MOST = 100_000


class Running:
    """A server on loopback, with TLS, and clients that connect to it from threads."""

    def __init__(self, folder: Path, asked: Config) -> None:
        self.folder, self.asked = folder, asked
        self.server = for_server(asked, folder)
        self.log: list[str] = []
        self.said: list[str] = []
        self.stopped = threading.Event()
        self.threads: list[threading.Thread] = []
        self.by_hand: list[ByHand] = []
        names = tuple(self.server.settings.clients)
        self.link = Link(
            names, lambda: roster(folder, names), self.server.agreed, self.server.terms, MOST, self.log.append
        )
        self.port = 0

    def home(self, client: int) -> Path:
        return self.folder / "clients" / NAMES[client]

    def secured(self, client: int) -> ssl.SSLContext:
        return keys.for_joining(self.home(client))

    def taking(self, client: int, **other: Any) -> Taking:
        mine = party(self.asked, client)
        answer = client_of(mine, client, self.home(client), self.said.append)
        return Taking(mine.agreed, mine.terms, answer, MOST, self.stopped.is_set, self.said.append)._replace(**other)

    def join(self, client: int, **other: Any) -> threading.Thread:
        server, mine = Server(f"localhost:{self.port}", self.secured(client)), self.taking(client, **other)

        def work() -> None:
            try:
                take_part(server, mine)
            except UserError as error:
                self.said.append(str(error))

        self.threads.append(threading.Thread(target=work, daemon=True))
        self.threads[-1].start()
        return self.threads[-1]

    def leave(self) -> None:
        self.stopped.set()
        for one in self.threads:
            one.join(30)
        for other in self.by_hand:
            other.close()

    def request(self, round: int, base: int = 0) -> bytes:
        x = torch.full((DIM,), 0.1, dtype=torch.float64)
        return request_bytes(Request("a", self.server.agreed, round, base, True, b"n" * 16, x))


@contextlib.contextmanager
def running(tmp_path: Path, asked: Config | None = None) -> Iterator[Running]:
    folder = make(tmp_path / "fed", NAMES, [FEATURES], CLASSES, "localhost:1", None)
    found = Running(folder, asked or config())
    with found.link.listening(Listen("127.0.0.1", 0, keys.for_serving(folder))) as found.port:
        try:
            yield found
        finally:
            found.leave()


class ByHand:
    """A client by hand: it says what a client says, when the test wants it to."""

    def __init__(self, found: Running, client: int, instance: str = "i", joins: bool = True) -> None:
        self.connection = http.client.HTTPSConnection(
            "localhost", found.port, timeout=20, context=found.secured(client)
        )
        self.found, self.session, self.name = found, "", ""
        found.by_hand.append(self)
        if joins:
            self.session = json.loads(self.join(instance)[1])["session"]

    def post(self, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        self.connection.request("POST", path, body, {"session": self.session, **headers})
        with self.connection.getresponse() as response:
            self.name = response.headers.get("request", self.name)
            return response.status, response.read()

    def join(self, instance: str = "i", **other: Any) -> tuple[int, bytes]:
        given = {"instance": instance, "agreed": self.found.server.agreed, "terms": self.found.server.terms} | other
        return self.post("/join", json.dumps(given).encode())

    def fetch(self) -> bytes:
        """What it is asked, when there is something."""
        while True:
            status, body = self.post("/next")
            if status == 200:
                return body
            assert status == 204

    def close(self) -> None:
        self.connection.close()


class Asking:
    """Asks clients from a thread, as the server does, by default for ever."""

    def __init__(self, found: Running, bodies: dict[int, bytes], deadline: float = 1e9, stop: Any = None) -> None:
        self.answers: dict[int, bytes] = {}
        self.failed: BaseException | None = None

        def ask() -> None:
            try:
                self.answers.update(found.link.ask(bodies, deadline, *([] if stop is None else [stop])))
            except BaseException as error:
                self.failed = error

        self.thread = threading.Thread(target=ask, daemon=True)
        self.thread.start()

    def ended(self) -> dict[int, bytes]:
        self.thread.join(60)
        assert not self.thread.is_alive(), "it waits for ever"
        return self.answers

    def goes_on(self) -> bool:
        return self.thread.is_alive()


def advance(found: Running, seconds: float) -> None:
    """Lets so much of the server's own time pass."""
    with found.link._changed:
        found.link._now += seconds
        found.link._changed.notify_all()
