"""Schedules: shapes against their formulas, never above 1, never 0."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fednormec as fn
from fednormec.core.schedules import SHAPES, constant

LITERAL = {
    "constant": lambda t: 1.0,
    "linear": lambda t: 1 - t,
    "cosine": lambda t: 0.5 + 0.5 * math.cos(math.pi * t),
    "cooldown": lambda t: 1.0 if t < 0.75 else 4 * (1 - t),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_schedule_is_its_formula(shape):
    factors = [fn.schedule(shape, 40).factor(k) for k in range(1, 41)]
    assert factors == pytest.approx([LITERAL[shape]((k - 1) / 40) for k in range(1, 41)], rel=1e-12)
    assert factors[0] == 1.0


@given(st.sampled_from(SHAPES), st.integers(1, 500), st.integers(0, 500), st.integers(1, 2000))
def test_a_factor_is_positive_and_at_most_one(shape, rounds, warmup, k):
    if warmup > rounds:
        with pytest.raises(fn.UserError, match="warmup takes"):
            fn.schedule(shape, rounds, warmup)
        return
    assert 0 < fn.schedule(shape, rounds, warmup).factor(k) <= 1


def test_warm_up_grows_to_the_shape():
    plain, warm = fn.schedule("linear", 10), fn.schedule("linear", 10, warmup=4)
    assert [warm.factor(k) / plain.factor(k) for k in range(1, 7)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


@pytest.mark.parametrize("shape", ["linear", "cosine", "cooldown"])
def test_a_shape_never_rises(shape):
    factors = [fn.schedule(shape, 33).factor(k) for k in range(1, 34)]
    assert all(a >= b for a, b in zip(factors, factors[1:], strict=False))
    assert factors[-1] < 0.15


def test_what_is_no_shape_is_refused():
    with pytest.raises(fn.UserError, match="cosin"):
        fn.schedule("cosin", 5)
    assert constant().factor(10**9) == 1.0
