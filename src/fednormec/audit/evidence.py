"""Evidence on ε from guesses about canaries: bounds from error rates, and an estimate from two normals."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit
from scipy.stats import beta, binom, norm

from fednormec.privacy import accounting
from fednormec.privacy.accounting import Open

CONFIDENCE = 0.9995  # of the lower bound
OF_ESTIMATE = 0.9999  # of the estimate's lower limit: with all checks, a right run is called violated once in 1,600
LEVEL = 1e-6  # a check fails below this p-value


def clopper_pearson(successes: Any, trials: Any, level: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns lower and upper bounds of a probability, each wrong with probability `level` at the most."""
    k, n = np.asarray(successes), np.asarray(trials)
    low = np.where(k > 0, beta.ppf(level, np.maximum(k, 1), n - k + 1), 0.0)
    return low, np.where(k < n, beta.isf(level, k + 1, np.maximum(n - k, 1)), 1.0)


class _Counts(NamedTuple):
    """Counts of a guess, of those trials where it is right and of those where it is wrong."""

    hits: np.ndarray
    positives: int
    errors: np.ndarray
    negatives: int

    def bounds(self, level: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns the least rate of hits and the highest rate of errors, both true but for probability `level`."""
        hit, error = (self.hits, self.positives), (self.errors, self.negatives)
        return clopper_pearson(*hit, level / 2)[0], clopper_pearson(*error, level / 2)[1]


def lower_bound(scores: np.ndarray, present: np.ndarray, delta: float, confidence: float = CONFIDENCE) -> float:
    """Returns the ε that the scores' error rates prove at this δ."""

    def proved(counts: _Counts) -> np.ndarray:
        hit, error = counts.bounds(1 - confidence)
        return np.asarray(np.log(np.maximum(hit - delta, 1e-300) / error))

    return max(0.0, float(proved(_best_guess(scores, present, [proved])[1])))


def curve_p_value(scores: np.ndarray, present: np.ndarray, curve: list[tuple[float, float]]) -> float:
    """Returns a p-value against P(guess | in) <= e^ε P(guess | out) + δ for all these (ε, δ) and vice versa.

    As strict as the lower bound, but a claim is a whole curve: error rates that prove a large ε at a small δ take many
    trials, those that break a small ε at its larger δ take few.
    """

    def excess(epsilon: float, delta: float, level: Any, counts: _Counts) -> np.ndarray:
        hit, error = counts.bounds(level)
        return np.asarray(hit - math.exp(epsilon) * error - delta)

    which, counts = _best_guess(scores, present, [partial(excess, *point, LEVEL) for point in curve])
    levels = 10.0 ** -np.arange(16)
    return float(np.min(levels[excess(*curve[which], levels, counts) > 0], initial=1.0))


def _best_guess(
    scores: np.ndarray, present: np.ndarray, aims: Sequence[Callable[[_Counts], np.ndarray]]
) -> tuple[int, _Counts]:
    """Chooses aim, threshold and side ("in" above it, or "out" below) for the highest value, by every second trial.

    The other trials are then counted, and have had no say in the choice.
    """

    def counted(half: slice, side: int, thresholds: Any) -> _Counts:
        values, ins = (scores[half], present[half]) if side == 0 else (-scores[half], ~present[half])
        on, off = np.sort(values[ins]), np.sort(values[~ins])
        above = (len(v) - np.searchsorted(v, thresholds) for v in (on, off))
        return _Counts(next(above), len(on), next(above), len(off))

    best = (-math.inf, 0, 0, 0.0)
    for side in (0, 1):
        thresholds = scores[::2] if side == 0 else -scores[::2]
        for which, aim in enumerate(aims):
            values = aim(counted(slice(0, None, 2), side, thresholds))
            best = max(best, (float(values.max()), which, side, float(thresholds[values.argmax()])))
    _, which, side, threshold = best
    return which, counted(slice(1, None, 2), side, threshold)


def two_gaussians(
    scores: np.ndarray, present: np.ndarray, delta: float, confidence: float = OF_ESTIMATE
) -> tuple[float, float]:
    """Returns the ε at this δ of two normal distributions fitted to the scores, and its lower confidence limit.

    After Andrew et al., arXiv 2302.03098, with one variance for both: were the log ratio of two laws normal under both,
    it would have the same variance, and two different ones would let the fit's tails claim far too much.
    """
    on, off = scores[present], scores[~present]
    if min(len(on), len(off)) < 2:
        return 0.0, 0.0
    gap, std = float(abs(on.mean() - off.mean())), math.sqrt((on.var(ddof=1) + off.var(ddof=1)) / 2)
    if std <= 1e-12 * gap:
        return (math.inf, math.inf) if gap > 0 else (0.0, 0.0)
    mu = gap / std
    of_means = (on.var(ddof=1) / len(on) + off.var(ddof=1) / len(off)) / std**2
    error = math.sqrt(of_means + mu**2 / (2 * (len(scores) - 2)))
    return gaussian_epsilon(mu, delta), gaussian_epsilon(mu - float(norm.ppf(confidence)) * error, delta)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Returns the ε of one Gaussian of shift/std = mu at this δ; 0 if mu is not positive."""
    return accounting.epsilon(Open((1.0,), (mu,)), 1, delta) if mu > 0 else 0.0


def one_run_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Bounds the probability of so many right guesses, if (ε, δ) held (arXiv 2305.08846, appendix D).

    Without δ each guess is right with probability e^ε/(1 + e^ε) at the most. With it, 2 m δ of probability may be spent
    on raising the number of right guesses, the less of it the more they are raised by.
    """
    rate = expit(epsilon)
    just_below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, rate))
    raised = np.max(just_below / np.arange(1, right + 1), initial=0.0)
    return float(min(1.0, binom.sf(right - 1, guesses, rate) + 2 * canaries * delta * raised))


def one_run_epsilon(canaries: int, guesses: int, right: int, delta: float, level: float) -> float:
    """Returns the largest ε that so many right guesses refute at this level."""

    def gap(epsilon: float) -> float:
        return one_run_p_value(canaries, guesses, right, epsilon, delta) - level

    high = 1.0
    while gap(high) < 0:
        high *= 2
    return float(brentq(gap, 0.0, high)) if gap(0.0) < 0 else 0.0
