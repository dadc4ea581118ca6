"""Summary of a run that has ended: as data, and for a person."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fednormec.config.assemble import Experiment
from fednormec.engine.figures import (
    AVERAGED,
    OF_OWN,
    OVER,
    OWN,
    TENTHS,
    TEST,
    by_importance,
    figure_of,
    over_clients,
)
from fednormec.errors import visible
from fednormec.privacy.statement import Statement
from fednormec.runs.falling import falling
from fednormec.runs.profile import table
from fednormec.runs.records import Summary, Tally

SHOWN_FACTS = (
    "private", "epsilon", "delta", "accountant", "noise_std", "noise_to_signal", "trust", "adjacency",
)  # fmt: skip
ON_REQUEST = "stopped on request: "  # before the reason of who asked for it


def describe(summary: dict[str, Any]) -> str:
    """Returns the summary as text, for a person."""
    server = summary.get("server", "sgd")
    by = "" if server == "sgd" else f", server {server}"
    lines = [f"{summary['method']}{by}: {summary['rounds']} rounds, {summary['clients']} clients, "
             f"{summary['parameters']:,} parameters"]  # fmt: skip
    named = by_importance(summary["metrics"])
    averaged = [name for name in named if name.endswith(AVERAGED)]
    for name in (name for name in named if name not in averaged):
        curve = f"  {summary['curve']}" if name == named[0] and name.startswith(TEST) else ""
        shown = _figure(summary["metrics"][name], figure_of(name).form)
        lines.append(f"{figure_of(name).words:<14} {shown}{curve}{_looks(name, summary)}")
    if (spread_out := over_clients(summary["metrics"])) is not None:
        lines.append(f"over clients   {spread(summary['metrics'], spread_out)}{_looks(spread_out, summary)}")
    if (own := over_clients(summary["metrics"], OWN)) is not None:
        lines.append(f"own models     {spread(summary['metrics'], own)}{_looks(own, summary)}")
    if averaged:
        lines.append(f"average        {', '.join(_of_average(name, summary) for name in averaged)}")
    guarantee = summary.get("guarantee", {})
    if guarantee:
        lines.append(f"guaranteed     {_guaranteed(guarantee)}")
    if summary.get("kept", "last") != "last":
        lines.append(f"stored         {kept(summary)}")
    if summary["left_out"]:
        lines.append(f"left out       {summary['left_out']} updates that were not finite{_looks('left_out', summary)}")
    if summary["status"] in ("budget_spent", "stopped"):
        lines.append(f"stopped        {summary['message']}")
    claim, *grounds = (summary["statement"] or summary["privacy"]).split("\n")
    lines += [f"privacy        {claim}", *(line if line[:2] == "  " else f"  {line}" for line in grounds)]
    lines.append(f"run folder     {summary['out']}")
    if "report" in summary:
        lines.append(f"report         {summary['report']}")
    if "profile" in summary:
        lines += ["", *table(summary["profile"]).split("\n")]
    return "\n".join(map(visible, lines))


def spread(metrics: Mapping[str, float | None], name: str) -> str:
    """Returns how a figure is spread over the clients, as text: its mean, and that of the worst and the best tenth."""
    figure = figure_of(name)
    tenths = [f"{words} {_figure(metrics[f'{name}{end}'], figure.form)}" for end, words in TENTHS.items()]
    words = figure.words.removesuffix(OVER).removesuffix(OF_OWN)
    return f"{words} {_figure(metrics[name], figure.form)}, {', '.join(tenths)}"


def _guaranteed(guarantee: dict[str, Any]) -> str:
    if not guarantee["covered"]:
        return f"nothing: {guarantee['why_not']}"
    empty = ": vacuous" if guarantee["vacuous"] else ""
    bound, exact, measured = (_figure(guarantee[key], ".4g") for key in ("bound", "bound_round_by_round", "measured"))
    return (
        f"min E‖∇f‖ ≤ {bound}{empty}, round by round {exact}; "
        f"least of {guarantee['models_measured']} models measured {measured}  (not private)"
    )


def _of_average(name: str, summary: dict[str, Any]) -> str:
    figure, looks = figure_of(name.removesuffix(AVERAGED)), " (not private)" if name in summary["not_private"] else ""
    return f"{figure.words} {_figure(summary['metrics'][name], figure.form)}{looks}"


def kept(summary: Mapping[str, Any]) -> str:
    """Returns which model a run stored, where that is not the last, as text."""
    best = Summary(summary).best
    if best is None:
        return f"the {summary['kept']} model"
    figure, averaged = figure_of(best["figure"].removesuffix(AVERAGED)), best["figure"].endswith(AVERAGED)
    which = "average" if averaged else "model"
    return f"the {which} after round {best['round']}, {figure.words} {_figure(best['value'], figure.form)}"


def _figure(value: float | None, form: str) -> str:
    """Returns a figure of a run as text, or of a summary that was read back, where null is a non-finite one."""
    return format(value, form) if value is not None and math.isfinite(value) else "not finite"


def _looks(name: str, summary: dict[str, Any]) -> str:
    return "  (a look at the clients' data: not private)" if name in summary["not_private"] else ""


class Ending(NamedTuple):
    """End of a run's rounds: done, diverged or stopped, and why; None if they came to their last."""

    status: str = "done"
    why: str | None = None


