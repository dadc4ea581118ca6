"""Accounting of noise on a grid: how near discrete Gaussians are to rounded continuous ones, and what that costs.

N_Z(0, σ²) is the law on the integers with masses proportional to e^(−k²/(2σ²)). It is next to the law of a normal
number of variance σ² − 1/12, rounded to the nearest integer. Rounding commutes with adding an integer, so integers with
such noise are next to what rounding makes of the same integers with normal noise, and are as private but for the
distance between the two laws (`gap`, `smoothed`).
"""

import math
from collections.abc import Callable

import numpy as np

from fednormec.errors import UserError, at_least_one, non_negative

LEAST_SIGMA, MOST_SIGMA = 2.0, 1e30  # the proof holds below 2, but the distance is no longer small; no number overflows
ROUNDED_UP = 1 + 1e-9  # more than all roundings of `gap`, each of 1e-16
MOST_EPSILON = 700.0  # whose exponential is a number
MOST_TERMS = 1000  # of a sum whose terms decrease; the others are taken for as large as the last of these
LIKELY, SMALL = 20.0, 1e-8  # an ε that most are below, and a share of δ that changes no digit of it
HEADROOM = 2.0**-10  # by which `smoothed` overstates the share of δ that a distance takes


def gap(sigma: float, dim: int, summands: int = 1) -> float:
    """Bounds the distance between a sum of discrete Gaussians and a rounded continuous one.

    The distance in total variation is that of two laws on integer vectors: the sum of `summands` independent vectors,
    each of `dim` independent N_Z(0, σ²); and N(0, s² I), s² = summands σ² − 1/12, with every coordinate rounded to the
    nearest integer. It is the same after adding one integer vector to both.

    Lemma, one summand and one coordinate. Let φ_v be the density of N(0, v²), X ~ N(0, s²), s² = σ² − 1/12, U uniform
    on (−½, ½), and g the density of X + U. Then P(round X = k) = g(k), and X + U has the variance σ².

    1. On the line. E e^(t(X+U)/σ − t²/2) = F(t/(2σ)), F(w) = e^(−w²/6) sinh(w)/w = 1 + Σ_{j≥2} f_j w^(2j), is the
       generating function of the means of Hermite polynomials. With f_2 = −1/180, f_3 = 1/2835, |f_j| ≤ (1/3)^j/j!
       (from (2i+1)! ≥ 6^i i!) and (2j)! ≤ 4^j j!², Parseval gives
       χ = ∫ g²/φ_σ − 1 = Σ_j f_j² (2j)!/(2σ)^(4j) ≤ 24/(2880² σ⁸) + (720/4096)/(2835² σ¹²) + q⁴/(1 − q), q = 1/(36 σ⁴).
    2. On the integers. G = g²/φ_σ is entire and |G(x + iy)| ≤ G(x) e^(by²), b = 1/s² − 1/(2σ²). So its Fourier
       transform at ω is at most e^(−ω²/(4b)) of that at 0, and by Poisson's formula
       Σ_k G(k) ≤ (1 + η)(1 + χ), η = 2 Σ_{n≥1} e^(−π²n²/b).
    3. N_Z has the masses φ_σ(k)/θ, θ = 1 + 2 Σ_{n≥1} e^(−2π²σ²n²). So χ²(rounded ‖ N_Z) ≤ θ(1 + η)(1 + χ) − 1.

    1 + χ² is multiplied over independent coordinates, and the distance is at most √χ²/2: √(6 dim)/(2880 σ⁴) and little
    more. A sum of `summands` is next to N_Z(0, summands σ²), which the lemma holds for; `_sum_gap` is added for that.

    Args:
        sigma: parameter σ of each summand, from 2 to 1e30, in units of the grid.
        dim: number of coordinates.
        summands: number of vectors in the sum.

    >>> f"{gap(2.0**16, 25_000):.2g}"
    '7.3e-21'
    """
    if not LEAST_SIGMA <= sigma <= MOST_SIGMA:
        raise UserError(f"sigma of noise on a grid must be from 2 to 1e30, not {sigma}.")
    at_least_one("the number of coordinates", dim)
    total = math.sqrt(at_least_one("the number of summands", summands)) * sigma
    b = 1 / (total**2 - 1 / 12) - 1 / (2 * total**2)
    log = math.log1p(_two_sided(2 * math.pi**2 * total**2)) + math.log1p(_two_sided(math.pi**2 / b))
    log += math.log1p(_line_chi_square(total))
    chi_square = math.expm1(min(dim * log, 10.0))
    return min(1.0, (math.sqrt(chi_square) / 2 + dim * _sum_gap(sigma, summands)) * ROUNDED_UP)


