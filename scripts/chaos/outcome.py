"""What came of the faults so far, and the file that it is kept in, so that a run can go on."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path


class Broken(Exception):
    """Something that must never be."""


@dataclass
class Outcomes:
    """Counts by fault; `played` rounds of this seed are in them."""

    columns: tuple[str, ...]
    played: int = 0
    seconds: float = 0.0
    table: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    reasons: Counter[str] = field(default_factory=Counter)

    def count(self, fault: str, *what: str) -> None:
        self.table[fault].update(what)

    def lines(self) -> list[str]:
        width = 2 + max((len(fault) for fault in self.table), default=0)
        said = [f"{'fault':{width}}" + "".join(f"{c:>14.14}" for c in self.columns)]
        total: Counter[str] = Counter()
        for fault, counts in sorted(self.table.items()):
            total.update(counts)
            said.append(f"{fault:{width}}" + "".join(f"{counts[c]:>14}" for c in self.columns))
        said.append(f"{'all':{width}}" + "".join(f"{total[c]:>14}" for c in self.columns))
        if self.reasons:
            found = ", ".join(f"{reason} {count}" for reason, count in self.reasons.most_common())
            said.append(f"failed by: {found}")
        return said


@dataclass(frozen=True, slots=True)
class Kept:
    """A file of outcomes, by what was played."""

    path: Path

    def read(self, name: str, columns: tuple[str, ...]) -> Outcomes:
        stored = json.loads(self.path.read_text()).get(name) if self.path.exists() else None
        outcomes = Outcomes(columns)
        if stored:
            outcomes.played, outcomes.seconds = stored["played"], stored["seconds"]
            outcomes.reasons.update(stored["reasons"])
            for fault, counts in stored["table"].items():
                outcomes.table[fault].update(counts)
        return outcomes

    def write(self, name: str, outcomes: Outcomes) -> None:
        everything = json.loads(self.path.read_text()) if self.path.exists() else {}
        everything[name] = {
            "played": outcomes.played,
            "seconds": outcomes.seconds,
            "table": outcomes.table,
            "reasons": outcomes.reasons,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(everything, indent=1))
