"""Resuming a run: what must be as it was, what is computed again, and what that costs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fednormec.config.assemble import Experiment
from fednormec.errors import UserError
from fednormec.privacy.ledger import LEDGER, LEDGER_OF_RECORDS, spent_in
from fednormec.runs.checkpoint import Checkpoint
from fednormec.runs.environment import environment
from fednormec.runs.folder import MODEL
from fednormec.runs.origin import differing

ONE_COPY = (
    "secure noise is drawn anew: go on with one copy of this folder only, since each copy counts what it releases "
    "itself, and not what another does"
)


class Repeated(NamedTuple):
    """Number of releases that count before the next round, and notes about those that the checkpoint does not know."""

    releases: int
    notes: tuple[str, ...]


def repeated(experiment: Experiment, folder: Path, checkpoint: Checkpoint | None, records: int) -> Repeated:
    """Counts the releases before the next round; raises UserError if the ledger has fewer than were released.

    A round that is computed again with seeded noise is the release that the ledger has paid for already; with secure
    noise it is one more. What was paid for last may not have been released: the ledger can only say too much.

    Args:
        experiment: what is resumed.
        folder: the run folder.
        checkpoint: what it resumes from; None: from the start.
        records: number of rounds on record, each of them paid for before that.
    """
    known = 0 if checkpoint is None else checkpoint.facts.releases
    counts = _paid(experiment, folder)
    paid = max(counts.values())  # of two ledgers the longer one: a kill can come between a round's lines in them
    without = experiment.privacy is None or experiment.privacy.protocol  # whose rounds may have no release
    released = known if without else max(known, records)
    for name, rounds_in_it in counts.items():
        if rounds_in_it < released:
            raise UserError(
                f"{name} has {rounds_in_it} rounds, but {released} were released: it is damaged; nothing was changed."
            )
    secure = experiment.privacy is not None and experiment.privacy.secure
    copies = (ONE_COPY,) if secure else ()
    if experiment.privacy is None or paid == known:
        return Repeated(known, copies)
    rounds = (
        f"the ledger has paid for {paid - known} more {'round' if paid == known + 1 else 'rounds'}, the last of which "
    )
    rounds += "may not have been released"
    if not secure:
        return Repeated(known, (f"{rounds}; they are computed again with the same noise, which releases nothing new",))
    return Repeated(paid, (f"{rounds}; they are drawn again with new noise, so that both count", *copies))


def _paid(experiment: Experiment, folder: Path) -> dict[str, int]:
    """Returns the number of rounds that each ledger has paid for, by its name."""
    privacy = experiment.privacy
    both = privacy is not None and privacy.for_clients and privacy.for_records
    spent = {name: spent_in(folder, name) for name in ((LEDGER, LEDGER_OF_RECORDS) if both else (LEDGER,))}
    return {name: 0 if found is None else found.rounds for name, found in spent.items()}


def require_no_secure_model(folder: Path, experiment: Experiment) -> None:
    """Raises UserError if a run with secure noise has its model, but neither a summary nor a checkpoint any more.

    Computing it again would draw new noise, be paid for once more, and put another model in the place of this one.
    """
    secure = experiment.privacy is not None and experiment.privacy.secure
    if secure and (folder / MODEL).is_file():
        raise UserError(
            f"summary.json in {folder} is damaged or missing, but the model is there: to compute it again would draw "
            "new noise and be paid for again. Put summary.json back from a copy, or take the model as it is; nothing "
            "was changed."
        )


def require_same_config(folder: Path, config: str) -> None:
    """Raises UserError if config.toml was changed since the ledger was begun, or the ledger does not tell.

    Rounds that were paid for are computed again with the same noise: with other settings, whoever saw both would learn
    more than ε says.

    Args:
        folder: the run folder.
        config: digest of config.toml as it is.
    """
    spent = spent_in(folder)
    if spent is not None and spent.config is None:
        raise UserError("ledger.jsonl does not say by which settings it was begun, so that nothing can be added to it: "
                        "start a new run.")  # fmt: skip
    if spent is not None and spent.config != config:
        raise UserError(
            "config.toml was changed since ledger.jsonl was begun: put the old one back, or start a new run."
        )


def require_same_data(begun: dict[str, Any], experiment: Experiment) -> None:
    """Raises UserError if the user's data, or their problem in Python, are not those that the run began with.

    `begun` is the environment that the run wrote down when it began.
    """
    other = differing(begun.get("not_private"), experiment)
    if other is not None:
        raise UserError(f"{other}, or start a new run.")


def changes(begun: dict[str, Any]) -> Iterator[str]:
    """Yields a note if something that the last digits of a result may depend on is not what it was."""
    now, before = environment(), begun.get("versions")
    pairs = [(key, begun.get(key), now[key]) for key in ("python", "platform", "commit", "kernels")]
    if isinstance(before, dict):
        pairs += [(name, before.get(name), new) for name, new in now["versions"].items()]
    found = [f"{name} is {new}, not {old}" for name, old, new in pairs if old not in (None, new)]
    if found:
        yield f"since the run began {', '.join(found)}: the last digits may be others than without an interruption"


def with_resumption(begun: dict[str, Any], done: int) -> dict[str, Any]:
    """Returns the environment, with one more process that resumed after `done` rounds."""
    earlier = begun.get("resumed")
    return begun | {"resumed": [*(earlier if isinstance(earlier, list) else []), environment() | {"after_round": done}]}


def differs(round: int, experiment: Experiment) -> Iterator[str]:
    """Yields what to say of a round that was computed again and came out differently, where it should not have."""
    said = f"round {round} came out differently from before the interruption"
    if experiment.privacy is None:
        yield said
    elif not experiment.privacy.secure:
        yield f"{said}: with the same noise, whoever has seen both learns more than ε says"
