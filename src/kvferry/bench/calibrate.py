"""`kvferry bench transport --calibrate`: the lines of cost.py, measured on this machine.

Both modes, at few and at many runs of several lengths; fitted non-negative, by relative error.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.bench.packed_pair import BATCH_BYTES, CARRIERS, MOST_RUNS, Bench, bench, present
from kvferry.errors import TransferError
from kvferry.transport.cost import Cost, Costs, Mode, shipped_costs, user_path

CALIBRATED_SIZES = (64, 256, 1024, 4096, 16384, 65536)
CALIBRATED_RUNS = (64, 1024, 16384)
LEAST_ROUNDS = 3


def calibrate(seconds: float = 0.3, names: Sequence[str] = CARRIERS) -> Costs:
    """Measure the carriers that are installed here; the others keep the costs that ship."""
    carriers = dict(shipped_costs().carriers)
    found = present(names)
    with bench(found, shipped_costs()) as both:  # the user's may not exist yet
        for carrier in found:
            carriers[carrier] = _modes(both, carrier, seconds)
    where = f"{_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Costs(where, today, "kvferry bench transport --calibrate", carriers)


def _modes(both: Bench, carrier: str, seconds: float) -> dict[Mode, Cost]:
    modes: tuple[Mode, ...] = ("direct", "packed")
    points: dict[Mode, list[tuple[int, int, float]]] = {mode: [] for mode in modes}
    for size in CALIBRATED_SIZES:
        for runs in CALIBRATED_RUNS:
            if runs * size > 2 * BATCH_BYTES or runs > MOST_RUNS[carrier]:
                continue
            # packed local reads covers: dense runs show what scattering them costs
            scattered = both.token_major(size, runs)
            dense = both.token_major(size, runs, gaps=False)
            for mode in modes:
                copies = dense if (carrier, mode) == ("local", "packed") else scattered
                times = both.rounds(carrier, copies, (mode,), seconds / 2, LEAST_ROUNDS)
                points[mode].append((runs, runs * size, float(np.median(times))))
    made = {mode: fit(points[mode]) for mode in modes}
    if carrier == "local":
        made["packed"] = _beyond_covers(made["direct"], made["packed"])
    return made


def _beyond_covers(direct: Cost, packed: Cost) -> Cost:
    """What packed reads cost on top of reading the covers, which is counted at the direct rate."""
    return Cost(
        0.0,  # a slice of a batch is chosen at a time, both ways
        packed.descriptor_seconds,
        max(0.0, packed.byte_seconds - direct.byte_seconds),
    )


def write_costs(costs: Costs) -> Path:
    path = user_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(costs)) + b"\n")
    return path


def fit(points: Sequence[tuple[int, int, float]]) -> Cost:
    """The line through (descriptors, bytes, seconds) with the least relative errors."""
    runs, sizes, seconds = (np.asarray(column, dtype=float) for column in zip(*points, strict=True))
    terms = np.stack([np.ones_like(runs), runs, sizes], axis=1) / seconds[:, None]
    best: tuple[float, NDArray[np.float64]] | None = None
    for used in ([0, 1, 2], [1, 2], [0, 1], [0, 2], [1], [2]):
        found = np.zeros(3)
        found[used] = np.linalg.lstsq(terms[:, used], np.ones_like(seconds), rcond=None)[0]
        error = float(np.square(terms @ found - 1).sum())
        if (found >= 0).all() and (best is None or error < best[0]):
            best = (error, found)
    if best is None:
        raise TransferError("the measurements fit no line; measure again on a quiet machine")
    return Cost(*(float(f"{value:.4g}") for value in best[1]))


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
