"""The tests of noise and cohorts accept what is right, whatever its size, and reject each kind of dependence."""

import numpy as np
import pytest
from scipy import stats

from fednormec.audit import checks
from fednormec.audit.evidence import LEVEL

NOISE = {
    "any_two": lambda rng, n, d: checks.any_two(rng.standard_normal((n, d))),
    "any_three": lambda rng, n, d: checks.any_three(rng.standard_normal((n, d))),
    "between": lambda rng, n, d: checks.between(rng.standard_normal((n, d)), rng.standard_normal((9, d))),
    "repeated": lambda rng, n, d: checks.repeated(rng.standard_normal((40 * n, d))),
    "shape": lambda rng, n, d: checks.shape(rng.standard_normal((n, d))),
    "levels": lambda rng, n, d: checks.levels((rng.standard_normal((n, d)) ** 2).sum(1), d),
    "cohorts_and_noise": lambda rng, n, d: checks.cohorts_and_noise(
        rng.random((n, 7)) < 0.06, rng.standard_normal((n, d)), 0.06
    ),
}
COINS = {
    "any_two_sets": checks.any_two_sets,
    "any_three_sets": checks.any_three_sets,
    "any_three_columns": checks.any_three_columns,
    "sets_between": lambda rows, p: checks.sets_between(rows[:9], rows[9:], p),
}


@pytest.mark.long
@pytest.mark.parametrize("name", NOISE)
@pytest.mark.parametrize(("n", "d"), [(30, 12), (12, 60), (25, 3)])
def test_right_noise_passes(name, n, d):
    values = np.array([NOISE[name](np.random.default_rng(seed), n, d) for seed in range(150)])
    assert values.min() > 1e-5
    assert (values < 0.02).mean() < 0.08  # twelve of 150, where three are expected


@pytest.mark.long
@pytest.mark.parametrize("name", COINS)
@pytest.mark.parametrize(("n", "m", "p"), [(30, 12, 0.25), (20, 40, 0.03), (12, 10, 0.9)])
def test_right_coins_pass(name, n, m, p):
    values = np.array([COINS[name](np.random.default_rng(seed).random((n, m)) < p, p) for seed in range(150)])
    assert values.min() > 1e-5
    assert (values < 0.02).mean() < 0.08  # twelve of 150, where three are expected


def test_magnitudes_of_normals_are_normal():
    z = np.random.default_rng(0).standard_normal(10**5)
    assert stats.kstest(checks.magnitudes(z), "norm").pvalue > 0.01
    order = np.argsort(abs(z))
    assert (np.diff(checks.magnitudes(z)[order]) >= 0).all()
    assert np.isfinite(checks.magnitudes(np.array([0.0, 50.0, 1e-300]))).all()


def test_a_cosine_has_its_exact_law():
    rng = np.random.default_rng(0)
    one, other = rng.standard_normal((2, 4000, 5))
    cosines = (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
    values = [checks._no_cosine(np.array([c]), 5) for c in cosines]
    assert stats.kstest(values, "uniform").pvalue > 0.01


def test_the_bound_on_coins_is_one():
    for n, p in ((10, 0.25), (200, 0.03), (50, 0.9)):
        hits = np.arange(n + 1)
        exact = np.minimum(stats.binom.cdf(hits, n, p), stats.binom.sf(hits - 1, n, p))
        assert (checks._far(hits, np.full(n + 1, n), p) >= exact).all()
    assert checks._far(0, 0, 0.5) == 1


@pytest.mark.parametrize("lag", [1, 2, 57])
@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_noise_that_comes_again_is_found(lag, scale):
    rows = np.random.default_rng(0).standard_normal((100, 40))
    rows[60] = scale * rows[60 - lag]
    assert checks.any_two(rows) < LEVEL and checks.repeated(rows) < LEVEL
    assert checks.between(rows[:60], rows[60:]) < LEVEL


def test_dependence_that_no_correlation_shows_is_found():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((200, 60))
    flipped = rows.copy()
    flipped[1::2] = abs(flipped[::2]) * rng.choice([-1, 1], (100, 60))
    assert checks.any_two(flipped) < LEVEL
    of_three = rows.copy()
    of_three[2::3] = abs(of_three[2::3]) * np.sign(of_three[1::3] * of_three[::3])[: len(of_three[2::3])]
    assert checks.any_two(of_three) > 1e-4 and checks.any_three(of_three) < LEVEL


def test_weak_dependence_of_all_rounds_is_found():
    rng = np.random.default_rng(0)
    rows = np.sqrt(0.95) * rng.standard_normal((200, 60)) + np.sqrt(0.05) * rng.standard_normal(60)
    assert checks.any_two(rows) < LEVEL


@pytest.mark.parametrize("p", [0.25, 0.4])
def test_coins_of_which_three_depend_and_two_do_not_are_found(p):
    u = np.random.default_rng(0).random((1500, 60))
    u[2::3] = (u[::3] + u[1::3]) % 1
    rows = u < p
    assert checks.any_two_sets(rows[:500], p) > 1e-4
    assert checks.any_three_sets(rows, p) < LEVEL and checks.any_three_columns(rows.T[:, :12], p) > 1e-4
    u = np.random.default_rng(1).random((1500, 40))
    u[:, 5] = (u[:, 30] + u[:, 17]) % 1
    u[:, 6] = (u[:, 31] + u[:, 2]) % 1
    u[:, 7] = (u[:, 1] + u[:, 3]) % 1
    assert checks.any_three_columns(np.concatenate([u, u[::-1]]) < p, p) < LEVEL


def test_coins_from_the_words_that_make_the_noise_are_found():
    keys = range(500)
    noise = np.array([np.random.Generator(np.random.Philox(key=k)).standard_normal(40) for k in keys])
    u = np.array([np.random.Generator(np.random.Philox(key=k)).random(60) for k in keys])
    assert checks.cohorts_and_noise(u < 1 / 16, noise, 1 / 16) < LEVEL
    assert checks.cohorts_and_noise(u < 0.3, noise, 0.3) < LEVEL
    assert checks.cohorts_and_noise(u[:, ::-1] < 1 / 16, noise[:, ::-1], 1 / 16) < LEVEL
    others = np.array([np.random.Generator(np.random.Philox(key=k)).random(60) for k in range(500, 1000)])
    assert checks.cohorts_and_noise(others < 1 / 16, noise, 1 / 16) > 1e-4


def test_tails_that_are_cut_off_are_found():
    z = np.random.default_rng(0).standard_normal(10**5)
    assert checks.shape(z) > 1e-4
    assert checks.shape(np.clip(z, -2.9, 2.9)) < LEVEL
