"""Your own module, loss and clients of unequal size: federated regression, compared across three methods.

Run it: python examples/own_model_and_data.py
"""

import numpy as np
import torch
from torch import Tensor, nn

import fednormec as fn


def make_clients(count: int = 30) -> list[tuple[np.ndarray, np.ndarray]]:
    """Clients measure the same curve over different ranges, with 20 to 60 noisy points each."""
    rng = np.random.default_rng(0)
    centres, sizes = rng.uniform(-2, 2, count), rng.integers(20, 60, count)
    inputs = [rng.normal(c, 0.5, (n, 1)) for c, n in zip(centres, sizes, strict=True)]
    return [(x, np.sin(2 * x) + 0.05 * rng.standard_normal(x.shape)) for x in inputs]


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(dim=1)  # one number per example


def main(rounds: int = 150) -> dict[str, float]:
    grid = np.linspace(-2, 2, 200)[:, None]
    torch.manual_seed(0)  # the module's own weights are the starting point
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    problem = fn.NeuralProblem(model, make_clients(), test=(grid, np.sin(2 * grid)), loss=squared_error)
    local = fn.gd(step=0.5, steps=10)
    methods = [
        fn.fed_normec(local, beta=0.05, server_step=0.3, server_normalization=False),
        fn.dp_fed_avg_clip(local, tau=0.05),
        fn.fed_avg(local),
    ]
    losses = {}
    for algorithm in methods:
        result = fn.train(problem, algorithm, fn.poisson(0.5, idle="sleep"), rounds=rounds, seed=1)
        losses[algorithm.name] = result.history[-1]["test_loss"]
        print(f"{algorithm.name:20} test loss {losses[algorithm.name]:.4f}")
    return losses


if __name__ == "__main__":
    main()
