# SPDX-License-Identifier: Apache-2.0
"""The embedded store for a cache on a GPU: the device copies to and from the arena by itself.

    put   extents are reserved, the device writes whole objects to them and hashes them, and this
          process writes the headers and publishes the records
    get   the device reads whole objects from the arena, hashes them and puts the wanted parts in
          their places; then this process compares the hashes with the headers, and looks whether
          the records are still the same

The processor moves no byte of an object (`carriers/cuda/bus.py`). What cannot go this way goes
through buffers, as a `StagedStore` does it: objects on disk, objects that went while they were
read, objects whose length a device does not hash, and all of them where the bus fails. Damaged
objects go that way too, which finds them damaged and removes them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from kvferry.carriers.base import Memory
from kvferry.carriers.cuda.bus import Bus, BusObjects, hashes_of, takes
from kvferry.errors import KvferryError, TransferError, text_of
from kvferry.pool.embedded.arena import CHUNK_BYTES
from kvferry.pool.embedded.store import EmbeddedStore, Lent, share
from kvferry.pool.store import Bools, Ints, Outcome, Ranges, Slices, inside
from kvferry.pool.wrappers import StagedStore
from kvferry.workers import Threads

log = logging.getLogger("kvferry")
T = TypeVar("T")
# While the objects of one part cross the bus, another thread reserves and publishes others.
WRITERS = 2
PART_OBJECTS = 64


class DeviceStore(StagedStore):
    """A `Store` whose registered memory is a GPU's, over the embedded one."""

    def __init__(self, store: EmbeddedStore, memory: Memory, bus: Bus) -> None:
        super().__init__(store, memory)
        self._embedded, self._bus = store, bus
        self._writers = Threads("kvferry-put", WRITERS - 1)
        threading.Thread(target=self._warm, name="kvferry-pool-warm", daemon=True).start()
        arena = store.arena_memory
        store.before_unmapping(bus.close)
        bus.pin(arena.address, arena.bytes, store.back_memory)

    def _warm(self) -> None:
        try:
            self._bus.warm()
        except KvferryError as error:
            log.warning("the pool's first transfer will be slow: %s", error)

    def put(self, keys: Sequence[str], objects: Sequence[Ranges], deadline: float) -> list[Outcome]:
        sizes = np.array(_shared(objects, lambda length: int(length.sum())), dtype=np.int64)
        if not len(keys) or not takes(sizes, CHUNK_BYTES):
            return super().put(keys, objects, deadline)
        good = inside(self._regions, objects)
        parts = list(self._embedded.parts(sizes.tolist(), WRITERS, PART_OBJECTS))
        outcomes = [Outcome.FAILED] * len(keys)

        def put_some(some: list[int]) -> None:
            for part in [parts[i] for i in some]:
                outcomes[part] = self._put_part(
                    keys[part], objects[part], sizes[part], good[part], deadline
                )

        numbers = [list(range(i, len(parts), WRITERS)) for i in range(WRITERS)]
        share(self._writers, put_some, [some for some in numbers if some])
        return outcomes

    def _put_part(
        self,
        keys: Sequence[str],
        objects: Sequence[Ranges],
        sizes: Ints,
        good: Sequence[bool],
        deadline: float,
    ) -> list[Outcome]:
        with self._embedded.granting(keys, sizes.tolist(), good, deadline) as granted:
            which = np.fromiter(granted.wishes, dtype=np.int64)
            if len(which):
                some = [objects[i] for i in which.tolist()]
                starts = _shared(some, lambda length: np.cumsum(length) - length)
                moved = BusObjects(
                    granted.places(sizes[which]),
                    sizes[which],
                    np.array([len(ranges.length) for ranges in some], dtype=np.int64),
                    np.concatenate(starts),
                    np.concatenate([ranges.address for ranges in some]),
                    np.concatenate([ranges.length for ranges in some]),
                )
                try:
                    sums = self._bus.out(moved, CHUNK_BYTES, deadline)
                except TransferError as error:
                    log.warning("blocks could not be moved: %s", error)
                else:
                    granted.publish(sizes[which], sums)
        return granted.outcomes

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

    def close(self) -> None:
        self._writers.close()
        super().close()

    def _get_direct(self, keys: Sequence[str], wanted: Sequence[Slices], deadline: float) -> Bools:
        """Which objects are in their places."""
        done = np.zeros(len(keys), dtype=bool)
        good = np.array(inside(self._regions, wanted), dtype=bool)
        with self._embedded.lending(keys) as lent:
            which = np.flatnonzero(lent.there & good)
            which = which[_fits(wanted, lent, which)]
            if not len(which):
                return done
            some = [wanted[i] for i in which.tolist()]
            moved = BusObjects(
                lent.place[which],
                lent.length[which],
                np.array([len(w.length) for w in some], dtype=np.int64),
                np.concatenate([w.offset for w in some]),
                np.concatenate([w.address for w in some]),
                np.concatenate([w.length for w in some]),
            )
            found = self._bus.back(moved, CHUNK_BYTES, deadline)
            expected = np.concatenate([lent.sums[i] for i in which.tolist()])
            counts = hashes_of(moved.length, CHUNK_BYTES)
            right = np.logical_and.reduceat(found == expected, np.cumsum(counts) - counts)
            which = which[right & lent.still(which)]
            lent.used(which)
        done[which] = True
        return done


def _shared(objects: Sequence[Ranges], work: Callable[[Ints], T]) -> list[T]:
    """Something of each object's lengths. Most objects share one array of them."""
    known: dict[int, T] = {}
    for one in objects:
        if id(one.length) not in known:
            known[id(one.length)] = work(one.length)
    return [known[id(one.length)] for one in objects]


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
