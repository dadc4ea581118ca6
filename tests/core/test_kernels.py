"""The functions in C: the same as torch's, for every shape and number; and everything works without them."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from command import Command
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import EQUAL, MODELS, clients, one_client_gradient
from torch import nn

import fednormec as fn
from fednormec.config.schema import read
from fednormec.config.settings import QUICKSTART
from fednormec.core import kernels
from fednormec.core.bounds import Adding, Grid, Messages, clip, grid_for, smooth_normalize
from fednormec.runs.runner import perform

pytestmark = pytest.mark.usefixtures("undrawn")

DTYPES = {torch.float32: 2e-5, torch.float64: 1e-11}
compiled = pytest.mark.skipif(kernels.library() is None, reason="not compiled: there was no C compiler")


@pytest.fixture
def without(monkeypatch):
    monkeypatch.setattr(kernels, "library", lambda: None)


def images(n, c, height, width, dtype, seed=0):
    drawn = torch.randn(n, c, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return drawn.to(dtype).contiguous(memory_format=torch.channels_last)


def close(found, expected, tolerance, size=0.0):
    """Relative to the largest, or to the size of what cancelled."""
    size = max(float(expected.abs().max()), float(size), 1e-30)
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance * size)


@pytest.mark.long
@compiled
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_group_normalisation_is_torchs(data):
    draw = data.draw
    dtype, relu = draw(st.sampled_from(list(DTYPES))), draw(st.booleans())
    groups, wide = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    if draw(st.booleans()):
        groups, wide = draw(st.sampled_from([(1, 1), (2, 8), (8, 4), (8, 8), (3, 32)]))
    c, owners, each = groups * wide, draw(st.integers(1, 3)), draw(st.integers(1, 3))
    a = images(owners * each, c, draw(st.integers(1, 9)), draw(st.integers(2, 9)), dtype) * 3 + 1
    shared = draw(st.booleans())
    block = torch.randn(owners, 3 * c, dtype=dtype, generator=torch.Generator().manual_seed(1))
    weight, bias = (block[0, :c], block[0, c : 2 * c]) if shared else (block[:, :c], block[:, c : 2 * c])
    z, known = kernels.group_norm(a, len(a), groups, weight, bias, 1e-5, relu)
    delta = images(*a.shape, dtype, seed=2)
    result, weights, biases = kernels.group_norm_back(a, len(a), delta, groups, relu, known)
    for i in range(len(a)):
        own = [t.double().requires_grad_() for t in (a[i : i + 1], block[0 if shared else i // each, : 2 * c])]
        expected = F.group_norm(own[0], groups, own[1][:c], own[1][c:], 1e-5)
        expected = expected.relu() if relu else expected
        grads = torch.autograd.grad(expected, own, delta[i : i + 1].double())
        assert close(z[i].double(), expected[0].detach(), DTYPES[dtype])
        if (expected[0].detach().abs() < 1e-3).any() and relu:
            continue  # rounding may have put it on the other side of zero
        positions, scale = a[0, 0].numel(), known[1][i].abs().max()
        assert close(result[i].double(), grads[0][0], 10 * DTYPES[dtype], size=5 * scale)
        assert close(torch.cat([weights[i], biases[i]]).double(), grads[1], 10 * DTYPES[dtype], size=5 * positions)


@compiled
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_pooling_is_torchs_to_the_bit(data):
    draw = data.draw
    shape = [draw(st.integers(1, 3)), draw(st.integers(1, 40)), draw(st.integers(2, 9)), draw(st.integers(2, 9))]
    a = images(*shape, draw(st.sampled_from(list(DTYPES)))).mul_(2).round_()  # many ties
    if draw(st.booleans()):
        a[0, 0, 0, 1], a[-1, -1, 1, 0], a[0, -1, 0, 0] = math.nan, math.inf, -math.inf
    relu = draw(st.booleans())
    own = a.clone().requires_grad_()
    expected = F.relu(F.max_pool2d(own, 2)) if relu else F.max_pool2d(own, 2)
    z, which = kernels.max_pool(a, relu)
    delta = images(*z.shape, a.dtype, seed=3)
    (back,) = torch.autograd.grad(expected, own, delta)
    assert torch.equal(z.nan_to_num(7), expected.detach().nan_to_num(7))
    assert torch.equal(kernels.max_pool_back(delta, which, a.shape), back)


# convolutions


class Case:
    """A convolution by kernels that are views of rows, as parameters are; what comes back, and rows to fill."""

    def __init__(self, clients, each, c, o, sides, kernel, stride, padding, bias, shared, relu, dtype, seed=0):
        self.k = kernels.convolution(
            torch.Size([clients * each, c, *sides]), clients, torch.Size([o, c, *kernel]), stride, padding
        )
        self.how, self.shared, self.relu, self.dtype = (stride, padding), shared, relu, dtype
        self.a = images(clients * each, c, *sides, dtype, seed)
        self.delta = images(clients * each, o, self.k.high, self.k.wide, dtype, seed + 1)
        self.size, d = o * c * kernel[0] * kernel[1], o * c * kernel[0] * kernel[1] + o
        generator = torch.Generator().manual_seed(seed + 2)
        x = torch.randn(clients, d + 3, dtype=torch.float64, generator=generator).to(dtype)
        self.w, self.b = self.views(x[0] if shared else x, (o, c, *kernel))
        self.b, self.rows = self.b if bias else None, torch.full((clients, d + 3), 7, dtype=dtype)

    def views(self, x, shape):
        lead = x.shape[:-1]
        return x[..., 1 : 1 + self.size].view(*lead, *shape), x[..., 1 + self.size : 1 + self.size + shape[0]]

    def ours(self):
        z = kernels.convolve(self.a, self.w, self.b, self.k, self.relu)
        seen = z if self.relu else None
        back = kernels.convolve_back(self.delta, seen, self.w, self.k)
        weight, bias = self.views(self.rows, self.w.shape[-4:])
        kernels.convolve_weights(self.a, self.delta, seen, self.k, weight, bias if self.b is not None else None)
        return z, back, weight, bias

    def torchs(self, i):
        """Those of client i, in float64."""
        own = slice(i * self.k.each, (i + 1) * self.k.each)
        w, b = (None if t is None else t if self.shared else t[i] for t in (self.w, self.b))
        at = [t.double().requires_grad_() for t in (self.a[own], w, b) if t is not None]
        z = F.conv2d(at[0], at[1], at[2] if b is not None else None, *self.how)
        z = z.relu() if self.relu else z
        return z.detach(), *torch.autograd.grad(z, at, self.delta[own].double())


@pytest.mark.long
@compiled
@settings(deadline=None, max_examples=150)
@given(st.data())
def test_convolutions_are_torchs(data):
    draw = data.draw
    pair = st.tuples(st.integers(1, 4), st.integers(1, 4))
    kernel, stride, padding = draw(pair), draw(pair), tuple(p - 1 for p in draw(pair))
    sides = [draw(st.integers(max(1, k - 2 * p), 11)) for k, p in zip(kernel, padding, strict=True)]
    if draw(st.integers(0, 5)) == 0:
        sides[1] = 300  # rows that are longer than the sums within them
    channels = [draw(st.sampled_from([1, 2, 3, 4, 5, 8, 9, 16, 19])) for _ in range(2)]
    numbers, switches = [draw(st.integers(1, 4)) for _ in range(2)], [draw(st.booleans()) for _ in range(3)]
    dtype = draw(st.sampled_from(list(DTYPES)))
    case = Case(*numbers, *channels, sides, kernel, stride, padding, *switches, dtype)
    z, back, weight, bias = case.ours()
    tolerance = 2e-5 if dtype == torch.float32 else 1e-12
    for i in range(numbers[0]):
        own = slice(i * numbers[1], (i + 1) * numbers[1])
        expected = case.torchs(i)
        assert close(z[own].double(), expected[0], tolerance)
        if case.relu and ((expected[0] > 0) & (expected[0] < 1e-4)).any():
            continue  # rounding may have put it on the other side of zero
        found = [back[own], weight[i], bias[i]]
        for one, other in zip(found, expected[1:], strict=False):
            assert close(one.double(), other, tolerance, size=math.sqrt(case.delta[own].numel()))
    rest = case.rows[:, 1 + case.size + (0 if case.b is None else len(bias[0])) :]
    assert (case.rows[:, 0] == 7).all() and (rest == 7).all(), "it wrote beside its place"


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        (3, 8, (9, 9), (3, 3), (2, 2), (1, 1)),
        (5, 3, (6, 7), (2, 3), (1, 1), (0, 0)),
        (2, 19, (4, 40), (3, 3), (1, 2), (2, 1)),
    ],
)
def test_what_a_client_computes_depends_on_its_own_alone(shape, shared, dtype):
    """The same bits whoever stands beside it, also where that one's numbers are not finite."""
    case = Case(4, 3, *shape, True, shared, True, dtype)
    usual = [t.clone() for t in case.ours()]
    case.a[3:6], case.delta[6:9] = math.nan, math.inf
    if not shared:
        case.w[3] = -math.inf
    odd = [t.clone() for t in case.ours()]
    for one, other in zip(usual, odd, strict=True):
        parts = [(a, b) for a, b in zip(one.chunk(4), other.chunk(4), strict=True)]
        assert torch.equal(*parts[0])
        assert torch.equal(*parts[3]) or not shared
    assert not odd[2][1].isfinite().any() and not odd[2][2].isfinite().all()
    alone = Case(4, 3, *shape, True, shared, True, dtype)
    if not shared:
        alone.w, alone.b = alone.w[:1], alone.b[:1]
    alone.a, alone.delta, alone.rows, alone.k.clients = alone.a[:3], alone.delta[:3], alone.rows[:1], 1
    for one, other in zip(usual, alone.ours(), strict=True):
        assert torch.equal(one.chunk(4)[0], other)


