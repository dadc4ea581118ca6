"""A federation under attack: by people without a key, by clients with one, by clocks, full disks and a lack of file
handles. Each time the training goes on, with the bits that it would have had. `make attack-federation` runs this."""

import contextlib
import json
import logging
import os
import random
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from deployed import NAMES, SECURE, SEEDED, Federation, deploying, text
from federated import DIM
from hostile import HOSTILE, NO_ANSWER
from processes import until
from wired import Asking, ByHand, Running, running

from fednormec.data import Examples
from fednormec.federation import https, keys, transport
from fednormec.federation.agreement import for_client, read_federation
from fednormec.federation.client import client_of
from fednormec.federation.messages import read_reply, reply_bytes
from fednormec.federation.node import Server, Taking, take_part
from fednormec.privacy.ledger import read_ledger

REQUESTS, ANSWERS_OF_A_KIND = 3_000, 8
STATUSES = {200, 204, 400, 401, 404, 409, 410, 413, 423, 431}
PIECES = [b"\r\n", b"\r\n\r\n", b"\n", b":", b" ", b"\x00", b"\xff", b"%00", b"HTTP/1.1", b"POST ", b"GET ", b"{", b"[",
          b"null", b"1e999", b"content-length: 7\r\n", b"transfer-encoding: chunked\r\n", b"session: \r\n", b"/../",
          b"upgrade: h2c\r\n", b"expect: 100-continue\r\n", b"host: \r\n", b"-1", b"x" * 5_000]  # fmt: skip


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Federation]]:
    with deploying(tmp_path) as make:
        yield make


