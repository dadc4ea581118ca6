"""The model of a run comes back from its folder alone; what is damaged, unfinished or not what it was is a sentence."""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from example_runs import interrupted
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from trained import MODELS, examples, settings, texts, trained

import fednormec as fn
from fednormec.errors import UserError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where we are, with texts to read and the file of a model."""
    monkeypatch.chdir(tmp_path)
    texts(tmp_path)
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_the_model_comes_back_without_the_data(folder: Path, model: str) -> None:
    before = trained(folder / "run", settings(model))
    (folder / "texts.npz").unlink()
    found = fn.load(folder / "run")
    x = examples(model, 6)
    assert not found.training
    assert torch.equal(found(x), before(x))


def test_numbers_stay_in_float64(folder: Path) -> None:
    before = trained(folder / "run", settings("linear", run={"rounds": 1, "dtype": "float64"}))
    assert {p.dtype for p in fn.load("run").parameters()} == {torch.float64}
    assert torch.equal(fn.load("run")(examples("linear", 3).double()), before(examples("linear", 3).double()))


def test_logistic_regression_is_a_module_that_scores(folder: Path) -> None:
    w = trained(folder / "run", settings("linear", problem={"name": "logistic", "positive": [0, 3]}))
    x = examples("linear", 7)
    torch.testing.assert_close(fn.load("run")(x), x.flatten(1) @ w, rtol=1e-6, atol=1e-6)


def test_what_is_stored_of_the_data_is_their_shapes_and_no_more(folder: Path) -> None:
    """Runs on unlike data of the same shapes and number of classes store the same."""
    rng, found = np.random.default_rng(0), []
    for name in ("one", "other"):
        np.savez(folder / f"{name}.npz", x=rng.standard_normal((20, 3)), y=np.r_[rng.integers(0, 4, 19), 3])
        data = {"source": f"{name}.npz", "clients": 2}
        trained(folder / name, settings("linear", data=data))
        found.append((folder / name / "model.json").read_bytes())
    assert found[0] == found[1]
    kind = {"inputs": "numbers", "targets": "classes"}
    shapes = {"inputs": [3], "targets": [], "outputs": 4, "kind": kind}
    assert json.loads(found[0]) == shapes | {"classes": None, "before": None}


def test_a_module_of_the_users_is_filled(folder: Path) -> None:
    before = trained(folder / "run", settings("mlp"))
    (folder / "run" / "model.json").unlink()
    (folder / "run" / "config.toml").unlink()
    own = fn.models.mlp((1, 8, 8), 10).double()
    found = fn.load("run", own)
    assert found is own and not own.training
    assert torch.equal(found(examples("mlp", 4)), before(examples("mlp", 4)))
    with pytest.raises(UserError, match="has no config.toml, so that nothing says which model it holds: give the mod"):
        fn.load("run")


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (fn.models.linear((1, 8, 8), 10), "the module is not the one that was trained: it lacks '3.bias'"),
        (fn.models.mlp((1, 8, 8), 10, (64, 64)), "the module is not the one that was trained: it has '5.bias'"),
        (fn.models.mlp((1, 8, 8), 9), r"its '3.bias' has the shape \(9,\), not \(10,\)"),
    ],
)
def test_another_module_is_refused(folder: Path, module: torch.nn.Module, said: str) -> None:
    trained(folder / "run", settings("mlp"))
    with pytest.raises(UserError, match=said):
        fn.load("run", module)


# Code of the user's own


def test_only_the_file_that_the_run_was_made_with_is_run(folder: Path) -> None:
    trained(folder / "run", settings("gru"))
    (folder / "gru.py").write_text("from pathlib import Path\nPath('run-by').touch()\n")
    with pytest.raises(UserError, match="gru.py is not the file that the run was made with .* put that one back"):
        fn.load("run")
    assert not (folder / "run-by").exists()


def test_code_is_looked_for_where_it_is_said_to_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = trained(folder / "run", settings("gru"))
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    with pytest.raises(UserError, match="the model is built by gru.py, and there is none in .*elsewhere: work in"):
        fn.load(folder / "run")
    found = fn.load(folder / "run", code=folder)
    assert torch.equal(found(examples("gru", 3)), before(examples("gru", 3)))


def test_a_run_folder_brings_no_code_of_its_own(folder: Path) -> None:
    """Whoever sends a run folder, with a file in it and its digest, has nothing run by that."""
    trained(folder / "run", settings("gru"))
    shutil.move(folder / "gru.py", folder / "run" / "gru.py")
    with pytest.raises(UserError, match="there is none in"):
        fn.load("run")


# What is no model


def test_a_quadratic_problem_has_no_model(folder: Path) -> None:
    config = settings("linear", problem={"name": "quadratic", "clients": 3, "dim": 2})
    trained(folder / "run", {name: config[name] for name in ("problem", "local", "method", "run")})
    with pytest.raises(UserError, match="run minimised quadratic functions: there is no model, only the vector in mod"):
        fn.load("run")


def test_an_unfinished_run_has_none_yet(folder: Path) -> None:
    interrupted(folder / "run", "run.rounds=3", after=1)
    with pytest.raises(UserError, match="has not finished, so that there is no model yet: fednormec run --resume run"):
        fn.load("run")


def test_what_is_no_run_folder(folder: Path) -> None:
    for path, said in (("nowhere", "does not exist"), ("texts.npz", "is a file"), (".", "holds no run")):
        with pytest.raises(UserError, match=said):
            fn.load(path)


def test_a_model_from_python_needs_its_module(folder: Path) -> None:
    """A config cannot build what only a program has."""
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    pairs = [(torch.randn(5, 3), torch.arange(5) % 2) for _ in range(2)]
    done = fn.train(fn.NeuralProblem(module, pairs), fn.fed_avg(fn.gd(0.1)), rounds=2, out=folder / "run")
    with pytest.raises(UserError, match="came from a Python program, and no config can build it: give the module"):
        fn.load("run")
    x = torch.randn(4, 3)
    assert torch.equal(fn.load("run", torch.nn.Linear(3, 2))(x), done.model(x))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    trained(path / "run", settings("linear"))
    return path / "run"


DAMAGED = st.binary(max_size=40) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["inputs", "targets", "outputs", "kind", "classes", "a"]), inner)
    ),
    max_leaves=8,
).map(lambda content: json.dumps(content).encode())


@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["model.json", "model.safetensors", "summary.json", "config.toml"]), DAMAGED)
def test_a_damaged_file_is_a_sentence(whole: Path, name: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(shutil.copytree(whole, Path(folder) / "run"))
        (run / name).write_bytes(content)
        try:
            fn.load(run)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 600


@pytest.mark.parametrize("name", ["model.json", "model.safetensors", "summary.json"])
def test_a_missing_or_cut_off_file_is_named(whole: Path, tmp_path: Path, name: str) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    content = (run / name).read_bytes()
    (run / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=name):
        fn.load(run)
    (run / name).unlink()
    with pytest.raises(UserError, match=name if name != "summary.json" else "has not finished"):
        fn.load(run)


def test_shapes_of_another_model_are_noticed(whole: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    tensors = load_file(run / "model.safetensors")
    save_file({name: tensor[:5] for name, tensor in tensors.items()}, run / "model.safetensors")
    with pytest.raises(UserError, match=r"describes is not the one that was trained: its '1.\w+' has the shape"):
        fn.load(run)
