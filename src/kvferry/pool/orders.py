# SPDX-License-Identifier: Apache-2.0
"""The scheduler's orders to its ranks, their reports, and the pool's counters.

Orders and reports are plain values, which any engine can send between its processes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, overload

from kvferry.pool.hits import Segment
from kvferry.pool.keys import KeyMetadata


class LaterTexts(Sequence[str]):
    """Texts that are made when they are first needed, on the thread that needs them. Another
    process gets them as a tuple."""

    def __init__(self, make: Callable[[], Iterable[str]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> tuple[str, ...]:
        return tuple(self._make())

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[str, ...]: ...
    def __getitem__(self, at: int | slice) -> str | tuple[str, ...]:
        return self._made[at]

    def __reduce__(self) -> tuple[type, tuple[tuple[str, ...]]]:
        return tuple, (self._made,)


@dataclass(frozen=True, slots=True)
class TableBlocks:
    """Whole blocks of one block table."""

    table: int
    numbers: tuple[int, ...]  # positions of the blocks in the sequence
    block_ids: tuple[int, ...]
    contents: Sequence[str]


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
    # without the step that computed the blocks; `put` counts the blocks that the store took
    seconds: float = field(default=0.0, compare=False)
    put: int = field(default=0, compare=False)
    paused: bool = field(default=False, compare=False)  # the store failed: saves pause for a while


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load these segments into a request's blocks."""

    request_id: str
    segments: tuple[Segment, ...]
    contents: dict[tuple[str, int], tuple[str, ...]]  # by layout and block table
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

    @property
    def ok(self) -> bool:
        return not self.error


@dataclass(frozen=True, slots=True)
class Scope:
    """What ranks need to make keys. The scheduler sends it when it changes."""

    metadata: KeyMetadata
    layout_id: str  # our own
    records: dict[str, bytes] = field(default_factory=dict)  # layouts that ranks may need


class PoolMetric(NamedTuple):
    """Counts of one unit."""

    meaning: str
    events: Mapping[str, str]  # each with its value of the label `outcome`; empty: no label


def _plain(event: str, meaning: str) -> tuple[str, PoolMetric]:
    return event, PoolMetric(meaning, {event: ""})


def _labelled(name: str, events: str, outcomes: str, meaning: str) -> tuple[str, PoolMetric]:
    """A metric whose events are `events` with each outcome behind it."""
    return name, PoolMetric(meaning, {f"{events}_{one}": one for one in outcomes.split()})


# All counters, by metric. Metrics show each from the start, so that alerts find their series.
METRICS: Mapping[str, PoolMetric] = dict(
    (
        _plain("lookups", "Lookups"),
        _plain("lookup_cached", "Lookups that a recent answer served"),
        _plain("lookup_errors", "Lookups that raised"),
        _plain("lookup_timeouts", "Lookups without an answer in time"),
        _plain("lookup_refused", "Lookups that were not asked, because the store is stuck"),
        _plain("lookup_keys", "Keys that lookups asked the store for"),
        _plain("hit_tokens", "Tokens that loads were ordered for"),
        _labelled(
            "loads_declined",
            "declined",
            "short slower queued",
            "Requests with a hit that were computed instead",
        ),
        _plain("loads", "Loads that ended, by rank"),
        _plain("load_failures", "Loads that did not bring all, by rank"),
        _plain("load_errors", "Loads that raised, by rank"),
        _plain("load_hung", "Loads that the store did not end in time, by rank"),
        _plain("loaded_bytes", "Bytes that loads brought, all ranks"),
        _plain("load_bad_objects", "Objects that loads ended without, all ranks"),
        _labelled(
            "load_objects",
            "load",
            "done missing corrupt failed",
            "Objects that loads asked the store for, all ranks",
        ),
        _plain("save_jobs", "Jobs of saves that the scheduler ordered"),
        _plain("save_postponed", "Steps in which too much was pinned for another save"),
        _plain("save_dropped", "Jobs of saves that were not tried, by rank"),
        _plain("save_errors", "Jobs of saves that raised, by rank"),
        _plain("saved_bytes", "Bytes that saves stored, all ranks"),
        _labelled(
            "save_objects",
            "save",
            "done exists known declined full failed",
            "Objects of saves, all ranks",
        ),
        _labelled(
            "layouts",
            "layouts",
            "published unpublished missing refused",
            "Records of layouts that were written or read",
        ),
    )
)
MOST_OPERATIONS = 4096  # kept until they are taken; of more, the oldest are forgotten


@dataclass(slots=True)
class StoreOperation:
    """One call of a store."""

    name: Literal["lookup_exists", "load_get", "save_exists", "save_put"]
    keys: int
    bytes: int = 0  # that it was asked to move
    seconds: float = 0.0  # without the wait for a step to end
    waited: float = 0.0
    failed: int = 0  # keys
    status: Literal["ok", "partial_failure", "error"] = "ok"


class PoolCounters:
    """Named counts, for any thread. `take` returns the counts since its last call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()  # all counts until the last `take`
        self._new: dict[str, int] = {}
        self._operations: deque[StoreOperation] = deque(maxlen=MOST_OPERATIONS)

    @contextmanager
    def operation(self, operation: StoreOperation) -> Iterator[StoreOperation]:
        """Time a call of the store. The caller sets how many keys failed."""
        began = time.perf_counter()
        try:
            yield operation
            if operation.failed:
                operation.status = "partial_failure"
        except BaseException:
            operation.status, operation.failed = "error", operation.keys
            raise
        finally:
            operation.seconds = time.perf_counter() - began - operation.waited
            with self._lock:
                self._operations.append(operation)

    def take_operations(self) -> list[StoreOperation]:
        """Calls of the store since the last call."""
        with self._lock:
            taken = list(self._operations)
            self._operations.clear()
        return taken

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._new[name] = self._new.get(name, 0) + count

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._taken[name] + self._new.get(name, 0)

    def take(self) -> dict[str, int]:
        with self._lock:
            taken, self._new = self._new, {}
            if taken:
                self._taken.update(taken)
        return taken
