# SPDX-License-Identifier: Apache-2.0
"""Printing and error messages of all commands."""

from __future__ import annotations

import errno
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
from rich.measure import Measurement
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from kvferry.errors import DescriptionError, KvferryError

err = Console(stderr=True)
Command = TypeVar("Command", bound=Callable[..., Any])

WIDEST = 1000  # columns of a table that no terminal has room for
OUT = Path("out")  # the only folder that is made for pages


def require_page(page: Path | None) -> Path | None:
    """Refuse a page that cannot be written before the work begins, not after it."""
    if page is None:
        return None
    if os.access(f"{page}/.", os.F_OK):
        raise typer.BadParameter(f"{page} is a folder; name a file")
    folder = page.parent if page.parent != OUT or OUT.exists() else OUT.parent
    if not os.access(f"{folder}/.", os.W_OK | os.X_OK):  # "/.": nothing but a folder has it
        raise typer.BadParameter(
            f"the folder {folder} does not exist, or is not writable; name a file in another one"
        )
    return page


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Html = Annotated[
    Path | None,
    typer.Option("--html", help="Write a self-contained page here.", callback=require_page),
]


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
    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                print(end="", flush=True)  # or the interpreter would, after the last handler
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), 1)  # for what is left of the output
            err.print(f"[bold red]error:[/] cannot write the output: {error.strerror}")
            raise typer.Exit(2) from None

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


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> None:
    """A table whose first `words` columns are words; all others are numbers.

    Where the terminal is too narrow, sentences wrap, then lines do. All else stays whole.
    """
    tight = len(head) > 9  # one space between columns, so that they fit a terminal of 80
    made = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=tight)
    for index, (title, *cells) in enumerate(zip(head, *(rows := [*rows]), strict=True)):
        wraps = index < words and any(" " in cell for cell in cells)
        widest = max(len(line) for text in (title, *cells) for line in text.split("\n"))
        made.add_column(
            title,
            justify="left" if index < words else "right",
            overflow="fold",
            no_wrap=not wraps,
            min_width=None if wraps else widest,
        )
    for row in rows:
        made.add_row(*map(escape, row))
    console = Console()
    least = Measurement.get(console, console.options.update(max_width=WIDEST), made).minimum
    Console(width=max(console.width, least)).print(made)


def keep_page(path: Path, page: str, what: str) -> None:
    """Write a page to a file, and say where it is."""
    with refusals():
        try:
            if path.parent == OUT:
                OUT.mkdir(exist_ok=True)
            path.write_text(page, encoding="utf-8")
        except OSError as error:
            raise DescriptionError(
                f"cannot write the {what} to {path}: {error.strerror}; name another file with "
                "--html"
            ) from None
    err.print(f"{what}: {path}", highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
