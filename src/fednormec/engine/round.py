"""State after a round, its record, and the end of a training."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from fednormec.core.algorithm import Server
from fednormec.core.participation import Cohort
from fednormec.core.problem import Metrics
from fednormec.engine.memories import Remembered
from fednormec.engine.record import APART, COUNTS, MISSED, Record
from fednormec.errors import Diverged, UserError
from fednormec.privacy.records import AnyPlan, for_records
from fednormec.privacy.statement import Statement, state

if TYPE_CHECKING:
    from pandas import DataFrame


class Round(NamedTuple):
    """State of a simulation after a round.

    Only `released` and what the server made of it have left the clients; the rest is diagnostics.

    Attributes:
        number: the round's number, from 1.
        server: the server's state.
        memories: the clients' memories, wherever they lie.
        cohort: who computed, and who sent.
        left_out: number of clients that were left out because their update was non-finite.
        in_vain: number of updates in a row, up to the last, that were all non-finite.
        metrics: the figures of the model; None if it was not evaluated.
        released: the (noisy) sum of messages.
        plan: the mechanism and what its releases cost; None without privacy.
        releases: number of releases so far, which can be more than rounds if the run was interrupted.
        last: whether no round follows.
        missed: number of clients that were asked and did not answer; None where they cannot fail to.
        x: the model after the round.
        average: the average of models that the server's optimiser keeps; None if it keeps none.
    """

    number: int
    server: Server
    memories: Remembered
    cohort: Cohort
    left_out: int
    in_vain: int
    metrics: Metrics | None
    released: Tensor
    plan: AnyPlan | None
    releases: int
    last: bool
    missed: int | None
    x: Tensor
    average: Tensor | None = None

    @property
    def memory(self) -> Tensor:
        """Live block of all clients' memories: copy what you want to keep. Brought here if they lie elsewhere."""
        return self.memories.rows

    @property
    def computed(self) -> int:
        """Number of clients that computed."""
        return len(self.cohort.computing)

    @property
    def sent(self) -> int:
        """Number of clients that sent."""
        return int(self.cohort.sending.sum())

    @property
    def epsilon(self) -> float | None:
        """Privacy spent so far, the ε at the plan's δ; None without privacy."""
        return None if self.plan is None else self.plan.spent(self.releases)

    @property
    def statement(self) -> Statement | None:
        """Statement that holds if the run ends here; None without privacy.

        The number of rounds must not follow from what was released: for that, `train` has `stop_when`.
        """
        return None if self.plan is None else state(self.plan, self.releases, max(0, self.releases - self.number))


class Saved(Protocol):
    """State after `round` rounds, `releases` of them paid for: what resuming needs of a checkpoint."""

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
    """State that an interrupted run resumes from.

    Args:
        saved: the checkpoint; None to resume from the start.
        releases: number of releases that were paid for before; by default those that the checkpoint knows. With secure
            noise, rounds that are computed again come on top.
    """

    saved: Saved | None
    releases: int | None = None

    @property
    def round(self) -> int:
        """Number of rounds that need not be computed again."""
        return 0 if self.saved is None else self.saved.round

    @property
    def in_vain(self) -> int:
        """Number of updates in a row, up to the last, that were all non-finite."""
        return 0 if self.saved is None else self.saved.in_vain

    @property
    def spent(self) -> int:
        """Number of releases that count before the next round."""
        known = 0 if self.saved is None else self.saved.releases
        return known if self.releases is None else max(known, self.releases)


class Trained(NamedTuple):
    """End of a training.

    A run that stops before its budget would be exceeded has fewer rounds in its history than were asked for.

    Attributes:
        model: the last finite model as its user knows it, such as a torch module.
        x: the same as a flat vector.
        history: a record per round.
        diverged: how the model diverged; None if it did not.
        statement: what may be said about privacy; None without it.
        stopped: what `stop_when` said to end the run; None if it did not.
        out: the run folder; None without one.
    """

    model: Any
    x: Tensor
    history: list[Record]
    diverged: Diverged | None
    statement: Statement | None
    stopped: str | None = None
    out: Path | None = None

    def to_frame(self) -> "DataFrame":
        """Returns the history as a pandas DataFrame, a row per round.

        The names of what looks at clients' data, or at who took part, begin with not_private_.
        """
        if find_spec("pandas") is None:
            raise UserError("to_frame needs pandas: pip install pandas")
        from pandas import DataFrame

        return DataFrame([record.flat for record in self.history])


def record(r: Round, measured: Mapping[str, float] | None = None) -> Record:
    """Returns the record of a round; what was `measured` besides is among what is not private."""
    public, private, _ = r.metrics or Metrics({}, {})
    private = dict(measured or {}) | private
    counts = dict(zip(COUNTS, (r.computed, r.sent, r.left_out), strict=True))
    if r.missed is not None:
        counts[MISSED] = r.missed
    spent = {} if r.plan is None else {"epsilon": r.epsilon, "delta": r.plan.delta, **r.plan.label}
    records = for_records(r.plan)
    if records is not None and records is not r.plan:
        spent |= {"record_epsilon": records.spent(r.releases), "record_delta": records.delta}
    return Record({"round": r.number, **spent, **public, APART: {**private, **counts}})
