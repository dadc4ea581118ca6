"""Sums of records' bounded gradients: those of a literal loop, never longer than the bound, each record by itself."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fednormec as fn
from fednormec.core.bounds import Bound, clip, smooth_normalize
from fednormec.core.records import Grouped, SumsRecords, batch_sum, bounded_sum
from fednormec.privacy.records import reach
from fednormec.problems import neural, record_sums

CLASSES, SIZES, CLIENT = 3, (4, 9, 6), 1
EVERYONE = np.arange(SIZES[CLIENT])
BOUNDS = {
    "clip": clip,
    "normalize": lambda radius: smooth_normalize(0.3, radius),
    "normalize, alpha 0": lambda radius: smooth_normalize(0.0, radius),
}
WAYS = ("layers", "vmap", "loop")


class Own(nn.Module):
    """Module of a class that nobody knows, but whose functions keep examples apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5, bias=False), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.flatten(1)).tanh())


MODELS = {
    "mlp": ((6,), lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4, False), nn.ELU(), nn.Linear(4, 3))),
    "conv net": ((1, 8, 8), lambda: fn.models.small_cnn((1, 8, 8), CLASSES, channels=(4, 8))),
    "strided": ((2, 6, 6), lambda: fn.models.small_cnn((2, 6, 6), CLASSES, channels=(2, 4), halving="stride")),
    "of patches": ((1, 5, 5), lambda: nn.Sequential(nn.Conv2d(1, 65, 3), nn.ReLU(), nn.Flatten(), nn.Linear(585, 3))),
    "of positions": ((4, 6), lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Flatten(), nn.Linear(20, CLASSES))),
    "own": ((2, 3), Own),
}  # fmt: skip


def pairs(shape: tuple[int, ...], sizes: tuple[int, ...] = SIZES) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((n, *shape)), rng.integers(0, CLASSES, n)) for n in sizes]


def built(name: str) -> tuple[nn.Module, list[tuple[np.ndarray, np.ndarray]]]:
    shape, model = MODELS[name]
    torch.manual_seed(0)
    return model(), pairs(shape)


def literal(module: nn.Module, x: Tensor, y: Tensor, records: list[list[int]], bound: Bound) -> Tensor:
    """Autograd for each record, the mean over its examples, its norm in float64, its bound; then the sum."""
    module, total = copy.deepcopy(module).double(), torch.zeros(())
    for record in records:
        loss = F.cross_entropy(module(torch.as_tensor(x)[record].double()), torch.as_tensor(y)[record])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
        norm = math.sqrt(math.fsum(float(value) ** 2 for value in gradient))
        assert bound.law is not None
        clipped = min(1.0, bound.radius / norm)
        total = total + gradient * (clipped if bound.law.clips else bound.radius / (norm + bound.law.parameter))
    return total


def at(problem: fn.NeuralProblem) -> Tensor:
    return problem.init(np.random.default_rng(0))


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() <= 1e-12 * expected.norm())


@pytest.fixture
def no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a record's gradient is written out as a row."""

    def refused(*given: object) -> None:
        raise AssertionError("a row for each record")

    monkeypatch.setattr(neural, "sum_of_rows", refused)


@pytest.mark.long
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_the_sum_is_that_of_a_literal_loop(name: str, way: str, bound: str) -> None:
    module, data = built(name)
    norms = [float(literal(module, *data[CLIENT], [[i]], clip(1e9)).norm()) for i in EVERYONE]
    each = BOUNDS[bound](np.median(norms))  # it cuts some of them
    problem = fn.NeuralProblem(module, data, dtype=torch.float64, vectorize=way)
    for some in (EVERYONE, np.array([0, 2, 3, 8]), np.array([7])):
        expected = literal(module, *data[CLIENT], [[i] for i in some.tolist()], each)
        found = bounded_sum(problem, at(problem), CLIENT, some, each)
        assert found.dtype == torch.float64 and close(found, expected)


