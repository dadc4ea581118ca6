"""Files of any content, a few hundred of each kind; `make fuzz` tries thousands."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

COUNT = 300


@pytest.mark.parametrize(("kind", "least_taken"), [("config", 3), ("data", 10), ("run", 100)])
def test_any_file_is_taken_or_refused_in_a_sentence(tmp_path: Path, kind: str, least_taken: int) -> None:
    seed = 0 if os.environ.get("HYPOTHESIS_PROFILE") == "repeatable" else random.randrange(10**9)
    command = [sys.executable, str(Path(__file__).with_name("fuzz.py")), str(tmp_path), kind, str(COUNT), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.stdout, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["tried"] == COUNT == found["taken"] + found["refused"] + found["too_long"]
    assert found["taken"] >= least_taken
    assert found["refused"] >= 20
