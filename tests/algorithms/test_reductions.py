"""Special cases that must coincide: the family hangs together."""

import numpy as np
import pytest
import torch

import fednormec as fn
from fednormec.core.randomness import generator

PROBLEM = fn.random_quadratic(9, 5, parts=4, heterogeneity=1.0, seed=4)
ROUNDS = 15


def last(algorithm, participation=None, noise=None, rounds=ROUNDS, problem=PROBLEM):
    *_, end = fn.simulate(problem, algorithm, participation, noise, rounds=rounds, seed=3)
    return end


def same(a, b):
    return torch.equal(a.x, b.x) and torch.equal(a.memory, b.memory)


def close(a, b, tolerance=1e-12):
    return torch.allclose(a.x, b.x, rtol=0, atol=tolerance)


def test_one_local_step_and_full_participation_is_alpha_normec():
    fed = fn.fed_normec(fn.gd(0.7, steps=1), alpha=0.1, beta=0.3, server_step=0.1)
    assert same(last(fed), last(fn.alpha_normec(alpha=0.1, beta=0.3, server_step=0.1)))


def test_the_local_step_does_not_matter_for_one_gradient():
    assert same(*(last(fn.fed_normec(fn.gd(step))) for step in (0.1, 10.0)))


def test_poisson_with_probability_one_is_full_participation():
    fed = fn.fed_normec(fn.gd(0.3, steps=3))
    full = last(fed, fn.full())
    assert same(full, last(fed, fn.poisson(1.0)))
    assert same(full, last(fed, fn.poisson(1.0, "sleep")))
    assert same(full, last(fed, fn.fixed_size(9)))


def test_clipping_that_never_bites_is_gradient_descent():
    x = PROBLEM.init(generator(3, "init"))
    for _ in range(ROUNDS):
        x = x - 0.3 * mean_gradient(x)
    assert torch.allclose(last(fn.clip21(tau=1e6, server_step=0.3)).x, x, rtol=0, atol=1e-12)
    assert torch.allclose(last(fn.dp_fed_avg_clip(fn.gd(0.3), tau=1e6)).x, x, rtol=0, atol=1e-12)
    assert torch.allclose(last(fn.ef21(k=5, server_step=0.3)).x, x, rtol=0, atol=1e-12)
    assert torch.allclose(last(fn.fed_avg(fn.gd(0.3))).x, x, rtol=0, atol=1e-12)


def test_full_momentum_on_both_sides_is_clip21():
    double = fn.clip21_sgd2m(tau=0.2, client_momentum=1.0, server_momentum=1.0, server_step=0.3)
    assert same(last(double), last(fn.clip21(tau=0.2, server_step=0.3)))


def test_scaffold_with_one_client_is_gradient_descent():
    """c = c_1 after every round, so the correction vanishes."""
    one = fn.random_quadratic(1, 4, seed=1)
    assert close(
        last(fn.scaffold(fn.gd(0.3, steps=4)), problem=one), last(fn.fed_avg(fn.gd(0.3, steps=4)), problem=one)
    )


def test_dp_scaffold_that_never_clips_is_scaffold():
    local, some = fn.gd(0.3, steps=4), fn.poisson(0.5)
    assert close(last(fn.dp_scaffold(local, tau=1e6), some), last(fn.scaffold(local), some), 1e-13)


def test_one_component_and_one_epoch_of_ig_is_gd():
    whole = fn.random_quadratic(6, 4, parts=1, seed=2)
    gd, ig = (fn.fed_normec(local) for local in (fn.gd(0.3), fn.ig(0.3)))
    assert close(last(gd, problem=whole), last(ig, problem=whole))


def test_one_batch_of_everything_is_gd():
    gd, ig, sgd = (fn.fed_normec(local) for local in (fn.gd(0.3), fn.ig(0.3, batch_size=4), fn.sgd(0.3, 1, 4)))
    assert close(last(gd), last(ig))
    assert close(last(gd), last(sgd))
    assert close(last(fn.fed_normec(fn.gd(0.3, steps=3))), last(fn.fed_normec(fn.sgd(0.3, 3, 4))))


@pytest.mark.long
def test_scaffold_cancels_the_drift_that_fed_avg_keeps():
    """On unlike clients FedAvg with many local steps ends beside the minimum, SCAFFOLD in it."""
    local, rounds = fn.gd(0.9, steps=20), 400
    drift, none = (last(build(local), rounds=rounds).x for build in (fn.fed_avg, fn.scaffold))
    assert mean_gradient(none).norm() < 1e-8
    assert mean_gradient(drift).norm() > 1e-3


@pytest.mark.long
def test_normalising_without_memory_stalls_where_fed_normec_converges():
    """The two-client example: f_1 = (x-1)^2/2 of curvature 1, f_2 of curvature 4, minimiser -1: the optimum is -3/5."""
    two = fn.Quadratic(
        torch.tensor([1.0, 4.0], dtype=torch.float64).reshape(2, 1, 1, 1),
        torch.tensor([1.0, -1.0], dtype=torch.float64).reshape(2, 1, 1),
    )
    x0 = torch.tensor([0.3], dtype=torch.float64)

    def end(algorithm):
        *_, r = fn.simulate(two, algorithm, rounds=600, x0=x0)
        return float(r.x)

    assert abs(end(fn.dp_fed_avg_clip(fn.gd(0.1), tau=1e-3)) - 0.3) < 1e-9  # opposite clipped steps cancel: it stays
    assert (
        abs(end(fn.fed_normec(fn.gd(0.1), alpha=0.05, beta=0.05, server_step=0.05, server_normalization=False)) + 0.6)
        < 1e-6
    )


def mean_gradient(x):
    return PROBLEM.grad(x, np.arange(9)).mean(0)
