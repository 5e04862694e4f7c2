"""Rung when a rank has something to report, so that an idle engine need not look all the time.

vLLM steps as long as a request waits for its cache, or a finished one's blocks are held: thousands
of empty steps, which take processor time from those who are to end the wait. A step that computes
nothing waits for the bell instead.
"""

from __future__ import annotations

import threading


class Bell:
    def __init__(self) -> None:
        self._rung = threading.Event()

    def ring(self) -> None:
        self._rung.set()

    def wait(self, seconds: float) -> None:
        """Until it rings, or rang since the last wait; at most so long."""
        self._rung.wait(seconds)
        self._rung.clear()  # before what it rang for is taken: a later ring is not lost
