"""Folders of images: folder/class/image, or folder/client/class/image."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fednormec.data.images import Images
from fednormec.errors import UserError, known

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
GREY = ("1", "L", "LA", "La")
DEEP = ("I", "F")  # and all that begins with I;
TEST = "test"


@dataclass(frozen=True)
class Pictures:
    """Form that the images of a folder are brought into.

    Args:
        size: [height, width] that every image is resized to; None: all have one size already.
        channels: 1 for grey, 3 for colour; None: what the first image has.
        labels: names of the classes in order, which are the folders' names; None: all there are, sorted.
    """

    size: Sequence[int] | None = None
    channels: int | None = None
    labels: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise UserError(f"size must be [height, width], such as [32, 32], not {list(self.size)}.")
        if self.channels not in (None, 1, 3):
            raise UserError(f"channels must be 1 for grey or 3 for colour, not {self.channels}.")
        if self.labels is not None and not 0 < len(set(self.labels)) == len(self.labels):
            raise UserError("labels must be a list of different names of classes, at least one.")


AS_THEY_ARE = Pictures()


class PictureFolder(NamedTuple):
    """Content of a folder of images, and the form they have.

    Attributes:
        train: images to train on, in 0..1 when they are taken.
        test: images of the folder test, beside those of the clients; None: there is none.
        client_ids: name of the client of each image of `train`; None: the folder names none.
        form: the form with everything spelled out.
    """

    train: Images
    test: Images | None
    client_ids: np.ndarray | None
    form: Pictures


def is_picture_folder(source: str | Path) -> bool:
    """Returns whether this is a folder with folders of images, one or two levels down."""
    return os.path.isdir(source) and next(_files(Path(source)), None) is not None


def names_clients(source: str | Path) -> bool:
    """Returns whether a folder of images has a folder for each client, and not only for each class."""
    first = next(_files(Path(source)), None)
    return first is not None and len(first.relative_to(source).parts) > 2


def read_pictures(source: str | Path, form: Pictures = AS_THEY_ARE) -> PictureFolder:
    """Reads folder/class/image, or folder/client/class/image, where the client called test is the public test set.

    Pixels are divided by 255, channels come first.

    Args:
        source: the folder.
        form: the form that the images are brought into.
    """
    files = list(_files(Path(source)))
    if not files:
        raise UserError(f"expected images in {source}, in a folder for each class, found none; check the path.")
    depths = {len(file.relative_to(source).parts): file for file in files}
    if len(depths) > 1:
        raise UserError(f"{depths[min(depths)]} and {depths[max(depths)]} do not lie equally deep: expected images in "
                        f"{source}/class, or all of them in {source}/client/class.")  # fmt: skip
    named = 3 in depths
    classes = form.labels or sorted({file.parent.name for file in files})
    owners = [file.parent.parent.name if named else "" for file in files]
    if named and set(owners) <= {"train", TEST}:
        raise UserError(f"{source} has train and test, but no clients: set data.source = '{Path(source) / 'train'}' "
                        f"and data.test = '{Path(source) / TEST}'.")  # fmt: skip
    x, form = _stacked(files, Pictures(form.size, form.channels, tuple(classes)))
    y = np.array([_class(file, form) for file in files], np.int64)
    tested = np.array([owner == TEST for owner in owners])
    ids = np.array(owners, dtype=object)[~tested] if named else None
    test = _images(x[tested], y[tested]) if tested.any() else None
    return PictureFolder(_images(x[~tested], y[~tested]), test, ids, form)


def _files(folder: Path) -> Iterator[Path]:
    """Yields all images in folders of the folder, one or two levels down, in order; hidden files are skipped."""
    for first in _entries(folder):
        if first.is_dir():
            entries = _entries(first)
            yield from filter(_is_image, entries)
            for second in entries:
                if second.is_dir():
                    yield from filter(_is_image, _entries(second))


def _entries(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in sorted(os.listdir(folder)) if not name.startswith(".")]
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}.") from error


def _is_image(path: Path) -> bool:
    return path.name.lower().endswith(ENDINGS) and path.is_file()


def _stacked(files: list[Path], form: Pictures) -> tuple[np.ndarray, Pictures]:
    """Returns all images in uint8, (images, channels, height, width), and the form with its size and channels."""
    first, grey = _opened(files[0], None, None)
    size = tuple(form.size or first.shape[:2])
    channels = form.channels or (1 if grey else 3)
    stacked = np.empty((len(files), channels, *size), np.uint8)
    for i, file in enumerate(files):
        pixels, grey = _opened(file, form.size, channels)
        if form.channels is None and grey != (channels == 1):
            raise UserError(f"{file} is {'grey' if grey else 'in colour'}, and {files[0]} is not: set data.channels to "
                            "1 or 3 to have them all alike.")  # fmt: skip
        if pixels.shape[:2] != size:
            raise UserError(f"{file} has {pixels.shape[0]}x{pixels.shape[1]} pixels, {files[0]} {size[0]}x{size[1]}: "
                            "set data.size, such as [32, 32], to have them all alike.")  # fmt: skip
        stacked[i] = pixels.reshape(*size, channels).transpose(2, 0, 1)
    return stacked, Pictures(tuple(size), channels, form.labels)


def _opened(file: Path, size: Sequence[int] | None, channels: int | None) -> tuple[np.ndarray, bool]:
    """Returns the pixels of an image in uint8, and whether it is grey."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            if image.mode in DEEP or image.mode.startswith("I;"):
                raise UserError(f"{file} has more than 8 bits for a pixel (mode {image.mode}): save it with 8.")
            grey = image.mode in GREY
            shown = image.convert("L" if (channels or (1 if grey else 3)) == 1 else "RGB")
            if size is not None:
                shown = shown.resize((size[1], size[0]), Image.Resampling.BILINEAR)
            return np.asarray(shown), grey
    except UserError:
        raise
    except Exception as error:  # PIL raises a dozen types on damaged bytes; all mean the same
        said = " ".join(str(getattr(error, "strerror", None) or error).split()).rstrip(".")
        raise UserError(f"{file} cannot be read as an image: {said}.") from error


def _class(file: Path, form: Pictures) -> int:
    names = list(form.labels or ())
    known(f"class, the folder of {file},", file.parent.name, names)
    return names.index(file.parent.name)


def _images(x: np.ndarray, y: np.ndarray) -> Images:
    return Images(x, y, (0.0,) * x.shape[1], (1.0,) * x.shape[1])