def smoothed(epsilon_at: Callable[[float], float], delta: float, distance: float) -> float:
    """Returns an ε at this δ for a mechanism whose outputs are within a distance of another's.

    If each of two neighbours' laws is within `distance` of the other mechanism's, then
    δ(ε) ≤ δ_other(ε) + (1 + e^ε) distance. A share a of δ goes to the second term, the rest to the first, whose ε is
    epsilon_at(δ − a); a grows until it is at least (1 + e^ε) distance. The ε for which that was checked is returned,
    and inf if a becomes δ, which needs a distance within 0.1 % of one that leaves no ε, or above it.

    Args:
        epsilon_at: returns an ε of the other mechanism at a δ, and no more at a larger δ.
        delta: δ.
        distance: in total variation, of all rounds together.
    """
    if non_negative("the distance", distance) == 0:
        return epsilon_at(delta)
    small = distance * (1 + math.exp(LIKELY)) <= SMALL * delta
    share, epsilon = 0.0, LIKELY if small else 0.0  # where it costs nothing, one ε is computed and not two
    while True:
        needed = distance * (1 + math.exp(epsilon)) * ROUNDED_UP if epsilon < MOST_EPSILON else math.inf
        if needed <= share:
            return epsilon
        share = needed * (1 + HEADROOM)
        left = math.nextafter(delta - share, -math.inf)
        if left <= 0:
            return math.inf
        epsilon = epsilon_at(left)


def _line_chi_square(sigma: float) -> float:
    """Returns step 1's bound of χ."""
    a = math.pow(sigma, -4)
    q = a / 36
    return a**2 * 24 / 2880**2 + a**3 * 720 / 4096 / 2835**2 + q**4 / (1 - q)


def _two_sided(x: float) -> float:
    """Bounds 2 Σ_{n≥1} e^(−xn²) for x > 0: n² ≥ 1 + 3(n − 1)."""
    return 2 * math.exp(-x) / -math.expm1(-3 * x)


def _sum_gap(sigma: float, summands: int) -> float:
    """Bounds the distance between a sum of N_Z(0, σ²) and N_Z(0, summands σ²), of one coordinate.

    P(A + B = k) for independent A ~ N_Z(0, a²), B ~ N_Z(0, b²) is e^(−k²/(2(a² + b²))) times the sum of a Gaussian of
    variance v = a²b²/(a² + b²) over a shifted lattice, which by Poisson's formula is within a factor 1 ± ρ of its mean
    over all shifts, ρ = 2 Σ_{n≥1} e^(−2π²vn²). So the masses have the ratio c(k)/E c to those of N_Z(0, a² + b²), with
    c in [1 − ρ, 1 + ρ], and the distance is E|c − E c|/(2 E c) ≤ ρ/(2(1 − ρ)). With a² = kσ², b² = σ² for
    k = 1 … summands − 1 these add up, since adding an independent B does not lengthen a distance.
    """
    k = np.arange(1, min(summands, MOST_TERMS + 1))
    x = 2 * math.pi**2 * sigma**2 * (k / (k + 1))
    rho = 2 * np.exp(-x) / -np.expm1(-3 * x)
    terms = rho / (2 * (1 - rho))
    return math.fsum(terms) + max(0, summands - 1 - MOST_TERMS) * float(terms[-1]) if summands > 1 else 0.0
