"""Error feedback (EF21): a client sends the bounded difference between its update and a memory of what it sent."""

import math

import torch
from torch import Tensor

from fednormec.core.algorithm import Algorithm, Bounded, Server, Step
from fednormec.core.bounds import Bound, Messages, identity
from fednormec.core.local import LocalUpdate
from fednormec.core.participation import Weights
from fednormec.core.schedules import Schedule, constant
from fednormec.core.vectors import plus, unit
from fednormec.errors import UserError, non_negative, one_of, positive

TINY = 1e-300


def feedback(
    name: str,
    local: LocalUpdate,
    bound: Bound,
    *,
    beta: float,
    server_step: float,
    server_normalization: bool = False,
    warmup_rounds: int = 0,
    client_momentum: float = 1.0,
    initial_memory: str = "zero",
    beta_schedule: Schedule | None = None,
) -> Algorithm:
    """Error feedback: a client sends the bounded difference between its update and a memory of what it sent.

    Delta_i = bound(u_i - v_i), v_i <- v_i + beta Delta_i;  v <- v + beta q mean(Delta),  x <- x - eta v [/ ||v||].
    u_i is the update P_i, or with client_momentum m < 1 its average u_i <- (1-m) u_i + m P_i, kept beside v_i.

    Args:
        name: what reports and errors call the method.
        local: local operator, which gives P_i.
        bound: operator that bounds every message.
        beta: factor with which a message enters the memories.
        server_step: eta.
        server_normalization: whether the server divides by ||v||.
        warmup_rounds: number of first rounds in which the server keeps x while the memories track P_i(x^0).
        client_momentum: m, in (0, 1]; 1: none.
        initial_memory: "zero", or "local_updates": an exact round before the first fills the memories.
        beta_schedule: factor on beta by the round; None: constant.
    """
    m, beta, eta = client_momentum, positive("beta", beta), positive("server_step", server_step)
    if not 0 < m <= 1:
        raise UserError(f"client_momentum must lie in (0, 1], not {m}.")
    non_negative("warmup_rounds", warmup_rounds)
    one_of("initial_memory", initial_memory, ("zero", "local_updates"))
    fading = constant() if beta_schedule is None else beta_schedule

    def init(x0: Tensor) -> Server:
        return Server(x0, torch.zeros_like(x0), 0)

    def client_(bound: Bound, server: Server, rows: Tensor, updates: Tensor) -> Messages:
        v = rows[:, : updates.shape[1]]
        if m < 1 or math.isinf(bound.radius):
            most = torch.finfo(updates.dtype).max / 8  # what is kept unbounded must not overflow in a difference
            updates.clamp_(-most, most)
        if m < 1:
            updates.copy_(rows[:, updates.shape[1] :].lerp_(updates, m))
        return bound.track_(updates, v, beta * fading.factor(server.round + 1))  # Alg. 1, lines 6 and 7

    def server(server: Server, mean: Tensor, weights: Weights) -> Step:
        k = server.round + 1
        v = plus(server.memory, mean, beta * fading.factor(k) * weights.memory)  # line 14
        if server.round < warmup_rounds:
            return Step(v, 0.0, v)
        rounds = k if beta_schedule is None else sum(fading.factor(j) ** 2 for j in range(1, k + 1))
        noise = weights.noise * beta * beta * weights.memory**2 * rounds  # v_i moves without it: what is in v stays
        return along(v, eta, v, noise, server_normalization)

    prime = None if initial_memory == "zero" else _prime(local, client_momentum < 1)
    return Algorithm(
        name, local, bound, init, Bounded(client_, bound), server, memory_slots=1 if m == 1 else 2, keeps_updates=m < 1,
        idle_clients_advance=True, prime=prime,
        with_beta=lambda schedule: feedback(
            name, local, bound, beta=beta, server_step=eta, server_normalization=server_normalization,
            warmup_rounds=warmup_rounds, client_momentum=m, initial_memory=initial_memory, beta_schedule=schedule,
        ),
    )  # fmt: skip


def along(v: Tensor, eta: float, memory: Tensor, noise: float, normalized: bool) -> Step:
    """Returns the step along v, or along v / ||v|| (Alg. 1, line 15).

    Args:
        v: direction, (d,).
        eta: step of the server.
        memory: the method's memory after the round.
        noise: variance of the noise in each coordinate of v.
        normalized: whether to divide by ||v||.
    """
    if normalized:
        return Step(unit(v), eta, memory, noise=noise / max(float(v.double().square().sum()), TINY))
    return Step(v, eta, memory, noise=noise)


def _prime(local: LocalUpdate, momentum: bool) -> Algorithm:
    """Returns the exact round after which v_i = u_i = P_i(x^0) and the server's memory is their mean; x stays."""

    def client_(server: Server, rows: Tensor, updates: Tensor) -> Messages:
        rows.copy_(torch.cat([updates, updates], dim=1) if momentum else updates)
        return Messages(updates)

    def server(server: Server, mean: Tensor, weights: Weights) -> Step:
        return Step(mean, 0.0, mean)

    slots = 2 if momentum else 1
    return Algorithm("prime", local, identity(), lambda x0: Server(x0, x0, 0), client_, server, memory_slots=slots)
