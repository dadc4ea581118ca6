"""Memory of a client, on its own disk.

One file per training, replaced as a whole before an answer leaves. It holds the memory after the last round and the one
before that, because whether the last round counted is for the server to say; and the answer itself, so that whoever
asks again gets the same one.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fednormec.errors import UserError
from fednormec.files import replace_text, replaced, to_json

FORMAT = "fednormec client 1"
COUNTS = ("round", "base", "sent")
TENSORS = ("memory", "before", "message")


class Kept(NamedTuple):
    """Memory of a client after a round, and its answer.

    Attributes:
        round: the last round.
        base: the round after which the memory was `before`.
        sent: 1 once `message` is as good as sent.
        digest: digest of the request that was answered.
        memory: the memory after `round`.
        before: the memory that it was computed from.
        message: the answer.
    """

    round: int
    base: int
    sent: int
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
        self._empty = Kept(0, 0, 0, "", nothing, nothing, torch.zeros(size, dtype=dtype))

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
            round, base, sent = (int(about[name]) for name in COUNTS)
            return Kept(round, base, sent, about["digest"], **tensors)
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


class Releases:
    """Number of messages that have left this client, by agreement, whatever the server calls its trainings.

    It is stored in a file of its own, which stays when a memory is moved away or another agreement comes.

    Args:
        folder: where the file is stored.
        agreed: digest of the agreement under which messages leave now.
    """

    def __init__(self, folder: Path, agreed: str) -> None:
        self.path, self._agreed = folder / "releases.json", agreed

    def count(self) -> int:
        """Returns the number of messages under this agreement; raises UserError if the file is damaged."""
        return self._load().get(self._agreed, NONE).releases

    def before(self) -> int:
        """Returns the number of messages under all other agreements."""
        return sum(other.releases for agreed, other in self._load().items() if agreed != self._agreed)

    def reserve(self, run: str, most: int) -> bool:
        """Counts one more message, which is on the disk afterwards; returns False if there were `most` already.

        A kill can leave a message of this training that was counted and never left. The one that takes its place in the
        store is not counted again. One of another training is: the store still holds the first, which may yet leave.
        """
        mine = self._load().get(self._agreed, NONE)
        if mine.still_here != run:
            if mine.releases >= most:
                return False
            self._store(_Released(mine.releases + 1, run))
        return True

    def may_leave(self) -> None:
        """Notes that the message that was counted is stored and may leave; that is on the disk afterwards."""
        mine = self._load().get(self._agreed, NONE)
        if mine.still_here:
            self._store(mine._replace(still_here=""))

    def _store(self, mine: "_Released") -> None:
        every = self._load() | {self._agreed: mine}
        replace_text(self.path, to_json({agreed: one._asdict() for agreed, one in every.items()}) + "\n")

    def _load(self) -> dict[str, "_Released"]:
        if not self.path.exists():
            return {}
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            every = {str(agreed): _Released(**one) for agreed, one in found.items()}
            if all(
                type(one.releases) is int and one.releases >= 0 and type(one.still_here) is str
                for one in every.values()
            ):
                return every
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            pass
        raise UserError(f"{self.path}, which counts what has left this client, is damaged: put a copy of it back.")


class _Released(NamedTuple):
    """Number of messages that left under one agreement, and the training whose last one is counted and still here."""

    releases: int
    still_here: str


NONE = _Released(0, "")


def _digest(about: dict[str, str], tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256("/".join([about["digest"], *(about[name] for name in COUNTS)]).encode())
    for name in TENSORS:
        found.update(tensors[name].numpy().tobytes())
    return found.hexdigest()
