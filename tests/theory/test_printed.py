"""The paper's statements as printed: against its formulas typed out, and against each other where they should agree."""

import math
from dataclasses import asdict
from math import exp, log, sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statements import Asked, noise_of

from fednormec.errors import UserError
from fednormec.theory import printed
from fednormec.theory.guarantee import Guarantee
from fednormec.theory.printed import PaperNoise
from fednormec.theory.setting import Constants, Noise, Settings

CONSTANTS = Constants(
    smoothness=0.8, gap=3.0, gradient_norm=1.0, client_norm=1.0, clients=20, dim=650, heterogeneity=2.5,
    component_heterogeneity=4.0,
)  # fmt: skip
SETTINGS = Settings("gd", local_step=0.625, alpha=0.3, beta=0.2, server_step=0.002, rounds=100)
NOISE = noise_of(20, p=0.25, sigma=0.7)
THEOREM = Asked(CONSTANTS, SETTINGS, NOISE, {"memory_error": 0.9})
RATE = Asked(CONSTANTS, SETTINGS, NOISE, {"memory_scale": 1.5, "beta_scale": 0.4})
UTILITY = Asked(CONSTANTS, SETTINGS, PaperNoise(cohort=5, epsilon=4.0, delta=1e-5, c=1.2), {"memory_scale": 1.0}).but(
    local_step=0.1, rounds=1000
)
EVERY = {
    printed.theorem_local_gd: THEOREM,
    printed.theorem_local_ig: THEOREM.but(local="ig"),
    printed.convergence_local_gd: RATE,
    printed.convergence_local_ig: RATE.but(local="ig"),
    printed.convergence_one_step: RATE.but(local="one_step"),
    printed.utility_one_step: UTILITY.but(local="one_step"),
    printed.utility_local_gd: UTILITY,
    printed.utility_local_ig: UTILITY.but(local="ig"),
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
@given(numbers, numbers, numbers, numbers, probabilities, numbers, st.integers(1, 2), numbers, rounds)
def test_theorem_1_is_its_formula(L, V, R, Delta, p, sigma, T, eta, K):
    said = THEOREM.but(
        smoothness=L, gap=V, memory_error=R, heterogeneity=Delta, clients=7, noise=noise_of(7, p, sigma),
        local="one_step" if T == 1 else "gd", alpha=0.1, beta=0.3, local_step=0.2, server_step=eta, rounds=K + 1,
    ).of(printed.theorem_local_gd)  # fmt: skip
    assert math.isclose(said.bound, bound_of_theorem(L, V, R, Delta, 7, p, sigma, T, 0.3, 0.2, eta, K), rel_tol=1e-12)


def test_warm_up_does_not_count_among_the_theorems_rounds():
    warm = THEOREM.but(rounds=107, warmup_rounds=7)
    assert warm.of(printed.theorem_local_gd) == THEOREM.of(printed.theorem_local_gd)


def test_theorem_2_is_theorem_1_with_the_components_drift():
    said, gd = (EVERY[build].of(build) for build in (printed.theorem_local_ig, printed.theorem_local_gd))
    extra = 0.625 * 4 * 0.8 * sqrt(2 * 0.8) * sqrt(4.0)
    assert math.isclose(said.terms.pop("component_drift"), extra, rel_tol=1e-14)
    assert said.terms == gd.terms


@settings(max_examples=50, deadline=None)
@given(numbers, numbers, numbers, numbers, probabilities, numbers, numbers, numbers, numbers, rounds)
def test_convergence_corollaries_are_their_formulas(L, V, Delta, alpha, p, sigma, D1, D2, comp, K):
    M, n = 7, K + 1
    B = 2 * p * (1 - 1 / p) ** 2 + 2 * (1 - p) + 2 * sigma**2 / p
    same = RATE.but(
        smoothness=L, gap=V, clients=M, noise=noise_of(M, p, sigma), alpha=alpha, rounds=n, memory_scale=D1,
        beta_scale=D2, heterogeneity=Delta, component_heterogeneity=comp,
    )  # fmt: skip

    eta = D1 * D2 / (4 * L * (alpha + D1))
    A1 = 3 * V / eta + 2 * D1 + 2 * sqrt(B) * D2 / sqrt(M)
    said = same.of(printed.convergence_one_step)
    assert math.isclose(said.bound, A1 / n ** (1 / 6) + eta * L / 2 / n ** (5 / 6), rel_tol=1e-12)
    assert math.isclose(said.settings["A_1"], A1, rel_tol=1e-12)

    eta = min(Delta / (2 * sqrt(2 * L)), eta)
    A1 = 3 * V / eta + 2 * D1 + 2 * sqrt(B) * D2 / sqrt(M) + 4 * sqrt(2 * L) * sqrt(Delta)
    said = same.of(printed.convergence_local_gd)
    assert math.isclose(said.bound, A1 / n ** (1 / 8) + eta * L / 2 / n ** (7 / 8), rel_tol=1e-12)
    assert math.isclose(said.settings["A_2"], eta * L / 2, rel_tol=1e-12)

    A1 += 4 * sqrt(2 * L) * sqrt(Delta) + 4 * sqrt(2 * L) * sqrt(comp)  # 8 in all, and the components' 4
    said = same.of(printed.convergence_local_ig)
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
    same = UTILITY.but(
        smoothness=L, gap=V, heterogeneity=Delta, component_heterogeneity=comp, clients=M, cohort=cohort, dim=d,
        epsilon=eps, delta=delta, local_step=gamma, rounds=K + 1, c=c, memory_scale=1.5,
    )  # fmt: skip

    drift, plateau = gamma * 8 * L * sqrt(2 * L) * sqrt(Delta), sqrt(L) * sqrt(Delta)
    more = gamma * 4 * L * sqrt(2 * L) * sqrt(comp), sqrt(L) * sqrt(comp)
    for build, bound, inside in (
        (printed.utility_one_step, last, order),
        (printed.utility_local_gd, last + drift, order + plateau),
        (printed.utility_local_ig, last + drift + more[0], order + plateau + more[1]),
    ):
        said = same.of(build)
        assert math.isclose(said.bound, bound, rel_tol=1e-12)
        assert math.isclose(said.settings["order"], inside, rel_tol=1e-12)


def at_schedule(said: Guarantee, local: str) -> Guarantee:
    """Theorem 1 at the schedule that a corollary chooses."""
    chosen = {name: said.settings[name] for name in ("memory_error", "beta", "server_step", "local_step")}
    return THEOREM.but(**chosen, local=local).of(printed.theorem_local_gd)


def test_the_convergence_corollaries_are_theorem_1_at_their_schedules():
    for build in (printed.convergence_one_step, printed.convergence_local_gd):
        said = EVERY[build].of(build)
        theorem = at_schedule(said, EVERY[build].settings.local)
        assert said.terms.keys() | {"drift"} == theorem.terms.keys()
        for name, value in theorem.terms.items():
            assert math.isclose(said.terms.get(name, 0.0), value, rel_tol=1e-12), name
        assert next(c for c in theorem.conditions if c.name == "server_step_memory").holds


@pytest.mark.parametrize("build", [printed.utility_one_step, printed.utility_local_gd])
def test_the_utility_corollaries_are_theorem_1_but_for_splitting_a_root(build):
    """sqrt(B) became sqrt(B_1) + sqrt(B_2 (K+1)): no smaller, and equal if everyone takes part."""
    for cohort in (5, 20):
        asked = EVERY[build].but(cohort=cohort)
        said = asked.of(build)
        chosen = {k: said.settings[k] for k in ("alpha", "beta", "memory_error", "server_step")}
        noise = noise_of(20, said.settings["p"], said.settings["noise_std"])
        same = THEOREM.but(**chosen, noise=noise, local=asked.settings.local, local_step=0.1, rounds=1000)
        theorem = same.of(printed.theorem_local_gd)
        if cohort == 20:
            assert math.isclose(said.bound, theorem.bound, rel_tol=1e-12)
        else:
            assert theorem.bound < said.bound < 1.5 * theorem.bound


@pytest.mark.parametrize("build", EVERY, ids=lambda b: b.__name__)
def test_a_corollary_does_not_read_what_it_chooses(build):
    """Every other setting and number counts."""
    asked, usual = EVERY[build], EVERY[build].of(build)
    family = build.__name__.split("_")[0]
    chosen = {
        "theorem": set(),
        "convergence": {"local_step", "beta", "server_step"},
        "utility": {"alpha", "beta", "server_step"},
    }[family]
    for name in ("local_step", "alpha", "beta", "server_step", "rounds"):
        changed = asked.but(**{name: 2 * getattr(asked.settings, name)}).of(build)
        assert (changed == usual) == (name in chosen), name


def test_reductions():
    full = THEOREM.but(noise=Noise(0.0, 0.0))
    assert full.of(printed.theorem_local_gd).terms["noise"] == 0
    assert full.but(local="one_step").of(printed.theorem_local_gd).terms["drift"] == 0
    assert full.of(printed.theorem_local_gd).terms["drift"] > 0
    assert THEOREM.but(local="ig", heterogeneity=0.0).of(printed.theorem_local_ig).terms["drift"] == 0
    assert RATE.but(noise=Noise(0.0, 0.0)).of(printed.convergence_one_step).terms["noise"] == 0
    assert UTILITY.but(cohort=20).of(printed.utility_one_step).terms["sampling_noise"] == 0


@pytest.mark.parametrize(
    ("build", "rate"),
    [
        (printed.convergence_one_step, 1 / 6),
        (printed.convergence_local_gd, 1 / 8),
        (printed.convergence_local_ig, 1 / 8),
    ],
)
def test_the_bound_falls_at_the_printed_rate(build, rate):
    near, far = (EVERY[build].but(rounds=2**e).of(build).bound for e in (60, 80))
    assert abs(math.log2(near / far) / 20 - rate) < 1e-9


def test_utility_neither_needs_nor_gains_from_more_rounds():
    terms = [UTILITY.but(rounds=n).of(printed.utility_one_step).terms for n in (10, 10**6 + 1)]
    for name in ("initial_alpha", "initial", "memory", "privacy_noise"):
        assert terms[0][name] == terms[1][name]
    for name in ("sampling_noise", "server_step"):
        assert terms[0][name] > 100 * terms[1][name]


def test_without_heterogeneity_the_printed_corollaries_leave_no_step():
    for build in (printed.convergence_local_gd, printed.convergence_local_ig):
        said = EVERY[build].but(heterogeneity=0.0).of(build)
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
    (printed.convergence_local_gd, "steps", {"local": "one_step"}),
    (printed.convergence_local_gd, "memory_rate", {"beta_scale": 100.0}),
    (printed.convergence_local_ig, "steps", {"local": "one_step"}),
    (printed.convergence_local_ig, "memory_rate", {"beta_scale": 100.0}),
    (printed.convergence_one_step, "steps", {"local": "gd"}),
    (printed.convergence_one_step, "memory_rate", {"beta_scale": 100.0}),
    (printed.utility_one_step, "steps", {"local": "gd"}),
    (printed.utility_one_step, "local_step", {"local_step": 0.6}),
    (printed.utility_one_step, "short_local_step", {"heterogeneity": 0.1}),
    (printed.utility_one_step, "memory_rate", {"rounds": 1}),
    (printed.utility_local_gd, "steps", {"local": "one_step"}),
    (printed.utility_local_gd, "local_step", {"local_step": 0.63}),
    (printed.utility_local_gd, "short_local_step", {"heterogeneity": 0.1}),
    (printed.utility_local_gd, "memory_rate", {"rounds": 1}),
    (printed.utility_local_ig, "steps", {"local": "one_step"}),
    (printed.utility_local_ig, "local_step", {"local_step": 0.63}),
    (printed.utility_local_ig, "short_local_step", {"heterogeneity": 0.1}),
    (printed.utility_local_ig, "memory_rate", {"rounds": 1}),
]


