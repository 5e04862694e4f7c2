# SPDX-License-Identifier: Apache-2.0
"""Connections to engines, for httpx: HTTP/1.1 by h11, straight on asyncio.

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
import select
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass

import h11
import httpx

_MAX_HEAD_BYTES = 100 << 10  # of an answer, and of a line between two chunks
_MOST_UNREAD_BYTES = 64 << 10  # of an answer; then the engine has to wait
_SMALL_BYTES = 64 << 10  # bodies that are sent with their head; larger ones are not copied
_EVENTS = h11.Response | h11.InformationalResponse | h11.Data | h11.EndOfMessage


@dataclass(frozen=True, slots=True)
class _Origin:
    host: str
    port: int
    secure: bool


class EngineTransport(httpx.AsyncBaseTransport):
    """Sends requests of one event loop."""

    def __init__(
        self, tls: ssl.SSLContext, most_idle: int, idle_seconds: float, connect_seconds: float
    ) -> None:
        self._tls = tls
        self._most_idle = most_idle
        self._idle_seconds = idle_seconds
        self._connect_seconds = connect_seconds
        self._idle: dict[_Origin, dict[_Connection, None]] = {}  # the newest is last
        self._idle_count = 0
        self._all: set[_Connection] = set()

    @property
    def open_count(self) -> int:
        return len(self._all)

    @property
    def idle_count(self) -> int:
        return self._idle_count

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        secure = url.scheme == "https"
        # raw_host: as it is on the wire, also for names that are not ASCII.
        origin = _Origin(url.raw_host.decode(), url.port or (443 if secure else 80), secure)
        connection = self._take(origin) or await self._connect(origin)
        try:
            assert isinstance(request.stream, httpx.AsyncByteStream)
            body = b"".join([part async for part in request.stream])
            connection.send(request.method.encode(), url.raw_path, request.headers.raw, body)
            head = await connection.head()
        except BaseException:
            connection.close()
            raise
        stream = _Stream(connection)
        return httpx.Response(head.status_code, headers=head.headers.raw_items(), stream=stream)

    async def aclose(self) -> None:
        for connection in list(self._all):
            connection.close()

    def _take(self, origin: _Origin) -> _Connection | None:
        while idle := self._idle.get(origin):
            connection = next(reversed(idle))
            self._not_idle(connection)
            if not connection.spoiled():
                return connection
            connection.close()
        return None

    async def _connect(self, origin: _Origin) -> _Connection:
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
    def __init__(self, pool: EngineTransport, origin: _Origin) -> None:
        self.origin = origin
        self.expiry: asyncio.TimerHandle | None = None  # while it is idle
        self._pool = pool
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._ended = False  # the engine sends nothing more
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    # By asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
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

    async def head(self) -> h11.Response:
        while not isinstance(event := self._parsed(), h11.Response):  # 1xx are passed over
            if event is None:
                await self._more()
        return event

    async def body(self) -> AsyncIterator[bytes]:
        """What has come, as soon as it comes."""
        parts: list[bytes] = []
        while True:
            event = self._parsed()
            if isinstance(event, h11.Data):
                parts.append(bytes(event.data))
                continue
            if parts:
                yield b"".join(parts)
                parts.clear()
            if event is None:
                await self._more()
            else:
                return

    def done(self) -> None:
        """Its request is over: keep the connection if it is at the end of an answer."""
        ours, theirs = self._h11.our_state, self._h11.their_state
        whole = ours is h11.DONE and theirs is h11.DONE
        # Bytes behind an answer would be taken for another client's.
        more = self._unread or self._h11.trailing_data[0]
        if not whole or more or self._ended or self._transport.is_closing():
            self.close()
            return
        self._h11.start_next_cycle()
        self._transport.resume_reading()
        self._pool.free(self)

    def close(self) -> None:
        self._pool.lost(self)
        self._transport.abort()

    def _parsed(self) -> _EVENTS | None:
        """The next event; None: more data is needed. Raises httpx.RemoteProtocolError."""
        try:
            event = self._h11.next_event()
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError(str(error)) from error
        if event is h11.NEED_DATA or event is h11.PAUSED:
            return None
        assert isinstance(event, _EVENTS)
        return event

    async def _more(self) -> None:
        """Wait for data, or the end, and give it to h11."""
        if not self._unread and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._unread:
            self._h11.receive_data(b"".join(self._unread))
            self._unread.clear()
            self._unread_bytes = 0
            self._transport.resume_reading()
            return
        if self._error is not None:
            raise httpx.ReadError(str(self._error)) from self._error
        if self._h11.their_state is h11.SEND_RESPONSE:
            raise httpx.RemoteProtocolError("the engine closed the connection without an answer")
        self._h11.receive_data(b"")


@dataclass(slots=True)
class _Stream(httpx.AsyncByteStream):
    connection: _Connection | None  # None: given back

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self.connection is not None:
            async for data in self.connection.body():
                yield data

    async def aclose(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.done()
