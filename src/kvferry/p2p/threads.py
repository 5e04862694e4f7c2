"""Threads that may wait for long: a load, a write, a last word each has one of its own.

Work is accepted, and then done exactly once, or it is refused, and then never done: whoever is
refused reports a failure, and nothing of it may happen after that. Threads start when needed, and
stay. Where the system has no more of them (a limit of processes, say), what there is goes on with
the work in turn; only without any is work refused.

Work may name a lane, the peer that it may have to wait for. A lane gets another thread while it has
fewer than are free. So one peer has half of the threads at most, two have a third each, and a
newcomer finds one free. Work beyond that waits in its lane; lanes take turns.

They are daemons: an engine that ends does not wait for a transfer that cannot be ended.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable

from kvferry.errors import Cancelled, HandoverError

log = logging.getLogger("kvferry")

Work = Callable[[], None]


class Threads:
    """Up to `most` of one name, `per_lane` of a lane. Any method, from any thread; none waits."""

    def __init__(self, name: str, most: int, per_lane: int | None = None) -> None:
        self._name, self._most, self._per_lane = name, most, per_lane
        self._queue: queue.SimpleQueue[tuple[str, Work] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._count = 0
        self._spare = 0  # threads, less what was queued and is not done
        self._lanes: dict[str, deque[Work]] = {}  # work that is not queued yet, in the lanes' turn
        self._taken: Counter[str] = Counter()  # threads, by lane
        self._short = False  # whether the last start failed
        self._closed = False

    def submit(self, work: Work, lane: str = "") -> None:
        """Have this done soon; `Cancelled` or `HandoverError` where it never will be."""
        with self._lock:
            if self._closed:
                raise Cancelled("kvferry is shutting down")
            if lane in self._lanes or not self._may_take(lane):
                self._lanes.setdefault(lane, deque()).append(work)
            else:
                self._enqueue(lane, work)

    @property
    def free(self) -> int:
        """Threads that have no work, or were not needed yet."""
        return max(0, self._most - (self._count - self._spare))

    def close(self) -> None:
        """Accept no more. What was accepted is done still; its caller has given it up by now."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for lane, waiting in self._lanes.items():
                    for work in waiting:
                        self._queue.put((lane, work))
                self._lanes.clear()
                for _ in range(self._count):
                    self._queue.put(None)

    def _may_take(self, lane: str) -> bool:
        """With the lock held: whether a lane may have one more thread. Work without one always."""
        limit = self.free if self._per_lane is None else min(self._per_lane, self.free)
        return not lane or self._taken[lane] < limit

    def _enqueue(self, lane: str, work: Work) -> None:
        """With the lock held."""
        if self._spare <= 0 and self._count < self._most:
            self._start_one()
        self._spare -= 1
        self._taken[lane] += 1
        self._queue.put((lane, work))

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
        while (item := self._queue.get()) is not None:
            lane, work = item
            try:
                work()
            except Exception:
                log.exception("a thread of %s goes on after an error", self._name)
            del item, work  # what it has is not kept until the next one comes
            with self._lock:
                self._spare += 1
                self._taken[lane] -= 1
                if not self._taken[lane]:
                    del self._taken[lane]
                self._take_turns()

    def _take_turns(self) -> None:
        """With the lock held: queue the next of each lane that may have one more thread."""
        for lane in [lane for lane in self._lanes if self._may_take(lane)]:
            if self._may_take(lane):
                waiting = self._lanes.pop(lane)
                self._enqueue(lane, waiting.popleft())
                if waiting:
                    self._lanes[lane] = waiting  # behind the others
