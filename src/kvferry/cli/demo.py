# SPDX-License-Identifier: Apache-2.0
"""`kvferry demo`: options, progress, result, and the picture of its plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress, TaskID

from kvferry.cli.console import OUT, Json, err, keep_page, print_json, refusals, require_page
from kvferry.cli.plan import plan_page
from kvferry.demo.work import DEMO_FROM, DEMO_MODEL, DEMO_TO, find_model
from kvferry.layout.shape import EngineShape
from kvferry.plan.report import report
from kvferry.units import show_bytes

if TYPE_CHECKING:
    from kvferry.demo.run import DemoResult

PICTURE = OUT / "demo-plan.html"
PICTURE_TOKENS = 4096  # of the one request that the picture shows


def demo(
    model: Annotated[str, typer.Option(help="demo, a preset or a config.json.")] = DEMO_MODEL,
    src: Annotated[str, typer.Option("--from", help="Source shape.")] = DEMO_FROM,
    dst: Annotated[str, typer.Option("--to", help="Destination shape.")] = DEMO_TO,
    requests: Annotated[int, typer.Option(help="Requests to move.", min=1)] = 300,
    gib: Annotated[
        float,
        typer.Option(
            help="GiB to move; the default shapes take thrice as much memory.", min=1e-6, max=1e6
        ),
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed makes the same requests.")] = 0,
    transport: Annotated[
        str, typer.Option(help="A carrier: auto, local, tcp, mooncake, nixl, cuda.")
    ] = "auto",
    as_json: Json = False,
    html: Annotated[
        Path, typer.Option(help="Where to draw the plan.", callback=require_page)
    ] = PICTURE,
) -> None:
    """Hand requests over between the ranks of two engines on this machine; check every byte."""
    from kvferry.bench.transport import quiet_libraries
    from kvferry.demo.run import run_demo

    bars = Progress(console=err, disable=not err.is_terminal)
    phases: dict[str, TaskID] = {}

    def show(phase: str, done: int, total: int) -> None:
        if phase not in phases:
            phases[phase] = bars.add_task(f"{phase:6}", total=total)
        bars.update(phases[phase], completed=done)

    with refusals(), quiet_libraries(), bars:
        result = run_demo(
            model,
            src,
            dst,
            min_bytes=int(gib * (1 << 30)),
            requests=requests,
            seed=seed,
            transport=transport,
            progress=show,
        )
    if as_json:
        print_json(result.to_dict())
    else:
        print("\n".join(describe(result)))
    with refusals():
        shapes = EngineShape.parse(src), EngineShape.parse(dst)
        planned = report(find_model(model), *shapes, PICTURE_TOKENS)
        keep_page(html, plan_page(planned, None), "picture")
    raise typer.Exit(0 if result.ok else 1)


def describe(result: DemoResult) -> list[str]:
    """The result in a few lines for people."""
    lines = [
        f"moved    {show_bytes(result.bytes)} of KV cache: {result.requests:,} requests, "
        f"{result.tokens:,} tokens, {result.descriptors:,} copies",
        f"from     {result.model}, {result.src} ({result.src_ranks} processes)",
        f"to       {result.model}, {result.dst} ({result.dst_ranks} processes)",
        f"carrier  {result.method}" + (f": {result.why}" if result.method != result.asked else ""),
        f"speed    {result.copy_gb_per_s:.2f} GB/s reading; {result.gb_per_s:.2f} GB/s with "
        "claims, planning and last words",
    ]
    if result.ok:
        return [
            *lines,
            f"checked  every byte: {result.checked_bytes:,} arrived where they belong,",
            f"         {result.guarded_bytes:,} that nothing may write are unchanged or zero",
        ]
    return [
        *lines,
        f"WRONG    {result.mismatched_bytes:,} bytes differ, of {result.checked_bytes:,} that "
        f"should have arrived and {result.guarded_bytes:,} others",
    ]
