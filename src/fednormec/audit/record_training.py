"""Audit of one training that is private for records, with canaries among the records of one client."""

import math
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import numpy as np
import torch
from scipy.special import logsumexp
from scipy.stats import binom
from torch import Tensor

from fednormec.audit.audit import Audit, Progress, directions_of, enough, nothing_heard
from fednormec.audit.canaries import signs
from fednormec.audit.checks import two_sided
from fednormec.audit.evidence import CONFIDENCE, gaussian_epsilon, one_run_epsilon, two_gaussians
from fednormec.audit.measuring import noise_checks
from fednormec.audit.playing import Watched, in_parts
from fednormec.audit.steps import Scene, rate_of
from fednormec.core.algorithm import Algorithm
from fednormec.core.bounds import Adding, Bound
from fednormec.core.local import LocalUpdate, Moment
from fednormec.core.participation import Participation, poisson
from fednormec.core.problem import Metrics, Problem
from fednormec.core.randomness import generator
from fednormec.core.records import Grouped, apart_from_data, bounded_sum, examples_of, record_sizes
from fednormec.core.vectors import take
from fednormec.engine.planning import with_record_noise
from fednormec.engine.simulation import simulate
from fednormec.engine.threads import Threads
from fednormec.errors import BoundBroken
from fednormec.privacy.asked import SILO
from fednormec.privacy.mechanism import Mechanism
from fednormec.privacy.records import RecordPlan, Silo

LEFT_OUT = ("noise of two runs", "noise drawn once")  # there is but one run, and models have rounded its noise
SURE = 1e-14  # probability of numbers of draws that are left out


class Notes(NamedTuple):
    """Notes on what happened in a client since they were cleared.

    Attributes:
        models: models at which its steps began, the latest.
        own: sums of the bounded gradients of its own records.
        planted: sums of those of the records that were planted.
        drawn: number of records in its batches.
    """

    models: deque[Tensor]
    own: list[Tensor]
    planted: list[Tensor]
    drawn: list[int]

    def clear(self) -> None:
        for part in self:
            part.clear()


@final
@dataclass(frozen=True, eq=False, repr=False)
class WithRecords:
    """Problem with more records of one client, behind its own: their gradients are always the same.

    Args:
        problem: the problem.
        client: number of the client.
        gradients: gradients of its further records, (m, d).
        notes: notes on what happens in that client.
    """

    problem: Problem
    client: int
    gradients: Tensor
    notes: Notes

    @property
    def dim(self) -> int:
        return self.problem.dim

    @property
    def num_clients(self) -> int:
        return self.problem.num_clients

    @property
    def tile(self) -> int:
        return self.problem.tile

    @property
    def client_sizes(self) -> np.ndarray:
        return self.problem.client_sizes

    @property
    def grouped(self) -> bool:
        return isinstance(self.problem, Grouped) and self.problem.grouped

    @property
    def record_sizes(self) -> np.ndarray:
        sizes = record_sizes(self.problem).copy()
        sizes[self.client] += len(self.gradients)
        return sizes

    def examples_of(self, client: int, records: np.ndarray) -> np.ndarray:
        return examples_of(self.problem, client, records)

    def record_sum(self, x: Tensor, client: int, records: np.ndarray, bound: Bound) -> Tensor:
        size = int(record_sizes(self.problem)[client])
        own = bounded_sum(self.problem, x, client, records[records < size], bound)
        if client != self.client:
            return own
        self.notes.own.append(own)
        self.notes.drawn.append(len(records))
        if not (records >= size).any():
            return own
        rows = take(self.gradients, records[records >= size] - size).clone()
        planted = bound.scale_(rows).sum(x.new_ones(len(rows)), Adding(longest=bound.radius))
        self.notes.planted.append(planted)
        return own + planted

    def apart_from_data(self, x: Tensor) -> Tensor | None:
        self.notes.models.append(x)
        return apart_from_data(self.problem, x)

    def init(self, rng: np.random.Generator) -> Tensor:
        return self.problem.init(rng)

    def grad(self, x: Tensor, ids: np.ndarray, examples: np.ndarray | None = None) -> Tensor:
        return self.problem.grad(x, ids, examples)

    def evaluate(self, x: Tensor) -> Metrics:
        return self.problem.evaluate(x)

    def named(self, x: Tensor) -> dict[str, Tensor]:
        return self.problem.named(x)

    def model(self, x: Tensor) -> Any:
        return self.problem.model(x)


