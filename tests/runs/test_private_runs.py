"""Privacy on the command line: budgets, ledgers, statements, σ for ε and ε for σ, and what is refused."""

import json
import math
import re
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from command import sets
from strict_json import lines

import fednormec as fn
import fednormec.config.datasets
from fednormec.audit import audit
from fednormec.privacy.ledger import read_ledger

pytestmark = pytest.mark.usefixtures("undrawn")

SMALL = ("data.clients=40", "local.steps=1", "run.rounds=6")


@pytest.mark.long
def test_the_quickstart_is_private_and_everything_agrees_on_its_epsilon(fednormec_, tmp_path):
    code, out, err = fednormec_("run", "--json", "--out", "out")
    result, folder = json.loads(out), tmp_path / "out"
    assert code == 0
    assert 3.99 < result["epsilon"] <= 4 and result["delta"] == 1e-5 and result["private"] is True
    assert (result["trust"], result["adjacency"], result["rounds"]) == ("central", "zero_out", 60)
    assert result["metrics"]["test_accuracy"] > 0.85
    facts = json.loads((folder / "privacy.json").read_text())
    metrics, (header, *ledger) = lines(folder / "metrics.jsonl"), lines(folder / "ledger.jsonl")
    assert header["release"]["p"] == 0.25 and header["release"]["mu"] == 1 / result["noise_std"]
    assert [line["round"] for line in metrics] == [line["round"] for line in ledger] == list(range(1, 61))
    assert [line["epsilon"] for line in metrics] == [line["epsilon"] for line in ledger]
    assert np.all(np.diff([line["epsilon"] for line in ledger]) > 0)
    assert (
        facts["epsilon"]
        == ledger[-1]["epsilon"]
        == result["epsilon"]
        == read_ledger(folder / "ledger.jsonl").epsilon(1e-5)
    )
    assert (folder / "privacy.txt").read_text() == result["statement"] + "\n"
    assert result["statement"].startswith("ε ≤ 4.00 at δ = 1e-05 for each client (central, zero_out)")
    assert re.search(r"round 60/60 .* ε 4\.00\n", err)


@pytest.mark.long
@pytest.mark.parametrize("trust", ["central", "secagg", "local"])
@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_own_noise_gets_its_true_epsilon(fednormec_, trust, adjacency):
    chosen = sets(*SMALL, "privacy.noise_std=1.5", f"privacy.trust={trust}", f"privacy.adjacency={adjacency}")
    code, out, _ = fednormec_("run", "--json", "--quiet", *chosen)
    result = json.loads(out)
    mechanism = fn.Mechanism(40, fn.poisson(0.25), 1.5, trust=trust, adjacency=adjacency)
    assert code == 0 and result["epsilon"] == mechanism.epsilon(6, 1e-5)
    assert (result["noise_std"], result["trust"], result["adjacency"]) == (1.5, trust, adjacency)


@pytest.mark.parametrize(
    "participation", ["participation.name=full", "participation.name=fixed_size participation.m=10"]
)
def test_cohorts_that_are_not_poisson_are_accounted_without_amplification(fednormec_, participation):
    _, out, _ = fednormec_("run", "--json", "--quiet", *sets(*SMALL, "privacy.noise_std=3", *participation.split()))
    result = json.loads(out)
    assert result["epsilon"] == fn.Mechanism(40, fn.full(), 3.0).epsilon(6, 1e-5)
    assert "no amplification by sampling counted" in result["statement"]


def test_a_run_stops_before_the_round_that_would_exceed_its_budget(fednormec_, tmp_path):
    chosen = sets(*SMALL, "run.rounds=50", "privacy.noise_std=1.5", "privacy.epsilon=3")
    code, out, _ = fednormec_("run", "--json", "--out", "out", *chosen)
    result, mechanism = json.loads(out), fn.Mechanism(40, fn.poisson(0.25), 1.5)
    done = result["rounds"]
    assert (code, result["status"]) == (0, "budget_spent")
    assert 0 < done < 50 and mechanism.epsilon(done, 1e-5) <= 3 < mechanism.epsilon(done + 1, 1e-5)
    assert result["message"] == f"after {done} of 50 rounds: one more would exceed the budget of ε = 3"
    assert len(lines(tmp_path / "out" / "ledger.jsonl")) == done + 1
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 0
    assert "test_accuracy" in result["metrics"]  # the last round was evaluated
    assert f"stopped        {result['message']}" in fednormec_("run", "--quiet", *chosen)[1]


