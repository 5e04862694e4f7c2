"""What is wanted of an object, from its image to where it goes: copied, then checked.

What does not depend on a single object is found out once for the batch, in whole arrays: whether
destinations are registered, and which objects are wanted in the usual form (parts of one length,
one after another). Those are copied and checked by a few calls each; others take the general way,
which costs some microseconds more.

Bytes are checked right after they were copied, while they are in the cache: that is faster than the
other way round (84 % of memcpy against 72 %), because a copy reads memory better than a hash does.
A chunk is checked once all that is wanted of it was copied, and not before: so what has landed is
what was written, or it is told as CORRUPT, and its destination is nobody's yet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.pool.embedded_copy import move, spread
from kvferry.pool.embedded_image import Image, check, check_all, check_range, open_image, touched
from kvferry.pool.store import Ints, Outcome, Slices
from kvferry.transport.regions import RegionTable

_log = logging.getLogger(__name__)

HOT_BYTES = 256 << 10  # copied and checked at a time: stays in a core's cache in between


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the batch wants of one object."""

    parts: Slices
    begin: int  # first byte
    end: int
    size: int  # of each part where all are alike and one after another, else 0


def analyse(wanted: Sequence[Slices], regions: RegionTable) -> list[Wanted | None]:
    """What each object is wanted for; None where a part leaves the registered memory."""
    counts = np.array([len(w.length) for w in wanted], dtype=np.int64)
    some = np.flatnonzero(counts)
    empty = np.empty(0, dtype=np.int64)
    result: list[Wanted | None] = [Wanted(Slices(empty, empty, empty), 0, 0, 0)] * len(wanted)
    if len(some) == 0:
        return result
    offset = np.concatenate([wanted[i].offset for i in some.tolist()])
    length = np.concatenate([wanted[i].length for i in some.tolist()])
    address = np.concatenate([wanted[i].address for i in some.tolist()])
    heads = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts[some])[:-1]))
    outside = np.zeros(len(some), dtype=bool)
    if regions.first_outside(address, length) >= 0:
        outside[:] = [
            regions.first_outside(wanted[i].address, wanted[i].length) >= 0 for i in some.tolist()
        ]
    follows = np.ones(len(offset), dtype=bool)
    follows[1:] = offset[1:] == offset[:-1] + length[:-1]
    follows[heads] = True
    alike = np.repeat(length[heads], counts[some]) == length
    plain = np.logical_and.reduceat(follows & alike, heads) & (length[heads] > 0)
    begin = np.minimum.reduceat(offset, heads).tolist()
    end = np.maximum.reduceat(offset + length, heads).tolist()
    size = np.where(plain, length[heads], 0).tolist()
    for k, i in enumerate(some.tolist()):
        result[i] = None if outside[k] else Wanted(wanted[i], begin[k], end[k], size[k])
    return result


def serve(
    key: str | None, view: memoryview, address: int, length: int, need: Wanted | None
) -> Outcome:
    """Copy the parts, and check what they touch, a cache's worth at a time.

    length  of the object, as its record says
    """
    image = open_image(view)
    if image is None or image.length != length or image.header_bytes + length != len(view):
        return Outcome.CORRUPT
    if key is not None and image.key != key:
        return Outcome.MISSING
    data = view[image.header_bytes :]
    if need is None:
        return Outcome.DONE if check_all(image, data) else Outcome.CORRUPT
    if need.begin < 0 or need.end > image.length:
        _log.warning(
            "%s has %d bytes; %d to %d were asked for",
            image.key,
            image.length,
            need.begin,
            need.end,
        )
        return Outcome.FAILED
    if need.begin == need.end:
        return Outcome.DONE
    address += image.header_bytes
    if need.size:
        return _copy_plain(image, data, address, need)
    return _copy_any(image, data, address, need.parts)


def _copy_plain(image: Image, data: memoryview, address: int, need: Wanted) -> Outcome:
    """Parts of one length, one after another."""
    size, target = need.size, need.parts.address
    step = max(1, HOT_BYTES // size)
    checked = need.begin // image.chunk_bytes
    for first in range(0, len(target), step):
        part = target[first : first + step]
        begin = need.begin + first * size
        end = begin + len(part) * size
        spread(address + begin, part, size)
        # rounded down: the next parts bring the rest of this chunk
        whole = end // image.chunk_bytes if end < need.end else -(-end // image.chunk_bytes)
        if not check_range(image, data, checked, whole):
            return Outcome.CORRUPT
        checked = max(checked, whole)
    return Outcome.DONE


def _copy_any(image: Image, data: memoryview, address: int, parts: Slices) -> Outcome:
    """Parts of any form: by rising offset and a cache's worth at a time, or all of a small object.

    So no part that comes later begins before the next one's chunk.
    """
    offset, target, length = parts.offset, parts.address, parts.length
    total = len(length)
    steps = [total]
    if image.length > HOT_BYTES:
        order = np.argsort(offset, kind="stable")
        offset, target, length = offset[order], target[order], length[order]
        steps = _steps(length)
    chunks = touched(image, offset, length)
    first = checked = 0
    for last in steps:
        part = slice(first, last)
        move(address + offset[part], target[part], length[part])
        whole = len(chunks)
        if last < total:
            whole = int(np.searchsorted(chunks, offset[last] // image.chunk_bytes))
        if not check(image, data, chunks[checked:whole]):
            return Outcome.CORRUPT
        first, checked = last, whole
    return Outcome.DONE


def _steps(length: Ints) -> list[int]:
    """Where to stop so that about `HOT_BYTES` lie between."""
    ends, steps = np.cumsum(length), [0]
    while steps[-1] < len(length):
        done = int(ends[steps[-1] - 1]) if steps[-1] else 0
        fits = int(np.searchsorted(ends, done + HOT_BYTES, side="right"))
        steps.append(max(steps[-1] + 1, fits))
    return steps[1:]
