# SPDX-License-Identifier: Apache-2.0
"""Moves whole objects between scattered device memory and host memory, and hashes them.

The processor touches no byte. There are two ways:

    direct   for runs of `DIRECT_BYTES` or more, all of one length, that make up whole objects. The
             device's copy engine moves runs from or to their places; one copy moves many runs that
             lie at equal distances. Two kernels hash the runs where they lie
    staged   for all others. A kernel gathers an object's runs on the device, or scatters them, and
             the copy engine moves whole objects, in pieces. While one piece crosses the bus, the
             kernels work on the other half of the device memory

A direct save copies most layers while the step computes the last ones (`Ready`). All kernels run
before the engine's own: they are short, and the blocks of a save stay pinned until its last kernel.

Host memory must be registered with the driver (`pin`), which takes seconds for many gigabytes. A
thread registers it step by step. Other memory is copied at a tenth of the speed.

Copies to the host are made in pieces, with a gap after each for the engine's own copies
(docs/design.md, "Why a save leaves gaps"). A gap lasts until one word has been copied to the
device, which no kernel and no other copy delays.

`out` and `back` return a `Crossing` when everything is queued. Its `finish` waits in one call of
the driver, and returns the hashes (xxh3, of every `chunk_bytes` of each object). The caller must
compare them, because `back` has already written the bytes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvferry.carriers.base import MemoryRegion, Ready
from kvferry.carriers.cuda import kernels, xxh3
from kvferry.carriers.cuda.driver import MOST_PITCH, CudaEvent, CudaStream, Device, Rows, device_of
from kvferry.carriers.cuda.staging import Half
from kvferry.carriers.cuda.stream import Mapped, Pool, StreamBuffers, kept
from kvferry.copies import Copies, Ints
from kvferry.errors import TransferError

log = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20  # 0.6 ms of the bus, against some 0.2 ms of Python for each piece
DIRECT_BYTES = 32 << 10  # of one row; copies of 64 KiB rows reach 50 GB/s of 55, of 16 KiB rows 37
COPIES_AN_OBJECT, FEW_COPIES = 4, 64  # if the direct way needs more copies, a kernel is cheaper
GAP_BYTES = 32 << 20  # copied to the host between two gaps; a token waits at most 0.6 ms
EARLY_BYTES = 32 << 20  # a batch of at least so many bytes copies early runs early
SCRATCH_BYTES = 16 << 20  # for sums; enough to hash 256 MiB together
# A save uses two lanes at a time, and so does each of two threads that load: while the objects of
# one part cross, the next are queued. A save keeps its lanes while a step computes, so loads have
# lanes of their own, with other hardware queues. A lane has 18 MiB of device memory, or 82 if it
# has staged objects.
OUT_LANES, BACK_LANES = 2, 4
OUT_URGENCY, BACK_URGENCY = 1, 2  # both before the engine's kernels
# Most copies that are queued while the thread keeps the interpreter's lock, behind an event and
# without one. With more, the driver's queue may be full, and the call would wait with the lock.
MOST_AHEAD, MOST_AT_ONCE = 256, 512
LANE_SLOTS = 16  # pieces that a thread can queue without waiting for the first
SLOT_ALIGN = 256  # of objects in a half
MOST_HASHES = 1 << 14  # of one call; 4 GiB in chunks of 256 KiB
MOST_RUNS = 1 << 15  # of one call, the direct way
ONE_RUN = 1 << 60  # bytes; more than a half, which counts as one run
PIN_BYTES = 256 << 20  # registered at a time
GIB = 1 << 30

Hashes = NDArray[np.uint64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class BusObjects:
    """Objects of host memory, each made of runs of device memory."""

    place: Ints  # of each object on the host
    length: Ints  # of each object
    runs: Ints  # number of runs of each object
    offset: Ints  # of every run in its object
    address: Ints  # of every run on the device
    size: Ints  # of every run

    def __len__(self) -> int:
        return len(self.place)

    def some(self, which: Ints) -> BusObjects:
        """The objects at these places, which ascend."""
        if len(which) == len(self):
            return self
        chosen = np.zeros(len(self), dtype=bool)
        chosen[which] = True
        runs = np.repeat(chosen, self.runs)
        return BusObjects(
            self.place[which],
            self.length[which],
            self.runs[which],
            self.offset[runs],
            self.address[runs],
            self.size[runs],
        )

    def are_even(self, least: int) -> bool:
        """Whether all have equally many runs, without gaps, of one length of at least `least`."""
        size, runs, count = int(self.size[0]), int(self.runs[0]), len(self)
        if size < least or size % xxh3.BLOCK_BYTES or runs * count != len(self.size):
            return False
        even = (self.runs == runs).all() and (self.size == size).all()
        even = even and (self.length == runs * size).all()
        offset = self.offset.reshape(count, runs)
        return bool(
            even
            and (offset == np.arange(runs) * size).all()
            and int(np.bitwise_or.reduce(self.address)) % 16 == 0
        )


def hashes_of(length: Ints, chunk_bytes: int) -> Ints:
    found: Ints = -(-length // chunk_bytes)
    return found


def takes(length: Ints, chunk_bytes: int) -> Bools:
    """Which objects of these lengths can be hashed on a device."""
    last = (length - 1) % chunk_bytes + 1
    few = (length > 0) & (length <= MOST_HASHES * chunk_bytes)
    return np.asarray(few & xxh3.takes(last))


class Bus:
    """Moves objects between one device's registered memory and the host. Any thread may use it."""

    def __init__(self, regions: Sequence[MemoryRegion], *, piece_bytes: int = PIECE_BYTES) -> None:
        """Raises a `TransferError` without Triton, or if the memory is not that of one GPU."""
        if not kernels.available():
            raise TransferError("Triton is not installed, so nothing is hashed on the GPU")
        self.device = device_of(region.address for region in regions)
        self._memory = Mapped.of([(regions, 0)])
        self._lanes = {  # by direction, outward or not
            outward: Pool(self.device, partial(_Lane, self.device, piece_bytes, outward), most)
            for outward, most in ((True, OUT_LANES), (False, BACK_LANES))
        }
        self._pins: _Pins | None = None

    def warm(self) -> None:
        """Compile the kernels and make all lanes, so that no request waits for them."""
        kernels.warm(self.device)
        for lanes in self._lanes.values():
            lanes.fill()

    def pin(
        self,
        address: int,
        size: int,
        back: Callable[[int, int], int],
        after_seconds: float = 0.0,
    ) -> None:
        """Register this host memory on a thread, after so many seconds or with the first copy.

        `back(first, size)` makes the system allocate the first `size` bytes, maps those from
        `first` on, and returns how many bytes are allocated.
        """
        self._pins = _Pins(self.device, address, size, back, after_seconds)

    @property
    def pinned_bytes(self) -> int:
        return self._pins.bytes if self._pins is not None else 0

    def out(
        self, objects: BusObjects, chunk_bytes: int, deadline: float, after: Ready | None = None
    ) -> Crossing:
        """Bring objects to the host.

        after  the device copies each run when the run is final. None: at once
        """
        return self._move(objects, chunk_bytes, deadline, outward=True, after=after)

    def back(self, objects: BusObjects, chunk_bytes: int, deadline: float) -> Crossing:
        return self._move(objects, chunk_bytes, deadline, outward=False)

    def close(self) -> None:
        """Free idle lanes now, and the others when they are given back. Idempotent."""
        if self._pins is not None:
            self._pins.close()
        for lanes in self._lanes.values():
            lanes.close()

    def _move(
        self,
        objects: BusObjects,
        chunk_bytes: int,
        deadline: float,
        *,
        outward: bool,
        after: Ready | None = None,
    ) -> Crossing:
        self._memory.table.require("this process", objects.address, objects.size)
        chunks = hashes_of(objects.length, chunk_bytes)
        if int(chunks.sum()) > MOST_HASHES:
            raise TransferError(f"{len(objects)} objects are too many at a time")
        if time.monotonic() > deadline:
            raise TransferError("objects were not moved in time")
        if self._pins is not None:
            self._pins.begin.set()
        starts = self._pins.starts if self._pins is not None else []
        pinned = self._is_pinned(objects)
        rows = self._direct_rows(objects, starts, after) if pinned else None
        lane = self._lanes[outward].take(deadline)
        try:
            with self.device.current():
                most = MOST_AHEAD if after is not None else MOST_AT_ONCE
                if rows is not None:
                    many = sum(len(some) for _, some in rows) > most
                    last = after.last if after is not None else 0
                    lane.queue_direct(objects, chunk_bytes, rows, last, outward=outward, waits=many)
                else:
                    if after is not None:
                        lane.wait_for(after.last)
                    lane.queue_staged(
                        objects,
                        chunk_bytes,
                        self._memory,
                        starts,
                        deadline,
                        outward=outward,
                        waits=not pinned or len(objects) > most,
                    )
        except BaseException:
            self._lanes[outward].put(lane)
            raise
        return Crossing(self._lanes[outward], lane)

    def _is_pinned(self, objects: BusObjects) -> bool:
        if self._pins is None or not len(objects):
            return False
        low, high = int(objects.place.min()), int((objects.place + objects.length).max())
        return self._pins.holds(low, high)

    def _direct_rows(
        self, objects: BusObjects, starts: Sequence[int], after: Ready | None
    ) -> list[tuple[int, Rows]] | None:
        """Copies between the runs' places, each group with the event after which it may begin (0:
        none). None if these objects must be staged."""
        if len(objects.size) > MOST_RUNS or not objects.are_even(DIRECT_BYTES):
            return None
        parts = [(0, objects)] if after is None else by_readiness(objects, after)
        rows = [(event, run_rows(part, starts)) for event, part in parts]
        most = max(FEW_COPIES, COPIES_AN_OBJECT * len(objects))
        return rows if all(len(some) <= most for _, some in rows) else None


