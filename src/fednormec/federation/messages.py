"""Requests and replies between server and client, as bytes: a vector, and what it belongs to.

All that comes from the other side is checked here, and what is anything else than it should be is `Refused`. A secure
aggregation would have its place here: it sends a masked vector in place of the message.
"""

import hashlib
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from fednormec.errors import visible

ABOUT, VECTORS = "about", "vectors"
DONE, LOST, REFUSED = "done", "lost", "refused"
NUMPY: dict[torch.dtype, str] = {torch.float32: "<f4", torch.float64: "<f8"}
MOST_TEXT = 300  # characters of another party's sentence that are repeated
Value = TypeVar("Value", int, str, bytes, bool, float)


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
        """Digest of what is to be computed: whoever asks the same again gets the same answer."""
        found = hashlib.sha256(f"{self.run}/{self.round}/{self.base}/".encode())
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
    """

    round: int
    nonce: bytes
    status: str = DONE
    why: str = ""
    message: Tensor | None = None


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


def request_record(request: Request) -> RecordDict:
    """Returns a request for Flower, its vectors apart from what differs between clients.

    Flower keeps one copy of what is the same for all.
    """
    about = {name: getattr(request, name) for name in ("run", "agreed", "round", "base", "sends", "nonce")}
    vectors = {"x": request.x} if request.memory is None else {"x": request.x, "memory": request.memory}
    whole = ConfigRecord({name: packed(vector) for name, vector in vectors.items()})
    return RecordDict({ABOUT: ConfigRecord(about), VECTORS: whole})


def read_request(content: RecordDict, size: int, memory: int, dtype: torch.dtype) -> Request:
    """Returns the request that was sent; raises Refused if it is none that this client expects.

    Args:
        content: what came.
        size: number of numbers in the model.
        memory: number of numbers in the server's memory, 0 for none.
        dtype: type of both.
    """
    about, vectors = _record(content, ABOUT), _record(content, VECTORS)
    return Request(
        _value(about, "run", str), _value(about, "agreed", str), _count(about, "round"), _count(about, "base"),
        _value(about, "sends", bool), _value(about, "nonce", bytes),
        unpacked(_value(vectors, "x", bytes), size, dtype, "the model"),
        unpacked(_value(vectors, "memory", bytes), memory, dtype, "the server's memory") if memory else None,
    )  # fmt: skip


def reply_record(reply: Reply) -> RecordDict:
    """Returns a reply for Flower."""
    about = {name: getattr(reply, name) for name in ("round", "nonce", "status", "why")}
    vectors = {} if reply.message is None else {"message": packed(reply.message)}
    return RecordDict({ABOUT: ConfigRecord(about | vectors)})


def read_reply(content: RecordDict, size: int, dtype: torch.dtype) -> Reply:
    """Returns the reply that was sent, with or without a message of `size` numbers; raises Refused if it is none."""
    about = _record(content, ABOUT)
    message = unpacked(_value(about, "message", bytes), size, dtype, "the message") if "message" in about else None
    status, why = _value(about, "status", str), visible(_value(about, "why", str), MOST_TEXT)
    if status not in (DONE, LOST, REFUSED):
        raise Refused("its status is unknown")
    return Reply(_count(about, "round"), _value(about, "nonce", bytes), status, why, message)


def report_record(report: Report) -> RecordDict:
    """Returns a report for Flower."""
    return RecordDict({ABOUT: ConfigRecord(report._asdict())})


def read_report(content: RecordDict) -> Report:
    """Returns the report that was sent; raises Refused if it is none."""
    about = _record(content, ABOUT)
    status, why = _value(about, "status", str), visible(_value(about, "why", str), MOST_TEXT)
    if status not in (DONE, REFUSED):
        raise Refused("its status is unknown")
    name, value = visible(_value(about, "name", str), MOST_TEXT), _value(about, "value", float)
    return Report(_value(about, "nonce", bytes), status, why, name, value)


def _record(content: RecordDict, name: str) -> ConfigRecord:
    found: Any = content.get(name)
    if not isinstance(found, ConfigRecord):
        raise Refused(f"it has no record '{name}'")
    return found


def _value(record: ConfigRecord, name: str, kind: type[Value]) -> Value:
    found: Any = record.get(name)
    if type(found) is not kind:
        raise Refused(f"its {name} is missing, or not what it should be")
    value: Value = found
    return value


def _count(record: ConfigRecord, name: str) -> int:
    found = _value(record, name, int)
    if not 0 <= found <= 10**9:
        raise Refused(f"its {name} is {found}")
    return found
