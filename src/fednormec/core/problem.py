"""Problem: M functions f_i on flat vectors, every client weighing 1/M."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor


class Interval(NamedTuple):
    """Number known to lie in [lower, upper]; both ends are the same where it is known exactly."""

    lower: float
    upper: float


class ByClient(NamedTuple):
    """Figure of one model for each client: not private.

    Attributes:
        name: name of the figure, such as accuracy.
        higher: whether a higher one is better.
        values: the figure of every client for which it is finite, from the worst to the best.
        held_out: whether it is on examples that were held out of the clients' own; else on those they train on.
    """

    name: str
    higher: bool
    values: tuple[float, ...]
    held_out: bool = False

    @classmethod
    def of(cls, name: str, higher: bool, values: Iterable[float], held_out: bool = False) -> "ByClient":
        """Returns the figure of some clients, sorted, so that none can be told from another.

        Args:
            name: name of the figure.
            higher: whether a higher one is better.
            values: the figure of each client, in any order; what is not finite is left out.
            held_out: whether it is on examples that were held out of the clients' own.
        """
        finite = sorted((value for value in values if math.isfinite(value)), reverse=not higher)
        return cls(name, higher, tuple(finite), held_out)

    @property
    def figures(self) -> dict[str, float]:
        """Mean over the clients, and over the tenth of them (rounded up) with the worst and with the best figure.

        >>> ByClient.of("accuracy", True, [0.5, 1.0, 0.0, 0.5]).figures
        {'client_accuracy': 0.5, 'client_accuracy_worst': 0.0, 'client_accuracy_best': 1.0}
        """
        tenth = -(-len(self.values) // 10)
        parts = {"": self.values, "_worst": self.values[:tenth], "_best": self.values[len(self.values) - tenth :]}
        return {f"client_{self.name}{end}": math.fsum(v) / len(v) if v else math.nan for end, v in parts.items()}


class Metrics(NamedTuple):
    """Figures about one model.

    Attributes:
        public: figures on a public test set.
        not_private: figures that look at clients' data, those on a test set that was held out of them included.
        by_client: the figure of each client behind those over clients, if it was asked for.
    """

    public: dict[str, float]
    not_private: dict[str, float]
    by_client: ByClient | None = None

    def beside(self, other: "Metrics", ending: str) -> "Metrics":
        """Returns these figures and those of another model, whose names get an ending.

        Args:
            other: figures of the other model.
            ending: what its names end in.
        """
        public, not_private = (
            own | {f"{name}{ending}": value for name, value in more.items()}
            for own, more in ((self.public, other.public), (self.not_private, other.not_private))
        )
        return Metrics(public, not_private, self.by_client)


class Problem(Protocol):
    """Problem to minimise: f(x) = (1/M) sum_i f_i(x), with f_i(x) = (1/N_i) sum_j f_{i,j}(x), x in R^d.

    A component f_{i,j} is an example of client i (for a quadratic, one summand).
    """

    @property
    def dim(self) -> int:
        """Number of parameters d."""
        ...

    @property
    def num_clients(self) -> int:
        """Number of clients M."""
        ...

    @property
    def tile(self) -> int:
        """Largest number of clients in one call of `grad`: the unit of arithmetic.

        It belongs to the problem, so that the bits of a result depend neither on the engine's chunks nor on its
        workers.
        """
        ...

    @property
    def client_sizes(self) -> np.ndarray:
        """Number of components N_i of each client: (M,) int64, all at least 1."""
        ...

    def init(self, rng: np.random.Generator) -> Tensor:
        """Returns a starting point (d,), in the problem's dtype and on its device."""
        ...

    def grad(self, x: Tensor, ids: np.ndarray, examples: np.ndarray | None = None) -> Tensor:
        """Computes the gradient of f_i at x for each i in `ids`: rows (B, d), the caller's to overwrite.

        Safe to call from several threads at once. Never writes to x.

        Args:
            x: one shared vector (d,), or one row (B, d) per client.
            ids: numbers of the clients, (B,).
            examples: (B, b) restricts row r to the mean over these components of its client; -1 is padding, each row
                has at least one that is not. None: all of f_i.
        """
        ...

    def evaluate(self, x: Tensor) -> Metrics:
        """Computes figures of the model x.

        `not_private` has at least "train_loss", the mean of f_i over the clients whose f_i(x) is finite (nan if there
        is none).
        """
        ...

    def named(self, x: Tensor) -> dict[str, Tensor]:
        """Returns the model x as named tensors, the way it is saved."""
        ...

    def model(self, x: Tensor) -> Any:
        """Returns the model x as its user knows it: a module for a neural problem, the vector itself elsewhere."""
        ...


@runtime_checkable
class Divisible(Protocol):
    """Problem that can be taken apart, so that a worker elsewhere gets the data of its own clients only."""

    def part(self, first: int, last: int) -> Problem:
        """Returns the problem of some clients, numbered from 0, with gradients of the same bits.

        It is there for these clients' gradients alone.

        Args:
            first: number of the first client.
            last: number after that of the last client.
        """
        ...


@runtime_checkable
class Identified(Protocol):
    """Problem that can tell whether it is the one that a run began with."""

    def digest(self) -> str:
        """Returns a digest of all that gradients and figures follow from, the same in every process."""
        ...


def tile_size(num_clients: int, dim: int, most: int = 128) -> int:
    """Returns the largest number of clients for one call of `grad`.

    About 2^23 floats of rows, at most 128 clients, balanced: a last tile much smaller than the others would leave a
    worker idle, as would an odd number of tiles where they are few; only work that is over at once anyway is a single
    tile.

    >>> tile_size(250, 10), tile_size(200, 50_890), tile_size(20, 269_722, most=4), tile_size(3, 2**30)
    (125, 100, 2, 1)
    """
    most = min(most, 128, max(1, 2**23 // dim), num_clients)
    small = num_clients * dim <= 2**17
    for size in range(most, 0, -1):
        tiles = -(-num_clients // size)
        balanced = -(-num_clients // tiles)
        if tiles % 2 == 0 or tiles > 7 or (small and tiles == 1):
            return balanced
    return 1
