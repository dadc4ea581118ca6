"""Runs, ranks and prices cells: a table with the best first, and what all of it costs in ε."""

import csv
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fednormec.config.schema import Config, dump
from fednormec.config.settings import PYTHON
from fednormec.engine.figures import TEST, by_importance, figure_of, may_be_public
from fednormec.errors import UserError, known, note, visible
from fednormec.privacy.labels import NOT_PRIVATE, up
from fednormec.results.groups import Spread, spread_of
from fednormec.results.reading import number
from fednormec.runs.progress import News
from fednormec.sweeps.grid import label, plain
from fednormec.sweeps.pool import (
    Cell,
    Outcome,
    interrupted,
    require_names,
    run_all,
    run_folders,
)
from fednormec.sweeps.price import Price, price_of, price_text

SEED = "run.seed"
LOSS = "train_loss"


class Row(NamedTuple):
    """Row of the table: the cells that differ in nothing but their seed.

    Attributes:
        value: the metric over these cells; None if none has it.
        trouble: what befell some of them; empty if nothing did.
    """

    label: str
    settings: dict[str, Any]
    outcomes: tuple[Outcome, ...]
    value: Spread | None
    trouble: str

    @property
    def epsilon(self) -> float | None:
        """Largest ε of its cells; None if none has one."""
        found = [o.summary["epsilon"] for o in self.outcomes if o.summary and o.summary.get("epsilon") is not None]
        return max(found, default=None)


class Sweep(NamedTuple):
    """Sweep that has finished.

    Attributes:
        folder: where the runs, table.csv and table.md are stored.
        metric: what they are ranked by.
        rows: settings with their runs, those with other seeds together; the best first, those without a value last.
        price: what all private runs cost together; None if none is private.
    """

    folder: Path
    metric: str
    rows: list[Row]
    price: Price | None

    @property
    def failed(self) -> list[Outcome]:
        """Cells that failed."""
        return [outcome for row in self.rows for outcome in row.outcomes if outcome.summary is None]

    @property
    def best(self) -> Row | None:
        """Best row that is whole: no cell of it failed or diverged."""
        return next((row for row in self.rows if row.value is not None and not row.trouble), None)

    def text(self) -> str:
        """Returns the table for a terminal, the best cell, the price, and what failed."""
        return text(self)

    def __str__(self) -> str:
        return self.text()


def sweep(
    cells: Sequence[Cell],
    folder: Path,
    workers: int,
    metric: str | None = None,
    tell: Callable[[News[Outcome]], None] = lambda news: None,
    notes: Sequence[str] = (),
) -> Sweep:
    """Runs the cells, those of an earlier command excepted, and leaves table.csv, table.md and best.toml in the folder.

    The price counts everything that ever ran in the folder.

    Args:
        cells: the runs, each with a name of its own.
        folder: where they are stored.
        workers: number of worker processes.
        metric: what they are ranked by; by default the last test accuracy, without a test set the last training loss.
        tell: called with news of rounds and of cells that ended.
        notes: what to say about the config when all cells have been checked.
    """
    _check_all(cells, metric)
    for said in notes:
        note(said)
    return concluded(run_all(cells, folder, workers, tell), folder, metric)


def concluded(outcomes: Sequence[Outcome], folder: Path, metric: str | None = None) -> Sweep:
    """Ranks and prices cells that have ended, and leaves table.csv, table.md and best.toml in the folder.

    There is no best.toml of cells that came from Python, since no config can give them.

    Args:
        outcomes: how the cells ended.
        folder: where they are stored.
        metric: what they are ranked by, as in `sweep`.
    """
    metric = metric or _default_metric(outcomes)
    rows = _ranked(outcomes, metric)
    price = price_of(run_folders(folder), None if _public(rows, metric) else metric)
    done = Sweep(folder, metric, rows, price)
    _write_table(done)
    best = folder / "best.toml"
    best.unlink(missing_ok=True)
    if done.best is not None and not _from_python(done.best):
        best.write_text(dump(_without_stream(done.best.outcomes[0].cell.config)), encoding="utf-8")
    return done


