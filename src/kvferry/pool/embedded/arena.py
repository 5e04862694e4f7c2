"""The memory tier: one file in shared memory, mapped by every process, cut into extents.

Which extents are taken is told by the records alone. The gaps between them are kept beside, as a
list that is shared and can be made again at any time (`find_gaps`), so no crash can lose memory or
hand it out twice. Extents are contiguous, because a reader then needs one address; where evictions
leave no gap that is long enough, `cheapest_window` names neighbours whose loss costs least.

Memory is taken from the system in steps, before it is touched: a full /dev/shm is an answer here,
and not a bus error later.

Offsets and lengths come from memory that other processes write. Each is checked against the length
that this process has mapped, which was the file's own when it was opened.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvferry.errors import StoreError
from kvferry.pool.embedded import index as ix
from kvferry.pool.embedded.index import MAX_GAPS, SharedIndex
from kvferry.private_files import open_private

_log = logging.getLogger(__name__)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ALIGN = 4096
GROW_BYTES = 64 << 20


class Arena:
    """Extents of one mapped file. All but `view` needs the store's lock."""

    def __init__(self, path: Path, index: SharedIndex) -> None:
        self._index = index
        self.capacity = index.geometry.memory_bytes // ALIGN * ALIGN
        self._fd = open_private(path)
        try:
            if index.created:  # no other process has it mapped
                os.ftruncate(self._fd, self.capacity)
            found = os.fstat(self._fd).st_size
            if found != self.capacity:
                raise StoreError(
                    f"{path} has {found:,} bytes, and {self.capacity:,} by its index; one of them "
                    "is damaged; remove the store while no engine uses it"
                )
            self._map = mmap.mmap(self._fd, self.capacity)
        except (OSError, ValueError) as error:
            os.close(self._fd)
            raise StoreError(
                f"cannot map {self.capacity:,} bytes at {path}: {error}; give the store a smaller "
                "memory capacity"
            ) from error
        except StoreError:
            os.close(self._fd)
            raise
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self._bytes.ctypes.data)
        self._view = memoryview(self._map)

    def view(self, offset: int, size: int) -> memoryview:
        """These bytes; none where they are not all in the arena."""
        inside = 0 <= size <= self.capacity and 0 <= offset <= self.capacity - size
        return self._view[offset : offset + size] if inside else self._view[:0]

    def take(self, size: int) -> int:
        """Offset of a free extent of `size` bytes (a multiple of `ALIGN`), or -1."""
        index = self._index
        fits = index.gap_bytes[: index.gaps] >= size
        at = int(fits.argmax()) if len(fits) else 0
        if len(fits) == 0 or not fits[at]:
            return self._take_grown(size)
        offset = int(index.gap_offset[at])
        if not 0 <= offset <= self.capacity - size:  # the next holder of the lock finds gaps anew
            raise StoreError(
                f"the index is damaged: a gap of {size:,} bytes at {offset:,}, in an arena of "
                f"{self.capacity:,}"
            )
        self._shorten(at, size)
        return offset

    def _shorten(self, at: int, size: int) -> None:
        index = self._index
        index.gap_offset[at] += size
        index.gap_bytes[at] -= size
        if index.gap_bytes[at] == 0:  # the last one takes its place
            last = index.gaps - 1
            index.gap_offset[at], index.gap_bytes[at] = (
                index.gap_offset[last],
                index.gap_bytes[last],
            )
            index.gaps = last

    def _take_grown(self, size: int) -> int:
        """Take more memory from the system; the tail gap, if any, becomes part of it."""
        index = self._index
        end = self._backed()
        ends = index.gap_offset[: index.gaps] + index.gap_bytes[: index.gaps]
        tail = np.flatnonzero(ends == end)
        start = int(index.gap_offset[tail[0]]) if len(tail) else end
        for step in (GROW_BYTES, 0):
            grown = min(self.capacity, max(start + size, end + step))
            if start + size > grown:
                return -1
            try:
                os.posix_fallocate(self._fd, end, grown - end)
                break
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.ENOMEM):
                    raise StoreError(f"the memory tier cannot grow: {error}") from error
        else:
            return -1
        index.arena_bytes = grown
        if len(tail):
            index.gap_bytes[tail[0]] = grown - start
        elif index.gaps < MAX_GAPS:
            index.gap_offset[index.gaps], index.gap_bytes[index.gaps] = start, grown - start
            index.gaps += 1
        else:
            index.gap_offset[0], index.gap_bytes[0] = start, grown - start  # until gaps are found
        return self.take(size)

    def _backed(self) -> int:
        """Bytes of the arena that are backed by memory."""
        return min(max(self._index.arena_bytes, 0), self.capacity)

    def find_gaps(self) -> None:
        """The list of gaps, from the records; the longest ones where there are too many."""
        index = self._index
        rows = index.with_extent()
        begin, size = index.offset[rows], index.extent[rows]
        outside = (begin < 0) | (size <= 0) | (begin > self.capacity - size)
        if bool(outside.any()):
            self._drop_damaged(rows[outside])
            rows, begin, size = rows[~outside], begin[~outside], size[~outside]
        order = np.argsort(begin)
        begin = begin[order]
        end = np.maximum.accumulate(begin + size[order])  # damaged ones may overlap
        starts = np.concatenate((np.zeros(1, dtype=np.int64), end))
        stops = np.concatenate((begin, np.array([self._backed()], dtype=np.int64)))
        room = stops - starts
        some = np.flatnonzero(room > 0)
        if len(some) > MAX_GAPS:
            some = some[np.argsort(room[some])[-MAX_GAPS:]]
        index.gaps = 0
        index.gap_offset[: len(some)] = starts[some]
        index.gap_bytes[: len(some)] = room[some]
        index.gaps = len(some)

    def _drop_damaged(self, rows: Ints) -> None:
        """Records of extents that the arena does not have; their files, if any, may be whole."""
        index = self._index
        with_file = np.isin(index.state[rows], (ix.BOTH, ix.PROMOTING))
        index.leave_memory(rows[with_file], ix.DISK)
        index.leave_memory(rows[~with_file], ix.GHOST)
        index.count("corrupt", int((~with_file).sum()))
        _log.error("%d records named memory outside of the arena, and are removed", len(rows))

    def cheapest_window(self, size: int, rows: Ints, scores: Floats) -> Ints:
        """Of `rows`, those to evict so that `size` bytes in a row are free; empty: impossible.

        Extents that are not in `rows` (being written) stay where they are.
        """
        index = self._index
        taken = index.with_extent()
        taken = taken[np.argsort(index.offset[taken])]
        movable = np.isin(taken, rows)
        cost = np.full(len(taken), np.inf)
        where = np.searchsorted(rows, taken[movable])
        cost[movable] = scores[where] - scores.min() + 1e-9
        begin = index.offset[taken]
        end = begin + index.extent[taken]
        # A window begins where the extent before it ends, and takes all extents up to its size.
        starts = np.concatenate((np.zeros(1, dtype=np.int64), end))
        last = np.searchsorted(begin, starts + size, side="left")  # extents before it are inside
        fits = starts + size <= self._backed()
        finite = np.where(np.isinf(cost), 0.0, cost)
        sums = np.concatenate((np.zeros(1), np.cumsum(finite)))
        fixed = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(np.isinf(cost))))
        first = np.arange(len(starts))
        price = sums[last] - sums[first]
        price[(fixed[last] != fixed[first]) | ~fits] = np.inf
        best = int(price.argmin())
        if np.isinf(price[best]):
            return np.empty(0, dtype=np.int64)
        return np.asarray(taken[first[best] : last[best]])

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            # Views that a caller still holds keep the mapping; it goes with them.
            self._view.release()
            del self._bytes
            with contextlib.suppress(BufferError):
                self._map.close()


