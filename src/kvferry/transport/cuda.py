"""The carrier between processes with GPUs on one host: a kernel copies, one-sided.

`register` exports the allocations that regions lie in as CUDA IPC handles; `connect` opens them,
once per peer. A transfer is a launch or a few of one kernel that executes all of its copies
(cuda_lane.py), on a stream of its own; it is done when an event after it is, and then visible at
its destination. Memory of another GPU is reached by peer access, where the hardware has it.

What is copied without Triton, what a batch costs and how it is cut: cuda_lane.py, cuda_work.py.

The owner takes no part in a transfer. That it still lives is seen on a connection (alive.py)
which it holds open as long as its carrier is: looked at before, between and after launches. The
driver keeps the memory of a dead process while others have it open, so copies from it are wrong,
not fatal; a transfer during which the owner ended is `PeerLost`.

The owner cannot stop a peer's writes (`can_revoke` is false), and an IPC handle opens the whole
allocation: the initiator checks every copy against the regions that the endpoint names. The
endpoint is a capability: hand it only to peers that have authenticated.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvferry.errors import Cancelled, ProtocolError, TransferError
from kvferry.transport import cuda_kernels
from kvferry.transport.base import CopyArrays, MemoryRegion, StridedCopies, Transfer
from kvferry.transport.alive import Beacon, Sign, Watch
from kvferry.transport.cuda_driver import (
    IPC_HANDLE_BYTES,
    CudaError,
    Device,
    Place,
    device,
    device_count,
    place_of,
)
from kvferry.transport.cuda_lane import Lanes
from kvferry.transport.cuda_mapped import Mapped, place
from kvferry.transport.cuda_work import runs_of
from kvferry.transport.jobs import Job, Workers
from kvferry.transport.local import _boot as boot_id

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


class Allocation(msgspec.Struct, frozen=True, array_like=True):
    """Memory that one IPC handle opens."""

    base: int
    bytes: int
    handle: bytes
    gpu: bytes  # its uuid


class CudaEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """Which process this is, how to see that it lives, and what of its memory can be opened."""

    carrier: str
    boot: str
    pid: int
    alive: Sign
    allocations: list[Allocation]
    regions: list[tuple[int, int]]

    @classmethod
    def decode(cls, raw: bytes) -> CudaEndpoint:
        try:
            endpoint = msgspec.msgpack.decode(raw, type=cls)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"this is not the endpoint of a cuda carrier: {error}") from None
        bad = any(len(a.handle) != IPC_HANDLE_BYTES for a in endpoint.allocations)
        if endpoint.carrier != "cuda" or bad or not endpoint.alive.valid():
            raise ProtocolError(f"this is not a cuda carrier's endpoint: {endpoint.carrier!r}")
        return endpoint


class CudaPeer:
    """A process whose device memory this one has open."""

    def __init__(self, watch: Watch, memory: Mapped, opened: list[int], on: Device) -> None:
        self.memory, self._watch, self._opened, self._device = memory, watch, opened, on
        self._lock = threading.Lock()
        self._users = 0
        self.connected = True

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Its memory stays open meanwhile."""
        with self._lock:
            self.require_connected()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
            self._close_if_unused()

    def require_connected(self) -> None:
        if not self.connected:
            raise Cancelled("the peer was disconnected on this side")

    def require_alive(self) -> None:
        self._watch.require()

    def check(self) -> None:
        self.require_connected()
        self.require_alive()

    def disconnect(self) -> None:
        self.connected = False
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        with self._lock:
            if self.connected or self._users:
                return
            opened, self._opened = self._opened, []
        self._watch.close()
        with self._device.current():
            for address in opened:
                with contextlib.suppress(CudaError):
                    self._device.close(address)


