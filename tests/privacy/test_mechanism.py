"""One object is drawn from, adds noise and is accounted for: the three agree, and a run keeps to what was asked."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from normal_law import has_std
from scipy import stats

import fednormec as fn
from fednormec.core.participation import Participation
from fednormec.core.randomness import SecureSource, _keystream
from fednormec.privacy.accounting import Hidden
from fednormec.privacy.mechanism import plan
from fednormec.privacy.statement import state

M, D, TAU, STD = 12, 20, 0.5, 1.3
PROBLEM = fn.random_quadratic(M, D, seed=0)
STILL = fn.clip21(tau=TAU, server_step=1e-300)  # x does not move, so that a run without privacy sends the same
EVEN = Participation("every other client", lambda m: 0.5, lambda m, source: np.arange(m) % 2 == 0, "advance")
NAN, INF = math.nan, math.inf


def run(privacy, participation=None, rounds=10, algorithm=STILL, **more):
    return list(fn.simulate(PROBLEM, algorithm, participation, privacy, rounds=rounds, **more))


def planned(participation=None, rounds=300, clients=20, dim=D, **asked):
    return plan(fn.Privacy(**asked), clients, participation or fn.poisson(0.25), 1.0, dim, rounds)


# What is refused.


@pytest.mark.parametrize(("asked", "named"), [
    *(({"epsilon": 1.0, "delta": bad}, "delta") for bad in (0, 1, -1, NAN, 2)),
    *(({"epsilon": 1.0, "delta": bad}, "delta must be at least 1e-300, not ") for bad in (1e-320, 9e-301)),
    *(({"epsilon": bad}, "epsilon") for bad in (0, -1, INF, NAN)),
    *(({"noise_std": bad}, "noise_std") for bad in (0, -1, INF, NAN)),
    ({}, "epsilon .* or noise_std"),
    ({"noise_std": 1.0, "colluders": M}, "colluders"),
    ({"noise_std": 1.0, "colluders": -1}, "colluders"),
    ({"noise_std": 1.0, "trust": "secagg", "min_cohort": 0}, "min_cohort"),
    ({"noise_std": 1.0, "trust": "secagg", "min_cohort": M + 1}, "min_cohort"),
    ({"noise_std": 1.0, "trust": "central", "min_cohort": 2}, "min_cohort belongs to trust = 'secagg'"),
    ({"noise_std": 1.0, "trust": "local", "min_cohort": 2}, "min_cohort belongs to trust = 'secagg'"),
    *(({"noise_std": 1.0, "tuning_runs": bad}, "tuning_runs") for bad in (0, -1)),
    ({"noise_std": 1.0, "trust": "shuffle"}, "trust"),
    ({"noise_std": 1.0, "adjacency": "add_remove"}, "adjacency"),
    ({"noise_std": 1.0, "calibration": "rough"}, "calibration"),
    ({"noise_std": 1.0, "noise_scale": "laplace"}, "noise_scale"),
    ({"noise_std": 1.0, "randomness": "dice"}, "randomness"),
    ({"noise_std": 1.0, "calibration": "paper"}, "'paper'"),
    ({"noise_std": 1.0, "epsilon": 1.0, "calibration": "paper"}, "'paper'"),
    ({"epsilon": 1.0, "noise_scale": "total_norm"}, "'total_norm'"),
])  # fmt: skip
def test_bad_wishes_are_refused_in_one_sentence(asked, named):
    with pytest.raises(fn.UserError, match=named) as said:
        fn.simulate(PROBLEM, STILL, None, fn.Privacy(**asked), rounds=3)
    assert "\n" not in str(said.value)
    assert str(said.value).endswith(".")


@pytest.mark.parametrize(("change", "named"), [
    *(({"noise_std": bad}, "noise_std") for bad in (0, -1, NAN, INF)),
    *(({"radius": bad}, "radius") for bad in (0, -1, NAN, INF)),
    ({"num_clients": 1, "trust": "secagg"}, "at least 2 clients"),
    ({"num_clients": 0}, "number of clients"),
    ({"participation": fn.fixed_size(M + 1)}, "cannot be drawn"),
    ({"rounding": -1e-9}, "rounding"),
])  # fmt: skip
def test_bad_mechanisms_are_refused(change, named):
    with pytest.raises(fn.UserError, match=named):
        fn.Mechanism(**{"num_clients": M, "participation": fn.full(), "noise_std": 1.0, **change})


@pytest.mark.parametrize(("eps", "at", "rounds"), [(0, 1e-5, 1), (NAN, 1e-5, 1), (1, 0, 1), (1, 1, 1), (1, 1e-5, 0)])
def test_bad_targets_are_refused(eps, at, rounds):
    with pytest.raises(fn.UserError):
        fn.Mechanism(M, fn.full(), 1.0).calibrate(eps, at, rounds)


# Sampler, noise and accountant are one.


@pytest.mark.long
@pytest.mark.parametrize("trust", ["central", "secagg", "local"])
@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_cohorts_and_noise_of_a_run_are_what_was_accounted_for(trust, adjacency):
    p, rounds = 0.3, 300
    noisy = run(fn.Privacy(noise_std=STD, trust=trust, adjacency=adjacency), fn.poisson(p), rounds, seed=7)
    plain = run(None, fn.poisson(p), rounds, seed=7)
    mechanism = noisy[0].plan.mechanism
    release, shift = mechanism.release(), (2 if adjacency == "replace_one" else 1) * TAU
    table = np.stack([r.cohort.sending for r in noisy])
    sent = table.sum(1)

    assert mechanism.p == p
    assert np.abs(table.mean(0) - p).max() < 5 * math.sqrt(p * (1 - p) / rounds)
    counts, expected = np.bincount(sent, minlength=M + 1), stats.binom.pmf(range(M + 1), M, p) * rounds
    keep = expected > 5
    assert ((counts - expected)[keep] ** 2 / expected[keep]).sum() < stats.chi2.ppf(1 - 1e-6, keep.sum())
    for pairs in (np.corrcoef(table.T)[~np.eye(M, dtype=bool)],  # of clients, and of a client with itself a round later
                  [np.corrcoef(table[1:, i], table[:-1, i])[0, 1] for i in range(M)]):  # fmt: skip
        assert np.abs(pairs).max() < 6 / math.sqrt(rounds)

    noise = np.stack([(a.released - b.released).numpy() for a, b in zip(noisy, plain, strict=True)])
    if trust == "central":
        assert isinstance(release, Hidden)
        assert release.p == p
        assert release.mirrored == (adjacency == "replace_one")
        assert (sent == 0).any()
        for part in (noise, noise[sent == 0]):
            assert has_std(part, TAU / release.mu)
    else:
        assert not noise[sent == 0].any()
        assert sum(release.weights) == pytest.approx(p)
        by_size = {n: noise[sent == n] for n in range(1, M + 1) if (sent == n).any()}
    if trust == "local":  # each message's noise hides that message
        assert has_std(np.concatenate([part / math.sqrt(n) for n, part in by_size.items()]), shift / release.mus[0])
    if trust == "secagg":  # the j-th level is the one of j + 1 senders
        assert has_std(np.concatenate([part * release.mus[n - 1] for n, part in by_size.items()]), shift)
        for n, weight in enumerate(release.weights, 1):
            seen = table[sent == n].sum() / M  # rounds with a given client in a cohort of n, the mean over clients
            assert abs(seen - weight * rounds) < 6 * math.sqrt(weight * rounds) + 1


@pytest.mark.parametrize(
    "participation", [fn.full(), fn.fixed_size(5), fn.fixed_size(5, "sleep"), EVEN, fn.poisson(1.0)]
)
def test_only_independent_draws_amplify(participation):
    """Everything else is accounted as if everyone were always drawn: the closed form of the Gaussian."""
    (r, *_, last) = run(fn.Privacy(noise_std=STD), participation)
    assert r.plan.mechanism.p == 1
    assert last.epsilon == pytest.approx(get_epsilon_gaussian(STD / math.sqrt(10), 1e-5), rel=1e-6)
    least = {"full": M, "fixed_size(5)": 5, "poisson(1)": M}.get(participation.name, 1)
    for trust, std in (("local", STD), ("secagg", STD * math.sqrt(least))):
        other = fn.Mechanism(M, participation, STD, trust=trust)
        assert other.epsilon(10, 1e-5) == pytest.approx(get_epsilon_gaussian(std / math.sqrt(10), 1e-5), rel=1e-6)
    colluded = fn.Mechanism(M, participation, STD, trust="secagg", colluders=3).release()
    assert colluded.mus == pytest.approx([1 / (STD * math.sqrt(max(1, least - 3)))])


def test_noise_of_a_fixed_cohort_under_secure_aggregation():
    noisy, plain = (run(a, fn.fixed_size(5), 60) for a in (fn.Privacy(noise_std=STD, trust="secagg"), None))
    noise = np.stack([(a.released - b.released).numpy() for a, b in zip(noisy, plain, strict=True)])
    assert has_std(noise, TAU / noisy[0].plan.mechanism.release().mus[0])


@pytest.mark.long
def test_small_cohorts_are_called_off():
    p, least, rounds = 0.3, 4, 300
    some = run(fn.Privacy(noise_std=STD, trust="secagg", min_cohort=least), fn.poisson(p), rounds)
    everyone = run(fn.Privacy(noise_std=STD, trust="secagg"), fn.poisson(p), rounds)
    off = np.array([r.sent < least for r in everyone])
    assert 0 < off.sum() < rounds
    for a, b in zip(some, everyone, strict=True):
        assert a.sent == (b.sent if b.sent >= least else 0)
        assert a.sent or not (a.released.any() or a.computed)
    first = int(off.argmax())  # from then on memories differ: nobody computed in that round
    assert first > 0 and all(
        torch.equal(a.released, b.released) for a, b in zip(some[:first], everyone[:first], strict=True)
    )
    release = some[0].plan.mechanism.release()
    senders = np.arange(least, M + 1)
    assert release.weights == pytest.approx(p * stats.binom.pmf(senders - 1, M - 1, p), rel=1e-9)
    assert release.mus == pytest.approx(1 / (STD * np.sqrt(senders)))
    assert abs(off.mean() - stats.binom.cdf(least - 1, M, p)) < 5 * math.sqrt(0.25 / rounds)
    sleeping = run(fn.Privacy(noise_std=STD, trust="secagg", min_cohort=least), fn.poisson(p, "sleep"), 60)
    assert [r.sent for r in sleeping] == [r.sent for r in some[:60]]


def test_colluders_help_a_round_past_the_floor():
    release = fn.Mechanism(M, fn.poisson(0.3), 1.0, trust="secagg", colluders=2, min_cohort=5).release()
    honest = np.arange(3, M - 1)  # of 10, the client included: two noises fewer than senders
    assert release.mus == pytest.approx(1 / np.sqrt(honest))
    assert release.weights == pytest.approx(0.3 * stats.binom.pmf(honest - 1, M - 3, 0.3), rel=1e-9)


@pytest.mark.parametrize(("clients", "p"), [(1000, 0.25), (100_000, 0.01)])
def test_many_cohort_sizes_are_joined_on_the_safe_side(clients, p):
    release = fn.Mechanism(clients, fn.poisson(p), 1.0, trust="secagg").release()
    assert len(release.mus) <= 200
    assert sum(release.weights) + release.unsure == pytest.approx(p, rel=1e-12)
    assert 0 < release.unsure < 1e-18
    weights, levels = np.array(release.weights), 1 / np.array(release.mus) ** 2  # how many noises hide a message
    for senders in np.linspace(levels[0], levels[-1], 97).round():  # as often as in truth, or oftener, at most so many
        truth = p * stats.binom.cdf(senders - 1, clients - 1, p)
        assert weights[levels < senders + 0.5].sum() + release.unsure >= truth * (1 - 1e-9)


# The plan.


@pytest.mark.parametrize("trust", ["central", "secagg", "local"])
def test_a_budget_alone_is_met_by_calibration(trust):
    rounds = run(fn.Privacy(epsilon=5.0, trust=trust), fn.poisson(0.4), 12)
    assert len(rounds) == 12
    assert 0.998 * 5 < rounds[-1].epsilon <= 5
    spent = [r.epsilon for r in rounds]
    assert spent == sorted(spent)


@pytest.mark.long
def test_a_budget_with_noise_ends_the_run_in_time():
    paid, asked = [], fn.Privacy(epsilon=6.0, noise_std=2.0)
    rounds = run(asked, fn.poisson(0.4), 100, before_release=lambda number, plan: paid.append(number))
    last = len(rounds)
    assert 1 < last < 100
    assert paid == list(range(1, last + 1)) == [r.number for r in rounds]
    mechanism = rounds[0].plan.mechanism
    assert mechanism.noise_std == 2
    assert mechanism.epsilon(last, 1e-5) == rounds[-1].epsilon <= 6 < mechanism.epsilon(last + 1, 1e-5)
    trained = fn.train(PROBLEM, STILL, fn.poisson(0.4), asked, rounds=100)
    assert len(trained.history) == last
    assert trained.statement.epsilon == trained.history[-1]["epsilon"] == rounds[-1].epsilon
    assert len(run(fn.Privacy(noise_std=2.0), fn.poisson(0.4), 100)) == 100  # without a budget


@pytest.mark.parametrize("tuning_runs", [1, 3])
def test_too_small_a_budget_is_said_before_any_round(tuning_runs):
    asked, paid = fn.Privacy(epsilon=1.0, noise_std=1.0, tuning_runs=tuning_runs), []
    with pytest.raises(fn.UserError, match="does not pay for one round"):
        fn.simulate(PROBLEM, STILL, None, asked, rounds=5, before_release=lambda *args: paid.append(args))
    assert not paid


def test_tuning_runs_are_covered():
    one, four = (planned(epsilon=8.0, tuning_runs=k, rounds=50) for k in (1, 4))
    assert four.mechanism.noise_std == one.mechanism.calibrate(8.0, 1e-5, 200).noise_std > one.mechanism.noise_std
    assert four.epsilon(50) == four.mechanism.epsilon(200, 1e-5) <= 8
    assert four.epsilon(1) == four.mechanism.epsilon(151, 1e-5)
    limited = planned(epsilon=8.0, noise_std=four.mechanism.noise_std * 0.99, tuning_runs=4, rounds=50)
    assert limited.rounds == limited.mechanism.affordable(200, 8.0, 1e-5) - 150 < 50
    assert "150 rounds of other runs" in " ".join(state(four, 50).text.split())


@pytest.mark.parametrize(("p", "eps"), [(0.25, 13.70), (1.0, 12.27)])
def test_the_paper_s_calibration_reports_what_it_really_is(p, eps):
    done = planned(fn.poisson(p), epsilon=8.0, calibration="paper")
    assert done.mechanism.noise_std == pytest.approx(p * math.sqrt(300 * math.log(1e5)) / 8, rel=1e-12)
    assert (done.rounds, done.budget, done.nominal) == (300, None, 8.0)
    statement = state(done, 300)
    assert statement.epsilon == pytest.approx(eps, rel=1e-3)
    assert statement.headline.startswith("ε ≤ 1")
    assert "the paper's formula was asked for ε = 8" in statement.headline
    assert len(run(fn.Privacy(epsilon=0.1, calibration="paper"), fn.poisson(p), 10)) == 10


@pytest.mark.parametrize(("asked", "std"), [
    ({"noise_std": 2.0}, 2.0),
    ({"epsilon": 8.0, "calibration": "paper"}, math.sqrt(30 * math.log(1e5)) / 8),
])  # fmt: skip
@pytest.mark.parametrize(("algorithm", "dim"), [(STILL, D), (fn.dp_scaffold(fn.gd(0.1), tau=TAU), 2 * D)])
def test_total_norm_is_not_private(asked, std, algorithm, dim):
    trained = fn.train(PROBLEM, algorithm, None, fn.Privacy(noise_scale="total_norm", **asked), rounds=30)
    used = trained.statement.facts["noise_std"]
    assert used == pytest.approx(std / math.sqrt(dim))
    assert trained.statement.headline.startswith("NOT PRIVATE: ")
    true = get_epsilon_gaussian(used / math.sqrt(30), 1e-5)
    assert trained.statement.epsilon == pytest.approx(true, rel=1e-6)
    printed = float(trained.statement.headline.partition("ε ≤ ")[2].split()[0])
    assert true * (1 - 1e-9) <= printed <= true * 1.02
    assert trained.statement.facts["private"] is False


def test_total_norm_noise_is_what_is_added():
    noisy, plain = (run(a, None, 60) for a in (fn.Privacy(noise_std=2.0, noise_scale="total_norm"), None))
    noise = np.stack([(a.released - b.released).numpy() for a, b in zip(noisy, plain, strict=True)])
    assert has_std(noise, TAU / noisy[0].plan.mechanism.release().mus[0])
    assert has_std(noise, TAU * 2 / math.sqrt(D))


def test_the_statement_says_what_it_rests_on():
    seeded, secure = (state(planned(epsilon=8.0, randomness=r), 300) for r in ("seeded", "secure"))
    assert "knows the seed" in seeded.text
    assert "seed" not in secure.text
    assert "it should be far smaller" not in seeded.text
    assert "it should be far smaller" in state(planned(epsilon=8.0, delta=1 / 20), 300).text  # δ = 1/M
    assert "it should be far smaller" not in state(planned(epsilon=8.0, delta=1 / 21), 300).text
    assert seeded.headline == "ε ≤ 8.00 at δ = 1e-05 for each client (central, zero_out)"
    for words in ("each client independently with probability 0.25", "all its messages become 0", "tuning_runs"):
        assert words in " ".join(seeded.text.split())
    fixed = state(planned(fn.fixed_size(5), noise_std=9.0, trust="secagg", adjacency="replace_one", colluders=2), 300)
    for words in ("no amplification", "2 clients may collude", "any other data", "secure aggregation"):
        assert words in " ".join(fixed.text.split())


STAGED = {"noise_std": 3.0, "trust": "secagg", "protocol": True}


@pytest.mark.parametrize("more, alone", [({"min_survivors": 6}, True), ({"min_survivors": 9}, False)])
def test_the_statement_of_secure_aggregation_takes_off_the_colluders(more, alone):
    said = " ".join(state(planned(fn.full(), 10, **STAGED, **more, colluders=5), 10).text.split())
    left = more["min_survivors"] - 5
    assert f"with the messages of 5 colluders taken off, over {left} or more" in said
    assert ("which can be one message with its own noise" in said) == alone
    without = " ".join(state(planned(fn.full(), 10, **STAGED, **more), 10).text.split())
    assert "taken off" not in without and "secure aggregation itself" not in without


def test_a_simulation_of_secure_aggregation_says_that_it_is_one():
    said = " ".join(state(planned(fn.full(), 10, noise_std=3.0, trust="secagg"), 10).text.split())
    assert "not covered secure aggregation itself: the program that ran saw every message" in said


@pytest.mark.parametrize("asked", [STAGED, {"noise_std": 30.0, "trust": "local"}, {"noise_std": 30.0}])
def test_one_program_that_is_everybody_says_so_where_nobody_is_trusted(asked):
    """Its keys are not the clients' alone: that is taken to be so in a federation only."""
    whole, staged = planned(fn.full(), 10, **asked), "protocol" in asked
    here, apart = (" ".join(state(whole, 10, one_program=one).text.split()) for one in (True, False))
    assert ("not covered whoever runs the program: it is all clients and the server" in here) == ("trust" in asked)
    assert "whoever runs the program" not in apart
    assert "what secure aggregation takes to be so" not in here
    assert ("what secure aggregation takes to be so" in apart) == staged


