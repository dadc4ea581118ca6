"""Guarantees that hold: the corrected lemma and bounds.

docs/theory.md derives them, docs/errata.md says why the printed ones had to change.

Notation: R bounds the memories' error ||P_i(x^k) - v_i^k|| of every client, e^k = v^k - mean_i v_i^k is the server's
tracking error, Lambda the Lipschitz constant of P_i, n = K + 1 the number of rounds that move the model.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from fednormec.theory.guarantee import Condition, Guarantee, at_most
from fednormec.theory.setting import Constants, Local, Noise, Settings, path_excess, path_growth

E = math.e
EXACT_ROUNDS = 10_000  # of a warm-up, that are followed one by one


def update_lipschitz(local: Local, smoothness: float) -> float:
    """Returns Lambda: L for one step; 2 L for several and for incremental gradients, where gamma <= 1/(2L)."""
    return smoothness if local == "one_step" else 2 * smoothness


def overshoot(alpha: float, beta: float) -> float:
    """Returns the largest |1 - beta/(alpha + r)| r among r < beta - alpha.

    It is (sqrt(beta) - sqrt(alpha))^2, 0 if beta <= alpha.

    >>> round(overshoot(0.01, 1.0), 12)
    0.81
    """
    return max(math.sqrt(beta) - math.sqrt(alpha), 0.0) ** 2


def error_after(error: float, alpha: float, beta: float) -> float:
    """Bounds what v_i <- v_i + beta Norm_alpha(P_i - v_i) leaves of an error of at most `error`.

    >>> round(error_after(1.0, 0.01, 1.0), 12), round(error_after(1.0, 1.0, 0.5), 12)
    (0.81, 0.75)
    """
    if error <= 0:
        return 0.0
    left = abs(alpha + error - beta) * (error / (alpha + error)) if error < math.inf else math.inf
    worst_at = math.sqrt(alpha * beta) - alpha
    return max(left, overshoot(alpha, beta)) if 0 <= worst_at <= error else left


def largest_server_step(memory_error: float, alpha: float, beta: float, lipschitz: float) -> float:
    """Returns the eta of Corrected Lemma 1: up to it an error of at most R stays at most R.

    That holds if beta/(alpha + R) < 1. Else it is 0.
    """
    R = memory_error
    if not beta < alpha + R:
        return 0.0
    return max(0.0, min(beta * R / (alpha + R), R - overshoot(alpha, beta)) / lipschitz)


def least_memory_error(start: float, alpha: float, beta: float, moved: float) -> float:
    """Returns the least R >= start that Corrected Lemma 1 keeps.

    P_i moves by at most `moved` (Lambda eta) per round. It needs moved < beta; inf otherwise: the memories cannot
    follow.
    """
    if not moved < beta:
        return math.inf
    kept = max(alpha * moved / (beta - moved), moved + overshoot(alpha, beta), beta - alpha)
    return max(start, kept * (1 + 1e-12))


def error_after_warmup(start: float, alpha: float, beta: float, rounds: int) -> float:
    """Bounds the memories' error after so many rounds in which the model stood still.

    Round by round at first; then by the differential equation r' = -beta r/(alpha + r), which is slower than rounds
    are: it takes the time (start - r + alpha log(start/r))/beta from start to r.
    """
    for _ in range(min(rounds, EXACT_ROUNDS)):
        left = error_after(start, alpha, beta)
        if left == start:
            return start
        start = left
    time = beta * (rounds - EXACT_ROUNDS)
    if time <= 0 or start <= 0:
        return start
    low, high = 0.0, start
    for _ in range(100):
        r = (low + high) / 2
        enough = r > 0 and start - r + alpha * math.log(start / r) <= time
        low, high = (low, r) if enough else (r, high)
    return max(high, overshoot(alpha, beta))


def guarantee(constants: Constants, settings: Settings, noise: Noise, start_error: float | None = None) -> Guarantee:
    """Bounds min_k E||grad f(x^k)|| over the rounds that move the model, in closed form.

    c0 V/(eta n) + 2R + 2 beta sqrt(nu rounds) + eta L/2 + drift. One local step: c0 = 1, no drift. Several, or
    incremental: c0 = e; with D the heterogeneity the drift is 4 L gamma (L D/c + c/2), c the larger of sqrt(2 L D) and
    4 L^2 gamma eta n: 4 L gamma sqrt(2 L D) where eta is small enough. R is the least error that the warm-up reaches
    and Corrected Lemma 1 keeps.

    Args:
        constants: what is known about the problem.
        settings: settings of the method.
        noise: noise of a round.
        start_error: max_i ||P_i(x^0) - v_i^0|| where it is known better than from the constants.
    """
    c, s = constants, settings
    moved = update_lipschitz(s.local, c.smoothness) * s.server_step
    R = least_memory_error(_warmed_up(c, s, start_error), s.alpha, s.beta, moved)
    c0, drift = drift_of(c, s)
    terms = {
        "initial": c0 * c.gap / (s.server_step * s.steps),
        "memory": 2 * R,
        "noise": 2 * s.beta * math.sqrt(noise.variance * s.rounds),
        "server_step": s.server_step * c.smoothness / 2,
        "drift": drift,
    }
    return Guarantee(_source(s.local), terms, _conditions(c, s, moved), {"memory_error": R, "initial_factor": c0})


class Course(NamedTuple):
    """Guarantee round by round: sharper than the closed form, and nothing is asked of the settings.

    Attributes:
        memory_error: bound of max_i ||P_i(x) - v_i|| after k rounds, k = 0..rounds.
        tracking_error: bound of E||v - mean v_i|| after k rounds, k = 0..rounds.
        gradient_norm: bound of min E||grad f|| over the first j models that moved, j = 1..steps (entry 0 is inf); the
            last entry is the sum of `terms`.
        terms: parts of the last bound, by name.
    """

    memory_error: np.ndarray
    tracking_error: np.ndarray
    gradient_norm: np.ndarray
    terms: dict[str, float]

    @property
    def bound(self) -> float:
        """Bound at the end: the sum of the terms."""
        return sum(self.terms.values())


def follow(constants: Constants, settings: Settings, noise: Noise, start_error: float | None = None) -> Course:
    """Follows the same argument without its simplifications, as a recursion over the rounds.

    r <- error_after(r) + Lambda eta bounds the memories, with Lambda = L (e^u - 1)/u, u = gamma L; messages are no
    longer than r/(alpha + r), which shrinks the variance of sampling; and V^{k+1} <= (1 + a) V^k - eta ||grad f(x^k)||
    + eta b_k is summed with weights (1 + a)^{-k-1}.

    Args:
        constants: what is known about the problem.
        settings: settings of the method.
        noise: noise of a round.
        start_error: max_i ||P_i(x^0) - v_i^0|| where it is known better than from the constants.
    """
    c, s = constants, settings
    moved = _path_lipschitz(c, s) * s.server_step
    start = _start(c, s, start_error)
    memory, left = _memories(start, s, moved)
    with np.errstate(invalid="ignore"):
        length = np.where(np.isfinite(memory[:-1]), memory[:-1] / (s.alpha + memory[:-1]), 1.0)
    length[memory[:-1] == 0] = 0.0
    variance = np.concatenate([[0.0], noise.sampling * length**2 + noise.privacy])
    tracking = s.beta * np.sqrt(np.cumsum(variance))
    drift, growth = _followed_drift(c, s)
    weights = np.exp(-math.log1p(growth) * np.arange(1, s.steps + 1))
    total = np.cumsum(weights)
    moving = slice(s.warmup_rounds, s.rounds)
    parts = {
        "initial": c.gap / s.server_step / total,
        "memory": np.cumsum(weights * 2 * left[moving]) / total,
        "noise": np.cumsum(weights * 2 * tracking[1:][moving]) / total,
        "server_step": np.full(s.steps, s.server_step * c.smoothness / 2),
        "drift": np.full(s.steps, drift),
    }
    gradient = np.concatenate([[math.inf], sum(parts.values(), np.zeros(s.steps))])
    return Course(memory, tracking, gradient, {name: float(part[-1]) for name, part in parts.items()})


class Promise(NamedTuple):
    """Promise of given settings: the closed form, and `course`, round by round.

    Attributes:
        constants: what is known about the problem.
        settings: settings of the method.
        noise: noise of a round.
        start_error: max_i ||P_i(x^0) - v_i^0|| where it is known better than from the constants.
        found: the closed form.
    """

    constants: Constants
    settings: Settings
    noise: Noise
    start_error: float | None
    found: Guarantee

    @property
    def course(self) -> Course:
        """Guarantee round by round."""
        return follow(self.constants, self.settings, self.noise, self.start_error)

    @property
    def vacuous(self) -> bool:
        """True if the closed form promises no more than standing still does."""
        return not (self.found.holds and self.found.bound < self.constants.gradient_norm)

    def facts(self) -> dict[str, Any]:
        """Returns all of it by name."""
        course = self.course
        vacuous = not course.bound < self.constants.gradient_norm
        return {
            **self.found.facts(),
            "vacuous": self.vacuous,
            "round_by_round": {"bound": course.bound, "terms": course.terms, "vacuous": vacuous},
            "noise": self.noise._asdict(),
        }


def promise(constants: Constants, settings: Settings, noise: Noise, start_error: float | None = None) -> Promise:
    """Computes the guarantees of given settings.

    Args:
        constants: what is known about the problem.
        settings: settings of the method.
        noise: noise of a round.
        start_error: max_i ||P_i(x^0) - v_i^0|| where it is known better than from the constants.
    """
    return Promise(constants, settings, noise, start_error, guarantee(constants, settings, noise, start_error))


def _start(c: Constants, s: Settings, start_error: float | None) -> float:
    if s.memory == "local_updates":
        return 0.0
    return c.start_error(s.local, s.local_step) if start_error is None else start_error


def _warmed_up(c: Constants, s: Settings, start_error: float | None) -> float:
    return error_after_warmup(_start(c, s, start_error), s.alpha, s.beta, s.warmup_rounds)


def _memories(start: float, s: Settings, moved: float) -> tuple[np.ndarray, np.ndarray]:
    """Bounds the memories' error before each round and after the last, and what each round leaves of it."""
    before, left = np.empty(s.rounds + 1), np.empty(s.rounds)
    before[0], k = start, 0
    for end, step in ((s.warmup_rounds, 0.0), (s.rounds, moved)):
        while k < end:
            left[k] = error_after(float(before[k]), s.alpha, s.beta)
            before[k + 1] = left[k] + step
            k += 1
            if before[k] == before[k - 1]:  # nothing changes any more
                left[k:end], before[k : end + 1], k = left[k - 1], before[k], end
    return before, left


