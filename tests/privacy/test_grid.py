"""Noise on a grid: the distance to rounded continuous noise, and ε, against exact enumeration of the laws."""

import math
from functools import cache

import mpmath as mp
import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_discrete_gaussian_mechanism
from hypothesis import assume, given
from hypothesis import strategies as st

import fednormec as fn
from fednormec.errors import UserError
from fednormec.privacy.accounting import NEXT_TO_NOTHING, Accountant, Open, epsilon, gaussian_log_delta
from fednormec.privacy.grid import HEADROOM, MOST_TERMS, _sum_gap, gap, smoothed

SIGMAS = (2, 3, 4, 8, 16, 32, 64)
DIGITS = 40  # and masses to 13 σ, beyond which there are 1e-37


def discrete(variance, reach):
    """Masses of N_Z(0, variance) at −reach … reach."""
    weights = [mp.exp(-mp.mpf(k * k) / (2 * variance)) for k in range(reach + 1)]
    total = weights[0] + 2 * mp.fsum(weights[1:])
    return [w / total for w in (*weights[:0:-1], *weights)]


def rounded(variance, reach):
    """Masses of round(N(0, variance)) at −reach … reach, where what is beyond counts to the ends."""
    above = [mp.erfc((k - mp.mpf(0.5)) / mp.sqrt(2 * variance)) / 2 for k in range(1, reach + 1)]
    right = [a - b for a, b in zip(above, [*above[1:], mp.mpf(0)], strict=True)]
    return [*right[::-1], 1 - 2 * above[0], *right]


def total_variation(one, other):
    return mp.fsum(abs(a - b) for a, b in zip(one, other, strict=True)) / 2


@cache
def laws(sigma):
    with mp.workdps(DIGITS):
        variance, reach = mp.mpf(sigma) ** 2, math.ceil(13 * sigma)
        return discrete(variance, reach), rounded(variance - mp.mpf(1) / 12, reach)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_one_coordinate_is_as_near_as_is_said(sigma):
    """A chi-square distance is that much larger than the total variation: √24/E|He₄| = 1.749 for the leading term."""
    with mp.workdps(DIGITS):
        noise, other = laws(sigma)
        true = float(total_variation(noise, other))
        chi_square = float(mp.fsum((b - a) ** 2 / a for a, b in zip(noise, other, strict=True)))
    assert true <= gap(sigma, 1) <= 1.78 * true
    assert math.sqrt(chi_square) / 2 <= gap(sigma, 1) <= 1.0005 * math.sqrt(chi_square) / 2
    if sigma > 3:
        assert gap(sigma, 1) / true == pytest.approx(1.749, abs=0.015)


def test_the_leading_term_s_factor():
    """E|He₄| in closed form: −He₃ φ is the integral of He₄ φ, whose zeros are ±a, ±b."""
    a, b = math.sqrt(3 - math.sqrt(6)), math.sqrt(3 + math.sqrt(6))
    at_a, at_b = ((x**3 - 3 * x) * math.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) for x in (a, b))
    assert math.sqrt(24) / (4 * (at_b - at_a)) == pytest.approx(1.7493, abs=1e-4)


def test_the_variance_is_one_twelfth_less():
    """Any other variance is further away: the lemma is about the right one."""
    with mp.workdps(DIGITS):
        noise, _ = laws(4)
        for twelfths in (0, 0.9, 1.1, 2):
            other = rounded(mp.mpf(16) - mp.mpf(twelfths) / 12, 52)
            assert total_variation(noise, other) > 10 * gap(4, 1)


@pytest.mark.parametrize("dim", [2, 3])
def test_several_coordinates_are_as_near_as_is_said(dim):
    noise, other = (np.array([float(mass) for mass in law]) for law in laws(2))
    together, others = noise, other
    for _ in range(dim - 1):
        together, others = np.multiply.outer(together, noise), np.multiply.outer(others, other)
    true = np.abs(together - others).sum() / 2
    assert true <= gap(2, dim) <= 1.749 * true
    assert gap(2, dim) == pytest.approx(math.sqrt(dim) * gap(2, 1), rel=1e-6)


