"""When the device has come to what an engine's step said.

Kernels run after their launch returned. So what a step says of its blocks (a hold may be read, a
load may be written) is true only once the device has come to that point: a rank passes it on when
an event recorded at that moment has completed. On host memory that is at once.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger("kvferry")

Action = Callable[[], None]


class WhenReady:
    """Does things in the order in which they were asked for, when the device has come to each."""

    def __init__(self, gpu: bool) -> None:
        self._gpu = gpu
        self._queue: queue.SimpleQueue[tuple[Any, Action] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def mark(self) -> Callable[[Action], None]:
        """What is passed to the answer is done once all that was launched so far has run."""
        if not self._gpu:
            return lambda action: action()
        import torch

        event = torch.cuda.Event(blocking=True)
        event.record()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvferry-ready", daemon=True)
            self._thread.start()
        return lambda action: self._queue.put((event, action))

    def close(self) -> None:
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        while (one := self._queue.get()) is not None:
            event, action = one
            try:
                event.synchronize()
                action()
            except Exception:
                log.exception("an order of a step could not be passed on")
