"""What a round leaves: the state, its record, and the end of a training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fednormec.core.algorithm import Server
from fednormec.core.participation import Cohort
from fednormec.core.problem import Metrics
from fednormec.engine.memories import Remembered
from fednormec.errors import Diverged
from fednormec.privacy.mechanism import Plan
from fednormec.privacy.statement import Statement, state

COUNTS = ("computed", "sent", "left_out")  # what a round's record says of its clients in any case
MISSED = "missed"  # and where clients can fail to answer


class Round(NamedTuple):
    """What a simulation knows after a round. Only `released`, the (noisy) sum of messages, and what the server made of
    it have left the clients; the rest is diagnostics. `plan` says what the release cost, None without privacy;
    `releases` is how many there were so far, which can be more than rounds where a run was interrupted. For `in_vain`
    updates in a row, to the last, none was finite. `last`: no round follows. `missed` counts who was asked and did not
    answer, where that can be."""

    number: int
    server: Server
    memories: Remembered
    cohort: Cohort
    left_out: int
    in_vain: int
    metrics: Metrics | None
    released: Tensor
    plan: Plan | None
    releases: int
    last: bool = False
    missed: int | None = None

    @property
    def x(self) -> Tensor:
        return self.server.x

    @property
    def memory(self) -> Tensor:
        """The live block of all clients' memories: copy what is to be kept. Brought here where they lie elsewhere."""
        return self.memories.rows

    @property
    def computed(self) -> int:
        return len(self.cohort.computing)

    @property
    def sent(self) -> int:
        return int(self.cohort.sending.sum())

    @property
    def epsilon(self) -> float | None:
        """The ε spent so far, at the plan's δ; None without privacy."""
        return None if self.plan is None else self.plan.spent(self.releases)

    @property
    def statement(self) -> Statement | None:
        """What may be said if the run ends here; None without privacy. The number of rounds must not follow from what
        was released: for that, `train` has `stop_when`."""
        return None if self.plan is None else state(self.plan, self.releases, max(0, self.releases - self.number))


class Saved(Protocol):
    """What resuming needs of a checkpoint: the state after `round` rounds, `releases` of them paid for."""

    @property
    def path(self) -> Path: ...
    @property
    def round(self) -> int: ...
    @property
    def releases(self) -> int: ...
    @property
    def in_vain(self) -> int: ...
    @property
    def server(self) -> Server: ...

    def fill(self, memories: Remembered) -> None:
        """Gives the clients' memories what they held; raises UserError if they are of another shape."""
        ...


class Resumed(NamedTuple):
    """Where an interrupted run goes on: after `saved`, or from the start (None). `releases` is how many were paid for
    before (default: those that the checkpoint knows); with secure noise, rounds that are computed again come on top."""

    saved: Saved | None
    releases: int | None = None

    @property
    def round(self) -> int:
        return 0 if self.saved is None else self.saved.round

    @property
    def in_vain(self) -> int:
        return 0 if self.saved is None else self.saved.in_vain

    @property
    def spent(self) -> int:
        """How many releases count before the next round."""
        known = 0 if self.saved is None else self.saved.releases
        return known if self.releases is None else self.releases


class End(NamedTuple):
    """How a run ended: `rounds` done in all, and why it ended before its last one (None: it did not)."""

    rounds: int
    why: str | None = None


def _no_round(round: Round, record: Mapping[str, Any]) -> None:
    pass


def _no_end(end: End) -> None:
    pass


class Observer(NamedTuple):
    """Somebody who watches a run: two functions, each of which may be left out.

    Args:
        after: called after each round with the Round and its record, which is in the history by then. The memories of a
            Round are the live block: copy what you want to keep.
        close: called once at the end, however the run ends; an error in the run comes first and is raised after it.

    >>> import fednormec as fn
    >>> seen = []
    >>> early = fn.Observer(after=lambda r, record: seen.append((r.number, "train_loss" in record["not_private"])))
    >>> problem, method = fn.random_quadratic(5, 3), fn.fed_avg(fn.gd(0.1))
    >>> done = fn.train(problem, method, rounds=3, evaluate_every=2, observers=[early])
    >>> seen
    [(1, False), (2, True), (3, True)]
    """

    after: Callable[[Round, Mapping[str, Any]], None] = _no_round
    close: Callable[[End], None] = _no_end


class Watch:
    """All observers of a run. `close` tells each of them the end, once."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers, self._open, self._rounds = observers, list(observers), 0

    def after(self, round: Round, record: Mapping[str, Any]) -> None:
        self._rounds = round.number
        for observer in self._observers:
            observer.after(round, record)

    def close(self, end: End) -> None:
        while self._open:
            self._open.pop(0).close(end)

    def fail(self, error: BaseException) -> None:
        """Closes those that are still open where an error ends the run; it comes first, whatever they raise."""
        while self._open:
            with suppress(Exception):
                self.close(End(self._rounds, str(error) or type(error).__name__))


@contextmanager
def watching(observers: Sequence[Observer]) -> Iterator[Watch]:
    """A run's observers, each closed when the context ends, however that is."""
    watch = Watch(observers)
    try:
        yield watch
    except BaseException as error:
        watch.fail(error)
        raise


class Trained(NamedTuple):
    """The end of a training: the model, the rounds' figures, why it stopped early if it did (`diverged`, or what
    `stop_when` said in `stopped`), and what was kept private.

    A run that stops before its budget would be exceeded has fewer rounds in its history than were asked for.
    """

    model: Any
    x: Tensor
    history: list[dict[str, Any]]
    diverged: Diverged | None
    statement: Statement | None
    stopped: str | None = None


def record(r: Round, measured: Mapping[str, float] | None = None) -> dict[str, Any]:
    """A round's figures, those that look at clients' data or at who took part under "not_private", `measured` too."""
    public, private = r.metrics or Metrics({}, {})
    private = dict(measured or {}) | private
    counts = dict(zip(COUNTS, (r.computed, r.sent, r.left_out), strict=True))
    if r.missed is not None:
        counts[MISSED] = r.missed
    spent = {} if r.plan is None else {"epsilon": r.epsilon, "delta": r.plan.delta, **r.plan.label}
    return {"round": r.number, **spent, **public, "not_private": {**private, **counts}}
