"""Cache of published data sets: one .npy file of rows each, checked by hash when it is written and whenever opened."""

import hashlib
import os
from pathlib import Path
from typing import Protocol

import numpy as np

from fednormec.errors import UserError


class Published(Protocol):
    """Published data set that is fetched once."""

    @property
    def name(self) -> str:
        """Name that it goes by here."""

    @property
    def about(self) -> str:
        """One line for a person."""

    @property
    def terms(self) -> str:
        """Licence, or the terms of use."""

    @property
    def path(self) -> Path:
        """Path of the cache file, whether it is there or not."""

    def read(self, folder: Path, /) -> np.ndarray:
        """Reads its rows from the published files in a folder; raises UserError if they are not there."""

    def check(self, rows: np.ndarray, /) -> str | None:
        """Returns what is wrong with these rows; None if they are the published ones."""


def cache_folder() -> Path:
    """Returns $FEDNORMEC_DATA, else fednormec in $XDG_CACHE_HOME, else in ~/.cache."""
    given, xdg = os.environ.get("FEDNORMEC_DATA"), os.environ.get("XDG_CACHE_HOME")
    return Path(given) if given else (Path(xdg) if xdg else Path("~/.cache")).expanduser() / "fednormec"


def read_cache(published: Published) -> np.ndarray:
    """Returns the verified rows; raises UserError, which says which command helps, if there are none."""
    path, command = published.path, f"run: fednormec data fetch {published.name}"
    try:
        rows: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"{published.name} is not fetched yet (there is no {path}); {command}") from None
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or "it is damaged"
        raise UserError(f"the cached {path} cannot be read: {reason}; {command}") from error
    wrong = published.check(rows)
    if wrong is not None:
        raise UserError(f"the cached {path} was altered: {wrong}; {command}")
    return rows


def wrong_hash(rows: np.ndarray, sha256: str) -> str | None:
    """Returns what is wrong with the bytes of these rows; None if they have this hash."""
    found = hashlib.sha256(np.ascontiguousarray(rows).view(np.uint8).data).hexdigest()
    return None if found == sha256 else f"expected SHA-256 {sha256[:12]}..., found {found[:12]}..."
