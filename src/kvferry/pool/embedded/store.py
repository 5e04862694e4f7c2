# SPDX-License-Identifier: Apache-2.0
"""The embedded store: objects shared by all processes of one host through a directory.

There is no server. Every process maps the same two files, an index and an arena, and takes part:

    put     claim a record and an extent (with the lock), gather the bytes into the extent, checksum
            them, and set the record's state to MEMORY
    get     find the record, copy the wanted parts to their places and check them, and check that
            the extent was not given up meanwhile; if it was, try again, also in the other tier
    access  tell the eviction policy about a request (with the lock)

A get needs no lock. If the lock is free, it also brings an object on disk to memory. So a stopped
process that holds the lock costs readers only that. A damaged object is CORRUPT for its reader,
removed, and counted. An object that another process is writing EXISTS for a second writer. A
process may die at any point: its half-written objects were never readable, its half-evicted objects
are whole in one tier, and the kernel drops its locks.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvferry.carriers.base import MemoryRegion, RegionTable
from kvferry.carriers.host import copy_runs, spread
from kvferry.errors import NotPrivate, StoreError, text_of
from kvferry.pool.embedded import index as ix
from kvferry.pool.embedded.arena import (
    ALIGN,
    CHUNK_BYTES,
    Image,
    Sums,
    WantedObject,
    aligned,
    analyse,
    checksums,
    header_bytes,
    image_bytes,
    open_alike,
    open_image,
    seal_alike,
    serve,
)
from kvferry.pool.embedded.eviction import OPEN_SECONDS, SHORT_WAIT_S, Tiers, Wish
from kvferry.pool.embedded.index import Calls, Geometry, hash_keys, words_of
from kvferry.pool.store import (
    MOST_RECORD_BYTES,
    Bools,
    Ints,
    Outcome,
    Slices,
    batch_parts,
    inside,
    sizes_of,
)

_log = logging.getLogger(__name__)

DEFAULT_MEMORY_BYTES = 4 << 30
OBJECT_BYTES_GUESS = 256 << 10  # for the number of records: four for each object of this size
MIN_SLOTS, MAX_SLOTS = 1 << 18, 1 << 26
# A process publishes a record without a lock, by plain stores: its fields first, then its state.
# Other processors see stores of these machines in that order. ARM does not promise it without a
# barrier, and Python has none.
ORDERED_MACHINES = ("x86_64", "AMD64")
CLOSE_SECONDS = 5.0  # for calls under way to end; then the last of them closes the store
PART_SHARE = 4  # of the memory is written at a time: objects being written cannot be evicted
ATTEMPTS = 5
FEW_KEYS = 16  # are looked up one by one, which is quicker
LEAVE_DISK_S = 0.25  # after memory had no room, objects are not promoted for this long
COUNTED = {"puts": Outcome.DONE, "full": Outcome.FULL, "declined": Outcome.DECLINED}
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Listed:
    """One object, as `kvferry pool` shows it."""

    key: str
    bytes: int
    tier: str
    turns: int
    depth: int
    idle_seconds: float
    score: float


class Verified(NamedTuple):
    """Counts of all objects, after each was read whole."""

    good: int
    corrupt: int  # removed
    unread: int = 0
    why: str = ""  # the first of these was not read


def default_directory() -> Path:
    """In shared memory, one per user."""
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's number that no passwd file knows
        user = str(os.getuid())
    return base / f"kvferry-{user}"


def _call(
    method: Callable[Concatenate[EmbeddedStore, P], T],
) -> Callable[Concatenate[EmbeddedStore, P], T]:
    """A method that works on mapped memory: `close` waits for it, and it is refused afterwards."""

    @functools.wraps(method)
    def counted(self: EmbeddedStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._calls:
            self._tiers.settle()
            return method(self, *args, **kwargs)

    return counted


class EmbeddedStore:
    """A `Store` in a directory; see the module."""

    def __init__(
        self,
        directory: Path | None = None,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        disk_directory: Path | None = None,
        disk_bytes: int = 0,
        *,
        slots: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open or create. The process that creates a store decides its sizes and the place of its
        disk tier; others take them as they are."""
        if platform.machine() not in ORDERED_MACHINES:
            raise StoreError(
                "the embedded store needs a processor that keeps the order of stores; expected "
                f'x86_64 or AMD64, found {platform.machine()}; configure "store": "mooncake"'
            )
        if (disk_directory is None) != (disk_bytes == 0):
            raise StoreError("a disk tier needs both a directory and a capacity in bytes")
        if memory_bytes < 1 << 16:
            raise StoreError(f"a memory tier of {memory_bytes} bytes is too small; give more")
        if slots is None:
            objects = (memory_bytes + disk_bytes) // OBJECT_BYTES_GUESS
            slots = min(max(MIN_SLOTS, 1 << (4 * objects).bit_length()), MAX_SLOTS)
        elif slots < 2 * ix.WAYS or slots & (slots - 1):
            raise StoreError(f"{slots} records: expected a power of two, 16 or more")
        self.directory = directory or default_directory()
        self._calls = Calls()
        wanted = Geometry(slots, memory_bytes, disk_bytes)
        try:
            self._tiers = Tiers(self.directory, wanted, disk_directory, clock, self._calls)
        except (OSError, NotPrivate) as error:
            raise StoreError(f"cannot open the store at {self.directory}: {error}") from error
        self._index = self._tiers.index
        if self._index.geometry != wanted:
            _log.warning(
                "the store at %s keeps the sizes with which it was created: %s",
                self.directory,
                self._index.geometry,
            )
        self._clock = clock
        self._regions = RegionTable.of([])
        self._promote_after = 0.0
        self._unpin: Callable[[], None] | None = None

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self._regions = RegionTable.of([*self._regions.regions(), *regions])

    def access(self, keys: Sequence[str], deadline: float) -> None:
        if not keys:
            return
        index, (low, high) = self._index, hash_keys(keys)
        try:
            with self._calls, self._tiers.locked(deadline):
                rows = index.find(low, high)
                known = rows >= 0
                now = self._clock()
                if not known.all():
                    rows[~known] = index.claim(low[~known], high[~known], now, rows[known])
                # Objects that were put before this call count as new, like the others.
                known[known] = index.history.chain[rows[known]] > 0
                whole = len(rows) if bool((rows >= 0).all()) else int(np.argmin(rows >= 0))
                self._tiers.policy.observe(rows[:whole], known[:whole], now)
        except StoreError as error:
            _log.warning("a request was not told to the eviction policy: %s", error)

    @_call
    def exists(self, keys: Sequence[str], deadline: float) -> Bools:
        if len(keys) <= FEW_KEYS:
            return np.array([self._index.has(key) for key in keys], dtype=bool)
        return self._index.readable(self._index.find(*hash_keys(keys)))

    def put(self, keys: Sequence[str], objects: Sequence[Slices], deadline: float) -> list[Outcome]:
        good = inside(self._regions, objects)
        outcomes: list[Outcome] = []
        for part in self.parts(sizes_of(objects).tolist()):
            outcomes += self._put(keys[part], objects[part], good[part], deadline)
        return outcomes

    def parts(
        self, sizes: Sequence[int], most_objects: int = 1 << 30, most_bytes: int = 1 << 60
    ) -> Iterator[slice]:
        """Cut a batch into parts to write at a time: objects being written cannot be evicted."""
        most = min(most_bytes, self._tiers.arena.capacity // PART_SHARE)
        return batch_parts([size + ALIGN for size in sizes], most, most_objects)

    @_call
    def get(self, keys: Sequence[str], wanted: Sequence[Slices], deadline: float) -> list[Outcome]:
        index, needs, good = self._index, analyse(wanted), inside(self._regions, wanted)
        rows = index.find(*hash_keys(keys))
        there = index.readable(rows)
        outcomes = [Outcome.MISSING] * len(keys)
        for at in np.flatnonzero(there).tolist():
            outcomes[at] = Outcome.FAILED
            if not good[at] or self._calls.closing.is_set() or time.monotonic() > deadline:
                continue
            try:
                outcomes[at] = self._read(keys[at], int(rows[at]), needs[at], deadline)
            except Exception as error:  # the rest of the batch goes on
                _log.warning("%s could not be read: %s", keys[at], text_of(error))
        self._tiers.policy.touch(rows[there], self._clock())
        hits = outcomes.count(Outcome.DONE)
        index.count("hits", hits)  # without the lock, so a few counts may be lost
        index.count("misses", len(keys) - hits)
        return outcomes

    def put_bytes(self, key: str, value: bytes, deadline: float) -> Outcome:
        if len(value) > MOST_RECORD_BYTES:
            _log.warning(
                "%s has %d bytes; a record has up to %d", key, len(value), MOST_RECORD_BYTES
            )
            return Outcome.FAILED
        source = np.frombuffer(value or b"\0", dtype=np.uint8)
        one = np.array([len(value)], dtype=np.int64)
        ranges = Slices.whole(np.array([source.ctypes.data], dtype=np.int64), one)
        return self._put([key], [ranges], [True], deadline, goes_last=True)[0]

    @_call
    def get_bytes(self, key: str, deadline: float) -> bytes | None:
        index = self._index
        row = int(index.find(*hash_keys([key]))[0])
        if row < 0 or int(index.state[row]) not in ix.READABLE:
            return None
        length = int(index.length[row])
        if not 0 <= length <= MOST_RECORD_BYTES:
            self._read(key, row, None, deadline)  # a damaged record is removed
            return None
        into = np.zeros(max(1, length), dtype=np.uint8)
        zero = np.zeros(1, dtype=np.int64)
        parts = Slices(zero, zero + into.ctypes.data, zero + length)
        outcome = self._read(key, row, WantedObject(parts, 0, length, length), deadline)
        if outcome is not Outcome.DONE or int(index.length[row]) != length:  # replaced meanwhile
            return None
        self._tiers.policy.touch(np.array([row]), self._clock())
        return into[:length].tobytes()

    @_call
    def remove(self, keys: Sequence[str], deadline: float) -> int:
        rows = np.unique(self._index.find(*hash_keys(keys)))
        return self._tiers.give_up(rows[rows >= 0], deadline)

    def close(self) -> None:
        if left := self._calls.close(CLOSE_SECONDS, self._end):
            _log.warning("%s is closed while %d calls are under way", self.directory, left)

    def _end(self) -> None:
        if self._unpin is not None:
            self._unpin()
        self._tiers.close()

    # For `kvferry pool`

    @_call
    def counters(self) -> dict[str, int]:
        """The objects now, and the counts of all processes since the store was created."""
        index = self._index
        rows = index.in_state(*ix.READABLE)
        return {
            "objects": len(rows),
            "bytes": int(index.length[rows].sum()),
            "capacity_bytes": index.geometry.memory_bytes + index.geometry.disk_bytes,
            **index.counters(),
            "memory_bytes": int(index.extent[index.in_state(*ix.WITH_EXTENT)].sum()),
            "disk_bytes": int(index.image_bytes[index.in_state(*ix.WITH_FILE)].sum()),
            "ghosts": len(index.in_state(ix.GHOST)),
        }

    @_call
    def learned(self) -> dict[str, float]:
        return self._tiers.policy.learned()

    def listed(self) -> Iterator[Listed]:
        """All objects, the next victim first."""
        with self._calls:
            rows = self._index.in_state(*ix.READABLE)
            scores = self._tiers.policy.scores(rows, self._clock())
        for at in np.argsort(scores, kind="stable").tolist():
            with self._calls:  # not held while the caller uses the object
                one = self._list_one(int(rows[at]), float(scores[at]))
            yield one

    def _list_one(self, row: int, score: float) -> Listed:
        index, disk = self._index, self._tiers.disk
        name = index.names(np.array([row]))[0]
        image: Image | None = None
        if int(index.state[row]) in ix.IN_MEMORY:
            offset, size = int(index.offset[row]), int(index.image_bytes[row])
            image = open_image(self._tiers.arena.view(offset, size))
        elif disk is not None:
            with contextlib.suppress(OSError):  # then its name stands for its key
                image = disk.header(name)
        tiers = {ix.MEMORY: "memory", ix.DISK: "disk", ix.BOTH: "both"}
        return Listed(
            key=image.key if image else name,
            bytes=int(index.length[row]),
            tier=tiers.get(int(index.state[row]), "moving"),
            turns=int(index.history.turns[row]),
            depth=int(index.history.depth[row]),
            idle_seconds=max(0.0, self._clock() - float(index.history.last[row])),
            score=score,
        )

    @_call
    def verify(self, deadline: float) -> Verified:
        """Read every object whole. Objects that cannot be read in time, or at all, stay."""
        good = corrupt = unread = 0
        why = ""
        for row in self._index.in_state(*ix.READABLE).tolist():
            try:
                if time.monotonic() > deadline:
                    raise StoreError("the time for it is over")
                outcome = self._read(None, row, None, deadline)
            except (StoreError, OSError) as error:  # no reason to leave the others unread
                unread += 1
                why = why or str(error)
                continue
            good += outcome is Outcome.DONE
            corrupt += outcome is Outcome.CORRUPT
        if corrupt:
            try:
                with self._tiers.locked(deadline):  # which removes the damaged ones first
                    pass
            except StoreError as error:  # they are still there
                corrupt, unread, why = 0, unread + corrupt, why or str(error)
        return Verified(good, corrupt, unread, why)

    @_call
    def evict(self, size: int, deadline: float) -> int:
        return self._tiers.evict(size, deadline)

    @_call
    def clear(self, deadline: float) -> int:
        return self._tiers.clear(deadline)

    # Direct access to the arena, for a device that copies by itself

    @property
    def arena_memory(self) -> MemoryRegion:
        return MemoryRegion(self._tiers.arena.address, self._tiers.arena.capacity)

    def before_unmapping(self, unpin: Callable[[], None]) -> None:
        """`unpin` runs when the store is closed and its last call has ended."""
        self._unpin = unpin

    @_call
    def back_memory(self, first: int, size: int) -> int:
        """Back the first `size` bytes of the arena with memory, and map those from `first` on.
        Returns how many bytes are backed now."""
        arena = self._tiers.arena
        size = min(size, arena.capacity)
        if arena.back(first, size):
            with self._tiers.locked(time.monotonic() + OPEN_SECONDS):
                arena.take_backed(size)
        return arena.backed()

    @contextlib.contextmanager
    def lending(self, keys: Sequence[str]) -> Iterator[Lent]:
        """Objects that are in memory now. They may be evicted at any time: `Lent.still` says
        afterwards which stayed."""
        with self._calls:
            yield self._lend(keys)

    def _lend(self, keys: Sequence[str]) -> Lent:
        index, arena = self._index, self._tiers.arena
        rows = index.find(*hash_keys(keys))
        generation, offset = index.generation[rows].copy(), index.offset[rows].copy()
        length, image = index.length[rows].copy(), index.image_bytes[rows].copy()
        names = [key.encode() for key in keys]
        name_bytes = np.fromiter(map(len, names), dtype=np.int64, count=len(names))
        there = (rows >= 0) & np.isin(index.state[rows], ix.IN_MEMORY) & (length > 0)
        there &= (offset >= 0) & (image > 0) & (offset <= arena.capacity - image)
        place = np.zeros(len(keys), dtype=np.int64)
        sums: dict[int, Sums] = {}
        for size, key_bytes, some in _alike(length, name_bytes, np.flatnonzero(there)):
            head = header_bytes(key_bytes, size)
            some, wrong = some[image[some] == head + size], some[image[some] != head + size]
            there[wrong] = False
            if not len(some):
                continue
            headers = arena.headers(offset[some], head)
            good, found = open_alike(headers, [names[i] for i in some.tolist()], size)
            there[some[~good]] = False  # a read through buffers finds out why
            place[some] = arena.address + offset[some] + head
            sums.update(zip(some[good].tolist(), found[good], strict=True))
        return Lent(self._tiers, self._clock, rows, generation, offset, there, place, length, sums)

    # Reading

    def _read(
        self, key: str | None, row: int, need: WantedObject | None, deadline: float
    ) -> Outcome:
        """Read the needed parts (None: check all) of the object in this row, which must be the
        key's (None: any key's)."""
        tiers, index = self._tiers, self._index
        for attempt in range(ATTEMPTS):  # again if it moved between tiers meanwhile
            generation, state = int(index.generation[row]), int(index.state[row])
            in_memory, offset = state in ix.IN_MEMORY, int(index.offset[row])
            if in_memory:
                view = tiers.arena.view(offset, int(index.image_bytes[row]))
                address, length = tiers.arena.address + offset, int(index.length[row])
                outcome = serve(key, view, address, length, need)
            elif state in (ix.DISK, ix.PROMOTING):
                # Once only: if memory is short, others may demote it again before it is read.
                worth_it = attempt == 0 and state == ix.DISK and need is not None
                if worth_it and self.promote(row, deadline):
                    continue
                generation = int(index.generation[row])  # the attempt has changed it
                outcome = self._read_file(key, row, need)
                if outcome is Outcome.DONE:
                    return outcome
            else:
                return Outcome.MISSING
            after = int(index.state[row])
            if after not in ix.READABLE or index.generation[row] != generation:
                continue
            if in_memory and not (after in ix.IN_MEMORY and index.offset[row] == offset):
                continue
            if outcome is Outcome.MISSING and key is not None and index.is_of(row, key):
                outcome = Outcome.CORRUPT  # another key's bytes under a record of this key
            if outcome is Outcome.CORRUPT and after not in (state, ix.DISK):
                continue  # promoted meanwhile, and its file removed: read it from memory
            if outcome is Outcome.CORRUPT:
                tiers.discard(row, generation, deadline)
            return outcome
        return Outcome.MISSING

    def _read_file(self, key: str | None, row: int, need: WantedObject | None) -> Outcome:
        """Read from the disk tier, without promoting the object."""
        index, disk = self._index, self._tiers.disk
        (name,), length = index.names(np.array([row])), int(index.length[row])
        image = disk.read(name, int(index.image_bytes[row])) if disk is not None else None
        if not image:
            return Outcome.CORRUPT
        address = int(np.frombuffer(image, dtype=np.uint8).ctypes.data)
        return serve(key, image, address, length, need)

    def promote(self, row: int, deadline: float) -> bool:
        """Bring an object from disk into memory; False if that was not possible."""
        tiers, index, disk = self._tiers, self._index, self._tiers.disk
        if disk is None or time.monotonic() < self._promote_after:
            return False
        (name,), size = index.names(np.array([row])), int(index.image_bytes[row])
        if size <= 0:  # damaged: reading its file shows it
            return False
        (low,), (high,) = words_of([name])
        wish = Wish(row, low, high, aligned(size), ix.PROMOTING)
        try:
            tiers.reserve([wish], deadline, SHORT_WAIT_S)
        except (StoreError, OSError) as error:
            if time.monotonic() > deadline:
                raise
            self._promote_after = time.monotonic() + LEAVE_DISK_S
            _log.warning("memory has no room for an object that is on disk: %s", error)
            return False
        if wish.offset < 0:
            return int(index.state[row]) in ix.IN_MEMORY
        view = tiers.arena.view(wish.offset, size)
        filled = False
        try:
            image = open_image(view) if disk.read(name, size, view) else None
            if image is not None and image.check(view[image.header_bytes :]):
                index.state[row] = ix.BOTH
                filled = True  # others may evict it from now on, and bring it back
                index.count("promoted")
        finally:
            if not filled:
                tiers.abandon([wish])
        return filled

    # Writing

    def _put(
        self,
        keys: Sequence[str],
        objects: Sequence[Slices],
        good: Sequence[bool],
        deadline: float,
        *,
        goes_last: bool = False,
    ) -> list[Outcome]:
        """Put objects whose memory is `good`; the others get FAILED."""
        sizes, arena = sizes_of(objects), self._tiers.arena
        with self.granting(keys, sizes.tolist(), good, deadline, goes_last=goes_last) as granted:
            which = list(granted.wishes)
            sums: list[int] = []
            done = 0
            for at, place in zip(which, granted.places(sizes[which]).tolist(), strict=True):
                if time.monotonic() > deadline:
                    break
                address, length = objects[at].address, objects[at].length
                copy_runs(address, place + np.cumsum(length) - length, length)
                sums += checksums(arena.view(place - arena.address, int(sizes[at])))
                done += 1
            granted.publish(sizes[which[:done]], np.array(sums, dtype=np.uint64))
        return granted.outcomes

    @contextlib.contextmanager
    def granting(
        self,
        keys: Sequence[str],
        sizes: Sequence[int],
        good: Sequence[bool],
        deadline: float,
        *,
        goes_last: bool = False,
    ) -> Iterator[Granted]:
        """Extents for new objects of these sizes, which the caller fills and publishes. Those that
        it does not publish are given back."""
        with self._calls:
            granted = Granted(self._tiers, keys, [Outcome.FAILED] * len(keys))
            try:
                self._grant(granted, sizes, good, deadline, goes_last)
            except StoreError as error:
                _log.warning("nothing was put: %s", error)
            try:
                yield granted
            finally:
                granted.give_back()

    def _grant(
        self,
        granted: Granted,
        sizes: Sequence[int],
        good: Sequence[bool],
        deadline: float,
        goes_last: bool,
    ) -> None:
        tiers, index, keys, outcomes = self._tiers, self._index, granted.keys, granted.outcomes
        wishes = self._wishes(keys, sizes, good, outcomes, deadline)
        rows = np.array([wish.row for wish in wishes.values()], dtype=np.int64)
        if goes_last:
            tiers.policy.go_last(rows)
        told = index.history.chain[rows] > 0
        scores = np.where(told, tiers.policy.scores(rows, self._clock()), np.inf)
        for wish, score in zip(wishes.values(), scores.tolist(), strict=True):
            wish.score = score
        tiers.reserve(list(wishes.values()), deadline)
        for at, wish in wishes.items():
            if wish.offset >= 0:
                granted.wishes[at] = wish
                continue
            no = Outcome.DECLINED if wish.declined else Outcome.FULL
            taken = int(index.state[wish.row]) not in (ix.FREE, ix.GHOST)
            outcomes[at] = Outcome.EXISTS if taken and index.is_of(wish.row, keys[at]) else no

    def _wishes(
        self,
        keys: Sequence[str],
        sizes: Sequence[int],
        good: Sequence[bool],
        outcomes: list[Outcome],
        deadline: float,
    ) -> dict[int, Wish]:
        """The extents to reserve, by place in the batch. Other objects get their outcome."""
        tiers, index = self._tiers, self._index
        low, high = hash_keys(keys)
        _, first = np.unique(np.stack((low, high)), axis=1, return_index=True)
        once = np.zeros(len(keys), dtype=bool)
        once[first] = True
        with tiers.locked(deadline):
            rows = index.find(low, high)
            new = np.array(good, dtype=bool) & once & (rows < 0)
            rows[new] = tiers.claim(low[new], high[new], rows[rows >= 0])
            if tiers.dead_owners(rows[(rows >= 0) & (index.state[rows] == ix.WRITING)]):
                tiers.mend()  # records that a dead process was writing are ghosts again
            states = np.where(rows >= 0, index.state[rows], ix.FREE).tolist()
        wishes: dict[int, Wish] = {}
        facts = zip(rows.tolist(), low, high, states, once.tolist(), strict=True)
        for at, (row, key_low, key_high, state, is_first) in enumerate(facts):
            if not good[at]:
                continue
            if state == ix.FREE and is_first:
                outcomes[at] = Outcome.FULL  # none of its sixteen slots can be emptied
            elif state != ix.GHOST or not is_first:
                outcomes[at] = Outcome.EXISTS
            else:
                size = aligned(image_bytes(len(keys[at].encode()), sizes[at]))
                wishes[at] = Wish(row, key_low, key_high, size, ix.WRITING)
        return wishes


@dataclass(slots=True, eq=False)
class Granted:
    """Extents for objects that are being written."""

    tiers: Tiers
    keys: Sequence[str]
    outcomes: list[Outcome]  # FAILED until an object is published
    wishes: dict[int, Wish] = field(default_factory=dict)  # by place in the batch

    def places(self, sizes: Ints) -> Ints:
        """Where the bytes of each granted object go; `sizes` has one for each of them."""
        keys = [len(self.keys[at].encode()) for at in self.wishes]
        heads = [header_bytes(k, n) for k, n in zip(keys, sizes.tolist(), strict=True)]
        offsets = np.array([wish.offset for wish in self.wishes.values()], dtype=np.int64)
        found: Ints = self.tiers.arena.address + offsets + np.array(heads, dtype=np.int64)
        return found

    def publish(self, sizes: Ints, sums: Sums) -> None:
        """The first of the granted objects are in place: `sizes` has one for each of them, `sums`
        the checksums of their chunks."""
        arena, index = self.tiers.arena, self.tiers.index
        counts = -(-sizes // CHUNK_BYTES)
        ends = np.cumsum(counts)
        places = list(self.wishes)[: len(sizes)]
        wishes = [self.wishes[at] for at in places]
        names = [self.keys[at].encode() for at in places]
        rows = np.array([wish.row for wish in wishes], dtype=np.int64)
        name_bytes = np.fromiter(map(len, names), dtype=np.int64, count=len(names))
        for size, _, some in _alike(sizes, name_bytes, np.arange(len(names))):
            chunks = int(counts[some[0]])
            own = sums[(ends[some] - chunks)[:, None] + np.arange(chunks)]
            headers = seal_alike([names[i] for i in some.tolist()], size, own)
            offsets = np.array([wishes[i].offset for i in some.tolist()], dtype=np.int64)
            spread(headers.ctypes.data, arena.address + offsets, headers.shape[1])
            index.length[rows[some]] = size
            index.image_bytes[rows[some]] = headers.shape[1] + size
        index.state[rows] = ix.MEMORY
        for at in places:
            self.outcomes[at] = Outcome.DONE

    def give_back(self) -> None:
        """Give back the extents of objects that were not published."""
        undone = [w for at, w in self.wishes.items() if self.outcomes[at] is not Outcome.DONE]
        self.tiers.abandon(undone)
        for name, outcome in COUNTED.items():
            self.tiers.index.count(name, self.outcomes.count(outcome))


@dataclass(frozen=True, slots=True, eq=False)
class Lent:
    """Objects of a batch that were in memory when they were looked up."""

    tiers: Tiers
    clock: Callable[[], float]
    rows: Ints
    generation: NDArray[np.uint32]
    offset: Ints
    there: Bools  # which of the batch
    place: Ints  # address of each object's bytes
    length: Ints
    sums: dict[int, Sums]  # checksums of each object's chunks, by place in the batch

    def still(self, which: Ints) -> Bools:
        """Which of these stayed until now, so that the bytes copied meanwhile are theirs."""
        index, rows = self.tiers.index, self.rows[which]
        same = np.isin(index.state[rows], ix.IN_MEMORY)
        same &= index.generation[rows] == self.generation[which]
        same &= index.offset[rows] == self.offset[which]
        return np.asarray(same)

    def used(self, which: Ints) -> None:
        """Note that these were read."""
        self.tiers.policy.touch(self.rows[which], self.clock())
        self.tiers.index.count("hits", len(which))


def _alike(length: Ints, name_bytes: Ints, which: Ints) -> Iterator[tuple[int, int, Ints]]:
    """Group `which` by object size and key size; usually there is one group."""
    while len(which):
        size, key_bytes = int(length[which[0]]), int(name_bytes[which[0]])
        same = (length[which] == size) & (name_bytes[which] == key_bytes)
        yield size, key_bytes, which[same]
        which = which[~same]
