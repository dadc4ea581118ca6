"""The clients' side of a round. A `Job` is what is computed, a `Place` is where; it gives `Clients`, which exchange a
round's messages. `tile` is what threads and Ray compute: some clients update, bound, remember and send."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fednormec.core.algorithm import Algorithm, Server
from fednormec.core.bounds import Adding, Messages, TooLong
from fednormec.core.local import Moment
from fednormec.core.participation import Cohort, Participation
from fednormec.core.personal import Pulled
from fednormec.core.problem import Problem
from fednormec.core.stages import stage
from fednormec.core.vectors import neighbours
from fednormec.engine.memories import Memories, Remembered
from fednormec.errors import BoundBroken, UserError
from fednormec.privacy.mechanism import Mechanism
from fednormec.privacy.records import AnyPlan, for_clients

STRETCHES = 4  # least number of stretches, if there are as many tiles


class Job(NamedTuple):
    """Work of a simulation, wherever it is computed.

    Args:
        problem: what is minimised.
        algorithm: the method.
        participation: who takes part, by the method's rule.
        plan: what the noise follows; None without privacy.
        seed: seed of all randomness but secure noise.
        x: the model to start from.
    """

    problem: Problem
    algorithm: Algorithm
    participation: Participation
    plan: AnyPlan | None
    seed: int
    x: Tensor

    def work(self, prime: bool = False) -> "Work":
        """Work of a tile; with `prime` that of the method that runs for one exact round before the first."""
        algorithm = self.algorithm.prime if prime else self.algorithm
        assert algorithm is not None
        longest = math.inf if self.mechanism is None else self.mechanism.radius
        exactly = regroups(self.participation, self.problem)
        return Work(self.problem, algorithm, Adding(exactly, longest, algorithm.bound.grid))

    @property
    def protocol(self) -> bool:
        """True if the stages of secure aggregation run."""
        return self.mechanism is not None and self.mechanism.protocol

    @property
    def mechanism(self) -> Mechanism | None:
        """Mechanism of the sums of messages; None where they get no noise of their own."""
        plan = for_clients(self.plan)
        return None if plan is None else plan.mechanism

    @property
    def memory_shape(self) -> tuple[int, int]:
        """Shape of all clients' memories, a row for each client."""
        return self.problem.num_clients, self.algorithm.memory_slots * self.problem.dim

    @property
    def stretch(self) -> int:
        """Number of neighbouring clients that share tiles.

        Where all compute, it is one tile. Where only drawn clients compute, it is whole tiles, enough that about one
        tile is drawn of them, but few enough for 4 stretches of all clients. It depends on the problem and on the rule,
        never on who computes: stretches are what workers elsewhere own.
        """
        size, m = self.problem.tile, self.problem.num_clients
        if not regroups(self.participation, self.problem):
            return size
        most = -(-m // size) // STRETCHES
        return size * max(1, math.ceil(min(1 / self.participation.rate(m), most)))


class Work(NamedTuple):
    """Work of a tile of clients: all that a worker elsewhere needs of a job.

    Args:
        problem: what is minimised.
        algorithm: the method.
        adding: how messages are added, and how long one may be.
    """

    problem: Problem
    algorithm: Algorithm
    adding: Adding

    @property
    def message_width(self) -> int:
        """Number of numbers in a message."""
        return self.algorithm.message_width(self.problem.dim)


class Place(Protocol):
    """Place where clients compute: `Threads` of this process, `Ray`'s workers, machines at the other end of a wire.

    A place is trusted: it adds and measures the messages, and says who answered.
    """

    def check(self, job: Job) -> None:
        """Raises UserError if the job cannot be computed there; called before anything is written."""
        ...

    def clients(self, job: Job) -> AbstractContextManager["Clients"]:
        """Opens the clients of a job, for as long as the context is open."""
        ...


class Paying:
    """Payments of a round: each is one release, in the ledger before anything of it can be seen.

    Args:
        before_release: called before each release.
        most: number of releases that the budget pays for; inf: there is no limit.
    """

    def __init__(self, before_release: Callable[[], None] = lambda: None, most: float = math.inf) -> None:
        self._before_release, self._most, self.paid = before_release, most, 0

    def pay(self) -> bool:
        """Pays for one release; returns False, and does nothing, if the budget does not pay for it."""
        if self.paid >= self._most:
            return False
        self._before_release()
        self.paid += 1
        return True


FREE = Paying()


class Exchanged(NamedTuple):
    """Content of an exchange: all that crosses to the server.

    Attributes:
        total: sum of the senders' messages, float64.
        left_out: number of clients that were left out, because their update was non-finite or their message refused.
        cohort: clients that answered, where clients can fail to; None: all who were asked.
        missed: number of clients that did not answer, where clients can fail to.
    """

    total: Tensor
    left_out: int
    cohort: Cohort | None = None
    missed: int | None = None


class Branch(NamedTuple):
    """Sum over 2^level neighbouring tiles, the first of which has the number place · 2^level: a subtree of `add`."""

    level: int
    place: int
    sum: Exchanged


class Clients(Protocol):
    """Clients of a job, wherever they compute.

    Attributes:
        memories: what is remembered of each client here.
        noisy: whether clients add their noise themselves, so that what they send is a release, or their sum is.
    """

    @property
    def memories(self) -> Remembered: ...
    @property
    def noisy(self) -> bool: ...

    def ready(self) -> None:
        """Returns when a round can begin: before that nothing of it is paid for."""
        ...

    def exchange(
        self, server: Server, cohort: Cohort, moment: Moment, prime: bool = False, paying: Paying = FREE
    ) -> Exchanged:
        """Exchanges the messages of one round and moves the memories.

        Args:
            server: the server's state, which clients are told.
            cohort: who computes, and who sends.
            moment: seed and number of the round.
            prime: whether this is the exact round before the first.
            paying: pays for what clients release with their own noise, before any of it leaves them.
        """
        ...


def add(branches: list[Branch], new: Branch) -> None:
    """Adds a branch to the right of the others; two halves of one become that one.

    Tiles are thus added in a binary tree over their numbers, whoever computes which of them: neither threads nor
    machines change a bit, and whoever has a row of neighbouring tiles sends no more than a few branches.
    """
    while branches and new.place % 2 and branches[-1][:2] == (new.level, new.place - 1):
        left = branches.pop().sum
        both = Exchanged(left.total.add_(new.sum.total), left.left_out + new.sum.left_out)
        new = Branch(new.level + 1, new.place // 2, both)
    branches.append(new)


def added(branches: list[Branch], width: int, device: torch.device) -> Exchanged:
    """Adds all branches, from the right, where they are shortest; returns zeros if nobody computed."""
    if not branches:
        return Exchanged(torch.zeros(width, dtype=torch.float64, device=device), 0)
    total = branches[-1].sum.total
    for branch in reversed(branches[:-1]):
        total = branch.sum.total.add_(total)
    return Exchanged(total, sum(branch.sum.left_out for branch in branches))


def tile(work: Work, server: Server, memories: Memories, cohort: Cohort, moment: Moment) -> Exchanged:
    """Computes one tile of clients: updates, bounds, remembers, and adds the messages of those who send."""
    ids, memory = cohort.computing, memories.rows
    own = ids - memories.first
    with stage("memories"):
        where = neighbours(own) or torch.as_tensor(own, device=memory.device)
        rows = memory[where]  # a view when the ids are neighbours
    messages, left_out = computed(work.problem, work.algorithm, server, rows, ids, moment)
    with stage("memories"):
        if not isinstance(where, slice):
            memory[where] = rows
        memories.let_go(int(own[0]), int(own[-1]))
        sends = torch.as_tensor(cohort.sending, dtype=rows.dtype, device=rows.device)
        return Exchanged(summed(work.algorithm, messages, sends, work.adding), left_out)


def computed(
    problem: Problem, algorithm: Algorithm, server: Server, rows: Tensor, ids: np.ndarray, moment: Moment
) -> tuple[Messages, int]:
    """Computes the messages of a block of clients and moves their memories; also counts the clients that were left out.

    The message of a client that is left out is zero, and its memory stays.

    Args:
        problem: what is minimised.
        algorithm: the method.
        server: the server's state.
        rows: the clients' memories, one for each id.
        ids: numbers of the clients.
        moment: seed and number of the round.
    """
    updates = updated(problem, algorithm, server, rows, ids, moment)
    with stage("memories"):
        unbounded = algorithm.keeps_updates or math.isinf(algorithm.bound.radius)
        broken = _not_finite(updates) if unbounded else ()  # a bound finds them by itself
        if len(broken):
            updates[broken], kept = 0, rows[broken]
        with torch.no_grad():
            messages = algorithm.client_(server, rows, algorithm.given(updates, ids, moment))
        _require_fit(algorithm, messages, rows, problem.dim)
        messages = messages._replace(rows=messages.rows.detach())
        if len(broken):
            messages.rows[broken], rows[broken] = 0, kept
        return messages, len(broken) or len(messages.broken)


def updated(
    problem: Problem, algorithm: Algorithm, server: Server, rows: Tensor, ids: np.ndarray, moment: Moment
) -> Tensor:
    """Computes the updates P_i of a block of clients, (B, d).

    Args:
        problem: what is minimised.
        algorithm: the method.
        server: the server's state.
        rows: the clients' memories, one for each id.
        ids: numbers of the clients.
        moment: seed and number of the round.
    """
    with stage("memories"):
        correction = algorithm.correction(server, rows) if algorithm.correction else None
        begin = algorithm.own(server, rows) if algorithm.own else server.x
    near = Pulled(problem, server.x, algorithm.pull) if algorithm.pull else problem
    with stage("gradients"):
        updates = algorithm.local.run(near, begin, ids, moment, correction)
    if updates.shape != (len(ids), problem.dim):
        raise UserError(f"{algorithm.local.name} gave updates of shape {tuple(updates.shape)} for {len(ids)} "
                        f"clients and {problem.dim} parameters.")  # fmt: skip
    return updates


def summed(algorithm: Algorithm, messages: Messages, sends: Tensor, adding: Adding) -> Tensor:
    """Adds the senders' messages.

    In a private run this is where each is measured, whatever the method made of it: raises BoundBroken if one is longer
    than the noise counts on, or not a number.
    """
    try:
        return messages.sum(sends, adding)
    except TooLong as broken:
        raise BoundBroken(
            f"{algorithm.name} sent a message of length {broken.length:.6g}, but its bound {algorithm.bound.name} "
            f"promises at most {algorithm.bound.radius:.6g}, and the noise counts on that. Nothing of this round was "
            "released: let client_ return what the bound gives (fednormec.check_method tries a method)."
        ) from None


def _require_fit(algorithm: Algorithm, messages: Messages, memories: Tensor, dim: int) -> None:
    """Raises BoundBroken if messages are not rows of the promised width, one for each client.

    They may have a factor for each row, or no factors.
    """
    if type(messages) is not Messages or type(messages.rows) is not Tensor or messages.rows.layout is not torch.strided:
        raise BoundBroken(f"{algorithm.name} gave no Messages with a plain tensor of rows.")
    wanted, rows, factors = (len(memories), algorithm.message_width(dim)), messages.rows, messages.factors
    if rows.shape != wanted or rows.dtype != memories.dtype:
        raise BoundBroken(f"{algorithm.name} gave messages of shape {tuple(rows.shape)} in {rows.dtype} where "
                          f"{wanted} in {memories.dtype} was expected, a row for each client.")  # fmt: skip
    if factors is None:
        return
    if type(factors) is not Tensor:
        raise BoundBroken(f"{algorithm.name} gave factors that are no tensor.")
    if factors.shape != wanted[:1] or factors.dtype != rows.dtype:
        raise BoundBroken(f"{algorithm.name} gave factors of shape {tuple(factors.shape)} in {factors.dtype} where "
                          f"{wanted[:1]} in {rows.dtype} was expected, one for each message.")  # fmt: skip


def tiles(job: Job, cohort: Cohort) -> list[Cohort]:
    """Cuts the computing clients where their numbers pass a multiple of the job's stretch, and then into tiles."""
    stretch, size = job.stretch, job.problem.tile
    ends = range(stretch, job.problem.num_clients + stretch, stretch)
    found, start = list[Cohort](), 0
    for end in np.searchsorted(cohort.computing, ends).tolist():
        while start < end:
            some = slice(start, min(start + size, end))
            found.append(Cohort(cohort.computing[some], cohort.sending[some]))
            start = some.stop
    return found


def _not_finite(rows: Tensor) -> Tensor:
    """Indices of the rows that hold an inf or a nan, or add up to a number near the largest."""
    sums = (rows @ torch.ones(rows.shape[1], dtype=rows.dtype, device=rows.device)).cpu().numpy()  # neither can hide
    suspects = np.flatnonzero(~(np.abs(sums) < torch.finfo(rows.dtype).max / 8))
    return torch.from_numpy(suspects).to(rows.device)


def regroups(participation: Participation, problem: Problem) -> bool:
    """Returns whether the draw decides which clients share a tile; `participation` is the method's rule.

    If it does, one client more moves the rounding of all strips, and only sums in float64 keep that small.
    """
    return participation.idle == "sleep" and participation.rate(problem.num_clients) < 1