class Crossing:
    """Objects on their way, until `finish` or `close`; for one thread."""

    def __init__(self, lanes: Pool[_Lane], lane: _Lane) -> None:
        self._lanes = lanes
        self._lane: _Lane | None = lane

    def finish(self) -> Hashes:
        """Wait until all bytes are in their places and visible, or raise a `TransferError`."""
        lane = self._lane
        assert lane is not None, "it is finished once"
        try:
            with self._lanes.device.current():
                found = lane.finish()
        except BaseException:
            self.close()
            raise
        self._lane = None
        self._lanes.put(lane)
        return found

    def close(self) -> None:
        """Wait until nothing is under way. Idempotent."""
        lane, self._lane = self._lane, None
        if lane is not None:
            with self._lanes.device.current():
                lane.drain()
            self._lanes.put(lane)


class _Lane:
    """Streams and tables of hashes, for one thread. The device must be current."""

    def __init__(self, on: Device, piece_bytes: int, outward: bool) -> None:
        xxh3.warm(on)
        urgency = OUT_URGENCY if outward else BACK_URGENCY
        self._device, self._piece_bytes = on, piece_bytes
        self._halves: list[Half] = []  # made when the first object is staged
        self._total = 0
        constants = xxh3.constants()
        # Words of the tables: constants, runs, then of every chunk its offset, length and hash
        self._runs_at = len(constants)
        self._chunks_at = self._runs_at + MOST_RUNS
        words = self._chunks_at + 3 * MOST_HASHES
        self._gap_at = 8 * words  # a word of its own, after the tables
        words += 1
        with contextlib.ExitStack() as undo:  # if one step fails, undo the others
            self._buffers = StreamBuffers(on, slots=LANE_SLOTS, urgency=urgency)
            undo.callback(self._buffers.free)
            self._bus = kept(undo, CudaStream(urgency=urgency))
            self._moved = kept(undo, CudaEvent())
            self._gaps = kept(undo, CudaStream(urgency=urgency))
            self._gap_begins, self._gap_ends = kept(undo, CudaEvent()), kept(undo, CudaEvent())
            self._ended = kept(undo, CudaEvent(blocking=True))
            self._host: Ints = on.pinned(8 * words).view(np.int64)
            undo.callback(on.free_pinned, self._host.ctypes.data)
            self._there = on.allocate(8 * words)
            undo.callback(on.free, self._there)
            self._sums = on.allocate(SCRATCH_BYTES)
            undo.callback(on.free, self._sums)
            self._made = undo.pop_all()
        self._host[: self._runs_at] = constants

    def wait_for(self, event: int) -> None:
        """Work that is queued from now on begins after this event."""
        for stream in (self._buffers.stream, self._bus):
            stream.wait_for(event)

    def queue_direct(
        self,
        objects: BusObjects,
        chunk_bytes: int,
        rows: Sequence[tuple[int, Rows]],
        last: int,
        *,
        outward: bool,
        waits: bool,
    ) -> None:
        """Queue everything or nothing: at most `MOST_HASHES` chunks and `MOST_RUNS` runs.

        rows  with the events after which they may be copied, in the order of the events; 0: none
        last  the event after which all runs are hashed, so that the hashes of bytes that were
              copied too early differ
        """
        self._buffers.begin()
        chunks = hashes_of(objects.length, chunk_bytes)
        self._host[self._runs_at : self._runs_at + len(objects.size)] = objects.address
        begins = np.cumsum(objects.length) - objects.length
        total = self._write_chunks(objects.length, chunk_bytes, chunks, begins)
        stream, bus, run_bytes = self._buffers.stream, self._bus, int(objects.size[0])
        per_piece = xxh3.blocks_of(min(chunk_bytes, int(objects.length.max())))
        try:
            self._upload(total)  # first: behind the copies, it would wait for the next part's
            for event, some in rows:
                if event:
                    bus.wait_for(event, waits=waits)
                self._copy(some, outward=outward, waits=waits)
            if last:
                stream.wait_for(last)
            if not outward:  # the bytes to hash must have arrived
                self._moved.record(bus)
                stream.wait_for(self._moved)
            self._hash(self._runs_at, run_bytes, 0, total, per_piece)
            self._queue_end(total, waits)
        except BaseException:
            self.drain()
            raise

    def _copy(self, rows: Rows, *, outward: bool, waits: bool) -> None:
        if outward:
            gap = partial(self._gap, waits)
            self._bus.copy_rows(rows, outward=True, waits=waits, gap=gap, gap_bytes=GAP_BYTES)
        else:
            self._bus.copy_rows(rows, outward=False, waits=waits)

    def _gap(self, waits: bool) -> None:
        """Pause the bus for a moment, so that copies of other streams pass."""
        here, there = self._host.ctypes.data + self._gap_at, self._there + self._gap_at
        self._gap_begins.record(self._bus, waits=waits)
        self._gaps.wait_for(self._gap_begins, waits=waits)
        (self._gaps.copy if waits else self._gaps.copy_at_once)(there, here, 8)
        self._gap_ends.record(self._gaps, waits=waits)
        self._bus.wait_for(self._gap_ends, waits=waits)

    def _have_halves(self, size: int) -> None:
        """Make halves that hold a piece, and an object of this size."""
        room = self._halves[0].bytes if self._halves else 0
        if room >= max(size, self._piece_bytes):
            return
        for half in self._halves:
            half.free()
        self._halves = []
        with contextlib.ExitStack() as undo:
            halves = []
            for _ in range(2):
                halves.append(Half(self._device, max(size, self._piece_bytes)))
                undo.callback(halves[-1].free)
            undo.pop_all()
        self._halves = halves

    def queue_staged(
        self,
        objects: BusObjects,
        chunk_bytes: int,
        memory: Mapped,
        starts: Sequence[int],
        deadline: float,
        *,
        outward: bool,
        waits: bool,
    ) -> None:
        """Queue everything or nothing. `waits`: the host's memory is not registered, or the queue
        may be full."""
        slots = -(-objects.length // SLOT_ALIGN) * SLOT_ALIGN
        self._have_halves(int(slots.max()))
        chunks = hashes_of(objects.length, chunk_bytes)
        per_piece = xxh3.blocks_of(min(chunk_bytes, int(objects.length.max())))
        cuts = cuts_of(slots, self._halves[0].bytes)
        offsets = np.cumsum(slots) - slots
        offsets -= np.repeat(offsets[cuts[:-1]], np.diff(cuts))  # in their halves
        ends = np.cumsum(chunks)
        total = self._write_chunks(objects.length, chunk_bytes, chunks, offsets)
        halves = [half.there for half in self._halves]
        self._host[self._runs_at : self._runs_at + 2] = halves
        run_ends = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(objects.runs)))
        in_half = objects.offset + np.repeat(offsets, objects.runs)
        self._buffers.begin()
        for half in self._halves:
            half.used = False
        stream, bus = self._buffers.stream, self._bus
        first_hash = 0
        try:
            self._upload(total)
            for number, (first, last) in enumerate(pairwise(cuts)):
                if time.monotonic() > deadline:
                    raise TransferError("objects were not moved in time")
                half, where = self._halves[number % 2], self._runs_at + number % 2
                runs = slice(int(run_ends[first]), int(run_ends[last]))
                here, there = objects.address[runs], in_half[runs] + half.there
                size = objects.size[runs]
                rows = slot_rows(
                    objects.place[first:last],
                    objects.length[first:last],
                    offsets[first:last] + half.there,
                    starts,
                )
                last_hash = int(ends[last - 1])
                if outward:
                    if half.used:
                        stream.wait_for(half.moved)
                    self._buffers.copy(Copies(here, there, size), memory, half.mapped)
                    self._hash(where, ONE_RUN, first_hash, last_hash, per_piece)
                    half.computed.record(stream)
                    bus.wait_for(half.computed, waits=waits)
                    self._copy(rows, outward=True, waits=waits)
                    self._gap(waits)
                    half.moved.record(bus, waits=waits)
                else:
                    if half.used:
                        bus.wait_for(half.computed, waits=waits)
                    bus.copy_rows(rows, outward=False, waits=waits)
                    half.moved.record(bus, waits=waits)
                    stream.wait_for(half.moved)
                    self._hash(where, ONE_RUN, first_hash, last_hash, per_piece)
                    self._buffers.copy(Copies(there, here, size), half.mapped, memory)
                    half.computed.record(stream)
                half.used = True
                first_hash = last_hash
            self._queue_end(total, waits)
        except BaseException:
            self.drain()
            raise

    def _write_chunks(self, length: Ints, chunk_bytes: int, chunks: Ints, begins: Ints) -> int:
        """Write the offset and the length of every chunk. Returns the number of chunks."""
        total = int(chunks.sum())
        number = np.arange(total) - np.repeat(np.cumsum(chunks) - chunks, chunks)
        at, done = self._chunks_at, number * chunk_bytes
        np.add(np.repeat(begins, chunks), done, out=self._host[at : at + total])
        at += MOST_HASHES
        left = np.repeat(length, chunks) - done
        np.minimum(left, chunk_bytes, out=self._host[at : at + total])
        return total

    def _upload(self, total: int) -> None:
        """Upload the tables, up to the lengths of `total` chunks."""
        size = 8 * (self._chunks_at + MOST_HASHES + total)
        self._buffers.stream.copy_at_once(self._there, self._host.ctypes.data, size)

    def _hash(self, runs_at: int, run_bytes: int, first: int, last: int, per_piece: int) -> None:
        """Hash chunks of objects in these runs; as many at a time as the scratch has room for."""
        most = SCRATCH_BYTES // (8 * xxh3.SUMS * per_piece)
        for begin in range(first, last, most):
            offsets = self._there + 8 * (self._chunks_at + begin)
            xxh3.queue(
                self._device,
                self._buffers.stream,
                runs=self._there + 8 * runs_at,
                run_bytes=run_bytes,
                offsets=offsets,
                lengths=offsets + 8 * MOST_HASHES,
                table=self._there,
                sums=self._sums,
                out=offsets + 16 * MOST_HASHES,
                pieces=min(most, last - begin),
                per_piece=per_piece,
            )

    def _queue_end(self, total: int, waits: bool) -> None:
        """Copy the hashes to the host, and record an event after everything under way."""
        at, self._total = self._chunks_at + 2 * MOST_HASHES, total
        stream = self._buffers.stream
        stream.copy_at_once(self._host.ctypes.data + 8 * at, self._there + 8 * at, 8 * total)
        self._moved.record(self._bus, waits=waits)
        stream.wait_for(self._moved)
        self._ended.record(stream)

    def finish(self) -> Hashes:
        self._ended.wait()
        at = self._chunks_at + 2 * MOST_HASHES
        return self._host[at : at + self._total].view(np.uint64).copy()

    def drain(self) -> None:
        self._buffers.drain()
        for stream in (self._bus, self._gaps):
            with contextlib.suppress(TransferError):
                stream.synchronize()

    def free(self) -> None:
        self.drain()
        for half in self._halves:
            half.free()
        self._made.close()


