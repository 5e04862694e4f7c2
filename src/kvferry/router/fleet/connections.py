# SPDX-License-Identifier: Apache-2.0
"""Connections to engines: HTTP/1.1, straight on asyncio.

A connection belongs to one request at a time, so there is nothing to lock. After a whole answer it
is idle again, if both sides keep it. After anything else (an error, a cancelled request, a client
that leaves in the middle of an answer) it is closed at once, and the engine aborts. An idle
connection that its engine closes, or on which it sends anything, is closed. One that was idle for
too long is closed with the next request to its engine; probes are requests too.

Answers are read as fast as their client takes them. A stream passes straight from `data_received`
to the client (`EngineConnection.pass_on`). The request's task sleeps until the stream is over,
because waking it costs more than all other work for an event.
"""

from __future__ import annotations

import asyncio
import math
import select
import socket
import ssl
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from kvferry.errors import KvferryError
from kvferry.router.api import Headers, StreamSink
from kvferry.router.guard import end_if_silent
from kvferry.router.http1 import AnswerHead, HttpError, read_answer, split_head, write_head

# After which an engine's host is given up. Probes are as fast, but speak of new connections alone:
# a request there would wait for its own deadline, of up to half an hour.
_SILENT_SECONDS = 30.0
_MOST_UNREAD_BYTES = 64 << 10  # of an answer; then the engine has to wait
# Read at a time. asyncio reads 256 KiB, and several such pieces would wait for every slow client.
_READ_BYTES = 32 << 10
_SMALL_BYTES = 64 << 10  # bodies that are sent with their head; larger ones are not copied


class NoConnection(KvferryError):
    """An engine accepts no connection."""

    def __init__(self, why: str, *, timed_out: bool = False) -> None:
        super().__init__(why)
        self.timed_out = timed_out


class BrokenAnswer(KvferryError):
    """An engine's answer is no HTTP, or its connection ended before the answer did."""


class EngineOrigin(NamedTuple):
    """Where a server listens."""

    host: str
    port: int
    secure: bool


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """A URL, as a request needs it."""

    origin: EngineOrigin
    host: bytes  # the header
    target: bytes


