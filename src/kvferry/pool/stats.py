"""Counters of a pool's user: what was asked, moved, and what went wrong, each thing once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

# All that is counted. Metrics show each from the start, so that an alert has a series to look at.
NAMES = """
lookups lookup_keys lookup_cached lookup_errors lookup_timeouts lookup_refused
lookup_servers_replaced hit_tokens
loads loaded_bytes load_failures load_errors load_hung load_bad_objects
load_done load_missing load_corrupt load_failed
save_jobs saved_bytes save_known save_done save_exists save_full save_declined save_failed
save_errors save_dropped save_postponed
layouts_published layouts_unpublished layouts_missing layouts_refused
"""
EVENTS = tuple(NAMES.split())


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
