"""Sessions of a federation: `serve` trains with whoever connects, `join` takes part with one's own data."""

import json
import secrets
import shlex
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from fednormec.config.schema import read
from fednormec.core.randomness import generator
from fednormec.errors import Stopped, UserError
from fednormec.federation.agreement import (
    Federation,
    for_client,
    for_server,
    is_loopback,
    read_federation,
    split_address,
)
from fednormec.federation.client import client_of, longest_request, own_data
from fednormec.federation.client_state import Releases
from fednormec.federation.disclosure import besides, promise
from fednormec.federation.https import Listen
from fednormec.federation.keys import (
    CLIENT_CERTIFICATE,
    SERVER_CERTIFICATE,
    fingerprint,
    for_joining,
    for_serving,
    public_key,
    validity,
)
from fednormec.federation.log import INFO, Log
from fednormec.federation.messages import (
    MOST_SAID,
    REPORT,
    Refused,
    Reply,
    Report,
    Request,
    read_reply,
    request_bytes,
)
from fednormec.federation.node import Server, Taking, take_part
from fednormec.federation.provision import roster_file
from fednormec.federation.reports import Reporting, as_report
from fednormec.federation.status import OVER, TRAINING, Board, showing, status_address
from fednormec.federation.transport import Link
from fednormec.federation.wire import Wire
from fednormec.files import Lines, replace_text, require_locks, to_json
from fednormec.privacy.mechanism import Plan
from fednormec.runs.records import finished
from fednormec.runs.runner import Site, go_on, perform

FACTS, RUN = "federation.json", "run"