class _Pins:
    """Registers host memory from its beginning on, step by step, on a thread."""

    def __init__(
        self,
        on: Device,
        address: int,
        size: int,
        back: Callable[[int, int], int],
        after_seconds: float,
    ) -> None:
        self._device, self._address, self._size, self._back = on, address, size, back
        self._after_seconds, self.begin = after_seconds, threading.Event()
        # Addresses at which a registration begins, or will begin. No copy may cross one
        self.starts = list(range(address, address + size, PIN_BYTES))
        self.bytes = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-pin", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.begin.wait(self._after_seconds)
        try:
            while self.bytes < self._size and not self._closing.is_set():
                end = min(self._size, self.bytes + PIN_BYTES)
                backed = self._back(self.bytes, end)
                if self._closing.is_set():  # the memory may be gone
                    break
                if backed < end:
                    text = "the system gives the pool %.1f of %.1f GiB of memory"
                    log.warning(text, self.bytes / GIB, self._size / GIB)
                    break
                with self._device.current():
                    self._device.register_host(self._address + self.bytes, end - self.bytes)
                self.bytes = end
        except Exception as error:
            if not self._closing.is_set():
                log.warning("the pool's memory is not pinned, and slow to copy: %s", error)
        log.info("%.1f GiB of the pool's memory are pinned", self.bytes / GIB)

    def holds(self, low: int, high: int) -> bool:
        return self._address <= low and high <= self._address + self.bytes

    def close(self) -> None:
        """Unregister the memory, after the last copy."""
        self._closing.set()
        self.begin.set()
        if threading.current_thread() is not self._thread:  # it may be the store's last user
            self._thread.join()
        end, self.bytes = self._address + self.bytes, 0
        with self._device.current():
            for start in self.starts:
                if start < end:
                    with contextlib.suppress(TransferError):
                        self._device.unregister_host(start)


