"""What a federated problem is: M functions f_i on flat vectors, every client weighing 1/M."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor


class Interval(NamedTuple):
    """A number known to lie in [lower, upper]; both ends are the same where it is known exactly."""

    lower: float
    upper: float


class Metrics(NamedTuple):
    """Figures about one model: those on a public test set, and those that look at clients' data (not private), which
    includes a test set that was held out of them."""

    public: dict[str, float]
    not_private: dict[str, float]


class Problem(Protocol):
    """minimise f(x) = (1/M) sum_i f_i(x), with f_i(x) = (1/N_i) sum_j f_{i,j}(x), x in R^d.

    A component f_{i,j} is an example of client i (for a quadratic, one summand). `tile` is how many clients one
    call of `grad` gets at the most: the unit of arithmetic. It belongs to the problem, so that the bits of a result
    depend neither on the engine's chunks nor on its workers.
    """

    @property
    def dim(self) -> int: ...
    @property
    def num_clients(self) -> int: ...
    @property
    def tile(self) -> int: ...
    @property
    def client_sizes(self) -> np.ndarray:
        """N_i, the number of components of each client: (M,) int64, all at least 1."""
        ...

    def init(self, rng: np.random.Generator) -> Tensor:
        """A starting point (d,), in the problem's dtype and on its device."""
        ...

    def grad(self, x: Tensor, ids: np.ndarray, examples: np.ndarray | None = None) -> Tensor:
        """Rows (B, d): the gradient of f_i at x for each i in `ids`.

        x is one shared (d,) vector or one row (B, d) per client. `examples` (B, b) restricts row r to the mean over
        those components of its client; -1 is padding, each row has at least one that is not. None means all of f_i.
        The result is the caller's to overwrite. Safe to call from several threads at once. Never writes to x.
        """
        ...

    def evaluate(self, x: Tensor) -> Metrics:
        """Figures of the model x. `not_private` has at least "train_loss", the mean of f_i over the clients whose
        f_i(x) is finite (nan when there is none)."""
        ...

    def named(self, x: Tensor) -> dict[str, Tensor]:
        """The model x as named tensors, the way it is saved."""
        ...

    def model(self, x: Tensor) -> Any:
        """The model x as its user knows it: a module for a neural problem, the vector itself elsewhere."""
        ...


@runtime_checkable
class Divisible(Protocol):
    """A problem that can be taken apart, so that a worker elsewhere gets the data of its own clients only."""

    def part(self, first: int, last: int) -> Problem:
        """Clients first to last - 1, numbered from 0, with gradients of the same bits. It is there for these alone."""
        ...


def tile_size(num_clients: int, dim: int, most: int = 128) -> int:
    """How many clients one call of `grad` gets at the most: about 2^23 floats of rows, at most 128 clients, balanced.

    Balanced, because a last tile much smaller than the others would leave a worker idle, as would an odd number of
    tiles where they are few; only what is over at once anyway is a single tile.

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
