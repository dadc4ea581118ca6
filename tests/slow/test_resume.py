"""Runs in processes of their own: signals, a second process, files and disks that are full or read-only."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import Command, sentence, sets
from example_runs import interrupted, same, whole
from paths import PLAIN
from processes import command_line, until

import fednormec as fn
from fednormec.runs import checkpoint as checkpoints
from fednormec.runs.runner import go_on

SLOW = ("data.clients=20", "model.name=mlp", "run.rounds=4000", "local.steps=3", "run.evaluate_every=4000")


def command(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(command_line("run", *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def under_way(out: Path, rounds: int = 2) -> None:
    """Returns when a run has come so far."""
    metrics = out / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= rounds)


def test_a_second_process_is_refused_and_ctrl_c_keeps_the_round(tmp_path):
    with command(str(PLAIN), "--quiet", "--out", str(tmp_path / "out"), *sets(*SLOW)) as first:
        under_way(tmp_path / "out")
        with command("--resume", str(tmp_path / "out")) as second:
            assert second.communicate(timeout=60)[1] == (
                f"fednormec: another process is at work in {tmp_path / 'out'}: wait for its end.\n"
            )
            assert second.returncode == 2
        assert first.poll() is None
        first.send_signal(signal.SIGINT)
        out, err = first.communicate(timeout=60)
    assert first.returncode == 130
    assert out == ""
    done = (tmp_path / "out" / "metrics.jsonl").read_bytes().count(b"\n")
    assert err.splitlines() == [
        "stopping after this round; Ctrl-C again stops at once.",
        f"fednormec: stopped after round {done}. To go on: fednormec run --resume {tmp_path / 'out'}",
    ]
    assert checkpoints.load(checkpoints.path_in(tmp_path / "out", done)).facts.round == done


def test_the_polite_signal_to_end_is_ctrl_c_too(tmp_path):
    with command(str(PLAIN), "--quiet", "--out", str(tmp_path / "out"), *sets(*SLOW)) as process:
        under_way(tmp_path / "out")
        process.send_signal(signal.SIGTERM)
        assert "To go on: fednormec run --resume" in process.communicate(timeout=60)[1]
    assert process.returncode == 130


def test_ctrl_c_twice_stops_at_once(tmp_path):
    """Also in the middle of a round that takes minutes."""
    slow = ("data.clients=20", "model.name=mlp", "local.steps=100000")
    with command(str(PLAIN), "--quiet", "--out", str(tmp_path / "out"), *sets(*slow)) as process:
        until((tmp_path / "out" / "config.toml").exists)
        time.sleep(1)  # the round has begun, most likely; nothing below depends on it
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "stopping after this round; Ctrl-C again stops at once.\n"
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=60)[1]
    assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == b""
    assert process.returncode == 130
    assert "To go on: fednormec run --resume" in err
    assert "Traceback" not in err


def limited(size: int, *arguments: str) -> "subprocess.Popen[str]":
    """The command, whose files may not grow beyond so many bytes."""
    code = ("import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2); "
            "os.execv(sys.executable, [sys.executable, '-m', 'fednormec', 'run', *sys.argv[2:]])")  # fmt: skip
    line = [sys.executable, "-c", code, str(size), *arguments]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_checkpoint_that_does_not_fit_is_said_and_the_run_goes_on(tmp_path):
    """Files may not grow beyond 20 kB: enough for the metrics, not for a checkpoint of 60 memories."""
    fits = ("data.clients=60", "model.name=linear", "run.rounds=20", "run.checkpoint_rounds=9")
    whole(tmp_path / "whole", *fits)
    with limited(20_000, str(PLAIN), "--quiet", "--out", str(tmp_path / "out"), *sets(*fits)) as process:
        err = process.communicate(timeout=60)[1]
    notes = [line for line in err.splitlines() if ".safetensors" in line]
    assert len(notes) == 2
    assert notes[0] == (
        f"note: {tmp_path / 'out' / 'checkpoint-9.safetensors'} cannot be written: File too large. The run goes on "
        "without this checkpoint."
    )
    assert same(tmp_path / "whole", tmp_path / "out")
    assert not [path for path in (tmp_path / "out").iterdir() if "checkpoint" in path.name]


def test_where_not_even_the_ledger_fits_nothing_more_is_released(tmp_path):
    asked = ("data.clients=6", "model.name=linear", "run.rounds=40", "privacy.noise_std=2", "run.checkpoint_rounds=5")
    whole(tmp_path / "whole", *asked)
    with limited(1_500, str(PLAIN), "--quiet", "--out", str(tmp_path / "out"), *sets(*asked)) as process:
        err = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    last = err.splitlines()[-1]
    assert last.startswith(f"fednormec: {tmp_path / 'out'}")
    assert last.endswith(f"cannot be written: File too large. To go on: fednormec run --resume {tmp_path / 'out'}")
    released = (tmp_path / "out" / "metrics.jsonl").read_bytes().count(b"\n")
    assert released < 40
    assert fn.read_ledger(tmp_path / "out" / "ledger.jsonl").rounds >= released
    go_on(tmp_path / "out", quiet=True)
    assert same(tmp_path / "whole", tmp_path / "out")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB."""
    path = tmp_path / "disk"
    path.mkdir()
    if shutil.which("mount") is None or subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(path)], capture_output=True
    ).returncode:  # fmt: skip
        pytest.skip("no file system can be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_ends_a_run_that_can_go_on(tmp_path, small_disk):
    """It fills up while the run goes on; with room again, the run ends as if nothing had happened."""
    asked = ("data.clients=6", "model.name=linear", "run.rounds=120", "privacy.noise_std=2", "run.checkpoint_rounds=20")
    whole(tmp_path / "whole", *asked)
    (small_disk / "other").write_bytes(bytes(230_000))  # room for three checkpoints and some sixty rounds
    with command(str(PLAIN), "--quiet", "--out", str(small_disk / "out"), *sets(*asked)) as process:
        err = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert err.splitlines()[-1].endswith(
        f"cannot be written: No space left on device. To go on: fednormec run --resume {small_disk / 'out'}"
    )
    assert "Traceback" not in err
    assert 20 < (small_disk / "out" / "metrics.jsonl").read_bytes().count(b"\n") < 120
    (small_disk / "other").unlink()
    go_on(small_disk / "out", quiet=True)
    assert same(tmp_path / "whole", small_disk / "out")


def test_a_read_only_folder_is_said_and_left_as_it_is(tmp_path, small_disk, fednormec_: Command):
    interrupted(small_disk / "out", "model.name=linear", "data.clients=6", "run.rounds=12")
    before = {path.name: path.read_bytes() for path in (small_disk / "out").iterdir()}
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for arguments in (("--resume", small_disk / "out"), (PLAIN, "--out", small_disk / "new")):
        assert "Read-only file system" in sentence(fednormec_("run", *arguments).err)
    assert {path.name: path.read_bytes() for path in (small_disk / "out").iterdir()} == before