def summarize(experiment: Experiment, tally: Tally, out: Path, ending: Ending, statement: Statement | None) -> Summary:
    """Returns the summary of a run that has finished."""
    rounds, (status, why) = tally.rounds, ending
    if statement is not None and why is None and rounds < experiment.run.rounds:
        status = "budget_spent"
        why = f"after {rounds} of {experiment.run.rounds} rounds: one more would exceed {_limit(statement.facts)}"
    summary = Summary(
        {
            "method": experiment.algorithm.name,
            "rounds": rounds,
            "metrics": tally.latest,
            "out": str(out),
            "status": status,
            "message": why,
            "local": experiment.algorithm.local.name,
            "bound": experiment.algorithm.bound.name,
            "server": experiment.algorithm.optimizer.name,
            "participation": experiment.participation.name,
            "idle": experiment.algorithm.rule(experiment.participation).idle,
            "clients": experiment.problem.num_clients,
            "parameters": experiment.problem.dim,
            "privacy": "none: no noise was added, the clients' data are not protected",
        }
    )
    if statement is not None:
        summary |= {"privacy": statement.headline, **{key: statement.facts[key] for key in SHOWN_FACTS}}
    return Summary(summary | _warned(tally, statement))


def _limit(facts: Mapping[str, Any]) -> str:
    """Returns what limits the number of rounds: the budget of clients, of records, or of either."""
    own, records = facts["budget"], facts.get("records", facts if facts["unit"] == "record" else {})
    budgets = sorted({silo["budget"] for silo in records.get("silos", ()) if silo["budget"] is not None})
    if len(budgets) > 1:
        return f"the budget of a client's records, between ε = {budgets[0]:g} and {budgets[-1]:g}"
    if "records" in facts and budgets:
        return f"the budget of ε = {budgets[0]:g} for a record" + ("" if own is None else f", or {own:g} for a client")
    return "as many sums as clients agreed to" if own is None else f"the budget of ε = {own:g}"


def _warned(tally: Tally, statement: Statement | None) -> dict[str, Any]:
    """Returns what went wrong without an error, as data and as `warnings`, a sentence each."""
    noise = None if statement is None else statement.facts["noise_to_signal"]["warning"]
    warnings = [] if noise is None else [noise]
    if not tally.evaluated:
        return {"warnings": warnings}
    rounds, metric = [record["round"] for record in tally.evaluated], tally.leading
    fall = falling(metric, rounds, tally.curve, metric in tally.client_figures)
    if fall is None:
        return {"warnings": warnings}
    return {"warnings": [*warnings, fall.sentence(statement is not None)], "falling": fall._asdict()}
