"""The engine: invariants of the family, purity, the same bits every time, empty cohorts, broken clients."""

import gc
import math
import threading
from functools import partial

import numpy as np
import pytest
import torch
from simulations import CONTRACTS, LOCAL, build, finish, mlp_problem

import fednormec as fn
from fednormec.core.bounds import Adding, Messages
from fednormec.core.local import Moment
from fednormec.core.participation import Participation, Weights
from fednormec.core.randomness import generator
from fednormec.engine import planning
from fednormec.engine.planning import evaluation_interval

QUADRATIC = fn.random_quadratic(11, 5, parts=3, heterogeneity=1.0, seed=0)
NOBODY = Participation("nobody", lambda m: 0.5, lambda m, rng: np.zeros(m, bool), "advance")


PROBLEMS = {
    "quadratic": lambda: QUADRATIC,
    "logistic": lambda: fn.random_logistic(7, 4, examples=5),
    "mlp": mlp_problem,
    "mlp, unequal, float64": partial(mlp_problem, sizes=[3, 9, 4, 8, 1], dtype=torch.float64),
}


# contracts: every method on every problem


@pytest.mark.long
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", CONTRACTS)
def test_every_method_runs_on_every_problem_and_keeps_its_types(name, problem):
    problem = PROBLEMS[problem]()
    algorithm = build(name)
    last = finish(problem, algorithm, fn.poisson(0.5), evaluate_every=1)
    x0 = problem.init(np.random.default_rng(0))
    assert last.x.shape == (problem.dim,)
    assert last.x.dtype == last.memory.dtype == x0.dtype
    assert last.memory.shape == (problem.num_clients, algorithm.memory_slots * problem.dim)
    assert last.server.round == 6
    assert last.x.isfinite().all()
    assert math.isfinite(last.metrics.not_private["train_loss"])


@pytest.mark.long
@pytest.mark.parametrize("name", CONTRACTS)
def test_every_method_lowers_the_loss(name):
    losses = [
        r.metrics.not_private["train_loss"] for r in fn.simulate(QUADRATIC, build(name), rounds=150, evaluate_every=1)
    ]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", CONTRACTS)
def test_messages_stay_within_the_radius(name):
    algorithm = build(name)
    problem = mlp_problem()
    d, m = problem.dim, problem.num_clients
    rng = torch.Generator().manual_seed(0)
    server = algorithm.init(torch.randn(d, generator=rng))
    for scale in (0.0, 1e-30, 1.0, 1e30):
        rows = torch.randn(m, algorithm.memory_slots * d, generator=rng)
        updates = algorithm.given(scale * torch.randn(m, d, generator=rng), np.arange(m), Moment(0, 1))
        messages, _ = algorithm.client(server, rows, updates)
        assert messages.shape == (m, algorithm.message_width(d))
        assert (messages.double().norm(dim=1) <= algorithm.bound.radius).all()


