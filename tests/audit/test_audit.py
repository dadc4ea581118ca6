"""The audit accepts what is right and catches what is broken: noise, sampler and sensitivity, one fault at a time."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from audit_faults import beneath_the_guard
from scipy import stats

import fednormec as fn
from fednormec.algorithms.adaptive import Threshold
from fednormec.audit import playing
from fednormec.audit.audit import Audit, audit_mechanism, audit_training
from fednormec.audit.canaries import nothing_for, with_canaries
from fednormec.audit.checks import dispersion
from fednormec.audit.evidence import (
    LEVEL,
    clopper_pearson,
    curve_p_value,
    lower_bound,
    one_run_epsilon,
    one_run_p_value,
    two_gaussians,
)
from fednormec.audit.measuring import counts, expected_estimate
from fednormec.audit.playing import ROOM, SOME_TRIALS, WORK, attack, stage_for
from fednormec.core import bounds
from fednormec.core.participation import Cohort, Participation
from fednormec.engine import threads
from fednormec.errors import BoundBroken
from fednormec.privacy import accounting
from fednormec.problems.silence import Silence

pytestmark = pytest.mark.long

DELTA = 1e-5
CENTRAL = fn.Mechanism(20, fn.poisson(0.25), 2.734)  # ε = 8 after 300 rounds
SECAGG = fn.Mechanism(200, fn.poisson(0.25), 0.5, trust="secagg")
LOCAL = fn.Mechanism(20, fn.poisson(0.5), 1.0, trust="local")
PROBLEM = fn.random_logistic(10, 3000, examples=5, seed=0)


def scale_noise(monkeypatch, factor):
    right = fn.Mechanism.noise
    monkeypatch.setattr(fn.Mechanism, "noise", lambda self, *args: factor * right(self, *args))


# The whole mechanism, right


@pytest.mark.parametrize(
    ("mechanism", "rounds", "trials"),
    [
        (CENTRAL, 300, 400),
        (replace(CENTRAL, adjacency="replace_one", radius=0.1), 100, 400),
        (replace(CENTRAL, participation=fn.full(), secure=True, grid_dim=64), 50, 400),
        (replace(CENTRAL, participation=fn.fixed_size(5)), 20, 200),
        (replace(CENTRAL, noise_std=0.0035), 20, 100),  # a claim of next to nothing
        (SECAGG, 60, 400),
        (replace(SECAGG, num_clients=40, adjacency="replace_one", colluders=3, min_cohort=9), 40, 200),
        (replace(SECAGG, num_clients=500), 20, 100),  # more clients than canaries
        (LOCAL, 8, 100),
        (replace(LOCAL, participation=fn.fixed_size(5), adjacency="replace_one"), 3, 100),
    ],
)
def test_a_right_mechanism_passes(mechanism, rounds, trials):
    audit = audit_mechanism(mechanism, rounds, DELTA, trials=trials, seed=1, side_rounds=60)
    assert audit.verdict == "consistent", audit.text()
    assert audit.trials == trials
    assert audit.lower_bound <= audit.claimed == mechanism.epsilon(rounds, DELTA)
    assert audit.estimate_low < audit.estimate
    assert min(audit.checks.values()) > 1e-4
    assert ("cohort sizes" in audit.checks) == mechanism.participation.name.startswith("poisson")


def test_the_estimate_is_near_a_tight_claim():
    audit = audit_mechanism(CENTRAL, 300, DELTA, side_rounds=60)
    assert audit.claimed == pytest.approx(8, abs=0.02)
    assert audit.expected == pytest.approx(7.63, abs=0.01)
    assert audit.estimate == pytest.approx(audit.expected, abs=1.2)
    assert audit.estimate_low > 5.5
    assert audit.lower_bound > 0.9


def test_progress_is_told_round_by_round():
    crowd = replace(SECAGG, num_clients=40, secure=True, grid_dim=64)
    for mechanism in (CENTRAL, crowd, replace(LOCAL, participation=fn.full())):
        told = []
        audit_mechanism(
            mechanism, 2, DELTA, trials=40, side_rounds=10, on_progress=lambda *at, told=told: told.append(at)
        )
        assert told == [(k, len(told)) for k in range(1, len(told) + 1)] and len(told) > 80


# The whole mechanism, broken


def test_halved_noise_is_caught(monkeypatch):
    scale_noise(monkeypatch, 0.5)
    audit = audit_mechanism(CENTRAL, 300, DELTA, side_rounds=60)
    assert audit.verdict == "violated"
    assert audit.estimate == pytest.approx(18, abs=3)
    assert audit.estimate_low > 8
    failed = {name for name, p in audit.checks.items() if p < LEVEL}
    assert failed >= {"noise level", "noise when nobody is drawn", "error rates against the claimed curve"}
    assert not failed & {"sampling rate", "draws per client", "cohort sizes", "any two cohorts"}


def test_noise_of_the_total_norm_is_caught(monkeypatch):
    scale_noise(monkeypatch, 1 / math.sqrt(269_722))
    audit = audit_mechanism(CENTRAL, 100, DELTA, trials=400, side_rounds=60)
    assert audit.estimate_low > 20 > audit.claimed
    assert audit.lower_bound > 2
    assert audit.checks["noise level"] < LEVEL


@pytest.mark.parametrize(
    "mechanism", [SECAGG, LOCAL, replace(CENTRAL, adjacency="replace_one", participation=fn.full())]
)
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_wrong_noise_is_caught_in_every_trust_model(monkeypatch, mechanism, factor):
    scale_noise(monkeypatch, factor)
    assert audit_mechanism(mechanism, 8, DELTA, trials=80, side_rounds=60).checks["noise level"] < LEVEL


def test_no_noise_at_all_is_proved_against_a_small_claim(monkeypatch):
    scale_noise(monkeypatch, 0.0)
    audit = audit_mechanism(
        replace(CENTRAL, participation=fn.full(), noise_std=40.0), 10, DELTA, trials=400, side_rounds=60
    )
    assert audit.claimed < 1 < 2 < audit.lower_bound
    assert audit.reasons[:2] == (
        "the lower bound lies above the claim",
        "the estimate lies above the claim by more than chance",
    )
    assert math.isinf(audit.estimate) and audit.facts()["estimate"] is None


def test_noise_that_is_left_out_for_empty_cohorts_is_caught(monkeypatch):
    right = fn.Mechanism.noise

    def noise(self, dim, senders, seed, round):
        return right(self, dim, senders, seed, round) * (senders > 0)

    monkeypatch.setattr(fn.Mechanism, "noise", noise)
    audit = audit_mechanism(CENTRAL, 20, DELTA, trials=200, side_rounds=60)
    assert "the check of noise when nobody is drawn fails" in audit.reasons
    assert audit.checks["sampling rate"] > LEVEL and audit.checks["the length of messages"] > LEVEL


def test_noise_that_does_not_grow_with_the_cohort_is_caught(monkeypatch):
    right = fn.Mechanism.noise
    monkeypatch.setattr(fn.Mechanism, "noise", lambda self, dim, senders, *at: right(self, dim, 1, *at))
    audit = audit_mechanism(SECAGG, 60, DELTA, trials=200, side_rounds=60)
    assert audit.checks["noise level"] < LEVEL
    assert audit.estimate_low > audit.claimed


def test_noise_that_repeats_itself_is_caught(monkeypatch):
    right = fn.Mechanism.noise
    monkeypatch.setattr(
        fn.Mechanism, "noise", lambda self, dim, senders, seed, round: right(self, dim, senders, seed, 1)
    )
    assert audit_mechanism(CENTRAL, 20, DELTA, trials=40, side_rounds=60).checks["noise of any two rounds"] < LEVEL
    monkeypatch.setattr(fn.Mechanism, "noise", lambda self, dim, *at: np.tile(right(self, 1, *at), dim))
    assert (
        audit_mechanism(CENTRAL, 20, DELTA, trials=200, side_rounds=60).checks["noise of any two coordinates"] < LEVEL
    )


def test_noise_of_another_shape_is_caught(monkeypatch):
    def uniform(self, dim, senders, seed, round):
        return self.noise_std * math.sqrt(12) * (np.random.default_rng([seed, round]).random(dim) - 0.5)

    monkeypatch.setattr(fn.Mechanism, "noise", uniform)
    assert audit_mechanism(CENTRAL, 20, DELTA, trials=400, side_rounds=60).checks["noise shape"] < LEVEL


def test_messages_longer_than_the_radius_are_caught(monkeypatch):
    right = bounds._radial

    def twice_as_long(rows, *rest):
        messages = right(rows, *rest)
        return messages._replace(factors=2 * messages.factors)

    monkeypatch.setattr(bounds, "_radial", twice_as_long)
    refused = audit_mechanism(CENTRAL, 100, DELTA, trials=400, side_rounds=60)
    assert refused.verdict == "violated" and "sent a message of length 2" in refused.reasons[0]
    with beneath_the_guard():  # and without the engine's help
        audit = audit_mechanism(CENTRAL, 100, DELTA, trials=400, side_rounds=60)
    assert audit.checks["the length of messages"] < LEVEL
    assert audit.estimate_low > audit.claimed


@pytest.mark.parametrize("mechanism", [CENTRAL, SECAGG, LOCAL])
def test_one_cohort_for_all_rounds_is_caught(monkeypatch, mechanism):
    right = fn.Mechanism.cohort
    monkeypatch.setattr(fn.Mechanism, "cohort", lambda self, seed, round: right(self, seed, 1))
    checks = audit_mechanism(mechanism, 16, DELTA, trials=200, side_rounds=60).checks
    assert checks["draws per client"] < LEVEL
    assert checks["any two cohorts"] < LEVEL


def test_cohorts_of_a_fixed_size_are_not_poisson(monkeypatch):
    def draw(self, num_clients, source, min_cohort=1):
        senders = np.sort(np.argsort(source.random(num_clients))[: round(0.25 * num_clients)])
        return Cohort(senders, np.ones(len(senders), bool))

    monkeypatch.setattr(Participation, "draw", draw)
    audit = audit_mechanism(CENTRAL, 60, DELTA, trials=200, side_rounds=60)
    assert "the check of cohort sizes fails" in audit.reasons


def test_going_round_all_clients_in_turn_is_not_poisson(monkeypatch):
    def cohort(self, seed, round):
        senders = np.flatnonzero(np.arange(self.num_clients) % 4 == round % 4)
        return Cohort(senders, np.ones(len(senders), bool))

    monkeypatch.setattr(fn.Mechanism, "cohort", cohort)
    checks = audit_mechanism(CENTRAL, 60, DELTA, trials=200, side_rounds=60).checks
    assert checks["draws per client"] < LEVEL and checks["any two cohorts"] < LEVEL


def test_drawing_more_often_than_claimed_is_caught(monkeypatch):
    right = fn.Mechanism.cohort
    monkeypatch.setattr(
        fn.Mechanism, "cohort", lambda self, *at: right(replace(self, participation=fn.poisson(0.3, "sleep")), *at)
    )
    assert audit_mechanism(CENTRAL, 60, DELTA, trials=200, side_rounds=60).checks["sampling rate"] < LEVEL


def test_a_round_below_the_least_cohort_is_caught(monkeypatch):
    right = fn.Mechanism.cohort
    monkeypatch.setattr(fn.Mechanism, "cohort", lambda self, *at: right(replace(self, min_cohort=1), *at))
    audit = audit_mechanism(replace(SECAGG, num_clients=20, min_cohort=6), 40, DELTA, trials=40, side_rounds=60)
    assert audit.reasons == ("the check of the least cohort fails",)


# The run's own method


OWN = {
    "fed_normec": fn.fed_normec(fn.gd(0.1, steps=3)),
    "clip21": fn.clip21(tau=0.5),
    "clip21_sgd2m": fn.clip21_sgd2m(tau=2.0),
    "dp_fed_avg_clip": fn.dp_fed_avg_clip(fn.sgd(0.1, steps=2), tau=3.0),
    "dp_fed_avg_normalized": fn.dp_fed_avg_normalized(fn.gd(1e-3), alpha=5.0, beta=0.3),
    "dp_scaffold": fn.dp_scaffold(fn.gd(0.1)),
    "ef14": fn.ef14(fn.gd(0.1), tau=0.5),
    "econtrol": fn.econtrol(fn.gd(0.1), bound="normalize", tau=2.0),
    "centred": fn.centred(fn.gd(0.1)),
    "centred, leaky": fn.centred(fn.gd(0.1), bound="clip", tau=0.3, leak=0.1),
    "dp_fed_avg_adaptive": fn.dp_fed_avg_adaptive(fn.gd(0.1, steps=3), rate=2.0),
    "fed_normec_adaptive": fn.fed_normec_adaptive(fn.gd(0.1), bit_share=0.02),
}


ALL_TRUSTS = ("fed_normec", "clip21_sgd2m", "dp_scaffold", "fed_normec_adaptive")


def audit_of(algorithm, mechanism=CENTRAL, **more):
    own = {"dim": 50, "dtype": torch.float32, "trials": 40, "side_rounds": 30} | more
    mechanism = replace(mechanism, radius=algorithm.bound.radius)
    return audit_mechanism(mechanism, 6, DELTA, algorithm=algorithm, **own)


@pytest.mark.parametrize(
    ("name", "trust"),
    [
        *((name, "central") for name in OWN),
        *((name, trust) for name in ALL_TRUSTS for trust in ("secagg", "local")),
    ],  # under the other two with one, two and three vectors that are sent or remembered, and with a bit
)
def test_every_method_is_audited_as_it_is(name, trust):
    audit = audit_of(OWN[name], replace(CENTRAL, trust=trust))
    assert audit.verdict == "consistent", audit.text()
    assert audit.played == f"{OWN[name].name}, 50 parameters in float32, 6 rounds; 30 of noise alone"
    assert audit.played in audit.text() and audit.facts()["played"] == audit.played


@pytest.mark.parametrize("name", OWN)
def test_messages_that_are_five_percent_too_long_are_caught(monkeypatch, name):
    right = threads.tile
    longer = lambda found: found._replace(total=1.05 * found.total)  # noqa: E731
    monkeypatch.setattr(threads, "tile", lambda *args: longer(right(*args)))
    assert audit_of(OWN[name]).reasons == ("the check of the length of messages fails",)


ADAPTIVE = ("dp_fed_avg_adaptive", "fed_normec_adaptive")


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_bit_without_noise_is_caught(monkeypatch, name):
    right = fn.Mechanism.noise
    plain = lambda draw: np.append(draw[:-1], 0.0)  # noqa: E731
    monkeypatch.setattr(fn.Mechanism, "noise", lambda self, *args: plain(right(self, *args)))
    assert audit_of(OWN[name]).checks["noise level by coordinates"] < LEVEL


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_bit_on_top_of_the_radius_is_caught(monkeypatch, name):
    """A vector that takes the whole radius leaves no room for a bit: the engine refuses, and beneath it the audit."""
    monkeypatch.setattr(Threshold, "parts", lambda self, rows: (1 - 1e-5, math.sqrt(self.bit_share)))
    assert "sent a message of length 1.0" in audit_of(OWN[name]).reasons[0]
    with beneath_the_guard():
        assert audit_of(OWN[name]).reasons == ("the check of the length of messages fails",)


@pytest.mark.parametrize("name", ADAPTIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_canary_is_beyond_a_threshold_that_adapts_in_every_round(name, dtype):
    """Though everybody says that it is too small, so that it rises as fast as it can, to its end."""
    mechanism = replace(CENTRAL, radius=1.0)
    stage, axes = stage_for(mechanism, OWN[name], 5, dtype, None), torch.eye(2, 5)
    problem = with_canaries(stage.silence(3), axes, np.array([True, False]), scale=stage.scale, nothing=stage.nothing)
    share = 0.01 if name == "dp_fed_avg_adaptive" else 0.02
    expected = torch.zeros(6, dtype=torch.float64)
    expected[0], expected[5] = math.sqrt(1 - share), -math.sqrt(share)
    for r in fn.simulate(problem, stage.algorithm, rounds=60):
        torch.testing.assert_close(r.released, expected, rtol=1e-4, atol=1e-12)


def test_only_messages_of_later_clients_that_are_too_long_are_caught(monkeypatch):
    right = bounds.Messages.sum

    def some_longer(self, sends, adding):
        return right(self, torch.cat([sends[:9], 1.01 * sends[9:]]), adding)

    monkeypatch.setattr(bounds.Messages, "sum", some_longer)
    assert audit_of(OWN["fed_normec"]).verdict == "violated"
    with beneath_the_guard():
        assert audit_of(OWN["fed_normec"]).reasons == ("the check of the length of messages fails",)


def test_a_large_model_is_played_at_full_width_by_fewer_canaries_in_fewer_rounds():
    def sized(mechanism, dim, rounds, trials=None):
        return attack(mechanism, stage_for(mechanism, OWN["fed_normec"], dim, torch.float32, trials), rounds, trials)

    small, large, long = sized(CENTRAL, 650, 60), sized(CENTRAL, 300_000, 60), sized(CENTRAL, 300_000, 10**4)
    assert (small.canaries, small.runs, small.rounds) == (500, 2, 60)
    assert large.stage.dim == long.stage.dim == 300_000
    for at in (large, long):
        assert SOME_TRIALS <= at.canaries * at.runs < 1000 and at.canaries * 300_000 <= ROOM
        assert at.canaries * at.runs * at.rounds * 300_000 <= 1.1 * WORK
    assert (large.rounds, long.rounds < 200) == (60, True)
    assert sized(CENTRAL, 300_000, 60, 400).canaries * sized(CENTRAL, 300_000, 60, 400).runs >= 400
    crowd = sized(replace(SECAGG, num_clients=5000), 300_000, 60)
    assert crowd.mechanism.num_clients == 5000 and crowd.stage.dim == ROOM // 5000
    assert sized(LOCAL, 300_000, 60).mechanism.num_clients == 1


def test_the_rounds_that_were_played_are_what_is_claimed_for(monkeypatch):
    monkeypatch.setattr(playing, "WORK", 40 * 50 * 3)
    audit = audit_of(OWN["fed_normec"])
    assert audit.rounds == 3 and audit.claimed == CENTRAL.epsilon(3, DELTA) and "3 of 6 rounds" in audit.played


@pytest.mark.parametrize("place", ["attack", "alone"])
def test_what_the_engine_refuses_is_a_violation(monkeypatch, place):
    def refuse(*args):
        raise BoundBroken("client 3 sent a message of length 2, beyond the radius 1.")

    monkeypatch.setattr(threads, "tile", refuse) if place == "attack" else monkeypatch.setattr(
        "fednormec.audit.audit.longest_alone", refuse
    )
    audit = audit_of(OWN["fed_normec"])
    assert audit.reasons == ("client 3 sent a message of length 2, beyond the radius 1.",)
    assert audit.verdict == "violated" and "because      client 3 sent" in audit.text()
    json.dumps(audit.facts(), allow_nan=False)
    if place == "attack":
        audit = audit_training(PROBLEM, OWN["fed_normec"], None, fn.Privacy(epsilon=8.0), rounds=3)
        assert audit.reasons == ("client 3 sent a message of length 2, beyond the radius 1.",)
        json.dumps(audit.facts(), allow_nan=False)


# A training


@pytest.mark.parametrize(
    ("algorithm", "participation", "privacy"),
    [
        (fn.fed_normec(fn.gd(0.1)), fn.poisson(0.5), fn.Privacy(epsilon=8.0)),
        (fn.fed_normec(fn.sgd(0.1, batch_size=2)), fn.poisson(0.5, "sleep"), fn.Privacy(epsilon=4.0, tuning_runs=2)),
        (fn.clip21(tau=0.5), None, fn.Privacy(epsilon=8.0, adjacency="replace_one")),
        (fn.centred(fn.gd(0.1), leak=0.1), fn.poisson(0.5), fn.Privacy(epsilon=8.0)),
        (fn.dp_fed_avg_adaptive(fn.gd(0.1)), fn.poisson(0.5), fn.Privacy(epsilon=8.0)),
        (fn.fed_normec_adaptive(fn.gd(0.1)), fn.poisson(0.5), fn.Privacy(epsilon=8.0, adjacency="replace_one")),
        (fn.dp_fed_avg_clip(fn.gd(0.1)), fn.fixed_size(5), fn.Privacy(noise_std=1.0, trust="secagg", min_cohort=2)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_right_training_passes(algorithm, participation, privacy, dtype):
    problem = fn.random_logistic(10, 3000, examples=5, seed=0, dtype=dtype)
    audit = audit_training(problem, algorithm, participation, privacy, rounds=40, canaries=100, seed=2)
    assert audit.verdict == "consistent", audit.text()
    assert audit.lower_bound <= audit.claimed
    assert (audit.trials, audit.rounds) == (100, 40)


def test_the_claim_of_a_training_is_that_of_the_noise_it_would_have_without_canaries():
    privacy = fn.Privacy(epsilon=8.0)
    audit = audit_training(PROBLEM, fn.fed_normec(fn.gd(0.1)), fn.poisson(0.5), privacy, rounds=40)
    assert audit.claimed == pytest.approx(8, rel=1e-3)
    assert 4 < audit.estimate < 8.5  # the attack is strong, whatever it finds
    cut = fn.Privacy(epsilon=8.0, noise_std=1.0)
    audit = audit_training(PROBLEM, fn.fed_normec(fn.gd(0.1)), fn.poisson(0.5), cut, rounds=40, canaries=40)
    assert audit.rounds < 40 and audit.claimed <= 8  # it ends with the budget


@pytest.mark.parametrize("algorithm", [fn.fed_normec(fn.gd(0.1)), fn.dp_fed_avg_clip(fn.gd(0.1), tau=0.5)])
@pytest.mark.parametrize("factor", [0.5, 0.0])
def test_a_training_with_too_little_noise_is_caught(monkeypatch, algorithm, factor):
    scale_noise(monkeypatch, factor)
    audit = audit_training(PROBLEM, algorithm, fn.poisson(0.5), fn.Privacy(epsilon=8.0), rounds=40)
    assert audit.reasons == (
        "the estimate lies above the claim by more than chance", "the check of noise level, at the least fails"
    )  # fmt: skip


def test_a_training_with_messages_ten_times_too_long_is_caught(monkeypatch):
    right = threads.tile
    longer = lambda found: found._replace(total=10 * found.total)  # noqa: E731
    monkeypatch.setattr(threads, "tile", lambda *args: longer(right(*args)))
    for participation, adjacency in ((fn.poisson(0.5), "zero_out"), (None, "zero_out"), (None, "replace_one")):
        privacy = fn.Privacy(epsilon=8.0, adjacency=adjacency)
        audit = audit_training(PROBLEM, fn.fed_normec(fn.gd(0.1)), participation, privacy, rounds=20)
        assert audit.claimed == pytest.approx(8, rel=1e-3)
        assert audit.verdict == "violated" and audit.checks["the length of messages"] < LEVEL


def test_a_training_with_noise_missing_in_one_round_or_in_some_coordinates_is_caught(monkeypatch):
    right = fn.Mechanism.noise
    for part in (lambda k: np.s_[:] if k == 7 else np.s_[:0], lambda k: np.s_[2900:]):

        def noise(self, dim, senders, seed, round, part=part):
            draw = right(self, dim, senders, seed, round)
            draw[part(round)] = 0
            return draw

        monkeypatch.setattr(fn.Mechanism, "noise", noise)
        audit = audit_training(PROBLEM, fn.fed_normec(fn.gd(0.1)), fn.poisson(0.5), fn.Privacy(epsilon=8.0), rounds=10)
        assert audit.checks["noise level, at the least"] < LEVEL


def test_a_training_without_noise_is_proved_against_a_small_claim(monkeypatch):
    scale_noise(monkeypatch, 0.0)
    audit = audit_training(PROBLEM, fn.fed_normec(fn.gd(0.1)), fn.poisson(0.5), fn.Privacy(epsilon=1.0), rounds=40)
    assert audit.lower_bound > 2


@pytest.mark.parametrize("algorithm", [fn.dp_scaffold(fn.gd(0.1)), fn.fed_avg(fn.gd(0.1)), fn.ef21()])
def test_methods_that_cannot_be_audited_are_refused(algorithm):
    with pytest.raises(fn.UserError, match="one vector of bounded length"):
        audit_training(PROBLEM, algorithm, None, fn.Privacy(epsilon=8.0), rounds=3)


# Canaries


BOUNDED = {
    "fed_normec": fn.fed_normec(fn.gd(0.1, steps=2), beta=0.5),
    "fed_normec, sgd": fn.fed_normec(fn.sgd(0.1, steps=3, batch_size=2)),
    "alpha_normec": fn.alpha_normec(),
    "clip21": fn.clip21(tau=0.5),
    "clip21_sgd2m": fn.clip21_sgd2m(tau=2.0),
    "dp_fed_avg_clip": fn.dp_fed_avg_clip(fn.ig(0.1)),
    "dp_fed_avg_normalized": fn.dp_fed_avg_normalized(fn.gd(0.1), beta=0.3),
    "ef14": fn.ef14(fn.gd(0.1), tau=0.5),
    "ef21_sgdm": fn.ef21_sgdm(fn.gd(0.1)),
    "econtrol": fn.econtrol(fn.gd(0.1), tau=2.0),
}


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_a_canary_sends_its_vector_in_every_round(name, adjacency):
    algorithm, axes = BOUNDED[name], torch.eye(2, 5, dtype=torch.float64)
    problem = with_canaries(Silence(5, 3), axes, np.array([True, False]), adjacency)
    expected = algorithm.bound.radius * (axes[0] - axes[1] * (adjacency == "replace_one"))
    for r in fn.simulate(problem, algorithm, rounds=60):
        torch.testing.assert_close(r.released, expected, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("settings", [{}, {"leak": 0.1}])
def test_a_canary_that_is_not_there_is_heard_nowhere_in_centred_feedback(settings):
    """Its clients measure against what the server remembers: without data one would still send, away from that."""
    algorithm, axes = fn.centred(fn.gd(0.1), **settings), torch.eye(2, 5, dtype=torch.float64)
    nothing = nothing_for(algorithm, torch.zeros(5))
    assert math.isnan(nothing) and nothing_for(fn.fed_normec(fn.gd(0.1)), torch.zeros(5)) == 0
    for given, heard in ((nothing, False), (0.0, True)):
        problem = with_canaries(Silence(5, 3, gradient=given), axes, np.array([True, False]), nothing=given)
        sums = torch.stack([r.released for r in fn.simulate(problem, algorithm, rounds=9)])
        assert ((sums[1:] - axes[0]).norm(dim=1) > 0.05).all() == heard


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_canaries_come_after_the_clients_and_leave_them_alone(dtype):
    own = fn.random_quadratic(3, 4, parts=2, dtype=dtype)
    directions = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    problem = with_canaries(own, directions, np.array([True, False]), "replace_one", scale=10.0)
    assert (problem.dim, problem.num_clients, problem.tile) == (4, 5, own.tile)
    assert problem.client_sizes.tolist() == [2, 2, 2, 1, 1]
    x, ids = torch.ones(4, dtype=dtype), np.array([4, 0, 3, 2])
    rows, examples = torch.arange(16, dtype=dtype).reshape(4, 4), np.array([[0, -1], [1, -1], [0, -1], [0, 1]])
    for at, chosen in ((x, None), (rows, None), (rows, examples)):
        got = problem.grad(at, ids, chosen)
        assert got.dtype == dtype
        kept, theirs = [1, 3], None if chosen is None else chosen[[1, 3]]
        assert torch.equal(got[kept], own.grad(at if at.ndim == 1 else at[kept], ids[kept], theirs))
        torch.testing.assert_close(got[[0, 2]], (10 * torch.stack([-directions[1], directions[0]])).to(dtype))
    assert torch.equal(problem.grad(x, ids[[1, 3]]), own.grad(x, ids[[1, 3]]))
    problem.grad(x, np.array([3, 4])).zero_()  # the result is the caller's, the canaries stay
    assert problem.grad(x, np.array([3, 4])).abs().min() > 0
    assert problem.evaluate(x) == own.evaluate(x)
    assert torch.equal(problem.model(x), x) and torch.equal(problem.named(x)["x"], x)


# The statistics


@pytest.mark.parametrize(("k", "n"), [(0, 10), (3, 10), (10, 10), (17, 400)])
def test_clopper_pearson_is_scipys(k, n):
    exact = stats.binomtest(k, n).proportion_ci(0.98, method="exact")
    np.testing.assert_allclose(np.array(clopper_pearson(k, n, 0.01)), [exact.low, exact.high], rtol=1e-9)


def normal_scores(mu, n, seed):
    rng = np.random.default_rng(seed)
    present = rng.random(n) < 0.5
    return rng.standard_normal(n) + mu * present, present


def test_a_lower_bound_is_below_the_truth_and_grows_with_the_trials():
    truth = accounting.epsilon(accounting.Open((1.0,), (1.0,)), 1, DELTA)
    few, many = (lower_bound(*normal_scores(1.0, n, 0), DELTA, 0.999) for n in (200, 100_000))
    assert few < 0.6 < 1.6 < many < truth
    assert lower_bound(*normal_scores(0.0, 1000, 0), DELTA) < 0.1


def test_a_lower_bound_keeps_its_confidence():
    epsilon, wrong = 1.0, 0
    for seed in range(400):  # randomised response: the error rates say exactly ε
        rng = np.random.default_rng(seed)
        present = rng.random(200) < 0.5
        lied = rng.random(200) < 1 / (1 + math.exp(epsilon))
        wrong += lower_bound((present ^ lied).astype(float), present, 0.0, confidence=0.9) > epsilon
    assert wrong <= 40


def test_a_claimed_curve_is_kept_or_broken():
    def curve(mu):
        return [(e, math.exp(float(accounting.gaussian_log_delta(e, mu)))) for e in (0.0, 1.0, 2.0, 4.0)]

    assert all(curve_p_value(*normal_scores(1.7, 1000, seed), curve(1.7)) > 1e-3 for seed in range(20))
    scores, present = normal_scores(3.4, 1000, 0)
    assert curve_p_value(scores, present, curve(1.7)) < LEVEL
    assert curve_p_value(-scores, ~present, curve(1.7)) < LEVEL


@pytest.mark.parametrize("mu", [0.1, 1.0, 5.0])
def test_the_estimate_is_the_closed_form(mu):
    scores, present = normal_scores(mu, 400_000, 0)
    estimate, low = two_gaussians(7 * scores - 3, present, DELTA)
    assert math.exp(float(accounting.gaussian_log_delta(estimate, mu))) == pytest.approx(DELTA, rel=0.3)
    assert estimate * 0.8 < low < estimate


def test_the_lower_limit_of_the_estimate_keeps_its_confidence():
    truth = accounting.epsilon(accounting.Open((1.0,), (1.5,)), 1, DELTA)
    lows = [two_gaussians(*normal_scores(1.5, 100, seed), DELTA, confidence=0.9)[1] for seed in range(1000)]
    assert 60 < sum(low > truth for low in lows) < 140


def test_constant_scores_tell_nothing_or_everything():
    present = np.arange(40) % 2 == 0
    assert two_gaussians(np.ones(40), present, DELTA) == (0.0, 0.0)
    assert two_gaussians(present.astype(float), present, DELTA) == (math.inf, math.inf)
    assert two_gaussians(np.ones(40), np.ones(40, bool), DELTA) == (0.0, 0.0)


@pytest.mark.parametrize(
    "mechanism", [CENTRAL, replace(CENTRAL, adjacency="replace_one", noise_std=1.0), replace(SECAGG, num_clients=5)]
)
def test_what_is_expected_is_what_comes_of_ideal_trials(mechanism):
    n, rounds, mirrored = 40_000, 20, mechanism.adjacency == "replace_one"
    rng, p, m, std = np.random.default_rng(0), mechanism.p, mechanism.num_clients, mechanism.noise_std
    present, scores = rng.random(n) < 0.5, np.zeros(n)
    for _ in range(rounds):
        drawn, z = rng.random(n) < p, rng.standard_normal(n)
        message = drawn * np.where(present, 1.0, -1.0 if mirrored else 0.0)
        if mechanism.trust == "central":
            y = message + std * z
            scores += np.log(1 - p + p * np.exp((y - 0.5) / std**2))
            scores -= mirrored * np.log(1 - p + p * np.exp((-y - 0.5) / std**2))
        else:
            variance = std**2 * (1 + rng.binomial(m - 1, p, n))
            scores += drawn * (message + np.sqrt(variance) * z - 0.5) / variance
    expected = expected_estimate(mechanism, rounds, DELTA)
    assert two_gaussians(scores, present, DELTA)[0] == pytest.approx(expected, rel=0.06)
    assert expected < mechanism.epsilon(rounds, DELTA)


def test_one_run_without_delta_is_a_binomial_tail():
    assert one_run_p_value(100, 50, 40, 0.0, 0.0) == pytest.approx(stats.binom.sf(39, 50, 0.5))
    assert one_run_p_value(100, 50, 50, math.log(3), 0.0) == pytest.approx(0.75**50)
    assert one_run_p_value(100, 50, 0, 1.0, 0.0) == 1
    assert one_run_epsilon(100, 50, 50, 0.0, 0.75**50) == pytest.approx(math.log(3))
    assert one_run_epsilon(100, 50, 30, 0.0, 0.001) == 0


def test_one_run_pays_for_delta():
    q = 1 / (1 + math.exp(-1.0))
    assert one_run_p_value(7, 1, 1, 1.0, 0.01) == pytest.approx(q + 2 * 7 * 0.01 * (1 - q))
    two = max(2 * q * (1 - q), (1 - q * q) / 2)  # raised by one, or by two at half the price
    assert one_run_p_value(7, 2, 2, 1.0, 0.01) == pytest.approx(q * q + 2 * 7 * 0.01 * two)
    assert one_run_epsilon(200, 100, 95, 1e-4, 1e-3) < one_run_epsilon(200, 100, 95, 0.0, 1e-3)


def test_one_run_and_randomised_response():
    rng = np.random.default_rng(0)
    right = rng.binomial(200, 1 / (1 + math.exp(-2.0)), size=500)  # ε = 2, a guess for everyone
    p_values = np.array([one_run_p_value(200, 200, int(v), 2.0, 0.0) for v in right])
    assert (p_values < 0.05).mean() < 0.08
    assert all(one_run_p_value(200, 200, int(v), 0.5, 0.0) < 0.001 for v in right)


@pytest.mark.parametrize(
    ("shape", "p"), [((1, 300, 100), 0.25), ((40, 60, 1), 0.5), ((1, 40, 200), 0.02), ((5, 1, 99), 0.9)]
)
def test_coins_pass_for_coins(shape, p):
    values = [list(counts(np.random.default_rng(s).random(shape) < p, p).values()) for s in range(300)]
    assert np.min(values) > 1e-5
    assert (np.array(values) < 0.02).mean() < 0.05


def test_too_few_counts_tell_nothing():
    assert dispersion(np.full(29, 5), 20, 0.25) == 1
    assert dispersion(np.full(300, 1), 1, 0.5) == 1
    assert dispersion(np.full(300, 5), 20, 0.25) < LEVEL  # all the same, and as many as there should be
    assert dispersion(np.tile([0, 10], 150), 20, 0.25) < LEVEL


# The result, and mistakes


def test_a_verdict_has_its_reasons():
    audit = Audit("a test", 8.0, DELTA, 2.0, 7.5, 6.0, 7.6, {"noise level": 0.3}, 1000, 300, 1.0)
    assert audit.verdict == "consistent" and audit.reasons == ()
    for broken in (
        replace(audit, lower_bound=8.1),
        replace(audit, estimate_low=8.1),
        replace(audit, checks={"noise level": 1e-7}),
    ):
        assert broken.verdict == "violated" and len(broken.reasons) == 1
    assert replace(audit, estimate_low=8.1, expected=9.0).verdict == "consistent"


def test_the_report_says_what_each_number_is():
    audit = Audit("a test", math.inf, DELTA, 2.019, 7.5, 6.0, 7.6, {"noise level": 0.0}, 1000, 300, 1.0)
    text = audit.text()
    for part in ("violated", "the check of noise level fails", "ε ≥ 2.01", "proof strength", "ε ≈ 7.50", "not a bound"):
        assert part in text
    assert "can refute a claim, never prove it" in text
    assert max(map(len, text.splitlines())) <= 110
    facts = json.loads(json.dumps(audit.facts(), allow_nan=False))
    assert facts["claimed"] is None and facts["checks"] == {"noise level": 0.0} and facts["verdict"] == "violated"


def test_mistakes_are_told():
    with pytest.raises(fn.UserError, match="at least 40 canaries"):
        audit_mechanism(CENTRAL, 10, DELTA, trials=10)
    with pytest.raises(fn.UserError, match="rounds"):
        audit_mechanism(CENTRAL, 0, DELTA)
    with pytest.raises(fn.UserError, match="delta"):
        audit_mechanism(CENTRAL, 10, 1.0)
    with pytest.raises(fn.UserError, match="messages of length 1, but Clip21 bounds them by 0.5"):
        audit_mechanism(CENTRAL, 10, DELTA, algorithm=fn.clip21(tau=0.5))
    with pytest.raises(fn.UserError, match="give it grid_dim"):
        audit_mechanism(replace(CENTRAL, secure=True), 10, DELTA)
    with pytest.raises(fn.UserError, match="side_rounds"):
        audit_mechanism(CENTRAL, 10, DELTA, side_rounds=0)
    with pytest.raises(fn.UserError, match="at least 40 canaries"):
        audit_training(PROBLEM, fn.clip21(), None, fn.Privacy(epsilon=8.0), rounds=3, canaries=0)
    with pytest.raises(fn.UserError, match="rounds"):
        audit_training(PROBLEM, fn.clip21(), None, fn.Privacy(epsilon=8.0), rounds=0)
    with pytest.raises(fn.UserError, match="local_updates"):
        audit_training(PROBLEM, fn.clip21(initial_memory="local_updates"), None, fn.Privacy(epsilon=8.0), rounds=3)
    silence, here = Silence(4, 2), np.ones(3, bool)
    with pytest.raises(fn.UserError, match=r"directions \(m, 4\)"):
        with_canaries(silence, torch.ones(3, 5), here)
    with pytest.raises(fn.UserError, match="marks"):
        with_canaries(silence, torch.ones(2, 4), here)
    with pytest.raises(fn.UserError, match="adjacency"):
        with_canaries(silence, torch.ones(3, 4), here, "add_remove")
    with pytest.raises(fn.UserError, match="scale"):
        with_canaries(silence, torch.ones(3, 4), here, scale=0.0)
