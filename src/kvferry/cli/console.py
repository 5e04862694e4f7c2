# SPDX-License-Identifier: Apache-2.0
"""Printing and error messages of all commands."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from kvferry.errors import DescriptionError, KvferryError

err = Console(stderr=True)
Command = TypeVar("Command", bound=Callable[..., Any])

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a self-contained page here.")]


class Commands(typer.Typer):
    """Commands whose help shows flags without a type: a flag takes no value."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            cls=_Group, add_completion=False, pretty_exceptions_enable=False, **settings
        )

    def command(self, *names: Any, **settings: Any) -> Callable[[Command], Command]:
        return super().command(*names, cls=_Command, **settings)


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> Any:
        return _flags_without_type(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> Any:
        return _flags_without_type(super().get_params(ctx))


def _flags_without_type(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


@contextmanager
def refusals() -> Iterator[None]:
    """Print kvferry's errors as one paragraph without a stack trace, and exit with status 2."""
    try:
        yield
    except (KvferryError, MemoryError) as error:
        said = str(error) or "not enough memory"
        err.print(f"[bold red]error:[/] {escape(said)}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


@contextmanager
def libraries_to_stderr() -> Iterator[None]:
    """Send libraries' output to standard error, so that standard output has only results."""
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
    tight = len(head) > 9  # one space between columns, so that they fit a terminal of 80
    made = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=tight)
    for index, title in enumerate(head):
        made.add_column(title, justify="left" if index < words else "right")
    for row in rows:
        made.add_row(*map(escape, row))
    return made


def keep_page(path: Path, page: str, what: str) -> None:
    """Write a page to a file, make its folders, and say where it is."""
    with refusals():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(page, encoding="utf-8")
        except OSError as error:
            raise DescriptionError(f"cannot write the {what} to {path}: {error.strerror}") from None
    err.print(f"{what}: {path}", highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
