"""A plan bound to memory: strided batches, and the same as arrays of copies.

Strided batches are the primary form, a few numbers for each segment; carriers and kernels that can
take them as they are. Arrays are one broadcast per batch into the caller's buffers, whole or in
slices. There is no loop over blocks, layers or tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvferry.errors import BindError
from kvferry.layout.parts import Ints
from kvferry.layout.shape import Span
from kvferry.plan.runs import Axis


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """`length[i]` bytes from address `src[i]` to address `dst[i]`."""

    src: Ints
    dst: Ints
    length: Ints

    def __len__(self) -> int:
        return len(self.src)

    @classmethod
    def empty(cls, capacity: int) -> Copies:
        """A buffer to bind into, again and again."""
        src, dst, length = np.empty((3, capacity), dtype=np.int64)
        return cls(src, dst, length)

    def head(self, count: int) -> Copies:
        return Copies(self.src[:count], self.dst[:count], self.length[:count])


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Strided runs: for each row, segment and repetition, one copy.

    src address = src_rows[r] + src_segments[s] + src_steps[k], and likewise for dst; its length is
    lengths[s]. `axes` says the same as the steps, as counts and strides, for carriers and kernels
    that take strides.
    """

    src_rows: Ints
    dst_rows: Ints
    src_segments: Ints
    dst_segments: Ints
    lengths: Ints  # of each segment; one number with a stride of zero where they are equal
    axes: tuple[Axis, ...]
    src_steps: Ints
    dst_steps: Ints

    @property
    def entries(self) -> int:
        """Strided runs in this batch."""
        return len(self.src_rows) * len(self.src_segments)

    @property
    def descriptors(self) -> int:
        return self.entries * len(self.src_steps)

    @property
    def bytes(self) -> int:
        lengths = self.lengths
        one = int(lengths[0]) * len(lengths) if lengths.strides == (0,) else int(lengths.sum())
        return one * len(self.src_rows) * len(self.src_steps)

    def fill(self, out: Copies, rows: Span, segments: Span, steps: Span) -> int:
        """Write the copies of a sub-batch to the front of `out`; say how many."""
        shape = (rows.size, segments.size, steps.size)
        count = shape[0] * shape[1] * shape[2]
        _outer_sum(
            out.src[:count].reshape(shape),
            self.src_rows[rows.start : rows.stop],
            self.src_segments[segments.start : segments.stop],
            self.src_steps[steps.start : steps.stop],
        )
        _outer_sum(
            out.dst[:count].reshape(shape),
            self.dst_rows[rows.start : rows.stop],
            self.dst_segments[segments.start : segments.stop],
            self.dst_steps[steps.start : steps.stop],
        )
        lengths = self.lengths[segments.start : segments.stop]
        out.length[:count].reshape(shape)[...] = lengths[None, :, None]
        return count


def _outer_sum(
    out: np.ndarray[tuple[int, ...], np.dtype[np.int64]], a: Ints, b: Ints, c: Ints
) -> None:
    """out[i, j, k] = a[i] + b[j] + c[k], with no memory but `out`."""
    if len(c) == 1:
        np.add(a[:, None], (b + c[0])[None, :], out=out[:, :, 0])
        return
    np.add(b[:, None], c[None, :], out=out[0])
    np.add(a[1:, None, None], out[:1], out=out[1:])
    out[0] += a[0]


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A request's share of one edge, bound to memory."""

    batches: tuple[Batch, ...]
    bytes: int
    descriptors: int

    @property
    def entries(self) -> int:
        """Strided runs in all."""
        return sum(batch.entries for batch in self.batches)

    def copies(self, out: Copies | None = None) -> Copies:
        """All copies as arrays, in plan order; into `out` where it is given."""
        if out is None:
            out = Copies.empty(self.descriptors)
        if len(out) < self.descriptors:
            raise BindError(
                f"the buffer holds {len(out)} copies, but this request needs {self.descriptors}; "
                "give a larger one, or take slices"
            )
        done = 0
        for batch in self.batches:
            rest = Copies(out.src[done:], out.dst[done:], out.length[done:])
            whole = Span(0, len(batch.src_rows)), Span(0, len(batch.src_segments))
            done += batch.fill(rest, *whole, Span(0, len(batch.src_steps)))
        return out.head(done)

    def slices(self, most: int, out: Copies | None = None) -> Iterator[Copies]:
        """The same copies in the same order, at most `most` at a time, each in the same buffer."""
        if most < 1:
            raise BindError(f"a slice holds at least one copy, found {most}")
        if out is None:
            out = Copies.empty(min(most, self.descriptors))
        most = min(most, len(out))
        if most < 1 <= self.descriptors:
            raise BindError("the buffer for slices holds no copy; give one with room for some")
        for batch in self.batches:
            for rows, segments, steps in _tiles(batch, most):
                yield out.head(batch.fill(out, rows, segments, steps))


def _tiles(batch: Batch, most: int) -> Iterator[tuple[Span, Span, Span]]:
    """Cut rows x segments x steps into boxes of at most `most`, keeping the order."""
    sizes = (len(batch.src_rows), len(batch.src_segments), len(batch.src_steps))
    steps = min(sizes[2], most)
    segments = min(sizes[1], most // steps) if steps == sizes[2] else 1
    rows = min(sizes[0], most // (steps * segments)) if segments == sizes[1] else 1
    for r in range(0, sizes[0], max(rows, 1)):
        for s in range(0, sizes[1], max(segments, 1)):
            for k in range(0, sizes[2], steps):
                yield (
                    Span(r, min(r + rows, sizes[0])),
                    Span(s, min(s + segments, sizes[1])),
                    Span(k, min(k + steps, sizes[2])),
                )
