"""Who may change the shared index, and who is alive: locks that the kernel drops with the process.

Two files. `lock` is held for the microseconds in which the index changes; a process that dies with
it, at any point, lets go of it, and the next holder finds `dirty` set and mends what it needs to.
`members` has one byte per process that has the store open, locked as long as it lives: whether the
owner of half-written bytes is alive is a question to the kernel, not to process ids, which mean
nothing across containers and come again. Both are locks of open file descriptions, so two stores
in one process do not undo each other's. A forked child would share them, and keep them when its
parent is killed: it closes them before it does anything else.

Nobody waits for ever: a stopped process that holds the lock costs the others their deadline.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from kvferry.errors import StoreError
from kvferry.private_files import open_private

MAX_MEMBERS = 4096  # processes that may have one store open at a time
FIRST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 1e-3
_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux: type, whence, start, len, pid


class Locked:
    """A file that this process, and no child of it, holds locks of until `close`."""

    def __init__(self, path: Path) -> None:
        self._fd = open_private(path)
        _held.add(self)

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
        """Raises `StoreError` where it is not free in time."""
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
                if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
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
            return  # a child's copy: closed, and maybe held by a thread that is not there
        with self._threads:
            super().close()


class Members(Locked):
    """The processes that have the store open; `me` is this one's number, from 1 on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        for number in range(1, MAX_MEMBERS):
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, self._flock(fcntl.F_WRLCK, number))
                self.me = number
                return
        self.close()
        raise StoreError(f"more than {MAX_MEMBERS - 1} processes have this store open")

    @staticmethod
    def _flock(kind: int, number: int, count: int = 1) -> bytes:
        return _FLOCK.pack(kind, os.SEEK_SET, number, count, 0)

    def alive(self, number: int) -> bool:
        """Whether the process with this number still lives."""
        if number == self.me:
            return True
        if not 0 < number < MAX_MEMBERS:
            return False
        return self._taken(self._flock(fcntl.F_WRLCK, number))

    def others(self) -> bool:
        """Whether any other process has the store open."""
        return self._taken(self._flock(fcntl.F_WRLCK, 1, MAX_MEMBERS))  # one's own are no obstacle

    def _taken(self, what: bytes) -> bool:
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, what)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
