"""The disk tier: one file per object, named by its key's hash, the same image as in memory.

A file appears under its name only when all its bytes are written (another name, then rename), and
leaves by unlink. Nothing is synced: after a loss of power a file may be short or wrong, which its
header, its size and its checksums tell. Files need no index: a store that is opened on an empty
index takes in what it finds.

The directory may hold other things, which are nobody's business here: only names that this module
gives (32 hexadecimal digits in the folder of their first two, parts with two numbers) are looked
at, and of those only what begins like an image, or with nothing at all, is ever removed.
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
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import StoreError
from kvferry.pool.embedded import index as ix
from kvferry.pool.embedded.arena import Image, begins_image, header_size, open_image
from kvferry.pool.embedded.index import (
    ADOPT,
    NOTHING,
    SWEEP,
    Calls,
    Locked,
    Members,
    SharedIndex,
    hash_keys,
    key_name,
    words_of,
)
from kvferry.pool.embedded.policy import ConversationPolicy
from kvferry.private_files import create_private, private_directory

_log = logging.getLogger(__name__)
DISK_LINK = "disk"  # in a store's directory: where its disk tier is
_TEMPORARY = ".part-"
_PART = re.compile(re.escape(_TEMPORARY) + r"(\d+)-\d+")
_NAME = re.compile(r"[0-9a-f]{32}")
_HEAD_BYTES = 32
_MOST_HEADERS_BYTES = 1024  # one read for objects up to 30 MiB
_LONGEST_HEADER_BYTES = 16 << 20  # of an object of 500 GiB; a longer one is damaged
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
_DAMAGED = (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EISDIR)  # the medium, not the moment


class DiskTier:
    """Files of one directory."""

    def __init__(self, directory: Path, member: int) -> None:
        self._directory = directory
        self._member = member
        self._made: set[str] = set()
        self._numbers = itertools.count(1)  # one step of the interpreter: threads never share one

    def path(self, name: str) -> Path:
        return self._directory / name[:2] / name

    def write(self, name: str, image: memoryview, still: Callable[[], bool] = lambda: True) -> bool:
        """Whether the whole image is there now; if not, nothing is.

        Where it is not `still` wanted when it is written, it does not appear: the image may have
        changed meanwhile, and somebody else's file may lie under the name.
        """
        target = self.path(name)
        part = self._directory / f"{_TEMPORARY}{self._member}-{next(self._numbers)}"
        try:
            if name[:2] not in self._made:
                target.parent.mkdir(exist_ok=True, mode=0o700)
                self._made.add(name[:2])
            with os.fdopen(create_private(part), "wb", buffering=0) as file:
                left = image
                while left:
                    left = left[file.write(left) or 0 :]
            if not still():
                part.unlink()
                return False
            part.rename(target)
        except OSError as error:
            _log.warning("disk tier: %s could not be written: %s", target, error)
            self._made.discard(name[:2])  # the folder may be what is missing
            with contextlib.suppress(OSError):
                part.unlink()
            return False
        return True

    def _open(self, name: str) -> int:
        return os.open(self.path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def read(self, name: str, size: int, into: memoryview | None = None) -> memoryview | None:
        """All of a file, in `into` or in new memory; None where it is gone or has another size.

        A `StoreError` where it cannot be read for now: that says nothing about the object.
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

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            self.path(name).unlink()

    def clean(self, gone: Collection[int] | None = None) -> None:
        """Remove what members that are gone (None: all) left half-written."""
        for part, member in self._parts():
            if gone is None or member in gone:
                with contextlib.suppress(OSError):
                    part.unlink()

    def writers(self) -> set[int]:
        """Members of which something is there that is half-written."""
        return {member for _, member in self._parts()}

    def _parts(self) -> Iterator[tuple[Path, int]]:
        for part in self._directory.glob(_TEMPORARY + "*"):
            if ours := _PART.fullmatch(part.name):
                yield part, int(ours[1])

    def header(self, name: str) -> Image | None:
        """The header of a file that is whole as far as its size tells."""
        try:
            fd = self._open(name)
        except OSError:
            return None
        try:
            size = os.fstat(fd).st_size
            head = os.pread(fd, _MOST_HEADERS_BYTES, 0)
            whole = min(header_size(head), size, _LONGEST_HEADER_BYTES)
            if whole > len(head):
                head += os.pread(fd, whole - len(head), len(head))
        except OSError:
            return None
        finally:
            os.close(fd)
        image = open_image(memoryview(head))
        return image if image is not None and image.header_bytes + image.length == size else None

    def names(self, *, tell: bool) -> Iterator[str]:
        """Every file with a name of the store's, folder by folder; `tell` of what else is there."""
        foreign = 0
        for folder in sorted(self._directory.glob("??")):
            try:
                entries = list(os.scandir(folder))
            except OSError:  # no folder, or one that is gone
                foreign += 1
                continue
            for entry in entries:
                ours = _NAME.fullmatch(entry.name) and entry.name.startswith(folder.name)
                if ours and entry.is_file(follow_symlinks=False):
                    yield entry.name
                else:
                    foreign += 1
        if foreign and tell:
            _log.warning(
                "disk tier: %s holds %d things that are not the store's; they are left alone, and "
                "not counted in its size",
                self._directory,
                foreign,
            )

    def is_ours(self, name: str) -> bool:
        """Whether a file with one of our names may be an image, or what a loss of power left."""
        try:
            with os.fdopen(self._open(name), "rb") as file:
                return begins_image(file.read(_HEAD_BYTES))
        except OSError:
            return False


