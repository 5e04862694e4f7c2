# SPDX-License-Identifier: Apache-2.0
"""Private files and directories: keys, locks, and the pool's tiers.

A new file has mode 0600 and a new directory 0700, whatever the umask is. An existing one is used
only if it belongs to this user and grants nothing to the group and to others. If the last part of
a path is a symbolic link, it is refused. Reports that a user names (`--html out.html`) are not
private: they follow the umask.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from kvferry.errors import NotPrivate

_OTHERS = 0o077  # permission bits of the group and of all others
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK: opening a FIFO does not wait


def private_directory(path: Path) -> None:
    """Make the directory and its missing parents. Check a directory that exists."""
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    if path.is_symlink():
        raise NotPrivate(f"{path} is a symbolic link to {path.readlink()}; name its target instead")
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFE)
    try:
        _require_private(os.fstat(fd), path)
    finally:
        os.close(fd)


def create_private(path: Path) -> int:
    """Create a file and open it for reading and writing; `FileExistsError` if it exists."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, 0o600)


def open_private(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Open a file and check that it is private. With `O_CREAT`, create a missing one."""
    try:
        fd = os.open(path, flags | _SAFE, 0o600)
    except OSError:
        if path.is_symlink():
            raise NotPrivate(f"{path} is a symbolic link; expected a file; remove it") from None
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise NotPrivate(f"{path} is {stat.filemode(found.st_mode)}; expected a regular file")
        _require_private(found, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_private(path: Path, data: bytes) -> None:
    """Write a new file. It appears under its name only when it is complete and on the disk.

    The first writer wins, and the others get a `FileExistsError`.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = create_private(part)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        path.hardlink_to(part)
    finally:
        part.unlink()


def read_private(path: Path, most: int) -> bytes:
    """All bytes of a private file of at most `most` bytes. Any other file is `NotPrivate`."""
    fd = open_private(path, os.O_RDONLY)
    with os.fdopen(fd, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise NotPrivate(f"{path} has more than {most} bytes; expected at most that many")
    return data


def _require_private(found: os.stat_result, path: Path) -> None:
    """Refuse a path that belongs to another user, or that other users may read or write."""
    mode, me = stat.S_IMODE(found.st_mode), os.geteuid()
    if found.st_uid != me:
        raise NotPrivate(
            f"{path} belongs to user {found.st_uid}, this process runs as user {me}; name a path "
            "of your own, or run it as that user"
        )
    if mode & _OTHERS:
        is_folder = stat.S_ISDIR(found.st_mode)
        what = f"run `chmod {'700' if is_folder else '600'} {path}`"
        if mode & stat.S_ISVTX:  # a directory for all users, like /tmp
            what = "name a directory inside it"
        raise NotPrivate(f"{path} has mode {mode:04o}, which lets other users in; {what}")
