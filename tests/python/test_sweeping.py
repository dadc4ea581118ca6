"""Sweeps from Python: every combination once, as if alone, whatever is stopped or fails; ranked, compared, reported."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sweep_cells import stamps

import fednormec as fn
from fednormec.config.schema import read
from fednormec.python import sweeping
from fednormec.sweeps.pool import interrupted

pytestmark = pytest.mark.usefixtures("undrawn")

PROBLEM, LOCAL = fn.random_quadratic(9, 3, seed=1), fn.gd(0.5)
PRIVATE = fn.Privacy(noise_std=3.0)


def clipped(tau: float, server_step: float = 1.0) -> fn.Algorithm:
    return fn.dp_fed_avg_clip(LOCAL, tau=tau, server_step=server_step)


def swept(out: Path, problem: Any = PROBLEM, algorithm: Any = clipped, *rest: Any, **settings: Any) -> fn.Sweep:
    return fn.sweep(problem, algorithm, *rest, **{"rounds": 3, "quiet": True, **settings}, out=out)


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "cells").iterdir() if path.is_dir())


def test_every_combination_is_the_run_that_train_makes_of_it(tmp_path: Path) -> None:
    done = swept(
        tmp_path / "out", PROBLEM, clipped, fn.poisson(0.5), PRIVATE,
        grid={"tau": [0.1, 1.0], "server_step": np.array([0.5, 1.0])}, seeds=range(2),
    )  # fmt: skip
    wanted = [f"tau={t}_server_step={s}_seed={k}" for t in ("0.1", "1") for s in ("0.5", "1") for k in (0, 1)]
    assert names(tmp_path / "out") == sorted(wanted)
    streams = set[int]()
    for row in done.rows:
        assert row.value is not None and row.value.runs == 2
        for outcome in row.outcomes:
            settings = outcome.cell.settings
            streams.add(stream := read(outcome.path / "config.toml")["privacy"]["stream"])
            own = fn.Privacy(noise_std=3.0, stream=stream)
            method = clipped(settings["tau"], settings["server_step"])
            alone = fn.train(PROBLEM, method, fn.poisson(0.5), own, rounds=3, seed=settings["run.seed"])
            assert torch.equal(alone.x, load_file(outcome.path / "x.safetensors")["x"])
    assert len(streams) == 8, "no two runs share their noise"
    with open(tmp_path / "out" / "table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["tau"], row["server_step"], row["seeds"]) for row in rows] == [
        (f"{row.settings['tau']:g}", f"{row.settings['server_step']:g}", "2") for row in done.rows
    ]
    assert done.price is not None and (done.price.runs, done.price.rounds) == (8, 24)
    assert "deals the data anew" not in done.price.note, "a problem that is given is the same for every seed"
    assert not (tmp_path / "out" / "best.toml").exists(), "no config can give it"


def test_a_method_is_not_run_again_for_what_it_does_not_take(tmp_path: Path) -> None:
    methods = {"clipped": clipped, "exact": fn.fed_avg(LOCAL), "scaled": lambda server_step: fn.fed_avg(LOCAL)}
    done = swept(tmp_path / "out", PROBLEM, methods, grid={"tau": [0.1, 1.0], "server_step": [1.0]})
    assert names(tmp_path / "out") == [
        "method=clipped_tau=0.1_server_step=1_seed=0",
        "method=clipped_tau=1_server_step=1_seed=0",
        "method=exact_seed=0",
        "method=scaled_server_step=1_seed=0",
    ]
    table = fn.compare(done)
    assert {row[0].strip("* ") for row in table.rows} == {"clipped τ=0.1", "clipped τ=1", "exact", "scaled"}


def test_anything_can_be_made_by_a_function_and_swept_over(tmp_path: Path) -> None:
    def problem(dim: int, seed: int) -> fn.Quadratic:
        return fn.random_quadratic(9, dim, seed=seed)

    done = swept(
        tmp_path / "out", problem, fn.dp_fed_avg_clip, fn.poisson, fn.Privacy,
        grid={"dim": [2, 3], "local": [LOCAL], "tau": [0.5], "p": [0.5], "noise_std": {"much": 9.0, "little": 2.0}},
        seeds=[3, 4],
    )  # fmt: skip
    assert len(done.rows) == 4 and not done.failed
    for row in done.rows:
        for outcome in row.outcomes:
            config = read(outcome.path / "config.toml")
            assert config["problem"]["dim"] == row.settings["dim"]
            assert config["privacy"]["noise_std"] == {"much": 9.0, "little": 2.0}[row.settings["noise_std"]]
            assert config["python"]["made_by"] == "problem"
    table = fn.compare(tmp_path / "out")
    assert len(table.rows) == 4, "seeds share a line, though each made its own data"
    assert done.price is not None and "deals the data anew" in done.price.note


def test_names_of_any_script_are_names(tmp_path: Path) -> None:
    done = swept(tmp_path / "out", PROBLEM, lambda τ: clipped(τ), grid={"τ": [0.1, 1.0]})
    assert {row.label for row in done.rows} == {"τ=0.1", "τ=1"} and not done.failed
    assert {row[0].strip("* ") for row in fn.compare(done).rows} == {"τ=0.1", "τ=1"}
    assert len(swept(tmp_path / "out", PROBLEM, lambda τ: clipped(τ), grid={"τ": [0.1, 1.0]}).rows) == 2


def test_the_same_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Any = {"grid": {"tau": [0.1, 0.5, 1.0]}, "seeds": [0, 1]}
    whole = swept(tmp_path / "whole", PROBLEM, clipped, None, PRIVATE, **asked)
    real, calls = sweeping.perform, []

    def dying(*arguments: Any, **settings: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 4:
            raise SystemExit  # ends more than a run
        return real(*arguments, **settings)

    monkeypatch.setattr(sweeping, "perform", dying)
    with pytest.raises(SystemExit):
        swept(tmp_path / "out", PROBLEM, clipped, None, PRIVATE, **asked)
    before = stamps(tmp_path / "out")
    assert len(before) == 3
    done = swept(tmp_path / "out", PROBLEM, clipped, None, PRIVATE, **asked)
    after = stamps(tmp_path / "out")
    assert len(after) == 6 and before.items() <= after.items()
    assert [(row.label, row.value) for row in done.rows] == [(row.label, row.value) for row in whole.rows]


def test_a_run_that_was_killed_goes_on_after_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Any = {"grid": {"tau": [0.1]}, "rounds": 6, "checkpoint_rounds": 2}
    swept(tmp_path / "whole", PROBLEM, clipped, None, PRIVATE, **asked)

    def dying(r: fn.Round, record: fn.Record) -> None:
        if r.number == 5:
            raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(sweeping, "Observer", lambda after: fn.Observer(dying))
        with pytest.raises(SystemExit):
            swept(tmp_path / "out", PROBLEM, clipped, None, PRIVATE, **asked)
    done = swept(tmp_path / "out", PROBLEM, clipped, None, PRIVATE, **asked)
    (one,), (other,) = (sorted((tmp_path / name / "cells").glob("*/metrics.jsonl")) for name in ("whole", "out"))
    assert one.read_bytes() == other.read_bytes()
    assert "after_round" in (other.parent / "environment.json").read_text()
    assert not done.failed and not interrupted(tmp_path / "out")


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    def fragile(tau: float) -> fn.Algorithm:
        def server(state: fn.Server, mean: torch.Tensor, weights: fn.Weights) -> fn.Server:
            if tau == 0.5:
                raise ValueError("a mistake in it")
            return clipped(tau).server(state, mean, weights)

        return clipped(tau)._replace(server=server)

    done = swept(tmp_path / "out", PROBLEM, fragile, grid={"tau": [0.1, 0.5, 1.0]})
    assert [outcome.error for outcome in done.failed] == ["ValueError: a mistake in it"]
    assert [row.label for row in done.rows] == ["tau=1", "tau=0.1", "tau=0.5"]
    assert "failed    tau=0.5_seed=0: ValueError: a mistake in it" in str(done)
    assert "Traceback" in (tmp_path / "out" / "cells" / "tau=0.5_seed=0.error.txt").read_text()


def test_another_method_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    swept(tmp_path / "out", grid={"tau": [0.1]})
    before = stamps(tmp_path / "out")
    with pytest.raises(fn.UserError, match="holds the cell 'tau=0.1_seed=0' with other settings .*choose another out"):
        swept(tmp_path / "out", PROBLEM, lambda tau: clipped(tau, server_step=0.5), grid={"tau": [0.1]})
    assert stamps(tmp_path / "out") == before


def test_what_failed_for_want_of_room_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sweeping.perform

    def full(config: Any, name: str, *rest: Any, **settings: Any) -> Any:
        if name.startswith("tau=0.5"):
            raise fn.UserError("the disk is full.")
        return real(config, name, *rest, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(sweeping, "perform", full)
        assert [o.error for o in swept(tmp_path / "out", grid={"tau": [0.1, 0.5]}).failed] == ["the disk is full."]
        with pytest.raises(fn.UserError, match="^every run failed; the first: the disk is full."):
            swept(tmp_path / "other", grid={"tau": [0.5]})
    assert not swept(tmp_path / "out", grid={"tau": [0.1, 0.5]}).failed


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"grid": {"taau": [1.0]}}, "unknown name in grid 'taau'; did you mean 'tau'?"),
        ({"grid": {"tau": 0.1}}, r"grid\['tau'\] must be a list of at least one value, not 0.1"),
        ({"grid": {"tau": "0.1"}}, r"grid\['tau'\] must be a list of at least one value, not '0.1'"),
        ({"grid": {"tau": []}}, r"grid\['tau'\] must be a list of at least one value, not \[\]"),
        ({"grid": {"tau": [object()]}}, r"grid\['tau'\] has a value without a name, of type object: write a dict"),
        ({"grid": {"tau": [1.0], "seed": [1]}}, "grid cannot have the name 'seed': seeds are given by seeds="),
        ({"grid": {"tau": [1.0], "method": [1]}}, "several methods are given by algorithm="),
        ({}, "clipped needs 'tau': add it to grid, or give it a default"),
        ({"grid": {"tau": [1.0]}, "seeds": 3}, r"seeds is a list of whole numbers, such as \[0, 1, 2\], not 3"),
        ({"grid": {"tau": [1.0]}, "seeds": [0.5]}, "seeds is a list of whole numbers"),
        ({"grid": {"tau": [1.0]}, "seeds": []}, "there is nothing to sweep over"),
        ({"grid": {"tau": [1.0]}, "seeds": [0, 0]}, "two cells are called 'tau=1_seed=0'"),
        ({"grid": {"tau": [1.0, -1.0]}}, "the run tau=-1_seed=0: tau must be a positive number"),
        ({"grid": {"tau": [1.0]}, "metric": "acuracy"}, "unknown metric 'acuracy'"),
        ({"grid": {"tau": [1.0]}, "rounds": 2.5}, "rounds must be a whole number, not 2.5"),
    ],
)
def test_a_mistake_is_said_before_anything_runs(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(fn.UserError, match=said):
        swept(tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_progress_is_shown_unless_it_is_to_be_quiet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swept(tmp_path / "loud", grid={"tau": [0.1, 1.0]}, quiet=False)
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()] == ["1/2", "2/2"]
    swept(tmp_path / "quiet", grid={"tau": [0.1, 1.0]})
    assert capsys.readouterr().err == ""
