"""Audit of the privacy of records, through the code that really runs.

A canary is a record whose gradient always is the same, or (by a coin) what its neighbour's would be: nothing, or the
opposite. `audit_records` plays many of them against the local steps of one silo, measures what records add to a step,
and tests noise and batches directly.
"""

import time
from dataclasses import replace

import numpy as np
import torch
from scipy.stats import binom

from fednormec.audit import checks
from fednormec.audit.audit import AGAIN, RARE, Audit, Progress, enough, nothing_heard, seed_of, ticks
from fednormec.audit.checks import least, levels, two_sided
from fednormec.audit.evidence import lower_bound, two_gaussians
from fednormec.audit.measuring import (
    against_the_curve,
    cohort_checks,
    counts,
    expected_estimate,
    level_beside_messages,
    level_unheard,
    log_ratios,
    noise_checks,
    too_long,
)
from fednormec.audit.playing import NARROW, TOLERANCE, Seen, Tick
from fednormec.audit.record_playing import (
    Attack,
    Silos,
    all_short,
    alone_rounds,
    attack,
    crowd_rounds,
    for_batches,
    for_noise,
    hear_silos,
    longest_alone,
    play,
    rows_for,
    some_silos,
    watch,
)
from fednormec.audit.steps import Scene, rate_of
from fednormec.core.algorithm import Algorithm
from fednormec.core.bounds import Bound, clip
from fednormec.core.problem import Problem
from fednormec.core.randomness import generator
from fednormec.core.records import bounded_sum
from fednormec.engine.planning import planned_for_records
from fednormec.errors import BoundBroken, UserError, at_least_one
from fednormec.privacy.asked import SILO, Privacy
from fednormec.privacy.mechanism import Mechanism
from fednormec.privacy.records import RecordPlan, Silo

SIDE_STEPS = 1000  # of nothing but noise: noise that is missing in one of a hundred steps shows
ROWS = 1000  # of the noise of several silos, at most
LARGEST = 8.0  # of noise, in units of its standard deviation
SOME = 64  # records of a problem whose sum is looked at
WIDE = clip(1e30)
SAME = 1e-3  # by which gradients may differ that are computed beside others, or alone, relative to the radius
WORDS = (  # what is said of clients and rounds, said of records and steps
    ("nobody is drawn", "no record is drawn"), ("messages", "what a record adds"), ("sampling rate", "rate of records"),
    ("cohorts", "batches"), ("cohort", "batch"), ("client", "record"), ("round", "step"),
)  # fmt: skip


def audit_records(
    problem: Problem, algorithm: Algorithm, privacy: Privacy, *, rounds: int, trials: int | None = None, seed: int = 0,
    side_steps: int = SIDE_STEPS, on_progress: Progress = nothing_heard,
) -> Audit:  # fmt: skip
    """Plays canaries among the records of one silo, each on a coordinate of its own; tests noise and batches.

    It is the silo with the largest ε. Its local steps run through the engine as they are, with its rate and noise, on
    gradients that are known; the attacker sees each model on their way. What the method makes of them is not looked at:
    it only follows from them. Noise and batches of the other silos are tested, too, and the sum of gradients by which
    the problem itself bounds its records.

    Args:
        problem: what is trained on.
        algorithm: the method; its local steps must bound what they take of a record, as dp_sgd does.
        privacy: what the run must keep to, for records at least.
        rounds: number of rounds; the claim is that of the rounds that are played, which for large models may be fewer.
        trials: number of canaries; None: 1,000, or fewer where the model is large.
        seed: seed of the audit.
        side_steps: number of steps of nothing but noise that are tested; twice as many batches are.
        on_progress: on_progress(done, total) hears how many steps of how many are done.
    """
    at_least_one("rounds", rounds)
    if not privacy.for_records:
        raise UserError("what is audited here is the privacy of records, and this privacy is for clients alone: set "
                        "unit = 'record', or take audit_mechanism.")  # fmt: skip
    plan = planned_for_records(problem, algorithm, privacy, rounds)
    return audit_record_plan(problem, algorithm, plan, trials, seed, side_steps, on_progress)


