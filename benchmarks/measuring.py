"""One private round of the MLP, with every message measured as it is added, and with torch's product, which measures
nothing: make bench-measuring.

Both are processes of their own that take turns, this file with --contestant. The goal is a cost under 2 %.
"""

import argparse
import json
import sys
from importlib.metadata import version

import torch
from ours import timed, whole_round
from torch import Tensor
from turns import store, take_turns
from workloads import draw

from fednormec import bounds

CONTESTANTS = ("measured", "not measured")
GOAL = 1.02


def product(self: bounds.Messages, sends: Tensor, adding: bounds.Adding) -> Tensor:
    """The sum of messages, strips of 64 by torch's product of matrices."""
    weights = sends if self.factors is None else sends * self.factors
    total = torch.zeros(self.rows.shape[1], dtype=torch.float64)
    for some, rows in zip(torch.split(weights, bounds.STRIP), torch.split(self.rows, bounds.STRIP), strict=True):
        total += some @ rows
    return total


def contestant(name: str) -> None:
    """The protocol of ours.py: ready, then for each line N on stdin N rounds and their seconds."""
    if name == "not measured":
        bounds.Messages.sum = product  # type: ignore[method-assign]
    run = whole_round(*draw("mlp"), "gd")
    print(json.dumps({"ready": True, "versions": {n: version(n) for n in ("torch", "numpy")}}), flush=True)
    for seconds in timed(run, sys.stdin):
        print(json.dumps({"seconds": seconds}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contestant", choices=CONTESTANTS)
    parser.add_argument("--rounds", type=int, default=30, help="in a turn")
    parser.add_argument("--turns", type=int, default=20)
    chosen = parser.parse_args()
    if chosen.contestant is not None:
        contestant(chosen.contestant)
        return
    commands = {name: [sys.executable, __file__, "--contestant", name] for name in CONTESTANTS}
    found = take_turns("mlp", commands, chosen.rounds, chosen.turns)
    medians = found["median_seconds"]
    found |= {"ratio": medians["measured"] / medians["not measured"], "goal": GOAL}
    store("measuring", {"mlp": found})
    for name, seconds in medians.items():
        print(f"{name:<16}{1000 * seconds:>9,.2f} ms", file=sys.stderr)
    print(f"{'ratio':<16}{found['ratio']:>9.3f}", file=sys.stderr)


if __name__ == "__main__":
    main()
