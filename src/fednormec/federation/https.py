"""Small HTTP server on asyncio and h11, with TLS, for peers that must not be trusted.

Nothing of a request's body is read before its path and its sender are known. Every read and write has an end in time,
every length one in bytes. Who has not finished its handshake holds one of a few places, for a few seconds.
"""

import asyncio
import ipaddress
import socket
import ssl
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

import h11

from fednormec.errors import UserError

HEAD = 16 * 1024  # bytes of a request's head, at most
HANDSHAKE, BEGUN, IDLE = 8.0, 10.0, 60.0  # seconds for a handshake, for a head that has begun, between two requests
GOODBYE = 2.0  # seconds for the end of a secured connection
GRACE, SLOWEST = 20.0, 20_000.0  # seconds that a body may take, and bytes in each second after these
STRANGERS = 200  # connections that have not finished their handshake, at most
EACH = 4  # connections with one certificate, at most
NEW, BURST = 100.0, 1000.0  # new connections from one address in a second, and how many may come at once
TOO_MANY = "there are too many connections with this client's certificate"
SOURCES = 4096  # addresses whose connections are counted, at most
ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # a peer that is gone is noticed in 35 seconds
SPARE = 128  # file handles that are left for the rest of the program
AT_ONCE = 100  # connections that are accepted before anything else is done
CHUNK = 2**16
Result = TypeVar("Result")
JSON, TEXT, BYTES = "application/json", "text/plain; charset=utf-8", "application/octet-stream"


class Answer(NamedTuple):
    """Answer to a request.

    Attributes:
        status: its status.
        body: its body.
        kind: of what type the body is.
        headers: more headers.
        idle: seconds after which the next request must have begun; None: IDLE.
    """

    status: int = 200
    body: bytes = b""
    kind: str = BYTES
    headers: tuple[tuple[str, str], ...] = ()
    idle: float | None = None


class TooLong(Exception):
    """Body that is longer than it may be, or of unknown length."""


class Call:
    """Request of which only the head has been read.

    Attributes:
        address: where it comes from, host:port.
        certificate: certificate that the peer has shown, in DER; None without TLS.
        method: such as POST.
        path: such as /next.
        headers: values by their names in lower case.
        gone: set when the peer has hung up.
    """

    def __init__(self, connection: "_Connection", request: h11.Request) -> None:
        self.address, self.certificate, self.gone = connection.address, connection.certificate, connection.gone
        self.method, self.path = request.method.decode("ascii"), request.target.decode("ascii", "replace")
        self.headers = {name.decode("ascii"): value.decode("latin-1") for name, value in request.headers}
        self._connection = connection

    async def body(self, most: int) -> bytes:
        """Reads the body; raises TooLong, before anything is read, if it can have more than `most` bytes."""
        length = self.headers.get("content-length", "0")
        whole = length.isascii() and length.isdecimal() and "transfer-encoding" not in self.headers
        if not whole or int(length) > most:
            raise TooLong
        return await asyncio.wait_for(self._connection.body(), GRACE + int(length) / SLOWEST)


Handler = Callable[[Call], Awaitable[Answer]]
Closed = Callable[[str], None]
TurnedAway = Callable[[str, bytes | None, str], None]


class Listen(NamedTuple):
    """Address to listen on, and the TLS settings; None: without TLS."""

    host: str
    port: int
    secured: ssl.SSLContext | None = None


class _Protocol(asyncio.StreamReaderProtocol):
    """Protocol that says when the peer has hung up, also while nobody reads."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self.gone = asyncio.Event()

    def eof_received(self) -> bool | None:
        self.gone.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        super().connection_lost(exc)


class _Plain:
    """Bytes to and from a peer as they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self) -> bytes:
        """Returns what has come, some bytes at least; none if the peer has ended."""
        return await self._reader.read(CHUNK)

    async def write(self, content: bytes) -> None:
        """Sends these bytes, or leaves as few of them to be sent as the system asks for."""
        self._writer.write(content)
        await self._writer.drain()

    async def close(self) -> None:
        """Says goodbye."""


