"""Adaptive bounds: the quantile is found, the noise is split as the formula says, and nothing leaves the ball."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

import fednormec as fn
from fednormec.algorithms.adaptive import BIT, MOST, Threshold
from fednormec.audit.canaries import with_canaries
from fednormec.core.bounds import Adding
from fednormec.core.participation import Weights
from fednormec.core.vectors import row_norms
from fednormec.problems.silence import Silence
from fednormec.theory.question import local_of

PROBLEM = fn.random_quadratic(9, 5, parts=4, heterogeneity=1.0, seed=4)
LOCAL = fn.gd(0.3, steps=3)
BUILD = {"dp_fed_avg_adaptive": fn.dp_fed_avg_adaptive, "fed_normec_adaptive": fn.fed_normec_adaptive}


def last(algorithm, *asked, rounds=15, problem=PROBLEM, seed=3):
    *_, end = fn.simulate(problem, algorithm, *asked, rounds=rounds, seed=seed)
    return end


def close(one, other):
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(one, other, strict=True))


def fixed_updates(norms):
    """A problem without clients of its own and one canary for each norm, whose gradient has it wherever x is."""
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((len(norms), 5))
    rows *= (norms / np.linalg.norm(rows, axis=1))[:, None]
    return with_canaries(Silence(5, 0), torch.from_numpy(rows), np.ones(len(norms), bool), scale=1.0)


def thresholds(algorithm, problem, *asked, rounds):
    return np.array([float(r.server.memory[-1]) for r in fn.simulate(problem, algorithm, *asked, rounds=rounds)])


# reductions


OPTIMIZERS = [fn.optimizers.sgd(), fn.optimizers.momentum(0.9), fn.optimizers.adam()]


@pytest.mark.parametrize("noise", [None, 0.7])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
def test_a_threshold_that_stays_is_clipping_with_more_noise(optimizer, noise):
    """Noise z on the message is z/sqrt(1 - s) on the update, which optimisers are told; its draws are the same."""
    adaptive = fn.dp_fed_avg_adaptive(LOCAL, rate=0.0, start=0.2, bit_share=0.3).with_optimizer(optimizer)
    clipped = fn.dp_fed_avg_clip(LOCAL, tau=0.2).with_optimizer(optimizer)
    more = (None, None) if noise is None else (fn.Privacy(noise_std=noise), fn.Privacy(noise_std=noise / 0.7**0.5))
    one, other = (last(a, fn.poisson(0.5), p) for a, p in zip((adaptive, clipped), more, strict=True))
    assert close((one.x,), (other.x,))
    moved = last(fn.dp_fed_avg_adaptive(LOCAL, rate=0.1, start=0.2).with_optimizer(optimizer), fn.poisson(0.5))
    assert not close((moved.x,), (last(clipped, fn.poisson(0.5)).x,))


@pytest.mark.parametrize("noise", [None, 0.7])
@pytest.mark.parametrize("idle", ["advance", "sleep"])
@pytest.mark.parametrize("normalized", [True, False])
def test_a_threshold_that_stays_is_fed_normec_with_more_noise(normalized, idle, noise):
    how = {"server_normalization": normalized, "warmup_rounds": 2, "server_step": 0.2}
    adaptive = fn.fed_normec_adaptive(LOCAL, alpha=0.5, beta=0.3, rate=0.0, start=0.4, bit_share=0.3, **how)
    fixed = fn.fed_normec(LOCAL, alpha=0.2, beta=0.12, **how)
    more = (None, None) if noise is None else (fn.Privacy(noise_std=noise), fn.Privacy(noise_std=noise / 0.7**0.5))
    one, other = (last(a, fn.poisson(0.5, idle), p) for a, p in zip((adaptive, fixed), more, strict=True))
    assert close((one.x, one.server.memory[:-2], one.memory), (other.x, other.server.memory, other.memory))


def test_without_noise_the_servers_memory_is_the_mean_of_the_clients():
    for participation in (fn.full(), fn.poisson(0.4, "sleep")):
        for r in fn.simulate(PROBLEM, fn.fed_normec_adaptive(LOCAL), participation, rounds=20, seed=2):
            assert torch.allclose(r.server.memory[:5], r.memory.mean(0), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", BUILD)
def test_the_unit_of_the_updates_does_not_matter(name):
    """Updates, memories and threshold 1,024 times as large give the same messages, to the bit."""
    algorithm, rng = BUILD[name](LOCAL), torch.Generator().manual_seed(0)
    server = algorithm.init(torch.randn(40, generator=rng))
    large = server._replace(memory=server.memory * 1024)
    rows, updates = (torch.randn(6, n, generator=rng) for n in (algorithm.memory_slots * 40, 40))
    small, moved = algorithm.client(server, rows, updates)
    same, moved_large = algorithm.client(large, rows * 1024, updates * 1024)
    assert torch.equal(small, same) and torch.equal(moved * 1024, moved_large)


# the quantile


NORMS = np.exp(np.random.default_rng(0).standard_normal(200))


def still(name, **settings):
    """A method whose memories stay where they are, so that what is measured is the norm of the updates."""
    if name == "fed_normec_adaptive":
        settings |= {"beta": 1e-12, "alpha": 1e-3}
    return BUILD[name](fn.gd(1.0), server_step=1e-9, **settings)


@pytest.mark.long
@pytest.mark.parametrize("start", [0.01, 100.0])
@pytest.mark.parametrize("quantile", [0.25, 0.5, 0.9])
@pytest.mark.parametrize("name", BUILD)
def test_the_threshold_finds_the_quantile_from_below_and_from_above(name, quantile, start):
    algorithm = still(name, quantile=quantile, start=start, rate=0.5)
    found = thresholds(algorithm, fixed_updates(NORMS), rounds=250)
    low, high = np.quantile(NORMS, [quantile - 0.02, quantile + 0.02])
    assert low <= found[-50:].min() and found[-50:].max() <= high
    assert not low <= found[0] <= high


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "trust"),
    [("dp_fed_avg_adaptive", "central"), ("dp_fed_avg_adaptive", "secagg"), ("fed_normec_adaptive", "central")],
)
def test_with_noise_and_sampling_the_threshold_stays_around_the_quantile(name, trust):
    """The mean share of norms up to C is the quantile asked for, and no other."""
    problem, noise = fixed_updates(NORMS), fn.Privacy(noise_std=1.0 if trust == "central" else 0.1, trust=trust)
    shares = {}
    for quantile in (0.4, 0.5):
        found = thresholds(still(name, quantile=quantile, start=1.0), problem, fn.poisson(0.5), noise, rounds=250)
        shares[quantile] = (NORMS[None] <= found[50:, None]).mean()
    for quantile, share in shares.items():
        assert [abs(share - other) < 0.03 for other in shares] == [quantile == other for other in shares]


@pytest.mark.long
@pytest.mark.parametrize(("quantile", "behind"), [(0.9, False), (0.5, True)])
@pytest.mark.parametrize("start", [1e-3, 1.0])
def test_memories_reach_the_updates_unless_the_threshold_falls_too_fast(start, quantile, behind):
    """By default all arrive, though norms differ by a factor of 15; the median leaves those with long ways behind."""
    problem = fixed_updates(NORMS[:20])
    algorithm = fn.fed_normec_adaptive(fn.gd(1.0), quantile=quantile, start=start, server_step=1e-9)
    end = last(algorithm, rounds=250, problem=problem)
    farthest = (end.memory - problem.updates).norm(dim=1).max()
    assert (farthest > 1) if behind else (farthest < 1e-9)
    assert float(end.server.memory[-1]) < 0.1


def test_the_threshold_stays_in_its_range():
    """Where every update is zero it falls, and where all are beyond every bound it rises: to the end, not beyond."""
    fallen = thresholds(fn.dp_fed_avg_adaptive(LOCAL, rate=10.0), Silence(4, 3), rounds=30)
    assert fallen[-1] == pytest.approx(1e-20, rel=1e-12) and (np.diff(fallen) <= 0).all()
    beyond = fixed_updates(np.full(3, 1e30))
    risen = thresholds(fn.dp_fed_avg_adaptive(fn.gd(1.0), rate=10.0), beyond, rounds=30)
    assert risen[-1] == pytest.approx(MOST, rel=1e-12)


# the split of the noise


def accepts(squares, count, variance):
    """Whether a sum of squares of normal numbers fits their variance, at 1e-5."""
    p = chi2.cdf(squares / variance, count)
    return 5e-6 < p < 1 - 5e-6


@pytest.mark.long
@pytest.mark.parametrize("trust", ["central", "secagg"])
@pytest.mark.parametrize("share", [0.01, 0.4])
def test_the_noise_is_split_as_the_formula_says(share, trust):
    """In the direction z C/(pM sqrt(1-s)), in b z/(2 pM sqrt(s)): accepted, and 2/3 and 3/2 of that are not.

    Nobody says anything: all clients are left out, so that b is 1/2 and noise."""
    z, m, rate, rounds = 0.8, 40, 1e-3, 300
    algorithm = fn.dp_fed_avg_adaptive(LOCAL, start=0.3, rate=rate, bit_share=share)
    std = z if trust == "central" else z / math.sqrt(m)
    xs, cs = [torch.zeros(5, dtype=torch.float64)], [0.3]
    problem = Silence(5, m, gradient=math.nan)
    for r in fn.simulate(problem, algorithm, fn.full(), fn.Privacy(noise_std=std, trust=trust), rounds=rounds):
        assert r.left_out == m
        xs.append(r.x)
        cs.append(float(r.server.memory[-1]))
    steps = torch.stack(xs).diff(dim=0).numpy() / np.array(cs[:-1])[:, None]
    b = 0.5 - np.diff(np.log(cs)) / rate
    for factor in (1.0, 2 / 3, 3 / 2):
        right = factor == 1
        assert accepts((steps**2).sum(), steps.size, (factor * z / m) ** 2 / (1 - share)) == right
        assert accepts(((b - 0.5) ** 2).sum(), b.size, (factor * z / (2 * m)) ** 2 / share) == right


@pytest.mark.long
@pytest.mark.parametrize("idle", ["advance", "sleep"])
@pytest.mark.parametrize("name", BUILD)
def test_a_step_says_how_much_noise_is_in_it(name, idle):
    """While the threshold moves, and with noises of all rounds in a memory. Rejects 2/3 and 3/2."""
    algorithm = BUILD[name](LOCAL, rate=3.0, quantile=0.2, **({"server_normalization": False} if "ec" in name else {}))
    heard = []

    def spy(*given):
        heard.append(algorithm.server(*given))
        return heard[-1]

    problem = Silence(3000, 10, gradient=math.nan)
    last(algorithm._replace(server=spy), fn.poisson(0.5, idle), fn.Privacy(noise_std=0.5), rounds=6, problem=problem)
    step = heard[-1]
    squares = float(step.direction.square().sum())
    assert float(step.memory[-1]) != pytest.approx(BUILD[name](LOCAL).init(torch.zeros(2)).memory[-1].item(), rel=0.1)
    assert [accepts(squares, 3000, factor * step.noise) for factor in (2 / 3, 1, 3 / 2)] == [False, True, False]


@pytest.mark.parametrize(("z", "senders", "on_update"), [(1.0, 100, 1.005), (2.33, 125, 2.372)])
def test_the_papers_split_is_a_share(z, senders, on_update):
    """z^-2 = z_update^-2 + (2 std)^-2 with std = pM/20; the default share is that for z = 1 and pM = 100."""
    rule = Threshold(0.5, 0.1, 0.2, (10 * z / senders) ** 2)
    a, s = rule.parts(torch.empty(7, dtype=torch.float64))
    assert z / a == pytest.approx(on_update, abs=5e-4)
    assert z / (2 * s) == pytest.approx(senders / 20, rel=1e-12)
    assert z**-2 == pytest.approx((z / a) ** -2 + (z / s) ** -2, rel=1e-12)
    default = fn.METHODS["dp_fed_avg_adaptive"].build.__kwdefaults__["bit_share"]
    assert (rule.bit_share == pytest.approx(default)) == (z == 1)


# the ball


@st.composite
def rows(draw):
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    width, bits = draw(st.sampled_from([1, 2, 127, 128, 300])), 32 if dtype == np.float32 else 64
    sizes = [1.0, 0.1, 1e-45, 1e-20, 1e18, 1e38] if bits == 32 else [1.0, 0.1, 5e-324, 1e-300, 1e300]
    base = np.random.default_rng(draw(st.integers(0, 2**32))).standard_normal(width) / math.sqrt(width)
    with np.errstate(over="ignore"):
        values = (base * draw(st.sampled_from(sizes))).astype(dtype)
    for place in draw(st.lists(st.integers(0, width - 1), max_size=2)):
        values[place] = draw(st.floats(width=bits))
    return torch.from_numpy(values)[None]


@pytest.mark.long
@settings(deadline=None, max_examples=200)
@given(
    rows(),
    st.sampled_from(sorted(BUILD)),
    st.sampled_from([1.0, 0.1, 1e-20, 1e20, math.nan, math.inf, -1.0, 0.0]),
    st.sampled_from([0.01, 1e-9, 0.5, 0.999]),
)
def test_no_message_leaves_the_ball(v, name, c, share):
    """In exact arithmetic, whatever the update and the threshold (which a client hears from a server)."""
    algorithm = BUILD[name](fn.gd(1.0), bit_share=share)
    server = algorithm.init(torch.zeros(v.shape[1], dtype=v.dtype))
    server.memory[-1] = c
    memory = v.new_full((1, algorithm.memory_slots * v.shape[1]), 0.3)
    messages = algorithm.client_(server, memory, v.clone())
    messages.sum(v.new_ones(1), Adding(longest=1.0))  # as the engine measures it
    row = messages.whole()[0]
    assert sum((Fraction(float(number)) ** 2 for number in row), Fraction(0)) <= 1
    assert memory.isfinite().all() and row.shape == (v.shape[1] + 1,) and row.dtype == v.dtype
    if not v.isfinite().all():
        assert not row.any() and messages.broken == (0,) and (memory == v.new_tensor(0.3)).all()
    else:
        assert abs(row[-1]) == pytest.approx(math.sqrt(share), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", BUILD)
def test_a_message_is_the_bounded_vector_and_the_bit(name, dtype):
    algorithm, v = BUILD[name](fn.gd(1.0), start=1.0, bit_share=0.36), torch.tensor([[0.3, 0.4], [3.0, 4.0]]).to(dtype)
    server, memory = algorithm.init(torch.zeros(2, dtype=dtype)), v.new_zeros(2, algorithm.memory_slots * 2)
    messages, _ = algorithm.client(server, memory, v)
    lengths = [0.5, 1.0] if name == "dp_fed_avg_adaptive" else [0.5 / 0.6, 5 / 5.1]
    expected = torch.tensor([[0.8 * n * 0.6, 0.8 * n * 0.8, bit] for n, bit in zip(lengths, (0.6, -0.6), strict=True)])
    torch.testing.assert_close(messages.double(), expected.double(), rtol=1e-4, atol=0)
    assert row_norms(messages)[1] > 0.98  # nothing of the ball is wasted


@pytest.mark.parametrize("name", BUILD)
def test_a_client_that_is_left_out_says_nothing_not_even_a_bit(name):
    algorithm = BUILD[name](fn.faulty(LOCAL, lambda update: update * math.nan, [2, 5]), rate=0.5)
    before = torch.zeros(2, algorithm.memory_slots * 5, dtype=torch.float64)
    for r in fn.simulate(PROBLEM, algorithm, rounds=4):
        assert r.left_out == 2 and r.server.memory.isfinite().all() and torch.equal(r.memory[[2, 5]], before)
    nobody = BUILD[name](fn.faulty(LOCAL, lambda update: update * math.nan, range(9)), rate=0.5, quantile=0.4)
    (first, *_) = fn.simulate(PROBLEM, nobody, privacy=fn.Privacy(noise_std=1e-9), rounds=1)
    start = float(nobody.init(torch.zeros(2)).memory[-1])
    assert first.released.norm() < 1e-6  # of the noise
    assert float(first.server.memory[-1]) == pytest.approx(start * math.exp(-0.05), rel=1e-6)  # b = 1/2


def test_a_mean_that_is_no_number_leaves_a_threshold():
    for name, build in BUILD.items():
        algorithm = build(LOCAL)
        server = algorithm.init(torch.zeros(3))
        for odd in (math.nan, math.inf, -math.inf):
            after = algorithm.server(server, torch.full((4,), odd), Weights(2.0, 2.0))
            assert 0 < float(after.memory[-1]) < 2, name


# what is said and refused


def test_the_statement_names_the_bit_and_others_have_none():
    noise = fn.Privacy(noise_std=1.0)
    for algorithm in (build(LOCAL) for build in BUILD.values()):
        said = last(algorithm, None, noise, rounds=1).statement
        assert BIT in " ".join(said.text.split()) and said.facts["extras"] == [BIT] and said.facts["radius"] == 1
        assert said.epsilon == last(fn.dp_fed_avg_clip(LOCAL), None, noise, rounds=1).statement.epsilon
    said = last(fn.fed_normec(LOCAL), None, noise, rounds=1).statement
    assert "bit" not in said.text and "extras" not in said.facts


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"quantile": 0.0}, "quantile must lie strictly between 0 and 1, not 0.0"),
        ({"quantile": 1.0}, "quantile must lie strictly between 0 and 1, not 1.0"),
        ({"quantile": math.nan}, "quantile must lie strictly between 0 and 1, not nan"),
        ({"start": 0.0}, "start must be a positive number between 1e-20 and 1e.20, not 0.0"),
        ({"start": -1.0}, "not -1.0"),
        ({"start": math.inf}, "not inf"),
        ({"rate": -0.1}, r"rate must lie in \[0, 10\], not -0.1"),
        ({"rate": math.nan}, r"rate must lie in \[0, 10\], not nan"),
        ({"rate": 11.0}, r"rate must lie in \[0, 10\], not 11.0"),
        ({"bit_share": 0.0}, "bit_share must lie strictly between 0 and 1, not 0.0"),
        ({"bit_share": 1.0}, "bit_share must lie strictly between 0 and 1, not 1.0"),
        ({"server_step": 0.0}, "server_step must be a positive number, not 0.0"),
    ],
)
def test_settings_out_of_range_are_refused(name, wrong, said):
    with pytest.raises(fn.UserError, match=said):
        BUILD[name](LOCAL, **wrong)


@pytest.mark.parametrize("name", BUILD)
def test_no_theorem_covers_them(name):
    with pytest.raises(fn.UserError, match=f"they do not cover the method {name}"):
        local_of({"method": {"name": name}}, None)
