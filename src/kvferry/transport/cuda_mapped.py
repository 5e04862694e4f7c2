"""Device memory by its owner's addresses: what is registered, and where it lies in this process.

Every copy is checked against it before the first byte moves. Usually one comparison of extremes is
enough, or one for each row of strided runs; else every copy is looked at by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvferry.transport.base import Ints, MemoryRegion
from kvferry.transport.cuda_lane import Shifts
from kvferry.transport.cuda_work import Runs
from kvferry.transport.regions import RegionTable

FAR = 1 << 62  # sums of numbers below it fit


@dataclass(frozen=True, slots=True)
class Mapped:
    """Regions, none of which reaches over two allocations, and their distance from the owner's."""

    table: RegionTable
    shifts: Ints

    @classmethod
    def of(cls, parts: Iterable[tuple[Sequence[MemoryRegion], int]]) -> Mapped:
        """Regions of each allocation, and its shift."""
        tables = [(RegionTable.of(regions), shift) for regions, shift in parts]
        none = np.empty(0, dtype=np.int64)
        starts = np.concatenate([none, *(t.starts for t, _ in tables)])
        ends = np.concatenate([none, *(t.ends for t, _ in tables)])
        shifts = np.concatenate([none, *(np.full(len(t), s, dtype=np.int64) for t, s in tables)])
        order = np.argsort(starts, kind="stable")
        return cls(RegionTable(starts[order], ends[order]), shifts[order])

    def shift_of(self, low: int, high: int) -> int | None:
        """The shift of the region that holds all from `low` to `high`; None where none does."""
        at = int(np.searchsorted(self.table.starts, low, side="right")) - 1 if low >= 0 else -1
        if at < 0 or high > int(self.table.ends[at]):
            return None
        return int(self.shifts[at])

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
    def of(cls, rows: Ints, segments: Ints, lengths: Ints, steps: Ints) -> _Extent:
        return cls(
            int(segments.min()) + int(steps.min()),
            int(segments.max()) + int(lengths.max()) + int(steps.max()),
            rows,
        )

    def shift(self, memory: Mapped) -> int | None:
        """Where one region holds all."""
        return memory.shift_of(int(self.rows.min()) + self.low, int(self.rows.max()) + self.high)

    def shifted_rows(self, memory: Mapped) -> Ints | None:
        """Where each row lies in one region."""
        far = max(abs(self.low), abs(self.high), int(self.rows.max()), -int(self.rows.min()))
        if far >= FAR:
            return None
        lows = self.rows + self.low
        if memory.table.first_outside(lows, np.full(len(lows), self.high - self.low)) >= 0:
            return None
        at = np.searchsorted(memory.table.starts, lows, side="right") - 1
        return self.rows + memory.shifts[at]


def place(runs: Runs, src: Mapped, dst: Mapped, *, reading: bool) -> Iterator[tuple[Runs, Shifts]]:
    """The runs as they are to be copied in this process. Raises `OutOfBounds` before the first."""
    if runs.copies == 0:
        return iter(())
    if int(runs.lengths.min()) >= 0:
        from_ = _Extent.of(runs.src_rows, runs.src_segments, runs.lengths, runs.src_steps)
        to = _Extent.of(runs.dst_rows, runs.dst_segments, runs.lengths, runs.dst_steps)
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
