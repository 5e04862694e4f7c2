# SPDX-License-Identifier: Apache-2.0
"""The carrier between processes with GPUs on one host: a kernel copies, one-sided.

`register` finds the allocations in which the regions lie. `endpoint` exports them as CUDA IPC
handles, and `connect` opens them, once per peer. A transfer is one launch, or a few, of a kernel
that executes all of its copies (stream.py). It is done when an event after them is. Memory of
another GPU is reached by peer access, if the hardware has it.

The owner takes no part in a transfer. It holds a connection open as long as its carrier is open
(liveness.py), and the initiator checks this connection between and after launches. The driver keeps
the memory of a dead process while others have it open, so copies from it do not crash. But their
bytes are wrong, so a transfer during which the owner ended raises `PeerLost`.

An IPC handle opens the whole allocation, so the initiator checks every copy against the owner's
regions. It does not trust the endpoint alone: the owner has vouched for it (vouch.py), and the
driver says how much memory a handle has opened.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.carriers.base import Carrier, MemoryRegion, Transfer, TransferState, decode_endpoint
from kvferry.carriers.cuda import kernels
from kvferry.carriers.cuda.driver import (
    IPC_HANDLE_BYTES,
    CudaError,
    Device,
    DevicePlace,
    device,
    device_count,
    is_mapped,
    place_of,
)
from kvferry.carriers.cuda.stream import NAP_SECONDS, Mapped, Pool, StreamBuffers
from kvferry.carriers.liveness import TOKEN_BYTES, Liveness, LivenessServer, Token
from kvferry.carriers.local import MOST_ADDRESS, boot_id
from kvferry.carriers.transfer import CANCEL_SECONDS
from kvferry.carriers.vouch import ask, forget, vouch_for
from kvferry.copies import Copies, StridedCopies
from kvferry.errors import Cancelled, DeadlineExceeded, ProtocolError, TransferError
from kvferry.net.keys import Key
from kvferry.net.names import LOCALHOST, Admits, Reach
from kvferry.workers import start_compiler

log = logging.getLogger(__name__)


class CudaCarrier(Carrier):
    """`triton=False` copies without kernels; `host` is where the liveness connection listens."""

    name = "cuda"
    takes_strided = True

    def __init__(
        self,
        *,
        secret: bytes | str | None = None,
        host: str | None = None,
        triton: bool | None = None,
        admits: Admits | None = None,
    ) -> None:
        self._host = host or LOCALHOST
        self._reach = Reach(secret is not None and Key.of(secret).configured, admits)
        self._reach.require_listening(self._host)
        self._told: set[bytes] = set()  # endpoints that were given out
        self._triton = triton
        self._regions: list[MemoryRegion] = []
        self._places: dict[int, DevicePlace] = {}  # allocations by base
        self.memory = Mapped.of([])
        self._device: Device | None = None
        self._pool: Pool[StreamBuffers] | None = None
        self._liveness: LivenessServer | None = None
        self._peers: list[CudaPeer] = []
        self._transfers = CudaTransfers()
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
            if first is None or last is None:
                raise TransferError(
                    f"{region.bytes} bytes at {region.address:#x} are not inside one allocation of "
                    "device memory; the cuda carrier moves device memory only"
                )
            if first.base != last.base:
                raise _not_shared(region.address, "it is made of several allocations")
            if self._device is not None and first.ordinal != self._device.ordinal:
                raise TransferError(
                    f"memory of GPU {self._device.ordinal} and of GPU {first.ordinal}: make one "
                    "carrier for each GPU"
                )
            if self._device is None:
                self._device = device(first.ordinal)
                self._pool = self._buffers_of(self._device)
                if self._triton is not False and kernels.available():
                    start_compiler(partial(kernels.warm, self._device), "kvferry-cuda-compile")
            self._places[first.base] = first
        self._regions += regions
        self.memory = Mapped.of(
            (within(self._regions, p.base, p.bytes), 0) for p in self._places.values()
        )
        self._endpoint = None

    def _buffers_of(self, on: Device) -> Pool[StreamBuffers]:
        return Pool(on, partial(StreamBuffers, on, triton=self._triton))

    def endpoint(self) -> bytes:
        """The first call exports the memory and begins to listen."""
        with self._lock:
            if self._closed:
                raise TransferError("the carrier is closed")
            if self._liveness is None:
                self._liveness = LivenessServer(self._host)
            if self._endpoint is None:
                self._endpoint = vouch_for(partial(self._described, self._liveness))
                self._told.add(self._endpoint)
            return self._endpoint

    def _described(self, liveness: LivenessServer, voucher: str) -> bytes:
        return msgspec.msgpack.encode(
            CudaEndpoint(
                carrier="cuda",
                boot=boot_id(),
                process=this_process(),
                host=self._host,
                liveness_port=liveness.port,
                token=liveness.token,
                incarnation=liveness.incarnation,
                allocations=[export(place) for place in self._places.values()],
                regions=[(r.address, r.bytes) for r in self.memory.table.regions()],
                voucher=voucher,
            )
        )

    def connect(self, endpoint: bytes, deadline: float) -> CudaPeer:
        found = CudaEndpoint.decode(endpoint)
        if found.boot != boot_id():
            raise TransferError(
                "the peer runs on another host; the cuda carrier works within one. Use `tcp`, "
                "which stages device memory, or a carrier with RDMA"
            )
        self._reach.require(found.host)
        owner = ask(found.voucher, endpoint, deadline)
        if (owner == os.getpid()) != (found.process == this_process()):
            raise ProtocolError(f"process {owner} vouches for memory that is not its own")
        mine = self._device or device(0)
        liveness = Liveness.connect(
            found.host, found.liveness_port, found.token, found.incarnation, deadline
        )
        opened: list[int] = []
        try:
            with mine.current():
                bases = {a.base: self._open(found, a, mine, opened) for a in found.allocations}
            regions = [MemoryRegion(address, size) for address, size in found.regions]
            memory = Mapped.of(
                (within(regions, a.base, a.size), bases[a.base] - a.base) for a in found.allocations
            )
        except BaseException:
            liveness.close()
            _close_all(mine, opened)
            raise
        near = all(a.gpu == mine.uuid for a in found.allocations)
        peer = CudaPeer(liveness, memory, opened, mine, near=near)
        with self._lock:
            if not self._closed:
                self._peers.append(peer)
                return peer
        peer.disconnect()
        raise Cancelled("the carrier was closed")

    def disconnect(self, peer: CudaPeer) -> None:
        with self._lock:
            if peer in self._peers:
                self._peers.remove(peer)
        peer.connected = False
        self._transfers.cancel(peer)
        peer.disconnect()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            peers, self._peers = self._peers, []
            liveness, self._liveness = self._liveness, None
        forget(self._told)
        if liveness is not None:
            liveness.close()
        self._transfers.close()
        for peer in peers:
            peer.disconnect()
        if self._pool is not None:
            self._pool.close()

    def _open(
        self, endpoint: CudaEndpoint, allocation: Allocation, mine: Device, opened: list[int]
    ) -> int:
        """The address of a peer's allocation in this process."""
        theirs = next(
            (d for d in map(device, range(device_count())) if d.uuid == allocation.gpu), None
        )
        if theirs is not None and not mine.can_reach(theirs):
            raise TransferError(
                f"GPU {mine.ordinal} ({mine.name}) has no peer access to GPU {theirs.ordinal} "
                f"({theirs.name}), where the peer's memory lies; use `tcp`, which stages it"
            )
        if endpoint.process == this_process():  # the peer is in this process: nothing to open
            place = place_of(allocation.base)
            if place is None or place.base != allocation.base or place.bytes < allocation.size:
                raise _other_size(allocation)
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
        if not is_mapped(address, allocation.size):
            raise _other_size(allocation)
        return address

    def submit(self, peer: CudaPeer, copies: Copies | StridedCopies, *, reading: bool) -> Transfer:
        if self._pool is None:  # nothing is registered, so every copy is refused
            self._pool = self._buffers_of(self._device or device(0))
        what = "a cuda read" if reading else "a cuda write"
        src, dst = (peer.memory, self.memory) if reading else (self.memory, peer.memory)

        def steps(buffers: StreamBuffers) -> Iterator[int]:
            return buffers.steps(copies, src, dst, reading=reading)

        return CudaTransfer(self._transfers, self._pool, peer, steps, what)


