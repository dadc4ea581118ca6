"""Client's end of the wire: it connects out, proves who it is, fetches requests and hands in answers.

What it computes is the program that is installed here: the server never sends code.
"""

import http.client
import json
import secrets
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from fednormec.errors import UserError, visible
from fednormec.federation.agreement import split_address
from fednormec.federation.messages import OVER, Refused, kind_of
from fednormec.federation.transport import POLL

CONNECT, SLACK = 10.0, 20.0  # seconds to connect, and beyond what the server may wait
PATIENCE = 60.0  # seconds that another process with this identity is waited for
SHORTEST, LONGEST = 0.2, 5.0  # seconds between two attempts: more and more
ATTEMPTS = 7  # in a row, after which a server that ends every connection without a word is believed
ENDED = (ssl.SSLEOFError, ConnectionResetError, BrokenPipeError, http.client.RemoteDisconnected)
MOST_SAID = 4096  # bytes of a sentence of the server's
NOT_YET, EXPIRED, OTHER_NAME = 9, 10, 62  # OpenSSL's reasons not to believe a certificate


class Server(NamedTuple):
    """Address of the server, and how to speak to it: whose certificates are believed, and which one is shown."""

    address: str
    secured: ssl.SSLContext


class Taking(NamedTuple):
    """What a client takes part with.

    Attributes:
        agreed: digest of what all must agree on.
        terms: what that is, by name.
        answer: computes the bytes of an answer from those of a request.
        most: bytes of a request, or of what is said at the end, at most.
        stop: asked whether to stop.
        tell: called with what the client's owner should know.
        end: called with what the server says at the end.
        now_and_then: called every few seconds while nothing is computed.
    """

    agreed: str
    terms: Mapping[str, Any]
    answer: Callable[[bytes], bytes]
    most: int
    stop: Callable[[], bool]
    tell: Callable[[str], None]
    end: Callable[[bytes], None] = lambda said: None
    now_and_then: Callable[[], None] = lambda: None


class _Answered(NamedTuple):
    """What the server said."""

    status: int
    body: bytes
    request: str


class _Again(Exception):
    """The connection must be made anew."""


def take_part(server: Server, mine: Taking) -> bool:
    """Answers what the server asks until the training is over (True), or somebody wants to stop (False).

    A server that is not there is waited for; one that was restarted is joined again.
    """
    instance, told, pause = secrets.token_hex(8), "", SHORTEST
    in_use: float | None = None  # since when
    ended = 0  # connections in a row that the server ended without a word
    while not mine.stop():
        reached = False
        try:
            connection = _connected(server)
            reached = True
            try:
                session = _joined(connection, mine, instance, server.address)
                ended, in_use = 0, None
                mine.tell(f"connected to {server.address}")
                told, pause = "", SHORTEST
                return _work(connection, session, mine)
            finally:
                connection.close()
        except ssl.SSLCertVerificationError as error:
            raise UserError(_not_believed(server.address, error)) from error
        except _InUse as why:
            in_use = time.monotonic() if in_use is None else in_use
            if time.monotonic() - in_use > PATIENCE:
                raise UserError(f"{why}. If the other one is yours, stop it; if it is not, somebody has this client's "
                                "key: tell the server's operator (fednormec federation revoke).") from None  # fmt: skip
            said = f"{why}; waiting for the other one to go"
        except _Again:
            said, pause = told, SHORTEST
        except (OSError, http.client.HTTPException) as error:
            ended = ended + 1 if reached and isinstance(error, ENDED) else 0
            if ended > ATTEMPTS or (isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError)):
                raise UserError(_not_let_in(server.address, error)) from error
            said = f"{server.address} does not answer; it is tried again and again"
        if said != told:
            mine.tell(said)
        told = said
        _sleep(pause * (1 + secrets.randbelow(1000) / 2000), mine.stop)
        pause = min(LONGEST, 1.7 * pause)
    return False


def ask_once(server: Server, agreed: str, terms: Mapping[str, Any]) -> float:
    """Asks the server whether it would take this client, without taking part; returns by how much its clock is ahead.

    Raises UserError if nobody answers, or if the server would not take it.
    """
    try:
        connection = _connected(server)
        try:
            begun = time.time()
            found = _post(connection, "/check", {}, json.dumps({"agreed": agreed, "terms": terms}).encode(), MOST_SAID)
            ended = time.time()
        finally:
            connection.close()
        if found.status == 200:
            return float(json.loads(found.body)["time"]) - (begun + ended) / 2
    except ssl.SSLCertVerificationError as error:
        raise UserError(_not_believed(server.address, error)) from error
    except (ssl.SSLError, *ENDED) as error:
        raise UserError(_not_let_in(server.address, error)) from error
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"nobody answers at {server.address} ({error}): is `fednormec federation serve` running there, "
                        "and can this machine reach it?") from error  # fmt: skip
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{server.address} is no server of a federation.") from None
    raise UserError(
        f"{server.address} would not take this client: {visible(found.body.decode(errors='replace'), 500)}."
    )


