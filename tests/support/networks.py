"""The package's models on tiny images, clients for them, and their gradients by torch's own backward."""

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

import fednormec as fn

MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: fn.models.linear((1, 8, 8), 4),
    "mlp": lambda: fn.models.mlp((1, 8, 8), 4, hidden=(7, 5)),
    "small_cnn": lambda: fn.models.small_cnn((1, 8, 8), 4, channels=(4, 8)),
    "resnet20": lambda: fn.models.resnet20((1, 8, 8), 4),
    "resnet20, batch norm": lambda: fn.models.resnet20((1, 8, 8), 4, norm="batch"),
}
EQUAL, UNEQUAL = [6, 6, 6, 6], [5, 2, 9, 4]
Pair = tuple[np.ndarray, np.ndarray]


def clients(sizes: Sequence[int], shape: tuple[int, ...] = (1, 8, 8), classes: int = 4, seed: int = 0) -> list[Pair]:
    """Clients with so many examples each."""
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal((n, *shape)), rng.integers(0, classes, n)) for n in sizes]


def one_client_gradient(module: nn.Module, x: np.ndarray, y: np.ndarray, point: Tensor | None = None) -> Tensor:
    """By torch's own backward on a copy of the module in float64, one client at a time."""
    module = copy.deepcopy(module).double()
    if point is not None:
        nn.utils.vector_to_parameters(point, module.parameters())
    loss = nn.functional.cross_entropy(module(torch.as_tensor(x)), torch.as_tensor(y))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