def cuts_of(sizes: Ints, room: int) -> list[int]:
    """Bounds of parts of a row of objects. A part fits the room, or has one object."""
    ends = np.cumsum(sizes)
    cuts, done = [0], 0
    while cuts[-1] < len(sizes):
        last = int(np.searchsorted(ends, done + room, side="right"))
        cuts.append(max(last, cuts[-1] + 1))
        done = int(ends[cuts[-1] - 1])
    return cuts


Copy = tuple[int, int, int, int, int, int]  # the fields of `Rows`


def slot_rows(place: Ints, length: Ints, slot: Ints, starts: Sequence[int]) -> Rows:
    """Few copies between objects on the host and their slots on the device."""
    step, slot_step = np.diff(place), np.diff(slot)
    begin_in, whole = _registrations(place, length, starts)
    # whether an object continues the row of the one before it
    follows = (length[1:] == length[:-1]) & (step >= length[:-1]) & (step <= MOST_PITCH)
    follows &= whole[1:] & whole[:-1] & (begin_in[1:] == begin_in[:-1])
    copies: list[Copy] = []
    for first, last in pairwise(_groups(follows, step, slot_step)):
        width = int(length[first])
        if last == first + 1:
            copies += _one(int(place[first]), int(slot[first]), width, starts)
        else:
            at = int(place[first]), int(step[first]), int(slot[first]), int(slot_step[first])
            copies.append((*at, width, last - first))
    return Rows.of(copies)


