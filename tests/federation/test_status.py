"""What an operator sees of a training: a page, JSON, numbers for Prometheus, a table on a terminal, lines of a log."""

import hashlib
import html
import http.client
import io
import json
import re
import shutil
import subprocess
import threading
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Command, free_port, sentence
from processes import until

from fednormec.config.schema import dump
from fednormec.errors import UserError
from fednormec.federation.agreement import for_server, read_federation
from fednormec.federation.joining import Joining, join
from fednormec.federation.log import INFO, LINES, Log
from fednormec.federation.messages import LOST, REFUSED
from fednormec.federation.provision import make
from fednormec.federation.sessions import RUN, Serving, serve
from fednormec.federation.status import Board, ask, from_folder, showing, status_address, status_file
from fednormec.federation.status_forms import metrics, page, text
from fednormec.federation.transport import ClientStatus
from fednormec.files import to_json

NAMES, ROUNDS = ("north", "south", "west"), 4
PRIVATE = {"noise_std": 2.0, "delta": 1e-5, "trust": "local", "randomness": "secure"}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "</script><img src=x onerror=alert(1)>\"'&\x1b[2J\u202e\nfake"


def made(folder: Path, privacy: dict[str, Any] | None = PRIVATE) -> Path:
    """The folder of a small federation with a public test set, and its clients' data beside it."""
    rng = np.random.default_rng(0)
    for name in ("test", *NAMES):
        np.savez(folder / f"{name}.npz", x=rng.standard_normal((8, 5)), y=rng.integers(0, 3, 8))
    config = {
        "model": {"name": "linear"},
        "local": {"name": "gd", "step": 0.5},
        "method": {"name": "fed_normec", "beta": 0.3, "server_step": 0.5, "server_normalization": False},
        "run": {"rounds": ROUNDS, "evaluate_every": 1},
        "federation": {"test": "test.npz", "deadline": 60.0},
    } | ({} if privacy is None else {"privacy": privacy})
    (folder / "asked.toml").write_text(dump(config), encoding="utf-8")
    return make(folder / "fed", NAMES, [5], 3, f"localhost:{free_port()}", folder / "asked.toml")


class Links:
    """Connections that somebody made up."""

    sent, received = 3_000_000, 1_500_000

    def __init__(self, *clients: ClientStatus) -> None:
        self._clients = list(clients)

    def status(self) -> list[ClientStatus]:
        return self._clients


def board(folder: Path, *clients: ClientStatus, log: Log | None = None) -> Board:
    federation = for_server(read_federation(folder), folder)
    return Board(federation, folder / RUN, Links(*clients), log)  # type: ignore[arg-type]


HERE = ClientStatus("north", True, "10.0.0.5:4312", 1.5, 0, 0, "")
AWAY = ClientStatus("south", False, "10.0.0.6:4000", 7300.0, 2, 0, "")
NEVER = ClientStatus("west", False, "", None, 0, 3, HOSTILE)


