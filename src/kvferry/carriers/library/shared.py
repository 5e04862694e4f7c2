# SPDX-License-Identifier: Apache-2.0
"""The common part of carriers whose bytes another library moves: `mooncake` and `nixl`.

The library moves batches between two processes. This module adds the rest of the `Carrier`
protocol:

    bounds      checked here, against the endpoint's regions, before the library sees a descriptor
    batches     below the library's limits, neighbours joined
    threads     the library's blocking calls run on a few threads for each peer, so a peer that
                does not answer delays its own transfers only
    liveness    a connection beside the data plane, checked before, during and after each transfer
    the end     no library here can take back a batch that it has begun. A cancelled transfer ends
                with the batch under way. If the batch does not come back, the transfer is
                *abandoned* until the library returns it or the peer is dead

These data planes have no authentication: a process that reaches their ports can read and write all
registered memory, and with UCX over TCP any memory of the process. A peer that has the secret is
trusted with the content of its endpoint. Use them in networks whose hosts you trust
(docs/security.md).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np

from kvferry.carriers.base import (
    Carrier,
    MemoryRegion,
    RegionTable,
    Transfer,
    checked,
    decode_endpoint,
    slices,
)
from kvferry.carriers.liveness import Liveness, LivenessServer, Token
from kvferry.carriers.transfer import CANCEL_SECONDS, Job, Workers
from kvferry.copies import Copies
from kvferry.errors import Cancelled, DeadlineExceeded, PeerLost, ProtocolError, TransferError
from kvferry.net.keys import Key
from kvferry.net.names import EVERYWHERE, LOCALHOST, Admits, Reach, is_loopback

log = logging.getLogger(__name__)

# Held while the process has variables of ours, which another carrier must not take for the user's.
ENVIRONMENT = threading.RLock()
RDMA_DEVICES = Path("/sys/class/infiniband")
ON_HOST, MOST_GPU = -1, 1 << 16  # not on a GPU; more GPUs than exist
THREADS_PER_PEER = 2  # take turns by batch, so that a long transfer does not delay a short one
TURN_LOOK_SECONDS = 0.02  # between two checks for a cancel, while a transfer waits for its turn
GRACE_SECONDS = 1.0  # a dead peer's data plane may fail before its liveness connection does
LATE_SECONDS = 60.0  # longer than any timeout after which a library drops a connection
LATE_LOOK_SECONDS = 0.02
SCRATCH_BYTES = 4096  # registered, for the byte that `connect` reads


class LibraryEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """The owner's liveness server, its registered regions, and its address in the library."""

    carrier: str
    flavour: str  # protocol or backends: both sides must have the same
    host: str
    liveness_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    token: Token
    incarnation: Token
    regions: list[tuple[int, int]]
    # the number of the GPU that holds the regions, or `ON_HOST`
    gpu: Annotated[int, msgspec.Meta(ge=ON_HOST, le=MOST_GPU)]
    address: bytes

    @classmethod
    def decode(cls, raw: bytes, carrier: str) -> LibraryEndpoint:
        endpoint = decode_endpoint(_endpoints, raw, carrier)
        if endpoint.carrier != carrier:
            raise ProtocolError(f"this is not a {carrier} endpoint, but {endpoint.carrier!r}")
        return endpoint


_endpoints = msgspec.msgpack.Decoder(LibraryEndpoint)


