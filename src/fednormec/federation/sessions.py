"""Sessions of a federation: `serve` trains with whoever connects, `join` takes part with one's own data."""

import json
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fednormec.config.schema import read
from fednormec.core.randomness import generator
from fednormec.errors import Stopped, UserError, note
from fednormec.federation.agreement import (
    KEYS,
    Federation,
    for_client,
    for_server,
    is_loopback,
    read_federation,
    split_address,
)
from fednormec.federation.client import client_app, own_data
from fednormec.federation.disclosure import besides, promise
from fednormec.federation.keys import (
    CA,
    NODE_KEY,
    SERVER_CERTIFICATE,
    SERVER_KEY,
    private_key,
    public_key,
)
from fednormec.federation.messages import Refused, Reply, Report, Request, read_reply, request_record
from fednormec.federation.node import Server, take_part
from fednormec.federation.reports import Reporting, as_report
from fednormec.federation.transport import Link, LinkGrid, Listen, asked, listening
from fednormec.federation.wire import Wire
from fednormec.files import Lines, replace_text, require_locks, to_json
from fednormec.privacy.mechanism import Plan
from fednormec.runs.records import finished
from fednormec.runs.runner import Site, go_on, perform

FACTS, RUN = "federation.json", "run"


def tell(said: str) -> None:
    """Prints a note."""
    note(f"{said}.")


class Serving(NamedTuple):
    """Options of `serve`.

    Attributes:
        out: the run's folder; by default run, in the federation's.
        host: where to listen; by default what the address in federation.toml says.
        port: where to listen; by default what the address in federation.toml says.
        wait_for: number of clients to wait for before the first round; by default all.
        insecure: whether to do without TLS, on this machine alone.
        not_private: whether to train though clients are not protected.
        forget_memories: whether all memories start over when the run resumes.
        quiet: whether to show no progress.
    """

    out: Path | None = None
    host: str | None = None
    port: int | None = None
    wait_for: int | None = None
    insecure: bool = False
    not_private: bool = False
    forget_memories: bool = False
    quiet: bool = False


def serve(folder: Path, how: Serving, stop: Callable[[], bool]) -> dict[str, Any]:
    """Trains with the clients that connect, or resumes a training that was interrupted; returns the run's summary."""
    require_locks()  # now, not after a wait for clients
    federation = for_server(read_federation(folder), folder)
    plan = federation.plan
    require_consent(plan, how.not_private)
    out = how.out or folder / RUN
    if finished(out) is not None:
        return go_on(out, how.quiet)  # notes that it has finished
    if (out / "config.toml").exists() and for_server(read(out / "config.toml"), folder).agreed != federation.agreed:
        raise UserError(f"federation.toml was changed since the run in {out} began: put the old one back, or start "
                        "a new run with --out.")  # fmt: skip
    names = tuple(federation.settings.clients)
    wait_for = len(names) if how.wait_for is None else how.wait_for
    if not 0 < wait_for <= len(names):
        raise UserError(f"--wait-for must be from 1 to {len(names)}, the number of clients, not {wait_for}.")
    link = Link([public_key_of(folder, name) for name in names])
    app, done = ServerApp(), list[dict[str, Any]]()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        assert isinstance(grid, LinkGrid)
        done.append(_trained(folder, out, how, stop, federation, plan, link, grid))

    vectors = 2 * federation.experiment.problem.dim * 8
    with listening(link, _where(folder, how, federation.settings.address), vectors), link.grid() as grid:
        try:
            _await(link, wait_for, stop, how.quiet)
        except KeyboardInterrupt:
            raise Stopped("stopped while waiting for clients; the same command goes on.") from None
        app(grid, Context(grid.run.run_id, 0, {}, RecordDict(), {}))
        _tell_that_it_is_over(link, grid)
    return done[0]


def join(
    folder: Path,
    data: str,
    stop: Callable[[], bool],
    name: str | None = None,
    address: str | None = None,
    insecure: bool = False,
    not_private: bool = False,
) -> None:
    """Takes part in a federation as the client whose folder this is, with one's own data.

    Args:
        folder: the client's folder.
        data: where the data are, as in `own_data`.
        stop: asked whether to stop.
        name: name of the client; by default the folder's.
        address: where the server is; by default what federation.toml says.
        insecure: whether to do without TLS, on this machine alone.
        not_private: whether to take part though clients are not protected.
    """
    require_locks()
    name = name or folder.resolve().name
    config = read_federation(folder)
    federation = for_client(config, name, own_data(data, config), folder)
    plan = federation.plan
    require_consent(plan, not_private)
    where = address or federation.settings.address
    if insecure and not is_loopback(split_address(where)[0]):
        raise UserError(f"--insecure is for this machine alone, and {where} is another: leave it out.")
    authority = None if insecure else _bytes(folder / CA)
    tell(promise(plan, federation.settings.share if federation.settings.report else None))
    over = threading.Event()
    lock = Lines(folder / "lock", new=not (folder / "lock").exists())
    try:
        client = list(federation.settings.clients).index(name)
        app = client_app(federation, client, folder, tell, over.set)
        key = private_key(folder / NODE_KEY)
        take_part(Server(where, authority), key, app, over.is_set, stop, tell)
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


