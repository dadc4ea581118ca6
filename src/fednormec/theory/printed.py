"""The paper's theorems and corollaries exactly as printed, one function each, slips included.

They are here to be compared with. docs/errata.md lists what is wrong with them; `fednormec.theory.corrected` is what
holds. Symbols: L smoothness, V = f(x^0) - f^inf gap, R memory_error, Delta^inf heterogeneity, (1/M) sum_i Delta_i^inf
component_heterogeneity, M clients, sigma_DP noise_std, T steps, gamma local_step, eta server_step, K last_round, so
that K + 1 rounds are run; p, alpha and beta are themselves. D_1 memory_scale and D_2 beta_scale set a corollary's
schedule; B-hat is cohort, d dim. B = 2 (p-1)^2/p + 2 (1-p) + 2 sigma_DP^2/p. Not among the conditions are Algorithm 1's
eta in (0, 1), a length in x, and Theorem 2's Delta_i^inf > 0, which no proof uses.
"""

import math
from collections.abc import Callable

from fednormec.errors import UserError, at_least_one, non_negative, positive
from fednormec.theory.guarantee import Condition, Guarantee, at_most


def theorem_local_gd(
    *, smoothness: float, gap: float, memory_error: float, heterogeneity: float, clients: int, p: float,
    noise_std: float, steps: int, alpha: float, beta: float, local_step: float, server_step: float, last_round: int,
) -> Guarantee:  # fmt: skip
    """Theorem 1 (local GD steps). Not all of it holds: docs/errata.md; fednormec.theory.corrected has what does.

    If gamma = 1/(2L), beta/(alpha+R) < 1 and eta <= min(Delta^inf/(2 sqrt(2L) (K+1)), beta R/(4L (alpha+R))), then
    min_k E||grad f(x^k)|| <= 3V/(eta (K+1)) + 2R + 2 sqrt(beta^2 B (K+1)/M) + eta L/2
        + gamma [T != 1] 8L sqrt(2L) sqrt(Delta^inf).

    >>> said = theorem_local_gd(
    ...     smoothness=0.5, gap=6.0, memory_error=1.0, heterogeneity=16.0, clients=4, p=1.0, noise_std=0.0,
    ...     steps=1, alpha=1.0, beta=1.0, local_step=1.0, server_step=0.25, last_round=8)
    >>> said.terms
    {'initial': 8.0, 'memory': 2.0, 'noise': 0.0, 'server_step': 0.0625, 'drift': 0.0}
    >>> said.holds, said.bound
    (True, 10.0625)
    """
    at_least_one("steps", steps)
    drift = _drift(0.0 if steps == 1 else local_step, smoothness, heterogeneity)
    return _theorem(
        "Theorem 1 (local GD), as printed", 4, drift, smoothness, gap, memory_error, heterogeneity, clients, p,
        noise_std, alpha, beta, local_step, server_step, last_round,
    )  # fmt: skip


def theorem_local_ig(
    *, smoothness: float, gap: float, memory_error: float, heterogeneity: float, component_heterogeneity: float,
    clients: int, p: float, noise_std: float, alpha: float, beta: float, local_step: float, server_step: float,
    last_round: int,
) -> Guarantee:  # fmt: skip
    """Theorem 2 (local IG steps). Not all of it holds: docs/errata.md; fednormec.theory.corrected has what does.

    If gamma = 1/(2L), beta/(alpha+R) < 1 and eta <= min(Delta^inf/(2 sqrt(2L) (K+1)), beta R/(6L (alpha+R))), then
    min_k E||grad f(x^k)|| <= 3V/(eta (K+1)) + 2R + 2 sqrt(beta^2 B (K+1)/M) + eta L/2
        + gamma 8L sqrt(2L) sqrt(Delta^inf) + gamma 4L sqrt(2L) sqrt((1/M) sum_i Delta_i^inf).
    """
    drift = _drift(local_step, smoothness, heterogeneity, component_heterogeneity)
    return _theorem(
        "Theorem 2 (local IG), as printed", 6, drift, smoothness, gap, memory_error, heterogeneity, clients, p,
        noise_std, alpha, beta, local_step, server_step, last_round,
    )  # fmt: skip