class LibraryCarrier(Carrier):
    """`host` is the address at which peers reach this carrier. The libraries do not use `secret`:
    it only permits a `host` of a network. `admits` says which of the hosts that endpoints name may
    be dialed. Both sides must have the same `flavour`. `gpu`: the number of the GPU that holds the
    registered memory; either side may be a host's memory.

    A subclass moves batches between two processes by its library. It sets its own attributes before
    it calls this constructor, which calls `_start`.
    """

    batch_descriptors: ClassVar[int]
    batch_bytes: ClassVar[int]
    listens_everywhere: ClassVar[bool] = False  # whatever `host` is

    def __init__(
        self,
        *,
        host: str | None,
        secret: bytes | str | None,
        flavour: str,
        gpu: int = ON_HOST,
        admits: Admits | None = None,
        workers: int = THREADS_PER_PEER,
    ) -> None:
        self.host = host or LOCALHOST
        self.gpu, self._workers = gpu, workers
        look_at_host(self.name, self.host, self.listens_everywhere)
        self._reach = Reach(secret is not None and Key.of(secret).configured, admits)
        self._reach.require_listening(self.host)
        self.flavour = flavour
        self._lock = threading.Lock()
        self._table = RegionTable.of([])  # the regions in the endpoint
        self._registered: list[MemoryRegion] = []  # with the library
        self._peers: list[LibraryPeer] = []
        self._scratch = np.zeros(SCRATCH_BYTES, dtype=np.uint8)
        self._own = MemoryRegion(self._scratch.ctypes.data, SCRATCH_BYTES)
        self._closed = self._was_shut = False
        self._liveness = LivenessServer(self.host)
        try:
            self._start()
            self.register_one(self._own)
        except BaseException:  # also an error of the library's own
            self._liveness.close()
            raise

    @abstractmethod
    def _start(self) -> None:
        """Start the library's part, or raise `TransferError`."""

    @abstractmethod
    def register_one(self, region: MemoryRegion) -> None:
        """Register a region with the library, or raise `TransferError`."""

    @abstractmethod
    def unregister_one(self, region: MemoryRegion) -> None:
        """Unregister a region. Never raises."""

    @abstractmethod
    def _address(self) -> bytes:
        """This side's address, for a peer's library."""

    @abstractmethod
    def _attach(self, endpoint: LibraryEndpoint) -> Any:
        """The library's handle for a peer."""

    @abstractmethod
    def _detach(self, handle: Any) -> None:
        """Drop a peer. Nothing of ours is under way to or from it."""

    @abstractmethod
    def _carry(self, job: Job, peer: LibraryPeer, batch: Copies, *, reading: bool) -> None:
        """Move one batch. Returns or raises when the library no longer uses its memory."""

    @abstractmethod
    def _shut(self) -> None:
        """End the library's part; nothing of ours is under way in it."""

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """On the host, joins neighbours to one region, and registers that again. Neighbours on a
        GPU may be allocations of their own, and no driver registers two as one."""
        with self._lock:
            before = self._registered
            table = RegionTable.of([*before, *regions])
            after = table.regions() if self.gpu == ON_HOST else [*before, *regions]
            for region in set(before) - set(after):
                self.unregister_one(region)
            for region in set(after) - set(before):
                self.register_one(region)
            self._registered, self._table = after, table

    def endpoint(self) -> bytes:
        if self._closed:
            raise TransferError("the carrier is closed")
        return msgspec.msgpack.encode(
            LibraryEndpoint(
                carrier=self.name,
                flavour=self.flavour,
                host=self.host,
                liveness_port=self._liveness.port,
                token=self._liveness.token,
                incarnation=self._liveness.incarnation,
                regions=[(r.address, r.bytes) for r in self._registered],
                gpu=self.gpu,
                address=self._address(),
            )
        )

    def connect(self, endpoint: bytes, deadline: float) -> LibraryPeer:
        """Connect to the peer's liveness server, and read one byte of its memory by the library."""
        if self._closed:
            raise Cancelled("the carrier was closed")
        found = LibraryEndpoint.decode(endpoint, self.name)
        if found.flavour != self.flavour:
            raise TransferError(
                f"the peer's {self.name} uses {found.flavour}, this one {self.flavour}; configure "
                "both alike"
            )
        self._reach.require(found.host)
        if found.address == self._address():  # we would reach our own memory
            raise ProtocolError(f"the peer names this very process as the owner of its {self.name}")
        regions = RegionTable.of([MemoryRegion(a, n) for a, n in found.regions])
        liveness = Liveness.connect(
            found.host, found.liveness_port, found.token, found.incarnation, deadline
        )
        peer = LibraryPeer(found, regions, liveness, self._workers)
        with self._lock:
            closed = self._closed
            if not closed:
                self._peers.append(peer)
        if closed:
            liveness.close()
            raise Cancelled("the carrier was closed")
        try:
            greeting = LibraryJob(self, peer, lambda job: self._greet(job, peer), "connecting")
            peer.workers.submit(greeting).wait(deadline)
        except TransferError:
            peer.connected = False
            self._end(peer, 0.0)  # the time is over; a stuck job tidies up when it ends
            raise
        return peer

    def disconnect(self, peer: LibraryPeer) -> None:
        """End its transfers. The library drops the peer after the last of them."""
        peer.connected = False
        self._end(peer, CANCEL_SECONDS)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            peers = list(self._peers)
        self._liveness.leave()
        for peer in peers:
            peer.connected = False
            peer.workers.end_soon()
        until = time.monotonic() + CANCEL_SECONDS
        for peer in peers:
            self._end(peer, max(0.0, until - time.monotonic()))
        self._shut_if_last()

    def ended(self, peer: LibraryPeer) -> None:
        """A job has ended. A thread that disconnects its peer after this check sees that."""
        if not peer.connected:
            self._let_go(peer)

    def abandon(self, job: LibraryJob) -> None:
        """Log a transfer whose end was not seen in time. Once for each."""
        with self._lock:
            if job.abandoned:
                return
            job.abandoned = True
        log.error(
            "a %s transfer is abandoned: the library has not let go of its memory, which counts as "
            "in use until it does",
            self.name,
        )

    def _end(self, peer: LibraryPeer, seconds: float) -> None:
        peer.workers.close(seconds)
        for job in peer.workers.busy:
            if isinstance(job, LibraryJob):
                self.abandon(job)
        self._let_go(peer)

    def _let_go(self, peer: LibraryPeer) -> None:
        """Forget a disconnected peer, unless a transfer is left."""
        with self._lock:
            if peer not in self._peers or peer.workers.busy:
                return
            self._peers.remove(peer)
        peer.liveness.close()
        if peer.handle is not None:
            self._detach(peer.handle)
        self._shut_if_last()

    def _shut_if_last(self) -> None:
        """End the library's part of a closed carrier, once it has no peer left."""
        with self._lock:
            if not self._closed or self._peers or self._was_shut:
                return
            self._was_shut = True
        for region in (*self._registered, self._own):
            self.unregister_one(region)
        self._shut()
        self._liveness.close()  # the last: until then, bytes may be on their way to peers

    def _greet(self, job: Job, peer: LibraryPeer) -> None:
        peer.handle = self._attach(peer.endpoint)
        if len(peer.regions):
            one = np.ones(1, dtype=np.int64)
            into = np.array([self._own.address], dtype=np.int64)
            self._move(job, peer, Copies(peer.regions.starts[:1], into, one), reading=True)

    def submit(self, peer: LibraryPeer, copies: Copies, *, reading: bool) -> Transfer:
        def work(job: Job) -> None:
            arrays = checked(copies, ours=self._table, theirs=peer.regions, reading=reading)
            # neighbours that were registered apart are one region of a table, but not of a library
            apart = len(peer.endpoint.regions) > len(peer.regions)
            apart |= len(self._registered) > len(self._table)
            limits = self.batch_descriptors, self.batch_bytes
            for batch in batches(arrays, *limits, join=not apart):
                with peer.turn(job):
                    self._move(job, peer, batch, reading=reading)
            job.checkpoint()
            peer.require_usable()  # the bytes are right only if the peer was open until now

        what = f"a {self.name} {'read' if reading else 'write'}"
        return peer.workers.submit(LibraryJob(self, peer, work, what))

    def _move(self, job: Job, peer: LibraryPeer, batch: Copies, *, reading: bool) -> None:
        """Move a batch. If it fails and the peer is gone, raise `PeerLost` as the better reason."""
        try:
            self._carry(job, peer, batch, reading=reading)
        except (Cancelled, PeerLost):
            raise
        except TransferError as error:
            if peer.connected and not peer.liveness.alive(GRACE_SECONDS):
                raise PeerLost(f"the peer is gone ({error})") from None
            raise