@pytest.mark.long
@pytest.mark.parametrize("bound", ["clip", "normalize"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["mlp", "conv net"])
def test_a_person_is_one_record(name: str, way: str, bound: str) -> None:
    module, data = built(name)
    persons = [np.array([3, 1, 3, 1]), np.array([5, 2, 5, 9, 2, 5, 7, 9, 2]), np.zeros(6)]
    problem = fn.NeuralProblem(module, data, dtype=torch.float64, vectorize=way, persons=persons)
    assert isinstance(problem, Grouped) and problem.record_sizes.tolist() == [2, 4, 1]
    own = [[0, 2, 5], [1, 4, 8], [3, 7], [6]]  # in the order in which they come
    for some in (np.arange(4), np.array([0, 3])):
        expected = literal(module, *data[CLIENT], [own[i] for i in some], BOUNDS[bound](0.8))
        assert close(bounded_sum(problem, at(problem), CLIENT, some, BOUNDS[bound](0.8)), expected)


@pytest.mark.long
@pytest.mark.usefixtures("no_rows")
@pytest.mark.parametrize("name", MODELS)
def test_layers_write_no_row_for_each_record(name: str) -> None:
    module, data = built(name)
    problem = fn.NeuralProblem(module, data, dtype=torch.float64, vectorize="layers")
    assert isinstance(problem, SumsRecords)
    bounded_sum(problem, at(problem), CLIENT, EVERYONE, clip(1.0))


@pytest.mark.long
@pytest.mark.usefixtures("no_rows")
def test_layers_are_taken_where_other_gradients_go_client_by_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hospital with many images has no company in a tile, and its records go layer by layer all the same."""
    monkeypatch.setattr(neural, "ACTIVATIONS_TOGETHER", 1)
    torch.manual_seed(0)
    module, data = MODELS["conv net"][1](), pairs((1, 8, 8), (300, 200))
    problem = fn.NeuralProblem(module, data, dtype=torch.float64)
    assert problem.way == "loop"
    expected = literal(module, *data[1], [[i] for i in range(200)], clip(0.5))
    assert close(bounded_sum(problem, at(problem), 1, np.arange(200), clip(0.5)), expected)


@pytest.mark.long
@pytest.mark.parametrize("way", ["layers", "vmap"])
def test_neither_strips_nor_passes_change_the_sum(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, data = fn.models.small_cnn((1, 6, 6), CLASSES, channels=(2, 4)), pairs((1, 6, 6), (150,))
    problem = fn.NeuralProblem(module, data, dtype=torch.float64, vectorize=way)
    for n in (150, 129, 64):
        expected = literal(module, *data[0], [[i] for i in range(n)], clip(0.5))
        for numbers in (10, 6 * problem.dim, 70 * problem.dim, 2**24):
            monkeypatch.setattr(neural, "NUMBERS", numbers)
            monkeypatch.setattr("fednormec.core.records.NUMBERS", numbers)
            assert close(bounded_sum(problem, at(problem), 0, np.arange(n), clip(0.5)), expected)


@pytest.mark.long
@settings(deadline=None, max_examples=12)
@given(st.data())
def test_any_stack_of_linear_layers(data: st.DataObject) -> None:
    widths = data.draw(st.lists(st.integers(1, 70), min_size=2, max_size=4))
    biases = data.draw(st.lists(st.booleans(), min_size=len(widths), max_size=len(widths)))
    n, tau = data.draw(st.integers(1, 130)), data.draw(st.sampled_from([1e-3, 0.5, 50.0]))
    torch.manual_seed(0)
    layers = [nn.Linear(a, b, bias) for a, b, bias in zip(widths, [*widths[1:], CLASSES], biases, strict=True)]
    module = nn.Sequential(*[step for layer in layers for step in (layer, nn.Softplus())])
    pair = pairs((widths[0],), (n,))[0]
    problem = fn.NeuralProblem(module, [pair], dtype=torch.float64, vectorize="layers")
    bound = data.draw(st.sampled_from([clip(tau), smooth_normalize(0.01, tau)]))
    expected = literal(module, *pair, [[i] for i in range(n)], bound)
    found = bounded_sum(problem, at(problem), 0, np.arange(n), bound)
    assert (found - expected).norm() <= (1e-12 + 4e-16 * problem.dim) * expected.norm()


# float32: the promise is about the numbers that are really added


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that a record can be silenced in: with weight 0 its gradient is exactly zero."""
    return (outputs - targets[:, :1]).square().mean(1) * targets[:, 1]


STACKS = {
    "mlp": ((6,), lambda: nn.Sequential(nn.Linear(6, 70), nn.ReLU(), nn.Linear(70, 2, bias=False))),
    "conv net": ((1, 8, 8), lambda: fn.models.small_cnn((1, 8, 8), 2, channels=(4, 8))),
}
VALUES = (1e30, -1e30, 1e15, 1e-30, 1e-38, 1e-45, math.inf, -math.inf, math.nan, 0.0)


def spread(name: str, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Records of many sizes, with targets and weights."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.integers(-3, 4, n)
    inputs = rng.standard_normal((n, *STACKS[name][0])) * sizes.reshape(-1, *[1] * len(STACKS[name][0]))
    return inputs.astype(np.float32), np.stack([rng.standard_normal(n), np.ones(n)], axis=1).astype(np.float32)


def problem_of(name: str, pairs: list[tuple[np.ndarray, np.ndarray]], way: str = "layers") -> fn.NeuralProblem:
    torch.manual_seed(0)
    return fn.NeuralProblem(STACKS[name][1](), pairs, loss=weighted, vectorize=way)


def length(vector: Tensor) -> float:
    return math.sqrt(math.fsum(value**2 for value in vector.tolist()))


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STACKS)
def test_no_record_is_longer_than_the_bound(name: str, way: str) -> None:
    n = 200 if way == "layers" else 40
    problem = problem_of(name, [spread(name, n)], way)
    x = at(problem)
    for bound in (clip(1.0), clip(1e-3), smooth_normalize(0.0), smooth_normalize(1e-2, 10.0)):
        lengths = [length(bounded_sum(problem, x, 0, np.array([i]), bound)) for i in range(n)]
        assert 0.999 * bound.radius < max(lengths) <= bound.radius


@pytest.mark.long
@pytest.mark.parametrize("name", STACKS)
def test_nor_is_a_hostile_one(name: str) -> None:
    def spoiled(value: float) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = spread(name, 6)
        flat = inputs.reshape(6, -1)
        flat[0], flat[1, 0], flat[2, 1:3] = value, value, (value, -1.0)
        targets[3, 0], targets[4, 1], targets[5] = value, value, (-value, value)
        return inputs, targets

    problem = problem_of(name, [spoiled(value) for value in VALUES])
    for client, i in itertools.product(range(len(VALUES)), range(6)):
        for bound, size in ((clip(1.0), 1.0), (clip(1e-30), 1e10), (clip(1e30), 1e-20), (smooth_normalize(0.0), 1e-20)):
            found = bounded_sum(problem, size * at(problem), client, np.array([i]), bound)
            assert found.isfinite().all() and length(found) <= bound.radius


@pytest.mark.parametrize(
    ("a", "target", "bound"),
    [
        (1e23, 3e-19, clip(1e-20)),  # a factor that makes a number below the least normal one, times a large one
        (3e20, 1e-22, clip(1e-20)),
        (1e-40, 1e25, smooth_normalize(0.0)),  # a factor that makes a number above the largest, times a small one
        (1e-30, 1e28, smooth_normalize(0.0, 1e6)),
        (1e10, 1e10, clip(1.0)),  # a norm whose square is beyond float32
        (1e30, 1e5, smooth_normalize(0.0)),
        (1e19, 1e20, clip(1.0)),  # a gradient beyond float32
        (1e-12, 1e-12, clip(1.0)),  # a norm whose square is below float32
        (1e-12, 1e-12, smooth_normalize(0.0)),
        (1e-25, 1e-25, clip(1.0)),  # a gradient below it
        (1e-25, 1e-25, smooth_normalize(0.0)),
    ],
)
def test_factors_at_the_ends_of_the_number_range(a: float, target: float, bound: Bound) -> None:
    """A model of zeros without bias: the gradient is -2 target a^T, and nothing of it is rounded before the bound."""
    n = 40
    inputs = a * np.random.default_rng(0).uniform(0.5, 1.5, (n, 5)).astype(np.float32)
    targets = target * np.random.default_rng(1).uniform(0.5, 1.5, (n, 1)).astype(np.float32)
    problem = fn.NeuralProblem(nn.Linear(5, 1, bias=False), [(inputs, targets)], loss="mse", vectorize="layers")
    zeros = torch.zeros(5)
    each = [bounded_sum(problem, zeros, 0, np.array([i]), bound) for i in range(n)]
    gradients = -2 * torch.from_numpy(targets).double() * torch.from_numpy(inputs).double()
    for found, gradient in zip(each, gradients, strict=True):
        norm = float(gradient.norm())
        expected = gradient * (min(norm, bound.radius) if bound.law.clips else bound.radius) / norm
        if gradient.abs().max() > 3e38:
            expected.zero_()  # not finite
        assert length(found) <= bound.radius and (norm > 1e-38 or not found.any())
        assert norm < 1e-38 or length(found - expected) <= 1e-3 * length(expected)
    whole = bounded_sum(problem, zeros, 0, np.arange(n), bound)
    assert torch.allclose(whole, torch.stack(each).sum(0), rtol=1e-4, atol=1e-6 * bound.radius)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STACKS)
