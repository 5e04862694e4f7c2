"""The files behind a LoRA adapter's name: whoever saves under the name looks whether they changed.

A *stamp* is what changes when files do, or others take their place: name, device, inode, size and
times of the files, of their folder and of links to them. The times of folders further up change
with whatever is put beside the adapter: those count where the folder itself was changed, and not
what is in it, as by a move.

An engine reads an adapter's files at some time between a request's arrival and the end of its
computation, and tells nobody when. So a save carries the stamp that the name was given under, and
the worker compares it once the blocks are computed: if it is the same, there were no other files in
between. A stamp means something on one host, in one mount namespace; elsewhere nobody can compare,
and nothing is saved. Nor if one worker is elsewhere: what it loaded is in the others' blocks, too.

Nobody waits for a file system that hangs: the look is given up, and while it hangs no other begins.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from stat import S_ISLNK
from typing import NamedTuple

from kvferry.errors import DescriptionError, StoreError
from kvferry.pool.late_calls import LateCalls
from kvferry.pool.weights import PATTERNS

log = logging.getLogger("kvferry")

CONFIGURATION = "adapter_config.json"  # rank, scale and targets: they change what is computed
LOOK_SECONDS = 5.0  # at a few files; saves of other requests wait behind it

_FINAL = "set lora_files_final if adapters' files never change once they are written"
CHANGED = (
    "its files or their folders are not those that its first request found, and nobody knows which "
    f"of them the engine has loaded; load changed weights under a new name, or {_FINAL}"
)
ELSEWHERE = (
    "a worker is not on the scheduler's host, has other mounts, or did not say where it is, and "
    f"nobody can tell whether the files changed that it has loaded; {_FINAL}"
)
LATE = f"its files could not be looked at in time; see what the file system does, or {_FINAL}"


class Seen(NamedTuple):
    name: str
    device: int
    inode: int
    size_bytes: int
    written_ns: int
    changed_ns: int


@dataclass(frozen=True, slots=True)
class Stamp:
    files: tuple[Seen, ...]  # their folder and links among them
    above: tuple[Seen, ...]  # folders further up

    @property
    def changed_at(self) -> float:
        """The last change, by the clock of files."""
        files = (max(seen.written_ns, seen.changed_ns) for seen in self.files)
        moved = (s.changed_ns for s in self.above if s.changed_ns != s.written_ns)
        return max((*files, *moved)) / 1e9

    def holds(self, now: Stamp) -> bool:
        """Whether nothing was exchanged since, nor exchanged and put back."""
        return (
            self.files == now.files
            and [seen[:3] for seen in self.above] == [seen[:3] for seen in now.above]
            and all(
                a.changed_ns == b.changed_ns or a.written_ns != b.written_ns
                for a, b in zip(self.above, now.above, strict=True)
            )
        )


def stamp_of(path: str) -> Stamp:
    """What changes whenever an adapter's files do, or others take their place."""
    folder = Path(path).expanduser().absolute()
    weights = _weights(folder)
    if not weights:
        raise DescriptionError(
            "it is no folder with weights on this machine, so that nothing tells which it has; "
            "download it, and load it from there"
        )
    files = [folder / CONFIGURATION, *weights]
    # schedulers wait for this: every part is asked for once, and links alone are followed
    itself = {part: part.lstat() for part in (*folder.parents, folder, *files)}
    links = {part: found for part, found in itself.items() if S_ISLNK(found.st_mode)}
    found = list(links.items())
    found += [(p, p.stat() if p in links else itself[p]) for p in (folder, *files)]
    beside = folder.resolve() if links or ".." in folder.parts else folder
    real = [beside, *(part.resolve() for part in files if part in links)]
    above = {beside, *folder.parents, *(up for part in real for up in part.parents)} - {folder}
    return Stamp(
        _seen(found),
        _seen((p, p.stat() if p in links or p not in itself else itself[p]) for p in sorted(above)),
    )


def _weights(folder: Path) -> list[Path]:
    try:
        found = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(file for file in found if any(fnmatchcase(file.name, p) for p in PATTERNS))


def _seen(parts: Iterable[tuple[Path, os.stat_result]]) -> tuple[Seen, ...]:
    return tuple(
        Seen(str(part), s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
        for part, s in parts
    )


def this_host() -> str:
    """A name for what paths, devices and inodes mean to this process; empty: nobody knows."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/mnt').readlink()}"
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """What a name was given for, as a save order carries it to workers."""

    path: str  # as the engine was told
    stamp: Stamp
    host: str  # of the scheduler; empty: not all workers are there, or nobody knows

    def elsewhere(self) -> AdapterFiles:
        """The same where not all workers are here: nobody can compare."""
        return replace(self, host="")

    def why_not(self) -> str:
        """Why what was computed until now may be of other files; empty: it is of these."""
        if not self.host or self.host != this_host():
            return ELSEWHERE
        try:
            return "" if self.stamp.holds(stamp_of(self.path)) else CHANGED
        except Exception as error:  # whatever files come up with
            return f"{CHANGED} ({error})"


class AdapterCheck:
    """Looks at files for whoever keeps what was computed with them.

    outcome  of what was computed with others, for the log
    """

    def __init__(self, outcome: str = "is not saved in the pool") -> None:
        self._outcome = outcome
        self._looks = LateCalls("lora-files", most_hanging=1)
        self._told: set[tuple[str, str]] = set()

    def unchanged(self, files: AdapterFiles, deadline: float) -> bool:
        """Whether blocks that are computed by now are of the files' name."""
        soon = min(deadline, time.monotonic() + LOOK_SECONDS)
        try:
            why = self._looks("look", files.why_not, soon)
        except StoreError:
            why = LATE
        except (RuntimeError, MemoryError) as error:  # no thread for it
            why = f"{LATE} ({error})"
        if why and (files.path, why) not in self._told:
            self._told.add((files.path, why))
            log.warning(
                "what requests with the LoRA adapter of %s compute %s: %s",
                files.path,
                self._outcome,
                why,
            )
        return not why

    def close(self) -> None:
        self._looks.close()
