# SPDX-License-Identifier: Apache-2.0
"""The tiers of one open store: which object gets an extent, and which objects make way for it.

`policy.py` decides what goes first; this module carries it out. An object is admitted only in place
of objects that the policy scores lower, else it is declined. With a disk tier it is always
admitted, because the objects that it displaces are not lost. Victims without a copy on disk are
written there first, without the lock: they stay readable until the file is in place. Victims are
also chosen without the lock, and checked again with it.

A process can die at any point. The lock goes with it; `dirty` says that the process held it; states
with an owner say what it was doing. `mend` undoes the work of dead owners, removes their files, and
finds the gaps again, from the records.

A living process may have to update the records (give extents back, remove a damaged object) while a
stopped process holds the lock. So the update is queued, and the next thread of this process that
gets the lock writes it first.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import StoreError
from kvferry.pool.embedded import index as ix
from kvferry.pool.embedded.arena import Arena
from kvferry.pool.embedded.disk import (
    BATCH_FILES,
    DISK_LINK,
    DiskOwner,
    DiskTier,
    own_directory,
)
from kvferry.pool.embedded.index import (
    ADOPT,
    LONGEST_PAUSE_S,
    Calls,
    Geometry,
    Members,
    SharedIndex,
    SharedLock,
)
from kvferry.pool.embedded.policy import ConversationPolicy, Floats
from kvferry.pool.store import Ints
from kvferry.private_files import private_directory

_log = logging.getLogger(__name__)

OPEN_SECONDS = 60.0
ADOPT_SECONDS = 5.0  # the first opener waits this long for records of files; others come later
UPDATE_SECONDS = 1.0  # wait for the lock, past a caller's deadline, to give back extents
SHORT_WAIT_S = 0.01  # a reader's wait for the lock: a hundred times as long as most hold it
REAP_SECONDS = 1.0  # between two looks for extents of dead processes, while objects can be evicted
PATIENCE_SECONDS = 0.5  # of a put while others write all objects that could make room for it
PATIENCE_PAUSE_S = 0.02  # between two looks, which take milliseconds of the lock in a large store
ROUNDS = 6  # tries to make room for one batch: others may take the freed memory
FEW_OBJECTS = 4096  # up to here, victims are looked for each time, and only as many as needed
BATCH_SHARE = 256  # beyond, at least this part of the memory is freed at a time
TURN_SECONDS = 2 * LONGEST_PAUSE_S  # without the lock: all that wait for it have looked by then
BAR_SECONDS = 1.0  # how long objects with a score below `bar` are declined without a search


@dataclass(slots=True, eq=False)
class Wish:
    """A wish for an extent, and its result."""

    row: int
    low: np.uint64  # the key, because a ghost's slot may be given away meanwhile
    high: np.uint64
    size: int  # bytes, a multiple of `arena.ALIGN`
    state: int  # of the row with the extent: WRITING or PROMOTING
    score: float = math.inf  # by the policy; infinity is never declined
    offset: int = -1  # of the extent that was granted
    declined: bool = False  # worth less than the objects in memory

    @property
    def before(self) -> int:
        """The row's state before the grant, and again if the extent is given back."""
        return ix.GHOST if self.state == ix.WRITING else ix.DISK