def convergence_local_gd(
    *, smoothness: float, gap: float, heterogeneity: float, clients: int, p: float, noise_std: float, steps: int,
    alpha: float, memory_scale: float, beta_scale: float, last_round: int,
) -> Guarantee:  # fmt: skip
    """Corollary 2 (convergence, several local GD steps), O(1/K^{1/8}). Read docs/errata.md; use theory.corrected.

    With T > 1, gamma = 1/(2L (K+1)^{1/8}), R = D_1/(K+1)^{1/8}, beta = D_2/(K+1)^{5/8}, eta = eta^/(K+1)^{7/8} and
    eta^ = min(Delta^inf/(2 sqrt(2L)), D_1 D_2/(4L (alpha+D_1))):
    min_k E||grad f(x^k)|| <= A_1/(K+1)^{1/8} + A_2/(K+1)^{7/8}, A_2 = eta^ L/2,
    A_1 = 3V/eta^ + 2 D_1 + 2 sqrt(B) D_2/sqrt(M) + 4 sqrt(2L) sqrt(Delta^inf).
    """
    drift = _drift(1 / (2 * positive("smoothness", smoothness)), smoothness, heterogeneity)
    return _convergence(
        "Corollary 2 (convergence, local GD), as printed", 1 / 8, drift, _cap(smoothness, heterogeneity),
        _several(steps), smoothness, gap, clients, p, noise_std, alpha, memory_scale, beta_scale, last_round,
    )  # fmt: skip


def convergence_local_ig(
    *, smoothness: float, gap: float, heterogeneity: float, component_heterogeneity: float, clients: int, p: float,
    noise_std: float, steps: int, alpha: float, memory_scale: float, beta_scale: float, last_round: int,
) -> Guarantee:  # fmt: skip
    """Corollary 5 (convergence, local IG steps), O(1/K^{1/8}). Read docs/errata.md; use theory.corrected.

    The schedule of Corollary 2 and its bound, where the last summand of A_1 becomes
    8 sqrt(2L) sqrt(Delta^inf) + 4 sqrt(2L) sqrt((1/M) sum_i Delta_i^inf).
    """
    drift = _drift(1 / positive("smoothness", smoothness), smoothness, heterogeneity, component_heterogeneity)
    return _convergence(
        "Corollary 5 (convergence, local IG), as printed", 1 / 8, drift, _cap(smoothness, heterogeneity),
        _several(steps), smoothness, gap, clients, p, noise_std, alpha, memory_scale, beta_scale, last_round,
    )  # fmt: skip


def convergence_one_step(
    *, smoothness: float, gap: float, clients: int, p: float, noise_std: float, alpha: float, memory_scale: float,
    beta_scale: float, last_round: int, steps: int = 1,
) -> Guarantee:  # fmt: skip
    """Corollary 4 (convergence, one local GD step), O(1/K^{1/6}). Read docs/errata.md; use theory.corrected.

    With T = 1, gamma = 1/(2L), R = D_1/(K+1)^{1/6}, beta = D_2/(K+1)^{2/3}, eta = eta^/(K+1)^{5/6} and
    eta^ = D_1 D_2/(4L (alpha+D_1)):
    min_k E||grad f(x^k)|| <= A_1/(K+1)^{1/6} + A_2/(K+1)^{5/6}, A_2 = eta^ L/2,
    A_1 = 3V/eta^ + 2 D_1 + 2 sqrt(B) D_2/sqrt(M).
    """
    return _convergence(
        "Corollary 4 (convergence, one local step), as printed", 1 / 6, {}, math.inf, _one(steps), smoothness, gap,
        clients, p, noise_std, alpha, memory_scale, beta_scale, last_round,
    )  # fmt: skip