@pytest.mark.parametrize("asked", [STAGED, {"noise_std": 30.0, "trust": "local", "draws": "server"}])
@pytest.mark.parametrize("rounds", [0, 4])
def test_a_run_under_a_server_that_nobody_trusts_counts_all_rounds_that_were_agreed_on(asked, rounds):
    """Such a server can end it when it has seen what it wants: no number of rounds is fixed beforehand but all."""
    whole = planned(fn.full(), 10, **asked)
    early, done = state(whole, rounds), state(whole, 10)
    assert early.epsilon == done.epsilon == whole.epsilon(10) > whole.epsilon(rounds)
    assert early.facts["rounds"] == rounds and early.facts["rounds_counted"] == 10
    assert "is up to a server that nobody trusts" in " ".join(early.text.split())
    assert "is up to a server that nobody trusts" not in " ".join(done.text.split())
    assert state(planned(fn.full(), 10, noise_std=3.0), rounds).facts["rounds_counted"] == rounds


@pytest.mark.parametrize("trust, drawn_at_once", [("central", 1), ("secagg", 20), ("local", 20)])
def test_noise_that_is_too_much_for_a_grid_is_said_with_how_much_is_not(trust, drawn_at_once):
    most = 2.0**20 / math.sqrt(drawn_at_once)
    planned(fn.full(), noise="discrete", noise_std=0.999 * most, trust=trust)
    with pytest.raises(fn.UserError, match=f"where up to {most:.2g} can be drawn".replace("+", r"\+")):
        planned(fn.full(), noise="discrete", noise_std=1.001 * most, trust=trust)


