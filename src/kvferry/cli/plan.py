# SPDX-License-Identifier: Apache-2.0
"""`kvferry plan` and `kvferry models`: terminal tables, and a plan's picture as one HTML page.

The page contains its style, script and data, so that it opens from a file, can be mailed, and
loads nothing from a server. The template `plan.html` does all the drawing.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kvferry.cli.console import Html, Json, keep_page, print_json, print_table, refusals
from kvferry.layout.hf import load_model, presets
from kvferry.layout.shape import EngineShape
from kvferry.plan.report import EdgeReport, PlanReport, report
from kvferry.units import parse_link, show_bytes, show_seconds

MOST_TOKENS = 1 << 27  # more than any model's context; block tables are made for this many
MOST_ROWS = 64  # a terminal shows the heaviest edges; --json and --html have all of them
PLACEHOLDER = "__PLAN_DATA__"
# Inside <script>, HTML ends the data at "</" and opens a comment at "<!--", even in a JSON string.
# Older script parsers take U+2028 and U+2029 for line ends. As escapes, all are plain JSON.
_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def models() -> None:
    """List the models that can be named without a config.json."""
    rows = []
    for name in presets():
        model = load_model(name)
        groups = ", ".join(
            f"{g.name} x{len(g.layers)}" + (f" ({g.residency.span})" if g.residency.span else "")
            for g in model.groups
        )
        rows.append((name, str(model.num_layers), groups, show_bytes(model.token_bytes())))
    print_table(["model", "layers", "groups", "cache a token"], rows, words=4)


def plan(
    src: Annotated[str, typer.Option("--from", help="Source shape, such as tp=4,pp=2.")],
    dst: Annotated[str, typer.Option("--to", help="Destination shape.")],
    model: Annotated[
        str, typer.Option(help="A preset (see `kvferry models`) or a config.json.")
    ] = "llama-3.1-70b",
    tokens: Annotated[
        int, typer.Option(help="Tokens of the request.", min=1, max=MOST_TOKENS)
    ] = 32768,
    skip: Annotated[
        int, typer.Option(help="Tokens that the destination already holds.", min=0)
    ] = 0,
    link: Annotated[str | None, typer.Option(help="Link of each rank, such as 400Gbit.")] = None,
    cache_dtype: Annotated[str, typer.Option(help="auto, bfloat16, fp8_e4m3, ...")] = "auto",
    draft_layers: Annotated[
        int, typer.Option(help="Layers of a draft model (MTP, Eagle).", min=0, max=1024)
    ] = 0,
    contiguous: Annotated[
        bool, typer.Option("--contiguous", help="Blocks in a row, not scattered.")
    ] = False,
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Show which rank sends what to which rank, and what it costs, before anything runs."""
    with refusals():
        described = load_model(model, cache_dtype=cache_dtype, draft_layers=draft_layers)
        speed = parse_link(link) if link is not None else None
        shapes = EngineShape.parse(src), EngineShape.parse(dst)
        result = report(described, *shapes, tokens, skip=skip, scattered=not contiguous)
    if as_json:
        print_json(result.to_dict(speed))
    else:
        _print(Console(), result, speed)
    if html is not None:
        keep_page(html, plan_page(result, speed), "picture")


def plan_page(report: PlanReport, link_bytes_per_s: float | None) -> str:
    """A self-contained HTML page for `report`. With a link's rate it also shows the time."""
    # Ranks without bytes have no edge, so the page gets all ranks from the shapes.
    ranks = {
        "src": [list(rank) for rank in EngineShape.parse(report.src).ranks],
        "dst": [list(rank) for rank in EngineShape.parse(report.dst).ranks],
    }
    data = {**report.to_dict(link_bytes_per_s), "ranks": ranks}
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    template = files("kvferry.cli").joinpath("plan.html").read_text(encoding="utf-8")
    before, _, after = template.partition(PLACEHOLDER)
    return before + text.translate(_ESCAPES) + after


def _print(console: Console, report: PlanReport, link_bytes_per_s: float | None) -> None:
    console.print(f"[bold]{escape(report.model)}[/], {report.tokens:,} tokens", highlight=False)
    console.print(f"  from  {report.src}", highlight=False)
    console.print(f"  to    {report.dst}\n", highlight=False)
    head = ["from", "to", "layers", "heads", "bytes", "share", "runs", "copies", "mean copy"]
    shown = sorted(report.edges, key=lambda e: -e.bytes)[:MOST_ROWS]
    rows = [
        _row(edge, report.total_bytes, link_bytes_per_s)
        for edge in sorted(shown, key=lambda e: (e.src, e.dst))
    ]
    print_table([*head, "time"] if link_bytes_per_s else head, rows, words=4)
    if len(shown) < len(report.edges):
        console.print(f"  ... and {len(report.edges) - len(shown)} smaller edges (see --html)")
    console.print()
    for line in _summary(report, link_bytes_per_s):
        console.print(line, highlight=False)


def _row(edge: EdgeReport, total: int, link_bytes_per_s: float | None) -> list[str]:
    layers = sorted({layer for share in edge.shares for layer in share.layers})
    heads = {_range(s.units[0], s.units[1] - 1) for s in edge.shares}
    cells = [
        f"pp{edge.src.pp} tp{edge.src.tp}",
        f"pp{edge.dst.pp} tp{edge.dst.tp}",
        _range(layers[0], layers[-1]),
        heads.pop() if len(heads) == 1 else "several",
        show_bytes(edge.bytes),
        f"{edge.bytes / total:.1%}" if total else "",
        f"{edge.runs:,}",
        f"{edge.descriptors:,}",
        show_bytes(edge.mean_run_bytes),
    ]
    return [*cells, show_seconds(edge.bytes / link_bytes_per_s)] if link_bytes_per_s else cells


def _range(first: int, last: int) -> str:
    return f"{first}-{last}" if last > first else str(first)


def _summary(report: PlanReport, link_bytes_per_s: float | None) -> list[str]:
    lines = [
        *(f"[yellow]note[/]          {escape(note)}" for note in report.notes),
        f"moved         {show_bytes(report.total_bytes)} on {len(report.edges)} edges "
        f"(the destination needs {show_bytes(report.lower_bound_bytes)})",
        f"busiest rank  {show_bytes(report.busiest_source_bytes)} sent, "
        f"{report.imbalance:.2f} x an even share; "
        f"{show_bytes(report.busiest_destination_bytes)} received",
        f"copies        {sum(e.descriptors for e in report.edges):,}, in "
        f"{sum(e.runs for e in report.edges):,} strided runs",
    ]
    if link_bytes_per_s:
        seconds = report.seconds(link_bytes_per_s)
        lines.append(
            f"predicted     {show_seconds(seconds)} at {link_bytes_per_s / 1e9:g} GB/s a rank; "
            "short copies take longer"
        )
    return lines
