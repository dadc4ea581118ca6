"""Exact draws of the discrete Gaussian: rejection on integers, in which no comparison is left to rounding.

N_Z(0, σ²) has the mass e^(−k²/(2σ²)) / Σ_j e^(−j²/(2σ²)) at each integer k. The method is that of Canonne, Kamath and
Steinke (The discrete Gaussian for differential privacy, arXiv 2004.00010) with a simpler proposal: t is the least power
of two that is at least σ; U is uniform on 0 … t − 1, which is so many random bits; V is geometric, P(V ≥ v) = e^(−v);
X = U + tV has a sign of its own, and −0 is rejected. X is accepted with probability e^(−E),

    E = X²/(2σ²) − V + c,    c = max(0, 1 − t²/(2σ²)).

So ±X has a probability proportional to e^(−V) e^(−E), which is proportional to e^(−X²/(2σ²)). E is never negative:
X ≥ tV and t ≥ σ, so X²/(2σ²) − V ≥ rV²/2 − V with r = (t/σ)² ≥ 1, which is 0 at V = 0, r/2 − 1 at V = 1 and not
negative from V = 2 on. Between 39 and 57 % of the proposals are accepted.

All comparisons are of a uniform number with an exponential. The first 64 bits of the uniform number decide nearly all
of them, in floating point with room for its errors (`UNDECIDED`). `Uniform` decides the others, with as many more bits
as it takes.
"""

import math
from collections.abc import Callable
from decimal import MIN_EMIN, Context, Decimal
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from fednormec.errors import UserError

Words = Callable[[int], np.ndarray]

LEAST, MOST = 2.0, 2.0**40  # of σ, so that V < 710 (MOST_BITS) gives X < 2⁵⁰, which int64 and float64 hold exactly
# Relative error that a float64 e^(−E) may have. It has 2⁻³⁹ at most: a word of at least FEW gives V ≤ 20, so X²/(2σ²)
# is at most (2 · 21)²/2 < 2¹⁰ and off by six roundings of 2⁻⁵³; exp and log, and a word as a number, are good to 2⁻⁴⁵.
# Where V > 20, e^(−E) is far below 2⁻⁶⁴ in either arithmetic. The rest is room for a worse exp, and costs nothing.
UNDECIDED = 2.0**-32
FEW = 2**34  # a smaller word does not give −log of its number to within UNDECIDED
MOST_BITS = 1024  # uniform words leave a comparison open for longer with a probability below 2⁻⁹⁰⁰
TILE = 2**14  # proposals at once: what fits into the cache


def discrete_gaussian(words: Words, sigma: float, size: int, undecided: float = UNDECIDED) -> np.ndarray:
    """Returns independent draws of N_Z(0, σ²) as int64, exactly so if the words are uniform.

    Exactly: for the rational number that the float σ is, no probability is off by rounding. How many words are drawn,
    and how long that takes, depends on the words alone.

    Args:
        words: returns so many independent uniform uint64 words.
        sigma: parameter σ of the law, from 2 to 2⁴⁰. The standard deviation is σ to within 10⁻³¹.
        size: number of draws.
        undecided: relative width within which floating point leaves a comparison to exact arithmetic. More is slower
            and draws the same.

    >>> from fednormec.core.randomness import generator, words_of
    >>> discrete_gaussian(words_of(generator(1, "noise", 7)), 100.0, 5)
    array([ -50,  -98,  -71, -149,   71])
    """
    law = _Law.of(sigma)
    draws = np.empty(size, np.int64)
    done = 0
    while done < size:
        count = min(TILE, math.ceil(1.1 * (size - done) / law.rate) + 16)
        accepted = _accepted(words, law, count, undecided)[: size - done]
        draws[done : done + len(accepted)] = accepted
        done += len(accepted)
    return draws


