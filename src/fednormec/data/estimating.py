"""Constants of a table's own, for runs that are not private: what its columns hold, their means and deviations.

This looks at clients' data outside the mechanism, so that no ε covers it.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fednormec.data.cells import MISSING, BadCell, is_number, numbers, text
from fednormec.data.columns import Columns, features_of, given
from fednormec.data.tables import Table
from fednormec.errors import UserError

MOST_FOUND = 1000  # different values of a column: beyond that it is something else, such as people's names


def settled(table: Table, columns: Columns) -> Columns:
    """Returns the columns with their features spelled out and every estimate replaced by constants.

    Each estimate takes one more pass over the table.
    """
    features = features_of(table, columns)
    columns = replace(columns, features=features)
    if columns.labels == "found":
        found = _values(table, columns.targets)
        every = {name for values in found.values() for name in values}
        columns = replace(columns, labels=_in_order(every))
    if columns.categories == "found":
        kinds = {name: _in_order(values) for name, values in _values(table, features, texts_alone=True).items()}
        columns = replace(columns, categories=kinds)
    if columns.missing == "mean" or columns.scale == "standard":
        numeric = [name for name in features if name not in given(columns.categories)]
        moments = _moments(table, numeric)
        if columns.missing == "mean":
            columns = replace(columns, missing={name: one.mean for name, one in moments.items()})
        if columns.scale == "standard":
            columns = replace(columns, scale={name: (one.mean, one.deviation or 1.0) for name, one in moments.items()})
    return columns


def _values(table: Table, names: Sequence[str], texts_alone: bool = False) -> dict[str, set[str]]:
    """Returns the different values of each column, with `texts_alone` only of those that are not numbers."""
    found, numeric = {name: set[str]() for name in names}, dict.fromkeys(names, texts_alone)
    for batch in table.batches(names):
        for name in names:
            cells = batch.cells[name]
            if isinstance(cells, np.ndarray) and texts_alone:
                continue
            numeric[name] = numeric[name] and all(map(is_number, cells))
            if len(found[name]) <= MOST_FOUND:
                found[name].update(text(cell) for cell in cells)
    for name in names:
        if not numeric[name] and len(found[name]) > MOST_FOUND:
            raise UserError(f"{table.where}: the column {name} has more than {MOST_FOUND} different values: leave it "
                            "out, or list those that count.")  # fmt: skip
    present = {name: {one for one in values if one.lower() not in MISSING} for name, values in found.items()}
    return {name: values for name, values in present.items() if not numeric[name]}


def _in_order(values: Iterable[str]) -> tuple[str, ...]:
    values = list(values)
    whole = all(re.fullmatch(r"-?\d{1,18}", value) for value in values)
    return tuple(sorted(values, key=int if whole else str))


@dataclass
class _Moments:
    """Number, mean and sum of squared deviations of the numbers so far."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: np.ndarray) -> None:
        """Adds numbers, stably: the deviations of two groups from a mean of their own, and that of the means."""
        values = values[~np.isnan(values)]
        if not len(values):
            return
        count, mean = self.count + len(values), float(values.mean())
        apart = mean - self.mean
        self.squares += float(((values - mean) ** 2).sum()) + apart**2 * self.count * len(values) / count
        self.mean += apart * len(values) / count
        self.count = count

    @property
    def deviation(self) -> float:
        return math.sqrt(self.squares / self.count)


def _moments(table: Table, names: Sequence[str]) -> dict[str, _Moments]:
    found = {name: _Moments() for name in names}
    for batch in table.batches(names):
        for name in names:
            try:
                found[name].add(numbers(batch.cells[name]))
            except BadCell as bad:
                raise UserError(f"{table.where}, row {batch.rows[bad.index]}, column {name}: {bad}; list the column's "
                                "values in categories, or leave it out.") from None  # fmt: skip
    for name, one in found.items():
        if not one.count:
            raise UserError(f"{table.where}: the column {name} has no number to estimate from: leave it out.")
    return found
