"""Where the time went: stages within stages, threads, what a run prints and keeps."""

import json
import threading

import pytest
import torch
from clock import Clock
from paths import PLAIN

import fednormec as fn
from fednormec.config.schema import read
from fednormec.core import stages
from fednormec.core.stages import MEANING, profiled, stage
from fednormec.engine.ray_cluster import _note
from fednormec.runs.runner import perform
from fednormec.runs.summary import describe


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(stages, "time", found)
    return found


def test_a_stage_within_another_counts_for_itself_alone(clock: Clock) -> None:
    with profiled() as profile:
        clock.advance(1.0)
        with stage("gradients"):
            clock.advance(2.0)
            with stage("data"):
                clock.advance(5.0)
                with stage("noise"):
                    clock.advance(0.5)
            clock.advance(0.25)
        with stage("disk"):
            pass
    facts = profile.facts(workers=1)
    assert facts["stages"] == {**dict.fromkeys(MEANING, 0.0), "gradients": 2.25, "data": 5.0, "noise": 0.5}
    assert (facts["seconds"], facts["other"]) == (8.75, 1.0)


def test_what_threads_do_side_by_side_counts_as_the_time_that_passed(clock: Clock) -> None:
    """All four are within the stage while the clock goes on by three seconds."""
    within, left = threading.Barrier(5), threading.Barrier(5)

    def work() -> None:
        with stage("gradients"):
            within.wait(60)
            left.wait(60)

    with profiled() as profile:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        within.wait(60)
        clock.advance(3.0)
        left.wait(60)
        for thread in threads:
            thread.join()
    assert profile.facts(workers=4)["stages"]["gradients"] == profile.facts(workers=4)["seconds"] == 3.0


def test_what_workers_elsewhere_say_counts_as_if_they_were_threads(clock: Clock) -> None:
    with profiled() as profile:
        _note({"gradients": 6.0, "memories": 1.5}, workers=3)
    found = profile.facts(workers=1)["stages"]
    assert (found["gradients"], found["memories"]) == (2.0, 0.5)
    _note({"gradients": 6.0}, workers=3)  # nobody is looking


def test_a_profile_within_another_gives_it_back(clock: Clock) -> None:
    with profiled() as outer:
        with profiled() as inner, stage("disk"):
            clock.advance(7.0)
        with stage("disk"):
            clock.advance(2.0)
    assert (outer.facts(1)["stages"]["disk"], inner.facts(1)["stages"]["disk"]) == (2.0, 7.0)


def test_nobody_looking_nothing_is_measured():
    assert stage("gradients") is stage("disk")


def test_a_profile_changes_no_bit():
    problem, method = fn.random_quadratic(11, 5, parts=3, seed=0), fn.fed_normec(fn.gd(0.3, 2))
    *_, plain = fn.simulate(problem, method, rounds=5, seed=1)
    with profiled() as profile:
        *_, watched = fn.simulate(problem, method, rounds=5, seed=1)
    assert torch.equal(plain.x, watched.x)
    assert profile.facts(2)["stages"]["gradients"] > 0


def test_a_run_says_where_its_time_went_and_what_it_chose(tmp_path):
    config = read(PLAIN, ["run.rounds=3", "run.workers=2", "run.chunk_size=7", "run.evaluate_every=2"])
    summary = perform(config, "test", tmp_path / "out", quiet=True, profile=True)
    kept = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert kept == summary["profile"]
    for name in ("data", "gradients", "memories", "server", "evaluation", "disk"):
        assert kept["stages"][name] > 0
    assert kept["stages"]["noise"] == 0
    assert kept["choices"]["workers"] == 2 and kept["choices"]["chunk_size"] == 7
    assert kept["choices"]["gradients"] == "layers" and kept["choices"]["evaluate_every"] == 2
    text = describe(summary | {"statement": None})
    assert all(name in text for name in MEANING) and "gradients by layers" in text
    assert "profile" not in perform(config, "test", tmp_path / "plain", quiet=True)
