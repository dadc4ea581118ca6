"""Draws of the discrete Gaussian: the law, exactly, whatever floating point decides and whatever it leaves open."""

import math
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fednormec.core.discrete import LEAST, MOST, Uniform, _exp_bounds, discrete_gaussian
from fednormec.core.randomness import SecureSource, generator, words_of
from fednormec.errors import UserError

LEVEL = 1e-6  # one false alarm in a million
WIDE = 0.1  # of the zone that floating point leaves open: a third of all draws need exact arithmetic


def drawn(sigma, size, seed=0, **more):
    return discrete_gaussian(words_of(generator(seed, "noise")), sigma, size, **more)


def masses(sigma, reach):
    """The exact masses of −reach … reach, and of all that is beyond."""
    k = np.arange(-reach, reach + 1)
    weights = np.exp(-(k**2) / (2 * sigma**2))
    beyond = 2 * np.exp(-(np.arange(reach + 1, math.ceil(20 * sigma)) ** 2) / (2 * sigma**2)).sum()
    return k, weights / (weights.sum() + beyond), beyond / (weights.sum() + beyond)


def p_value(draws, sigma):
    """Chi-square against the exact masses; what is expected less than 10 times is counted together."""
    reach = max(1, int(stats.norm.isf(10 / len(draws)) * sigma))
    k, mass, beyond = masses(sigma, reach)
    while len(draws) * mass[0] < 10:
        k, mass, beyond = k[1:-1], mass[1:-1], beyond + 2 * mass[0]
    counts = np.bincount(np.clip(draws, k[0] - 1, k[-1] + 1) - k[0] + 1, minlength=len(k) + 2)
    observed = np.append(counts[1:-1], counts[0] + counts[-1])
    return stats.chisquare(observed, len(draws) * np.append(mass, beyond)).pvalue


@pytest.mark.parametrize("sigma", [2.0, 2.05, 2.9, 3.7, 4.0, 16.0, 22.7, 64.0])
def test_the_masses_are_those_of_the_law(sigma):
    draws = drawn(sigma, 500_000)
    assert draws.dtype == np.int64 and p_value(draws, sigma) > LEVEL


@pytest.mark.parametrize("factor", [2 / 3, 0.97, 1.03, 3 / 2])
def test_another_sigma_is_told_apart(factor):
    draws = drawn(16.0 * factor, 200_000)
    assert p_value(draws, 16.0 * factor) > LEVEL > p_value(draws, 16.0)


@pytest.mark.parametrize("sigma", [2.0**16 + 0.3, 2.0**40])
def test_a_large_sigma_is_next_to_the_continuous_law(sigma):
    """At these σ the distribution functions differ by less than 1e-5, which a test of 200,000 draws cannot see."""
    draws = drawn(sigma, 200_000)
    assert stats.kstest(draws / sigma, "norm").pvalue > LEVEL
    assert stats.kstest(draws / sigma, "norm", args=(0, 1.03)).pvalue < LEVEL
    assert abs(draws.mean()) < stats.norm.isf(LEVEL / 2) * sigma / math.sqrt(len(draws))


def test_all_low_bits_of_a_large_sigma_are_coins():
    draws = drawn(2.0**40, 200_000)
    for bit in range(36):
        assert stats.binomtest(int((draws >> bit & 1).sum()), len(draws)).pvalue > LEVEL


@pytest.mark.parametrize("sigma", [2.0, 3.7, 64.0])
def test_the_tails_are_as_heavy_as_they_should_be(sigma):
    draws = drawn(sigma, 500_000, seed=1)
    for deviations in (3, 4):
        _, _, beyond = masses(sigma, math.ceil(deviations * sigma) - 1)
        found = int((np.abs(draws) >= deviations * sigma).sum())
        assert stats.binomtest(found, len(draws), beyond).pvalue > LEVEL
        assert found > 10


@pytest.mark.parametrize("sigma", [2.0, 3.7, 16.0])
def test_zero_is_no_more_frequent_than_it_should_be_and_signs_are_equal(sigma):
    draws = drawn(sigma, 200_000, seed=2)
    _, zero, _ = masses(sigma, 0)
    assert stats.binomtest(int((draws == 0).sum()), len(draws), zero[0]).pvalue > LEVEL
    assert stats.binomtest(int((draws > 0).sum()), int((draws != 0).sum())).pvalue > LEVEL
    assert abs(draws.mean()) < stats.norm.isf(LEVEL / 2) * sigma / math.sqrt(len(draws))


