"""Audit of what a config describes."""

from dataclasses import replace
from typing import TYPE_CHECKING

from fednormec.config.assemble import assemble
from fednormec.config.schema import Config
from fednormec.core.randomness import generator
from fednormec.engine.planning import planned_for_clients
from fednormec.errors import (
    UserError,
)
from fednormec.privacy.labels import NOT_PRIVATE
from fednormec.privacy.mechanism import MOST
from fednormec.runs.progress import counted

if TYPE_CHECKING:
    from fednormec.audit.audit import Audit


def audited(config: Config, training: bool, canaries: int | None, quiet: bool) -> "Audit":
    """Audits what a config describes: its mechanism, or one training with canaries.

    Args:
        config: the config.
        training: whether a training is audited; otherwise the mechanism alone.
        canaries: number of canaries; None: as many as the audit takes by default.
        quiet: whether to show no progress.
    """
    from fednormec.audit.audit import audit_mechanism, audit_training

    if canaries is not None and canaries > MOST:
        raise UserError(f"an audit takes at most {MOST:,} canaries, not {canaries:,}.")
    experiment = assemble(config)
    problem, algorithm, privacy, rounds = (
        experiment.problem, experiment.algorithm, experiment.privacy, experiment.run.rounds,
    )  # fmt: skip
    if privacy is None:
        raise UserError("there is nothing to audit: this config has no [privacy].")
    if not privacy.for_clients:
        raise UserError("what is audited here is the privacy of clients, and this config protects records.")
    plan = planned_for_clients(problem, algorithm, experiment.participation, privacy, rounds)
    with counted("round", quiet) as show:
        if not training:
            found = audit_mechanism(
                plan.mechanism, plan.rounds, plan.delta, trials=canaries, seed=experiment.run.seed, algorithm=algorithm,
                dim=problem.dim, dtype=problem.init(generator(0, "init")).dtype, on_progress=show,
            )  # fmt: skip
        else:
            found = audit_training(
                problem, algorithm, experiment.participation, privacy, rounds=rounds, seed=experiment.run.seed,
                canaries=200 if canaries is None else canaries, on_progress=show,
            )  # fmt: skip
    return replace(found, of=f"{NOT_PRIVATE}: {found.of}") if plan.total_norm else found
