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
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from queue import SimpleQueue
from typing import Any, TypeVar

from kvferry.errors import Cancelled, HandoverError, StoreError

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


# --------------------------------------------------------------------------------------------------
# Threads that a store may keep for ever: they hold nobody up, and others take their place.
#
# An executor of the standard library joins its threads when the interpreter ends, and has no answer
# to one that does not come back: what is queued behind it waits. These threads are daemons, work
# off one queue, and are replaced when they are told to be stuck; one that comes back after all
# ends.
# --------------------------------------------------------------------------------------------------

T = TypeVar("T")


class Crew:
    """`threads` that work, and at most `most_lost` that are stuck besides."""

    def __init__(self, threads: int, name: str, most_lost: int) -> None:
        self._name, self._most_lost = name, most_lost
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lost: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._threads = threads
        for _ in range(threads):
            self._hire()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._queue.put((future, call))
        return future

    def replace(self, futures: Iterable[Future[Any]]) -> None:
        """Those of these calls that are running do not come back for now."""
        with self._lock:
            for future in futures:
                if future.running() and future not in self._lost:
                    if len(self._lost) >= self._most_lost:
                        return  # what is queued ends by its own deadline
                    try:
                        self._hire()
                    except (RuntimeError, MemoryError) as error:
                        log.warning("no thread takes the place of one that is stuck: %s", error)
                        return
                    self._lost.add(future)

    def close(self) -> None:
        for _ in range(self._threads):
            self._queue.put(None)

    def _hire(self) -> None:
        threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:  # whoever asked gets it
                future.set_exception(error)
            else:
                future.set_result(result)
            with self._lock:
                if future in self._lost:
                    self._lost.discard(future)
                    return


# --------------------------------------------------------------------------------------------------
# Calls that take no deadline, given one: what does not end by it is left behind, and counted.
#
# A call never waits for another one: it gets an idle thread, or a new one where all are at work.
# Its caller leaves at the deadline with `StoreError`, and the call is *abandoned*, with its thread.
# No more than `most_hanging` may hang before all calls fail at once.
#
# A call that moves blocks could still read or write its caller's memory after that: a late put
# would store another request's bytes under this one's key, a late get would overwrite another
# request's cache. So calls that write stay `LATE_SECONDS` longer, which covers a client's own
# timeouts; `late_writes` counts those that did not even end then, and memory that was handed to
# them must not be reused. With `hold_memory`, calls that read or write blocks stay until they have
# ended, however long that takes: for callers that have an answer to it (pinned and quarantined
# blocks).
# --------------------------------------------------------------------------------------------------

LATE_SECONDS = 15.0  # Mooncake's client gives up on a dead master after about five
MAX_ABANDONED = 16


class BlockUse(Enum):
    """What a call does to blocks of its caller."""

    NONE = "none"
    READS = "reads"
    WRITES = "writes"


@dataclass(slots=True, eq=False)
class _LateCall:
    function: Callable[[], Any]
    done: threading.Event = field(default_factory=threading.Event)
    value: Any = None
    error: BaseException | None = None
    given_up: bool = False

    def run(self) -> None:
        try:
            self.value = self.function()
        except BaseException as error:
            self.error = error
        self.done.set()


class LateCalls:
    """Runs calls of one client."""

    def __init__(
        self, client: str, *, hold_memory: bool = False, most_hanging: int = MAX_ABANDONED
    ) -> None:
        self._client, self._hold, self._most = client, hold_memory, most_hanging
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[_LateCall | None]] = []  # one of each thread that has no call
        self._closed = False
        self._hanging = 0
        self.abandoned = 0
        self.late_writes = 0

    def __call__(
        self,
        what: str,
        function: Callable[[], T],
        deadline: float,
        memory: BlockUse = BlockUse.NONE,
    ) -> T:
        """The function's result by the deadline, or `StoreError`."""
        if self._hold and memory is not BlockUse.NONE:
            try:
                return function()  # it is waited for in any case: no other thread is needed
            except StoreError:
                raise
            except BaseException as error:
                raise StoreError(f"{self._client}'s {what} failed: {error!r}") from error
        call = _LateCall(function)
        self._begin(what, call)
        if not call.done.wait(max(0.0, deadline - time.monotonic())):
            raise StoreError(self._give_up(what, call, memory is BlockUse.WRITES))
        if call.error is None:
            return call.value  # type: ignore[no-any-return]
        if isinstance(call.error, StoreError):
            raise call.error
        raise StoreError(f"{self._client}'s {what} failed: {call.error!r}") from call.error

    @property
    def hanging(self) -> int:
        """Calls that were given up and have not come back yet."""
        return self._hanging

    def close(self) -> None:
        """Let idle threads end, and others when their calls do."""
        with self._lock:
            self._closed = True
            for thread in self._idle:
                thread.put(None)
            self._idle.clear()

    def _begin(self, what: str, call: _LateCall) -> None:
        with self._lock:
            if self._hanging >= self._most:
                raise StoreError(f"{self._hanging} calls of {self._client} hang; {what} refused")
            if self._idle:
                self._idle.pop().put(call)
                return
        mine: SimpleQueue[_LateCall | None] = SimpleQueue()
        mine.put(call)
        threading.Thread(
            target=self._serve, args=(mine,), name=f"kvferry-{self._client}", daemon=True
        ).start()

    def _serve(self, mine: SimpleQueue[_LateCall | None]) -> None:
        while (call := mine.get()) is not None:
            call.run()
            with self._lock:
                self._hanging -= call.given_up
                if self._closed:
                    return
                self._idle.append(mine)
            del call  # and the blocks' addresses with it

    def _give_up(self, what: str, call: _LateCall, writes: bool) -> str:
        ended = writes and call.done.wait(LATE_SECONDS)
        with self._lock:
            if not call.done.is_set():
                call.given_up = True
                self._hanging += 1
                self.late_writes += writes
            self.abandoned += 1
        late = "" if ended or not writes else "; its memory may still be written to"
        return f"{self._client}'s {what} did not end by its deadline{late}"
