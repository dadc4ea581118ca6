"""Scale-then-privatise: public second moments scale coordinates before the bound, and back after the noise."""

from dataclasses import replace

import torch
from torch import Tensor

from fednormec.core.algorithm import Algorithm, Bounded, Server, Step
from fednormec.core.bounds import Bound, Messages
from fednormec.core.participation import Weights
from fednormec.errors import UserError


def scaled(algorithm: Algorithm, decay: float = 0.9, floor: float = 0.01) -> Algorithm:
    """Returns an averaging method with a public scale for each coordinate (scale-then-privatise, arXiv 2507.01129).

    Clients send bound(s u_i), the server takes d = mean/s for the direction:
    u <- c u + (1-c)(d^2 - noise), u' = u/(1 - c^t), w = max(u', f mean|u'|), s = sqrt(mean(w)/w).
    Noise then falls where updates are small, and the bound cuts off less of what is large everywhere. u is made of what
    was released, so it is public and costs no privacy; radius and noise of a message are those of the method. s = 1 in
    the first round, and where all second moments are the same. The noise taken out, and a scale relative to the mean,
    are ours; the paper has s = 1/(sqrt(u) + e).

    Args:
        algorithm: a method whose clients keep nothing and whose server averages, such as dp_fed_avg_clip.
        decay: c, in [0, 1).
        floor: f, the least second moment that counts, as a share of the mean, in (0, 1].
    """
    if not 0 <= decay < 1:
        raise UserError(f"the decay of second moments must lie in [0, 1), not {decay}.")
    if not 0 < floor <= 1:
        raise UserError(f"the floor of second moments must lie in (0, 1], not {floor}.")
    averages = algorithm.memory_slots == 0 and algorithm.message_slots == 1 and not algorithm.reads_memory
    if not averages or algorithm.prime is not None or algorithm.draws is not None:
        raise UserError(f"{algorithm.name} cannot be scaled: what its clients or its server remember is in the scale "
                        "of another round. Take an averaging method, such as dp_fed_avg_clip.")  # fmt: skip

    def own(server: Server) -> Server:
        return server._replace(memory=server.memory[: -len(server.x)])

    def scale(server: Server) -> Tensor | None:
        if server.round == 0:
            return None
        u = server.memory[-len(server.x) :] / (1 - decay**server.round)
        w = u.clamp(min=max(floor * float(u.abs().mean()), torch.finfo(u.dtype).tiny))
        return (w.mean() / w).sqrt()

    def init(x0: Tensor) -> Server:
        first = algorithm.init(x0)
        return first._replace(memory=torch.cat([first.memory, torch.zeros_like(x0)]))

    def client_(bound: Bound, server: Server, rows: Tensor, updates: Tensor) -> Messages:
        s, inner = scale(server), algorithm.client_
        if isinstance(inner, Bounded):
            inner = replace(inner, bound=bound)
        return inner(own(server), rows, updates if s is None else updates.mul_(s))

    def server(server: Server, mean: Tensor, weights: Weights) -> Step:
        s, u = scale(server), server.memory[-len(server.x) :]
        step = algorithm.server(own(server), mean, weights)
        if s is not None:
            step = step._replace(direction=step.direction / s, noise=step.noise / s.square())
        u = decay * u + (1 - decay) * (step.direction.square() - step.noise)
        return step._replace(memory=torch.cat([step.memory, u]))

    return algorithm._replace(
        name=f"{algorithm.name}, scaled",
        init=init,
        client_=Bounded(client_, algorithm.bound),
        server=server,
        reads_memory=True,
    )
