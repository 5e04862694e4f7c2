# SPDX-License-Identifier: Apache-2.0
"""The executor: a bounded number of daemon threads, shared out by lane, and calls with deadlines.

`Threads` either accepts work, and then does it exactly once, or refuses it, and then never does it.

    accepted --> queued --> running --> done
       '--> waits in its lane             '--> given up (`give_up`): another thread takes its place

Threads start when they are needed, and stay. Where the system cannot start one more, the threads
that run do the work in turn. Work is refused only when there is no thread at all, or no place to
wait. All threads are daemons: a process that ends does not wait for a transfer that cannot be
stopped. A forked child begins without threads and without its parent's work.

Work may name a lane, which is the peer that it may have to wait for. A lane gets another thread
while it has fewer than are free. So one peer has half of the threads at most, two peers have a
third each, and a new peer finds one free. Work beyond that waits in its lane, and lanes take turns.
Lanes share out the places to wait in the same way.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from kvferry.errors import Cancelled, HandoverError, KvferryError, StoreError

log = logging.getLogger("kvferry")

COMPILER_SECONDS = 20.0
T = TypeVar("T")
Work = Callable[[], None]


class Call(Future[T]):
    """Work whose result another thread waits for."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self._function: Callable[[], T] | None = function

    def __call__(self) -> None:
        """Called once, by the thread that does the work."""
        function, self._function = self._function, None  # the function may hold memory
        if function is None or not self.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:  # for the thread that waits
            self.set_exception(error)
        else:
            self.set_result(result)


class Threads:
    """Up to `most` threads of one name, `per_lane` of them for one lane, and at most `most_stuck`
    besides that were given up. Of the work, `most_waiting` pieces may wait in lanes. Any method may
    be called by any thread; only `join` waits."""

    def __init__(
        self,
        name: str,
        most: int,
        per_lane: int | None = None,
        most_stuck: int = 0,
        most_waiting: int = sys.maxsize,
    ) -> None:
        self._name, self._most, self._per_lane, self._most_stuck = name, most, per_lane, most_stuck
        self._most_waiting = most_waiting
        self._closed = False
        self._begin()
        _every.add(self)

    def submit(self, work: Work, lane: str = "") -> None:
        """Accept this work, or raise `Cancelled` or `HandoverError`."""
        with self._lock:
            if self._closed:
                raise Cancelled("kvferry is shutting down")
            if lane and (lane in self._lanes or not self._may_take(lane)):
                waiting, mine = sum(map(len, self._lanes.values())), len(self._lanes.get(lane, ()))
                if mine >= self._most_waiting - waiting:
                    raise HandoverError(
                        f"{waiting} others wait already for a thread of {self._name}, {mine} of "
                        f"them for {lane:.80}; no more are taken now"
                    )
                self._lanes.setdefault(lane, deque()).append(work)
            else:
                self._enqueue(lane, work)

    def call(self, function: Callable[[], T], lane: str = "") -> Call[T]:
        """Accept a function whose result the caller wants."""
        call = Call(function)
        self.submit(call, lane)
        return call

    @property
    def free(self) -> int:
        """Threads that have no work, or were not needed yet."""
        return max(0, self._most - self._tasks)

    @property
    def stuck(self) -> int:
        """Calls that were given up and have not returned yet."""
        return len(self._stuck)

    def give_up(self, call: Call[Any]) -> bool:
        """Let another thread take the place of one whose call hangs. The hanging thread ends when
        its call returns. Returns False if this is not possible."""
        with self._lock:
            if not call.running() or call in self._stuck or len(self._stuck) >= self._most_stuck:
                return False
            self._stuck.add(call)
            self._tasks -= 1
            try:
                if self._count < min(self._tasks, self._most):
                    self._start_one()
            except HandoverError as error:
                log.warning("%s: a thread is stuck, and %s", self._name, error)
                self._stuck.discard(call)
                self._tasks += 1
                return False
            return True

    def close(self) -> None:
        """Accept no more work. The work accepted so far is still done."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for lane, waiting in self._lanes.items():
                for work in waiting:
                    self._queue.put((lane, work))
            self._lanes.clear()
            for _ in range(self._count):
                self._queue.put(None)

    def join(self, seconds: float) -> None:
        """After `close`: wait for all threads to end, at most this long."""
        until = time.monotonic() + seconds
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _begin(self) -> None:
        """Set the state of an executor without threads, also in a forked child."""
        self._queue: SimpleQueue[tuple[str, Work] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._stuck: set[Call[Any]] = set()
        self._tasks = 0  # queued or running, without those that are stuck
        self._lanes: dict[str, deque[Work]] = {}  # work that is not queued yet, in the lanes' turn
        self._taken: Counter[str] = Counter()  # tasks, by lane
        self._short = False  # whether the last start of a thread failed

    @property
    def _count(self) -> int:
        """Threads that work, or could."""
        return len(self._threads) - len(self._stuck)

    def _may_take(self, lane: str) -> bool:
        """With the lock held: whether a lane may have one more thread."""
        limit = self.free if self._per_lane is None else min(self._per_lane, self.free)
        return self._taken[lane] < limit

    def _enqueue(self, lane: str, work: Work) -> None:
        """With the lock held."""
        count = self._count
        if count <= self._tasks and count < self._most:
            try:
                self._start_one()
            except HandoverError as error:
                if not count:
                    raise
                if not self._short:
                    log.warning("%s: %s; %d threads do its work", self._name, error, count)
                self._short = True
        self._tasks += 1
        if lane:
            self._taken[lane] += 1
        self._queue.put((lane, work))

    def _start_one(self) -> None:
        """With the lock held, and before anything is queued for it."""
        if self._closed:
            raise HandoverError("no thread is started any more")
        name = f"{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._loop, name=name, daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            raise HandoverError(f"no thread can be started for it: {error}") from None
        self._short = False
        self._threads.append(thread)

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            lane, work = item
            try:
                work()
            except BaseException:
                log.exception("a thread of %s goes on after an error", self._name)
            with self._lock:
                given_up = isinstance(work, Call) and work in self._stuck
                if given_up:
                    self._stuck.discard(work)
                    self._threads.remove(threading.current_thread())
                else:
                    self._tasks -= 1
                if lane:
                    self._leave(lane)
                if self._lanes:
                    self._take_turns()
                if given_up:
                    return
            del item, work  # frees what the work holds

    def _leave(self, lane: str) -> None:
        """With the lock held."""
        self._taken[lane] -= 1
        if not self._taken[lane]:
            del self._taken[lane]

    def _take_turns(self) -> None:
        """With the lock held: queue the next of each lane that may have one more thread."""
        for lane in list(self._lanes):
            if not self.free:
                return  # there may be thousands of lanes, and this is called for each piece of work
            if self._may_take(lane):
                waiting = self._lanes.pop(lane)
                self._enqueue(lane, waiting.popleft())
                if waiting:
                    self._lanes[lane] = waiting  # behind the others


_every: weakref.WeakSet[Threads] = weakref.WeakSet()


def start_compiler(compile_all: Work, name: str) -> None:
    """Run a compiler on a daemon thread. At exit the process waits for it, up to a time, because
    Triton's compiler aborts the process if its thread ends in the middle."""
    thread = threading.Thread(target=compile_all, name=name, daemon=True)
    thread.start()
    atexit.register(thread.join, COMPILER_SECONDS)


