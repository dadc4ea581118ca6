"""Runs of the paper's figures, asked for by point of the grid."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fednormec.engine.record import APART, Record
from fednormec.errors import UserError
from fednormec.files import replace_text, to_json
from fednormec.privacy.labels import NOT_PRIVATE
from fednormec.results.groups import Group
from fednormec.results.reading import Run, read_run
from fednormec.runs.records import Summary
from fednormec.sweeps.paper import CLIENTS, COMPENSATED, FIGURES, GAMMAS, Point, Scale, point_of
from fednormec.sweeps.pool import Outcome

ACCURACY, LOSS = "test_accuracy", "train_loss"
REACHED = 65 / 70  # the paper's target in figure 2, as a share of what full participation reaches


class Reproduction:
    """Runs of some figures, asked for by point.

    Args:
        scale: the scale of all of them.
        outcomes: ends of runs.
        past: runs of an earlier reproduction, by point and seed.
    """

    def __init__(
        self, scale: Scale, outcomes: Sequence[Outcome] = (), past: Mapping[tuple[Point, int], Run] | None = None
    ) -> None:
        self.scale = scale
        self.runs: dict[Point, dict[int, Run]] = {}
        for (point, seed), run in (past or {}).items():
            self.runs.setdefault(point, {})[seed] = run
        for outcome in outcomes:
            self.add(outcome)

    def add(self, outcome: Outcome) -> None:
        """Adds a run that has ended; raises UserError if it failed."""
        if outcome.summary is None:
            raise UserError(f"{outcome.cell.name} failed: {outcome.error}; the same command tries it again.")
        point, seed = point_of(outcome.cell)
        if seed not in self.runs.setdefault(point, {}):
            self.runs[point][seed] = read_run(outcome.path)

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

    def records(self) -> Iterator[dict[str, Any]]:
        """Yields the curves of every run with its true ε, few enough numbers to keep, in the order of the figures."""
        points = dict.fromkeys(point for figure in FIGURES.values() for point in figure)
        for point in points:
            for seed, run in sorted(self.runs.get(point, {}).items()):
                curves = {
                    name: [[k / self.scale.exchanges, float(f"{value:.4g}")] for k, value in run.values(name)]
                    for name in (ACCURACY, LOSS)
                }
                yield {**point._asdict(), "seed": seed, "status": run.status, "true_epsilon": run.epsilon, **curves}

    def write(self, path: Path) -> None:
        """Stores the records of all runs; `read_records` reads them."""
        lines = [{"label": NOT_PRIVATE, "reading": self.scale.reading()}, *self.records()]
        replace_text(path, "".join(to_json(line) + "\n" for line in lines))

    def true_epsilons(self, points: Iterable[Point] | None = None) -> tuple[float, float]:
        """Returns the least and the largest ε of these points' runs, or of all."""
        chosen = self.runs if points is None else points
        found = [run.epsilon or math.inf for point in chosen for run in self.runs[point].values()]
        return min(found), max(found)


def read_records(path: Path, scale: Scale) -> dict[tuple[Point, int], Run]:
    """Returns the runs that a records.jsonl holds, by point and seed: a curve of each, and its true ε.

    Args:
        path: the file.
        scale: the scale that is asked for. Raises UserError if the file is of another.
    """
    try:
        head, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        reading = head["reading"]
        runs = dict(_run(line, path, scale) for line in lines)
    except FileNotFoundError:
        raise UserError(f"there is no file {path}.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} holds no records of fednormec reproduce: take a records.jsonl that it wrote."
        ) from error
    for name, wanted in scale.reading().items():
        if reading.get(name) != wanted:
            raise UserError(f"{path} has runs with {name} = {reading.get(name)}, and asked for is {wanted}: take other "
                            "options, or another file.")  # fmt: skip
    return runs


def _run(line: dict[str, Any], path: Path, scale: Scale) -> tuple[tuple[Point, int], Run]:
    point, seed = Point(*(line[name] for name in Point._fields)), int(line["seed"])
    losses = {k: _figure(value) for k, value in line[LOSS]}
    spent = {"epsilon": float(line["true_epsilon"]), "label": NOT_PRIVATE}
    records = tuple(
        Record(round=round(k * scale.exchanges), **spent, **{ACCURACY: _figure(value), APART: {LOSS: losses[k]}})
        for k, value in line[ACCURACY]
    )
    summary = Summary(status=str(line["status"]), rounds=scale.rounds * scale.exchanges, metrics={}, **spent)
    name = f"{point.method}, p = {point.p:g}, β = {point.beta:g}, γ = {point.gamma:g}, seed {seed}"
    return (point, seed), Run(path, name, {"run": {"seed": seed}}, {}, summary, records, None, None, ())


def _figure(stored: float | None) -> float:
    """Returns a figure; JSON holds null for a non-finite one."""
    return math.nan if stored is None else float(stored)
