"""Sources of the clients' data: the bundled digits, .npz files, a folder with one file per client, arrays.

Whatever the source, the result is the same: `FederatedData`, checked when it is made, so that no later code has to.
Values are taken as they are: uint8 images stay in 0..255 as float32, so divide by 255 yourself where a model wants it.
x may hold non-finite values; a run skips such clients and says so.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from fednormec.core.ids import numbered
from fednormec.data.items import gathered, is_dataset
from fednormec.data.persons import as_persons, together
from fednormec.data.texts import as_texts, content
from fednormec.errors import UserError, at_least_one

if TYPE_CHECKING:
    from torch import Tensor

    Pair = tuple[np.ndarray | Tensor, np.ndarray | Tensor]

MAX_LABEL = 2**31 - 1
Inputs = Literal["numbers", "tokens", "texts"]


class Kind(NamedTuple):
    """Kind of what examples are made of.

    Attributes:
        inputs: "numbers"; "tokens", whole numbers that name something, such as the words of a text; or "texts", which
            become numbers by [features] before a model sees them.
        targets: "classes", numbered from 0, or "values" to predict.
    """

    inputs: Inputs = "numbers"
    targets: Literal["classes", "values"] = "classes"


USUAL = Kind()


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples with their targets, N >= 1 of them.

    Anything numpy can read is accepted, torch tensors too, and converted; whole numbers stored as floats are classes.

    Args:
        x: inputs (N, ...), in float32 (float64 stays float64); tokens in int64, none negative; texts (N,) as str.
        y: classes (N,) in int64, none negative, or several in a row (N, T); values (N, ...) in float32 (float64 stays).
        kind: kind of what is in x and y.
        person: whose each example is (N,), numbers or texts, none missing; None: each example is somebody else's.
    """

    x: np.ndarray
    y: np.ndarray
    kind: Kind = USUAL
    person: np.ndarray | None = None

    def __post_init__(self) -> None:
        x = _inputs(self.x, self.kind)
        classes = self.kind.targets == "classes"
        y = _classes(_array(self.y, "y")) if classes else _numbers(_array(self.y, "y"), "y")
        if len(x) != len(y):
            raise UserError(f"expected one label per example, got {len(x)} in x and {len(y)} in y; make them agree")
        if len(x) == 0:
            raise UserError("expected at least one example, got no data; add some or leave this out")
        object.__setattr__(self, "x", x)
        object.__setattr__(self, "y", y)
        if self.person is not None:
            object.__setattr__(self, "person", as_persons(_array(self.person, "person"), len(y)))

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: np.ndarray) -> "Examples":
        """Returns the examples at these indices."""
        person = None if self.person is None else self.person[index]
        return replace(self, x=self.x[index], y=self.y[index], person=person)

    def joined(self, other: "Takeable") -> "Examples":
        """Returns these examples and then the other ones."""
        together((self.person, other.person), ("the first set", "the other"))
        given = [ids for ids in (self.person, other.person) if ids is not None]
        x, y = np.concatenate([self.x, other.x]), np.concatenate([self.y, other.y])
        return replace(self, x=x, y=y, person=np.concatenate(given) if given else None)

    def __iter__(self) -> Iterator[np.ndarray]:
        """Unpacks as a pair: x, y = examples."""
        return iter((self.x, self.y))


class Shapes(NamedTuple):
    """Shapes of data, and what their numbers are: public facts, from which a model is built without the data.

    Attributes:
        inputs: shape of one example.
        targets: shape of one example's target: () for one class or value.
        outputs: number of outputs of a model.
        kind: kind of what examples are made of.
        classes: names of the classes, where they are known.
        before: shape of one example, and kind of its inputs, before features took their place; None: none did.
    """

    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    outputs: int
    kind: Kind = USUAL
    classes: tuple[str, ...] | None = None
    before: tuple[tuple[int, ...], Inputs] | None = None

    @property
    def examples(self) -> "tuple[tuple[int, ...], Kind]":
        """Shape of one example, and its kind, as data bring it."""
        shape, kind = (self.inputs, self.kind.inputs) if self.before is None else self.before
        return shape, self.kind._replace(inputs=kind)


