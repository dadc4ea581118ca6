"""What has left a client's data counts under every agreement: messages, ε, and the budget that is left."""

import json
import math
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
from command import Command
from federated import LOCAL, NAMES, ROUNDS, Network, config, data, party, request_for
from hypothesis import given
from hypothesis import strategies as st
from masked import settings
from scipy.special import log_ndtr

from fednormec.config.schema import dump
from fednormec.data import Examples
from fednormec.engine.planning import planned
from fednormec.errors import UserError
from fednormec.federation.agreement import Federation, for_client
from fednormec.federation.client import answering, releases_of
from fednormec.federation.messages import DONE, REFUSED
from fednormec.federation.provision import make
from fednormec.federation.releases import Releases

SECURE = {"noise_std": 4.0, "delta": 1e-5, "trust": "local", "randomness": "secure"}


def agreement(seed: int = 3, **privacy: object) -> Federation:
    run = {"rounds": ROUNDS, "seed": seed, "dtype": "float64"}
    asked = {key: value for key, value in (SECURE | privacy).items() if value is not None}
    return party(config(privacy=asked, run=run), 0)


def sent(federation: Federation, folder: Path, rounds: int, budget: float | None = None) -> list[str]:
    """Statuses of so many new requests."""
    network = Network.__new__(Network)  # its bytes are not needed: the client is asked itself
    network.run, network.server = f"a{federation.experiment.run.seed}", federation
    answer = answering(federation, 0, folder, budget=budget)
    return [answer(request_for(network, 1, 0, x=float(i + 1))).status for i in range(rounds)]


def gaussian(mu: float, delta: float) -> float:
    """ε of a Gaussian of shift/std mu, by bisection of its δ: the closed form, nothing of ours."""

    def profile(epsilon: float) -> float:
        return math.exp(log_ndtr(mu / 2 - epsilon / mu)) - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))

    low, high = 0.0, 200.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if profile(middle) > delta else (low, middle)
    return high


def test_noise_is_calibrated_once_and_not_with_every_message(tmp_path, monkeypatch):
    """Searching for the noise of an ε takes a hundred times as long as a small message."""
    plans, federation = list[int](), agreement(noise_std=None, epsilon=9.0)
    monkeypatch.setattr("fednormec.federation.agreement.planned", lambda *given: plans.append(1) or planned(*given))
    assert sent(federation, tmp_path, ROUNDS) == [DONE] * ROUNDS and len(plans) == 1


def test_another_seed_buys_no_more_messages(tmp_path):
    """It is another agreement about the same data, which promises as much, and that much is spent."""
    assert sent(agreement(3), tmp_path, ROUNDS + 1) == [DONE] * ROUNDS + [REFUSED]
    for seed in (4, 5):
        assert sent(agreement(seed), tmp_path, ROUNDS) == [REFUSED] * ROUNDS
        assert releases_of(agreement(seed), tmp_path).count() == 0
    assert releases_of(agreement(4), tmp_path).before() == ROUNDS


def test_half_a_budget_that_was_spent_leaves_half(tmp_path):
    assert sent(agreement(3), tmp_path, 2) == [DONE] * 2
    assert sent(agreement(4), tmp_path, ROUNDS) == [DONE] * (ROUNDS - 2) + [REFUSED] * 2
    with_less_noise = agreement(5, noise_std=2.0)  # each of the 6 messages above cost a quarter of one of these
    assert releases_of(with_less_noise, tmp_path).left() == ROUNDS - 2  # 6 - 6/4, rounded down


@pytest.mark.parametrize("before", [{}, {"privacy": LOCAL | {"noise_std": 0.01}}, {"privacy": {"noise_std": 1.0}}])
@pytest.mark.parametrize("sends", [True, False])
def test_a_message_of_another_agreement_does_not_leave(tmp_path, before, sends):
    """Whatever the server asks for in the words of the other one: it is computed anew, with the noise of this one."""
    lax, strict = party(config(**before), 0), agreement(noise_std=100.0)
    network = Network.__new__(Network)
    network.run, network.server = "a", lax
    asked = request_for(network, 1, 0)
    answering(lax, 0, tmp_path)(asked._replace(sends=sends))
    (tmp_path / "releases.json").unlink(missing_ok=True)
    reply = answering(strict, 0, tmp_path)(asked._replace(agreed=strict.agreed))
    assert reply.status == DONE and float(reply.message.norm()) > 50
    assert releases_of(strict, tmp_path).count() == 1


def test_epsilon_over_agreements_is_that_of_one_gaussian(tmp_path):
    sent(agreement(3), tmp_path, 4)
    released = releases_of(agreement(4, noise_std=7.0), tmp_path)
    assert released.epsilon() == pytest.approx(gaussian(2 / 4.0, 1e-5), rel=1e-6)
    both = math.sqrt(4 / 4.0**2 + 3 / 7.0**2)
    assert released.epsilon(3) == pytest.approx(gaussian(both, 1e-5), rel=1e-6)


