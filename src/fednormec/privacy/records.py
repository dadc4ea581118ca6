"""Privacy of single records: in each silo a mechanism of its own, whose sampler, noise and accountant are one object.

A silo is a client that guards its own records: every local step draws a batch of them, adds up their bounded gradients
and adds noise, and what leaves the silo follows from these noisy sums. Nobody else is trusted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor

from fednormec.core.bounds import BITS, STRIP
from fednormec.core.discrete import discrete_gaussian
from fednormec.core.local import Moment
from fednormec.core.participation import poisson
from fednormec.core.randomness import SecureSource, Source, generator, words_of
from fednormec.core.records import PerRecord, part_of
from fednormec.core.vectors import norm_error
from fednormec.errors import UserError
from fednormec.privacy.accounting import Accountant
from fednormec.privacy.asked import SILO, Adjacency, Privacy
from fednormec.privacy.calibrate import most_rounds
from fednormec.privacy.mechanism import LEAST_UNITS, MOST_UNITS, Mechanism, Plan

ROW, PERSON = "one row of a client's data", "all rows of one person at a client"
BATCH, NOISE = "records", "record noise"  # purposes of randomness
UNHEARD_OF = 1e-60  # probability of a larger batch than is counted on: of 10⁹ of them together far below any δ
EVALUATIONS = 400  # of ε in a run, over all silos, before steps between them get longer


@dataclass(frozen=True)
class Silo:
    """Mechanism of one silo: who is in a batch, what noise its sum gets, what that proves.

    Args:
        number: number of the client.
        sum: mechanism of one step's sum: its clients are the records, its radius is how far one of them can move it.
        steps: number of steps in a round.
        name: what statements and errors call the client.
    """

    number: int
    sum: Mechanism
    steps: int
    name: str = "the client"

    @property
    def records(self) -> int:
        """Number of records."""
        return self.sum.num_clients

    @property
    def rate(self) -> float:
        """Probability with which a record is in a batch."""
        return self.sum.participation.rate(self.records)

    def batch(self, moment: Moment, step: int) -> np.ndarray:
        """Draws the numbers of the records in a batch, sorted.

        Args:
            moment: seed and number of the round; secure randomness takes none.
            step: number of the step in the round, from 0.
        """
        return np.flatnonzero(self._source(BATCH, moment, step).random(self.records) < self.rate)

    def noised(self, total: Tensor, moment: Moment, step: int) -> Tensor:
        """Returns the sum of a batch with its noise; on a grid the sum is rounded to it first.

        Args:
            total: the sum (d,), float64.
            moment: seed and number of the round; secure randomness takes none.
            step: number of the step in the round, from 0.
        """
        source, grid = self._source(NOISE, moment, step), self.sum.grid
        if grid is None:
            std = self.sum.noise_std * self.sum.radius * (1 + self.sum.rounding)
            return total + torch.from_numpy(std * source.standard_normal(len(total))).to(total.device)
        draw = discrete_gaussian(words_of(source), self.sum.noise_std * grid.steps, len(total))
        return (total / grid.unit).round_().add_(torch.from_numpy(draw).to(total)).mul_(grid.unit)

    def epsilon(self, rounds: int, delta: float, accountant: Accountant = "pld") -> float:
        """Returns the ε of each record at this δ after so many rounds.

        Args:
            rounds: number of rounds in which the silo computed, those of other runs included.
            delta: δ, strictly between 0 and 1.
            accountant: "pld" (privacy loss distribution, tight) or "rdp" (Rényi).
        """
        return self.sum.epsilon(rounds * self.steps, delta, accountant)

    def _source(self, purpose: str, moment: Moment, step: int) -> Source:
        if self.sum.secure:
            return SecureSource()
        return generator(moment.seed, purpose, moment.round, self.number, step, stream=self.sum.stream)


@dataclass(frozen=True)
class RecordPlan:
    """Plan of a run that is private for records: a mechanism for each silo, with what was asked of all.

    Attributes:
        silos: mechanisms of the silos that are known here; in a federation each party knows its own at most.
        rounds: number of rounds that the budget allows, of those planned.
        planned: number of rounds that were asked for.
        delta: the δ at which every ε is stated.
        budgets: the ε to stay under, one for each silo; None: no limit.
        rounds_before: number of rounds of the runs before it, which count too.
        settings_from_data: whether other settings were chosen by a look at the clients' data.
        dim: number of parameters.
        steps: number of local steps in a round.
        adjacency: who is a neighbour.
        tau: largest norm of a record's gradient.
        record: what a record is, in words.
        secure: whether batches and noise come from the operating system.
        num_silos: number of silos in all.
    """

    silos: tuple[Silo, ...]
    rounds: int
    planned: int
    delta: float
    budgets: tuple[float, ...] | None
    rounds_before: int
    settings_from_data: bool
    dim: int
    steps: int
    adjacency: Adjacency
    tau: float
    record: str
    secure: bool
    num_silos: int

    total_norm = False
    nominal = None

    @property
    def label(self) -> dict[str, str]:
        """Label that stands beside every ε of a run that protects nobody: here there is none."""
        return {}

    @property
    def discrete(self) -> bool:
        """True if sums and noise are whole numbers on a grid, as far as is known here."""
        return self.secure or any(silo.sum.grid is not None for silo in self.silos)

    @property
    def budget(self) -> float | None:
        """The largest ε that a silo has to stay under; None: no limit."""
        return None if self.budgets is None else max(self.budgets)

    @cached_property
    def by_number(self) -> dict[int, Silo]:
        """The silos by their numbers."""
        return {silo.number: silo for silo in self.silos}

    @cached_property
    def different(self) -> tuple[Silo, ...]:
        """Silos of which no two have the same ε."""
        return tuple({silo.sum.release(): silo for silo in self.silos}.values())

    def epsilon(self, rounds: int, accountant: Accountant = "pld") -> float:
        """Returns the ε after so many rounds of this run (and the runs before it), of the silo with the largest.

        Where no silo is known it is what all have agreed to keep to.
        """
        if not self.silos:
            return self.budget or math.inf
        return max(silo.epsilon(self.rounds_before + rounds, self.delta, accountant) for silo in self.different)

    def spent(self, rounds: int) -> float:
        """Returns the ε after so many rounds, at steps between which it is rounded up, which never says too little."""
        step = max(1, self.rounds * len(self.different) // EVALUATIONS)
        return self.epsilon(min(-(-rounds // step) * step, max(self.rounds, rounds)))

    @property
    def noise_to_signal(self) -> float:
        """Norm of the noise in a round's mean update, over the longest that it can be without noise.

        The root mean square, with every known silo in the round; 0 where none is known.
        """
        if not self.silos:
            return 0.0
        stds = [silo.sum.noise_std / (silo.rate * silo.records) for silo in self.silos]
        mean = math.sqrt(math.fsum(std**2 for std in stds) * self.num_silos / len(stds)) / self.num_silos
        return mean * math.sqrt(self.dim / self.steps)

    # what `Draws` asks for

    @property
    def alone(self) -> bool:
        """Whether each record's gradient is computed by itself: a server that nobody trusts may send the models."""
        return self.secure

    def batch(self, client: int, records: int, moment: Moment, step: int) -> np.ndarray:
        silo = self.by_number[client]
        assert silo.records == records, "the plan was made for another number of records"
        return silo.batch(moment, step)

    def noised(self, total: Tensor, client: int, moment: Moment, step: int) -> Tensor:
        return self.by_number[client].noised(total, moment, step)

    def expected(self, client: int, records: int) -> float:
        return self.by_number[client].rate * records


