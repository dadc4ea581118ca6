"""The paper's statements as printed: against its formulas typed out, and against each other where they should agree."""

import inspect
import math
from math import exp, log, sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednormec.errors import UserError
from fednormec.theory import printed
from fednormec.theory.guarantee import Guarantee

PROBLEM = {"smoothness": 0.8, "gap": 3.0, "heterogeneity": 2.5, "clients": 20}
SAMPLING = {"p": 0.25, "noise_std": 0.7}
SCHEDULE = {"alpha": 0.3, "memory_scale": 1.5, "beta_scale": 0.4, "last_round": 99}
PRIVACY = {"cohort": 5, "dim": 650, "epsilon": 4.0, "delta": 1e-5, "local_step": 0.1, "last_round": 999, "c": 1.2}
THEOREM_1 = {
    **PROBLEM, **SAMPLING, "memory_error": 0.9, "steps": 5, "alpha": 0.3, "beta": 0.2, "local_step": 0.625,
    "server_step": 0.002, "last_round": 99,
}  # fmt: skip
THEOREM_2 = {k: v for k, v in THEOREM_1.items() if k != "steps"} | {"component_heterogeneity": 4.0}
RATE = {**PROBLEM, **SAMPLING, **SCHEDULE}
ONE_STEP_RATE = {k: v for k, v in RATE.items() if k != "heterogeneity"}
UTILITY = {**PROBLEM, **PRIVACY}
EVERY = {
    printed.theorem_local_gd: THEOREM_1,
    printed.theorem_local_ig: THEOREM_2,
    printed.convergence_local_gd: RATE | {"steps": 5},
    printed.convergence_local_ig: RATE | {"steps": 5, "component_heterogeneity": 4.0},
    printed.convergence_one_step: ONE_STEP_RATE,
    printed.utility_one_step: UTILITY,
    printed.utility_local_gd: UTILITY | {"steps": 5},
    printed.utility_local_ig: UTILITY | {"steps": 5, "component_heterogeneity": 4.0},
}

numbers = st.floats(0.05, 20.0)
probabilities = st.floats(0.05, 1.0)
rounds = st.integers(0, 100_000)


def bound_of_theorem(L, V, R, Delta, M, p, sigma, T, beta, gamma, eta, K):
    """Theorem 1, as the LaTeX has it."""
    B = 2 * (p - 1) ** 2 / p + 2 * (1 - p) + 2 * sigma**2 / p
    drift = (T != 1) * 8 * L * sqrt(2 * L) * sqrt(Delta)
    return 3 / (K + 1) * V / eta + 2 * R + 2 * sqrt(beta**2 * B / M * (K + 1)) + eta * L / 2 + gamma * drift


@settings(max_examples=50, deadline=None)
@given(numbers, numbers, numbers, numbers, probabilities, numbers, st.integers(1, 3), numbers, rounds)
def test_theorem_1_is_its_formula(L, V, R, Delta, p, sigma, T, eta, K):
    said = printed.theorem_local_gd(
        smoothness=L, gap=V, memory_error=R, heterogeneity=Delta, clients=7, p=p, noise_std=sigma, steps=T,
        alpha=0.1, beta=0.3, local_step=0.2, server_step=eta, last_round=K,
    )  # fmt: skip
    assert math.isclose(said.bound, bound_of_theorem(L, V, R, Delta, 7, p, sigma, T, 0.3, 0.2, eta, K), rel_tol=1e-12)


def test_theorem_2_is_theorem_1_with_the_components_drift():
    said, gd = printed.theorem_local_ig(**THEOREM_2), printed.theorem_local_gd(**THEOREM_1)
    extra = 0.625 * 4 * 0.8 * sqrt(2 * 0.8) * sqrt(4.0)
    assert math.isclose(said.terms.pop("component_drift"), extra, rel_tol=1e-14)
    assert said.terms == gd.terms


