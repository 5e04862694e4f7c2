# SPDX-License-Identifier: Apache-2.0
"""The disk tier: one file per object, named by its key's hash, the same image as in memory.

A file appears under its name only when all its bytes are written (another name, then rename).
Nothing is synced: after a loss of power a file may be short or wrong, which its header, its size
and its checksums show. The directory may hold other things. Only names that this module gives (32
hexadecimal digits in the folder of their first two, parts with two numbers) are looked at.

A directory belongs to one store: two stores would remove each other's files as left behind.
`DiskOwner` locks a file there that names the store. Two containers with a /dev/shm of their own may
have two stores at one path, so the name is a random number. All processes of one store must use one
directory. Containers that share memory but not the disk would not: each would remove the records of
the other's files.

Records say which files exist, including those that a process still writes (DEMOTING). A file
without a record takes room that no process knows of. Either the index is new (the host was
restarted), and the file gets a record now; or a process was killed after it changed a record and
before it removed the file, and the file is removed.

So every process that opens the store walks through the directory, on a thread, one process at a
time. The walk reads without the lock, and holds it for one batch at a time. The index says whether
files still get records (`files_due`). If the process that began this ends, the next process to open
the store begins again, and passes quickly over files that have their record by then.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from kvferry.errors import StoreError
from kvferry.pool.embedded import index as ix
from kvferry.pool.embedded.arena import Image, header_bytes, open_image
from kvferry.pool.embedded.index import (
    ADOPT,
    Calls,
    Locked,
    Members,
    SharedIndex,
    hash_keys,
    words_of,
)
from kvferry.private_files import create_private

_log = logging.getLogger(__name__)
DISK_LINK = "disk"  # in a store's directory: where its disk tier is
OWNER_FILE = ".kvferry-store"  # in the disk tier's directory: names the store that owns it
_TEMPORARY = ".part-"
_PART = re.compile(re.escape(_TEMPORARY) + r"(\d+)-\d+")
_NAME = re.compile(r"[0-9a-f]{32}")
_LONGEST_KEY_BYTES = 4096  # of an object that is found again after a restart of the host
_LONGEST_HEADER_BYTES = 16 << 20  # of an object of 500 GiB; a longer one is damaged
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
_DAMAGED = (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EISDIR)  # others may pass

UnderLock = Callable[[float], AbstractContextManager[None]]

BATCH_FILES = 512  # in one hold of the lock: a few milliseconds
LOCK_SECONDS = 4.0  # of a walk; less than a store that is closed waits for its calls
HAS_FILE = (*ix.WITH_FILE, ix.DEMOTING)  # or will have
GOING_SECONDS = 2.0  # a process that ends lets go of its locks one after the other


class DiskTier:
    """The files of one directory. `used` and `remove_unrecorded` need the store's lock."""

    def __init__(
        self,
        directory: Path,
        index: SharedIndex,
        members: Members,
        clock: Callable[[], float],
        calls: Calls,
        locked: UnderLock,
    ) -> None:
        self._directory, self._index, self._members = directory, index, members
        self._clock, self._calls, self._locked = clock, calls, locked
        self._numbers = itertools.count(1)  # `next` is atomic: threads never share a number
        self._walking: threading.Thread | None = None
        self._unread = False  # whether a walk passed over files that it could not read

    def path(self, name: str) -> Path:
        return self._directory / name[:2] / name

    def write(self, name: str, image: memoryview, still: Callable[[], bool] = lambda: True) -> bool:
        """Write a whole file, or nothing. Returns whether the file is in place.

        still  whether the file is still wanted once it is written: the image may have changed
               meanwhile, and another process's file may lie under the name
        """
        target = self.path(name)
        part = self._directory / f"{_TEMPORARY}{self._members.me}-{next(self._numbers)}"
        try:
            target.parent.mkdir(exist_ok=True, mode=0o700)
            with os.fdopen(create_private(part), "wb") as file:
                file.write(image)
            if not still():
                part.unlink()
                return False
            part.rename(target)
        except OSError as error:
            _log.warning("disk tier: %s could not be written: %s", target, error)
            with contextlib.suppress(OSError):
                part.unlink()
            return False
        return True

    def _open(self, name: str) -> int:
        return os.open(self.path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def read(self, name: str, size: int, into: memoryview | None = None) -> memoryview | None:
        """All of a file, in `into` or in new memory; None if it is gone or has another size.

        A `StoreError` if it cannot be read for now, which says nothing about the object.
        """
        try:
            fd = self._open(name)
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise StoreError(f"disk tier: {self.path(name)} cannot be opened: {error}") from error
        try:
            if os.fstat(fd).st_size != size:  # before memory is taken: a record may say anything
                return None
            into = memoryview(bytearray(size)) if into is None else into
            if len(into) != size:
                return None
            at = 0
            while at < size:
                got = os.preadv(fd, [into[at:]], at)
                if got == 0:
                    return None
                at += got
        except OSError as error:
            if error.errno not in _DAMAGED:
                raise StoreError(f"disk tier: {self.path(name)} cannot be read: {error}") from error
            _log.warning("disk tier: %s could not be read: %s", self.path(name), error)
            return None
        finally:
            os.close(fd)
        return into

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                self.path(name).unlink()

    def clean(self, gone: Callable[[int], bool] = lambda member: True) -> None:
        """Remove half-written files of members that are `gone`."""
        for part in self._directory.glob(_TEMPORARY + "*"):
            if (ours := _PART.fullmatch(part.name)) and gone(int(ours[1])):
                with contextlib.suppress(OSError):
                    part.unlink()

    def header(self, name: str) -> Image | None:
        """The header of a file, if it is whole and the file has the size that it says. An `OSError`
        if the file is gone, or cannot be read now, which says nothing about the object."""
        fd = self._open(name)
        try:
            size = os.fstat(fd).st_size
            most = min(header_bytes(_LONGEST_KEY_BYTES, size), _LONGEST_HEADER_BYTES)
            image = open_image(memoryview(os.pread(fd, most, 0)))
        finally:
            os.close(fd)
        return image if image is not None and image.header_bytes + image.length == size else None

    def names(self) -> Iterator[str]:
        """Every file with a name of the store's, folder by folder."""
        for folder in sorted(one.name for one in self._entries(self._directory)):
            if len(folder) != 2:
                continue
            for entry in self._entries(self._directory / folder):
                ours = _NAME.fullmatch(entry.name) and entry.name.startswith(folder)
                if ours and entry.is_file(follow_symlinks=False):
                    yield entry.name

    def _entries(self, folder: Path) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return list(entries)
        except OSError as error:
            self._note_unread(folder, error)
            return []

    def _note_unread(self, path: Path, error: OSError) -> None:
        """A walk passes over this path. Files that cannot be read now are left alone."""
        if error.errno in _GONE:
            return
        if not self._unread:
            _log.warning("disk tier: %s cannot be read now, and stays: %s", path, error)
        self._unread = True

    # Files and records

    def used(self) -> int:
        """Bytes of all files, including those that processes still write."""
        return int(self._index.image_bytes[self._index.in_state(*HAS_FILE)].sum())

    def remove_unrecorded(self, names: Sequence[str]) -> None:
        self.remove(self._unrecorded(names))

    def _unrecorded(self, names: Sequence[str]) -> list[str]:
        """Those of these files that no record names."""
        if not names:
            return []
        rows = self._index.find(*words_of(names))
        recorded = (rows >= 0) & np.isin(self._index.state[rows], HAS_FILE)
        return list(itertools.compress(names, (~recorded).tolist()))

    def begin(self) -> None:
        """Walk through all files, in a thread."""
        thread = threading.Thread(target=self._walk, name="kvferry-files", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            _log.warning("disk tier: the next process to open it looks at its files: %s", error)
        else:
            self._walking = thread

    def wait(self, seconds: float) -> bool:
        """Wait for this process's walk, at most this long. Returns whether it has ended."""
        if self._walking is not None:
            self._walking.join(seconds)
        return self._walking is None or not self._walking.is_alive()

    def sweep_now(self, deadline: float) -> None:
        """Remove all files without a record, also those that were to get one."""
        for batch in _batches(self.names()):
            self._sweep(batch, deadline)

    def _walk(self) -> None:
        """Walk, unless another process does. If the lock is not free in time, or the store is
        closed, the next process to open the store does the rest."""
        try:
            with self._calls, self._members.walking() as alone:
                if alone:
                    self._walk_alone()
        except StoreError as error:
            _log.info("disk tier: the walk through its files ends early: %s", error)

    def _walk_alone(self) -> None:
        with self._locked(_lock_deadline()):  # no process becomes a member without it
            self.clean(lambda member: not self._members.alive(member))
        adopting, self._unread = self._index.files_due == ADOPT, False
        for batch in _batches(self.names()):
            if self._calls.closing.is_set():
                return
            if not adopting:
                self._sweep(batch, _lock_deadline())
            elif not self._adopt(batch, _lock_deadline()):
                return
        if adopting and not self._unread:  # else the next process to open the store tries again
            with self._locked(_lock_deadline()):
                self._index.files_due = 0

    def _sweep(self, names: list[str], deadline: float) -> None:
        if lost := self._unrecorded(names):
            with self._locked(deadline):
                self.remove_unrecorded(lost)

    def _adopt(self, names: list[str], deadline: float) -> bool:
        """Make records for undamaged files, up to the capacity. False: no more records are made."""
        index = self._index
        whole: list[tuple[str, Image]] = []
        bad: list[str] = []
        for name in self._unrecorded(names):
            try:
                image = self.header(name)
            except OSError as error:
                self._note_unread(self.path(name), error)
                continue
            if image is not None and np.array_equal(hash_keys([image.key]), words_of([name])):
                whole.append((name, image))
            else:
                bad.append(name)
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
            # an object that is in memory by now, or on its way, has no use for an old file
            fits = np.isin(state, (ix.FREE, ix.GHOST))
            room = index.geometry.disk_bytes - self.used()
            fits &= np.cumsum(np.where(fits, size, 0)) <= room
            fresh = fits & (rows < 0)
            rows[fresh] = index.claim(low[fresh], high[fresh], self._clock(), rows[rows >= 0])
            fits &= rows >= 0
            taken = rows[fits]
            index.length[taken] = np.array([i.length for _, i in whole], dtype=np.int64)[fits]
            index.image_bytes[taken] = size[fits]
            index.state[taken] = ix.DISK
            self.remove_unrecorded(kept)
        return True


def _lock_deadline() -> float:
    return time.monotonic() + LOCK_SECONDS


def _batches(names: Iterator[str]) -> Iterator[list[str]]:
    while batch := list(itertools.islice(names, BATCH_FILES)):
        yield batch


class DiskOwner(Locked):
    """Holds a disk tier's directory for one store until `close`. The processes of one store share
    it, and open the store one at a time. The kernel drops the lock with its last holder."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        super().__init__(disk / OWNER_FILE)

    def take(self, store_id: str, store: Path, others: Callable[[], bool]) -> None:
        """A `StoreError` while a process has another store open in this directory, or while
        `others` have this store open, but not in this directory."""
        try:
            free = self._try_byte(0, fcntl.F_WRLCK)
        except OSError as error:
            _log.warning("disk tier: no locks in %s (%s); use it for one store", self._disk, error)
            return
        if free:  # no process has a store open here
            until = time.monotonic() + GOING_SECONDS
            while others():
                if time.monotonic() > until:
                    raise StoreError(
                        f"{self._disk} is another directory for the processes that have the store "
                        f"at {store} open (in another container?), or {OWNER_FILE} was removed "
                        "from it; mount theirs, or end them"
                    )
                time.sleep(0.005)
            line = f"{store_id} {store.absolute()}\n".encode()
            os.pwrite(self._fd, line, 0)
            os.ftruncate(self._fd, len(line))
        shared = self._try_byte(0, fcntl.F_RDLCK)
        found, _, where = os.pread(self._fd, 4096, 0).decode(errors="replace").partition(" ")
        if not shared or found != store_id:
            raise StoreError(
                f"{self._disk} holds the files of another store that is in use (at "
                f"{where.strip() or 'an unknown place'}, on its host or in its container); give "
                f"each store a disk_path of its own (this one is at {store}), or end the engines "
                "that use the other one"
            )


def own_directory(directory: Path, disk: Path | None, in_use: bool) -> Path:
    """The disk tier of an existing store: its creator's, whatever this process was configured with.
    A process that looked elsewhere would take all files for lost, and remove their records. So the
    tier does not move while other processes have the store open (`in_use`)."""
    link = directory / DISK_LINK
    if link.is_dir():
        there = link.resolve()
        if disk is None or disk.resolve() != there:
            _log.warning("the disk tier of %s stays at %s; %s is not used", directory, there, disk)
        return there
    if disk is not None and disk.is_dir() and not in_use:  # it has moved: to there
        link.unlink(missing_ok=True)
        link.symlink_to(disk.absolute())
        return disk
    where = link.readlink() if link.is_symlink() else "an unknown place"
    raise StoreError(
        f"the store at {directory} has a disk tier at {where}, which is not there for this "
        "process; mount it (also in this container), name where it is now"
        + (" when none of the processes that have the store open is left" if in_use else "")
        + ", or remove the store while no engine uses it"
    )
