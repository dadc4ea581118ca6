"""Logistic problems against their literal formula, and their certified infima against values known by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from normal_law import normal
from torch import Tensor

from fednormec.errors import UserError
from fednormec.problems.logistic import Logistic, _dual_bound, random_logistic

SIZES, D = [4, 1, 7, 2], 3
M = len(SIZES)


def data(seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Clients of unequal sizes."""
    rng = np.random.default_rng(seed)
    features = [torch.from_numpy(rng.standard_normal((n, D))) for n in SIZES]
    return features, [torch.from_numpy(rng.choice([-1, 1], n)) for n in SIZES]


FEATURES, LABELS = data()


@pytest.fixture(params=[0.0, 0.3])
def regularizer(request: pytest.FixtureRequest) -> float:
    return float(request.param)


@pytest.fixture
def problem(regularizer: float) -> Logistic:
    return Logistic(FEATURES, LABELS, regularizer=regularizer)


def literal(w: Tensor, regularizer: float, i: int, examples: list[int]) -> Tensor:
    total = torch.zeros((), dtype=w.dtype)
    for j in examples:
        total = total + torch.log(1 + torch.exp(-LABELS[i][j] * (FEATURES[i][j] @ w)))
    return total / len(examples) + regularizer * (w**2 / (1 + w**2)).sum()


def assert_close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def loss(problem: Logistic, w: Tensor) -> float:
    return problem.evaluate(w).not_private["train_loss"]


# What the contract leaves open (test_contract.py has the rest)


def test_it_starts_from_zero_and_has_the_norm_of_the_mean_gradient_as_its_other_figure(problem: Logistic) -> None:
    assert torch.equal(problem.init(np.random.default_rng(0)), torch.zeros(D, dtype=torch.float64))
    public, not_private, _ = problem.evaluate(normal(D))
    assert public == {} and set(not_private) == {"train_loss", "gradient_norm"}
    mean = problem.grad(normal(D), np.arange(M)).mean(0)
    assert not_private["gradient_norm"] == pytest.approx(mean.norm().item(), rel=1e-10)


def test_its_sizes_are_its_own(problem: Logistic) -> None:
    problem.client_sizes[:] = 0
    assert problem.client_sizes.tolist() == SIZES


def test_an_example_beyond_the_client_is_refused(problem: Logistic) -> None:
    with pytest.raises(IndexError):
        problem.grad(normal(D), np.array([2, 1]), np.array([[6], [1]]))  # inside the padding of client 1


def test_no_client_gives_no_row(problem: Logistic) -> None:
    assert problem.grad(normal(D), np.array([], dtype=np.int64)).shape == (0, D)


@pytest.mark.parametrize("size", [30.0, 800.0, 1e15])
def test_far_away_nothing_overflows(size: float) -> None:
    # one example, margin -size: the loss is size + log(1 + e^-size), its slope the label's
    problem = Logistic([torch.ones(1, 1)], [torch.tensor([-1])], regularizer=1.0)
    w = torch.tensor([size], dtype=torch.float32)
    assert loss(problem, w) == pytest.approx(size + 1.0, rel=1e-6, abs=2e-3)
    assert problem.grad(w, np.array([0])).item() == pytest.approx(1.0, abs=1e-3)


def test_loss_keeps_its_digits_at_large_margins() -> None:
    problem = Logistic([torch.ones(1, 1).double()], [torch.tensor([1])])
    for z in (-21.0, 21.0, 40.0):
        w = torch.tensor([z], dtype=torch.float64)
        assert loss(problem, w) == pytest.approx(np.logaddexp(0.0, -z), rel=1e-14)


def test_the_problem_keeps_its_own_data() -> None:
    features, labels = data()
    problem = Logistic(features, labels)
    before = problem.grad(normal(D), np.arange(M))
    for a, y in zip(features, labels, strict=True):
        a.zero_(), y.zero_()
    assert torch.equal(problem.grad(normal(D), np.arange(M)), before)


