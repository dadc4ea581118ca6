"""Shifted compression: a client sends random coordinates of how its update differs from a memory of what it sent."""

import math

import numpy as np
import torch
from torch import Tensor

from fednormec.core.algorithm import Algorithm, Bounded, Server, Step
from fednormec.core.bounds import Bound, Messages, identity
from fednormec.core.local import LocalUpdate, Moment
from fednormec.core.participation import Weights
from fednormec.core.randomness import generator
from fednormec.core.vectors import plus
from fednormec.errors import at_least_one, positive


def shifted_compression(
    name: str, local: LocalUpdate, *, k: int, shift_step: float | None, server_step: float
) -> Algorithm:
    """Shifted compression: m_i = rand_k(P_i - s_i), s_i <- s_i + a m_i;  x <- x - eta (s + mean m), s <- s + a mean m.

    rand_k keeps k of the d coordinates, drawn by each client in each round, times d/k: its mean is the vector itself.
    x takes the mean over pM, so that its direction is right in the mean; s the sum over M, so that it stays the mean of
    the s_i. Idle clients sleep: an s_i that moved unheard would be missing in s.

    Args:
        name: what reports and errors call the method.
        local: local operator, which gives P_i.
        k: number of coordinates that a message has; all d if there are fewer.
        shift_step: a; None: `usual_shift_step`.
        server_step: eta.
    """
    at_least_one("k", k)
    eta = positive("server_step", server_step)
    if shift_step is not None:
        positive("shift_step", shift_step)

    def step_for(dim: int) -> float:
        return usual_shift_step(k, dim) if shift_step is None else shift_step

    def draws(ids: np.ndarray, moment: Moment, dim: int) -> Tensor:
        return random_masks(ids, moment, k, dim)

    def init(x0: Tensor) -> Server:
        return Server(x0, torch.zeros_like(x0), 0)

    def client_(bound: Bound, server: Server, rows: Tensor, updates: Tensor) -> Messages:
        P, mask = updates.chunk(2, dim=1)
        messages = bound.scale_(P.sub(rows).mul_(mask))
        messages.move_(rows, step_for(rows.shape[1]))
        return messages

    def server(server: Server, mean: Tensor, weights: Weights) -> Step:
        direction = plus(server.memory, mean, weights.average)
        s = plus(server.memory, mean, step_for(len(mean)) * weights.memory)
        return Step(direction, eta, s, noise=weights.noise * weights.average**2)

    bound = identity()
    return Algorithm(name, local, bound, init, Bounded(client_, bound), server, memory_slots=1, draws=draws)


def usual_shift_step(k: int, dim: int) -> float:
    """Returns the paper's step of the shifts for rand_k, sqrt((1 + 2w)/(2 (1 + w)^3)) with w = d/k - 1.

    >>> round(usual_shift_step(5, 5), 4), round(usual_shift_step(6, 123), 4)
    (0.7071, 0.0482)
    """
    variance = max(dim / k, 1.0) - 1
    return math.sqrt((1 + 2 * variance) / (2 * (1 + variance) ** 3))


def random_masks(ids: np.ndarray, moment: Moment, k: int, dim: int) -> Tensor:
    """Draws k coordinates for each client, all sets of them alike: d/k where it keeps a coordinate, else 0; (B, d).

    Args:
        ids: numbers of the clients.
        moment: seed and number of the round.
        k: number of coordinates that are kept.
        dim: number of coordinates d.
    """
    kept, masks = min(k, dim), np.zeros((len(ids), dim))
    for row, client in zip(masks, ids.tolist(), strict=True):
        source = generator(moment.seed, "compression", moment.round, client)
        row[source.choice(dim, kept, replace=False, shuffle=False)] = dim / kept
    return torch.from_numpy(masks)