@settings(max_examples=50, deadline=None)
@given(numbers, numbers, numbers, numbers, probabilities, numbers, numbers, numbers, numbers, rounds)
def test_convergence_corollaries_are_their_formulas(L, V, Delta, alpha, p, sigma, D1, D2, comp, K):
    M, n = 7, K + 1
    B = 2 * p * (1 - 1 / p) ** 2 + 2 * (1 - p) + 2 * sigma**2 / p
    same = {"smoothness": L, "gap": V, "clients": M, "p": p, "noise_std": sigma, "alpha": alpha}
    same |= {"memory_scale": D1, "beta_scale": D2, "last_round": K}

    eta = D1 * D2 / (4 * L * (alpha + D1))
    A1 = 3 * V / eta + 2 * D1 + 2 * sqrt(B) * D2 / sqrt(M)
    said = printed.convergence_one_step(**same)
    assert math.isclose(said.bound, A1 / n ** (1 / 6) + eta * L / 2 / n ** (5 / 6), rel_tol=1e-12)
    assert math.isclose(said.settings["A_1"], A1, rel_tol=1e-12)

    eta = min(Delta / (2 * sqrt(2 * L)), eta)
    A1 = 3 * V / eta + 2 * D1 + 2 * sqrt(B) * D2 / sqrt(M) + 4 * sqrt(2 * L) * sqrt(Delta)
    said = printed.convergence_local_gd(**same, heterogeneity=Delta, steps=2)
    assert math.isclose(said.bound, A1 / n ** (1 / 8) + eta * L / 2 / n ** (7 / 8), rel_tol=1e-12)
    assert math.isclose(said.settings["A_2"], eta * L / 2, rel_tol=1e-12)

    A1 += 4 * sqrt(2 * L) * sqrt(Delta) + 4 * sqrt(2 * L) * sqrt(comp)  # 8 in all, and the components' 4
    said = printed.convergence_local_ig(**same, heterogeneity=Delta, component_heterogeneity=comp, steps=2)
    assert math.isclose(said.bound, A1 / n ** (1 / 8) + eta * L / 2 / n ** (7 / 8), rel_tol=1e-12)


@settings(max_examples=50, deadline=None)
@given(numbers, numbers, numbers, st.integers(1, 20), st.integers(1, 10**6), numbers, numbers, rounds, numbers, numbers)
def test_utility_corollaries_are_their_formulas(L, V, Delta, cohort, d, eps, gamma, K, c, comp):
    """The last inequality of the proof without O, in its other form: with beta-hat put in."""
    M, delta = 20, exp(-eps)
    B1 = 2 * cohort / M * ((1 - M / cohort) ** 2 + M / cohort - 1)
    B2 = 2 * c**2 * cohort / M * log(1 / delta) / eps**2
    root = sqrt(V) / sqrt(gamma) * (B2 / M) ** 0.25
    beta = sqrt(3 * V / gamma) * (M / B2) ** 0.25
    alpha = R = 1.5 * d**0.25 * root
    last = 2 * sqrt(3) * root + 4 * sqrt(3) * root + 2 * R + 2 * beta * sqrt(B1 / (M * (K + 1)))
    last += gamma * L * beta / 8 / (K + 1)
    order = max(alpha, 2) * sqrt(L) * sqrt(V) * (d * cohort / M**2 * log(1 / delta) / eps**2) ** 0.25
    same = {"smoothness": L, "gap": V, "heterogeneity": Delta, "clients": M, "cohort": cohort, "dim": d}
    same |= {"epsilon": eps, "delta": delta, "local_step": gamma, "last_round": K, "c": c, "scale": 1.5}

    drift, plateau = gamma * 8 * L * sqrt(2 * L) * sqrt(Delta), sqrt(L) * sqrt(Delta)
    more = gamma * 4 * L * sqrt(2 * L) * sqrt(comp), sqrt(L) * sqrt(comp)
    for said, bound, inside in (
        (printed.utility_one_step(**same), last, order),
        (printed.utility_local_gd(**same, steps=2), last + drift, order + plateau),
        (
            printed.utility_local_ig(**same, steps=2, component_heterogeneity=comp),
            last + drift + more[0],
            order + plateau + more[1],
        ),
    ):
        assert math.isclose(said.bound, bound, rel_tol=1e-12)
        assert math.isclose(said.settings["order"], inside, rel_tol=1e-12)


