"""Methods on local steps that are private for records: literal loops with the plan's own batches and noise, and what is
there for such steps: personal models, and random coordinates of an update."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from example_runs import whole
from literal import norm_alpha
from simulations import finish, mlp_problem
from torch import nn

import fednormec as fn
from fednormec.algorithms.compressed import random_masks, usual_shift_step
from fednormec.core.bounds import clip
from fednormec.core.local import Moment
from fednormec.core.personal import Personal, Pulled
from fednormec.core.randomness import generator
from fednormec.core.records import examples_of, record_sizes
from fednormec.engine.clients import computed
from fednormec.engine.planning import planned, with_record_noise
from fednormec.engine.ray_cluster import _Part
from fednormec.engine.round import Resumed, Round
from fednormec.errors import UserError
from fednormec.results.reading import read_run
from fednormec.runs import checkpoint as checkpoints
from fednormec.runs.summary import describe

ROUNDS, SEED, K, GAMMA = 6, 5, 4, 0.3
PRIVATE = fn.Privacy(unit="record", noise_std=0.7)
FEATURES = [np.random.default_rng(i).standard_normal((3 + i, 4)) for i in range(6)]
LABELS = [np.random.default_rng(i).choice([-1.0, 1.0], 3 + i) for i in range(6)]
QUADRATIC = fn.random_quadratic(7, 6, parts=5, heterogeneity=1.0, seed=2)
LOGISTIC = fn.Logistic([*map(torch.from_numpy, FEATURES)], [*map(torch.from_numpy, LABELS)], regularizer=0.1)
PROBLEMS = {
    "quadratic": (QUADRATIC, oracles.quadratic_gradient(QUADRATIC.curvatures.numpy(), QUADRATIC.minimisers.numpy())),
    "logistic": (LOGISTIC, oracles.logistic_gradient(FEATURES, LABELS, 0.0)),  # the regulariser is apart
}
APART = {"quadratic": lambda y: 0, "logistic": lambda y: 0.1 * 2 * y / (1 + y * y) ** 2}
BOUNDS = {
    "clip": ({"bound": "clip", "tau": 0.5}, lambda v: oracles.clip(v, 0.5)),
    "normalize": ({"bound": "normalize", "tau": 0.5, "alpha": 0.2}, lambda v: 0.5 * norm_alpha(v, 0.2)),
}
PARTICIPATIONS = {"full": fn.full(), "poisson": fn.poisson(0.5), "sleep": fn.poisson(0.5, "sleep")}


def dp_scaffold_as_printed(world: oracles.World, local: oracles.Local, *, eta_l: float, eta_g: float) -> oracles.End:
    """DP-SCAFFOLD line by line; `local` with one step of eta_l is y - eta_l (noisy gradient - c_i + c)."""
    x, c, c_i = world.x0, np.zeros(world.d), np.zeros((world.M, world.d))
    for k, S in enumerate(world.cohorts, start=1):
        moved, changed = np.zeros(world.d), np.zeros(world.d)
        for i in sorted(S):
            y = local(world, i, x, k, c - c_i[i])
            new = c_i[i] - c + (x - y) / (K * eta_l)
            moved, changed = moved + y - x, changed + new - c_i[i]
            c_i[i] = new
        x = x + eta_g * moved / (world.p * world.M)
        c = c + changed / world.M
    return oracles.End(x, c, c_i)


CASES = {
    "fed_avg": (partial(fn.fed_avg, server_step=0.9), partial(oracles.fed_avg, eta=0.9)),
    "fed_normec": (
        partial(fn.fed_normec, alpha=0.05, beta=0.2, server_step=0.1),
        partial(oracles.fed_normec, gamma=GAMMA, alpha=0.05, beta=0.2, eta=0.1),
    ),
    "centred": (
        partial(fn.centred, alpha=0.2, beta=0.6, server_step=0.2),
        partial(oracles.centred, gamma=GAMMA, C=lambda v: norm_alpha(v, 0.2), beta=0.6, eta=0.2),
    ),
    "centred, leaky": (
        partial(fn.centred, alpha=0.2, beta=0.6, server_step=0.2, leak=0.2, deviation_step=0.5),
        partial(oracles.centred, gamma=GAMMA, C=lambda v: norm_alpha(v, 0.2), beta=0.6, eta=0.2, leak=0.2, a=0.5),
    ),
    "scaffold": (
        partial(fn.scaffold, server_step=0.9),
        partial(dp_scaffold_as_printed, eta_l=GAMMA / K, eta_g=0.9),
    ),
    "soteria": (
        partial(fn.soteria, k=2, server_step=0.2),
        lambda world, local: oracles.soteria(
            world, local, gamma=GAMMA, k=2, a=np.sqrt((world.d - 1) / (world.d / 2) ** 3 / 2), eta=0.2
        ),
    ),
    "mr_mtl": (partial(fn.mr_mtl, pull=0.7), partial(oracles.personal, pull=0.7)),
    "local_training": (fn.local_training, partial(oracles.personal, pull=0.0)),
}


def private_steps(bound: str, **settings: Any) -> fn.LocalUpdate:
    return fn.dp_sgd(GAMMA, K, **{"rate": 0.6, **BOUNDS[bound][0], **settings})


def agree(case: str, problem_name: str, bound: str, participation_name: str, privacy: fn.Privacy | None) -> None:
    (problem, gradient), participation = PROBLEMS[problem_name], PARTICIPATIONS[participation_name]
    build, oracle = CASES[case]
    algorithm, m = build(private_steps(bound)), problem.num_clients
    plan = planned(problem, algorithm, participation, PRIVATE if privacy is None else privacy, ROUNDS)
    draws = [participation.draw(m, generator(SEED, "cohort", k)) for k in range(1, ROUNDS + 1)]
    cohorts = [set(d.computing[d.sending].tolist()) for d in draws]
    x0 = np.linspace(-1, 1, problem.dim)
    world = oracles.World(
        gradient, problem.client_sizes.tolist(), x0, cohorts, [np.zeros(problem.dim)] * ROUNDS, participation.rate(m),
        participation.idle == "sleep", SEED,
    )  # fmt: skip
    last = finish(problem, algorithm, participation, privacy, rounds=ROUNDS, seed=SEED, x0=torch.from_numpy(x0))
    end = oracle(world, oracles.dp_sgd(plan, GAMMA, K, BOUNDS[bound][1], APART[problem_name]))
    for ours, theirs in [(last.x, end.x), (last.server.memory, end.server_memory), (last.memory, end.memories)]:
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-10, atol=1e-10 * np.abs(theirs).max(initial=0))


@pytest.mark.long
@pytest.mark.parametrize("participation", PARTICIPATIONS)
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("case", CASES)
def test_every_method_with_private_steps_is_its_literal_loop(
    case: str, problem: str, bound: str, participation: str
) -> None:
    agree(case, problem, bound, participation, PRIVATE)


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_the_oracle_notices_another_noise_and_another_batch(monkeypatch: pytest.MonkeyPatch, adjacency: str) -> None:
    """The comparison can fail: noise that is a billionth larger, and a record more, are told apart."""
    privacy = fn.Privacy(unit="record", noise_std=0.7, adjacency=adjacency)
    agree("scaffold", "quadratic", "clip", "full", privacy)
    literal = oracles.dp_sgd
    for change in ({"noise_std": 0.7 * (1 + 1e-9)}, {"noise_std": 0.7, "stream": 1}):
        other = planned(QUADRATIC, fn.fed_avg(private_steps("clip")), fn.full(),
                        fn.Privacy(unit="record", adjacency=adjacency, **change), ROUNDS)  # fmt: skip
        with monkeypatch.context() as patch, pytest.raises(AssertionError):
            patch.setattr(oracles, "dp_sgd", lambda plan, *rest, other=other: literal(other, *rest))
            agree("scaffold", "quadratic", "clip", "full", privacy)


def test_records_are_clipped_and_the_pull_is_not() -> None:
    """With a bound far below every gradient, a client without noise still comes to the mean of all models."""
    free = fn.mr_mtl(fn.dp_sgd(0.2, 2, rate=1.0, tau=1e-9), pull=1.0)
    x0 = torch.ones(QUADRATIC.dim, dtype=torch.float64)
    rows = torch.randn(7, QUADRATIC.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    server = free.start(x0)
    _, still = computed(QUADRATIC, free, server, moved := rows.clone(), np.arange(7), Moment(0, 1))
    assert not still
    torch.testing.assert_close(moved, rows * 0.9**2, rtol=0, atol=1e-8)  # x stays 1: y - 1 shrinks by 0.2/2 each step


# a problem with a pull


def test_a_pulled_problem_has_the_gradients_and_the_records_of_its_own() -> None:
    centre, y = torch.linspace(-1, 2, LOGISTIC.dim, dtype=torch.float64), torch.ones(LOGISTIC.dim, dtype=torch.float64)
    pulled, ids = Pulled(LOGISTIC, centre, 3.0), np.array([4, 1])
    for x in (y, torch.stack([y, 2 * y])):
        torch.testing.assert_close(pulled.grad(x, ids), LOGISTIC.grad(x, ids) + 3.0 * (x - centre), rtol=0, atol=0)
    some = np.array([0, 2, 3])
    assert torch.equal(pulled.record_sum(y, 4, some, clip(0.5)), LOGISTIC.record_sum(y, 4, some, clip(0.5)))
    torch.testing.assert_close(pulled.apart_from_data(y), LOGISTIC.apart_from_data(y) + 3.0 * (y - centre))
    assert torch.equal(Pulled(QUADRATIC, torch.zeros(6), 2.0).apart_from_data(torch.ones(6)), torch.full((6,), 2.0))


def test_a_pulled_problem_keeps_who_is_a_record() -> None:
    persons = [np.array([7, 7, 1]), np.array(["a", "b", "a"])]
    problem = mlp_problem(sizes=[3, 3], persons=persons)
    pulled = Pulled(problem, problem.init(np.random.default_rng(0)), 1.0)
    assert pulled.grouped and record_sizes(pulled).tolist() == [2, 2]
    assert np.array_equal(examples_of(pulled, 1, np.array([0])), problem.examples_of(1, np.array([0])))
    plain = Pulled(QUADRATIC, torch.zeros(6), 1.0)
    assert not plain.grouped and record_sizes(plain).tolist() == [5] * 7


@pytest.mark.parametrize("build", [partial(fn.mr_mtl, pull=0.7), partial(fn.soteria, k=9)])
def test_a_part_on_another_machine_computes_the_same_bits(build: Any) -> None:
    problem = mlp_problem(sizes=[4, 6, 5, 8, 7])
    algorithm = build(fn.dp_sgd(0.3, 2, batch_size=3))
    algorithm = with_record_noise(algorithm, planned(problem, algorithm, fn.full(), PRIVATE, 3))
    server = algorithm.start(problem.init(generator(0, "init")))
    part, ids, found = _Part(problem.part(2, 4), 2, problem.client_sizes), np.array([2, 3]), []
    for where in (problem, part):
        rows = torch.full((2, problem.dim), 0.01)
        messages, left_out = computed(where, algorithm, server, rows, ids, Moment(3, 2))
        found.append((messages.whole().clone(), rows))
        assert not left_out
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# personal models


def test_without_a_pull_it_is_local_training() -> None:
    ends = [
        finish(QUADRATIC, method, fn.poisson(0.5), rounds=9)
        for method in (fn.mr_mtl(fn.gd(0.3, 3), pull=0.0), fn.local_training(fn.gd(0.3, 3)))
    ]
    close = finish(QUADRATIC, fn.mr_mtl(fn.gd(0.3, 3), pull=1e-9), fn.poisson(0.5), rounds=9)
    assert torch.equal(ends[0].x, ends[1].x) and torch.equal(ends[0].memory, ends[1].memory)
    assert not torch.equal(close.memory, ends[0].memory)
    torch.testing.assert_close(close.memory, ends[0].memory, rtol=0, atol=1e-7)


def test_local_training_is_a_training_of_each_client_alone() -> None:
    method, x0 = fn.local_training(fn.gd(0.3, 3)), torch.linspace(-1, 1, 6, dtype=torch.float64)
    last = finish(QUADRATIC, method, rounds=8, x0=x0)
    models = method.own(last.server, last.memory)
    for i in range(7):
        alone = finish(QUADRATIC.part(i, i + 1), fn.fed_avg(fn.gd(0.3, 3)), rounds=8, x0=x0)
        torch.testing.assert_close(models[i], alone.x, rtol=0, atol=1e-13)
    torch.testing.assert_close(last.x, models.mean(0), rtol=0, atol=1e-13)


def test_one_client_feels_no_pull_in_its_first_step() -> None:
    one = fn.random_quadratic(1, 4, seed=1)
    ends = [finish(one, method, rounds=9) for method in (fn.mr_mtl(fn.gd(0.3), pull=2.0), fn.fed_avg(fn.gd(0.3)))]
    torch.testing.assert_close(ends[0].x, ends[1].x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("idle", ["advance", "sleep"])
def test_the_servers_model_is_the_mean_and_who_is_not_drawn_keeps_its_own(idle: str) -> None:
    method, before = fn.mr_mtl(fn.gd(0.3, 3), pull=0.5), torch.zeros(7, 6, dtype=torch.float64)
    drawn = set[int]()
    for r in fn.simulate(QUADRATIC, method, fn.poisson(0.4, idle), rounds=12, seed=2):
        torch.testing.assert_close(r.x, method.own(r.server, r.memory).mean(0), rtol=0, atol=1e-13)
        moved = (r.memory != before).any(1).nonzero()[:, 0].tolist()
        assert moved == r.cohort.computing.tolist()
        drawn |= {len(moved)}
        before = r.memory.clone()
    assert len(drawn) > 2


def test_a_stronger_pull_brings_models_together() -> None:
    def spread(pull: float) -> float:
        return float(finish(QUADRATIC, fn.mr_mtl(fn.gd(0.1), pull=pull), rounds=200).memory.std(0).norm())

    apart = [spread(pull) for pull in (0.0, 0.1, 1.0, 8.0)]
    assert apart == sorted(apart, reverse=True) and apart[-1] < 0.5 * apart[0]


# figures of personal models


def net(outputs: int = 3, batch: bool = False) -> nn.Module:
    torch.manual_seed(1)
    middle = [nn.BatchNorm1d(5, track_running_stats=False)] if batch else []
    return nn.Sequential(nn.Linear(4, 5), *middle, nn.Tanh(), nn.Linear(5, outputs))


def pairs(*sizes: int, values: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    made = [torch.randn(n, 4) for n in sizes]
    return [(x, x[:, 0] if values else (x[:, 0] > 0).long() + (x[:, 1] > 1).long()) for x in made]


def own_models(problem: fn.NeuralProblem) -> torch.Tensor:
    start = problem.init(np.random.default_rng(0))
    return start + torch.randn(problem.num_clients, problem.dim, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", ["accuracy", "rmse", "auc", "loss", "batch", "few"])
def test_each_model_is_measured_on_its_clients_own_examples(kind: str) -> None:
    values, clients, looked_at = kind == "rmse", pairs(3, 8, 5, 9, values=kind == "rmse"), 4 if kind == "few" else None
    others: dict[str, Any] = {"rmse": {"loss": "mse"}, "auc": {"metrics": ["auc"]}, "loss": {"metrics": []}}
    settings = others.get(kind, {})
    problem = fn.NeuralProblem(net(1 if values else 3, kind == "batch"), clients, loss_examples=looked_at, **settings)
    models, expected = own_models(problem), []
    for (x, y), model in zip(clients, models, strict=True):
        x, y = x[:looked_at], y[:looked_at]
        alone = fn.NeuralProblem(net(1 if values else 3, kind == "batch"), [(x, y)], (x, y), **settings)
        expected.append(alone.evaluate(model).public[f"test_{'accuracy' if kind in ('batch', 'few') else kind}"])
    found = problem.evaluate_own(models)
    finite = [value for value in expected if np.isfinite(value)]
    assert found.values == pytest.approx(sorted(finite, reverse=kind in ("rmse", "loss")), rel=1e-6)
    assert not found.held_out and len(set(found.values)) > 1


def test_models_are_measured_on_held_out_examples_where_it_is_known_whose_they_are() -> None:
    clients, (x, y) = pairs(4, 4, 4), pairs(9)[0]
    owners = np.array([0, 2, 2, 0, 2, 2, 0, 2, 2])  # client 1 has none
    problem = fn.NeuralProblem(net(), clients, (x, y), held_out=True, owners=owners)
    models = own_models(problem)
    with torch.no_grad():
        right = [problem.model(models[i])(x[owners == i]).argmax(1) == y[owners == i] for i in (0, 2)]
    found = problem.evaluate_own(models)
    assert found.held_out and found.values == pytest.approx(sorted(float(r.double().mean()) for r in right))


def test_statistics_of_training_are_those_of_the_client() -> None:
    clients = pairs(6, 1, 9)  # one example has no variance: its client is left out
    problem = fn.NeuralProblem(net(batch=True), clients, statistics="training")
    models, expected = own_models(problem), []
    for i in (0, 2):
        alone = fn.NeuralProblem(net(batch=True), [clients[i]], clients[i], statistics="training")
        expected.append(alone.evaluate(models[i]).not_private["test_accuracy"])
    assert problem.evaluate_own(models).values == pytest.approx(sorted(expected))


@pytest.mark.parametrize("owners", [None, [0, 1, 1, 0, 5]])
def test_own_models_of_logistic_regression(owners: list[int] | None) -> None:
    rng = np.random.default_rng(3)
    test = torch.from_numpy(rng.standard_normal((5, 4))), torch.from_numpy(rng.choice([-1.0, 1.0], 5))
    features, labels = [*map(torch.from_numpy, FEATURES)], [*map(torch.from_numpy, LABELS)]
    problem = fn.Logistic(features, labels, test=test, owners=owners)
    models = torch.from_numpy(rng.standard_normal((6, 4)))
    models[1] = 0  # a score of 0 says +1
    own = list(zip(features, labels, strict=True))
    if owners is not None:
        own = [(test[0][np.array(owners) == i], test[1][np.array(owners) == i]) for i in range(6)]
    right = [((a @ w >= 0) == (y > 0)).double() for (a, y), w in zip(own, models, strict=True)]
    found = problem.evaluate_own(models)
    assert found.values == pytest.approx(sorted(float(r.mean()) for r in right if len(r)))
    assert found.held_out == bool(owners) and isinstance(problem, Personal)


def test_a_part_of_a_problem_has_its_own_clients_labels_alone() -> None:
    assert [len(y) for y in LOGISTIC.part(2, 4)._labels] == [5, 6]


def test_a_simulation_measures_the_models_that_clients_have_then() -> None:
    problem, method = mlp_problem(sizes=[5, 9, 4]), fn.mr_mtl(fn.sgd(2.0, 5, 3), pull=0.1)
    for r in fn.simulate(problem, method, fn.poisson(0.7), rounds=5, evaluate_every=2):
        if r.metrics is not None:
            models = method.own(r.server, r.memory)
            names = [("own_accuracy", "client_accuracy"), ("own_accuracy_worst", "client_accuracy_worst")]
            expected, servers = (problem.evaluate_own(m).figures for m in (models, r.x.expand(3, -1)))
            assert all(r.metrics.not_private[own] == expected[kin] for own, kin in names)
    assert expected != servers and not [name for name in r.metrics.public if name.startswith("own")]
    plain = finish(problem, fn.fed_avg(fn.gd(0.1)), rounds=1, evaluate_every=1)
    assert list(plain.metrics.not_private) == ["train_loss"]
    assert "own_loss" not in finish(QUADRATIC, fn.mr_mtl(fn.gd(0.1)), rounds=1, evaluate_every=1).metrics.not_private


@pytest.mark.long
def test_a_run_shows_own_models_and_marks_them(tmp_path: Path) -> None:
    asked = ("method.name=mr_mtl", "method.pull=0.5", "local.name=dp_sgd", "local.rate=0.2", "privacy.unit=record",
             "privacy.epsilon=4", "data.test_fraction=0.3", "run.rounds=4", "run.evaluate_every=2")  # fmt: skip
    summary = whole(tmp_path / "run", *asked)
    names = ["own_accuracy", "own_accuracy_worst", "own_accuracy_best"]
    run = read_run(tmp_path / "run")
    evaluated = [record for record in run.records if record.evaluated]
    assert len(evaluated) == 2 and all(set(names) <= set(record.apart) for record in evaluated)
    assert not any(set(names) & set(record.public_part) for record in run.records)
    assert set(names) <= set(summary["not_private"])
    (said,) = [line for line in describe(summary).splitlines() if line.startswith("own models")]
    assert said.startswith("own models     accuracy ") and said.endswith("(a look at the clients' data: not private)")
    assert not [name for name in whole(tmp_path / "plain", "run.rounds=2")["metrics"] if name.startswith("own_")]


# random coordinates


def test_what_is_kept_at_random_is_right_in_the_mean() -> None:
    """Each coordinate, and each pair, is kept as often as it should be; another factor or share is told apart."""
    d, k, n = 7, 3, 4000
    masks = torch.cat([random_masks(np.arange(4), Moment(1, number), k, d) for number in range(n // 4)]).numpy()
    assert set(np.unique(masks)) == {0.0, d / k} and ((masks > 0).sum(1) == k).all()
    v = np.linspace(-2, 3, d)

    def off(share: float) -> float:
        return float(np.abs((masks > 0).mean(0) - share).max() / np.sqrt(share * (1 - share) / n))

    assert off(k / d) < 4.5 < off((k - 0.25) / d)
    mean, std = (v * masks).mean(0), np.abs(v) * np.sqrt((d / k - 1) / n)
    assert (np.abs(mean - v) < 4.5 * std + 1e-12).all()
    assert (np.abs(mean - v * (1 + 1 / k)) > 4.5 * std)[np.abs(v) > 0.1].any()
    pairs, share = ((masks > 0).T.astype(float) @ (masks > 0))[np.triu_indices(d, 1)] / n, k * (k - 1) / (d * (d - 1))
    assert np.abs(pairs - share).max() < 4.5 * np.sqrt(share * (1 - share) / n)


def test_clients_and_rounds_draw_coordinates_of_their_own() -> None:
    d, k, n = 10, 4, 1500
    rounds = torch.stack([random_masks(np.array([3, 8]), Moment(2, number), k, d) for number in range(n)]).numpy() > 0
    common = [(rounds[:, 0] & rounds[:, 1]).sum(1), (rounds[:-1, 0] & rounds[1:, 0]).sum(1)]
    expected, std = k * k / d, np.sqrt(k * k / d * (1 - k / d) * (d - k) / (d - 1))  # hypergeometric
    assert all(abs(same.mean() - expected) < 4.5 * std / np.sqrt(len(same)) for same in common)
    alone = random_masks(np.array([8]), Moment(2, 0), k, d)[0].numpy() > 0
    assert np.array_equal(alone, rounds[0, 1])


def test_all_coordinates_leave_nothing_to_chance() -> None:
    """With k = d it is DIANA without compression: the direction is the mean update, whatever the shifts are."""
    local, x0 = fn.gd(0.3, 3), torch.linspace(-1, 1, 6, dtype=torch.float64)
    plain = finish(QUADRATIC, fn.fed_avg(local, server_step=0.2 / 0.3), rounds=9, x0=x0)
    for k, shift in ((6, None), (6, 0.9), (100, 0.01)):
        end = finish(QUADRATIC, fn.soteria(local, k=k, shift_step=shift, server_step=0.2), rounds=9, x0=x0)
        torch.testing.assert_close(end.x, plain.x, rtol=0, atol=1e-13)
    few = finish(QUADRATIC, fn.soteria(local, k=5, server_step=0.2), rounds=9, x0=x0)
    assert (few.x - plain.x).norm() > 1e-3


@pytest.mark.long
def test_shifts_take_the_noise_of_compression_away() -> None:
    """At the minimum of unlike clients the updates are not zero; the shifts come to them, and x comes to rest."""
    methods = [fn.soteria(fn.gd(0.3), k=2, shift_step=step, server_step=0.1) for step in (None, 1e-9)]
    shifted, none = (finish(QUADRATIC, method, rounds=600, evaluate_every=600) for method in methods)
    gradients = [end.metrics.not_private["gradient_norm"] for end in (shifted, none)]
    assert gradients[0] < 1e-6 < 1e-3 < gradients[1]
    torch.testing.assert_close(shifted.server.memory, shifted.memory.mean(0), rtol=0, atol=1e-12)


def test_the_usual_step_of_the_shifts() -> None:
    omega = 123 / 6 - 1
    assert usual_shift_step(6, 123) == pytest.approx(np.sqrt((1 + 2 * omega) / (2 * (1 + omega) ** 3)), rel=1e-14)
    ends = [
        finish(QUADRATIC, fn.soteria(fn.gd(0.3), k=2, shift_step=step), rounds=4)
        for step in (None, usual_shift_step(2, 6))
    ]
    assert torch.equal(ends[0].x, ends[1].x) and torch.equal(ends[0].memory, ends[1].memory)


# engines, checkpoints and refusals


METHODS = {
    "fed_avg": fn.fed_avg,
    "scaffold": fn.scaffold,
    "soteria": partial(fn.soteria, k=9),
    "mr_mtl": partial(fn.mr_mtl, pull=0.5),
}


def state(r: Round) -> list[torch.Tensor]:
    return [r.x.clone(), r.server.memory.clone(), r.memory.clone(), r.released.clone()]


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_the_bits_follow_neither_from_threads_nor_from_an_interruption(tmp_path: Path, name: str) -> None:
    problem = mlp_problem(sizes=[4, 9, 6, 8, 5, 7, 5], tile=2)
    method, asked = METHODS[name](fn.dp_sgd(0.3, 2, batch_size=3)), (fn.poisson(0.6), PRIVATE)
    expected = []
    for r in fn.simulate(problem, method, *asked, rounds=4, seed=3, evaluate_every=1, on=fn.Threads(1)):
        checkpoints.save(tmp_path / f"{r.number}", r)
        expected.append((state(r), r.metrics, r.epsilon))
    for settings in ({"on": fn.Threads(2)}, {"on": fn.Threads(2, 3)},
                     *({"resume": Resumed(checkpoints.load(tmp_path / f"{done}"))} for done in (1, 3))):  # fmt: skip
        numbers = []
        for r in fn.simulate(problem, method, *asked, rounds=4, seed=3, evaluate_every=1, **settings):
            bits, *facts = expected[r.number - 1]
            assert all(torch.equal(one, other) for one, other in zip(bits, state(r), strict=True))
            assert [r.metrics, r.epsilon] == facts
            numbers.append(r.number)
        assert numbers == [1, 2, 3, 4][-len(numbers) :]


@pytest.mark.parametrize("build", [fn.soteria, fn.mr_mtl, fn.local_training])
@pytest.mark.parametrize("unit", ["client", ["client", "record"]])
def test_clients_cannot_be_protected(build: Any, unit: Any) -> None:
    more = {} if unit == "client" else {"record_noise_std": 1.0}
    with pytest.raises(UserError, match="does not bound what a client sends"):
        finish(QUADRATIC, build(fn.dp_sgd(0.1, rate=0.5)), None, fn.Privacy(unit=unit, noise_std=1.0, **more))


def test_settings_that_make_no_sense_are_refused() -> None:
    for build, settings, said in (
        (fn.mr_mtl, {"pull": -0.1}, "pull must be zero or a positive number, not -0.1"),
        (fn.mr_mtl, {"pull": np.nan}, "pull must be zero or a positive number, not nan"),
        (fn.soteria, {"k": 0}, "k must be at least 1, not 0"),
        (fn.soteria, {"shift_step": 0.0}, "shift_step must be a positive number, not 0.0"),
        (fn.soteria, {"server_step": -1.0}, "server_step must be a positive number, not -1.0"),
    ):
        with pytest.raises(UserError, match=said):
            build(fn.gd(0.1), **settings)


def test_what_clients_draw_must_go_by_their_numbers() -> None:
    """Not by their place in a tile: a check finds it, and nothing else is wrong with it."""
    method, problem = fn.soteria(fn.gd(0.1), k=2), fn.random_quadratic(20, 5)
    placed = method._replace(draws=lambda ids, moment, dim: random_masks(np.arange(len(ids)), moment, 2, dim))
    wrong = [[f.tried for f in fn.check_method(m, problem).findings if f.wrong is not None] for m in (method, placed)]
    assert [one for one in wrong[1] if one not in wrong[0]] == ["the same message alone and in a tile"]
    for odd in (method, fn.fed_avg(fn.gd(0.1))._replace(draws=method.draws)):
        with pytest.raises(UserError, match="cannot be scaled"):
            fn.scaled(odd)
