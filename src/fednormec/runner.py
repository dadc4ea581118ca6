"""A run from config to folder: assemble, train with progress, save, and say how it ended."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednormec.config import Config
from fednormec.engine import Round, planned, record
from fednormec.errors import Diverged, UserError
from fednormec.events import logged, require_tensorboard
from fednormec.experiment import Experiment, assemble, choices, pool_of, start
from fednormec.privacy.mechanism import NOT_PRIVATE, Plan
from fednormec.privacy.statement import Statement, state, up
from fednormec.profile import Profile, profiled, stage, table
from fednormec.progress import counted, shown, sparkline
from fednormec.randomness import generator
from fednormec.runs import RunFolder, default_path

if TYPE_CHECKING:
    from fednormec.privacy.audit import Audit
    from fednormec.theory.answer import Answer


def perform(
    config: Config,
    name: str,
    out: Path | None,
    quiet: bool,
    plan: bool = False,
    on_round: Callable[[int], None] = lambda number: None,
    tensorboard: bool = False,
    profile: bool = False,
) -> dict[str, Any]:
    """Trains what the config describes and returns the summary that also lies in the folder.

    With `plan` the settings are those that the theory recommends. The folder is made after everything was checked, so
    that a mistake leaves nothing behind. A run whose model diverges is kept, with the last finite model. `on_round`
    hears the number of each round that is done. With `tensorboard` the figures also go into event files, with `profile`
    profile.json and the summary that is returned say where the time went.
    """
    with profiled() if profile else nullcontext() as looking:
        return _perform(config, name, out, quiet, plan, on_round, tensorboard, looking)


def _perform(
    config: Config,
    name: str,
    out: Path | None,
    quiet: bool,
    plan: bool,
    on_round: Callable[[int], None],
    tensorboard: bool,
    profile: Profile | None,
) -> dict[str, Any]:
    if tensorboard:
        require_tensorboard()
    advised = None
    if plan:
        from fednormec.theory.answer import answer, with_plan

        advised = answer(config)
        config = with_plan(config, advised)
    with stage("data"):
        experiment = assemble(config)
    if plan:
        from fednormec.theory.question import require_covered

        require_covered(experiment)
    watch = _watch(experiment)
    paid: list[Plan] = []

    def pay(number: int, plan: Plan) -> None:
        folder.pay(number, plan)
        paid.append(plan)

    path = out or default_path(name)
    rounds = start(experiment, pay, path)
    x, done, ended = experiment.problem.init(generator(experiment.run.seed, "init")), 0, None
    latest: dict[str, float] = {}
    looks_at_clients: set[str] = set()
    left_out = 0
    curve: list[float] = []
    records: list[dict[str, Any]] = []
    with RunFolder(path, experiment.config) as folder:
        _mention(() if quiet else experiment.unused)
        try:
            with (
                shown(experiment.run.rounds, quiet) as show,
                logged(folder.path) if tensorboard else nullcontext() as log,
            ):
                for r in rounds:
                    x, done, left_out = r.x, r.number, left_out + r.left_out
                    with stage("evaluation"):
                        measured = None if watch is None or r.metrics is None else watch(r)
                    line = record(r, measured)
                    with stage("disk"):
                        folder.add(line)
                        if log is not None:
                            log(line)
                    show(r.number, r.metrics, None if r.plan is None else _spent(r))
                    on_round(r.number)
                    if r.metrics is not None:
                        latest = {**r.metrics.public, **r.metrics.not_private}
                        looks_at_clients = set(r.metrics.not_private)
                        records.append(line)
                        curve.append(latest.get("test_accuracy", latest["train_loss"]))
        except Diverged as end:
            ended = str(end)
        statement = state(paid[-1], len(paid)) if paid else None
        summary = _summary(experiment, done, latest, folder.path, ended, statement)
        if watch is not None and ended is None:
            summary["guarantee"] = _guarantee(experiment, advised, records, folder)
        summary |= {"not_private": [*sorted(looks_at_clients), "left_out"], "left_out": left_out}
        with stage("disk"):
            folder.finish(experiment.problem.named(x), summary, statement)
        if profile is not None:
            summary["profile"] = profile.facts(pool_of(experiment).workers) | {"choices": choices(experiment)}
            folder.note("profile", summary["profile"])
    return summary | {"curve": sparkline(curve), "statement": None if statement is None else statement.text}


def with_report(summary: dict[str, Any]) -> dict[str, Any]:
    """The summary with the path of the run's report, a page that is made now. A page that fails is a note, no more."""
    try:
        from fednormec.report import write_report
        from fednormec.results import read_run

        out = Path(summary["out"])
        return summary | {"report": str(write_report([read_run(out)], out / "report.html"))}
    except Exception as error:
        print(f"note: the report could not be made: {error}", file=sys.stderr)
        return summary


