"""Killed wherever it may be, a run goes on to the same bits: model, server, every client's memory, ledger, metrics."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SAME = ("config.toml", "metrics.jsonl", "ledger.jsonl", "model.safetensors", "privacy.txt", "privacy.json")


def crashed(folder: Path, *mode: str) -> dict[str, Any]:
    """tests/crashes.py in a process that has no threads yet, since it forks."""
    command = [sys.executable, str(Path(__file__).with_name("crashes.py")), str(folder), *mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """What must not depend on interruptions; the kept checkpoint has the server's and all clients' memories."""
    kept = [path.name for path in folder.glob("checkpoint-*")]
    assert len(kept) == 1
    return {name: (folder / name).read_bytes() for name in (*SAME, *kept) if (folder / name).exists()}


@pytest.mark.parametrize(("mode", "least"), [(("random", "36"), 36), (("calls",), 90)])
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path, mode: tuple[str, ...], least: int) -> None:
    found = crashed(tmp_path, *mode)
    assert found["kills"] >= least
    assert found["during_checkpoint"] >= 1
    assert len(found["compare"]) >= 3
    for whole, killed in found["compare"]:
        assert contents(tmp_path / killed) == contents(tmp_path / whole), killed
        assert json.loads((tmp_path / killed / "environment.json").read_text())["versions"]
        assert not list((tmp_path / killed).glob("*.part")), "nothing half written stays"