@pytest.mark.parametrize("lag", [1, 2, 3, 7])
def test_neighbours_are_independent(lag):
    draws = drawn(3.7, 200_000, seed=3)
    table = np.zeros((9, 9))
    np.add.at(table, (np.clip(draws[:-lag], -4, 4) + 4, np.clip(draws[lag:], -4, 4) + 4), 1)
    assert stats.chi2_contingency(table).pvalue > LEVEL


@pytest.mark.parametrize("sigma", [2.0, 3.7, 11.0, 2.0**16 + 0.3])
def test_exact_arithmetic_decides_as_floating_point_does(sigma):
    """64 bits nearly always decide, also what is left open here: so the same words are drawn, and the same numbers."""
    assert np.array_equal(drawn(sigma, 3000, undecided=WIDE), drawn(sigma, 3000))


def test_the_masses_are_those_of_the_law_where_exact_arithmetic_decides():
    assert p_value(drawn(3.7, 10_000, undecided=WIDE), 3.7) > LEVEL


def test_the_zone_decides_enough_for_a_fault_in_it_to_show(monkeypatch):
    monkeypatch.setattr(Uniform, "below_exp", lambda self, x: x == 0)
    assert p_value(drawn(3.7, 10_000, undecided=WIDE), 3.7) < LEVEL
    assert np.array_equal(drawn(3.7, 10_000, undecided=0.0), drawn(3.7, 10_000))


@pytest.mark.parametrize("sigma", [2.0, 2.05, 2.7, 2.0 * math.sqrt(2), 2.9, 3.99, 33.0, 2.0**16 + 0.3])
def test_no_acceptance_is_asked_to_be_above_one(sigma, monkeypatch):
    """A negative exponent would be one: the law would then lack mass about zero."""
    asked, decide = [], Uniform.below_exp
    monkeypatch.setattr(Uniform, "below_exp", lambda self, x: asked.append(x) or decide(self, x))
    drawn(sigma, 3000, undecided=WIDE)
    assert len(asked) > 1000 and min(asked) >= 0


def test_a_zone_of_nothing_decides_the_same():
    assert np.array_equal(drawn(5.0, 20_000, undecided=2.0**-45), drawn(5.0, 20_000))


def stream(*first):
    """Words that begin as given, and are random after that."""
    left, more = list(first), words_of(generator(9, "noise"))
    return lambda size: np.array([left.pop(0) if left else more(1)[0] for _ in range(size)], np.uint64)


MP_DIGITS = 400


def word_and_next(x):
    """The first 128 bits of e^(−x), in two words."""
    with mp.workdps(MP_DIGITS):
        number = int(mp.floor(mp.exp(-mp.mpf(x.numerator) / x.denominator) * mp.mpf(2) ** 128))
    return number >> 64, number & (2**64 - 1)


@given(st.fractions(Fraction(1, 10**6), 40, max_denominator=10**9))
def test_more_bits_decide_what_64_leave_open(x):
    word, following = word_and_next(x)
    assert Uniform(word, stream(0)).below_exp(x) or following == 0
    assert not Uniform(word, stream(2**64 - 1)).below_exp(x) or following == 2**64 - 1
    if 0 < word < 2**64 - 1:
        assert Uniform(word - 1, stream()).below_exp(x)
        assert not Uniform(word + 1, stream()).below_exp(x)


@given(st.fractions(Fraction(1, 10**6), 40, max_denominator=10**9), st.integers(-1, 1))
def test_bits_that_agree_with_the_exponential_for_128_decide_by_the_next(x, beside):
    word, following = word_and_next(x)
    if 0 < following < 2**64 - 1:
        low, high = (Uniform(word, stream(following + beside, last)).below_exp(x) for last in (0, 2**64 - 1))
        assert (low, high) == {-1: (True, True), 0: (True, False), 1: (False, False)}[beside]


