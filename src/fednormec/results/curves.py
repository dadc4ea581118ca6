"""Figures of runs, drawn without a display, in colours that stay apart for the colour-blind and in print."""

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fednormec.engine.figures import figure_of
from fednormec.privacy.labels import NOT_PRIVATE
from fednormec.results.groups import Group
from fednormec.results.reading import NO_PRIVACY, PRIVATE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

from fednormec.drawing import ALARM, LEVELS, any_glyph, empty_figure, look, require_drawable, save_figure

AT_ONCE = 10  # more curves than this in one picture nobody tells apart
AXES = 5.2, 3.2  # inches, whatever stands around them
FACES = {
    "epsilon": "ε spent", "memory_error": "max ‖P_i(x) − v_i‖", "tracking_error": "‖v − mean v_i‖",
    "gradient_norm": "‖∇f(x)‖",
}  # fmt: skip


def curves(groups: Sequence[Group], metric: str, path: Path, levels: Mapping[str, float] | None = None) -> "Figure":
    """Draws a metric over the rounds and saves the figure: a line per group, in a band from the least to the largest.

    The line is the mean over the group's runs. Groups that never measured the metric are left out. The axes keep their
    size: the figure grows with the legend below them.

    Args:
        groups: the groups, in the order of the table.
        metric: what is drawn.
        path: where the figure is stored.
        levels: horizontal lines by their names.
    """
    require_drawable(path)
    figure = draw_curves(groups, metric, levels)
    save_figure(figure, path)
    return figure


def drawn(groups: Sequence[Group], metric: str) -> dict[int, Group]:
    """Returns the groups whose lines are drawn, by their places: the first of those that measured the metric."""
    known = ((k, group) for k, group in enumerate(groups) if np.isfinite(group.curve(metric).mean).any())
    return dict(itertools.islice(known, AT_ONCE))


def draw_curves(
    groups: Sequence[Group],
    metric: str,
    levels: Mapping[str, float] | None = None,
    size: tuple[float, float] | None = None,
) -> "Figure":
    """Draws the figure of `curves` without saving it; with a `size`, it has that size and no legend."""
    lines = drawn(groups, metric)
    figure = empty_figure(size or AXES)
    axes = figure.add_subplot()
    for k, group in lines.items():
        curve, (colour, dash, marker) = group.curve(metric), look(k)
        few = max(1, len(curve.rounds) // 7)
        axes.plot(
            curve.rounds, curve.mean, dash, color=colour, marker=marker, markersize=4,
            markevery=(min(k, few - 1), few), linewidth=1.6, label=_legend(group.label),
        )  # fmt: skip
        if len(group.runs) > 1:
            axes.fill_between(curve.rounds, curve.low, curve.high, color=colour, alpha=0.16, linewidth=0)
    for (name, level), (colour, dash, _) in zip((levels or {}).items(), LEVELS, strict=False):
        axes.axhline(level, color=colour, linestyle=dash, linewidth=1.4, label=name)
    _scale(axes, metric, [group.curve(metric).mean for group in lines.values()])
    warning = "" if all(group.public(metric) for group in groups) else " (not private)"
    axes.set(xlabel="round", ylabel=(FACES.get(metric) or figure_of(metric).words) + warning)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    if any(NOT_PRIVATE in group.label for group in lines.values()):
        axes.set_title(
            NOT_PRIVATE if len(lines) == 1 else f"with runs that are {NOT_PRIVATE}", color=ALARM, fontsize=10
        )
    if size is None:
        if len(groups) > 1 or levels:
            figure.legend(loc="outside lower center", fontsize=9, frameon=False)
        _grow(figure, axes)
    return figure


def paid(groups: Sequence[Group]) -> dict[int, Group]:
    """Returns the private groups with an accuracy and an ε, by their places."""
    return {k: g for k, g in _accurate(groups).items() if g.protection == PRIVATE and g.epsilon is not None}


def free(groups: Sequence[Group]) -> dict[int, Group]:
    """Returns the groups without privacy that have an accuracy, by their places."""
    return {k: g for k, g in _accurate(groups).items() if g.protection == NO_PRIVACY}


def draw_trade_off(groups: Sequence[Group], size: tuple[float, float]) -> "Figure":
    """Draws the last test accuracy against ε.

    Each private group is a point, each group without privacy a dashed level.
    """
    figure = empty_figure(size)
    axes = figure.add_subplot()
    for k, group in paid(groups).items():
        found, (colour, _, marker) = group.final("test_accuracy"), look(k)
        assert found is not None and group.epsilon is not None
        around = [[found.mean - found.low], [found.high - found.mean]]
        axes.errorbar([group.epsilon], [found.mean], around, fmt=marker, color=colour, markersize=6, capsize=3)
    for k, group in free(groups).items():
        found = group.final("test_accuracy")
        assert found is not None
        axes.axhline(found.mean, color=look(k).colour, linestyle="--", linewidth=1.4)
    spent = [group.epsilon or 0.0 for group in paid(groups).values()]
    if min(spent) > 0 and max(spent) / min(spent) > 5:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
    axes.set(xlabel="ε spent", ylabel="test accuracy")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    return figure


def _accurate(groups: Sequence[Group]) -> dict[int, Group]:
    found = {k: group.final("test_accuracy") for k, group in enumerate(groups)}
    return {k: groups[k] for k, spread in found.items() if spread is not None and np.isfinite(spread.mean)}


def _scale(axes: Any, metric: str, means: Sequence[np.ndarray]) -> None:
    values = np.concatenate([mean[np.isfinite(mean)] for mean in means]) if means else np.ones(1)
    if figure_of(metric).is_share:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    elif values.min() > 0 and values.max() / values.min() > 30 and not (metric == "epsilon" and values.max() < 100):
        axes.set_yscale("log")
    elif metric == "epsilon":
        axes.set_ylim(bottom=0)


def _grow(figure: "Figure", axes: Any) -> None:
    """Makes the figure as large as its axes need to have their size."""
    lines = sum(text.get_text().count("\n") + 1 for legend in figure.legends for text in legend.get_texts())
    figure.set_size_inches(AXES[0] + 2, AXES[1] + 2 + 0.3 * lines)  # room for all, so that the layout works at all
    with any_glyph():
        figure.draw_without_rendering()
    taken = axes.get_window_extent()
    wide, high = figure.get_size_inches()
    figure.set_size_inches(wide + AXES[0] - taken.width / figure.dpi, high + AXES[1] - taken.height / figure.dpi)


def _legend(label: str) -> str:
    """Returns a label that matplotlib shows as it is: no formula between dollars, no first underscore."""
    return " " + "\n".join(textwrap.wrap(label.replace("$", r"\$"), 46))
