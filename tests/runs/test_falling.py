"""A curve that ends clearly below its best is named, and no other; run, serve and init warn of noise beforehand."""

import json
from pathlib import Path

import numpy as np
import pytest
from command import Command, sets
from hypothesis import given
from hypothesis import strategies as st

from fednormec.config.schema import read
from fednormec.config.settings import QUICKSTART
from fednormec.runs.falling import LEAST, falling
from fednormec.runs.records import finished
from fednormec.runs.runner import go_on, perform

ISSUE = [  # of the quickstart with 400 rounds, in %
    70.8, 85.5, 85.8, 81.9, 77.7, 74.1, 68.2, 67.4, 66.9, 63.2, 61.8, 58.5, 57.9, 56.8, 55.4, 55.4, 55.7, 55.4, 55.4,
    55.2,
]  # fmt: skip
FALLS = sets(
    "data.clients=100", "privacy.epsilon=20", "run.rounds=60", "method.beta=0.2", "participation.p=1"
)  # fmt: skip
SMALL = ("model.name=linear", "data.clients=6", "run.rounds=3", "privacy.epsilon=20")


def fall(values, metric="test_accuracy", not_private=False):
    return falling(metric, range(1, len(values) + 1), values, not_private)


def test_the_curve_of_the_issue_is_named():
    found = fall(np.array(ISSUE) / 100)
    assert found == ("test_accuracy", 3, 0.858, 0.552, False)
    said = found.sentence(private=True)
    assert said.startswith("test accuracy got worse: 85.8% after round 3, 55.2% at the end. Take fewer rounds, ")
    assert "run.rounds=3" in said and "ε" in said and "not private" not in said
    assert "ε" not in found.sentence(private=False)


def test_what_looks_at_clients_is_marked():
    found = fall([-value for value in ISSUE], "train_loss", not_private=True)
    assert found.not_private
    assert "(a look at the clients' data: not private)" in found.sentence(private=True)


def test_a_loss_that_climbs_is_named_and_one_that_drops_is_not():
    climbs = 3.0 - np.array(ISSUE) / 40
    assert fall(climbs, "test_loss").best == climbs.min()
    assert fall(climbs[::-1], "test_loss").round == 18
    assert fall(np.sort(climbs)[::-1], "test_loss") is None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.sampled_from(["test_accuracy", "test_auc", "test_mine"]))
def test_a_curve_that_never_goes_down_is_never_named(values, metric):
    assert fall(sorted(values), metric) is None
    assert fall(sorted(values, reverse=True), "test_loss") is None


@pytest.mark.parametrize("evaluations", [LEAST, 8, 20, 39])
@pytest.mark.parametrize("examples", [100, 359, 2000])
def test_a_flat_curve_is_rarely_named_for_the_sampling_error_of_its_test_set(evaluations, examples):
    rng = np.random.default_rng(5)
    named = [fall(rng.binomial(examples, 0.85, evaluations) / examples) is not None for _ in range(1000)]
    assert sum(named) <= 20


@pytest.mark.parametrize("examples", [359, 2000])
def test_a_fall_of_20_points_is_found_in_the_same_noise(examples):
    rng = np.random.default_rng(5)
    truth = np.concatenate([np.linspace(0.3, 0.85, 6), np.linspace(0.85, 0.65, 14)])
    named = [fall(rng.binomial(examples, truth) / examples) is not None for _ in range(200)]
    assert sum(named) >= 190


def test_few_evaluations_and_non_finite_ones_are_left_alone():
    assert fall([0.9, 0.8, 0.2, 0.1]) is None
    holes = [value if k % 4 else float("nan") for k, value in enumerate(np.array(ISSUE) / 100)]
    assert fall(holes) == ("test_accuracy", 3, 0.858, 0.552, False)
    assert fall([float("nan")] * 9) is None


# On the command line (pictures are not drawn: that takes longer than the runs)


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
def test_run_says_the_ratio_before_and_the_fall_after(fednormec_: Command, tmp_path: Path) -> None:
    said = fednormec_("run", "--json", *FALLS, "--out", "out")
    found = json.loads(said.out)
    first, *_, last = said.err.splitlines()
    assert said.code == 0
    assert first.startswith("note: noise to signal: at least ")
    assert f"{found['noise_to_signal']['per_round']:.2g} in a round" in first
    assert last == f"note: {found['warnings'][0]}"
    assert found["falling"]["metric"] == "test_accuracy"
    assert found["falling"]["best"] - found["falling"]["end"] > 0.1
    assert found["falling"] == json.loads((tmp_path / "out" / "summary.json").read_text())["falling"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<dt>noise to signal</dt><dd>at least " in page
    assert "test accuracy got worse" in page
    again = fednormec_("run", "--resume", "out")
    assert again.err.splitlines()[-1] == last


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
def test_a_run_that_cannot_learn_is_warned_of_also_when_quiet(fednormec_: Command) -> None:
    few = sets("data.clients=3", "run.rounds=2", "privacy.trust=local", "participation.name=full", "privacy.epsilon=1")
    loud, quiet = (fednormec_("run", *few, *more) for more in ((), ("--quiet",)))
    warned = [line for line in loud.err.splitlines() if line.startswith("note: nothing can be learnt: ")]
    assert len(warned) == 2  # before and after
    assert quiet.err.splitlines() == warned[:1]
    fine = fednormec_("run", "--quiet", *sets("run.rounds=1", "privacy.epsilon=8"))
    assert (fine.code, fine.err) == (0, "")


def test_an_old_summary_reads_as_before(tmp_path: Path) -> None:
    done = perform(read(QUICKSTART, SMALL), "test", tmp_path / "out", quiet=True)
    path = tmp_path / "out" / "summary.json"
    new = json.loads(path.read_text())
    assert new["noise_to_signal"]["per_round"] > 0 and isinstance(new["warnings"], list)
    old = {key: value for key, value in new.items() if key not in ("noise_to_signal", "warnings", "falling")}
    path.write_text(json.dumps(old))
    assert finished(tmp_path / "out") == old
    assert go_on(tmp_path / "out", quiet=True)["metrics"] == done["metrics"]
