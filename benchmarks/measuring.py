"""What it costs a private round of the MLP that messages are measured, or that they and the noise are on a grid.

    make bench-measuring

Rounds take turns in one process: with our sum, which measures, with torch's product of matrices, which does not, and on
a grid. The goal for measuring is a cost under 2 %.
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from importlib.metadata import version

import torch
from ours import PRIVACY, whole_round
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
    parser.add_argument("--rounds", type=int, default=4500, help="of each kind a third as many")
    rounds = parser.parse_args().rounds
    ours, plain = bounds.Messages.sum, whole_round(*draw("mlp"), "gd")
    on_grid = whole_round(*draw("mlp"), "gd", replace(PRIVACY, noise="discrete"))
    kinds = {"measured": (plain, ours), "not measured": (plain, product), "on a grid": (on_grid, ours)}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(WARM_UP + rounds):
        name = list(kinds)[(number + number // 3) % 3]  # each as often in each place of three
        run, bounds.Messages.sum = kinds[name]  # type: ignore[method-assign]
        started = time.perf_counter()
        run()
        if number >= WARM_UP:
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    ratio = medians["measured"] / medians["not measured"]
    grid_ratio = medians["on a grid"] / medians["measured"]
    found = {
        "median_seconds": medians,
        "quartiles": {name: statistics.quantiles(found)[::2] for name, found in seconds.items()},
        "rounds_timed": {name: len(found) for name, found in seconds.items()},
        "versions": {name: version(name) for name in ("torch", "numpy")},
        "ratio": ratio,
        "goal": GOAL,
        "grid_ratio": grid_ratio,
    }
    store("measuring", {"mlp": found})
    for name, median in medians.items():
        print(f"{name:<16}{1000 * median:>9,.2f} ms", file=sys.stderr)
    print(f"{'measured or not':<16}{ratio:>9.3f}\n{'grid or not':<16}{grid_ratio:>9.3f}", file=sys.stderr)


if __name__ == "__main__":
    main()
