"""`kvferry bench plan` and `kvferry bench transport`: commands, tables, and pages with plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvferry.cli.console import (
    Html,
    Json,
    err,
    keep_page,
    libraries_to_stderr,
    print_json,
    refusals,
)
from kvferry.errors import DescriptionError
from kvferry.units import parse_sizes, show_bytes

if TYPE_CHECKING:
    from kvferry.bench.plan import BenchResult, CaseResult
    from kvferry.bench.transport import TransportResult

WIDTH, HEIGHT, MARGIN = 640, 360, 56  # pixels of a plot
KEY = 120  # pixels beside it, for the names of its lines
COLOURS = {
    "local": "#0072b2",
    "tcp": "#009e73",
    "mooncake": "#d55e00",
    "nixl": "#cc79a7",
    "raw-mooncake": "#e69f00",
    "raw-nixl": "#8a63d2",
}
GREY = "#808080"
TITLES = [
    "case",
    "arrays ms",
    "strided ms",
    "vLLM ms",
    "ratio",
    "strided",
    "+ NIXL",
    "descriptors",
    "vLLM's",
    "entries",
    "ns each",
    "same bytes",
]
MOVED = ("gpu", "handover", "pool", "stall")  # benchmarks outside the package
bench = typer.Typer(
    help="Measure planning and carriers, beside other libraries.", no_args_is_help=True
)


@bench.command("plan")
def bench_plan(
    as_json: Json = False,
    html: Html = None,
    quick: Annotated[bool, typer.Option(help="Fewer cases and repeats.")] = False,
) -> None:
    """Measure planning speed, beside vLLM's planner if it is installed."""
    from kvferry.bench.plan import run

    with libraries_to_stderr():
        result = run(lambda line: err.print(line, style="dim", highlight=False), quick=quick)
    if as_json:
        print_json(result.to_dict())
    else:
        print_plan_bench(Console(), result)
    if html is not None:
        keep_page(html, plan_bench_page(result), "plot")


