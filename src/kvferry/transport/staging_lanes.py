"""The staging lanes of one device: a bounded number, kept for the next gather or scatter.

A lane has 44 MiB (staging_lane.py), and whoever sends or receives keeps one until the other side
has taken or sent its bytes, which may need a lane over there. So nobody may wait here for ever: two
sides whose lanes are all held by transfers that wait for each other would do so. Hence:

    an idle lane        is taken, the last one that was used first
    none, below MOST    one is made
    none                it is waited for, NARROW_AFTER_SECONDS at most; then a narrow lane is made,
                        which has little memory, is slower, and is freed after its use

What is made in vain, because the device has no memory left, is not counted. Idle lanes beyond
`KEPT_LANES` are freed when they have not been used for `LINGER_SECONDS`: freeing one waits for the
device and making one takes milliseconds, so it is not done between two requests.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from kvferry.errors import TransferError
from kvferry.transport.cuda_driver import Device
from kvferry.transport.staging_lane import NARROW, WIDE, StagingLane

MOST_LANES = 16  # what one peer uses at most: four transfers, four streams each
KEPT_LANES = 4  # what one transfer uses
NARROW_AFTER_SECONDS = 0.25  # a frame through a lane that moves takes some ten milliseconds
LINGER_SECONDS = 10.0


class StagingLanes:
    """See the module's text. Any thread."""

    def __init__(self, on: Device) -> None:
        self._device = on
        self._changed = threading.Condition()
        self._idle: list[tuple[StagingLane, float]] = []  # since when; the newest last
        self._wide = 0  # that exist, or are being made
        self._sweeper: threading.Timer | None = None
        self._closed = False

    @contextlib.contextmanager
    def lane(self) -> Iterator[StagingLane]:
        """A lane for one thread; when it is given back, nothing of it is under way."""
        lane = self._take()
        try:
            lane.begin()
            yield lane
        except BaseException:
            with self._device.current():
                lane.drain()
            raise
        finally:
            self._put(lane)

    def close(self) -> None:
        """Frees what is idle, and the others when they are given back. Idempotent."""
        with self._changed:
            self._closed = True
            sweeper, self._sweeper = self._sweeper, None
            lanes = self._removed(0)
        if sweeper is not None:
            sweeper.cancel()
        self._free(lanes)

    def _take(self) -> StagingLane:
        with self._changed:
            if not self._idle and self._wide >= MOST_LANES:
                self._changed.wait_for(
                    lambda: self._idle or self._wide < MOST_LANES, NARROW_AFTER_SECONDS
                )
            if self._idle:
                return self._idle.pop()[0]
            width = NARROW if self._wide >= MOST_LANES else WIDE
            self._wide += width is WIDE
        try:
            with self._device.current():
                return StagingLane(self._device, width)
        except BaseException:
            self._forget(width is WIDE)
            raise

    def _put(self, lane: StagingLane) -> None:
        wide = lane.width is WIDE
        with self._changed:
            keep = wide and not self._closed
            if keep:
                self._idle.append((lane, time.monotonic()))
                self._changed.notify()
                if len(self._idle) > KEPT_LANES and self._sweeper is None:
                    self._sweep_after(LINGER_SECONDS)
        if not keep:
            try:
                self._free([lane])
            finally:
                self._forget(wide)

    def _forget(self, wide: bool) -> None:
        with self._changed:
            self._wide -= wide
            self._changed.notify()

    def _sweep_after(self, seconds: float) -> None:
        """The lock is held."""
        self._sweeper = threading.Timer(seconds, self._sweep)
        self._sweeper.name, self._sweeper.daemon = "kvferry-staging-sweep", True
        try:
            self._sweeper.start()
        except RuntimeError:  # the system has no thread for it: the next one tries again
            self._sweeper = None

    def _sweep(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._sweeper = None
            old = time.monotonic() - LINGER_SECONDS
            used = sum(since > old for _, since in self._idle)
            lanes = self._removed(max(KEPT_LANES, used))
            if len(self._idle) > KEPT_LANES:
                self._sweep_after(LINGER_SECONDS)
        self._free(lanes)

    def _removed(self, left: int) -> list[StagingLane]:
        """The oldest of the idle lanes, so that so many are left. The lock is held."""
        count = max(0, len(self._idle) - left)
        lanes = [lane for lane, _ in self._idle[:count]]
        del self._idle[:count]
        self._wide -= count
        self._changed.notify(count)
        return lanes

    def _free(self, lanes: list[StagingLane]) -> None:
        if not lanes:
            return
        with self._device.current():
            for lane in lanes:
                with contextlib.suppress(TransferError):  # a device that failed
                    lane.free()
