"""Residuals: a client keeps what its bound cut off, to send it later (EF14, EControl)."""

import torch
from torch import Tensor

from fednormec.core.algorithm import Algorithm, Bounded, Server, Step
from fednormec.core.bounds import Bound, Messages
from fednormec.core.local import LocalUpdate
from fednormec.core.participation import Weights
from fednormec.core.vectors import plus, representable
from fednormec.errors import UserError, positive


def residuals(name: str, local: LocalUpdate, bound: Bound, *, server_step: float) -> Algorithm:
    """Residuals: m_i = bound(e_i + gamma P_i), e_i <- e_i + gamma P_i - m_i;  x <- x - (1/(pM)) sum_{i in S} m_i.

    x - (1/(pM)) sum_i e_i moves by -(gamma/(pM)) sum_{i in S} P_i in every round: what the bound cuts off comes later,
    and nothing is lost. That holds only if idle clients sleep, so they do: a client that took m_i out of e_i without
    being heard would lose it.

    Args:
        name: what reports and errors call the method.
        local: local operator, which gives P_i.
        bound: operator that bounds every message.
        server_step: gamma, which multiplies an update before it is bounded.
    """
    gamma = positive("server_step", server_step)

    def init(x0: Tensor) -> Server:
        return Server(x0, x0.new_empty(0), 0)

    def client_(bound: Bound, server: Server, e: Tensor, updates: Tensor) -> Messages:
        e.add_(updates, alpha=representable(gamma, e.dtype)).clamp_(-_most(e), _most(e))
        messages = bound.scale_(updates.copy_(e))
        messages.move_(e, -1.0)
        return messages

    def server(server: Server, mean: Tensor, weights: Weights) -> Step:
        return Step(mean, 1.0, server.memory, weights.average, weights.noise)

    return Algorithm(name, local, bound, init, Bounded(client_, bound), server, memory_slots=1, keeps_updates=True)


def error_control(name: str, local: LocalUpdate, bound: Bound, *, error_weight: float, server_step: float) -> Algorithm:
    """Error control: feedback on h_i that also sends a part w of the error e_i which h_i has made so far.

    m_i = bound(w e_i + P_i - h_i), e_i <- e_i + P_i - h_i - m_i, h_i <- h_i + m_i;  h <- h + q mean(m), x <- x - eta h.
    A client keeps h_i, then e_i. Idle clients may advance or sleep, as in `feedback`: if they advance, q = 1/p makes up
    in the mean for an h_i that moved unheard; if they sleep, h stays the mean of the h_i, and e_i counts only the
    rounds in which its client was drawn.

    Args:
        name: what reports and errors call the method.
        local: local operator, which gives P_i.
        bound: operator that bounds every message.
        error_weight: w, in [0, 1].
        server_step: eta.
    """
    w, eta = error_weight, positive("server_step", server_step)
    if not 0 <= w <= 1:
        raise UserError(f"error_weight must lie in [0, 1], not {w}.")

    def init(x0: Tensor) -> Server:
        return Server(x0, torch.zeros_like(x0), 0)

    def client_(bound: Bound, server: Server, rows: Tensor, updates: Tensor) -> Messages:
        h, e, most = rows[:, : updates.shape[1]], rows[:, updates.shape[1] :], _most(rows)
        updates.clamp_(-most, most).sub_(h).add_(e, alpha=w)
        e.mul_(1 - w).add_(updates).clamp_(-most, most)  # e + P - h, since updates are w e + P - h
        messages = bound.scale_(updates)
        messages.move_(h, 1.0)
        messages.move_(e, -1.0)
        return messages

    def server(server: Server, mean: Tensor, weights: Weights) -> Step:
        h = plus(server.memory, mean, weights.memory)
        return Step(h, eta, h, noise=weights.noise * weights.memory**2 * (server.round + 1))

    return Algorithm(
        name, local, bound, init, Bounded(client_, bound), server, memory_slots=2, keeps_updates=True,
        idle_clients_advance=True,
    )  # fmt: skip


def _most(rows: Tensor) -> float:
    """Returns the largest entry that is kept: sums of a few of them must not overflow."""
    return torch.finfo(rows.dtype).max / 16
