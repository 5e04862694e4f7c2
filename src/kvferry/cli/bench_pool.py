"""`kvferry bench pool` and its `--tune` as tables, and as a page with the hit rate by capacity."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvferry.bench.pool import PoolBench
from kvferry.bench.pool_tune import TuneResult, tune
from kvferry.cli.bench import page
from kvferry.errors import DescriptionError

WIDTH, HEIGHT, MARGIN = 680, 400, 56
CURVES = (
    ("optimum_leaf_first", "offline optimum", "#999999"),
    ("kvferry", "kvferry", "#0072b2"),
    ("lru", "LRU", "#d55e00"),
)


def _tables(result: PoolBench) -> list[tuple[str, list[str], list[list[str]]]]:
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
        (
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
        (
            f"Lookups of {result.lookup.keys_per_lookup} keys",
            ["index", "objects", "keys a second", "p50 µs", "p99 µs"],
            lookups,
        ),
        *_scheduler(result),
        ("Bandwidth", ["store", "", "GB/s", "of memcpy"], rates),
        (
            "Targets",
            ["what", "wanted", "found", ""],
            [
                [one.name, one.wanted, f"{one.found:.3g}", "met" if one.met else "MISSED"]
                for one in result.targets
            ],
        ),
    ]


def _scheduler(result: PoolBench) -> list[tuple[str, list[str], list[list[str]]]]:
    share = result.scheduler
    if share is None:
        return []
    rows = [
        ["kvferry", f"{share.kvferry_us:.0f}", f"{share.answer_us:.0f}", f"{share.delay_us:.0f}"],
        ["vLLM's MooncakeStoreConnector", f"{share.vllm_us:.0f}", f"{share.vllm_us:.0f}", "-"],
    ]
    return [
        (
            f"One lookup of {share.tokens:,} tokens ({share.keys} keys) in Mooncake Store, µs",
            ["connector", "scheduler's thread", "answer after", "delay of steps"],
            rows,
        )
    ]


def _print_tables(console: Console, tables: list[tuple[str, list[str], list[list[str]]]]) -> None:
    for title, head, rows in tables:
        console.print(f"[bold]{title}[/]", highlight=False)
        table = Table(box=None, header_style="bold", pad_edge=False)
        for index, name in enumerate(head):
            table.add_column(name, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print()


def print_pool_bench(console: Console, result: PoolBench) -> None:
    _print_tables(console, _tables(result))
    for note in result.notes:
        console.print(note, highlight=False)


def tune_pool(trace: Path | None, as_json: bool) -> None:
    """Choose the policy's constants on a trace's first half, and print the whole search."""
    if trace is None:
        raise DescriptionError("--tune needs a trace; name one with --trace")
    err = Console(stderr=True)
    result = tune(trace, lambda line: err.print(line, style="dim", highlight=False))
    if as_json:
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
    else:
        _print_tables(Console(), _tune_tables(result))


def _tune_tables(result: TuneResult) -> list[tuple[str, list[str], list[list[str]]]]:
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
        (
            f"First half, {result.first_half_requests:,} requests, at {at} blocks "
            f"(LRU {shown(result.lru)})",
            ["sweep", "constant", "value", "hit rate", "mean ratio", "worst", ""],
            grid,
        ),
        ("Constants", ["", "first half's choice", "in use"], constants),
        (
            f"Policies with that choice, at {at} blocks",
            ["policy", "first half", "second half", "whole"],
            policies,
        ),
    ]


def pool_bench_page(result: PoolBench) -> str:
    parts = ["<h1>The pool</h1>"]
    for title, head, rows in _tables(result):
        names = "".join(f"<th>{escape(name)}</th>" for name in head)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
        )
        parts.append(f"<h2>{escape(title)}</h2>")
        if "hit rate" in title:
            parts.append(_curve(result))
        parts.append(f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>")
    notes = "".join(f"<li>{escape(note)}</li>" for note in result.notes)
    return page("kvferry bench pool", f"{''.join(parts)}\n<ul>{notes}</ul>")


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
