"""A lane: a stream of one device, and the buffers through which runs reach the GPU.

    lane.copy(runs)     queue all copies of these runs; returns when they are queued
    lane.finish()       wait until everything queued is done, and visible

The numbers of a batch go into pinned memory and from there to the device, or, where they are few,
are read from the pinned memory by the kernel itself. There are a few such slots, made when
they are needed, so that the next batch is prepared while the last one runs; between two launches
the caller's `check` is asked, and no more than `SLOTS` launches of at most `LAUNCH_BYTES` are ever
under way, so that a cancelled transfer ends within milliseconds. One thread uses a lane at a time.

What is queued whole by the thread that asks for it is at the end of this module (`queue`).

Without Triton, each copy is a `cuMemcpyAsync`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeVar, cast

import numpy as np

from kvferry.carriers.base import (
    MemoryRegion,
    RegionTable,
)
from kvferry.carriers.cuda import kernels
from kvferry.carriers.cuda.driver import CudaEvent, CudaStream, Device, Function
from kvferry.carriers.cuda.kernels import SCRATCH_ARGUMENTS, Form
from kvferry.carriers.cuda.work import (
    CHUNKS,
    GRAINS,
    MOST_ITEMS,
    SAMPLE,
    WINDOW,
    CudaRuns,
    Work,
    best_chunk,
    chunk_for,
    least,
    most,
)
from kvferry.copies import Copies, Ints, StridedCopies

SLOTS = 3
LAUNCH_BYTES = 1 << 30  # about half a millisecond on an H200
SLOT_NUMBERS = 4 * WINDOW + 4096  # of a window with uneven lengths: src, dst, length, first chunk
LEAST_SLOT_NUMBERS = 1 << 14  # what a slot begins with: most requests never need more
# So few numbers a kernel reads from pinned memory sooner than a copy of them is queued; but every
# program reads its own across the bus, so that must be few too.
DIRECT_NUMBERS = 1 << 11
DIRECT_BYTES = 8 << 20
SYSTEM_COPIES = 256  # without Triton: copies between two looks at `check`

NAP_SECONDS = 20e-6  # the kernel makes about 70 microseconds of it

Check = Callable[[], None]
T = TypeVar("T", CudaStream, CudaEvent)


def _nothing() -> None:
    pass


def kept(undo: contextlib.ExitStack, made: T) -> T:
    """What `undo` destroys, unless all that was to be made with it is."""
    undo.callback(made.destroy)
    return made


class _Slot:
    """Numbers of one batch, on both sides, and when the GPU is done with them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.used = False
        with contextlib.ExitStack() as undo:
            self.done = kept(undo, CudaEvent())
            self.numbers, self.there = self._made(LEAST_SLOT_NUMBERS)
            self.address: int = self.numbers.ctypes.data  # in pinned memory
            undo.pop_all()

    def hold(self, numbers: int) -> None:
        """Have room for so many. The GPU has done with it; what it held is lost where it grows.

        Where there is no memory for that, it stays as it was.
        """
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
        """Room for so many on both sides, or on none."""
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


@dataclass(slots=True)
class Shifts:
    """What is added to every address of a side: where it lies here."""

    src: int = 0
    dst: int = 0


