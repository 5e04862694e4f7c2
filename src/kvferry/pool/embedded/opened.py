"""An opened embedded store: its parts, the right to change it, and what a dead process left.

Whoever opens a store first decides its sizes, and takes in the files that a disk tier still has
from before (`embedded_files`); others may open it before that is done.

Whatever a process does with a store, it can die doing it. The lock goes with it; `dirty` says that
it was held; states with an owner say what was under way. `mend` undoes those of the dead, removes
their files, and finds the gaps again, from the records.

What a process that lives owes the records (extents to be given back, damage to be removed) while a
stopped one has the lock, nobody else can see to: it is done first of all by whoever next has the
lock here, and a thread tries for it until then.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import StoreError
from kvferry.pool.embedded import index as ix
from kvferry.pool.embedded.arena import Arena
from kvferry.pool.embedded.disk import DISK_LINK, DirectoryOwner, DiskTier, Files, own_directory
from kvferry.pool.embedded.index import (
    ADOPT,
    SWEEP,
    Calls,
    Geometry,
    Members,
    SharedIndex,
    SharedLock,
)
from kvferry.pool.embedded.policy import ConversationPolicy, History
from kvferry.private_files import private_directory

_log = logging.getLogger(__name__)

MakePolicy = Callable[[History, NDArray[np.float64]], ConversationPolicy]  # from shared memory

OPEN_SECONDS = 60.0
ADOPT_SECONDS = 5.0  # for which the first to open waits for files to be taken in; more come later
SETTLE_SECONDS = 1.0  # for the lock, past a caller's deadline, to give back what it was granted
OWED_SECONDS = 0.25  # between two tries of a thread for the lock, and for each of them
REAP_SECONDS = 1.0  # between two looks for extents of the dead, while there is something to evict


class Opened:
    """The parts of one store, as one process sees them."""

    def __init__(
        self,
        directory: Path,
        wanted: Geometry,
        disk: Path | None,
        clock: Callable[[], float],
        make_policy: MakePolicy = ConversationPolicy,
        calls: Calls | None = None,
    ) -> None:
        private_directory(directory)
        self.clock = clock
        self.calls = calls or Calls()
        self._reap_at = 0.0
        self._owed: deque[Callable[[], None]] = deque()
        self._damaged: set[tuple[int, int]] = set()  # rows and generations that are to go
        self._paying: threading.Thread | None = None
        self._pays = threading.Lock()
        with contextlib.ExitStack() as undo:  # who is refused leaves nothing open
            self.lock = SharedLock(directory / "lock")
            undo.callback(self.lock.close)
            with self.lock.held(time.monotonic() + OPEN_SECONDS):
                self._open(directory, wanted, disk, make_policy, undo)
            undo.pop_all()
        if self.files is not None:
            self.files.begin()
            if self.index.created:  # small tiers are whole when they are open
                self.files.wait(ADOPT_SECONDS)

    def _open(
        self,
        directory: Path,
        wanted: Geometry,
        disk: Path | None,
        make_policy: MakePolicy,
        undo: contextlib.ExitStack,
    ) -> None:
        self.members = Members(directory / "members")
        undo.callback(self.members.close)
        others = self.members.others
        self.index = index = SharedIndex(directory / "index", wanted, others())
        undo.callback(index.close)
        self.policy = make_policy(index.history, index.learned)
        self.arena = Arena(directory / "arena", index)
        undo.callback(self.arena.close)
        if not index.created:
            disk = own_directory(directory, index.geometry.disk_bytes > 0, disk, others())
        self.disk: DiskTier | None = None
        self.files: Files | None = None
        self._owner: DirectoryOwner | None = None
        if disk is not None:
            self._owner = DirectoryOwner(disk, index.store_id, directory, others)
            undo.callback(self._owner.close)
            self.disk = DiskTier(disk, self.members.me)
            self.files = Files(
                index, self.disk, self.members, self.policy, self.clock, self.locked, self.calls
            )
        if index.created:
            self.policy.reset()
            link = directory / DISK_LINK  # for all who open the store later
            link.unlink(missing_ok=True)
            if disk is not None and self.disk is not None:
                self.disk.clean()
                index.files_due = ADOPT
                link.symlink_to(disk.absolute())
            index.publish()
        else:
            self._undo(lambda owner: owner == self.members.me)  # my number's last holder
            if self.disk is not None:
                self.disk.clean([self.members.me])
                index.files_by = 0 if index.files_by == self.members.me else index.files_by

    @contextlib.contextmanager
    def locked(self, deadline: float) -> Iterator[None]:
        """The right to change the index; what a dead holder left is mended first."""
        with self.lock.held(deadline):
            if self.index.dirty:
                self.mend()
            self.index.dirty = True
            while self._owed:
                self._owed.popleft()()
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
        if self.files is not None and self.disk is not None:
            self.files.undo_demotions(rows[states == ix.DEMOTING])
            self.files.say_due(SWEEP)  # who dies may leave files without a record
            self.disk.clean(gone)
        index.leave_memory(rows[states == ix.PROMOTING], ix.DISK)
        index.leave_memory(rows[states == ix.WRITING], ix.GHOST)
        index.leave_memory(np.flatnonzero(index.state > ix.PROMOTING), ix.GHOST)  # damaged
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

    def _settle(self, work: Callable[[], None], deadline: float) -> None:
        """What this process owes the records: now, or first of all when it next has the lock."""
        self._owed.append(work)
        try:
            with self.locked(deadline):
                pass
        except StoreError as error:
            _log.warning("the store's records are put right later: %s", error)
            with self._pays:
                if self._paying is None:
                    self._paying = self.calls.beside(self._pay, "kvferry-owed")

    def _pay(self) -> None:
        while True:
            with self._pays:  # what is owed from now on has a thread of its own
                if not self._owed or self.calls.closing.is_set():
                    self._paying = None
                    return
            self.calls.closing.wait(OWED_SECONDS)
            try:
                with self.locked(time.monotonic() + OWED_SECONDS):
                    pass
            except StoreError as error:
                _log.debug("not yet: %s", error)
            except Exception:
                _log.exception("what was owed to the store's records could not be done")
