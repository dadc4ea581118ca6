"""Members of published archives, read in memory and never unpacked; archive and members are checked by hash."""

import hashlib
import io
import tarfile
import zipfile
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fednormec.errors import UserError

MAX_FILE = 2**28  # bytes; the largest published file has 170 MB
Contents = tuple[bytes, ...]


@dataclass(frozen=True)
class Archive:
    """Published archive: a .tar.gz, or a zip such as a wheel.

    Attributes:
        file: name of the file.
        sha256: hash of the file.
        members: names of the members to read.
        members_sha256: hash of these members, one after another.
        within: a member that is itself a .tar.gz and has these members; None: they lie in the archive.
    """

    file: str
    sha256: str
    members: tuple[str, ...]
    members_sha256: str
    within: str | None = None

    def read(self, folder: Path) -> Contents:
        """Returns the members, in their order, of the archive in a folder; raises UserError if they are not there."""
        path = folder / self.file
        content = _read(path)
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise UserError(f"{path} has another hash than the published one.")
        if self.within is not None:
            (content,) = _members(path, content, (self.within,))
            path = path / self.within
        found = _members(path, content, self.members)
        if hashlib.sha256(b"".join(found)).hexdigest() != self.members_sha256:
            raise UserError(f"{path}: what it holds has another hash than the published one.")
        return found


def tar_members(path: Path, wanted: Collection[str], file: BinaryIO | None = None) -> dict[str, bytes]:
    """Reads the wanted members of a .tar.gz archive in one pass.

    What else the archive holds, and where it points, is no matter.

    Args:
        path: the archive, by which errors call it.
        wanted: names of the members.
        file: its content, where it is no file of its own.
    """
    found = dict[str, bytes]()
    try:
        with tarfile.open(path if file is None else None, "r|gz", file) as packed:
            for member in packed:
                if member.name in wanted and member.name not in found and member.isreg() and member.size <= MAX_FILE:
                    content = packed.extractfile(member)
                    found[member.name] = b"" if content is None else content.read()
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise UserError(f"{path} cannot be read as a .tar.gz archive: {reason(error)}.") from error
    return _complete(path, found, wanted)


def reason(error: Exception) -> str:
    """Returns what an error says, in as few words as it has."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _members(path: Path, content: bytes, wanted: tuple[str, ...]) -> Contents:
    read = tar_members if path.name.endswith(".tar.gz") else _zip_members
    found = read(path, wanted, io.BytesIO(content))
    return tuple(found[name] for name in wanted)


def _zip_members(path: Path, wanted: Collection[str], file: BinaryIO) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(file) as packed:
            sizes = {member.filename: member.file_size for member in packed.infolist()}
            found = {name: packed.read(name) for name in wanted if sizes.get(name, MAX_FILE + 1) <= MAX_FILE}
    except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} cannot be read as a zip archive: {reason(error)}.") from error
    return _complete(path, found, wanted)


def _complete(path: Path, found: dict[str, bytes], wanted: Collection[str]) -> dict[str, bytes]:
    missing = set(wanted) - set(found)
    if missing:
        raise UserError(f"{path} lacks {min(missing)}: it is not the published archive.")
    return found


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_FILE)
    except FileNotFoundError:
        raise UserError(f"{path.parent} holds no {path.name}: name the folder that has it.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {reason(error)}.") from error
