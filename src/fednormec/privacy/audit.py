"""Attacks on our own privacy, through the code that really runs: can what was released tell more than was claimed?

A canary is a client that ignores its data and always sends the same vector, or (by a coin) what its neighbour in the
sense of the adjacency would send: nothing, or the opposite vector. An attacker who sees the releases guesses the coins.
`audit_mechanism` plays this many times with canaries alone, which also lets it test noise and sampler directly;
`audit_training` once, with canaries among the clients of a real training. Either can refute a claim, never prove it.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import binom, chi2, gamma, kstest, norm
from torch import Tensor

from fednormec.algorithms.base import Algorithm
from fednormec.algorithms.named import dp_fed_avg_clip
from fednormec.engine import Round, simulate
from fednormec.errors import UserError, at_least_one
from fednormec.local import gd
from fednormec.participation import Participation, full, poisson
from fednormec.privacy import accounting
from fednormec.privacy.accounting import Open
from fednormec.privacy.canaries import Silence, signs, with_canaries
from fednormec.privacy.evidence import (
    CONFIDENCE,
    LEVEL,
    curve_p_value,
    gaussian_epsilon,
    lower_bound,
    one_run_epsilon,
    two_gaussians,
)
from fednormec.privacy.mechanism import Mechanism, Privacy, plan, require_delta
from fednormec.privacy.statement import up
from fednormec.problems.base import Problem
from fednormec.randomness import generator

FEWEST = 40  # canaries from which anything can be said
TRIALS = {"central": 1000, "secagg": 400, "local": 100}
SIDE_ROUNDS = 200
Progress = Callable[[int, int], None]  # rounds done, rounds in all


def _nothing(done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class Audit:
    """What an audit found beside what was claimed. All ε are at the same δ.

    lower_bound: a true bound, wrong with probability 0.1 % at the most. Few trials cannot show a large ε.
    estimate, estimate_low: the ε of two normal distributions fitted to the scores, and its lower confidence limit. No
        bound, since it takes the tails for normal. `expected` is what a right implementation comes to, without the
        chance of a run: mostly a little below the claim.
    checks: p-values of direct tests; one below 1e-6 fails.
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

    @property
    def reasons(self) -> tuple[str, ...]:
        """What speaks against the claim."""
        found = [f"the check of {name} fails" for name, p in self.checks.items() if p < LEVEL]
        if self.estimate_low > max(self.claimed, self.expected):
            found.insert(0, "the estimate lies above the claim by more than chance")
        if self.lower_bound > self.claimed:
            found.insert(0, "the lower bound lies above the claim")
        return tuple(found)

    @property
    def verdict(self) -> str:
        return "violated" if self.reasons else "consistent"

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON; an infinite number is None."""
        facts = {**asdict(self), "confidence": CONFIDENCE, "verdict": self.verdict, "reasons": list(self.reasons)}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()}

    def text(self) -> str:
        """A short report for a person."""
        low, sure = math.floor(100 * self.lower_bound) / 100, f"{CONFIDENCE:.1%} confidence"
        checks = (f"{name}: {'passed' if p >= LEVEL else 'FAILED'} (p = {p:.2g})" for name, p in self.checks.items())
        return "\n".join([
            f"audit of {self.of}: {self.verdict}",
            *(f"  because      {reason}" for reason in self.reasons),
            f"  claimed      ε ≤ {up(self.claimed)} at δ = {self.delta:g} after {self.rounds} rounds",
            f"  lower bound  ε ≥ {low:.2f} with {sure}: a bound of proof strength, limited by the number of trials",
            f"  estimate     ε ≈ {self.estimate:.2f}, > {self.estimate_low:.2f} with {sure}: an estimate, not a bound",
            f"  expected     ε ≈ {self.expected:.2f} as estimate, if all is right",
            *(f"  check        {check}" for check in checks),
            f"  trials       {self.trials} canaries, {self.seconds:.1f} s",
            "  An audit can refute a claim, never prove it: 'consistent' says that this attack found nothing.",
        ])  # fmt: skip


class _Seen(NamedTuple):
    """R runs of K rounds, in units of the radius: coins (R, m), sums (R, K, d), who sent (R, K, M), canaries last."""

    present: np.ndarray
    released: np.ndarray
    sent: np.ndarray

    @property
    def canaries_sent(self) -> np.ndarray:
        return self.sent[:, :, -self.present.shape[1] :]


def audit_mechanism(
    mechanism: Mechanism, rounds: int, delta: float, *, trials: int | None = None, seed: int = 0,
    on_progress: Progress = _nothing,
) -> Audit:  # fmt: skip
    """Plays `trials` canaries against the mechanism, each on a coordinate of its own.

    central (1,000 trials by default): all in one run, since nothing there depends on the number of clients.
    secagg (400): runs with the mechanism's own number of clients, the server knowing who sends; colluders only watch.
        Trials of one run are counted as independent, which they are given the sizes of the cohorts.
    local (100): the server sees each message alone, so each trial is a run with one client.
    A round of a small run takes about a millisecond.
    """
    started = time.perf_counter()
    at_least_one("rounds", rounds)
    require_delta(delta)
    trials = _enough(TRIALS[mechanism.trust] if trials is None else trials)
    played, side = _played(mechanism, trials), _side(mechanism)
    seen = _play(played, rounds, delta, trials, seed, on_progress)
    apart = None if side is None else _play(side, SIDE_ROUNDS, delta, 1, seed + 1, _nothing)
    m = seen.present.shape[1]
    ratios = _log_ratios(seen.released[:, :, :m], seen.canaries_sent, seen.sent.sum(2), played)
    scores, present = ratios.sum(1).ravel(), seen.present.ravel()
    claimed = mechanism.epsilon(rounds, delta)
    checks = _noise_checks(seen, played)
    if apart is not None and played.trust == "central":
        unheard = _noise(apart, played)[~apart.sent.any(2)]
        checks["noise when nobody is drawn"] = _two_sided(chi2(unheard.size), (unheard**2).sum())
    if played.participation.select is None:
        checks |= _sampler_checks(seen.sent if played.min_cohort == 1 or apart is None else apart.sent, played.p)
    if played.min_cohort > 1:
        sizes = seen.sent.sum(2)
        checks["the least cohort"] = float(((sizes == 0) | (sizes >= played.min_cohort)).all())
    points = [min(claimed, 20.0) * share for share in (0.0, 0.125, 0.25, 0.5)]  # where a few trials can tell something
    curve = [(e, accounting.delta(mechanism.release(), rounds, e)) for e in points]
    checks["error rates against the claimed curve"] = curve_p_value(scores, present, curve)
    estimate, estimate_low = two_gaussians(scores, present, delta)
    return Audit(
        f"the mechanism ({mechanism.trust}, {mechanism.adjacency}, {mechanism.participation.name})", claimed, delta,
        lower_bound(scores, present, delta), estimate, estimate_low, _expected_estimate(mechanism, rounds, delta),
        checks, len(scores), rounds, time.perf_counter() - started,
    )  # fmt: skip


def audit_training(
    problem: Problem, algorithm: Algorithm, participation: Participation | None, privacy: Privacy, *, rounds: int,
    seed: int = 0, canaries: int = 200, on_progress: Progress = _nothing,
) -> Audit:  # fmt: skip
    """One training with canaries among the clients, in random directions; the claim is that of the run with them.

    The noise is what the training without them would get. The lower bound guesses the coins of the quarter with the
    highest and the quarter with the lowest scores (Steinke, Nasr and Jagielski 2023, arXiv 2305.08846); the estimate is
    that of arXiv 2302.03098. The attacker sees the sums only, which for trust = "local" is less than the server does,
    and the other clients' messages are in his way: they matter less the more parameters there are.
    """
    started = time.perf_counter()
    if algorithm.message_slots != 1 or math.isinf(algorithm.bound.radius):
        raise UserError(f"{algorithm.name} cannot be audited: its clients must send one vector of bounded length.")
    at_least_one("rounds", rounds)
    m, participation, radius, delta = _enough(canaries), participation or full(), algorithm.bound.radius, privacy.delta
    planned = plan(privacy, problem.num_clients, participation, radius, problem.dim, rounds)
    asked, rng = _asked(planned.mechanism, delta), generator(seed, "canaries")
    present = rng.random(m) < 0.5
    directions = _directions(m, problem.dim, rng).to(problem.init(generator(seed, "init")))
    planted, mechanism = with_canaries(problem, directions, present, privacy.adjacency), planned.mechanism
    scores, sent = np.zeros(m), []
    for r in simulate(planted, algorithm, participation, asked, rounds=planned.rounds, seed=seed):
        assert r.plan is not None
        mechanism = r.plan.mechanism
        sent.append(_senders(r, planted.num_clients))
        y = (directions @ r.released.to(directions)).double().cpu().numpy() / radius
        scores += _log_ratios(y, sent[-1][-m:], sent[-1].sum(), mechanism)
        on_progress(r.number, planned.rounds)
    order, k = np.argsort(scores), m // 4
    right = int(present[order[-k:]].sum() + (~present[order[:k]]).sum())
    coins = participation.select is None and mechanism.min_cohort == 1
    estimate, estimate_low = two_gaussians(scores, present, delta)
    return Audit(
        f"a training by {algorithm.name} ({mechanism.trust}, {mechanism.adjacency}, {participation.name})",
        mechanism.epsilon(len(sent), delta), delta, one_run_epsilon(m, 2 * k, right, delta, 1 - CONFIDENCE),
        estimate, estimate_low, _expected_estimate(mechanism, len(sent), delta),
        _sampler_checks(np.stack(sent)[None], mechanism.p) if coins else {}, m, len(sent),
        time.perf_counter() - started,
    )  # fmt: skip


def _expected_estimate(mechanism: Mechanism, rounds: int, delta: float) -> float:
    """What `two_gaussians` comes to with endless trials of a right implementation: rounds add to mean and variance."""
    release = mechanism.release()
    if isinstance(release, Open):
        weights, mus = np.array(release.weights), np.array(release.mus)
        gap = (weights * mus**2).sum()
        variance = (weights * (mus**2 + mus**4 / 4)).sum() - gap**2 / 4
    else:
        z = np.linspace(-12, 12, 20_001)
        absent, drawn, opposite = (_log_ratios(z / release.mu + y, np.array(True), 1, mechanism) for y in (0, 1, -1))
        ratios = np.array([absent, drawn, absent, opposite if release.mirrored else absent])
        law = np.outer([1 - release.p, release.p], norm.pdf(z) / norm.pdf(z).sum()).ravel()
        pair = ratios.reshape(2, -1)  # in, out
        gap = pair[0] @ law - pair[1] @ law
        variance = (((pair - (pair @ law)[:, None]) ** 2) @ law).mean()
    return gaussian_epsilon(math.sqrt(rounds / variance) * gap, delta)


def _enough(canaries: int) -> int:
    if canaries < FEWEST:
        raise UserError(f"an audit needs at least {FEWEST} canaries, not {canaries}.")
    return canaries


def _directions(m: int, dim: int, rng: np.random.Generator) -> Tensor:
    """Random unit vectors, (m, d) float32; at right angles, as far as there is room, not to be in each other's way."""
    normals = torch.from_numpy(rng.standard_normal((dim, m), dtype=np.float32))
    columns: Tensor = torch.linalg.qr(normals).Q if m <= dim else normals / normals.norm(dim=0)
    return columns.T.contiguous()


