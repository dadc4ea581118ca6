"""Fingerprints: the same for the same content, another wherever something that is computed differs."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fednormec as fn
from fednormec.algorithms.methods import METHODS
from fednormec.core.fingerprint import fingerprint

SCALE = 2.0
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


class Pair(NamedTuple):
    one: float
    other: Any


@dataclass
class Held:
    value: Any

    def scaled(self) -> Any:
        return SCALE * self.value


def adding(n: float) -> Callable[[float], float]:
    return lambda x: x + n


def written_at_the_same_place_in_another_file(source: str, name: str = "f", **names: Any) -> Any:
    names["math"] = math
    exec(compile(source, f"{len(source)}.py", "exec"), names)
    return names[name]


@given(PLAIN, PLAIN)
def test_values_have_the_same_exactly_if_they_are_the_same(one: Any, other: Any) -> None:
    assert fingerprint(one) == fingerprint(one)
    assert (fingerprint(one) == fingerprint(other)) == (repr(one) == repr(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (adding(1), adding(2)),
        (functools.partial(adding, 1), functools.partial(adding, 2)),
        (Held(1).scaled, Held(2).scaled),
        (Pair(1.0, adding(1)), Pair(1.0, adding(2))),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        (np.arange(3), np.arange(3.0)),
        (np.array([1, "a"], object), np.array([1, "b"], object)),
        ([1, 2], (1, 2)),
        (torch.nn.Linear(1, 2), torch.nn.Linear(2, 1)),
        (lambda x, k=1: x + k, lambda x, k=2: x + k),
        (lambda x: math.sin(x), lambda x: math.cos(x)),
        (slice(1), slice(2)),
        (torch.float32, torch.float64),
        (Held, Pair),
        (1, True),
        (1, 1.0),
    ],
)
def test_whatever_differs_is_told_apart(one: Any, other: Any) -> None:
    assert fingerprint(one) == fingerprint(one) != fingerprint(other) == fingerprint(other)


def test_a_function_is_what_it_computes_wherever_it_stands() -> None:
    plain = written_at_the_same_place_in_another_file("def f(x):\n    return 2 * x\n")
    moved = written_at_the_same_place_in_another_file("# a remark\n\n\ndef f(x):\n    return 2 * x  # another\n")
    other = written_at_the_same_place_in_another_file("def f(x):\n    return 3 * x\n")
    assert fingerprint(plain) == fingerprint(moved) != fingerprint(other)


def test_a_function_is_also_the_globals_that_it_reads_and_no_others() -> None:
    source = "def g(x):\n    return K * x\n\ndef f(state):\n    return [g(x) for x in state.unused]\n"
    first = written_at_the_same_place_in_another_file(source, K=1, unused=1)
    assert fingerprint(first) == fingerprint(written_at_the_same_place_in_another_file(source, K=1, unused=2))
    assert fingerprint(first) != fingerprint(written_at_the_same_place_in_another_file(source, K=2, unused=1))
    within = source.replace("K * x", "K + x")
    assert fingerprint(first) != fingerprint(written_at_the_same_place_in_another_file(within, K=1, unused=1))


def test_a_class_is_its_functions_and_constants() -> None:
    source = "class f:\n    K = 1\n    def scaled(self, x):\n        return self.K * x\n"
    first, *others = (
        written_at_the_same_place_in_another_file(text)
        for text in (source, source.replace("K = 1", "K = 2"), source.replace("* x", "+ x"))
    )
    assert all(fingerprint(first()) != fingerprint(other()) for other in others)
    assert fingerprint(first()) == fingerprint(written_at_the_same_place_in_another_file(source)())


def test_a_number_of_numpy_is_the_number() -> None:
    assert fingerprint(np.float64(0.5), np.int32(3), np.bool_(True)) == fingerprint(0.5, 3, True)


def test_a_problem_counts_by_its_sizes_wherever_a_method_reads_it() -> None:
    """Fingerprints of methods stand in configs, which are public; digests of problems are apart."""
    problems = [fn.random_quadratic(9, dim, seed=seed) for dim, seed in ((3, 1), (3, 2), (4, 1))]
    one, other, larger = (fingerprint(lambda x, p=problem: x / p.num_clients) for problem in problems)
    assert one == other != larger
    assert len({problem.digest() for problem in problems}) == 3


def test_what_holds_itself_comes_to_an_end() -> None:
    one, other = Held(1), Held(1)
    one.value, other.value = [one], [other]
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_of_a_method_is_in_it(name: str) -> None:
    method = METHODS[name]

    def build(**settings: Any) -> fn.Algorithm:
        return method.build(fn.gd(0.1), **settings) if method.takes_local else method.build(**settings)

    assert fingerprint(build()) == fingerprint(build())
    numbers = [key for key, hint in get_type_hints(method.build).items() if hint is float]
    assert numbers or name == "local_training"  # which has no setting
    assert all(fingerprint(build()) != fingerprint(build(**{key: 0.0625})) for key in numbers)
    if method.takes_local:
        assert fingerprint(method.build(fn.gd(0.1, steps=2))) != fingerprint(build())
