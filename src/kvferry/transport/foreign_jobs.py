"""Transfers that nobody can take back, and the count of those that were given up anyway."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvferry.errors import DeadlineExceeded
from kvferry.transport.base import TransferState
from kvferry.transport.jobs import CANCEL_SECONDS, Job

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
            self._jobs = {job for job in self._jobs if job.poll() is TransferState.RUNNING}
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
    """A transfer that can end up abandoned."""

    def __init__(self, tracker: Abandoned, work: Callable[[Job], None], what: str) -> None:
        super().__init__(work, what)
        self._tracker = tracker
        self.abandoned = False

    def cancel(self, why: str = "the caller gave it up", seconds: float = CANCEL_SECONDS) -> None:
        try:
            super().cancel(why, seconds)
        except DeadlineExceeded:
            self._tracker.note(self)
            raise
