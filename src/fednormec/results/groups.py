"""Groups of runs that differ only in their seed, and the spread of their figures."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fednormec.config.settings import PYTHON
from fednormec.privacy.labels import NOT_PRIVATE
from fednormec.results.labels import labels
from fednormec.results.reading import NO_PRIVACY, PRIVATE, SAME_RUN, UNKNOWN, Run, number, settings


class Spread(NamedTuple):
    """Spread of a figure over the runs of a group; std is the sample's, 0 for one run."""

    mean: float
    std: float
    low: float
    high: float
    runs: int


class Curve(NamedTuple):
    """Figure over the rounds: the mean and the range over those runs of a group that got so far."""

    rounds: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Group:
    """Runs with one config and different seeds; the label says in what they differ from the other groups."""

    runs: tuple[Run, ...]
    label: str

    @property
    def counted(self) -> tuple[Run, ...]:
        """Runs whose last value is their final one: those that have finished, or all if none has."""
        return tuple(run for run in self.runs if run.summary is not None) or self.runs

    @property
    def protection(self) -> str:
        """Worst protection of its runs."""
        found = {run.protection for run in self.runs}
        return next(kind for kind in (NOT_PRIVATE, UNKNOWN, NO_PRIVACY, PRIVATE) if kind in found)

    @property
    def epsilon(self) -> float | None:
        """Largest ε of its runs, each of one run alone."""
        return max((run.epsilon for run in self.runs if run.epsilon is not None), default=None)

    @property
    def delta(self) -> float | None:
        """Largest δ of its runs."""
        return max((run.delta for run in self.runs if run.delta is not None), default=None)

    @property
    def rounds(self) -> tuple[int, int]:
        """Fewest and most rounds of its runs."""
        found = [run.rounds for run in self.counted]
        return min(found), max(found)

    @property
    def seeds(self) -> int:
        """Number of different seeds: a run repeated with the same seed tells nothing new."""
        return len({repr(run.seed) for run in self.counted})

    @property
    def status(self) -> str:
        """Status of its runs in words, with the number of each if they differ."""
        found = [run.status for run in self.runs]
        parts = [(kind, found.count(kind)) for kind in sorted(set(found), key=lambda kind: (kind != "done", kind))]
        if len(parts) == 1:
            return _words(found[0])
        return ", ".join(f"{count} {_words(kind)}" for kind, count in parts)

    def public(self, metric: str) -> bool:
        """Returns whether the metric is public in all of its runs."""
        return all(run.public(metric) for run in self.runs)

    def final(self, metric: str) -> Spread | None:
        """Returns the spread of the runs' last values; None if there is none."""
        return spread_of([run.final(metric) for run in self.counted])

    def best(self, metric: str) -> Spread | None:
        """Returns the spread of the runs' best values; None if there is none."""
        return spread_of([run.best(metric) for run in self.counted])

    def curve(self, metric: str) -> Curve:
        """Returns the metric over the rounds."""
        at: dict[int, list[float]] = {}
        for run in self.runs:
            for at_round, value in run.values(metric):
                at.setdefault(at_round, []).append(value)
        rounds = sorted(at)
        columns = [[fold(at[k]) for k in rounds] for fold in (mean_of, np.min, np.max)]
        return Curve(np.array(rounds, int), *(np.array(column, float) for column in columns))


def grouped(runs: Iterable[Run]) -> list[Group]:
    """Puts runs together that differ in nothing but their seed; a run whose config is lost stays alone."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        key = json.dumps(identity(run), sort_keys=True, default=str) if run.config else run.path
        groups.setdefault(key, []).append(run)
    members = [
        tuple(sorted(group, key=lambda run: (number(run.seed) or 0, repr(run.seed)))) for group in groups.values()
    ]
    return [Group(group, label) for group, label in zip(members, labels(members), strict=True)]


def differing(runs: Sequence[Run]) -> list[str]:
    """Returns the settings in which the configs differ, in the configs' order, but the digests of [python]."""
    flat = [settings(run) for run in runs if run.config]
    keys = dict.fromkeys(key for one in flat for key in one if not key.startswith(f"{PYTHON}."))
    return [key for key in keys if len({repr(one.get(key)) for one in flat}) > 1]


def mean_of(values: Sequence[float]) -> float:
    return math.fsum(value / len(values) for value in values)


def spread_of(values: Sequence[float | None]) -> Spread | None:
    """Returns mean and spread of the values that there are; None if there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = mean_of(known)
    std = math.hypot(*(value - mean for value in known)) / math.sqrt(max(1, len(known) - 1))
    return Spread(mean, std, float(np.min(known)), float(np.max(known)), len(known))


def _words(status: str) -> str:
    return status.replace("_", " ")


def identity(run: Run) -> dict[str, Any]:
    """Returns the settings, and of a run from Python the digests of its problem, that all runs of a group share."""
    return {key: value for key, value in settings(run).items() if key not in SAME_RUN} | {"origin": run.origin}
