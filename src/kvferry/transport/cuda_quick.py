"""A whole batch, queued by the thread that asks for it: its numbers are written once.

Handing a batch to another thread and waking up again costs a tenth of a millisecond and more, and
every NumPy call a microsecond or two: as much as copying some megabytes. So all numbers of a batch
are written side by side into the pinned memory that the GPU gets them from, in one call, and what
must be known of them is found there, in one call for each kind of question:

    least, most     do both sides lie in registered memory? are all lengths equal, and above zero?
    bits            what do all addresses and lengths have as common divisor?

Long batches are looked at where they are, by one pass over each table where that is enough, and
then written piece by piece: the GPU copies a piece while the next, twice as long, is on its way.

What is not usual is left to cuda_lane.py, which cuts, and which says what is wrong: empty copies,
a kernel that is not compiled yet, memory that is registered in pieces, more numbers than a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, cast

import numpy as np

from kvferry.transport import cuda_kernels
from kvferry.transport.base import CopyArrays, Ints, StridedCopies
from kvferry.transport.cuda_kernels import SCRATCH_ARGUMENTS
from kvferry.transport.cuda_lane import SLOT_NUMBERS, Lane, ranges
from kvferry.transport.cuda_mapped import Mapped
from kvferry.transport.cuda_work import GRAINS, MOST_ITEMS, SAMPLE, WINDOW, best_chunk, chunk_for

# So many numbers are looked at together; longer tables one by one, which takes half the time for
# each number and a microsecond more for each table.
TOGETHER_NUMBERS = 1 << 13
LEAST_PIECE = 1 << 12  # segments of the first piece: a few microseconds to write
PIECES = (-(-WINDOW // LEAST_PIECE)).bit_length()  # of a batch, at most
# Of so few chunks a kernel reads the numbers from pinned memory; of more, every program would read
# its own across the bus, and one copy of them all before it is sooner done.
DIRECT_ITEMS = 1 << 5

_ZERO = np.zeros(1, dtype=np.int64)


def tables_of(copies: CopyArrays | StridedCopies) -> list[Any] | None:
    """Rows, steps and segments, each of source and destination; lengths. None: of odd shapes."""
    if hasattr(copies, "src_rows"):
        runs = cast(StridedCopies, copies)
        tables: list[Any] = [
            runs.src_rows,
            runs.dst_rows,
            runs.src_steps,
            runs.dst_steps,
            runs.src_segments,
            runs.dst_segments,
            runs.lengths,
        ]
    else:
        tables = [_ZERO, _ZERO, _ZERO, _ZERO, copies.src, copies.dst, copies.length]
    try:
        a, b, c, d, e, f, g = map(len, tables)
    except TypeError:
        return None
    return tables if a == b and c == d and e == f == g and a and c and e else None


def constant(lengths: Any) -> int:
    """Their only value where an array says so by its strides, as a plan's batch does; else 0."""
    one = isinstance(lengths, np.ndarray) and lengths.strides == (0,) and lengths.dtype.kind in "iu"
    return int(lengths[0]) if one else 0


