"""State of a run after a round, in one file that is whole or not there.

The format is safetensors: nothing in it is ever executed, and any safetensors reader opens it. The metadata hold a
SHA-256 of everything else, so that damage is found before anything is believed. The clients' memories in it are not
private: no ε covers who sees a checkpoint.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednormec.core.algorithm import Server
from fednormec.engine.memories import BLOCK, Remembered
from fednormec.engine.round import Round
from fednormec.errors import UserError
from fednormec.files import PART, replaced

FORMAT = "fednormec checkpoint 2"
NAME, ENDING = "checkpoint-", ".safetensors"
NAMES = {torch.float32: "F32", torch.float64: "F64"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
TENSORS = ("x", "server_memory", "optimizer", "client_memories")
NO_DIGEST = "0" * 64
MOST_HEADER = 10_000  # bytes; ours has some 700
KEPT = 2  # the newest, and the one before in case that is damaged


class Facts(NamedTuple):
    """Facts in a checkpoint besides the tensors.

    Attributes:
        round: number of rounds done.
        releases: number of rounds released, which is more if some were drawn again.
        in_vain: number of updates in a row, up to the last, that were all non-finite.
        config: digest of what was asked.
        metrics: digest of the records so far.
    """

    round: int
    releases: int
    in_vain: int
    config: str
    metrics: str


class _Block(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int


class Checkpoint:
    """Checkpoint that is intact; the clients' memories stay in the file until `fill` is given room for them."""

    def __init__(self, path: Path, facts: Facts, server: Server, memories: _Block, blank: bool = False) -> None:
        self.path, self.facts, self.server, self._memories, self._blank = path, facts, server, memories, blank
        self.round, self.releases, self.in_vain = facts.round, facts.releases, facts.in_vain

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the clients' memories."""
        return self._memories.shape

    def fill(self, memories: Remembered) -> None:
        """Gives the memories what the file holds; raises UserError if they are of another shape."""
        if memories.shape != self.shape or memories.dtype != self._memories.dtype:
            raise UserError(f"{self.path} is of another run: it holds memories of shape {self.shape}, not "
                            f"{memories.shape}.")  # fmt: skip
        if self._blank:
            return
        with open(self.path, "rb") as file:
            file.seek(self._memories.start)
            memories.fill(lambda rows: _from_file(file, (rows, self.shape[1]), self._memories.dtype))

    def without_memories(self) -> "Checkpoint":
        """Returns the same model with all memories, the method's and the clients', zero as before the first round."""
        server = self.server._replace(memory=torch.zeros_like(self.server.memory))
        return Checkpoint(self.path, self.facts, server, self._memories, blank=True)


class Checkpoints:
    """Checkpoints of one run: when the next is due, and the newest that can be used.

    Args:
        folder: where they are stored.
        config: digest of what was asked.
        rounds: number of rounds between two; None: only the time decides.
        seconds: time after which another is due in any case.
    """

    def __init__(self, folder: Path, config: str, rounds: int | None, seconds: float) -> None:
        self._folder, self._config, self._rounds, self._seconds = folder, config, rounds, seconds
        self._last = time.monotonic()

    def due(self, number: int) -> bool:
        """Returns whether a checkpoint is due after this round."""
        by_count = self._rounds is not None and number % self._rounds == 0
        return by_count or time.monotonic() - self._last >= self._seconds

    def save(self, r: Round, metrics: str) -> None:
        """Writes a checkpoint and removes those that are no longer needed."""
        try:
            save(path_in(self._folder, r.number), r, self._config, metrics)
            tidy(self._folder, KEPT)
        finally:
            self._last = time.monotonic()  # one that failed is tried again when the next is due

    def newest(self, metrics: Callable[[int], str | None]) -> tuple[Checkpoint | None, list[str]]:
        """Returns the newest checkpoint that is intact and fits the records, and what is wrong with newer ones.

        Raises UserError if the config was changed since it was written. `metrics` gives the digest of the first
        records, by their number.
        """
        trouble: list[str] = []
        for path in newest_first(self._folder):
            try:
                found = load(path)
            except UserError as error:
                trouble.append(str(error))
                continue
            if found.facts.config != self._config:
                raise UserError(f"config.toml was changed since {path.name} was written: put the old one back, or "
                                "start a new run.")  # fmt: skip
            if found.facts.metrics == metrics(found.facts.round):
                return found, trouble
            trouble.append(f"{path.name} cannot be used: metrics.jsonl is not what it was then")
        return None, trouble


def path_in(folder: Path, round: int) -> Path:
    """Returns the path of the checkpoint after a round."""
    return folder / f"{NAME}{round}{ENDING}"


