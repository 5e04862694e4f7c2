# SPDX-License-Identifier: Apache-2.0
"""The embedded store for a cache on a GPU: the device copies to and from the arena by itself.

    put   extents are reserved, the device writes whole objects to them and hashes them, and this
          process writes the headers and publishes the records. Where a step still computes the
          bytes, the device waits for it, and all of this is queued before
    get   the device reads whole objects from the arena, hashes them and puts the wanted parts in
          their places; then this process compares the hashes with the headers, and looks whether
          the records are still the same

The processor moves no byte of an object (`carriers/cuda/bus.py`). What cannot go this way goes
through buffers, as a `StagedStore` does it: objects on disk, objects that went while they were
read, objects whose length a device does not hash, and all of them where the bus fails. Damaged
objects go that way too, which finds them damaged and removes them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence

import numpy as np

from kvferry.carriers.base import Memory
from kvferry.carriers.cuda.bus import Bus, BusObjects, Crossing, hashes_of, takes
from kvferry.errors import KvferryError, TransferError, text_of
from kvferry.pool.embedded.arena import CHUNK_BYTES
from kvferry.pool.embedded.store import EmbeddedStore, Granted, Lent
from kvferry.pool.store import (
    Bools,
    Fence,
    Ints,
    Outcome,
    Ranges,
    Slices,
    by_lengths,
    inside,
    sizes_of,
)
from kvferry.pool.wrappers import StagedStore

log = logging.getLogger("kvferry")
# While the objects of one part cross the bus, those of the next one are found or reserved. Two
# parts of a put are all blocks of a usual step (8,192 tokens in blocks of 16), and few enough
# copies for the driver to take while the step computes.
GET_OBJECTS, PUT_OBJECTS = 128, 256
PART_BYTES = 1 << 30
PART_SHARE = 8  # of the arena: two parts are in writing, and cannot make way


class DeviceStore(StagedStore):
    """A `Store` whose registered memory is a GPU's, over the embedded one."""

    def __init__(self, store: EmbeddedStore, memory: Memory, bus: Bus) -> None:
        super().__init__(store, memory)
        self._embedded, self._bus = store, bus
        threading.Thread(target=self._warm, name="kvferry-pool-warm", daemon=True).start()
        arena = store.arena_memory
        self._part_bytes = min(PART_BYTES, arena.bytes // PART_SHARE)
        store.before_unmapping(bus.close)
        bus.pin(arena.address, arena.bytes, store.back_memory)

    def _warm(self) -> None:
        try:
            self._bus.warm()
        except KvferryError as error:
            log.warning("the pool's first transfer will be slow: %s", error)

    def put(self, keys: Sequence[str], objects: Sequence[Ranges], deadline: float) -> list[Outcome]:
        return self._put_all(keys, objects, deadline, None)

    def put_after(
        self, keys: Sequence[str], objects: Sequence[Ranges], deadline: float, fence: Fence
    ) -> list[Outcome]:
        return self._put_all(keys, objects, deadline, fence)

    def _put_all(
        self,
        keys: Sequence[str],
        objects: Sequence[Ranges],
        deadline: float,
        fence: Fence | None,
    ) -> list[Outcome]:
        sizes = np.array(sizes_of(objects), dtype=np.int64)
        if not len(keys) or not takes(sizes, CHUNK_BYTES):
            return self._put_buffered(keys, objects, deadline, fence)
        good = inside(self._regions, objects)
        outcomes: list[Outcome] = []
        before: _Put | None = None
        with contextlib.ExitStack() as under_way:
            for part in self._embedded.parts(sizes.tolist(), PUT_OBJECTS, self._part_bytes):
                put = _Put(
                    self._embedded, keys[part], objects[part], sizes[part], good[part], deadline
                )
                under_way.callback(put.close)
                put.begin(self._bus, deadline, fence.event if fence is not None else 0)
                if before is not None:
                    outcomes += self._ended(before, deadline, fence)
                before = put
            if before is not None:
                outcomes += self._ended(before, deadline, fence)
        return outcomes

    def _ended(self, put: _Put, deadline: float, fence: Fence | None) -> list[Outcome]:
        """The outcomes of a part, once it is over; through buffers where the bus failed."""
        try:
            return put.end()
        except TransferError as error:
            log.warning("blocks are put through buffers: %s", text_of(error))
            return self._put_buffered(put.keys, put.objects, deadline, fence)

    def _put_buffered(
        self,
        keys: Sequence[str],
        objects: Sequence[Ranges],
        deadline: float,
        fence: Fence | None,
    ) -> list[Outcome]:
        if fence is not None:
            fence.wait()
        return super().put(keys, objects, deadline)

    def get(self, keys: Sequence[str], wanted: Sequence[Slices], deadline: float) -> list[Outcome]:
        outcomes = [Outcome.MISSING] * len(keys)
        try:
            done = self._get_direct(keys, wanted, deadline)
        except TransferError as error:
            log.warning("blocks are read through buffers: %s", text_of(error))
            done = np.zeros(len(keys), dtype=bool)
        left = np.flatnonzero(~done).tolist()
        for at in np.flatnonzero(done).tolist():
            outcomes[at] = Outcome.DONE
        if left:
            told = super().get([keys[i] for i in left], [wanted[i] for i in left], deadline)
            for at, outcome in zip(left, told, strict=True):
                outcomes[at] = outcome
        return outcomes

    def _get_direct(self, keys: Sequence[str], wanted: Sequence[Slices], deadline: float) -> Bools:
        """Which objects are in their places."""
        good = np.array(inside(self._regions, wanted), dtype=bool)
        done: list[Bools] = []
        before: _Get | None = None
        with contextlib.ExitStack() as under_way:
            for first in range(0, len(keys), GET_OBJECTS):
                part = slice(first, first + GET_OBJECTS)
                get = _Get(self._embedded, keys[part])
                under_way.callback(get.close)
                get.begin(self._bus, wanted[part], good[part], deadline)
                if before is not None:
                    done.append(before.end())
                before = get
            if before is not None:
                done.append(before.end())
        return np.concatenate(done) if done else np.zeros(0, dtype=bool)


class _Put:
    """A part of a batch: extents are reserved, objects cross the bus, records are published."""

    def __init__(
        self,
        store: EmbeddedStore,
        keys: Sequence[str],
        objects: Sequence[Ranges],
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

    def begin(self, bus: Bus, deadline: float, after: int) -> None:
        """after  the driver's event from which on the bytes are final; 0: they are"""
        if not len(self._which):
            return
        some = [self.objects[i] for i in self._which.tolist()]
        moved = BusObjects(
            self._granted.places(self._sizes),
            self._sizes,
            np.array([len(ranges.length) for ranges in some], dtype=np.int64),
            np.concatenate(by_lengths(some, lambda length: np.cumsum(length) - length)),
            np.concatenate([ranges.address for ranges in some]),
            np.concatenate([ranges.length for ranges in some]),
        )
        try:
            self._crossing = bus.out(moved, CHUNK_BYTES, deadline, after)
        except TransferError as error:
            self._error = error

    def end(self) -> list[Outcome]:
        """Wait for it, and publish what arrived. A `TransferError`: nothing of it was put."""
        try:
            if self._error is not None:
                raise self._error
            if self._crossing is not None:
                self._granted.publish(self._sizes, self._crossing.finish())
        finally:
            self.close()
        return self._granted.outcomes

    def close(self) -> None:
        """Idempotent. Nothing crosses any more when extents are given back."""
        if self._crossing is not None:
            self._crossing.close()
            self._crossing = None
        self._open.close()


class _Get:
    """A part of a batch: objects are found, cross the bus, and are compared with their headers."""

    def __init__(self, store: EmbeddedStore, keys: Sequence[str]) -> None:
        self._open = contextlib.ExitStack()
        self._lent: Lent = self._open.enter_context(store.lending(keys))
        self._which: Ints = np.zeros(0, dtype=np.int64)
        self._crossing: Crossing | None = None

    def begin(self, bus: Bus, wanted: Sequence[Slices], good: Bools, deadline: float) -> None:
        lent = self._lent
        which = np.flatnonzero(lent.there & good)
        which = which[_fits(wanted, lent, which)]
        if not len(which):
            return
        some = [wanted[i] for i in which.tolist()]
        moved = BusObjects(
            lent.place[which],
            lent.length[which],
            np.array([len(w.length) for w in some], dtype=np.int64),
            np.concatenate([w.offset for w in some]),
            np.concatenate([w.address for w in some]),
            np.concatenate([w.length for w in some]),
        )
        self._crossing, self._which = bus.back(moved, CHUNK_BYTES, deadline), which

    def end(self) -> Bools:
        """Wait for it; which objects are in their places."""
        lent, which = self._lent, self._which
        done = np.zeros(len(lent.rows), dtype=bool)
        try:
            if self._crossing is not None:
                found = self._crossing.finish()
                expected = np.concatenate([lent.sums[i] for i in which.tolist()])
                counts = hashes_of(lent.length[which], CHUNK_BYTES)
                right = np.logical_and.reduceat(found == expected, np.cumsum(counts) - counts)
                which = which[right & lent.still(which)]
                lent.used(which)
                done[which] = True
        finally:
            self.close()
        return done

    def close(self) -> None:
        """Idempotent."""
        if self._crossing is not None:
            self._crossing.close()
            self._crossing = None
        self._open.close()


def _fits(wanted: Sequence[Slices], lent: Lent, which: Ints) -> Bools:
    """Which of these want parts, all inside of their object, whose length a device hashes."""
    fits = np.zeros(len(which), dtype=bool)
    ends: dict[tuple[int, int], tuple[int, int]] = {}
    for at, i in enumerate(which.tolist()):
        need = wanted[i]
        pair = id(need.offset), id(need.length)
        if pair not in ends:
            low = int(need.offset.min(initial=0))
            ends[pair] = low, int((need.offset + need.length).max(initial=0))
        low, end = ends[pair]
        fits[at] = low >= 0 and 0 < end <= int(lent.length[i])
    if not takes(lent.length[which[fits]], CHUNK_BYTES):
        for at in np.flatnonzero(fits).tolist():
            fits[at] = takes(lent.length[which[at] : which[at] + 1], CHUNK_BYTES)
    return fits
