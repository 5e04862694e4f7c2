"""`kvferry bench pool`: hit rates on a trace, lookups, and bandwidth, each beside what there is.

One run, on one machine. What the project promises of the pool is judged at the end (`targets`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvferry.bench.pool_bandwidth import Bandwidth, Contender, bandwidths
from kvferry.bench.pool_beside_vllm import SchedulerShare, scheduler_share
from kvferry.bench.pool_lookups import Lookup, lookups
from kvferry.bench.pool_trace import CapacityResult, Trace, read_trace, replay, synthetic_trace

CAPACITIES = (500, 1000, 3000, 10_000, 30_000, 100_000)
QUICK_CAPACITIES = (1000, 3000)
INDEXED = 1_000_000
ROUNDS, QUICK_ROUNDS = 15, 3

# What must hold; see docs/pool.md.
SHORT_OF_ROOM = (1000, 3000)
OVER_LRU = 1.6  # where room is short
OF_MEMCPY = 0.70  # a load from memory, checksums verified
OF_DIRECT = 0.95  # Mooncake Store through our interface
SHARE_OF_SYNCHRONOUS = 1 / 20  # the scheduler's time for a lookup, of the in-tree connector's


@dataclass(frozen=True, slots=True)
class Verdict:
    """Something promised, and what was measured."""

    name: str
    wanted: str
    found: float
    met: bool


@dataclass(frozen=True, slots=True)
class PoolBench:
    trace: str
    requests: int
    hit_rates: tuple[CapacityResult, ...]
    lookup: Lookup
    lookup_beside: tuple[Lookup, ...]
    scheduler: SchedulerShare | None
    bandwidth: tuple[Bandwidth, ...]
    targets: tuple[Verdict, ...]
    notes: tuple[str, ...]


def run(trace_path: Path | None, say: Callable[[str], None], *, quick: bool = False) -> PoolBench:
    notes: list[str] = []
    if trace_path is None:
        trace: Trace = synthetic_trace(800 if quick else 3000)
        notes.append("no trace was given: hit rates are of synthetic conversations")
    else:
        trace = read_trace(trace_path)
    rates = []
    for capacity in QUICK_CAPACITIES if quick else CAPACITIES:
        say(f"replaying {len(trace.blocks):,} requests with room for {capacity:,} blocks")
        rates.append(replay(trace, capacity))
    indexed = INDEXED // 10 if quick else INDEXED
    say(f"lookups among {indexed:,} objects")
    lookup, beside = lookups(indexed)
    say("a lookup in the scheduler, beside vLLM's MooncakeStoreConnector")
    share = scheduler_share(notes)
    bandwidth, ratios = bandwidths(QUICK_ROUNDS if quick else ROUNDS, notes, say)
    return PoolBench(
        trace=trace_path.name if trace_path else "synthetic",
        requests=len(trace.blocks),
        hit_rates=tuple(rates),
        lookup=lookup,
        lookup_beside=tuple(beside),
        scheduler=share,
        bandwidth=tuple(bandwidth),
        targets=tuple(judge(rates, ratios, share)),
        notes=tuple(notes),
    )


def judge(
    rates: list[CapacityResult], ratios: dict[Contender, float], share: SchedulerShare | None
) -> list[Verdict]:
    over = {r.blocks: r.kvferry / r.lru for r in rates if r.lru}
    verdicts = [
        _at_least(f"hit rate over LRU's at {blocks:,} blocks", OVER_LRU, over[blocks])
        for blocks in SHORT_OF_ROOM
        if blocks in over
    ]
    if over:
        verdicts.append(_at_least("hit rate over LRU's, worst capacity", 1.0, min(over.values())))
    limits = {
        ("embedded", "load"): ("embedded load, of memcpy over the same scatter", OF_MEMCPY),
        ("mooncake", "save"): ("Mooncake save, of the direct client", OF_DIRECT),
        ("mooncake", "load"): ("Mooncake load, of the direct client", OF_DIRECT),
    }
    verdicts += [_at_least(*limits[pair], ratio) for pair, ratio in ratios.items()]
    if share is not None:
        name = "scheduler's share of a lookup, of the in-tree connector's"
        wanted, found = SHARE_OF_SYNCHRONOUS, share.ratio
        verdicts.append(Verdict(name, f"<= {wanted:g}", round(found, 4), found <= wanted))
    return verdicts


def _at_least(name: str, wanted: float, found: float) -> Verdict:
    return Verdict(name, f">= {wanted:g}", round(found, 4), found >= wanted)
