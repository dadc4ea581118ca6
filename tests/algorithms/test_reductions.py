"""Special cases that must coincide: the family hangs together."""

from functools import partial

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


def test_ef21_pp_is_ef21_whose_idle_clients_sleep():
    for idle in ("advance", "sleep"):
        asleep = last(fn.ef21_pp(k=2, server_step=0.3), fn.poisson(0.4, idle))
        assert same(asleep, last(fn.ef21(k=2, server_step=0.3), fn.poisson(0.4, "sleep")))
    assert not same(asleep, last(fn.ef21(k=2, server_step=0.3), fn.poisson(0.4, "advance")))


@pytest.mark.parametrize("idle", ["advance", "sleep"])
def test_ef21_sgdm_is_ef21_without_momentum_and_clip21_sgd2m_with_one(idle):
    some, gradient = fn.poisson(0.4, idle), fn.gd(1.0)
    plain = fn.ef21_sgdm(gradient, bound="top_k", k=2, client_momentum=1.0, server_step=0.3)
    assert same(last(plain, some), last(fn.ef21(k=2, server_step=0.3), some))
    double = fn.clip21_sgd2m(tau=0.2, client_momentum=0.3, server_momentum=1.0, server_step=0.3)
    assert same(last(fn.ef21_sgdm(gradient, tau=0.2, client_momentum=0.3, server_step=0.3), some), last(double, some))


@pytest.mark.parametrize("idle", ["advance", "sleep"])
def test_econtrol_that_controls_no_error_is_ef21(idle):
    some, gradient = fn.poisson(0.4, idle), fn.gd(1.0)
    ends = last(fn.econtrol(gradient, bound="top_k", k=2, error_weight=0.0, server_step=0.3), some)
    ef21 = last(fn.ef21(k=2, server_step=0.3), some)
    assert torch.equal(ends.x, ef21.x) and torch.equal(ends.memory[:, :5], ef21.memory)
    clipped = fn.econtrol(gradient, tau=0.2, error_weight=0.0, server_step=0.3)
    assert close(last(clipped, some), last(fn.clip21(tau=0.2, server_step=0.3), some))
    assert not close(last(fn.econtrol(gradient, tau=0.2, server_step=0.3), some), ef21)


def test_bounds_that_never_bite_leave_gradient_descent():
    """EF14 and EControl keep no error then; centred feedback with beta = 1 has the mean update in its memory."""
    x = PROBLEM.init(generator(3, "init"))
    for _ in range(ROUNDS):
        x = x - 0.3 * mean_gradient(x)
    for settings in ({"tau": 1e6}, {"bound": "top_k", "k": 5}):
        for build in (fn.ef14, fn.econtrol, partial(fn.ef21_sgdm, client_momentum=1.0)):
            end = last(build(fn.gd(1.0), server_step=0.3, **settings))
            assert torch.allclose(end.x, x, rtol=0, atol=1e-12)
    end = last(fn.centred(fn.gd(1.0), bound="clip", tau=1e6, beta=1.0, server_step=0.3))
    assert torch.allclose(end.x, x, rtol=0, atol=1e-12)


def test_ef14_without_a_bound_is_fed_avg_with_sampling_too():
    some, local = fn.poisson(0.4), fn.gd(0.3, steps=4)
    assert close(last(fn.ef14(local, tau=1e6, server_step=0.27), some), last(fn.fed_avg(local, server_step=0.9), some))


@pytest.mark.parametrize("idle", ["advance", "sleep"])
def test_ef14_loses_nothing_that_it_cuts_off(idle):
    """x - (1/(pM)) sum e_i is where x would be if nothing had been cut off, by the same updates, with sampling too."""
    m, p = 9, 0.4
    algorithm, drawn = fn.ef14(fn.gd(1.0), tau=0.01, server_step=0.1), fn.poisson(p, idle)
    x = shadow = PROBLEM.init(generator(3, "init"))
    for r in fn.simulate(PROBLEM, algorithm, drawn, rounds=ROUNDS, seed=3):
        who = r.cohort.computing[r.cohort.sending]
        shadow = shadow - 0.1 / (p * m) * PROBLEM.grad(x, who).sum(0)
        x = r.x.clone()
        assert torch.allclose(x - r.memory.sum(0) / (p * m), shadow, rtol=0, atol=1e-12)
    assert r.memory.norm() > 1  # much was cut off