class Silos(NamedTuple):
    """Facts about silos from which a plan follows; all are public.

    Args:
        sizes: number of records of each silo that is known here.
        numbers: number of each of them among all.
        names: what statements and errors call each of them.
        total: number of silos in all.
        dim: number of parameters.
        dtype: dtype of the parameters.
        record: what a record is, in words.
    """

    sizes: Sequence[int]
    numbers: Sequence[int]
    names: Sequence[str]
    total: int
    dim: int
    dtype: torch.dtype = torch.float32
    record: str = ROW


def plan_records(asked: Privacy, silos: Silos, rule: PerRecord, rounds: int) -> RecordPlan:
    """Plans what each silo does to keep to what was asked; raises UserError if one cannot.

    Args:
        asked: what the run must keep to for each record.
        silos: the silos.
        rule: how local steps bound what they take of a record.
        rounds: number of rounds planned.
    """
    wanted = asked.of_records
    targets = _targets(wanted.epsilons, silos.total)
    before = (asked.tuning_runs - 1) * rounds
    made = list[Silo]()
    found: dict[tuple[int, float | None], Mechanism] = {}
    for size, number, name in zip(silos.sizes, silos.numbers, silos.names, strict=True):
        target = None if targets is None else targets[number]
        if (size, target) not in found:
            mechanism = _mechanism(asked, silos, rule, size, name)
            if wanted.noise_std is None and target is not None:
                mechanism = mechanism.calibrate(target, wanted.delta, (before + rounds) * rule.steps)
            _require_fit(mechanism)
            found[size, target] = mechanism
        made.append(Silo(number, found[size, target], rule.steps, name))
    affordable = rounds
    if targets is not None and wanted.noise_std is not None:
        for silo in made:
            affordable = min(affordable, _affordable(silo, before, rounds, wanted.delta, targets[silo.number]))
    return RecordPlan(
        tuple(made), affordable, rounds, wanted.delta, targets, before, asked.settings_from_data, silos.dim, rule.steps,
        wanted.adjacency, rule.bound.radius, silos.record, asked.secure, silos.total,
    )  # fmt: skip


