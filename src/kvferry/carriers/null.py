# SPDX-License-Identifier: Apache-2.0
"""A carrier inside one process that injects faults on demand.

    fabric = Fabric()
    producer, consumer = NullCarrier(fabric), NullCarrier(fabric)
    consumer.faults = Faults(corrupt_at=3)      # the third copy that the consumer moves from now on

Carriers of the same fabric reach each other; without a fabric, all of a process do. This carrier
obeys the same rules as the others (both ends registered, closed peers are lost, deadlines, cancel),
so code that is right with it is right with them.
"""

from __future__ import annotations

import ctypes
import itertools
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.carriers.base import Carrier, MemoryRegion, RegionTable, Transfer, checked, slices
from kvferry.carriers.host import copy_runs
from kvferry.carriers.transfer import Job, Workers
from kvferry.copies import Copies
from kvferry.errors import Cancelled, PeerLost, TransferError

SLICE_BYTES = 32 << 20  # between two checks for a cancel and a lost peer
STALL_TICK_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults that happen once each. Copies count from 1, from when the faults were set."""

    fail_at: int | None = None  # the transfer ends with `TransferError` before this copy
    stall_at: int | None = None  # nothing moves for `stall_seconds` before this copy
    stall_seconds: float = 3600.0
    corrupt_at: int | None = None  # one bit of this copy arrives flipped; the transfer says "done"


@dataclass
class Fabric:
    """The null carriers of one process that reach each other."""

    carriers: dict[bytes, NullCarrier] = field(default_factory=dict)


_everyone = Fabric()


class NullPeer:
    """The far end of a connection."""

    def __init__(self, carrier: NullCarrier) -> None:
        self._carrier = carrier
        self._connected = True

    def disconnect(self) -> None:
        self._connected = False

    def regions(self) -> RegionTable:
        if not self._connected:
            raise Cancelled("the peer was disconnected on this side")
        if self._carrier.closed:
            raise PeerLost("the peer's carrier was closed")
        return self._carrier.table


class NullCarrier(Carrier):
    """Copies within this process, on worker threads."""

    name = "null"

    def __init__(
        self, fabric: Fabric | None = None, *, faults: Faults | None = None, workers: int = 2
    ) -> None:
        self._fabric = _everyone if fabric is None else fabric
        self._address = b"null:" + secrets.token_hex(8).encode()
        self._workers = Workers("kvferry-null", workers)
        self._lock = threading.Lock()
        self.table = RegionTable.of([])
        self.closed = False
        self.faults = faults or Faults()
        self._fabric.carriers[self._address] = self

    @property
    def faults(self) -> Faults:
        return self._faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        with self._lock:
            self._faults = faults
            self._moved = 0

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self.table = RegionTable.of([*self.table.regions(), *regions])

    def endpoint(self) -> bytes:
        return self._address

    def connect(self, endpoint: bytes, deadline: float) -> NullPeer:
        carrier = self._fabric.carriers.get(endpoint)
        if carrier is None:
            raise PeerLost(f"no null carrier of this fabric has the endpoint {endpoint!r}")
        return NullPeer(carrier)

    def disconnect(self, peer: NullPeer) -> None:
        peer.disconnect()

    def close(self) -> None:
        self.closed = True
        self._fabric.carriers.pop(self._address, None)
        self._workers.close()

    def submit(self, peer: NullPeer, copies: Copies, *, reading: bool) -> Transfer:
        def work(job: Job) -> None:
            arrays = checked(copies, ours=self.table, theirs=peer.regions(), reading=reading)
            self._run(job, peer, arrays)

        return self._workers.submit(Job(work, "a null read" if reading else "a null write"))

    def _run(self, job: Job, peer: NullPeer, copies: Copies) -> None:
        with self._lock:
            faults, base = self._faults, self._moved
            self._moved += len(copies)

        def index(at: int | None) -> int | None:
            """Where in this batch the fault happens, or None."""
            return at - base - 1 if at is not None and 0 <= at - base - 1 < len(copies) else None

        fail, stall, corrupt = map(index, (faults.fail_at, faults.stall_at, faults.corrupt_at))
        stops = sorted({0, len(copies), *(s for s in (fail, stall) if s is not None)})
        for start, stop in itertools.pairwise(stops):
            if start == fail:
                raise TransferError(f"copy {faults.fail_at} was told to fail")
            if start == stall:
                _stall(job, faults.stall_seconds)
            for piece in slices(copies[start:stop], SLICE_BYTES):
                job.checkpoint()
                peer.regions()  # raises if the peer is gone
                copy_runs(piece.src, piece.dst, piece.length)
        if corrupt is not None and copies.length[corrupt]:
            ctypes.c_uint8.from_address(int(copies.dst[corrupt])).value ^= 1


def _stall(job: Job, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        job.checkpoint()
        time.sleep(STALL_TICK_SECONDS)
