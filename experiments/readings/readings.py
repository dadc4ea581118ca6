"""Claim: none of the readings of the paper's experiments shows C1, C4 and C5 together.

A reading says how often clients and server exchange messages in one of the figures' rounds, how large the noise is,
where it goes, what is normalised and what FedAvg's step is. Each gets the points of figures 1, 3 and 4 at p = 1, on a
net and on data that take seconds a run. The recursions stand here as literal loops, because some readings are not what
the paper's listing says and the library has no place for them. All of it is NOT PRIVATE.

Run it: python experiments/readings/readings.py              (an hour on two cores; goes on where it was stopped)
        python experiments/readings/readings.py --table      (what results.jsonl says, for the README)
Needs: fednormec data fetch cifar10
"""

import argparse
import itertools
import json
import math
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednormec import NeuralProblem
from fednormec.data.images import cifar10
from fednormec.problems.models import reset

RESULTS = Path(__file__).parent / "results.jsonl"
VALUES = (0.001, 0.01, 0.1)
M, ALPHA, BATCH, ROUNDS, SEED, POINTS = 20, 0.01, 32, 300, 42, 15
PAPER = math.sqrt(ROUNDS * math.log(1e5)) / 8  # 7.35: its noise at p = 1, in units of beta
FIFTH, TESTS = 10_800, 3_000
OWN = FIFTH // M


class Reading(NamedTuple):
    """What the text leaves open.

    Attributes:
        work: "epoch": a round is a pass, with an exchange for every mini-batch; "minibatch", "gradient": an exchange of
            one gradient, on 32 or on all of a client's examples; "steps": an exchange of the sum of a pass' gradients.
        noise: norm of a message's noise. "std": 7.35 beta; "all": the same with K the number of exchanges; "variance":
            the root of 7.35 beta; "pass": 7.35 beta, but only in the first exchange of a pass; "coordinate": 7.35 beta
            in each coordinate; "none".
        place: "server": as in the listing; "memory": the client's memory takes the noise in as well; "common": one draw
            for all clients, at the server.
        norm: "whole": of the whole vector; "tensor": of each of the net's tensors.
        step: the server's step of FedAvg, "gamma" or "one".
        net: "plain", or "batch": with batch normalisation.
    """

    work: str
    noise: str
    place: str = "server"
    norm: str = "whole"
    step: str = "gamma"
    net: str = "plain"

    @property
    def name(self) -> str:
        return "-".join(self if self.net == "batch" else self[:-1])


READINGS = [
    Reading("minibatch", "std"), Reading("minibatch", "std", "memory"), Reading("minibatch", "std", norm="tensor"),
    Reading("gradient", "std"), Reading("gradient", "std", "memory"),
    Reading("steps", "std"), Reading("steps", "std", step="one"), Reading("steps", "std", "memory"),
    Reading("steps", "std", "memory", "tensor"),
    Reading("epoch", "none"), Reading("epoch", "std"), Reading("epoch", "std", "memory"),
    Reading("epoch", "std", "memory", "tensor"), Reading("epoch", "std", "common"), Reading("epoch", "variance"),
    Reading("epoch", "variance", "memory"), Reading("epoch", "pass"), Reading("epoch", "pass", "memory"),
    Reading("epoch", "all"), Reading("epoch", "all", "memory"),
    *(Reading(work, noise, place, net="batch") for work, noise, place in (
        ("minibatch", "std", "server"), ("minibatch", "std", "memory"), ("minibatch", "coordinate", "server"),
        ("steps", "std", "server"), ("epoch", "none", "server"), ("epoch", "std", "server"),
        ("epoch", "std", "memory"), ("epoch", "variance", "server"), ("epoch", "variance", "memory"),
        ("epoch", "all", "server"), ("epoch", "pass", "server"),
    )),
]  # fmt: skip


