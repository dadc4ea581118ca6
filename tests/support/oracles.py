"""Literal twins: every method as plain numpy loops over clients, every local operator as plain loops over steps.

A world gives per-client gradients; nothing here uses the library's recursions, bounds or vectorised gradients.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from literal import fed_normec as literal_fed_normec
from literal import norm_alpha

from fednormec.core.local import Moment
from fednormec.core.randomness import generator

Gradient = Callable[[int, np.ndarray, Sequence[int] | None], np.ndarray]
Correction = np.ndarray | int | Callable[[np.ndarray], np.ndarray]  # of a local gradient, which may depend on y
Local = Callable[["World", int, np.ndarray, int, Correction], np.ndarray]  # (world, i, x, k, correction) -> T_i(x)


class World(NamedTuple):
    gradient: Gradient  # of f_i at x, over all components or the given ones
    sizes: list[int]
    x0: np.ndarray
    cohorts: list[set[int]]
    noises: list[np.ndarray]
    p: float
    sleep: bool
    seed: int

    @property
    def M(self) -> int:
        return len(self.sizes)

    @property
    def d(self) -> int:
        return len(self.x0)


class End(NamedTuple):
    x: np.ndarray
    server_memory: np.ndarray
    memories: np.ndarray


# worlds


def quadratic_gradient(A: np.ndarray, b: np.ndarray) -> Gradient:
    def gradient(i, x, examples):
        chosen = range(A.shape[1]) if examples is None else examples
        return sum(A[i, j] @ (x - b[i, j]) for j in chosen) / len(chosen)

    return gradient


def logistic_gradient(features: list[np.ndarray], labels: list[np.ndarray], regularizer: float) -> Gradient:
    def gradient(i, w, examples):
        chosen = range(len(labels[i])) if examples is None else examples
        total = np.zeros_like(w)
        for j in chosen:
            a, y = features[i][j], labels[i][j]
            total += -y * a / (1 + np.exp(y * (a @ w)))
        return total / len(chosen) + regularizer * 2 * w / (1 + w * w) ** 2

    return gradient


# local operators: T_i(x)


def at(correction: Correction, y: np.ndarray) -> np.ndarray | int:
    return correction(y) if callable(correction) else correction


def gd(gamma: float, T: int) -> Local:
    def run(world, i, x, k, correction):
        y = x
        for _ in range(T):
            y = y - gamma / T * (world.gradient(i, y, None) + at(correction, y))
        return y

    return run


def ig(gamma: float, batch: int, order: str, epochs: int) -> Local:
    def run(world, i, x, k, correction):
        n = world.sizes[i]
        rng = generator(world.seed, "local order", k, i)
        steps = []
        for _ in range(epochs):
            visit = list(range(n)) if order == "cyclic" else list(rng.permutation(n))
            steps += [visit[a : a + batch] for a in range(0, n, batch)]
        y = x
        for examples in steps:
            y = y - gamma / len(steps) * (world.gradient(i, y, examples) + at(correction, y))
        return y

    return run


def sgd(gamma: float, T: int, batch: int) -> Local:
    def run(world, i, x, k, correction):
        n = world.sizes[i]
        b = min(batch, n)
        rng = generator(world.seed, "local order", k, i)
        y, left = x, []
        for _ in range(T):
            if len(left) < b:
                left = list(rng.permutation(n))
            examples, left = left[:b], left[b:]
            y = y - gamma / T * (world.gradient(i, y, examples) + at(correction, y))
        return y

    return run


def dp_sgd(plan, gamma: float, T: int, bound: Callable[[np.ndarray], np.ndarray], apart=lambda y: 0) -> Local:
    """Each record's gradient is bounded and added on its own; the plan draws who is in a batch, and its noise."""

    def run(world, i, x, k, correction):
        n, moment, y = world.sizes[i], Moment(world.seed, k), x
        for t in range(T):
            total = np.zeros(world.d)
            for j in plan.batch(i, n, moment, t):
                total = total + bound(world.gradient(i, y, [j]))
            noisy = plan.noised(torch.from_numpy(total), i, moment, t).numpy()
            y = y - gamma / T * (noisy / plan.expected(i, n) + apart(y) + at(correction, y))
        return y

    return run


# methods


def clip(v: np.ndarray, tau: float) -> np.ndarray:
    length = np.sqrt(np.sum(v * v))
    return v if length <= tau else v * (tau / length)


