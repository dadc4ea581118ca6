"""The tight accountant at a δ down to 1e-15: between the truth and 0.2 % above it, for every trust model.

The truth is computed in mpmath by tests/support/exact_privacy.py, which shares nothing with the accountant: no grid, no
Fourier transform of probabilities, no code.
"""

import itertools
import math

import numpy as np
import pytest
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from exact_privacy import Sampled, Seen, exact_epsilon, kind
from scipy import fft, stats

import fednormec as fn
from fednormec.privacy import accounting, composition
from fednormec.privacy.accounting import Hidden, Open, delta, epsilon, epsilon_of_all

pytestmark = pytest.mark.long

# (trust, adjacency, p, σ, clients, rounds, δ) and exact_epsilon({kind(trust, adjacency, p, σ, clients): rounds}, δ)
STORED = [
    (("central", "replace_one", 0.5, 4.0, None, 211, 1e-12), 31.287907156610654),
    (("central", "zero_out", 0.001, 0.6, None, 10**5, 1e-09), 9.374981483949083),
    (("central", "zero_out", 0.03, 0.8, None, 10**4, 1e-10), 53.25055652849909),
    (("secagg", "zero_out", 0.03, 20.0, 2000, 1000, 1e-12), 0.2490020398464568),
    (("central", "replace_one", 0.0054, 22.0, None, 5749, 2e-10), 0.2021505977061794),
    (("secagg", "zero_out", 0.03, 2.0, 100, 500, 1e-12), 10.939578742133769),
    (("secagg", "replace_one", 0.3, 6.0, 40, 300, 1e-15), 7.867742183867422),
    (("secagg", "zero_out", 0.9, 0.5, 30, 20, 1e-13), 13.363195975984906),
    (("secagg", "zero_out", 0.001, 1.0, 500, 10**5, 1e-14), 126.10245462650558),
    (("secagg", "replace_one", 0.1, 3.0, 200, 1000, 1e-09), 10.123568030469528),
    (("local", "zero_out", 0.1, 5.0, None, 1000, 1e-15), 18.85644815265784),
    (("local", "replace_one", 0.01, 20.0, None, 10**4, 1e-11), 7.2817159409638785),
    (("local", "zero_out", 1.0, 30.0, None, 300, 1e-15), 4.555642960724904),
    (("central", "zero_out", 1.0, 50.0, None, 2000, 1e-13), 6.702721153864102),
    (("central", "zero_out", 0.25, 2.3266, None, 60, 1e-15), 8.157473210418281),
    (("central", "zero_out", 0.25, 2.3266, None, 60, 1e-05), 3.9990971663981285),
    (("central", "zero_out", 0.3, 0.7, None, 3, 1e-15), 17.51368504864578),
    (("central", "replace_one", 0.3, 0.7, None, 2, 1e-14), 14.745475880513315),
    (("central", "zero_out", 0.1, 3.0, None, 1, 1e-13), 0.616102525483758),
    (("central", "replace_one", 0.9, 0.5, None, 10, 1e-15), 90.7160296159249),
    (("central", "zero_out", 0.5, 100.0, None, 10**5, 1e-15), 13.450328493621743),
    (("central", "replace_one", 0.2, 100.0, None, 10**6, 1e-12), 35.56173140506692),
    (("central", "zero_out", 0.01, 0.5, None, 300000, 1e-15), 688.9826455394261),
    (("central", "zero_out", 0.0001, 0.4, None, 10**5, 1e-15), 19.40522417080859),
    (("central", "zero_out", 0.001, 10.0, None, 10**5, 1e-13), 0.20968583135242172),
    (("central", "replace_one", 0.02, 1.0, None, 2000, 1e-15), 16.87843793495076),
    (("central", "zero_out", 0.002, 0.7, None, 10**4, 1e-12), 6.134958835382817),
    (("central", "replace_one", 0.0001, 0.4, None, 1000, 1e-13), 11.19673605656208),
    (("central", "zero_out", 0.01, 0.5, None, 100, 1e-14), 18.803648979952474),
    (("central", "zero_out", 0.05, 0.8, None, 30, 1e-11), 8.41171823163695),
]
QUICK = [0, 5, 6, 8, 10, 13, 20]  # recomputed here, in a second or so each
LOOSE = 1.002


def ours(trust, adjacency, p, std, clients, rounds, at):
    return fn.Mechanism(clients or 20, fn.poisson(p), std, trust=trust, adjacency=adjacency).epsilon(rounds, at)


def accepted(found, truth):
    return truth * (1 - 1e-10) <= found <= truth * LOOSE  # ten digits are what the oracle is good for


