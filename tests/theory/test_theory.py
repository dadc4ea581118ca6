"""The corrected guarantees: their arithmetic against brute force, and a sample of experiments/verify_theory."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import verify as verification
from hypothesis import assume, given
from hypothesis import settings as effort
from hypothesis import strategies as st
from scipy.optimize import minimize

import fednormec as fn
from fednormec.core.local import Moment
from fednormec.engine.planning import planned
from fednormec.theory import corrected
from fednormec.theory.corrected import (
    error_after,
    error_after_warmup,
    follow,
    guarantee,
    largest_server_step,
    least_memory_error,
    overshoot,
    update_lipschitz,
)
from fednormec.theory.setting import (
    LOCALS,
    Constants,
    Noise,
    Settings,
    constants_of,
    covered_rate,
    path_growth,
    round_noise,
)
from fednormec.theory.watch import measure

sizes = st.floats(1e-3, 10)
patient = effort(deadline=None)


def left_of(r, alpha, beta):
    """||u - beta Norm_alpha(u)|| for ||u|| = r > 0."""
    return np.abs(1 - beta / (alpha + r)) * r


def up_to(error):
    return np.union1d(np.linspace(0, error, 4001)[1:], error * np.geomspace(1e-12, 1, 2000))


# Corrected Lemma 1.


@patient
@given(st.floats(1e-3, 20), st.just(0.0) | sizes, sizes)
def test_error_after_is_the_supremum(error, alpha, beta):
    found, promised = left_of(up_to(error), alpha, beta).max(), error_after(error, alpha, beta)
    assert found <= promised * (1 + 1e-12)
    assert promised <= found + 2e-3 * (beta + error)


errors = st.just(0.0) | st.floats(5e-324, 20)


@patient
@given(errors, errors, st.just(0.0) | sizes, sizes)
def test_error_after_is_monotone(a, b, alpha, beta):
    assert error_after(min(a, b), alpha, beta) <= error_after(max(a, b), alpha, beta) * (1 + 1e-12)


@pytest.mark.parametrize("local", ["gd", "ig"])
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_the_least_local_step_has_a_drift_of_its_size(local, spread):
    constants = Constants(1.0, 1.0, 1.0, 1.0, 10, 3, spread, 1.0, spread)
    drifts = [
        follow(constants, Settings(local, step, 0.1, 0.1, 0.01, 50), Noise(0, 0)).terms["drift"]
        for step in (1e-300, 1e-20, 1e-10, 1e-5)
    ]
    assert drifts == sorted(drifts) and drifts[1] > 0 and drifts[-1] < 1e-3


def test_no_error_stays_none():
    assert error_after(0.0, 0.0, 1.0) == error_after(0.0, 0.1, 1.0) == 0


@pytest.mark.long
@patient
@given(sizes, sizes)
def test_overshoot_is_where_the_derivative_vanishes(alpha, beta):
    worst = math.sqrt(alpha * beta) - alpha
    assert overshoot(alpha, beta) == pytest.approx(left_of(worst, alpha, beta) if worst > 0 else 0.0, abs=1e-12)


@patient
@given(sizes, st.just(0.0) | sizes, sizes, st.floats(0.1, 10))
def test_the_largest_server_step_is_the_edge(R, alpha, beta, lipschitz):
    step = largest_server_step(R, alpha, beta, lipschitz)
    if beta >= alpha + R:
        assert step == 0
        return
    worst = np.append(up_to(R), max(math.sqrt(alpha * beta) - alpha, 1e-12 * R))
    assert step == 0 or (left_of(worst, alpha, beta) + lipschitz * step).max() <= R * (1 + 1e-9)
    assert (left_of(worst, alpha, beta) + lipschitz * step * 1.001 + 1e-3 * R).max() > R


@patient
@given(sizes, st.just(0.0) | sizes, sizes, st.floats(0.01, 0.99))
def test_the_least_memory_error_is_the_least_that_the_lemma_keeps(start, alpha, beta, share):
    moved = share * beta
    least = least_memory_error(0.0, alpha, beta, moved)
    assert largest_server_step(least, alpha, beta, 1.0) >= moved * (1 - 1e-9)
    assert largest_server_step(least * (1 - 1e-6), alpha, beta, 1.0) < moved
    assert least_memory_error(start, alpha, beta, moved) == max(start, least)
    assert error_after(least, alpha, beta) + moved <= least * (1 + 1e-9)


def test_memories_cannot_follow_what_moves_faster_than_they_do():
    assert least_memory_error(0.0, 0.1, 0.5, 0.5) == math.inf


@patient
@given(sizes, sizes, sizes, st.integers(0, 30))
def test_warmup_is_the_recursion(start, alpha, beta, rounds):
    r = start
    for _ in range(rounds):
        r = error_after(r, alpha, beta)
    assert error_after_warmup(start, alpha, beta, rounds) == r


@patient
@given(sizes, st.just(0.0) | sizes, sizes, st.integers(3, 60))
def test_a_long_warmup_is_never_better_than_the_recursion(start, alpha, beta, rounds):
    exact = error_after_warmup(start, alpha, beta, rounds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corrected, "EXACT_ROUNDS", 2)
        short = error_after_warmup(start, alpha, beta, rounds)
    assert exact <= short * (1 + 1e-9)
    assert short <= max(error_after_warmup(start, alpha, beta, 2), overshoot(alpha, beta)) * (1 + 1e-9)


@pytest.mark.long
@patient
@given(st.floats(1e-6, 5), st.integers(1, 50))
def test_paths_grow_no_faster_than_the_exponential(u, steps):
    mean = np.mean([(1 + u / steps) ** j for j in range(steps)])
    assert mean <= path_growth(u) * (1 + 1e-12)
    assert path_growth(u) <= mean + u * math.exp(u) / steps


@pytest.mark.long
@pytest.mark.parametrize("u", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("kind", ["quadratic", "logistic"])
@pytest.mark.parametrize("local", LOCALS)
def test_updates_are_lipschitz_and_near_the_gradient(kind, local, u):
    """L times the growth of paths, and what `follow` and `start_error` take for ||P_i - grad f_i|| and ||P_i||; the
    closed form's constants where gamma <= 1/(2L)."""
    build, size = {"quadratic": (fn.random_quadratic, "parts"), "logistic": (fn.random_logistic, "examples")}[kind]
    problem = build(5, 4, **{size: 6}, heterogeneity=1.0, seed=3)
    ids, rng, L = np.arange(5), np.random.default_rng(0), problem.smoothness
    run = {"one_step": fn.gd(u / L), "gd": fn.gd(u / L, 5), "ig": fn.ig(u / L)}[local].run
    growth = 1.0 if local == "one_step" else path_growth(u)
    assert u > 0.5 or L * growth <= update_lipschitz(local, L)
    for _ in range(30):
        x, y = torch.from_numpy(rng.standard_normal((2, 4)) * 3)
        updates, others = (run(problem, at, ids, Moment(0, 0), None) for at in (x, y))
        assert ((updates - others).norm(dim=1) <= L * growth * (x - y).norm() * (1 + 1e-9)).all()
        slopes = problem.grad(x, ids)
        parts = torch.stack([problem.grad(x, ids, np.full((5, 1), j)).norm(dim=1) for j in range(6)]).mean(0)
        away = {"one_step": 0 * parts, "gd": (growth - 1) * slopes.norm(dim=1), "ig": u * growth * parts}[local]
        assert ((updates - slopes).norm(dim=1) <= away * (1 + 1e-9)).all()
        allowed = constants_of(problem, x, local).start_error(local, u / L)
        assert updates.norm(dim=1).max() <= allowed * (1 + 1e-9)


