# SPDX-License-Identifier: Apache-2.0
"""Policies on one trace: `kvferry simulate`'s results as ratios, and the bars to meet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Shown, Verdict, at_least, at_most
from kvferry.cli.page import TableSheet
from kvferry.simulate.engine import MEASURED, read_rates
from kvferry.simulate.run import FleetShape, Plan, Policy, simulate
from kvferry.simulate.trace import read_trace

NAMES: tuple[Policy, ...] = ("cost", "round-robin", "least-loaded", "prefix-hash")
# Of `cost`, over another policy: the least hit rate, and the most time to the first token.
BARS: tuple[tuple[Policy, str, float, float], ...] = (
    ("round-robin", "round robin's", 1.5, 0.5),
    ("prefix-hash", "prefix hash's", 1.0, 1.0),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All policies at one load."""

    speed: float  # times the trace's own load
    hit_rate: dict[Policy, float]
    p90_seconds: dict[Policy, float]  # first token

    def hits_over(self, other: Policy) -> float:
        return self.hit_rate["cost"] / self.hit_rate[other]

    def p90_over(self, other: Policy) -> float:
        return self.p90_seconds["cost"] / self.p90_seconds[other]


def compare(file: Path, speeds: Sequence[float], engines: str = "8") -> list[Comparison]:
    """Raises DescriptionError if the trace cannot be read."""
    rates, shape, whole = read_rates(MEASURED), FleetShape.read(engines), read_trace(file)
    found = []
    for speed in speeds:
        faster = whole.faster(speed)
        results = {name: simulate(faster, Plan(name, shape, rates)) for name in NAMES}
        found.append(
            Comparison(
                speed,
                {name: result.hit_rate for name, result in results.items()},
                {name: result.first_token.p90 for name, result in results.items()},
            )
        )
    return found


def verdicts(found: Sequence[Comparison]) -> Iterator[Verdict]:
    for other, whose, least_hits, most_time in BARS:
        for each in found:
            bar = f"hit rate over {whose}, at load {each.speed:g}"
            yield at_least(bar, each.hits_over(other), least_hits, "{:.2f}")
        for each in found:
            bar = f"first token p90 over {whose}, at load {each.speed:g}"
            yield at_most(bar, each.p90_over(other), most_time, "{:.2f}")


def as_json(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    told = []
    for each in found:
        ratios = {}
        for other, whose, *_ in BARS:
            ratios[f"hit rate over {whose}"] = each.hits_over(other)
            ratios[f"first token p90 over {whose}"] = each.p90_over(other)
        told.append(asdict(each) | ratios)
    return told


def tables(found: Sequence[Comparison]) -> Shown:
    head = ["load", *(f"hit %: {n}" for n in NAMES), *(f"p90 s: {n}" for n in NAMES)]
    rows = [
        [
            f"{each.speed:g}",
            *(f"{each.hit_rate[name] * 100:.1f}" for name in NAMES),
            *(f"{each.p90_seconds[name]:.2f}" for name in NAMES),
        ]
        for each in found
    ]
    return [TableSheet("Policies", head, rows)], list(verdicts(found))