@pytest.mark.parametrize(("case", "truth"), STORED)
def test_the_accountant_is_above_the_truth_and_near_it(case, truth):
    """And a noise that is off by 2 % is told from the right one, on either side."""
    trust, adjacency, p, std, clients, rounds, at = case
    assert accepted(ours(*case), truth)
    for wrong in (std * 1.02, std / 1.02):
        assert not accepted(ours(trust, adjacency, p, wrong, clients, rounds, at), truth)


@pytest.mark.parametrize(("case", "truth"), [STORED[i] for i in QUICK])
def test_the_stored_truth_is_what_the_oracle_says(case, truth):
    trust, adjacency, p, std, clients, rounds, at = case
    assert exact_epsilon({kind(trust, adjacency, p, std, clients): rounds}, at) == pytest.approx(truth, rel=1e-10)


def test_the_oracle_agrees_with_closed_forms_and_another_accountant():
    """A Gaussian; a client seen in n ~ Bin(k, p) rounds; prv-accountant's estimate for a subsampled Gaussian."""
    assert exact_epsilon({Seen((1.0,), (0.1,)): 40}, 1e-9) == pytest.approx(
        get_epsilon_gaussian(1 / (0.1 * math.sqrt(40)), 1e-9), rel=1e-6
    )
    found = exact_epsilon({Seen((0.3,), (0.4,)): 50}, 1e-8)
    chances = stats.binom.pmf(np.arange(1, 51), 50, 0.3)
    logs = accounting.gaussian_log_delta(found, 0.4 * np.sqrt(np.arange(1, 51)))
    assert math.fsum(chances * np.exp(logs)) == pytest.approx(1e-8, rel=1e-9)
    assert exact_epsilon({Sampled(0.25, 1 / 1.837, "remove"): 300}, 1e-5) == pytest.approx(13.6926859185178, rel=1e-8)


# One round, where δ has a closed form: every probability is right relative to itself, far into the tail.


@pytest.mark.parametrize("way", ["remove", "add", "replace"])
@pytest.mark.parametrize(("p", "mu"), [(0.25, 0.5), (0.01, 1.5), (0.6, 3.0), (1e-4, 2.5), (0.003, 0.02)])
def test_one_round_is_exact_at_the_places_of_its_grid(p, mu, way):
    losses = accounting._own_losses(Hidden(p, mu, way == "replace"), 1)
    loss = losses[1 if way == "add" else 0]
    top = loss.lowest + len(loss.probabilities) - 1
    assert math.fsum(loss.probabilities) == pytest.approx(1, rel=1e-14)
    for place in {int(share * top) for share in (0.02, 0.2, 0.5, 0.7, 0.9)}:
        gaps = (loss.lowest + np.arange(len(loss.probabilities)) - place) * loss.width
        found = math.fsum(loss.probabilities[gaps > 0] * -np.expm1(-gaps[gaps > 0])) + loss.infinite
        exact = float(Sampled(p, mu, way).once(place * loss.width))
        if exact > 1e-38:  # where what was cut off does not count yet
            assert exact * (1 - 1e-12) <= found <= exact * (1 + 1e-5)


# Composition: what rounding is said to do at most, and what tilting is said to leave as it is.


@pytest.mark.parametrize("tilt", [1e-4, 0.03, 0.3])
def test_composed_probabilities_are_above_a_plain_convolution_and_near_it(tilt):
    """Adding up products of positive numbers keeps their relative precision."""
    (loss,) = accounting._losses(Hidden(0.3, 0.8, True), 0.05)
    j = int(np.argmin(abs(composition.TILTS - tilt)))
    places = loss.lowest + np.arange(len(loss.probabilities))
    once = loss.probabilities * np.exp(composition.TILTS[j] * places - loss.log_moments[j])
    plain = once
    for _ in range(4):
        plain = np.convolve(plain, once)
    low, high = composition._window([(loss, 5)], j)
    found = composition._tilted_masses([(loss, 5)], j, low, high)
    inside = plain[low - 5 * loss.lowest : high + 1 - 5 * loss.lowest]
    assert plain.sum() - inside.sum() <= 2 * composition.TAIL * (1 + 1e-6)
    assert (found >= inside * (1 - 1e-12)).all()
    assert (found - inside).sum() <= 2 * composition.TAIL + 1e-8


