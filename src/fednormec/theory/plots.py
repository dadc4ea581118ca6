"""Pictures of guarantees: the least bound against rounds and ε, and what was measured under what is guaranteed."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fednormec.theory.corrected import Promise
    from fednormec.theory.trade_off import AgainstEpsilon, AgainstRounds, TradeOff
from fednormec.drawing import ALARM, COLOURS, new_figure, save_figure

WATCHED = {
    "memory_error": "memories: max ‖P_i(x) − v_i‖",
    "tracking_error": "server: ‖v − mean v_i‖",
    "gradient_norm": "gradient: min ‖∇f(x)‖ so far",
}
TERMS = {
    "initial": "#0072B2", "memory": "#E69F00", "noise": "#D55E00", "server_step": "#009E73", "drift": "#CC79A7",
}  # fmt: skip


def bound_against_rounds_and_epsilon(shown: "TradeOff", path: Path) -> "Figure":
    """Draws the least bound for each number of rounds, with its terms, and for each ε.

    Args:
        shown: the curves.
        path: the file to draw into, .png, .pdf or .svg.
    """
    figure = new_figure(path, (11, 4.8))
    left, right = figure.subplots(1, 2, sharey=True)
    _against_rounds(left, shown.against_rounds)
    _against_epsilon(right, shown.against_epsilon)
    for axes in (left, right):
        axes.axhline(shown.at_start, color=ALARM, linestyle="--", linewidth=1, label="‖∇f(x⁰)‖: vacuous above")
        axes.set(xscale="log", yscale="log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, edgecolor="none")
    low = min(shown.against_rounds.planned[1], shown.against_rounds.bound.min())
    left.set_ylim(bottom=low / 20)
    if shown.from_data:
        figure.suptitle("From constants computed from the clients' data: not private.", fontsize=10)
    save_figure(figure, path)
    return figure


def measured_against_guaranteed(
    promise: "Promise | None", records: Sequence[dict[str, Any]], at_start: float, path: Path
) -> "Figure":
    """Draws memory error, tracking error and gradient of a run, each under its guarantee, if any.

    Args:
        promise: what is guaranteed; None: no theorem covers the run.
        records: lines of the run that were evaluated, with the figures of `theory.watch` under "not_private".
        at_start: norm of the gradient before the first round.
        path: file to save the figure in.
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


def _guaranteed(promise: "Promise | None") -> dict[str, np.ndarray]:
    """Returns what is guaranteed after each round; of the gradient nothing while the model stands still."""
    if promise is None:
        return {}
    course, waiting = promise.course, np.full(promise.settings.warmup_rounds, np.nan)
    curves = (course.memory_error, course.tracking_error, np.concatenate([waiting, course.gradient_norm]))
    return {name: np.where(np.isfinite(curve), curve, np.nan) for name, curve in zip(WATCHED, curves, strict=True)}


def _against_rounds(axes: Any, curve: "AgainstRounds") -> None:
    axes.plot(curve.rounds, curve.bound, color="black", linewidth=2, label="the least bound")
    for name, colour in TERMS.items():
        values = curve.terms[name]
        if values.max() > 0:
            shown = np.where(values > 0, values, np.nan)
            axes.plot(curve.rounds, shown, color=colour, linewidth=1, label=f"its term {name}")
    rounds, bound = curve.planned
    axes.plot([rounds], [bound], "o", color="black", label=f"the plan: {bound:.3g}")
    axes.set(xlabel="rounds", ylabel="min E‖∇f(x)‖ at most", title="against rounds")


def _against_epsilon(axes: Any, curve: "AgainstEpsilon") -> None:
    label = f"the least bound, {curve.trust}"
    axes.plot(curve.epsilon, curve.bound, "o-", color=COLOURS[curve.trust], markersize=4, label=label)
    axes.axhline(curve.without_privacy, color="black", linewidth=1, label="without privacy")
    axes.set(xlabel=f"ε at δ = {curve.delta:g}", title=f"against ε, at most {curve.most_rounds:,} rounds")
