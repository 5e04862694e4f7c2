"""Checksums over a store that keeps none: each object behind a header that proves it.

    magic 8 `KVFSUM01`   length 8   xxh3 8, of the bytes   xxh3 8, of these 24   zeros up to 64

A put gathers whole objects into a buffer, and stores them with their headers. A get reads the
headers, then whole objects into a buffer, and brings what was wanted of the right ones to its
place; of the others nothing, and they are CORRUPT. The key seeds both checksums, so one key's bytes
under another's are wrong, too.

This is paid for: ranges cannot be proven alone, so whole objects are read where a reader of another
shape wants a part; and what a store moves without a copy (Mooncake) is copied and hashed by the
host. Objects with headers are not those without: the two are never in one namespace.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence

import numpy as np
import xxhash

from kvferry.pool.embedded_copy import move
from kvferry.pool.staged import StagedStore
from kvferry.pool.store import Ints, Outcome, Ranges, Slices

log = logging.getLogger("kvferry")

HEADER_BYTES = 64
# One rank's part of one block is a hundred times smaller. A reader takes memory for what a header
# says, and any writer of the store can seal one.
MOST_OBJECT_BYTES = 4 << 30
MEANING = ("checksums", "KVFSUM01")  # of keys, beside what else bytes mean
_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"KVFSUM01"


def _checksum(key: str, data: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data, xxhash.xxh3_64_intdigest(key.encode()))


def _seal(key: str, length: int, checksum: int) -> bytes:
    header = _HEADER.pack(_MAGIC, length, checksum)
    header += _checksum(key, memoryview(header)).to_bytes(8, "little")
    return header + bytes(HEADER_BYTES - len(header))


def _open(key: str, header: bytes) -> tuple[int, int] | None:
    """Length and checksum of an object; None where its header is not right."""
    _, length, checksum = _HEADER.unpack_from(header)
    right = length <= MOST_OBJECT_BYTES and header == _seal(key, length, checksum)
    return (length, checksum) if right else None


class CheckedStore(StagedStore):
    """A `Store` that stores objects with checksums, over one without."""

    def _put_some(
        self, keys: Sequence[str], objects: Sequence[Ranges], sizes: Ints, deadline: float
    ) -> list[Outcome]:
        heads = HEADER_BYTES * len(keys)
        with self._buffer(heads + int(sizes.sum()), deadline) as buffer:
            if buffer is None:
                return [Outcome.FAILED] * len(keys)
            bodies = buffer[heads : heads + int(sizes.sum())]
            self._gather(objects, bodies)
            ends = np.cumsum(sizes)
            ranges = []
            for at, (key, size, end) in enumerate(
                zip(keys, sizes.tolist(), ends.tolist(), strict=True)
            ):
                data = bodies[end - size : end]
                header = _seal(key, size, _checksum(key, data.data))
                place = buffer[at * HEADER_BYTES : (at + 1) * HEADER_BYTES]
                place[:] = np.frombuffer(header, dtype=np.uint8)
                where = [place.ctypes.data, bodies.ctypes.data + end - size]
                ranges.append(
                    Ranges(np.array(where), np.array([HEADER_BYTES, size], dtype=np.int64))
                )
            return self._store.put(keys, ranges, deadline)

    def get(self, keys: Sequence[str], wanted: Sequence[Slices], deadline: float) -> list[Outcome]:
        inside = self._inside(wanted)
        outcomes, lengths, sums = self._headers(keys, deadline)
        for at, need in enumerate(wanted):
            if outcomes[at] is not Outcome.DONE:
                continue
            end = int((need.offset + need.length).max(initial=0))
            if not inside[at] or int(need.offset.min(initial=0)) < 0 or end > lengths[at]:
                log.warning("%s has %d bytes; up to %d were asked for", keys[at], lengths[at], end)
                outcomes[at] = Outcome.FAILED
        there = [outcome is Outcome.DONE for outcome in outcomes]
        for part in self._parts(lengths, there):
            told = self._get_whole(
                [keys[i] for i in part],
                [wanted[i] for i in part],
                np.array([lengths[i] for i in part], dtype=np.int64),
                [sums[i] for i in part],
                deadline,
            )
            for i, outcome in zip(part, told, strict=True):
                outcomes[i] = outcome
        return outcomes

    def _headers(
        self, keys: Sequence[str], deadline: float
    ) -> tuple[list[Outcome], list[int], list[int]]:
        """Of each object whether its header is right, its length, its checksum."""
        count = len(keys)
        with self._buffer(HEADER_BYTES * count, deadline) as buffer:
            if buffer is None:
                return [Outcome.FAILED] * count, [0] * count, [0] * count
            zero, size = np.zeros(1, dtype=np.int64), np.full(1, HEADER_BYTES, dtype=np.int64)
            places = [buffer.ctypes.data + HEADER_BYTES * at for at in range(count)]
            heads = [Slices(zero, np.array([place]), size) for place in places]
            outcomes = list(self._store.get(keys, heads, deadline))
            raw = buffer[: HEADER_BYTES * count].tobytes()
        lengths, sums = [0] * count, [0] * count
        for at, key in enumerate(keys):
            if outcomes[at] is Outcome.DONE:
                read = _open(key, raw[at * HEADER_BYTES : (at + 1) * HEADER_BYTES])
                if read is None:
                    log.error("%s has no header that is right", key)
                    outcomes[at] = Outcome.CORRUPT
                else:
                    lengths[at], sums[at] = read
        return outcomes, lengths, sums

    def _get_whole(
        self,
        keys: Sequence[str],
        wanted: Sequence[Slices],
        lengths: Ints,
        sums: Sequence[int],
        deadline: float,
    ) -> list[Outcome]:
        """Whole objects into a buffer, checked; what is wanted of them, in order, behind them."""
        sizes = np.array([int(w.length.sum()) for w in wanted], dtype=np.int64)
        total = int(lengths.sum())
        with self._buffer(total + int(sizes.sum()), deadline) as buffer:
            if buffer is None:
                return [Outcome.FAILED] * len(keys)
            begins = np.cumsum(lengths) - lengths
            bodies = [
                Slices(
                    np.full(1, HEADER_BYTES, dtype=np.int64),
                    buffer.ctypes.data + begins[at : at + 1],
                    lengths[at : at + 1],
                )
                for at in range(len(keys))
            ]
            outcomes = list(self._store.get(keys, bodies, deadline))
            packed = total + np.cumsum(sizes) - sizes
            for at, key in enumerate(keys):
                if outcomes[at] is not Outcome.DONE:
                    continue
                begin = int(begins[at])
                if _checksum(key, buffer[begin : begin + int(lengths[at])].data) != sums[at]:
                    log.error("%s is not what was written", key)
                    outcomes[at] = Outcome.CORRUPT
                    continue
                need = wanted[at]
                if len(need.length):
                    ends = np.cumsum(need.length)
                    base = buffer.ctypes.data
                    to = base + int(packed[at]) + ends - need.length
                    move(base + begin + need.offset, to, need.length)
            return self._scatter(wanted, buffer, packed, sizes, outcomes)
