"""Writing to the embedded store: a record, an extent, the bytes, and then one store that shows it.

Until that store the object is WRITING, for this process alone; every way out of here, also an
exception and a deadline, gives back what was not filled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvferry.errors import StoreError
from kvferry.pool import embedded_index as ix
from kvferry.pool.embedded_arena import ALIGN
from kvferry.pool.embedded_copy import move
from kvferry.pool.embedded_image import header_bytes, image_bytes, seal
from kvferry.pool.embedded_index import hash_keys
from kvferry.pool.embedded_room import Room, Wish, aligned
from kvferry.pool.store import Ints, Outcome, Ranges

_log = logging.getLogger(__name__)

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
