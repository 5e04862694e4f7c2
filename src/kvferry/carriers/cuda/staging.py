"""Device memory for carriers that move host memory: gathered to and scattered from pinned chunks.

    outgoing   one kernel brings runs together on the device, the bus takes them to the host
    incoming   the bus takes them to the device, one kernel puts them where they belong

So two hosts with GPUs and nothing but TCP between them work: `TcpCarrier(memory=DeviceMemory(...))`
sends a chunk while the next ones cross the bus, and receives one while the last ones do. Both are
generators of pinned chunks, in the order of the runs:

    with closing(memory.outgoing(address, length)) as chunks:
        for chunk in chunks:        # holds the next bytes until the next one is asked for
            socket.send(chunk)
    with closing(memory.incoming(address, length)) as chunks:
        for chunk in chunks:        # to be filled before the next one is asked for
            socket.recv_into(chunk)

When `incoming` has ended, all is visible. One that is closed before its end waits for what it has
begun, so that nothing is written to memory after it. How a lane does it,
and how many there are, follows below.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from kvferry.carriers.base import (
    Bytes,
    MemoryRegion,
    StagedMemory,
    slices,
)
from kvferry.carriers.checksum import WORD_BYTES, Mixed, MixingMemory, mix_on_host
from kvferry.carriers.cuda import kernels
from kvferry.carriers.cuda.buffers import Mapped, StreamBuffers, kept, queue, wait_event
from kvferry.carriers.cuda.driver import CudaEvent, CudaStream, Device, Function, device, place_of
from kvferry.carriers.cuda.kernels import SCRATCH_ARGUMENTS, compile_kernel
from kvferry.carriers.cuda.work import CudaRuns, best_chunk
from kvferry.copies import Copies, Ints
from kvferry.errors import TransferError

log = logging.getLogger(__name__)


class DeviceMemory(StagedMemory, MixingMemory):
    """Regions of one GPU's memory; any number of threads."""

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        self._lanes: StagingLanes | None = None
        self._regions: list[MemoryRegion] = []
        self._device: Device | None = None
        self._memory = Mapped.of([])
        self.warmed = threading.Event()  # set when the first use finds kernels and a lane
        self.register(regions)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        for region in regions:
            found = place_of(region.address) if region.bytes else None
            if found is None or (self._device and found.ordinal != self._device.ordinal):
                raise TransferError(
                    f"{region.bytes} bytes at {region.address:#x} are not memory of one GPU"
                )
            if self._device is None:
                self._device = device(found.ordinal)
                self._lanes = StagingLanes(self._device)
                threading.Thread(target=self._warm, name="kvferry-cuda-warm", daemon=True).start()
        self._regions += regions
        self._memory = Mapped.of([(self._regions, 0)])

    def outgoing(self, address: Ints, length: Ints) -> Generator[Bytes]:
        """The runs' bytes in chunks, each of which stays until the next one is asked for."""
        self._require(address, length)
        with self._lane() as lane:
            parts = pieces(address, length, lane.width.piece_bytes)
            waiting: deque[Chunk] = deque()  # oldest first
            for chunk in self._gather(lane, parts):
                waiting.append(chunk)
                if len(waiting) == RING_CHUNKS:
                    yield waiting.popleft().settled()
            while waiting:
                yield waiting.popleft().settled()

    def incoming(self, address: Ints, length: Ints) -> Generator[Bytes]:
        """Chunks to be filled with the runs' bytes; when it ends, they are in their places."""
        self._require(address, length)
        on = self._on()
        with self._lane() as lane:
            parts, step = pieces(address, length, lane.width.piece_bytes), lane.width.chunk_bytes
            for number, piece in enumerate(parts):
                with on.current():
                    half = lane.half(number)
                for offset in range(0, piece.bytes, step):
                    chunk = lane.chunk(piece.bytes - offset)
                    yield chunk.settled()
                    with on.current():
                        lane.back(chunk, half, offset)
                with on.current():
                    lane.scatter(piece, half, self._memory)
            with on.current():
                lane.finish()

    def gather(self, address: Ints, length: Ints, into: Bytes) -> None:
        """The runs, one after another, to the beginning of `into`; returns when they are there."""
        self._require(address, length, len(into))
        done = 0
        for chunk in self.outgoing(address, length):
            into[done : done + len(chunk)] = chunk
            done += len(chunk)

    def scatter(self, source: Bytes, address: Ints, length: Ints) -> None:
        """The beginning of `source` to the runs; returns when they are visible."""
        self._require(address, length, len(source))
        done = 0
        for chunk in self.incoming(address, length):
            chunk[:] = source[done : done + len(chunk)]
            done += len(chunk)

    def mix(self, address: Ints, length: Ints) -> Mixed:
        """The sums of `mix128` (checksum.py): by a kernel, where runs are aligned as caches are."""
        self._require(address, length)
        if len(address) == 0 or not (kernels.available() and takes(address, length)):
            return mix_on_host(self, address, length)
        with self._lane() as lane, self._on().current():
            return mix(lane.lane, address, length)

    def zero(self, address: Ints, length: Ints) -> None:
        """Set the runs to zero; returns when that is visible."""
        self._require(address, length)
        with self._lane() as lane, self._on().current():
            lane.lane.copy(CudaRuns.of_arrays(Copies(address, address, length)), fill=True)
            lane.finish()

    def close(self) -> None:
        """Gives staging memory back, except what is still in use."""
        if self._lanes is not None:
            self._lanes.close()

    def _warm(self) -> None:
        """Compile the kernels and make a lane now, so that no request waits for them."""
        try:
            if kernels.available():
                kernels.warm(self._on())
                with self._on().current():
                    for chunk, search in itertools.product(TUNING, (False, True)):
                        _function(self._on(), chunk, search=search)
            with self._lane():
                pass
        except Exception as error:
            log.warning("the first transfer of device memory will be slow: %s", error)
        finally:
            self.warmed.set()

    def _gather(self, lane: StagingLane, parts: Iterator[StagedPiece]) -> Iterator[Chunk]:
        """Queue chunk after chunk; whoever asks for one has done with the one of a ring before."""
        on = self._on()
        for number, piece in enumerate(parts):
            with on.current():
                half = lane.half(number)
                lane.gather(piece, half, self._memory)
            for offset in range(0, piece.bytes, lane.width.chunk_bytes):
                chunk = lane.chunk(piece.bytes - offset)
                with on.current():
                    lane.out(half, offset, chunk)
                yield chunk
            with on.current():
                half.moved.record(lane.bus)

    def _on(self) -> Device:
        if self._device is None:
            raise TransferError("no device memory is registered")
        return self._device

    def _require(self, address: Ints, length: Ints, room: int | None = None) -> None:
        runs = Copies.of(Copies(address, address, length))
        self._memory.table.require("this process", runs.src, runs.length)
        if room is not None and int(runs.length.sum()) > room:
            raise TransferError(f"runs of {int(runs.length.sum())} bytes and a buffer of {room}")

    def _lane(self) -> AbstractContextManager[StagingLane]:
        """A lane for one thread; when it is given back, nothing of it is under way."""
        if self._lanes is None:
            raise TransferError("no device memory is registered")
        return self._lanes.lane()


