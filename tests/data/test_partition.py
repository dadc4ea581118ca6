"""Partitions: disjoint covers without empty clients, and the distributions their docstrings promise."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednormec.data.partition import _dirichlet_counts, by_ids, dirichlet, iid, shards
from fednormec.errors import UserError

quick = settings(deadline=None, max_examples=60, database=None)
seeds = st.integers(0, 2**32)
label_lists = st.lists(st.integers(0, 5), min_size=1, max_size=80)
concentrations = st.floats(0, 1.7e308, exclude_min=True, allow_subnormal=True)
TEN_CLASSES = np.repeat(np.arange(10), 100)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def assert_partition(parts: list[np.ndarray], num_examples: int, clients: int) -> None:
    assert len(parts) == clients
    assert min(len(part) for part in parts) >= 1
    assert sorted(np.concatenate(parts).tolist()) == list(range(num_examples))


def labels_and_clients(data: st.DataObject) -> tuple[np.ndarray, int]:
    labels = np.array(data.draw(label_lists))
    return labels, data.draw(st.integers(1, len(labels)))


def distinct_labels(labels: np.ndarray, parts: list[np.ndarray]) -> list[int]:
    return [len(np.unique(labels[part])) for part in parts]


# iid


@quick
@given(st.data(), st.integers(1, 200), seeds)
def test_iid_is_a_partition_with_sizes_within_one(data: st.DataObject, num_examples: int, seed: int) -> None:
    clients = data.draw(st.integers(1, num_examples))
    parts = iid(num_examples, clients, rng(seed))
    assert_partition(parts, num_examples, clients)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_iid_gives_every_example_to_the_first_client_equally_often() -> None:
    draws = 3000
    hits = np.zeros(10)
    for seed in range(draws):
        hits[iid(10, 3, rng(seed))[0]] += 1  # the first of three clients has 4 of 10 examples
    assert np.abs(hits / draws - 0.4).max() < 5 * np.sqrt(0.4 * 0.6 / draws)


# dirichlet


@quick
@given(st.data(), concentrations, seeds)
def test_dirichlet_is_a_partition_for_every_positive_concentration(
    data: st.DataObject, concentration: float, seed: int
) -> None:
    labels, clients = labels_and_clients(data)
    parts = dirichlet(labels, clients, concentration, rng(seed))
    assert_partition(parts, len(labels), clients)
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("concentration", [0.1, 1.0, 10.0])
def test_dirichlet_shares_have_the_second_moment_of_the_law(concentration: float) -> None:
    """For p ~ Dir(c, ..., c) in M dimensions, E sum p_i^2 = (c + 1) / (M c + 1); half and twice c are rejected."""
    clients, labels, generator = 5, np.zeros(2000), rng(1)
    squares = []
    for _ in range(400):
        sizes = np.array([len(part) for part in dirichlet(labels, clients, concentration, generator)])
        squares.append(((sizes / len(labels)) ** 2).sum())
    error = np.std(squares) / np.sqrt(len(squares))
    distance = {
        c: abs(np.mean(squares) - (c + 1) / (clients * c + 1)) / error for c in concentration * np.r_[0.5, 1, 2]
    }
    assert distance.pop(concentration) < 4
    assert min(distance.values()) > 6


@pytest.mark.parametrize("concentration", [1e12, 1.7e308])
def test_dirichlet_rounds_shares_right_on_average(concentration: float) -> None:
    """Five examples over four clients in equal shares of 1.25: one or two each, and 1.25 on average for each client."""
    draws = 2000
    sizes = np.array([_dirichlet_counts(5, 4, concentration, rng(s)) for s in range(draws)])
    assert set(sizes.ravel()) == {1, 2}
    assert np.abs(sizes.mean(axis=0) - 1.25).max() < 5 * np.sqrt(0.25 * 0.75 / draws)


def test_a_small_concentration_skews_clients_and_a_large_one_does_not() -> None:
    def mean_share_of_the_top_label(concentration: float) -> float:
        parts = dirichlet(TEN_CLASSES, 10, concentration, rng(3))
        return float(np.mean([np.bincount(TEN_CLASSES[part]).max() / len(part) for part in parts]))

    assert mean_share_of_the_top_label(0.02) > 0.7
    assert mean_share_of_the_top_label(1e4) < 0.13  # 0.1 is exactly even


def test_dirichlet_feeds_empty_clients_from_the_largest() -> None:
    """One class and almost no concentration: one client takes all 100, then gives one to each of the other nine."""
    parts = dirichlet(np.zeros(100), 10, 1e-9, rng())
    assert sorted(len(part) for part in parts) == [1] * 9 + [91]


def test_dirichlet_with_as_many_clients_as_examples_gives_one_each() -> None:
    assert [len(part) for part in dirichlet(TEN_CLASSES, 1000, 0.1, rng())] == [1] * 1000


# shards


@quick
@given(st.data(), seeds)
def test_shards_are_a_partition_into_near_equal_shards_of_few_labels(data: st.DataObject, seed: int) -> None:
    labels, clients = labels_and_clients(data)
    per_client = data.draw(st.integers(1, len(labels) // clients))
    parts = shards(labels, clients, per_client, rng(seed))
    assert_partition(parts, len(labels), clients)
    smallest, total = len(labels) // (clients * per_client), clients * per_client
    assert all(per_client * smallest <= len(part) <= per_client * (smallest + 1) for part in parts)
    # Cutting K sorted classes into S shards makes at most S + K - 1 pieces of one label each.
    assert sum(distinct_labels(labels, parts)) <= total + len(np.unique(labels)) - 1


@quick
@given(st.sampled_from([1, 2, 5]), seeds)
def test_shards_that_fit_the_classes_give_at_most_that_many_labels(per_client: int, seed: int) -> None:
    labels = rng(seed).permutation(TEN_CLASSES)
    parts = shards(labels, 1000 // (20 * per_client), per_client, rng(seed))
    assert {len(part) for part in parts} == {20 * per_client}
    assert max(distinct_labels(labels, parts)) <= per_client


def test_shards_are_dealt_at_random() -> None:
    """Two shards each of ten classes cut in two: the chance that both are of one class is 1/19, so most differ."""
    counts = np.concatenate(
        [distinct_labels(TEN_CLASSES, shards(TEN_CLASSES, 10, 2, rng(seed))) for seed in range(200)]
    )
    assert abs(np.mean(counts == 1) - 1 / 19) < 5 * np.sqrt(1 / 19 * 18 / 19 / len(counts))


@pytest.mark.long
@pytest.mark.parametrize(
    "partition",
    [lambda g: dirichlet(np.zeros(10), 2, 1e12, g), lambda g: shards(np.zeros(10), 2, 1, g)],
)
def test_neighbours_of_one_class_are_not_kept_together(partition) -> None:
    """Two halves of ten: two given examples share a half with probability 4/9, wherever they stand in the data."""
    draws, together = 2000, np.zeros((10, 10))
    for seed in range(draws):
        for part in partition(rng(seed)):
            together[np.ix_(part, part)] += 1
    pairs = together[~np.eye(10, dtype=bool)] / draws
    assert np.abs(pairs - 4 / 9).max() < 5 * np.sqrt(4 / 9 * 5 / 9 / draws)


# by_ids


@quick
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=50))
def test_by_ids_agrees_with_a_literal_loop(ids: list[int]) -> None:
    for given_ids in (np.array(ids), np.array([f"client {i}" for i in ids]), np.array(ids, dtype=object)):
        expected = [[k for k, other in enumerate(given_ids) if other == name] for name in sorted(set(given_ids))]
        parts = by_ids(given_ids)
        assert [part.tolist() for part in parts] == expected
        assert_partition(parts, len(ids), len(set(ids)))


# what all share


@pytest.mark.parametrize(
    "partition",
    [
        lambda generator: iid(1000, 7, generator),
        lambda generator: dirichlet(TEN_CLASSES, 40, 0.05, generator),
        lambda generator: shards(TEN_CLASSES, 7, 3, generator),
    ],
)
def test_a_partition_depends_on_its_generator_alone(partition) -> None:
    first, again, other = partition(rng(5)), partition(rng(5)), partition(rng(6))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("clients", [0, -3, 2.5])
@pytest.mark.parametrize(
    "partition",
    [
        lambda clients: iid(10, clients, rng()),
        lambda clients: dirichlet(np.arange(10), clients, 1.0, rng()),
        lambda clients: shards(np.arange(10), clients, 1, rng()),
    ],
)
def test_a_bad_number_of_clients_is_refused(partition, clients: float) -> None:
    with pytest.raises(UserError, match=f"clients must be a whole number of at least 1, got {clients}"):
        partition(clients)


@pytest.mark.parametrize(
    "partition",
    [
        lambda: iid(10, 11, rng()),
        lambda: iid(0, 11, rng()),
        lambda: dirichlet(np.arange(10), 11, 1.0, rng()),
        lambda: dirichlet(np.array([]), 11, 1.0, rng()),
        lambda: shards(np.arange(10), 11, 1, rng()),
    ],
)
def test_more_clients_than_examples_are_refused(partition) -> None:
    with pytest.raises(UserError, match="got 11 clients for (10|0) examples"):
        partition()


@pytest.mark.parametrize("concentration", [0.0, -1.0, float("inf"), float("nan")])
def test_a_bad_concentration_is_refused(concentration: float) -> None:
    with pytest.raises(UserError, match=f"concentration must be a positive finite number, got {concentration}"):
        dirichlet(np.arange(10), 2, concentration, rng())


def test_more_shards_than_examples_are_refused() -> None:
    assert len(shards(np.arange(10), 5, 2, rng())) == 5
    with pytest.raises(UserError, match="got 15 shards for 10 examples"):
        shards(np.arange(10), 5, 3, rng())


def test_a_bad_number_of_shards_is_refused() -> None:
    with pytest.raises(UserError, match="shards_per_client must be .* got 0"):
        shards(np.arange(10), 5, 0, rng())


def test_labels_of_more_than_one_dimension_are_refused() -> None:
    with pytest.raises(UserError, match=r"labels must be one per example, got an array of shape \(10, 2\)"):
        dirichlet(np.zeros((10, 2)), 2, 1.0, rng())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([]), r"got an array of shape \(0,\)"),
        (np.zeros((2, 2)), r"got an array of shape \(2, 2\)"),
        (np.array([1.0, np.nan, np.nan]), "missing"),
        (np.array(["a", 1], dtype=object), "mixture"),
    ],
)
def test_bad_ids_are_refused(ids: np.ndarray, message: str) -> None:
    with pytest.raises(UserError, match=message):
        by_ids(ids)
