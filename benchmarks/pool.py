# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.pool`: hit rates on a trace, lookups, and bandwidth, beside other ways.

One run, on one machine. `targets` judges what the project promises of the pool. `--tune` chooses
the eviction policy's constants instead (eviction.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import eviction
from benchmarks.eviction import (
    CapacityResult,
    Trace,
    TuneResult,
    read_trace,
    replay,
    synthetic_trace,
)
from benchmarks.scheduler_lookup import SchedulerShare, scheduler_share
from benchmarks.stores import Bandwidth, Contender, Lookup, bandwidths, lookups
from kvferry.cli.console import (
    Commands,
    Html,
    Json,
    keep_page,
    libraries_to_stderr,
    print_json,
    refusals,
    say,
)
from kvferry.cli.page import Page, TableSheet, print_sheets
from kvferry.errors import DescriptionError

CAPACITIES = (500, 1000, 3000, 10_000, 30_000, 100_000)
QUICK_CAPACITIES = (1000, 3000)
INDEXED = 1_000_000
ROUNDS, QUICK_ROUNDS = 15, 3
# What must hold; see docs/benchmarks.md.
SHORT_OF_ROOM = (1000, 3000)
OVER_LRU = 1.6  # where room is short
OF_MEMCPY = 0.70  # a load from memory, checksums verified
OF_DIRECT = 0.95  # Mooncake Store through our interface
SHARE_OF_SYNCHRONOUS = 1 / 20  # the scheduler's time for a lookup, of the in-tree connector's
WIDTH, HEIGHT, MARGIN = 680, 400, 56
CURVES = (
    ("optimum_leaf_first", "offline optimum", "#999999"),
    ("kvferry", "kvferry", "#0072b2"),
    ("lru", "LRU", "#d55e00"),
)
app = Commands()


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


@app.command()
def main(
    trace: Annotated[
        Path | None, typer.Option(help="JSON lines with timestamp and hash_ids (prefix blocks).")
    ] = None,
    as_json: Json = False,
    html: Html = None,
    quick: Annotated[bool, typer.Option(help="Fewer capacities and repeats.")] = False,
    tune: Annotated[
        bool, typer.Option(help="Choose the eviction policy's constants on the first half instead.")
    ] = False,
) -> None:
    """Hit rates, lookups and bandwidth of the pool's stores, beside LRU, memcpy, LMDB, Mooncake."""
    if tune:
        with refusals():
            if quick or html is not None:
                raise DescriptionError("--tune takes no --quick and no --html; leave them out")
            if trace is None:
                raise DescriptionError("--tune needs a trace; name one with --trace")
            tuned = eviction.tune(trace, say)
        if as_json:
            print_json(asdict(tuned))
        else:
            print_sheets(_tune_sheets(tuned))
        return
    with refusals(), libraries_to_stderr():
        result = run(trace, say, quick=quick)
    if as_json:
        print_json(asdict(result))
    else:
        pool_page(result).print()
    if html is not None:
        keep_page(html, pool_page(result).html(), "plot")


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


def _sheets(result: PoolBench) -> list[TableSheet]:
    def pair(values: tuple[float, float]) -> str:
        return " / ".join(f"{value:.3f}" for value in values)

    hits = [
        [
            f"{r.blocks:,}",
            f"{r.kvferry:.3f}",
            f"{r.lru:.3f}",
            f"{r.kvferry / r.lru:.2f} x" if r.lru else "-",
            f"{r.optimum:.3f}",
            f"{r.optimum_leaf_first:.3f}",
            pair(r.kvferry_halves),
            pair(r.lru_halves),
        ]
        for r in result.hit_rates
    ]
    lookups = [
        [
            one.store,
            f"{one.indexed:,}",
            f"{one.per_second:,.0f}",
            f"{one.p50_us:.0f}",
            f"{one.p99_us:.0f}",
        ]
        for one in (result.lookup, *result.lookup_beside)
    ]
    rates = [[b.store, b.op, f"{b.gb_s:.2f}", f"{b.of_memcpy:.0%}"] for b in result.bandwidth]
    return [
        TableSheet(
            f"Prefix hit rate, {result.requests:,} requests ({result.trace})",
            [
                "blocks",
                "kvferry",
                "LRU",
                "ratio",
                "optimum",
                "leaf first",
                "halves",
                "LRU's halves",
            ],
            hits,
        ),
        TableSheet(
            f"Lookups of {result.lookup.keys_per_lookup} keys",
            ["index", "objects", "keys a second", "p50 µs", "p99 µs"],
            lookups,
        ),
        *_scheduler(result),
        TableSheet("Bandwidth", ["store", "", "GB/s", "of memcpy"], rates),
        TableSheet(
            "Targets",
            ["what", "wanted", "found", ""],
            [
                [one.name, one.wanted, f"{one.found:.3g}", "met" if one.met else "MISSED"]
                for one in result.targets
            ],
        ),
    ]


