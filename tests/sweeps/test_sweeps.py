"""Sweeps: every combination once, as if alone, whatever is stopped, killed or fails on the way; ranked and priced."""

import csv
import json
import multiprocessing
import re
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from command import Command, sentence
from paths import PLAIN
from sweep_cells import NOISE, digits, from_toml, quadratic, stamps, written

import fednormec as fn
import fednormec.config.schema
import fednormec.runs.runner
from fednormec.config.schema import changed, dump, read
from fednormec.engine.observers import Observer
from fednormec.errors import UserError
from fednormec.privacy.accounting import epsilon, epsilon_of_all
from fednormec.runs.records import Summary
from fednormec.runs.runner import perform
from fednormec.sweeps import pool as cells_module
from fednormec.sweeps.grid import LONGEST_NAME, grid, plain
from fednormec.sweeps.pool import Cell, run_all, run_folders
from fednormec.sweeps.price import price_of, price_text
from fednormec.sweeps.ranking import Sweep, facts, line, sweep, text

pytestmark = pytest.mark.usefixtures("undrawn")

# the grid


def test_every_combination_is_a_cell_the_last_list_fastest(tmp_path: Path) -> None:
    found = from_toml(tmp_path, "method.beta = [0.01, 0.1]\nrun.seed = [0, 1, 2]")
    assert [cell.name for cell in found] == [f"beta={b}_seed={s}" for b in ("0.01", "0.1") for s in range(3)]
    for cell in found:
        assert cell.config["method"] == {"name": "fed_normec", "beta": cell.settings["method.beta"]}
        assert cell.config["run"] == {"rounds": 3, "seed": cell.settings["run.seed"]}


@pytest.mark.parametrize(
    "axes", ["method.beta = [0.01, 0.1]", '"method.beta" = [0.01, 0.1]', "[sweep.method]\nbeta = [0.01, 0.1]"]
)
def test_dotted_quoted_and_nested_keys_mean_the_same(tmp_path: Path, axes: str) -> None:
    found = from_toml(tmp_path, axes)
    assert [cell.config["method"]["beta"] for cell in found] == [0.01, 0.1]
    assert [cell.name for cell in found] == ["beta=0.01", "beta=0.1"]


def test_a_table_sets_several_things_at_once(tmp_path: Path) -> None:
    found = from_toml(
        tmp_path,
        'steps = [{local.step = 0.2, "method.beta" = 0.3}, {name = "own", method.name = "clip21", method.tau = 2.0}]\n'
        "run.seed = [7]",
    )
    assert [cell.name for cell in found] == ["steps=step=0.2,beta=0.3_seed=7", "steps=own_seed=7"]
    assert found[0].config["local"] == {"name": "gd", "step": 0.2}
    assert found[0].config["method"] == {"name": "fed_normec", "beta": 0.3}
    assert found[1].config["method"] == {"name": "clip21", "tau": 2.0}  # another method keeps no β