def utility_one_step(
    *, smoothness: float, gap: float, heterogeneity: float, clients: int, cohort: float, dim: int, epsilon: float,
    delta: float, local_step: float, last_round: int, c: float = 1.0, scale: float = 1.0, steps: int = 1,
) -> Guarantee:  # fmt: skip
    """Corollary 1 (utility, one local GD step). Not all of it holds: docs/errata.md; fednormec.theory.corrected does.

    With T = 1, p = B^/M, sigma_DP = c p sqrt((K+1) log(1/delta))/epsilon, B_2 = 2 c^2 (B^/M) log(1/delta)/epsilon^2,
    beta = beta^/(K+1), beta^ = sqrt(3V/gamma) (M/B_2)^{1/4}, gamma < Delta^inf (alpha+R)/(sqrt(2L) beta^ R),
    alpha = R = O(d^{1/4} sqrt(V/gamma) (B_2/M)^{1/4}) and eta = gamma beta^ R/(2 (alpha+R) (K+1)):
    min_k E||grad f(x^k)|| = O(Delta (d B^ log(1/delta)/(M epsilon)^2)^{1/4}), Delta = max(alpha, 2) sqrt(L) sqrt(V).
    `scale` is the constant in R. The terms are the proof's, before beta^ is put in and O taken:
    6 alpha V/(gamma beta^ R) + 6V/(gamma beta^) + 2R + 2 beta^ sqrt(B_2/M) + 2 beta^ sqrt(B_1/(M (K+1)))
    + gamma L beta^ R/(4 (alpha+R) (K+1)), where B_1 = 2p ((1-1/p)^2 + 1/p - 1). Its end takes gamma = 1/(2L).
    settings["order"] is what stands in O(.).
    """
    said = _utility(
        "Corollary 1 (utility, one local step), as printed", {}, 0.0, _one(steps), smoothness, gap, clients, cohort,
        dim, epsilon, delta, local_step, last_round, c, scale,
    )  # fmt: skip
    return _also(said, _half(local_step, smoothness), _short(said, local_step, smoothness, heterogeneity))


def utility_local_gd(
    *, smoothness: float, gap: float, heterogeneity: float, clients: int, cohort: float, dim: int, epsilon: float,
    delta: float, local_step: float, last_round: int, steps: int, c: float = 1.0, scale: float = 1.0,
) -> Guarantee:  # fmt: skip
    """Corollary 3 (utility, several local GD steps). Not all of it holds: docs/errata.md; theory.corrected does.

    As Corollary 1 with T > 1 and gamma < 2 (Delta^inf)^2/(3L V sqrt(M/B_2)), gamma <= 1/(2L) by its proof. The terms
    gain gamma 8L sqrt(2L) sqrt(Delta^inf), the order gains sqrt(L) sqrt(Delta^inf).
    """
    said = _utility(
        "Corollary 3 (utility, local GD), as printed", _drift(local_step, smoothness, heterogeneity),
        math.sqrt(smoothness) * math.sqrt(heterogeneity), _several(steps), smoothness, gap, clients, cohort, dim,
        epsilon, delta, local_step, last_round, c, scale,
    )  # fmt: skip
    limit = 2 * heterogeneity**2 / (3 * smoothness * gap * math.sqrt(clients / said.settings["B_2"]))
    short = _below("short_local_step", "gamma < 2 (Delta^inf)^2/(3L V sqrt(M/B_2))", local_step, limit)
    return _also(said, at_most("local_step", "gamma <= 1/(2L)", local_step, 1 / (2 * smoothness)), short)


def utility_local_ig(
    *, smoothness: float, gap: float, heterogeneity: float, component_heterogeneity: float, clients: int,
    cohort: float, dim: int, epsilon: float, delta: float, local_step: float, last_round: int, steps: int,
    c: float = 1.0, scale: float = 1.0,
) -> Guarantee:  # fmt: skip
    """Corollary 6 (utility, local IG steps). Not all of it holds: docs/errata.md; theory.corrected does.

    As Corollary 1 with T > 1, and gamma <= 1/(2L) as in Corollary 3's proof. The terms gain gamma 8L sqrt(2L)
    sqrt(Delta^inf) and gamma 4L sqrt(2L) sqrt((1/M) sum_i Delta_i^inf), the order gains sqrt(L) times both roots.
    """
    drift = _drift(local_step, smoothness, heterogeneity, component_heterogeneity)
    plateau = math.sqrt(smoothness) * (math.sqrt(heterogeneity) + math.sqrt(component_heterogeneity))
    said = _utility(
        "Corollary 6 (utility, local IG), as printed", drift, plateau, _several(steps), smoothness, gap, clients,
        cohort, dim, epsilon, delta, local_step, last_round, c, scale,
    )  # fmt: skip
    at_half = at_most("local_step", "gamma <= 1/(2L)", local_step, 1 / (2 * smoothness))
    return _also(said, at_half, _short(said, local_step, smoothness, heterogeneity))