def _other_size(allocation: Allocation) -> ProtocolError:
    return ProtocolError(
        f"the peer names {allocation.size} bytes of device memory at {allocation.base:#x}, and its "
        "handle opens less; nothing of it is used"
    )


@cache
def this_process() -> bytes:
    """A random id of this process, unique across containers and pid namespaces."""
    return secrets.token_bytes(TOKEN_BYTES)


os.register_at_fork(after_in_child=this_process.cache_clear)


class Allocation(msgspec.Struct, frozen=True, array_like=True):
    """Memory that one IPC handle opens."""

    base: Annotated[int, Meta(ge=0, le=MOST_ADDRESS)]
    size: Annotated[int, Meta(ge=0, le=MOST_ADDRESS)]
    handle: Annotated[bytes, Meta(min_length=IPC_HANDLE_BYTES, max_length=IPC_HANDLE_BYTES)]
    gpu: bytes  # its uuid


class CudaEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """The id of a process, its liveness connection, and the memory that peers can open."""

    carrier: Literal["cuda"]
    boot: str
    process: Token  # random, because a process of another container may have the same pid
    host: str  # of its liveness server
    liveness_port: Annotated[int, Meta(ge=1, le=65535)]
    token: Token
    incarnation: Token
    allocations: list[Allocation]
    regions: list[tuple[int, int]]
    voucher: str  # the file of the socket at which the owner vouches for this endpoint

    @classmethod
    def decode(cls, raw: bytes) -> CudaEndpoint:
        return decode_endpoint(_endpoints, raw, "cuda")


