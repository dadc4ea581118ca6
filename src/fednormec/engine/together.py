"""Clients that go through the stages of secure aggregation: the attempts at a sum, and all of it in this process."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from fednormec.core.algorithm import Server
from fednormec.core.bounds import Messages
from fednormec.core.local import Moment
from fednormec.core.participation import Cohort
from fednormec.core.stages import stage
from fednormec.engine.clients import FREE, Clients, Exchanged, Job, Paying, Work, computed, summed, tiles
from fednormec.engine.memories import Memories
from fednormec.errors import UserError
from fednormec.privacy.mechanism import Mechanism
from fednormec.secagg.aggregator import Aggregator, TooFew
from fednormec.secagg.layout import Refuses
from fednormec.secagg.member import Member
from fednormec.secagg.terms import Terms

ATTEMPTS = 3  # at one sum, each with keys and noise of its own
MOST = 1000  # clients of one process that go through the stages
UNLUCKY = 1e-15  # probability that a right sum is taken for one that cannot be
STAGES = ("keys", "shares", "masked", "agree", "unmask")
Ask = Callable[[str, Mapping[int, bytes]], Mapping[int, bytes]]
Lost = Callable[[int, int, str], Collection[int]]


class Opened(NamedTuple):
    """Sum that secure aggregation opened.

    Attributes:
        units: the noisy sum, in units of the grid, int64 (width,).
        members: numbers of the clients whose messages are in it.
    """

    units: np.ndarray
    members: tuple[int, ...]


class Naming(NamedTuple):
    """Names that make one sum unlike every other: of the training, of what all agreed on, and of the round."""

    run: str
    agreed: str
    round: int


def opened(
    mechanism: Mechanism, width: int, naming: Naming, roster: Mapping[int, ec.EllipticCurvePublicKey],
    begin: Callable[[Terms], Ask], paying: Paying, tell: Callable[[str], None], names: Sequence[str],
) -> Opened | None:  # fmt: skip
    """Returns the sum of a round; None if no attempt came to one that can be used, or the budget pays for no more.

    An attempt is paid for before noise leaves anybody; clients count it once they have sent. What fails earlier costs
    nothing, and is told only if more goes wrong in the round. The next attempt is without those who did not answer.

    Args:
        mechanism: what the noise follows.
        width: number of numbers in a message.
        naming: names of the sum.
        roster: public keys of the clients that are asked, by number.
        begin: begin(terms) -> ask(stage, bodies), by which clients are asked in one attempt.
        paying: pays for each attempt.
        tell: called with why an attempt failed.
        names: names of all clients, by number.
    """
    asked, least, kept_back = dict(roster), mechanism.min_survivors, list[str]()

    def told(said: str) -> None:
        for one in (*kept_back, said):
            tell(one)
        kept_back.clear()

    def without(why: str) -> None:
        told(f"round {naming.round} has no sum: {why}")

    for attempt in range(1, ATTEMPTS + 1):
        if len(asked) < least:
            few = f"{_clients(len(asked))} left to ask" if asked else "fewer were drawn that can take part"
            without(f"it needs {least} clients, and {few}")
            return None
        terms = Terms(*naming, attempt, asked, least, mechanism.colluders, width)
        calls, paid = _Calls(begin(terms)), paying.paid
        try:
            words, members = aggregated(terms, calls, paying, tell, names)
        except NotPaid:
            without("the budget pays for no further attempt")
            return None
        except TooFew as why:
            said = f"attempt {attempt} of {ATTEMPTS} at the sum of round {naming.round} failed: {named(why, names)}"
            if paying.paid == paid:
                kept_back.append(said)
            else:
                told(said)
            asked = {client: key for client, key in asked.items() if client in calls.here}
            continue
        found = Opened(words.view(np.int32).astype(np.int64), tuple(members))
        if float(np.linalg.norm(found.units.astype(float))) > longest_sum(mechanism, len(members), width):
            told(f"the sum of round {naming.round} cannot be one of {len(members)} messages: somebody sent what no "
                 "message can be; it counts as released, and is not used")  # fmt: skip
            return None
        return found
    without(f"none of {ATTEMPTS} attempts came to one")
    return None


def _clients(count: int) -> str:
    return "1 client is" if count == 1 else f"{count} clients are"


class NotPaid(Exception):
    """End of an attempt that the budget does not pay for."""


class _Calls:
    """Way to ask that remembers who answered at the first stage."""

    def __init__(self, ask: Ask) -> None:
        self._ask, self.here = ask, frozenset[int]()

    def __call__(self, name: str, bodies: Mapping[int, bytes]) -> Mapping[int, bytes]:
        found = self._ask(name, bodies)
        if name == STAGES[0]:
            self.here = frozenset(found)
        return found


def aggregated(
    terms: Terms, ask: Ask, paying: Paying, tell: Callable[[str], None], names: Sequence[str]
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Takes one attempt through all stages, on the server's side.

    Raises TooFew if not enough clients are left, NotPaid if the budget does not pay for what they would send.
    """
    aggregator = Aggregator(terms)
    hear = (aggregator.keys, aggregator.shares, aggregator.masked, aggregator.agree)
    try:
        bodies: Mapping[int, bytes] = dict.fromkeys(terms.cohort, b"")
        for name, heard in zip(STAGES[:-1], hear, strict=True):
            if name == "masked" and not paying.pay():
                raise NotPaid
            bodies = heard(ask(name, bodies))
        return aggregator.unmask(ask(STAGES[-1], bodies))
    finally:
        for member, why in aggregator.refused.items():
            tell(f"{names[member]} was left out of an attempt: {named(why, names)}")


