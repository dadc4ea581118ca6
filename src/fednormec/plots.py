"""Figures, drawn without a display. Colours that stay apart for the colour-blind and in print."""

import io
import itertools
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fednormec.errors import UserError
from fednormec.privacy.mechanism import NOT_PRIVATE
from fednormec.privacy.table import Row
from fednormec.results import NO_PRIVACY, PRIVATE, Group

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fednormec.theory.answer import Answer
    from fednormec.theory.corrected import Promise

COLOURS = {"central": "#0072B2", "secagg": "#D55E00", "local": "#009E73"}
LINES = {"zero_out": "-", "replace_one": "--"}
WATCHED = {
    "memory_error": "memories: max ‖P_i(x) − v_i‖",
    "tracking_error": "server: ‖v − mean v_i‖",
    "gradient_norm": "gradient: min ‖∇f(x)‖ so far",
}
TERMS = {
    "initial": "#0072B2", "memory": "#E69F00", "noise": "#D55E00", "server_step": "#009E73", "drift": "#CC79A7",
}  # fmt: skip

ALARM = "#B00020"
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")  # Okabe and Ito's, less yellow
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v")  # three cycles of different lengths: lines stay apart in grey, too
AT_ONCE = 10  # more curves than this in one picture nobody tells apart
AXES = 5.2, 3.2  # inches, whatever stands around them
FACES = {
    "test_accuracy": "test accuracy", "test_loss": "test loss", "train_loss": "train loss",
    "epsilon": "ε spent", "memory_error": "max ‖P_i(x) − v_i‖", "tracking_error": "‖v − mean v_i‖",
    "gradient_norm": "‖∇f(x)‖",
}  # fmt: skip


class Look(NamedTuple):
    """How a line is drawn; no marker for a level."""

    colour: str
    dash: str
    marker: str = ""


def look(place: int) -> Look:
    """That of the group at such a place of the table, the same in every figure."""
    return Look(SERIES[place % len(SERIES)], DASHES[place % len(DASHES)], MARKERS[place % len(MARKERS)])


LEVELS = Look("#555555", "--"), Look("#555555", ":")


def epsilon_against_rounds(rows: Sequence[Row], rounds: int, path: Path, private: bool = True) -> None:
    """ε after each number of rounds up to the planned one, a curve per row."""
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