def fetched(port: int, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, headers={"Host": host or f"localhost:{port}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), {k.lower(): v for k, v in answer.getheaders()}
    finally:
        connection.close()


class Running:
    """A server and two of its three clients in this process; it stops in its third round until it may go on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = made(folder), free_port()
        self.reached, self.may_go_on = threading.Event(), threading.Event()
        self.failed: list[BaseException] = []
        how = Serving(wait_for=2, quiet=True, status=f"127.0.0.1:{self.port}", log_file=folder / "serve.log")
        self.server = self._start(lambda: serve(self.folder, how, self._held))
        clients = [(self.folder / "clients" / name, str(folder / f"{name}.npz")) for name in NAMES[:2]]
        until(lambda: ask(self.folder / RUN))
        self.before = json.loads(fetched(self.port, "/status.json")[1])
        how_to = [
            (to, Joining(of, keep_model=folder / f"{to.name}.safetensors", log_file=folder / "join.log", log_json=True))
            for to, of in clients
        ]
        self.threads = [self._start(lambda to=to, how=how: join(to, how, lambda: False)) for to, how in how_to]

    def _start(self, work: Callable[[], object]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self.failed.append(error)
                raise

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread

    def _held(self) -> bool:
        records = self.folder / RUN / "metrics.jsonl"
        if records.exists() and records.read_bytes().count(b"\n") == 3:
            self.reached.set()
            assert self.may_go_on.wait(120)
        return False

    def end(self) -> None:
        self.may_go_on.set()
        for thread in (self.server, *self.threads):
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.long
def test_a_training_can_be_watched_from_its_first_client_to_its_end(tmp_path: Path, fednormec_: Command) -> None:
    running = Running(tmp_path)
    try:
        assert running.before["state"] == "waiting for clients"
        until(lambda: running.reached.is_set() or running.failed)
        assert not running.failed
        code, body, _ = fetched(running.port, "/status.json")
        found = json.loads(body)
        assert code == 200
        assert (found["state"], found["model"], found["method"]) == ("training", "linear", "Fed-alpha-NormEC")
        assert (found["rounds"]["done"], found["rounds"]["of"]) == (2, ROUNDS)
        assert found["rounds"]["per_second"] > 0
        assert found["privacy"]["private"] and found["privacy"]["delta"] == 1e-5
        ledger = [json.loads(line) for line in (running.folder / RUN / "ledger.jsonl").read_text().splitlines()]
        assert found["privacy"]["epsilon"] == ledger[2]["epsilon"]  # after the second round
        assert found["privacy"]["epsilon"] + found["privacy"]["epsilon_left"] == pytest.approx(
            found["privacy"]["epsilon_in_all"]
        )
        assert found["curve"]["figure"] == "test_accuracy"
        assert [number for number, _ in found["curve"]["points"]] == [1, 2]
        assert [(one["name"], one["here"]) for one in found["roster"]] == [
            ("north", True), ("south", True), ("west", False),
        ]  # fmt: skip
        said = [line["message"] for line in found["log"]]
        assert any(one.startswith("north has joined, from 127.0.0.1:") for one in said)

        code, body, headers = fetched(running.port, "/")
        assert code == 200 and "2 of 4" in body and "north" in body and "polyline" in body
        assert "default-src 'none'" in headers["content-security-policy"]
        code, body, headers = fetched(running.port, "/metrics")
        assert code == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "\nfednormec_rounds_total 2\n" in body and '\nfednormec_client_here{client="west"} 0\n' in body

        shown = fednormec_("federation", "status", running.folder)
        assert shown.code == 0 and "no server" not in shown.err
        assert "rounds     2 of 4" in shown.out and re.search(r"^north +here ", shown.out, re.M)
        assert json.loads(fednormec_("federation", "status", running.folder, "--json").out)["rounds"]["done"] == 2
        west = ("federation", "join", running.folder / "clients" / "west", "--data", tmp_path / "west.npz", "--check")
        checked = fednormec_(*west)
        assert checked.code == 0 and "ok    server       localhost:" in checked.out
        assert "would take this client; the clocks agree" in checked.out
        busy = fednormec_("federation", "serve", running.folder, "--check")
        assert busy.code == 2 and "wrong port         nothing can listen on 127.0.0.1:" in busy.out
    finally:
        running.end()
    assert not running.failed
    assert not status_file(running.folder / RUN).exists()

    trained = (running.folder / RUN / "model.safetensors").read_bytes()
    assert [(tmp_path / f"{name}.safetensors").read_bytes() for name in NAMES[:2]] == [trained, trained]

    lines = (tmp_path / "serve.log").read_text().splitlines()
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ (INFO|WARNING|ERROR) [^ ].*[^.]", line) for line in lines)
    assert any(re.search(r"INFO north has joined, from 127\.0\.0\.1:\d+$", line) for line in lines)
    assert lines[-1].endswith("INFO the training is over after 4 rounds (done)")
    joined = [json.loads(line) for line in (tmp_path / "join.log").read_text().splitlines()]
    assert all(set(line) == {"time", "level", "message"} for line in joined)
    said = [line["message"] for line in joined]
    assert f"connected to localhost:{read_port(running.folder)}" in said
    assert any(line.endswith(f"the trained model, sha256 {hashlib.sha256(trained).hexdigest()}") for line in said)
    assert not any("west" in line for line in lines)  # which only asked

    over = fednormec_("federation", "status", running.folder)
    assert "no server shows its status" in over.err
    assert "state      over: done" in over.out and "rounds     4 of 4" in over.out


def read_port(folder: Path) -> int:
    return int(read_federation(folder)["federation"]["address"].rpartition(":")[2])


def test_without_a_server_the_folder_says_what_it_knows(tmp_path: Path, fednormec_: Command) -> None:
    folder = made(tmp_path)
    shown = fednormec_("federation", "status", folder)
    assert shown.code == 0 and shown.err.count("\n") == 1
    assert "no server shows its status: none runs, or it was started without --status" in shown.err
    assert "state      not running" in shown.out and "rounds     0 of 4" in shown.out and "δ = 1e-05" in shown.out

    (folder / RUN).mkdir()
    lines = [{"round": n, "epsilon": n / 2, "delta": 1e-5, "test_accuracy": n / 4, "not_private": {}} for n in (1, 2)]
    (folder / RUN / "metrics.jsonl").write_text("".join(to_json(line) + "\n" for line in lines))
    (folder / RUN / "ledger.jsonl").write_text(
        '{"release": {}}\n{"round": 1, "epsilon": 0.5}\n{"round": 3, "epsilon": 1.5}\n'
    )
    found = from_folder(folder, folder / RUN)
    assert (found["rounds"]["done"], found["privacy"]["epsilon"]) == (2, 1.5)  # paid for, whatever came of it
    assert found["curve"] == {"figure": "test_accuracy", "points": [(1, 0.25), (2, 0.5)]}


def test_what_another_process_left_behind_is_not_taken_for_a_server(tmp_path: Path) -> None:
    folder, port = made(tmp_path), free_port()
    status_file(folder / RUN).write_text(to_json({"address": f"127.0.0.1:{port}", "pid": 1}))
    assert ask(folder / RUN) is None  # nobody listens
    other = board(folder)
    other.out = tmp_path / "other"
    with showing(other, f"127.0.0.1:{port}"):
        assert ask(folder / RUN) is None  # somebody else does
        assert ask(other.out) is not None
    status_file(folder / RUN).write_text(to_json({"address": "fl.example.org:80", "pid": 1}))
    assert ask(folder / RUN) is None  # which is asked only here


@pytest.mark.parametrize(("privacy", "why"), [
    (None, "there is no [privacy] in federation.toml"),
    (PRIVATE | {"randomness": "seeded"}, "whoever knows the seed can take the noise off"),
    (PRIVATE | {"noise_scale": "total_norm"}, "noise by total norm protects nobody"),
])  # fmt: skip
def test_what_protects_nobody_says_so_everywhere(tmp_path: Path, privacy: dict[str, Any] | None, why: str) -> None:
    found = board(made(tmp_path, privacy), HERE).status()
    assert (found["privacy"]["private"], found["privacy"]["why"]) == (False, why)
    assert "NOT PRIVATE" in text(found) and why in text(found)
    assert "tile alarm" in page(found) and "NOT PRIVATE" in page(found)
    assert "\nfednormec_private 0\n" in metrics(found)
    assert ("fednormec_epsilon_spent" in metrics(found)) == (privacy is not None)


# who may look


@pytest.mark.parametrize("address", ["0.0.0.0:8080", "10.0.0.1:8080", "fl.example.org:8080", "[::]:8080", "8080"])
def test_the_page_is_for_this_machine_alone(tmp_path: Path, fednormec_: Command, address: str) -> None:
    folder = made(tmp_path)
    said = fednormec_("federation", "serve", folder, "--status", address)
    assert said.code == 2
    assert "--status is for this machine alone" in sentence(said.err) or "an address is host:port" in sentence(said.err)


def test_addresses_of_this_machine_are_taken() -> None:
    assert [status_address(f"{host}:80")[0] for host in ("localhost", "127.0.0.9", "[::1]")] == [
        "localhost", "127.0.0.9", "::1",
    ]  # fmt: skip
    with pytest.raises(UserError, match="an address is host:port"):
        status_address("http://localhost:80")


def test_only_a_request_for_this_machine_is_answered(tmp_path: Path) -> None:
    """Else a page of somebody else's, whose name leads to 127.0.0.1 in the end, could read it."""
    folder, port = made(tmp_path), free_port()
    with showing(board(folder, HERE), f"127.0.0.1:{port}"):
        for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "127.0.0.1"):
            assert fetched(port, "/status.json", host=host)[0] == 200
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "10.0.0.1",
        ):
            code, body, _ = fetched(port, "/status.json", host=host)
            assert (code, body) == (403, "ask for localhost")
        for path in ("/status", "/../status.json", "/status.json?x", "//", "/favicon.ico", "/metrics/"):
            assert fetched(port, path)[0] == 404
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            assert fetched(port, "/status.json", method)[0] == 404
        headers = fetched(port, "/")[2]
    assert "access-control-allow-origin" not in headers
    assert headers["cross-origin-resource-policy"] == "same-origin"


