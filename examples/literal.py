"""Fed-α-NormEC as its paper writes it, line by line, in plain numpy loops; slow, and checked against the library.

Run it: python examples/literal.py
"""

from collections.abc import Callable, Sequence

import numpy as np

from fednormec.core.randomness import generator

LocalOperator = Callable[[int, np.ndarray, int], np.ndarray]


def norm_alpha(v: np.ndarray, alpha: float) -> np.ndarray:
    length = np.sqrt(np.sum(v * v))
    return v / (alpha + length) if alpha + length > 0 else np.zeros_like(v)


def fed_normec(
    T: LocalOperator,  # T(i, x, k): client i's local work from x in round k
    x: np.ndarray,
    M: int,
    cohorts: Sequence[set[int]],  # S^k
    noises: Sequence[np.ndarray],  # the sum over i in S^k of z_i^k
    *,
    p: float,
    alpha: float,
    beta: float,
    gamma: float,
    eta: float,
    normalize: bool = True,
    sleep: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Algorithm 1 of the paper; returns x, the server's v and the clients' v_i. `sleep`: only S^k computes, q = 1."""
    v_hat, v = np.zeros_like(x), np.zeros((M, len(x)))
    for k, (S, z) in enumerate(zip(cohorts, noises, strict=True)):  # line 2; line 3: S is drawn outside
        delta = np.zeros((M, len(x)))
        for i in range(M):  # line 4
            if sleep and i not in S:
                continue
            local = T(i, x, k + 1)  # line 5
            delta[i] = norm_alpha((x - local) / gamma - v[i], alpha)  # line 6
            v[i] = v[i] + beta * delta[i]  # line 7
        q = 1.0 if sleep else 1 / p  # line 10
        total = z.copy()
        for i in sorted(S):  # lines 9-13
            total += delta[i]
        v_hat = v_hat + beta / M * q * total  # line 14
        length = np.sqrt(np.sum(v_hat * v_hat)) if normalize else 1.0
        if length > 0:
            x = x - eta / length * v_hat  # line 15
    return x, v_hat, v


def main() -> None:
    import fednormec as fn

    problem = fn.random_quadratic(8, 5, heterogeneity=1.0, seed=3)
    A, b = problem.curvatures.numpy()[:, 0], problem.minimisers.numpy()[:, 0]
    gamma, steps, rounds, p = 0.3, 4, 50, 0.5

    def gradient_descent(i: int, x: np.ndarray, k: int) -> np.ndarray:
        for _ in range(steps):
            x = x - gamma / steps * A[i] @ (x - b[i])
        return x

    participation = fn.poisson(p)
    draws = [participation.draw(8, generator(1, "cohort", k)) for k in range(1, rounds + 1)]
    cohorts = [set(np.flatnonzero(draw.sending)) for draw in draws]
    x0 = np.ones(5)
    literal, _, _ = fed_normec(
        gradient_descent, x0, 8, cohorts, [np.zeros(5)] * rounds, p=p, alpha=0.01, beta=0.1, gamma=gamma, eta=0.05
    )
    algorithm = fn.fed_normec(fn.gd(gamma, steps), alpha=0.01, beta=0.1, server_step=0.05)
    *_, last = fn.simulate(
        problem, algorithm, participation, rounds=rounds, seed=1, x0=problem.minimisers.new_tensor(x0)
    )
    print("literal:", literal)
    print("library:", last.x.numpy())
    print("largest difference:", np.abs(literal - last.x.numpy()).max())


if __name__ == "__main__":
    main()