def test_names_are_unique_and_fit_every_file_system() -> None:
    sources = ["a/b.npz", "a-b.npz", "a b.npz", "../..", "", "ä" * 300, "x" * 300, "x" * 301, "CON\x00\n", "."]
    values = {"data.source": sources, "model.hidden": [[64], [6, 4], []], "method.beta": [0.1, 0.1 + 1e-12, 1e-30]}
    names = [cell.name for cell in grid(quadratic(), values)]
    assert len({name.lower() for name in names}) == len(names) == 10 * 3 * 3
    for name in names:
        assert re.fullmatch(r"[\w=+,-][\w.=+,-]*", name, re.ASCII) and len(name) <= LONGEST_NAME
    assert {plain(v) for v in (1, 0.5, True, "x", [1, 2], [])} == {"1", "0.5", "True", "x", "1x2", "none"}


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("", "there is nothing to sweep over"),
        ("method.beta = []", r"\[sweep\] method.beta must be a list of at least one value, not \[\]"),
        ("method.beta = 0.1", r"\[sweep\] method.beta must be a list of at least one value, not 0.1"),
        ("metod.beta = [1]", "unknown section 'metod'; did you mean 'method'?"),
        ("beta = [1]", "a name without a dot takes a list of tables"),
        ("method.beta = [1, {local.step = 1}]", "a setting, such as method.beta, takes a list of values"),
        ("steps = [{step = 1}]", r"\[sweep\] steps: 'step' is no setting: write section.key"),
        ("steps = [{metod.beta = 1}]", "unknown section 'metod'"),
        ("method.beta = [1]\nboth = [{method.beta = 2}]", "sets method.beta in two lists at once"),
        ('x = [{name = "a"}, {name = "b"}]', "every table must set something"),
        ("privacy.stream = [1, 2]", "every cell gets a stream of its own"),
    ],
)
def test_a_grid_that_cannot_be_is_said(tmp_path: Path, axes: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_toml(tmp_path, axes)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            {"method.betta": [0.1]},
            "the cell betta=0.1: unknown setting in .method. fed_normec 'betta'; did you mean 'b",
        ),
        ({"method.beta": [0.1, "much"]}, "the cell beta=much: .* must be a number"),
        ({"run.seed": [0, 0.5]}, "the cell seed=0.5: .* must be a whole number"),
        (
            {"problem.client": [3, 4]},
            "the cell client=3: unknown setting in .problem. quadratic 'client'; did you mean",
        ),
        ({"method.beta": [0.1, 0.1]}, "two cells are called 'beta=0.1'"),
        ({"privacy.noise_std": [1.0], "privacy.delta": [0.5, 2.0]}, "the cell noise_std=1_delta=2: delta must lie"),
    ],
)
def test_a_wrong_setting_names_its_cell_before_anything_runs(tmp_path: Path, axes: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sweep(grid(quadratic(), axes), tmp_path / "out", 1)
    assert not (tmp_path / "out").exists() or "two cells" in message


# on the command line


def test_a_sweep_is_no_run(fednormec_: Command, tmp_path: Path) -> None:
    given = written(tmp_path / "my.toml", quadratic(), "method.beta = [0.1]")
    for command in ("run", "config", "theory", "audit"):
        said = fednormec_(command, given)
        assert said.code == 2
        assert sentence(said.err) == f"{given} has a [sweep], which makes it many runs: fednormec sweep {given}"


@pytest.mark.long
def test_the_command_lists_runs_prints_and_writes(here: None, fednormec_: Command, tmp_path: Path) -> None:
    given = written(tmp_path / "my.toml", quadratic(), "method.beta = [0.1, 0.2]")
    assert fednormec_("sweep", given, "--list").out == "beta=0.1\nbeta=0.2\n"
    assert not (tmp_path / "sweeps").exists()
    said = fednormec_("sweep", given, "--over", "local.step=[0.1,0.2]", "--set", "run.seed=4")
    assert said.code == 0 and "best      beta=0." in said.out and len(said.out.splitlines()) == 5 + 3
    lines = said.err.splitlines()
    assert [
        re.match(r"(\d)/4  \d+ s, \d+ s left  beta=0.[12]_step=0.[12]: loss [\d.]+ \(not private\)$", one)[1]
        for one in lines
    ] == [*"1234"]
    table = list(csv.DictReader((tmp_path / "sweeps" / "my" / "table.csv").read_text(encoding="utf-8").splitlines()))
    tried = {(row["method.beta"], row["local.step"]) for row in table}
    assert len(table) == 4 and tried == {(beta, step) for beta in ("0.1", "0.2") for step in ("0.1", "0.2")}
    means = [float(row["train_loss (not private) mean"]) for row in table]
    assert means == sorted(means) and {row["epsilon"] for row in table} == {"none"}
    markdown = (tmp_path / "sweeps" / "my" / "table.md").read_text(encoding="utf-8").splitlines()
    assert [one.count("|") for one in markdown] == [10] * 6
    again = fednormec_("run", "sweeps/my/best.toml", "--json", "--quiet")
    assert json.loads(again.out)["metrics"]["train_loss"] == pytest.approx(means[0], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--over", "method.beta"),
            "--over takes section.key=value, such as method.beta=[0.01,0.1], not 'method.beta'.",
        ),
        (("--over", "method.beta=0.1"), "[sweep] method.beta must be a list of at least one value, not 0.1."),
        (("--metric", "train_los"), "unknown metric 'train_los'; did you mean 'train_loss'?"),
        (("--workers", "0"), "workers must be at least 1, not 0."),
        (("--not-private", "--over", "privacy.epsilon=[1,2]"), "--not-private drops [privacy], but the sweep is over"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_nothing(
    fednormec_: Command, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    given = written(tmp_path / "my.toml", quadratic(), "local.step = [0.1]")
    said = fednormec_("sweep", given, *arguments)
    assert (said.code, said.out) == (2, "") and sentence(said.err).startswith(message)
    assert not (tmp_path / "sweeps").exists()


def test_over_replaces_a_list_of_the_config_and_lives_beside_a_table_of_that_name(
    fednormec_: Command, tmp_path: Path
) -> None:
    given = written(tmp_path / "my.toml", quadratic(), 'method.beta = [0.1]\nlocal = [{name = "x", local.step = 0.2}]')
    said = fednormec_("sweep", given, "--list", "--over", "method.beta=[3,4]", "--over", "run.seed=[5]")
    assert said.out.split() == ["beta=3_local=x_seed=5", "beta=4_local=x_seed=5"]


# what is left of it


def test_cells_that_diverge_fail_or_have_no_value_rank_last(here: None, tmp_path: Path) -> None:
    axes = {"local.step": [1e39, 0.5], "participation": [
        {"name": "some", "participation.name": "fixed_size", "participation.m": 2},
        {"name": "too many", "participation.name": "fixed_size", "participation.m": 9},
    ], "run.seed": [0, 1]}  # fmt: skip
    base = digits(method={"name": "fed_avg"})
    news: list[Any] = []
    done = sweep(grid(base, axes), tmp_path / "out", 1, tell=news.append)
    assert done.metric == "test_accuracy"  # which a model that diverged at once does not have
    assert [(row.settings["local.step"], row.settings["participation"], row.trouble) for row in done.rows] == [
        (0.5, "some", ""), (1e39, "some", "2 diverged"), (1e39, "too many", "2 failed"), (0.5, "too many", "2 failed"),
    ]  # fmt: skip
    assert done.best is done.rows[0] and done.best.value is not None and done.best.value.runs == 2
    assert [row.value for row in done.rows[1:]] == [None] * 3
    assert (tmp_path / "out" / "best.toml").read_text() == fednormec.config.schema.dump(
        done.best.outcomes[0].cell.config
    )
    said = text(done)
    assert said.count("\nfailed    ") == 4 and "participation=too many" not in said
    assert all(line(one) for one in news if one.ended is not None) and news[-1].cells_ended == 8
    table = list(csv.reader((tmp_path / "out" / "table.csv").read_text(encoding="utf-8").splitlines()))
    assert [row[-1] for row in table] == ["trouble", "", "2 diverged", "2 failed", "2 failed"]
    assert json.loads(json.dumps(facts(done), allow_nan=False))["best"] == done.best.settings


@pytest.mark.long
def test_ties_keep_the_grids_order_and_seeds_are_averaged(here: None, tmp_path: Path) -> None:
    done = sweep(grid(quadratic(), {"run.evaluate_every": [3, 1], "run.seed": [0, 1, 2]}), tmp_path / "out", 1)
    assert [row.settings for row in done.rows] == [{"run.evaluate_every": 3}, {"run.evaluate_every": 1}]
    (first, second) = (row.value for row in done.rows)
    assert first == second and first is not None and first.runs == 3 and first.low < first.mean < first.high
    losses = [o.summary["metrics"]["train_loss"] for o in done.rows[0].outcomes]
    assert first.mean == pytest.approx(sum(losses) / 3)


def test_a_value_that_is_no_number_is_none(here: None, tmp_path: Path) -> None:
    """A private run goes on when the clients' loss is none: it ends without one, and the sweep with a table."""
    done = sweep(grid(quadratic(), {"method.beta": [0.1, 0.2], "run.seed": [0, 1]}), tmp_path / "out", 1)
    best = done.rows[0].outcomes[0]
    summary = json.loads((best.path / "summary.json").read_text())
    summary["metrics"]["train_loss"] = None
    (best.path / "summary.json").write_text(json.dumps(summary))
    again = sweep(grid(quadratic(), {"method.beta": [0.1, 0.2], "run.seed": [0, 1]}), tmp_path / "out", 1)
    assert again.best is not None and again.best.settings != done.rows[0].settings
    (worse,) = (row for row in again.rows if row.settings == done.rows[0].settings)
    assert worse.trouble == "1 without a value" and "(1 without a value)" in text(again)
    assert line(cells_module.News(1, 1, again.rows[0].outcomes[0]._replace(summary=Summary(summary)), 1)).endswith(": ")


def test_when_every_cell_fails_the_command_does(here: None, fednormec_: Command, tmp_path: Path) -> None:
    given = written(tmp_path / "my.toml", quadratic(participation={"name": "fixed_size", "m": 9}), "run.seed = [0, 1]")
    said = fednormec_("sweep", given, "--quiet")
    assert said.code == 2 and "2 failed" in said.out
    assert sentence(said.err).startswith("every cell failed; the first: ")
    assert not (tmp_path / "sweeps" / "my" / "best.toml").exists()


# going on


def test_what_is_done_stays_and_a_longer_list_adds_to_it(here: None, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sweep(grid(quadratic(), {"method.beta": [0.1, 0.2]}), out, 1)
    before = stamps(out)
    assert set(before) == {"beta=0.1", "beta=0.2"}
    sweep(grid(quadratic(), {"method.beta": [0.1, 0.2]}), out, 1)
    assert stamps(out) == before
    longer = sweep(grid(quadratic(), {"method.beta": [0.4, 0.2, 0.1]}), out, 1)
    assert {name: stamps(out)[name] for name in before} == before and len(longer.rows) == 3
    with pytest.raises(UserError, match=r"holds the cell 'beta=0.1' with other settings .*choose another --out"):
        sweep(grid(quadratic(rounds=4), {"method.beta": [0.1]}), out, 1)
    assert {name: stamps(out)[name] for name in before} == before


@pytest.mark.long
def test_failed_and_interrupted_cells_are_tried_again(here: None, tmp_path: Path, monkeypatch: Any) -> None:
    """An attempt that released something is put aside, not written over; a damaged summary is no end."""
    out, todo = tmp_path / "out", grid(quadratic(**NOISE), {"method.beta": [0.1, 0.2]})
    sweep(todo, out, 1)
    for attempt in (1, 2):
        (out / "cells" / "beta=0.1" / "summary.json").write_text("{")
        (out / "cells" / "beta=0.1.error.txt").write_text("its process ended with exit code -9\n")
        done = sweep(todo, out, 1)
        assert not done.failed and not (out / "cells" / "beta=0.1.error.txt").exists()
        assert (out / "interrupted" / f"beta=0.1-{attempt}" / "ledger.jsonl").exists()
        assert done.price is not None and (done.price.runs, done.price.rounds) == (2 + attempt, 3 * (2 + attempt))
    (out / "interrupted" / "beta=0.1-1").rename(out / "interrupted" / "elsewhere")
    (out / "cells" / "beta=0.1" / "summary.json").unlink()
    assert not sweep(todo, out, 1).failed and (out / "interrupted" / "beta=0.1-1").exists()


@pytest.mark.long
def test_a_cell_that_was_stopped_goes_on_after_its_checkpoint(tmp_path: Path) -> None:
    """Same model, ledger and metrics as one that was never stopped; nothing is put aside, nothing paid twice."""
    out = tmp_path / "out"
    todo = grid({**quadratic(**NOISE), "run": {"rounds": 9, "checkpoint_rounds": 2}}, {"method.beta": [0.1]})
    stopped = Observer(lambda r, record: (_ for _ in ()).throw(Halted()) if r.number == 5 else None)
    cell = todo[0]
    with pytest.raises(Halted):
        perform(cell.config, cell.name, out / "cells" / cell.name, quiet=True, observers=[stopped])
    (out / "cells" / f"{cell.name}.toml").write_text(dump(cell.config))
    assert not sweep(todo, out, 1).failed and not (out / "interrupted").exists()
    sweep(todo, tmp_path / "whole", 1)
    for name in ("model.safetensors", "ledger.jsonl", "metrics.jsonl"):
        one, other = (folder / "cells" / cell.name / name for folder in (out, tmp_path / "whole"))
        assert one.read_bytes() == other.read_bytes()


class Halted(Exception):
    """Raised in mid-run by a test."""


def test_a_mistake_that_left_nothing_behind_can_be_mended(here: None, tmp_path: Path) -> None:
    """Nine of four clients cannot be drawn, which only the problem tells; the same cells with two then run."""
    for m, failed in ((9, 2), (2, 0)):
        who = {"participation": {"name": "fixed_size", "m": m}}
        assert len(sweep(grid(quadratic(**who) | {"problem": {"name": "quadratic", "clients": 4}},
                              {"method.beta": [0.1, 0.2]}), tmp_path / "out", 1).failed) == failed  # fmt: skip


def test_a_second_command_on_a_folder_is_refused(tmp_path: Path) -> None:
    with (
        cells_module._locked(tmp_path / "out"),
        pytest.raises(UserError, match="another command is at work in .*choose another --out"),
    ):
        sweep(grid(quadratic(), {"method.beta": [0.1]}), tmp_path / "out", 1)
    assert run_folders(tmp_path / "out") == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be used"):
        run_all(grid(quadratic(), {"method.beta": [0.1]}), tmp_path / "file" / "out", 1)


# a worker


def test_a_worker_tells_what_went_wrong_and_takes_the_next_cell(tmp_path: Path, monkeypatch: Any) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("two\nlines")

    ours, theirs = multiprocessing.Pipe()
    with monkeypatch.context() as patch:
        patch.setattr(cells_module, "_end_with_parent", lambda: None)
        patch.setattr(fednormec.runs.runner, "perform", fail)
        worker = Thread(target=cells_module._serve, args=(theirs, 1))
        worker.start()
        for _ in range(2):
            ours.send(({}, "cell", tmp_path / "cell"))
            kind, content = ours.recv()
            assert kind == "error"
        ours.close()
        worker.join()
    cell = Cell("cell", {}, {})
    assert cells_module._failed(cell, tmp_path / "cell", content).error == "ZeroDivisionError: two lines"
    assert "Traceback" in (tmp_path / "cell.error.txt").read_text()


# the price


def priced(tmp_path: Path, axes: dict[str, Any], **more: dict[str, Any]) -> Sweep:
    return sweep(grid(digits(**more), axes), tmp_path / "out", 1)


@pytest.mark.long
def test_the_price_of_like_runs_is_that_of_all_their_rounds(here: None, tmp_path: Path) -> None:
    who = {"name": "poisson", "p": 0.5}
    done = priced(tmp_path, {"method.beta": [0.1, 0.2, 0.3]}, participation=who, **NOISE)
    release = fn.read_ledger(done.rows[0].outcomes[0].path / "ledger.jsonl").release
    assert done.price is not None
    assert (done.price.runs, done.price.rounds, done.price.delta, done.price.note) == (3, 9, 1e-5, "")
    assert done.price.epsilon == epsilon(release, 9, 1e-5)
    alone = done.rows[0].epsilon
    assert alone is not None and alone < done.price.epsilon and done.price.best_only is not None
    assert "all 3 private runs together, 9 rounds, cost ε ≤" in text(done) and "only the best" in text(done)
    assert "Tuning: all 3 private runs" in (tmp_path / "out" / "table.md").read_text()


def test_runs_with_unlike_noise_are_composed_from_their_ledgers(here: None, tmp_path: Path) -> None:
    done = priced(tmp_path, {"privacy.noise_std": [2.0, 4.0], "run.rounds": [2, 3]})
    spent = [fn.read_ledger(path / "ledger.jsonl") for path in run_folders(tmp_path / "out")]
    counts = {s.release: 0 for s in spent}
    for s in spent:
        counts[s.release] += s.rounds
    assert sorted(counts.values()) == [5, 5] and done.price is not None
    assert done.price.epsilon == epsilon_of_all(counts, 1e-5) and done.price.best_only is None


def test_what_tuning_runs_allow_for_is_not_counted_twice(here: None, tmp_path: Path) -> None:
    axes = {"method.beta": [0.1, 0.2]}
    done = priced(tmp_path, axes, privacy={"noise_std": 5.0, "tuning_runs": 2})
    assert done.price is not None and done.price.rounds == 6
    assert done.rows[0].epsilon == pytest.approx(done.price.epsilon, rel=1e-9)  # one run, which allowed for the other


def test_cells_of_an_earlier_grid_and_a_torn_ledger(here: None, tmp_path: Path) -> None:
    priced(tmp_path, {"method.beta": [0.1, 0.2]}, **NOISE)
    torn = tmp_path / "out" / "interrupted" / "beta=0.1-1"
    torn.mkdir(parents=True)
    (torn / "config.toml").write_text('[privacy]\ndelta = 1e-5\ntrust = "central"')
    (torn / "ledger.jsonl").write_text('{"release": {"kind": "op')  # so nothing was released yet
    done = priced(tmp_path, {"method.beta": [0.4]}, **NOISE)
    assert done.price is not None and (done.price.runs, done.price.rounds) == (3, 9)
    (torn / "ledger.jsonl").write_text("nothing\nto read\n")
    assert "is not a ledger that can be read" in price_text(priced(tmp_path, {"method.beta": [0.4]}, **NOISE).price)


@pytest.mark.long
@pytest.mark.parametrize(
    ("privacy", "message"),
    [
        ([{"privacy.noise_std": 1.0}, {"privacy.noise_std": 1.0, "privacy.trust": "local"}], "differ in δ, trust"),
        ([{"privacy.noise_std": 1.0}, {"privacy.noise_std": 1.0, "privacy.delta": 1e-6}], "no one ε of them all"),
        (
            [
                {"privacy.noise_std": 1.0, "privacy.trust": "local", "privacy.draws": who}
                for who in ("honest", "server")
            ],
            "who draws",
        ),
        ([{"privacy.noise_std": 1.0}, {"privacy.noise_std": 1.0, "privacy.adjacency": "replace_one"}], "adjacency"),
        ([{"privacy.noise_std": 1.0}, {"name": "bare", "local.steps": 1}], "NOT PRIVATE: 1 of these runs had no noise"),
        ([{"privacy.noise_std": 1.0, "privacy.noise_scale": "total_norm"}], "NOT PRIVATE: noise in some of these runs"),
    ],
)
def test_where_there_is_no_one_number_it_says_why(here: None, tmp_path: Path, privacy: Any, message: str) -> None:
    done = priced(tmp_path, {"privacy": privacy})
    assert done.price is not None and done.price.epsilon is done.price.best_only is None
    assert message in done.price.note and f"tuning    {done.price.note}\n" in text(done)
    json.dumps(facts(done), allow_nan=False)


def test_without_privacy_there_is_no_price(here: None, tmp_path: Path) -> None:
    asked = read(PLAIN, ("run.rounds=2", "data.clients=4", "model.name=linear"))
    done = sweep(grid(asked, {"local.steps": [1, 2]}), tmp_path / "out", 1)
    assert done.price is None and "tuning" not in text(done) and price_of([]) is None
    assert "not private" not in text(done).lower()


def test_a_ranking_that_looks_at_the_clients_is_not_covered(here: None, tmp_path: Path) -> None:
    cells = grid(digits(**NOISE), {"method.beta": [0.1, 0.2]})
    by_loss, by_accuracy = (sweep(cells, tmp_path / "out", 1, metric) for metric in ("train_loss", "test_accuracy"))
    assert "does not cover the ranking by train_loss, which looks at the clients' data" in text(by_loss)
    assert "train_loss (not private)" in text(by_loss).splitlines()[0]
    assert by_loss.price.best_only is None and by_accuracy.price.best_only is not None
    assert by_loss.price.epsilon == by_accuracy.price.epsilon
    assert "not private" not in text(by_accuracy)


def test_a_price_for_clients_that_are_dealt_anew_says_so(here: None, tmp_path: Path) -> None:
    """Then nobody is one client in all runs; and of a mean over seeds no single run is shown."""
    done = priced(tmp_path, {"run.seed": [0, 1]}, **NOISE)
    assert done.price is not None and done.price.best_only is None
    assert "as if the clients were the same in all of them" in text(done)


def test_a_ledger_without_its_config_leaves_no_one_number(here: None, tmp_path: Path) -> None:
    done = priced(tmp_path, {"method.beta": [0.1, 0.2]}, **NOISE)
    (done.rows[0].outcomes[0].path / "config.toml").unlink()
    found = price_of(run_folders(tmp_path / "out"))
    assert found is not None and found.epsilon is None


def test_an_epsilon_that_protects_nobody_is_labelled_in_json(here: None, tmp_path: Path) -> None:
    noise = {"privacy": {"noise_std": 1.0, "noise_scale": "total_norm"}}
    assert [row["label"] for row in facts(priced(tmp_path, {"method.beta": [0.1]}, **noise))["rows"]] == ["NOT PRIVATE"]


# noise


def test_the_best_config_does_not_carry_its_cells_noise(here: None, tmp_path: Path) -> None:
    """With the cell's stream any variation of it, such as more rounds, would let its noise be computed."""
    done = priced(tmp_path, {"method.beta": [0.1, 0.2]}, **NOISE)
    best = read(tmp_path / "out" / "best.toml")
    assert done.best is not None and "stream" not in best["privacy"]
    assert changed(best, {"privacy.stream": 1}) == changed(done.best.outcomes[0].cell.config, {"privacy.stream": 1})


def test_a_cells_stream_follows_from_all_its_settings() -> None:
    def streams(config: dict[str, dict[str, Any]], **axes: Any) -> list[int]:
        return [cell.config["privacy"]["stream"] for cell in grid(config, {"method.beta": [0.1, 0.2], **axes})]

    first = streams(quadratic(**NOISE))
    assert first == streams(quadratic(**NOISE)) and len(set(first)) == 2 and 0 not in first
    others = [streams(quadratic(rounds=4, **NOISE)), streams(quadratic(privacy={"noise_std": 5.0, "stream": 0}))]
    assert (
        len({*first, *others[0], *others[1]}) == 6
    )  # another sweep has other noise; so has one of a config spelled out
    assert all("privacy" not in cell.config for cell in grid(quadratic(), {"method.beta": [0.1, 0.2]}))
