"""How `local` moves a slice: run by run, or packed where that is cheaper (cost.py).

A packed read takes long ranges that cover the runs into a staging buffer (cover.py) and scatters
from there; a packed write, of runs that lie together over there, gathers here and writes them as
one. The peer takes no part in either.
"""

from __future__ import annotations

import threading

import numpy as np

from kvferry.transport import vm
from kvferry.transport.cost import Choice, Cost, pays
from kvferry.transport.cover import follows, pieces
from kvferry.transport.host import HostMemory
from kvferry.transport.iovec import joined
from kvferry.transport.memory import Bytes, Ints
from kvferry.transport.regions import Arrays, RegionTable, slices

STAGING_BYTES = 4 << 20  # of each thread; smaller ones spend their time in Python
PACKED_RUN_BYTES = 16 << 10  # nothing is won by packing longer runs than these
MOST_GAP_BYTES = 64 << 10


class LocalMover:
    """Moves slices between this process's memory and another one's, on any thread."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._staging = threading.local()
        self.memory = HostMemory([])  # set by who owns the regions

    def move(self, pid: int, regions: RegionTable, part: Arrays, *, reading: bool) -> None:
        """One slice, direct or packed."""
        if self.choice.packing != "direct" and int(part.length.max()) <= PACKED_RUN_BYTES:
            if reading:
                gap = self._most_gap()
                if self.choice.packing == "packed" or self._covers_pay(regions, part, gap):
                    self._read_covers(pid, regions, part, gap)
                    return
            elif self.choice.packing == "packed" or self._gather_pays(part):
                self._write_gathered(pid, part)
                return
        (vm.read if reading else vm.write)(pid, part.src, part.dst, part.length)

    def _most_gap(self) -> int:
        direct = self.choice.cost("direct")
        return most_gap(direct) if direct is not None else 0

    def _covers_pay(self, regions: RegionTable, part: Arrays, gap_bytes: int) -> bool:
        direct, packed = self.choice.cost("direct"), self.choice.cost("packed")
        if direct is None or packed is None:
            return False
        count = int(part.length.sum())
        packs = packed.seconds(len(part), count)
        bare = count * direct.byte_seconds
        if not pays(bare + packs, len(part) * direct.descriptor_seconds + bare):
            return False  # wherever the runs lie, which takes longer to see
        runs = (_count_apart(part.src, part) + _count_apart(part.dst, part)) / 2
        as_they_are = runs * direct.descriptor_seconds + bare
        covers = covers_seconds(direct, regions, part, gap_bytes)
        return pays(covers + packs, as_they_are)

    def _gather_pays(self, part: Arrays) -> bool:
        direct, packed = self.choice.cost("direct"), self.choice.cost("packed")
        if direct is None or packed is None:
            return False
        count = int(part.length.sum())

        def wins(runs: int) -> bool:
            gain = (runs - 1) / 2 * direct.descriptor_seconds  # what lies apart there stays so
            return pays(packed.seconds(runs, count), gain)

        if not wins(len(part)):  # nor do fewer: both grow by the run, and one wins nothing
            return False
        here, there = _count_apart(part.src, part), _count_apart(part.dst, part)
        return there < here and wins(here)

    def _read_covers(self, pid: int, regions: RegionTable, part: Arrays, gap_bytes: int) -> None:
        buffer = self._buffer()
        for copies, covers in pieces(regions, part, gap_bytes, len(buffer)):
            where = buffer.ctypes.data + np.cumsum(covers.length) - covers.length
            vm.read(pid, covers.address, where, covers.length)
            self.memory.place(buffer, covers.at, copies.dst, copies.length)

    def _write_gathered(self, pid: int, part: Arrays) -> None:
        buffer = self._buffer()
        for copies in slices(part, len(buffer)):
            self.memory.gather(copies.src, copies.length, buffer)
            there, length = joined(copies.dst, copies.length)
            where = buffer.ctypes.data + np.cumsum(length) - length
            vm.write(pid, where, there, length)

    def _buffer(self) -> Bytes:
        if not hasattr(self._staging, "buffer"):
            self._staging.buffer = np.empty(STAGING_BYTES, dtype=np.uint8)
        made: Bytes = self._staging.buffer
        return made


def most_gap(direct: Cost) -> int:
    """Beyond it, one more descriptor costs less than the bytes between two runs."""
    if direct.byte_seconds <= 0:
        return 0
    return min(int(direct.descriptor_seconds / direct.byte_seconds), MOST_GAP_BYTES)


def covers_seconds(direct: Cost, regions: RegionTable, part: Arrays, gap_bytes: int) -> float:
    """What it takes to read the covers of some runs into a staging buffer."""
    gap, near = follows(regions, part.src, part.length, gap_bytes)
    apart, extra = len(part) - int(np.count_nonzero(near)), int(gap[near].sum())
    count = int(part.length.sum()) + extra
    return (apart + 1) / 2 * direct.descriptor_seconds + count * direct.byte_seconds


def _count_apart(address: Ints, part: Arrays) -> int:
    """Runs that do not begin where the one before them ends."""
    return 1 + int(np.count_nonzero(address[1:] != address[:-1] + part.length[:-1]))