def test_train_loss_leaves_out_clients_that_are_not_finite() -> None:
    problem = Logistic([torch.zeros(1, 1), torch.full((1, 1), 1e30)], [torch.tensor([1]), torch.tensor([-1])])
    assert loss(problem, torch.tensor([1e30])) == pytest.approx(np.log(2))
    assert np.isnan(loss(problem, torch.tensor([float("nan")])))


def test_public_figures_are_those_of_the_test_set() -> None:
    a, y = torch.tensor([[1.0], [2.0], [-1.0], [0.0]]), torch.tensor([1, -1, -1, 1])
    problem = Logistic([torch.ones(1, 1)], [torch.tensor([1])], regularizer=5.0, test=(a, y))
    public, *_ = problem.evaluate(torch.tensor([1.0]))
    expected = np.mean([np.log1p(np.exp(-1)), np.log1p(np.exp(2)), np.log1p(np.exp(-1)), np.log(2)])
    assert public == pytest.approx({"test_loss": expected, "test_accuracy": 0.75}, rel=1e-6)


# Smoothness


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([0.0, 0.1, 2.0]), st.sampled_from([0.01, 1.0, 10.0]))
def test_smoothness_bounds_every_component(seed: int, regularizer: float, distance: float) -> None:
    features, labels = data(seed)
    problem = Logistic(features, labels, regularizer=regularizer)
    ids, every = np.repeat(np.arange(M), SIZES), np.concatenate([np.arange(n) for n in SIZES])[:, None]
    v, w = normal(D, seed=seed), normal(D, seed=seed) + distance * normal(D, seed=seed + 1)
    gaps = (problem.grad(v, ids, every) - problem.grad(w, ids, every)).norm(dim=1)
    assert gaps.max() <= problem.smoothness * (v - w).norm() * (1 + 1e-9)


def test_smoothness_is_reached_at_the_origin(problem: Logistic, regularizer: float) -> None:
    # at w = 0 both l'' = 1/4 and r'' = 2 are at their largest: along the longest feature L is attained
    i, j = max(((i, j) for i, n in enumerate(SIZES) for j in range(n)), key=lambda ij: FEATURES[ij[0]][ij[1]].norm())
    a = FEATURES[i][j]
    step = 1e-4 * a / a.norm()
    ends = [problem.grad(sign * step, np.array([i]), np.array([[j]])) for sign in (1, -1)]
    assert ((ends[0] - ends[1]).norm() / 2e-4).item() == pytest.approx(problem.smoothness, rel=1e-6)


# Infima


def entropy(q: float) -> float:
    return -q * np.log(q) - (1 - q) * np.log(1 - q)


def test_infima_known_by_hand_with_unequal_clients() -> None:
    # all features 1: f_i is least where sigma(w) is the share of +1, the value is its entropy; f sees the mean share
    labels = [torch.tensor([1, 1, 1, -1]), torch.tensor([1, -1]), torch.tensor([-1] * 9 + [1])]
    problem = Logistic([torch.ones(len(y), 1).double() for y in labels], labels)
    shares = [0.75, 0.5, 0.1]
    for bound in problem.client_infima:
        assert bound.tolist() == pytest.approx([entropy(q) for q in shares], abs=1e-10)
    assert problem.infimum == pytest.approx((entropy(np.mean(shares)),) * 2, abs=1e-10)
    assert problem.infimum.lower <= entropy(np.mean(shares)) + 1e-15


@pytest.mark.parametrize(
    ("dim", "examples", "heterogeneity"), [(3, 20, 0.0), (3, 50, 1.0), (5, 40, 5.0), (10, 20, 1.0)]
)
def test_lower_and_upper_agree_without_regulariser(dim: int, examples: int, heterogeneity: float) -> None:
    problem = random_logistic(4, dim, examples=examples, heterogeneity=heterogeneity, seed=1)
    lower, upper = problem.client_infima
    assert 0 < problem.infimum.lower <= problem.infimum.upper <= problem.infimum.lower + 1e-8
    assert (lower > 0).all() and (lower <= upper).all() and (upper - lower).max() < 1e-8