def save(path: Path, r: Round, config: str = "", metrics: str = "") -> None:
    """Writes the state after a round; when this returns it is on the disk.

    Call it before the next round begins, which moves the memories.
    """
    facts = Facts(r.number, r.releases, r.in_vain, config, metrics)
    own = (r.server.x, r.server.memory, r.server.optimizer)
    tensors: dict[str, Tensor | Remembered] = dict(zip(TENSORS, (*own, r.memories), strict=True))
    found = hashlib.sha256()
    with replaced(path, private=True) as file:

        def write(content: Any) -> None:
            found.update(content)
            file.write(content)

        write(_header(facts, tensors, NO_DIGEST))
        for part in itertools.chain(own, r.memories.blocks()):  # one block at a time
            write(part.detach().cpu().contiguous().numpy().reshape(-1).view(np.uint8).data)
        file.seek(0)
        file.write(_header(facts, tensors, found.hexdigest()))


def load(path: Path) -> Checkpoint:
    """Returns a checkpoint that is intact; raises UserError, which says what is wrong, for any other file."""
    try:
        with open(path, "rb") as file:
            facts, blocks = _parsed(file)
            x, memory, optimizer = (_tensor(file, blocks[name]) for name in TENSORS[:3])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        said = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise UserError(f"{path.name} cannot be used: {said}") from error
    return Checkpoint(path, facts, Server(x, memory, facts.round, optimizer), blocks["client_memories"])


def newest_first(folder: Path) -> list[Path]:
    """Returns the checkpoints by the round in their names; what clocks say about them means nothing."""
    numbers = [(name[len(NAME) : -len(ENDING)], name) for name in os.listdir(folder) if name.endswith(ENDING)]
    found = [(int(n), name) for n, name in numbers if name.startswith(NAME) and n.isascii() and n.isdecimal()]
    return [folder / name for _, name in sorted(found, reverse=True)]


def tidy(folder: Path, keep: int) -> None:
    """Removes all checkpoints but the newest `keep`, and what a crash left of others."""
    unfinished = [path for path in folder.glob(f"{NAME}*{PART}") if path.is_file()]
    for path in [*newest_first(folder)[keep:], *unfinished]:
        with contextlib.suppress(OSError):  # no more than wasted space
            path.unlink()


def _header(facts: Facts, tensors: Mapping[str, Tensor | Remembered], digest: str) -> bytes:
    """Returns the header of the file, which is as long for one digest as for another."""
    about = {key: str(value) for key, value in facts._asdict().items()}
    entries: dict[str, Any] = {"__metadata__": {"format": FORMAT, **about, "sha256": digest}}
    at = 0
    for name, tensor in tensors.items():
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        entries[name] = {
            "dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size],
        }  # fmt: skip
        at += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _parsed(file: BinaryIO) -> tuple[Facts, dict[str, _Block]]:
    """Returns the facts and where the tensors lie, if the digest says that every byte is as it was written."""
    length = int.from_bytes(file.read(8), "little")
    if length > MOST_HEADER:
        raise ValueError("it is not a checkpoint")
    header = file.read(length)
    entries = json.loads(header)
    about = entries.pop("__metadata__")
    if about["format"] != FORMAT or set(entries) != set(TENSORS):
        raise ValueError(f"it is not a {FORMAT}")
    said = about["sha256"]
    if len(said) != len(NO_DIGEST) or _digest(file, header, said) != said:
        raise ValueError("its checksum is wrong: it is damaged, or was cut off")
    round, releases, in_vain = (_count(about[name]) for name in ("round", "releases", "in_vain"))
    facts = Facts(round, releases, in_vain, str(about["config"]), str(about["metrics"]))
    first = at = 8 + length
    blocks = {}
    for name in TENSORS:
        entry = entries[name]
        shape, dtype, (start, end) = tuple(entry["shape"]), DTYPES[entry["dtype"]], entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, start, end)) or first + start != at:
            raise ValueError("its tensors do not lie one after another")
        if end - start != math.prod(shape) * dtype.itemsize or len(shape) != (2 if name == TENSORS[-1] else 1):
            raise ValueError(f"its {name} has another size than it says")
        at = first + end
        blocks[name] = _Block(shape, dtype, first + start, at)
    if at != os.fstat(file.fileno()).st_size:
        raise ValueError("it is longer or shorter than it says")
    return facts, blocks


def _digest(file: BinaryIO, header: bytes, said: str) -> str:
    blank = header.replace(f'"{said}"'.encode(), f'"{NO_DIGEST}"'.encode())
    found = hashlib.sha256(len(header).to_bytes(8, "little") + blank)
    while block := file.read(BLOCK):
        found.update(block)
    return found.hexdigest()


def _count(text: Any) -> int:
    if not (isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) <= 12):
        raise ValueError("its counts are no numbers")
    return int(text)


def _tensor(file: BinaryIO, block: _Block) -> Tensor:
    file.seek(block.start)
    return _from_file(file, block.shape, block.dtype)


def _from_file(file: BinaryIO, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    kind = np.float32 if dtype == torch.float32 else np.float64
    values = np.fromfile(file, kind, math.prod(shape))
    if len(values) != math.prod(shape):
        raise ValueError("it ends too early")
    return torch.from_numpy(values.reshape(shape))
