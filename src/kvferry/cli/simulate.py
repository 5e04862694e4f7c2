# SPDX-License-Identifier: Apache-2.0
"""`kvferry simulate`: a trace through policies and modelled engines, as a table, JSON or a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast

import msgspec
import typer
from rich.console import Console

from kvferry.cli.console import Html, Json, keep_page, print_table, refusals
from kvferry.cli.page import Curve, Page, TableSheet, plot
from kvferry.errors import DescriptionError
from kvferry.simulate.engine import MEASURED, read_rates
from kvferry.simulate.run import POLICIES, FleetShape, Plan, Policy, SimulationResult
from kvferry.simulate.run import simulate as run_one
from kvferry.simulate.trace import Trace, read_trace

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # of policies
HEAD = (
    *("policy", "load", "req/s", "hit %", "first s\np50", "p90", "p99"),
    *("token ms\np50", "p99", "good %", "good/s"),
)
FULL_HEAD = (*HEAD, "gap ms p99", "handed over %", "refused")


def simulate(
    trace: Annotated[Path, typer.Option(help="JSON lines: Mooncake's traces, or ours (docs).")],
    engines: Annotated[str, typer.Option(help="8 (each does both), or 4P4D.")] = "8",
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(POLICIES)}, or all; may be repeated (default: cost)."),
    ] = None,
    speed: Annotated[
        list[float] | None,
        typer.Option(help="Times as fast as the trace; may be repeated.", min=1e-6),
    ] = None,
    rates: Annotated[
        Path | None, typer.Option(help="Costs of an engine, as JSON (default: 8B on an H200).")
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(help="Blocks of an engine's cache (default: by the rates).", min=1)
    ] = None,
    pool_blocks: Annotated[int, typer.Option(help="Blocks of a pool that all share.", min=0)] = 0,
    requests: Annotated[int | None, typer.Option(help="Use only this many.", min=1)] = None,
    first_token_ms: Annotated[float, typer.Option(help="Limit of a good request.")] = 2000.0,
    token_ms: Annotated[float, typer.Option(help="Its limit for each later token.")] = 50.0,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal results.")] = 1,
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Replay a trace through the router's choice over modelled engines, before buying them."""
    with refusals():
        policies = _policies(policy or ["cost"])
        plan = Plan(
            policy=policies[0],
            shape=FleetShape.read(engines),
            rates=read_rates(rates or MEASURED),
            blocks=blocks,
            pool_blocks=pool_blocks,
            seed=seed,
            first_token_seconds=first_token_ms / 1000,
            token_seconds=token_ms / 1000,
        )
        read = read_trace(trace, requests)
        runs = [
            run_one(read, replace(plan, policy=name, speed=times))
            for times in speed or [1.0]
            for name in policies
        ]
        about = _about(read, plan)
        if html is not None:
            page = result_page(f"{trace.name} on {plan.shape} engines", about, runs)
            keep_page(html, page.html(), "page")
    if as_json:
        # msgspec writes nan as null: answers of one token have no time for later ones.
        print(msgspec.json.encode({"about": about, "runs": runs}).decode())
        return
    console = Console()
    for line in about:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    print_table(HEAD, [_row(run) for run in runs])
    real = sum(run.real_seconds for run in runs)
    count = sum(run.requests for run in runs)
    console.print(f"{count:,} requests in {real:.1f} s", highlight=False)


def _policies(names: list[str]) -> list[Policy]:
    if names == ["all"]:
        return list(POLICIES)
    for name in names:
        if name not in POLICIES:
            raise DescriptionError(
                f"{name!r} is no policy; there are: {', '.join(POLICIES)}, and all"
            )
    return cast(list[Policy], list(dict.fromkeys(names)))


def _about(trace: Trace, plan: Plan) -> list[str]:
    size, rates, pool = trace.block_tokens, plan.rates, plan.pool_blocks
    blocks = plan.blocks or int(rates.cache_bytes / rates.bytes_per_token / size)
    first_ms, token_ms = 1000 * plan.first_token_seconds, 1000 * plan.token_seconds
    lines = [
        f"{len(trace.requests):,} requests over {trace.seconds:,.0f} s. {plan.shape} engines, each "
        f"with a cache of {blocks:,} blocks of {size} tokens"
        + (f", and a pool of {pool:,} blocks." if pool else "."),
        f"Good: first token within {first_ms:g} ms, {token_ms:g} ms for each later one.",
    ]
    if rates.about:
        measured = f" Measured by: {rates.command}" if rates.command else ""
        lines.append(f"Rates: {rates.about}.{measured}")
    return lines


def result_page(title: str, about: Sequence[str], runs: Sequence[SimulationResult]) -> Page:
    """Plots by load, and a table."""

    def by_load(y_title: str, of: Callable[[SimulationResult], float], log: bool = False) -> str:
        points: dict[str, list[tuple[float, float]]] = {run.policy: [] for run in runs}
        for run in sorted(runs, key=lambda run: run.speed):
            points[run.policy].append((run.offered_per_second, of(run)))
        curves = [
            Curve(name, colour, found)
            for (name, found), colour in zip(points.items(), COLOURS, strict=False)
        ]
        return plot(curves, "requests a second", y_title, log_y=log)

    plots = [
        ("First token, 90th percentile", by_load("s", lambda r: r.first_token.p90, True)),
        ("Prompt tokens from a cache", by_load("%", lambda r: 100 * r.hit_rate)),
        ("Good requests", by_load("%", lambda r: 100 * r.good_share)),
    ]
    sheet = TableSheet("Results", FULL_HEAD, [_full_row(run) for run in runs])
    return Page(title, title, " ".join(about), [sheet], (), plots)


def _row(result: SimulationResult) -> list[str]:
    """The cells of `HEAD`."""
    first, token = result.first_token, result.token
    return [
        result.policy,
        f"{result.speed:g}",
        f"{result.offered_per_second:.2f}",
        f"{100 * result.hit_rate:.1f}",
        *(f"{seconds:.3g}" for seconds in (first.p50, first.p90, first.p99)),
        *(f"{1000 * seconds:.1f}" for seconds in (token.p50, token.p99)),
        f"{100 * result.good_share:.1f}",
        f"{result.good_per_second:.2f}",
    ]


def _full_row(result: SimulationResult) -> list[str]:
    """The cells of `FULL_HEAD`."""
    handed_over = f"{100 * result.handed_over / (result.requests - result.refused):.0f}"
    return [*_row(result), f"{1000 * result.gap.p99:.1f}", handed_over, str(result.refused)]
