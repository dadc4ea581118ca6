"""Profile of a run: where its time goes, by stage. A stage within another counts for itself alone.

Off by default: then a stage costs one look at a variable.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Literal

Stage = Literal["data", "gradients", "memories", "noise", "secure sum", "server", "evaluation", "disk"]
MEANING: dict[Stage, str] = {
    "data": "reading and dealing out, gathering a tile's examples",
    "gradients": "local steps",
    "memories": "bounding the messages, moving the memories, adding up",
    "noise": "drawing and adding it",
    "secure sum": "keys, masks and shares of secure aggregation",
    "server": "the step of the model",
    "evaluation": "loss and accuracy",
    "disk": "metrics, ledger, checkpoints, model",
}
_NOTHING = nullcontext()


class Profile:
    """Seconds of each stage, of the threads that compute clients and of the one that leads them."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._lock, self._own = threading.Lock(), threading.local()
        self._workers: dict[Stage, float] = dict.fromkeys(MEANING, 0.0)
        self._leader: dict[Stage, float] = dict.fromkeys(MEANING, 0.0)
        self._leading = threading.get_ident()

    def facts(self, workers: int) -> dict[str, Any]:
        """Returns the seconds since the start and by stage.

        What `workers` threads did side by side counts as the time that passed meanwhile.
        """
        wall = time.perf_counter() - self.started
        stages = {name: self._workers[name] / workers + self._leader[name] for name in MEANING}
        return {"seconds": wall, "stages": stages, "other": wall - sum(stages.values())}

    def enter(self) -> list[float]:
        """Returns the open stages of this thread, innermost last: for each the seconds spent in stages within it."""
        if not hasattr(self._own, "open"):
            self._own.open = []
        stack: list[float] = self._own.open
        return stack

    def add(self, stage: Stage, seconds: float) -> None:
        """Adds seconds to a stage, on the side that this thread is on."""
        with self._lock:
            (self._leader if threading.get_ident() == self._leading else self._workers)[stage] += seconds


class _Timed:
    __slots__ = ("_inner", "_profile", "_stage", "_started")

    def __init__(self, profile: Profile, stage: Stage) -> None:
        self._profile, self._stage = profile, stage

    def __enter__(self) -> None:
        self._inner = self._profile.enter()
        self._inner.append(0.0)
        self._started = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        spent = time.perf_counter() - self._started
        self._profile.add(self._stage, spent - self._inner.pop())
        if self._inner:
            self._inner[-1] += spent


_running: Profile | None = None


def stage(name: Stage) -> AbstractContextManager[None]:
    """Counts what happens within for this stage, if a profile is being made."""
    return _NOTHING if _running is None else _Timed(_running, name)


def looking() -> Profile | None:
    """Returns the profile that is being made, if one is: for work that is done, and timed, in other processes."""
    return _running


@contextmanager
def profiled() -> Iterator[Profile]:
    """Counts the seconds of this process' stages, of one run at a time.

    A profile within another takes over until it ends.
    """
    global _running
    before, profile = _running, Profile()
    _running = profile
    try:
        yield profile
    finally:
        _running = before
