"""Image sets that are fetched once: what each is, where it is cached, and how it becomes examples.

A cache file is one .npy of rows, the training examples first, in the official order; whichever source it came from, its
bytes have the one published SHA-256, checked when it is written and whenever it is opened.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fednormec.data.cache import cache_folder, read_cache, wrong_hash
from fednormec.data.formats import (
    CIFAR_SHAPE,
    FASHION_SHAPE,
    read_cifar10,
    read_fashion_mnist,
    row,
)
from fednormec.data.sources import Examples, NpzData, Takeable


@dataclass(frozen=True)
class ImageSet:
    """Published set of labelled images.

    Attributes:
        name: what it is called here.
        about: one line for a person.
        terms: licence, or the terms of use.
        shape: shape of one image (channels, height, width).
        train: number of training images.
        test: number of test images.
        sha256: hash of all its rows.
        mean: usual mean of each channel.
        std: usual standard deviation of each channel.
        read: read(folder) -> rows, from the published files.
    """

    name: str
    about: str
    terms: str
    shape: tuple[int, int, int]
    train: int
    test: int
    sha256: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    read: Callable[[Path], np.ndarray]

    @property
    def path(self) -> Path:
        """Path of the cache file, whether it is there or not."""
        return cache_folder() / f"{self.name}.npy"

    def check(self, rows: np.ndarray) -> str | None:
        """Returns what is wrong with these rows; None if they are the published ones."""
        if rows.dtype != row(self.shape) or rows.shape != (self.train + self.test,):
            return f"expected {self.train + self.test} images of {'x'.join(map(str, self.shape))}"
        return wrong_hash(rows, self.sha256)


CIFAR10 = ImageSet(
    name="cifar10",
    about="60,000 colour photographs, 3x32x32, of 10 kinds of things (Krizhevsky, 2009)",
    terms="none stated by its author",
    shape=CIFAR_SHAPE,
    train=50_000,
    test=10_000,
    sha256="013ba16d14ecc4829da62bf2af648ca30f600491ecb3e7f329c827db0dd17522",
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    read=read_cifar10,
)
FASHION_MNIST = ImageSet(
    name="fashion_mnist",
    about="70,000 grey pictures, 1x28x28, of 10 kinds of clothes (Xiao, Rasul and Vollgraf, 2017)",
    terms="MIT",
    shape=FASHION_SHAPE,
    train=60_000,
    test=10_000,
    sha256="21aad080a5e96a3fcb882b59494caf34246facf76eb482bfc80b62d8b626c88e",
    mean=(0.2860,),
    std=(0.3530,),
    read=read_fashion_mnist,
)
IMAGE_SETS = {images.name: images for images in (CIFAR10, FASHION_MNIST)}


@dataclass(frozen=True, eq=False)
class Images:
    """Images in uint8, in a file perhaps, that become normalised float32 examples when they are taken, not before."""

    x: np.ndarray
    y: np.ndarray
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.y)

    @property
    def person(self) -> None:
        """Whose each image is: nobody says."""

    def take(self, index: np.ndarray) -> Examples:
        """Returns the examples at these indices: (pixel/255 - mean)/std in each channel."""
        x = self.x[index].astype(np.float32)
        x /= 255
        x -= _per_channel(self.mean)
        x /= _per_channel(self.std)
        return Examples(x, self.y[index])

    def pixels(self) -> "Images":
        """Returns the images so that examples have pixels from 0 to 1, not normalised."""
        return replace(self, mean=(0.0,) * len(self.mean), std=(1.0,) * len(self.std))

    def joined(self, other: Takeable) -> "Images":
        """Returns these images and then the other ones of the same set."""
        x, y = np.concatenate([self.x, other.x]), np.concatenate([self.y, other.y])
        return Images(x, y, self.mean, self.std)


def cifar10() -> NpzData:
    """Reads the 50,000 and 10,000 images of CIFAR-10, normalised; after `fednormec data fetch cifar10`."""
    return _all(CIFAR10)


def fashion_mnist() -> NpzData:
    """Reads the 60,000 and 10,000 images of Fashion-MNIST, normalised; after `fednormec data fetch fashion_mnist`."""
    return _all(FASHION_MNIST)


def open_images(images: ImageSet) -> tuple[Images, Images]:
    """Opens the training and the test images, mapped into memory and verified."""
    rows = read_cache(images)
    y = rows["y"].astype(np.int64)
    train, test = slice(0, images.train), slice(images.train, None)
    return tuple(Images(rows["x"][part], y[part], images.mean, images.std) for part in (train, test))  # type: ignore[return-value]


def _all(images: ImageSet) -> NpzData:
    train, test = (part.take(np.arange(len(part))) for part in open_images(images))
    return NpzData(train, test, None)


def _per_channel(values: tuple[float, ...]) -> np.ndarray:
    return np.array(values, np.float32)[:, None, None]
