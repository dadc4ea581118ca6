"""Model of a run in the formats of others, each compared with the model before it is kept."""

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import load as read_tensors
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor, nn

from fednormec import __version__
from fednormec.core.randomness import generator
from fednormec.data.sources import Shapes
from fednormec.errors import UserError, known
from fednormec.files import replaced
from fednormec.results.evaluating import BATCH_NORM, has_batch_norm
from fednormec.results.loading import Stored, load, problem_name, stored
from fednormec.results.predicting import require_writable

ENDINGS = {"safetensors": ".safetensors", "torchscript": ".pt", "onnx": ".onnx"}
SIZES = (1, 7)  # of the batches on which an exported model is compared; it is made with another
MADE_WITH = 2
TOLERANCE = 1e-4  # of the largest number that the model puts out
ABOUT = "fednormec.json"
Model = Callable[[Tensor], Tensor]


class Exported(NamedTuple):
    """File with a run's model in it.

    Attributes:
        path: the file.
        size: its bytes.
        compared: what was compared with the model, in words.
        notes: what else to know.
    """

    path: Path
    size: int
    compared: str
    notes: tuple[str, ...]


class _Made(NamedTuple):
    """Content of a file, and the model in it as others read it; None if nothing here can."""

    content: bytes
    model: Model | None


def export(run: str | Path, format: str, out: Path, force: bool = False, code: str | Path = ".") -> Exported:
    """Writes a run's model in a format of others; raises UserError if what was written does not say the same.

    Args:
        run: folder of a run that has finished.
        format: safetensors (the tensors alone), torchscript or onnx (they need no code, and take batches of any size).
        out: the file, which must be new.
        force: whether the file may be replaced.
        code: folder that files of the user's own code are relative to.
    """
    known("format", format, ENDINGS)
    require_writable(out, force)
    if format == "onnx":
        require_onnx()
    found = stored(run)
    model, about = load(run, code=code), metadata(found)
    make = {"safetensors": _safetensors, "torchscript": _torchscript, "onnx": _onnx}[format]
    made = make(model, _example(found.shapes, model, MADE_WITH), about)
    compared = _compared(model, made.model, found.shapes, format)
    with replaced(out) as file:
        file.write(made.content)
    notes: tuple[str, ...] = (BATCH_NORM,) if has_batch_norm(model) else ()
    if found.shapes.before is not None:
        name = found.config.get("features", {}).get("name")
        notes += (f"the model takes what the features {name} make of an example, and these are not in the file",)
    return Exported(out, len(made.content), compared, notes)


def metadata(found: Stored) -> dict[str, str]:
    """Returns what a file says of the model in it, as texts: all of it public."""
    shapes, config = found.shapes, found.config
    said = {
        "fednormec": __version__,
        "problem": problem_name(config),
        "model": str(config.get("model", {}).get("name", "")),
        "inputs": json.dumps(shapes.inputs),
        "outputs": str(shapes.outputs),
        "kind": json.dumps(shapes.kind._asdict()),
        "privacy": str(found.summary["privacy"]),
    }
    said |= {} if shapes.before is None else {"features": json.dumps(config.get("features"))}
    return said | ({} if shapes.classes is None else {"classes": json.dumps(shapes.classes)})


def require_onnx() -> None:
    """Raises UserError if what writes ONNX is not installed."""
    if any(find_spec(name) is None for name in ("onnx", "onnxscript")):
        raise UserError("the format onnx needs further packages: pip install 'fednormec[onnx]'.")


def _safetensors(model: nn.Module, example: Tensor, about: dict[str, str]) -> _Made:
    content = tensors_to_bytes({name: t.contiguous().clone() for name, t in model.state_dict().items()},
                               {"format": "pt"} | about)  # fmt: skip
    state = model.state_dict()
    read = read_tensors(content)

    def again(x: Tensor) -> Tensor:
        if read.keys() != state.keys():
            raise UserError("the tensors did not come back as they were.")
        found: Tensor = torch.func.functional_call(model, read, (x,))
        return found

    return _Made(content, again)