def at_schedule(said: Guarantee, **problem):
    """Theorem 1 at the schedule that a corollary fixes."""
    chosen = {k: v for k, v in said.settings.items() if k in inspect.signature(printed.theorem_local_gd).parameters}
    return printed.theorem_local_gd(**problem | SAMPLING | {"alpha": SCHEDULE["alpha"], "last_round": 99} | chosen)


def test_the_convergence_corollaries_are_theorem_1_at_their_schedules():
    for build, given_, steps in (
        (printed.convergence_one_step, ONE_STEP_RATE, 1),
        (printed.convergence_local_gd, RATE | {"steps": 5}, 5),
    ):
        said = build(**given_)
        theorem = at_schedule(said, **PROBLEM, steps=steps)
        assert said.terms.keys() | {"drift"} == theorem.terms.keys()
        for name, value in theorem.terms.items():
            assert math.isclose(said.terms.get(name, 0.0), value, rel_tol=1e-12), name
        assert next(c for c in theorem.conditions if c.name == "server_step_memory").holds


@pytest.mark.parametrize("build", [printed.utility_one_step, printed.utility_local_gd])
def test_the_utility_corollaries_are_theorem_1_but_for_splitting_a_root(build):
    """sqrt(B) became sqrt(B_1) + sqrt(B_2 (K+1)): no smaller, and equal if everyone takes part."""
    for cohort in (5, 20):
        said = build(**EVERY[build] | {"cohort": cohort})
        chosen = {k: said.settings[k] for k in ("p", "noise_std", "alpha", "beta", "memory_error", "server_step")}
        theorem = printed.theorem_local_gd(
            **PROBLEM, **chosen, local_step=0.1, last_round=999, steps=1 if build is printed.utility_one_step else 5
        )
        if cohort == 20:
            assert math.isclose(said.bound, theorem.bound, rel_tol=1e-12)
        else:
            assert theorem.bound < said.bound < 1.5 * theorem.bound


def test_reductions():
    full = THEOREM_1 | {"p": 1.0, "noise_std": 0.0}
    assert printed.theorem_local_gd(**full).terms["noise"] == 0
    assert printed.theorem_local_gd(**full | {"steps": 1}).terms["drift"] == 0
    assert printed.theorem_local_gd(**full).terms["drift"] > 0
    assert printed.theorem_local_ig(**THEOREM_2 | {"heterogeneity": 0.0}).terms["drift"] == 0
    assert printed.convergence_one_step(**ONE_STEP_RATE | {"p": 1.0, "noise_std": 0.0}).terms["noise"] == 0
    assert printed.utility_one_step(**UTILITY | {"cohort": 20}).terms["sampling_noise"] == 0


@pytest.mark.parametrize(
    ("build", "rate"),
    [
        (printed.convergence_one_step, 1 / 6),
        (printed.convergence_local_gd, 1 / 8),
        (printed.convergence_local_ig, 1 / 8),
    ],
)
def test_the_bound_falls_at_the_printed_rate(build, rate):
    near, far = (build(**EVERY[build] | {"last_round": 2**e - 1}).bound for e in (60, 80))
    assert abs(math.log2(near / far) / 20 - rate) < 1e-9


def test_utility_neither_needs_nor_gains_from_more_rounds():
    terms = [printed.utility_one_step(**UTILITY | {"last_round": k}).terms for k in (9, 10**6)]
    for name in ("initial_alpha", "initial", "memory", "privacy_noise"):
        assert terms[0][name] == terms[1][name]
    for name in ("sampling_noise", "server_step"):
        assert terms[0][name] > 100 * terms[1][name]


def test_without_heterogeneity_the_printed_corollaries_leave_no_step():
    for build in (printed.convergence_local_gd, printed.convergence_local_ig):
        said = build(**EVERY[build] | {"heterogeneity": 0.0})
        assert said.settings["server_step"] == 0
        assert math.isinf(said.bound)


