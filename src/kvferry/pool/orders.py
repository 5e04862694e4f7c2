# SPDX-License-Identifier: Apache-2.0
"""The scheduler's orders to its ranks, their reports, and the pool's counters.

Orders and reports are plain values, which any engine can send between its processes.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from kvferry.pool.hits import Segment
from kvferry.pool.keys import KeyMetadata


@dataclass(frozen=True, slots=True)
class TableBlocks:
    """Whole blocks of one block table."""

    table: int
    numbers: tuple[int, ...]  # positions of the blocks in the sequence
    block_ids: tuple[int, ...]
    contents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Save these blocks. They stay unchanged until every rank has reported the job."""

    job_id: int
    tables: tuple[TableBlocks, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Saved:
    """A rank's final report about a save job."""

    job_id: int
    failed: tuple[tuple[int, int], ...] = ()  # blocks not stored, as (table, number)


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load these segments into a request's blocks."""

    request_id: str
    segments: tuple[Segment, ...]
    contents: dict[int, tuple[str, ...]]  # by block size in tokens
    tables: tuple[tuple[int, ...], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class PoolLoaded:
    """How a load ended on one rank."""

    request_id: str
    error: str = ""  # empty: all bytes are there
    bad_from: int | None = None  # first token that was not loaded; those before it were
    hung: bool = False  # the store may still write, so the blocks must not be reused yet
    bytes: int = 0
    seconds: float = 0.0
    missing: tuple[tuple[str, int], ...] = ()  # objects gone from the store: (group, first token)

    @property
    def ok(self) -> bool:
        return not self.error


@dataclass(frozen=True, slots=True)
class Scope:
    """What ranks need to make keys. The scheduler sends it when it changes."""

    metadata: KeyMetadata
    layout_id: str  # our own
    records: dict[str, bytes] = field(default_factory=dict)  # layouts that ranks may need


# All counters. Metrics show each from the start, so that alerts find their series.
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
    """Named counts. Any method, from any thread. `take` returns the counts since its last call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total: Counter[str] = Counter()
        self._new: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._total[name] += count
            self._new[name] += count

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._total[name]

    def take(self) -> dict[str, int]:
        with self._lock:
            taken, self._new = dict(self._new), Counter()
        return taken
