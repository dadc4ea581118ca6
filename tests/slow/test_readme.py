"""The README's commands on Ray do what it says."""

import os
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

from command import Command
from paths import ROOT

from fednormec.engine.ray_cluster import ONLY_THIS_MACHINE

BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)


def test_the_commands_on_ray_run(fednormec_: Command, tmp_path):
    """With a cluster on this machine in the place of the one that the README assumes. Only who uses Ray needs a process
    of its own."""
    commands = [line.partition("#")[0].strip() for line in BLOCKS[3].splitlines()]
    assert len(commands) == 3
    tokens = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # none in the user's home
    with on_a_cluster(os.environ | tokens | ONLY_THIS_MACHINE, tmp_path) as (address, env):
        for command in commands:
            words = shlex.split(command.replace("10.0.0.1:6379", address))
            words += ["--set", "run.rounds=3"] if "--resume" not in words else []
            if "threads" in words:
                assert fednormec_(*words[1:]).code == 0
                continue
            done = subprocess.run(
                [sys.executable, "-m", *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stderr
    near, far = (tmp_path / "runs" / name / "metrics.jsonl" for name in ("quickstart-1", "far"))
    assert near.read_bytes() == far.read_bytes()


@contextmanager
def on_a_cluster(env: dict[str, str], folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A Ray cluster of another process, which ends with its input."""
    code = (
        "import ray; ray.init(address='local', num_cpus=2, include_dashboard=False, log_to_driver=False, "
        "logging_level='error'); print(ray.get_runtime_context().gcs_address, flush=True); input()"
    )
    started = [sys.executable, "-c", code]
    with subprocess.Popen(started, cwd=folder, env=env, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process.stdout.readline().strip(), env
        finally:
            process.stdin.write("\n")
            process.stdin.close()
