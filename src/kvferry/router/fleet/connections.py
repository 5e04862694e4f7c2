# SPDX-License-Identifier: Apache-2.0
"""Connections to engines: HTTP/1.1, straight on asyncio.

h11 writes requests and reads heads of answers. Bodies are read here: a stream has a chunk for every
token, for each of which h11 takes as long as all the rest of this module.

Requests of clients use `EngineTransport.ask`. Probes and the like use httpx on the same
connections: its requests, answers and layers of iterators take as long as all the rest here.

httpx's own transport looks at every connection for each request, and takes locks that a cancelled
request may never give back. Here a connection belongs to one request at a time, so there is nothing
to lock:

    request       the newest idle connection of the engine, or a new one
    whole answer  the connection is idle again, if both sides keep it
    anything else (an error, a cancelled request, a client that leaves in the middle of an answer)
                  the connection is closed at once, and the engine aborts

An idle connection that its engine closes, or on which it sends anything, is forgotten. Answers are
read as fast as their client takes them.
"""

from __future__ import annotations

import asyncio
import math
import re
import select
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass

import h11
import httpx

from kvferry.router.api import Headers

_MAX_HEAD_BYTES = 100 << 10  # of an answer, and of a line between two chunks
_MOST_UNREAD_BYTES = 64 << 10  # of an answer; then the engine has to wait
# Read at a time. asyncio reads 256 KiB, and several such pieces would wait for every slow client.
_READ_BYTES = 32 << 10
_SMALL_BYTES = 64 << 10  # bodies that are sent with their head; larger ones are not copied
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")


@dataclass(frozen=True, slots=True)
class EngineOrigin:
    """Where a server listens."""

    host: str
    port: int
    secure: bool

    @classmethod
    def of(cls, url: httpx.URL) -> EngineOrigin:
        secure = url.scheme == "https"
        # raw_host: as it is on the wire, also for names that are not ASCII.
        return cls(url.raw_host.decode(), url.port or (443 if secure else 80), secure)


class EngineTransport(httpx.AsyncBaseTransport):
    """Sends requests of one event loop."""

    def __init__(
        self, tls: ssl.SSLContext, most_idle: int, idle_seconds: float, connect_seconds: float
    ) -> None:
        self._tls = tls
        self._most_idle = most_idle
        self._idle_seconds = idle_seconds
        self._connect_seconds = connect_seconds
        self._idle: dict[EngineOrigin, dict[_Connection, None]] = {}  # the newest is last
        self._idle_count = 0
        self._all: set[_Connection] = set()

    @property
    def open_count(self) -> int:
        return len(self._all)

    @property
    def idle_count(self) -> int:
        return self._idle_count

    async def ask(
        self,
        origin: EngineOrigin,
        method: bytes,
        target: bytes,
        headers: Headers,
        body: bytes,
        until: float = math.inf,
    ) -> EngineAnswer:
        """The head of an answer, whose body is read from it. `headers` are sent as they are.

        Raises what httpx does, and TimeoutError `until`, in the loop's time. A connection has
        `connect_seconds` in any case.
        """
        connection = self._take(origin) or await self._connect(origin)
        try:
            connection.send(method, target, headers, body)
            head = await connection.head(until)
        except BaseException:
            connection.close()
            raise
        return EngineAnswer(head.status_code, head.headers.raw_items(), connection)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.AsyncByteStream)
        body = b"".join([part async for part in request.stream])
        url, method = request.url, request.method.encode()
        got = await self.ask(EngineOrigin.of(url), method, url.raw_path, request.headers.raw, body)
        return httpx.Response(got.status, headers=got.headers, stream=_Stream(got))

    async def aclose(self) -> None:
        for connection in list(self._all):
            connection.close()

    def _take(self, origin: EngineOrigin) -> _Connection | None:
        while idle := self._idle.get(origin):
            connection = next(reversed(idle))
            self._not_idle(connection)
            if not connection.spoiled():
                return connection
            connection.close()
        return None

    async def _connect(self, origin: EngineOrigin) -> _Connection:
        try:
            async with asyncio.timeout(self._connect_seconds):
                # Without happy_eyeballs_delay, which leaves sockets open when it is cancelled.
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self, origin),
                    origin.host.strip("[]"),
                    origin.port,
                    ssl=self._tls if origin.secure else None,
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"no connection in {self._connect_seconds:g} s") from error
        except OSError as error:  # also an SSLError
            raise httpx.ConnectError(str(error)) from error
        return connection

    # Called by connections

    def opened(self, connection: _Connection) -> None:
        self._all.add(connection)

    def lost(self, connection: _Connection) -> None:
        self._not_idle(connection)
        self._all.discard(connection)

    def free(self, connection: _Connection) -> None:
        """A connection has brought its answer, and can bring another one."""
        if self._idle_count >= self._most_idle:
            connection.close()
            return
        self._idle.setdefault(connection.origin, {})[connection] = None
        self._idle_count += 1
        loop = asyncio.get_running_loop()
        connection.expiry = loop.call_later(self._idle_seconds, connection.close)

    def _not_idle(self, connection: _Connection) -> None:
        if connection.expiry is None:
            return
        connection.expiry.cancel()
        connection.expiry = None
        idle = self._idle[connection.origin]
        del idle[connection]
        self._idle_count -= 1
        if not idle:
            del self._idle[connection.origin]


