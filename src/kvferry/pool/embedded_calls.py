"""Calls into a store that is mapped memory: nobody unmaps it under them.

Bytes go to and from the mapping by address, so a call that outlives it ends the process. A store
that is closed takes no new calls, and waits for those under way; not for ever, because an engine
that ends must end. Those that are left then keep all that they work on, the member's lock too (it
says that what they write is not a dead process's), and the last of them closes what is there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvferry.errors import StoreError


class Calls:
    """`with calls:` around each; `end` runs once, when there are none and will be none."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._changed = threading.Condition()
        self._running = 0
        self._closed = False
        self._given_up = False  # `close` has returned: the last call ends it

    def __enter__(self) -> None:
        with self._changed:
            if self._closed:
                raise StoreError("the store is closed")
            self._running += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._running -= 1
            last = self._given_up and self._running == 0
            if self._closed:
                self._changed.notify_all()
        if last:
            self._end()

    def close(self, seconds: float) -> int:
        """Take no more calls; how many were still under way after so many seconds."""
        with self._changed:
            if self._closed:
                return 0
            self._closed = True
            self._changed.wait_for(lambda: self._running == 0, seconds)
            left = self._running
            self._given_up = left > 0
        if not left:
            self._end()
        return left
