# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server on one thread: one request for each connection, answered at once.

    accepted --its request is complete--> answered --the answer is sent--> closed
       |--its request is bad or too large--> refused, and read no further --it closes--> closed
       |--its time is over--> closed
       '--too many connections, of its address or in all, and it is the oldest--> closed

The server answers a complete request in the turn in which it reads it. So the oldest connections
are never good requests, and closing them harms no good client.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from kvferry.net.guests import Guest, GuestServer

log = logging.getLogger("kvferry")

REQUEST_SECONDS = 5.0  # from the accepted connection to the end of the answer
MOST_OPEN = 256  # connections
MOST_PER_ADDRESS = 128  # connections; a proxy asks a few times a second, for a millisecond each
MOST_HEAD = 16 << 10  # bytes of the request line and the headers
MOST_HEADERS = 64
MOST_BODY = 1 << 20
MOST_RECEIVED = 8 << 20  # bytes of all unfinished requests together
TURN_BYTES = 64 << 10  # read from one connection in its turn


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


class HttpServer(GuestServer):
    """Its thread calls `answer`, which must not wait."""

    def __init__(
        self, listener: socket.socket, answer: Callable[[HttpRequest], HttpAnswer], name: str
    ) -> None:
        self._answer = answer
        super().__init__(listener, name)

    def make_way(self, address: str) -> None:
        here = [guest for guest in self.guests if guest.address == address]
        if len(here) >= MOST_PER_ADDRESS:
            self.send_away(here)
        elif len(self.guests) >= MOST_OPEN:
            self.send_away(self.guests)

    async def serve(self, guest: Guest) -> None:
        async with asyncio.timeout(REQUEST_SECONDS):
            refused = False
            try:
                answer = self._answered(await self._request(guest))
            except BadRequest as error:
                refused, answer = True, HttpAnswer.of(400, {"detail": str(error)})
            guest.received.clear()
            await self._loop.sock_sendall(guest.connection, answer.spelled())
            if refused:
                # the client may still send: closing at once could discard our answer
                guest.connection.shutdown(socket.SHUT_WR)
                while await self.receive(guest, TURN_BYTES):
                    pass

    def _answered(self, asked: HttpRequest) -> HttpAnswer:
        try:
            return self._answer(asked)
        except Exception:  # a bug of ours
            log.exception("%s could not answer", self._thread.name)
            return HttpAnswer.of(500, {"detail": "an error of this server; see its log"})

    async def _request(self, guest: Guest) -> HttpRequest:
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

    async def _read(self, guest: Guest) -> None:
        data = await self.receive(guest, TURN_BYTES)
        if not data:
            raise ConnectionError("the client closed before its request was complete")
        guest.received += data
        while sum(len(one.received) for one in self.guests) > MOST_RECEIVED:
            self.send_away(one for one in self.guests if one.received)


def read_head(head: bytes) -> HttpRequest:
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
