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
import itertools
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from kvferry.errors import StoreError
from kvferry.pool.embedded_image import Image, begins_image, header_size, open_image
from kvferry.private_files import create_private

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
