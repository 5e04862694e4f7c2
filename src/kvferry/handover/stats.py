"""Counts of producer and consumer ranks.

Most counts only rise. Two of a consumer should be zero: `abandoned_now` counts loads that are over
but cannot be reported, because their carrier has not confirmed the cancel and bytes may still
arrive. `quarantined_blocks` counts the blocks that these loads keep.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ConsumerStats:
    """Loads of one rank since it started."""

    loads_done: int = 0
    loads_failed: Mapping[str, int] = field(default_factory=dict)  # by the error's name
    loads_pushed: int = 0  # good loads in which at least one source wrote
    abandoned_now: int = 0
    quarantined_blocks: int = 0
    revoked: int = 0  # grants closed before their source had answered
    bytes: int = 0
    descriptors: int = 0
    checked_bytes: int = 0  # compared by checksum
    seconds: Mapping[str, float] = field(default_factory=dict)  # of all ended loads, by step
    running: int = 0  # loads under way


@dataclass(frozen=True, slots=True)
class ProducerStats:
    """Holds of one rank since it started."""

    holds_open: int = 0
    parked: int = 0  # claims and offers that wait for their hold
    holds_delivered: int = 0
    holds_failed: int = 0  # a reader reported a failed load
    holds_expired: int = 0
    holds_withdrawn: int = 0
    claims: int = 0
    pushes_now: int = 0  # writes under way
    pushes_done: int = 0
    pushes_failed: int = 0
    bytes_pushed: int = 0


class ConsumerTally:
    """The counts behind `ConsumerStats`. Any method, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = self._pushed = self._abandoned = self._quarantined = self._revoked = 0
        self._failed: Counter[str] = Counter()
        self._bytes = self._descriptors = self._checked = 0
        self._seconds: Counter[str] = Counter()

    def done(
        self, moved: int, descriptors: int, seconds: Mapping[str, float], *, pushed: bool
    ) -> None:
        with self._lock:
            self._done += 1
            self._pushed += pushed
            self._bytes += moved
            self._descriptors += descriptors
            self._add(seconds)

    def failed(self, reason: str, seconds: Mapping[str, float]) -> None:
        with self._lock:
            self._failed[reason] += 1
            self._add(seconds)

    def checked(self, count_bytes: int) -> None:
        with self._lock:
            self._checked += count_bytes

    def revoked(self) -> None:
        with self._lock:
            self._revoked += 1

    @contextlib.contextmanager
    def abandoned(self, blocks: int) -> Iterator[None]:
        """Count a load that is over while it keeps its blocks."""
        with self._lock:
            self._abandoned += 1
            self._quarantined += blocks
        try:
            yield
        finally:
            with self._lock:
                self._abandoned -= 1
                self._quarantined -= blocks

    def _add(self, seconds: Mapping[str, float]) -> None:
        for step, spent in seconds.items():
            self._seconds[step] += spent  # type: ignore[assignment]

    def snapshot(self, running: int = 0) -> ConsumerStats:
        with self._lock:
            return ConsumerStats(
                loads_done=self._done,
                loads_failed=dict(self._failed),
                loads_pushed=self._pushed,
                abandoned_now=self._abandoned,
                quarantined_blocks=self._quarantined,
                revoked=self._revoked,
                bytes=self._bytes,
                descriptors=self._descriptors,
                checked_bytes=self._checked,
                running=running,
                seconds=dict(self._seconds),
            )