@pytest.mark.parametrize("build", HOLDS, ids=lambda b: b.__name__)
def test_every_condition_can_hold_and_each_can_fail_alone(build):
    good = EVERY[build].but(**HOLDS[build])
    said = good.of(build)
    assert said.holds, said.broken
    assert said.source.endswith("as printed")
    breaks = {name: change for b, name, change in BREAKS if b is build}
    assert breaks.keys() == {c.name for c in said.conditions}
    for name, change in breaks.items():
        assert [c.name for c in good.but(**change).of(build).conditions if not c.holds] == [name]


@pytest.mark.parametrize("build", EVERY, ids=lambda b: b.__name__)
def test_bad_numbers_get_a_sentence(build):
    asked = EVERY[build]
    noise = asked.noise._asdict() if isinstance(asked.noise, Noise) else asdict(asked.noise)
    given_ = asdict(asked.constants) | asdict(asked.settings) | noise | asked.more
    bad = {"delta": 1.0, "cohort": 21, "clients": 0, "dim": 0, "rounds": 0}
    for name, value in given_.items():
        if isinstance(value, float | int) and value:
            for wrong in (-value, float("nan"), bad.get(name, float("inf"))):
                with pytest.raises(UserError, match=f"{name} must"):
                    asked.but(**{name: wrong}).of(build)


