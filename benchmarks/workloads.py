"""The work that every contestant does: networks, clients and data, drawn alike by all."""

import sys

import torch
from torch import nn

CLIENTS_AND_SHAPE: dict[str, tuple[int, tuple[int, ...]]] = {
    "mlp": (200, (784,)),
    "small_cnn": (50, (1, 28, 28)),
    "strided_cnn": (50, (3, 32, 32)),
    "resnet20": (20, (3, 32, 32)),
    "resnet20_batch": (20, (3, 32, 32)),
}
BATCH, CLASSES, RATE, SEED = 32, 10, 0.1, 0


def draw(workload: str, folder: str | None = None) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The network, then everyone's images and labels; `folder` holds fednormec/ where that is not installed."""
    torch.manual_seed(SEED)
    clients, shape = CLIENTS_AND_SHAPE[workload]
    network = _network(workload, shape, folder)
    labels = torch.randint(CLASSES, (clients, BATCH))
    images = torch.randn(CLASSES, *shape)[labels] + torch.randn(clients, BATCH, *shape)
    return network, images, labels


def _network(workload: str, shape: tuple[int, ...], folder: str | None) -> nn.Module:
    if workload == "mlp":
        return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    from fednormec.problems import models

    if workload == "small_cnn":
        return models.small_cnn(shape, CLASSES)
    if workload == "strided_cnn":  # the one of experiments/private-at-scale and docs/reproduction.md
        return models.small_cnn(shape, CLASSES, channels=(8, 16), halving="stride")
    return models.resnet20(shape, CLASSES, "batch" if workload == "resnet20_batch" else "group")
