"""Control variates (SCAFFOLD): each client corrects its local gradients by what it knows of its own drift."""

import torch
from torch import Tensor

from fednormec.core.algorithm import Algorithm, Bounded, Server, Step
from fednormec.core.bounds import Bound, Messages
from fednormec.core.local import LocalUpdate
from fednormec.core.participation import Weights
from fednormec.core.vectors import plus
from fednormec.errors import positive


def control_variates(name: str, local: LocalUpdate, bound: Bound, *, server_step: float) -> Algorithm:
    """Control variates: local gradients become grad + c - c_i; the message is [P_i, P_i - c], bounded jointly.

    With P_i the corrected update, P_i - c is the change of c_i in option II of the paper, and x - T_i(x) = gamma P_i
    travels as P_i, so that both halves are gradients and one radius fits them. A client moves c_i by what it sends (the
    bounded half), so that without noise c stays the mean of the c_i. Idle clients sleep: a c_i that moved unheard would
    never reach c, and the correction c - c_i would be wrong from then on.

    Args:
        name: what reports and errors call the method.
        local: local operator T_i.
        bound: operator that bounds every message.
        server_step: eta.
    """
    eta = positive("server_step", server_step)

    def init(x0: Tensor) -> Server:
        return Server(x0, torch.zeros_like(x0), 0)

    def correction(server: Server, rows: Tensor) -> Tensor:
        return server.memory - rows

    def client_(bound: Bound, server: Server, rows: Tensor, updates: Tensor) -> Messages:
        message = bound.scale_(torch.cat([updates, updates - server.memory], dim=1))
        rows.add_(message.whole()[:, updates.shape[1] :])
        return Messages(message.rows, broken=message.broken)

    def server(server: Server, mean: Tensor, weights: Weights) -> Step:
        displacement, change = mean.chunk(2)
        c = plus(server.memory, change, weights.memory)
        return Step(displacement, eta * local.step_in(server.round + 1), c, weights.average, weights.noise)

    return Algorithm(
        name, local, bound, init, Bounded(client_, bound), server, memory_slots=1, message_slots=2, reads_memory=True,
        correction=correction,
    )  # fmt: skip