def own_directory(
    directory: Path, has_disk: bool, disk: Path | None, in_use: bool = False
) -> Path | None:
    """The disk tier of a store that is there: its creator's, whatever this process would have.

    A process that looked for the store's files elsewhere, or nowhere, would take all of them for
    lost, and remove their records. Nor does it move while other processes have it open (`in_use`).
    """
    if not has_disk:
        if disk is not None:
            _log.warning(
                "the store at %s was created without a disk tier; %s is not used", directory, disk
            )
        return None
    link = directory / DISK_LINK
    if link.is_dir():
        there = link.resolve()
        if disk is None or disk.resolve() != there:
            _log.warning(
                "the store at %s has its disk tier at %s; that holds, not %s",
                directory,
                there,
                disk or "none",
            )
        return there
    if disk is not None and disk.is_dir() and not in_use:  # it has moved: to there
        link.unlink(missing_ok=True)
        link.symlink_to(disk.absolute())
        return disk
    where = link.readlink() if link.is_symlink() else "an unknown place"
    raise StoreError(
        f"the store at {directory} has a disk tier at {where}, which is not there for this "
        "process; mount it (also in this container), name where it is now"
        + (" when none of the processes that have it open now is left" if in_use else "")
        + ", or remove the store while no engine uses it"
    )


# --------------------------------------------------------------------------------------------------
# Which files the disk tier has: its capacity, what a new index takes in, what nobody owns.
#
# Records say which files there are, and count: also those that are on their way (DEMOTING), whoever
# writes them. A file that no record names takes room that nobody knows of. There are two kinds:
#
#     ADOPT  a new index (the host was restarted) finds the files of the one before: takes them in
#     SWEEP  somebody was killed between a record's change and its file's removal, and they go
#
# Either is a walk through the directory, which may take minutes, so a thread does it beside the
# store's work: it reads without the lock, and holds it for one batch at a time, in which it looks
# at the records again. Which walk is due, and who is at it, lies in the index; where that one dies,
# another process begins again, and passes quickly over what has its record by then. The thread is
# one of the store's `Calls`.
#
# All but `begin`, `wait` and `sweep_now` needs the store's lock.
# --------------------------------------------------------------------------------------------------

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
UnderLock = Callable[[float], AbstractContextManager[None]]

BATCH_FILES = 512  # in one hold of the lock: a few milliseconds
LOCK_SECONDS = 1.0  # for each try of a walk, so that `close` need not wait long
HAS_FILE = (ix.DISK, ix.BOTH, ix.PROMOTING, ix.DEMOTING)  # or will have


