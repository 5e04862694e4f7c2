"""`kvferry demo` on a terminal: progress, result, and the picture's path."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from kvferry.bench.transport import quiet_libraries
from kvferry.cli.console import write_page
from kvferry.cli.plan import plan_page
from kvferry.demo.run import DemoResult, Watch, run_demo
from kvferry.demo.work import DEMO_FROM, DEMO_MODEL, DEMO_TO, find_model
from kvferry.layout.shape import EngineShape
from kvferry.plan.report import report
from kvferry.units import show_bytes

PICTURE = Path("out/demo-plan.html")
PICTURE_TOKENS = 4096  # of the one request that the picture shows


class Lines(Watch):
    """Plain lines, for logs and pipes."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self.write = write

    def say(self, text: str) -> None:
        self.write(text + "\n")

    def phase(self, name: str, total_bytes: int) -> None:
        self.say(f"{name} {show_bytes(total_bytes)}")


class Bars(Watch):
    """A progress bar for each phase."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task = progress.add_task("start", total=None)

    def say(self, text: str) -> None:
        self.progress.console.print(text, highlight=False, soft_wrap=True)

    def phase(self, name: str, total_bytes: int) -> None:
        done = self.progress.tasks[-1].total
        if done is None:  # the start phase has no bytes to show
            self.progress.remove_task(self.task)
        else:
            self.progress.update(self.task, completed=done)
        self.task = self.progress.add_task(name, total=total_bytes)

    def advance(self, done_bytes: int) -> None:
        self.progress.advance(self.task, done_bytes)


def demo(
    model: str = DEMO_MODEL,
    from_shape: str = DEMO_FROM,
    to_shape: str = DEMO_TO,
    *,
    gib: float = 1.0,
    requests: int = 300,
    seed: int = 0,
    method: str = "auto",
    transport: str = "",
    as_json: bool = False,
    html: Path | None = PICTURE,
) -> int:
    """Run the demo on a terminal. Returns 0 if every byte is right, else 1."""
    progress_console = Console(stderr=True)
    columns = (TextColumn("{task.description:6}"), BarColumn(), DownloadColumn(binary_units=True))
    with ExitStack() as stack:
        if transport:
            stack.enter_context(quiet_libraries())
        watch: Watch
        if progress_console.is_terminal:
            bars = Progress(*columns, TimeElapsedColumn(), console=progress_console)
            watch = Bars(stack.enter_context(bars))
        else:
            watch = Lines(sys.stderr.write)
        result = run_demo(
            model,
            from_shape,
            to_shape,
            min_bytes=int(gib * (1 << 30)),
            requests=requests,
            seed=seed,
            method=method,
            transport=transport,
            progress=watch,
        )
    if html is not None:
        draw(result, html)
    if as_json:
        print(json.dumps(result.to_dict()))
    else:
        print("\n".join(describe(result, html)))
    return 0 if result.ok else 1


def draw(result: DemoResult, path: Path) -> None:
    """Write the picture of the plan that the demo used."""
    model = find_model(result.model)
    shapes = EngineShape.parse(result.src), EngineShape.parse(result.dst)
    write_page(path, plan_page(report(model, *shapes, PICTURE_TOKENS), None), "picture")


def describe(result: DemoResult, picture: Path | None = None) -> list[str]:
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
    if picture is not None:
        lines.append(f"picture  {picture}")
    return lines
