"""The clients' side of a round: tiles of clients compute, bound, remember and send."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fednormec.algorithms.base import Algorithm, Server
from fednormec.errors import UserError
from fednormec.local import Moment
from fednormec.memories import Memories
from fednormec.participation import Cohort, Participation
from fednormec.problems.base import Problem
from fednormec.profile import stage
from fednormec.vectors import neighbours
from fednormec.workers import Pool, Submit


class Exchanged(NamedTuple):
    """All that crosses to the server: the sum of the senders' messages, float64; beside it, how many clients were left
    out because their update was not finite."""

    total: Tensor
    left_out: int


class Clients(Protocol):
    """All clients of a simulation, wherever they compute, with what they remember."""

    @property
    def memories(self) -> Memories: ...

    def exchange(self, server: Server, cohort: Cohort, moment: Moment, prime: bool = False) -> Exchanged:
        """One round of `algorithm`, or of `algorithm.prime`, which moves the memories."""
        ...


@contextmanager
def here(
    problem: Problem, algorithm: Algorithm, pool: Pool, exactly: bool, x: Tensor, memories_in: Path | None
) -> Iterator[Clients]:
    """Clients that compute in this process, on a few threads."""
    width = algorithm.memory_slots * problem.dim
    memories = Memories(problem.num_clients, width, x.dtype, x.device, memories_in)
    with pool.threads() as submit:
        yield _Here(problem, algorithm, pool, exactly, memories, submit)


class _Here(NamedTuple):
    problem: Problem
    algorithm: Algorithm
    pool: Pool
    exactly: bool
    memories: Memories
    submit: Submit

    def exchange(self, server: Server, cohort: Cohort, moment: Moment, prime: bool = False) -> Exchanged:
        """Tiles are fixed slices of the computing clients, and their sums are added in order: neither workers nor
        chunks change a bit."""
        algorithm = self.algorithm.prime if prime else self.algorithm
        assert algorithm is not None

        def work(some: list[Cohort]) -> list[Exchanged]:
            return [tile(self.problem, algorithm, server, self.memories, t, moment, self.exactly) for t in some]

        size = self.problem.tile
        total = torch.zeros(algorithm.message_slots * self.problem.dim, dtype=torch.float64, device=server.x.device)
        left_out = 0
        for results in self.pool.in_order(self.submit, work, tiles(cohort, size), size):
            for one in results:
                total += one.total
                left_out += one.left_out
        return Exchanged(total, left_out)


def tile(
    problem: Problem,
    algorithm: Algorithm,
    server: Server,
    memories: Memories,
    cohort: Cohort,
    moment: Moment,
    exactly: bool,
) -> Exchanged:
    """One tile of clients: compute, bound, remember; the sum of the messages of those who send."""
    ids, memory = cohort.computing, memories.rows
    with stage("memories"):
        where = neighbours(ids) or torch.as_tensor(ids, device=memory.device)
        rows = memory[where]  # a view when the ids are neighbours
        correction = algorithm.correction(server, rows) if algorithm.correction else None
    with stage("gradients"):
        updates = algorithm.local.run(problem, server.x, ids, moment, correction)
        if updates.shape != (len(ids), problem.dim):
            raise UserError(f"{algorithm.local.name} gave updates of shape {tuple(updates.shape)} for {len(ids)} "
                            f"clients and {problem.dim} parameters.")  # fmt: skip
    with stage("memories"):
        unbounded = algorithm.keeps_updates or math.isinf(algorithm.bound.radius)
        broken = _not_finite(updates) if unbounded else ()  # a bound finds them by itself
        if len(broken):
            updates[broken], kept = 0, rows[broken]
        messages = algorithm.client_(server, rows, updates)
        if len(broken):
            messages.rows[broken], rows[broken] = 0, kept
        if not isinstance(where, slice):
            memory[where] = rows
        memories.let_go(int(ids[0]), int(ids[-1]))
        sends = torch.as_tensor(cohort.sending, dtype=rows.dtype, device=rows.device)
        return Exchanged(messages.sum(sends, exactly), len(broken) or len(messages.broken))


def tiles(cohort: Cohort, size: int) -> list[Cohort]:
    starts = range(0, len(cohort.computing), size)
    return [Cohort(cohort.computing[s : s + size], cohort.sending[s : s + size]) for s in starts]


def _not_finite(rows: Tensor) -> Tensor:
    """Indices of the rows that hold an inf or a nan, or add up to a number near the largest."""
    sums = (rows @ torch.ones(rows.shape[1], dtype=rows.dtype, device=rows.device)).cpu().numpy()  # neither can hide
    suspects = np.flatnonzero(~(np.abs(sums) < torch.finfo(rows.dtype).max / 8))
    return torch.from_numpy(suspects).to(rows.device)


def regroups(algorithm: Algorithm, participation: Participation, problem: Problem) -> bool:
    """Whether who is drawn decides which clients share a tile: then one client more moves the rounding of all strips,
    and only sums in float64 keep that small."""
    asleep = participation.idle == "sleep" or not algorithm.idle_clients_advance
    return asleep and participation.rate(problem.num_clients) < 1
