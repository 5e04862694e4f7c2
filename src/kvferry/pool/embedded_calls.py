"""Calls into a store that is mapped memory: nobody unmaps it under them.

Bytes go to and from the mapping by address, so a call that outlives it ends the process. A store
that is closed takes no new calls, and waits for those under way; not for ever, because an engine
that ends must end. Those that are left then keep all that they work on, the member's lock too (it
says that what they write is not a dead process's), and the last of them closes what is there.

Threads that work on the store beside its calls (`beside`) count like them, and see by `closing`
that they should end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvferry.errors import StoreError

_log = logging.getLogger(__name__)


class Calls:
    """`with calls:` around each."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._closed = False
        self.closing = threading.Event()
        self._end: Callable[[], None] | None = None  # `close` has given up: the last call does it

    def __enter__(self) -> None:
        with self._changed:
            if self._closed:
                raise StoreError("the store is closed")
            self._running += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._running -= 1
            end = None
            if self._closed and self._running == 0:
                end, self._end = self._end, None
                self._changed.notify_all()
        if end is not None:
            end()

    def beside(self, work: Callable[[], None], name: str) -> threading.Thread | None:
        """A thread at this work; None where the store is closed, or the system has no thread."""

        def counted() -> None:
            try:
                work()
            finally:
                self.__exit__()

        try:
            self.__enter__()
        except StoreError:
            return None
        thread = threading.Thread(target=counted, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self.__exit__()
            _log.warning("%s is left for later: %s", name, error)
            return None
        return thread

    def close(self, seconds: float, end: Callable[[], None]) -> int:
        """Take no more calls; how many were still under way after so many seconds.

        `end` runs once, when there are none: before this returns, or after the last of those.
        """
        with self._changed:
            if self._closed:
                return 0
            self._closed = True
            self.closing.set()
            self._changed.wait_for(lambda: self._running == 0, seconds)
            left = self._running
            if left:
                self._end = end
                return left
        end()
        return 0
