# SPDX-License-Identifier: Apache-2.0
"""Printing and error messages of all commands."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.errors import DescriptionError, KvferryError

err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a self-contained page here.")]


@contextmanager
def refusals() -> Iterator[None]:
    """Print kvferry's errors as one paragraph without a stack trace, and exit with status 2."""
    try:
        yield
    except (KvferryError, MemoryError) as error:
        said = str(error) or "not enough memory"
        words = f"[bold red]{type(error).__name__}[/]: {escape(said)}"
        err.print(words, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


@contextmanager
def libraries_to_stderr() -> Iterator[None]:
    """Send what libraries print to standard error, so that standard output has only results."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def say(line: str) -> None:
    """Show progress on standard error."""
    err.print(line, style="dim", highlight=False)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> Table:
    """A table whose first `words` columns are words; all others are numbers."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    for index, title in enumerate(head):
        made.add_column(title, justify="left" if index < words else "right")
    for row in rows:
        made.add_row(*map(escape, row))
    return made


def keep_page(path: Path, page: str, what: str) -> None:
    with refusals():
        write_page(path, page, what)
        err.print(f"{what}: {path}", highlight=False)


def write_page(path: Path, page: str, what: str) -> None:
    """Write a page to a file, and make its folders."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DescriptionError(
            f"cannot write the {what} to {path}: {error.strerror}; name a file that can be written"
        ) from None


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