def bound_against_rounds_and_epsilon(found: "Answer", path: Path) -> "Figure":
    """The least bound for each number of rounds, with its terms, and for each ε."""
    from fednormec.theory.planner import plan_exactly

    figure = new_figure(path, (11, 4.8))
    left, right = figure.subplots(1, 2, sharey=True)
    q = found.question
    at = np.unique(np.geomspace(min(8, q.rounds), q.rounds, 14).round().astype(int))
    memory = found.planned.settings.memory
    best = [plan_exactly(q.constants, q.local, q.noise_at(int(n)), int(n), memory) for n in at]
    left.plot(at, [promise.found.bound for promise in best], color="black", linewidth=2, label="the least bound")
    for name, colour in TERMS.items():
        values = np.array([promise.found.terms[name] for promise in best])
        if values.max() > 0:
            left.plot(at, np.where(values > 0, values, np.nan), color=colour, linewidth=1, label=f"its term {name}")
    chosen = found.planned.found.bound
    left.plot([found.planned.settings.rounds], [chosen], "o", color="black", label=f"the plan: {chosen:.3g}")
    left.set(xlabel="rounds", ylabel="min E‖∇f(x)‖ at most", title="against rounds")
    _trade_off(right, found)
    for axes in (left, right):
        at_start = q.constants.gradient_norm
        axes.axhline(at_start, color=ALARM, linestyle="--", linewidth=1, label="‖∇f(x⁰)‖: vacuous above")
        axes.set(xscale="log", yscale="log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, edgecolor="none")
    low = min([found.planned.found.bound, *(promise.found.bound for promise in best)])
    left.set_ylim(bottom=low / 20)
    if q.from_data:
        figure.suptitle("From constants computed from the clients' data: not private.", fontsize=10)
    save_figure(figure, path)
    return figure


def measured_against_guaranteed(
    promise: "Promise | None", records: Sequence[dict[str, Any]], at_start: float, path: Path
) -> "Figure":
    """The memories' error, the server's tracking error and the gradient of a run, each under its guarantee, if any.

    `records` are the run's lines that were evaluated, with the figures of `theory.watch` under "not_private"; at_start
    is the gradient's norm before the first round.
    """
    figure = new_figure(path, (13, 4.2))
    rounds = [record["round"] for record in records]
    curves = _guaranteed(promise)
    for axes, (name, title) in zip(figure.subplots(1, 3), WATCHED.items(), strict=True):
        values = np.array([record["not_private"][name] for record in records])
        if name == "gradient_norm":
            values = np.minimum.accumulate(np.minimum(values, at_start))
            if promise is not None and promise.found.holds:
                axes.axhline(
                    promise.found.bound, color=COLOURS["secagg"], linestyle=":", label="guaranteed, closed form"
                )
        axes.plot(rounds, values, "o-", color=COLOURS["central"], markersize=3, linewidth=1, label="measured")
        if name in curves:
            label = "guaranteed" if name == "memory_error" else "guaranteed in expectation"
            axes.plot(np.arange(len(curves[name])), curves[name], color=COLOURS["secagg"], label=label)
        if promise is not None and promise.settings.warmup_rounds:
            axes.axvspan(0, promise.settings.warmup_rounds, color="#999999", alpha=0.15, linewidth=0, label="warm-up")
        positive = values.max() > 0
        axes.set(xlabel="round", title=title, xlim=(0, rounds[-1]), yscale="log" if positive else "linear")
        if name == "gradient_norm" and positive:  # the first rounds promise next to nothing: leave most of that away
            axes.set_ylim(max(values.min() / 2, 1e-12 * values.max()), 10 * max(at_start, values.max()))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, edgecolor="none")
    what = "Measured against guaranteed" if promise is not None else "Measured; no theorem covers this run"
    figure.suptitle(f"{what}. It looks at the clients' data: not private.", fontsize=10)
    save_figure(figure, path)
    return figure


def curves(groups: Sequence[Group], metric: str, path: Path, levels: Mapping[str, float] | None = None) -> "Figure":
    """A figure over the rounds, a line per group (the mean over its runs) in a band from the least to the largest.

    `levels` are horizontal lines with their names. Groups that never measured it are left out. The axes keep their
    size: the figure grows with the legend below them.
    """
    _check(path)
    figure = draw_curves(groups, metric, levels)
    save_figure(figure, path)
    return figure


def drawn(groups: Sequence[Group], metric: str) -> dict[int, Group]:
    """The groups whose lines are drawn, by their places: the first of those that measured it."""
    known = ((k, group) for k, group in enumerate(groups) if np.isfinite(group.curve(metric).mean).any())
    return dict(itertools.islice(known, AT_ONCE))


def draw_curves(
    groups: Sequence[Group],
    metric: str,
    levels: Mapping[str, float] | None = None,
    size: tuple[float, float] | None = None,
) -> "Figure":
    """The same, not yet written; of a given size and without a legend where that stands elsewhere."""
    lines = drawn(groups, metric)
    figure = _empty(size or AXES)
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
    axes.set(xlabel="round", ylabel=FACES.get(metric, metric) + warning)
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
    """The private groups with an accuracy and an ε, by their places."""
    return {k: g for k, g in _accurate(groups).items() if g.protection == PRIVATE and g.epsilon is not None}


def free(groups: Sequence[Group]) -> dict[int, Group]:
    """The groups without privacy that have an accuracy, by their places."""
    return {k: g for k, g in _accurate(groups).items() if g.protection == NO_PRIVACY}


def draw_trade_off(groups: Sequence[Group], size: tuple[float, float]) -> "Figure":
    """The last test accuracy against ε: a point for each private group, a dashed level for each without privacy."""
    figure = _empty(size)
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


