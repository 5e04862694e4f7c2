# SPDX-License-Identifier: Apache-2.0
"""A result as tables on a terminal, and as a self-contained HTML page with plots.

Plots are SVG inside the page, and their words follow the reader's light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from rich.console import Console

from kvferry.cli.console import print_table

WIDTH, HEIGHT, MARGIN = 640, 360, 56  # pixels of a plot
KEY = 120  # pixels beside it, for the names of its lines
TICKS = 5  # about this many on an axis that is not logarithmic


@dataclass(frozen=True, slots=True)
class TableSheet:
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def html(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in self.head)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        return (
            f"<h2>{escape(self.title)}</h2>\n"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>\n"
        )


@dataclass(frozen=True, slots=True)
class Page:
    """Plots are only on the HTML page. The rest is on the terminal too."""

    command: str
    title: str
    about: str
    sheets: Sequence[TableSheet]
    notes: Sequence[str]
    plots: Sequence[tuple[str, str]]  # a heading, and an SVG

    def print(self) -> None:
        console = Console()
        for sheet in self.sheets:
            console.print(sheet.title, style="bold", highlight=False, markup=False)
            print_table(sheet.head, sheet.rows)
            console.print()
        for note in self.notes:
            console.print(note, highlight=False, markup=False, soft_wrap=True)

    def html(self) -> str:
        plots = "".join(f"<h2>{escape(heading)}</h2>\n{svg}\n" for heading, svg in self.plots)
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(self.command)}</title>
<style>
 body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
   color: #1b1f24; background: #fff }}
 table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
 th, td {{ padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #d8dee4 }}
 th:first-child, td:first-child {{ text-align: left; white-space: nowrap }}
 svg text {{ font: 12px system-ui, sans-serif; fill: currentColor }}
 @media (prefers-color-scheme: dark) {{ body {{ color: #e6edf3; background: #0d1117 }} }}
</style></head><body>
<h1>{escape(self.title)}</h1>
<p>{escape(self.about)}</p>
{plots}{"".join(sheet.html() for sheet in self.sheets)}<ul>{notes}</ul>
</body></html>
"""


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    colour: str
    points: Sequence[tuple[float, float]]


def plot(
    series: Sequence[Curve],
    x_title: str,
    y_title: str,
    x_label: Callable[[float], str] = "{:g}".format,
    *,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """Lines, as SVG. A logarithmic x axis names the values of the points."""
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    x_ticks = sorted(set(xs)) if log_x else _ticks(min(xs), max(xs))
    y_ticks = _decades(min(ys), max(ys)) if log_y else _ticks(0.0, max(ys))

    def share(value: float, ticks: Sequence[float], log: bool) -> float:
        low, high = ticks[0], ticks[-1]
        if log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return (value - low) / ((high - low) or 1)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            MARGIN + share(x, x_ticks, log_x) * (WIDTH - 2 * MARGIN),
            HEIGHT - MARGIN - share(y, y_ticks, log_y) * (HEIGHT - 2 * MARGIN),
        )

    def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(words)}</text>'

    parts = [text(place(x, y_ticks[0])[0], HEIGHT - MARGIN + 18, x_label(x)) for x in x_ticks]
    for y in y_ticks:
        _, at = place(x_ticks[0], y)
        parts.append(
            f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{at:.0f}" y2="{at:.0f}" '
            'stroke="currentColor" stroke-opacity=".15"/>'
        )
        parts.append(text(MARGIN - 8, at + 4, f"{y:g}", "end"))
    for index, line in enumerate(series):
        placed = [place(x, y) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        look = f'fill="none" stroke="{line.colour}" stroke-width="2.5"'
        parts.append(f'<polyline points="{path}" {look}/>')
        parts += [  # a line of one point shows nothing
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{line.colour}"/>' for x, y in placed
        ]
        left, at = WIDTH - MARGIN + 16, MARGIN + 20 * index
        parts.append(f'<line x1="{left}" x2="{left + 24}" y1="{at}" y2="{at}" {look}/>')
        parts.append(text(left + 32, at + 4, line.name, "start"))
    parts.append(text(WIDTH / 2, HEIGHT - 12, x_title))
    parts.append(text(0, 14, y_title, "start"))
    return (
        f'<svg viewBox="0 0 {WIDTH + KEY} {HEIGHT}" width="{WIDTH + KEY}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(y_title)} by {escape(x_title)}">{"".join(parts)}</svg>'
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers that cover the range."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / TICKS))
    step = next(power * k for k in (1, 2, 5, 10) if power * k * TICKS >= span)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(at * step, 10) for at in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]
