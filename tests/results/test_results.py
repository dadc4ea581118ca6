"""Run folders read back: what can be read is, what cannot is said, and runs with other seeds belong together."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Command, sentence, sets
from folders import ANYTHING, FILES, made, spoilt
from hypothesis import HealthCheck, given, settings
from paths import PLAIN

from fednormec.config.schema import read
from fednormec.privacy.labels import NOT_PRIVATE
from fednormec.results.compare import as_csv, as_markdown, as_text, facts, ranked, table, winner
from fednormec.results.groups import grouped
from fednormec.results.reading import NO_PRIVACY, PRIVATE, UNKNOWN, find_runs, read_run
from fednormec.runs.runner import perform

SMALL = ("model.name=linear", "data.partition=iid", "data.clients=4", "local.steps=1", "run.rounds=2")


# reading


@pytest.mark.long
def test_a_real_run_reads_back(tmp_path: Path) -> None:
    summary = perform(read(PLAIN, [*SMALL, "privacy.noise_std=1"]), "test", tmp_path / "run", quiet=True)
    run = read_run(tmp_path / "run")
    assert run.problems == ()
    assert run.statement == summary["statement"]
    assert run.config == read(tmp_path / "run" / "config.toml")
    assert run.final("test_accuracy") == summary["metrics"]["test_accuracy"]
    assert run.final("train_loss") == summary["metrics"]["train_loss"]
    assert (run.epsilon, run.delta, run.protection) == (summary["epsilon"], 1e-5, PRIVATE)
    assert (run.rounds, run.clients, run.seed, run.status) == (2, 4, 0, "done")
    assert [at for at, _ in run.values("test_loss")] == [1, 2]


@pytest.mark.parametrize(
    ("overrides", "protection"),
    [((), NO_PRIVACY), (("privacy.noise_std=1", "privacy.noise_scale=total_norm"), NOT_PRIVATE)],
)
def test_what_a_real_run_protects(tmp_path: Path, overrides: tuple[str, ...], protection: str) -> None:
    perform(read(PLAIN, [*SMALL, *overrides]), "test", tmp_path / "run", quiet=True)
    (tmp_path / "run" / "summary.json").unlink()  # it is known while the run goes on, too
    assert read_run(tmp_path / "run").protection == protection


@pytest.mark.parametrize("lost", [(), *((name,) for name in FILES), FILES])
def test_the_label_of_what_protects_nobody_survives_any_lost_file(tmp_path: Path, lost: tuple[str, ...]) -> None:
    made(tmp_path / "run", [0.5], label=True)
    for name in lost:
        (tmp_path / "run" / name).unlink()
    run = read_run(tmp_path / "run")
    assert run.protection == (UNKNOWN if lost == FILES else NOT_PRIVATE)
    assert (NOT_PRIVATE in run.title) == (lost != FILES)
    (group,) = grouped([run])
    assert (NOT_PRIVATE in group.label) == (lost != FILES)


@pytest.mark.parametrize("lost", FILES)
def test_a_lost_file_is_named_and_the_rest_is_there(tmp_path: Path, lost: str) -> None:
    (made(tmp_path / "run", [0.25, 0.5]) / lost).unlink()
    run = read_run(tmp_path / "run")
    (problem,) = run.problems
    assert lost in problem
    assert run.final("test_accuracy") == 0.5
    assert run.epsilon == 2.0
    assert run.status == ("unfinished" if lost == "summary.json" else "done")


def test_a_cut_off_line_costs_only_itself(tmp_path: Path) -> None:
    path = made(tmp_path / "run", [0.25, 0.5]) / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    run = read_run(tmp_path / "run")
    assert run.problems == ("the last line of metrics.jsonl is cut off",)
    assert run.values("test_accuracy") == [(2, 0.25)]
    path.write_text("[1]\nnonsense\n" + path.read_text())
    assert read_run(tmp_path / "run").problems == (
        "3 of 6 lines of metrics.jsonl cannot be read, the first is line 1",
    )  # fmt: skip


def test_an_unfinished_run_has_spent_what_its_ledger_says(tmp_path: Path) -> None:
    """The ledger is ahead of the metrics: a release is paid before it is made."""
    path = made(tmp_path / "run", [0.25, 0.5])
    (path / "summary.json").unlink()
    (path / "metrics.jsonl").write_text((path / "metrics.jsonl").read_text().splitlines()[0] + "\n")
    run = read_run(path)
    assert run.rounds == 1
    assert run.epsilon == 2.0


def test_what_was_not_finite_stays_so(tmp_path: Path) -> None:
    run = read_run(made(tmp_path / "run", [0.5, None]))
    assert math.isnan(run.final("test_accuracy") or 0)
    assert run.best("test_accuracy") == 0.5
    assert "not finite" in as_text(table(grouped([run])))
    assert (
        winner(grouped([run, read_run(made(tmp_path / "other", [0.1], run={"rounds": 4}, method={"beta": 1.0}))])).label
        == "β=1"
    )


def test_an_epsilon_that_is_not_finite_protects_nobody(tmp_path: Path) -> None:
    path = made(tmp_path / "run", [0.5])
    (path / "summary.json").write_text((path / "summary.json").read_text().replace('"epsilon": 2.0', '"epsilon": null'))
    run = read_run(path)
    assert (run.epsilon, run.protection) == (math.inf, NOT_PRIVATE)


@pytest.mark.long
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ANYTHING)
def test_no_content_of_a_folder_stops_a_comparison(tmp_path: Path, contents: dict[str, Any]) -> None:
    where = tmp_path / str(len(list(tmp_path.iterdir())))
    spoilt(where / "run", contents)
    groups = grouped(find_runs([where]))
    for text in (as_text(table(groups)), as_markdown(table(groups)), as_csv(groups), json.dumps(facts(groups))):
        assert text


# finding


def test_runs_are_found_three_deep_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("a/cells/run-10", "a/cells/run-9", "b", "c/d/e/too-deep"):
        made(tmp_path / name, [0.5])
    found = find_runs([tmp_path, tmp_path / "b"])
    assert [run.name for run in found] == ["run-9", "run-10", "b"]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("a/run", "b/run", "b/other"):
        made(tmp_path / name, [0.5])
    assert sorted(run.name for run in find_runs([tmp_path])) == ["a/run", "b/run", "other"]


@pytest.mark.parametrize("command", ["compare", "report"])
def test_where_there_is_no_run_a_sentence_says_so(fednormec_: Command, tmp_path: Path, command: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    said = fednormec_(command, "empty")
    assert (said.code, sentence(said.err)) == (2, "empty holds no run, nor does a folder up to 3 deep in it.")
    assert "nowhere does not exist" in sentence(fednormec_(command, "nowhere").err)
    assert "file is a file" in sentence(fednormec_(command, "file").err)
    assert not (tmp_path / "report.html").exists()


# grouping


def test_seeds_belong_together_and_methods_do_not(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.4, 0.5, 0.6)):
        made(tmp_path / f"a{seed}", [0.1, accuracy], run={"seed": seed}, privacy={"stream": seed})
        made(tmp_path / f"b{seed}", [0.7, 0.3], run={"seed": seed}, method={"name": "clip21", "tau": 1.0})
    normec, clip = ranked(grouped(find_runs([tmp_path])))
    assert (normec.label, clip.label) == ("fed_normec", "clip21")
    assert [run.seed for run in normec.runs] == [0, 1, 2]
    final = normec.final("test_accuracy")
    assert final.runs == 3
    np.testing.assert_allclose(final[:4], [0.5, 0.1, 0.4, 0.6])
    np.testing.assert_allclose(clip.best("test_accuracy").mean, 0.7)
    np.testing.assert_allclose(clip.final("test_loss").mean, 0.25)
    curve = normec.curve("test_accuracy")
    assert curve.rounds.tolist() == [2, 4]
    np.testing.assert_allclose([curve.mean, curve.low, curve.high], [[0.1, 0.5], [0.1, 0.4], [0.1, 0.6]])


@pytest.mark.parametrize(
    ("first", "second", "labels"),
    [
        ({"method": {"beta": 0.01}}, {"method": {"beta": 0.1}}, ["β=0.01", "β=0.1"]),
        ({"participation": {"p": 1.0}}, {"local": {"step": 2}}, ["p=1", "p=0.5"]),
        ({"model": {"name": "mlp"}}, {"model": {"name": "linear"}}, ["model mlp", "model linear"]),
        ({"privacy": {"epsilon": 8.0}}, {}, ["ε=8", "ε=2"]),
        ({"privacy": {"epsilon": 8.0, "calibration": "paper"}}, {}, ["target ε=8 calibration=paper", "ε=2"]),
        (
            {"method": {"server_step": 3.0}, "local": {"step": 0.5}},
            {"method": {"server_step": 1}, "local": {"step": 1}},
            ["η=3 γ=0.5", "η=1 γ=1"],
        ),
        ({"participation": {"name": "full"}}, {}, ["p=1", "p=0.5"]),
        ({"participation": {"name": "fixed_size", "m": 3}}, {"participation": {"name": "full"}}, ["m=3", "p=1"]),
        ({"participation": {"idle": "sleep"}}, {"participation": {"idle": "advance"}}, ["idle=sleep", "idle=advance"]),
        (
            {"participation": {"idle": "sleep"}},
            {"participation": {"idle": "advance"}, "method": {"name": "clip21"}},
            ["fed_normec", "clip21"],
        ),
        ({"data": {"source": "a\nb"}}, {"data": {"source": "c"}}, ["data.source=a\\nb", "data.source=c"]),
        ({"method": {f"a_setting_{k}": k for k in range(9)}}, {}, ["one", "two"]),
    ],
)
def test_a_label_says_what_differs(tmp_path: Path, first: Any, second: Any, labels: list[str]) -> None:
    made(tmp_path / "one", [0.5], **first)
    made(tmp_path / "two", [0.5], **second)
    assert [group.label for group in grouped(find_runs([tmp_path / "one", tmp_path / "two"]))] == labels


def test_labels_of_a_sweep_are_short(tmp_path: Path) -> None:
    for beta, step, who, epsilon in itertools.product(
        (0.1, 0.3), (1.0, 3.0), ({"name": "full"}, {"name": "poisson", "p": 0.1, "idle": "sleep"}), (4.0, 8.0)
    ):
        made(
            tmp_path / f"{beta}{step}{who['name']}{epsilon}", [0.5], method={"beta": beta, "server_step": step},
            participation={"p": 1.0} | who, privacy={"epsilon": epsilon},
        )  # fmt: skip
    made(tmp_path / "other", [0.5], method={"name": "dp_fed_avg_normalized", "bounded": "displacement"})
    labels = {group.label for group in grouped(find_runs([tmp_path]))}
    assert {"fed_normec β=0.3 η=3 p=1 ε=8", "fed_normec β=0.1 η=1 p=0.1 ε=4"} < labels
    assert "dp_fed_avg_normalized p=0.5 ε=2" in labels
    assert len(labels) == 17


@pytest.mark.parametrize(
    ("names", "label"), [(("x_p=1_seed=0", "x_p=1_seed=1"), "x_p=1"), (("a", "b", "c"), "a and 2 more")]
)
def test_several_seeds_are_named_after_their_folder_without_the_seed(
    tmp_path: Path, names: tuple[str, ...], label: str
) -> None:
    for seed, name in enumerate(names):
        made(tmp_path / name, [0.5], run={"seed": seed}, method={f"a_setting_{k}": k for k in range(9)})
    made(tmp_path / "short", [0.5], method={"beta": 0.3})
    assert {group.label for group in grouped(find_runs([tmp_path]))} == {label, "β=0.3"}


def test_folders_of_different_settings_keep_their_names_apart(tmp_path: Path) -> None:
    for k, name in enumerate(("x_seed=0", "x_seed=1", "x_seed=2", "x_seed=3")):
        made(tmp_path / name, [0.5], run={"seed": k}, method={f"a_setting_{j}": j + k // 2 for j in range(9)})
    assert [group.label for group in grouped(find_runs([tmp_path]))] == ["x_seed=0", "x_seed=2"]


def test_a_run_without_privacy_beside_a_private_one_says_so(tmp_path: Path) -> None:
    made(tmp_path / "one", [0.5])
    made(tmp_path / "two", [0.6], epsilon=None)
    assert [group.label for group in ranked(grouped(find_runs([tmp_path])))] == ["ε=2", NO_PRIVACY]


def test_the_best_private_run_is_first_and_the_others_are_the_reference(tmp_path: Path) -> None:
    made(tmp_path / "bare", [0.9], epsilon=None)
    made(tmp_path / "loud", [0.95], label=True)
    made(tmp_path / "low", [0.5], privacy={"epsilon": 1.0})
    made(tmp_path / "high", [0.6], epsilon=8.0, privacy={"epsilon": 8.0})
    groups = grouped(find_runs([tmp_path]))
    assert [group.runs[0].name for group in ranked(groups)] == ["high", "low", "loud", "bare"]
    best = winner(groups)
    assert best is not None and best.label == "ε=8 noise_scale=per_coordinate"  # each setting once
    notes = table(groups).notes
    assert notes[0] == "* the best final test accuracy of the private runs."
    assert notes[1] == f"without privacy, for reference: 90.0 %, {NO_PRIVACY}."
    bare = grouped(find_runs([tmp_path / "bare", made(tmp_path / "more", [0.3], epsilon=None, run={"rounds": 9})]))
    assert [group.runs[0].name for group in ranked(bare)] == ["bare", "more"]
    assert not any("reference" in note or "private" in note for note in table(bare).notes)


def test_an_unfinished_run_does_not_count_beside_finished_ones(tmp_path: Path) -> None:
    for seed in range(3):
        made(tmp_path / str(seed), [0.5, 0.1 * seed], run={"seed": seed})
    (tmp_path / "2" / "summary.json").unlink()
    (group,) = grouped(find_runs([tmp_path]))
    assert group.status == "2 done, 1 unfinished"
    assert (group.seeds, group.final("test_accuracy").high) == (2, 0.1)
    assert len(group.runs) == 3


def test_the_same_seed_again_is_not_another_seed(tmp_path: Path) -> None:
    for name in "ab":
        made(tmp_path / name, [0.5])
    (group,) = grouped(find_runs([tmp_path]))
    assert (len(group.runs), group.seeds) == (2, 1)


# the table


def test_the_winner_is_marked_and_epsilon_rounded_up(tmp_path: Path) -> None:
    made(tmp_path / "a", [0.9, 0.5], epsilon=1.2341)
    made(tmp_path / "b", [0.6, 0.6], method={"beta": 1.0})
    made(tmp_path / "c", [0.4], epsilon=1845.2, label=True)
    made(tmp_path / "d", [0.3], epsilon=None)
    groups = grouped(find_runs([tmp_path]))
    shown = table(groups)
    cells = [dict(zip(shown.header, row, strict=True)) for row in shown.rows]
    assert [row["run"][:2] for row in cells] == ["* ", "  ", "  ", "  "]
    assert [row["test accuracy"] for row in cells] == ["60.0 %", "50.0 %", "40.0 %", "30.0 %"]
    assert [row["best"] for row in cells] == ["60.0 %", "90.0 %", "40.0 %", "30.0 %"]
    assert [row["ε"] for row in cells] == ["2.00", "1.24", f"1850 {NOT_PRIVATE}", "none"]
    assert [row["messages"] for row in cells] == ["20", "20", "10", "10"]
    assert NOT_PRIVATE in cells[2]["run"]
    assert any("runs on the same clients add up" in note for note in shown.notes)


def test_beside_an_epsilon_only_the_public_stands_unmarked(tmp_path: Path) -> None:
    path = made(tmp_path / "a", [0.5])
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: line[key] for key in ("round", "epsilon", "delta", "not_private")} for line in lines]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    (path / "summary.json").unlink()
    groups = grouped(find_runs([tmp_path]))
    assert "train loss (not private)" in table(groups).header
    assert "train_loss" not in facts(groups)[0]
    assert "train_loss" in facts(groups)[0]["not_private"]
    assert "sent" not in as_csv(groups)


def test_the_command_prints_and_writes_the_table(fednormec_: Command, tmp_path: Path) -> None:
    for seed in range(2):
        made(tmp_path / "runs" / f"a{seed}", [0.5], run={"seed": seed})
        made(tmp_path / "runs" / f"b{seed}", [0.6], run={"seed": seed}, method={"beta": 0.5})
    said = fednormec_("compare", "runs", "--csv", "t.csv", "--markdown", "t.md")
    assert (said.code, said.err) == (0, "")
    assert max(map(len, said.out.splitlines())) <= 80
    assert said.out.splitlines()[1].split()[:3] == ["*", "β=0.5", "2"]
    assert (tmp_path / "t.csv").read_text().count("\n") == 3
    assert (tmp_path / "t.md").read_text().startswith("| run |")
    again = fednormec_("compare", "runs", "--csv", "new.csv", "--markdown", "t.md")
    assert (again.code, again.out) == (2, "")
    assert "t.md exists already" in sentence(again.err)
    assert not (tmp_path / "new.csv").exists()
    assert fednormec_("compare", "runs", "--markdown", "t.md", "--force").code == 0
    rows = json.loads(fednormec_("compare", "runs", "--json").out)["runs"]
    assert [row["winner"] for row in rows] == [True, False]
    assert rows[0]["test_accuracy"]["mean"] == 0.6


@pytest.mark.long
def test_numbers_that_are_not_finite_are_null_in_json(fednormec_: Command, tmp_path: Path) -> None:
    """Wherever they stand: the loss of a run that went astray, alone and beside others."""

    def fail(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    first = fednormec_("run", *sets("method.beta=1e300", "run.rounds=3"), "--out", "a")
    assert first.code == 0
    found = fednormec_("compare", "a", "--json")
    assert (found.code, found.err) == (0, "")
    assert json.loads(found.out, parse_constant=fail)["runs"][0]["not_private"]["train_loss"]["mean"] is None
    assert "train loss     not finite  (a look at the clients' data: not private)\n" in first.out
    assert fednormec_("run", "--resume", "a").out == first.out
    for path in (tmp_path / "a").glob("*.json"):
        json.loads(path.read_text(), parse_constant=fail)


def test_what_could_not_be_read_is_told_beside_the_table(fednormec_: Command, tmp_path: Path) -> None:
    (made(tmp_path / "run", [0.5]) / "summary.json").unlink()
    said = fednormec_("compare", "run")
    assert said.code == 0
    assert "unfinished" in said.out
    assert said.err == "note: run: summary.json is missing: the run did not come to its end.\n"