def largest(v: np.ndarray, k: int) -> np.ndarray:
    kept = sorted(range(len(v)), key=lambda c: -abs(v[c]))[:k]
    out = np.zeros_like(v)
    for c in kept:
        out[c] = v[c]
    return out


def computing(world: World, S: set[int]) -> list[int]:
    return sorted(S) if world.sleep else list(range(world.M))


def fed_normec(world, local, *, gamma, alpha, beta, eta, normalize=True):
    def T(i, x, k):
        return local(world, i, x, k, np.zeros(world.d))

    x, v_hat, v = literal_fed_normec(
        T, world.x0, world.M, world.cohorts, world.noises, p=world.p, alpha=alpha, beta=beta, gamma=gamma, eta=eta,
        normalize=normalize, sleep=world.sleep,
    )  # fmt: skip
    return End(x, v_hat, v)


def warmed_up_fed_normec(world, local, *, gamma, alpha, beta, eta, warmup):
    """Server normalisation off; x stays for the first `warmup` rounds."""
    x, v_hat, v = world.x0, np.zeros(world.d), np.zeros((world.M, world.d))
    q = 1 if world.sleep else 1 / world.p
    for k, (S, z) in enumerate(zip(world.cohorts, world.noises, strict=True), start=1):
        total = z.copy()
        for i in computing(world, S):
            delta = norm_alpha((x - local(world, i, x, k, 0)) / gamma - v[i], alpha)
            v[i] = v[i] + beta * delta
            if i in S:
                total += delta
        v_hat = v_hat + beta * q * total / world.M
        if k > warmup:
            x = x - eta * v_hat
    return End(x, v_hat, v)


def alpha_normec(world, *, alpha, beta, eta):
    assert world.p == 1
    x, v_hat, v = world.x0, np.zeros(world.d), np.zeros((world.M, world.d))
    for z in world.noises:
        total = z.copy()
        for i in range(world.M):
            delta = norm_alpha(world.gradient(i, x, None) - v[i], alpha)
            v[i] = v[i] + beta * delta
            total += delta
        v_hat = v_hat + beta * total / world.M
        x = x - eta * v_hat / np.sqrt(np.sum(v_hat * v_hat))
    return End(x, v_hat, v)


def clip21(world, *, tau, eta, start_exact=False):
    x, v = world.x0, np.zeros((world.M, world.d))
    if start_exact:
        v = np.stack([world.gradient(i, x, None) for i in range(world.M)])
    v_hat = sum(v) / world.M
    q = 1 if world.sleep else 1 / world.p
    for S, z in zip(world.cohorts, world.noises, strict=True):
        total = z.copy()
        for i in computing(world, S):
            delta = clip(world.gradient(i, x, None) - v[i], tau)
            v[i] = v[i] + delta
            if i in S:
                total += delta
        v_hat = v_hat + q * total / world.M
        x = x - eta * v_hat
    return End(x, v_hat, v)


def clip21_sgd2m(world, *, tau, m, b, eta, start_exact=False):
    x, v = world.x0, np.zeros((world.M, world.d))
    if start_exact:
        v = np.stack([world.gradient(i, x, None) for i in range(world.M)])
    u, v_hat = v.copy(), sum(v) / world.M
    q = 1 if world.sleep else 1 / world.p
    for S, z in zip(world.cohorts, world.noises, strict=True):
        total = z.copy()
        for i in computing(world, S):
            u[i] = (1 - m) * u[i] + m * world.gradient(i, x, None)
            delta = clip(u[i] - v[i], tau)
            v[i] = v[i] + b * delta
            if i in S:
                total += delta
        v_hat = v_hat + b * q * total / world.M
        x = x - eta * v_hat
    return End(x, v_hat, np.concatenate([v, u], axis=1))


def ef21(world, *, k, eta):
    x, v_hat, v = world.x0, np.zeros(world.d), np.zeros((world.M, world.d))
    q = 1 if world.sleep else 1 / world.p
    for S in world.cohorts:
        total = np.zeros(world.d)
        for i in computing(world, S):
            c = largest(world.gradient(i, x, None) - v[i], k)
            v[i] = v[i] + c
            if i in S:
                total += c
        v_hat = v_hat + q * total / world.M
        x = x - eta * v_hat
    return End(x, v_hat, v)


