"""Bytes in Flower's messages: one record with one entry, both ways."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict

RECORD, BODY = "fednormec", "body"


def record_of(body: bytes) -> "RecordDict":
    """Returns the content of a message that carries these bytes."""
    from flwr.app import ConfigRecord, RecordDict

    return RecordDict({RECORD: ConfigRecord({BODY: body})})


def body_in(message: "Message") -> bytes | None:
    """Returns the bytes that a message carries; None if it carries none, or an error."""
    from flwr.app import ConfigRecord

    record = message.content.get(RECORD) if message.has_content() else None
    body = record.get(BODY) if isinstance(record, ConfigRecord) else None
    return body if isinstance(body, bytes) else None
