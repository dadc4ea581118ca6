"""Averaging: clients keep nothing, the server steps along the mean of their bounded displacements."""

from torch import Tensor

from fednormec.core.algorithm import Algorithm, Bounded, Server, Step
from fednormec.core.bounds import Bound, Messages
from fednormec.core.local import LocalUpdate
from fednormec.core.participation import Weights
from fednormec.core.vectors import representable
from fednormec.errors import one_of, positive


def averaging(
    name: str, local: LocalUpdate, bound: Bound, *, server_step: float, bounded: str = "displacement"
) -> Algorithm:
    """Averaging: x <- x - eta (1/(pM)) sum_{i in S} bound(x - T_i(x)), or bound(P_i) with bounded="update".

    Args:
        name: what reports and errors call the method.
        local: local operator T_i.
        bound: operator that bounds every message.
        server_step: eta.
        bounded: "displacement" bounds x - T_i(x), "update" bounds P_i.
    """
    eta = positive("server_step", server_step)
    one_of("bounded", bounded, ("displacement", "update"))

    def init(x0: Tensor) -> Server:
        return Server(x0, x0.new_empty(0), 0)

    def client_(bound: Bound, server: Server, rows: Tensor, updates: Tensor) -> Messages:
        scale = local.step_in(server.round + 1) if bounded == "displacement" else 1.0
        return bound.scale_(updates.mul_(representable(scale, updates.dtype)))

    def server(server: Server, mean: Tensor, weights: Weights) -> Step:
        return Step(mean, eta, server.memory, weights.average, weights.noise)

    return Algorithm(name, local, bound, init, Bounded(client_, bound), server, memory_slots=0)