MOST_CLASSES = 100_000  # or as many as there are examples: beyond that labels are something else, such as identities


@dataclass(frozen=True, eq=False)
class FederatedData:
    """Data of all clients and a test set: one shape of examples and of targets, one kind and one dtype throughout.

    Args:
        clients: each client's own examples.
        test: test set; None: there is none. It is public unless `held_out`.
        names: one name per client, all different.
        classes: number of classes, where that was agreed; None: the labels tell.
        held_out: whether the test set was held out of clients' own data: figures on it are then not private.
        owners: number of the client that each example of the test set was held out of; None: nobody knows.
    """

    clients: tuple[Examples, ...]
    test: Examples | None
    names: tuple[str, ...]
    classes: int | None = None
    held_out: bool = False
    owners: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not self.clients:
            raise UserError("expected at least one client, got none; give each client its x and y")
        if len(set(self.names)) != len(self.clients) or len(self.names) != len(self.clients):
            raise UserError(f"expected {len(self.clients)} different client names, got {list(self.names)}; rename them")
        owners = [f"client {name}" for name in self.names]
        for owner, examples in zip(owners, self.clients, strict=True):
            _check_same_shape(self.clients[0], owners[0], examples, owner)
        together((examples.person for examples in self.clients), owners)
        if self.test is not None:
            _check_same_shape(self.clients[0], owners[0], self.test, "the test set")
        self._use_one_dtype()

    @property
    def num_classes(self) -> int:
        """Number of classes: `classes` if that is given, else the largest label anywhere plus one.

        Raises UserError if a label is not below `classes`, or if the labels cannot be numbers of classes.
        """
        if self.kind.targets != "classes":
            raise UserError("the targets are values, not classes, so that there is no number of classes")
        found = 1 + max(int(examples.y.max()) for examples in self._all())
        if self.classes is not None:
            at_least_one("classes", self.classes)
            if found > self.classes:
                raise UserError(f"expected labels from 0 to {self.classes - 1}, got {found - 1}; number them anew")
            return self.classes
        if found > max(MOST_CLASSES, sum(len(examples) for examples in self.clients)):
            raise UserError(
                f"expected labels that number the classes from 0 on, got {found - 1:,} among them, and a model would "
                "have an output for each number up to that; number the classes anew"
            )
        return found

    @property
    def kind(self) -> Kind:
        """Kind of what all examples are made of."""
        return self.clients[0].kind

    @property
    def persons(self) -> tuple[np.ndarray, ...] | None:
        """Ids that say whose each example of each client is; None: nobody says, and each is somebody else's.

        They count within a client: the same id at two clients is two persons.
        """
        given = tuple(examples.person for examples in self.clients if examples.person is not None)
        return given or None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return self.clients[0].x.shape[1:]

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Shape of one example's target: () for one class or value."""
        return self.clients[0].y.shape[1:]

    @property
    def outputs(self) -> int:
        """Number of outputs that a model needs: one for each class, or for each value of a target."""
        return self.num_classes if self.kind.targets == "classes" else math.prod(self.target_shape)

    @property
    def shapes(self) -> Shapes:
        """Shapes of the data, which are taken as public."""
        return Shapes(self.input_shape, self.target_shape, self.outputs, self.kind)

    @property
    def digest(self) -> str:
        """Digest of all that the clients have: not private, since it tells whether a guess of theirs is right."""
        found = hashlib.sha256(repr((self.names, self.classes, self.kind)).encode())
        for examples in self._all():
            for array in (*examples, *(() if examples.person is None else (examples.person,))):
                found.update(f"{array.dtype} {array.shape}".encode())
                found.update(content(array))
        return found.hexdigest()

    def _all(self) -> tuple[Examples, ...]:
        return self.clients if self.test is None else (*self.clients, self.test)

    def _use_one_dtype(self) -> None:
        """Widens to float64 where some examples are: a model has one dtype."""
        if len({(examples.x.dtype, examples.y.dtype) for examples in self._all()}) > 1:
            object.__setattr__(self, "clients", tuple(_widen(client) for client in self.clients))
            object.__setattr__(self, "test", None if self.test is None else _widen(self.test))