def _asked(mechanism: Mechanism, delta: float) -> Privacy:
    """What to ask for to get just this mechanism."""
    return Privacy(
        None, delta, mechanism.noise_std, mechanism.trust, mechanism.adjacency, mechanism.colluders,
        mechanism.min_cohort, randomness="secure" if mechanism.secure else "seeded",
    )  # fmt: skip


def _played(mechanism: Mechanism, trials: int) -> Mechanism:
    """The mechanism with as many clients as its attacker has to face."""
    rule, m = mechanism.participation.asleep(), mechanism.num_clients
    if mechanism.trust == "central" and (rule.select is None or rule.rate(m) == 1):
        m = trials
    if mechanism.trust == "local":
        m, rule = 1, rule if rule.select is None else full()
    return replace(mechanism, num_clients=m, participation=rule, colluders=min(mechanism.colluders, m - 1))


def _side(mechanism: Mechanism) -> Mechanism | None:
    """What shows more in another run: empty cohorts in central, and in secagg the cohorts before any is called off."""
    if mechanism.participation.select is None and mechanism.trust == "central" and mechanism.p < 1:
        return replace(mechanism, num_clients=1, participation=poisson(min(mechanism.p, 0.5)), colluders=0)
    return replace(mechanism, min_cohort=1) if mechanism.min_cohort > 1 else None


