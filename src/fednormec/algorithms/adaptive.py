"""Adaptive bounds: a public threshold follows a quantile of the clients' norms, by a bit in each message."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednormec.algorithms.feedback import along
from fednormec.core.algorithm import Algorithm, Bounded, Server, Step
from fednormec.core.bounds import Bound, Grid, Messages, clip, smooth_normalize
from fednormec.core.local import LocalUpdate
from fednormec.core.participation import Weights
from fednormec.core.vectors import norm_error, plus, representable, row_norms
from fednormec.errors import UserError, non_negative, positive

LEAST, MOST = 1e-20, 1e20  # of a threshold, well inside the range of float32
FASTEST = 10.0  # largest rate
BIT = "a bit that says whether the client's vector is longer than a public threshold, which follows the noisy bits"


class Threshold(NamedTuple):
    """Public threshold C that follows the q-quantile of the clients' norms n_i (arXiv 1905.03871).

    A message is (a u_i, s (2 b_i - 1)) with ||u_i|| <= 1 and b_i = 1 if n_i <= C, else 0. a^2 + s^2 is 1, less a little
    room for rounding, so that every message lies in one ball of radius 1, whatever C is. Noise of std z on the sum is
    noise of z/a on the sum of the u_i and of z/(2s) on that of the b_i - 1/2.
    C <- C exp(-rate (b - q)), b the noisy share of the bits that are 1, within [0, 1]. C is the last number of the
    server's memory, and stays between 1e-20 and 1e20.

    Args:
        quantile: q, strictly between 0 and 1.
        start: C before the first round.
        rate: rate of the logarithm of C, from 0 to 10.
        bit_share: s^2, the share of the squared radius that is the bit's, strictly between 0 and 1.
    """

    quantile: float
    start: float
    rate: float
    bit_share: float

    def checked(self) -> "Threshold":
        """Returns itself; raises UserError if a setting is out of range."""
        for name, value in (("quantile", self.quantile), ("bit_share", self.bit_share)):
            if not 0 < value < 1:
                raise UserError(f"{name} must lie strictly between 0 and 1, not {value}.")
        if not LEAST <= self.start <= MOST:
            raise UserError(f"start must be a positive number between {LEAST:g} and {MOST:g}, not {self.start}.")
        if not 0 <= self.rate <= FASTEST:
            raise UserError(f"rate must lie in [0, {FASTEST:g}], not {self.rate}.")
        return self

    def parts(self, rows: Tensor) -> tuple[float, float]:
        """Returns a and s for vectors like `rows`, (..., d); clients and server compute the same."""
        room = 1 - 2 * norm_error(rows.new_empty(0, rows.shape[-1] + 1))
        return room * math.sqrt(1 - self.bit_share), room * math.sqrt(self.bit_share)

    def now(self, server: Server) -> float:
        """Returns C, which lies in its range whatever the memory holds."""
        return _within(float(server.memory[-1]))

    def after(self, server: Server, mean: Tensor, weights: Weights) -> float:
        """Returns C after a round whose noisy mean message is `mean`."""
        _, s = self.parts(server.x)
        b = min(1.0, max(0.0, 0.5 + float(mean[-1]) * weights.average / (2 * s)))
        return _within(self.now(server) * math.exp(-self.rate * (b - self.quantile)))

    def messages(self, bounded: Messages, norms: np.ndarray, c: float, grid: Grid | None = None) -> Messages:
        """Returns messages with their bits.

        Args:
            bounded: the messages without; they may be overwritten. One that was non-finite gets no bit either.
            norms: norms n_i.
            c: threshold.
            grid: grid that messages lie on, bits included.
        """
        rows = bounded.whole()
        _, s = self.parts(rows)
        bits = np.where(norms <= c, s, -s)
        bits[list(bounded.broken)] = 0.0
        told = torch.from_numpy(bits[:, None]).to(rows)
        if grid is not None:
            grid.truncate_(told)
        return Messages(torch.cat([rows, told], dim=1), broken=bounded.broken)


def adaptive_averaging(name: str, local: LocalUpdate, threshold: Threshold, *, server_step: float) -> Algorithm:
    """Averaging of clipped displacements: x <- x - eta (1/(pM)) sum_{i in S} clip_C(x - T_i(x)), C the threshold.

    Clients send the clipped displacement over C. The server takes its direction times C, so that directions of
    different rounds, and the noise in them, are in one unit for its optimiser.

    Args:
        name: what reports and errors call the method.
        local: local operator T_i.
        threshold: rule of C.
        server_step: eta.
    """
    threshold, eta = threshold.checked(), positive("server_step", server_step)

    def init(x0: Tensor) -> Server:
        return Server(x0, x0.new_tensor([threshold.start]), 0)

    def client_(bound: Bound, server: Server, rows: Tensor, updates: Tensor) -> Messages:
        c, (a, _) = threshold.now(server), threshold.parts(updates)
        norms = row_norms(updates.mul_(representable(local.step_in(server.round + 1), updates.dtype)))
        return threshold.messages(clip(c, a).on(bound.grid).scale_(updates), norms, c, bound.grid)

    def server(server: Server, mean: Tensor, weights: Weights) -> Step:
        unit = threshold.now(server) / threshold.parts(server.x)[0]
        memory = mean.new_tensor([threshold.after(server, mean, weights)])
        return Step(mean[:-1] * unit, eta, memory, weights.average, weights.noise * unit**2)

    bound = clip(1.0)._replace(name="clip at a threshold that adapts, with a bit")
    return Algorithm(
        name, local, bound, init, Bounded(client_, bound), server, memory_slots=0, reads_memory=True, extras=(BIT,)
    )


def adaptive_feedback(
    name: str,
    local: LocalUpdate,
    threshold: Threshold,
    *,
    alpha: float,
    beta: float,
    server_step: float,
    server_normalization: bool = False,
    warmup_rounds: int = 0,
) -> Algorithm:
    """Error feedback whose beta and alpha are in units of a threshold C that follows a quantile of ||P_i - v_i||.

    Delta_i = Norm_{alpha C}(P_i - v_i), v_i <- v_i + beta C Delta_i;  v <- v + beta C q mean(Delta),
    x <- x - eta v [/ ||v||]. With updates k times as long and a start k times as large all memories are k times as
    large and messages are the same; a fixed alpha would make them ever shorter where C falls below it.
    The server's memory is v, then the factor of the noise in it, then C.

    Args:
        name: what reports and errors call the method.
        local: local operator, which gives P_i.
        threshold: rule of C.
        alpha: smoothing of the normalisation, in units of C.
        beta: factor with which a message enters the memories, in units of C.
        server_step: eta.
        server_normalization: whether the server divides by ||v||.
        warmup_rounds: number of first rounds in which the server keeps x while the memories track P_i(x^0).
    """
    threshold, eta = threshold.checked(), positive("server_step", server_step)
    non_negative("alpha", alpha)
    positive("beta", beta)
    non_negative("warmup_rounds", warmup_rounds)

    def init(x0: Tensor) -> Server:
        return Server(x0, torch.cat([torch.zeros_like(x0), x0.new_tensor([0.0, threshold.start])]), 0)

    def client_(bound: Bound, server: Server, v: Tensor, updates: Tensor) -> Messages:
        c, (a, _) = threshold.now(server), threshold.parts(updates)
        norms = row_norms(updates.sub_(v))
        delta = smooth_normalize(alpha * c, a).on(bound.grid).scale_(updates)
        delta.move_(v, beta * c / a)
        return threshold.messages(delta, norms, c, bound.grid)

    def server(server: Server, mean: Tensor, weights: Weights) -> Step:
        gain = beta * threshold.now(server) / threshold.parts(server.x)[0] * weights.memory
        v = plus(server.memory[:-2], mean[:-1], gain)
        factor = math.hypot(float(server.memory[-2]), gain)  # noises of all rounds add up in v
        memory = torch.cat([v, v.new_tensor([factor, threshold.after(server, mean, weights)])])
        if server.round < warmup_rounds:
            return Step(v, 0.0, memory)
        return along(v, eta, memory, weights.noise * factor**2, server_normalization)

    bound = smooth_normalize(1.0)._replace(name="normalisation by a threshold that adapts, with a bit")
    return Algorithm(
        name, local, bound, init, Bounded(client_, bound), server, memory_slots=1, idle_clients_advance=True,
        reads_memory=True, extras=(BIT,),
    )  # fmt: skip


def _within(c: float) -> float:
    return min(MOST, max(LEAST, c))
