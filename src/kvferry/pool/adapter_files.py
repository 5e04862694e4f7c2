"""The files behind a LoRA adapter's name: whoever saves under the name looks whether they changed.

A *stamp* is what changes when files do, or others take their place: name, device, inode, size and
times of the files, of their folder and of links to them. Of folders further up device and inode
alone: their times change with whatever is put beside the adapter.

An engine reads an adapter's files at some time between a request's arrival and the end of its
computation, and tells nobody when. So a save carries the stamp that the name was given under, and
the worker compares it once the blocks are computed: if it is the same, there were no other files in
between. A stamp means something on one host, in one mount namespace; elsewhere nobody can compare,
and nothing is saved. Nor if one worker is elsewhere: what it loaded is in the others' blocks, too.

Nobody waits for a file system that hangs: the look is given up, and while it hangs no other begins.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
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
    size_bytes: int = 0
    written_ns: int = 0
    changed_ns: int = 0


Stamp = tuple[Seen, ...]


def stamp_of(path: str) -> Stamp:
    """What changes whenever an adapter's files do, or others take their place."""
    folder = Path(path).expanduser().absolute()
    weights = sorted(file for pattern in PATTERNS for file in folder.glob(pattern))
    if not weights:
        raise DescriptionError(
            "it is no folder with weights on this machine, so that nothing tells which it has; "
            "download it, and load it from there"
        )
    files = [folder / CONFIGURATION, *weights]
    links = [part for part in (*folder.parents, folder, *files) if part.is_symlink()]
    above = [(str(part), part.stat()) for part in folder.parents]
    found = [(str(part), part.lstat()) for part in links]
    found += [(str(part), part.stat()) for part in (folder, *files)]
    return (
        *(Seen(name, s.st_dev, s.st_ino) for name, s in above),
        *(
            Seen(name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
            for name, s in found
        ),
    )


def changed_at(stamp: Stamp) -> float:
    """The last change, by the clock of files."""
    return max(max(seen.written_ns, seen.changed_ns) for seen in stamp) / 1e9


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
    digest: str  # of the stamp
    host: str  # of the scheduler; empty: not all workers are there, or nobody knows

    @classmethod
    def of(cls, path: str, stamp: Stamp) -> AdapterFiles:
        return cls(path, _digest(stamp), this_host())

    def why_not(self) -> str:
        """Why what was computed until now may be of other files; empty: it is of these."""
        if not self.host or self.host != this_host():
            return ELSEWHERE
        try:
            return "" if _digest(stamp_of(self.path)) == self.digest else CHANGED
        except Exception as error:  # whatever files come up with
            return f"{CHANGED} ({error})"


class AdapterCheck:
    """Looks at files for the thread that saves."""

    def __init__(self) -> None:
        self._looks = LateCalls("lora-files", most_hanging=1)
        self._told: set[tuple[str, str]] = set()

    def unchanged(self, files: AdapterFiles, deadline: float) -> bool:
        """Whether blocks that are computed by now may be saved under the files' name."""
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
                "what requests with the LoRA adapter of %s compute is not saved in the pool: %s",
                files.path,
                why,
            )
        return not why

    def close(self) -> None:
        self._looks.close()


def _digest(stamp: Stamp) -> str:
    return blake2b(repr([tuple(seen) for seen in stamp]).encode(), digest_size=16).hexdigest()
