"""Who may change the shared index, and who is alive: locks that the kernel drops with the process.

Two files. `lock` is held for the microseconds in which the index changes; a process that dies with
it, at any point, lets go of it, and the next holder finds `dirty` set and mends what it needs to.
`members` has one byte per process that has the store open, locked as long as it lives: whether the
owner of half-written bytes is alive is a question to the kernel, not to process ids, which mean
nothing across containers and come again. Both are locks of open file descriptions, so two stores
in one process do not undo each other's.

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
from collections.abc import Iterator
from pathlib import Path

from kvferry.errors import StoreError

MAX_MEMBERS = 4096  # processes that may have one store open at a time
FIRST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 1e-3
_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux: type, whence, start, len, pid


class SharedLock:
    """Mutual exclusion among threads and processes, with a deadline."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
        with self._threads:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


class Members:
    """The processes that have the store open; `me` is this one's number, from 1 on."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        for number in range(1, MAX_MEMBERS):
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, self._flock(fcntl.F_WRLCK, number))
                self.me = number
                return
        os.close(self._fd)
        raise StoreError(f"more than {MAX_MEMBERS - 1} processes have this store open")

    @staticmethod
    def _flock(kind: int, number: int) -> bytes:
        return _FLOCK.pack(kind, os.SEEK_SET, number, 1, 0)

    def alive(self, number: int) -> bool:
        """Whether the process with this number still lives."""
        if number == self.me:
            return True
        if not 0 < number < MAX_MEMBERS:
            return False
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, self._flock(fcntl.F_WRLCK, number))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
