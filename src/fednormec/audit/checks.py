"""Checks of noise and cohorts as numbers: a p-value each, against dependence of any two or three draws, too.

Under the null hypothesis noise is independent standard normal and cohorts are independent coins. The laws used are
exact, or bounds (`_far`), also far out in the tails: many statistics are looked at, and the smallest p-value is
multiplied by their number (`least`), so that a check fails a right mechanism no more often than its p-value says.
"""

import math
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import numpy as np
from scipy.special import betainc, ndtr, ndtri, xlogy
from scipy.stats import binom, chi2, gamma, kstest, norm, poisson

LAGS = 12  # triples (k, k + a, k + b) with a < b up to this
SOME = 256  # rows or columns that the dearer statistics look at
STEPS, SLACK = 16, 1.02  # of a grid in a cell, and what cells of unlike numbers of steps add to chance
CELL = 2.0**-36  # two magnitudes of noise in one cell count as the same number


def least(*p_values: Any) -> float:
    """Returns the p-value of the smallest of so many; each argument a number or an array of them."""
    every = np.concatenate([np.zeros(0), *(np.ravel(p) for p in p_values)])
    return float(min(1.0, len(every) * every.min(initial=1.0)))


def two_sided(law: Any, value: Any) -> np.ndarray:
    """Returns p-values of values that must be neither too small nor too large.

    The value itself counts on both sides.
    """
    return np.asarray(np.minimum(1.0, 2 * np.minimum(law.cdf(value), law.sf(np.nextafter(value, -math.inf)))))


def levels(squares: np.ndarray, counts: np.ndarray) -> float:
    """Tests whether sums of so many squares of standard normals are what they should be."""
    return least(two_sided(chi2(counts), squares))


def shape(noise: np.ndarray) -> float:
    """Tests Kolmogorov's distance from the normal law, and how many lie beyond 2, 3 and 4."""
    values = noise.ravel()[: 10**6]
    if not values.size:
        return 1.0
    beyond = [two_sided(binom(values.size, 2 * norm.sf(at)), (abs(values) > at).sum()) for at in (2, 3, 4)]
    return least(kstest(values, "norm").pvalue, *beyond)


def magnitudes(noise: np.ndarray) -> np.ndarray:
    """Returns the magnitudes of standard normals, made standard normal.

    Noise that depends by its size alone, such as noise that comes again with other signs, shows here.
    """
    return np.asarray(np.clip(-ndtri(2 * ndtr(-abs(noise))), -8.0, 8.0))


def any_two(rows: np.ndarray) -> float:
    """Tests whether rows of standard normals (n, d) depend on each other, by the numbers and by their magnitudes.

    It looks at the largest of all cosines, the sum of inner products at every lag, and the sum of all squared cosines.
    """
    rows = rows[np.any(rows != 0, axis=1)]
    if min(rows.shape) < 2:
        return 1.0
    return least(*(p for values in (rows, magnitudes(rows)) for p in _any_two(values)))


def _any_two(rows: np.ndarray) -> Iterable[float]:
    n, d = rows.shape
    norms = np.linalg.norm(rows, axis=1)
    along = rows @ rows.T / norms[:, None]  # given the earlier row, exactly standard normal
    cosines = (along / norms)[np.triu_indices(n, 1)]
    yield _no_cosine(cosines, d)
    sums = np.array([np.trace(along, lag) / math.sqrt(n - lag) for lag in range(1, n)])
    yield least(2 * norm.sf(abs(sums)))
    pairs, total = len(cosines), float((cosines**2).sum())
    mean, variance = pairs / d, pairs * 2 * (d - 1) / (d * d * (d + 2))
    floor = max(0.0, n * n / 2 * (1 / d - 1 / n))  # more rows than dimensions cannot all be at right angles
    law = gamma((mean - floor) ** 2 / variance, scale=variance / (mean - floor))
    yield float(two_sided(law, total - floor))


