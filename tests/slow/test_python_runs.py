"""Runs and sweeps of a Python program that is killed: the next process goes on, to the same bits."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import until

SAME = ("metrics.jsonl", "model.safetensors", "x.safetensors", "ledger.jsonl", "privacy.txt", "config.toml")
PROGRAM = """
import os
import sys
import time

import torch

import fednormec as fn

SCALE = 0.5


def halved(mean):
    time.sleep(float(os.environ.get("SLOWLY", "0")))
    return SCALE * mean


def method(tau=1.0):
    base = fn.dp_fed_avg_clip(fn.gd(0.1, steps=2), tau=tau)
    return base._replace(name="mine", server=lambda state, mean, weights: base.server(state, halved(mean), weights))


def problem():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    inputs = torch.randn(21, 6, 5)
    *clients, test = zip(inputs, (inputs[..., 0] > 0).long())
    return fn.NeuralProblem(module, clients, test)


PRIVATE = fn.Privacy(epsilon=8.0)
what, out = sys.argv[1:]
if what == "train":
    fn.train(problem(), method(), fn.poisson(0.5), PRIVATE, rounds=30, checkpoint_rounds=4, out=out)
elif what == "resume":
    fn.resume(out, problem(), method())
else:
    fn.sweep(problem(), method, fn.poisson(0.5), PRIVATE, rounds=9, checkpoint_rounds=2, out=out, quiet=True,
             grid={"tau": [0.5, 1.0]}, seeds=[0, 1])
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "mine.py"
    path.write_text(PROGRAM)
    return path


def started(program: Path, what: str, out: object, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(program), what, str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **environment},
    )  # fmt: skip


def done(program: Path, what: str, out: object, **environment: str) -> str:
    with started(program, what, out, **environment) as process:
        said, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return said


def rounds(out: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in out.rglob("metrics.jsonl"))


def killed(program: Path, what: str, out: Path, after: int) -> None:
    with started(program, what, out, SLOWLY="0.1") as process:
        until(lambda: rounds(out) >= after or process.poll() is not None)
        assert process.poll() is None, process.communicate()[1]
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_a_killed_run_goes_on_to_the_same_files(program: Path, tmp_path: Path) -> None:
    done(program, "train", tmp_path / "whole")
    killed(program, "train", tmp_path / "out", 10)
    assert not (tmp_path / "out" / "summary.json").exists()
    done(program, "resume", tmp_path / "out")
    for name in SAME:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name
    assert (tmp_path / "out" / "report.html").exists()


def test_a_killed_sweep_goes_on_to_the_same_table(program: Path, tmp_path: Path) -> None:
    done(program, "sweep", tmp_path / "whole")
    killed(program, "sweep", tmp_path / "out", 13)
    assert not (tmp_path / "out" / "table.csv").exists()
    done(program, "sweep", tmp_path / "out")
    assert (tmp_path / "whole" / "table.csv").read_bytes() == (tmp_path / "out" / "table.csv").read_bytes()
    for cell in (tmp_path / "whole" / "cells").glob("*/metrics.jsonl"):
        assert cell.read_bytes() == (tmp_path / "out" / "cells" / cell.parent.name / cell.name).read_bytes()


def test_ctrl_c_keeps_the_round_and_says_how_to_go_on(program: Path, tmp_path: Path) -> None:
    with started(program, "train", tmp_path / "out", SLOWLY="0.1") as process:
        until(lambda: rounds(tmp_path / "out") >= 5)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=60)[1]
    assert err.splitlines()[0] == "stopping after this round; Ctrl-C again stops at once."
    end = rounds(tmp_path / "out")
    assert err.splitlines()[-1] == (
        f"fednormec.errors.Stopped: stopped after round {end}. To go on: fn.resume('{tmp_path / 'out'}', problem, "
        "algorithm)"
    )
    assert (tmp_path / "out" / f"checkpoint-{end}.safetensors").exists()
