"""One schema for what a run writes and others read, and one answer to "has it finished?", also of a damaged summary."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from command import Command, free_port, sentence, sets
from hypothesis import given
from hypothesis import strategies as st

import fednormec as fn
from fednormec.config.schema import dump, read
from fednormec.config.settings import QUICKSTART
from fednormec.errors import Stopped, UserError
from fednormec.federation.agreement import read_federation
from fednormec.federation.provision import make
from fednormec.federation.sessions import Serving, serve
from fednormec.results.reading import read_run
from fednormec.runs.records import Summary, Tally, finished
from fednormec.runs.runner import go_on, perform
from fednormec.sweeps.pool import Cell, run_all

SMALL = ("model.name=linear", "data.clients=6", "run.rounds=3", "privacy.epsilon=20")
WHOLE: dict[str, Any] = {
    "method": "m", "rounds": 3, "metrics": {}, "status": "done", "clients": 2, "parameters": 9, "privacy": "none",
    "left_out": 0, "not_private": [],
}  # fmt: skip
DAMAGE = {
    "cut off": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "no object": lambda text: "[1, 2]",
    "without rounds": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "rounds"}),
    "rounds are no number": lambda text: json.dumps(json.loads(text) | {"rounds": "many"}),
    "metrics are no object": lambda text: json.dumps(json.loads(text) | {"metrics": 7}),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.sampled_from([*WHOLE]), inner),
    max_leaves=6,
)


def damage(folder: Path, how: str) -> None:
    summary = folder / "summary.json"
    summary.write_text(DAMAGE[how](summary.read_text(encoding="utf-8")), encoding="utf-8")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("done") / "out"
    perform(read(QUICKSTART, SMALL), "test", out, quiet=True)
    return out


@pytest.fixture
def folder(done: Path, tmp_path: Path) -> Path:
    """A run that has finished, to be damaged."""
    out = tmp_path / "out"
    out.mkdir()
    for path in done.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    return out


# whoever asks whether a run has finished


@pytest.mark.parametrize("how", DAMAGE)
def test_run_offers_to_resume_what_has_a_damaged_summary(fednormec_: Command, folder: Path, how: str) -> None:
    whole = fednormec_("run", *sets(*SMALL), "--out", folder)
    assert whole.code == 2 and "--resume" not in sentence(whole.err)
    damage(folder, how)
    said = fednormec_("run", *sets(*SMALL), "--out", folder)
    assert said.code == 2 and "or go on with it: fednormec run --resume" in sentence(said.err)


@pytest.mark.long
@pytest.mark.parametrize("how", DAMAGE)
def test_resume_computes_again_what_has_a_damaged_summary(
    folder: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    go_on(folder, quiet=True)
    assert "has come to its end already" in capsys.readouterr().err
    damage(folder, how)
    go_on(folder, quiet=True)
    assert "goes on after round 0" in capsys.readouterr().err
    for name in ("model.safetensors", "metrics.jsonl", "ledger.jsonl", "privacy.json"):
        assert (folder / name).read_bytes() == before[name], name
    assert finished(folder) == json.loads(before["summary.json"]) | {"out": str(folder)}


def test_a_model_with_secure_noise_is_not_computed_again(tmp_path: Path) -> None:
    """That would draw new noise, for which nothing is left to pay."""
    out = tmp_path / "out"
    perform(read(QUICKSTART, [*SMALL, "privacy.randomness=secure"]), "test", out, quiet=True)
    damage(out, "empty")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(UserError, match="but the model is there: .* nothing was changed"):
        go_on(out, quiet=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.long
@pytest.mark.parametrize("how", DAMAGE)
def test_a_sweep_runs_a_cell_with_a_damaged_summary_again(tmp_path: Path, how: str, monkeypatch: Any) -> None:
    ran = list[str]()

    def work_off(cells: list[Cell], folder: Path, *others: Any) -> None:
        for cell in cells:
            ran.append(cell.name)
            perform(cell.config, cell.name, folder / "cells" / cell.name, quiet=True)

    monkeypatch.setattr("fednormec.sweeps.pool._work_off", work_off)
    cell = Cell("one", {}, read(QUICKSTART, SMALL))
    run_all([cell], tmp_path, workers=1)
    (outcome,) = run_all([cell], tmp_path, workers=1)
    assert ran == ["one"] and outcome.status == "done"
    damage(tmp_path / "cells" / "one", how)
    run_all([cell], tmp_path, workers=1)
    assert ran == ["one", "one"]
    assert [path.name for path in (tmp_path / "interrupted").iterdir()] == ["one-1"], "what it released stays released"


@pytest.mark.long
@pytest.mark.parametrize("how", ["cut off", "without rounds"])
def test_serve_goes_on_with_what_has_a_damaged_summary(tmp_path: Path, how: str) -> None:
    federation, out = tmp_path / "federation", tmp_path / "federation" / "run"
    asked = tmp_path / "asked.toml"
    private = {"epsilon": 9.0, "randomness": "secure"}
    asked.write_text(dump({"model": {"name": "linear"}, "local": {"name": "gd", "step": 0.1}, "privacy": private}))
    make(federation, ["north", "south"], [5], 3, f"localhost:{free_port()}", asked)
    out.mkdir()
    (out / "config.toml").write_text(dump(read_federation(federation)))
    (out / "metrics.jsonl").touch()
    (out / "summary.json").write_text(json.dumps(WHOLE))
    how_to = Serving(quiet=True)
    assert serve(federation, how_to, stop=lambda: True)["status"] == "done"
    damage(out, how)
    with pytest.raises(Stopped, match="while waiting for clients"):
        serve(federation, how_to, stop=lambda: True)


@pytest.mark.parametrize("how", DAMAGE)
def test_a_report_calls_a_run_with_a_damaged_summary_unfinished(folder: Path, how: str) -> None:
    assert read_run(folder).status == "done" and not read_run(folder).problems
    damage(folder, how)
    run = read_run(folder)
    assert run.status == "unfinished" and run.summary is None
    assert "summary.json is damaged: the run counts as unfinished" in run.problems
    assert run.rounds == 3 and run.protection == "private" and run.epsilon is not None, "the other files say so"


# the schema


@given(JSON)
def test_anything_is_a_summary_or_none(found: Any) -> None:
    summary = Summary.read(found)
    if summary is not None:
        assert summary == found and summary.status == found["status"] and summary.rounds == found["rounds"]
    assert Summary.read(WHOLE | {"more": found}) is not None


@given(JSON)
def test_no_summary_is_no_end(found: Any) -> None:
    for key in WHOLE:
        if type(found) is not type(WHOLE[key]):
            assert Summary.read(WHOLE | {key: found}) is None


def test_without_a_folder_there_is_no_end(tmp_path: Path) -> None:
    assert finished(tmp_path) is None and finished(tmp_path / "missing") is None


@given(JSON)
def test_anything_is_a_record_or_none_and_its_views_read_it(found: Any) -> None:
    record = fn.Record.read(found, 1)
    assert record is None or (record == found and record.round == 1)
    damaged = fn.Record(found if isinstance(found, dict) else {"not_private": found})
    assert isinstance(damaged.apart, dict) and isinstance(damaged.evaluated, bool)
    assert "not_private" not in damaged.public_part


def test_a_record_keeps_apart_what_is_not_private() -> None:
    problem, method = fn.random_logistic(7, 4, examples=5), fn.fed_normec(fn.gd(0.1))
    trained = fn.train(problem, method, privacy=fn.Privacy(epsilon=8.0), rounds=4, evaluate_every=2)
    for number, record in enumerate(trained.history, start=1):
        assert isinstance(record, fn.Record) and fn.Record.read(json.loads(json.dumps(record)), number) == record
        assert record.evaluated == (number % 2 == 0)
        assert record.client_figures.keys() <= record.apart.keys() and "sent" not in record.client_figures
        assert set(record.public_part) == set(record) - {"not_private"}
        assert not set(record.public_figures) & {"round", "epsilon", "delta", "label"}


def test_a_tally_is_the_same_for_records_that_were_read_back() -> None:
    lines = [
        {"round": k, "test_accuracy": a, "not_private": {"train_loss": 2 / k, "left_out": k}}
        for k, a in enumerate((0.1, None, 0.3), start=1)
    ]
    tally = Tally(map(fn.Record, lines))
    assert (tally.rounds, tally.left_out, tally.client_figures) == (3, 6, {"train_loss"})
    assert tally.latest == {"test_accuracy": 0.3, "train_loss": 2 / 3}
    assert tally.curve[::2] == [0.1, 0.3] and math.isnan(tally.curve[1])