HOLDS = {
    printed.theorem_local_gd: {},
    printed.theorem_local_ig: {},
    printed.convergence_local_gd: {},
    printed.convergence_local_ig: {},
    printed.convergence_one_step: {},
    printed.utility_one_step: {"heterogeneity": 1e3, "local_step": 0.625},
    printed.utility_local_gd: {"heterogeneity": 1e3},
    printed.utility_local_ig: {"heterogeneity": 1e3},
}
BREAKS = [
    (printed.theorem_local_gd, "local_step", {"local_step": 0.6}),
    (printed.theorem_local_gd, "memory_rate", {"beta": 1.2}),
    (printed.theorem_local_gd, "server_step_heterogeneity", {"heterogeneity": 0.1}),
    (printed.theorem_local_gd, "server_step_memory", {"memory_error": 0.001}),
    (printed.theorem_local_ig, "local_step", {"local_step": 0.6}),
    (printed.theorem_local_ig, "memory_rate", {"beta": 1.2}),
    (printed.theorem_local_ig, "server_step_heterogeneity", {"heterogeneity": 0.1}),
    (printed.theorem_local_ig, "server_step_memory", {"memory_error": 0.01}),
    (printed.convergence_local_gd, "steps", {"steps": 1}),
    (printed.convergence_local_gd, "memory_rate", {"beta_scale": 100.0}),
    (printed.convergence_local_ig, "steps", {"steps": 1}),
    (printed.convergence_local_ig, "memory_rate", {"beta_scale": 100.0}),
    (printed.convergence_one_step, "steps", {"steps": 2}),
    (printed.convergence_one_step, "memory_rate", {"beta_scale": 100.0}),
    (printed.utility_one_step, "steps", {"steps": 2}),
    (printed.utility_one_step, "local_step", {"local_step": 0.6}),
    (printed.utility_one_step, "short_local_step", {"heterogeneity": 0.1}),
    (printed.utility_one_step, "memory_rate", {"last_round": 0}),
    (printed.utility_local_gd, "steps", {"steps": 1}),
    (printed.utility_local_gd, "local_step", {"local_step": 0.63}),
    (printed.utility_local_gd, "short_local_step", {"heterogeneity": 0.1}),
    (printed.utility_local_gd, "memory_rate", {"last_round": 0}),
    (printed.utility_local_ig, "steps", {"steps": 1}),
    (printed.utility_local_ig, "local_step", {"local_step": 0.63}),
    (printed.utility_local_ig, "short_local_step", {"heterogeneity": 0.1}),
    (printed.utility_local_ig, "memory_rate", {"last_round": 0}),
]


@pytest.mark.parametrize("build", HOLDS, ids=lambda b: b.__name__)
def test_every_condition_can_hold_and_each_can_fail_alone(build):
    good = EVERY[build] | HOLDS[build]
    said = build(**good)
    assert said.holds, said.broken
    assert said.source.endswith("as printed")
    breaks = {name: change for b, name, change in BREAKS if b is build}
    assert breaks.keys() == {c.name for c in said.conditions}
    for name, change in breaks.items():
        assert [c.name for c in build(**good | change).conditions if not c.holds] == [name]


@pytest.mark.parametrize("build", EVERY, ids=lambda b: b.__name__)
def test_bad_numbers_get_a_sentence(build):
    bad = {"p": 0.0, "delta": 1.0, "cohort": 21, "steps": 0, "clients": 0, "dim": 0}
    for name, value in EVERY[build].items():
        for wrong in (-value, float("nan"), bad.get(name, float("inf"))):
            with pytest.raises(UserError, match=f"{name} must"):
                build(**EVERY[build] | {name: wrong})


def test_the_two_step_limits_differ_between_the_theorems():
    texts = [
        next(c.text for c in said.conditions if c.name == "server_step_memory")
        for said in (printed.theorem_local_gd(**THEOREM_1), printed.theorem_local_ig(**THEOREM_2))
    ]
    assert texts == [
        "eta <= beta R/(4L (alpha+R)): 0.002 against 0.04688",
        "eta <= beta R/(6L (alpha+R)): 0.002 against 0.03125",
    ]
