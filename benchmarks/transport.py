# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.transport`: what `kvferry bench transport` measures, and a judgement of it.

`paired` is the overhead of the carriers `mooncake` and `nixl` over their libraries. Two engines of
one library in the same two processes can differ by a factor of two, depending on which threads
serve which connections. So the carrier, and its library called directly with the same batches, move
the same copies over the *same* engine in turns: library, carrier, library, ... The result is the
median of the turns' ratios, with their quartiles as the spread.

`targets` judges all carriers by their worst cells.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from kvferry.bench.transport import (
    BUFFER_BYTES,
    GB,
    OPS,
    SIZES,
    Bench,
    TransportResult,
    quiet_libraries,
    run,
    seconds_of,
)
from kvferry.cli.bench import show, transport_page
from kvferry.cli.console import Commands, Html, Json, libraries_to_stderr
from kvferry.cli.page import Page, TableSheet
from kvferry.units import parse_size, show_bytes

KIB = 1 << 10
# A turn takes either library about 50 ms, so that a carrier's own 0.5 ms are a hundredth of it.
PAIR_DESCRIPTORS = {"mooncake": 1 << 10, "nixl": 1 << 14}
PAIR_BYTES = {"mooncake": 64 << 20, "nixl": BUFFER_BYTES}
LEAST_PAIRS, MOST_PAIRS = 61, 101
# A carrier, how many times as fast as another mover it is to be, and from and to which size.
BESIDE = (
    ("local", 2.0, "raw-nixl", 4 * KIB, 64 * KIB),
    ("local", 5.0, "raw-mooncake", 4 * KIB, 16 * KIB),
    ("tcp", 3.0, "raw-mooncake", 256, 16 * KIB),
    ("tcp", 1.3, "raw-mooncake", 64 * KIB, 64 * KIB),
    ("tcp", 1.0, "raw-mooncake", 256 * KIB, 16 * KIB * KIB),
)
OF_THE_LIBRARY = 0.95
Timed = Callable[[], float]  # runs once, and returns the seconds
Rates = Mapping[tuple[str, str, int], float]  # by carrier, direction and bytes of a descriptor
app = Commands()


@dataclass(frozen=True, slots=True)
class PairedRow:
    carrier: str
    op: str
    descriptor_bytes: int
    pairs: int
    library_gb_s: float  # the median
    of_library: float  # median of the pairs' ratios; above 1 the carrier is faster
    lower_quartile: float
    upper_quartile: float


@dataclass(frozen=True, slots=True)
class SpeedTarget:
    text: str
    wanted: float
    found: float | None  # None: not measured in this run
    where: str  # the worst cell
    met: bool | None  # in all judged cells
    judged_bytes: tuple[int, ...] = ()  # judged sizes of descriptors
    left_out_bytes: tuple[int, ...] = ()  # other `SIZES` for which the target holds

    @property
    def verdict(self) -> str:
        if self.found is None:
            return "not measured"
        return "MISSED" if not self.met else "met in part" if self.left_out_bytes else "met"


@app.command()
def main(
    sizes: Annotated[str, typer.Option(help="Descriptor sizes, as 4096,64KB.")] = "",
    seconds: Annotated[float, typer.Option(help="Seconds for each size.", min=0)] = 1.0,
    as_json: Json = False,
    html: Html = None,
) -> None:
    """The carriers beside their libraries, and whether they are as fast as they are to be."""
    chosen = [parse_size(size) for size in sizes.split(",")] if sizes else SIZES
    with libraries_to_stderr():
        result = judged(run(chosen, seconds), chosen, seconds)
    show(result, page(result), as_json, html)


def judged(result: TransportResult, sizes: Sequence[int], seconds: float) -> TransportResult:
    """A result with its pairs and targets."""
    measured = {row.carrier for row in result.results}
    with quiet_libraries():
        bench = Bench(sizes, seconds)
        pairs = [r for name in PAIR_BYTES if name in measured for r in paired(bench, name)]
    rates = {(r.carrier, r.op, r.descriptor_bytes): r.gb_s for r in result.results}
    return replace(result, paired=tuple(pairs), targets=judge(rates, pairs))


