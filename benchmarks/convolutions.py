"""What convolutions of our own bring: gradients of 20 clients with them and with torch's, make bench-convolutions.

On one core, in turns in one process; everything else is computed by the same functions in C. Figures are the time
without them / with them. A ReLU that follows is part of them; without them, one channel is a product of patches.
"""

import argparse
import statistics
import sys
import time
from importlib.metadata import version

import torch
from torch import Tensor, nn
from turns import store

from fednormec.core import kernels
from fednormec.core.machine import keep_freed_memory
from fednormec.core.vectors import flatten, layout_of
from fednormec.problems import models
from fednormec.problems.layers import Layered, for_convolutions
from fednormec.problems.losses import cross_entropy

CLIENTS, CLASSES = 20, 10
STRIDED = {"channels": (8, 16), "halving": "stride"}
CASES = {  # network, shape of an image, images of each client, whether clients have weights of their own
    "strided": (lambda: models.small_cnn((3, 32, 32), CLASSES, norm="none", **STRIDED), (3, 32, 32), 32, False),
    "strided, own weights": (
        lambda: models.small_cnn((3, 32, 32), CLASSES, norm="none", **STRIDED), (3, 32, 32), 32, True,
    ),
    "strided, group norm": (lambda: models.small_cnn((3, 32, 32), CLASSES, **STRIDED), (3, 32, 32), 32, False),
    "conv net": (lambda: models.small_cnn((1, 28, 28), CLASSES), (1, 28, 28), 32, False),
    "ResNet20": (lambda: models.resnet20((3, 32, 32), CLASSES), (3, 32, 32), 32, False),
    "ResNet20, four images, own weights": (lambda: models.resnet20((3, 32, 32), CLASSES), (3, 32, 32), 4, True),
}  # fmt: skip


def layered(module: nn.Module, ours: bool) -> Layered:
    found = kernels.convolves
    kernels.convolves = found if ours else lambda: False
    try:
        return Layered(module, layout_of(module), cross_entropy)
    finally:
        kernels.convolves = found


def measured(name: str, turns: int) -> dict[str, object]:
    build, shape, each, own = CASES[name]
    torch.manual_seed(0)
    module = build()
    inputs = for_convolutions(torch.randn(CLIENTS * each, *shape)).unflatten(0, (CLIENTS, each))
    targets, x = torch.randint(CLASSES, (CLIENTS, each)), flatten(module)
    point: Tensor = x + 0.01 * torch.randn(CLIENTS, len(x)) if own else x
    found, ways = kernels.convolves, {"ours": layered(module, True), "torch": layered(module, False)}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(turns + 2):
        for way, network in ways.items():
            kernels.convolves = found if way == "ours" else lambda: False
            started = time.perf_counter()
            network.grad(point, inputs, targets, None)
            if turn >= 2:
                seconds[way].append(time.perf_counter() - started)
    kernels.convolves = found
    ratios = [a / b for a, b in zip(seconds["torch"], seconds["ours"], strict=True)]
    medians = {way: statistics.median(some) for way, some in seconds.items()}
    ratio = medians["torch"] / medians["ours"]
    print(f"{name:<36}{1000 * medians['torch']:>9,.1f}{1000 * medians['ours']:>9,.1f} ms{ratio:>7.2f}", file=sys.stderr)
    return {"median_seconds": medians, "ratio": ratio, "quartiles_of_ratios": statistics.quantiles(ratios)[::2]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    keep_freed_memory()
    versions = {name: version(name) for name in ("torch", "numpy")}
    store("convolutions", {name: {**measured(name, turns), "turns": turns, "versions": versions} for name in CASES})


if __name__ == "__main__":
    main()