def points(reading: Reading) -> list[tuple[str, float, float]]:
    """Returns methods with beta and gamma, without those of FedAvg that move by 0.05 in 5,100 exchanges: nothing."""
    grid = list(itertools.product(VALUES, VALUES))
    far = [(b, g) for b, g in grid if b * g > 0.9e-4 or reading.step == "one"]
    compensated = grid if reading.step == "gamma" else []  # the same as in the reading with "gamma"
    return [("normec", b, g) for b, g in compensated] + [("fedavg", b, g) for b, g in far]


class Task(NamedTuple):
    """The problem, and the test images."""

    problem: NeuralProblem
    inputs: Tensor
    targets: Tensor

    @torch.no_grad()
    def accuracy(self, x: Tensor) -> float:
        return float((self.problem.model(x)(self.inputs).argmax(1) == self.targets).float().mean())


def nets(net: str) -> tuple[int, nn.Module]:
    """Returns the pixels to a side and the net: an MLP of 6,506 parameters, or a batch-normalised conv net of 7,378."""
    if net == "plain":
        return 8, nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10))
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((3, 8, 16, 32)):
        convolution = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(after, track_running_stats=False), nn.ReLU()]
    return 16, nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))


def task(net: str) -> Task:
    """Returns the net on a fifth of CIFAR-10, every image averaged down to fewer pixels."""
    held = cifar10()
    side, model = nets(net)
    order = np.random.default_rng(SEED).permutation(60_000)[: FIFTH + TESTS]
    x = F.avg_pool2d(torch.as_tensor(np.concatenate([held.train.x, held.test.x])[order]), 32 // side)
    y = np.concatenate([held.train.y, held.test.y])[order]
    reset(model, np.random.default_rng(SEED))
    clients = [(x[i * OWN : (i + 1) * OWN], y[i * OWN : (i + 1) * OWN]) for i in range(M)]
    return Task(NeuralProblem(model, clients, tile=M), x[FIFTH:], torch.as_tensor(y[FIFTH:], dtype=torch.int64))


def batches() -> Iterator[np.ndarray]:
    """Yields the examples of every client's next mini-batch, (M, BATCH), each pass in an order of its own."""
    rng = np.random.default_rng([SEED, 1])
    while True:
        orders = np.stack([rng.permutation(OWN) for _ in range(M)])
        for start in range(0, OWN - BATCH + 1, BATCH):
            yield orders[:, start : start + BATCH]


def normalized(rows: Tensor, sizes: list[int], norm: str) -> Tensor:
    parts = [rows] if norm == "whole" else rows.split(sizes, 1)
    return torch.cat([part / (ALPHA + part.norm(dim=1, keepdim=True)) for part in parts], 1)


def run(of: Task, reading: Reading, method: str, beta: float, gamma: float) -> dict[str, Any]:
    problem, ids = of.problem, np.arange(M)
    x = start = problem.init(np.random.default_rng(0))
    sizes = [p.numel() for p in problem.model(x).parameters()]
    per_pass = OWN // BATCH
    exchanges = ROUNDS * (per_pass if reading.work == "epoch" else 1)
    size = {
        "none": 0.0,
        "pass": PAPER,
        "std": PAPER,
        "all": PAPER * math.sqrt(exchanges / ROUNDS),
        "variance": math.sqrt(PAPER / beta),
        "coordinate": PAPER * math.sqrt(problem.dim),
    }
    std = size[reading.noise] * math.sqrt((len(sizes) if reading.norm == "tensor" else 1) / problem.dim)
    draws, drawn = torch.Generator().manual_seed(SEED), batches()

    def update(x: Tensor) -> Tensor:
        """P_i = (x - T_i(x))/gamma of every client."""
        if reading.work == "gradient":
            return problem.grad(x, ids)
        total = problem.grad(x, ids, next(drawn))
        for _ in range(per_pass - 1 if reading.work == "steps" else 0):
            total += problem.grad(x - gamma * total, ids, next(drawn))
        return total

    v, server, curve = torch.zeros(M, problem.dim), torch.zeros(problem.dim), list[float]()
    for k in range(1, exchanges + 1):
        updates = update(x)
        rows = M if reading.place == "memory" else 1
        z = std * torch.randn(rows, problem.dim, generator=draws)
        if reading.place == "server":
            z /= math.sqrt(M)  # the mean of M draws
        if reading.noise == "pass" and k % per_pass != 1:
            z.zero_()
        if method == "normec":
            messages = normalized(updates - v, sizes, reading.norm)
            v += beta * (messages + z if reading.place == "memory" else messages)
            server += beta * (messages.mean(0) + z.mean(0))
            x = x - gamma * server
        else:
            eta = gamma if reading.step == "gamma" else 1.0
            x = x - eta * beta * (normalized(updates, sizes, reading.norm).mean(0) + z.mean(0))
        if k % (exchanges // POINTS) == 0:
            if not x.isfinite().all():
                break
            curve.append(round(of.accuracy(x), 4))
    last = curve[-1] if len(curve) == POINTS else 0.1
    return {"last": last, "highest": max(curve, default=0.1), "curve": curve, "moved": float((x - start).norm())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--table", action="store_true")
    asked = parser.parse_args()
    if asked.table:
        print(table())
        return
    held = stored()
    jobs = [(r, *point) for r in READINGS for point in points(r)]
    missing = [job for job in jobs if key(*job) not in held]
    with multiprocessing.get_context("spawn").Pool(asked.workers) as pool:
        for number, row in enumerate(pool.imap(work, missing), 1):
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{number}/{len(missing)}", row["key"], f"{row['last']:.1%}, {row['seconds']} s", flush=True)


def key(reading: Reading, method: str, beta: float, gamma: float) -> str:
    return f"{reading.name} {method} {beta:g} {gamma:g}"


def stored() -> dict[str, dict[str, Any]]:
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {row["key"]: row for row in map(json.loads, lines)}


_tasks: dict[str, Task] = {}


def work(job: tuple[Reading, str, float, float]) -> dict[str, Any]:
    torch.set_num_threads(1)
    reading, *point = job
    if reading.net not in _tasks:
        _tasks[reading.net] = task(reading.net)
    started = time.perf_counter()
    found = run(_tasks[reading.net], reading, *point)
    return {"key": key(reading, *point), **found, "seconds": round(time.perf_counter() - started, 1)}


def table() -> str:
    """Returns a row for every complete reading: accuracies of the best gamma, and which claims hold at p = 1."""
    rows = stored()
    lines = [
        "| net | work | noise | place | norm | FedAvg's step | EC: β = .001 | .01 | .1 | FedAvg: β = .001 | .01 | .1 "
        "| C1 | C4 | C5, diagonal |",
        "|" + "---|" * 15,
    ]
    for r in READINGS:
        if any(key(r, *point) not in rows for point in points(r)):
            continue
        plain = r if r.step == "gamma" else r._replace(step="gamma")

        def at(reading: Reading, method: str, beta: float, gamma: float, what: str = "last") -> float:
            return float(rows.get(key(reading, method, beta, gamma), {}).get(what, 0.0))

        ec = [max(at(plain, "normec", b, g) for g in VALUES) for b in VALUES]
        fa = [max(at(r, "fedavg", b, g) for g in VALUES) for b in VALUES]
        highest = {(b, g): at(r, "fedavg", b, g, "highest") for b in VALUES for g in VALUES}
        diagonal = (highest[0.1, 0.01] + highest[0.01, 0.1]) / 2
        verdicts = (
            ec[1] > ec[0] > ec[2],
            all(one > other for one, other in zip(ec, fa, strict=True)),
            diagonal > highest[0.1, 0.1],
        )
        name = (r.net, r.work, r.noise, r.place, r.norm, r.step)
        figures = [f"{100 * value:.1f}" for value in (*ec, *fa)]
        lines.append("| " + " | ".join([*name, *figures, *("yes" if v else "no" for v in verdicts)]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
