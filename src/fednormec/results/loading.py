"""Model of a finished run, built again from its folder alone: config.toml, model.json and model.safetensors."""

import shlex
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fednormec.config.assemble import model_of
from fednormec.config.own import Loading, check_digests, is_own, require_made_with
from fednormec.config.schema import Config, read
from fednormec.config.settings import DEFAULT_NAMES, PYTHON
from fednormec.data.sources import Shapes
from fednormec.errors import UserError
from fednormec.runs.folder import MODEL
from fednormec.runs.records import SUMMARY, Summary, finished
from fednormec.runs.shapes import SHAPES, read_shapes

CONFIG = "config.toml"
BY_HAND = "give the module to fill: fn.load(run, module=...)"


class Stored(NamedTuple):
    """Model of a finished run, as its folder holds it.

    Attributes:
        path: the run folder.
        summary: how the run ended.
        tensors: the parameters and buffers by name.
    """

    path: Path
    summary: Summary
    tensors: dict[str, Tensor]

    @property
    def config(self) -> Config:
        """Sections of config.toml; raises UserError if it cannot be read or describes no model."""
        if not (self.path / CONFIG).is_file():
            raise UserError(f"{self.path} has no {CONFIG}, so that nothing says which model it holds: {BY_HAND}.")
        return read(self.path / CONFIG)

    @property
    def shapes(self) -> Shapes:
        """Shapes of what the model takes and puts out; raises UserError if nobody wrote them down."""
        found = read_shapes(self.path)
        if found is None:
            what = "is damaged" if (self.path / SHAPES).exists() else "is missing"
            raise UserError(f"{self.path / SHAPES}, which says what the model takes and puts out, {what}: put it back, "
                            f"or {BY_HAND}.")  # fmt: skip
        return found


def load(run: str | Path, module: nn.Module | None = None, code: str | Path = ".") -> nn.Module:
    """Returns the trained model of a run, in evaluation mode and on the CPU. The training data need not be there.

    The model of logistic regression is a module that gives each example a score, above 0 for the classes that
    `positive` names. A model with batch normalisation normalises by the batch that it is given, so that what it says of
    an example depends on the others in the batch. One that was trained on [features] takes these.

    Args:
        run: folder of a run that has finished.
        module: the module to fill with the trained parameters, for a run whose model came from a Python program; by
            default the model is built as the run's config says.
        code: folder that files of your own code ("net.py:build") are relative to, as they were when you trained; only
            the file that the run was made with is taken.

    Raises:
        UserError: if there is no such run, it has not finished, or a file of it is damaged or not what it was.
    """
    found = stored(run)
    whose = f"the model that {found.path / CONFIG} describes" if module is None else "the module"
    return filled(built(found, Path(code)) if module is None else module, found.tensors, whose)


def stored(run: str | Path) -> Stored:
    """Returns what a run folder holds of its model; raises UserError if it holds none."""
    path = Path(run)
    if not path.is_dir():
        what = "is a file, not a run folder: give the folder that it lies in" if path.exists() else "does not exist"
        raise UserError(f"{path} {what}; a run folder is what `fednormec run` made.")
    summary = finished(path)
    if summary is None:
        raise UserError(_unfinished(path))
    try:
        return Stored(path, summary, load_file(path / MODEL))
    except (OSError, SafetensorError) as error:
        why = "it is missing" if not (path / MODEL).exists() else str(error).rstrip(".") or "it is damaged"
        raise UserError(f"{path / MODEL} cannot be read: {why}. Put a copy of it back.") from error


def built(found: Stored, code: Path) -> nn.Module:
    """Builds the model of a run, with other numbers in it than the trained ones; `code` is as in `load`."""
    config, name = found.config, problem_name(found.config)
    if name == "quadratic":
        raise UserError(f"the run in {found.path} minimised quadratic functions: there is no model, only the vector in "
                        f"{MODEL}.")  # fmt: skip
    if name == "logistic":
        return nn.Sequential(nn.Flatten(), nn.Linear(len(_weights(found)), 1, bias=False), nn.Flatten(0))
    if name != "neural" or PYTHON in config:
        raise UserError(f"the model of {found.path} came from a Python program, and no config can build it: {BY_HAND}.")
    run = config.get("run", {})
    dtype = torch.float64 if run.get("dtype") == "float64" else torch.float32
    seed = run.get("seed", 0)
    if type(seed) is not int:
        raise UserError(f"{found.path / CONFIG}: run.seed must be a whole number, not {seed!r}.")
    require_code(config, code)
    return model_of(config, {}, found.shapes, seed, dtype, Loading(code))


def filled(module: nn.Module, tensors: dict[str, Tensor], whose: str) -> nn.Module:
    """Puts a run's numbers into a module, in the run's dtype, and returns it in evaluation mode.

    Args:
        module: the module, whose own numbers are lost.
        tensors: parameters and buffers by name; the weights of logistic regression alone.
        whose: what errors call the module.
    """
    state = dict(module.state_dict())
    if tensors.keys() == {"w"} and len(state) == 1 and "w" not in state:
        (name, like), (weights,) = *state.items(), tensors.values()
        tensors = {name: weights.reshape(like.shape) if weights.numel() == like.numel() else weights}
    for what, odd in (("lacks", tensors.keys() - state.keys()), ("has", state.keys() - tensors.keys())):
        if odd:
            raise UserError(f"{whose} is not the one that was trained: it {what} '{min(odd)}'.")
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:
            raise UserError(f"{whose} is not the one that was trained: its '{name}' has the shape "
                            f"{tuple(state[name].shape)}, not {tuple(tensor.shape)}.")  # fmt: skip
    kinds = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    module = module.to(device="cpu", dtype=next(iter(kinds)) if len(kinds) == 1 else None)
    module.load_state_dict(tensors)
    return module.eval()


def problem_name(config: Config) -> str:
    """Returns the name of the problem that a run minimised."""
    return str(config.get("problem", {}).get("name", DEFAULT_NAMES["problem"]))


def require_code(config: Config, folder: Path) -> None:
    """Raises UserError if code of the user's that a run needs is not in the folder, or is not what it was."""
    name = config.get("model", {}).get("name")
    file = str(name).rpartition(":")[0]
    if is_own(name) and file.endswith(".py") and not (folder / file).is_file():
        raise UserError(f"the model is built by {file}, and there is none in {folder.resolve()}: work in the folder "
                        "where the run was made, or name that folder (--code DIR; code=... in Python).")  # fmt: skip
    require_made_with(check_digests(config.get("code", {})), folder)


def _weights(found: Stored) -> Tensor:
    weights = found.tensors.get("w")
    if weights is None or weights.ndim != 1 or len(found.tensors) != 1:
        raise UserError(f"{found.path / MODEL} does not hold the weights of a logistic regression: put a copy of it "
                        "back.")  # fmt: skip
    return weights


def _unfinished(path: Path) -> str:
    if (path / SUMMARY).exists():
        return f"{path / SUMMARY} is damaged, so that nobody knows whether the run has finished: put a copy of it back."
    if not (path / "metrics.jsonl").exists():
        return f"{path} holds no run; a run folder is what `fednormec run` made."
    return (
        f"the run in {path} has not finished, so that there is no model yet: fednormec run --resume "
        f"{shlex.quote(str(path))}"
    )
