"""Folders of images: classes by folder, clients by folder, one form for all; what cannot be read is named."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fednormec.data.pictures import Pictures, is_picture_folder, read_pictures
from fednormec.errors import UserError

RNG = np.random.default_rng(0)


def put(path: Path, pixels: np.ndarray) -> np.ndarray:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return pixels


def grey(height: int = 4, width: int = 3) -> np.ndarray:
    return RNG.integers(0, 256, (height, width)).astype(np.uint8)


def colour(height: int = 4, width: int = 3) -> np.ndarray:
    return RNG.integers(0, 256, (height, width, 3)).astype(np.uint8)


def all_of(images: object) -> np.ndarray:
    return images.take(np.arange(len(images))).x  # type: ignore[attr-defined]


def test_classes_are_folders_and_nobody_owns_them(tmp_path: Path) -> None:
    pixels = [put(tmp_path / name, grey()) for name in ("cat/a.png", "cat/b.png", "dog/a.PNG")]
    (tmp_path / "cat" / ".hidden.png").write_bytes(b"")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "readme.png").write_bytes(b"no class, and not looked at")
    train, test, ids, form = read_pictures(tmp_path)
    assert form == Pictures((4, 3), 1, ("cat", "dog")) and test is None and ids is None
    assert train.y.tolist() == [0, 0, 1]
    x = all_of(train)
    assert x.shape == (3, 1, 4, 3) and x.dtype == np.float32
    assert np.array_equal(x[:, 0], np.stack(pixels).astype(np.float32) / 255)


def test_clients_are_folders_of_classes_and_test_is_none(tmp_path: Path) -> None:
    names = ("ann/cat/1.png", "ann/dog/1.png", "bob/dog/1.png", "test/cat/1.png")
    pixels = [put(tmp_path / name, colour()) for name in names]
    train, test, ids, form = read_pictures(tmp_path)
    assert ids is not None and ids.tolist() == ["ann", "ann", "bob"] and train.y.tolist() == [0, 1, 1]
    assert test is not None and test.y.tolist() == [0] and form.channels == 3
    assert np.array_equal(all_of(train), np.stack(pixels[:3]).transpose(0, 3, 1, 2).astype(np.float32) / 255)
    assert np.array_equal(all_of(test)[0], pixels[3].transpose(2, 0, 1).astype(np.float32) / 255)


def test_names_of_classes_number_them(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        put(tmp_path / name / "1.png", grey())
    train, _, _, form = read_pictures(tmp_path, Pictures(labels=["dog", "bird", "cat"]))
    assert train.y.tolist() == [2, 0] and form.labels == ("dog", "bird", "cat")
    with pytest.raises(UserError, match=r"unknown class, the folder of .*dog.1.png, 'dog'"):
        read_pictures(tmp_path, Pictures(labels=["cat"]))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.booleans()), min_size=1, max_size=4),
       st.tuples(st.integers(1, 8), st.integers(1, 8)), st.sampled_from([1, 3]))  # fmt: skip
def test_images_of_any_size_are_brought_into_one(
    tmp_path_factory: pytest.TempPathFactory, images: list[tuple[int, int, bool]], size: tuple[int, int], channels: int
) -> None:
    folder = tmp_path_factory.mktemp("images")
    for i, (height, width, is_grey) in enumerate(images):
        put(
            folder / "a" / f"{i}.png", np.full((height, width) if is_grey else (height, width, 3), 40 * i + 7, np.uint8)
        )
    found = all_of(read_pictures(folder, Pictures(size, channels)).train)
    assert found.shape == (len(images), channels, *size)
    for i, one in enumerate(found):
        assert np.allclose(one, (40 * i + 7) / 255), "one grey stays one grey, whatever the size"


def test_resizing_is_that_of_pillow(tmp_path: Path) -> None:
    pixels = put(tmp_path / "a" / "1.png", grey(9, 7))
    resized = Image.fromarray(pixels).resize((3, 5), Image.Resampling.BILINEAR)
    found = all_of(read_pictures(tmp_path, Pictures([5, 3])).train)
    assert np.array_equal(found[0, 0], np.asarray(resized).astype(np.float32) / 255)


def test_images_that_are_not_alike_are_named(tmp_path: Path) -> None:
    put(tmp_path / "a" / "1.png", grey())
    put(tmp_path / "a" / "2.png", grey(5, 5))
    with pytest.raises(UserError, match=r"2.png has 5x5 pixels, .*1.png 4x3: set data.size"):
        read_pictures(tmp_path)
    put(tmp_path / "a" / "2.png", colour())
    with pytest.raises(UserError, match=r"2.png is in colour, and .*1.png is not: set data.channels"):
        read_pictures(tmp_path)


def test_images_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    put(tmp_path / "a" / "1.png", grey(40, 40))
    whole = (tmp_path / "a" / "1.png").read_bytes()
    for content in (b"", b"no image", whole[:200]):
        (tmp_path / "a" / "2.png").write_bytes(content)
        with pytest.raises(UserError, match=r"2.png cannot be read as an image: \w+"):
            read_pictures(tmp_path)
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(tmp_path / "a" / "2.png")
    with pytest.raises(UserError, match="2.png has more than 8 bits for a pixel"):
        read_pictures(tmp_path)


def test_folders_that_are_not_of_this_form(tmp_path: Path) -> None:
    assert not is_picture_folder(tmp_path) and not is_picture_folder(tmp_path / "none")
    with pytest.raises(UserError, match="expected images in .*, in a folder for each class, found none"):
        read_pictures(tmp_path)
    put(tmp_path / "a" / "1.png", grey())
    assert is_picture_folder(tmp_path)
    put(tmp_path / "b" / "a" / "1.png", grey())
    with pytest.raises(UserError, match="do not lie equally deep"):
        read_pictures(tmp_path)


def test_a_folder_of_train_and_test_has_no_clients(tmp_path: Path) -> None:
    for name in ("train", "test"):
        put(tmp_path / name / "cat" / "1.png", grey())
    with pytest.raises(UserError, match=r"set data.source = '.*train' and data.test = '.*test'"):
        read_pictures(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": [3]}, r"size must be \[height, width\]"),
        ({"size": [3, 0]}, r"size must be \[height, width\]"),
        ({"channels": 2}, "channels must be 1 for grey or 3 for colour, not 2"),
        ({"labels": []}, "labels must be a list of different names"),
        ({"labels": ["a", "a"]}, "labels must be a list of different names"),
    ],
)
def test_forms_that_no_image_has(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Pictures(**settings)  # type: ignore[arg-type]
