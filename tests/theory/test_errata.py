"""docs/errata.md in numbers: each slip of the paper with an example that shows it, and what holds in its place.

Formulas are typed out here, so that nothing is compared with itself.
"""

import math
import re
from dataclasses import replace
from functools import cache
from math import e, exp, log, sqrt

import numpy as np
import pytest
import torch
from paths import ROOT
from statements import Asked, noise_of

import fednormec as fn
from fednormec.core.algorithm import Server
from fednormec.core.local import Moment
from fednormec.core.participation import Weights
from fednormec.theory import printed
from fednormec.theory.setting import Constants, Noise, Settings


def line(curvature, gradients):
    """Quadratics on the line, one client each, with these gradients at 0."""
    g = torch.tensor(gradients, dtype=torch.float64)
    return fn.Quadratic(torch.full((len(g), 1, 1, 1), curvature, dtype=torch.float64), -g.reshape(-1, 1, 1) / curvature)


def heterogeneity(problem):
    """Delta^inf."""
    return problem.infimum.lower - problem.client_infima[0].mean().item()


def everyone(problem):
    return np.arange(problem.num_clients)


def zeros(problem):
    return torch.zeros(problem.dim, dtype=torch.float64)


def gap(problem, x):
    """V(x) = f(x) - f^inf."""
    return problem.evaluate(x).not_private["train_loss"] - problem.infimum.lower


def memory_errors(problem, local, rounds, **settings):
    """max_i ||P_i(x^k) - v_i^k|| for k = 1, ..., rounds, from x = 0 and v = 0."""
    algorithm, errors = fn.fed_normec(local, **settings), []
    for r in fn.simulate(problem, algorithm, rounds=rounds, x0=zeros(problem), on=fn.Threads(1)):
        updates = local.run(problem, r.x, everyone(problem), Moment(0, 0), None)
        errors.append((updates - r.memory).norm(dim=1).max().item())
    return np.array(errors)


def corrected_step(alpha, beta, R, lipschitz):
    return min(beta * R / (alpha + R), R - max(sqrt(beta) - sqrt(alpha), 0) ** 2) / lipschitz


def theorem_1(p=1.0, sigma=0.0, **changes):
    constants = Constants(
        smoothness=0.5, gap=6.0, gradient_norm=1.0, client_norm=1.0, clients=4, dim=1, heterogeneity=16.0
    )
    settings = Settings("one_step", local_step=1.0, alpha=1.0, beta=1.0, server_step=0.25, rounds=9)
    asked = Asked(constants, settings, Noise(0.0, 0.0), {"memory_error": 1.0}).but(**changes)
    return asked.but(noise=noise_of(asked.constants.clients, p, sigma)).of(printed.theorem_local_gd)


def broken(said):
    return [c.name for c in said.conditions if not c.holds]


def test_the_document_names_every_test_here():
    text = (ROOT / "docs" / "errata.md").read_text(encoding="utf-8")
    here = {name for name in globals() if name.startswith("test_")} - {"test_the_document_names_every_test_here"}
    assert set(re.findall(r"`(test_\w+)`", text)) == here


# 1. Lemma 1


@pytest.mark.parametrize(("alpha", "beta"), [(0.01, 1.0), (0.2, 0.9), (0.3, 0.2)])
def test_the_map_of_lemma_1_is_increasing_only_for_beta_up_to_alpha(alpha, beta):
    r = np.linspace(0, 1, 100_001)
    left = abs(1 - beta / (alpha + r)) * r
    overshoot = max(sqrt(beta) - sqrt(alpha), 0) ** 2
    assert math.isclose(left.max(), max((1 - beta / (alpha + 1)) * 1, overshoot), rel_tol=1e-6)
    assert (np.diff(left) >= 0).all() == (beta <= alpha)
    if beta > alpha:
        before = r < beta - alpha
        assert math.isclose(left[before].max(), overshoot, rel_tol=1e-6)
        assert abs(r[before][left[before].argmax()] - (sqrt(alpha * beta) - alpha)) < 1e-4


