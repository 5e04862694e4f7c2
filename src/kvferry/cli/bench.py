# SPDX-License-Identifier: Apache-2.0
"""`kvferry bench transport`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvferry.cli.console import (
    Commands,
    Html,
    Json,
    keep_page,
    libraries_to_stderr,
    print_json,
    refusals,
)
from kvferry.cli.page import Curve, Page, TableSheet, plot
from kvferry.units import parse_size, show_bytes

if TYPE_CHECKING:
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
    help="Measure carriers. A checkout of the repository measures more (docs/benchmarks.md).",
    no_args_is_help=True,
)


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


def show(result: Any, page: Page, as_json: bool, html: Path | None) -> None:
    """Print the dataclass of a result as JSON, or its page, which may be kept as HTML too."""
    if as_json:
        print_json(asdict(result))
    else:
        page.print()
    if html is not None:
        keep_page(html, page.html(), "plot")


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
