"""Composition of rounds: the δ of a composed privacy loss, with errors relative to that δ.

Rounds of several kinds come together if their grids have one width.

Composing k rounds is raising a Fourier transform to the k-th power, whose rounding errors are relative to the largest
probability and would drown a small δ. So the loss l of every round is tilted first: q(l) = p(l) e^{sl}/M(s), where
M(s) = Σ p(l) e^{sl} and s is such that the k-fold q is centred near the ε in question (the saddle point). With that,

    δ(ε) = Σ_{l > ε} (1 − e^{ε−l}) M(s)^k e^{−sl} q_k(l),

and an error in q_k comes with the same small factor M(s)^k e^{−sε} as δ itself. All errors go to the safe side:

- what rounding can do to the probabilities of q_k is added to each of them (`_tilted_masses`);
- the window holds all of q_k but TAIL on either side. What wraps around adds to q_k and is left there; the loss above
  the window is bounded by Chernoff and added to δ. M at many tilts serves for that, and to find s;
- the relative errors of a round's probabilities, of M(s)^k and of the sums are a factor e^{slack} on δ.

Where the window would be too large, Chernoff's bound alone is the answer.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.signal import lfilter

from fednormec.privacy.round_loss import EPS, RELATIVE_ERROR, TILTS, RoundLoss

TAIL = 1e-13  # of the tilted loss, outside the window on either side
LARGEST = 2**22  # points
LOG_IGNORED = -60.0  # a power of a transform below e to this is left away
FIRST = int(np.argmax(TILTS > 0))

Parts = Sequence[tuple[RoundLoss, int]]


def epsilon(parts: Parts, delta: float) -> float:
    """Returns the least ε at which so many rounds of each loss have at most this δ; inf if there is none."""
    width, certain = parts[0][0].width, _infinite(parts)
    if certain >= delta:
        return math.inf
    orders = TILTS[FIRST:] / width
    bounds = (_log_bounds(parts) - math.log(delta - certain)) / orders
    tilt, known = FIRST + int(np.argmin(bounds)), float(bounds.min())
    while known > 0:
        composed = _compose(parts, min(tilt, len(TILTS) - 2))
        if composed is None:
            break
        lowest, deltas = composed
        i = max(1, int(np.argmax(deltas <= delta)))
        if deltas[i] > delta:  # nowhere
            break
        fall = deltas[i - 1] - deltas[i]
        part = (delta - deltas[i]) / fall * -math.expm1(-width) if fall > 0 else 0.0
        found = (lowest + i) * width + math.log1p(-part) if part < 1 else 0.0
        known = min(known, found)
        if found >= lowest * width or tilt == FIRST:
            break
        tilt = max(FIRST, min(tilt - 1, _centred(parts, found)))
    return max(0.0, known)


def delta(parts: Parts, epsilon: float) -> float:
    """Returns the δ of so many rounds of each loss at this ε."""
    width = parts[0][0].width
    bounds = _log_bounds(parts) - TILTS[FIRST:] / width * epsilon
    known = min(1.0, math.exp(min(0.0, bounds.min())) + _infinite(parts))
    composed = _compose(parts, min(FIRST + int(np.argmin(bounds)), len(TILTS) - 2))
    if composed is None:
        return known
    lowest, deltas = composed
    i = min(max(1, math.floor(epsilon / width) + 1 - lowest), len(deltas) - 1)
    if i == 1 and deltas[0] >= 1:
        return known
    part = math.expm1(min(0.0, epsilon - (lowest + i) * width)) / math.expm1(-width)
    return min(known, float(deltas[i] + part * (deltas[i - 1] - deltas[i])))


def _infinite(parts: Parts) -> float:
    return -math.expm1(math.fsum(rounds * math.log1p(-loss.infinite) for loss, rounds in parts))


def _log_moments(parts: Parts) -> np.ndarray:
    return np.asarray(sum(rounds * loss.log_moments for loss, rounds in parts))


def _slack(parts: Parts, tilts: np.ndarray) -> np.ndarray:
    """Bounds the relative error of M^k and of what is tilted by it, from that of each probability and exponent."""
    rounds = sum(k for _, k in parts)
    reach = sum(k * max(-loss.lowest, loss.lowest + len(loss.probabilities)) for loss, k in parts)
    return rounds * RELATIVE_ERROR + 8 * EPS * reach * tilts


def _log_bounds(parts: Parts) -> np.ndarray:
    """Returns Chernoff's bound at each positive tilt: log δ(ε) is at most this minus order times ε.

    It is M(s)^k times the largest value of e^{−sx} (1 − e^{−x}), which is s^s/(1+s)^{1+s}.
    """
    tilts = TILTS[FIRST:]
    orders = tilts / parts[0][0].width
    logs = _log_moments(parts)[FIRST:] + _slack(parts, tilts)
    return np.asarray(logs - orders * np.log1p(1 / orders) - np.log1p(orders))


def _centred(parts: Parts, epsilon: float) -> int:
    """Returns the positive tilt at which the mean of the composed loss is next below ε."""
    means = np.diff(_log_moments(parts)[FIRST:]) / np.diff(TILTS[FIRST:]) * parts[0][0].width
    return FIRST + max(0, int(np.searchsorted(means, epsilon)) - 1)


def _window(parts: Parts, tilt: int) -> tuple[int, int]:
    """Returns the places that hold all but TAIL of the tilted composed loss on either side (Chernoff's bound)."""
    moments = _log_moments(parts)
    with np.errstate(divide="ignore", invalid="ignore"):
        bounds = (moments - moments[tilt] - math.log(TAIL)) / (TILTS - TILTS[tilt])
    lowest = sum(rounds * loss.lowest for loss, rounds in parts)
    longest = sum(rounds * (len(loss.probabilities) - 1) for loss, rounds in parts)
    low = max(math.floor(bounds[:tilt].max()), lowest)
    high = min(math.ceil(bounds[tilt + 1 :].min()), lowest + longest)
    return low, max(low, high)


def _compose(parts: Parts, tilt: int) -> tuple[int, np.ndarray] | None:
    """Returns the lowest place and the δs at ε = (lowest + i) * width, upper bounds; None if they are too many."""
    low, high = _window(parts, tilt)
    if high - low >= LARGEST:
        return None
    s, width, moment = TILTS[tilt], parts[0][0].width, _log_moments(parts)[tilt]
    masses = _tilted_masses(parts, tilt, low, high)
    fade, fall = math.exp(-s), -math.expm1(-width)
    tails = lfilter([fade], [1.0, -fade], masses[::-1])
    weighted = lfilter([fall], [1.0, -fade * (1 - fall)], tails)[::-1]  # Σ_{n > 0} e^{−sn} (1 − e^{−width n}) q(i + n)
    slack = _slack(parts, s) + 8 * EPS * (len(masses) + abs(moment) + s * max(abs(low), abs(high)))
    exponents = moment + slack - s * np.arange(low - 1, high)
    finite = np.where(exponents < 700, np.exp(np.minimum(exponents, 700)) * weighted, 1.0)
    certain = _infinite(parts) + _above(parts, high, (high - low + 1) * width)
    return low - 1, np.minimum(np.append(finite, 0.0) + certain, 1.0)


def _above(parts: Parts, high: int, window: float) -> float:
    """Bounds what losses above the window add to δ(ε), for every ε in the window.

    With x > 0 the distance of a loss from the top, 1 − e^{ε−l} is below 1 and below window + x, and x e^{−sx} ≤ 1/(es).
    """
    tilts = TILTS[FIRST:]
    if high == sum(rounds * (loss.lowest + len(loss.probabilities) - 1) for loss, rounds in parts):
        return 0.0
    weights = np.minimum(1.0, window + parts[0][0].width / (math.e * tilts))
    logs = _log_moments(parts)[FIRST:] + _slack(parts, tilts) - tilts * high + np.log(weights)
    return math.exp(min(0.0, float(logs.min())))


def _tilted_masses(parts: Parts, tilt: int, low: int, high: int) -> np.ndarray:
    """Returns the probabilities of the tilted composed loss from place low to high, upper bounds.

    One value of a transform of probabilities is off by at most `error`: a few roundings in each of its log₂(size)
    stages, of terms that add up to 1. So its power is off by k·error·|value|^{k−1}, and powers and the transform back
    add no more than that; the mean of all these, and of the powers left away, is what any probability can be off by.
    """
    size = next_fast_len(max(high - low + 1, 2), real=True)
    error = 8 * EPS * math.log2(2 * size)
    once = [rfft(_wrapped(loss, tilt, size)) for loss, _ in parts]
    logs = sum((k - 1) * np.log(np.abs(values) + error) for values, (_, k) in zip(once, parts, strict=True))
    kept = logs > LOG_IGNORED  # most are far below it, and powers take time
    transform = np.zeros(size // 2 + 1, complex)
    transform[kept] = math.prod(values[kept] ** k for values, (_, k) in zip(once, parts, strict=True))
    start, rounds = sum(k * loss.lowest for loss, k in parts), sum(k for _, k in parts)
    masses = np.roll(np.maximum(irfft(transform, size), 0.0), -((low - start) % size))[: high - low + 1]
    rounding = 2 * error * (1 + rounds) * 2 * np.exp(logs[kept]).sum() / size + 2 * math.exp(LOG_IGNORED)
    return np.asarray(masses + rounding)


def _wrapped(loss: RoundLoss, tilt: int, size: int) -> np.ndarray:
    """Returns the tilted probabilities of one round, around a circle of this size."""
    places = loss.lowest + np.arange(len(loss.probabilities))
    tilted = loss.probabilities * np.exp(np.minimum(TILTS[tilt] * places - loss.log_moments[tilt], 700))
    return np.bincount(np.arange(len(tilted)) % size, tilted, minlength=size)
