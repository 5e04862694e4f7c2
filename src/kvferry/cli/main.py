# SPDX-License-Identifier: Apache-2.0
"""The command line: `kvferry plan | check | demo | verify | bench | models | doctor …`.

The short commands are here. Commands import large modules only when they run.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from kvferry import SUPPORTED_VLLM, __version__
from kvferry.cli import pool, router
from kvferry.cli.bench import bench
from kvferry.cli.console import Commands, Json, err, print_json, print_table, refusals
from kvferry.cli.demo import demo
from kvferry.cli.plan import models, plan
from kvferry.cli.simulate import simulate
from kvferry.errors import KvferryError
from kvferry.layout.hf import load_model

SHOWN_MISMATCHES = 5

app = Commands(
    help="Moves and shares KV caches between LLM engines of any shape.", no_args_is_help=True
)


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of the command itself."""


def check(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="The JSON of --kv-transfer-config, or @FILE.")
    ],
    model: Annotated[
        str | None,
        typer.Option(help="A preset (see `kvferry models`) or a config.json, as for `plan`."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what an engine would refuse of its configuration. Status 1: something."""
    from kvferry.vllm import check as engine

    found: list[str] = []
    said: list[str] = []
    try:
        text = Path(config[1:]).read_text("utf-8") if config.startswith("@") else config
        transfer = json.loads(text)
    except OSError as error:
        found.append(f"{config[1:]} cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        found.append(f"the configuration cannot be read as JSON: {error}")
    else:
        if isinstance(transfer, dict):
            with engine.notes() as said:
                found += engine.refusals(transfer)
        else:
            found.append(f"the configuration must be a JSON object, found {transfer!r:.100}")
    if model is not None:
        try:
            load_model(model)
        except KvferryError as error:
            found.append(f"model: {error}")
    if as_json:
        print_json({"refusals": found, "notes": said})
    else:
        lines = [f"[bold red]refused[/]  {escape(line)}" for line in found]
        lines += [f"[yellow]note[/]     {escape(line)}" for line in said]
        if not found:
            versions = ", ".join(f"{version}x" for version in SUPPORTED_VLLM)
            lines.append(f"[green]ok[/]       for vLLM {versions}")
        Console().print("\n".join(lines), highlight=False, soft_wrap=True)
    raise typer.Exit(1 if found else 0)


def verify(
    pairs: Annotated[int, typer.Option(help="Random pairs of shapes to check.", min=1)] = 1000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same pairs.")] = 1,
    processes: Annotated[int, typer.Option(help="Processes that share the work.", min=1)] = 2,
    replay: Annotated[
        int | None, typer.Option(help="Check only this one pair of the seed.", min=0)
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare the planner with a brute-force oracle, byte for byte."""
    good = (
        _sweep(pairs, seed, processes, as_json)
        if replay is None
        else _replay(seed, replay, as_json)
    )
    raise typer.Exit(0 if good else 1)


def _sweep(pairs: int, seed: int, processes: int, as_json: bool) -> bool:
    from kvferry.verify.sweep import run

    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("pairs", total=pairs)
        report = run(pairs, seed, processes, lambda done: bar.update(task, completed=done))
    if as_json:
        print_json(report.to_dict())
        return report.mismatches == 0
    console = Console()
    shares = [(name, f"{share:.1%}") for name, share in report.mix.items()]
    print_table(["share of pairs", ""], shares)
    console.print(
        f"\n{report.pairs:,} pairs, {report.mismatches} mismatches, "
        f"{report.refused:,} refused rightly, {report.seconds:.1f} s",
        highlight=False,
    )
    for detail in report.to_dict()["details"][:SHOWN_MISMATCHES]:
        console.print(f"pair {detail['index']}: {detail['what']}", highlight=False, markup=False)
        console.print(f"  replay: kvferry verify --seed {seed} --replay {detail['index']}")
    return report.mismatches == 0


def _replay(seed: int, pair: int, as_json: bool) -> bool:
    from kvferry.verify.sweep import check

    console, result = Console(stderr=as_json), check(seed, pair)
    if as_json:
        print_json({"seed": seed, **asdict(result)})
    outcome = result.mismatch or ("refused, rightly" if result.refused else "agrees")
    console.print(f"pair {result.index}: {outcome}", highlight=False, markup=False)
    console.print(f"features: {', '.join(result.features)}", highlight=False)
    return not result.mismatch


def doctor(
    peer: Annotated[str | None, typer.Option(help="Directory of an engine, host:port.")] = None,
    carriers: Annotated[str, typer.Option(help="Carriers you configured, with commas.")] = "",
    options: Annotated[
        str, typer.Option(help="JSON: the carrier_options that you configured.")
    ] = "",
    host: Annotated[str | None, typer.Option(help="The `host` that you configured.")] = None,
    secret_file: Annotated[Path | None, typer.Option(help="Else KVFERRY_SECRET.")] = None,
    as_json: Json = False,
) -> None:
    """Show what is installed, permitted and reachable, with advice for what is missing."""
    from kvferry.cli.doctor import doctor as examine
    from kvferry.cli.doctor import read_settings

    with refusals():
        settings = read_settings(carriers, options, host, secret_file)
        status = examine(settings, peer, as_json)
    raise typer.Exit(status)


for command in (demo, plan, models, check, doctor, verify, simulate):  # as help lists them
    app.command()(command)
for group, name in ((router.app, "router"), (pool.app, "pool"), (bench, "bench")):
    app.add_typer(group, name=name)
