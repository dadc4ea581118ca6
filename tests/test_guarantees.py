"""Guarantees on the command line: `fednormec theory`, `fednormec run --plan`, and what a run records of them."""

import json
import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
from conftest import sentence, sets

from fednormec.config import QUICKSTART, THEORY, read
from fednormec.experiment import assemble
from fednormec.theory.corrected import follow, guarantee
from fednormec.theory.question import ask, ask_about, own_promise, promise_of
from fednormec.theory.setting import Constants, Noise, Settings, constants_of

TERMS = ["initial", "memory", "noise", "server_step", "drift"]
SMALL = ("problem.clients=60", "problem.dim=5", "run.rounds=120", "run.evaluate_every=1")
GIVEN = {"smoothness": 2.0, "gap": 3.0, "gradient_norm": 1.0, "client_norm": 2.0, "clients": 5000, "dim": 100}


def given(**constants):
    return sets(*(f"constants.{name}={value}" for name, value in (GIVEN | constants).items()))


def answered(said):
    assert said.code == 0, said.err
    return json.loads(said.out)


def lines(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def test_the_answer_for_scripts_has_every_term_by_name_and_the_plan(fednormec_):
    told = answered(fednormec_("theory", "--json"))
    assert list(told["terms"]) == TERMS == list(told["round_by_round"]["terms"])
    assert told["bound"] == pytest.approx(sum(told["terms"].values()))
    assert told["vacuous"] is False and told["holds"] is True
    assert told["bound"] < told["constants"]["gradient_norm"]
    assert told["round_by_round"]["bound"] <= told["bound"]
    assert set(told["plan"]) >= {"alpha", "beta", "server_step", "local_step", "warmup_rounds", "rounds", "noise_std"}
    assert 7.99 < told["plan"]["epsilon"] <= 8
    assert told["constants_from_data"] is True
    assert told["as_printed"]["source"].startswith("Theorem 1")


@pytest.mark.parametrize("local", [("local.steps=1",), ("local.steps=5",), ("local.name=ig", "local.step=0.1")])
@pytest.mark.parametrize("privacy", [("--not-private",), sets("privacy.noise_std=2", "privacy.trust=local")])
def test_the_terms_are_those_of_the_corrected_bound(fednormec_, local, privacy):
    told = answered(fednormec_("theory", "--json", *privacy, *sets(*SMALL, "problem.parts=2", *local)))
    c, plan = Constants(**told["constants"]), told["plan"]
    L, eta, n = c.smoothness, plan["server_step"], plan["rounds"] - plan["warmup_rounds"]
    several = told["local"] != "one_step"
    spread = c.component_heterogeneity if told["local"] == "ig" else c.heterogeneity
    assert told["terms"]["initial"] == pytest.approx((math.e if several else 1) * c.gap / (eta * n))
    assert told["terms"]["server_step"] == pytest.approx(eta * L / 2)
    nu = 0.75 / (0.25 * 60) + (0 if "--not-private" in privacy else 5 * 4 / (0.25 * 60))
    assert told["terms"]["noise"] == pytest.approx(2 * plan["beta"] * math.sqrt(nu * plan["rounds"]), rel=1e-3)
    if several:
        assert told["terms"]["drift"] == pytest.approx(4 * L * plan["local_step"] * math.sqrt(2 * L * spread))
    else:
        assert told["terms"]["drift"] == 0


def test_a_person_gets_every_number_with_its_meaning(fednormec_):
    out = fednormec_("theory", *sets(*SMALL)).out
    for word in ("smoothness", "warmup_rounds", "closed form", "round by round", "as printed", *TERMS):
        assert word in out
    assert "computed from the clients' data: not private" in out


def test_a_vacuous_bound_is_said_in_plain_words_with_what_would_help(fednormec_):
    few = sets("problem.clients=20", "privacy.epsilon=1")
    out = fednormec_("theory", *few).out
    assert "VACUOUS" in out and "nothing that standing still would not" in out
    assert "Its largest term is noise" in out and "such clients would be enough" in out
    told = answered(fednormec_("theory", "--json", *few))
    assert told["vacuous"] is True and told["bound"] >= told["constants"]["gradient_norm"]


def test_as_many_clients_as_advised_are_enough(fednormec_):
    out = fednormec_("theory", *given(clients=40), *sets("privacy.epsilon=2")).out
    advised = int(out.split("About ")[1].split(" such")[0].replace(",", ""))
    assert (
        answered(fednormec_("theory", "--json", *given(clients=advised), *sets("privacy.epsilon=2")))["vacuous"]
        is False
    )
    fewer = answered(fednormec_("theory", "--json", *given(clients=advised // 4), *sets("privacy.epsilon=2")))
    assert fewer["vacuous"] is True


def test_given_constants_need_no_problem_and_no_data(fednormec_):
    told = answered(fednormec_("theory", "--json", *given()))
    assert told["constants"] == GIVEN and told["constants_from_data"] is False
    assert "as given" in fednormec_("theory", *given()).out
    huge = answered(fednormec_("theory", "--json", *given(clients=10**7, dim=10**7)))
    assert huge["constants"]["dim"] == 10**7


def test_a_given_constant_stands_in_for_the_computed_one():
    config = read(THEORY, [*SMALL, "constants.gap=100", "constants.smoothness=3"])
    question = ask(config)
    computed = ask(read(THEORY, SMALL)).constants
    assert (question.constants.gap, question.constants.smoothness) == (100, 3)
    assert question.constants.client_norm == computed.client_norm and question.from_data


def test_a_neural_problem_takes_constants_from_its_user(fednormec_):
    config = [str(QUICKSTART), *sets("data.clients=20", "privacy.epsilon=8")]
    said = fednormec_("theory", *config)
    assert said.code == 2
    assert "give smoothness, gap, heterogeneity in [constants]" in sentence(said.err)
    told = answered(
        fednormec_(
            "theory",
            "--json",
            *config,
            *sets("constants.smoothness=8", "constants.gap=2.4", "constants.heterogeneity=1"),
        )
    )
    assert told["constants"]["clients"] == 20 and told["constants"]["dim"] == 650
    assert 0 < told["constants"]["gradient_norm"] <= told["constants"]["client_norm"]
    assert told["this_config"]["covered"] is False
    assert "server_normalization" in told["this_config"]["why_not"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("method.name=clip21",), "do not cover the method clip21"),
        (("local.name=sgd", "local.step=0.1"), "no theorem covers random mini-batches"),
        (("local.name=ig", "local.step=0.1", "local.order=reshuffle"), "one pass in cyclic order"),
        (("local.name=ig", "local.step=0.1", "local.epochs=2"), "one pass in cyclic order"),
        (("local.name=ig", "local.step=0.1", "local.batch_size=2", "problem.parts=3"), "does not divide"),
        (("participation.name=fixed_size", "participation.m=5"), "not of fixed_size"),
        (("participation.idle=sleep",), "no theorem covers idle = 'sleep'"),
        (("privacy.trust=secagg", "privacy.min_cohort=3"), "min_cohort"),
        (("method.name=alpha_normec", "participation.name=full", "method.batch_size=5"), "mini-batch"),
        (("constants.smoothness=-1",), "constants.smoothness must be a positive number"),
        (("constants.smothness=1",), "did you mean 'smoothness'"),
        (("constants.clients=7",), "constants.clients = 7, but the problem has 60"),
        (("constants.gradient_norm=9", "constants.client_norm=1"), "cannot be larger than client_norm"),
        (("run.rounds=0",), "at least 1"),
    ],
)
def test_what_no_theorem_covers_is_refused_in_a_sentence(fednormec_, tmp_path, overrides, message):
    small = [s for s in SMALL if not any(o.split("=")[0] == s.split("=")[0] for o in overrides)]
    for command in (("theory",), ("run", "--plan", "--out", "out")):
        said = fednormec_(*command, *sets(*small, *overrides))
        assert said.code == 2 and message in sentence(said.err)
        assert list(tmp_path.iterdir()) == []


def test_a_written_plan_runs_with_its_settings_and_is_never_written_over(fednormec_, tmp_path):
    told = answered(fednormec_("theory", "--json", *sets(*SMALL), "--write", "planned.toml"))
    written = tomllib.loads((tmp_path / "planned.toml").read_text())
    assert written["method"]["beta"] == told["plan"]["beta"]
    assert written["run"]["rounds"] == told["plan"]["rounds"]
    assert fednormec_("run", "planned.toml", "--out", "a", "--quiet").code == 0
    assert fednormec_("run", "--plan", *sets(*SMALL), "--out", "b", "--quiet").code == 0
    a, b = (lines(tmp_path / folder / "metrics.jsonl") for folder in "ab")
    assert a == b
    again = fednormec_("theory", *sets(*SMALL), "--write", "planned.toml")
    assert again.code == 2 and "exists already" in sentence(again.err)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_bound_is_drawn_against_rounds_and_epsilon(fednormec_, tmp_path, suffix):
    said = fednormec_("theory", *sets(*SMALL, "participation.name=full"), "--plot", f"bound.{suffix}")
    assert said.code == 0 and f"bound.{suffix}" in said.out
    assert (tmp_path / f"bound.{suffix}").stat().st_size > 10_000
    assert fednormec_("theory", *sets(*SMALL), "--plot", "bound.doc").code == 2


@pytest.mark.parametrize("local", [("local.steps=1",), ("local.steps=4",), ("local.name=ig", "local.step=0.1")])
def test_a_planned_run_keeps_its_promise(fednormec_, tmp_path, local):
    result = answered(
        fednormec_("run", "--plan", *sets(*SMALL, "problem.parts=2", *local), "--out", "out", "--quiet", "--json")
    )
    facts = json.loads((tmp_path / "out" / "guarantee.json").read_text())
    assert result["guarantee"]["bound"] == facts["bound"] == pytest.approx(sum(facts["terms"].values()))
    assert result["guarantee"]["planned"] is True and facts["not_private"] is True
    assert (tmp_path / "out" / "guarantee.png").stat().st_size > 10_000
    records = [line["not_private"] for line in lines(tmp_path / "out" / "metrics.jsonl")]
    s = facts["settings"]
    settings = Settings(**{name: s[name] for name in Settings.__dataclass_fields__})
    course = follow(Constants(**facts["constants"]), settings, Noise(**facts["noise"]))
    errors = np.array([r["memory_error"] for r in records])
    assert (errors <= course.memory_error[1:] * (1 + 1e-9)).all()
    assert (errors[s["warmup_rounds"] :] <= s["memory_error"] * (1 + 1e-9)).all()
    assert errors[0] > s["memory_error"] * 1.01  # before the warm-up ended it was not yet so
    assert result["guarantee"]["measured"] == min(
        [facts["constants"]["gradient_norm"]] + [r["gradient_norm"] for r in records]
    )
    assert result["guarantee"]["measured"] <= facts["bound"]
    assert {"memory_error", "tracking_error"} <= set(records[0])


def test_the_server_tracks_the_mean_of_the_memories_but_for_its_noise(fednormec_, tmp_path):
    """Without sampling and noise the tracking error is rounding; with noise it is about what the theory says."""
    plain = ("participation.name=full", *SMALL)
    assert fednormec_("run", str(THEORY), "--not-private", *sets(*plain), "--out", "a", "--quiet").code == 0
    assert max(r["not_private"]["tracking_error"] for r in lines(tmp_path / "a" / "metrics.jsonl")) < 1e-12
    assert fednormec_("run", str(THEORY), *sets(*plain), "--out", "b", "--quiet").code == 0
    noise = json.loads((tmp_path / "b" / "guarantee.json").read_text())["noise"]["privacy"]
    measured = lines(tmp_path / "b" / "metrics.jsonl")[-1]["not_private"]["tracking_error"]
    assert 0.3 < measured / (0.1 * math.sqrt(noise * 120)) < 2


def test_a_run_without_a_plan_is_compared_with_its_own_settings(fednormec_, tmp_path):
    result = answered(fednormec_("run", str(THEORY), *sets(*SMALL), "--out", "out", "--quiet", "--json"))
    experiment = assemble(read(THEORY, SMALL))
    own, from_data = promise_of(experiment)
    assert from_data and result["guarantee"]["bound"] == own.found.bound and result["guarantee"]["planned"] is False
    x0 = experiment.problem.init(np.random.default_rng(0))
    assert own.constants.clients == constants_of(experiment.problem, x0).clients == 60
    assert own.found == own_promise(ask_about(experiment)).found
    again = guarantee(own.constants, own.settings, own.noise, own.start_error)
    assert again.terms == own.found.terms


@pytest.mark.parametrize(
    ("overrides", "covered"),
    [
        (("method.server_normalization=false",), False),
        (("participation.idle=sleep",), False),
        (("method.name=dp_fed_avg_clip",), None),
    ],
)
def test_a_run_that_no_theorem_covers_says_so_and_measures_what_there_is(fednormec_, tmp_path, overrides, covered):
    result = answered(fednormec_("run", str(THEORY), *sets(*SMALL, *overrides), "--out", "out", "--quiet", "--json"))
    record = lines(tmp_path / "out" / "metrics.jsonl")[-1]["not_private"]
    assert "gradient_norm" in record
    assert ("memory_error" in record) is (covered is not None)
    if covered is None:
        assert "guarantee" not in result
    else:
        assert result["guarantee"]["covered"] is False and result["guarantee"]["why_not"]
    assert not (tmp_path / "out" / "guarantee.json").exists()


def test_memories_that_start_at_the_updates_need_no_warm_up(fednormec_):
    told = answered(
        fednormec_(
            "theory", "--json", "--not-private",
            *sets(*SMALL, "method.initial_memory=local_updates", "method.server_step=0.01"),
        )
    )  # fmt: skip
    assert told["this_config"]["settings"]["memory_error"] < told["constants"]["client_norm"] / 2


def test_a_private_plan_from_the_data_is_not_covered_by_its_epsilon_and_public_constants_are(fednormec_, tmp_path):
    assert fednormec_("run", "--plan", *sets(*SMALL), "--out", "a", "--quiet").code == 0
    said = (tmp_path / "a" / "privacy.txt").read_text()
    assert "constants that were computed from the clients'" in said
    assert json.loads((tmp_path / "a" / "privacy.json").read_text())["settings_planned_from_data"] is True
    public = sets(*(f"constants.{n}={v}" for n, v in GIVEN.items() if n not in ("clients", "dim")))
    assert fednormec_("run", "--plan", *sets(*SMALL), *public, "--out", "b", "--quiet").code == 0
    assert "constants" not in (tmp_path / "b" / "privacy.txt").read_text()
    assert "settings_planned_from_data" not in json.loads((tmp_path / "b" / "privacy.json").read_text())


def test_logistic_regression_on_real_data_has_a_guarantee(fednormec_, tmp_path):
    (tmp_path / "mine.toml").write_text(
        '[problem]\nname = "logistic"\npositive = [0, 1, 2, 3, 4]\nregularizer = 0.01\n'
        '[data]\nclients = 10\n[run]\nrounds = 400\ndtype = "float64"\n[local]\nname = "gd"\nstep = 0.01\n'
    )
    told = answered(fednormec_("theory", "mine.toml", "--json"))
    assert told["holds"] and told["vacuous"] is True  # four hundred rounds are too few for a problem this stiff
    longer = answered(fednormec_("theory", "mine.toml", "--json", *sets("run.rounds=100000")))
    assert longer["vacuous"] is False
    result = answered(fednormec_("run", "mine.toml", "--plan", "--out", "out", "--quiet", "--json"))
    assert result["guarantee"]["measured"] < result["guarantee"]["bound"]
    assert result["metrics"]["test_accuracy"] > 0.6
