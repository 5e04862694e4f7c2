"""Device memory by its owner's addresses: what is registered, and where it lies in this process.

Every copy is checked against it before the first byte moves. Usually one comparison of extremes is
enough, or one for each row of strided runs; else every copy is looked at by itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvferry.transport.base import Ints, MemoryRegion
from kvferry.transport.cuda_lane import Shifts
from kvferry.transport.cuda_work import Runs, least, most
from kvferry.transport.regions import RegionTable

FAR = 1 << 62  # sums of numbers below it fit


@dataclass(frozen=True, slots=True)
class Mapped:
    """Regions, none of which reaches over two allocations, and their distance from the owner's."""

    table: RegionTable
    shifts: Ints
    spans: tuple[tuple[int, int, int], ...]  # start, end and shift of each region

    @classmethod
    def of(cls, parts: Iterable[tuple[Sequence[MemoryRegion], int]]) -> Mapped:
        """Regions of each allocation, and its shift."""
        tables = [(RegionTable.of(regions), shift) for regions, shift in parts]
        none = np.empty(0, dtype=np.int64)
        starts = np.concatenate([none, *(t.starts for t, _ in tables)])
        ends = np.concatenate([none, *(t.ends for t, _ in tables)])
        shifts = np.concatenate([none, *(np.full(len(t), s, dtype=np.int64) for t, s in tables)])
        order = np.argsort(starts, kind="stable")
        arrays = starts[order], ends[order], shifts[order]
        spans = tuple(zip(*(a.tolist() for a in arrays), strict=True))
        return cls(RegionTable(*arrays[:2]), arrays[2], spans)

    def shift_of(self, low: int, high: int) -> int | None:
        """The shift of the region that holds all from `low` to `high`; None where none does."""
        at = bisect_right(self.spans, (low, 1 << 63)) - 1  # sooner than NumPy is called
        if at < 0 or high > self.spans[at][1]:
            return None
        return self.spans[at][2]

    def shifted(self, rows: Ints, low: int, high: int) -> Ints | None:
        """Rows where they lie here, each of which reaches from `low` to `high` around it.

        None where one of them does not lie in one region.
        """
        if max(abs(low), abs(high), int(rows.max()), -int(rows.min())) >= FAR:
            return None
        lows = rows + low
        if self.table.first_outside(lows, np.full(len(lows), high - low)) >= 0:
            return None
        at = np.searchsorted(self.table.starts, lows, side="right") - 1
        return rows + self.shifts[at]

    def here(self, address: Ints) -> Ints:
        """Addresses in this process, of ranges that were checked."""
        if len(self.table) == 0:
            return address
        at = np.searchsorted(self.table.starts, address, side="right") - 1
        return address + self.shifts[at]


@dataclass(frozen=True, slots=True)
class _Extent:
    """The addresses that runs reach on one side, from each row."""

    low: int
    high: int
    rows: Ints

    @classmethod
    def of(cls, rows: Ints, segments: Ints, longest: int, steps: Ints) -> _Extent:
        low, high = least(segments) + least(steps), most(segments) + most(steps)
        return cls(low, high + longest, rows)

    def shift(self, memory: Mapped) -> int | None:
        """Where one region holds all."""
        return memory.shift_of(least(self.rows) + self.low, most(self.rows) + self.high)

    def shifted_rows(self, memory: Mapped) -> Ints | None:
        """Where each row lies in one region."""
        return memory.shifted(self.rows, self.low, self.high)


def place(runs: Runs, src: Mapped, dst: Mapped, *, reading: bool) -> Iterator[tuple[Runs, Shifts]]:
    """The runs as they are to be copied in this process. Raises `OutOfBounds` before the first."""
    if runs.copies == 0:
        return iter(())
    if runs.shortest >= 0:
        from_ = _Extent.of(runs.src_rows, runs.src_segments, runs.longest, runs.src_steps)
        to = _Extent.of(runs.dst_rows, runs.dst_segments, runs.longest, runs.dst_steps)
        src_shift, dst_shift = from_.shift(src), to.shift(dst)
        if src_shift is not None and dst_shift is not None:
            return iter([(runs, Shifts(src_shift, dst_shift))])
        src_rows, dst_rows = from_.shifted_rows(src), to.shifted_rows(dst)
        if src_rows is not None and dst_rows is not None:
            return iter([(replace(runs, src_rows=src_rows, dst_rows=dst_rows), Shifts())])
    ours, theirs = "this carrier", "the peer"
    for arrays in runs.arrays():
        for part in arrays.windows():
            src.table.require(theirs if reading else ours, part.src, part.length)
            dst.table.require(ours if reading else theirs, part.dst, part.length)
    return _singly(runs, src, dst)


def _singly(runs: Runs, src: Mapped, dst: Mapped) -> Iterator[tuple[Runs, Shifts]]:
    for arrays in runs.arrays():
        for part in arrays.windows():
            some = part.without_empty()
            here = replace(some, src=src.here(some.src), dst=dst.here(some.dst))
            yield Runs.of_arrays(here), Shifts()
