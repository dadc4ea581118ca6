"""What docs/theory.md says of centred feedback: each formula is accepted, 2/3 and 3/2 of it are not.

The recursions run by themselves, on updates P_i that stay; noise of std s per coordinate enters the mean message.
"""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy.linalg import solve_discrete_lyapunov
from scipy.optimize import minimize
from scipy.stats import chi2

import fednormec as fn
from fednormec.core.algorithm import Server
from fednormec.core.participation import Weights

pytestmark = pytest.mark.long

WRONG = (2 / 3, 3 / 2)
LOCAL = fn.gd(1.0)


def states(
    algorithm: fn.Algorithm, updates: np.ndarray, rounds: int, s: float = 0.0, p: float = 1.0, seed: int = 1
) -> Iterator[tuple[Server, torch.Tensor]]:
    """The server's state and the clients' memories after each round, with Poisson cohorts."""
    (m, d), rng = updates.shape, np.random.default_rng(seed)
    server, given = algorithm.init(torch.zeros(d, dtype=torch.float64)), torch.from_numpy(updates)
    memory = torch.zeros(m, algorithm.memory_slots * d, dtype=torch.float64)
    for _ in range(rounds):
        drawn = torch.from_numpy(np.flatnonzero(rng.random(m) < p))
        rows = memory[drawn]
        total = algorithm.client_(server, rows, given[drawn]).whole().sum(0)
        memory[drawn] = rows
        mean = total / m + p * s * torch.from_numpy(rng.standard_normal(d))
        server = algorithm.advance(server, mean, Weights(1 / p, 1.0))
        yield server, memory


def end(algorithm, updates, rounds, **asked):
    """The server's and the clients' memories after so many rounds."""
    *_, (server, memory) = states(algorithm, np.asarray(updates), rounds, **asked)
    return server.memory.numpy(), memory.numpy()


def path(algorithm, updates, rounds, **asked):
    """The server's memory after each round, (rounds, d)."""
    return np.stack([server.memory.numpy() for server, _ in states(algorithm, updates, rounds, **asked)])


def assert_variance(values, variance):
    """Independent normal values of mean zero: a two-sided test that must accept the variance and reject wrong ones."""

    def p_value(v):
        below = chi2.cdf((values**2).sum() / v, len(values))
        return 2 * min(below, 1 - below)

    assert p_value(variance) > 0.001
    assert all(p_value(factor * variance) < 1e-9 for factor in WRONG)


def assert_mean(values, expected):
    """Values along a run, whose error is taken from the scatter of 20 stretches of it."""
    means = np.array([part.mean() for part in np.array_split(values, 20)])
    error = means.std(ddof=1) / math.sqrt(20)
    assert abs(means.mean() - expected) < 4 * error
    assert all(abs(means.mean() - factor * expected) > 6 * error for factor in WRONG)


# noise in the linear regime


LINEAR = [
    ({"bound": "clip", "tau": 1e6}, 0.3, 0.3),
    ({"bound": "clip", "tau": 1e6}, 1.5, 1.5),
    ({"bound": "normalize", "tau": 1e6, "alpha": 2e6}, 0.3, 0.15),  # gain beta tau / alpha
]


@pytest.mark.parametrize(("bound", "beta", "b"), LINEAR)
@pytest.mark.parametrize("rounds", [1, 4, 80])
def test_noise_in_the_memory_is_an_ar1_process(bound, beta, b, rounds):
    """beta^2 s^2 (1 - (1-b)^(2t)) / (b (2-b)) per coordinate after t rounds."""
    s, algorithm = 0.5, fn.centred(LOCAL, beta=beta, **bound)
    found, _ = end(algorithm, np.zeros((3, 3000)), rounds, s=s)
    assert_variance(found, beta**2 * s**2 * (1 - (1 - b) ** (2 * rounds)) / (b * (2 - b)))


def test_in_the_papers_recursion_it_is_a_random_walk():
    """beta^2 s^2 t per coordinate after t rounds, around the mean of the clients' memories."""
    s, beta, rounds = 0.5, 0.3, 80
    algorithm = fn.fed_normec(LOCAL, alpha=1.0, beta=beta)
    v, memories = end(algorithm, np.zeros((3, 3000)), rounds, s=s)
    assert_variance(v - memories.mean(0), beta**2 * s**2 * rounds)


