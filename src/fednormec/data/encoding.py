"""Tables as examples: each cell becomes a number by public constants, or is a text and stays one."""

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fednormec.data.cells import BadCell, Cells, codes, numbers, shown, text, verbatim
from fednormec.data.columns import ESTIMATES, OTHER, Columns, features_of, given, texts
from fednormec.data.partition import by_ids
from fednormec.data.persons import person as person_in
from fednormec.data.sources import MAX_LABEL, USUAL, Examples, FederatedData, Kind, NpzData, federate, inputs
from fednormec.data.tables import Batch, Table, open_table, require_columns
from fednormec.data.texts import as_texts
from fednormec.errors import UserError


def read_table(source: Any, columns: Columns, kind: Kind = USUAL, classes: int | None = None) -> NpzData:
    """Reads a table; nothing is estimated from it.

    Args:
        source: a .csv, .csv.gz, .tsv or .parquet file, a folder that Hugging Face's `datasets` saved (of several data
            sets the one called train), or a data frame of pandas, polars or alike.
        columns: what its columns mean.
        kind: kind of features and labels.
        classes: number of classes; None: that of `columns.labels`, else the labels tell.
    """
    require_constants(columns)
    return encoded(open_table(source, columns.delimiter), columns, kind, classes)


def from_frame(
    frame: Any,
    label: str | Sequence[str],
    client: str,
    features: Sequence[str] | None = None,
    *,
    labels: Sequence[str | int] | None = None,
    categories: Mapping[str, Sequence[str | int]] | None = None,
    missing: Mapping[str, float | str] | None = None,
    scale: Mapping[str, Sequence[float]] | None = None,
    person: str | None = None,
    test: Any = None,
    kind: Kind = USUAL,
) -> FederatedData:
    """Makes federated data of a data frame, whose column `client` says whose each row is.

    All constants are public: in a private run none may come from the frame, since ε would not cover that.

    Args:
        frame: a data frame of pandas, polars or alike.
        label: column to predict, or a list of columns, each with a value or a class of its own.
        client: column that names the client of a row.
        features: columns to predict from, in this order; None: all others.
        labels: names of the classes in order; None: the column has their numbers.
        categories: values of a column in order: it becomes a column of 0 and 1 for each; "*" as the last stands for all
            others.
        missing: value in place of a missing cell, by column, before it is scaled.
        scale: (shift, divisor) by column: a number becomes (number - shift)/divisor.
        person: column that names the person of a row, within a client; None: each row is somebody else's.
        test: data frame with the same columns, with or without `client` and `person`, as the public test set; None:
            there is none.
        kind: kind of features and labels: Kind(targets="values") for a label that is no class, Kind("texts") for texts.
    """
    columns = Columns(label, client, features, labels, categories, missing, scale, person=person)
    require_constants(columns)
    table = open_table(frame)
    columns = replace(columns, features=features_of(table, columns))
    train, _, ids = encoded(table, columns, kind)
    assert ids is not None
    alone = replace(columns, client=None, person=None)
    tested = None if test is None else encoded(open_table(test), alone, kind).train
    names = [str(name) for name in np.unique(ids)]
    return federate(train, tested, by_ids(ids), names, number_of_classes(columns, kind))


def require_constants(columns: Columns) -> None:
    """Raises UserError if something would have to be estimated."""
    for name in columns.estimated:
        word, example = ESTIMATES[name]
        raise UserError(f"{name} = '{word}' would be estimated from the clients' data, outside the mechanism: ε would "
                        f"not cover it. Give public constants, such as {name} = {example}.")  # fmt: skip


def require_no_constants(columns: Columns, kind: Kind) -> None:
    """Raises UserError if inputs are texts, and something is to make numbers of them."""
    for name in ("categories", "missing", "scale") if kind.inputs == "texts" else ():
        if getattr(columns, name):
            raise UserError(f"{name} is for columns of numbers, and the inputs are texts (data.inputs), which stay as "
                            f"they are: leave {name} out.")  # fmt: skip


def number_of_classes(columns: Columns, kind: Kind, asked: int | None = None) -> int | None:
    """Returns the number of classes, as asked or as `columns.labels` says; None: nobody says."""
    named = None if columns.classes is None or kind.targets != "classes" else len(columns.classes)
    if None not in (asked, named) and asked != named:
        raise UserError(f"classes = {asked}, but labels names {named}: leave classes out.")
    return asked if named is None else named