def price(outcomes: Sequence[Outcome], folder: Path) -> Price | None:
    """Returns the price of some of a folder's cells, with all that was interrupted in it; None if none is private."""
    return price_of([*(outcome.path for outcome in outcomes), *interrupted(folder)])


def text(done: Sweep) -> str:
    """Returns the table for a terminal, the best cell, the price, and what failed."""
    head = ["", *map(visible, _columns(done)), "seeds", _title(done), "ε"]
    body = [[("*" if row is done.best else ""), *_cells_of(row, done), _value(row), _epsilon(row)] for row in done.rows]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
             for line in (head, *body)]  # fmt: skip
    if done.best is not None:
        here = done.best.outcomes[0].path if _from_python(done.best) else f"fednormec run {done.folder}/best.toml"
        lines += ["", f"best      {done.best.label}: {_value(done.best)}  ({here})"]
    lines += [f"tuning    {line}" for line in ([] if done.price is None else [price_text(done.price)])]
    lines += [f"failed    {outcome.cell.name}: {outcome.error}" for outcome in done.failed]
    lines += [f"folder    {done.folder}  (table.csv, table.md; fednormec report {done.folder})"]
    return "\n".join(map(visible, lines))


def facts(done: Sweep) -> dict[str, Any]:
    """Returns the whole result, for --json."""
    rows = [
        {
            "settings": row.settings,
            "value": None if row.value is None else row.value._asdict(),
            "epsilon": row.epsilon,
            **({"label": NOT_PRIVATE} if _protects_nobody(row) else {}),
            "trouble": row.trouble,
            "cells": [{"name": o.cell.name, "status": o.status, "error": o.error} for o in row.outcomes],
        }
        for row in done.rows
    ]
    best = None if done.best is None else done.best.settings
    priced = None if done.price is None else done.price._asdict()
    return {"folder": str(done.folder), "metric": done.metric, "best": best, "rows": rows, "tuning": priced}


def line(news: News[Outcome]) -> str:
    """Returns one ended cell in a line."""
    ended = news.ended
    assert ended is not None
    if ended.summary is None:
        return visible(f"{ended.cell.name}: failed: {ended.error}")
    metrics, apart = ended.summary["metrics"], ended.summary.get("not_private", ())
    named = [name for name in by_importance(metrics) if name != "gradient_norm"]
    found = [(name, value) for name in named if (value := number(metrics.get(name))) is not None]
    shown = [f"{figure_of(name).short} {value:{figure_of(name).form}}" + " (not private)" * (name in apart)
             for name, value in found[:1]]  # fmt: skip
    return visible(f"{ended.cell.name}: " + " ".join([*shown, *(["diverged"] if ended.status == "diverged" else [])]))


def check_settings(cells: Sequence[Cell]) -> None:
    """Raises UserError if the settings of any cell are wrong, as far as that needs no data."""
    from fednormec.config.assemble import rules

    require_names(cells)
    for cell in cells:
        _checked(cell, rules)


def _check_all(cells: Sequence[Cell], metric: str | None) -> None:
    """Raises UserError, before the first runs, if something is wrong with any cell, or with all of them."""
    from fednormec.config.assemble import assemble
    from fednormec.core.randomness import generator

    check_settings(cells)
    problem = _first(cells, assemble).problem
    if metric is not None:
        found = problem.evaluate(problem.init(generator(0, "init")))
        known("metric", metric, [*found.public, *found.not_private])


def _first(cells: Sequence[Cell], check: Callable[..., Any]) -> Any:
    """Returns what the first cell that passes gives; if none does, raises the error of the first for all."""
    for cell in cells:
        with suppress(UserError):
            return check(cell.config)
    return _checked(cells[0], check)


def _checked(cell: Cell, check: Callable[..., Any]) -> Any:
    try:
        return check(cell.config)
    except UserError as error:
        raise UserError(f"the cell {cell.name}: {error}") from error