class Heard(NamedTuple):
    """What an attacker makes of a client's update in a round, in units of the radius.

    He takes away what he knows: the gradients of all other records, and what no data enter.

    Attributes:
        noisy: noisy sum of the gradients of canaries over all steps of the round, (d,).
        noise: the noise in it alone, which he does not know, (d,).
        drawn: number of records in all its batches.
    """

    noisy: np.ndarray
    noise: np.ndarray
    drawn: int


def audit_record_training(
    problem: Problem, algorithm: Algorithm, participation: Participation, plan: RecordPlan, *, seed: int = 0,
    canaries: int = 200, on_progress: Progress = nothing_heard,
) -> Audit:  # fmt: skip
    """Audits one training with canaries among the records of one client, in random directions.

    It is the client whose records weigh most in the mean over clients. It keeps its own rate and noise. The attacker
    sees that client's update in each round and knows all other records, but no model between two local steps: with
    several of these that is less than the claim allows for. What the method makes of updates is not looked at, nor is
    noise of clients, where these are protected, too.

    Args:
        problem: what is trained on.
        algorithm: the method; its local steps must bound what they take of a record.
        participation: who takes part in a round.
        plan: plan of the training without canaries.
        seed: seed of the training and of the canaries.
        canaries: number of canaries, at least 40.
        on_progress: on_progress(done, total) hears how many rounds of how many are done.
    """
    started, m = time.perf_counter(), enough(canaries)
    silo = min(plan.silos, key=lambda one: rate_of(one.sum) * one.records)
    rng, x = generator(seed, "canaries"), problem.init(generator(seed, "init"))
    present, directions = rng.random(m) < 0.5, directions_of(m, problem.dim, rng).to(x)
    factors = torch.from_numpy(Scene(algorithm.local, problem.dim, x.dtype).scale * signs(present, plan.adjacency))
    notes = Notes(deque(maxlen=silo.steps), [], [], [])
    planted = WithRecords(problem, silo.number, directions * factors.to(x)[:, None], notes)
    silo = _with_more(silo, m)
    kept = replace(plan, silos=tuple(silo if one.number == silo.number else one for one in plan.silos))
    heard, broken, done = list[Heard](), None, 0
    method = with_record_noise(algorithm, kept)
    method = method._replace(local=_heard(method.local, planted, silo, heard))
    scores, seen = np.zeros(m), Watched.of(plan.rounds, 1, problem.dim)
    drawn, axes = 0, directions.double().cpu().numpy()
    try:
        for r in simulate(planted, method, participation, rounds=plan.rounds, seed=seed, on=Threads(1)):
            for one in heard:
                scores += ratios_of_sum(axes @ one.noisy, silo.steps, silo.sum)
                seen.note(r.number - 1, np.ones(1, bool), one.noise)
                drawn += one.drawn
            heard.clear()
            done = r.number
            on_progress(done, plan.rounds)
    except BoundBroken as error:
        broken = str(error)
    rounds = int(seen.due.sum())
    found = Audit(
        f"a training by {algorithm.name}, of the records of {silo.name} ({SILO}, {plan.adjacency})",
        silo.epsilon(max(1, done), plan.delta), plan.delta, 0.0, 0.0, 0.0, expected_of_sums(silo, rounds, plan.delta),
        {}, m, done, time.perf_counter() - started, _words(silo, rounds), broken,
    )  # fmt: skip
    if broken is not None or not rounds:
        return found
    order, k = np.argsort(scores), m // 4
    right = int(present[order[-k:]].sum() + (~present[order[:k]]).sum())
    results = {name: p for name, p in noise_checks(seen, [], None).items() if name not in LEFT_OUT}
    coins = binom(rounds * silo.steps * silo.records, rate_of(silo.sum))
    estimate, low = two_gaussians(scores, present, plan.delta)
    return replace(
        found, lower_bound=one_run_epsilon(m, 2 * k, right, plan.delta, 1 - CONFIDENCE), estimate=estimate,
        estimate_low=low, checks=results | {"rate of records": float(two_sided(coins, drawn))},
    )  # fmt: skip