# The bounds.


@st.composite
def situations(draw):
    """Constants, settings that meet the conditions, and noise."""
    L, norm, spread = draw(sizes), draw(sizes), st.just(0.0) | sizes
    c = Constants(
        smoothness=L, gap=draw(sizes), gradient_norm=norm * draw(st.floats(0, 1)), client_norm=norm, clients=10, dim=3,
        heterogeneity=draw(spread), component_norm=norm * draw(st.floats(1, 3)), component_heterogeneity=draw(spread),
    )  # fmt: skip
    local, beta, warmup = draw(st.sampled_from(LOCALS)), draw(sizes), draw(st.integers(0, 20))
    eta = beta * draw(st.floats(0.01, 0.99)) / update_lipschitz(local, L)
    s = Settings(
        local, draw(st.floats(0.01, 1)) / (2 * L), draw(st.just(0.0) | sizes), beta, eta,
        warmup + draw(st.integers(1, 60)), warmup, draw(st.sampled_from(["zero", "local_updates"])),
    )  # fmt: skip
    return c, s, Noise(draw(st.floats(0, 1)), draw(st.floats(0, 1)))


def recursion(r, c, s):
    """The memories' error after 0, 1, ... rounds."""
    u = c.smoothness * s.local_step
    moved = c.smoothness * s.server_step * (1 if s.local == "one_step" else path_growth(u))
    yield r
    for k in range(s.rounds):
        r = error_after(r, s.alpha, s.beta) + (moved if k >= s.warmup_rounds else 0.0)
        yield r