@pytest.mark.parametrize("s", [0.0, 0.02])
def test_sampling_adds_to_it(s):
    """E||v - mean P||^2 = (b^2 D^2 w + beta^2 d s^2) / (1 - (1-b)^2 - b^2 w) with w = (1-p)/(pM)."""
    m, d, p, b = 12, 4, 0.4, 0.3
    updates = np.random.default_rng(0).standard_normal((m, d))
    mean = updates.mean(0)
    algorithm = fn.centred(LOCAL, bound="clip", tau=1e3, beta=b)
    errors = ((path(algorithm, updates, 12_000, s=s, p=p)[100:] - mean) ** 2).sum(1)
    w, spread = (1 - p) / (p * m), ((updates - mean) ** 2).sum(1).mean()
    assert_mean(errors, (b**2 * spread * w + b**2 * d * s**2) / (1 - (1 - b) ** 2 - b**2 * w))


# noise in the bounded regime


@pytest.mark.parametrize(("d", "s"), [(1, 1.0), (3, 0.7), (20, 0.3)])
def test_against_a_unit_force_the_mean_distance_is_exact(d, s):
    """alpha = 0 and clients that agree: E||v - P|| = beta (1 + d s^2) / 2."""
    beta, updates = 0.3, np.full((1, d), 1.0)
    algorithm = fn.centred(LOCAL, alpha=0.0, beta=beta)
    distances = np.linalg.norm(path(algorithm, updates, 12_000, s=s)[500:] - 1.0, axis=1)
    assert_mean(distances, beta * (1 + d * s**2) / 2)


@pytest.mark.parametrize("seed", range(6))
def test_the_memory_never_walks_away(seed):
    """The mean over all rounds of ||v - mean P|| is within its bound, for any alpha, spread, cohort and noise."""
    rng = np.random.default_rng(seed)
    m, d, p = int(rng.integers(1, 9)), int(rng.integers(1, 6)), rng.choice([0.3, 1.0])
    alpha, beta, s = rng.choice([0.0, 0.1, 2.0]), rng.choice([0.02, 0.5]), rng.choice([0.1, 1.0])
    updates = rng.standard_normal((m, d)) * rng.choice([0.0, 0.3])
    mean, t = updates.mean(0), 5000
    algorithm = fn.centred(LOCAL, alpha=alpha, beta=beta)
    before = np.linalg.norm(path(algorithm, updates, t, s=s, p=p, seed=seed)[:-1] - mean, axis=1)
    nu, spread = (1 - p) / (p * m) + d * s**2, np.linalg.norm(updates - mean, axis=1).mean()
    bound = (mean @ mean) / (2 * beta * t) + alpha + 2 * spread + beta / 2 * (1 + nu)
    means = np.array([part.mean() for part in np.array_split(before, 10)])
    assert means.mean() <= bound + 3 * means.std(ddof=1) / math.sqrt(10)  # it holds for the expectation


def test_near_its_fixed_point_small_noise_has_the_covariance_of_the_linearised_recursion():
    """beta s^2 (J (2 - beta J))^-1, J = mean of (1 - r/(alpha+r) u u^T)/(alpha+r); far outside the linear regime."""
    alpha, beta, s = 0.05, 0.3, 0.01
    updates = np.random.default_rng(7).standard_normal((12, 2)) * [1.0, 3.0]
    v = fixed_point(updates, lambda r: r - alpha * np.log1p(r / alpha))
    away = updates - v
    r = np.linalg.norm(away, axis=1)
    assert r.min() > 5 * alpha
    outer = np.einsum("i,ij,ik->ijk", 1 / (r * (alpha + r)), away, away)
    J = ((np.eye(2) - outer) / (alpha + r)[:, None, None]).mean(0)
    covariance = beta * s**2 * np.linalg.inv(J @ (2 * np.eye(2) - beta * J))
    algorithm = fn.centred(LOCAL, alpha=alpha, beta=beta)
    squares = (path(algorithm, updates, 12_000, s=s)[200:] - v) ** 2
    assert covariance[1, 1] > 1.5 * covariance[0, 0]  # the two axes are told apart
    for axis in range(2):
        assert_mean(squares[:, axis], covariance[axis, axis])


# fixed points without client memory


def fixed_point(updates, potential):
    """The v where the sum of potential(||P_i - v||) is least."""

    def total(v):
        return potential(np.linalg.norm(updates - v, axis=1)).sum()

    return minimize(total, np.median(updates, axis=0), method="Nelder-Mead",
                    options={"xatol": 1e-10, "fatol": 1e-14, "maxiter": 4000}).x  # fmt: skip


SKEWED = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [9.0, 5.0]])


@pytest.mark.parametrize("alpha", [0.3, 3.0])
def test_the_memory_rests_at_a_smoothed_geometric_median(alpha):
    algorithm = fn.centred(LOCAL, alpha=alpha, beta=0.3)
    v, _ = end(algorithm, SKEWED, 1500)
    expected = fixed_point(SKEWED, lambda r: r - alpha * np.log1p(r / alpha))
    np.testing.assert_allclose(v, expected, atol=1e-6)
    assert np.linalg.norm(v - SKEWED.mean(0)) > 0.2


