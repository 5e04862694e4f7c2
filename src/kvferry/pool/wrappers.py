"""A store of host memory for a cache on a device: by way of buffers that the device reaches fast.

    put    the device gathers whole objects into a buffer; the store takes them from there
    get    the store fills a buffer with what is wanted, checked; the device scatters what is whole

Buffers are plain memory; the device crosses the bus by pinned chunks of its own. Each call has a
buffer to itself, from a few; a call that gets none by its deadline has failed, and nothing was
moved. Only what the store calls DONE is ever written to the device. A store must be done with a
buffer when its call ends, in whichever way: the embedded one is, Mooncake's with `hold_memory`.
Closing it closes the store first, which may give up waiting for calls; buffers and the device's
staging memory go after the last call that has any of them.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from kvferry.carriers.base import Bytes, Memory, MemoryRegion, RegionTable
from kvferry.errors import TransferError
from kvferry.pool.store import Bools, Ints, Outcome, Ranges, Slices, Store, StoreStats, move

log = logging.getLogger("kvferry")

STAGE_BYTES = 32 << 20  # long enough for the bus, and for a batch of blocks
BUFFERS = 5  # four loads and a save at a time


class StagedStore:
    """A `Store` whose registered memory is a device's, over one that moves host memory."""

    def __init__(
        self,
        store: Store,
        memory: Memory,
        *,
        stage_bytes: int = STAGE_BYTES,
        buffers: int = BUFFERS,
    ) -> None:
        self.name = store.name
        self._store, self._memory, self._stage_bytes = store, memory, stage_bytes
        self._registered: list[MemoryRegion] = []
        self._regions = RegionTable.of([])
        self._changed = threading.Condition()
        self._idle: list[Bytes | None] = [None] * buffers  # None: not made yet
        self._outgrown: list[Bytes] = []  # stores know them: their addresses must not come again
        self._in_use = 0  # buffers that calls have
        self._closed = False
        self._may_free = False  # the store is closed, too

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self._registered.extend(regions)
        self._regions = RegionTable.of(self._registered)

    def put(self, keys: Sequence[str], objects: Sequence[Ranges], deadline: float) -> list[Outcome]:
        inside = self._inside(objects)
        sizes = [int(o.length.sum()) for o in objects]
        outcomes = [Outcome.FAILED] * len(keys)
        for part in self._parts(sizes, inside):
            some = [objects[i] for i in part]
            length = np.array([sizes[i] for i in part], dtype=np.int64)
            try:
                told = self._put_some([keys[i] for i in part], some, length, deadline)
            except TransferError as error:
                log.warning("blocks could not be taken from their memory: %s", error)
                continue
            for i, outcome in zip(part, told, strict=True):
                outcomes[i] = outcome
        return outcomes

    def _put_some(
        self, keys: Sequence[str], objects: Sequence[Ranges], sizes: Ints, deadline: float
    ) -> list[Outcome]:
        total = int(sizes.sum())
        with self._buffer(total, deadline) as buffer:
            if buffer is None:
                return [Outcome.FAILED] * len(keys)
            self._gather(objects, buffer[:total])
            begin = buffer.ctypes.data + np.cumsum(sizes) - sizes
            ranges = [Ranges(begin[k : k + 1], sizes[k : k + 1]) for k in range(len(keys))]
            return self._store.put(keys, ranges, deadline)

    def _gather(self, objects: Sequence[Ranges], into: Bytes) -> None:
        self._memory.gather(
            np.concatenate([o.address for o in objects]),
            np.concatenate([o.length for o in objects]),
            into,
        )

    def get(self, keys: Sequence[str], wanted: Sequence[Slices], deadline: float) -> list[Outcome]:
        inside = self._inside(wanted)
        sizes = [int(w.length.sum()) for w in wanted]
        outcomes = [Outcome.FAILED] * len(keys)
        for part in self._parts(sizes, inside):
            some = [wanted[i] for i in part]
            length = np.array([sizes[i] for i in part], dtype=np.int64)
            told = self._get_some([keys[i] for i in part], some, length, deadline)
            for i, outcome in zip(part, told, strict=True):
                outcomes[i] = outcome
        return outcomes

    def _get_some(
        self, keys: Sequence[str], wanted: Sequence[Slices], sizes: Ints, deadline: float
    ) -> list[Outcome]:
        with self._buffer(int(sizes.sum()), deadline) as buffer:
            if buffer is None:
                return [Outcome.FAILED] * len(keys)
            begins = np.cumsum(sizes) - sizes
            staged = [
                _packed(need, buffer.ctypes.data + begin)
                for need, begin in zip(wanted, begins.tolist(), strict=True)
            ]
            outcomes = list(self._store.get(keys, staged, deadline))
            return self._scatter(wanted, buffer, begins, sizes, outcomes)

    def _scatter(
        self,
        wanted: Sequence[Slices],
        buffer: Bytes,
        begins: Ints,
        sizes: Ints,
        outcomes: list[Outcome],
    ) -> list[Outcome]:
        """What is DONE to its place; objects lie in the buffer one after another."""
        ends = begins + sizes
        try:
            for first, last in _runs([outcome is Outcome.DONE for outcome in outcomes]):
                some = wanted[first:last]
                self._memory.scatter(
                    buffer[int(begins[first]) : int(ends[last - 1])],
                    np.concatenate([w.address for w in some]),
                    np.concatenate([w.length for w in some]),
                )
        except TransferError as error:
            log.warning("blocks could not be brought to their memory: %s", error)
            return [Outcome.FAILED if o is Outcome.DONE else o for o in outcomes]
        return outcomes

    def _parts(self, sizes: Sequence[int], inside: Sequence[bool]) -> Iterator[list[int]]:
        """Places in a batch that fit a buffer together; one that is larger has one to itself."""
        part: list[int] = []
        total = 0
        for at, size in enumerate(sizes):
            if not inside[at]:
                continue
            if part and total + size > self._stage_bytes:
                yield part
                part, total = [], 0
            part.append(at)
            total += size
        if part:
            yield part

    def _inside(self, parts: Sequence[Ranges] | Sequence[Slices]) -> list[bool]:
        """Whether each object's memory is registered; looked at one by one only if one is not."""
        if not parts:
            return []
        address = np.concatenate([p.address for p in parts])
        length = np.concatenate([p.length for p in parts])
        bad = self._regions.first_outside(address, length)
        if bad < 0:
            return [True] * len(parts)
        log.warning(
            "%d bytes at %#x are not inside the registered memory", length[bad], address[bad]
        )
        return [self._regions.first_outside(p.address, p.length) < 0 for p in parts]

    @contextlib.contextmanager
    def _buffer(self, count: int, deadline: float) -> Iterator[Bytes | None]:
        """A buffer of `count` bytes or more; None where none was free in time."""
        with self._changed:
            seconds = max(0.0, deadline - time.monotonic())
            self._changed.wait_for(lambda: self._idle or self._closed, seconds)
            free = bool(self._idle) and not self._closed
            buffer = self._take(count) if free else None
            self._in_use += free
        if not free:
            log.warning("no staging buffer was free in time")
            yield None
            return
        try:
            if buffer is None or buffer.nbytes < count:
                size = self._stage_bytes
                while size < count:
                    size *= 2
                made = np.empty(size, dtype=np.uint8)
                with self._changed:
                    self._store.register([MemoryRegion(made.ctypes.data, made.nbytes)])
                    if buffer is not None:
                        self._outgrown.append(buffer)
                buffer = made
            yield buffer
        finally:
            with self._changed:
                self._idle.append(buffer)
                self._in_use -= 1
                last = self._may_free and self._in_use == 0
                self._changed.notify()
            if last:
                self._free()

    def _take(self, count: int) -> Bytes | None:
        """The last used that is long enough; else one that is not made yet, or the shortest."""
        sizes = [-1 if buffer is None else buffer.nbytes for buffer in self._idle]
        fitting = [at for at, size in enumerate(sizes) if size >= count]
        return self._idle.pop(fitting[-1] if fitting else sizes.index(min(sizes)))

    # what needs no memory of ours

    def access(self, keys: Sequence[str], deadline: float) -> None:
        self._store.access(keys, deadline)

    def exists(self, keys: Sequence[str], deadline: float) -> Bools:
        return self._store.exists(keys, deadline)

    def put_bytes(self, key: str, value: bytes, deadline: float) -> Outcome:
        return self._store.put_bytes(key, value, deadline)

    def get_bytes(self, key: str, deadline: float) -> bytes | None:
        return self._store.get_bytes(key, deadline)

    def remove(self, keys: Sequence[str], deadline: float) -> int:
        return self._store.remove(keys, deadline)

    def stats(self) -> StoreStats:
        return self._store.stats()

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        try:
            self._store.close()
        finally:
            with self._changed:
                self._may_free = True
                unused = self._in_use == 0
            if unused:
                self._free()

    def _free(self) -> None:
        """Once: by `close`, or by the last call that it has left."""
        self._idle.clear()
        self._outgrown.clear()
        self._memory.close()


