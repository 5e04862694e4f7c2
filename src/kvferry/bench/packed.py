"""`kvferry bench packed`: short runs, direct, packed and as the cost model chooses, in one run.

Owner and reader are separate processes, with one engine each (packed_pair.py). In each round every
mode moves the same batch once, `direct` twice; what compares is the ratio within a round.

`chosen` is what `packing: "auto"` does. It must not be slower than direct by more than noise, and
what noise is, is measured: the two times that a round has for `direct` have a ratio too, whose
median over the rounds would be one. `noise` is three standard errors of that median, by the ratio's
interquartile range, or `LEAST_NOISE` where that is less. The verdict, by the clock: the median
ratio of direct to chosen is at least one less the noise. The same is said of the processors' time,
of all threads of both processes. A cell that breaks the promise is measured again, in four times
as many rounds, and those count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvferry.bench.packed_pair import (
    BATCH_BYTES,
    BLOCK_TOKENS,
    BUFFER_BYTES,
    CARRIERS,
    PACKINGS,
    Bench,
    bench,
    runs_of,
)
from kvferry.bench.wanted import Wanted
from kvferry.errors import TransferError
from kvferry.transport.cost import current_costs
from kvferry.units import show_bytes

SIZES = tuple(64 << step for step in range(11))  # 64 B to 64 KiB
LEAST_ROUNDS = 11
LEAST_NOISE = 0.05
AGAIN = 4
ERRORS = 3  # standard errors of a median, in which it is taken to be by chance
GB = 1e9

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PackedRow:
    carrier: str
    run_bytes: int
    runs: int
    rounds: int
    direct_gb_s: float  # medians
    packed_gb_s: float
    chosen_gb_s: float
    packed_of_direct: float  # medians of the rounds' ratios: above one, faster than direct
    chosen_of_direct: float
    noise: float
    cpu_ns_per_byte: dict[str, float]  # by packing, medians
    cpu_of_direct: float  # of chosen; above one, cheaper than direct
    cpu_noise: float

    @property
    def not_slower(self) -> bool:
        return self.chosen_of_direct >= 1 - self.noise

    @property
    def not_dearer(self) -> bool:
        return self.cpu_of_direct >= 1 - self.cpu_noise


@dataclass(frozen=True, slots=True)
class PackedResult:
    costs: str  # name of the costs that chose
    rows: tuple[PackedRow, ...]
    crossover_bytes: dict[str, int]  # by carrier: the shortest run from which direct wins
    slower: tuple[str, ...]  # cells that break the promise, by the clock
    dearer: tuple[str, ...]  # by the processors
    missing: dict[str, str] = field(default_factory=dict)  # carriers not measured, and why


def run(
    sizes: Sequence[int] = SIZES, seconds: float = 1.0, carriers: Sequence[str] = ()
) -> PackedResult:
    """Measure carriers: all that are installed, or those named, which must be."""
    most = min(BUFFER_BYTES // (4 * BLOCK_TOKENS), BATCH_BYTES // 64)
    for size in sizes:
        if not 1 <= size <= most:
            raise TransferError(f"runs of {size} bytes; this measures 1 to {most} bytes")
    wanted = Wanted.of(carriers, CARRIERS)
    with bench(wanted) as both:
        rows = [_sure(both, name, size, seconds) for name in wanted.names for size in sizes]
    crossover = {
        name: next((r.run_bytes for r in rows if r.carrier == name and r.packed_of_direct <= 1), 0)
        for name in wanted.names
    }
    return PackedResult(
        current_costs().name,
        tuple(rows),
        crossover,
        tuple(_cell(row) for row in rows if not row.not_slower),
        tuple(_cell(row) for row in rows if not row.not_dearer),
        wanted.missing,
    )


def _sure(both: Bench, carrier: str, size: int, seconds: float) -> PackedRow:
    row = _row(both, carrier, size, seconds, LEAST_ROUNDS)
    if row.not_slower and row.not_dearer:
        return row
    return _row(both, carrier, size, AGAIN * seconds, AGAIN * LEAST_ROUNDS)


def _row(both: Bench, carrier: str, size: int, seconds: float, least: int) -> PackedRow:
    copies = both.token_major(size, runs_of(carrier, size))
    times = both.rounds(carrier, copies, ("direct", *PACKINGS), seconds, least)
    count = int(copies.length.sum())
    medians, of_direct, noise = zip(*(_compared(kind) for kind in times.T), strict=True)
    direct, packed, chosen = (count / medians[0] / GB).tolist()
    cpu = medians[1] / count * 1e9
    return PackedRow(
        carrier,
        size,
        len(copies),
        len(times),
        direct,
        packed,
        chosen,
        float(of_direct[0][0]),
        float(of_direct[0][1]),
        noise[0],
        dict(zip(PACKINGS, cpu.tolist(), strict=True)),
        float(of_direct[1][1]),
        noise[1],
    )


def _compared(times: Floats) -> tuple[Floats, Floats, float]:
    """Of `direct` twice and the other modes, each by round: medians of the modes, how many times
    as fast as direct the others are, and the noise of that."""
    again, direct, *others = times
    usual = (again + direct) / 2
    low, high = np.quantile(again / direct, (0.25, 0.75)).tolist()
    error = 1.253 * (high - low) / 1.349 / len(direct) ** 0.5  # of a normal distribution
    return (
        np.array([np.median(mode) for mode in (direct, *others)]),
        np.array([np.median(usual / mode) for mode in others]),
        max(LEAST_NOISE, ERRORS * error),
    )


def _cell(row: PackedRow) -> str:
    return f"{row.carrier} {show_bytes(row.run_bytes)}"


def lines(result: PackedResult) -> Iterator[str]:
    """The result as a table for people."""
    yield f"costs: {result.costs}"
    yield (
        f"{'carrier':10}{'run':>8}{'runs':>8}{'direct':>8}{'packed':>8}{'chosen':>8} GB/s"
        f"{'packed':>9}{'chosen':>8} of direct  noise   cpu ns/B: direct  packed  chosen  noise"
    )
    for row in result.rows:
        cpu = row.cpu_ns_per_byte
        yield (
            f"{row.carrier:10}{row.run_bytes:8,}{row.runs:8,}{row.direct_gb_s:8.3f}"
            f"{row.packed_gb_s:8.3f}{row.chosen_gb_s:8.3f}{row.packed_of_direct:14.2f}"
            f"{row.chosen_of_direct:8.2f}{row.noise:17.0%}"
            f"{cpu['direct']:19.2f}{cpu['packed']:8.2f}{cpu['auto']:8.2f}{row.cpu_noise:7.0%}"
        )
    for name, why in result.missing.items():
        yield f"not measured: {name}: {why}"
    for carrier, size in result.crossover_bytes.items():
        where = f"direct wins from {show_bytes(size)} on" if size else "packed wins"
        yield f"{carrier}: {where}"
    slower, dearer = (", ".join(cells) or "never" for cells in (result.slower, result.dearer))
    yield f"what is chosen is slower than direct by more than noise: {slower}"
    yield f"and takes more of the processors, by more than noise: {dearer}"
