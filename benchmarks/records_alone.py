"""A sum of records' bounded gradients with each computed by itself, beside all of a batch together.

    OMP_NUM_THREADS=1 python benchmarks/records_alone.py

That is what secure randomness costs in a local step (docs/privacy.md, "Rounding"). Medians, in turns in one process.
"""

import time
from statistics import median

import numpy as np
import torch
from torch import nn

import fednormec as fn
from fednormec.core.bounds import clip
from fednormec.core.records import batch_sum

RECORDS, BATCH, TURNS = 500, 50, 25


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    models = {
        "MLP 784-64-10": nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)),
        "small_cnn": fn.models.small_cnn((1, 28, 28), 10),
    }
    data = torch.randn(RECORDS, 1, 28, 28), torch.randint(0, 10, (RECORDS,))
    batch = np.sort(np.random.default_rng(1).permutation(RECORDS)[:BATCH])
    for name, module in models.items():
        problem, seconds = fn.NeuralProblem(module, [data]), {False: list[float](), True: list[float]()}
        x = problem.init(np.random.default_rng(0))
        for _ in range(TURNS):
            for alone, taken in seconds.items():
                started = time.perf_counter()
                batch_sum(problem, x, 0, batch, clip(1.0), BATCH / RECORDS, alone)
                taken.append(time.perf_counter() - started)
        together, apart = (1e3 * median(taken) for taken in seconds.values())
        print(f"{name}: together {together:.2f} ms, each by itself {apart:.2f} ms, {apart / together:.1f} times")


if __name__ == "__main__":
    main()
