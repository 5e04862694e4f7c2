"""What one gather or scatter of device memory uses: two streams, two halves, a ring of chunks.

    kernel   brings a piece's runs together in a half, on the device, or puts them in their places
    bus      takes a half to the host, or fills it, a chunk at a time
    ring     a few pinned chunks: the carrier sends one, or fills it, while others cross the bus

Who waits for whom is left to the device, by events; the host waits for chunks only. A ring is
small on purpose: what a chunk's bytes are written to by the device, and read from by a socket, then
stays in the processor's cache (8 streams of plain sockets: 42 GB/s over 4 MiB each, 23 over 32).

A *narrow* lane works alike, in smaller pieces and with a sixteenth of the memory; who gets one and
when is in staging_lanes.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvferry.errors import TransferError
from kvferry.transport.base import MemoryRegion
from kvferry.transport.cuda_driver import Device
from kvferry.transport.cuda_lane import Lane, kept, wait_event
from kvferry.transport.cuda_mapped import Mapped
from kvferry.transport.cuda_quick import queue
from kvferry.transport.cuda_stream import Event, Stream
from kvferry.transport.cuda_work import Runs
from kvferry.transport.memory import Bytes, Ints
from kvferry.transport.regions import Arrays, slices

PIECE_BYTES = 16 << 20  # of one kernel: its launch costs 0.1 ms, the bus takes 0.3 for so much
CHUNK_BYTES = 4 << 20  # of one call of a socket: 1 ms, against some 20 us of Python for each
RING_CHUNKS = 3  # that are under way


@dataclass(frozen=True, slots=True)
class Width:
    piece_bytes: int
    chunk_bytes: int


WIDE = Width(PIECE_BYTES, CHUNK_BYTES)
NARROW = Width(1 << 20, 256 << 10)


@dataclass(frozen=True, slots=True)
class Piece:
    address: Ints
    length: Ints
    offsets: Ints  # in the half
    bytes: int


def pieces(address: Ints, length: Ints, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """The runs in their order, so that each piece fits a half."""
    for part in slices(Arrays(address, address, length), piece_bytes):
        count, longest = len(part), int(part.length.max())
        if longest == int(part.length.min()):  # said by one number, nothing is added up
            equal = np.broadcast_to(np.asarray([longest]), count)
            yield Piece(part.src, equal, np.arange(0, count * longest, longest), count * longest)
        else:
            ends = np.cumsum(part.length)
            yield Piece(part.src, part.length, ends - part.length, int(ends[-1]))


class Chunk:
    """Pinned memory, and when the bus is done with it."""

    def __init__(self, on: Device, size: int) -> None:
        self._device = on
        self.count = size  # bytes that are meant
        self.used = False
        with contextlib.ExitStack() as undo:
            self.moved = kept(undo, Event())
            self.bytes: Bytes = on.pinned(size)
            undo.pop_all()
        self.address: int = self.bytes.ctypes.data

    def settled(self) -> Bytes:
        """Its bytes, once what is queued for them has happened."""
        if self.used:
            wait_event(self.moved)
            self.used = False
        return self.bytes[: self.count]

    def free(self) -> None:
        self.moved.destroy()
        self._device.free_pinned(self.address)


class Half:
    """Device memory for one piece; there are two, which take turns."""

    def __init__(self, on: Device, size: int) -> None:
        self._device = on
        self.used = False
        with contextlib.ExitStack() as undo:
            self.computed, self.moved = kept(undo, Event()), kept(undo, Event())
            self.there = on.allocate(size)
            undo.pop_all()
        self.mapped = Mapped.of([([MemoryRegion(self.there, size)], 0)])

    def free(self) -> None:
        self._device.free(self.there)
        for event in (self.computed, self.moved):
            event.destroy()


class StagingLane:
    """See the module's text. One thread at a time, with the device current."""

    def __init__(self, on: Device, width: Width = WIDE) -> None:
        self.width = width
        self._ring: list[Chunk] = []
        self._turn = 0
        self._halves: list[Half] = []
        with contextlib.ExitStack() as undo:  # all of it, or nothing is left
            self.lane = Lane(on)
            undo.callback(self.lane.free)
            self.bus = kept(undo, Stream())
            for _ in range(RING_CHUNKS):
                self._ring.append(Chunk(on, width.chunk_bytes))
                undo.callback(self._ring[-1].free)
            for _ in range(2):
                self._halves.append(Half(on, width.piece_bytes))
                undo.callback(self._halves[-1].free)
            undo.pop_all()

    def begin(self) -> None:
        """Nothing is under way."""
        self.lane.begin()
        for chunk in self._ring:
            chunk.used = False
        for half in self._halves:
            half.used = False

    def half(self, number: int) -> Half:
        """The half whose turn it is; what fills it waits, on the device, until it is free."""
        half = self._halves[number % 2]
        if half.used:
            self.lane.stream.wait_for(half.moved)
            self.bus.wait_for(half.computed)
        half.used = True
        return half

    def gather(self, piece: Piece, half: Half, memory: Mapped) -> None:
        """Bring the runs to the half, before what the bus is given next."""
        copies = Arrays(piece.address, piece.offsets + half.there, piece.length)
        self._copy(copies, memory, half.mapped)
        half.computed.record(self.lane.stream)
        self.bus.wait_for(half.computed)

    def scatter(self, piece: Piece, half: Half, memory: Mapped) -> None:
        """Put the half's bytes where they belong, after what the bus was given last."""
        half.moved.record(self.bus)
        self.lane.stream.wait_for(half.moved)
        copies = Arrays(piece.offsets + half.there, piece.address, piece.length)
        self._copy(copies, half.mapped, memory)
        half.computed.record(self.lane.stream)

    def _copy(self, copies: Arrays, src: Mapped, dst: Mapped) -> None:
        if queue(self.lane, copies, src, dst, self.width.piece_bytes, whole=True):
            self.lane.keep_slot()
        else:  # the kernel is not compiled yet, or something is unusual; runs have been checked
            self.lane.copy(Runs.of_arrays(copies))

    def chunk(self, left: int) -> Chunk:
        """The chunk whose turn it is, for so many bytes or as many as it holds."""
        chunk = self._ring[self._turn % RING_CHUNKS]
        self._turn += 1
        chunk.count = min(left, self.width.chunk_bytes)
        return chunk

    def out(self, half: Half, offset: int, chunk: Chunk) -> None:
        self.bus.copy_at_once(chunk.address, half.there + offset, chunk.count)
        chunk.moved.record(self.bus)
        chunk.used = True

    def back(self, chunk: Chunk, half: Half, offset: int) -> None:
        self.bus.copy_at_once(half.there + offset, chunk.address, chunk.count)
        chunk.moved.record(self.bus)
        chunk.used = True

    def finish(self) -> None:
        """Until all kernels are done, and what they wrote is visible."""
        self.lane.finish()

    def drain(self) -> None:
        """Wait for what is queued, whatever became of it."""
        self.lane.drain()
        with contextlib.suppress(TransferError):
            self.bus.synchronize()

    def free(self) -> None:
        self.drain()
        for chunk in self._ring:
            chunk.free()
        for half in self._halves:
            half.free()
        self.lane.free()
        self.bus.destroy()