def test_one_client_of_centred_feedback_is_error_feedback_without_noise():
    """v = v_1 when one client sends in every round; with noise they part, since v_1 does not see it."""
    one = fn.random_quadratic(1, 4, seed=1)
    settings = {"alpha": 0.3, "beta": 0.2, "server_step": 0.1}
    ours, papers = fn.centred(fn.gd(0.3), **settings), fn.fed_normec(fn.gd(0.3), server_normalization=False, **settings)
    assert close(last(ours, problem=one), last(papers, problem=one))
    noise = fn.Privacy(noise_std=0.5)
    assert not close(last(ours, None, noise, problem=one), last(papers, None, noise, problem=one), 1e-3)


def test_a_leak_of_everything_is_no_deviation():
    local, some = fn.gd(0.3, steps=4), fn.poisson(0.5)
    plain, leaky = (last(fn.centred(local, leak=leak), some) for leak in (None, 1.0))
    assert torch.equal(plain.x, leaky.x) and not leaky.memory.any()
    assert not close(plain, last(fn.centred(local, leak=0.1), some))


def test_one_client_with_a_deviation_has_the_same_fixed_point():
    """v = P_1 and h_1 = 0: a deviation changes the way, not the end."""
    one = fn.Quadratic(torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.full((1, 1, 1), 3.0, dtype=torch.float64))
    algorithm = fn.centred(fn.gd(1.0), alpha=0.5, beta=0.3, server_step=1e-15, leak=0.2, deviation_step=0.4)
    x0 = torch.zeros(1, dtype=torch.float64)
    *_, end = fn.simulate(one, algorithm, rounds=400, x0=x0)
    assert end.server.memory.item() == pytest.approx(-3.0, abs=1e-9) and abs(end.memory.item()) < 1e-9


# a bound by name


@pytest.mark.parametrize("build", [fn.ef14, fn.ef21_sgdm, fn.econtrol])
@pytest.mark.parametrize(
    ("settings", "unused"),
    [
        ({"bound": "clip", "alpha": 0.1}, "alpha"),
        ({"bound": "clip", "k": 3}, "k"),
        ({"bound": "normalize", "k": 3}, "k"),
        ({"bound": "top_k", "tau": 1.0}, "tau"),
        ({"bound": "top_k", "alpha": 0.1}, "alpha"),
    ],
)
def test_a_setting_that_the_bound_does_not_use_is_refused(build, settings, unused):
    with pytest.raises(fn.UserError, match=f"{unused} has no meaning with bound = '{settings['bound']}'"):
        build(fn.gd(0.1), **settings)


@pytest.mark.parametrize("build", [fn.ef14, fn.ef21_sgdm, fn.econtrol])
def test_the_radius_alone_decides_whether_noise_may_be_added(build):
    noise = fn.Privacy(noise_std=1.0)
    for bound in ("clip", "normalize"):
        fn.simulate(PROBLEM, build(fn.gd(0.1), bound=bound), privacy=noise, rounds=1)
    with pytest.raises(fn.UserError, match="does not bound what a client sends"):
        fn.simulate(PROBLEM, build(fn.gd(0.1), bound="top_k"), privacy=noise, rounds=1)


def test_the_settings_of_centred_feedback_are_checked():
    for settings, said in (
        ({"bound": "top_k"}, "bound must be 'normalize' or 'clip', not 'top_k'"),
        ({"bound": "clip", "alpha": 0.1}, "alpha has no meaning with bound = 'clip'"),
        ({"deviation_step": 0.1}, "give a leak too"),
        ({"leak": 0.0}, r"leak must lie in \(0, 1\], not 0.0"),
        ({"leak": 1.5}, r"leak must lie in \(0, 1\], not 1.5"),
        ({"leak": 0.1, "deviation_step": -1.0}, "deviation_step must be a positive number, not -1.0"),
    ):
        with pytest.raises(fn.UserError, match=said):
            fn.centred(fn.gd(0.1), **settings)


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
