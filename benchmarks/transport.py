# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.transport`: what `kvferry bench transport` measures, and a judgement of it.

`paired` is the overhead of the carriers `mooncake` and `nixl` over their libraries. Two engines of
one library in the same two processes can differ by a factor of two, depending on which threads
serve which connections. So the carrier, and its library called directly with the same batches, move
the same copies over the *same* engine in turns: library, carrier, library, ... The result is the
median of the turns' ratios, with their quartiles as the spread.

`targets` judges all carriers by their worst cells, a direction and a size each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import numpy as np
import typer

from benchmarks.measuring import in_turns
from benchmarks.report import Verdict, at_least, sheet
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
from kvferry.cli.page import Page
from kvferry.units import show_bytes

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


@app.command()
def main(
    seconds: Annotated[float, typer.Option(help="Seconds for each size.", min=0)] = 1.0,
    as_json: Json = False,
    html: Html = None,
) -> None:
    """The carriers beside their libraries, and whether they are as fast as they are to be."""
    with libraries_to_stderr():
        result = judged(run(SIZES, seconds), seconds)
    show(result, page(result), as_json, html)


def judged(result: TransportResult, seconds: float) -> TransportResult:
    """A result with its pairs and targets."""
    measured = {row.carrier for row in result.results}
    with quiet_libraries():
        bench = Bench(SIZES, seconds)
        pairs = [r for name in PAIR_BYTES if name in measured for r in paired(bench, name)]
    rates = {(r.carrier, r.op, r.descriptor_bytes): r.gb_s for r in result.results}
    return replace(result, paired=tuple(pairs), targets=tuple(judge(rates, pairs)))


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


def judge(rates: Rates, pairs: Sequence[PairedRow]) -> Iterator[Verdict]:
    """All targets whose cells were measured."""
    for carrier, times, than, first, last in BESIDE:
        cells = {
            (op, size): rate / rates[than, op, size]
            for (name, op, size), rate in rates.items()
            if name == carrier and first <= size <= last and (than, op, size) in rates
        }
        bounds = " to ".join(show_bytes(size) for size in dict.fromkeys((first, last)))
        if cells:
            yield _worst(f"{carrier}, of {than}, {bounds}", cells, times, "{:.2f} x")
    for carrier in PAIR_BYTES:
        cells = {(r.op, r.descriptor_bytes): r.of_library for r in pairs if r.carrier == carrier}
        if cells:
            bar = f"{carrier}, of its library, same batches, same engine"
            yield _worst(bar, cells, OF_THE_LIBRARY, "{:.0%}")


def _worst(bar: str, cells: Mapping[tuple[str, int], float], wanted: float, form: str) -> Verdict:
    """By the worst ratio; `cells` has them by direction and size."""
    op, size = worst = min(cells, key=lambda cell: cells[cell])
    met = sum(ratio >= wanted for ratio in cells.values())
    middle = form.format(float(np.median(list(cells.values()))))
    where = f" at worst ({op} {show_bytes(size)}); {met} of {len(cells)} cells, median {middle}"
    return at_least(bar, cells[worst], wanted, form, where)


def page(result: TransportResult) -> Page:
    """The page of `kvferry bench transport`, with the pairs and the targets."""
    plain = transport_page(result)
    notes = [*plain.notes, *map(str, result.targets)]
    if not result.paired:
        return replace(plain, notes=notes)
    columns = {
        "carrier": "{r.carrier}",
        "op": "{r.op}",
        "descriptor bytes": "{r.descriptor_bytes:,}",
        "pairs": "{r.pairs}",
        "median": "{r.of_library:.2f}",
        "quartiles": "{r.lower_quartile:.2f} to {r.upper_quartile:.2f}",
    }
    beside = sheet("Of its library, on one engine", result.paired, columns)
    return replace(plain, sheets=[*plain.sheets, beside], notes=notes)


if __name__ == "__main__":
    app()
