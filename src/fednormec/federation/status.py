"""Status of a training for the server's operator: what is known of it, where that is shown, how it is asked for."""

import http.client
import json
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fednormec import __version__
from fednormec.config.schema import read
from fednormec.engine.figures import by_importance
from fednormec.engine.observers import Observer
from fednormec.engine.record import Record
from fednormec.engine.round import Round
from fednormec.errors import UserError
from fednormec.federation.agreement import Federation, for_server, is_loopback, read_federation, split_address
from fednormec.federation.exchange import ClientStatus, Exchange
from fednormec.federation.https import JSON, TEXT, Answer, Call, Listen, listening
from fednormec.federation.log import Log, stamp
from fednormec.federation.messages import LOST, MISSED, REFUSED
from fednormec.federation.status_forms import HEADERS, PROMETHEUS, Status, metrics, page
from fednormec.files import read_json, replace_text, to_json
from fednormec.privacy.labels import NOT_PRIVATE
from fednormec.privacy.records import AnyPlan, trust_of
from fednormec.results.reading import read_run
from fednormec.runs.records import finished

WAITING, TRAINING, OVER, UNKNOWN = "waiting for clients", "training", "over", "not running"
RECENT = 20  # rounds that the pace is measured over
POINTS = 400  # of the curve, at most
PATIENCE = 5.0  # seconds that a status port may take to answer
MOST = 2**24  # bytes of its answer, at most


class Board:
    """What is known of a training: from its settings and its folder, and then from what it hears.

    Attributes:
        state: what the server does.
        out: the run's folder.

    Args:
        federation: the federation as its server knows it.
        out: the run's folder, whose rounds are counted; it may be missing.
        link: connections of the clients; None if no server runs.
        log: whose last lines are shown; None: none.
    """

    def __init__(self, federation: Federation, out: Path, link: Exchange | None = None, log: Log | None = None) -> None:
        experiment, plan = federation.experiment, federation.plan
        self.state = UNKNOWN if link is None else WAITING
        self._names, self._link, self._log, self.out = tuple(federation.settings.clients), link, log, out
        self._about = {
            "method": experiment.algorithm.name,
            "model": str(experiment.config.get("model", experiment.config.get("problem", {})).get("name", "")),
            "parameters": experiment.problem.dim,
        }
        self._rounds = experiment.run.rounds if plan is None else plan.rounds
        self._privacy = _privacy(plan)
        self._lock, self._times = threading.Lock(), deque[float](maxlen=RECENT)
        self._aside, self._refused, self._missed = set[int](), dict[int, tuple[int, str]](), Counter[int]()
        self._done, self._spent = 0, None if plan is None else 0.0
        self._points = list[tuple[int, dict[str, Any]]]()
        self._read_folder()

    def _read_folder(self) -> None:
        if not (self.out / "metrics.jsonl").is_file():
            return
        run = read_run(self.out)
        self._done = run.rounds
        self._spent = self._spent if run.epsilon is None else run.epsilon
        self._points = [(one.round, one.public_figures) for one in run.records if one.public_figures]

    @property
    def observer(self) -> Observer:
        """Observer that tells the board of each round."""
        return Observer(after=self._after)

    def _after(self, round: Round, record: Record) -> None:
        with self._lock:
            self._times.append(time.monotonic())
            self._done, self._spent = round.number, record.get("epsilon")
            self._points = [(number, figures) for number, figures in self._points if number < round.number]
            if record.public_figures:
                self._points.append((round.number, record.public_figures))

    def notice(self, client: int, kind: str, what: str) -> None:
        """Hears that a client missed a round, that its memory was lost, or that its message was refused, and why."""
        with self._lock:
            if kind == MISSED:
                self._missed[client] += 1
            elif kind == LOST:
                self._aside.add(client)
            elif kind == REFUSED:
                self._refused[client] = (self._refused.get(client, (0, ""))[0] + 1, what)

    def status(self) -> Status:
        """Returns all that is known, as JSON can hold it."""
        clients = [] if self._link is None else self._link.status()
        here = any(client.here for client in clients)
        with self._lock:
            now, times = time.monotonic(), self._times
            passed = times[-1] - times[0] if times else 0.0
            return self._about | {
                "time": stamp(),
                "pid": os.getpid(),
                "version": __version__,
                "folder": str(self.out),
                "state": WAITING if self.state == TRAINING and not here else self.state,
                "rounds": {
                    "done": self._done,
                    "of": self._rounds,
                    "per_second": (len(times) - 1) / passed if passed else None,
                    "seconds_since_last": now - times[-1] if times else None,
                },
                "privacy": self._privacy_now(),
                "figures": self._points[-1][1] if self._points else {},
                "curve": _curve(self._points),
                "clients": len(self._names),
                "roster": [self._client(number, client) for number, client in enumerate(clients)],
                "bytes": None if self._link is None else
                         {"sent": self._link.sent, "received": self._link.received},
                "log": [] if self._log is None else [line._asdict() for line in self._log.lines],
            }  # fmt: skip

    def _privacy_now(self) -> dict[str, Any]:
        whole, spent = self._privacy.get("epsilon_in_all"), self._spent
        left = None if whole is None or spent is None else max(0.0, whole - spent)
        endless = spent is not None and not math.isfinite(spent)
        broken = {"private": False, "label": NOT_PRIVATE, "why": "no finite ε holds"} if endless else {}
        return self._privacy | {"epsilon": spent, "epsilon_left": left} | broken

    def _client(self, number: int, client: ClientStatus) -> dict[str, Any]:
        messages, why = self._refused.get(number, (0, ""))
        aside = {"set_aside": number in self._aside, "messages_refused": messages, "why_message_refused": why}
        missed = {"missed": self._missed[number], "missed_in_a_row": client.missed}
        return client._asdict() | missed | aside