@bench.command("transport")
def bench_transport(
    sizes: Annotated[str, typer.Option(help="Descriptor sizes in bytes, with commas.")] = "",
    seconds: Annotated[float, typer.Option(help="Seconds for each size.", min=0)] = 1.0,
    carriers: Annotated[
        str, typer.Option(help="Carriers to measure, with commas (default: all).")
    ] = "",
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Measure the carriers, beside their libraries, memcpy and a plain socket in one run."""
    from kvferry.bench.transport import SIZES, lines, run

    with refusals():
        chosen = parse_sizes(sizes) if sizes else SIZES
        names = [name.strip() for name in carriers.split(",")] if carriers else []
        if not all(names):
            raise DescriptionError(f"cannot read the carriers {carriers!r}; write local,tcp")
        with libraries_to_stderr():
            result = run(chosen, seconds, names)
    if as_json:
        print_json(asdict(result))
    else:
        for line in lines(result):
            print(line)
    if html is not None:
        keep_page(html, transport_bench_page(result), "plot")


def _moved(name: str) -> None:
    """A hidden command that names its replacement, whatever its arguments are."""
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}

    @bench.command(name, hidden=True, add_help_option=False, context_settings=anything)
    def answer() -> None:
        with refusals():
            raise DescriptionError(
                f"`kvferry bench {name}` is now `python -m benchmarks.{name}`, "
                "in a checkout of the repository"
            )


for _name in MOVED:
    _moved(_name)


def print_plan_bench(console: Console, result: BenchResult) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, title in enumerate(TITLES):
        table.add_column(title, justify="left" if index == 0 else "right")
    for row in _rows(result):
        table.add_row(*row)
    console.print(table)
    for note in _notes(result):
        console.print(f"  {note}", highlight=False)


def plan_bench_page(result: BenchResult) -> str:
    """One self-contained page: the table, and the cost by number of blocks."""
    head = "".join(f"<th>{escape(t)}</th>" for t in TITLES)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in _rows(result)
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in _notes(result))
    series = [
        Curve("arrays", "#0072b2", [(float(b), ms) for b, ms, _ in result.curve]),
        Curve("strided runs", "#d55e00", [(float(b), ms) for b, _, ms in result.curve]),
    ]
    return page(
        "kvferry bench plan",
        f"""<h1>Planning, beside vLLM</h1>
<p>80 layers of llama-3.1-70b, one request on one edge, times in milliseconds.</p>
<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>
<ul>{notes}</ul>
<h2>Cost by number of blocks</h2>
{_log_plot(series, "blocks of the request", "milliseconds")}""",
    )


def _rows(result: BenchResult) -> list[list[str]]:
    def row(c: CaseResult) -> list[str]:
        return [
            c.name,
            _number(c.kvferry_ms),
            _number(c.strided_ms),
            _number(c.vllm_ms),
            _number(c.ratio, "x"),
            _number(c.strided_ratio, "x"),
            _number(c.nixl_handover_ratio, "x"),
            f"{c.descriptors:,}",
            f"{c.vllm_descriptors:,}" if c.vllm_descriptors is not None else "-",
            f"{c.strided_entries:,}",
            _number(c.ns_per_descriptor),
            {True: "yes", False: "NO", None: "-"}[c.same_bytes_as_vllm],
        ]

    return [row(c) for c in result.cases]


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}{unit}" if value >= 100 else f"{value:.3g}{unit}"


def _notes(result: BenchResult) -> list[str]:
    notes = [f"{c.name}: {c.note}" for c in result.cases if c.note]
    for c in result.cases[:1]:
        notes.append(
            f"{c.name}: memory while binding {c.peak_bytes_per_descriptor:.1f} bytes a descriptor "
            "(three integers are 24)"
        )
        if c.mooncake_list_ms is not None and c.mooncake_binding_ms is not None:
            notes.append(
                f"{c.name}, handed to Mooncake: bind {c.kvferry_ms:.3g} ms, lists "
                f"{c.mooncake_list_ms:.3g} ms, its binding {c.mooncake_binding_ms:.3g} ms"
            )
        if c.nixl_ms is not None:
            notes.append(f"{c.name}, handed to NIXL as arrays: {c.nixl_ms:.3g} ms for both ends")
    notes.append(
        f"all {result.all_plans_edges} plans of tp=8,pp=8 -> tp=64, 80 layers: "
        f"{result.all_plans_ms:.1f} ms"
    )
    return notes


def transport_bench_page(result: TransportResult) -> str:
    """One self-contained page: each carrier's rates by descriptor size, for each direction."""
    from kvferry.bench.transport import target_lines

    sizes = sorted({row.descriptor_bytes for row in result.results})
    limits = [
        Curve("memcpy", GREY, [(float(s), result.memcpy_gb_s) for s in sizes], "6 3"),
        Curve(
            "memcpy, scattered",
            GREY,
            [(r.descriptor_bytes, r.gb_s) for r in result.results if r.carrier == "memcpy"],
            "2 3",
        ),
        Curve("one socket", GREY, [(float(s), result.socket_gb_s) for s in sizes], "10 3 2 3"),
    ]
    plots = ""
    for op in dict.fromkeys(row.op for row in result.results if row.carrier != "memcpy"):
        rows = [row for row in result.results if row.op == op]
        series = [
            Curve(
                name,
                COLOURS[name],
                [(r.descriptor_bytes, r.gb_s) for r in rows if r.carrier == name],
            )
            for name in dict.fromkeys(row.carrier for row in rows)
        ]
        plot = _log_plot([*series, *limits], "bytes of a descriptor", "GB/s", show_bytes)
        plots += f"<h2>{escape(op.capitalize())}s</h2>\n{plot}\n"
    head = "".join(
        f"<th>{title}</th>"
        for title in ("carrier", "op", "descriptor", "GB/s", "descriptors/s", "of its baseline")
    )
    body = "".join(
        f"<tr><td>{escape(row.carrier)}</td><td>{escape(row.op)}</td>"
        f"<td>{show_bytes(row.descriptor_bytes)}</td><td>{row.gb_s:.3g}</td>"
        f"<td>{row.descriptors_s:,.0f}</td>"
        f"<td>{'-' if row.of_baseline is None else f'{row.of_baseline:.0%}'}</td></tr>"
        for row in result.results
    )
    missing = "".join(
        f"<li>not measured: {escape(name)}: {escape(why)}</li>"
        for name, why in result.missing.items()
    )
    judged = filter(None, target_lines(result.targets))
    targets = "".join(f"<li>{escape(line)}</li>" for line in judged)
    return page(
        "kvferry bench transport",
        f"""<h1>Carriers, beside their libraries</h1>
<p>Two processes on this machine, scattered descriptors, the best of several rounds in which all
take turns. raw-mooncake and raw-nixl are the libraries called directly, with the same batches.
Dashed: limits of this machine in the same run.</p>
{plots}<ul>{targets}{missing}</ul>
<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>""",
    )


def page(title: str, body: str) -> str:
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<style>
 body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
   color: #1b1f24; background: #fff }}
 table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
 th, td {{ padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #d8dee4 }}
 th:first-child, td:first-child {{ text-align: left }}
 svg text {{ font: 12px system-ui, sans-serif; fill: currentColor }}
 @media (prefers-color-scheme: dark) {{ body {{ color: #e6edf3; background: #0d1117 }} }}
</style></head><body>
{body}
</body></html>
"""


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    dash: str = ""  # an SVG dash pattern; such a line is a limit, drawn without points


def _log_plot(
    series: Sequence[Curve],
    x_title: str,
    y_title: str,
    x_label: Callable[[float], str] = "{:,.0f}".format,
) -> str:
    """Lines on two logarithmic axes, as SVG."""
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    x_low, x_high = math.log2(min(xs)), math.log2(max(xs))
    y_low, y_high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))

    def place(x: float, y: float) -> tuple[float, float]:
        right = (math.log2(x) - x_low) / ((x_high - x_low) or 1)
        up = (math.log10(y) - y_low) / ((y_high - y_low) or 1)
        return (
            MARGIN + right * (WIDTH - 2 * MARGIN),
            HEIGHT - MARGIN - up * (HEIGHT - 2 * MARGIN),
        )

    def text(x: float, y: float, words: str, anchor: str = "middle", style: str = "") -> str:
        look = f' style="{style}"' if style else ""
        return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{look}>{escape(words)}</text>'

    parts = [
        text(place(x, 10.0**y_low)[0], HEIGHT - MARGIN + 18, x_label(x)) for x in sorted(set(xs))
    ]
    for power in range(y_low, y_high + 1):
        _, at = place(min(xs), 10.0**power)
        parts.append(
            f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{at:.0f}" y2="{at:.0f}" '
            'stroke="currentColor" stroke-opacity=".15"/>'
        )
        parts.append(text(MARGIN - 8, at + 4, f"{10.0**power:g}", "end"))
    for index, line in enumerate(series):
        placed = [place(x, y) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        look = f'fill="none" stroke="{line.colour}"'
        if line.dash:
            look += f' stroke-width="1.5" stroke-dasharray="{line.dash}"'
        else:
            look += ' stroke-width="2.5"'
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{line.colour}"/>'
                for x, y in placed
            ]
        parts.append(f'<polyline points="{path}" {look}/>')
        left, at = WIDTH - MARGIN + 16, MARGIN + 20 * index
        parts.append(f'<line x1="{left}" x2="{left + 24}" y1="{at}" y2="{at}" {look}/>')
        parts.append(text(left + 32, at + 4, line.name, "start"))
    parts.append(text(WIDTH / 2, HEIGHT - 12, x_title))
    parts.append(text(MARGIN, 14, y_title, "end"))
    return (
        f'<svg viewBox="0 0 {WIDTH + KEY} {HEIGHT}" width="{WIDTH + KEY}" role="img" '
        f'aria-label="{escape(y_title)} by {escape(x_title)}">{"".join(parts)}</svg>'
    )
