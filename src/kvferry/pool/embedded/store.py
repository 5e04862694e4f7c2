"""The embedded store: objects shared by all processes of one host, by a directory and nothing else.

There is no server. Every process maps the same two files, an index and an arena, and takes part:

    put    claim a record and an extent (lock, microseconds; maybe an eviction), gather the bytes
           into the extent and checksum them (no lock), make the record say MEMORY (one store)
    get    find the record (no lock), check header and checksums of what is wanted, scatter it
           to its destination, and look whether the extent was given up meanwhile
    access tell the eviction policy about a request (lock, microseconds)

A process may die at any of these points. What it wrote half was never readable; what it evicted
half is whole in one place; its locks go with it.

An object that is not what was written, in whichever tier, is CORRUPT for its reader, removed, and
counted. An object that another process is writing now EXISTS for a second writer.

The parts: `embedded_index` (records), `embedded_arena` (extents), `embedded_disk` (files),
`embedded_owner` (whose they are), `embedded_files` (which there should be), `embedded_open`
(recovery), `embedded_give` (what leaves), `embedded_room` (eviction, tiers), `embedded_write`,
`embedded_read`, `embedded_serve` (what is wanted of an object), `embedded_image` (headers,
checksums), `embedded_copy` (scatter), `embedded_lock`, `embedded_calls` (who is still at work when
it is closed), `policy` (what is evicted).
"""

from __future__ import annotations

import functools
import getpass
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np

from kvferry.carriers.base import MemoryRegion, RegionTable
from kvferry.errors import NotPrivate, StoreError
from kvferry.pool.embedded import index as ix
from kvferry.pool.embedded.access import ObjectReader, Writer, analyse
from kvferry.pool.embedded.arena import Image, open_image
from kvferry.pool.embedded.eviction import Floats, Room
from kvferry.pool.embedded.index import Calls, Geometry, hash_keys, key_name
from kvferry.pool.embedded.opened import MakePolicy
from kvferry.pool.embedded.policy import ConversationPolicy
from kvferry.pool.store import MOST_RECORD_BYTES, Bools, Ints, Outcome, Ranges, Slices, StoreStats

_log = logging.getLogger(__name__)

DEFAULT_MEMORY_BYTES = 4 << 30
OBJECT_BYTES_GUESS = 256 << 10  # for the number of records: four for each object of this size
MIN_SLOTS, MAX_SLOTS = 1 << 18, 1 << 26
# A process publishes a record without a lock, by plain stores: its fields first, then its state.
# Other processors see stores of these machines in that order. ARM does not promise it without a
# barrier, and Python has none.
ORDERED_MACHINES = ("x86_64", "AMD64")
CLOSE_SECONDS = 5.0  # for calls under way to end; then the last of them closes the store
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Listed:
    """One object, for people."""

    key: str
    bytes: int
    tier: str
    turns: int
    depth: int
    idle_seconds: float
    score: float