def _packed(wanted: Slices, begin: int) -> Slices:
    """The same parts, one after another from `begin` on; neighbours in the object are one part."""
    offset, length = wanted.offset, wanted.length
    if len(offset) == 0:
        return wanted
    heads = np.concatenate(([0], np.flatnonzero(offset[1:] != offset[:-1] + length[:-1]) + 1))
    merged: Ints = np.add.reduceat(length, heads)
    return Slices(offset[heads], begin + np.cumsum(merged) - merged, merged)


def _runs(there: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """First and last (exclusive) of each stretch that is there."""
    edges = np.flatnonzero(np.diff(np.array([False, *there, False], dtype=np.int8)))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


# --------------------------------------------------------------------------------------------------
# Checksums over a store that keeps none: each object behind a header that proves it.
#
#     magic 8 `KVFSUM01`   length 8   xxh3 8, of the bytes   xxh3 8, of these 24   zeros up to 64
#
# A put gathers whole objects into a buffer, and stores them with their headers. A get reads the
# headers, then whole objects into a buffer, and brings what was wanted of the right ones to its
# place; of the others nothing, and they are CORRUPT. The key seeds both checksums, so one key's
# bytes under another's are wrong, too.
#
# This is paid for: ranges cannot be proven alone, so whole objects are read where a reader of
# another shape wants a part; and what a store moves without a copy (Mooncake) is copied and hashed
# by the host. Objects with headers are not those without: the two are never in one namespace.
# --------------------------------------------------------------------------------------------------

HEADER_BYTES = 64
# One rank's part of one block is a hundred times smaller. A reader takes memory for what a header
# says, and any writer of the store can seal one.
MOST_OBJECT_BYTES = 4 << 30
MEANING = ("checksums", "KVFSUM01")  # of keys, beside what else bytes mean
_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"KVFSUM01"


def _checksum(key: str, data: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data, xxhash.xxh3_64_intdigest(key.encode()))


def _seal(key: str, length: int, checksum: int) -> bytes:
    header = _HEADER.pack(_MAGIC, length, checksum)
    header += _checksum(key, memoryview(header)).to_bytes(8, "little")
    return header + bytes(HEADER_BYTES - len(header))


def _open(key: str, header: bytes) -> tuple[int, int] | None:
    """Length and checksum of an object; None where its header is not right."""
    _, length, checksum = _HEADER.unpack_from(header)
    right = length <= MOST_OBJECT_BYTES and header == _seal(key, length, checksum)
    return (length, checksum) if right else None


class CheckedStore(StagedStore):
    """A `Store` that stores objects with checksums, over one without."""

    def _put_some(
        self, keys: Sequence[str], objects: Sequence[Ranges], sizes: Ints, deadline: float
    ) -> list[Outcome]:
        heads = HEADER_BYTES * len(keys)
        with self._buffer(heads + int(sizes.sum()), deadline) as buffer:
            if buffer is None:
                return [Outcome.FAILED] * len(keys)
            bodies = buffer[heads : heads + int(sizes.sum())]
            self._gather(objects, bodies)
            ends = np.cumsum(sizes)
            ranges = []
            for at, (key, size, end) in enumerate(
                zip(keys, sizes.tolist(), ends.tolist(), strict=True)
            ):
                data = bodies[end - size : end]
                header = _seal(key, size, _checksum(key, data.data))
                place = buffer[at * HEADER_BYTES : (at + 1) * HEADER_BYTES]
                place[:] = np.frombuffer(header, dtype=np.uint8)
                where = [place.ctypes.data, bodies.ctypes.data + end - size]
                ranges.append(
                    Ranges(np.array(where), np.array([HEADER_BYTES, size], dtype=np.int64))
                )
            return self._store.put(keys, ranges, deadline)

    def get(self, keys: Sequence[str], wanted: Sequence[Slices], deadline: float) -> list[Outcome]:
        inside = self._inside(wanted)
        outcomes, lengths, sums = self._headers(keys, deadline)
        for at, need in enumerate(wanted):
            if outcomes[at] is not Outcome.DONE:
                continue
            end = int((need.offset + need.length).max(initial=0))
            if not inside[at] or int(need.offset.min(initial=0)) < 0 or end > lengths[at]:
                log.warning("%s has %d bytes; up to %d were asked for", keys[at], lengths[at], end)
                outcomes[at] = Outcome.FAILED
        there = [outcome is Outcome.DONE for outcome in outcomes]
        for part in self._parts(lengths, there):
            told = self._get_whole(
                [keys[i] for i in part],
                [wanted[i] for i in part],
                np.array([lengths[i] for i in part], dtype=np.int64),
                [sums[i] for i in part],
                deadline,
            )
            for i, outcome in zip(part, told, strict=True):
                outcomes[i] = outcome
        return outcomes

    def _headers(
        self, keys: Sequence[str], deadline: float
    ) -> tuple[list[Outcome], list[int], list[int]]:
        """Of each object whether its header is right, its length, its checksum."""
        count = len(keys)
        with self._buffer(HEADER_BYTES * count, deadline) as buffer:
            if buffer is None:
                return [Outcome.FAILED] * count, [0] * count, [0] * count
            zero, size = np.zeros(1, dtype=np.int64), np.full(1, HEADER_BYTES, dtype=np.int64)
            places = [buffer.ctypes.data + HEADER_BYTES * at for at in range(count)]
            heads = [Slices(zero, np.array([place]), size) for place in places]
            outcomes = list(self._store.get(keys, heads, deadline))
            raw = buffer[: HEADER_BYTES * count].tobytes()
        lengths, sums = [0] * count, [0] * count
        for at, key in enumerate(keys):
            if outcomes[at] is Outcome.DONE:
                read = _open(key, raw[at * HEADER_BYTES : (at + 1) * HEADER_BYTES])
                if read is None:
                    log.error("%s has no header that is right", key)
                    outcomes[at] = Outcome.CORRUPT
                else:
                    lengths[at], sums[at] = read
        return outcomes, lengths, sums

    def _get_whole(
        self,
        keys: Sequence[str],
        wanted: Sequence[Slices],
        lengths: Ints,
        sums: Sequence[int],
        deadline: float,
    ) -> list[Outcome]:
        """Whole objects into a buffer, checked; what is wanted of them, in order, behind them."""
        sizes = np.array([int(w.length.sum()) for w in wanted], dtype=np.int64)
        total = int(lengths.sum())
        with self._buffer(total + int(sizes.sum()), deadline) as buffer:
            if buffer is None:
                return [Outcome.FAILED] * len(keys)
            begins = np.cumsum(lengths) - lengths
            bodies = [
                Slices(
                    np.full(1, HEADER_BYTES, dtype=np.int64),
                    buffer.ctypes.data + begins[at : at + 1],
                    lengths[at : at + 1],
                )
                for at in range(len(keys))
            ]
            outcomes = list(self._store.get(keys, bodies, deadline))
            packed = total + np.cumsum(sizes) - sizes
            for at, key in enumerate(keys):
                if outcomes[at] is not Outcome.DONE:
                    continue
                begin = int(begins[at])
                if _checksum(key, buffer[begin : begin + int(lengths[at])].data) != sums[at]:
                    log.error("%s is not what was written", key)
                    outcomes[at] = Outcome.CORRUPT
                    continue
                need = wanted[at]
                if len(need.length):
                    ends = np.cumsum(need.length)
                    base = buffer.ctypes.data
                    to = base + int(packed[at]) + ends - need.length
                    move(base + begin + need.offset, to, need.length)
            return self._scatter(wanted, buffer, packed, sizes, outcomes)
