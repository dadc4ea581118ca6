"""Secure aggregation in process: what is trained with its stages is what would be trained without, to the last unit."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulations import CONTRACTS, build, finish

import fednormec as fn
from fednormec.config.schema import read
from fednormec.engine import together
from fednormec.engine.together import ATTEMPTS, STAGES, Together, in_words, longest_sum
from fednormec.errors import Stopped, UserError
from fednormec.privacy.mechanism import Mechanism
from fednormec.runs.runner import go_on, perform

PRIVATE = [name for name in CONTRACTS if math.isfinite(build(name).bound.radius) and build(name).prime is None]
M = 5
PROBLEM = fn.random_quadratic(M, 7, parts=3, heterogeneity=1.0, seed=0)
STAGED = fn.Privacy(noise_std=0.5, trust="secagg", protocol=True, min_survivors=3)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody adds noise, so that sums can be compared."""
    monkeypatch.setattr(Mechanism, "own_noise", lambda self, dim: np.zeros(dim, np.int64))
    monkeypatch.setattr(Mechanism, "noise", lambda self, dim, *at: np.zeros(dim))


@pytest.mark.parametrize(
    "rule", [fn.full(), fn.poisson(0.8), fn.poisson(0.8, "sleep")], ids=["full", "advance", "sleep"]
)
@pytest.mark.parametrize("name", PRIVATE)
def test_the_stages_add_up_what_the_engine_adds(name: str, rule: Any, silent: None, monkeypatch: Any) -> None:
    """Every method that can be private, SCAFFOLD's two vectors and the bits of adaptive bounds among them."""
    plain = fn.Privacy(noise_std=0.5, trust="secagg", noise="discrete", min_cohort=3)
    cohorts = {}
    draw = Mechanism.cohort

    def drawn(self: Mechanism, seed: int, round: int) -> Any:
        return cohorts.setdefault(round, draw(self, seed, round))

    monkeypatch.setattr(Mechanism, "cohort", drawn)
    staged, free = (list(fn.simulate(PROBLEM, build(name), rule, asked, rounds=3, seed=1)) for asked in (STAGED, plain))
    for one, other in zip(staged, free, strict=True):
        assert torch.equal(one.released, other.released) and one.sent == other.sent
        assert torch.equal(one.x, other.x) and torch.equal(one.memory, other.memory)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whoever_is_lost_at_whatever_stage(data: st.DataObject) -> None:
    """A sum has the messages of those who masked, and enough of them; or there is none, and nobody's memory moves."""
    at = {client: data.draw(st.sampled_from([*STAGES, "never"])) for client in range(M)}
    place = Together(lambda round, attempt, stage: [client for client, last in at.items() if last == stage])
    method = fn.fed_normec(fn.gd(0.1), beta=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mechanism, "own_noise", lambda self, dim: np.zeros(dim, np.int64))
        r = next(iter(fn.simulate(PROBLEM, method, None, STAGED, rounds=9, seed=1, on=place)))
    masked = [client for client, last in at.items() if last in ("agree", "unmask", "never")]
    agreed = [client for client, last in at.items() if last in ("unmask", "never")]
    stays = [client for client, last in at.items() if last == "never"]
    if min(map(len, (masked, agreed, stays))) >= 4:  # more than two thirds of five: the first attempt comes to a sum
        assert r.cohort.computing.tolist() == masked and r.releases == 1
    assert r.sent == 0 or 3 <= r.sent <= len(masked)
    assert r.releases <= ATTEMPTS and (r.releases > 0) >= (r.sent > 0)
    assert torch.equal(r.released, r.memory.sum(0))  # those who are in the sum remember it, and nobody else
    gone = [client for client in range(M) if client not in r.cohort.computing]
    assert not r.memory[gone].any() and r.missed == len(gone)


