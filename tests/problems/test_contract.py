"""What every problem keeps to, ours and a user's own: each against its literal formula, client by client."""

import copy
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from networks import UNEQUAL, clients
from torch import Tensor, nn
from torch.func import functional_call

import fednormec as fn
from fednormec.core.problem import Divisible, Metrics, Problem

SIZES = [4, 1, 7, 2]
Formula = Callable[[Tensor, int, list[int]], Tensor]  # (x, client, examples) -> their mean loss, in float64


class Case(NamedTuple):
    """A problem with at least four clients, the first of which have at least two examples but for client 1, and the
    formula of its losses."""

    problem: Problem
    formula: Formula


# quadratics and logistic regression


def quadratic(dtype: torch.dtype) -> Case:
    problem = fn.random_quadratic(5, 3, parts=4, seed=1, dtype=dtype)
    A, b = problem.curvatures.double(), problem.minimisers.double()

    def formula(x: Tensor, i: int, examples: list[int]) -> Tensor:
        return torch.stack([(x - b[i, j]) @ A[i, j] @ (x - b[i, j]) / 2 for j in examples]).mean()

    return Case(problem, formula)


def logistic(dtype: torch.dtype, regularizer: float) -> Case:
    rng = np.random.default_rng(0)
    a = [torch.from_numpy(rng.standard_normal((n, 3))) for n in SIZES]
    y = [torch.from_numpy(rng.choice([-1, 1], n)) for n in SIZES]

    def formula(x: Tensor, i: int, examples: list[int]) -> Tensor:
        losses = [torch.log(1 + torch.exp(-y[i][j] * (a[i][j] @ x))) for j in examples]
        return torch.stack(losses).mean() + regularizer * (x**2 / (1 + x**2)).sum()

    return Case(fn.Logistic([one.to(dtype) for one in a], y, regularizer=regularizer), formula)


# modules, in each way of computing them


def neural(dtype: torch.dtype, model: str, way: str) -> Case:
    module = {
        "mlp": lambda: fn.models.mlp((1, 8, 8), 4, hidden=(7, 5)),
        "small_cnn": lambda: fn.models.small_cnn((1, 8, 8), 4, channels=(4, 8)),
    }[model]()
    fn.models.reset(module, np.random.default_rng(2))
    pairs = clients(UNEQUAL)
    exact = copy.deepcopy(module).double()

    def formula(x: Tensor, i: int, examples: list[int]) -> Tensor:
        inputs, targets = (torch.as_tensor(part)[examples] for part in pairs[i])
        names, shapes = zip(*((name, p.shape) for name, p in exact.named_parameters()), strict=True)
        pieces = x.split([math.prod(shape) for shape in shapes])
        given = {name: piece.view(shape) for name, piece, shape in zip(names, pieces, shapes, strict=True)}
        return nn.functional.cross_entropy(functional_call(exact, given, (inputs,)), targets)

    problem = fn.NeuralProblem(module, pairs, dtype=dtype, vectorize=way, tile=3)
    assert problem.way == way
    return Case(problem, formula)


# a user's own: least squares, in plain loops


class LeastSquares:
    """f_i(x) = mean_j (a_ij x - y_ij)² / 2, of clients of unequal sizes. It knows nothing of the package."""

    def __init__(self, dtype: torch.dtype) -> None:
        rng = np.random.default_rng(3)
        self.dtype = dtype
        self.a = [torch.from_numpy(rng.standard_normal((n, 3))).to(dtype) for n in SIZES]
        self.y = [torch.from_numpy(rng.standard_normal(n)).to(dtype) for n in SIZES]
        self.dim, self.num_clients, self.tile, self.client_sizes = 3, len(SIZES), 2, np.array(SIZES)

    def init(self, rng: np.random.Generator) -> Tensor:
        return torch.from_numpy(rng.standard_normal(self.dim)).to(self.dtype)

    def grad(self, x: Tensor, ids: np.ndarray, examples: np.ndarray | None = None) -> Tensor:
        rows = torch.empty(len(ids), self.dim, dtype=self.dtype)
        for r, i in enumerate(ids):
            own = slice(None) if examples is None else torch.from_numpy(examples[r][examples[r] >= 0])
            a, y = self.a[i][own], self.y[i][own]
            rows[r] = a.T @ (a @ (x if x.ndim == 1 else x[r]) - y) / len(y)
        return rows

    def evaluate(self, x: Tensor) -> Metrics:
        losses = [float((a @ x - y).square().mean()) / 2 for a, y in zip(self.a, self.y, strict=True)]
        finite = [loss for loss in losses if math.isfinite(loss)]
        return Metrics({}, {"train_loss": sum(finite) / len(finite) if finite else math.nan})

    def named(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x}

    def model(self, x: Tensor) -> Any:
        return x


def own(dtype: torch.dtype) -> Case:
    problem, exact = LeastSquares(dtype), LeastSquares(torch.float64)

    def formula(x: Tensor, i: int, examples: list[int]) -> Tensor:
        return (exact.a[i][examples] @ x - exact.y[i][examples]).square().mean() / 2

    return Case(problem, formula)


