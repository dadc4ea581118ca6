"""Exchange by way of Flower's nodes: which client is at which of them, what each is asked, and what it answers."""

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from fednormec.errors import UserError, visible
from fednormec.federation.disclosure import FLOWER
from fednormec.federation.exchange import ClientStatus
from fednormec.federation.flower.hello import LONGEST, hello, recognised
from fednormec.federation.keys import Public, fingerprint
from fednormec.federation.messages import Refused
from fednormec.federation.transport import LEAST_PATIENCE

TICK = 0.1  # seconds between two looks for answers
LOOK = 1.0  # seconds between two looks at who is there
AGAIN = 5.0  # seconds after which a node is asked again that could not answer
FAREWELL = 20.0  # seconds that nodes have to hear that the training is over
SPARE = 60.0  # seconds that a request is kept for a node beyond the deadline
Tell = Callable[[str], None]


class Post(Protocol):
    """What carries bytes to nodes and back: Flower's Grid."""

    def nodes(self) -> Collection[int]:
        """Returns the nodes that are there."""
        ...

    def push(self, node: int, body: bytes, seconds: float) -> str | None:
        """Sends a node a request that is kept for so long; returns its name, or None if it cannot be sent."""
        ...

    def pull(self, sent: Collection[str]) -> Mapping[str, bytes | None]:
        """Returns the answers that have come to these requests; None for one that failed."""
        ...


class Agreed(NamedTuple):
    """What the server knows of its clients.

    Attributes:
        names: their names; the order numbers them.
        keys: returns their keys on the roster, None for one that was revoked.
        digest: digest of what all must agree on.
        terms: what that is, by name.
        most: bytes of an answer, at most.
    """

    names: tuple[str, ...]
    keys: Callable[[], Sequence[Public | None]]
    digest: str
    terms: Mapping[str, Any]
    most: int


class _Node:
    """What is known of one node: who is there, the hello that it was sent, and when to send it another."""

    def __init__(self) -> None:
        self.client: int | None = None
        self.key = b""
        self.nonce = b""
        self.sent: str | None = None
        self.again = float("-inf")


class _Seat:
    """What is known of one client: at which node it is, when it was last heard of, how many requests it missed."""

    def __init__(self) -> None:
        self.node: int | None = None
        self.seen: float | None = None
        self.missed = 0


class _Asked:
    """Request to one client: to which node it went, when it may go again, and its answer."""

    def __init__(self, body: bytes) -> None:
        self.body, self.node, self.again = body, -1, float("-inf")
        self.sent: str | None = None
        self.answer: bytes | None = None


