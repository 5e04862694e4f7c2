# SPDX-License-Identifier: Apache-2.0
"""The embedded store for a cache on a GPU: the device copies to and from the arena by itself.

    put   extents are reserved, the device writes whole objects to them and hashes them, and this
          process writes the headers and publishes the records. If a step still computes the
          bytes, the copies are queued beforehand, and the device waits for the step
    get   the device reads whole objects from the arena, hashes them and puts the wanted parts in
          their places; then this process compares the hashes with the headers, and checks that
          the records are still the same

Some objects go through buffers instead, as in a `StagedStore`: objects on disk, objects that are
damaged or were evicted while they were read, objects whose length the device does not hash
(`carriers/cuda/bus.py`), and all objects if the bus fails. Several threads read large batches of
these, because the processor copies and hashes every byte.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from kvferry.carriers.base import Memory, Ready
from kvferry.carriers.cuda.bus import (
    MOST_HASHES,
    MOST_RUNS,
    Bus,
    BusObjects,
    Crossing,
    cuts_of,
    hashes_of,
    takes,
)
from kvferry.errors import KvferryError, TransferError, text_of
from kvferry.pool.embedded.arena import CHUNK_BYTES
from kvferry.pool.embedded.store import EmbeddedStore, Granted, Lent
from kvferry.pool.store import (
    AlikeSlices,
    Bools,
    Fence,
    Ints,
    Outcome,
    Slices,
    inside,
    sizes_of,
)
from kvferry.pool.wrappers import StagedStore
from kvferry.workers import Call, Threads, start_compiler

log = logging.getLogger("kvferry")
# While the objects of one part cross the bus, those of the next one are found or reserved. Two
# parts of a put are all blocks of a large step (16,384 tokens in blocks of 16), and are queued
# while the step computes. The first part of a get is small, because the bus waits for it.
PUT_OBJECTS = 512
FIRST_OBJECTS, GET_OBJECTS = 64, 256
PIN_AFTER_SECONDS = 10.0  # after the start: vLLM captures its graphs meanwhile
PART_BYTES = 1 << 30
READERS = min(4, max(1, (os.cpu_count() or 1) // 4))  # the engine needs the other cores
PARALLEL_BYTES = 8 << 20  # threads share a larger read through buffers
PART_SHARE = 8  # of the arena: two parts are being written, and cannot be evicted


class DeviceStore(StagedStore):
    """A `Store` whose registered memory is a GPU's, over the embedded one."""

    def __init__(self, store: EmbeddedStore, memory: Memory, bus: Bus) -> None:
        super().__init__(store, memory)
        self._embedded, self._bus = store, bus
        self._readers = Threads("kvferry-pool-read", max(1, READERS - 1))  # besides the caller's
        start_compiler(self._warm, "kvferry-pool-warm")
        arena = store.arena_memory
        self._part_bytes = min(PART_BYTES, arena.bytes // PART_SHARE)
        store.before_unmapping(bus.close)
        bus.pin(arena.address, arena.bytes, store.back_memory, PIN_AFTER_SECONDS)

    def _warm(self) -> None:
        try:
            self._bus.warm()
        except KvferryError as error:
            log.warning("the pool's first transfer will be slow: %s", error)

    def put(self, keys: Sequence[str], objects: Sequence[Slices], deadline: float) -> list[Outcome]:
        return self.put_after(keys, objects, deadline, None)

    def put_after(
        self,
        keys: Sequence[str],
        objects: Sequence[Slices],
        deadline: float,
        fence: Fence | None,
    ) -> list[Outcome]:
        sizes = sizes_of(objects)
        if not len(keys) or not takes(sizes, CHUNK_BYTES).all():
            return self._put_buffered(keys, objects, deadline, fence)
        outcomes: list[Outcome] = []
        before: _Put | None = None
        with contextlib.ExitStack() as under_way:
            for part in self._embedded.parts(sizes.tolist(), PUT_OBJECTS, self._part_bytes):
                some = objects[part]
                good = inside(self._regions, some)
                put = _Put(self._embedded, keys[part], some, sizes[part], good, deadline)
                under_way.callback(put.close)
                put.begin(self._bus, deadline, fence.ready if fence is not None else None)
                if before is not None:
                    outcomes += self._ended(before, deadline, fence)
                before = put
            if before is not None:
                outcomes += self._ended(before, deadline, fence, last=True)
        return outcomes

    def _ended(
        self, put: _Put, deadline: float, fence: Fence | None, *, last: bool = False
    ) -> list[Outcome]:
        """The outcomes of a part, once it is over. If the bus failed, it goes through buffers."""
        if fence is not None:
            fence.wait()
        try:
            return put.end(fence.quiet if fence is not None and last else None)
        except TransferError as error:
            log.warning("blocks are put through buffers: %s", text_of(error))
            return self._put_buffered(put.keys, put.objects, deadline, fence)

    def _put_buffered(
        self,
        keys: Sequence[str],
        objects: Sequence[Slices],
        deadline: float,
        fence: Fence | None,
    ) -> list[Outcome]:
        if fence is not None:
            fence.wait()
        return super().put(keys, objects, deadline)

    def get(self, keys: Sequence[str], wanted: Sequence[Slices], deadline: float) -> list[Outcome]:
        outcomes = [Outcome.DONE] * len(keys)
        done = np.zeros(len(keys), dtype=bool)
        try:
            self._get_direct(keys, wanted, deadline, done)
        except TransferError as error:
            log.warning("blocks are read through buffers: %s", text_of(error))
        left = np.flatnonzero(~done).tolist()
        if left:
            some = [wanted[i] for i in left]
            told = self._get_buffered([keys[i] for i in left], some, deadline)
            for at, outcome in zip(left, told, strict=True):
                outcomes[at] = outcome
        return outcomes

    def _get_buffered(
        self, keys: Sequence[str], wanted: Sequence[Slices], deadline: float
    ) -> list[Outcome]:
        """When this ends, no thread works on any part: the caller takes the memory back."""
        shared = int(sizes_of(wanted).sum()) > PARALLEL_BYTES
        count = min(READERS, len(keys)) if shared else 1
        outcomes = [Outcome.FAILED] * len(keys)
        read = super().get

        def read_part(first: int) -> None:
            outcomes[first::count] = read(keys[first::count], wanted[first::count], deadline)

        calls = [Call(partial(read_part, first)) for first in range(count)]
        for call in calls[1:]:
            try:
                self._readers.submit(call)
            except KvferryError as error:
                log.warning("blocks are read by fewer threads: %s", text_of(error))
                call()
        calls[0]()
        failed = [raised for call in calls if (raised := call.exception()) is not None]
        if failed:
            raise failed[0]
        return outcomes

    def close(self) -> None:
        super().close()
        self._readers.close()

    def _get_direct(
        self, keys: Sequence[str], wanted: Sequence[Slices], deadline: float, done: Bools
    ) -> None:
        """Notes in `done` which objects are in their places. One thread keeps the bus busy: several
        would take the interpreter's lock from each other."""
        bounds = [0, *range(FIRST_OBJECTS, len(keys), GET_OBJECTS), len(keys)]
        before: tuple[int, Lent, Ints, Crossing] | None = None
        with contextlib.ExitStack() as under_way:
            for first, last in pairwise(bounds):
                lent = under_way.enter_context(self._embedded.lending(keys[first:last]))
                some = wanted[first:last]
                good = np.array(inside(self._regions, some), dtype=bool)
                if not (lent.there & good).any():
                    continue
                objects = _objects(lent.place, lent.length, some)
                which = np.flatnonzero(lent.there & good & _fits(objects))
                for few in _together(objects, which):
                    crossing = self._bus.back(objects.some(few), CHUNK_BYTES, deadline)
                    under_way.callback(crossing.close)
                    if before is not None:
                        done[before[0] + _arrived(*before[1:])] = True
                    before = first, lent, few, crossing
            if before is not None:
                done[before[0] + _arrived(*before[1:])] = True


class _Put:
    """A part of a batch: extents are reserved, objects cross the bus, records are published."""

    def __init__(
        self,
        store: EmbeddedStore,
        keys: Sequence[str],
        objects: Sequence[Slices],
        sizes: Ints,
        good: Sequence[bool],
        deadline: float,
    ) -> None:
        self.keys, self.objects = keys, objects
        self._open = contextlib.ExitStack()
        self._granted: Granted = self._open.enter_context(
            store.granting(keys, sizes.tolist(), good, deadline)
        )
        self._which = np.fromiter(self._granted.wishes, dtype=np.int64)
        self._sizes = sizes[self._which]
        self._crossing: Crossing | None = None
        self._error: TransferError | None = None

    def begin(self, bus: Bus, deadline: float, after: Ready | None) -> None:
        """after  when the bytes are final; None: they are final now"""
        if not len(self._which):
            return
        place, length = np.zeros((2, len(self.objects)), dtype=np.int64)
        place[self._which] = self._granted.places(self._sizes)
        length[self._which] = self._sizes
        moved = _objects(place, length, self.objects).some(self._which)
        try:
            self._crossing = bus.out(moved, CHUNK_BYTES, deadline, after)
        except TransferError as error:
            self._error = error

    def end(self, quiet: Callable[[], None] | None = None) -> list[Outcome]:
        """Wait for it, and publish what arrived. A `TransferError`: nothing of it was put.

        quiet  waits for a moment in which the engine does not mind the work
        """
        try:
            if self._error is not None:
                raise self._error
            if self._crossing is not None:
                hashes = self._crossing.finish()
                if quiet is not None:
                    quiet()
                self._granted.publish(self._sizes, hashes)
        finally:
            self.close()
        return self._granted.outcomes

    def close(self) -> None:
        """Idempotent. Nothing crosses any more when extents are given back."""
        if self._crossing is not None:
            self._crossing.close()
            self._crossing = None
        self._open.close()


def _objects(place: Ints, length: Ints, parts: Sequence[Slices]) -> BusObjects:
    """All of a batch."""
    if isinstance(parts, AlikeSlices):
        count = len(parts)
        runs = np.full(count, len(parts.length))
        offset, size = np.tile(parts.offset, count), np.tile(parts.length, count)
        return BusObjects(place, length, runs, offset, parts.address.reshape(-1), size)
    return BusObjects(
        place,
        length,
        np.array([len(one.length) for one in parts], dtype=np.int64),
        np.concatenate([one.offset for one in parts]),
        np.concatenate([one.address for one in parts]),
        np.concatenate([one.length for one in parts]),
    )


def _arrived(lent: Lent, which: Ints, crossing: Crossing) -> Ints:
    """Wait for these objects. Returns those that are in their places."""
    found = crossing.finish()
    expected = np.concatenate([lent.sums[i] for i in which.tolist()])
    counts = hashes_of(lent.length[which], CHUNK_BYTES)
    right = np.logical_and.reduceat(found == expected, np.cumsum(counts) - counts)
    there = which[right & lent.still(which)]
    lent.used(there)
    return there


def _fits(objects: BusObjects) -> Bools:
    """Which of these have parts, all inside an object of a length that a device hashes."""
    low, high = np.full((2, len(objects)), -1)
    some = objects.runs > 0
    begins = (np.cumsum(objects.runs) - objects.runs)[some]
    low[some] = np.minimum.reduceat(objects.offset, begins)
    high[some] = np.maximum.reduceat(objects.offset + objects.size, begins)
    fits = (low >= 0) & (high > 0) & (high <= objects.length)
    return np.asarray(fits & takes(objects.length, CHUNK_BYTES))


def _together(objects: BusObjects, which: Ints) -> Iterator[Ints]:
    """Cut these into batches, each of which one crossing takes."""
    hashes = hashes_of(objects.length[which], CHUNK_BYTES)
    share = np.maximum(hashes * (MOST_RUNS // MOST_HASHES), objects.runs[which])
    for first, last in pairwise(cuts_of(share, MOST_RUNS)):
        yield which[first:last]
