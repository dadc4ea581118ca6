"""Pictures of ε against rounds."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fednormec.drawing import ALARM, COLOURS, SERIES, new_figure, save_figure
from fednormec.privacy.asked import Adjacency
from fednormec.privacy.calculator import Row
from fednormec.privacy.labels import NOT_PRIVATE
from fednormec.privacy.record_calculator import RecordRow

LINES = {"zero_out": "-", "replace_one": "--"}


class Curve(NamedTuple):
    """Curve of ε against rounds.

    Attributes:
        spent: ε after a number of rounds.
        label: what the legend calls it.
        colour: its colour.
        adjacency: adjacency, which is how its line is drawn.
    """

    spent: Callable[[int], float]
    label: str
    colour: str
    adjacency: Adjacency


def epsilon_against_rounds(rows: Sequence[Row], rounds: int, path: Path, private: bool = True) -> None:
    """Draws ε after each number of rounds up to the planned one, a curve per row."""

    def curve(row: Row) -> Curve:
        label = f"{row.trust}, {row.adjacency}, σ = {row.noise_std:.3g}"
        return Curve(
            lambda k: row.mechanism.epsilon(k, row.delta, row.accountant), label, COLOURS[row.trust], row.adjacency
        )

    _draw([curve(row) for row in rows], rounds, rows[0].delta, path, private)


def record_epsilon_against_rounds(rows: Sequence[RecordRow], rounds: int, path: Path) -> None:
    """Draws ε of a record after each number of rounds, a curve per size of a silo and adjacency.

    Sizes that draw records at one rate have one curve. Of more rates than colours some in between are left out.
    """
    sizes, first = dict[float, set[int]](), dict[tuple[float, Adjacency], RecordRow]()
    for row in sorted(rows, key=lambda row: row.silo.records):
        sizes.setdefault(row.silo.rate, set()).add(row.silo.records)
        first.setdefault((row.silo.rate, row.adjacency), row)
    places = np.linspace(0, len(sizes) - 1, min(len(sizes), len(SERIES))).round().astype(int)
    colours = dict(zip(np.array(list(sizes))[places].tolist(), SERIES, strict=False))

    def curve(rate: float, row: RecordRow) -> Curve:
        who = f"{row.silo.records:,} records" if len(sizes[rate]) == 1 else f"rate {rate:.3g}"
        label = f"{who}, {row.adjacency}, σ = {row.silo.sum.noise_std:.3g}"
        return Curve(lambda k: row.silo.epsilon(k, row.delta, row.accountant), label, colours[rate], row.adjacency)

    shown = [curve(rate, row) for (rate, _), row in first.items() if rate in colours]
    left_out = f"{len(colours)} of {len(sizes)} rates" if len(colours) < len(sizes) else None
    _draw(shown, rounds, rows[0].delta, path, legend=left_out)


def _draw(
    curves: Sequence[Curve], rounds: int, delta: float, path: Path, private: bool = True, legend: str | None = None
) -> None:
    figure = new_figure(path, (7, 4.5))
    axes = figure.add_subplot()
    at = np.unique(np.linspace(1, rounds, min(rounds, 60)).astype(int)).tolist()
    for one in curves:
        spent = [one.spent(k) for k in at]
        marker = "o" if rounds == 1 else None
        axes.plot(at, spent, LINES[one.adjacency], color=one.colour, label=one.label, marker=marker)
    axes.set(xlabel="rounds", ylabel=f"ε at δ = {delta:g}", xlim=(0, rounds))
    axes.set_ylim(bottom=0)
    if not private:
        axes.set_title(NOT_PRIVATE, color=ALARM, fontweight="bold")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, edgecolor="none", title=legend)
    save_figure(figure, path)