def test_lemma_1_fails_under_theorem_1s_own_conditions():
    """Algorithm 1's eta in (0, 1) included. The flat direction only makes the clients disagree as much as is asked."""
    alpha, beta, R, L = 0.01, 1.0, 1.0, 1.0
    gradients = torch.tensor([[sqrt(alpha * beta) - alpha, 0], [R, 0], [0, 0.05], [0, -0.05]], dtype=torch.float64)
    curvature = torch.tensor([1.0, 1e-6], dtype=torch.float64)
    problem = fn.Quadratic(torch.diag(curvature).expand(4, 1, 2, 2).contiguous(), (-gradients / curvature)[:, None])
    eta = beta * R / (4 * L * (alpha + R))
    said = theorem_1(
        smoothness=L, gap=gap(problem, zeros(problem)), memory_error=R, heterogeneity=heterogeneity(problem), clients=4,
        alpha=alpha, beta=beta, local_step=1 / (2 * L), server_step=eta, rounds=101,
    )  # fmt: skip
    assert said.holds and 0 < eta < 1 and problem.smoothness == L
    errors = memory_errors(problem, fn.gd(1 / (2 * L)), 2, alpha=alpha, beta=beta, server_step=eta)
    assert math.isclose(errors[0], 0.81 + L * eta, rel_tol=1e-9)
    assert errors[0] > 1.05 * R


def test_lemma_1_as_corrected_holds_and_is_tight():
    alpha, beta, R, L = 0.01, 1.0, 1.0, 0.001
    problem = line(L, [sqrt(alpha * beta) - alpha, R])
    eta = corrected_step(alpha, beta, R, L)
    assert math.isclose(L * eta, 0.19, rel_tol=1e-12)
    errors = memory_errors(problem, fn.gd(1 / (2 * L)), 200, alpha=alpha, beta=beta, server_step=eta)
    assert 1 - 1e-9 < errors.max() < 1 + 1e-9
    more = memory_errors(problem, fn.gd(1 / (2 * L)), 1, alpha=alpha, beta=beta, server_step=1.01 * eta)
    assert more.max() > 1.001


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize(("alpha", "beta"), [(0.01, 1.0), (0.4, 0.3)])
def test_lemma_1_as_corrected_holds_in_several_dimensions(steps, alpha, beta):
    problem = fn.random_quadratic(6, 4, heterogeneity=2.0, seed=5)
    L = problem.smoothness
    local = fn.gd(1 / (2 * L), steps=steps)
    R = local.run(problem, zeros(problem), everyone(problem), Moment(0, 0), None).norm(dim=1).max().item()
    eta = corrected_step(alpha, beta, R, L if steps == 1 else 2 * L)
    assert memory_errors(problem, local, 60, alpha=alpha, beta=beta, server_step=eta).max() <= R * (1 + 1e-12)


# 2. Delta^inf where sqrt(Delta^inf) belongs


@pytest.mark.parametrize("Delta", [0.01, 1.0, 1.2, 1.22, 100.0])
def test_the_growth_factor_is_e_to_the_root_of_heterogeneity(Delta):
    L, K = 0.5, 10**6
    gamma = 1 / (2 * L)
    rate = 4 * L * sqrt(2 * L) * gamma / sqrt(Delta)  # per eta, from the descent inequality in the proof
    eta = Delta / (2 * sqrt(2 * L) * (K + 1))
    assert not broken(theorem_1(heterogeneity=Delta, server_step=eta, rounds=K + 1, local="gd"))
    factor = (1 + rate * eta) ** (K + 1)
    assert math.isclose(factor, exp(sqrt(Delta)), rel_tol=1e-3)
    assert (factor > 3) == (Delta > math.log(3) ** 2)
    corrected = sqrt(Delta) / (4 * L * sqrt(2 * L) * gamma * (K + 1))
    assert 2.7 < (1 + rate * corrected) ** (K + 1) < e