def between(a: np.ndarray, b: np.ndarray) -> float:
    """Tests whether rows of one run depend on rows of another.

    It looks at the largest cosine, and at the rows of equal number together. Rows of zeros do not count.
    """
    here, there = (np.any(rows != 0, axis=1) for rows in (a, b))
    n = min(len(a), len(b))
    both = here[:n] & there[:n]
    if not both.any() or a.shape[1] < 2:
        return 1.0
    parts = []
    for one, other in ((a, b), (magnitudes(a), magnitudes(b))):
        lengths = np.linalg.norm(one, axis=1)[:, None], np.linalg.norm(other, axis=1)
        along = one @ other.T / np.maximum(lengths[0], 1e-300)
        parts.append(_no_cosine((along / np.maximum(lengths[1], 1e-300))[np.ix_(here, there)], a.shape[1]))
        parts.append(float(2 * norm.sf(abs(np.diag(along)[:n][both].sum()) / math.sqrt(both.sum()))))
    return least(*parts)


def any_three(rows: np.ndarray) -> float:
    """Tests whether the products of rows k and k + a tell something of row k + b, for all lags up to LAGS."""
    parts = []
    for a, b in combinations(range(1, min(LAGS, len(rows) - 1) + 1), 2):
        product = rows[:-b] * rows[a : len(rows) - b + a]
        lengths = np.linalg.norm(product, axis=1)
        there = lengths > 0
        along = (product * rows[b:]).sum(1)[there] / lengths[there]  # given the product, exactly standard normal
        parts.append(2 * norm.sf(abs(along.sum()) / math.sqrt(max(1, len(along)))))
    return least(*parts)


