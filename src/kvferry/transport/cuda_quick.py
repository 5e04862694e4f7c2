"""A whole batch, queued by the thread that asks for it: its numbers are written once.

Handing a batch to another thread and waking up again costs a tenth of a millisecond and more, and
every NumPy call a microsecond or two: as much as copying some megabytes. So all numbers of a batch
are written side by side into the pinned memory that the GPU gets them from, in one call, and what
must be known of them is found there, in one call for each kind of question:

    least, most     do both sides lie in registered memory? are all lengths equal, and above zero?
    bits            what do all addresses and lengths have as common divisor?

What is not usual is left to cuda_lane.py, which cuts, and which says what is wrong: empty copies,
a kernel that is not compiled yet, memory that is registered in pieces, more numbers than a slot.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, cast

import numpy as np

from kvferry.transport import cuda_kernels
from kvferry.transport.base import CopyArrays, Ints, StridedCopies
from kvferry.transport.cuda_kernels import SCRATCH_ARGUMENTS, Form
from kvferry.transport.cuda_lane import DIRECT_BYTES, DIRECT_NUMBERS, SLOT_NUMBERS, Lane, ranges
from kvferry.transport.cuda_mapped import Mapped
from kvferry.transport.cuda_work import (
    GRAINS,
    MOST_ITEMS,
    SAMPLE,
    WINDOW,
    best_chunk,
    chunk_for,
)

# Tables up to so many numbers are looked at together; longer ones one by one, which takes half the
# time for each number and a microsecond more for each table.
TOGETHER_NUMBERS = 1 << 13
MOST_LAUNCHES = 64  # of one batch: what the driver queues without waiting

_ZERO = np.zeros(1, dtype=np.int64)


def tables_of(copies: CopyArrays | StridedCopies) -> tuple[list[Any], Any] | None:
    """Rows, segments and steps, each of source and destination; lengths. None: of odd shapes."""
    if hasattr(copies, "src_rows"):
        runs = cast(StridedCopies, copies)
        tables = [
            runs.src_rows,
            runs.dst_rows,
            runs.src_segments,
            runs.dst_segments,
            runs.src_steps,
            runs.dst_steps,
        ]
        lengths: Any = runs.lengths
    else:
        tables = [_ZERO, _ZERO, copies.src, copies.dst, _ZERO, _ZERO]
        lengths = copies.length
    try:
        sizes = [len(table) for table in tables]
        same = sizes[0] == sizes[1] and sizes[2] == sizes[3] == len(lengths)
    except TypeError:
        return None
    return (tables, lengths) if same and sizes[4] == sizes[5] and all(sizes) else None


def constant(lengths: Any) -> int:
    """Their only value where an array says so by its strides, as a plan's batch does; else 0."""
    one = isinstance(lengths, np.ndarray) and lengths.strides == (0,) and lengths.dtype.kind in "iu"
    return int(lengths[0]) if one else 0


def queue(
    lane: Lane, copies: CopyArrays | StridedCopies, src: Mapped, dst: Mapped, most_bytes: int
) -> int:
    """Queue all of these copies and the lane's end after them; how many bytes.

    0, and nothing is queued, where they are not for here. The device must be current.
    """
    found = tables_of(copies)
    if found is None or not lane.kernels:
        return 0
    tables, lengths = found
    rows, segments, steps = len(tables[0]), len(tables[2]), len(tables[4])
    length = constant(lengths)
    if not length:
        tables.append(lengths)
    ends = list(accumulate(map(len, tables)))
    total = ends[-1]
    if segments > WINDOW or total + segments + 1 > SLOT_NUMBERS:
        return 0
    slot = lane.slot(total if length else total + segments + 1)
    numbers = slot.numbers[:total]
    try:
        np.concatenate(tables, out=numbers)
    except (TypeError, ValueError):  # no integers, or not of one dimension
        return 0
    heads = [0, *ends[:-1]]
    lows, highs, bits = looks(numbers, heads, ends)
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
        if shift is None:
            here = numbers[heads[side] : ends[side]]
            shifted = memory.shifted(here, low, high)
            if shifted is None:
                return 0
            here[:] = shifted
            shift = 0
        shifts.append(shift)
    if shortest == longest:
        chunk, length = chunk_for(longest), longest
        firsts, chunks, total = 0, -(-longest // chunk), ends[5]
        per_row, row_bytes = chunks * segments * steps, longest * segments * steps
    else:
        length, each = 0, numbers[heads[6] :]
        chunk = best_chunk(each[:: max(1, segments // SAMPLE)])
        firsts = total
        into = slot.numbers[total : total + segments + 1]
        into[0] = 0
        np.cumsum(-(-each // chunk), out=into[1:])
        total += segments + 1
        chunks = int(into[-1])
        per_row, row_bytes = chunks * steps, int(each.sum()) * steps
    every = 0
    for some in bits:
        every |= some
    form = Form(chunk, not length, False, next(g for g in GRAINS if every % g == 0))
    kernel = cuda_kernels.compiled(lane.device, form)
    bytes_ = row_bytes * rows
    if kernel is None or per_row > MOST_ITEMS or bytes_ > most_bytes:
        return 0
    parts = list(ranges(rows, per_row, row_bytes))
    if len(parts) > MOST_LAUNCHES:
        return 0
    stream, base = lane.stream, slot.address
    if total > DIRECT_NUMBERS or bytes_ > DIRECT_BYTES:
        base = slot.there
        stream.copy(base, slot.address, 8 * total)
    places = [base + 8 * head for head in heads[:6]]
    lengths_at = base + 8 * heads[6] if not length else base
    rest = [*places[2:], lengths_at, base + 8 * firsts, length, *shifts, segments, steps]
    rest += [chunks, segments.bit_length()]
    for row, begin, end in parts:
        values = [places[0] + 8 * row, places[1] + 8 * row, *rest, begin, end, *SCRATCH_ARGUMENTS]
        kernel.launch(-(-(end - begin) // form.count), stream, values)
    lane.mark_end()
    return bytes_


def looks(
    numbers: Ints, heads: list[int], ends: list[int]
) -> tuple[list[int], list[int], list[int]]:
    """Of each table that lies there: the least, the most, and the bits set in any of them."""
    if len(numbers) <= TOGETHER_NUMBERS:
        least, most, bits = (
            ufunc.reduceat(numbers, heads).tolist()
            for ufunc in (np.minimum, np.maximum, np.bitwise_or)
        )
        return least, most, bits
    tables = [numbers[head:end] for head, end in zip(heads, ends, strict=True)]
    least, most, bits = (
        [int(ufunc.reduce(table)) for table in tables]
        for ufunc in (np.minimum, np.maximum, np.bitwise_or)
    )
    return least, most, bits
