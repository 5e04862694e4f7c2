# SPDX-License-Identifier: Apache-2.0
"""Device memory for carriers that move host memory: gathered to and scattered from pinned chunks.

    outgoing   a kernel gathers runs on the device, and the bus copies them to the host
    incoming   the bus copies bytes to the device, and a kernel scatters them to their places

So a cache can move between GPUs of two hosts over TCP: `TcpCarrier(memory=DeviceMemory(...))` sends
a chunk while the next ones cross the bus, and receives one while earlier ones do (`StagedMemory`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from kvferry.carriers.base import Bytes, MemoryRegion, StagedMemory, slices
from kvferry.carriers.checksum import WORD_BYTES, Mixed, MixingMemory, mix_on_host
from kvferry.carriers.cuda import kernels
from kvferry.carriers.cuda.driver import (
    CudaEvent,
    CudaStream,
    Device,
    Function,
    device_of,
    has_memory,
)
from kvferry.carriers.cuda.stream import (
    Mapped,
    StreamBuffers,
    best_chunk,
    free_all,
    kept,
    wait_event,
)
from kvferry.copies import Copies, Ints
from kvferry.errors import KvferryError, TransferError
from kvferry.workers import Threads, start_compiler

log = logging.getLogger(__name__)


class DeviceMemory(StagedMemory, MixingMemory):
    """Regions of one GPU's memory. Any thread may use it.

    While their engine sleeps (vLLM's sleep mode), there is no memory behind their addresses, and a
    kernel that reads them would leave the engine a device that refuses everything. A peer may ask
    for bytes then, because a reset that came before the sleep does not end its reads. So each piece
    of a transfer is refused while the first region has no memory.
    """

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        self._device = device_of(region.address for region in regions)
        self._first = regions[0].address
        with self._device.current():
            self._may_sleep = has_memory(self._first)  # as this driver says
        self._memory = Mapped.of([(regions, 0)])
        self._pool = StagingPool(self._device)
        self.warmed = threading.Event()  # set when kernels and buffers are ready for the first use
        start_compiler(self._warm, "kvferry-cuda-warm")

    def outgoing(self, address: Ints, length: Ints) -> Generator[Bytes]:
        self._require(address, length)
        with self._pool.use() as staging:
            parts = pieces(address, length, staging.width.piece_bytes)
            waiting: deque[Chunk] = deque()  # oldest first
            for chunk in self._gather(staging, parts):
                waiting.append(chunk)
                if len(waiting) == RING_CHUNKS:
                    yield waiting.popleft().settled()
            while waiting:
                yield waiting.popleft().settled()

    def incoming(self, address: Ints, length: Ints) -> Generator[Bytes]:
        self._require(address, length)
        with self._pool.use() as staging:
            step = staging.width.chunk_bytes
            for number, piece in enumerate(pieces(address, length, staging.width.piece_bytes)):
                with self._device.current():
                    half = staging.half(number)
                for offset in range(0, piece.bytes, step):
                    chunk = staging.chunk(piece.bytes - offset)
                    yield chunk.settled()
                    with self._device.current():
                        staging.cross(chunk, half.there + offset, chunk.address)
                self._require_awake()
                with self._device.current():
                    staging.scatter(piece, half, self._memory)
            with self._device.current():
                staging.finish()

    def gather(self, address: Ints, length: Ints, into: Bytes) -> None:
        self._require(address, length, len(into))
        done = 0
        for chunk in self.outgoing(address, length):
            into[done : done + len(chunk)] = chunk
            done += len(chunk)

    def scatter(self, source: Bytes, address: Ints, length: Ints) -> None:
        self._require(address, length, len(source))
        done = 0
        for chunk in self.incoming(address, length):
            chunk[:] = source[done : done + len(chunk)]
            done += len(chunk)

    def mix(self, address: Ints, length: Ints) -> Mixed:
        """The sums of `mix128` (checksum.py): by a kernel, if runs are aligned as caches are."""
        self._require(address, length)
        if len(address) and kernels.available() and takes(address, length):
            # Triton fails for single forms, and `kernels.load` says so once.
            with (
                contextlib.suppress(TransferError),
                self._pool.use() as staging,
                self._device.current(),
            ):
                return mix(staging.stream_buffers, address, length)
        return mix_on_host(self, address, length)

    def zero(self, address: Ints, length: Ints) -> None:
        self._require(address, length)
        with self._pool.use() as staging, self._device.current():
            copies = Copies(address, address, length)
            staging.stream_buffers.copy(copies, self._memory, self._memory, fill=True)
            staging.finish()

    def close(self) -> None:
        """Free staging memory, except for buffers in use."""
        self._pool.close()

    def _warm(self) -> None:
        """Compile the kernels and make buffers now, so that no request waits for them."""
        try:
            if kernels.available():
                kernels.warm(self._device)
                with self._device.current():
                    for chunk, search in itertools.product(TUNING, (False, True)):
                        _function(self._device, chunk, search=search)
            with self._pool.use():
                pass
        except Exception as error:
            log.warning("the first transfer of device memory will be slow: %s", error)
        finally:
            self.warmed.set()

    def _gather(self, staging: StagingBuffers, parts: Iterator[StagedPiece]) -> Iterator[Chunk]:
        """Queue chunk after chunk. The caller no longer uses the chunk one ring before."""
        for number, piece in enumerate(parts):
            self._require_awake()
            with self._device.current():
                half = staging.half(number)
                staging.gather(piece, half, self._memory)
            for offset in range(0, piece.bytes, staging.width.chunk_bytes):
                chunk = staging.chunk(piece.bytes - offset)
                with self._device.current():
                    staging.cross(chunk, chunk.address, half.there + offset)
                yield chunk
            with self._device.current():
                half.moved.record(staging.bus)

    def _require_awake(self) -> None:
        with self._device.current():
            if self._may_sleep and not has_memory(self._first):
                raise TransferError("the cache has no memory now, as while its engine sleeps")

    def _require(self, address: Ints, length: Ints, room: int | None = None) -> None:
        self._require_awake()
        runs = Copies.of(Copies(address, address, length))
        self._memory.table.require("this process", runs.src, runs.length)
        if room is not None and int(runs.length.sum()) > room:
            raise TransferError(f"runs of {int(runs.length.sum())} bytes and a buffer of {room}")


PIECE_BYTES = 16 << 20  # of one kernel; its launch takes 0.1 ms, its bytes 0.3 ms of the bus
CHUNK_BYTES = 4 << 20  # of one socket call, which takes 1 ms, and some 20 us of Python
RING_CHUNKS = 3  # under way


class Width(NamedTuple):
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
    """The runs in their order, in pieces that fit a half."""
    for part in slices(Copies(address, address, length), piece_bytes):
        count, longest = len(part), int(part.length.max())
        if longest == int(part.length.min()):  # one number says all; nothing is added up
            equal = np.broadcast_to(np.asarray([longest], dtype=np.int64), count)
            yield StagedPiece(
                part.src, equal, np.arange(0, count * longest, longest), count * longest
            )
        else:
            ends = np.cumsum(part.length)
            yield StagedPiece(part.src, part.length, ends - part.length, int(ends[-1]))


class Chunk:
    """Pinned memory, and the event after which the bus no longer uses it."""

    def __init__(self, on: Device, size: int) -> None:
        self.count = size  # bytes in use
        self.used = False
        with contextlib.ExitStack() as undo:
            self.moved = kept(undo, CudaEvent())
            self.bytes: Bytes = on.pinned(size)
            self.address: int = self.bytes.ctypes.data
            undo.callback(on.free_pinned, self.address)
            self.free = undo.pop_all().close

    def settled(self) -> Bytes:
        """Wait for the copy that is queued for its bytes, and return them."""
        if self.used:
            wait_event(self.moved)
            self.used = False
        return self.bytes[: self.count]


class Half:
    """Device memory for one piece. Two halves take turns."""

    def __init__(self, on: Device, size: int) -> None:
        self.bytes = size
        self.used = False
        with contextlib.ExitStack() as undo:
            self.computed, self.moved = kept(undo, CudaEvent()), kept(undo, CudaEvent())
            self.there = on.allocate(size)
            undo.callback(on.free, self.there)
            self.free = undo.pop_all().close
        self.mapped = Mapped.of([([MemoryRegion(self.there, size)], 0)])


class StagingBuffers:
    """Two streams, two halves of device memory and a ring of pinned chunks, for one thread.

        kernel   gathers a piece's runs in a half, or scatters them to their places
        bus      copies a half to the host, or fills it, a chunk at a time
        ring     a few pinned chunks: the carrier sends or fills one while others cross the bus

    The streams wait for each other on the device, by events; the host waits for chunks only. The
    ring is small, so that its bytes stay in the processor's cache (8 connections: 42 GB/s with 4
    MiB each, 23 GB/s with 32 MiB). The device must be current.
    """

    def __init__(self, on: Device, width: Width = WIDE) -> None:
        self.width = width
        self._ring: list[Chunk] = []
        self._turn = 0
        self._halves: list[Half] = []
        with contextlib.ExitStack() as undo:  # if one step fails, undo the others
            self.stream_buffers = StreamBuffers(on)
            undo.callback(self.stream_buffers.free)
            self.bus = kept(undo, CudaStream())
            for _ in range(RING_CHUNKS):
                self._ring.append(Chunk(on, width.chunk_bytes))
                undo.callback(self._ring[-1].free)
            for _ in range(2):
                self._halves.append(Half(on, width.piece_bytes))
                undo.callback(self._halves[-1].free)
            self._made = undo.pop_all()

    def begin(self) -> None:
        """Begin a use. Nothing is under way."""
        self.stream_buffers.begin()
        for chunk in self._ring:
            chunk.used = False
        for half in self._halves:
            half.used = False

    def half(self, number: int) -> Half:
        """The half whose turn it is. The streams wait on the device until it is free."""
        half = self._halves[number % 2]
        if half.used:
            self.stream_buffers.stream.wait_for(half.moved)
            self.bus.wait_for(half.computed)
        half.used = True
        return half

    def gather(self, piece: StagedPiece, half: Half, memory: Mapped) -> None:
        """Gather the runs in the half. The bus waits for that."""
        copies = Copies(piece.address, piece.offsets + half.there, piece.length)
        self.stream_buffers.copy(copies, memory, half.mapped)
        half.computed.record(self.stream_buffers.stream)
        self.bus.wait_for(half.computed)

    def scatter(self, piece: StagedPiece, half: Half, memory: Mapped) -> None:
        """Scatter the half's bytes to their places, after the bus has filled it."""
        half.moved.record(self.bus)
        self.stream_buffers.stream.wait_for(half.moved)
        copies = Copies(piece.offsets + half.there, piece.address, piece.length)
        self.stream_buffers.copy(copies, half.mapped, memory)
        half.computed.record(self.stream_buffers.stream)

    def chunk(self, left: int) -> Chunk:
        """The chunk whose turn it is, for `left` bytes or as many as it holds."""
        chunk = self._ring[self._turn % RING_CHUNKS]
        self._turn += 1
        chunk.count = min(left, self.width.chunk_bytes)
        return chunk

    def cross(self, chunk: Chunk, dst: int, src: int) -> None:
        """Have the bus copy bytes to or from a chunk."""
        self.bus.copy_at_once(dst, src, chunk.count)
        chunk.moved.record(self.bus)
        chunk.used = True

    def finish(self) -> None:
        self.stream_buffers.finish()

    def drain(self) -> None:
        """Wait for all queued work, even if it failed."""
        self.stream_buffers.drain()
        with contextlib.suppress(TransferError):
            self.bus.synchronize()

    def free(self) -> None:
        self.drain()
        self._made.close()