class Tiers:
    """One process's open files of one store, and the lock that allows changes."""

    def __init__(
        self,
        directory: Path,
        wanted: Geometry,
        disk: Path | None,
        clock: Callable[[], float],
        calls: Calls,
    ) -> None:
        private_directory(directory)
        self.clock, self.calls = clock, calls
        self._reap_at = 0.0
        self._updates: deque[Callable[[], None]] = deque()  # of the records, still to be written
        with contextlib.ExitStack() as undo:  # a process that is refused leaves nothing open
            self.lock = SharedLock(directory / "lock")
            undo.callback(self.lock.close)
            with self.lock.held(time.monotonic() + OPEN_SECONDS):
                self._open(directory, wanted, disk, undo)
            self._opened = undo.pop_all()
        if self.disk is not None:
            self.disk.begin()
            if self.index.created:  # all files of a small tier get their records here
                self.disk.wait(ADOPT_SECONDS)

    def _open(
        self, directory: Path, wanted: Geometry, disk: Path | None, undo: contextlib.ExitStack
    ) -> None:
        self.members = Members(directory / "members")
        undo.callback(self.members.close)
        in_use = self.members.others()
        self.index = index = SharedIndex(directory / "index", wanted, in_use)
        undo.callback(index.close)
        self.policy = ConversationPolicy(index.history, index.learned)
        self.arena = Arena(directory / "arena", index)
        undo.callback(self.arena.close)
        if not index.created:
            disk = own_directory(directory, disk, in_use) if index.geometry.disk_bytes else None
        self.disk: DiskTier | None = None
        if disk is not None:
            private_directory(disk)
            owner = DiskOwner(disk)
            undo.callback(owner.close)
            owner.take(index.store_id, directory, self.members.others)
            self.disk = DiskTier(disk, index, self.members, self.clock, self.calls, self.locked)
        if index.created:
            self.policy.reset()
            link = directory / DISK_LINK  # for processes that open the store later
            link.unlink(missing_ok=True)
            if disk is not None and self.disk is not None:
                self.disk.clean()
                index.files_due = ADOPT
                link.symlink_to(disk.absolute())
            index.publish()
        else:
            was, index.dirty = index.dirty, True
            self._undo({self.members.me})  # of a dead process that had this number
            index.dirty = was  # another process may have died with the lock before

    def close(self) -> None:
        """After the last call."""
        self.disk = None  # it refers to this object: a cycle would keep the mappings
        self._updates.clear()  # the same; the next process undoes the work of members that are gone
        self._opened.close()

    # The right to change the records

    @contextlib.contextmanager
    def locked(self, deadline: float, seconds: float = math.inf) -> Iterator[None]:
        """Hold the lock; wait for it until the deadline, and at most `seconds`. If its last holder
        died, the records are mended first."""
        with self.lock.held(min(deadline, time.monotonic() + seconds)):
            if self.index.dirty:
                self.mend()
            self.index.dirty = True
            while self._updates:
                self._updates.popleft()()
            yield  # an exception leaves `dirty` set, and the next holder mends the records
            self.index.dirty = False

    def mend(self) -> None:
        self.index.count("mended")
        self._undo(self.dead_owners(self.index.in_state(*ix.OWNED)))

    def dead_owners(self, rows: Ints) -> set[int]:
        """The owners of these records whose processes are gone."""
        owners = np.unique(self.index.owner[rows]).tolist()
        return {owner for owner in owners if not self.members.alive(owner)}

    def _undo(self, gone: set[int]) -> None:
        """Undo the unfinished work of these owners."""
        index = self.index
        rows = index.in_state(*ix.OWNED)
        rows = rows[np.isin(index.owner[rows], list(gone))]
        states = index.state[rows].copy()
        if self.disk is not None:
            self._undo_demotions(self.disk, rows[states == ix.DEMOTING])
            self.disk.clean(gone.__contains__)
        index.leave_memory(rows[states == ix.PROMOTING], ix.DISK)
        index.leave_memory(rows[states == ix.WRITING], ix.GHOST)
        index.leave_memory(np.flatnonzero(index.state > ix.PROMOTING), ix.GHOST)  # damaged
        self.arena.find_gaps()

    def _undo_demotions(self, disk: DiskTier, rows: Ints) -> None:
        """Back to memory, which still has the objects."""
        # the files first: if this process dies between, the rows are undone again
        disk.remove(self.index.names(rows))
        self.index.state[rows] = ix.MEMORY

    def _reap(self, deadline: float, seconds: float, *, now: bool = False) -> bool:
        """Free the extents of processes that died outside of the lock. Returns whether any died."""
        if not now and time.monotonic() < self._reap_at:
            return False
        self._reap_at = time.monotonic() + REAP_SECONDS
        if not self.dead_owners(self.index.in_state(*ix.OWNED)):
            return False
        with self.locked(deadline, seconds):
            self.mend()
        return True

    def _update(self, write: Callable[[], None], deadline: float) -> None:
        """Write to the records now, or first of all when this process next has the lock."""
        self._updates.append(write)
        try:
            with self.locked(deadline):
                pass
        except StoreError as error:
            _log.warning("the store's records are updated later: %s", error)

    def settle(self) -> None:
        """Write queued updates if the lock is free now. A process that only reads takes the lock
        for nothing else."""
        if self._updates:
            with contextlib.suppress(StoreError), self.locked(time.monotonic()):
                pass

    # Coming in

    def reserve(self, wishes: list[Wish], deadline: float, lock_seconds: float = math.inf) -> None:
        """Reserve extents for as many wishes as possible, the most valuable first.

        lock_seconds  longest wait for the lock, each time, of a caller that can do without extents
        """
        pending = [wish for wish in wishes if wish.size <= self.arena.capacity]
        stuck, doubt, quiet = 0, False, False
        patience = time.monotonic() + (PATIENCE_SECONDS if math.isinf(lock_seconds) else 0.0)
        try:
            while pending:
                before, sizes = len(pending), [wish.size for wish in pending]
                backed = self.arena.grow(sum(sizes), min(sizes))
                with self.locked(deadline, lock_seconds):
                    self.arena.take_backed(backed)
                    pending = self._take(pending, doubt)
                can_grow = self.arena.can_grow()  # others may have taken the memory meanwhile
                stuck = stuck + 1 if len(pending) == before and not can_grow else 0
                if not pending or stuck > ROUNDS or time.monotonic() > deadline:
                    break
                if can_grow or self._reap(deadline, lock_seconds):  # before evicting objects
                    continue
                victims = self._choose(pending, in_a_row=stuck > 1)
                pending = [wish for wish in pending if not wish.declined]
                if len(victims):
                    self.evict_rows(victims, deadline, lock_seconds)
                    quiet = False
                elif not pending:
                    break
                elif doubt and not self._reap(deadline, lock_seconds, now=True):
                    others_work = self._others_work()
                    if time.monotonic() > patience or (quiet and not others_work):
                        break
                    quiet, stuck = not others_work, 0
                    if others_work:  # else they may just have ended: look once more
                        time.sleep(PATIENCE_PAUSE_S)
                doubt = stuck > 1 or len(victims) == 0
        except BaseException:
            self.abandon([wish for wish in wishes if wish.offset >= 0])
            raise

    def _others_work(self) -> bool:
        """Whether another process writes to extents, which may be evicted in a moment."""
        owners = self.index.owner[self.index.in_state(*ix.OWNED)]
        return bool((owners != self.members.me).any())

    def _take(self, wishes: list[Wish], doubt: bool) -> list[Wish]:
        """Take extents for the wishes whose rows no other writer has taken meanwhile. Returns the
        wishes that got none.

        doubt  the gaps should be long enough; if they are not, look at the records again
        """
        index = self.index
        rows = np.array([wish.row for wish in wishes], dtype=np.int64)
        same = index.low[rows] == np.array([wish.low for wish in wishes], dtype=np.uint64)
        same &= index.high[rows] == np.array([wish.high for wish in wishes], dtype=np.uint64)
        same &= index.state[rows] == np.array([wish.before for wish in wishes], dtype=np.uint8)
        left = self._fill([wish for wish, is_same in zip(wishes, same, strict=True) if is_same])
        if left and (doubt or index.gaps_stale):
            self.arena.find_gaps()
            left = self._fill(left)
        return left

    def _fill(self, wishes: list[Wish]) -> list[Wish]:
        """Take one free extent for all wishes, in their order, so that one copy moves many objects.
        If no gap is that long, fill gap after gap, the most valuable wishes first. Returns the
        wishes that got none."""
        left = list[Wish]()
        total = sum(wish.size for wish in wishes)
        offset = self.arena.take(total) if 0 < total <= self.arena.capacity else -1
        if offset >= 0:
            self._grant(wishes, offset)
            return left
        too_long = self.arena.capacity + 1  # no gap has this size
        wishes.sort(key=lambda wish: -wish.score)
        ends = np.cumsum([wish.size for wish in wishes])
        first = done = 0
        while first < len(wishes):
            size = wishes[first].size
            room = self.arena.room(size) if size < too_long else 0
            last = int(np.searchsorted(ends, done + room, side="right"))
            if last == first:
                too_long = min(too_long, size)
                left.append(wishes[first])
                last = first + 1
            else:
                offset = self.arena.take(int(ends[last - 1]) - done)
                self._grant(wishes[first:last], offset)
            first, done = last, int(ends[last - 1])
        return left

    def _grant(self, wishes: list[Wish], offset: int) -> None:
        """Give these the memory from `offset` on, one after another."""
        index = self.index
        rows = np.array([wish.row for wish in wishes], dtype=np.int64)
        sizes = np.array([wish.size for wish in wishes], dtype=np.int64)
        offsets = offset + np.cumsum(sizes) - sizes
        index.generation[rows] += np.uint32(1)  # the last owner may have died before it did this
        index.offset[rows], index.extent[rows] = offsets, sizes
        index.owner[rows] = self.members.me
        index.state[rows] = np.array([wish.state for wish in wishes], dtype=np.uint8)
        for wish, at in zip(wishes, offsets.tolist(), strict=True):
            wish.offset = at

    def _choose(self, wishes: list[Wish], *, in_a_row: bool) -> Ints:
        """The objects to evict for these wishes. Wishes that are worth less are declined, unless
        evicted objects go to disk, and are not lost."""
        index, now = self.index, self.clock()
        may_decline = self.disk is None
        bar, when = index.bar
        if may_decline and 0 <= now - when < BAR_SECONDS:
            for wish in wishes:
                wish.declined = wish.score < bar
            wishes = [wish for wish in wishes if not wish.declined]
        rows = index.in_state(ix.MEMORY, ix.BOTH) if wishes else ix.NO_ROWS
        if len(rows) == 0:
            return rows
        scores = self.policy.scores(rows, now)
        if in_a_row:  # enough was freed, but no gap is long enough
            return self.arena.cheapest_window(wishes[0].size, rows, scores)
        need = np.cumsum([wish.size for wish in wishes])
        goal = int(need[-1])
        if len(rows) > FEW_OBJECTS:
            goal = max(goal, self.arena.capacity // BATCH_SHARE)
        order = _lowest(scores, index.extent[rows], goal)
        freed = np.cumsum(index.extent[rows[order]])
        if may_decline:
            last = np.minimum(np.searchsorted(freed, need), len(order) - 1)
            for wish, score in zip(wishes, scores[order[last]].tolist(), strict=True):
                wish.declined = wish.score <= score
            if any(wish.declined for wish in wishes):
                if len(rows) > FEW_OBJECTS:
                    index.bar = (float(scores[order[0]]), now)
                goal = sum(wish.size for wish in wishes if not wish.declined)
        count = min(int(np.searchsorted(freed, goal)) + 1, len(order)) if goal else 0
        return np.asarray(rows[order[:count]])

    def evict_rows(self, rows: Ints, deadline: float, lock_seconds: float = math.inf) -> None:
        """Evict these from memory, to disk if there is a disk tier."""
        index, disk = self.index, self.disk
        with self.locked(deadline, lock_seconds):
            rows = rows[np.isin(index.state[rows], (ix.MEMORY, ix.BOTH))]
            index.count("evicted", len(rows))
            index.leave_memory(rows[index.state[rows] == ix.BOTH], ix.DISK)
            lost = down = rows[index.state[rows] == ix.MEMORY]
            if disk is not None:
                down = self._fit(disk, down)
                index.owner[down] = self.members.me
                index.state[down] = ix.DEMOTING
                lost = lost[~np.isin(lost, down)]
            index.leave_memory(lost, ix.GHOST)
            index.count("dropped", len(lost))
        if disk is not None and len(down):
            self._demote(disk, down, deadline)

    def _fit(self, disk: DiskTier, coming: Ints) -> Ints:
        """Remove the least valuable files to make room. Returns the part of `coming` that fits."""
        index = self.index
        over = disk.used() + int(index.image_bytes[coming].sum()) - index.geometry.disk_bytes
        if over <= 0:
            return coming
        files = index.in_state(ix.DISK, ix.BOTH)
        rows = np.concatenate((coming, files))
        losers = self._least_valuable(rows, over)
        gone = losers[np.isin(losers, files)]
        names = index.names(gone)
        both = index.state[gone] == ix.BOTH
        index.state[gone[both]] = ix.MEMORY
        index.leave_memory(gone[~both], ix.GHOST)
        index.count("dropped", int((~both).sum()))
        disk.remove(names)
        return np.asarray(coming[~np.isin(coming, losers)])

    def _demote(self, disk: DiskTier, rows: Ints, deadline: float) -> None:
        """Write these to disk, without the lock, and then give their extents up."""
        index = self.index
        generation = index.generation[rows].copy()
        names = index.names(rows)
        ok = np.zeros(len(rows), dtype=bool)
        ended = False

        def is_mine(at: int | slice) -> Any:
            row = rows[at]
            mine = (index.state[row] == ix.DEMOTING) & (index.owner[row] == self.members.me)
            return mine & (index.generation[row] == generation[at])

        def write() -> None:
            mine = is_mine(slice(None))
            if ended:
                index.leave_memory(rows[mine & ok], ix.DISK)
                index.leave_memory(rows[mine & ~ok], ix.GHOST)
                index.count("demoted", int((mine & ok).sum()))
                index.count("disk_full", int((mine & ~ok).sum()))
                index.count("dropped", int((mine & ~ok).sum()))
            else:
                self._undo_demotions(disk, rows[mine])
            # objects that were removed meanwhile; not those that came back and went down again
            disk.remove_unrecorded([names[at] for at in np.flatnonzero(~mine).tolist()])

        try:
            for at, name in enumerate(names):
                row = int(rows[at])
                image = self.arena.view(int(index.offset[row]), int(index.image_bytes[row]))
                # past the deadline the rest is dropped: memory must not stay half-freed
                in_time = time.monotonic() <= deadline
                whole = len(image) > 0  # a record whose extent is outside of the arena is dropped
                ok[at] = whole and in_time and disk.write(name, image, partial(is_mine, at))
            ended = True
        finally:
            self._update(write, time.monotonic() + UPDATE_SECONDS)

    def claim(self, low: ix.Words, high: ix.Words, batch: Ints) -> Ints:
        """Like `SharedIndex.claim`, but if objects have all sixteen slots of a key, the least
        valuable one is removed from all tiers. -1 if none can be removed."""
        index, now = self.index, self.clock()
        rows = index.claim(low, high, now, batch)
        while len(left := np.flatnonzero(rows < 0)):
            slots = index.slots_of(low[left], high[left])
            taken = np.concatenate((batch, rows[rows >= 0]))
            may_go = np.isin(index.state[slots], ix.AT_REST)
            may_go &= ~np.isin(slots, taken)
            scores = self.policy.scores(slots.ravel(), now).reshape(slots.shape)
            worst = np.where(may_go, scores, np.inf).argmin(axis=1)
            every = np.arange(len(left))
            victims = np.unique(slots[every, worst][may_go[every, worst]])
            if len(victims) == 0:
                break
            self._drop(victims)
            index.count("evicted", len(victims))
            index.count("dropped", len(victims))
            rows[left] = index.claim(low[left], high[left], now, taken)
        return rows

    def abandon(self, wishes: list[Wish]) -> None:
        """Give back extents that this process was granted and did not fill."""
        if not wishes:
            return
        rows = np.array([wish.row for wish in wishes], dtype=np.int64)
        write = partial(self.index.leave_memory, rows, wishes[0].before)
        self._update(write, time.monotonic() + UPDATE_SECONDS)

    # Leaving all tiers

    def give_up(self, rows: Ints, deadline: float) -> int:
        """Remove the objects that these records have now. Returns how many were removed.

        Removing a million files takes a minute. So it is done in parts, and others get the lock
        between them."""
        generation, count = self.index.generation[rows].copy(), 0
        for first in range(0, len(rows), BATCH_FILES):
            if first:
                time.sleep(TURN_SECONDS)
            part = slice(first, first + BATCH_FILES)
            with self.locked(deadline):
                count += self._drop_same(rows[part], generation[part])
        return count

    def evict(self, size: int, deadline: float) -> int:
        """Remove the least valuable objects of all tiers, `size` bytes or more; return how many."""
        rows = self._least_valuable(self.index.in_state(*ix.AT_REST), size)
        count = self.give_up(rows, deadline) if size > 0 else 0
        self.index.count("dropped", count)
        return count

    def discard(self, row: int, generation: int, deadline: float) -> None:
        """Remove a damaged object, now or as soon as the lock is free."""

        def write() -> None:
            generations = np.array([generation], dtype=np.uint32)
            if self._drop_same(np.array([row]), generations):
                self.index.distrust_gaps()  # its record may have named another object's memory
                self.index.count("corrupt")
                _log.error("a damaged object is removed (record %d)", row)

        self._update(write, min(deadline, time.monotonic() + SHORT_WAIT_S))

    def clear(self, deadline: float) -> int:
        """Remove all objects, and all files of the store, also those without a record."""
        index = self.index
        if self.disk is not None:
            with self.locked(deadline):
                index.files_due = 0  # no more files get records
        self._reap(deadline, math.inf, now=True)  # objects that a dead process works on would stay
        count = self.give_up(index.in_state(*ix.READABLE), deadline)
        if self.disk is not None:
            self.disk.sweep_now(deadline)
        return count

    def _least_valuable(self, rows: Ints, goal: int) -> Ints:
        """The least valuable of these objects, `goal` bytes or more if there are as many."""
        sizes = self.index.image_bytes[rows]
        order = _lowest(self.policy.scores(rows, self.clock()), sizes, goal)
        count = int(np.searchsorted(np.cumsum(sizes[order]), goal)) + 1
        return np.asarray(rows[order[:count]])

    def _drop_same(self, rows: Ints, generation: NDArray[np.uint32]) -> int:
        """Remove objects that are still of this generation. Returns how many were."""
        index = self.index
        same = index.readable(rows) & (index.generation[rows] == generation)
        same &= index.state[rows] != ix.PROMOTING  # the owner still writes to the extent
        self._drop(rows[same])
        return int(same.sum())

    def _drop(self, rows: Ints) -> None:
        index = self.index
        states = index.state[rows]
        names = index.names(rows[np.isin(states, (ix.DISK, ix.BOTH))])
        index.leave_memory(rows, ix.GHOST)
        if self.disk is not None:  # the writers of those that are DEMOTING remove their files
            self.disk.remove(names)


def _lowest(scores: Floats, sizes: Ints, goal: int) -> Ints:
    """Indices by rising score, enough of them for `goal` bytes, or all."""
    mean = max(1, int(sizes.sum()) // max(1, len(sizes)))
    count = 3 * goal // (2 * mean) + 16
    while count < len(scores):
        some = np.argpartition(scores, count - 1)[:count]
        if int(sizes[some].sum()) >= goal:
            return np.asarray(some[np.argsort(scores[some], kind="stable")])
        count *= 4
    return np.asarray(np.argsort(scores, kind="stable"))