def _scheduler(result: PoolBench) -> list[TableSheet]:
    share = result.scheduler
    if share is None:
        return []
    rows = [
        ["kvferry", f"{share.kvferry_us:.0f}", f"{share.answer_us:.0f}", f"{share.delay_us:.0f}"],
        ["vLLM's MooncakeStoreConnector", f"{share.vllm_us:.0f}", f"{share.vllm_us:.0f}", "-"],
    ]
    return [
        TableSheet(
            f"One lookup of {share.tokens:,} tokens ({share.keys} keys) in Mooncake Store, µs",
            ["connector", "scheduler's thread", "answer after", "delay of steps"],
            rows,
        )
    ]


def _tune_sheets(result: TuneResult) -> list[TableSheet]:
    def shown(rates: tuple[float, ...]) -> str:
        return " / ".join(f"{rate:.3f}" for rate in rates)

    at = " / ".join(f"{blocks:,}" for blocks in result.capacities)
    grid = [
        [
            str(one.sweep),
            one.constant,
            f"{one.value:g}",
            shown(one.hit_rates),
            f"{one.mean_ratio:.4f}",
            f"{one.worst_ratio:.4f}",
            "taken" if one.taken else "",
        ]
        for one in result.candidates
    ]
    constants = [
        [name, f"{value:g}", f"{result.shipped[name]:g}"] for name, value in result.chosen.items()
    ]
    policies = [[p.name, shown(p.first), shown(p.second), shown(p.whole)] for p in result.policies]
    return [
        TableSheet(
            f"First half, {result.first_half_requests:,} requests, at {at} blocks "
            f"(LRU {shown(result.lru)})",
            ["sweep", "constant", "value", "hit rate", "mean ratio", "worst", ""],
            grid,
        ),
        TableSheet("Constants", ["", "first half's choice", "in use"], constants),
        TableSheet(
            f"Policies with that choice, at {at} blocks",
            ["policy", "first half", "second half", "whole"],
            policies,
        ),
    ]


def pool_page(result: PoolBench) -> Page:
    return Page(
        "benchmarks.pool",
        "The pool",
        "One run, on one machine.",
        _sheets(result),
        result.notes,
        [("Prefix hit rate by capacity", _curve(result))],
    )


def _curve(result: PoolBench) -> str:
    """Hit rate over capacity, the capacity on a logarithmic axis."""
    blocks = [r.blocks for r in result.hit_rates]
    low, high = math.log10(min(blocks)), math.log10(max(blocks))
    top = max(max(r.optimum_leaf_first, r.kvferry) for r in result.hit_rates) * 1.05 or 1.0

    def x(value: float) -> float:
        return MARGIN + (math.log10(value) - low) / ((high - low) or 1) * (WIDTH - 2 * MARGIN)

    def y(value: float) -> float:
        return HEIGHT - MARGIN - value / top * (HEIGHT - 2 * MARGIN)

    parts = [
        f'<text x="{x(b):.0f}" y="{HEIGHT - MARGIN + 20}" text-anchor="middle">{b:,}</text>'
        for b in blocks
    ]
    for step in range(int(top * 20) + 1):
        rate = step / 20
        parts.append(
            f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y(rate):.0f}" y2="{y(rate):.0f}" '
            'stroke="currentColor" stroke-opacity=".15"/>'
            f'<text x="{MARGIN - 8}" y="{y(rate) + 4:.0f}" text-anchor="end">{rate:.2f}</text>'
        )
    for index, (field, name, colour) in enumerate(CURVES):
        points = [(x(r.blocks), y(getattr(r, field))) for r in result.hit_rates]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
        )
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in points]
        at = MARGIN + 18 * index
        parts.append(
            f'<rect x="{MARGIN + 12}" y="{at - 9}" width="14" height="4" fill="{colour}"/>'
            f'<text x="{MARGIN + 32}" y="{at - 3}">{escape(name)}</text>'
        )
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">capacity in blocks</text>'
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        f'aria-label="prefix hit rate over capacity">{"".join(parts)}</svg>'
    )


if __name__ == "__main__":
    app()
