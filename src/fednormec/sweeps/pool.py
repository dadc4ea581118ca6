"""Pool of worker processes that run one cell after another, each cell in a run folder of its own.

A cell that has finished is not run again, and one that was stopped goes on after its last checkpoint, so that the same
command resumes what was stopped. A cell that fails, or takes its process with it, is noted and the others continue; the
next command tries it again, from its beginning. No worker outlives the command.
"""

import hashlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from fednormec.config.schema import Config, changed, dump
from fednormec.config.settings import PYTHON
from fednormec.engine.record import Record
from fednormec.errors import Stopped, UserError
from fednormec.files import Lock
from fednormec.runs.interrupts import asked_to_stop
from fednormec.runs.progress import News
from fednormec.runs.records import SUMMARY, Summary, finished

if TYPE_CHECKING:
    from fednormec.engine.round import Round

CELLS = "cells"
INTERRUPTED = "interrupted"


class Cell(NamedTuple):
    """Run among many: the folder's name, what sets it apart from the others, and its whole config."""

    name: str
    settings: dict[str, Any]
    config: Config


RunCell = Callable[[Cell, Path, Callable[[int], None], Callable[[], bool]], None]  # cell, folder, after a round, stop


class Outcome(NamedTuple):
    """End of a cell: its summary, or why there is none."""

    cell: Cell
    path: Path
    summary: Summary | None
    error: str | None

    @property
    def status(self) -> str:
        """Status of the summary; "failed" without one."""
        return "failed" if self.summary is None else self.summary.status


def with_own_noise(cell: Cell, mark: str | None = None) -> Cell:
    """Returns the cell, where it has noise, with a stream that follows from all its settings, or from the mark alone.

    Without a mark no other cell, of this grid or another, shares its noise; the difference of two that did would show
    what the noise hides.
    """
    if "privacy" not in cell.config:
        return cell
    if mark is None:
        mark = dump({name: dict(sorted(section.items())) for name, section in sorted(cell.config.items())})
    stream = int.from_bytes(hashlib.blake2b(mark.encode(), digest_size=6).digest(), "little") + 1
    return cell._replace(config=changed(cell.config, {"privacy.stream": stream}))


def run_all(
    cells: Sequence[Cell],
    folder: Path,
    workers: int,
    tell: Callable[[News[Outcome]], None] = lambda news: None,
    run: RunCell | None = None,
) -> list[Outcome]:
    """Runs what has not finished yet and returns how every cell ended, in the order given.

    Args:
        cells: the runs, each with a name of its own.
        folder: where their run folders are stored.
        workers: number of worker processes.
        tell: called with news of rounds and of cells that ended.
        run: runs a cell in this process, one after another, in the place of worker processes.
    """
    require_names(cells)
    with _locked(folder):
        ended = {cell.name: earlier(cell, folder) for cell in cells}
        waiting = [cell for cell in cells if ended[cell.name] is None]
        board, again = _Board(cells, ended, tell), "command" if run is None else "call"
        for cell in waiting:
            _make_room(cell, folder)
        with asked_to_stop() as stop:  # an exception at any moment could get lost in a callback
            if run is None:
                _work_off(waiting, folder, min(workers, max(1, len(waiting))), board, stop)
            else:
                _one_after_another(waiting, folder, run, board, stop)
            if stop() and None in ended.values():
                raise Stopped(f"stopped with {board.cells_ended} of {len(cells)} cells done; the same {again} goes on "
                              "with the others.")  # fmt: skip
        outcomes = [ended[cell.name] for cell in cells]
    return [outcome for outcome in outcomes if outcome is not None]


def require_names(cells: Sequence[Cell]) -> None:
    """Raises UserError if two cells would share a folder."""
    names = [cell.name for cell in cells]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"two cells are called '{twice}': every cell must differ from the others.")


