"""Audit of our own privacy, through the code that really runs: can what was released tell more than was claimed?

A canary is a client that ignores its data and always sends the same vector, or (by a coin) what its neighbour in the
sense of the adjacency would send: nothing, or the opposite vector. An attacker who sees the releases guesses the coins.
`audit_mechanism` plays this many times with canaries alone, and then measures messages and tests noise and sampler
directly; `audit_training` once, with canaries among the clients of a real training. Either can refute a claim, never
prove it. Where records are protected, `audit_records` does the like.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2
from scipy.stats import t as student
from torch import Tensor

from fednormec.audit.canaries import nothing_for, with_canaries
from fednormec.audit.checks import least
from fednormec.audit.evidence import (
    CONFIDENCE,
    LEVEL,
    OF_ESTIMATE,
    lower_bound,
    one_run_epsilon,
    two_gaussians,
)
from fednormec.audit.measuring import (
    against_the_curve,
    cohort_checks,
    counts,
    dependence,
    expected_estimate,
    level_beside_messages,
    level_unheard,
    log_ratios,
    noise_checks,
    too_long,
)
from fednormec.audit.playing import (
    ALONE,
    CROWD,
    FEWEST,
    FLOORS,
    KINDS,
    TOLERANCE,
    Attack,
    Seen,
    Stage,
    Tick,
    all_short,
    asked,
    attack,
    blocks,
    floor_holds,
    for_cohorts,
    for_noise,
    in_parts,
    longest_alone,
    noise_std,
    play,
    senders,
    stage_for,
    watch,
)
from fednormec.core.algorithm import Algorithm
from fednormec.core.local import LocalUpdate, Moment, gd
from fednormec.core.participation import Participation, full
from fednormec.core.problem import Problem
from fednormec.core.randomness import generator
from fednormec.engine.simulation import simulate
from fednormec.errors import BoundBroken, UserError, at_least_one
from fednormec.privacy.asked import Privacy, require_delta
from fednormec.privacy.labels import up
from fednormec.privacy.mechanism import Mechanism, plan
from fednormec.privacy.records import for_clients

SIDE_ROUNDS = 1000  # of nothing but noise: noise that is missing in one of a hundred rounds shows
AGAIN = 64  # rounds of a run with another seed
NARROW = 64  # parameters where only cohorts matter
RARE = 1 / 16  # coins that show in noise from the same random words: those use all but the highest three bits
Progress = Callable[[int, int], None]  # rounds done, rounds in all


def nothing_heard(done: int, total: int) -> None:
    """Hears of the progress, and says nothing."""


@dataclass(frozen=True)
class Audit:
    """Findings of an audit beside what was claimed. All ε are at the same δ.

    Attributes:
        of: what was audited, in words.
        claimed: the ε that was claimed.
        delta: the δ of every ε.
        lower_bound: a true bound, wrong with probability 0.05 % at the most. Few trials cannot show a large ε.
        estimate: the ε of two normal distributions fitted to the scores. No bound, since it takes the tails for normal.
        estimate_low: lower confidence limit of the estimate.
        expected: what the estimate of a right implementation comes to, without the chance of a run: mostly a little
            below the claim.
        checks: p-values of direct tests; one below 1e-6 fails.
        trials: number of canaries that were played.
        rounds: number of rounds that were played.
        seconds: how long it took.
        played: what was played, in words.
        broken: what the engine said when it refused a message that its bound does not allow, which ended the audit.
    """

    of: str
    claimed: float
    delta: float
    lower_bound: float
    estimate: float
    estimate_low: float
    expected: float
    checks: dict[str, float]
    trials: int
    rounds: int
    seconds: float
    played: str = ""
    broken: str | None = None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons that speak against the claim."""
        found = [f"the check of {name} fails" for name, p in self.checks.items() if p < LEVEL]
        if self.estimate_low > max(self.claimed, self.expected):
            found.insert(0, "the estimate lies above the claim by more than chance")
        if self.lower_bound > self.claimed:
            found.insert(0, "the lower bound lies above the claim")
        if self.broken is not None:
            found.insert(0, self.broken)
        return tuple(found)

    @property
    def verdict(self) -> str:
        """Returns "violated" if there is a reason, else "consistent"."""
        return "violated" if self.reasons else "consistent"

    def facts(self) -> dict[str, Any]:
        """Returns everything, for JSON; an infinite number is None."""
        facts = {**asdict(self), "confidence": CONFIDENCE, "verdict": self.verdict, "reasons": list(self.reasons)}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()}

    def text(self) -> str:
        """Returns a short report for a person."""
        low = math.floor(100 * self.lower_bound) / 100
        proof, sure = (f"{level:.2%} confidence" for level in (CONFIDENCE, OF_ESTIMATE))
        checks = (f"{name}: {'passed' if p >= LEVEL else 'FAILED'} (p = {p:.2g})" for name, p in self.checks.items())
        return "\n".join([
            f"audit of {self.of}: {self.verdict}",
            *(f"  because      {reason}" for reason in self.reasons),
            f"  claimed      ε ≤ {up(self.claimed)} at δ = {self.delta:g} after {self.rounds} rounds",
            f"  lower bound  ε ≥ {low:.2f} with {proof}: a bound of proof strength, limited by the number of trials",
            f"  estimate     ε ≈ {self.estimate:.2f}, > {self.estimate_low:.2f} with {sure}: an estimate, not a bound",
            f"  expected     ε ≈ {self.expected:.2f} as estimate, if all is right",
            *(f"  check        {check}" for check in checks),
            *([f"  played       {self.played}"] if self.played else []),
            f"  trials       {self.trials} canaries, {self.seconds:.1f} s",
            "  An audit can refute a claim, never prove it: 'consistent' says that this attack found nothing.",
        ])  # fmt: skip


