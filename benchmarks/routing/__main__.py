# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.routing`: see the package."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.report import tell
from benchmarks.routing import overhead, real, trace
from kvferry.cli.console import Commands, Json, refusals
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
    most_others: Annotated[
        float, typer.Option(help="overhead: other programs' share, in a round that counts.")
    ] = 1.0,
    vllm_router: Annotated[
        Path | None, typer.Option(help="engines: vllm-router's program, to compare with.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--trace", help="trace: JSON lines (docs/routing.md).")
    ] = None,
    speed: Annotated[
        list[float] | None, typer.Option(help="trace: times its load; may be repeated.", min=1e-6)
    ] = None,
    as_json: Json = False,
) -> None:
    """What the router costs, and what it gains."""
    told: Any
    with refusals():
        if part is Part.OVERHEAD:
            load = overhead.Load(per_second, seconds, rounds, most_others=most_others)
            results = overhead.measure(load)
            told, shown = overhead.as_json(load, results), overhead.tables(load, results)
        elif part is Part.ENGINES:
            ran = real.measure(rounds, vllm_router)
            told, shown = real.as_json(ran), real.tables(ran)
        elif file is None:
            raise DescriptionError("the part trace needs a trace: name it with --trace")
        else:
            found = trace.compare(file, speed or [1.0, 2.0, 3.0, 4.0])
            told, shown = trace.as_json(found), trace.tables(found)
    tell(told, as_json, *shown)


if __name__ == "__main__":
    app()
