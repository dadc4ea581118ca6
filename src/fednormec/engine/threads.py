"""Clients in this process: threads that compute tiles of them side by side, with results in a fixed order."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier
from typing import Any, NamedTuple, TypeVar

import torch

from fednormec.core.algorithm import Server
from fednormec.core.local import Moment
from fednormec.core.machine import keep_freed_memory, one_arithmetic_thread
from fednormec.core.participation import Cohort
from fednormec.core.problem import Problem
from fednormec.engine.clients import FREE, Branch, Clients, Exchanged, Job, Paying, Place, add, added, tile, tiles
from fednormec.engine.memories import Memories
from fednormec.errors import UserError, at_least_one, note

T = TypeVar("T")
R = TypeVar("R")
Submit = Callable[..., "Future[Any]"]


class Pool(NamedTuple):
    """Size of the work of threads: `workers` of them, each alone with its arithmetic, `chunk_size` clients a turn."""

    workers: int
    chunk_size: int

    @contextmanager
    def threads(self) -> Iterator[Submit]:
        """Starts the threads, each set to do its own arithmetic alone; yields the function that submits work to them.

        That is faster for many clients, and the bits of a result do not depend on the number of threads.
        """
        keep_freed_memory()
        ready, patient = Barrier(self.workers + 1), True
        executor = ThreadPoolExecutor(self.workers, initializer=compute_alone)
        try:
            with one_arithmetic_thread():  # restores the setting, which is torch's default for new threads too
                for _ in range(self.workers):
                    executor.submit(ready.wait)  # a thread that waits cannot take a second one: all start now
                ready.wait()
            yield executor.submit
        except KeyboardInterrupt:
            patient = False  # whoever is in a hurry does not wait for a tile
            raise
        finally:
            executor.shutdown(wait=patient, cancel_futures=not patient)

    def in_order(self, submit: Submit, work: Callable[[list[T]], R], items: list[T], per_item: int) -> Iterator[R]:
        """Yields work() of each chunk of items, in the items' order, with at most two chunks per thread under way.

        Args:
            submit: the function that `threads` yields.
            work: what a thread does with a chunk.
            items: what there is to do.
            per_item: number of clients in an item.
        """
        size = max(1, self.chunk_size // per_item)
        under_way: deque[Future[R]] = deque()
        for start in range(0, len(items), size):
            if len(under_way) >= 2 * self.workers:
                yield under_way.popleft().result()
            under_way.append(submit(work, items[start : start + size]))
        while under_way:
            yield under_way.popleft().result()


class Threads(NamedTuple):
    """Place where threads of this process compute the clients.

    Args:
        workers: number of threads; by default as many as torch uses.
        chunk_size: number of clients that a thread takes at a time; by default one tile.
        memories_in: folder of the file in which the clients' memories are stored, for more of them than the machine has
            memory for; by default they lie in memory.
    """

    workers: int | None = None
    chunk_size: int | None = None
    memories_in: Path | None = None

    def pool(self, problem: Problem) -> Pool:
        """Returns how the work on this problem is spread."""
        workers = torch.get_num_threads() if self.workers is None else self.workers
        return Pool(
            min(at_least_one("workers", workers), problem.num_clients),
            at_least_one("chunk_size", problem.tile if self.chunk_size is None else self.chunk_size),
        )

    def check(self, job: Job) -> None:
        """Raises UserError if there can be no such threads, or if memories in a file are asked for beyond the CPU."""
        self.pool(job.problem)
        if job.protocol:
            if self.memories_in is not None:
                raise UserError(
                    "memories in a file are not for secure aggregation in one process: keep them in memory."
                )
            _together().check(job)
        if self.memories_in is not None and job.x.device.type != "cpu":
            kind = job.x.device.type
            raise UserError(f"memories in a file are for the CPU, not for {kind}: keep them in memory.")

    @contextmanager
    def clients(self, job: Job) -> Iterator[Clients]:
        """Opens the clients of a job; where secure aggregation runs, they go through its stages one by one."""
        if job.protocol:
            with _together().clients(job) as clients:
                yield clients
            return
        memories, pool = Memories(job.memory_shape, job.x.dtype, job.x.device, self.memories_in), self.pool(job.problem)
        with pool.threads() as submit:
            yield _Here(job, pool, memories, submit)


def _together() -> Place:
    from fednormec.engine.together import Together  # its cryptography takes time to import

    return Together(tell=note)


def compute_alone() -> None:
    """Makes this thread do its arithmetic on its own."""
    torch.get_num_threads()  # torch sets a thread up at its first call, with the default; only then ours will stay
    torch.set_num_threads(1)


class _Here(NamedTuple):
    """Clients that compute in this process."""

    job: Job
    pool: Pool
    memories: Memories
    submit: Submit
    noisy: bool = False

    def ready(self) -> None:
        pass

    def exchange(
        self, server: Server, cohort: Cohort, moment: Moment, prime: bool = False, paying: Paying = FREE
    ) -> Exchanged:
        work = self.job.work(prime)

        def compute(some: list[Cohort]) -> list[Exchanged]:
            return [tile(work, server, self.memories, one, moment) for one in some]

        branches, number = list[Branch](), 0
        for results in self.pool.in_order(self.submit, compute, tiles(self.job, cohort), work.problem.tile):
            for one in results:
                add(branches, Branch(0, number, one))
                number += 1
        return added(branches, work.message_width, server.x.device)
