"""A guarantee before training, the settings that make it least, and the run that keeps to it."""

import numpy as np

import fednormec as fn
from fednormec import theory
from fednormec.core.randomness import generator


def main(rounds: int = 400) -> tuple[float, float]:
    """Plans, trains, and returns the smallest gradient norm with the bound that was promised for it."""
    problem = fn.random_quadratic(50, 10, heterogeneity=1.0, seed=1)
    x0 = problem.init(generator(0, "init"))
    constants = theory.constants_of(problem, x0)

    noise = theory.round_noise(problem.num_clients, problem.dim, p=0.5)
    promise = theory.plan(constants, "gd", lambda planned: noise, rounds)
    print(f"promised before training: {promise.found.bound:.3f} of {constants.gradient_norm:.3f} at the start")
    for name, value in promise.found.terms.items():
        print(f"  {name:<12} {value:.4f}")

    algorithm = promise.settings.algorithm(local_steps=5)
    measured = [
        theory.measure(problem, algorithm, r)
        for r in fn.simulate(
            problem, algorithm, fn.poisson(0.5), rounds=promise.settings.rounds, x0=x0, evaluate_every=None
        )
    ]
    allowed = promise.course.memory_error[1:] * (1 + 1e-9)
    assert (np.array([m.memory_error for m in measured]) <= allowed).all(), "a memory left its radius"
    best = min(m.gradient_norm for m in measured)
    print(f"measured: {best:.3f}; every client's memory stayed within its radius in every round")
    return best, promise.found.bound


if __name__ == "__main__":
    main()
