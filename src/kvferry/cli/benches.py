"""`kvferry bench …`: one command for each measurement."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

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
from kvferry.units import parse_sizes

Carriers = Annotated[str, typer.Option(help="Which ones, with commas; else all that there are.")]

bench = typer.Typer(help="Measure, side by side with what else is installed.", no_args_is_help=True)


def _names(text: str) -> list[str]:
    """Of `--carriers`; none where it was not given."""
    names = [name.strip() for name in text.split(",")] if text else []
    if not all(names):
        raise DescriptionError(f"cannot read the carriers {text!r}; write local,tcp")
    return names


def _refuse_with(option: str, others: dict[str, bool]) -> None:
    """What would be ignored is refused."""
    given = [name for name, there in others.items() if there]
    if given:
        what = "them" if len(given) > 1 else "it"
        raise DescriptionError(f"{option} takes no {' and no '.join(given)}; leave {what} out")


@bench.command("plan")
def bench_plan(
    as_json: Json = False,
    html: Html = None,
    quick: Annotated[bool, typer.Option(help="Fewer cases and repeats.")] = False,
) -> None:
    """Planning speed, beside vLLM's planner where it is installed."""
    from kvferry.bench.plan import run
    from kvferry.cli.bench import plan_bench_page, print_plan_bench

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
    carriers: Carriers = "",
    as_json: Json = False,
    html: Html = None,
) -> None:
    """What the carriers move, beside their libraries, memcpy and a plain socket in one run."""
    from kvferry.bench.transport import DEFAULT_SIZES, lines, run

    with refusals():
        chosen = parse_sizes(sizes) if sizes else list(DEFAULT_SIZES)
        names = _names(carriers)
        with libraries_to_stderr():
            result = run(chosen, seconds, names)
    if as_json:
        print_json(asdict(result))
    else:
        for line in lines(result):
            print(line)
    if html is not None:
        from kvferry.cli.bench import transport_bench_page

        keep_page(html, transport_bench_page(result), "plot")


@bench.command("stall")
def bench_stall(
    blocks: Annotated[int, typer.Option(help="Blocks of the request.", min=1)] = 8192,
    as_json: Json = False,
) -> None:
    """The longest that a hand-over holds up an engine's step, beside vLLM's MooncakeConnector."""
    from kvferry.bench.stall import TARGET_RATIO, run

    with refusals(), libraries_to_stderr():
        result = run(blocks)
    if as_json:
        print_json(asdict(result))
        return
    print(f"{result.descriptors:,} descriptors, handed over in {result.kvferry_seconds:.2f} s")
    print(f"longest stall of a step: {result.kvferry_ms:.2f} ms")
    if result.vllm_ms is not None and result.ratio is not None:
        print(f"vLLM's MooncakeConnector: {result.vllm_ms:.0f} ms, {result.ratio:.0f} x as long")
        print(f"  {'yes' if result.met else 'NO'}  at least {TARGET_RATIO} times shorter")


@bench.command("pool")
def bench_pool(
    trace: Annotated[
        Path | None, typer.Option(help="JSON lines with timestamp and hash_ids (prefix blocks).")
    ] = None,
    as_json: Json = False,
    html: Html = None,
    quick: Annotated[bool, typer.Option(help="Fewer capacities and repeats.")] = False,
    tune: Annotated[
        bool, typer.Option(help="Choose the eviction policy's constants on the first half instead.")
    ] = False,
) -> None:
    """Hit rates, lookups and bandwidth of the pool's stores, beside LRU, memcpy, LMDB, Mooncake."""
    from kvferry.bench.pool import run
    from kvferry.cli.bench_pool import pool_bench_page, print_pool_bench, tune_pool

    if tune:
        with refusals():
            _refuse_with("--tune", {"--quick": quick, "--html": html is not None})
            tune_pool(trace, as_json)
        return
    with refusals(), libraries_to_stderr():
        result = run(trace, lambda line: err.print(line, style="dim", highlight=False), quick=quick)
    if as_json:
        print_json(asdict(result))
    else:
        print_pool_bench(Console(), result)
    if html is not None:
        keep_page(html, pool_bench_page(result), "plot")


@bench.command("handover")
def bench_handover(
    requests: Annotated[int, typer.Option(help="Measured, for each connector.", min=1)] = 20,
    tokens: Annotated[int, typer.Option(help="Of each prompt.", min=1)] = 1000,
    only: Annotated[list[str] | None, typer.Option(help="Names of connectors.")] = None,
    as_json: Json = False,
) -> None:
    """Prefill to decode between real engines, beside vLLM's own connectors."""
    from kvferry.bench.handover import run
    from kvferry.cli.bench_handover import print_handover

    with refusals(), libraries_to_stderr():
        results = run(
            requests, tokens, only or (), lambda line: err.print(line, style="dim", markup=False)
        )
    if as_json:
        print_json([asdict(result) for result in results])
        return
    print_handover(results)