class CudaCarrier:
    """`triton=False` copies without kernels; `host` is where the liveness connection listens."""

    name = "cuda"
    can_revoke = False
    takes_strided = True

    def __init__(
        self,
        *,
        secret: bytes | str | None = None,
        host: str | None = None,
        workers: int = 4,
        triton: bool | None = None,
    ) -> None:
        del secret  # what is handed out is a capability by itself
        self._host = host or LOOPBACK
        self._triton = triton
        self._workers = Workers("kvferry-cuda", workers)
        self._regions: list[MemoryRegion] = []
        self._places: dict[int, Place] = {}  # allocations by base
        self._memory = Mapped.of([])
        self._device: Device | None = None
        self._lanes: Lanes | None = None
        self._beacon: Beacon | None = None
        self._peers: list[CudaPeer] = []
        self._lock = threading.Lock()
        self._endpoint: bytes | None = None
        self._closed = False
        if device_count() == 0:
            raise TransferError("this process sees no GPU (CUDA_VISIBLE_DEVICES?)")

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        for region in regions:
            if region.bytes == 0:
                continue
            first, last = place_of(region.address), place_of(region.address + region.bytes - 1)
            if first is None or last is None or first.base != last.base:
                raise TransferError(
                    f"{region.bytes} bytes at {region.address:#x} are not inside one allocation of "
                    "device memory; the cuda carrier moves device memory only"
                )
            if self._device is not None and first.ordinal != self._device.ordinal:
                raise TransferError(
                    f"memory of GPU {self._device.ordinal} and of GPU {first.ordinal}: make one "
                    "carrier for each GPU"
                )
            if self._device is None:
                self._device = device(first.ordinal)
                self._lanes = Lanes(self._device, triton=self._triton)
                if self._triton is not False and cuda_kernels.available():
                    threading.Thread(
                        target=cuda_kernels.warm,
                        args=(self._device,),
                        name="kvferry-cuda-compile",
                        daemon=True,
                    ).start()
            self._places[first.base] = first
        self._regions += regions
        self._memory = Mapped.of(
            (_within(self._regions, p.base, p.bytes), 0) for p in self._places.values()
        )
        self._endpoint = None

    def endpoint(self) -> bytes:
        """Exports the memory and listens, from the first call on."""
        with self._lock:
            if self._closed:
                raise TransferError("the carrier is closed")
            if self._beacon is None:
                self._beacon = Beacon(self._host)
            if self._endpoint is None:
                self._endpoint = msgspec.msgpack.encode(
                    CudaEndpoint(
                        carrier="cuda",
                        boot=boot_id(),
                        pid=os.getpid(),
                        alive=self._beacon.sign,
                        allocations=[_export(place) for place in self._places.values()],
                        regions=[(r.address, r.bytes) for r in self._memory.table.regions()],
                    )
                )
            return self._endpoint

    def connect(self, endpoint: bytes, deadline: float) -> CudaPeer:
        found = CudaEndpoint.decode(endpoint)
        if found.boot != boot_id():
            raise TransferError(
                "the peer runs on another host; the cuda carrier works within one. Use `tcp`, "
                "which stages device memory, or a carrier with RDMA"
            )
        mine = self._device or device(0)
        watch = found.alive.watch(deadline)
        opened: list[int] = []
        try:
            with mine.current():
                bases = {a.base: self._open(found, a, mine, opened) for a in found.allocations}
            regions = [MemoryRegion(address, size) for address, size in found.regions]
            memory = Mapped.of(
                (_within(regions, a.base, a.bytes), bases[a.base] - a.base)
                for a in found.allocations
            )
        except BaseException:
            watch.close()
            with mine.current():
                for address in opened:
                    mine.close(address)
            raise
        peer = CudaPeer(watch, memory, opened, mine)
        with self._lock:
            if not self._closed:
                self._peers.append(peer)
                return peer
        peer.disconnect()
        raise Cancelled("the carrier was closed")

    def read(self, peer: CudaPeer, copies: CopyArrays | StridedCopies) -> Transfer:
        return self._submit(peer, copies, reading=True)

    def write(self, peer: CudaPeer, copies: CopyArrays | StridedCopies) -> Transfer:
        return self._submit(peer, copies, reading=False)

    def disconnect(self, peer: CudaPeer) -> None:
        with self._lock:
            if peer in self._peers:
                self._peers.remove(peer)
        peer.disconnect()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            peers, self._peers = self._peers, []
            beacon, self._beacon = self._beacon, None
        if beacon is not None:
            beacon.stop()
        self._workers.close()
        for peer in peers:
            peer.disconnect()
        if self._lanes is not None:
            self._lanes.close()

    def _open(
        self, endpoint: CudaEndpoint, allocation: Allocation, mine: Device, opened: list[int]
    ) -> int:
        """Where a peer's allocation lies in this process."""
        theirs = next(
            (d for d in map(device, range(device_count())) if d.uuid == allocation.gpu), None
        )
        if theirs is not None and not mine.can_reach(theirs):
            raise TransferError(
                f"GPU {mine.ordinal} ({mine.name}) has no peer access to GPU {theirs.ordinal} "
                f"({theirs.name}), where the peer's memory lies; use `tcp`, which stages it"
            )
        if endpoint.pid == os.getpid():
            place = place_of(allocation.base)
            if place is not None and place.base == allocation.base:  # a peer in this process
                if theirs is not None:
                    mine.reach(theirs)
                return allocation.base
        try:
            address = mine.open(allocation.handle)
        except CudaError as error:
            hint = (
                "its GPU is not visible to this process: see CUDA_VISIBLE_DEVICES"
                if theirs is None
                else "containers must share their IPC namespace (--ipc=host)"
            )
            raise TransferError(f"the peer's memory cannot be opened: {error}; {hint}") from None
        opened.append(address)
        return address

    def _submit(
        self, peer: CudaPeer, copies: CopyArrays | StridedCopies, *, reading: bool
    ) -> Transfer:
        def work(job: Job) -> None:
            lanes = self._lanes
            runs = runs_of(copies)
            there, here = peer.memory, self._memory
            src, dst = (there, here) if reading else (here, there)
            parts = place(runs, src, dst, reading=reading)
            with peer.used():
                peer.check()
                if lanes is None or runs.copies == 0:
                    return

                def check() -> None:
                    job.checkpoint()
                    peer.check()

                with lanes.lane() as lane:
                    for part, shifts in parts:
                        lane.copy(part, shifts, check=check)
                    lane.finish()
                peer.require_alive()  # it was there, and open, all along

        return self._workers.submit(Job(work, "a cuda read" if reading else "a cuda write"))


def _export(place: Place) -> Allocation:
    owner = device(place.ordinal)
    try:
        with owner.current():
            handle = owner.export(place.base)
    except CudaError as error:
        raise TransferError(
            f"device memory at {place.base:#x} cannot be shared between processes: {error}. It was "
            "not allocated by cudaMalloc; with torch, set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
        ) from None
    return Allocation(place.base, place.bytes, handle, owner.uuid)


def _within(regions: Iterable[MemoryRegion], base: int, size: int) -> list[MemoryRegion]:
    """The regions that lie in one allocation."""
    return [r for r in regions if base <= r.address and r.address + r.bytes <= base + size]
