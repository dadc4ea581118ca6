"""The command as a process of its own: how it is called, and what is waited for or read while it runs."""

import os
import sys
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def command_line(*arguments: object) -> list[str]:
    """The words that start it."""
    return [sys.executable, "-m", "fednormec", *map(str, arguments)]


def until(holds: Callable[[], Found], seconds: float = 90.0) -> Found:
    """What is found as soon as there is something; the seconds only keep a broken test from hanging."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)
    return found


def read_terminal(terminal: int) -> bytes:
    """All that is written to a terminal until nobody is at its other end any more."""
    seen = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # how Linux says so
            return seen
        if not piece:
            return seen
        seen += piece
