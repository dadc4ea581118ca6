"""Comparison of runs and the page about them, for who trains from Python."""

from pathlib import Path

from fednormec.engine.round import Trained
from fednormec.errors import UserError
from fednormec.results.compare import Table, table
from fednormec.results.groups import grouped
from fednormec.results.reading import Run, find_runs
from fednormec.results.report import write_figures, write_report
from fednormec.sweeps.ranking import Sweep

Runs = Path | str | Trained | Sweep


def compare(*runs: Runs) -> Table:
    """Compares runs side by side, those that differ only in their seed on one line; print the result.

    Args:
        runs: run folders, folders that hold some, results of `train` with a folder, or of `sweep`.
    """
    return table(grouped(_found(runs)))


def report(
    *runs: Runs, out: Path | str = "report.html", figures: Path | str | None = None, force: bool = False
) -> Path:
    """Makes a page about runs to send to others, one HTML file that needs nothing else, and returns its path.

    Args:
        runs: run folders, folders that hold some, results of `train` with a folder, or of `sweep`.
        out: the page.
        figures: a folder for the curves as .png and .pdf, and for the table; None: none.
        force: replaces files that exist.
    """
    found = _found(runs)
    if Path(out).exists() and not force:
        raise UserError(f"{out} exists already: nothing was changed; choose another out, or replace it by force=True.")
    if figures is not None:
        write_figures(found, Path(figures), force)
    return write_report(found, Path(out), force)


def _found(runs: tuple[Runs, ...]) -> list[Run]:
    if not runs:
        raise UserError("there is nothing to compare: name run folders, or folders that hold some.")
    return find_runs([_folder(run) for run in runs])


def _folder(run: Runs) -> Path | str:
    if isinstance(run, Sweep):
        return run.folder
    if not isinstance(run, Trained):
        return run
    if run.out is None:
        raise UserError("a result of fn.train without a folder cannot be read back: train with out='runs/mine'.")
    return run.out
