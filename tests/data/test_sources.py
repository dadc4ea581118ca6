"""Sources of data: what comes in is what the clients hold, and every mistake is one sentence that names its place."""

import io
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fednormec.data
from fednormec.data import (
    Examples,
    FederatedData,
    by_ids,
    digits,
    federate,
    from_arrays,
    iid,
    read_folder,
    read_npz,
    split,
)
from fednormec.errors import UserError

quick = settings(deadline=None, max_examples=60, database=None)
X, Y = np.arange(12.0).reshape(6, 2), np.array([0, 1, 2, 0, 1, 2])


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def numbered(count: int) -> Examples:
    """Examples that carry their own number as input and as label, so that a mix-up shows."""
    return Examples(np.arange(count, dtype=np.float64)[:, None], np.arange(count))


def npz_bytes(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def write(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)
    return path


# Examples: one kind of arrays


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.bool_, np.float16, np.float32, ">f4"])
def test_inputs_become_float32(dtype: object) -> None:
    examples = Examples(np.array([[0, 1], [1, 1]], dtype=dtype), np.array([0, 1]))
    assert examples.x.dtype == np.float32
    assert examples.x.tolist() == [[0, 1], [1, 1]]


@pytest.mark.parametrize("dtype", [np.float64, ">f8"])
def test_float64_inputs_stay_float64_in_native_order(dtype: object) -> None:
    x = Examples(np.array([[1 / 3]], dtype=dtype), np.array([0])).x
    assert x.dtype == np.float64 and x.dtype.isnative
    assert x[0, 0] == 1 / 3


def test_uint8_images_are_not_rescaled() -> None:
    assert Examples(np.array([[255, 7]], dtype=np.uint8), np.array([0])).x.tolist() == [[255.0, 7.0]]


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float16, np.float64, np.uint64, ">i4"])
def test_whole_labels_become_int64(dtype: object) -> None:
    labels = Examples(np.zeros((3, 1)), np.array([0, 2, 1], dtype=dtype)).y
    assert labels.dtype == np.int64
    assert labels.tolist() == [0, 2, 1]


def test_arrays_are_ready_for_torch() -> None:
    """torch reads neither negative strides nor foreign byte orders."""
    examples = Examples(X[::-1], Y[::-1].astype(">i8"))
    assert torch.equal(torch.from_numpy(examples.x), torch.tensor(X).flip(0))
    assert torch.equal(torch.from_numpy(examples.y), torch.tensor(Y).flip(0))


