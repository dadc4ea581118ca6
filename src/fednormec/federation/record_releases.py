"""Count of the rounds that a client computed on its records: what they cost together, and how many more may follow.

A round counts when it is computed, whether its message leaves or not: what a memory takes in shows in later messages.
"""

import json
import math
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from fednormec.errors import UserError
from fednormec.federation.releases import RECORDS, in_the_way, messages_in
from fednormec.files import replace_text, to_json
from fednormec.privacy.accounting import Hidden, Open, Release, epsilon_of_all
from fednormec.privacy.calibrate import most_rounds
from fednormec.privacy.labels import up
from fednormec.privacy.records import PERSON, ROW, RecordPlan

Counts = tuple[tuple[Release, int], ...]


class RecordReleases:
    """Number of rounds that a client computed on its records, by agreement, whatever the server calls its trainings.

    It is stored in a file of its own, which stays when a memory is moved away or another agreement comes. The budget
    is that of the records: rounds under other agreements count too, and so do messages under agreements that protected
    the client alone.

    Args:
        folder: where the file is stored.
        agreed: digest of the agreement under which rounds are computed now.
        plan: its plan, with this client's silo.
        budget: the ε that all rounds may come to together; None: what this agreement promises.
        beside: whether the agreement protects clients, too.
    """

    def __init__(
        self, folder: Path, agreed: str, plan: RecordPlan, budget: float | None = None, beside: bool = False
    ) -> None:
        self.path, self._folder, self._agreed, self._plan, self._budget = folder / RECORDS, folder, agreed, plan, budget
        (silo,) = plan.silos
        release, std = silo.sum.release(), None
        if plan.secure:
            shift = silo.sum.shift if isinstance(release, Open) else 1.0
            std = shift / (release.mus[0] if isinstance(release, Open) else release.mu)
        self._empty = _Computed(
            0, "", silo.records, silo.sum.p, silo.steps, std, release.unlike, beside, plan.record
        )  # fmt: skip

    @property
    def has_budget(self) -> bool:
        """Whether a budget is kept: always."""
        return True

    @property
    def limited(self) -> bool:
        """Whether the budget is another one than what the agreement promises."""
        return self._budget is not None

    @property
    def most(self) -> int:
        """Number of rounds that the agreement has."""
        return self._plan.rounds

    def count(self) -> int:
        """Returns the number of rounds under this agreement; raises UserError if the file is damaged."""
        return self._mine(self._load()).rounds

    def before(self) -> int:
        """Returns the number of rounds under other agreements, and of messages that protected the client alone."""
        every = self._load()
        return sum(one.rounds for agreed, one in every.items() if agreed != self._agreed) + self._messages(every)[0]

    def epsilon(self, more: int = 0) -> float:
        """Returns the ε of a record after all that was computed, and `more` rounds under this agreement.

        It is inf if no ε holds.
        """
        every = self._load()
        others, mine = self._others(every), self._mine(every)
        if others is None or (mine.std is None and mine.rounds + more):
            return math.inf
        return _together((*others, (self._release(mine), (mine.rounds + more) * mine.steps)), self._plan.delta)

    def left(self) -> int:
        """Returns how many more rounds the budget pays for, of those that the agreement has."""
        every = self._load()
        return max(0, self._paid_for(every) - self._mine(every).rounds)

    def reserve(self, request: str) -> bool:
        """Counts one more round, which is on the disk afterwards; returns False if the budget does not pay for it.

        A kill can leave a round that was counted and never stored: it is not counted again for the same request.

        Args:
            request: digest of the request that is about to be computed.
        """
        every = self._load()
        mine = self._mine(every)
        if mine.under_way != request:
            if mine.rounds >= self._paid_for(every):
                return False
            self._store(mine._replace(rounds=mine.rounds + 1, under_way=request))
        return True

    def may_leave(self) -> None:
        """Notes that what was counted is stored and may leave; that is on the disk afterwards."""
        mine = self._mine(self._load())
        if mine.under_way:
            self._store(mine._replace(under_way=""))

    def said(self) -> str:
        """Returns what was computed on the records so far, in words."""
        count, before = self.count(), self.before()
        if not before and self._budget is None:
            return f"{count:,} of at most {self.most:,} rounds were computed on the records here"
        spent = f"{before:,} rounds were computed on these records under other agreements and {count:,} under this one"
        epsilon = self.epsilon()
        if not math.isfinite(epsilon):
            return f"{spent}; some had no noise that protects a record, so that no ε holds for all of them together"
        return (
            f"{spent}: ε ≤ {up(epsilon)} at δ = {self._plan.delta:g} for a record so far, if these numbers had been "
            f"fixed beforehand. The budget pays for {self.left():,} of the {self.most - count:,} rounds that this one "
            "still asks for"
        )

    def trouble(self) -> str | None:
        """Returns why not to take part: what was computed takes up the budget. None: nothing stands in the way."""
        return in_the_way(self, self._plan)

    def _paid_for(self, every: "dict[str, _Computed]") -> int:
        """Returns how many rounds under this agreement may have been computed in all."""
        if self._empty.std is None:
            return self.most
        others = self._others(every)
        if others is None:
            return 0 if self._budget is not None else self.most  # no ε is kept to any more, as `said` says
        budget = self._budget
        if budget is None:
            if not others:
                return self.most
            budget = self._plan.epsilon(self._plan.rounds)
        return _paid_for(others, (self._release(self._empty), self._empty.steps), self.most, self._plan.delta, budget)

    def _others(self, every: "dict[str, _Computed]") -> Counts | None:
        """Returns the releases under all other agreements; None if some of them protected no record."""
        those = [one for agreed, one in every.items() if agreed != self._agreed and one.rounds]
        _, messages = self._messages(every)
        if messages is None or any(one.std is None or not self._covers(one) for one in those):
            return None
        return (*((self._release(one), one.rounds * one.steps) for one in those), *messages)

    def _messages(self, every: "dict[str, _Computed]") -> tuple[int, Counts | None]:
        """Returns the messages under agreements that protected the client alone, as releases of a record.

        Another record can change a message into any other one, whatever a neighbour was then.
        """
        found = [one for agreed, one in messages_in(self._folder).items() if agreed not in every and one.releases]
        count = sum(one.releases for one in found)
        if any(one.std is None for one in found):
            return count, None
        return count, tuple((Open((1.0,), (2 / one.std,), unlike=one.unlike), one.releases) for one in found if one.std)

    def _covers(self, one: "_Computed") -> bool:
        """Returns whether what was a record then is at least what is one now: rows of a person pay one by one."""
        return one.record == self._plan.record or one.record == PERSON

    def _release(self, one: "_Computed") -> Release:
        """Returns one step under an agreement, by the neighbours of this one."""
        std, mirrored = one.std or 0.0, self._plan.adjacency == "replace_one"
        if one.rate < 1:
            return Hidden(one.rate, 1 / std, mirrored, one.unlike)
        return Open((1.0,), ((2 if mirrored else 1) / std,), unlike=one.unlike)

    def _mine(self, every: "dict[str, _Computed]") -> "_Computed":
        mine = every.get(self._agreed, self._empty)
        if mine.rounds and not _alike(mine, self._empty):
            raise UserError(
                f"{self.path} counts rounds on {mine.records:,} records under this agreement, and here are "
                f"{self._empty.records:,}: noise and ε follow from that number. Put the data back that the training "
                "began with, or agree on a new one."
            )
        return mine

    def _store(self, mine: "_Computed") -> None:
        every = self._load() | {self._agreed: mine}
        replace_text(self.path, to_json({agreed: one._asdict() for agreed, one in every.items()}) + "\n")

    def _load(self) -> dict[str, "_Computed"]:
        return rounds_in(self._folder)


