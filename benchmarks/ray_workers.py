"""One round of ResNet20 on Ray, with one worker and with two, beside one and two threads of a process: make bench-ray.

Every contestant is a process of its own that takes turns with the others and is idle in between, this file with
--contestant. All compute the same bits.
"""

import argparse
import json
import sys
from importlib.metadata import version

from ours import local_update, timed
from turns import store, take_turns
from workloads import CLIENTS_AND_SHAPE, draw

import fednormec as fn

CONTESTANTS = {
    "1 thread": fn.Threads(1),
    "2 threads": fn.Threads(2),
    "Ray, 1 worker": fn.Ray(workers=1),
    "Ray, 2 workers": fn.Ray(workers=2),
}
GOAL = 1.6  # two workers beside one


def contestant(workload: str, name: str) -> None:
    """The protocol of ours.py: ready, then for each line N on stdin N rounds and their seconds."""
    module, inputs, targets = draw(workload)
    problem = fn.NeuralProblem(module, list(zip(inputs, targets, strict=True)))
    algorithm = fn.fed_normec(local_update("gd"), beta=0.01, server_step=0.1, server_normalization=False)
    rounds = fn.simulate(
        problem, algorithm, privacy=fn.Privacy(noise_std=1.0), rounds=10**9, seed=0, on=CONTESTANTS[name]
    )
    next(rounds)
    names = ("torch", "numpy", "ray")
    print(json.dumps({"ready": True, "versions": {n: version(n) for n in names}, "tile": problem.tile}), flush=True)
    for seconds in timed(lambda: next(rounds), sys.stdin):
        print(json.dumps({"seconds": seconds}), flush=True)
    rounds.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=CLIENTS_AND_SHAPE, default="resnet20")
    parser.add_argument("--contestant", choices=CONTESTANTS)
    parser.add_argument("--rounds", type=int, default=3, help="in a turn")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--not-stored", action="store_true", help="only print what was measured")
    chosen = parser.parse_args()
    if chosen.contestant is not None:
        contestant(chosen.workload, chosen.contestant)
        return
    commands = {
        name: [sys.executable, __file__, "--workload", chosen.workload, "--contestant", name] for name in CONTESTANTS
    }
    found = take_turns(chosen.workload, commands, chosen.rounds, chosen.turns)
    medians = found["median_seconds"]
    found["ratios"] = {
        "one worker / two workers": medians["Ray, 1 worker"] / medians["Ray, 2 workers"],
        "two workers / two threads": medians["Ray, 2 workers"] / medians["2 threads"],
        "one worker / one thread": medians["Ray, 1 worker"] / medians["1 thread"],
    }
    found["goal"] = GOAL
    if chosen.not_stored:
        print(json.dumps(found, indent=1))
    else:
        store("ray", {chosen.workload: found})
    for name, seconds in medians.items():
        print(f"{name:<16}{1000 * seconds:>9,.0f} ms", file=sys.stderr)
    for name, ratio in found["ratios"].items():
        print(f"{name:<28}{ratio:>6.2f}", file=sys.stderr)


if __name__ == "__main__":
    main()