class Takeable(Protocol):
    """Examples that can be dealt out: `Examples`, or what becomes examples only when it is taken."""

    @property
    def x(self) -> np.ndarray:
        """Inputs, as they are held."""

    @property
    def y(self) -> np.ndarray:
        """Labels."""

    @property
    def person(self) -> np.ndarray | None:
        """Whose each example is; None: each is somebody else's."""

    def __len__(self) -> int: ...

    def take(self, index: np.ndarray) -> Examples:
        """Returns the examples at these indices."""

    def joined(self, other: "Takeable") -> "Takeable":
        """Returns these examples and then the other ones, of the same kind."""


class NpzData(NamedTuple):
    """Content of one .npz file.

    Attributes:
        train: examples to train on.
        test: test set; None: there is none.
        client_ids: one id per example of `train`; None: the file has none.
    """

    train: Examples
    test: Examples | None
    client_ids: np.ndarray | None


def digits() -> Examples:
    """Reads the 1,797 handwritten digits that ship with scikit-learn: x (1797, 1, 8, 8) in [0, 1]. No download."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    images, labels = load_digits(return_X_y=True)
    return Examples((images / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels)


def read_npz(path: str | Path, kind: Kind = USUAL) -> NpzData:
    """Reads one .npz file for everybody.

    It has the keys x and y, and optionally client and person (an id per example each), x_test and y_test together.

    Args:
        path: the .npz file.
        kind: kind of what is in x and y.
    """
    arrays = _load(path, required=("x", "y"), optional=("client", "person", "x_test", "y_test"))
    train = _examples(arrays["x"], arrays["y"], str(path), kind, arrays.get("person"))
    return NpzData(train, _test_of(arrays, train, path), _client_ids_of(arrays, train, path))


def read_inputs(path: str | Path, kind: Kind = USUAL) -> np.ndarray:
    """Reads the inputs of one .npz file alone: x_test if it has that key, else x. It needs no targets.

    Args:
        path: the .npz file.
        kind: kind of what is in x.
    """
    arrays = _load(path, required=("x",), optional=("x_test",))
    return inputs(arrays.get("x_test", arrays["x"]), str(path), kind)


def inputs(x: Any, where: str, kind: Kind = USUAL) -> np.ndarray:
    """Returns inputs as examples have them; raises UserError if they cannot be inputs.

    Args:
        x: anything numpy can read.
        where: what errors call their place.
        kind: kind of what is in x.
    """
    try:
        found = _inputs(x, kind)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if not len(found):
        raise UserError(f"{where}: expected at least one example, got no data; add some")
    return found


def read_folder(path: str | Path, classes: int | None = None, kind: Kind = USUAL) -> FederatedData:
    """Reads one .npz file per client with keys x and y, named by its file stem, in alphabetical order.

    Each can have the key person, too: an id per example. `test.npz`, where present, is the public test set and never a
    client.

    Args:
        path: the folder of .npz files.
        classes: number of classes; None: the labels tell.
        kind: kind of what is in x and y.
    """
    if not Path(path).is_dir():
        raise UserError(f"expected a folder of .npz files at {path}, found none; check the path")
    files = sorted(Path(path).glob("*.npz"), key=lambda file: file.stem)
    examples = {file.stem: _read_client(file, kind) for file in files}
    test = examples.pop("test", None)
    if not examples:
        raise UserError(f"expected one .npz file per client in {path}, found none; write each client's x and y there, "
                        "or put images into a folder for each class")  # fmt: skip
    return FederatedData(tuple(examples.values()), test, tuple(examples), classes)


def split(
    num_examples: int, test_fraction: float, rng: np.random.Generator, persons: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns indices for training and for a test set of round(test_fraction * N) examples.

    A fraction of 0 sets none aside; any other leaves at least one example on each side. Where persons are given they
    are what is counted and split: all examples of a person are on one side.

    Args:
        num_examples: number of examples N.
        test_fraction: share of the test set, at least 0 and below 1.
        rng: source of the choice.
        persons: whose each example is; None: each is somebody else's.
    """
    _check_fraction(test_fraction)
    number = np.arange(num_examples) if persons is None else numbered(persons)
    count = int(number.max(initial=-1)) + 1
    order = rng.permutation(count)
    place = np.argsort(order)[number]
    rows = np.argsort(place, kind="stable")
    if test_fraction == 0:
        return rows, rows[:0]
    if count < 2:
        what = "examples" if persons is None else "persons"
        raise UserError(f"expected at least two {what} to split, got one: set test_fraction to 0 or add data")
    aside = int((place < min(max(round(test_fraction * count), 1), count - 1)).sum())
    return rows[aside:], rows[:aside]


