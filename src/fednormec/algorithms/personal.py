"""Personal models: each client keeps a model of its own, pulled to the mean of all, or left alone."""

from torch import Tensor

from fednormec.core.algorithm import Algorithm, Bounded, Server, Step
from fednormec.core.bounds import Bound, Messages, identity
from fednormec.core.local import LocalUpdate
from fednormec.core.participation import Weights
from fednormec.core.vectors import representable
from fednormec.errors import non_negative


def personal_models(name: str, local: LocalUpdate, *, pull: float) -> Algorithm:
    """Personal models: client k's local steps begin at its own w_k, and are pulled to the mean w.

    P_k is the mean of the gradients of f_k(y) + (pull/2) ||y - w||^2 along the way from w_k;  w_k <- w_k - gamma P_k
    w <- w - (1/M) sum_{k in S} gamma P_k, the server's model. The message is the change of w_k. A client's memory is
    w_k - x^0, so that the server keeps x^0 and tells it. Idle clients sleep, so that w stays the mean of the w_k: it is
    divided by M and not by pM.

    Args:
        name: what reports and errors call the method.
        local: local operator, which gives P_k.
        pull: strength of the pull to the mean, zero or positive.
    """
    non_negative("pull", pull)

    def init(x0: Tensor) -> Server:
        return Server(x0, x0.clone(), 0)

    def own(server: Server, rows: Tensor) -> Tensor:
        return server.memory + rows

    def client_(bound: Bound, server: Server, rows: Tensor, updates: Tensor) -> Messages:
        message = bound.scale_(updates.mul_(representable(local.step_in(server.round + 1), updates.dtype)))
        message.move_(rows, -1.0)
        return message

    def server(server: Server, mean: Tensor, weights: Weights) -> Step:
        return Step(mean, 1.0, server.memory, weights.memory, weights.noise)

    bound = identity()
    return Algorithm(
        name, local, bound, init, Bounded(client_, bound), server, memory_slots=1, reads_memory=True, own=own, pull=pull
    )
