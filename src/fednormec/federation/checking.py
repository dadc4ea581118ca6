"""Checks of `serve --check` and `join --check`: what would stand in the way, without starting anything."""

import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fednormec.errors import UserError
from fednormec.federation.agreement import Federation, for_server, read_federation, split_address
from fednormec.federation.client import counts_of, stores_of, together
from fednormec.federation.joining import Joining, Member, member, require_consent
from fednormec.federation.keys import (
    CA,
    CLIENT_CERTIFICATE,
    SERVER_CERTIFICATE,
    certified_hosts,
    for_joining,
    for_serving,
    require_signed,
    validity,
)
from fednormec.federation.node import Server, ask_once
from fednormec.federation.sessions import RUN, Serving, listens_on, require_keys, roster
from fednormec.federation.stages import keys_of, must_stay, own_key
from fednormec.federation.status import status_address
from fednormec.privacy.outlook import outlook
from fednormec.privacy.records import trust_of
from fednormec.runs.records import finished

OK, LOOK, WRONG = "ok", "look", "wrong"
ROOM = 50_000_000  # bytes that a run takes beside its vectors, at most
APART = 60.0  # seconds by which two clocks may differ


class Finding(NamedTuple):
    """Result of one check.

    Attributes:
        level: OK; LOOK: it would start, and somebody should look at it; WRONG: it would not start, or not work.
        what: what was looked at.
        said: what was found.
    """

    level: str
    what: str
    said: str

    @property
    def line(self) -> str:
        """Finding as a line of text."""
        return f"{self.level:<6}{self.what:<13}{self.said}"


class _Look(Exception):
    """Something that somebody should look at."""


Check = tuple[str, Callable[[], str]]


def check_server(folder: Path, how: Serving) -> list[Finding]:
    """Returns what stands in the way of `serve`, and what does not."""
    try:
        federation = for_server(read_federation(folder), folder)
    except UserError as error:
        return [Finding(WRONG, "settings", str(error))]
    return list(_findings(_of_server(folder, how, federation)))


def check_client(folder: Path, how: Joining) -> list[Finding]:
    """Returns what stands in the way of `join`, and what does not. It asks the server, and does not take part."""
    try:
        mine = member(folder, how)
    except UserError as error:
        return [Finding(WRONG, "settings", str(error))]
    return list(_findings(_of_client(folder, how, mine)))


def _findings(checks: Sequence[Check]) -> Iterator[Finding]:
    for what, look in checks:
        try:
            yield Finding(OK, what, look())
        except _Look as why:
            yield Finding(LOOK, what, str(why))
        except UserError as error:
            yield Finding(WRONG, what, str(error).removesuffix("."))


def _of_server(folder: Path, how: Serving, federation: Federation) -> list[Check]:
    out, address = how.out or folder / RUN, federation.settings.address
    host, port = listens_on(how, address)
    checks: list[Check] = [
        ("settings", lambda: _settings(federation, how.not_private)),
        ("certificate", lambda: _server_certificate(folder, address)),
        ("roster", lambda: _roster(folder, federation.settings.clients)),
        ("port", lambda: _port(host, port)),
        ("disk", lambda: _disk(out, federation)),
        ("run", lambda: _run(out)),
    ]
    if together(federation):
        checks.insert(3, ("keys", lambda: _keys(federation, require_keys(folder, federation))))
    if how.status is not None:
        checks.append(("status page", lambda: _port(*status_address(str(how.status)))))
    return checks


def _of_client(folder: Path, how: Joining, mine: Member) -> list[Check]:
    checks: list[Check] = [
        ("settings", lambda: _settings(mine.federation, how.not_private)),
        ("data", lambda: f"{len(mine.own):,} examples"),
        ("certificate", lambda: _certificate(folder, CLIENT_CERTIFICATE, "ask the server's operator for a new one")),
        ("memory", lambda: _memories(folder, mine.federation, how.budget)),
        ("disk", lambda: _disk(folder, mine.federation)),
        ("server", lambda: _server(folder, mine)),
    ]
    if together(mine.federation):
        checks.insert(3, ("keys", lambda: _own_key(folder, mine)))
    return checks


def _keys(federation: Federation, count: int) -> str:
    assert federation.mechanism is not None
    return f"those of all {count} clients are in federation.toml; {must_stay(federation.mechanism)}"