class _Connection(asyncio.Protocol):
    def __init__(self, pool: EngineTransport, origin: EngineOrigin) -> None:
        self.origin = origin
        self.expiry: asyncio.TimerHandle | None = None  # while it is idle
        self._pool = pool
        self._body: _Body | None = None  # once the head has come
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._ended = False  # the engine sends nothing more
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    # By asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if hasattr(transport, "max_size"):  # asyncio's own transports without TLS
            transport.max_size = _READ_BYTES
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        if self.expiry is not None:  # nobody has asked
            self.close()
            return
        self._unread.append(data)
        self._unread_bytes += len(data)
        if self._unread_bytes > _MOST_UNREAD_BYTES:
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        self._ended = True
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._ended, self._error = True, error
        self._pool.lost(self)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # By the one request that has it

    def spoiled(self) -> bool:
        """Whether an idle connection has ended, perhaps a moment ago, before the loop saw it."""
        if self._ended or self._transport.is_closing():
            return True
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def send(
        self, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> None:
        """Raises httpx.LocalProtocolError if this is no HTTP."""
        self._body = None
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        try:
            request = h11.Request(method=method, target=target, headers=headers)
            parts = [self._h11.send(request)]
            if body:
                parts.append(self._h11.send(h11.Data(data=body)))
            parts.append(self._h11.send(h11.EndOfMessage()))
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error)) from error
        if len(body) <= _SMALL_BYTES:
            parts = [b"".join(part for part in parts if part)]
        for part in parts:
            if part:
                self._transport.write(part)

    async def head(self, until: float) -> h11.Response:
        """Raises httpx.RemoteProtocolError."""
        try:
            while not isinstance(event := self._h11.next_event(), h11.Response):
                if event is h11.NEED_DATA:  # 1xx are passed over
                    data = await self._more(until)
                    if not data:
                        raise httpx.RemoteProtocolError(
                            "the engine closed the connection without an answer"
                        )
                    self._h11.receive_data(data)
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError(str(error)) from error
        self._body = _Body(event)
        if early := self._h11.trailing_data[0]:
            self._body.receive(bytes(early))
        return event

    async def read(self, until: float) -> bytes:
        """What has come of the body, as soon as something has; empty at its end."""
        body = self._body
        assert body is not None
        while not body.parts and not body.whole:
            body.receive(await self._more(until))
        data = b"".join(body.parts)
        body.parts.clear()
        return data

    def done(self) -> None:
        """Its request is over: keep the connection if it is at the end of an answer."""
        body = self._body
        kept = body is not None and body.whole and body.keeps and not body.parts
        # Bytes behind an answer would be taken for another client's.
        if not kept or self._unread or self._ended or self._transport.is_closing():
            self.close()
            return
        self._transport.resume_reading()
        self._pool.free(self)

    def close(self) -> None:
        self._pool.lost(self)
        self._transport.abort()

    async def _more(self, until: float) -> bytes:
        """The next data; empty at the end. Raises TimeoutError."""
        if not self._unread and not self._ended:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            # Not asyncio.timeout, which takes several times as long; this is done for every event.
            late = None if until == math.inf else loop.call_at(until, _expire, self._waiter)
            try:
                await self._waiter
            finally:
                if late is not None:
                    late.cancel()
        if not self._unread and self._error is not None:
            raise httpx.ReadError(str(self._error)) from self._error
        data = self._unread[0] if len(self._unread) == 1 else b"".join(self._unread)
        self._unread.clear()
        self._unread_bytes = 0
        self._transport.resume_reading()
        return data


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())