def _torchscript(model: nn.Module, example: Tensor, about: dict[str, str]) -> _Made:
    """Traces the model, which any module lets be done to it; whether sizes went into the trace is compared afterwards.

    Not by torch.export, which torch would rather have: its files are no TorchScript, and its own documentation does not
    promise that later versions read them.
    """
    out, jit = io.BytesIO(), cast(Any, torch.jit)
    with _quietly(), torch.no_grad():
        traced = jit.trace(model, (example,), check_trace=False)
        jit.save(traced, out, _extra_files={ABOUT: json.dumps(about).encode()})
        out.seek(0)
        read: Model = jit.load(out)
    return _Made(out.getvalue(), read)


def _onnx(model: nn.Module, example: Tensor, about: dict[str, str]) -> _Made:
    batch = torch.export.Dim("batch")
    with _quietly():
        program: Any = torch.onnx.export(
            model, (example,), dynamo=True, dynamic_shapes=({0: batch},), input_names=["inputs"],
            output_names=["outputs"], verbose=False,
        )  # fmt: skip
    proto = program.model_proto
    for key, value in about.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value
    content: bytes = proto.SerializeToString()
    return _Made(content, _onnx_model(content))


def _onnx_model(content: bytes) -> Model | None:
    """Returns the model as onnxruntime reads it; None where that is not installed."""
    if find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(content, options)
    return lambda x: torch.from_numpy(session.run(["outputs"], {"inputs": x.numpy()})[0])


def _compared(model: nn.Module, read: Model | None, shapes: Shapes, format: str) -> str:
    """Compares what was written with the model, on made-up batches of sizes that it was not made with."""
    if read is None:
        return "not compared with the model: that needs onnxruntime"
    largest = 0.0
    for size in SIZES:
        x = _example(shapes, model, size)
        with torch.no_grad():
            expected = model(x)
            try:
                found = read(x)
            except Exception as error:  # whatever the reader of a format raises
                said = " ".join(str(error).split())[:200].rstrip(".")
                raise UserError(f"as {format} the model does not take a batch of {size}, though it was made with one "
                                f"of {MADE_WITH}: {said}. Does its code look at the size of a batch? Nothing was "
                                "written.") from error  # fmt: skip
        apart = float((found - expected).abs().max()) if found.shape == expected.shape else float("inf")
        if not apart <= TOLERANCE * max(1.0, float(expected.abs().max())):
            raise UserError(f"as {format} the model says something else than it does here, on a batch of {size}: does "
                            "its code look at numbers, or at the size of a batch? Nothing was written.")  # fmt: skip
        largest = max(largest, apart)
    return f"the same as the model to {largest:.1e} on batches of {' and '.join(map(str, SIZES))}"


def _example(shapes: Shapes, model: nn.Module, size: int) -> Tensor:
    """Makes up a batch."""
    rng, shape = generator(0, "example", size), (size, *shapes.inputs)
    if shapes.kind.inputs == "tokens":
        kinds = (nn.Embedding, nn.EmbeddingBag)
        words = min((layer.num_embeddings for layer in model.modules() if isinstance(layer, kinds)), default=1)
        return torch.from_numpy(rng.integers(0, words, shape))
    return torch.from_numpy(rng.standard_normal(shape)).to(next(model.parameters()).dtype)


@contextmanager
def _quietly() -> Iterator[None]:
    """Keeps torch from saying what its own code does, and that TorchScript has a successor."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except UserError:
        raise
    except Exception as error:  # whatever it raises where a model cannot be taken apart
        said = " ".join(str(error).split())[:200].rstrip(".")
        raise UserError(f"the model cannot be exported: {said}. Nothing was written.") from error
    finally:
        logger.setLevel(before)