class _Computed(NamedTuple):
    """Rounds that were computed on the records under one agreement.

    Attributes:
        rounds: number of them.
        under_way: digest of the request whose round is counted and not yet stored.
        records: number of records.
        rate: probability with which a record is in a step's batch.
        steps: number of steps in a round.
        std: noise on the sum of a step, over the radius; None if there is none that protects.
        unlike: how unlike that noise is to continuous noise, as in `accounting.Hidden`.
        beside: whether the agreement protects clients, too.
        record: what a record is, in words.
    """

    rounds: int
    under_way: str
    records: int
    rate: float
    steps: int
    std: float | None
    unlike: float = 0.0
    beside: bool = False
    record: str = ROW


def rounds_in(folder: Path) -> dict[str, _Computed]:
    """Returns what was computed on a client's records, by agreement; raises UserError if the file is damaged."""
    path = folder / RECORDS
    if not path.exists():
        return {}
    try:
        every = {agreed: _Computed(**one) for agreed, one in json.loads(path.read_text(encoding="utf-8")).items()}
        if all(map(_possible, every.values())):
            return every
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        pass
    raise UserError(f"{path}, which counts what was computed on the records here, is damaged: put a copy of it back.")


def _alike(one: _Computed, other: _Computed) -> bool:
    """Returns whether rounds are on as many records and with the same noise."""
    if (one.std is None) != (other.std is None) or not math.isclose(one.std or 1.0, other.std or 1.0, rel_tol=1e-6):
        return False
    return one[2:5] == other[2:5] and one[7:] == other[7:]


def _possible(one: _Computed) -> bool:
    counts = all(type(n) is int and n >= 0 for n in (one.rounds, one.records, one.steps)) and one.steps > 0
    numbers = all(type(n) in (int, float) and math.isfinite(n) for n in (one.rate, one.unlike, one.std or 1.0))
    possible = numbers and 0 < one.rate <= 1 and 0 <= one.unlike <= 1 and (one.std is None or one.std > 0)
    named = type(one.under_way) is str and one.record in (ROW, PERSON)
    return counts and possible and named and type(one.beside) is bool


@lru_cache(maxsize=8)
def _together(counts: Counts, delta: float) -> float:
    """Returns the ε of so many releases of each kind."""
    kinds = Counter[Release]()
    for release, count in counts:
        kinds[release] += count
    return epsilon_of_all(kinds, delta)


@lru_cache(maxsize=8)
def _paid_for(others: Counts, mine: tuple[Release, int], most: int, delta: float, budget: float) -> int:
    """Returns how many rounds of so many releases a budget pays for besides what others had."""
    release, steps = mine
    return most_rounds(lambda rounds: _together((*others, (release, rounds * steps)), delta) <= budget, most)