def repeated(*noise: np.ndarray, step: float | None = None) -> float:
    """Tests whether more magnitudes among all these numbers agree to eleven digits than chance brings about.

    On a grid many agree by chance: there it looks at pairs of neighbours, in cells of 16 steps. It sees repetitions if
    the noise has thousands of steps; with fewer, whole rounds that repeat show in `any_two_rounds` alone.

    Args:
        noise: rows of standard normals; zeros do not count.
        step: distance between two numbers of the grid, at most; None: there is no grid.
    """
    if step is None:
        places, cell, alike = np.concatenate([abs(part[part != 0]) for part in noise]), CELL, CELL
        places = np.floor(places / cell)
    else:
        cell = STEPS * step
        pairs = [np.floor(abs(part[:, : part.shape[1] // 2 * 2]) / cell).reshape(-1, 2) for part in noise]
        some = np.concatenate([pair[part[:, : part.shape[1] // 2 * 2].reshape(-1, 2).any(1)]
                               for pair, part in zip(pairs, noise, strict=True)])  # fmt: skip
        places, alike = some[:, 0] * 2.0**26 + some[:, 1], cell**2 / math.sqrt(math.pi)
    counts = np.unique(places, return_counts=True)[1].astype(float)
    expected = len(places) ** 2 / 2 * alike / math.sqrt(math.pi)
    return float(poisson.sf((counts * (counts - 1)).sum() / 2 - 1, expected * (1.0 if step is None else SLACK)))


def dispersion(counts: np.ndarray, n: int, p: float) -> float:
    """Tests whether counts vary as binomial ones do; 1 where there is too little to tell.

    It compares the sum of squares with a gamma distribution of the same moments.
    """
    spread = n * p * (1 - p)
    if n == 1 or counts.size < 30 or counts.size * spread < 100:
        return 1.0
    variance = 2 + (1 - 6 * p * (1 - p)) / spread  # of one squared deviation, in units of its mean
    law = gamma(counts.size / variance, scale=variance)
    return float(two_sided(law, ((counts - n * p) ** 2).sum() / spread))


def any_two_sets(rows: np.ndarray, p: float) -> float:
    """Tests whether rows of coins (n, m) have more or fewer in common than chance brings about.

    It looks at any two rows, and at all pairs at every lag together.
    """
    sizes, common = rows.sum(1), _common(rows, rows)
    first, second = np.triu_indices(len(rows), 1)
    pairs = _far(common[first, second], sizes[first], p)
    lags = [(np.trace(common, lag), sizes[:-lag].sum()) for lag in range(1, len(rows))]
    return least(least(pairs), least(*(_far(*lag, p) for lag in lags)))


def sets_between(a: np.ndarray, b: np.ndarray, p: float) -> float:
    """Tests whether cohorts of one run and those of another have more or fewer in common than chance brings about."""
    common, sizes, n = _common(a, b), a.sum(1), min(len(a), len(b))
    return least(least(_far(common, sizes[:, None], p)), _far(np.trace(common[:n, :n]), sizes[:n].sum(), p))


def any_three_sets(rows: np.ndarray, p: float) -> float:
    """Tests whether rows k and k + a of coins tell who is in row k + b, for lags up to LAGS.

    It looks at who is in both of the two rows, and at who is in one of them only.
    """
    parts = []
    for a, b in combinations(range(1, min(LAGS, len(rows) - 1) + 1), 2):
        one, other, third = rows[:-b], rows[a : len(rows) - b + a], rows[b:]
        for pair in (one & other, one ^ other):
            parts.append(_far((pair & third).sum(), pair.sum(), p))
    return least(*parts)


def any_three_columns(rows: np.ndarray, p: float) -> float:
    """Tests the same of all triples of columns."""
    columns = rows.shape[1]
    if columns < 3:
        return 1.0
    size, common = rows.sum(0), _common(rows.T, rows.T)
    parts = []
    for i in range(columns - 2):
        rest = rows[:, i + 1 :]
        both, size_both = rest & rows[:, [i]], common[i, i + 1 :]
        all_three = _common(both.T, rest.T)  # of i, j, l
        one_only = common[i + 1 :, i + 1 :] + common[i, i + 1 :] - 2 * all_three  # l with just one of i and j
        upper = np.triu_indices(len(size_both), 1)
        parts.append(_far(all_three, size_both[:, None], p)[upper])
        parts.append(_far(one_only, (size[i] + size[i + 1 :] - 2 * size_both)[:, None], p)[upper])
    return least(*parts)


def cohorts_and_noise(sent: np.ndarray, noise: np.ndarray, p: float) -> float:
    """Tests whether coins (K, M) and standard normals (K, d) go together.

    It looks at client by coordinate; along diagonals (client i, coordinate i + offset) in the same and in neighbouring
    rounds; and at the size of the cohort with all of them. Given the coins each statistic is exactly standard normal.
    """
    parts, coins = [], sent - p
    for values in (noise, magnitudes(noise)):
        for lag in range(-4, 5):
            k = len(coins) - abs(lag)
            some, later = coins[max(0, -lag) :][:k], values[max(0, lag) :][:k]
            together, spread = some.T @ later, (some**2).sum(0)
            offsets = range(1 - len(together), together.shape[1])
            sums = [np.trace(together, o) / math.sqrt(_on_diagonal(spread, together.shape[1], o)) for o in offsets]
            size = some.sum(1)
            sizes = size @ later.sum(1) / math.sqrt(max(1e-9, (size**2).sum() * later.shape[1]))
            pairs = [together / np.sqrt(spread)[:, None]] if lag == 0 else []
            parts += [least(2 * norm.sf(abs(np.asarray(z)))) for z in (sums, sizes, *pairs)]
    return least(*parts)


def _on_diagonal(spread: np.ndarray, columns: int, offset: int) -> float:
    return float(spread[max(0, -offset) : max(0, columns - offset)].sum())


def _no_cosine(cosines: np.ndarray, d: int) -> float:
    """Returns the p-value of the largest cosine of directions that are uniform in d dimensions."""
    if d < 2:
        return 1.0
    largest = float(abs(cosines).max())
    return min(1.0, cosines.size * float(betainc((d - 1) / 2, 0.5, max(0.0, 1 - largest**2))))


def _common(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Counts what any row of a and any row of b have in common; exact in float32 up to 2^24."""
    product: np.ndarray = a.astype(np.float32) @ b.astype(np.float32).T
    return product.astype(np.float64)


def _far(hits: Any, coins: Any, p: float) -> np.ndarray:
    """Bounds the probability that so many coins show so many hits or a number as far from the mean (Chernoff)."""
    n = np.maximum(coins, 1)
    rate = np.minimum(hits / n, 1.0)
    divergence = xlogy(rate, rate / p) + xlogy(1 - rate, (1 - rate) / (1 - p))
    return np.where(coins > 0, np.minimum(1.0, 2 * np.exp(-coins * divergence)), 1.0)