def by_readiness(objects: BusObjects, ready: Ready) -> list[tuple[int, BusObjects]]:
    """Even objects, or first their runs that are final early and then the others; with events."""
    runs, size, count = int(objects.runs[0]), int(objects.size[0]), len(objects)
    if runs * size * count < EARLY_BYTES:
        return [(ready.last, objects)]
    early = ready.is_early(objects.address, objects.size).reshape(count, runs)
    first = int(early[0].sum())
    alike = (early == (np.arange(runs) < first)).all()
    if not first or not alike:  # the early runs are not the first ones of all objects
        return [(ready.last, objects)]
    address = objects.address.reshape(count, runs)
    found = []
    for event, low, high in ((ready.early, 0, first), (ready.last, first, runs)):
        if low < high:
            some = BusObjects(
                objects.place + low * size,
                np.full(count, (high - low) * size),
                np.full(count, high - low),
                np.tile(np.arange(high - low) * size, count),
                address[:, low:high].reshape(-1),
                np.full(count * (high - low), size),
            )
            found.append((event, some))
    return found


def run_rows(objects: BusObjects, starts: Sequence[int]) -> Rows:
    """Copies between the runs of even objects and the objects' places.

    Objects whose runs and places lie at equal distances share copies: one for each run of an
    object. Any other object has one copy if its runs lie at equal distances, and else one for each
    run.
    """
    size, runs, count = int(objects.size[0]), int(objects.runs[0]), len(objects)
    address, place = objects.address.reshape(count, runs), objects.place
    offsets = address - address[:, :1]
    alike = (offsets == offsets[0]).all(axis=1)
    pitch = int(offsets[0, 1]) if runs > 1 else size
    strided = size <= pitch <= MOST_PITCH
    strided = strided and bool((offsets[0] == np.arange(runs) * pitch).all())
    begin_in, whole = _registrations(place, objects.length, starts)
    step, place_step = np.diff(address[:, 0]), np.diff(place)
    follows = alike[1:] & alike[:-1] & (step >= size) & (step <= MOST_PITCH)
    follows &= (place_step >= size) & (place_step <= MOST_PITCH)
    follows &= whole[1:] & whole[:-1] & (begin_in[1:] == begin_in[:-1])
    bounds = _groups(follows, step, place_step)
    together = np.diff(bounds) > (runs if strided else 1)
    joined = np.repeat(together, np.diff(bounds))
    single = ~joined & strided & whole & alike
    parts = [_fields(place[single], size, address[single, 0], pitch, size, runs)]
    for first, last in zip(
        bounds[:-1][together].tolist(), bounds[1:][together].tolist(), strict=True
    ):
        to = place[first] + np.arange(runs) * size
        gaps = place_step[first], step[first]
        parts.append(_fields(to, gaps[0], address[first], gaps[1], size, last - first))
    for at in np.flatnonzero(~joined & ~single).tolist():  # as at a registration's end
        to, where = int(place[at]), address[at].tolist()
        copies = [c for run in range(runs) for c in _one(to + run * size, where[run], size, starts)]
        parts.append(np.array(copies, dtype=np.int64).T)
    return Rows(*np.concatenate(parts, axis=1))


