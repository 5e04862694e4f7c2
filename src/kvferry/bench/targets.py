"""What the carriers should reach beside the libraries, and whether a run of the benchmark shows it.

The first kind compares the best rates of two movers at each size and direction; the second kind the
medians of turns (paired.py), in the mode that the carrier chooses. A target's figure is its worst
cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvferry.bench.paired import PairedRow
from kvferry.units import show_bytes

KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class Target:
    text: str
    wanted: float
    found: float | None  # None: not measured in this run
    where: str  # the worst cell
    met: bool | None


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


def judge(
    rates: Mapping[tuple[str, str, int], float], pairs: Sequence[PairedRow]
) -> tuple[Target, ...]:
    """`rates`: by carrier, direction and size."""
    found = []
    for want in BESIDE:
        cells = {
            f"{op} {show_bytes(size)}": rate / rates[want.than, op, size]
            for (name, op, size), rate in rates.items()
            if name == want.carrier
            and want.at_least <= size <= want.at_most
            and (want.than, op, size) in rates
        }
        found.append(_target(want.text, want.times, cells))
    for name in ("mooncake", "nixl"):
        text = f"{name} at least {OF_THE_LIBRARY:.0%} of its library, same copies, same engine"
        # as the carrier comes: where there are both, it packs
        rows = sorted((row for row in pairs if row.carrier == name), key=lambda row: row.mode)
        cells = {f"{row.op} {show_bytes(row.descriptor_bytes)}": row.of_library for row in rows}
        found.append(_target(text, OF_THE_LIBRARY, cells))
    return tuple(found)


def _target(text: str, wanted: float, cells: Mapping[str, float]) -> Target:
    if not cells:
        return Target(text, wanted, None, "", None)
    where = min(cells, key=lambda cell: cells[cell])
    return Target(text, wanted, cells[where], where, cells[where] >= wanted)


def lines(targets: Sequence[Target]) -> Iterator[str]:
    if targets:
        yield ""
    for target in targets:
        verdict = {True: "met", False: "MISSED", None: "not measured"}[target.met]
        worst = f": {target.found:.2f} at worst ({target.where})" if target.found else ""
        yield f"{verdict:13}{target.text}{worst}"
