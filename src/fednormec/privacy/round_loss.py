"""Privacy loss of one round on a grid, every probability with an error relative to itself.

A round is a few `Law`s: z is drawn with some density, and the loss is a monotone function of z. The dots of its δ(ε)
curve are connected (Doroshenko et al., arXiv 2207.04380), which over-states every δ: a loss between two places of the
grid becomes a draw of the two that keeps both its probability and its probability in the neighbour. Here that is
integrated and not taken as a difference of δs, so that no digits are lost in the tails: Gauss's rule of 8 nodes, on
pieces of z that end at every place of the grid and are so short that its own error is below 1e-15 of the piece. All its
terms are positive. What rounding does to a probability is below RELATIVE_ERROR of it; what it does to a loss is covered
by moving the loss up; the tails of z beyond REACH count as an infinite loss.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

REACH = 14.0  # standard deviations of z that are looked into
BEYOND = 1.6e-44  # more than the probability of the rest, 2Φ(−14), and of all that is too small for a number
SMALLEST = 1e-250  # a probability that is kept
RELATIVE_ERROR = 1e-13  # of a probability
EPS = float(np.finfo(float).eps)
STEP = 0.125  # in z
NODES, WEIGHTS = (half / 2 for half in np.polynomial.legendre.leggauss(8))
TILTS = np.concatenate([-np.geomspace(30, 1e-6, 40), np.geomspace(1e-6, 30, 280)])  # per place of a grid
OVERFLOW = 600.0  # e to this is a number, and next to it 1 is none

Function = Callable[[np.ndarray], np.ndarray]


class Law(NamedTuple):
    """Law of a round's loss as a function of z.

    Attributes:
        density: density of z between low and high.
        loss: loss at z, monotone.
        place: inverse of `loss`.
        low: least z.
        high: largest z.
        bends: the z around which the loss turns within short distances.
    """

    density: Function
    loss: Function
    place: Function
    low: float
    high: float
    bends: np.ndarray


class RoundLoss(NamedTuple):
    """Loss of one round on a grid.

    Attributes:
        width: distance of two places.
        lowest: number of the first place.
        probabilities: probability of each loss (lowest + i) * width.
        infinite: probability of an infinite loss.
        log_moments: logarithms of the loss's moment generating function at TILTS/width.
    """

    width: float
    lowest: int
    probabilities: np.ndarray
    infinite: float
    log_moments: np.ndarray


def gaussian(weight: float, mu: float) -> Law:
    """Returns the law of a Gaussian of shift/std = mu that is seen with this probability.

    z is what it shows, from the middle of its law.
    """
    return Law(
        lambda z: weight * _phi(z), lambda z: mu * z + mu**2 / 2, lambda loss: loss / mu - mu / 2, -REACH, REACH,
        np.empty(0),
    )  # fmt: skip


def subsampled(p: float, mu: float) -> tuple[Law, Law]:
    """Returns the law of (1−p) N(0) + p N(mu) against N(0), and the other way round."""
    present = Law(
        _mixed(p, mu), lambda z: _ratio(p, mu, z), lambda loss: _shown(p, mu, loss), -REACH, mu + REACH, _bends(p, mu)
    )
    absent = Law(
        _phi, lambda z: -_ratio(p, mu, z), lambda loss: _shown(p, mu, -loss), -REACH, REACH, _bends(p, mu)
    )  # fmt: skip
    return present, absent


def mirrored(p: float, mu: float) -> Law:
    """Returns the law of (1−p) N(0) + p N(mu) against (1−p) N(0) + p N(−mu)."""

    def place(loss: np.ndarray) -> np.ndarray:
        """Returns loss/2 + asinh((1−p)/p e^{mu²/2} sinh(loss/2)), over mu."""
        half = np.abs(loss) / 2
        with np.errstate(divide="ignore"):
            log_sinh = half + np.log(-np.expm1(-2 * half)) - math.log(2)
        inside = math.log1p(-p) - math.log(p) + mu**2 / 2 + log_sinh
        angle = np.where(inside < OVERFLOW, np.arcsinh(np.exp(np.minimum(inside, OVERFLOW))), inside + math.log(2))
        return np.asarray(np.sign(loss) * (half + angle) / mu)

    bends = _bends(p, mu)
    return Law(
        _mixed(p, mu), lambda z: _ratio(p, mu, z) - _ratio(p, mu, -z), place, -REACH, mu + REACH,
        np.concatenate([-bends, bends]),
    )  # fmt: skip


def on_grid(width: float, laws: Sequence[Law], without: float = 0.0, infinite: float = 0.0) -> RoundLoss:
    """Puts laws together on a grid, with the probability of a round without the client and of an infinite loss."""
    parts = [_connected(width, law) for law in laws]
    lowest = min(0, *(low for low, _ in parts))
    size = max(low + len(masses) for low, masses in parts) - lowest
    probabilities = np.zeros(max(size, 1 - lowest))
    probabilities[-lowest] += without
    for low, masses in parts:
        probabilities[low - lowest : low - lowest + len(masses)] += masses
    probabilities[probabilities < SMALLEST] = 0.0
    return RoundLoss(width, lowest, probabilities, infinite + BEYOND, _log_moments(lowest, probabilities))


def _connected(width: float, law: Law) -> tuple[int, np.ndarray]:
    """Returns the lowest place, and the probabilities from there on."""
    edges = _edges(width, law)
    lengths = np.diff(edges)[:, None]
    z = (edges[:-1] + edges[1:])[:, None] / 2 + lengths * NODES
    masses = (law.density(z) * lengths * WEIGHTS).ravel()
    loss = law.loss(z).ravel()
    loss += 8 * EPS * np.abs(loss) + 1e-12 * width  # rounding, to the safe side
    below = np.floor(loss / width)
    above = np.clip(loss - below * width, 0.0, width)
    up, down = np.expm1(-above) / math.expm1(-width), np.expm1(width - above) / math.expm1(width)
    lowest = int(below.min())
    places = below.astype(np.int64) - lowest
    size = int(places.max()) + 2
    return lowest, np.bincount(places, masses * down, size) + np.bincount(places + 1, masses * up, size)


def _edges(width: float, law: Law) -> np.ndarray:
    """Returns where the pieces of z end.

    At every place of the grid, between them where it is wide, and at short steps.
    """
    first, last = np.sort(law.loss(np.array([law.low, law.high])))
    fine = math.ceil(width / 2)
    grid = np.arange(math.ceil(first / width * fine), math.floor(last / width * fine) + 1) * (width / fine)
    steps = np.linspace(law.low, law.high, math.ceil((law.high - law.low) / STEP) + 1)
    inside = np.concatenate([law.place(grid[(grid > first) & (grid < last)]), law.bends])
    return np.unique(np.concatenate([steps, np.clip(inside, law.low, law.high)]))


def _log_moments(lowest: int, probabilities: np.ndarray) -> np.ndarray:
    kept = probabilities > 0
    places, logs = (lowest + np.arange(len(probabilities)))[kept], np.log(probabilities[kept])
    moments = []
    for tilts in np.array_split(TILTS, 1 + len(TILTS) * len(places) // 10**6):  # a few MB at a time
        exponents = tilts[:, None] * places + logs
        tops = exponents.max(axis=1)
        moments.append(tops + np.log(np.exp(exponents - tops[:, None]).sum(axis=1)))
    return np.concatenate(moments)


def _phi(z: np.ndarray) -> np.ndarray:
    return np.asarray(np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))


def _mixed(p: float, mu: float) -> Function:
    return lambda z: (1 - p) * _phi(z) + p * _phi(z - mu)


def _ratio(p: float, mu: float, z: np.ndarray) -> np.ndarray:
    """Returns the log of the density of (1−p) N(0) + p N(mu) over that of N(0)."""
    shift = mu * (z - mu / 2)
    near = np.log1p(p * np.expm1(np.minimum(shift, OVERFLOW)))
    return np.where(shift < OVERFLOW, near, shift + math.log(p))


def _shown(p: float, mu: float, ratio: np.ndarray) -> np.ndarray:
    """Returns the z at which `_ratio` takes a value."""
    with np.errstate(divide="ignore", over="ignore"):
        near = np.log1p(np.maximum(np.expm1(np.minimum(ratio, 40)) / p, -1.0))
    return np.where(ratio < 40, near, ratio - math.log(p)) / mu + mu / 2  # beyond it 1 − p is nothing next to e^ratio


def _bends(p: float, mu: float) -> np.ndarray:
    """Returns places around the z at which the client is as likely to be there as not."""
    return mu / 2 + (math.log1p(-p) - math.log(p) + np.linspace(-40, 40, 161)) / mu
