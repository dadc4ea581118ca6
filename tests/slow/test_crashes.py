"""Killed wherever it may be, a run goes on to the same bits: model, server, every client's memory, ledger, metrics."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def crashed(folder: Path, *mode: str) -> dict[str, Any]:
    """crashes.py in a process that has no threads yet, since it forks."""
    command = [sys.executable, str(Path(__file__).with_name("crashes.py")), str(folder), *mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.stdout, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("mode", "least"), [(("random", "36"), 36), (("calls",), 90)])
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path, mode: tuple[str, ...], least: int) -> None:
    found = crashed(tmp_path, *mode)
    assert found["kills"] >= least
    assert found["during_checkpoint"] >= 1
    assert found["compared"] >= 3
    assert found["different"] == []
