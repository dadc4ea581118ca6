"""One client of the workloads, with all their images, and a batch of its records: for every contestant the same."""

import numpy as np
import torch
from torch import Tensor, nn
from workloads import SEED, draw

TAU = 1.0  # largest norm of a record's gradient


def silo(workload: str, folder: str | None = None) -> tuple[nn.Module, Tensor, Tensor]:
    """The network, the client's images and its labels."""
    network, images, labels = draw(workload, folder)
    return network, images.flatten(0, 1), labels.flatten()


def batch(records: int, size: int) -> np.ndarray:
    """Numbers of a batch's records, sorted."""
    return np.sort(np.random.default_rng(SEED).permutation(records)[:size])


def marks(total: Tensor) -> list[float]:
    """Two numbers by which a sum of gradients is known again: its norm, and its part along a fixed direction."""
    direction = torch.from_numpy(np.random.default_rng(SEED).standard_normal(len(total)))
    return [float(total.double().norm()), float(total.double() @ direction)]
