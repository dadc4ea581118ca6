"""Leaks outside the noisy sum: each is refused, priced, or kept apart and marked."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from simulations import build

import fednormec as fn
from fednormec.algorithms.methods import METHODS
from fednormec.config.assemble import LOCALS, PARTICIPATIONS, assemble
from fednormec.core import randomness
from fednormec.core.participation import Participation
from fednormec.core.vectors import norm_error
from fednormec.engine.round import record
from fednormec.errors import UserError
from fednormec.privacy.accounting import Hidden, Open
from fednormec.runs.start import start
from fednormec.sweeps.grid import grid

PRIVACY = fn.Privacy(noise_std=1.0)
PRIVATE_METHODS = [name for name, method in METHODS.items() if method.can_be_private]


def two_layers(sizes=(4, 9, 2, 7), scale=1.0, layer=None):
    """Clients of unlike sizes; the module has layers of very unlike gradients."""
    rng = np.random.default_rng(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(6, 5), *([layer] if layer else []), torch.nn.ReLU(), torch.nn.Linear(5, 3)
    )
    fn.models.reset(module, np.random.default_rng(1))
    pairs = [(scale * rng.standard_normal((n, 6)), rng.integers(0, 3, n)) for n in sizes]
    return fn.NeuralProblem(module, pairs, dtype=torch.float64)


# refused


@pytest.mark.parametrize("build", [fn.clip21, lambda **s: fn.fed_normec(fn.gd(0.1), **s)])
def test_memories_that_start_from_exact_updates_are_refused(build):
    algorithm = build(initial_memory="local_updates")
    with pytest.raises(UserError, match="exact updates.*warmup_rounds"):
        fn.simulate(fn.random_quadratic(5, 3), algorithm, privacy=PRIVACY, rounds=1)


@pytest.mark.parametrize("layer", [torch.nn.BatchNorm1d(5), torch.nn.BatchNorm1d(5, affine=False)])
def test_running_statistics_are_refused_by_name_with_a_way_out(layer):
    with pytest.raises(UserError, match="'1' keeps running statistics.*GroupNorm"):
        two_layers(layer=layer)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not method.can_be_private])
def test_methods_without_a_bound_are_refused(name):
    with pytest.raises(UserError, match="does not bound"):
        fn.simulate(fn.random_quadratic(5, 3), build(name), privacy=PRIVACY, rounds=1)


@pytest.mark.parametrize("setting", ["tau", "beta", "server_step", "alpha"])
@pytest.mark.parametrize("value", ["auto", "median", "adaptive"])
def test_radii_and_steps_are_public_numbers(setting, value):
    """Nothing can be asked to compute them from clients' data."""
    name = "clip21" if setting == "tau" else "fed_normec"
    config = {
        "method": {"name": name, setting: value},
        "local": {"name": "gd", "step": 0.1},
        "problem": {"name": "quadratic"},
    }
    with pytest.raises(UserError, match=f"{setting} must be a number"):
        assemble(config)


@pytest.mark.parametrize("name", PRIVATE_METHODS)
def test_nothing_normalises_per_layer(name):
    """One norm over the whole vector: no sum of k messages is longer than k radii, whatever the layers are like."""
    problem, algorithm = two_layers(scale=1e4), build(name)
    assert not {"per_layer", "layerwise"} & set(METHODS[name].build.__annotations__)
    for r in fn.simulate(problem, algorithm, fn.poisson(0.5), rounds=6):
        assert r.released.norm() <= r.sent * algorithm.bound.radius


# never


@pytest.mark.parametrize("name", PRIVATE_METHODS)
def test_the_server_divides_by_public_numbers_and_nobody_weighs_by_examples(name):
    """The server's step is a function of the released sum and of public numbers: doing it again from those alone gives
    the same bits, though cohorts and clients differ in size."""
    problem, algorithm, participation = two_layers(), build(name), fn.poisson(0.5)
    participation = algorithm.rule(participation)
    server = algorithm.init(problem.init(np.random.default_rng(0)))
    x0, sizes = server.x, set()
    for r in fn.simulate(problem, algorithm, participation, PRIVACY, rounds=8, x0=x0):
        server = algorithm.advance(server, r.released / problem.num_clients, participation.weights(problem.num_clients))
        assert torch.equal(server.x, r.x) and torch.equal(server.memory, r.server.memory)
        sizes.add(r.sent)
    assert len(sizes) > 1