@given(
    before=st.integers(0, 9), noise=st.floats(0.5, 20), other=st.floats(0.5, 20),
    budget=st.floats(0.05, 30) | st.none(), adjacency=st.sampled_from(["zero_out", "replace_one"]),
)  # fmt: skip
def test_what_is_left_never_takes_epsilon_beyond_the_budget(tmp_path_factory, before, noise, other, budget, adjacency):
    folder, shift = tmp_path_factory.mktemp("client"), 2 if adjacency == "replace_one" else 1
    if before:
        stored = {"another": {"releases": before, "still_here": "", "std": other}}
        (folder / "releases.json").write_text(json.dumps(stored))
    released = releases_of(agreement(noise_std=noise, adjacency=adjacency), folder, budget)
    limit = gaussian(shift * math.sqrt(ROUNDS) / noise, 1e-5) if budget is None else budget

    def all_together(more: int) -> float:
        return gaussian(shift * math.sqrt(before / other**2 + more / noise**2), 1e-5)

    left = released.left()
    assert left == 0 or all_together(left) <= limit * (1 + 1e-6)
    assert left == ROUNDS or all_together(left + 1) > limit * (1 - 1e-6)
    assert (released.trouble() is None) == (left == ROUNDS or (budget is not None and left > 0))


@pytest.mark.parametrize("adjacency, shift", [("zero_out", 1), ("replace_one", 2)])
@pytest.mark.parametrize("before", ["zero_out", "replace_one"])
def test_what_left_counts_under_the_neighbours_of_now(tmp_path, before, adjacency, shift):
    """A message that hides the absence of a client hides less of what its data are."""
    assert sent(agreement(3, adjacency=before), tmp_path, 4) == [DONE] * 4
    released = releases_of(agreement(4, adjacency=adjacency, noise_std=7.0), tmp_path)
    both = shift * math.sqrt(4 / 4.0**2 + 3 / 7.0**2)
    assert released.epsilon() == pytest.approx(gaussian(shift * 2 / 4.0, 1e-5), rel=1e-6)
    assert released.epsilon(3) == pytest.approx(gaussian(both, 1e-5), rel=1e-6)


@pytest.mark.parametrize(
    "now, noises",
    [({"trust": "local", "randomness": "secure"}, 1), ({"trust": "secagg", "min_survivors": 4, "colluders": 3}, 1),
     ({"trust": "secagg", "min_survivors": 4, "colluders": 2}, 4), ({"trust": "secagg", "min_survivors": 2}, 4)],
)  # fmt: skip
def test_what_left_in_secure_aggregation_counts_with_the_noise_that_hides_it_from_those_of_now(tmp_path, now, noises):
    """Of 6 of whom 2 may collude: more colluders may break it, and under local trust nobody relies on it."""
    stored = {"releases": 5, "still_here": "", "std": 3.0, "noises": 4, "colluders": 2}
    asked = settings(tmp_path, privacy={"noise_std": 4.0, **now})
    federation = for_client(asked, NAMES[0], Examples(*data()[0]))
    home = tmp_path / "fed" / "clients" / NAMES[0]
    (home / "releases.json").write_text(json.dumps({"another": stored}))
    released = releases_of(federation, home)
    assert released.epsilon() == pytest.approx(gaussian(math.sqrt(5 / (noises * 3.0**2)), 1e-5), rel=1e-6)
    own = 1 if now["trust"] == "local" else now["min_survivors"] - now.get("colluders", 0)
    both = math.sqrt(5 / (noises * 3.0**2) + 2 / (own * 4.0**2))
    assert released.epsilon(2) == pytest.approx(gaussian(both, 1e-5), rel=1e-6)


@pytest.mark.parametrize("privacy", [{}, {"privacy": {"epsilon": 3.0}}])
def test_exact_messages_that_left_before_leave_no_epsilon(tmp_path, privacy):
    """Under no privacy, or with noise that a server added who was trusted then."""
    exact = party(config(**privacy), 0)
    assert sent(exact, tmp_path, 3) == [DONE] * 3
    released = releases_of(agreement(), tmp_path)
    assert released.before() == 3 and released.epsilon() == math.inf and released.trouble() is None
    assert "3 messages have left under other agreements" in released.said()
    assert "so that no ε holds for all of them together" in released.said()
    assert "give no --budget if you accept that" in str(releases_of(agreement(), tmp_path, 3.0).trouble())
    assert sent(agreement(9), tmp_path, 2) == [DONE] * 2
    both = releases_of(agreement(), tmp_path)  # where there is no ε to keep to, what asks for a budget is no way out
    assert both.trouble() is None and both.left() == ROUNDS - 2
    assert "; 4 of the 6 messages that this one still asks for may leave" in both.said()
    sent(agreement(), tmp_path, 1)
    assert sent(exact, tmp_path, 2 * ROUNDS) == [DONE] * (2 * ROUNDS)  # the server keeps its count, or nobody does


