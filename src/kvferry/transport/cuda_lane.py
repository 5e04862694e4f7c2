"""A lane: a stream of one device, and the buffers through which runs reach the GPU.

    lane.copy(runs)     queue all copies of these runs; returns when they are queued
    lane.finish()       wait until everything queued is done, and visible

The numbers of a batch go into pinned memory and from there to the device, or, where they are few,
are read from the pinned memory by the kernel itself. There are a few such slots, made when
they are needed, so that the next batch is prepared while the last one runs; between two launches
the caller's `check` is asked, and no more than `SLOTS` launches of at most `LAUNCH_BYTES` are ever
under way, so that a cancelled transfer ends within milliseconds. One thread uses a lane at a time.

What is queued whole by the thread that asks for it is in cuda_quick.py.

Without Triton, each copy is a `cuMemcpyAsync`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from kvferry.transport import cuda_kernels
from kvferry.transport.base import Ints
from kvferry.transport.cuda_driver import Device
from kvferry.transport.cuda_kernels import SCRATCH_ARGUMENTS, Form
from kvferry.transport.cuda_stream import Event, Function, Stream
from kvferry.transport.cuda_work import CHUNKS, MOST_ITEMS, WINDOW, Runs, Work

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
T = TypeVar("T", Stream, Event)


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
            self.done = kept(undo, Event())
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


class Lane:
    """See the module's text. The device must be current wherever a lane is used."""

    def __init__(self, device: Device, *, triton: bool | None = None) -> None:
        self.device = device
        self._kernels = cuda_kernels.available() if triton is None else triton
        self._slots: list[_Slot] = []
        self._next = 0
        self._running = False  # whether numbers were brought since `begin`
        with contextlib.ExitStack() as undo:  # all of it, or nothing is left
            self.stream = kept(undo, Stream())
            self._aside = kept(undo, Stream())  # brings the next launch's numbers as the last runs
            self._brought = kept(undo, Event())
            self.end = kept(undo, Event())  # after what was queued last
            self._marks = [kept(undo, Event()) for _ in range(SLOTS)]  # between a batch's launches
            undo.pop_all()

    def copy(
        self,
        runs: Runs,
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
                self._pieces(Runs.of_arrays(arrays), shifts, fill, check)
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

    def _pieces(self, runs: Runs, shifts: Shifts, fill: bool, check: Check) -> None:
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
            kernel = cuda_kernels.function(self.device, form)
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

    def _copy_singly(self, runs: Runs, shifts: Shifts, fill: bool, check: Check) -> None:
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


def wait_event(event: Event) -> None:
    """Until it is done. Looks, and naps: an interrupt comes later than that, above all in a VM."""
    while not event.done():
        time.sleep(NAP_SECONDS)
