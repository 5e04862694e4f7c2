"""What a consumer rank has done so far, for whoever publishes it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ConsumerStats:
    """Counts since the rank started; `running` and `abandoned` are of this moment."""

    running: int
    done: int
    failed: dict[str, int]  # by reason: the name of the error that ended the load
    abandoned: int  # loads that have failed and keep their blocks: a transfer has not returned
    bytes: int  # of loads that are done
    descriptors: int
    checked_bytes: int  # that were compared by checksum
    seconds: dict[str, float]  # by step, of all loads


@dataclass(slots=True)
class Tally:
    """The same while it changes. Any method, from any thread."""

    _done: int = 0
    _bytes: int = 0
    _descriptors: int = 0
    _checked: int = 0
    _abandoned: int = 0
    _failed: Counter[str] = field(default_factory=Counter)
    _seconds: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ended(
        self, reason: str, count_bytes: int, descriptors: int, seconds: Mapping[str, float]
    ) -> None:
        """A load; `reason` is empty where it is good."""
        with self._lock:
            if reason:
                self._failed[reason] += 1
            else:
                self._done += 1
                self._bytes += count_bytes
                self._descriptors += descriptors
            for step, spent in seconds.items():
                self._seconds[step] += spent  # type: ignore[assignment]

    def checked(self, count_bytes: int) -> None:
        with self._lock:
            self._checked += count_bytes

    @contextmanager
    def abandoning(self) -> Iterator[None]:
        """While a failed load waits for a transfer that its carrier cannot cancel."""
        with self._lock:
            self._abandoned += 1
        try:
            yield
        finally:
            with self._lock:
                self._abandoned -= 1

    def snapshot(self, running: int) -> ConsumerStats:
        with self._lock:
            return ConsumerStats(
                running,
                self._done,
                dict(self._failed),
                self._abandoned,
                self._bytes,
                self._descriptors,
                self._checked,
                {step: float(spent) for step, spent in self._seconds.items()},
            )
