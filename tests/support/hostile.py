"""Answers that no honest client gives: replies with something wrong in them, and bytes that are no reply."""

import json
import math
from collections.abc import Callable
from typing import Any

import torch

from fednormec.federation.messages import LENGTH, MOST_SAID, Reply, framed, unframed


def long_one(reply: Reply) -> Reply:
    return reply._replace(message=reply.message * (1.001 / reply.message.norm()))


HOSTILE: dict[str, Callable[[Reply], Reply]] = {
    "short": lambda reply: reply._replace(message=reply.message[:-1]),
    "long": lambda reply: reply._replace(message=torch.cat([reply.message, reply.message[:1]])),
    "narrow": lambda reply: reply._replace(message=reply.message.float()),
    "nan": lambda reply: reply._replace(message=reply.message * math.nan),
    "inf": lambda reply: reply._replace(message=reply.message + math.inf),
    "beyond the radius": long_one,
    "huge": lambda reply: reply._replace(message=reply.message * 1e300),
    "none": lambda reply: reply._replace(message=None),
    "an old round": lambda reply: reply._replace(round=reply.round - 1),
    "a round to come": lambda reply: reply._replace(round=reply.round + 1),
    "another's": lambda reply: reply._replace(nonce=b"x" * 16),
    "no status": lambda reply: reply._replace(status="fine"),
}


def _saying(**other: Any) -> Callable[[bytes], bytes]:
    """What an honest client sends, with something else said in it."""

    def change(honest: bytes) -> bytes:
        said, vectors = unframed(honest)
        return framed(said | other) + vectors

    return change


def _without(name: str) -> Callable[[bytes], bytes]:
    def change(honest: bytes) -> bytes:
        said, vectors = unframed(honest)
        return framed({key: value for key, value in said.items() if key != name}) + vectors

    return change


def _text(text: bytes) -> Callable[[bytes], bytes]:
    """This in place of what is said."""
    return lambda honest: LENGTH.pack(len(text)) + text + unframed(honest)[1]


NO_ANSWER: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda honest: b"",
    "three bytes": lambda honest: honest[:3],
    "half": lambda honest: honest[: len(honest) // 2],
    "longer than it is": lambda honest: b"\xff\xff\xff\xff" + honest[4:],
    "a list": _text(b"[]"),
    "no text": _text(b"\xff\xfe{}"),
    "brackets in brackets": _text(b"[" * 8000),
    "objects in objects": _text(b'{"a":' * 1350 + b"1" + b"}" * 1350),
    "too much said": _text(json.dumps({"why": "x" * MOST_SAID}).encode()),
    "a number of 5,000 digits": _text(b'{"round": ' + b"9" * 5000 + b"}"),
    "a round in quotes": _saying(round="1"),
    "a negative round": _saying(round=-1),
    "a broken round": _saying(round=1.0),
    "a round that is true": _saying(round=True),
    "a round that is no number": _saying(round=math.nan),
    "a nonce that is no nonce": _saying(nonce="n"),
    "no nonce": _without("nonce"),
    "no reason": _without("why"),
    "another status": _saying(status="sent"),
    "a byte more": lambda honest: honest + b"1",
}
