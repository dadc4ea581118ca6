"""A model in a format of others says what it said, for batches of any size; where it would not, nothing is written."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Command, sentence
from safetensors import safe_open
from trained import MODELS, examples, settings, texts, trained

import fednormec as fn
from fednormec.errors import UserError
from fednormec.results import exporting
from fednormec.results.exporting import export

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
BAKED = """
from torch import nn


class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x.reshape(int(x.shape[0]), -1))


def build(input_shape, outputs):
    return Net(64, outputs)


class Choosing(nn.Linear):
    def forward(self, x):
        outputs = super().forward(x.flatten(1))
        return outputs if float(x.sum()) > 1e4 or len(x) == 2 else -outputs


def choosing(input_shape, outputs):
    return Choosing(64, outputs)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    texts(tmp_path)
    (tmp_path / "baked.py").write_text(BAKED)
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_safetensors_and_torchscript_come_back(folder: Path, model: str) -> None:
    trained(folder / "run", settings(model))
    found = fn.load("run")
    for format, path in (("safetensors", Path("m.safetensors")), ("torchscript", Path("m.pt"))):
        done = export("run", format, path)
        assert done.size == path.stat().st_size and done.notes == ()
    with safe_open("m.safetensors", framework="pt") as file:
        state, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    extra = {exporting.ABOUT: ""}
    script = torch.jit.load("m.pt", _extra_files=extra)
    again = fn.load("run", torch.nn.Module.requires_grad_(fn.load("run")))
    again.load_state_dict({name: tensor + 1 for name, tensor in state.items()})
    again.load_state_dict(state)
    for size in (1, 7):
        x = examples(model, size)
        assert torch.equal(again(x), found(x))
        torch.testing.assert_close(script(x), found(x), rtol=0, atol=1e-5)
    assert about["format"] == "pt" and {k: v for k, v in about.items() if k != "format"} == json.loads(
        extra[exporting.ABOUT]
    )
    assert json.loads(about["inputs"]) == list(examples(model, 1).shape[1:]) and about["privacy"].startswith("none: no")


@pytest.mark.parametrize("model", ["bag", "causal_net"])
def test_models_of_tokens_come_back(folder: Path, model: str) -> None:
    words = np.random.default_rng(0).integers(0, 11, (30, 6))
    np.savez("words.npz", x=words[:, :5], y=words[:, 5] if model == "bag" else words[:, 1:])
    data = {"source": "words.npz", "inputs": "tokens", "clients": 3, "classes": 11}
    own = {"name": model} if model == "bag" else {"name": model, "layers": 2}
    trained(folder / "run", settings(model, data=data, model=own))
    export("run", "torchscript", Path("m.pt"))
    for size in (1, 7):
        x = examples("gru", size)
        torch.testing.assert_close(torch.jit.load("m.pt")(x), fn.load("run")(x), rtol=0, atol=1e-5)


def test_logistic_regression_comes_back(folder: Path) -> None:
    trained(folder / "run", settings("linear", problem={"name": "logistic"}))
    export("run", "torchscript", Path("m.pt"))
    for size in (1, 7):
        x = examples("linear", size)
        torch.testing.assert_close(torch.jit.load("m.pt")(x), fn.load("run")(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("build", "as torchscript the model does not take a batch of 1, though it was made with one of 2"),
        ("choosing", "as torchscript the model says something else than it does here, on a batch of 1"),
    ],
)
def test_code_that_looks_at_its_batch_is_found_out(folder: Path, function: str, said: str) -> None:
    trained(folder / "run", settings("linear", model={"name": f"baked.py:{function}"}))
    with pytest.raises(UserError, match=said):
        export("run", "torchscript", Path("m.pt"))
    assert not list(folder.glob("m.pt*"))


def test_batch_normalisation_is_spoken_of(folder: Path) -> None:
    trained(folder / "run", settings("resnet20", model={"name": "resnet20", "norm": "batch"}))
    (said,) = export("run", "torchscript", Path("m.pt")).notes
    assert "takes the statistics of the batch at hand" in said


def test_a_format_needs_its_packages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(folder / "run", settings("linear"))
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"the format onnx needs further packages: pip install 'fednormec\[onnx\]'"):
        export("run", "onnx", Path("m.onnx"))


def test_the_command(fednormec_: Command, folder: Path) -> None:
    trained(folder / "run", settings("linear"))
    done = fednormec_("export", "run", "--format", "torchscript")
    assert done.code == 0
    assert done.out.startswith("run.pt: ") and done.out.endswith(
        " the same as the model to 0.0e+00 on batches of 1 and 7\n"
    )
    for words, said in (
        (("run", "--format", "tflite"), "unknown format 'tflite'; there are: safetensors, torchscript, onnx."),
        (("run", "--format", "torchscrip"), "unknown format 'torchscrip'; did you mean 'torchscript'?"),
        (("run", "--format", "torchscript"), "run.pt exists already: nothing was changed"),
        (("run", "--format", "torchscript", "--out", "."), ". is a folder: name a file with --out."),
        (("nowhere", "--format", "safetensors"), "nowhere does not exist"),
    ):
        done = fednormec_("export", *words)
        assert done.code == 2 and not done.out and sentence(done.err).startswith(said)
