"""Records of a client: local steps that take no more of each record than a bound lets, on batches drawn at random."""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fednormec.core.bounds import STRIP, Adding, Bound, TooLong, clip, smooth_normalize
from fednormec.core.local import LocalUpdate, Moment
from fednormec.core.problem import Problem
from fednormec.core.randomness import generator
from fednormec.core.vectors import plus
from fednormec.errors import BoundBroken, UserError, at_least_one, one_of, positive

NUMBERS = 2**24  # of gradients that are held at a time
PART = 256  # records of a batch that are added up at a time, on average
RATE = 0.1  # at which records are drawn, if nobody says


class Draws(Protocol):
    """Randomness of steps on records: who is in a batch, and the noise on its sum."""

    @property
    def alone(self) -> bool:
        """Whether each record's gradient is computed by itself, so that no digit of it depends on who else is drawn."""
        ...

    def batch(self, client: int, records: int, moment: Moment, step: int) -> np.ndarray:
        """Draws the numbers of the records in a batch, sorted: each is in it independently of all others.

        Args:
            client: number of the client.
            records: number of its records.
            moment: seed and number of the round.
            step: number of the step in the round, from 0.
        """
        ...

    def noised(self, total: Tensor, client: int, moment: Moment, step: int) -> Tensor:
        """Returns the sum (d,) of a batch's bounded gradients with its noise, float64.

        Args:
            total: the sum, float64.
            client: number of the client.
            moment: seed and number of the round.
            step: number of the step in the round, from 0.
        """
        ...

    def expected(self, client: int, records: int) -> float:
        """Returns the number of records that a batch is expected to have, which is public: what a sum is divided by."""
        ...


class PerRecord(NamedTuple):
    """Rule of local steps that bound what they take of each record.

    Args:
        steps: number of steps in a round.
        bound: bound on each record's gradient.
        batch_size: number of records that a batch is expected to have; None: `rate` says it.
        rate: probability with which a record is in a batch; None: `batch_size` over the client's number of records.
        noised: noised(draws) -> the local operator with batches and noise drawn by `draws`.
    """

    steps: int
    bound: Bound
    batch_size: int | None
    rate: float | None
    noised: Callable[[Draws], LocalUpdate]

    def rate_of(self, records: int, whose: str = "a client") -> float:
        """Returns the probability with which a record is in a batch; raises UserError if there are too few records.

        Args:
            records: number of the client's records.
            whose: what errors call the client.
        """
        if self.rate is not None:
            return self.rate
        assert self.batch_size is not None
        if self.batch_size > records:
            raise UserError(f"{whose} has {records:,} records, fewer than a batch of {self.batch_size:,}: take a "
                            "smaller batch (local.batch_size), or a share of the records (local.rate).")  # fmt: skip
        return self.batch_size / records


class Quiet(NamedTuple):
    """Draws of batches alone: no noise, and so no privacy.

    Args:
        rule: how likely a record is to be in a batch.
    """

    rate_of: Callable[[int], float]
    alone: bool = False

    def batch(self, client: int, records: int, moment: Moment, step: int) -> np.ndarray:
        source = generator(moment.seed, "records", moment.round, client, step)
        return np.flatnonzero(source.random(records) < self.rate_of(records))

    def noised(self, total: Tensor, client: int, moment: Moment, step: int) -> Tensor:
        return total

    def expected(self, client: int, records: int) -> float:
        return self.rate_of(records) * records


@runtime_checkable
class Recorded(Protocol):
    """Problem that can tell whether each record has a gradient of its own."""

    def require_records(self) -> None:
        """Raises UserError if it has not, such as where examples enter one another's gradients."""
        ...


@runtime_checkable
class Named(Protocol):
    """Problem that knows what its clients are called."""

    @property
    def client_names(self) -> Sequence[str]:
        """Name of each client."""
        ...


@runtime_checkable
class Grouped(Protocol):
    """Problem in which a record can be several examples, such as all those of one person."""

    @property
    def grouped(self) -> bool:
        """True if any record is more than one example."""
        ...

    @property
    def record_sizes(self) -> np.ndarray:
        """Number of records of each client, (M,) int64."""
        ...

    def examples_of(self, client: int, records: np.ndarray) -> np.ndarray:
        """Returns the examples of some records, (n, b), padded with -1."""
        ...