@pytest.mark.long
def test_tuning_is_priced(fednormec_):
    once, nine = (
        json.loads(fednormec_("run", "--json", "--quiet", *sets(*SMALL, f"privacy.tuning_runs={k}"))[1]) for k in (1, 9)
    )
    assert once["noise_std"] < nine["noise_std"] and nine["epsilon"] <= 4
    assert nine["epsilon"] == fn.Mechanism(40, fn.poisson(0.25), nine["noise_std"]).epsilon(9 * 6, 1e-5)
    assert "48 rounds of other runs on the same clients are included" in nine["statement"]
    assert "further runs on the same clients" in nine["statement"]


@pytest.mark.long
def test_total_norm_noise_is_labelled_everywhere(fednormec_, tmp_path, few_side_rounds):
    chosen = sets(*SMALL, "privacy.epsilon=8", "privacy.calibration=paper", "privacy.noise_scale=total_norm")
    code, out, err = fednormec_("run", "--out", "out", *chosen)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert code == 0 and summary["epsilon"] > 1e3 and summary["private"] is False
    said = [out, (tmp_path / "out" / "privacy.txt").read_text(), summary["privacy"], *err.splitlines()]
    said += (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    said += (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()[1:]
    said += [fednormec_("audit", *chosen, "--canaries", 40)[1]]
    assert all("NOT PRIVATE" in text for text in said)


@pytest.mark.long
def test_the_papers_calibration_reports_its_true_epsilon(fednormec_):
    chosen = sets(
        "data.clients=20", "local.steps=1", "run.rounds=300", "privacy.epsilon=8", "privacy.calibration=paper"
    )
    result = json.loads(fednormec_("run", "--json", "--quiet", *chosen)[1])
    assert result["noise_std"] == pytest.approx(1.837, abs=1e-3)
    assert result["epsilon"] == pytest.approx(13.70, rel=0.01) and result["rounds"] == 300
    assert "the paper's formula was asked for ε = 8" in result["privacy"]


@pytest.mark.long
def test_secure_randomness_is_said_and_is_not_repeatable(fednormec_):
    chosen = sets(*SMALL, "privacy.randomness=secure")
    a, b = (json.loads(fednormec_("run", "--json", "--quiet", *chosen)[1]) for _ in range(2))
    assert a["metrics"]["test_loss"] != b["metrics"]["test_loss"]
    assert "seed" not in a["statement"]
    seeded = json.loads(fednormec_("run", "--json", "--quiet", *sets(*SMALL))[1])
    assert "whoever knows the seed" in seeded["statement"]


# fednormec privacy

QUESTION = ("privacy", "--clients", 20, "--rounds", 300, "--delta", 1e-5)


def asked(fednormec_, *arguments):
    code, out, err = fednormec_(*QUESTION, *arguments, "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert all(set(row) >= {"trust", "adjacency", "accountant", "noise_std", "epsilon", "delta"} for row in rows)
    return {(row["trust"], row["adjacency"], row["accountant"]): row for row in rows}


def test_the_epsilon_of_a_noise_is_told(fednormec_):
    rows = asked(fednormec_, "--p", 0.25, "--noise-std", 1.837)
    expected = {
        ("central", "zero_out", "pld"): 13.70, ("central", "zero_out", "rdp"): 15.08,
        ("central", "replace_one", "pld"): 29.56, ("secagg", "zero_out", "pld"): 11.12,
        ("secagg", "zero_out", "rdp"): 12.05, ("local", "zero_out", "pld"): 32.20,
        ("local", "replace_one", "pld"): 91.53,
    }  # fmt: skip
    for key, value in expected.items():
        assert rows[key]["epsilon"] == pytest.approx(value, rel=0.01), key
    assert ("central", "replace_one", "rdp") not in rows


@pytest.mark.long
@pytest.mark.parametrize(("p", "stds"), [(0.25, (2.73, 2.40, 5.33)), (1, (10.40, 2.32, 10.40))])
def test_the_noise_for_an_epsilon_is_told(fednormec_, p, stds):
    rows = asked(fednormec_, "--p", p, "--epsilon", 8, "--adjacency", "zero_out")
    for trust, std in zip(("central", "secagg", "local"), stds, strict=True):
        assert rows[trust, "zero_out", "pld"]["noise_std"] == pytest.approx(std, rel=0.01)
    assert all(row["epsilon"] <= 8 for row in rows.values())


def test_colluders_and_one_trust_model(fednormec_):
    rows = asked(fednormec_, "--p", 0.25, "--noise-std", 1.837, "--trust", "secagg", "--colluders", 5)
    assert {key[0] for key in rows} == {"secagg"}
    assert rows["secagg", "zero_out", "pld"]["epsilon"] == pytest.approx(13.30, rel=0.01)


@pytest.mark.long
@pytest.mark.drawn
def test_a_table_a_figure_and_the_price_of_tuning(fednormec_, tmp_path):
    code, out, _ = fednormec_(*QUESTION, "--p", 0.25, "--epsilon", 8, "--runs", 9, "--plot", "eps.png")
    assert code == 0
    assert re.search(r"^central +zero_out +pld +2\.73\d+ +8\.000 ", out, re.M)
    assert "its true ε (central, zero_out) is 13.71, not 8" in out
    assert "9 runs on the same clients, all seen: ε ≤ 32." in out and "only the best seen: ε ≤ 12.6" in out
    assert (tmp_path / "eps.png").read_bytes().startswith(b"\x89PNG")


def test_the_papers_noise_as_total_norm_is_labelled(fednormec_):
    options = ("--epsilon", 8, "--calibration", "paper", "--total-norm", 269722)
    rows = asked(fednormec_, *options)
    assert rows["secagg", "zero_out", "pld"]["epsilon"] == pytest.approx(4e4, rel=0.05)
    assert all(row["label"] == "NOT PRIVATE" for row in rows.values())
    table = [line for line in fednormec_(*QUESTION, *options)[1].splitlines() if re.match("central|secagg|local", line)]
    assert len(table) == 12 and all(line.endswith("NOT PRIVATE") for line in table)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--epsilon 8 --delta 0", "delta must lie strictly between 0 and 1"),
        ("--epsilon 8 --delta 1", "delta must lie strictly between 0 and 1"),
        ("--epsilon 8 --delta nan", "delta must lie strictly between 0 and 1"),
        ("--epsilon 0", "epsilon must be a positive number, not 0.0."),
        ("--epsilon -1", "epsilon must be a positive number, not -1.0."),
        ("--epsilon inf", "epsilon must be a positive number, not inf."),
        ("--noise-std 0", "noise_std must be a positive number, not 0.0."),
        ("--noise-std nan", "noise_std must be a positive number, not nan."),
        ("", "give either epsilon (to get the noise) or noise_std (to get the ε)."),
        ("--epsilon 8 --noise-std 1", "give either epsilon"),
        ("--epsilon 8 --clients 1 --trust secagg", "secure aggregation needs at least 2 clients"),
        ("--epsilon 8 --colluders 20", "fewer than the 20 clients, not 20"),
        ("--epsilon 8 --colluders -1", "colluders must be at least 0"),
        ("--epsilon 8 --min-cohort 21", "min_cohort must be at least 1 and at most the 20 clients"),
        ("--epsilon 8 --p 0", "(0, 1]"),
        ("--epsilon 8 --p 1.5", "(0, 1]"),
        ("--epsilon 8 --p 0.5 --fixed-size 3", "not both"),
        ("--epsilon 8 --fixed-size 21", "a cohort of 21 clients cannot be drawn from 20."),
        ("--epsilon 8 --rounds 0", "rounds must be at least 1, not 0."),
        ("--epsilon 8 --clients 0", "the number of clients must be at least 1, not 0."),
        ("--epsilon 8 --runs 0", "runs must be at least 1, not 0."),
        ("--epsilon 8 --trust nobody", "trust must be 'central' or 'secagg' or 'local', not 'nobody'."),
        ("--epsilon 8 --adjacency add", "adjacency must be 'zero_out' or 'replace_one', not 'add'."),
        ("--epsilon 8 --calibration guess", "calibration must be 'exact' or 'paper', not 'guess'."),
        ("--noise-std 1 --calibration paper", "the paper's calibration computes the noise from epsilon"),
        ("--epsilon 8 --total-norm 100", "nothing can be calibrated for it"),
        ("--noise-std 1 --p 0.25 --clients 500 --rounds 3 --delta 1e-60 --trust secagg", "no finite ε holds"),
        ("--noise-std 9 --rounds 9999999983331106", "accounting goes up to 1,000,000,000 rounds"),
        ("--noise-std 9 --p 0.5 --clients 1000000000000000 --trust secagg", "up to 1,000,000,000 clients"),
        ("--epsilon 8 --plot eps.txt", "a figure is written as .png, .pdf or .svg"),
        ("--epsilon 8 --plot nowhere/eps.png", "cannot be written"),
    ],
)
def test_bad_questions_get_a_sentence(fednormec_, options, message):
    code, out, err = fednormec_(*QUESTION, *options.split())
    assert (code, out) == (2, "")
    assert err.startswith("fednormec: ") and len(err.splitlines()) == 1 and message in err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("privacy.epsilon=0", "epsilon must be a positive number, not 0.0."),
        ("privacy.delta=0", "delta must lie strictly between 0 and 1, not 0.0."),
        ("privacy.delta=1", "delta must lie strictly between 0 and 1, not 1.0."),
        ("privacy.noise_std=0", "noise_std must be a positive number, not 0.0."),
        ("data.clients=1 privacy.trust=secagg", "secure aggregation needs at least 2 clients"),
        ("data.clients=5 privacy.colluders=5", "fewer than the 5 clients, not 5"),
        ("data.clients=5 privacy.trust=secagg privacy.min_cohort=6", "at most the 5 clients, not 6"),
        ("privacy.min_cohort=3", "min_cohort belongs to trust = 'secagg'"),
        ("privacy.tuning_runs=0", "tuning_runs must be at least 1, not 0."),
        ("privacy.tuning_runs=1000000000000000", "those of other runs included"),
        ("privacy.noise_std=0.1 privacy.epsilon=0.5", "does not pay for one round"),
        ("privacy.noise_scale=total_norm", "nothing can be calibrated for it"),
        ("method.name=ef21", "EF21 does not bound what a client sends"),
        ("method.name=fed_avg", "FedAvg does not bound what a client sends"),
        ("method.name=scaffold", "SCAFFOLD does not bound what a client sends"),
        ("method.initial_memory=local_updates", "publishes the clients' exact updates"),
    ],
)
def test_what_cannot_be_private_is_refused_before_anything_is_written(fednormec_, tmp_path, overrides, message):
    code, out, err = fednormec_("run", *sets(*overrides.split()), "--out", "out")
    assert (code, out, list(tmp_path.iterdir())) == (2, "", [])
    assert err.startswith("fednormec: ") and len(err.splitlines()) == 1 and message in err


