"""Methods of the papers by name: each a short constructor on one of the recursions, and one table of them all."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from fednormec.algorithms.adaptive import Threshold, adaptive_averaging, adaptive_feedback
from fednormec.algorithms.averaging import averaging
from fednormec.algorithms.centred import centred_feedback
from fednormec.algorithms.compressed import shifted_compression
from fednormec.algorithms.control_variates import control_variates
from fednormec.algorithms.feedback import feedback
from fednormec.algorithms.personal import personal_models
from fednormec.algorithms.residuals import error_control, residuals
from fednormec.core.algorithm import Algorithm
from fednormec.core.bounds import Bound, clip, identity, smooth_normalize, top_k
from fednormec.core.local import LocalUpdate, gd, sgd
from fednormec.errors import UserError, one_of, positive

InitialMemory = Literal["zero", "local_updates"]
AnyBound = Literal["clip", "normalize", "top_k"]
USED_BY_BOUND = {"clip": ("tau",), "normalize": ("tau", "alpha"), "top_k": ("k",)}


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
        server_step: step of the server, eta.
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
        server_step: step of the server, eta.
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
        server_step: step of the server, eta.
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
        client_momentum: share m of the new gradient in a client's momentum, in (0, 1].
        server_momentum: part b of a message that both memories take.
        server_step: step of the server, eta.
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
        server_step: step of the server, eta.
        batch_size: number of examples in a mini-batch gradient; None: the full gradient.
        initial_memory: "zero", or "local_updates": an exact round before the first fills the memories.
    """
    return feedback(
        "EF21", _gradient(batch_size), top_k(k), beta=1.0, server_step=server_step, initial_memory=initial_memory
    )


def ef21_pp(
    *,
    k: int = 10,
    server_step: float = 0.1,
    batch_size: int | None = None,
    initial_memory: InitialMemory = "zero",
) -> Algorithm:
    """EF21-PP (Fatkhullin et al. 2021, arXiv 2110.03294): EF21 in which only drawn clients move. Cannot be private.

    c_i = TopK(grad f_i(x) - v_i) if i in S, else 0;  v_i <- v_i + c_i;  v <- v + (1/M) sum_{i in S} c_i
    x <- x - eta v. No radius. It is `ef21` whose idle clients sleep, whatever the participation says, so that v stays
    the mean of the v_i. The paper moves x first: the same sequence, shifted by the first, empty step from v = 0.

    Args:
        k: number of coordinates that a message keeps.
        server_step: step of the server, eta.
        batch_size: number of examples in a mini-batch gradient; None: the full gradient.
        initial_memory: "zero", or "local_updates": an exact round before the first fills the memories.
    """
    method = ef21(k=k, server_step=server_step, batch_size=batch_size, initial_memory=initial_memory)
    return method._replace(name="EF21-PP", idle_clients_advance=False)


def ef21_sgdm(
    local: LocalUpdate,
    *,
    bound: AnyBound = "clip",
    tau: float | None = None,
    alpha: float | None = None,
    k: int | None = None,
    client_momentum: float = 0.1,
    server_step: float = 0.1,
    initial_memory: InitialMemory = "zero",
) -> Algorithm:
    """EF21-SGDM (Fatkhullin, Tyurin, Richtarik 2023, arXiv 2305.15155): EF21 on each client's momentum.

    u_i <- (1-m) u_i + m P_i;  c_i = bound(u_i - v_i);  v_i <- v_i + c_i
    v <- v + (q/M) sum_{i in S} c_i;  x <- x - eta v. Radius tau; none with Top-k.
    The paper has a compressor such as bound="top_k" and gradients (gd or sgd with one step). It moves x first: the same
    sequence, shifted by the first, empty step from v = 0. Idle clients advance or sleep as in Fed-alpha-NormEC. From a
    summary and from memory, and as others have implemented it.

    Args:
        local: local operator, which gives P_i.
        bound: "clip" to norm tau, "normalize" to tau v/(alpha + ||v||), or "top_k" coordinates, which is never private.
        tau: largest norm of a message, for "clip" and "normalize"; None: 1.
        alpha: smoothing, for "normalize"; None: 0.01.
        k: number of coordinates that a message keeps, for "top_k"; None: 10.
        client_momentum: share m of the new update in a client's momentum, in (0, 1].
        server_step: step of the server, eta.
        initial_memory: "zero", or "local_updates": an exact round before the first fills the memories; never private.
    """
    return feedback(
        "EF21-SGDM", local, _bound(bound, tau, alpha, k), beta=1.0, server_step=server_step,
        client_momentum=client_momentum, initial_memory=initial_memory,
    )  # fmt: skip


