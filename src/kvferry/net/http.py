"""A small HTTP server on one thread: one request for each connection, answered at once.

A client may send a byte now and then, or never read. So no client has a thread of its own, and a
connection ends in one of these ways:

    accepted --its request is complete--> answered --the answer is sent--> closed
       |--its request is bad or too large--> refused, and read no further --it closes--> closed
       |--its time is over--> closed
       '--too many connections, of its address or in all, and it is the oldest--> closed

The server answers a complete request in the turn in which it reads it, and reads a new connection
before it accepts the next two. So the oldest connections are never good requests, and closing them
harms no good client.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from typing import Any

from kvferry.net.names import ours_alone

log = logging.getLogger("kvferry")

REQUEST_SECONDS = 5.0  # from the accepted connection to the end of the answer
MOST_OPEN = 256  # connections
MOST_PER_ADDRESS = 128  # connections; a proxy asks a few times a second, for a millisecond each
MOST_HEAD = 16 << 10  # bytes of the request line and the headers
MOST_HEADERS = 64
MOST_BODY = 1 << 20
MOST_RECEIVED = 8 << 20  # bytes of all unfinished requests together
TURN_BYTES = 64 << 10  # read from one connection in its turn
PAUSE_SECONDS = 0.1  # before the next accept, if the process has no descriptors left
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class BadRequest(ValueError):
    """The server answers it with status 400 and its message."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    method: str
    path: str
    headers: Mapping[str, str]  # names in lower case
    body: bytes


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A status, and an encoded JSON body."""

    status: int
    json: bytes

    @classmethod
    def of(cls, status: int, body: Any) -> HttpAnswer:
        return cls(status, json.dumps(body).encode())

    def spelled(self) -> bytes:
        head = (
            f"HTTP/1.0 {self.status} {HTTPStatus(self.status).phrase}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(self.json)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + self.json


class HttpServer:
    """Serves a bound socket. Its thread calls `answer`, which must not wait."""

    def __init__(
        self, listener: socket.socket, answer: Callable[[HttpRequest], HttpAnswer], name: str
    ) -> None:
        listener.setblocking(False)
        self._listener, self._answer = ours_alone(listener), answer
        self._guests: dict[_Guest, asyncio.Task[None]] = {}  # the oldest first
        self._closed = False
        self._loop = asyncio.SelectorEventLoop()
        self._accepting = self._loop.create_task(self._accept())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and close all connections. Closing again does nothing."""
        if not self._closed:
            self._closed = True
            self._loop.call_soon_threadsafe(self._accepting.cancel)
            self._thread.join(5)

    # The thread

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._accepting)
        self._loop.close()
        self._listener.close()

    async def _accept(self) -> None:
        async with asyncio.TaskGroup() as tasks:  # it ends with all connections
            while True:
                try:
                    connection, where = await self._loop.sock_accept(self._listener)
                    guest = _Guest(ours_alone(connection), str(where[0]))
                    self._make_way(guest.address)
                    task = self._guests[guest] = tasks.create_task(self._serve(guest))
                    task.add_done_callback(partial(self._leave, guest))
                except OSError as error:
                    if error.errno in NO_DESCRIPTORS:
                        log.warning("%s: %s", self._thread.name, error.strerror)
                        self._hang_up(self._guests)
                        await asyncio.sleep(PAUSE_SECONDS)
                    # or else the connection broke before it was accepted
                except Exception:
                    log.exception("%s goes on after an error", self._thread.name)
                    await asyncio.sleep(PAUSE_SECONDS)
                await asyncio.sleep(0)  # connections have their turns

    def _make_way(self, address: str) -> None:
        here = [guest for guest in self._guests if guest.address == address]
        if len(here) >= MOST_PER_ADDRESS:
            self._hang_up(here)
        elif len(self._guests) >= MOST_OPEN:
            self._hang_up(self._guests)

    def _hang_up(self, guests: Iterable[_Guest]) -> None:
        """End the oldest of these connections."""
        oldest = next(iter(guests), None)
        if oldest is not None:
            self._guests.pop(oldest).cancel()

    def _leave(self, guest: _Guest, _: asyncio.Task[None]) -> None:
        self._guests.pop(guest, None)
        guest.connection.close()

    async def _serve(self, guest: _Guest) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                refused = False
                try:
                    answer = self._answer(await self._request(guest))
                except BadRequest as error:
                    refused, answer = True, HttpAnswer.of(400, {"detail": str(error)})
                guest.received.clear()
                await self._loop.sock_sendall(guest.connection, answer.spelled())
                if refused:
                    # the client may still send: closing at once could discard our answer
                    guest.connection.shutdown(socket.SHUT_WR)
                    while await self._receive(guest):
                        pass
        except OSError:  # the client is gone, or its time is over
            pass
        except Exception:  # a bug of ours
            log.exception("%s could not answer", self._thread.name)
            answer = HttpAnswer.of(500, {"detail": "an error of this server; see its log"})
            with contextlib.suppress(OSError):
                guest.connection.send(answer.spelled())

    async def _request(self, guest: _Guest) -> HttpRequest:
        received = guest.received
        while (end := received.find(b"\r\n\r\n", 0, MOST_HEAD)) < 0:
            if len(received) >= MOST_HEAD:
                raise BadRequest(f"the request head has more than {MOST_HEAD} bytes")
            await self._read(guest)
        asked = read_head(bytes(received[:end]))
        begin = end + 4
        end = begin + body_bytes(asked)
        while len(received) < end:
            await self._read(guest)
        return replace(asked, body=bytes(received[begin:end]))

    async def _read(self, guest: _Guest) -> None:
        data = await self._receive(guest)
        if not data:
            raise ConnectionError("the client closed before its request was complete")
        guest.received += data
        while sum(len(one.received) for one in self._guests) > MOST_RECEIVED:
            self._hang_up(one for one in self._guests if one.received)

    async def _receive(self, guest: _Guest) -> bytes:
        await asyncio.sleep(0)  # data may always be there: other connections have their turns
        return await self._loop.sock_recv(guest.connection, TURN_BYTES)


@dataclass(slots=True, eq=False)
class _Guest:
    connection: socket.socket
    address: str
    received: bytearray = field(default_factory=bytearray)


def read_head(head: bytes) -> HttpRequest:
    """A request without its body, or BadRequest."""
    first, *lines = head.split(b"\r\n")
    words = first.decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise BadRequest("a request begins with a method, a path and HTTP/1.1")
    if len(lines) > MOST_HEADERS:
        raise BadRequest(f"the request has {len(lines)} headers; expected at most {MOST_HEADERS}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.decode("latin-1").partition(":")
        if not colon or name.strip() != name or not name:
            raise BadRequest("a header is a name, a colon and a value")
        name, value = name.lower(), value.strip()
        if headers.setdefault(name, value) != value and name == "content-length":
            raise BadRequest("two different Content-Length headers")
    return HttpRequest(words[0], words[1].partition("?")[0], headers, b"")


def body_bytes(asked: HttpRequest) -> int:
    told = asked.headers.get("content-length", "0")
    if "transfer-encoding" in asked.headers or not (told.isascii() and told.isdigit()):
        raise BadRequest("a body needs a Content-Length header, and no Transfer-Encoding")
    if len(told) > 12 or int(told) > MOST_BODY:
        raise BadRequest(f"the body has {told:.20} bytes; expected at most {MOST_BODY}")
    return int(told)
