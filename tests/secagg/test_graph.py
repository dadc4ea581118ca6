"""Neighbours on a ring: the bound of what can fail, and the check that nobody can be cut off."""

import itertools
from fractions import Fraction
from math import comb, inf, log2

import numpy as np
import pytest
from scipy.stats import hypergeom

from fednormec.errors import UserError
from fednormec.secagg.graph import (
    ALL_PAIRS,
    Neighbourhood,
    holds_together,
    neighbourhood,
    neighbours_of,
    ring_order,
    signatures_needed,
)


def tail(n: int, t: int, places: int, most: int) -> Fraction:
    return sum((Fraction(comb(t, i) * comb(n - t, places - i), comb(n, places)) for i in range(most + 1)), Fraction(0))


def bound(n: int, t: int, colluders: int, k: int, s: int) -> Fraction:
    return n * tail(n, t, k + 1, s - 1) + comb(n, 2) * tail(n, t, k, colluders)


@pytest.mark.parametrize(
    ("n", "floor", "colluders", "k"), [(12, 9, 2, 6), (30, 21, 0, 8), (40, 35, 5, 20), (201, 2, 9, 50)]
)
def test_the_bound_is_the_one_of_exact_fractions(n: int, floor: int, colluders: int, k: int) -> None:
    found = neighbourhood(n, floor, colluders, k)
    t = signatures_needed(n, floor, colluders)
    assert found.neighbours == k and found.shares_needed == max(colluders, k // 3) + 1
    exact = bound(n, t, colluders, k, found.shares_needed)
    assert found.log2_failure == pytest.approx(min(log2(exact), 0.0) if exact else -inf, abs=2e-6)


@pytest.mark.parametrize("n", [201, 500, 1000, 5000])
@pytest.mark.parametrize("colluders", [0, 20])
@pytest.mark.parametrize("part", [0.5, 0.7, 0.9])
def test_failing_has_probability_two_to_the_minus_forty(n: int, colluders: int, part: float) -> None:
    floor = round(part * n)
    k, s, log2_failure = neighbourhood(n, floor, colluders)
    assert k < n - 1 and s > colluders and s >= k // 3 + 1
    t = signatures_needed(n, floor, colluders)
    lonely = n * hypergeom.cdf(s - 1, n, t, k + 1)
    cut = comb(n, 2) * hypergeom.cdf(colluders, n, t, k)
    assert log2_failure <= -40 and lonely + cut == pytest.approx(2**log2_failure, rel=1e-4)
    below = max(colluders, (k - 2) // 3) + 1
    assert n * hypergeom.cdf(below - 1, n, t, k - 1) + comb(n, 2) * hypergeom.cdf(colluders, n, t, k - 2) > 2**-40


def test_all_pairs_in_small_cohorts_and_where_no_ring_does() -> None:
    assert neighbourhood(ALL_PAIRS, 140, 5) == Neighbourhood(199, 140, -inf)
    assert neighbourhood(201, 200, 199) == Neighbourhood(200, 201, -inf)
    assert neighbourhood(40, 30, 3, 39) == neighbourhood(40, 30, 3, 1000) == Neighbourhood(39, 30, -inf)


@pytest.mark.parametrize("neighbours", [1, 7, -2, 4])
def test_numbers_of_neighbours_that_are_of_no_use(neighbours: int) -> None:
    with pytest.raises(UserError, match="even, at least 2 and no fewer than the 5 colluders"):
        neighbourhood(40, 30, 5, neighbours)


@pytest.mark.parametrize(("n", "floor", "colluders", "k"), [(14, 10, 1, 6), (24, 16, 2, 8), (40, 27, 3, 14)])
def test_attempts_fail_no_more_often_than_the_bound_says(n: int, floor: int, colluders: int, k: int) -> None:
    s, log2_failure = neighbourhood(n, floor, colluders, k)[1:]
    t, drawn, tries = signatures_needed(n, floor, colluders), np.random.default_rng(5), 4000
    lonely = cut = 0
    for _ in range(tries):
        there = np.zeros(n, bool)
        there[drawn.choice(n, t, replace=False)] = True
        around = sum(np.roll(there, step).astype(int) for step in range(-(k // 2), k // 2 + 1))
        lonely += bool((around < s).any())
        cut += not holds_together(range(n), k, np.flatnonzero(there).tolist(), colluders)
    most = 2**log2_failure
    assert lonely + cut <= tries * most + 4 * np.sqrt(tries * most)
    assert most < 1 and lonely >= tries * float(tail(n, t, k + 1, s - 1)) / 2  # one member alone fails as often


def connected(ring: range, k: int, left: set[int]) -> bool:
    if not left:
        return True
    reached, edge = set[int](), [min(left)]
    while edge:
        one = edge.pop()
        reached.add(one)
        edge += [
            other for other in left - reached if min((one - other) % len(ring), (other - one) % len(ring)) <= k / 2
        ]
    return reached == left


@pytest.mark.long
@pytest.mark.parametrize(("places", "k"), [(3, 2), (5, 2), (7, 2), (8, 2), (6, 4), (8, 4), (9, 4), (9, 6)])
def test_the_ring_holds_together_exactly_if_no_colluders_can_cut_it(places: int, k: int) -> None:
    ring, seen = range(places), set()
    for size in range(places + 1):
        for members in itertools.combinations(ring, size):
            for colluders in (0, 1, 2, 3):
                sets = itertools.combinations(members, min(colluders, size))
                fewer = (part for most in range(min(colluders, size)) for part in itertools.combinations(members, most))
                right = all(connected(ring, k, set(members) - set(bad)) for bad in itertools.chain(sets, fewer))
                assert holds_together(ring, k, members, colluders) == right, (members, colluders)
                seen.add(right)
    assert seen == ({True} if places <= k + 1 else {True, False})


def test_neighbours_see_each_other() -> None:
    for n, k in ((5, 4), (6, 4), (12, 2), (12, 6), (13, 11), (9, 20)):
        ring = ring_order(b"any", range(100, 100 + n))
        near = {one: neighbours_of(one, ring, k) for one in ring}
        assert all(one in near[other] for one in ring for other in near[one])
        assert (
            all(len(set(some)) == min(k - k % 2, n - 1) and some == tuple(sorted(some)) for some in near.values())
            or k % 2
        )
        assert ring_order(b"any", reversed(range(100, 100 + n))) == ring != ring_order(b"other", ring)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 10, 31, 200])
def test_two_sets_of_signatures_have_an_honest_one_in_common(n: int) -> None:
    for floor in range(2, n + 1):
        for colluders in {0, floor // 2, floor - 1}:
            t = signatures_needed(n, floor, colluders)
            assert floor <= t <= n and 2 * t > n + colluders and 3 * t > 2 * n
