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

from kvferry.bench.packed_pair import (
    BATCH_BYTES,
    BUFFER_BYTES,
    CARRIERS,
    MOST_RUNS,
    Bench,
    bench,
    present,
)
from kvferry.errors import TransferError
from kvferry.transport.base import MemoryRegion
from kvferry.transport.cost import Cost, Costs, Mode, shipped_costs, user_path
from kvferry.transport.local_move import covers_seconds, most_gap
from kvferry.transport.regions import Arrays, RegionTable

CALIBRATED_SIZES = (64, 256, 1024, 4096, 16384, 65536)
CALIBRATED_RUNS = (64, 1024, 16384)
LEAST_ROUNDS = 3

Point = tuple[int, int, float]  # descriptors, bytes, seconds


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
    batches = [
        both.token_major(size, runs)
        for size in CALIBRATED_SIZES
        for runs in CALIBRATED_RUNS
        if runs * size <= 2 * BATCH_BYTES and runs <= MOST_RUNS[carrier]
    ]
    points: dict[Mode, list[Point]] = {mode: [] for mode in modes}
    for copies in batches:
        times = both.rounds(carrier, copies, modes, seconds, LEAST_ROUNDS)
        for mode, of_mode in zip(modes, times[:, :, 0].T, strict=True):
            point = (len(copies), int(copies.length.sum()), float(np.median(of_mode)))
            points[mode].append(point)
    direct = fit(points["direct"])
    if carrier != "local":
        return {"direct": direct, "packed": fit(points["packed"])}
    return {"direct": direct, "packed": _beyond_covers(both, direct, batches, points["packed"])}


def _beyond_covers(
    both: Bench, direct: Cost, batches: Sequence[Arrays], points: Sequence[Point]
) -> Cost:
    """What packed reads cost on top of reading the covers, which is counted at the direct rate."""
    shipped = shipped_costs().of("local", "direct")
    gap = most_gap(shipped or direct)  # what was measured went by it
    regions = RegionTable.of([MemoryRegion(both.source, BUFFER_BYTES)])
    some, known = [], []
    for copies, point in zip(batches, points, strict=True):
        covers = direct.batch_seconds + covers_seconds(direct, regions, copies, gap)
        if int(copies.length[0]) <= gap and covers < point[2]:  # others have nothing to cover
            some.append(point)
            known.append(covers)
    if not some:
        raise TransferError("packed reads take no time; measure again on a quiet machine")
    return fit(some, known)


def write_costs(costs: Costs) -> Path:
    path = user_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(costs)) + b"\n")
    return path


def fit(points: Sequence[Point], known: Sequence[float] | None = None) -> Cost:
    """The line through the points with the least relative errors.

    known  seconds of each point that are for something else; no batch has more of its own then
    """
    runs, sizes, seconds = (np.asarray(column, dtype=float) for column in zip(*points, strict=True))
    terms = np.stack([np.ones_like(runs), runs, sizes], axis=1) / seconds[:, None]
    wanted = 1 - np.asarray(known or 0.0) / seconds
    best: tuple[float, NDArray[np.float64]] | None = None
    for used in ([0, 1, 2], [1, 2], [0, 1], [0, 2], [1], [2]):
        if known and 0 in used:
            continue
        found = np.zeros(3)
        found[used] = np.linalg.lstsq(terms[:, used], wanted, rcond=None)[0]
        error = float(np.square(terms @ found - wanted).sum())
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