def test_many_coordinates_have_the_chi_square_of_a_product():
    noise, other = laws(2)
    with mp.workdps(DIGITS):
        each = mp.fsum(b**2 / a for a, b in zip(noise, other, strict=True))
        for dim in (100, 25_000, 10**8):
            exact = float(mp.sqrt(each**dim - 1) / 2)
            assert exact <= gap(2, dim) <= 1.001 * exact


@pytest.mark.parametrize("sigma", [2, 3])
def test_an_integer_added_to_both_changes_nothing(sigma):
    """P(round(x + k) = j) for an integer k is P(round x = j − k): the same enumeration, about k."""
    s, reach = math.sqrt(sigma**2 - 1 / 12), 13 * sigma
    with mp.workdps(DIGITS):
        shifted = [mp.ncdf((j + 0.5 - 5) / s) - mp.ncdf((j - 0.5 - 5) / s) for j in range(5 - reach, 6 + reach)]
        assert float(total_variation(shifted, laws(sigma)[1])) < 1e-14  # s is a float
        assert float(total_variation(shifted, laws(sigma)[0])) < gap(sigma, 1)


@pytest.mark.parametrize("sigma", [0.8, 1.0, 1.3, 2.0, 3.0])
def test_a_sum_is_as_near_to_one_law_as_is_said(sigma):
    with mp.workdps(DIGITS + 20):
        variance, reach = mp.mpf(sigma) ** 2, math.ceil(16 * sigma)
        one = total = discrete(variance, reach)
        for summands in (2, 3):
            total = [
                mp.fdot((total[i], one[j - i]) for i in range(max(0, j - len(one) + 1), min(len(total), j + 1)))
                for j in range(len(total) + len(one) - 1)
            ]
            true = float(total_variation(total, discrete(summands * variance, summands * reach)))
            assert true <= _sum_gap(sigma, summands)
            if summands == 2:
                assert _sum_gap(sigma, summands) <= 1.004 * true