def ef14(
    local: LocalUpdate,
    *,
    bound: AnyBound = "clip",
    tau: float | None = None,
    alpha: float | None = None,
    k: int | None = None,
    server_step: float = 0.1,
) -> Algorithm:
    """EF14, the first error feedback (Seide et al. 2014; Stich, Cordonnier, Jaggi 2018, arXiv 1809.07599).

    p_i = e_i + gamma P_i;  m_i = bound(p_i);  e_i <- p_i - m_i;  x <- x - (1/(pM)) sum_{i in S} m_i.
    Radius tau; none with Top-k. The papers have every client in every round and gradients (gd or sgd with one step).
    Here only drawn clients compute, whatever `idle` says: what a client takes out of e_i must be heard. From a summary
    and from memory.

    Args:
        local: local operator, which gives P_i.
        bound: "clip" to norm tau, "normalize" to tau v/(alpha + ||v||), or "top_k" coordinates, which is never private.
        tau: largest norm of a message, for "clip" and "normalize"; None: gamma, the length of a step along an update of
            norm 1.
        alpha: smoothing, for "normalize"; None: 0.01.
        k: number of coordinates that a message keeps, for "top_k"; None: 10.
        server_step: gamma, which multiplies an update before it is bounded.
    """
    positive("server_step", server_step)
    tau = server_step if tau is None and bound != "top_k" else tau
    return residuals("EF14", local, _bound(bound, tau, alpha, k), server_step=server_step)


def econtrol(
    local: LocalUpdate,
    *,
    bound: AnyBound = "clip",
    tau: float | None = None,
    alpha: float | None = None,
    k: int | None = None,
    error_weight: float = 0.1,
    server_step: float = 0.1,
) -> Algorithm:
    """EControl (Gao, Islamov, Stich 2023, arXiv 2311.05645): EF21 that also sends a part of its error so far.

    m_i = bound(w e_i + P_i - h_i);  e_i <- e_i + P_i - h_i - m_i;  h_i <- h_i + m_i
    h <- h + (q/M) sum_{i in S} m_i;  x <- x - eta h. Radius tau; none with Top-k. All memories start at zero.
    The paper has every client in every round, gradients (gd or sgd with one step) and calls w eta. Idle clients advance
    or sleep as in Fed-alpha-NormEC. From a summary and from memory, and as others have implemented it.

    Args:
        local: local operator, which gives P_i.
        bound: "clip" to norm tau, "normalize" to tau v/(alpha + ||v||), or "top_k" coordinates, which is never private.
        tau: largest norm of a message, for "clip" and "normalize"; None: 1.
        alpha: smoothing, for "normalize"; None: 0.01.
        k: number of coordinates that a message keeps, for "top_k"; None: 10.
        error_weight: weight w of the error so far in a message, in [0, 1]; 0 is EF21.
        server_step: step of the server, eta.
    """
    return error_control(
        "EControl", local, _bound(bound, tau, alpha, k), error_weight=error_weight, server_step=server_step
    )