def svg(figure: "Figure", name: str) -> str:
    """The figure as an element of a page: text stays text, the same figure gives the same bytes, and no two names
    share an id."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}), _any_glyph():
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)  # nothing refers to them, and every figure has the same
    return re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", text))


def _scale(axes: Any, metric: str, means: Sequence[np.ndarray]) -> None:
    values = np.concatenate([mean[np.isfinite(mean)] for mean in means]) if means else np.ones(1)
    if metric == "test_accuracy":
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    elif values.min() > 0 and values.max() / values.min() > 30 and not (metric == "epsilon" and values.max() < 100):
        axes.set_yscale("log")
    elif metric == "epsilon":
        axes.set_ylim(bottom=0)


def _grow(figure: "Figure", axes: Any) -> None:
    """Makes the figure as large as its axes need to have their size."""
    lines = sum(text.get_text().count("\n") + 1 for legend in figure.legends for text in legend.get_texts())
    figure.set_size_inches(AXES[0] + 2, AXES[1] + 2 + 0.3 * lines)  # room for all, so that the layout works at all
    with _any_glyph():
        figure.draw_without_rendering()
    taken = axes.get_window_extent()
    wide, high = figure.get_size_inches()
    figure.set_size_inches(wide + AXES[0] - taken.width / figure.dpi, high + AXES[1] - taken.height / figure.dpi)


def _legend(label: str) -> str:
    """A label that matplotlib shows as it is: no formula between dollars, no first underscore."""
    return " " + "\n".join(textwrap.wrap(label.replace("$", r"\$"), 46))


def _guaranteed(promise: "Promise | None") -> dict[str, np.ndarray]:
    """What is guaranteed after each round; of the gradient nothing while the model stands still."""
    if promise is None:
        return {}
    course, waiting = promise.course, np.full(promise.settings.warmup_rounds, np.nan)
    curves = (course.memory_error, course.tracking_error, np.concatenate([waiting, course.gradient_norm]))
    return {name: np.where(np.isfinite(curve), curve, np.nan) for name, curve in zip(WATCHED, curves, strict=True)}


def _trade_off(axes: Any, found: "Answer") -> None:
    from fednormec.theory.answer import with_epsilon
    from fednormec.theory.planner import plan_exactly

    q = found.question
    rounds = np.unique(np.geomspace(max(1, q.rounds / 64), q.rounds, 7).round().astype(int))

    def least(noise_at: Any, memory: Any = "zero") -> float:
        return min(plan_exactly(q.constants, q.local, noise_at(int(n)), int(n), memory).found.bound for n in rounds)

    budgets = np.geomspace(0.5, 64, 8)
    bounds = [least(q.noise_with(with_epsilon(q, float(epsilon)))) for epsilon in budgets]
    asked = with_epsilon(q, 1.0)
    axes.plot(budgets, bounds, "o-", color=COLOURS[asked.trust], markersize=4, label=f"the least bound, {asked.trust}")
    axes.axhline(
        least(q.noise_with(None), found.planned.settings.memory), color="black", linewidth=1, label="without privacy"
    )
    axes.set(xlabel=f"ε at δ = {asked.delta:g}", title=f"against ε, at most {q.rounds:,} rounds")


def new_figure(path: Path, size: tuple[float, float]) -> "Figure":
    """An empty figure for a file that can be drawn into."""
    _check(path)
    return _empty(size)


def _check(path: Path) -> None:
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise UserError(f"a figure is written as .png, .pdf or .svg, not as '{path.name}'.")


def _empty(size: tuple[float, float]) -> "Figure":
    """An empty figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: "Figure", path: Path) -> None:
    try:
        with _any_glyph():
            figure.savefig(path, dpi=150, metadata={"CreationDate": None} if path.suffix.lower() == ".pdf" else None)
    except OSError as error:
        raise UserError(f"the figure {path} cannot be written: {error.strerror or error}.") from error


@contextmanager
def _any_glyph() -> Iterator[None]:
    """A run may be named in any script; what the font lacks becomes a box, without a word."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield
