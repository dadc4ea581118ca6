"""Losses and metrics by name, against literal loops and scikit-learn, and tasks of every kind trained to the end."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import fednormec as fn
from fednormec.errors import UserError
from fednormec.problems.losses import LOSSES, binary_cross_entropy, cross_entropy, huber, mse
from fednormec.problems.metrics import ADDITIVE, METRICS, auc, measured

quick = settings(max_examples=30, deadline=None)


def rows(n: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.as_tensor(np.random.default_rng(seed).standard_normal((n, *shape)))


def yes_or_no(n: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.as_tensor(np.random.default_rng(seed).integers(0, 2, (n, *shape))).double()


def softmax_loss(scores: list[float], target: int) -> float:
    top = max(scores)
    return math.log(sum(math.exp(s - top) for s in scores)) + top - scores[target]


# losses are literal loops


@pytest.mark.parametrize("shape", [(), (6,)])
def test_cross_entropy_of_one_class_or_of_a_row_of_them(shape: tuple[int, ...]) -> None:
    outputs, targets = rows(5, *shape, 4), torch.as_tensor(np.random.default_rng(2).integers(0, 4, (5, *shape)))
    flat = [[softmax_loss(s.tolist(), int(t)) for s, t in zip(o.reshape(-1, 4), y.reshape(-1), strict=True)]
            for o, y in zip(outputs, targets, strict=True)]  # fmt: skip
    expected = torch.tensor([sum(each) / len(each) for each in flat], dtype=torch.float64)
    assert torch.allclose(cross_entropy(outputs, targets), expected, rtol=1e-12)


@pytest.mark.parametrize(("outputs", "targets"), [((5,), (5,)), ((5, 1), (5,)), ((5, 3), (5, 3)), ((5, 1), (5, 1))])
def test_losses_of_values_are_means_over_an_examples_own(outputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    o, y, t = rows(*outputs), yes_or_no(*targets), 2 * rows(*targets, seed=3)

    def mean(of: Any, against: Tensor) -> Tensor:
        pairs = zip(o.reshape(5, -1).tolist(), against.reshape(5, -1).tolist(), strict=True)
        return torch.tensor([np.mean([of(a, b) for a, b in zip(*pair, strict=True)]) for pair in pairs])

    def logistic(score: float, target: float) -> float:
        p = 1 / (1 + math.exp(-score))
        return -(target * math.log(p) + (1 - target) * math.log(1 - p))

    assert torch.allclose(binary_cross_entropy(o, y), mean(logistic, y), rtol=1e-12)
    assert torch.allclose(mse(o, t), mean(lambda a, b: (a - b) ** 2, t), rtol=1e-12)
    expected = mean(lambda a, b: (a - b) ** 2 / 2 if abs(a - b) <= 1 else abs(a - b) - 0.5, t)
    assert torch.allclose(huber(o, t), expected, rtol=1e-12)


def test_one_output_beside_one_target_is_not_every_pair() -> None:
    """(n, 1) against (n,) broadcasts to (n, n) in torch: the loss would mix examples."""
    outputs, targets = rows(4, 1), rows(4, seed=1)
    alone = torch.cat([mse(outputs[i : i + 1], targets[i : i + 1]) for i in range(4)])
    assert torch.equal(mse(outputs, targets), alone)


# metrics


@quick
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=30))
def test_auc_is_scikit_learns_with_ties(pairs: list[tuple[int, bool]]) -> None:
    scores, yes = torch.tensor([float(s) for s, _ in pairs]), torch.tensor([float(y) for _, y in pairs])
    found = float(auc(scores, yes))
    if len(set(yes.tolist())) < 2:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(roc_auc_score(yes, scores), abs=1e-12)


def test_auc_of_classes_is_each_against_the_rest_and_of_two_the_same_once() -> None:
    rng = np.random.default_rng(0)
    scores, classes = rows(60, 3), rng.integers(0, 3, 60)
    expected = np.mean([roc_auc_score(classes == k, scores[:, k]) for k in range(3)])
    assert float(auc(scores, torch.as_tensor(classes))) == pytest.approx(expected, abs=1e-12)
    two = torch.as_tensor((classes > 0).astype(np.int64))
    assert float(auc(scores[:, :2], two)) == pytest.approx(roc_auc_score(two, scores[:, 1] - scores[:, 0]), abs=1e-12)
    labels = yes_or_no(60, 3)
    many = np.mean([roc_auc_score(labels[:, k], scores[:, k]) for k in range(3)])
    assert float(auc(scores, labels)) == pytest.approx(many, abs=1e-12)


def test_the_other_metrics_are_literal() -> None:
    outputs, classes = rows(40, 8), torch.as_tensor(np.random.default_rng(4).integers(0, 8, 40))
    order = outputs.argsort(dim=1, descending=True)
    assert measured("a", METRICS["accuracy"], outputs, classes) == float((order[:, 0] == classes).double().mean())
    within = sum(int(c) in row[:5].tolist() for row, c in zip(order, classes, strict=True)) / 40
    assert measured("t", METRICS["top5"], outputs, classes) == pytest.approx(within)
    assert measured("t", METRICS["top5"], outputs[:, :3], classes.clamp(max=2)) == 1.0
    values = rows(40, 8, seed=9)
    errors = (outputs - values).numpy()
    assert measured("r", METRICS["rmse"], outputs, values) == pytest.approx(np.sqrt((errors**2).mean()))
    assert measured("m", METRICS["mae"], outputs, values) == pytest.approx(np.abs(errors).mean())
    logits, labels = rows(40, 1), yes_or_no(40)
    assert measured("b", METRICS["accuracy"], logits, labels) == float(
        ((logits[:, 0] > 0) == labels.bool()).double().mean()
    )


@pytest.mark.parametrize("metric", ADDITIVE, ids=lambda metric: metric.__name__)
def test_what_is_added_up_piece_by_piece_is_the_whole(metric: Any) -> None:
    outputs, targets = rows(30, 7), torch.as_tensor(np.random.default_rng(4).integers(0, 7, 30))
    targets = rows(30, 7, seed=3) if metric.__name__ == "mae" else targets
    whole = metric(outputs, targets)
    pieces = [metric(o, t) for o, t in zip(outputs.split(11), targets.split(11), strict=True)]
    assert whole.shape == (30,) and torch.equal(torch.cat(pieces), whole)


def test_a_metric_gives_one_number_or_one_per_example() -> None:
    outputs, targets = rows(6, 2), rows(6, 2, seed=1)
    assert measured("f", lambda o, t: 0.25, outputs, targets) == 0.25
    assert measured("f", lambda o, t: list(range(6)), outputs, targets) == 2.5
    for bad in (lambda o, t: o, lambda o, t: "high", lambda o, t: None, lambda o, t: 1 / 0):
        with pytest.raises(UserError, match="the metric f (must be one number|cannot be computed)"):
            measured("f", bad, outputs, targets)


# tasks of every kind


class Recurrent(nn.Module):
    """Predicts each next token of a row."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.words, self.memory, self.head = (
            nn.Embedding(tokens, 6),
            nn.GRU(6, 12, batch_first=True),
            nn.Linear(12, tokens),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(self.words(x))[0])