def test_more_features_than_examples_with_one_contradiction() -> None:
    # only the pair that contradicts itself costs anything, log 2 each; all other margins grow for ever
    problem = random_logistic(2, 30, examples=20, seed=1)
    for bound in problem.client_infima:
        assert bound.tolist() == pytest.approx([2 / 20 * np.log(2)] * 2, abs=1e-8)


@pytest.mark.parametrize("scales", [[1e4, 1.0, 1e-4], [1.0, 1.0, 0.0]])
def test_the_scale_of_features_does_not_matter(scales: list[float]) -> None:
    rng = np.random.default_rng(2)
    a, y = torch.from_numpy(rng.standard_normal((60, 3))), torch.from_numpy(rng.choice([-1, 1], 60))
    scale = torch.tensor(scales, dtype=torch.float64)
    scaled = Logistic([a * scale], [y]).infimum
    plain = Logistic([a * (scale > 0)], [y]).infimum
    assert scaled.upper - scaled.lower < 1e-8
    assert scaled == pytest.approx(plain, abs=1e-8)


def test_dependent_features_keep_the_certificate() -> None:
    rng = np.random.default_rng(3)
    a, y = rng.standard_normal((60, 3)), torch.from_numpy(rng.choice([-1, 1], 60))
    doubled = Logistic([torch.from_numpy(np.hstack([a, a @ rng.standard_normal((3, 2))]))], [y]).infimum
    assert doubled == pytest.approx(Logistic([torch.from_numpy(a)], [y]).infimum, abs=1e-8)
    assert doubled.lower > 0.1


@pytest.mark.parametrize(("dim", "examples"), [(2, 30), (10, 4)])
def test_separable_data_have_infimum_zero(dim: int, examples: int) -> None:
    a = normal(examples, dim)
    y = torch.where(a @ torch.ones(dim, dtype=torch.float64) > 0, 1, -1)
    problem = Logistic([a, a], [y, y])
    for lower, upper in (problem.infimum, *zip(*problem.client_infima, strict=True)):
        assert lower == 0.0 and 0 <= upper < 1e-8


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 1000), st.sampled_from([0.0, 0.05, 0.5]))
def test_no_point_lies_below_the_lower_bound(seed: int, regularizer: float) -> None:
    problem = random_logistic(3, 4, examples=15, regularizer=regularizer, seed=seed)
    lower, upper = problem.infimum
    assert 0 <= lower <= upper <= np.log(2)
    for k, scale in enumerate([0.0, 0.1, 1.0, 10.0, 100.0]):
        assert loss(problem, scale * normal(4, seed=k)) >= lower
    clients = problem.client_infima
    assert (clients[0] <= clients[1]).all()
    assert upper >= clients[0].mean() and lower > 0


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 4), st.booleans())
def test_the_certificate_holds_from_whatever_dual_variables(seed: int, dim: int, separable: bool) -> None:
    rng = np.random.default_rng(seed)
    S, c = rng.standard_normal((12, dim)), rng.dirichlet(np.ones(12))
    S[:, 0] = np.abs(S[:, 0]) if separable else S[:, 0]
    bound = _dual_bound(S, c, rng.random(12) ** rng.choice([0.1, 1.0, 10.0]))
    for w in rng.standard_normal((50, dim)) * rng.choice([0.1, 1.0, 10.0], (50, 1)):
        assert bound <= c @ np.logaddexp(0.0, -S @ w)
    assert not separable or bound < 1e-12


@pytest.mark.long
def test_upper_is_a_value_that_descent_does_not_beat() -> None:
    problem = random_logistic(3, 4, examples=15, regularizer=0.05, seed=4)
    lowest = np.inf
    for k in range(3):
        w = 3 * normal(4, seed=k)
        for _ in range(3000):
            w = w - problem.grad(w, np.arange(3)).mean(0) / problem.smoothness
        lowest = min(lowest, loss(problem, w))
    assert problem.infimum.upper == pytest.approx(lowest, abs=1e-5)


