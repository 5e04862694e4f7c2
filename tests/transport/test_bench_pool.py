"""The pool benchmark runs, loads the bytes that it saved, and says what it promises to say."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import eviction, pool, stores
from benchmarks.eviction import (
    OTHERS,
    replay,
    replay_lru,
    replay_optimum,
    replay_rules,
    replay_store,
    synthetic_trace,
)
from benchmarks.scheduler_lookup import SchedulerShare


def test_a_short_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "BATCH_OBJECTS", 16)
    monkeypatch.setattr(stores, "LOOKUPS", 50)
    monkeypatch.setattr(stores, "_mooncake", lambda *_: {})  # tests/vllm has it
    lookup, beside = stores.lookups(20_000)
    assert lookup.per_second > 0 and lookup.p50_us <= lookup.p99_us
    assert all(one.per_second > 0 for one in beside)
    bandwidth, ratios = stores.bandwidths(1, [])
    rows = {(b.store, b.op): b for b in bandwidth}
    assert set(rows) >= {
        ("memcpy", "load"),
        *((s, op) for s in ("embedded", "embedded disk") for op in ("save", "load")),
    }
    assert all(row.gb_s > 0 for row in rows.values())
    assert set(ratios) == {("embedded", "load")}
    trace = synthetic_trace(120)
    rates = [replay(trace, blocks) for blocks in (64, 5000)]
    share = SchedulerShare(8192, 512, 100.0, 2000.0, 1000.0, 0.1)
    result = pool.PoolBench(
        trace="synthetic",
        requests=120,
        hit_rates=tuple(rates),
        lookup=lookup,
        lookup_beside=tuple(beside),
        scheduler=share,
        bandwidth=tuple(bandwidth),
        targets=tuple(pool.judge(rates, ratios, share)),
        notes=(),
    )
    told = json.loads(json.dumps(asdict(result)))
    assert {"blocks", "kvferry", "lru", "optimum", "kvferry_halves"} <= set(told["hit_rates"][0])
    assert {"per_second", "p50_us", "p99_us"} <= set(told["lookup"])
    assert {"store", "op", "gb_s"} <= set(told["bandwidth"][0])
    verdicts = {one["bar"]: one["met"] for one in told["targets"]}
    assert verdicts["scheduler's share of a lookup, of the in-tree connector's"] is False
    sheets = list(pool.pool_sheets(result))
    assert [len(sheet.rows) for sheet in sheets] == [2, 1 + len(beside), 2, len(rows)]


def test_targets_can_be_missed() -> None:
    rates = [replay(synthetic_trace(120), 1000)]
    good = pool.judge(rates, {("embedded", "load"): 0.70, ("mooncake", "save"): 0.95}, None)
    bad = pool.judge(rates, {("embedded", "load"): 0.69, ("mooncake", "save"): 0.94}, None)
    assert [one.met for one in good][-2:] == [True, True]
    assert [one.met for one in bad][-2:] == [False, False]


def test_policies_that_were_not_taken() -> None:
    """All of them replay: none beats the optimum, all hit everything where there is room."""
    trace = synthetic_trace(300)
    best, everything = replay_optimum(trace, 150).whole, replay_lru(trace, 20_000)
    for run in (*OTHERS.values(), replay_rules):
        assert 0 < run(trace, 150).whole <= best
        assert run(trace, 20_000) == everything


@pytest.mark.parametrize("capacity", [40, 150, 5000])
def test_the_model_decides_like_the_store(capacity: int) -> None:
    trace = synthetic_trace(300)
    modelled, stored = replay_rules(trace, capacity), replay_store(trace, capacity)
    assert modelled.whole == pytest.approx(stored.whole, abs=0.005)


def test_tuning_sees_the_first_half_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same choice whatever comes after the first half."""
    trace = synthetic_trace(240)
    half, end = trace.half, trace.seconds[-1]

    def write(name: str, blocks: list[list[int]]) -> Path:
        lines = [
            json.dumps({"timestamp": s * 1000, "hash_ids": b})
            for s, b in zip(trace.seconds, blocks, strict=True)
        ]
        (tmp_path / name).write_text("\n".join(lines))
        return tmp_path / name

    monkeypatch.setattr(eviction, "GRID", {"turn_classes": (1, 8), "fade_s": (15, 240)})
    monkeypatch.setattr(eviction, "CAPACITIES", (100, 2000))
    same = write("same", trace.blocks)
    other = write("other", [*trace.blocks[:half], *([[1, 2, 3]] * (len(trace.blocks) - half))])
    assert end > 0
    first, second = (eviction.tune(path, lambda _: None) for path in (same, other))
    assert (first.chosen, first.candidates) == (second.chosen, second.candidates)
    assert first.policies != second.policies
    assert {one.constant for one in first.candidates} == {"turn_classes", "fade_s"}
    assert sum(one.taken for one in first.candidates) >= 2


def test_tuning_needs_a_trace() -> None:
    result = CliRunner().invoke(pool.app, ["--tune"])
    assert result.exit_code == 2 and "--tune needs a trace" in result.output
