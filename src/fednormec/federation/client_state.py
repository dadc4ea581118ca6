"""Memory of a client, on its own disk.

One file per training, replaced as a whole before an answer leaves. It holds the memory after the last round and the one
before that, because whether the last round counted is for the server to say; and the answer itself, so that whoever
asks again gets the same one.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fednormec.errors import UserError
from fednormec.files import replaced

FORMAT = "fednormec client 1"
COUNTS = ("round", "base", "sent", "left_out")
TENSORS = ("memory", "before", "message")


class Kept(NamedTuple):
    """Memory of a client after a round, and its answer.

    Attributes:
        round: the last round.
        base: the round after which the memory was `before`.
        sent: 1 once `message` is as good as sent.
        left_out: 1 if what was computed was not finite, so that `message` is zero before noise.
        digest: digest of the request that was answered.
        memory: the memory after `round`.
        before: the memory that it was computed from.
        message: the answer.
    """

    round: int
    base: int
    sent: int
    left_out: int
    digest: str
    memory: Tensor
    before: Tensor
    message: Tensor

    def after(self, base: int) -> Tensor | None:
        """Returns a copy of the memory after that round; None if it is not known. Before the first round it is zero."""
        if base == 0 or not self.memory.numel():
            return torch.zeros_like(self.memory)
        known = {self.base: self.before, self.round: self.memory}
        return known[base].clone() if base in known else None


class Store:
    """Store of one client's memory in one training. Nothing is there before the first round.

    Args:
        folder: where the file is stored.
        run: name of the training.
        width: number of numbers in the memory.
        size: number of numbers in a message.
        dtype: type of both.
    """

    def __init__(self, folder: Path, run: str, width: int, size: int, dtype: torch.dtype) -> None:
        self.path = folder / f"memory-{run}.safetensors"
        nothing = torch.zeros(width, dtype=dtype)
        self._empty = Kept(0, 0, 0, 0, "", nothing, nothing, torch.zeros(size, dtype=dtype))

    def load(self) -> Kept:
        """Returns what is stored; raises UserError if the file is damaged.

        A damaged file is not taken for none: the person who owns it decides.
        """
        if not self.path.exists():
            return self._empty
        try:
            with safe_open(self.path, framework="pt") as file:
                about, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in TENSORS}
            if about["format"] != FORMAT or about["sha256"] != _digest(about, tensors):
                raise ValueError("its checksum is wrong")
            for name, tensor in tensors.items():
                like = getattr(self._empty, name)
                if tensor.shape != like.shape or tensor.dtype != like.dtype:
                    raise ValueError(f"its {name} is of another model")
            round, base, sent, left_out = (int(about[name]) for name in COUNTS)
            return Kept(round, base, sent, left_out, about["digest"], **tensors)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise UserError(f"{self.path} cannot be used: {error}. Put a copy of it back; or move it away to take part "
                            "as a client that has lost its memory.") from error  # fmt: skip

    def save(self, kept: Kept) -> None:
        """Stores the memory, which is on the disk when this returns."""
        about = {"format": FORMAT, "digest": kept.digest} | {name: str(getattr(kept, name)) for name in COUNTS}
        tensors = {name: getattr(kept, name).contiguous() for name in TENSORS}
        content = save({name: t.clone() for name, t in tensors.items()}, about | {"sha256": _digest(about, tensors)})
        with replaced(self.path, private=True) as file:
            file.write(content)


def _digest(about: dict[str, str], tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256("/".join([about["digest"], *(about[name] for name in COUNTS)]).encode())
    for name in TENSORS:
        found.update(tensors[name].numpy().tobytes())
    return found.hexdigest()
