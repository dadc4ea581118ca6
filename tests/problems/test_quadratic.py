"""Quadratic problems against their literal formula, and their constants against what the constants promise."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from normal_law import normal
from torch import Tensor

from fednormec.errors import UserError
from fednormec.problems.quadratic import Quadratic, random_quadratic

M, N, D = 5, 4, 3


@pytest.fixture
def problem() -> Quadratic:
    return random_quadratic(M, D, parts=N, seed=1)


def literal(problem: Quadratic, x: Tensor, i: int, components: list[int]) -> Tensor:
    total = torch.zeros((), dtype=x.dtype)
    for j in components:
        gap = x - problem.minimisers[i, j]
        total = total + gap @ problem.curvatures[i, j] @ gap / 2
    return total / len(components)


def delta(problem: Quadratic) -> float:
    return problem.infimum.lower - problem.client_infima[0].mean().item()


# What the contract leaves open (test_contract.py has the rest)


def test_no_client_gives_no_row(problem: Quadratic) -> None:
    assert problem.grad(normal(D), np.array([], dtype=np.int64)).shape == (0, D)


def test_a_component_out_of_range_is_refused(problem: Quadratic) -> None:
    with pytest.raises(IndexError):
        problem.grad(normal(D), np.array([0]), np.array([[N]]))


def test_init_is_standard_normal_and_repeats() -> None:
    wide = Quadratic(torch.eye(200).reshape(1, 1, 200, 200), torch.zeros(1, 1, 200))
    x = wide.init(np.random.default_rng(3))
    assert torch.equal(x, wide.init(np.random.default_rng(3))) and x.shape == (200,)
    assert abs(x.mean().item()) < 0.25 and 0.8 < x.std().item() < 1.2


def test_the_other_figure_is_the_norm_of_the_mean_gradient(problem: Quadratic) -> None:
    public, not_private, _ = problem.evaluate(normal(D))
    assert public == {} and set(not_private) == {"train_loss", "gradient_norm"}
    mean = problem.grad(normal(D), np.arange(M)).mean(0)
    assert not_private["gradient_norm"] == pytest.approx(mean.norm().item(), rel=1e-10)


def test_train_loss_leaves_out_clients_that_are_not_finite() -> None:
    b = torch.tensor([1.0, 3e38]).reshape(2, 1, 1)
    problem = Quadratic(torch.ones(2, 1, 1, 1), b)
    assert problem.evaluate(torch.zeros(1)).not_private["train_loss"] == 0.5
    assert np.isnan(problem.evaluate(torch.full((1,), float("nan"))).not_private["train_loss"])


# Constants


@pytest.mark.long
@settings(deadline=None, max_examples=15)
@given(st.integers(0, 1000), st.sampled_from([0.0, 0.3, 1.0, 4.0]))
def test_smoothness_bounds_every_component_and_no_less_would(seed: int, heterogeneity: float) -> None:
    problem = random_quadratic(M, D, parts=N, heterogeneity=heterogeneity, seed=seed)
    ids, every = np.repeat(np.arange(M), N), np.tile(np.arange(N), M)[:, None]
    start, v, ratio = normal(D, seed=seed), normal(M * N, D, seed=seed + 1), torch.zeros(())
    for _ in range(400):  # power iteration: differences of gradients turn v to the most curved direction
        v = v / v.norm(dim=1, keepdim=True)
        v = problem.grad(start + v, ids, every) - problem.grad(start.expand(M * N, D), ids, every)
        ratio = v.norm(dim=1)
        assert ratio.max().item() <= problem.smoothness * (1 + 1e-10)
    assert ratio.max().item() >= problem.smoothness * 0.99


def test_curvatures_have_the_asked_condition() -> None:
    for heterogeneity in (0.0, 0.5, 2.0):
        eigenvalues = torch.linalg.eigvalsh(
            random_quadratic(20, 10, heterogeneity=heterogeneity, condition=50.0).curvatures
        )
        assert eigenvalues.min() >= 1 / 50 - 1e-12 and eigenvalues.max() <= 1 + 1e-12
    logs = -torch.log(eigenvalues) / np.log(50.0)  # the last ones are independent: log-uniform
    assert abs(logs.mean().item() - 0.5) < 0.1 and abs(logs.var().item() - 1 / 12) < 0.03


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 1000), st.sampled_from([0.1, 1.0, 5.0]))
def test_infimum_is_attained_and_never_passed(seed: int, heterogeneity: float) -> None:
    problem = random_quadratic(M, D, parts=N, heterogeneity=heterogeneity, seed=seed)
    A, b = problem.curvatures.numpy(), problem.minimisers.numpy()
    x = np.linalg.solve(A.mean((0, 1)), np.einsum("ijkl,ijl->k", A, b) / (M * N))
    best = problem.evaluate(torch.from_numpy(x)).not_private
    assert problem.infimum.lower == problem.infimum.upper == pytest.approx(best["train_loss"], rel=1e-10)
    assert best["gradient_norm"] < 1e-10 * (1 + heterogeneity)
    for k in range(5):
        nearby = torch.from_numpy(x) + 0.01 * normal(D, seed=k)
        assert problem.evaluate(nearby).not_private["train_loss"] > problem.infimum.upper


def test_client_infima_are_those_of_each_client_alone(problem: Quadratic) -> None:
    lower, upper = problem.client_infima
    alone = [Quadratic(problem.curvatures[i : i + 1], problem.minimisers[i : i + 1]).infimum for i in range(M)]
    assert lower.tolist() == upper.tolist() == pytest.approx([a.lower for a in alone], rel=1e-12)
    assert lower.min() > 0.001


def test_two_quadratics_have_the_constants_found_by_hand() -> None:
    # mean of 2/2 (x - 1)^2 and 6/2 (x + 3)^2: least at x = -2, where it is (9 + 3) / 2
    A, b = torch.tensor([2.0, 6.0]).reshape(2, 1, 1, 1), torch.tensor([1.0, -3.0]).reshape(2, 1, 1)
    problem = Quadratic(A, b)
    assert problem.infimum == pytest.approx((6.0, 6.0), rel=1e-12)
    assert problem.smoothness == pytest.approx(6.0)
    assert problem.client_infima[0].tolist() == pytest.approx([0.0, 0.0], abs=1e-12)


def test_flat_directions_do_not_disturb_the_infimum() -> None:
    # each f_i sees one of three coordinates, nobody sees the third; the first is shared by two who disagree
    A = torch.zeros(3, 1, 3, 3, dtype=torch.float64)
    A[0, 0, 0, 0] = A[1, 0, 0, 0] = A[2, 0, 1, 1] = 1.0
    b = torch.tensor([[1.0, 7, 7], [-1, 5, 5], [9, 2, 9]], dtype=torch.float64).reshape(3, 1, 3)
    problem = Quadratic(A, b)
    assert problem.infimum == pytest.approx((1 / 3, 1 / 3), rel=1e-12)
    assert problem.client_infima[1].abs().max() < 1e-12


def test_component_infima_are_attained_at_the_minimisers(problem: Quadratic) -> None:
    for i in range(M):
        for j in range(N):
            f_ij = literal(problem, problem.minimisers[i, j], i, [j])
            assert problem.component_infima[i, j].item() == f_ij.item()
    assert problem.component_infima.shape == (M, N)


# Heterogeneity


@pytest.mark.parametrize("dim", [1, 3, 5, 17])
def test_no_heterogeneity_means_identical_components(dim: int) -> None:
    problem = random_quadratic(M, dim, parts=N, heterogeneity=0.0)
    assert (problem.curvatures == problem.curvatures[0, 0]).all()
    assert (problem.minimisers == problem.minimisers[0, 0]).all()
    assert abs(delta(problem)) < 1e-14


@pytest.mark.parametrize("seed", range(3))
def test_more_heterogeneity_means_a_larger_gap(seed: int) -> None:
    gaps = [delta(random_quadratic(6, 8, parts=2, heterogeneity=h, seed=seed)) for h in (0.0, 0.1, 0.5, 1.0, 3.0)]
    assert all(later > 1.5 * earlier + 1e-6 for earlier, later in zip(gaps, gaps[1:], strict=False))


def test_the_seed_decides() -> None:
    a, b, c = (random_quadratic(3, 2, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(a.curvatures, b.curvatures) and torch.equal(a.minimisers, b.minimisers)
    assert not torch.equal(a.curvatures, c.curvatures) and not torch.equal(a.minimisers, c.minimisers)


# Bad input: one sentence each


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"num_clients": 0}, "num_clients"),
        ({"dim": 0}, "dim"),
        ({"parts": 0}, "parts"),
        ({"condition": 0.5}, "condition"),
        ({"condition": float("nan")}, "condition"),
        ({"condition": float("inf")}, "condition"),
        ({"heterogeneity": -0.1}, "heterogeneity"),
        ({"heterogeneity": float("nan")}, "heterogeneity"),
        ({"heterogeneity": float("inf")}, "heterogeneity"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(arguments: dict[str, float], word: str) -> None:
    with pytest.raises(UserError, match=rf"^{word} .*\.$"):
        random_quadratic(**{"num_clients": 2, "dim": 2, **arguments})  # type: ignore[arg-type]


EYE, ZERO = torch.eye(2).reshape(1, 1, 2, 2), torch.zeros(1, 1, 2)


@pytest.mark.parametrize(
    ("curvatures", "minimisers", "word"),
    [
        (EYE[0], ZERO, "M, N, d, d"),
        (EYE, ZERO[0], "M, N, d, d"),
        (EYE, torch.zeros(1, 1, 3), "M, N, d, d"),
        (EYE.expand(2, 1, 2, 2), ZERO, "M, N, d, d"),
        (EYE[:0], ZERO[:0], "no length zero"),
        (EYE, ZERO.double(), "dtype"),
        (EYE.long(), ZERO.long(), "floating-point"),
        (EYE * float("nan"), ZERO, "finite"),
        (EYE, ZERO + float("inf"), "finite"),
        (EYE + torch.tensor([[0.0, 0.1], [0.0, 0.0]]), ZERO, "symmetric"),
        (torch.tensor([[0.0, 1.0], [-1.0, 0.0]]).reshape(1, 1, 2, 2), ZERO, "symmetric"),
        (EYE * torch.tensor([1.0, -0.01]), ZERO, "eigenvalue -0.01"),
        (-EYE, ZERO, "semi-definite"),
    ],
)
def test_tensors_that_are_no_quadratic_are_refused(curvatures: Tensor, minimisers: Tensor, word: str) -> None:
    with pytest.raises(UserError, match=rf"{word}.*\.$"):
        Quadratic(curvatures, minimisers)


def test_rounded_curvatures_pass() -> None:
    # rank one in single precision: rounding makes some eigenvalues slightly negative
    v = normal(50, 20).float()
    outer = (v.unsqueeze(2) * v.unsqueeze(1)).unsqueeze(1)
    problem = Quadratic(outer, torch.zeros(50, 1, 20))
    assert torch.linalg.eigvalsh(outer.double()).min() < 0
    assert problem.infimum.upper == pytest.approx(0.0, abs=1e-10)


def test_rounded_curvatures_do_not_open_an_abyss() -> None:
    # the second coordinate is flat up to rounding; taken at its word it would have the infimum -10
    A = torch.diag_embed(torch.tensor([[[1.0, 1e-9]], [[1.0, -0.9999e-9]]]))
    b = torch.tensor([[[0.0, 1000.0]], [[2.0, -1000.0]]])
    assert Quadratic(A, b).infimum.upper == pytest.approx(0.5, abs=0.01)


def test_a_direction_almost_flat_in_float32_counts_where_it_can_make_f_smaller() -> None:
    A = torch.diag(torch.tensor([1.0, 1e-6])).expand(2, 1, 2, 2).contiguous()
    b = torch.tensor([0.0, 1e3]).expand(2, 1, 2).contiguous()
    problem = Quadratic(A, b)
    assert problem.infimum.lower == pytest.approx(0.0, abs=1e-9)
    assert problem.infimum.upper == pytest.approx(0.5, rel=1e-3)  # what is attained without that direction
    assert problem.lower_client_infima.max() <= 1e-9
    exact = Quadratic(A.double(), b.double())
    assert exact.infimum.lower == exact.infimum.upper == pytest.approx(0.0, abs=1e-9)