# error feedback


def tracked(bound, updates, memory, beta):
    updates, memory = updates.clone(), memory.clone()
    messages = bound.track_(updates, memory, beta)
    return messages.whole(), memory, messages.broken


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bound", [smooth_normalize(0.01), smooth_normalize(0.0, 1e-3), clip(0.5), clip(1e-30)])
def test_tracking_is_the_same_with_and_without(bound, dtype, monkeypatch):
    """Usual rows, and every odd one: zero, tiny, huge, not finite; memories with a second slot beside them."""
    d, rng = 4_133, np.random.default_rng(0)
    updates = torch.from_numpy(rng.standard_normal((12, d))).to(dtype)
    memory = torch.from_numpy(rng.standard_normal((12, 2 * d))).to(dtype)
    memory[3:8, :d] = 0
    updates[3] = 0
    updates[4] *= 1e-25
    updates[5] *= 1e25
    updates[6, 7] = math.nan
    updates[7, 8] = -math.inf
    updates[8] = memory[8, :d]
    fast = tracked(bound, updates, memory[:, :d], 0.3)
    monkeypatch.setattr(kernels, "library", lambda: None)
    slow = tracked(bound, updates, memory[:, :d], 0.3)
    assert fast[2] == slow[2] == (6, 7)
    for a, b in zip(fast[:2], slow[:2], strict=True):
        assert a.isfinite().all()
        for one, other in zip(a, b, strict=True):
            assert close(one, other, DTYPES[dtype])
    assert (fast[0].double().norm(dim=1) <= bound.radius).all()


