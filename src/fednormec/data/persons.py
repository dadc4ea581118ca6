"""Persons: whose each example is, where one person can have several; they stay together wherever examples are dealt."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from fednormec.data.cells import MISSING, text
from fednormec.errors import UserError


def person(cell: Any) -> str:
    """Returns the id in a cell as text, "" if there is none; a whole number that is written 3.0 is 3.

    >>> [person(cell) for cell in (" ann", 3, "3.0", "NA", None, float("nan"))]
    ['ann', '3', '3', '', '', '']
    """
    name = text(cell)
    if name.endswith(".0") and name[:-2].lstrip("-").isdecimal():
        return name[:-2]
    return "" if name.lower() in MISSING else name


def as_persons(ids: np.ndarray, count: int) -> np.ndarray:
    """Returns whose each example is: numbers as they are, all else as str; raises UserError if one is missing.

    Args:
        ids: an id for each example, numbers or texts.
        count: number of examples.
    """
    if ids.shape != (count,) or ids.dtype.kind not in "biufUOT":
        raise UserError(f"person must be one id for each of {count} examples, a number or a text, got dtype "
                        f"{ids.dtype} and shape {ids.shape}; give each example the id of its person")  # fmt: skip
    if ids.dtype.kind in "biuf":
        _require_all(np.isfinite(ids))
        return np.ascontiguousarray(ids)
    found = np.empty(count, dtype=object)
    found[:] = [person(cell) for cell in ids.tolist()]
    _require_all(found != "")
    return found


def together(persons: Iterable[np.ndarray | None], whose: Iterable[str]) -> None:
    """Raises UserError if some of these examples name their persons, and others do not.

    Args:
        persons: whose each of some examples is; None: they do not say.
        whose: what errors call the examples.
    """
    names: dict[bool, str] = {}
    for ids, name in zip(persons, whose, strict=True):
        names.setdefault(ids is not None, name)
    if len(names) == 2:
        raise UserError(f"either all examples name their persons or none do, but {names[True]} does and "
                        f"{names[False]} does not; give it the ids, or leave them all out")  # fmt: skip


def _require_all(there: np.ndarray) -> None:
    if not there.all():
        raise UserError(f"every example needs the id of its person, and example {int(np.argmin(there))} has none; name "
                        "the person, or leave the example out")  # fmt: skip