# --------------------------------------------------------------------------------------------------
# An object as it lies in the arena and on disk: a header that proves itself, then the bytes.
#
#     digest   8  xxh3 of the rest of the header
#     magic    4  `KVF1`
#     key      4  bytes of the key
#     length   8  bytes of the object
#     chunk    4  bytes that one checksum covers
#     chunks   4
#     checksums   8 each, xxh3
#     the key, and zeros up to a multiple of 64
#
# A part of an object is checked by the checksums of the chunks that it touches, without the rest. A
# reader hashes bytes a few hundred KiB after it has copied them, so that they are in the cache.
# --------------------------------------------------------------------------------------------------

Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]

CHUNK_BYTES = 256 << 10  # hashed at 10 GB/s from memory; chunks of 64 KiB at 9
_HEAD = struct.Struct("<QIIQII")
_MAGIC = 0x3146564B
_ALIGN = 64
_checksum = xxhash.xxh3_64_intdigest


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """A header that was found whole."""

    key: str
    header_bytes: int
    length: int
    chunk_bytes: int
    checksums: Words


def header_bytes(key_bytes: int, length: int) -> int:
    chunks = -(-length // CHUNK_BYTES)
    return -(-(_HEAD.size + 8 * chunks + key_bytes) // _ALIGN) * _ALIGN


def image_bytes(key_bytes: int, length: int) -> int:
    return header_bytes(key_bytes, length) + length


def seal(image: memoryview, key: bytes, length: int) -> None:
    """Write the header in front of data that is in place."""
    size = header_bytes(len(key), length)
    data = image[size : size + length]
    sums = [_checksum(data[at : at + CHUNK_BYTES]) for at in range(0, length, CHUNK_BYTES)]
    rest = _HEAD.pack(0, _MAGIC, len(key), length, CHUNK_BYTES, len(sums))[8:]
    rest += np.asarray(sums, dtype="<u8").tobytes() + key
    rest += bytes(size - 8 - len(rest))
    image[:size] = _checksum(rest).to_bytes(8, "little") + rest


def open_image(image: memoryview) -> Image | None:
    """The header at the beginning of `image`; None where it is not whole."""
    if len(image) < _HEAD.size:
        return None
    digest, magic, key_bytes, length, chunk_bytes, chunks = _HEAD.unpack_from(image)
    if magic != _MAGIC or not chunk_bytes or chunks != -(-length // chunk_bytes):
        return None
    used = _HEAD.size + 8 * chunks
    size = -(-(used + key_bytes) // _ALIGN) * _ALIGN
    if size > len(image) or _checksum(image[8:size]) != digest:
        return None
    sums = np.frombuffer(bytes(image[_HEAD.size : used]), dtype="<u8")
    try:
        key = bytes(image[used : used + key_bytes]).decode()
    except UnicodeDecodeError:  # a right digest, but nothing that this store wrote
        return None
    return Image(key, size, length, chunk_bytes, sums)


def header_size(head: bytes) -> int:
    """Bytes of the header that begins like this; 0 where it is none."""
    if len(head) < _HEAD.size:
        return 0
    _, magic, key_bytes, _, _, chunks = _HEAD.unpack_from(head)
    return -(-(_HEAD.size + 8 * chunks + key_bytes) // _ALIGN) * _ALIGN if magic == _MAGIC else 0


def begins_image(head: bytes) -> bool:
    """Whether a file that begins like this is an image, or one whose beginning was never written.

    The digest in front may be anything; a file system that lost power shows zeros or an early end.
    """
    return not head.strip(b"\0") or head[8:12] == _MAGIC.to_bytes(4, "little")


def check(image: Image, data: memoryview, chunks: Ints) -> bool:
    """Whether these chunks of the object are what was written."""
    step, sums = image.chunk_bytes, image.checksums
    for chunk, wanted in zip(chunks.tolist(), sums[chunks].tolist(), strict=True):
        at = chunk * step
        if _checksum(data[at : min(at + step, image.length)]) != wanted:
            return False
    return True


def check_range(image: Image, data: memoryview, first: int, last: int) -> bool:
    """The same for chunks `first` up to `last`."""
    step = image.chunk_bytes
    at = first * step
    for wanted in image.checksums[first:last].tolist():
        # the last slice ends with the data
        if _checksum(data[at : at + step]) != wanted:
            return False
        at += step
    return True


def check_all(image: Image, data: memoryview) -> bool:
    return check_range(image, data, 0, len(image.checksums))


def touched(image: Image, offset: Ints, length: Ints) -> Ints:
    """Chunks that these parts lie in."""
    if len(offset) == 0:
        return np.empty(0, dtype=np.int64)
    edges = np.zeros(len(image.checksums) + 1, dtype=np.int64)
    some = length > 0
    np.add.at(edges, offset[some] // image.chunk_bytes, 1)
    np.add.at(edges, (offset[some] + length[some] - 1) // image.chunk_bytes + 1, -1)
    return np.flatnonzero(np.cumsum(edges[:-1]))
