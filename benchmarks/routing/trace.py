# SPDX-License-Identifier: Apache-2.0
"""Policies on one trace: `kvferry simulate`'s results as ratios, and the bars to meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvferry.simulate.engine import MEASURED, read_rates
from kvferry.simulate.run import FleetShape, Plan, Policy, simulate
from kvferry.simulate.trace import read_trace

NAMES: tuple[Policy, ...] = ("cost", "round-robin", "least-loaded", "prefix-hash")


@dataclass(frozen=True, slots=True)
class Comparison:
    """All policies at one load."""

    speed: float  # times the trace's own load
    hit_rate: dict[Policy, float]
    p90_seconds: dict[Policy, float]  # first token

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {bar.what: bar.ratio(self) for bar in BARS}


@dataclass(frozen=True, slots=True)
class Bar:
    what: str
    asked: str
    ratio: Callable[[Comparison], float]
    met: Callable[[float], bool]


def _hits(other: Policy) -> Callable[[Comparison], float]:
    return lambda c: c.hit_rate["cost"] / c.hit_rate[other]


def _p90(other: Policy) -> Callable[[Comparison], float]:
    return lambda c: c.p90_seconds["cost"] / c.p90_seconds[other]


BARS = (
    Bar("hit rate over round robin's", ">= 1.5", _hits("round-robin"), lambda x: x >= 1.5),
    Bar("first token p90 over round robin's", "<= 0.5", _p90("round-robin"), lambda x: x <= 0.5),
    Bar("hit rate over prefix hash's", "> 1", _hits("prefix-hash"), lambda x: x > 1),
    Bar("first token p90 over prefix hash's", "< 1", _p90("prefix-hash"), lambda x: x < 1),
)


def compare(file: Path, engines: str, speeds: Sequence[float]) -> list[Comparison]:
    """Raises DescriptionError if the trace or the engines cannot be read."""
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
