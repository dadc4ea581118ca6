"""Session of the server: `serve` trains with the clients that connect."""

import json
import math
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from fednormec.config.schema import read
from fednormec.core.randomness import generator
from fednormec.errors import Stopped, UserError
from fednormec.federation.agreement import Federation, for_server, is_loopback, read_federation, split_address
from fednormec.federation.bookkeeping import spent_and_to_come
from fednormec.federation.client import longest_answer, together
from fednormec.federation.disclosure import besides
from fednormec.federation.ending import ending
from fednormec.federation.exchange import Exchange
from fednormec.federation.expiry import Expiring
from fednormec.federation.https import Listen
from fednormec.federation.joining import require_consent
from fednormec.federation.keys import fingerprint, for_serving, public_key
from fednormec.federation.log import INFO, Log
from fednormec.federation.messages import (
    REPORT,
    Refused,
    Reply,
    Report,
    Request,
    read_reply,
    request_bytes,
)
from fednormec.federation.provision import roster_file
from fednormec.federation.reports import Reporting, as_report
from fednormec.federation.stages import SecureWire, keys_of
from fednormec.federation.status import OVER, TRAINING, Board, showing, status_address
from fednormec.federation.transport import RETURN, Link
from fednormec.federation.wire import Wire
from fednormec.files import replace_text, require_locks, to_json
from fednormec.privacy.records import AnyPlan
from fednormec.runs.folder import MODEL
from fednormec.runs.records import finished
from fednormec.runs.runner import Site, go_on, perform

FACTS, RUN = "federation.json", "run"


class Serving(NamedTuple):
    """Options of `serve`.

    Attributes:
        out: the run's folder; by default run, in the federation's.
        host: where to listen; by default what the address in federation.toml says.
        port: where to listen; by default what the address in federation.toml says.
        wait_for: number of clients without whom no round begins; by default all at the start, or as many as come back
            within 90 seconds when a run resumes, and then one.
        not_private: whether to train though clients are not protected.
        forget_memories: whether all memories start over when the run resumes.
        quiet: whether to show no progress.
        status: where the status page is, host:port on this machine; by default nowhere.
        log_file: file to which all notes are added; by default none.
        log_json: whether its lines are JSON.
    """

    out: Path | None = None
    host: str | None = None
    port: int | None = None
    wait_for: int | None = None
    not_private: bool = False
    forget_memories: bool = False
    quiet: bool = False
    status: str | None = None
    log_file: Path | None = None
    log_json: bool = False


def serve(folder: Path, how: Serving, stop: Callable[[], bool]) -> dict[str, Any]:
    """Trains with the clients that connect, or resumes a training that was interrupted; returns the run's summary."""
    with Log(how.log_file, how.log_json) as log:
        summary = _served(folder, how, stop, log)
        log.keep(INFO, f"the training is over after {summary['rounds']} rounds ({summary['status']})")
    return summary


def _served(folder: Path, how: Serving, stop: Callable[[], bool], log: Log) -> dict[str, Any]:
    require_locks()  # now, not after a wait for clients
    if how.status is not None:
        status_address(how.status)

    @contextmanager
    def https(federation: Federation) -> Iterator[Exchange]:
        names = tuple(federation.settings.clients)
        where = _where(folder, how, federation.settings.address)
        link = Link(names, lambda: roster(folder, names), federation.agreed, federation.terms,
                    longest_answer(federation), log, log.warn, Expiring.of_server(folder, log))  # fmt: skip
        with link.listening(where):
            yield link

    return train_over(https, folder, how, stop, log)


def train_over(
    exchange: Callable[[Federation], AbstractContextManager[Exchange]],
    folder: Path,
    how: Serving,
    stop: Callable[[], bool],
    log: Log,
) -> dict[str, Any]:
    """Trains with the clients of an exchange, or resumes a training that was interrupted; returns the run's summary.

    Args:
        exchange: opens the connections of the clients.
        folder: the federation's folder.
        how: options of the server.
        stop: asked whether to stop.
        log: told what the server's operator should know.
    """
    federation = for_server(read_federation(folder), folder)
    plan = federation.plan
    require_consent(plan, how.not_private)
    if together(federation):
        require_keys(folder, federation)
    out = how.out or folder / RUN
    if finished(out) is not None:
        return go_on(out, how.quiet, site=Site(tell=log))  # notes that it has finished
    if (out / "config.toml").exists() and for_server(read(out / "config.toml"), folder).agreed != federation.agreed:
        raise UserError(f"federation.toml was changed since the run in {out} began: put the old one back, or start "
                        "a new run with --out.")  # fmt: skip
    names = tuple(federation.settings.clients)
    resuming, keyed = (out / "config.toml").exists(), sum(roster_file(folder, name).exists() for name in names)
    if not keyed:
        raise UserError("no client has a key on the roster: all were revoked; fednormec federation sign lets one back.")
    wait_for = keyed if how.wait_for is None else how.wait_for
    if not 0 < wait_for <= len(names):
        raise UserError(f"--wait-for must be from 1 to {len(names)}, the number of clients, not {wait_for}.")
    if not resuming and any(folder.rglob("ledger.jsonl")):
        for said in spent_and_to_come(folder):
            log(said)
    patience = RETURN if resuming and how.wait_for is None else math.inf
    with exchange(federation) as link:
        board = Board(federation, out, link, log)
        with showing(board, how.status):
            try:
                _await(link, wait_for, stop, log, patience=patience)
            except KeyboardInterrupt:
                raise Stopped("stopped while waiting for clients; the same command goes on.") from None
            board.state = TRAINING
            summary = _trained(folder, out, how, stop, federation, plan, link, log, board)
            board.state = OVER
            link.finish(ending(out / MODEL))
    return summary