@pytest.fixture(autouse=True)
def _many_handles() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def memory(process: subprocess.Popen[str]) -> int:
    """Bytes that a process has in memory."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def undisturbed(federation: Federation) -> None:
    """The model is the one that the same training gives in one process, to the bit."""
    assert torch.equal(federation.model(), federation.without_a_network())


def nobody_missed(federation: Federation) -> None:
    assert {record["not_private"]["missed"] for record in federation.records()} == {0}
    assert {record["not_private"]["sent"] for record in federation.records()} == {3}


def without_a_key() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def secured(federation: Federation, context: ssl.SSLContext) -> ssl.SSLSocket:
    plain = socket.create_connection(("127.0.0.1", federation.port), 20)
    try:
        return context.wrap_socket(plain, server_hostname="localhost")
    except OSError:
        plain.close()
        raise


# with a key: requests of any content


class Honest:
    """Three clients that train for as long as somebody else attacks."""

    def __init__(self, found: Running) -> None:
        self.rounds, self._found, self._stop = 0, found, threading.Event()
        for client in range(3):
            found.join(client)
        until(lambda: found.link.here() == {0, 1, 2})
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        while not self._stop.is_set():
            bodies = {client: self._found.request(self.rounds + 1, self.rounds) for client in range(3)}
            answers = self._found.link.ask(bodies, 60.0)
            assert all(read_reply(answers[client], DIM, torch.float64).message is not None for client in range(3))
            self.rounds += 1

    def end(self) -> None:
        self._stop.set()
        self._thread.join(60)


def mangled(request: bytes, rng: random.Random) -> bytes:
    """With something put in, written over, taken out or doubled, or cut off."""
    for _ in range(rng.choice([0, 1, 1, 2, 5])):
        at, piece = rng.randrange(len(request) + 1), rng.choice([*PIECES, rng.randbytes(4)])
        head, tail = request[:at], request[at:]
        request = rng.choice([head + piece + tail, head + piece + tail[len(piece) :], head + tail[rng.randint(1, 30) :],
                              head, head + request])  # fmt: skip
    return request


def test_three_thousand_requests_of_any_content(tmp_path, monkeypatch, caplog):
    """With the key of a client, each on a connection of its own. The limits on a client's requests are lifted, so that
    each is read."""
    for module, names in ((https, ("NEW", "BURST")), (transport, ("CALLS", "BURST"))):
        for name in names:
            monkeypatch.setattr(module, name, 1e9)
    monkeypatch.setattr(transport, "POLL", 0.05)
    seed = 0 if os.environ.get("HYPOTHESIS_PROFILE") == "repeatable" else random.randrange(10**9)
    rng, statuses, ended = random.Random(seed), dict[int, int](), 0
    with running(tmp_path) as found, caplog.at_level(logging.ERROR):
        honest = Honest(found)
        attacker = ByHand(found, 3)
        attacker.connection.close()
        handles = len(os.listdir("/proc/self/fd"))
        terms = {"instance": "i", "agreed": found.server.agreed, "terms": found.server.terms}
        bodies = {"/join": json.dumps(terms).encode(), "/check": json.dumps(terms).encode(), "/next": b"",
                  "/answer": bytes(200), "/leave": b"", "/": b"{}"}  # fmt: skip
        for number in range(REQUESTS):
            if number % 20 == 0:  # some of them were taken: it has left, or joined anew
                attacker.session = json.loads(attacker.join()[1])["session"]
                attacker.connection.close()
            path = rng.choice(list(bodies))
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nsession: {attacker.session}\r\nrequest: {'0' * 32}\r\n"
            content = bodies[path]
            whole = f"{head}content-length: {len(content)}\r\n\r\n".encode() + content
            status = asked(found, mangled(whole, rng), finish=number % 10 > 0)
            statuses[status] = statuses.get(status, 0) + 1
            ended += status == 0
        rounds = honest.rounds
        until(lambda: len(os.listdir("/proc/self/fd")) <= handles + 2)
        assert attacker.join()[0] == 200
        asking = Asking(found, {3: found.request(1)})
        attacker.session = json.loads(attacker.join()[1])["session"]
        attacker.fetch()
        assert attacker.post("/answer", b"x", request=attacker.name)[0] == 200
        assert asking.ended() == {3: b"x"}
        honest.end()
    assert set(statuses) <= STATUSES | {0}, f"seed {seed}"
    assert statuses[200] > 50 and statuses[400] > 20 and ended < 0.7 * REQUESTS
    assert rounds > 100
    assert not caplog.records, caplog.text
    print(f"{REQUESTS} requests, seed {seed}: {dict(sorted(statuses.items()))}; {rounds} rounds meanwhile")


def asked(found: Running, content: bytes, finish: bool) -> int:
    """Sends bytes with the key of the fourth client; the status of what comes back, 0 if nothing does."""
    try:
        with (
            socket.create_connection(("127.0.0.1", found.port), 20) as plain,
            found.secured(3).wrap_socket(plain, server_hostname="localhost") as one,
        ):
            one.sendall(content)
            if finish:
                socket.socket.shutdown(one, socket.SHUT_WR)  # without a goodbye of TLS: a link that breaks
            one.settimeout(5.0 if finish else 0.15)
            line = one.recv(100)
            return int(line.split(b" ")[1]) if line.startswith(b"HTTP/1.1 ") else 0
    except (TimeoutError, OSError):
        return 0


# with a key: answers of every bad kind


def kinds() -> list[Callable[[bytes], bytes]]:
    def of_reply(change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
        return lambda honest: reply_bytes(change(read_reply(honest, DIM, torch.float64)))

    return [*map(of_reply, HOSTILE.values()), *NO_ANSWER.values(), lambda honest: honest * 100]


def test_malicious_answers_leave_no_trace(made):
    """Eight of each of 33 kinds, over TLS, from a client that is otherwise honest: the model is that without it."""
    every = kinds()
    rounds = ANSWERS_OF_A_KIND * (len(every) + 7)  # what is too long never arrives, and costs it a few rounds
    attacked = made(text(rounds=rounds, deadline=3.0), "a")
    server, honest = attacked.serve(), [attacked.join(name) for name in NAMES[:2]]
    home, given = attacked.fed / "clients" / "east", list[int]()
    mine = for_client(read_federation(home), "east", Examples(*attacked.data[2]), home)
    right, stopped = client_of(mine, 2, home, lambda said: None), threading.Event()

    def answer(data: bytes) -> bytes:
        given.append(len(given) % len(every))
        return every[given[-1]](right(data))

    taking = Taking(mine.agreed, mine.terms, answer, 10**6, stopped.is_set, lambda said: None)
    peer = Server(f"localhost:{attacked.port}", keys.for_joining(home))
    attacker = threading.Thread(target=take_part, args=(peer, taking), daemon=True)
    attacker.start()
    summary = attacked.finish(server, honest)
    stopped.set()
    attacker.join(30)
    assert {r["not_private"]["sent"] for r in attacked.records()} == {2}
    assert summary["left_out"] + sum(r["not_private"]["missed"] for r in attacked.records()) == rounds
    assert summary["left_out"] >= ANSWERS_OF_A_KIND * (len(every) - 1)
    assert len(given) >= ANSWERS_OF_A_KIND * len(every)
    without = made(text(rounds=rounds, deadline=3.0), "b")
    without.finish(without.serve("--wait-for", "2"), [without.join(name) for name in NAMES[:2]])
    assert torch.equal(attacked.model(), without.model())
    print(f"{len(given)} answers of {len(every)} kinds in {rounds} rounds")


def test_what_nobody_asked_for_is_not_stored(made):
    """A client sends answers to nothing, and chains of nested objects, as fast as it can, for ten seconds."""
    federation = made(text(rounds=100_000))
    server, *_ = federation.serve("--wait-for", "2"), *(federation.join(name) for name in NAMES[:2])
    federation.until(30)
    pace = rounds_in(federation, 5.0)
    before, sent, end = memory(server), 0, time.monotonic() + 10.0
    context = keys.for_joining(federation.fed / "clients" / "east")
    nested = b'{"instance": ' + b'{"a":' * 1350 + b"1" + b"}" * 1351
    bodies = [("/answer", bytes(100_000)), ("/join", nested), ("/check", b"[" * 500_000)]
    meanwhile = len(federation.records())
    while time.monotonic() < end:
        path, body = bodies[sent % 3]
        with contextlib.suppress(OSError), secured(federation, context) as one:
            one.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
            one.recv(100)
        sent += 1
    during = len(federation.records()) - meanwhile
    after = rounds_in(federation, 5.0)
    assert sent > 100
    assert server.poll() is None
    assert memory(server) < before + 30_000_000
    assert during > 20
    assert after > 0.5 * pace  # 0.4 for good is what it was
    print(f"{sent} requests: {during / 10:.1f} rounds/s meanwhile, {pace / 5:.1f} before and {after / 5:.1f} after; "
          f"memory {before / 1e6:.0f} → {memory(server) / 1e6:.0f} MB")  # fmt: skip


def rounds_in(federation: Federation, seconds: float) -> int:
    before = len(federation.records())
    time.sleep(seconds)
    return len(federation.records()) - before


# without a key


def endless_header(one: socket.socket) -> None:
    one.sendall(b"POST /join HTTP/1.1\r\nhost: x\r\nx: ")
    for _ in range(100):
        one.sendall(b"x" * 10**6)


def long_body(one: socket.socket) -> None:
    one.sendall(b"POST /answer HTTP/1.1\r\nhost: x\r\ncontent-length: 31000000\r\n\r\n")
    for _ in range(31):
        one.sendall(bytes(10**6))


@pytest.mark.parametrize("attack", [endless_header, long_body])
@pytest.mark.parametrize("who", ["plain", "without a key", "with a key"])
def test_whatever_is_too_long_costs_next_to_nothing(made, attack, who):
    """100 MB of one header; 31 MB of a body: nobody reads them, with or without a key."""
    federation = made(text(rounds=100_000))
    server, *_ = federation.serve("--wait-for", "2"), *(federation.join(name) for name in NAMES[:2])
    federation.until(10)
    before, key = memory(server), federation.fed / "clients" / "east"
    for _ in range(3):
        with contextlib.suppress(OSError):
            if who == "plain":
                with socket.create_connection(("127.0.0.1", federation.port), 20) as one:
                    attack(one)
            else:
                with secured(federation, keys.for_joining(key) if who == "with a key" else without_a_key()) as one:
                    attack(one)
        federation.until(len(federation.records()) + 5)
    assert memory(server) < before + 20_000_000


def test_bodies_without_their_last_byte_are_not_waited_for(made):
    """A hundred connections with a key, each with all of an answer but the end of it: four may stay, for a while."""
    federation = made(text(rounds=100_000))
    server, *_ = federation.serve("--wait-for", "2"), *(federation.join(name) for name in NAMES[:2])
    federation.until(10)
    before, context = memory(server), keys.for_joining(federation.fed / "clients" / "east")
    with contextlib.ExitStack() as stack:
        for number in range(100):
            with contextlib.suppress(OSError):
                one = stack.enter_context(secured(federation, context if number % 2 else without_a_key()))
                one.sendall(b"POST /check HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" + bytes(999_999))
        federation.until(len(federation.records()) + 30)
        assert memory(server) < before + 30_000_000
    assert server.poll() is None


# file handles, disks


def test_without_file_handles_checkpoints_are_written_and_a_kill_costs_nothing(made):
    """1,300 idle connections at 1,024 handles, then a kill: nobody is set aside, and no round is lost."""
    federation = made(text(SECURE.format(trust="local"), rounds=1_500))
    few = ("prlimit", "--nofile=1024:1024")
    server = federation.serve(before=few)
    clients = [federation.join(name) for name in NAMES]
    federation.until(5)
    with contextlib.ExitStack() as stack:
        for _ in range(1_300):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection(("127.0.0.1", federation.port), 20))
        federation.until(len(federation.records()) + 20)
        server.kill()
        server.wait()
        done = len(federation.records())
        newest = max(int(path.stem.partition("-")[2]) for path in (federation.fed / "run").glob("checkpoint-*"))
        assert newest >= done - 1
        assert server.stderr is not None and "cannot be written" not in server.stderr.read()
    summary = federation.finish(federation.serve(before=few), clients)
    assert "set aside" not in summary["err"]
    nobody_missed(federation)
    assert read_ledger(federation.fed / "run" / "ledger.jsonl").rounds <= 1_501  # the killed round, at most, paid twice


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    if shutil.which("mount") is None or subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(path)], capture_output=True
    ).returncode:  # fmt: skip
        pytest.skip("no file system can be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk: Path) -> None:
    """Leaves no room on a disk."""
    with (disk / "other").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_client_whose_disk_is_full_stops_and_goes_on_with_room_again(made, small_disk):
    """It sends nothing that it could not keep; the others wait for it, and the bits are those without the fault."""
    federation = made(text(SEEDED.format(trust="local"), rounds=40))
    shutil.copytree(federation.fed / "clients" / "north", small_disk / "north")
    server = federation.serve()
    clients = [federation.join("north", str(small_disk / "north")), *(federation.join(name) for name in NAMES[1:])]
    federation.until(10)
    fill(small_disk)
    _, err = clients[0].communicate(timeout=60)
    assert clients[0].returncode == 2
    assert err.splitlines()[-1].startswith("fednormec: ")
    assert err.splitlines()[-1].endswith("cannot be written: No space left on device.")
    assert "Traceback" not in err
    assert server.poll() is None
    (small_disk / "other").unlink()
    clients[0] = federation.join("north", str(small_disk / "north"))
    federation.finish(server, clients)
    assert len(federation.records()) == 40
    twin = made(text(SEEDED.format(trust="local"), rounds=40), "twin")
    twin.finish(twin.serve(), [twin.join(name) for name in NAMES])
    if {record["not_private"]["missed"] for record in federation.records()} == {0}:
        assert torch.equal(federation.model(), twin.model())


def test_a_server_whose_disk_is_full_asks_nobody_and_goes_on_with_room_again(made, small_disk):
    """It says so, pays for no round that it cannot keep, and needs no restart."""
    federation = made(text(SECURE.format(trust="local"), rounds=40))
    shutil.copytree(federation.fed / "clients", federation.folder / "homes")
    shutil.move(federation.fed, small_disk / "fed")
    federation.fed.symlink_to(small_disk / "fed")
    server = federation.serve("--log-file", "server.log")
    clients = [federation.join(name, f"homes/{name}") for name in NAMES]
    federation.until(5)
    fill(small_disk)
    log = federation.folder / "server.log"
    until(lambda: "No client is asked before it is" in log.read_text())
    assert "cannot be written: No space left on device" in log.read_text()
    done = len(federation.records())
    time.sleep(3)
    assert len(federation.records()) <= done + 1
    (small_disk / "other").unlink()
    summary = federation.finish(server, clients)
    assert "Traceback" not in summary["err"] and "set aside" not in summary["err"]
    nobody_missed(federation)
    assert [record["round"] for record in federation.records()] == list(range(1, 41))
    assert read_ledger(federation.fed / "run" / "ledger.jsonl").rounds == 40


# time

CLOCK = """
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(void) {  /* in seconds, from a file */
  long seconds = 0;
  FILE *file = fopen(getenv("CLOCK"), "r");
  if (file) {
    if (fscanf(file, "%ld", &seconds) != 1) seconds = 0;
    fclose(file);
  }
  return seconds;
}

