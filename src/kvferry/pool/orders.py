"""What a scheduler asks of the ranks, and what they report: values that any engine can send."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.pool.hits import Segment
from kvferry.pool.keys import KeyMetadata


@dataclass(frozen=True, slots=True)
class TableBlocks:
    """Whole blocks of one block table."""

    table: int
    numbers: tuple[int, ...]  # of the blocks in the sequence
    block_ids: tuple[int, ...]
    contents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Save these blocks. They stay as they are until every rank has reported the job."""

    job_id: int
    tables: tuple[TableBlocks, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Saved:
    """A rank's last word about a job."""

    job_id: int
    failed: tuple[tuple[int, int], ...] = ()  # (table, number of the block) that are not stored


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
    bad_from: int | None = None  # first token that is not there; tokens before it are
    hung: bool = False  # the store may still write: the blocks must not be used again yet
    bytes: int = 0
    seconds: float = 0.0
    missing: tuple[tuple[str, int], ...] = ()  # (group, first token) that the store had no more

    @property
    def ok(self) -> bool:
        return not self.error


@dataclass(frozen=True, slots=True)
class Scope:
    """What keys are made of; sent when it changes."""

    metadata: KeyMetadata
    layout_id: str  # our own
    records: dict[str, bytes] = field(default_factory=dict)  # layouts that ranks may need


# --------------------------------------------------------------------------------------------------
# Counters of a pool's user: what was asked, moved, and what went wrong, each thing once.
# --------------------------------------------------------------------------------------------------

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
