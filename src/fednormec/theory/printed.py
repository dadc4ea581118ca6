"""The paper's theorems and corollaries exactly as printed, one function each, slips included.

They are here to be compared with: docs/errata.md lists what is wrong with them, `fednormec.theory.corrected` has what
holds. They take the same constants, settings and noise as the corrected bounds. In the paper's symbols:

    L, V = f(x^0) - f^inf       constants.smoothness, constants.gap
    Delta^inf                   constants.heterogeneity
    (1/M) sum_i Delta_i^inf     constants.component_heterogeneity
    M, d                        constants.clients, constants.dim
    T = 1, T > 1                settings.local is "one_step", "gd"; "ig" is local IG, which has no T
    gamma, eta, alpha, beta     settings.local_step, .server_step, .alpha, .beta
    K + 1                       settings.steps, the number of rounds that move the model
    R                           memory_error, an argument: a theorem assumes R, it does not compute it
    p                           1/(1 + M noise.sampling), since noise.sampling = (1-p)/(pM)
    sigma_DP^2                  p M noise.privacy, which is E||z||^2 of one client's noise z
    B                           2 (p-1)^2/p + 2 (1-p) + 2 sigma_DP^2/p
    B^, beta^, eta^             the letters with a hat

Noise that is added to the sum enters as that of messages which add up to as much. The paper has no warm-up: R is the
memories' error when the model begins to move. A theorem judges the settings that it gets. A corollary chooses some of
them itself: it does not read those fields, and its choice is in the guarantee's `settings`.

Two things that the paper asks for are not among the conditions, since no proof uses them: Algorithm 1's eta in (0, 1),
although eta is a length in x, and Theorem 2's Delta_i^inf > 0.
"""

import math
from dataclasses import dataclass

from fednormec.errors import UserError, non_negative, one_of, positive
from fednormec.theory.guarantee import Condition, Guarantee, at_most
from fednormec.theory.setting import Constants, Local, Noise, Settings


@dataclass(frozen=True)
class PaperNoise:
    """Noise by the formula of the utility corollaries: p = B^/M and sigma_DP = c p sqrt((K+1) log(1/delta))/epsilon.

    cohort: B^, the expected number of clients that send in a round.
    epsilon, delta: the privacy that the paper claims for this noise; docs/privacy.md says what it really is.
    c: the constant that the paper leaves open.
    """

    cohort: float
    epsilon: float
    delta: float
    c: float = 1.0

    def __post_init__(self) -> None:
        positive("epsilon", self.epsilon)
        positive("c", self.c)
        if not 0 < self.delta < 1:
            raise UserError(f"delta must lie strictly between 0 and 1, not {self.delta}.")


def theorem_local_gd(constants: Constants, settings: Settings, noise: Noise, memory_error: float) -> Guarantee:
    """Bound of Theorem 1: local GD steps. docs/errata.md corrects it.

    If gamma = 1/(2L), beta/(alpha+R) < 1 and eta <= min(Delta^inf/(2 sqrt(2L) (K+1)), beta R/(4L (alpha+R))), then
    min_k E||grad f(x^k)|| <= 3V/(eta (K+1)) + 2R + 2 sqrt(beta^2 B (K+1)/M) + eta L/2
        + gamma [T != 1] 8L sqrt(2L) sqrt(Delta^inf).

    Args:
        constants: L, V, Delta^inf (with T = 1, too) and M.
        settings: T (local is "one_step" or "gd"), gamma, alpha, beta, eta and K + 1.
        noise: p and sigma_DP, both in B.
        memory_error: R, at least max_i ||P_i(x^0) - v_i^0||.

    >>> constants = Constants(
    ...     smoothness=0.5, gap=6.0, gradient_norm=1.0, client_norm=1.0, clients=4, dim=1, heterogeneity=16.0)
    >>> settings = Settings("one_step", local_step=1.0, alpha=1.0, beta=1.0, server_step=0.25, rounds=9)
    >>> said = theorem_local_gd(constants, settings, Noise(sampling=0.0, privacy=0.0), memory_error=1.0)
    >>> said.terms
    {'initial': 8.0, 'memory': 2.0, 'noise': 0.0, 'server_step': 0.0625, 'drift': 0.0}
    >>> said.holds, said.bound
    (True, 10.0625)
    """
    c, s = constants, settings
    one_of("settings.local of Theorem 1", s.local, ("one_step", "gd"))
    drift = _drift(0.0 if s.local == "one_step" else s.local_step, c, s.local)
    return _theorem("Theorem 1 (local GD), as printed", 4, drift, c, s, noise, memory_error)


