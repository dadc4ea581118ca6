"""Figures of a run's model: on its own test set those that it recorded, on other data those that a loop finds."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Command, sentence, sets
from example_runs import whole
from safetensors.torch import load_file, save_file
from trained import GRU, SQUARES, settings, texts, trained

import fednormec as fn
from fednormec.config.asking import Reading, asked_about
from fednormec.config.own import Loading
from fednormec.data import digits
from fednormec.errors import UserError
from fednormec.results.evaluating import evaluate
from fednormec.results.exporting import export
from fednormec.results.predicting import predict
from fednormec.runs.records import finished
from fednormec.runs.runner import perform

NET = """
from torch import nn


def build(input_shape, outputs, width: int = 4):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width, track_running_stats=False),
                         nn.Linear(width, outputs))


def zeros(outputs, targets):
    return (outputs.argmax(1) == 0).double()
"""
LOAD = """
import numpy as np
from fednormec.data import digits


def some(rows: int = 50):
    found = digits()
    return found.x[:rows], found.y[:rows]


def clients():
    found = digits()
    return {"a": (found.x[:9], found.y[:9]), "b": (found.x[9:20], found.y[9:20])}


def alone():
    return digits().x[:4]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDNORMEC_DATA", str(tmp_path / "cache"))
    texts(tmp_path)
    (tmp_path / "squares.py").write_text(SQUARES)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "load.py").write_text(LOAD)
    found = digits()
    np.savez(tmp_path / "mine.npz", x=found.x[:300], y=found.y[:300])
    np.savez(tmp_path / "named.npz", x=found.x[:90], y=found.y[:90], client=np.arange(90) % 5)
    return tmp_path