@pytest.mark.parametrize("build", EVERY, ids=lambda b: b.__name__)
def test_what_a_statement_cannot_do_without_is_asked_for(build):
    unknown = [] if build is printed.convergence_one_step else ["heterogeneity"]
    unknown += ["component_heterogeneity"] if build.__name__.endswith("ig") else []
    for name in ("heterogeneity", "component_heterogeneity"):
        without = EVERY[build].but(**{name: None})
        if name in unknown:
            with pytest.raises(UserError, match=f"needs constants.{name}"):
                without.of(build)
        else:
            assert without.of(build) == EVERY[build].of(build)
    zero = "gap" if build.__name__.startswith("utility") else "alpha"
    with pytest.raises(UserError, match=f"{zero} must be a positive number"):
        EVERY[build].but(**{zero: 0.0}).of(build)


def test_a_theorem_refuses_another_local_operator():
    with pytest.raises(UserError, match="of Theorem 1 must be 'one_step' or 'gd', not 'ig'"):
        THEOREM.but(local="ig").of(printed.theorem_local_gd)
    with pytest.raises(UserError, match="of Theorem 2 must be 'ig', not 'gd'"):
        THEOREM.of(printed.theorem_local_ig)


def test_the_two_step_limits_differ_between_the_theorems():
    texts = [
        next(c.text for c in said.conditions if c.name == "server_step_memory")
        for said in (EVERY[build].of(build) for build in (printed.theorem_local_gd, printed.theorem_local_ig))
    ]
    assert texts == [
        "eta <= beta R/(4L (alpha+R)): 0.002 against 0.04688",
        "eta <= beta R/(6L (alpha+R)): 0.002 against 0.03125",
    ]
