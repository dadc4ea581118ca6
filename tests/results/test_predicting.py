"""Predictions in a file are those of the loaded model, whatever it was trained for."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Command, sentence
from example_runs import whole
from PIL import Image
from trained import LENGTH, settings, texts, trained

import fednormec as fn
from fednormec.data import digits
from fednormec.errors import UserError
from fednormec.results.evaluating import evaluate
from fednormec.results.predicting import predict

LOAD = "from fednormec.data import digits\n\n\ndef alone():\n    return digits().x[:4]\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    texts(tmp_path, examples=40)
    (tmp_path / "load.py").write_text(LOAD)
    found = digits()
    np.savez(tmp_path / "mine.npz", x=found.x[:600], y=found.y[:600])
    np.savez(tmp_path / "alone.npz", x=found.x[:600])
    return tmp_path


def lines(path: str) -> tuple[list[str], np.ndarray]:
    with open(path, newline="") as file:
        header, *rows = csv.reader(file)
    return header, np.array(rows)


def outputs(x: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        return fn.load("run")(torch.from_numpy(x))


@pytest.mark.parametrize("model", ["linear", "small_cnn"])
def test_classes_and_probabilities_are_those_of_the_model(folder: Path, model: str) -> None:
    trained(folder / "run", settings(model))
    done = predict("run", "alone.npz", Path("y.csv"), {})
    header, rows = lines("y.csv")
    assert done.examples == len(rows) == 600 and done.notes == ()
    assert header == ["example", "class", *(f"probability_{k}" for k in range(10))]
    expected = outputs(digits().x[:600]).softmax(1).numpy()
    np.testing.assert_array_equal(rows[:, 0].astype(int), np.arange(600))
    np.testing.assert_array_equal(rows[:, 1].astype(int), expected.argmax(1))
    np.testing.assert_allclose(rows[:, 2:].astype(float), expected, atol=1e-6)
    right = rows[:, 1].astype(int) == digits().y[:600]
    assert right.mean() == evaluate("run", "mine.npz").metrics["test_accuracy"]


def test_arrays_hold_the_same_as_lines_to_the_bit(folder: Path) -> None:
    trained(folder / "run", settings("linear"))
    predict("run", "mine.npz", Path("y.csv"), {})
    predict("run", "mine.npz", Path("y.npz"), {})
    with np.load("y.npz") as found:
        assert set(found.files) == {"class", "probability"}
        np.testing.assert_array_equal(lines("y.csv")[1][:, 2:].astype(np.float32), found["probability"])


def test_classes_have_their_names_where_these_are_known(folder: Path) -> None:
    trained(folder / "run", settings("linear"))
    about = json.loads((folder / "run" / "model.json").read_text())
    names = [f'digit "{k}", say' for k in range(10)]
    (folder / "run" / "model.json").write_text(json.dumps(about | {"classes": names}))
    predict("run", "mine.npz", Path("y.csv"), {})
    header, rows = lines("y.csv")
    assert header[:3] == ["example", "class", "name"]
    assert [names[int(k)] for k in rows[:, 1]] == rows[:, 2].tolist()


def test_many_classes_leave_the_probability_of_the_one(folder: Path) -> None:
    data = {"source": "mine.npz", "classes": 150, "clients": 3}
    trained(folder / "run", settings("linear", data=data))
    done = predict("run", "mine.npz", Path("y.csv"), {})
    header, rows = lines("y.csv")
    assert header == ["example", "class", "probability"] and "(.npz has those of all 150)" in done.columns
    expected = outputs(digits().x[:600]).softmax(1)
    np.testing.assert_allclose(rows[:, 2].astype(float), expected.max(1).values, atol=1e-6)


def test_of_a_text_the_likeliest_word_at_each_place(folder: Path) -> None:
    trained(folder / "run", settings("gru"))
    done = predict("run", "texts.npz", Path("y.csv"), {})
    header, rows = lines("y.csv")
    assert header == ["example", *(f"class_{k}" for k in range(LENGTH))]
    assert done.columns.startswith(f"the likeliest class at each of {LENGTH} places")
    with np.load("texts.npz") as data:
        expected = outputs(data["x"])
    np.testing.assert_array_equal(rows[:, 1:].astype(int), expected.argmax(-1))
    predict("run", "texts.npz", Path("y.npz"), {})
    with np.load("y.npz") as found:
        np.testing.assert_allclose(found["probability"], expected.softmax(-1), atol=1e-6)


@pytest.mark.parametrize("shape", [(), (2,)])
def test_values(folder: Path, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30, 4)).astype(np.float32), rng.standard_normal((30, *shape)).astype(np.float32)
    np.savez("values.npz", x=x, y=y)
    trained(folder / "run", settings("linear", data={"source": "values.npz"}, problem={"loss": "mse"}))
    predict("run", "values.npz", Path("y.csv"), {})
    header, rows = lines("y.csv")
    assert header == ["example", *(["value_0"] if not shape else ["value_0", "value_1"])]
    np.testing.assert_allclose(rows[:, 1:].astype(float), outputs(x), atol=1e-6)


@pytest.mark.parametrize("name", ["neural", "logistic"])
def test_yes_or_no(folder: Path, name: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((30, 4)).astype(np.float32)
    np.savez("yes.npz", x=x, y=(x[:, 0] > 0).astype(np.int64 if name == "logistic" else np.float32))
    problem = {"name": name} | ({"loss": "binary_cross_entropy"} if name == "neural" else {})
    trained(folder / "run", settings("linear", data={"source": "yes.npz"}, problem=problem))
    predict("run", "yes.npz", Path("y.csv"), {})
    header, rows = lines("y.csv")
    assert header == ["example", "yes", "probability"]
    expected = outputs(x).flatten().sigmoid().numpy()
    np.testing.assert_allclose(rows[:, 2].astype(float), expected, atol=1e-6)
    np.testing.assert_array_equal(rows[:, 1].astype(int), expected > 0.5)


TABLE = {
    "source": "table.csv", "label": "ill", "labels": ["no", "yes"], "client": "site", "scale": {"age": [50, 10]},
    "categories": {"group": ["A", "B", "*"]},
}  # fmt: skip


def table(path: str, rows: int = 60, label: bool = True) -> np.ndarray:
    """Writes a table; returns its numbers as they should come out."""
    rng = np.random.default_rng(rows)
    age, group = rng.integers(20, 90, rows), rng.choice(["A", "B", "AB"], rows)
    lines = [["site", "age", "group", "unused"] + ["ill"] * label]
    for k in range(rows):
        lines.append([f"s{k % 4}", str(age[k]), group[k], "x"] + ["yes" if age[k] > 55 else "no"] * label)
    Path(path).write_text("\n".join(",".join(line) for line in lines) + "\n")
    return np.stack([(age - 50) / 10, group == "A", group == "B", group == "AB"], axis=1).astype(np.float32)


def test_a_table_is_read_by_the_constants_of_the_run(folder: Path) -> None:
    """With or without the column to predict, in another order or with other columns."""
    table("table.csv")
    settings_ = settings("linear", data=TABLE | {"features": ["age", "group"]})
    trained(folder / "run", settings_)
    for name, label in (("with.csv", True), ("without.csv", False)):
        x = table(name, 30, label)
        predict("run", name, Path("y.csv"), {}, force=True)
        header, rows = lines("y.csv")
        assert header == ["example", "class", "name", "probability_0", "probability_1"]
        expected = outputs(x).softmax(1).numpy()
        np.testing.assert_allclose(rows[:, 3:].astype(float), expected, atol=1e-6)
        assert rows[:, 2].tolist() == [("no", "yes")[k] for k in expected.argmax(1)]
    with open("with.csv") as file:
        wanted = [line.strip().endswith("yes") for line in file.readlines()[1:]]
    right = (lines("y.csv")[1][:, 2] == "yes") == wanted
    assert evaluate("run", "with.csv").metrics["test_accuracy"] == right.mean()
    with pytest.raises(UserError, match="data.clients is for training"):
        predict("run", "with.csv", Path("z.csv"), {"clients": 3})
    with pytest.raises(UserError, match="unknown column of without.csv 'ill'"):
        evaluate("run", "without.csv")


def test_a_folder_of_images_is_read_as_the_runs_own(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("images", "new"):
        for kind in ("cat", "dog"):
            (folder / name / kind).mkdir(parents=True)
            for k in range(12):
                pixels = rng.integers(0, 255, (9, 7), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / name / kind / f"{k}.png")
    trained(folder / "run", settings("linear", data={"source": "images", "size": [6, 6], "clients": 2}))
    done = predict("run", "new", Path("y.csv"), {})
    header, rows = lines("y.csv")
    assert done.examples == 24 and header[:3] == ["example", "class", "name"]
    right = rows[:, 2] == ["cat"] * 12 + ["dog"] * 12
    assert evaluate("run", "new").metrics["test_accuracy"] == right.mean()


def test_a_loss_of_the_users_leaves_scores(folder: Path) -> None:
    (folder / "own.py").write_text("def loss(outputs, targets):\n    return -outputs[range(len(targets)), targets]\n")
    trained(folder / "run", settings("linear", problem={"loss": "own.py:loss"}))
    predict("run", "mine.npz", Path("y.csv"), {})
    header, rows = lines("y.csv")
    assert header[:3] == ["example", "class", "score_0"]
    np.testing.assert_allclose(rows[:, 2:].astype(float), outputs(digits().x[:600]), atol=1e-6)


def test_batch_normalisation_is_spoken_of(folder: Path) -> None:
    trained(folder / "run", settings("resnet20", model={"name": "resnet20", "norm": "batch"}))
    (said,) = predict("run", "load.py:alone", Path("y.csv"), {}).notes
    assert "takes the statistics of the batch at hand" in said
    assert len(lines("y.csv")[1]) == 4


def test_a_word_that_the_model_does_not_know_is_a_sentence(folder: Path) -> None:
    trained(folder / "run", settings("gru"))
    np.savez("odd.npz", x=np.full((3, LENGTH), 99))
    with pytest.raises(UserError, match="the model does not take these examples: index out of range"):
        predict("run", "odd.npz", Path("y.csv"), {})
    assert not (folder / "y.csv").exists()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, found = tmp_path_factory.mktemp("shared"), digits()
    np.savez(path / "mine.npz", x=found.x[:9])
    np.savez(path / "flat.npz", x=found.x[:9].reshape(9, 64))
    (path / "there.csv").write_text("mine")
    whole(path / "run", "run.rounds=1")
    return path


def test_the_command_says_what_it_wrote(fednormec_: Command, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shared)
    done = fednormec_("predict", "run", "--data", "mine.npz", "--out", "there.csv", "--force")
    assert done.code == 0
    assert done.out == "there.csv: 9 examples, for each the class, and the probabilities of all classes\n"
    (shared / "there.csv").write_text("mine")


@pytest.mark.parametrize(
    ("data", "out", "said"),
    [
        ("mine.npz", "there.csv", "there.csv exists already: nothing was changed; choose another name, or replace it"),
        ("mine.npz", "y.txt", "--out must end in .csv or .npz, not 'y.txt'."),
        ("mine.npz", "no/y.csv", "there is no folder no for y.csv: make it first."),
        ("mine.npz", ".", "--out must end in .csv or .npz"),
        ("flat.npz", "y.csv", "the model takes examples of shape (1, 8, 8), those in flat.npz have the shape (64,)"),
        ("none.npz", "y.csv", "expected an .npz file at none.npz, found none; check the path"),
    ],
)
def test_a_mistake_is_a_sentence(
    fednormec_: Command, shared: Path, monkeypatch: pytest.MonkeyPatch, data: str, out: str, said: str
) -> None:
    monkeypatch.chdir(shared)
    done = fednormec_("predict", "run", "--data", data, "--out", out)
    assert done.code == 2 and not done.out and sentence(done.err).startswith(said)
    assert (shared / "there.csv").read_text() == "mine" and not (shared / "y.csv").exists()