class Uniform:
    """Uniform number in [0, 1) that knows its first 64 bits, and draws more when a comparison needs them.

    Args:
        word: first 64 bits.
        words: where more come from.
    """

    def __init__(self, word: int, words: Words) -> None:
        self._number, self._bits, self._words = word, 64, words  # it is in [number, number + 1) / 2^bits

    def below_exp(self, x: Fraction) -> bool:
        """Returns whether the number is below e^(−x), for x ≥ 0."""
        if x == 0:
            return True
        while True:
            if x <= self._bits:
                least, most = _exp_bounds(x, self._bits // 3 + 10)
                if Fraction(self._number + 1, 2**self._bits) <= least:
                    return True
                if Fraction(self._number, 2**self._bits) >= most:
                    return False
            elif self._number:  # e^(−x) < 2^(−bits)
                return False
            self._draw_more()

    def _draw_more(self) -> None:
        if self._bits >= MOST_BITS:
            raise RuntimeError("the random words are not random: 16 of them did not decide one comparison")
        self._number, self._bits = (self._number << 64) | int(self._words(1)[0]), self._bits + 64


class _Law(NamedTuple):
    sigma: float
    log_t: int
    lift: Fraction  # c
    rate: float  # of acceptance

    @staticmethod
    def of(sigma: float) -> "_Law":
        if not LEAST <= sigma <= MOST:
            raise UserError(f"sigma of discrete noise must be from 2 to 2**40, not {sigma}.")
        mantissa, exponent = math.frexp(sigma)
        log_t = exponent - (mantissa == 0.5)
        lift = max(Fraction(0), 1 - Fraction(4**log_t) / (2 * Fraction(sigma) ** 2))
        rate = -math.expm1(-1) * math.sqrt(math.pi / 2) * math.exp(-lift) * sigma / 2**log_t
        return _Law(sigma, log_t, lift, rate)


def _accepted(words: Words, law: _Law, count: int, undecided: float) -> np.ndarray:
    """Returns those of `count` proposals that are accepted."""
    place, level, coin = words(3 * count).reshape(3, count)
    v = _levels(words, level, undecided)
    x = (place & np.uint64(2**law.log_t - 1)).view(np.int64)
    x += v.astype(np.int64) << law.log_t
    negative = place.view(np.int64) < 0  # the highest bit, which U does not use
    accepted = _coins(words, coin, law, x, v, undecided)
    accepted &= ~negative | (x > 0)
    np.negative(x, out=x, where=negative)
    kept: np.ndarray = x[accepted]
    return kept


def _levels(words: Words, first: np.ndarray, undecided: float) -> np.ndarray:
    """Returns V for each uniform number, of which the first 64 bits are given: the number of v ≥ 1 with u < e^(−v)."""
    depth = np.log((first.astype(np.float64) + 0.5) * 2.0**-64)
    np.negative(depth, out=depth)
    v = np.floor(depth)
    depth -= np.rint(depth)
    for i in np.flatnonzero((np.abs(depth, out=depth) < undecided) | (first < FEW)):
        u, v[i] = Uniform(int(first[i]), words), 0
        while u.below_exp(Fraction(int(v[i]) + 1)):
            v[i] += 1
    return v


def _coins(words: Words, first: np.ndarray, law: _Law, x: np.ndarray, v: np.ndarray, undecided: float) -> np.ndarray:
    """Returns whether u < e^(−E) for each uniform number, of which the first 64 bits are given.

    u is in [w, w + 1)/2⁶⁴ for a word w. Where e^(−E) underflows, it is less than 1/2⁶⁴ in either arithmetic.
    """
    chance = x * (1 / law.sigma)
    chance *= chance
    chance *= -0.5
    chance += v
    chance -= float(law.lift)
    np.exp(chance, out=chance)
    chance *= 2.0**64
    w = first.astype(np.float64)
    below = w + 1 < chance * (1 - undecided)
    for i in np.flatnonzero(~(below | (w > chance * (1 + undecided)))):
        exponent = Fraction(int(x[i])) ** 2 / (2 * Fraction(law.sigma) ** 2) - int(v[i]) + law.lift
        below[i] = Uniform(int(first[i]), words).below_exp(exponent)
    return below


def _exp_bounds(x: Fraction, digits: int) -> tuple[Fraction, Fraction]:
    """Returns bounds of e^(−x), 0 < x ≤ MOST_BITS, that differ by a relative 2 (x + 2) 10^(1 − digits).

    Decimal rounds the quotient and the exponential correctly, each to half a unit of its last digit.
    """
    context = Context(prec=digits, Emin=MIN_EMIN)
    quotient = context.divide(Decimal(-x.numerator), Decimal(x.denominator))
    middle = Fraction(context.exp(quotient))
    slack = middle * (x + 2) / 10 ** (digits - 1)
    return middle - slack, middle + slack