# nothing of others is taken for ours


class Tags(HTMLParser):
    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.texts = list[str](), set[str](), list[str]()
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def hostile(folder: Path) -> dict[str, Any]:
    """A status in which every text is hostile."""
    log = Log()
    with redirect_stderr(io.StringIO()):
        log.warn(HOSTILE)
    shown = board(folder, HERE._replace(address=HOSTILE), AWAY, NEVER, log=log)
    shown.notice(0, REFUSED, f"sent what was refused: {HOSTILE}")
    shown.notice(1, LOST, HOSTILE)
    found = shown.status()
    found["roster"][1]["name"] = HOSTILE
    found |= {"method": HOSTILE, "model": HOSTILE, "folder": HOSTILE, "state": HOSTILE, "version": HOSTILE}
    return found | {"curve": {"figure": HOSTILE, "points": [(1, 0.5), (2, 0.7)]}, "figures": {f"test_{HOSTILE}": 0.7}}


def test_hostile_texts_stay_texts_on_the_page(tmp_path: Path) -> None:
    content = page(hostile(made(tmp_path)))
    found, plain = Tags(content), Tags(page(board(tmp_path / "fed", HERE).status()))
    assert "img" not in found.tags
    assert found.tags.count("script") == plain.tags.count("script") == 1
    assert found.attributes <= plain.attributes | {"viewbox", "role", "aria-label", "points", "x1", "x2", "y1", "y2"}
    assert not [c for c in content.replace("\n", "") if unicodedata.category(c) in ("Cc", "Cf")]
    assert any(r"<img src=x onerror=alert(1)>" in one for one in found.texts)


