"""Secure aggregation over the wire: what server and client say to each other at each stage, and the two sides.

`fednormec.secagg` makes the bytes of every stage. Here they get an envelope, a client's message and noise, the count of
what left it, and on the server's side the memories that count.
"""

import hashlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fednormec.core.algorithm import Server
from fednormec.core.local import Moment
from fednormec.core.participation import Cohort
from fednormec.engine.clients import FREE, Clients, Exchanged, Job, Paying
from fednormec.engine.together import STAGES, Ask, Naming, in_units, in_words, named, opened
from fednormec.errors import BoundBroken, UserError
from fednormec.federation.agreement import Federation
from fednormec.federation.client_state import Kept, Store
from fednormec.federation.keys import CLIENT_KEY, Private, Public, fingerprint, on_roster, private_key
from fednormec.federation.messages import (
    DONE,
    LOST,
    MISSED,
    REFUSED,
    Refused,
    Reply,
    Request,
    StageReply,
    cohort_in,
    read_request,
    read_stage,
    read_stage_reply,
    request_bytes,
    stage_bytes,
    stage_reply_bytes,
)
from fednormec.federation.record_releases import RecordReleases
from fednormec.federation.releases import Releases
from fednormec.federation.wire import Remote, Wire, taken
from fednormec.privacy.mechanism import Mechanism
from fednormec.secagg.graph import signatures_needed
from fednormec.secagg.layout import Refuses
from fednormec.secagg.member import Member
from fednormec.secagg.terms import Terms

KEYS = STAGES[0]


class Prepared(NamedTuple):
    """Message of a client that is computed, and where it is stored.

    Attributes:
        store: the store of its memory in this training.
        before: what was stored before.
        kept: its memory after the round, and its message before noise.
        computed_on: count of the rounds on its records; None where they are not protected by themselves.
    """

    store: Store
    before: Kept
    kept: Kept
    computed_on: RecordReleases | None = None

    def keep(self, kept: Kept) -> None:
        """Stores what was computed, unless it is stored already; it may leave then."""
        if kept is not self.before:
            self.store.save(kept)
        if self.computed_on is not None:
            self.computed_on.may_leave()


Prepare = Callable[[Request], Prepared | Reply]


def keys_of(federation: Federation) -> tuple[Public, ...]:
    """Returns the clients' public keys that all agreed on, by number; raises UserError if one is missing or wrong."""
    names, texts = federation.settings.clients, federation.settings.keys
    missing = [name for name, text in zip(names, [*texts, *[""] * len(names)], strict=False) if not text]
    if missing or len(texts) > len(names):
        why = f"these have none there: {', '.join(missing)}" if missing else f"there are {len(texts)} for {len(names)}"
        raise UserError(f"secure aggregation needs the public keys of all clients in federation.toml, and {why}. Put "
                        "them on the roster (fednormec federation sign) and send the new file to all.")  # fmt: skip
    for number, text in enumerate(texts):
        if text in texts[:number]:
            first = names[list(texts).index(text)]
            raise UserError(f"{first} and {names[number]} have the same key in federation.toml: each needs its own.")
    return tuple(map(on_roster, names, texts))


def own_key(federation: Federation, client: int, folder: Path) -> Private:
    """Returns a client's own key; raises UserError if it is not the one that all agreed on."""
    key = private_key(folder / CLIENT_KEY)
    if fingerprint(key.public_key()) != fingerprint(keys_of(federation)[client]):
        raise UserError(f"{folder / CLIENT_KEY} is not the key that federation.toml has for this client: ask the "
                        "server's operator to sign it (fednormec federation sign), and take the new federation.toml."
                        )  # fmt: skip
    return key


def must_stay(m: Mechanism) -> str:
    """Returns how many clients a round needs where messages are added up in secure aggregation, in words."""
    rate = m.participation.rate(m.num_clients)
    asked = max(m.min_survivors, round(rate * m.num_clients))
    needed = signatures_needed(asked, m.min_survivors, m.colluders)
    often = "" if rate == 1 else ", as on average,"
    return f"if {asked} clients are asked{often} {needed} must stay, and a sum needs {m.min_survivors} messages"


