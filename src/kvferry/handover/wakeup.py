# SPDX-License-Identifier: Apache-2.0
"""Two signals: the device has finished a step's kernels, and a rank has something to report.

`WhenReady`. Some of a step's orders (begin this load) are valid only once the device has finished
the kernels of earlier steps. If the device fails first, the orders are passed on as failed, because
no other part of the engine would report them.

`Wakeup`. vLLM keeps stepping while a request waits for its cache, or while the blocks of a finished
one are held. A step that computes nothing waits a moment until its rank has something to report.
Meanwhile the rank's threads get the processors.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

log = logging.getLogger("kvferry")

KEPT_STEPS = 8  # whose events are kept; an engine has two steps in flight
# Called with the device's error, or with an empty string once the event has completed.
Action = Callable[[str], None]


class DeviceEvent(Protocol):
    def synchronize(self) -> Any:
        """Wait until the device has reached the event; raises if it never will."""
        ...


def _torch_event() -> DeviceEvent:
    import torch

    event = torch.cuda.Event(blocking=True)
    event.record()
    return event  # type: ignore[no-any-return]


class _Failed:
    """An event that could not be recorded."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def synchronize(self) -> None:
        raise self._error


class WhenReady:
    """Calls actions in the order in which they came, each once the device has finished its step.

    Each action is called exactly once, and must not raise.
    """

    def __init__(self, gpu: bool, record: Callable[[], DeviceEvent] = _torch_event) -> None:
        self._gpu, self._record = gpu, record
        self._steps: deque[tuple[int, DeviceEvent]] = deque(maxlen=KEPT_STEPS)
        self._queue: queue.SimpleQueue[tuple[DeviceEvent, Action] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvferry-ready", daemon=True)
        if gpu:
            self._thread.start()

    def begin(self, step: int) -> None:
        """Call this before a step's kernels are launched. Records an event that completes when the
        device has finished all earlier steps."""
        if self._gpu:
            try:
                self._steps.append((step, self._record()))
            except Exception as error:
                self._steps.append((step, _Failed(error)))

    def after(self, step: int, action: Action) -> None:
        """Call an action once the device has finished a step, which must precede the last one that
        began. If the event after that step is no longer kept, a later one serves."""
        if self._gpu:
            event = next(event for number, event in self._steps if number > step)
            self._queue.put((event, action))
        else:
            action("")

    def close(self) -> None:
        self._queue.put(None)
        if self._gpu:
            self._thread.join(5.0)

    def _run(self) -> None:
        while (one := self._queue.get()) is not None:
            event, action = one
            why = ""
            try:
                event.synchronize()
            except Exception as error:
                log.error("the device failed before it finished a step's kernels: %s", error)
                why = f"the device failed: {error}"
            try:
                action(why)
            except Exception:  # later orders must still be passed on
                log.exception("an order of a step could not be passed on")


class Wakeup:
    """Rung by threads of a rank; an idle engine step waits for it."""

    def __init__(self) -> None:
        self._rung = threading.Event()

    def ring(self) -> None:
        self._rung.set()

    def wait(self, seconds: float) -> None:
        """Wait until it rings or has rung since the last wait, at most `seconds`."""
        self._rung.wait(seconds)
        self._rung.clear()  # before the caller takes the reports, so that no later ring is lost