def task(kind: str) -> tuple[nn.Module, list[tuple[np.ndarray, np.ndarray]], str, str, float]:
    """Module, data of five clients and of the test, loss, figure, and what it must reach at least (or, for errors, at
    most)."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((240, 6)), rng.standard_normal((6, 3))
    scores = x @ w
    tasks: dict[str, Any] = {
        "regression": (nn.Linear(6, 1), scores[:, 0], "mse", "test_rmse", 0.3),
        "robust": (nn.Linear(6, 3), scores, "huber", "test_mae", 0.3),
        "binary": (nn.Linear(6, 1), (scores[:, 0] > 0).astype(float), "binary_cross_entropy", "test_auc", 0.97),
        "classes": (nn.Linear(6, 3), scores.argmax(axis=1), "cross_entropy", "test_accuracy", 0.9),
        "labels": (nn.Linear(6, 3), (scores > 0).astype(float), "binary_cross_entropy", "test_accuracy", 0.9),
    }
    torch.manual_seed(0)
    if kind == "next token":
        x = (rng.integers(0, 5, (240, 1)) + np.arange(9)) % 5
        found: Any = (Recurrent(5), x[:, 1:], "cross_entropy", "test_accuracy", 0.9)
        x = x[:, :-1]
    else:
        found = tasks[kind]
    module, y, loss, figure, reached = found
    pairs = [(x[i : i + 40], y[i : i + 40]) for i in range(0, 240, 40)]
    return module, pairs, loss, figure, reached


@pytest.mark.parametrize("kind", ["regression", "robust", "binary", "classes", "labels", "next token"])
def test_every_kind_of_task_trains_and_is_measured(kind: str) -> None:
    module, (*clients, test), loss, figure, reached = task(kind)
    problem = fn.NeuralProblem(module, clients, test, loss)
    local = fn.sgd(0.5, steps=4, batch_size=20) if kind == "next token" else fn.gd(0.3, steps=4)
    done = fn.train(problem, fn.fed_avg(local), rounds=30 if kind == "next token" else 60, evaluate_every=30)
    found = done.history[-1][figure]
    assert found < reached if figure in ("test_rmse", "test_mae") else found > reached
    private = fn.train(problem, fn.dp_fed_avg_clip(local, tau=0.1), privacy=fn.Privacy(epsilon=5.0), rounds=2)
    assert private.statement is not None and np.isfinite(private.history[-1][figure])


@pytest.mark.parametrize("kind", ["regression", "robust", "binary", "labels", "next token"])
def test_gradients_of_every_task_are_autograds_one_client_at_a_time(kind: str) -> None:
    module, (*clients, test), loss, _, _ = task(kind)
    problem = fn.NeuralProblem(module, clients, test, loss, dtype=torch.float64)
    x = problem.init(np.random.default_rng(0))
    found = problem.grad(x, np.arange(5))
    for row, (inputs, targets) in zip(found, clients, strict=True):
        twin = problem.model(x)
        losses = LOSSES[loss](twin(torch.as_tensor(inputs)), torch.as_tensor(targets))
        expected = torch.autograd.grad(losses.mean(), list(twin.parameters()))
        assert torch.allclose(row, torch.cat([g.flatten() for g in expected]), rtol=1e-10, atol=1e-14)


def test_linear_models_of_our_losses_are_computed_layer_by_layer() -> None:
    for kind in ("regression", "binary", "labels"):
        module, (*clients, test), loss, _, _ = task(kind)
        assert fn.NeuralProblem(module, clients, test, loss).way == "layers"


X = np.random.default_rng(0).standard_normal((8, 3))
COLUMN = np.linspace(0, 1, 8)


@pytest.mark.parametrize(
    ("outputs", "y", "loss", "metrics", "message"),
    [
        (1, COLUMN, "mae", None, "unknown loss 'mae'"),
        (1, COLUMN, "mse", ["rsme"], "unknown metric 'rsme'; did you mean 'rmse'?"),
        (1, COLUMN, "mse", ["accuracy"], "accuracy does not fit mse: take rmse or mae"),
        (2, COLUMN.round().astype(int), "cross_entropy", ["rmse"], "rmse does not fit cross_entropy"),
        (2, COLUMN, "cross_entropy", None, "cross entropy needs one whole number"),
        (2, COLUMN, "mse", None, r"outputs of shape \(2,\) for each example, but the targets have one number"),
        (1, COLUMN.round().astype(int), "mse", None, "mse needs numbers with a point"),
        (1, 2 * COLUMN, "binary_cross_entropy", None, "needs targets from 0 to 1"),
        (2, np.arange(8), "cross_entropy", None, "the labels go up to 7: it needs 8"),
        (3, -np.arange(3).repeat(3)[:8], "cross_entropy", None, "not a negative number"),
        (1, COLUMN, "mse", ["rmse", "rmse"], "two metrics called 'rmse'"),
        (1, COLUMN, "mse", [lambda o, t: o.mean(dim=2)], "the metric <lambda> cannot be computed"),
        (1, COLUMN, lambda o, t: torch.zeros(3), None, "one number per example or their mean, not of shape"),
        (1, COLUMN, lambda o, t: 1 / 0, None, "the loss does not take targets"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(outputs: int, y: Any, loss: Any, metrics: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fn.NeuralProblem(nn.Linear(3, outputs), [(X, y)], (X, y), loss, metrics=metrics)