def theorem_local_ig(constants: Constants, settings: Settings, noise: Noise, memory_error: float) -> Guarantee:
    """Bound of Theorem 2: local IG steps. docs/errata.md corrects it.

    If gamma = 1/(2L), beta/(alpha+R) < 1 and eta <= min(Delta^inf/(2 sqrt(2L) (K+1)), beta R/(6L (alpha+R))), then
    min_k E||grad f(x^k)|| <= 3V/(eta (K+1)) + 2R + 2 sqrt(beta^2 B (K+1)/M) + eta L/2
        + gamma 8L sqrt(2L) sqrt(Delta^inf) + gamma 4L sqrt(2L) sqrt((1/M) sum_i Delta_i^inf).

    Args:
        constants: L, V, Delta^inf, (1/M) sum_i Delta_i^inf and M.
        settings: gamma, alpha, beta, eta and K + 1; local is "ig".
        noise: p and sigma_DP, both in B.
        memory_error: R, at least max_i ||P_i(x^0) - v_i^0||.
    """
    c, s = constants, settings
    one_of("settings.local of Theorem 2", s.local, ("ig",))
    drift = _drift(s.local_step, c, "ig")
    return _theorem("Theorem 2 (local IG), as printed", 6, drift, c, s, noise, memory_error)


def convergence_local_gd(
    constants: Constants, settings: Settings, noise: Noise, *, memory_scale: float, beta_scale: float
) -> Guarantee:
    """Bound of Corollary 2: convergence at O(1/K^{1/8}) with several local GD steps. docs/errata.md corrects it.

    With T > 1, gamma = 1/(2L (K+1)^{1/8}), R = D_1/(K+1)^{1/8}, beta = D_2/(K+1)^{5/8}, eta = eta^/(K+1)^{7/8} and
    eta^ = min(Delta^inf/(2 sqrt(2L)), D_1 D_2/(4L (alpha+D_1))):
    min_k E||grad f(x^k)|| <= A_1/(K+1)^{1/8} + A_2/(K+1)^{7/8}, A_2 = eta^ L/2,
    A_1 = 3V/eta^ + 2 D_1 + 2 sqrt(B) D_2/sqrt(M) + 4 sqrt(2L) sqrt(Delta^inf).

    Args:
        constants: L, V, Delta^inf and M.
        settings: T (local is "gd"), alpha and K + 1. The corollary chooses gamma, beta and eta.
        noise: p and sigma_DP, both in B.
        memory_scale: D_1.
        beta_scale: D_2.
    """
    c = constants
    return _convergence(
        "Corollary 2 (convergence, local GD), as printed", "gd", 1 / 8, _drift(1 / (2 * c.smoothness), c, "gd"),
        _cap(c, "gd"), c, settings, noise, memory_scale, beta_scale,
    )  # fmt: skip


def convergence_local_ig(
    constants: Constants, settings: Settings, noise: Noise, *, memory_scale: float, beta_scale: float
) -> Guarantee:
    """Bound of Corollary 5: convergence at O(1/K^{1/8}) with local IG steps. docs/errata.md corrects it.

    The schedule and the bound are those of Corollary 2, but the last summand of A_1 is
    8 sqrt(2L) sqrt(Delta^inf) + 4 sqrt(2L) sqrt((1/M) sum_i Delta_i^inf).

    Args:
        constants: L, V, Delta^inf, (1/M) sum_i Delta_i^inf and M.
        settings: alpha and K + 1; local is "ig". The corollary chooses gamma, beta and eta.
        noise: p and sigma_DP, both in B.
        memory_scale: D_1.
        beta_scale: D_2.
    """
    c = constants
    return _convergence(
        "Corollary 5 (convergence, local IG), as printed", "ig", 1 / 8, _drift(1 / c.smoothness, c, "ig"),
        _cap(c, "ig"), c, settings, noise, memory_scale, beta_scale,
    )  # fmt: skip


