"""Cells of a table as numbers and as texts."""

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

MISSING = frozenset(["", "na", "n/a", "nan", "null", "none"])  # in whatever case
TRUTHS = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}
DATE = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([T ].*)?")

Cells = np.ndarray | Sequence[Any]


class BadCell(Exception):
    """Cell that is not what its column should hold.

    Args:
        index: its number in the batch.
        why: what is wrong with it.
    """

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index


def numbers(cells: Cells) -> np.ndarray:
    """Returns cells as float64, NaN where one is missing; raises BadCell at the first that is no finite number.

    >>> numbers(["1", " 2.5 ", "yes", "NA", None, 7]).tolist()
    [1.0, 2.5, 1.0, nan, nan, 7.0]
    """
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "iuf":
        found = cells.astype(np.float64)
    else:
        found = _quickly(cells)
    if np.isinf(found).any():
        first = int(np.argwhere(np.isinf(found))[0][0])
        raise BadCell(first, f"{shown(cells[first])} is not a finite number")
    return found


def text(cell: Any) -> str:
    """Returns a cell as text, without the space around it; "" if it is missing."""
    if isinstance(cell, str):
        return cell.strip()
    return "" if _is_missing(cell) else str(cell)


def verbatim(cells: Cells) -> list[str]:
    """Returns texts as they are, "" where one is missing; raises BadCell at the first cell that is no text.

    >>> verbatim(["Good. ", None, "NA"])
    ['Good. ', '', 'NA']
    """
    found = ["" if not isinstance(cell, str) and _is_missing(cell) else cell for cell in cells]
    for i, cell in enumerate(found):
        if not isinstance(cell, str):
            raise BadCell(i, f"expected a text, got {type(cell).__name__}; convert the column, or leave it out")
    return found


def codes(cells: Cells, known: Mapping[str, int], other: int | None) -> np.ndarray:
    """Returns the number of each cell's text, -1 where it is missing; raises BadCell at one that has none.

    Args:
        cells: the cells.
        known: number of each text; a whole number that is written 3.0 is found as 3.
        other: number of every other text; None: there may be no other.
    """
    found = np.empty(len(cells), np.int64)
    for i, cell in enumerate(cells):
        name = text(cell)
        code = known.get(name)
        if code is None and name.endswith(".0"):
            code = known.get(name[:-2])
        if code is None:
            code = -1 if name.lower() in MISSING else other
        if code is None:
            raise BadCell(i, f"{shown(name)} is not listed")
        found[i] = code
    return found


def is_number(cell: Any) -> bool:
    """Returns whether a cell is a number or missing."""
    try:
        _number(cell)
    except ValueError:
        return False
    return True


def shown(cell: Any) -> str:
    """Returns a cell for an error, cut where it is long."""
    said = repr(text(cell))
    return said if len(said) <= 40 else f"{said[:39]}…"


def _quickly(cells: Cells) -> np.ndarray:
    """Returns numbers; one by one only where a cell is something else."""
    try:
        if "_" not in "".join(cells):  # Python takes 1_000 for a number, nobody else does
            found = np.fromiter(map(float, cells), np.float64, len(cells))
            if np.isfinite(found).all():
                return found
    except (TypeError, ValueError):
        pass
    return np.array([_number_at(i, cell) for i, cell in enumerate(cells)], np.float64)


def _number_at(index: int, cell: Any) -> float:
    try:
        found = _number(cell)
    except ValueError:
        date = DATE.fullmatch(text(cell))
        why = "is a date: write it as a number, such as the days since another" if date else "is not a number"
        raise BadCell(index, f"{shown(cell)} {why}") from None
    if math.isinf(found):
        raise BadCell(index, f"{shown(cell)} is not a finite number")
    return found


def _number(cell: Any) -> float:
    """Returns a number, NaN if it is missing; raises ValueError if the cell is neither."""
    if not isinstance(cell, str):
        if _is_missing(cell):
            return math.nan
        if isinstance(cell, bool | int | float | np.generic | Decimal):
            return float(cell)
        raise ValueError
    word = cell.strip().lower()
    if word in MISSING:
        return math.nan
    if word in TRUTHS:
        return TRUTHS[word]
    found = float(word)
    if "_" in word or math.isnan(found):
        raise ValueError
    return found


def _is_missing(cell: Any) -> bool:
    """Returns whether a cell that is no text holds nothing: None, NaN, or what pandas has for that."""
    if cell is None or type(cell).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(cell, float | np.floating | Decimal) and math.isnan(cell)
