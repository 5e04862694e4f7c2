"""What leaves the embedded store: objects that nobody wants or can trust, and unused extents.

What a process was granted and cannot use, because it failed or ran out of time, it gives back; and
what it leaves when it dies is undone by others (`embedded_open`).
"""

from __future__ import annotations

import logging
import time

import numpy as np
from numpy.typing import NDArray

from kvferry.pool import embedded_index as ix
from kvferry.pool import embedded_open
from kvferry.pool.embedded_header import SWEEP
from kvferry.pool.embedded_open import Opened

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

        self._settle(settle, time.monotonic() + embedded_open.SETTLE_SECONDS)

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
