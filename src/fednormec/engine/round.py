"""What a round leaves: the state, its record, and the end of a training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fednormec.core.algorithm import Server
from fednormec.core.participation import Cohort
from fednormec.core.problem import Metrics
from fednormec.engine.memories import Remembered
from fednormec.engine.record import APART, COUNTS, MISSED, Record
from fednormec.errors import Diverged
from fednormec.privacy.mechanism import Plan
from fednormec.privacy.statement import Statement, state


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


class Trained(NamedTuple):
    """The end of a training: the model, the rounds' figures, why it stopped early if it did (`diverged`, or what
    `stop_when` said in `stopped`), and what was kept private.

    A run that stops before its budget would be exceeded has fewer rounds in its history than were asked for.
    """

    model: Any
    x: Tensor
    history: list[Record]
    diverged: Diverged | None
    statement: Statement | None
    stopped: str | None = None


def record(r: Round, measured: Mapping[str, float] | None = None) -> Record:
    """The record of a round, with what was `measured` besides among what is not private."""
    public, private = r.metrics or Metrics({}, {})
    private = dict(measured or {}) | private
    counts = dict(zip(COUNTS, (r.computed, r.sent, r.left_out), strict=True))
    if r.missed is not None:
        counts[MISSED] = r.missed
    spent = {} if r.plan is None else {"epsilon": r.epsilon, "delta": r.plan.delta, **r.plan.label}
    return Record({"round": r.number, **spent, **public, APART: {**private, **counts}})