def encoded(table: Table, columns: Columns, kind: Kind = USUAL, classes: int | None = None) -> NpzData:
    """Returns the rows of a table as examples, with the ids of their clients where a column names them.

    Args:
        table: the table.
        columns: what its columns mean; nothing in it is left to be estimated.
        kind: kind of features and labels.
        classes: number of classes; None: that of `columns.labels`, else the labels tell.
    """
    names = features_of(table, columns)
    targets = _Targets(columns, kind.targets == "classes", number_of_classes(columns, kind, classes))
    clients, persons = _Owners(columns.client, "client", text), _Owners(columns.person, "person", person_in)
    x, y = _inputs_of(names, columns, kind), _Rows()
    for batch in table.batches(list(dict.fromkeys([*names, *columns.targets, *columns.owners]))):
        x.add(table.where, batch)
        y.add(targets.block(table.where, batch), table.where)
        clients.add(table.where, batch)
        persons.add(table.where, batch)
    if not len(x):
        raise UserError(f"{table.where} has no rows beside the names of its columns.")
    found = y.array[:, 0] if isinstance(columns.label, str) else y.array
    try:
        examples = Examples(x.array, found.astype(np.int64) if targets.classes else found, kind, persons.ids)
    except UserError as error:
        raise UserError(f"{table.where}: {error}") from None
    return NpzData(examples, None, clients.ids)


def encoded_inputs(table: Table, columns: Columns, kind: Kind = USUAL) -> np.ndarray:
    """Returns the features of each row of a table, which need have no label.

    Args:
        table: the table.
        columns: what its columns mean; its features are named, and nothing in it is left to be estimated.
        kind: kind of the features.
    """
    names = list(columns.features or ())
    x = _inputs_of(names, columns, kind)
    require_columns(table, names)
    for batch in table.batches(names):
        x.add(table.where, batch)
    if not len(x):
        raise UserError(f"{table.where} has no rows beside the names of its columns.")
    return inputs(x.array, table.where, kind)


class _Rows:
    """Rows of numbers that grow in place: a batch is added, and not kept."""

    def __init__(self) -> None:
        self._values, self._width = array("d"), 0

    def __len__(self) -> int:
        return len(self._values)

    def add(self, block: np.ndarray, where: str) -> None:
        """Adds rows; raises UserError if they are of another length than those before."""
        if len(self) and block.shape[1] != self._width:
            raise UserError(f"{where}: expected {self._width} numbers, as in the rows before, got {block.shape[1]}: "
                            "make the lists equally long.")  # fmt: skip
        self._width = block.shape[1]
        self._values.frombytes(block.tobytes())

    @property
    def array(self) -> np.ndarray:
        """All rows, without a copy."""
        return np.frombuffer(self._values).reshape(-1, self._width)


class _Numbers:
    """Inputs of numbers: what the columns become, side by side."""

    def __init__(self, names: Sequence[str], columns: Columns) -> None:
        self._features, self._rows = [_feature(name, columns) for name in names], _Rows()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, where: str, batch: Batch) -> None:
        """Adds the rows of a batch."""
        blocks = [feature.block(where, batch) for feature in self._features]
        self._rows.add(np.hstack(blocks), f"{where}, row {batch.rows[0]}")

    @property
    def array(self) -> np.ndarray:
        """All rows."""
        return self._rows.array