def _heard(local: LocalUpdate, planted: WithRecords, silo: Silo, heard: list[Heard]) -> LocalUpdate:
    """Returns the same local steps, which tell what an attacker makes of a client's updates."""

    def run(problem: Problem, x: Tensor, ids: np.ndarray, moment: Moment, correction: Tensor | None) -> Tensor:
        mine = ids == silo.number
        planted.notes.clear()
        rows = in_parts(((~mine, local, problem), (mine, local, problem)), x, ids, moment, correction)
        for place in np.flatnonzero(mine).tolist():
            total = rows[place].double() * silo.steps
            if correction is not None:
                total -= correction[place] * silo.steps
            for y in tuple(planted.notes.models):  # the others' are gone
                part = apart_from_data(problem, y)
                total -= 0 if part is None else part
            heard.append(_told(total, planted.notes, silo))
        return rows

    return local._replace(run=run)


def _told(total: Tensor, notes: Notes, silo: Silo) -> Heard:
    mechanism = silo.sum
    nothing = torch.zeros_like(total)
    total *= rate_of(mechanism) * mechanism.num_clients
    noisy = (total - sum(notes.own, nothing)) / mechanism.radius
    std = mechanism.noise_std * (1 + mechanism.rounding) * math.sqrt(silo.steps)
    noise = (noisy - sum(notes.planted, nothing) / mechanism.radius) / std
    return Heard(noisy.cpu().numpy(), noise.cpu().numpy(), sum(notes.drawn))


def _with_more(silo: Silo, more: int) -> Silo:
    """Returns the silo with more records, drawn with the same probability and hidden by the same noise."""
    rate = poisson(rate_of(silo.sum))
    return replace(silo, sum=replace(silo.sum, num_clients=silo.records + more, participation=rate))


def ratios_of_sum(y: np.ndarray, steps: int, mechanism: Mechanism) -> np.ndarray:
    """Returns how much likelier projections y of the sum of several steps are with the canary in than out, as a log.

    Nobody sees in how many of the steps it was drawn.

    Args:
        y: the projections, in units of the radius.
        steps: number of steps.
        mechanism: mechanism of a step.
    """

    def within(y: np.ndarray) -> np.ndarray:
        return np.asarray(logsumexp(log_weights - (y[..., None] - drawn) ** 2 / (2 * variance), axis=-1))

    variance, (drawn, weights) = steps * mechanism.noise_std**2, _draws(steps, rate_of(mechanism))
    log_weights = np.log(weights)
    out = within(-y) if mechanism.adjacency == "replace_one" else -(y**2) / (2 * variance)
    return np.asarray(within(y) - out)


def _draws(steps: int, p: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns how often a record can be drawn in so many steps, and with what probability."""
    drawn = np.arange(binom.ppf(SURE, steps, p), binom.isf(SURE, steps, p) + 1)
    return drawn, binom.pmf(drawn, steps, p)


def expected_of_sums(silo: Silo, rounds: int, delta: float) -> float:
    """Returns what `two_gaussians` comes to with endless trials of a right implementation."""
    drawn, weights = _draws(silo.steps, rate_of(silo.sum))
    std, mirrored = silo.sum.noise_std * math.sqrt(silo.steps), silo.sum.adjacency == "replace_one"
    reach = drawn[-1] + 12 * std
    z = np.linspace(-reach, reach, 8001)
    within = (weights * np.exp(-((z[:, None] - drawn) ** 2) / (2 * std**2))).sum(1)
    laws = (within, within[::-1] if mirrored else np.exp(-(z**2) / (2 * std**2)))
    ratios = ratios_of_sum(z, silo.steps, silo.sum)
    means = [float(ratios @ law / law.sum()) for law in laws]
    variance = sum(((ratios - mean) ** 2) @ law / law.sum() for mean, law in zip(means, laws, strict=True)) / 2
    return gaussian_epsilon(math.sqrt(rounds / variance) * (means[0] - means[1]), delta)


def _words(silo: Silo, rounds: int) -> str:
    """Says what was attacked, for the report."""
    weaker = f", sums of {silo.steps:,} steps: weaker than an attack on each local step" if silo.steps > 1 else ""
    return f"{rounds:,} update{'s' * (rounds != 1)} of the client{weaker}"
