"""Centred feedback: clients measure their updates against the server's own, public memory."""

import torch
from torch import Tensor

from fednormec.core.algorithm import Algorithm, Bounded, Server, Step
from fednormec.core.bounds import Bound, Messages
from fednormec.core.local import LocalUpdate
from fednormec.core.participation import Weights
from fednormec.core.schedules import Schedule, constant
from fednormec.core.vectors import plus
from fednormec.errors import UserError, positive


def centred_feedback(
    name: str,
    local: LocalUpdate,
    bound: Bound,
    *,
    beta: float,
    server_step: float,
    leak: float | None = None,
    deviation_step: float | None = None,
    beta_schedule: Schedule | None = None,
) -> Algorithm:
    """Centred feedback: m_i = bound(P_i - v - h_i);  v <- v + beta (1/(pM)) sum_{i in S} m_i,  x <- x - eta v.

    v is the server's memory, noise included, so that clients correct what noise did to it. h_i is client i's deviation,
    h_i <- (1 - l)(h_i + a m_i), or zero without a leak. Idle clients sleep: without h_i they have nothing to move, and
    an h_i that took in a message which the server never heard would answer to a v that never came.

    Args:
        name: what reports and errors call the method.
        local: local operator, which gives P_i.
        bound: operator that bounds every message.
        beta: factor with which the mean message enters the memory.
        server_step: eta.
        leak: l, in (0, 1]; None: clients keep nothing.
        deviation_step: a; None: beta. Only with a leak.
        beta_schedule: factor on beta by the round; None: constant. a stays.
    """
    beta, eta = positive("beta", beta), positive("server_step", server_step)
    if leak is None and deviation_step is not None:
        raise UserError("deviation_step is for clients that keep a deviation: give a leak too, or leave it out.")
    if leak is not None and not 0 < leak <= 1:
        raise UserError(f"leak must lie in (0, 1], not {leak}.")
    a = beta if deviation_step is None else positive("deviation_step", deviation_step)
    fading = constant() if beta_schedule is None else beta_schedule

    def init(x0: Tensor) -> Server:
        return Server(x0, torch.zeros_like(x0), 0)

    def client_(bound: Bound, server: Server, h: Tensor, updates: Tensor) -> Messages:
        updates.sub_(server.memory)
        if leak is None:
            return bound.scale_(updates)
        messages = bound.track_(updates, h, a)
        left_out = list(messages.broken)
        still = h[left_out]
        h.mul_(1 - leak)
        h[left_out] = still
        return messages

    def server(server: Server, mean: Tensor, weights: Weights) -> Step:
        gain = beta * fading.factor(server.round + 1) * weights.average
        v = plus(server.memory, mean, gain)
        return Step(v, eta, v, noise=weights.noise * gain * gain)

    slots = 0 if leak is None else 1
    return Algorithm(
        name, local, bound, init, Bounded(client_, bound), server, memory_slots=slots, reads_memory=True,
        with_beta=lambda schedule: centred_feedback(
            name, local, bound, beta=beta, server_step=eta, leak=leak, deviation_step=deviation_step,
            beta_schedule=schedule,
        ),
    )  # fmt: skip