def test_a_budget_of_ones_own_is_kept_message_by_message(tmp_path):
    enough = gaussian(math.sqrt(4) / 4.0, 1e-5) + 1e-6
    assert sent(agreement(3), tmp_path, ROUNDS, budget=enough) == [DONE] * 4 + [REFUSED] * 2
    assert releases_of(agreement(3), tmp_path, enough).left() == 0
    assert sent(agreement(3), tmp_path, 3, budget=100.0)[-1] == REFUSED  # the agreement's rounds are a limit too
    assert releases_of(agreement(3), tmp_path).count() == ROUNDS


def test_noise_that_protects_nobody_is_said_and_not_added_up(tmp_path):
    """Seeded noise: its trainings count their own messages, and no ε holds with them."""
    seeded = party(config(privacy=LOCAL), 0)
    assert sent(seeded, tmp_path, ROUNDS + 1) == [DONE] * ROUNDS + [REFUSED]
    released = releases_of(agreement(), tmp_path)
    assert (released.left(), released.trouble()) == (ROUNDS, None)
    assert "no ε holds for all of them together" in released.said()
    sent(agreement(), tmp_path, ROUNDS)
    again = party(config(privacy=LOCAL, run={"rounds": ROUNDS, "seed": 9, "dtype": "float64"}), 0)
    assert sent(again, tmp_path, 1) == [DONE]


def test_where_the_server_adds_the_noise_a_client_has_no_budget(tmp_path):
    central = party(config(privacy={"epsilon": 3.0}), 0)
    assert not releases_of(central, tmp_path).has_budget and releases_of(agreement(), tmp_path).has_budget
    for federation, budget in ((central, 4.0), (party(config(), 0), 4.0), (agreement(), 0.0), (agreement(), math.nan)):
        with pytest.raises(UserError, match="--budget"):
            releases_of(federation, tmp_path, budget)


def test_a_damaged_count_stops_the_client(tmp_path):
    answer, counted = sent(agreement(), tmp_path, 1), tmp_path / "releases.json"
    assert answer == [DONE]
    whole = json.loads(counted.read_text())
    one = {"releases": 1, "still_here": "", "std": pytest.approx(4.0), "unlike": ANY, "noises": 1, "colluders": 0}
    assert whole == {agreement().agreed: one}
    assert (Releases(tmp_path, "another").count(), Releases(tmp_path, "another").before()) == (0, 1)
    sound = {"releases": 1, "still_here": "", "std": 4.0}
    for wrong in (
        {"releases": -1}, {"releases": True}, {"std": 0.0}, {"std": "x"}, {"still_here": None}, {"unlike": -1.0},
        {"unlike": None}, {"noises": 0}, {"colluders": 1.0}, {"noises": 1.5}, {"colluders": -1},
    ):  # fmt: skip
        counted.write_text(json.dumps({"a": sound | wrong}))
        with pytest.raises(UserError, match="is damaged"):
            sent(agreement(), tmp_path, 1)
    counted.write_text(json.dumps({"a": {"releases": 1, "still_here": "", "mu": 0.25}}))
    with pytest.raises(UserError, match="was written by an earlier version"):
        sent(agreement(), tmp_path, 1)
    for damaged in ("{", "[]", '{"a": 3}', '{"a": {"releases": 1}}'):
        counted.write_text(damaged)
        with pytest.raises(UserError, match="is damaged"):
            sent(agreement(), tmp_path, 1)


def test_join_says_what_was_spent_and_asks_for_a_budget(tmp_path: Path, fednormec_: Command) -> None:
    """Before it connects to anybody."""
    asked = {name: section for name, section in config(privacy=SECURE).items() if name != "federation"}
    (tmp_path / "asked.toml").write_text(dump(asked))
    fed = make(tmp_path / "fed", NAMES, [5], 3, "localhost:9", tmp_path / "asked.toml")
    home, rng = fed / "clients" / NAMES[0], np.random.default_rng(0)
    np.savez(tmp_path / "mine.npz", x=rng.standard_normal((8, 5)), y=rng.integers(0, 3, 8))
    stored = {"another": {"releases": 60, "still_here": "", "std": 4.0}}
    (home / "releases.json").write_text(json.dumps(stored))
    words = ("federation", "join", home, "--data", tmp_path / "mine.npz")
    said = fednormec_(*words)
    so_far, whole = gaussian(math.sqrt(60) / 4, 1e-5), gaussian(math.sqrt(66) / 4, 1e-5)
    assert said.code == 2 and "60 messages have left under other agreements" in said.err
    assert f"ε ≤ {math.ceil(100 * so_far) / 100:.2f} at δ = 1e-05 so far" in said.err
    needed = math.ceil(10 * whole) / 10
    assert f"--budget {needed:.1f}" in " ".join(said.err.split())
    assert "connected" not in said.err
    explained = fednormec_(*words, "--explain", "--budget", f"{needed:.1f}")
    assert explained.code == 0
    assert "pays for 6 of the 6 that this one still asks for" in " ".join(explained.out.split())
    assert "Give --budget" in fednormec_(*words, "--explain").out
    assert fednormec_(*words, "--check").code == 2
