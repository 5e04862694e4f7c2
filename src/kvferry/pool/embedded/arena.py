# SPDX-License-Identifier: Apache-2.0
"""The memory tier: one file in shared memory, mapped by every process, cut into extents.

The records alone say which extents are taken. The gaps between them are a shared list, to which
extents are added as they are given up. It is rebuilt from the records (`find_gaps`) when a process
died with the lock or a record was damaged, so no crash can lose memory or hand it out twice. A
rebuild looks at all records. The arena takes memory from the system in steps, without the lock and
before it is touched: a full /dev/shm is an error here, and not a bus error later. Offsets and
lengths come from memory that other processes write, so each is checked against the length that this
process has mapped.

An object in the arena or on disk is an image: a header with its own checksum, then the bytes.

    digest   8  xxh3 of the rest of the header
    magic    4  `KVF1`
    key      4  bytes of the key
    length   8  bytes of the object
    chunk    4  bytes that one checksum covers
    chunks   4
    checksums   8 each, xxh3
    the key, and zeros up to a multiple of 64

`serve` copies parts of an object to where a reader wants them, and checks the chunks that they lie
in: each once all its wanted parts were copied, while they are in the processor's cache. That is
faster than the other way round (84 % of memcpy against 72 %). If a check fails, the outcome is
CORRUPT, and the caller must not use its destination.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import struct
import time
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvferry.carriers.host import copy_runs, spread
from kvferry.errors import KvferryError, StoreError
from kvferry.pool.embedded import index as ix
from kvferry.pool.embedded.index import POPULATE_WRITE, SharedIndex
from kvferry.pool.embedded.policy import Floats
from kvferry.pool.store import Bools, Ints, Outcome, Slices
from kvferry.private_files import open_private
from kvferry.workers import Threads

_log = logging.getLogger(__name__)

ALIGN = 4096  # of extents
GROW_BYTES = 64 << 20
NO_MEMORY_SECONDS = 1.0  # after the system had no memory, until it is asked again
NO_MEMORY = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.ENOMEM)
CHUNK_BYTES = 256 << 10  # hashed at 10 GB/s from memory; chunks of 64 KiB at 9
HOT_BYTES = 256 << 10  # copied and checked at a time: stays in a core's cache in between
_HEAD = struct.Struct("<QIIQII")
_MAGIC = 0x3146564B
_HEADER_ALIGN = 64
_checksum = xxhash.xxh3_64_intdigest
_libc = ctypes.CDLL(None)
_HUGE_PAGE = 14  # advice for the system
BACK_THREADS = min(8, max(1, (os.cpu_count() or 1) // 2))  # one zeroes 1.5 GiB/s of pages

Sums = NDArray[np.uint64]


class Arena:
    """Extents of one mapped file. Methods that take or find memory need the store's lock."""

    def __init__(self, path: Path, index: SharedIndex) -> None:
        self._index = index
        self.capacity = index.geometry.memory_bytes // ALIGN * ALIGN
        self._grow_after = 0.0
        self.fd = open_private(path)
        try:
            if index.created:  # no other process has it mapped
                os.ftruncate(self.fd, self.capacity)
            found = os.fstat(self.fd).st_size
            if found != self.capacity:
                raise StoreError(
                    f"{path} has {found:,} bytes, and {self.capacity:,} by its index; one of them "
                    "is damaged; remove the store while no engine uses it"
                )
            self._map = mmap.mmap(self.fd, self.capacity)
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise StoreError(
                f"cannot map {self.capacity:,} bytes at {path}: {error}; give the store a smaller "
                "memory capacity"
            ) from error
        except StoreError:
            os.close(self.fd)
            raise
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self._bytes.ctypes.data)
        self._backers = Threads("kvferry-back", BACK_THREADS)
        self._advise(0, self.capacity, _HUGE_PAGE)  # if the system has them for shared memory
        self._view = memoryview(self._map)

    def view(self, offset: int, size: int) -> memoryview:
        """These bytes, or an empty view if they are not all inside the arena."""
        inside = 0 <= size <= self.capacity and 0 <= offset <= self.capacity - size
        return self._view[offset : offset + size] if inside else self._view[:0]

    def headers(self, offset: Ints, size: int) -> NDArray[np.uint8]:
        """The first `size` bytes at each offset, which the caller has checked."""
        found = np.empty((len(offset), size), dtype=np.uint8)
        at = found.ctypes.data + np.arange(len(offset), dtype=np.int64) * size
        copy_runs(self.address + offset, at, np.full(len(offset), size, dtype=np.int64))
        return found

    def take(self, size: int) -> int:
        """Offset of a free extent of `size` bytes (a multiple of `ALIGN`), or -1."""
        index = self._index
        at = self._first_gap(size)
        if at < 0:
            return -1
        offset = int(index.gap_offset[at])
        if not 0 <= offset <= self.capacity - size:  # the next holder of the lock finds gaps anew
            raise StoreError(
                f"the index is damaged: a gap of {size:,} bytes at {offset:,}, in an arena of "
                f"{self.capacity:,}"
            )
        self._shorten(at, size)
        return offset

    def room(self, size: int) -> int:
        """Length of the gap from which `take(size)` would take; 0: there is none."""
        at = self._first_gap(size)
        return min(int(self._index.gap_bytes[at]), self.capacity) if at >= 0 else 0

    def _first_gap(self, size: int) -> int:
        """Number of the first gap of at least `size` bytes, or -1."""
        fits = np.flatnonzero(self._index.gap_bytes[: self._index.gaps] >= size)
        return int(fits[0]) if len(fits) else -1

    def _shorten(self, at: int, size: int) -> None:
        index = self._index
        index.gap_offset[at] += size
        index.gap_bytes[at] -= size
        if index.gap_bytes[at] == 0:  # the last one takes its place
            last = index.gaps - 1
            for gaps in (index.gap_offset, index.gap_bytes):
                gaps[at] = gaps[last]
            index.gaps = last

    def can_grow(self) -> bool:
        return self.backed() < self.capacity and time.monotonic() >= self._grow_after

    def grow(self, size: int, least: int) -> int:
        """If no gap has `size` bytes, back more of the arena: a large step, or only `size` bytes.
        Returns how many bytes are backed then, for `take_backed`. Needs no lock.

        Several processes may be given the same memory; the first to call `take_backed` adds it. If
        one of them asks for more than there is, the system keeps what the others were given.
        """
        end = self.backed()
        if not self.can_grow() or self._first_gap(size) >= 0:
            return end
        steps = [max(GROW_BYTES, size)]
        while size >= max(least, ALIGN):  # where memory is short, what there is
            steps.append(size)
            size = size // 2 // ALIGN * ALIGN
        for step in steps:
            grown = min(self.capacity, end + step)
            if self._allocate(end, grown):
                return grown
        self._grow_after = time.monotonic() + NO_MEMORY_SECONDS
        return end

    def _allocate(self, first: int, last: int) -> bool:
        """Whether the system has memory for these bytes of the file, which it then keeps for it."""
        try:
            os.posix_fallocate(self.fd, first, last - first)
        except OSError as error:
            if error.errno not in NO_MEMORY:
                raise StoreError(f"the memory tier cannot grow: {error}") from error
            return False
        return True

    def back(self, first: int, size: int) -> bool:
        """Back the first `size` bytes with memory, which takes a while, and map those from `first`
        on. False: the system has no memory.

        Needs no lock: nothing uses that memory before `take_backed`.
        """
        # Mapped in this process as well, so that registering it with a device takes no page faults
        # (20 GiB/s against 2.4); by several threads, because the system zeroes the pages.
        page, end = mmap.PAGESIZE, self.backed()
        first, last = first // page * page, -(-size // page) * page
        step = -(-(last - first) // (BACK_THREADS * page)) * page
        parts = [(at, min(last, at + step)) for at in range(first, last, max(step, page))]
        free = os.fstatvfs(self.fd)
        # If memory is short, take no pages: they could not be given back.
        if size - end <= free.f_bavail * free.f_frsize:
            with contextlib.suppress(KvferryError):  # no thread could be started
                advise = partial(self._advise, advice=POPULATE_WRITE)
                wait([self._backers.call(partial(advise, *part)) for part in parts])
        # quick if the pages are there; else it reports the lack of memory
        return size <= end or self._allocate(end, size)

    def _advise(self, first: int, last: int, advice: int) -> None:
        address, size = ctypes.c_void_p(self.address + first), ctypes.c_size_t(last - first)
        _libc.madvise(address, size, advice)

    def take_backed(self, size: int) -> None:
        """Use the first `size` bytes, which `back` or `grow` has backed."""
        index, end = self._index, self.backed()
        if size > end:
            index.arena_bytes = size
            index.add_gaps(np.array([end]), np.array([size - end]))

    def backed(self) -> int:
        """Bytes of the arena that are backed by memory."""
        return min(max(self._index.arena_bytes, 0), self.capacity)

    def find_gaps(self) -> None:
        """Rebuild the list of gaps from the records."""
        index = self._index
        rows = index.in_state(*ix.WITH_EXTENT)
        begin, size = index.offset[rows], index.extent[rows]
        outside = (begin < 0) | (size <= 0) | (begin > self.capacity - size)
        if bool(outside.any()):
            self._drop_damaged(rows[outside])
            rows, begin, size = rows[~outside], begin[~outside], size[~outside]
        order = np.argsort(begin)
        begin = begin[order]
        end = np.maximum.accumulate(begin + size[order])  # damaged ones may overlap
        starts = np.concatenate((np.zeros(1, dtype=np.int64), end))
        stops = np.concatenate((begin, np.array([self.backed()], dtype=np.int64)))
        room = stops - starts
        some = room > 0
        index.set_gaps(starts[some], room[some], stale=False)

    def _drop_damaged(self, rows: Ints) -> None:
        """Records whose extents are outside of the arena; their files, if any, may be whole."""
        index = self._index
        with_file = np.isin(index.state[rows], (ix.BOTH, ix.PROMOTING))
        index.leave_memory(rows[with_file], ix.DISK)
        index.leave_memory(rows[~with_file], ix.GHOST)
        index.count("corrupt", int((~with_file).sum()))
        _log.error("%d records named memory outside of the arena, and are removed", len(rows))

    def cheapest_window(self, size: int, rows: Ints, scores: Floats) -> Ints:
        """Which of `rows` to evict so that `size` bytes in a row are free; empty: impossible.

        Extents that are not in `rows` (a process writes to them) stay where they are.
        """
        index = self._index
        taken = index.in_state(*ix.WITH_EXTENT)
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
        fits = starts + size <= self.backed()
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
        if self.fd >= 0:
            self._backers.close()
            os.close(self.fd)
            self.fd = -1
            # Views that a caller still holds keep the mapping; it goes with them.
            self._view.release()
            del self._bytes
            with contextlib.suppress(BufferError):
                self._map.close()


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """A header whose checksum was right."""

    key: str
    header_bytes: int
    length: int
    chunk_bytes: int
    checksums: list[int]

    def check(self, data: memoryview, chunks: Sequence[int] | None = None) -> bool:
        """Whether these chunks of the object (None: all) are what was written."""
        step = self.chunk_bytes
        for chunk in range(len(self.checksums)) if chunks is None else chunks:
            # the last slice ends with the data
            if _checksum(data[chunk * step : (chunk + 1) * step]) != self.checksums[chunk]:
                return False
        return True

    def touched(self, offset: Ints, length: Ints) -> list[int]:
        """Chunks that these parts lie in."""
        edges = np.zeros(len(self.checksums) + 1, dtype=np.int64)
        some = length > 0
        np.add.at(edges, offset[some] // self.chunk_bytes, 1)
        np.add.at(edges, (offset[some] + length[some] - 1) // self.chunk_bytes + 1, -1)
        return np.flatnonzero(np.cumsum(edges[:-1])).tolist()


def aligned(size: int, to: int = ALIGN) -> int:
    """The next multiple."""
    return -(-size // to) * to


def header_bytes(key_bytes: int, length: int) -> int:
    return aligned(_HEAD.size + 8 * -(-length // CHUNK_BYTES) + key_bytes, _HEADER_ALIGN)


def image_bytes(key_bytes: int, length: int) -> int:
    return header_bytes(key_bytes, length) + length


def checksums(data: memoryview) -> list[int]:
    """Of each chunk of an object."""
    return [_checksum(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]


def seal_alike(keys: Sequence[bytes], length: int, sums: Sums) -> NDArray[np.uint8]:
    """The headers of objects of one length with keys of one length; `sums` has a row for each."""
    size, key_bytes = header_bytes(len(keys[0]), length), len(keys[0])
    headers = np.zeros((len(keys), size), dtype=np.uint8)
    headers[:, 8 : _HEAD.size] = _matrix([_fixed_part(key_bytes, length)])
    used = _HEAD.size + 8 * sums.shape[1]
    headers[:, _HEAD.size : used] = np.ascontiguousarray(sums, dtype="<u8").view(np.uint8)
    headers[:, used : used + key_bytes] = _matrix(keys)
    headers[:, :8] = _digests(headers)
    return headers


def open_alike(
    headers: NDArray[np.uint8], keys: Sequence[bytes], length: int
) -> tuple[Bools, Sums]:
    """Whether each header is whole and this key's, for objects of one length with keys of one
    length; and the checksums that it has."""
    key_bytes, chunks = len(keys[0]), -(-length // CHUNK_BYTES)
    used = _HEAD.size + 8 * chunks
    good = (headers[:, 8 : _HEAD.size] == _matrix([_fixed_part(key_bytes, length)])).all(axis=1)
    good &= (headers[:, used : used + key_bytes] == _matrix(keys)).all(axis=1)
    good &= (headers[:, :8] == _digests(headers)).all(axis=1)
    sums = np.ascontiguousarray(headers[:, _HEAD.size : used]).view("<u8")
    return np.asarray(good), sums


def _fixed_part(key_bytes: int, length: int) -> bytes:
    """All of the head but its digest."""
    chunks = -(-length // CHUNK_BYTES)
    return _HEAD.pack(0, _MAGIC, key_bytes, length, CHUNK_BYTES, chunks)[8:]


def _matrix(keys: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), -1)


def _digests(headers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    rows = np.ascontiguousarray(headers[:, 8:]).reshape(-1).data
    size = headers.shape[1] - 8
    found = [_checksum(rows[at : at + size]) for at in range(0, len(rows), size)]
    return np.array(found, dtype="<u8").view(np.uint8).reshape(-1, 8)


def open_image(image: memoryview) -> Image | None:
    """The header at the beginning of `image`; None if it is damaged."""
    if len(image) < _HEAD.size:
        return None
    digest, magic, key_bytes, length, chunk_bytes, chunks = _HEAD.unpack_from(image)
    if magic != _MAGIC or not chunk_bytes or chunks != -(-length // chunk_bytes):
        return None
    used = _HEAD.size + 8 * chunks
    size = aligned(used + key_bytes, _HEADER_ALIGN)
    if size > len(image) or _checksum(image[8:size]) != digest:
        return None
    sums = np.frombuffer(image[_HEAD.size : used], dtype="<u8").tolist()
    try:
        key = bytes(image[used : used + key_bytes]).decode()
    except UnicodeDecodeError:  # a right digest, but nothing that this store wrote
        return None
    return Image(key, size, length, chunk_bytes, sums)


@dataclass(frozen=True, slots=True)
class WantedObject:
    """The parts of one object that a caller wants."""

    parts: Slices
    begin: int  # first byte
    end: int
    size: int  # of each part if all have one size and are contiguous, else 0


def analyse(wanted: Sequence[Slices]) -> list[WantedObject]:
    """The wanted parts of each object, found for all objects at once, so that one object costs only
    a few calls more."""
    counts = np.array([len(w.length) for w in wanted], dtype=np.int64)
    result = [WantedObject(w, 0, 0, 0) for w in wanted]  # right if nothing is wanted
    some = np.flatnonzero(counts)
    if len(some) == 0:
        return result
    offset = np.concatenate([wanted[i].offset for i in some.tolist()])
    length = np.concatenate([wanted[i].length for i in some.tolist()])
    heads = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts[some])[:-1]))
    follows = np.ones(len(offset), dtype=bool)
    follows[1:] = offset[1:] == offset[:-1] + length[:-1]
    follows[heads] = True
    alike = np.repeat(length[heads], counts[some]) == length
    plain = np.logical_and.reduceat(follows & alike, heads) & (length[heads] > 0)
    begin = np.minimum.reduceat(offset, heads).tolist()
    end = np.maximum.reduceat(offset + length, heads).tolist()
    size = np.where(plain, length[heads], 0).tolist()
    for k, i in enumerate(some.tolist()):
        result[i] = WantedObject(wanted[i], begin[k], end[k], size[k])
    return result


def serve(
    key: str | None, view: memoryview, address: int, length: int, need: WantedObject | None
) -> Outcome:
    """Copy parts of the image in `view`, which lies at `address`; need None: check all of it.

    `length` is the object's, as its record says. With a key, the image must be the key's.
    """
    image = open_image(view)
    if image is None or image.length != length or image.header_bytes + length != len(view):
        return Outcome.CORRUPT
    if key is not None and image.key != key:
        return Outcome.MISSING
    data = view[image.header_bytes :]
    if need is None:
        return Outcome.DONE if image.check(data) else Outcome.CORRUPT
    if not 0 <= need.begin <= need.end <= image.length:
        found, wanted = image.length, (need.begin, need.end)
        _log.warning("%s has %d bytes; %s were asked for", image.key, found, wanted)
        return Outcome.FAILED
    if need.begin == need.end:
        return Outcome.DONE
    return _copy(image, data, address + image.header_bytes, need)


def _copy(image: Image, data: memoryview, address: int, need: WantedObject) -> Outcome:
    """Copy by rising offset, so that no later part lies in a chunk that was checked before."""
    offset, target, length = need.parts.offset, need.parts.address, need.parts.length
    chunks: Sequence[int]
    if need.size:
        chunks = range(need.begin // image.chunk_bytes, -(-need.end // image.chunk_bytes))
        step = max(1, HOT_BYTES // need.size)
    else:
        chunks = image.touched(offset, length)
        step = max(1, HOT_BYTES * len(length) // max(1, int(length.sum())))
        if step < len(length):
            order = np.argsort(offset, kind="stable")
            offset, target, length = offset[order], target[order], length[order]
    checked = 0
    for first in range(0, len(length), step):
        last = first + step
        if need.size:
            spread(address + need.begin + first * need.size, target[first:last], need.size)
        else:
            copy_runs(address + offset[first:last], target[first:last], length[first:last])
        whole = len(chunks)
        if last < len(length):  # the next parts complete the chunk in which they begin
            whole = bisect_left(chunks, int(offset[last]) // image.chunk_bytes)
        if not image.check(data, chunks[checked:whole]):
            return Outcome.CORRUPT
        checked = whole
    return Outcome.DONE
