"""The disk tier: one file per object, named by its key's hash, the same image as in memory.

A file appears under its name only when all its bytes are written (another name, then rename), and
leaves by unlink. Nothing is synced: after a loss of power a file may be short or wrong, which its
header, its size and its checksums tell. Files need no index: a store that is opened on an empty
index takes in what it finds.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from kvferry.pool.embedded_image import Image, header_size, open_image

_log = logging.getLogger(__name__)
_TEMPORARY = ".part-"
_HEAD_BYTES = 32


class DiskTier:
    """Files of one directory."""

    def __init__(self, directory: Path, member: int) -> None:
        self._directory = directory
        self._member = member
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._made: set[str] = set()
        self._next = 0

    def path(self, name: str) -> Path:
        return self._directory / name[:2] / name

    def write(self, name: str, image: memoryview) -> bool:
        """Whether the whole image is there now; if not, nothing is."""
        target = self.path(name)
        if name[:2] not in self._made:
            target.parent.mkdir(exist_ok=True, mode=0o700)
            self._made.add(name[:2])
        self._next += 1
        part = self._directory / f"{_TEMPORARY}{self._member}-{self._next}"
        try:
            with part.open("wb", buffering=0) as file:
                left = image
                while left:
                    left = left[file.write(left) or 0 :]
            part.rename(target)
        except OSError as error:
            _log.warning("disk tier: %s could not be written: %s", target, error)
            with contextlib.suppress(OSError):
                part.unlink()
            return False
        return True

    def read(self, name: str, into: memoryview) -> bool:
        """Fill `into` from the file; False where it is gone or has another size."""
        try:
            fd = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            if os.fstat(fd).st_size != len(into):
                return False
            at = 0
            while at < len(into):
                got = os.preadv(fd, [into[at:]], at)
                if got == 0:
                    return False
                at += got
        except OSError as error:
            _log.warning("disk tier: %s could not be read: %s", self.path(name), error)
            return False
        finally:
            os.close(fd)
        return True

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            self.path(name).unlink()

    def clean(self, dead: Iterator[int] | None = None) -> None:
        """Remove what dead members (None: all) left half-written."""
        gone = None if dead is None else set(dead)
        for part in self._directory.glob(_TEMPORARY + "*"):
            number = part.name[len(_TEMPORARY) :].partition("-")[0]
            if gone is None or (number.isdigit() and int(number) in gone):
                with contextlib.suppress(OSError):
                    part.unlink()

    def header(self, name: str) -> Image | None:
        """The header of a file that is whole as far as its size tells."""
        path = self.path(name)
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
                head += file.read(max(0, min(header_size(head), size) - len(head)))
        except OSError:
            return None
        image = open_image(memoryview(head))
        return image if image is not None and image.header_bytes + image.length == size else None

    def found(self) -> Iterator[tuple[str, Image, int]]:
        """Name, header and size of every whole file; others are removed."""
        for path in self._directory.glob("??/*"):
            image = self.header(path.name)
            if image is None:
                with contextlib.suppress(OSError):
                    path.unlink()
            else:
                yield path.name, image, image.header_bytes + image.length