class Verified(NamedTuple):
    """What came of reading every object."""

    good: int
    corrupt: int  # and are gone
    unread: int = 0
    why: str = ""  # of the first that could not be read


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
    """A method that works on mapped memory: refused once the store is closed, and waited for."""

    @functools.wraps(method)
    def counted(self: EmbeddedStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._calls:
            return method(self, *args, **kwargs)

    return counted


class EmbeddedStore:
    """A `Store` in a directory; see the module."""

    name = "embedded"

    def __init__(
        self,
        directory: Path | None = None,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        disk_directory: Path | None = None,
        disk_bytes: int = 0,
        *,
        slots: int | None = None,
        threads: int | None = None,
        clock: Callable[[], float] = time.time,
        make_policy: MakePolicy = ConversationPolicy,
    ) -> None:
        """Open or create. Whoever creates it decides the sizes and the place of the disk tier;
        others take them as they are."""
        if platform.machine() not in ORDERED_MACHINES:
            raise StoreError(
                f"the embedded store needs a processor that keeps the order of stores; expected "
                f"{' or '.join(ORDERED_MACHINES)}, found {platform.machine()}; configure "
                '"store": "mooncake"'
            )
        if (disk_directory is None) != (disk_bytes == 0):
            raise StoreError("a disk tier needs both a directory and a capacity in bytes")
        if memory_bytes < 1 << 16:
            raise StoreError(f"a memory tier of {memory_bytes} bytes holds nothing; give more")
        if slots is None:
            objects = (memory_bytes + disk_bytes) // OBJECT_BYTES_GUESS
            slots = min(max(MIN_SLOTS, 1 << (4 * objects).bit_length()), MAX_SLOTS)
        elif slots < 2 * ix.WAYS or slots & (slots - 1):
            raise StoreError(f"{slots} records: expected a power of two, 16 or more")
        self.directory = directory or default_directory()
        self._calls = Calls()
        wanted = Geometry(slots, memory_bytes, disk_bytes)
        try:
            self._room = Room(
                self.directory, wanted, disk_directory, clock, make_policy, self._calls
            )
        except (OSError, NotPrivate) as error:
            raise StoreError(f"cannot open the store at {self.directory}: {error}") from error
        found = self._room.index.geometry
        if (found.memory_bytes, found.disk_bytes) != (memory_bytes, disk_bytes):
            _log.warning(
                "the store at %s was created with %d bytes of memory and %d of disk; that holds",
                self.directory,
                found.memory_bytes,
                found.disk_bytes,
            )
        self._clock = clock
        self._regions = RegionTable.of([])
        self._registered: list[MemoryRegion] = []
        # a quarter of the cores: the engine needs the others
        threads = threads or min(4, max(1, (os.cpu_count() or 1) // 4))
        self._reader = ObjectReader(self._room, threads, clock)
        self._writer = Writer(self._room, clock)

    # --- the protocol --------------------------------------------------------------------------

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self._registered.extend(regions)
        self._regions = RegionTable.of(self._registered)

    def access(self, keys: Sequence[str], deadline: float) -> None:
        room = self._room
        if not keys:
            return
        low, high = hash_keys(keys)
        try:
            with self._calls, room.locked(deadline):
                rows = room.index.find(low, high)
                known = rows >= 0
                if not known.all():
                    new_low, new_high, now = low[~known], high[~known], self._clock()
                    rows[~known] = room.index.claim(new_low, new_high, now, rows[known])
                whole = len(rows) if bool((rows >= 0).all()) else int(np.argmin(rows >= 0))
                room.policy.observe(rows[:whole], known[:whole], self._clock())
        except StoreError as error:
            _log.warning("a request was not told to the eviction policy: %s", error)

    @_call
    def exists(self, keys: Sequence[str], deadline: float) -> Bools:
        index = self._room.index
        if not keys:
            return np.zeros(0, dtype=bool)
        return index.readable(index.find(*hash_keys(keys)))

    @_call
    def put(self, keys: Sequence[str], objects: Sequence[Ranges], deadline: float) -> list[Outcome]:
        inside = self._inside(objects)
        return self._writer.put(keys, objects, inside, False, deadline)

    @_call
    def get(self, keys: Sequence[str], wanted: Sequence[Slices], deadline: float) -> list[Outcome]:
        return self._reader.get(keys, analyse(wanted, self._regions), deadline) if keys else []

    @_call
    def put_bytes(self, key: str, value: bytes, deadline: float) -> Outcome:
        if len(value) > MOST_RECORD_BYTES:
            _log.warning(
                "%s has %d bytes; a record has up to %d", key, len(value), MOST_RECORD_BYTES
            )
            return Outcome.FAILED
        source = np.frombuffer(value or b"\0", dtype=np.uint8)
        one = np.array([len(value)], dtype=np.int64)
        ranges = Ranges(np.array([source.ctypes.data], dtype=np.int64), one)
        return self._writer.put([key], [ranges], [True], True, deadline)[0]

    @_call
    def get_bytes(self, key: str, deadline: float) -> bytes | None:
        return self._reader.get_bytes(key, deadline)

    @_call
    def remove(self, keys: Sequence[str], deadline: float) -> int:
        room = self._room
        if not keys:
            return 0
        rows = np.unique(room.index.find(*hash_keys(keys)))
        rows = rows[rows >= 0]
        return room.give_up(rows, room.index.generation[rows].copy(), deadline)

    @_call
    def stats(self) -> StoreStats:
        index = self._room.index
        rows = index.objects()
        return StoreStats(
            objects=len(rows),
            bytes=int(index.length[rows].sum()),
            capacity_bytes=index.geometry.memory_bytes + index.geometry.disk_bytes,
            evicted=index.counters()["dropped"],
        )

    def close(self) -> None:
        self._reader.closing = True
        left = self._calls.close(CLOSE_SECONDS, self._end)
        if left:
            _log.warning(
                "the store at %s is closed while %d calls are under way; the last of them ends it",
                self.directory,
                left,
            )

    def _end(self) -> None:
        self._reader.close()
        self._room.close()

    # --- beyond the protocol -------------------------------------------------------------------

    @_call
    def counters(self) -> dict[str, int]:
        """Counts of all processes since the store was created, and bytes by tier."""
        index = self._room.index
        extents = index.with_extent()
        return {
            **index.counters(),
            "memory_bytes": int(index.extent[extents].sum()),
            "disk_bytes": int(index.image_bytes[index.on_disk()].sum()),
            "ghosts": len(index.in_state(ix.GHOST)),
        }

    @_call
    def learned(self) -> dict[str, float]:
        return self._room.policy.learned()

    def listed(self) -> Iterator[Listed]:
        """All objects, the next victim first."""
        with self._calls:
            rows, scores = self._scored()
        for at in np.argsort(scores, kind="stable").tolist():
            with self._calls:  # none while the caller looks at it
                one = self._list_one(int(rows[at]), float(scores[at]))
            yield one

    def _scored(self) -> tuple[Ints, Floats]:
        rows = self._room.index.objects()
        return rows, self._room.policy.scores(rows, self._clock())

    def _list_one(self, row: int, score: float) -> Listed:
        index, with_key = self._room.index, self._header(row)
        tiers = {ix.MEMORY: "memory", ix.DISK: "disk", ix.BOTH: "both"}
        return Listed(
            key=with_key.key if with_key else key_name(int(index.low[row]), int(index.high[row])),
            bytes=int(index.length[row]),
            tier=tiers.get(int(index.state[row]), "moving"),
            turns=int(index.history.turns[row]),
            depth=int(index.history.depth[row]),
            idle_seconds=max(0.0, self._clock() - float(index.history.last[row])),
            score=score,
        )

    @_call
    def verify(self, deadline: float) -> Verified:
        """Read every object whole. What cannot be read now, or not in time, is left as it is."""
        good = corrupt = unread = 0
        why = ""
        for row in self._room.index.objects().tolist():
            try:
                if time.monotonic() > deadline:
                    raise StoreError("the time for it is over")
                outcome = self._reader.check_whole(row, deadline)
            except (StoreError, OSError) as error:  # no reason to leave the others unread
                unread += 1
                why = why or str(error)
                continue
            good += outcome is Outcome.DONE
            corrupt += outcome is Outcome.CORRUPT
        return Verified(good, corrupt, unread, why)

    @_call
    def evict(self, size: int, deadline: float) -> int:
        """Remove the least valuable objects, `size` bytes or more, from all tiers; how many."""
        room = self._room
        index = room.index
        rows = index.in_state(ix.MEMORY, ix.BOTH, ix.DISK)
        order = np.argsort(room.policy.scores(rows, self._clock()), kind="stable")
        freed = np.cumsum(index.image_bytes[rows[order]])
        rows = rows[order[: int(np.searchsorted(freed, size)) + 1]] if size > 0 else rows[:0]
        count = room.give_up(rows, index.generation[rows].copy(), deadline)
        index.count("dropped", count)
        return count

    @_call
    def clear(self, deadline: float) -> int:
        return self._room.clear(deadline)

    def _header(self, row: int) -> Image | None:
        room = self._room
        if not room.index.in_memory(int(room.index.state[row])):
            name = key_name(int(room.index.low[row]), int(room.index.high[row]))
            return room.disk.header(name) if room.disk is not None else None
        offset, size = int(room.index.offset[row]), int(room.index.image_bytes[row])
        return open_image(room.arena.view(offset, size))

    def _inside(self, objects: Sequence[Ranges]) -> list[bool]:
        """Whether each object's memory is registered; looked at one by one only if one is not."""
        if not objects:
            return []
        address = np.concatenate([o.address for o in objects])
        length = np.concatenate([o.length for o in objects])
        bad = self._regions.first_outside(address, length)
        if bad < 0:
            return [True] * len(objects)
        _log.warning(
            "%d bytes at %#x are not inside the registered memory", length[bad], address[bad]
        )
        return [self._regions.first_outside(o.address, o.length) < 0 for o in objects]
