"""`python -m kvferry.bench.prepared`: NIXL's prepared lists, and descriptors made for each batch.

For uniform blocks, a list of all blocks of each side's memory can be prepared once, and a batch be
made of indices into them. Compared on one agent, in pairs, for the same copies:

    arrays   what the carrier does: both ends' descriptors as NumPy arrays, then `initialize_xfer`
    indices  addresses divided by the block size, then `make_prepped_xfer` over the prepared lists

`making` is what passes before the batch can start, in microseconds; `ratio` compares whole batches,
made, moved and let go: above one, indices are faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.bench.movers import OurCarrier, quiet_libraries
from kvferry.bench.owner import BUFFER_BYTES, buffer, owner
from kvferry.bench.paired import slots
from kvferry.errors import TransferError
from kvferry.transport import nixl
from kvferry.units import show_bytes

CASES = ((1 << 10, 1 << 14), (4 << 10, 1 << 10), (4 << 10, 1 << 14), (64 << 10, 1 << 10))
PAIRS = 25


@dataclass(frozen=True, slots=True)
class PreparedRow:
    op: str
    descriptor_bytes: int
    descriptors: int
    arrays_us: float
    indices_us: float
    ratio: float
    lower_quartile: float
    upper_quartile: float


def run() -> Iterator[PreparedRow]:
    landing = buffer(1)
    with (
        quiet_libraries(),
        owner() as other,
        closing(OurCarrier("nixl", landing, "direct")) as mover,
    ):
        mover.connect(other.open("nixl-direct"))
        agent, peer = mover.engine()
        for size, count in CASES:
            here, there = landing.ctypes.data, other.address
            every = np.arange(BUFFER_BYTES // size, dtype=np.int64) * size
            length = np.full(len(every), size, dtype=np.int64)
            lists = [
                agent.prep_xfer_dlist(who, nixl.rows(base + every, length), nixl.MEMORY)
                for who, base in (("NIXL_INIT_AGENT", here), (peer, there))
            ]
            a, b = (offsets[:count] for offsets in slots(size))
            local, remote = here + a, there + b
            for op in ("READ", "WRITE"):

                def by_arrays(op: str = op, ends: Any = (local, remote), n: Any = length) -> Any:
                    made = [
                        agent.get_xfer_descs(nixl.rows(end, n[: len(end)]), mem_type=nixl.MEMORY)
                        for end in ends
                    ]
                    return agent.initialize_xfer(op, *made, peer)

                def by_indices(
                    op: str = op,
                    ends: Any = ((local, here), (remote, there)),
                    size: int = size,
                    lists: Any = lists,
                ) -> Any:
                    mine, theirs = (((at - base) // size).astype(np.int32) for at, base in ends)
                    return agent.make_prepped_xfer(op, lists[0], mine, lists[1], theirs)

                yield _row(agent, op.lower(), size, count, by_arrays, by_indices)


def _row(
    agent: Any,
    op: str,
    size: int,
    count: int,
    by_arrays: Callable[[], Any],
    by_indices: Callable[[], Any],
) -> PreparedRow:
    times = []
    for number in range(PAIRS + 1):  # the first is for pages and connections
        ways = (by_arrays, by_indices) if number % 2 else (by_indices, by_arrays)
        taken = {way: _moved(agent, way) for way in ways}
        times.append((*taken[by_arrays], *taken[by_indices]))
    table = np.array(times[1:])
    low, middle, high = np.quantile(table[:, 1] / table[:, 3], (0.25, 0.5, 0.75)).tolist()
    arrays_us, indices_us = (float(np.median(table[:, n])) * 1e6 for n in (0, 2))
    return PreparedRow(op, size, count, arrays_us, indices_us, middle, low, high)


def _moved(agent: Any, make: Callable[[], Any]) -> tuple[float, float]:
    """Seconds until it can start, and in all."""
    begin = time.perf_counter()
    handle = make()
    made = time.perf_counter()
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    agent.release_xfer_handle(handle)
    if state != "DONE":
        raise TransferError("NIXL failed a batch")
    return made - begin, time.perf_counter() - begin


def main() -> None:
    print(f"{'':6}{'descriptor':>12}{'of them':>9}  making: arrays  indices us   ratio  quartiles")
    for row in run():
        print(
            f"{row.op:6}{show_bytes(row.descriptor_bytes):>12}{row.descriptors:9,}"
            f"{row.arrays_us:16.0f}{row.indices_us:9.0f}{row.ratio:11.2f}"
            f"  {row.lower_quartile:.2f} to {row.upper_quartile:.2f}"
        )


if __name__ == "__main__":
    main()
