"""Addresses of randomness: every one its own, whatever is drawn for, and the bits that stream 0 always had."""

import ast
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fednormec
import fednormec as fn
from fednormec.core.randomness import address, generator

HOME = Path(fednormec.__file__).parent


def purposes() -> set[str]:
    """Every purpose that the package names in a call of `generator` or `_source`."""
    calls = [
        node
        for file in HOME.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", "")) in ("generator", "_source")
    ]
    return {call.args[1].value for call in calls if len(call.args) > 1 and isinstance(call.args[1], ast.Constant)}


@pytest.mark.long
def test_the_purposes_are_found():
    assert {"cohort", "noise", "init", "local order", "split", "partition"} <= purposes()


@pytest.mark.long
def test_no_two_addresses_are_one_over_all_purposes():
    numbers = (0, 1, 3, 5, 35, 53)
    places = [(), *((r,) for r in numbers), *product(numbers, numbers)]
    every = [
        address(seed, purpose, *place, stream=stream)
        for purpose in (*purposes(), "examples", "test_examples")
        for place in places
        for seed, stream in product((0, 1, 3, 35, -1), (0, 1, 3, 35))
    ]
    assert len(set(every)) == len(every)


Whole = st.integers(-(10**20), 10**20)
Address = st.tuples(Whole, st.sampled_from(sorted(purposes())), st.lists(Whole, max_size=3), st.integers(0, 10**20))


@given(Address, Address)
def test_two_addresses_are_one_only_if_all_their_parts_are(a, b):
    one, other = (address(seed, what, *place, stream=stream) for seed, what, place, stream in (a, b))
    assert (one == other) == (a == b)


@pytest.mark.parametrize("purpose", ["noise/3", "noise:3", "", "a//b", "a  b"])
def test_a_purpose_is_words(purpose):
    with pytest.raises(ValueError, match="a purpose is words"):
        generator(1, purpose)


def test_a_stream_is_no_round_and_no_client():
    """(stream 3, round 5) once was (round 3, client 5)."""
    plain, streamed = (fn.Mechanism(9, fn.full(), 1.0, stream=stream) for stream in (0, 3))
    assert not np.array_equal(streamed.noise(4, 9, seed=1, round=5), plain.noise(4, 9, seed=1, round=3, client=5))
    assert np.array_equal(plain.noise(4, 9, 1, 3), generator(1, "noise", 3).standard_normal(4))


def test_stream_0_has_the_bits_it_always_had():
    assert generator(1, "cohort", 7).integers(10**9) == 201484241
