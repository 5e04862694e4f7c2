"""Transfers that nobody can take back, and the count of those that were given up anyway."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvferry.errors import DeadlineExceeded
from kvferry.transport.jobs import CANCEL_SECONDS, Job

LATE_SECONDS = 60.0  # longer than any timeout after which a library drops a connection
LATE_LOOK_SECONDS = 0.02

log = logging.getLogger(__name__)


class Abandoned:
    """The transfers of one carrier whose end was not seen in time. Any thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._jobs: set[ForeignJob] = set()
        self.count = 0

    @property
    def now(self) -> int:
        """Those whose memory the library may still touch."""
        with self._lock:
            self._jobs = {job for job in self._jobs if not job.settled()}
            return len(self._jobs)

    def note(self, job: ForeignJob) -> None:
        with self._lock:
            if job.abandoned:
                return
            job.abandoned = True
            self._jobs.add(job)
            self.count += 1
        log.error(
            "a %s transfer is abandoned: the library has not let go of its memory, which counts as "
            "in use until it does",
            self._name,
        )


class ForeignJob(Job):
    """A transfer that can end up abandoned. One that failed with `late_bytes` is not settled until
    the peer is `gone`, or for so long that the library has given up by itself."""

    def __init__(
        self,
        tracker: Abandoned,
        work: Callable[[Job], None],
        what: str,
        gone: Callable[[], bool],
        after: Callable[[], None],
    ) -> None:
        """`after` is called by the thread that ran it, once it has ended."""
        super().__init__(work, what)
        self._tracker, self._gone, self._after = tracker, gone, after
        self._late_until = float("inf")  # until it has ended
        self.abandoned = False

    def settled(self) -> bool:
        if not super().settled():
            return False
        if self.late_bytes:
            self.late_bytes = time.monotonic() < self._late_until and not self._gone()
        return not self.late_bytes

    def cancel(self, why: str = "the caller gave it up", seconds: float = CANCEL_SECONDS) -> None:
        until = time.monotonic() + seconds
        try:
            super().cancel(why, seconds)
        except DeadlineExceeded:
            while not self.settled():
                if time.monotonic() >= until:
                    self._tracker.note(self)
                    raise
                time.sleep(LATE_LOOK_SECONDS)

    def run(self) -> None:
        super().run()
        self._late_until = time.monotonic() + LATE_SECONDS
        self._after()
