"""Optimisers of the server: literal loops at rtol 1e-12, reductions to the bit, contracts with every method."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from simulations import CONTRACTS, build

import fednormec as fn
from fednormec.algorithms.optimizers import OPTIMIZERS, adam, disk, ema, low_pass, momentum, scheduled, sgd, tail, yogi
from fednormec.core.algorithm import Step
from fednormec.core.participation import Weights
from fednormec.core.randomness import generator
from fednormec.engine.round import Resumed
from fednormec.runs import checkpoint as checkpoints

PROBLEM = fn.random_quadratic(9, 6, parts=2, heterogeneity=1.0, seed=2)
M, D, P, ETA, ROUNDS, NOISE = 9, 6, 0.5, 0.4, 12, 0.3
PRIVATE = fn.Privacy(noise_std=NOISE)
CLIPPED = fn.dp_fed_avg_clip(fn.gd(0.3, steps=2), tau=0.7, server_step=ETA)


def start_of(seed):
    """Where a simulation with this seed starts."""
    return PROBLEM.init(generator(seed, "init")).numpy()


# literal loops: what the server makes of the released sums, in plain numpy


def literal_momentum(x, directions, scale, variance, a=0.8, nesterov=False):
    m = np.zeros_like(x)
    for d in directions:
        m = a * m + d
        x = x - ETA * scale * (d + a * m if nesterov else m)
        yield x, x


def literal_adam(x, directions, scale, variance, b1=0.7, b2=0.9, floor=0.05):
    m, u = np.zeros_like(x), np.zeros_like(x)
    for t, d in enumerate(directions, 1):
        m = b1 * m + (1 - b1) * d
        u = b2 * u + (1 - b2) * d**2
        no_noise = sum((1 - b2) * b2 ** (t - j) * variance for j in range(1, t + 1))
        signal = (u - no_noise) / (1 - b2**t)
        x = x - ETA * (m / (1 - b1**t)) / np.sqrt(np.maximum(signal, floor * np.mean(np.abs(signal))))
        yield x, x


def literal_yogi(x, directions, scale, variance, b1=0.7, b2=0.9, floor=0.05):
    m, u = np.zeros_like(x), None
    for t, d in enumerate(directions, 1):
        m = b1 * m + (1 - b1) * d
        g = d**2 - variance
        u = np.abs(g) if u is None else u - (1 - b2) * np.sign(u - g) * np.abs(g)
        x = x - ETA * (m / (1 - b1**t)) / np.sqrt(np.maximum(u, floor * np.mean(np.abs(u))))
        yield x, x


def literal_low_pass(x, directions, scale, variance, a=0.8):
    m, before, c, one = np.zeros_like(x), np.zeros_like(x), 0.0, 0.0
    for d in directions:
        m, c = a * m + (1 - a) / 2 * (d + before), a * c + (1 - a) / 2 * (1 + one)
        before, one = d, 1.0
        x = x - ETA * scale * m / c
        yield x, x


def literal_disk(x, directions, scale, variance, k=0.6):
    g = None
    for d in directions:
        g = d if g is None else (1 - k) * g + k * d
        old, x = x, x - ETA * scale * g
        yield x, x + (1 - k) / k * (x - old)


ORACLES = {
    "sgd": (sgd(), partial(literal_momentum, a=0.0)),
    "momentum": (momentum(0.8), literal_momentum),
    "nesterov": (momentum(0.8, nesterov=True), partial(literal_momentum, nesterov=True)),
    "adam": (adam(0.7, 0.9, 0.05), literal_adam),
    "yogi": (yogi(0.7, 0.9, 0.05), literal_yogi),
    "low_pass": (low_pass(0.8), literal_low_pass),
    "disk": (disk(0.6), literal_disk),
}


@pytest.mark.parametrize("private", [False, True], ids=["no noise", "noise"])
@pytest.mark.parametrize("name", ORACLES)
def test_an_optimiser_is_its_literal_loop(name, private):
    optimizer, literal = ORACLES[name]
    given = (PROBLEM, CLIPPED.with_optimizer(optimizer), fn.poisson(P), PRIVATE if private else None)
    rounds = list(fn.simulate(*given, rounds=ROUNDS, seed=4))
    directions = [r.released.numpy() / M for r in rounds]
    variance = (NOISE * 0.7 * (1 + rounds[0].plan.mechanism.rounding) / M) ** 2 if private else 0.0
    for r, (x, point) in zip(rounds, literal(start_of(4), directions, 1 / P, variance), strict=True):
        np.testing.assert_allclose(r.x.numpy(), x, rtol=1e-12)
        np.testing.assert_allclose(r.server.x.numpy(), point, rtol=1e-12)


def test_every_optimiser_has_an_oracle():
    assert set(OPTIMIZERS) <= set(ORACLES)
    for name, row in OPTIMIZERS.items():
        vectors = len(row.build().init(torch.zeros(1000))) // 1000
        assert row.build().name == name and vectors == row.memory


# reductions, to the bit


PLAIN = {
    "momentum 0": momentum(0.0),
    "nesterov 0": momentum(0.0, nesterov=True),
    "kappa 1": disk(1.0),
    "constant": scheduled(sgd(), fn.schedule("constant", 6)),
    "ema": ema(sgd()),
    "tail": tail(sgd(), 2),
}


@pytest.mark.parametrize("name", CONTRACTS)
def test_what_changes_nothing_changes_no_bit(name):
    algorithm = build(name)
    plain = [(r.x, r.memory.clone()) for r in fn.simulate(PROBLEM, algorithm, fn.poisson(P), rounds=4, seed=3)]
    for optimizer in PLAIN.values():
        same = fn.simulate(PROBLEM, algorithm.with_optimizer(optimizer), fn.poisson(P), rounds=4, seed=3)
        for (x, memory), r in zip(plain, same, strict=True):
            assert torch.equal(x, r.x) and torch.equal(memory, r.memory)


def test_constant_schedules_of_local_step_and_beta_change_no_bit():
    constant = fn.schedule("constant", 5)
    for algorithm, local in (
        (partial(fn.fed_normec, beta=0.2), fn.gd(0.3, 2)),
        (fn.dp_fed_avg_clip, fn.sgd(0.3, 2, 1)),
    ):
        plain, other = algorithm(local), algorithm(local.scheduled(constant))
        other = other if other.with_beta is None else other.with_beta(constant)
        ends = [list(fn.simulate(PROBLEM, a, fn.poisson(P), rounds=5))[-1].x for a in (plain, other)]
        assert torch.equal(*ends)


# schedules against methods that are built anew in every round


@pytest.mark.parametrize("name", ["fed_normec", "dp_fed_avg_clip", "dp_fed_avg_adaptive", "dp_scaffold", "centred"])
def test_scheduled_steps_are_those_of_methods_built_anew(name):
    """Round k of a schedule is a round of the method with the steps of that round."""
    shape = fn.schedule("linear", 5)

    def method(local, server, beta):
        settings = {"server_step": 0.3 * server}
        if name in ("fed_normec", "centred"):
            settings["beta"] = 0.2 * beta
        if name == "centred":
            settings["alpha"] = 0.5
        return fn.METHODS[name].build(fn.gd(0.4 * local, steps=3), **settings)

    base = method(1, 1, 1)
    built = fn.METHODS[name].build(fn.gd(0.4, steps=3).scheduled(shape), **(
        {"server_step": 0.3} | ({"beta": 0.2} if base.with_beta else {}) | ({"alpha": 0.5} if name == "centred" else {})
    ))  # fmt: skip
    if built.with_beta is not None:
        built = built.with_beta(shape)
    built = built.with_optimizer(scheduled(sgd(), shape))
    rounds = fn.simulate(PROBLEM, built, rounds=5, seed=1)
    ids, rows = np.arange(M), torch.zeros(M, base.memory_slots * D, dtype=torch.float64)
    server = None
    for k, r in enumerate(rounds, 1):
        f = shape.factor(k)
        now = method(f, f, f)
        if server is None:
            server = now.start(torch.from_numpy(start_of(1)))
        correction = None if now.correction is None else now.correction(server, rows)
        updates = now.local.run(PROBLEM, server.x, ids, fn.Moment(1, k), correction)
        total = now.client_(server, rows, updates).whole().sum(0)
        server = now.advance(server, total / M, Weights(1.0, 1.0))
        torch.testing.assert_close(r.x, server.x, rtol=1e-12, atol=1e-15)


# averages


def test_an_exponential_average_weighs_models_as_it_says():
    c, algorithm = 0.7, CLIPPED.with_optimizer(ema(momentum(0.5), 0.7))
    models = []
    for r in fn.simulate(PROBLEM, algorithm, rounds=8):
        models.append(r.x.numpy().copy())
        weights = np.array([c ** (len(models) - j) for j in range(1, len(models) + 1)])
        wanted = (weights[:, None] * models).sum(0) / weights.sum()
        np.testing.assert_allclose(r.average.numpy(), wanted, rtol=1e-12)


def test_a_tail_average_is_the_mean_of_the_last_models():
    models = []
    for r in fn.simulate(PROBLEM, CLIPPED.with_optimizer(tail(disk(0.6), 3)), rounds=8):
        models.append(r.x.numpy().copy())
        wanted = models[-1] if r.number <= 3 else np.mean(models[3:], axis=0)
        np.testing.assert_allclose(r.average.numpy(), wanted, rtol=1e-12)


def test_an_average_is_evaluated_beside_the_model():
    """Its figures are those of a model of its own."""
    *_, r = fn.simulate(PROBLEM, CLIPPED.with_optimizer(tail(sgd(), 2)), rounds=6, evaluate_every=6)
    own, both = PROBLEM.evaluate(r.average).not_private, r.metrics.not_private
    assert {f"{name}_averaged": value for name, value in own.items()}.items() <= both.items()
    assert PROBLEM.evaluate(r.x).not_private.items() <= both.items()


# the noise that optimisers take out is the noise that is there


@pytest.mark.parametrize("trust", ["central", "secagg"])
@pytest.mark.parametrize("method", [
    fn.dp_fed_avg_clip(fn.gd(0.1)),
    fn.fed_normec(fn.gd(0.1), beta=0.3, server_normalization=False),
    fn.fed_normec(fn.gd(0.1), beta=0.3, server_normalization=True),
    fn.fed_normec(fn.gd(0.1), beta=0.3, server_normalization=False).with_beta(fn.schedule("linear", 4)),
    fn.econtrol(fn.gd(0.1), tau=0.5),
    fn.dp_scaffold(fn.gd(0.1)),
    fn.dp_fed_avg_adaptive(fn.gd(0.1)),
    fn.fed_normec_adaptive(fn.gd(0.1), server_normalization=False),
], ids=lambda a: a.name)  # fmt: skip
def test_a_steps_noise_is_its_variance(method, trust):
    """Silent clients: a direction is all noise. 4,000 draws tell its variance to 3 %, and reject 2/3 and 3/2."""
    dim, rounds = 4000, 4
    participation = method.rule(fn.fixed_size(8, "sleep"))
    mechanism = fn.Mechanism(20, participation, 2.0, method.bound.radius, trust)
    weights = participation.weights(20)._replace(noise=mechanism.variance / 20**2)
    server = method.start(torch.zeros(dim, dtype=torch.float64))
    for k in range(1, rounds + 1):
        mean = torch.from_numpy(mechanism.noise(method.message_width(dim), 8, 7, k)) / 20
        step = method.server(server, mean, weights)
        found = float(step.direction.square().mean()) / step.noise
        assert 0.9 < found < 1.1, f"round {k}: {found}"
        server = method.advance(server, mean, weights)


def test_without_noise_none_is_taken_out():
    seen = []

    def look(x, memory, step, number):
        seen.append(step.noise)
        return x - step.direction, memory

    looking = sgd()._replace(update=look)
    list(fn.simulate(PROBLEM, CLIPPED.with_optimizer(looking), rounds=2))
    list(fn.simulate(PROBLEM, CLIPPED.with_optimizer(looking), privacy=PRIVATE, rounds=2))
    assert seen[:2] == [0, 0] and all(noise > 0 for noise in seen[-2:])


def test_adam_without_the_noise_sees_the_signal():
    """The second moment of a signal of 1 in noise of variance 4 is 1, where that of plain Adam is 5."""
    rng, d = np.random.default_rng(0), 2000
    x, memory = torch.zeros(d, dtype=torch.float64), adam(0.0, 0.99).init(torch.zeros(d, dtype=torch.float64))
    for number in range(1, 600):
        direction = torch.from_numpy(1 + 2 * rng.standard_normal(d))
        x, memory = adam(0.0, 0.99).update(x, memory, Step(direction, 0.1, x[:0], noise=4.0), number)
    u = memory[d : 2 * d].mean() / (1 - 0.99**599)
    assert 0.9 < float(u) < 1.1


# contracts: every method with every optimiser


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ORACLES)
@pytest.mark.parametrize("name", CONTRACTS)
def test_every_method_takes_every_optimiser(name, optimizer, tmp_path):
    """It stays finite and in its dtype, leaves what it was given alone, and goes on after a checkpoint to the bit."""
    algorithm = build(name).with_optimizer(ema(ORACLES[optimizer][0], 0.9))
    private = PRIVATE if math.isfinite(algorithm.bound.radius) and algorithm.prime is None else None
    asked = (PROBLEM, algorithm, fn.poisson(P), private)
    ends = []
    for r in fn.simulate(*asked, rounds=4, seed=3):
        assert r.x.isfinite().all() and r.x.dtype == r.server.optimizer.dtype == torch.float64
        checkpoints.save(tmp_path / f"{r.number}", r)
        ends.append([r.x.clone(), r.average.clone(), r.server.optimizer.clone()])
    rest = fn.simulate(*asked, rounds=4, seed=3, resume=Resumed(checkpoints.load(tmp_path / "2")))
    for wanted, r in zip(ends[2:], rest, strict=True):
        assert all(map(torch.equal, wanted, [r.x, r.average, r.server.optimizer]))


@pytest.mark.parametrize("name", ORACLES)
def test_an_update_is_pure(name):
    optimizer, rng = ema(ORACLES[name][0]), torch.Generator().manual_seed(0)
    x, direction = (torch.randn(5, generator=rng) for _ in range(2))
    memory = optimizer.init(x)
    for _ in range(2):
        before = [t.clone() for t in (x, memory, direction)]
        ends = [optimizer.update(x, memory, Step(direction, 0.1, x[:0], 2.0, 0.01), 1) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(before, (x, memory, direction), strict=True))
        x, memory = ends[0]


def test_a_step_of_zero_leaves_the_optimiser_alone():
    """In warm-up rounds the model stays, and momentum does not take in what was not gone along."""
    algorithm = fn.fed_normec(fn.gd(0.1), warmup_rounds=2).with_optimizer(momentum(0.9))
    for r in fn.simulate(PROBLEM, algorithm, rounds=3):
        assert bool(r.server.optimizer.any()) == (r.number > 2)


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda: momentum(1.0), "decay must lie in"), (lambda: adam(beta2=1.5), "beta2"), (lambda: adam(floor=0), "floor"),
    (lambda: disk(0.0), "kappa"), (lambda: low_pass(-0.1), "decay"), (lambda: ema(sgd(), 1.0), "decay"),
    (lambda: tail(sgd(), -2), "after"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(wrong, words):
    with pytest.raises(fn.UserError, match=words):
        wrong()
