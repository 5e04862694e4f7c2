"""What came of the faults so far."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field


class Broken(Exception):
    """Something that must never be."""


@dataclass
class Outcomes:
    """Counts by fault, of so many rounds as were `played`."""

    columns: tuple[str, ...]
    played: int = 0
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
