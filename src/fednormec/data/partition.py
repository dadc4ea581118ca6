"""Partitions: pure functions that deal N examples out to M clients.

Every function decides one owner per example, so a partition is disjoint and covers everything by construction. Each
returns a list of index arrays, one per client, none of them empty: a client without data has no f_i.
"""

import math

import numpy as np

from fednormec.errors import UserError


def iid(num_examples: int, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Shuffles and deals out: every client sees the same distribution, and sizes differ by at most one.

    Args:
        num_examples: number of examples.
        clients: number of clients.
        rng: source of the shuffle.

    >>> [len(part) for part in iid(7, 3, np.random.default_rng(0))]
    [3, 2, 2]
    """
    _check_clients(clients, num_examples)
    owner = np.empty(num_examples, dtype=np.int64)
    owner[rng.permutation(num_examples)] = np.arange(num_examples) % clients
    return _parts(owner, clients)


def dirichlet(labels: np.ndarray, clients: int, concentration: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Skews labels (Hsu, Qi and Brown, 2019): spreads each class over the clients in shares ~ Dir(concentration).

    A share that is not whole is rounded up or down at random, right on average. A client that ends with no example is
    given one, drawn by `rng` from the client that then has most; so with many clients and a small concentration the
    result is a little more even than the Dirichlet law. Clients come from the largest to the smallest: neighbours,
    which are computed together, need little padding then.

    Args:
        labels: one label per example.
        clients: number of clients.
        concentration: a small one gives each class to a few clients, a large one approaches `iid`.
        rng: source of the shares and of who gets which example.
    """
    labels = _check_labels(labels, clients)
    if not (math.isfinite(concentration) and concentration > 0):
        raise UserError(
            f"concentration must be a positive finite number, got {concentration!r}: "
            "take about 0.1 for skewed clients or 100 for nearly equal ones"
        )
    owner = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        owner[members] = np.repeat(np.arange(clients), _dirichlet_counts(len(members), clients, concentration, rng))
    _feed_the_empty(owner, clients, rng)
    return sorted(_parts(owner, clients), key=len, reverse=True)


def shards(labels: np.ndarray, clients: int, shards_per_client: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Skews labels as McMahan et al. (2017): sorts by label, cuts into near-equal shards, deals a few to each client.

    Who gets which shard is random. A client sees about `shards_per_client` labels; more only where a shard crosses the
    border between two labels.

    Args:
        labels: one label per example.
        clients: number of clients.
        shards_per_client: number of shards of each client.
        rng: source of the order and of who gets which shard.
    """
    labels = _check_labels(labels, clients)
    _check_count("shards_per_client", shards_per_client)
    total = clients * shards_per_client
    if total > len(labels):
        raise UserError(
            f"the {clients} clients x {shards_per_client} shards must be at most the number of examples, "
            f"got {total} shards for {len(labels)} examples: take fewer clients or fewer shards per client"
        )
    shuffled = rng.permutation(len(labels))  # so that equal labels come in random order
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    shard_owner = rng.permutation(np.arange(total) % clients)
    owner = np.empty(len(labels), dtype=np.int64)
    owner[by_label] = shard_owner[np.arange(len(labels)) * total // len(labels)]
    return _parts(owner, clients)


def by_ids(ids: np.ndarray) -> list[np.ndarray]:
    """Returns the partition that the data came with, clients in the sorted order of the ids.

    Client i of the result is `np.unique(ids)[i]`.

    Args:
        ids: one client id per example.

    >>> [part.tolist() for part in by_ids(np.array(["bob", "ann", "bob"]))]
    [[1], [0, 2]]
    """
    ids = np.asarray(ids)
    if ids.ndim != 1 or ids.size == 0:
        raise UserError(f"client ids must be one id per example, got an array of shape {ids.shape}: give each an id")
    if np.any(ids != ids):  # NaN and NaT alone differ from themselves; as an id they would merge strangers
        raise UserError("every example must have a client id, got a missing one (NaN): name its client or drop it")
    try:
        names, owner = np.unique(ids, return_inverse=True)
    except TypeError:
        raise UserError("client ids must be of one kind, got a mixture: use all numbers or all text") from None
    return _parts(owner, len(names))


def _parts(owner: np.ndarray, clients: int) -> list[np.ndarray]:
    """Returns the indices of each owner's examples, increasing."""
    by_owner = np.argsort(owner, kind="stable")
    return np.split(by_owner, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def _dirichlet_counts(size: int, clients: int, concentration: float, rng: np.random.Generator) -> np.ndarray:
    """Draws how many of `size` examples each client gets: Dirichlet shares, rounded with one common random offset.

    The offset makes each count right on average; plain rounding would favour the same clients in every class.
    """
    safe = min(max(concentration, 1e-300), 1e32)  # beyond these numpy under- or overflows and the law no longer moves
    ends = np.cumsum(rng.dirichlet(np.full(clients, safe))) * size
    cuts = np.minimum(np.floor(ends[:-1] + rng.random()), size).astype(np.int64)
    return np.diff(cuts, prepend=0, append=size)


def _feed_the_empty(owner: np.ndarray, clients: int, rng: np.random.Generator) -> None:
    """Gives each client without examples one from the largest client, in place."""
    sizes = np.bincount(owner, minlength=clients)
    for empty in np.flatnonzero(sizes == 0):
        largest = int(np.argmax(sizes))
        owner[rng.choice(np.flatnonzero(owner == largest))] = empty
        sizes[largest] -= 1
        sizes[empty] = 1


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, (int, np.integer)) or value < 1:
        raise UserError(f"{name} must be a whole number of at least 1, got {value!r}: set it to 1 or more")


def _check_clients(clients: int, num_examples: int) -> None:
    _check_count("clients", clients)
    if clients > num_examples:
        raise UserError(
            f"every client needs at least one example, got {clients} clients for {num_examples} examples: "
            "take fewer clients or more data"
        )


def _check_labels(labels: np.ndarray, clients: int) -> np.ndarray:
    labels = np.asarray(labels)
    if labels.ndim != 1:
        raise UserError(f"labels must be one per example, got an array of shape {labels.shape}: flatten it")
    _check_clients(clients, len(labels))
    return labels
