"""Where the time went: stages within stages, threads, what a run prints and keeps."""

import json
import threading
import time

import pytest
import torch
from paths import PLAIN

import fednormec as fn
from fednormec.config.schema import read
from fednormec.core.stages import MEANING, profiled, stage
from fednormec.runs.runner import perform
from fednormec.runs.summary import describe


def test_a_stage_within_another_counts_for_itself_alone():
    with profiled() as profile:
        with stage("gradients"):
            time.sleep(0.02)
            with stage("data"):
                time.sleep(0.05)
        with stage("disk"):
            pass
    facts = profile.facts(workers=1)
    assert 0.02 <= facts["stages"]["gradients"] < 0.05 <= facts["stages"]["data"]
    assert facts["seconds"] == pytest.approx(sum(facts["stages"].values()) + facts["other"])
    assert set(facts["stages"]) == set(MEANING)


def test_what_threads_do_side_by_side_counts_as_the_time_that_passed():
    def work():
        with stage("gradients"):
            time.sleep(0.1)

    with profiled() as profile:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert 0.1 <= profile.facts(workers=4)["stages"]["gradients"] <= profile.facts(workers=4)["seconds"]


def test_a_profile_within_another_gives_it_back():
    with profiled() as outer:
        with profiled():
            pass
        with stage("disk"):
            time.sleep(0.01)
    assert outer.facts(1)["stages"]["disk"] >= 0.01


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