@patient
@given(situations())
def test_round_by_round_is_never_worse_than_the_closed_form(situation):
    c, s, noise = situation
    whole, course = guarantee(*situation), follow(*situation)
    assert whole.holds and not whole.broken
    assert list(course.terms) == list(whole.terms)
    for name, term in course.terms.items():
        assert term <= whole.terms[name] * (1 + 1e-9)
    assert course.bound <= whole.bound * (1 + 1e-9)
    assert course.gradient_norm[-1] == pytest.approx(course.bound, rel=1e-9)
    assert course.memory_error == pytest.approx(list(recursion(course.memory_error[0], c, s)), rel=1e-12)
    k = np.arange(s.rounds + 1)
    assert (course.tracking_error <= s.beta * np.sqrt(noise.variance * k) * (1 + 1e-9)).all()
    assert (course.memory_error[s.warmup_rounds :] <= whole.settings["memory_error"] * (1 + 1e-9)).all()


@patient
@given(situations(), st.floats(0.1, 10), st.floats(0.1, 10))
def test_units_do_not_matter(situation, s, t):
    """g(x) = s f(x/t) has L s/t^2, gaps times s and gradients times s/t; with steps gamma t^2/s, eta t and alpha, beta
    times s/t every run of g is that of f in other units, so both bounds are s/t times those of f."""
    c, settings, noise = situation
    # not where a case distinction hangs on rounding
    edge = math.sqrt(c.spread(settings.local) / (32 * c.smoothness**3))
    assume(not math.isclose(edge, settings.server_step * settings.local_step * settings.steps, rel_tol=1e-9))
    other = dataclasses.replace(
        c, smoothness=c.smoothness * s / t**2, gap=c.gap * s, gradient_norm=c.gradient_norm * s / t,
        client_norm=c.client_norm * s / t, heterogeneity=c.heterogeneity * s, component_norm=c.component_norm * s / t,
        component_heterogeneity=c.component_heterogeneity * s,
    )  # fmt: skip
    rescaled = dataclasses.replace(
        settings, local_step=settings.local_step * t**2 / s, server_step=settings.server_step * t,
        alpha=settings.alpha * s / t, beta=settings.beta * s / t,
    )  # fmt: skip
    assert guarantee(other, rescaled, noise).bound == pytest.approx(guarantee(c, settings, noise).bound * s / t)
    assert follow(other, rescaled, noise).bound == pytest.approx(follow(c, settings, noise).bound * s / t)


KNOWN = Constants(
    smoothness=2.0, gap=3.0, gradient_norm=1.0, client_norm=1.5, clients=10, dim=4, heterogeneity=0.5,
    component_norm=2.5, component_heterogeneity=0.8,
)  # fmt: skip
NOISE = Noise(sampling=0.01, privacy=0.03)


def test_closed_form_with_one_step_by_hand():
    s = Settings("one_step", 1.0, alpha=1.0, beta=0.5, server_step=0.1, rounds=40)
    # R: the start's 1.5, more than alpha Lambda eta/(beta - Lambda eta) = .2/.3
    by_hand = 3 / (0.1 * 40) + 2 * 1.5 + 2 * 0.5 * math.sqrt(0.04 * 40) + 0.1 * 2 / 2
    assert guarantee(KNOWN, s, NOISE).bound == pytest.approx(by_hand, rel=1e-12)
    assert guarantee(KNOWN, s, NOISE).settings == {"memory_error": 1.5, "initial_factor": 1.0}


def test_closed_form_after_a_warmup_by_hand():
    s = Settings("one_step", 1.0, alpha=1.0, beta=0.5, server_step=0.1, rounds=42, warmup_rounds=2)
    R = 1.5 * (1 - 0.5 / 2.5)
    R *= 1 - 0.5 / (1 + R)
    by_hand = 3 / (0.1 * 40) + 2 * R + 2 * 0.5 * math.sqrt(0.04 * 42) + 0.1 * 2 / 2
    assert guarantee(KNOWN, s, NOISE).bound == pytest.approx(by_hand, rel=1e-12)