MOST_BUFFERS = 16  # the most that one peer uses: four transfers of four streams each
KEPT_BUFFERS = 4  # as many as one transfer uses
NARROW_AFTER_SECONDS = 0.25  # a frame takes some ten milliseconds
LINGER_SECONDS = 10.0


class StagingPool:
    """The staging buffers of one device: a bounded number, kept for the next use. Any thread may
    use it.

    Staging buffers have 44 MiB. A thread that sends or receives keeps them until the other side has
    received or sent its bytes, and the other side may need staging buffers for that. If threads
    waited for buffers without a limit, two sides could wait for each other for ever. So:

        some are idle              the thread takes those that were used last
        fewer than `MOST_BUFFERS`  the thread makes new ones
        else                       the thread waits up to `NARROW_AFTER_SECONDS`. Then it makes
                                   narrow ones, which have little memory and are slower, and frees
                                   them after use

    Idle buffers beyond `KEPT_BUFFERS` that were not used for `LINGER_SECONDS` are freed when others
    are given back. A thread of the pool frees them, because that waits for the device, and so for
    the engine's steps.
    """

    def __init__(self, on: Device) -> None:
        self._device = on
        self._changed = threading.Condition()
        self._idle: list[tuple[StagingBuffers, float]] = []  # and since when; the newest last
        self._wide = 0  # that exist, or are being made
        self._closed = False
        self._freeing = Threads("kvferry-staging-free", 1)

    @contextlib.contextmanager
    def use(self) -> Iterator[StagingBuffers]:
        """Buffers for one thread. Nothing is under way when they are given back."""
        staging = self._take()
        try:
            staging.begin()
            yield staging
        except BaseException:
            with self._device.current():
                staging.drain()
            raise
        finally:
            self._put(staging)

    def close(self) -> None:
        """Free idle buffers, and the others when they are given back. Idempotent."""
        with self._changed:
            self._closed = True
            unused = self._removed()
        self._freeing.close()
        free_all(self._device, unused)

    def _take(self) -> StagingBuffers:
        with self._changed:
            if not self._idle and self._wide >= MOST_BUFFERS:
                self._changed.wait_for(
                    lambda: self._idle or self._wide < MOST_BUFFERS, NARROW_AFTER_SECONDS
                )
            if self._idle:
                return self._idle.pop()[0]
            width = NARROW if self._wide >= MOST_BUFFERS else WIDE
            self._wide += width is WIDE
        try:
            with self._device.current():
                return StagingBuffers(self._device, width)
        except BaseException:  # perhaps the device has no memory left
            with self._changed:
                self._wide -= width is WIDE
                self._changed.notify()
            raise

    def _put(self, staging: StagingBuffers) -> None:
        unused = [staging]
        if staging.width is WIDE:
            with self._changed:
                self._idle.append((staging, time.monotonic()))
                self._changed.notify()
                unused = self._removed()
            if unused:
                with contextlib.suppress(KvferryError):  # closed, or no thread can be started
                    self._freeing.submit(partial(free_all, self._device, unused))
                    return
        free_all(self._device, unused)

    def _removed(self) -> list[StagingBuffers]:
        """With the lock held: remove the oldest idle buffers, but for those that are kept."""
        old = time.monotonic() - LINGER_SECONDS
        used = sum(since > old for _, since in self._idle)
        left = 0 if self._closed else max(KEPT_BUFFERS, used)
        count = max(0, len(self._idle) - left)
        removed = [staging for staging, _ in self._idle[:count]]
        del self._idle[:count]
        self._wide -= count
        self._changed.notify(count)
        return removed


