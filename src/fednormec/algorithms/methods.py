"""Methods of the papers by name: each a short constructor on one of the three recursions, and one table of them all."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from fednormec.algorithms.averaging import averaging
from fednormec.algorithms.control_variates import control_variates
from fednormec.algorithms.feedback import feedback
from fednormec.core.algorithm import Algorithm
from fednormec.core.bounds import clip, identity, smooth_normalize, top_k
from fednormec.core.local import LocalUpdate, gd, sgd

InitialMemory = Literal["zero", "local_updates"]


def fed_normec(
    local: LocalUpdate,
    *,
    alpha: float = 0.01,
    beta: float = 0.1,
    server_step: float = 0.1,
    server_normalization: bool = True,
    warmup_rounds: int = 0,
    initial_memory: InitialMemory = "zero",
) -> Algorithm:
    """Fed-alpha-NormEC: smoothed normalisation and error feedback on local updates, Algorithm 1 of its paper.

    P_i = (x - T_i(x))/gamma;  Delta_i = Norm_alpha(P_i - v_i);  v_i <- v_i + beta Delta_i        (every client)
    v <- v + (beta/M) sum_{i in S} q Delta_i;  x <- x - eta v/||v||, or x - eta v with server_normalization off.
    gamma = local.step, eta = server_step. Radius 1. The paper's experiments run with server_normalization off.

    Args:
        local: local operator T_i.
        alpha: smoothing of the normalisation.
        beta: factor with which a message enters the memories.
        server_step: eta.
        server_normalization: whether the server divides by ||v||.
        warmup_rounds: number of first rounds in which the server keeps x while the memories track P_i(x^0).
        initial_memory: "zero", or "local_updates": an exact round before the first fills the memories; never private.
    """
    return feedback(
        "Fed-alpha-NormEC", local, smooth_normalize(alpha), beta=beta, server_step=server_step,
        server_normalization=server_normalization, warmup_rounds=warmup_rounds, initial_memory=initial_memory,
    )  # fmt: skip


def alpha_normec(
    *,
    alpha: float = 0.01,
    beta: float = 0.1,
    server_step: float = 0.1,
    server_normalization: bool = True,
    warmup_rounds: int = 0,
    batch_size: int | None = None,
    initial_memory: InitialMemory = "zero",
) -> Algorithm:
    """alpha-NormEC (Shulgin et al. 2025, arXiv 2502.13482): Fed-alpha-NormEC on gradients, every client in every round.

    Delta_i = Norm_alpha(grad f_i(x) - v_i);  v_i <- v_i + beta Delta_i
    v <- v + beta mean(Delta);  x <- x - eta v/||v||. Radius 1.
    The recursion is the one its successor's text quotes. With partial participation this is Fed-alpha-NormEC with one
    local step; the command line insists on full().

    Args:
        alpha: smoothing of the normalisation.
        beta: factor with which a message enters the memories.
        server_step: eta.
        server_normalization: whether the server divides by ||v||.
        warmup_rounds: number of first rounds in which the server keeps x while the memories track the gradients at x^0.
        batch_size: number of examples in a mini-batch gradient; None: the full gradient.
        initial_memory: "zero", or "local_updates": an exact round before the first fills the memories; never private.
    """
    return feedback(
        "alpha-NormEC", _gradient(batch_size), smooth_normalize(alpha), beta=beta, server_step=server_step,
        server_normalization=server_normalization, warmup_rounds=warmup_rounds, initial_memory=initial_memory,
    )  # fmt: skip


def clip21(
    *,
    tau: float = 1.0,
    server_step: float = 0.1,
    batch_size: int | None = None,
    initial_memory: InitialMemory = "zero",
) -> Algorithm:
    """Clip21 (Khirirat et al. 2023, arXiv 2305.18929): error feedback with clipping, on gradients.

    Delta_i = clip_tau(grad f_i(x) - v_i);  v_i <- v_i + Delta_i;  v <- v + mean(Delta);  x <- x - eta v. Radius tau.

    Args:
        tau: largest norm of a message.
        server_step: eta.
        batch_size: number of examples in a mini-batch gradient; None: the full gradient.
        initial_memory: "zero", or "local_updates": an exact round before the first fills the memories; never private.
    """
    return feedback(
        "Clip21", _gradient(batch_size), clip(tau), beta=1.0, server_step=server_step, initial_memory=initial_memory
    )


def clip21_sgd2m(
    *,
    tau: float = 1.0,
    client_momentum: float = 0.1,
    server_momentum: float = 0.5,
    server_step: float = 0.1,
    batch_size: int | None = None,
    initial_memory: InitialMemory = "zero",
) -> Algorithm:
    """Clip21-SGD2M (Islamov et al. 2025, arXiv 2502.11682): Clip21 with momentum on both sides.

    u_i <- (1-m) u_i + m g_i;  Delta_i = clip_tau(u_i - v_i);  v_i <- v_i + b Delta_i;  v <- v + b mean(Delta + noise);
    x <- x - eta v. Both memories take only the part b of what is sent, so that noise builds up more slowly. Radius tau.
    From a summary of the paper and from memory; here the gradient is taken at x before the step of the round, where the
    paper's listing steps first (the same sequence, shifted by the first, empty step from v = 0).

    Args:
        tau: largest norm of a message.
        client_momentum: m.
        server_momentum: b.
        server_step: eta.
        batch_size: number of examples in a mini-batch gradient; None: the full gradient.
        initial_memory: "zero", or "local_updates": an exact round before the first fills the memories; never private.
    """
    return feedback(
        "Clip21-SGD2M", _gradient(batch_size), clip(tau), beta=server_momentum, server_step=server_step,
        client_momentum=client_momentum, initial_memory=initial_memory,
    )  # fmt: skip


def ef21(
    *,
    k: int = 10,
    server_step: float = 0.1,
    batch_size: int | None = None,
    initial_memory: InitialMemory = "zero",
) -> Algorithm:
    """EF21 (Richtarik, Sokolov, Fatkhullin 2021, arXiv 2106.05203) with the Top-k compressor. Cannot be private.

    c_i = TopK(grad f_i(x) - v_i);  v_i <- v_i + c_i;  v <- v + mean(c);  x <- x - eta v. No radius.

    Args:
        k: number of coordinates that a message keeps.
        server_step: eta.
        batch_size: number of examples in a mini-batch gradient; None: the full gradient.
        initial_memory: "zero", or "local_updates": an exact round before the first fills the memories.
    """
    return feedback(
        "EF21", _gradient(batch_size), top_k(k), beta=1.0, server_step=server_step, initial_memory=initial_memory
    )


def fed_avg(local: LocalUpdate, *, server_step: float = 1.0) -> Algorithm:
    """FedAvg (McMahan et al. 2017, arXiv 1602.05629), every client weighing the same. Cannot be private.

    x <- x - eta (1/(pM)) sum_{i in S} (x - T_i(x)). No radius.

    Args:
        local: local operator T_i.
        server_step: eta.
    """
    return averaging("FedAvg", local, identity(), server_step=server_step)


def dp_fed_avg_clip(local: LocalUpdate, *, tau: float = 1.0, server_step: float = 1.0) -> Algorithm:
    """DP-FedAvg with clipping (McMahan et al. 2018, arXiv 1710.06963), with the public denominator pM.

    x <- x - eta (1/(pM)) sum_{i in S} (clip_tau(x - T_i(x)) + z_i). Radius tau.

    Args:
        local: local operator T_i.
        tau: largest norm of a message.
        server_step: eta.
    """
    return averaging("DP-FedAvg (clip)", local, clip(tau), server_step=server_step)


def dp_fed_avg_normalized(
    local: LocalUpdate,
    *,
    alpha: float = 0.01,
    beta: float = 1.0,
    server_step: float = 1.0,
    bounded: Literal["displacement", "update"] = "displacement",
) -> Algorithm:
    """DP-FedAvg with smoothed normalisation instead of clipping (Fed-alpha-NormEC's baseline, without memory).

    x <- x - eta (1/(pM)) sum_{i in S} (beta Norm_alpha(x - T_i(x)) + z_i). Radius beta.

    Args:
        local: local operator T_i.
        alpha: smoothing of the normalisation.
        beta: largest norm of a message.
        server_step: eta.
        bounded: "displacement", or "update": normalises P_i = (x - T_i(x))/gamma instead, as Fed-alpha-NormEC does,
            only without its memory.
    """
    return averaging(
        "DP-FedAvg (normalised)", local, smooth_normalize(alpha, beta), server_step=server_step, bounded=bounded
    )


def scaffold(local: LocalUpdate, *, server_step: float = 1.0) -> Algorithm:
    """SCAFFOLD (Karimireddy et al. 2020, arXiv 1910.06378), option II. Cannot be private.

    y <- y - (gamma/T)(grad f_i(y) + c - c_i), T times from x;  c_i' = c_i - c + (x - y)/gamma
    x <- x - eta (1/(pM)) sum_{i in S} (x - y_i);  c <- c + (1/M) sum_{i in S} (c_i' - c_i). No radius.
    Only drawn clients compute, whatever `idle` says, as in the paper. From memory of the paper.

    Args:
        local: local operator T_i.
        server_step: eta.
    """
    return control_variates("SCAFFOLD", local, identity(), server_step=server_step)


def dp_scaffold(local: LocalUpdate, *, tau: float = 1.0, server_step: float = 1.0) -> Algorithm:
    """DP-SCAFFOLD at client level, after Noble, Bellet, Dieuleveut 2022 (arXiv 2111.09278). Radius tau.

    SCAFFOLD whose message [(x - y_i)/gamma, c_i' - c_i] is clipped jointly to tau; c_i moves by the clipped half.
    The paper protects single records (noise in every local gradient); this protects whole clients.

    Args:
        local: local operator T_i.
        tau: largest norm of a message, both halves together.
        server_step: eta.
    """
    return control_variates("DP-SCAFFOLD", local, clip(tau), server_step=server_step)


class Method(NamedTuple):
    """Row of the table of methods.

    Attributes:
        build: constructor of the method.
        paper: what to cite.
        takes_local: whether the constructor takes a local operator first.
        can_be_private: whether noise may be added.
    """

    build: Callable[..., Algorithm]
    paper: str
    takes_local: bool
    can_be_private: bool


METHODS: dict[str, Method] = {
    "fed_normec": Method(fed_normec, "the Fed-α-NormEC paper", True, True),
    "alpha_normec": Method(alpha_normec, "arXiv 2502.13482", False, True),
    "clip21": Method(clip21, "arXiv 2305.18929", False, True),
    "clip21_sgd2m": Method(clip21_sgd2m, "arXiv 2502.11682", False, True),
    "ef21": Method(ef21, "arXiv 2106.05203", False, False),
    "fed_avg": Method(fed_avg, "arXiv 1602.05629", True, False),
    "dp_fed_avg_clip": Method(dp_fed_avg_clip, "arXiv 1710.06963", True, True),
    "dp_fed_avg_normalized": Method(dp_fed_avg_normalized, "baseline of Fed-α-NormEC", True, True),
    "scaffold": Method(scaffold, "arXiv 1910.06378", True, False),
    "dp_scaffold": Method(dp_scaffold, "arXiv 2111.09278", True, True),
}


def _gradient(batch_size: int | None) -> LocalUpdate:
    """Returns the local operator with P_i = grad f_i(x), full or on a mini-batch.

    The local step cancels, so any will do.
    """
    return gd(1.0) if batch_size is None else sgd(1.0, steps=1, batch_size=batch_size)
