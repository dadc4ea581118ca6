"""What is said to a person: how a run can end early, the checks that find a mistake, notes, and text of others made fit
for a terminal and a page."""

import difflib
import os
import sys
import unicodedata
from collections.abc import Iterable


class UserError(Exception):
    """A user's mistake: says what was expected, what came and what to do. The command line exits with 2."""


class Stopped(UserError):
    """Ctrl-C, where the same command can go on. The command line exits with 130, as shells do."""


class StoppedAtOnce(Stopped):
    """Ctrl-C twice: threads may still be at work, and nobody waits for them."""


class BoundBroken(UserError):
    """A method that, in a private run, sent what its bound does not allow: nothing of that round was released."""


class NotWritten(UserError):
    """A file that the system would not take: a full disk, a folder that is read-only."""


class WorkerLost(UserError):
    """A process elsewhere that computed for this one and is gone, with what its clients remembered."""


class Diverged(Exception):
    """In `round` the model, or every client's loss or update, stopped being finite; the rounds before it stand."""

    def __init__(self, round: int, reason: str) -> None:
        super().__init__(f"the model diverged in round {round}: {reason}")
        self.round = round


def positive(name: str, value: float) -> float:
    """The value, if it is a positive finite number."""
    if not 0 < value < float("inf"):
        raise UserError(f"{name} must be a positive number, not {value}.")
    return value


def non_negative(name: str, value: float) -> float:
    """The value, if it is zero or a positive finite number."""
    if not 0 <= value < float("inf"):
        raise UserError(f"{name} must be zero or a positive number, not {value}.")
    return value


def at_least_one(name: str, value: int) -> int:
    """The value, if it counts at least one."""
    if not value >= 1:
        raise UserError(f"{name} must be at least 1, not {value}.")
    return value


def one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    """The value, if it is one of the choices."""
    if value not in choices:
        raise UserError(f"{name} must be {' or '.join(repr(c) for c in choices)}, not {value!r}.")
    return value


def require_room(what: str, size: int, advice: str) -> None:
    """Says so where something is larger than the machine's memory: the system would end the process without a word."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > there:
        raise UserError(f"{what} would take {size / 1e9:,.0f} GB, and this machine has {there / 1e9:,.0f}: {advice}.")


def known(what: str, name: str, names: Iterable[str]) -> None:
    """Passes if `name` is one of `names`; otherwise the error says which is nearest."""
    names = list(names)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(names) or 'none'}."
        raise UserError(f"unknown {what} '{name}'; {hint}")


def visible(text: object, most: int | None = None) -> str:
    """The text in one line, with escapes for control and format characters, line breaks and what stands for no
    character; letters and spaces of any script stay. With `most` it ends after so many characters.

    >>> visible("a\\x1b[2J\\nb\\u202e"), visible("naïve 文字"), visible("abcdef", 4)
    ('a\\\\x1b[2J\\\\nb\\\\u202e', 'naïve 文字', 'abc…')
    """
    given = str(text) if most is None else str(text)[: most + 1]
    shown = "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else repr(c)[1:-1] for c in given)
    return shown if most is None or len(shown) <= most else f"{shown[: most - 1]}…"


def visible_lines(text: object) -> str:
    """A text of several lines that are its own."""
    return "\n".join(map(visible, str(text).split("\n")))


def note(said: object) -> None:
    """One line on stderr, which what is said cannot leave."""
    print(f"note: {visible(said)}", file=sys.stderr, flush=True)
