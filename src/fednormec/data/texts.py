"""Texts as inputs: one str for each example, in an array of objects, which is known by content and never by address."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fednormec.errors import UserError

LIKE_TEXTS = "UOT"  # kinds of numpy's dtypes that may hold texts


def as_texts(values: np.ndarray | Sequence[Any], name: str) -> np.ndarray:
    """Returns texts as an array of str; raises UserError if something else is among them.

    A list need not become an array first, in which every text would have the room of the longest, and lose NULs at its
    end.

    Args:
        values: a row of texts.
        name: what errors call it.
    """
    if isinstance(values, np.ndarray) and (values.ndim != 1 or values.dtype.kind not in LIKE_TEXTS):
        raise UserError(f"{name} must be texts, one for each example, got dtype {values.dtype} and shape "
                        f"{values.shape}; give a list of str")  # fmt: skip
    found = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        found[i] = _text(value, name, i)
    return found


def content(values: np.ndarray) -> bytes:
    """Returns what an array holds, as bytes: of texts a digest of each."""
    if values.dtype.kind != "O":
        return values.tobytes()
    return b"".join(hashlib.sha256(text.encode()).digest() for text in values)


def are_texts(value: Any) -> bool:
    """Returns whether this is a list of texts, and so inputs without targets."""
    return isinstance(value, list) and len(value) > 0 and all(isinstance(one, str) for one in value)


def _text(value: Any, name: str, index: int) -> str:
    if not isinstance(value, str):
        raise UserError(f"{name} must be texts, got {type(value).__name__} at example {index}; make it a str, or '' "
                        "where there is none")  # fmt: skip
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} must be texts that UTF-8 can hold, got half of a character, "
                        f"{value[error.start]!a}, at example {index}; decode them anew")  from None  # fmt: skip
    return str(value)
