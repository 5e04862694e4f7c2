"""`kvferry bench transport --calibrate`: the lines of cost.py, measured on this machine.

Both modes, at few and at many runs of several lengths; fitted non-negative, by relative error.
Carriers that are not measured keep the costs that they had: the user's, else those that ship.
"""

from __future__ import annotations

import datetime
import os
import platform
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
)
from kvferry.bench.wanted import Wanted
from kvferry.errors import DescriptionError, TransferError
from kvferry.private_files import create_private
from kvferry.transport.base import MemoryRegion
from kvferry.transport.cost import (
    ENVIRONMENT,
    Cost,
    Costs,
    Mode,
    read_costs,
    shipped_costs,
    user_path,
)
from kvferry.transport.local_move import covers_seconds, most_gap
from kvferry.transport.regions import Arrays, RegionTable

CALIBRATED_SIZES = (64, 256, 1024, 4096, 16384, 65536)
CALIBRATED_RUNS = (64, 1024, 16384)
CALIBRATED_SECONDS = 0.3  # for each batch
LEAST_ROUNDS = 3

Point = tuple[int, int, float]  # descriptors, bytes, seconds


@dataclass(frozen=True, slots=True)
class Calibrated:
    costs: Costs
    kept: dict[str, str]  # carriers whose costs are those they had, and why


def calibrate(seconds: float = CALIBRATED_SECONDS, named: Sequence[str] = ()) -> Calibrated:
    """Measure the carriers that are named, or all that are installed here."""
    wanted = Wanted.of(named, CARRIERS)
    carriers = _before()
    with bench(wanted, shipped_costs()) as both:  # the user's may not exist yet
        for carrier in wanted.names:
            carriers[carrier] = _modes(both, carrier, seconds)
    kept = {
        name: wanted.missing.get(name, "it was not named" if named else "it cannot be measured")
        for name in carriers
        if name not in wanted.names
    }
    where = f"{_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    if kept:
        where += f" (as before: {', '.join(kept)})"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    command = "kvferry bench transport --calibrate"
    if named:
        command += f" --carriers {','.join(wanted.names)}"
    return Calibrated(Costs(where, today, command, carriers), kept)


def _before() -> dict[str, dict[Mode, Cost]]:
    path = user_path()
    try:
        mine = read_costs(path.read_bytes(), str(path)).carriers
    except (OSError, DescriptionError):  # none yet, or one that is made anew now
        mine = {}
    return {**shipped_costs().carriers, **mine}


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


@contextmanager
def costs_file(path: Path) -> Iterator[Callable[[Costs], None]]:
    """What keeps costs in that file, at once or not at all. That it can is tried here, before
    anybody measures."""
    real = Path(os.path.realpath(path))  # a link stays one
    beside = real.with_name(f".{real.name}.{secrets.token_hex(4)}")

    def refused(why: str | None) -> DescriptionError:
        return DescriptionError(
            f"cannot keep costs in {path}: {why}; let {ENVIRONMENT} name a file that can be written"
        )

    try:
        real.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if real.exists() and not real.is_file():  # a device, too, could be replaced
            raise refused("it is there, and no file")
        if real.exists() and not os.access(real, os.W_OK):
            raise refused("it may not be written")
        file = os.fdopen(create_private(beside), "wb")
    except OSError as error:
        raise refused(error.strerror) from None

    def keep(costs: Costs) -> None:
        try:
            file.write(msgspec.json.format(msgspec.json.encode(costs)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
            beside.replace(real)
        except OSError as error:
            raise refused(error.strerror) from None

    try:
        with file:
            yield keep
    finally:
        beside.unlink(missing_ok=True)


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