# --------------------------------------------------------------------------------------------------
# What one gather or scatter of device memory uses: two streams, two halves, a ring of chunks.
#
#     kernel   brings a piece's runs together in a half, on the device, or puts them in their places
#     bus      takes a half to the host, or fills it, a chunk at a time
#     ring     a few pinned chunks: the carrier sends one, or fills it, while others cross the bus
#
# Who waits for whom is left to the device, by events; the host waits for chunks only. A ring is
# small on purpose: what a chunk's bytes are written to by the device, and read from by a socket,
# then stays in the processor's cache (8 streams of plain sockets: 42 GB/s over 4 MiB each, 23 over
# 32).
#
# A *narrow* lane works alike, in smaller pieces and with a sixteenth of the memory; who gets one
# and when follows below.
# --------------------------------------------------------------------------------------------------

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
class StagedPiece:
    address: Ints
    length: Ints
    offsets: Ints  # in the half
    bytes: int


def pieces(address: Ints, length: Ints, piece_bytes: int = PIECE_BYTES) -> Iterator[StagedPiece]:
    """The runs in their order, so that each piece fits a half."""
    for part in slices(Copies(address, address, length), piece_bytes):
        count, longest = len(part), int(part.length.max())
        if longest == int(part.length.min()):  # said by one number, nothing is added up
            equal = np.broadcast_to(np.asarray([longest]), count)
            yield StagedPiece(
                part.src, equal, np.arange(0, count * longest, longest), count * longest
            )
        else:
            ends = np.cumsum(part.length)
            yield StagedPiece(part.src, part.length, ends - part.length, int(ends[-1]))


