# SPDX-License-Identifier: Apache-2.0
"""Simulations as one HTML page: plots by load, distributions, and a table of every figure.

The page needs nothing else: plots are SVG inside it, and colours follow the reader's light or dark
theme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from kvferry.simulate.run import SimulationResult

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 44
TICKS = 5

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Run:
    """A result, and how many times faster than the trace its requests came."""

    speed: float
    result: SimulationResult


def html_page(title: str, about: Sequence[str], runs: Sequence[Run]) -> str:
    plots = [
        _plot("First token, 90th percentile (s)", "requests a second", _by_load(runs, _p90), True),
        _plot("Prompt tokens from a cache (%)", "requests a second", _by_load(runs, _hits)),
        _plot("Good requests (%)", "requests a second", _by_load(runs, _good)),
    ]
    for speed in sorted({run.speed for run in runs}):
        lines: dict[str, Points] = {
            run.result.policy: [
                (100 * at / (len(run.result.first_tokens) - 1), seconds)
                for at, seconds in enumerate(run.result.first_tokens)
            ]
            for run in runs
            if run.speed == speed
        }
        offered = next(run.result.offered_per_second for run in runs if run.speed == speed)
        heading = f"First token at {offered:.1f} requests a second (s)"
        plots.append(_plot(heading, "% of requests at or below", lines, True))
    names = list(dict.fromkeys(run.result.policy for run in runs))
    key = "".join(f'<li class="p{at}">{escape(name)}</li>' for at, name in enumerate(names))
    words = "".join(f"<p>{escape(line)}</p>" for line in about)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width">
<style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
{words}
<ul class="key">{key}</ul>
<div class="plots">{"".join(plots)}</div>
{_table(FULL_HEAD, [_full_row(run) for run in runs])}
<h2>Engines</h2>
{_table(USE_HEAD, [cells for run in runs for cells in _uses(run)])}
</body></html>
"""


HEAD = (
    *("policy", "load", "req/s", "hit %", "first s p50", "p90", "p99"),
    *("token ms p50", "p99", "good %", "good/s"),
)
FULL_HEAD = (*HEAD, "gap ms p99", "handed over %", "refused")
USE_HEAD = ("policy", "load", "engine", "busy", "requests", "tokens computed")


def row(run: Run) -> list[str]:
    """The cells of `HEAD`."""
    result = run.result
    first, token = result.first_token, result.token
    return [
        result.policy,
        f"{run.speed:g}",
        f"{result.offered_per_second:.2f}",
        f"{100 * result.hit_rate:.1f}",
        *(f"{seconds:.3g}" for seconds in (first.p50, first.p90, first.p99)),
        *(f"{1000 * seconds:.1f}" for seconds in (token.p50, token.p99)),
        f"{100 * result.good_share:.1f}",
        f"{result.good_per_second:.2f}",
    ]


def _full_row(run: Run) -> list[str]:
    result = run.result
    served = max(1, result.requests - result.refused)
    return [
        *row(run),
        f"{1000 * result.gap.p99:.1f}",
        f"{100 * result.handed_over / served:.0f}",
        str(result.refused),
    ]


def _uses(run: Run) -> list[list[str]]:
    return [
        [
            run.result.policy,
            f"{run.speed:g}",
            use.name,
            f"{use.busy_share:.0%}",
            f"{use.requests:,}",
            f"{use.computed_tokens:,}",
        ]
        for use in run.result.uses
    ]


def _p90(result: SimulationResult) -> float:
    return result.first_token.p90


def _hits(result: SimulationResult) -> float:
    return 100 * result.hit_rate


def _good(result: SimulationResult) -> float:
    return 100 * result.good_share


def _by_load(runs: Sequence[Run], of: Callable[[SimulationResult], float]) -> dict[str, Points]:
    lines: dict[str, Points] = {}
    for run in sorted(runs, key=lambda run: run.speed):
        point = (run.result.offered_per_second, of(run.result))
        lines.setdefault(run.result.policy, []).append(point)
    # Colours are given by order, which is the order of the runs on all plots.
    return {run.result.policy: lines[run.result.policy] for run in runs}