@runtime_checkable
class SumsRecords(Protocol):
    """Problem that adds the bounded gradients of records in a way of its own, faster than one row for each."""

    def record_sum(self, x: Tensor, client: int, records: np.ndarray, bound: Bound) -> Tensor:
        """Returns the sum (d,), float64, of the bounded gradients of a client's records at x, a vector (d,).

        A record's gradient is the mean over its examples, without what `apart_from_data` gives.
        """
        ...

    def apart_from_data(self, x: Tensor) -> Tensor | None:
        """Returns the part of every client's gradient at x that no data enter, (d,); None if there is none."""
        ...


def record_sizes(problem: Problem) -> np.ndarray:
    """Returns the number of records of each client: of its examples, where the problem does not group them."""
    return problem.record_sizes if isinstance(problem, Grouped) else problem.client_sizes


def part_of(records: int, rate: float) -> int:
    """Returns how many neighbouring records a batch is added up of at a time, about 256 of which it has.

    A record that is drawn moves those behind it by a place, and so the rounding of what is added with them: it moves
    nothing beyond its part, since that begins and ends at the same records whoever is drawn.
    """
    return min(records, math.ceil(PART / rate))


def examples_of(problem: Problem, client: int, records: np.ndarray) -> np.ndarray:
    """Returns the examples of some of a client's records, (n, b), padded with -1."""
    return problem.examples_of(client, records) if isinstance(problem, Grouped) else records[:, None]


def apart_from_data(problem: Problem, x: Tensor) -> Tensor | None:
    """Returns the part of every client's gradient at x that no data enter and no bound cuts; None if there is none."""
    return problem.apart_from_data(x) if isinstance(problem, SumsRecords) else None


def batch_sum(
    problem: Problem, x: Tensor, client: int, batch: np.ndarray, bound: Bound, rate: float, alone: bool = False
) -> Tensor:
    """Returns the sum of the bounded gradients of a batch that was drawn, float64 (d,), part by part.

    Gradients that are computed together can differ in their last digits by who is beside them, and a server that makes
    up models can make much of these digits; `alone` they cannot.

    Args:
        problem: the problem.
        x: a vector (d,).
        client: number of the client.
        batch: numbers of the records that are in it, sorted.
        bound: bound on each record's gradient.
        rate: probability with which a record is in it.
        alone: whether each record's gradient is computed by itself.
    """
    records = int(record_sizes(problem)[client])
    part = part_of(records, rate)
    total = torch.zeros(problem.dim, dtype=torch.float64, device=x.device)
    ends = np.arange(1, len(batch)) if alone else np.searchsorted(batch, np.arange(part, records, part))
    for some in np.split(batch, ends):
        if len(some):
            total += bounded_sum(problem, x, client, some, bound)
    return total


def bounded_sum(problem: Problem, x: Tensor, client: int, records: np.ndarray, bound: Bound) -> Tensor:
    """Returns the sum of the bounded gradients of some of a client's records, float64 (d,).

    Args:
        problem: the problem.
        x: a vector (d,).
        client: number of the client.
        records: numbers of its records.
        bound: bound on each record's gradient.
    """
    if not len(records):
        return torch.zeros(problem.dim, dtype=torch.float64, device=x.device)
    if isinstance(problem, SumsRecords):
        return problem.record_sum(x, client, records, bound)
    return sum_of_rows(problem, x, client, records, bound)


