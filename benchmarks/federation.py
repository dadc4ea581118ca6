"""A federation under load and under faults: real `serve` processes, on loopback or on hosts of their own.

    make bench-federation                                     all of it; root and iproute2 for the parts with hosts
    python benchmarks/federation.py [load many long faults kills hostile]
    python benchmarks/federation.py --write                   only the table of the page, from what is stored

load: 500 clients with 10,000 parameters. many: 2,000 of them. long: 500 for 1,000 rounds, does memory grow?
faults: 300 ms and 5 % loss; links cut for 10 and 60 seconds. kills: 50 kills on both sides. hostile: what people
without a certificate can do. The clients of load, many and long are threads of one process that answer at once, so that
a round's time is the server's and the wire's. Runs with faults must end with the bits of an undisturbed one.
"""

import argparse
import json
import os
import random
import resource
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from links import Hosts
from turns import HERE, store, write_between

from fednormec.config.schema import dump
from fednormec.data import Examples
from fednormec.federation import keys
from fednormec.federation.agreement import for_client, read_federation
from fednormec.federation.client import longest_request
from fednormec.federation.messages import Reply, read_request, reply_bytes
from fednormec.federation.node import Server, Taking, take_part
from fednormec.federation.provision import make

PAGE = HERE.parent / "docs" / "reliability.md"
RESULTS = HERE / "results" / "federation.json"
PARTS = ("load", "many", "long", "faults", "kills", "hostile")
INPUTS, CLASSES = 999, 10  # a linear model of 10,000 parameters
SEEDED = {"noise_std": 1.0, "trust": "local"}  # not private: the runs must be repeatable
ATTACKS = ("200 idle, 200 half-sent", "10,000 without a certificate")
COMMAND = [sys.executable, "-m", "fednormec", "federation"]


class Federation:
    """Folder of a federation, its server as a process, and its clients."""

    def __init__(
        self, folder: Path, names: Sequence[str], inputs: int, rounds: int, address: str, classes: int,
        privacy: dict[str, Any] = SEEDED,
    ) -> None:  # fmt: skip
        self.folder, self.names, self.fed = folder, names, folder / "fed"
        self._about = (inputs, rounds, classes)
        asked = {
            "model": {"name": "linear"},
            "local": {"name": "gd", "step": 0.5},
            "method": {"name": "fed_normec", "beta": 0.3, "server_step": 0.5, "server_normalization": False},
            "participation": {"name": "full"},
            "privacy": privacy,
            "run": {"rounds": rounds, "seed": 3, "dtype": "float32" if inputs == INPUTS else "float64"},
            "federation": {"deadline": 600.0},
        }
        (folder / "asked.toml").write_text(dump(asked))
        make(self.fed, names, [inputs], classes, address, folder / "asked.toml")
        rng = np.random.default_rng(0)
        self.data = [(rng.standard_normal((8, inputs)), rng.integers(0, classes, 8)) for _ in names[:10]]
        for name, (x, y) in zip(names, self.data, strict=False):
            np.savez(folder / f"{name}.npz", x=x, y=y)

    def serve(self, *words: str, on: Callable[[list[str]], list[str]] = list) -> "subprocess.Popen[bytes]":
        command = [*COMMAND, "serve", str(self.fed), "--quiet", "--not-private", *words]
        return subprocess.Popen(on(command), cwd=self.folder, stdout=subprocess.DEVNULL, stderr=self._log("serve"))

    def join(self, name: str, on: Callable[[list[str]], list[str]] = list) -> "subprocess.Popen[bytes]":
        command = [*COMMAND, "join", str(self.fed / "clients" / name), "--data", f"{name}.npz", "--not-private"]
        return subprocess.Popen(on(command), cwd=self.folder, stdout=subprocess.DEVNULL, stderr=self._log(name))

    def rounds(self) -> int:
        path = self.fed / "run" / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def missed(self) -> int:
        """Number of requests in all rounds that a client left without an answer."""
        lines = (self.fed / "run" / "metrics.jsonl").read_text().splitlines()
        return sum(json.loads(line)["not_private"]["missed"] for line in lines)

    def until(self, rounds: int, seconds: float) -> float:
        """Waits for so many rounds; the time when they were done."""
        end = time.monotonic() + seconds
        while self.rounds() < rounds:
            if time.monotonic() > end:
                sys.exit(f"only {self.rounds()} of {rounds} rounds after {seconds:.0f} s; see {self.folder}")
            time.sleep(0.02)
        return time.monotonic()

    def same_bits(self) -> bool:
        """Whether the trained model has the bits of one that nobody disturbed: the same federation, on loopback."""
        with tempfile.TemporaryDirectory() as folder:
            twin = Federation(Path(folder), self.names, *self._about[:2], f"localhost:{free_port()}", self._about[2])
            processes = [twin.serve(), *(twin.join(name) for name in twin.names)]
            with ended(*processes):
                assert [process.wait(900) for process in processes] == [0] * len(processes)
            models = [one.fed / "run" / "model.safetensors" for one in (self, twin)]
            return models[0].read_bytes() == models[1].read_bytes()

    def _log(self, name: str) -> Any:
        return open(self.folder / f"{name}.log", "ab")


