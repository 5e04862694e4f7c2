"""Room in the embedded store: who gets an extent, and who must make way.

An object comes in only in place of objects that the policy holds worth less, else it is declined;
with a disk tier it always comes in, because what it displaces is not lost. Victims without a copy
on disk are written there first, outside of the lock: they stay readable until the file is in place.
Victims are chosen without the lock too, and looked at again under it.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.pool.embedded import index as ix
from kvferry.pool.embedded import opened
from kvferry.pool.embedded.arena import ALIGN
from kvferry.pool.embedded.disk import DiskTier, Files, lowest
from kvferry.pool.embedded.index import SWEEP, key_name
from kvferry.pool.embedded.opened import Opened

# --------------------------------------------------------------------------------------------------
# What leaves the embedded store: objects that nobody wants or can trust, and unused extents.
#
# What a process was granted and cannot use, because it failed or ran out of time, it gives back;
# and what it leaves when it dies is undone by others (`embedded_open`).
# --------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)

Ints = NDArray[np.int64]

DISCARD_SECONDS = 0.01  # for the lock: a thousand times as long as most hold it


class Giving(Opened):
    """The tiers of one store, and the way out of them."""

    def give_up(self, rows: Ints, generation: NDArray[np.uint32], deadline: float) -> int:
        """Objects away from all tiers, if they are still those; how many were."""
        with self.locked(deadline):
            rows = self._still(rows, generation)
            self._drop(rows)
        return len(rows)

    def discard(self, row: int, generation: int, deadline: float) -> None:
        """An object that is not what was written goes, at once or as soon as that can be: its
        reader is not kept by who is stopped with the lock."""
        known = (row, generation)
        if known in self._damaged:
            return
        self._damaged.add(known)

        def settle() -> None:
            self._damaged.discard(known)
            generations = np.array([generation], dtype=np.uint32)
            rows = self._still(np.array([row], dtype=np.int64), generations)
            self._drop(rows)
            if len(rows):
                self.index.count("corrupt")
                _log.error("an object was not what was written, and is removed (record %d)", row)

        self._settle(settle, min(deadline, time.monotonic() + DISCARD_SECONDS))

    def _still(self, rows: Ints, generation: NDArray[np.uint32]) -> Ints:
        """Those that have the object of this generation, and may lose it."""
        index = self.index
        same = index.readable(rows) & (index.generation[rows] == generation)
        # on its way into memory: the bytes go to an extent that its owner still writes to
        same &= index.state[rows] != ix.PROMOTING
        return np.asarray(rows[same])

    def clear(self, deadline: float) -> int:
        """All objects away, and all files of the store's, also those without a record."""
        index = self.index
        if self.files is not None:
            with self.locked(deadline):
                index.files_due = min(index.files_due, SWEEP)  # nothing more is taken in
        rows = index.objects()
        count = self.give_up(rows, index.generation[rows].copy(), deadline)
        if self.files is not None:
            self.files.sweep_now(deadline)
        return count

    def claim(self, low: ix.Words, high: ix.Words, batch: Ints) -> Ints:
        """Records for new keys that come together with those of `batch`; the caller has the lock.

        Where objects have all sixteen slots of a key, the one that is worth least goes, from all
        tiers. -1 where none of them can.
        """
        index, now = self.index, self.clock()
        rows = index.claim(low, high, now, batch)
        while len(left := np.flatnonzero(rows < 0)):
            slots = index.slots_of(low[left], high[left])
            taken = np.concatenate((batch, rows[rows >= 0]))
            may_go = np.isin(index.state[slots], (ix.MEMORY, ix.BOTH, ix.DISK))
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

    def _drop(self, rows: Ints) -> None:
        if self.files is not None:
            self.files.drop(rows)
        else:
            self.index.leave_memory(rows, ix.GHOST)
        self.index.gaps_stale = True

    def abandon(self, rows: Ints, state: int) -> None:
        """Extents that this process was granted and did not fill."""

        def settle() -> None:
            self.index.leave_memory(rows, state)
            self.index.gaps_stale = True

        self._settle(settle, time.monotonic() + opened.SETTLE_SECONDS)

    def close(self) -> None:
        """Nobody is at work here any more."""
        self.files = None  # it knows this room, and a circle would keep the mappings
        self._owed.clear()  # the same; whoever comes next undoes what a member that is gone owns
        self.members.close()
        if self._owner is not None:
            self._owner.close()
        self.lock.close()
        self.arena.close()
        self.index.close()


# --------------------------------------------------------------------------------------------------

