"""Picture of ε against rounds."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fednormec.drawing import ALARM, COLOURS, new_figure, save_figure
from fednormec.privacy.calculator import Row
from fednormec.privacy.labels import NOT_PRIVATE

LINES = {"zero_out": "-", "replace_one": "--"}


def epsilon_against_rounds(rows: Sequence[Row], rounds: int, path: Path, private: bool = True) -> None:
    """Draws ε after each number of rounds up to the planned one, a curve per row."""
    figure = new_figure(path, (7, 4.5))
    axes = figure.add_subplot()
    at = np.unique(np.linspace(1, rounds, min(rounds, 60)).astype(int))
    for row in rows:
        spent = [row.mechanism.epsilon(int(k), row.delta, row.accountant) for k in at]
        label = f"{row.trust}, {row.adjacency}, σ = {row.noise_std:.3g}"
        axes.plot(
            at, spent, LINES[row.adjacency], color=COLOURS[row.trust], label=label, marker="o" if rounds == 1 else None
        )
    axes.set(xlabel="rounds", ylabel=f"ε at δ = {rows[0].delta:g}", xlim=(0, rounds))
    axes.set_ylim(bottom=0)
    if not private:
        axes.set_title(NOT_PRIVATE, color=ALARM, fontweight="bold")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, edgecolor="none")
    save_figure(figure, path)