@compiled
@settings(deadline=None, max_examples=100)
@given(st.integers(1, 300), st.floats(1e-12, 1e12), st.floats(0, 1e3), st.floats(1e-3, 1e3), st.data())
def test_what_is_sent_keeps_to_the_radius(d, size, alpha, radius, data):
    """In floating point, however the norm was summed up: also for vectors that are long already."""
    bound = clip(radius) if data.draw(st.booleans()) else smooth_normalize(alpha, radius)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    for dtype in DTYPES:
        updates = torch.from_numpy(size * rng.standard_normal((4, d))).to(dtype)
        sent, memory, _ = tracked(bound, updates, torch.zeros_like(updates), 1.0)
        assert (np.linalg.norm(sent.double().numpy(), axis=1) <= radius).all()
        assert close(memory, sent, DTYPES[dtype])


@pytest.mark.parametrize("library", [kernels.library(), None], ids=["compiled", "without"])
def test_rows_that_lie_upon_another_are_refused(library, monkeypatch):
    """An update that is one row for all clients, expanded, cannot be moved for each of them in place."""
    monkeypatch.setattr(kernels, "library", lambda: library)
    with pytest.raises(RuntimeError):
        clip(1.0).track_(torch.randn(1, 40).expand(5, 40), 1e3 * torch.eye(5, 40), 0.5)
    with pytest.raises(RuntimeError):
        clip(1.0).track_(torch.randn(5, 40), torch.zeros(4, 40), 0.5)


