# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: verdicts on targets, and tables that a killed run leaves behind."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvferry.cli.console import print_json
from kvferry.cli.page import Page, TableSheet


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target, and whether it was met."""

    bar: str
    wanted: str
    found: str
    met: bool

    def __str__(self) -> str:
        word = "met" if self.met else "NOT MET"
        return f"{word}: {self.bar}: wanted {self.wanted}, found {self.found}"


def at_least(bar: str, found: float, wanted: float, form: str, note: str = "") -> Verdict:
    """`form` writes the numbers; `note` follows what was found."""
    told = f"{form.format(found)}{note}"
    return Verdict(bar, f"at least {form.format(wanted)}", told, found >= wanted)


def at_most(bar: str, found: float, wanted: float, form: str, note: str = "") -> Verdict:
    told = f"{form.format(found)}{note}"
    return Verdict(bar, f"at most {form.format(wanted)}", told, found <= wanted)


def sheet(title: str, rows: Iterable[object], columns: Mapping[str, str]) -> TableSheet:
    """A table of records. Each column is a template of their fields, as "{r.requests:,}"."""
    cells = [[form.format(r=row) for form in columns.values()] for row in rows]
    return TableSheet(title, list(columns), cells)


Shown = tuple[Sequence[TableSheet], Sequence[object]]  # tables, and lines below them


def tell(result: Any, as_json: bool, sheets: Sequence[TableSheet], notes: Sequence[object]) -> None:
    """The result as one JSON value, or as tables, with the notes below them."""
    if as_json:
        print_json(result)
    else:
        Page("", "", "", sheets, [str(note) for note in notes], ()).print()


@dataclass(slots=True)
class Report:
    """Tables in Markdown: printed row by row, and written after each of them, as a document and,
    with all samples, as JSON."""

    path: Path  # of the JSON
    about: dict[str, Any]
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by table
    verdicts: list[Verdict] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)

    def row(self, table: str, samples: dict[str, Any] | None = None, **cells: Any) -> None:
        """One row. `samples` are in the JSON alone."""
        rows = self.rows.setdefault(table, [])
        if not rows or list(rows[-1])[: len(cells)] != list(cells):
            print("", *_head(table, cells), sep="\n")
        print(_line(cells.values()), flush=True)
        rows.append({**cells, **({"samples": samples} if samples else {})})
        self.write()

    def failed(self, table: str, who: str, why: str) -> None:
        self.say(f"{table}: {who}: {why}")
        self.rows.setdefault(f"{table}, not measured", []).append({"who": who, "why": why})
        self.write()

    def judge(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        self.say(f"{verdict}")
        self.write()

    def write(self) -> None:
        told = {**self.about, "seconds": time.monotonic() - self.began, "tables": self.rows}
        told["verdicts"] = [asdict(one) for one in self.verdicts]
        _replace(self.path, json.dumps(told, indent=1))
        document: list[str] = []
        for name, rows in self.rows.items():
            shown = [{k: v for k, v in row.items() if k != "samples"} for row in rows]
            document += [*_head(name, shown[0]), *(_line(row.values()) for row in shown), ""]
        document += [f"- {one}" for one in self.verdicts]
        _replace(self.path.with_suffix(".md"), "\n".join(document) + "\n")


def _replace(path: Path, text: str) -> None:
    """A run that is killed leaves a whole file."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.replace(path)


def _head(table: str, cells: Iterable[str]) -> list[str]:
    titles = [name.replace("_", " ") for name in cells]
    return [f"**{table}**", "", _line(titles), "|" + "---|" * len(titles)]


def _line(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
