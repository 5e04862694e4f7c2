"""Threads that may wait for long: a load, a write, a last word each has one of its own.

Work is accepted, and then done exactly once, or it is refused, and then never done: whoever is
refused reports a failure, and nothing of it may happen after that. Threads start when needed, and
stay. Where the system has no more of them (a limit of processes, say), what there is goes on with
the work in turn; only without any is work refused.

They are daemons: an engine that ends does not wait for a transfer that cannot be ended.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from kvferry.errors import Cancelled, HandoverError

log = logging.getLogger("kvferry")


class Threads:
    """Up to `most` of one name. Any method, from any thread; none waits."""

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._count = 0
        self._spare = 0  # threads, less what was accepted and is not done
        self._short = False  # whether the last start failed
        self._closed = False

    def submit(self, work: Callable[[], None]) -> None:
        """Have this done soon; `Cancelled` or `HandoverError` where it never will be."""
        with self._lock:
            if self._closed:
                raise Cancelled("kvferry is shutting down")
            if self._spare <= 0 and self._count < self._most:
                self._start_one()
            self._spare -= 1
            self._queue.put(work)

    def close(self) -> None:
        """Accept no more. What was accepted is done still; its caller has given it up by now."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in range(self._count):
                    self._queue.put(None)

    def _start_one(self) -> None:
        """With the lock held, and before anything is queued for it."""
        name = f"{self._name}-{self._count}"
        try:
            threading.Thread(target=self._loop, name=name, daemon=True).start()
        except (RuntimeError, MemoryError) as error:
            if not self._count:
                raise HandoverError(f"no thread can be started for it: {error}") from None
            if not self._short:
                log.warning("%s: %s; %d threads do its work", name, error, self._count)
            self._short = True
            return
        self._short = False
        self._count += 1
        self._spare += 1

    def _loop(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("a thread of %s goes on after an error", self._name)
            del work  # what it has is not kept until the next one comes
            with self._lock:
                self._spare += 1
