# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.routing`: the parts, and their tables."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from benchmarks.routing import overhead, real, trace
from kvferry.cli.console import Commands, Json, print_json, refusals, table
from kvferry.errors import DescriptionError

app = Commands()


class Part(StrEnum):
    OVERHEAD = "overhead"
    ENGINES = "engines"
    TRACE = "trace"


@app.command()
def main(
    part: Annotated[Part, typer.Option(help="What to measure.")],
    per_second: Annotated[float, typer.Option(help="overhead: requests.", min=1)] = 200.0,
    seconds: Annotated[float, typer.Option(help="overhead: of one round.", min=0.5)] = 5.0,
    rounds: Annotated[int, typer.Option(help="overhead, engines: of each case.", min=1)] = 3,
    tokens: Annotated[int, typer.Option(help="overhead: of a prompt.", min=8)] = 1000,
    delay_ms: Annotated[float, typer.Option(help="overhead: of the engine.", min=0)] = 20.0,
    events: Annotated[int, typer.Option(help="overhead: of an answer.", min=1)] = 8,
    most_others: Annotated[
        float, typer.Option(help="overhead: other programs' share, in a round that counts.")
    ] = 1.0,
    patience_seconds: Annotated[float, typer.Option(help="overhead: for such rounds.")] = 300.0,
    conversations: Annotated[int, typer.Option(help="engines: of five turns each.", min=2)] = 6,
    vllm_router: Annotated[
        Path | None, typer.Option(help="engines: vllm-router's program, to compare with.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--trace", help="trace: JSON lines (docs/routing.md).")
    ] = None,
    speed: Annotated[
        list[float] | None, typer.Option(help="trace: times its load; may be repeated.", min=1e-6)
    ] = None,
    engines: Annotated[str, typer.Option(help="trace: 8 (all do both), or 4P4D.")] = "8",
    as_json: Json = False,
) -> None:
    """What the router costs, and what it gains."""
    with refusals():
        if part is Part.OVERHEAD:
            load = overhead.Load(
                per_second,
                seconds,
                rounds,
                tokens,
                delay_ms,
                events,
                most_others,
                patience_seconds,
            )
            results = overhead.measure(load)
            if as_json:
                print_json({"load": asdict(load), "cases": [asdict(each) for each in results]})
            else:
                _print_overhead(load, results)
            return
        if part is Part.ENGINES:
            ran = real.measure(conversations, rounds, vllm_router)
            if as_json:
                said = [msgspec.to_builtins(p) | {"ratio": p.ratio} for p in ran.predictions]
                print_json(msgspec.to_builtins(ran) | {"predictions": said})
            else:
                _print_real(ran)
            return
        if file is None:
            raise DescriptionError("the part trace needs a trace: name it with --trace")
        found = trace.compare(file, engines, speed or [1.0, 2.0, 3.0, 4.0])
    if as_json:
        print_json([each.as_json() for each in found])
    else:
        _print_trace(found)


def _print_overhead(load: overhead.Load, results: list[overhead.CaseResult]) -> None:
    console = Console()
    console.print(
        f"{load.per_second:g} streams a second of {load.events} events, prompts of {load.tokens:,} "
        f"tokens, the engine's first byte after {load.delay_ms:g} ms. Milliseconds:",
        highlight=False,
        soft_wrap=True,
    )
    head = (
        "case",
        "requests",
        "p50",
        "p99",
        "added p50",
        "added p99",
        "router ms",
        "others",
        "bar",
    )
    rows = []
    for each in results:
        row = [each.case, f"{each.requests:,}", f"{each.p50_ms:.1f}", f"{each.p99_ms:.1f}"]
        if each.case != overhead.ALONE:
            row += [f"{each.added_p50_ms:.1f}", f"{each.added_p99_ms:.1f}", f"{each.router_ms:.2f}"]
            row += [f"{each.others * 100:.0f} %", "met" if each.met else "NOT MET"]
        rows.append(row + [""] * (len(head) - len(row)))
    console.print(table(head, rows))
    console.print(f"The bar: p99 at most {overhead.P99_ADDED_MS:g} ms added.", highlight=False)


def _print_real(ran: real.RealRun) -> None:
    console = Console(width=160)
    head = (
        "case",
        "requests",
        "hit tokens",
        "first token p50 ms",
        "p99 ms",
        "requests a second",
        "wrong",
        "busy",
        "others",
    )
    rows = [
        (
            each.case,
            f"{each.requests}",
            f"{each.hit_tokens:,} of {each.prompt_tokens:,}",
            f"{each.p50_ms:.0f}",
            f"{each.p99_ms:.0f}",
            f"{each.per_second:.2f}",
            f"{each.wrong}",
            f"{each.busy * 100:.0f} %",
            f"{each.others * 100:.0f} %",
        )
        for each in ran.results
    ]
    console.print(table(head, rows))
    console.print(
        table(
            ("first token p50 ms", "measured", "simulated", "router", "policy", "ratio", "bar"),
            [
                (
                    each.case,
                    f"{each.measured_ms:.0f}",
                    f"{each.predicted_ms:.0f}",
                    f"{each.router_ms:.0f}",
                    each.policy,
                    f"{each.ratio:.2f}",
                    "met" if each.met else "NOT MET",
                )
                for each in ran.predictions
            ],
        )
    )
    for connector, rates in ran.rates.items():
        share = f"idle engines take {ran.idle[connector] * 100:.0f} % of the processors"
        said = msgspec.json.encode(rates).decode()
        console.print(f"{connector}: {share}; rates: {said}", soft_wrap=True, highlight=False)


def _print_trace(found: list[trace.Comparison]) -> None:
    console = Console(width=160)
    names = trace.NAMES
    head = ("load", *(f"hit %: {n}" for n in names), *(f"p90 s: {n}" for n in names))
    console.print(
        table(
            head,
            [
                (
                    f"{each.speed:g}",
                    *(f"{each.hit_rate[name] * 100:.1f}" for name in names),
                    *(f"{each.p90_seconds[name]:.2f}" for name in names),
                )
                for each in found
            ],
        )
    )
    for bar in trace.BARS:
        ratios = [(each.speed, bar.ratio(each)) for each in found]
        said = ", ".join(
            f"{ratio:.2f} at load {speed:g}{'' if bar.met(ratio) else ' NOT MET'}"
            for speed, ratio in ratios
        )
        console.print(f"{bar.what}, asked {bar.asked}: {said}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app()