def named(number: int) -> list[str]:
    return [f"client-{i}" for i in range(number)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def memory(process: int, what: str = "VmRSS") -> int:
    """Bytes of memory that a process has."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


def busy(process: int) -> float:
    """Seconds of processor time that a process has had."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def ended(*processes: "subprocess.Popen[bytes]") -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


# many clients in one process


def light_clients(fed: Path, number: int) -> None:
    """The process of all clients: each is a thread that answers every request at once with a vector of length 1."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.stack_size(2**19)
    config, nobody = read_federation(fed), Examples(np.zeros((1, INPUTS)), np.zeros(1, np.int64))
    mine = for_client(config, "client-0", nobody, fed / "clients" / "client-0")
    like = mine.experiment.problem.init(np.random.default_rng(0))
    message, most = torch.ones_like(like) / len(like) ** 0.5 * 0.99, longest_request(mine) * 2

    def answer(data: bytes) -> bytes:
        request = read_request(data, len(like), 0, like.dtype)
        return reply_bytes(Reply(request.round, request.nonce, message=message))

    def work(client: int) -> None:
        secured = keys.for_joining(fed / "clients" / f"client-{client}")
        server = Server(mine.settings.address, secured)
        take_part(server, Taking(mine.agreed, mine.terms, answer, most, lambda: False, lambda said: None))

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(number)]
    for thread in threads:
        thread.start()
        time.sleep(0.005)
    for thread in threads:
        thread.join()


def load(number: int, rounds: int) -> dict[str, Any]:
    """Seconds and processor seconds of a round, and the server's memory, with so many clients."""
    with tempfile.TemporaryDirectory() as folder:
        found = Federation(Path(folder), named(number), INPUTS, rounds, f"localhost:{free_port()}", CLASSES)
        server = found.serve()
        clients = subprocess.Popen([sys.executable, __file__, "--clients", str(found.fed), str(number)])
        with ended(server, clients):
            begun = time.monotonic()
            first = found.until(3, 600)
            cpu, theirs = busy(server.pid), busy(clients.pid)
            held = {3: memory(server.pid)}
            for mark in sorted({max(4, min(rounds - 1, rounds * tenth // 10)) for tenth in range(1, 11)}):
                last = found.until(mark, 3600)
                held[mark] = memory(server.pid)
            spent, others = busy(server.pid) - cpu, busy(clients.pid) - theirs
            peak = memory(server.pid, "VmHWM")
            assert server.wait(120) == 0
            assert clients.wait(120) == 0
        per = rounds - 4
        parameters = (INPUTS + 1) * CLASSES
        return {
            "clients": number,
            "parameters": parameters,
            "rounds": rounds,
            "until_the_third_round": first - begun,
            "seconds_a_round": (last - first) / per,
            "server_cpu_seconds_a_round": spent / per,
            "clients_cpu_seconds_a_round": others / per,
            "server_bytes_after_round": held,
            "server_peak_bytes": peak,
            "allowed_bytes": 2 * number * parameters * 4 + 500_000_000,
        }


# hosts of their own, and what goes wrong between them


def starting(found: Federation, hosts: Hosts) -> list[Callable[[], "subprocess.Popen[bytes]"]]:
    """What starts the server and each client, each on a host of its own."""
    return [
        partial(found.serve, on=partial(hosts.run, 0)),
        *(partial(found.join, name, on=partial(hosts.run, i + 1)) for i, name in enumerate(found.names)),
    ]


def faults() -> dict[str, Any]:
    """Slow and lossy links, then links that are cut for 10 and for 60 seconds; the bits of each run."""
    result: dict[str, Any] = {}
    for name, rounds in (("slow", 20), ("cut", 400)):
        with Hosts(4) as hosts, tempfile.TemporaryDirectory() as folder:
            found = Federation(Path(folder), named(3), 5, rounds, f"{hosts.address(0)}:9443", 3)
            server, *clients = (start() for start in starting(found, hosts))
            with ended(server, *clients):
                begun = found.until(1, 120)
                if name == "slow":
                    hosts.delay, hosts.loss = 0.3, 0.05
                else:
                    for at, host, seconds in ((50, 1, 10), (100, 0, 60), (200, 2, 60)):
                        found.until(at, 300)
                        hosts.cut = {host}
                        time.sleep(seconds)
                        hosts.cut = set()
                last = found.until(rounds, 600)
                assert [process.wait(180) for process in (server, *clients)] == [0] * 4
            result[name] = {
                "rounds": rounds,
                "seconds_a_round": (last - begun) / (rounds - 1),
                "missed": found.missed(),
                "packets_lost": hosts.lost,
                "packets": hosts.carried,
                "same_bits": found.same_bits(),
            }
            print(name, result[name], file=sys.stderr)
    return result


def kills(number: int = 50, seed: int = 0) -> dict[str, Any]:
    """So many kills (SIGKILL), of the server or of a client, each started again; the bits of the run."""
    rng = random.Random(seed)
    with Hosts(4) as hosts, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        found = Federation(Path(folder), named(3), 5, 30 * number, f"{hosts.address(0)}:9443", 3)
        starts = starting(found, hosts)
        processes = [start() for start in starts]
        killed = [0, 0, 0, 0]
        stack.callback(lambda: [process.kill() for process in processes if process.poll() is None])
        found.until(5, 120)
        begun, before = time.monotonic(), 5
        while sum(killed) < number and processes[0].poll() is None:
            found.until(before + rng.randrange(1, 12), 120)
            time.sleep(rng.random() / 5)
            which, before = rng.randrange(4), found.rounds()
            if processes[which].poll() is not None:
                break
            processes[which].send_signal(signal.SIGKILL)
            processes[which].wait()
            processes[which] = starts[which]()
            killed[which] += 1
        assert [process.wait(900) for process in processes] == [0] * 4
        return {
            "kills_of_the_server": killed[0],
            "kills_of_clients": sum(killed[1:]),
            "rounds": found.rounds(),
            "missed": found.missed(),
            "seconds": time.monotonic() - begun,
            "same_bits": found.same_bits(),
        }


# people without a certificate


def hostile() -> dict[str, Any]:
    """The pace of a training before and while strangers hold idle connections, send halves and ask without a key."""
    with tempfile.TemporaryDirectory() as folder:
        found = Federation(Path(folder), named(3), 64, 100_000, f"localhost:{free_port()}", 10)
        port = int(read_federation(found.fed)["federation"]["address"].rpartition(":")[2])
        server, *clients = found.serve(), *(found.join(name) for name in found.names)
        result: dict[str, Any] = {}
        with ended(server, *clients):
            found.until(20, 120)
            result["before"] = _pace(found, server.pid, 20)
            with ExitStack() as stack:
                for i in range(400):
                    one = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
                    if i >= 200:  # half of what a handshake begins with
                        one.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc")
                result[ATTACKS[0]] = _pace(found, server.pid, 20)
            asked = threading.Thread(target=_ask_without_a_key, args=(port, 10_000))
            asked.start()
            result[ATTACKS[1]] = _pace(found, server.pid, 20, asked)
            result["after"] = _pace(found, server.pid, 20)
        return result


def _pace(found: Federation, process: int, seconds: float, during: threading.Thread | None = None) -> dict[str, Any]:
    begun, rounds = time.monotonic(), found.rounds()
    time.sleep(seconds)
    if during is not None:
        during.join(600)
    lasted = time.monotonic() - begun
    return {"rounds_a_second": (found.rounds() - rounds) / lasted, "seconds": lasted, "server_bytes": memory(process)}


def _ask_without_a_key(port: int, number: int) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for _ in range(number):
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", port), 10) as plain,
            context.wrap_socket(plain) as secured,
        ):
            secured.sendall(b"POST /join HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
            secured.recv(100)


# the page


def table(stored: dict[str, Any]) -> str:
    """Returns the rows of docs/reliability.md on what was measured."""
    slow, cut, kill, strangers = stored["faults"]["slow"], stored["faults"]["cut"], stored["kills"], stored["hostile"]
    before, idle, asking, after = strangers["before"], *(strangers[name] for name in ATTACKS), strangers["after"]
    rows = [
        *(_loaded(stored[part]) for part in ("load", "many", "long")),
        ("three clients on hosts of their own, 300 ms each way and 5 % of the packets lost",
         f"{slow['seconds_a_round']:.1f} s a round, {slow['packets_lost']} packets lost in {slow['rounds']} rounds; "
         f"{_bits(slow)}"),
        (f"a client's link cut for 10 s, the server's for 60 s, another client's for 60 s, in {cut['rounds']} rounds",
         f"{cut['missed']} requests missed; {_bits(cut)}"),
        (f"{kill['kills_of_the_server'] + kill['kills_of_clients']} kills (SIGKILL), {kill['kills_of_the_server']} of "
         f"the server and {kill['kills_of_clients']} of clients, on hosts of their own, in {kill['rounds']:,} rounds",
         f"{kill['seconds']:.0f} s; {kill['missed']} requests missed; {_bits(kill)}"),
        ("200 idle connections and 200 with half a handshake",
         f"{_rate(idle)}, {_rate(before)} before; {_megabytes(idle['server_bytes'])}"),
        (f"10,000 requests without a certificate, in {asking['seconds']:.0f} s",
         f"{_rate(asking)} meanwhile, {_rate(after)} after; {_megabytes(asking['server_bytes'])}"),
    ]  # fmt: skip
    days = ", ".join(sorted({found["date"][:10] for found in stored.values()}))
    return "\n".join([f"| what | measured, {days} |", "|---|---|", *(f"| {what} | {found} |" for what, found in rows)])


def _loaded(found: dict[str, Any]) -> tuple[str, str]:
    held = {int(round): bytes for round, bytes in found["server_bytes_after_round"].items()}
    shown = [round for round in held if round in (3, found["rounds"] // 10, found["rounds"] // 2, max(held))]
    whole, mine, theirs = (found[f"{kind}seconds_a_round"] for kind in ("", "server_cpu_", "clients_cpu_"))
    grows = ", ".join(f"{_megabytes(held[round])} after round {round:,}" for round in shown)
    return (
        f"{found['clients']:,} clients, {found['rounds']:,} rounds",
        f"{whole:.2f} s a round, {mine:.2f} s of the server's processor time and {theirs:.2f} s of the clients'; the "
        f"server has {grows}, {_megabytes(found['server_peak_bytes'])} at the most; 2·M·d·4 bytes + 500 MB are "
        f"{_megabytes(found['allowed_bytes'])}",
    )


def _bits(found: dict[str, Any]) -> str:
    return "**the same bits** as undisturbed" if found["same_bits"] else "**other bits** than undisturbed"


def _rate(found: dict[str, Any]) -> str:
    return f"{found['rounds_a_second']:.1f} rounds/s"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--write", action="store_true", help="the page's table from what is stored, and stop")
    parser.add_argument("--clients", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.clients:
        light_clients(Path(asked.clients[0]), int(asked.clients[1]))
        return
    measured: dict[str, Callable[[], dict[str, Any]]] = {
        "load": lambda: load(500, 40),
        "many": lambda: load(2000, 10),
        "long": lambda: load(500, 1000),
        "faults": faults,
        "kills": kills,
        "hostile": hostile,
    }
    for part in () if asked.write else asked.parts or PARTS:
        result = measured[part]()
        print(json.dumps({part: result}, indent=1), flush=True)
        store("federation", {part: result})
    write_between(PAGE, table(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