def convergence_one_step(
    constants: Constants, settings: Settings, noise: Noise, *, memory_scale: float, beta_scale: float
) -> Guarantee:
    """Bound of Corollary 4: convergence at O(1/K^{1/6}) with one local GD step. docs/errata.md corrects it.

    With T = 1, gamma = 1/(2L), R = D_1/(K+1)^{1/6}, beta = D_2/(K+1)^{2/3}, eta = eta^/(K+1)^{5/6} and
    eta^ = D_1 D_2/(4L (alpha+D_1)):
    min_k E||grad f(x^k)|| <= A_1/(K+1)^{1/6} + A_2/(K+1)^{5/6}, A_2 = eta^ L/2,
    A_1 = 3V/eta^ + 2 D_1 + 2 sqrt(B) D_2/sqrt(M).

    Args:
        constants: L, V and M.
        settings: T (local is "one_step"), alpha and K + 1. The corollary chooses gamma, beta and eta.
        noise: p and sigma_DP, both in B.
        memory_scale: D_1.
        beta_scale: D_2.
    """
    return _convergence(
        "Corollary 4 (convergence, one local step), as printed", "one_step", 1 / 6, {}, math.inf, constants, settings,
        noise, memory_scale, beta_scale,
    )  # fmt: skip


def utility_one_step(
    constants: Constants, settings: Settings, noise: PaperNoise, *, memory_scale: float = 1.0
) -> Guarantee:
    """Bound of Corollary 1: utility at a given privacy with one local GD step. docs/errata.md corrects it.

    With T = 1, p = B^/M, sigma_DP = c p sqrt((K+1) log(1/delta))/epsilon, B_2 = 2 c^2 (B^/M) log(1/delta)/epsilon^2,
    beta = beta^/(K+1), beta^ = sqrt(3V/gamma) (M/B_2)^{1/4}, gamma < Delta^inf (alpha+R)/(sqrt(2L) beta^ R),
    alpha = R = O(d^{1/4} sqrt(V/gamma) (B_2/M)^{1/4}) and eta = gamma beta^ R/(2 (alpha+R) (K+1)):
    min_k E||grad f(x^k)|| = O(Delta (d B^ log(1/delta)/(M epsilon)^2)^{1/4}), Delta = max(alpha, 2) sqrt(L) sqrt(V).

    The terms are the proof's, before it puts beta^ in and takes O:
    6 alpha V/(gamma beta^ R) + 6V/(gamma beta^) + 2R + 2 beta^ sqrt(B_2/M) + 2 beta^ sqrt(B_1/(M (K+1)))
    + gamma L beta^ R/(4 (alpha+R) (K+1)), where B_1 = 2p ((1-1/p)^2 + 1/p - 1). The proof ends with gamma = 1/(2L),
    which is a condition here. What stands in O(.) is settings["order"] of the guarantee.

    Args:
        constants: L, V, Delta^inf, M and d.
        settings: T (local is "one_step"), gamma and K + 1. The corollary chooses alpha, beta and eta.
        noise: B^, epsilon, delta and c. The corollary chooses sigma_DP.
        memory_scale: the constant in alpha = R = O(.).
    """
    c, s = constants, settings
    said = _utility("Corollary 1 (utility, one local step), as printed", "one_step", {}, 0.0, c, s, noise, memory_scale)
    return _also(said, _half(c, s), _short(said, c, s))


def utility_local_gd(
    constants: Constants, settings: Settings, noise: PaperNoise, *, memory_scale: float = 1.0
) -> Guarantee:
    """Bound of Corollary 3: utility at a given privacy with several local GD steps. docs/errata.md corrects it.

    It is Corollary 1 with T > 1 and gamma < 2 (Delta^inf)^2/(3L V sqrt(M/B_2)); its proof needs gamma <= 1/(2L). The
    terms gain gamma 8L sqrt(2L) sqrt(Delta^inf), the order gains sqrt(L) sqrt(Delta^inf).

    Args:
        constants: L, V, Delta^inf, M and d.
        settings: T (local is "gd"), gamma and K + 1. The corollary chooses alpha, beta and eta.
        noise: B^, epsilon, delta and c. The corollary chooses sigma_DP.
        memory_scale: the constant in alpha = R = O(.).
    """
    c, s = constants, settings
    drift, Delta = _drift(s.local_step, c, "gd"), c.known("heterogeneity", "gd")
    plateau = math.sqrt(c.smoothness) * math.sqrt(Delta)
    said = _utility("Corollary 3 (utility, local GD), as printed", "gd", drift, plateau, c, s, noise, memory_scale)
    limit = 2 * Delta**2 / (3 * c.smoothness * c.gap * math.sqrt(c.clients / said.settings["B_2"]))
    short = _below("short_local_step", "gamma < 2 (Delta^inf)^2/(3L V sqrt(M/B_2))", s.local_step, limit)
    return _also(said, _at_most_half(c, s), short)


