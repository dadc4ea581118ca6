"""The noise-to-signal ratio is that of the noise really drawn; warnings come where they should, with right advice."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fednormec as fn
from fednormec.engine.planning import planned
from fednormec.privacy.asked import TRUSTS
from fednormec.privacy.mechanism import plan
from fednormec.privacy.outlook import ENOUGH, LITTLE, NOTHING, Outlook, notes, outlook

M, D, ROUNDS = 30, 40, 400
RULES = [fn.full(), fn.poisson(0.3), fn.fixed_size(7)]


def mechanism(**change):
    return fn.Mechanism(**{"num_clients": M, "participation": fn.full(), "noise_std": 1.7, "radius": 0.5, **change})


def is_the_ratio(drawn, ratio):
    """Accepts this root mean square within 4 %, and neither two thirds of it nor three halves."""
    found = math.sqrt(np.mean(np.square(drawn)))
    return [abs(found / (ratio * factor) - 1) < 0.04 for factor in (1, 2 / 3, 3 / 2)] == [True, False, False]


@pytest.mark.parametrize("trust", TRUSTS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_ratio_is_that_of_the_noise_drawn(trust, rule):
    one = mechanism(trust=trust, participation=rule)
    expected = rule.rate(M) * M
    drawn = [
        np.linalg.norm(one.noise(D, int(one.cohort(3, k).sending.sum()), 3, k)) / expected / one.radius
        for k in range(ROUNDS)
    ]
    assert is_the_ratio(drawn, one.noise_to_signal(D))


@pytest.mark.parametrize("trust", TRUSTS)
def test_the_ratio_is_that_of_the_noise_in_the_engine(trust):
    """The mean of what clients sent, with noise and without; no mean message is longer than the radius."""
    problem, method = fn.random_quadratic(12, D, seed=0), fn.clip21(tau=0.5, server_step=1e-300)
    noise = fn.Privacy(noise_std=1.7, trust=trust)
    noisy, plain = (list(fn.simulate(problem, method, privacy=p, rounds=100, seed=7)) for p in (noise, None))
    added = [float((a.released - b.released).norm()) / 12 / 0.5 for a, b in zip(noisy, plain, strict=True)]
    assert is_the_ratio(added, outlook(noisy[0].plan).per_round)
    assert all(float(r.released.norm()) / 12 <= 0.5 * (1 + 1e-9) for r in plain)


@given(
    st.sampled_from(TRUSTS), st.integers(2, 10**6), st.integers(1, 10**8), st.floats(1e-3, 1e3), st.floats(1e-6, 1e6),
    st.floats(1.01, 100.0),
)  # fmt: skip
def test_more_noise_and_parameters_raise_it_more_clients_lower_it_and_no_radius_matters(trust, m, d, std, radius, more):
    one = mechanism(num_clients=m, noise_std=std, trust=trust, radius=1.0)
    ratio = one.noise_to_signal(d)
    assert replace(one, radius=radius).noise_to_signal(d) == ratio
    assert replace(one, noise_std=std * more).noise_to_signal(d) == pytest.approx(ratio * more)
    assert one.noise_to_signal(4 * d) == pytest.approx(2 * ratio)
    fewer = 1 / 4 if trust == "central" else 1 / 2
    assert replace(one, num_clients=4 * m).noise_to_signal(d) == pytest.approx(fewer * ratio)


def test_messages_of_two_vectors_count_twice():
    problem = fn.random_quadratic(6, 5, seed=0)
    noise, local = fn.Privacy(noise_std=1.0), fn.gd(0.1)
    one, two = (planned(problem, method(local), fn.full(), noise, 9) for method in (fn.dp_fed_avg_clip, fn.dp_scaffold))
    assert (one.dim, two.dim) == (5, 10)
    assert (one.remembers, two.remembers) == (False, True)


@pytest.mark.parametrize("trust", TRUSTS)
def test_at_one_epsilon_the_ratio_over_all_rounds_does_not_depend_on_their_number(trust):
    few, many = (plan(fn.Privacy(8.0, trust=trust), 6, fn.full(), 1.0, 100, rounds) for rounds in (10, 160))
    assert outlook(many).over_rounds == pytest.approx(outlook(few).over_rounds, rel=1e-3)
    assert outlook(many).per_round == pytest.approx(4 * outlook(few).per_round, rel=1e-3)


# The warning


def test_it_comes_where_little_or_nothing_can_be_learnt():
    kinds = [
        Outlook(ratio * 5, 10, 25, "central").warning for ratio in (0.99 * LITTLE, LITTLE, 0.99 * NOTHING, NOTHING)
    ]
    assert [kind and kind.split()[0] for kind in kinds] == [None, "little", "little", "nothing"]
    assert all("\n" not in kind and kind.endswith(".") for kind in kinds if kind)


def test_a_server_memory_counts_16_rounds_at_most():
    assert Outlook(8.0, 10, 400, "central").warning is None
    kept = Outlook(8.0, 10, 400, "central", remembers=True)
    assert kept.decisive == 2.0 and kept.over_rounds == 0.4
    assert "fewer rounds" in kept.warning
    assert Outlook(8.0, 10, 9, "central", remembers=True).warning == Outlook(8.0, 10, 9, "central").warning


@given(st.integers(1, 10**6), st.floats(0.01, 100))
def test_of_the_parameters_625_count_at_most(dim, noise):
    """Beyond them only the noise on a coordinate matters."""
    found = Outlook(noise * math.sqrt(dim), dim, 9, "central").decisive
    assert found == pytest.approx(noise * math.sqrt(min(dim, 625)) / 3)


@pytest.mark.parametrize("trust", TRUSTS)
def test_its_advice_brings_the_ratio_to_where_it_says(trust):
    def at(clients):
        return outlook(plan(fn.Privacy(4.0, trust=trust), clients, fn.full(), 1.0, 20_000, 60))

    said = at(4).warning
    more = int(re.search(r"At the same ε, ([\d,]+) times the clients would make it 0.3,", said)[1].replace(",", ""))
    assert at(4 * more).decisive == pytest.approx(ENOUGH, rel=0.03)
    assert ('trust = "central"' in said) == (trust == "local")


def test_the_quickstart_has_none_and_three_clients_have_one():
    quickstart = plan(fn.Privacy(4.0), 500, fn.poisson(0.25), 1.0, 650, 60)
    assert notes(quickstart) == ["noise to signal: at least 0.47 in a round, 0.061 over all 60 rounds."]
    three = plan(fn.Privacy(8.0, trust="local"), 3, fn.full(), 1.0, 650, 60)
    assert [said.split(":")[0] for said in notes(three)] == ["noise to signal", "nothing can be learnt"]
    assert notes(None) == []


def test_noise_that_protects_nobody_is_labelled_in_every_sentence():
    asked = fn.Privacy(noise_std=1e4, noise_scale="total_norm")
    said = notes(plan(asked, 3, fn.full(), 1.0, 650, 4))
    assert len(said) == 2
    assert all(text.startswith("NOT PRIVATE: ") for text in said)


def test_python_finds_it_with_the_statement():
    problem = fn.random_quadratic(5, 3, seed=0)
    done = fn.train(problem, fn.clip21(), privacy=fn.Privacy(noise_std=100.0), rounds=4)
    found = done.statement.facts["noise_to_signal"]
    assert found["per_round"] == pytest.approx(100 * math.sqrt(3) / 5, rel=1e-6)
    assert found["over_rounds"] == pytest.approx(found["per_round"] / 2)
    assert found["warning"].startswith("nothing can be learnt")


@pytest.mark.parametrize(("method", "keeps"), [
    (fn.dp_fed_avg_clip, False), (fn.dp_fed_avg_normalized, False), (fn.fed_normec, True), (fn.centred, True),
    (fn.econtrol, True), (fn.dp_scaffold, True), (lambda local: fn.scaled(fn.dp_fed_avg_clip(local)), False),
])  # fmt: skip
def test_a_plan_knows_whether_noise_stays_in_the_direction(method, keeps):
    found = planned(fn.random_quadratic(5, 3), method(fn.gd(0.1)), fn.full(), fn.Privacy(noise_std=1.0), 9)
    assert found.remembers == keeps


@pytest.mark.parametrize("p, said", [(0.3, "only about 16% of the rounds will have a sum"), (0.95, None), (1.0, None)])
def test_rounds_that_will_have_no_sum_are_foreseen(p, said):
    """Five clients, of whom three are needed: binomially often that many are drawn."""
    asked = fn.Privacy(noise_std=1.0, trust="secagg", protocol=True, min_survivors=3)
    found = notes(plan(asked, 5, fn.poisson(p), 1.0, 10, 20))
    assert [one for one in found if "will have a sum" in one] == ([] if said is None else [found[-1]])
    assert said is None or found[-1].startswith(said)


def test_a_plan_without_a_round_is_refused():
    asked = fn.Privacy(noise_std=1.0, trust="secagg", protocol=True, min_survivors=3)
    for rule in (fn.poisson(0.01), fn.fixed_size(2)):
        with pytest.raises(fn.UserError, match="a round needs 3 senders"):
            plan(asked, 5, rule, 1.0, 10, 20)
