# SPDX-License-Identifier: Apache-2.0
"""Copies on a GPU: copies are checked, cut, and become kernel launches.

    for queued in buffers.steps(copies, src, dst):   # the bytes of each launch
        ...                                          # stop here, or check a deadline
    buffers.finish()                                 # or poll `buffers.end`

A batch is a table of numbers (`StridedCopies`). The numbers are written side by side into pinned
memory, from which the GPU gets them. The thread examines them there: do both sides lie in
registered memory, are all lengths equal, what is the common divisor of all addresses and lengths?
The GPU copies some megabytes in the time of one NumPy call. So there is one call for each question,
not one for each table.

A long batch is written in pieces: the GPU copies a piece while the next one, twice as long, is
written. A batch with more segments than `WINDOW` is cut into several. Nothing moves before all of
it is known to lie in registered memory.

Batches with empty copies, or with memory that is registered in pieces, become single copies with
addresses of this process, and are launched in the same way. Without Triton, each copy is a
`cuMemcpyAsync`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

import numpy as np

from kvferry.carriers.base import MemoryRegion, RegionTable
from kvferry.carriers.cuda import kernels
from kvferry.carriers.cuda.driver import CudaEvent, CudaStream, Device
from kvferry.copies import Copies, Ints, StridedCopies
from kvferry.errors import TransferError

SLOTS = 3  # batches whose numbers are in use at once
WINDOW = 1 << 17  # segments of one batch at most
SLOT_NUMBERS = 4 * WINDOW + 4096  # of a batch with uneven lengths: src, dst, length, first chunk
LEAST_SLOT_NUMBERS = 1 << 14  # the first size of a slot; most requests need no more
LAUNCH_BYTES = 1 << 30  # about half a millisecond on an H200
MOST_ITEMS = 1 << 30  # chunks of one launch; their numbers are 32-bit integers
GRAINS = (16, 4, 1)

# Up to so many numbers are examined together. Longer tables are examined one by one, which takes
# half the time for each number, and a microsecond more for each table.
TOGETHER_NUMBERS = 1 << 13
LEAST_PIECE = 1 << 12  # segments of the first piece; written in a few microseconds
PIECES = (-(-WINDOW // LEAST_PIECE)).bit_length()  # of a batch, at most
PIECEWISE_BYTES = 64 << 20  # a smaller batch would be copied before its next piece is written
# A kernel with at most so many chunks reads the numbers from pinned memory. With more chunks, one
# copy of all numbers is faster than the reads of every program across the bus.
DIRECT_ITEMS = 1 << 5
SYSTEM_COPIES = 256  # without Triton: copies of one step

SLOT_COST_BYTES = 64  # the cost of finding a chunk, in bytes that could be moved in that time
SAMPLE = 1024  # lengths by which a chunk is chosen
NAP_SECONDS = 20e-6  # Linux sleeps about 70 microseconds

T = TypeVar("T", CudaStream, CudaEvent)


class StreamBuffers:
    """A stream of one device, and the pinned memory for the numbers of its copies.

    One thread uses it at a time, with the device current.
    """

    def __init__(
        self, device: Device, *, triton: bool | None = None, slots: int = SLOTS, urgency: int = 0
    ) -> None:
        self.device = device
        self._most_slots = slots
        self.end: CudaEvent | None = None  # after all queued work; None: nothing is queued
        self._kernels = kernels.available() if triton is None else triton
        self._slots: list[_Slot] = []
        self._next = 0
        self._running = False  # whether numbers were uploaded since `begin`
        with contextlib.ExitStack() as undo:  # if one step fails, undo the others
            self.stream = kept(undo, CudaStream(urgency=urgency))
            # A second stream uploads the next launch's numbers while the last launch runs.
            self._aside = kept(undo, CudaStream(urgency=urgency))
            self._brought = kept(undo, CudaEvent())
            self._mark = kept(undo, CudaEvent())
            self._made = undo.pop_all()

    def steps(
        self,
        copies: Copies | StridedCopies,
        src: Mapped,
        dst: Mapped,
        *,
        reading: bool = True,
        fill: bool = False,
    ) -> Iterator[int]:
        """Queue the copies, launch by launch; yields the bytes of each launch.

        `OutOfBounds` before the first launch if any copy leaves registered memory. With `fill`, the
        destinations are set to zero instead.
        """
        if isinstance(copies, Copies):
            copies = StridedCopies.of_copies(Copies.of(copies))
        several = len(copies.lengths) > WINDOW
        if several:
            require_inside(copies, src, dst, reading=reading)
        for window in _windows(copies):
            batch = self._batch(window, src, dst, fill)
            if batch is not None:
                yield from self._launch(batch)
                continue
            if not several:
                require_inside(copies, src, dst, reading=reading)
            for single in _singly(window, src, dst):
                batch = self._batch(StridedCopies.of_copies(single), ANYWHERE, ANYWHERE, fill)
                yield from self._by_driver(single, fill) if batch is None else self._launch(batch)

    def copy(
        self, copies: Copies | StridedCopies, src: Mapped, dst: Mapped, *, fill: bool = False
    ) -> None:
        for _ in self.steps(copies, src, dst, fill=fill):
            pass

    def begin(self) -> None:
        """Begin a use, from the first slot on. Nothing is under way."""
        self._next, self._running, self.end = 0, False, None
        for slot in self._slots:
            slot.used = False

    def is_full(self) -> bool:
        """Whether the next step may have to wait for the GPU."""
        if not self._kernels:
            return self.end is not None and not self.end.done()
        if self._next == len(self._slots):
            return False
        slot = self._slots[self._next]
        return slot.used and not slot.done.done()

    def slot(self, numbers: int) -> _Slot:
        """The slot whose turn it is, with room for so many numbers. Waits for the GPU."""
        if self._next == len(self._slots):
            self._slots.append(_Slot(self.device))
        slot = self._slots[self._next]
        self._next = (self._next + 1) % self._most_slots
        if slot.used:
            wait_event(slot.done)
            slot.used = False
        slot.hold(numbers)
        return slot

    def upload(self, dst: int, src: int, size: int) -> None:
        """Copy numbers to the device for the next launch, while the last one runs. Queued behind
        that, the copy would delay the next launch by some 20 microseconds."""
        if not self._running:
            self.stream.copy_at_once(dst, src, size)
            self._running = True
            return
        self._aside.copy_at_once(dst, src, size)
        self._brought.record(self._aside)
        self.stream.wait_for(self._brought)

    def mark_end(self) -> None:
        """Let `end` come after all work that is queued now."""
        self._mark.record(self.stream)
        self.end = self._mark

    def finish(self) -> None:
        """Wait until all queued work is done, and its bytes are visible."""
        if self.end is not None:
            wait_event(self.end)
        self._running = False

    def drain(self) -> None:
        """Wait for all queued work, even if it failed."""
        for stream in (self._aside, self.stream):
            with contextlib.suppress(Exception):
                stream.synchronize()

    def free(self) -> None:
        self.drain()
        for slot in self._slots:
            slot.free()
        self._made.close()

    def _batch(self, copies: StridedCopies, src: Mapped, dst: Mapped, fill: bool) -> _Batch | None:
        """Write, examine and check the numbers of a batch; None if they need another form."""
        rows, steps, segments = len(copies.src_rows), len(copies.src_steps), len(copies.lengths)
        tables = [
            copies.src_rows,
            copies.dst_rows,
            copies.src_steps,
            copies.dst_steps,
            copies.src_segments,
            copies.dst_segments,
        ]
        length = int(copies.lengths[0]) if copies.lengths.strides == (0,) else 0
        if not length:
            tables.append(copies.lengths)
        outer = 2 * (rows + steps)
        total = outer + (2 if length else 3) * segments
        room = outer + (2 if length else 4) * segments + PIECES
        if not self._kernels or room > SLOT_NUMBERS:
            return None
        slot = self.slot(room)
        numbers, together = slot.numbers, total <= TOGETHER_NUMBERS
        if together:
            np.concatenate(tables, out=numbers[:total])
            lows, highs, bits = _look_together(numbers[:total], tables)
        else:
            np.concatenate(tables[:4], out=numbers[:outer])
            lows, highs, bits = _look_at_each(tables)
        shortest, longest = (length, length) if length else (lows[6], highs[6])
        if shortest <= 0:
            return None
        uneven = shortest != longest
        shifts = []
        for side, memory in enumerate((src, dst)):
            low = lows[2 + side] + lows[4 + side]
            high = highs[2 + side] + highs[4 + side] + longest
            shift = memory.shift_of(lows[side] + low, highs[side] + high)
            if shift is None and (uneven or not together):  # check the exact range
                low = lows[2 + side] + int(np.minimum.reduce(tables[4 + side]))
                high = highs[2 + side] + last_end(tables[4 + side], copies.lengths, longest)
                shift = memory.shift_of(lows[side] + low, highs[side] + high)
            if shift is None:  # perhaps each row lies in a region of its own
                own = numbers[side * rows : (side + 1) * rows]
                shifted = memory.shifted(own, low, high)
                if shifted is None:
                    return None
                own[:] = shifted
                shift = 0
            shifts.append(shift)
        every = length
        for some in bits:
            every |= some
        grain = next(g for g in GRAINS if every % g == 0)
        if uneven:
            length, lengths = 0, numbers[total - segments : total] if together else tables[6]
            chunk = best_chunk(lengths[:: max(1, segments // SAMPLE)])
            bytes_ = int(np.add.reduce(lengths)) * steps * rows
        else:
            length, chunk = longest, _chunk_for(longest)
            bytes_ = longest * segments * steps * rows
        found = kernels.kernel(self.device, chunk, search=uneven, fill=fill, grain=grain)
        if found is None or (longest // found.chunk + 1) * segments * steps > MOST_ITEMS:
            return None
        # An idle GPU gets a small first piece soon. A busy GPU has other work meanwhile.
        whole = together or bytes_ <= PIECEWISE_BYTES or self.end is not None
        piece = segments if whole else LEAST_PIECE
        written = segments if together else 0
        return _Batch(slot, tables, found, shifts, length, longest, outer, piece, written)

    def _launch(self, batch: _Batch) -> Iterator[int]:
        """Write the rest of a batch's numbers, upload them, and launch the kernel."""
        slot, tables, length, kernel = batch.slot, batch.tables, batch.length, batch.kernel
        numbers, chunk = slot.numbers, kernel.chunk
        rows, steps, segments = len(tables[0]), len(tables[2]), len(tables[4])
        items = (batch.longest // chunk + 1) * segments * steps * rows
        direct = batch.written == segments and items <= DIRECT_ITEMS
        base = slot.address if direct else slot.there
        steps_at = base + 16 * rows
        at, first, uploaded, size = batch.outer, 0, 0, batch.piece
        while first < segments:
            size = min(size, segments - first)
            end = at + 2 * size
            if not batch.written:
                parts = [table[first : first + size] for table in tables[4 : 6 if length else 7]]
                np.concatenate(parts, out=numbers[at : at + len(parts) * size])
            if length:
                chunks = -(-length // chunk)
                per_row, row_bytes = chunks * size * steps, length * size * steps
            else:
                each = numbers[end : end + size]
                firsts = numbers[end + size : end + 2 * size + 1]
                firsts[0] = 0
                np.cumsum(-(-each // chunk), out=firsts[1:])
                chunks, row_bytes = int(firsts[-1]), int(each.sum()) * steps
                per_row = chunks * steps
                end += 2 * size + 1
            if not direct:
                self.upload(base + 8 * uploaded, slot.address + 8 * uploaded, 8 * (end - uploaded))
                uploaded = end
            own_at = base + 8 * at
            places = [own_at, own_at + 8 * size, steps_at, steps_at + 8 * steps]
            places += [base, base] if length else [own_at + 16 * size, own_at + 24 * size]
            rest = [*places, length, *batch.shifts, size, steps, chunks, size.bit_length()]
            at, first, size = end, first + size, 2 * size
            for row, begin, stop in launches(rows, per_row, row_bytes):
                values = [base + 8 * row, base + 8 * (rows + row), *rest, begin, stop]
                grid = -(-(stop - begin) // kernel.count)
                kernel.function.launch(grid, self.stream, values)
                if first >= segments and row * per_row + stop == rows * per_row:  # the last one
                    slot.done.record(self.stream)
                    slot.used, self.end = True, slot.done
                yield row_bytes * (stop - begin) // per_row

    def _by_driver(self, copies: Copies, fill: bool) -> Iterator[int]:
        """Queue copies at addresses of this process, one driver call for each."""
        for first in range(0, len(copies), SYSTEM_COPIES):
            some = copies[first : first + SYSTEM_COPIES]
            for src, dst, length in zip(
                some.src.tolist(), some.dst.tolist(), some.length.tolist(), strict=True
            ):
                if fill:
                    self.stream.zero(dst, length)
                else:
                    self.stream.copy(dst, src, length)
            self.mark_end()
            yield int(some.length.sum())


class Freeable(Protocol):
    def free(self) -> None: ...


P = TypeVar("P", bound=Freeable)


class Pool(Generic[P]):
    """Buffers of one device, made when needed and used again. Any thread may use it."""

    def __init__(self, device: Device, make: Callable[[], P], most: int = sys.maxsize) -> None:
        self.device = device
        self._make, self._most = make, most
        self._idle: list[P] = []
        self._count = 0  # that exist, or are being made
        self._changed = threading.Condition()
        self._closed = False

    def take(self, deadline: float = 0.0) -> P:
        """Idle buffers, or new ones. Waits until the deadline while `most` are in use."""
        with self._changed:
            if not self._idle and self._count >= self._most:
                self._changed.wait_for(
                    lambda: self._idle or self._count < self._most,
                    max(0.0, deadline - time.monotonic()),
                )
            if self._idle:
                return self._idle.pop()
            if self._count >= self._most:
                raise TransferError("the bus was busy until the deadline")
            self._count += 1
        try:
            with self.device.current():
                return self._make()
        except BaseException:
            with self._changed:
                self._count -= 1
                self._changed.notify()
            raise

    def fill(self) -> None:
        """Make as many as may exist, so that no use waits for that."""
        with contextlib.ExitStack() as made:
            while self._count < self._most:
                made.callback(self.put, self.take())

    def put(self, buffers: P) -> None:
        """Give buffers back. Nothing of them is under way."""
        with self._changed:
            self._changed.notify()
            if not self._closed:
                self._idle.append(buffers)
                return
            self._count -= 1
        free_all(self.device, [buffers])

    def close(self) -> None:
        """Free idle buffers now, and the others when they are given back. Idempotent."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
        free_all(self.device, idle)


def free_all(device: Device, unused: Sequence[Freeable]) -> None:
    """Free these buffers. A device that failed refuses, and the process needs no more of it."""
    for buffers in unused:
        with contextlib.suppress(TransferError), device.current():
            buffers.free()


FAR = 1 << 62  # the sum of two numbers below it fits int64


@dataclass(frozen=True, slots=True)
class Mapped:
    """Registered device memory by its owner's addresses, and where it lies in this process.

    No region spans two allocations. A region's shift is its address here minus the owner's.
    """

    table: RegionTable
    shifts: Ints
    spans: tuple[tuple[int, int, int], ...]  # start, end and shift of each region

    @classmethod
    def of(cls, parts: Iterable[tuple[Sequence[MemoryRegion], int]]) -> Mapped:
        """Made from the regions of each allocation, and its shift."""
        tables = [(RegionTable.of(regions), shift) for regions, shift in parts]
        none = np.empty(0, dtype=np.int64)
        starts = np.concatenate([none, *(t.starts for t, _ in tables)])
        ends = np.concatenate([none, *(t.ends for t, _ in tables)])
        shifts = np.concatenate([none, *(np.full(len(t), s, dtype=np.int64) for t, s in tables)])
        order = np.argsort(starts, kind="stable")
        arrays = starts[order], ends[order], shifts[order]
        spans = tuple(zip(*(a.tolist() for a in arrays), strict=True))
        return cls(RegionTable(*arrays[:2]), arrays[2], spans)

    def shift_of(self, low: int, high: int) -> int | None:
        """The shift of the region that holds everything from `low` to `high`, or None."""
        at = bisect_right(self.spans, (low, 1 << 63)) - 1  # faster than a NumPy call
        if at < 0 or high > self.spans[at][1]:
            return None
        return self.spans[at][2]

    def shifted(self, rows: Ints, low: int, high: int) -> Ints | None:
        """The rows' addresses in this process. Each row spans `low` to `high` relative to itself.
        None if one of them does not lie in one region."""
        if max(abs(low), abs(high), int(rows.max()), -int(rows.min())) >= FAR:
            return None
        lows = rows + low
        if self.table.first_outside(lows, np.full(len(lows), high - low)) >= 0:
            return None
        return rows + self._shifts_at(lows)

    def here(self, address: Ints) -> Ints:
        """The addresses in this process of ranges that were checked."""
        return address if len(self.table) == 0 else address + self._shifts_at(address)

    def _shifts_at(self, address: Ints) -> Ints:
        found: Ints = self.shifts[np.searchsorted(self.table.starts, address, side="right") - 1]
        return found


ANYWHERE = Mapped.of([([MemoryRegion(0, (1 << 63) - 1)], 0)])  # for addresses that were checked


def require_inside(copies: StridedCopies, src: Mapped, dst: Mapped, *, reading: bool) -> None:
    """Raise `OutOfBounds` unless every copy lies in registered memory on both sides."""
    if copies.descriptors == 0:
        return
    shortest, longest = int(copies.lengths.min()), int(copies.lengths.max())
    sides = (
        (src, copies.src_rows, copies.src_segments, copies.src_steps),
        (dst, copies.dst_rows, copies.dst_segments, copies.dst_steps),
    )
    if shortest >= 0 and all(
        memory.shifted(
            rows,
            int(segments.min()) + int(steps.min()),
            last_end(segments, copies.lengths, longest) + int(steps.max()),
        )
        is not None
        for memory, rows, segments, steps in sides
    ):
        return
    ours, theirs = "this carrier", "the peer"
    for part in copies.singly(WINDOW):
        src.table.require(theirs if reading else ours, part.src, part.length)
        dst.table.require(ours if reading else theirs, part.dst, part.length)


def last_end(starts: Ints, lengths: Ints, longest: int) -> int:
    """Where the last segment ends. The last one to begin need not be the longest."""
    most = int(np.maximum.reduce(starts)) + longest
    return most if most >= FAR else int(np.maximum.reduce(starts + lengths))


def launches(rows: int, per_row: int, row_bytes: int) -> Iterator[tuple[int, int, int]]:
    """First row, first item and last item of each launch, so that none takes long."""
    most_rows = max(1, MOST_ITEMS // per_row)
    most_items = max(1, LAUNCH_BYTES * per_row // max(1, row_bytes))
    for row in range(0, rows, most_rows):
        items = min(most_rows, rows - row) * per_row
        for begin in range(0, items, most_items):
            yield row, begin, min(begin + most_items, items)


def best_chunk(lengths: Ints) -> int:
    """The chunk size that wastes least: long ones leave threads idle, short ones cost searches."""
    chunks = tuple(kernels.TUNING)
    costs = [int((-(-lengths // chunk)).sum()) * (chunk + SLOT_COST_BYTES) for chunk in chunks]
    return chunks[int(np.argmin(costs))]


def wait_event(event: CudaEvent) -> None:
    """Wait until it is done, by polling: an interrupt would come later, above all in a VM."""
    while not event.done():
        time.sleep(NAP_SECONDS)


def kept(undo: contextlib.ExitStack, made: T) -> T:
    """Return it, and let `undo` destroy it."""
    undo.callback(made.destroy)
    return made


@dataclass(slots=True, eq=False)
class _Batch:
    """A batch that was checked, and how it is cut."""

    slot: _Slot
    tables: list[Ints]
    kernel: kernels.Kernel
    shifts: list[int]  # of both sides
    length: int  # of all segments; 0 if lengths differ
    longest: int
    outer: int  # numbers of rows and steps, which are in the slot
    piece: int  # segments of the first piece
    written: int  # segments whose numbers are in the slot


class _Slot:
    """The numbers of one batch, on host and device, and the event after their last use."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.used = False
        with contextlib.ExitStack() as undo:
            self.done = kept(undo, CudaEvent())
            self.numbers, self.there = self._made(LEAST_SLOT_NUMBERS)
            self.address: int = self.numbers.ctypes.data  # in pinned memory
            undo.pop_all()

    def hold(self, numbers: int) -> None:
        """Make room for so many numbers. The GPU does not use the slot; old numbers may be lost."""
        if numbers > len(self.numbers):
            made = self._made(max(numbers, min(SLOT_NUMBERS, 1 << numbers.bit_length())))
            address, there = self.address, self.there
            self.numbers, self.there = made
            self.address = self.numbers.ctypes.data
            self._drop(address, there)

    def free(self) -> None:
        self.done.destroy()
        self._drop(self.address, self.there)

    def _made(self, numbers: int) -> tuple[Ints, int]:
        """Allocate room for so many numbers on host and device, or on neither."""
        pinned = self._device.pinned(8 * numbers)
        try:
            return pinned.view(np.int64), self._device.allocate(8 * numbers)
        except BaseException:
            self._device.free_pinned(pinned.ctypes.data)
            raise

    def _drop(self, address: int, there: int) -> None:
        try:
            self._device.free(there)
        finally:
            self._device.free_pinned(address)


def _windows(copies: StridedCopies) -> Iterable[StridedCopies]:
    """The same in batches of at most `WINDOW` segments; none if there is no copy."""
    segments = len(copies.lengths) if copies.descriptors else 0
    if 0 < segments <= WINDOW:
        return (copies,)
    starts = range(0, segments, WINDOW)
    return (copies.of_segments(slice(first, first + WINDOW)) for first in starts)


def _singly(copies: StridedCopies, src: Mapped, dst: Mapped) -> Iterator[Copies]:
    """The same, which were checked, as single copies at addresses of this process; none empty."""
    for part in copies.singly(WINDOW):
        some = part.without_empty()
        if len(some):
            yield Copies(src.here(some.src), dst.here(some.dst), some.length)


@cache
def _chunk_for(length: int) -> int:
    return best_chunk(np.asarray([length], dtype=np.int64))


Look = tuple[list[int], list[int], list[int]]  # minimum, maximum and bitwise or of each table


def _look_together(numbers: Ints, tables: Sequence[Ints]) -> Look:
    """Examine tables that were written there one after another."""
    heads = _heads(*map(len, tables[:-1]))
    return (
        np.minimum.reduceat(numbers, heads).tolist(),
        np.maximum.reduceat(numbers, heads).tolist(),
        np.bitwise_or.reduceat(numbers, heads).tolist(),
    )


@lru_cache(maxsize=256)
def _heads(*sizes: int) -> Ints:
    return np.array([0, *accumulate(sizes)])


def _look_at_each(tables: Sequence[Ints]) -> Look:
    """Examine tables where they are. If no segment is negative, 0 is a lower bound of segments, and
    their bitwise or an upper bound, so that one pass finds both."""
    lows, highs, bits = look = ([], [], [])  # type: Look
    for number, table in enumerate(tables):
        bits.append(int(np.bitwise_or.reduce(table)))
        if number in (4, 5) and bits[-1] >= 0:
            lows.append(0)
            highs.append(bits[-1])
        else:
            lows.append(int(np.minimum.reduce(table)))
            highs.append(int(np.maximum.reduce(table)))
    return look