class Files:
    """The disk tier's side of the records."""

    def __init__(
        self,
        index: SharedIndex,
        disk: DiskTier,
        members: Members,
        policy: ConversationPolicy,
        clock: Callable[[], float],
        locked: UnderLock,
        calls: Calls,
    ) -> None:
        self._index, self._disk, self._members = index, disk, members
        self._policy, self._clock, self._locked = policy, clock, locked
        self._calls = calls
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    # --- the books -----------------------------------------------------------------------------

    def fit(self, coming: Ints) -> Ints:
        """Remove the least valuable files to make room; which of `coming` are worth their place."""
        index = self._index
        over = self._used() + int(index.image_bytes[coming].sum()) - index.geometry.disk_bytes
        if over <= 0:
            return coming
        files = index.in_state(ix.DISK, ix.BOTH)
        rows = np.concatenate((coming, files))
        size = index.image_bytes[rows]
        order = lowest(self._policy.scores(rows, self._clock()), size, over)
        count = min(int(np.searchsorted(np.cumsum(size[order]), over)) + 1, len(order))
        losers = rows[order[:count]]
        gone = losers[np.isin(losers, files)]
        names = self._names(gone)
        both = index.state[gone] == ix.BOTH
        index.state[gone[both]] = ix.MEMORY
        index.leave_memory(gone[~both], ix.GHOST)
        index.count("dropped", int((~both).sum()))
        self._remove(names)
        return np.asarray(coming[~np.isin(coming, losers)])

    def drop(self, rows: Ints) -> None:
        """Objects out of all tiers."""
        index = self._index
        states = index.state[rows]
        names = self._names(rows[np.isin(states, (ix.DISK, ix.BOTH))])
        coming = bool((states == ix.DEMOTING).any())
        index.leave_memory(rows, ix.GHOST)
        if coming:  # their writer removes the files, unless it dies first
            self.say_due(SWEEP)
        self._remove(names)

    def undo_demotions(self, rows: Ints) -> None:
        """Of the dead, or that failed: back to memory, which still has them."""
        self._remove(self._names(rows))  # first: who dies here leaves rows that are undone again
        self._index.state[rows] = ix.MEMORY

    def remove_unrecorded(self, names: Sequence[str]) -> None:
        if names:
            none = ~self._recorded(*words_of(names))
            self._remove(list(itertools.compress(names, none.tolist())))

    def say_due(self, what: int) -> None:
        self._index.files_due = max(self._index.files_due, what)

    def _used(self) -> int:
        return int(self._index.image_bytes[self._index.in_state(*HAS_FILE)].sum())

    def _names(self, rows: Ints) -> list[str]:
        low, high = self._index.low[rows].tolist(), self._index.high[rows].tolist()
        return [key_name(a, b) for a, b in zip(low, high, strict=True)]

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._disk.remove(name)

    def _recorded(self, low: ix.Words, high: ix.Words) -> Bools:
        rows = self._index.find(low, high)
        return np.asarray((rows >= 0) & np.isin(self._index.state[rows], HAS_FILE))

    # --- walks ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """See to what is due, beside everything else, unless somebody who lives is at it."""
        index = self._index
        if index.files_due == NOTHING and not index.files_by:
            return
        with self._starting:
            by = index.files_by
            if (self._thread and self._thread.is_alive()) or (by and self._members.alive(by)):
                return
            self._thread = self._calls.beside(self._walks, "kvferry-files")

    def wait(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)

    def sweep_now(self, deadline: float) -> None:
        """Whatever no record names goes, also what was to be taken in."""
        for batch in _batches(self._disk.names(tell=False)):
            self._sweep(batch, deadline)

    def _walks(self) -> None:
        """Until nothing is due; also after a lock that could not be had, because the next who needs
        room may be long in coming."""
        while not self._calls.closing.is_set():
            try:
                self._walks_in_turn()
                return
            except StoreError as error:
                _log.warning("disk tier: the walk through its files waits: %s", error)
            except Exception:
                _log.exception("disk tier: the walk through its files failed")
                return
            finally:
                self._let_go(self._members.me)
            self._calls.closing.wait(LOCK_SECONDS)

    def _walks_in_turn(self) -> None:
        index, me = self._index, self._members.me
        while not self._calls.closing.is_set():
            with self._locked(time.monotonic() + LOCK_SECONDS):
                by = index.files_by
                if by not in (0, me):
                    if self._members.alive(by):
                        return
                    self.say_due(SWEEP)  # who died at it had said that it was done with
                due = index.files_due
                if due == NOTHING:
                    index.files_by = 0
                    return
                index.files_by = me
                if due == SWEEP:  # what falls due from now on is another walk
                    index.files_due = NOTHING
                    writers = self._disk.writers()  # nobody becomes a member without the lock
                    self._disk.clean({n for n in writers if not self._members.alive(n)})
            whole = self._walk(due)
            with self._locked(time.monotonic() + LOCK_SECONDS):
                index.files_by = 0
                if due == SWEEP and not whole:
                    self.say_due(SWEEP)
                elif due == ADOPT and whole and index.files_due == ADOPT:
                    index.files_due = SWEEP  # of those who died meanwhile

    def _let_go(self, me: int) -> None:
        index = self._index
        if index.files_by == me:
            index.files_due = max(index.files_due, SWEEP)
            index.files_by = 0  # one word, which nobody else writes while this member lives

    def _walk(self, due: int) -> bool:
        """Whether it came to the end."""
        step = self._adopt if due == ADOPT else self._sweep
        for batch in _batches(self._disk.names(tell=due == ADOPT)):
            if self._calls.closing.is_set() or not step(batch, time.monotonic() + LOCK_SECONDS):
                return False
        return True

    def _sweep(self, names: list[str], deadline: float) -> bool:
        low, high = words_of(names)
        without = itertools.compress(names, (~self._recorded(low, high)).tolist())
        lost = [name for name in without if self._disk.is_ours(name)]
        if lost:
            with self._locked(deadline):
                self.remove_unrecorded(lost)
        return True

    def _adopt(self, names: list[str], deadline: float) -> bool:
        """Take in whole files of this batch up to the capacity; False where that is off."""
        index, disk = self._index, self._disk
        new = list(itertools.compress(names, (~self._recorded(*words_of(names))).tolist()))
        images = [disk.header(name) for name in new]
        right = [
            image is not None and _is_named(image, n) for n, image in zip(new, images, strict=True)
        ]
        bad = [n for n, ok in zip(new, right, strict=True) if not ok and disk.is_ours(n)]
        whole = [
            (n, i) for n, i, ok in zip(new, images, right, strict=True) if ok and i is not None
        ]
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
            # those that are in memory by now, or on their way, have no use for an old file
            fits = np.isin(state, (ix.FREE, ix.GHOST))
            fits &= _within(np.where(fits, size, 0), index.geometry.disk_bytes - self._used())
            fresh = fits & (rows < 0)
            rows[fresh] = index.claim(low[fresh], high[fresh], self._clock(), rows[rows >= 0])
            fits &= rows >= 0
            taken = rows[fits]
            index.length[taken] = np.array([i.length for _, i in whole], dtype=np.int64)[fits]
            index.image_bytes[taken] = size[fits]
            index.state[taken] = ix.DISK
            self.remove_unrecorded(kept)
        return True


