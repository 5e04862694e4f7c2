"""Device memory for carriers that move host memory: gathered to and scattered from pinned buffers.

    gather    one kernel brings the runs together on the device, one copy takes them to the host
    scatter   one copy takes them to the device, one kernel puts them where they belong

So two hosts with GPUs and nothing but TCP between them work: `TcpCarrier(memory=DeviceMemory(...))`
sends one pinned buffer while the next is gathered, and receives one while the last is scattered
(tcp_staged.py).

A call's bytes go through the device in pieces of half a lane's staging memory: while one piece
crosses the bus, the kernel works on the other. Host buffers that are not pinned go through pinned
memory of the lane's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from kvferry.errors import TransferError
from kvferry.transport.base import MemoryRegion
from kvferry.transport.cuda_driver import Device, Event, Stream, device, place_of
from kvferry.transport.cuda_lane import Lane, wait_event
from kvferry.transport.cuda_mapped import Mapped, place
from kvferry.transport.cuda_work import Runs
from kvferry.transport.memory import Bytes, Ints
from kvferry.transport.regions import Arrays, slices

# Crosses the bus in 0.3 ms. Starting it costs a thread about that much, which several connections
# pay one after another (the interpreter's lock): the rate of tcp grows with it.
PIECE_BYTES = 16 << 20

Finish = Callable[[], None]


class _Half:
    """One of two staging areas of a lane."""

    def __init__(self, on: Device, bus: Stream) -> None:
        self.there = on.allocate(PIECE_BYTES)
        self.bus = bus
        self._device = on
        self._here: Bytes | None = None
        self.computed, self.moved = Event(), Event()
        self.used = False

    @property
    def here(self) -> Bytes:
        """For host buffers that are not pinned."""
        if self._here is None:
            self._here = self._device.pinned(PIECE_BYTES)
        return self._here

    def settle(self) -> None:
        """Wait until all that was queued with it is done, and it may be filled again."""
        if self.used:
            wait_event(self.moved)
            wait_event(self.computed)

    def free(self) -> None:
        self._device.free(self.there)
        if self._here is not None:
            self._device.free_pinned(self._here.ctypes.data)
        for event in (self.computed, self.moved):
            event.destroy()


class _StagingLane:
    """A kernel stream, a stream for the bus, two halves that take turns. One thread at a time."""

    def __init__(self, on: Device) -> None:
        self.lane, self.bus = Lane(on), Stream()
        self.halves = (_Half(on, self.bus), _Half(on, self.bus))

    def drain(self) -> None:
        self.lane.drain()
        with contextlib.suppress(TransferError):
            self.bus.synchronize()

    def free(self) -> None:
        self.drain()
        for half in self.halves:
            half.free()
        self.lane.free()
        self.bus.destroy()


@dataclass(frozen=True, slots=True)
class _Piece:
    half: _Half
    runs: Arrays  # src: the runs; dst: offsets in the half
    offset: int  # in the host's buffer
    bytes: int


class DeviceMemory:
    """Regions of one GPU's memory. Implements `memory.Memory`; any number of threads."""

    addressable = False

    def __init__(self, regions: Sequence[MemoryRegion], *, chunk_bytes: int = PIECE_BYTES) -> None:
        self.chunk_bytes = chunk_bytes  # what a carrier should stage at a time
        self._lock = threading.Lock()
        self._idle: list[_StagingLane] = []
        self._pinned: dict[int, int] = {}  # buffers in use: address to bytes
        self._spare: dict[int, list[int]] = {}  # by their bytes
        self._closed = False
        self._regions: list[MemoryRegion] = []
        self._device: Device | None = None
        self._memory = Mapped.of([])
        self.register(regions)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        for region in regions:
            found = place_of(region.address) if region.bytes else None
            if found is None or (self._device and found.ordinal != self._device.ordinal):
                raise TransferError(
                    f"{region.bytes} bytes at {region.address:#x} are not memory of one GPU"
                )
            self._device = device(found.ordinal)
        self._regions += regions
        self._memory = Mapped.of([(self._regions, 0)])

    def buffer(self, count: int) -> Bytes:
        """Pinned memory, which the device reads and writes by itself; reused when let go of."""
        with self._lock:
            spare = self._spare.get(count)
            address = spare.pop() if spare else 0
        if not address:
            on = self._on()
            with on.current():
                address = on.pinned_address(count)
        memory = (ctypes.c_uint8 * count).from_address(address)
        with self._lock:
            self._pinned[address] = count
        weakref.finalize(memory, self._let_go, address, count)  # arrays and views of it keep it
        return np.ctypeslib.as_array(memory)

    def _let_go(self, address: int, count: int) -> None:
        with self._lock:
            del self._pinned[address]
            self._spare.setdefault(count, []).append(address)

    def gather(self, address: Ints, length: Ints, into: Bytes) -> None:
        """The runs, one after another, to the beginning of `into`; returns when they are there."""
        self.begin_gather(address, length, into)()

    def scatter(self, source: Bytes, address: Ints, length: Ints) -> None:
        """The beginning of `source` to the runs; returns when they are visible."""
        self.begin_scatter(source, address, length)()

    def begin_gather(self, address: Ints, length: Ints, into: Bytes) -> Finish:
        """Start to gather; what is returned waits for the end, and must be called, once."""
        runs = self._checked(address, length, len(into))
        pinned = self._is_pinned(into)

        def queue(staging: _StagingLane) -> None:
            before: _Piece | None = None
            for piece in _pieces(runs, staging.halves):
                half = piece.half
                half.settle()
                staging.lane.copy(Runs.of_arrays(_at(piece.runs, half.there)))
                half.computed.record(staging.lane.stream)
                staging.bus.wait_for(half.computed)
                to = into.ctypes.data + piece.offset if pinned else half.here.ctypes.data
                staging.bus.copy(to, half.there, piece.bytes)
                half.moved.record(staging.bus)
                half.used = True
                if not pinned:
                    _unload(before, into)
                    before = piece
            if not pinned:
                _unload(before, into)

        return self._begin(queue)

    def begin_scatter(self, source: Bytes, address: Ints, length: Ints) -> Finish:
        """Start to scatter; as `begin_gather`. The source must stay as it is until the end."""
        runs = self._checked(address, length, len(source))
        pinned = self._is_pinned(source)

        def queue(staging: _StagingLane) -> None:
            for piece in _pieces(runs, staging.halves):
                half = piece.half
                half.settle()
                part = source[piece.offset : piece.offset + piece.bytes]
                if not pinned:
                    half.here[: piece.bytes] = part
                begin = part.ctypes.data if pinned else half.here.ctypes.data
                staging.bus.copy(half.there, begin, piece.bytes)
                half.moved.record(staging.bus)
                staging.lane.stream.wait_for(half.moved)
                there = _at(piece.runs, half.there)
                staging.lane.copy(Runs.of_arrays(Arrays(there.dst, there.src, there.length)))
                half.computed.record(staging.lane.stream)
                half.used = True

        return self._begin(queue)

    def _begin(self, queue: Callable[[_StagingLane], None]) -> Finish:
        on = self._on()
        with on.current():
            staging = self._take()
            try:
                queue(staging)
            except BaseException:
                staging.drain()
                self._put(staging)
                raise

        def finish() -> None:
            with on.current():
                try:
                    for half in staging.halves:
                        half.settle()
                except BaseException:
                    staging.drain()
                    raise
                finally:
                    self._put(staging)

        return finish

    def zero(self, address: Ints, length: Ints) -> None:
        """Set the runs to zero; returns when that is visible."""
        runs = self._checked(address, length, None)
        with self._on().current():
            staging = self._take()
            try:
                staging.lane.copy(Runs.of_arrays(runs), fill=True)
                staging.lane.finish()
            finally:
                self._put(staging)

    def close(self) -> None:
        """Gives staging memory back, except buffers that are still in use."""
        with self._lock:
            self._closed = True
            lanes, self._idle = self._idle, []
            spare, self._spare = self._spare, {}
        if self._device is None:
            return
        with self._device.current():
            for lane in lanes:
                lane.free()
            for address in chain.from_iterable(spare.values()):
                self._device.free_pinned(address)

    def _on(self) -> Device:
        if self._device is None:
            raise TransferError("no device memory is registered")
        return self._device

    def _checked(self, address: Ints, length: Ints, room: int | None) -> Arrays:
        runs = Arrays.of(Arrays(address, address, length))
        for _ in place(Runs.of_arrays(runs), self._memory, self._memory, reading=False):
            break  # raises before the first where a run is outside
        total = int(runs.length.sum())
        if room is not None and total > room:
            raise TransferError(f"runs of {total} bytes and a buffer of {room}")
        return runs

    def _is_pinned(self, memory: Bytes) -> bool:
        begin, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
        with self._lock:
            return any(at <= begin and end <= at + count for at, count in self._pinned.items())

    def _take(self) -> _StagingLane:
        with self._lock:
            staging = self._idle.pop() if self._idle else None
        staging = staging or _StagingLane(self._on())
        for half in staging.halves:
            half.used = False
        return staging

    def _put(self, staging: _StagingLane) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(staging)
                return
        staging.free()


def _pieces(runs: Arrays, halves: tuple[_Half, _Half]) -> Iterator[_Piece]:
    """Runs in the order of the buffer, in pieces that fit a half, on the halves in turn."""
    done = 0
    for number, part in enumerate(slices(runs, PIECE_BYTES)):
        ends = np.cumsum(part.length)
        total = int(ends[-1])
        placed = Arrays(part.src, ends - part.length, part.length)
        yield _Piece(halves[number % 2], placed, done, total)
        done += total


def _at(runs: Arrays, base: int) -> Arrays:
    return Arrays(runs.src, runs.dst + base, runs.length)


def _unload(piece: _Piece | None, into: Bytes) -> None:
    if piece is not None:
        wait_event(piece.half.moved)
        into[piece.offset : piece.offset + piece.bytes] = piece.half.here[: piece.bytes]
