"""Recommended settings: they run, keep the ε that was asked for, follow the rules, and know no units."""

import json
import math
import tomllib
from typing import Any

import numpy as np
import pytest
import torch
from command import Command, sentence
from hypothesis import given, settings
from hypothesis import strategies as st

import fednormec as fn
from fednormec.config.recommending import FEW, LINEAR_MOVE, LOGITS, MANY, NET_MOVE
from fednormec.config.schema import dump

FASHION: dict[str, Any] = {"clients": 2000, "dim": 3440, "p": 0.1, "input_norm": 18.5, "linear": True}


@pytest.mark.long
@settings(deadline=None, max_examples=30)
@given(
    clients=st.integers(2, 10**6), dim=st.integers(1, 10**7), epsilon=st.floats(0.05, 50),
    rounds=st.none() | st.integers(1, 300), p=st.none() | st.floats(0.01, 1),
    trust=st.sampled_from(["central", "secagg", "local"]), norm=st.none() | st.floats(0.01, 1000), linear=st.booleans(),
)  # fmt: skip
def test_any_federation_gets_settings_that_keep_its_epsilon(
    clients, dim, epsilon, rounds, p, trust, norm, linear
) -> None:
    found = fn.recommend(
        clients=clients, dim=dim, epsilon=epsilon, rounds=rounds, p=p, trust=trust, input_norm=norm, linear=linear
    )  # fmt: skip
    assert found.plan.epsilon(found.plan.planned) <= epsilon
    assert tomllib.loads(found.toml()) == tomllib.loads(dump(found.config)) == found.config
    assert found.rules.run.rounds == found.plan.planned == (rounds or found.plan.planned)
    assert found.rules.privacy == fn.Privacy(epsilon=epsilon, trust=trust)
    assert all(choice.reason and "\n" not in choice.reason for choice in found.choices)
    json.dumps(found.facts, allow_nan=False)


@pytest.mark.parametrize(("trust", "senders"), [("central", 1), ("secagg", 200), ("local", 200)])
def test_the_noise_of_all_rounds_comes_to_the_same_in_an_output(trust: str, senders: int) -> None:
    """The rule, from the mechanism's own noise: std of the sum, over pM, √K of them, times step and inputs."""
    for epsilon, rounds in ((1.0, 20), (2.0, 60), (0.5, 240)):
        found = fn.recommend(epsilon=epsilon, rounds=rounds, trust=trust, **FASHION)
        step, of_the_sum = found.config["method"]["server_step"], math.sqrt(senders) * found.plan.mechanism.noise_std
        noise = of_the_sum / (0.1 * 2000) * math.sqrt(rounds) * step * 18.5
        assert noise == pytest.approx(LOGITS, rel=0.05)  # steps have two digits


def test_a_quiet_model_moves_no_further_than_was_good() -> None:
    for linear, most in ((True, LINEAR_MOVE / 18.5), (False, NET_MOVE)):
        quiet = fn.recommend(**FASHION | {"clients": 10**6, "linear": linear}, epsilon=8.0, rounds=20)
        assert quiet.config["method"]["server_step"] == pytest.approx(most, rel=0.05)


def test_more_noise_never_gets_more_rounds_or_longer_steps() -> None:
    asked = [fn.recommend(epsilon=epsilon, **FASHION) for epsilon in (0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 30.0)]
    rounds = [found.rules.run.rounds for found in asked]
    assert rounds == sorted(rounds) and set(rounds) == {FEW, MANY}
    fixed = [fn.recommend(epsilon=e, rounds=60, **FASHION).config["method"]["server_step"] for e in (0.5, 1, 2, 4, 8)]
    assert fixed == sorted(fixed) and len(set(fixed)) > 3


@pytest.mark.parametrize(("p", "rounds"), [(0.01, 20), (0.1, 60), (0.5, 60), (0.9, 240)])
def test_noise_to_signal_is_least_with_all_clients(p: float, rounds: int) -> None:
    """What the reason for full participation says."""
    for epsilon in (0.5, 2.0, 8.0):
        some, every = (
            fn.recommend(**FASHION | {"p": share}, epsilon=epsilon, rounds=rounds).outlook for share in (p, None)
        )
        assert every.per_round < some.per_round


