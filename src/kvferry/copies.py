# SPDX-License-Identifier: Apache-2.0
"""Copies of bytes between two address spaces. Plans make them, carriers move them.

`Copies` are three arrays, one entry for each copy. `StridedCopies` say the same with far fewer
numbers: every address is a sum of a row, a segment and a step. A plan's batches are strided; a
carrier that does not take them (`takes_strided`) gets arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import TransferError
from kvferry.layout.shape import Span

Ints = NDArray[np.int64]

# Carriers check and cut copies in windows of at most this many descriptors. A window takes well
# under a millisecond, so no NumPy call holds the interpreter's lock for long.
WINDOW = 1 << 15

_INT64 = np.dtype(np.int64)
_ZERO = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """`length[i]` bytes from address `src[i]` to address `dst[i]`."""

    src: Ints
    dst: Ints
    length: Ints

    @classmethod
    def of(cls, copies: Any) -> Copies:
        """The same copies, checked: three arrays of integers of one length."""
        if type(copies) is cls:  # the usual case is fast: a transfer of one copy takes 40 us
            src, dst, length = copies.src, copies.dst, copies.length
            if (
                src.dtype is dst.dtype is length.dtype is _INT64
                and src.shape == dst.shape == length.shape
                and length.ndim == 1
            ):
                return copies
        arrays = src, dst, length = tuple(map(np.asarray, (copies.src, copies.dst, copies.length)))
        if not src.shape == dst.shape == length.shape or length.ndim != 1:
            raise TransferError(
                "copies are three arrays of one length, found "
                f"src {src.shape}, dst {dst.shape}, length {length.shape}"
            )
        if len(length) and not {a.dtype.kind for a in arrays} <= {"i", "u"}:
            raise TransferError(
                "copies are arrays of integers, found "
                f"src {src.dtype}, dst {dst.dtype}, length {length.dtype}"
            )
        # a number that does not fit becomes negative, and is refused as out of bounds
        return cls(*(a.astype(np.int64, copy=False) for a in arrays))

    @classmethod
    def empty(cls, capacity: int) -> Copies:
        """A buffer that can be filled repeatedly."""
        src, dst, length = np.empty((3, capacity), dtype=np.int64)
        return cls(src, dst, length)

    def __len__(self) -> int:
        return len(self.length)

    def __getitem__(self, which: slice | NDArray[np.bool_]) -> Copies:
        return Copies(self.src[which], self.dst[which], self.length[which])

    def windows(self) -> Iterator[Copies]:
        if 0 < len(self) <= WINDOW:
            yield self
            return
        for start in range(0, len(self), WINDOW):
            yield self[start : start + WINDOW]

    def joined(self) -> Copies:
        """The same, with copies merged that follow each other on both sides. None may be empty."""
        follows = self.src[1:] - self.src[:-1] == self.length[:-1]
        if not follows.any():
            return self  # the usual case
        apart = ~(follows & (self.dst[1:] - self.dst[:-1] == self.length[:-1]))
        if apart.all():
            return self
        heads = np.concatenate((_ZERO, np.flatnonzero(apart) + 1))
        return Copies(self.src[heads], self.dst[heads], np.add.reduceat(self.length, heads))

    def without_empty(self) -> Copies:
        return self if bool(self.length.all()) else self[self.length != 0]


@dataclass(slots=True, eq=False)
class StridedCopies:
    """One copy for each row r, segment s and step k.

    Its source is `src_rows[r] + src_segments[s] + src_steps[k]`, its destination likewise, and its
    length `lengths[s]`.
    """

    src_rows: Ints
    dst_rows: Ints
    src_segments: Ints
    dst_segments: Ints
    lengths: Ints  # of each segment; with a stride of zero if all are equal
    src_steps: Ints
    dst_steps: Ints

    def __post_init__(self) -> None:
        if (
            len(self.src_rows) != len(self.dst_rows)
            or not len(self.src_segments) == len(self.dst_segments) == len(self.lengths)
            or len(self.src_steps) != len(self.dst_steps)
        ):
            raise TransferError(
                "strided copies have as many rows, segments and steps on both sides"
            )

    @classmethod
    def of_copies(cls, copies: Copies) -> StridedCopies:
        """The same copies, with one row and one step."""
        return cls(_ZERO, _ZERO, copies.src, copies.dst, copies.length, _ZERO, _ZERO)

    @property
    def entries(self) -> int:
        """Strided runs: rows times segments."""
        return len(self.src_rows) * len(self.src_segments)

    @property
    def descriptors(self) -> int:
        """Single copies."""
        return self.entries * len(self.src_steps)

    @property
    def bytes(self) -> int:
        lengths = self.lengths
        one = int(lengths[0]) * len(lengths) if lengths.strides == (0,) else int(lengths.sum())
        return one * len(self.src_rows) * len(self.src_steps)

    def of_segments(self, which: slice) -> StridedCopies:
        return replace(
            self,
            src_segments=self.src_segments[which],
            dst_segments=self.dst_segments[which],
            lengths=self.lengths[which],
        )

    def singly(self, most: int) -> Iterator[Copies]:
        """All single copies, in order: at most `most` of one row at a time."""
        src = (self.src_segments[:, None] + self.src_steps[None, :]).reshape(-1)
        dst = (self.dst_segments[:, None] + self.dst_steps[None, :]).reshape(-1)
        row = Copies(src, dst, np.repeat(self.lengths, len(self.src_steps)))
        for src_row, dst_row in zip(self.src_rows.tolist(), self.dst_rows.tolist(), strict=True):
            for first in range(0, len(row), most):
                part = row[first : first + most]
                yield Copies(part.src + src_row, part.dst + dst_row, part.length)

    def fill(self, out: Copies, rows: Span, segments: Span, steps: Span) -> int:
        """Write the copies of a part to the front of `out`, and return their number."""
        shape = (rows.size, segments.size, steps.size)
        count = shape[0] * shape[1] * shape[2]
        part = slice(*rows), slice(*segments), slice(*steps)
        for into, a, b, c in (
            (out.src, self.src_rows, self.src_segments, self.src_steps),
            (out.dst, self.dst_rows, self.dst_segments, self.dst_steps),
        ):
            _outer_sum(into[:count].reshape(shape), a[part[0]], b[part[1]], c[part[2]])
        out.length[:count].reshape(shape)[...] = self.lengths[part[1]][None, :, None]
        return count


def table_bytes(address: Ints, length: Ints) -> bytes:
    """Ranges in the form that peers exchange: rows of address and length, little-endian."""
    return np.stack((address, length), axis=1).astype("<i8", copy=False).tobytes()


def table_of(raw: bytes | bytearray) -> tuple[Ints, Ints]:
    """Addresses and lengths of a table from `table_bytes`."""
    rows = np.frombuffer(raw, dtype="<i8").reshape(-1, 2).astype(np.int64, copy=False)
    return np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1])


def _outer_sum(
    out: np.ndarray[tuple[int, ...], np.dtype[np.int64]], a: Ints, b: Ints, c: Ints
) -> None:
    """out[i, j, k] = a[i] + b[j] + c[k], without temporary arrays of that size."""
    if len(c) == 1:
        np.add(a[:, None], (b + c[0])[None, :], out=out[:, :, 0])
        return
    np.add(b[:, None], c[None, :], out=out[0])
    np.add(a[1:, None, None], out[:1], out=out[1:])
    out[0] += a[0]
