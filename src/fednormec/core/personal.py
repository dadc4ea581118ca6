"""Models of clients' own: local steps that are pulled to a common centre, and figures of each client's own model."""

from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
from torch import Tensor

from fednormec.core.bounds import Bound
from fednormec.core.problem import ByClient, Metrics, Problem
from fednormec.core.records import Grouped, apart_from_data, bounded_sum, examples_of, record_sizes
from fednormec.core.vectors import representable


@runtime_checkable
class Personal(Protocol):
    """Problem that can measure a model of each client's own."""

    def evaluate_own(self, models: Tensor) -> ByClient:
        """Returns a figure of each client's own model on that client's examples.

        On those that were held out of them, where it is known whose these are; else on those that it trains on.

        Args:
            models: a model for each client, (M, d).
        """
        ...


@final
@dataclass(frozen=True, eq=False, repr=False)
class Pulled:
    """Problem whose clients are pulled to a centre c: f_i(y) + (strength/2) ||y - c||^2.

    No data enter the pull, so no bound on a record cuts it and no noise is counted for it.

    Args:
        problem: the problem, f_i.
        centre: c, a vector (d,).
        strength: strength of the pull.
    """

    problem: Problem
    centre: Tensor
    strength: float

    @property
    def dim(self) -> int:
        return self.problem.dim

    @property
    def num_clients(self) -> int:
        return self.problem.num_clients

    @property
    def tile(self) -> int:
        return self.problem.tile

    @property
    def client_sizes(self) -> np.ndarray:
        return self.problem.client_sizes

    def init(self, rng: np.random.Generator) -> Tensor:
        return self.problem.init(rng)

    def grad(self, x: Tensor, ids: np.ndarray, examples: np.ndarray | None = None) -> Tensor:
        strength = representable(self.strength, x.dtype)
        return self.problem.grad(x, ids, examples).add_(x - self.centre, alpha=strength)

    def evaluate(self, x: Tensor) -> Metrics:
        return self.problem.evaluate(x)

    def named(self, x: Tensor) -> dict[str, Tensor]:
        return self.problem.named(x)

    def model(self, x: Tensor) -> Any:
        return self.problem.model(x)

    # records

    @property
    def grouped(self) -> bool:
        return isinstance(self.problem, Grouped) and self.problem.grouped

    @property
    def record_sizes(self) -> np.ndarray:
        return record_sizes(self.problem)

    def examples_of(self, client: int, records: np.ndarray) -> np.ndarray:
        return examples_of(self.problem, client, records)

    def record_sum(self, x: Tensor, client: int, records: np.ndarray, bound: Bound) -> Tensor:
        return bounded_sum(self.problem, x, client, records, bound)

    def apart_from_data(self, x: Tensor) -> Tensor:
        inner, pull = apart_from_data(self.problem, x), (x - self.centre) * representable(self.strength, x.dtype)
        return pull if inner is None else pull.add_(inner)