def _begin_in_child() -> None:
    for threads in list(_every):
        threads._begin()


os.register_at_fork(after_in_child=_begin_in_child)


MAX_ABANDONED = 16


class LateCalls:
    """Calls with deadlines, of a client that has none. No call waits for another.

    The caller leaves at its deadline with `StoreError`, and the call goes on, so no call may use
    memory of its caller. While `most_hanging` calls hang, all others fail at once.
    """

    def __init__(self, client: str, *, most_hanging: int = MAX_ABANDONED) -> None:
        self._client, self._most = client, most_hanging
        self._threads = Threads(f"kvferry-{client}", sys.maxsize, most_stuck=sys.maxsize)

    def __call__(self, what: str, function: Callable[[], T], deadline: float) -> T:
        """The function's result by the deadline, or `StoreError`."""
        if self.hanging >= self._most:
            raise StoreError(f"{self.hanging} calls of {self._client} hang; {what} refused")
        try:
            call = self._threads.call(function)
        except KvferryError as error:
            raise StoreError(f"{self._client}'s {what} failed: {error}") from None
        try:
            failure = call.exception(max(0.0, deadline - time.monotonic()))
        except TimeoutError:  # not the call's own error, which is returned
            call.cancel()
            self._threads.give_up(call)
            raise StoreError(f"{self._client}'s {what} did not end by its deadline") from None
        if failure is None:
            return call.result()
        if isinstance(failure, StoreError):
            raise failure
        raise StoreError(f"{self._client}'s {what} failed: {failure!r}") from failure

    @property
    def hanging(self) -> int:
        """Calls that were given up and have not returned yet."""
        return self._threads.stuck

    def close(self) -> None:
        """End idle threads now, and the others when their calls return."""
        self._threads.close()
