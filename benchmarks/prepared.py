"""`python -m benchmarks.prepared`: what NIXL's prepared lists save the carrier.

Transfers of 16,384 copies of 4 KiB, anywhere in 256 MiB that are registered as so many regions (as
an engine's layers are), between two carriers of one process, in turns:

    arrays   both ends' descriptors as NumPy arrays, batch by batch
    indices  slots' numbers, found anew for each transfer, in lists that were prepared once

`ratio` compares whole transfers: above one, indices are faster.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.bench.transport import WAIT_SECONDS, quiet_libraries
from kvferry.carriers.base import (
    MemoryRegion,
    Transfer,
)
from kvferry.carriers.library.nixl import NixlCarrier
from kvferry.carriers.library.shared import LibraryPeer
from kvferry.copies import Copies, Ints

TOTAL_BYTES = 256 << 20
COPY_BYTES = 4 << 10
COPIES = 1 << 14
GAP_BYTES = COPY_BYTES  # between regions, or they would be one
REGIONS = (1, 16, 64, 256)
PAIRS = 61


@dataclass(frozen=True, slots=True)
class PreparedRow:
    op: str
    regions: int
    arrays_ms: float
    indices_ms: float
    ratio: float
    lower_quartile: float
    upper_quartile: float


class _Side:
    """Memory in so many regions, registered with a carrier."""

    def __init__(self, regions: int) -> None:
        each = TOTAL_BYTES // regions
        self.memory = np.ones(TOTAL_BYTES + regions * GAP_BYTES, dtype=np.uint8)
        starts = self.memory.ctypes.data + np.arange(regions, dtype=np.int64) * (each + GAP_BYTES)
        self.slots: Ints = (starts[:, None] + np.arange(0, each, COPY_BYTES)).ravel()
        self.carrier = NixlCarrier()
        self.carrier.register([MemoryRegion(int(start), each) for start in starts])


def run() -> Iterator[PreparedRow]:
    with quiet_libraries():
        for regions in REGIONS:
            here, there = _Side(regions), _Side(regions)
            with closing(there.carrier), closing(here.carrier):
                peer = here.carrier.connect(there.carrier.endpoint(), time.monotonic() + 30.0)
                for op in ("read", "write"):
                    yield _row(op, regions, here, there, peer)


def _row(op: str, regions: int, here: _Side, there: _Side, peer: LibraryPeer) -> PreparedRow:
    rng = np.random.default_rng(regions)
    length = np.full(COPIES, COPY_BYTES, dtype=np.int64)
    start = here.carrier.read if op == "read" else here.carrier.write
    times = []
    for number in range(PAIRS + 1):  # the first is for pages and connections
        mine, theirs = (
            side.slots[rng.permutation(len(side.slots))[:COPIES]] for side in (here, there)
        )
        copies = Copies(theirs, mine, length) if op == "read" else Copies(mine, theirs, length)
        taken = {}
        for by_index in (True, False) if number % 2 else (False, True):
            here.carrier.least_prepared = COPIES if by_index else sys.maxsize
            taken[by_index] = _seconds(start, peer, copies)
        times.append((taken[False], taken[True]))
    table = np.array(times[1:])
    low, middle, high = np.quantile(table[:, 0] / table[:, 1], (0.25, 0.5, 0.75)).tolist()
    arrays_ms, indices_ms = np.median(table, axis=0).tolist()
    return PreparedRow(op, regions, arrays_ms * 1e3, indices_ms * 1e3, middle, low, high)


def _seconds(start: Callable[[Any, Copies], Transfer], peer: LibraryPeer, copies: Copies) -> float:
    begin = time.perf_counter()
    start(peer, copies).wait(time.monotonic() + WAIT_SECONDS)
    return time.perf_counter() - begin


def main() -> None:
    print(f"{'':6}{'regions':>8}{'arrays ms':>12}{'indices ms':>12}{'ratio':>8}  quartiles")
    for row in run():
        print(
            f"{row.op:6}{row.regions:8}{row.arrays_ms:12.1f}{row.indices_ms:12.1f}{row.ratio:8.2f}"
            f"  {row.lower_quartile:.2f} to {row.upper_quartile:.2f}"
        )


if __name__ == "__main__":
    main()
