# SPDX-License-Identifier: Apache-2.0
"""Policies on one trace: `kvferry simulate`'s results as ratios, and the bars that they must meet.

`prefix-hash` gets the number of blocks that suits it best at each load, so that `cost` is compared
with the best that a hash can do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvferry.simulate.engine import MEASURED, read_rates
from kvferry.simulate.run import FleetShape, Plan, Policy, Result, simulate
from kvferry.simulate.trace import read_trace

NAMES: tuple[Policy, ...] = ("cost", "round-robin", "least-loaded", "prefix-hash")
HASH_BLOCKS = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All policies at one load."""

    speed: float  # times the trace's own load
    hit_rate: dict[Policy, float]
    p90_seconds: dict[Policy, float]  # first token
    hash_blocks: int  # that gave prefix-hash its best p90

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

        def run(policy: Policy, hash_blocks: int = 2) -> Result:
            return simulate(faster, Plan(policy, shape, rates, hash_blocks=hash_blocks))  # noqa: B023

        results: dict[Policy, Result] = {name: run(name) for name in NAMES[:-1]}
        hashed = {blocks: run("prefix-hash", blocks) for blocks in HASH_BLOCKS}
        best = min(hashed, key=lambda blocks: hashed[blocks].first_token.p90)
        results["prefix-hash"] = hashed[best]
        found.append(
            Comparison(
                speed,
                {name: result.hit_rate for name, result in results.items()},
                {name: result.first_token.p90 for name, result in results.items()},
                best,
            )
        )
    return found
