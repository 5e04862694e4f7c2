"""`kvferry bench pool` as tables and as a page with the hit rate over capacity."""

from __future__ import annotations

import math
from html import escape

from rich.console import Console
from rich.table import Table

from kvferry.bench.pool import PoolBench

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
        ("Bandwidth", ["store", "", "GB/s", "of memcpy"], rates),
    ]


def print_pool_bench(console: Console, result: PoolBench) -> None:
    for title, head, rows in _tables(result):
        console.print(f"[bold]{title}[/]", highlight=False)
        table = Table(box=None, header_style="bold", pad_edge=False)
        for index, name in enumerate(head):
            table.add_column(name, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print()
    for note in result.notes:
        console.print(note, highlight=False)


def pool_bench_page(result: PoolBench) -> str:
    parts = []
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
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kvferry bench pool</title>
<style>
 body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem;
   color: #1b1f24; background: #fff }}
 table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
 th, td {{ padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #d8dee4 }}
 th:first-child, td:first-child {{ text-align: left }}
 svg text {{ font: 12px system-ui, sans-serif; fill: currentColor }}
 @media (prefers-color-scheme: dark) {{ body {{ color: #e6edf3; background: #0d1117 }} }}
</style></head><body>
<h1>The pool</h1>
{"".join(parts)}
<ul>{notes}</ul>
</body></html>
"""


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
