"""Calls that take no deadline, given one: what does not end by it is left behind, and counted.

A call never waits for another one: it gets an idle thread, or a new one where all are at work. Its
caller leaves at the deadline with `StoreError`, and the call is *abandoned*, with its thread. No
more than `most_hanging` may hang before all calls fail at once.

A call that moves blocks could still read or write its caller's memory after that: a late put would
store another request's bytes under this one's key, a late get would overwrite another request's
cache. So calls that write stay `LATE_SECONDS` longer, which covers a client's own timeouts;
`late_writes` counts those that did not even end then, and memory that was handed to them must not
be reused. With `hold_memory`, calls that read or write blocks stay until they have ended, however
long that takes: for callers that have an answer to it (pinned and quarantined blocks).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from queue import SimpleQueue
from typing import Any, TypeVar

from kvferry.errors import StoreError

T = TypeVar("T")

LATE_SECONDS = 15.0  # Mooncake's client gives up on a dead master after about five
MAX_ABANDONED = 16


class Memory(Enum):
    """What a call does to blocks of its caller."""

    NONE = "none"
    READS = "reads"
    WRITES = "writes"


@dataclass(slots=True, eq=False)
class _Call:
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
        self._idle: list[SimpleQueue[_Call | None]] = []  # one of each thread that has no call
        self._closed = False
        self._hanging = 0
        self.abandoned = 0
        self.late_writes = 0

    def __call__(
        self,
        what: str,
        function: Callable[[], T],
        deadline: float,
        memory: Memory = Memory.NONE,
    ) -> T:
        """The function's result by the deadline, or `StoreError`."""
        if self._hold and memory is not Memory.NONE:
            try:
                return function()  # it is waited for in any case: no other thread is needed
            except StoreError:
                raise
            except BaseException as error:
                raise StoreError(f"{self._client}'s {what} failed: {error!r}") from error
        call = _Call(function)
        self._begin(what, call)
        if not call.done.wait(max(0.0, deadline - time.monotonic())):
            raise StoreError(self._give_up(what, call, memory is Memory.WRITES))
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

    def _begin(self, what: str, call: _Call) -> None:
        with self._lock:
            if self._hanging >= self._most:
                raise StoreError(f"{self._hanging} calls of {self._client} hang; {what} refused")
            if self._idle:
                self._idle.pop().put(call)
                return
        mine: SimpleQueue[_Call | None] = SimpleQueue()
        mine.put(call)
        threading.Thread(
            target=self._serve, args=(mine,), name=f"kvferry-{self._client}", daemon=True
        ).start()

    def _serve(self, mine: SimpleQueue[_Call | None]) -> None:
        while (call := mine.get()) is not None:
            call.run()
            with self._lock:
                self._hanging -= call.given_up
                if self._closed:
                    return
                self._idle.append(mine)
            del call  # and the blocks' addresses with it

    def _give_up(self, what: str, call: _Call, writes: bool) -> str:
        ended = writes and call.done.wait(LATE_SECONDS)
        with self._lock:
            if not call.done.is_set():
                call.given_up = True
                self._hanging += 1
                self.late_writes += writes
            self.abandoned += 1
        late = "" if ended or not writes else "; its memory may still be written to"
        return f"{self._client}'s {what} did not end by its deadline{late}"