def audit_mechanism(
    mechanism: Mechanism, rounds: int, delta: float, *, trials: int | None = None, seed: int = 0,
    algorithm: Algorithm | None = None, dim: int | None = None, dtype: torch.dtype = torch.float64,
    side_rounds: int = SIDE_ROUNDS, on_progress: Progress = nothing_heard,
) -> Audit:  # fmt: skip
    """Plays canaries against the mechanism, each on a coordinate of its own; measures messages; tests noise and coins.

    A round of a small run takes about half a millisecond.

    Args:
        mechanism: what is audited.
        rounds: number of rounds; the claim is that of the rounds that are played, which for large models may be fewer.
        delta: the δ of every ε.
        trials: number of canaries. central (1,000 by default): all in one run, as far as there are coordinates and
            room. secagg (400): runs with the mechanism's own number of clients, the server knowing who sends; colluders
            only watch. Trials of one run are counted as independent, which they are given the sizes of the cohorts.
            local (100): the server sees each message alone, so each trial is a run with one client. Large models take
            fewer, and then fewer rounds.
        seed: seed of the audit.
        algorithm: the run's own method; None: clipping.
        dim: number of parameters of the run; None: a few.
        dtype: dtype of the parameters.
        side_rounds: number of rounds of nothing but noise that are tested; twice as many cohorts are.
        on_progress: on_progress(done, total) hears how many rounds of how many are done.
    """
    started = time.perf_counter()
    at_least_one("rounds", rounds)
    at_least_one("side_rounds", side_rounds)
    require_delta(delta)
    if mechanism.secure and mechanism.grid is None:
        raise UserError("a mechanism with secure noise needs a grid: give it grid_dim, the number of coordinates of a "
                        "message.")  # fmt: skip
    if trials is not None:
        enough(trials)
    stage = stage_for(mechanism, algorithm, dim, dtype, trials)
    at = attack(mechanism, stage, rounds, trials)
    again, coins = min(AGAIN, side_rounds), mechanism.participation.select is None and mechanism.p < 1
    side = len(KINDS) * ALONE + side_rounds + (1 if mechanism.secure else 3) * again
    side += FLOORS if mechanism.protocol else 0
    side += coins * (3 * side_rounds + again) + min(CROWD, at.rounds)
    tick = ticks(on_progress, at.runs * at.rounds + side)
    claimed, expected = mechanism.epsilon(at.rounds, delta), expected_estimate(mechanism, at.rounds, delta)
    played = _words(at, stage, rounds, side_rounds)
    found = Audit(
        f"the mechanism ({mechanism.trust}, {mechanism.adjacency}, {mechanism.participation.name})", claimed, delta,
        0.0, 0.0, 0.0, expected, {}, at.canaries * at.runs, at.rounds, 0.0, played,
    )  # fmt: skip
    try:
        seen = play(at, seed, tick)
        results = {"the length of messages": least(*_lengths(seen, at, stage, seed, tick))}
        noise = watched_noise(stage, mechanism, side_rounds, seed, tick)
        noise["noise level"] = least(noise["noise level"], level_beside_messages(seen, at.mechanism))
        results |= noise
        if coins:
            results |= watched_cohorts(mechanism, side_rounds, seed, tick)
            if at.mechanism.min_cohort == 1:
                results |= {k: least(p, results[k]) for k, p in counts(seen.sent, at.mechanism.p).items()}
    except BoundBroken as error:
        return replace(found, broken=str(error), seconds=time.perf_counter() - started)
    if mechanism.protocol:
        results["the least number of messages in a sum"] = float(floor_holds(mechanism, seed_of(seed, 3), tick))
    if at.mechanism.min_cohort > 1:
        sizes = seen.sent.sum(2)
        results["the least cohort"] = float(((sizes == 0) | (sizes >= at.mechanism.min_cohort)).all())
    ratios = log_ratios(seen.along, seen.canaries_sent, seen.sent.sum(2), at.mechanism)
    scores, present = ratios.sum(1).ravel(), seen.present.ravel()
    fits = against_the_curve(scores, present, mechanism, at.rounds, claimed)
    results["error rates against the claimed curve"] = fits
    estimate, estimate_low = two_gaussians(scores, present, delta)
    return replace(
        found, lower_bound=lower_bound(scores, present, delta), estimate=estimate, estimate_low=estimate_low,
        checks=results, seconds=time.perf_counter() - started,
    )  # fmt: skip


