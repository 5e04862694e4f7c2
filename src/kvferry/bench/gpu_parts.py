"""Where the time of short copies goes, and what checksums of device memory cost.

The gap of short copies has two parts. *In the kernel*: the same 256-byte copies, between slots that
lie side by side or four times as far apart, in their order or at random; beside long ones. *Around
the kernel*: a transfer's clock, less the kernel's, and when its first launch was queued.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.bench.gpu_clock import GB, soon, wall
from kvferry.p2p.checksum import MIX128, XXH3, Algorithm, digest
from kvferry.transport.base import Ints
from kvferry.transport.cuda_stream import Function
from kvferry.transport.cuda_work import Runs

if TYPE_CHECKING:
    from kvferry.bench.gpu import Bench

TOTAL_BYTES = 2 << 30
ROWS = 64
SUM_BYTES = 1 << 30


def kernels(bench: Bench) -> list[dict[str, Any]]:
    """Shares of the copy peak, by how slots lie."""
    found = []
    for size in (256, 4096):
        row: dict[str, Any] = {"bytes": size}
        for area in (TOTAL_BYTES, 4 * TOTAL_BYTES):
            for order in ("ordered", "random"):
                runs = _runs(bench, size, area, order)
                share = 2 * runs.bytes / bench.kernel_of(runs) / bench.peak
                row[f"{'dense' if area == TOTAL_BYTES else 'apart'}, {order}"] = share
        found.append(row)
    return found


def _runs(bench: Bench, size: int, area: int, order: str) -> Runs:
    count, apart = TOTAL_BYTES // size // ROWS, area // TOTAL_BYTES * size
    rows = np.arange(ROWS, dtype=np.int64) * (count * apart)
    rng, one = np.random.default_rng(size), np.zeros(1, dtype=np.int64)
    sides: list[Ints] = []
    for _ in range(2):
        at = np.arange(count, dtype=np.int64)
        sides.append((rng.permutation(at) if order == "random" else at) * apart)
    lengths = np.broadcast_to(np.asarray([size]), count)
    return Runs(rows + bench.there, rows + bench.here, sides[0], sides[1], lengths, one, one)


def around(bench: Bench, size: int) -> dict[str, float]:
    """Microseconds of one transfer: to its first launch, until `read` returns, all, the kernel."""
    runs = bench.strided(size)
    kernel = bench.kernel_of(runs)
    carrier: Any
    carrier, peer = bench.cuda
    launched: list[float] = []
    launch: Callable[..., None] = Function.launch

    def noted(self: Function, *arguments: Any) -> None:
        launch(self, *arguments)
        launched.append(time.perf_counter())

    rows = []
    Function.launch = noted  # type: ignore[method-assign, assignment]
    try:
        for _ in range(31):
            launched.clear()
            begin = time.perf_counter()
            transfer = carrier.read(peer, runs)
            returned = time.perf_counter()
            transfer.wait(soon())
            rows.append((launched[0] - begin, returned - begin, time.perf_counter() - begin))
    finally:
        Function.launch = launch  # type: ignore[method-assign]
    names = ("first launch", "read returns", "done")
    found = {n: 1e6 * median(row[i] for row in rows) for i, n in enumerate(names)}
    return {"bytes": size, **found, "kernel": 1e6 * kernel}


def checksums(bench: Bench) -> list[dict[str, Any]]:
    """GB/s of a checksum over device memory, as a message asks for it, and as one long list."""
    found = []
    for size in (512, 8 << 10, 64 << 10):
        arrays = bench.arrays(size)
        row: dict[str, Any] = {"bytes": size}

        def rate(algorithm: Algorithm, most: int) -> float:
            count = min(len(arrays), most // size)  # noqa: B023, called at once
            at, length = arrays.dst[:count], arrays.length[:count]  # noqa: B023
            return count * size / wall(lambda: digest(bench.memory, at, length, algorithm)) / GB  # noqa: B023

        row["xxh3"], row["mix128"] = rate(XXH3, XXH3.slice_bytes), rate(MIX128, SUM_BYTES)
        row["mix128 a message"] = rate(MIX128, min(MIX128.slice_bytes, (1 << 15) * size))
        found.append(row)
    return found