def _own_key(folder: Path, mine: Member) -> str:
    own_key(mine.federation, mine.number, folder)
    return _keys(mine.federation, len(keys_of(mine.federation)))


def _settings(federation: Federation, not_private: bool) -> str:
    plan = federation.plan
    require_consent(plan, not_private)
    names = f"{len(federation.settings.clients)} clients"
    if plan is None:
        raise _Look(f"{names}, and no privacy: the server sees exact messages")
    warning = outlook(plan).warning
    if warning is not None:
        raise _Look(warning.removesuffix("."))
    return f"{names}, ε = {plan.epsilon(plan.rounds):.3g} after {plan.rounds} rounds, trust {trust_of(plan)}"


def _certificate(folder: Path, name: str, remedy: str) -> str:
    holds = validity(folder / name)
    wrong, soon = holds.trouble(name, remedy)
    if wrong is not None:
        raise UserError(wrong)
    require_signed(folder / name, folder / CA)
    if soon is not None:
        raise _Look(soon)
    now = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    return f"holds until {holds.ends:%Y-%m-%d}; the clock here says {now} UTC"


def _server_certificate(folder: Path, address: str) -> str:
    said = _certificate(folder, SERVER_CERTIFICATE, "fednormec federation renew makes a new one")
    for_serving(folder)  # raises UserError if the key is another one
    host, hosts = split_address(address)[0], certified_hosts(folder / SERVER_CERTIFICATE)
    if host not in hosts:
        raise UserError(f"it is for {', '.join(hosts)}, and clients look for {host}: fednormec federation renew "
                        f"--address {host} makes one for that")  # fmt: skip
    return said


def _roster(folder: Path, names: Sequence[str]) -> str:
    missing = [name for name, key in zip(names, roster(folder, names), strict=True) if key is None]
    if missing:
        raise _Look(f"no key of {', '.join(missing)}: nobody can take part as such (fednormec federation sign)")
    return f"{len(names)} clients, each with a key"


def _port(host: str, port: int) -> str:
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return f"{host}:{port} is free"
    except OSError as error:
        raise UserError(f"nothing can listen on {host}:{port}: {error.strerror or error}") from None


def _disk(folder: Path, federation: Federation) -> str:
    """Writes what a checkpoint or a memory takes, and removes it again."""
    problem, algorithm, *_ = federation.experiment
    size = 8 * problem.dim * (4 + algorithm.memory_slots)
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(size))
        free = shutil.disk_usage(there).free
    except OSError as error:
        raise UserError(f"{there} cannot be written: {error.strerror or error}") from None
    if free < 3 * size + ROOM:
        raise UserError(f"{there} has {free / 1e6:,.0f} MB left, and {(3 * size + ROOM) / 1e6:,.0f} MB are needed")
    return f"{there} can be written; {free / 1e9:,.1f} GB left"


def _run(out: Path) -> str:
    if finished(out) is not None:
        raise _Look(f"the training in {out} is over: serve --out NEW begins another")
    if (out / "config.toml").exists():
        return f"the training in {out} would go on"
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty and holds no training: choose another folder with --out")
    return f"a new training, in {out}"


def _memories(folder: Path, federation: Federation, budget: float | None) -> str:
    found = [path.stem.removeprefix("memory-") for path in sorted(folder.glob("memory-*.safetensors"))]
    store_of = stores_of(federation, folder)
    for run in found:
        try:
            store_of(run).load()
        except UserError as error:  # which may be of an earlier agreement
            raise _Look(str(error).removesuffix(".")) from None
    said = [f"{len(found)} of earlier trainings"]
    for counted in counts_of(federation, folder, budget):
        left_before = counted.before()  # raises UserError if the count is damaged
        if not counted.has_budget:
            continue
        if (trouble := counted.trouble()) is not None:
            raise UserError(trouble)
        if left_before:
            raise _Look(counted.said())
        said.append(counted.said())
    return "; ".join(said)


def _server(folder: Path, mine: Member) -> str:
    ahead = ask_once(Server(mine.address, for_joining(folder)), mine.federation.agreed, mine.federation.terms)
    if abs(ahead) > APART:
        raise _Look(f"{mine.address} would take this client; its clock is {abs(ahead):,.0f} s "
                    f"{'ahead of' if ahead > 0 else 'behind'} the one here: one of them is wrong")  # fmt: skip
    return f"{mine.address} would take this client; the clocks agree"