def _theorem(
    source: str, factor: int, drift: dict[str, float], L: float, V: float, R: float, Delta: float, M: int, p: float,
    sigma: float, alpha: float, beta: float, gamma: float, eta: float, K: int,
) -> Guarantee:  # fmt: skip
    """Both theorems; `factor` is the 4 or 6 in eta <= beta R/(factor L (alpha+R))."""
    _check(positive, smoothness=L, alpha=alpha, beta=beta, local_step=gamma, server_step=eta)
    _check(non_negative, gap=V, memory_error=R, last_round=K)
    n = K + 1
    conditions = (
        _half(gamma, L),
        _follows(beta, alpha, R),
        at_most("server_step_heterogeneity", "eta <= Delta^inf/(2 sqrt(2L) (K+1))", eta, _cap(L, Delta) / n),
        at_most(
            "server_step_memory", f"eta <= beta R/({factor}L (alpha+R))", eta, beta * R / (factor * L * (alpha + R))
        ),
    )
    terms = {
        "initial": 3 * V / (eta * n),
        "memory": 2 * R,
        "noise": 2 * math.sqrt(beta**2 * _noise(M, p, sigma) * n / M),
        "server_step": eta * L / 2,
    }
    return Guarantee(source, terms | drift, conditions, {"local_step": 1 / (2 * L)})


def _convergence(
    source: str, slow: float, drift: dict[str, float], cap: float, steps: Condition, L: float, V: float, M: int,
    p: float, sigma: float, alpha: float, D1: float, D2: float, K: int,
) -> Guarantee:  # fmt: skip
    """A_1/(K+1)^slow + A_2/(K+1)^(1-slow), A_1 by its summands; eta^ is at most `cap`.

    Delta^inf = 0 leaves no step, eta^ = 0, and the bound is infinite.
    """
    _check(positive, smoothness=L, alpha=alpha, memory_scale=D1, beta_scale=D2)
    _check(non_negative, gap=V, last_round=K)
    n = K + 1
    eta = min(cap, D1 * D2 / (4 * L * (alpha + D1)))
    A1 = {
        "initial": 3 * V / eta if eta > 0 else math.inf,
        "memory": 2 * D1,
        "noise": 2 * math.sqrt(_noise(M, p, sigma)) * D2 / math.sqrt(M),
    } | drift
    A2 = eta * L / 2
    settings = {
        "memory_error": D1 / n**slow,
        "beta": D2 / n ** (1 / 2 + slow),
        "server_step": eta / n ** (1 - slow),
        "local_step": 1 / (2 * L * n**slow) if drift else 1 / (2 * L),
        "A_1": sum(A1.values()),
        "A_2": A2,
    }
    terms = {name: value / n**slow for name, value in A1.items()} | {"server_step": A2 / n ** (1 - slow)}
    return Guarantee(source, terms, (steps, _follows(settings["beta"], alpha, settings["memory_error"])), settings)


