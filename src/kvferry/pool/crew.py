"""Threads that a store may keep for ever: they hold nobody up, and others take their place.

An executor of the standard library joins its threads when the interpreter ends, and has no answer
to one that does not come back: what is queued behind it waits. These threads are daemons, work off
one queue, and are replaced when they are told to be stuck; one that comes back after all ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger("kvferry")


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
