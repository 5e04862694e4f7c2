# SPDX-License-Identifier: Apache-2.0
"""Clients' connections: requests are read, answers are written, straight on asyncio.

uvicorn listens, starts and stops the application, and makes a `ClientConnection` for each client.
Everything between a socket and a route is here:

    data_received   a head, then its body (`http1`). With the first bytes of the body the request
                    starts, as a task of its route
    write           the answer, in one piece with its head. A stream's events come here from the
                    engine's connection, without a task or a queue between them
    answered        the next request, which may have come meanwhile; what is left of a refused
                    body is read and dropped

One request at a time: what comes ahead waits, up to 64 KiB. A client that closes its connection,
or only its sending half, is gone: its request is cancelled. Bytes that are no HTTP are answered
with 400 and the end of the connection.

`Guard` limits connections, in total and per client address. A connection is at one of three stages,
and each stage has its deadline:

    HEAD     no complete request yet: new, idle, or sending headers      `header_seconds`
    BODY     the headers are complete, the body is not                   see `guard.read_body`
    SERVING  the request is complete, its answer is not                  `client_seconds` for a
                                                                         client that does not read
                                                                         or whose host is silent

When an address or the router has no connection left, the oldest one at HEAD is closed, then the
oldest one at BODY, unless its last answer is not read yet. So an incomplete request never keeps a
complete one out.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import resource
import socket
import struct
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, cast
from urllib.parse import unquote

from uvicorn.server import ServerState

from kvferry.errors import DescriptionError
from kvferry.router.api import Answer, ApiError, Headers, Limits
from kvferry.router.guard import ClientGone, Quota, address_of, end_if_silent
from kvferry.router.http1 import (
    HeadTooLong,
    HttpError,
    RequestHead,
    read_request,
    split_head,
    status_line,
    write_head,
)

log = logging.getLogger(__name__)
Route = Callable[["ClientRequest"], Coroutine[Any, Any, None]]  # serves requests for one path

# One limit for three things: a read (asyncio's 256 KiB take the allocator long), the part of a body
# that waits until the request takes it, and the bytes that a client may send ahead.
_MOST_BYTES = 64 << 10
LIVE_STREAM = "/live/stream"  # see `live`
_MOST_AHEAD = 1024  # connections that the event loop has accepted, and that are not admitted yet
_OWN_FILES = 64  # descriptors of the interpreter, the log, the event loop, the listening socket
_SWEEP_SECONDS = 0.5
_WITHOUT_BODY = (204, 304)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Stage(enum.Enum):
    HEAD = enum.auto()
    BODY = enum.auto()
    SERVING = enum.auto()


class ClientConnection(asyncio.Protocol):
    """One client. A subclass names its guard and its routes."""

    guard: Guard
    routes: Mapping[str, Route]  # by path
    transport: asyncio.Transport
    stage: Stage | None = None  # None: not admitted, or lost
    since = 0.0  # when the client last made progress in its stage, in the loop's time

    def __init__(self, server_state: ServerState, **_of_uvicorn: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.server_state = server_state
        self.address = ""
        self.request: ClientRequest | None = None  # the one that is read or answered
        self.write_paused = False
        self.drained: Callable[[], None] | None = None  # is called when the client reads again
        self.stopping = False
        self._data = b""  # that is not read yet

    # By asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.admit(transport)
        if not self.transport.is_closing():
            self.opened()

    def admit(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # event loops have their own classes
        peer = transport.get_extra_info("peername")
        self.address = address_of(peer)
        end_if_silent(self.transport, self.guard.limits.client_seconds)
        self.guard.admit(self)

    def opened(self) -> None:
        """The connection is admitted, and HTTP begins."""
        self.stopping = self.guard.stopping
        self.server_state.connections.add(self)  # type: ignore[arg-type]
        if hasattr(self.transport, "max_size"):  # asyncio's own transports without TLS
            self.transport.max_size = _MOST_BYTES

    def connection_lost(self, exc: Exception | None) -> None:
        self.guard.forget(self)
        self.server_state.connections.discard(self)
        if self.request is not None:
            self.request.lost()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._data:
            data, self._data = self._data + data, b""
        self._read(data)

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        self.since = self.loop.time()
        if self.drained is not None:
            self.drained()
        if self.request is None:
            self._read_on()

    # By the server

    def drain(self) -> None:
        """The next answer is the last one."""
        self.stopping = True
        if self.request is not None:
            self.request.keeps = False

    def shutdown(self) -> None:
        """The server stops: answers may end, but the stream of the page has no end."""
        self.drain()
        if self.idle:
            self.transport.close()
        elif self.request is not None and self.request.path == LIVE_STREAM:
            self.transport.abort()

    @property
    def idle(self) -> bool:
        return self.request is None or self.request.answered

    @property
    def unread(self) -> bool:
        """Whether its client has still to read the end of an answer."""
        return self.transport.is_closing() or self.transport.get_write_buffer_size() > 0

    def overdue(self, now: float, limits: Limits) -> bool:
        if self.stage is Stage.HEAD:
            most = limits.client_seconds if self.unread else limits.header_seconds
            return now - self.since > most
        if not (self.write_paused or self.transport.is_closing()):
            self.since = now
        return now - self.since > limits.client_seconds

    # Requests

    def _read(self, data: bytes) -> None:
        """Read requests, one at a time, as far as `data` goes."""
        try:
            while data and not self.transport.is_closing():
                request = self.request
                if request is None and not self.write_paused:
                    data = data.lstrip(b"\r\n")  # empty lines before a request mean nothing
                    found = split_head(data) if data else None
                    if found is None:
                        self._data = data
                        break
                    request = self.request = ClientRequest(self, read_request(found[0]))
                    request.arrived(found[1])
                    request.start()
                elif request is not None and not request.head.body.whole:
                    request.arrived(data)
                else:  # sent ahead of an answer, or by a client that does not read its answers
                    self._data = data
                    if len(data) > _MOST_BYTES:
                        self.transport.abort()
                    break
                data = request.head.body.rest
                if request.answered and request.head.body.whole:
                    self.request = None
        except HttpError as error:
            self._refuse(error)
        self.guard.moved(self, self._stage_now())

    def answered(self, request: ClientRequest) -> None:
        """An answer is complete."""
        self.drained = None
        if not request.keeps or self.stopping:
            self.transport.close()
            return
        self.guard.moved(self, Stage.HEAD)  # the wait for the next request's headers begins
        self.transport.resume_reading()
        if request.head.body.whole:
            self.request = None
            self._read_on()

    def _read_on(self) -> None:
        if self._data:
            data, self._data = self._data, b""
            self._read(data)

    def _refuse(self, error: HttpError) -> None:
        """The bytes are no HTTP: answer so, unless an answer has begun, and close."""
        request = self.request
        self.request = None
        if request is not None and request.answered:  # a second answer would be the next request's
            self.transport.abort()
            return
        if request is not None:
            # The head was good, the body is not.
            begun = request.begun
            request.lost()
            if begun:
                self.transport.abort()
                return
        status = 431 if isinstance(error, HeadTooLong) else 400
        code = "headers_too_large" if status == 431 else "invalid_http"
        answer = ApiError(status, code, f"this is no HTTP/1.1 request: {error}").answer
        headers = [*answer.headers, (b"content-length", b"%d" % len(answer.body))]
        head = write_head(status_line(status), [*headers, (b"connection", b"close")])
        self.transport.write(head + answer.body)
        self.transport.close()

    def _stage_now(self) -> Stage:
        request = self.request
        if request is None or request.answered:
            return Stage.HEAD
        return Stage.SERVING if request.head.body.whole else Stage.BODY


class ClientRequest:
    """A client's request, and its answer."""

    def __init__(self, connection: ClientConnection, head: RequestHead) -> None:
        self.connection = connection
        self.address = connection.address
        self.head = head
        path = head.target.partition(b"?")[0].decode()
        self.path = unquote(path) if "%" in path else path
        self.keeps = head.keeps and not connection.stopping  # it lives on after the answer
        self.begun = self.answered = False  # the answer has begun, is complete
        self.gone = False  # the client is
        self.task: asyncio.Task[None] | None = None
        self._unread = 0  # bytes of the body that came since `read` was last called
        self._waiter: asyncio.Future[None] | None = None
        self._pending = b""  # the answer's head, which goes out with its first bytes
        self._chunked = self._has_length = False  # how the client sees where the answer ends
        self._silent = False  # the answer has a head only

    # By the connection

    def start(self) -> None:
        connection = self.connection
        route = connection.routes.get(self.path, _unknown_path)
        tasks = connection.server_state.tasks
        self.task = connection.loop.create_task(route(self))
        tasks.add(self.task)
        self.task.add_done_callback(tasks.discard)

    def arrived(self, data: bytes) -> None:
        """More of the body. Raises HttpError."""
        body = self.head.body
        if not body.whole:
            body.receive(data)
        else:
            body.rest = data
        if self.answered:
            body.parts.clear()
            return
        self._unread += len(data) - len(body.rest)
        if self._unread > _MOST_BYTES and not body.whole:
            self.connection.transport.pause_reading()
        self._wake()

    def lost(self) -> None:
        """The client is gone. Does nothing to a request that is answered."""
        if self.answered:
            return
        self.gone = True
        self._wake()
        if self.task is not None:
            self.task.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # The request's body

    def whole_body(self, most_bytes: int) -> bytes | None:
        """All of the body, if it has come; then `read` has nothing more to give."""
        if not self.head.body.whole or self._unread > most_bytes:
            return None
        return self.head.body.take()

    async def read(self) -> bytes:
        """The next bytes of the body; empty at its end. Raises ClientGone."""
        body, connection = self.head.body, self.connection
        while not (body.parts or body.whole):
            if self.gone:
                raise ClientGone
            if self.head.continues:
                self.head.continues = False
                connection.transport.write(_CONTINUE)
            self._waiter = connection.loop.create_future()
            await self._waiter
        self._unread = 0
        connection.transport.resume_reading()
        return body.take()

    # The answer

    def answer(self, answer: Answer) -> None:
        """A whole answer, which is small."""
        self.begin(answer.status, [*answer.headers, (b"content-length", b"%d" % len(answer.body))])
        self.write(answer.body, last=True)

    def begin(self, status: int, headers: Headers) -> None:
        """The head of the answer. It is sent with the first bytes of the body."""
        self.begun = True
        lines = [*self.connection.server_state.default_headers, *headers]
        closes = False
        for name, value in headers:
            if name == b"content-length":
                self._has_length = True
            elif name == b"connection" and value.lower() == b"close":
                closes = True
        self._silent = self.head.method == "HEAD" or status in _WITHOUT_BODY
        if not (self._has_length or self._silent):
            self._chunked = self.head.is_1_1
            if self._chunked:
                lines.append((b"transfer-encoding", b"chunked"))
            else:  # the body ends with the connection
                self.keeps = False
        # A client that waits for 100 Continue may now send its body or its next request, and the
        # router could not tell which.
        waits = self.head.continues and not self.head.body.whole
        self.keeps = self.keeps and not closes and not waits
        if not self.keeps and not closes:
            lines.append((b"connection", b"close"))
        self._pending = write_head(status_line(status), lines)

    def write(self, data: bytes, last: bool = False) -> bool:
        """The next bytes of the answer. Returns whether the client reads too slowly for more."""
        connection = self.connection
        if self.gone or self.answered:
            return False
        if self._silent:
            data = b""
        elif self._chunked:
            if data:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            if last:
                data += b"0\r\n\r\n"
        if data or last or self._silent:
            if self._pending:
                data, self._pending = self._pending + data, b""
            if data:
                connection.transport.write(data)
        if last:
            self.answered = True
            self._wake()
            connection.answered(self)
        return connection.write_paused

    def cut(self, data: bytes) -> None:
        """End the answer too early, with `data`."""
        self.write(data, last=self._chunked)
        self.abort()

    def abort(self) -> None:
        """Close the connection in the middle of the answer, which every client notices: with a
        reset where the end of the connection would be the end of the answer (HTTP/1.0). An answer
        that is complete is left alone."""
        if self.answered or self.gone:
            return
        sock = self.connection.transport.get_extra_info("socket")
        if not (self._chunked or self._has_length) and sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.transport.abort()

    async def drained(self) -> None:
        """Wait until the client has read most of what was written. Raises ClientGone."""
        connection = self.connection
        if connection.write_paused and not self.gone:
            waiter = connection.loop.create_future()
            connection.drained = lambda: None if waiter.done() else waiter.set_result(None)
            try:
                await waiter
            finally:
                connection.drained = None
        if self.gone:
            raise ClientGone


