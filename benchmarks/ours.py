"""One round of Fed-α-NormEC (gradients, memories, noise, server step), and the bare gradients it cannot do without.

Contestants: `fednormec`, the whole round; `bare_tiled`, nothing but the clients' gradients in plain PyTorch, over the
same tiles on as many threads; `bare_once` (for the MLP), one vmapped call for all clients on torch's own threads.
Protocol: prints {"ready": true, ...}, then for each line N on stdin runs N rounds and prints {"seconds": [...]}.
"""

import argparse
import copy
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import fednormec as fn
from fednormec.workers import Pool

CLIENTS = {"mlp": 200, "resnet20": 20, "small_cnn": 50}
LIFE = ExitStack()  # threads that last as long as this process
SHAPES = {"mlp": (784,), "resnet20": (3, 32, 32), "small_cnn": (1, 28, 28)}


def workload(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.standard_normal((CLIENTS[name], 32, *SHAPES[name]), dtype=np.float32))
    targets = torch.from_numpy(rng.integers(0, 10, (CLIENTS[name], 32)))
    return fn.models.MODELS[name](SHAPES[name], 10), inputs, targets


def whole_round(module: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], object]:
    problem = fn.NeuralProblem(module, list(zip(inputs, targets, strict=True)))
    algorithm = fn.fed_normec(fn.gd(0.1), beta=0.01, server_step=0.1, server_normalization=False)
    rounds = fn.simulate(problem, algorithm, privacy=fn.Privacy(noise_std=1.0), rounds=10**9, seed=0)
    return lambda: next(rounds)


def bare_once(module: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], object]:
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    gradients = vmap(grad(lambda p, x, y: loss_of(module, p, x, y)), in_dims=(None, 0, 0))
    return lambda: gradients(parameters, inputs, targets)


def bare_tiled(module: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], object]:
    problem = fn.NeuralProblem(module, list(zip(inputs, targets, strict=True)))
    pool, own = Pool(torch.get_num_threads(), problem.tile), threading.local()
    submit = LIFE.enter_context(pool.threads())

    def one_tile(tiles: list[slice]) -> None:
        if not hasattr(own, "module"):
            own.module = copy.deepcopy(module)
        for tile in tiles:
            (at_once if problem.vectorized else one_by_one)(own.module, inputs[tile], targets[tile])

    tiles = [slice(start, start + problem.tile) for start in range(0, len(inputs), problem.tile)]
    return lambda: list(pool.in_order(submit, one_tile, tiles, problem.tile))


def at_once(module: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    vmap(grad(lambda p, x, y: loss_of(module, p, x, y)), in_dims=(None, 0, 0))(parameters, inputs, targets)


def one_by_one(module: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    for x, y in zip(inputs, targets, strict=True):
        loss = nn.functional.cross_entropy(module(x.contiguous(memory_format=torch.channels_last)), y)
        torch.autograd.grad(loss, list(module.parameters()))


def loss_of(module: nn.Module, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(functional_call(module, parameters, (x,)), y)


def timed(run: Callable[[], object], lines: Iterator[str]) -> Iterator[list[float]]:
    for line in lines:
        seconds = []
        for _ in range(int(line)):
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
        yield seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=CLIENTS)
    parser.add_argument("contestant", choices=["fednormec", "bare_tiled", "bare_once"])
    chosen = parser.parse_args()
    build = {"fednormec": whole_round, "bare_tiled": bare_tiled, "bare_once": bare_once}[chosen.contestant]
    run = build(*workload(chosen.workload))
    versions = {"torch": torch.__version__, "fednormec": fn.__version__, "numpy": np.__version__}
    print(json.dumps({"ready": True, "versions": versions, "threads": torch.get_num_threads()}), flush=True)
    for seconds in timed(run, sys.stdin):
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