def audit_training(
    problem: Problem, algorithm: Algorithm, participation: Participation | None, privacy: Privacy, *, rounds: int,
    seed: int = 0, canaries: int = 200, on_progress: Progress = nothing_heard,
) -> Audit:  # fmt: skip
    """Audits one training with canaries among the clients, in random directions.

    The claim is that of the run with them; the noise is what the training without them would get. The lower bound
    guesses the coins of the quarter with the highest and the quarter with the lowest scores (Steinke, Nasr and
    Jagielski 2023, arXiv 2305.08846); the estimate is that of arXiv 2302.03098. The attacker sees the sums only, which
    for trust = "local" is less than the server does, and the other clients' messages are in his way: they matter less
    the more parameters there are.

    Args:
        problem: what is trained on.
        algorithm: the method; its clients must send one vector of bounded length. Numbers beside it are not attacked.
        participation: who takes part in a round; None: everybody.
        privacy: what the training without canaries must keep to.
        rounds: number of rounds.
        seed: seed of the training and of the canaries.
        canaries: number of canaries, at least 40.
        on_progress: on_progress(done, total) hears how many rounds of how many are done.
    """
    started = time.perf_counter()
    if not privacy.for_clients:
        raise UserError("a training is audited here for clients, and this privacy is for records: take audit_records, "
                        "or the command fednormec audit --training.")  # fmt: skip
    if algorithm.message_slots != 1 or math.isinf(algorithm.bound.radius):
        raise UserError(f"{algorithm.name} cannot be audited: its clients must send one vector of bounded length.")
    at_least_one("rounds", rounds)
    m, participation, radius, delta = enough(canaries), participation or full(), algorithm.bound.radius, privacy.delta
    width = algorithm.message_width(problem.dim)
    planned = plan(privacy, problem.num_clients, participation, radius, width, rounds)
    rng, starts = generator(seed, "canaries"), blocks(width)
    present = rng.random(m) < 0.5
    directions = directions_of(m, problem.dim, rng).to(problem.init(generator(seed, "init")))
    nothing, mechanism = nothing_for(algorithm, problem.init(generator(seed, "init"))), planned.mechanism
    planted = with_canaries(problem, directions, present, privacy.adjacency, nothing=nothing)
    if algorithm.local.per_record is not None:
        algorithm = algorithm._replace(local=_beside_canaries(algorithm.local, problem))
    sent, along, squares, broken = list[np.ndarray](), list[np.ndarray](), list[np.ndarray](), None
    try:
        for r in simulate(
            planted, algorithm, participation, asked(mechanism, delta), rounds=planned.rounds, seed=seed
        ):  # fmt: skip
            played = for_clients(r.plan)
            assert played is not None
            mechanism, std = played.mechanism, noise_std(r)
            sent.append(senders(r, planted.num_clients))
            along.append((directions @ r.released[: problem.dim].to(directions)).double().cpu().numpy() / radius)
            if std > 0:
                squares.append(np.add.reduceat((r.released.cpu().numpy() / std) ** 2, starts))
            on_progress(r.number, planned.rounds)
    except BoundBroken as error:
        broken = str(error)
    done = max(1, len(sent))
    found = Audit(
        f"a training by {algorithm.name} ({mechanism.trust}, {mechanism.adjacency}, {participation.name})",
        mechanism.epsilon(done, delta), delta, 0.0, 0.0, 0.0, expected_estimate(mechanism, done, delta), {}, m,
        len(sent), time.perf_counter() - started, broken=broken,
    )  # fmt: skip
    if broken is not None:
        return found
    drawn, projections = np.stack(sent), np.stack(along)
    scores = log_ratios(projections, drawn[:, -m:], drawn.sum(1), mechanism).sum(0)
    order, k = np.argsort(scores), m // 4
    right = int(present[order[-k:]].sum() + (~present[order[:k]]).sum())
    results = {"the length of messages": _length_along(projections, drawn[:, -m:], present, privacy.adjacency)}
    if squares:
        results["noise level, at the least"] = _at_least(np.stack(squares), np.diff(np.append(starts, width)))
    if participation.select is None and mechanism.min_cohort == 1 and mechanism.p < 1:
        results |= counts(drawn[None], mechanism.p) | dependence(drawn, mechanism.p)
    estimate, estimate_low = two_gaussians(scores, present, delta)
    return replace(
        found, lower_bound=one_run_epsilon(m, 2 * k, right, delta, 1 - CONFIDENCE), estimate=estimate,
        estimate_low=estimate_low, checks=results, seconds=time.perf_counter() - started,
    )  # fmt: skip