def test_the_printed_condition_depends_on_the_unit_of_f():
    """s f in place of f: gradients and memories times s, gamma over s. The algorithm takes the same steps."""
    allowed, bounds, roots = [], [], []
    for s in (1.0, 1e-4):
        said = theorem_1(
            smoothness=0.5 * s, gap=6.0 * s, memory_error=s, heterogeneity=16.0 * s, alpha=s, beta=s,
            local_step=1 / s, p=0.5, sigma=1.0, local="gd",
        )  # fmt: skip
        allowed.append(broken(said))
        bounds.append(said.bound / s)
        roots.append(sqrt(16.0 * s) / (2 * sqrt(2 * 0.5 * s)))
    assert allowed == [[], ["server_step_heterogeneity"]]
    assert math.isclose(*bounds, rel_tol=1e-12)
    assert math.isclose(*roots, rel_tol=1e-12)


# 3. and 4. The noise


@cache
def tracking(sigma, p, trust="local"):
    """||v - mean v_i||/beta after 6 rounds with messages of length almost 1, for each of 20 seeds; d = 50, M = 40."""
    problem = fn.random_quadratic(40, 50, heterogeneity=5.0, seed=1)
    algorithm = fn.fed_normec(fn.gd(0.1), alpha=1e-9, beta=1e-3, server_step=1e-3)
    privacy = fn.Privacy(noise_std=sigma, trust=trust) if sigma else None
    ends = []
    for seed in range(20):
        *_, r = fn.simulate(problem, algorithm, fn.poisson(p), privacy, rounds=6, seed=seed, on=fn.Threads(1))
        ends.append((r.server.memory - r.memory.mean(0)).norm().item() / 1e-3)
    return np.array(ends)


def test_noise_counts_in_every_coordinate():
    sigma, p, rounds, d, M = 0.5, 0.5, 6, 50, 40
    measured = tracking(sigma, p).mean()
    per_coordinate, total = (
        sqrt((2 * (1 - p) ** 2 / p + 2 * (1 - p) + 2 * variance / p) * rounds / M)
        for variance in (sigma**2, d * sigma**2)
    )
    assert measured > 2 * per_coordinate
    assert measured < total


@pytest.mark.long
@pytest.mark.parametrize(("sigma", "p"), [(0.0, 0.25), (0.1, 0.5), (0.3, 1.0)])
def test_the_factor_two_is_not_there(sigma, p):
    rounds, d, M = 6, 50, 40
    nu = (1 - p) / (p * M) + d * sigma**2 / (p * M)
    ratio = (tracking(sigma, p) ** 2).mean() / (nu * rounds)
    assert 0.8 < ratio < 1.25  # the printed B says 2


@pytest.mark.long
def test_theorem_1_fails_when_sigma_is_per_coordinate():
    """All its conditions hold, and the gradient norm never gets down to the bound. Memories start R away from P_i."""
    d, n, M, L, R, beta, eta = 20_000, 400, 2, 1.0, 0.1, 0.2401, 0.015
    sigma = 0.125 / (beta * sqrt(n))
    b = torch.zeros(M, d, dtype=torch.float64)
    b[:, 1] = torch.tensor([8.0, -8.0])
    numbers = {"smoothness": L, "gap": 0.5, "memory_error": R, "heterogeneity": 32.0, "clients": M, "alpha": 0.3}
    numbers |= {"beta": beta, "local_step": 0.5, "server_step": eta, "rounds": n}
    said = theorem_1(**numbers, sigma=sigma)
    assert said.holds and said.bound < 0.71
    algorithm, norms = fn.fed_normec(fn.gd(0.5), alpha=0.3, beta=beta, server_step=eta), np.zeros((2, n))
    for seed, run in enumerate(norms):
        x, rng = torch.zeros(d, dtype=torch.float64), np.random.default_rng(seed)
        x[0] = 1.0  # the gradient there has norm 1
        rows = x - b
        rows[:, 2] += R
        server = Server(x, rows.mean(0), 0)
        for k in range(n):
            run[k] = server.x.norm().item()
            total = algorithm.client_(server, rows, server.x - b).whole().sum(0)
            total += torch.from_numpy(sigma * sqrt(M) * rng.standard_normal(d))  # the sum of M clients' noises
            server = algorithm.advance(server, total / M, Weights(1.0, 1.0))
    assert norms.mean(0).min() > 0.85 and np.ptp(norms, axis=0).max() < 0.05  # runs hardly differ: the mean is known
    assert theorem_1(**numbers, sigma=sigma * sqrt(d)).bound > 10