class _Body:
    """The body of one answer, as it comes."""

    def __init__(self, head: h11.Response) -> None:
        said = dict(head.headers)  # h11 has refused lengths that can be read in two ways
        self.parts: list[bytes] = []  # not read yet
        # Whether the connection can bring another answer.
        closes = b"close" in said.get(b"connection", b"").lower()
        self.keeps = head.http_version == b"1.1" and not closes
        self._chunked = b"transfer-encoding" in said
        self._left = math.inf  # of the body, or of a chunk; infinite: until the connection ends
        if head.status_code in (204, 304):
            self._chunked, self._left = False, 0
        elif self._chunked:
            self._left = 0
        elif b"content-length" in said:
            self._left = int(said[b"content-length"])
        self.whole = not self._chunked and not self._left
        self._line = b""  # between chunks: a line that has not come to its end
        self._behind_chunk = self._behind_last = False

    def receive(self, data: bytes) -> None:
        """Nothing: the connection has ended. Raises httpx.RemoteProtocolError."""
        if not data and not self.whole:
            self.whole, self.keeps = self._left == math.inf, False
            if not self.whole:
                raise httpx.RemoteProtocolError("the engine closed connection within its answer")
        data, at = self._line + data, 0
        while not self.whole and at < len(data):
            if self._left:
                end = int(min(len(data), at + self._left))
                self.parts.append(data[at:end])
                self._left -= end - at
                at = end
                self._behind_chunk = self._chunked and not self._left
                self.whole = not self._chunked and not self._left
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                break
            self._read_line(data[at:end])
            at = end + 2
        self._line = data[at:]
        if len(self._line) > _MAX_HEAD_BYTES:
            raise httpx.RemoteProtocolError("a line between two chunks of the answer is too long")
        if self.whole and self._line:
            self.keeps = False  # these bytes would be taken for the next answer

    def _read_line(self, line: bytes) -> None:
        """The size of a chunk, the end of one, or what follows the last one."""
        if self._behind_last:
            self.whole = not line  # other lines are trailers, which say nothing to a client
        elif self._behind_chunk and not line:
            self._behind_chunk = False
        elif not self._behind_chunk and (found := _CHUNK_SIZE.fullmatch(line)):
            self._left = int(found[1], 16)
            self._behind_last = not self._left
        else:
            raise httpx.RemoteProtocolError(f"no chunk of an answer begins with {line[:40]!r}")


@dataclass(slots=True)
class EngineAnswer:
    """An answer whose head has come. `close` gives its connection back."""

    status: int
    headers: Headers  # names as the engine wrote them
    connection: _Connection | None  # None: given back

    async def read(self, until: float = math.inf) -> bytes:
        """The next bytes of the body; empty at its end. Raises TimeoutError."""
        return b"" if self.connection is None else await self.connection.read(until)

    def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.done()


@dataclass(slots=True)
class _Stream(httpx.AsyncByteStream):
    answer: EngineAnswer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while data := await self.answer.read():
            yield data

    async def aclose(self) -> None:
        self.answer.close()