# the table


def _default_metric(outcomes: Sequence[Outcome]) -> str:
    measured = [o.summary["metrics"] for o in outcomes if o.summary and o.summary["metrics"]]
    by_all = [name for name in by_importance(measured[0] if measured else ()) if all(name in m for m in measured)]
    return next((name for name in by_all if name.startswith(TEST)), LOSS)


def _title(done: Sweep) -> str:
    return done.metric if _public(done.rows, done.metric) else f"{done.metric} (not private)"


def _public(rows: Sequence[Row], metric: str) -> bool:
    """Returns whether no cell took the metric from clients' own data."""
    found = [o.summary for row in rows for o in row.outcomes if o.summary]
    return may_be_public(metric) and not any(metric in summary.get("not_private", ()) for summary in found)


def _ranked(outcomes: Sequence[Outcome], metric: str) -> list[Row]:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(repr(_without_seed(outcome)), []).append(outcome)
    rows = [_row(members, metric) for members in groups.values()]
    sign = -1.0 if figure_of(metric).higher else 1.0
    return sorted(rows, key=lambda row: math.inf if row.value is None else sign * row.value.mean)


def _row(outcomes: list[Outcome], metric: str) -> Row:
    settings = _without_seed(outcomes[0])
    values = [number(o.summary["metrics"].get(metric)) for o in outcomes if o.summary and o.status != "diverged"]
    bad = [o.status for o in outcomes if o.status in ("failed", "diverged")] + ["without a value"] * values.count(None)
    trouble = ", ".join(f"{bad.count(kind)} {kind}" for kind in sorted(set(bad)))
    return Row(label(settings) or "the only cell", settings, tuple(outcomes), spread_of(values), trouble)


def _without_seed(outcome: Outcome) -> dict[str, Any]:
    return {key: value for key, value in outcome.cell.settings.items() if key != SEED}


def _columns(done: Sweep) -> list[str]:
    return list(dict.fromkeys(key for row in done.rows for key in row.settings))


def _cells_of(row: Row, done: Sweep) -> list[str]:
    seeds = str(0 if row.value is None else row.value.runs)
    return [*(visible(plain(row.settings.get(key, ""))) for key in _columns(done)), seeds]


def _value(row: Row) -> str:
    if row.value is None:
        return row.trouble or "none"
    spread = f" ± {row.value.std:.4f}" if row.value.runs > 1 else ""
    return f"{row.value.mean:.4f}{spread}" + (f" ({row.trouble})" if row.trouble else "")


def _epsilon(row: Row) -> str:
    label = [NOT_PRIVATE] if _protects_nobody(row) else []
    return " ".join([*([] if row.epsilon is None else [up(row.epsilon)]), *label]) or "none"


def _protects_nobody(row: Row) -> bool:
    return any(o.summary is not None and o.summary.get("private") is False for o in row.outcomes)


def _from_python(row: Row) -> bool:
    return PYTHON in row.outcomes[0].cell.config


def _without_stream(config: Config) -> Config:
    """Returns a config to start from: with the cell's own stream every variation of it would share the cell's noise."""
    return {name: {k: v for k, v in own.items() if (name, k) != ("privacy", "stream")} for name, own in config.items()}


def _write_table(done: Sweep) -> None:
    figures = [f"{_title(done)} mean", "std", "min", "max", "epsilon", "trouble"]
    head = [*map(visible, _columns(done)), "seeds", *figures]
    lines = []
    for row in done.rows:
        value = [""] * 4 if row.value is None else [f"{v:.6g}" for v in row.value[:4]]
        lines.append([*_cells_of(row, done), *value, _epsilon(row), row.trouble])
    with open(done.folder / "table.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([head, *lines])
    rows = [head, ["---"] * len(head), *lines]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    notes = [] if done.price is None else [f"Tuning: {price_text(done.price)}."]
    (done.folder / "table.md").write_text("\n\n".join([table, *notes]) + "\n", encoding="utf-8")
