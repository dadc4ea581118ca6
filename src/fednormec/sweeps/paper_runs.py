"""Runs of the paper's figures, asked for by point of the grid."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from fednormec.errors import UserError
from fednormec.results.groups import Group
from fednormec.results.reading import Run, read_run
from fednormec.sweeps.paper import CLIENTS, COMPENSATED, GAMMAS, Point, Scale
from fednormec.sweeps.pool import Outcome

ACCURACY = "test_accuracy"
REACHED = 65 / 70  # the paper's target in figure 2, as a share of what full participation reaches


class Reproduction:
    """Runs of some figures, asked for by point."""

    def __init__(self, scale: Scale, outcomes: Sequence[Outcome]) -> None:
        self.scale = scale
        self.runs: dict[Point, dict[int, Run]] = {}
        for outcome in outcomes:
            if outcome.summary is None:
                raise UserError(f"{outcome.cell.name} failed: {outcome.error}; the same command tries it again.")
            *point, seed = outcome.cell.settings.values()
            self.runs.setdefault(Point(*point), {})[seed] = read_run(outcome.path)

    def final(self, point: Point, seed: int) -> float:
        """Returns the last accuracy, 0 for a model that diverged."""
        run = self.runs[point][seed]
        return 0.0 if run.status == "diverged" else run.final(ACCURACY) or 0.0

    def highest(self, point: Point, seed: int) -> float:
        """Returns the highest accuracy over the rounds."""
        return self.runs[point][seed].best(ACCURACY) or 0.0

    def mean(self, point: Point, of: Callable[[Point, int], float] | None = None) -> float:
        """Returns the mean over the seeds, by default of the last accuracy."""
        return float(np.mean([(of or self.final)(point, seed) for seed in self.scale.seeds]))

    def tuned(self, method: str, p: float, beta: float) -> Point:
        """Returns the point with the γ whose last accuracy is best, over all seeds."""
        return max((Point(method, p, beta, gamma) for gamma in GAMMAS), key=self.mean)

    def group(self, point: Point) -> Group:
        return Group(tuple(self.runs[point].values()), "")

    def transmissions(self, point: Point, seed: int, target: float) -> float:
        """Returns k·p·M at the first round k that was evaluated with at least this accuracy; inf if none was."""
        reached = (k for k, value in self.runs[point][seed].values(ACCURACY) if value >= target)
        return next(reached, math.inf) / self.scale.exchanges * point.p * CLIENTS

    def target(self) -> float:
        """Returns the accuracy to reach in figure 2.

        It is as far below what full participation reaches as the paper's 65 % are below its 70 %.
        """
        return REACHED * self.mean(self.tuned(COMPENSATED, 1.0, 0.01))

    def records(self) -> list[dict[str, Any]]:
        """Returns the curves of every run with its true ε, few enough numbers to keep."""
        return [
            {
                **point._asdict(), "seed": seed, "status": run.status, "true_epsilon": run.epsilon,
                **{name: [[k / self.scale.exchanges, float(f"{value:.4g}")] for k, value in run.values(name)]
                   for name in (ACCURACY, "train_loss")},
            }
            for point, runs in self.runs.items() for seed, run in runs.items()
        ]  # fmt: skip

    def true_epsilons(self, points: Iterable[Point] | None = None) -> tuple[float, float]:
        """Returns the least and the largest ε of these points' runs, or of all."""
        chosen = self.runs if points is None else points
        found = [run.epsilon or math.inf for point in chosen for run in self.runs[point].values()]
        return min(found), max(found)
