# SPDX-License-Identifier: Apache-2.0
"""`kvferry check`: what an engine would refuse of its configuration, within a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kvferry import SUPPORTED_VLLM
from kvferry.cli.console import Json, print_json
from kvferry.errors import KvferryError
from kvferry.layout.hf import load_model


def check(
    config: Annotated[str, typer.Argument(help="The JSON of --kv-transfer-config, or @FILE.")],
    model: Annotated[
        str | None,
        typer.Option(help="A preset (see `kvferry models`) or a config.json, as for `plan`."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show all that an engine would refuse, before it starts; exit with status 1 if anything."""
    from kvferry.vllm.check import notes, refusals

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
            with notes() as said:
                found += refusals(transfer)
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
        _print(found, said)
    raise typer.Exit(1 if found else 0)


def _print(found: list[str], said: list[str]) -> None:
    console = Console()
    for line in found:
        console.print(f"[bold red]refused[/]  {escape(line)}", highlight=False, soft_wrap=True)
    for line in said:
        console.print(f"[yellow]note[/]     {escape(line)}", highlight=False, soft_wrap=True)
    if not found:
        versions = ", ".join(f"{version}x" for version in SUPPORTED_VLLM)
        console.print(f"[green]ok[/]       for vLLM {versions}", highlight=False)