Floats = NDArray[np.float64]

ROUNDS = 6  # of making room for one batch: others may take what was freed
FEW_OBJECTS = 4096  # up to here, victims are looked for each time, and only as many as needed
BATCH_SHARE = 256  # beyond, at least this part of the memory is freed at a time
BAR_SECONDS = 1.0  # how long the last victim's score tells what is not worth a search


@dataclass(frozen=True, slots=True)
class Wish:
    """An extent that is wanted."""

    row: int
    low: np.uint64  # the key, because a ghost's slot may be given away meanwhile
    high: np.uint64
    size: int  # bytes, aligned
    state: int  # WRITING or PROMOTING, once it has it


@dataclass(frozen=True, slots=True)
class Granted:
    """Offsets by row; `declined` were worth less than what is there, `refused` did not fit."""

    offsets: dict[int, int]
    declined: set[int]
    refused: set[int]
    lock_seconds: float  # for which the lock is waited for, each time

    def lock_by(self, deadline: float) -> float:
        return min(deadline, time.monotonic() + self.lock_seconds)


class Room(Giving):
    """The tiers of one store, as one process sees them."""

    def reserve(
        self,
        wishes: list[Wish],
        scores: Floats,
        firm: bool,
        deadline: float,
        lock_seconds: float = math.inf,
    ) -> Granted:
        """Extents for as many wishes as there can be, the most valuable first.

        The rows, each of them once, are GHOST (or DISK) when asked for and stay so until they have
        their extent. `scores` of infinity are never declined; with `firm`, none is. Who can do
        without waits `lock_seconds` for the lock; making room takes its time in any case.
        """
        granted = Granted({}, set(), set(), lock_seconds)
        try:
            self._reserve(wishes, scores, firm, deadline, granted)
        except BaseException:
            back = [w.row for w in wishes if w.row in granted.offsets]
            if back:
                before = ix.GHOST if wishes[0].state == ix.WRITING else ix.DISK
                self.abandon(np.array(back, dtype=np.int64), before)
            raise
        return granted

    def _reserve(
        self,
        wishes: list[Wish],
        scores: Floats,
        firm: bool,
        deadline: float,
        granted: Granted,
    ) -> None:
        pending = [wishes[i] for i in np.argsort(-scores, kind="stable").tolist()]
        worth = {wish.row: float(score) for wish, score in zip(wishes, scores, strict=True)}
        granted.refused.update(w.row for w in pending if w.size > self.arena.capacity)
        pending = [w for w in pending if w.size <= self.arena.capacity]
        stuck = 0
        while True:
            before = len(pending)
            with self.locked(granted.lock_by(deadline)):
                pending = self._take(pending, granted)
            stuck = stuck + 1 if len(pending) == before else 0
            if not pending or stuck > ROUNDS or time.monotonic() > deadline:
                break
            if self._reap(granted.lock_by(deadline)):  # before what somebody may still want
                continue
            if not self._evict_for(pending, worth, firm, stuck > 1, granted, deadline):
                if self._reap(granted.lock_by(deadline), now=True):
                    continue
                break
            pending = [w for w in pending if w.row not in granted.declined]
        granted.refused.update(wish.row for wish in pending)

    def _take(self, wishes: list[Wish], granted: Granted) -> list[Wish]:
        index = self.index
        left: list[Wish] = []
        if index.gaps_stale:
            self.arena.find_gaps()
            index.gaps_stale = False
        too_long = self.arena.capacity + 1  # sizes that were not to be had
        for wish in wishes:
            row = wish.row
            expected = ix.GHOST if wish.state == ix.WRITING else ix.DISK
            same = index.low[row] == wish.low and index.high[row] == wish.high
            if index.state[row] != expected or not same:  # somebody else was faster
                granted.refused.add(row)
                continue
            offset = self.arena.take(wish.size) if wish.size < too_long else -1
            if offset < 0:
                too_long = min(too_long, wish.size)
                left.append(wish)
                continue
            index.generation[row] += np.uint32(1)  # whoever gave it up may have died before
            index.offset[row], index.extent[row] = offset, wish.size
            index.owner[row] = self.members.me
            index.state[row] = wish.state
            granted.offsets[row] = offset
        return left

    def _evict_for(
        self,
        wishes: list[Wish],
        worth: dict[int, float],
        firm: bool,
        in_a_row: bool,
        granted: Granted,
        deadline: float,
    ) -> bool:
        """Free what the wishes need, or decline them; False where nothing can be freed."""
        index, now = self.index, self.clock()
        bar, when = index.bar
        if not firm and 0 <= now - when < BAR_SECONDS:
            low = {w.row for w in wishes if worth[w.row] < bar}
            granted.declined.update(low)
            wishes = [w for w in wishes if w.row not in low]
            if not wishes:
                return True
        rows = index.in_state(ix.MEMORY, ix.BOTH)
        if len(rows) == 0:
            return False
        scores = self.policy.scores(rows, now)
        if in_a_row:  # enough was freed, but no gap is long enough
            victims = self.arena.cheapest_window(wishes[0].size, rows, scores)
            return len(victims) > 0 and self._evict(victims, granted, deadline)
        need = np.cumsum([w.size for w in wishes])
        goal = int(need[-1])
        if len(rows) > FEW_OBJECTS:
            goal = max(goal, self.arena.capacity // BATCH_SHARE)
        order = lowest(scores, index.extent[rows], goal)
        freed = np.cumsum(index.extent[rows[order]])
        if not firm:
            last = np.minimum(np.searchsorted(freed, need), len(order) - 1)
            mine = np.array([worth[w.row] for w in wishes])
            worse = mine <= scores[order[last]]
            granted.declined.update(w.row for w, no in zip(wishes, worse, strict=True) if no)
            if bool(worse.any()) and len(rows) > FEW_OBJECTS:
                index.bar = (float(scores[order[0]]), now)
            if bool(worse.all()):
                return True
            if bool(worse.any()):
                need = np.cumsum([w.size for w, no in zip(wishes, worse, strict=True) if not no])
                goal = int(need[-1])
        count = min(int(np.searchsorted(freed, goal)) + 1, len(order))
        return self._evict(rows[order[:count]], granted, deadline)

    def _evict(self, rows: Ints, granted: Granted, deadline: float) -> bool:
        """Take these out of memory: down to disk where there is one."""
        index, files = self.index, self.files
        if files is not None:
            files.begin()
        with self.locked(granted.lock_by(deadline)):
            rows = rows[np.isin(index.state[rows], (ix.MEMORY, ix.BOTH))]
            index.count("evicted", len(rows))
            index.leave_memory(rows[index.state[rows] == ix.BOTH], ix.DISK)
            down = rows[index.state[rows] == ix.MEMORY]
            if files is not None:
                kept = files.fit(down)
                index.owner[kept] = self.members.me
                index.state[kept] = ix.DEMOTING
                down = down[~np.isin(down, kept)]
            index.leave_memory(down, ix.GHOST)
            index.count("dropped", len(down))
            index.gaps_stale = True
        if files is not None and self.disk is not None and len(kept):
            self._demote(files, self.disk, kept, deadline)
        return True

    def _demote(self, files: Files, disk: DiskTier, rows: Ints, deadline: float) -> None:
        index = self.index
        generation = index.generation[rows].copy()
        names = [key_name(int(index.low[row]), int(index.high[row])) for row in rows.tolist()]
        ok = np.zeros(len(rows), dtype=bool)
        ended = False

        def settle() -> None:
            mine = (index.state[rows] == ix.DEMOTING) & (index.owner[rows] == self.members.me)
            mine &= index.generation[rows] == generation
            if ended:
                index.leave_memory(rows[mine & ok], ix.DISK)
                index.leave_memory(rows[mine & ~ok], ix.GHOST)
                index.count("demoted", int((mine & ok).sum()))
                index.count("disk_full", int((mine & ~ok).sum()))
                index.count("dropped", int((mine & ~ok).sum()))
                index.gaps_stale = True
            else:
                files.undo_demotions(rows[mine])
            # those of objects that were removed meanwhile, unless they came back and went down
            files.remove_unrecorded([names[at] for at in np.flatnonzero(~mine).tolist()])

        def still(at: int) -> bool:
            row = rows[at]
            mine = index.state[row] == ix.DEMOTING and index.owner[row] == self.members.me
            return bool(mine and index.generation[row] == generation[at])

        try:
            for at, name in enumerate(names):
                row = int(rows[at])
                image = self.arena.view(int(index.offset[row]), int(index.image_bytes[row]))
                # past the deadline the rest is dropped: memory must not stay half-freed
                in_time = time.monotonic() <= deadline
                whole = len(image) > 0  # a record whose extent is outside of the arena is dropped
                ok[at] = whole and in_time and disk.write(name, image, functools.partial(still, at))
            ended = True
        finally:
            self._settle(settle, time.monotonic() + opened.SETTLE_SECONDS)


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