class LibraryPeer:
    """A process that this one is connected to; `handle` is the library's name for it."""

    def __init__(
        self, endpoint: LibraryEndpoint, regions: RegionTable, liveness: Liveness, workers: int
    ) -> None:
        self.endpoint, self.regions, self.liveness = endpoint, regions, liveness
        self.handle: Any = None
        self.connected = True
        self.workers = Workers(f"kvferry-{endpoint.carrier}", workers)
        self._turn = threading.Lock()

    def require_usable(self) -> None:
        if not self.connected:
            raise Cancelled("the peer was disconnected on this side")
        self.liveness.require_alive()

    @contextlib.contextmanager
    def turn(self, job: Job) -> Iterator[None]:
        """Entered by one batch at a time: more would only compete for the library's threads."""
        while not self._turn.acquire(timeout=TURN_LOOK_SECONDS):
            job.checkpoint()
            self.require_usable()
        try:
            job.checkpoint()
            self.require_usable()
            yield
        finally:
            self._turn.release()


class LibraryJob(Job):
    """A job that failed with `late_bytes` is not settled until the peer is gone, or until the
    library has given up by itself (`LATE_SECONDS`)."""

    def __init__(
        self, carrier: LibraryCarrier, peer: LibraryPeer, work: Callable[[Job], None], what: str
    ) -> None:
        super().__init__(work, what)
        self._carrier, self._peer = carrier, peer
        self._late_until = float("inf")  # infinite until the job has ended
        self.abandoned = False

    def settled(self) -> bool:
        if not super().settled():
            return False
        if self.late_bytes:
            gone = self._peer.connected and self._peer.liveness.gone()
            self.late_bytes = time.monotonic() < self._late_until and not gone
        return not self.late_bytes

    def cancel(self, seconds: float = CANCEL_SECONDS) -> None:
        until = time.monotonic() + seconds
        try:
            super().cancel(seconds)
        except DeadlineExceeded:
            while not self.settled():
                if time.monotonic() >= until:
                    self._carrier.abandon(self)
                    raise
                time.sleep(LATE_LOOK_SECONDS)

    def run(self) -> None:
        super().run()
        self._late_until = time.monotonic() + LATE_SECONDS
        self._carrier.ended(self._peer)


