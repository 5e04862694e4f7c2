"""A store of host memory for a cache on a device: by way of buffers that the device reaches fast.

    put    the device gathers whole objects into a buffer; the store takes them from there
    get    the store fills a buffer with what is wanted, checked; the device scatters what is whole

Buffers are plain memory; the device crosses the bus by pinned chunks of its own. Each call has a
buffer to itself, from a few; a call that gets none by its deadline has failed, and nothing was
moved. Only what the store calls DONE is ever written to the device.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from kvferry.errors import TransferError
from kvferry.pool.store import Bools, Ints, Outcome, Ranges, Slices, Store, StoreStats
from kvferry.transport.base import MemoryRegion
from kvferry.transport.memory import Bytes, Memory
from kvferry.transport.regions import RegionTable

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
        self._closed = False

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self._registered.extend(regions)
        self._regions = RegionTable.of(self._registered)

    def put(self, keys: Sequence[str], objects: Sequence[Ranges], deadline: float) -> list[Outcome]:
        inside = self._inside(objects)
        sizes = [int(o.length.sum()) if ok else 0 for o, ok in zip(objects, inside, strict=True)]
        outcomes = [Outcome.FAILED] * len(keys)
        for part in self._parts(sizes, inside):
            total = sum(sizes[i] for i in part)
            with self._buffer(total, deadline) as buffer:
                if buffer is None:
                    break
                try:
                    self._memory.gather(
                        np.concatenate([objects[i].address for i in part]),
                        np.concatenate([objects[i].length for i in part]),
                        buffer[:total],
                    )
                except TransferError as error:
                    log.warning("blocks could not be taken from the device: %s", error)
                    continue
                one = np.array([sizes[i] for i in part], dtype=np.int64)
                begin = buffer.ctypes.data + np.cumsum(one) - one
                ranges = [Ranges(begin[k : k + 1], one[k : k + 1]) for k in range(len(part))]
                told = self._store.put([keys[i] for i in part], ranges, deadline)
            for i, outcome in zip(part, told, strict=True):
                outcomes[i] = outcome
        return outcomes

    def get(self, keys: Sequence[str], wanted: Sequence[Slices], deadline: float) -> list[Outcome]:
        inside = self._inside(wanted)
        sizes = [int(w.length.sum()) if ok else 0 for w, ok in zip(wanted, inside, strict=True)]
        outcomes = [Outcome.FAILED] * len(keys)
        for part in self._parts(sizes, inside):
            ends = np.cumsum([sizes[i] for i in part]).tolist()
            with self._buffer(ends[-1], deadline) as buffer:
                if buffer is None:
                    break
                begins = [0, *ends[:-1]]
                staged = [
                    _packed(wanted[i], buffer.ctypes.data + begin)
                    for i, begin in zip(part, begins, strict=True)
                ]
                told = self._store.get([keys[i] for i in part], staged, deadline)
                there = [outcome is Outcome.DONE for outcome in told]
                try:
                    for first, last in _runs(there):
                        some = [wanted[i] for i in part[first:last]]
                        self._memory.scatter(
                            buffer[begins[first] : ends[last - 1]],
                            np.concatenate([w.address for w in some]),
                            np.concatenate([w.length for w in some]),
                        )
                except TransferError as error:
                    log.warning("blocks could not be brought to the device: %s", error)
                    told = [o if o is not Outcome.DONE else Outcome.FAILED for o in told]
            for i, outcome in zip(part, told, strict=True):
                outcomes[i] = outcome
        return outcomes

    def _parts(self, sizes: Sequence[int], inside: Sequence[bool]) -> Iterator[list[int]]:
        """Places in a batch that fit a buffer together; one that is larger has one to itself."""
        part: list[int] = []
        total = 0
        for at, size in enumerate(sizes):
            if not inside[at]:
                log.warning("object %d of a batch is not inside the registered memory", at)
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
        if self._regions.first_outside(address, length) < 0:
            return [True] * len(parts)
        return [self._regions.first_outside(p.address, p.length) < 0 for p in parts]

    @contextlib.contextmanager
    def _buffer(self, count: int, deadline: float) -> Iterator[Bytes | None]:
        """A buffer of `count` bytes or more; None where none was free in time."""
        with self._changed:
            seconds = max(0.0, deadline - time.monotonic())
            self._changed.wait_for(lambda: self._idle or self._closed, seconds)
            free = bool(self._idle) and not self._closed
            buffer = self._idle.pop() if free else None
        if not free:
            log.warning("no staging buffer was free in time")
            yield None
            return
        try:
            if buffer is None or buffer.nbytes < count:
                buffer = None  # the shorter one goes before a longer one comes
                size = self._stage_bytes
                while size < count:
                    size *= 2
                buffer = np.empty(size, dtype=np.uint8)
                with self._changed:
                    self._store.register([MemoryRegion(buffer.ctypes.data, buffer.nbytes)])
            yield buffer
        finally:
            with self._changed:
                self._idle.append(buffer)
                self._changed.notify()

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
            self._closed = True
            self._idle.clear()
            self._changed.notify_all()
        self._store.close()
        close = getattr(self._memory, "close", None)
        if close is not None:
            close()


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
    return ((int(first), int(last)) for first, last in edges.reshape(-1, 2))
