"""The index of the embedded store: one record per key, in memory that all processes share.

A record lies in one of two buckets of `WAYS` slots that its key's hash names; nothing else points
to it. So there is no table beside the records that a crash could leave behind: a lookup compares
the keys of sixteen slots, and a batch of lookups is a handful of NumPy calls without any lock.
Slots without an object stay as ghosts, the history that eviction learns from, until needed.

`state` is what a record is. All that it says is written before the state that says it, and the
state goes before what it said, so that a process that dies between any two stores leaves either
state. States with an owner (a member's number) are undone when the owner is dead:

    FREE       nothing                          GHOST      history only
    WRITING    bytes are coming, by the owner   -> GHOST
    MEMORY     an extent of the arena           DISK       a file           BOTH  either
    DEMOTING   in memory, on its way to disk    -> MEMORY
    PROMOTING  on disk, on its way to memory    -> DISK

`generation` changes when an extent is taken, and when it was given up. A reader that has copied and
still finds the object in memory, at the same offset and in the same generation, knows that nobody
wrote there meanwhile: also where who gave it up died before the generation changed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvferry.errors import StoreError
from kvferry.pool.embedded_header import HEADER_WORDS, MAX_GAPS, Header
from kvferry.pool.policy import LEARNED_FLOATS, History
from kvferry.private_files import open_private

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Words = NDArray[np.uint64]

FREE, GHOST, WRITING, MEMORY, DISK, BOTH, DEMOTING, PROMOTING = range(8)
OWNED = (WRITING, DEMOTING, PROMOTING)
_READABLE = np.isin(np.arange(256), (MEMORY, DISK, BOTH, DEMOTING, PROMOTING))  # of any byte
_IN_MEMORY = np.isin(np.arange(256), (MEMORY, BOTH, DEMOTING))
_NO_ROWS = np.empty(0, dtype=np.int64)

WAYS = 8  # 8 words of one cache line
MAGIC = 0x6B76_6665_7272_7901  # the last byte is the version of all that lies in the directory
_FIELDS: tuple[tuple[str, Any], ...] = (
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
    """What all processes must agree on; the first one to open the directory decides."""

    slots: int  # records, a power of two
    memory_bytes: int
    disk_bytes: int  # 0: no disk tier


def peek(path: Path) -> Geometry | None:
    """The sizes of a store that is there, without opening it."""
    try:
        fd = open_private(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return SharedIndex.read_geometry(fd)
    finally:
        os.close(fd)


def hash_keys(keys: Sequence[str]) -> tuple[Words, Words]:
    """128 bits of each key."""
    digests = b"".join(map(xxhash.xxh3_128_digest, map(str.encode, keys)))
    words = np.frombuffer(digests, dtype=">u8").reshape(-1, 2).astype(np.uint64)
    return words[:, 0].copy(), words[:, 1].copy()


def key_name(low: int, high: int) -> str:
    return f"{low:016x}{high:016x}"


def words_of(names: Sequence[str]) -> tuple[Words, Words]:
    """The hashes that `key_name` made these names of."""
    words = np.frombuffer(bytes.fromhex("".join(names)), dtype=">u8").reshape(-1, 2)
    return words[:, 0].astype(np.uint64), words[:, 1].astype(np.uint64)


class SharedIndex(Header):
    """The records, and what belongs to all: geometry, counters, gaps, what was learned."""

    def __init__(self, path: Path, wanted: Geometry, in_use: bool) -> None:
        """Open or create; the caller holds the store's lock.

        `in_use`: other processes have the store mapped, so that its files must not be cut.
        """
        fd = open_private(path)
        try:
            found = self.read_geometry(fd)
            self.created = found is None
            if self.created and in_use:
                raise StoreError(
                    f"{path} is damaged (it does not begin like an index), and other processes use "
                    "it; end them, and remove the store"
                )
            self.geometry = found or wanted
            size = self._bytes(self.geometry.slots)
            if self.created:
                os.ftruncate(fd, 0)  # whatever a dead creator left
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
        whole = np.frombuffer(self._map, dtype=np.uint8)
        super().__init__(whole[: HEADER_WORDS * 8].view(np.int64))
        at = HEADER_WORDS * 8
        self.learned = whole[at : at + LEARNED_FLOATS * 8].view(np.float64)
        at += LEARNED_FLOATS * 8
        self.gap_offset = whole[at : at + MAX_GAPS * 8].view(np.int64)
        self.gap_bytes = whole[at + MAX_GAPS * 8 : at + 2 * MAX_GAPS * 8].view(np.int64)
        at = -(-(at + 2 * MAX_GAPS * 8) // 64) * 64
        arrays: dict[str, Any] = {}
        for name, dtype in _FIELDS:
            size = self.geometry.slots * np.dtype(dtype).itemsize
            arrays[name] = whole[at : at + size].view(dtype)
            at += size
        self.low, self.high = arrays["low"], arrays["high"]
        self.offset, self.extent, self.length = (
            arrays["offset"],
            arrays["extent"],
            arrays["length"],
        )
        self.image_bytes = arrays["image_bytes"]
        self.generation, self.owner, self.state = (
            arrays["generation"],
            arrays["owner"],
            arrays["state"],
        )
        history = ("last", "first", "turns", "depth", "chain", "shared", "klass")
        self.history = History(**{name: arrays[name] for name in history})
        self._mask = np.uint64(self.geometry.slots // WAYS - 1)
        self._low_rows = self.low.reshape(-1, WAYS)
        if self.created:
            self._header[1:4] = (wanted.slots, wanted.memory_bytes, wanted.disk_bytes)

    def publish(self) -> None:
        """Everything is in place: from now on others may open it."""
        self._header[0] = MAGIC

    @staticmethod
    def _bytes(slots: int) -> int:
        record: int = sum(np.dtype(dtype).itemsize for _, dtype in _FIELDS)
        return HEADER_WORDS * 8 + LEARNED_FLOATS * 8 + 2 * MAX_GAPS * 8 + 64 + slots * record

    @classmethod
    def read_geometry(cls, fd: int) -> Geometry | None:
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
                "this directory holds a store of another version, a damaged one, or something "
                "else; name another directory, or remove it while no engine uses it"
            )
        return Geometry(slots, memory, disk)

    # --- records -----------------------------------------------------------------------------

    def find(self, low: Words, high: Words) -> Ints:
        """Row of each key, or -1. Needs no lock."""
        first = (low & self._mask).astype(np.int64)
        rows = self._in_bucket(first, low, high)
        missing = np.flatnonzero(rows < 0)
        if len(missing):
            second = self._second(first[missing], high[missing])
            rows[missing] = self._in_bucket(second, low[missing], high[missing])
        return rows

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

    def claim(self, low: Words, high: Words, now: float, batch: Ints = _NO_ROWS) -> Ints:
        """Slots for new, distinct keys as GHOST, in place of the oldest ghosts if need be.

        `batch` are rows of keys that came together with these, whose ghosts stay. -1 where all
        sixteen slots of a key hold objects. The caller holds the lock.
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

    def slots_of(self, low: Words, high: Words) -> Ints:
        """The sixteen slots in which each key may lie."""
        first = (low & self._mask).astype(np.int64)
        buckets = np.stack((first, self._second(first, high)), axis=1)
        slots = buckets[:, :, None] * WAYS + np.arange(WAYS)
        return np.asarray(slots.reshape(len(low), 2 * WAYS))

    def in_state(self, *states: int) -> Ints:
        return np.flatnonzero(self._any_of(states)).astype(np.int64)

    def _any_of(self, states: Sequence[int]) -> Bools:
        """Compares bytes, which costs a tenth of a table lookup for each.

        Each state is read once: owners change theirs without the lock (PROMOTING to BOTH, WRITING
        to MEMORY), and between two looks such a row could be in neither of them.
        """
        now = self.state.copy()
        chosen = now == states[0]
        for state in states[1:]:
            chosen |= now == state
        return np.asarray(chosen)

    def readable(self, rows: Ints) -> Bools:
        """Whether each row (or -1) has an object now."""
        return np.asarray(_READABLE[self.state[rows]] & (rows >= 0))

    def in_memory(self, state: int) -> bool:
        return bool(_IN_MEMORY[state])

    def has_object(self, state: int) -> bool:
        return bool(_READABLE[state])

    def with_extent(self) -> Ints:
        return self.in_state(WRITING, MEMORY, BOTH, DEMOTING, PROMOTING)

    def on_disk(self) -> Ints:
        return self.in_state(DISK, BOTH, PROMOTING)

    def objects(self) -> Ints:
        """All rows that have one."""
        return self.in_state(MEMORY, DISK, BOTH, DEMOTING, PROMOTING)

    def leave_memory(self, rows: Ints, state: int) -> None:
        """Give extents up: the state, then the generation; only then may they be reused.

        The other order would change the generation of what is still there, for whoever dies
        between: its demotion under way would no longer know it.
        """
        self.state[rows] = state
        self.generation[rows] += np.uint32(1)

    def close(self) -> None:
        """Drop the views; the mapping goes with the last of them."""
        for name in list(self.__dict__):
            if name not in ("geometry", "created"):
                delattr(self, name)