def test_hostile_texts_stay_in_their_line_on_a_terminal(tmp_path: Path) -> None:
    shown = text(hostile(made(tmp_path)))
    assert not [c for c in shown.replace("\n", "") if unicodedata.category(c) in ("Cc", "Cf")]
    assert not any(line.startswith("fake") for line in shown.splitlines())


SAMPLE = re.compile(r'(fednormec_[a-z_]+)(\{(?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)*\})? (\+Inf|NaN|-?[0-9.e+-]+)')


def test_prometheus_finds_a_help_a_type_and_only_samples(tmp_path: Path) -> None:
    lines = metrics(hostile(made(tmp_path))).splitlines()
    samples = [SAMPLE.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(samples)
    names = [one[1] for one in samples if one is not None]
    for kind in ("HELP", "TYPE"):
        assert [line.split()[2] for line in lines if line.startswith(f"# {kind} ")] == list(dict.fromkeys(names))
    assert {line.split()[3] for line in lines if line.startswith("# TYPE ")} == {"counter", "gauge"}
    assert 'fednormec_client_messages_refused{client="north"} 1' in lines
    assert any(
        line.startswith(r'fednormec_client_set_aside{client="</script><img src=x onerror=alert(1)>\"') for line in lines
    )
    quoted = {"roster": [{**board(tmp_path / "fed", HERE).status()["roster"][0], "name": 'a"b\\c\nd'}]}
    assert r'fednormec_client_missed{client="a\"b\\c\nd"} 0' in metrics(board(tmp_path / "fed").status() | quoted)


def test_a_client_that_was_refused_or_set_aside_is_shown_with_the_last_reason(tmp_path: Path) -> None:
    shown = board(made(tmp_path), HERE, AWAY, NEVER._replace(why_refused="its settings differ"))
    for why in ("it is of round 3", "it has no message"):
        shown.notice(0, REFUSED, f"sent what was refused: {why}")
    shown.notice(1, LOST, "has lost its memory")
    found = Tags(page(shown.status())).texts
    assert "2 × message: sent what was refused: it has no message" in found
    assert "away, set aside: its memory was lost" in found
    assert "3 × joining: its settings differ" in found
    assert "2 h ago" in found and "never came" in found


# lines of a log


def test_a_note_has_its_time_and_level_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Log(tmp_path / "a.log") as log:
        log("north has joined, from 10.0.0.5:4312")
        log.warn("a sentence with its full stop.\nand more")
        (tmp_path / "a.log").rename(tmp_path / "old.log")  # as whoever cleans up does
        log("south has left")
    assert re.sub(r"(?m)^note: \d\d:\d\d:\d\d ", "", capsys.readouterr().err) == (
        "north has joined, from 10.0.0.5:4312.\n" r"a sentence with its full stop.\nand more." "\nsouth has left.\n"
    )
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    first, second = (tmp_path / "old.log").read_text().splitlines()
    assert re.fullmatch(rf"{time} INFO north has joined, from 10\.0\.0\.5:4312", first)
    assert re.fullmatch(rf"{time} WARNING a sentence with its full stop\.\\nand more", second)
    assert re.fullmatch(rf"{time} INFO south has left\n", (tmp_path / "a.log").read_text())


def test_a_log_in_json_keeps_its_last_lines_and_says_what_ended_it(tmp_path: Path) -> None:
    log = Log(tmp_path / "a.log", as_json=True)
    with pytest.raises(UserError), log:
        for number in range(LINES + 5):
            log.keep(INFO, f"line {number}")
        raise UserError("the port is taken.")
    lines = [json.loads(line) for line in (tmp_path / "a.log").read_text().splitlines()]
    assert len(lines) == LINES + 6 and len(log.lines) == LINES
    assert (lines[-1]["level"], lines[-1]["message"]) == ("ERROR", "the port is taken")
    assert log.lines[0].message == "line 6"


def test_a_log_that_cannot_be_written_is_a_mistake_at_first_and_a_note_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="--log-file .*cannot be written"):
        Log(tmp_path / "no folder" / "a.log")
    with pytest.raises(UserError, match="--log-json"):
        Log(as_json=True)
    log = Log(tmp_path / "a.log")
    (tmp_path / "a.log").unlink()
    (tmp_path / "a.log").mkdir()
    log("one")
    log("two")
    assert capsys.readouterr().err.count("cannot be written any more") == 1
    assert [line.message for line in log.lines] == ["one", "two"]


