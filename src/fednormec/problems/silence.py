"""Problem without data, for tests of a method or a mechanism alone."""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from fednormec.core.problem import Metrics


@final
@dataclass(frozen=True)
class Silence:
    """Problem whose clients have nothing to say: the gradient is `gradient` everywhere, zero or (to be skipped) nan."""

    dim: int
    num_clients: int
    dtype: torch.dtype = torch.float64
    gradient: float = 0.0

    @property
    def tile(self) -> int:
        return max(1, 2**22 // self.dim)

    @property
    def client_sizes(self) -> np.ndarray:
        return np.ones(self.num_clients, np.int64)

    def init(self, rng: np.random.Generator) -> Tensor:
        return torch.zeros(self.dim, dtype=self.dtype)

    def grad(self, x: Tensor, ids: np.ndarray, examples: np.ndarray | None = None) -> Tensor:
        return x.new_full((len(ids), self.dim), self.gradient)

    def evaluate(self, x: Tensor) -> Metrics:
        return Metrics({}, {"train_loss": 0.0})

    def named(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x}

    def model(self, x: Tensor) -> Tensor:
        return x
