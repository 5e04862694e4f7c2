"""Scattered copies inside one process: runs to a buffer, a buffer to runs, runs to runs.

No system call and no permission is needed. Copies of one length go together: seen through a dtype
of that many bytes and a stride of one byte, a memory is an array in which every byte begins an
element, and NumPy's indexing moves whole elements from anywhere to anywhere. So Python runs once
per distinct length and chunk, and alignment does not matter. Where many lengths are mixed, each run
is cut into powers of two, so that there are never more than a few groups.

A gather whose runs lie a multiple of their length apart is one `np.take` straight into its buffer,
which needs no intermediate array and is twice as fast.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvferry.errors import TransferError
from kvferry.transport.memory import Bytes, Ints

CHUNK_BYTES = 1 << 18  # moved by one NumPy call: a tenth of a millisecond, and it stays cached
# Longer runs are copied in pieces of this. Times the widest address space (2**48), it still fits 63
# bits, which is what NumPy allows an array that spans all of it.
PIECE_BYTES = 1 << 14
PIECES_AT_A_TIME = 1 << 15
MOST_LENGTHS = 8  # distinct ones, each copied as it is; beyond, runs are cut into powers of two
_mine = threading.local()
TAKE_RUNS = 64  # a `take` for fewer runs than this does not pay


def copy_scattered(
    src_memory: Bytes, src: ArrayLike, dst_memory: Bytes, dst: ArrayLike, length: ArrayLike
) -> int:
    """Copy `length[i]` bytes from offset `src[i]` to offset `dst[i]`; say how many in all.

    The two memories must not overlap.
    """
    sources, targets, lengths = (np.asarray(a, dtype=np.int64) for a in (src, dst, length))
    if not sources.shape == targets.shape == lengths.shape or lengths.ndim != 1:
        raise TransferError(
            "copies are three arrays of one length, found "
            f"src {sources.shape}, dst {targets.shape}, length {lengths.shape}"
        )
    _require_inside("source", src_memory, sources, lengths)
    _require_inside("destination", dst_memory, targets, lengths)
    copy_runs(src_memory, sources, dst_memory, targets, lengths)
    return int(lengths.sum())


def copy_runs(src_memory: Bytes, src: Ints, dst_memory: Bytes, dst: Ints, length: Ints) -> None:
    """The same for offsets that have been checked."""
    if len(length) and int(length.max()) > PIECE_BYTES:
        _copy_pieces(src_memory, src, dst_memory, dst, length // PIECE_BYTES)
        whole = length // PIECE_BYTES * PIECE_BYTES
        src, dst, length = src + whole, dst + whole, length - whole
    for which, before, size in _groups(length):
        a, b = (src, dst) if which is None else (src[which], dst[which])
        if before is not None:
            a, b = a + before, b + before
        _copy_equal(src_memory, a, dst_memory, b, size)


def _groups(length: Ints) -> Iterator[tuple[Ints | None, Ints | None, int]]:
    """Which runs (None: all), how far into each, and how many bytes of each: all runs, cut up."""
    if len(length) == 0:
        return
    shortest, longest = int(length.min()), int(length.max())
    if shortest == longest:
        if shortest:
            yield None, None, shortest
        return
    sizes = np.unique(length)
    if len(sizes) <= MOST_LENGTHS:
        for size in sizes.tolist():
            if size:
                yield np.flatnonzero(length == size), None, size
        return
    for bit in range(longest.bit_length()):
        which = np.flatnonzero(length & (1 << bit))
        if len(which):
            yield which, length[which] >> (bit + 1) << (bit + 1), 1 << bit


def _copy_equal(src_memory: Bytes, src: Ints, dst_memory: Bytes, dst: Ints, size: int) -> None:
    step = max(1, CHUNK_BYTES // size)
    scratch = _scratch()
    in_order = len(dst) > 1 and _in_order(dst, size)
    from_order = not in_order and len(src) > 1 and _in_order(src, size)
    targets = _windows(dst_memory, size)
    for start in range(0, len(src), step):
        a, b = src[start : start + step], dst[start : start + step]
        if in_order:
            _take(src_memory, a, _dense(dst_memory, int(b[0]), size, len(b)), size)
        elif from_order:
            targets[b] = _dense(src_memory, int(a[0]), size, len(a))
        else:
            between = _dense(scratch, 0, size, len(a))
            _take(src_memory, a, between, size)
            targets[b] = between


def _take(memory: Bytes, offsets: Ints, into: NDArray[np.void], size: int) -> None:
    """Elements at these offsets, in order. `take` wants a dense array: one for each remainder."""
    number = offsets // size
    remainder = offsets - number * size  # NumPy divides by a scalar faster than it takes `%`
    cuts = np.flatnonzero(remainder[1:] != remainder[:-1]) + 1
    if (len(cuts) + 1) * TAKE_RUNS > len(offsets) and len(cuts):
        into[...] = _windows(memory, size)[offsets]
        return
    edges = [0, *cuts.tolist(), len(offsets)]
    for first, last in itertools.pairwise(edges):
        begin = int(remainder[first])
        dense = _dense(memory, begin, size, (len(memory) - begin) // size)
        # clip: with "raise", NumPy buffers the output. The offsets were checked
        np.take(dense, number[first:last], out=into[first:last], mode="clip")


def _copy_pieces(src_memory: Bytes, src: Ints, dst_memory: Bytes, dst: Ints, count: Ints) -> None:
    """The first `count[i]` pieces of each run."""
    ends = np.cumsum(count)
    for first in range(0, int(ends[-1]), PIECES_AT_A_TIME):
        number = np.arange(first, min(first + PIECES_AT_A_TIME, int(ends[-1])))
        run = np.searchsorted(ends, number, side="right")
        within = (number - ends[run] + count[run]) * PIECE_BYTES
        _copy_equal(src_memory, src[run] + within, dst_memory, dst[run] + within, PIECE_BYTES)


def _scratch() -> Bytes:
    """A chunk's worth of bytes, one for each thread: a new array each time costs page faults."""
    if not hasattr(_mine, "scratch"):
        _mine.scratch = np.empty(CHUNK_BYTES, dtype=np.uint8)
    made: Bytes = _mine.scratch
    return made


def _in_order(offsets: Ints, size: int) -> bool:
    return bool((offsets[1:] - offsets[:-1] == size).all())


def _windows(memory: Bytes, size: int) -> NDArray[np.void]:
    """Element i is the `size` bytes from byte i on."""
    return np.ndarray((len(memory) - size + 1,), f"V{size}", memory, strides=(1,))


def _dense(memory: Bytes, begin: int, size: int, count: int) -> NDArray[np.void]:
    return np.ndarray((count,), f"V{size}", memory, offset=begin)


def _require_inside(name: str, memory: Bytes, offsets: Ints, lengths: Ints) -> None:
    if len(offsets) == 0:
        return
    if int(lengths.min()) < 0:
        raise TransferError(f"a copy has a length of {int(lengths.min())} bytes")
    if int(offsets.min()) < 0 or int((offsets + lengths).max()) > len(memory):
        raise TransferError(
            f"a copy leaves the {name}'s memory of {len(memory)} bytes: offsets "
            f"{int(offsets.min())} to {int((offsets + lengths).max())} were asked for"
        )
