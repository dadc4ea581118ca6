"""Requests and replies between server and client, as bytes: what is said, in JSON, and then the vectors.

All that comes from the other side is checked here, and what is anything else than it should be is `Refused`. The stages
of secure aggregation have bytes of their own, which go here in an envelope.
"""

import hashlib
import json
import re
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fednormec.errors import visible

TRAIN, REPORT, OVER = "train", "report", "over"
STAGES = ("keys", "shares", "masked", "agree", "unmask")  # of secure aggregation
DONE, LOST, REFUSED, MISSED = "done", "lost", "refused", "missed"
NUMPY: dict[torch.dtype, str] = {torch.float32: "<f4", torch.float64: "<f8"}
MOST_TEXT = 300  # characters of another party's sentence that are repeated
MOST_SAID = 8192  # bytes of what is said beside the vectors
LENGTH = struct.Struct(">I")
Said = dict[str, Any]
Value = TypeVar("Value", int, str, bool, float)


class Refused(Exception):
    """Reason why a request or a reply is not taken."""


class Request(NamedTuple):
    """Request of the server to a client in a round.

    Attributes:
        run: name of the training.
        agreed: digest of its settings.
        round: number of the round.
        base: the last round of this client that counts in what the server remembers, 0 if none does: the client
            computes from its memory after that round.
        sends: whether it is to send its message; otherwise it only moves its memory.
        nonce: known to this client alone; its answer repeats it.
        x: the model.
        memory: the server's memory, for methods whose clients need it.
    """

    run: str
    agreed: str
    round: int
    base: int
    sends: bool
    nonce: bytes
    x: Tensor
    memory: Tensor | None = None

    @property
    def digest(self) -> str:
        """Digest of what is to be computed, under which agreement: whoever asks the same again gets the same answer."""
        found = hashlib.sha256(f"{self.agreed}/{self.run}/{self.round}/{self.base}/".encode())
        for vector in (self.x, self.memory):
            found.update(b"" if vector is None else packed(vector))
        return found.hexdigest()


class Reply(NamedTuple):
    """Reply of a client to a request.

    Attributes:
        round: the round that it is of; if the memory was lost, the last round after which the client has one.
        nonce: the nonce of the request.
        status: done, lost (its memory is not the one after `base`) or refused.
        why: a sentence why it was refused.
        message: the message, if it was to be sent.
        left_out: whether what the client computed was not finite, so that its message is zero. It says nothing of this
            where the server is not trusted with a client's data.
    """

    round: int
    nonce: bytes
    status: str = DONE
    why: str = ""
    message: Tensor | None = None
    left_out: bool = False


class StageReply(NamedTuple):
    """Answer of a client at a stage of secure aggregation.

    Attributes:
        nonce: the nonce of the attempt.
        status: done, lost (its memory is not the one that was asked for) or refused.
        why: a sentence why it was refused.
        round: if the memory was lost, the last round after which the client has one.
        body: what secure aggregation answers.
    """

    nonce: bytes
    status: str = DONE
    why: str = ""
    round: int = 0
    body: bytes = b""


class Report(NamedTuple):
    """Answer of a client that is asked how good a model is.

    Attributes:
        nonce: the nonce of the request.
        status: done or refused.
        why: a sentence why it was refused.
        name: name of the figure.
        value: the figure, on the examples that the client holds out.
    """

    nonce: bytes
    status: str = DONE
    why: str = ""
    name: str = ""
    value: float = 0.0


def packed(vector: Tensor) -> bytes:
    """Returns the numbers one after another, little end first."""
    return vector.detach().cpu().contiguous().numpy().astype(NUMPY[vector.dtype], copy=False).tobytes()


def unpacked(data: bytes, size: int, dtype: torch.dtype, what: str) -> Tensor:
    """Returns as many finite numbers of this kind as there should be; raises Refused for anything else.

    >>> unpacked(packed(torch.ones(3)), 3, torch.float32, "the message").tolist()
    [1.0, 1.0, 1.0]
    """
    expected = size * dtype.itemsize
    if len(data) != expected:
        raise Refused(f"{what} has {len(data)} bytes, not the {expected} of {size} numbers in {dtype}")
    vector = torch.from_numpy(np.frombuffer(data, NUMPY[dtype]).astype(NUMPY[dtype].replace("<", "=")))
    if not bool(vector.isfinite().all()):
        raise Refused(f"{what} is not finite")
    return vector


def framed(said: Said, *vectors: Tensor) -> bytes:
    """Returns what is said and the vectors as bytes."""
    text = json.dumps(said).encode()
    return b"".join([LENGTH.pack(len(text)), text, *map(packed, vectors)])


