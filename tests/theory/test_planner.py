"""The planner: nothing that is allowed beats it, it knows what it cannot promise, and odd numbers get a sentence."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednormec.core.participation import full, poisson
from fednormec.errors import UserError
from fednormec.privacy.asked import Privacy
from fednormec.privacy.mechanism import plan as privacy_plan
from fednormec.theory.corrected import error_after_warmup, guarantee, promise, update_lipschitz
from fednormec.theory.planner import DRIFT_SHARE, plan, plan_exactly
from fednormec.theory.setting import Constants, Noise, Settings, round_noise

BASE = Constants(1.0, 6.8, 2.3, 6.3, 1000, 20, 3.9, 7.0, 4.2)
QUIET, LOUD = Noise(0.0, 0.0), Noise(0.003, 0.0147)
LOCALS = ("one_step", "gd", "ig")


def private_noise(constants: Constants, epsilon: float | None, p: float = 1.0):
    def noise_at(rounds: int) -> Noise:
        rule = full() if p == 1 else poisson(p)
        mechanism = None
        if epsilon is not None:
            mechanism = privacy_plan(
                Privacy(epsilon=epsilon), constants.clients, rule, 1.0, constants.dim, rounds
            ).mechanism
        return round_noise(constants.clients, constants.dim, p, mechanism)

    return noise_at


def log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(math.log(low), math.log(high))))


@pytest.mark.long
@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("noise", [QUIET, LOUD, Noise(0.06, 5.9)])
@pytest.mark.parametrize("rounds", [1, 50, 2000])
def test_no_settings_drawn_at_random_beat_the_plan(local, noise, rounds):
    rng = np.random.default_rng(1)
    found = plan_exactly(BASE, local, noise, rounds)
    assert found.found.holds
    start, best = BASE.client_norm, math.inf
    for _ in range(3000):
        R = log_uniform(rng, 1e-3, 30) * start
        beta = log_uniform(rng, 1e-3, 2) * R
        tried = Settings(
            local,
            found.settings.local_step,
            log_uniform(rng, 1e-2, 2) * R,
            beta,
            log_uniform(rng, 0.1, 1) * beta / update_lipschitz(local, BASE.smoothness),
            rounds,
            int(rng.uniform(0, rounds)),
        )
        said = guarantee(BASE, tried, noise)
        if said.holds:
            best = min(best, said.bound)
    assert best < 50 * found.found.bound  # the draws come near
    assert found.found.bound <= 1.002 * best


@pytest.mark.parametrize("local", LOCALS)
def test_small_changes_of_the_plan_do_not_help(local):
    found = plan_exactly(BASE, local, LOUD, 1000)
    for name in ("alpha", "beta", "server_step"):
        for factor in (0.8, 0.95, 1.05, 1.25):
            near = replace(found.settings, **{name: getattr(found.settings, name) * factor})
            said = guarantee(BASE, near, LOUD)
            assert not said.holds or said.bound >= 0.999 * found.found.bound
    for warmup in (found.settings.warmup_rounds - 20, found.settings.warmup_rounds + 20):
        assert guarantee(BASE, replace(found.settings, warmup_rounds=warmup), LOUD).bound >= 0.999 * found.found.bound


@pytest.mark.parametrize("local", LOCALS)
def test_the_warm_up_reaches_what_the_bound_counts_on(local):
    s = (found := plan_exactly(BASE, local, LOUD, 1000)).settings
    reached = error_after_warmup(BASE.start_error(local, s.local_step), s.alpha, s.beta, s.warmup_rounds)
    assert reached <= found.found.settings["memory_error"]
    assert found.course.bound <= found.found.bound


@pytest.mark.parametrize("local", ["gd", "ig"])
def test_local_steps_cost_their_share_and_no_more(local):
    for heterogeneity in (0.0, 1e-9, 3.9):
        constants = replace(BASE, heterogeneity=heterogeneity, component_heterogeneity=heterogeneity)
        said = plan_exactly(constants, local, LOUD, 1000)
        share = said.found.terms["drift"] / (said.found.bound - said.found.terms["drift"])
        assert share <= DRIFT_SHARE * 1.01
        assert said.settings.local_step == pytest.approx(1 / (2 * BASE.smoothness)) or share >= DRIFT_SHARE / 1.3


@pytest.mark.long
def test_more_of_everything_helps():
    def bound(constants=BASE, epsilon=8.0, rounds=1000):
        return plan(constants, "one_step", private_noise(constants, epsilon), rounds).found.bound

    by_clients = [bound(replace(BASE, clients=m)) for m in (100, 1000, 10_000)]
    by_epsilon = [bound(epsilon=e) for e in (0.5, 2, 8, None)]
    by_rounds = [bound(rounds=n) for n in (30, 300, 3000)]
    for bounds in (by_clients, by_epsilon, by_rounds):
        assert bounds == sorted(bounds, reverse=True)


def test_with_a_fixed_budget_of_privacy_fewer_rounds_can_be_better():
    few = replace(BASE, clients=30)
    found = plan(few, "one_step", private_noise(few, 1.0), 5000)
    assert found.settings.rounds < 5000
    assert found.found.bound <= plan_exactly(few, "one_step", private_noise(few, 1.0)(5000), 5000).found.bound


def test_without_noise_the_planned_bound_falls_like_one_over_the_root_of_rounds():
    at = np.array([10**3, 10**4, 10**5, 10**6])
    bounds = [plan_exactly(BASE, "one_step", QUIET, int(n)).found.bound for n in at]
    slope = np.polyfit(np.log(at), np.log(bounds), 1)[0]
    assert slope == pytest.approx(-0.5, abs=0.01)


def test_the_plan_does_not_depend_on_units():
    """s f in place of f: the same steps in x, all gradients times s."""
    one = plan_exactly(BASE, "gd", LOUD, 500)
    s = 1000.0
    scaled = Constants(
        s * BASE.smoothness,
        s * BASE.gap,
        s * BASE.gradient_norm,
        s * BASE.client_norm,
        1000,
        20,
        s * BASE.heterogeneity,
    )
    other = plan_exactly(scaled, "gd", LOUD, 500)
    assert other.found.bound == pytest.approx(s * one.found.bound, rel=1e-6)
    assert other.settings.beta == pytest.approx(s * one.settings.beta, rel=1e-3)
    assert other.settings.server_step == pytest.approx(one.settings.server_step, rel=1e-3)
    assert other.settings.local_step == pytest.approx(one.settings.local_step / s, rel=1e-3)


def test_vacuous_means_not_below_the_gradient_at_the_start():
    for noise, expected in ((QUIET, False), (Noise(0.0, 1e4), True)):
        found = plan_exactly(BASE, "one_step", noise, 1000)
        assert found.vacuous is expected is (found.found.bound >= BASE.gradient_norm)
    broken = promise(BASE, Settings("one_step", 0.5, 0.01, 0.1, 1.0, 1000), QUIET)
    assert not broken.found.holds and broken.vacuous


FINITE = st.floats(1e-8, 1e8)
OR_ZERO = st.one_of(st.just(0.0), FINITE)


@pytest.mark.long
@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(LOCALS), FINITE, OR_ZERO, FINITE, st.floats(0, 1), OR_ZERO, OR_ZERO, st.floats(0, 1e6),
    st.integers(1, 10**6),
)  # fmt: skip
def test_any_constants_get_a_plan_whose_conditions_hold(local, L, gap, norm, share, spread, noise, sampling, rounds):
    constants = Constants(L, gap, norm * share, norm, 10, 10, spread, norm, spread)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = plan_exactly(constants, local, Noise(sampling, noise), rounds)
    assert found.found.holds, found
    assert math.isfinite(found.found.bound) and found.found.bound > 0


@pytest.mark.parametrize("rounds", [0, -3])
def test_a_plan_needs_a_round(rounds):
    with pytest.raises(UserError, match="rounds must be at least 1"):
        plan(BASE, "one_step", lambda n: QUIET, rounds)


def test_incremental_steps_need_their_own_constants():
    with pytest.raises(UserError, match="component_norm"):
        plan_exactly(replace(BASE, component_norm=None), "ig", QUIET, 10)
    with pytest.raises(UserError, match="heterogeneity"):
        plan_exactly(replace(BASE, heterogeneity=None), "gd", QUIET, 10)