async def addresses(name: str) -> list[str]:
    """All addresses of a name, by the system's resolver on a thread of the event loop."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(where[0]) for *_, where in found))


@lru_cache(2048)  # eight routes of 256 engines
def address_of_url(url: str) -> EngineAddress:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    origin = EngineOrigin(parts.hostname or "", parts.port or (443 if secure else 80), secure)
    return EngineAddress(origin, parts.netloc.encode(), (parts.path or "/").encode())


class EngineTransport:
    """Sends requests of one event loop."""

    def __init__(self, tls: ssl.SSLContext, idle_seconds: float, connect_seconds: float) -> None:
        self._tls = tls
        self._idle_seconds = idle_seconds
        self._connect_seconds = connect_seconds
        self._idle: dict[EngineOrigin, dict[EngineConnection, None]] = {}  # the newest is last
        self._lookups: dict[str, asyncio.Future[list[str]]] = {}  # by name, that take their time
        self._addresses_of: dict[str, list[str]] = {}  # by name, as the last lookup found them
        self.connections: set[EngineConnection] = set()

    async def ask(
        self,
        at: EngineAddress,
        method: bytes,
        headers: Headers,
        body: bytes,
        until: float = math.inf,
    ) -> EngineConnection:
        """The connection with an answer whose head has come. The caller reads the rest, and calls
        `done` once. `headers` go behind `Host`, and with the body's length.

        Raises NoConnection, BrokenAnswer, and TimeoutError `until`, in the loop's time. A new
        connection has `connect_seconds`, or less where `until` comes first.
        """
        lines = [(b"host", at.host), *headers]
        if body or method == b"POST":
            lines.append((b"content-length", b"%d" % len(body)))
        head = write_head(method + b" " + at.target + b" HTTP/1.1", lines)
        connection = self._take(at.origin) or await self._connect(at.origin, until)
        try:
            connection.send(head, body, to_head=method == b"HEAD")
            await connection.read_head(until)
        except BaseException:
            connection.close()
            raise
        return connection

    async def fetch(
        self,
        method: bytes,
        at: EngineAddress,
        most_bytes: int,
        until: float,
        headers: Headers = (),  # type: ignore[assignment]
        body: bytes = b"",
    ) -> tuple[int, bytes]:
        """A whole answer: its status, and its body up to about `most_bytes`.

        Raises what `ask` does.
        """
        lines = [(b"accept-encoding", b"identity"), *headers]
        answer = await self.ask(at, method, lines, body, until)
        try:
            parts, size = [], 0
            while size <= most_bytes and (data := await answer.read(until)):
                size += len(data)
                parts.append(data)
        finally:
            answer.done()
        return answer.head.status, b"".join(parts)

    def close(self) -> None:
        for connection in list(self.connections):
            connection.close()

    def _take(self, origin: EngineOrigin) -> EngineConnection | None:
        now, idle = asyncio.get_running_loop().time(), self._idle.get(origin, {})
        for connection in list(takewhile(lambda c: c.expires <= now, idle)):
            connection.close()
        while idle:
            connection = next(reversed(idle))
            self._not_idle(connection)
            if not connection.spoiled():
                return connection
            connection.close()
        return None

    async def _connect(self, origin: EngineOrigin, until: float) -> EngineConnection:
        late = asyncio.get_running_loop().time() + self._connect_seconds
        try:
            async with asyncio.timeout_at(min(late, until)):
                return await self._connect_to_any(origin)
        except TimeoutError as error:
            if until < late:
                raise
            why = f"no connection in {self._connect_seconds:g} s"
            raise NoConnection(why, timed_out=True) from error
        except OSError as error:  # also an SSLError
            raise NoConnection(str(error)) from error

    async def _connect_to_any(self, origin: EngineOrigin) -> EngineConnection:
        """A connection to the first of a host's addresses that accepts one. Raises OSError."""
        name = origin.host
        is_address = ":" in name or name.replace(".", "").isdigit()
        refusal = OSError(f"{name} has no address")
        for host in [name] if is_address else await self._addresses(name):
            try:
                # Without happy_eyeballs_delay, which leaves sockets open when it is cancelled.
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: EngineConnection(self, origin),
                    host,
                    origin.port,
                    ssl=self._tls if origin.secure else None,
                    server_hostname=name if origin.secure else None,
                )
                return connection
            except OSError as error:
                # That its host runs without it says more than that there is no way to an address.
                if not isinstance(refusal, ConnectionRefusedError):
                    refusal = error
        raise refusal

    async def _addresses(self, name: str) -> list[str]:
        """By the system's resolver, or the last ones if it fails or takes long: a name that cannot
        be looked up says nothing about its engine. A lookup cannot be stopped, and threads for
        them are few. So there is one for each name, or one name would keep the others waiting."""
        lookup = self._lookups.get(name)
        if lookup is None:
            lookup = self._lookups[name] = asyncio.ensure_future(addresses(name))
            lookup.add_done_callback(lambda done: self._looked_up(name, done))
        known = self._addresses_of.get(name)
        await asyncio.wait({lookup}, timeout=self._connect_seconds / 2 if known else None)
        if known is None or (lookup.done() and lookup.exception() is None):
            return lookup.result()
        return known

    def _looked_up(self, name: str, lookup: asyncio.Future[list[str]]) -> None:
        del self._lookups[name]
        if not lookup.cancelled() and lookup.exception() is None:
            self._addresses_of[name] = lookup.result()

    # Called by connections

    def lost(self, connection: EngineConnection) -> None:
        self._not_idle(connection)
        self.connections.discard(connection)

    def free(self, connection: EngineConnection) -> None:
        """A connection has brought its answer, and can bring another one."""
        self._idle.setdefault(connection.origin, {})[connection] = None
        connection.expires = asyncio.get_running_loop().time() + self._idle_seconds

    def _not_idle(self, connection: EngineConnection) -> None:
        if connection.expires:
            connection.expires = 0.0
            idle = self._idle[connection.origin]
            del idle[connection]
            if not idle:
                del self._idle[connection.origin]


