"""TensorBoard's event files hold a run's figures, apart what looks at the clients, and its absence is one sentence."""

import json
from pathlib import Path

import pytest
from command import Command, sentence
from paths import PLAIN

import fednormec as fn
import fednormec.runs.tensorboard
from fednormec.privacy.labels import NOT_PRIVATE
from fednormec.runs.tensorboard import scalars

SMALL = ("run", PLAIN, "--quiet", "--out", "out", "--tensorboard", "--set", "run.rounds=3", "--set", "data.clients=3")


@pytest.mark.long
def test_the_figures_of_a_run_are_written_as_events(fednormec_: Command, tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert fednormec_(*SMALL, "--set", "privacy.noise_std=2").code == 0
    events = reader.EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    counts = ("train_loss", "computed", "sent", "left_out")
    apart = {f"not_private/{name}" for name in counts}
    assert set(events.Tags()["scalars"]) == {"epsilon", "test_loss", "test_accuracy"} | apart
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    for tag, values in (
        ("epsilon", [line["epsilon"] for line in lines]),
        ("not_private/train_loss", [line["not_private"]["train_loss"] for line in lines]),
    ):
        found = events.Scalars(tag)
        assert [event.step for event in found] == [1, 2, 3]
        assert [event.value for event in found] == pytest.approx(values, rel=1e-6)


def test_an_epsilon_that_protects_nobody_has_another_name() -> None:
    record = fn.Record({"round": 1, "epsilon": 99.0, "delta": 1e-5, "label": NOT_PRIVATE, "not_private": {"sent": 3}})
    assert scalars(record) == {"epsilon_NOT_PRIVATE": 99.0, "not_private/sent": 3.0}


def test_without_tensorboard_a_sentence_says_how_to_get_it(
    fednormec_: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fednormec.runs.tensorboard, "find_spec", lambda name: None)
    said = fednormec_(*SMALL)
    assert said.code == 2
    assert "pip install 'fednormec[tensorboard]'" in sentence(said.err)
    assert not (tmp_path / "out").exists()