def audit_record_plan(
    problem: Problem, algorithm: Algorithm, plan: RecordPlan, trials: int | None = None, seed: int = 0,
    side_steps: int = SIDE_STEPS, on_progress: Progress = nothing_heard,
) -> Audit:  # fmt: skip
    """Audits a plan as `audit_records` does, whatever it was made of.

    Args:
        problem: what is trained on.
        algorithm: the method.
        plan: the plan, for as many rounds as are claimed for.
        trials: as in `audit_records`, as are the others.
        seed: seed of the audit.
        side_steps: number of steps of nothing but noise.
        on_progress: on_progress(done, total).
    """
    started = time.perf_counter()
    at_least_one("side_steps", side_steps)
    if trials is not None:
        enough(trials)
    silo = max(plan.different, key=lambda one: one.epsilon(plan.rounds, plan.delta))
    scene = Scene(algorithm.local, problem.dim, problem.init(generator(0, "init")).dtype)
    at = attack(scene, silo, plan.rounds, trials)
    tick = ticks(on_progress, at.runs * at.rounds * plan.steps + _beside(scene, silo, plan, side_steps))
    releases, claimed = at.rounds * plan.steps, silo.epsilon(at.rounds, plan.delta)
    found = Audit(
        f"the records of {silo.name} ({SILO}, {plan.adjacency}, rate {rate_of(silo.sum):.4g})", claimed,
        plan.delta, 0.0, 0.0, 0.0, expected_estimate(silo.sum, releases, plan.delta), {}, at.canaries * at.runs,
        at.rounds, 0.0, _words(at, plan, side_steps),
    )  # fmt: skip
    try:
        seen = play(at, seed, tick)
        results = _of_records(_looked_at(seen, at, side_steps, seed, tick))
        results |= _silos_checks(hear_silos(scene, plan, seed_of(seed, 4), tick), plan)
        results["what this problem's records add"] = float(adds_bounded(problem, scene, silo, seed_of(seed, 5)))
    except BoundBroken as error:
        return replace(found, broken=str(error), seconds=time.perf_counter() - started)
    scores = log_ratios(seen.along, seen.canaries_sent, None, at.mechanism).sum(1).ravel()
    present = seen.present.ravel()
    fits = against_the_curve(scores, present, silo.sum, releases, claimed)
    results["error rates against the claimed curve"] = fits
    estimate, estimate_low = two_gaussians(scores, present, plan.delta)
    return replace(
        found, lower_bound=lower_bound(scores, present, plan.delta), estimate=estimate, estimate_low=estimate_low,
        checks=results, seconds=time.perf_counter() - started,
    )  # fmt: skip


def _looked_at(seen: Seen, at: Attack, side_steps: int, seed: int, tick: Tick) -> dict[str, float]:
    """Returns p-values in the words of clients and rounds."""
    short = all_short(at, seed_of(seed, 2), tick)
    alone = longest_alone(at.scene, at.mechanism, seed_of(seed, 3), tick) <= 1 + TOLERANCE + at.scene.rounding
    results = {"the length of messages": least(too_long(seen, at.mechanism), float(short), float(alone))}
    noise = _watched_noise(at.scene, at.mechanism, side_steps, seed_of(seed, 0), tick)
    noise["noise level"] = least(noise["noise level"], level_beside_messages(seen, at.mechanism))
    results |= noise
    if at.mechanism.p < 1:
        results |= _watched_batches(at.scene, at.mechanism, side_steps, seed_of(seed, 1), tick)
        results |= {k: least(p, results[k]) for k, p in counts(seen.sent, rate_of(at.mechanism)).items()}
    return results


def _watched_noise(scene: Scene, mechanism: Mechanism, side: int, seed: int, tick: Tick) -> dict[str, float]:
    """Checks noise in a run where no record says anything, and in shorter ones with another seed and another stream."""
    mechanism = for_noise(mechanism)
    rows = rows_for(side, scene.rule.steps, scene.dim)
    few = rows._replace(rounds=_again(rows.rounds, rows.kept))
    seen = watch(scene, mechanism, rows, seed, tick)
    others = [watch(scene, mechanism, few, seed + (not mechanism.secure), tick)]  # secure noise takes no seed
    if not mechanism.secure:
        others.append(watch(scene, replace(mechanism, stream=mechanism.stream + 1), few, seed, tick))
    found = noise_checks(seen, others, _distance(scene, mechanism))
    if mechanism.p < 1:
        found["noise when nobody is drawn"] = level_unheard(seen)
    if not mechanism.secure:
        same = watch(scene, mechanism, few, seed, tick)
        agree = (same.sent == seen.sent[: few.height]).all() and (same.sample == seen.sample[: few.height]).all()
        found["the same seed again"] = float(agree)
    return found