@pytest.mark.parametrize("summands", [2, 3])
def test_a_sum_is_as_near_to_rounded_noise_as_is_said(summands):
    with mp.workdps(DIGITS):
        noise = total = np.array(laws(2)[0])
        for _ in range(summands - 1):
            total = np.convolve(total, noise)
        other = rounded(mp.mpf(4 * summands) - mp.mpf(1) / 12, len(total) // 2)
        true = float(total_variation(total, other))
    assert true <= gap(2, 1, summands) <= 1.78 * true
    assert gap(2, 1, summands) == pytest.approx(gap(2 * math.sqrt(summands), 1), rel=1e-6)


def test_a_sum_of_very_many_is_bounded_without_a_list_of_them():
    sigma, exact = 0.7, 0.0
    for k in range(1, 5 * MOST_TERMS):
        x = 2 * math.pi**2 * sigma**2 * k / (k + 1)
        rho = 2 * sum(math.exp(-x * n * n) for n in range(1, 6))
        exact += rho / (2 * (1 - rho))
    assert exact <= _sum_gap(sigma, 5 * MOST_TERMS) <= 1.02 * exact
    assert _sum_gap(2.0**16, 10**12) == 0 == _sum_gap(0.7, 1)


@given(st.floats(2, 1e6), st.integers(1, 10**6), st.integers(1, 1000))
def test_the_distance_follows_its_leading_term(sigma, dim, summands):
    found, leading = gap(sigma, dim, summands), math.sqrt(6 * dim) / (2880 * sigma**4 * summands**2)
    assert leading <= found <= 1
    if leading < 0.01:
        assert found <= 1.001 * leading + 1.01e-17 * dim * summands
    assert found <= gap(sigma, dim + 1, summands)
    assert gap(1.001 * sigma, dim, summands) <= found


def test_figures_of_the_docs():
    assert gap(2.0**16, 25_000) == pytest.approx(7.2901e-21, rel=1e-4)
    assert gap(2.0**16, 25_000, 1000) < gap(2.0**16, 25_000)
    assert gap(1e30, 10**9, 10**9) > 0


@pytest.mark.parametrize("sigma", [math.nan, 0.0, -2.0, 1.999, 1e31, math.inf])
def test_a_sigma_outside_of_the_range_is_a_user_s_mistake(sigma):
    with pytest.raises(UserError, match="from 2 to 1e30"):
        gap(sigma, 1)


# The claim: δ(ε) of the discrete mechanism, enumerated, against that of the continuous one and the distance.


@cache
def masses(sigma, rounds):
    """Masses of the sum of so many noises; their sum is all that the privacy loss of integer shifts depends on."""
    k = np.arange(-14 * sigma, 14 * sigma + 1)
    one = np.exp(-(k**2) / (2 * sigma**2))
    one /= one.sum()
    total = one
    for _ in range(rounds - 1):
        total = np.convolve(total, one)
    return total


def exact_delta(sigma, shift, rounds, eps):
    """E max(0, 1 − e^(ε − loss)), loss = Σ ((k_i − shift)² − k_i²)/(2σ²) at the noises k_i."""
    mass = masses(sigma, rounds)
    k = np.arange(len(mass)) - len(mass) // 2
    loss = (rounds * shift**2 - 2 * shift * k) / (2 * sigma**2)
    return float(mass @ np.maximum(0, -np.expm1(np.minimum(eps - loss, 0))))


def exact_epsilon(sigma, shift, rounds, delta):
    low, high = 0.0, 1000.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if exact_delta(sigma, shift, rounds, middle) <= delta else (middle, high)
    return high


def continuous_delta(sigma, shift, rounds, eps):
    return math.exp(gaussian_log_delta(eps, shift * math.sqrt(rounds) / math.sqrt(sigma**2 - 1 / 12)))


CASES = [(sigma, shift) for sigma in (2, 3, 4, 8, 16, 64) for shift in sorted({1, 2, sigma // 2, sigma})]


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize(("sigma", "shift"), CASES)
def test_no_delta_is_above_what_is_claimed(sigma, shift, rounds):
    for eps in (0.1, 0.5, 1.0, 2.0, 4.0):
        exact = exact_delta(sigma, shift, rounds, eps)
        from_continuous = continuous_delta(sigma, shift, rounds, eps)
        assert exact <= from_continuous + rounds * (1 + math.exp(eps)) * gap(sigma, 1)
        if sigma >= 16 and exact > 1e-6:
            assert from_continuous <= 1.01 * exact, "and not far above"


def test_a_variance_that_is_too_small_by_a_tenth_would_be_seen():
    """The test above can fail."""
    exact, claimed = exact_delta(64, 64, 1, 4.0), math.exp(gaussian_log_delta(4.0, 1 / math.sqrt(1.1)))
    assert exact > claimed + (1 + math.exp(4.0)) * gap(64, 1)


def claimed_epsilon(sigma, shift, rounds, delta):
    release = Open((1.0,), (shift / math.sqrt(sigma**2 - 1 / 12),))
    return smoothed(lambda left: epsilon(release, rounds, left), delta, rounds * gap(sigma, 1))


@pytest.mark.parametrize(("sigma", "shift", "rounds", "delta"), [
    (2, 1, 1, 1e-2), (4, 1, 1, 1e-3), (8, 1, 1, 1e-4), (16, 2, 5, 1e-4), (64, 1, 1, 1e-5), (64, 8, 5, 1e-5),
    (64, 64, 1, 1e-5), (128, 16, 10, 1e-6), (128, 128, 1, 1e-6),
])  # fmt: skip
def test_epsilon_is_at_least_the_exact_one_and_near_it(sigma, shift, rounds, delta):
    exact = exact_epsilon(sigma, shift, rounds, delta)
    claimed = claimed_epsilon(sigma, shift, rounds, delta)
    assert exact <= claimed <= {2: 1.035, 4: 1.02}.get(sigma, 1.005) * exact


@pytest.mark.long
@pytest.mark.parametrize(("sigma", "shift", "rounds", "delta"), [
    (2, 1, 1, 1e-2), (4, 1, 1, 1e-3), (8, 1, 1, 1e-4), (16, 2, 5, 1e-4), (64, 8, 10, 1e-5), (64, 64, 1, 1e-5),
])  # fmt: skip
def test_epsilon_agrees_with_dp_accounting_s_discrete_gaussian(sigma, shift, rounds, delta):
    """Theirs is rounded down and up, on a grid of their own."""
    low, high = (
        from_discrete_gaussian_mechanism(
            sigma, shift, value_discretization_interval=1e-4, pessimistic_estimate=pessimistic
        )
        .self_compose(rounds)
        .get_epsilon_for_delta(delta)
        for pessimistic in (False, True)
    )
    assert low <= claimed_epsilon(sigma, shift, rounds, delta) <= {2: 1.035}.get(sigma, 1.02) * high


# smoothed


def gaussian_epsilon(delta):
    """√(2 log(1/δ)), of the shape that a Gaussian's ε has; it need not be one's."""
    return math.sqrt(2 * math.log(1 / delta)) if delta < 1 else 0.0


Delta, Exponent = st.floats(1e-300, 0.5), st.floats(-30, 2)


@given(Delta, Exponent)
def test_what_is_returned_has_a_share_of_delta_for_the_distance(delta, exponent):
    distance = delta * 10**exponent
    assume(distance > 0)
    found = smoothed(gaussian_epsilon, delta, distance)
    if math.isfinite(found):
        its_own = math.exp(-(found**2) / 2)
        assert its_own + (1 + math.exp(found)) * distance <= delta * (1 + 1e-12)
        assert found >= gaussian_epsilon(delta)


@given(st.floats(1e-100, 0.5), st.floats(-12, 0), st.integers(1, 199))
def test_an_epsilon_is_found_if_any_share_has_one(delta, exponent, part):
    distance, share = delta * 10**exponent, delta * part / 200
    sufficient = gaussian_epsilon(delta - share)
    assume((1 + math.exp(sufficient)) * distance * (1 + 2 * HEADROOM) <= share)
    assert smoothed(gaussian_epsilon, delta, distance) <= sufficient * (1 + 1e-12)


@given(Delta)
def test_a_distance_that_is_tiny_costs_next_to_nothing(delta):
    plain = gaussian_epsilon(delta)
    distance = 1e-12 * delta / (1 + math.exp(plain))
    assume(distance > 0)
    assert plain <= smoothed(gaussian_epsilon, delta, distance) <= plain * (1 + 1e-9)


def test_no_distance_asks_once_for_the_same_delta():
    asked = []
    assert smoothed(lambda delta: asked.append(delta) or 3.0, 1e-5, 0.0) == 3.0
    assert asked == [1e-5]


def test_a_tiny_distance_asks_twice_and_for_less_than_delta():
    asked = []
    smoothed(lambda delta: asked.append(delta) or 3.0, 1e-5, 1e-40)
    assert len(asked) <= 3 and all(delta < 1e-5 for delta in asked)


@pytest.mark.parametrize(("eps", "delta", "distance"), [
    (1.0, 1e-5, 1e-5), (1.0, 1e-5, 0.5e-5), (12.0, 1e-5, 1e-9), (800.0, 1e-5, 5e-324), (math.inf, 1e-5, 1e-300),
    (0.0, 1e-300, 1e-9),
])  # fmt: skip
def test_there_is_no_epsilon_where_the_distance_takes_all_of_delta(eps, delta, distance):
    assert smoothed(lambda left: eps, delta, distance) == math.inf


@pytest.mark.parametrize("distance", [-1e-9, math.nan, math.inf])
def test_a_distance_is_a_number(distance):
    with pytest.raises(UserError, match="the distance"):
        smoothed(lambda left: 1.0, 1e-5, distance)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_very_large_epsilon_falls_back_on_renyi_once(accountant: Accountant) -> None:
    """Rényi accounting itself has no second answer: the first is its own, or none."""
    mechanism = fn.Mechanism(20, fn.full(), 0.01, grid_dim=1000)
    release = mechanism.release()
    assert 0 < release.unlike <= NEXT_TO_NOTHING
    found = mechanism.epsilon(100, 1e-5, accountant)
    assert found == math.inf if accountant == "rdp" else 1e5 < found < 1e7
