"""Count of the messages that have left a client: what they cost together, and how many more its budget pays for."""

import json
import math
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

from fednormec.errors import UserError
from fednormec.files import replace_text, to_json
from fednormec.privacy.accounting import Open, Release, epsilon_of_all
from fednormec.privacy.calibrate import most_rounds
from fednormec.privacy.labels import up
from fednormec.privacy.mechanism import Plan
from fednormec.privacy.records import AnyPlan

FILE, RECORDS = "releases.json", "records.json"  # of messages, and of rounds on records
Others = tuple[tuple[float, float, int], ...]  # mu, unlike and number of messages


class Releases:
    """Number of messages that have left a client, by agreement, whatever the server calls its trainings.

    It is stored in a file of its own, which stays when a memory is moved away or another agreement comes. The budget
    is that of the client's data: what left under other agreements counts too, by the promise of this one, which says
    who is a neighbour, who is trusted and how many clients may collude.

    Args:
        folder: where the file is stored.
        agreed: digest of the agreement under which messages leave now.
        plan: its plan, in which clients add their own noise; None: they add none, and no budget is kept here.
        budget: the ε that messages under all agreements may come to together; None: what this agreement promises.
    """

    def __init__(self, folder: Path, agreed: str, plan: Plan | None = None, budget: float | None = None) -> None:
        self.path, self._agreed, self._plan, self._budget = folder / FILE, agreed, plan, budget
        self._empty = _Released(0, "", None) if plan is None else _noise_of(plan)

    @property
    def has_budget(self) -> bool:
        """Whether the client adds noise of its own, so that it keeps a budget."""
        return self._plan is not None

    @property
    def most(self) -> int:
        """Number of messages that the agreement's rounds pay for."""
        return 0 if self._plan is None else self._plan.rounds_before + self._plan.rounds

    def count(self) -> int:
        """Returns the number of messages under this agreement; raises UserError if the file is damaged."""
        return self._mine(self._load()).releases

    def before(self) -> int:
        """Returns the number of messages under all other agreements."""
        return sum(other.releases for agreed, other in self._load().items() if agreed != self._agreed)

    def epsilon(self, more: int = 0) -> float:
        """Returns the ε of all that left so far and of `more` messages under this agreement; inf if nothing holds."""
        every = self._load()
        mine = self._mine(every)
        every[self._agreed] = mine._replace(releases=mine.releases + more)
        those = [one for one in every.values() if one.releases]
        if self._plan is None or self._unprotected or any(one.std is None for one in those):
            return math.inf
        return _together(tuple(map(self._counted, those)), self._plan.delta)

    def left(self) -> int:
        """Returns how many more messages the budget pays for, of those that the agreement has."""
        every = self._load()
        return max(0, self._paid_for(every) - self._mine(every).releases)

    def reserve(self, run: str) -> bool:
        """Counts one more message, which is on the disk afterwards; returns False if the budget does not pay for it.

        A kill can leave a message of this training that was counted and never left. The one that takes its place in the
        store is not counted again. One of another training is: the store still holds the first, which may yet leave.
        """
        every = self._load()
        mine = self._mine(every)
        if mine.still_here != run:
            if self.has_budget and mine.releases >= self._paid_for(every):
                return False
            self._store(mine._replace(releases=mine.releases + 1, still_here=run))
        return True

    def may_leave(self) -> None:
        """Notes that the message that was counted is stored and may leave; that is on the disk afterwards."""
        mine = self._mine(self._load())
        if mine.still_here:
            self._store(mine._replace(still_here=""))

    def said(self) -> str:
        """Returns what has left the client so far, in words."""
        count, before = self.count(), self.before()
        if not before and self._budget is None:
            return f"{count:,} of at most {self.most:,} messages have left"
        spent = f"{before:,} messages have left under other agreements and {count:,} under this one"
        epsilon = self.epsilon()
        if self._plan is None or not math.isfinite(epsilon):
            wanted, left, fewer = self.most - count, self.left(), ""
            if left < wanted:
                fewer = f"; {left:,} of the {wanted:,} messages that this one still asks for may leave"
            return (
                f"{spent}; some had no noise of this client's own, or noise that protects nobody, so that no ε holds "
                f"for all of them together{fewer}"
            )
        return (
            f"{spent}: ε ≤ {up(epsilon)} at δ = {self._plan.delta:g} so far, if these numbers had been fixed "
            f"beforehand. The budget pays for {self.left():,} of the {self.most - count:,} that this one still asks for"
        )

    @property
    def limited(self) -> bool:
        """Whether the budget is another one than what the agreement promises."""
        return self._budget is not None

    def trouble(self) -> str | None:
        """Returns why not to take part: what left before takes up the budget. None: nothing stands in the way."""
        return None if self._plan is None else in_the_way(self, self._plan)

    def _paid_for(self, every: "dict[str, _Released]") -> int:
        """Returns how many messages under this agreement may have left in all."""
        if self._plan is None or self._empty.std is None:
            return self.most
        exposed = self._unprotected or any(one.releases and one.std is None for one in every.values())
        if self._budget is not None and exposed:
            return 0  # no budget is kept any more
        others = tuple(
            self._counted(one) for agreed, one in every.items() if agreed != self._agreed and one.std is not None
        )
        return _paid_for(others, self._counted(self._empty)[:2], self.most, self._plan.delta, self._budget)

    @property
    def _unprotected(self) -> bool:
        """Whether the client computed for agreements that protected its records, and not all of its data together."""
        path = self.path.parent / RECORDS
        if not path.exists():
            return False
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return any(one["rounds"] and not one["beside"] for one in found.values())
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise UserError(f"{path}, which counts rounds on the records here, is damaged: put a copy of it back."
                            ) from None  # fmt: skip

    def _mine(self, every: "dict[str, _Released]") -> "_Released":
        return every.get(self._agreed, self._empty)

    def _counted(self, one: "_Released") -> tuple[float, float, int]:
        """Returns what accounting needs of messages with noise, by the promise of this agreement.

        `unlike` is that of one noise, which a sum of several is no further from: a plan has 16 units of noise at least.
        Other clients' noise hides a message only from as many colluders as secure aggregation was agreed to hold
        against, and not where nobody relies on it.
        """
        assert self._plan is not None and one.std is not None
        m = self._plan.mechanism
        still_hides = m.trust == "secagg" and m.colluders <= one.colluders
        std = one.std * math.sqrt(one.noises if still_hides else 1)
        return m.shift / std, one.unlike, one.releases

    def _store(self, mine: "_Released") -> None:
        every = self._load() | {self._agreed: mine}
        replace_text(self.path, to_json({agreed: one._asdict() for agreed, one in every.items()}) + "\n")

    def _load(self) -> dict[str, "_Released"]:
        return messages_in(self.path.parent)


