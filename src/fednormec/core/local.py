"""Local operators T_i: rows of updates P_i = (x - T_i(x)) / step, the mean gradient along a client's path."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednormec.core.problem import Problem
from fednormec.core.randomness import generator
from fednormec.core.schedules import Schedule, constant
from fednormec.core.vectors import plus
from fednormec.errors import at_least_one, one_of, positive

if TYPE_CHECKING:
    from fednormec.core.records import PerRecord


class Moment(NamedTuple):
    """Address of a round's local randomness, and how long its local steps are.

    Args:
        seed: seed of the run.
        round: number of the round.
        factor: factor on the local steps, by their schedule.
    """

    seed: int
    round: int
    factor: float = 1.0


class LocalUpdate(NamedTuple):
    """Local operator T_i, by its updates P_i = (x - T_i(x)) / step.

    Args:
        name: what reports and errors call it.
        step: sum of the steps inside, the paper's gamma: T steps are of size step/T each.
        run: run(problem, x, ids, moment, correction) -> P_i of each id, rows (B, d). `correction`, rows or None, is
            added to every local gradient (control variates).
        visits: visits(n) is the number of examples of which a client that has n takes a gradient; one that it takes
            twice counts twice.
        schedule: factor on the step by the round, which `run` keeps to; `scheduled` sets both.
        per_record: how its steps bound what they take of each record, and the same steps with noise; None: they do not.
    """

    name: str
    step: float
    run: Callable[[Problem, Tensor, np.ndarray, Moment, Tensor | None], Tensor]
    visits: Callable[[int], int] = lambda n: n
    schedule: Schedule = constant()
    per_record: "PerRecord | None" = None

    def step_in(self, number: int) -> float:
        """Returns the step in the round with this number, from 1."""
        return self.step * self.schedule.factor(number)

    def scheduled(self, schedule: Schedule) -> "LocalUpdate":
        """Returns the same operator with its step on a schedule.

        Args:
            schedule: factor by the round, such as fn.schedule("cosine", rounds=100).
        """

        def run(problem: Problem, x: Tensor, ids: np.ndarray, moment: Moment, correction: Tensor | None) -> Tensor:
            now = moment._replace(factor=moment.factor * schedule.factor(moment.round))
            return self.run(problem, x, ids, now, correction)

        own = self.per_record
        if own is not None:
            noised = own.noised
            own = own._replace(noised=lambda draws: noised(draws).scheduled(schedule))
        return self._replace(name=f"{self.name}, {schedule.name}", run=run, schedule=schedule, per_record=own)


class Batches(NamedTuple):
    """Examples that each client visits, in order: (B, T, b), padded with -1; client r stops after `steps[r]`."""

    examples: np.ndarray
    steps: np.ndarray


def gd(step: float, steps: int = 1) -> LocalUpdate:
    """Gradient descent: T full-gradient steps of size step/T. With one step P_i is the gradient at x.

    Args:
        step: sum of all steps, the paper's gamma.
        steps: number of steps T.
    """
    positive("the local step", step)
    at_least_one("steps", steps)

    def run(problem: Problem, x: Tensor, ids: np.ndarray, moment: Moment, correction: Tensor | None) -> Tensor:
        total = _corrected(problem.grad(x, ids), correction)
        for _ in range(steps - 1):
            y = plus(x, total, -step * moment.factor / steps)
            total.add_(_corrected(problem.grad(y, ids), correction))
        return total if steps == 1 else total.div_(steps)

    return LocalUpdate(f"gd({step:g}, steps={steps})", step, run, lambda n: steps * n)


def ig(
    step: float, batch_size: int = 1, order: Literal["cyclic", "reshuffle"] = "cyclic", epochs: int = 1
) -> LocalUpdate:
    """Incremental gradient: E passes over the client's N components, E N steps of size step/(E N).

    order="cyclic" with one epoch is the paper's operator; a fresh order in every epoch ("reshuffle") and several epochs
    are ours, outside its theorems.

    Args:
        step: sum of all steps, the paper's gamma.
        batch_size: size of a component: an example, or a fixed mini-batch of so many neighbouring examples (equal sizes
            keep f_i = mean of components exact).
        order: "cyclic", or "reshuffle" for a fresh order in every epoch.
        epochs: number of passes E.
    """
    positive("the local step", step)
    at_least_one("batch_size", batch_size)
    at_least_one("epochs", epochs)
    one_of("order", order, ("cyclic", "reshuffle"))

    def visits(size: int, moment: Moment, client: int) -> list[np.ndarray]:
        if order == "cyclic":
            return _cut(np.arange(size), batch_size) * epochs
        rng = generator(moment.seed, "local order", moment.round, client)
        return [batch for _ in range(epochs) for batch in _cut(rng.permutation(size), batch_size)]

    name = f"ig({step:g}, batch_size={batch_size}, order={order}, epochs={epochs})"
    return LocalUpdate(name, step, _stochastic(step, visits), lambda n: epochs * n)


def sgd(step: float, steps: int = 1, batch_size: int = 32, order: Literal["fresh", "passes"] = "fresh") -> LocalUpdate:
    """Stochastic gradient: mini-batch steps of size step/steps, drawn by reshuffling. Outside the theorems.

    No example comes twice within a pass of n // batch_size batches. A client with fewer examples than `batch_size` uses
    all it has in each step.

    Args:
        step: sum of all steps, the paper's gamma.
        steps: number of steps.
        batch_size: number of examples in a mini-batch.
        order: "fresh" begins a new pass in every round. "passes" goes on where the round before it stopped, as a
            trainer does that counts epochs: with n // batch_size rounds of one step a client sees its data once.
    """
    positive("the local step", step)
    at_least_one("steps", steps)
    at_least_one("batch_size", batch_size)
    one_of("order", order, ("fresh", "passes"))

    def fresh(size: int, moment: Moment, client: int) -> list[np.ndarray]:
        rng, batch = generator(moment.seed, "local order", moment.round, client), min(batch_size, size)
        per_pass = size // batch  # an incomplete last batch is left for another pass
        orders = [rng.permutation(size)[: per_pass * batch] for _ in range(math.ceil(steps / per_pass))]
        return [part for order in orders for part in _cut(order, batch)][:steps]

    def passes(size: int, moment: Moment, client: int) -> list[np.ndarray]:
        batch = min(batch_size, size)
        first, per_pass = (moment.round - 1) * steps, size // batch
        orders = {
            number: _order_of_pass(moment.seed, number, client, size)
            for number in range(first // per_pass, (first + steps - 1) // per_pass + 1)
        }
        starts = [(k // per_pass, k % per_pass * batch) for k in range(first, first + steps)]
        return [orders[number][start : start + batch] for number, start in starts]

    name = f"sgd({step:g}, steps={steps}, batch_size={batch_size}{'' if order == 'fresh' else ', order=passes'})"
    run = _stochastic(step, fresh if order == "fresh" else passes)
    return LocalUpdate(name, step, run, lambda n: steps * min(batch_size, n))


@lru_cache(maxsize=64)  # every round of a pass asks for it
def _order_of_pass(seed: int, number: int, client: int, size: int) -> np.ndarray:
    order = generator(seed, "local pass", number, client).permutation(size)
    order.setflags(write=False)
    return order


def _stochastic(
    step: float, visits: Callable[[int, Moment, int], list[np.ndarray]]
) -> Callable[[Problem, Tensor, np.ndarray, Moment, Tensor | None], Tensor]:
    def run(problem: Problem, x: Tensor, ids: np.ndarray, moment: Moment, correction: Tensor | None) -> Tensor:
        sizes = problem.client_sizes[ids]
        plan = _stack([visits(int(n), moment, int(i)) for n, i in zip(sizes, ids, strict=True)])
        return _descend(problem, x, ids, plan, step * moment.factor, correction)

    return run


def _descend(
    problem: Problem, x: Tensor, ids: np.ndarray, plan: Batches, step: float, correction: Tensor | None
) -> Tensor:
    """Returns the mean of the gradients met on the way, y <- y - (step/T_i)(gradient + correction)."""
    counts = torch.as_tensor(plan.steps, dtype=x.dtype, device=x.device)[:, None]
    total = _corrected(problem.grad(x, ids, plan.examples[:, 0]), correction)
    for t in range(1, plan.examples.shape[1]):
        y = plus(x, total / counts, -step)
        active = np.flatnonzero(plan.steps > t)
        if len(active) == len(ids):
            total.add_(_corrected(problem.grad(y, ids, plan.examples[:, t]), correction))
        else:
            rows = torch.as_tensor(active, device=x.device)
            g = problem.grad(y[rows], ids[active], plan.examples[active, t])
            total.index_add_(0, rows, _corrected(g, None if correction is None else correction[rows]))
    return total.div_(counts)


def _corrected(gradients: Tensor, correction: Tensor | None) -> Tensor:
    return gradients if correction is None else gradients.add_(correction)


def _cut(order: np.ndarray, batch_size: int) -> list[np.ndarray]:
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def _stack(visits: list[list[np.ndarray]]) -> Batches:
    count = np.array([len(batches) for batches in visits])
    width = max(len(batch) for batches in visits for batch in batches)
    examples = np.full((len(visits), count.max(), width), -1, dtype=np.int64)
    for row, batches in enumerate(visits):
        for t, batch in enumerate(batches):
            examples[row, t, : len(batch)] = batch
    return Batches(examples, count)
