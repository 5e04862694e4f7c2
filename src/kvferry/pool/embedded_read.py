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

import numpy as np

from kvferry.errors import StoreError
from kvferry.pool import embedded_index as ix
from kvferry.pool.embedded_image import check_all, open_image
from kvferry.pool.embedded_index import hash_keys, key_name
from kvferry.pool.embedded_room import Room, Wish, aligned
from kvferry.pool.embedded_serve import Wanted, serve
from kvferry.pool.store import MOST_RECORD_BYTES, Outcome, Slices

_log = logging.getLogger(__name__)

PARALLEL_BYTES = 8 << 20  # a batch beyond this is shared among threads
ATTEMPTS = 5
LOCK_PATIENCE_S = 0.01  # to bring an object to memory: a thousand times as long as most hold it
LOCK_SECONDS = 0.5  # the same, once room is being made for it, because that was not for nothing
LEAVE_DISK_S = 0.25  # after that was not enough, objects are read from disk without asking


class Reader:
    """Gets objects of one store into memory of this process."""

    def __init__(self, room: Room, threads: int, clock: Callable[[], float]) -> None:
        self._room = room
        self._clock = clock
        self._threads = threads
        self.closing = False  # what is not begun fails at once
        self._promote_after = 0.0
        self._pool = ThreadPoolExecutor(threads, "kvferry-store") if threads > 1 else None

    def get(
        self, keys: Sequence[str], wanted: Sequence[Wanted | None], deadline: float
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
            need = Wanted(parts, 0, length, length)
            if self.one(key, row, need, deadline) is Outcome.DONE:
                self._room.policy.touch(np.array([row]), self._clock())
                return into[:length].tobytes()
        return None

    def check_whole(self, row: int, deadline: float) -> Outcome:
        """Whether the object in this row is what was written, whatever its key."""
        return self.one(None, row, None, deadline)

    def one(self, key: str | None, row: int, need: Wanted | None, deadline: float) -> Outcome:
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

    def _serve_file(self, key: str | None, row: int, need: Wanted | None) -> Outcome:
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
