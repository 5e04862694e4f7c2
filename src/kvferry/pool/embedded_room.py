"""Room in the embedded store: who gets an extent, who gives one up, and what a dead process left.

An object comes in only in place of objects that the policy holds worth less, else it is declined;
with a disk tier it always comes in, because what it displaces is not lost. Victims without a copy
on disk are written there first, outside of the lock: they stay readable until the file is in place.
Victims are chosen without the lock too, and looked at again under it.

Whatever a process does here, it can die doing it. The lock goes with it; `dirty` says that it was
held; states with an owner say what was under way. `mend` undoes those of the dead and finds the
gaps again, from the records.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvferry.pool import embedded_index as ix
from kvferry.pool.embedded_arena import ALIGN, Arena
from kvferry.pool.embedded_disk import DISK_LINK, DiskTier, own_directory
from kvferry.pool.embedded_index import Geometry, SharedIndex, hash_keys, key_name
from kvferry.pool.embedded_lock import Members, SharedLock
from kvferry.pool.policy import ConversationPolicy, History

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
MakePolicy = Callable[[History, Floats], ConversationPolicy]  # from shared memory

ROUNDS = 6  # of making room for one batch: others may take what was freed
FEW_OBJECTS = 4096  # up to here, victims are looked for each time, and only as many as needed
BATCH_SHARE = 256  # beyond, at least this part of the memory is freed at a time
BAR_SECONDS = 1.0  # how long the last victim's score tells what is not worth a search
OPEN_SECONDS = 60.0
REAP_SECONDS = 1.0  # between two looks for extents of the dead, while there is something to evict


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


class Room:
    """The tiers of one store, as one process sees them."""

    def __init__(
        self,
        directory: Path,
        wanted: Geometry,
        disk: Path | None,
        clock: Callable[[], float],
        make_policy: MakePolicy = ConversationPolicy,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.clock = clock
        self.lock = SharedLock(directory / "lock")
        with self.lock.held(time.monotonic() + OPEN_SECONDS):
            self.index = SharedIndex(directory / "index", wanted)
            self.policy = make_policy(self.index.history, self.index.learned)
            self.arena = Arena(directory / "arena", self.index)
            self.members = Members(directory / "members")
            self._reap_at = 0.0
            if not self.index.created:
                disk = own_directory(directory, self.index.geometry.disk_bytes > 0, disk)
            self.disk = DiskTier(disk, self.members.me) if disk is not None else None
            if self.index.created:
                self.policy.reset()
                link = directory / DISK_LINK  # for all who open the store later
                link.unlink(missing_ok=True)
                if disk is not None and self.disk is not None:
                    self.disk.clean()
                    self._adopt(self.disk)
                    link.symlink_to(disk.absolute())
                self.index.publish()
            else:
                self._undo(lambda owner: owner == self.members.me)  # my number's last holder
                if self.disk is not None:
                    self.disk.clean(iter([self.members.me]))

    @contextlib.contextmanager
    def locked(self, deadline: float) -> Iterator[None]:
        """The right to change the index; what a dead holder left is mended first."""
        with self.lock.held(deadline):
            if self.index.dirty:
                self.mend()
            self.index.dirty = True
            yield  # an exception leaves `dirty`: the next holder looks after it
            self.index.dirty = False

    def mend(self) -> None:
        self.index.count("mended")
        self._undo(lambda owner: not self.members.alive(owner))

    def _undo(self, of: Callable[[int], bool]) -> None:
        index = self.index
        rows = index.in_state(*ix.OWNED)
        gone = {owner for owner in np.unique(index.owner[rows]).tolist() if of(owner)}
        rows = rows[np.isin(index.owner[rows], list(gone))]
        states = index.state[rows].copy()
        index.state[rows[states == ix.DEMOTING]] = ix.MEMORY
        index.leave_memory(rows[states == ix.PROMOTING], ix.DISK)
        index.leave_memory(rows[states == ix.WRITING], ix.GHOST)
        self.arena.find_gaps()
        index.gaps_stale = False

    def _reap(self, deadline: float, *, now: bool = False) -> bool:
        """Whether memory came back that processes held which died outside of the lock."""
        if not now and time.monotonic() < self._reap_at:
            return False
        self._reap_at = time.monotonic() + REAP_SECONDS
        index = self.index
        owners = np.unique(index.owner[index.in_state(*ix.OWNED)]).tolist()
        if all(self.members.alive(owner) for owner in owners):
            return False
        with self.locked(deadline):
            self.mend()
        return True

    def _adopt(self, disk: DiskTier) -> None:
        """A new index takes in the files that are there, up to the disk's capacity."""
        index, now, used = self.index, self.clock(), 0
        for name, image, size in disk.found():
            low, high = hash_keys([image.key])
            row = -1
            whole = name == key_name(int(low[0]), int(high[0]))
            if whole and used + size <= index.geometry.disk_bytes:
                row = int(index.claim(low, high, now)[0])
            if row < 0:
                disk.remove(name)
                continue
            index.length[row], index.image_bytes[row] = image.length, size
            index.state[row] = ix.DISK
            used += size

    # --- getting room --------------------------------------------------------------------------

    def reserve(self, wishes: list[Wish], scores: Floats, firm: bool, deadline: float) -> Granted:
        """Extents for as many wishes as there can be, the most valuable first.

        The rows are GHOST (or DISK) when asked for and stay so until they have their extent.
        `scores` of infinity are never declined; with `firm`, none is.
        """
        granted = Granted({}, set(), set())
        pending = [wishes[i] for i in np.argsort(-scores, kind="stable").tolist()]
        worth = {wish.row: float(score) for wish, score in zip(wishes, scores, strict=True)}
        granted.refused.update(w.row for w in pending if w.size > self.arena.capacity)
        pending = [w for w in pending if w.size <= self.arena.capacity]
        stuck = 0
        while True:
            before = len(pending)
            with self.locked(deadline):
                pending = self._take(pending, granted)
            stuck = stuck + 1 if len(pending) == before else 0
            if not pending or stuck > ROUNDS or time.monotonic() > deadline:
                break
            if self._reap(deadline):  # before anything that somebody may still want
                continue
            if not self._evict_for(pending, worth, firm, stuck > 1, granted, deadline):
                if self._reap(deadline, now=True):
                    continue
                break
            pending = [w for w in pending if w.row not in granted.declined]
        granted.refused.update(wish.row for wish in pending)
        return granted

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
            return len(victims) > 0 and self._evict(victims, deadline)
        need = np.cumsum([w.size for w in wishes])
        goal = int(need[-1])
        if len(rows) > FEW_OBJECTS:
            goal = max(goal, self.arena.capacity // BATCH_SHARE)
        order = _lowest(scores, index.extent[rows], goal)
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
        return self._evict(rows[order[:count]], deadline)

    def _evict(self, rows: Ints, deadline: float) -> bool:
        """Take these out of memory: down to disk where there is one."""
        index, disk = self.index, self.disk
        with self.locked(deadline):
            rows = rows[np.isin(index.state[rows], (ix.MEMORY, ix.BOTH))]
            index.count("evicted", len(rows))
            index.leave_memory(rows[index.state[rows] == ix.BOTH], ix.DISK)
            down = rows[index.state[rows] == ix.MEMORY]
            if disk is not None:
                kept = self._fit_on_disk(disk, down)
                index.owner[kept] = self.members.me
                index.state[kept] = ix.DEMOTING
                down = down[~np.isin(down, kept)]
            index.leave_memory(down, ix.GHOST)
            index.count("dropped", len(down))
            index.gaps_stale = True
        if disk is not None and len(kept):
            self._demote(disk, kept, deadline)
        return True

    def _fit_on_disk(self, disk: DiskTier, coming: Ints) -> Ints:
        """Remove the least valuable files to make room; which of `coming` are worth their place."""
        index = self.index
        files = index.on_disk()
        over = int(index.image_bytes[files].sum() + index.image_bytes[coming].sum())
        over -= index.geometry.disk_bytes
        if over <= 0:
            return coming
        files = files[np.isin(index.state[files], (ix.DISK, ix.BOTH))]
        rows = np.concatenate((coming, files))
        size = index.image_bytes[rows]
        order = _lowest(self.policy.scores(rows, self.clock()), size, over)
        count = min(int(np.searchsorted(np.cumsum(size[order]), over)) + 1, len(order))
        losers = rows[order[:count]]
        for row in losers[np.isin(losers, files)].tolist():
            if index.state[row] == ix.BOTH:
                index.state[row] = ix.MEMORY
            else:
                index.leave_memory(np.array([row]), ix.GHOST)
                index.count("dropped")
            disk.remove(key_name(int(index.low[row]), int(index.high[row])))
        return np.asarray(coming[~np.isin(coming, losers)])

    def _demote(self, disk: DiskTier, rows: Ints, deadline: float) -> None:
        index = self.index
        generation = index.generation[rows].copy()
        names = [key_name(int(index.low[row]), int(index.high[row])) for row in rows.tolist()]
        written = []
        for row, name in zip(rows.tolist(), names, strict=True):
            image = self.arena.view(int(index.offset[row]), int(index.image_bytes[row]))
            # past the deadline the rest is dropped: the store's memory must not stay half-freed
            written.append(time.monotonic() <= deadline and disk.write(name, image))
        ok = np.array(written, dtype=bool)
        with self.locked(max(deadline, time.monotonic() + OPEN_SECONDS)):
            mine = (index.state[rows] == ix.DEMOTING) & (index.generation[rows] == generation)
            for at in np.flatnonzero(ok & ~mine).tolist():  # removed meanwhile
                disk.remove(names[at])
            index.leave_memory(rows[mine & ok], ix.DISK)
            index.leave_memory(rows[mine & ~ok], ix.GHOST)
            index.count("demoted", int((mine & ok).sum()))
            index.count("disk_full", int((~ok).sum()))
            index.count("dropped", int((mine & ~ok).sum()))
            index.gaps_stale = True

    # --- giving up -----------------------------------------------------------------------------

    def give_up(self, rows: Ints, generation: NDArray[np.uint32], deadline: float) -> int:
        """Objects away from all tiers, if they are still those; how many were."""
        index = self.index
        with self.locked(deadline):
            same = index.readable(rows) & (index.generation[rows] == generation)
            # on its way into memory: the bytes go to an extent that its owner still writes to
            same &= index.state[rows] != ix.PROMOTING
            rows = rows[same]
            on_disk = rows[np.isin(rows, index.on_disk())]
            names = [key_name(int(index.low[r]), int(index.high[r])) for r in on_disk.tolist()]
            index.leave_memory(rows, ix.GHOST)
            index.gaps_stale = True
            if self.disk is not None:
                for name in names:
                    self.disk.remove(name)
        return len(rows)

    def abandon(self, rows: Ints, state: int) -> None:
        """Extents that this process was granted and did not fill."""
        with self.locked(time.monotonic() + OPEN_SECONDS):
            self.index.leave_memory(rows, state)
            self.index.gaps_stale = True

    def close(self) -> None:
        self.members.close()
        self.lock.close()
        self.arena.close()
        self.index.close()


def _lowest(scores: Floats, sizes: Ints, goal: int) -> Ints:
    """Indices by rising score, enough of them for `goal` bytes where there are enough."""
    count = int(goal / max(float(sizes.mean()), 1.0) * 1.5) + 16
    while count < len(scores):
        lowest = np.argpartition(scores, count - 1)[:count]
        if int(sizes[lowest].sum()) >= goal:
            return np.asarray(lowest[np.argsort(scores[lowest], kind="stable")])
        count *= 4
    return np.asarray(np.argsort(scores, kind="stable"))


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