class Summing:
    """Client's side of secure aggregation: one attempt at a time, whose secrets are in this process' memory alone.

    Args:
        federation: the federation as this client knows it.
        client: its number.
        folder: where its key is stored.
        prepare: computes its message, or says why not.
        released: count of what left it.
        tell: called with what its owner should know.
    """

    def __init__(
        self, federation: Federation, client: int, folder: Path, prepare: Prepare, released: Releases,
        tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        assert federation.mechanism is not None
        self._federation, self._client, self._prepare = federation, client, prepare
        self._released, self._tell, self._mechanism = released, tell, federation.mechanism
        self._keys, self._own = keys_of(federation), own_key(federation, client, folder)
        job = _job(federation)
        self._work, self._like, self._memory = job.work(), job.x, len(job.algorithm.init(job.x).memory)
        self._memory *= job.algorithm.reads_memory
        self._member: Member | None = None
        self._nonce, self._run, self._units = b"", "", np.zeros(0, np.int64)
        self._last = (b"", b"")  # digest of the last request, and its answer

    def answer(self, data: bytes) -> bytes:
        """Returns the answer to a request of any stage; the same request again gets the same answer."""
        digest = hashlib.sha256(data).digest()
        if digest != self._last[0]:
            self._last = (digest, stage_reply_bytes(self._answered(data)))
        return self._last[1]

    def _answered(self, data: bytes) -> StageReply:
        nonce = b""
        try:
            kind, nonce, body = read_stage(data)
            if kind == KEYS:
                return self._begun(data)
            if self._member is None or nonce != self._nonce:
                raise Refused("it is of an attempt that this client knows nothing of: it may have been restarted")
            return StageReply(nonce, DONE, body=self._next(kind, self._member, body))
        except (Refused, Refuses) as why:
            self._member = None  # whatever comes next of this attempt is refused, too
            said = named(why, self._federation.settings.clients)
            self._tell(f"a request for secure aggregation was refused: {said}")
            return StageReply(nonce, REFUSED, said)

    def _begun(self, data: bytes) -> StageReply:
        """Computes the message and makes new keys for an attempt; those of the one before are gone."""
        request = read_request(data, len(self._like), self._memory, self._like.dtype)
        attempt, cohort = cohort_in(data, len(self._keys))
        self._member = None
        if self._client not in cohort or not request.sends:
            raise Refused("this client is not in it")
        found = self._prepare(request)
        if isinstance(found, Reply):
            return StageReply(request.nonce, found.status, found.why, round=found.round)
        if not self._released.left():
            raise Refused("all messages that the privacy budget pays for have been sent")
        found.keep(found.kept)
        try:
            self._units = in_units(self._work, found.kept.message)
        except BoundBroken:
            raise Refused("the message that is stored here is not one that can be sent") from None
        try:
            terms = Terms(
                request.run, request.agreed, request.round, attempt, {i: self._keys[i] for i in cohort},
                self._mechanism.min_survivors, self._mechanism.colluders, self._work.message_width,
            )  # fmt: skip
            terms.checked()
        except UserError as error:
            raise Refused(str(error)) from None
        self._member, self._nonce, self._run = Member(terms, self._client, self._own), request.nonce, request.run
        return StageReply(request.nonce, DONE, body=self._member.keys())

    def _next(self, kind: str, member: Member, body: bytes) -> bytes:
        if kind == "masked":
            noise = self._mechanism.own_noise(len(self._units))
            masked = member.masked(body, in_words(self._units + noise))
            if not self._released.reserve(self._run):
                raise Refused("all messages that the privacy budget pays for have been sent")
            self._released.may_leave()
            return masked
        ways = {"shares": member.shares, "agree": member.agree, "unmask": member.unmask}
        return ways[kind](body)


class SecureWire(NamedTuple):
    """Place where the clients of a federation compute whose messages secure aggregation adds up.

    Args:
        wire: the clients.
        carry: sends each client the bytes of a request and returns the bytes that came in time.
        keys: the clients' public keys, by number.
    """

    wire: Wire
    carry: Callable[[Mapping[int, bytes]], Mapping[int, bytes]]
    keys: Sequence[Public]

    def check(self, job: Job) -> None:
        """Raises UserError if the federation does not fit the job."""
        self.wire.check(job)
        if not job.protocol:
            raise UserError("this federation agreed on no secure aggregation.")

    @contextmanager
    def clients(self, job: Job) -> Iterator[Clients]:
        """Opens the clients of a job."""
        yield _Masked(self, self.wire.run(), job)


class _Masked(Remote):
    """Clients of a federation that show the server the sum of their messages alone."""

    def __init__(self, place: SecureWire, run: str, job: Job) -> None:
        super().__init__(place.wire, run, job)
        assert job.mechanism is not None
        self._place, self._mechanism = place, job.mechanism
        self.noisy = True
        self.needed = self._mechanism.min_survivors

    def exchange(
        self, server: Server, cohort: Cohort, moment: Moment, prime: bool = False, paying: Paying = FREE
    ) -> Exchanged:
        assert not prime, "a federation starts from zero"
        asked = self._requests(server, cohort, moment)
        roster = {client: self._place.keys[client] for client, request in asked.items() if request.sends}
        found = opened(
            self._mechanism, self._size, Naming(self._run, self._wire.agreed, moment.round), roster,
            lambda terms: self._asking(terms, asked), paying, self._wire.tell, self._wire.names,
        )  # fmt: skip
        if found is None or self._mechanism.grid is None:  # as if nobody had computed
            nobody = Cohort(np.zeros(0, np.int64), np.zeros(0, bool))
            return Exchanged(torch.zeros(self._size, dtype=torch.float64), 0, nobody, len(cohort.computing))
        idle = {client: one for client, one in asked.items() if not one.sends}
        moved = [client for client, reply in (self._wire.ask(idle) if idle else {}).items()
                 if self._moved(client, reply, idle[client])]  # fmt: skip
        heard = np.array(sorted([*found.members, *moved]), np.int64)
        self.memories.rows[heard, 0] = float(moment.round)
        answered = Cohort(heard, np.isin(heard, found.members))
        total = torch.from_numpy(found.units * self._mechanism.grid.unit)
        return Exchanged(total, 0, answered, len(cohort.computing) - len(heard))

    def _moved(self, client: int, reply: Reply | Refused, request: Request) -> bool:
        """Returns whether a client that does not send has moved its memory."""
        try:
            if self._lost(client, reply, request):
                return False
            taken(reply, request, self._size, 0.0)
        except Refused as why:
            self._say(client, REFUSED, f"sent what was refused: {why}")
            return False
        return True

    def _asking(self, terms: Terms, asked: Mapping[int, Request]) -> Ask:
        """Returns how clients are asked in one attempt; each has a nonce of its own."""
        nonces = {client: secrets.token_bytes(16) for client in terms.cohort}

        def ask(name: str, bodies: Mapping[int, bytes]) -> dict[int, bytes]:
            requests = {}
            for client, body in bodies.items():
                if name == KEYS:
                    request = asked[client]._replace(nonce=nonces[client])
                    requests[client] = request_bytes(request, KEYS, terms.attempt, terms.cohort)
                else:
                    requests[client] = stage_bytes(name, nonces[client], body)
            found, heard = self._place.carry(requests), dict[int, bytes]()
            for client in requests:
                said = self._heard(client, found.get(client), nonces[client], asked[client])
                if said is not None:
                    heard[client] = said
            return heard

        return ask

    def _heard(self, client: int, data: bytes | None, nonce: bytes, request: Request) -> bytes | None:
        """Returns what a client says at a stage; None if it is not to be counted on any more."""
        if data is None:
            self._wire.notice(client, MISSED, "")
            return None
        try:
            reply = read_stage_reply(data)
            if reply.status == REFUSED:
                raise Refused(f"it says: {reply.why}")
            if not secrets.compare_digest(reply.nonce, nonce):
                raise Refused("it answers another request")
            if reply.status == LOST:
                self._lost(client, Reply(reply.round, request.nonce, LOST), request)
                return None
            return reply.body
        except Refused as why:
            self._say(client, REFUSED, f"is left out of a sum: {why}")
            return None


def _job(federation: Federation) -> Job:
    """Returns the job as a client computes its own part of it."""
    problem, algorithm, participation, _, run, *_ = federation.experiment
    x = problem.init(np.random.default_rng(0))
    return Job(problem, federation.algorithm, algorithm.rule(participation), federation.plan, run.seed, x)
