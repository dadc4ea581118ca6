"""Figures, drawn without a display. Colours that stay apart for the colour-blind and in print."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fednormec.errors import UserError
from fednormec.privacy.mechanism import NOT_PRIVATE
from fednormec.privacy.table import Row

COLOURS = {"central": "#0072B2", "secagg": "#D55E00", "local": "#009E73"}
LINES = {"zero_out": "-", "replace_one": "--"}


def epsilon_against_rounds(rows: Sequence[Row], rounds: int, path: Path, private: bool = True) -> None:
    """ε after each number of rounds up to the planned one, a curve per row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise UserError(f"a figure is written as .png, .pdf or .svg, not as '{path.name}'.")
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
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
        axes.set_title(NOT_PRIVATE, color="#B00020", fontweight="bold")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, edgecolor="none")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"the figure {path} cannot be written: {error.strerror or error}.") from error