def _play(mechanism: Mechanism, rounds: int, delta: float, trials: int, seed: int, on_progress: Progress) -> _Seen:
    """Runs with canaries on coordinates of their own and, if there are more clients than that, silent ones."""
    clients, radius = mechanism.num_clients, mechanism.radius
    m = min(clients, trials)
    dim, runs, rng = max(m, 16), -(-trials // m), generator(seed, "audit")
    silence, axes = Silence(dim, clients - m), torch.eye(m, dim, dtype=torch.float64)
    method, asked = dp_fed_avg_clip(gd(1.0), tau=radius, server_step=1e-9), _asked(mechanism, delta)
    seen = _Seen(rng.random((runs, m)) < 0.5, np.empty((runs, rounds, dim)), np.empty((runs, rounds, clients), bool))
    for run, own_seed in enumerate(rng.integers(2**62, size=runs).tolist()):
        problem = with_canaries(silence, axes, seen.present[run], mechanism.adjacency, 1e6 * radius)
        for r in simulate(problem, method, mechanism.participation, asked, rounds=rounds, seed=own_seed, workers=1):
            seen.released[run, r.number - 1] = r.released.numpy() / radius
            seen.sent[run, r.number - 1] = _senders(r, clients)
            on_progress(run * rounds + r.number, runs * rounds)
    return seen


def _senders(r: Round, num_clients: int) -> np.ndarray:
    sent = np.zeros(num_clients, bool)
    sent[r.cohort.computing[r.cohort.sending]] = True
    return sent


def _log_ratios(y: np.ndarray, sent: np.ndarray, sizes: Any, mechanism: Mechanism) -> np.ndarray:
    """How much likelier the projections y (..., m) of a round are with the canary in than out, as a logarithm.

    central: nobody sees who was drawn, so that both are mixtures. Elsewhere that is known, and so is the noise.
    """
    mirrored, variance = mechanism.adjacency == "replace_one", mechanism.noise_std**2
    if mechanism.trust != "central":
        variance = variance * np.maximum(sizes, 1)[..., None]
        return np.asarray(np.where(sent, (2 * y if mirrored else y - 0.5) / variance, 0.0))
    p = mechanism.participation.rate(mechanism.num_clients)
    absent, drawn = math.log1p(-p) if p < 1 else -math.inf, math.log(p)
    ratios = np.logaddexp(absent, drawn + (y - 0.5) / variance)
    return np.asarray(ratios - np.logaddexp(absent, drawn + (-y - 0.5) / variance) if mirrored else ratios)


def _noise(seen: _Seen, mechanism: Mechanism) -> np.ndarray:
    """What was released beyond the messages, in units of what it should be: standard normal, (R, K, d)."""
    rest, m = seen.released.copy(), seen.present.shape[1]
    rest[:, :, :m] -= seen.canaries_sent * signs(seen.present, mechanism.adjacency)[:, None]
    senders = 1 if mechanism.trust == "central" else np.maximum(seen.sent.sum(2, keepdims=True), 1)
    return np.asarray(rest / (mechanism.noise_std * np.sqrt(senders)))


def _noise_checks(seen: _Seen, mechanism: Mechanism) -> dict[str, float]:
    noise, m = _noise(seen, mechanism), seen.present.shape[1]
    heard = seen.canaries_sent * signs(seen.present, mechanism.adjacency)[:, None]
    along = noise[:, :, :m][heard != 0] * heard[heard != 0]
    noise = noise.reshape(-1, noise.shape[2]) if mechanism.trust == "central" else noise[seen.sent.any(2)]

    def no_sum(values: np.ndarray) -> float:
        return float(2 * norm.sf(abs(values.sum()) / math.sqrt(max(values.size, 1))))

    return {
        "the length of messages": no_sum(along),
        "noise level": _two_sided(chi2(noise.size), (noise**2).sum()),
        "noise shape": float(kstest(noise.ravel()[: 10**6], "norm").pvalue) if noise.size else 1.0,
        "noise from round to round": no_sum(noise[1:] * noise[:-1]),
        "noise from coordinate to coordinate": no_sum(noise[:, 1:] * noise[:, :-1]),
    }


def _sampler_checks(sent: np.ndarray, p: float) -> dict[str, float]:
    """Whether (R, K, M) draws are independent coins: how many; how evenly over clients, and over rounds (neither more
    nor less than coins would be); and how many clients two rounds in a row have in common."""
    pairs = sent.shape[1] // 2
    common = sent[:, 0 : 2 * pairs : 2] & sent[:, 1 : 2 * pairs : 2]
    return {
        "sampling rate": _two_sided(binom(sent.size, p), sent.sum()),
        "draws per client": _dispersion(sent.sum(1), sent.shape[1], p),
        "cohort sizes": _dispersion(sent.sum(2), sent.shape[2], p),
        "successive cohorts": _two_sided(binom(common.size, p * p), common.sum()),
    }


def _dispersion(counts: np.ndarray, n: int, p: float) -> float:
    """Whether counts vary as binomial ones do: the sum of squares against a gamma distribution of the same moments.
    1 where there is too little to tell."""
    spread = n * p * (1 - p)
    if n == 1 or counts.size < 30 or counts.size * spread < 100:
        return 1.0
    variance = 2 + (1 - 6 * p * (1 - p)) / spread  # of one squared deviation, in units of its mean
    return _two_sided(gamma(counts.size / variance, scale=variance), ((counts - n * p) ** 2).sum() / spread)


def _two_sided(law: Any, value: float) -> float:
    """The p-value of a value that must be neither too small nor too large; it counts on both sides."""
    return float(min(1.0, 2 * law.cdf(value), 2 * law.sf(np.nextafter(value, -math.inf))))
