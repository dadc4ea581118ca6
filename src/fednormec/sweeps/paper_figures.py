"""Figures of the paper, all four, with the paper's axes, from our runs."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fednormec.drawing import new_figure, save_figure
from fednormec.privacy.labels import NOT_PRIVATE, up
from fednormec.sweeps.paper import BETAS, CLIENTS, COMPENSATED, FIGURES, GAMMAS, PLAIN, Point
from fednormec.sweeps.paper_runs import ACCURACY, Reproduction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {0.001: "#0072B2", 0.01: "#D55E00", 0.1: "#009E73"}
MARKERS = {0.001: "o", 0.01: "s", 0.1: "^"}
SHARES = {0.25: ("#0072B2", "o"), 0.5: ("#D55E00", "s"), 1.0: ("#009E73", "^")}
PANELS = {"train_loss": "training loss", ACCURACY: "test accuracy"}


def draw(name: str, done: Reproduction, folder: Path) -> None:
    """Draws one figure, as .png and as .pdf."""
    for kind in ("png", "pdf"):
        path = folder / f"{name}.{kind}"
        size = (5.2, 4.4) if name == "figure4" else (11, 4.8)
        figure = new_figure(path, size)
        DRAWN[name](figure, done)
        low, high = done.true_epsilons(FIGURES[name])
        true = f"true ε {up(low)}" + (f" to {up(high)}" if high > low else "")
        figure.suptitle(f"{NOT_PRIVATE}: {true} at δ = 1e-05", color="#B00020", fontsize=9)
        save_figure(figure, path)


def _convergence(figure: "Figure", done: Reproduction) -> None:
    """Draws figure 1: p = 1 solid, p = .25 dotted."""
    for axes, metric in zip(figure.subplots(1, 2), PANELS, strict=True):
        for p, beta in ((p, beta) for beta in BETAS for p in (1.0, 0.25)):
            point = done.tuned(COMPENSATED, p, beta)
            label = f"β = {beta:g}, p = {p:g}, γ = {point.gamma:g}"
            _curve(axes, done, point, metric, label, COLOURS[beta], MARKERS[beta], "-" if p == 1 else ":")
        _finish(axes, metric, "communication rounds")


def _communication(figure: "Figure", done: Reproduction) -> None:
    """Draws figure 2: β = .01, against client-to-server transmissions."""
    for axes, metric in zip(figure.subplots(1, 2), PANELS, strict=True):
        for p, (colour, marker) in SHARES.items():
            point = done.tuned(COMPENSATED, p, 0.01)
            label = f"p = {p:g}, γ = {point.gamma:g}"
            _curve(axes, done, point, metric, label, colour, marker, per_round=p * CLIENTS)
        if metric == ACCURACY:
            axes.axhline(done.target(), color="#666666", linestyle="--", linewidth=1, label=f"{done.target():.1%}")
        _finish(axes, metric, "transmissions from clients to the server, k·p·M")


def _compensation(figure: "Figure", done: Reproduction) -> None:
    """Draws figure 3: with error compensation solid, without dashed."""
    for axes, metric in zip(figure.subplots(1, 2), PANELS, strict=True):
        for method, beta in ((method, beta) for beta in BETAS for method in (COMPENSATED, PLAIN)):
            point = done.tuned(method, 1.0, beta)
            label = f"{method}, β = {beta:g}, γ = {point.gamma:g}"
            line = "-" if method == COMPENSATED else "--"
            _curve(axes, done, point, metric, label, COLOURS[beta], MARKERS[beta], line)
        _finish(axes, metric, "communication rounds")


def _heat_map(figure: "Figure", done: Reproduction) -> None:
    """Draws figure 4: FedAvg's highest test accuracy."""
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    values = np.array([[done.mean(Point(PLAIN, 1.0, b, g), done.highest) for g in GAMMAS] for b in BETAS])
    image = axes.imshow(values, cmap="cividis", origin="lower")
    dark = (values.min() + values.max()) / 2
    for (row, column), value in np.ndenumerate(values):
        colour = "white" if value < dark else "black"
        axes.text(column, row, f"{value:.1%}", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(GAMMAS)), [f"{gamma:g}" for gamma in GAMMAS])
    axes.set_yticks(range(len(BETAS)), [f"{beta:g}" for beta in BETAS])
    axes.set(xlabel="γ", ylabel="β", title="highest test accuracy of FedAvg with Norm_α")
    figure.colorbar(image, ax=axes, ticks=MaxNLocator(6, steps=[1, 2, 5, 10]), format=lambda value, _: f"{value:.0%}")


DRAWN: dict[str, Callable[["Figure", Reproduction], None]] = {
    "figure1": _convergence,
    "figure2": _communication,
    "figure3": _compensation,
    "figure4": _heat_map,
}


def _curve(
    axes: Any,
    done: Reproduction,
    point: Point,
    metric: str,
    label: str,
    colour: str,
    marker: str,
    line: str = "-",
    per_round: float = 1.0,
) -> None:
    rounds, mean, low, high = done.group(point).curve(metric)
    at, every = rounds * per_round / done.scale.exchanges, max(1, len(rounds) // 8)
    axes.plot(at, mean, line, color=colour, marker=marker, label=label, linewidth=1.5, markersize=4, markevery=every)
    if len(done.scale.seeds) > 1:
        axes.fill_between(at, low, high, color=colour, alpha=0.12, linewidth=0)


def _finish(axes: Any, metric: str, across: str) -> None:
    axes.set(xlabel=across, ylabel=PANELS[metric])
    if metric == ACCURACY:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    if metric == ACCURACY:  # the last panel: one legend for both, below them
        axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
