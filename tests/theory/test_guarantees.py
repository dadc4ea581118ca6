"""Guarantees on the command line: `fednormec theory`, `fednormec run --plan`, and what a run records of them."""

import json
import math
import tomllib

import numpy as np
import pytest
from command import sentence, sets
from strict_json import lines

from fednormec.config.assemble import assemble
from fednormec.config.schema import read
from fednormec.config.settings import QUICKSTART, THEORY
from fednormec.core.randomness import generator
from fednormec.engine.planning import planned
from fednormec.theory.answer import answer
from fednormec.theory.corrected import follow, guarantee
from fednormec.theory.plots import (
    bound_against_rounds_and_epsilon,
    measured_against_guaranteed,
)
from fednormec.theory.question import ask
from fednormec.theory.setting import Constants, Noise, Settings, constants_of, round_noise
from fednormec.theory.trade_off import AgainstEpsilon, AgainstRounds, TradeOff, trade_off

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("undrawn")]

TERMS = ["initial", "memory", "noise", "server_step", "drift"]
SMALL = ("problem.clients=60", "problem.dim=5", "run.rounds=120", "run.evaluate_every=1")
FULL = ("participation.name=full",)  # accounting has a closed form then: faster
GIVEN = {"smoothness": 2.0, "gap": 3.0, "gradient_norm": 1.0, "client_norm": 2.0, "clients": 5000, "dim": 100}


def given(**constants):
    return sets(*(f"constants.{name}={value}" for name, value in (GIVEN | constants).items()))


def answered(said):
    assert said.code == 0, said.err
    return json.loads(said.out)


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
    few = sets("problem.clients=20", "privacy.epsilon=1", *FULL)
    out = fednormec_("theory", *few).out
    assert "VACUOUS" in out and "nothing that standing still would not" in out
    assert "Its largest term is noise" in out and "such clients would be enough" in out
    told = answered(fednormec_("theory", "--json", *few))
    assert told["vacuous"] is True and told["bound"] >= told["constants"]["gradient_norm"]