def lowest(scores: Floats, sizes: Ints, goal: int) -> Ints:
    """Indices by rising score, enough of them for `goal` bytes where there are enough."""
    count = int(goal / max(float(sizes.mean()), 1.0) * 1.5) + 16
    while count < len(scores):
        some = np.argpartition(scores, count - 1)[:count]
        if int(sizes[some].sum()) >= goal:
            return np.asarray(some[np.argsort(scores[some], kind="stable")])
        count *= 4
    return np.asarray(np.argsort(scores, kind="stable"))


def _within(sizes: Ints, room: int) -> Bools:
    """Which of these, in turn, find room."""
    fits = np.zeros(len(sizes), dtype=bool)
    for at, size in enumerate(sizes.tolist()):
        if size <= room:
            fits[at] = True
            room -= size
    return fits


def _is_named(image: Image, name: str) -> bool:
    (low,), (high,) = hash_keys([image.key])
    return name == key_name(int(low), int(high))


def _batches(names: Iterator[str]) -> Iterator[list[str]]:
    while batch := list(itertools.islice(names, BATCH_FILES)):
        yield batch


# --------------------------------------------------------------------------------------------------
# One store to a disk tier's directory: a file in it that all processes of the store keep locked.
#
# The file says which store that is, by the number that the store's index was given when it was
# made: stores in containers with a /dev/shm of their own have one path and are two. Processes of
# one store share the lock. Whoever finds it free writes its store's number; whoever finds another
# number under a lock that somebody holds is refused, because either store would remove the other's
# files as left behind by the dead, and both would fill the disk.
#
# Nor may processes of one store use two directories, which is what a path means in containers that
# share memory and not the disk: where others have the store open, the lock must be theirs.
#
# The kernel drops the lock with its last holder, so nothing is left to clean up.
# --------------------------------------------------------------------------------------------------

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
