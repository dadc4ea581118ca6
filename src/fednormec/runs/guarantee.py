"""Promises of the theory about a run, against what the run measured."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fednormec.config.assemble import Experiment
from fednormec.config.schema import Config
from fednormec.config.settings import PYTHON
from fednormec.engine.record import Record
from fednormec.engine.round import Round
from fednormec.errors import UserError
from fednormec.runs.folder import RunFolder
from fednormec.runs.start import starting_point

if TYPE_CHECKING:
    from fednormec.theory.setting import Constants


def advised(config: Config) -> tuple[Config, "Constants"]:
    """Returns the config with the settings that the theory recommends, and the constants that they follow from."""
    from fednormec.theory.answer import answer, with_plan

    found = answer(config)
    return with_plan(config, found), found.question.constants


def measures(experiment: Experiment) -> Callable[[Round], dict[str, float]] | None:
    """Returns what measures the theory's invariants after a round; None unless the problem's constants are known.

    Of a run whose method came from Python nobody knows the settings, so that it is compared with no theorem.
    """
    from fednormec.theory.setting import knows_constants
    from fednormec.theory.watch import can_measure, measure

    known = knows_constants(experiment.problem) or "constants" in experiment.config
    if PYTHON in experiment.config or not (known and can_measure(experiment.algorithm)):
        return None
    return lambda r: measure(experiment.problem, experiment.algorithm, r, experiment.run.seed)._asdict()


def against_guarantee(
    experiment: Experiment, folder: RunFolder, records: Sequence[Record], known: "Constants | None", planned: bool
) -> dict[str, Any]:
    """Compares what was measured with what is guaranteed: a picture, a file, and the gist for the summary.

    A theorem speaks of the models before each round, so that the last one does not count.

    Args:
        experiment: what ran.
        folder: where the picture and the file are stored.
        records: those of the rounds after which the model was evaluated.
        known: the constants that the settings were planned with; None to find them.
        planned: whether the theory chose the settings.
    """
    from fednormec.theory.plots import measured_against_guaranteed
    from fednormec.theory.question import promise_of
    from fednormec.theory.watch import gradient_norms

    at_start = gradient_norms(experiment.problem, starting_point(experiment))[0]
    picture = folder.path / "guarantee.png"
    try:
        promise, from_data = promise_of(experiment, known)
    except UserError as error:
        measured_against_guaranteed(None, records, at_start, picture)
        return {"covered": False, "why_not": str(error)}
    before_last = [line.apart["gradient_norm"] for line in records if line["round"] < promise.settings.rounds]
    facts = promise.facts()
    gist = {
        "covered": True,
        "bound": facts["bound"],
        "vacuous": facts["vacuous"],
        "bound_round_by_round": facts["round_by_round"]["bound"],
        "measured": min([at_start, *before_last]),
        "models_measured": 1 + len(before_last),
        "planned": planned,
        "not_private": True,
    }
    whole = {"constants": asdict(promise.constants), "constants_from_data": from_data}
    folder.note("guarantee", gist | whole | facts | {"settings": asdict(promise.settings) | facts["settings"]})
    measured_against_guaranteed(promise, records, at_start, picture)
    return gist