@pytest.mark.parametrize("name", CONTRACTS)
def test_client_and_server_are_pure(name):
    """The same arguments give the same result twice, and are not written to."""
    algorithm, d, m = build(name), 12, 4
    rng = torch.Generator().manual_seed(0)
    start = algorithm.init(torch.randn(d, generator=rng))
    server = start._replace(memory=torch.randn(start.memory.shape, generator=rng))
    rows, updates = torch.randn(m, algorithm.memory_slots * d, generator=rng), torch.randn(m, d, generator=rng)
    updates = algorithm.given(updates, np.arange(m), Moment(0, 1))
    mean = torch.randn(algorithm.message_width(d), generator=rng)
    given = [t.clone() for t in (server.x, server.memory, rows, updates, mean)]
    first, second = (algorithm.client(server, rows, updates) for _ in range(2))
    ends = [algorithm.advance(server, mean, Weights(2.0, 1.0)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(ends[0].x, ends[1].x)
    assert torch.equal(ends[0].memory, ends[1].memory)
    assert all(torch.equal(a, b) for a, b in zip(given, (server.x, server.memory, rows, updates, mean), strict=True))


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_row_alone_is_a_row_in_a_tile(name):
    """What one client computes on the wire is what it computes among others."""
    algorithm, d, m = build(name), 70, 5
    rng = torch.Generator().manual_seed(0)
    server = algorithm.init(torch.randn(d, generator=rng))
    rows, updates = torch.randn(m, algorithm.memory_slots * d, generator=rng), torch.randn(m, d, generator=rng)
    updates = algorithm.given(updates, np.arange(m), Moment(0, 1))
    messages, moved = algorithm.client(server, rows, updates)
    for i in range(m):
        message, own = algorithm.client(server, rows[i : i + 1], updates[i : i + 1])
        assert torch.equal(message[0], messages[i])
        assert torch.equal(own[0], moved[i])


# invariants


@pytest.mark.parametrize(
    "name",
    ["fed_normec", "alpha_normec", "clip21", "clip21_sgd2m", "ef21", "ef21_pp", "ef21_sgdm", "econtrol", "scaffold",
     "dp_scaffold"],
)  # fmt: skip
def test_the_servers_memory_is_the_mean_of_the_clients(name):
    """p = 1 and no noise: exactly what error feedback promises; with sleeping clients also for p < 1."""
    for participation in (fn.full(), fn.poisson(0.4, "sleep")):
        for r in fn.simulate(QUADRATIC, build(name), participation, rounds=20, seed=2):
            mean = r.memory[:, : QUADRATIC.dim].mean(0)
            assert torch.allclose(r.server.memory, mean, rtol=0, atol=1e-13)


def test_with_advancing_clients_and_sampling_the_servers_memory_is_not_the_mean():
    """The other direction: sampling variance is real under the paper's rule, so the test above can fail."""
    last = finish(QUADRATIC, build("fed_normec"), fn.poisson(0.4), rounds=20)
    assert (last.server.memory - last.memory.mean(0)).norm() > 1e-3


def test_initial_memory_from_local_updates():
    algorithm = fn.fed_normec(LOCAL, initial_memory="local_updates", beta=1e-12, server_step=1e-12)
    last = finish(QUADRATIC, algorithm, rounds=1)
    x0 = QUADRATIC.init(generator(1, "init"))
    updates = LOCAL.run(QUADRATIC, x0, np.arange(11), Moment(1, 0), None)
    assert torch.allclose(last.memory, updates, rtol=0, atol=1e-10)
    assert torch.allclose(last.server.memory, updates.mean(0), rtol=0, atol=1e-10)


def test_warm_up_keeps_the_model_and_moves_the_memories():
    rounds = list(fn.simulate(QUADRATIC, fn.fed_normec(LOCAL, warmup_rounds=3), rounds=5, seed=1))
    x0 = QUADRATIC.init(generator(1, "init"))
    assert [torch.equal(r.x, x0) for r in rounds] == [True, True, True, False, False]
    assert all(r.server.memory.norm() > 0 for r in rounds)


def test_idle_clients_advance_or_sleep():
    counts = {}
    for idle in ("advance", "sleep"):
        rounds = list(fn.simulate(QUADRATIC, build("fed_normec"), fn.poisson(0.3, idle), rounds=30, seed=4))
        counts[idle] = [(r.computed, r.sent) for r in rounds]
    assert all(computed == 11 for computed, _ in counts["advance"])
    assert all(computed == sent for computed, sent in counts["sleep"])
    assert [s for _, s in counts["advance"]] == [s for _, s in counts["sleep"]]  # the same cohorts


@pytest.mark.parametrize(
    "name", ["fed_avg", "dp_fed_avg_clip", "dp_fed_avg_adaptive", "scaffold", "ef21_pp", "ef14", "centred"]
)
def test_methods_whose_idle_clients_have_nothing_to_advance_let_them_sleep(name):
    for r in fn.simulate(QUADRATIC, build(name), fn.poisson(0.3, "advance"), rounds=10):
        assert r.computed == r.sent


# the same bits


@pytest.mark.long
@pytest.mark.parametrize("participation", [fn.full(), fn.poisson(0.5), fn.poisson(0.5, "sleep")], ids=lambda p: p.name)
@pytest.mark.parametrize(
    "name",
    [
        "fed_normec",
        "clip21_sgd2m",
        "dp_fed_avg_clip",
        "dp_scaffold",
        "ef14",
        "econtrol",
        "centred",
        "fed_normec_adaptive",
        "dp_fed_avg_adaptive",
    ],
)
def test_same_seed_same_bits_whatever_the_chunks_and_workers(name, participation):
    problem = mlp_problem(clients=23, tile=4)
    noise = fn.Privacy(noise_std=0.1)
    ends = [
        finish(problem, build(name), participation, noise, on=fn.Threads(workers, chunk))
        for workers, chunk in [(1, None), (2, None), (3, 1), (1, 23), (2, 9), (4, 1000)]
    ]
    for end in ends[1:]:
        assert torch.equal(end.x, ends[0].x)
        assert torch.equal(end.memory, ends[0].memory)
        assert torch.equal(end.server.memory, ends[0].server.memory)


@pytest.mark.long
def test_same_bits_for_mini_batches_and_looped_gradients():
    for settings in ({"vectorize": "loop"}, {"vectorize": "vmap", "tile": 3}):
        problem = mlp_problem(sizes=[5, 8, 3, 9, 8, 8, 2], **settings)
        algorithm = fn.fed_normec(fn.sgd(0.3, steps=3, batch_size=4))
        ends = [finish(problem, algorithm, fn.poisson(0.6), on=fn.Threads(w)) for w in (1, 3)]
        assert torch.equal(ends[0].x, ends[1].x)


def test_another_seed_gives_other_bits():
    algorithm, problem = build("fed_normec"), mlp_problem()
    a, b = (finish(problem, algorithm, fn.poisson(0.5), fn.Privacy(noise_std=1.0), seed=s) for s in (1, 2))
    assert not torch.equal(a.x, b.x)


def test_no_global_generator_is_touched():
    problem = mlp_problem()  # building a module draws from torch's generator, running it does not
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    finish(problem, fn.fed_normec(fn.sgd(0.1, 2, 4)), fn.poisson(0.5), fn.Privacy(noise_std=1.0))
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == numpy_state).all()


def test_torchs_thread_setting_is_left_as_it_was():
    torch.set_num_threads(2)
    try:
        rounds = fn.simulate(mlp_problem(), build("fed_normec"), rounds=3, on=fn.Threads(3))
        next(rounds)
        assert torch.get_num_threads() == 2
        rounds.close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


# empty cohorts


@pytest.mark.parametrize("name", ["fed_normec", "clip21", "fed_avg", "scaffold"])
def test_an_empty_cohort_leaves_the_servers_memory_alone(name):
    """Everybody in two rounds, nobody in the third: v stays, and a method with memory still steps along it."""
    turns = iter([True, True, False])
    rule = Participation("two of three", lambda m: 1.0, lambda m, rng: np.full(m, next(turns)), "advance")
    _, second, third = fn.simulate(QUADRATIC, build(name), rule, rounds=3, seed=1)
    assert third.sent == 0
    assert torch.equal(second.server.memory, third.server.memory)
    v = second.server.memory
    step = {"fed_normec": lambda: 0.1 * v / v.norm(), "clip21": lambda: 0.1 * v}.get(name, lambda: 0 * second.x)()
    assert torch.allclose(third.x, second.x - step, rtol=0, atol=1e-14)


def test_an_empty_cohort_still_gets_central_noise():
    algorithm = fn.fed_normec(LOCAL, beta=0.5)
    last = finish(QUADRATIC, algorithm, NOBODY, fn.Privacy(noise_std=2.0), rounds=1, seed=1)
    draw = 2.0 * generator(1, "noise", 1).standard_normal(5)
    assert np.allclose(last.server.memory.numpy(), 0.5 * 2 / 11 * draw, rtol=1e-12)
    per_client = finish(QUADRATIC, algorithm, NOBODY, fn.Privacy(noise_std=2.0, trust="secagg"), rounds=1, seed=1)
    assert not per_client.server.memory.any()


# what is refused


def test_noise_without_a_bound_is_refused():
    for name in ("ef21", "fed_avg", "scaffold"):
        with pytest.raises(fn.UserError, match="does not bound"):
            fn.simulate(QUADRATIC, build(name), privacy=fn.Privacy(noise_std=1.0), rounds=1)


def test_exact_initial_memories_with_noise_are_refused():
    with pytest.raises(fn.UserError, match="exact updates"):
        fn.simulate(QUADRATIC, fn.clip21(initial_memory="local_updates"), privacy=fn.Privacy(noise_std=1.0), rounds=1)


@pytest.mark.parametrize(
    "bad",
    [
        {"rounds": 0},
        {"on": fn.Threads(workers=0)},
        {"on": fn.Threads(chunk_size=0)},
        {"evaluate_every": 0},
        {"x0": torch.zeros(3, dtype=torch.float64)},
        {"x0": torch.zeros(5, dtype=torch.float32)},
    ],
)
def test_bad_arguments_are_refused_before_the_first_round(bad):
    with pytest.raises(fn.UserError):
        fn.simulate(QUADRATIC, build("fed_normec"), **{"rounds": 2, **bad})


def test_a_start_with_a_history_of_gradients_is_taken_as_numbers():
    module = torch.nn.Linear(6, 3)
    problem = fn.NeuralProblem(module, [(torch.randn(4, 6), torch.randint(0, 3, (4,)))])
    x0 = torch.nn.utils.parameters_to_vector(module.parameters())
    assert finish(problem, build("fed_normec"), x0=x0).x.isfinite().all()


def test_a_normalised_step_has_its_length_however_short_the_memory_is():
    algorithm = fn.fed_normec(fn.gd(0.1), alpha=1e36, beta=1e-6, server_step=0.1)
    problem = mlp_problem()
    x0 = problem.init(np.random.default_rng(0))
    assert (finish(problem, algorithm, rounds=1).x - x0).norm() == pytest.approx(0.1, rel=1e-3)


# broken clients


class Broken:
    """A quadratic problem in which some clients answer with something that is not finite."""

    def __init__(self, broken: dict[int, float]) -> None:
        self.broken = broken

    def __getattr__(self, name):
        return getattr(QUADRATIC, name)

    def grad(self, x, ids, examples=None):
        rows = QUADRATIC.grad(x, ids, examples)
        for place, i in enumerate(ids):
            if int(i) in self.broken:
                rows[place, 2] = self.broken[int(i)]
        return rows


@pytest.mark.parametrize("idle", ["advance", "sleep"])
@pytest.mark.parametrize("name", CONTRACTS)
def test_clients_with_updates_that_are_not_finite_are_left_out_and_counted(name, idle):
    """They break after two good rounds; from then on their memories stay as they were, everything stays finite."""
    problem, bad = Broken({}), [1, 4, 10]
    for r in fn.simulate(problem, build(name), fn.poisson(0.7, idle), rounds=8, seed=1):
        assert r.x.isfinite().all()
        assert r.memory.isfinite().all()
        assert r.server.memory.isfinite().all()
        if r.number == 2:
            before = r.memory[bad].clone()
            problem.broken |= {1: math.nan, 4: math.inf, 10: -math.inf}
        if r.number > 2:
            everyone = r.computed == QUADRATIC.num_clients
            assert r.left_out == 3 if everyone else r.left_out <= 3
            assert torch.equal(r.memory[bad], before)
    assert before.any() or not build(name).memory_slots


@pytest.mark.parametrize(
    "name", ["ef21", "clip21_sgd2m", "fed_normec", "fed_normec_adaptive", "scaffold", "ef14", "econtrol", "centred"]
)
def test_updates_too_large_to_subtract_or_add_are_left_out(name):
    problem = Broken({3: 1.7e308, 5: -1.7e308})
    for r in fn.simulate(problem, build(name), rounds=4, seed=1):
        assert r.left_out == 2
        assert r.memory.isfinite().all()


@pytest.mark.parametrize("name", ["ef21", "clip21_sgd2m", "fed_normec", "fed_normec_adaptive", "ef14", "econtrol"])
def test_huge_entries_that_cancel_cannot_overflow_a_memory(name):
    d, algorithm = 6, build(name)
    server, rows = algorithm.init(torch.zeros(d)), torch.zeros(1, algorithm.memory_slots * d)
    for sign in (1, -1, 1, -1):
        updates = sign * torch.tensor([[3e38, -3e38, 3e38, -3e38, 1.0, 0.0]])
        messages, rows = algorithm.client(server, rows, updates)
        assert messages.isfinite().all()
        assert rows.isfinite().all()


def test_the_others_do_not_notice():
    """Leaving a client out is sending zero: the sum is that of the finite clients, over the same M."""
    broken = finish(Broken({0: math.nan}), fn.fed_avg(fn.gd(0.3)), rounds=1)
    x0 = QUADRATIC.init(generator(1, "init"))
    updates = QUADRATIC.grad(x0, np.arange(11))[1:].sum(0)
    assert torch.allclose(broken.x, x0 - 0.3 * updates / 11, rtol=1e-13)


def test_huge_but_finite_updates_are_no_fault_for_a_bounded_method():
    last = finish(Broken({3: 1e300}), build("fed_normec"), rounds=8)
    assert last.left_out == 0
    assert last.memory.isfinite().all()


def test_a_diverging_model_is_told_with_its_round():
    rounds = []
    with pytest.raises(fn.Diverged, match="round") as caught:
        for r in fn.simulate(QUADRATIC, fn.fed_avg(fn.gd(1e30)), rounds=50):
            rounds.append(r)
    assert caught.value.round == len(rounds) + 1
    assert all(r.x.isfinite().all() for r in rounds)


@pytest.mark.parametrize(
    "algorithm",
    [
        fn.fed_normec(fn.gd(0.1), server_step=1e300),
        fn.fed_normec(fn.gd(0.1), server_step=1e39, server_normalization=False),
        fn.fed_normec(fn.gd(0.1), beta=1e300),
        fn.fed_normec(fn.gd(1e300, steps=2)),
        fn.fed_normec(fn.ig(1e300, batch_size=4)),
        fn.fed_avg(fn.gd(1e300)),
        fn.scaffold(fn.gd(1e300)),
        fn.fed_normec(fn.gd(0.1), alpha=1e36, beta=1e-6),  # a tiny v, so that eta / ||v|| leaves float32
    ],
)
def test_steps_beyond_the_number_range_diverge_or_not_but_never_crash(algorithm):
    result = fn.train(
        mlp_problem(),
        algorithm,
        fn.poisson(0.5),
        fn.Privacy(noise_std=1.0) if algorithm.bound.radius < 9 else None,
        rounds=3,
    )
    assert result.x.isfinite().all()


def test_train_keeps_the_last_finite_model_of_a_divergence():
    result = fn.train(QUADRATIC, fn.fed_avg(fn.gd(1e30)), rounds=50)
    assert result.diverged is not None
    assert result.diverged.round == len(result.history) + 1
    assert result.x.isfinite().all()


def test_train_returns_history_and_model():
    problem = mlp_problem()
    seen = []
    result = fn.train(
        problem,
        build("fed_normec"),
        rounds=40,
        seed=1,
        observers=[fn.Observer(lambda r, record: seen.append(r.number))],
    )
    assert seen == list(range(1, 41))
    assert [h["round"] for h in result.history] == seen
    assert sum("train_loss" in h["not_private"] for h in result.history) == 6  # two local steps: every seventh round
    assert isinstance(result.model, torch.nn.Module)
    assert torch.equal(torch.cat([p.flatten() for p in result.model.parameters()]), result.x)
    assert torch.equal(result.x, finish(problem, build("fed_normec"), rounds=40).x)


@pytest.mark.parametrize(
    ("local", "participation", "rounds", "every"),
    [
        (fn.gd(0.1), fn.full(), 1000, 50),  # 20 points
        (fn.gd(0.1), fn.full(), 100, 14),  # 0.7 of a round's work each: 5 %
        (fn.gd(0.1, 5), fn.full(), 100, 5),
        (fn.sgd(0.1, steps=4, batch_size=2), fn.full(), 100, 14),  # eight examples, as many as there are
        (fn.gd(0.1), fn.poisson(0.5, "advance"), 100, 14),  # all compute
        (fn.gd(0.1), fn.poisson(0.5, "sleep"), 100, 20),
        (fn.gd(0.1), fn.poisson(0.01, "sleep"), 100, 20),  # five points, whatever they take
        (fn.gd(0.1), fn.full(), 3, 1),
    ],
)
def test_evaluations_are_as_frequent_as_five_per_cent_of_the_work_allows(local, participation, rounds, every):
    found = evaluation_interval(mlp_problem(), fn.fed_normec(local), participation, rounds)
    assert found == every


@pytest.mark.parametrize(("participation", "largest"), [(fn.full(), 1e-3), (fn.poisson(0.3, "sleep"), 1e-5)])
def test_the_error_of_a_sum_that_is_accounted_covers_the_error_it_has(participation, largest):
    """Messages of one length and direction, so that all rounding goes the same way at worst."""
    rng = np.random.default_rng(0)
    problem = mlp_problem(clients=300)
    plan = planning.planned(problem, fn.dp_fed_avg_clip(fn.gd(0.1)), participation, fn.Privacy(noise_std=1.0), 5)
    rows = torch.from_numpy(rng.uniform(0.9, 1.1, (300, 40)).astype(np.float32))
    exact = rows.double().sum(0)
    for sleeps in (False, True):
        total = torch.zeros(40, dtype=torch.float64)
        for start in range(0, 300, problem.tile):
            tile = Messages(rows[start : start + problem.tile])
            total += tile.sum(torch.ones(len(tile.rows)), Adding(exactly=sleeps))
        error = float(torch.linalg.vector_norm(total - exact) / torch.linalg.vector_norm(rows[0].double()))
        assert error <= planning.summing_error(300, torch.float32, sleeps)
    assert 0 < plan.mechanism.rounding <= largest


@pytest.mark.long
@pytest.mark.parametrize("name", ["fed_normec", "dp_fed_avg_clip", "clip21_sgd2m", "scaffold"])
def test_what_is_chosen_automatically_changes_no_more_than_rounding(name):
    ends = {}
    for vectorize in ("layers", "vmap", "loop"):
        for tile in (1, 4, 9):
            problem = mlp_problem(vectorize=vectorize, tile=tile)
            ends[vectorize, tile] = finish(problem, build(name), fn.poisson(0.7), rounds=5).x
            again = mlp_problem(vectorize=vectorize, tile=tile)
            other = finish(again, build(name), fn.poisson(0.7), rounds=5, on=fn.Threads(3, 2 * tile))
            assert torch.equal(ends[vectorize, tile], other.x)
    for x in ends.values():
        assert torch.linalg.vector_norm(x - ends["loop", 1]) <= 1e-5 * torch.linalg.vector_norm(x)


def test_a_client_that_is_hardly_ever_drawn_has_a_stretch_too():
    """1/p may be beyond all numbers."""
    for p in (1e-12, 2.2e-313):
        r = finish(mlp_problem(), build("fed_normec"), fn.poisson(p, "sleep"), rounds=2)
        job = fn.Job(mlp_problem(), build("fed_normec"), fn.poisson(p, "sleep"), None, 0, r.x)
        assert r.computed == 0 and job.stretch == 9


def test_breaking_off_an_iteration_ends_its_threads():
    before = threading.active_count()
    for r in fn.simulate(mlp_problem(), build("fed_normec"), rounds=100, on=fn.Threads(4)):
        if r.number == 2:
            break
    gc.collect()
    assert threading.active_count() == before
