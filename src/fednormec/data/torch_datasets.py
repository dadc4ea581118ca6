"""Federated data from torch Datasets: one per client, or one with an index."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fednormec.data.items import gathered
from fednormec.data.partition import by_ids
from fednormec.data.sources import USUAL, Examples, FederatedData, Kind, federate, from_arrays
from fednormec.errors import UserError


def from_datasets(
    clients: Sequence[Any],
    test: Any = None,
    kind: Kind = USUAL,
    persons: Sequence[Sequence[Any] | np.ndarray] | None = None,
) -> FederatedData:
    """Makes federated data from torch Datasets, one per client; clients are called 0, 1, ...

    Each item (x, y) is read once: what a Dataset draws at random is drawn then, and stays.

    Args:
        clients: one Dataset per client, each item a pair (x, y) of tensors, arrays or numbers.
        test: Dataset of the public test set; None: there is none.
        kind: kind of what items are made of: Kind(targets="values") for targets that are no classes.
        persons: whose each item of each client is, ids; None: each item is somebody else's.
    """
    texts = kind.inputs == "texts"
    if persons is not None and len(persons) != len(clients):
        raise UserError(f"expected persons for each of {len(clients)} clients, got them for {len(persons)}.")
    pairs: list[Any] = [gathered(dataset, f"client {client}", texts) for client, dataset in enumerate(clients)]
    if persons is not None:
        pairs = [Examples(x, y, kind, np.asarray(ids)) for (x, y), ids in zip(pairs, persons, strict=True)]
    return from_arrays(pairs, None if test is None else gathered(test, "the test set", texts), kind)


def from_dataset(
    dataset: Any,
    parts: Sequence[np.ndarray] | None = None,
    client_ids: Sequence[Any] | np.ndarray | None = None,
    test: Any = None,
    kind: Kind = USUAL,
    persons: Sequence[Any] | np.ndarray | None = None,
) -> FederatedData:
    """Makes federated data from one torch Dataset, and an index that says whose each item is.

    Args:
        dataset: Dataset of all clients, each item a pair (x, y) of tensors, arrays or numbers; read once.
        parts: numbers of each client's items, such as `iid` and `dirichlet` return; clients are called 0, 1, ...
        client_ids: in place of `parts`, the client of each item, by which clients are called and sorted.
        test: Dataset of the public test set; None: there is none.
        kind: kind of what items are made of: Kind(targets="values") for targets that are no classes.
        persons: whose each item is, an id for each; None: each item is somebody else's.
    """
    if (parts is None) == (client_ids is None):
        raise UserError("expected either parts, the numbers of each client's items, or client_ids, one for each item.")
    texts = kind.inputs == "texts"
    train = Examples(*gathered(dataset, "the Dataset", texts), kind, None if persons is None else np.asarray(persons))
    tested = None if test is None else Examples(*gathered(test, "the test set", texts), kind)
    if client_ids is None:
        return federate(train, tested, parts or ())
    ids = np.asarray(client_ids)
    if ids.shape != (len(train),):
        raise UserError(f"expected one id in client_ids for each of the {len(train)} items, got shape {ids.shape}.")
    return federate(train, tested, by_ids(ids), [str(name) for name in np.unique(ids)])