class _InUse(Exception):
    """Another process takes part with this identity."""


def _connected(server: Server) -> http.client.HTTPSConnection:
    host, port = split_address(server.address)
    connection = http.client.HTTPSConnection(host, port, timeout=CONNECT, context=server.secured)
    connection.connect()
    connection.timeout = POLL + SLACK  # if it is made anew
    connection.sock.settimeout(POLL + SLACK)
    return connection


def _joined(connection: http.client.HTTPSConnection, mine: Taking, instance: str, address: str) -> str:
    body = json.dumps({"instance": instance, "agreed": mine.agreed, "terms": mine.terms}).encode()
    found = _post(connection, "/join", {}, body, MOST_SAID)
    why = visible(found.body.decode(errors="replace"), MOST_SAID)
    if found.status == 409:
        raise UserError(f"the server does not take part in this training with this client: {why}. All need the same "
                        "federation.toml.")  # fmt: skip
    if found.status == 423:
        raise _InUse(why)
    if found.status in (400, 403):
        raise UserError(f"{address} refuses this client: {why}.")
    if found.status != 200:
        raise http.client.HTTPException(why)
    try:
        session = str(json.loads(found.body)["session"])
    except (ValueError, KeyError, TypeError, RecursionError):
        session = ""
    if not (session.isascii() and session.isalnum()):
        raise http.client.HTTPException("no session")
    return session


def _work(connection: http.client.HTTPSConnection, session: str, mine: Taking) -> bool:
    """Answers requests on one connection; raises what ends it."""
    while not mine.stop():
        mine.now_and_then()
        found = _post(connection, "/next", {"session": session}, b"", mine.most)
        if found.status == 204:
            continue
        if found.status == 429:
            _sleep(LONGEST, mine.stop)
            continue
        if found.status in (401, 403):
            raise _Again
        if found.status != 200:
            raise http.client.HTTPException(str(found.status))
        try:
            over = kind_of(found.body) == OVER
        except Refused:
            over = False
        if over:
            with suppress(OSError, http.client.HTTPException):
                _post(connection, "/leave", {"session": session}, b"", MOST_SAID)
            mine.end(found.body)
            return True
        answer = mine.answer(found.body)
        taken = _post(connection, "/answer", {"session": session, "request": found.request}, answer, MOST_SAID)
        if taken.status in (401, 403):
            raise _Again
    _post(connection, "/leave", {"session": session}, b"", MOST_SAID)
    return False


def _post(
    connection: http.client.HTTPSConnection, path: str, headers: dict[str, str], body: bytes, most: int
) -> _Answered:
    """Sends a request and returns what came; more than `most` bytes is taken for a broken connection."""
    connection.request("POST", path, body, headers)
    with connection.getresponse() as response:
        data = response.read(most + 1)
        if len(data) > most:
            raise http.client.HTTPException("too long")
        return _Answered(response.status, data, response.headers.get("request", ""))


def _sleep(seconds: float, stop: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not stop():
        time.sleep(min(0.1, seconds))


def _not_believed(address: str, error: ssl.SSLCertVerificationError) -> str:
    """Returns why the server's certificate is not believed, in a sentence."""
    if error.verify_code in (NOT_YET, EXPIRED):
        when = "is not valid yet" if error.verify_code == NOT_YET else "has expired"
        return (f"the certificate of {address} {when}, by the clock here ({time.strftime('%Y-%m-%d %H:%M:%S %Z')}). If "
                "that clock is right, the server's operator renews it: fednormec federation renew.")  # fmt: skip
    if error.verify_code == OTHER_NAME:
        return (f"the certificate of {address} names other addresses: take one of those, or let the operator make one "
                "for this address (fednormec federation renew --address).")  # fmt: skip
    return (f"{address} does not prove that it is the federation's server ({error.verify_message}). Is ca.crt that of "
            "this federation?")  # fmt: skip


def _not_let_in(address: str, error: Exception) -> str:
    """Returns why the server ends the connection, in a sentence."""
    reason = str(getattr(error, "reason", None) or "").replace("_", " ").lower()
    if reason.endswith("certificate expired"):
        return (f"{address} says that the certificate here has expired by the server's clock. The operator there can "
                "make a new one (federation renew).")  # fmt: skip
    if reason.endswith("unknown ca"):
        return f"{address} does not know who signed the certificate here: it is of another federation."
    if reason and not isinstance(error, ssl.SSLEOFError):
        return f"no secured connection to {address} could be made: {reason}."
    return (f"{address} ends every connection when it sees the certificate here: that is of another federation, or it "
            "has expired by the server's clock. The operator there can make a new one (federation renew).")  # fmt: skip