def test_what_a_record_holds_changes_nothing_of_the_others(name: str, way: str) -> None:
    """The sum with hostile records, less what they bring by themselves, is the sum in which they are silent.

    The same bits where they bring nothing; else but for the rounding of a strip of 64, which they are part of.
    """
    n, bound = (150, clip(0.5)) if way == "layers" else (20, smooth_normalize(0.1))
    (inputs, targets), hostile = spread(name, n, seed=1), np.array([3, 17, n - 1])

    def spoiled(value: float) -> tuple[np.ndarray, np.ndarray]:
        other = inputs.copy()
        other[hostile] = value
        other.reshape(n, -1)[17, 0] = 1.0
        return other, targets

    silent, values = targets.copy(), (1e30, -1e30, 1e-30, math.inf, -math.inf, math.nan)
    silent[hostile, 1] = 0.0
    problem = problem_of(name, [(inputs, silent), *map(spoiled, values)], way)
    x, everyone = at(problem), np.arange(n)
    expected = bounded_sum(problem, x, 0, everyone, bound)
    assert expected.isfinite().all() and length(expected) > 0.1
    for client, value in enumerate(values, 1):
        own = torch.stack([bounded_sum(problem, x, client, np.array([i]), bound) for i in hostile])
        found = bounded_sum(problem, x, client, everyone, bound)
        if not math.isfinite(value):
            assert not own.any() and torch.equal(found, expected)
        assert length(found - own.sum(0) - expected) <= 3 * bound.radius * reach(len(x), x.dtype, n)