GRAIN = 16  # addresses and lengths that the mixing kernel takes are multiples of it
SLOTS = 64  # pairs of sums
WHOLE = 1 << 40  # bytes of a launch; only the number of runs is bounded
# Chunks of a program and its warps, measured on an H200: 2.4 TB/s at 256 B, 3.0 from 1 KiB on.
TUNING = {64: (64, 2), 256: (16, 2), 1024: (4, 1), 4096: (1, 2)}

_SIGNATURE = {
    **dict.fromkeys(("address", "lengths", "words", "firsts", "out"), "*i64"),
    **dict.fromkeys(("length", "number"), "i64"),
    **dict.fromkeys(("runs", "chunks", "items", "rounds"), "i32"),
}


def takes(address: Ints, length: Ints) -> bool:
    """Whether the kernel can mix these runs."""
    bits = int(np.bitwise_or.reduce(address)) | int(np.bitwise_or.reduce(length))
    return bits % GRAIN == 0


def mix(buffers: StreamBuffers, address: Ints, length: Ints) -> Mixed:
    """`mix128` of runs that were checked. The device of the buffers is current."""
    total = Mixed()
    for part in slices(Copies(address, address, length), WHOLE):
        total = total.plus(_mix(buffers, part.src, part.length, total.words))
    return total


