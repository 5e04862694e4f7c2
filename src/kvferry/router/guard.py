# SPDX-License-Identifier: Apache-2.0
"""Limits what slow, numerous or hostile clients take of the router, and what a rush or an outage
costs the engines.

`Quota` limits requests in flight and the memory of bodies and answers (`RequestMemory`), in total
and per client address. The address is that of the connection; headers such as X-Forwarded-For are
not believed. `clients.Guard` limits connections in the same way.

A request that finds no engine with room waits in one line (`Turns`). The line is bounded, in total
and for one client. When there is room, clients take turns, and each client's requests go in their
order; so a client with a hundred requests delays another one's first request by one. A new request
never passes those that wait.

`RetryBudget` bounds retries by the requests that came: each request adds `retry_share`, each retry
takes one, and `retry_burst` are there at the start. So engines that fail all requests get a tenth
more of them, not `tries` times as many.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import anyio

from kvferry.errors import KvferryError
from kvferry.net.names import KEEPALIVE_PROBES, keep_alive
from kvferry.router.api import ApiError, Headers, Limits

Lack = Literal["address", "all"]  # which limit is reached

# The router holds a byte of a body twice: as it came, and as an engine gets it. It holds a byte of
# an answer twice while it joins the parts.
_COPIES = 2
# The first bytes of each request are free: a prompt of usual size must get in while large uploads
# use up the memory. `max_connections` bounds how often this is granted.
_FREE_BYTES = 64 << 10
_MOST_SILENT_SECONDS = 3600  # of a connection; the kernel's own bound is half a day
RETRY_SECONDS = 1.0  # after a refusal; requests end all the time
_ENDS = 64  # last requests that ended, from which the time until the next turn is estimated
# Bounds of that estimate, which is a client's Retry-After.
_SOONEST_SECONDS, _LATEST_SECONDS = 1.0, 60.0


def address_of(client: tuple[Any, ...] | None) -> str:
    """The address that a quota counts: an IPv4 address, or an IPv6 /64, which is one customer."""
    if not client:  # the client has gone already
        return ""
    address = ipaddress.ip_address(str(client[0]).partition("%")[0])
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), 64), strict=False))


def end_if_silent(transport: asyncio.BaseTransport, seconds: float) -> None:
    """Have the kernel end a connection whose other host is silent for `seconds`, such as one that
    lost its power or its network. A slow process is silent only if it reads nothing for as long,
    while its host has no room for more."""
    sock = transport.get_extra_info("socket")
    whole = min(max(2, math.ceil(seconds)), _MOST_SILENT_SECONDS)
    keep_alive(sock, whole // 2, max(1, whole // 2 // KEEPALIVE_PROBES))
    # Of what was sent: else the kernel sends it again for a quarter of an hour.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * whole)


class Quota:
    """A resource of which all clients may take `most`, and one address `most_each`."""

    def __init__(self, most: int, share: float) -> None:
        self.most = most
        self.most_each = max(1, int(most * share))
        self.taken = 0
        self._by_address: dict[str, int] = {}

    def take(self, address: str, amount: int = 1) -> Lack | None:
        """Take `amount`; a negative one gives back. If a limit forbids that, return which one, and
        take nothing."""
        left = self._by_address.get(address, 0) + amount
        if amount > 0 and left > self.most_each:
            return "address"
        if amount > 0 and self.taken + amount > self.most:
            return "all"
        self.taken += amount
        if left:
            self._by_address[address] = left
        else:
            self._by_address.pop(address, None)
        return None

    @contextmanager
    def place(self, address: str, what: str, code: str, later_seconds: float) -> Iterator[None]:
        """Take one for the time of a `with`. `what` and `code` name it. Raises ApiError 429."""
        if lack := self.take(address):
            count = self.most if lack == "all" else f"{self.most_each} of your address"
            message = f"{what}: {count}, the most allowed; try again soon"
            raise ApiError(429, code, message, later_seconds)
        try:
            yield
        finally:
            self.take(address, -1)


class RequestMemory:
    """What one request holds of the memory for all bodies and answers, which `memory` limits."""

    def __init__(self, memory: Quota, address: str) -> None:
        self.bytes = 0
        self._memory, self._address = memory, address
        self._charged = 0

    def add(self, count: int) -> None:
        """Charge for `count` more bytes; a negative count gives back. Raises ApiError."""
        self.bytes += count
        charge = _COPIES * max(0, self.bytes - _FREE_BYTES) - self._charged
        lack = self._memory.take(self._address, charge) if charge else None
        if lack == "address":
            message = f"your address has {self._memory.most_each} bytes here; try again soon"
            raise ApiError(429, "too_many_bytes", message, RETRY_SECONDS)
        if lack == "all":
            message = f"the router holds {self._memory.most} bytes, its most; try again soon"
            raise ApiError(503, "router_full", message, RETRY_SECONDS)
        self._charged += charge

    def close(self) -> None:
        self._memory.take(self._address, -self._charged)
        self._charged = 0


class ClientGone(Exception):
    """The client closed its connection, or stopped reading or writing."""


async def read_body(
    headers: Headers,
    read: Callable[[], Awaitable[bytes]],
    held: RequestMemory,
    limits: Limits,
) -> bytes:
    """A request's body, if there is memory for it and it comes in time. Raises ApiError.

    `read` gives the next bytes of it; none: that was all.

    The server reads on and discards the rest of a refused body, so that the client gets to read
    the reason. The guard closes the connection after `header_seconds`.
    """
    message = f"the body may have {limits.max_body_bytes} bytes at most"
    too_large = ApiError(413, "body_too_large", message)
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value) > limits.max_body_bytes:
            raise too_large
    loop = asyncio.get_running_loop()
    end = loop.time() + limits.body_seconds

    def next_progress() -> float:
        return min(end, loop.time() + limits.progress_seconds)

    parts: list[bytes] = []
    size = fresh = 0  # fresh: bytes within the current progress_seconds
    try:
        async with asyncio.timeout_at(next_progress()) as deadline:
            while data := await read():
                size, fresh = size + len(data), fresh + len(data)
                if size > limits.max_body_bytes:
                    raise too_large
                held.add(len(data))
                parts.append(data)
                if fresh >= limits.progress_bytes:
                    deadline.reschedule(next_progress())
                    fresh = 0
    except TimeoutError:
        timeout = ApiError(
            408,
            "request_timeout",
            f"the body must come within {limits.body_seconds:g} s, and {limits.progress_bytes} "
            f"bytes of it every {limits.progress_seconds:g} s; {size} bytes came",
        )
        timeout.answer.headers.append((b"connection", b"close"))
        raise timeout from None
    return b"".join(parts)


# Turns and retries


class LineFull(KvferryError):
    """The line, or this client's part of it, is full."""