def _privacy(plan: AnyPlan | None) -> dict[str, Any]:
    """Returns what is promised, and what all rounds cost; the label and why it is there, if nobody is protected."""
    if plan is None:
        why, facts = "there is no [privacy] in federation.toml", dict[str, Any]()
    else:
        weak = {"noise by total norm protects nobody": plan.total_norm,
                "whoever knows the seed can take the noise off": not plan.secure}  # fmt: skip
        why = next((said for said, holds in weak.items() if holds), "")
        whole = plan.epsilon(plan.rounds) if plan.budget is None else plan.budget
        facts = {"epsilon_in_all": whole, "delta": plan.delta, "trust": trust_of(plan)}
    return {"private": not why, "label": NOT_PRIVATE if why else None, "why": why or None} | facts


def _curve(points: list[tuple[int, dict[str, Any]]]) -> dict[str, Any] | None:
    """Returns the figure that says most, with (round, value) wherever it is finite; None if there is none."""
    names = [*by_importance(points[-1][1]), *points[-1][1]] if points else []
    if not names:
        return None
    whole = [(number, found.get(names[0])) for number, found in points]
    finite = [(number, value) for number, value in whole if isinstance(value, int | float) and math.isfinite(value)]
    step = -(-len(finite) // POINTS) or 1
    return {"figure": names[0], "points": finite[::-1][::step][::-1]}


# the status port of a server


def status_address(address: str) -> tuple[str, int]:
    """Returns host and port of a status page; raises UserError if others than this machine could reach it."""
    host, port = split_address(address)
    if not is_loopback(host):
        raise UserError(
            f"--status is for this machine alone, such as 127.0.0.1:8080, not '{address}': it asks nobody who they "
            "are. From elsewhere, reach it through SSH: ssh -L 8080:127.0.0.1:8080 SERVER."
        )
    return host, port


@contextmanager
def showing(board: Board, address: str | None) -> Iterator[None]:
    """Shows the board on a port of its own until the context ends; None: nowhere. A file beside the run says where."""
    if address is None:
        yield
        return
    host, port = status_address(address)

    async def handle(call: Call) -> Answer:
        return answered(board, call)

    path = status_file(board.out)
    with listening(handle, Listen(host, port)):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, to_json({"address": address, "pid": os.getpid()}) + "\n")
        try:
            yield
        finally:
            if read_json(path).get("pid") == os.getpid():
                path.unlink(missing_ok=True)


def answered(board: Board, call: Call) -> Answer:
    """Answers a request for the status; only to a browser that was told to look on this machine.

    A page of somebody else's could have its own name lead here, and then read what is shown: its requests say that
    name.
    """
    if not _names_this_machine(call.headers.get("host", "")):
        return Answer(403, b"ask for localhost", TEXT, HEADERS)
    if call.method != "GET":
        return Answer(404, b"not found", TEXT, HEADERS)
    if call.path == "/":
        return Answer(200, page(board.status()).encode(), "text/html; charset=utf-8", HEADERS)
    if call.path == "/status.json":
        return Answer(200, to_json(board.status()).encode(), JSON, HEADERS)
    if call.path == "/metrics":
        return Answer(200, metrics(board.status()).encode(), PROMETHEUS, HEADERS)
    return Answer(404, b"not found", TEXT, HEADERS)


def _names_this_machine(host: str) -> bool:
    name, colon, port = host.rpartition(":")
    return is_loopback((name if colon and port.isdecimal() else host).strip("[]"))


# who asks for it


def status_file(out: Path) -> Path:
    """Returns the file that says where the status of a run is shown: beside its folder, which may not be there yet."""
    return out.with_name(f"{out.name}.status.json")


def ask(out: Path) -> Status | None:
    """Asks the server of the run in this folder for its status; None if none shows it."""
    said = read_json(status_file(out))
    try:
        host, port = status_address(str(said.get("address")))
        connection = http.client.HTTPConnection(host, port, timeout=PATIENCE)
        try:
            connection.request("GET", "/status.json", headers={"Host": f"localhost:{port}"})
            found = json.loads(connection.getresponse().read(MOST))
        finally:
            connection.close()
    except (UserError, OSError, http.client.HTTPException, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("pid") == said.get("pid") else None


def from_folder(folder: Path, out: Path) -> Status:
    """Returns what the folders of a federation and of its run know, without a server."""
    begun = (out / "config.toml").is_file()
    board = Board(for_server(read(out / "config.toml") if begun else read_federation(folder), folder), out)
    end = finished(out)
    board.state = UNKNOWN if end is None else f"{OVER}: {end.status.replace('_', ' ')}"
    return board.status()
