"""Participation: who sends follows the law that the accountant will assume."""

import math

import numpy as np
import pytest
from scipy import stats

import fednormec as fn
from fednormec.core.randomness import generator

M, DRAWS = 12, 4000


def sent(participation):
    everyone_computes = participation._replace(idle="advance")
    return np.stack([everyone_computes.draw(M, generator(3, "cohort", k)).sending for k in range(DRAWS)])


def test_poisson_sends_independently_with_its_probability():
    table = sent(fn.poisson(0.3))
    assert np.abs(table.mean(0) - 0.3).max() < 5 * math.sqrt(0.3 * 0.7 / DRAWS)
    expected = stats.binom.pmf(np.arange(M + 1), M, 0.3) * DRAWS
    counts = np.bincount(table.sum(1), minlength=M + 1)
    keep = expected > 5
    statistic = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    assert statistic < stats.chi2.ppf(1 - 1e-6, keep.sum())
    correlations = np.corrcoef(table.T)[~np.eye(M, dtype=bool)]
    assert np.abs(correlations).max() < 6 / math.sqrt(DRAWS)


def test_a_cohort_of_fixed_size_is_not_poisson():
    """The other direction: the test above would tell them apart."""
    table = sent(fn.fixed_size(4))
    assert (table.sum(1) == 4).all()
    assert np.abs(table.mean(0) - 4 / 12).max() < 5 * math.sqrt(4 / 12 * 8 / 12 / DRAWS)
    assert np.corrcoef(table.T)[~np.eye(M, dtype=bool)].mean() == pytest.approx(-1 / (M - 1), abs=0.01)


def test_weights_are_public_and_undo_the_sampling():
    assert fn.poisson(0.25).weights(20) == (4.0, 4.0, 0.0)
    assert fn.poisson(0.25, "sleep").weights(20) == (4.0, 1.0, 0.0)
    assert fn.fixed_size(5).weights(20) == (4.0, 4.0, 0.0)
    assert fn.full().weights(20) == (1.0, 1.0, 0.0)


def test_all_compute_or_only_those_who_send():
    cohort = fn.poisson(0.5).draw(10, generator(0, "cohort", 1))
    assert cohort.computing.tolist() == list(range(10))
    asleep = fn.poisson(0.5, "sleep").draw(10, generator(0, "cohort", 1))
    assert asleep.computing.tolist() == np.flatnonzero(cohort.sending).tolist()
    assert asleep.sending.all()
    assert fn.full().draw(3, generator(0, "cohort", 1)).sending.all()


@pytest.mark.parametrize("p", [0.0, -0.1, 1.0001, math.nan, math.inf])
def test_a_bad_probability_is_refused(p):
    with pytest.raises(fn.UserError, match=r"\(0, 1\]"):
        fn.poisson(p)


def test_other_bad_rules_are_refused():
    with pytest.raises(fn.UserError, match="at least 1"):
        fn.fixed_size(0)
    with pytest.raises(fn.UserError, match="cannot be drawn from 20"):
        fn.fixed_size(21).weights(20)
    with pytest.raises(fn.UserError, match="'advance' or 'sleep'"):
        fn.poisson(0.5, "doze")


@pytest.mark.parametrize("p, least", [(0.3, 1), (0.3, 2), (0.5, 7), (0.9, 12)])
def test_weights_undo_the_sampling_of_the_rounds_that_are_held(p, least):
    sizes = np.arange(least, M + 1)
    mass = stats.binom.pmf(sizes, M, p)
    sends = (sizes / M * mass).sum() / mass.sum() if least > 1 else p
    assert fn.poisson(p).rate_if_held(M, least) == pytest.approx(sends, rel=1e-12)
    assert fn.poisson(p).weights(M, least).average == pytest.approx(1 / sends, rel=1e-12)
    assert fn.fixed_size(8).weights(M, min(least, 8)).average == 12 / 8


@pytest.mark.parametrize("rule, least, why", [
    (fn.poisson(0.05), 5, "a round needs 5 senders, and with poisson(0.05) of 12 clients that has a probability of "),
    (fn.poisson(1e-300), 12, "a probability of 0"),
    (fn.fixed_size(4), 5, "a round needs 5 senders, and fixed_size(4) draws 4 clients"),
])  # fmt: skip
def test_a_floor_that_hardly_any_round_reaches_is_refused(rule, least, why):
    with pytest.raises(fn.UserError) as found:
        rule.weights(M, least)
    assert why in str(found.value) and "privacy.min_survivors" in str(found.value)