@dataclass(eq=False, slots=True)
class _Place:
    besides: Collection[Any]
    turn: asyncio.Future[bool]  # False: something changed, look again


class Turns:
    """The line of requests that wait for an engine with room."""

    def __init__(
        self,
        most: int,
        share: float,
        room: Callable[[Collection[Any]], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`room` counts the requests that can go now, without those engines that it is given."""
        self._quota = Quota(most, share)
        self._room = room
        self._clock = clock
        self._line: dict[str, deque[_Place]] = {}  # by client; whose turn is next comes first
        self._ahead = 0  # requests that have their turn, and have not gone yet
        self._ends: deque[float] = deque(maxlen=_ENDS)

    @property
    def waiting(self) -> int:
        return self._quota.taken

    def at_once(self, besides: Collection[Any] = ()) -> bool:
        """Whether a new request may go now."""
        return not self._line and self._room(besides) > self._ahead

    async def wait(self, client: str, besides: Collection[Any], seconds: float) -> bool:
        """Wait for a turn. If there is none within `seconds`, or sooner if engines changed: False.

        The caller uses its turn before it awaits anything. Raises LineFull.
        """
        if lack := self._quota.take(client):
            most = self._quota.most_each if lack == "address" else self._quota.most
            raise LineFull(f"{most} requests {'of this client ' * (lack == 'address')}wait")
        mine = _Place(besides, asyncio.get_running_loop().create_future())
        self._line.setdefault(client, deque()).append(mine)
        gone = True  # by cancellation
        try:
            self.give()
            with anyio.move_on_after(seconds):
                await mine.turn
            gone = False
        finally:
            self._quota.take(client, -1)
            granted = mine.turn.done() and not mine.turn.cancelled() and mine.turn.result()
            if granted:
                self._ahead -= 1
            else:
                self._leave(client, mine)
            if granted and gone:
                self.give()  # to another
        return granted

    def give(self) -> None:
        """Give turns to as many as there is room for."""
        gave = True
        while gave and self._line and self._room(()) > self._ahead:
            gave = False
            for client, line in list(self._line.items()):
                found = next((w for w in line if self._room(w.besides) > self._ahead), None)
                if found is None:
                    continue
                self._leave(client, found)
                if line:  # the client is last now
                    self._line[client] = self._line.pop(client)
                self._ahead += 1
                found.turn.set_result(True)
                gave = True

    def stir(self, hopeless: Callable[[Collection[Any]], bool]) -> None:
        """Let those look again, in their order, who wait in vain without the engines `besides`."""
        for client, line in list(self._line.items()):
            for waiting in [w for w in line if hopeless(w.besides)]:
                self._leave(client, waiting)
                if not waiting.turn.done():
                    waiting.turn.set_result(False)

    def ended(self) -> None:
        """A request ended, and left room."""
        self._ends.append(self._clock())
        self.give()

    def expected_seconds(self) -> float:
        """When a request that comes now should have its turn, by how fast requests end."""
        if len(self._ends) < 2:
            return _LATEST_SECONDS / 2
        each = (self._clock() - self._ends[0]) / len(self._ends)
        return min(max((self.waiting + 1) * each, _SOONEST_SECONDS), _LATEST_SECONDS)

    def _leave(self, client: str, waiting: _Place) -> None:
        line = self._line.get(client)
        if line is not None and waiting in line:
            line.remove(waiting)
            if not line:
                del self._line[client]


class RetryBudget:
    """How many retries all requests together may cause."""

    def __init__(self, share: float, burst: int) -> None:
        self.left = float(burst)
        self.refused = 0
        self._share = share
        self._burst = burst

    def request(self) -> None:
        """A request came."""
        self.left = min(self._burst, self.left + self._share)

    def take(self) -> bool:
        if self.left < 1:
            return False
        self.left -= 1
        return True