def unframed(data: bytes, most: int = MOST_SAID) -> tuple[Said, bytes]:
    """Returns what is said, in `most` bytes, and those of the vectors; raises Refused if it is nothing of that kind.

    >>> unframed(framed({"kind": "over"}, torch.zeros(1)))
    ({'kind': 'over'}, b'\\x00\\x00\\x00\\x00')
    """
    if len(data) < LENGTH.size:
        raise Refused("it is no message")
    (length,) = LENGTH.unpack_from(data)
    end = LENGTH.size + length
    if length > most or end > len(data):
        raise Refused("it is no message")
    try:
        said = json.loads(data[LENGTH.size : end].decode(), parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise Refused("it is no message") from None
    if not isinstance(said, dict):
        raise Refused("it is no message")
    return said, data[end:]


def request_bytes(request: Request, kind: str = TRAIN, attempt: int = 0, cohort: Iterable[int] = ()) -> bytes:
    """Returns a request as bytes; `kind` is train, report, or the first stage of an attempt at a sum over a cohort."""
    said: Said = {name: getattr(request, name) for name in ("run", "agreed", "round", "base", "sends")}
    if kind == STAGES[0]:
        said |= {"attempt": attempt, "cohort": f"{sum(1 << client for client in cohort):x}"}
    vectors = [request.x] if request.memory is None else [request.x, request.memory]
    return framed({"kind": kind, "nonce": request.nonce.hex(), **said}, *vectors)


def cohort_in(data: bytes, clients: int) -> tuple[int, tuple[int, ...]]:
    """Returns the number of the attempt and the clients of its cohort; raises Refused if they cannot be."""
    said, _ = unframed(data)
    text = _value(said, "cohort", str)
    if not re.fullmatch("[0-9a-f]+", text) or len(text) > clients // 4 + 1 or int(text, 16) >> clients:
        raise Refused("its cohort is not of this roster")
    marks = int(text, 16)
    return _count(said, "attempt"), tuple(client for client in range(clients) if marks >> client & 1)


def stage_bytes(kind: str, nonce: bytes, body: bytes) -> bytes:
    """Returns a request of a later stage of secure aggregation as bytes."""
    return framed({"kind": kind, "nonce": nonce.hex()}) + body


def read_stage(data: bytes) -> tuple[str, bytes, bytes]:
    """Returns the stage, the nonce of the attempt and what is said in it; raises Refused if it is no such request."""
    said, body = unframed(data)
    kind = _value(said, "kind", str)
    if kind not in STAGES:
        raise Refused("nobody knows what is asked for")
    return kind, _nonce(said), body


def stage_reply_bytes(reply: StageReply) -> bytes:
    """Returns the answer at a stage as bytes: of one that is done, few besides its body."""
    said: Said = {"nonce": reply.nonce.hex(), "status": reply.status}
    if reply.status != DONE:
        said |= {"why": reply.why[:MOST_TEXT], "round": reply.round}
    return framed(said) + reply.body


def read_stage_reply(data: bytes) -> StageReply:
    """Returns the answer at a stage that was sent; raises Refused if it is none."""
    said, body = unframed(data)
    status = _value(said, "status", str)
    if status == DONE:
        return StageReply(_nonce(said), DONE, body=body)
    if status not in (LOST, REFUSED):
        raise Refused("its status is unknown")
    return StageReply(_nonce(said), status, visible(_value(said, "why", str), MOST_TEXT), _count(said, "round"))


def read_request(data: bytes, size: int, memory: int, dtype: torch.dtype) -> Request:
    """Returns the request that was sent; raises Refused if it is none that this client expects.

    Args:
        data: what came.
        size: number of numbers in the model.
        memory: number of numbers in the server's memory, 0 for none.
        dtype: type of both.
    """
    said, vectors = unframed(data)
    first, rest = vectors[: size * dtype.itemsize], vectors[size * dtype.itemsize :]
    if rest and not memory:
        raise Refused("it has more vectors than there should be")
    return Request(
        _value(said, "run", str), _value(said, "agreed", str), _count(said, "round"), _count(said, "base"),
        _value(said, "sends", bool), _nonce(said), unpacked(first, size, dtype, "the model"),
        unpacked(rest, memory, dtype, "the server's memory") if memory else None,
    )  # fmt: skip


def reply_bytes(reply: Reply) -> bytes:
    """Returns a reply as bytes."""
    said = {name: getattr(reply, name) for name in ("round", "status", "why", "left_out")}
    vectors = [] if reply.message is None else [reply.message]
    return framed({"nonce": reply.nonce.hex(), **said, "why": reply.why[:MOST_TEXT]}, *vectors)


def read_reply(data: bytes, size: int, dtype: torch.dtype) -> Reply:
    """Returns the reply that was sent, with or without a message of `size` numbers; raises Refused if it is none."""
    said, vectors = unframed(data)
    message = unpacked(vectors, size, dtype, "the message") if vectors else None
    status, why = _value(said, "status", str), visible(_value(said, "why", str), MOST_TEXT)
    if status not in (DONE, LOST, REFUSED):
        raise Refused("its status is unknown")
    return Reply(_count(said, "round"), _nonce(said), status, why, message, _value(said, "left_out", bool))


def report_bytes(report: Report) -> bytes:
    """Returns a report as bytes."""
    return framed(report._asdict() | {"nonce": report.nonce.hex(), "why": report.why[:MOST_TEXT]})


def read_report(data: bytes) -> Report:
    """Returns the report that was sent; raises Refused if it is none."""
    said, _ = unframed(data)
    status, why = _value(said, "status", str), visible(_value(said, "why", str), MOST_TEXT)
    if status not in (DONE, REFUSED):
        raise Refused("its status is unknown")
    name, value = visible(_value(said, "name", str), MOST_TEXT), _value(said, "value", float)
    return Report(_nonce(said), status, why, name, value)


def kind_of(data: bytes) -> str:
    """Returns what a client is asked for: train, report, a stage or over; raises Refused if it is nothing of it."""
    kind = _value(unframed(data)[0], "kind", str)
    if kind not in (TRAIN, REPORT, OVER, *STAGES):
        raise Refused("nobody knows what is asked for")
    return kind


def _no_number(name: str) -> float:
    raise ValueError(name)


def _value(said: Said, name: str, kind: type[Value]) -> Value:
    found: Any = said.get(name)
    if type(found) is not kind:
        raise Refused(f"its {name} is missing, or not what it should be")
    value: Value = found
    return value


def _nonce(said: Said) -> bytes:
    try:
        return bytes.fromhex(_value(said, "nonce", str))
    except ValueError:
        raise Refused("its nonce is missing, or not what it should be") from None


def _count(said: Said, name: str) -> int:
    found = _value(said, name, int)
    if not 0 <= found <= 10**9:
        raise Refused(f"its {name} is {found}")
    return found
