# SPDX-License-Identifier: Apache-2.0
"""Limits what slow, numerous or hostile clients can take of the router.

Three things are limited, in total and per client address: connections, requests in flight, and the
memory of bodies and answers. The address is that of the connection; headers such as
X-Forwarded-For are not believed.

A connection is at one of three stages, and each stage has its deadline:

    HEAD     no complete request yet: new, idle, or sending headers      `header_seconds`
    BODY     the headers are complete, the body is not                   see `read_body`
    SERVING  the request is complete, its answer is not                  `client_seconds` for a
                                                                         client that does not read

When an address or the router has no connection left, the oldest one at HEAD is closed, then the
oldest one at BODY. So an incomplete request never keeps a complete one out.
"""

from __future__ import annotations

import asyncio
import enum
import ipaddress
import resource
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from kvferry.errors import DescriptionError
from kvferry.router.api import ApiError, Headers, Limits

if TYPE_CHECKING:
    from kvferry.router.clients import ClientConnection

Lack = Literal["address", "all"]  # whose limit is reached

LIVE_STREAM = "/live/stream"  # see `page`

# An engine's server may refuse long headers by closing the connection, which looks like a failed
# engine. These limits are a guess at what engines take.
_MAX_HEADER_BYTES = 32 << 10
_MAX_HEADERS = 128
# The router holds a byte of a body twice: as it came, and as an engine gets it. It holds a byte of
# an answer twice while it joins the parts.
_COPIES = 2
# The first bytes of each request are free: a prompt of usual size must get in while large uploads
# use up the memory. `max_connections` bounds how often this is granted.
_FREE_BYTES = 64 << 10
_SWEEP_SECONDS = 0.5
RETRY_SECONDS = 1.0  # after a refusal; requests end all the time
_OWN_FILES = 64  # descriptors of the interpreter, the log, the event loop, the listening socket
_MOST_AHEAD = 1024  # connections that the event loop has accepted, and that are not admitted yet


def address_of(client: tuple[Any, ...] | None) -> str:
    """The address that a quota counts: an IPv4 address, or an IPv6 /64, which is one customer."""
    if not client:  # it is gone already
        return ""
    address = ipaddress.ip_address(str(client[0]).partition("%")[0])
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), 64), strict=False))


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
        """One of them, for a while. `what` and `code` say what it is. Raises ApiError 429."""
        if lack := self.take(address):
            count = self.most if lack == "all" else f"{self.most_each} of your address"
            message = f"{what}: {count}, the most allowed; try again soon"
            raise ApiError(429, code, message, later_seconds)
        try:
            yield
        finally:
            self.take(address, -1)


class MemoryLimit(Quota):
    """The memory for bodies and answers of all requests."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits.max_held_bytes, limits.address_share)
        self.uploads: dict[RequestMemory, None] = {}  # unfinished bodies, the oldest first
        self._grace_seconds = limits.progress_seconds

    def drop_oldest(self, lack: Lack, wanted_by: RequestMemory) -> bool:
        """Drop the oldest unfinished body, of one address or of all; False if there is none.

        A body is safe for `progress_seconds`. Otherwise a steady flow of uploads would drop each
        other, and none would ever be complete.
        """
        now = asyncio.get_running_loop().time()
        for held in self.uploads:
            if now - held.since < self._grace_seconds:
                return False
            fits = lack == "all" or held.address == wanted_by.address
            if held.charged and held is not wanted_by and fits:
                del self.uploads[held]
                held.drop(lack)
                return True
        return False


class RequestMemory:
    """What one request holds of the memory for all bodies and answers."""

    def __init__(self, memory: MemoryLimit, address: str) -> None:
        self.address = address
        self.bytes = 0
        self.charged = 0
        self.dropped: Lack | None = None  # for want of this, another request has its memory
        self.since = 0.0  # when its upload began, in the loop's time
        self._memory = memory
        self._deadline: asyncio.Timeout

    def add(self, count: int) -> None:
        """Charge for `count` more bytes; a negative count gives back. Raises ApiError."""
        self.require_kept()
        self.bytes += count
        charge = _COPIES * max(0, self.bytes - _FREE_BYTES) - self.charged
        while charge and (lack := self._memory.take(self.address, charge)):
            if not self._memory.drop_oldest(lack, self):
                raise self._refusal(lack)
        self.charged += charge

    @contextmanager
    def upload(self, deadline: asyncio.Timeout) -> Iterator[None]:
        """Until the body is complete, another request may drop it, which ends its deadline."""
        self._deadline, self.since = deadline, asyncio.get_running_loop().time()
        self._memory.uploads[self] = None
        try:
            yield
        finally:
            self._memory.uploads.pop(self, None)

    def drop(self, lack: Lack) -> None:
        self.dropped = lack
        self.close()
        if not self._deadline.expired():
            self._deadline.reschedule(self.since)

    def require_kept(self) -> None:
        """Raises ApiError if another request has its memory."""
        if self.dropped:
            raise self._refusal(self.dropped)

    def close(self) -> None:
        self._memory.take(self.address, -self.charged)
        self.charged = 0

    def _refusal(self, lack: Lack) -> ApiError:
        if lack == "address":
            message = f"your address has {self._memory.most_each} bytes here; try again soon"
            return ApiError(429, "too_many_bytes", message, RETRY_SECONDS)
        message = f"the router holds {self._memory.most} bytes, its most; try again soon"
        return ApiError(503, "router_full", message, RETRY_SECONDS)


class ClientGone(Exception):
    """The client closed its connection, or stopped reading or writing."""


def require_short(headers: Headers) -> None:
    """Refuse a request with more headers than engines take. Raises ApiError."""
    if len(headers) > _MAX_HEADERS or sum(len(k) + len(v) for k, v in headers) > _MAX_HEADER_BYTES:
        most = f"at most {_MAX_HEADERS} headers, of {_MAX_HEADER_BYTES} bytes together"
        raise ApiError(431, "headers_too_large", most)


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
            with held.upload(deadline):
                while data := await read():
                    size, fresh = size + len(data), fresh + len(data)
                    if size > limits.max_body_bytes:
                        raise too_large
                    held.add(len(data))
                    parts.append(data)
                    if fresh >= limits.progress_bytes:
                        deadline.reschedule(next_progress())
                        fresh = 0
            held.require_kept()
    except TimeoutError:
        held.require_kept()
        timeout = ApiError(
            408,
            "request_timeout",
            f"the body must come within {limits.body_seconds:g} s, and {limits.progress_bytes} "
            f"bytes of it every {limits.progress_seconds:g} s; {size} bytes came",
        )
        timeout.answer.headers.append((b"connection", b"close"))
        raise timeout from None
    return b"".join(parts)


class Stage(enum.Enum):
    HEAD = enum.auto()
    BODY = enum.auto()
    SERVING = enum.auto()


class Guard:
    """All connections of one server."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
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
        """Close the oldest connection without a complete request; False if there is none."""
        for stage in (Stage.HEAD, Stage.BODY):
            for connection in self._stages[stage]:
                if address in (None, connection.address):
                    self.forget(connection)
                    connection.transport.abort()
                    return True
        return False

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connections in self._stages.values():
            for connection in [c for c in connections if c.overdue(now, self._limits)]:
                connection.transport.abort()
        loop.call_later(_SWEEP_SECONDS, self._sweep, loop)


def _connections_by_files(limits: Limits) -> int:
    """How many connections the limit of descriptors allows, which is raised as far as needed.

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