def test_inputs_that_are_not_finite_are_kept() -> None:
    x = Examples(np.array([[np.nan], [np.inf]]), np.array([0, 1])).x
    assert np.isnan(x[0, 0]) and np.isposinf(x[1, 0])


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X, Y[:5], "got 6 in x and 5 in y"),
        (X[:0], Y[:0], "got no data"),
        (X, Y - 1, "whole numbers from 0 to 2147483647, got -1"),
        (X, Y + 0.5, "got 0.5"),
        (X, np.array([0, 1, np.nan, 0, 1, 2]), "got nan"),
        (X, np.array([0, 1, np.inf, 0, 1, 2]), "got inf"),
        (X, np.array([0, 1, 2**63, 0, 1, 2], dtype=np.uint64), "got 9223372036854775808"),
        (X, Y.astype(str), "y must be one whole number per example, got dtype <U"),
        (X, np.eye(3)[Y], r"y must be one whole number per example, got dtype float64 and shape \(6, 3\)"),
        (X.astype(str), Y, "x must be numbers of shape .* got dtype <U"),
        (X.astype(object), Y, "x must be numbers of shape .* got dtype object"),
        (X.astype(complex), Y, "x must be numbers of shape .* got dtype complex128"),
        (np.float64(3), Y, r"x must be numbers of shape .* got dtype float64 and shape \(\)"),
        ([[1.0], [2.0, 3.0]], Y[:2], "x must be an array that numpy can hold, got list"),
        (torch.zeros(6, 2, dtype=torch.bfloat16), Y, "x must be an array that numpy can hold, got torch.bfloat16"),
    ],
)
def test_bad_examples_are_refused_and_their_place_is_named(x: object, y: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Examples(x, y)
    with pytest.raises(UserError, match=f"^client 1: .*{message}"):
        from_arrays([(X, Y), (x, y)])
    with pytest.raises(UserError, match=f"^the test set: .*{message}"):
        from_arrays([(X, Y)], test=(x, y))


# FederatedData


def test_num_classes_counts_clients_and_test_alike() -> None:
    assert from_arrays([(X, Y), (X, Y + 4)]).num_classes == 7
    assert from_arrays([(X, Y), (X, Y)], test=(X, Y + 9)).num_classes == 12


def test_input_shape_is_that_of_one_example() -> None:
    assert from_arrays([(np.zeros((6, 3, 4, 5)), Y)]).input_shape == (3, 4, 5)


@pytest.mark.parametrize("wide", ["client", "test"])
def test_mixed_precisions_become_float64_throughout(wide: str) -> None:
    single, double = (X.astype(np.float32), Y), (X + 1e-12, Y)
    data = from_arrays([single, double if wide == "client" else single], test=single if wide == "client" else double)
    assert data.test is not None
    assert {examples.x.dtype for examples in (*data.clients, data.test)} == {np.dtype(np.float64)}
    assert np.array_equal((data.clients[1] if wide == "client" else data.test).x, double[0])
    assert np.array_equal(data.clients[0].x, X)


def test_equal_precisions_are_left_alone() -> None:
    assert from_arrays([(X.astype(np.float32), Y)] * 2).clients[1].x.dtype == np.float32


def test_clients_and_test_must_have_one_shape() -> None:
    with pytest.raises(UserError, match=r"got \(2,\) in client 0 and \(3,\) in client 1"):
        from_arrays([(X, Y), (np.zeros((1, 3)), [0])])
    with pytest.raises(UserError, match=r"got \(2,\) in client 0 and \(\) in the test set"):
        from_arrays([(X, Y)], test=(X[:, 0], Y))


def test_there_must_be_a_client_and_a_name_for_each() -> None:
    with pytest.raises(UserError, match="at least one client"):
        from_arrays([])
    with pytest.raises(UserError, match=r"2 different client names, got \['a', 'a'\]"):
        FederatedData((numbered(1), numbered(2)), None, ("a", "a"))
    with pytest.raises(UserError, match=r"1 different client names, got \[\]"):
        FederatedData((numbered(1),), None, ())


# from_arrays


def test_from_arrays_takes_numpy_and_torch_alike() -> None:
    tensors = (torch.tensor(X, requires_grad=True), torch.tensor(Y))
    data = from_arrays([(X, Y), tensors], test=tensors)
    assert data.names == ("0", "1")
    assert data.test is not None
    for examples in (*data.clients, data.test):
        assert type(examples.x) is type(examples.y) is np.ndarray
        assert np.array_equal(examples.x, X) and np.array_equal(examples.y, Y)


@pytest.mark.parametrize("pair", [X, (X,), (X, Y, Y), None])
def test_what_is_not_a_pair_is_refused(pair: object) -> None:
    with pytest.raises(UserError, match=r"^client 0: expected a pair \(x, y\)"):
        from_arrays([pair])


# digits


@pytest.mark.long
def test_digits_are_the_bundled_images() -> None:
    from sklearn.datasets import load_digits

    examples = digits()
    assert examples.x.shape == (1797, 1, 8, 8) and examples.x.dtype == np.float32
    assert examples.x.min() == 0.0 and examples.x.max() == 1.0
    assert np.array_equal(examples.x[:, 0] * 16, load_digits().images)
    assert examples.y.dtype == np.int64 and np.array_equal(examples.y, load_digits().target)


def test_importing_the_package_imports_neither_torch_nor_sklearn() -> None:
    """With an empty parent package, so that the answer is about these modules alone."""
    code = (
        "import sys, types; parent = types.ModuleType('fednormec'); parent.__path__ = [sys.argv[1]]; "
        "sys.modules['fednormec'] = parent; import fednormec.data; "
        "sys.exit(str({'torch', 'sklearn'} & set(sys.modules)) if {'torch', 'sklearn'} & set(sys.modules) else 0)"
    )
    folder = str(Path(fednormec.data.__file__).parent.parent)
    result = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# read_npz


def test_read_npz_returns_what_was_written(tmp_path: Path) -> None:
    ids = np.array(["b", "a", "b", "a", "c", "c"])
    stored = read_npz(write(tmp_path / "all.npz", x=X, y=Y, client=ids, x_test=X[:2], y_test=Y[:2]))
    assert np.array_equal(stored.train.x, X) and np.array_equal(stored.train.y, Y)
    assert stored.test is not None
    assert np.array_equal(stored.test.x, X[:2]) and np.array_equal(stored.test.y, Y[:2])
    assert np.array_equal(stored.client_ids, ids)


def test_read_npz_needs_only_x_and_y(tmp_path: Path) -> None:
    stored = read_npz(str(write(tmp_path / "all.npz", x=X, y=Y)))
    assert len(stored.train) == 6
    assert stored.test is None and stored.client_ids is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X, "labels": Y}, r"expected the keys x, y, found \['x', 'labels'\]; add y"),
        ({"a": X}, r"found \['a'\]; add x, y"),
        ({"x": X, "y": Y, "x_test": X}, "found only x_test"),
        ({"x": X, "y": Y, "y_test": Y}, "found only y_test"),
        ({"x": X, "y": Y[:5]}, "got 6 in x and 5 in y"),
        ({"x": X, "y": Y, "x_test": X, "y_test": Y[:5]}, "x_test and y_test: .*got 6 in x and 5 in y"),
        ({"x": X, "y": Y, "x_test": X[:, :1], "y_test": Y}, r"got \(2,\) in x in .* and \(1,\) in x_test"),
        ({"x": X, "y": Y - 1}, "got -1"),
        ({"x": X[:0], "y": Y[:0]}, "got no data"),
        ({"x": X, "y": Y, "client": Y[:5]}, r"each of the 6 examples, got shape \(5,\)"),
        ({"x": X, "y": Y, "client": X}, r"each of the 6 examples, got shape \(6, 2\)"),
        ({"x": X.astype(object), "y": Y}, "Python objects"),
    ],
)
def test_bad_npz_contents_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    path = write(tmp_path / "bad.npz", **arrays)
    with pytest.raises(UserError, match=message) as caught:
        read_npz(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected an .npz file at .*nowhere.npz, found none"):
        read_npz(tmp_path / "nowhere.npz")


class Bomb:
    """Unpickling this would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_what_is_no_npz_is_refused_and_never_unpickled(tmp_path: Path) -> None:
    bomb = Bomb(tmp_path / "exploded")
    array = io.BytesIO()
    np.save(array, X)
    contents = {
        "text": b"x,y\n1,2\n",
        "empty": b"",
        "one array": array.getvalue(),
        "pickle": pickle.dumps(bomb),
        "pickled array": npz_bytes(x=np.array([bomb], dtype=object), y=Y[:1]),
    }
    for name, content in contents.items():
        path = tmp_path / f"{name}.npz"
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"expected an .npz file of plain arrays at .*{name}.npz"):
            read_npz(path)
    with pytest.raises(UserError, match="expected an .npz file of plain arrays"):
        read_npz(tmp_path)
    assert not (tmp_path / "exploded").exists()
    np.load(tmp_path / "pickled array.npz", allow_pickle=True)["x"]  # the bomb is real
    assert (tmp_path / "exploded").exists()


@quick
@given(st.data())
def test_a_truncated_file_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    whole = npz_bytes(x=X, y=Y)
    path = tmp_path_factory.mktemp("cut") / "cut.npz"
    path.write_bytes(whole)
    assert len(read_npz(path).train) == 6
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(UserError, match="cut.npz"):
        read_npz(path)


@quick
@given(st.data())
def test_a_damaged_file_is_read_or_refused_in_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    damaged = bytearray(npz_bytes(x=X, y=Y))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("damaged") / "damaged.npz"
    path.write_bytes(damaged)
    try:
        stored = read_npz(path)
    except UserError as error:
        assert "damaged.npz" in str(error)
    else:
        assert np.array_equal(stored.train.x, X) and np.array_equal(stored.train.y, Y)


# read_folder


def test_read_folder_has_one_client_per_file_in_order(tmp_path: Path) -> None:
    for name, labels in (("hospital-b", Y), ("hospital-a", Y + 1), ("test", Y + 2)):
        write(tmp_path / f"{name}.npz", x=X, y=labels)
    (tmp_path / "README.txt").write_text("not data")
    data = read_folder(tmp_path)
    assert data.names == ("hospital-a", "hospital-b")
    assert [client.y.tolist() for client in data.clients] == [(Y + 1).tolist(), Y.tolist()]
    assert data.test is not None and data.test.y.tolist() == (Y + 2).tolist()


def test_read_folder_without_a_test_set(tmp_path: Path) -> None:
    write(tmp_path / "a.npz", x=X, y=Y)
    assert read_folder(str(tmp_path)).test is None


def test_a_folder_without_clients_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected one .npz file per client .* found none"):
        read_folder(tmp_path)
    write(tmp_path / "test.npz", x=X, y=Y)
    with pytest.raises(UserError, match="expected one .npz file per client .* found none"):
        read_folder(tmp_path)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", write(tmp_path / "a.npz", x=X, y=Y)):
        with pytest.raises(UserError, match="expected a folder of .npz files"):
            read_folder(path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, r"bad.npz: expected the keys x, y, found \['x'\]"),
        ({"x": X[:0], "y": Y[:0]}, "bad.npz: .*got no data"),
        ({"x": X, "y": Y[:3]}, "bad.npz: .*got 6 in x and 3 in y"),
        ({"x": X, "y": Y - 1}, "bad.npz: .*got -1"),
        ({"x": X[:, :1], "y": Y}, r"got \(1,\) in client bad and \(2,\) in client good"),
    ],
)
def test_a_bad_client_file_is_named(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    write(tmp_path / "good.npz", x=X, y=Y)
    write(tmp_path / "bad.npz", **arrays)
    with pytest.raises(UserError, match=message):
        read_folder(tmp_path)


# split and federate


@quick
@given(st.integers(2, 60), st.floats(0, 1, exclude_max=True), st.integers(0, 2**32))
def test_split_shuffles_into_two_disjoint_covering_sets(count: int, fraction: float, seed: int) -> None:
    train, test = split(count, fraction, rng(seed))
    assert sorted(np.concatenate([train, test]).tolist()) == list(range(count))
    assert len(test) == (0 if fraction == 0 else min(max(round(fraction * count), 1), count - 1))


def test_split_puts_every_example_aside_equally_often() -> None:
    draws, hits = 3000, np.zeros(10)
    for seed in range(draws):
        _, test = split(10, 0.3, rng(seed))
        hits[test] += 1
    assert np.abs(hits / draws - 0.3).max() < 5 * np.sqrt(0.3 * 0.7 / draws)


def test_a_fraction_of_zero_still_shuffles() -> None:
    train, test = split(50, 0, rng())
    assert len(test) == 0
    assert train.tolist() != list(range(50))


def test_take_keeps_examples_and_labels_together() -> None:
    taken = numbered(9).take(np.array([4, 1, 7]))
    assert taken.y.tolist() == [4, 1, 7]
    assert taken.x[:, 0].tolist() == [4, 1, 7]


def test_joined_examples_come_one_after_the_other() -> None:
    joined = numbered(4).joined(numbered(2))
    assert joined.y.tolist() == joined.x[:, 0].tolist() == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan"), float("inf")])
def test_a_bad_fraction_is_refused(fraction: float) -> None:
    with pytest.raises(UserError, match=f"test_fraction must be at least 0 and below 1, got {fraction}"):
        split(10, fraction, rng())


def test_one_example_cannot_be_split() -> None:
    assert len(split(1, 0, rng())[0]) == 1
    with pytest.raises(UserError, match="at least two examples"):
        split(1, 0.5, rng())


@quick
@given(st.data(), st.integers(1, 60), st.integers(0, 2**32))
def test_federate_gives_each_client_its_part(data: st.DataObject, count: int, seed: int) -> None:
    parts = iid(count, data.draw(st.integers(1, count)), rng(seed))
    federated = federate(numbered(count), numbered(3), parts)
    assert federated.names == tuple(map(str, range(len(parts))))
    assert federated.test is not None and len(federated.test) == 3
    for part, client in zip(parts, federated.clients, strict=True):
        assert np.array_equal(client.y, part) and np.array_equal(client.x[:, 0], part)


def test_federate_keeps_the_names_of_the_ids() -> None:
    ids = np.array(["b", "a", "b"])
    data = federate(numbered(3), None, by_ids(ids), names=np.unique(ids).tolist())
    assert {name: client.y.tolist() for name, client in zip(data.names, data.clients, strict=True)} == {
        "a": [1],
        "b": [0, 2],
    }


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (np.array([], dtype=np.int64), "got no data"),
        (np.array([3]), "expected indices from 0 to 2"),
        (np.array([-1]), "expected indices from 0 to 2"),
        (np.array([0.0]), "expected indices from 0 to 2, got float64"),
        (np.array([True, False, True]), "expected indices from 0 to 2, got bool"),
        (np.array([[0, 1]]), r"expected indices from 0 to 2, got int64 of shape \(1, 2\)"),
    ],
)
def test_a_bad_part_is_refused_and_its_client_named(part: np.ndarray, message: str) -> None:
    with pytest.raises(UserError, match=f"^client 1: .*{message}"):
        federate(numbered(3), None, [np.array([0]), part])


def test_federate_refuses_other_numbers_of_names_and_other_shapes() -> None:
    with pytest.raises(UserError, match="got 1 names for 2 clients"):
        federate(numbered(3), None, iid(3, 2, rng()), names=["a"])
    with pytest.raises(UserError, match="in the test set"):
        federate(numbered(3), Examples(X, Y), iid(3, 2, rng()))