# messages on a grid

WIDE = 4_133  # more numbers than are added up together, and some more
UNUSUAL = [0.0, -0.0, 1e-45, -1e-30, 0.49, -0.5, 1.0, 2.0**24 + 2, 3e38, math.inf, -math.inf, math.nan]


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_factors", [True, False])
@pytest.mark.parametrize("unit", [2.0**-20, 1.0, 2.0**40])
def test_rounding_towards_zero_has_the_same_bits_with_and_without(unit, with_factors, dtype, monkeypatch):
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.standard_normal((5, 2 * WIDE)) * 50 * unit).to(dtype)
    rows[1, : len(UNUSUAL)] = torch.tensor(UNUSUAL, dtype=dtype)
    factors = torch.from_numpy(rng.random((5, 2))).to(dtype)[:, 0] if with_factors else None
    grid, found = Grid(unit, 1e30), []
    for library in (kernels.library(), None):
        monkeypatch.setattr(kernels, "library", lambda library=library: library)
        found.append(grid.truncate_(rows.clone()[:, :WIDE], factors))
    assert torch.equal(*(one.nan_to_num(12345.0) for one in found))
    whole = found[0][0] / unit
    assert torch.equal(whole, whole.trunc()) and len(whole.unique()) > 50


@pytest.mark.parametrize("kinds", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
@pytest.mark.parametrize("library", [kernels.library(), None], ids=["compiled", "without"])
def test_factors_of_another_type_are_taken_for_what_they_are(library, kinds, monkeypatch):
    monkeypatch.setattr(kernels, "library", lambda: library)
    rows, factors = torch.full((3, 40), 8.0, dtype=kinds[0]), torch.tensor([0.5, 0.25, 0.2], dtype=kinds[1])
    assert grid_for(9.0).truncate_(rows, factors)[:2, 0].tolist() == [4.0, 2.0]


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bound", [smooth_normalize(0.01), smooth_normalize(0.0, 1e-3), clip(0.5), clip(1e-20)])
def test_tracking_on_a_grid_is_the_same_with_and_without(bound, dtype, monkeypatch):
    """Usual and odd rows. A number next to a whole one may be rounded to either; what is remembered is what is sent."""
    rng, grid = np.random.default_rng(0), grid_for(bound.radius)
    updates = torch.from_numpy(rng.standard_normal((8, WIDE))).to(dtype)
    memory = torch.from_numpy(rng.standard_normal((8, 2 * WIDE))).to(dtype)
    updates[3], memory[3:6] = 0, 0
    updates[4, 7] = math.nan
    updates[5] *= 1e25
    fast = tracked(bound.on(grid), updates, memory[:, :WIDE], 0.5)
    monkeypatch.setattr(kernels, "library", lambda: None)
    slow = tracked(bound.on(grid), updates, memory[:, :WIDE], 0.5)
    assert fast[2] == slow[2] == (4,)
    units, other = fast[0].double() / grid.unit, slow[0].double() / grid.unit
    assert torch.equal(units, units.trunc()) and bool((units.square().sum(1) <= grid.most).all())
    assert (units - other).abs().max() <= 1 + DTYPES[dtype] * grid.steps
    assert bool(units[0].any()) and not units[3:5].any()
    remembered = memory[:, :WIDE] + 0.5 * fast[0]
    assert torch.allclose(fast[1], remembered, rtol=DTYPES[dtype], atol=float(memory.abs().max()) * DTYPES[dtype])


@compiled
@settings(deadline=None, max_examples=100)
@given(st.integers(1, 200), st.integers(1, 9), st.sampled_from([16, 20]), st.integers(0, 99), st.booleans())
def test_sums_on_a_grid_have_the_same_bits_with_and_without(d, rows, bits, seed, single):
    rng, grid = np.random.default_rng(seed), grid_for(0.3, bits)
    units = rng.integers(-(2**bits) // 20, 2**bits // 20, (rows, d)) // math.isqrt(d)
    values = torch.from_numpy(units * grid.unit).to(torch.float32 if single else torch.float64)
    sends = torch.from_numpy(rng.integers(0, 2, rows)).to(values.dtype)
    values[sends == 0, 0] = math.nan
    total = Messages(values).sum(sends, Adding(grid=grid))
    assert np.array_equal(total.numpy() / grid.unit, units[sends.numpy() > 0].sum(0, dtype=np.int64))
    squares = kernels.sum_units(values, sends, grid.unit)[1]
    assert squares.tolist() == [int((row**2).sum()) * int(s) for row, s in zip(units, sends, strict=True)]


@pytest.mark.parametrize("at", [0, 15, 16, 4_095, 4_096, WIDE - 1])
@pytest.mark.parametrize("library", [kernels.library(), None], ids=["compiled", "without"])
def test_a_number_between_those_of_the_grid_is_cut_off_wherever_it_is(at, library, monkeypatch):
    monkeypatch.setattr(kernels, "library", lambda: library)
    for unit, small in ((2.0**-20, 1.9 * 2.0**-20), (2.0**40, 1e-45)):
        grid, rows = Grid(unit, 2.0**20 * unit), torch.zeros(3, WIDE)
        rows[1, at], rows[2, at] = -3.5 * unit, small
        expected = torch.zeros(WIDE, dtype=torch.float64)
        expected[at] = unit if small > unit else 0.0
        assert torch.equal(Messages(rows).sum(torch.tensor([1.0, 0.0, 1.0]), Adding(grid=grid)), expected)
        expected[at] -= 3 * unit
        assert torch.equal(Messages(rows).sum(torch.ones(3), Adding(grid=grid)), expected)


# models


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_gradients_without_them_are_those_of_torch(name, without):
    module, data = MODELS[name](), clients(EQUAL)
    problem = fn.NeuralProblem(module, data, dtype=torch.float64, vectorize="layers")
    x = problem.init(np.random.default_rng(0))
    expected = torch.stack([one_client_gradient(module, *pair) for pair in data])
    assert torch.allclose(problem.grad(x, np.arange(4)), expected, rtol=1e-9, atol=1e-11)


class _Twice(nn.Module):
    """A sequence of which a part is looked at, beside what follows it."""

    def __init__(self):
        super().__init__()
        self.norm, self.relu, self.last = nn.GroupNorm(2, 4), nn.ReLU(), nn.Linear(4 * 64, 4)
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1))

    def forward(self, x):
        z = self.first(x)
        z = self.norm(self.relu(z) + 0.1 * z)
        return self.last((self.relu(z) + 0.1 * z).flatten(1))