class Chunk:
    """Pinned memory, and when the bus is done with it."""

    def __init__(self, on: Device, size: int) -> None:
        self._device = on
        self.count = size  # bytes that are meant
        self.used = False
        with contextlib.ExitStack() as undo:
            self.moved = kept(undo, CudaEvent())
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
            self.computed, self.moved = kept(undo, CudaEvent()), kept(undo, CudaEvent())
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
            self.lane = StreamBuffers(on)
            undo.callback(self.lane.free)
            self.bus = kept(undo, CudaStream())
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

    def gather(self, piece: StagedPiece, half: Half, memory: Mapped) -> None:
        """Bring the runs to the half, before what the bus is given next."""
        copies = Copies(piece.address, piece.offsets + half.there, piece.length)
        self._copy(copies, memory, half.mapped)
        half.computed.record(self.lane.stream)
        self.bus.wait_for(half.computed)

    def scatter(self, piece: StagedPiece, half: Half, memory: Mapped) -> None:
        """Put the half's bytes where they belong, after what the bus was given last."""
        half.moved.record(self.bus)
        self.lane.stream.wait_for(half.moved)
        copies = Copies(piece.offsets + half.there, piece.address, piece.length)
        self._copy(copies, half.mapped, memory)
        half.computed.record(self.lane.stream)

    def _copy(self, copies: Copies, src: Mapped, dst: Mapped) -> None:
        if queue(self.lane, copies, src, dst, self.width.piece_bytes, whole=True):
            self.lane.keep_slot()
        else:  # the kernel is not compiled yet, or something is unusual; runs have been checked
            self.lane.copy(CudaRuns.of_arrays(copies))

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


# --------------------------------------------------------------------------------------------------
# The staging lanes of one device: a bounded number, kept for the next gather or scatter.
#
# A lane has 44 MiB, and whoever sends or receives keeps one until the other side
# has taken or sent its bytes, which may need a lane over there. So nobody may wait here for ever:
# two sides whose lanes are all held by transfers that wait for each other would do so. Hence:
#
#     an idle lane        is taken, the last one that was used first
#     none, below MOST    one is made
#     none               it is waited for, NARROW_AFTER_SECONDS at most; then a narrow lane is made,
#                         which has little memory, is slower, and is freed after its use
#
# What is made in vain, because the device has no memory left, is not counted. Idle lanes beyond
# `KEPT_LANES` are freed when they have not been used for `LINGER_SECONDS`: freeing one waits for
# the device and making one takes milliseconds, so it is not done between two requests.
# --------------------------------------------------------------------------------------------------

MOST_LANES = 16  # what one peer uses at most: four transfers, four streams each
KEPT_LANES = 4  # what one transfer uses
NARROW_AFTER_SECONDS = 0.25  # a frame through a lane that moves takes some ten milliseconds
LINGER_SECONDS = 10.0


