# SPDX-License-Identifier: Apache-2.0
"""`kvferry demo`: options, progress, result, and the picture's path."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from kvferry.cli.console import Json, err, keep_page, print_json, refusals
from kvferry.units import show_bytes

if TYPE_CHECKING:
    from kvferry.demo.run import DemoResult

PICTURE_TOKENS = 4096  # of the one request that the picture shows


def demo(
    model: Annotated[str, typer.Option(help="demo, a preset or a config.json.")] = "demo",
    src: Annotated[str | None, typer.Option("--from", help="Source shape.")] = None,
    dst: Annotated[str | None, typer.Option("--to", help="Destination shape.")] = None,
    requests: Annotated[int, typer.Option(help="Requests to move.")] = 300,
    gib: Annotated[float, typer.Option(help="GiB to move at least.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed makes the same requests.")] = 0,
    method: Annotated[str, typer.Option(help="auto, or vm: the carrier `local` only.")] = "auto",
    transport: Annotated[
        str, typer.Option(help="A carrier: auto, local, tcp, mooncake, nixl, cuda.")
    ] = "",
    as_json: Json = False,
    html: Annotated[Path, typer.Option(help="Where to draw the plan.")] = Path(
        "out/demo-plan.html"
    ),
) -> None:
    """Hand requests over between the ranks of two engines on this machine; check every byte."""
    from kvferry.bench.transport import quiet_libraries
    from kvferry.demo.run import run_demo
    from kvferry.demo.work import DEMO_FROM, DEMO_TO

    columns = TextColumn("{task.description:6}"), BarColumn(), DownloadColumn(binary_units=True)
    bars = Progress(*columns, TimeElapsedColumn(), console=err, disable=not err.is_terminal)
    with refusals():
        with quiet_libraries(), bars:
            result = run_demo(
                model,
                src or DEMO_FROM,
                dst or DEMO_TO,
                min_bytes=int(gib * (1 << 30)),
                requests=requests,
                seed=seed,
                method=method,
                transport=transport,
                progress=Shown(bars),
            )
        draw(model, result, html)
    if as_json:
        print_json(result.to_dict())
    else:
        print("\n".join([*describe(result), f"picture  {html}"]))
    raise typer.Exit(0 if result.ok else 1)


class Shown:
    """Progress on standard error: a bar for each phase, or plain lines if it is no terminal."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        bars.add_task("start", total=None)

    def say(self, text: str) -> None:
        self._bars.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def phase(self, name: str, total_bytes: int) -> None:
        if self._bars.disable:
            self.say(f"{name} {show_bytes(total_bytes)}")
        last = self._bars.tasks[-1]
        if last.total is None:  # the start phase has no bytes to show
            self._bars.remove_task(last.id)
        else:
            self._bars.update(last.id, completed=last.total)
        self._bars.add_task(name, total=total_bytes)

    def advance(self, done_bytes: int) -> None:
        self._bars.advance(self._bars.tasks[-1].id, done_bytes)


def draw(model: str, result: DemoResult, path: Path) -> None:
    """Write the picture of the plan that the demo used."""
    from kvferry.cli.plan import plan_page
    from kvferry.demo.work import find_model
    from kvferry.layout.shape import EngineShape
    from kvferry.plan.report import report

    shapes = EngineShape.parse(result.src), EngineShape.parse(result.dst)
    planned = report(find_model(model), *shapes, PICTURE_TOKENS)
    keep_page(path, plan_page(planned, None), "picture")


def describe(result: DemoResult) -> list[str]:
    """The result in a few lines for people."""
    lines = [
        f"moved    {show_bytes(result.bytes)} of KV cache in {result.requests:,} requests "
        f"({result.tokens:,} tokens, {result.skipped_tokens:,} of them already there), "
        f"{result.descriptors:,} descriptors",
        f"from     {result.model}, {result.src} ({result.src_ranks} processes)",
        f"to       {result.model}, {result.dst} ({result.dst_ranks} processes)",
        f"speed    {result.gb_per_s:.2f} GB/s by method {result.method} "
        f"({result.transfer_seconds:.2f} s, with claims, planning and last words; "
        f"{result.copy_gb_per_s:.2f} GB/s reading alone); {result.seconds:.1f} s in all",
    ]
    if result.ok:
        lines.append(
            f"checked  every byte: {result.checked_bytes:,} arrived where they belong, and "
            f"{result.guarded_bytes:,} that nothing may write are unchanged or zero"
        )
    else:
        lines.append(
            f"WRONG    {result.mismatched_bytes:,} bytes differ ({result.checked_bytes:,} that "
            f"should have arrived and {result.guarded_bytes:,} others were compared)"
        )
    if result.method != result.asked:
        lines.append(f"method   {result.method}: {result.why}")
    return lines