_endpoints = msgspec.msgpack.Decoder(CudaEndpoint)


class CudaPeer:
    """A process whose device memory this one has open."""

    def __init__(
        self, liveness: Liveness, memory: Mapped, opened: list[int], on: Device, *, near: bool
    ) -> None:
        self.memory, self._liveness, self._opened, self._device = memory, liveness, opened, on
        self.near = near  # all of its memory is on the GPU that copies
        self._lock = threading.Lock()
        self._users = 0
        self.connected = True

    def hold(self) -> None:
        """Keep its memory open until `release`."""
        with self._lock:
            if not self.connected:
                raise Cancelled("the peer was disconnected on this side")
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
        if not self.connected:
            self._close_if_unused()

    def check(self) -> None:
        """Raise if the peer was disconnected, or is gone."""
        if not self.connected:
            raise Cancelled("the peer was disconnected on this side")
        self._liveness.require_alive()

    def disconnect(self) -> None:
        self.connected = False
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        with self._lock:
            if self.connected or self._users:
                return
            opened, self._opened = self._opened, []
        self._liveness.close()
        _close_all(self._device, opened)


def _close_all(on: Device, opened: list[int]) -> None:
    """Close allocations of a peer."""
    for address in opened:
        with contextlib.suppress(CudaError), on.current():
            on.close(address)


def export(place: DevicePlace) -> Allocation:
    owner = device(place.ordinal)
    try:
        with owner.current():
            handle = owner.export(place.base)
    except CudaError as error:
        raise _not_shared(place.base, error) from None
    return Allocation(place.base, place.bytes, handle, owner.uuid)