# in a browser


def browse(folder: Path, *arguments: str) -> str:
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
    ]  # fmt: skip
    command = [str(CHROMIUM), *flags, f"--user-data-dir={folder / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


FRAME = """<iframe style="border:0;width:{width}px;height:900px" srcdoc="{page}"
onload="const d = this.contentDocument, all = e => [...d.querySelectorAll(e)];
  const out = all('svg, table, td, th, li, .tile, p').filter(e => e.getBoundingClientRect().right > {width} + 1);
  this.setAttribute('data-found', JSON.stringify({{page: d.documentElement.scrollWidth, out: out.length,
    smallest: Math.min(...all('*').map(e => parseFloat(getComputedStyle(e).fontSize)),
      ...all('td').map(e => parseFloat(getComputedStyle(e, '::before').fontSize)))}}))"></iframe>"""


@pytest.fixture
def counting(tmp_path: Path) -> Iterator[int]:
    """The port of a page that says how often it was asked for."""
    shown, port, looks = board(made(tmp_path), HERE, AWAY, NEVER), free_port(), 0
    known = shown.status

    def counted() -> dict[str, Any]:
        nonlocal looks
        looks += 1
        return known() | {"state": f"look {looks}"}

    shown.status = counted  # type: ignore[method-assign]
    with showing(shown, f"127.0.0.1:{port}"):
        yield port


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_in_a_browser_the_page_fits_and_keeps_itself_new(tmp_path: Path, counting: int) -> None:
    dom = browse(tmp_path, "--dump-dom", "--virtual-time-budget=7000", f"http://127.0.0.1:{counting}/")
    looks = re.search(r"<h1>Look (\d+)</h1>", dom)
    assert looks is not None and int(looks[1]) >= 3
    assert '<p id="silent" role="alert" hidden="">' in dom and "alert(1)&gt;" in dom and "<img" not in dom

    wrapper, content = tmp_path / "wrapper.html", html.escape(page(hostile(tmp_path / "fed")))
    frames = "".join(FRAME.format(width=width, page=content) for width in (1280, 390))
    wrapper.write_text(f'<!DOCTYPE html><body style="margin:0">{frames}</body>', encoding="utf-8")
    dom = browse(tmp_path, "--dump-dom", "--window-size=1800,1000", wrapper.as_uri())
    for width, said in zip((1280, 390), re.findall(r'data-found="([^"]*)"', dom), strict=True):
        found = json.loads(html.unescape(said))
        assert found["page"] <= width and found["out"] == 0 and found["smallest"] >= 12
