"""Reading from the embedded store: found, copied, checked, and looked at once more.

Keys are hashed and records found once for the batch; `embedded_serve` copies what is wanted of each
object, and checks it.

No lock is held. After a copy from memory the record must still say memory, the same offset and the
generation of before; else the extent may have been somebody else's meanwhile, and the object is
looked for again, in the other tier, and is missing otherwise. A file is read into memory of our own
first: what was right in there is right.

What lies on disk is brought to memory on the way, if the lock can be had at once: a process that is
stopped with it costs its neighbours nothing but that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from kvferry.carriers.base import RegionTable
from kvferry.errors import StoreError
from kvferry.pool.embedded import index as ix
from kvferry.pool.embedded.arena import (
    ALIGN,
    Image,
    check,
    check_all,
    check_range,
    header_bytes,
    image_bytes,
    open_image,
    seal,
    touched,
)
from kvferry.pool.embedded.eviction import Room, Wish, aligned
from kvferry.pool.embedded.index import hash_keys, key_name
from kvferry.pool.store import MOST_RECORD_BYTES, Ints, Outcome, Ranges, Slices, move, spread

_log = logging.getLogger(__name__)

PARALLEL_BYTES = 8 << 20  # a batch beyond this is shared among threads
ATTEMPTS = 5
LOCK_PATIENCE_S = 0.01  # to bring an object to memory: a thousand times as long as most hold it
LOCK_SECONDS = 0.5  # the same, once room is being made for it, because that was not for nothing
LEAVE_DISK_S = 0.25  # after that was not enough, objects are read from disk without asking


class ObjectReader:
    """Gets objects of one store into memory of this process."""

    def __init__(self, room: Room, threads: int, clock: Callable[[], float]) -> None:
        self._room = room
        self._clock = clock
        self._threads = threads
        self.closing = False  # what is not begun fails at once
        self._promote_after = 0.0
        self._pool = ThreadPoolExecutor(threads, "kvferry-store") if threads > 1 else None

    def get(
        self, keys: Sequence[str], wanted: Sequence[WantedObject | None], deadline: float
    ) -> list[Outcome]:
        index = self._room.index
        rows = index.find(*hash_keys(keys))
        there = index.readable(rows)
        outcomes = [Outcome.MISSING] * len(keys)
        numbers = rows.tolist()

        def some_of(places: list[int]) -> None:
            for at in places:
                need = wanted[at]
                outcomes[at] = Outcome.FAILED
                if need is None or self.closing or time.monotonic() > deadline:
                    continue
                try:
                    outcomes[at] = self.one(keys[at], numbers[at], need, deadline)
                except Exception as error:  # one object's failure is its own
                    what = f"{type(error).__name__}: {error}"
                    _log.warning("%s could not be read: %s", keys[at], what)

        places = np.flatnonzero(there).tolist()
        total = sum(need.end - need.begin for need in wanted if need is not None)
        if self._pool is not None and total > PARALLEL_BYTES and len(places) > 1:
            parts = [places[i :: self._threads] for i in range(self._threads)]
            _share(self._pool, some_of, parts)
        else:
            some_of(places)
        self._room.policy.touch(rows[there], self._clock())
        hits = outcomes.count(Outcome.DONE)
        index.count("hits", hits)  # without the lock: may miss a few
        index.count("misses", len(keys) - hits)
        return outcomes

    def get_bytes(self, key: str, deadline: float) -> bytes | None:
        index = self._room.index
        row = int(index.find(*hash_keys([key]))[0])
        for _ in range(2):  # it may be replaced by one of another length in between
            if row < 0 or not index.readable(np.array([row]))[0]:
                return None
            length = int(index.length[row])
            if not 0 <= length <= MOST_RECORD_BYTES:
                self.one(key, row, None, deadline)  # a damaged record is removed
                return None
            into = np.zeros(max(1, length), dtype=np.uint8)
            zero = np.zeros(1, dtype=np.int64)
            parts = Slices(zero, zero + into.ctypes.data, zero + length)
            need = WantedObject(parts, 0, length, length)
            if self.one(key, row, need, deadline) is Outcome.DONE:
                self._room.policy.touch(np.array([row]), self._clock())
                return into[:length].tobytes()
        return None

    def check_whole(self, row: int, deadline: float) -> Outcome:
        """Whether the object in this row is what was written, whatever its key."""
        return self.one(None, row, None, deadline)

    def one(self, key: str | None, row: int, need: WantedObject | None, deadline: float) -> Outcome:
        """Read what is needed (None: check all) of the object in this row."""
        room = self._room
        index = room.index
        for attempt in range(ATTEMPTS):  # again where it moved between tiers meanwhile
            generation, state = int(index.generation[row]), int(index.state[row])
            in_memory, offset = index.in_memory(state), int(index.offset[row])
            if in_memory:
                view = room.arena.view(offset, int(index.image_bytes[row]))
                address, length = room.arena.address + offset, int(index.length[row])
                outcome = serve(key, view, address, length, need)
            elif state in (ix.DISK, ix.PROMOTING):
                # Once only: where memory is short, others may push it down again before it is read.
                worth_it = attempt == 0 and state == ix.DISK and need is not None
                if worth_it and self._promote(row, deadline):
                    continue
                generation = int(index.generation[row])  # trying has changed it
                outcome = self._serve_file(key, row, need)
                if outcome is Outcome.DONE:
                    return outcome
            else:
                return Outcome.MISSING
            after = int(index.state[row])
            if not index.has_object(after) or index.generation[row] != generation:
                continue
            if in_memory and not (index.in_memory(after) and index.offset[row] == offset):
                continue
            if outcome is Outcome.MISSING and key is not None and self._names(row, key):
                outcome = Outcome.CORRUPT  # another key's bytes, where the record says ours
            if outcome is Outcome.CORRUPT and after not in (state, ix.DISK):
                continue  # brought to memory meanwhile, and its file removed: it is there
            if outcome is Outcome.CORRUPT:
                room.discard(row, generation, deadline)
            return outcome
        return Outcome.MISSING

    def _names(self, row: int, key: str) -> bool:
        (low,), (high,) = hash_keys([key])
        return bool(self._room.index.low[row] == low and self._room.index.high[row] == high)

    def _serve_file(self, key: str | None, row: int, need: WantedObject | None) -> Outcome:
        """From the disk tier without a place in memory."""
        room, index = self._room, self._room.index
        name, length = key_name(int(index.low[row]), int(index.high[row])), int(index.length[row])
        image = room.disk.read(name, int(index.image_bytes[row])) if room.disk is not None else None
        if not image:
            return Outcome.CORRUPT
        address = int(np.frombuffer(image, dtype=np.uint8).ctypes.data)
        return serve(key, image, address, length, need)

    def _promote(self, row: int, deadline: float) -> bool:
        """Bring an object from disk into memory; False where that was not possible."""
        room, index = self._room, self._room.index
        if not self._lock_is_free(deadline):
            return False
        low, high = index.low[row].copy(), index.high[row].copy()
        size = int(index.image_bytes[row])
        if size <= 0:  # damaged: reading its file tells
            return False
        wish = Wish(row, low, high, aligned(size), ix.PROMOTING)
        try:
            granted = room.reserve([wish], np.array([np.inf]), True, deadline, LOCK_SECONDS)
        except (StoreError, OSError) as error:
            if time.monotonic() > deadline:
                raise
            _log.warning("no place in memory for an object that is on disk: %s", error)
            return False
        if row not in granted.offsets:
            return index.in_memory(int(index.state[row]))
        view = room.arena.view(granted.offsets[row], size)
        filled = False
        try:
            name = key_name(int(low), int(high))
            read = room.disk.read(name, size, view) if room.disk is not None else None
            image = open_image(view) if read else None
            if image is not None and check_all(image, view[image.header_bytes :]):
                index.state[row] = ix.BOTH
                filled = True  # and no longer this reader's: others may evict it, and bring it back
                index.count("promoted")
        finally:
            if not filled:
                room.abandon(np.array([row], dtype=np.int64), ix.DISK)
        return filled

    def _lock_is_free(self, deadline: float) -> bool:
        """Whether the lock can be had now: a file can be read without it. Waiting for room is
        another matter, because what makes room must not be dropped for want of time."""
        now = time.monotonic()
        if now < self._promote_after:
            return False
        try:
            with self._room.locked(min(deadline, now + LOCK_PATIENCE_S)):
                return True
        except StoreError as error:
            self._promote_after = time.monotonic() + LEAVE_DISK_S
            _log.info("objects are read from disk, and stay there: %s", error)
            return False

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _next(left: deque[list[int]]) -> list[int] | None:
    try:
        return left.popleft()
    except IndexError:
        return None


def _share(
    pool: ThreadPoolExecutor, work: Callable[[list[int]], None], parts: list[list[int]]
) -> None:
    """All parts, by the pool's threads; when it ends, in whichever way, nobody is at them.

    They write to memory of a caller who takes it back then. A pool that is refused a thread has
    kept what it was given, and may begin it at any time: so parts are taken by whoever comes while
    there are any, and who is at them is counted.
    """
    left, errors = deque(parts), list[BaseException]()
    changed, at_work = threading.Condition(), 0

    def take() -> None:
        nonlocal at_work
        with changed:
            at_work += 1
        try:
            while (part := _next(left)) is not None:
                work(part)
        except BaseException as error:
            errors.append(error)
        finally:
            with changed:
                at_work -= 1
                changed.notify_all()

    try:
        for _ in parts:
            pool.submit(take)
    except RuntimeError as error:
        _log.warning("objects are read by fewer threads: %s", error)
        while left:
            take()
    with changed:
        changed.wait_for(lambda: at_work == 0 and not left)
    if errors:
        raise errors[0]


# --------------------------------------------------------------------------------------------------
# What is wanted of an object, from its image to where it goes: copied, then checked.
#
# What does not depend on a single object is found out once for the batch, in whole arrays: whether
# destinations are registered, and which objects are wanted in the usual form (parts of one length,
# one after another). Those are copied and checked by a few calls each; others take the general way,
# which costs some microseconds more.
#
# Bytes are checked right after they were copied, while they are in the cache: that is faster than
# the other way round (84 % of memcpy against 72 %), because a copy reads memory better than a hash
# does. A chunk is checked once all that is wanted of it was copied, and not before: so what has
# landed is what was written, or it is told as CORRUPT, and its destination is nobody's yet.
# --------------------------------------------------------------------------------------------------

HOT_BYTES = 256 << 10  # copied and checked at a time: stays in a core's cache in between


@dataclass(frozen=True, slots=True)
class WantedObject:
    """What the batch wants of one object."""

    parts: Slices
    begin: int  # first byte
    end: int
    size: int  # of each part where all are alike and one after another, else 0


def analyse(wanted: Sequence[Slices], regions: RegionTable) -> list[WantedObject | None]:
    """What each object is wanted for; None where a part leaves the registered memory."""
    counts = np.array([len(w.length) for w in wanted], dtype=np.int64)
    some = np.flatnonzero(counts)
    empty = np.empty(0, dtype=np.int64)
    result: list[WantedObject | None] = [WantedObject(Slices(empty, empty, empty), 0, 0, 0)] * len(
        wanted
    )
    if len(some) == 0:
        return result
    offset = np.concatenate([wanted[i].offset for i in some.tolist()])
    length = np.concatenate([wanted[i].length for i in some.tolist()])
    address = np.concatenate([wanted[i].address for i in some.tolist()])
    heads = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts[some])[:-1]))
    outside = np.zeros(len(some), dtype=bool)
    if regions.first_outside(address, length) >= 0:
        outside[:] = [
            regions.first_outside(wanted[i].address, wanted[i].length) >= 0 for i in some.tolist()
        ]
    follows = np.ones(len(offset), dtype=bool)
    follows[1:] = offset[1:] == offset[:-1] + length[:-1]
    follows[heads] = True
    alike = np.repeat(length[heads], counts[some]) == length
    plain = np.logical_and.reduceat(follows & alike, heads) & (length[heads] > 0)
    begin = np.minimum.reduceat(offset, heads).tolist()
    end = np.maximum.reduceat(offset + length, heads).tolist()
    size = np.where(plain, length[heads], 0).tolist()
    for k, i in enumerate(some.tolist()):
        result[i] = None if outside[k] else WantedObject(wanted[i], begin[k], end[k], size[k])
    return result


def serve(
    key: str | None, view: memoryview, address: int, length: int, need: WantedObject | None
) -> Outcome:
    """Copy the parts, and check what they touch, a cache's worth at a time.

    length  of the object, as its record says
    """
    image = open_image(view)
    if image is None or image.length != length or image.header_bytes + length != len(view):
        return Outcome.CORRUPT
    if key is not None and image.key != key:
        return Outcome.MISSING
    data = view[image.header_bytes :]
    if need is None:
        return Outcome.DONE if check_all(image, data) else Outcome.CORRUPT
    if need.begin < 0 or need.end > image.length:
        _log.warning(
            "%s has %d bytes; %d to %d were asked for",
            image.key,
            image.length,
            need.begin,
            need.end,
        )
        return Outcome.FAILED
    if need.begin == need.end:
        return Outcome.DONE
    address += image.header_bytes
    if need.size:
        return _copy_plain(image, data, address, need)
    return _copy_any(image, data, address, need.parts)


def _copy_plain(image: Image, data: memoryview, address: int, need: WantedObject) -> Outcome:
    """Parts of one length, one after another."""
    size, target = need.size, need.parts.address
    step = max(1, HOT_BYTES // size)
    checked = need.begin // image.chunk_bytes
    for first in range(0, len(target), step):
        part = target[first : first + step]
        begin = need.begin + first * size
        end = begin + len(part) * size
        spread(address + begin, part, size)
        # rounded down: the next parts bring the rest of this chunk
        whole = end // image.chunk_bytes if end < need.end else -(-end // image.chunk_bytes)
        if not check_range(image, data, checked, whole):
            return Outcome.CORRUPT
        checked = max(checked, whole)
    return Outcome.DONE


def _copy_any(image: Image, data: memoryview, address: int, parts: Slices) -> Outcome:
    """Parts of any form: by rising offset and a cache's worth at a time, or all of a small object.

    So no part that comes later begins before the next one's chunk.
    """
    offset, target, length = parts.offset, parts.address, parts.length
    total = len(length)
    steps = [total]
    if image.length > HOT_BYTES:
        order = np.argsort(offset, kind="stable")
        offset, target, length = offset[order], target[order], length[order]
        steps = _steps(length)
    chunks = touched(image, offset, length)
    first = checked = 0
    for last in steps:
        part = slice(first, last)
        move(address + offset[part], target[part], length[part])
        whole = len(chunks)
        if last < total:
            whole = int(np.searchsorted(chunks, offset[last] // image.chunk_bytes))
        if not check(image, data, chunks[checked:whole]):
            return Outcome.CORRUPT
        first, checked = last, whole
    return Outcome.DONE


def _steps(length: Ints) -> list[int]:
    """Where to stop so that about `HOT_BYTES` lie between."""
    ends, steps = np.cumsum(length), [0]
    while steps[-1] < len(length):
        done = int(ends[steps[-1] - 1]) if steps[-1] else 0
        fits = int(np.searchsorted(ends, done + HOT_BYTES, side="right"))
        steps.append(max(steps[-1] + 1, fits))
    return steps[1:]


# --------------------------------------------------------------------------------------------------
# Writing to the embedded store: a record, an extent, the bytes, and then one store that shows it.
#
# Until that store the object is WRITING, for this process alone; every way out of here, also an
# exception and a deadline, gives back what was not filled.
# --------------------------------------------------------------------------------------------------

PART_SHARE = 4  # of the memory: what one call writes at a time


class Writer:
    """Puts objects from memory of this process into one store."""

    def __init__(self, room: Room, clock: Callable[[], float]) -> None:
        self._room = room
        self._clock = clock

    def put(
        self,
        keys: Sequence[str],
        objects: Sequence[Ranges],
        inside: Sequence[bool],
        pinned: bool,
        deadline: float,
    ) -> list[Outcome]:
        """In parts that leave most of the memory alone, because what is being written stays."""
        sizes = [int(ranges.length.sum()) + ALIGN for ranges in objects]
        most = self._room.arena.capacity // PART_SHARE
        outcomes: list[Outcome] = []
        first = 0
        while first < len(keys):
            last, total = first + 1, sizes[first]
            while last < len(keys) and total + sizes[last] <= most:
                total += sizes[last]
                last += 1
            part = slice(first, last)
            outcomes += self._put_part(keys[part], objects[part], inside[part], pinned, deadline)
            first = last
        return outcomes

    def _put_part(
        self,
        keys: Sequence[str],
        objects: Sequence[Ranges],
        inside: Sequence[bool],
        pinned: bool,
        deadline: float,
    ) -> list[Outcome]:
        room = self._room
        index = room.index
        outcomes = [Outcome.FAILED] * len(keys)
        if not keys:
            return outcomes
        try:
            rows, wishes, places = self._wishes(keys, objects, inside, outcomes, pinned, deadline)
            if not wishes:
                index.count("full", outcomes.count(Outcome.FULL))
                return outcomes
            mine = np.array([w.row for w in wishes], dtype=np.int64)
            told = index.history.chain[mine] > 0
            scores = np.where(told, room.policy.scores(mine, self._clock()), np.inf)
            granted = room.reserve(wishes, scores, room.disk is not None, deadline)
        except StoreError as error:
            _log.warning("nothing was put: %s", error)
            return outcomes
        written, failed = [], []
        try:
            for at in places:
                row = int(rows[at])
                if row not in granted.offsets:
                    no = Outcome.DECLINED if row in granted.declined else Outcome.FULL
                    outcomes[at] = self._lost_race(keys[at], row) or no
                elif time.monotonic() > deadline:
                    failed.append(row)
                else:
                    self._write(row, granted.offsets[row], keys[at].encode(), objects[at])
                    written.append(row)
                    outcomes[at] = Outcome.DONE
        finally:
            undone = [row for row in granted.offsets if row not in written]
            if undone:
                room.abandon(np.array(undone, dtype=np.int64), ix.GHOST)
        index.count("puts", len(written))
        index.count("full", outcomes.count(Outcome.FULL))
        index.count("declined", outcomes.count(Outcome.DECLINED))
        return outcomes

    def _wishes(
        self,
        keys: Sequence[str],
        objects: Sequence[Ranges],
        inside: Sequence[bool],
        outcomes: list[Outcome],
        pinned: bool,
        deadline: float,
    ) -> tuple[Ints, list[Wish], list[int]]:
        """What has to be written: records for it, extents that it wants, places in the batch."""
        room = self._room
        index = room.index
        low, high = hash_keys(keys)
        good = np.array(inside, dtype=bool)
        _, first = np.unique(np.stack((low, high)), axis=1, return_index=True)
        once = np.zeros(len(keys), dtype=bool)
        once[first] = True
        with room.locked(deadline):
            rows = index.find(low, high)
            new = good & once & (rows < 0)
            rows[new] = room.claim(low[new], high[new], rows[rows >= 0])
            states = np.where(rows >= 0, index.state[rows], ix.FREE)
            self._undo_dead(rows[states == ix.WRITING])
            states = np.where(rows >= 0, index.state[rows], ix.FREE)
        wishes, places = [], []
        for at in range(len(keys)):
            if not good[at]:
                continue
            if states[at] == ix.FREE and once[at]:
                outcomes[at] = (
                    Outcome.FULL
                )  # sixteen objects where this key may lie, none of which may go
            elif states[at] != ix.GHOST or not once[at]:
                outcomes[at] = Outcome.EXISTS
            else:
                row, length = int(rows[at]), int(objects[at].length.sum())
                size = image_bytes(len(keys[at].encode()), length)
                wishes.append(Wish(row, low[at], high[at], aligned(size), ix.WRITING))
                places.append(at)
        if pinned and wishes:
            room.policy.pin(np.array([w.row for w in wishes], dtype=np.int64))
        return rows, wishes, places

    def _undo_dead(self, rows: Ints) -> None:
        """Records that a dead process was writing become free for this one."""
        for owner in np.unique(self._room.index.owner[rows]).tolist():
            if not self._room.members.alive(owner):
                self._room.mend()
                return

    def _lost_race(self, key: str, row: int) -> Outcome | None:
        """EXISTS where somebody else put this key; its ghost's slot may be another key's by now."""
        index = self._room.index
        (low,), (high,) = hash_keys([key])
        same = index.low[row] == low and index.high[row] == high
        state = int(index.state[row])
        return Outcome.EXISTS if same and state not in (ix.FREE, ix.GHOST) else None

    def _write(self, row: int, offset: int, key: bytes, ranges: Ranges) -> None:
        """To the extent that was granted, whatever the record says by now."""
        room = self._room
        index = room.index
        length = int(ranges.length.sum())
        size = image_bytes(len(key), length)
        start = room.arena.address + offset + header_bytes(len(key), length)
        ends = np.cumsum(ranges.length)
        move(ranges.address, start + ends - ranges.length, ranges.length)
        seal(room.arena.view(offset, size), key, length)
        index.length[row], index.image_bytes[row] = length, size
        index.state[row] = ix.MEMORY
