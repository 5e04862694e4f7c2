"""What one launch of the copy kernel does: runs, cut into chunks that fill the GPU.

*Runs* are sums on both sides, `rows[r] + segments[s] + steps[k]`, each of `lengths[s]` bytes; a
plan's batches are runs as they are, and three arrays of single copies are runs of one row and one
step. Everything here is NumPy on the host; the same arithmetic from the other side is in the
kernel (triton_kernels.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvferry.copies import Copies, Ints, StridedCopies
from kvferry.errors import TransferError

CHUNKS = (64, 256, 1024, 4096)  # bytes that one chunk may have
SLOT_COST_BYTES = 64  # what finding a chunk costs, in bytes that could have been moved meanwhile
SAMPLE = 1024  # lengths looked at to choose a chunk
WINDOW = 1 << 17  # copies that one launch takes at most
MOST_ITEMS = 1 << 30  # chunks of one launch; their numbers are 32-bit integers
GRAINS = (16, 4, 1)

_ZERO = np.zeros(1, dtype=np.int64)


def least(numbers: Ints) -> int:
    return int(numbers[0]) if len(numbers) == 1 else int(numbers.min())


def most(numbers: Ints) -> int:
    return int(numbers[0]) if len(numbers) == 1 else int(numbers.max())


@dataclass(frozen=True)
class CudaRuns:
    """See the module's text. All arrays are contiguous and of 64-bit integers.

    What is known of all its lengths is found once: every NumPy call counts for a small batch.
    """

    src_rows: Ints
    dst_rows: Ints
    src_segments: Ints
    dst_segments: Ints
    lengths: Ints
    src_steps: Ints
    dst_steps: Ints

    @classmethod
    def of_arrays(cls, copies: Copies) -> CudaRuns:
        return cls(_ZERO, _ZERO, copies.src, copies.dst, copies.length, _ZERO, _ZERO)

    @classmethod
    def of_strided(cls, copies: StridedCopies) -> CudaRuns:
        names = (
            ("src_rows", "dst_rows"),
            ("src_segments", "dst_segments", "lengths"),
            ("src_steps", "dst_steps"),
        )
        found: dict[str, Ints] = {}
        for group in names:
            arrays = {name: np.asarray(getattr(copies, name)) for name in group}
            shapes = {a.shape for a in arrays.values()}
            if len(shapes) != 1 or any(a.ndim != 1 for a in arrays.values()):
                raise TransferError(
                    f"copies are strided runs whose {', '.join(group)} have one length, found "
                    f"{ {name: a.shape for name, a in arrays.items()} }"
                )
            if any(a.dtype.kind not in "iu" for a in arrays.values()):
                raise TransferError(f"copies are integers, found others in {', '.join(group)}")
            found |= {n: np.ascontiguousarray(a, dtype=np.int64) for n, a in arrays.items()}
        return cls(**found)

    @cached_property
    def shortest(self) -> int:
        return least(self.lengths)

    @cached_property
    def longest(self) -> int:
        return most(self.lengths)

    @cached_property
    def bytes(self) -> int:
        if self.shortest == self.longest:
            return self.longest * self.copies
        return int(self.lengths.sum()) * len(self.src_rows) * len(self.src_steps)

    @property
    def entries(self) -> int:
        """Numbers that describe it."""
        return 2 * len(self.src_rows) + 3 * len(self.lengths) + 2 * len(self.src_steps)

    @property
    def copies(self) -> int:
        return len(self.src_rows) * len(self.lengths) * len(self.src_steps)

    def without_empty(self) -> CudaRuns:
        if self.copies == 0 or self.shortest > 0:
            return self
        return self.of_segments(self.lengths != 0)

    def of_segments(self, which: slice | NDArray[np.bool_]) -> CudaRuns:
        """Only these segments."""
        return replace(
            self,
            src_segments=self.src_segments[which],
            dst_segments=self.dst_segments[which],
            lengths=self.lengths[which],
        )

    def pieces(self, most_segments: int) -> Iterator[CudaRuns]:
        """The same runs with at most so many segments each."""
        if len(self.lengths) <= most_segments:
            yield self
            return
        for first in range(0, len(self.lengths), most_segments):
            yield self.of_segments(slice(first, first + most_segments))

    def grain(self) -> int:
        """The largest of `GRAINS` that divides every address and length."""
        # A bit that is set nowhere is set in no sum either.
        every = self.longest if self.shortest == self.longest else _bits(self.lengths)
        for numbers in (
            self.src_segments,
            self.dst_segments,
            self.src_rows,
            self.dst_rows,
            self.src_steps,
            self.dst_steps,
        ):
            every |= _bits(numbers)
        return next(g for g in GRAINS if every % g == 0)

    def arrays(self) -> Iterator[Copies]:
        """Every copy by itself, a row at a time and at most `WINDOW` together."""
        src = (self.src_segments[:, None] + self.src_steps[None, :]).reshape(-1)
        dst = (self.dst_segments[:, None] + self.dst_steps[None, :]).reshape(-1)
        length = np.repeat(self.lengths, len(self.src_steps))
        for src_row, dst_row in zip(self.src_rows.tolist(), self.dst_rows.tolist(), strict=True):
            for first in range(0, len(src), WINDOW):
                part = slice(first, first + WINDOW)
                yield Copies(src[part] + src_row, dst[part] + dst_row, length[part])


def _bits(numbers: Ints) -> int:
    """Those that are set in any of them."""
    return int(numbers[0]) if len(numbers) == 1 else int(np.bitwise_or.reduce(numbers))


def runs_of(copies: Copies | StridedCopies) -> CudaRuns:
    if hasattr(copies, "src_rows"):
        return CudaRuns.of_strided(cast(StridedCopies, copies))
    return CudaRuns.of_arrays(Copies.of(copies))


@dataclass(frozen=True)
class Work:
    """Runs with lengths above zero, and how they are cut."""

    runs: CudaRuns
    chunk: int  # bytes
    length: int  # of all segments, where they are equal; else 0

    @classmethod
    def of(cls, runs: CudaRuns) -> Work:
        if runs.shortest == runs.longest:
            return cls(runs, chunk_for(runs.longest), runs.longest)
        step = max(1, len(runs.lengths) // SAMPLE)
        return cls(runs, best_chunk(runs.lengths[::step]), 0)

    @cached_property
    def firsts(self) -> Ints:
        """Number of each segment's first chunk; empty where lengths are equal."""
        if self.length:
            return np.empty(0, dtype=np.int64)
        counts = -(-self.runs.lengths // self.chunk)
        firsts = np.empty(len(counts) + 1, dtype=np.int64)
        firsts[0] = 0
        np.cumsum(counts, out=firsts[1:])
        return firsts

    @cached_property
    def chunks(self) -> int:
        """Of one copy where lengths are equal, else of all segments together."""
        return -(-self.length // self.chunk) if self.length else int(self.firsts[-1])

    @property
    def items_per_row(self) -> int:
        copies = len(self.runs.lengths) if self.length else 1
        return self.chunks * copies * len(self.runs.src_steps)

    def search_rounds(self) -> int:
        """Halvings until one of the segments is left."""
        return max(1, len(self.runs.lengths)).bit_length()


@cache
def chunk_for(length: int) -> int:
    return best_chunk(np.asarray([length], dtype=np.int64))


def best_chunk(lengths: Ints) -> int:
    """The chunk size that wastes least: too long leaves threads idle, too short costs finding."""
    costs = [int((-(-lengths // chunk)).sum()) * (chunk + SLOT_COST_BYTES) for chunk in CHUNKS]
    return CHUNKS[int(np.argmin(costs))]


def gathering(runs_src: tuple[Ints, Ints, Ints], lengths: Ints, into: int) -> CudaRuns:
    """Runs that bring scattered bytes together from address `into` on."""
    rows, segments, steps = runs_src
    one = int(lengths.sum())
    offsets = np.empty(len(lengths), dtype=np.int64)
    offsets[:1] = 0
    np.cumsum(lengths[:-1], out=offsets[1:])
    return CudaRuns(
        src_rows=rows,
        dst_rows=into + np.arange(len(rows), dtype=np.int64) * (one * len(steps)),
        src_segments=segments,
        dst_segments=offsets,
        lengths=lengths,
        src_steps=steps,
        dst_steps=np.arange(len(steps), dtype=np.int64) * one,
    )


def reverse(runs: CudaRuns) -> CudaRuns:
    """The same runs from where they go to where they come from."""
    return CudaRuns(
        runs.dst_rows,
        runs.src_rows,
        runs.dst_segments,
        runs.src_segments,
        runs.lengths,
        runs.dst_steps,
        runs.src_steps,
    )
