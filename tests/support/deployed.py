"""A federation as people run it, for tests: its folder with its data, and a server and clients as processes."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from command import free_port
from processes import until
from safetensors.torch import load_file

import fednormec as fn
from fednormec.config.assemble import assemble
from fednormec.data import Examples, from_arrays
from fednormec.federation.agreement import for_client, for_server, read_federation
from fednormec.federation.client import Answer, answering
from fednormec.federation.provision import make
from fednormec.federation.wire import Wire

NAMES = ("north", "south", "east")
PLAIN = """
[model]
name = "linear"
[local]
name = "sgd"
step = 0.5
steps = 3
batch_size = 4
[method]
name = "fed_normec"
beta = 0.3
server_step = 0.5
server_normalization = false
[participation]
name = "{participation}"
[run]
rounds = {rounds}
seed = 3
dtype = "float64"
[federation]
clients = []
inputs = []
classes = 3
deadline = {deadline}
"""
SEEDED = '[privacy]\nnoise_std = 0.7\ntrust = "{trust}"\n'
SECURE = '[privacy]\nepsilon = 50.0\ntrust = "{trust}"\nrandomness = "secure"\n'


def text(privacy: str = "", rounds: int = 8, participation: str = "full", deadline: float = 60.0) -> str:
    """Settings of a small federation."""
    return PLAIN.format(rounds=rounds, participation=participation, deadline=deadline) + privacy


class Federation:
    """A folder with its data, and the processes that were started for it, all of which end with the test."""

    def __init__(self, folder: Path, text: str, names: Sequence[str] = NAMES) -> None:
        self.folder, self.fed, self.names = folder, folder / "fed", tuple(names)
        self.processes: list[subprocess.Popen[str]] = []
        self.agreed = () if 'randomness = "secure"' in text else ("--not-private",)
        rng = np.random.default_rng(0)
        self.data = [(rng.standard_normal((8 + i, 5)), rng.integers(0, 3, 8 + i)) for i in range(len(names))]
        for name, (x, y) in zip(names, self.data, strict=True):
            np.savez(folder / f"{name}.npz", x=x, y=y)
        (folder / "asked.toml").write_text(text)
        self.port = free_port()
        make(self.fed, names, [5], 3, f"localhost:{self.port}", folder / "asked.toml")

    def start(
        self,
        *words: str,
        program: tuple[str, ...] = ("-m", "fednormec"),
        before: Sequence[str] = (),
        settings: dict[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Starts a command of the federation, by another command if words stand before it. Each process has one thread
        for its arithmetic, since many run side by side."""
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | (settings or {})
        process = subprocess.Popen(
            [*before, sys.executable, *program, "federation", *words], cwd=self.folder, text=True, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def serve(self, *words: str, **how: Any) -> subprocess.Popen[str]:
        return self.start("serve", "fed", "--quiet", "--json", *self.agreed, *words, **how)

    def join(self, name: str, folder: str = "", **how: Any) -> subprocess.Popen[str]:
        home = folder or f"fed/clients/{name}"
        return self.start("join", home, "--data", f"{name}.npz", *self.agreed, **how)

    def finish(self, server: subprocess.Popen[str], clients: list[subprocess.Popen[str]]) -> dict[str, Any]:
        """Waits for all; the summary."""
        out, err = server.communicate(timeout=180)
        assert server.returncode == 0, err
        for client in clients:
            assert client.wait(timeout=30) == 0, client.stderr and client.stderr.read()
        summary = json.loads(out)
        assert isinstance(summary, dict)
        return summary | {"err": err}

    def records(self) -> list[dict[str, Any]]:
        path = self.fed / "run" / "metrics.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""  # a line may be just being written
        return [json.loads(line) for line in whole.splitlines()]

    def until(self, rounds: int) -> None:
        until(lambda: len(self.records()) >= rounds)

    def model(self) -> torch.Tensor:
        return torch.cat([t.flatten() for _, t in sorted(load_file(self.fed / "run" / "model.safetensors").items())])

    def in_process(self) -> torch.Tensor:
        """What the same training gives without a network."""
        config = {k: v for k, v in read_federation(self.fed).items() if k != "federation"}
        problem, algorithm, participation, privacy, run, *_ = assemble(config, from_arrays(self.data))
        *_, last = fn.simulate(problem, algorithm, participation, privacy, rounds=run.rounds, seed=run.seed)
        return torch.cat([t.flatten() for _, t in sorted(problem.named(last.x).items())])

    def without_a_network(self) -> torch.Tensor:
        """What the same server and clients give in one process, to the bit: they add in the same order."""
        asked = read_federation(self.fed)
        server, clients = for_server(asked, self.fed), list[Answer]()
        with tempfile.TemporaryDirectory() as folder:
            for i, (name, (x, y)) in enumerate(zip(self.names, self.data, strict=True)):
                (Path(folder) / name).mkdir()
                mine = for_client(asked, name, Examples(x, y), self.fed)
                clients.append(answering(mine, i, Path(folder) / name))
            place = Wire(
                self.names, lambda: "a", server.agreed,
                lambda requests: {client: clients[client](request) for client, request in requests.items()},
                lambda said: None,
            )  # fmt: skip
            problem, algorithm, participation, privacy, run, *_ = server.experiment
            *_, last = fn.simulate(
                problem, algorithm, participation, privacy, rounds=run.rounds, seed=run.seed, on=place
            )
        return torch.cat([t.flatten() for _, t in sorted(problem.named(last.x).items())])

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


@contextmanager
def deploying(folder: Path) -> Iterator[Callable[..., Federation]]:
    """Gives what makes a federation of settings, in a folder within this one; their processes end with the context."""
    all_of_them: list[Federation] = []

    def make(asked: str, within: str = ".", names: Sequence[str] = NAMES) -> Federation:
        (folder / within).mkdir(exist_ok=True)
        all_of_them.append(Federation(folder / within, asked, names))
        return all_of_them[-1]

    try:
        yield make
    finally:
        for federation in all_of_them:
            federation.end()
