# SPDX-License-Identifier: Apache-2.0
"""The transfer that all carriers hand out, and the threads that run it.

    queued --> running --> done
       |          |------> failed   with the error that `wait` raises
       '--cancel--'------> failed   with `Cancelled`
                  '------> given up: failed for callers, and not settled before the work returns

A job's work is a function of the job. It calls `checkpoint()` between bounded pieces, which raises
once the job was cancelled. Work that blocks in a system call names in `woken_by` how to wake it.
`cancel()` returns when the work has ended, so no byte of it can arrive after that.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from kvferry.carriers.base import TransferState
from kvferry.errors import Cancelled, DeadlineExceeded, HandoverError, TransferError, text_of
from kvferry.workers import Threads

log = logging.getLogger(__name__)

T = TypeVar("T")

CANCEL_SECONDS = 10.0  # the bound of `cancel`; work that can be woken takes milliseconds


class Job:
    """A `Transfer` that a worker thread runs."""

    def __init__(self, work: Callable[[Job], None], what: str) -> None:
        self._work: Callable[[Job], None] | None = work
        self._what = what
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._running = self._under_way = False
        self._error: TransferError | None = None
        self._cancelled = ""  # why, once it is
        self.late_bytes = False  # set by work that ended while bytes may still be under way
        self._wake: Callable[[], None] | None = None

    def wait(self, deadline: float) -> None:
        if not self._ended.wait(min(deadline - time.monotonic(), threading.TIMEOUT_MAX)):
            raise DeadlineExceeded(f"{self._what} is not done by its deadline; it goes on")
        if self._error is not None:
            raise self._error.with_traceback(None)

    def poll(self) -> TransferState:
        if not self._ended.is_set():
            return TransferState.RUNNING
        return TransferState.DONE if self._error is None else TransferState.FAILED

    def settled(self) -> bool:
        return not self.occupied

    @property
    def occupied(self) -> bool:
        """Whether it is queued, or a thread is at work on it."""
        return not self._ended.is_set() or self._under_way

    def give_up(self, error: TransferError) -> None:
        """Called by the work, which goes on. Callers that wait get the error at once."""
        with self._lock:
            if not self._ended.is_set():
                self._under_way = True
                self._end(error)

    def cancel(self, seconds: float = CANCEL_SECONDS) -> None:
        self.request_cancel("the caller gave it up")
        if not self._ended.wait(seconds) or self.late_bytes or self._under_way:
            raise DeadlineExceeded(
                f"{self._what} was cancelled and its end was not confirmed in time; bytes of it "
                "may still arrive"
            )

    def request_cancel(self, why: str) -> None:
        """Ask for the end, without waiting for it."""
        with self._lock:
            if self._ended.is_set() or self._cancelled:
                return
            self._cancelled = why
            if not self._running:
                self._end(Cancelled(f"{self._what}: {why}, before it began"))
            if self._wake is not None:  # under the lock, so that it cannot hit a later job
                self._wake()

    def refuse(self, error: TransferError) -> None:
        """Fail a job that has not begun."""
        with self._lock:
            if not self._ended.is_set():
                self._end(error)

    def checkpoint(self) -> None:
        """Called by the work between its pieces."""
        if self._cancelled:
            raise Cancelled(f"{self._what}: {self._cancelled}")

    @contextlib.contextmanager
    def woken_by(self, wake: Callable[[], None]) -> Iterator[None]:
        """`wake` ends the system call that the work blocks in, and must not block itself."""
        with self._lock:
            self._wake = wake
        try:
            self.checkpoint()
            yield
        finally:
            with self._lock:
                self._wake = None

    def run(self) -> None:
        """Called once, by a worker."""
        with self._lock:
            if self._ended.is_set():
                return
            self._running = True
            work = self._work
        error: TransferError | None = None
        try:
            assert work is not None
            work(self)
        except TransferError as raised:
            error = raised
        except Exception as raised:  # also a peer that does not authenticate on a new connection
            error = TransferError(f"{self._what} failed: {text_of(raised)}")
        with self._lock:
            self._under_way = False
            if self._ended.is_set():  # it was given up
                return
            if error is not None and self._cancelled and not isinstance(error, Cancelled):
                error = Cancelled(f"{self._what}: {self._cancelled}")
            self._end(error)

    def join(self) -> None:
        """Wait until it has ended, well or not."""
        self._ended.wait()

    def _end(self, error: TransferError | None) -> None:
        self._error = error
        self._work = self._wake = None  # frees the arrays
        self._ended.set()


class Workers:
    """Up to `count` threads that run the jobs of a carrier, or of one of its peers, in order."""

    def __init__(self, name: str, count: int) -> None:
        self._threads = Threads(name, count)
        self._live: set[Job] = set()  # each use of it is one atomic operation

    def submit(self, job: Job) -> Job:
        """Have a job run soon. A job that will never run has failed when this returns."""
        self._live.add(job)
        try:
            self._threads.submit(partial(self._run, job))
        except Cancelled:
            job.request_cancel("the carrier is closed")
            self._live.discard(job)
        except HandoverError as error:
            job.refuse(TransferError(str(error)))
            self._live.discard(job)
        return job

    @property
    def busy(self) -> list[Job]:
        """Jobs that are queued, or that a thread is at work on."""
        return [job for job in list(self._live) if job.occupied]

    def close(self, seconds: float = CANCEL_SECONDS) -> None:
        """Cancel all jobs and end the threads. Idempotent."""
        self.end_soon()
        self._threads.join(seconds)

    def end_soon(self) -> None:
        """Cancel all jobs, without waiting for their ends."""
        self._threads.close()
        for job in self.busy:
            job.request_cancel("the carrier was closed")

    def _run(self, job: Job) -> None:
        job.run()
        self._live.discard(job)


def share(
    job: Job,
    parts: Iterator[T],
    do: Callable[[T, T | None], None],
    helpers: Workers,
    count: int,
    *,
    ahead: bool = False,
    join: Callable[[], None] = lambda: None,
) -> None:
    """Do all parts of a job on this thread and up to `count` others, in any order.

    With `ahead`, `do` also gets the part that the same thread does next, or None. Each of the other
    threads calls `join` first. It does no part if that raises, or returns too late. Returns when no
    thread does a part of the job any more; raises the first error.
    """
    first, second = next(parts, None), next(parts, None)
    if first is None:
        return
    if second is None:
        job.checkpoint()
        do(first, None)
        return
    lock = threading.Lock()
    errors: list[Exception] = []
    helping: list[Job] = []
    over = False

    def take() -> T | None:
        with lock:
            return None if errors else next(parts, None)

    def loop(_: Job) -> None:
        try:
            part = take()
            while part is not None:
                job.checkpoint()
                following = take() if ahead else None
                do(part, following)
                part = following if ahead and not errors else take()
        except Exception as error:
            errors.append(error)

    def help_out(share: Job) -> None:
        try:
            join()
        except Exception as error:
            log.debug("a transfer goes on with a thread less: %s", text_of(error))
            return
        with lock:
            if over:
                return
            helping.append(share)
        loop(share)

    parts = itertools.chain([first, second], parts)
    shares = [Job(help_out, "a share of a transfer") for _ in range(count)]
    try:
        for other in shares:
            helpers.submit(other)
        loop(job)
    finally:
        with lock:
            over = True
        for other in shares:
            other.request_cancel("nothing is left")  # ends a share that has not begun
        for other in helping:
            other.join()
    if errors:
        raise errors[0]
