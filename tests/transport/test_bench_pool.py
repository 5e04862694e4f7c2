"""The pool benchmark runs, loads the bytes that it saved, and says what it promises to say."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from kvferry.bench import pool
from kvferry.bench.pool_trace import replay, synthetic_trace
from kvferry.cli.bench_pool import pool_bench_page


def test_a_short_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "BATCH_OBJECTS", 16)
    monkeypatch.setattr(pool, "LOOKUPS", 50)
    monkeypatch.setattr(pool, "_mooncake", lambda *_: {})  # tests/vllm has it
    lookup, beside = pool.lookups(20_000)
    assert lookup.per_second > 0 and lookup.p50_us <= lookup.p99_us
    assert all(one.per_second > 0 for one in beside)
    rows = {(b.store, b.op): b for b in pool.bandwidths(1, [])}
    assert set(rows) >= {
        ("memcpy", "load"),
        *((s, op) for s in ("embedded", "embedded disk", "file") for op in ("save", "load")),
    }
    assert all(row.gb_s > 0 for row in rows.values())
    trace = synthetic_trace(120)
    result = pool.PoolBench(
        trace="synthetic",
        requests=120,
        hit_rates=tuple(replay(trace, blocks) for blocks in (64, 5000)),
        lookup=lookup,
        lookup_beside=tuple(beside),
        bandwidth=tuple(rows.values()),
        notes=("a < b",),
    )
    first = json.loads(json.dumps(asdict(result)))["hit_rates"][0]
    assert {"blocks", "kvferry", "lru", "optimum", "kvferry_halves"} <= set(first)
    page = pool_bench_page(result)
    assert "<svg" in page and "a &lt; b" in page and "http" not in page
