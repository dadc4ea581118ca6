"""Grouping of each client's examples into records: one each, or all those of a person together."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fednormec.core.ids import numbered
from fednormec.errors import UserError


class Grouping(NamedTuple):
    """Examples of each client's records.

    Attributes:
        sizes: number of records of each client, (M,).
        order: examples of each client, those of a record side by side; None: each example is a record.
        starts: where each record begins in that order, with the end of the last behind it.
    """

    sizes: np.ndarray
    order: tuple[np.ndarray, ...] | None = None
    starts: tuple[np.ndarray, ...] = ()

    def examples_of(self, client: int, records: np.ndarray) -> np.ndarray:
        """Returns the examples of some records of a client, (n, b), padded with -1."""
        if self.order is None:
            return records[:, None]
        order, starts = self.order[client], self.starts[client]
        counts = starts[records + 1] - starts[records]
        column = np.arange(max(1, int(counts.max(initial=0))))
        there = column < counts[:, None]
        return np.where(there, order[np.where(there, starts[records][:, None] + column, 0)], -1)

    def part(self, first: int, last: int) -> "Grouping":
        """Returns the grouping of some clients, numbered from 0."""
        if self.order is None:
            return Grouping(self.sizes[first:last].copy())
        return Grouping(self.sizes[first:last].copy(), self.order[first:last], self.starts[first:last])


def grouped(persons: Sequence[np.ndarray] | None, sizes: np.ndarray) -> Grouping:
    """Returns how the examples of each client make up records; raises UserError if the persons do not fit them.

    Args:
        persons: whose each example of each client is, any ids; None: each example is a record.
        sizes: number of examples of each client.
    """
    if persons is None:
        return Grouping(sizes)
    if len(persons) != len(sizes):
        raise UserError(f"persons must be given for each of the {len(sizes)} clients, not for {len(persons)}.")
    orders, starts = list[np.ndarray](), list[np.ndarray]()
    for client, (ids, size) in enumerate(zip(persons, sizes.tolist(), strict=True)):
        ids = np.asarray(ids)
        if ids.shape != (size,):
            raise UserError(f"client {client} has {size} examples, but persons for {len(ids)}: give one for each.")
        own = numbered(ids)
        orders.append(np.argsort(own, kind="stable"))
        starts.append(np.concatenate([[0], np.cumsum(np.bincount(own))]))
    return Grouping(np.array([len(start) - 1 for start in starts], dtype=np.int64), tuple(orders), tuple(starts))


def own_padding(examples: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Replaces padding by an example that the row uses anyway.

    Whatever another client's data hold must not touch it.
    """
    first = examples[np.arange(len(examples)), mask.argmax(axis=1)]
    return np.where(mask, examples, first[:, None])
