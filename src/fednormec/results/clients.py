"""Section of a page about how a figure differs between the clients: not private."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fednormec.core.problem import ByClient
from fednormec.drawing import empty_figure, look, svg
from fednormec.engine.figures import CLIENT, TENTHS, figure_of
from fednormec.results.compare import figure
from fednormec.results.groups import Group
from fednormec.results.html import escape, legend_of, plain_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (4.6, 3.1)  # inches
AT_ONCE = 10  # lines in a picture
NOT_PRIVATE = "Not private: it looks at the clients' data, and no ε covers it."
ALARM = f'<span class="alarm-text">{NOT_PRIVATE}</span>'


def over_clients(groups: Sequence[Group]) -> str:
    """Returns the section about the first figure that a group measured for each client; empty if none did."""
    every = {k: known for k, group in enumerate(groups) if (known := _known(group)) is not None}
    if not every:
        return ""
    name = next(iter(every.values())).name
    found = {k: known for k, known in every.items() if known.name == name}
    words = _words(name)
    own = "held-out examples" if all(known.held_out for known in found.values()) else "own examples"
    intro = f"<p>How {escape(words)} differs between clients after the last round, on each one's {own}. {ALARM}</p>"
    entries = [(look(k)._replace(marker=""), groups[k].label) for k in list(found)[:AT_ONCE]]
    legend = legend_of(entries) if len(groups) > 1 else ""
    each = f"<b>{escape(words[0].upper() + words[1:])} of each client</b>, from the worst to the best. Grey: a tenth."
    rounds = "<b>Over the rounds.</b> Line: the mean over the clients; band: from the worst tenth to the best."
    pictures = _figure(_sorted(found, name), "clients-each", each)
    pictures += _figure(_tenths({k: groups[k] for k in found}, name), "clients-rounds", rounds)
    return f'<h2>Over the clients</h2>{intro}{_table(groups, found, name)}{legend}<div class="figures">{pictures}</div>'


def _words(name: str) -> str:
    return figure_of(f"{CLIENT}{name}").words.removesuffix(" over clients")


def _known(group: Group) -> ByClient | None:
    """Returns the clients' figures of the first run of a group that has some."""
    return next((run.by_client for run in group.counted if run.by_client is not None and run.by_client.values), None)


def _table(groups: Sequence[Group], found: Mapping[int, ByClient], name: str) -> str:
    header = ["run", "clients", "mean", *TENTHS.values()]
    columns = ["", *TENTHS]
    rows = [
        [
            groups[k].label,
            f"{len(known.values):,}",
            *(_cell(groups[k], f"{CLIENT}{name}{end}", name) for end in columns),
        ]
        for k, known in found.items()
    ]
    return plain_table("figures-table", header, rows, [""] * len(rows))


def _cell(group: Group, metric: str, name: str) -> str:
    return figure(f"test_{name}", group.final(metric))


def _figure(drawing: "Figure", name: str, caption: str) -> str:
    said = caption.replace("<b>", "").replace("</b>", "")
    labelled = svg(drawing, name).replace("<svg ", f'<svg role="img" aria-label="{said} {NOT_PRIVATE}" ', 1)
    return f"<figure>{labelled}<figcaption>{caption} {ALARM}</figcaption></figure>"


def _sorted(found: Mapping[int, ByClient], name: str) -> "Figure":
    """Draws the figure of each client, from the worst to the best."""
    drawing = empty_figure(SIZE)
    axes = drawing.add_subplot()
    axes.axvspan(0, 10, color="#8c959f", alpha=0.18, linewidth=0)
    for k, known in list(found.items())[:AT_ONCE]:
        values = np.array(known.values)
        edges = np.linspace(0, 100, len(values) + 1)
        axes.stairs(values, edges, baseline=None, color=look(k).colour, linestyle=look(k).dash, linewidth=1.6)
    axes.set(xlabel="share of the clients", xlim=(0, 100))
    axes.xaxis.set_major_formatter("{x:g} %")
    _finish(axes, name)
    return drawing


def _tenths(groups: Mapping[int, Group], name: str) -> "Figure":
    """Draws the mean over the clients against rounds, in a band from the worst tenth to the best."""
    drawing = empty_figure(SIZE)
    axes = drawing.add_subplot()
    for k, group in list(groups.items())[:AT_ONCE]:
        mean, worst, best = (group.curve(f"{CLIENT}{name}{end}") for end in ("", *TENTHS))
        colour, dash, _ = look(k)
        axes.plot(mean.rounds, mean.mean, dash, color=colour, linewidth=1.6)
        if len(worst.rounds) == len(best.rounds):
            axes.fill_between(worst.rounds, worst.mean, best.mean, color=colour, alpha=0.16, linewidth=0)
    axes.set(xlabel="round")
    _finish(axes, name)
    return drawing


def _finish(axes: "Axes", name: str) -> None:
    kin = figure_of(f"{CLIENT}{name}")
    if kin.is_share:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    axes.set(ylabel=f"{_words(name)} (not private)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
