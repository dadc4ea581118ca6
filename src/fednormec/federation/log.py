"""Log of a federation: what a person is told, with its time and level, on the terminal, in memory and in a file."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from fednormec.errors import Stopped, UserError, note, visible
from fednormec.files import to_json

INFO, WARNING, ERROR = "INFO", "WARNING", "ERROR"
LINES = 200  # that are kept in memory
HOUR = 3600.0  # seconds in which the same thing is said once


class Unlogged(UserError):
    """Mistake of a user whose text may quote their data: for the terminal, for no log."""


class Line(NamedTuple):
    """Line of a log.

    Attributes:
        time: when it was said, in UTC, such as 2026-11-18T04:50:12Z.
        level: INFO, WARNING or ERROR.
        message: what was said.
    """

    time: str
    level: str
    message: str

    def text(self, as_json: bool = False) -> str:
        """Returns the line as text, or as a JSON object.

        >>> Line("2026-11-18T04:50:12Z", INFO, "north has left").text()
        '2026-11-18T04:50:12Z INFO north has left'
        """
        return to_json(self._asdict()) if as_json else " ".join(self)


class Log:
    """Log that is called with a sentence, its full stop left out; it is printed as a note, and kept.

    The file is opened for each line, so that it can be moved away at any time. What ends the context early is its last
    line.

    Args:
        file: where all lines are added; None: only in memory.
        as_json: whether a line of the file is a JSON object.
    """

    def __init__(self, file: Path | None = None, as_json: bool = False) -> None:
        if as_json and file is None:
            raise UserError("--log-json says how lines are written to --log-file: give that too.")
        self._file, self._as_json = file, as_json
        self._lines, self._lock = deque[Line](maxlen=LINES), threading.Lock()
        try:
            self._write("")
        except OSError as error:
            raise UserError(f"--log-file {file} cannot be written: {error.strerror or error}.") from error

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(value, Unlogged):
            self.keep(ERROR, "the data cannot be used; the terminal says why")
        elif isinstance(value, UserError):  # which others print
            self.keep(INFO if isinstance(value, Stopped) else ERROR, value)
        elif kind is not None:
            self.keep(ERROR, f"ended by {kind.__name__}")

    def __call__(self, said: object) -> None:
        """Notes something that is as it should be."""
        self._note(INFO, said)

    def warn(self, said: object) -> None:
        """Notes something that somebody should look at."""
        self._note(WARNING, said)

    @property
    def lines(self) -> list[Line]:
        """The last lines, the oldest first."""
        with self._lock:
            return list(self._lines)

    def keep(self, level: str, said: object) -> None:
        """Adds a line without printing it. If the file cannot be written, that is noted, and the training goes on."""
        line = Line(stamp(), level, visible(said).removesuffix("."))
        with self._lock:
            self._lines.append(line)
            try:
                self._write(f"{line.text(self._as_json)}\n")
            except OSError as error:
                note(f"{self._file} cannot be written any more: {error.strerror or error}.")
                self._file = None

    def _note(self, level: str, said: object) -> None:
        note(f"{time.strftime('%H:%M:%S')} {str(said).removesuffix('.')}.")
        self.keep(level, said)

    def _write(self, text: str) -> None:
        if self._file is not None:
            with open(self._file, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)


class Seldom:
    """Notes that others can provoke: each of a kind at most once an hour, and few kinds in that time.

    Args:
        say: called with a note.
        most: number of kinds in an hour, at most.
    """

    def __init__(self, say: Callable[[str], None], most: int) -> None:
        self._say, self._most, self._said = say, most, OrderedDict[str, float]()

    def __call__(self, kind: str, said: str, now: float) -> None:
        """Notes something, unless that was done a short while ago.

        Args:
            kind: what kind of note it is.
            said: the note.
            now: seconds by a clock that never goes back.
        """
        while self._said and now - next(iter(self._said.values())) >= HOUR:
            self._said.popitem(last=False)
        if kind not in self._said and len(self._said) < self._most:
            self._said[kind] = now
            self._say(said)


def stamp(seconds: float | None = None) -> str:
    """Returns a time in UTC as text, by default now.

    >>> stamp(1794977412.9)
    '2026-11-18T04:50:12Z'
    """
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
