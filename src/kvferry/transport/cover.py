"""Long ranges that cover short runs, for carriers that read one-sided.

A reader can take what lies between two runs along, and leave it in its staging buffer: a kilobyte
more costs less than one more descriptor. Runs that follow each other in memory with gaps of at most
`most_gap` become one cover. A cover never leaves a registered region, because both of its ends lie
in the same one. Only reads can do this: a write would destroy what lies in the gaps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.transport.base import Ints
from kvferry.transport.regions import Arrays, RegionTable

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Covers:
    """What to read, one after another, and where in that each run begins."""

    address: Ints
    length: Ints
    at: Ints

    @property
    def bytes(self) -> int:
        return int(self.length.sum())


def follows(regions: RegionTable, runs: Ints, length: Ints, most_gap: int) -> tuple[Ints, Flags]:
    """For each run but the first: the gap to the one before it, and whether they share a cover."""
    gap = runs[1:] - runs[:-1] - length[:-1]
    near = (gap >= 0) & (gap <= most_gap)
    if len(regions) > 1:
        of = np.searchsorted(regions.starts, runs, side="right")
        near &= of[1:] == of[:-1]
    return gap, near


def cover(regions: RegionTable, runs: Ints, length: Ints, most_gap: int) -> Covers:
    """The covers of some runs, none of them empty, in their order."""
    _, near = follows(regions, runs, length, most_gap)
    heads = np.concatenate((np.zeros(1, dtype=np.int64), np.flatnonzero(~near) + 1))
    tails = np.append(heads[1:], len(runs)) - 1
    address = runs[heads]
    sizes = runs[tails] + length[tails] - address
    begins = np.cumsum(sizes) - sizes
    counts = np.diff(np.append(heads, len(runs)))
    return Covers(address, sizes, runs + np.repeat(begins - address, counts))


def pieces(
    regions: RegionTable, copies: Arrays, most_gap: int, most_bytes: int
) -> Iterator[tuple[Arrays, Covers]]:
    """The copies in order, in parts whose covers are at most `most_bytes` together.

    No single run may be longer than that.
    """
    gap, near = follows(regions, copies.src, copies.length, most_gap)
    reads = copies.length.copy()
    reads[1:] += np.where(near, gap, 0)
    ends = np.cumsum(reads)
    first, done = 0, 0
    while first < len(copies):
        last = max(first + 1, int(np.searchsorted(ends, done + most_bytes, side="right")))
        part = Arrays(copies.src[first:last], copies.dst[first:last], copies.length[first:last])
        yield part, cover(regions, part.src, part.length, most_gap)
        first, done = last, int(ends[last - 1])
