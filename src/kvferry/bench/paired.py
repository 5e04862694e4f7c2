"""What the carriers `mooncake` and `nixl` add to their libraries, measured in pairs.

Two engines of one library in the same two processes differ by a factor of two, by luck: which
threads serve which connections. So the carrier and its library, called directly with the same
batches, move the same copies over the *same* engine in turns: library, carrier, library, ... What
counts is the median of the turns' ratios (turns.py), with their quartiles as the spread.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.bench.movers import IN_PAIRS, OurCarrier
from kvferry.bench.owner import BUFFER_BYTES, Owner
from kvferry.bench.turns import in_turns
from kvferry.transport.base import Ints
from kvferry.transport.regions import Arrays
from kvferry.units import show_bytes

MAX_DESCRIPTORS = 1 << 17
# A turn takes some 50 ms of either library, of which a carrier's own 0.5 ms are a hundredth.
PAIR_DESCRIPTORS = {"mooncake": 1 << 10, "nixl": 1 << 14}
PAIR_BYTES = {"mooncake": 64 << 20, "nixl": BUFFER_BYTES}
LEAST_PAIRS, MOST_PAIRS = 61, 101
GB = 1e9

Task = Callable[[], None]


@dataclass(frozen=True, slots=True)
class PairedRow:
    carrier: str
    op: str
    descriptor_bytes: int
    pairs: int
    library_gb_s: float  # the median
    of_library: float  # median of the pairs' ratios; above one, the carrier is faster
    lower_quartile: float
    upper_quartile: float


def paired(
    owner: Owner,
    landing: NDArray[np.uint8],
    names: Sequence[str],
    sizes: Sequence[int],
    ops: Sequence[str],
    seconds: float,
) -> list[PairedRow]:
    rows: list[PairedRow] = []
    for name in names:
        if name not in IN_PAIRS:
            continue
        with closing(OurCarrier(name, landing)) as mover:
            mover.connect(owner.open(name))
            try:
                for size, op in itertools.product(sizes, ops):
                    rows.append(_row(owner, landing, mover, name, op, size, seconds))
            finally:
                owner.close(name)
    return rows


def _row(
    owner: Owner,
    landing: NDArray[np.uint8],
    mover: OurCarrier,
    name: str,
    op: str,
    size: int,
    seconds: float,
) -> PairedRow:
    src, dst = slots(size)
    few = slice(0, max(1, min(PAIR_DESCRIPTORS[name], PAIR_BYTES[name] // size)))
    here, there = landing.ctypes.data, owner.address
    a, b = (there, here) if op == "read" else (here, there)
    length = np.full(len(src[few]), size, dtype=np.int64)
    copies = Arrays(src[few] + a, dst[few] + b, length)
    ours, theirs = mover.prepare(op, copies), mover.library(op, copies)
    ours()
    theirs()
    theirs_seconds, ratios = in_turns(
        lambda: seconds_of(ours), lambda: seconds_of(theirs), LEAST_PAIRS, MOST_PAIRS, seconds
    )
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    rate = int(length.sum()) / float(np.median(theirs_seconds)) / GB
    return PairedRow(name, op, size, len(ratios), rate, middle, low, high)


def paired_lines(rows: Sequence[PairedRow]) -> Iterator[str]:
    if not rows:
        return
    yield ""
    title = f"{'of its library, one engine':26}{'descriptor':>12}{'pairs':>7}{'median':>9}"
    yield title + "   quartiles"
    for row in rows:
        yield (
            f"{row.carrier:20}{row.op:6}{show_bytes(row.descriptor_bytes):>12}"
            f"{row.pairs:7}"
            f"{row.of_library:9.2f}   {row.lower_quartile:.2f} to {row.upper_quartile:.2f}"
        )


def slots(size: int) -> tuple[Ints, Ints]:
    """Offsets of random slots on both sides."""
    count = BUFFER_BYTES // size
    some = min(count, MAX_DESCRIPTORS)
    rng = np.random.default_rng(size)
    src, dst = (rng.permutation(count)[:some].astype(np.int64) * size for _ in range(2))
    return src, dst


def seconds_of(task: Task) -> float:
    begin = time.perf_counter()
    task()
    return time.perf_counter() - begin
