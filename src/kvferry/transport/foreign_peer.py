"""A peer of a carrier whose bytes another library moves: its endpoint, and what runs towards it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import Cancelled, ProtocolError, TransferError
from kvferry.transport.base import Ints, MemoryRegion
from kvferry.transport.jobs import Job, Workers
from kvferry.transport.pulse import TOKEN_BYTES, Pulse
from kvferry.transport.regions import Arrays, RegionTable, slices
from kvferry.wire.names import is_loopback

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")
THREADS_PER_PEER = 2  # take turns by batch: a long transfer does not shut out a short one
ON_HOST, MOST_GPU = -1, 1 << 16  # no GPU's number, and more than there are
TURN_LOOK_SECONDS = 0.02  # between two looks at cancel, for one that waits for its turn


class ForeignEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """Where the owner's pulse is, what it registered, and what its library needs to be reached."""

    carrier: str
    flavour: str  # protocol or backends: both sides must have the same
    host: str
    pulse_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    token: bytes
    incarnation: bytes
    regions: list[tuple[int, int]]
    # the number of the GPU that holds the regions, or `ON_HOST`
    device: Annotated[int, msgspec.Meta(ge=ON_HOST, le=MOST_GPU)]
    address: bytes

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
        self.workers = Workers(f"kvferry-{endpoint.carrier}", THREADS_PER_PEER)
        self._turn = threading.Lock()

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
    follows = _follow(part.src, part.length)
    if not bool(follows.any()):
        return part  # as most often
    apart = ~(follows & _follow(part.dst, part.length))
    if bool(apart.all()):
        return part
    heads = np.concatenate((np.zeros(1, dtype=np.int64), np.flatnonzero(apart) + 1))
    return Arrays(part.src[heads], part.dst[heads], np.add.reduceat(part.length, heads))


def _follow(address: Ints, length: Ints) -> NDArray[np.bool_]:
    """For each copy but the first, whether it begins where the one before it ends."""
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