def test_closed_form_where_memories_overshoot_by_hand():
    s = Settings("one_step", 1.0, alpha=0.01, beta=1.0, server_step=0.45, rounds=40, memory="local_updates")
    assert guarantee(KNOWN, s, NOISE).terms["memory"] == pytest.approx(2 * (0.81 + 0.9), rel=1e-11)


GROWTH = (math.exp(0.2) - 1) / 0.2  # with gamma L = .2


@pytest.mark.parametrize("local, spread, start", [("gd", 0.5, 1.5 * GROWTH), ("ig", 0.8, 1.5 + 0.2 * GROWTH * 2.5)])
def test_closed_form_with_heterogeneity_by_hand(local, spread, start):
    s = Settings(local, 0.1, alpha=1.0, beta=0.5, server_step=0.01, rounds=30)
    assert s.server_step <= math.sqrt(spread) / (4 * 2 * math.sqrt(2 * 2) * 0.1 * 30)
    drift = 4 * 2 * 0.1 * math.sqrt(2 * 2 * spread)
    by_hand = math.e * 3 / (0.01 * 30) + 2 * start + 2 * 0.5 * math.sqrt(0.04 * 30) + 0.01 * 2 / 2 + drift
    assert guarantee(KNOWN, s, NOISE).bound == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("local", ["gd", "ig"])
@pytest.mark.parametrize("spread, eta", [(0.0, 0.01), (1e-6, 0.01), (0.5, 0.1)])
def test_closed_form_with_little_heterogeneity_or_long_runs_by_hand(local, spread, eta):
    known = dataclasses.replace(KNOWN, heterogeneity=spread, component_heterogeneity=spread)
    s = Settings(local, 0.1, alpha=1.0, beta=0.5, server_step=eta, rounds=30)
    assert eta > math.sqrt(spread) / (4 * 2 * math.sqrt(2 * 2) * 0.1 * 30)
    c = 4 * 2**2 * 0.1 * eta * 30
    terms = guarantee(known, s, NOISE).terms
    assert terms["drift"] == pytest.approx(4 * 2 * 0.1 * (2 * spread / c + c / 2), rel=1e-12)
    assert terms["initial"] == pytest.approx(math.e * 3 / (eta * 30), rel=1e-12)


@pytest.mark.parametrize("local, spread", [("gd", 0.5), ("ig", 0.8), ("gd", 0.0)])
def test_round_by_round_with_several_steps_literally(local, spread):
    """A run of one warm-up and three other rounds, term by term, from the recursion V' <= (1 + a) V - eta g + eta b."""
    known = dataclasses.replace(KNOWN, heterogeneity=spread, component_heterogeneity=spread)
    s = Settings(local, 0.1, alpha=1.0, beta=0.5, server_step=0.05, rounds=4, warmup_rounds=1)
    A = 2 * (GROWTH - 1) if local == "gd" else 2 * 0.2 * GROWTH
    split = max(math.sqrt(2 * 2 * spread), A * 2 * 0.05 * 3)
    a, drift = A * 2 * 0.05 / split, A * (2 * spread / split + split / 2)
    r, variance = (1.5 * GROWTH if local == "gd" else 1.5 + 0.2 * GROWTH * 2.5), 0.0
    budget, total = 3.0 / 0.05, 0.0
    for k in range(4):
        variance += 0.01 * (r / (1 + r)) ** 2 + 0.03
        r -= 0.5 * r / (1 + r)
        if k > 0:
            weight = (1 + a) ** -k
            budget += weight * (2 * r + 2 * 0.5 * math.sqrt(variance) + 0.05 * 2 / 2 + drift)
            total += weight
            r += 2 * GROWTH * 0.05
    found = follow(known, s, NOISE)
    assert found.bound == pytest.approx(budget / total, rel=1e-12)
    assert found.memory_error[-1] == pytest.approx(r, rel=1e-12)
    assert found.tracking_error[-1] == pytest.approx(0.5 * math.sqrt(variance), rel=1e-12)


def test_broken_conditions_are_named_and_a_bound_that_does_not_hold_is_not_finite():
    too_fast = Settings("gd", 0.3, alpha=0.1, beta=0.5, server_step=0.2, rounds=10)
    found = guarantee(KNOWN, too_fast, NOISE)
    assert not found.holds and [text.split(":")[0] for text in found.broken] == ["server_step", "local_step"]
    assert found.bound == math.inf