def ef21_pp(world, *, k, eta):
    """Who is not drawn sends nothing and stays, whatever the participation's rule for idle clients is."""
    x, v = world.x0, np.zeros((world.M, world.d))
    for S in world.cohorts:
        for i in sorted(S):
            v[i] = v[i] + largest(world.gradient(i, x, None) - v[i], k)
        x = x - eta * sum(v) / world.M
    return End(x, sum(v) / world.M, v)


def ef21_sgdm(world, local, *, gamma, C, m, eta, start_exact=False):
    x, v = world.x0, np.zeros((world.M, world.d))
    if start_exact:
        v = np.stack([(x - local(world, i, x, 0, 0)) / gamma for i in range(world.M)])
    u, v_hat = v.copy(), sum(v) / world.M
    q = 1 if world.sleep else 1 / world.p
    for k, (S, z) in enumerate(zip(world.cohorts, world.noises, strict=True), start=1):
        total = z.copy()
        for i in computing(world, S):
            u[i] = (1 - m) * u[i] + m * (x - local(world, i, x, k, 0)) / gamma
            c = C(u[i] - v[i])
            v[i] = v[i] + c
            if i in S:
                total += c
        v_hat = v_hat + q * total / world.M
        x = x - eta * v_hat
    return End(x, v_hat, np.concatenate([v, u], axis=1))


def ef14(world, local, *, gamma, C, eta):
    x, e = world.x0, np.zeros((world.M, world.d))
    for k, (S, z) in enumerate(zip(world.cohorts, world.noises, strict=True), start=1):
        total = z.copy()
        for i in sorted(S):
            wanted = e[i] + eta * (x - local(world, i, x, k, 0)) / gamma
            sent = C(wanted)
            e[i] = wanted - sent
            total += sent
        x = x - total / (world.p * world.M)
    return End(x, np.zeros(0), e)


def econtrol(world, local, *, gamma, C, w, eta):
    x, h_hat, h, e = world.x0, np.zeros(world.d), np.zeros((world.M, world.d)), np.zeros((world.M, world.d))
    q = 1 if world.sleep else 1 / world.p
    for k, (S, z) in enumerate(zip(world.cohorts, world.noises, strict=True), start=1):
        total = z.copy()
        for i in computing(world, S):
            g = (x - local(world, i, x, k, 0)) / gamma
            sent = C(w * e[i] + g - h[i])
            e[i] = e[i] + g - h[i] - sent
            h[i] = h[i] + sent
            if i in S:
                total += sent
        h_hat = h_hat + q * total / world.M
        x = x - eta * h_hat
    return End(x, h_hat, np.concatenate([h, e], axis=1))


def centred(world, local, *, gamma, C, beta, eta, leak=None, a=None):
    x, v_hat, h = world.x0, np.zeros(world.d), np.zeros((world.M, world.d))
    for k, (S, z) in enumerate(zip(world.cohorts, world.noises, strict=True), start=1):
        total = z.copy()
        for i in sorted(S):
            sent = C((x - local(world, i, x, k, 0)) / gamma - v_hat - h[i])
            if leak is not None:
                h[i] = (1 - leak) * (h[i] + a * sent)
            total += sent
        v_hat = v_hat + beta * total / (world.p * world.M)
        x = x - eta * v_hat
    return End(x, v_hat, np.zeros((world.M, 0)) if leak is None else h)


def averaging(world, local, *, eta, psi):
    x = world.x0
    for k, (S, z) in enumerate(zip(world.cohorts, world.noises, strict=True), start=1):
        total = z.copy()
        for i in sorted(S):
            total += psi(x - local(world, i, x, k, 0))
        x = x - eta / (world.p * world.M) * total
    return End(x, np.zeros(0), np.zeros((world.M, 0)))


def fed_avg(world, local, *, eta):
    return averaging(world, local, eta=eta, psi=lambda v: v)


def dp_fed_avg_clip(world, local, *, tau, eta):
    return averaging(world, local, eta=eta, psi=lambda v: clip(v, tau))


def dp_fed_avg_normalized(world, local, *, alpha, beta, eta):
    return averaging(world, local, eta=eta, psi=lambda v: beta * norm_alpha(v, alpha))


def paper_baseline(world, local, *, gamma, alpha, beta):
    """The experiments' FedAvg: x <- x - gamma mean(beta Norm_alpha(P_i) + z_i), p = 1."""
    return averaging(world, local, eta=gamma, psi=lambda v: beta * norm_alpha(v / gamma, alpha))