class Counting(Protocol):
    """Count of what an agreement asks for, with a budget."""

    @property
    def most(self) -> int: ...
    @property
    def limited(self) -> bool: ...
    def count(self) -> int: ...
    def left(self) -> int: ...
    def epsilon(self, more: int = 0) -> float: ...
    def said(self) -> str: ...


def in_the_way(counted: Counting, plan: AnyPlan) -> str | None:
    """Returns why not to take part: what was counted before takes up the budget. None: nothing stands in the way.

    Args:
        counted: the count.
        plan: what the agreement promises.
    """
    wanted, left, holds = counted.most - counted.count(), counted.left(), math.isfinite(counted.epsilon())
    if left == wanted or (counted.limited and left):
        return None
    if counted.limited:
        return f"{counted.said()}: give {'a larger' if holds else 'no'} --budget if you accept that."
    if not holds:
        return None  # `said` says so: there is no ε to keep to
    whole, promised = up(counted.epsilon(wanted)), up(plan.epsilon(plan.rounds))
    return (
        f"{counted.said()}. All of them take it to ε ≤ {whole}, and this agreement promises {promised}. Give --budget "
        f"{whole} if you accept that, or let all agree on more noise."
    )


def messages_in(folder: Path) -> "dict[str, _Released]":
    """Returns what has left a client, by agreement; raises UserError if the file is damaged."""
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if any("mu" in one for one in found.values()):
            raise UserError(
                f"{path} was written by an earlier version, which counted in another way: move it away and keep it. "
                "What it counts comes on top of what is said from now on."
            )
        every = {str(agreed): _Released(**one) for agreed, one in found.items()}
        if all(_possible(one) for one in every.values()):
            return every
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        pass
    raise UserError(f"{path}, which counts what has left this client, is damaged: put a copy of it back.")


class _Released(NamedTuple):
    """Number of messages that left under one agreement, and the noise that hides one of them.

    Attributes:
        releases: number of them.
        still_here: the training whose last one is counted and still here.
        std: std of a message's own noise, over the radius; None if it has none, or none that protects.
        unlike: how unlike that noise is to continuous noise, as in `accounting.Hidden`.
        noises: number of such noises that hide it, its own included: those of a sum, at least, less the colluders'.
        colluders: number of clients who may collude with the server for that to hold.
    """

    releases: int
    still_here: str
    std: float | None
    unlike: float = 0.0
    noises: int = 1
    colluders: int = 0


def _possible(one: _Released) -> bool:
    counts = (one.releases, one.noises, one.colluders)
    known = one.std is None or (isinstance(one.std, float) and 0 < one.std < math.inf)
    alike = isinstance(one.unlike, float) and 0 <= one.unlike <= 1
    whole = all(type(count) is int and count >= 0 for count in counts) and one.noises > 0
    return whole and type(one.still_here) is str and known and alike


def _noise_of(plan: Plan) -> _Released:
    """Returns what is counted with each message of a plan, whoever decides who sends."""
    m = plan.mechanism
    assert m.draws == "server" or m.p == 1, "a client counts what it sends, whenever it is asked"
    if not m.secure or plan.total_norm:
        return _Released(0, "", None)
    own = m.own_release()
    noises = m.min_survivors - m.colluders if m.protocol else 1
    return _Released(0, "", m.shift / own.mus[0], own.unlike, noises, m.colluders)


@lru_cache(maxsize=8)
def _together(sent: Others, delta: float) -> float:
    """Returns the ε of so many messages of each shift/std."""
    kinds = Counter[Release]()
    for mu, unlike, count in sent:
        kinds[Open((1.0,), (mu,), unlike=unlike)] += count
    return epsilon_of_all(kinds, delta)


@lru_cache(maxsize=8)
def _paid_for(others: Others, mine: tuple[float, float], most: int, delta: float, budget: float | None) -> int:
    """Returns how many messages of one kind (mu, unlike) a budget pays for besides those that others had."""
    if budget is None:  # Gaussians add up as their mu², and the agreement promises that of `most` messages
        return max(0, math.floor(most - math.fsum(count * one**2 for one, _, count in others) / mine[0] ** 2 + 1e-9))
    return most_rounds(lambda count: _together((*others, (*mine, count)), delta) <= budget, most)