int clock_gettime(clockid_t which, struct timespec *now) {
  int failed = syscall(SYS_clock_gettime, which, now);
  if (which == CLOCK_REALTIME) now->tv_sec += shift();
  return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
  int failed = syscall(SYS_gettimeofday, now, zone);
  now->tv_sec += shift();
  return failed;
}

time_t time(time_t *there) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (there) *there = now.tv_sec;
  return now.tv_sec;
}
"""


def test_a_server_that_stood_still_for_75_seconds_goes_on(made):
    """Every round that was paid for is one in which everybody was asked."""
    federation = made(text(SECURE.format(trust="local"), rounds=60))
    server = federation.serve()
    clients = [federation.join(name) for name in NAMES]
    federation.until(10)
    server.send_signal(signal.SIGSTOP)
    time.sleep(75)
    server.send_signal(signal.SIGCONT)
    federation.finish(server, clients)
    nobody_missed(federation)
    assert read_ledger(federation.fed / "run" / "ledger.jsonl").rounds == 60 == len(federation.records())


def test_wall_clocks_decide_nothing(made, tmp_path):
    """A client's that is 7 s ahead, one that steps by 10 s, the server's that goes on by 70 s and back by 30 s."""
    if shutil.which("cc") is None:
        pytest.skip("there is no compiler here")
    (tmp_path / "clock.c").write_text(CLOCK)
    library = tmp_path / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "clock.c"], check=True)
    clocks = {name: tmp_path / f"clock-{name}" for name in ("server", *NAMES)}

    def at(name: str) -> dict[str, Any]:
        return {"settings": {"LD_PRELOAD": str(library), "CLOCK": str(clocks[name])}}

    for name, shift in (("server", "+0"), ("north", "+0"), ("south", "+7"), ("east", "+0")):
        clocks[name].write_text(shift)
    federation = made(text(rounds=600))
    server = federation.serve("--log-file", "server.log", **at("server"))
    clients = [federation.join(name, **at(name)) for name in NAMES]
    for rounds, name, shift in (
        (100, "north", "+10"),
        (200, "server", "+70"),
        (300, "server", "-30"),
        (400, "east", "-10"),
    ):
        federation.until(rounds)
        clocks[name].write_text(shift)
    federation.finish(server, clients)
    nobody_missed(federation)
    undisturbed(federation)
    times = [datetime.fromisoformat(line.split()[0]) for line in (tmp_path / "server.log").read_text().splitlines()]
    assert times[-1] < times[0]  # the clock was moved indeed


# keys


def test_a_copied_folder_is_told_with_both_addresses_and_the_first_stays(made, tmp_path):
    federation = made(text(rounds=2_000))
    server = federation.serve("--log-file", "server.log")
    clients = [federation.join(name) for name in NAMES]
    federation.until(5)
    shutil.copytree(federation.fed / "clients" / "north", tmp_path / "stolen" / "north")
    copy = federation.join("north", "stolen/north")
    until(lambda: "two processes take part as north" in (tmp_path / "server.log").read_text())
    federation.finish(server, clients)
    nobody_missed(federation)
    undisturbed(federation)
    copy.send_signal(signal.SIGINT)
    _, err = copy.communicate(timeout=60)
    said = "two processes take part as north, one from 127.0.0.1, one from 127.0.0.1: the second waits"
    assert said in err
    assert (tmp_path / "server.log").read_text().count(said) == 1


def test_an_expired_certificate_of_the_servers_is_said_at_once(made):
    federation = made(text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "VALID", -keys.LEEWAY / 2)
        keys.make_server(federation.fed, ["localhost"])
    server = federation.serve()
    _, err = server.communicate(timeout=60)
    assert server.returncode == 2
    assert "the server's certificate" in err and "expired" in err and "fednormec federation renew" in err