def watched_noise(stage: Stage, mechanism: Mechanism, rounds: int, seed: int, tick: Tick) -> dict[str, float]:
    """Checks noise in a run where nobody says anything, and in shorter ones with another seed and another stream."""
    mechanism, at = for_noise(mechanism), seed_of(seed, 0)
    seen = watch(stage, mechanism, rounds, at, tick)
    again = min(AGAIN, rounds)
    others = [watch(stage, mechanism, again, at + (not mechanism.secure), tick)]  # secure noise takes no seed
    if not mechanism.secure:
        others.append(watch(stage, replace(mechanism, stream=mechanism.stream + 1), again, at, tick))
    step = None if mechanism.grid is None else 1 / (mechanism.noise_std * mechanism.grid.steps)
    found = noise_checks(seen, others, step)
    if mechanism.trust == "central" and mechanism.p < 1:
        found["noise when nobody is drawn"] = level_unheard(seen)
    if not mechanism.secure:
        same = watch(stage, mechanism, again, at, tick)
        agree = (same.sent == seen.sent[:again]).all() and (same.sample == seen.sample[:again]).all()
        found["the same seed again"] = float(agree)
    return found


def watched_cohorts(mechanism: Mechanism, rounds: int, seed: int, tick: Tick) -> dict[str, float]:
    """Checks Poisson sampling in runs of few parameters where nobody says anything.

    Cohorts and noise together are checked also with other coins, since a coin of probability 1/4 takes but the highest
    bits of a random word.
    """
    mechanism, at = for_cohorts(mechanism), seed_of(seed, 1)
    narrow = stage_for(mechanism, None, NARROW, torch.float64, None)
    seen = watch(narrow, mechanism, 2 * rounds, at, tick)
    other = watch(narrow, mechanism, min(AGAIN, rounds), at + (not mechanism.secure), tick)
    rare = watch(narrow, for_cohorts(mechanism, RARE), rounds, at, tick)
    return cohort_checks(seen, other, rare, mechanism.p, RARE)


def ticks(on_progress: Progress, total: int) -> Tick:
    """Returns what to call after each of so many rounds, so that `on_progress` hears of it."""
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    return tick