@settings(max_examples=30)
@given(st.integers(0, 2**64 - 1), st.fractions(0, 2000, max_denominator=10**6))
def test_a_uniform_number_is_compared_as_mpmath_does(word, x):
    following = generator(word % 1000, "noise").integers(0, 2**63, 15)
    number = Fraction(word, 2**64) + sum(Fraction(int(w), 2 ** (64 * i)) for i, w in enumerate(following, start=2))
    with mp.workdps(MP_DIGITS):
        below = mp.mpf(number.numerator) / number.denominator < mp.exp(-mp.mpf(x.numerator) / x.denominator)
    assert Uniform(word, stream(*map(int, following))).below_exp(x) == below


@given(st.fractions(Fraction(1, 10**6), 1024, max_denominator=10**9), st.integers(10, 60))
def test_bounds_of_the_exponential_enclose_it(x, digits):
    least, most = _exp_bounds(x, digits)
    with mp.workdps(MP_DIGITS):
        true = mp.exp(-mp.mpf(x.numerator) / x.denominator)
        assert least.numerator < true * least.denominator and true * most.denominator < most.numerator
    assert most - least <= 2 * (x + 2) * most / 10 ** (digits - 1)


def test_a_uniform_number_remembers_the_bits_it_has_drawn():
    """One number is compared with e^(−1), e^(−2), …: below the second means below the first."""
    word, _ = word_and_next(Fraction(2))
    u = Uniform(word, stream(0))
    assert u.below_exp(Fraction(2)) and u.below_exp(Fraction(1)) and not u.below_exp(Fraction(3))
    assert u.below_exp(Fraction(2)), "no word is left that would be 0"


def test_the_number_of_draws_is_what_was_asked_for():
    for size in (0, 1, 2, 17, 20_000, 50_001):
        assert drawn(2.0, size).shape == (size,)


def test_draws_of_the_system_s_source_have_the_law_and_do_not_repeat():
    words = words_of(SecureSource())
    first, second = discrete_gaussian(words, 8.0, 50_000), discrete_gaussian(words, 8.0, 50_000)
    assert p_value(first, 8.0) > LEVEL < p_value(second, 8.0)
    assert abs(np.corrcoef(first, second)[0, 1]) < stats.norm.isf(LEVEL / 2) / math.sqrt(len(first))


def test_the_draws_do_not_change():
    assert drawn(2.0**16, 4, seed=7).tolist() == [-132111, -54589, -30799, 2585]


def test_a_source_of_zeros_is_noticed():
    with pytest.raises(RuntimeError, match="not random"):
        discrete_gaussian(lambda size: np.zeros(size, np.uint64), 2.0, 1)


@pytest.mark.parametrize("sigma", [math.nan, -3.0, 0.0, LEAST - 1e-9, MOST * 1.001, math.inf])
def test_a_sigma_outside_of_the_range_is_a_user_s_mistake(sigma):
    with pytest.raises(UserError, match="from 2 to 2\\*\\*40"):
        drawn(sigma, 1)


def test_words_are_full_and_come_from_known_sources_only():
    for source in (generator(3, "noise"), SecureSource()):
        words = words_of(source)(100_000)
        assert words.dtype == np.uint64 and words.shape == (100_000,)
        for bit in range(64):
            ones = int((words >> np.uint64(bit) & np.uint64(1)).sum())
            assert stats.binomtest(ones, len(words)).pvalue > LEVEL
    for other in (np.random.Generator(np.random.MT19937(1)), np.random.default_rng(1), object()):
        with pytest.raises(TypeError, match="Philox"):
            words_of(other)


def test_words_are_the_same_that_a_generator_makes_its_numbers_of():
    words = words_of(generator(3, "noise"))(5)
    assert np.array_equal((words >> np.uint64(11)) * 2.0**-53, generator(3, "noise").random(5))


@pytest.mark.long
@pytest.mark.parametrize("sigma", [2.0, 3.7, 2.0**16 + 0.3])
def test_opendp_draws_the_same_law(sigma):
    import opendp.prelude as dp

    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T=int)), dp.l2_distance(T=float)
    theirs = np.array(dp.m.make_gaussian(*space, scale=sigma)([0] * 100_000))
    ours = drawn(sigma, 100_000)
    if sigma > 100:
        assert stats.ks_2samp(ours, theirs).pvalue > LEVEL
    else:
        low, high = -math.ceil(3 * sigma), math.ceil(3 * sigma)
        table = [np.bincount(np.clip(x, low, high) - low, minlength=high - low + 1) for x in (ours, theirs)]
        assert stats.chi2_contingency(table).pvalue > LEVEL