def _shared_tanh():
    tanh, relu = nn.Tanh(), nn.ReLU()
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), tanh, nn.GroupNorm(2, 4), tanh, relu, nn.Conv2d(4, 4, 3, padding=1),
        nn.GroupNorm(4, 4), relu, nn.MaxPool2d(2), relu, nn.MaxPool2d(2, stride=1), nn.Flatten(), nn.Linear(36, 4),
    )  # fmt: skip


@pytest.mark.parametrize("build", [_Twice, _shared_tanh])
@pytest.mark.parametrize("library", [kernels.library(), None], ids=["compiled", "without"])
def test_a_positive_part_is_taken_where_it_stands(build, library, monkeypatch):
    """A layer that is met twice in a sequence, or whose result is used elsewhere too, is no part of another."""
    monkeypatch.setattr(kernels, "library", lambda: library)
    torch.manual_seed(0)
    module, data = build(), clients(EQUAL)
    problem = fn.NeuralProblem(module, data, dtype=torch.float64, vectorize="layers")
    x = problem.init(np.random.default_rng(0))
    expected = torch.stack([one_client_gradient(module, *pair) for pair in data])
    assert torch.allclose(problem.grad(x, np.arange(4)), expected, rtol=1e-9, atol=1e-11)


CONVOLUTIONS = {
    "few channels": lambda: fn.models.small_cnn((3, 8, 8), 4, channels=(4, 8), norm="none", halving="stride"),
    "normalised": lambda: fn.models.small_cnn((3, 8, 8), 4, channels=(4, 8), halving="stride"),
    "16 channels": lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.Identity(), nn.ReLU(inplace=True),
        nn.Conv2d(16, 12, 3, 2, bias=False), nn.ReLU(), nn.Conv2d(12, 40, 1), nn.Tanh(), nn.Conv2d(40, 40, 2),
        nn.ReLU(), nn.Flatten(), nn.Linear(40, 4),
    ),
    "too many channels": lambda: nn.Sequential(
        nn.Conv2d(3, 65, (2, 3), (1, 2), (1, 0)), nn.ReLU(), nn.Conv2d(65, 2, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(14, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("each", [3, 9])
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("library", [kernels.library(), None], ids=["compiled", "without"])
def test_gradients_of_convolutions_are_those_of_torch(name, each, library, monkeypatch):
    """Whichever of our own functions and torch's compute a layer: it depends on channels, strides, images, weights."""
    monkeypatch.setattr(kernels, "library", lambda: library)
    torch.manual_seed(0)
    module, data = CONVOLUTIONS[name](), clients([each] * 3, (3, 8, 8))
    problem = fn.NeuralProblem(module, data, dtype=torch.float64, vectorize="layers")
    x = problem.init(np.random.default_rng(0))
    rows = x + 0.01 * torch.from_numpy(np.random.default_rng(1).standard_normal((3, problem.dim)))
    for point in (x, rows):
        own = [(*pair, point if point.ndim == 1 else point[i]) for i, pair in enumerate(data)]
        expected = torch.stack([one_client_gradient(module, *arguments) for arguments in own])
        assert torch.allclose(problem.grad(point, np.arange(3)), expected, rtol=1e-12, atol=1e-13)


# runs


@pytest.mark.long
@compiled
@pytest.mark.parametrize("norm", ["group", "none"])
def test_a_training_without_them_differs_in_rounding_only(norm, monkeypatch):
    def trained():
        torch.manual_seed(0)
        model = fn.models.small_cnn((1, 8, 8), 4, channels=(4, 8), norm=norm)
        problem = fn.NeuralProblem(model, clients([6] * 8))
        method = fn.fed_normec(fn.gd(0.1, 2), beta=0.05, server_step=0.1, server_normalization=False)
        return fn.train(problem, method, fn.poisson(0.5), fn.Privacy(noise_std=0.5), rounds=5, seed=1).x

    one, again = trained(), trained()
    assert torch.equal(one, again)
    monkeypatch.setattr(kernels, "library", lambda: None)
    other = trained()
    assert not torch.equal(one, other), "both were computed in the same way"
    assert (one - other).norm() <= 1e-5 * one.norm()


@pytest.mark.long
def test_a_run_says_which_it_used(tmp_path, fednormec_: Command, monkeypatch):
    perform(read(QUICKSTART, ["run.rounds=1"]), "test", tmp_path / "out", quiet=True)
    used = kernels.library() is not None
    assert json.loads((tmp_path / "out" / "environment.json").read_text())["kernels"] is used
    said = fednormec_("run", "--profile", "--set", "run.rounds=1").out
    assert ("with compiled kernels" if used else "without compiled kernels") in said
    monkeypatch.setattr(kernels, "library", lambda: None)
    assert "without compiled kernels" in fednormec_("run", "--profile", "--set", "run.rounds=1").out