def test_the_printed_beta_hat_leaves_a_root_of_d():
    ratios = []
    for d in (1, 10**4, 10**8):
        said = utility(printed.utility_one_step, dim=d)
        B2, beta_hat = said.settings["B_2"], said.settings["beta_hat"]
        ratios.append(2 * beta_hat * sqrt(d * B2 / 20) / said.terms["memory"])  # memory has the printed d^(1/4)
        balanced = beta_hat / d**0.25
        both = 6 * 3.0 / (0.625 * balanced) + 2 * balanced * sqrt(d * B2 / 20)
        assert math.isclose(both / said.terms["memory"], 2 * sqrt(3), rel_tol=1e-12)
    assert math.isclose(ratios[1] / ratios[0], 10) and math.isclose(ratios[2] / ratios[1], 10)


def utility(build, **changes):
    constants = Constants(
        smoothness=0.8, gap=3.0, gradient_norm=1.0, client_norm=1.0, clients=20, dim=650, heterogeneity=1e3
    )
    local = "one_step" if build is printed.utility_one_step else "gd"
    settings = Settings(local, local_step=0.625, alpha=1.0, beta=1.0, server_step=1.0, rounds=1000)
    noise = printed.PaperNoise(cohort=5, epsilon=4.0, delta=1e-5)
    return Asked(constants, settings, noise, {}).but(**changes).of(build)


# 5. and 6. Constants on the way to the step


def test_a_norm_is_not_less_than_itself_over_gamma():
    problem = fn.Quadratic(torch.full((8, 1, 1, 1), 0.2), torch.arange(8.0).reshape(8, 1, 1))
    gamma = 2.0
    assert gamma <= 1 / (2 * problem.smoothness)
    *_, r = fn.simulate(problem, fn.fed_normec(fn.gd(gamma)), fn.poisson(0.5), rounds=5, on=fn.Threads(1))
    error = (r.server.memory - r.memory.mean(0)).norm().item()
    assert error > error / gamma > 0


@pytest.mark.parametrize("steps", [1, 2, 7, 1000])
def test_the_lipschitz_constant_of_a_local_update(steps):
    """-L x^2/2 is the worst: each local step stretches distances by 1 + L gamma/T."""
    L = 3.0
    gamma = 1 / (2 * L)
    stretch = L * ((1 + gamma * L / steps) ** np.arange(steps)).mean()
    assert stretch <= 2 * (sqrt(e) - 1) * L < 2 * L < 4 * L < 6 * L
    assert (abs(stretch - L) < 1e-12) == (steps == 1)
    problem = fn.random_quadratic(5, 4, heterogeneity=2.0, seed=2)
    x, z = zeros(problem), torch.ones(4, dtype=torch.float64)
    local = fn.gd(1 / (2 * problem.smoothness), steps=steps)
    moved = [local.run(problem, point, everyone(problem), Moment(0, 0), None) for point in (x, z)]
    assert (moved[0] - moved[1]).norm(dim=1).max() <= problem.smoothness * (x - z).norm()  # convex: L at the most


# 7. Drift


@pytest.mark.parametrize("steps", [2, 7, 1000])
def test_local_steps_go_less_far_than_said(steps):
    """-L x^2/2 again: the mean distance from the start is at most .595 gamma ||grad f_i||; Lemma 7 says 2."""
    L = 3.0
    gamma = 1 / (2 * L)
    y = (1 + gamma * L / steps) ** np.arange(steps)
    ratio = (y - 1).mean() / (gamma * L)
    assert ratio < 4 * (sqrt(e) - 1.5) < 0.595
    assert (ratio > 0.59) == (steps == 1000)


