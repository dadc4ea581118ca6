"""Files that survive a crash: whole or not there, line by line, and one process at a time."""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from fednormec.errors import NotWritten, UserError

PART = ".part"  # ending of a file that was not finished, which a crash can leave
NO_LOCKS = (
    "run folders, ledgers, sweeps, data fetch and federations are not supported on this system, whose Python has no "
    "file locks (fcntl): use Linux, macOS or WSL; fn.train in Python and the other commands work here."
)


@contextmanager
def replaced(path: Path, private: bool = False) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of `path` once all of it is on the disk.

    Until then, and if anything goes wrong, what was there before stays. Only its owner may open a `private` one.
    """
    part = path.with_name(path.name + PART)
    with _said(path):
        try:
            part.unlink(missing_ok=True)
            with open(part, "wb", opener=partial(os.open, mode=0o600 if private else 0o666)) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Replaces the file with this text, as safe against a crash as `replaced`."""
    with replaced(path) as file:
        file.write(text.encode())


class Lines:
    """File that only grows, a line at a time, and can be read meanwhile: whatever ends with a line end is whole.

    It is locked as long as it is open: a second process that opens it gets a UserError.

    Args:
        path: where the file is stored.
        new: whether the file is created and must not be there yet; otherwise it must be there.
    """

    def __init__(self, path: Path, new: bool) -> None:
        require_locks()
        self._path = path
        with _said(path):
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | (os.O_CREAT | os.O_EXCL if new else 0), 0o666)
            try:
                if not lock(self._file):
                    raise UserError(f"another process is at work in {path.parent}: wait for its end.")
                if new:
                    sync_folder(path.parent)  # the name of a new file must be on the disk, too
            except BaseException:
                os.close(self._file)
                raise

    def read(self) -> list[bytes]:
        """Returns all lines; the last is what follows the last line end, nothing or a line that was cut off."""
        return self._path.read_bytes().split(b"\n")

    def add(self, line: str, durable: bool = False) -> None:
        """Adds a line, which can be read when this returns; with `durable` it is on the disk then."""
        self.extend(f"{line}\n".encode())
        if durable:
            self.sync()

    def extend(self, content: bytes) -> None:
        """Adds bytes as they are."""
        with _said(self._path):
            while content:
                content = content[os.write(self._file, content) :]

    def cut(self, size: int) -> None:
        """Keeps only the first `size` bytes."""
        with _said(self._path):
            os.ftruncate(self._file, size)

    def sync(self) -> None:
        """Returns when the file's content is on the disk."""
        with _said(self._path):
            os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


class Lock:
    """File that one process at a time can hold, until the context ends; created with its folder if it is missing."""

    def __init__(self, path: Path) -> None:
        require_locks()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)

    def take(self, wait: bool = False) -> bool:
        """Takes the lock; returns False if another process holds it. With `wait` it waits for that one."""
        return lock(self._file, wait)

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._file)


def require_locks() -> None:
    """Raises UserError if there are no file locks (Windows); call it before anything is written."""
    try:
        import fcntl  # noqa: F401
    except ImportError:
        raise UserError(NO_LOCKS) from None


def lock(file: int, wait: bool = False) -> bool:
    """Locks an open file until it is closed; returns False if another process holds it, or with `wait` waits for it."""
    require_locks()
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def sync_folder(folder: Path) -> None:
    """Returns when the names of the folder's files are on the disk."""
    if os.name == "nt":
        return  # where a folder cannot be opened
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def to_json(content: Any, indent: int | None = None) -> str:
    """Returns JSON as the standard has it, in ASCII: a non-finite number becomes null, wherever it stands.

    >>> to_json({"loss": [1.0, math.nan], "name": "a\x7f"})
    '{"loss": [1.0, null], "name": "a\\\\u007f"}'
    """
    return json.dumps(_finite(content), indent=indent, allow_nan=False).replace("\x7f", "\\u007f")


def digest(path: Path) -> str:
    """Returns a SHA-256 of a file, or of all files in a folder and their names."""
    found = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            found.update(str(file.relative_to(path)).encode("utf-8", "surrogateescape"))
            with open(file, "rb") as content:
                while block := content.read(2**24):
                    found.update(block)
    return found.hexdigest()


@contextmanager
def _said(path: Path) -> Iterator[None]:
    """Raises NotWritten, which names the path, in place of the system's error."""
    try:
        yield
    except OSError as error:
        raise NotWritten(f"{path} cannot be written: {error.strerror or error}.") from error


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> dict[str, Any]:
    """Returns the dict that a .json file holds; an empty one if there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