def test_a_constant_that_is_missing_is_asked_for():
    known = dataclasses.replace(KNOWN, heterogeneity=None, component_norm=None)
    for local, name in (("gd", "heterogeneity"), ("ig", "component_norm")):
        with pytest.raises(fn.UserError, match=f"{local} needs constants.{name}"):
            guarantee(known, Settings(local, 0.1, 1.0, 0.5, 0.01, 10), NOISE)
    assert guarantee(known, Settings("one_step", 0.1, 1.0, 0.5, 0.01, 10), NOISE).holds


# What the guarantees are computed from.

bad_sizes = st.sampled_from([0.0, -1.0, -1e-9, math.nan, math.inf, -math.inf])
bad_or_zero = bad_sizes.filter(lambda value: value != 0)


@patient
@given(st.data())
def test_bad_constants_are_refused(data):
    name = data.draw(st.sampled_from([field.name for field in dataclasses.fields(Constants)]))
    may_be_zero = name not in ("smoothness", "client_norm", "clients", "dim")
    value = data.draw(bad_or_zero if may_be_zero else bad_sizes)
    if name in ("clients", "dim"):
        value = data.draw(st.integers(-5, 0))
    with pytest.raises(fn.UserError, match=name):
        dataclasses.replace(KNOWN, **{name: value})


@patient
@given(st.data())
def test_bad_settings_are_refused(data):
    good = Settings("gd", 0.1, 0.1, 0.5, 0.1, 10, 3)
    name = data.draw(st.sampled_from([field.name for field in dataclasses.fields(Settings)]))
    kinds = {
        "local": st.sampled_from(["sgd", "", "GD"]), "memory": st.sampled_from(["", "updates"]), "alpha": bad_or_zero,
        "rounds": st.integers(-5, 0), "warmup_rounds": st.integers(-5, -1) | st.integers(10, 20),
    }  # fmt: skip
    with pytest.raises(fn.UserError, match=name):
        dataclasses.replace(good, **{name: data.draw(kinds.get(name, bad_sizes))})


def test_a_mean_of_gradients_is_no_longer_than_the_longest():
    with pytest.raises(fn.UserError, match="gradient_norm is the norm of a mean"):
        dataclasses.replace(KNOWN, gradient_norm=1.6)


@pytest.mark.parametrize("local, steps", [("one_step", 2), ("ig", 3), ("gd", 1)])
def test_settings_and_local_steps_must_agree(local, steps):
    with pytest.raises(fn.UserError, match="does not go with"):
        Settings(local, 0.1, 0.1, 0.5, 0.1, 10).algorithm(steps)


def test_only_participation_that_a_theorem_covers():
    assert covered_rate(fn.full(), 8) == covered_rate(fn.fixed_size(8), 8) == covered_rate(fn.full(), 8, 8) == 1
    assert covered_rate(fn.poisson(0.3), 8) == 0.3
    for participation, least, why in [
        (fn.fixed_size(3), 1, "fixed_size"),
        (fn.poisson(0.3, "sleep"), 1, "sleep"),
        (fn.poisson(0.3), 2, "min_cohort"),
        (fn.poisson(0.3), 2, "min_survivors"),
    ]:
        with pytest.raises(fn.UserError, match=why):
            covered_rate(participation, 8, least)


def accepts(squares, variance):
    """Whether the mean of the squares is the variance, within four standard errors."""
    return abs(squares.mean() - variance) <= 4 * squares.std(ddof=1) / math.sqrt(len(squares))


@pytest.mark.long
@pytest.mark.parametrize("p, trust", [(0.5, None), (0.25, None), (1.0, "central"), (0.5, "central"), (0.5, "local"),
                                      (0.25, "secagg"), (1.0, "local")])  # fmt: skip
def test_round_noise_is_what_the_engine_adds(p, trust):
    """alpha = 0 makes every message one long, so that sampling has its full variance."""
    M, d, beta, rounds = 8, 5, 0.3, 600
    problem = fn.random_quadratic(M, d, seed=1)
    algorithm = fn.fed_normec(fn.gd(0.1), alpha=0.0, beta=beta, server_step=1e-3)
    participation = fn.poisson(p) if p < 1 else fn.full()
    privacy = None if trust is None else fn.Privacy(noise_std=0.9, trust=trust)
    mechanism = privacy and planned(problem, algorithm, participation, privacy, rounds).mechanism
    errors = [np.zeros(d)]
    for r in fn.simulate(problem, algorithm, participation, privacy, rounds=rounds, seed=5, on=fn.Threads(1)):
        errors.append((r.server.memory - r.memory.mean(0)).numpy().copy())
    squares = (np.diff(errors, axis=0) ** 2).sum(1) / beta**2
    noise = round_noise(M, d, p, mechanism)
    assert accepts(squares, noise.variance)
    assert not accepts(squares, noise.variance * 2 / 3)
    assert not accepts(squares, noise.variance * 3 / 2)


