"""Columns of a table: what each means, and the public constants by which its cells become numbers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fednormec.data.cells import text
from fednormec.data.tables import WITHOUT_NAME, Table, require_columns
from fednormec.errors import UserError, known

OTHER = "*"  # as the last category: every value that is not listed
ESTIMATES = {  # settings that a word can ask to be estimated: the word, and the constants to give in its place
    "labels": ("found", '["no", "yes"]'),
    "categories": ("found", '{colour = ["red", "green"]}'),
    "missing": ("mean", "{age = 40}"),
    "scale": ("standard", "{age = [40, 20]}"),
}


@dataclass(frozen=True)
class Columns:
    """Meaning of a table's columns. All constants are public: in a private run none may come from clients' data.

    Args:
        label: column to predict, or a list of columns, each with a value or a class of its own.
        client: column that names the client of a row; None: the table names none.
        features: columns to predict from, in this order; None: all others that have a name.
        labels: names of the classes in order: the first becomes 0, the next 1. None: the cells are numbers. "found":
            all that the table has, sorted.
        categories: values of a column in order: it becomes a column of 0 and 1 for each. A value that is not listed is
            an error, unless the last is "*", which stands for all others. "found": in every column that is not
            numbers all values that it has, sorted.
        missing: value in place of a missing cell, by column, before it is scaled. "mean": the mean of the column.
        scale: [shift, divisor] by column: a number becomes (number - shift)/divisor. "standard": the column's mean and
            standard deviation.
        delimiter: what stands between the cells of a CSV file; None: a comma, or a tab in a .tsv.
        person: column that names the person of a row, within a client: all rows of a person at a client are one record
            (privacy.unit) and stay together when examples are held out or dealt out. None: each row is somebody else's.
    """

    label: str | Sequence[str]
    client: str | None = None
    features: Sequence[str] | None = None
    labels: Sequence[str | int] | Literal["found"] | None = None
    categories: Mapping[str, Sequence[str | int]] | Literal["found"] | None = None
    missing: Mapping[str, float | str] | Literal["mean"] | None = None
    scale: Mapping[str, Sequence[float]] | Literal["standard"] | None = None
    delimiter: str | None = None
    person: str | None = None

    def __post_init__(self) -> None:
        for name, (word, example) in ESTIMATES.items():
            value = getattr(self, name)
            if isinstance(value, str) and value != word:
                raise UserError(f"{name} must be such as {example}, or '{word}', not '{value}'.")
        _require_different("label must be a column or a list of columns", self.targets)
        if self.person is not None and self.person in (*self.targets, self.client):
            what = "client" if self.person == self.client else "label"
            raise UserError(f"the column {self.person} is the {what}, and no person: name another column in person, or "
                            "leave it out.")  # fmt: skip
        if self.features is not None:
            _require_different("features must be a list of columns", self.features)
            for name in self.features:
                if name in (*self.targets, *self.owners):
                    what = "client" if name == self.client else "person" if name == self.person else "label"
                    raise UserError(f"the column {name} is the {what}, and no feature: leave it out of features.")
        if self.classes is not None:
            _require_different("labels must be a list of the classes' names", self.classes)
        for name, values in given(self.categories).items():
            _require_different(f"categories of {name} must be a list of values", texts(values))
        for name, pair in given(self.scale).items():
            self._check_scale(name, pair)
        for name, value in given(self.missing).items():
            self._check_missing(name, value)

    def _check_scale(self, name: str, pair: Sequence[float]) -> None:
        if name in given(self.categories):
            raise UserError(f"the column {name} has categories, which are not scaled: leave it out of scale.")
        if len(pair) != 2 or not all(map(math.isfinite, pair)) or not pair[1]:
            raise UserError(f"scale of {name} must be [shift, divisor], finite and the second not 0, not {list(pair)}.")

    def _check_missing(self, name: str, value: float | str) -> None:
        categories = given(self.categories).get(name)
        if categories is not None:
            if _category(value) not in texts(categories):
                raise UserError(f"missing of {name} must be one of its categories, not {value!r}.")
        elif self.categories != "found" and (isinstance(value, str) or not math.isfinite(value)):
            raise UserError(f"missing of {name} must be a finite number, not {value!r}.")

    @property
    def targets(self) -> tuple[str, ...]:
        """Columns to predict."""
        return (self.label,) if isinstance(self.label, str) else tuple(self.label)

    @property
    def owners(self) -> tuple[str, ...]:
        """Columns that say whose a row is."""
        return tuple(name for name in (self.client, self.person) if name is not None)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes in order; None: they are numbers, or yet to be found."""
        return None if self.labels is None or isinstance(self.labels, str) else texts(self.labels)

    @property
    def estimated(self) -> tuple[str, ...]:
        """Settings that ask for constants of the data's own."""
        return tuple(name for name in ESTIMATES if isinstance(getattr(self, name), str))


def given(setting: Any) -> Mapping[str, Any]:
    """Returns the constants of a setting by column; none if it is left out, or asks for an estimate."""
    return {} if setting is None or isinstance(setting, str) else dict(setting)


def texts(values: Iterable[str | int]) -> tuple[str, ...]:
    """Returns values as cells are compared with them."""
    return tuple(text(value) for value in values)


def features_of(table: Table, columns: Columns) -> tuple[str, ...]:
    """Returns the columns to predict from; raises UserError if the table lacks one, or a constant is for another."""
    require_columns(table, [*columns.targets, *columns.owners])
    if columns.features is None:
        left_out = {*columns.targets, *columns.owners, *WITHOUT_NAME}
        features = tuple(name for name in table.names if name not in left_out)
        if not features:
            raise UserError(f"{table.where} has no column to predict from beside {', '.join(columns.targets)}.")
    else:
        features = tuple(columns.features)
        require_columns(table, features)
    for setting in ("categories", "missing", "scale"):
        for name in given(getattr(columns, setting)):
            known(f"feature in {setting}", name, features)
    return features


def _category(value: float | str) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else text(value)


def _require_different(expected: str, values: Sequence[str]) -> None:
    if not values:
        raise UserError(f"{expected}, at least one, not an empty one.")
    twice = next((value for value in values if list(values).count(value) > 1), None)
    if twice is not None:
        raise UserError(f"{expected}, each once, but '{twice}' is there twice.")
