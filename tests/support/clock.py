"""A clock that goes when a test says so."""

import time


class Clock:
    """Stands in for `time` in a module that reads its clocks: `monkeypatch.setattr(module, "time", Clock())`.
    Who sleeps does so for a moment, so that a loop which waits for the clock goes on looking."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        time.sleep(0.002)
