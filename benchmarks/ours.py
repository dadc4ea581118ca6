"""One round of Fed-α-NormEC, and what it cannot do without, for the benchmark's driver.

Contestants:
    fednormec   the whole round: gradients, memories, noise, server step
    gradients   our clients' updates alone, over the same tiles on as many threads
    bare_loop   the same updates in plain PyTorch, one client after another, as one would write it
    bare_vmap   (one local step) the same in one vmapped call
    matmul      products of 2048 x 2048 matrices, 68.7 billion operations: what the machine can do
Protocol: prints {"ready": true, ...}, then for each line N on stdin runs N rounds and prints {"seconds": [...]}.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from workloads import BATCH, CLIENTS_AND_SHAPE, RATE, draw

import fednormec as fn
from fednormec.core.local import LocalUpdate, Moment

STEPS = {"gd": 1, "gd5": 5, "ig8": 8}  # gradients of a client in a round; ig8 goes over 8 parts of 4 examples
PRIVACY = fn.Privacy(noise_std=1.0)
LIFE = ExitStack()  # threads that last as long as this process


def local_update(name: str) -> LocalUpdate:
    return fn.ig(RATE, batch_size=BATCH // 8) if name == "ig8" else fn.gd(RATE, STEPS[name])


def whole_round(
    module: nn.Module, inputs: Tensor, targets: Tensor, local: str, privacy: fn.Privacy = PRIVACY
) -> Callable[[], object]:
    problem = fn.NeuralProblem(module, list(zip(inputs, targets, strict=True)))
    algorithm = fn.fed_normec(local_update(local), beta=0.01, server_step=0.1, server_normalization=False)
    rounds = fn.simulate(problem, algorithm, privacy=privacy, rounds=10**9, seed=0)
    return lambda: next(rounds)


def gradients(module: nn.Module, inputs: Tensor, targets: Tensor, local: str) -> Callable[[], object]:
    problem = fn.NeuralProblem(module, list(zip(inputs, targets, strict=True)))
    x, run = problem.init(np.random.default_rng(0)), local_update(local).run
    pool = fn.Threads().pool(problem)
    submit = LIFE.enter_context(pool.threads())

    def work(tiles: list[np.ndarray]) -> None:
        for ids in tiles:
            run(problem, x, ids, Moment(0, 1), None)

    everyone = np.arange(problem.num_clients)
    tiles = [everyone[start : start + problem.tile] for start in range(0, len(everyone), problem.tile)]
    return lambda: list(pool.in_order(submit, work, tiles, problem.tile))


def bare_loop(module: nn.Module, inputs: Tensor, targets: Tensor, local: str) -> Callable[[], object]:
    parameters, steps = list(module.parameters()), STEPS[local]
    start, batch = [p.detach().clone() for p in parameters], BATCH // 8 if local == "ig8" else BATCH

    def one(x: Tensor, y: Tensor) -> None:
        for p, value in zip(parameters, start, strict=True):
            p.data.copy_(value)
        for step in range(steps):
            part = slice(step * batch % BATCH, step * batch % BATCH + batch)
            loss = nn.functional.cross_entropy(module(x[part]), y[part])
            for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.data.sub_(g, alpha=RATE / steps)

    def run() -> None:
        for x, y in zip(inputs, targets, strict=True):
            one(x, y)

    return run


def bare_vmap(module: nn.Module, inputs: Tensor, targets: Tensor, local: str) -> Callable[[], object]:
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(module, p, (x,)), y)

    return lambda: vmap(grad(loss), in_dims=(None, 0, 0))(parameters, inputs, targets)


def matmul(module: nn.Module, inputs: Tensor, targets: Tensor, local: str) -> Callable[[], object]:
    a, b = torch.randn(2, 2048, 2048)
    c = torch.empty(2048, 2048)

    def run() -> None:
        for _ in range(4):
            torch.mm(a, b, out=c)

    return run


def convolution_operations(name: str) -> int:
    """Multiplications and additions that the convolutions of a round of gradients need: forward, backward to the
    weights, and (but for the first layer) backward to the inputs."""
    module, inputs, _ = draw(name)
    found: list[int] = []

    def count(layer: nn.Module, given: tuple[Tensor], out: Tensor) -> None:
        assert isinstance(layer, nn.Conv2d)
        found.append(2 * out.numel() * layer.weight[0].numel())

    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(count)
    module(inputs[0])
    return CLIENTS_AND_SHAPE[name][0] * (3 * sum(found) - found[0] if found else 0)


def timed(run: Callable[[], object], lines: Iterator[str]) -> Iterator[list[float]]:
    for line in lines:
        seconds = []
        for _ in range(int(line)):
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
        yield seconds


def main() -> None:
    builders = {f.__name__: f for f in (gradients, bare_loop, bare_vmap, matmul)} | {"fednormec": whole_round}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=CLIENTS_AND_SHAPE)
    parser.add_argument("contestant", choices=builders)
    parser.add_argument("--local", choices=STEPS, default="gd", help="one local step, five, or eight over parts")
    chosen = parser.parse_args()
    run = builders[chosen.contestant](*draw(chosen.workload), chosen.local)
    about = {
        "versions": {"torch": torch.__version__, "fednormec": fn.__version__, "numpy": np.__version__},
        "threads": torch.get_num_threads(),
        "convolution_operations": convolution_operations(chosen.workload),
    }
    print(json.dumps({"ready": True, **about}), flush=True)
    for seconds in timed(run, sys.stdin):
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