# fednormec audit


@pytest.fixture
def few_side_rounds(monkeypatch):
    """Of noise alone, a twentieth of those that the command takes: enough for what is far off."""
    few = partial(audit.audit_mechanism, side_rounds=audit.SIDE_ROUNDS // 20)
    monkeypatch.setattr(audit, "audit_mechanism", few)


@pytest.mark.long
def test_the_audit_of_the_quickstart_is_consistent(fednormec_):
    code, out, err = fednormec_("audit", "--json")
    found = json.loads(out)
    assert (code, err, found["verdict"]) == (0, "", "consistent")
    assert 0 <= found["lower_bound"] <= found["claimed"] <= 4
    assert found["estimate"] == pytest.approx(found["expected"], abs=1.5)


@pytest.mark.long
def test_an_audit_is_told_to_a_person(fednormec_, few_side_rounds):
    said = fednormec_("audit", "--canaries", 40)[1]
    assert "claimed      ε ≤ 4.00" in said and "lower bound  ε ≥" in said and "estimate     ε ≈" in said


def test_an_audit_of_a_training_runs_on_a_config(fednormec_):
    code, out, _ = fednormec_("audit", "--training", "--json", *sets(*SMALL), "--canaries", 60)
    assert code == 0 and json.loads(out)["trials"] == 60


@pytest.mark.long
def test_an_audit_that_refutes_the_claim_exits_with_1(fednormec_, monkeypatch, few_side_rounds):
    right = fn.Mechanism.noise
    monkeypatch.setattr(fn.Mechanism, "noise", lambda self, *where: right(self, *where) / 2)
    code, out, _ = fednormec_("audit", "--canaries", 100)
    assert code == 1 and "violated" in out and "noise level: FAILED" in out


def test_there_is_nothing_to_audit_without_privacy(fednormec_, tmp_path):
    (tmp_path / "my.toml").write_text(fednormec_("config", "--not-private")[1])
    code, _, err = fednormec_("audit", "my.toml")
    assert (code, err) == (2, "fednormec: there is nothing to audit: this config has no [privacy].\n")


# lazy


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import fednormec.cli.main", ("torch", "scipy", "dp_accounting", "matplotlib")),
        ("import fednormec as fn; fn.Mechanism(9, fn.full(), 1.0).epsilon(9, 0.1)", ("dp_accounting", "matplotlib")),
    ],
)
def test_help_and_closed_forms_do_not_wait_for_the_accountant(code, heavy):
    code += f"; import sys; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_a_statement_is_exactly_as_strong_as_its_numbers(fednormec_):
    """What is printed is rounded up, so that it still holds."""
    result = json.loads(fednormec_("run", "--json", "--quiet", *sets(*SMALL, "privacy.noise_std=1.7"))[1])
    printed = float(re.match(r"ε ≤ ([\d.]+)", result["statement"])[1])
    assert result["epsilon"] <= printed <= result["epsilon"] * 1.01
    assert math.isfinite(printed)
