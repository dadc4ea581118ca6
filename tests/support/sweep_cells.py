"""Configs of small sweeps, their cells, and when each came to its end."""

from pathlib import Path
from typing import Any

import fednormec as fn
from fednormec.config.schema import dump, read
from fednormec.errors import UserError
from fednormec.runs.records import finished
from fednormec.runs.runner import perform
from fednormec.sweeps import pool
from fednormec.sweeps.grid import grid
from fednormec.sweeps.pool import Cell, Outcome

NOISE = {"privacy": {"noise_std": 5.0}}


def quadratic(rounds: int = 3, **more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        "problem": {"name": "quadratic", "clients": 6, "dim": 4},
        "local": {"name": "gd", "step": 0.1},
        "method": {"name": "fed_normec", "beta": 0.1},
        **more,
        "run": {"rounds": rounds},
    }


def digits(rounds: int = 3, **more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        "data": {"source": "digits", "partition": "iid", "clients": 4, "examples": 40, "test_examples": 40},
        "model": {"name": "linear"},
        "local": {"name": "gd", "step": 0.5},
        "method": {"name": "fed_normec", "beta": 0.1},
        **more,
        "run": {"rounds": rounds},
    }


def written(path: Path, config: dict[str, dict[str, Any]], axes: str) -> Path:
    path.write_text(f"{dump(config)}\n[sweep]\n{axes}\n", encoding="utf-8")
    return path


def from_toml(folder: Path, axes: str, config: dict[str, dict[str, Any]] | None = None) -> list[Cell]:
    asked = read(written(folder / "given.toml", config or quadratic(), axes), sweep=True)
    return grid(asked, asked.pop("sweep"))


def stamps(folder: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("cells/*/summary.json")}


def serially(todo: list[Cell], folder: Path, workers: int, board: Any, stop: Any) -> None:
    """Works off cells one after another in this process, in the place of workers."""
    for cell in todo:
        path = pool._path(folder, cell)
        try:
            told = fn.Observer(lambda r, record, name=cell.name: board.round(name, r.number))
            perform(cell.config, cell.name, path, quiet=True, observers=[told])
        except UserError as error:
            board.end(pool._failed(cell, path, str(error)))
        else:
            board.end(Outcome(cell, path, finished(path), None))
