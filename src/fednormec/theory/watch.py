"""Measurements in a run of what the guarantees speak of. They look at every client's data: not private."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednormec.core.algorithm import Algorithm
from fednormec.core.local import Moment
from fednormec.core.problem import Problem
from fednormec.engine.round import Round


class Measured(NamedTuple):
    """Figures of a round that the guarantees speak of. Not private.

    Attributes:
        memory_error: max_i ||P_i(x) - v_i||.
        tracking_error: ||v - mean_i v_i||.
        gradient_norm: ||grad f(x)||.
    """

    memory_error: float
    tracking_error: float
    gradient_norm: float


def can_measure(algorithm: Algorithm) -> bool:
    """Returns whether a method is error feedback with one memory per client, which all clients keep up to date."""
    return algorithm.idle_clients_advance and algorithm.memory_slots == 1


def measure(problem: Problem, algorithm: Algorithm, r: Round, seed: int = 0) -> Measured:
    """Measures the figures after a round of an error-feedback method with one memory per client.

    Args:
        problem: the problem.
        algorithm: the method.
        r: the round.
        seed: seed of the run, for local randomness.
    """
    moment, memory = Moment(seed, r.number + 1), r.memory
    errors = [
        (algorithm.local.run(problem, r.x, ids, moment, None).double() - memory[ids[0] : ids[-1] + 1]).norm(dim=1).max()
        for ids in tiles(problem)
    ]
    tracking = (r.server.memory.double() - memory.double().mean(0)).norm().item()
    return Measured(torch.stack(errors).max().item(), tracking, gradient_norms(problem, r.x)[0])


def gradient_norms(problem: Problem, x: Tensor) -> tuple[float, float]:
    """Returns ||grad f(x)|| and max_i ||grad f_i(x)||."""
    total, largest = x.double() * 0, 0.0
    for ids in tiles(problem):
        rows = problem.grad(x, ids).double()
        total += rows.sum(0)
        largest = max(largest, rows.norm(dim=1).max().item())
    return (total / problem.num_clients).norm().item(), largest


def tiles(problem: Problem) -> list[np.ndarray]:
    """Returns the ids of all clients, as many at once as the problem takes."""
    m, size = problem.num_clients, problem.tile
    return [np.arange(start, min(start + size, m)) for start in range(0, m, size)]