def utility_local_ig(
    constants: Constants, settings: Settings, noise: PaperNoise, *, memory_scale: float = 1.0
) -> Guarantee:
    """Bound of Corollary 6: utility at a given privacy with local IG steps. docs/errata.md corrects it.

    It is Corollary 1 with T > 1; as in Corollary 3 the proof needs gamma <= 1/(2L). The terms gain
    gamma 8L sqrt(2L) sqrt(Delta^inf) and gamma 4L sqrt(2L) sqrt((1/M) sum_i Delta_i^inf). The order gains sqrt(L) times
    the sum of both roots.

    Args:
        constants: L, V, Delta^inf, (1/M) sum_i Delta_i^inf, M and d.
        settings: gamma and K + 1; local is "ig". The corollary chooses alpha, beta and eta.
        noise: B^, epsilon, delta and c. The corollary chooses sigma_DP.
        memory_scale: the constant in alpha = R = O(.).
    """
    c, s = constants, settings
    roots = [math.sqrt(c.known(name, "ig")) for name in ("heterogeneity", "component_heterogeneity")]
    drift, plateau = _drift(s.local_step, c, "ig"), math.sqrt(c.smoothness) * sum(roots)
    said = _utility("Corollary 6 (utility, local IG), as printed", "ig", drift, plateau, c, s, noise, memory_scale)
    return _also(said, _at_most_half(c, s), _short(said, c, s))


def _theorem(
    source: str, factor: int, drift: dict[str, float], c: Constants, s: Settings, noise: Noise, R: float
) -> Guarantee:
    """Bound of either theorem; `factor` is the 4 or 6 in eta <= beta R/(factor L (alpha+R))."""
    L, n, alpha, beta, eta = c.smoothness, s.steps, positive("alpha", s.alpha), s.beta, s.server_step
    non_negative("memory_error", R)
    conditions = (
        _half(c, s),
        _follows(beta, alpha, R),
        at_most("server_step_heterogeneity", "eta <= Delta^inf/(2 sqrt(2L) (K+1))", eta, _cap(c, s.local) / n),
        at_most(
            "server_step_memory", f"eta <= beta R/({factor}L (alpha+R))", eta, beta * R / (factor * L * (alpha + R))
        ),
    )
    terms = {
        "initial": 3 * c.gap / (eta * n),
        "memory": 2 * R,
        "noise": 2 * math.sqrt(beta**2 * _B(c, noise) * n / c.clients),
        "server_step": eta * L / 2,
    }
    return Guarantee(source, terms | drift, conditions, {"local_step": 1 / (2 * L)})