QUADRATIC = {"problem": {"name": "quadratic", "clients": 3, "dim": 2}, "run": {"rounds": 3, "dtype": "float64"}}
OWN = {
    "linear": settings("linear"),
    "conv": settings("small_cnn"),
    "texts": settings("gru"),
    "values": settings("linear", data={"source": "named.npz", "targets": "values"}, problem={"loss": "mse"}),
    "logistic": settings("linear", problem={"name": "logistic", "positive": [0, 3], "regularizer": 0.01}),
    "quadratic": QUADRATIC | {"local": {"step": 0.1}, "method": {"name": "fed_avg"}},
    "features": settings("linear", features={"name": "squares.py:squares"}),
    "a part": settings("mlp", model={"name": "mlp", "trainable": ["3.*"]}),
    "held out": settings("linear", data={"source": "named.npz"}),
    "own metric": settings("linear", problem={"metrics": ["accuracy", "auc", "net.py:zeros"]}),
    "training statistics": settings("linear", model={"name": "net.py:build"}, problem={"statistics": "training"}),
    "batch statistics": settings("linear", model={"name": "net.py:build", "width": 3}),
    "private": settings(
        "linear", method={"name": "dp_fed_avg_clip", "tau": 1.0}, privacy={"noise_std": 2.0, "epsilon": 50.0}
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", OWN)
def test_on_its_own_test_set_the_figures_are_the_recorded_ones_to_the_bit(folder: Path, name: str) -> None:
    trained(folder / "run", OWN[name])
    found, summary = evaluate("run"), finished(folder / "run")
    assert summary is not None and found.recorded is True
    assert found.metrics == {key: summary.metrics[key] for key in found.metrics} and len(found.metrics) > 1
    assert set(found.not_private) == set(summary["not_private"]) & set(found.metrics)
    assert found.privacy == summary["privacy"]


def test_another_model_has_other_figures_and_that_is_said(folder: Path) -> None:
    trained(folder / "run", settings("linear"))
    tensors = load_file(folder / "run" / "model.safetensors")
    save_file({name: -tensor for name, tensor in tensors.items()}, folder / "run" / "model.safetensors")
    found = evaluate("run")
    assert found.recorded is False
    assert "the figures are others than the run recorded" in found.notes[0]


def test_other_training_data_are_refused(folder: Path) -> None:
    trained(folder / "run", settings("linear", data={"source": "mine.npz", "clients": 3}))
    np.savez(folder / "mine.npz", x=digits().x[:50], y=digits().y[:50])
    with pytest.raises(UserError, match="the data in mine.npz are not those that the run began with"):
        evaluate("run")


@pytest.mark.parametrize("model", ["linear", "small_cnn"])
def test_on_other_data_the_figures_are_those_of_a_loop_by_hand(folder: Path, model: str) -> None:
    trained(folder / "run", settings(model))
    found, module = evaluate("run", "mine.npz", metrics=("accuracy", "loss", "auc")), fn.load("run")
    with np.load("mine.npz") as data, torch.no_grad():
        outputs, y = module(torch.from_numpy(data["x"])), torch.from_numpy(data["y"])
    assert found.metrics["test_accuracy"] == pytest.approx(float((outputs.argmax(1) == y).double().mean()), abs=1e-9)
    assert found.metrics["test_loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, y)), rel=1e-5)
    assert list(found.metrics) == ["test_accuracy", "test_loss", "test_auc"]
    assert found.recorded is None and found.on == "mine.npz, 300 examples"


@pytest.mark.parametrize("name", ["neural", "logistic"])
def test_features_are_computed_of_other_data_too(folder: Path, name: str) -> None:
    config = settings("linear", features={"name": "squares.py:squares"}, problem={"name": name})
    trained(folder / "run", config)
    about = json.loads((folder / "run" / "model.json").read_text())
    assert about["inputs"] == [64] and about["before"] == [[1, 8, 8], "numbers"]
    squared = torch.from_numpy(digits().x[:300].reshape(300, 64) ** 2)
    outputs = fn.load("run")(squared).detach()
    right = (
        outputs.argmax(1).numpy() == digits().y[:300]
        if name == "neural"
        else (outputs.numpy() >= 0) == (digits().y[:300] == 1)
    )
    assert evaluate("run", "mine.npz").metrics["test_accuracy"] == pytest.approx(right.mean(), abs=1e-9)
    predict("run", "mine.npz", Path("y.npz"), {})
    with np.load("y.npz") as found:
        expected = outputs.softmax(1) if name == "neural" else outputs.sigmoid()
        np.testing.assert_allclose(found["probability"], expected, atol=1e-6)
    (said,) = export("run", "torchscript", Path("m.pt")).notes
    assert said.startswith("the model takes what the features squares.py:squares make of an example")
    (folder / "squares.py").write_text(SQUARES + "\nraise SystemExit\n")
    for ask in (lambda: evaluate("run", "mine.npz"), lambda: predict("run", "mine.npz", Path("z.npz"), {})):
        with pytest.raises(UserError, match="squares.py is not the file that the run was made with"):
            ask()


def test_logistic_regression_on_other_data(folder: Path) -> None:
    trained(folder / "run", OWN["logistic"])
    found = evaluate("run", "mine.npz")
    with np.load("mine.npz") as data, torch.no_grad():
        right = (fn.load("run")(torch.from_numpy(data["x"])).numpy() >= 0) == np.isin(data["y"], [0, 3])
    assert found.metrics["test_accuracy"] == right.mean()
    assert evaluate("run", "mine.npz", metrics=("accuracy",)).metrics == {"test_accuracy": right.mean()}
    with pytest.raises(UserError, match="unknown metric 'auc'; there are: loss, accuracy"):
        evaluate("run", "mine.npz", metrics=("auc",))


def test_a_source_is_taken_whole_or_by_its_test_set(folder: Path) -> None:
    found, how, load = digits(), Reading(), Loading()
    np.savez(folder / "both.npz", x=found.x[:9], y=found.y[:9], x_test=found.x[9:12], y_test=found.y[9:12])
    for source, settings_, count, is_test in (
        ("both.npz", {}, 3, True), ("mine.npz", {}, 300, False), ("named.npz", {}, 90, False),
        ("digits", {}, 1797, False), ("load.py:some", {"rows": 7}, 7, False), ("load.py:clients", {}, 20, False),
    ):  # fmt: skip
        asked = asked_about(source, settings_, how, load)
        assert (len(asked.examples), asked.is_test) == (count, is_test)
    (folder / "clients").mkdir()
    for name in ("a", "b"):
        np.savez(folder / "clients" / f"{name}.npz", x=found.x[:4], y=found.y[:4])
    assert len(asked_about("clients", {}, how, load).examples) == 8
    np.savez(folder / "clients" / "test.npz", x=found.x[:2], y=found.y[:2])
    assert asked_about("clients", {}, how, load).is_test


def test_who_may_see_the_figures_is_said(folder: Path) -> None:
    trained(folder / "run", settings("linear", data={"source": "mine.npz", "clients": 3}))
    (folder / "copy.npz").write_bytes((folder / "mine.npz").read_bytes())
    for source in ("mine.npz", "copy.npz"):
        found = evaluate("run", source)
        assert found.label == "not private: these are data of the run's own clients"
        assert set(found.not_private) == set(found.metrics)
    other = evaluate("run", "named.npz")
    assert other.not_private == () and "as public as the model if named.npz is public; not private on" in other.text()


def test_batch_normalisation_is_spoken_of(folder: Path) -> None:
    trained(folder / "run", OWN["training statistics"])
    (said,) = evaluate("run").notes
    assert "took the statistics of the clients' training examples" in said and evaluate("run").metrics
    (said,) = evaluate("run", "mine.npz").notes
    assert "takes the statistics of the batch at hand" in said
    trained(folder / "other", settings("linear"))
    assert evaluate("other").notes == () == evaluate("other", "mine.npz").notes


def test_a_diverged_run_says_that_its_model_is_the_last_finite_one(folder: Path) -> None:
    config = OWN["quadratic"] | {"local": {"step": 1e4}, "run": {"rounds": 200}}
    assert perform(config, "test", folder / "run", quiet=True).status == "diverged"
    found = evaluate("run")
    assert found.recorded is None and "last finite model" in found.notes[-1]


def test_an_example_that_the_model_cannot_take_is_a_sentence(folder: Path) -> None:
    trained(folder / "run", OWN["batch statistics"])
    np.savez(folder / "one.npz", x=digits().x[:1], y=digits().y[:1])
    with pytest.raises(UserError, match="the model cannot be evaluated on one.npz: Expected more than 1 value"):
        evaluate("run", "one.npz")


# The command


def test_the_command_prints_figures_their_label_and_the_privacy(fednormec_: Command, folder: Path) -> None:
    trained(folder / "run", OWN["private"])
    done = fednormec_("evaluate", "run")
    assert done.code == 0
    assert [line.split("  ")[0] for line in done.out.splitlines()] == [
        "run on its own test set", "test accuracy", "test loss", "train loss", "recorded", "privacy",
    ]  # fmt: skip
    assert "(a look at the clients' data: not private)" in done.out and "ε ≤ " in done.out
    facts = json.loads(fednormec_("evaluate", "run", "--data", "mine.npz", "--json").out)
    assert facts["epsilon"] > 0 and facts["delta"] == 1e-5 and set(facts["metrics"]) == {"test_loss", "test_accuracy"}
    assert json.loads(fednormec_("evaluate", "run", "--metric", "test_top5", "--json").out)["metrics"].keys() == {
        "test_top5"
    }


def test_code_of_the_users_is_data_with_arguments_and_a_metric(fednormec_: Command, folder: Path) -> None:
    trained(folder / "run", settings("linear"))
    done = fednormec_(
        "evaluate", "run", "--data", "load.py:some", *sets("data.rows=30"), "--metric", "net.py:zeros", "--json"
    )
    facts = json.loads(done.out)
    assert facts["on"] == "load.py:some, 30 examples" and facts["metrics"].keys() == {"test_zeros"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere",), "nowhere does not exist; a run folder is what"),
        (("run", "--data", "no.npz"), "expected an .npz file at no.npz, found none"),
        (
            ("run", "--data", "flat.npz"),
            "the model takes examples of shape (1, 8, 8), those in flat.npz have the shape",
        ),
        (("run", "--data", "high.npz"), "expected labels from 0 to 9, got 13; number them anew"),
        (("run", "--data", "alone.npz"), "alone.npz: expected the keys x, y, found ['x']; add y"),
        (("run", "--data", "texts.npz"), "the model takes examples of shape (1, 8, 8)"),
        (("run", "--data", "load.py:nothing"), "--data: there is no function 'nothing' in load.py; it has"),
        (("run", "--data", "load.py:some", "--set", "data.row=3"), "unknown setting in [data] load.py:some 'row'; did"),
        (("run", "--data", "mine.npz", "--set", "data.clients=3"), "data.clients is for training: a trained model is"),
        (("run", "--data", "mine.npz", "--set", "run.seed=3"), "--set has settings of [data] here, such as data.rows"),
        (("run", "--set", "data.rows=3"), "--set has the settings of --data"),
        (("run", "--metric", "acuracy"), "unknown metric 'acuracy'; did you mean 'accuracy'?"),
        (("run", "--metric", "rmse"), "rmse does not fit cross_entropy: take accuracy or top5 or auc"),
        (("run", "--data", "digit"), "there is no data set, file or folder 'digit'; did you mean 'digits'?"),
    ],
)
def test_a_mistake_is_a_sentence(
    fednormec_: Command, shared: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(shared)
    done = fednormec_("evaluate", *words)
    assert done.code == 2 and not done.out
    assert sentence(done.err).startswith(said)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, found = tmp_path_factory.mktemp("shared"), digits()
    texts(path)
    (path / "load.py").write_text(LOAD)
    np.savez(path / "mine.npz", x=found.x[:9], y=found.y[:9])
    np.savez(path / "flat.npz", x=found.x[:9].reshape(9, 64), y=found.y[:9])
    np.savez(path / "high.npz", x=found.x[:9], y=found.y[:9] + 5)
    np.savez(path / "alone.npz", x=found.x[:9])
    whole(path / "run", "run.rounds=1")
    return path


def test_a_federations_run_has_no_data_of_its_own(folder: Path) -> None:
    trained(folder / "run", settings("linear"))
    config = (folder / "run" / "config.toml").read_text()
    (folder / "run" / "config.toml").write_text(config + '\n[federation]\nclients = ["a"]\ninputs = [1, 8, 8]\n')
    with pytest.raises(UserError, match="the data of run are with its clients: say with --data on which to evaluate"):
        evaluate("run")
    assert evaluate("run", "mine.npz").metrics


def test_changed_code_is_not_run(folder: Path) -> None:
    trained(folder / "run", settings("gru"))
    (folder / "gru.py").write_text(GRU + "\nraise SystemExit\n")
    for data in (None, "texts.npz"):
        with pytest.raises(UserError, match="gru.py is not the file that the run was made with"):
            evaluate("run", data)