def test_as_many_clients_as_advised_are_enough(fednormec_):
    quick = sets("privacy.epsilon=2", *FULL)
    out = fednormec_("theory", *given(clients=40), *quick).out
    advised = int(out.split("About ")[1].split(" such")[0].replace(",", ""))
    assert answered(fednormec_("theory", "--json", *given(clients=advised), *quick))["vacuous"] is False
    fewer = answered(fednormec_("theory", "--json", *given(clients=advised // 4), *quick))
    assert fewer["vacuous"] is True


def test_given_constants_need_no_problem_and_no_data(fednormec_):
    told = answered(fednormec_("theory", "--json", *given(), *sets(*FULL)))
    assert told["constants"] == GIVEN and told["constants_from_data"] is False
    assert "as given" in fednormec_("theory", *given(), *sets(*FULL)).out
    huge = answered(fednormec_("theory", "--json", *given(clients=10**7, dim=10**7), *sets(*FULL)))
    assert huge["constants"]["dim"] == 10**7


def test_a_given_constant_stands_in_for_the_computed_one():
    config = read(THEORY, [*SMALL, "constants.gap=100", "constants.smoothness=3"])
    question = ask(config)
    computed = ask(read(THEORY, SMALL)).constants
    assert (question.constants.gap, question.constants.smoothness) == (100, 3)
    assert question.constants.client_norm == computed.client_norm and question.from_data


def test_a_neural_problem_takes_constants_from_its_user(fednormec_):
    config = [str(QUICKSTART), *sets("data.clients=20", "privacy.epsilon=8", *FULL)]
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
        (("privacy.trust=secagg", "privacy.protocol=true"), "min_survivors"),
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
    quick = sets(*SMALL, *FULL)
    told = answered(fednormec_("theory", "--json", *quick, "--write", "planned.toml"))
    written = tomllib.loads((tmp_path / "planned.toml").read_text())
    assert written["method"]["beta"] == told["plan"]["beta"]
    assert written["run"]["rounds"] == told["plan"]["rounds"]
    assert fednormec_("run", "planned.toml", "--out", "a", "--quiet").code == 0
    assert fednormec_("run", "--plan", *quick, "--out", "b", "--quiet").code == 0
    a, b = (lines(tmp_path / folder / "metrics.jsonl") for folder in "ab")
    assert a == b
    again = fednormec_("theory", *quick, "--write", "planned.toml")
    assert again.code == 2 and "exists already" in sentence(again.err)


@pytest.mark.drawn
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_bound_is_drawn_against_rounds_and_epsilon(fednormec_, tmp_path, suffix):
    said = fednormec_("theory", *sets(*SMALL, "participation.name=full"), "--plot", f"bound.{suffix}")
    assert said.code == 0 and f"bound.{suffix}" in said.out
    assert (tmp_path / f"bound.{suffix}").stat().st_size > 10_000
    assert fednormec_("theory", *sets(*SMALL), "--plot", "bound.doc").code == 2


@pytest.mark.parametrize(
    ("local", "more"),
    [
        (("local.steps=1",), ("privacy.epsilon=20", "problem.heterogeneity=0.3")),
        (("local.steps=4",), ("--not-private", "problem.heterogeneity=0.1")),
        (("local.name=ig", "local.step=0.1"), ("--not-private", "problem.heterogeneity=0.1")),
    ],
)
def test_a_planned_run_keeps_a_promise_that_says_something(fednormec_, tmp_path, local, more):
    few = ("problem.clients=400", "problem.dim=3", "problem.parts=2", "run.rounds=300", "run.evaluate_every=1")
    options = [word for word in more if word.startswith("--")]
    overrides = sets(*few, "participation.name=full", *local, *(word for word in more if not word.startswith("--")))
    result = answered(fednormec_("run", "--plan", *options, *overrides, "--out", "out", "--quiet", "--json"))
    told = result["guarantee"]
    facts = json.loads((tmp_path / "out" / "guarantee.json").read_text())
    assert told["bound"] == facts["bound"] == pytest.approx(sum(facts["terms"].values()))
    assert told["planned"] is True and facts["not_private"] is True and told["vacuous"] is False
    records = [line["not_private"] for line in lines(tmp_path / "out" / "metrics.jsonl")]
    s = facts["settings"]
    settings = Settings(**{name: s[name] for name in Settings.__dataclass_fields__})
    course = follow(Constants(**facts["constants"]), settings, Noise(**facts["noise"]))
    errors = np.array([r["memory_error"] for r in records])
    assert (errors <= course.memory_error[1:] * (1 + 1e-9)).all()
    assert (errors[s["warmup_rounds"] :] <= s["memory_error"] * (1 + 1e-9)).all()
    assert errors[0] > s["memory_error"] * 1.01  # before the warm-up ended it was not yet so
    assert told["measured"] == min(facts["constants"]["gradient_norm"], *(r["gradient_norm"] for r in records[:-1]))
    assert told["models_measured"] == len(records) == s["rounds"]
    assert told["measured"] <= told["bound_round_by_round"] <= told["bound"] < facts["constants"]["gradient_norm"]


def test_what_is_called_measured_is_measured(fednormec_):
    """A given ||grad f(x0)|| is not a measurement, and models that were not evaluated were not measured."""
    given_norm = sets(*SMALL, "constants.gradient_norm=1e-9")
    result = answered(fednormec_("run", "--plan", "--not-private", *given_norm, "--quiet", "--json"))
    assert result["guarantee"]["measured"] > 1e-6
    seldom = sets(*SMALL, "run.evaluate_every=1000")
    assert (
        answered(fednormec_("run", "--plan", "--not-private", *seldom, "--quiet", "--json"))["guarantee"][
            "models_measured"
        ]
        == 1
    )


def test_a_plan_from_given_constants_is_held_to_the_run_that_it_became(fednormec_, tmp_path):
    """Nobody looked at the problem when it was planned: the batches may not fit, and float32 sums get more noise."""
    public = sets(*(f"constants.{n}={v}" for n, v in (GIVEN | {"clients": 60, "dim": 5}).items()))
    uneven = sets("problem.parts=3", "local.name=ig", "local.step=0.1", "local.batch_size=2",
                  "constants.component_norm=3", "constants.component_heterogeneity=1")  # fmt: skip
    said = fednormec_("run", "--plan", *sets(*SMALL), *public, *uneven, "--out", "a")
    assert said.code == 2 and "does not divide" in sentence(said.err) and not (tmp_path / "a").exists()
    for out in ("b", "c"):
        config = ("--plan", *sets(*SMALL, *FULL, "run.dtype=float32"), *public) if out == "b" else ("b/config.toml",)
        assert fednormec_("run", *config, "--out", out, "--quiet").code == 0
    b, c = (json.loads((tmp_path / out / "guarantee.json").read_text()) for out in "bc")
    assert b["noise"] == c["noise"] and b["bound"] == c["bound"]


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
    x0 = experiment.problem.init(generator(0, "init"))
    agreed = planned(experiment.problem, experiment.algorithm, experiment.participation, experiment.privacy, 120)
    by_hand = guarantee(
        constants_of(experiment.problem, x0),
        Settings("one_step", 0.5, alpha=0.01, beta=0.1, server_step=0.1, rounds=120),
        round_noise(60, 5, 0.25, agreed.mechanism),
    )
    assert result["guarantee"]["bound"] == pytest.approx(by_hand.bound) and result["guarantee"]["planned"] is False
    assert by_hand.holds


@pytest.mark.parametrize(
    ("overrides", "covered"),
    [
        (("method.server_normalization=false", *FULL), False),
        (("participation.idle=sleep",), False),
        (("method.name=dp_fed_avg_clip", *FULL), None),
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
        assert (tmp_path / "out" / "guarantee.png").exists()
        again = fednormec_("run", str(THEORY), *sets(*SMALL, *overrides), "--quiet")
        assert "guaranteed     nothing: " in again.out
    assert not (tmp_path / "out" / "guarantee.json").exists()


def test_memories_that_start_at_the_updates_need_no_warm_up(fednormec_):
    start = sets(*SMALL, "method.initial_memory=local_updates", "method.server_step=0.01")
    told = answered(fednormec_("theory", "--json", "--not-private", *start))
    assert told["this_config"]["settings"]["memory_error"] < told["constants"]["client_norm"] / 2
    assert told["plan"]["warmup_rounds"] == 0 and told["plan"]["initial_memory"] == "local_updates"
    assert told["bound"] < answered(fednormec_("theory", "--json", "--not-private", *sets(*SMALL)))["bound"]


def test_a_private_plan_from_the_data_is_not_covered_by_its_epsilon_and_public_constants_are(fednormec_, tmp_path):
    quick = sets(*SMALL, *FULL)
    assert fednormec_("run", "--plan", *quick, "--out", "a", "--quiet").code == 0
    assert fednormec_("theory", *quick, "--write", "w.toml").code == 0
    for out, config in (("b", "a/config.toml"), ("c", "w.toml")):
        assert fednormec_("run", config, "--out", out, "--quiet").code == 0
    for out in "abc":
        assert "constants computed from the clients'" in (tmp_path / out / "privacy.txt").read_text()
        assert json.loads((tmp_path / out / "privacy.json").read_text())["settings_from_data"] is True
    public = sets(*(f"constants.{n}={v}" for n, v in GIVEN.items() if n not in ("clients", "dim")))
    assert fednormec_("run", "--plan", *quick, *public, "--out", "d", "--quiet").code == 0
    assert "constants" not in (tmp_path / "d" / "privacy.txt").read_text()
    assert json.loads((tmp_path / "d" / "privacy.json").read_text())["settings_from_data"] is False


def test_memories_that_start_at_the_updates_are_never_planned_with_privacy(fednormec_, tmp_path):
    start = sets("method.initial_memory=local_updates", *FULL)
    for constants in (sets(*SMALL), given()):
        said = fednormec_("theory", *start, *constants)
        assert said.code == 2 and "publishes the clients' exact updates" in sentence(said.err)
    drawn = fednormec_("theory", "--not-private", *start, *sets(*SMALL), "--plot", "b.png")
    assert drawn.code == 0 and (tmp_path / "b.png").exists()  # what privacy would cost starts from zero


def test_noise_that_protects_nobody_is_labelled(fednormec_):
    loud = sets(*SMALL, "privacy.noise_scale=total_norm", "privacy.noise_std=2")
    assert answered(fednormec_("theory", "--json", *loud))["plan"]["label"] == "NOT PRIVATE"
    assert "NOT PRIVATE" in fednormec_("theory", *loud).out


def test_a_budget_that_cuts_the_rounds_is_named(fednormec_):
    out = fednormec_("theory", *sets(*SMALL, "privacy.noise_std=2", "privacy.epsilon=3")).out
    assert "the budget pays for no more of the 120" in out


def test_more_rounds_are_advised_where_they_help(fednormec_):
    out = fednormec_("theory", *sets("run.rounds=10", "participation.name=full")).out
    assert "VACUOUS" in out and "rounds would be enough" in out


def test_a_mistake_in_one_file_leaves_none_behind(fednormec_, tmp_path):
    assert fednormec_("theory", *sets(*SMALL), "--write", "z.toml", "--plot", "b.jpg").code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.drawn
def test_the_pictures_show_what_they_are_about(tmp_path):
    """Every measured point and the bound lie within the axes."""
    found = answer(read(THEORY, [*SMALL, "participation.name=full"]))
    s, figures = found.planned.settings, np.linspace(2.0, 0.1, 100)
    records = [
        {"round": k + 1, "not_private": dict.fromkeys(("memory_error", "tracking_error", "gradient_norm"), float(g))}
        for k, g in enumerate(figures)
    ]
    for promise in (found.planned, None):
        for axes in measured_against_guaranteed(promise, records, 2.5, tmp_path / "g.png").axes:
            (low, high), (line,) = axes.get_ylim(), [x for x in axes.lines if x.get_label() == "measured"]
            assert low < min(line.get_ydata()) and max(line.get_ydata()) < high and low > 1e-3
    still = [{"round": 1, "not_private": dict.fromkeys(("memory_error", "tracking_error", "gradient_norm"), 0.0)}]
    measured_against_guaranteed(None, still, 0.0, tmp_path / "g.png")  # nothing positive, and no warning
    left, right = bound_against_rounds_and_epsilon(trade_off(found), tmp_path / "b.png").axes
    best = [line for line in left.lines if line.get_label() == "the least bound"][0]
    assert best.get_xdata()[-1] == 120 and best.get_ydata()[-1] == pytest.approx(found.planned.found.bound, rel=0.01)
    assert left.get_ylim()[0] < found.planned.found.bound < left.get_ylim()[1]
    private = [line for line in right.lines if line.get_label().startswith("the least bound")][0].get_ydata()
    assert list(private) == sorted(private, reverse=True)
    assert s.rounds <= 120


def test_the_bound_is_drawn_from_plain_numbers(tmp_path):
    """No plan is made while it is drawn."""
    rounds, falling = np.array([8, 20, 50]), np.array([3.0, 2.0, 1.0])
    terms = {name: falling / 4 for name in TERMS} | {"drift": np.zeros(3)}
    shown = TradeOff(
        AgainstRounds(rounds, falling, terms, (40, 0.5)),
        AgainstEpsilon(np.array([1.0, 2.0, 4.0]), 2 * falling, 0.75, 1e-5, "secagg", 50),
        at_start=4.0,
        from_data=False,
    )
    axes = bound_against_rounds_and_epsilon(shown, tmp_path / "b.png").axes
    left, right = ({line.get_label(): list(line.get_ydata()) for line in each.lines} for each in axes)
    vacuous = {"‖∇f(x⁰)‖: vacuous above": [4.0, 4.0]}
    drawn = {f"its term {name}": list(falling / 4) for name in TERMS if name != "drift"}
    assert left == {"the least bound": [3.0, 2.0, 1.0], "the plan: 0.5": [0.5]} | drawn | vacuous
    assert right == {"the least bound, secagg": [6.0, 4.0, 2.0], "without privacy": [0.75, 0.75]} | vacuous
    assert axes[0].get_ylim()[0] == pytest.approx(0.5 / 20)


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
    assert result["guarantee"]["covered"] and result["metrics"]["test_accuracy"] > 0.6
