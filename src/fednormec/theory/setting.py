"""Setting that a guarantee is computed from: a problem's constants, a method's settings, the noise of a round."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednormec.algorithms.methods import fed_normec
from fednormec.config.settings import check_constants
from fednormec.core.algorithm import Algorithm
from fednormec.core.local import gd, ig
from fednormec.core.participation import Participation
from fednormec.core.problem import Interval, Problem
from fednormec.errors import UserError, at_least_one, non_negative, one_of, positive
from fednormec.privacy.mechanism import Mechanism
from fednormec.problems.logistic import Logistic
from fednormec.problems.quadratic import Quadratic

Local = Literal["one_step", "gd", "ig"]
Memory = Literal["zero", "local_updates"]
LOCALS: tuple[Local, ...] = ("one_step", "gd", "ig")


def path_growth(u: float) -> float:
    """Returns (e^u - 1)/u with u = gamma L.

    Each of T local steps of length gamma/T multiplies the distance of two paths, and a gradient's norm, by at most 1 +
    u/T, and the mean of (1 + u/T)^j over j = 0..T-1 is no more than this.

    >>> path_growth(0.0), round(path_growth(0.5), 4)
    (1.0, 1.2974)
    """
    return 1.0 + path_excess(u)


def path_excess(u: float) -> float:
    """Returns (e^u - 1)/u - 1, without cancellation where u is small.

    >>> path_excess(0.0), path_excess(1e-20), round(path_excess(0.5), 4)
    (0.0, 5e-21, 0.2974)
    """
    if u < 1e-4:
        return u / 2 * (1 + u / 3 * (1 + u / 4))
    return math.expm1(u) / u - 1 if u < 700 else math.inf


@dataclass(frozen=True)
class Constants:
    """Constants of f_1, ..., f_M near the start x^0. Upper bounds will do, except where it is said.

    Args:
        smoothness: L, of every component f_{i,j} (with full local gradients: of every f_i).
        gap: f(x^0) - f^inf.
        gradient_norm: ||grad f(x^0)||, what a guarantee must be below to say anything. Here too large is not safe.
        client_norm: max_i ||grad f_i(x^0)||.
        clients: number of clients M; too many would not be safe.
        dim: number of parameters d.
        heterogeneity: f^inf - mean_i f_i^inf; matters with several local steps.
        component_norm: max_i mean_j ||grad f_{i,j}(x^0)||; matters with incremental gradients only.
        component_heterogeneity: f^inf - mean_i mean_j f_{i,j}^inf; matters with incremental gradients only.
    """

    smoothness: float
    gap: float
    gradient_norm: float
    client_norm: float
    clients: int
    dim: int
    heterogeneity: float | None = None
    component_norm: float | None = None
    component_heterogeneity: float | None = None

    def __post_init__(self) -> None:
        check_constants(self)

    def start_error(self, local: Local, local_step: float) -> float:
        """Bounds max_i ||P_i(x^0)||: the memories' error when they start from zero.

        Args:
            local: local operator.
            local_step: gamma.
        """
        if local == "one_step":
            return self.client_norm
        u = self.smoothness * local_step
        if local == "gd":
            return self.client_norm * path_growth(u)
        return self.client_norm + u * path_growth(u) * self.known("component_norm", local)

    def spread(self, local: Local) -> float:
        """Returns the heterogeneity that the drift of a local operator depends on."""
        if local == "one_step":
            return 0.0
        return self.known("heterogeneity" if local == "gd" else "component_heterogeneity", local)

    def known(self, name: str, local: Local) -> float:
        """Returns a constant; raises UserError if it is not given.

        Args:
            name: name of the constant.
            local: local operator that needs it, for the error.
        """
        value: float | None = getattr(self, name)
        if value is None:
            raise UserError(f"local operator {local} needs constants.{name}: give it, or 0 where it is known to be.")
        return value


@dataclass(frozen=True)
class Settings:
    """Settings of a method as the theorems know them, with server normalisation and idle clients that advance.

    Args:
        local: local operator: "one_step", "gd" (several full-gradient steps) or "ig" (incremental gradient).
        local_step: gamma.
        alpha: smoothing of the normalisation.
        beta: factor with which a message enters the memories.
        server_step: eta.
        rounds: number of rounds, all of them.
        warmup_rounds: number of first rounds during which the model stands still.
        memory: where the memories start: at "zero", or (never with privacy) at the "local_updates".
    """

    local: Local
    local_step: float
    alpha: float
    beta: float
    server_step: float
    rounds: int
    warmup_rounds: int = 0
    memory: Memory = "zero"

    def __post_init__(self) -> None:
        one_of("local", self.local, LOCALS)
        one_of("memory", self.memory, ("zero", "local_updates"))
        for name in ("local_step", "beta", "server_step"):
            positive(name, getattr(self, name))
        non_negative("alpha", self.alpha)
        at_least_one("rounds", self.rounds)
        if not 0 <= self.warmup_rounds < self.rounds:
            raise UserError(f"warmup_rounds must leave a round to train in, but {self.warmup_rounds} of {self.rounds} "
                            "are warm-up.")  # fmt: skip

    @property
    def steps(self) -> int:
        """Number of rounds that move the model, K + 1."""
        return self.rounds - self.warmup_rounds

    def algorithm(self, local_steps: int = 1, batch_size: int = 1) -> Algorithm:
        """Builds Fed-alpha-NormEC with these settings.

        Args:
            local_steps: number of local steps T, for gd.
            batch_size: size of a component, for ig.
        """
        if (self.local == "gd") != (local_steps > 1):
            raise UserError(f"local operator {self.local} does not go with {local_steps} full-gradient steps.")
        local = ig(self.local_step, batch_size) if self.local == "ig" else gd(self.local_step, local_steps)
        return fed_normec(
            local, alpha=self.alpha, beta=self.beta, server_step=self.server_step, server_normalization=True,
            warmup_rounds=self.warmup_rounds, initial_memory=self.memory,
        )  # fmt: skip


class Noise(NamedTuple):
    """Noise of a round: E||.||^2 of what it adds to (v - mean v_i)/beta, nu = sampling + privacy.

    Args:
        sampling: part of sampling, for messages of length 1; it shrinks with the square of their length.
        privacy: part of the noise that is added for privacy.
    """

    sampling: float
    privacy: float

    @property
    def variance(self) -> float:
        """Sum nu of both parts."""
        return self.sampling + self.privacy


def round_noise(clients: int, dim: int, p: float, mechanism: Mechanism | None = None) -> Noise:
    """Computes the noise of a round.

    (1-p)/(pM) from sampling; d s^2/(pM)^2 from noise of std s in the sum, d s^2/(pM) from noise in each message.

    Args:
        clients: number of clients M.
        dim: number of coordinates d.
        p: probability that a client sends.
        mechanism: what adds the noise; None: there is none.

    >>> round_noise(100, 10, 0.25)
    Noise(sampling=0.03, privacy=0.0)
    """
    sampling = (1 - p) / (p * clients)
    if mechanism is None:
        return Noise(sampling, 0.0)
    total = dim * (mechanism.noise_std * mechanism.radius * (1 + mechanism.rounding)) ** 2
    senders = p * clients
    if not (senders**2):
        raise UserError(
            f"the theory divides by the square of p x clients, which is 0 for p = {p:g}: ask for more of p."
        )
    return Noise(sampling, total / senders if mechanism.trust != "central" else total / senders**2)


def covered_rate(participation: Participation, clients: int, min_cohort: int = 1) -> float:
    """Returns p of a participation; raises UserError, which says why, if no theorem covers it."""
    p = participation.rate(clients)
    if p == 1:
        return p
    if participation.select is not None:
        raise UserError(f"the theorems speak of independent (Poisson) or full participation, not of "
                        f"{participation.name}.")  # fmt: skip
    if participation.idle != "advance":
        raise UserError("no theorem covers idle = 'sleep': the theorems need clients that are not drawn to advance.")
    if min_cohort > 1:
        raise UserError("with sampling no theorem covers rounds that are called off because too few send "
                        "(min_cohort, min_survivors).")  # fmt: skip
    return p


def knows_constants(problem: Problem) -> bool:
    """Returns whether a problem knows its constants."""
    return isinstance(problem, Quadratic | Logistic)


def constants_of(problem: Problem, x0: Tensor, local: Local | None = None) -> Constants:
    """Computes the constants of a problem that knows them, a quadratic or a logistic regression.

    They are computed from the clients' data: not private. What is only known to lie in an interval enters with the end
    that keeps every guarantee true.

    Args:
        problem: the problem.
        x0: the start x^0.
        local: local operator whose constants are needed; None: all.

    Raises:
        UserError: if the problem does not know its constants, or f is non-finite at x0.
    """
    if not isinstance(problem, Quadratic | Logistic):
        raise UserError(
            "the constants of this problem are not known: give them as [constants] (smoothness, gap, gradient_norm, "
            "client_norm, and with several local steps heterogeneity), or take a quadratic or logistic problem."
        )
    gradients = problem.grad(x0, np.arange(problem.num_clients)).double()
    spread = component_norm = component_spread = None
    if local in ("gd", None) or isinstance(problem, Quadratic):
        spread = max(0.0, problem.infimum.upper - problem.lower_client_infima.mean().item())
    if local in ("ig", None):
        component_norm, component_spread = _component_norm(problem, x0), _component_spread(problem)
    return Constants(
        smoothness=problem.smoothness,
        gap=_gap(problem.evaluate(x0).not_private["train_loss"], problem.infimum, x0),
        gradient_norm=gradients.mean(0).norm().item(),
        client_norm=max(gradients.norm(dim=1).max().item(), 1e-100),
        clients=problem.num_clients,
        dim=problem.dim,
        heterogeneity=spread,
        component_norm=component_norm,
        component_heterogeneity=component_spread,
    )


def _gap(value: float, infimum: Interval, x0: Tensor) -> float:
    """Returns f(x0) - f^inf, with room for the rounding of both: f(x0) was added up in the dtype of x0."""
    if not math.isfinite(value):
        raise UserError("f is not finite at the start: no gap, and no guarantee, can be computed from there.")
    room = max(1e-12, (len(x0) + 100) * torch.finfo(x0.dtype).eps) * abs(value) + 1e-12 * abs(infimum.lower)
    return max(0.0, value - infimum.lower) + room


def _component_spread(problem: Quadratic | Logistic) -> float:
    """Returns f^inf - mean_i mean_j f_{i,j}^inf; infima beyond a client's size are padding."""
    sizes = torch.as_tensor(problem.client_sizes)
    real = torch.arange(int(sizes.max())) < sizes[:, None]
    lowest = ((problem.component_infima * real).sum(1) / sizes).mean().item()
    return max(0.0, problem.infimum.upper - lowest)


def _component_norm(problem: Problem, x0: Tensor) -> float:
    """Returns max_i mean_j ||grad f_{i,j}(x0)||, one component of every client that has it at a time."""
    total = np.zeros(problem.num_clients)
    for j in range(int(problem.client_sizes.max())):
        ids = np.flatnonzero(problem.client_sizes > j)
        rows = problem.grad(x0, ids, np.full((len(ids), 1), j))
        total[ids] += rows.double().norm(dim=1).cpu().numpy()
    return float((total / problem.client_sizes).max())