def named(why: object, names: Sequence[str]) -> str:
    """Returns a sentence of secure aggregation with the names of its members.

    >>> named("the box of member 1 does not open", ["north", "south"])
    'the box of south does not open'
    """
    return re.sub(r"\bmember (\d+)\b", lambda found: names[int(found[1])], str(why))


def longest_sum(mechanism: Mechanism, senders: int, width: int) -> float:
    """Returns how long a sum of so many messages and their noise can be, in units, but with probability 1e-15."""
    assert mechanism.grid is not None
    steps, deviations = mechanism.grid.steps, math.sqrt(width) + math.sqrt(-2 * math.log(UNLUCKY))
    return senders * steps + mechanism.noise_std * steps * math.sqrt(senders) * deviations * (1 + 1e-6)


def in_units(work: Work, message: Tensor) -> np.ndarray:
    """Returns a message in units of the grid, rounded towards zero, int64; raises BoundBroken if it is too long."""
    assert work.adding.grid is not None
    measured = summed(work.algorithm, Messages(message[None]), message.new_ones(1), work.adding)
    units: np.ndarray = (measured / work.adding.grid.unit).cpu().numpy().astype(np.int64)
    return units


def in_words(units: np.ndarray) -> np.ndarray:
    """Returns whole numbers modulo 2^32, as secure aggregation adds them."""
    words: np.ndarray = (units & 0xFFFFFFFF).astype(np.uint32)
    return words


class Together(NamedTuple):
    """Place where all clients of a process go through the stages of secure aggregation with a server beside them.

    Nothing but the stages' bytes goes between a client and the server, as over a network. It is for a few hundred
    clients at the most; `Threads` does the same where the protocol is asked for.

    Args:
        lost: lost(round, attempt, stage) -> numbers of the clients that are gone from this stage on, for trials.
        tell: called with why an attempt failed.
    """

    lost: Lost = lambda round, attempt, stage: ()
    tell: Callable[[str], None] = lambda said: None

    def check(self, job: Job) -> None:
        """Raises UserError if the job is for no secure aggregation, or has too many clients for one process."""
        if job.mechanism is None or not job.protocol:
            raise UserError("clients add up their messages together only in secure aggregation: set "
                            "privacy.trust = 'secagg' and privacy.protocol = true.")  # fmt: skip
        m = job.problem.num_clients
        if m > MOST:
            raise UserError(f"the stages of secure aggregation run in one process for up to {MOST:,} clients, not "
                            f"{m:,}: set privacy.protocol = false to simulate its noise alone.")  # fmt: skip
        mechanism = job.mechanism
        keys = dict(enumerate(key.public_key() for key in _keys(m)))
        Terms("check", "", 0, 1, keys, mechanism.min_survivors, mechanism.colluders, 1).checked()

    @contextmanager
    def clients(self, job: Job) -> Iterator[Clients]:
        """Opens the clients of a job."""
        yield _Members(self, job)


