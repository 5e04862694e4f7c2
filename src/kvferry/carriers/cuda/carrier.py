"""The carrier between processes with GPUs on one host: a kernel copies, one-sided.

`register` exports the allocations that regions lie in as CUDA IPC handles; `connect` opens them,
once per peer. A transfer is a launch or a few of one kernel that executes all of its copies, on a
stream of its own; it is done when an event after it is, and then visible at its destination. Memory
of another GPU is reached by peer access, where the hardware has it.

Most transfers are queued whole by the thread that asks for them (`QueuedTransfers`, and `queue` in
buffers.py). Those that are too large or must be cut are queued by threads of the carrier.

The owner takes no part in a transfer. That it still lives is seen on a connection (liveness.py)
which it holds open as long as its carrier is: looked at before, between and after launches. The
driver keeps the memory of a dead process while others have it open, so copies from it are wrong,
not fatal; a transfer during which the owner ended is `PeerLost`.

The owner cannot stop a peer's writes (`can_revoke` is false), and an IPC handle opens the whole
allocation: the initiator checks every copy against the owner's regions. It takes no peer's word for
them: the owner, a process of this user by the kernel's word, has vouched for the endpoint
(vouch.py), and the driver says how much a handle has opened.
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
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.carriers.base import (
    Carrier,
    MemoryRegion,
    Transfer,
    TransferState,
)
from kvferry.carriers.cuda import kernels
from kvferry.carriers.cuda.buffers import (
    NAP_SECONDS,
    BufferPool,
    Mapped,
    StreamBuffers,
    place,
    queue,
)
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
from kvferry.carriers.cuda.work import runs_of
from kvferry.carriers.liveness import TOKEN_BYTES, Liveness, PulseServer
from kvferry.carriers.local import MOST_ADDRESS
from kvferry.carriers.local import _boot as boot_id
from kvferry.carriers.transfer import CANCEL_SECONDS, Job, Workers
from kvferry.carriers.vouch import ask, forget, vouch_for
from kvferry.copies import Copies, StridedCopies
from kvferry.errors import Cancelled, DeadlineExceeded, ProtocolError, TransferError
from kvferry.net.keys import Key
from kvferry.net.names import Admits, Reach

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


class CudaCarrier(Carrier):
    """`triton=False` copies without kernels; `host` is where the liveness connection listens."""

    name = "cuda"
    takes_strided = True

    def __init__(
        self,
        *,
        secret: bytes | str | None = None,
        host: str | None = None,
        workers: int = 4,
        triton: bool | None = None,
        admits: Admits | None = None,
    ) -> None:
        self._host = host or LOOPBACK
        self._reach = Reach(secret is not None and Key.of(secret).configured, admits)
        self._reach.require_listening(self._host)
        self._told: set[bytes] = set()  # endpoints that were given out
        self._triton = triton
        self._workers = Workers("kvferry-cuda", workers)
        self._regions: list[MemoryRegion] = []
        self._places: dict[int, DevicePlace] = {}  # allocations by base
        self.memory = Mapped.of([])
        self._device: Device | None = None
        self._lanes: BufferPool | None = None
        self._pulse: PulseServer | None = None
        self._peers: list[CudaPeer] = []
        self._flights = QueuedTransfers()
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
                self._lanes = BufferPool(self._device, triton=self._triton)
                if self._triton is not False:
                    kernels.warm_aside(self._device)
            self._places[first.base] = first
        self._regions += regions
        self.memory = Mapped.of(
            (within(self._regions, p.base, p.bytes), 0) for p in self._places.values()
        )
        self._endpoint = None

    def endpoint(self) -> bytes:
        """Exports the memory and listens, from the first call on."""
        with self._lock:
            if self._closed:
                raise TransferError("the carrier is closed")
            if self._pulse is None:
                self._pulse = PulseServer(self._host)
            if self._endpoint is None:
                self._endpoint = vouch_for(partial(self._described, self._pulse))
                self._told.add(self._endpoint)
            return self._endpoint

    def _described(self, pulse: PulseServer, voucher: str) -> bytes:
        return msgspec.msgpack.encode(
            CudaEndpoint(
                carrier="cuda",
                boot=boot_id(),
                process=this_process(),
                host=self._host,
                pulse_port=pulse.port,
                token=pulse.token,
                incarnation=pulse.incarnation,
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
        if owner.is_this_process != (found.process == this_process()):
            raise ProtocolError(f"process {owner.pid} vouches for memory that is not its own")
        mine = self._device or device(0)
        pulse = Liveness.connect(
            found.host, found.pulse_port, found.token, found.incarnation, deadline
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
            pulse.close()
            with mine.current():
                for address in opened:
                    with contextlib.suppress(CudaError):
                        mine.close(address)
            raise
        near = all(a.gpu == mine.uuid for a in found.allocations)
        peer = CudaPeer(pulse, memory, opened, mine, near=near)
        with self._lock:
            if not self._closed:
                self._peers.append(peer)
                return peer
        peer.disconnect()
        raise Cancelled("the carrier was closed")

    def read(self, peer: CudaPeer, copies: Copies | StridedCopies) -> Transfer:
        return self._submit(peer, copies, reading=True)

    def write(self, peer: CudaPeer, copies: Copies | StridedCopies) -> Transfer:
        return self._submit(peer, copies, reading=False)

    def disconnect(self, peer: CudaPeer) -> None:
        with self._lock:
            if peer in self._peers:
                self._peers.remove(peer)
        peer.connected = False
        self._flights.end(peer)
        peer.disconnect()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            peers, self._peers = self._peers, []
            pulse, self._pulse = self._pulse, None
        forget(self._told)
        if pulse is not None:
            pulse.close()
        self._workers.close()
        self._flights.close()
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
        if endpoint.process == this_process():  # a peer in this process: nothing is to be opened
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

    def _submit(self, peer: CudaPeer, copies: Copies | StridedCopies, *, reading: bool) -> Transfer:
        what = "a cuda read" if reading else "a cuda write"
        ends = self._ends(peer, reading)
        if self._lanes is not None and not self._closed:
            flight = self._flights.fly(self._lanes, peer, copies, ends, what)
            if flight is not None:
                return flight

        def work(job: Job) -> None:
            lanes = self._lanes
            parts = place(runs_of(copies), *ends, reading=reading)
            with peer.used():
                peer.check()

                def check() -> None:
                    job.checkpoint()
                    peer.check()

                if lanes is not None:
                    with lanes.lane() as lane:
                        for part, shifts in parts:
                            lane.copy(part, shifts, check=check)
                        lane.finish()
                peer.require_alive()  # it was there, and open, all along

        return self._workers.submit(Job(work, what))

    def _ends(self, peer: CudaPeer, reading: bool) -> tuple[Mapped, Mapped]:
        """Source and destination."""
        return (peer.memory, self.memory) if reading else (self.memory, peer.memory)


def _other_size(allocation: Allocation) -> ProtocolError:
    return ProtocolError(
        f"the peer names {allocation.size} bytes of device memory at {allocation.base:#x}, and its "
        "handle opens less; nothing of it is used"
    )


# --------------------------------------------------------------------------------------------------
# What peers of the cuda carrier know of each other: the endpoint, and memory that is open here.
# --------------------------------------------------------------------------------------------------


@cache
def this_process() -> bytes:
    """What tells this process from all others, in whatever container or pid namespace."""
    return secrets.token_bytes(TOKEN_BYTES)


os.register_at_fork(after_in_child=this_process.cache_clear)


class Allocation(msgspec.Struct, frozen=True, array_like=True):
    """Memory that one IPC handle opens."""

    base: Annotated[int, Meta(ge=0, le=MOST_ADDRESS)]
    size: Annotated[int, Meta(ge=0, le=MOST_ADDRESS)]
    handle: bytes
    gpu: bytes  # its uuid


class CudaEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """Which process this is, how to see that it lives, and what of its memory can be opened."""

    carrier: str
    boot: str
    process: bytes  # random: a pid may be another container's too
    host: str  # where its pulse is
    pulse_port: Annotated[int, Meta(ge=1, le=65535)]
    token: bytes
    incarnation: bytes
    allocations: list[Allocation]
    regions: list[tuple[int, int]]
    voucher: str  # the file of the socket at which the owner vouches for all this

    @classmethod
    def decode(cls, raw: bytes) -> CudaEndpoint:
        try:
            endpoint = _endpoints.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"this is not the endpoint of a cuda carrier: {error}") from None
        bad = any(len(a.handle) != IPC_HANDLE_BYTES for a in endpoint.allocations)
        named = endpoint.process, endpoint.token, endpoint.incarnation
        bad |= any(len(name) != TOKEN_BYTES for name in named)
        if endpoint.carrier != "cuda" or bad:
            raise ProtocolError(f"this is not a cuda carrier's endpoint: {endpoint.carrier!r}")
        return endpoint


_endpoints = msgspec.msgpack.Decoder(CudaEndpoint)  # made once: its first use is on many threads


class CudaPeer:
    """A process whose device memory this one has open."""

    def __init__(
        self, pulse: Liveness, memory: Mapped, opened: list[int], on: Device, *, near: bool
    ) -> None:
        self.memory, self._pulse, self._opened, self._device = memory, pulse, opened, on
        self.near = near  # all of its memory is on the GPU that copies
        self._lock = threading.Lock()
        self._users = 0
        self.connected = True

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Its memory stays open meanwhile."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def hold(self) -> None:
        """Keep its memory open until `release`."""
        with self._lock:
            self.require_connected()
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
        if not self.connected:
            self._close_if_unused()

    def require_connected(self) -> None:
        if not self.connected:
            raise Cancelled("the peer was disconnected on this side")

    def require_alive(self) -> None:
        self._pulse.require_alive()

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
        self._pulse.close()
        with self._device.current():
            for address in opened:
                with contextlib.suppress(CudaError):
                    self._device.close(address)


def export(place: DevicePlace) -> Allocation:
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


def within(regions: Iterable[MemoryRegion], base: int, size: int) -> list[MemoryRegion]:
    """The regions that lie in one allocation."""
    return [r for r in regions if base <= r.address and r.address + r.bytes <= base + size]


# --------------------------------------------------------------------------------------------------
# The queued transfers of one carrier: begun by the thread that asks, ended by anyone.
# --------------------------------------------------------------------------------------------------

# What the caller's thread queues by itself, whole: cancelling waits for its end. On the same GPU
# that is 9 milliseconds of an H200, and between GPUs without NVLink about 50.
FLIGHT_BYTES = 16 << 30
FAR_FLIGHT_BYTES = 1 << 30
SWEPT_FLIGHTS = 8  # from so many on, look which have ended without anybody's looking
MOST_FLIGHTS = 32  # each has a stream and its numbers; more wait for one of the carrier's threads


class QueuedTransfers:
    def __init__(self) -> None:
        self._under_way: dict[
            QueuedTransfer, CudaPeer
        ] = {}  # each entry is set and removed in one step
        self._pace = Pace()
        self._closed = False

    def fly(
        self,
        lanes: BufferPool,
        peer: CudaPeer,
        copies: Copies | StridedCopies,
        ends: tuple[Mapped, Mapped],
        what: str,
    ) -> QueuedTransfer | None:
        """Queue it here and now; None where it is not for that, or something stands against it.

        Whatever that is, the other way says it. That the peer lives is seen at the end: till then
        its memory is there, whether it lives or not.
        """
        if not self._room():
            return None
        try:
            peer.hold()
        except TransferError:
            return None
        queued, lane = 0, None
        try:
            with lanes.device.current():
                lane = lanes.take()
                most = FLIGHT_BYTES if peer.near else FAR_FLIGHT_BYTES
                try:
                    queued = queue(lane, copies, *ends, most)
                except BaseException:
                    lane.drain()
                    raise
        except TransferError:
            pass
        finally:
            if not queued:
                if lane is not None:
                    lanes.put(lane)
                peer.release()
        if not queued or lane is None:
            return None

        def land(flight: QueuedTransfer) -> None:
            self._under_way.pop(flight, None)
            lanes.put(flight.lane)
            try:
                peer.check()
            finally:
                peer.release()

        flight = QueuedTransfer(lane, what, queued, self._pace, land)
        self._under_way[flight] = peer
        if self._closed or not peer.connected:  # meanwhile, and so it was not seen there
            self.end(peer)
        return flight

    def end(self, peer: CudaPeer | None) -> None:
        """Those of one peer, or all."""
        for flight, its in list(self._under_way.items()):
            if peer is None or its is peer:
                with contextlib.suppress(TransferError):
                    flight.cancel()

    def close(self) -> None:
        self._closed = True
        self.end(None)

    def _room(self) -> bool:
        """Whether there is room for one more, after those have landed that can."""
        if len(self._under_way) >= SWEPT_FLIGHTS:
            for flight in list(self._under_way):
                flight.poll()
        return len(self._under_way) < MOST_FLIGHTS


# --------------------------------------------------------------------------------------------------
# A transfer that the thread which asks for it has queued whole, with no thread of its own.
#
# Whoever waits or polls looks at its event. It cannot be cancelled in the middle: `cancel` waits
# for its end, which is milliseconds away, because the carrier takes no more bytes into one flight.
#
# A waiter naps while the end is far, by the rate of flights before, and asks again and again when
# it is near: a nap takes about 70 microseconds, and often more, which is what a small transfer
# takes as a whole. Asking never goes on for long, because it keeps a processor busy.
# --------------------------------------------------------------------------------------------------

SPIN_SECONDS = 300e-6  # of asking again and again, from shortly before the expected end on
EARLY_SECONDS = 150e-6  # how long before: a nap, and what the expectation is off
LEARNT_BYTES = 64 << 20  # flights from which a rate is learnt: less is all latency
FIRST_RATE = 2e12  # bytes a second, before any was seen


class Pace:
    """How fast this device has copied lately."""

    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = FIRST_RATE

    def learn(self, bytes_: int, seconds: float) -> None:
        if bytes_ >= LEARNT_BYTES and seconds > 0:
            self.rate = (self.rate + bytes_ / seconds) / 2


class QueuedTransfer:
    """A `Transfer` whose copies are queued on a lane that is its own until it ends.

    `land` is called once, when it has ended.
    """

    def __init__(
        self,
        lane: StreamBuffers,
        what: str,
        bytes_: int,
        pace: Pace,
        land: Callable[[QueuedTransfer], None],
    ) -> None:
        self.lane, self._what, self._land = lane, what, land
        self._bytes, self._pace = bytes_, pace
        self._began = time.monotonic()
        self._waited = self._began  # when it was last seen to run
        self._lock = threading.Lock()
        self._ended = False
        self._error: TransferError | None = None

    def wait(self, deadline: float) -> None:
        if not self._ended and not self._over(deadline):
            raise DeadlineExceeded(f"{self._what} is not done by its deadline; it goes on")
        if self._error is not None:
            raise self._error.with_traceback(None)

    def poll(self) -> TransferState:
        if not self._look():
            return TransferState.RUNNING
        return TransferState.DONE if self._error is None else TransferState.FAILED

    def settled(self) -> bool:
        return self._look()

    def cancel(self, why: str = "the caller gave it up") -> None:
        if self._look():
            return
        if not self._over(time.monotonic() + CANCEL_SECONDS):
            raise DeadlineExceeded(
                f"{self._what} was cancelled, and the device does not end it; bytes may still come"
            )
        if self._error is None:
            self._error = Cancelled(f"{self._what}: {why}")

    def _over(self, until: float) -> bool:
        """Whether it has ended, by that time."""
        near = self._began + self._bytes / self._pace.rate - EARLY_SECONDS
        late = max(near, time.monotonic()) + SPIN_SECONDS
        while not self._look():
            now = time.monotonic()
            if now >= until:
                return False
            if not near <= now < late:
                time.sleep(NAP_SECONDS)
        return True

    def _look(self) -> bool:
        with self._lock:  # until it has landed, the lane's event is this flight's
            if self._ended:
                return True
            try:
                if not self.lane.end.done_yet():
                    self._waited = time.monotonic()
                    return False
            except TransferError as error:
                self._error = error
            now = time.monotonic()
            if now - self._waited < EARLY_SECONDS:  # else it ended while nobody looked
                self._pace.learn(self._bytes, now - self._began)
            try:
                self._land(self)
            except TransferError as error:
                self._error = self._error or error
            self._ended = True
            return True
