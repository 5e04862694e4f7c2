"""A transfer that the thread which asks for it has queued whole, with no thread of its own.

Whoever waits or polls looks at its event. It cannot be cancelled in the middle: `cancel` waits for
its end, which is milliseconds away, because the carrier takes no more bytes into one flight.

A waiter naps while the end is far, by the rate of flights before, and asks again and again when it
is near: a nap takes about 70 microseconds, and often more, which is what a small transfer takes as
a whole. Asking never goes on for long, because it keeps a processor busy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvferry.errors import Cancelled, DeadlineExceeded, TransferError
from kvferry.transport.base import TransferState
from kvferry.transport.cuda_lane import NAP_SECONDS, Lane
from kvferry.transport.jobs import CANCEL_SECONDS

SPIN_SECONDS = 300e-6  # of asking again and again, from shortly before the expected end on
EARLY_SECONDS = 150e-6  # how long before: a nap, and what the expectation is off
LEARNT_BYTES = 64 << 20  # flights from which a rate is learnt: less is all latency
FIRST_RATE = 2e12  # bytes a second, before any was seen


class Pace:
    """How fast this device has copied lately."""

    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = FIRST_RATE

    def learn(self, bytes_: int, seconds: float) -> None:
        if bytes_ >= LEARNT_BYTES and seconds > 0:
            self.rate = (self.rate + bytes_ / seconds) / 2


class Flight:
    """A `Transfer` whose copies are queued on a lane that is its own until it ends.

    `land` is called once, when it has ended.
    """

    def __init__(
        self, lane: Lane, what: str, bytes_: int, pace: Pace, land: Callable[[Flight], None]
    ) -> None:
        self.lane, self._what, self._land = lane, what, land
        self._bytes, self._pace = bytes_, pace
        self._began = time.monotonic()
        self._waited = self._began  # when it was last seen to run
        self._lock = threading.Lock()
        self._ended = False
        self._error: TransferError | None = None

    def wait(self, deadline: float) -> None:
        if not self._ended and not self._over(deadline):
            raise DeadlineExceeded(f"{self._what} is not done by its deadline; it goes on")
        if self._error is not None:
            raise self._error.with_traceback(None)

    def poll(self) -> TransferState:
        if not self._look():
            return TransferState.RUNNING
        return TransferState.DONE if self._error is None else TransferState.FAILED

    def settled(self) -> bool:
        return self._look()

    def cancel(self, why: str = "the caller gave it up") -> None:
        if self._look():
            return
        if not self._over(time.monotonic() + CANCEL_SECONDS):
            raise DeadlineExceeded(
                f"{self._what} was cancelled, and the device does not end it; bytes may still come"
            )
        if self._error is None:
            self._error = Cancelled(f"{self._what}: {why}")

    def _over(self, until: float) -> bool:
        """Whether it has ended, by that time."""
        near = self._began + self._bytes / self._pace.rate - EARLY_SECONDS
        late = max(near, time.monotonic()) + SPIN_SECONDS
        while not self._look():
            now = time.monotonic()
            if now >= until:
                return False
            if not near <= now < late:
                time.sleep(NAP_SECONDS)
        return True

    def _look(self) -> bool:
        with self._lock:  # until it has landed, the lane's event is this flight's
            if self._ended:
                return True
            try:
                if not self.lane.end.done_yet():
                    self._waited = time.monotonic()
                    return False
            except TransferError as error:
                self._error = error
            now = time.monotonic()
            if now - self._waited < EARLY_SECONDS:  # else it ended while nobody looked
                self._pace.learn(self._bytes, now - self._began)
            try:
                self._land(self)
            except TransferError as error:
                self._error = self._error or error
            self._ended = True
            return True
