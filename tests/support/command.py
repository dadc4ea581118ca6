"""The command line as tests use it: how it is called, what a mistake is told, and a port to serve on."""

import socket
from collections.abc import Callable
from typing import NamedTuple


class Said(NamedTuple):
    code: object
    out: str
    err: str


Command = Callable[..., Said]


def sets(*overrides: str) -> list[str]:
    return [argument for override in overrides for argument in ("--set", override)]


def sentence(err: str) -> str:
    """What a mistake is told: one line."""
    assert err.startswith("fednormec: ")
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1
    return err.removeprefix("fednormec: ").strip()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
