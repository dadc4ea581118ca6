"""Memories of the clients: one block of rows (M, slots d), in the machine's memory or in a file."""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fednormec.errors import UserError, require_room

PAGE = mmap.PAGESIZE
BLOCK = 2**24  # bytes that are copied at a time


class Remembered(Protocol):
    """Memories of all clients, a row each, wherever they lie."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def rows(self) -> Tensor:
        """Block of all rows, brought here if it lies elsewhere."""
        ...

    def blocks(self) -> Iterator[Tensor]:
        """Yields all rows in order, some at a time, to look at."""
        ...

    def fill(self, read: Callable[[int], Tensor]) -> None:
        """Replaces all rows, some at a time: `read(n)` gives the next n of them."""
        ...


class Memories:
    """Block of memories, all zero at first; `rows` is the block itself.

    A file is for blocks that are larger than the machine's memory, and is read and written page by page as needed.
    `let_go` after each tile keeps only what is being computed in this process' memory, while the system's cache holds
    as much of the rest as there is room for.

    Args:
        shape: number of rows, and of numbers in a row.
        dtype: type of the numbers.
        device: where the block lies; by default the CPU.
        folder: folder of the file; None: the block lies in memory.
        first: number of the client that row 0 belongs to.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | None = None,
        folder: Path | None = None,
        first: int = 0,
    ) -> None:
        self.rows: Tensor
        self.first = first
        rows, width = shape
        device = device or torch.device("cpu")
        self._map: mmap.mmap | None = None
        if folder is None or not width:
            if device.type == "cpu":
                require_room("the clients' memories", rows * width * dtype.itemsize, "set run.memories = 'file'")
            self.rows = torch.zeros(rows, width, dtype=dtype, device=device)
            return
        self._row_bytes = width * dtype.itemsize
        try:
            with tempfile.TemporaryFile(dir=folder) as file:  # gone with the process, however that ends
                size = rows * self._row_bytes
                file.truncate(size)
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)  # a disk too full raises now, and does not crash later
                self._map = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            raise UserError(f"no file for the memories can be made in {folder}: {error.strerror or error}.") from error
        self.rows = torch.frombuffer(self._map, dtype=dtype).view(rows, width)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.rows.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    def let_go(self, first: int, last: int) -> None:
        """Lets the pages of rows first to last leave this process' memory, since the rows are not needed for now."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            start = -(-first * self._row_bytes // PAGE) * PAGE
            length = (last + 1) * self._row_bytes // PAGE * PAGE - start
            if length > 0:
                self._map.madvise(mmap.MADV_DONTNEED, start, length)

    def blocks(self) -> Iterator[Tensor]:
        for start, end in pieces(self.shape, self.dtype):
            yield self.rows[start:end]
            self.let_go(start, end - 1)

    def fill(self, read: Callable[[int], Tensor]) -> None:
        for rows in self.blocks():
            rows.copy_(read(len(rows)))


def pieces(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """Yields the first row and the end of each block that is copied at a time."""
    height, width = shape
    step = max(1, BLOCK // max(1, width * dtype.itemsize))
    for start in range(0, height if width else 0, step):
        yield start, min(start + step, height)