def seed_of(seed: int, run: int) -> int:
    """Returns the seed of a run beside the attack."""
    return int(generator(seed, "audit", 2, run).integers(2**62))


def _words(at: Attack, whole: Stage, rounds: int, side_rounds: int) -> str:
    """Says what was played, for the report."""
    some = f" of {whole.dim:,}" if at.stage.dim < whole.dim else ""
    few = f" of {rounds:,}" if at.rounds < rounds else ""
    return (
        f"{whole.algorithm.name}, {at.stage.dim:,}{some} parameters in {str(whole.dtype).removeprefix('torch.')}, "
        f"{at.rounds:,}{few} rounds; {side_rounds:,} of noise alone"
    )


def _lengths(seen: Seen, at: Attack, stage: Stage, seed: int, tick: Tick) -> tuple[float, float, float]:
    """Tests whether messages keep to the radius: p-values for three situations.

    In the attack on the average; in the attack next to without noise, each message; and each message of a client alone.
    """
    return (
        too_long(seen, at.mechanism),
        float(all_short(at, seed_of(seed, 2), tick)),
        float(longest_alone(stage, seed, tick) <= 1 + TOLERANCE),
    )


def _length_along(along: np.ndarray, sent: np.ndarray, present: np.ndarray, adjacency: str) -> float:
    """Tests whether canaries add more than the radius to the sums (K, m) along their vectors.

    It compares the mean over rounds where one sends with that over the others, or, where all send always, with what is
    found along absent canaries' vectors. What other clients send in a round does not depend on who is drawn in it, so
    that it cancels.
    """
    sign = np.where(present | (adjacency == "zero_out"), 1.0, -1.0)
    speaks = present | (adjacency == "replace_one")
    both = speaks & sent.any(0) & ~sent.all(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        on = (along * sign * sent).sum(0) / sent.sum(0)
        off = (along * sign * ~sent).sum(0) / (~sent).sum(0)
    if both.sum() >= 10:
        lengths, nothing = (on - off)[both], np.zeros(0)
    else:
        lengths, nothing = on[speaks & sent.any(0)], on[~speaks & sent.any(0)]
    if len(lengths) < 10:
        return 1.0
    error = math.sqrt(sum(part.var(ddof=1) / len(part) for part in (lengths, nothing) if len(part) > 1))
    excess = float(lengths.mean() - (nothing.mean() if len(nothing) > 1 else 0.0) - 1)
    return float(student.sf(excess / error, len(lengths) - 1)) if error > 0 else float(excess <= TOLERANCE)


def _at_least(squares: np.ndarray, sizes: np.ndarray) -> float:
    """Tests whether released sums (K rounds, blocks) are as large as their noise makes them: messages only add."""
    pairs = ((squares.sum(1), sizes.sum()), (squares.sum(0), len(squares) * sizes), (squares, sizes))
    return least(*(least(chi2.cdf(part, counts)) for part, counts in pairs))


def enough(canaries: int) -> int:
    """Returns the number of canaries; raises UserError if nothing can be said from so few."""
    if canaries < FEWEST:
        raise UserError(f"an audit needs at least {FEWEST} canaries, not {canaries}.")
    return canaries


def _beside_canaries(local: LocalUpdate, problem: Problem) -> LocalUpdate:
    """Returns local steps that bound records, and leave canaries as they are: these are clients without records.

    Args:
        local: the local steps.
        problem: the problem without canaries.
    """

    def run(planted: Problem, x: Tensor, ids: np.ndarray, moment: Moment, correction: Tensor | None) -> Tensor:
        own = ids < problem.num_clients
        return in_parts(((own, local, problem), (~own, gd(1.0), planted)), x, ids, moment, correction)

    return local._replace(run=run)


def directions_of(m: int, dim: int, rng: np.random.Generator) -> Tensor:
    """Draws unit vectors, (m, d) float32; at right angles, as far as there is room, not to be in each other's way."""
    normals = torch.from_numpy(rng.standard_normal((dim, m), dtype=np.float32))
    columns: Tensor = torch.linalg.qr(normals).Q if m <= dim else normals / normals.norm(dim=0)
    return columns.T.contiguous()
