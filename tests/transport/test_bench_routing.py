# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.routing` with little to do: real processes, and a small trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.routing.overhead import ALONE, Load, measure
from benchmarks.routing.trace import NAMES, as_json, compare, tables, verdicts


def test_the_engines_own_time_is_told_from_the_routers() -> None:
    load = Load(per_second=20, seconds=0.5, rounds=1, tokens=64, delay_ms=30.0, events=3)
    results = {each.case: each for each in measure(load)}
    alone = results.pop(ALONE)
    assert alone.p50_ms >= 30.0 and alone.router_ms == alone.added_p50_ms == 0.0
    assert len(results) == 4
    for each in results.values():
        assert each.requests == 10
        assert each.added_p50_ms == pytest.approx(each.p50_ms - alone.p50_ms)
        # The system counts processor time in ticks of 10 ms.
        assert each.router_ms >= 0.0 and 30.0 <= each.p50_ms <= each.p99_ms
    assert sum(each.router_ms for each in results.values()) > 0.0


def test_ratios_are_those_of_the_policies(tmp_path: Path) -> None:
    """Three conversations that take turns on two engines: round robin swaps them, cost does not."""
    lines = [
        {
            "timestamp": 4000 * turn + 1000 * who,
            "input_length": 512 * (turn + 1),
            "output_length": 4,
            "hash_ids": [1000 * who + block for block in range(turn + 1)],
        }
        for turn in range(8)
        for who in (0, 1, 2)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = compare(file, [1.0], "2")
    assert set(found.hit_rate) == set(found.p90_seconds) == set(NAMES)
    assert found.hit_rate["cost"] > found.hit_rate["round-robin"] > 0
    (told,) = as_json([found])
    ratio = found.hit_rate["cost"] / found.hit_rate["round-robin"]
    assert told["hit rate over round robin's"] == ratio
    hits, p90, *_ = verdicts([found])
    assert hits.met == (ratio >= 1.5) and hits.found == f"{ratio:.2f}"
    assert told["first token p90 over round robin's"] < 1 and p90.wanted == "at most 0.50"
    sheets, lines = tables([found])
    assert len(sheets[0].rows) == 1 and len(lines) == 4