class _Secured(_Plain):
    """Bytes to and from a peer through TLS. asyncio's own keeps 256 kB for each connection; this as much as a piece."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext) -> None:
        super().__init__(reader, writer)
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)

    async def handshake(self) -> bytes:
        """Shakes hands and returns the certificate that the peer has shown, in DER; raises OSError if it has none."""
        await self._until(self._tls.do_handshake)
        return self._tls.getpeercert(True) or b""

    async def read(self) -> bytes:
        try:
            return await self._until(lambda: self._tls.read(CHUNK))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""

    async def write(self, content: bytes) -> None:
        for start in range(0, len(content), CHUNK):
            self._tls.write(content[start : start + CHUNK])
            await self._flush()

    async def close(self) -> None:
        with suppress(OSError):  # it waits for no answer
            self._tls.unwrap()
        await self._flush()

    async def _until(self, step: Callable[[], Result]) -> Result:
        """Returns the result of a step of TLS, once enough has come for it; what it has to say leaves in any case."""
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                pass
            finally:
                await self._flush()
            found = await self._reader.read(CHUNK)
            self._in.write(found) if found else self._in.write_eof()

    async def _flush(self) -> None:
        if self._out.pending:
            await super().write(self._out.read())


class _Connection:
    """Connection of a peer, and the requests on it, one after another."""

    def __init__(self, wire: _Plain, address: str, certificate: bytes | None, gone: asyncio.Event) -> None:
        self._wire, self.address, self.certificate, self.gone = wire, address, certificate, gone
        self._http = h11.Connection(h11.SERVER, HEAD)

    async def serve(self, handler: Handler) -> None:
        """Answers requests until the peer goes, breaks the rules or is too slow."""
        idle = IDLE
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await asyncio.wait_for(self._wire.read(), idle))
                event = await asyncio.wait_for(self._event(), BEGUN)
            if not isinstance(event, h11.Request):
                return
            try:
                answer = await handler(Call(self, event))
            except TooLong:
                answer = Answer(413, b"the body is too long, or of unknown length", TEXT)
            # what the handler did not want is not read: the connection ends, unless there is nothing left of it
            unread = self._http.their_state is h11.SEND_BODY and type(self._http.next_event()) is not h11.EndOfMessage
            await asyncio.wait_for(self._send(answer, unread), GRACE + len(answer.body) / SLOWEST)
            if unread or self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return
            self._http.start_next_cycle()
            idle = IDLE if answer.idle is None else answer.idle

    async def turn_away(self, answer: Answer) -> None:
        """Gives an answer whatever is asked, and ends the connection."""
        with suppress(TimeoutError):
            self._http.receive_data(await asyncio.wait_for(self._wire.read(), GOODBYE))
            if isinstance(self._http.next_event(), h11.Request):
                await asyncio.wait_for(self._send(answer, True), GOODBYE)

    async def body(self) -> bytes:
        """Reads what is left of a request."""
        parts = []
        while True:
            event = await self._event()
            if isinstance(event, h11.Data):
                parts.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                return b"".join(parts)
            else:
                raise ConnectionError

    async def _event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event
            self._http.receive_data(await self._wire.read())

    async def _send(self, answer: Answer, last: bool) -> None:
        head = [("content-type", answer.kind), ("content-length", str(len(answer.body))), ("cache-control", "no-store")]
        head += [*answer.headers]
        head += [("connection", "close")] if last else []
        for event in (
            h11.Response(status_code=answer.status, headers=head),
            *([h11.Data(data=answer.body)] if answer.body else []),
            h11.EndOfMessage(),
        ):
            await self._wire.write(self._http.send(event) or b"")


class Hear(NamedTuple):
    """What hears of connections.

    Attributes:
        closed: called with the address of a connection that has ended.
        turned_away: called with the address and the certificate, if one was believed, of a connection that was turned
            away, and why.
    """

    closed: Closed = lambda address: None
    turned_away: TurnedAway = lambda address, certificate, why: None


class _Listener:
    """Accepts connections, few of strangers, and serves each in a task of its own."""

    def __init__(self, handler: Handler, listen: Listen, listening: socket.socket, hear: Hear) -> None:
        self._handler, self._secured, self._socket, self._hear = handler, listen.secured, listening, hear
        self._strangers = OrderedDict[int, tuple[str, socket.socket]]()
        self._sources = OrderedDict[str, tuple[float, float]]()  # connections that may come now, and when that was
        self._peers = dict["asyncio.Task[None]", socket.socket]()
        self._served = set[socket.socket]()
        self._number, self._ended = 0, False
        self._of_each = Counter[bytes]()
        self._most = max(16, _file_handles() - SPARE)

    async def run(self, stopped: asyncio.Event) -> None:
        """Serves until `stopped` is set."""
        self._listen()
        await stopped.wait()
        self._ended = True
        asyncio.get_running_loop().remove_reader(self._socket)
        for peer in self._peers.values():
            _hang_up(peer)
        if self._peers:
            await asyncio.wait(self._peers, timeout=2.0)
        for task in self._peers:
            task.cancel()
        await asyncio.gather(*self._peers, return_exceptions=True)
        await asyncio.sleep(0.05)  # for what transports do at their end

    def _listen(self) -> None:
        if not self._ended:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        """Accepts who waits at the port."""
        for _ in range(AT_ONCE):
            try:
                peer, (host, *_) = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:  # too many file handles: some are about to be closed
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._socket)
                loop.call_later(0.1, self._listen)
                return
            source = _source(host)
            if not self._may_come(source) or len(self._peers) >= self._most:
                peer.close()
                continue
            peer.setblocking(False)
            self._number += 1
            task = asyncio.create_task(self._serve(self._number, peer))
            self._peers[task], self._strangers[self._number] = peer, (source, peer)
            task.add_done_callback(self._forget)
            if len(self._strangers) > STRANGERS:
                self._make_room()

    def _forget(self, task: "asyncio.Task[None]") -> None:
        peer = self._peers.pop(task)
        if peer not in self._served:  # cancelled before it began
            peer.close()
        self._served.discard(peer)

    def _make_room(self) -> None:
        """Hangs up the oldest stranger of the address that has most of them."""
        (most, _), *_ = Counter(source for source, _ in self._strangers.values()).most_common(1)
        number = next(number for number, (source, _) in self._strangers.items() if source == most)
        _hang_up(self._strangers.pop(number)[1])

    def _may_come(self, source: str) -> bool:
        """Returns whether one more connection from there may come now: at most so many in a second, in the long run."""
        now = time.monotonic()
        tokens, filled = self._sources.pop(source, (BURST, now))
        tokens = min(BURST, tokens + NEW * (now - filled))
        self._sources[source] = (max(tokens - 1, 0.0) if tokens >= 1 else tokens, now)
        if len(self._sources) > SOURCES:
            self._sources.popitem(last=False)
        return tokens >= 1

    async def _serve(self, number: int, peer: socket.socket) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(CHUNK)
        protocol = _Protocol(reader)
        transport: asyncio.BaseTransport | None = None
        certificate: bytes | None = None
        connection: _Connection | None = None
        self._served.add(peer)
        try:
            _keep_alive(peer)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            host, port, *_ = peer.getpeername()
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, peer)
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            wire = _Plain(reader, writer)
            if self._secured is not None:
                wire = secured = _Secured(reader, writer, self._secured)
                certificate = await asyncio.wait_for(secured.handshake(), HANDSHAKE)
                self._of_each[certificate] += 1
            self._strangers.pop(number, None)
            connection = _Connection(wire, f"{host}:{port}", certificate, protocol.gone)
            if certificate is not None and self._of_each[certificate] > EACH:
                self._hear.turned_away(connection.address, certificate, TOO_MANY)
                await connection.turn_away(Answer(423, TOO_MANY.encode(), TEXT))
            else:
                await connection.serve(self._handler)
            await asyncio.wait_for(wire.close(), GOODBYE)
        except ssl.SSLError as error:
            if "CERTIFICATE" in (reason := str(error.reason)):  # none, an expired one, one of another federation
                why = reason.replace("_", " ").lower()
                detail = f" ({error.verify_message})" if isinstance(error, ssl.SSLCertVerificationError) else ""
                self._hear.turned_away(f"{host}:{port}", None, f"{why}{detail}")
        except (OSError, TimeoutError, h11.ProtocolError, ConnectionError, ValueError):
            pass  # a peer that broke off, broke the rules or was too slow
        finally:
            self._strangers.pop(number, None)
            if certificate is not None:
                self._of_each[certificate] -= 1
                if not self._of_each[certificate]:
                    del self._of_each[certificate]
            if connection is not None:
                self._hear.closed(connection.address)
            if transport is not None:
                transport.close()


def _source(host: str) -> str:
    """Returns whose connections are counted together: those of one address, or of one network of version 6.

    >>> _source("192.0.2.1"), _source("2001:db8:1:2:3::4")
    ('192.0.2.1', '2001:db8:1:2::/64')
    """
    return str(ipaddress.ip_network(f"{host.partition('%')[0]}/64", strict=False)) if ":" in host else host


def _keep_alive(peer: socket.socket) -> None:
    """Has the system ask a silent peer whether it is still there, where the system can be told how often."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in ALIVE.items():
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _hang_up(peer: socket.socket) -> None:
    """Ends a connection; whoever reads from it or writes to it sees that."""
    with suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)


