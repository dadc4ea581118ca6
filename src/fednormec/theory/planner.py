"""Planner of the settings that make the corrected bound least, within a budget of rounds."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fednormec.errors import at_least_one
from fednormec.theory.corrected import (
    EXACT_ROUNDS,
    Promise,
    drift_of,
    error_after_warmup,
    guarantee,
    largest_server_step,
    promise,
    update_lipschitz,
)
from fednormec.theory.setting import Constants, Local, Memory, Noise, Settings

NoiseAt = Callable[[int], Noise]
DRIFT_SHARE = 0.05  # of the rest of the bound, that local steps may cost
LEAST_ALPHA = 0.01  # of R: smoothing that costs one per cent of the server step


def plan(constants: Constants, local: Local, noise_at: NoiseAt, rounds: int, memory: Memory = "zero") -> Promise:
    """Finds the best settings with at most `rounds` rounds.

    With a fixed privacy budget more rounds mean more noise in each, so that fewer may be better.

    Args:
        constants: what is known about the problem.
        local: local operator: "one_step", "gd" or "ig".
        noise_at: noise_at(n) is the noise of a round when n are planned.
        rounds: largest number of rounds.
        memory: where the memories start: at "zero", or at the "local_updates", which is never private; then they need
            no warm-up.
    """
    at_least_one("rounds", rounds)
    tried: dict[int, Promise] = {}

    def try_all(candidates: np.ndarray) -> int:
        for n in np.unique(candidates.round().astype(int)):
            if int(n) not in tried:
                tried[int(n)] = plan_exactly(constants, local, noise_at(int(n)), int(n), memory)
        return min(tried, key=lambda n: tried[n].found.bound)

    best = try_all(np.geomspace(min(8, rounds), rounds, 12))
    for width in (1.3, 1.08):
        best = try_all(np.clip(best * np.geomspace(1 / width, width, 5), 1, rounds))
    return tried[best]


def plan_exactly(constants: Constants, local: Local, noise: Noise, rounds: int, memory: Memory = "zero") -> Promise:
    """Finds the best settings with exactly so many rounds.

    The bound never rewards local work, since a smaller local step always makes it smaller; what is chosen is the
    largest gamma whose drift is at most 5 % of the other terms.
    """
    gamma = 1 / (2 * constants.smoothness)
    for _ in range(1 if local == "one_step" else 3):
        settings = _search(constants, local, noise, rounds, gamma, memory)
        gamma = gamma if local == "one_step" else _largest_local_step(constants, settings, noise)
    return promise(constants, replace(settings, local_step=gamma), noise)


def _search(c: Constants, local: Local, noise: Noise, rounds: int, gamma: float, memory: Memory) -> Settings:
    """Searches R, beta/R and alpha/R on a grid that closes in on the best point.

    Warm-up and server step follow from them. A memory's error falls by beta r/(alpha + r) in a round of warm-up, at
    most the time that the differential equation takes: (R_0 - R + alpha log(R_0/R))/beta rounds. Left out of the search
    is the drift, which gamma decides.
    """
    start, lam = c.start_error(local, gamma), update_lipschitz(local, c.smoothness)
    c0 = 1.0 if local == "one_step" else math.e
    low, high = np.log([1e-6, 1e-6, LEAST_ALPHA]), np.log([1e3, 4.0, 4.0])
    axes = [np.linspace(lo, hi, size) for lo, hi, size in zip(low, high, (61, 61, 9), strict=True)]
    for _ in range(5):
        u, b, a = np.meshgrid(*(np.exp(axis) for axis in axes), indexing="ij")
        R = u * start
        beta, alpha = b * R, a * R
        warmup = np.maximum(np.ceil((1 - u - a * u * np.log(u)) / (b * u) - 1e-9), 0) * (memory == "zero")
        n = rounds - warmup
        excess = np.maximum(np.sqrt(beta) - np.sqrt(alpha), 0) ** 2
        most = np.where(b < 1 + a, np.minimum(beta / (1 + a), R - excess), 0.0) / lam
        ok = (n >= 1) & (most > 0)
        n = np.where(ok, n, 1.0)
        eta = np.minimum(np.where(ok, most, 1.0), np.maximum(np.sqrt(2 * c0 * c.gap / (c.smoothness * n)), 1e-300))
        bound = c0 * c.gap / (eta * n) + 2 * R + 2 * beta * math.sqrt(noise.variance * rounds) + eta * c.smoothness / 2
        at = np.unravel_index(np.argmin(np.where(ok, bound, np.inf)), bound.shape)
        found = tuple(float(values[at]) for values in (R, beta, alpha))
        axes = [_closer(axis, i, lo, hi) for axis, i, lo, hi in zip(axes, at, low, high, strict=True)]
    return _settings(c, local, gamma, rounds, memory, *found)


def _closer(axis: np.ndarray, i: np.intp, low: float, high: float) -> np.ndarray:
    step = axis[1] - axis[0]
    return np.linspace(max(low, axis[i] - step), min(high, axis[i] + step), 13)


def _settings(
    c: Constants, local: Local, gamma: float, rounds: int, memory: Memory, R: float, beta: float, alpha: float
) -> Settings:
    """Returns the settings with the exact warm-up to R and the best server step that keeps it."""
    start, warmup = 0.0, 0
    if memory == "zero":
        start = c.start_error(local, gamma)
        warmup = min(rounds - 1, math.ceil(max(0.0, (start - R + alpha * math.log(start / R)) / beta)))
    error = error_after_warmup(start, alpha, beta, warmup)
    while warmup > 0 and warmup <= EXACT_ROUNDS:  # rounds are a little faster than the differential equation
        sooner = error_after_warmup(start, alpha, beta, warmup - 1)
        if sooner > R * (1 + 1e-12):
            break
        error, warmup = sooner, warmup - 1
    c0 = 1.0 if local == "one_step" else math.e
    wanted = math.sqrt(2 * c0 * c.gap / (c.smoothness * (rounds - warmup)))
    most = largest_server_step(max(R, error), alpha, beta, update_lipschitz(local, c.smoothness))
    eta = max(min(wanted, most), 1e-9 * most, 1e-300)
    return Settings(local, gamma, alpha, beta, eta, rounds, warmup, memory)


def _largest_local_step(c: Constants, settings: Settings, noise: Noise) -> float:
    """Finds the largest gamma <= 1/(2L) whose drift is at most its share of the bound; the drift grows with gamma."""
    terms = guarantee(c, settings, noise).terms
    rest = sum(value for name, value in terms.items() if name != "drift")

    def affordable(gamma: float) -> bool:
        return drift_of(c, replace(settings, local_step=gamma))[1] <= DRIFT_SHARE * rest

    high = 1 / (2 * c.smoothness)
    if affordable(high):
        return high
    low = high
    while not affordable(low) and low > 1e-300:
        low /= 16
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if affordable(middle) else (low, middle)
    return low
