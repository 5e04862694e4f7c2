# SPDX-License-Identifier: Apache-2.0
"""The command line: `kvferry plan | check | demo | verify | bench | models | doctor …`.

Commands that load much import it when they run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvferry import __version__
from kvferry.cli import pool, router
from kvferry.cli.bench import bench
from kvferry.cli.check import check
from kvferry.cli.console import Commands, Json, refusals
from kvferry.cli.demo import demo
from kvferry.cli.plan import models, plan
from kvferry.cli.simulate import simulate
from kvferry.cli.verify import verify

app = Commands(
    help="Moves and shares KV caches between LLM engines of any shape.", no_args_is_help=True
)
for command in (plan, check, demo, verify, models, simulate):
    app.command()(command)
app.add_typer(bench, name="bench")
app.add_typer(pool.app, name="pool")
app.add_typer(router.app, name="router")


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


@app.command()
def doctor(
    peer: Annotated[str | None, typer.Option(help="Directory of an engine, host:port.")] = None,
    carriers: Annotated[str, typer.Option(help="Carriers you configured, with commas.")] = "",
    options: Annotated[
        str, typer.Option(help="JSON: the carrier_options that you configured.")
    ] = "",
    host: Annotated[str | None, typer.Option(help="The `host` that you configured.")] = None,
    secret_file: Annotated[Path | None, typer.Option(help="Else KVFERRY_SECRET.")] = None,
    between: Annotated[
        tuple[str, str] | None,
        typer.Option(help="Two reports of `doctor --json`, or `here`: what would be chosen."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what is installed, permitted and reachable, with advice for what is missing."""
    from kvferry.cli.doctor import doctor as examine
    from kvferry.cli.doctor import read_settings

    with refusals():
        settings = read_settings(carriers, options, host, secret_file)
        status = examine(settings, peer, between, as_json)
    raise typer.Exit(status)
