"""Searches that end on the safe side, and the paper's own formula."""

import math
from collections.abc import Callable

from fednormec.errors import UserError

PRECISION = 1e-4


def least_noise(epsilon: Callable[[float], float], target: float) -> float:
    """Finds the least noise whose ε is at most the target, within 0.01 % and never below: the value returned was tried.

    ε is close to a power of the noise, so the next value is guessed from that and tried on both sides.

    >>> 0.375 <= least_noise(lambda std: 3 / std, 8.0) <= 0.375 * 1.0001
    True
    """
    high = 1.0
    while (above := epsilon(high)) > target:
        high *= 2
        if high > 1e11:
            raise UserError("no noise keeps to this target: ask for a larger epsilon or delta, or fewer rounds.")
    low = high / 2
    while (below := epsilon(low)) <= target:
        low, high, above = low / 2, low, below
        if high < 1e-9:
            return high
    side = 1
    while high - low > PRECISION * high:
        guess = _between(low, high, below, above, target) * (1 + side * PRECISION / 3)
        tried = min(max(guess, low + (high - low) / 16), high - (high - low) / 16)
        value = epsilon(tried)
        if value <= target:
            high, above, side = tried, value, -1
        else:
            low, below, side = tried, value, 1
    return high


def _between(low: float, high: float, below: float, above: float, target: float) -> float:
    """Returns where a power law through both ends takes the target value; the middle where there is none."""
    if not (math.isfinite(below) and 0 < above < below):
        return (low + high) / 2
    return float(low * (high / low) ** (math.log(below / target) / math.log(below / above)))


def most_rounds(keeps: Callable[[int], bool], planned: int) -> int:
    """Finds the largest number of rounds up to `planned` that keeps to a target; 0 if not even one does.

    >>> most_rounds(lambda k: k <= 17, 300)
    17
    """
    if keeps(planned):
        return planned
    low, high = 0, planned
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def paper_noise_std(epsilon: float, delta: float, p: float, rounds: int, c: float = 1.0) -> float:
    """Returns σ = c p √(rounds log(1/δ)) / ε, the calibration of the paper. Its true ε is another.

    >>> round(paper_noise_std(8, 1e-5, 0.25, 300), 3)
    1.837
    """
    return c * p * math.sqrt(rounds * math.log(1 / delta)) / epsilon
