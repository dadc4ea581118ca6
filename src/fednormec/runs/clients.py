"""Spread of a figure over a run's clients (clients.json): not private."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednormec.core.problem import ByClient
from fednormec.engine.observers import Observer
from fednormec.engine.record import APART, Record
from fednormec.files import read_json

if TYPE_CHECKING:
    from fednormec.engine.round import Round
    from fednormec.runs.folder import RunFolder

CLIENTS = "clients.json"


def by_client(folder: "RunFolder") -> Observer:
    """Returns an observer that stores the figure of each client, sorted, whenever it was measured."""

    def after(r: "Round", record: Record) -> None:
        if r.metrics is not None and r.metrics.by_client is not None:
            folder.note(Path(CLIENTS).stem, {APART: {"round": r.number, **r.metrics.by_client._asdict()}})

    return Observer(after)


def read_by_client(folder: Path) -> ByClient | None:
    """Returns what a run folder holds of the last evaluation; None if it is missing or damaged."""
    found: Any = read_json(folder / CLIENTS).get(APART)
    try:
        name, values = str(found["name"]), [float(value) for value in list(found["values"])]
    except (IndexError, KeyError, OverflowError, TypeError, ValueError):
        return None
    return ByClient.of(name, found.get("higher") is not False, values, found.get("held_out") is True)
