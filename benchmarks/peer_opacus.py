"""Seconds of one sum of records' clipped gradients with Opacus (Meta's library for DP-SGD), for the benchmark's driver.

    python benchmarks/peer_opacus.py mlp 50 ghost --models src
    python benchmarks/peer_opacus.py resnet20 256 rows --models src

Prints one JSON line {"ready": true, ...}; then, for every line "N" on stdin, computes N sums and prints
{"seconds": [t1, ..., tN]}; ends at end of file.

One sum is what a step takes before noise is added, on one thread: zero_grad, forward, and
    ghost   the two backward passes of DPLossFastGradientClipping, which leave the sum in `grad`: norms without rows for
            linear layers, rows for all others, and then the gradient of the weighted losses;
    rows    one backward pass of GradSampleModule, and `clip_and_accumulate`.
The batch is at hand as one tensor, where ours gathers it from the client's data. Freed memory is kept as ours keeps it:
the MLP's rows take a third of the time so. Channels last in memory are faster on ResNet20, but its gradients of
convolutions are then wrong (Opacus 1.5.4: those of a record differ from its own by more than their length).
"""

import argparse
import json
import sys
import time
import warnings
from importlib.metadata import version
from types import MethodType

import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from silos import TAU, batch, marks, silo
from torch import nn
from workloads import CLIENTS_AND_SHAPE


def write_over_nothing(network):
    """Makes a network compute the same without writing over what a layer put out, which Opacus' hooks do not allow."""

    def forward(block, x):
        beside = x if block.stride == 1 else nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, x.shape[1]))
        return (block.residual(x) + beside).relu()

    for layer in network.modules():
        if isinstance(layer, nn.ReLU):
            layer.inplace = False
        if type(layer).__name__ == "ResidualBlock":
            layer.forward = MethodType(forward, layer)


def build(workload, size, way, models):
    """A function that computes the sum, and one that returns it as a vector."""
    network, images, labels = silo(workload, models)
    chosen = torch.from_numpy(batch(len(images), size))
    write_over_nothing(network)
    images, labels, criterion = images[chosen], labels[chosen], nn.CrossEntropyLoss(reduction="sum")
    own = torch.optim.SGD(network.parameters(), lr=0.1)
    how = {"noise_multiplier": 0.0, "max_grad_norm": TAU, "expected_batch_size": size, "loss_reduction": "sum"}
    if way == "ghost":
        module = GradSampleModuleFastGradientClipping(network, loss_reduction="sum", max_grad_norm=TAU)
        optimizer = DPOptimizerFastGradientClipping(own, **how)
        criterion = DPLossFastGradientClipping(module, optimizer, criterion, "sum")
    else:
        module = GradSampleModule(network, loss_reduction="sum")
        optimizer = DPOptimizer(own, **how)

    def run():
        optimizer.zero_grad()
        criterion(module(images), labels).backward()
        if way == "rows":
            optimizer.clip_and_accumulate()

    def total():
        run()
        return torch.cat([(p.grad if way == "ghost" else p.summed_grad).flatten() for p in network.parameters()])

    return run, total


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workload", choices=CLIENTS_AND_SHAPE)
    parser.add_argument("size", type=int)
    parser.add_argument("way", choices=("ghost", "rows"))
    parser.add_argument("--models", metavar="SRC", required=True, help="folder that holds fednormec/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # about hooks, in every pass
    sys.path.insert(0, args.models)
    from fednormec.core.machine import keep_freed_memory

    keep_freed_memory()
    run, total = build(args.workload, args.size, args.way, args.models)
    versions = {name: version(name) for name in ("opacus", "torch", "numpy")}
    print(json.dumps({"ready": True, "versions": versions, "marks": marks(total())}), flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
