# SPDX-License-Identifier: Apache-2.0
"""The index of the embedded store: one record per key, in memory that all processes share.

A record lies in one of two buckets of `WAYS` slots that its key's hash names; nothing else points
to it. So a crash leaves no table behind, and a batch of lookups is a handful of NumPy calls without
a lock. Slots without an object stay as ghosts, the history that eviction learns from, until needed.

`state` says what a record is. A process writes a record's fields before the state that makes them
valid, and changes the state before it drops them. So a process that dies between any two stores
leaves one of the two states. States with an owner (a member's number) are undone when the owner is
dead:

    FREE       nothing                          GHOST      history only
    WRITING    the owner writes its bytes       -> GHOST
    MEMORY     an extent of the arena           DISK       a file           BOTH  either
    DEMOTING   in memory, on its way to disk    -> MEMORY
    PROMOTING  on disk, on its way to memory    -> DISK

`generation` changes when an extent is taken, and when it is given up. A reader that has copied and
still finds the object in memory, at the same offset and in the same generation, knows that no
process wrote there meanwhile.

Locks are the kernel's, which drops them with the process. `SharedLock` is held while the index
changes: some 0.4 ms for a batch of 32 objects; longer in a large store with a disk tier, where
evictions look at all records. A process that dies with it leaves `dirty` set, and the next holder
mends the records, for which it looks at all slots (2 ms for two million). `Members` locks one byte
for each process that has the store open, so the kernel says whether an owner is alive; process ids
mean nothing across containers. Both are locks of open file descriptions, which a forked child would
keep when its parent is killed, so it closes them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvferry.errors import StoreError
from kvferry.pool.embedded.policy import LEARNED_FLOATS, History
from kvferry.pool.store import Bools, Ints
from kvferry.private_files import open_private

POPULATE_WRITE = 23  # of madvise
MOST_MAPPED_BYTES = 256 << 20  # an index up to this size is mapped when it is opened: 0.1 s
HEADER_WORDS = 512
MAX_GAPS = 1 << 15
COUNTERS = (
    "evicted",
    "demoted",
    "promoted",
    "dropped",  # evicted from the last tier
    "corrupt",
    "full",
    "declined",
    "disk_full",
    "mended",  # recoveries after a process died
    "hits",
    "misses",
    "puts",
)

ADOPT = 2  # in `files_due`: the disk tier's files are still to get records

Words = NDArray[np.uint64]

FREE, GHOST, WRITING, MEMORY, DISK, BOTH, DEMOTING, PROMOTING = range(8)
OWNED = (WRITING, DEMOTING, PROMOTING)
READABLE = (MEMORY, DISK, BOTH, DEMOTING, PROMOTING)
IN_MEMORY = (MEMORY, BOTH, DEMOTING)
WITH_EXTENT = (WRITING, MEMORY, BOTH, DEMOTING, PROMOTING)
WITH_FILE = (DISK, BOTH, PROMOTING)
AT_REST = (MEMORY, DISK, BOTH)  # no process works on it, so it may be evicted
NO_ROWS = np.empty(0, dtype=np.int64)
_IS_READABLE = np.isin(np.arange(256), READABLE)  # of any byte

SCAN_SLOTS = 1 << 17  # at a time: stays in a core's cache, which is up to five times as fast
WAYS = 8  # 8 words of one cache line
MAGIC = 0x6B76_6665_7272_7901  # the last byte is the version of all that lies in the directory
FIELDS: tuple[tuple[str, Any], ...] = (
    ("low", np.uint64),
    ("high", np.uint64),
    ("offset", np.int64),
    ("extent", np.int64),
    ("length", np.int64),
    ("image_bytes", np.int64),
    ("generation", np.uint32),
    ("owner", np.int32),
    ("state", np.uint8),
    ("last", np.float64),
    ("first", np.float64),
    ("turns", np.uint16),
    ("depth", np.uint16),
    ("chain", np.uint16),
    ("shared", np.uint16),
    ("klass", np.uint8),
)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes that all processes must agree on; the first one to open the directory decides."""

    slots: int  # records, a power of two
    memory_bytes: int
    disk_bytes: int  # 0: no disk tier


