"""Bounds: the operators' formulas, and a radius no message ever exceeds, whatever comes."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fednormec.core.bounds import clip, identity, smooth_normalize, top_k
from fednormec.core.vectors import norm_error, row_norms
from fednormec.errors import UserError

BOUNDED = {
    "normalise": lambda r: smooth_normalize(0.01, r),
    "normalise, alpha 0": lambda r: smooth_normalize(0.0, r),
    "clip": clip,
    "clip, scaled": lambda r: clip(2.0, r),
}


def exact_norm_squared(row: torch.Tensor) -> Fraction:
    return sum((Fraction(float(v)) ** 2 for v in row), Fraction(0))


@st.composite
def rows(draw):
    """Vectors over the whole range of the format: ordinary, zero, subnormal, near overflow, mixed, not finite."""
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    width = draw(st.sampled_from([1, 2, 127, 128, 129, 300]))
    bits = 32 if dtype == np.float32 else 64
    anything = st.floats(width=bits, allow_nan=True, allow_infinity=True)
    scale = draw(
        st.sampled_from([1.0, 1e-45, 1e-38, 1e-20, 1e18, 1e38] if bits == 32 else [1.0, 5e-324, 1e-300, 1e300])
    )
    base = np.random.default_rng(draw(st.integers(0, 2**32))).standard_normal(width)
    with np.errstate(over="ignore"):
        values = (base * scale).astype(dtype)
    for place in draw(st.lists(st.integers(0, width - 1), max_size=3)):
        values[place] = draw(anything)
    return torch.from_numpy(values)[None]


@pytest.mark.long
@settings(deadline=None, max_examples=300)
@given(rows(), st.sampled_from(sorted(BOUNDED)), st.sampled_from([1.0, 0.1, 3.0, 1e-3, 1e3, 1e-30, 1e30]))
@example(torch.full((1, 50_890), 1e30), "clip", 1.0)
@example(torch.full((1, 50_890), 1e-30), "normalise, alpha 0", 1.0)
@example(torch.full((1, 4), 1e-12), "normalise, alpha 0", 1e30)
@example(torch.full((1, 4), 4.5e14), "clip", 1e-30)
@example(torch.zeros(1, 7), "normalise, alpha 0", 1.0)
@example(torch.full((1, 3), math.nan), "clip", 1.0)
def test_no_message_exceeds_the_radius(v, name, radius):
    out = BOUNDED[name](radius)(v)
    assert out.shape == v.shape
    assert out.dtype == v.dtype
    assert out.isfinite().all()
    assert exact_norm_squared(out[0]) <= Fraction(radius) ** 2


@pytest.mark.long
@settings(deadline=None, max_examples=200)
@given(rows(), st.sampled_from(sorted(BOUNDED)))
@example(torch.full((1, 2), 1.27e308, dtype=torch.float64), "normalise")  # its norm is beyond the largest number
def test_a_finite_row_keeps_its_direction_and_has_the_right_length(v, name):
    """length(n) = n/(alpha+n) or min(n/tau, 1), along v, checked by exact arithmetic where v is finite and not zero."""
    if not v.isfinite().all() or not v.any():
        return
    out = BOUNDED[name](1.0)(v)[0].double()
    unit = v[0].double() / v.abs().max().double()
    direction = unit / unit.norm()
    n = float(v.abs().max().double()) * float(unit.norm())
    alpha = {"normalise": 0.01, "normalise, alpha 0": 0.0}.get(name)
    tau = 2.0 if name == "clip, scaled" else 1.0
    length = min(n / tau, 1.0) if alpha is None else 1.0 if math.isinf(n) else n / (alpha + n)
    tolerance = 1e-5 if v.dtype == torch.float32 else 1e-12
    smallest = 1e-44 if v.dtype == torch.float32 else 1e-322
    assert torch.allclose(out, length * direction, rtol=0, atol=tolerance * length + smallest)


def test_what_is_inside_the_ball_is_not_touched_by_clipping():
    v = torch.randn(20, 300, generator=torch.Generator().manual_seed(0))
    v /= 2 * v.norm(dim=1, keepdim=True)
    assert torch.equal(clip(1.0)(v), v)


def test_rows_do_not_influence_each_other():
    v = torch.randn(9, 130, generator=torch.Generator().manual_seed(1))
    v[3] = math.nan
    v[5] = 1e30
    v[7] = 0
    for build in BOUNDED.values():
        together = build(1.0)(v)
        alone = torch.cat([build(1.0)(row[None]) for row in v])
        assert torch.equal(together, alone)
        assert not together[3].any()


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32), st.sampled_from([1, 127, 128, 129, 1000, 50_890]), st.sampled_from([1.0, 1e-18, 1e18]))
def test_row_norms_keep_their_promise(seed, width, scale):
    v = torch.from_numpy((np.random.default_rng(seed).standard_cauchy((2, width)) * scale).astype(np.float32))
    exact = np.linalg.norm(v.double().numpy(), axis=1)  # to ten digits more than are promised
    assert (np.abs(row_norms(v) - exact) <= norm_error(v) * exact).all()


def test_row_norms_tell_what_is_not_finite():
    v = torch.tensor([[1.0, 2.0], [math.inf, 0.0], [math.nan, 1.0], [3e38, 3e38], [0.0, 0.0], [1e-45, 0.0]])
    assert np.isfinite(row_norms(v)).tolist() == [True, False, False, True, True, True]
    assert row_norms(v)[3] == pytest.approx(3e38 * math.sqrt(2), rel=1e-6)
    assert row_norms(v)[5] > 0


@given(st.integers(1, 12), st.integers(0, 2**32))
@settings(deadline=None, max_examples=50)
def test_top_k_is_contractive_with_its_constant(k, seed):
    """||TopK(v) - v||^2 <= (1 - k/d) ||v||^2, the property EF21 lives on; and it keeps exactly the k largest."""
    v = torch.from_numpy(np.random.default_rng(seed).standard_normal((5, 10)))
    out, kept = top_k(k)(v), min(k, 10)
    assert ((out - v).square().sum(1) <= (1 - kept / 10) * v.square().sum(1) + 1e-12).all()
    assert (out != 0).sum(1).tolist() == [kept] * 5
    largest = v.abs().sort(dim=1, descending=True).values[:, :kept]
    assert torch.allclose(out.abs().sum(1), largest.sum(1))


def test_unbounded_operators_say_so():
    assert identity().radius == math.inf
    assert top_k(3).radius == math.inf
    assert smooth_normalize(0.1, 2.0).radius == 2.0
    assert clip(0.5).radius == 0.5
    assert clip(0.5, 2.0).radius == 2.0


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_bad_parameters_are_refused(bad):
    for build in (smooth_normalize, clip, lambda r: smooth_normalize(0.1, r), lambda r: clip(0.1, r)):
        with pytest.raises(UserError, match=str(bad)):
            build(bad)
    with pytest.raises(UserError, match="at least 1"):
        top_k(0)
    with pytest.raises(UserError, match="tau"):
        clip(0.0)