def roster(folder: Path, names: Sequence[str]) -> list[bytes | None]:
    """Returns by what each client is known, None for one whose key was revoked."""
    return [_known_by(roster_file(folder, name)) for name in names]


def require_keys(folder: Path, federation: Federation) -> int:
    """Returns the number of keys in federation.toml; raises UserError if one is missing, or not that of the roster."""
    names = federation.settings.clients
    for name, key, known_by in zip(names, keys_of(federation), roster(folder, names), strict=True):
        if known_by is not None and fingerprint(key) != known_by:
            raise UserError(f"federation.toml has another key for {name} than {roster_file(folder, name)}: put the "
                            f"federation.toml back that belongs to the roster, or sign {name} again.")  # fmt: skip
    return len(names)


def _known_by(file: Path) -> bytes | None:
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return _fingerprint(file, found.st_ino, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=2**13)  # the roster is looked at every other second
def _fingerprint(file: Path, number: int, changed: int, size: int) -> bytes:
    return fingerprint(public_key(file))


def _trained(
    folder: Path,
    out: Path,
    how: Serving,
    stop: Callable[[], bool],
    federation: Federation,
    plan: AnyPlan | None,
    link: Exchange,
    log: Log,
    board: Board,
) -> dict[str, Any]:

    experiment = federation.experiment
    x = experiment.problem.init(generator(0, "init"))
    size = experiment.algorithm.message_width(len(x))

    def understood(data: bytes) -> Reply | Refused:
        try:
            return read_reply(data, size, x.dtype)
        except Refused as why:
            return why

    def ask(requests: Mapping[int, Request]) -> dict[int, Reply | Refused]:
        bodies = {client: request_bytes(request) for client, request in requests.items()}
        found = link.ask(bodies, federation.settings.deadline, stop)
        bodies.clear()
        return {client: understood(found.pop(client)) for client in list(found)}  # as bytes or as numbers, not as both

    def wait(some: Set[int], count: int) -> None:
        _await(link, min(max(how.wait_for or 1, count), len(some)), stop, log, some)

    def carry(bodies: Mapping[int, bytes]) -> dict[int, bytes]:
        return link.ask(bodies, federation.settings.deadline, stop)

    def ask_for_reports(requests: Mapping[int, Request]) -> dict[int, Report | Refused]:
        bodies = {client: request_bytes(request, REPORT) for client, request in requests.items()}
        found = link.ask(bodies, federation.settings.deadline, stop)
        return {client: as_report(data) for client, data in found.items()}

    names = tuple(federation.settings.clients)
    reports = Reporting(names, lambda: _training(out), federation.agreed, ask_for_reports, log.warn)
    where = shlex.quote(str(folder)) + (f" --out {shlex.quote(str(out))}" if how.out else "")
    command = "the same flwr run" if link.command is None else f"{link.command} {where}"
    wire = Wire(names, lambda: _training(out), federation.agreed, ask, log.warn, wait, board.notice)
    site = Site(
        lambda config: for_server(config, folder, reports if federation.settings.report else None).experiment,
        SecureWire(wire, carry, keys_of(federation)) if together(federation) else wire,
        besides(plan, federation.settings.report, link.transport),
        command,
        how.forget_memories,
        True,
        log,
        one_program=False,
    )
    if (out / "config.toml").exists():
        summary = go_on(out, how.quiet, [board.observer], stop=stop, site=site)
    else:
        summary = perform(
            read_federation(folder), out.name, out, how.quiet, observers=[board.observer], stop=stop, site=site
        )
    facts = {"training": _training(out), "bytes_sent": link.sent, "bytes_received": link.received}
    replace_text(out / FACTS, to_json(facts, indent=2) + "\n")
    return summary


def _training(out: Path) -> str:
    """Returns the name of this training, by which clients know their memory of it: made once, stored in its folder."""
    path = out / FACTS
    if not path.exists():
        replace_text(path, to_json({"training": secrets.token_hex(16)}) + "\n")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["training"]
        if isinstance(found, str) and found.isalnum():
            return found
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{path} is damaged: clients know their memories by what it said. Put a copy back.")


def _await(
    link: Exchange,
    count: int,
    stop: Callable[[], bool],
    log: Log,
    some: Set[int] | None = None,
    patience: float = math.inf,
) -> None:
    """Waits until `count` clients are there, of `some` or of all, or one after so many seconds.

    Raises KeyboardInterrupt when asked to stop.
    """
    told, begun, among = -1, time.monotonic(), set(range(len(link.names))) if some is None else some
    while len(here := link.here() & among) < count:
        if here and time.monotonic() - begun >= patience:
            log(f"going on with {len(here)} of {count} clients: the others have not come back")
            return
        if len(here) != told:
            log(f"waiting for clients: {len(here)} of {count} are here")
            told = len(here)
        if stop():
            raise KeyboardInterrupt
        time.sleep(0.05)


def listens_on(how: Serving, address: str) -> tuple[str, int]:
    """Returns host and port that `serve` listens on, for clients that look for it at this address."""
    named, port = split_address(address)
    loopback = "127.0.0.1" if named == "localhost" else named
    port = port if how.port is None else how.port
    if not 0 < port < 65536:
        raise UserError(f"--port must be from 1 to 65535, not {port}.")
    return how.host or (loopback if is_loopback(named) else "0.0.0.0"), port


def _where(folder: Path, how: Serving, address: str) -> Listen:
    host, port = listens_on(how, address)
    return Listen(host, port, for_serving(folder))
