"""Gateway: a client's data, memory, budget and noise, behind a Unix socket that the client's owner opens.

Whoever reaches the socket can ask what a server can ask, and gets no more: the same function answers both.
"""

import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fednormec.errors import UserError
from fednormec.federation.client import client_of, longest_request
from fednormec.federation.ending import keep, longest_ending
from fednormec.federation.flower.carrying import HEAD, LENGTH, Broken, exactly
from fednormec.federation.flower.hello import introduced, is_hello
from fednormec.federation.joining import Joining, member, require_consent, say_what_left, write_statement
from fednormec.federation.keys import CLIENT_KEY, private_key
from fednormec.federation.log import Log
from fednormec.federation.messages import OVER, REFUSED, Refused, Reply, framed, kind_of, reply_bytes
from fednormec.files import Lines, require_locks
from fednormec.privacy.records import for_clients

SOCKET = "gateway.sock"
LONGEST_PATH = 107  # bytes of a socket's name, on Linux
READING = 10.0  # seconds that a request may take to arrive, and an answer to leave
TICK = 0.2  # seconds between two looks at whether to stop
EXPOSED = (
    "a SuperLink and a SuperNode carry this client's messages: whoever runs them, or may start a run on them, sees "
    "what the server sees, exact messages"
)


class Door(NamedTuple):
    """Where a gateway's socket is.

    Attributes:
        path: its file; by default in the client's folder.
        group: group of users who may reach it, besides its owner; by default nobody.
    """

    path: Path | None = None
    group: str | None = None


class Desk(NamedTuple):
    """What answers for a client.

    Attributes:
        answer: returns the answer to a request, with Flower's numbers of the run and of the node that it came by.
        most: bytes of a request, at most.
    """

    answer: Callable[[bytes, int, int], bytes]
    most: int


def desk_of(folder: Path, how: Joining, log: Log) -> Desk:
    """Returns what answers for the client whose folder this is, with its own data; says what is promised.

    Args:
        folder: the client's folder.
        how: the data, as for `join`; no address is needed.
        log: told what the client's owner should know.
    """
    require_locks()
    mine, key = member(folder, how), private_key(folder / CLIENT_KEY)
    federation, plan = mine.federation, mine.federation.plan
    require_consent(plan, how.not_private)
    log(mine.promise)
    clients = for_clients(plan)
    if plan is None or (clients is not None and clients.mechanism.trust == "central"):
        log.warn(EXPOSED)
    say_what_left(folder, mine, how, log)
    compute = client_of(federation, mine.number, folder, log.warn, how.budget)

    def answer(body: bytes, run: int, node: int) -> bytes:
        if is_hello(body):
            said, why = introduced(mine.name, key, federation.agreed, federation.terms, body, run, node)
            if why:
                log.warn(f"no hello was signed: {why}")
            return said
        if not is_over(body):
            return compute(body)
        write_statement(folder, mine, how, log)
        if how.keep_model is not None:
            log(keep(how.keep_model, body, federation))
        return framed({"kind": OVER})

    return Desk(answer, max(longest_request(federation), longest_ending(federation)))


def answer(folder: Path, how: Joining, door: Door, stop: Callable[[], bool]) -> bool:
    """Answers whoever reaches the socket until the training is over (True), or somebody wants to stop (False).

    Args:
        folder: the client's folder.
        how: the data, as for `join`; no address is needed.
        door: where the socket is, and who may reach it.
        stop: asked whether to stop.
    """
    with Log(how.log_file, how.log_json) as log:
        desk = desk_of(folder, how, log)
        lock = Lines(folder / "lock", new=not (folder / "lock").exists())
        try:
            path = door.path or folder.resolve() / SOCKET
            with opened(path, door.group) as wire:
                log(f"answers at {path}")
                return serve_socket(wire, desk, stop, log.warn)
        finally:
            lock.close()


def serve_socket(door: socket.socket, desk: Desk, stop: Callable[[], bool], warn: Callable[[str], None]) -> bool:
    """Answers one request for each connection, one after another; returns as `answer` does."""
    told = ""
    door.settimeout(TICK)
    while not stop():
        try:
            wire, _ = door.accept()
        except TimeoutError:
            continue
        with wire:
            try:
                if _answered(wire, desk):
                    return True
            except (OSError, Broken) as error:
                if str(error) != told:  # the first of its kind in a row
                    warn(f"nothing was answered: {error}")
                told = str(error)
    return False


def _answered(wire: socket.socket, desk: Desk) -> bool:
    """Answers the request that comes over a connection; returns whether it said that the training is over."""
    end = time.monotonic() + READING
    run, node, length = HEAD.unpack(exactly(wire, HEAD.size, end))
    if length > desk.most:
        why = f"it has {length:,} bytes, and a request has {desk.most:,} at most"
        _send(wire, reply_bytes(Reply(0, b"", REFUSED, why)))
        raise Broken(why)
    body = exactly(wire, length, end)
    _send(wire, desk.answer(body, run, node))
    return is_over(body)


def _send(wire: socket.socket, content: bytes) -> None:
    wire.settimeout(READING)
    wire.sendall(LENGTH.pack(len(content)))
    wire.sendall(content)


def is_over(body: bytes) -> bool:
    """Returns whether the server says that the training is over."""
    try:
        return kind_of(body) == OVER
    except Refused:
        return False


@contextmanager
def opened(path: Path, group: str | None = None) -> Iterator[socket.socket]:
    """Opens a socket that its owner alone can reach, and a group of users if one is named, until the context ends."""
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise UserError(f"{path} is longer than the {LONGEST_PATH} bytes that the name of a socket may have: give "
                        "--socket a shorter one.")  # fmt: skip
    who = None if group is None else _group(group)
    if who is not None:
        _require_way(path)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        _clear(path)
        door.bind(str(path))
        try:
            if who is not None:
                _give(path, who)
            door.listen()
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    except BaseException as error:
        door.close()
        if isinstance(error, OSError):
            raise UserError(f"no socket can be opened at {path}: {error.strerror or error}.") from error
        raise
    finally:
        os.umask(before)
    try:
        yield door
    finally:
        door.close()
        path.unlink(missing_ok=True)


def _clear(path: Path) -> None:
    """Removes a socket that a gateway left behind; raises UserError if one answers there, or it is something else."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise UserError(f"{path} is there already and no socket: nothing was changed; give --socket another name.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
        try:
            tried.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise UserError(f"another gateway answers at {path}: stop it, or give --socket another name.")


def _require_way(path: Path) -> None:
    """Raises UserError if a folder on the way to the socket lets its owner alone through."""
    home = path.parent.resolve()
    for folder in (home, *home.parents):
        if folder.exists() and not folder.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH):
            raise UserError(f"no group can reach {path}, since {folder} is for its owner alone: give --socket a file "
                            "in a folder that others can enter, away from your data.")  # fmt: skip


def _give(path: Path, group: int) -> None:
    """Lets a group reach the socket, too."""
    try:
        os.chown(path, -1, group)
    except PermissionError:
        raise UserError("--group must be a group that you are in yourself: a socket is given to no other.") from None
    os.chmod(path, 0o660)


def _group(name: str) -> int:
    import grp  # where there are groups

    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise UserError(f"--group must be a group of users on this machine, and there is no {name}.") from None