def test_nothing_is_paid_for_while_too_few_are_there_to_mask() -> None:
    """The next attempt is without those who did not answer: absent clients cost no privacy, and stop nobody."""
    asked = fn.Privacy(epsilon=4.0, trust="secagg", protocol=True, min_survivors=3)
    for gone, sent, releases in (([0, 1], 3, 6), ([0, 1, 2], 0, 0)):
        place = Together(lambda round, attempt, stage, gone=gone: gone)
        rounds = list(fn.simulate(PROBLEM, build("fed_normec"), None, asked, rounds=6, on=place))
        assert [r.sent for r in rounds] == [sent] * 6 and rounds[-1].releases == releases
        assert (rounds[-1].epsilon == 0) == (releases == 0)


def test_who_is_gone_for_good_is_no_news_in_every_round() -> None:
    """Five are asked and four stay: the first attempt is in vain, costs nothing, and the second has a sum."""
    asked, said = fn.Privacy(noise_std=0.5, trust="secagg", protocol=True, min_survivors=3, colluders=2), list[str]()
    problem = fn.random_quadratic(5, 4, seed=0)

    def train(gone: list[int], stage: str) -> list[int]:
        said.clear()
        place = Together(lambda round, attempt, at: gone if at == stage else [], said.append)
        return [r.sent for r in fn.simulate(problem, build("fed_normec"), None, asked, rounds=2, on=place)]

    assert train([0], "keys") == [4, 4] and not said
    assert train([0, 1, 2], "keys") == [0, 0]
    assert said[0].startswith("attempt 1 of 3 at the sum of round 1 failed: keys of 2 members came, and 4 are needed")
    assert said[1] == "round 1 has no sum: it needs 3 clients, and 2 clients are left to ask"
    assert train([0, 1], "shares") == [0, 0]
    assert said[3] == "round 1 has no sum: none of 3 attempts came to one" and len(said) == 8
    assert not any("neighbours" in one for one in said)  # nobody who stayed is blamed


def test_attempts_are_told_in_their_order() -> None:
    """The second is paid for and told, and with it the first; the third costs nothing, and the round has no sum."""
    lost, said = {(1, "keys"): [0, 1], (2, "unmask"): [2], (3, "keys"): [2]}, list[str]()
    asked = fn.Privacy(noise_std=0.5, trust="secagg", protocol=True, min_survivors=3, colluders=2)
    place = Together(lambda round, attempt, at: lost.get((attempt, at), []), said.append)
    (only,) = fn.simulate(fn.random_quadratic(5, 4), build("fed_normec"), None, asked, rounds=1, on=place)
    assert only.releases == 1 and only.sent == 0
    assert [one[:12] for one in said] == ["attempt 1 of", "attempt 2 of", "attempt 3 of", "round 1 has "]


def test_a_round_for_which_too_few_were_drawn_says_so() -> None:
    said = list[str]()
    rounds = fn.simulate(fn.random_quadratic(5, 4), build("dp_fed_avg_clip"), fn.poisson(0.3), STAGED, rounds=9,
                         on=Together(tell=said.append))  # fmt: skip
    sent = [r.sent for r in rounds]
    assert said == [
        f"round {number} has no sum: it needs 3 clients, and fewer were drawn that can take part"
        for number, count in enumerate(sent, 1) if not count
    ]  # fmt: skip


def test_failed_attempts_take_from_the_number_of_sums_without_an_epsilon_too() -> None:
    """Clients agreed to as many messages as there are rounds."""
    lost = Together(lambda round, attempt, stage: [0, 1] if (round, attempt, stage) == (1, 1, "unmask") else [])
    rounds = list(fn.simulate(PROBLEM, build("fed_normec"), None, STAGED, rounds=6, on=lost))
    assert len(rounds) == 5 and rounds[-1].releases == 6 and rounds[-1].last
    done = fn.train(PROBLEM, build("fed_normec"), privacy=STAGED, rounds=6, on=lost)
    assert done.statement is not None and done.statement.facts["rounds"] == 6


