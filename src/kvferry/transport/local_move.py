"""How `local` moves a slice: run by run, or short runs through a buffer.

The kernel takes longer for one more run than for a kilobyte more. So a read of short runs that lie
close together over there takes the long ranges that *cover* them into a buffer, and places the runs
from there. Both ends of a cover lie in the same registered region, so a cover never leaves it. A
write would destroy what lies between the runs; but where short runs touch over there and lie apart
here, it gathers them first, and writes them as one.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from kvferry.transport import vm
from kvferry.transport.host import HostMemory
from kvferry.transport.iovec import joined
from kvferry.transport.memory import Bytes, Ints
from kvferry.transport.regions import WINDOW, Arrays, RegionTable

# Of reads: from the beginning of one run to that of the next (docs/benchmarks.md, "Carriers"). Runs
# that touch win nothing.
MOST_STEP_BYTES = 1 << 10
MOST_GATHERED_BYTES = 128  # of writes: a run's
BUFFER_BYTES = WINDOW * MOST_GATHERED_BYTES  # of each thread: a slice of runs that are gathered
COVERED_RUNS = BUFFER_BYTES // MOST_STEP_BYTES  # at a time


class LocalMover:
    """Moves slices between this process's memory and another one's, on any thread."""

    def __init__(self) -> None:
        self._mine = threading.local()
        self.memory = HostMemory([])  # set by who owns the regions

    def move(self, pid: int, regions: RegionTable, part: Arrays, *, reading: bool) -> None:
        """One of `slices`: at most `WINDOW` copies, none of them empty."""
        if reading and covers_pay(part):
            self._read_covers(pid, regions, part)
        elif not reading and gathering_pays(part):
            self._write_gathered(pid, part)
        else:
            (vm.read if reading else vm.write)(pid, part.src, part.dst, part.length)

    def _read_covers(self, pid: int, regions: RegionTable, part: Arrays) -> None:
        buffer = self._buffer()
        for first in range(0, len(part), COVERED_RUNS):
            few = slice(first, first + COVERED_RUNS)
            address, length, at = covers(regions, part.src[few], part.length[few])
            vm.read(pid, address, buffer.ctypes.data + np.cumsum(length) - length, length)
            self.memory.place(buffer, at, part.dst[few], part.length[few])

    def _write_gathered(self, pid: int, part: Arrays) -> None:
        buffer = self._buffer()
        self.memory.gather(part.src, part.length, buffer)
        there, length = joined(part.dst, part.length)
        vm.write(pid, buffer.ctypes.data + np.cumsum(length) - length, there, length)

    def _buffer(self) -> Bytes:
        if not hasattr(self._mine, "buffer"):
            self._mine.buffer = np.empty(BUFFER_BYTES, dtype=np.uint8)
        made: Bytes = self._mine.buffer
        return made


def covers_pay(part: Arrays) -> bool:
    """Whether most runs are short, and follow the one before them closely, but not at once."""
    if int(part.length.max()) > MOST_STEP_BYTES:
        return False
    gap = part.src[1:] - part.src[:-1] - part.length[:-1]
    return 2 * int(np.count_nonzero(_near(part.src) & (gap > 0))) >= len(part)


def gathering_pays(part: Arrays) -> bool:
    """Whether most runs are short, and touch the one before them over there, but not here."""
    if int(part.length.max()) > MOST_GATHERED_BYTES:
        return False
    here, there = (a[1:] == a[:-1] + part.length[:-1] for a in (part.src, part.dst))
    return 2 * int(np.count_nonzero(there & ~here)) >= len(part)


def covers(regions: RegionTable, runs: Ints, length: Ints) -> tuple[Ints, Ints, Ints]:
    """Addresses and lengths of the covers, in the order of the runs; and where each run begins in
    the covers' bytes, one cover after another."""
    near = _near(runs) & (runs[1:] >= runs[:-1] + length[:-1])
    if len(regions) > 1:
        of = np.searchsorted(regions.starts, runs, side="right")
        near &= of[1:] == of[:-1]
    heads = np.concatenate((np.zeros(1, dtype=np.int64), np.flatnonzero(~near) + 1))
    tails = np.append(heads[1:], len(runs)) - 1
    address = runs[heads]
    sizes = runs[tails] + length[tails] - address
    begins = np.cumsum(sizes) - sizes
    return address, sizes, runs + np.repeat(begins - address, tails + 1 - heads)


def _near(runs: Ints) -> NDArray[np.bool_]:
    """For each run but the first, whether it begins soon after the one before it does."""
    step = runs[1:] - runs[:-1]
    found: NDArray[np.bool_] = (step > 0) & (step <= MOST_STEP_BYTES)
    return found
