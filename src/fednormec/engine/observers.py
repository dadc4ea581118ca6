"""Observers of a run, told after each round and at the end."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from fednormec.engine.record import APART, Record
from fednormec.errors import UserError

if TYPE_CHECKING:
    from fednormec.engine.round import Round


class End(NamedTuple):
    """End of a run, as observers hear of it.

    Args:
        rounds: number of rounds done.
        why: why it ended before its last round; None if it did not.
    """

    rounds: int
    why: str | None = None


def _no_round(round: "Round", record: Record) -> None:
    pass


def _no_end(end: End) -> None:
    pass


class Observer(NamedTuple):
    """Pair of functions that watch a run; either may be left out.

    What they raise ends the run.

    Args:
        after: called after each round with the Round and its record. The memories of a Round are the live block: copy
            what you want to keep.
        close: called once with the End of a run that had begun, however it ends. If an error ends the run, it is raised
            after all observers are closed, and what they raise then is dropped.

    >>> import fednormec as fn
    >>> problem, seen = fn.random_quadratic(5, 3), []
    >>> look = fn.Observer(after=lambda r, record: seen.append((r.number, record.evaluated)))
    >>> done = fn.train(problem, fn.fed_avg(fn.gd(0.1)), rounds=3, evaluate_every=2, observers=[look])
    >>> seen
    [(1, False), (2, True), (3, True)]
    """

    after: Callable[["Round", Record], None] = _no_round
    close: Callable[[End], None] = _no_end


class Watch:
    """Observers of one run; each is closed once."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers, self._rounds = list(observers), 0
        wrong = [one for one in self._observers if not (hasattr(one, "after") and hasattr(one, "close"))]
        if wrong:
            kind = type(wrong[0]).__name__
            raise UserError(f"observers is a list of fn.Observer(after=..., close=...), not of {kind}.")
        self._open = list(self._observers)

    def after(self, round: "Round", record: Record) -> None:
        """Tells all observers of a round."""
        self._rounds = round.number
        for observer in self._observers:
            observer.after(round, Record(record | {APART: dict(record.apart)}))  # theirs to change

    def close(self, why: str | None = None) -> None:
        """Closes all that are open, after the last round that they were told of."""
        while self._open:
            self._open.pop(0).close(End(self._rounds, why))


@contextmanager
def watching(observers: Sequence[Observer]) -> Iterator[Watch]:
    """Closes all observers when the context ends. An error that ends it comes first, whatever they raise."""
    watch = Watch(observers)
    try:
        yield watch
    except BaseException as error:
        while watch._open:
            with suppress(BaseException):
                watch.close(str(error) or type(error).__name__)
        raise
    watch.close()