def _not_shared(address: int, why: object) -> TransferError:
    return TransferError(
        f"device memory at {address:#x} cannot be shared between processes: {why}. It was not "
        "allocated by cudaMalloc; with torch, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
    )


def within(regions: Iterable[MemoryRegion], base: int, size: int) -> list[MemoryRegion]:
    """The regions that lie in one allocation."""
    return [r for r in regions if base <= r.address and r.address + r.bytes <= base + size]


# The most bytes that a transfer queues at once, because `cancel` waits until they are copied: 9
# milliseconds on one H200, and about 50 between GPUs without NVLink.
QUEUED_BYTES = 16 << 30
FAR_QUEUED_BYTES = 1 << 30
MOST_BEGUN = 32  # transfers under way, each with a stream and pinned memory; others wait
SWEPT_FROM = 8  # with so many under way, check which of them have ended

SPIN_SECONDS = 300e-6  # of polling without naps, from shortly before the expected end on
EARLY_SECONDS = 150e-6  # begin so long before: a nap, and the error of the estimate
LEARNT_BYTES = 64 << 20  # of transfers from which a rate is learnt; smaller ones are all latency
FIRST_RATE = 2e12  # bytes a second, before any is learnt


class CudaTransfers:
    """The transfers of one carrier that have not ended."""

    def __init__(self) -> None:
        self.rate = FIRST_RATE  # bytes a second that the device has copied lately
        self.left: dict[CudaTransfer, CudaPeer] = {}  # each use of it is one atomic operation
        self._closed = False

    def has_room(self) -> bool:
        """Whether one more may begin. Checks the transfers under way first."""
        if self._closed:
            raise Cancelled("the carrier is closed")
        if len(self.left) < SWEPT_FROM:
            return True
        begun = [transfer for transfer in list(self.left) if transfer.begun]
        return sum(not transfer.look() for transfer in begun) < MOST_BEGUN

    def begin_next(self) -> None:
        """Begin the transfer that has waited longest for others to end, if any."""
        for transfer in list(self.left):
            if not transfer.begun:
                transfer.look()
                return

    def cancel(self, peer: CudaPeer | None = None) -> None:
        """Cancel the transfers of one peer, or all. A device that is stuck is waited for once."""
        deadline = time.monotonic() + CANCEL_SECONDS
        for transfer, its in list(self.left.items()):
            if peer is None or its is peer:
                with contextlib.suppress(TransferError):
                    transfer.cancel(deadline)

    def close(self) -> None:
        self._closed = True
        self.cancel()