@pytest.mark.parametrize("protocol", [True, False])
def test_rounds_that_are_called_off_leave_no_bias(protocol: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody computes in them, and the weights are those of the other rounds: v stays the mean of the v_i."""
    for name in ("own_noise", "noise"):
        monkeypatch.setattr(Mechanism, name, lambda self, dim, *at: np.zeros(dim, np.int64))
    problem = fn.random_quadratic(10, 4, parts=3, heterogeneity=1.0, seed=0)
    asked = fn.Privacy(noise_std=0.5, trust="secagg", **(
        {"protocol": True, "min_survivors": 6} if protocol else {"noise": "discrete", "min_cohort": 6}))  # fmt: skip
    method, off = fn.fed_normec(fn.gd(0.1), beta=0.02, server_step=1e-9), []
    for seed in range(40):
        plan_seed = {"seed": seed}
        last = finish(problem, method, fn.poisson(0.5), asked, rounds=25, **plan_seed)
        mean = last.memory.mean(0)
        off.append(float((last.server.memory - mean) @ mean / (mean @ mean)))
    assert abs(np.mean(off)) < 5 * np.std(off) / math.sqrt(len(off)) and np.std(off) / math.sqrt(len(off)) < 0.06


def test_attempts_have_keys_and_noise_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    masked, terms = list[bytes](), list[Any]()
    honest = together.Member.masked

    def seen(self: Any, boxes: bytes, vector: np.ndarray) -> bytes:
        masked.append(vector.tobytes())
        terms.append(self._terms)
        return honest(self, boxes, vector)

    monkeypatch.setattr(together.Member, "masked", seen)
    lost = Together(lambda round, attempt, stage: [0, 1] if (attempt, stage) == (1, "unmask") else [])
    paid = list[int]()
    r = next(iter(fn.simulate(PROBLEM, build("fed_normec"), None, STAGED, rounds=2, on=lost,
                              before_release=lambda number, plan: paid.append(number))))  # fmt: skip
    assert paid == [1, 1] and r.releases == 2 and r.sent == M
    assert len(set(masked)) == 2 * M and len({one.context for one in terms}) == 2


def test_noise_has_the_std_that_was_agreed_and_epsilon_counts_the_least_of_it() -> None:
    asked = fn.Privacy(noise_std=3.0, trust="secagg", protocol=True, min_survivors=4, colluders=1)
    problem, method = fn.random_quadratic(M, 400, seed=0), fn.dp_fed_avg_clip(fn.gd(0.1))
    rounds = list(fn.simulate(problem, method, None, asked, rounds=4))
    noise = torch.cat([r.released for r in rounds]) / (3.0 * math.sqrt(M))
    assert abs(float(noise.std()) - 1) < 0.1
    one = fn.Mechanism(M, fn.full(), 3.0 * math.sqrt(3))
    assert rounds[-1].epsilon == pytest.approx(one.epsilon(4, 1e-5), rel=1e-9)
    calibrated = fn.train(problem, method, privacy=fn.Privacy(epsilon=2.0, trust="secagg", protocol=True), rounds=2)
    assert 1.99 < calibrated.statement.epsilon <= 2.0


@pytest.mark.parametrize("participation", ["full", "poisson"])
def test_a_run_is_resumed_with_its_ledger(tmp_path: Path, participation: str) -> None:
    """Rounds that are called off have no line there."""
    rule = 'name = "full"' if participation == "full" else 'name = "poisson"\np = 0.6'
    config = f"""
[problem]
name = "quadratic"
clients = {M}
dim = 6
[local]
name = "gd"
step = 0.1
[method]
name = "fed_normec"
[privacy]
epsilon = 3.0
trust = "secagg"
protocol = true
min_survivors = 4
[participation]
{rule}
[run]
rounds = 12
dtype = "float64"
"""
    (tmp_path / "config.toml").write_text(config)
    stops = iter([False] * 6 + [True])
    with pytest.raises(Stopped):
        perform(read(tmp_path / "config.toml"), "run", tmp_path / "run", True, stop=lambda: next(stops, True))
    done = go_on(tmp_path / "run", True)
    assert (done["status"], done["rounds"]) == ("done", 12)
    paid = fn.read_ledger(tmp_path / "run" / "ledger.jsonl").rounds
    assert paid == 12 if participation == "full" else paid < 12
    assert "learns noisy sums alone, over 4 messages or more" in " ".join(done["statement"].split())
    stored = read(tmp_path / "run" / "config.toml")["privacy"]  # what really happens, not the defaults
    assert (stored["randomness"], stored["noise"]) == ("secure", "discrete")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"noise_std": 1e7}, "too much for a grid"),
        ({"noise_std": 2e4}, "into which the sum of 5 messages"),
        ({"trust": "local"}, "protocol = true is for trust = 'secagg'"),
        ({"noise": "continuous"}, "secure aggregation adds whole numbers"),
        ({"min_survivors": 1}, "min_survivors must be at least 2, not 1: the sum over one is its message"),
        ({"min_survivors": 2.5}, "min_survivors must be a whole number, not 2.5"),
        ({"colluders": 1.5}, "colluders must be a whole number, not 1.5"),
        ({"colluders": True}, "colluders must be a whole number, not True"),
        ({"min_cohort": 2}, "where the protocol runs, clients enforce min_survivors"),
        ({"protocol": "no"}, "protocol must be true or false, not 'no'"),
        ({"min_survivors": 6}, "at least 2 and at most the 5 clients"),
        ({"min_survivors": 3, "colluders": 3}, "3 colluders could be all of the 3 clients"),
        ({"protocol": False}, "min_survivors is for secure aggregation that really runs"),
    ],
)
def test_what_does_not_fit_is_said_in_a_sentence(given: dict[str, Any], said: str) -> None:
    asked: dict[str, Any] = {"noise_std": 1.0, "trust": "secagg", "protocol": True, "min_survivors": 4} | given
    with pytest.raises(UserError, match=said):
        finish(PROBLEM, build("dp_fed_avg_clip"), None, fn.Privacy(**asked), rounds=1)


def test_places_that_cannot_run_the_stages_say_so() -> None:
    with pytest.raises(UserError, match="not on Ray"):
        finish(PROBLEM, build("dp_fed_avg_clip"), None, STAGED, rounds=1, on=fn.Ray(workers=1))
    with pytest.raises(UserError, match="up to 1,000 clients, not 1,001"):
        finish(fn.random_quadratic(1001, 2), build("dp_fed_avg_clip"), None, fn.Privacy(
            noise_std=1.0, trust="secagg", protocol=True), rounds=1)  # fmt: skip
    with pytest.raises(UserError, match="only in secure aggregation"):
        finish(PROBLEM, build("dp_fed_avg_clip"), None, fn.Privacy(noise_std=1.0), rounds=1, on=Together())


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=8))
def test_words_are_whole_numbers_and_back(units: list[int]) -> None:
    words = in_words(np.array(units, np.int64))
    assert words.view(np.int32).tolist() == units
    assert in_words(np.array(units, np.int64) + 2**32).tolist() == words.tolist()


def test_a_sum_of_all_clients_fits_into_a_word() -> None:
    for clients, noise in ((5, 1.0), (1000, 0.3), (1000, 40.0), (20_000, 0.1)):
        mechanism = fn.Mechanism(clients, fn.full(), noise, secure=True, trust="secagg", grid_dim=10, protocol=True,
                                 draws="server", min_survivors=clients)  # fmt: skip
        assert mechanism.grid is not None
        most = mechanism.grid.steps * (clients + 10 * noise * math.sqrt(clients))
        assert most < 2**31 and 2**15 < mechanism.grid.steps <= 2**20
        assert longest_sum(mechanism, clients, 10) < 2**33
