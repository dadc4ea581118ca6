"""Carrying of bytes between a Flower app and a gateway: all that an app does on a client's machine.

A stock SuperNode runs the code that the server sends, one process for each message: this is that code's whole work, and
it needs neither data nor torch.
"""

import socket
import struct
import time

from fednormec.errors import UserError

HEAD = struct.Struct(">QQI")  # the run, the node, the length of the request
LENGTH = struct.Struct(">I")
MOST = 2**30  # bytes of an answer: a masked vector is long, and the app does not know how long
PATIENCE = 3600.0  # seconds that an answer may take: the server gives up long before
IDS = 2**64  # numbers of runs and nodes that there are


class Broken(Exception):
    """Reason why what came over a socket is not taken."""


def carry(path: str, body: bytes, run: int, node: int) -> bytes:
    """Hands a request to the gateway behind this socket and returns its answer.

    Args:
        path: the gateway's socket.
        body: the request, as the server made it.
        run: Flower's number of the run.
        node: Flower's number of the node.
    """
    end = time.monotonic() + PATIENCE
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wire:
            wire.settimeout(PATIENCE)
            wire.connect(path)
            wire.sendall(HEAD.pack(run % IDS, node % IDS, len(body)))
            wire.sendall(body)
            (length,) = LENGTH.unpack(exactly(wire, LENGTH.size, end))
            if length > MOST:
                raise Broken(f"its answer would have {length:,} bytes")
            return exactly(wire, length, end)
    except (OSError, Broken) as error:
        raise UserError(f"no gateway answers at {path} ({error}): the client's owner starts it with fednormec "
                        "federation answer.") from error  # fmt: skip


def exactly(wire: socket.socket, count: int, end: float) -> bytes:
    """Returns as many bytes as were asked for; raises Broken if they do not come before the end, by the clock here."""
    found = bytearray()
    while len(found) < count:
        left = end - time.monotonic()
        if left <= 0:
            raise Broken("it took too long")
        wire.settimeout(left)
        piece = wire.recv(min(count - len(found), 2**20))
        if not piece:
            raise Broken("the other side ended it")
        found += piece
    return bytes(found)
