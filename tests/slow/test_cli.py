"""The command in a process of its own, and on a terminal."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from command import sentence, sets
from processes import command_line, read_terminal
from strict_json import strictly


def separately(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(command_line(*arguments), capture_output=True, text=True)


@pytest.mark.parametrize("overrides", ["method.betta=1", "data.source=nowhere.npz"])
def test_a_mistake_in_a_process_of_its_own(tmp_path: Path, overrides: str) -> None:
    done = separately("run", *sets(*overrides.split()), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stdout == ""
    sentence(done.stderr)
    assert not list(tmp_path.iterdir())


def test_on_a_terminal_there_is_a_bar(tmp_path: Path) -> None:
    """80 columns are enough for everything it shows; stdout stays clean for a script."""
    pty, termios, fcntl = (pytest.importorskip(name) for name in ("pty", "termios", "fcntl"))
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, b"\x18\x00\x50\x00" + bytes(4))  # 24 rows, 80 columns
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR", "CI")}
    overrides = sets("run.rounds=12", "model.name=linear", "method.server_step=0.1")
    process = subprocess.Popen(
        command_line("run", "--json", *overrides, "--out", tmp_path / "out"),
        stdout=subprocess.PIPE, stderr=end, env=environment | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    os.close(end)
    shown = read_terminal(terminal)
    os.close(terminal)
    out, _ = process.communicate()
    assert process.returncode == 0
    assert strictly(out.decode())["rounds"] == 12
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    last = text.strip().split("\r")[-1].strip()
    pace = r"[\d.]+ (?:rounds/s|s/round)"
    assert re.fullmatch(rf"round 12/12 ━+ {pace} ETA \d+:\d+ accuracy [\d.]+%  test loss [\d.]+ ε [\d.]+", last)
