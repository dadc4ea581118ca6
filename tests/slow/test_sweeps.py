"""Sweeps in processes: what workers compute, who dies and who is stopped, and what a terminal shows."""

import json
import os
import pty
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import command_line, read_terminal, until
from sweep_cells import NOISE, digits, from_toml, quadratic, stamps, written

from fednormec.config.schema import read
from fednormec.runs.runner import perform
from fednormec.sweeps.grid import grid
from fednormec.sweeps.ranking import sweep


def test_cells_are_what_single_runs_of_their_configs_are(tmp_path: Path) -> None:
    """Whether a worker computes one of them or several: there are three for two workers."""
    config = digits(participation={"name": "poisson", "p": 0.5}, **NOISE)
    done = sweep(grid(config, {"method.beta": [0.1, 0.2, 0.3], "participation.p": [0.5]}), tmp_path / "out", 2)
    assert not done.failed
    for cell in ("beta=0.1_p=0.5", "beta=0.2_p=0.5", "beta=0.3_p=0.5"):
        alone = perform(read(tmp_path / "out" / "cells" / f"{cell}.toml"), "alone", tmp_path / cell, quiet=True)
        for file in ("model.safetensors", "ledger.jsonl", "privacy.txt", "config.toml"):
            assert (tmp_path / cell / file).read_bytes() == (tmp_path / "out" / "cells" / cell / file).read_bytes()
        assert alone["metrics"].keys() == done.rows[0].outcomes[0].summary["metrics"].keys()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """The command in a process of its own, ended with the test."""
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: object, **streams: Any) -> "subprocess.Popen[str]":
        command = command_line("sweep", *arguments)
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
        running.append(subprocess.Popen(command, cwd=tmp_path, text=True, **streams))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def children(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def releases(cell: Path) -> int:
    ledger = cell / "ledger.jsonl"
    return max(0, len(ledger.read_bytes().splitlines()) - 1) if ledger.exists() else 0


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks Linux who is whose child")


@needs_proc
def test_a_killed_sweep_leaves_no_orphans_and_goes_on(tmp_path: Path, started: Any) -> None:
    out, rounds = tmp_path / "out", 400
    given = written(tmp_path / "my.toml", quadratic(rounds, **NOISE), "method.beta = [0.1, 0.2]")
    parent = started(given, "--out", out, "--workers", 1)
    until(lambda: releases(out / "cells" / "beta=0.2") > 5)
    family = children(parent.pid)
    parent.kill()
    parent.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))  # long before a worker is through
    paid, before = releases(out / "cells" / "beta=0.2"), stamps(out)
    assert 5 < paid < rounds and set(before) == {"beta=0.1"}
    done = sweep(from_toml(tmp_path, "method.beta = [0.1, 0.2]", quadratic(rounds, **NOISE)), out, 1)
    assert stamps(out)["beta=0.1"] == before["beta=0.1"] and not done.failed
    assert releases(out / "interrupted" / "beta=0.2-1") == paid
    assert done.price is not None and (done.price.runs, done.price.rounds) == (3, 2 * rounds + paid)
    assert done.price.best_only is None  # runs that are not alike
    perform(read(out / "cells" / "beta=0.2.toml"), "alone", tmp_path / "alone", quiet=True)
    models = [folder / "model.safetensors" for folder in (tmp_path / "alone", out / "cells" / "beta=0.2")]
    assert models[0].read_bytes() == models[1].read_bytes()


@needs_proc
def test_a_worker_that_dies_costs_one_cell_and_ctrl_c_one_sentence(tmp_path: Path, started: Any) -> None:
    out = tmp_path / "out"
    given = written(tmp_path / "my.toml", quadratic(100_000, **NOISE), "method.beta = [0.1, 0.2, 0.4]")
    parent = started(given, "--out", out, "--workers", 1)
    until(lambda: releases(out / "cells" / "beta=0.1") > 1)
    (worker,) = (pid for pid in children(parent.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(worker, signal.SIGKILL)
    until(lambda: releases(out / "cells" / "beta=0.2") > 1)
    family = children(parent.pid)
    second = started(given, "--out", out, "--quiet")
    assert "another command is at work" in second.communicate()[1] and second.returncode == 2
    parent.send_signal(signal.SIGINT)
    _, said = parent.communicate(timeout=30)
    assert parent.returncode == 130
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))
    assert said.splitlines()[0].endswith("beta=0.1: failed: its process ended with exit code -9")
    assert said.splitlines()[1:] == [
        "fednormec: stopped with 1 of 3 cells done; the same command goes on with the others."
    ]
    assert (out / "cells" / "beta=0.1.error.txt").exists() and stamps(out) == {}


def test_a_bar_on_a_terminal_and_one_object_on_stdout(tmp_path: Path, started: Any) -> None:
    given = written(tmp_path / "my.toml", quadratic(), "method.beta = [0.1, 0.2]")
    ours, theirs = pty.openpty()
    process = started(given, "--json", "--workers", 1, stderr=theirs, env={**os.environ, "COLUMNS": "100"})
    os.close(theirs)
    seen = read_terminal(ours)
    os.close(ours)
    out = process.stdout.read()
    assert process.wait() == 0 and len(out.splitlines()) == 1
    assert [row["trouble"] for row in json.loads(out)["rows"]] == ["", ""] and json.loads(out)["tuning"] is None
    shown = seen.decode()
    assert "━" in shown and "2/2 cells" in shown and "beta=0.2: loss" in shown and "100%" in shown
