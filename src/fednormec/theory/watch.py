"""What the guarantees speak of, measured in a run. It looks at every client's data: not private."""

from typing import NamedTuple

import numpy as np
import torch

from fednormec.algorithms.base import Algorithm
from fednormec.engine import Round
from fednormec.local import Moment
from fednormec.problems.base import Problem


class Measured(NamedTuple):
    """memory_error: max_i ||P_i(x) - v_i||; tracking_error: ||v - mean_i v_i||; gradient_norm: ||grad f(x)||."""

    memory_error: float
    tracking_error: float
    gradient_norm: float


def can_measure(algorithm: Algorithm) -> bool:
    """Whether a method is error feedback with one memory per client, which all clients keep up to date."""
    return algorithm.idle_clients_advance and algorithm.memory_slots == 1


def measure(problem: Problem, algorithm: Algorithm, r: Round, seed: int = 0) -> Measured:
    """The figures after a round of an error-feedback method with one memory per client."""
    errors, memories, gradient = [], r.server.memory.double() * 0, r.x.double() * 0
    for start in range(0, problem.num_clients, problem.tile):
        ids = np.arange(start, min(start + problem.tile, problem.num_clients))
        rows = r.memory[start : start + problem.tile].double()
        updates = algorithm.local.run(problem, r.x, ids, Moment(seed, r.number + 1), None).double()
        errors.append((updates - rows).norm(dim=1).max())
        memories += rows.sum(0)
        gradient += problem.grad(r.x, ids).double().sum(0)
    m = problem.num_clients
    tracking = (r.server.memory.double() - memories / m).norm().item()
    return Measured(torch.stack(errors).max().item(), tracking, (gradient / m).norm().item())