def _fields(*fields: Ints | int) -> Ints:
    """The fields of `Rows`. A field may be one number for all copies."""
    return np.stack(np.broadcast_arrays(*(np.atleast_1d(field) for field in fields)))


def _registrations(place: Ints, length: Ints, starts: Sequence[int]) -> tuple[Ints, Bools]:
    """The registration in which each object begins, and whether the object ends there too."""
    borders = np.asarray(starts, dtype=np.int64)
    begin_in = np.searchsorted(borders, place, side="right")
    return begin_in, begin_in == np.searchsorted(borders, place + length - 1, side="right")


def _groups(follows: Bools, *steps: Ints) -> Ints:
    """The bounds of groups of objects, in which each follows the one before it at equal steps."""
    new = ~follows
    for step in steps:
        new[1:] |= follows[:-1] & (step[1:] != step[:-1])
    begins = np.flatnonzero(new) + 1
    return np.concatenate(([0], begins, [len(follows) + 1]))


def _one(place: int, slot: int, length: int, starts: Sequence[int]) -> Iterator[Copy]:
    """Copies of one object, cut where one registration ends and another begins."""
    end = place + length
    while place < end:
        at = bisect_right(starts, place)
        stop = min(end, starts[at]) if at < len(starts) else end
        size = stop - place
        yield place, size, slot, size, size, 1
        place, slot = stop, slot + size