def _watch(experiment: Experiment) -> Callable[[Round], dict[str, float]] | None:
    """What measures the theory's invariants after a round, where the problem's constants are known."""
    from fednormec.theory.setting import knows_constants
    from fednormec.theory.watch import can_measure, measure

    known = knows_constants(experiment.problem) or "constants" in experiment.config
    if not (known and can_measure(experiment.algorithm)):
        return None
    return lambda r: measure(experiment.problem, experiment.algorithm, r, experiment.run.seed)._asdict()


def _guarantee(
    experiment: Experiment, advised: "Answer | None", records: list[dict[str, Any]], folder: RunFolder
) -> dict[str, Any]:
    """Compares what was measured with what is guaranteed: a picture, a file, and the gist for the summary.

    A theorem speaks of the models before each round, so that the last one does not count.
    """
    from fednormec.plots import measured_against_guaranteed
    from fednormec.theory.question import promise_of
    from fednormec.theory.watch import gradient_norms

    x0 = experiment.problem.init(generator(experiment.run.seed, "init"))
    at_start = gradient_norms(experiment.problem, x0)[0]
    picture = folder.path / "guarantee.png"
    try:
        promise, from_data = promise_of(experiment, None if advised is None else advised.question.constants)
    except UserError as error:
        measured_against_guaranteed(None, records, at_start, picture)
        return {"covered": False, "why_not": str(error)}
    before_last = [line["not_private"]["gradient_norm"] for line in records if line["round"] < promise.settings.rounds]
    facts = promise.facts()
    gist = {
        "covered": True,
        "bound": facts["bound"],
        "vacuous": facts["vacuous"],
        "bound_round_by_round": facts["round_by_round"]["bound"],
        "measured": min([at_start, *before_last]),
        "models_measured": 1 + len(before_last),
        "planned": advised is not None,
        "not_private": True,
    }
    whole = {"constants": asdict(promise.constants), "constants_from_data": from_data}
    folder.note("guarantee", gist | whole | facts | {"settings": asdict(promise.settings) | facts["settings"]})
    measured_against_guaranteed(promise, records, at_start, picture)
    return gist


def audited(config: Config, training: bool, canaries: int | None, quiet: bool) -> "Audit":
    """The audit of what a config describes: of its mechanism, or of one training with canaries."""
    from fednormec.privacy.audit import audit_mechanism, audit_training

    experiment = assemble(config)
    problem, algorithm, privacy, rounds = (
        experiment.problem, experiment.algorithm, experiment.privacy, experiment.run.rounds,
    )  # fmt: skip
    if privacy is None:
        raise UserError("there is nothing to audit: this config has no [privacy].")
    plan = planned(problem, algorithm, experiment.participation, privacy, rounds)
    with counted("round", quiet) as show:
        if not training:
            found = audit_mechanism(
                plan.mechanism, plan.rounds, plan.delta, trials=canaries, seed=experiment.run.seed, on_progress=show
            )
        else:
            found = audit_training(
                problem, algorithm, experiment.participation, privacy, rounds=rounds, seed=experiment.run.seed,
                canaries=200 if canaries is None else canaries, on_progress=show,
            )  # fmt: skip
    return replace(found, of=f"{NOT_PRIVATE}: {found.of}") if plan.total_norm else found


def _spent(r: Round) -> str:
    assert r.plan is not None and r.epsilon is not None
    return f"ε {up(r.epsilon)}" + (f" {NOT_PRIVATE}" if r.plan.total_norm else "")


def _mention(unused: tuple[str, ...]) -> None:
    for section in unused:
        print(f"note: this run has no use for [{section}].", file=sys.stderr)


def describe(summary: dict[str, Any]) -> str:
    """The summary for a person."""
    metrics = summary["metrics"]
    lines = [f"{summary['method']}: {summary['rounds']} rounds, {summary['clients']} clients, "
             f"{summary['parameters']:,} parameters"]  # fmt: skip
    if "test_accuracy" in metrics:
        lines.append(f"test accuracy  {metrics['test_accuracy']:.1%}  {summary['curve']}")
    if "test_loss" in metrics:
        lines.append(f"test loss      {metrics['test_loss']:.4f}")
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


def _summary(
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