BUILT: dict[str, Callable[[torch.dtype], Case]] = {
    "quadratic": quadratic,
    "logistic": partial(logistic, regularizer=0.0),
    "logistic, regularised": partial(logistic, regularizer=0.3),
    "mlp by layers": partial(neural, model="mlp", way="layers"),
    "mlp by vmap": partial(neural, model="mlp", way="vmap"),
    "mlp in a loop": partial(neural, model="mlp", way="loop"),
    "small_cnn by layers": partial(neural, model="small_cnn", way="layers"),
    "a user's own": own,
}
CLOSE = {torch.float64: {"rtol": 1e-9, "atol": 1e-12}, torch.float32: {"rtol": 1e-4, "atol": 2e-6}}
EXAMPLES = np.array([[0, -1, 1], [-1, 0, -1], [1, 1, 0]])  # of clients 2, 1 and 3


@pytest.fixture(scope="module", params=BUILT)
def case(request: pytest.FixtureRequest) -> Case:
    return BUILT[request.param](torch.float64)


@pytest.fixture(scope="module", params=BUILT)
def single(request: pytest.FixtureRequest) -> Case:
    return BUILT[request.param](torch.float32)


def start(problem: Problem, seed: int = 0) -> Tensor:
    return problem.init(np.random.default_rng(seed)) + 0.1 * normal(problem, seed=seed)


def normal(problem: Problem, *shape: int, seed: int = 0) -> Tensor:
    drawn = np.random.default_rng(seed).standard_normal((*shape, problem.dim))
    return torch.from_numpy(drawn).to(problem.init(np.random.default_rng(0)).dtype)


def points(problem: Problem, count: int, shared: bool) -> Tensor:
    return start(problem) if shared else start(problem) + 0.1 * normal(problem, count, seed=1)


def expected(case: Case, x: Tensor, ids: np.ndarray, examples: np.ndarray | None = None) -> Tensor:
    """By torch's autograd on the formula, in float64."""
    rows = []
    for r, i in enumerate(ids.tolist()):
        every = range(int(case.problem.client_sizes[i]))
        chosen = list(every) if examples is None else [j for j in examples[r].tolist() if j >= 0]
        point = (x if x.ndim == 1 else x[r]).double().requires_grad_()
        rows.append(torch.autograd.grad(case.formula(point, i, chosen), point)[0])
    return torch.stack(rows)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted.to(found.dtype), **CLOSE[found.dtype])


# facts


def test_its_facts_fit_together(case: Case) -> None:
    problem = case.problem
    assert problem.client_sizes.shape == (problem.num_clients,) and problem.client_sizes.dtype == np.int64
    assert (problem.client_sizes >= 1).all()
    assert 1 <= problem.tile <= problem.num_clients
    first, again = (problem.init(np.random.default_rng(4)) for _ in range(2))
    assert first.shape == (problem.dim,) and torch.equal(first, again)


# gradients


@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [2, 3], [3, 0, 2], [1]], ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["one x", "x for each"])
def test_gradients_are_those_of_the_formula(case: Case, ids: list[int], shared: bool) -> None:
    x, some = points(case.problem, len(ids), shared), np.array(ids)
    rows = case.problem.grad(x, some)
    assert rows.shape == (len(ids), case.problem.dim) and rows.dtype == x.dtype == torch.float64
    assert_close(rows, expected(case, x, some))


@pytest.mark.parametrize("shared", [True, False], ids=["one x", "x for each"])
def test_minus_one_is_padding_and_an_example_may_come_twice(case: Case, shared: bool) -> None:
    ids, x = np.array([2, 1, 3]), points(case.problem, 3, shared)
    assert_close(case.problem.grad(x, ids, EXAMPLES), expected(case, x, ids, EXAMPLES))


def test_all_examples_chosen_is_the_whole_gradient(case: Case) -> None:
    problem, ids = case.problem, np.arange(4)
    every = np.arange(problem.client_sizes[ids].max())
    chosen = np.where(every < problem.client_sizes[ids][:, None], every, -1)
    x = start(problem)
    assert_close(problem.grad(x, ids, chosen), problem.grad(x, ids))


def test_single_precision_stays_single_and_is_as_exact_as_that(single: Case) -> None:
    problem, ids = single.problem, np.array([2, 1, 3])
    for x, examples in ((start(problem), None), (points(problem, 3, False), EXAMPLES)):
        rows = problem.grad(x, ids, examples)
        assert problem.init(np.random.default_rng(0)).dtype == x.dtype == rows.dtype == torch.float32
        assert_close(rows, expected(single, x, ids, examples))


def test_finite_differences_of_the_training_loss_are_the_mean_gradient(case: Case) -> None:
    """`evaluate` and `grad` speak of one function."""
    problem, h = case.problem, 1e-5
    x, v = start(problem), normal(problem, seed=5) / math.sqrt(problem.dim)
    ends = [problem.evaluate(x + sign * h * v).not_private["train_loss"] for sign in (1, -1)]
    slope = float(problem.grad(x, np.arange(problem.num_clients)).mean(0) @ v)
    assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(slope, rel=1e-5, abs=1e-8)