class Nodes:
    """Connections of all clients: the exchange by way of Flower's nodes.

    A client is where it proved to be by its key, as long as that node is there. Nothing is done between two calls.

    Args:
        agreed: what the server knows of its clients.
        post: carries bytes to nodes and back.
        run: Flower's number of the run.
        log: called with who came and went.
        warn: called with who was refused or got lost.
    """

    transport = FLOWER
    command: str | None = None

    def __init__(self, agreed: Agreed, post: Post, run: int, log: Tell, warn: Tell) -> None:
        self.names, self._agreed, self._post, self._run, self._log, self._warn = (
            agreed.names, agreed, post, run, log, warn
        )  # fmt: skip
        self._keys = agreed.keys()
        self._nodes = dict[int, _Node]()
        self._seats = [_Seat() for _ in agreed.names]
        self._told = set[str]()
        self._looked = float("-inf")
        self.sent = self.received = 0

    def here(self) -> set[int]:
        """Returns the clients whose node is there."""
        self._look()
        return {client for client, seat in enumerate(self._seats) if seat.node is not None}

    def status(self) -> list[ClientStatus]:
        """Returns how each client's connection is."""
        now = time.monotonic()
        return [
            ClientStatus(name, seat.node is not None, "" if seat.node is None else f"node {seat.node}",
                         None if seat.seen is None else now - seat.seen, seat.missed, 0, "")
            for name, seat in zip(self.names, self._seats, strict=True)
        ]  # fmt: skip

    def ask(
        self, bodies: Mapping[int, bytes], deadline: float, stop: Callable[[], bool] = lambda: False
    ) -> dict[int, bytes]:
        """Asks clients by their number and returns the answers that came in time.

        Nobody waits for a client whose node is gone, nor after the deadline for any. One that comes to another node
        meanwhile, or whose gateway was not there, is asked again. One that left requests without an answer is waited
        for half as long each time. As long as nobody is here, no time passes: it waits for somebody to come;
        KeyboardInterrupt if it is asked to stop meanwhile.
        """
        asked = {client: _Asked(body) for client, body in bodies.items()}
        begun, told = None, False
        while not all(one.answer is not None for one in asked.values()):
            self._look()
            for client, one in asked.items():
                self._send(client, one, deadline + SPARE)
            self._collect(asked)
            now = time.monotonic()
            if begun is None and any(seat.node is not None for seat in self._seats):
                begun = now
            if begun is None:
                if stop():
                    raise KeyboardInterrupt
                if not told:
                    self._warn(f"nobody of the {len(asked)} clients that are asked is here: the round waits")
                told = True
            elif not any(self._waits(client, one, now - begun, deadline) for client, one in asked.items()):
                break
            time.sleep(TICK)
        for client, one in asked.items():
            seat = self._seats[client]
            seat.missed = 0 if one.answer is not None else seat.missed + (one.node >= 0)
        return {client: one.answer for client, one in asked.items() if one.answer is not None}

    def finish(self, said: bytes) -> None:
        """Tells all who are here that the training is over, and returns when they have heard it, or are too slow."""
        asked = {client: _Asked(said) for client in self.here()}
        end = time.monotonic() + FAREWELL
        for client, one in asked.items():
            self._send(client, one, FAREWELL)
        while any(one.sent is not None for one in asked.values()) and time.monotonic() < end:
            time.sleep(TICK)
            self._collect(asked)

    def _waits(self, client: int, one: _Asked, passed: float, deadline: float) -> bool:
        """Returns whether to wait for a client's answer."""
        seat = self._seats[client]
        patience = max(min(deadline, LEAST_PATIENCE), deadline * 0.5**seat.missed)
        return one.answer is None and passed < patience and seat.node is not None

    def _send(self, client: int, one: _Asked, seconds: float) -> None:
        """Sends a request to the client's node, unless it is there or must wait."""
        node, now = self._seats[client].node, time.monotonic()
        if one.answer is not None or node is None:
            return
        if node == one.node and (one.sent is not None or now < one.again):
            return
        one.node, one.again = node, now + AGAIN
        one.sent = self._post.push(node, one.body, seconds)
        self.sent += 0 if one.sent is None else len(one.body)

    def _collect(self, asked: Mapping[int, _Asked]) -> None:
        waiting = {one.sent: (client, one) for client, one in asked.items() if one.sent is not None}
        for name, answer in self._post.pull(list(waiting)).items() if waiting else ():
            client, one = waiting[name]
            one.sent = None
            if answer is not None:
                one.answer = answer if len(answer) <= self._agreed.most else b""  # which nobody can read
                self.received += len(answer)
                self._seats[client].seen = time.monotonic()

    # who is where

    def _look(self) -> None:
        """Looks who is there, now and then: asks new nodes who they are, and hears what they say."""
        now = time.monotonic()
        if now - self._looked < LOOK and not any(node.sent for node in self._nodes.values()):
            return
        if now - self._looked >= LOOK:
            self._looked = now
            self._read_roster()
            self._count(set(self._post.nodes()))
        for number, node in self._nodes.items():
            if node.client is None and node.sent is None and now >= node.again:
                node.nonce, node.again = secrets.token_bytes(32), now + AGAIN
                node.sent = self._post.push(number, hello(self._agreed.digest, node.nonce), SPARE)
        self._hear()

    def _read_roster(self) -> None:
        try:
            self._keys = self._agreed.keys()
        except UserError as error:  # such as a file that is just being written
            self._once(f"the roster stays as it was: {str(error).rstrip('.')}")

    def _count(self, there: set[int]) -> None:
        """Forgets nodes that are gone, and who has a key that is no longer on the roster."""
        for number in set(self._nodes) - there:
            self._leave(self._nodes.pop(number), number, "is gone")
        for number in there - set(self._nodes):
            self._nodes[number] = _Node()
        for number, node in self._nodes.items():
            key = None if node.client is None else self._keys[node.client]
            if node.client is not None and (key is None or fingerprint(key) != node.key):
                self._leave(node, number, "was revoked and is no longer served")

    def _leave(self, node: _Node, number: int, how: str) -> None:
        client, node.client = node.client, None
        if client is not None and self._seats[client].node == number:
            self._seats[client].node = None
            self._warn(f"{self.names[client]} {how} (node {number})")

    def _hear(self) -> None:
        """Takes the answers to hellos; whoever proves by its key to be a client is that client from now on."""
        waiting = {node.sent: (number, node) for number, node in self._nodes.items() if node.sent is not None}
        for name, answer in self._post.pull(list(waiting)).items() if waiting else ():
            number, node = waiting[name]
            node.sent = None
            if answer is None:
                self._once(f"node {number} does not say who it is: is its gateway there? It is asked again")
                continue
            try:
                self._enter(self._recognised(answer, number, node), number, node)
            except Refused as why:
                self._once(f"refused node {number}: {visible(why)}")

    def _recognised(self, answer: bytes, number: int, node: _Node) -> int:
        if len(answer) > LONGEST:
            raise Refused("its answer is too long")
        agreed = self._agreed
        return recognised(answer, self.names, self._keys, agreed.digest, agreed.terms, node.nonce, self._run, number)

    def _enter(self, client: int, number: int, node: _Node) -> None:
        key, seat, name = self._keys[client], self._seats[client], self.names[client]
        assert key is not None
        if seat.node is not None:
            raise Refused(f"{name} is at node {seat.node} already: the second waits until the first is gone")
        self._log(f"{name} {'has joined' if seat.seen is None else 'is back'}, at node {number}")
        node.client, node.key = client, fingerprint(key)
        seat.node, seat.seen = number, time.monotonic()

    def _once(self, said: str) -> None:
        if said not in self._told:
            self._told.add(said)
            self._warn(said)