def test_a_client_with_more_examples_has_no_louder_voice():
    """The same data three times over is the same client."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((4, 6)), rng.integers(0, 3, 4)
    module = torch.nn.Linear(6, 3)
    ends = []
    for copies in (1, 3):
        pairs = [(x[:2], y[:2]), (np.tile(x[2:], (copies, 1)), np.tile(y[2:], copies))]
        problem = fn.NeuralProblem(module, pairs, dtype=torch.float64)
        *_, last = fn.simulate(problem, build("dp_fed_avg_clip"), privacy=PRIVACY, rounds=3)
        ends.append(last.released)
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-12)


def broken_problem():
    """No client's data give a finite update."""
    x = np.full((3, 4), np.inf)
    return fn.NeuralProblem(torch.nn.Linear(4, 2), [(x, np.array([0, 1, 0]))] * 5)


def test_a_private_run_does_not_stop_on_clients_data():
    """Without privacy it says that no update is finite; with privacy when it ends must not depend on the data."""
    with pytest.raises(fn.Diverged, match="no client"):
        list(fn.simulate(broken_problem(), build("clip21"), rounds=20, evaluate_every=1))
    rounds = list(fn.simulate(broken_problem(), build("clip21"), privacy=PRIVACY, rounds=20, evaluate_every=1))
    assert len(rounds) == 20 and {r.left_out for r in rounds} == {5}


# kept apart


def test_diagnostics_of_clients_are_recorded_apart():
    problem = two_layers()
    for r in fn.simulate(problem, build("clip21"), fn.poisson(0.5), PRIVACY, rounds=3, evaluate_every=1):
        line = record(r)
        private = line.pop("not_private")
        assert set(private) >= {"train_loss", "computed", "sent", "left_out"}
        assert set(line) <= {"round", "epsilon", "delta", "test_loss", "test_accuracy"}
        assert json.dumps(line)


@pytest.mark.parametrize("answer", [np.full(11, 50.0), np.ones(11, int), np.arange(3), np.ones(10, bool)])
@pytest.mark.parametrize("idle", ["advance", "sleep"])
def test_a_rule_of_ones_own_cannot_weigh_clients(answer, idle):
    rule = Participation("mine", lambda m: 1.0, lambda m, source: answer, idle)
    with pytest.raises(UserError, match="mine must say yes or no for each of the 11 clients"):
        next(fn.simulate(fn.random_quadratic(11, 3), build("fed_normec"), rule, PRIVACY, rounds=1))


def test_a_rule_of_ones_own_keeps_to_its_least_cohort():
    """The accountant counts on so many noises in a sum: fewer must not be released."""
    rule = Participation("mine", lambda m: 1.0, lambda m, source: np.arange(m) < 2, "sleep", lambda m: 5)
    with pytest.raises(UserError, match="mine drew 2 clients and promised 5 at least"):
        next(fn.simulate(fn.random_quadratic(11, 3), build("fed_normec"), rule, PRIVACY, rounds=1))


# priced


