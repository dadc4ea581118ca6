"""The audit of records accepts what is right and catches what is broken, one fault at a time."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from command import sets
from scipy import stats

import fednormec as fn
import fednormec.audit.record_training
import fednormec.audit.records
from fednormec.audit.evidence import LEVEL, two_gaussians
from fednormec.audit.measuring import expected_estimate, log_ratios
from fednormec.audit.playing import ROOM, SOME_TRIALS
from fednormec.audit.record_playing import SEEN, WORK, attack, for_batches, rows_for, silence
from fednormec.audit.record_training import audit_record_training, expected_of_sums, ratios_of_sum
from fednormec.audit.records import adds_bounded, audit_records
from fednormec.audit.steps import Scene, perform
from fednormec.core import records
from fednormec.core.local import Moment
from fednormec.core.randomness import generator
from fednormec.engine.planning import planned_for_records
from fednormec.errors import BoundBroken
from fednormec.privacy.mechanism import Mechanism
from fednormec.privacy.records import RecordPlan, Silo

pytestmark = pytest.mark.long

DELTA = 1e-5
PROBLEM = fn.random_logistic(3, 64, examples=40, seed=0, dtype=torch.float64)
RECORD = fn.Privacy(epsilon=8.0, unit="record")
NOISED, BATCH, SUM = Silo.noised, Silo.batch, records.sum_of_rows


def local(steps=5, rate=0.25, **more):
    return fn.dp_sgd(0.1, steps=steps, rate=rate, **more)


def audit(steps=5, rounds=8, privacy=RECORD, problem=PROBLEM, **more):
    small = {"trials": 100, "side_steps": 100, "seed": 1} | more
    return audit_records(problem, fn.fed_avg(local(steps)), privacy, rounds=rounds, **small)


def failed(found):
    return {name for name, p in found.checks.items() if p < LEVEL}


def planned(method, privacy=RECORD, rounds=8, problem=PROBLEM):
    return planned_for_records(problem, method, privacy, rounds)


# What is right


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("bound", ["clip", "normalize"])
@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize("randomness", ["seeded", "secure"])
def test_right_steps_pass(steps, bound, adjacency, randomness):
    privacy = replace(RECORD, adjacency=adjacency, randomness=randomness)
    method = fn.scaffold(local(steps, bound=bound, tau=0.3))
    found = audit_records(PROBLEM, method, privacy, rounds=8, trials=100, side_steps=100, seed=4)
    assert found.verdict == "consistent", found.text()
    assert min(found.checks.values()) > 1e-5
    assert (found.trials, found.rounds) == (100, 8)
    assert found.lower_bound <= found.claimed <= 8
    assert found.checks.keys() >= {"the length of what a record adds", "noise of any two steps", "any two batches"}
    assert ("the same seed again" in found.checks) == (randomness == "seeded")


@pytest.mark.parametrize("privacy", [
    fn.Privacy(noise_std=1.0, noise="discrete", unit="record"),
    fn.Privacy(silo_epsilons=(1.0, 8.0, 3.0), unit="record", stream=2),
    fn.Privacy(epsilon=2.0, record_epsilon=4.0, unit=("client", "record")),
])  # fmt: skip
def test_other_ways_to_ask_pass(privacy):
    problem = fn.random_logistic(3, 64, examples=40, seed=0, dtype=torch.float32)
    found = audit_records(
        problem, fn.fed_normec(local(3).scheduled(fn.schedule("cosine", 8))), privacy, rounds=8, trials=100,
        side_steps=100, seed=2,
    )  # fmt: skip
    assert found.verdict == "consistent", found.text()
    if privacy.silo_epsilons:
        assert "of client 1 " in found.of and 7.9 < found.claimed <= 8


def test_a_batch_of_a_given_size_is_played_with_its_rate():
    method = fn.fed_avg(fn.dp_sgd(0.1, 2, batch_size=10))
    found = audit_records(PROBLEM, method, RECORD, rounds=8, trials=100, side_steps=100)
    assert found.verdict == "consistent" and "rate 0.25)" in found.of, found.text()


@pytest.mark.parametrize("rate", [1.0, 0.003])
def test_rates_at_the_ends_pass(rate):
    problem = fn.random_logistic(2, 64, examples=400, seed=0, dtype=torch.float32)
    found = audit_records(problem, fn.fed_avg(local(2, rate)), RECORD, rounds=8, trials=100, side_steps=100)
    assert found.verdict == "consistent", found.text()
    assert ("rate of records" in found.checks) == (rate < 1)


def test_numbers_that_rounding_makes_the_same_are_no_repetition():
    problem = fn.random_logistic(1, 300, examples=20, seed=0, dtype=torch.float32)
    found = audit(1, problem=problem, trials=40, side_steps=500)
    assert found.checks["noise drawn once"] > 1e-4


def test_a_step_in_many_passes_and_is_seen():
    found = audit(steps=70, rounds=2)
    assert found.verdict == "consistent", found.text()
    assert "2 rounds of 70 steps" in found.played


def test_the_estimate_is_near_a_tight_claim():
    found = audit(steps=5, rounds=60, trials=1000)
    assert found.claimed == pytest.approx(8, abs=0.02)
    assert found.expected == pytest.approx(7.63, abs=0.02)
    assert found.estimate == pytest.approx(found.expected, abs=1.2)
    assert found.estimate_low > 5.5
    assert found.lower_bound > 0.7


def test_progress_is_told_step_by_step():
    for steps, randomness in ((1, "seeded"), (3, "secure")):
        told = []
        audit(steps, 2, replace(RECORD, randomness=randomness), trials=40, side_steps=10,
              on_progress=lambda *at, told=told: told.append(at))  # fmt: skip
        assert told == [(k, len(told)) for k in range(1, len(told) + 1)] and len(told) > 80


# What is broken


def scale_noise(monkeypatch, factor):
    monkeypatch.setattr(
        Silo, "noised", lambda self, total, *at: total + factor * (NOISED(self, total, *at) - total)
    )  # fmt: skip


def test_halved_noise_is_caught(monkeypatch):
    scale_noise(monkeypatch, 0.5)
    found = audit(steps=5, rounds=60, trials=1000)
    assert found.verdict == "violated"
    assert found.claimed == pytest.approx(8, abs=0.02)
    assert found.estimate == pytest.approx(18, abs=3) and found.estimate_low > 8
    assert failed(found) >= {
        "noise level", "noise when no record is drawn", "noise level of any client",
        "error rates against the claimed curve",
    }  # fmt: skip
    assert not failed(found) & {"rate of records", "draws per record", "batch sizes", "any two batches"}


def test_noise_by_the_total_norm_is_caught(monkeypatch):
    scale_noise(monkeypatch, 1 / math.sqrt(64))
    found = audit(rounds=60, trials=400)
    assert found.estimate_low > 20 > found.claimed and found.lower_bound > 2
    assert "noise level" in failed(found)


@pytest.mark.parametrize(("steps", "factor"), [(1, 0.95), (5, 1.05)])
def test_noise_that_is_off_by_little_is_caught(monkeypatch, steps, factor):
    scale_noise(monkeypatch, factor)
    assert "noise level" in failed(audit(steps, side_steps=300))


NOISE_FAULTS = {
    "the same in every step of a round": (
        lambda self, total, moment, step: NOISED(self, total, moment, 0), "noise of any two steps"),
    "the same in every round": (
        lambda self, total, moment, step: NOISED(self, total, moment._replace(round=1), step),
        "noise of any two steps"),
    "the same with every seed": (
        lambda self, total, moment, step: NOISED(self, total, moment._replace(seed=1), step), "noise of two runs"),
    "the same with every stream": (
        lambda self, total, moment, step: NOISED(replace(self, sum=replace(self.sum, stream=0)), total, moment, step),
        "noise of two runs"),
    "the same in every silo": (
        lambda self, total, moment, step: NOISED(replace(self, number=0), total, moment, step),
        "noise of any two clients"),
    "the same in all coordinates": (
        lambda self, total, moment, step: total + NOISED(self, total[:1] * 0, moment, step),
        "noise of any two coordinates"),
    "left out of every second step": (
        lambda self, total, moment, step: NOISED(self, total, moment, step) if step % 2 else total,
        "noise level by steps"),
    "left out where no record is drawn": (
        lambda self, total, moment, step: NOISED(self, total, moment, step) if len(self.batch(moment, step)) else total,
        "noise when no record is drawn"),
    "with another seed in the same run": (
        lambda self, total, moment, step: total + torch.from_numpy(
            self.sum.noise_std * np.random.default_rng().standard_normal(len(total))), "the same seed again"),
    "of another shape": (
        lambda self, total, moment, step: total + math.sqrt(12) * self.sum.noise_std * (torch.from_numpy(
            generator(moment.seed, "shape", moment.round, step, self.number, stream=self.sum.stream)
            .random(len(total))) - 0.5), "noise shape"),
}  # fmt: skip


@pytest.mark.parametrize("fault", NOISE_FAULTS)
def test_wrong_noise_is_caught(monkeypatch, fault):
    noised, check = NOISE_FAULTS[fault]
    monkeypatch.setattr(Silo, "noised", noised)
    assert check in failed(audit())


@pytest.mark.parametrize("randomness", ["seeded", "secure"])
def test_noise_that_is_drawn_once_for_all_is_caught(monkeypatch, randomness):
    kept = {}

    def noised(self, total, moment, step):
        return total + kept.setdefault(len(total), NOISED(self, 0 * total, moment, step))

    monkeypatch.setattr(Silo, "noised", noised)
    found = audit(1, privacy=replace(RECORD, randomness=randomness))
    assert failed(found) >= {"noise of any two steps", "noise of two runs"}


BATCH_FAULTS = {
    "once per round": (lambda self, moment, step: BATCH(self, moment, 0), {"any two batches"}),
    "once for all rounds": (
        lambda self, moment, step: BATCH(self, moment._replace(round=1), step), {"any two batches"}),
    "the same with every seed": (
        lambda self, moment, step: BATCH(self, moment._replace(seed=1), step), {"batches of two runs"}),
    "twice as often": (
        lambda self, moment, step: np.flatnonzero(self._source("records", moment, step).random(self.records)
                                                  < 2 * self.rate), {"rate of records"}),
    "a little more often": (
        lambda self, moment, step: np.flatnonzero(self._source("records", moment, step).random(self.records)
                                                  < 1.2 * self.rate), {"rate of records"}),
    "of a fixed size": (
        lambda self, moment, step: np.sort(self._source("records", moment, step).random(self.records).argsort()
                                           [:round(self.rate * self.records)]), {"batch sizes"}),
    "in turn": (
        lambda self, moment, step: np.arange((5 * moment.round + step) % 4, self.records, 4), {"any two batches"}),
    "neighbours together": (
        lambda self, moment, step: np.flatnonzero(np.repeat(self._source("records", moment, step).random(
            (self.records + 1) // 2) < self.rate, 2)[:self.records]), {"any two records"}),
}  # fmt: skip


@pytest.mark.parametrize("fault", BATCH_FAULTS)
def test_wrong_batches_are_caught(monkeypatch, fault):
    batch, checks = BATCH_FAULTS[fault]
    monkeypatch.setattr(Silo, "batch", batch)
    assert failed(audit(side_steps=300)) >= checks


def test_batches_and_noise_of_one_generator_are_caught(monkeypatch):
    def source(self, purpose, moment, step):
        return generator(moment.seed, "one", moment.round, self.number, step, stream=self.sum.stream)

    monkeypatch.setattr(Silo, "_source", source)
    assert "batches and noise" in failed(audit(side_steps=300))


def test_the_noise_of_another_silo_is_caught(monkeypatch):
    def noised(self, total, client, moment, step):
        mixed_up = replace(self.by_number[client], sum=self.silos[-1].sum)
        return mixed_up.noised(total, moment, step)

    monkeypatch.setattr(RecordPlan, "noised", noised)
    privacy = fn.Privacy(silo_epsilons=(0.5, 8.0, 2.0), unit="record")
    found = failed(audit(privacy=privacy))
    assert "noise level of any client" in found and found <= {"noise level of any client", "noise of any two clients"}


def test_the_batches_of_one_silo_alone_are_looked_at(monkeypatch):
    right = RecordPlan.batch

    def batch(self, client, size, moment, step):
        drawn = right(self, client, size, moment, step)
        return np.union1d(drawn, [0, 1, 2, 3, 4]) if client == 1 else drawn

    monkeypatch.setattr(RecordPlan, "batch", batch)
    assert failed(audit(privacy=fn.Privacy(silo_epsilons=(8.0, 1.0, 8.0), unit="record"))) == {
        "rate of records of any client"
    }


SUM_FAULTS = {
    "a bound that one record does not keep to": lambda problem, x, client, numbers, bound: (
        SUM(problem, x, client, numbers, bound)
        + 0.5 * SUM(problem, x, client, numbers[numbers == 0], bound)),
    "a bound that is off by a thousandth": lambda problem, x, client, numbers, bound: (
        1.001 * SUM(problem, x, client, numbers, bound)),
    "a record that enters twice": lambda problem, x, client, numbers, bound: (
        SUM(problem, x, client, np.sort(np.append(numbers, numbers[:1])), bound)),
    "division by the size of the batch": lambda problem, x, client, numbers, bound: (
        SUM(problem, x, client, numbers, bound) * (10 / max(1, len(numbers)))),
}  # fmt: skip


@pytest.mark.parametrize("fault", SUM_FAULTS)
def test_records_that_add_too_much_are_caught(monkeypatch, fault):
    monkeypatch.setattr(records, "sum_of_rows", SUM_FAULTS[fault])
    assert "the length of what a record adds" in failed(audit())


def test_records_that_enter_without_being_drawn_are_caught(monkeypatch):
    monkeypatch.setattr(
        records, "sum_of_rows", lambda problem, x, client, numbers, bound: SUM(
            problem, x, client, np.arange(problem.client_sizes[client]), bound),
    )  # fmt: skip
    assert "rate of records" in failed(audit(side_steps=300))


def test_a_memory_between_steps_is_caught(monkeypatch):
    kept = {}

    def remembering(problem, x, client, numbers, bound):
        now = SUM(problem, x, client, numbers, bound)
        kept[problem.dim] = now + 0.1 * kept.get(problem.dim, 0.0)
        return kept[problem.dim].clone()

    monkeypatch.setattr(records, "sum_of_rows", remembering)
    assert "the length of what a record adds" in failed(audit())


def test_division_by_the_realised_size_of_a_batch_is_caught(monkeypatch):
    """Then the noise says how many there were, and is less where there were many."""
    batch, sizes = RecordPlan.batch, [1]

    def counting(self, *args):
        drawn = batch(self, *args)
        sizes[0] = max(1, len(drawn))
        return drawn

    monkeypatch.setattr(RecordPlan, "batch", counting)
    monkeypatch.setattr(RecordPlan, "expected", lambda self, client, size: sizes[0])
    assert {"noise level", "noise level of any client"} <= failed(audit())


@pytest.mark.parametrize("steps", [1, 4])
def test_gradients_that_go_round_the_noise_are_caught(steps):
    method = fn.fed_avg(local(steps))
    rule = method.local.per_record

    def noised(draws):
        right = rule.noised(draws)

        def run(problem, x, ids, moment, correction):
            rows = right.run(problem, x, ids, moment, correction)
            plain = SUM(problem, x, 0, np.arange(problem.client_sizes[0]), rule.bound)
            return rows + 0.001 * plain / problem.client_sizes[0]

        return right._replace(run=run)

    method = method._replace(local=method.local._replace(per_record=rule._replace(noised=noised)))
    found = audit_records(PROBLEM, method, RECORD, rounds=5, trials=60, side_steps=60)
    assert "the length of what a record adds" in failed(found)


def test_without_any_noise_little_is_proved_and_much_is_seen(monkeypatch):
    monkeypatch.setattr("fednormec.engine.simulation.with_record_noise", lambda algorithm, plan: algorithm)
    found = audit(privacy=fn.Privacy(epsilon=1.0, unit="record"), rounds=20, trials=400)
    assert found.verdict == "violated" and found.lower_bound > 2 > 1 >= found.claimed
    assert found.estimate_low > 8


def test_what_the_steps_refuse_is_a_violation(monkeypatch):
    def refuse(*args):
        raise BoundBroken("a record's gradient of length 2 is beyond its bound.")

    monkeypatch.setattr(records, "sum_of_rows", refuse)
    found = audit()
    assert found.reasons == ("a record's gradient of length 2 is beyond its bound.",)
    assert found.verdict == "violated" and found.checks == {}
    json.dumps(found.facts(), allow_nan=False)


# The problem's own sum of gradients


class Mean:
    """Problem that bounds the mean over a batch, and not each record."""

    def __init__(self, problem):
        self._problem = problem

    def __getattr__(self, name):
        return getattr(self._problem, name)

    def record_sum(self, x, client, numbers, bound):
        mean = self._problem.grad(x, np.array([client]), numbers[None])
        return bound(mean)[0].double() * len(numbers)

    def apart_from_data(self, x):
        return None


class Long(Mean):
    """Problem that bounds each record's gradient, to a hundredth more than the bound allows."""

    def record_sum(self, x, client, numbers, bound):
        return 1.01 * self._problem.record_sum(x, client, numbers, bound)


