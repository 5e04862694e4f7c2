"""A transfer of few copies: launched by the thread that asks for it, with no thread of its own.

Handing a batch to another thread and waking up again costs more than copying a few megabytes on the
device. So what is small is launched at once, and whoever waits or polls looks at its event. It
cannot be cancelled in the middle; it is over within a millisecond, and `cancel` waits for that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvferry.errors import Cancelled, DeadlineExceeded, TransferError
from kvferry.transport.base import TransferState
from kvferry.transport.cuda_lane import Lane
from kvferry.transport.jobs import CANCEL_SECONDS

SPIN_SECONDS = 300e-6  # of asking again and again, before a thread sleeps between two looks


class Flight:
    """A `Transfer` whose copies are queued on a lane that is its own until it ends."""

    def __init__(self, lane: Lane, what: str, land: Callable[[], None]) -> None:
        self._lane, self._what, self._land = lane, what, land
        self._lock = threading.Lock()
        self._ended = False
        self._error: TransferError | None = None

    def wait(self, deadline: float) -> None:
        if not self._over(deadline - time.monotonic()):
            raise DeadlineExceeded(f"{self._what} is not done by its deadline; it goes on")
        if self._error is not None:
            raise self._error.with_traceback(None)

    def poll(self) -> TransferState:
        if not self._over(0.0):
            return TransferState.RUNNING
        return TransferState.DONE if self._error is None else TransferState.FAILED

    def cancel(self, why: str = "the caller gave it up") -> None:
        if self._over(0.0):
            return
        if not self._over(CANCEL_SECONDS):
            raise DeadlineExceeded(
                f"{self._what} was cancelled, and the device does not end it; bytes may still come"
            )
        if self._error is None:
            self._error = Cancelled(f"{self._what}: {why}")

    def _over(self, seconds: float) -> bool:
        """Whether it has ended, within that time."""
        until, spin = time.monotonic() + seconds, time.monotonic() + SPIN_SECONDS
        while not self._look():
            now = time.monotonic()
            if now >= until:
                return False
            if now >= spin:
                time.sleep(SPIN_SECONDS)
        return True

    def _look(self) -> bool:
        with self._lock:  # until it has landed, the lane's event is this flight's
            if self._ended:
                return True
            try:
                with self._lane.device.current():
                    if not self._lane.end.done():
                        return False
            except TransferError as error:
                self._error = error
            try:
                self._land()
            except TransferError as error:
                self._error = self._error or error
            self._ended = True
            return True
