"""Going on with a run: the same bits after every round of every method, and a sentence where that cannot be."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clock import Clock
from command import Command, sentence, sets
from example_runs import SAME, interrupted, same, stopping, whole
from paths import PLAIN
from safetensors.torch import load_file

import fednormec as fn
from fednormec.algorithms.methods import METHODS
from fednormec.config.schema import read
from fednormec.config.settings import THEORY, RunSettings
from fednormec.engine.memories import Memories
from fednormec.engine.round import Resumed, Round
from fednormec.errors import NotWritten, Stopped, UserError
from fednormec.runs import checkpoint as checkpoints
from fednormec.runs import runner
from fednormec.runs.folder import RunFolder
from fednormec.runs.runner import go_on, perform

pytestmark = pytest.mark.usefixtures("undrawn")

QUICK = fn.random_quadratic(7, 5, parts=3, seed=0)
SMALL = ("model.name=linear", "data.clients=6", "run.rounds=12", "run.checkpoint_rounds=3")
PRIVATE = (*SMALL, "privacy.noise_std=2")


def flat_statement(out: Path) -> str:
    return " ".join((out / "privacy.txt").read_text(encoding="utf-8").split())


def state(r: Round) -> list[torch.Tensor]:
    return [r.server.x.clone(), r.server.memory.clone(), r.memory.clone()]


# a disk that is full for a while


@pytest.mark.parametrize("stops", [False, True])
def test_where_clients_remember_two_rounds_no_round_begins_before_the_checkpoint_is_stored(
    tmp_path, monkeypatch, stops
):
    """The third cannot be written at first. Without the wait the server could fall back further than its clients."""
    written, said, rounds = checkpoints.save, list[str](), list[int]()

    def save(path: Path, r: Round, *others: Any) -> None:
        rounds.append((tmp_path / "out" / "metrics.jsonl").read_bytes().count(b"\n"))
        if r.number == 3 and len(rounds) < 7:
            raise NotWritten(f"{path} cannot be written: No space left on device.")
        written(path, r, *others)

    monkeypatch.setattr(checkpoints, "save", save)
    monkeypatch.setattr(runner, "RETRY", 0.0)
    asked = ("model.name=linear", "data.clients=6", "run.rounds=5", "run.checkpoint_rounds=1")
    site = runner.Site(waits=True, tell=lambda line: said.append(str(line)))
    if stops:
        with pytest.raises(UserError, match="No space left on device. To go on: fednormec run --resume"):
            whole(tmp_path / "out", *asked, site=site, stop=lambda: len(rounds) > 4)
        assert rounds == [1, 2, 3, 3, 3]
        assert [path.name for path in checkpoints.newest_first(tmp_path / "out")][0] == "checkpoint-2.safetensors"
        return
    whole(tmp_path / "out", *asked, site=site)
    assert rounds == [1, 2, 3, 3, 3, 3, 3, 4]
    assert len(said) == 2 and said[0].endswith("No space left on device. No client is asked before it is.")
    assert said[1] == "the checkpoint of round 3 is stored now"


# every method


def methods() -> Iterator[Any]:
    for name, method in METHODS.items():
        yield pytest.param(method.build(fn.sgd(0.1, 2, 2)) if method.takes_local else method.build(), id=name)
    yield pytest.param(fn.centred(fn.gd(0.1), leak=0.1), id="centred, leaky")
    yield pytest.param(fn.fed_normec(fn.gd(0.1), initial_memory="local_updates", warmup_rounds=3), id="primed")


@pytest.mark.long
@pytest.mark.parametrize("idle", ["advance", "sleep"])
@pytest.mark.parametrize("algorithm", [*methods()])
def test_after_every_round_a_simulation_goes_on_to_the_same_bits(tmp_path, algorithm, idle):
    private = fn.Privacy(noise_std=1.0) if algorithm.bound.radius < np.inf and algorithm.prime is None else None
    asked = (QUICK, algorithm, fn.poisson(0.6, idle), private)
    expected = []
    for r in fn.simulate(*asked, rounds=5, seed=3):
        checkpoints.save(tmp_path / f"{r.number}", r)
        expected.append((state(r), r.epsilon, r.server.round))
    for done in range(1, 5):
        going_on = fn.simulate(*asked, rounds=5, seed=3, resume=Resumed(checkpoints.load(tmp_path / f"{done}")))
        rest = [(state(r), r.epsilon, r.server.round) for r in going_on]
        assert len(rest) == 5 - done
        for (one, epsilon, number), (other, *facts) in zip(expected[done:], rest, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
            assert facts == [epsilon, number]


def test_a_checkpoint_is_a_safetensors_file(tmp_path):
    (r,) = fn.simulate(QUICK, fn.fed_normec(fn.gd(0.1)), rounds=1)
    checkpoints.save(tmp_path / "c.safetensors", r)
    tensors = load_file(tmp_path / "c.safetensors")
    assert torch.equal(tensors["x"], r.x)
    assert torch.equal(tensors["client_memories"], r.memory)
    assert [path.name for path in tmp_path.iterdir()] == ["c.safetensors"]


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    (r,) = fn.simulate(QUICK, fn.fed_normec(fn.gd(0.1)), rounds=1)
    checkpoints.save(tmp_path / "c", r)
    saved = checkpoints.load(tmp_path / "c")
    for problem, algorithm in (
        (fn.random_quadratic(7, 6, seed=0), fn.fed_normec(fn.gd(0.1))),
        (fn.random_quadratic(8, 5, seed=0), fn.fed_normec(fn.gd(0.1))),
        (QUICK, fn.fed_avg(fn.gd(0.1))),
        (QUICK, fn.clip21_sgd2m()),
        (fn.random_quadratic(7, 5, parts=3, seed=0, dtype=torch.float32), fn.fed_normec(fn.gd(0.1))),
    ):
        with pytest.raises(UserError, match="is of another run"):
            next(fn.simulate(problem, algorithm, rounds=2, resume=Resumed(saved)))
    with pytest.raises(UserError, match="leave x0 out"):
        fn.simulate(QUICK, fn.fed_normec(fn.gd(0.1)), rounds=2, resume=Resumed(saved), x0=r.x)
    with pytest.raises(UserError, match="it holds memories of shape"):
        saved.fill(Memories((3, 5), torch.float64))


# a run folder


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [
        PRIVATE,
        (*PRIVATE, "run.memories=file"),
        (*SMALL, "method.name=clip21_sgd2m", "method.batch_size=16", "participation.idle=sleep"),
        ("problem.name=quadratic", "run.rounds=12", "run.checkpoint_rounds=5", "run.dtype=float64"),
        ("problem.name=logistic", "run.rounds=12", "privacy.epsilon=9", "participation.name=full"),
    ],
)
def test_a_stopped_run_goes_on_to_the_same_files(tmp_path, overrides):
    expected = whole(tmp_path / "whole", *overrides)
    interrupted(tmp_path / "out", *overrides)
    assert not (tmp_path / "out" / "summary.json").exists()
    found = go_on(tmp_path / "out", quiet=True)
    assert same(tmp_path / "whole", tmp_path / "out")
    assert found | {"out": None} == expected | {"out": None}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in (tmp_path / "whole").iterdir()}
    assert not any(name.startswith("checkpoint") for name in names)
    resumed = json.loads((tmp_path / "out" / "environment.json").read_text())["resumed"]
    assert [process["after_round"] for process in resumed] == [8]


@pytest.mark.long
def test_without_a_checkpoint_it_begins_again_in_the_same_folder(tmp_path, capsys):
    whole(tmp_path / "whole", *PRIVATE)
    interrupted(tmp_path / "out", *PRIVATE)
    checkpoints.tidy(tmp_path / "out", 0)
    go_on(tmp_path / "out", quiet=True)
    assert same(tmp_path / "whole", tmp_path / "out")
    said = capsys.readouterr().err
    assert "goes on after round 0 of 12." in said
    assert (
        "the ledger has paid for 8 more rounds, the last of which may not have been released; they are computed "
        in said
    )


def test_a_run_that_came_to_its_end_is_told_once_more(fednormec_: Command, tmp_path):
    whole(tmp_path / "out", *PRIVATE)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    for _ in range(2):  # the first makes the page about it, the second finds it
        said = fednormec_("run", "--resume", "out")
        assert said.code == 0
        warned = [f"note: {text}" for text in json.loads(before["summary.json"])["warnings"]]
        assert said.err.splitlines() == ["note: the run in out has come to its end already.", *warned]
        assert "out/report.html" in said.out
    assert "test accuracy" in said.out
    assert "ε ≤" in said.out
    after = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {name: after[name] for name in before} == before


@pytest.mark.long
def test_secure_noise_counts_every_draw(tmp_path, capsys):
    """Eight rounds are done, the last three not kept: three more releases, which three rounds fewer make up for."""
    asked = (*SMALL, "privacy.randomness=secure", "run.checkpoint_rounds=5", "privacy.epsilon=5")
    interrupted(tmp_path / "out", *asked)
    checkpoints.path_in(tmp_path / "out", 8).unlink()
    found = go_on(tmp_path / "out", quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()[1:]]
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8, 6, 7, 8, 9]
    assert found["status"] == "budget_spent"
    assert found["rounds"] == 9
    assert found["epsilon"] == lines[-1]["epsilon"] <= 5
    assert [line["epsilon"] for line in lines] == sorted({line["epsilon"] for line in lines})
    assert "3 of them of rounds that were interrupted and drawn again" in " ".join(found["statement"].split())
    assert "they are drawn again with new noise, so that both count" in capsys.readouterr().err
    assert fn.read_ledger(tmp_path / "out" / "ledger.jsonl").rounds == 12


@pytest.mark.long
def test_secure_noise_without_a_budget_goes_to_the_end(tmp_path):
    interrupted(tmp_path / "out", *PRIVATE, "privacy.randomness=secure", "run.checkpoint_rounds=5")
    checkpoints.path_in(tmp_path / "out", 8).unlink()
    found = go_on(tmp_path / "out", quiet=True)
    assert (found["rounds"], found["status"]) == (12, "done")
    assert fn.read_ledger(tmp_path / "out" / "ledger.jsonl").rounds == 15
    last = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["epsilon"] == found["epsilon"]


def test_a_round_that_cannot_be_drawn_again_leaves_no_record(tmp_path, monkeypatch):
    """Killed after the last round, before the end: with secure noise the budget does not pay for that round twice."""
    asked = (*SMALL, "privacy.randomness=secure", "privacy.epsilon=5", "run.checkpoint_rounds=1")

    def killed(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "finish", killed)
        with pytest.raises(BaseException, match="stopped at once"):
            whole(tmp_path / "out", *asked)
    assert (tmp_path / "out" / "metrics.jsonl").read_text().count("\n") == 12
    found = go_on(tmp_path / "out", quiet=True)
    assert found["rounds"] == 11
    assert (tmp_path / "out" / "metrics.jsonl").read_text().count("\n") == 11
    assert fn.read_ledger(tmp_path / "out" / "ledger.jsonl").rounds == 12


@pytest.mark.long
def test_what_was_killed_before_it_had_a_config_begins_anew(tmp_path):
    whole(tmp_path / "whole", *PRIVATE)
    for held in (("metrics.jsonl",), ("metrics.jsonl", "environment.json", "config.toml.part")):
        out = tmp_path / f"{len(held)}"
        out.mkdir()
        for name in held:
            (out / name).touch()
        whole(out, *PRIVATE)
        assert same(tmp_path / "whole", out)
    for name, content in (("metrics.jsonl", "{}"), ("notes.txt", "")):
        out = tmp_path / name
        out.mkdir()
        (out / name).write_text(content)
        with pytest.raises(UserError, match="is not empty"):
            whole(out, *PRIVATE)
        assert [path.name for path in out.iterdir()] == [name]


def test_a_checkpoint_is_for_its_owner_only(tmp_path):
    interrupted(tmp_path / "out", *PRIVATE)
    assert checkpoints.path_in(tmp_path / "out", 8).stat().st_mode & 0o777 == 0o600


def test_secure_noise_keeps_every_round_by_default(tmp_path):
    interrupted(tmp_path / "out", "model.name=linear", "data.clients=6", "run.rounds=12", "privacy.noise_std=2",
                "privacy.randomness=secure")  # fmt: skip
    assert [path.name for path in checkpoints.newest_first(tmp_path / "out")] == [
        "checkpoint-8.safetensors", "checkpoint-7.safetensors",
    ]  # fmt: skip


@pytest.mark.long
def test_a_budget_ends_a_resumed_run_where_it_ends_any(tmp_path):
    asked = (*SMALL, "privacy.noise_std=2", "privacy.epsilon=2")
    expected = whole(tmp_path / "whole", *asked)
    assert expected["status"] == "budget_spent"
    assert expected["rounds"] > 4
    interrupted(tmp_path / "out", *asked, after=4)
    assert go_on(tmp_path / "out", quiet=True)["rounds"] == expected["rounds"]
    assert same(tmp_path / "whole", tmp_path / "out")


@pytest.mark.long
def test_a_plan_is_remembered(tmp_path):
    config = read(THEORY, ["problem.clients=30", "run.rounds=30", "privacy.epsilon=90"])
    expected = perform(config, "test", tmp_path / "whole", quiet=True, plan=True)
    with pytest.raises(Stopped):
        perform(config, "test", tmp_path / "out", quiet=True, plan=True, stop=stopping(3))
    found = go_on(tmp_path / "out", quiet=True)
    assert found["guarantee"] == expected["guarantee"]
    assert same(tmp_path / "whole", tmp_path / "out", (*SAME, "guarantee.json"))


# damage


def damaged(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 1
    elif how == "header":
        content[30] ^= 64
    elif how == "cut":
        content = content[:-1]
    elif how == "longer":
        content += b"\0"
    elif how == "empty":
        content = bytearray()
    path.write_bytes(content)


@pytest.mark.long
@pytest.mark.parametrize("how", ["flipped", "header", "cut", "longer", "empty"])
def test_a_damaged_checkpoint_is_said_and_the_one_before_is_used(tmp_path, capsys, how):
    whole(tmp_path / "whole", *PRIVATE)
    interrupted(tmp_path / "out", *PRIVATE)
    damaged(checkpoints.path_in(tmp_path / "out", 8), how)
    go_on(tmp_path / "out", quiet=True)
    assert same(tmp_path / "whole", tmp_path / "out")
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("note: checkpoint-8.safetensors cannot be used: ")
    assert said[1] == "note: goes on after round 6 of 12."


@pytest.mark.long
def test_all_checkpoints_damaged_begins_again(tmp_path, capsys):
    whole(tmp_path / "whole", *PRIVATE)
    interrupted(tmp_path / "out", *PRIVATE)
    for path in checkpoints.newest_first(tmp_path / "out"):
        damaged(path, "flipped")
    go_on(tmp_path / "out", quiet=True)
    assert same(tmp_path / "whole", tmp_path / "out")
    assert "goes on after round 0" in capsys.readouterr().err


@pytest.mark.long
def test_lost_metrics_send_it_further_back(tmp_path, capsys):
    whole(tmp_path / "whole", *PRIVATE)
    interrupted(tmp_path / "out", *PRIVATE)
    metrics = tmp_path / "out" / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(True)[:7])[:-5])
    go_on(tmp_path / "out", quiet=True)
    assert same(tmp_path / "whole", tmp_path / "out")
    said = capsys.readouterr().err
    assert "checkpoint-8.safetensors cannot be used: metrics.jsonl is not what it was then" in said
    assert "goes on after round 6" in said


@pytest.mark.long
def test_records_that_were_changed_are_made_again(tmp_path, capsys):
    whole(tmp_path / "whole", *PRIVATE)
    interrupted(tmp_path / "out", *PRIVATE)
    metrics = tmp_path / "out" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"computed": 6', '"computed": 7', 1))
    go_on(tmp_path / "out", quiet=True)
    assert same(tmp_path / "whole", tmp_path / "out", SAME[:-1])
    assert "not covered round 1 came out differently" in flat_statement(tmp_path / "out")
    said = capsys.readouterr().err
    assert said.count("metrics.jsonl is not what it was then") == 2
    assert "round 1 came out differently" in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda out: (out / "config.toml").write_text((out / "config.toml").read_text() + "\n"),
            "config.toml was changed",
        ),
        (lambda out: cut_ledger(out), "ledger.jsonl has 4 rounds, but 8 were released"),
        (lambda out: older(out), "ledger.jsonl has 6 rounds, but 8 were released"),
        (lambda out: (out / "ledger.jsonl").unlink(), "ledger.jsonl has 0 rounds, but 8 were released"),
        (lambda out: other_ledger(out), "another mechanism"),
        (lambda out: (out / "config.toml").unlink(), "holds no run to go on with"),
        (lambda out: (out / "metrics.jsonl").unlink(), "holds no run to go on with"),
        (lambda out: (out / "config.toml").write_text("[run"), "is not valid TOML"),
    ],
)
def test_what_was_tampered_with_is_said_and_nothing_is_changed(tmp_path, change, said):
    interrupted(tmp_path / "out", *PRIVATE)
    change(tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.name != "environment.json"}
    with pytest.raises(UserError, match=said):
        go_on(tmp_path / "out", quiet=True)
    after = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.name != "environment.json"}
    assert after == before


def cut_ledger(out: Path) -> None:
    path = out / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(True)[:5]))


def older(out: Path) -> None:
    """A ledger as long as the checkpoint before knows, but not as the records do."""
    checkpoints.path_in(out, 8).unlink()
    path = out / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(True)[:7]))


def other_ledger(out: Path) -> None:
    path = out / "ledger.jsonl"
    path.write_text(path.read_text().replace('"mu": 0.5', '"mu": 0.25'))


def test_other_data_are_refused(tmp_path):
    x, y = np.random.default_rng(0).standard_normal((24, 3)), np.arange(24) % 2
    np.savez(tmp_path / "data.npz", x=x, y=y)
    interrupted(tmp_path / "out", *SMALL, f"data.source={tmp_path / 'data.npz'}")
    np.savez(tmp_path / "data.npz", x=x + 1, y=y)
    with pytest.raises(UserError, match=r"the data in .*data.npz are not those that the run began with"):
        go_on(tmp_path / "out", quiet=True)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    assert go_on(tmp_path / "out", quiet=True)["rounds"] == 12


def test_rounds_that_come_out_differently_are_said(tmp_path, capsys):
    interrupted(tmp_path / "out", *PRIVATE)
    checkpoints.path_in(tmp_path / "out", 8).unlink()
    metrics = tmp_path / "out" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(True)
    metrics.write_text("".join([*lines[:7], lines[7].replace('"computed": 6', '"computed": 5')]))
    go_on(tmp_path / "out", quiet=True)
    assert "round 8 came out differently from before the interruption: with the same noise" in capsys.readouterr().err
    whole(tmp_path / "whole", *PRIVATE)
    assert same(tmp_path / "whole", tmp_path / "out", SAME[:-1])
    assert "not covered round 8 came out differently from before" in flat_statement(tmp_path / "out")


def test_other_versions_are_said(tmp_path, capsys):
    interrupted(tmp_path / "out", *PRIVATE)
    path = tmp_path / "out" / "environment.json"
    path.write_text(path.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "1.0"'))
    go_on(tmp_path / "out", quiet=True)
    assert (
        f"since the run began torch is {torch.__version__}, not 1.0: the last digits may be" in capsys.readouterr().err
    )


# the machine


def test_the_clock_may_go_backwards(tmp_path, monkeypatch):
    """Which checkpoint is newer, and when the next is due, no calendar decides."""
    whole(tmp_path / "whole", *PRIVATE)
    wall = iter(range(2_000_000_000, 0, -1_000_000))
    monkeypatch.setattr(time, "time", lambda: float(next(wall)))
    interrupted(tmp_path / "out", *PRIVATE)
    for age, path in enumerate(checkpoints.newest_first(tmp_path / "out")):
        os.utime(path, (10**9 + age, 10**9 + age))  # the newer, the older it looks
    go_on(tmp_path / "out", quiet=True)
    assert same(tmp_path / "whole", tmp_path / "out")
    resumed = json.loads((tmp_path / "out" / "environment.json").read_text())["resumed"]
    assert resumed[0]["after_round"] == 8


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, [*range(1, 20)]), (5.0, [6, 11, 16])])
def test_checkpoints_are_written_by_the_clock(tmp_path, monkeypatch, seconds, rounds):
    """A second passes after each round; the last needs no checkpoint, as the run is at its end."""
    clock, written = Clock(), []
    monkeypatch.setattr(checkpoints, "time", clock)
    save = checkpoints.save

    def noted(path, r, *rest):
        written.append(r.number)
        save(path, r, *rest)

    monkeypatch.setattr(checkpoints, "save", noted)
    whole(tmp_path / "out", "model.name=linear", "data.clients=6", "run.rounds=20", f"run.checkpoint_seconds={seconds}",
          observers=[fn.Observer(lambda r, record: clock.advance(1.0))])  # fmt: skip
    assert written == rounds


def test_by_default_a_kill_costs_half_a_minute(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(checkpoints, "time", clock)
    due = checkpoints.Checkpoints(Path(), "", None, RunSettings().checkpoint_seconds)
    clock.advance(0.1)
    assert not due.due(1)
    clock.advance(30.0)
    assert due.due(1)


@pytest.mark.parametrize(
    "setting", ["run.checkpoint_rounds=0", "run.checkpoint_seconds=-1", "run.checkpoint_seconds=nan"]
)
def test_impossible_intervals_are_said(fednormec_: Command, setting):
    assert sentence(fednormec_("run", PLAIN, *sets(setting)).err).startswith("checkpoint_")


# the command line


@pytest.mark.parametrize(
    "beside", [["my.toml"], ["--out", "x"], ["--set", "run.rounds=3"], ["--not-private"], ["--plan"]]
)
def test_a_resumed_run_has_its_settings(fednormec_: Command, beside):
    assert sentence(fednormec_("run", *beside, "--resume", "out").err).startswith("--resume takes the settings from")


def test_there_must_be_a_run(fednormec_: Command, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in ("missing", "empty"):
        assert sentence(fednormec_("run", "--resume", folder).err) == f"{folder} holds no run to go on with."


@pytest.mark.long
def test_json_quiet_profile_and_tensorboard_go_on(fednormec_: Command, tmp_path):
    interrupted(tmp_path / "out", *PRIVATE)
    said = fednormec_("run", "--resume", "out", "--json", "--quiet", "--profile", "--tensorboard")
    assert said.code == 0
    summary = json.loads(said.out)
    assert summary["rounds"] == 12
    assert summary["profile"]["stages"]["disk"] > 0
    assert (tmp_path / "out" / "report.html").exists()
    assert list((tmp_path / "out" / "tensorboard").iterdir())


def test_progress_goes_on_where_it_was(fednormec_: Command, tmp_path):
    interrupted(tmp_path / "out", *PRIVATE)
    said = fednormec_("run", "--resume", "out").err
    assert "round 12/12" in said
    assert "round 8/12" not in said


# settings that were edited


@pytest.mark.long
@pytest.mark.parametrize(("old", "new"), [("server_step = 1.0", "server_step = 0.5"), ("seed = 0", "seed = 1")])
def test_an_edited_config_is_refused_before_the_first_checkpoint_too(tmp_path, old, new):
    """Rounds that were released would be released again by other settings, with the same noise."""
    out = tmp_path / "out"
    interrupted(out, *PRIVATE, "method.server_step=1.0", "run.seed=0", after=2)
    for checkpoint in out.glob("checkpoint-*"):
        checkpoint.unlink()
    asked = (out / "config.toml").read_text()
    assert old in asked
    (out / "config.toml").write_text(asked.replace(old, new))
    ledger = (out / "ledger.jsonl").read_bytes()
    with pytest.raises(UserError, match="config.toml was changed since ledger.jsonl was begun"):
        go_on(out, quiet=True)
    assert (out / "ledger.jsonl").read_bytes() == ledger
    (out / "config.toml").write_text(asked)
    assert go_on(out, quiet=True)["rounds"] == 12
    whole(tmp_path / "whole", *PRIVATE, "method.server_step=1.0", "run.seed=0")
    assert same(tmp_path / "whole", out)


def test_the_first_line_of_a_ledger_has_the_digest_of_the_settings(tmp_path):
    whole(tmp_path / "out", *PRIVATE)
    spent = fn.read_ledger(tmp_path / "out" / "ledger.jsonl")
    assert spent.config == RunFolder.again(tmp_path / "out").config_digest and len(spent.config) == 64
    head = (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()[0]
    (tmp_path / "old.jsonl").write_text(json.dumps({k: v for k, v in json.loads(head).items() if k != "config"}))
    assert fn.read_ledger(tmp_path / "old.jsonl").config is None


def test_settings_that_are_edited_while_the_run_begins_are_not_taken_for_its_own(tmp_path, monkeypatch):
    """The digest is of what this process goes by, not of what the file holds when the ledger is opened."""
    out, right = tmp_path / "out", RunFolder.open_ledger

    def edited(self, plan):
        text = (out / "config.toml").read_text()
        (out / "config.toml").write_text(text.replace("server_step = 1.0", "server_step = 0.5"))
        return right(self, plan)

    monkeypatch.setattr(RunFolder, "open_ledger", edited)
    interrupted(out, *PRIVATE, "method.server_step=1.0", after=1)
    for checkpoint in out.glob("checkpoint-*"):
        checkpoint.unlink()
    with pytest.raises(UserError, match="config.toml was changed since ledger.jsonl was begun"):
        go_on(out, quiet=True)


@pytest.mark.long
@pytest.mark.parametrize("randomness", ["secure", "seeded"])
def test_whoever_goes_on_with_secure_noise_hears_of_copies(tmp_path, capsys, randomness):
    out = tmp_path / "out"
    interrupted(out, *PRIVATE, f"privacy.randomness={randomness}")
    copied = tmp_path / "copy"
    shutil.copytree(out, copied)
    for folder in (out, copied):
        go_on(folder, quiet=True)
        assert ("go on with one copy of this folder only" in capsys.readouterr().err) == (randomness == "secure")
    assert same(out, copied, ("model.safetensors",)) == (randomness == "seeded")  # two copies, two releases


def test_the_hash_of_the_data_is_marked_not_private(tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.zeros((12, 3)), y=np.arange(12) % 2, client=np.arange(12) % 6)
    whole(tmp_path / "out", f"data.source={tmp_path}/mine.npz", "model.name=linear", "run.rounds=1")
    written = json.loads((tmp_path / "out" / "environment.json").read_text())
    assert "data" not in written and len(written["not_private"]["data"]) == 64
