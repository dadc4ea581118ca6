"""Tables in pieces: a CSV or Parquet file, a folder that Hugging Face's `datasets` saved, a data frame.

Whatever the form, a table has named columns and gives its rows in batches, so that no more than one batch is in memory
beside what is made of it. What the columns mean is said by `columns`.
"""

import csv
import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

import numpy as np

from fednormec.errors import UserError, known

ROWS_TOGETHER = 1024
CSV, PARQUET = (".csv", ".csv.gz", ".tsv", ".tsv.gz"), (".parquet",)
SAVED, SPLITS = "state.json", "dataset_dict.json"  # what marks a folder of Hugging Face's `datasets`
WITHOUT_NAME = ("", "__index_level_0__")  # the index, as pandas writes it
PYARROW = "{} is read with pyarrow: pip install 'fednormec[{}]'."


class Batch(NamedTuple):
    """Some rows of a table.

    Attributes:
        rows: their numbers, as errors name them.
        cells: the cells of each column: numbers in an array (two-dimensional where each cell is a list of them), or
            anything else in a sequence.
    """

    rows: Sequence[int]
    cells: Mapping[str, np.ndarray | Sequence[Any]]


class Table(Protocol):
    """Named columns and rows."""

    @property
    def where(self) -> str:
        """What errors call the table."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all columns."""

    def batches(self, wanted: Sequence[str]) -> Iterator[Batch]:
        """Yields all rows, of these columns alone; it can be called again."""


def is_table(source: str | Path) -> bool:
    """Returns whether a path is that of a table, by its name or, of a folder, by what lies in it."""
    return str(source).lower().endswith(CSV + PARQUET) or is_saved(source)


def is_saved(source: str | Path) -> bool:
    """Returns whether this is a folder that Hugging Face's `datasets` saved."""
    return any(os.path.isfile(Path(source) / name) for name in (SAVED, SPLITS))


def open_table(source: Any, delimiter: str | None = None) -> Table:
    """Opens a table; raises UserError if there is none.

    Args:
        source: a .csv, .tsv (also with .gz) or .parquet file, a folder that Hugging Face's `datasets` saved, or a data
            frame.
        delimiter: what stands between the cells of a CSV file; None: a comma, or a tab in a .tsv.
    """
    if hasattr(source, "columns"):
        return _checked(_Frame(source))
    name = str(source).lower()
    if name.endswith(CSV):
        return _checked(_csv(Path(source), delimiter or ("\t" if ".tsv" in name[-7:] else ",")))
    if delimiter is not None:
        raise UserError(f"delimiter is for CSV files, and {source} is none: leave it out.")
    if name.endswith(PARQUET):
        return _checked(_parquet(Path(source)))
    if is_saved(source):
        return _checked(_saved(Path(source)))
    raise UserError(f"{source} is no table: expected a .csv, .csv.gz, .tsv or .parquet file, or a folder saved by "
                    "Hugging Face's datasets.")  # fmt: skip


def test_split(source: str | Path) -> str | None:
    """Returns the folder of the test set that Hugging Face's `datasets` saved beside the training set, if there is."""
    found = Path(source) / "test"
    return str(found) if (Path(source) / SPLITS).is_file() and is_saved(found) else None


def require_columns(table: Table, wanted: Iterable[str]) -> None:
    """Raises UserError if a column is missing; the error names the nearest."""
    for name in wanted:
        lone = table.names[0] if len(table.names) == 1 else ""
        between = next((c for c in ";\t|," if c in lone), None)
        if name not in table.names and between is not None:
            raise UserError(f"{table.where} has one column, '{lone}': set data.delimiter = "
                            f"{json.dumps(between)} if that stands between the cells.")  # fmt: skip
        known(f"column of {table.where}", name, [name for name in table.names if name not in WITHOUT_NAME])