def interrupted(folder: Path) -> list[Path]:
    """Returns the folders of cells that failed or were stopped before their end, and run again since."""
    return sorted(path for path in (folder / INTERRUPTED).glob("*") if path.is_dir())


def run_folders(folder: Path) -> list[Path]:
    """Returns the folders of all that ever ran here, also failed and interrupted cells and those of an earlier grid."""
    return [*sorted(path for path in (folder / CELLS).glob("*") if path.is_dir()), *interrupted(folder)]


class _Board:
    """Progress of all cells; tells each change."""

    def __init__(
        self, cells: Sequence[Cell], ended: dict[str, Outcome | None], tell: Callable[[News[Outcome]], None]
    ) -> None:
        self._ended, self._tell = ended, tell
        self._planned = {cell.name: int(cell.config.get("run", {}).get("rounds", 100)) for cell in cells}
        self._done = {name: self._planned[name] for name, outcome in ended.items() if outcome is not None}
        self._say(None)

    def round(self, name: str, number: int) -> None:
        self._done[name] = number
        self._say(None)

    def end(self, outcome: Outcome) -> None:
        self._ended[outcome.cell.name] = outcome
        self._done[outcome.cell.name] = self._planned[outcome.cell.name]
        self._say(outcome)

    @property
    def cells_ended(self) -> int:
        return sum(ended is not None for ended in self._ended.values())

    def _say(self, outcome: Outcome | None) -> None:
        self._tell(News(sum(self._done.values()), sum(self._planned.values()), outcome, self.cells_ended))


class _Worker:
    """Worker process, and the cell that it has in hand."""

    def __init__(self, threads: int) -> None:
        context = multiprocessing.get_context("spawn")  # a forked torch may wait for threads that it left behind
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, threads), daemon=True)
        with _ctrl_c_blocked():
            self.process.start()
        theirs.close()
        self.cell: Cell | None = None

    def give(self, cell: Cell, path: Path) -> None:
        self.cell = cell
        with suppress(OSError):  # it died with nothing in hand, which is heard as the end of its line
            self.line.send((cell.config, cell.name, path))

    def stop(self) -> None:
        self.line.close()
        self.process.terminate()
        self.process.join()


