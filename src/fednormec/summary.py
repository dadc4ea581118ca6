"""How a run ended: as data, for a person, and as a page."""

import sys
from pathlib import Path
from typing import Any

from fednormec.experiment import Experiment
from fednormec.privacy.statement import Statement
from fednormec.profile import table


def with_report(summary: dict[str, Any]) -> dict[str, Any]:
    """The summary with the path of the run's report, a page that is made now unless it is there. A page that fails is a
    note, no more."""
    page = Path(summary["out"]) / "report.html"
    if page.exists():
        return summary | {"report": str(page)}
    try:
        from fednormec.report import write_report
        from fednormec.results import read_run

        return summary | {"report": str(write_report([read_run(page.parent)], page))}
    except Exception as error:
        print(f"note: the report could not be made: {error}", file=sys.stderr)
        return summary


def describe(summary: dict[str, Any]) -> str:
    """The summary for a person."""
    metrics, apart = summary["metrics"], summary.get("not_private", ())
    warning = "  (on clients' own data: not private)" if "test_loss" in apart else ""
    lines = [f"{summary['method']}: {summary['rounds']} rounds, {summary['clients']} clients, "
             f"{summary['parameters']:,} parameters"]  # fmt: skip
    if "test_accuracy" in metrics:
        lines.append(f"test accuracy  {metrics['test_accuracy']:.1%}  {summary['curve']}{warning}")
    if "test_loss" in metrics:
        lines.append(f"test loss      {metrics['test_loss']:.4f}{warning}")
    if "train_loss" in metrics:
        lines.append(f"train loss     {metrics['train_loss']:.4f}  (a look at the clients' data: not private)")
    if "gradient_norm" in metrics:
        lines.append(f"gradient norm  {metrics['gradient_norm']:.3e}")
    guarantee = summary.get("guarantee", {})
    if guarantee:
        lines.append(f"guaranteed     {_guaranteed(guarantee)}")
    if summary["left_out"]:
        lines.append(f"left out       {summary['left_out']} updates that were not finite")
    if summary["status"] == "budget_spent":
        lines.append(f"stopped        {summary['message']}")
    lines += [f"privacy        {summary['statement'] or summary['privacy']}", f"run folder     {summary['out']}"]
    if "report" in summary:
        lines.append(f"report         {summary['report']}")
    if "profile" in summary:
        lines += ["", table(summary["profile"])]
    return "\n".join(lines)


def _guaranteed(guarantee: dict[str, Any]) -> str:
    if not guarantee["covered"]:
        return f"nothing: {guarantee['why_not']}"
    empty = ": vacuous" if guarantee["vacuous"] else ""
    return (
        f"min E‖∇f‖ ≤ {guarantee['bound']:.4g}{empty}, round by round {guarantee['bound_round_by_round']:.4g}; "
        f"least of {guarantee['models_measured']} models measured {guarantee['measured']:.4g}  (not private)"
    )


def summarize(
    experiment: Experiment,
    rounds: int,
    metrics: dict[str, float],
    out: Path,
    ended: str | None,
    statement: Statement | None,
) -> dict[str, Any]:
    status = "done" if ended is None else "diverged"
    if statement is not None and ended is None and rounds < experiment.run.rounds:
        status = "budget_spent"
        ended = (
            f"after {rounds} of {experiment.run.rounds} rounds: one more would exceed the budget of "
            f"ε = {statement.facts['budget']:g}"
        )
    summary: dict[str, Any] = {
        "method": experiment.algorithm.name,
        "rounds": rounds,
        "metrics": metrics,
        "out": str(out),
        "status": status,
        "message": ended,
        "local": experiment.algorithm.local.name,
        "bound": experiment.algorithm.bound.name,
        "participation": experiment.participation.name,
        "idle": experiment.participation.idle if experiment.algorithm.idle_clients_advance else "sleep",
        "clients": experiment.problem.num_clients,
        "parameters": experiment.problem.dim,
        "privacy": "none: no noise was added, the clients' data are not protected",
    }
    if statement is not None:
        shown_facts = ("private", "epsilon", "delta", "accountant", "noise_std", "trust", "adjacency")
        summary |= {"privacy": statement.headline, **{key: statement.facts[key] for key in shown_facts}}
    return summary
