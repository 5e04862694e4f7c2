"""Transfers when threads run out, when a library does not say the end, and when it hangs."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from carrier_peer import soon, threads_left

from kvferry.carriers.base import MemoryRegion, TransferState
from kvferry.carriers.library import mooncake, nixl, shared
from kvferry.carriers.library.nixl import NixlCarrier
from kvferry.carriers.library.shared import (
    LibraryCarrier,
    LibraryEndpoint,
    LibraryJob,
    LibraryPeer,
)
from kvferry.carriers.tcp.carrier import TcpCarrier
from kvferry.carriers.transfer import Job, Workers
from kvferry.copies import Copies
from kvferry.errors import DeadlineExceeded, PeerLost, TransferError
from kvferry.handover.deadline import Deadline, await_transfer, end_transfers
from no_threads import no_threads
from waiting import require_for, wait_until

MIB = 1 << 20


class MemmoveCarrier(LibraryCarrier):
    """Its library is memmove: both ends are in this process."""

    name = "memmove"
    batch_descriptors = 64
    batch_bytes = 1 << 20

    def __init__(self, gpu: int = shared.ON_HOST) -> None:
        self.registered: list[MemoryRegion] = []
        self.batches = self.copies = 0
        super().__init__(host=None, secret=None, flavour="", gpu=gpu)

    def _start(self) -> None: ...

    def register_one(self, region: MemoryRegion) -> None:
        self.registered.append(region)

    def unregister_one(self, region: MemoryRegion) -> None:
        self.registered.remove(region)

    def _address(self) -> bytes:
        return str(id(self)).encode()

    def _attach(self, endpoint: LibraryEndpoint) -> Any: ...

    def _detach(self, handle: Any) -> None: ...

    def _carry(self, job: Job, peer: LibraryPeer, batch: Copies, *, reading: bool) -> None:
        self.batches += 1
        self.copies += len(batch)
        for src, dst, length in zip(batch.src, batch.dst, batch.length, strict=True):
            ctypes.memmove(int(dst), int(src), int(length))

    def _shut(self) -> None: ...


@pytest.mark.parametrize("refused", [["help-1"], ["help-0", "help-1"], ["help-0"]])
def test_a_helper_that_cannot_start_is_done_without(
    refused: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = np.random.default_rng(1).integers(0, 256, 64 * MIB, dtype=np.uint8)
    ours = np.zeros_like(theirs)
    owner, user = TcpCarrier(writable=True), TcpCarrier(streams_per_transfer=3)
    try:
        owner.register([MemoryRegion(theirs.ctypes.data, theirs.nbytes)])
        user.register([MemoryRegion(ours.ctypes.data, ours.nbytes)])
        peer = user.connect(owner.endpoint(), soon())
        at = np.arange(64, dtype=np.int64) * MIB
        copies = Copies(at + theirs.ctypes.data, at + ours.ctypes.data, np.full(64, MIB))
        with no_threads(monkeypatch, *(f"kvferry-tcp-{name}" for name in refused)):
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
    with no_threads(monkeypatch, "few-0", "few-1"):
        job = workers.submit(Job(lambda job: None, "a transfer"))
    with pytest.raises(TransferError, match="no thread"):
        job.wait(soon(1))
    assert workers.busy == []
    workers.submit(Job(lambda job: None, "another one")).wait(soon(1))
    workers.close()


@pytest.fixture
def memmove() -> Iterator[MemmoveCarrier]:
    with closing(MemmoveCarrier()) as carrier:
        yield carrier


@pytest.mark.parametrize("gpu", [shared.ON_HOST, 0])
def test_neighbours_on_a_gpu_are_registered_apart(gpu: int) -> None:
    """They may be allocations of their own, and drivers register no memory that spans two."""
    base = 1 << 40
    first, second = (MemoryRegion(base + at * MIB, MIB) for at in range(2))
    carrier = MemmoveCarrier(gpu)
    (scratch,) = carrier.registered
    carrier.register([first])
    carrier.register([second])
    apart = [first, second] if gpu == 0 else [MemoryRegion(base, 2 * MIB)]
    assert carrier.registered == [scratch, *apart]
    carrier.close()
    assert carrier.registered == []


@pytest.mark.parametrize(
    ("owners", "users", "moved"),
    [(shared.ON_HOST, shared.ON_HOST, 1), (0, shared.ON_HOST, 2), (shared.ON_HOST, 0, 2)],
)
def test_no_copy_is_joined_over_the_border_of_two_registrations(
    owners: int, users: int, moved: int
) -> None:
    """Libraries refuse such a copy, whichever side it is."""
    theirs, ours = np.arange(8192) % 251, np.zeros(8192, dtype=np.int64)
    half = theirs.nbytes // 2
    with closing(MemmoveCarrier(owners)) as owner, closing(MemmoveCarrier(users)) as user:
        for carrier, memory in ((owner, theirs), (user, ours)):
            base = memory.ctypes.data
            carrier.register([MemoryRegion(base + at, half) for at in (0, half)])
        link = user.connect(owner.endpoint(), soon())
        before, at = user.copies, np.array([0, half])
        copies = Copies(at + theirs.ctypes.data, at + ours.ctypes.data, np.full(2, half))
        user.read(link, copies).wait(soon())
        assert user.copies - before == moved
        assert np.array_equal(theirs, ours)


def late(
    carrier: MemmoveCarrier, gone: threading.Event, error: TransferError | None = None
) -> LibraryJob:
    """A transfer that has failed, to or from a peer that lives until `gone` is set."""

    def fail(job: Job) -> None:
        job.late_bytes = True
        raise error or TransferError("the batch failed, and the rest of it may be on its way")

    peer: Any = SimpleNamespace(connected=True, liveness=SimpleNamespace(gone=gone.is_set))
    job = LibraryJob(carrier, peer, fail, "a read")
    job.run()
    return job


def test_bytes_that_may_still_arrive_keep_a_failed_transfer_from_being_over(
    memmove: MemmoveCarrier, caplog: pytest.LogCaptureFixture
) -> None:
    gone = threading.Event()
    job = late(memmove, gone)
    with pytest.raises(TransferError, match="the batch failed"):
        job.wait(soon(1))
    assert job.poll() is TransferState.FAILED and not job.settled()
    with pytest.raises(DeadlineExceeded):
        job.cancel(seconds=0.1)
    assert caplog.text.count("transfer is abandoned") == 1

    stuck = threading.Event()

    @contextmanager
    def counted() -> Iterator[None]:
        stuck.set()
        gone.set()  # the peer dies
        yield

    job.cancel = lambda: LibraryJob.cancel(job, seconds=0.1)  # type: ignore[method-assign]
    end_transfers([job], counted)
    assert stuck.is_set()
    assert job.settled()
    assert caplog.text.count("transfer is abandoned") == 1


def test_they_do_not_keep_it_for_ever_nor_one_after_the_other(
    memmove: MemmoveCarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "LATE_SECONDS", 2.0)
    jobs = []
    for _ in range(8):
        jobs.append(late(memmove, threading.Event()))
        assert not jobs[-1].settled()
    begin = time.monotonic()
    end_transfers(jobs, nullcontext)
    assert time.monotonic() - begin < 12  # one after the other, it would be sixteen
    assert all(job.settled() for job in jobs)


def test_a_library_that_gave_up_is_not_waited_for_again(memmove: MemmoveCarrier) -> None:
    """Its own timeout is a `DeadlineExceeded` too; that does not mean that the transfer goes on."""
    job = late(memmove, threading.Event(), DeadlineExceeded("the peer makes no progress"))
    watch = Deadline(time.monotonic() + 60)
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="no progress"):
        await_transfer(job, watch)
    assert time.monotonic() - begin < 30  # not until its deadline


@pytest.mark.parametrize("reading", [True, False])
def test_copies_of_any_length_move_in_batches(reading: bool) -> None:
    rng = np.random.default_rng(3)
    theirs, ours = (rng.integers(0, 256, MIB, dtype=np.uint8) for _ in range(2))
    owner, user = MemmoveCarrier(), MemmoveCarrier()
    try:
        for carrier, memory in ((owner, theirs), (user, ours)):
            carrier.register([MemoryRegion(memory.ctypes.data, MIB)])
        link = user.connect(owner.endpoint(), soon())
        src, dst = (theirs, ours) if reading else (ours, theirs)
        a, b = (rng.permutation(MIB // 128)[:4000] * 128 for _ in range(2))
        length = rng.integers(0, 129, 4000)
        expected = dst.copy()
        for x, y, n in zip(a, b, length, strict=True):
            expected[y : y + n] = src[x : x + n]
        copies = Copies(a + src.ctypes.data, b + dst.ctypes.data, length)
        (user.read if reading else user.write)(link, copies).wait(soon())
        assert np.array_equal(dst, expected)
        assert user.batches >= np.count_nonzero(length) // user.batch_descriptors
    finally:
        user.close()
        owner.close()
    assert not threads_left("kvferry-memmove")


def test_connecting_keeps_its_deadline_while_the_library_hangs() -> None:
    class Hanging(MemmoveCarrier):
        release = threading.Event()

        def _attach(self, endpoint: LibraryEndpoint) -> Any:
            self.release.wait(60)

    owner, user = MemmoveCarrier(), Hanging()
    try:
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            user.connect(owner.endpoint(), soon(0.5))
        assert time.monotonic() - begin < 20
    finally:
        Hanging.release.set()
        user.close()
        owner.close()
    assert not threads_left("kvferry-memmove")


def test_a_peer_that_hangs_takes_no_time_from_the_others_when_a_carrier_closes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Hanging(MemmoveCarrier):
        release, under_way = threading.Event(), 0

        def _carry(self, job: Job, peer: LibraryPeer, batch: Copies, *, reading: bool) -> None:
            if batch.dst[0] == self._own.address:  # the greeting
                return
            self.under_way += 1
            while not self.release.wait(0.05):
                if peer is not self._peers[0]:
                    job.checkpoint()

    memory = np.zeros(64, dtype=np.uint8)
    owner, user = MemmoveCarrier(), Hanging()
    try:
        for carrier in (owner, user):
            carrier.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
        at = np.array([memory.ctypes.data])
        for _ in range(2):
            peer = user.connect(owner.endpoint(), soon())
            user.read(peer, Copies(at, at, np.array([64])))
        wait_until(lambda: user.under_way == 2)
        monkeypatch.setattr(shared, "CANCEL_SECONDS", 0.5)
        user.close()
        assert caplog.text.count("transfer is abandoned") == 1
    finally:
        Hanging.release.set()
        user.close()
        owner.close()
    assert not threads_left("kvferry-memmove")


class EndsLate:
    """A job's lock that its own thread gets for the last time when it may."""

    def __init__(self) -> None:
        self.at_its_end, self.may = threading.Event(), threading.Event()
        self._lock, self._caller, self._entries = threading.Lock(), threading.get_ident(), 0

    def __enter__(self) -> None:
        if threading.get_ident() != self._caller:
            self._entries += 1
            if self._entries == 2:
                self.at_its_end.set()
                self.may.wait(10)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_peer_that_is_met_at_the_last_moment_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its greeting has done all it does, and is not over yet, when the deadline passes."""
    owner, user = MemmoveCarrier(), MemmoveCarrier()
    lock = EndsLate()

    class LateJob(LibraryJob):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self._lock = lock  # type: ignore[assignment]

    monkeypatch.setattr(shared, "LibraryJob", LateJob)
    try:
        with pytest.raises(DeadlineExceeded):
            user.connect(owner.endpoint(), soon(1.0))
        peers = user._peers
        assert lock.at_its_end.is_set() and len(peers) == 1
        lock.may.set()
        wait_until(lambda: not peers)
    finally:
        lock.may.set()
        user.close()
        owner.close()


def test_a_nixl_peer_met_again_while_its_old_connection_ends() -> None:
    known: list[str] = []
    adding, removed = threading.Event(), threading.Event()

    class Agent:
        def add_remote_agent(self, metadata: bytes) -> str:
            known.append("P")
            if len(known) > 1:
                adding.set()
                removed.wait(0.3)  # what removes it must wait for this
            return "P"

        def remove_remote_agent(self, handle: str) -> None:
            known.clear()
            removed.set()

    carrier = NixlCarrier.__new__(NixlCarrier)
    agents: dict[str, int] = {}
    carrier._agent, carrier._agents, carrier._agents_lock = Agent(), agents, threading.Lock()
    endpoint: Any = SimpleNamespace(address=b"")
    attach = carrier._attach
    handle = attach(endpoint)
    again = threading.Thread(target=attach, args=(endpoint,))
    again.start()
    assert adding.wait(30)
    carrier._detach(handle)
    again.join(30)
    assert agents == {"P": 1} and known


def test_carriers_that_start_at_once_do_not_share_their_settings() -> None:
    name, entered = "KVFERRY_TEST_OF_SETTINGS", threading.Event()

    def start() -> tuple[str | None, str | None]:
        with shared.environment({name: "second"}):
            entered.set()
            with shared.environment({name: "inner"}):
                inner = os.environ.get(name)
            return inner, os.environ.get(name)

    with ThreadPoolExecutor(1) as pool:
        with shared.environment({name: "first"}):
            second = pool.submit(start)
            require_for(0.1, lambda: not entered.is_set())
            assert os.environ[name] == "first"
        assert second.result(30) == ("second", "second")
    assert name not in os.environ


def test_a_library_that_fails_in_its_own_way_leaves_nothing() -> None:
    class Faulty(MemmoveCarrier):
        def _start(self) -> None:
            raise TypeError("incompatible function arguments")

    with pytest.raises(TypeError):
        Faulty()
    assert not threads_left("kvferry-liveness")


@pytest.mark.parametrize(
    ("told", "loopback", "rdma", "ours"),
    [
        ({}, True, True, {"UCX_NET_DEVICES": "lo", "UCX_MODULES": "^ib"}),
        ({}, False, False, {"UCX_MODULES": "^ib"}),
        ({}, False, True, {}),
        ({"UCX_NET_DEVICES": "eth0"}, True, False, {"UCX_MODULES": "^ib"}),
        ({"UCX_NET_DEVICES": "mlx5_0:1"}, True, True, {}),
        ({"UCX_MODULES": "all"}, True, False, {"UCX_NET_DEVICES": "lo"}),
    ],
)
def test_ucx_loads_infiniband_only_where_a_device_is_used(
    told: dict[str, str],
    loopback: bool,
    rdma: bool,
    ours: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl, "rdma_devices", lambda: ["mlx5_0"] if rdma else [])
    names = ("UCX_NET_DEVICES", "UCX_MODULES")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with nixl.ucx_settings(loopback):
        assert {name: os.environ[name] for name in names if name in os.environ} == told | ours
    assert {name: os.environ[name] for name in names if name in os.environ} == told


@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.parametrize(("copies", "late"), [(4, True), (1, False)])
def test_a_batch_that_mooncake_refuses_may_have_begun(
    monkeypatch: pytest.MonkeyPatch, copies: int, late: bool, alive: bool
) -> None:
    """Of several copies it does not say which; the peer may only be stopped, or about to close.
    A single one has not begun."""
    monkeypatch.setattr(mooncake, "SETTLE_REFUSED_SECONDS", 0.0)
    carrier = mooncake.MooncakeCarrier.__new__(mooncake.MooncakeCarrier)
    carrier._engine = SimpleNamespace(
        batch_transfer_sync_read=lambda *_: -1, batch_transfer_async_read=lambda *_: 0
    )
    peer: Any = SimpleNamespace(
        handle="127.0.0.1:1",
        connected=True,
        liveness=SimpleNamespace(alive=lambda: alive),
        require_usable=lambda: None,
    )
    some = np.arange(copies, dtype=np.int64)

    def read(job: Job) -> None:
        carrier._carry(job, peer, Copies(some, some, some + 1), reading=True)

    job = Job(read, "a read")
    job.run()
    assert job.poll() is TransferState.FAILED and job.late_bytes is late


def test_what_is_given_up_goes_on() -> None:
    """Callers that wait hear why at once. The transfer is not settled, and its thread is busy,
    until the work returns."""
    go_on, workers = threading.Event(), Workers("test-given-up", 1)

    def work(job: Job) -> None:
        job.give_up(PeerLost("gone"))
        job.give_up(PeerLost("and again"))
        assert go_on.wait(10)

    job = workers.submit(Job(work, "a transfer"))
    try:
        with pytest.raises(PeerLost, match="gone"):
            job.wait(time.monotonic() + 5)
        assert job.poll() is TransferState.FAILED
        assert not job.settled() and workers.busy == [job]
        with pytest.raises(DeadlineExceeded, match="may still arrive"):
            job.cancel(seconds=0.01)
    finally:
        go_on.set()
    wait_until(job.settled)
    assert not workers.busy
    job.cancel()
    with pytest.raises(PeerLost, match="gone"):
        job.wait(time.monotonic())
    workers.close()
