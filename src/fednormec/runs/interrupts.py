"""Interruption by Ctrl-C or SIGTERM: asked once, work stops where it can resume later; asked twice, at once."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = "stopping after this round; Ctrl-C again stops at once."
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def asked_to_stop(answer: str | None = None) -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether somebody asked to stop, who is told the answer."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread hears signals
        return
    asked = False

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        if answer is not None:
            print(answer, file=sys.stderr, flush=True)

    before = {number: signal.signal(number, hear) for number in SIGNALS}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
