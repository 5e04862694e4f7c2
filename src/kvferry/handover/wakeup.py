"""When the device has come to what an engine's step said.

Kernels run after their launch returned. So what a step says of its blocks (a hold may be read, a
load may be written) is true only once the device has come to that point: a rank passes it on when
an event recorded at that moment has completed. On host memory that is at once.

Where the device fails before it has come there, nothing of the step is true. That is passed on too,
in the same turn, so that what the step asked for ends as failed: nobody else would ever say so.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

log = logging.getLogger("kvferry")

Action = Callable[[str], None]  # gets why the device failed; empty: it has come to that point


class DeviceEvent(Protocol):
    """A mark in what a device does."""

    def record(self) -> Any: ...

    def synchronize(self) -> Any:
        """Until the device has come to it; raises where it never will."""
        ...


def _torch_event() -> DeviceEvent:
    import torch

    event: DeviceEvent = torch.cuda.Event(blocking=True)
    event.record()
    return event


class WhenReady:
    """Does things in the order in which they were asked for, when the device has come to each.

    Each action is called exactly once, and must not raise.
    """

    def __init__(self, gpu: bool, record: Callable[[], DeviceEvent] = _torch_event) -> None:
        self._gpu, self._record = gpu, record
        self._queue: queue.SimpleQueue[tuple[DeviceEvent, Action] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def mark(self) -> Callable[[Action], None]:
        """What is passed to the answer is done once all that was launched so far has run."""
        if not self._gpu:
            return lambda action: action("")
        try:
            event = self._record()
        except Exception as error:
            why = _why(error)
            return lambda action: action(why)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kvferry-ready", daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError) as error:  # nothing waits: this keeps the order
                log.warning("a step waits for the device itself: %s", error)
                return lambda action: _do(event, action)
            self._thread = thread
        return lambda action: self._queue.put((event, action))

    def close(self) -> None:
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        while (one := self._queue.get()) is not None:
            _do(*one)


def _do(event: DeviceEvent, action: Action) -> None:
    why = ""
    try:
        event.synchronize()
    except Exception as error:
        why = _why(error)
    try:
        action(why)
    except Exception:  # the orders after it are passed on
        log.exception("an order of a step could not be passed on")


def _why(error: Exception) -> str:
    log.error("the device failed before it came to what a step said: %s", error)
    return f"the device failed: {error}"


# --------------------------------------------------------------------------------------------------
# Rung when a rank has something to report, so that an idle engine need not look all the time.
#
# vLLM steps as long as a request waits for its cache, or a finished one's blocks are held:
# thousands of empty steps, which take processor time from those who are to end the wait. A step
# that computes nothing waits for the bell instead.
# --------------------------------------------------------------------------------------------------


class Wakeup:
    def __init__(self) -> None:
        self._rung = threading.Event()

    def ring(self) -> None:
        self._rung.set()

    def wait(self, seconds: float) -> None:
        """Until it rings, or rang since the last wait; at most so long."""
        self._rung.wait(seconds)
        self._rung.clear()  # before what it rang for is taken: a later ring is not lost