class Guard:
    """All connections of one server."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.most = _connections_by_files(limits)
        self._quota = Quota(self.most, limits.address_share)
        # By stage; connections that reached the stage first come first.
        self._stages: dict[Stage, dict[ClientConnection, None]] = {stage: {} for stage in Stage}
        self._sweeping = False
        self.stopping = False  # connections that open now get one answer

    @property
    def backlog(self) -> int:
        """Connections that the event loop accepts at once, before any of them is admitted."""
        # The loop accepts up to twice before `admit` is called.
        return max(1, min(self.most, _MOST_AHEAD) // 2)

    def admit(self, new: ClientConnection) -> None:
        """Let a connection in, if necessary in place of the oldest without a complete request."""
        while lack := self._quota.take(new.address):
            if not self._close_oldest(new.address if lack == "address" else None):
                new.transport.abort()
                return
        new.stage, new.since = Stage.HEAD, new.loop.time()
        self._stages[Stage.HEAD][new] = None
        if not self._sweeping:
            self._sweeping = True
            self._sweep(new.loop)

    def forget(self, connection: ClientConnection) -> None:
        if connection.stage is not None:
            del self._stages[connection.stage][connection]
            self._quota.take(connection.address, -1)
            connection.stage = None

    def moved(self, connection: ClientConnection, stage: Stage) -> None:
        if connection.stage not in (None, stage):
            del self._stages[connection.stage][connection]
            self._stages[stage][connection] = None
            connection.stage, connection.since = stage, connection.loop.time()

    def _close_oldest(self, address: str | None) -> bool:
        """Close the oldest connection without a complete request, or an answer that its client has
        not read; False if there is none."""
        for stage in (Stage.HEAD, Stage.BODY):
            for connection in self._stages[stage]:
                if address in (None, connection.address) and not connection.unread:
                    self.forget(connection)
                    connection.transport.abort()
                    return True
        return False

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connections in self._stages.values():
            for connection in [c for c in connections if c.overdue(now, self.limits)]:
                connection.transport.abort()
        loop.call_later(_SWEEP_SECONDS, self._sweep, loop)


def require_method(request: ClientRequest, methods: Collection[str]) -> None:
    """Refuse a request with another method. Raises ApiError."""
    if request.head.method not in methods:
        error = _not_served(405, request)
        error.answer.headers.append((b"allow", ", ".join(methods).encode()))
        raise error


async def _unknown_path(request: ClientRequest) -> None:
    """A task, as all routes are: a client that sends requests ahead gets one in a loop's turn."""
    request.answer(_not_served(404, request).answer)


def _not_served(status: int, request: ClientRequest) -> ApiError:
    """The error for an unknown path (404) or method (405)."""
    code = "not_found" if status == 404 else "method_not_allowed"
    message = f"{request.head.method} {request.path} is not served by the router"
    return ApiError(status, code, message)


def _connections_by_files(limits: Limits) -> int:
    """The number of connections that the limit of descriptors allows; raises that limit if needed.

    A connection may need four: its own, one that is accepted ahead of it, and for a request in
    flight a busy and an idle one to an engine.
    """
    wanted, others = limits.max_connections, _MOST_AHEAD + 2 * limits.max_in_flight
    needed = _OWN_FILES + wanted + min(3 * wanted, others)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    left = soft - _OWN_FILES
    most = min(wanted, max(left // 4, left - others))
    if most < 1:
        raise DescriptionError(
            f"the router may open {soft} files and needs {needed}; raise the limit (ulimit -n)"
        )
    return most