def test_constants_of_a_quadratic_literally():
    problem = fn.random_quadratic(4, 3, parts=2, heterogeneity=1.0, seed=2)
    A, b, x = problem.curvatures.numpy(), problem.minimisers.numpy(), np.array([1.0, -2.0, 0.5])
    slopes = [[A[i, j] @ (x - b[i, j]) for j in range(2)] for i in range(4)]

    def value(at, clients):
        return np.mean([(at - b[i, j]) @ A[i, j] @ (at - b[i, j]) / 2 for i in clients for j in range(2)])

    def least(clients):
        pulls = [A[i, j] @ b[i, j] for i in clients for j in range(2)]
        return value(np.linalg.solve(A[clients].mean((0, 1)), np.mean(pulls, axis=0)), clients)

    everyone = list(range(4))
    found = constants_of(problem, torch.from_numpy(x))
    literal = Constants(
        smoothness=max(np.linalg.eigvalsh(A[i, j])[-1] for i in everyone for j in range(2)),
        gap=value(x, everyone) - least(everyone),
        gradient_norm=np.linalg.norm(np.mean(slopes, axis=(0, 1))),
        client_norm=max(np.linalg.norm(np.mean(each, axis=0)) for each in slopes),
        clients=4,
        dim=3,
        heterogeneity=least(everyone) - np.mean([least([i]) for i in everyone]),
        component_norm=max(np.mean([np.linalg.norm(g) for g in each]) for each in slopes),
        component_heterogeneity=least(everyone),
    )
    assert dataclasses.asdict(found) == pytest.approx(dataclasses.asdict(literal), rel=1e-9)


def test_constants_of_a_logistic_regression_with_unequal_clients_literally():
    rng, x = np.random.default_rng(0), np.array([0.5, -1.0])
    features = [rng.standard_normal((n, 2)) for n in (5, 8, 13)]
    labels = [rng.choice([-1.0, 1.0], len(a)) for a in features]
    for a, y in zip(features, labels, strict=True):
        a[-1], y[-1] = a[0], -y[0]  # not separable
    problem = fn.Logistic([torch.from_numpy(a) for a in features], [torch.from_numpy(y) for y in labels])

    def client(i, w):
        return np.mean([np.log1p(np.exp(-y * a @ w)) for a, y in zip(features[i], labels[i], strict=True)])

    def slopes(i):
        return [-y * a / (1 + np.exp(y * a @ x)) for a, y in zip(features[i], labels[i], strict=True)]

    def least(value):
        return minimize(value, np.zeros(2), method="BFGS", options={"gtol": 1e-10}).fun

    def all_of_it(w):
        return np.mean([client(i, w) for i in range(3)])

    infimum = least(all_of_it)
    means = [np.mean(slopes(i), axis=0) for i in range(3)]
    literal = Constants(
        smoothness=max((a * a).sum(1).max() for a in features) / 4,
        gap=all_of_it(x) - infimum,
        gradient_norm=np.linalg.norm(np.mean(means, axis=0)),
        client_norm=max(map(np.linalg.norm, means)),
        clients=3,
        dim=2,
        heterogeneity=infimum - np.mean([least(lambda w, i=i: client(i, w)) for i in range(3)]),
        component_norm=max(np.mean([np.linalg.norm(g) for g in slopes(i)]) for i in range(3)),
        component_heterogeneity=infimum,
    )
    found = constants_of(problem, torch.from_numpy(x))
    assert dataclasses.asdict(found) == pytest.approx(dataclasses.asdict(literal), rel=1e-6)
    only = constants_of(problem, torch.from_numpy(x), "gd")
    assert only.heterogeneity == found.heterogeneity and only.component_norm is None


def test_a_start_where_f_is_not_finite_has_no_gap():
    problem = fn.Quadratic(torch.ones(2, 1, 1, 1), torch.zeros(2, 1, 1))
    with pytest.raises(fn.UserError, match="not finite at the start"):
        constants_of(problem, torch.tensor([1e25]))


