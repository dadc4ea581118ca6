"""Server's end of the wire: who is connected, what each of them is asked, and what it answers.

Clients connect out, with the certificate that the federation's authority signed for them, and ask for work; a question
waits at the server until there is some. An answer is taken only to a request that its sender has, and once.
"""

import asyncio
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import zip_longest
from typing import Any

from fednormec.errors import UserError, visible
from fednormec.federation.disclosure import HTTPS
from fednormec.federation.exchange import ClientStatus
from fednormec.federation.https import GRACE, JSON, SLOWEST, TEXT, Answer, Call, Hear, Listen, listening
from fednormec.federation.keys import fingerprint, holder
from fednormec.federation.log import Seldom

POLL = 10.0  # seconds that a question for work waits for an answer
SILENCE = 15.0  # seconds without a sign of a client after which it is gone
RETURN = 90.0  # seconds without a sign after which a round no longer waits for it to come back and fetch its request
TICK = 0.25  # seconds between two looks at the clock
LEAST_PATIENCE = 5.0  # seconds that a client which keeps missing rounds is waited for, at least
CALLS, BURST = 20.0, 100.0  # requests of one client in a second that bring nothing, and how many may come at once
PENALTY = 1.0  # seconds that an answer waits to one who asks too often, or is on no roster
STRANGERS_NAMED = 20  # kinds of strangers that the log names in an hour
TERMS = 2**20  # bytes of settings, at most
Terms = Mapping[str, Any]
Log = Callable[[str], None]
Roster = Callable[[], Sequence[bytes | None]]
KEYS_OF_ALL = "federation.keys"
NOBODY = "certificate is of nobody on the roster, or was revoked"


class _Asking:
    """What is asked of several clients at once: for how long, who is waited for, whether anybody fetched anything."""

    def __init__(self, deadline: float, clients: Iterable[int]) -> None:
        self.deadline, self.awaited, self.fetched = deadline, set(clients), False


class _Asked:
    """Request that waits for one client: with whom it was asked, whether it was fetched, and its answer."""

    def __init__(self, body: bytes, together: _Asking) -> None:
        self.body, self.together, self.name = body, together, secrets.token_hex(16)
        self.fetched = False
        self.answer: bytes | None = None


class _Seat:
    """What the server knows of one client's connection.

    Attributes:
        instance: name that the process of the client made up for itself; None before the first.
        session: known to that process alone; it says so with every request. None while nobody may sit here.
        address: where it connects from.
        connections: addresses of its open connections.
        seen: when it last joined, asked for work or answered.
        told_here: whether the log last said that it is here.
        missed: number of rounds in a row in which it was here and did not answer.
        refused: how often it was not let in.
        why_refused: why, the last time.
        asked: request that waits for it.
        event: set when there is something to ask it.
        tokens: how many requests it may make now.
        filled: when that was counted.
    """

    def __init__(self) -> None:
        self.instance: str | None = None
        self.session: str | None = None
        self.address = ""
        self.connections = set[str]()
        self.seen = float("-inf")
        self.told_here = False
        self.missed = self.refused = 0
        self.why_refused = ""
        self.asked: _Asked | None = None
        self.event: asyncio.Event | None = None
        self.tokens, self.filled = BURST, 0.0


