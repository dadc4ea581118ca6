"""Calculator behind `fednormec privacy --unit record`: σ for ε and ε for σ, for the records of each silo."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

from fednormec.core.records import PerRecord, dp_sgd
from fednormec.errors import UserError, at_least_one, one_of, positive
from fednormec.privacy.accounting import Accountant
from fednormec.privacy.asked import ADJACENCIES, Adjacency, Privacy, require_delta
from fednormec.privacy.calculator import ACCOUNTANTS
from fednormec.privacy.labels import up
from fednormec.privacy.mechanism import MOST
from fednormec.privacy.records import Silo, Silos, plan_records

LISTED = 3  # silos of one size that are named; of more there is their number


@dataclass(frozen=True)
class RecordQuestion:
    """Question to the calculator about records: the noise for epsilon, or the ε of noise_std, in each silo.

    Args:
        records: number of records of each silo.
        rounds: number of rounds.
        steps: number of local steps in a round.
        batch: number of records that a batch is expected to have; None: `rate` says it.
        rate: probability with which a record is in a batch; None: `batch` says it, or it is that of a run without both.
        delta: the δ at which every ε is stated.
        epsilon: target of each silo; its noise is computed.
        noise_std: noise on every coordinate of a step's sum, relative to tau, in all silos; its ε is computed.
        adjacencies: adjacencies to answer for; none means all.
        runs: number of runs, to price tuning.
    """

    records: tuple[int, ...]
    rounds: int
    steps: int = 1
    batch: int | None = None
    rate: float | None = None
    delta: float = 1e-5
    epsilon: float | None = None
    noise_std: float | None = None
    adjacencies: tuple[str, ...] = ADJACENCIES
    runs: int = 1

    def __post_init__(self) -> None:
        for name in ("rounds", "steps", "runs"):
            at_least_one(name, getattr(self, name))
        require_delta(self.delta)
        if (self.epsilon is None) == (self.noise_std is None):
            raise UserError("give either epsilon (to get the noise) or noise_std (to get the ε).")
        positive("epsilon" if self.noise_std is None else "noise_std", self.epsilon or self.noise_std or 0.0)
        for adjacency in self.adjacencies:
            one_of("adjacency", adjacency, ADJACENCIES)
        if self.batch is not None and self.rate is not None:
            raise UserError("give either batch (how many records a batch is expected to have) or rate (the share of a "
                            "silo's records), not both.")  # fmt: skip
        if self.batch is not None:
            at_least_one("batch", self.batch)
        if self.rate is not None and not 0 < self.rate <= 1:
            raise UserError(f"rate must lie in (0, 1], not {self.rate}.")
        self._require_silos()
        if self.rounds * self.steps * self.runs > MOST:
            raise UserError(f"accounting goes up to {MOST:,} steps, those of all rounds and runs together, not "
                            f"{self.rounds * self.steps * self.runs:,}.")  # fmt: skip

    def _require_silos(self) -> None:
        if not self.records:
            raise UserError("records has no silo: give the number of records of each.")
        for number, size in enumerate(self.records):
            if not 1 <= size <= MOST:
                raise UserError(f"a silo must have between 1 and {MOST:,} records, and silo {number} has {size:,}.")
            if self.batch is not None and self.batch > size:
                raise UserError(f"silo {number} has {size:,} records, fewer than a batch of {self.batch:,}: ask for "
                                "smaller batches, or for a rate.")  # fmt: skip

    @cached_property
    def rule(self) -> PerRecord:
        """How local steps take records, as in a run; how long they are has no part in ε."""
        rule = dp_sgd(1.0, self.steps, batch_size=self.batch, rate=self.rate).per_record
        assert rule is not None
        return rule


class RecordRow(NamedTuple):
    """Row of the answer: one guarantee, for each record of a silo.

    Attributes:
        adjacency: adjacency.
        accountant: accountant that computed it.
        epsilon: ε of all rounds.
        delta: its δ.
        silo: the silo, with its noise.
    """

    adjacency: Adjacency
    accountant: Accountant
    epsilon: float
    delta: float
    silo: Silo

    def facts(self, rounds: int, runs: int = 1) -> dict[str, Any]:
        """Returns the row as data.

        Args:
            rounds: number of rounds.
            runs: number of runs; of more than one their ε together is among the data.
        """
        silo, weak = self.silo, too_large(self)
        found = {
            "unit": "record",
            "silo": silo.number,
            "records": silo.records,
            "rate": silo.rate,
            "adjacency": self.adjacency,
            "accountant": self.accountant,
            "noise_std": silo.sum.noise_std,
            "releases": rounds * silo.steps,
            "epsilon": self.epsilon,
            "delta": self.delta,
        }
        if runs > 1:
            found["epsilon_of_all_runs"] = silo.epsilon(rounds * runs, self.delta, self.accountant)
        return found | ({} if weak is None else {"warning": weak})


def record_rows(question: RecordQuestion) -> Iterator[RecordRow]:
    """Yields a guarantee for each silo and adjacency, by each accountant that can tell."""
    q, adjacencies = question, question.adjacencies or ADJACENCIES
    planned = {name: _planned(q, cast(Adjacency, name)) for name in adjacencies}
    noises = dict[tuple[str, int], float]()  # by Rényi accounting, the same for silos of one size
    for number, size in enumerate(q.records):
        for adjacency, silos in planned.items():
            for accountant in ACCOUNTANTS:
                silo = silos[number]
                if math.isinf(silo.epsilon(q.rounds, q.delta, accountant)):
                    continue  # no Rényi bound is known for replace-one under Poisson sampling
                if accountant != "pld" and q.epsilon is not None:
                    if (adjacency, size) not in noises:
                        found = silo.sum.calibrate(q.epsilon, q.delta, q.rounds * q.steps, accountant)
                        noises[adjacency, size] = found.noise_std
                    silo = replace(silo, sum=replace(silo.sum, noise_std=noises[adjacency, size]))
                spent = silo.epsilon(q.rounds, q.delta, accountant)
                yield RecordRow(cast(Adjacency, adjacency), accountant, spent, q.delta, silo)


def _planned(q: RecordQuestion, adjacency: Adjacency) -> tuple[Silo, ...]:
    """Returns the silos as a run plans them; neither ε nor noise_std depends on the number of parameters."""
    asked = Privacy(epsilon=q.epsilon, delta=q.delta, noise_std=q.noise_std, adjacency=adjacency, unit="record")
    count = len(q.records)
    silos = Silos(q.records, range(count), [f"silo {number}" for number in range(count)], count, dim=1)
    return plan_records(asked, silos, q.rule, q.rounds).silos


def too_large(row: RecordRow) -> str | None:
    """Returns what to say of a δ that lets one record be given away outright; None if it is small enough."""
    if row.delta * row.silo.records < 1:
        return None
    return f"δ = {row.delta:g} is at least 1/N for N = {row.silo.records:,} records: one may be given away"


def record_text(question: RecordQuestion, answers: list[RecordRow]) -> str:
    """Writes the rows for a person, one for all silos of a size, with the price of tuning."""
    q, named = question, _named(question)
    silos, steps = _count(len(q.records), "silo"), _count(q.steps, "step")
    first = dict.fromkeys(q.records)  # the sizes, in the order of the silos
    shown = [row for size in first for row in answers if row.silo.number == q.records.index(size)]
    lines = [
        f"{silos}, {_count(q.rounds, 'round')} of {steps}, δ = {q.delta:g}, for each record",
        f"{'silo':<9}{'records':>8}{'rate':>7}  {'adjacency':<12}{'by':<4}{'noise_std':>9} {'ε at most':>9}  "
        "after ¼, ½, ¾",
    ]
    for row in shown:
        part = [row.silo.epsilon(-(-q.rounds * k // 4), q.delta, row.accountant) for k in (1, 2, 3)]
        lines.append(
            f"{named[row.silo.records]:<9}{row.silo.records:>8}{row.silo.rate:>7.4g}  {row.adjacency:<12}"
            f"{row.accountant:<4}{row.silo.sum.noise_std:>9.5g} {up(row.epsilon, 4):>9}  {', '.join(map(up, part))}"
        )
    lines += [
        "noise_std: on every coordinate of a step's sum, over the largest norm of a",
        "record's gradient (tau). by: the accountant, pld (tight) or rdp (Rényi).",
        "Each silo trusts itself alone: its ε holds against everybody else.",
    ]
    if q.runs > 1:
        lines += [line for row in shown if row.accountant == "pld" for line in _tuning(q, row, named)]
    return "\n".join([*lines, *dict.fromkeys(f"warning: {said}" for said in map(too_large, shown) if said is not None)])


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _named(q: RecordQuestion) -> dict[int, str]:
    """Returns what silos of each size are called: their numbers, or how many there are."""
    found = dict[int, list[int]]()
    for number, size in enumerate(q.records):
        found.setdefault(size, []).append(number)
    return {
        size: ",".join(map(str, numbers)) if len(numbers) <= LISTED and numbers[-1] < 100 else f"{len(numbers)} of them"
        for size, numbers in found.items()
    }


def _tuning(q: RecordQuestion, row: RecordRow, named: dict[int, str]) -> Iterator[str]:
    spent = row.silo.epsilon(q.rounds * q.runs, row.delta)
    which = named[row.silo.records]
    which = f"silo {which}" if which.isdecimal() else f"silos of {row.silo.records:,} records"
    yield f"{which}, {row.adjacency}: {q.runs:,} runs on them, all seen: ε ≤ {up(spent)}"
