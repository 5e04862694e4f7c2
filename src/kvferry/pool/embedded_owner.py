"""One store to a disk tier's directory: a file in it that all processes of the store keep locked.

The file says which store that is, by the number that the store's index was given when it was made:
stores in containers with a /dev/shm of their own have one path and are two. Processes of one store
share the lock. Whoever finds it free writes its store's number; whoever finds another number under
a lock that somebody holds is refused, because either store would remove the other's files as left
behind by the dead, and both would fill the disk.

Nor may processes of one store use two directories, which is what a path means in containers that
share memory and not the disk: where others have the store open, the lock must be theirs.

The kernel drops the lock with its last holder, so nothing is left to clean up.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from kvferry.errors import StoreError
from kvferry.pool.embedded_lock import Locked
from kvferry.private_files import private_directory

_log = logging.getLogger(__name__)

OWNER_FILE = ".kvferry-store"
OWNER_SECONDS = 5.0  # another process has the file for itself only while it writes a line
GOING_SECONDS = 2.0  # a process that ends lets go of its locks one after the other
_PAUSE_S = 0.005
_BUSY = (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class DirectoryOwner(Locked):
    """Holds a directory for one store until `close`."""

    def __init__(
        self, disk: Path, store_id: str, store: Path, others: Callable[[], bool] = lambda: False
    ) -> None:
        """`others`: whether other processes have the store open, with its directory."""
        private_directory(disk)
        super().__init__(disk / OWNER_FILE)
        try:
            self._take(disk, store_id, store, others)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self.close()
                raise
            _log.warning(
                "disk tier: the file system of %s has no locks (%s); see to it that no other store "
                "uses this directory",
                disk,
                error,
            )
        except StoreError:
            self.close()
            raise

    def _take(self, disk: Path, store_id: str, store: Path, others: Callable[[], bool]) -> None:
        deadline = time.monotonic() + OWNER_SECONDS
        gone_by = time.monotonic() + GOING_SECONDS
        while True:
            if self._locked(fcntl.LOCK_EX):  # nobody's
                while others():
                    if time.monotonic() > gone_by:
                        raise StoreError(
                            f"{disk} is not the disk tier of the store at {store} for the "
                            "processes that have it open, but another directory under its path (in "
                            f"another container?), or {OWNER_FILE} was removed from it; mount "
                            "theirs, or end them"
                        )
                    time.sleep(_PAUSE_S)
                os.pwrite(self._fd, line := f"{store_id} {store.absolute()}\n".encode(), 0)
                os.ftruncate(self._fd, len(line))
            # Not one step after the other kind: another store may have come between the two.
            if self._locked(fcntl.LOCK_SH):
                found, _, where = (
                    os.pread(self._fd, 4096, 0).decode(errors="replace").partition(" ")
                )
                if found == store_id:
                    return
                raise StoreError(
                    f"another store that is in use (at {where.strip() or 'an unknown place'}, on "
                    f"its host or in its container) keeps its files in {disk}; give each memory "
                    f"directory a disk_path of its own (this one is {store}), or end the engines "
                    "that use the other store"
                )
            if time.monotonic() > deadline:
                raise StoreError(
                    f"{disk / OWNER_FILE} is locked by something else (`fuser` names it); end "
                    "that, or name another disk_path"
                )
            time.sleep(_PAUSE_S)

    def _locked(self, kind: int) -> bool:
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _BUSY:
                raise
            return False
        return True