def _work_off(cells: list[Cell], folder: Path, workers: int, board: _Board, stop: Callable[[], bool]) -> None:
    todo, threads = list(reversed(cells)), max(1, (os.cpu_count() or 1) // workers)
    crew: list[_Worker] = []
    try:
        while (todo or any(worker.cell for worker in crew)) and not stop():
            while todo and len(crew) < workers:
                crew.append(_Worker(threads))
            for worker in crew:
                if worker.cell is None and todo:
                    worker.give(todo[-1], _path(folder, todo.pop()))
            for line in wait([worker.line for worker in crew if worker.cell], timeout=0.2):
                worker = next(worker for worker in crew if worker.line is line)
                if not _hear(worker, folder, board):
                    worker.stop()
                    crew.remove(worker)
    finally:
        for worker in crew:
            worker.stop()


def _one_after_another(cells: list[Cell], folder: Path, run: RunCell, board: _Board, stop: Callable[[], bool]) -> None:
    for cell in cells:
        path = _path(folder, cell)
        try:
            run(cell, path, partial(board.round, cell.name), stop)
        except Stopped:
            if not stop():
                raise
            return
        except Exception as error:  # one cell's trouble is not the others'
            board.end(_failed(cell, path, _said(error)))
        else:
            board.end(Outcome(cell, path, finished(path), None))
        if stop():
            return


def _said(error: Exception) -> str:
    """Returns what befell a cell: a sentence for a mistake, and all that is known of another error."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{said}\n\n{''.join(traceback.format_exception(error))}"


def _hear(worker: _Worker, folder: Path, board: _Board) -> bool:
    """Takes what a worker sent; returns False if it will send no more."""
    cell = worker.cell
    assert cell is not None
    path = _path(folder, cell)
    try:
        kind, content = worker.line.recv()
    except (EOFError, OSError):
        worker.process.join()
        board.end(_failed(cell, path, f"its process ended with exit code {worker.process.exitcode}"))
        return False
    if kind == "round":
        board.round(cell.name, content)
        return True
    worker.cell = None
    board.end(_failed(cell, path, content) if kind == "error" else Outcome(cell, path, finished(path), None))
    return True


def _failed(cell: Cell, path: Path, why: str) -> Outcome:
    """Stores why a cell failed, and returns its outcome.

    The first line is for the table; of an exception the file has all.
    """
    _beside(path, "error.txt").write_text(why + "\n", encoding="utf-8", errors="backslashreplace")
    return Outcome(cell, path, None, why.partition("\n")[0])


@contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Blocks Ctrl-C: a process that is started within never hears it; its parent does, a moment later."""
    resource_tracker.ensure_running()  # multiprocessing's own helper, whose start would unblock it again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """Ends this process, whatever it is at, when the one that started it is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _serve(line: Connection, threads: int) -> None:
    """Runs cells in a worker process: takes them from the line, and sends their rounds and ends."""
    Thread(target=_end_with_parent, daemon=True).start()
    import torch

    from fednormec.engine.observers import Observer
    from fednormec.runs.runner import go_on, perform

    torch.set_num_threads(threads)
    told = 0.0

    def after(r: "Round", record: Record) -> None:
        nonlocal told
        if time.monotonic() - told > 0.2:
            told = time.monotonic()
            line.send(("round", r.number))

    while True:
        try:
            config, name, path = line.recv()
        except EOFError:
            return
        try:
            if path.exists():
                go_on(path, quiet=True, observers=[Observer(after)])
            else:
                perform(config, name, path, quiet=True, observers=[Observer(after)])
            line.send(("done", None))
        except Exception as error:  # one cell's trouble is not the others'
            line.send(("error", _said(error)))


# files


def _path(folder: Path, cell: Cell) -> Path:
    return folder / CELLS / cell.name


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}.{ending}")


def earlier(cell: Cell, folder: Path) -> Outcome | None:
    """Returns the cell's end, if an earlier command has seen it; raises UserError if that had other settings."""
    path = _path(folder, cell)
    asked, wanted = _beside(path, "toml"), dump(cell.config)
    if path.exists() and asked.exists() and asked.read_text(encoding="utf-8") != wanted:
        raise UserError(
            f"{folder} holds the cell '{cell.name}' with other settings ({asked}): choose another {_out(cell)}."
        )
    summary = finished(path)
    return None if summary is None else Outcome(cell, path, summary, None)


def _out(cell: Cell) -> str:
    return "out" if PYTHON in cell.config else "--out"


def _make_room(cell: Cell, folder: Path) -> None:
    """Stores what is asked, and puts an attempt that cannot go on aside: what it released stays released."""
    from fednormec.runs.checkpoint import newest_first
    from fednormec.runs.folder import default_path

    path = _path(folder, cell)
    failed = _beside(path, "error.txt").exists() or (path / SUMMARY).exists()  # a summary that is no end is damaged
    if path.exists() and (failed or not newest_first(path)):
        (folder / INTERRUPTED).mkdir(exist_ok=True)
        path.rename(default_path(cell.name, folder / INTERRUPTED))
    path.parent.mkdir(parents=True, exist_ok=True)
    _beside(path, "toml").write_text(dump(cell.config), encoding="utf-8")
    _beside(path, "error.txt").unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks the folder; raises UserError if another command has, since two would run every cell twice."""
    try:
        lock = Lock(folder / ".lock")
    except OSError as error:
        raise UserError(f"the folder {folder} cannot be used: {error.strerror or error}.") from error
    with lock:
        if not lock.take():
            raise UserError(f"another command is at work in {folder}: wait for it, or choose another --out.")
        yield