def _watched_batches(scene: Scene, mechanism: Mechanism, side: int, seed: int, tick: Tick) -> dict[str, float]:
    """Checks Poisson sampling in runs of few parameters where no record says anything."""
    own, rare, narrow = for_batches(mechanism), for_batches(mechanism, RARE), scene._replace(dim=NARROW)
    rows = rows_for(2 * side, scene.rule.steps, NARROW)
    half = rows._replace(rounds=-(-rows.rounds // 2))
    seen = watch(narrow, own, rows, seed, tick)
    other = watch(narrow, own, rows._replace(rounds=_again(rows.rounds, rows.kept)), seed + (not own.secure), tick)
    return cohort_checks(seen, other, watch(narrow, rare, half, seed, tick), rate_of(own), RARE)


def _again(rounds: int, kept: int) -> int:
    """Returns the number of rounds of a run beside a longer one."""
    return min(rounds, -(-AGAIN // kept))


def _distance(scene: Scene, mechanism: Mechanism) -> float | None:
    """Returns how far two numbers can be apart that noise can be, as models show it; None if that is next to nothing.

    Noise lies on a grid, or a model in float32 has rounded it.
    """
    grid = 0.0 if mechanism.grid is None else 1 / (mechanism.noise_std * mechanism.grid.steps)
    rounded = 0.0 if scene.dtype == torch.float64 else LARGEST * scene.rounding
    return max(grid, rounded) or None


def _of_records(results: dict[str, float]) -> dict[str, float]:
    """Returns p-values under the names that they have for records."""

    def said(name: str) -> str:
        for clients, records in WORDS:
            name = name.replace(clients, records)
        return name

    return {said(name): p for name, p in results.items()}


def _silos_checks(heard: Silos, plan: RecordPlan) -> dict[str, float]:
    """Tests noise and batches of the silos of a run, each against its own mechanism."""
    each = -(-ROWS // len(np.unique(heard.silos)))
    rows, level, rate = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for number in np.unique(heard.silos).tolist():
        mechanism, own = plan.by_number[number].sum, heard.silos == number
        noise, drawn = heard.noise[own], heard.drawn[own]
        rows.append(noise[:each])
        level.append(np.array([levels((noise**2).sum(), noise.size)]))
        rate.append(two_sided(binom(len(drawn) * mechanism.num_clients, rate_of(mechanism)), drawn.sum()))
    return {
        "noise level of any client": least(*level),
        "noise of any two clients": checks.any_two(np.concatenate(rows)),
        "rate of records of any client": least(*rate),
    }


def adds_bounded(problem: Problem, scene: Scene, silo: Silo, seed: int) -> bool:
    """Returns whether the problem's own sum over some records is that of their bounded gradients.

    Each alone must keep to the bound, and all together must come to the sum of each alone: then one that is another
    moves the sum by no more than the bound lets. A tighter bound, which cuts most of them, is tried as well.

    Args:
        problem: the problem.
        scene: its local steps.
        silo: whose records.
        seed: seed of the choice of records.
    """
    rng = generator(seed, "audit")
    some = np.sort(rng.choice(silo.records, size=min(silo.records, SOME), replace=False))
    x = problem.init(generator(seed, "init"))
    alone = [bounded_sum(problem, x, silo.number, some[[k]], WIDE).norm().item() for k in range(len(some))]
    tight = clip(max(1e-12, float(np.median(alone)) / 2))
    return all(_adds(problem, x, silo.number, some, bound) for bound in (scene.rule.bound, tight))


def _adds(problem: Problem, x: torch.Tensor, client: int, some: np.ndarray, bound: Bound) -> bool:
    alone = torch.stack([bounded_sum(problem, x, client, some[[k]], bound) for k in range(len(some))])
    together = bounded_sum(problem, x, client, some, bound)
    short = alone.norm(dim=1).max().item() <= bound.radius * (1 + TOLERANCE)
    return bool(short and (together - alone.sum(0)).norm().item() <= SAME * bound.radius)


def _beside(scene: Scene, silo: Silo, plan: RecordPlan, side: int) -> int:
    """Returns the number of steps beside the attack."""
    steps = plan.steps
    rows, batches = rows_for(side, steps, scene.dim), rows_for(2 * side, steps, NARROW)
    total = alone_rounds(steps) + 2 * crowd_rounds(steps)
    total += rows.rounds + (1 if silo.sum.secure else 3) * _again(rows.rounds, rows.kept)
    if silo.sum.p < 1:
        total += batches.rounds + _again(batches.rounds, batches.kept) + -(-batches.rounds // 2)
    among, rounds = some_silos(plan)
    return steps * (total + rounds * len(among))


def _words(at: Attack, plan: RecordPlan, side: int) -> str:
    """Says what was played, for the report."""
    few = f" of {plan.rounds:,}" if at.rounds < plan.rounds else ""
    return (
        f"{at.scene.local.name}, {at.scene.dim:,} parameters in {str(at.scene.dtype).removeprefix('torch.')}, "
        f"{at.rounds:,}{few} rounds of {plan.steps:,} step{'s' * (plan.steps > 1)}; {side:,} steps of noise alone"
    )