class Loose(Mean):
    """Problem that has no other bound than the one of its settings."""

    def record_sum(self, x, client, numbers, bound):
        return self._problem.record_sum(x, client, numbers, fn.clip(1.0))


class Unbounded(Mean):
    """Problem that bounds nothing, which shows only where the bound cuts."""

    def record_sum(self, x, client, numbers, bound):
        return self._problem.record_sum(x, client, numbers, fn.clip(1e30))


@pytest.mark.parametrize(("wrong", "tau"), [(Mean, 0.01), (Long, 0.01), (Loose, 0.01), (Unbounded, 100.0)])
def test_a_problem_that_bounds_something_else_is_caught(wrong, tau):
    problem = fn.random_logistic(2, 30, examples=100, seed=0, dtype=torch.float64)
    method, seeds = fn.fed_avg(local(2, tau=tau)), range(5)
    silo, scene = planned(method, problem=problem).silos[0], Scene(method.local, 30, torch.float64)
    assert all(adds_bounded(problem, scene, silo, seed) for seed in seeds)
    assert not any(adds_bounded(wrong(problem), scene, silo, seed) for seed in seeds)


def test_the_sum_of_a_net_is_looked_at_as_it_is():
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.standard_normal((90, 20))).float(), torch.from_numpy(rng.integers(3, size=90))
    problem = fn.NeuralProblem(fn.models.mlp((20,), 3), [(x[:30], y[:30]), (x[30:], y[30:])])
    method = fn.fed_avg(local(2, tau=0.5))
    plan = planned(method, problem=problem)
    assert adds_bounded(problem, Scene(method.local, problem.dim, torch.float32), plan.silos[0], 0)


