"""How time and memory grow with the number of clients and of parameters, and what memories in a file and sleep save.

    make bench-growth
    python benchmarks/growth.py [clients parameters memory mapped sleep]

Every size is a process of its own; those of one comparison take turns.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from turns import HERE, store, take_turns

COMPARISONS = ("clients", "parameters", "memory", "mapped", "sleep")


def rounds_of(clients: int, examples: int, hidden: int | None, p: float, idle: str, mapped: bool) -> None:
    """The process that runs rounds: an MLP with so many hidden units on 784 inputs, or (none) 10,000 parameters."""
    import numpy as np
    import torch

    import fednormec as fn

    width = 784 if hidden else 999
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.standard_normal((clients, examples, width), dtype=np.float32))
    targets = torch.from_numpy(rng.integers(0, 10, (clients, examples)))
    module = fn.models.mlp((width,), 10, hidden=(hidden,)) if hidden else fn.models.linear((width,), 10)
    problem = fn.NeuralProblem(module, list(zip(inputs, targets, strict=True)))
    del inputs, targets
    algorithm = fn.fed_normec(fn.gd(0.1), beta=0.01, server_step=0.1, server_normalization=False)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        rounds = fn.simulate(
            problem, algorithm, fn.poisson(p, idle) if p < 1 else fn.full(), fn.Privacy(noise_std=1.0), rounds=10**9,
            seed=0, on=fn.Threads(memories_in=Path(folder) if mapped else None),
        )  # fmt: skip
        print(json.dumps({"ready": True, "clients": clients, "examples": examples, "d": problem.dim}), flush=True)
        for line in sys.stdin:
            seconds = []
            for _ in range(int(line)):
                started = time.perf_counter()
                next(rounds)
                seconds.append(time.perf_counter() - started)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(json.dumps({"seconds": seconds, "peak_bytes": peak}), flush=True)


def command(clients: int, examples: int, hidden: int | None, *, p: float = 1.0, idle: str = "advance",
            mapped: bool = False) -> list[str]:  # fmt: skip
    return [
        sys.executable,
        str(HERE / "growth.py"),
        "--serve",
        json.dumps([clients, examples, hidden, p, idle, mapped]),
    ]


def peak(title: str, size: list[str]) -> dict[str, Any]:
    from turns import Contestant

    process = Contestant(title, size)
    seconds = process.run(1) + process.run(1) + process.run(1)
    last = process.ask(1)
    process.close()
    return {"seconds": [*seconds, *last["seconds"]], "peak_bytes": last["peak_bytes"], "about": process.about}


def compare(name: str) -> dict[str, Any]:
    if name == "clients":
        sizes = {str(m): command(m, 32, 64) for m in (200, 2_000, 20_000)}
        found = take_turns(name, sizes, {"200": 60, "2000": 6, "20000": 1}, 6)
        per = {m: 1e6 * s / int(m) for m, s in found["median_seconds"].items()}
        return found | {"microseconds_per_client": per}
    if name == "parameters":
        widths = {"12730": 16, "50890": 64, "203530": 256, "814090": 1024}
        found = take_turns(name, {d: command(200, 32, h) for d, h in widths.items()}, 5, 8)
        per = {d: 1e9 * s / 200 / int(d) for d, s in found["median_seconds"].items()}
        return found | {"nanoseconds_per_client_and_parameter": per}
    if name == "memory":
        found = peak(name, command(20_000, 4, 64))
        block = 4 * 20_000 * 50_890
        return found | {"memories_bytes": block, "allowed_bytes": 1.15 * block + 2**30}
    if name == "mapped":
        return peak(name, command(100_000, 1, None, mapped=True)) | {"memories_bytes": 4 * 100_000 * 10_000}
    sizes = {idle: command(20_000, 4, 64, p=0.01, idle=idle) for idle in ("advance", "sleep")}
    found = take_turns(name, sizes, {"advance": 1, "sleep": 10}, 6)
    medians = found["median_seconds"]
    return found | {"sleep / advance": medians["sleep"] / medians["advance"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparisons", nargs="*", metavar="COMPARISON", help=f"of {', '.join(COMPARISONS)}")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        rounds_of(*json.loads(chosen.serve))
        return
    for unknown in set(chosen.comparisons) - set(COMPARISONS):
        parser.error(f"there is no comparison {unknown}: choose of {', '.join(COMPARISONS)}")
    for name in chosen.comparisons or COMPARISONS:
        found = compare(name)
        print(name, json.dumps({key: value for key, value in found.items() if key not in ("about", "rounds_timed")}))
        store("growth", {name: found})


if __name__ == "__main__":
    main()
