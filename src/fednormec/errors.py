"""Errors and notes for a person, and text of others made fit for a terminal and a page.

Here is how a run can end early, and the checks that find a mistake.
"""

import difflib
import os
import sys
import unicodedata
from collections.abc import Iterable
from contextlib import suppress


class UserError(Exception):
    """Mistake of a user: says what was expected, what came and what to do. The command line exits with 2."""


class Stopped(UserError):
    """Interruption by Ctrl-C after which the same command can resume. The command line exits with 130, as shells do."""


class StoppedAtOnce(Stopped):
    """Interruption by a second Ctrl-C: threads may still be at work, and nobody waits for them."""


class BoundBroken(UserError):
    """Error of a method that, in a private run, sent more than its bound allows. Nothing of that round was released."""


class NotWritten(UserError):
    """Refusal of the system to write a file: a full disk, a read-only folder."""


class WorkerLost(UserError):
    """Loss of a process elsewhere that computed for this one, with what its clients remembered."""


class Diverged(Exception):
    """Divergence: the model, or every client's loss or update, became non-finite. The rounds before stand.

    Args:
        round: number of the round in which that happened.
        reason: what became non-finite, and what may help.
    """

    def __init__(self, round: int, reason: str) -> None:
        super().__init__(f"the model diverged in round {round}: {reason}")
        self.round = round


def positive(name: str, value: float) -> float:
    """Returns the value; raises UserError if it is not a positive finite number."""
    if not 0 < value < float("inf"):
        raise UserError(f"{name} must be a positive number, not {value}.")
    return value


def non_negative(name: str, value: float) -> float:
    """Returns the value; raises UserError if it is neither zero nor a positive finite number."""
    if not 0 <= value < float("inf"):
        raise UserError(f"{name} must be zero or a positive number, not {value}.")
    return value


def at_least_one(name: str, value: int) -> int:
    """Returns the value; raises UserError if it is below 1."""
    if not value >= 1:
        raise UserError(f"{name} must be at least 1, not {value}.")
    return value


def one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    """Returns the value; raises UserError if it is none of the choices."""
    if value not in choices:
        raise UserError(f"{name} must be {' or '.join(repr(c) for c in choices)}, not {value!r}.")
    return value


def require_room(what: str, size: int, advice: str) -> None:
    """Raises UserError if something is larger than the machine's memory.

    Without it the system would end the process without a word. Passes if the system does not say how much there is.
    """
    if not hasattr(os, "sysconf"):
        return
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > there:
        raise UserError(f"{what} would take {size / 1e9:,.0f} GB, and this machine has {there / 1e9:,.0f}: {advice}.")


def known(what: str, name: str, names: Iterable[str]) -> None:
    """Raises UserError if `name` is not one of `names`; the error says which is nearest."""
    names = list(names)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(names) or 'none'}."
        raise UserError(f"unknown {what} '{name}'; {hint}")


def visible(text: object, most: int | None = None) -> str:
    """Returns the text in one line, fit for a terminal.

    Control and format characters, line breaks and what stands for no character become escapes; letters and spaces of
    any script stay. With `most` the text is cut to that number of characters.

    >>> visible("a\\x1b[2J\\nb\\u202e"), visible("naïve 文字"), visible("abcdef", 4)
    ('a\\\\x1b[2J\\\\nb\\\\u202e', 'naïve 文字', 'abc…')
    """
    given = str(text) if most is None else str(text)[: most + 1]
    shown = "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else repr(c)[1:-1] for c in given)
    return shown if most is None or len(shown) <= most else f"{shown[: most - 1]}…"


def visible_lines(text: object) -> str:
    """Returns a text of several lines, each of them `visible`."""
    return "\n".join(map(visible, str(text).split("\n")))


def note(said: object) -> None:
    """Prints a note of one line on stderr; nothing in `said` can begin another line."""
    with suppress(OSError, ValueError):  # a full disk, a terminal that is gone: what goes on is worth more
        print(f"note: {visible(said)}", file=sys.stderr, flush=True)