def batches(
    copies: Copies, descriptors: int, max_bytes: int, *, join: bool = True
) -> Iterator[Copies]:
    for part in slices(copies, max_bytes):
        ready = part.joined() if join else part
        starts = range(0, len(ready), descriptors)
        # all at once: between two batches, a Python call takes many times as long as here
        yield from [ready[first : first + descriptors] for first in starts]


@contextlib.contextmanager
def environment(ours: Mapping[str, str]) -> Iterator[None]:
    """Set variables that the environment does not have, for a while, by one thread at a time."""
    with ENVIRONMENT:
        new = {name: value for name, value in ours.items() if name not in os.environ}
        os.environ.update(new)
        try:
            yield
        finally:
            for name in new:
                os.environ.pop(name, None)


def rdma_devices() -> list[str]:
    there = RDMA_DEVICES.iterdir() if RDMA_DEVICES.is_dir() else []
    return sorted(device.name for device in there)


def look_at_host(name: str, host: str, everywhere: bool) -> None:
    """Refuse an address that peers cannot dial, and warn of one that a network reaches."""
    if host in EVERYWHERE:
        raise TransferError(
            f"the {name} carrier needs the address that peers dial, found {host!r}; set `host` to "
            "an address of this machine"
        )
    if everywhere or not is_loopback(host):
        log.warning(
            "the %s carrier's data plane has no authentication: any process that reaches %s can "
            "read and write the caches registered here, with or without the shared secret",
            name,
            "any address of this machine" if everywhere else host,
        )