def test_the_ig_corollary_has_twice_theorem_2s_drift():
    constants = Constants(
        smoothness=0.8, gap=3.0, gradient_norm=1.0, client_norm=1.0, clients=20, dim=1, heterogeneity=2.5,
        component_heterogeneity=4.0,
    )  # fmt: skip
    settings = Settings("ig", local_step=1.0, alpha=0.3, beta=1.0, server_step=1.0, rounds=100)
    noise = noise_of(20, p=0.25, sigma=0.7)
    corollary = printed.convergence_local_ig(constants, settings, noise, memory_scale=1.5, beta_scale=0.4)
    chosen = {name: corollary.settings[name] for name in ("beta", "server_step", "local_step")}
    R = corollary.settings["memory_error"]
    theorem = printed.theorem_local_ig(constants, replace(settings, **chosen), noise, R)
    for name, value in theorem.terms.items():
        assert math.isclose(corollary.terms[name], value * (2 if "drift" in name else 1), rel_tol=1e-12)


# 8. One local step


def test_theorem_1_has_no_step_for_clients_that_agree():
    problem = fn.random_quadratic(4, 3, heterogeneity=0.0, seed=1)
    assert abs(heterogeneity(problem)) < 1e-15
    for eta in (0.1, 1e-3, 1e-9):
        assert broken(theorem_1(heterogeneity=0.0, server_step=eta)) == ["server_step_heterogeneity"]


def test_theorem_1_never_gets_below_a_floor():
    for K in (10, 10**4, 10**8):
        eta = 16.0 / (2 * sqrt(2 * 0.5) * (K + 1))
        said = theorem_1(server_step=eta, rounds=K + 1)
        assert "server_step_heterogeneity" not in broken(said)
        assert math.isclose(said.terms["initial"], 6 * sqrt(2 * 0.5) * 6.0 / 16.0)


def test_one_local_step_needs_neither_the_three_nor_the_condition():
    problem = fn.random_quadratic(4, 3, heterogeneity=0.0, seed=1)
    L, R, alpha, beta, n = problem.smoothness, 0.1, 0.05, 0.05, 300
    eta = corrected_step(alpha, beta, R, L)
    x0 = 3 * torch.ones(3, dtype=torch.float64)
    algorithm = fn.fed_normec(fn.gd(1.0), alpha=alpha, beta=beta, server_step=eta, initial_memory="local_updates")
    norms = [problem.grad(x0, everyone(problem)).mean(0).norm().item()]
    for r in fn.simulate(problem, algorithm, rounds=n - 1, x0=x0, on=fn.Threads(1)):
        norms.append(problem.grad(r.x, everyone(problem)).mean(0).norm().item())
    bound = gap(problem, x0) / (eta * n) + 2 * R + eta * L / 2
    assert np.mean(norms) <= bound < norms[0] / 2


# 9. Heterogeneity


def test_losses_that_are_never_negative_can_disagree():
    a, b = -1.0, 3.0
    problem = line(1.0, [-a, -b])
    assert problem.client_infima[0].tolist() == [0, 0]
    assert math.isclose(heterogeneity(problem), (a - b) ** 2 / 8)
    assert math.isclose(problem.infimum.lower, 2.0)


def test_logistic_losses_with_equal_infima_can_disagree():
    """One example each, x = 1 with opposite labels: f_i^inf = 0, and f is least at 0."""
    w = np.linspace(-50, 50, 10_001)
    losses = np.logaddexp(0, -w), np.logaddexp(0, w)
    assert max(loss.min() for loss in losses) < 1e-20
    assert math.isclose(sum(losses).min() / 2, log(2))