def test_epsilon_does_not_depend_on_steps():
    def methods():
        for alpha, beta, step, server_step in ((0.01, 0.1, 0.01, 0.01), (10.0, 0.1, 0.2, 0.01), (0.01, 1.0, 0.01, 1.0)):
            yield fn.fed_normec(fn.gd(step), alpha=alpha, beta=beta, server_step=server_step)
        yield from (fn.clip21(tau=tau, server_step=0.1) for tau in (0.01, 100.0))

    found = {fn.train(PROBLEM, a, fn.poisson(0.5), fn.Privacy(noise_std=4.0), rounds=2).statement.epsilon
             for a in methods()}  # fmt: skip
    assert len(found) == 1


@pytest.mark.parametrize("asked", [
    {"noise_std": 20.0}, {"noise_std": 5.0, "trust": "secagg"}, {"noise_std": 30.0, "trust": "local", "tuning_runs": 2}
])  # fmt: skip
def test_what_is_said_to_be_spent_is_never_too_little(asked):
    done = planned(rounds=5003, **asked)
    numbers = [1, 2, 500, 999, 1000, 1001, 1999, 2000, 2001, 2500, 2999, 3001, 4444, 4999, 5000, 5001, 5002, 5003]
    said = [done.spent(k) for k in numbers]
    for k, value in zip(numbers, said, strict=True):
        assert done.epsilon(k) <= value <= 1.01 * done.epsilon(k)
    assert said == sorted(said)
    assert said[-1] == done.epsilon(5003)
    assert [done.spent(k) == done.epsilon(k) for k in (1, 700, 1999)] == [True] * 3