def hold_out(
    own: np.ndarray, test_fraction: float, rng: np.random.Generator, persons: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what a client trains on, in the order given, and what is held out of its examples.

    It holds out round(test_fraction * n) of n examples, but never all; where persons are given, of n persons, each with
    all examples. It depends on nobody else, as long as `rng` does not.

    Args:
        own: indices of the client's examples.
        test_fraction: share that is held out, at least 0 and below 1.
        rng: source of the choice.
        persons: whose each of these examples is; None: each is somebody else's.
    """
    _check_fraction(test_fraction)
    number = np.arange(len(own)) if persons is None else numbered(persons)
    count = int(number.max(initial=-1)) + 1
    aside = np.isin(number, rng.permutation(count)[: min(round(test_fraction * count), count - 1)])
    return own[~aside], own[aside]


def federate(
    train: Takeable,
    test: Examples | None,
    parts: Sequence[np.ndarray],
    names: Sequence[str] | None = None,
    classes: int | None = None,
    held_out: bool = False,
    owners: np.ndarray | None = None,
) -> FederatedData:
    """Deals `train` out by the indices of a partition.

    Args:
        train: examples to deal out.
        test: test set; None: there is none.
        parts: indices of each client's examples.
        names: one name per client; None: 0, 1, ...
        classes: number of classes; None: the labels tell.
        held_out: whether the test set was held out of clients' own data.
        owners: number of the client that each example of the test set was held out of; None: nobody knows.
    """
    names = _numbered(len(parts)) if names is None else tuple(names)
    if len(names) != len(parts):
        raise UserError(
            f"expected one name per client, got {len(names)} names for {len(parts)} clients; make them agree"
        )
    clients = tuple(_part(train, part, f"client {name}") for name, part in zip(names, parts, strict=True))
    return FederatedData(clients, test, names, classes, held_out, owners)


def from_arrays(
    clients: "Sequence[Pair | Examples]", test: "Pair | Examples | None" = None, kind: Kind = USUAL
) -> FederatedData:
    """Makes federated data from Python objects; clients are called 0, 1, ...

    Args:
        clients: per client one (x, y) pair of numpy arrays or torch tensors, or Examples, or a torch Dataset.
        test: test set in the same form; None: there is none.
        kind: kind of what is in the pairs.

    >>> data = from_arrays([(np.zeros((5, 3)), np.arange(5)), (np.ones((2, 3)), np.zeros(2))])
    >>> data.num_classes, data.input_shape, data.names
    (5, (3,), ('0', '1'))
    """
    examples = tuple(_pair(pair, f"client {client}", kind) for client, pair in enumerate(clients))
    tested = None if test is None else _pair(test, "the test set", kind)
    return FederatedData(examples, tested, _numbered(len(examples)))


def given_data(found: Any, whose: str, kind: Kind, classes: int | None = None) -> "FederatedData | NpzData":
    """Returns what a function of the user's gave: data of clients, or examples that are yet to be dealt out.

    Args:
        found: a mapping from names to (x, y) pairs or torch Datasets, where "test" is the public test set; a list of
            such pairs or Datasets; or FederatedData. To be dealt out: a pair (x, y), or (x, y, client) with an id for
            each example; (x, y, client, person) with two; Examples; or a torch Dataset.
        whose: what errors call it.
        kind: kind of what is in x and y.
        classes: number of classes; None: the labels tell.
    """
    if isinstance(found, FederatedData):
        return replace(found, classes=classes) if classes is not None else found
    if isinstance(found, Examples) or is_dataset(found):
        return NpzData(_pair(found, whose, kind), None, None)
    if isinstance(found, Mapping):
        clients = {str(name): _pair(pair, f"{whose}, client {name}", kind) for name, pair in found.items()}
        test = clients.pop("test", None)
        return FederatedData(tuple(clients.values()), test, tuple(clients), classes)
    if isinstance(found, list):
        pairs = tuple(_pair(pair, f"{whose}, client {client}", kind) for client, pair in enumerate(found))
        return FederatedData(pairs, None, _numbered(len(pairs)), classes)
    if isinstance(found, tuple) and len(found) in (2, 3, 4):
        train = _examples(found[0], found[1], whose, kind, *found[3:])
        ids = {} if len(found) == 2 else {"client": _array(found[2], "client")}
        return NpzData(train, None, _client_ids_of(ids, train, whose))
    raise UserError(
        f"{whose} must return (x, y), (x, y, client), a list or a mapping of (x, y) pairs, one per client, or "
        f"FederatedData, not {type(found).__name__}"
    )


# Reading files: every failure names the file.


def _load(path: str | Path, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            found = stored.files
            arrays = {key: stored[key] for key in required + optional if key in found}
    except FileNotFoundError:
        raise UserError(f"expected an .npz file at {path}, found none; check the path") from None
    except PermissionError:
        raise UserError(f"expected a readable .npz file at {path}, got no permission; change its mode") from None
    except Exception as error:  # zipfile, zlib and numpy raise a dozen types on damaged bytes; all mean the same
        raise UserError(
            f"expected an .npz file of plain arrays at {path}, got something else, a damaged file or Python objects; "
            "write it again with numpy.savez"
        ) from error
    missing = [key for key in required if key not in found]
    if missing:
        raise UserError(f"{path}: expected the keys {', '.join(required)}, found {found}; add {', '.join(missing)}")
    return arrays


def _read_client(file: Path, kind: Kind) -> Examples:
    arrays = _load(file, required=("x", "y"), optional=("person",))
    return _examples(arrays["x"], arrays["y"], str(file), kind, arrays.get("person"))


def _test_of(arrays: dict[str, np.ndarray], train: Examples, path: str | Path) -> Examples | None:
    given = [key for key in ("x_test", "y_test") if key in arrays]
    if not given:
        return None
    if len(given) == 1:
        raise UserError(f"{path}: expected x_test and y_test together, found only {given[0]}; add the other or drop it")
    test = _examples(arrays["x_test"], arrays["y_test"], f"{path}, x_test and y_test", train.kind)
    _check_same_shape(train, f"x in {path}", test, "x_test")
    return test


def _client_ids_of(arrays: dict[str, np.ndarray], train: Examples, path: str | Path) -> np.ndarray | None:
    ids = arrays.get("client")
    if ids is not None and np.shape(ids) != (len(train),):
        raise UserError(
            f"{path}: expected one id in client for each of the {len(train)} examples, got shape {np.shape(ids)}; "
            "give each example one id"
        )
    return ids


# Turning what came into arrays of one kind.


def _examples(x: Any, y: Any, where: str, kind: Kind, person: Any = None) -> Examples:
    """Makes examples; an error says where they come from."""
    try:
        return Examples(x, y, kind, person)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _pair(pair: Any, where: str, kind: Kind) -> Examples:
    if isinstance(pair, Examples):
        return pair
    if is_dataset(pair):
        pair = gathered(pair, where, kind.inputs == "texts")
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise UserError(f"{where}: expected a pair (x, y), got {type(pair).__name__}; write (x, y)")
    return _examples(pair[0], pair[1], where, kind)


def _check_fraction(test_fraction: float) -> None:
    if not 0 <= test_fraction < 1:
        raise UserError(f"test_fraction must be at least 0 and below 1, got {test_fraction!r}: take 0.2, say, or 0")


def _part(train: Takeable, part: np.ndarray, where: str) -> Examples:
    part = np.asarray(part)
    if part.size == 0:
        raise UserError(f"{where}: expected at least one example, got no data; give it some or leave it out")
    if part.ndim != 1 or part.dtype.kind not in "iu" or part.min() < 0 or part.max() >= len(train):
        raise UserError(
            f"{where}: expected indices from 0 to {len(train) - 1}, got {part.dtype} of shape {part.shape}; "
            "take them from fednormec.data.partition"
        )
    return train.take(part)


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(str(client) for client in range(count))


def _widen(examples: Examples) -> Examples:
    wide = [array.astype(np.float64) if array.dtype.kind == "f" else array for array in examples]
    return replace(examples, x=wide[0], y=wide[1])


def _array(value: Any, name: str) -> np.ndarray:
    """Returns what came as a numpy array.

    A torch tensor is known by its `detach`, so that torch need not be imported.
    """
    try:
        return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        kind = getattr(value, "dtype", type(value).__name__)
        raise UserError(f"{name} must be an array that numpy can hold, got {kind}; convert it to float32") from None


def _inputs(x: Any, kind: Kind) -> np.ndarray:
    if kind.inputs == "texts":
        return as_texts(x if isinstance(x, list | tuple) else _array(x, "x"), "x")
    return (_tokens if kind.inputs == "tokens" else _numbers)(_array(x, "x"), "x")


def _numbers(values: np.ndarray, name: str) -> np.ndarray:
    if values.dtype.kind not in "biuf" or values.ndim == 0:
        texts = ", or, if these are texts, say inputs = 'texts'" if name == "x" and values.dtype.kind in "UO" else ""
        raise UserError(
            f"{name} must be numbers of shape (examples, ...), got dtype {values.dtype} and shape {values.shape}; "
            f"convert it first{texts}"
        )
    native = values.dtype.newbyteorder("=")  # torch reads the machine's own byte order only
    return np.ascontiguousarray(values, dtype=np.float64 if native == np.float64 else np.float32)


def _tokens(values: np.ndarray, name: str) -> np.ndarray:
    if values.dtype.kind not in "biuf" or values.ndim == 0:
        raise UserError(f"{name} must be tokens, whole numbers from 0, got dtype {values.dtype} and shape "
                        f"{values.shape}; number the words first")  # fmt: skip
    return _whole(values, f"{name} must be tokens, whole numbers", "number the words 0, 1, ...")


def _classes(y: np.ndarray) -> np.ndarray:
    if y.dtype.kind not in "biuf" or not (y.ndim == 1 or (y.ndim == 2 and y.dtype.kind in "iu")):
        raise UserError(
            f"y must be one whole number per example, got dtype {y.dtype} and shape {y.shape}; "
            "number the classes 0, 1, ..."
        )
    return _whole(y, "y must be whole numbers", "number the classes 0, 1, ..., or take values as the kind of targets")


def _whole(values: np.ndarray, expected: str, to_do: str) -> np.ndarray:
    exact = values.astype(np.float64)
    whole = (exact >= 0) & (exact <= MAX_LABEL) & (exact == np.floor(exact))
    if not whole.all():
        raise UserError(f"{expected} from 0 to {MAX_LABEL}, got {values[~whole][0]}; {to_do}")
    return np.ascontiguousarray(values, dtype=np.int64)


def _check_same_shape(first: Examples, first_name: str, other: Examples, other_name: str) -> None:
    if first.x.shape[1:] != other.x.shape[1:]:
        raise UserError(
            f"every example must have the same shape, got {first.x.shape[1:]} in {first_name} "
            f"and {other.x.shape[1:]} in {other_name}; reshape one of them"
        )
    if first.kind.inputs != other.kind.inputs:
        raise UserError(
            f"every input must be alike, got {first.kind.inputs} in {first_name} and {other.kind.inputs} in "
            f"{other_name}; change one of them"
        )
    if first.y.shape[1:] != other.y.shape[1:] or first.kind != other.kind:
        raise UserError(
            f"every target must be alike, got {first.kind.targets} of shape {first.y.shape[1:]} in {first_name} "
            f"and {other.kind.targets} of shape {other.y.shape[1:]} in {other_name}; change one of them"
        )