def public_key_of(folder: Path, name: str) -> bytes:
    """Returns a client's public key as Flower wants it."""
    return public_key_to_bytes(public_key(folder / KEYS / f"{name}.pub"))


def _trained(
    folder: Path,
    out: Path,
    how: Serving,
    stop: Callable[[], bool],
    federation: Federation,
    plan: Plan | None,
    link: Link,
    grid: LinkGrid,
) -> dict[str, Any]:

    experiment = federation.experiment
    x = experiment.problem.init(generator(0, "init"))
    size = experiment.algorithm.message_width(len(x))

    def understood(message: Message) -> Reply | Refused:
        try:
            if not message.has_content():
                raise Refused("it is an error, not an answer")
            return read_reply(message.content, size, x.dtype)
        except Refused as why:
            return why

    def ask(requests: Mapping[int, Request]) -> dict[int, Reply | Refused]:
        contents = {client: request_record(request) for client, request in requests.items()}
        found = asked(link, grid, contents, federation.settings.deadline)
        return {client: understood(message) for client, message in found.items()}

    def wait(some: Set[int]) -> None:
        _await(link, 1, stop, how.quiet, some)

    def ask_for_reports(requests: Mapping[int, Request]) -> dict[int, Report | Refused]:
        contents = {client: request_record(request) for client, request in requests.items()}
        found = asked(link, grid, contents, federation.settings.deadline, MessageType.EVALUATE)
        return {client: as_report(message) for client, message in found.items()}

    names = tuple(federation.settings.clients)
    reports = Reporting(names, lambda: _training(out), federation.agreed, ask_for_reports, tell)
    command = f"fednormec federation serve {shlex.quote(str(folder))}" + (
        f" --out {shlex.quote(str(out))}" if how.out else ""
    )
    site = Site(
        lambda config: for_server(config, folder, reports if federation.settings.report else None).experiment,
        Wire(names, lambda: _training(out), federation.agreed, ask, tell, wait),
        () if plan is None else besides(plan.mechanism, how.insecure, federation.settings.report),
        command,
        how.forget_memories,
    )
    if (out / "config.toml").exists():
        summary = go_on(out, how.quiet, stop=stop, site=site)
    else:
        summary = perform(read_federation(folder), out.name, out, how.quiet, stop=stop, site=site)
    run = grid.run
    facts = {"training": _training(out), "bytes_sent": run.bytes_sent, "bytes_received": run.bytes_recv}
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


def _await(link: Link, count: int, stop: Callable[[], bool], quiet: bool, some: Set[int] | None = None) -> None:
    """Waits until `count` clients are there, of `some` or of all; raises KeyboardInterrupt when asked to stop."""
    told, nodes = quiet, {node for client, node in enumerate(link.nodes) if some is None or client in some}
    while len(link.here() & nodes) < count:
        if not told:
            tell(f"waiting for clients: {len(link.here() & nodes)} of {count} are here")
            told = True
        if stop():
            raise KeyboardInterrupt
        time.sleep(0.05)


def _tell_that_it_is_over(link: Link, grid: LinkGrid) -> None:
    here = link.here()
    everyone = {client for client, node in enumerate(link.nodes) if node in here}
    asked(link, grid, {client: RecordDict({"over": ConfigRecord({})}) for client in everyone}, 10.0, MessageType.QUERY)


def _where(folder: Path, how: Serving, address: str) -> Listen:
    named, port = split_address(address)
    loopback = "127.0.0.1" if named == "localhost" else named
    host = how.host or (loopback if is_loopback(named) else "0.0.0.0")
    port = port if how.port is None else how.port
    if not 0 < port < 65536:
        raise UserError(f"--port must be from 1 to 65535, not {port}.")
    if how.insecure:
        if not is_loopback(host):
            raise UserError(f"--insecure is for this machine alone, and {host} is open to others: leave it out.")
        return Listen(host, port)
    files = [folder / SERVER_KEY, folder / SERVER_CERTIFICATE]
    for path in files:
        _bytes(path)
    return Listen(host, port, *map(str, files))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; fednormec federation init makes it.") from error