@pytest.mark.long
@pytest.mark.parametrize("name", STACKS)
def test_neighbours_differ_by_no_more_than_the_bound(name: str) -> None:
    """Where nearly all pull the same way, and a sum is as large, and its rounding as bad, as it can be."""
    n = 130
    inputs, targets = spread(name, n)
    inputs[20:], targets[20:] = inputs[0], targets[0]  # the same record again and again
    variants = list[tuple[np.ndarray, np.ndarray]]()
    for j, size in itertools.product((0, 5, 11, 70, 129), (1.0, 1e18, math.inf)):
        with_it, without = inputs.copy(), targets.copy()
        with_it[j] *= size
        without[j, 1] = 0.0
        variants += [(with_it, targets), (inputs, without)]
    problem = problem_of(name, variants)
    x = at(problem)
    for bound in (clip(0.7), smooth_normalize(0.0, 0.7)):
        sums = [bounded_sum(problem, x, client, np.arange(n), bound) for client in range(len(variants))]
        found = [length(here - gone) for here, gone in zip(sums[::2], sums[1::2], strict=True)]
        assert 0.99 * bound.radius < max(found) <= bound.radius * (1 + reach(len(x), x.dtype, n))


def test_products_with_fewer_bits_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise RuntimeError("set in two ways")

    assert record_sums.takes(clip(1.0)) and not record_sums.takes(fn.identity())
    for said in (lambda: "medium", lambda: "high", unknown):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", said)
        assert not record_sums.takes(clip(1.0))


def test_a_bound_that_is_no_function_of_the_norm_goes_by_rows() -> None:
    module, data = built("mlp")
    problem = fn.NeuralProblem(module, data, dtype=torch.float64, vectorize="layers")
    assert not record_sums.takes(clip(1.0, radius=0.5))
    found = bounded_sum(problem, at(problem), CLIENT, EVERYONE, clip(1.0, radius=0.5))
    assert close(found, 0.5 * literal(module, *data[CLIENT], [[i] for i in EVERYONE], clip(1.0)))