class StagingLanes:
    """See the module's text. Any thread."""

    def __init__(self, on: Device) -> None:
        self._device = on
        self._changed = threading.Condition()
        self._idle: list[tuple[StagingLane, float]] = []  # since when; the newest last
        self._wide = 0  # that exist, or are being made
        self._sweeper: threading.Timer | None = None
        self._closed = False

    @contextlib.contextmanager
    def lane(self) -> Iterator[StagingLane]:
        """A lane for one thread; when it is given back, nothing of it is under way."""
        lane = self._take()
        try:
            lane.begin()
            yield lane
        except BaseException:
            with self._device.current():
                lane.drain()
            raise
        finally:
            self._put(lane)

    def close(self) -> None:
        """Frees what is idle, and the others when they are given back. Idempotent."""
        with self._changed:
            self._closed = True
            sweeper, self._sweeper = self._sweeper, None
            lanes = self._removed(0)
        if sweeper is not None:
            sweeper.cancel()
        self._free(lanes)

    def _take(self) -> StagingLane:
        with self._changed:
            if not self._idle and self._wide >= MOST_LANES:
                self._changed.wait_for(
                    lambda: self._idle or self._wide < MOST_LANES, NARROW_AFTER_SECONDS
                )
            if self._idle:
                return self._idle.pop()[0]
            width = NARROW if self._wide >= MOST_LANES else WIDE
            self._wide += width is WIDE
        try:
            with self._device.current():
                return StagingLane(self._device, width)
        except BaseException:
            self._forget(width is WIDE)
            raise

    def _put(self, lane: StagingLane) -> None:
        wide = lane.width is WIDE
        with self._changed:
            keep = wide and not self._closed
            if keep:
                self._idle.append((lane, time.monotonic()))
                self._changed.notify()
                if len(self._idle) > KEPT_LANES and self._sweeper is None:
                    self._sweep_after(LINGER_SECONDS)
        if not keep:
            try:
                self._free([lane])
            finally:
                self._forget(wide)

    def _forget(self, wide: bool) -> None:
        with self._changed:
            self._wide -= wide
            self._changed.notify()

    def _sweep_after(self, seconds: float) -> None:
        """The lock is held."""
        self._sweeper = threading.Timer(seconds, self._sweep)
        self._sweeper.name, self._sweeper.daemon = "kvferry-staging-sweep", True
        try:
            self._sweeper.start()
        except RuntimeError:  # the system has no thread for it: the next one tries again
            self._sweeper = None

    def _sweep(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._sweeper = None
            old = time.monotonic() - LINGER_SECONDS
            used = sum(since > old for _, since in self._idle)
            lanes = self._removed(max(KEPT_LANES, used))
            if len(self._idle) > KEPT_LANES:
                self._sweep_after(LINGER_SECONDS)
        self._free(lanes)

    def _removed(self, left: int) -> list[StagingLane]:
        """The oldest of the idle lanes, so that so many are left. The lock is held."""
        count = max(0, len(self._idle) - left)
        lanes = [lane for lane, _ in self._idle[:count]]
        del self._idle[:count]
        self._wide -= count
        self._changed.notify(count)
        return lanes

    def _free(self, lanes: list[StagingLane]) -> None:
        if not lanes:
            return
        with self._device.current():
            for lane in lanes:
                with contextlib.suppress(TransferError):  # a device that failed
                    lane.free()


# --------------------------------------------------------------------------------------------------
# `mix128` of a GPU's own memory: one launch for up to 32,768 runs. What it means: checksum.py.
# --------------------------------------------------------------------------------------------------

GRAIN = 16  # what addresses and lengths are multiples of
SLOTS = 64  # pairs of sums
WHOLE = 1 << 40  # bytes of a launch: only the number of runs is bounded
# Chunks of a program and its warps, measured on an H200: 2.4 TB/s at 256 B, 3.0 from 1 KiB on.
TUNING = {64: (64, 2), 256: (16, 2), 1024: (4, 1), 4096: (1, 2)}

_lock = threading.Lock()
_functions: dict[tuple[int, int, bool], Function] = {}


def takes(address: Ints, length: Ints) -> bool:
    """Whether the kernel can mix these."""
    bits = int(np.bitwise_or.reduce(address)) | int(np.bitwise_or.reduce(length))
    return bits % GRAIN == 0


def mix(lane: StreamBuffers, address: Ints, length: Ints) -> Mixed:
    """The runs, which have been checked; on a lane of their device, which is current."""
    total = Mixed()
    for part in slices(Copies(address, address, length), WHOLE):
        total = total.plus(_mix(lane, part.src, part.length, total.words))
    return total


def _mix(lane: StreamBuffers, address: Ints, length: Ints, number: int) -> Mixed:
    runs, longest = len(address), int(length.max())
    even = longest == int(length.min())
    chunk = best_chunk(length[:1] if even else length)
    tables = [address]
    chunks = -(-longest // chunk)
    items, words = chunks * runs, longest // WORD_BYTES * runs
    if not even:
        firsts, ends = np.cumsum(-(-length // chunk)), np.cumsum(length // WORD_BYTES)
        items, words = int(firsts[-1]), int(ends[-1])
        tables += [length, ends - length // WORD_BYTES, np.append(0, firsts)]
    count, _ = TUNING[chunk]
    kernel = _function(lane.device, chunk, search=not even)
    sizes = [len(table) for table in tables]
    used = sum(sizes)
    slot = lane.slot(used + 2 * SLOTS)
    np.concatenate(tables, out=slot.numbers[:used])
    lane.upload(slot.there, slot.address, 8 * used)
    places = [slot.there + 8 * sum(sizes[:i]) for i in range(len(sizes))]
    places += [slot.there] * (4 - len(places))
    out = slot.there + 8 * used
    lane.stream.zero(out, 16 * SLOTS)
    values = [*places, out, longest, number, runs, chunks, items, runs.bit_length()]
    kernel.launch(-(-items // count), lane.stream, [*values, *SCRATCH_ARGUMENTS])
    lane.stream.copy(slot.address + 8 * used, out, 16 * SLOTS)
    lane.finish()
    sums = slot.numbers[used : used + 2 * SLOTS].view(np.uint64).reshape(-1, 2)
    first, second = (int(s) for s in np.add.reduce(sums, axis=0))
    return Mixed(first, second, words)


def _function(device: Device, chunk: int, *, search: bool) -> Function:
    key = (device.ordinal, chunk, search)
    with _lock:
        if key not in _functions:
            from kvferry.carriers.cuda.triton_kernels import mix_runs

            count, warps = TUNING[chunk]
            signature = {
                **dict.fromkeys(("address", "lengths", "words", "firsts", "out"), "*i64"),
                **dict.fromkeys(("length", "number"), "i64"),
                **dict.fromkeys(("runs", "chunks", "items", "rounds"), "i32"),
            }
            constants = {"SEARCH": search, "CHUNK": chunk, "COUNT": count, "SLOTS": SLOTS}
            code = compile_kernel(mix_runs, signature, constants, device.capability, warps)
            _functions[key] = Function(*code[:2], warps=warps, shared_bytes=code[2])
        return _functions[key]