def test_the_gap_leaves_room_for_the_rounding_of_float32():
    exact = fn.random_quadratic(7, 30, heterogeneity=3.0, seed=4)
    single = fn.Quadratic(exact.curvatures.float(), exact.minimisers.float())
    double = fn.Quadratic(single.curvatures.double(), single.minimisers.double())
    x0 = torch.full((30,), 2.0)
    assert constants_of(single, x0).gap >= constants_of(double, x0.double()).gap


def test_constants_of_an_unknown_problem_are_asked_for():
    with pytest.raises(fn.UserError, match="constants of this problem are not known"):
        constants_of(object(), torch.zeros(1))


def test_measure_literally():
    problem = fn.random_quadratic(70, 3, parts=2, seed=4)  # more than a tile
    algorithm = fn.fed_normec(fn.gd(0.2, 3), alpha=0.1, beta=0.3, server_step=0.1)
    *_, r = fn.simulate(problem, algorithm, fn.poisson(0.5), fn.Privacy(noise_std=1.0), rounds=4, seed=1)
    A, b, x = (t.numpy() for t in (problem.curvatures, problem.minimisers, r.x))
    errors, slopes = [], []
    for i in range(70):
        path, met = x.copy(), []
        for _ in range(3):
            met.append(np.mean([A[i, j] @ (path - b[i, j]) for j in range(2)], axis=0))
            path = path - 0.2 / 3 * met[-1]
        errors.append(np.linalg.norm((x - path) / 0.2 - r.memory[i].numpy()))
        slopes.append(met[0])
    tracking = np.linalg.norm(r.server.memory.numpy() - r.memory.numpy().mean(0))
    literal = (max(errors), tracking, np.linalg.norm(np.mean(slopes, axis=0)))
    assert tuple(measure(problem, algorithm, r)) == pytest.approx(literal, rel=1e-9)


# A sample of the verification, one case per group and every style; and that each of its checks can fail.

SAMPLE = [len(verification.GROUPS) * (7 * g % 15) + g for g in range(len(verification.GROUPS))]


@pytest.mark.long
@pytest.mark.parametrize("index", SAMPLE)
def test_what_is_measured_is_below_what_is_promised(index):
    found = verification.outcome(index, seeds=5)
    forms = 1 if found.style == "beyond" else 2
    assert [check.quantity for check in found.checks][-3 * forms :] == ["memory", "tracking", "gradient"] * forms
    assert not found.violated


@pytest.mark.long
def test_cases_cover_every_group_and_every_setting():
    cases = [
        verification.case(i) for i in range(0, verification.CASES) if verification.GROUPS[i % 24].kind == "quadratic"
    ]
    counts = {g: sum(c.group == g for c in cases) for g in verification.GROUPS if g.kind == "quadratic"}
    assert len(counts) == 12 and min(counts.values()) >= 8
    assert {c.local_steps for c in cases} == {1, 2, 5, 20} and {c.batch_size for c in cases} == {1, 2, 3}
    assert {c.p for c in cases} == {1.0, 0.5, 0.25}
    assert {c.privacy.trust for c in cases if c.privacy} == {"central", "local", "secagg"}
    starts = {(c.settings.memory, c.settings.warmup_rounds > 0) for c in cases}
    assert starts == {("zero", False), ("zero", True), ("local_updates", False)}
    assert not any(c.privacy and c.settings.memory == "local_updates" for c in cases)
    overshoots = [c.settings.beta > 5 * c.settings.alpha for c in cases]
    assert 0.2 < np.mean(overshoots) < 0.8


def violated(case, run, promises):
    return {(check.quantity, check.form) for check in verification.compare(case, run, promises) if not check.holds}


def doctored(promises, **factors):
    return {
        form: promise._replace(**{name: getattr(promise, name) * factor for name, factor in factors.items()})
        for form, promise in promises.items()
    }


def by_hand(problem, x0, settings):
    group = verification.Group("quadratic", settings.local, noisy=False, sampled=False)
    return verification.Case(
        0, 0, group, "limit", problem, x0, constants_of(problem, x0), settings, 1, 1, 1.0, None, None
    )  # fmt: skip


PARABOLAS = fn.Quadratic(torch.ones(2, 1, 1, 1).double(), torch.zeros(2, 1, 1).double())