# How steps are seen


@pytest.mark.parametrize("randomness", ["seeded", "discrete"])
def test_steps_are_seen_as_they_were_drawn(randomness):
    """By a literal loop over clients, rounds and steps, with the plan's own batches and noise."""
    noise = "discrete" if randomness == "discrete" else None
    privacy = fn.Privacy(noise_std=0.7, unit="record", noise=noise)
    method, sizes, seen = fn.fed_avg(local(3, 0.3, tau=0.2)), np.array([7, 1, 30]), []
    scene = Scene(method.local, 5, torch.float64)
    rows = torch.from_numpy(np.random.default_rng(0).standard_normal((30, 5)))
    perform(scene, sizes, lambda numbers: rows[numbers].clone(), privacy, 4, 9, seen.append)
    plan = planned(method, privacy, problem=_Sizes(sizes))
    radius = plan.silos[0].sum.radius if noise else 0.2
    assert len(seen) == 4 * 3 * 3
    for step in seen:
        moment, t = Moment(9, step.number // 3 + 1), step.number % 3
        batch = plan.batch(step.client, int(sizes[step.client]), moment, t)
        total = torch.zeros(5, dtype=torch.float64)
        for number in batch:
            total += rows[number] * min(1.0, 0.2 / float(rows[number].norm()))
        noisy = plan.noised(total, step.client, moment, t)
        radius = plan.by_number[step.client].sum.radius
        assert step.batch.tolist() == batch.tolist()
        np.testing.assert_allclose(step.noisy, noisy.numpy() / radius, rtol=1e-9, atol=1e-6 if noise else 1e-11)
        assert step.std == pytest.approx(0.7, rel=1e-6)


class _Sizes:
    def __init__(self, sizes):
        self.client_sizes, self.num_clients, self.dim = sizes, len(sizes), 5

    def init(self, rng):
        return torch.zeros(5, dtype=torch.float64)


def test_only_some_clients_can_be_heard():
    method, seen = fn.fed_avg(local(2)), []
    plan = planned(method)
    scene = Scene(method.local, 8, torch.float64)
    perform(scene, np.full(3, 40), silence(scene), plan, 3, 1, seen.append, among=np.array([0, 2]))
    assert sorted((step.client, step.number) for step in seen) == [(c, k) for c in (0, 2) for k in range(6)]


@pytest.mark.parametrize(("wanted", "steps", "dim"), [
    (1000, 1, 64), (1000, 7, 64), (1000, 1000, 64), (1000, 333, 10**6), (10, 4, 64), (3, 50, 64), (1, 1, 1),
])  # fmt: skip
def test_rows_are_the_first_and_the_last_steps_of_several_rounds(wanted, steps, dim):
    rows = rows_for(wanted, steps, dim)
    found = [rows.row(number) for number in range(rows.played)]
    kept = [row for row in found if row is not None]
    assert kept == list(range(rows.height)) and wanted <= rows.height
    of_a_round = [t for t in range(steps) if found[t] is not None]
    assert len(of_a_round) == rows.kept and of_a_round[0] == 0
    assert rows.rounds >= min(2, wanted)
    if rows.kept > 1:
        assert of_a_round[-1] == steps - 1


def test_steps_that_cannot_be_followed_are_refused():
    method = fn.fed_avg(local(2))
    still = method._replace(local=method.local.scheduled(fn.Schedule("off", lambda k: 0.0)))
    with pytest.raises(fn.UserError, match="in round 1 the local step is 0"):
        audit_records(PROBLEM, still, RECORD, rounds=2, trials=40, side_steps=10)

    def other(draws):
        return method.local._replace(run=lambda problem, x, ids, *rest: x.new_zeros(len(ids), problem.dim))

    rule = method.local.per_record._replace(noised=other)
    method = method._replace(local=method.local._replace(per_record=rule))
    with pytest.raises(fn.UserError, match="cannot be followed: its steps are not those of dp_sgd"):
        audit_records(PROBLEM, method, RECORD, rounds=2, trials=40)


def test_large_models_get_fewer_canaries_and_then_fewer_rounds():
    def sized(dim, steps, rounds, trials=None, rate=0.1):
        silo = Silo(0, Mechanism(500, fn.poisson(rate), 1.0), steps)
        at = attack(Scene(local(steps, rate), dim, torch.float32), silo, rounds, trials)
        work = at.runs * at.rounds * steps * dim * rate * at.canaries
        assert work <= 1.1 * WORK and at.canaries * dim <= ROOM and at.canaries <= dim
        assert at.runs * at.canaries * at.rounds * steps <= 1.1 * SEEN
        assert len(set(at.places.tolist())) == at.canaries and at.places[-1] < dim
        return at

    small, large, long = sized(650, 5, 60), sized(300_000, 5, 60), sized(650, 100, 1000)
    assert (small.canaries * small.runs, small.rounds) == (1000, 60)
    assert SOME_TRIALS <= large.canaries * large.runs < 1000 and large.rounds < 60
    assert SOME_TRIALS <= long.canaries * long.runs < 1000 and long.rounds < 1000
    assert sized(300_000, 1, 1, 400).canaries * sized(300_000, 1, 1, 400).runs >= 400


def test_rare_records_are_many_where_batches_are_looked_at():
    mechanism = Mechanism(500, fn.poisson(0.01), 1.0)
    assert for_batches(mechanism).num_clients == 400
    assert for_batches(mechanism, 0.25).num_clients == 128
    assert for_batches(replace(mechanism, participation=fn.poisson(1e-4))).num_clients == 1024


def test_mistakes_are_told():
    with pytest.raises(fn.UserError, match="privacy of records, and this privacy is for clients alone"):
        audit(privacy=fn.Privacy(epsilon=8.0))
    with pytest.raises(fn.UserError, match="at least 40 canaries"):
        audit(trials=10)
    with pytest.raises(fn.UserError, match="rounds"):
        audit(rounds=0)
    with pytest.raises(fn.UserError, match="side_steps"):
        audit(side_steps=0)
    with pytest.raises(fn.UserError, match="take local.name = 'dp_sgd'"):
        audit_records(PROBLEM, fn.fed_avg(fn.gd(0.1)), RECORD, rounds=3)
    with pytest.raises(fn.UserError, match="take audit_records"):
        fn.audit_training(PROBLEM, fn.fed_avg(local()), None, RECORD, rounds=3)


# A training


def training(method=None, privacy=RECORD, problem=PROBLEM, rounds=20, participation=None, canaries=60, seed=3):
    method = fn.fed_avg(local()) if method is None else method
    plan = planned(method, privacy, rounds, problem)
    return audit_record_training(problem, method, participation or fn.full(), plan, seed=seed, canaries=canaries)


METHODS = {
    "fed_avg": fn.fed_avg(local(1)),
    "scaffold": fn.scaffold(local()),
    "fed_normec": fn.fed_normec(local(3, bound="normalize")),
    "mr_mtl": fn.mr_mtl(local(3), pull=0.2),
    "local_training": fn.local_training(local(2)),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_right_training_passes(name, adjacency, dtype):
    problem = fn.random_logistic(4, 300, examples=30, seed=0, dtype=dtype)
    found = training(METHODS[name], replace(RECORD, adjacency=adjacency), problem, participation=fn.poisson(0.8))
    assert found.verdict == "consistent", found.text()
    assert (found.trials, found.rounds) == (60, 20)
    assert found.lower_bound <= found.claimed <= 8 and min(found.checks.values()) > 1e-5


@pytest.mark.parametrize("method", [fn.scaffold(local(3)), fn.mr_mtl(local(3), pull=5.0), fn.fed_avg(local(2))])
def test_the_noise_of_a_training_is_all_that_is_left_of_an_update(monkeypatch, method):
    """The gradients of all records, the pull, the regulariser and the corrections are taken away."""
    problem = fn.random_logistic(3, 80, examples=20, seed=0, regularizer=0.5, dtype=torch.float64)
    drawn, heard, right = {}, [], fednormec.audit.record_training._told

    def noised(self, total, moment, step):
        found = NOISED(self, total, moment, step)
        drawn.setdefault((self.number, moment.round), []).append((found - total) / (self.sum.noise_std * 1.0))
        return found

    def told(*args):
        heard.append(right(*args))
        return heard[-1]

    monkeypatch.setattr(Silo, "noised", noised)
    monkeypatch.setattr(fednormec.audit.record_training, "_told", told)
    found = training(method, problem=problem, rounds=6)
    number, steps = int(found.of.split("client ")[1].split()[0]), method.local.per_record.steps
    assert len(heard) == 6
    for k, one in enumerate(heard, 1):
        expected = torch.stack(drawn[number, k]).sum(0).numpy() / math.sqrt(steps)
        np.testing.assert_allclose(one.noise, expected, rtol=1e-7, atol=1e-7)


def test_a_training_is_attacked_well():
    found = training(fn.fed_avg(local(1, 0.5)), problem=fn.random_logistic(2, 600, examples=50, seed=0), canaries=400)
    assert found.claimed == pytest.approx(8, abs=0.02)
    assert 6 < found.expected < 8 and found.estimate == pytest.approx(found.expected, abs=2)


def test_a_secure_training_passes():
    assert training(privacy=replace(RECORD, randomness="secure")).verdict == "consistent"


def test_a_training_with_too_little_noise_is_caught(monkeypatch):
    scale_noise(monkeypatch, 0.5)
    found = training(problem=fn.random_logistic(2, 300, examples=50, seed=0), canaries=200)
    assert "noise level" in failed(found) and found.estimate_low > found.claimed


@pytest.mark.parametrize(("fault", "check"), [
    ("the same in every round", "noise of any two rounds"), ("left out of every second step", "noise level"),
])  # fmt: skip
def test_a_training_with_wrong_noise_is_caught(monkeypatch, fault, check):
    monkeypatch.setattr(Silo, "noised", NOISE_FAULTS[fault][0])
    assert check in failed(training())


def test_a_training_that_draws_too_often_is_caught(monkeypatch):
    monkeypatch.setattr(Silo, "batch", BATCH_FAULTS["twice as often"][0])
    assert "rate of records" in failed(training())


def test_a_training_whose_steps_refuse_is_violated(monkeypatch):
    def refuse(*args):
        raise BoundBroken("a record's gradient of length 2 is beyond its bound.")

    monkeypatch.setattr("fednormec.audit.record_training.bounded_sum", refuse)
    found = training()
    assert found.reasons == ("a record's gradient of length 2 is beyond its bound.",)


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_the_ratio_of_one_step_is_that_of_a_step(adjacency):
    mechanism, y = Mechanism(50, fn.poisson(0.2), 0.8, adjacency=adjacency), np.linspace(-4, 4, 50)
    np.testing.assert_allclose(ratios_of_sum(y, 1, mechanism), log_ratios(y, None, None, mechanism), rtol=1e-9)
    expected = expected_estimate(mechanism, 30, DELTA)
    assert expected_of_sums(Silo(0, mechanism, 1), 30, DELTA) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_what_is_expected_of_sums_is_what_comes_of_ideal_trials(adjacency):
    n, rounds, steps, rng = 40_000, 10, 4, np.random.default_rng(0)
    mechanism = Mechanism(50, fn.poisson(0.25), 1.1, adjacency=adjacency)
    present, scores = rng.random(n) < 0.5, np.zeros(n)
    drawn, weights = np.arange(steps + 1), stats.binom.pmf(np.arange(steps + 1), steps, 0.25)

    def density(y):
        return (weights * stats.norm.pdf(y[:, None], drawn, 1.1 * math.sqrt(steps))).sum(1)

    for _ in range(rounds):
        sign = np.where(present, 1.0, -1.0 if adjacency == "replace_one" else 0.0)
        y = sign * rng.binomial(steps, 0.25, n) + 1.1 * math.sqrt(steps) * rng.standard_normal(n)
        out = density(-y) if adjacency == "replace_one" else stats.norm.pdf(y, 0, 1.1 * math.sqrt(steps))
        scores += np.log(density(y) / out)
    expected = expected_of_sums(Silo(0, mechanism, steps), rounds, DELTA)
    assert two_gaussians(scores, present, DELTA)[0] == pytest.approx(expected, rel=0.06)


def test_clients_whose_steps_bound_records_are_audited_in_a_training():
    problem = fn.random_logistic(10, 600, examples=5, seed=0)
    found = fn.audit_training(problem, fn.fed_normec(fn.dp_sgd(0.1, 2, batch_size=3)), fn.poisson(0.5),
                              fn.Privacy(epsilon=8.0), rounds=20, canaries=60, seed=2)  # fmt: skip
    assert found.verdict == "consistent" and found.claimed > 7.9, found.text()


# The command

SMALL = ("data.clients=6", "local.name=dp_sgd", "local.rate=0.3", "run.rounds=4")
BOTH = (*SMALL, "privacy.unit=['client', 'record']", "privacy.record_epsilon=2")


@pytest.fixture
def few_side_steps(monkeypatch):
    monkeypatch.setattr(fednormec.audit.records.audit_record_plan, "__defaults__", (None, 0, 60, lambda *at: None))
    monkeypatch.setattr(fednormec.audit.audit.audit_mechanism, "__kwdefaults__",
                        fednormec.audit.audit.audit_mechanism.__kwdefaults__ | {"side_rounds": 50})  # fmt: skip


@pytest.mark.usefixtures("few_side_steps")
def test_the_command_audits_records(fednormec_):
    code, out, err = fednormec_("audit", "--json", "--canaries", 60, *sets(*SMALL, "privacy.unit=record"))
    found = json.loads(out)
    assert (code, err, found["verdict"], found["trials"]) == (0, "", "consistent", 60)
    assert found["of"].startswith("the records of client ") and "records" not in found


@pytest.mark.usefixtures("few_side_steps")
def test_the_command_audits_clients_and_then_records(fednormec_, monkeypatch):
    code, out, _ = fednormec_("audit", "--json", "--canaries", 60, *sets(*BOTH))
    found = json.loads(out)
    assert code == 0 and found["of"].startswith("the mechanism (") and found["claimed"] == pytest.approx(4, abs=0.01)
    assert found["records"]["of"].startswith("the records of ") and found["records"]["claimed"] <= 2
    scale_noise(monkeypatch, 0.7)
    code, out, _ = fednormec_("audit", "--canaries", 60, *sets(*BOTH))
    assert code == 1 and "audit of the mechanism" in out and "): consistent" in out and "): violated" in out
    assert out.index("audit of the mechanism") < out.index("audit of the records") and "noise level: FAILED" in out


def test_the_command_audits_a_training_of_records(fednormec_):
    code, out, _ = fednormec_("audit", "--training", "--canaries", 60, *sets(*SMALL, "privacy.unit=record"))
    assert code == 0 and "of the records of client" in out and "4 updates of the client, sums of 5 steps: weaker" in out
    code, out, _ = fednormec_("audit", "--training", "--json", "--canaries", 60, *sets(*BOTH))
    assert code == 0 and json.loads(out)["records"]["trials"] == 60
