"""What the carriers should reach beside the libraries, and whether a run of the benchmark shows it.

The first kind compares the best rates of two movers at each size and direction; the second kind the
medians of turns (paired.py). A target's figure is its worst cell; a run that leaves out some of its
sizes says which it judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvferry.bench.paired import PairedRow
from kvferry.units import show_bytes

KIB = 1 << 10
SIZES = tuple(256 << (2 * step) for step in range(9))  # of descriptors: 256 B to 16 MiB


@dataclass(frozen=True, slots=True)
class Target:
    text: str
    wanted: float
    found: float | None  # None: not measured in this run
    where: str  # the worst cell
    met: bool | None  # in all cells that were judged
    judged_bytes: tuple[int, ...] = ()  # sizes of descriptors
    left_out_bytes: tuple[int, ...] = ()  # of `SIZES`, where the target holds too


@dataclass(frozen=True, slots=True)
class _Wanted:
    carrier: str
    times: float
    than: str
    at_least: int  # bytes of a descriptor
    at_most: int

    @property
    def text(self) -> str:
        sizes = f"{show_bytes(self.at_least)} to {show_bytes(self.at_most)}"
        if self.at_least == self.at_most:
            sizes = show_bytes(self.at_least)
        return f"{self.carrier} at least {self.times:g} x {self.than}, {sizes}"


BESIDE = (
    _Wanted("local", 2.0, "raw-nixl", 4 * KIB, 64 * KIB),
    _Wanted("local", 5.0, "raw-mooncake", 4 * KIB, 16 * KIB),
    _Wanted("tcp", 3.0, "raw-mooncake", 256, 16 * KIB),
    _Wanted("tcp", 1.3, "raw-mooncake", 64 * KIB, 64 * KIB),
    _Wanted("tcp", 1.0, "raw-mooncake", 256 * KIB, 16 * KIB * KIB),
)
OF_THE_LIBRARY = 0.95

Cell = tuple[str, int]  # direction, bytes of a descriptor


def judge(
    rates: Mapping[tuple[str, str, int], float], pairs: Sequence[PairedRow]
) -> tuple[Target, ...]:
    """`rates`: by carrier, direction and size."""
    found = []
    for want in BESIDE:
        cells = {
            (op, size): rate / rates[want.than, op, size]
            for (name, op, size), rate in rates.items()
            if name == want.carrier
            and want.at_least <= size <= want.at_most
            and (want.than, op, size) in rates
        }
        sizes = [size for size in SIZES if want.at_least <= size <= want.at_most]
        found.append(_target(want.text, want.times, cells, sizes))
    for name in ("mooncake", "nixl"):
        text = f"{name} at least {OF_THE_LIBRARY:.0%} of its library, same batches, same engine"
        cells = {
            (row.op, row.descriptor_bytes): row.of_library for row in pairs if row.carrier == name
        }
        found.append(_target(text, OF_THE_LIBRARY, cells, SIZES))
    return tuple(found)


def _target(text: str, wanted: float, cells: Mapping[Cell, float], sizes: Sequence[int]) -> Target:
    if not cells:
        return Target(text, wanted, None, "", None, (), tuple(sizes))
    worst = min(cells, key=lambda cell: cells[cell])
    judged = tuple(sorted({size for _, size in cells}))
    left_out = tuple(size for size in sizes if size not in judged)
    met = cells[worst] >= wanted
    return Target(text, wanted, cells[worst], _show(worst), met, judged, left_out)


def _show(cell: Cell) -> str:
    return f"{cell[0]} {show_bytes(cell[1])}"


def lines(targets: Sequence[Target]) -> Iterator[str]:
    if targets:
        yield ""
    for target in targets:
        if target.found is None:
            yield f"{'not measured':13}{target.text}"
            continue
        verdict = "MISSED" if not target.met else "met in part" if target.left_out_bytes else "met"
        at = ", ".join(show_bytes(size) for size in target.judged_bytes)
        yield (
            f"{verdict:13}{target.text}: {target.found:.2f} at worst ({target.where}); "
            f"judged at {at}"
        )