def test_between_the_geometric_median_and_the_mean():
    rest = {
        alpha: end(fn.centred(LOCAL, alpha=alpha, beta=beta), SKEWED, 3000)[0]
        for alpha, beta in ((0.01, 0.005), (1e5, 1e4))
    }
    median, mean = fixed_point(SKEWED, lambda r: r), SKEWED.mean(0)
    np.testing.assert_allclose(rest[0.01], median, atol=0.02)
    np.testing.assert_allclose(rest[1e5], mean, atol=1e-3)
    assert np.linalg.norm(median - mean) > 1


@pytest.mark.parametrize(
    "away",
    [
        np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 5.0], [0.0, -5.0]]),
        np.array([[math.cos(t), math.sin(t)] for t in (0.0, 2 * math.pi / 3, 4 * math.pi / 3)]),
    ],
    ids=["symmetric", "of one length"],
)
def test_it_is_the_mean_where_deviations_are_symmetric_or_of_one_length(away):
    updates = away + [2.0, -1.0]
    v, _ = end(fn.centred(LOCAL, alpha=0.3, beta=0.3), updates, 1500)
    np.testing.assert_allclose(v, [2.0, -1.0], atol=1e-9)


def first_order_bias(updates, factor):
    away = updates - updates.mean(0)
    return -factor * (np.linalg.norm(away, axis=1)[:, None] * away).mean(0)


def assert_bias(found, expected):
    size = np.linalg.norm(expected)
    assert np.linalg.norm(found - expected) < 0.1 * size
    assert all(np.linalg.norm(found - factor * expected) > 0.2 * size for factor in WRONG)


def test_the_bias_of_small_deviations():
    """-(1/alpha) mean(||d_i|| d_i), d_i = P_i - mean P, to first order."""
    updates, alpha = 0.01 * SKEWED, 2.0
    v, _ = end(fn.centred(LOCAL, alpha=alpha, beta=0.5), updates, 400)
    assert_bias(v - updates.mean(0), first_order_bias(updates, 1 / alpha))


# with a leaky deviation


def leaky_length(r, alpha, kappa):
    """The smaller root of kappa s^2 - (alpha + r + kappa) s + r."""
    total = alpha + r + kappa
    return (total - np.sqrt(total**2 - 4 * kappa * r)) / (2 * kappa)


@pytest.mark.parametrize(
    ("bound", "length"),
    [
        ({"alpha": 0.3}, lambda r, kappa: leaky_length(r, 0.3, kappa)),
        ({"bound": "clip", "tau": 0.6}, lambda r, kappa: np.minimum(r / (1 + kappa), 0.6)),
    ],
)
@pytest.mark.parametrize(("leak", "a"), [(0.2, 0.3), (0.05, 0.2)])
def test_with_a_leak_the_fixed_point_is_that_of_a_wider_bound(bound, length, leak, a):
    """h_i = kappa m_i, m_i is along P_i - v with a length that kappa makes shorter, and the m_i add up to zero."""
    kappa = (1 - leak) * a / leak
    v, deviations = end(fn.centred(LOCAL, beta=0.3, leak=leak, deviation_step=a, **bound), SKEWED, 4000)
    away = SKEWED - v
    r = np.linalg.norm(away, axis=1)
    messages = (length(r, kappa) / r)[:, None] * away
    np.testing.assert_allclose(deviations, kappa * messages, atol=1e-7)
    np.testing.assert_allclose(messages.sum(0), 0, atol=1e-7)


def test_the_ends_of_the_wider_normalisation():
    r, kappa = np.linspace(0.01, 9, 50), 2.5
    np.testing.assert_allclose(leaky_length(r, 1e-10, kappa), np.minimum(r / kappa, 1), rtol=1e-4)
    np.testing.assert_allclose(leaky_length(1e-6 * r, 0.3, kappa), 1e-6 * r / (0.3 + kappa), rtol=1e-4)


def test_a_leak_takes_the_bias_of_small_deviations_down():
    """-(alpha/(alpha+kappa)^2) mean(||d_i|| d_i), to first order."""
    updates, alpha, leak, a = 0.01 * SKEWED, 0.2, 0.1, 0.03
    kappa = (1 - leak) * a / leak
    algorithm = fn.centred(LOCAL, alpha=alpha, beta=0.1, leak=leak, deviation_step=a)
    v, _ = end(algorithm, updates, 2000)
    assert_bias(v - updates.mean(0), first_order_bias(updates, alpha / (alpha + kappa) ** 2))


