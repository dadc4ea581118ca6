"""Public features: computed once for each example, kept by its content, and never taken from a damaged file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fednormec as fn
from fednormec.config.assemble import assemble
from fednormec.config.schema import Config
from fednormec.data import FederatedData, Kind, from_arrays
from fednormec.data.features import TOGETHER, Extractor, efficientnet_lite0, with_features
from fednormec.errors import UserError


class Counting:
    """Squares of the inputs; remembers how many examples it was asked for."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self.batches.append(len(x))
        return x.reshape(len(x), -1) ** 2

    @property
    def extractor(self) -> Extractor:
        return Extractor("squares", "1", lambda: self)


def data(seed: int = 0, sizes: tuple[int, ...] = (3, 5), test: int = 4) -> FederatedData:
    rng = np.random.default_rng(seed)
    *pairs, held = [(rng.standard_normal((n, 2, 3)), rng.integers(0, 3, n)) for n in (*sizes, test)]
    return from_arrays(pairs, held)


def stored(folder: Path) -> Path:
    (path,) = folder.glob("*.rows")
    return path


def test_every_example_is_computed_once_whoever_has_it(tmp_path: Path) -> None:
    counting, given_ = Counting(), data()
    found = with_features(given_, counting.extractor, tmp_path)
    for before, after in zip((*given_.clients, given_.test), (*found.clients, found.test), strict=True):
        assert np.allclose(after.x, before.x.reshape(len(before), -1) ** 2) and after.x.dtype == np.float32
        assert np.array_equal(after.y, before.y)
    assert sum(counting.batches) == 12 and found.names == given_.names
    with_features(given_, counting.extractor, tmp_path)
    moved = from_arrays([given_.clients[1], given_.clients[0]], given_.test)  # another partition of the same
    assert np.array_equal(with_features(moved, counting.extractor, tmp_path).clients[0].x, found.clients[1].x)
    assert sum(counting.batches) == 12


def test_it_goes_on_after_an_interruption(tmp_path: Path) -> None:
    many, counting = data(sizes=(3 * TOGETHER, 5), test=1), Counting()

    def killed(x: np.ndarray) -> np.ndarray:
        if len(counting.batches) == 2:
            raise KeyboardInterrupt
        return counting(x)

    with pytest.raises(KeyboardInterrupt):
        with_features(many, Extractor("squares", "1", lambda: killed), tmp_path)
    again = Counting()
    found = with_features(many, again.extractor, tmp_path)
    assert counting.batches == [TOGETHER] * 2 and sum(again.batches) == TOGETHER + 6
    assert np.allclose(found.clients[0].x, many.clients[0].x.reshape(3 * TOGETHER, -1) ** 2)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_a_file_cut_anywhere_is_completed_or_refused(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("cut")
    expected = with_features(data(), Counting().extractor, folder)
    path = stored(folder)
    content = path.read_bytes()
    path.write_bytes(content[: cut % len(content)])
    try:
        found = with_features(data(), Counting().extractor, folder)
    except UserError as error:
        assert "damaged" in str(error) and path.stat().st_size == cut % len(content) < 8
    else:
        assert all(np.array_equal(a.x, b.x) for a, b in zip(found.clients, expected.clients, strict=True))


@pytest.mark.parametrize("place", [0, 8, 20, 41, 60, -1])
def test_a_damaged_file_is_refused_and_left_as_it_is(tmp_path: Path, place: int) -> None:
    with_features(data(), Counting().extractor, tmp_path)
    path = stored(tmp_path)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"stored features in .* are damaged .*: delete that file"):
        with_features(data(), Counting().extractor, tmp_path)
    assert path.read_bytes() == bytes(content)


def test_settings_and_versions_have_files_of_their_own(tmp_path: Path) -> None:
    for key in ("1", "2"):
        with_features(data(), Counting().extractor._replace(key=key), tmp_path)
    assert len(list(tmp_path.glob("*.rows"))) == 2


