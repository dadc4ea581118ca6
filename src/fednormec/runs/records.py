"""End of a run as its folder has it (`Summary`, `finished`), and what its records come to (`Tally`).

Whoever asks whether a run has finished asks `finished`: run, resume, sweep, serve and report then agree, also where the
summary is damaged.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, final

from fednormec.engine.figures import by_importance
from fednormec.engine.record import Record
from fednormec.files import read_json

SUMMARY = "summary.json"


@final
class Summary(dict[str, Any]):
    """End of a run, as a dict that JSON can hold: summary.json, which is written last of all.

    Keys that every summary has: `method` (its name), `rounds` (number of rounds done), `metrics` (the last figures of
    the model, null for a non-finite one), `status` (done, diverged, budget_spent or stopped), `clients`, `parameters`,
    `privacy` (a sentence), `left_out` (number of updates), `not_private` (names of figures). A private run adds
    `epsilon`, `delta`, `private`, `noise_to_signal` and more of its statement. `warnings` are sentences; `falling` is
    there if the leading figure fell from its best. Old summaries have neither of them, nor `noise_to_signal`.
    """

    @classmethod
    def read(cls, found: Any) -> "Summary | None":
        """Returns the summary, if what was found is one; otherwise None."""
        kinds = {"method": str, "rounds": int, "metrics": dict, "status": str, "clients": int, "parameters": int,
                 "privacy": str, "not_private": list, "left_out": int}  # fmt: skip
        whole = isinstance(found, dict) and all(type(found.get(key)) is kind for key, kind in kinds.items())
        return cls(found) if whole else None

    @property
    def status(self) -> str:
        return str(self["status"])

    @property
    def rounds(self) -> int:
        return int(self["rounds"])

    @property
    def metrics(self) -> dict[str, Any]:
        found: dict[str, Any] = self["metrics"]
        return found

    @property
    def best(self) -> dict[str, Any] | None:
        """Round, figure and value of the best model, if the run stored that one."""
        found, kinds = self.get("kept_best"), {"round": (int,), "figure": (str,), "value": (int, float)}
        whole = isinstance(found, dict) and all(type(found.get(key)) in kind for key, kind in kinds.items())
        return found if whole else None


def finished(folder: Path) -> Summary | None:
    """Returns the summary of the run in this folder; None if it has not finished, or its summary is damaged."""
    return Summary.read(read_json(folder / SUMMARY))


class Tally:
    """Tally of a run's records, whether they were read back or are new."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.rounds, self.left_out = 0, 0
        self.latest: dict[str, float] = {}
        self.client_figures: set[str] = set()  # those of the latest figures that look at clients' data
        self.curve: list[float] = []
        self.evaluated: list[Record] = []
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Adds one more round."""
        self.rounds, self.left_out = record["round"], self.left_out + record.apart["left_out"]
        if not record.evaluated:
            return
        found = {**record.public_figures, **record.client_figures}
        self.latest = {key: math.nan if value is None else value for key, value in found.items()}
        self.client_figures = set(record.client_figures)
        self.evaluated.append(record)
        self.curve.append(self.latest[self.leading])

    @property
    def leading(self) -> str:
        """Name of the figure that the curve is of: of the latest figures the one that says most."""
        return next(iter([*by_importance(self.latest), *self.latest]))