def test_a_long_run_that_protects_nobody_is_accounted_for_a_few_hundred_times():
    done = planned(rounds=25_200, noise_std=1.0, delta=1e-5, trust="local", noise_scale="total_norm")
    asked = set()
    counting = replace(done, mechanism=Counting(asked))
    for k in range(1, 25_201):
        counting.spent(k)
    assert len(asked) < 400 and all(any(k <= at <= 1.05 * k for at in asked) for k in range(1, 25_201, 500))


class Counting:
    """A mechanism that only notes for how many rounds it was asked."""

    def __init__(self, asked):
        self.epsilon = lambda rounds, delta: asked.add(rounds) or float(rounds)


# Randomness for deployment.


@pytest.mark.long
def test_secure_runs_repeat_nothing_and_follow_the_same_law():
    p, rounds = 0.3, 300
    x0 = torch.zeros(D, dtype=torch.float64)
    # every client's gradient is 0 at x0: what is released is noise alone
    still = fn.Quadratic(torch.eye(D, dtype=x0.dtype).expand(M, 1, D, D), x0.expand(M, 1, D))
    runs = [
        list(fn.simulate(still, STILL, fn.poisson(p), asked, rounds=rounds, seed=7, x0=x0))
        for asked in [fn.Privacy(noise_std=STD, randomness="secure")] * 2 + [fn.Privacy(noise_std=STD)] * 2
    ]
    tables = [np.stack([r.cohort.sending for r in one]) for one in runs]
    noises = [torch.stack([r.released for r in one]).numpy() for one in runs]
    assert (tables[0] != tables[1]).any(axis=1).mean() > 0.9
    assert not {row.tobytes() for row in noises[0] if row.any()} & {row.tobytes() for row in noises[1]}
    assert np.array_equal(tables[2], tables[3])
    assert np.array_equal(noises[2], noises[3])
    for table, noise in zip(tables[:2], noises[:2], strict=True):
        assert has_std(noise, STD * TAU)
        assert stats.kstest(noise.ravel() / (STD * TAU), "norm").pvalue > 1e-6
        assert np.abs(np.corrcoef(noise.T)[~np.eye(D, dtype=bool)]).max() < 6 / math.sqrt(rounds)
        assert stats.binomtest(int(table.sum()), table.size, p).pvalue > 1e-6
        assert np.abs(np.corrcoef(table.T)[~np.eye(M, dtype=bool)]).max() < 6 / math.sqrt(rounds)


