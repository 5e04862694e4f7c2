"""Transfers when threads run out, when a library does not say the end, and when it hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
from carrier_peer import soon, threads_left
from test_desk import MemmoveCarrier

from kvferry.errors import DeadlineExceeded, TransferError
from kvferry.p2p.transfers import await_transfer, end_transfers
from kvferry.p2p.watch import Watch
from kvferry.transport import foreign_jobs
from kvferry.transport.base import MemoryRegion, TransferState
from kvferry.transport.foreign_jobs import Abandoned, ForeignJob
from kvferry.transport.foreign_peer import ForeignEndpoint
from kvferry.transport.jobs import Job, Latch, Workers
from kvferry.transport.regions import Arrays
from kvferry.transport.tcp import TcpCarrier

MIB = 1 << 20


@contextmanager
def no_thread_named(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[None]:
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name in names:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refusing)
        yield


@pytest.mark.parametrize("refused", [["help-1"], ["help-0", "help-1"], ["help-0"]])
def test_a_helper_that_cannot_start_is_done_without(
    refused: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = np.random.default_rng(1).integers(0, 256, 64 * MIB, dtype=np.uint8)
    ours = np.zeros_like(theirs)
    owner, user = TcpCarrier(), TcpCarrier(streams_per_transfer=3)
    try:
        owner.register([MemoryRegion(theirs.ctypes.data, theirs.nbytes)])
        user.register([MemoryRegion(ours.ctypes.data, ours.nbytes)])
        peer = user.connect(owner.endpoint(), soon())
        at = np.arange(64, dtype=np.int64) * MIB
        copies = Arrays(at + theirs.ctypes.data, at + ours.ctypes.data, np.full(64, MIB))
        with no_thread_named(monkeypatch, *(f"kvferry-tcp-{name}" for name in refused)):
            user.read(peer, copies).wait(soon())
        assert np.array_equal(ours, theirs)
        user.disconnect(peer)
    finally:
        user.close()
        owner.close()
    assert not threads_left("kvferry-tcp")


def test_without_any_thread_a_job_fails_and_its_workers_still_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = Workers("few", 2)
    with no_thread_named(monkeypatch, "few-0", "few-1"):
        job = workers.submit(Job(lambda job: None, "a transfer"))
    with pytest.raises(TransferError, match="no thread"):
        job.wait(soon(1))
    assert workers.busy == []
    workers.submit(Job(lambda job: None, "another one")).wait(soon(1))
    workers.close()


def late(gone: threading.Event, error: TransferError | None = None) -> tuple[Abandoned, ForeignJob]:
    def fail(job: Job) -> None:
        job.late_bytes = True
        raise error or TransferError("the batch failed, and the rest of it may be on its way")

    tracker = Abandoned("test")
    job = ForeignJob(tracker, fail, "a read", gone.is_set)
    job.run()
    return tracker, job


def test_bytes_that_may_still_arrive_keep_a_failed_transfer_from_being_over() -> None:
    gone = threading.Event()
    tracker, job = late(gone)
    with pytest.raises(TransferError, match="the batch failed"):
        job.wait(soon(1))
    assert job.poll() is TransferState.FAILED and not job.settled()
    with pytest.raises(DeadlineExceeded):
        job.cancel(seconds=0.1)
    assert (tracker.count, tracker.now) == (1, 1)

    stuck = threading.Event()

    @contextmanager
    def counted() -> Iterator[None]:
        stuck.set()
        gone.set()  # the peer dies
        yield

    job.cancel = lambda: ForeignJob.cancel(job, seconds=0.1)  # type: ignore[method-assign]
    end_transfers([job], counted)
    assert stuck.is_set()
    assert job.settled()
    assert tracker.now == 0


def test_they_do_not_keep_it_for_ever_nor_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(foreign_jobs, "LATE_SECONDS", 0.5)
    jobs = [late(threading.Event())[1] for _ in range(4)]
    assert not any(job.settled() for job in jobs)
    begin = time.monotonic()
    end_transfers(jobs, nullcontext)
    assert time.monotonic() - begin < 1
    assert all(job.settled() for job in jobs)


def test_a_library_that_gave_up_is_not_waited_for_again() -> None:
    """Its own timeout is a `DeadlineExceeded` too; that does not mean that the transfer goes on."""
    _, job = late(threading.Event(), DeadlineExceeded("the peer makes no progress"))
    watch = Watch(time.monotonic() + 5)
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="no progress"):
        await_transfer(job, watch)
    assert time.monotonic() - begin < 1


def test_connecting_keeps_its_deadline_while_the_library_hangs() -> None:
    class Hanging(MemmoveCarrier):
        release = threading.Event()

        def _attach(self, endpoint: ForeignEndpoint) -> Any:
            self.release.wait(20)

    owner, user = MemmoveCarrier(), Hanging()
    try:
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            user.connect(owner.endpoint(), soon(0.5))
        assert time.monotonic() - begin < 2
    finally:
        Hanging.release.set()
        user.close()
        owner.close()
    assert not threads_left("kvferry-memmove")


def test_a_latch_wakes_all_that_wait() -> None:
    latch = Latch()
    assert not latch.wait(0.01)
    assert not latch.wait(-1)
    seen: list[bool] = []
    waiting = [threading.Thread(target=lambda: seen.append(latch.wait(5))) for _ in range(8)]
    for thread in waiting:
        thread.start()
    latch.set()
    for thread in waiting:
        thread.join(5)
    assert seen == [True] * 8
    assert latch.is_set()
    assert latch.wait()