def test_components_with_equal_infima_still_count():
    """Every f_ij has the infimum 0, as every f_i; the mean Delta_i^inf is Delta^inf then, not 0."""
    problem = line(1.0, [-1.0, 1.0])
    assert problem.component_infima.abs().max() == 0
    mean = problem.infimum.lower - problem.component_infima.mean().item()
    assert mean == heterogeneity(problem) == 0.5


# 10. Memories that start at zero


@pytest.mark.parametrize("seed", range(5))
def test_from_empty_memories_the_bound_says_nothing(seed):
    problem = fn.random_quadratic(6, 4, seed=seed)
    gradients = problem.grad(zeros(problem), everyone(problem))
    R = gradients.norm(dim=1).max().item()
    assert theorem_1(memory_error=R).bound > 2 * R >= 2 * gradients.mean(0).norm().item()


def test_warm_up_makes_the_memory_term_small():
    problem = fn.random_quadratic(6, 4, seed=0)
    rounds, x0 = 60, zeros(problem)
    settings = {"alpha": 0.5, "beta": 0.4, "server_step": 0.1, "warmup_rounds": rounds}
    errors = memory_errors(problem, fn.gd(0.5), rounds, **settings)
    norm = problem.grad(x0, everyone(problem)).mean(0).norm().item()
    assert 2 * errors[0] > norm
    assert 2 * errors[-1] < norm / 1000


# 11. and 12. The corollaries


def test_the_corollaries_leave_the_theorems_local_step():
    constants = Constants(
        smoothness=0.5, gap=6.0, gradient_norm=1.0, client_norm=1.0, clients=4, dim=1, heterogeneity=16.0
    )
    settings = Settings("gd", local_step=1.0, alpha=1.0, beta=1.0, server_step=1.0, rounds=256)
    said = printed.convergence_local_gd(constants, settings, Noise(0.0, 0.0), memory_scale=1.0, beta_scale=0.5)
    assert math.isclose(said.settings["local_step"], 1 / (2 * 0.5) / 2)
    chosen = {k: said.settings[k] for k in ("memory_error", "beta", "server_step", "local_step")}
    assert "local_step" in broken(theorem_1(rounds=256, local="gd", **chosen))


def test_the_noise_level_in_the_utility_proofs():
    said, n, c = utility(printed.utility_local_gd, c=1.3), 1000, 1.3
    sigma, p, B2 = (said.settings[k] for k in ("noise_std", "p", "B_2"))
    assert math.isclose(2 * sigma**2 / p, B2 * n, rel_tol=1e-12)
    assert math.isclose(2 * sigma**2 / p, 2 * c**2 * p * n * log(1e5) / 4.0**2, rel_tol=1e-12)
    assert not math.isclose(2 * sigma**2 / p, 2 * c * sqrt(n) * log(1e5) / 4.0, rel_tol=0.1)


def test_the_printed_order_depends_on_the_unit_of_f():
    bounds, orders = [], []
    for s in (1.0, 10.0):
        changes = {"smoothness": 0.8 * s, "gap": 3.0 * s, "heterogeneity": 1e3 * s, "local_step": 0.625 / s}
        said = utility(printed.utility_one_step, **changes)
        assert said.settings["alpha"] > 2
        bounds.append(said.bound / s)
        orders.append(said.settings["order"] / s)
    assert math.isclose(*bounds, rel_tol=1e-12)
    assert math.isclose(orders[1], 10 * orders[0], rel_tol=1e-12)


def test_with_alpha_equal_to_r_no_alpha_is_left():
    terms = [utility(printed.utility_one_step, memory_scale=s).terms for s in (1e-3, 1e3)]
    assert math.isclose(terms[0]["initial_alpha"], terms[1]["initial_alpha"], rel_tol=1e-12)
    assert math.isclose(terms[0]["initial_alpha"], terms[0]["initial"], rel_tol=1e-12)


def test_a_mean_of_noises_has_an_mth_of_the_variance():
    z = np.random.default_rng(0).standard_normal((4000, 10, 5))
    mean = (z.mean(1) ** 2).sum(-1).mean()
    assert math.isclose(mean, 10 * 5 / 10**2, rel_tol=0.05)  # (1/M^2) sum, not (1/M) sum = 5


