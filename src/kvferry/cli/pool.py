# SPDX-License-Identifier: Apache-2.0
"""`kvferry pool`: show and change the embedded store of this host while engines use it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kvferry.cli.console import Commands, Json, err, print_json, print_table, refusals
from kvferry.errors import StoreError
from kvferry.pool.embedded.disk import DISK_LINK
from kvferry.pool.embedded.index import peek
from kvferry.pool.embedded.store import EmbeddedStore, default_directory
from kvferry.units import parse_size, show_bytes, show_seconds

app = Commands(help="Show, check and shrink the embedded store of this host.", no_args_is_help=True)

Directory = Annotated[
    Path | None, typer.Option("--dir", help="The store's directory (default: this user's).")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
LONG_SECONDS = 3600.0


@contextmanager
def _opened(directory: Path | None) -> Iterator[EmbeddedStore]:
    """Open an existing store with its own sizes. Never creates a store."""
    with refusals():
        place = directory or default_directory()
        found = peek(place / "index")
        if found is None:
            raise StoreError(
                f"there is no store at {place}; name its directory with --dir, or start an engine "
                "with FerryPoolConnector"
            )
        disk = place / DISK_LINK if found.disk_bytes else None
        if disk is not None and not disk.exists():
            raise StoreError(f"the disk tier of the store at {place} is not there: {disk}")
        store = EmbeddedStore(place, found.memory_bytes, disk, found.disk_bytes, slots=found.slots)
        with closing(store):
            yield store


@app.command()
def stats(directory: Directory = None, as_json: Json = False) -> None:
    """Show what the store holds, and its counters."""
    with _opened(directory) as store:
        counters, learned = store.counters(), store.learned()
    if as_json:
        print_json({**counters, "policy": learned})
        return
    for name, value in {**counters, **learned}.items():
        shown = show_bytes(value) if "bytes" in name else f"{value:,.10g}"
        print(f"{name:24} {shown}")


@app.command("ls")
def list_objects(
    directory: Directory = None,
    limit: Annotated[int, typer.Option(help="Most objects to list.", min=0)] = 50,
    as_json: Json = False,
) -> None:
    """List objects, the next to be evicted first."""
    with _opened(directory) as store:
        listed = list(itertools.islice(store.listed(), limit))
    if as_json:
        print_json([asdict(one) for one in listed])
        return
    rows = [
        (o.key, f"{o.bytes:,}", o.tier, str(o.turns), str(o.depth), show_seconds(o.idle_seconds))
        for o in listed
    ]
    print_table(["key", "bytes", "tier", "turns", "depth", "idle"], rows)


@app.command()
def verify(directory: Directory = None, as_json: Json = False) -> None:
    """Check every object, remove damaged ones. Status 1: some were; 2: some cannot be read."""
    with _opened(directory) as store:
        found = store.verify(time.monotonic() + LONG_SECONDS)
    if as_json:
        print_json({"good": found.good, "corrupt": found.corrupt, "unread": found.unread})
    else:
        print(
            f"{found.good:,} objects are intact, {found.corrupt:,} were damaged and are removed"
            + (f", {found.unread:,} could not be read" if found.unread else "")
        )
    if found.why:
        err.print(f"not read: {escape(found.why)}", highlight=False, soft_wrap=True)
    raise typer.Exit(1 if found.corrupt else 2 if found.unread else 0)


@app.command()
def evict(
    size: Annotated[str, typer.Argument(help="How much to free: 80GB, 512MB, ...")],
    directory: Directory = None,
    yes: Yes = False,
) -> None:
    """Remove the least valuable objects."""
    with refusals():
        wanted = parse_size(size)
    with _opened(directory) as store:
        _ask(store, f"Free {show_bytes(wanted)}", yes)
        count = store.evict(wanted, time.monotonic() + LONG_SECONDS)
    print(f"removed {count:,} objects")


@app.command()
def clear(directory: Directory = None, yes: Yes = False) -> None:
    """Remove all objects."""
    with _opened(directory) as store:
        _ask(store, "Remove all of them", yes)
        count = store.clear(time.monotonic() + LONG_SECONDS)
    print(f"removed {count:,} objects")


def _ask(store: EmbeddedStore, what: str, yes: bool) -> None:
    """Name the store and its size, and ask. A no ends the command."""
    found = store.counters()
    memory, disk = (show_bytes(found[f"{tier}_bytes"]) for tier in ("memory", "disk"))
    err.print(
        f"The store at {store.directory} has {found['objects']:,} objects: {memory} in memory, "
        f"{disk} on disk.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if not yes:
        try:
            typer.confirm(f"{what}?", abort=True, err=True)
        except typer.Abort:
            raise StoreError("nothing was removed; answer y, or say --yes in a script") from None
