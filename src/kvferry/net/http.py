"""A small HTTP server on one thread: one request for each connection, answered at once.

A client may send a byte now and then, or never read. So no client has a thread of its own, and a
connection ends in one of these ways:

    accepted --its request is complete--> answered --the answer is sent--> closed
       |--its request is bad or too large--> refused, and read no further --it closes--> closed
       |--its time is over--> closed
       '--too many connections, of its address or in all, and it is the oldest--> closed

The server answers a complete request in the turn in which it reads it. So the oldest connections
are never good requests, and closing them harms no good client.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from kvferry.carriers.liveness import ours_alone

log = logging.getLogger("kvferry")

REQUEST_SECONDS = 5.0  # from the accepted connection to the end of the answer
MOST_OPEN = 256  # connections
MOST_PER_ADDRESS = 128  # connections; a proxy asks a few times a second, for a millisecond each
MOST_HEAD = 16 << 10  # bytes of the request line and the headers
MOST_HEADERS = 64
MOST_BODY = 1 << 20
MOST_RECEIVED = 8 << 20  # bytes of all unfinished requests together
TURN_BYTES = 64 << 10  # read from one connection in its turn
TURN_ACCEPTS = 64
PAUSE_SECONDS = 0.1  # before the next accept, if the process has no descriptors left


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


@dataclass(slots=True, eq=False)
class _Guest:
    connection: socket.socket
    address: str
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    asked: HttpRequest | None = None  # the head of its request, once it is complete
    head_bytes: int = 0
    body_bytes: int = 0
    unsent: memoryview | None = None
    refused: bool = False  # the client may still send; closing at once could discard our answer


class HttpServer:
    """Serves a bound socket. Its thread calls `answer`, which must not wait."""

    def __init__(
        self, listener: socket.socket, answer: Callable[[HttpRequest], HttpAnswer], name: str
    ) -> None:
        self._listener, self._answer = listener, answer
        listener.setblocking(False)
        ours_alone(listener)
        self._guests: dict[int, _Guest] = {}  # by descriptor, the oldest first
        self._addresses: Counter[str] = Counter()
        self._received = 0  # bytes of all guests' unanswered requests
        self._accepting, self._accept_at = True, 0.0
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._woken, self._waker = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and close all connections. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._waker.send(b"x")
        self._thread.join(5)
        self._waker.close()

    # The thread

    def _run(self) -> None:
        while not self._closed:
            try:
                self._turn()
            except Exception:
                log.exception("%s goes on after an error", self._thread.name)
                time.sleep(PAUSE_SECONDS)
        for guest in list(self._guests.values()):
            self._hang_up(guest)
        self._selector.close()
        self._listener.close()
        self._woken.close()

    def _turn(self) -> None:
        now = time.monotonic()
        for late in list(self._guests.values()):  # in order of their deadlines
            if late.deadline > now:
                break
            self._hang_up(late)
        due = [guest.deadline for guest in self._guests.values()][:1]
        if not self._accepting:
            due.append(self._accept_at)
            if self._accept_at <= now:
                self._accepting = True
                self._selector.register(self._listener, selectors.EVENT_READ)
        for key, events in self._selector.select(min(due) - now if due else None):
            guest = self._guests.get(key.fd)
            if key.fileobj is self._listener:
                self._accept()
            elif guest is not None and key.fileobj is guest.connection:
                self._serve(guest, events)

    def _accept(self) -> None:
        for _ in range(TURN_ACCEPTS):
            try:
                connection, where = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    continue  # the connection broke before it was accepted
                log.warning("%s: %s", self._thread.name, os.strerror(error.errno))
                if self._guests:
                    self._hang_up(next(iter(self._guests.values())))
                self._selector.unregister(self._listener)
                self._accepting, self._accept_at = False, time.monotonic() + PAUSE_SECONDS
                return
            self._admit(connection, str(where[0]))

    def _admit(self, connection: socket.socket, address: str) -> None:
        guests = self._guests.values()
        if self._addresses[address] >= MOST_PER_ADDRESS:
            self._hang_up(next(guest for guest in guests if guest.address == address))
        elif len(self._guests) >= MOST_OPEN:
            self._hang_up(next(iter(guests)))
        connection.setblocking(False)
        ours_alone(connection)
        guest = _Guest(connection, address, time.monotonic() + REQUEST_SECONDS)
        self._guests[connection.fileno()] = guest
        self._addresses[address] += 1
        self._selector.register(connection, selectors.EVENT_READ)
        self._serve(guest, selectors.EVENT_READ)  # most requests are complete by now

    def _serve(self, guest: _Guest, events: int) -> None:
        try:
            if guest.unsent is None and events & selectors.EVENT_READ:
                self._read(guest)
            if guest.unsent:
                guest.unsent = guest.unsent[guest.connection.send(guest.unsent) :]
                if not guest.unsent and not guest.refused:
                    self._hang_up(guest)
                elif not guest.unsent:
                    guest.connection.shutdown(socket.SHUT_WR)
                    self._selector.modify(guest.connection, selectors.EVENT_READ)
            elif guest.unsent is not None and not guest.connection.recv(TURN_BYTES):
                self._hang_up(guest)
        except BlockingIOError:
            pass
        except OSError:  # the client is gone
            self._hang_up(guest)

    def _read(self, guest: _Guest) -> None:
        data = guest.connection.recv(TURN_BYTES)
        if not data:
            self._hang_up(guest)
            return
        guest.received += data
        self._received += len(data)
        try:
            answer = self._heard(guest)
        except BadRequest as error:
            guest.refused, answer = True, HttpAnswer.of(400, {"detail": str(error)})
        except Exception:  # a bug of ours
            log.exception("%s could not answer", self._thread.name)
            answer = HttpAnswer.of(500, {"detail": "an error of this server; see its log"})
        if answer is not None:
            self._received -= len(guest.received)
            guest.received.clear()
            guest.unsent = memoryview(answer.spelled())
            self._selector.modify(guest.connection, selectors.EVENT_WRITE)
            return
        while self._received > MOST_RECEIVED:  # the oldest unfinished request makes room
            self._hang_up(next(one for one in self._guests.values() if one.received))

    def _heard(self, guest: _Guest) -> HttpAnswer | None:
        """The answer to a request, or None while it is incomplete."""
        if guest.asked is None:
            end = guest.received.find(b"\r\n\r\n", 0, MOST_HEAD)
            if end < 0:
                if len(guest.received) >= MOST_HEAD:
                    raise BadRequest(f"the request head has more than {MOST_HEAD} bytes")
                return None
            guest.asked = read_head(bytes(guest.received[:end]))
            guest.head_bytes = end + 4
            guest.body_bytes = body_bytes(guest.asked)
        if len(guest.received) < guest.head_bytes + guest.body_bytes:
            return None
        body = bytes(guest.received[guest.head_bytes : guest.head_bytes + guest.body_bytes])
        asked = guest.asked
        return self._answer(HttpRequest(asked.method, asked.path, asked.headers, body))

    def _hang_up(self, guest: _Guest) -> None:
        if self._guests.pop(guest.connection.fileno(), None) is None:
            return
        self._received -= len(guest.received)
        self._addresses[guest.address] -= 1
        if not self._addresses[guest.address]:
            del self._addresses[guest.address]
        self._selector.unregister(guest.connection)
        guest.connection.close()


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
