"""Which files the disk tier has: its capacity, what a new index takes in, what nobody owns.

Records say which files there are, and count: also those that are on their way (DEMOTING), whoever
writes them. A file that no record names takes room that nobody knows of. There are two kinds:

    ADOPT  a new index (the host was restarted) finds the files of the one before, and takes them in
    SWEEP  somebody was killed between a record's change and its file's removal, and they go

Either is a walk through the directory, which may take minutes, so a thread does it beside the
store's work: it reads without the lock, and holds it for one batch at a time, in which it looks at
the records again. Which walk is due, and who is at it, lies in the index; where that one dies,
another process begins again, and passes quickly over what has its record by then. The thread is one
of the store's `Calls`.

All but `begin`, `wait` and `sweep_now` needs the store's lock.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import StoreError
from kvferry.pool import embedded_index as ix
from kvferry.pool.embedded_calls import Calls
from kvferry.pool.embedded_disk import DiskTier
from kvferry.pool.embedded_header import ADOPT, NOTHING, SWEEP
from kvferry.pool.embedded_image import Image
from kvferry.pool.embedded_index import SharedIndex, hash_keys, key_name, words_of
from kvferry.pool.embedded_lock import Members
from kvferry.pool.policy import ConversationPolicy

_log = logging.getLogger(__name__)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Locked = Callable[[float], AbstractContextManager[None]]

BATCH_FILES = 512  # in one hold of the lock: a few milliseconds
LOCK_SECONDS = 1.0  # for each try of a walk, so that `close` need not wait long
HAS_FILE = (ix.DISK, ix.BOTH, ix.PROMOTING, ix.DEMOTING)  # or will have


class Files:
    """The disk tier's side of the records."""

    def __init__(
        self,
        index: SharedIndex,
        disk: DiskTier,
        members: Members,
        policy: ConversationPolicy,
        clock: Callable[[], float],
        locked: Locked,
        calls: Calls,
    ) -> None:
        self._index, self._disk, self._members = index, disk, members
        self._policy, self._clock, self._locked = policy, clock, locked
        self._calls = calls
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    # --- the books -----------------------------------------------------------------------------

    def fit(self, coming: Ints) -> Ints:
        """Remove the least valuable files to make room; which of `coming` are worth their place."""
        index = self._index
        over = self._used() + int(index.image_bytes[coming].sum()) - index.geometry.disk_bytes
        if over <= 0:
            return coming
        files = index.in_state(ix.DISK, ix.BOTH)
        rows = np.concatenate((coming, files))
        size = index.image_bytes[rows]
        order = lowest(self._policy.scores(rows, self._clock()), size, over)
        count = min(int(np.searchsorted(np.cumsum(size[order]), over)) + 1, len(order))
        losers = rows[order[:count]]
        gone = losers[np.isin(losers, files)]
        names = self._names(gone)
        both = index.state[gone] == ix.BOTH
        index.state[gone[both]] = ix.MEMORY
        index.leave_memory(gone[~both], ix.GHOST)
        index.count("dropped", int((~both).sum()))
        self._remove(names)
        return np.asarray(coming[~np.isin(coming, losers)])

    def drop(self, rows: Ints) -> None:
        """Objects out of all tiers."""
        index = self._index
        states = index.state[rows]
        names = self._names(rows[np.isin(states, (ix.DISK, ix.BOTH))])
        coming = bool((states == ix.DEMOTING).any())
        index.leave_memory(rows, ix.GHOST)
        if coming:  # their writer removes the files, unless it dies first
            self.say_due(SWEEP)
        self._remove(names)

    def undo_demotions(self, rows: Ints) -> None:
        """Of the dead, or that failed: back to memory, which still has them."""
        self._remove(self._names(rows))  # first: who dies here leaves rows that are undone again
        self._index.state[rows] = ix.MEMORY

    def remove_unrecorded(self, names: Sequence[str]) -> None:
        if names:
            none = ~self._recorded(*words_of(names))
            self._remove(list(itertools.compress(names, none.tolist())))

    def say_due(self, what: int) -> None:
        self._index.files_due = max(self._index.files_due, what)

    def _used(self) -> int:
        return int(self._index.image_bytes[self._index.in_state(*HAS_FILE)].sum())

    def _names(self, rows: Ints) -> list[str]:
        low, high = self._index.low[rows].tolist(), self._index.high[rows].tolist()
        return [key_name(a, b) for a, b in zip(low, high, strict=True)]

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._disk.remove(name)

    def _recorded(self, low: ix.Words, high: ix.Words) -> Bools:
        rows = self._index.find(low, high)
        return np.asarray((rows >= 0) & np.isin(self._index.state[rows], HAS_FILE))

    # --- walks ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """See to what is due, beside everything else, unless somebody who lives is at it."""
        index = self._index
        if index.files_due == NOTHING and not index.files_by:
            return
        with self._starting:
            by = index.files_by
            if (self._thread and self._thread.is_alive()) or (by and self._members.alive(by)):
                return
            self._thread = self._calls.beside(self._walks, "kvferry-files")

    def wait(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)

    def sweep_now(self, deadline: float) -> None:
        """Whatever no record names goes, also what was to be taken in."""
        for batch in _batches(self._disk.names(tell=False)):
            self._sweep(batch, deadline)

    def _walks(self) -> None:
        """Until nothing is due; also after a lock that could not be had, because the next who needs
        room may be long in coming."""
        while not self._calls.closing.is_set():
            try:
                self._walks_in_turn()
                return
            except StoreError as error:
                _log.warning("disk tier: the walk through its files waits: %s", error)
            except Exception:
                _log.exception("disk tier: the walk through its files failed")
                return
            finally:
                self._let_go(self._members.me)
            self._calls.closing.wait(LOCK_SECONDS)

    def _walks_in_turn(self) -> None:
        index, me = self._index, self._members.me
        while not self._calls.closing.is_set():
            with self._locked(time.monotonic() + LOCK_SECONDS):
                by = index.files_by
                if by not in (0, me):
                    if self._members.alive(by):
                        return
                    self.say_due(SWEEP)  # who died at it had said that it was done with
                due = index.files_due
                if due == NOTHING:
                    index.files_by = 0
                    return
                index.files_by = me
                if due == SWEEP:  # what falls due from now on is another walk
                    index.files_due = NOTHING
                    writers = self._disk.writers()  # nobody becomes a member without the lock
                    self._disk.clean({n for n in writers if not self._members.alive(n)})
            whole = self._walk(due)
            with self._locked(time.monotonic() + LOCK_SECONDS):
                index.files_by = 0
                if due == SWEEP and not whole:
                    self.say_due(SWEEP)
                elif due == ADOPT and whole and index.files_due == ADOPT:
                    index.files_due = SWEEP  # of those who died meanwhile

    def _let_go(self, me: int) -> None:
        index = self._index
        if index.files_by == me:
            index.files_due = max(index.files_due, SWEEP)
            index.files_by = 0  # one word, which nobody else writes while this member lives

    def _walk(self, due: int) -> bool:
        """Whether it came to the end."""
        step = self._adopt if due == ADOPT else self._sweep
        for batch in _batches(self._disk.names(tell=due == ADOPT)):
            if self._calls.closing.is_set() or not step(batch, time.monotonic() + LOCK_SECONDS):
                return False
        return True

    def _sweep(self, names: list[str], deadline: float) -> bool:
        low, high = words_of(names)
        without = itertools.compress(names, (~self._recorded(low, high)).tolist())
        lost = [name for name in without if self._disk.is_ours(name)]
        if lost:
            with self._locked(deadline):
                self.remove_unrecorded(lost)
        return True

    def _adopt(self, names: list[str], deadline: float) -> bool:
        """Take in whole files of this batch up to the capacity; False where that is off."""
        index, disk = self._index, self._disk
        new = list(itertools.compress(names, (~self._recorded(*words_of(names))).tolist()))
        images = [disk.header(name) for name in new]
        right = [
            image is not None and _is_named(image, n) for n, image in zip(new, images, strict=True)
        ]
        bad = [n for n, ok in zip(new, right, strict=True) if not ok and disk.is_ours(n)]
        whole = [
            (n, i) for n, i, ok in zip(new, images, right, strict=True) if ok and i is not None
        ]
        with self._locked(deadline):
            if index.files_due != ADOPT:
                return False
            self.remove_unrecorded(bad)
            if not whole:
                return True
            kept = [name for name, _ in whole]
            low, high = words_of(kept)
            rows = index.find(low, high)
            state = np.where(rows >= 0, index.state[rows], ix.FREE)
            size = np.array([i.header_bytes + i.length for _, i in whole], dtype=np.int64)
            # those that are in memory by now, or on their way, have no use for an old file
            fits = np.isin(state, (ix.FREE, ix.GHOST))
            fits &= _within(np.where(fits, size, 0), index.geometry.disk_bytes - self._used())
            fresh = fits & (rows < 0)
            rows[fresh] = index.claim(low[fresh], high[fresh], self._clock(), rows[rows >= 0])
            fits &= rows >= 0
            taken = rows[fits]
            index.length[taken] = np.array([i.length for _, i in whole], dtype=np.int64)[fits]
            index.image_bytes[taken] = size[fits]
            index.state[taken] = ix.DISK
            self.remove_unrecorded(kept)
        return True


def lowest(scores: Floats, sizes: Ints, goal: int) -> Ints:
    """Indices by rising score, enough of them for `goal` bytes where there are enough."""
    count = int(goal / max(float(sizes.mean()), 1.0) * 1.5) + 16
    while count < len(scores):
        some = np.argpartition(scores, count - 1)[:count]
        if int(sizes[some].sum()) >= goal:
            return np.asarray(some[np.argsort(scores[some], kind="stable")])
        count *= 4
    return np.asarray(np.argsort(scores, kind="stable"))


def _within(sizes: Ints, room: int) -> Bools:
    """Which of these, in turn, find room."""
    fits = np.zeros(len(sizes), dtype=bool)
    for at, size in enumerate(sizes.tolist()):
        if size <= room:
            fits[at] = True
            room -= size
    return fits


def _is_named(image: Image, name: str) -> bool:
    (low,), (high,) = hash_keys([image.key])
    return name == key_name(int(low), int(high))


def _batches(names: Iterator[str]) -> Iterator[list[str]]:
    while batch := list(itertools.islice(names, BATCH_FILES)):
        yield batch