def centred(
    local: LocalUpdate,
    *,
    bound: Literal["normalize", "clip"] = "normalize",
    tau: float | None = None,
    alpha: float | None = None,
    beta: float = 0.1,
    server_step: float = 0.1,
    leak: float | None = None,
    deviation_step: float | None = None,
) -> Algorithm:
    """Centred feedback (ours): clients measure their updates against the server's public memory, noise included.

    m_i = bound(P_i - v - h_i);  v <- v + beta (1/(pM)) sum_{i in S} m_i;  x <- x - eta v. Radius tau.
    Without a leak h_i = 0 and clients keep nothing; with one h_i <- (1-l)(h_i + a m_i). Noise in v is corrected, where
    in Fed-alpha-NormEC it adds up; the price is a bias where updates differ (docs/theory.md). Only drawn clients
    compute, whatever `idle` says: an h_i must not answer to a message that was not heard.

    Args:
        local: local operator, which gives P_i.
        bound: "normalize" to tau v/(alpha + ||v||), or "clip" to norm tau.
        tau: largest norm of a message; None: 1.
        alpha: smoothing, for "normalize"; None: beta tau, with which v takes off a small deviation in one round. Below
            half of that v overshoots where clients agree.
        beta: factor with which the mean message enters the memory.
        server_step: step of the server, eta.
        leak: share l of its memory that a client forgets per round, in (0, 1]; None: clients keep nothing.
        deviation_step: factor a with which a message enters the client's memory, with a leak; None: beta.
    """
    one_of("bound", bound, ("normalize", "clip"))
    if bound == "normalize" and alpha is None:
        alpha = positive("beta", beta) * (1.0 if tau is None else tau)
    return centred_feedback(
        "centred feedback", local, _bound(bound, tau, alpha), beta=beta, server_step=server_step, leak=leak,
        deviation_step=deviation_step,
    )  # fmt: skip


def fed_normec_adaptive(
    local: LocalUpdate,
    *,
    alpha: float = 0.1,
    beta: float = 0.1,
    quantile: float = 0.9,
    start: float = 0.1,
    rate: float = 0.2,
    bit_share: float = 0.01,
    server_step: float = 0.1,
    server_normalization: bool = True,
    warmup_rounds: int = 0,
) -> Algorithm:
    """Fed-alpha-NormEC (ours) whose alpha and beta follow a quantile C of ||P_i - v_i||, by a bit in each message.

    b_i = 1 if ||P_i - v_i|| <= C, else 0;  Delta_i = Norm_{alpha C}(P_i - v_i);  v_i <- v_i + beta C Delta_i
    v <- v + (beta C/M) sum_{i in S} q Delta_i;  x <- x - eta v/||v||, or x - eta v with server_normalization off.
    C <- C exp(-rate (b - quantile)), b the noisy share of the bits that are 1. Radius 1, Delta_i and b_i together.
    The rule of C and the split of the noise are those of dp_fed_avg_adaptive. alpha is relative to C, too, so that the
    method does not depend on the unit of the updates. With alpha >= beta no memory overshoots. C can fall by
    exp(-rate (1 - quantile)) per round, so that a memory which lags behind when the others have arrived can still move
    by beta C/(rate (1 - quantile)): 5 C by default. With the median it is 1 C, and up to half of the memories can stay
    behind for good. C rises fast and falls slowly: a start that is too small costs less.

    Args:
        local: local operator T_i.
        alpha: smoothing of the normalisation, in units of C.
        beta: factor with which a message enters the memories, in units of C.
        quantile: share of the clients whose ||P_i - v_i|| is to be at most C, strictly between 0 and 1.
        start: C in the first round.
        rate: rate at which C changes, from 0 (never) to 10.
        bit_share: share of a message's squared length that is the bit's, strictly between 0 and 1.
        server_step: step of the server, eta.
        server_normalization: whether the server divides by ||v||.
        warmup_rounds: number of first rounds in which the server keeps x while the memories track P_i(x^0).
    """
    return adaptive_feedback(
        "Fed-alpha-NormEC (adaptive)", local, Threshold(quantile, start, rate, bit_share), alpha=alpha, beta=beta,
        server_step=server_step, server_normalization=server_normalization, warmup_rounds=warmup_rounds,
    )  # fmt: skip


