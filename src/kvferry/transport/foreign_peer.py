"""A peer of a carrier whose bytes another library moves: its endpoint, and what runs towards it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import Cancelled, ProtocolError, TransferError
from kvferry.transport.base import Ints, MemoryRegion
from kvferry.transport.desk_visit import Busy, Visit
from kvferry.transport.jobs import Job, Workers
from kvferry.transport.pulse import TOKEN_BYTES, Pulse
from kvferry.transport.regions import Arrays, RegionTable, slices
from kvferry.wire.names import is_loopback

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")
THREADS_PER_PEER = 2  # take turns by batch: a long transfer does not shut out a short one
LANES_PER_TRANSFER = 2  # one batch is prepared, asked for or scattered while the other one moves
LEAST_SLOT_BYTES = 4096
ON_HOST = -1  # no GPU's number
DESK_SECONDS = 2.0  # for the first connection to a desk: there is another way
TURN_LOOK_SECONDS = 0.02  # between two looks at cancel, for one that waits for its turn


class ForeignEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """Where the owner's pulse is, what it registered, and what its library needs to be reached."""

    carrier: str
    flavour: str  # protocol or backends: both sides must have the same
    host: str
    pulse_port: int
    token: bytes
    incarnation: bytes
    regions: list[tuple[int, int]]
    address: bytes
    desk_port: int = 0  # none: it does not pack
    staging: tuple[int, int] = (0, 0)  # address, bytes
    slot_bytes: int = 0
    device: int = ON_HOST  # the number of the GPU that holds the regions

    @classmethod
    def decode(cls, raw: bytes, carrier: str) -> ForeignEndpoint:
        try:
            endpoint = _endpoints.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"this is not a {carrier} carrier's endpoint: {error}") from None
        if (
            endpoint.carrier != carrier
            or not len(endpoint.token) == len(endpoint.incarnation) == TOKEN_BYTES
        ):
            raise ProtocolError(f"this is not a {carrier} endpoint, but {endpoint.carrier!r}")
        begin, size = endpoint.staging
        if not (
            1 <= endpoint.pulse_port <= 65535
            and 0 <= endpoint.desk_port <= 65535
            and min(begin, size) >= 0
            and begin + size < 1 << 63
        ):
            raise ProtocolError(
                f"a {carrier} endpoint names ports {endpoint.pulse_port} and {endpoint.desk_port}, "
                f"and a staging memory of {size} bytes at {begin:#x}: there is no such thing"
            )
        if (
            endpoint.desk_port
            and not LEAST_SLOT_BYTES <= endpoint.slot_bytes <= endpoint.staging[1]
        ):
            raise ProtocolError(
                f"a {carrier} endpoint names slots of {endpoint.slot_bytes} bytes in a staging "
                f"memory of {endpoint.staging[1]}"
            )
        return endpoint

    def table(self) -> RegionTable:
        return RegionTable.of([MemoryRegion(a, n) for a, n in self.regions])


_endpoints = msgspec.msgpack.Decoder(ForeignEndpoint)  # made once: its first use is on many threads


class ForeignPeer:
    """A process that this one is connected to; `handle` is the library's name for it."""

    def __init__(self, endpoint: ForeignEndpoint, regions: RegionTable, pulse: Pulse) -> None:
        self.endpoint, self.regions, self.pulse = endpoint, regions, pulse
        self.handle: Any = None
        self.connected = True
        self.packs = False  # whether its desk was reached
        name = f"kvferry-{endpoint.carrier}"
        self.workers = Workers(name, THREADS_PER_PEER)
        self.helpers = Workers(f"{name}-help", THREADS_PER_PEER * (LANES_PER_TRANSFER - 1))
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._visits: list[Visit] = []  # connections to its desk that nobody uses

    def require_usable(self) -> None:
        if not self.connected:
            raise Cancelled("the peer was disconnected on this side")
        self.pulse.require_alive()

    @contextlib.contextmanager
    def turn(self, job: Job) -> Iterator[None]:
        """One batch at a time: more of them only compete for the library's threads."""
        while not self._turn.acquire(timeout=TURN_LOOK_SECONDS):
            job.checkpoint()
            self.require_usable()
        try:
            job.checkpoint()
            self.require_usable()
            yield
        finally:
            self._turn.release()

    def find_desk(self) -> None:
        """Where it has one: `packs` from now on, or the `TransferError` that says why not."""
        to = self.endpoint
        if to.desk_port:
            where = (to.host, to.desk_port, to.token, to.incarnation)
            with contextlib.suppress(Busy):
                self.put_visit(Visit.open(*where, DESK_SECONDS))
            self.packs = True

    def take_visit(self) -> Visit:
        """A connection to its desk: an idle one that still works, or a new one."""
        while True:
            with self._lock:
                idle = self._visits.pop() if self._visits else None
            if idle is None:
                to = self.endpoint
                return Visit.open(to.host, to.desk_port, to.token, to.incarnation)
            if idle.usable():
                return idle
            idle.close()

    def put_visit(self, visit: Visit) -> None:
        with self._lock:
            if self.connected:
                self._visits.append(visit)
                return
        visit.close()

    def close_visits(self) -> None:
        with self._lock:
            visits, self._visits = self._visits, []
        for visit in visits:
            visit.close()


def batches(copies: Arrays, descriptors: int, max_bytes: int) -> Iterator[Arrays]:
    """The same copies, neighbours joined, so many at a time."""
    for part in slices(copies, max_bytes):
        yield from cut(join(part), descriptors)


def cut(part: Arrays, descriptors: int) -> list[Arrays]:
    """All at once: between two batches, each Python call costs many times what it does here."""
    return [
        Arrays(part.src[few], part.dst[few], part.length[few])
        for few in windows(len(part), descriptors)
    ]


def windows(count: int, most: int) -> list[slice]:
    return [slice(first, first + most) for first in range(0, count, most)]


def join(part: Arrays) -> Arrays:
    """Copies that follow each other on both sides as one; none may be empty."""
    if not bool(_follow(part.src, part.length).any()):
        return part  # as most often
    apart = ~follow(part)
    if bool(apart.all()):
        return part
    heads = np.concatenate((np.zeros(1, dtype=np.int64), np.flatnonzero(apart) + 1))
    return Arrays(part.src[heads], part.dst[heads], np.add.reduceat(part.length, heads))


def follow(part: Arrays) -> NDArray[np.bool_]:
    """For each copy but the first, whether it continues the one before it on both sides."""
    return _follow(part.src, part.length) & _follow(part.dst, part.length)


def _follow(address: Ints, length: Ints) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = address[1:] - address[:-1] == length[:-1]
    return found


def look_at_host(name: str, host: str, everywhere: bool) -> None:
    """Refuse what peers cannot dial, and say who can reach the rest."""
    if host in EVERYWHERE:
        raise TransferError(
            f"the {name} carrier needs the address that peers dial, found {host!r}; set `host` to "
            "an address of this machine"
        )
    if everywhere or not is_loopback(host):
        log.warning(
            "the %s carrier's data plane authenticates nobody: whoever reaches %s can read and "
            "write the caches registered here, whether or not there is a shared secret",
            name,
            "any address of this machine" if everywhere else host,
        )
