# SPDX-License-Identifier: Apache-2.0
"""`kvferry bench plan` and `kvferry bench transport`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
from kvferry.cli.page import Curve, Page, TableSheet, plot
from kvferry.units import parse_size, show_bytes, show_number

if TYPE_CHECKING:
    from kvferry.bench.plan import BenchResult
    from kvferry.bench.transport import TransportResult

COLOURS = {
    "memcpy": "#808080",
    "local": "#0072b2",
    "tcp": "#009e73",
    "mooncake": "#d55e00",
    "nixl": "#cc79a7",
    "raw-mooncake": "#e69f00",
    "raw-nixl": "#8a63d2",
}
bench = Commands(
    help="Measure planning, and carriers beside their libraries. A checkout of the repository has "
    "more: `python -m benchmarks.pool`, handover, stall and gpu.",
    no_args_is_help=True,
)


@bench.command("plan")
def bench_plan(
    as_json: Json = False,
    html: Html = None,
    quick: Annotated[bool, typer.Option(help="Fewer cases and repeats.")] = False,
) -> None:
    """Measure planning speed."""
    from kvferry.bench.plan import run

    result = run(say, quick=quick)
    show(result, plan_page(result), as_json, html)


@bench.command("transport")
def bench_transport(
    sizes: Annotated[str, typer.Option(help="Descriptor sizes, as 4096,64KB.")] = "",
    seconds: Annotated[float, typer.Option(help="Seconds for each size.", min=0)] = 1.0,
    carriers: Annotated[
        str, typer.Option(help="Carriers to measure, with commas (default: all).")
    ] = "",
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Measure the carriers, beside their libraries, memcpy and a plain socket in one run."""
    from kvferry.bench.transport import SIZES, run

    with refusals():
        chosen = [parse_size(size) for size in sizes.split(",")] if sizes else SIZES
        with libraries_to_stderr():
            result = run(chosen, seconds, carriers.replace(",", " ").split())
    show(result, transport_page(result), as_json, html)


def show(
    result: BenchResult | TransportResult, page: Page, as_json: bool, html: Path | None
) -> None:
    if as_json:
        print_json(asdict(result))
    else:
        page.print()
    if html is not None:
        keep_page(html, page.html(), "plot")


def plan_page(result: BenchResult) -> Page:
    """The cases, and the cost by number of blocks."""
    rows = [
        [
            case.name,
            show_number(case.kvferry_ms),
            show_number(case.strided_ms),
            f"{case.descriptors:,}",
            f"{case.strided_entries:,}",
            show_number(case.ns_per_descriptor),
        ]
        for case in result.cases
    ]
    head = ["case", "arrays ms", "strided ms", "descriptors", "entries", "ns each"]
    curves = [
        Curve("arrays", "#0072b2", [(blocks, ms) for blocks, ms, _ in result.curve]),
        Curve("strided runs", "#d55e00", [(blocks, ms) for blocks, _, ms in result.curve]),
    ]
    cost = plot(
        curves, "blocks of the request", "milliseconds", "{:,.0f}".format, log_x=True, log_y=True
    )
    return Page(
        "kvferry bench plan",
        "Planning",
        "80 layers of llama-3.1-70b, one request on one edge, times in milliseconds.",
        [TableSheet("Cases", head, rows)],
        [
            f"{result.cases[0].name}: memory while binding "
            f"{result.cases[0].peak_bytes_per_descriptor:.1f} bytes a descriptor",
            f"all {result.all_plans_edges} plans of tp=8,pp=8 -> tp=64, 80 layers: "
            f"{result.all_plans_ms:.1f} ms",
        ],
        [("Cost by number of blocks", cost)],
    )


def transport_page(result: TransportResult) -> Page:
    """Each carrier's rates by descriptor size, for each direction."""
    sheets = [
        TableSheet(
            "Limits of this machine",
            ["", "GB/s"],
            [
                ["memcpy", f"{result.memcpy_gb_s:.2f}"],
                ["memcpy, scattered", f"{result.scatter_memcpy_gb_s:.2f}"],
                ["one socket", f"{result.socket_gb_s:.2f}"],
            ],
        ),
        TableSheet(
            "Carriers",
            ["carrier", "op", "descriptor", "GB/s", "descriptors/s", "of its baseline"],
            [
                [
                    row.carrier,
                    row.op,
                    show_bytes(row.descriptor_bytes),
                    f"{row.gb_s:.3g}",
                    f"{row.descriptors_s:,.0f}",
                    "-" if row.of_baseline is None else f"{row.of_baseline:.0%}",
                ]
                for row in result.results
            ],
        ),
    ]
    return Page(
        "kvferry bench transport",
        "Carriers, beside their libraries",
        "Two processes on this machine, scattered descriptors, the best of several rounds in which "
        "all take turns. raw-mooncake and raw-nixl are the libraries called directly, with the "
        "same batches; memcpy is over the same scatter inside one process.",
        sheets,
        [f"not measured: {name}: {why}" for name, why in result.missing.items()],
        _transport_plots(result),
    )


def _transport_plots(result: TransportResult) -> list[tuple[str, str]]:
    """A plot for each direction."""
    plots = []
    for op in ("read", "write"):
        points: dict[str, list[tuple[float, float]]] = {}
        for row in result.results:
            if row.op in (op, "copy"):
                points.setdefault(row.carrier, []).append((row.descriptor_bytes, row.gb_s))
        curves = [Curve(name, COLOURS[name], found) for name, found in points.items()]
        rates = plot(curves, "bytes of a descriptor", "GB/s", show_bytes, log_x=True, log_y=True)
        plots.append((f"{op.capitalize()}s", rates))
    return plots
