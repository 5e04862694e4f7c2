# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.pool`: hit rates on a trace, lookups, and bandwidth, beside other ways.

One run, on one machine. `targets` judges what the project promises of the pool. `--tune` chooses
the eviction policy's constants instead (eviction.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import eviction
from benchmarks.eviction import CapacityResult, TuneResult, read_trace, replay, synthetic_trace
from benchmarks.report import Verdict, at_least, at_most, sheet, tell
from benchmarks.scheduler_lookup import SchedulerShare, scheduler_share
from benchmarks.stores import Bandwidth, Contender, Lookup, bandwidths, lookups
from kvferry.cli.console import Commands, Json, libraries_to_stderr, refusals, say
from kvferry.cli.page import TableSheet
from kvferry.errors import DescriptionError

CAPACITIES = (500, 1000, 3000, 10_000, 30_000, 100_000)
QUICK_CAPACITIES = (1000, 3000)
INDEXED = 1_000_000
ROUNDS, QUICK_ROUNDS = 15, 3
# What must hold; see docs/benchmarks.md.
SHORT_OF_ROOM = (1000, 3000)
OVER_LRU = 1.6  # where room is short
OF_ANOTHER = {
    ("embedded", "load"): ("embedded load, of memcpy over the same scatter", 0.70),
    ("mooncake", "save"): ("Mooncake save, of the direct client", 0.95),
    ("mooncake", "load"): ("Mooncake load, of the direct client", 0.95),
}
SHARE_OF_SYNCHRONOUS = 1 / 20  # the scheduler's time for a lookup, of the in-tree connector's
FORM = "{:.4g}"
app = Commands()


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


@app.command()
def main(
    trace: Annotated[
        Path | None, typer.Option(help="JSON lines with timestamp and hash_ids (prefix blocks).")
    ] = None,
    as_json: Json = False,
    quick: Annotated[bool, typer.Option(help="Fewer capacities and repeats.")] = False,
    tune: Annotated[
        bool, typer.Option(help="Choose the eviction policy's constants on the first half instead.")
    ] = False,
) -> None:
    """Hit rates, lookups and bandwidth of the pool's stores, beside LRU, memcpy, LMDB, Mooncake."""
    if tune:
        with refusals():
            if trace is None:
                raise DescriptionError("--tune needs a trace; name one with --trace")
            tuned = eviction.tune(trace, say)
        tell(asdict(tuned), as_json, list(tune_sheets(tuned)), ())
        return
    with refusals(), libraries_to_stderr():
        result = run(trace, quick=quick)
    tell(asdict(result), as_json, list(pool_sheets(result)), (*result.targets, *result.notes))


def run(trace_path: Path | None, *, quick: bool = False) -> PoolBench:
    notes: list[str] = []
    if trace_path is None:
        trace = synthetic_trace(800 if quick else 3000)
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
) -> Iterator[Verdict]:
    over = {r.blocks: r.over_lru for r in rates if r.lru}
    for blocks in SHORT_OF_ROOM:
        if blocks in over:
            bar = f"hit rate over LRU's at {blocks:,} blocks"
            yield at_least(bar, over[blocks], OVER_LRU, FORM)
    if over:
        yield at_least("hit rate over LRU's, worst capacity", min(over.values()), 1.0, FORM)
    for pair, ratio in ratios.items():
        bar, wanted = OF_ANOTHER[pair]
        yield at_least(bar, ratio, wanted, FORM)
    if share is not None:
        bar = "scheduler's share of a lookup, of the in-tree connector's"
        yield at_most(bar, share.ratio, SHARE_OF_SYNCHRONOUS, FORM)


def pool_sheets(result: PoolBench) -> Iterator[TableSheet]:
    yield sheet(
        f"Prefix hit rate, {result.requests:,} requests ({result.trace}); in brackets: its halves",
        result.hit_rates,
        {
            "blocks": "{r.blocks:,}",
            "kvferry": "{r.kvferry:.3f} ({r.kvferry_halves[0]:.3f}, {r.kvferry_halves[1]:.3f})",
            "LRU": "{r.lru:.3f} ({r.lru_halves[0]:.3f}, {r.lru_halves[1]:.3f})",
            "ratio": "{r.over_lru:.2f} x",
            "optimum": "{r.optimum:.3f}",
        },
    )
    yield sheet(
        f"Lookups of {result.lookup.keys_per_lookup} keys",
        (result.lookup, *result.lookup_beside),
        {
            "index": "{r.store}",
            "objects": "{r.indexed:,}",
            "keys a second": "{r.per_second:,.0f}",
            "p50 µs": "{r.p50_us:.0f}",
            "p99 µs": "{r.p99_us:.0f}",
        },
    )
    if (share := result.scheduler) is not None:
        yield TableSheet(
            f"One lookup of {share.tokens:,} tokens ({share.keys} keys) in Mooncake Store, µs",
            ["connector", "scheduler's thread", "answer after"],
            [
                ["kvferry", f"{share.kvferry_us:.0f}", f"{share.answer_us:.0f}"],
                ["vLLM's MooncakeStoreConnector", *[f"{share.vllm_us:.0f}"] * 2],
            ],
        )
    rates = {"": "{r.store} {r.op}", "GB/s": "{r.gb_s:.2f}", "of memcpy": "{r.of_memcpy:.0%}"}
    yield sheet("Bandwidth", result.bandwidth, rates)


def tune_sheets(result: TuneResult) -> Iterator[TableSheet]:
    at = " / ".join(f"{blocks:,}" for blocks in result.capacities)
    yield TableSheet(
        f"First half, {result.first_half_requests:,} requests, at {at} blocks "
        f"(LRU {_rates(result.lru)})",
        ["sweep", "constant", "value", "hit rate", "mean ratio", "worst", ""],
        [
            [
                f"{one.sweep}",
                one.constant,
                f"{one.value:g}",
                _rates(one.hit_rates),
                f"{one.mean_ratio:.4f}",
                f"{one.worst_ratio:.4f}",
                "taken" if one.taken else "",
            ]
            for one in result.candidates
        ],
    )
    yield TableSheet(
        "Constants",
        ["", "first half's choice", "in use"],
        [[name, f"{x:g}", f"{result.shipped[name]:g}"] for name, x in result.chosen.items()],
    )
    yield TableSheet(
        f"Policies with that choice, at {at} blocks",
        ["policy", "first half", "second half", "whole"],
        [[p.name, _rates(p.first), _rates(p.second), _rates(p.whole)] for p in result.policies],
    )


def _rates(values: tuple[float, ...]) -> str:
    return " / ".join(f"{value:.3f}" for value in values)


if __name__ == "__main__":
    app()
