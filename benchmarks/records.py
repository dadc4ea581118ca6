"""What it costs to bound each record's gradient: one sum over a batch of one client's records, without noise.

    make bench-records

Contestants, each a process of one thread; they take turns and are idle in between:
    ours              the sum as `dp_sgd` takes it, record by record bounded
    rows              the same by a row for each record's gradient, as it is computed for any model
    plain             the plain gradient of the same batch, which bounds nothing, as `sgd` takes it
    plain, in layers  the same by the way that ours goes
    opacus, ghost     the sum as Opacus takes it; peer_opacus.py says how
    opacus, rows      the same, by rows
Every sum is compared with ours.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from silos import TAU, batch, marks, silo
from torch import Tensor
from turns import HERE, store, take_turns

import fednormec as fn
from fednormec.core.bounds import clip
from fednormec.core.machine import keep_freed_memory
from fednormec.core.records import bounded_sum, sum_of_rows

PAGE, RESULTS = HERE.parent / "docs" / "performance.md", HERE / "results" / "records.json"
NAMES = {"mlp": "MLP", "small_cnn": "conv net", "strided_cnn": "strided conv net", "resnet20": "ResNet20, group norm"}
BATCHES = (50, 100, 256)
GOALS = {"mlp": 2.0}  # times the plain gradient; 3 for all others
OWN, PLAIN = ("ours", "rows"), ("plain", "plain, in layers")
OPACUS = ("ghost", "rows")
TURNS = {"mlp": (100, 12), "small_cnn": (8, 10), "strided_cnn": (20, 10), "resnet20": (1, 8)}  # sums in a turn, turns


def build(workload: str, size: int, contestant: str) -> tuple[Callable[[], Tensor], dict[str, Any]]:
    """Returns what a contestant of ours computes, and what is to be said about it."""
    network, images, labels = silo(workload)
    vectorize: Any = "layers" if contestant == "plain, in layers" else "auto"
    problem = fn.NeuralProblem(network, [(images, labels)], batch_size=size, vectorize=vectorize)
    x, chosen, bound = problem.init(np.random.default_rng(0)), batch(len(images), size), clip(TAU)
    ways: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: bounded_sum(problem, x, 0, chosen, bound),
        "rows": lambda: sum_of_rows(problem, x, 0, chosen, bound),
    }
    run = ways.get(contestant, lambda: problem.grad(x, np.array([0]), chosen[None])[0])
    versions = {name: version(name) for name in ("torch", "numpy")}
    return run, {"way": problem.way, "parameters": problem.dim, "versions": versions, "marks": marks(run())}


def contest(workload: str, size: int, contestant: str) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    run, about = build(workload, size, contestant)
    print(json.dumps({"ready": True, **about}), flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
        print(json.dumps({"seconds": seconds}), flush=True)


def measured(workload: str, size: int, opacus: str | None) -> dict[str, Any]:
    given = [workload, str(size)]
    own = [sys.executable, str(HERE / "records.py"), "--as"]
    commands = {name: [*own, name, *given] for name in (*OWN, *PLAIN)}
    for way in OPACUS if opacus else ():
        peer = [str(opacus), "-W", "ignore", str(HERE / "peer_opacus.py"), *given, way]
        commands[f"opacus, {way}"] = [*peer, "--models", str(HERE.parent / "src")]
    sums, turns = TURNS[workload]
    sums = max(1, sums * BATCHES[0] // size)
    found = take_turns(f"{NAMES[workload]}, {size}", commands, {name: sums for name in commands}, turns)
    for name, about in found["about"].items():
        same = name in PLAIN or np.allclose(about["marks"], found["about"]["ours"]["marks"], rtol=1e-2)
        assert same, f"{name} adds up to something else"
    return {**found, "ratios": ratios(found["median_seconds"])}


def ratios(medians: dict[str, float]) -> dict[str, float]:
    """Returns the time of ours over the faster plain gradient's, and that of others over ours."""
    ours = medians["ours"]
    others = {name: seconds / ours for name, seconds in medians.items() if name not in ("ours", *PLAIN)}
    return {"ours / plain": ours / min(medians[name] for name in PLAIN)} | others


def table(stored: dict[str, Any]) -> str:
    """Returns the rows of docs/performance.md on records."""
    head = ("", "batch", "plain gradient", "each record bounded", "/ plain", "by rows / ours", "Opacus, ghost / ours",
            "Opacus, rows / ours")  # fmt: skip
    rows = [head, ["---"] * len(head)]
    for name, found in stored.items():
        workload, size = name.split()
        medians, ratio = found["median_seconds"], found["ratios"]
        plain = min(medians[way] for way in PLAIN)
        rows.append((NAMES[workload], size, milliseconds(plain), milliseconds(medians["ours"]),
                     f"{ratio['ours / plain']:.2f}", f"{ratio['rows']:.1f}",
                     *(f"{ratio[f'opacus, {way}']:.1f}" for way in OPACUS)))  # fmt: skip
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.{2 if seconds < 0.01 else 1 if seconds < 0.1 else 0}f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(NAMES), help=f"of {', '.join(NAMES)}")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--opacus", metavar="PYTHON", help="of an environment that has it")
    parser.add_argument("--as", dest="contestant", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        name, workload, size = args.contestant
        return contest(workload, int(size), name)
    for workload in args.workloads:
        for size in args.batches:
            found = measured(workload, size, args.opacus)
            store("records", {f"{workload} {size}": {**found, "goal": GOALS.get(workload, 3.0)}})
    print(table(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