def reach(
    dim: int, dtype: torch.dtype, records: int, exact_sums: bool = False, rate: float = 1.0, alone: bool = False
) -> float:
    """Bounds how far one record can move the computed sum of a batch, beyond its bound, relative to that.

    Bounded gradients are added in strips of 64 in their own dtype and the strips in float64, in places that do not
    depend on what a record holds: where all are in the batch, one strip alone is another. Where batches are drawn, a
    record that is in one moves those after it by a place, and every strip of its part (`part_of`) can round
    differently; a part has more than is counted on with a probability below 1e-60. On a grid (`exact_sums`) the sum is
    then rounded to it, which can add a unit in each coordinate. Gradients that are computed `alone` are added in
    float64.
    """
    eps = float(torch.finfo(dtype).eps)
    drawn, in_part = (n - int(binom.ppf(UNHEARD_OF, n, 1 - rate)) for n in (records, part_of(records, rate)))
    together = in_part if rate < 1 else min(STRIP, records)
    within = 0.0 if alone else min(STRIP, together) * together * eps
    within += drawn**2 * float(torch.finfo(torch.float64).eps)
    within += norm_error(torch.empty(0, dim, dtype=dtype))
    if not exact_sums:
        return within
    units = math.sqrt(dim) * 2.0 ** (1 - BITS)  # of at most radius / 2^19
    if units > 0.5:
        raise UserError(f"a grid is too coarse for records and a model of {dim:,} parameters: train fewer of them "
                        "(model.trainable, model.lora_rank), or set privacy.randomness = 'seeded'.")  # fmt: skip
    return (1 + within) / (1 - units) - 1


def _mechanism(asked: Privacy, silos: Silos, rule: PerRecord, size: int, name: str) -> Mechanism:
    wanted, rate = asked.of_records, rule.rate_of(size, name)
    more, std = reach(silos.dim, silos.dtype, size, asked.discrete, rate, asked.secure), wanted.noise_std or 1.0
    radius = rule.bound.radius * (1 + more if asked.discrete else 1.0)
    return Mechanism(
        size, poisson(rate), std, radius, "central", wanted.adjacency, secure=asked.secure,
        rounding=0.0 if asked.discrete else more, stream=asked.stream, grid_dim=silos.dim if asked.discrete else 0,
    )  # fmt: skip


def _targets(epsilons: tuple[float, ...] | None, total: int) -> tuple[float, ...] | None:
    if epsilons is None or len(epsilons) == total:
        return epsilons
    if len(epsilons) > 1:
        raise UserError(f"privacy.silo_epsilons has {len(epsilons)} values, and there are {total} clients: give one "
                        "for each, in their order.")  # fmt: skip
    return epsilons * total


def _affordable(silo: Silo, before: int, rounds: int, delta: float, target: float) -> int:
    """Returns how many rounds a silo's budget pays for; raises UserError if it is none."""
    left = most_rounds(lambda k: silo.epsilon(before + k, delta) <= target, rounds)
    if not left:
        raise UserError(f"the budget of ε = {target:g} does not pay for one round of {silo.name}: with noise_std = "
                        f"{silo.sum.noise_std:g} it costs ε = {silo.epsilon(before + 1, delta):.4g} at δ = {delta:g}; "
                        "add noise or budget.")  # fmt: skip
    return left


def _require_fit(mechanism: Mechanism) -> None:
    """Raises UserError if noise on a grid is less than accounting counts with, or more than is drawn."""
    units = 0.0 if mechanism.grid is None else mechanism.noise_std * mechanism.grid.steps
    if mechanism.grid is not None and units < LEAST_UNITS:
        raise UserError(f"noise of std {mechanism.noise_std:g} is too little for a grid: ask for more noise, or a "
                        "smaller ε.")  # fmt: skip
    if units > MOST_UNITS:
        raise UserError(f"noise of std {mechanism.noise_std:g} is too much for a grid: ask for less noise, or more ε.")


AnyPlan = Plan | RecordPlan


def for_clients(plan: AnyPlan | None) -> Plan | None:
    """Returns the plan by which clients are protected; None if they are not."""
    return plan if isinstance(plan, Plan) else None


def trust_of(plan: AnyPlan) -> str:
    """Returns who is trusted, in a word."""
    return plan.mechanism.trust if isinstance(plan, Plan) else SILO


def for_records(plan: AnyPlan | None) -> RecordPlan | None:
    """Returns the plan by which records are protected; None if they are not by themselves."""
    return plan.records if isinstance(plan, Plan) else plan