def paired(bench: Bench, name: str) -> Iterator[PairedRow]:
    with bench.open(name) as mover:
        for size, op in itertools.product(bench.sizes, OPS):
            most = max(1, min(PAIR_DESCRIPTORS[name], PAIR_BYTES[name] // size))
            copies = bench.copies(op, size, most, mover.address)
            ours, theirs = mover.prepare(op, copies), mover.library(op, copies)
            ours()  # pages, connections, threads
            theirs()
            seconds, ratios = in_turns(
                partial(seconds_of, ours),
                partial(seconds_of, theirs),
                LEAST_PAIRS,
                MOST_PAIRS,
                bench.seconds,
            )
            low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
            rate = len(copies) * size / float(np.median(seconds)) / GB
            yield PairedRow(name, op, size, len(ratios), rate, middle, low, high)


def in_turns(
    ours: Timed, theirs: Timed, least: int, most: int = 0, seconds: float = 0.0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Their seconds, and a ratio for each turn of ours: the mean of their turns before and after
    it, over its own. There are at least `least` turns, and up to `most` while there is time."""
    mine: list[float] = []
    others = [theirs()]
    until = time.monotonic() + seconds
    while len(mine) < least or (len(mine) < most and time.monotonic() < until):
        mine.append(ours())
        others.append(theirs())
    found = np.array(others)
    return found, (found[1:] + found[:-1]) / 2 / np.array(mine)


def judge(rates: Rates, pairs: Sequence[PairedRow]) -> tuple[SpeedTarget, ...]:
    """Judge all targets by their worst cells."""
    found = []
    for carrier, times, than, first, last in BESIDE:
        cells = {
            (op, size): rate / rates[than, op, size]
            for (name, op, size), rate in rates.items()
            if name == carrier and first <= size <= last and (than, op, size) in rates
        }
        bounds = " to ".join(show_bytes(size) for size in dict.fromkeys((first, last)))
        text = f"{carrier} at least {times:g} x {than}, {bounds}"
        found.append(_target(text, times, cells, [s for s in SIZES if first <= s <= last]))
    for carrier in PAIR_BYTES:
        cells = {(r.op, r.descriptor_bytes): r.of_library for r in pairs if r.carrier == carrier}
        text = f"{carrier} at least {OF_THE_LIBRARY:.0%} of its library, same batches, same engine"
        found.append(_target(text, OF_THE_LIBRARY, cells, SIZES))
    return tuple(found)


def _target(
    text: str, wanted: float, cells: Mapping[tuple[str, int], float], sizes: Sequence[int]
) -> SpeedTarget:
    """`cells` has ratios by direction and size, `sizes` the sizes for which the target holds."""
    if not cells:
        return SpeedTarget(text, wanted, None, "", None, (), tuple(sizes))
    op, size = worst = min(cells, key=lambda cell: cells[cell])
    judged = tuple(sorted({size for _, size in cells}))
    left_out = tuple(size for size in sizes if size not in judged)
    met = cells[worst] >= wanted
    where = f"{op} {show_bytes(size)}"
    return SpeedTarget(text, wanted, cells[worst], where, met, judged, left_out)


def page(result: TransportResult) -> Page:
    """The page of `kvferry bench transport`, with the pairs and the targets."""
    rows = [
        [
            row.carrier,
            row.op,
            show_bytes(row.descriptor_bytes),
            str(row.pairs),
            f"{row.of_library:.2f}",
            f"{row.lower_quartile:.2f} to {row.upper_quartile:.2f}",
        ]
        for row in result.paired
    ]
    head = ["carrier", "op", "descriptor", "pairs", "median", "quartiles"]
    plain = transport_page(result)
    notes = [*plain.notes]
    for target in result.targets:
        line = f"{target.verdict:13}{target.text}"
        if target.found is not None:
            sizes = ", ".join(show_bytes(size) for size in target.judged_bytes)
            line += f": {target.found:.2f} at worst ({target.where}); judged at {sizes}"
        notes.append(line)
    sheets = [*plain.sheets, TableSheet("Of its library, on one engine", head, rows)]
    return replace(plain, sheets=sheets if rows else plain.sheets, notes=notes)


if __name__ == "__main__":
    app()