def queue(
    lane: Lane,
    copies: CopyArrays | StridedCopies,
    src: Mapped,
    dst: Mapped,
    most_bytes: int,
    *,
    whole: bool = False,
) -> int:
    """Queue all of these copies and the lane's end after them; how many bytes.

    0, and nothing is queued, where they are not for here. With `whole`, in one piece, for who has
    other things for the GPU to do meanwhile. The device must be current.
    """
    tables = tables_of(copies)
    if tables is None or not lane.kernels:
        return 0
    rows, steps, segments = len(tables[0]), len(tables[2]), len(tables[4])
    length = constant(tables[6])
    if length:
        tables.pop()
    outer = 2 * (rows + steps)
    total = outer + (2 if length else 3) * segments
    room = outer + (2 if length else 4) * segments + PIECES
    if segments > WINDOW or room > SLOT_NUMBERS:
        return 0
    slot = lane.slot(room)
    numbers, together = slot.numbers, total <= TOGETHER_NUMBERS
    try:
        if together:
            np.concatenate(tables, out=numbers[:total])
            lows, highs, bits = look_together(numbers[:total], tables)
        else:
            np.concatenate(tables[:4], out=numbers[:outer])
            lows, highs, bits = look_at_each(tables)
    except (TypeError, ValueError):  # no integers, or not of one dimension
        return 0
    if length:
        shortest = longest = length
        bits.append(length)
    else:
        shortest, longest = lows[6], highs[6]
    if shortest <= 0:
        return 0
    shifts = []
    for side, memory in enumerate((src, dst)):
        low = lows[2 + side] + lows[4 + side]
        high = highs[2 + side] + highs[4 + side] + longest
        shift = memory.shift_of(lows[side] + low, highs[side] + high)
        if shift is None and not together:  # now exactly
            segments_of = tables[4 + side]
            low += int(np.minimum.reduce(segments_of)) - lows[4 + side]
            high += int(np.maximum.reduce(segments_of)) - highs[4 + side]
            shift = memory.shift_of(lows[side] + low, highs[side] + high)
        if shift is None:
            here = numbers[side * rows : (side + 1) * rows]
            shifted = memory.shifted(here, low, high)
            if shifted is None:
                return 0
            here[:] = shifted
            shift = 0
        shifts.append(shift)
    every = 0
    for some in bits:
        every |= some
    grain = next(g for g in GRAINS if every % g == 0)
    uneven = shortest != longest
    if uneven:
        length, all_lengths = 0, numbers[total - segments : total] if together else tables[6]
        chunk = best_chunk(all_lengths[:: max(1, segments // SAMPLE)])
        bytes_ = int(np.add.reduce(all_lengths)) * steps * rows
    else:
        length, chunk = longest, chunk_for(longest)
        bytes_ = longest * segments * steps * rows
    ready = cuda_kernels.ready(lane.device, chunk, uneven, grain)
    most_items = (longest // chunk + 1) * segments * steps
    if ready is None or bytes_ > most_bytes or most_items > MOST_ITEMS:
        return 0
    kernel, count = ready
    stream, base = lane.stream, slot.address
    if not together or most_items * rows > DIRECT_ITEMS:
        base = slot.there
    steps_at = base + 16 * rows
    tail = [length, *shifts]
    at, first, uploaded = outer, 0, 0
    size = segments if together or whole else LEAST_PIECE
    while first < segments:
        size = min(size, segments - first)
        end = at + 2 * size
        if not together:
            parts = [table[first : first + size] for table in tables[4 : 7 if uneven else 6]]
            np.concatenate(parts, out=numbers[at : at + len(parts) * size])
        if uneven:
            each = numbers[end : end + size]
            firsts = numbers[end + size : end + 2 * size + 1]
            firsts[0] = 0
            np.cumsum(-(-each // chunk), out=firsts[1:])
            chunks, row_bytes = int(firsts[-1]), int(each.sum()) * steps
            per_row = chunks * steps
            end += 2 * size + 1
        else:
            chunks = -(-length // chunk)
            per_row, row_bytes = chunks * size * steps, length * size * steps
        if base != slot.address:
            lane.upload(base + 8 * uploaded, slot.address + 8 * uploaded, 8 * (end - uploaded))
            uploaded = end
        here_at = base + 8 * at
        places = [here_at, here_at + 8 * size, steps_at, steps_at + 8 * steps]
        places += [here_at + 16 * size, here_at + 24 * size] if uneven else [base, base]
        rest = [*places, *tail, size, steps, chunks, size.bit_length()]
        for row, begin, stop in ranges(rows, per_row, row_bytes):
            values = [base + 8 * row, base + 8 * (rows + row), *rest, begin, stop]
            kernel.launch(-(-(stop - begin) // count), stream, [*values, *SCRATCH_ARGUMENTS])
        at, first, size = end, first + size, 2 * size
    lane.mark_end()
    return bytes_


Look = tuple[list[int], list[int], list[int]]  # of each table: least, most, bits set in any


def look_together(numbers: Ints, tables: Sequence[Any]) -> Look:
    """Of tables that were written there one after another."""
    heads = _heads(*map(len, tables[:-1]))
    return (
        np.minimum.reduceat(numbers, heads).tolist(),
        np.maximum.reduceat(numbers, heads).tolist(),
        np.bitwise_or.reduceat(numbers, heads).tolist(),
    )


@lru_cache(maxsize=256)
def _heads(*sizes: int) -> Ints:
    """Where each table begins."""
    return np.array([0, *accumulate(sizes)])


def look_at_each(tables: Sequence[Any]) -> Look:
    """Of arrays where they are; `TypeError` where they are not what the GPU takes.

    Where no segment is negative, 0 is said to be the least of them, and all bits that are set in
    any of them together the most: for offsets that is usually enough, and found in one pass.
    """
    lows, highs, bits = look = ([], [], [])  # type: Look
    for number, table in enumerate(tables):
        if not isinstance(table, np.ndarray) or table.dtype != np.int64 or table.ndim != 1:
            raise TypeError
        bits.append(int(np.bitwise_or.reduce(table)))
        if number in (4, 5) and bits[-1] >= 0:
            lows.append(0)
            highs.append(bits[-1])
        else:
            lows.append(int(np.minimum.reduce(table)))
            highs.append(int(np.maximum.reduce(table)))
    return look
