"""Noise has the law it claims: the right standard deviation is accepted, 2/3 and 3/2 of it are rejected."""

import math

import numpy as np
import pytest
import torch
from normal_law import accepts, has_std
from scipy import stats

import fednormec as fn
from fednormec.core.randomness import generator

M, D, ROUNDS = 6, 40, 60
PROBLEM = fn.random_quadratic(M, D, seed=0)


def noise_in_the_sum(noise, participation=None):
    """What the engine really added to each round's sum: the difference of the server's memory with and without."""
    algorithm = fn.clip21(tau=0.5, server_step=1e-300)  # x stands still: both runs send the same
    noisy = fn.simulate(PROBLEM, algorithm, participation, noise, rounds=ROUNDS, seed=7)
    plain = fn.simulate(PROBLEM, algorithm, participation, rounds=ROUNDS, seed=7)
    weight = 1.0 if participation is None else participation.weights(M).memory
    total, sent = [torch.zeros(D, dtype=torch.float64)], []
    for a, b in zip(noisy, plain, strict=True):
        total.append((a.server.memory - b.server.memory) * M / weight)
        sent.append(a.sent)
    return np.diff(torch.stack(total).numpy(), axis=0), np.array(sent)


@pytest.mark.parametrize("participation", [None, fn.poisson(0.2), fn.poisson(0.2, "sleep")])
def test_central_noise_is_one_draw_for_the_sum_in_every_round(participation):
    added, sent = noise_in_the_sum(fn.Privacy(noise_std=1.7), participation)
    std = 1.7 * 0.5  # relative to the radius
    assert has_std(added, std)
    if participation is not None:
        assert (sent == 0).any()
        assert accepts(added[sent == 0], std)  # empty cohorts too


def test_noise_per_client_grows_with_the_cohort():
    added, sent = noise_in_the_sum(fn.Privacy(noise_std=1.7, trust="secagg"), fn.poisson(0.4))
    std = 1.7 * 0.5
    scaled = added[sent > 0] / np.sqrt(sent[sent > 0])[:, None]
    assert has_std(scaled, std)
    assert not added[sent == 0].any()


def test_coordinates_and_rounds_are_independent():
    draws = np.stack([fn.Mechanism(2, fn.full(), 1.0).noise(200, 1, 3, k) for k in range(200)])
    assert stats.kstest(draws.ravel(), "norm").pvalue > 1e-6
    for pairs in (np.corrcoef(draws), np.corrcoef(draws.T)):
        others = pairs[~np.eye(200, dtype=bool)]
        assert np.abs(others).max() < 6 / math.sqrt(200)


def test_noise_covers_both_halves_of_a_double_message():
    problem, algorithm = fn.random_quadratic(M, 300, seed=0), fn.dp_scaffold(fn.gd(0.1), tau=0.5)
    (noisy,), (plain,) = (
        list(fn.simulate(problem, algorithm, privacy=n, rounds=1)) for n in (fn.Privacy(noise_std=2.0), None)
    )
    halves = (noisy.x - plain.x) * M / 0.1, (noisy.server.memory - plain.server.memory) * M
    for half in halves:
        assert has_std(half.numpy(), 1.0)
    assert abs(np.corrcoef(*(h.numpy() for h in halves))[0, 1]) < 5 / math.sqrt(300)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_bad_noise_is_refused(bad):
    with pytest.raises(fn.UserError, match="noise_std"):
        fn.Privacy(noise_std=bad)
    with pytest.raises(fn.UserError, match="noise_std"):
        fn.Mechanism(2, fn.full(), bad)


def test_addresses_do_not_collide_and_do_not_correlate():
    firsts = [
        generator(s, p, k, c).random()
        for s in (0, 1)
        for p in ("noise", "cohort")
        for k in range(40)
        for c in range(40)
    ]
    assert len(set(firsts)) == len(firsts)
    assert stats.kstest(firsts, "uniform").pvalue > 1e-6
    assert generator(1, "noise", 23).random() != generator(12, "noise", 3).random()