def peek(path: Path) -> Geometry | None:
    """The sizes of an existing store, without opening it. None: there is none."""
    try:
        fd = open_private(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(
            f"cannot read {path}: {error.strerror}; run this as the store's owner"
        ) from None
    try:
        return SharedIndex.read_geometry(fd, path)
    finally:
        os.close(fd)


def hash_keys(keys: Sequence[str]) -> tuple[Words, Words]:
    """128 bits of each key."""
    digests = b"".join(map(xxhash.xxh3_128_digest, map(str.encode, keys)))
    words = np.frombuffer(digests, dtype=">u8").reshape(-1, 2).astype(np.uint64)
    return words[:, 0].copy(), words[:, 1].copy()


def words_of(names: Sequence[str]) -> tuple[Words, Words]:
    """The hashes of keys, from names that `SharedIndex.names` made."""
    words = np.frombuffer(bytes.fromhex("".join(names)), dtype=">u8").reshape(-1, 2)
    return words[:, 0].astype(np.uint64), words[:, 1].astype(np.uint64)


class _Word:
    """A word of the header as an attribute. Another process may have written anything there, so
    reads are clamped to `least` and `most`."""

    def __init__(self, at: int, least: int = -(1 << 63), most: int = (1 << 63) - 1) -> None:
        self._at, self._least, self._most = at, least, most

    def __get__(self, index: SharedIndex, _: type | None = None) -> int:
        return min(max(int(index.header[self._at]), self._least), self._most)

    def __set__(self, index: SharedIndex, value: int) -> None:
        index.header[self._at] = value


class SharedIndex:
    """The records, and the state of the whole store: sizes, counters, gaps, learned rates."""

    # Words 0 to 3 are the magic number and the sizes, 4 and 5 the store's identity, 12 and 13 the
    # bar; counters follow from word 16 on. A process writes them with the lock, except for some
    # counters, which may miss a few.
    dirty = _Word(8)  # a process holds the lock, or died with it
    gaps = _Word(9, 0, MAX_GAPS)
    arena_bytes = _Word(10)  # bytes of the arena that are backed by memory
    gaps_stale = _Word(11)  # free memory may be missing from the gaps
    files_due = _Word(14, 0, ADOPT)  # 15 is of earlier versions

    low: Words
    high: Words
    offset: Ints
    extent: Ints
    length: Ints
    image_bytes: Ints
    generation: NDArray[np.uint32]
    owner: NDArray[np.int32]
    state: NDArray[np.uint8]

    def __init__(self, path: Path, wanted: Geometry, in_use: bool) -> None:
        """Open or create, with the store's lock. `in_use`: other processes have it mapped, so that
        its files must not be cut."""
        fd = open_private(path)
        try:
            found = self.read_geometry(fd, path)
            self.created = found is None
            if self.created and in_use:
                raise StoreError(
                    f"{path} is damaged (it does not begin like an index), and other processes use "
                    "it; end them, and remove the store"
                )
            self.geometry = found or wanted
            size = self._bytes(self.geometry.slots)
            if self.created:
                os.ftruncate(fd, 0)  # a dead creator may have left bytes
                try:
                    os.posix_fallocate(fd, 0, size)
                except OSError as error:
                    raise StoreError(
                        f"no room for an index of {size:,} bytes at {path}: {error}; give the "
                        "store a smaller capacity or another directory"
                    ) from error
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        # Map it now, or each new key costs a page fault in every array. Older kernels cannot.
        if size <= MOST_MAPPED_BYTES:
            with contextlib.suppress(OSError):
                self._map.madvise(POPULATE_WRITE)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        at = 0

        def take(count: int, dtype: Any) -> Any:
            nonlocal at
            first, at = at, at + count * np.dtype(dtype).itemsize
            return whole[first:at].view(dtype)

        self.header = take(HEADER_WORDS, np.int64)
        self.learned = take(LEARNED_FLOATS, np.float64)
        self.gap_offset = take(MAX_GAPS, np.int64)
        self.gap_bytes = take(MAX_GAPS, np.int64)
        at = -(-at // 64) * 64
        arrays = {name: take(self.geometry.slots, dtype) for name, dtype in FIELDS}
        self.history = History(**{f.name: arrays.pop(f.name) for f in fields(History)})
        vars(self).update(arrays)
        self._mask = np.uint64(self.geometry.slots // WAYS - 1)
        self._low_rows = self.low.reshape(-1, WAYS)
        if self.created:
            self.header[1:4] = (wanted.slots, wanted.memory_bytes, wanted.disk_bytes)

    def publish(self) -> None:
        """Everything is in place: other processes may open it now."""
        self.header[0] = MAGIC

    @staticmethod
    def _bytes(slots: int) -> int:
        record: int = sum(np.dtype(dtype).itemsize for _, dtype in FIELDS)
        return HEADER_WORDS * 8 + LEARNED_FLOATS * 8 + 2 * MAX_GAPS * 8 + 64 + slots * record

    @classmethod
    def read_geometry(cls, fd: int, path: Path) -> Geometry | None:
        head = os.pread(fd, 32, 0)
        if len(head) < 32:
            return None
        magic, slots, memory, disk = np.frombuffer(head, dtype=np.int64).tolist()
        if magic == 0:
            return None
        right = magic == MAGIC and slots >= 2 * WAYS and slots & (slots - 1) == 0
        right = right and memory > 0 and disk >= 0
        if not right or os.fstat(fd).st_size != cls._bytes(slots):
            raise StoreError(
                f"{path.parent} holds a store of another version, a damaged one, or something "
                "else; name another directory, or remove it while no engine uses it"
            )
        return Geometry(slots, memory, disk)

    @property
    def store_id(self) -> str:
        """This store's identity; made when it is first asked for, with the lock."""
        words = self.header[4:6]
        if not words.any():
            words[:] = np.frombuffer(os.urandom(16), dtype=np.int64)
        return str(words.tobytes().hex())

    @property
    def bar(self) -> tuple[float, float]:
        """The lowest score in memory when an object was last declined, and the time of that."""
        score, when = self.header[12:14].view(np.float64).tolist()
        return score, when

    @bar.setter
    def bar(self, value: tuple[float, float]) -> None:
        self.header[12:14].view(np.float64)[:] = value

    def count(self, name: str, by: int = 1) -> None:
        self.header[16 + COUNTERS.index(name)] += by

    def counters(self) -> dict[str, int]:
        return {name: int(self.header[16 + at]) for at, name in enumerate(COUNTERS)}

    # Records

    def find(self, low: Words, high: Words) -> Ints:
        """Row of each key, or -1. Needs no lock."""
        first = (low & self._mask).astype(np.int64)
        rows = self._in_bucket(first, low, high)
        missing = np.flatnonzero(rows < 0)
        if len(missing):
            second = self._second(first[missing], high[missing])
            rows[missing] = self._in_bucket(second, low[missing], high[missing])
        return rows

    def has(self, key: str) -> bool:
        """Whether one key has an object now: what `find` and `readable` say, without NumPy, whose
        calls take longer than this for a few keys."""
        low, high = divmod(xxhash.xxh3_128_intdigest(key.encode()), 1 << 64)
        mask = self.geometry.slots // WAYS - 1
        first, second = low & mask, high & mask
        for bucket in (first, second if second != first else second ^ 1):
            words = self._low_rows[bucket].tolist()
            if low in words:
                row = bucket * WAYS + words.index(low)
                state = int(self.state[row])
                if state != FREE and int(self.high[row]) == high:
                    return state in READABLE
        return False

    def _second(self, first: Ints, high: Words) -> Ints:
        """The other bucket, never the same one."""
        other = (high & self._mask).astype(np.int64)
        return np.where(other == first, other ^ 1, other)

    def _in_bucket(self, bucket: Ints, low: Words, high: Words) -> Ints:
        same = self._low_rows[bucket] == low[:, None]
        way = same.argmax(axis=1)
        rows = bucket * WAYS + way
        found = same[np.arange(len(rows)), way]
        found &= self.high[rows] == high
        found &= self.state[rows] != FREE
        return np.where(found, rows, -1)

    def claim(self, low: Words, high: Words, now: float, batch: Ints = NO_ROWS) -> Ints:
        """Slots for new, distinct keys as GHOST, in place of the oldest ghosts if need be; -1 where
        objects have all sixteen slots of a key. Needs the lock.

        batch  rows of keys in the same call; their ghosts stay
        """
        rows = np.full(len(low), -1, dtype=np.int64)
        left = np.arange(len(low))
        mine = batch
        while len(left):
            slots = self.slots_of(low[left], high[left])
            states = self.state[slots]
            cost = np.where(states == GHOST, self.history.last[slots], np.inf)
            empty = (states == FREE).reshape(len(left), 2, WAYS)
            # the emptier bucket, so that neither fills up long before the other
            room = np.repeat(empty.sum(axis=2), WAYS, axis=1)
            cost = np.where(states == FREE, -1e18 * (1 + room), cost)
            cost[np.isin(slots, mine)] = np.inf
            best = cost.argmin(axis=1)
            every = np.arange(len(left))
            possible = ~np.isinf(cost[every, best])
            left, chosen = left[possible], slots[every, best][possible]
            chosen, first = np.unique(chosen, return_index=True)  # two keys may want one slot
            winners = left[first]
            self.state[chosen] = FREE
            self.low[chosen], self.high[chosen] = low[winners], high[winners]
            for field in (self.offset, self.extent, self.length, self.image_bytes, self.owner):
                field[chosen] = 0
            self.history.forget(chosen, now)
            self.state[chosen] = GHOST
            rows[winners] = chosen
            mine = np.concatenate((mine, chosen))
            left = np.delete(left, first)
        return rows

    def names(self, rows: Ints) -> list[str]:
        """The hash of each record's key, as the name of its file."""
        pairs = zip(self.low[rows].tolist(), self.high[rows].tolist(), strict=True)
        return [f"{low:016x}{high:016x}" for low, high in pairs]

    def is_of(self, row: int, key: str) -> bool:
        """Whether this record is the key's; a ghost's slot may go to another key at any time."""
        (low,), (high,) = hash_keys([key])
        return bool(self.low[row] == low and self.high[row] == high)

    def slots_of(self, low: Words, high: Words) -> Ints:
        """The sixteen slots in which each key may lie."""
        first = (low & self._mask).astype(np.int64)
        buckets = np.stack((first, self._second(first, high)), axis=1)
        slots = buckets[:, :, None] * WAYS + np.arange(WAYS)
        return np.asarray(slots.reshape(len(low), 2 * WAYS))

    def in_state(self, *states: int) -> Ints:
        """Rows in any of these states. It looks at all slots, so not often with the lock.

        Each state is read once: owners change theirs without the lock (PROMOTING to BOTH, WRITING
        to MEMORY), and between two looks such a row could be in neither of them.
        """
        found = []
        for first in range(0, len(self.state), SCAN_SLOTS):
            now = self.state[first : first + SCAN_SLOTS].copy()
            chosen = now == states[0]  # comparing bytes costs a tenth of a table lookup for each
            for state in states[1:]:
                chosen |= now == state
            found.append(np.flatnonzero(chosen) + first)
        return np.concatenate(found).astype(np.int64, copy=False)

    def readable(self, rows: Ints) -> Bools:
        """Whether each row (or -1) has an object now."""
        return np.asarray(_IS_READABLE[self.state[rows]] & (rows >= 0))

    def leave_memory(self, rows: Ints, state: int) -> None:
        """Give extents up: the state, then the generation; only then may they be reused. In the
        other order, a process that dies between the two would hide an object from its demotion."""
        before = self.state[rows]
        held, written = np.isin(before, WITH_EXTENT), before != WRITING
        self.state[rows] = state
        self.generation[rows] += np.uint32(1)
        unused = self.extent[rows] - self.image_bytes[rows]
        if (held & written & ((unused < 0) | (unused >= mmap.PAGESIZE))).any():
            self.distrust_gaps()  # a damaged record could name other objects' memory
        elif held.any():
            self.add_gaps(self.offset[rows[held]], self.extent[rows[held]])

    def add_gaps(self, begin: Ints, size: Ints) -> None:
        """Add free memory to the gaps, and join those that touch. Needs the lock.

        If memory would be free twice, or lies outside of the arena, some record is damaged."""
        count = self.gaps
        begin = np.concatenate((self.gap_offset[:count], begin))
        end = begin + np.concatenate((self.gap_bytes[:count], size))
        order = np.argsort(begin, kind="stable")  # quick, because most are in order
        begin, end = begin[order], end[order]
        most = min(self.arena_bytes, self.geometry.memory_bytes)
        apart = begin[1:] - end[:-1]
        if begin[0] < 0 or end[-1] > most or (end <= begin).any() or (apart < 0).any():
            self.distrust_gaps()
            return
        first = np.concatenate((np.zeros(1, dtype=np.int64), np.flatnonzero(apart) + 1))
        begin, end = begin[first], end[np.append(first[1:], len(end)) - 1]
        self.set_gaps(begin, end - begin, stale=bool(self.gaps_stale))

    def set_gaps(self, begin: Ints, size: Ints, *, stale: bool) -> None:
        """Replace the gaps; of too many, keep the longest."""
        if len(begin) > MAX_GAPS:
            longest = np.argsort(size)[-MAX_GAPS:]
            begin, size, stale = begin[longest], size[longest], True
        self.distrust_gaps()  # this process may die between two of these lines
        self.gap_offset[: len(begin)] = begin
        self.gap_bytes[: len(begin)] = size
        self.gaps = len(begin)
        self.gaps_stale = stale

    def distrust_gaps(self) -> None:
        """Use none of the gaps until they are found again, from the records."""
        self.gaps, self.gaps_stale = 0, True

    def close(self) -> None:
        """Drop the views; the mapping goes with the last of them."""
        for name in list(self.__dict__):
            if name not in ("geometry", "created"):
                delattr(self, name)


MAX_MEMBERS = 4096  # processes that may have one store open at a time
FIRST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 1e-3
_BUSY = (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR)
_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux: type, whence, start, len, pid


class Locked:
    """A file on which this process, and no child of it, holds locks until `close`."""

    def __init__(self, path: Path) -> None:
        self._fd = open_private(path)
        _held.add(self)

    def _try_byte(self, number: int, kind: int) -> bool:
        """Whether one byte could be locked now. A lock of another kind is replaced in one step."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, self._flock(kind, number))
        except OSError as error:
            if error.errno not in _BUSY:
                raise
            return False
        return True

    @staticmethod
    def _flock(kind: int, number: int, count: int = 1) -> bytes:
        return _FLOCK.pack(kind, os.SEEK_SET, number, count, 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_held: weakref.WeakSet[Locked] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for one in list(_held):
        Locked.close(one)


os.register_at_fork(after_in_child=_let_go_in_child)


class SharedLock(Locked):
    """Mutual exclusion among threads and processes, with a deadline."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._threads = threading.Lock()
        self._owner_pid = os.getpid()

    @contextlib.contextmanager
    def held(self, deadline: float) -> Iterator[None]:
        """Raises `StoreError` if it is not free in time."""
        if os.getpid() != self._owner_pid:
            raise StoreError(
                "this store was opened before a fork; open it again in the new process"
            )
        if not self._threads.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise StoreError("the store is busy: another thread holds its lock past the deadline")
        try:
            self._acquire(deadline)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def _acquire(self, deadline: float) -> None:
        pause = FIRST_PAUSE_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in _BUSY:
                    raise StoreError(f"the store's lock cannot be taken: {error}") from error
            if time.monotonic() > deadline:
                raise StoreError(
                    "the store is busy: another process holds its lock past the deadline "
                    "(a stopped process? `fuser` on the lock file names it)"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def close(self) -> None:
        if os.getpid() != self._owner_pid:
            return  # a child's copy is closed already, and a thread of the parent may hold it
        with self._threads:
            super().close()


class Members(Locked):
    """The processes that have the store open; `me` is this one's number, from 1 on. The process
    that walks through the disk's files locks byte 0."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        for number in range(1, MAX_MEMBERS):
            if self._lock(number):
                self.me = number
                return
        self.close()
        raise StoreError(f"more than {MAX_MEMBERS - 1} processes have this store open")

    def _lock(self, number: int, kind: int = fcntl.F_WRLCK) -> bool:
        try:
            return self._try_byte(number, kind)
        except OSError:
            return False

    @contextlib.contextmanager
    def walking(self) -> Iterator[bool]:
        """Whether no other process walks through the files of the disk tier meanwhile."""
        alone = self._lock(0)
        try:
            yield alone
        finally:
            if alone:
                self._lock(0, fcntl.F_UNLCK)

    def alive(self, number: int) -> bool:
        """Whether the process with this number still lives."""
        if number == self.me:
            return True
        if not 0 < number < MAX_MEMBERS:
            return False
        return self._taken(self._flock(fcntl.F_WRLCK, number))

    def others(self) -> bool:
        """Whether any other process has the store open."""
        return self._taken(self._flock(fcntl.F_WRLCK, 1, MAX_MEMBERS))  # our own does not count

    def _taken(self, what: bytes) -> bool:
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, what)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


class Calls:
    """The calls into a store under way, each inside `with calls:`.

    A store that is closed takes no new calls, and waits some seconds for those under way. Bytes go
    to and from the mapping by address, so calls that are left then keep the mapping, and the
    member's lock, which says that their writer lives. The last of them closes the store's parts.
    The store's own threads count like calls, and see by `closing` that they should end.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self.closing = threading.Event()
        self._end: Callable[[], None] | None = None  # `close` has given up: the last call does it

    def __enter__(self) -> None:
        with self._changed:
            if self.closing.is_set():
                raise StoreError("the store is closed")
            self._running += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._running -= 1
            end = None
            if self.closing.is_set() and self._running == 0:
                end, self._end = self._end, None
                self._changed.notify_all()
        if end is not None:
            end()

    def close(self, seconds: float, end: Callable[[], None]) -> int:
        """Take no more calls, and wait at most this long for those under way. Returns how many are
        left. `end` runs once, when there are none: before this returns, or after the last call."""
        with self._changed:
            if self.closing.is_set():
                return 0
            self.closing.set()
            self._changed.wait_for(lambda: self._running == 0, seconds)
            left = self._running
            if left:
                self._end = end
                return left
        end()
        return 0