def _utility(
    source: str, drift: dict[str, float], plateau: float, steps: Condition, L: float, V: float, M: int, cohort: float,
    d: int, epsilon: float, delta: float, gamma: float, K: int, c: float, scale: float,
) -> Guarantee:  # fmt: skip
    """The three utility corollaries: Corollary 1's terms and order, `drift` and `plateau` on top."""
    _check(positive, smoothness=L, gap=V, epsilon=epsilon, local_step=gamma, c=c, scale=scale)
    non_negative("last_round", K)
    at_least_one("dim", d)
    at_least_one("clients", M)
    if not 1 <= cohort <= M:
        raise UserError(f"cohort must lie between 1 and the {M} clients, not {cohort}.")
    if not 0 < delta < 1:
        raise UserError(f"delta must lie strictly between 0 and 1, not {delta}.")
    n, p, secrecy = K + 1, cohort / M, math.log(1 / delta) / epsilon**2
    B1, B2 = 2 * p * ((1 - 1 / p) ** 2 + 1 / p - 1), 2 * c**2 * p * secrecy
    beta_hat = math.sqrt(3 * V / gamma) * (M / B2) ** 0.25
    alpha = R = scale * d**0.25 * math.sqrt(V / gamma) * (B2 / M) ** 0.25
    terms = {
        "initial_alpha": 6 * alpha * V / (gamma * beta_hat * R),
        "initial": 6 * V / (gamma * beta_hat),
        "memory": 2 * R,
        "privacy_noise": 2 * beta_hat * math.sqrt(B2 / M),
        "sampling_noise": 2 * beta_hat * math.sqrt(B1 / (M * n)),
        "server_step": gamma * L * beta_hat * R / (4 * (alpha + R)) / n,
    }
    settings = {
        "p": p,
        "noise_std": c * p * math.sqrt(n * secrecy),
        "B_2": B2,
        "beta_hat": beta_hat,
        "beta": beta_hat / n,
        "alpha": alpha,
        "memory_error": R,
        "server_step": gamma / 2 * beta_hat * R / (alpha + R) / n,
        "order": max(alpha, 2) * math.sqrt(L) * math.sqrt(V) * (d * cohort / M**2 * secrecy) ** 0.25 + plateau,
    }
    return Guarantee(source, terms | drift, (steps, _follows(settings["beta"], alpha, R)), settings)


def _also(said: Guarantee, *conditions: Condition) -> Guarantee:
    return said._replace(conditions=(*said.conditions, *conditions))


def _noise(M: int, p: float, sigma: float) -> float:
    """B."""
    at_least_one("clients", M)
    non_negative("noise_std", sigma)
    if not 0 < p <= 1:
        raise UserError(f"p must lie in (0, 1], not {p}.")
    return 2 * (p - 1) ** 2 / p + 2 * (1 - p) + 2 * sigma**2 / p


def _drift(gamma: float, L: float, Delta: float, components: float | None = None) -> dict[str, float]:
    """gamma 8L sqrt(2L) sqrt(Delta^inf), and for IG gamma 4L sqrt(2L) sqrt((1/M) sum_i Delta_i^inf)."""
    unit = gamma * positive("smoothness", L) * math.sqrt(2 * L)
    drift = {"drift": 8 * unit * math.sqrt(non_negative("heterogeneity", Delta))}
    if components is not None:
        drift["component_drift"] = 4 * unit * math.sqrt(non_negative("component_heterogeneity", components))
    return drift


def _cap(L: float, Delta: float) -> float:
    return Delta / (2 * math.sqrt(2 * L))


def _half(gamma: float, L: float) -> Condition:
    text = f"gamma = 1/(2L): {gamma:.4g} against {1 / (2 * L):.4g}"
    return Condition("local_step", text, math.isclose(gamma, 1 / (2 * L), rel_tol=1e-9))


def _follows(beta: float, alpha: float, R: float) -> Condition:
    return _below("memory_rate", "beta/(alpha+R) < 1", beta / (alpha + R), 1)


def _short(said: Guarantee, gamma: float, L: float, Delta: float) -> Condition:
    """As Corollaries 1 and 6 ask; alpha = R."""
    limit = 2 * non_negative("heterogeneity", Delta) / (math.sqrt(2 * L) * said.settings["beta_hat"])
    return _below("short_local_step", "gamma < Delta^inf (alpha+R)/(sqrt(2L) beta^ R)", gamma, limit)


def _one(steps: int) -> Condition:
    return Condition("steps", f"T = 1: {steps}", at_least_one("steps", steps) == 1)


def _several(steps: int) -> Condition:
    return Condition("steps", f"T > 1: {steps}", at_least_one("steps", steps) > 1)


def _below(name: str, text: str, value: float, limit: float) -> Condition:
    return Condition(name, f"{text}: {value:.4g} against {limit:.4g}", value < limit)


def _check(check: Callable[[str, float], float], **values: float) -> None:
    for name, value in values.items():
        check(name, value)