def sum_of_rows(problem: Problem, x: Tensor, client: int, records: np.ndarray, bound: Bound) -> Tensor:
    """Returns what `bounded_sum` does, by a row for each record's gradient; for any problem.

    Rows are bounded and added as messages are: the bound holds for the numbers that are really added.
    """
    total = torch.zeros(problem.dim, dtype=torch.float64, device=x.device)
    size = max(1, min(STRIP, NUMBERS // problem.dim))
    for part in np.split(records, range(size, len(records), size)):
        some = examples_of(problem, client, part)
        messages = bound.scale_(problem.grad(x, np.full(len(some), client), some))
        try:
            total += messages.sum(x.new_ones(len(some)), Adding(longest=bound.radius))
        except TooLong as long:
            raise BoundBroken(f"a record's gradient of length {long.length:.6g} is beyond its bound "
                              f"{bound.name}: nothing of this round was released.") from None  # fmt: skip
    return total


def dp_sgd(
    step: float,
    steps: int = 1,
    *,
    batch_size: int | None = None,
    rate: float | None = None,
    bound: Literal["clip", "normalize"] = "clip",
    tau: float = 1.0,
    alpha: float | None = None,
) -> LocalUpdate:
    """Stochastic gradient with each record's gradient bounded (DP-SGD, Abadi et al. 2016, arXiv 1607.00133).

    y <- y - (step/T) (sum over a batch of bound(record's gradient) + noise) / (expected size of a batch), T times.
    Each record is in a batch independently, with the same probability; a batch may be empty. The noise is that of
    privacy.unit = "record"; without it there is none, and nothing is private. A record is an example, or all examples
    of a person (data.person): its gradient is then their mean.

    Args:
        step: sum of all steps, the paper's gamma.
        steps: number of steps T.
        batch_size: number of records that a batch is expected to have; the probability is this over the number of the
            client's records. None: `rate` says it.
        rate: probability with which a record is in a batch, in (0, 1]; None: `batch_size` says it, or it is 0.1.
        bound: "clip" to norm tau, or "normalize" to tau v/(alpha + ||v||).
        tau: largest norm of a record's gradient, which is public: never take it from the data.
        alpha: smoothing, for "normalize"; None: 0.01.
    """
    positive("the local step", step)
    at_least_one("steps", steps)
    one_of("bound", bound, ("clip", "normalize"))
    if batch_size is not None and rate is not None:
        raise UserError("give dp_sgd either batch_size (how many records a batch is expected to have) or rate (the "
                        "share of a client's records), not both.")  # fmt: skip
    if batch_size is not None:
        at_least_one("batch_size", batch_size)
    elif rate is None:
        rate = RATE
    if rate is not None and not 0 < rate <= 1:
        raise UserError(f"the rate at which records are drawn must lie in (0, 1], not {rate}.")
    if alpha is not None and bound == "clip":
        raise UserError("alpha is for bound = 'normalize': leave it out.")
    each = clip(tau) if bound == "clip" else smooth_normalize(0.01 if alpha is None else alpha, tau)
    drawn = f"batch_size={batch_size}" if rate is None else f"rate={rate:g}"
    name = f"dp_sgd({step:g}, steps={steps}, {drawn}, {each.name})"

    def with_draws(draws: Draws) -> LocalUpdate:
        def run(problem: Problem, x: Tensor, ids: np.ndarray, moment: Moment, correction: Tensor | None) -> Tensor:
            sizes, rows = record_sizes(problem)[ids], x.new_empty(len(ids), problem.dim)
            for r, (client, size) in enumerate(zip(ids.tolist(), sizes.tolist(), strict=True)):
                start, total = (x if x.ndim == 1 else x[r]), torch.zeros_like(rows[r])
                for t in range(steps):
                    y = start if t == 0 else plus(start, total, -step * moment.factor / steps)
                    batch, expected = draws.batch(client, size, moment, t), draws.expected(client, size)
                    summed = batch_sum(problem, y, client, batch, each, expected / size, draws.alone)
                    total += draws.noised(summed, client, moment, t).div_(expected).to(x.dtype)
                    for more in (apart_from_data(problem, y), None if correction is None else correction[r]):
                        if more is not None:
                            total += more
                rows[r] = total.div_(steps)
            return rows

        return LocalUpdate(name, step, run, visits)

    def visits(size: int) -> int:
        return round(steps * (min(batch_size, size) if batch_size is not None else (rate or 1.0) * size))

    rule = PerRecord(steps, each, batch_size, rate, with_draws)
    return with_draws(Quiet(rule.rate_of))._replace(per_record=rule)