@pytest.mark.skipif(np.finfo(np.longdouble).eps > 1e-18, reason="no extended precision on this machine")
@pytest.mark.parametrize("rounds", [1, 7, 1000, 10**5, 10**7])
def test_rounding_is_within_what_is_added_for_it(rounds):
    """The same transforms with 64 bits of precision: what they differ by is at most half of what is added."""
    (loss,) = accounting._losses(Hidden(0.3, 0.8, True), 0.05)
    j = int(np.argmin(abs(composition.TILTS - 0.5 / math.sqrt(rounds))))
    low, high = composition._window([(loss, rounds)], j)
    found = composition._tilted_masses([(loss, rounds)], j, low, high)
    size = fft.next_fast_len(high - low + 1, real=True)
    once = fft.rfft(composition._wrapped(loss, j, size).astype(np.longdouble))
    with np.errstate(divide="ignore", invalid="ignore"):
        powers = np.where(np.abs(once) > 0, np.exp(rounds * np.log(once)), 0)
    precise = np.roll(fft.irfft(powers, size), -((low - rounds * loss.lowest) % size))[: high - low + 1]
    over = found - precise  # what was added, the same everywhere, and what rounding did
    assert 0 < over.max() <= 3 * over.min()


RELEASES = [
    Hidden(0.25, 0.5), Hidden(0.25, 0.5, True), Hidden(0.01, 1.2), Hidden(1e-4, 2.5), Open((0.1, 0.2), (0.2, 0.3)),
    Open((1e-6, 0.01, 0.2), (1.0, 0.3, 0.02)),
]  # fmt: skip
LADDER = (0.3, 1e-2, 1e-5, 1e-11, 1e-13, 1e-15, 1e-20, 1e-29, 0.99e-30, 1e-35)


@pytest.mark.parametrize("release", RELEASES)
def test_epsilon_is_monotone_and_inverts_delta_at_every_small_delta(release):
    for rounds in (1, 400, 10**4):
        found = [epsilon(release, rounds, at) for at in LADDER]
        assert found == sorted(found)
        for at, eps in zip(LADDER[:-2], found, strict=False):
            assert delta(release, rounds, eps) <= at * (1 + 1e-6)
            if eps > 0:
                assert delta(release, rounds, eps * (1 - 1e-4)) > at
    by_rounds = [epsilon(release, k, 1e-15) for k in (1, 2, 3, 100, 101, 10**4, 10**5)]
    assert by_rounds == sorted(by_rounds)
    assert len(set(by_rounds)) == len(by_rounds)


def test_the_answer_does_not_hang_on_the_tilt():
    """Any tilt is right; a worse one only makes the bound looser."""
    (loss,) = accounting._own_losses(Hidden(0.5, 0.25, True), 211)
    parts, exact = [(loss, 211)], 31.287907156610654
    best = composition.delta(parts, exact)
    assert best >= 1e-12
    for j in range(composition.FIRST, len(composition.TILTS) - 1):
        composed = composition._compose(parts, j)
        assert composed is not None
        lowest, deltas = composed
        place = math.floor(exact / loss.width) - lowest
        if 0 <= place < len(deltas):
            assert deltas[place] >= 1e-12


@pytest.mark.parametrize(("kinds", "at", "truth"), [
    ({Hidden(0.25, 0.5): 30, Hidden(0.25, 1.0): 10}, 1e-12, 13.236924988623114),
    ({Hidden(0.25, 0.5, True): 300, Open((1.0,), (0.1,)): 10}, 1e-15, 42.47394530420628),
    ({Open((0.1, 0.2), (0.2, 0.3)): 200, Hidden(0.3, 0.5): 40}, 1e-13, 20.93928319515572),
])  # fmt: skip
def test_several_kinds_agree_with_the_oracle(kinds, at, truth):
    found = epsilon_of_all(kinds, at)
    assert accepted(found, truth)
    assert found >= max(epsilon(release, rounds, at) for release, rounds in kinds.items()) * (1 - 1e-9)


def test_many_rounds_are_still_one_gaussian():
    """10⁹ rounds with much noise, on a coarser grid: the central limit is within 1 %, p √rounds/σ (1 + …)."""
    limit = get_epsilon_gaussian(20 / (2 * 0.001 * math.sqrt(10**8)), 1e-12)
    assert limit <= epsilon(Hidden(0.001, 1 / 20, True), 10**8, 1e-12) <= 1.01 * limit


@pytest.mark.parametrize("trust", ["central", "secagg", "local"])
@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_the_least_delta_has_an_answer(trust, adjacency):
    for p, std in itertools.product((0.25, 1.0), (1.0, 20.0)):
        found = [ours(trust, adjacency, p, std, 20, 300, at) for at in (1e-15, 1e-60, 1e-300)]
        assert found == sorted(found)
        assert math.isfinite(found[-1])