def drift_of(c: Constants, s: Settings) -> tuple[float, float]:
    """Returns c0 and the drift term of the closed form.

    2 ||mean_i (P_i - grad f_i)|| <= 4 L gamma sqrt(2 L (V + D)).
    """
    if s.local == "one_step":
        return 1.0, 0.0
    return E, _split(4 * c.smoothness * s.local_step, c, s)[0]


def _split(A: float, c: Constants, s: Settings) -> tuple[float, float]:
    """Returns the drift, and the growth a of the gap per round.

    They follow from 2 ||mean_i (P_i - grad f_i)|| <= A sqrt(2 L (V + D)), which is at most A (L (V + D)/c + c/2) for
    every c > 0. The part with V makes the gap grow by 1 + a per round, a = A L eta/c; the rest is the drift, least for
    c = sqrt(2 L D). (1 + a)^n <= e needs a n <= 1, that is c >= A L eta n.
    """
    L, D = c.smoothness, c.spread(s.local)
    split = max(math.sqrt(2 * L * D), A * L * s.server_step * s.steps)
    if math.isinf(A) or split == 0:
        return A, 0.0
    return A * (L * D / split + split / 2), A * L * s.server_step / split


def _path_lipschitz(c: Constants, s: Settings) -> float:
    """Returns Lambda without a condition on gamma.

    It is L times the mean distance of two paths over the distance of their starts.
    """
    return c.smoothness * (1.0 if s.local == "one_step" else path_growth(c.smoothness * s.local_step))


def _followed_drift(c: Constants, s: Settings) -> tuple[float, float]:
    """Returns the drift and a with the exact length of a path.

    Its points are on average no further from x than (e^u - 1 - u)/u^2 gamma ||grad f_i(x)||, incremental (e^u - 1)/u
    gamma mean_j ||grad f_{i,j}(x)||.
    """
    if s.local == "one_step":
        return 0.0, 0.0
    u = c.smoothness * s.local_step
    return _split(2 * (path_excess(u) if s.local == "gd" else u * path_growth(u)), c, s)


def _conditions(c: Constants, s: Settings, moved: float) -> tuple[Condition, ...]:
    follows = Condition(
        "server_step", f"Lambda eta < beta: {moved:.4g} against {s.beta:.4g}, so that memories can follow",
        moved < s.beta,
    )  # fmt: skip
    if s.local == "one_step":
        return (follows,)
    limit = 1 / (2 * c.smoothness)
    return (follows, at_most("local_step", "gamma <= 1/(2L)", s.local_step, limit * (1 + 1e-12)))


def _source(local: Local) -> str:
    what = {"one_step": "one local step", "gd": "local gradient steps", "ig": "incremental local steps"}[local]
    return f"corrected bound, {what}"