def _file_handles() -> int:
    """Returns how many file handles this process may have, after asking for as many as it can get."""
    try:
        import resource
    except ImportError:  # not on Windows
        return 512
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return 65_536 if soft == resource.RLIM_INFINITY else soft


@contextmanager
def listening(
    handler: Handler, listen: Listen, also: Callable[[], Awaitable[None]] | None = None, hear: Hear | None = None
) -> Iterator[int]:
    """Serves in a thread of its own until the context ends; gives the port.

    Args:
        handler: answers requests; runs in that thread's event loop.
        listen: where.
        also: what else runs in that loop, until it is cancelled.
        hear: what is called there with connections that ended or were turned away.
    """
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    try:
        sock = socket.create_server((listen.host, listen.port), family=family, backlog=1024)
    except OSError as error:
        raise UserError(f"nothing can listen on {listen.host}:{listen.port}: {error.strerror or error}.") from error
    sock.setblocking(False)
    started, ended = threading.Event(), list[Callable[[], object]]()

    async def main() -> None:
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()
        ended.append(lambda: loop.call_soon_threadsafe(stopped.set))
        beside = None if also is None else asyncio.ensure_future(also())
        started.set()
        await _Listener(handler, listen, sock, hear or Hear()).run(stopped)
        if beside is not None:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="https", daemon=True)
    thread.start()
    started.wait()
    try:
        yield sock.getsockname()[1]
    finally:
        ended[0]()
        thread.join(timeout=5)
        sock.close()
