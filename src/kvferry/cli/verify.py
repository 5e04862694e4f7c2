"""`kvferry verify`: the sweep with a progress bar, and its result as a table or as JSON."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvferry.cli.console import print_json
from kvferry.verify.sweep import Report, Result, check, run

SHOWN_MISMATCHES = 5


def run_sweep(pairs: int, seed: int, processes: int, replay: int | None, as_json: bool) -> bool:
    """Run the sweep, or replay one pair. Returns whether all pairs agreed."""
    console = Console(stderr=as_json)
    if replay is not None:
        result = check(seed, replay)
        if as_json:
            print_json({"seed": seed, **asdict(result)})
        return _replay(console, result)
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
        _print(console, report, seed)
    return report.mismatches == 0


def _replay(console: Console, result: Result) -> bool:
    outcome = result.mismatch or ("refused, rightly" if result.refused else "agrees")
    console.print(f"pair {result.index}: {outcome}", highlight=False, markup=False)
    console.print(f"features: {', '.join(result.features)}", highlight=False)
    return not result.mismatch


def _print(console: Console, report: Report, seed: int) -> None:
    table = Table("share of pairs", "", box=None, header_style="bold", pad_edge=False)
    for name, share in report.mix.items():
        table.add_row(name, f"{share:.1%}")
    console.print(table)
    console.print(
        f"\n{report.pairs:,} pairs, {report.mismatches} mismatches, "
        f"{report.refused:,} refused rightly, {report.seconds:.1f} s",
        highlight=False,
    )
    for detail in report.to_dict()["details"][:SHOWN_MISMATCHES]:
        console.print(f"pair {detail['index']}: {detail['what']}", highlight=False, markup=False)
        console.print(f"  replay: kvferry verify --seed {seed} --replay {detail['index']}")
