"""A federation by way of Flower, as people run it: a stock SuperLink with TLS and node authentication, SuperNodes, and
a gateway for each client. `make test-flower` runs this in an environment of its own: minutes, since Flower starts a
process for each message."""

import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import free_port
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from deployed import NAMES, SECURE, text
from processes import until
from safetensors.torch import load_file

import fednormec as fn
from fednormec.config.assemble import assemble
from fednormec.data import from_arrays
from fednormec.federation.agreement import read_federation
from fednormec.federation.flower.app import write_app
from fednormec.federation.provision import make
from fednormec.privacy.ledger import read_ledger

pytest.importorskip("flwr", reason="Flower has an environment of its own: make test-flower")
BIN = Path(sys.executable).parent


class Flower:
    """A federation, its gateways and Flower's processes, all of which end with the test."""

    def __init__(self, folder: Path, rounds: int = 3, deadline: float = 60.0, privacy: str = "") -> None:
        self.folder, self.fed, self.home = folder, folder / "fed", folder / "home"
        self.processes = dict[str, subprocess.Popen[bytes]]()
        self.agreed = () if privacy else ("--not-private",)
        rng = np.random.default_rng(0)
        self.data = [(rng.standard_normal((8 + i, 5)), rng.integers(0, 3, 8 + i)) for i in range(len(NAMES))]
        (folder / "asked.toml").write_text(text(privacy, rounds, deadline=deadline))
        self.port = free_port()
        make(self.fed, NAMES, [5], 3, f"localhost:{self.port}", folder / "asked.toml")
        for name, (x, y) in zip(NAMES, self.data, strict=True):
            np.savez(folder / f"{name}.npz", x=x, y=y)
        write_app(self.fed)
        self.home.mkdir()
        self.environment = os.environ | {
            "FLWR_HOME": str(self.home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def start(self, name: str, *words: object) -> subprocess.Popen[bytes]:
        """A process in a session of its own, so that what it starts ends with it."""
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(BIN / str(words[0])), *map(str, words[1:])], cwd=self.folder, env=self.environment, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip
        return self.processes[name]

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def flwr(self, *words: object) -> str:
        done = subprocess.run(
            [str(BIN / "flwr"), *map(str, words)], cwd=self.folder, env=self.environment, capture_output=True,
            text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def superlink(self, *words: object) -> None:
        tls = () if "--insecure" in words else (
            "--ssl-ca-certfile", self.fed / "ca.crt", "--ssl-certfile", self.fed / "server.crt",
            "--ssl-keyfile", self.fed / "server.key", "--enable-supernode-auth",
        )  # fmt: skip
        how = "insecure = true" if "--insecure" in words else f'root-certificates = "{self.fed / "ca.crt"}"'
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n{how}\n'
        )
        self.start(
            "superlink", "flower-superlink", "--host", "127.0.0.1", "--port", self.port,
            "--disable-runtime-dependency-installation", *tls, *words,
        )  # fmt: skip
        until(lambda: "running on" in self.said("superlink").lower())

    def gateway(self, name: str) -> None:
        folder = self.fed / "clients" / name
        self.start(
            f"gateway-{name}", "fednormec", "federation", "answer", folder, "--data", self.folder / f"{name}.npz",
            "--socket", self.socket(name), *self.agreed,
        )  # fmt: skip
        until(self.socket(name).exists)

    def socket(self, name: str) -> Path:
        return self.folder / f"{name}.sock"

    def register(self, name: str) -> None:
        key = ec.generate_private_key(ec.SECP384R1())
        (self.folder / f"{name}.node").write_bytes(
            key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
        )
        public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
        (self.folder / f"{name}.node.pub").write_bytes(public)
        self.flwr("supernode", "register", self.folder / f"{name}.node.pub", "here")

    def supernode(self, name: str, port: int | None = None) -> None:
        self.start(
            f"node-{name}", "flower-supernode", "--superlink", f"127.0.0.1:{port or self.port}", "--root-certificates",
            self.fed / "ca.crt", "--auth-supernode-private-key", self.folder / f"{name}.node", "--port", free_port(),
            "--node-config", f'socket="{self.socket(name)}"',
        )  # fmt: skip

    def run(self, *words: object) -> None:
        told = () if not self.agreed else ("-c", "not-private=true")
        self.flwr("run", self.fed / "app", "here", *told, *words)

    def finish(self, seconds: float = 300.0) -> dict[str, Any]:
        path = self.fed / "run" / "summary.json"
        until(lambda: path.exists() or "failed" in self.said("superlink").lower(), seconds)
        assert path.exists(), self.said("superlink")[-4000:]
        summary = json.loads(path.read_text())
        assert isinstance(summary, dict)
        return summary

    def records(self) -> list[dict[str, Any]]:
        path = self.fed / "run" / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def model(self) -> torch.Tensor:
        return torch.cat([t.flatten() for _, t in sorted(load_file(self.fed / "run" / "model.safetensors").items())])

    def in_process(self) -> torch.Tensor:
        """What the same training gives without a network."""
        config = {k: v for k, v in read_federation(self.fed).items() if k != "federation"}
        problem, algorithm, participation, privacy, run, *_ = assemble(config, from_arrays(self.data))
        *_, last = fn.simulate(problem, algorithm, participation, privacy, rounds=run.rounds, seed=run.seed)
        return torch.cat([t.flatten() for _, t in sorted(problem.named(last.x).items())])


@pytest.fixture
def flowers(tmp_path: Path) -> Iterator[list[Flower]]:
    made = list[Flower]()
    yield made
    for flower in made:
        for name in list(flower.processes):
            flower.kill(name)
        for process in started_in(flower.home):  # what Flower starts in sessions of its own
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def started_in(home: Path) -> list[int]:
    """Processes that have this folder, which no other has, for Flower's home."""
    found = list[int]()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"FLWR_HOME={home}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def with_nodes(flower: Flower, port: int | None = None) -> Flower:
    """With a SuperLink and its SuperNodes, which reach it at this port; by default its own."""
    flower.superlink()
    for name in NAMES:
        flower.gateway(name)
        flower.register(name)
        flower.supernode(name, port)
    return flower


@contextmanager
def fleet_alone(flower: Flower) -> Iterator[int]:
    """A filter before a SuperLink, as docs/deployment.md wants one: TLS on both sides, /v1/fleet/ and nothing else."""
    within = ssl.create_default_context(cafile=flower.fed / "ca.crt")

    class Filter(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if not self.path.startswith("/v1/fleet/"):
                self.send_error(404)
                return
            behind = http.client.HTTPSConnection("127.0.0.1", flower.port, context=within, timeout=60)
            behind.request("POST", self.path, body, dict(self.headers))
            found = behind.getresponse()
            content = found.read()
            self.send_response(found.status)
            for name, value in found.getheaders():
                if name.lower() in ("content-type", "retry-after"):
                    self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            behind.close()

        def log_message(self, *given: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Filter)
    server.daemon_threads = True
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(flower.fed / "server.crt", flower.fed / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of connections that end with the processes at their other end
def test_nodes_train_through_a_filter_that_passes_nothing_else(tmp_path, flowers):
    """What a stock SuperLink would let anybody do, from outside nobody can."""
    flowers.append(flower := Flower(tmp_path))
    with fleet_alone(flower) as port:
        with_nodes(flower, port)  # which registers keys and later starts a run, on the SuperLink's own port
        (flower.home / "config.toml").open("a").write(
            f'[superlink.outside]\naddress = "127.0.0.1:{port}"\nroot-certificates = "{flower.fed / "ca.crt"}"\n'
        )
        for words in (
            ("run", flower.fed / "app", "outside", "-c", "not-private=true"),
            ("supernode", "register", flower.folder / "north.node.pub", "outside"),
            ("list", "outside"),
        ):
            with pytest.raises(AssertionError, match="404"):
                flower.flwr(*words)
        flower.run()
        assert flower.finish()["rounds"] == 3
    torch.testing.assert_close(flower.model(), flower.in_process(), rtol=1e-6, atol=1e-12)


def test_stock_processes_train_what_one_process_would(tmp_path, flowers):
    flowers.append(flower := with_nodes(Flower(tmp_path)))
    flower.run()
    summary = flower.finish()
    assert (summary["status"], summary["rounds"], summary["clients"]) == ("done", 3, 3)
    assert all(r["not_private"] == {"computed": 3, "sent": 3, "left_out": 0, "missed": 0} for r in flower.records())
    torch.testing.assert_close(flower.model(), flower.in_process(), rtol=1e-6, atol=1e-12)
    for name in NAMES:  # each heard that the training is over
        assert flower.processes[f"gateway-{name}"].wait(timeout=30) == 0, flower.said(f"gateway-{name}")


def test_stock_processes_carry_the_stages_of_secure_aggregation(tmp_path, flowers):
    """With three clients, and so with none to spare."""
    privacy = SECURE.format(trust="secagg") + "min_survivors = 3\n"
    flowers.append(flower := with_nodes(Flower(tmp_path, privacy=privacy)))
    flower.run()
    summary = flower.finish()
    assert (summary["status"], summary["rounds"], summary["trust"]) == ("done", 3, "secagg")
    assert [r["not_private"]["sent"] for r in flower.records()] == [3] * 3


def test_a_supernode_that_is_killed_is_missed_and_comes_back(tmp_path, flowers):
    """Its gateway stays: the memory is with the owner. Every message that left is paid for."""
    flowers.append(
        flower := with_nodes(Flower(tmp_path, rounds=200, deadline=8.0, privacy=SECURE.format(trust="local")))
    )
    flower.run()
    until(lambda: len(flower.records()) >= 2, 120.0)
    flower.kill("node-south")
    until(lambda: flower.records()[-1]["not_private"]["missed"] == 1, 120.0)
    assert flower.processes["gateway-south"].poll() is None

    def back() -> bool:
        """A SuperLink refuses a node that it has not noticed to be gone: whoever starts it tries again."""
        if "node-south" not in flower.processes or flower.processes["node-south"].poll() is not None:
            time.sleep(5)
            flower.supernode("south")
        return flower.records()[-1]["not_private"]["missed"] == 0

    until(back, 240.0)
    last = len(flower.records())
    flower.kill("superlink")  # and with it the run
    assert read_ledger(flower.fed / "run" / "ledger.jsonl").rounds >= last
    for name in NAMES:
        answered = [r for r in flower.records()[:last] if name != "south" or r["not_private"]["missed"] == 0]
        (counted,) = json.loads((flower.fed / "clients" / name / "releases.json").read_text()).values()
        assert counted["releases"] >= len(answered) > 2


def test_a_run_cannot_change_privacy(tmp_path, flowers):
    flowers.append(flower := with_nodes(Flower(tmp_path, privacy=SECURE.format(trust="local"))))
    flower.run("-c", "privacy.epsilon=99.0")
    shown = until(lambda: (found := flower.flwr("list", "here", "--format", "json")) and "finished:" in found and found)
    assert "finished:failed" in shown
    told = flower.flwr("log", re.search(r'"run-id": "(\d+)"', shown)[1], "here", "--show")
    assert "privacy.epsilon is 50.0 in federation.toml, and 99.0 in this run" in " ".join(told.split())
    assert not (flower.fed / "run").exists()
    assert not list((flower.fed / "clients").glob("*/releases.json"))


def test_a_simulation_by_flower_trains_what_one_process_would(tmp_path, flowers):
    flowers.append(flower := Flower(tmp_path))
    for name in NAMES:
        (flower.folder / f"{name}.npz").rename(flower.fed / "clients" / name / "data.npz")
    flower.superlink("--insecure", "--simulation")
    flower.run("--federation-config", "num-supernodes=3 client-resources-num-cpus=1")
    assert flower.finish()["rounds"] == 3
    torch.testing.assert_close(flower.model(), flower.in_process(), rtol=1e-6, atol=1e-12)