def _checked(table: Table) -> Table:
    named = [name for name in table.names if name not in WITHOUT_NAME]
    twice = next((name for name in named if named.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{table.where} has two columns that are called '{twice}': rename one.")
    if not named:
        raise UserError(f"{table.where} has no named columns: expected a first row with the names of the columns.")
    return table


# CSV


@dataclass(frozen=True)
class _Csv:
    path: Path
    delimiter: str
    names: tuple[str, ...]

    @property
    def where(self) -> str:
        return str(self.path)

    def batches(self, wanted: Sequence[str]) -> Iterator[Batch]:
        index = [self.names.index(name) for name in wanted]
        with _readable(self.path), _text(self.path) as file:
            rows = self._rows(csv.reader(file, delimiter=self.delimiter, strict=True))
            next(rows, None)  # the names
            while some := list(islice(rows, ROWS_TOGETHER)):
                columns = list(zip(*(cells for _, cells in some), strict=True))
                yield Batch([row for row, _ in some], {self.names[i]: columns[i] for i in index})

    def _rows(self, reader: Iterable[list[str]]) -> Iterator[tuple[int, list[str]]]:
        """Yields rows with their numbers, as a spreadsheet shows them; empty lines are skipped."""
        for row, cells in enumerate(reader, 1):
            if not cells:
                continue
            if len(cells) != len(self.names):
                raise UserError(f"{self.path}, row {row}: expected {len(self.names)} cells, one for each column, got "
                                f"{len(cells)}; quote cells in which the delimiter stands.")  # fmt: skip
            yield row, cells


def _csv(path: Path, delimiter: str) -> _Csv:
    if len(delimiter) != 1 or delimiter in '\r\n"':
        raise UserError(f"delimiter must be one character, such as ';', not {delimiter!r}.")
    with _readable(path), _text(path) as file:
        first = next((row for row in csv.reader(file, delimiter=delimiter, strict=True) if row), [])
    return _Csv(path, delimiter, tuple(name.strip() for name in first))


def _text(path: Path) -> TextIO:
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return open(path, encoding="utf-8-sig", newline="")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raises UserError in place of whatever a file that cannot be read makes others raise."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except FileNotFoundError:
        raise UserError(f"there is no file {path}.") from None
    except UnicodeDecodeError as error:
        found = error.object[error.start]
        raise UserError(f"{path} is not in UTF-8 (it has the byte 0x{found:02x}): save it in that encoding.") from None
    except Exception as error:  # gzip, zlib, csv, json and pyarrow raise a dozen types on damaged bytes
        said = " ".join(str(getattr(error, "strerror", None) or error).split()).rstrip(".")
        raise UserError(f"{path} cannot be read: {said}.") from error


# Parquet and Arrow


@dataclass(frozen=True)
class _Parquet:
    path: Path
    names: tuple[str, ...]

    @property
    def where(self) -> str:
        return str(self.path)

    def batches(self, wanted: Sequence[str]) -> Iterator[Batch]:
        from pyarrow.parquet import ParquetFile

        with _readable(self.path), ParquetFile(self.path) as file:
            yield from _of_arrow(self.where, file.iter_batches(ROWS_TOGETHER, columns=list(wanted)), wanted)


def _parquet(path: Path) -> _Parquet:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(PYARROW.format("Parquet", "parquet")) from None
    with _readable(path), ParquetFile(path) as file:
        return _Parquet(path, tuple(file.schema_arrow.names))


@dataclass(frozen=True)
class _Saved:
    path: Path
    files: tuple[Path, ...]
    names: tuple[str, ...]

    @property
    def where(self) -> str:
        return str(self.path)

    def batches(self, wanted: Sequence[str]) -> Iterator[Batch]:
        first = 0
        for path in self.files:
            with _readable(path), _stream(path) as reader:
                for batch in _of_arrow(self.where, reader, wanted, first):
                    first += len(batch.rows)
                    yield batch


def _saved(path: Path) -> _Saved:
    """Opens what `datasets` saved: a data set, or a dict of them with one that is called train."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UserError(PYARROW.format("A folder saved by Hugging Face's datasets", "huggingface")) from None
    if (path / SPLITS).is_file():
        if not is_saved(path / "train"):
            raise UserError(f"{path} holds several data sets, and none is called train: take the folder of one.")
        return _saved(path / "train")
    with _readable(path / SAVED):
        state = json.loads((path / SAVED).read_text(encoding="utf-8"))
    named = state.get("_data_files") if isinstance(state, dict) else None
    files = [file.get("filename") for file in named] if isinstance(named, list) else []
    if not files or not all(isinstance(name, str) and name == Path(name).name for name in files):
        raise UserError(f"{path / SAVED} does not say in which files the data are: save them again with save_to_disk.")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise UserError(f"{path} has an order of rows beside its data: save it again, after flatten_indices().")
    paths = tuple(path / name for name in files)
    with _readable(paths[0]), _stream(paths[0]) as reader:
        return _Saved(path, paths, tuple(reader.schema.names))


def _stream(path: Path) -> Any:
    import pyarrow

    return pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))


def _of_arrow(where: str, batches: Iterable[Any], wanted: Sequence[str], first: int = 0) -> Iterator[Batch]:
    for batch in (batch for batch in batches if batch.num_rows):
        cells = {name: _arrow_cells(batch.column(name), f"{where}: the column {name}") for name in wanted}
        yield Batch(range(first, first + batch.num_rows), cells)
        first += batch.num_rows


def _arrow_cells(column: Any, what: str) -> np.ndarray | Sequence[Any]:
    """Returns the cells of a column: numbers as an array, NaN where one is missing; texts as they are."""
    from pyarrow import types

    kind = column.type
    numbers = (types.is_integer, types.is_floating)
    if any(is_one(kind) for is_one in numbers):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    if any(is_one(kind) for is_one in (types.is_list, types.is_large_list, types.is_fixed_size_list)):
        if any(is_one(kind.value_type) for is_one in numbers):
            return _rows_of(column, what)
    elif types.is_dictionary(kind):
        return _arrow_cells(column.dictionary_decode(), what)
    elif any(is_one(kind) for is_one in (
        types.is_boolean, types.is_string, types.is_large_string, types.is_string_view, types.is_decimal, types.is_null
    )):  # fmt: skip
        return list(column.to_pylist())
    raise UserError(f"{what} holds {kind}, and expected are numbers, texts, true and false, or lists of numbers: "
                    "convert it, or leave it out.")  # fmt: skip


def _rows_of(column: Any, what: str) -> np.ndarray:
    if column.null_count:
        raise UserError(f"{what} has lists that are missing: leave those rows out, or fill them in first.")
    lengths = {len(one) for one in column}
    if len(lengths) > 1:
        raise UserError(f"{what} has lists of {min(lengths)} and of {max(lengths)} numbers: make them equally long.")
    flat = column.flatten().to_numpy(zero_copy_only=False)
    return np.asarray(flat, np.float64).reshape(len(column), -1)


# Data frames


@dataclass(frozen=True)
class _Frame:
    frame: Any

    @property
    def where(self) -> str:
        return "the data frame"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(str(name) for name in self.frame.columns)

    def batches(self, wanted: Sequence[str]) -> Iterator[Batch]:
        by_name = {str(name): name for name in self.frame.columns}
        columns = {name: _frame_cells(self.frame[by_name[name]], name) for name in wanted}
        for first in range(0, len(self.frame), ROWS_TOGETHER):
            rows = range(first, min(first + ROWS_TOGETHER, len(self.frame)))
            yield Batch(rows, {name: cells[rows.start : rows.stop] for name, cells in columns.items()})


def _frame_cells(column: Any, name: str) -> np.ndarray | Sequence[Any]:
    found = np.asarray(column.to_numpy() if hasattr(column, "to_numpy") else column)
    if found.dtype.kind in "mM":
        raise UserError(f"the data frame: the column {name} holds {found.dtype}, and expected are numbers, texts, true "
                        "and false: convert it, or leave it out.")  # fmt: skip
    return found if found.dtype.kind in "iuf" else list(found)