def fed_avg(local: LocalUpdate, *, server_step: float = 1.0) -> Algorithm:
    """FedAvg (McMahan et al. 2017, arXiv 1602.05629), every client weighing the same. Cannot be private for clients.

    x <- x - eta (1/(pM)) sum_{i in S} (x - T_i(x)). No radius.
    With dp_sgd and privacy.unit = "record" it is private for records.

    Args:
        local: local operator T_i.
        server_step: step of the server, eta.
    """
    return averaging("FedAvg", local, identity(), server_step=server_step)


def dp_fed_avg_clip(local: LocalUpdate, *, tau: float = 1.0, server_step: float = 1.0) -> Algorithm:
    """DP-FedAvg with clipping (McMahan et al. 2018, arXiv 1710.06963), with the public denominator pM.

    x <- x - eta (1/(pM)) sum_{i in S} (clip_tau(x - T_i(x)) + z_i). Radius tau.

    Args:
        local: local operator T_i.
        tau: largest norm of a message.
        server_step: step of the server, eta.
    """
    return averaging("DP-FedAvg (clip)", local, clip(tau), server_step=server_step)


def dp_fed_avg_adaptive(
    local: LocalUpdate,
    *,
    quantile: float = 0.5,
    start: float = 0.1,
    rate: float = 0.2,
    bit_share: float = 0.01,
    server_step: float = 1.0,
) -> Algorithm:
    """DP-FedAvg with adaptive clipping (Andrew et al. 2019, arXiv 1905.03871): the norm is a quantile of the clients'.

    b_i = 1 if ||x - T_i(x)|| <= C, else 0;  x <- x - eta (1/(pM)) sum_{i in S} clip_C(x - T_i(x))
    C <- C exp(-rate (b - quantile)), b = 1/2 + (1/(pM)) sum_{i in S} (b_i - 1/2) with noise, within [0, 1].
    The message is (sqrt(1-s) clip_C(x - T_i(x))/C, sqrt(s)(2 b_i - 1)), s = bit_share. Radius 1: one ball, one noise z.
    The update has the noise multiplier z/sqrt(1-s), the sum of the b_i - 1/2 noise of std z/(2 sqrt(s)), which is the
    paper's z^-2 = z_update^-2 + (2 std)^-2. The paper takes std = pM/20: s = (10 z/(pM))^2, and 1 % is that for z = 1
    and pM = 100: b has noise of std 0.05, the update 0.5 % more. From a summary and from memory, and as others have
    implemented it.

    Args:
        local: local operator T_i.
        quantile: share of the clients whose displacement is not to be clipped, strictly between 0 and 1.
        start: C in the first round.
        rate: rate at which C changes, from 0 (never) to 10.
        bit_share: share s of a message's squared length that is the bit's, strictly between 0 and 1.
        server_step: step of the server, eta.
    """
    threshold = Threshold(quantile, start, rate, bit_share)
    return adaptive_averaging("DP-FedAvg (adaptive clip)", local, threshold, server_step=server_step)


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
        server_step: step of the server, eta.
        bounded: "displacement", or "update": normalises P_i = (x - T_i(x))/gamma instead, as Fed-alpha-NormEC does,
            only without its memory.
    """
    return averaging(
        "DP-FedAvg (normalised)", local, smooth_normalize(alpha, beta), server_step=server_step, bounded=bounded
    )


def scaffold(local: LocalUpdate, *, server_step: float = 1.0) -> Algorithm:
    """SCAFFOLD (Karimireddy et al. 2020, arXiv 1910.06378), option II. Cannot be private for clients.

    y <- y - (gamma/T)(grad f_i(y) + c - c_i), T times from x;  c_i' = c_i - c + (x - y)/gamma
    x <- x - eta (1/(pM)) sum_{i in S} (x - y_i);  c <- c + (1/M) sum_{i in S} (c_i' - c_i). No radius.
    Only drawn clients compute, whatever `idle` says, as in the paper. From memory of the paper.
    With dp_sgd and privacy.unit = "record" it is private for records: DP-SCAFFOLD as printed (Noble, Bellet, Dieuleveut
    2022, arXiv 2111.09278), T being its K and gamma/T its eta_l, with each record's whole gradient clipped. The paper's
    public code clips each layer, at the batch's median norm, which is not what its epsilon is about.

    Args:
        local: local operator T_i.
        server_step: step of the server, eta.
    """
    return control_variates("SCAFFOLD", local, identity(), server_step=server_step)


def dp_scaffold(local: LocalUpdate, *, tau: float = 1.0, server_step: float = 1.0) -> Algorithm:
    """DP-SCAFFOLD at client level, after Noble, Bellet, Dieuleveut 2022 (arXiv 2111.09278). Radius tau.

    SCAFFOLD whose message [(x - y_i)/gamma, c_i' - c_i] is clipped jointly to tau; c_i moves by the clipped half.
    The paper protects single records (noise in every local gradient), as `scaffold` does with dp_sgd; this protects
    whole clients.

    Args:
        local: local operator T_i.
        tau: largest norm of a message, both halves together.
        server_step: step of the server, eta.
    """
    return control_variates("DP-SCAFFOLD", local, clip(tau), server_step=server_step)


def soteria(local: LocalUpdate, *, k: int = 10, shift_step: float | None = None, server_step: float = 0.1) -> Algorithm:
    """SoteriaFL (Li et al. 2022, arXiv 2206.09888): shifted compression of private updates. Not private for clients.

    m_i = rand_k(P_i - s_i);  s_i <- s_i + a m_i, s_i = 0 at first
    x <- x - eta (s + (1/(pM)) sum_{i in S} m_i);  s <- s + (a/M) sum_{i in S} m_i. No radius.
    rand_k keeps k of the d coordinates, drawn by each client in each round, times d/k, so that its mean is the vector
    itself. With dp_sgd and privacy.unit = "record" it is private for records: what is kept of a noisy sum follows from
    it. The recursion, and the default a, are those of the paper's public code. There every client is in every round and
    takes one step, and the mean gradient of a batch is clipped; here each record's is, since the noise counts on that.
    Only drawn clients compute, whatever `idle` says; that, and several local steps, are ours. The paper's other
    estimators of a gradient (SVRG, SAGA) are not here.

    Args:
        local: local operator, which gives P_i.
        k: number of coordinates that a message has; all d if there are fewer.
        shift_step: step a of the shifts, the paper's gamma; None: sqrt((1 + 2w)/(2 (1 + w)^3)) with w = d/k - 1.
        server_step: step of the server, eta.
    """
    return shifted_compression("SoteriaFL", local, k=k, shift_step=shift_step, server_step=server_step)


def mr_mtl(local: LocalUpdate, *, pull: float = 0.1) -> Algorithm:
    """MR-MTL (Liu et al. 2022, arXiv 2206.07902): a model for each client, pulled to the mean. Not private for clients.

    y <- y - (gamma/T)(grad f_k(y) + pull (y - w)), T times from w_k, w_k <- y;  w <- mean of all w_k. No radius.
    Each client keeps and uses its own w_k (figures own_*), which is x^0 at first; the server's model is w. With dp_sgd
    and privacy.unit = "record" it is private for records. No data enter the pull, which is added after the noise here.
    The paper's public code clips it with every record's gradient, weighs clients by their examples, and has all of them
    in every round. Here only drawn clients compute, whatever `idle` says: the others keep their w_k, and w stays the
    mean of all, as long as the server takes the plain step. Keep gamma pull/T below 1: a longer step overshoots w.

    Args:
        local: local operator, which gives w_k - gamma P_k.
        pull: strength of the pull to the mean, the paper's lambda, zero or positive; 0 is local training.
    """
    return personal_models("MR-MTL", local, pull=pull)


def local_training(local: LocalUpdate) -> Algorithm:
    """Local training alone, what federated training is to be better than: `mr_mtl` without a pull.

    w_k <- T_k(w_k). Each client keeps and uses its own w_k (figures own_*), and hears nothing of the others. The model
    of the server is the mean of all w_k, which nobody uses. Not private for clients; with dp_sgd it is for records.

    Args:
        local: local operator T_k.
    """
    return personal_models("local training", local, pull=0.0)


class Method(NamedTuple):
    """Row of the table of methods.

    Attributes:
        build: constructor of the method.
        paper: what to cite.
        takes_local: whether the constructor takes a local operator first.
    """

    build: Callable[..., Algorithm]
    paper: str
    takes_local: bool

    @property
    def can_be_private(self) -> bool:
        """Returns whether noise may protect clients with the method's defaults: whether its bound has a radius."""
        return math.isfinite((self.build(gd(1.0)) if self.takes_local else self.build()).bound.radius)


METHODS: dict[str, Method] = {
    "fed_normec": Method(fed_normec, "the Fed-α-NormEC paper", True),
    "alpha_normec": Method(alpha_normec, "arXiv 2502.13482", False),
    "clip21": Method(clip21, "arXiv 2305.18929", False),
    "clip21_sgd2m": Method(clip21_sgd2m, "arXiv 2502.11682", False),
    "ef21": Method(ef21, "arXiv 2106.05203", False),
    "ef21_pp": Method(ef21_pp, "arXiv 2110.03294", False),
    "ef21_sgdm": Method(ef21_sgdm, "arXiv 2305.15155", True),
    "ef14": Method(ef14, "arXiv 1809.07599", True),
    "econtrol": Method(econtrol, "arXiv 2311.05645", True),
    "centred": Method(centred, "ours", True),
    "fed_normec_adaptive": Method(fed_normec_adaptive, "ours", True),
    "fed_avg": Method(fed_avg, "arXiv 1602.05629", True),
    "dp_fed_avg_clip": Method(dp_fed_avg_clip, "arXiv 1710.06963", True),
    "dp_fed_avg_adaptive": Method(dp_fed_avg_adaptive, "arXiv 1905.03871", True),
    "dp_fed_avg_normalized": Method(dp_fed_avg_normalized, "baseline of Fed-α-NormEC", True),
    "scaffold": Method(scaffold, "arXiv 1910.06378", True),
    "dp_scaffold": Method(dp_scaffold, "arXiv 2111.09278", True),
    "soteria": Method(soteria, "arXiv 2206.09888", True),
    "mr_mtl": Method(mr_mtl, "arXiv 2206.07902", True),
    "local_training": Method(local_training, "what a federation is to be better than", True),
}


def _gradient(batch_size: int | None) -> LocalUpdate:
    """Returns the local operator with P_i = grad f_i(x), full or on a mini-batch.

    The local step cancels, so any will do.
    """
    return gd(1.0) if batch_size is None else sgd(1.0, steps=1, batch_size=batch_size)


def _bound(name: str, tau: float | None, alpha: float | None, k: int | None = None) -> Bound:
    """Builds the bound of that name; None: the setting was not given.

    Raises:
        UserError: if something was given that this bound does not use: it would be ignored without a word.
    """
    one_of("bound", name, tuple(USED_BY_BOUND))
    used = USED_BY_BOUND[name]
    for setting, value in (("tau", tau), ("alpha", alpha), ("k", k)):
        if value is not None and setting not in used:
            raise UserError(f"{setting} has no meaning with bound = {name!r}, which uses {' and '.join(used)}: "
                            f"leave {setting} out, or choose another bound.")  # fmt: skip
    if name == "top_k":
        return top_k(10 if k is None else k)
    tau = 1.0 if tau is None else tau
    return clip(tau) if name == "clip" else smooth_normalize(0.01 if alpha is None else alpha, tau)
