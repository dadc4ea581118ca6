"""What it costs a private round of the MLP that every message is measured as it is added: make bench-measuring.

Rounds take turns in one process: with our sum, which measures, and with torch's product of matrices, which does not.
The goal is a cost under 2 %.
"""

import argparse
import statistics
import sys
import time
from importlib.metadata import version

import torch
from ours import whole_round
from torch import Tensor
from turns import store
from workloads import draw

from fednormec.core import bounds

GOAL = 1.02
WARM_UP = 20  # rounds


def product(self: bounds.Messages, sends: Tensor, adding: bounds.Adding) -> Tensor:
    """The sum of messages, strips of 64 by torch's product of matrices."""
    weights = sends if self.factors is None else sends * self.factors
    total = torch.zeros(self.rows.shape[1], dtype=torch.float64)
    for some, rows in zip(torch.split(weights, bounds.STRIP), torch.split(self.rows, bounds.STRIP), strict=True):
        total += some @ rows
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3000, help="of each kind half as many")
    rounds = parser.parse_args().rounds
    run, sums = whole_round(*draw("mlp"), "gd"), {"measured": bounds.Messages.sum, "not measured": product}
    seconds: dict[str, list[float]] = {name: [] for name in sums}
    for number in range(WARM_UP + rounds):
        name = list(sums)[(number + number // 2) % 2]  # each as often after the other as after itself
        bounds.Messages.sum = sums[name]  # type: ignore[method-assign]
        started = time.perf_counter()
        run()
        if number >= WARM_UP:
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    ratio = medians["measured"] / medians["not measured"]
    found = {
        "median_seconds": medians,
        "quartiles": {name: statistics.quantiles(found)[::2] for name, found in seconds.items()},
        "rounds_timed": {name: len(found) for name, found in seconds.items()},
        "versions": {name: version(name) for name in ("torch", "numpy")},
        "ratio": ratio,
        "goal": GOAL,
    }
    store("measuring", {"mlp": found})
    for name, median in medians.items():
        print(f"{name:<16}{1000 * median:>9,.2f} ms", file=sys.stderr)
    print(f"{'ratio':<16}{ratio:>9.3f}", file=sys.stderr)


if __name__ == "__main__":
    main()