# 14. Rates


def corrected_bound(n, *, L, V, R, nu, alpha, beta, gamma, eta, Delta):
    """Several local steps; every condition is checked."""
    assert beta <= alpha and beta < alpha + R and gamma <= 1 / (2 * L)
    assert eta <= beta * R / (alpha + R) / (2 * L) * (1 + 1e-12)
    assert eta <= sqrt(Delta) / (4 * L * sqrt(2 * L) * gamma * n) * (1 + 1e-12)
    return e * V / (eta * n) + 2 * R + 2 * beta * sqrt(nu * n) + eta * L / 2 + 4 * L * gamma * sqrt(2 * L * Delta)


def slope(bound_at):
    near, far = (bound_at(2.0**power) for power in (60, 100))
    return math.log2(near / far) / 40


def largest_local_step(n, L, eta, Delta):
    return min(1 / (2 * L), sqrt(Delta) / (4 * L * sqrt(2 * L) * eta * n))


def test_several_local_steps_reach_the_rate_of_one():
    same = {"L": 0.8, "V": 3.0, "Delta": 2.5, "nu": 0.3}

    def at(n):
        alpha, beta, R = 0.5, 0.4 * n ** (-2 / 3), n ** (-1 / 6)
        eta = beta * R / (alpha + R) / (2 * 0.8)
        gamma = largest_local_step(n, 0.8, eta, 2.5)
        return corrected_bound(n, **same, alpha=alpha, beta=beta, R=R, eta=eta, gamma=gamma)

    assert abs(slope(at) - 1 / 6) < 0.001


def test_an_alpha_that_shrinks_with_r_reaches_a_quarter():
    same = {"L": 0.8, "V": 3.0, "Delta": 2.5, "nu": 0.3}

    def at(n):
        alpha = R = n ** (-1 / 4)
        beta = 0.4 * n ** (-3 / 4)
        eta = beta / 2 / (2 * 0.8)
        gamma = largest_local_step(n, 0.8, eta, 2.5)
        return corrected_bound(n, **same, alpha=alpha, beta=beta, R=R, eta=eta, gamma=gamma)

    assert abs(slope(at) - 1 / 4) < 0.001