def test_the_key_stream_is_aes_256_in_counter_mode():
    assert _keystream(2, bytes(32)).tobytes().hex() == "dc95c078a2408989ad48a21492842087"  # AES-256 of 0 under key 0
    key = bytes(range(32))
    blocks = b"".join(i.to_bytes(16, "big") for i in range(4))
    ecb = Cipher(algorithms.AES256(key), modes.ECB()).encryptor().update(blocks)
    assert _keystream(7, key).tobytes() == ecb[:56]
    assert _keystream(1, key).tobytes() == ecb[:8]
    assert not np.isin(_keystream(1000), _keystream(1000)).any()


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 10_001])
def test_secure_numbers_come_in_every_size(size):
    source = SecureSource()
    uniform, normal = source.random(size), source.standard_normal(size)
    assert uniform.shape == normal.shape == (size,)
    assert ((uniform >= 0) & (uniform < 1)).all()
    assert np.isfinite(normal).all()
    if size > 1000:
        assert stats.kstest(uniform, "uniform").pvalue > 1e-6
        assert stats.kstest(normal, "norm").pvalue > 1e-6
        assert has_std(normal, 1.0)
        assert abs(np.corrcoef(normal[: size // 2], normal[-(size // 2) :])[0, 1]) < 6 / math.sqrt(size // 2)


@pytest.mark.parametrize("word", [0, 2**64 - 1])
def test_secure_numbers_hold_at_the_ends(word, monkeypatch):
    monkeypatch.setattr("fednormec.core.randomness._keystream", lambda words: np.full(words, word, np.uint64))
    assert 0 <= SecureSource().random(3).max() < 1
    assert np.isfinite(SecureSource().standard_normal(3)).all()