def _convergence(
    source: str, local: Local, slow: float, drift: dict[str, float], cap: float, c: Constants, s: Settings,
    noise: Noise, D1: float, D2: float,
) -> Guarantee:  # fmt: skip
    """Bound A_1/(K+1)^slow + A_2/(K+1)^(1-slow) of a convergence corollary, A_1 by its summands; eta^ is at most `cap`.

    Delta^inf = 0 leaves no step: eta^ = 0, and the bound is infinite.
    """
    L, n, alpha = c.smoothness, s.steps, positive("alpha", s.alpha)
    positive("memory_scale", D1)
    positive("beta_scale", D2)
    eta = min(cap, D1 * D2 / (4 * L * (alpha + D1)))
    A1 = {
        "initial": 3 * c.gap / eta if eta > 0 else math.inf,
        "memory": 2 * D1,
        "noise": 2 * math.sqrt(_B(c, noise)) * D2 / math.sqrt(c.clients),
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
    follows = _follows(settings["beta"], alpha, settings["memory_error"])
    return Guarantee(source, terms, (_operator(s, local), follows), settings)


def _utility(
    source: str, local: Local, drift: dict[str, float], plateau: float, c: Constants, s: Settings, noise: PaperNoise,
    scale: float,
) -> Guarantee:  # fmt: skip
    """Bound of a utility corollary: Corollary 1's terms and order, with `drift` and `plateau` on top."""
    L, V, M, d, gamma, n = c.smoothness, positive("gap", c.gap), c.clients, c.dim, s.local_step, s.steps
    positive("memory_scale", scale)
    if not 1 <= noise.cohort <= M:
        raise UserError(f"cohort must lie between 1 and the {M} clients, not {noise.cohort}.")
    p, secrecy = noise.cohort / M, math.log(1 / noise.delta) / noise.epsilon**2
    B1, B2 = 2 * p * ((1 - 1 / p) ** 2 + 1 / p - 1), 2 * noise.c**2 * p * secrecy
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
        "noise_std": noise.c * p * math.sqrt(n * secrecy),
        "B_2": B2,
        "beta_hat": beta_hat,
        "beta": beta_hat / n,
        "alpha": alpha,
        "memory_error": R,
        "server_step": gamma / 2 * beta_hat * R / (alpha + R) / n,
        "order": max(alpha, 2) * math.sqrt(L) * math.sqrt(V) * (d * noise.cohort / M**2 * secrecy) ** 0.25 + plateau,
    }
    return Guarantee(source, terms | drift, (_operator(s, local), _follows(settings["beta"], alpha, R)), settings)


def _also(said: Guarantee, *conditions: Condition) -> Guarantee:
    return said._replace(conditions=(*said.conditions, *conditions))


def _B(c: Constants, noise: Noise) -> float:
    """B, from p and sigma_DP as the module's table has them."""
    M, sampling = c.clients, non_negative("noise.sampling", noise.sampling)
    p = positive("p", 1 / (1 + M * sampling))
    sigma = math.sqrt(non_negative("noise.privacy", noise.privacy) * p * M)
    return 2 * (p - 1) ** 2 / p + 2 * (1 - p) + 2 * sigma**2 / p


def _drift(gamma: float, c: Constants, local: Local) -> dict[str, float]:
    """gamma 8L sqrt(2L) sqrt(Delta^inf), and for IG gamma 4L sqrt(2L) sqrt((1/M) sum_i Delta_i^inf)."""
    unit = gamma * c.smoothness * math.sqrt(2 * c.smoothness)
    drift = {"drift": 8 * unit * math.sqrt(c.known("heterogeneity", local))}
    if local == "ig":
        drift["component_drift"] = 4 * unit * math.sqrt(c.known("component_heterogeneity", local))
    return drift


def _cap(c: Constants, local: Local) -> float:
    """Delta^inf/(2 sqrt(2L))."""
    return c.known("heterogeneity", local) / (2 * math.sqrt(2 * c.smoothness))


def _half(c: Constants, s: Settings) -> Condition:
    half = 1 / (2 * c.smoothness)
    text = f"gamma = 1/(2L): {s.local_step:.4g} against {half:.4g}"
    return Condition("local_step", text, math.isclose(s.local_step, half, rel_tol=1e-9))


def _at_most_half(c: Constants, s: Settings) -> Condition:
    return at_most("local_step", "gamma <= 1/(2L)", s.local_step, 1 / (2 * c.smoothness))


def _follows(beta: float, alpha: float, R: float) -> Condition:
    return _below("memory_rate", "beta/(alpha+R) < 1", beta / (alpha + R), 1)


def _short(said: Guarantee, c: Constants, s: Settings) -> Condition:
    """Condition of Corollaries 1 and 6 on gamma, where alpha = R."""
    limit = 2 * c.known("heterogeneity", s.local) / (math.sqrt(2 * c.smoothness) * said.settings["beta_hat"])
    return _below("short_local_step", "gamma < Delta^inf (alpha+R)/(sqrt(2L) beta^ R)", s.local_step, limit)


def _operator(s: Settings, local: Local) -> Condition:
    """Condition on T; the paper asks T > 1 of local IG, too, which has no T."""
    asked = {"one_step": "T = 1", "gd": "local GD with T > 1", "ig": "local IG (T > 1)"}[local]
    return Condition("steps", f"{asked}: settings.local is {s.local}", s.local == local)


def _below(name: str, text: str, value: float, limit: float) -> Condition:
    return Condition(name, f"{text}: {value:.4g} against {limit:.4g}", value < limit)
