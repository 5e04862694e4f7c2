# SPDX-License-Identifier: Apache-2.0
"""What a run found: printed and written row by row, so that a killed run leaves what it had."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Verdict:
    bar: str
    wanted: str
    found: str
    met: bool


@dataclass(slots=True)
class Report:
    path: Path
    about: dict[str, Any]
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by table
    verdicts: list[Verdict] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)

    def row(self, table: str, samples: dict[str, Any] | None = None, **cells: Any) -> None:
        """One row. `samples` are written but not printed."""
        rows = self.rows.setdefault(table, [])
        if not rows or list(rows[-1])[: len(cells)] != list(cells):
            print(f"\n**{table}**\n\n| {' | '.join(_title(name) for name in cells)} |")
            print("|" + "---|" * len(cells))
        print(f"| {' | '.join(_cell(cell) for cell in cells.values())} |", flush=True)
        rows.append({**cells, **({"samples": samples} if samples else {})})
        self.write()

    def failed(self, table: str, who: str, why: str) -> None:
        self.say(f"{table}: {who}: {why}")
        self.rows.setdefault(f"{table}, not measured", []).append({"who": who, "why": why})
        self.write()

    def judge(
        self,
        bar: str,
        found: float,
        form: str,
        *,
        least: float | None = None,
        most: float | None = None,
        note: str = "",
    ) -> None:
        """Whether `found` is at least or at most so much; `form` writes the numbers."""
        if least is not None:
            met, wanted = found >= least, f"at least {form.format(least)}"
        else:
            assert most is not None
            met, wanted = found <= most, f"at most {form.format(most)}"
        told = f"{form.format(found)}{note}"
        self.verdicts.append(Verdict(bar, wanted, told, met))
        self.say(f"{'met' if met else 'NOT MET'}: {bar}: wanted {wanted}, found {told}")
        self.write()

    def write(self) -> None:
        told = {**self.about, "seconds": time.monotonic() - self.began, "tables": self.rows}
        told["verdicts"] = [asdict(one) for one in self.verdicts]
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps(told, indent=1))
        beside.replace(self.path)


def middle(values: Sequence[float]) -> float:
    """The median, without the first where there are more than two: it warms up."""
    kept = values[1:] if len(values) > 2 else values
    return statistics.median(kept) if kept else 0.0


def _title(name: str) -> str:
    return name.replace("_", " ")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