def test_the_printed_rule_for_the_server_step_is_rejected_and_the_corrected_one_is_tight():
    """alpha = .01, beta = 1, R = 1: the printed rule allows eta = beta R/(L (alpha + R)). An error of .09 overshoots to
    .81, and then the model moves by eta."""
    x0 = torch.tensor([math.sqrt(0.01) - 0.01]).double()
    printed = by_hand(PARABOLAS, x0, Settings("one_step", 1.0, 0.01, 1.0, 1 / 1.01, 60))
    run, promises = verification.run(printed), verification.promised(printed)
    assert run.memory.max() == pytest.approx(0.81 + 1 / 1.01)
    assert not violated(printed, run, promises)  # the corrected R for that step
    claim = {"printed": promises["closed form"]._replace(memory=np.ones(61))}
    assert violated(printed, run, claim) == {("memory", "printed")}

    step = largest_server_step(1.0, 0.01, 1.0, 1.0)
    corrected = by_hand(PARABOLAS, x0, Settings("one_step", 1.0, 0.01, 1.0, step, 60))
    run, promises = verification.run(corrected), verification.promised(corrected)
    assert promises["closed form"].memory[-1] == pytest.approx(1.0)
    assert run.memory.max() == pytest.approx(1.0)
    assert not violated(corrected, run, promises)
    assert violated(corrected, run, doctored(promises, memory=1 - 1e-6)) == {
        ("memory", "closed form"), ("memory", "round by round"),
    }  # fmt: skip


def test_half_of_the_memory_error_is_rejected_where_memories_only_follow():
    """alpha > beta, from exact memories, far from the minimum: the error creeps up to alpha L eta/(beta - L eta)."""
    case = by_hand(
        PARABOLAS, torch.tensor([100.0]).double(), Settings("one_step", 1.0, 2.0, 0.5, 0.2, 90, memory="local_updates")
    )
    run, promises = verification.run(case), verification.promised(case)
    assert run.memory.max() == pytest.approx(2.0 * 0.2 / 0.3, rel=1e-2)
    assert not violated(case, run, promises)
    assert {q for q, _ in violated(case, run, doctored(promises, memory=0.5))} == {"memory"}


@pytest.mark.long
@pytest.mark.parametrize("local", LOCALS)
def test_half_of_the_noise_variance_is_rejected(local):
    """Where all tracking error is noise, in enough dimensions that its length hardly varies."""
    group = verification.GROUPS.index(verification.Group("quadratic", local, noisy=True, sampled=False))
    case = next(
        c
        for c in (verification.case(24 * turn + group) for turn in range(15))
        if c.problem.dim >= 10 and c.style != "beyond"
    )
    run, noise = verification.run(case, seeds=8), case.noise
    assert not violated(case, run, verification.promised(case))
    halved = verification.promised(case, Noise(noise.sampling, noise.privacy / 2))
    assert {("tracking", "closed form"), ("tracking", "round by round")} <= violated(case, run, halved)


def test_the_bound_on_the_gradient_is_rejected_a_fifth_below_its_value():
    """One example that is far on the wrong side: the slope is 1 all the way, and the model covers the whole gap."""
    problem = fn.Logistic([torch.ones(1, 1).double()] * 2, [torch.ones(1).double()] * 2)
    settings = Settings("one_step", 1.0, 0.1, 0.1, 0.1, 440, memory="local_updates")
    case = by_hand(problem, torch.tensor([-50.0]).double(), settings)
    run, promises = verification.run(case), verification.promised(case)
    assert not violated(case, run, promises)
    assert {q for q, _ in violated(case, run, doctored(promises, gradient=0.8))} == {"gradient"}


def test_something_that_is_not_a_number_is_rejected():
    case = by_hand(PARABOLAS, torch.tensor([1.0]).double(), Settings("one_step", 1.0, 0.1, 0.5, 0.1, 10))
    promises, good = verification.promised(case), verification.run(case)
    for name in good._fields:
        broken = getattr(good, name).copy()
        broken[0, 5] = math.nan
        assert {q for q, _ in violated(case, good._replace(**{name: broken}), promises)} == {name}


def test_the_script_names_what_is_violated(monkeypatch, capsys):
    index = SAMPLE[0]
    good = verification.outcome(index)
    bad = good._replace(checks=[check._replace(holds=False) for check in good.checks])
    for result, code in ((good, 0), (bad, 1)):
        monkeypatch.setattr(verification, "outcome", lambda *_, result=result: result)
        monkeypatch.setattr("sys.argv", ["verify.py", "--only", str(index)])
        with pytest.raises(SystemExit) as end:
            verification.main()
        assert end.value.code == code
        assert (f"VIOLATED: case {index}" in capsys.readouterr().out) == bool(code)
