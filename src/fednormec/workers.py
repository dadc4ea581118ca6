"""Threads that compute tiles of clients side by side, with results in a fixed order."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")
Submit = Callable[..., "Future[Any]"]


class Pool(NamedTuple):
    """How work is spread: `workers` threads, each doing its arithmetic alone, `chunk_size` clients at a time."""

    workers: int
    chunk_size: int

    @contextmanager
    def threads(self) -> Iterator[Submit]:
        """The threads, each set to do its own arithmetic alone: that is faster for many clients, and the bits of a
        result do not depend on how many threads there are."""
        own, ready = torch.get_num_threads(), Barrier(self.workers + 1)
        with ThreadPoolExecutor(self.workers, initializer=_compute_alone) as executor:
            for _ in range(self.workers):
                executor.submit(ready.wait)  # a thread that waits cannot take a second one: all start now
            ready.wait()
            torch.set_num_threads(own)  # the setting is torch's default for new threads too
            yield executor.submit

    def in_order(self, submit: Submit, work: Callable[[list[T]], R], items: list[T], per_item: int) -> Iterator[R]:
        """work() of each chunk of items, in the items' order, with at most two chunks per thread under way."""
        size = max(1, self.chunk_size // per_item)
        under_way: deque[Future[R]] = deque()
        for start in range(0, len(items), size):
            if len(under_way) >= 2 * self.workers:
                yield under_way.popleft().result()
            under_way.append(submit(work, items[start : start + size]))
        while under_way:
            yield under_way.popleft().result()


def _compute_alone() -> None:
    torch.get_num_threads()  # torch sets a thread up at its first call, with the default; only then ours will stay
    torch.set_num_threads(1)