class Serving(NamedTuple):
    """Options of `serve`.

    Attributes:
        out: the run's folder; by default run, in the federation's.
        host: where to listen; by default what the address in federation.toml says.
        port: where to listen; by default what the address in federation.toml says.
        wait_for: number of clients to wait for before the first round; by default all.
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
    federation = for_server(read_federation(folder), folder)
    plan = federation.plan
    require_consent(plan, how.not_private)
    out = how.out or folder / RUN
    if finished(out) is not None:
        return go_on(out, how.quiet, site=Site(tell=log))  # notes that it has finished
    if (out / "config.toml").exists() and for_server(read(out / "config.toml"), folder).agreed != federation.agreed:
        raise UserError(f"federation.toml was changed since the run in {out} began: put the old one back, or start "
                        "a new run with --out.")  # fmt: skip
    names = tuple(federation.settings.clients)
    wait_for = len(names) if how.wait_for is None else how.wait_for
    if not 0 < wait_for <= len(names):
        raise UserError(f"--wait-for must be from 1 to {len(names)}, the number of clients, not {wait_for}.")
    size = federation.experiment.algorithm.message_width(federation.experiment.problem.dim)
    link = Link(
        names, lambda: roster(folder, names), federation.agreed, federation.terms, 8 * size + MOST_SAID, log, log.warn
    )
    board = Board(federation, out, link, log)
    with showing(board, how.status), link.listening(_where(folder, how, federation.settings.address, log)):
        try:
            _await(link, wait_for, stop, how.quiet, log)
        except KeyboardInterrupt:
            raise Stopped("stopped while waiting for clients; the same command goes on.") from None
        board.state = TRAINING
        summary = _trained(folder, out, how, stop, federation, plan, link, log, board)
        board.state = OVER
        link.finish()
    return summary


def join(
    folder: Path,
    data: str,
    stop: Callable[[], bool],
    name: str | None = None,
    address: str | None = None,
    not_private: bool = False,
    log_file: Path | None = None,
    log_json: bool = False,
) -> None:
    """Takes part in a federation as the client whose folder this is, with one's own data.

    Args:
        folder: the client's folder.
        data: where the data are, as in `own_data`.
        stop: asked whether to stop.
        name: name of the client; by default the folder's.
        address: where the server is; by default what federation.toml says.
        not_private: whether to take part though clients are not protected.
        log_file: file to which all notes are added; by default none.
        log_json: whether its lines are JSON.
    """
    with Log(log_file, log_json) as log:
        _joined(folder, data, stop, name, address, not_private, log)


def _joined(
    folder: Path,
    data: str,
    stop: Callable[[], bool],
    name: str | None,
    address: str | None,
    not_private: bool,
    log: Log,
) -> None:
    require_locks()
    name = name or folder.resolve().name
    config = read_federation(folder)
    federation = for_client(config, name, own_data(data, config), folder)
    plan = federation.plan
    require_consent(plan, not_private)
    where = address or federation.settings.address
    split_address(where)
    _require_valid(
        folder / CLIENT_CERTIFICATE, "this client's certificate", "ask the server's operator for a new one", log
    )
    secured = for_joining(folder)
    log(promise(plan, federation.settings.share if federation.settings.report else None))
    earlier = Releases(folder, federation.agreed).before()
    if earlier:
        log.warn(f"{earlier:,} messages have left this client under other agreements: what they cost comes on top")
    lock = Lines(folder / "lock", new=not (folder / "lock").exists())
    try:
        client = list(federation.settings.clients).index(name)
        answer = client_of(federation, client, folder, log.warn)
        most = longest_request(federation)
        take_part(Server(where, secured), Taking(federation.agreed, federation.terms, answer, most, stop, log))
    finally:
        lock.close()


def require_consent(plan: Plan | None, not_private: bool) -> None:
    """Raises UserError if the plan protects nobody, unless `not_private` says that this is wanted."""
    if not_private:
        return
    if plan is None:
        raise UserError("federation.toml has no [privacy]: the server would see every client's exact messages. Give "
                        "--not-private if that is what all agreed on.")  # fmt: skip
    if plan.total_norm:
        raise UserError("federation.toml has noise by total norm, which protects nobody: set privacy.noise_scale = "
                        "'per_coordinate', or give --not-private to try things out.")  # fmt: skip
    if not plan.mechanism.secure:
        raise UserError("federation.toml has seeded noise, which whoever knows the seed can take off again: set "
                        "privacy.randomness = 'secure', or give --not-private to try things out.")  # fmt: skip


def roster(folder: Path, names: Sequence[str]) -> list[bytes | None]:
    """Returns by what each client is known, None for one whose key was revoked."""
    files = [roster_file(folder, name) for name in names]
    return [fingerprint(public_key(file)) if file.exists() else None for file in files]


def _require_valid(path: Path, whose: str, remedy: str, log: Log) -> None:
    """Raises UserError if a certificate does not hold now, by the clock here; says so if it soon will not."""
    wrong, soon = validity(path).trouble(whose, remedy)
    if wrong is not None:
        raise UserError(f"{wrong}.")
    if soon is not None:
        log.warn(soon)


def _trained(
    folder: Path,
    out: Path,
    how: Serving,
    stop: Callable[[], bool],
    federation: Federation,
    plan: Plan | None,
    link: Link,
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
        return {client: understood(data) for client, data in found.items()}

    def wait(some: Set[int]) -> None:
        _await(link, 1, stop, how.quiet, log, some)

    def ask_for_reports(requests: Mapping[int, Request]) -> dict[int, Report | Refused]:
        bodies = {client: request_bytes(request, REPORT) for client, request in requests.items()}
        found = link.ask(bodies, federation.settings.deadline, stop)
        return {client: as_report(data) for client, data in found.items()}

    names = tuple(federation.settings.clients)
    reports = Reporting(names, lambda: _training(out), federation.agreed, ask_for_reports, log.warn)
    command = f"fednormec federation serve {shlex.quote(str(folder))}" + (
        f" --out {shlex.quote(str(out))}" if how.out else ""
    )
    site = Site(
        lambda config: for_server(config, folder, reports if federation.settings.report else None).experiment,
        Wire(names, lambda: _training(out), federation.agreed, ask, log.warn, wait, board.notice),
        () if plan is None else besides(plan.mechanism, federation.settings.report),
        command,
        how.forget_memories,
        log,
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
    link: Link, count: int, stop: Callable[[], bool], quiet: bool, log: Log, some: Set[int] | None = None
) -> None:
    """Waits until `count` clients are there, of `some` or of all; raises KeyboardInterrupt when asked to stop."""
    told, among = None if quiet else -1, set(range(len(link.names))) if some is None else some
    while len(here := link.here() & among) < count:
        if told is not None and len(here) != told:
            log(f"waiting for clients: {len(here)} of {count} are here")
            told = len(here)
        if stop():
            raise KeyboardInterrupt
        time.sleep(0.05)


def _where(folder: Path, how: Serving, address: str, log: Log) -> Listen:
    named, port = split_address(address)
    loopback = "127.0.0.1" if named == "localhost" else named
    host = how.host or (loopback if is_loopback(named) else "0.0.0.0")
    port = port if how.port is None else how.port
    if not 0 < port < 65536:
        raise UserError(f"--port must be from 1 to 65535, not {port}.")
    _require_valid(
        folder / SERVER_CERTIFICATE, "the server's certificate", "fednormec federation renew makes a new one", log
    )
    return Listen(host, port, for_serving(folder))