def _plot(title: str, x_title: str, lines: dict[str, Points], logarithmic: bool = False) -> str:
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points if math.isfinite(y)]
    x_ticks, y_ticks = _ticks(min(xs), max(xs)), _ticks(0.0, max(ys))
    if logarithmic:
        y_ticks = _decades(min(y for y in ys if y > 0), max(ys))
    x_low, x_high = min(xs[0], x_ticks[0], *xs), max(x_ticks[-1], *xs)
    y_low, y_high = y_ticks[0], max(y_ticks[-1], *ys)

    def right(x: float) -> float:
        return LEFT + (x - x_low) / ((x_high - x_low) or 1) * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        if logarithmic:
            share = math.log(max(y, y_low) / y_low) / (math.log(y_high / y_low) or 1)
        else:
            share = (y - y_low) / ((y_high - y_low) or 1)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = []
    for y in y_ticks:
        at = down(y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" ')
        parts.append(f'y2="{at:.1f}"/><text x="{LEFT - 6}" y="{at + 4:.1f}" ')
        parts.append(f'text-anchor="end">{y:g}</text>')
    for x in x_ticks:
        parts.append(f'<text x="{right(x):.1f}" y="{HEIGHT - BOTTOM + 18}" ')
        parts.append(f'text-anchor="middle">{x:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_title)}')
    parts.append("</text>")
    for at, (name, points) in enumerate(lines.items()):
        placed = " ".join(f"{right(x):.1f},{down(y):.1f}" for x, y in points if math.isfinite(y))
        parts.append(f'<polyline class="p{at}" points="{placed}"><title>{escape(name)}</title>')
        parts.append("</polyline>")
        if len(points) <= 20:
            parts += [
                f'<circle class="p{at}" cx="{right(x):.1f}" cy="{down(y):.1f}" r="3.5">'
                f"<title>{escape(name)}: {y:.3g} at {x:.3g}</title></circle>"
                for x, y in points
                if math.isfinite(y)
            ]
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{escape(title)} by {escape(x_title)}">{"".join(parts)}</svg>'
        "</figure>"
    )


def _ticks(low: float, high: float) -> list[float]:
    """About TICKS round numbers that cover the range."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / TICKS))
    step = next(power * k for k in (1, 2, 5, 10) if power * k * TICKS >= span)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(at * step, 10) for at in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>\n" for cells in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


_COLOURS = (  # of policies, in a light and in a dark theme
    ("#0969da", "#58a6ff"),
    ("#bc4c00", "#f0883e"),
    ("#1a7f37", "#3fb950"),
    ("#8250df", "#bc8cff"),
)
_THEMES = [
    "".join(f"--p{at}: {pair[theme]};" for at, pair in enumerate(_COLOURS)) for theme in (0, 1)
]
_CLASSES = "".join(
    f"polyline.p{at} {{ stroke: var(--p{at}) }} circle.p{at} {{ fill: var(--p{at}) }}\n"
    f".key .p{at}::before {{ color: var(--p{at}) }}\n"
    for at in range(len(_COLOURS))
)
_STYLE = f"""
:root {{ color-scheme: light dark; --ink: #1f2328; --paper: #fff; --line: #d1d9e0; {_THEMES[0]} }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6edf3; --paper: #0d1117; --line: #3d444d; {_THEMES[1]} }}
}}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 1.5rem auto;
  padding: 0 1rem; color: var(--ink); background: var(--paper) }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr));
  gap: 1rem }}
figure {{ margin: 0 }}
figcaption {{ font-weight: 600 }}
svg {{ width: 100%; height: auto }}
svg text {{ font: 12px system-ui, sans-serif; fill: var(--ink) }}
.grid {{ stroke: var(--line) }}
polyline {{ fill: none; stroke-width: 2.5 }}
.key {{ list-style: none; display: flex; flex-wrap: wrap; gap: 1.5rem; padding: 0; position: sticky;
  top: 0; background: var(--paper) }}
.key li::before {{ content: ""; display: inline-block; width: 1.6rem; height: .3rem;
  margin-right: .5rem; vertical-align: middle; background: currentColor }}
{_CLASSES}
.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap }}
th, td {{ padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line) }}
th:first-child, td:first-child {{ text-align: left }}
"""