def dp_fed_avg_adaptive(world, local, *, q, C, rate, s, eta):
    """Clipped displacements in units of C, and bits; `world.noises` have d + 1 numbers."""
    x = world.x0
    for k, (S, z) in enumerate(zip(world.cohorts, world.noises, strict=True), start=1):
        updates, bits = z[:-1] * C / np.sqrt(1 - s), z[-1] / (2 * np.sqrt(s))
        for i in sorted(S):
            u = x - local(world, i, x, k, 0)
            updates = updates + clip(u, C)
            bits += (np.sqrt(np.sum(u * u)) <= C) - 0.5
        x = x - eta / (world.p * world.M) * updates
        C = C * np.exp(-rate * (np.clip(0.5 + bits / (world.p * world.M), 0, 1) - q))
    return End(x, np.array([C]), np.zeros((world.M, 0)))


def fed_normec_adaptive(world, local, *, gamma, alpha, beta, q, C, rate, s, eta, normalize=True, warmup=0):
    x, v_hat, v, squares = world.x0, np.zeros(world.d), np.zeros((world.M, world.d)), 0.0
    weight = 1 if world.sleep else 1 / world.p
    for k, (S, z) in enumerate(zip(world.cohorts, world.noises, strict=True), start=1):
        total, bits = z[:-1] / np.sqrt(1 - s), z[-1] / (2 * np.sqrt(s))
        for i in computing(world, S):
            difference = (x - local(world, i, x, k, 0)) / gamma - v[i]
            delta = norm_alpha(difference, alpha * C)
            v[i] = v[i] + beta * C * delta
            if i in S:
                total = total + delta
                bits += (np.sqrt(np.sum(difference**2)) <= C) - 0.5
        v_hat = v_hat + beta * C * weight * total / world.M
        squares += beta**2 * C**2 * weight**2 / (1 - s)
        if k > warmup:
            x = x - eta * (norm_alpha(v_hat, 0.0) if normalize else v_hat)
        C = C * np.exp(-rate * (np.clip(0.5 + bits / (world.p * world.M), 0, 1) - q))
    return End(x, np.concatenate([v_hat, [np.sqrt(squares), C]]), v)


def scaffold(world, local, *, gamma, eta, tau=np.inf):
    x, c, c_i = world.x0, np.zeros(world.d), np.zeros((world.M, world.d))
    for k, (S, z) in enumerate(zip(world.cohorts, world.noises, strict=True), start=1):
        total = z.copy()
        for i in sorted(S):
            y = local(world, i, x, k, c - c_i[i])
            new = c_i[i] - c + (x - y) / gamma
            message = clip(np.concatenate([(x - y) / gamma, new - c_i[i]]), tau)
            c_i[i] = c_i[i] + message[world.d :]
            total += message
        x = x - eta * gamma / (world.p * world.M) * total[: world.d]
        c = c + total[world.d :] / world.M
    return End(x, c, c_i)


def kept(world: World, k: int, i: int, coordinates: int) -> np.ndarray:
    """Coordinates that client i keeps in round k."""
    source = generator(world.seed, "compression", k, i)
    return source.choice(world.d, coordinates, replace=False, shuffle=False)


def soteria(world, local, *, gamma, k, a, eta):
    x, s, s_i = world.x0, np.zeros(world.d), np.zeros((world.M, world.d))
    for number, S in enumerate(world.cohorts, start=1):
        total = np.zeros(world.d)
        for i in sorted(S):
            difference = (x - local(world, i, x, number, 0)) / gamma - s_i[i]
            message = np.zeros(world.d)
            for c in kept(world, number, i, k):
                message[c] = world.d / k * difference[c]
            s_i[i] = s_i[i] + a * message
            total += message
        x = x - eta * (s + total / (world.p * world.M))
        s = s + a * total / world.M
    return End(x, s, s_i)


def personal(world, local, *, pull):
    """Models of clients' own; the server's is their mean."""
    w = np.stack([world.x0] * world.M)
    for k, S in enumerate(world.cohorts, start=1):
        centre = w.mean(axis=0)
        for i in sorted(S):
            w[i] = local(world, i, w[i], k, lambda y, centre=centre: pull * (y - centre))
    return End(w.mean(axis=0), world.x0, w - world.x0)