def tall(k: float) -> fn.NeuralProblem:
    """400 clients whose two classes differ in the first of eight inputs, with inputs k times as long."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(401, 12, 8))
    y = torch.as_tensor((x[..., 0] + 0.3 * rng.normal(size=x.shape[:2]) > 0).astype(int))
    *clients, test = zip(torch.as_tensor(k * x, dtype=torch.float32), y, strict=True)
    return fn.NeuralProblem(torch.nn.Linear(8, 2, bias=False), clients, test)


def test_the_unit_of_the_inputs_does_not_matter() -> None:
    """Inputs k times as long, said so, give the same outputs, noise included: steps, α and moves all scale."""
    accuracies = []
    for k in (1.0, 10.0):
        asked = fn.recommend(clients=400, dim=16, epsilon=2, rounds=30, input_norm=k * 3.0, linear=True).rules
        done = fn.train(
            tall(k), asked.algorithm, asked.participation, asked.privacy, rounds=30, seed=1, x0=torch.zeros(16)
        )  # fmt: skip
        accuracies.append([record["test_loss"] for record in done.history if "test_loss" in record])
    assert accuracies[1] == pytest.approx(accuracies[0], rel=0.1)
    assert accuracies[0][-1] < 0.8 * math.log(2)


@pytest.mark.long
def test_the_digits_learn_as_well_as_the_quickstart(fednormec_: Command, tmp_path, here) -> None:
    """As a user does it: print, save, run, with the quickstart's clients and ε."""
    asked = "recommend --clients 500 --dim 650 --epsilon 4 --p 0.25 --input-norm 3.9 --rounds 60 --linear"
    said = fednormec_(*asked.split())
    assert said.code == 0, said.err
    (tmp_path / "start.toml").write_text(said.out)
    done = fednormec_("run", str(tmp_path / "start.toml"), "--set", "data.source=digits", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["metrics"]["test_accuracy"] > 0.9
    assert json.loads(done.out)["epsilon"] <= 4


def test_what_cannot_be_learnt_is_said(fednormec_: Command) -> None:
    few = ("recommend", "--clients", "3", "--dim", "650", "--epsilon", "8")
    said = fednormec_(*few)
    assert said.code == 0
    assert "nothing can be learnt" in said.out.replace("\n# ", " ")
    assert json.loads(fednormec_(*few, "--json").out)["noise_to_signal"]["warning"].startswith("nothing can be learnt")
    assert "δ = 0.5 is not below 1 / 3" in fednormec_(*few, "--delta", "0.5").out


def test_notes_say_where_drawing_clients_costs_much() -> None:
    """In secure aggregation few senders bring little noise of their own; in central trust it hardly matters."""
    asked: dict[str, Any] = {"clients": 2000, "dim": 3440, "epsilon": 2.0, "p": 0.1, "rounds": 60}
    notes = {trust: " ".join(fn.recommend(trust=trust, **asked).notes) for trust in ("central", "secagg")}
    assert "Drawing clients costs much" in notes["secagg"] and "Drawing" not in notes["central"]
    assert "measured with central trust" in notes["secagg"] and "measured" not in notes["central"]
    reasons = fn.recommend(trust="secagg", **asked).facts["reasons"]
    assert reasons["participation.name"].endswith("the server sees who")


def test_the_guess_is_named_where_it_decides() -> None:
    """A net that moves as far as it may does so whatever the length of its inputs."""
    many, few = (fn.recommend(clients=n, dim=650, epsilon=1, rounds=60).facts["reasons"] for n in (10**6, 50))
    assert "--input-norm" in few["method.server_step"] and "--input-norm" not in many["method.server_step"]


def test_runs_beyond_accounting_are_not_proposed() -> None:
    assert any("Tune" in note for note in fn.recommend(clients=100, dim=10, epsilon=1, rounds=3 * 10**8).notes)
    assert not fn.recommend(clients=100, dim=10, epsilon=1, rounds=4 * 10**8).notes


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("--clients 0", "clients must be at least 1, not 0."),
        ("--dim 0", "dim must be at least 1, not 0."),
        ("--epsilon 0", "epsilon must be a positive number, not 0.0."),
        ("--epsilon nan", "epsilon must be a positive number, not nan."),
        ("--rounds 0", "rounds must be at least 1, not 0."),
        ("--p 0", "the participation probability must lie in (0, 1], not 0.0."),
        ("--p 1.5", "the participation probability must lie in (0, 1], not 1.5."),
        ("--delta 1", "delta must lie strictly between 0 and 1, not 1.0."),
        ("--trust nobody", "trust must be 'central' or 'secagg' or 'local', not 'nobody'."),
        ("--input-norm -1", "input_norm must lie between 1e-06 and 1e+06, not -1.0."),
        ("--input-norm 1e200", "input_norm must lie between 1e-06 and 1e+06, not 1e+200."),
        ("--input-norm nan", "input_norm must lie between 1e-06 and 1e+06, not nan."),
        ("--dim 1" + 320 * "0", "dim must be at most 10^15, not 1000000"),
    ],
)
def test_a_mistake_is_one_sentence(fednormec_: Command, changed: str, message: str) -> None:
    said = fednormec_(*f"recommend --clients 100 --dim 50 --epsilon 2 {changed}".split())
    assert said.code == 2 and not said.out
    assert sentence(said.err).startswith(message)