class _Texts:
    """Inputs of texts: those of the columns, a line break between them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._found = names, list[str]()

    def __len__(self) -> int:
        return len(self._found)

    def add(self, where: str, batch: Batch) -> None:
        """Adds the texts of a batch."""
        columns = [self._column(where, batch, name) for name in self._names]
        self._found += ["\n".join(texts) for texts in zip(*columns, strict=True)]

    @property
    def array(self) -> np.ndarray:
        """All texts."""
        return as_texts(self._found, "features")

    def _column(self, where: str, batch: Batch, name: str) -> list[str]:
        try:
            return verbatim(batch.cells[name])
        except BadCell as bad:
            raise UserError(f"{where}, row {batch.rows[bad.index]}, column {name}: {bad}.") from None


def _inputs_of(names: Sequence[str], columns: Columns, kind: Kind) -> _Numbers | _Texts:
    require_no_constants(columns, kind)
    return _Texts(names) if kind.inputs == "texts" else _Numbers(names, columns)


class _Feature(NamedTuple):
    """Column to predict from, and its constants."""

    name: str
    categories: tuple[str, ...] | None
    missing: float | str | None
    scale: Sequence[float]

    def block(self, where: str, batch: Batch) -> np.ndarray:
        """Returns the numbers that a batch of the column becomes, (rows, numbers of each)."""
        cells = batch.cells[self.name]
        try:
            found = self._numbers(cells) if self.categories is None else self._one_hot(cells, self.categories)
        except BadCell as bad:
            raise UserError(f"{where}, row {batch.rows[bad.index]}, column {self.name}: {bad}.") from None
        return found

    def _numbers(self, cells: Cells) -> np.ndarray:
        try:
            found = numbers(cells)
        except BadCell as bad:
            raise BadCell(bad.index, f"{bad}; list the column's values in categories, or leave it out") from None
        if np.isnan(found).any():
            if self.missing is None:
                self._refuse_missing(np.isnan(found).reshape(len(found), -1).any(axis=1), 0)
            found[np.isnan(found)] = self.missing
        shift, divisor = self.scale
        with np.errstate(over="ignore"):
            scaled = ((found - shift) / divisor).reshape(len(found), -1)
        if np.isinf(scaled).any():
            first = int(np.argwhere(np.isinf(scaled))[0][0])
            raise BadCell(first, f"{shown(cells[first])} is not a finite number once it is scaled")
        return scaled

    def _one_hot(self, cells: Cells, categories: tuple[str, ...]) -> np.ndarray:
        order = {name: i for i, name in enumerate(categories)}
        other = order.pop(OTHER) if categories[-1] == OTHER else None
        if isinstance(cells, np.ndarray) and cells.ndim > 1:
            raise BadCell(0, "it is a list, which has no categories")
        try:
            found = codes(cells, order, other)
        except BadCell as bad:
            raise BadCell(bad.index, f"{bad} in its categories; add it there, or end them with '{OTHER}' for all "
                                     "others") from None  # fmt: skip
        if (found < 0).any():
            if self.missing is None:
                self._refuse_missing(found < 0, categories[0])
            found[found < 0] = codes([self.missing], order, other)[0]
        return np.asarray(np.eye(len(categories))[found])

    def _refuse_missing(self, absent: np.ndarray, example: object) -> None:
        raise BadCell(int(absent.argmax()), "the cell is empty; give a public value in its place, such as missing = "
                      f"{{{self.name} = {example!r}}}")  # fmt: skip


def _feature(name: str, columns: Columns) -> _Feature:
    categories = given(columns.categories).get(name)
    scale = given(columns.scale).get(name, (0.0, 1.0))
    return _Feature(name, None if categories is None else texts(categories), given(columns.missing).get(name), scale)


class _Targets(NamedTuple):
    """Columns to predict: classes, of which there may be so many, or values."""

    columns: Columns
    classes: bool
    most: int | None

    def block(self, where: str, batch: Batch) -> np.ndarray:
        """Returns the targets of a batch, (rows, targets of each)."""
        found = np.empty((len(batch.rows), len(self.columns.targets)))
        for i, name in enumerate(self.columns.targets):
            try:
                found[:, i] = self._numbers(batch.cells[name])
            except BadCell as bad:
                raise UserError(f"{where}, row {batch.rows[bad.index]}, column {name}: {bad}.") from None
        return found

    def _numbers(self, cells: Cells) -> np.ndarray:
        if isinstance(cells, np.ndarray) and cells.ndim > 1:
            raise BadCell(0, "it is a list, and expected is one label: name several columns for several")
        names = self.columns.classes
        if names is not None:
            try:
                found = codes(cells, {name: i for i, name in enumerate(names)}, None).astype(np.float64)
            except BadCell as bad:
                raise BadCell(bad.index, f"{bad} in labels, {', '.join(names)}") from None
        else:
            try:
                found = numbers(cells)
            except BadCell as bad:
                raise BadCell(bad.index, f'{bad}; name the classes in order, such as labels = ["no", "yes"]') from None
        absent = np.isnan(found) if names is None else found < 0
        if absent.any():
            raise BadCell(int(absent.argmax()), "the row has no label; leave such rows out")
        if self.classes:
            self._require_classes(cells, found)
        return found

    def _require_classes(self, cells: Cells, found: np.ndarray) -> None:
        last = MAX_LABEL if self.most is None else self.most - 1
        wrong = (found < 0) | (found > last) | (found != np.floor(found))
        if wrong.any():
            at, most = int(wrong.argmax()), "" if self.most is None else f" to {last}"
            raise BadCell(at, f"expected a class, a whole number from 0{most}, got {shown(cells[at])}; number the "
                              "classes anew, or name them in order in labels")  # fmt: skip


class _Owners:
    """Column that says whose each row is, row by row; nobody's where there is none.

    Args:
        column: name of the column; None: there is none.
        what: what it names.
        name: name(cell) -> the name in a cell, "" if there is none.
    """

    def __init__(self, column: str | None, what: str, name: Callable[[Any], str]) -> None:
        self._column, self._what, self._name = column, what, name
        self._found, self._seen = list[str](), dict[str, str]()

    def add(self, where: str, batch: Batch) -> None:
        """Adds the rows of a batch; raises UserError at the first that names nobody."""
        if self._column is None:
            return
        found = [self._name(cell) for cell in batch.cells[self._column]]
        if "" in found:
            raise UserError(f"{where}, row {batch.rows[found.index('')]}, column {self._column}: the row names no "
                            f"{self._what}; name it, or leave the row out.")  # fmt: skip
        self._found += [self._seen.setdefault(owner, owner) for owner in found]

    @property
    def ids(self) -> np.ndarray | None:
        """Ids in whose order 2 comes before 10, where all are whole numbers; None: there is no such column."""
        if self._column is None:
            return None
        whole = all(re.fullmatch(r"0|-?[1-9]\d{0,17}", name) for name in self._seen)
        return np.array(self._found, dtype=np.int64 if whole else object)