def test_the_plateau_of_local_steps_is_not_needed():
    """As M grows, Corollary 3's order stays at sqrt(L Delta^inf); the corrected bound goes to 0 as (d B_2/M)^(1/4)."""
    L, V, Delta, d, n, bounds, orders = 0.8, 3.0, 2.5, 650, 1e12, [], []
    for M in (10**8, 10**12):
        said = utility(printed.utility_local_gd, clients=M, cohort=M // 4, heterogeneity=Delta)
        orders.append(said.settings["order"])
        nu = d * said.settings["B_2"] / 2 / M * n  # d sigma_DP^2/(p M); sampling adds (1-p)/(pM) once
        beta = sqrt(2 * e * L * V / sqrt(d * said.settings["B_2"] / 2 / M)) / n
        gamma = largest_local_step(n, L, beta / (4 * L), Delta)
        numbers = {"alpha": beta, "R": beta, "beta": beta, "eta": beta / (4 * L), "gamma": gamma}
        bounds.append(corrected_bound(n, L=L, V=V, Delta=Delta, nu=nu + 0.75 / 0.25 / M, **numbers))
    assert math.isclose(bounds[0] / bounds[1], 10**1, rel_tol=0.01)
    assert orders[1] > sqrt(L * Delta) > 10 * bounds[1]


# 15. Incremental gradients


def displacements(problem, x, gamma, order):
    """||x_i^{k,j} - x|| for each client and step, (M, N)."""
    ids, total, rows = everyone(problem), torch.zeros(problem.num_clients, problem.dim, dtype=torch.float64), []
    for j in order:
        y = x - gamma / len(order) * total
        rows.append((y - x).norm(dim=1))
        total = total + problem.grad(y, ids, np.full((len(ids), 1), j))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("seed", range(4))
def test_the_displacement_lemma_holds_in_any_order(seed):
    problem = fn.random_quadratic(3, 4, parts=6, heterogeneity=2.0, seed=seed)
    L, x = problem.smoothness, problem.init(np.random.default_rng(seed))
    gamma, V, ids = 1 / (2 * L), gap(problem, x), everyone(problem)
    Delta_IG = problem.infimum.lower - problem.component_infima.mean().item()
    gradients = torch.stack([problem.grad(x, ids, np.full((3, 1), j)).norm(dim=1) for j in range(6)], 1)
    for order in (range(6), np.argsort(gradients.mean(0).numpy())[::-1]):
        moved = displacements(problem, x, gamma, [int(j) for j in order])
        assert (moved.mean(1) <= 2 * gamma * gradients.mean(1)).all()
        ours = 2 * (e - 2) * L * gamma**2 * (V + Delta_IG)
        lemma = 4 * L * gamma**2 * V + 2 * gamma**2 * L * (heterogeneity(problem) + Delta_IG)
        assert (moved**2).mean() <= ours <= lemma


def test_the_displacement_lemma_needs_a_short_step():
    """It states no condition on gamma. Three equal components x^2/2 and gamma = 30: 1 -> -9 -> 81."""
    problem = fn.Quadratic(torch.ones(1, 3, 1, 1, dtype=torch.float64), torch.zeros(1, 3, 1, dtype=torch.float64))
    moved = displacements(problem, torch.ones(1, dtype=torch.float64), 30.0, range(3))
    assert moved.flatten().tolist() == pytest.approx([0, 10, 80])
    assert (moved**2).mean() > 4 * 30**2 * 0.5


# 16. and 17. Utility


@pytest.mark.long
def test_noise_for_the_sum_has_no_p_in_it():
    d, M, eps, n = 650, 20, 4.0, 1000
    for p in (0.05, 0.25, 1.0):
        sigma = p * sqrt(n * log(1e5)) / eps
        each, in_sum = d * sigma**2 / (p * M), d * sigma**2 / (p * M) ** 2
        assert math.isclose(in_sum, d * n * log(1e5) / (M * eps) ** 2, rel_tol=1e-12)
        assert math.isclose(each / in_sum, p * M, rel_tol=1e-12)
    ratio = (tracking(0.3, 1.0) ** 2).mean() / (tracking(0.3, 1.0, "central") ** 2).mean()
    assert 0.8 * 40 < ratio < 1.25 * 40


def test_corollary_3s_bound_is_not_of_its_printed_order():
    """Its proof needs 1/sqrt(gamma) <= sqrt(2L); its condition on gamma makes that larger as M grows."""
    L, Delta, noise, orders, ratios = 0.8, 2.5, [], [], []
    for M, V in ((10**8, 3.0), (10**12, 3.0), (10**16, 3.0), (10**16, 300.0)):
        same = {"clients": M, "cohort": 5, "dim": 1, "heterogeneity": Delta, "gap": V, "rounds": 10**30 + 1}
        B2 = utility(printed.utility_local_gd, **same).settings["B_2"]
        gamma = 0.999 * 2 * Delta**2 / (3 * L * V * sqrt(M / B2))
        said = utility(printed.utility_local_gd, **same, local_step=gamma)
        assert said.holds
        noise.append(said.terms["privacy_noise"])
        orders.append(said.settings["order"])
        ratios.append(said.bound / said.settings["order"])
    assert math.isclose(noise[0], 3 * sqrt(2 * L) * 3.0 / Delta, rel_tol=1e-3)
    assert noise[:3] == pytest.approx([noise[0]] * 3)  # neither M nor epsilon nor delta is left in it
    assert orders[0] > orders[1] > orders[2] > sqrt(L * Delta)
    assert ratios[3] > 90 * ratios[2]