@pytest.mark.parametrize("regularizer", [0.58, 0.65])
def test_upper_finds_the_better_of_two_valleys(regularizer: float) -> None:
    # one example: a valley near zero and one far out, the latter deeper for 0.58 only
    problem = Logistic([torch.ones(1, 1).double()], [torch.tensor([1])], regularizer=regularizer)
    w = np.linspace(0, 50, 500_001)
    values = np.logaddexp(0.0, -w) + regularizer * w**2 / (1 + w**2)
    assert (w[values.argmin()] > 3) == (regularizer == 0.58)
    assert problem.infimum.upper == pytest.approx(values.min(), abs=1e-8)


def test_component_infima_lie_below_every_component(problem: Logistic, regularizer: float) -> None:
    assert problem.component_infima.shape == (M, max(SIZES))
    for i, n in enumerate(SIZES):
        for j in range(n):
            far = literal(30 * LABELS[i][j] * FEATURES[i][j], regularizer, i, [j])
            assert problem.component_infima[i, j] <= far
            assert regularizer > 0 or far < 0.1  # exact without regulariser: the loss comes near zero


# Heterogeneity


def test_no_heterogeneity_means_identical_clients() -> None:
    problem = random_logistic(5, 3, heterogeneity=0.0)
    rows = problem.grad(normal(5, 3)[0], np.arange(5))
    assert_close(rows, rows[:1].expand(5, 3))
    assert problem.infimum.upper == pytest.approx(problem.client_infima[1].mean().item(), abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_more_heterogeneity_means_a_larger_gap(seed: int) -> None:
    problems = [random_logistic(6, 3, examples=40, heterogeneity=h, seed=seed) for h in (0.0, 0.3, 1.0, 3.0)]
    gaps = [p.infimum.upper - p.client_infima[1].mean().item() for p in problems]
    assert all(later > earlier + 1e-4 for earlier, later in zip(gaps, gaps[1:], strict=False))


def test_the_seed_decides() -> None:
    a, b, c = (random_logistic(3, 2, seed=seed).grad(torch.ones(2).double(), np.arange(3)) for seed in (5, 5, 6))
    assert torch.equal(a, b) and not torch.equal(a, c)


# Bad input: one sentence each

A, Y = torch.ones(2, 3), torch.tensor([1, -1])


@pytest.mark.parametrize(
    ("features", "labels", "options", "word"),
    [
        ([], [], {}, "at least one client"),
        ([A, A], [Y], {}, "2 features and 1 labels"),
        ([A], [Y[:1]], {}, "client 0 needs"),
        ([A, A[:0]], [Y, Y[:0]], {}, "client 1 needs"),
        ([A[:, :0]], [Y], {}, "client 0 needs"),
        ([A[0]], [Y], {}, "client 0 needs"),
        ([A, A[:, :2]], [Y, Y], {}, "client 1 has 2 features"),
        ([A], [torch.tensor([0, 1])], {}, "labels must be -1 or"),
        ([A], [torch.tensor([1.0, float("nan")])], {}, "labels must be -1 or"),
        ([A, A.double()], [Y, Y], {}, "dtype"),
        ([A.long()], [Y], {}, "floating-point"),
        ([A * float("inf")], [Y], {}, "finite"),
        ([A], [Y], {"regularizer": -0.1}, "regularizer"),
        ([A], [Y], {"regularizer": float("nan")}, "regularizer"),
        ([A], [Y], {"regularizer": float("inf")}, "regularizer"),
        ([A], [Y], {"test": (A[:, :2], Y)}, "the test set has 2 features"),
        ([A], [Y], {"test": (A, Y + 1)}, "the test set has others"),
    ],
)
def test_data_that_do_not_fit_are_refused(
    features: list[Tensor], labels: list[Tensor], options: dict[str, Any], word: str
) -> None:
    with pytest.raises(UserError, match=rf"{word}.*\.$"):
        Logistic(features, labels, **options)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"num_clients": 0}, "num_clients"),
        ({"dim": 0}, "dim"),
        ({"examples": 1}, "examples"),
        ({"heterogeneity": -1.0}, "heterogeneity"),
        ({"heterogeneity": float("nan")}, "heterogeneity"),
        ({"regularizer": -1.0}, "regularizer"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=rf"^{word} .*\.$"):
        random_logistic(**{"num_clients": 2, "dim": 2, **arguments})
