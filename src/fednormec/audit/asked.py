"""Audit of what a config describes."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fednormec.config.assemble import Experiment, assemble
from fednormec.config.schema import Config
from fednormec.core.randomness import generator
from fednormec.engine.planning import planned
from fednormec.errors import UserError
from fednormec.privacy.labels import NOT_PRIVATE
from fednormec.privacy.mechanism import MOST, Plan
from fednormec.privacy.records import RecordPlan, for_clients, for_records
from fednormec.runs.progress import counted

if TYPE_CHECKING:
    from fednormec.audit.audit import Audit


class Audited(NamedTuple):
    """Audits of a config, of clients, of records or of both.

    Attributes:
        clients: that of clients; None: they are not protected.
        records: that of records; None: they are not protected.
    """

    clients: "Audit | None"
    records: "Audit | None"

    @property
    def all(self) -> "tuple[Audit, ...]":
        """Those that there are."""
        return tuple(found for found in self if found is not None)

    @property
    def violated(self) -> bool:
        """True if there is a reason against any claim."""
        return any(found.verdict == "violated" for found in self.all)

    def facts(self) -> dict[str, Any]:
        """Returns everything, for JSON: the facts of one, or those of clients with those of "records" beside them."""
        first, *rest = (found.facts() for found in self.all)
        return {**first, "records": rest[0]} if rest else first

    def text(self) -> str:
        """Returns a short report for a person."""
        return "\n\n".join(found.text() for found in self.all)


def audited(config: Config, training: bool, canaries: int | None, quiet: bool) -> Audited:
    """Audits what a config describes: its mechanisms, or one training with canaries.

    Args:
        config: the config.
        training: whether a training is audited; otherwise the mechanisms alone.
        canaries: number of canaries; None: as many as the audit takes by default.
        quiet: whether to show no progress.
    """
    if canaries is not None and canaries > MOST:
        raise UserError(f"an audit takes at most {MOST:,} canaries, not {canaries:,}.")
    experiment = assemble(config)
    privacy = experiment.privacy
    if privacy is None:
        raise UserError("there is nothing to audit: this config has no [privacy].")
    plan = planned(
        experiment.problem, experiment.algorithm, experiment.participation, privacy, experiment.run.rounds
    )  # fmt: skip
    clients, records = for_clients(plan), for_records(plan)
    return Audited(
        None if clients is None else _of_clients(experiment, clients, training, canaries, quiet),
        None if records is None else _of_records(experiment, records, training, canaries, quiet),
    )


def _of_clients(experiment: Experiment, plan: Plan, training: bool, canaries: int | None, quiet: bool) -> "Audit":
    from fednormec.audit.audit import audit_mechanism, audit_training

    problem, algorithm, run = experiment.problem, experiment.algorithm, experiment.run
    assert experiment.privacy is not None
    with counted("round", quiet) as show:
        if not training:
            found = audit_mechanism(
                plan.mechanism, plan.rounds, plan.delta, trials=canaries, seed=run.seed, algorithm=algorithm,
                dim=problem.dim, dtype=problem.init(generator(0, "init")).dtype, on_progress=show,
            )  # fmt: skip
        else:
            found = audit_training(
                problem, algorithm, experiment.participation, experiment.privacy, rounds=run.rounds, seed=run.seed,
                canaries=200 if canaries is None else canaries, on_progress=show,
            )  # fmt: skip
    return replace(found, of=f"{NOT_PRIVATE}: {found.of}") if plan.total_norm else found


def _of_records(experiment: Experiment, plan: RecordPlan, training: bool, canaries: int | None, quiet: bool) -> "Audit":
    from fednormec.audit.record_training import audit_record_training
    from fednormec.audit.records import audit_record_plan

    problem, algorithm, seed = experiment.problem, experiment.algorithm, experiment.run.seed
    if not training:
        with counted("step", quiet) as show:
            return audit_record_plan(problem, algorithm, plan, canaries, seed, on_progress=show)
    with counted("round", quiet) as show:
        return audit_record_training(
            problem, algorithm, experiment.participation, plan, seed=seed,
            canaries=200 if canaries is None else canaries, on_progress=show,
        )  # fmt: skip
