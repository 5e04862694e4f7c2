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
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import StoreError
from kvferry.pool import embedded_index as ix
from kvferry.pool.embedded_header import MAX_GAPS
from kvferry.pool.embedded_index import SharedIndex
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
