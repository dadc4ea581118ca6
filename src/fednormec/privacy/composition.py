"""The privacy loss of one round on a grid, and what any number of such rounds come to: one Fourier transform each.
Rounds of several kinds come together if their grids have one width.

A round's loss is discretised by connecting the dots of its δ(ε) curve (Doroshenko et al., arXiv 2207.04380), which
over-states every δ. Composing k rounds is raising the transform to the k-th power. dp-accounting does the same, but
looks for each k's window from scratch; here that is prepared once, so that a run can have the ε of each of its rounds.
Whatever is cut off or rounded is counted as δ.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.signal import lfilter

TAIL = 1e-14  # probability that may leave the window, on either side
LARGEST = 2**22  # points
TILTS = np.concatenate([-np.geomspace(1e4, 1e-5, 120), np.geomspace(1e-5, 1e4, 120)])


class RoundLoss(NamedTuple):
    """One round: the probabilities of the losses (lowest + i) * width, that of an infinite loss, and for the window
    the logarithms of the loss's moment generating function at TILTS/width."""

    width: float
    lowest: int
    probabilities: np.ndarray
    infinite: float
    log_moments: np.ndarray


Parts = Sequence[tuple[RoundLoss, int]]


def connect_dots(width: float, lowest: int, deltas: np.ndarray) -> RoundLoss:
    """The loss whose δ(ε) is `deltas` at ε = lowest * width, (lowest + 1) * width, …, and no less in between."""
    deltas = np.minimum.accumulate(np.clip(deltas, 0.0, 1.0))
    steps = np.diff(deltas) / math.expm1(width)
    falls = -np.diff(deltas) / -math.expm1(-width)
    probabilities = np.append([1 - deltas[0]], falls)
    probabilities[:-1] += steps
    probabilities = np.maximum(probabilities, 0.0)
    places = lowest + np.arange(len(probabilities))
    kept = probabilities > 0
    exponents = TILTS[:, None] * places[kept]
    tops = exponents.max(axis=1)
    log_moments = tops + np.log(np.exp(exponents - tops[:, None]) @ probabilities[kept])
    return RoundLoss(width, lowest, probabilities, float(deltas[-1]), log_moments)


def epsilon(loss: RoundLoss, rounds: int, delta: float) -> float:
    """The least ε at which `rounds` rounds have at most this δ; inf if there is none."""
    return epsilon_of_all([(loss, rounds)], delta)


def epsilon_of_all(parts: Parts, delta: float) -> float:
    """The same for so many rounds of each of several losses."""
    width = parts[0][0].width
    lowest, masses, certain = _compose(parts)
    tail, weighted = _tails(width, masses)
    deltas = certain + tail - weighted  # at ε = (lowest + i) * width
    if certain > delta:
        return math.inf
    i = int(np.argmax(deltas <= delta))  # the last of them is `certain`
    if i == 0:
        return max(0.0, lowest * width)
    here, beyond = weighted[i] + masses[i], certain + tail[i] + masses[i]  # losses from i on, relative to place i
    return max(0.0, (lowest + i) * width + math.log((beyond - delta) / here))


def delta(loss: RoundLoss, rounds: int, epsilon: float) -> float:
    """The δ of `rounds` rounds at this ε."""
    lowest, masses, certain = _compose([(loss, rounds)])
    gaps = (lowest + np.arange(len(masses))) * loss.width - epsilon
    return float(min(1.0, certain - np.expm1(-gaps[gaps > 0]) @ masses[gaps > 0]))


def fits(*parts: tuple[RoundLoss, int]) -> bool:
    """Whether so many rounds can be composed in reasonable memory."""
    low, high = _window(parts)
    return high - low < LARGEST


def _window(parts: Parts) -> tuple[int, int]:
    """Places that hold all but TAIL of the composed loss on either side (Chernoff's bound)."""
    bounds = (sum(rounds * loss.log_moments for loss, rounds in parts) - math.log(TAIL)) / TILTS
    lowest = sum(rounds * loss.lowest for loss, rounds in parts)
    longest = sum(rounds * (len(loss.probabilities) - 1) for loss, rounds in parts)
    low = max(math.floor(bounds[TILTS < 0].max()), lowest)
    high = min(math.ceil(bounds[TILTS > 0].min()), lowest + longest)
    return low, max(low, high)


def _compose(parts: Parts) -> tuple[int, np.ndarray, float]:
    """The lowest place, the probabilities from there on, and what counts as an infinite loss."""
    low, high = _window(parts)
    size = next_fast_len(max(high - low + 1, 2), real=True)
    transform, start, rounds_of_all, log_finite = np.ones(size // 2 + 1, complex), 0, 0, 0.0
    for loss, rounds in parts:
        wrapped = np.bincount(np.arange(len(loss.probabilities)) % size, loss.probabilities, minlength=size)
        transform *= rfft(wrapped) ** rounds
        start += rounds * loss.lowest
        rounds_of_all += rounds
        log_finite += rounds * math.log1p(-loss.infinite)
    masses = np.roll(np.maximum(irfft(transform, size), 0.0), -((low - start) % size))[: high - low + 1]
    rounding = np.finfo(float).eps * rounds_of_all * math.sqrt(size)
    return low, masses, -math.expm1(log_finite) + 2 * TAIL + rounding


def _tails(width: float, masses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each place i: the mass above it, and that mass with each loss weighted by e^{-(its distance)}."""
    fade = math.exp(-width)
    tail = np.cumsum(masses[::-1])[::-1] - masses
    weighted = lfilter([0.0, fade], [1.0, -fade], masses[::-1])[::-1]
    return tail, np.asarray(weighted)