class _Members:
    """Clients of this process, each with a key of its own, and the server that adds up what they mask."""

    noisy = True

    def __init__(self, place: Together, job: Job) -> None:
        self._place, self._job, self._work = place, job, job.work()
        self._keys = _keys(job.problem.num_clients)
        self._names = [f"client {number + 1}" for number in range(job.problem.num_clients)]
        self.memories = Memories(job.memory_shape, job.x.dtype, job.x.device)

    def ready(self) -> None:
        pass

    def exchange(
        self, server: Server, cohort: Cohort, moment: Moment, prime: bool = False, paying: Paying = FREE
    ) -> Exchanged:
        mechanism = self._job.mechanism
        assert not prime and mechanism is not None
        senders = cohort.computing[cohort.sending].tolist()
        before = self.memories.rows[cohort.computing].clone()
        messages, left_out = self._computed(server, cohort, moment)
        roster = {client: self._keys[client].public_key() for client in senders}
        naming = Naming("process", "process", moment.round)
        with stage("secure sum"):
            found = opened(
                mechanism, self._work.message_width, naming, roster, lambda terms: self._asking(terms, messages),
                paying, self._place.tell, self._names,
            )  # fmt: skip
        heard = [] if found is None else list(found.members)
        counts = np.isin(cohort.computing, heard) | (~cohort.sending & (found is not None))
        self.memories.rows[cohort.computing[~counts]] = before[~counts]  # as if they had not computed
        total = torch.zeros(self._work.message_width, dtype=torch.float64)
        if found is not None and mechanism.grid is not None:
            total = torch.from_numpy(found.units * mechanism.grid.unit)
        answered = Cohort(cohort.computing[counts], cohort.sending[counts])
        return Exchanged(total.to(self._job.x.device), left_out, answered, int((~counts).sum()))

    def _computed(self, server: Server, cohort: Cohort, moment: Moment) -> tuple[dict[int, np.ndarray], int]:
        """Returns the senders' messages in units, and the number of clients that were left out; moves memories."""
        work, found, left_out = self._work, dict[int, np.ndarray](), 0
        for some in tiles(self._job, cohort):
            rows = self.memories.rows[some.computing]
            messages, broken = computed(work.problem, work.algorithm, server, rows, some.computing, moment)
            with stage("memories"):
                self.memories.rows[some.computing] = rows
                left_out += broken
                whole = messages.whole()
                for place in np.flatnonzero(some.sending):
                    found[int(some.computing[place])] = in_units(work, whole[place])
        return found, left_out

    def _asking(self, terms: Terms, messages: Mapping[int, np.ndarray]) -> Ask:
        """Returns how the members of one attempt are asked: each draws its noise once, when it is asked to mask."""
        mechanism, gone = self._job.mechanism, set[int]()
        assert mechanism is not None
        members = {client: Member(terms, client, self._keys[client]) for client in terms.cohort}

        def answer(name: str, client: int, body: bytes) -> bytes:
            member = members[client]
            if name == "keys":
                return member.keys()
            if name == "masked":
                with stage("noise"):
                    noise = mechanism.own_noise(terms.width)
                return member.masked(body, in_words(messages[client] + noise))
            ways: dict[str, Callable[[bytes], bytes]] = {
                "shares": member.shares, "agree": member.agree, "unmask": member.unmask,
            }  # fmt: skip
            return ways[name](body)

        def ask(name: str, bodies: Mapping[int, bytes]) -> dict[int, bytes]:
            gone.update(self._place.lost(terms.round, terms.attempt, name))
            heard = dict[int, bytes]()
            for client, body in bodies.items():
                if client not in gone:
                    try:
                        heard[client] = answer(name, client, body)
                    except Refuses as why:
                        self._place.tell(f"{self._names[client]} refused at {name}: {named(why, self._names)}")
            return heard

        return ask


def _keys(count: int) -> list[ec.EllipticCurvePrivateKey]:
    return [ec.generate_private_key(ec.SECP256R1()) for _ in range(count)]