# who else is there


@pytest.mark.parametrize("examples", [None, EXAMPLES], ids=["all examples", "some"])
def test_a_row_does_not_depend_on_who_else_is_in_the_tile(case: Case, examples: np.ndarray | None) -> None:
    """Neither on how many and in which order, nor on points of others that are no numbers."""
    problem, ids, x = case.problem, np.array([2, 1, 3]), points(case.problem, 3, False)
    rows = problem.grad(x, ids, examples)
    for r in range(3):
        chosen = None if examples is None else examples[r : r + 1]
        assert_close(problem.grad(x[r : r + 1], ids[r : r + 1], chosen)[0], rows[r])
        broken = torch.full_like(x, math.nan)
        broken[r] = x[r]
        found = problem.grad(broken, ids, examples)
        assert_close(found[r], rows[r])
        assert found.isnan().any(dim=1).tolist() == [other != r for other in range(3)]
    turned = [2, 0, 1]
    assert_close(problem.grad(x[turned], ids[turned], None if examples is None else examples[turned]), rows[turned])


# purity


def test_the_result_is_the_callers_and_what_is_given_stays(case: Case) -> None:
    problem, ids, examples = case.problem, np.array([2, 1, 3]), EXAMPLES.copy()
    ids.flags.writeable = examples.flags.writeable = False
    state = torch.get_rng_state()
    for x in (points(problem, 3, True), points(problem, 3, False)):
        before = x.clone()
        for chosen in (None, examples):
            first = problem.grad(x, ids, chosen)
            kept = first.clone()
            first.fill_(math.nan)
            again = problem.grad(x, ids, chosen)
            assert torch.equal(again, kept) and again.data_ptr() != first.data_ptr()
        problem.evaluate(x if x.ndim == 1 else x[0])
        assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_threads_get_the_same_bits(case: Case) -> None:
    problem, x = case.problem, start(case.problem)
    first = np.array([[0, -1], [-1, 0]])  # which all have
    tiles = [(np.array([i % 4, (i + 2) % 4]), first if i % 3 else None) for i in range(24)]
    alone = [problem.grad(x, *asked) for asked in tiles]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda asked: problem.grad(x, *asked), tiles))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


# figures and models


def test_the_training_loss_is_the_mean_over_clients_each_weighing_the_same(case: Case) -> None:
    problem, x = case.problem, start(case.problem)
    losses = [case.formula(x.double(), i, list(range(n))).item() for i, n in enumerate(problem.client_sizes)]
    public, not_private, _ = problem.evaluate(x)
    assert not_private["train_loss"] == pytest.approx(np.mean(losses), rel=1e-9)
    assert all(isinstance(value, float) for value in (*public.values(), *not_private.values()))


def test_the_training_loss_of_what_is_no_model_is_no_number(case: Case) -> None:
    assert math.isnan(case.problem.evaluate(torch.full_like(start(case.problem), math.nan)).not_private["train_loss"])


def test_a_model_is_its_vector_by_names_and_as_its_user_knows_it(case: Case) -> None:
    problem, x = case.problem, start(case.problem)
    before = x.clone()
    assert torch.equal(torch.cat([part.flatten() for part in problem.named(x).values()]), x)
    model = problem.model(x)
    if isinstance(model, nn.Module):
        model = nn.utils.parameters_to_vector(model.parameters())
    assert torch.equal(model, x) and torch.equal(x, before)


# taken apart


def test_a_part_has_the_same_bits(case: Case) -> None:
    problem, x = case.problem, start(case.problem)
    if isinstance(problem, LeastSquares):
        assert not isinstance(problem, Divisible)
        return
    assert isinstance(problem, Divisible)
    m = problem.num_clients
    for first, last in ((0, m), (1, 3), (2, m), (m - 1, m)):
        part, ids = problem.part(first, last), np.arange(first, last)
        examples = np.zeros((len(ids), 2), np.int64)
        examples[:, 1] = -1
        assert (part.num_clients, part.dim) == (last - first, problem.dim) and 1 <= part.tile <= problem.tile
        assert part.client_sizes.tolist() == problem.client_sizes[ids].tolist()
        assert torch.equal(part.grad(x, ids - first), problem.grad(x, ids))
        assert torch.equal(part.grad(x, ids - first, examples), problem.grad(x, ids, examples))


# in use


@pytest.mark.long
def test_it_can_be_trained(case: Case) -> None:
    """With every kind of local update: whole gradients, mini-batches, passes."""
    for local in (fn.gd(0.05, 2), fn.sgd(0.05, 3, 2), fn.ig(0.05, 2)):
        method = fn.fed_normec(local, server_step=0.05, server_normalization=False, beta=0.5)
        result = fn.train(case.problem, method, rounds=20, evaluate_every=19)
        losses = [
            record["not_private"]["train_loss"] for record in result.history if "train_loss" in record["not_private"]
        ]
        assert losses[-1] < losses[0] and result.x.isfinite().all()