class CudaTransfer:
    """A `Transfer` without a thread of its own.

    The thread that submits it queues most transfers whole. The rest of a very large one is queued
    by a thread that waits or polls, whenever the GPU has done what is queued. A thread that waits
    estimates the end by the rate of earlier transfers. It naps while the end is far, and polls
    without naps when it is near, because a small transfer takes no longer than a nap.
    """

    def __init__(
        self,
        transfers: CudaTransfers,
        pool: Pool[StreamBuffers],
        peer: CudaPeer,
        steps: Callable[[StreamBuffers], Iterator[int]],
        what: str,
    ) -> None:
        self._transfers, self._pool, self._peer = transfers, pool, peer
        self._steps_on, self._what = steps, what
        self._buffers: StreamBuffers | None = None  # from its beginning to its end
        self._steps: Iterator[int] | None = None  # still to be queued
        self._full = False  # whether it stopped because the buffers were full
        self._bytes = 0  # of the last queue
        self._queued = self._seen = 0.0  # when they were queued, and last seen to run
        self._lock = threading.Lock()
        self._ended = False
        self._error: TransferError | None = None
        transfers.left[self] = peer
        self.look()

    @property
    def begun(self) -> bool:
        return self._buffers is not None

    def wait(self, deadline: float) -> None:
        if not self._ended and not self._ends_by(deadline):
            raise DeadlineExceeded(f"{self._what} is not done by its deadline; it goes on")
        if self._error is not None:
            raise self._error.with_traceback(None)

    def poll(self) -> TransferState:
        if not self.settled():
            return TransferState.RUNNING
        return TransferState.DONE if self._error is None else TransferState.FAILED

    def settled(self) -> bool:
        if self._ended:
            return True
        if ended := self.look():
            self._transfers.begin_next()
        return ended

    def cancel(self, deadline: float | None = None) -> None:
        if self.settled():
            return
        with self._lock:
            if self._ended:
                return
            self._error = self._error or Cancelled(f"{self._what}: the caller gave it up")
            self._steps = None
            if not self.begun:
                self._end()
        if not self._ends_by(deadline or time.monotonic() + CANCEL_SECONDS):
            raise DeadlineExceeded(
                f"{self._what} was cancelled, and the device does not end it; bytes may still come"
            )

    def _ends_by(self, deadline: float) -> bool:
        waiting = time.monotonic()
        while not self.settled():
            now = time.monotonic()
            if now >= deadline:
                return False
            near = self._queued + self._bytes / self._transfers.rate - EARLY_SECONDS
            if not near <= now < max(near, waiting) + SPIN_SECONDS:
                time.sleep(NAP_SECONDS)
        return True

    def look(self) -> bool:
        """Continue the transfer as far as possible now. Returns whether it has ended."""
        with self._lock:
            if self._ended:
                return True
            try:
                if self._goes_on():
                    return False
            except Exception as error:
                self._fail(error)
            self._end()
            return True

    def _goes_on(self) -> bool:
        buffers = self._buffers
        if buffers is None:
            if not self._transfers.has_room():
                return True
            with self._pool.device.current():
                return self._begin()
        running = buffers.end is not None and not buffers.end.done_yet()
        if running:
            self._seen = time.monotonic()
        if self._steps is None or (running and not (self._full and not buffers.is_full())):
            return running
        self._peer.check()
        with self._pool.device.current():
            return self._queue(buffers, self._steps, more=running)

    def _begin(self) -> bool:
        """Queue the first bytes. The peer is checked when they have arrived."""
        self._peer.hold()
        try:
            self._buffers = buffers = self._pool.take()
        except BaseException:
            self._peer.release()
            raise
        buffers.begin()
        return self._queue(buffers, self._steps_on(buffers), more=False)

    def _queue(self, buffers: StreamBuffers, steps: Iterator[int], *, more: bool) -> bool:
        """Queue as much as may be under way; with `more`, behind what runs already. Returns whether
        anything is under way then. The device is current."""
        most = QUEUED_BYTES if self._peer.near else FAR_QUEUED_BYTES
        if not more:
            self._bytes = 0
            self._queued = self._seen = time.monotonic()
        self._steps = None
        for queued in steps:
            self._bytes += queued
            self._full = self._bytes < most
            if not self._full or buffers.is_full():
                buffers.mark_end()
                self._steps = steps
                break
        return buffers.end is not None

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, TransferError):
            error = TransferError(f"{self._what} failed: {error!r}")
        self._error = self._error or error
        if self._buffers is not None:
            # a device that failed may refuse even its context
            with contextlib.suppress(TransferError), self._pool.device.current():
                self._buffers.drain()

    def _end(self) -> None:
        """Give back its resources. Its bytes are right only if the peer has lived until now."""
        if self._buffers is not None:
            now = time.monotonic()
            if now - self._seen < EARLY_SECONDS and self._bytes >= LEARNT_BYTES:
                rate = self._bytes / max(now - self._queued, 1e-9)
                self._transfers.rate = (self._transfers.rate + rate) / 2
            self._pool.put(self._buffers)
            try:
                self._peer.check()
            except TransferError as error:
                self._error = self._error or error
            finally:
                self._peer.release()
        self._transfers.left.pop(self, None)
        self._ended = True  # last, because other threads take `_error` as it is then
