"""Canaries: clients that ignore their data and always send the same vector, or what its neighbour would send."""

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from fednormec.core.algorithm import Algorithm
from fednormec.core.local import Moment
from fednormec.core.problem import Metrics, Problem
from fednormec.core.randomness import generator
from fednormec.core.vectors import take
from fednormec.errors import UserError, one_of, positive
from fednormec.privacy.asked import ADJACENCIES, Adjacency


@final
@dataclass(frozen=True, eq=False, repr=False)
class WithCanaries:
    """Problem with more clients after its own: their gradients are the rows of `updates`, wherever x is."""

    problem: Problem
    updates: Tensor

    @property
    def dim(self) -> int:
        return self.problem.dim

    @property
    def num_clients(self) -> int:
        return self.problem.num_clients + len(self.updates)

    @property
    def tile(self) -> int:
        return self.problem.tile

    @property
    def client_sizes(self) -> np.ndarray:
        return np.append(self.problem.client_sizes, np.ones(len(self.updates), np.int64))

    def init(self, rng: np.random.Generator) -> Tensor:
        return self.problem.init(rng)

    def grad(self, x: Tensor, ids: np.ndarray, examples: np.ndarray | None = None) -> Tensor:
        own = ids < self.problem.num_clients
        if own.all():
            return self.problem.grad(x, ids, examples)
        rows, mask = x.new_empty(len(ids), self.dim), torch.from_numpy(own).to(x.device)
        rows[~mask] = take(self.updates, ids[~own] - self.problem.num_clients)
        if own.any():
            of_own = None if examples is None else examples[own]
            rows[mask] = self.problem.grad(x if x.ndim == 1 else x[mask], ids[own], of_own)
        return rows

    def evaluate(self, x: Tensor) -> Metrics:
        return self.problem.evaluate(x)

    def named(self, x: Tensor) -> dict[str, Tensor]:
        return self.problem.named(x)

    def model(self, x: Tensor) -> Any:
        return self.problem.model(x)


def with_canaries(
    problem: Problem, directions: Tensor, present: np.ndarray, adjacency: Adjacency = "zero_out", scale: float = 1e6,
    nothing: float = 0.0,
) -> WithCanaries:  # fmt: skip
    """Adds a canary for each row c of `directions`: its gradient is always the same.

    The scale is far beyond what an error-feedback memory can reach, so that a bounded message is radius * c each time.

    Args:
        problem: the problem to add them to.
        directions: one vector c per canary, (m, d).
        present: mask of the canaries that are there, (m,): their gradient is scale * c.
        adjacency: the gradient of the others is `nothing` (zero_out) or -scale * c (replace_one).
        scale: length of the gradients, in units of c.
        nothing: 0, or nan: a canary that is not there is then skipped, as every client whose update is non-finite: its
            message is zero whatever the method corrects updates by.
    """
    one_of("adjacency", adjacency, ADJACENCIES)
    positive("scale", scale)
    if directions.ndim != 2 or directions.shape[1] != problem.dim or present.shape != (len(directions),):
        raise UserError(f"canaries need directions (m, {problem.dim}) and m marks of who is present, but got "
                        f"{tuple(directions.shape)} and {present.shape}.")  # fmt: skip
    x = problem.init(generator(0, "init"))
    factors = torch.from_numpy(scale * signs(present, adjacency, nothing))
    return WithCanaries(problem, directions.to(x) * factors.to(x)[:, None])


def nothing_for(algorithm: Algorithm, x: Tensor) -> float:
    """Returns a gradient that makes a message zero: 0, or nan where a method measures updates against its server.

    Args:
        algorithm: the method.
        x: a model, for its length and dtype.
    """
    server = algorithm.init(x)
    told, memory = (
        server._replace(memory=torch.ones_like(server.memory)),
        x.new_zeros(1, algorithm.memory_slots * len(x)),
    )
    updates = algorithm.given(torch.zeros_like(x)[None], np.zeros(1, np.int64), Moment(0, 1))
    message, _ = algorithm.client(told, memory, updates)
    return math.nan if algorithm.correction is not None or message.any() else 0.0


def signs(present: np.ndarray, adjacency: Adjacency, nothing: float = 0.0) -> np.ndarray:
    """Returns what each canary sends, in units of its vector."""
    return np.where(present, 1.0, -1.0 if adjacency == "replace_one" else nothing)
