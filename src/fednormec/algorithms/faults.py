"""Faults of clients that break or cheat, for simulations: what they make of their update before it is bounded."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fednormec.core.local import LocalUpdate, Moment
from fednormec.core.problem import Problem
from fednormec.errors import at_least_one, one_of

HUGE = 1e30
FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "not_a_number": lambda u: torch.full_like(u, torch.nan),
    "infinite": lambda u: torch.full_like(u, -torch.inf),
    "zero": torch.zeros_like,
    "huge": lambda u: u.sign().mul_(HUGE),
    "reversed": torch.neg,
    "short": lambda u: u[:-1],
}


@dataclass(frozen=True)
class Faults:
    """Settings of [faults]: some clients, drawn once, break in every round.

    Args:
        kind: what becomes of their update: it is not a number, infinite, zero, 1e30 in every coordinate (huge), turned
            around (reversed), or lacks a coordinate (short).
        clients: number of clients that break.
    """

    kind: Literal["not_a_number", "infinite", "zero", "huge", "reversed", "short"]
    clients: int = 1

    def __post_init__(self) -> None:
        one_of("kind", self.kind, tuple(FAULTS))
        at_least_one("clients", self.clients)


def faulty(local: LocalUpdate, fault: Callable[[Tensor], Tensor], clients: Collection[int]) -> LocalUpdate:
    """Returns the local operator with `fault` done to the updates of some clients.

    A result of another shape is no update: that client is skipped and counted, like one whose update is non-finite.

    Args:
        local: local operator.
        fault: fault(update) -> what becomes of one client's update (d,).
        clients: numbers of the clients that break.

    >>> from fednormec import gd, random_quadratic
    >>> broken = faulty(gd(0.1), FAULTS["short"], [2])
    >>> problem = random_quadratic(4, 3)
    >>> rows = broken.run(problem, torch.ones(3, dtype=torch.float64), np.arange(4), Moment(0, 1), None)
    >>> rows.isfinite().all(dim=1).tolist()
    [True, True, False, True]
    """
    chosen = np.array(sorted(clients))

    def run(problem: Problem, x: Tensor, ids: np.ndarray, moment: Moment, correction: Tensor | None) -> Tensor:
        rows = local.run(problem, x, ids, moment, correction)
        for place in np.flatnonzero(np.isin(ids, chosen)):
            made = fault(rows[place].clone())
            rows[place] = made if made.shape == rows[place].shape else torch.nan
        return rows

    own = local.per_record
    if own is not None:
        noised = own.noised
        own = own._replace(noised=lambda draws: faulty(noised(draws), fault, clients))
    return local._replace(name=f"{local.name} with {len(chosen)} faulty clients", run=run, per_record=own)
