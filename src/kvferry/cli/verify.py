# SPDX-License-Identifier: Apache-2.0
"""`kvferry verify`: the sweep with a progress bar, and its result as a table or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvferry.cli.console import Json, print_json, refusals, table
from kvferry.errors import DescriptionError
from kvferry.verify.sweep import Report, check, run

SHOWN_MISMATCHES = 5


def verify(
    pairs: Annotated[
        int | None, typer.Option(help="Random pairs of shapes to check (default: 1000).", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same pairs.")] = 1,
    processes: Annotated[int, typer.Option(help="Processes that share the work.", min=1)] = 2,
    replay: Annotated[
        int | None, typer.Option(help="Check this one pair of the seed.", min=0)
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare the planner with a brute-force oracle, byte for byte."""
    with refusals():
        if replay is not None and pairs is not None:
            raise DescriptionError("--replay checks one pair, and takes no --pairs; leave one out")
    if replay is None:
        good = _sweep(pairs or 1000, seed, processes, as_json)
    else:
        good = _replay(seed, replay, as_json)
    raise typer.Exit(0 if good else 1)


def _replay(seed: int, pair: int, as_json: bool) -> bool:
    console, result = Console(stderr=as_json), check(seed, pair)
    if as_json:
        print_json({"seed": seed, **asdict(result)})
    outcome = result.mismatch or ("refused, rightly" if result.refused else "agrees")
    console.print(f"pair {result.index}: {outcome}", highlight=False, markup=False)
    console.print(f"features: {', '.join(result.features)}", highlight=False)
    return not result.mismatch


def _sweep(pairs: int, seed: int, processes: int, as_json: bool) -> bool:
    with Progress(
        TextColumn("pairs"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("pairs", total=pairs)
        report = run(pairs, seed, processes, lambda done, _: bar.update(task, completed=done))
    if as_json:
        print_json(report.to_dict())
    else:
        _print(Console(), report, seed)
    return report.mismatches == 0


def _print(console: Console, report: Report, seed: int) -> None:
    shares = [(name, f"{share:.1%}") for name, share in report.mix.items()]
    console.print(table(["share of pairs", ""], shares))
    console.print(
        f"\n{report.pairs:,} pairs, {report.mismatches} mismatches, "
        f"{report.refused:,} refused rightly, {report.seconds:.1f} s",
        highlight=False,
    )
    for detail in report.to_dict()["details"][:SHOWN_MISMATCHES]:
        console.print(f"pair {detail['index']}: {detail['what']}", highlight=False, markup=False)
        console.print(f"  replay: kvferry verify --seed {seed} --replay {detail['index']}")