def _mix(buffers: StreamBuffers, address: Ints, length: Ints, number: int) -> Mixed:
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
    kernel = _function(buffers.device, chunk, search=not even)
    sizes = [len(table) for table in tables]
    used = sum(sizes)
    slot = buffers.slot(used + 2 * SLOTS)
    np.concatenate(tables, out=slot.numbers[:used])
    buffers.upload(slot.there, slot.address, 8 * used)
    places = [slot.there + 8 * sum(sizes[:i]) for i in range(len(sizes))]
    places += [slot.there] * (4 - len(places))
    out = slot.there + 8 * used
    buffers.stream.zero(out, 16 * SLOTS)
    values = [*places, out, longest, number, runs, chunks, items, runs.bit_length()]
    kernel.launch(-(-items // count), buffers.stream, values)
    buffers.stream.copy(slot.address + 8 * used, out, 16 * SLOTS)
    buffers.mark_end()
    buffers.finish()
    sums = slot.numbers[used : used + 2 * SLOTS].view(np.uint64).reshape(-1, 2)
    first, second = (int(s) for s in np.add.reduce(sums, axis=0))
    return Mixed(first, second, words)


def _function(device: Device, chunk: int, *, search: bool) -> Function:
    count, warps = TUNING[chunk]
    constants = {"SEARCH": search, "CHUNK": chunk, "COUNT": count, "SLOTS": SLOTS}
    return kernels.load(device, "mix_runs", _SIGNATURE, constants, warps)