class EngineConnection(asyncio.Protocol):
    """One connection, and the answer that it brings."""

    def __init__(self, pool: EngineTransport, origin: EngineOrigin) -> None:
        self.origin = origin
        self.expires = 0.0  # while it is idle: when, in the loop's time
        self._loop = asyncio.get_running_loop()
        self._pool = pool
        self._head: AnswerHead | None = None  # once it has come
        self._to_head = False
        self._data = b""  # of a head that is not complete
        self._unread_bytes = 0
        self._failure: Exception | None = None  # why the answer does not go on
        self._waiter: asyncio.Future[None] | None = None
        # While a stream passes:
        self._sink: StreamSink | None = None
        self._paused = False  # its client does not read
        self._heard = 0.0  # when the last bytes came

    # By asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # other loops have their own classes
        if hasattr(transport, "max_size"):  # asyncio's own transports without TLS
            transport.max_size = _READ_BYTES
        end_if_silent(transport, _SILENT_SECONDS)
        self._pool.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self.expires:  # an answer without a request
            self.close()
            return
        try:
            self._read(data)
        except HttpError as error:
            self._fail(BrokenAnswer(str(error)))
            return
        if self._sink is not None:
            self._pass()
            return
        self._unread_bytes += len(data)
        if self._unread_bytes > _MOST_UNREAD_BYTES:
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.lost(self)
        self._end(error)

    def _read(self, data: bytes) -> None:
        """Raises HttpError."""
        while self._head is None:
            data, self._data = self._data + data, b""
            found = split_head(data)
            if found is None:
                self._data = data
                return
            head, data = read_answer(found[0], to_head=self._to_head), found[1]
            if head.status >= 200:  # 1xx are passed over
                self._head = head
        head = self._head
        if not head.body.whole:
            head.body.receive(data)
            data = head.body.rest
        if data:
            head.keeps = False  # these bytes would be taken for the next answer

    def _end(self, error: Exception | None) -> None:
        head = self._head
        if head is not None and head.body.ends_with_connection and error is None:
            head.keeps, head.body.whole = False, True
            self._wake() if self._sink is None else self._pass()
        how = "without an answer" if head is None else "within its answer"
        self._fail(BrokenAnswer(str(error or f"the engine closed the connection {how}")))

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._wake(self._failure)

    def _wake(self, error: Exception | None = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            if error is None:
                self._waiter.set_result(None)
            else:
                self._waiter.set_exception(error)

    # By the one request that has it

    def spoiled(self) -> bool:
        """Whether an idle connection has ended, perhaps a moment ago, before the loop saw it."""
        if self._failure is not None or self._transport.is_closing():
            return True
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def send(self, head: bytes, body: bytes, *, to_head: bool = False) -> None:
        """`to_head`: the request is a HEAD, whose answer has no body."""
        self._head, self._to_head = None, to_head
        if len(body) <= _SMALL_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    async def read_head(self, until: float) -> None:
        """Raises BrokenAnswer and TimeoutError."""
        while self._head is None:
            await self._more(until)

    @property
    def head(self) -> AnswerHead:
        """Of the answer, once `read_head` has read it."""
        assert self._head is not None
        return self._head

    async def read(self, until: float = math.inf) -> bytes:
        """The next bytes of the body, as soon as there are any; empty at its end. Raises
        BrokenAnswer and TimeoutError."""
        body = self.head.body
        while not body.parts and not body.whole:
            await self._more(until)
        self._unread_bytes = 0
        self._transport.resume_reading()
        return body.take()

    async def pass_on(self, sink: StreamSink, seconds: float) -> None:
        """Give the rest of the body to `sink` as it comes, and return when it is over.

        Raises BrokenAnswer, and TimeoutError if nothing comes for `seconds`.
        """
        self._waiter = waiter = self._loop.create_future()
        self._sink = sink
        sink.on_drain(self._go_on)
        self._go_on()
        self._expire_if_silent(waiter, seconds)
        try:
            self._pass()
            if self._failure is not None:
                self._wake(self._failure)
            await waiter
        finally:
            self._silence.cancel()
            self._sink = None
            sink.on_drain(None)

    def done(self) -> None:
        """Its request is over: keep the connection if it is at the end of an answer."""
        head = self._head
        kept = head is not None and head.body.whole and head.keeps and not head.body.parts
        unsent = self._transport.get_write_buffer_size()  # the engine did not read its request
        if not kept or unsent or self._failure is not None or self._transport.is_closing():
            self.close()
            return
        self._unread_bytes = 0
        self._transport.resume_reading()
        self._pool.free(self)

    def close(self) -> None:
        self._pool.lost(self)
        self._fail(BrokenAnswer("the router closed the connection"))
        self._transport.abort()

    def _pass(self) -> None:
        """Give the sink what has come."""
        body, sink = self.head.body, self._sink
        assert sink is not None
        self._heard = self._loop.time()
        if body.parts or body.whole:
            slow = sink.take(body.take(), body.whole)
            if slow and not body.whole:
                self._paused = True
                self._transport.pause_reading()
        if body.whole:
            self._sink = None
            self._wake()

    def _go_on(self) -> None:
        """The client reads again."""
        self._paused, self._heard = False, self._loop.time()
        self._transport.resume_reading()

    def _expire_if_silent(self, waiter: asyncio.Future[None], seconds: float) -> None:
        """One timer for a stream, not one for each event: it looks when the last one came."""
        now = self._loop.time()
        if self._paused:
            self._heard = now
        if now - self._heard >= seconds:
            self._wake(TimeoutError())
        else:
            late = self._heard + seconds
            self._silence = self._loop.call_at(late, self._expire_if_silent, waiter, seconds)

    async def _more(self, until: float) -> None:
        """Wait for more of the answer. Raises BrokenAnswer and TimeoutError."""
        if self._failure is not None:
            raise self._failure
        self._waiter = self._loop.create_future()
        # Not asyncio.timeout, which takes several times as long.
        late = None
        if until != math.inf:
            late = self._loop.call_at(until, self._wake, TimeoutError())
        try:
            await self._waiter
        finally:
            if late is not None:
                late.cancel()