class Link:
    """Connections of all clients: the exchange over HTTPS.

    Time stands still here while the process is stopped, so that nobody is taken for gone who could not be heard.

    Args:
        names: names of the clients; the order numbers them.
        roster: returns the fingerprint of each client's key, None for one that was revoked.
        agreed: digest of what all must agree on.
        terms: what that is, by name.
        most: bytes of an answer, at most.
        log: called with who came and went.
        warn: called with who was refused or got lost; by default as `log`.
        now_and_then: called every few seconds.
    """

    transport = HTTPS
    command: str | None = "fednormec federation serve"

    def __init__(
        self, names: Sequence[str], roster: Roster, agreed: str, terms: Terms, most: int, log: Log = lambda said: None,
        warn: Log | None = None, now_and_then: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.names, self._roster, self._agreed, self._terms, self._most, self._log = (
            tuple(names), roster, agreed, terms, most, log
        )  # fmt: skip
        self._warn, self._now_and_then = warn or log, now_and_then
        self._seats = [_Seat() for _ in names]
        self._keys = list(roster())
        self._client_of = _numbers(self._keys)
        self._of_members = Seldom(self._warn, 4 * len(names))
        self._of_strangers = Seldom(self._warn, STRANGERS_NAMED)
        self._told_of_roster = False
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._now, self._last = 0.0, time.monotonic()
        self._over: bytes | None = None
        self.sent = self.received = 0

    def listening(self, listen: Listen) -> AbstractContextManager[int]:
        """Serves the clients until the context ends; gives the port."""
        return listening(self._handle, listen, self._tick, Hear(self._closed, self._turned_away))

    # what the training asks

    def here(self) -> set[int]:
        """Returns the clients that were heard of a short while ago."""
        with self._changed:
            return {client for client in range(len(self._seats)) if self._is_here(client)}

    def status(self) -> list[ClientStatus]:
        """Returns how each client's connection is."""
        with self._changed:
            return [
                ClientStatus(name, self._is_here(i), seat.address, None if seat.instance is None else
                             max(0.0, self._now - seat.seen), seat.missed, seat.refused, seat.why_refused)
                for i, (name, seat) in enumerate(zip(self.names, self._seats, strict=True))
            ]  # fmt: skip

    def ask(
        self, bodies: Mapping[int, bytes], deadline: float, stop: Callable[[], bool] = lambda: False
    ) -> dict[int, bytes]:
        """Asks clients by their number and returns the answers that came in time.

        Nobody waits for a client that has left, or was not heard of for long and has not fetched its request, nor after
        the deadline for any. One that connects anew meanwhile is asked again. One that is here and does not answer is
        waited for half as long each time. The deadline counts from the first request that was fetched; or from when
        nobody who is asked may come any more, while others are here. As long as nobody at all is here, no time passes:
        it waits for somebody to come; KeyboardInterrupt if it is asked to stop meanwhile.
        """
        with self._changed:
            together = _Asking(deadline, bodies)
            asked = {client: _Asked(body, together) for client, body in bodies.items()}
            for client, one in asked.items():
                self._seats[client].asked = one
                self._wake(client)
            were_here = {client for client in asked if self._is_here(client)}
            asking, begun, told = self._now, None, False
            while asked:
                if begun is None and self._begins(asked, asking):
                    begun = self._now
                if begun is not None:
                    together.awaited = {c for c, one in asked.items() if self._waits(c, one, begun, deadline)}
                    if not together.awaited:
                        break
                if begun is None and not any(self._is_here(client) for client in asked):
                    if stop():
                        for client in asked:
                            self._seats[client].asked = None
                        raise KeyboardInterrupt
                    if not told:
                        self._warn(f"nobody of the {len(asked)} clients that are asked is here: the round waits")
                    told = True
                self._changed.wait(TICK)
            for client, one in asked.items():
                seat = self._seats[client]
                seat.asked = None
                was_here = one.fetched or client in were_here or seat.seen >= asking
                seat.missed = 0 if one.answer is not None else seat.missed + was_here
            return {client: one.answer for client, one in asked.items() if one.answer is not None}

    def _begins(self, asked: Mapping[int, _Asked], asking: float) -> bool:
        """Returns whether a round's time begins to count."""
        if any(one.fetched for one in asked.values()):
            return True
        hopeless = not any(map(self._may_return, asked)) or self._now - asking > RETURN
        return hopeless and any(map(self._is_here, range(len(self._seats))))

    def _waits(self, client: int, one: _Asked, begun: float, deadline: float) -> bool:
        """Returns whether to wait for a client's answer."""
        if one.answer is not None:
            return False
        patience = max(min(deadline, LEAST_PATIENCE), deadline * 0.5 ** self._seats[client].missed)
        return self._now - begun < patience and (one.fetched or self._may_return(client))

    def finish(self, said: bytes) -> None:
        """Tells all who are here that the training is over, and returns when they have heard it, or are too slow."""
        with self._changed:
            self._over, end = said, self._now + GRACE + len(said) / SLOWEST
            for client in range(len(self._seats)):
                self._wake(client)
            while any(map(self._is_here, range(len(self._seats)))) and self._now < end:
                self._changed.wait(TICK)

    # the event loop's part

    async def _tick(self) -> None:
        self._loop = asyncio.get_running_loop()
        keys = 0.0
        while True:
            await asyncio.sleep(TICK)
            with self._changed:
                now = time.monotonic()
                self._now += min(now - self._last, 4 * TICK)  # more, if the process was stopped: that does not count
                self._last = now
                for client, seat in enumerate(self._seats):
                    here = self._is_here(client)
                    if seat.told_here and not here and self._over is None:
                        self._warn(f"{self.names[client]} is gone (last heard of {self._now - seat.seen:.0f} s ago)")
                    seat.told_here = seat.told_here and here
                self._changed.notify_all()
            if self._now - keys > 2.0:
                keys = self._now
                self._now_and_then()
                await self._look_at_the_roster()

    async def _look_at_the_roster(self) -> None:
        try:
            found = list(await asyncio.to_thread(self._roster))
        except (UserError, OSError) as error:  # such as a file that is just being written
            if not self._told_of_roster:
                self._warn(f"the roster stays as it was: {str(error).rstrip('.')}")
            self._told_of_roster = True
            return
        self._told_of_roster = False
        with self._changed:
            before, self._keys, self._client_of = self._keys, found, _numbers(found)
            for client, (old, new) in enumerate(zip(before, found, strict=True)):
                seat = self._seats[client]
                if old != new and seat.session is not None:
                    seat.session, seat.told_here = None, False
                    self._wake(client)
                    how = "was revoked and" if new is None else "has another key now; the old one"
                    self._warn(f"{self.names[client]} {how} is no longer served")

    def _is_here(self, client: int) -> bool:
        """Returns whether a client was heard of a short while ago, or is connected and at work."""
        seat = self._seats[client]
        works = seat.asked is not None and seat.asked.fetched and seat.asked.answer is None and bool(seat.connections)
        quiet = self._now - seat.seen
        return seat.session is not None and (works or quiet < (SILENCE + POLL if seat.connections else SILENCE))

    def _may_return(self, client: int) -> bool:
        """Returns whether a client that did not say goodbye may be back soon: its link is cut, or it restarts."""
        seat = self._seats[client]
        return seat.session is not None and self._now - seat.seen < RETURN

    def _wake(self, client: int) -> None:
        event, loop = self._seats[client].event, self._loop
        if event is not None and loop is not None:
            with suppress(RuntimeError):  # the loop has ended; whoever waits in it has too
                loop.call_soon_threadsafe(event.set)

    def _closed(self, address: str) -> None:
        with self._changed:
            for seat in self._seats:
                seat.connections.discard(address)

    async def _handle(self, call: Call) -> Answer:
        """Answers a request. Who sent it is known before anything of its body is read."""
        with self._changed:
            client = None if call.certificate is None else self._client_of.get(fingerprint(call.certificate))
            trouble = None
            if client is None:
                trouble = _said(403, f"this {NOBODY}")
            elif not self._may_call(self._seats[client]):
                trouble = _said(429, "too many requests")
        if client is None or trouble is not None:
            why = f"its {NOBODY}" if client is None else "it makes too many requests"
            self._turned_away(call.address, call.certificate, why)
            await asyncio.sleep(PENALTY)
            return trouble or Answer(403)
        if call.method != "POST":
            return _said(404, "not found")
        if call.path == "/join":
            return self._join(client, call, await call.body(TERMS))
        if call.path == "/check":
            return self._check(await call.body(TERMS))
        if call.path not in ("/next", "/answer", "/leave"):
            return _said(404, "not found")
        with self._changed:
            seat = self._seats[client]
            given = call.headers.get("session", "").encode()
            if seat.session is None or not secrets.compare_digest(seat.session.encode(), given):
                return _said(401, "join first")
            seat.connections.add(call.address)
        if call.path == "/next":
            self._heard(client)
            return await self._next(client, call)
        if call.path == "/answer":
            return await self._answered(client, call)
        with self._changed:
            self._leave(client)
        return Answer()

    def _may_call(self, seat: _Seat) -> bool:
        seat.tokens = min(BURST, seat.tokens + CALLS * (self._now - seat.filled))
        seat.filled = self._now
        if seat.tokens < 1:
            return False
        seat.tokens -= 1
        return True

    def _turned_away(self, address: str, certificate: bytes | None, why: str) -> None:
        """Notes who was refused; once an hour for each host and reason, since others decide how often that happens."""
        name, host = "" if certificate is None else holder(certificate), address.rpartition(":")[0]
        with self._changed:
            if name in self.names:
                seat = self._seats[self.names.index(name)]
                seat.refused, seat.why_refused = seat.refused + 1, why
                self._of_members(f"{name} {why}", f"refused {name}, from {address}: {why}", self._now)
            else:
                self._of_strangers(f"{host} {why}", f"refused {address}: {why}", self._now)

    def _heard(self, client: int) -> None:
        """Notes that a client was heard of."""
        seat = self._seats[client]
        with self._changed:
            seat.seen = self._now
            if not seat.told_here and self._over is None:
                self._log(f"{self.names[client]} is back, from {seat.address}")
            seat.told_here = True

    def _leave(self, client: int) -> None:
        seat = self._seats[client]
        if seat.told_here and self._over is None:
            self._log(f"{self.names[client]} has left")
        seat.session, seat.told_here = None, False
        seat.connections.clear()
        self._changed.notify_all()

    def _check(self, body: bytes) -> Answer:
        """Says whether a client with these settings would be let in, and what the clock here shows."""
        try:
            given = json.loads(body)
            agreed, terms = given["agreed"], dict(given["terms"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return _said(400, "this is not how a client asks")
        if agreed != self._agreed:
            return _said(409, f"its settings differ from those here: {differences(self._terms, terms)}")
        return Answer(200, json.dumps({"time": time.time()}).encode(), JSON)

    def _join(self, client: int, call: Call, body: bytes) -> Answer:
        try:
            given = json.loads(body)
            instance, agreed, terms = str(given["instance"]), given["agreed"], given["terms"]
            if not isinstance(terms, dict):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            return _said(400, "this is not how a client joins")
        with self._changed:
            seat, name = self._seats[client], self.names[client]
            if agreed != self._agreed:
                why = differences(self._terms, terms)
                return self._refuse(seat, name, call, 409, f"its settings differ from those here: {why}")
            if seat.session is not None and seat.instance != instance and seat.connections and self._is_here(client):
                first, second = seat.address.rpartition(":")[0], call.address.rpartition(":")[0]
                why = f"two processes take part as {name}, one from {first}, one from {second}"
                return self._refuse(seat, name, call, 423, f"{why}: the second waits until the first is gone")
            known, again = seat.instance is not None, seat.instance == instance
            seat.instance, seat.session, seat.address = instance, secrets.token_hex(16), call.address
            seat.connections = {call.address}
            seat.seen, seat.event = self._now, asyncio.Event()
            if seat.asked is not None:
                seat.asked.fetched = False  # whoever fetched it has forgotten it, or asks for it again
            if not seat.told_here or not again:
                how = "is back" if known else "has joined"
                self._log(f"{name} {how}, from {call.address}" + ("" if again or not known else ", a new process"))
            seat.told_here = True
            self._changed.notify_all()
            return Answer(200, json.dumps({"session": seat.session}).encode(), JSON)

    def _refuse(self, seat: _Seat, name: str, call: Call, status: int, why: str) -> Answer:
        seat.refused, seat.why_refused = seat.refused + 1, why
        self._of_members(f"{name} {status}", f"refused {name}, from {call.address}: {why}", self._now)
        return _said(status, why)

    async def _next(self, client: int, call: Call) -> Answer:
        """Waits for something to ask the client, for a while."""
        seat = self._seats[client]
        with self._changed:
            session, event = seat.session, seat.event
            assert event is not None
            event.clear()
            found = self._work(client)
        if found is None:
            waits = [asyncio.ensure_future(one.wait()) for one in (event, call.gone)]
            try:
                await asyncio.wait(waits, timeout=POLL, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in waits:
                    one.cancel()
        with self._changed:
            if found is None and (seat.session != session or call.gone.is_set()):
                return _said(401, "join first")
            seat.seen = self._now
            found = found or self._work(client)
            if found is None:
                return Answer(204)
            self.sent += len(found.body)
            return found

    def _work(self, client: int) -> Answer | None:
        seat = self._seats[client]
        if self._over is not None:  # who has heard it leaves
            return Answer(200, self._over)
        if seat.asked is None or seat.asked.fetched:
            return None
        seat.asked.fetched = True
        seat.tokens += 1  # what brings the training on is not counted
        together = seat.asked.together
        together.awaited.add(client)
        if not together.fetched:  # whoever asks looks at everybody: not for each of many
            together.fetched = True
            self._changed.notify_all()
        idle = together.deadline + SILENCE  # it computes meanwhile; the system notices if it is gone
        return Answer(200, seat.asked.body, headers=(("request", seat.asked.name),), idle=idle)

    async def _answered(self, client: int, call: Call) -> Answer:
        """Takes an answer, if it is to the request that the client has."""
        seat = self._seats[client]
        with self._changed:
            one = seat.asked
            if one is None or one.answer is not None or call.headers.get("request") != one.name:
                return _said(410, "nobody waits for this answer any more")
        body = await call.body(self._most)
        self._heard(client)
        with self._changed:
            if seat.asked is one and one.answer is None:
                one.answer = body
                seat.tokens += 1
                self.received += len(body)
                one.together.awaited.discard(client)
                if not one.together.awaited:
                    self._changed.notify_all()
        return Answer()


def differences(here: Terms, there: Terms) -> str:
    """Returns the settings that differ between two parties, in words.

    >>> differences({"method.beta": 0.1, "run.rounds": 5}, {"method.beta": 0.2, "run.rounds": 5})
    'method.beta is 0.1 with the server and 0.2 with the client'
    """
    parts = [
        _of_keys(here, there) if name == KEYS_OF_ALL else
        f"{visible(name, 60)} is {_shown(here.get(name))} with the server and {_shown(there.get(name))} with the client"
        for name in sorted({*here, *map(str, there)})
        if here.get(name) != there.get(name)
    ]  # fmt: skip
    more = f", and {len(parts) - 3} more" if len(parts) > 3 else ""
    return "; ".join(parts[:3]) + more if parts else "the versions of this program spell them out in different ways"


def _of_keys(here: Terms, there: Terms) -> str:
    """Returns whose keys are others with the client, where the server knows."""
    names, ours, theirs = here.get("federation.clients"), here.get(KEYS_OF_ALL), there.get(KEYS_OF_ALL)
    if not (isinstance(names, list) and isinstance(ours, list) and isinstance(theirs, list)):
        return f"{KEYS_OF_ALL} are not set with the {'server' if not isinstance(ours, list) else 'client'}"
    whose = [name or "one more" for name, own, other in zip_longest(names, ours, theirs) if own != other]
    return visible(f"{KEYS_OF_ALL} has other keys with the client for {', '.join(map(str, whose))}", 200)


def _shown(value: Any) -> str:
    try:
        return "not set" if value is None else visible(json.dumps(value), 60)
    except RecursionError:
        return "something else"


def _numbers(keys: Sequence[bytes | None]) -> dict[bytes, int]:
    """Returns the clients' numbers by their keys."""
    return {key: client for client, key in enumerate(keys) if key is not None}


def _said(status: int, why: str) -> Answer:
    return Answer(status, why.encode(), TEXT)