@pytest.mark.parametrize(("scale", "unbiased"), [(0.99, True), (1.2, False)])
def test_clipping_with_a_leak_is_unbiased_up_to_tau_times_one_plus_kappa(scale, unbiased):
    tau, leak, a = 0.3, 0.1, 0.4
    reach = tau * (1 + (1 - leak) * a / leak)
    away = SKEWED - SKEWED.mean(0)
    updates = away / np.linalg.norm(away, axis=1).max() * reach * scale + [1.0, 2.0]
    settings = {"bound": "clip", "tau": tau, "beta": 0.5}
    leaky, plain = (
        end(fn.centred(LOCAL, **settings, **more), updates, 3000)[0]
        for more in ({"leak": leak, "deviation_step": a}, {})
    )
    assert (np.linalg.norm(leaky - [1.0, 2.0]) < 1e-9) == unbiased
    assert np.linalg.norm(plain - [1.0, 2.0]) > 0.1


def leaky_variance(beta, a, g, leak):
    """Of the memory per coordinate, in units of s^2."""
    c, f = beta * g, a * g
    A = np.array([[1 - c, -c], [-(1 - leak) * f, (1 - leak) * (1 - f)]])
    T, D, q = A.trace(), (1 - leak) * (1 - c - f), A[1, 1]
    found = ((1 + q**2) * (1 + D) - 2 * T * q) / ((1 - D) * c * leak * (1 + T + D)) * beta**2
    assert solve_discrete_lyapunov(A, np.diag([beta**2, 0.0]))[0, 0] == pytest.approx(found, rel=1e-9)
    return found


@pytest.mark.parametrize(("beta", "a", "leak"), [(0.3, 0.3, 0.1), (0.5, 0.2, 0.02), (1.0, 0.9, 0.5)])
def test_noise_with_a_leak(beta, a, leak):
    s, algorithm = 0.5, fn.centred(LOCAL, bound="clip", tau=1e6, beta=beta, leak=leak, deviation_step=a)
    found, _ = end(algorithm, np.zeros((3, 3000)), 400, s=s)
    assert_variance(found, s**2 * leaky_variance(beta, a, 1.0, leak))


def test_a_small_leak_is_a_walk_of_finite_length():
    """f^2 / (2 c (c + f) leak) of a round's beta^2 s^2 to first order; with a = beta 1/(4 leak) rounds of the walk."""
    for beta, a, g in ((0.3, 0.3, 1.0), (0.1, 0.4, 0.5), (0.2, 0.05, 2.0)):
        leak, c, f = 1e-6, beta * g, a * g
        assert leaky_variance(beta, a, g, leak) == pytest.approx(beta**2 * f**2 / (2 * c * (c + f) * leak), rel=1e-3)
    assert leaky_variance(0.3, 0.3, 1.0, 1e-6) == pytest.approx(0.3**2 / (4 * 1e-6), rel=1e-3)


@pytest.mark.parametrize("leak", [0.001, 0.3, 1.0])
def test_gains_below_two_are_stable(leak):
    for total, share in np.random.default_rng(0).random((500, 2)):
        c, f = 2 * total * share, 2 * total * (1 - share)
        A = np.array([[1 - c, -c], [-(1 - leak) * f, (1 - leak) * (1 - f)]])
        assert np.abs(np.linalg.eigvals(A)).max() < 1


# what it comes to for the model


def test_the_model_rests_where_bounded_updates_cancel():
    """v = 0 and sum Norm(P_i(x)) = 0: the same point as for averages of normalised updates; with a leak another."""
    two = fn.Quadratic(
        torch.tensor([1.0, 1.0, 8.0], dtype=torch.float64).reshape(3, 1, 1, 1),
        torch.tensor([0.0, 0.0, 10.0], dtype=torch.float64).reshape(3, 1, 1),
    )
    x0, ends = torch.tensor([-5.0], dtype=torch.float64), []
    for algorithm in (
        fn.centred(LOCAL, alpha=0.5, beta=0.3, server_step=0.1),
        fn.dp_fed_avg_normalized(LOCAL, alpha=0.5, server_step=0.1, bounded="update"),
        fn.centred(LOCAL, bound="clip", tau=2.0, beta=0.3, server_step=0.05, leak=0.02, deviation_step=0.3),
    ):
        *_, last = fn.simulate(two, algorithm, rounds=1200, x0=x0, on=fn.Threads(1), evaluate_every=1200)
        ends.append(last.x.item())
    assert ends[0] == pytest.approx(ends[1], abs=1e-6) and ends[0] < 1
    assert ends[2] == pytest.approx(8.0, abs=1e-6)  # all ||P_i|| <= 16 there, and tau (1 + kappa) is 31.4
