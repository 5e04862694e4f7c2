# SPDX-License-Identifier: Apache-2.0
"""Stores over another store: `StagedStore` for a cache on a device, `CheckedStore` for checksums.

StagedStore moves a device's memory through buffers of the host:

    put    the device gathers whole objects into a buffer; the store takes them from there
    get    the store fills a buffer with the wanted parts; the device scatters those that are DONE

Each call gets a buffer of its own, out of a few. If none is free by its deadline, it fails and
moves nothing. A store must be done with a buffer when its call ends: the embedded one and
Mooncake's are. Buffers and the device's staging memory are freed after the last call that uses any.

CheckedStore adds checksums to a store that keeps none: a header precedes each object.

    magic 8 `KVFSUM01`   length 8   xxh3 8, of the bytes   xxh3 8, of these 24   zeros up to 64

A get reads the headers, then whole objects into a buffer, and moves the wanted parts of undamaged
objects to their places. Damaged objects are CORRUPT: they are not moved, and they are removed,
because no engine saves an object that exists. The key seeds both checksums, so one key's bytes
under another key are CORRUPT too. Objects with headers and objects without are never in one
namespace.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import xxhash

from kvferry.carriers.base import Bytes, Memory, MemoryRegion, RegionTable
from kvferry.carriers.host import copy_runs, joined
from kvferry.errors import StoreError, TransferError
from kvferry.pool.store import (
    Bools,
    Ints,
    Outcome,
    Slices,
    Store,
    batch_parts,
    inside,
    sizes_of,
)

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
        self._store, self._memory, self._stage_bytes = store, memory, stage_bytes
        self._regions = RegionTable.of([])
        self._changed = threading.Condition()
        self._idle: list[Bytes | None] = [None] * buffers  # None: not made yet
        self._outgrown: list[Bytes] = []  # still registered, so their memory must not be reused
        self._users = 1  # calls that have a buffer, and the store until it is closed
        self._closed = False

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self._regions = RegionTable.of([*self._regions.regions(), *regions])

    def put(self, keys: Sequence[str], objects: Sequence[Slices], deadline: float) -> list[Outcome]:
        sizes = sizes_of(objects)

        def put_some(part: list[int]) -> list[Outcome]:
            some = [objects[i] for i in part]
            return self._put_some([keys[i] for i in part], some, sizes[part], deadline)

        return self._in_parts(sizes, self._inside(objects), put_some)

    def _inside(self, parts: Sequence[Slices]) -> list[Outcome]:
        """FAILED for objects whose memory is not registered; DONE, so far, for others."""
        good = inside(self._regions, parts)
        return [Outcome.DONE if one else Outcome.FAILED for one in good]

    def _put_some(
        self, keys: Sequence[str], objects: Sequence[Slices], sizes: Ints, deadline: float
    ) -> list[Outcome]:
        total = int(sizes.sum())
        with self._buffer(total, deadline) as buffer:
            self._gather(objects, buffer[:total])
            begin = buffer.ctypes.data + np.cumsum(sizes) - sizes
            ranges = [Slices.whole(begin[k : k + 1], sizes[k : k + 1]) for k in range(len(keys))]
            return self._store.put(keys, ranges, deadline)

    def _gather(self, objects: Sequence[Slices], into: Bytes) -> None:
        self._memory.gather(
            np.concatenate([o.address for o in objects]),
            np.concatenate([o.length for o in objects]),
            into,
        )

    def get(self, keys: Sequence[str], wanted: Sequence[Slices], deadline: float) -> list[Outcome]:
        sizes = sizes_of(wanted)

        def get_some(part: list[int]) -> list[Outcome]:
            some, lengths = [wanted[i] for i in part], sizes[part]
            with self._buffer(int(lengths.sum()), deadline) as buffer:
                begins = np.cumsum(lengths) - lengths
                staged = [
                    _packed(need, buffer.ctypes.data + begin)
                    for need, begin in zip(some, begins.tolist(), strict=True)
                ]
                told = list(self._store.get([keys[i] for i in part], staged, deadline))
                return self._scatter(some, buffer, begins, lengths, told)

        return self._in_parts(sizes, self._inside(wanted), get_some)

    def _scatter(
        self,
        wanted: Sequence[Slices],
        buffer: Bytes,
        begins: Ints,
        sizes: Ints,
        outcomes: list[Outcome],
    ) -> list[Outcome]:
        """Bring DONE objects, which lie in the buffer one after another, to their places."""
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
            log.warning("blocks could not be copied to their memory: %s", error)
            return [Outcome.FAILED if o is Outcome.DONE else o for o in outcomes]
        return outcomes

    def _in_parts(
        self, sizes: Ints, outcomes: list[Outcome], work: Callable[[list[int]], list[Outcome]]
    ) -> list[Outcome]:
        """Work on those objects of a batch that are DONE so far, as many at a time as fit a buffer
        together. A larger object has a buffer to itself. A part that cannot be moved has FAILED."""
        places = [at for at, outcome in enumerate(outcomes) if outcome is Outcome.DONE]
        for which in batch_parts(sizes[places].tolist(), self._stage_bytes):
            part = places[which]
            try:
                told = work(part)
            except TransferError as error:
                log.warning("blocks could not be moved: %s", error)
                told = [Outcome.FAILED] * len(part)
            for i, outcome in zip(part, told, strict=True):
                outcomes[i] = outcome
        return outcomes

    @contextlib.contextmanager
    def _buffer(self, count: int, deadline: float) -> Iterator[Bytes]:
        """A buffer of `count` bytes or more; a `TransferError` if none was free in time."""
        with self._changed:
            seconds = max(0.0, deadline - time.monotonic())
            self._changed.wait_for(lambda: self._idle or self._closed, seconds)
            if not self._idle or self._closed:
                raise TransferError("no staging buffer was free in time")
            buffer = self._idle.pop()  # the last used one, which is long enough for most calls
            self._users += 1
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
                self._changed.notify()
            self._leave()

    def _leave(self) -> None:
        """The last user frees all memory."""
        with self._changed:
            self._users -= 1
            last = self._users == 0
        if last:
            self._idle.clear()
            self._outgrown.clear()
            self._memory.close()

    # Calls that need no buffer

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

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        try:
            self._store.close()
        finally:
            self._leave()


HEADER_BYTES = 64
# One rank's part of one block is a hundred times smaller. A reader allocates the length that a
# header names, and any writer of the store can make a valid header.
MOST_OBJECT_BYTES = 4 << 30
MEANING = ("checksums", "KVFSUM01")  # goes into the namespace of keys
_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"KVFSUM01"


class CheckedStore(StagedStore):
    """A `Store` that stores objects with checksums, over one without."""

    def _put_some(
        self, keys: Sequence[str], objects: Sequence[Slices], sizes: Ints, deadline: float
    ) -> list[Outcome]:
        heads = HEADER_BYTES * len(keys)
        with self._buffer(heads + int(sizes.sum()), deadline) as buffer:
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
                    Slices.whole(np.array(where), np.array([HEADER_BYTES, size], dtype=np.int64))
                )
            return self._store.put(keys, ranges, deadline)

    def get(self, keys: Sequence[str], wanted: Sequence[Slices], deadline: float) -> list[Outcome]:
        good = inside(self._regions, wanted)
        try:
            outcomes, lengths, sums = self._headers(keys, deadline)
        except TransferError as error:
            log.warning("blocks could not be moved: %s", error)
            return [Outcome.FAILED] * len(keys)
        for at, need in enumerate(wanted):
            if outcomes[at] is not Outcome.DONE:
                continue
            end = int((need.offset + need.length).max(initial=0))
            if not good[at] or int(need.offset.min(initial=0)) < 0 or end > lengths[at]:
                log.warning("%s has %d bytes; up to %d were asked for", keys[at], lengths[at], end)
                outcomes[at] = Outcome.FAILED

        def get_whole(part: list[int]) -> list[Outcome]:
            some, seals = [wanted[i] for i in part], [sums[i] for i in part]
            return self._get_whole([keys[i] for i in part], some, lengths[part], seals, deadline)

        outcomes = self._in_parts(lengths, outcomes, get_whole)
        corrupt = [k for k, o in zip(keys, outcomes, strict=True) if o is Outcome.CORRUPT]
        if corrupt:
            try:
                self._store.remove(corrupt, deadline)
            except StoreError as error:  # the next reader tries again
                log.warning("damaged objects stay in the store: %s", error)
        return outcomes

    def _headers(
        self, keys: Sequence[str], deadline: float
    ) -> tuple[list[Outcome], Ints, list[int]]:
        """For each object: whether its header is right, its length, its checksum."""
        count = len(keys)
        with self._buffer(HEADER_BYTES * count, deadline) as buffer:
            zero, size = np.zeros(1, dtype=np.int64), np.full(1, HEADER_BYTES, dtype=np.int64)
            places = [buffer.ctypes.data + HEADER_BYTES * at for at in range(count)]
            heads = [Slices(zero, np.array([place]), size) for place in places]
            outcomes = list(self._store.get(keys, heads, deadline))
            raw = buffer[: HEADER_BYTES * count].tobytes()
        lengths, sums = np.zeros(count, dtype=np.int64), [0] * count
        for at, key in enumerate(keys):
            if outcomes[at] is Outcome.DONE:
                read = _open(key, raw[at * HEADER_BYTES : (at + 1) * HEADER_BYTES])
                if read is None:
                    log.error("%s has a damaged header", key)
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
        """Whole objects into a buffer, checked; the wanted parts, in order, behind them."""
        sizes = sizes_of(wanted)
        total = int(lengths.sum())
        with self._buffer(total + int(sizes.sum()), deadline) as buffer:
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
                    base = buffer.ctypes.data
                    to = base + int(packed[at]) + np.cumsum(need.length) - need.length
                    copy_runs(base + begin + need.offset, to, need.length)
            return self._scatter(wanted, buffer, packed, sizes, outcomes)


def _packed(wanted: Slices, begin: int) -> Slices:
    """The same parts, one after another from `begin` on; neighbours in the object are one part."""
    offset, length = joined(wanted.offset, wanted.length)
    return Slices(offset, begin + np.cumsum(length) - length, length)


def _runs(there: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """First and last (exclusive) of each stretch of True."""
    edges = np.flatnonzero(np.diff(np.array([False, *there, False], dtype=np.int8)))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _checksum(key: str, data: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data, xxhash.xxh3_64_intdigest(key.encode()))


def _seal(key: str, length: int, checksum: int) -> bytes:
    header = _HEADER.pack(_MAGIC, length, checksum)
    header += _checksum(key, memoryview(header)).to_bytes(8, "little")
    return header + bytes(HEADER_BYTES - len(header))


def _open(key: str, header: bytes) -> tuple[int, int] | None:
    """Length and checksum of an object; None if its header is wrong."""
    _, length, checksum = _HEADER.unpack_from(header)
    right = length <= MOST_OBJECT_BYTES and header == _seal(key, length, checksum)
    return (length, checksum) if right else None
