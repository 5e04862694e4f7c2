"""The carrier between processes with GPUs on one host: a kernel copies, one-sided.

`register` exports the allocations that regions lie in as CUDA IPC handles; `connect` opens them,
once per peer. A transfer is a launch or a few of one kernel that executes all of its copies, on a
stream of its own; it is done when an event after it is, and then visible at its destination. Memory
of another GPU is reached by peer access, where the hardware has it.

Most transfers are queued whole by the thread that asks for them (cuda_flights.py, cuda_quick.py);
what is too much for that, or has to be cut, by threads of the carrier (cuda_lane.py, cuda_work.py).

The owner takes no part in a transfer. That it still lives is seen on a connection (pulse.py)
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
import threading
from collections.abc import Sequence
from functools import partial

import msgspec

from kvferry.errors import Cancelled, ProtocolError, TransferError
from kvferry.transport import cuda_kernels
from kvferry.transport.base import (
    CopyArrays,
    MemoryRegion,
    StridedCopies,
    Transfer,
)
from kvferry.transport.cuda_driver import (
    CudaError,
    Device,
    Place,
    device,
    device_count,
    is_mapped,
    place_of,
)
from kvferry.transport.cuda_flights import Flights
from kvferry.transport.cuda_lanes import Lanes
from kvferry.transport.cuda_mapped import Mapped, place
from kvferry.transport.cuda_peer import (
    Allocation,
    CudaEndpoint,
    CudaPeer,
    export,
    this_process,
    within,
)
from kvferry.transport.cuda_work import runs_of
from kvferry.transport.jobs import Job, Workers
from kvferry.transport.local import _boot as boot_id
from kvferry.transport.pulse import Pulse, PulseServer
from kvferry.transport.vouch import ask, forget, vouch_for
from kvferry.wire.keys import Key
from kvferry.wire.names import Admits, Reach

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


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
        admits: Admits | None = None,
    ) -> None:
        self._host = host or LOOPBACK
        self._reach = Reach(secret is not None and Key.of(secret).configured, admits)
        self._reach.require_listening(self._host)
        self._told: set[bytes] = set()  # endpoints that were given out
        self._triton = triton
        self._workers = Workers("kvferry-cuda", workers)
        self._regions: list[MemoryRegion] = []
        self._places: dict[int, Place] = {}  # allocations by base
        self.memory = Mapped.of([])
        self._device: Device | None = None
        self._lanes: Lanes | None = None
        self._pulse: PulseServer | None = None
        self._peers: list[CudaPeer] = []
        self._flights = Flights()
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
                if self._triton is not False:
                    cuda_kernels.warm_aside(self._device)
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
        pulse = Pulse.connect(
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

    def read(self, peer: CudaPeer, copies: CopyArrays | StridedCopies) -> Transfer:
        return self._submit(peer, copies, reading=True)

    def write(self, peer: CudaPeer, copies: CopyArrays | StridedCopies) -> Transfer:
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

    def _submit(
        self, peer: CudaPeer, copies: CopyArrays | StridedCopies, *, reading: bool
    ) -> Transfer:
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
