"""A model in ONNX says what it said, for batches of any size: torch takes seconds to write each."""

from pathlib import Path

import onnxruntime
import pytest
import torch
from trained import MODELS, examples, settings, texts, trained

import fednormec as fn
from fednormec.results.exporting import export


@pytest.mark.parametrize("model", [*MODELS, "logistic", "batch"])
def test_onnx_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.chdir(tmp_path)
    texts(tmp_path)
    own = {
        "logistic": settings("linear", problem={"name": "logistic"}),
        "batch": settings("resnet20", model={"name": "resnet20", "norm": "batch"}),
    }
    trained(tmp_path / "run", own[model] if model in own else settings(model))
    done = export("run", "onnx", Path("m.onnx"))
    assert done.compared.startswith("the same as the model to ") and len(done.notes) == (model == "batch")
    session, found = onnxruntime.InferenceSession("m.onnx"), fn.load("run")
    for size in (1, 7):
        x = examples(model, size)
        (outputs,) = session.run(None, {"inputs": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(outputs), found(x).detach(), rtol=0, atol=1e-5)
    assert session.get_modelmeta().custom_metadata_map["privacy"].startswith("none: no noise")
