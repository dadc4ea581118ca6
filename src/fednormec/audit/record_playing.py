"""Plays of an audit of records: an attack, what a record adds by itself, steps of nothing but noise."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednormec.audit.canaries import signs
from fednormec.audit.playing import (
    ALONE,
    CROWD,
    DELTA,
    KINDS,
    NARROW,
    QUIET,
    ROOM,
    SOME_TRIALS,
    TOLERANCE,
    TRIALS,
    Seen,
    Tick,
    Watched,
    a_direction,
    length_of,
)
from fednormec.audit.steps import Scene, Step, perform, rate_of
from fednormec.core.participation import poisson
from fednormec.core.randomness import generator
from fednormec.privacy.asked import Privacy
from fednormec.privacy.mechanism import Mechanism
from fednormec.privacy.records import RecordPlan, Silo

WORK = 8 * 10**8  # numbers that all steps of the attack compute
OVERHEAD = 10**5  # numbers that take as long as a step of a small model by itself
SEEN = 10**7  # projections that are kept
SIDE_WORK = 3 * 10**8  # numbers of steps beside the attack, where there must be several rounds of many steps
ROUNDS = 5  # at least of noise alone, as far as there is time
SOME_RECORDS, MOST_RECORDS = 128, 1024  # whose batches are looked at
FEW_STEPS, MOST_ROUNDS = 4000, 50  # of all silos together
FEW_RECORDS = 2 * 10**6  # in the batches of these
EXTREMES = (math.inf, math.nan, 1e30, 1e-30, 0.0)  # lengths at which numbers end


def asked(mechanism: Mechanism) -> Privacy:
    """Returns what to ask for to get just this mechanism for records."""
    return Privacy(
        None, DELTA, mechanism.noise_std, adjacency=mechanism.adjacency,
        randomness="secure" if mechanism.secure else "seeded", stream=mechanism.stream,
        noise="discrete" if mechanism.grid_dim else "continuous", unit="record",
    )  # fmt: skip


def in_silence(mechanism: Mechanism) -> Privacy:
    """Returns what to ask for to hear the sums nearly without noise; they are then on no grid."""
    return Privacy(None, DELTA, QUIET, adjacency=mechanism.adjacency, unit="record")


def silence(scene: Scene) -> Callable[[np.ndarray], Tensor]:
    """Returns the gradients of records that have nothing to say."""
    return lambda numbers: torch.zeros(len(numbers), scene.dim, dtype=scene.dtype)


# The attack


class Attack(NamedTuple):
    """Attack: R runs of K rounds on a silo with m records, each a canary.

    Attributes:
        scene: the scene.
        mechanism: the silo's mechanism, with m records.
        canaries: number of canaries m.
        runs: number of runs R.
        rounds: number of rounds K.
    """

    scene: Scene
    mechanism: Mechanism
    canaries: int
    runs: int
    rounds: int

    @property
    def places(self) -> np.ndarray:
        """Coordinate of each canary, spread over all."""
        return np.arange(self.canaries) * self.scene.dim // self.canaries

    def gradients(self, signs: np.ndarray) -> Callable[[np.ndarray], Tensor]:
        """Returns the gradients of canaries, far beyond the bound, each on a coordinate of its own.

        Args:
            signs: 1, -1 or 0 for each, (m,).
        """
        places, values = torch.from_numpy(self.places), torch.from_numpy(self.scene.scale * signs).to(self.scene.dtype)

        def rows(numbers: np.ndarray) -> Tensor:
            found, which = torch.zeros(len(numbers), self.scene.dim, dtype=values.dtype), torch.from_numpy(numbers)
            found[torch.arange(len(numbers)), places[which]] = values[which]
            return found

        return rows


def attack(scene: Scene, silo: Silo, rounds: int, trials: int | None) -> Attack:
    """Plans an attack on a silo's mechanism with as many records as there are canaries: nothing depends on more.

    Where that takes too long, there are fewer canaries (if nobody says how many), then fewer rounds.
    """
    dim, steps, p = scene.dim, silo.steps, rate_of(silo.sum)
    wanted = TRIALS["central"] if trials is None else trials
    at_once = min(dim, max(1, ROOM // dim))

    def cost(canaries: int) -> float:
        together = min(canaries, at_once)
        return -(-canaries // together) * steps * (OVERHEAD + dim * (3 + p * together))

    def affordable(canaries: int) -> int:
        return int(min(WORK / cost(canaries), SEEN / (steps * canaries)))

    while trials is None and wanted > SOME_TRIALS and affordable(wanted) < rounds:
        wanted = max(SOME_TRIALS, wanted * 2 // 3)
    runs = -(-wanted // at_once)
    m = -(-wanted // runs)
    return Attack(scene, of_size(silo.sum, m, p), m, runs, min(rounds, max(1, affordable(wanted))))


def of_size(mechanism: Mechanism, count: int, p: float) -> Mechanism:
    """Returns the mechanism of another number of records, each drawn with probability p."""
    return replace(mechanism, num_clients=count, participation=poisson(p))


def play(at: Attack, seed: int, tick: Tick) -> Seen:
    """Runs an attack. What `Seen` says of rounds and clients is said of steps and records."""
    rng, mechanism = generator(seed, "audit"), at.mechanism
    releases, m = at.rounds * at.scene.rule.steps, at.canaries
    present = rng.random((at.runs, m)) < 0.5
    seen = Seen(present, np.empty((at.runs, releases, m)), np.zeros((at.runs, releases, m), bool),
                np.empty((at.runs, releases)))  # fmt: skip
    for run, own_seed in enumerate(rng.integers(2**62, size=at.runs).tolist()):

        def hear(step: Step, run: int = run) -> None:
            seen.along[run, step.number] = step.noisy[at.places]
            seen.sent[run, step.number, step.batch] = True
            seen.std[run, step.number] = step.std
            tick()

        told = at.gradients(signs(present[run], mechanism.adjacency))
        perform(at.scene, np.array([m]), told, asked(mechanism), at.rounds, own_seed, hear, rate=rate_of(mechanism))
    return seen


# The length of what a record adds


def all_short(at: Attack, seed: int, tick: Tick) -> bool:
    """Returns whether, next to without noise, each record in a batch adds no more than the radius, and no other any.

    That is looked at where records are drawn with the silo's own probability, and where all are.
    """
    rng, steps = generator(seed, "audit"), at.scene.rule.steps
    few = at._replace(canaries=min(at.canaries, max(2, SIDE_WORK // (steps * at.scene.dim))))
    present, room = rng.random(few.canaries) < 0.5, 10 * TOLERANCE + at.scene.rounding
    sign = signs(present, at.mechanism.adjacency)
    short = True

    def hear(step: Step) -> None:
        nonlocal short
        drawn = np.bincount(step.batch, minlength=few.canaries) > 0
        heard, along = drawn * sign, step.noisy[few.places]
        short &= bool((along * np.where(heard < 0, -1, 1) <= abs(heard) + room).all())
        short &= bool((abs(along)[heard == 0] <= room).all())
        tick()

    for p in (rate_of(at.mechanism), 1.0):
        perform(at.scene, np.array([few.canaries]), few.gradients(sign), in_silence(at.mechanism), crowd_rounds(steps),
                int(rng.integers(2**62)), hear, rate=p)  # fmt: skip
    return short


def crowd_rounds(steps: int) -> int:
    """Returns the number of rounds in which records are heard nearly without noise."""
    return -(-CROWD // steps)


def alone_rounds(steps: int) -> int:
    """Returns the number of rounds in which a record is heard alone."""
    return -(-ALONE * (len(KINDS) + 1) // steps)


def longest_alone(scene: Scene, mechanism: Mechanism, seed: int, tick: Tick) -> float:
    """Returns the most that a record alone adds to a step, relative to the radius, next to without noise.

    Its gradients are always far too long; change sign; are too long at first and nothing then; grow; wander, of all
    lengths; and are at the ends of what numbers can be, or beyond.
    """
    rng, longest, taken = generator(seed, "audit", 1), 0.0, 0
    direction = a_direction(scene.dim, rng)

    def gradients(numbers: np.ndarray) -> Tensor:
        nonlocal taken, direction
        kind, k = (*KINDS, "extreme")[taken // ALONE % (len(KINDS) + 1)], taken % ALONE
        if k == 0 or kind == "wander":
            direction = a_direction(scene.dim, rng)
        taken += 1
        length = EXTREMES[k % len(EXTREMES)] if kind == "extreme" else scene.scale * length_of(kind, k, rng)
        return (length * direction).to(scene.dtype)[None].repeat(len(numbers), 1)

    def hear(step: Step) -> None:
        nonlocal longest
        longest = max(longest, float(np.linalg.norm(step.noisy)))
        tick()

    perform(scene, np.array([1]), gradients, in_silence(mechanism), alone_rounds(scene.rule.steps),
            int(rng.integers(2**62)), hear, rate=1.0)  # fmt: skip
    return longest


# Nothing but noise


class Rows(NamedTuple):
    """Steps that are written down: in each of some rounds the first ones and the last ones.

    Attributes:
        rounds: number of rounds.
        steps: number of steps in each.
        kept: number of steps of each round that are written down.
    """

    rounds: int
    steps: int
    kept: int

    @property
    def height(self) -> int:
        """Number of steps that are written down."""
        return self.rounds * self.kept

    @property
    def played(self) -> int:
        """Number of steps in all."""
        return self.rounds * self.steps

    def row(self, number: int) -> int | None:
        """Returns the row of a step; None if it is not written down."""
        number, t = divmod(number, self.steps)
        first = self.kept - self.kept // 2
        if t >= first:
            t -= self.steps - self.kept
            if t < first:
                return None
        return number * self.kept + t


def rows_for(wanted: int, steps: int, dim: int) -> Rows:
    """Returns which steps to write down to get so many, in several rounds as far as that does not take too long."""
    least = min(ROUNDS, wanted, max(2, SIDE_WORK // (steps * dim)))
    rounds = max(least, -(-wanted // steps))
    return Rows(rounds, steps, min(steps, -(-wanted // rounds)))


def watch(scene: Scene, mechanism: Mechanism, rows: Rows, seed: int, tick: Tick) -> Watched:
    """Runs rounds in which no record says anything, and writes down steps as `Watched` does rounds."""
    seen = Watched.of(rows.height, mechanism.num_clients, scene.dim)

    def hear(step: Step) -> None:
        row = rows.row(step.number)
        if row is not None:
            drawn = np.bincount(step.batch, minlength=mechanism.num_clients) > 0
            seen.note(row, drawn, step.noisy / step.std)
        tick()

    perform(scene, np.array([mechanism.num_clients]), silence(scene), asked(mechanism), rows.rounds, seed, hear,
            rate=rate_of(mechanism))  # fmt: skip
    return seen


def for_noise(mechanism: Mechanism) -> Mechanism:
    """Returns the mechanism with one record, which is in every second batch: noise depends on neither."""
    return of_size(mechanism, 1, 0.5 if rate_of(mechanism) < 1 else 1.0)


def for_batches(mechanism: Mechanism, p: float | None = None) -> Mechanism:
    """Returns the mechanism with as many records as batches are looked at of, drawn with its own probability or p."""
    p = rate_of(mechanism) if p is None else p
    return of_size(mechanism, min(MOST_RECORDS, max(SOME_RECORDS, math.ceil(4 / p))), p)


class Silos(NamedTuple):
    """Record of the silos of a run, in steps in which no record says anything.

    Attributes:
        noise: noise of each step (n, d), in units of what it should be.
        silos: number of the silo of each step, (n,).
        drawn: number of records in its batch, (n,).
    """

    noise: np.ndarray
    silos: np.ndarray
    drawn: np.ndarray


def some_silos(plan: RecordPlan) -> tuple[np.ndarray, int]:
    """Returns the numbers of silos that are looked at, spread over all, and in how many rounds: as there is time."""
    drawn = max(rate_of(silo.sum) * silo.records for silo in plan.silos) + 1
    most = int(min(FEW_STEPS, FEW_RECORDS / drawn) / plan.steps)
    chosen = np.unique(np.linspace(0, len(plan.silos) - 1, min(max(2, most // 2), len(plan.silos))).astype(int))
    return np.array([plan.silos[place].number for place in chosen]), min(MOST_ROUNDS, max(2, most // len(chosen)))


def hear_silos(scene: Scene, plan: RecordPlan, seed: int, tick: Tick) -> Silos:
    """Runs rounds of a run's own plan in which no record says anything.

    Each silo has its own number of records, its own rate and its own noise.
    """
    heard, narrow = list[Step](), scene._replace(dim=NARROW)
    sizes, (among, rounds) = np.array([silo.records for silo in plan.silos]), some_silos(plan)

    def hear(step: Step) -> None:
        heard.append(step)
        tick()

    perform(narrow, sizes, silence(narrow), plan, rounds, seed, hear, among=among)
    return Silos(
        np.stack([step.noisy / step.std for step in heard]), np.array([step.client for step in heard]),
        np.array([len(step.batch) for step in heard]),
    )  # fmt: skip