# what is asked of a run


def run_of(problem: fn.NeuralProblem, rate: float = 0.5) -> list[Tensor]:
    method = fn.fed_avg(fn.dp_sgd(0.1, steps=2, rate=rate))
    rounds = fn.simulate(problem, method, privacy=fn.Privacy(noise_std=1.0, unit="record"), rounds=3, seed=0)
    return [one.x for one in rounds]


def test_layers_that_mix_records_are_refused_by_name() -> None:
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, CLASSES))
    with pytest.raises(fn.UserError, match="the layer '1' normalises a batch by all records in it.*GroupNorm"):
        run_of(fn.NeuralProblem(module, pairs((6,))))


def test_the_mean_of_losses_is_refused() -> None:
    module, data = built("mlp")
    with pytest.raises(fn.UserError, match="the loss is a mean over the batch.*reduction='none'"):
        run_of(fn.NeuralProblem(module, data, loss=lambda outputs, targets: F.cross_entropy(outputs, targets)))


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_may_be_empty(way: str) -> None:
    module, data = built("mlp")
    problem = fn.NeuralProblem(module, data, vectorize=way)
    empty = np.array([], dtype=np.int64)
    found = bounded_sum(problem, at(problem), CLIENT, empty, clip(1.0))
    assert found.dtype == torch.float64 and found.shape == (problem.dim,) and not found.any()
    assert all(x.isfinite().all() for x in run_of(problem, rate=0.01))


def test_without_privacy_batch_normalisation_looks_at_one_record_alone() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, track_running_stats=False), nn.Flatten(),
                           nn.Linear(72, CLASSES))  # fmt: skip
    data = pairs((1, 8, 8))
    problem = fn.NeuralProblem(module, data, dtype=torch.float64, vectorize="layers")
    expected = literal(module, *data[CLIENT], [[i] for i in EVERYONE], clip(0.8))
    assert close(bounded_sum(problem, at(problem), CLIENT, EVERYONE, clip(0.8)), expected)


def test_a_row_that_overflows_touches_no_other_persons_gradient() -> None:
    """Persons with fewer rows than others are padded, and never with a row of somebody else's."""
    rng = np.random.default_rng(0)
    features, persons = torch.from_numpy(rng.standard_normal((9, 3))), np.array([0, 1, 1, 1, 2, 3, 3, 4, 5])
    hostile = features.clone()
    hostile[0] = 1e308
    labels = torch.ones(9, dtype=torch.float64)
    sums = [
        fn.Logistic([rows], [labels], persons=[persons]).record_sum(
            torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64), 0, np.arange(6), clip(0.5)
        )
        for rows in (features, hostile)
    ]
    assert float((sums[0] - sums[1]).norm()) <= 2 * 0.5


@pytest.mark.parametrize("kind", ["logistic", "mlp"])
def test_computed_by_itself_no_digit_of_a_gradient_depends_on_who_else_is_drawn(kind: str) -> None:
    """A server that makes up models can turn a last digit into a whole gradient: here weights of 1e10 where w.a is
    about 0, with which others' gradients depend on one more record if they are computed together."""
    rng, n = np.random.default_rng(3), 60
    features = torch.from_numpy(rng.standard_normal((n, 16))).float()
    x = torch.from_numpy(rng.standard_normal(16)).float()
    features -= torch.outer(features @ x, x) / x.square().sum()  # about at right angles to the model
    if kind == "logistic":
        problem: fn.Problem = fn.Logistic([features], [torch.ones(n)])
        point = 1e10 * x
    else:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        problem = fn.NeuralProblem(module, [(features, torch.arange(n) % 2)])
        point = problem.init(rng).clone()
        point[: 16 * 8] = (1e10 * x).repeat(8)
    bound = clip(1.0)
    own = [batch_sum(problem, point, 0, np.array([k]), bound, 0.5) for k in range(n)]
    for batch in (np.arange(n), np.arange(1, n), np.arange(0, n, 7)):
        found = batch_sum(problem, point, 0, batch, bound, 0.5, alone=True)
        torch.testing.assert_close(found, torch.stack([own[k] for k in batch]).sum(0), rtol=1e-12, atol=1e-12)
