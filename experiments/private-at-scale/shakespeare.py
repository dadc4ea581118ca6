"""Claim: a small net learns the next character of Shakespeare's 1,033 roles, private for each role, at ε = 8 nearly as
well as without privacy; at ε = 1 it learns something, and this says how much.

The settings are the package's for this set (fednormec config --set data.source=shakespeare): DP-FedAvg with smoothed
normalisation, 60 rounds, a tenth of the roles in each. For ε = 1 the server's step is tuned with seed 0, and used with
three others. The test set is the poems, which belong to no role. Beside it stands what needs no training.

Run it: python experiments/private-at-scale/shakespeare.py    (half an hour on two cores; goes on where it was stopped)
Runs go to --runs (default: runs/shakespeare), shakespeare.json beside this file.
Needs: fednormec data fetch shakespeare
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fednormec.config import settings
from fednormec.config.schema import changed, read
from fednormec.data import read_federation
from fednormec.errors import UserError
from fednormec.results.reading import read_run
from fednormec.runs.environment import environment
from fednormec.runs.progress import tallied
from fednormec.sweeps.pool import Cell, run_all, with_own_noise
from fednormec.sweeps.ranking import line

ACCURACY, TUNING_SEED, SEEDS = "test_accuracy", 0, (1, 2, 3)
STEPS = {1.0: (0.3, 1.0), 8.0: (1.0,), None: (1.0,)}  # 1 is the package's, chosen at ε = 8
OURS = Path(settings.__file__).with_name("shakespeare.toml")


def cell(epsilon: float | None, step: float, seed: int) -> Cell:
    config = changed(read(OURS), {"method.server_step": step, "run.seed": seed, "run.evaluate_every": 20})
    if epsilon is None:
        del config["privacy"]
    else:
        config = changed(config, {"privacy.epsilon": epsilon})
    settings = {"epsilon": epsilon, "step": step, "seed": seed}
    return with_own_noise(Cell(f"eps={epsilon}_step={step:g}_seed={seed}", settings, config))


def without_training() -> dict[str, float]:
    """Returns the share of the poems' characters that a constant guesses, and a net before its first round."""
    test = read_federation("shakespeare").test
    assert test is not None
    blanks = float(np.mean(test.y == np.bincount(test.y.ravel()).argmax()))
    from fednormec.config.assemble import assemble
    from fednormec.core.randomness import generator

    problem = assemble(cell(None, 1.0, TUNING_SEED).config).problem
    begun = problem.evaluate(problem.init(generator(TUNING_SEED, "init")))
    return {"always the most frequent character": blanks, "untrained net": begun.public[ACCURACY]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/shakespeare"))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("shakespeare.json"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()

    def finals(cells: list[Cell]) -> dict[str, tuple[float, float | None]]:
        with tallied(len(cells), line, quiet=False) as tell:
            ended = run_all(cells, asked.runs, asked.workers, tell)
        runs = {one.cell.name: read_run(one.path) for one in ended}
        return {name: (run.final(ACCURACY) or 0.0, run.epsilon) for name, run in runs.items()}

    tuned = {epsilon: steps for epsilon, steps in STEPS.items() if len(steps) > 1}
    tried = finals([cell(epsilon, step, TUNING_SEED) for epsilon, steps in tuned.items() for step in steps])
    best = {
        epsilon: max(steps, key=lambda step, e=epsilon: tried.get(cell(e, step, TUNING_SEED).name, (0.0,)))
        for epsilon, steps in STEPS.items()
    }
    judged = finals([cell(epsilon, step, seed) for epsilon, step in best.items() for seed in SEEDS])
    rows: list[dict[str, Any]] = []
    for epsilon, step in best.items():
        found = [judged[cell(epsilon, step, seed).name] for seed in SEEDS]
        tuning = {f"{s:g}": tried[cell(epsilon, s, TUNING_SEED).name][0] for s in tuned.get(epsilon, ())}
        rows.append({"epsilon": epsilon, "spent": found[0][1], "server_step": step, "tuning": tuning,
                     "accuracies": [accuracy for accuracy, _ in found]})  # fmt: skip
    where = {key: value for key, value in environment().items() if key != "command"}
    content = {"without_training": without_training(), "rows": rows, "environment": where}
    asked.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(table(content))


def table(content: dict[str, Any]) -> str:
    """Returns the results for a document, in %."""
    lines = ["| Shakespeare, 1,033 roles, 60 rounds | server step | next character of the poems |", "|---|---|---|"]
    for row in content["rows"]:
        name = "without privacy" if row["epsilon"] is None else f"ε = {row['epsilon']:g}"
        mean, spread = 100 * np.mean(row["accuracies"]), 100 * np.std(row["accuracies"], ddof=1)
        lines.append(f"| {name} | {row['server_step']:g} | {mean:.1f} ± {spread:.1f} |")
    lines += [f"| {name} | | {100 * value:.1f} |" for name, value in content["without_training"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"shakespeare: {error}")