class StreamBuffers:
    """See the module's text. The device must be current wherever a lane is used."""

    def __init__(self, device: Device, *, triton: bool | None = None) -> None:
        self.device = device
        self._kernels = kernels.available() if triton is None else triton
        self._slots: list[_Slot] = []
        self._next = 0
        self._running = False  # whether numbers were brought since `begin`
        with contextlib.ExitStack() as undo:  # all of it, or nothing is left
            self.stream = kept(undo, CudaStream())
            self._aside = kept(
                undo, CudaStream()
            )  # brings the next launch's numbers as the last runs
            self._brought = kept(undo, CudaEvent())
            self.end = kept(undo, CudaEvent())  # after what was queued last
            self._marks = [
                kept(undo, CudaEvent()) for _ in range(SLOTS)
            ]  # between a batch's launches
            undo.pop_all()

    def copy(
        self,
        runs: CudaRuns,
        shifts: Shifts | None = None,
        *,
        fill: bool = False,
        check: Check = _nothing,
    ) -> None:
        """Queue these runs; with `fill`, set the destinations to zero instead."""
        shifts = shifts or Shifts()
        runs = runs.without_empty()
        if runs.copies == 0:
            return
        if not self._kernels:
            self._copy_singly(runs, shifts, fill, check)
            return
        outer = 2 * (len(runs.src_rows) + len(runs.src_steps))
        if outer > SLOT_NUMBERS // 2:  # no plan has so many layers or heads
            for arrays in runs.arrays():
                self._pieces(CudaRuns.of_arrays(arrays), shifts, fill, check)
            return
        self._pieces(runs, shifts, fill, check)

    def begin(self) -> None:
        """Nothing is under way: use the first slots again, so that others need not be made."""
        self._next = 0
        self._running = False

    def upload(self, dst: int, src: int, size: int) -> None:
        """Bring numbers to the device, before what is launched next.

        Where something runs already, beside it: queued behind it, every launch would begin some
        20 microseconds after the last one's end.
        """
        if not self._running:
            self.stream.copy_at_once(dst, src, size)
            self._running = True
            return
        self._aside.copy_at_once(dst, src, size)
        self._brought.record(self._aside)
        self.stream.wait_for(self._brought)

    def mark_end(self) -> None:
        self.end.record(self.stream)

    def finish(self) -> None:
        self.mark_end()
        wait_event(self.end)
        self._running = False

    @property
    def kernels(self) -> bool:
        """Whether copies are done by kernels here."""
        return self._kernels

    def drain(self) -> None:
        """Wait for what is queued, whatever became of it."""
        for stream in (self._aside, self.stream):
            with contextlib.suppress(Exception):
                stream.synchronize()

    def free(self) -> None:
        self.drain()
        for slot in self._slots:
            slot.free()
        for event in (self.end, self._brought, *self._marks):
            event.destroy()
        for stream in (self._aside, self.stream):
            stream.destroy()

    def _pieces(self, runs: CudaRuns, shifts: Shifts, fill: bool, check: Check) -> None:
        for piece in runs.pieces(WINDOW):
            work = Work.of(piece)
            if work.items_per_row <= MOST_ITEMS:
                self._launch(work, shifts, fill, check)
            else:  # terabytes
                for part in piece.pieces(1):
                    self._launch(Work.of(part), shifts, fill, check)

    def _kernel(self, work: Work, fill: bool) -> tuple[Work, Form, Function] | None:
        """The kernel for this work; with another chunk where the best one does not compile."""
        grain = work.runs.grain()
        for chunk in (work.chunk, *CHUNKS):
            form = Form(chunk, search=not work.length, fill=fill, grain=grain)
            kernel = kernels.function(self.device, form)
            if kernel is not None:
                return replace(work, chunk=chunk), form, kernel
        return None

    def _launch(self, work: Work, shifts: Shifts, fill: bool, check: Check) -> None:
        found = self._kernel(work, fill)
        if found is None:
            self._copy_singly(work.runs, shifts, fill, check)
            return
        work, form, kernel = found
        self._launch_kernel(work, form, kernel, shifts, check)

    def _launch_kernel(
        self, work: Work, form: Form, kernel: Function, shifts: Shifts, check: Check
    ) -> None:
        check()
        runs, at, places = work.runs, 0, []
        slot = self.slot(runs.entries + (len(work.firsts) if form.search else 0))
        for table in (
            runs.src_rows,
            runs.dst_rows,
            runs.src_segments,
            runs.dst_segments,
            runs.src_steps,
            runs.dst_steps,
            *((runs.lengths, work.firsts) if form.search else ()),
        ):
            places.append(at)
            slot.numbers[at : at + len(table)] = table
            at += len(table)
        base = slot.address
        if at > DIRECT_NUMBERS or runs.bytes > DIRECT_BYTES:
            self.upload(slot.there, base, 8 * at)
            base = slot.there
        tables = [base + 8 * place for place in places] + [base] * (8 - len(places))
        numbers = [work.length, shifts.src, shifts.dst, len(runs.lengths), len(runs.src_steps)]
        numbers += [work.chunks, work.search_rounds()]
        for number, (row, begin, end) in enumerate(launches(work)):
            if number:
                check()
                mark = self._marks[number % len(self._marks)]
                if number > len(self._marks):
                    wait_event(mark)
                mark.record(self.stream)
            rows = [tables[0] + 8 * row, tables[1] + 8 * row]
            values = [*rows, *tables[2:], *numbers, begin, end, *SCRATCH_ARGUMENTS]
            kernel.launch(-(-(end - begin) // form.count), self.stream, values)
        self.keep_slot()

    def keep_slot(self) -> None:
        """What the last slot holds is used by what was queued since it was given out."""
        slot = self._slots[self._next - 1]
        slot.done.record(self.stream)
        slot.used = True

    def slot(self, numbers: int) -> _Slot:
        """The slot whose turn it is, with room for so many, once the GPU has done with it."""
        if self._next == len(self._slots):
            self._slots.append(_Slot(self.device))
        slot = self._slots[self._next]
        self._next = (self._next + 1) % SLOTS
        if slot.used:
            wait_event(slot.done)
            slot.used = False
        slot.hold(numbers)
        return slot

    def _copy_singly(self, runs: CudaRuns, shifts: Shifts, fill: bool, check: Check) -> None:
        stream = self.stream
        for some in (part for arrays in runs.arrays() for part in arrays.windows()):
            dst = (some.dst + shifts.dst).tolist()
            src = (some.src + shifts.src).tolist()
            length = some.length.tolist()
            for i in range(len(dst)):
                if i % SYSTEM_COPIES == 0:
                    check()
                    self.finish()
                if fill:
                    stream.zero(dst[i], length[i])
                else:
                    stream.copy(dst[i], src[i], length[i])


def launches(work: Work) -> Iterator[tuple[int, int, int]]:
    """First row, first and last item of each launch, so that none takes long."""
    rows = len(work.runs.src_rows)
    return ranges(rows, work.items_per_row, work.runs.bytes // rows)


def ranges(rows: int, per_row: int, row_bytes: int) -> Iterator[tuple[int, int, int]]:
    """The same of so many rows, items of a row and bytes of a row."""
    if rows * per_row <= MOST_ITEMS and rows * row_bytes <= LAUNCH_BYTES:
        return iter(((0, 0, rows * per_row),))
    return _cut(rows, per_row, row_bytes)


def _cut(rows: int, per_row: int, row_bytes: int) -> Iterator[tuple[int, int, int]]:
    row_bytes = max(1, row_bytes)
    most_rows = max(1, MOST_ITEMS // per_row)
    most_items = max(1, LAUNCH_BYTES * per_row // row_bytes)
    for row in range(0, rows, most_rows):
        items = min(most_rows, rows - row) * per_row
        for begin in range(0, items, most_items):
            yield row, begin, min(begin + most_items, items)


def wait_event(event: CudaEvent) -> None:
    """Until it is done. Looks, and naps: an interrupt comes later than that, above all in a VM."""
    while not event.done():
        time.sleep(NAP_SECONDS)


# --------------------------------------------------------------------------------------------------
# Stream buffers of one device, kept for the next transfer.
# --------------------------------------------------------------------------------------------------


class BufferPool:
    """Lanes of one device, made when needed and used again."""

    def __init__(self, device: Device, *, triton: bool | None = None) -> None:
        self.device = device
        self._triton = triton
        self._idle: list[StreamBuffers] = []
        self._lock = threading.Lock()
        self._closed = False

    @contextlib.contextmanager
    def lane(self) -> Iterator[StreamBuffers]:
        """A lane for this thread, with the device current; drained when it is given back."""
        with self.device.current():
            lane = self.take()
            try:
                yield lane
            except BaseException:
                lane.drain()
                raise
            finally:
                self.put(lane)

    def take(self) -> StreamBuffers:
        """A lane, which `put` gives back; the device is current."""
        with self._lock:
            lane = self._idle.pop() if self._idle else None
        if lane is None:
            return StreamBuffers(self.device, triton=self._triton)
        lane.begin()
        return lane

    def close(self) -> None:
        with self._lock:
            self._closed = True
            lanes, self._idle = self._idle, []
        with self.device.current():
            for lane in lanes:
                lane.free()

    def put(self, lane: StreamBuffers) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(lane)
                return
        with self.device.current():
            lane.free()


# --------------------------------------------------------------------------------------------------
# Device memory by its owner's addresses: what is registered, and where it lies in this process.
#
# Every copy is checked against it before the first byte moves. Usually one comparison of extremes
# is enough, or one for each row of strided runs; else every copy is looked at by itself.
# --------------------------------------------------------------------------------------------------

FAR = 1 << 62  # sums of numbers below it fit


@dataclass(frozen=True, slots=True)
class Mapped:
    """Regions, none of which reaches over two allocations, and their distance from the owner's."""

    table: RegionTable
    shifts: Ints
    spans: tuple[tuple[int, int, int], ...]  # start, end and shift of each region

    @classmethod
    def of(cls, parts: Iterable[tuple[Sequence[MemoryRegion], int]]) -> Mapped:
        """Regions of each allocation, and its shift."""
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
        """The shift of the region that holds all from `low` to `high`; None where none does."""
        at = bisect_right(self.spans, (low, 1 << 63)) - 1  # sooner than NumPy is called
        if at < 0 or high > self.spans[at][1]:
            return None
        return self.spans[at][2]

    def shifted(self, rows: Ints, low: int, high: int) -> Ints | None:
        """Rows where they lie here, each of which reaches from `low` to `high` around it.

        None where one of them does not lie in one region.
        """
        if max(abs(low), abs(high), int(rows.max()), -int(rows.min())) >= FAR:
            return None
        lows = rows + low
        if self.table.first_outside(lows, np.full(len(lows), high - low)) >= 0:
            return None
        at = np.searchsorted(self.table.starts, lows, side="right") - 1
        return rows + self.shifts[at]

    def here(self, address: Ints) -> Ints:
        """Addresses in this process, of ranges that were checked."""
        if len(self.table) == 0:
            return address
        at = np.searchsorted(self.table.starts, address, side="right") - 1
        return address + self.shifts[at]


@dataclass(frozen=True, slots=True)
class _Extent:
    """The addresses that runs reach on one side, from each row."""

    low: int
    high: int
    rows: Ints

    @classmethod
    def of(cls, rows: Ints, segments: Ints, longest: int, steps: Ints) -> _Extent:
        low, high = least(segments) + least(steps), most(segments) + most(steps)
        return cls(low, high + longest, rows)

    def shift(self, memory: Mapped) -> int | None:
        """Where one region holds all."""
        return memory.shift_of(least(self.rows) + self.low, most(self.rows) + self.high)

    def shifted_rows(self, memory: Mapped) -> Ints | None:
        """Where each row lies in one region."""
        return memory.shifted(self.rows, self.low, self.high)


def place(
    runs: CudaRuns, src: Mapped, dst: Mapped, *, reading: bool
) -> Iterator[tuple[CudaRuns, Shifts]]:
    """The runs as they are to be copied in this process. Raises `OutOfBounds` before the first."""
    if runs.copies == 0:
        return iter(())
    if runs.shortest >= 0:
        from_ = _Extent.of(runs.src_rows, runs.src_segments, runs.longest, runs.src_steps)
        to = _Extent.of(runs.dst_rows, runs.dst_segments, runs.longest, runs.dst_steps)
        src_shift, dst_shift = from_.shift(src), to.shift(dst)
        if src_shift is not None and dst_shift is not None:
            return iter([(runs, Shifts(src_shift, dst_shift))])
        src_rows, dst_rows = from_.shifted_rows(src), to.shifted_rows(dst)
        if src_rows is not None and dst_rows is not None:
            return iter([(replace(runs, src_rows=src_rows, dst_rows=dst_rows), Shifts())])
    ours, theirs = "this carrier", "the peer"
    for arrays in runs.arrays():
        for part in arrays.windows():
            src.table.require(theirs if reading else ours, part.src, part.length)
            dst.table.require(ours if reading else theirs, part.dst, part.length)
    return _singly(runs, src, dst)


def _singly(runs: CudaRuns, src: Mapped, dst: Mapped) -> Iterator[tuple[CudaRuns, Shifts]]:
    for arrays in runs.arrays():
        for part in arrays.windows():
            some = part.without_empty()
            here = replace(some, src=src.here(some.src), dst=dst.here(some.dst))
            yield CudaRuns.of_arrays(here), Shifts()


# --------------------------------------------------------------------------------------------------
# A whole batch, queued by the thread that asks for it: its numbers are written once.
#
# Handing a batch to another thread and waking up again costs a tenth of a millisecond and more, and
# every NumPy call a microsecond or two: as much as copying some megabytes. So all numbers of a
# batch are written side by side into the pinned memory that the GPU gets them from, in one call,
# and what must be known of them is found there, in one call for each kind of question:
#
#     least, most     do both sides lie in registered memory? are all lengths equal, and above zero?
#     bits            what do all addresses and lengths have as common divisor?
#
# Long batches are looked at where they are, by one pass over each table where that is enough, and
# then written piece by piece: the GPU copies a piece while the next, twice as long, is on its way.
#
# What is not usual is left to `StreamBuffers`, which cuts, and which says what is
# wrong: empty copies, a kernel that is not compiled yet, memory that is registered in pieces, more
# numbers than a slot.
# --------------------------------------------------------------------------------------------------

# So many numbers are looked at together; longer tables one by one, which takes half the time for
# each number and a microsecond more for each table.
TOGETHER_NUMBERS = 1 << 13
LEAST_PIECE = 1 << 12  # segments of the first piece: a few microseconds to write
PIECES = (-(-WINDOW // LEAST_PIECE)).bit_length()  # of a batch, at most
# Of so few chunks a kernel reads the numbers from pinned memory; of more, every program would read
# its own across the bus, and one copy of them all before it is sooner done.
DIRECT_ITEMS = 1 << 5

_ZERO = np.zeros(1, dtype=np.int64)


def tables_of(copies: Copies | StridedCopies) -> list[Any] | None:
    """Rows, steps and segments, each of source and destination; lengths. None: of odd shapes."""
    if hasattr(copies, "src_rows"):
        runs = cast(StridedCopies, copies)
        tables: list[Any] = [
            runs.src_rows,
            runs.dst_rows,
            runs.src_steps,
            runs.dst_steps,
            runs.src_segments,
            runs.dst_segments,
            runs.lengths,
        ]
    else:
        tables = [_ZERO, _ZERO, _ZERO, _ZERO, copies.src, copies.dst, copies.length]
    try:
        a, b, c, d, e, f, g = map(len, tables)
    except TypeError:
        return None
    return tables if a == b and c == d and e == f == g and a and c and e else None


def constant(lengths: Any) -> int:
    """Their only value where an array says so by its strides, as a plan's batch does; else 0."""
    one = isinstance(lengths, np.ndarray) and lengths.strides == (0,) and lengths.dtype.kind in "iu"
    return int(lengths[0]) if one else 0


def queue(
    lane: StreamBuffers,
    copies: Copies | StridedCopies,
    src: Mapped,
    dst: Mapped,
    most_bytes: int,
    *,
    whole: bool = False,
) -> int:
    """Queue all of these copies and the lane's end after them; how many bytes.

    0, and nothing is queued, where they are not for here. With `whole`, in one piece, for who has
    other things for the GPU to do meanwhile. The device must be current.
    """
    tables = tables_of(copies)
    if tables is None or not lane.kernels:
        return 0
    rows, steps, segments = len(tables[0]), len(tables[2]), len(tables[4])
    length = constant(tables[6])
    if length:
        tables.pop()
    outer = 2 * (rows + steps)
    total = outer + (2 if length else 3) * segments
    room = outer + (2 if length else 4) * segments + PIECES
    if segments > WINDOW or room > SLOT_NUMBERS:
        return 0
    slot = lane.slot(room)
    numbers, together = slot.numbers, total <= TOGETHER_NUMBERS
    try:
        if together:
            np.concatenate(tables, out=numbers[:total])
            lows, highs, bits = look_together(numbers[:total], tables)
        else:
            np.concatenate(tables[:4], out=numbers[:outer])
            lows, highs, bits = look_at_each(tables)
    except (TypeError, ValueError):  # no integers, or not of one dimension
        return 0
    if length:
        shortest = longest = length
        bits.append(length)
    else:
        shortest, longest = lows[6], highs[6]
    if shortest <= 0:
        return 0
    shifts = []
    for side, memory in enumerate((src, dst)):
        low = lows[2 + side] + lows[4 + side]
        high = highs[2 + side] + highs[4 + side] + longest
        shift = memory.shift_of(lows[side] + low, highs[side] + high)
        if shift is None and not together:  # now exactly
            segments_of = tables[4 + side]
            low += int(np.minimum.reduce(segments_of)) - lows[4 + side]
            high += int(np.maximum.reduce(segments_of)) - highs[4 + side]
            shift = memory.shift_of(lows[side] + low, highs[side] + high)
        if shift is None:
            here = numbers[side * rows : (side + 1) * rows]
            shifted = memory.shifted(here, low, high)
            if shifted is None:
                return 0
            here[:] = shifted
            shift = 0
        shifts.append(shift)
    every = 0
    for some in bits:
        every |= some
    grain = next(g for g in GRAINS if every % g == 0)
    uneven = shortest != longest
    if uneven:
        length, all_lengths = 0, numbers[total - segments : total] if together else tables[6]
        chunk = best_chunk(all_lengths[:: max(1, segments // SAMPLE)])
        bytes_ = int(np.add.reduce(all_lengths)) * steps * rows
    else:
        length, chunk = longest, chunk_for(longest)
        bytes_ = longest * segments * steps * rows
    ready = kernels.ready(lane.device, chunk, uneven, grain)
    most_items = (longest // chunk + 1) * segments * steps
    if ready is None or bytes_ > most_bytes or most_items > MOST_ITEMS:
        return 0
    kernel, count = ready
    stream, base = lane.stream, slot.address
    if not together or most_items * rows > DIRECT_ITEMS:
        base = slot.there
    steps_at = base + 16 * rows
    tail = [length, *shifts]
    at, first, uploaded = outer, 0, 0
    size = segments if together or whole else LEAST_PIECE
    while first < segments:
        size = min(size, segments - first)
        end = at + 2 * size
        if not together:
            parts = [table[first : first + size] for table in tables[4 : 7 if uneven else 6]]
            np.concatenate(parts, out=numbers[at : at + len(parts) * size])
        if uneven:
            each = numbers[end : end + size]
            firsts = numbers[end + size : end + 2 * size + 1]
            firsts[0] = 0
            np.cumsum(-(-each // chunk), out=firsts[1:])
            chunks, row_bytes = int(firsts[-1]), int(each.sum()) * steps
            per_row = chunks * steps
            end += 2 * size + 1
        else:
            chunks = -(-length // chunk)
            per_row, row_bytes = chunks * size * steps, length * size * steps
        if base != slot.address:
            lane.upload(base + 8 * uploaded, slot.address + 8 * uploaded, 8 * (end - uploaded))
            uploaded = end
        here_at = base + 8 * at
        places = [here_at, here_at + 8 * size, steps_at, steps_at + 8 * steps]
        places += [here_at + 16 * size, here_at + 24 * size] if uneven else [base, base]
        rest = [*places, *tail, size, steps, chunks, size.bit_length()]
        for row, begin, stop in ranges(rows, per_row, row_bytes):
            values = [base + 8 * row, base + 8 * (rows + row), *rest, begin, stop]
            kernel.launch(-(-(stop - begin) // count), stream, [*values, *SCRATCH_ARGUMENTS])
        at, first, size = end, first + size, 2 * size
    lane.mark_end()
    return bytes_


Look = tuple[list[int], list[int], list[int]]  # of each table: least, most, bits set in any


def look_together(numbers: Ints, tables: Sequence[Any]) -> Look:
    """Of tables that were written there one after another."""
    heads = _heads(*map(len, tables[:-1]))
    return (
        np.minimum.reduceat(numbers, heads).tolist(),
        np.maximum.reduceat(numbers, heads).tolist(),
        np.bitwise_or.reduceat(numbers, heads).tolist(),
    )


@lru_cache(maxsize=256)
def _heads(*sizes: int) -> Ints:
    """Where each table begins."""
    return np.array([0, *accumulate(sizes)])


def look_at_each(tables: Sequence[Any]) -> Look:
    """Of arrays where they are; `TypeError` where they are not what the GPU takes.

    Where no segment is negative, 0 is said to be the least of them, and all bits that are set in
    any of them together the most: for offsets that is usually enough, and found in one pass.
    """
    lows, highs, bits = look = ([], [], [])  # type: Look
    for number, table in enumerate(tables):
        if not isinstance(table, np.ndarray) or table.dtype != np.int64 or table.ndim != 1:
            raise TypeError
        bits.append(int(np.bitwise_or.reduce(table)))
        if number in (4, 5) and bits[-1] >= 0:
            lows.append(0)
            highs.append(bits[-1])
        else:
            lows.append(int(np.minimum.reduce(table)))
            highs.append(int(np.maximum.reduce(table)))
    return look