@pytest.mark.parametrize(
    ("extract", "message"),
    [
        (lambda x: x[:1].reshape(1, -1), "one row of numbers for each"),
        (lambda x: np.zeros(len(x)), "one row of numbers for each"),
        (lambda x: np.array([["a"]] * len(x)), "one row of numbers for each"),
        (lambda x: np.full((len(x), 2), np.nan), "are not finite"),
    ],
)
def test_features_of_the_wrong_form_are_refused(tmp_path: Path, extract: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        with_features(data(), Extractor("own", "1", lambda: extract), tmp_path)
    assert not list(tmp_path.glob("*.rows"))


def test_features_of_unequal_length_are_refused(tmp_path: Path) -> None:
    lengths = iter((2, 3))
    uneven = Extractor("own", "1", lambda: lambda x: np.zeros((len(x), next(lengths))))
    with pytest.raises(UserError, match="features of 3 numbers came after some of 2"):
        with_features(data(sizes=(2 * TOGETHER,)), uneven, tmp_path)


def test_values_stay_values(tmp_path: Path) -> None:
    given_ = from_arrays([(np.ones((2, 3)), [0.5, 1.5])], kind=Kind(targets="values"))
    found = with_features(given_, Counting().extractor, tmp_path)
    assert found.kind == Kind(targets="values") and found.clients[0].y.tolist() == [0.5, 1.5]


# in a config

EXTRACT = """
import numpy as np


def moments(x, powers: int = 2):
    flat = x.reshape(len(x), -1)
    return np.stack([(flat**k).mean(1) for k in range(1, powers + 1)], 1)


def raises(x):
    raise ValueError("no")
"""
ASKED: Config = {
    "data": {"clients": 4, "examples": 60}, "model": {"name": "linear"}, "local": {"step": 0.5},
    "method": {"name": "fed_avg"}, "run": {"rounds": 2},
}  # fmt: skip


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(EXTRACT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDNORMEC_DATA", str(tmp_path / "cache"))


def test_own_features_of_a_config(own: None, tmp_path: Path) -> None:
    made = assemble(ASKED | {"features": {"name": "own.py:moments", "powers": 3}})
    assert made.problem.dim == (3 + 1) * 10 and set(made.config["code"]) == {"own.py"}
    assert made.config["features"] == {"name": "own.py:moments", "powers": 3}
    assert assemble(ASKED | {"features": {"name": "own.py:moments"}}).problem.dim == (2 + 1) * 10
    assert len(list((tmp_path / "cache" / "features").glob("*.rows"))) == 2
    done = fn.train(made.problem, made.algorithm, rounds=2)
    assert "test_accuracy" in done.history[-1]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "own.py:raises"}, "own.py:raises raised ValueError: no"),
        ({"name": "own.py:moments", "power": 2}, "did you mean 'powers'"),
        ({"name": "efficientnet"}, "unknown features 'efficientnet'; did you mean 'efficientnet_lite0'"),
        ({}, r"\[features\] needs a name"),
    ],
)
def test_mistakes_about_features_are_sentences(own: None, section: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        assemble(ASKED | {"features": section})


def test_only_named_parameters_are_trained() -> None:
    whole = assemble(ASKED | {"model": {"name": "mlp", "hidden": [5]}}).problem
    head = assemble(ASKED | {"model": {"name": "mlp", "hidden": [5], "trainable": ["3.*"]}})
    assert whole.dim == 65 * 5 + 6 * 10 and head.problem.dim == 6 * 10
    assert head.config["model"] == {"name": "mlp", "hidden": (5,), "trainable": ("3.*",)}
    x = head.problem.init(np.random.default_rng(0))
    done = fn.train(head.problem, head.algorithm, rounds=3)
    named = head.problem.named(done.x)
    before = head.problem.named(x)
    assert set(named) == {"1.weight", "1.bias", "3.weight", "3.bias"}
    assert np.array_equal(named["1.weight"], before["1.weight"])
    assert not np.array_equal(named["3.weight"], before["3.weight"])
    with pytest.raises(UserError, match=r"no parameter's name fits 'head.\*'; there are: 1.weight"):
        assemble(ASKED | {"model": {"name": "mlp", "trainable": ["head.*"]}})


# EfficientNet-Lite0


def test_efficientnet_needs_packages_or_works(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite_pytorch", reason="pip install 'fednormec[vision]'")
    x = np.random.default_rng(0).random((2, 3, 8, 8)).astype(np.float32)
    found = with_features(from_arrays([(x, [0, 1])]), efficientnet_lite0(size=32), tmp_path).clients[0].x
    assert found.shape == (2, 1280) and np.abs(found[0] - found[1]).max() > 0.01
    extract = efficientnet_lite0(size=32).open()
    for rows in (1, 2, 5, TOGETHER):
        some = np.concatenate([x, np.random.default_rng(1).random((TOGETHER, 3, 8, 8))]).astype(np.float32)[
            1 : 1 + rows
        ]
        assert np.array_equal(extract(some)[0], found[1]), "whatever it is computed beside"
    bytes_ = with_features(from_arrays([(255 * x, [0, 1])]), efficientnet_lite0(32, high=255.0), tmp_path)
    assert np.allclose(bytes_.clients[0].x, found, atol=1e-4)
    with pytest.raises(UserError, match="takes images"):
        with_features(from_arrays([(x[:, 0, 0], [0, 1])]), efficientnet_lite0(size=32), tmp_path)
    for wrong in ({"size": 0}, {"size": 1_000_000}, {"low": 1.0, "high": 1.0}):
        with pytest.raises(UserError, match=r"\[features\]"):
            efficientnet_lite0(**wrong)
