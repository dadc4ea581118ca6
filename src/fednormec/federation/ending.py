"""End of a training: what the server tells its clients then, and the trained model that a client may keep."""

import hashlib
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fednormec.core.randomness import generator
from fednormec.errors import UserError
from fednormec.federation.agreement import Federation
from fednormec.federation.messages import LENGTH, MOST_SAID, OVER, Refused, framed, unframed
from fednormec.files import replaced


def ending(model: Path) -> bytes:
    """Returns what clients are told at the end: the digest of the model's file and its content, if there is one."""
    if not model.exists():  # the training diverged
        return framed({"kind": OVER})
    content = model.read_bytes()
    return framed({"kind": OVER, "sha256": hashlib.sha256(content).hexdigest()}) + content


def longest_ending(federation: Federation) -> int:
    """Returns how many bytes the end has, at most: the file follows from the names and shapes of the model."""
    like = {name: t.contiguous().clone() for name, t in _like(federation).items()}
    return len(save(like)) + LENGTH.size + MOST_SAID


def model_in(data: bytes, federation: Federation) -> tuple[bytes, str]:
    """Returns the file of the trained model that came with the end, and its digest.

    Raises Refused if there is none, if it is not what the digest says, or not a model of this federation.
    """
    said, content = unframed(data)
    digest = said.get("sha256")
    if digest is None:
        raise Refused("the server has no model: the training diverged")
    if digest != hashlib.sha256(content).hexdigest():
        raise Refused("the model that came is not the one whose digest the server said")
    try:
        found = load(content)
    except (SafetensorError, ValueError):
        raise Refused("what came is no model") from None
    like = federation.experiment.problem.named(federation.experiment.problem.init(generator(0, "init")))
    if {name: (t.shape, t.dtype) for name, t in found.items()} != {
        name: (t.shape, t.dtype) for name, t in like.items()
    }:
        raise Refused("the model that came is not of the kind that all agreed on")
    if not all(bool(t.isfinite().all()) for t in found.values()):
        raise Refused("the model that came is not finite")
    return content, str(digest)


def _like(federation: Federation) -> dict[str, Tensor]:
    """Returns a model with the names and shapes that the trained one has."""
    problem = federation.experiment.problem
    return problem.named(problem.init(generator(0, "init")))


def require_new_file(path: Path) -> None:
    """Raises UserError if a model cannot be stored in this file, or something is there already."""
    if path.exists():
        raise UserError(f"{path} is there already: give --keep-model another file, or move it away.")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--keep-model: there is no folder {path.absolute().parent}.")


def keep(path: Path, data: bytes, federation: Federation) -> str:
    """Stores the trained model that came with the end; returns a sentence about it, or about why there is none."""
    try:
        content, digest = model_in(data, federation)
    except Refused as why:
        raise UserError(f"no model was stored: {why}.") from None
    try:
        with replaced(path) as file:
            file.write(content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error
    return f"{path}: the trained model, sha256 {digest}"
