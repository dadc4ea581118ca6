"""Torch Datasets: gathered once, they are the arrays that they are made of; what does not fit is said in a sentence."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import fednormec as fn
from fednormec.data import FederatedData, Kind, dirichlet, federate, from_arrays, from_dataset, from_datasets
from fednormec.data.sources import given_data
from fednormec.errors import UserError

RNG = np.random.default_rng(0)
PAIRS = [(RNG.standard_normal((n, 3)).astype(np.float32), RNG.integers(0, 4, n)) for n in (5, 1, 7)]
TEST = (RNG.standard_normal((4, 3)).astype(np.float32), RNG.integers(0, 4, 4))


class Own(Dataset[Any]):
    """Items as people write them: a tensor, and a number of Python's."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        if index >= len(self.y):
            raise RuntimeError("nobody asks for that")
        return torch.as_tensor(self.x[index]), int(self.y[index])


class Stream(IterableDataset[Any]):
    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[Any]:
        return zip(self.x, self.y, strict=True)


def tensors(x: np.ndarray, y: np.ndarray) -> TensorDataset:
    return TensorDataset(torch.as_tensor(x), torch.as_tensor(y))


def same(one: FederatedData, other: FederatedData) -> bool:
    return one.digest == other.digest and one.held_out == other.held_out


@pytest.mark.parametrize("made", [Own, Stream, tensors, lambda x, y: Subset(Own(x, y), range(len(y))),
                                  lambda x, y: list(zip(x, y, strict=True))])  # fmt: skip
def test_one_per_client_is_what_their_arrays_are(made: Any) -> None:
    found = from_datasets([made(*pair) for pair in PAIRS], made(*TEST))
    assert same(found, from_arrays(PAIRS, TEST))
    assert found.clients[0].x.dtype == np.float32 and found.clients[0].y.dtype == np.int64


def test_arrays_and_code_of_the_users_may_be_datasets() -> None:
    assert same(from_arrays([Own(*pair) for pair in PAIRS], Own(*TEST)), from_arrays(PAIRS, TEST))
    mixed = given_data({"a": Own(*PAIRS[0]), "b": PAIRS[1], "test": Own(*TEST)}, "load.py:own", Kind())
    plain = given_data({"a": PAIRS[0], "b": PAIRS[1], "test": TEST}, "load.py:own", Kind())
    assert isinstance(mixed, FederatedData) and isinstance(plain, FederatedData) and same(mixed, plain)
    one = given_data(Own(*PAIRS[2]), "load.py:own", Kind())
    assert not isinstance(one, FederatedData) and np.array_equal(one.train.x, PAIRS[2][0]) and one.client_ids is None


def test_one_with_an_index() -> None:
    x, y = (np.concatenate(values) for values in zip(*PAIRS, strict=True))
    ids = np.repeat(["ann", "bob", "eve"], [5, 1, 7])
    whole = Own(x, y)
    assert same(from_dataset(whole, [np.arange(5), np.arange(5, 6), np.arange(6, 13)]), from_arrays(PAIRS))
    named = from_dataset(whole, client_ids=ids, test=Own(*TEST))
    assert named.names == ("ann", "bob", "eve") and named.test is not None and len(named.test) == 4
    assert all(np.array_equal(a.x, b) for a, (b, _) in zip(named.clients, PAIRS, strict=True))
    parts = dirichlet(y, 3, 0.5, np.random.default_rng(1))
    assert same(from_dataset(whole, parts), federate(fn.data.Examples(x, y), None, parts))


def test_values_and_tokens_keep_their_kind() -> None:
    kind = Kind("tokens", "values")
    x, y = np.array([[1, 2], [3, 4]]), np.array([0.5, 1.5])
    found = from_datasets([[(a, b) for a, b in zip(x, y, strict=True)]], kind=kind)
    assert found.kind == kind and found.clients[0].x.dtype == np.int64 and found.clients[0].y.tolist() == [0.5, 1.5]


def test_a_problem_says_what_to_call() -> None:
    model = fn.models.linear((3,), 4)
    for given in ([Own(*pair) for pair in PAIRS], [tensors(*pair) for pair in PAIRS], [DataLoader(Own(*PAIRS[0]))]):
        with pytest.raises(
            UserError, match=r"client 0 is a \w+, .* call data = fn.data.from_datasets\(datasets, test\)"
        ):
            fn.NeuralProblem(model, given)
    with pytest.raises(UserError, match="the test set is a Own"):
        fn.NeuralProblem(model, PAIRS, Own(*TEST))
    data = from_datasets([Own(*pair) for pair in PAIRS], Own(*TEST))
    ours, plain = fn.NeuralProblem(model, data.clients, data.test), fn.NeuralProblem(model, PAIRS, TEST)
    x, everyone = ours.init(np.random.default_rng(0)), np.arange(3)
    assert torch.equal(ours.grad(x, everyone), plain.grad(x, everyone)) and ours.evaluate(x) == plain.evaluate(x)


class Broken(Own):
    def __getitem__(self, index: int) -> Any:
        if index == 2:
            raise KeyError("lost")
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "client 0: expected at least one item"),
        ([torch.zeros(3)], r"client 0, item 0: expected a pair \(x, y\), got Tensor"),
        ([(1, 2, 3)], r"client 0, item 0: expected a pair \(x, y\), got 3 values"),
        ([{"x": 1, "y": 2}], r"client 0, item 0: expected a pair \(x, y\), got dict"),
        ([([1.0], 0), ([1.0, 2.0], 0)], r"client 0: x has the shape \(1,\) in item 0 and \(2,\) in item 1"),
        ([([1.0], 0), ([1.0], [0])], r"client 0: y has the shape \(\) in item 0 and \(1,\) in item 1"),
        ([("text", 0)], "client 0, item 0, x: expected numbers, got str"),
        ([([1.0], "yes")], "client 0, item 0, y: expected numbers, got str"),
        ([([1.0], 0.5)], "y must be whole numbers from 0"),
        ([(Image.new("L", (2, 2)), 0)], "client 0, item 0, x: .* got an image; give the Dataset a transform"),
        (Broken(*PAIRS[0]), "client 0: reading item 2 raised KeyError: 'lost'"),
    ],
)
def test_items_that_do_not_fit(items: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_datasets([items])


def test_an_index_that_does_not_fit() -> None:
    whole = Own(*PAIRS[0])
    for given in ({}, {"parts": [np.arange(5)], "client_ids": np.arange(5)}):
        with pytest.raises(UserError, match="expected either parts, .* or client_ids"):
            from_dataset(whole, **given)
    with pytest.raises(UserError, match="one id in client_ids for each of the 5 items"):
        from_dataset(whole, client_ids=[1, 2])
    with pytest.raises(UserError, match="expected indices from 0 to 4"):
        from_dataset(whole, [np.array([7])])
    with pytest.raises(UserError, match="at least one client"):
        from_dataset(whole, [])
