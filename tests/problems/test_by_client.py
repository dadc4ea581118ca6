"""How a figure is spread over the clients: the same as a loop over them finds, and never public."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from example_runs import interrupted, whole
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fednormec as fn
from fednormec.config.assemble import assemble
from fednormec.core.problem import ByClient
from fednormec.errors import UserError
from fednormec.results.reading import read_run
from fednormec.results.report import page
from fednormec.runs.clients import read_by_client
from fednormec.runs.runner import go_on
from fednormec.runs.summary import describe

FEATURES, CLASSES = 4, 3
FED_AVG = {"name": "fed_avg"}


def pairs(sizes: tuple[int, ...], values: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    made = [torch.randn(n, FEATURES) for n in sizes]
    return [(x, x[:, 0] if values else (x[:, 0] > 0).long() + (x[:, 1] > 1).long()) for x in made]


def net(outputs: int = CLASSES, batch: bool = False) -> nn.Module:
    torch.manual_seed(1)
    middle = [nn.BatchNorm1d(5, track_running_stats=False)] if batch else []
    return nn.Sequential(nn.Linear(FEATURES, 5), *middle, nn.Tanh(), nn.Linear(5, outputs))


def spread(problem: fn.NeuralProblem | fn.Logistic, x: torch.Tensor | None = None) -> ByClient:
    found = problem.evaluate(problem.init(np.random.default_rng(0)) if x is None else x)
    assert found.by_client is not None
    assert not [name for name in found.public if name.startswith("client_")]
    assert found.by_client.figures.items() <= found.not_private.items()
    return found.by_client


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.booleans())
def test_tenths_are_means_of_the_worst_and_the_best(values: list[float], higher: bool) -> None:
    found = ByClient.of("a", higher, values)
    ordered, tenth = sorted(values, reverse=not higher), math.ceil(len(values) / 10)
    assert found.values == tuple(ordered)
    expected = (np.mean(values), np.mean(ordered[:tenth]), np.mean(ordered[-tenth:]))
    assert list(found.figures.values()) == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert list(found.figures) == ["client_a", "client_a_worst", "client_a_best"]


def test_what_is_not_finite_is_left_out() -> None:
    assert ByClient.of("a", True, [math.nan, 2.0, math.inf, 1.0]).values == (1.0, 2.0)
    assert all(math.isnan(value) for value in ByClient.of("a", True, [math.nan]).figures.values())


@pytest.mark.parametrize("vectorize", ["auto", "loop"])
@pytest.mark.parametrize("kind", ["accuracy", "rmse", "auc", "loss", "batch", "mean loss", "own"])
def test_the_figure_of_each_client_is_that_of_a_loop(kind: str, vectorize: str) -> None:
    values, module = kind == "rmse", net(1 if kind == "rmse" else CLASSES, batch=kind == "batch")
    clients = pairs((3, 8, 5, 8), values)

    def mean_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets)

    def zeros(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(1) == 0).double()

    loss = {"rmse": "mse", "mean loss": mean_loss}.get(kind, "cross_entropy")
    metrics = {"loss": [], "mean loss": [], "auc": ["auc", "accuracy"], "own": [zeros]}.get(kind)
    found = spread(fn.NeuralProblem(module, clients, None, loss, metrics=metrics, vectorize=vectorize, per_client=True))
    with torch.no_grad():
        outputs = [(module(x), y) for x, y in clients]
    figures = {
        "accuracy": lambda o, y: float((o.argmax(1) == y).double().mean()),
        "rmse": lambda o, y: float((o[:, 0] - y).square().mean().sqrt()),
        "loss": lambda o, y: float(nn.functional.cross_entropy(o, y)),
        "own": lambda o, y: float(zeros(o, y).mean()),
        "auc": auc,
    }
    one = figures[{"batch": "accuracy", "mean loss": "loss"}.get(kind, kind)]
    expected = sorted((one(*pair) for pair in outputs), reverse=kind in ("rmse", "loss", "mean loss"))
    assert found.values == pytest.approx([value for value in expected if math.isfinite(value)], rel=1e-5)
    assert found.name == {"batch": "accuracy", "mean loss": "loss", "own": "zeros"}.get(kind, kind)
    assert not found.held_out


def auc(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """How often a yes has a higher score than a no, class by class, pair by pair."""
    areas = []
    for k in range(CLASSES):
        yes, no = outputs[targets == k, k], outputs[targets != k, k]
        if len(yes) and len(no):
            areas.append(float((yes[:, None] > no[None]).double().mean()))
    return float(np.mean(areas)) if areas else math.nan


def test_held_out_examples_are_looked_at_where_their_owners_are_known() -> None:
    module, clients, (x, y) = net(), pairs((4, 4, 4)), pairs((9,))[0]
    owners = [0, 2, 2, 0, 2, 2, 0, 2, 2]
    found = spread(fn.NeuralProblem(module, clients, (x, y), held_out=True, per_client=True, owners=owners))
    with torch.no_grad():
        right = (module(x).argmax(1) == y).double().numpy()
    expected = [right[np.array(owners) == i].mean() for i in (0, 2)]  # client 1 has none
    assert found.held_out and found.values == pytest.approx(sorted(expected))


@pytest.mark.parametrize("owners", [None, [0, 1, 1, 0]])
def test_logistic_regression_by_client(owners: list[int] | None) -> None:
    rng = np.random.default_rng(0)
    a = [torch.from_numpy(rng.standard_normal((n, 2))) for n in (3, 6)]
    y = [torch.from_numpy(np.where(rng.random(n) > 0.5, 1.0, -1.0)) for n in (3, 6)]
    test = torch.from_numpy(rng.standard_normal((4, 2))), torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    problem = fn.Logistic(a, y, test=test, per_client=True, owners=owners)
    for x in (torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, -0.5], dtype=torch.float64)):
        own = list(zip(a, y, strict=True))
        if owners is not None:
            own = [(test[0][np.array(owners) == i], test[1][np.array(owners) == i]) for i in (0, 1)]
        expected = sorted(float((((b @ x) >= 0) == (z > 0)).double().mean()) for b, z in own)
        assert spread(problem, x).values == pytest.approx(expected) and spread(problem, x).held_out == bool(owners)


@pytest.mark.parametrize("owners", [[0], [0, 1, 9, 0], [0, -1, 0, 0], [0.5, 0, 0, 0]])
def test_owners_that_are_none_are_refused(owners: list[float]) -> None:
    with pytest.raises(UserError, match="owners must be "):
        fn.NeuralProblem(net(), pairs((3, 3)), pairs((4,))[0], owners=owners)


def test_nothing_is_measured_unless_it_is_asked_for() -> None:
    found = fn.NeuralProblem(net(), pairs((3, 3))).evaluate(torch.zeros(5 * FEATURES + 5 + 5 * CLASSES + CLASSES))
    assert found.by_client is None and list(found.not_private) == ["train_loss"]


def test_examples_that_are_held_out_know_whose_they_are(tmp_path: Path) -> None:
    x = np.arange(60, dtype=np.float32)[:, None] * np.ones(3, np.float32)
    np.savez(tmp_path / "named.npz", x=x, y=np.arange(60) % 2, client=np.arange(60) % 5)
    data = {"source": str(tmp_path / "named.npz"), "test_examples": 8}
    problem = assemble(
        {"data": data, "problem": {"per_client": True}, "local": {"step": 0.1}, "method": FED_AVG}
    ).problem
    for number, client in zip(problem._test[0][:, 0].int().tolist(), problem._owners, strict=True):
        assert number % 5 == client


# In a run


def test_a_run_records_it_apart_and_says_that_it_is_not_private(tmp_path: Path) -> None:
    summary = whole(tmp_path / "run", "problem.per_client=true", "run.rounds=4", "run.evaluate_every=2")
    run = read_run(tmp_path / "run")
    names = ["client_accuracy", "client_accuracy_worst", "client_accuracy_best"]
    evaluated = [record for record in run.records if record.evaluated]
    assert len(evaluated) == 2 and all(set(names) <= set(record.apart) for record in evaluated)
    assert not any(set(names) & set(record.public_part) for record in run.records)
    assert set(names) <= set(summary["not_private"]) and not run.public("client_accuracy")
    (said,) = [line for line in describe(summary).splitlines() if line.startswith("over clients")]
    assert said.endswith("(a look at the clients' data: not private)") and "worst tenth" in said
    stored = json.loads((tmp_path / "run" / "clients.json").read_text())
    assert set(stored) == {"not_private"} and stored["not_private"]["round"] == 4
    assert read_by_client(tmp_path / "run").figures == {name: summary["metrics"][name] for name in names}
    assert len(stored["not_private"]["values"]) == 20


def test_training_has_the_same_bits_with_and_without_it(tmp_path: Path) -> None:
    for name, asked in (("with", "true"), ("without", "false")):
        whole(tmp_path / name, f"problem.per_client={asked}", "run.rounds=3")
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("with", "without"))
    assert one == other and not (tmp_path / "without" / "clients.json").exists()


def test_a_run_that_was_interrupted_ends_with_the_same(tmp_path: Path) -> None:
    settings = ("problem.per_client=true", "run.rounds=4", "run.evaluate_every=2")
    whole(tmp_path / "whole", *settings)
    interrupted(tmp_path / "again", *settings, after=3)
    go_on(tmp_path / "again", quiet=True)
    for name in ("clients.json", "metrics.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.long
def test_the_page_shows_it_and_marks_it(tmp_path: Path) -> None:
    whole(tmp_path / "run", "problem.per_client=true", "run.rounds=4", "run.evaluate_every=2")
    whole(tmp_path / "plain", "run.rounds=2")
    shown = page([read_run(tmp_path / "run"), read_run(tmp_path / "plain")])
    section = shown[shown.index("<h2>Over the clients</h2>") : shown.index("<h2>Privacy</h2>")]
    assert section.count("<svg role=") == 2 and section.count("Not private: it looks at the clients") == 5
    assert "on each one's own examples" in section
    assert "Over the clients" not in page([read_run(tmp_path / "plain")])
    assert page([read_run(tmp_path / "run")]) == page([read_run(tmp_path / "run")])


@given(st.binary(max_size=30) | st.recursive(
    st.none() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["not_private", "name", "values", "higher", "held_out"]), inner),
).map(lambda content: json.dumps(content).encode()))  # fmt: skip
def test_a_damaged_file_is_as_good_as_none(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "clients.json").write_bytes(content)
    found = read_by_client(folder)
    assert found is None or all(map(math.isfinite, found.values))


def test_digits_of_unlike_clients_differ() -> None:
    """The worst tenth of clients with few classes is below the mean, and the best above it."""
    config = {"data": {"partition": "shards", "clients": 20}, "problem": {"per_client": True}}
    mean, worst, best = spread(assemble(config | {"local": {"step": 0.1}, "method": FED_AVG}).problem).figures.values()
    assert worst < mean < best