def test_only_independent_sampling_is_amplified():
    """Fixed cohorts, and any rule of one's own (whoever is online, a shuffled order), count as p = 1."""
    online = Participation("whoever is online", lambda m: 0.25, lambda m, source: np.arange(m) < m // 4, "sleep")
    for rule in (fn.full(), fn.fixed_size(5), online):
        mechanism = fn.Mechanism(20, rule, 2.0)
        assert mechanism.p == 1 and mechanism.release() == Open((1.0,), (0.5,))
    assert fn.Mechanism(20, fn.poisson(0.25), 2.0).release() == Hidden(0.25, 0.5)
    own_noise = fn.Mechanism(20, online, 2.0, trust="secagg").release()
    assert own_noise == Open((1.0,), (0.5,))  # nobody promises that anyone else takes part
    assert set(PARTICIPATIONS) == {"full", "poisson", "fixed_size"} and set(LOCALS) == {"gd", "ig", "sgd", "dp_sgd"}


@pytest.mark.long
def test_tuning_on_the_same_clients_is_priced():
    once, nine = (
        fn.train(
            fn.random_quadratic(30, 4),
            build("clip21"),
            fn.poisson(0.25),
            fn.Privacy(epsilon=8, tuning_runs=k),
            rounds=30,
        )
        for k in (1, 9)
    )
    assert nine.statement.epsilon <= 8 and nine.statement.facts["noise_std"] > 2 * once.statement.facts["noise_std"]
    alone = fn.Mechanism(30, fn.poisson(0.25), once.statement.facts["noise_std"])
    assert alone.epsilon(9 * 30, 1e-5) > 2 * 8  # what nine unpriced runs would have cost


def test_a_seed_is_said_in_the_statement():
    problem, algorithm = fn.random_quadratic(30, 4), build("clip21")
    seeded, secure = (
        fn.train(problem, algorithm, privacy=fn.Privacy(noise_std=1.0, randomness=r), rounds=2).statement
        for r in ("seeded", "secure")
    )
    assert "whoever knows the seed" in seeded.text and seeded.facts["randomness"] == "seeded"
    assert "seed" not in secure.text and secure.facts["randomness"] == "secure"


def test_noise_grows_with_the_rounding_of_the_sum():
    plain, larger = (fn.Mechanism(5, fn.full(), 2.0, rounding=r).noise(9, 5, 1, 1) for r in (0.0, 0.5))
    np.testing.assert_allclose(larger, 1.5 * plain, rtol=1e-12)


@pytest.mark.long
def test_runs_with_the_same_seed_share_their_noise_and_the_statement_says_so():
    """Why each run needs a seed of its own: two runs that differ in a step only, and the noise cancels."""
    a, b = (
        [
            r.released
            for r in fn.simulate(fn.random_quadratic(9, 400), algorithm, privacy=fn.Privacy(noise_std=50.0), rounds=2)
        ]
        for algorithm in (fn.clip21(server_step=0.1), fn.clip21(server_step=0.2))
    )
    assert (a[0] - b[0]).norm() == 0 and a[0].norm() > 500
    priced = fn.Privacy(noise_std=1.0, tuning_runs=2)
    said = fn.train(fn.random_quadratic(9, 4), build("clip21"), privacy=priced, rounds=2).statement.text
    flat = " ".join(said.split())
    assert "each with a seed or a stream of its own" in flat and "sees two runs with the same seed and stream" in flat


@pytest.mark.long
def test_cells_of_a_sweep_do_not_share_their_noise():
    """The same attack between two cells with one seed, from any two sweeps: what is left is noise, of √2 the size."""
    base = {"problem": {"name": "quadratic", "clients": 9, "dim": 400}, "method": {"name": "clip21"},
            "privacy": {"noise_std": 50.0, "stream": 0}, "run": {"rounds": 2, "seed": 3}}  # fmt: skip
    longer = {**base, "run": {"rounds": 3, "seed": 3}}
    cells = [cell for config in (base, longer) for cell in grid(config, {"method.server_step": [0.1, 0.2]})]
    first = [next(start(assemble(cell.config), fn.Threads(), lambda number, plan: None)).released for cell in cells]
    for a, b in itertools.combinations(first, 2):
        assert (a - b).norm() == pytest.approx(50 * math.sqrt(2 * 400), rel=0.2)
    for cell, released in zip(cells, first, strict=True):  # and yet a cell can be repeated
        assert torch.equal(
            next(start(assemble(cell.config), fn.Threads(), lambda number, plan: None)).released, released
        )


def test_streams_are_apart_and_stream_0_is_what_was_before():
    def drawn(stream, secure=False):
        mechanism = fn.Mechanism(40, fn.poisson(0.5), 2.0, secure=secure, stream=stream)
        return mechanism.noise(30, 20, 7, 1), mechanism.cohort(7, 1).sending

    for purpose, at in (("noise", 0), ("cohort", 1)):
        found = [drawn(stream)[at] for stream in (0, 1, 2, 11)]
        assert all(not np.array_equal(a, b) for a, b in itertools.combinations(found, 2)), purpose
        assert all(np.array_equal(drawn(stream)[at], one) for stream, one in zip((0, 1, 2, 11), found, strict=True))
    before = 2.0 * randomness.generator(7, "noise", 1).standard_normal(30)
    assert np.array_equal(drawn(0)[0], before)
    assert not np.array_equal(drawn(5, secure=True)[0], drawn(5, secure=True)[0])


@pytest.mark.parametrize("stream", [-1, 1.0, 0.5, True, "1", None])
def test_a_stream_is_a_whole_number(stream):
    for asked in (
        lambda: fn.Privacy(noise_std=1.0, stream=stream),
        lambda: fn.Mechanism(5, fn.full(), 1.0, stream=stream),
    ):
        with pytest.raises(UserError, match="stream must be a whole number from 0 on"):
            asked()


def test_secure_normals_are_sums_of_four_draws(monkeypatch):
    drawn = []
    right = randomness._keystream
    monkeypatch.setattr(randomness, "_keystream", lambda words: drawn.append(words) or right(words))
    randomness.SecureSource().standard_normal(10)
    assert drawn == [10] * 4


def test_the_sums_own_rounding_is_paid_for_with_noise():
    """A float32 sum over a tile may differ by more than the radius when a message changes; noise grows as much."""
    problem = fn.NeuralProblem(torch.nn.Linear(4, 2), [(np.ones((1, 4)), np.array([0]))] * 64)
    (first,) = fn.simulate(problem, build("clip21"), privacy=PRIVACY, rounds=1)
    of_the_sum, of_measuring = 64**2 * 2.0**-23, norm_error(torch.empty(0, problem.dim))
    assert first.plan.mechanism.rounding == pytest.approx(of_the_sum + of_measuring, rel=1e-6)
    rows = np.random.default_rng(0).standard_normal((problem.tile, 10_000)).astype(np.float32)
    rows /= np.linalg.norm(rows.astype(float), axis=1, keepdims=True)
    ones = torch.ones(problem.tile)
    with_all = (ones @ torch.from_numpy(rows)).double()
    rows[7] = 0
    moved = (with_all - (ones @ torch.from_numpy(rows)).double()).norm()
    assert moved <= 1 + first.plan.mechanism.rounding


# what decides how a run goes


def test_how_many_examples_a_client_has_decides_nothing_that_shows():
    """Which rounds are evaluated, how much noise there is."""

    def shown(sizes):
        problem = two_layers(sizes)
        run = fn.train(
            problem, fn.dp_fed_avg_clip(fn.sgd(0.1, 1, 2)), privacy=fn.Privacy(noise_std=5.0), rounds=40, seed=1
        )
        evaluated = [record["round"] for record in run.history if "train_loss" in record["not_private"]]
        return evaluated, run.statement.text, run.statement.facts

    few, many = shown((4, 9, 2, 7)), shown((4, 9, 200, 7))
    assert few == many


def test_a_round_has_the_statement_of_a_run_that_ends_there():
    privacy = fn.Privacy(epsilon=4.0)
    for r in fn.simulate(two_layers(), build("clip21"), privacy=privacy, rounds=9):
        left = r.statement
        assert left.epsilon == r.epsilon == r.plan.epsilon(r.number)
        assert left.facts["rounds"] == left.facts["rounds_counted"] == r.number
        flat = " ".join(left.text.split())
        early = "stopping here because of what was released: the ε of all 9 rounds holds then, 4.00" in flat
        assert early == (not r.last)
        if r.number == 4:
            alone = fn.train(
                two_layers(), build("clip21"), privacy=fn.Privacy(noise_std=left.facts["noise_std"]), rounds=4
            )
            assert alone.statement.epsilon == left.epsilon
    (plain,) = fn.simulate(two_layers(), build("clip21"), rounds=1)
    assert plain.statement is None


def test_a_run_that_is_stopped_on_public_figures_says_so_and_counts_all_rounds():
    """Stopping by what was released is post-processing of the whole run: its ε holds, a smaller one is not proved."""
    seen = []

    def enough(public):
        seen.append(public)
        return "ε has passed 2" if public["epsilon"] > 2 else None

    asked = {"privacy": fn.Privacy(epsilon=4.0), "rounds": 9, "evaluate_every": 1}
    done, full = (fn.train(two_layers(), build("clip21"), **asked, stop_when=f) for f in (enough, lambda public: None))
    assert len(done.history) == len(seen) < 9 and done.stopped == "ε has passed 2" and full.stopped is None
    assert not any("not_private" in public or "train_loss" in public for public in seen)
    assert done.history == full.history[: len(seen)]
    assert done.statement.epsilon == full.statement.epsilon > done.history[-1]["epsilon"]
    assert done.statement.facts["rounds"] == len(seen) and done.statement.facts["rounds_counted"] == 9
    flat = " ".join(done.statement.text.split())
    assert f"after {len(seen)} of 9 rounds: stopped on request: ε has passed 2." in flat
    assert f"released {len(seen)} noisy sums" in flat and "ended" not in full.statement.text
    last = fn.train(two_layers(), build("clip21"), **asked, stop_when=lambda p: "the end" if p["round"] == 9 else None)
    assert last.stopped is None and last.statement == full.statement


def test_a_run_that_diverges_counts_all_rounds():
    """The model that was released decided that it ends."""
    local = fn.gd(0.3)
    method = fn.dp_fed_avg_clip(local, tau=1e30, server_step=1e290)
    done = fn.train(two_layers(), method, privacy=fn.Privacy(epsilon=4.0), rounds=9)
    assert done.diverged is not None and len(done.history) < 8
    assert done.statement.facts["rounds_counted"] == 9 and done.statement.epsilon > 3.9
    assert "the model diverged in round" in " ".join(done.statement.text.split())
