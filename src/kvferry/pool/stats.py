"""Counters of a pool's user: what was asked, moved, and what went wrong, each thing once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping


class PoolCounters:
    """Named counts that any thread may add to. `take` gives what was added since the last time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total: Counter[str] = Counter()
        self._new: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._total[name] += count
            self._new[name] += count

    def add_all(self, counts: Mapping[str, int]) -> None:
        with self._lock:
            self._total.update(counts)
            self._new.update(counts)

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._total[name]

    def take(self) -> dict[str, int]:
        with self._lock:
            taken, self._new = dict(self._new), Counter()
        return taken

    def all(self) -> dict[str, int]:
        with self._lock:
            return dict(self._total)
