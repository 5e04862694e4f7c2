"""The desk that gathers and scatters for packed mode: right bytes, and no slot that two can use."""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from carrier_peer import soon, threads_left

from kvferry.errors import (
    Cancelled,
    DeadlineExceeded,
    KvferryError,
    OutOfBounds,
    PeerLost,
    TransferError,
)
from kvferry.transport import desk as desk_module
from kvferry.transport import desk_visit, foreign
from kvferry.transport.base import MemoryRegion
from kvferry.transport.cost import Choice, Packing
from kvferry.transport.desk import FULL, Desk, Say
from kvferry.transport.desk_visit import Busy, Visit
from kvferry.transport.foreign import ForeignCarrier
from kvferry.transport.foreign_peer import ForeignEndpoint, ForeignPeer
from kvferry.transport.host import HostMemory
from kvferry.transport.jobs import Job
from kvferry.transport.regions import Arrays, RegionTable
from kvferry.transport.slots import SLOTS, Slot, Slots
from kvferry.transport.tcp_frames import HEADER, Header
from kvferry.transport.tcp_stream import Stream

SIZE = 1 << 20
TOKEN, INCARNATION = secrets.token_bytes(16), secrets.token_bytes(16)


def fine() -> None:
    """Nobody gives up."""


def until(holds: Callable[[], bool]) -> bool:
    end = soon(5)
    while not holds() and time.monotonic() < end:
        time.sleep(0.005)
    return holds()


@dataclass
class Open:
    desk: Desk
    slots: Slots
    memory: np.ndarray

    def visit(self) -> Visit:
        return Visit.open("127.0.0.1", self.desk.port, TOKEN, INCARNATION)

    def runs(self, count: int, size: int = 100) -> tuple[np.ndarray, np.ndarray]:
        at = np.random.default_rng(count).permutation(SIZE // size)[:count] * size
        return at + self.memory.ctypes.data, np.full(count, size)

    def slot(self, offset: int, count: int) -> np.ndarray:
        staging = self.slots.region
        assert 0 <= offset <= staging.bytes - count
        where = (ctypes.c_uint8 * count).from_address(staging.address + offset)
        return np.ctypeslib.as_array(where)


@pytest.fixture
def opened() -> Iterator[Open]:
    slots = Slots(2, 1 << 16)
    memory = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    desk = Desk("127.0.0.1", TOKEN, INCARNATION, slots)
    regions = [MemoryRegion(memory.ctypes.data, SIZE)]
    desk.regions, desk.memory = RegionTable.of(regions), HostMemory(regions)
    yield Open(desk, slots, memory)
    desk.close(5)
    assert threads_left("kvferry-desk") == []


def test_gathered_and_scattered(opened: Open) -> None:
    visit = opened.visit()
    address, length = opened.runs(300)
    at = address[:, None] - opened.memory.ctypes.data + np.arange(100)
    lent = visit.ask(Say.GATHER, address, length, fine)
    assert np.array_equal(opened.slot(lent, 30_000), opened.memory[at].reshape(-1))
    visit.say(Say.RETURN)
    visit.done(fine)
    expected = opened.memory.copy()
    fresh = np.random.default_rng(2).integers(0, 256, 30_000, dtype=np.uint8)
    expected[at] = fresh.reshape(300, 100)
    opened.slot(visit.ask(Say.LEND, address, length, fine), 30_000)[:] = fresh
    visit.say(Say.APPLY)
    visit.done(fine)
    assert np.array_equal(opened.memory, expected)
    assert opened.slots.free == 2
    visit.close()


def test_ranges_outside_are_refused_and_the_next_request_works(opened: Open) -> None:
    visit = opened.visit()
    address, length = opened.runs(10)
    before = opened.memory.copy()
    for bad, size in ((address[0] + SIZE, 8), (-1, 8), (address[0], -1), (address[0], 0), (0, 1)):
        for what in (Say.GATHER, Say.LEND):
            with pytest.raises(OutOfBounds):
                visit.ask(what, np.append(address, bad), np.append(length, size), fine)
    with pytest.raises(KvferryError, match="slot"):
        visit.ask(Say.GATHER, *opened.runs(700), fine)  # more than a slot
    visit.ask(Say.GATHER, address, length, fine)
    visit.close()
    assert until(lambda: opened.slots.free == 2)
    assert np.array_equal(opened.memory, before)


def test_a_slot_that_may_still_be_written_is_never_lent_again(opened: Open) -> None:
    address, length = opened.runs(10)
    reader, writer, other = opened.visit(), opened.visit(), opened.visit()
    reader.ask(Say.GATHER, address, length, fine)
    taken = writer.ask(Say.LEND, address, length, fine)
    with pytest.raises(Busy):
        other.ask(Say.GATHER, address, length, fine)
    reader.close(writing=True)  # vanishes: what it reads does not matter any more
    assert until(lambda: opened.slots.free == 1)
    writer.close(writing=True)
    assert until(lambda: opened.slots.retired == 1)
    for _ in range(3):
        assert other.ask(Say.GATHER, address, length, fine) != taken
        other.say(Say.RETURN)
        other.done(fine)
    writer = opened.visit()
    writer.ask(Say.LEND, address, length, fine)
    writer.close()  # it says that it does not write
    assert until(lambda: opened.slots.free == 1)
    assert opened.slots.retired == 1
    other.close()


def test_a_reader_that_keeps_a_slot_too_long_is_not_told_that_it_was_right(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk_module, "LEND_SECONDS", 0.05)
    visit = opened.visit()
    visit.ask(Say.GATHER, *opened.runs(10), fine)
    assert until(lambda: opened.slots.free == 2)  # another one's bytes may be in it now
    with pytest.raises(PeerLost):
        visit.say(Say.RETURN)
        visit.done(fine)
    visit.close()


def test_strangers_and_nonsense_end_their_own_connection_only(opened: Open) -> None:
    with pytest.raises(PeerLost):
        Visit.open("127.0.0.1", opened.desk.port, secrets.token_bytes(16), INCARNATION)
    with pytest.raises(PeerLost, match="restarted"):
        Visit.open("127.0.0.1", opened.desk.port, TOKEN, secrets.token_bytes(16))
    for junk in (b"\0" * 64, secrets.token_bytes(500), b"KVFT" + b"\xff" * 28):
        visit = opened.visit()
        visit._stream.send(junk)
        visit._stream.drain(1)
        visit.close()
    visit = opened.visit()
    visit.ask(Say.LEND, *opened.runs(3), fine)
    visit._stream.send(secrets.token_bytes(32))  # instead of APPLY: who knows what it writes
    assert until(lambda: opened.slots.retired == 1)
    visit.close()
    visit = opened.visit()
    visit.ask(Say.GATHER, *opened.runs(3), fine)
    visit.close()


def drip(send: Callable[[bytes], None], data: bytes, seconds: float = 0.05) -> None:
    """A byte now and then, as long as somebody takes them."""
    with contextlib.suppress(TransferError):
        for n in range(len(data)):
            send(data[n : n + 1])
            time.sleep(seconds)


@pytest.mark.parametrize("what", ["request", "slot"])
def test_a_visitor_that_drips_is_let_go(
    opened: Open, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Its words would be whole after 1.6 s."""
    monkeypatch.setattr(desk_module, "FRAME_SECONDS" if what == "request" else "LEND_SECONDS", 0.2)
    visit = opened.visit()
    if what == "slot":
        visit.ask(Say.GATHER, *opened.runs(3), fine)
        assert opened.slots.free == 1
    kind = Say.RETURN if what == "slot" else Say.GATHER
    begin = time.monotonic()
    drip(visit._stream.send, Header(kind, visit._request).pack())
    assert time.monotonic() - begin < 1
    assert until(lambda: opened.slots.free == 2)
    visit.close(writing=True)  # without a word


# --- a carrier whose library is memmove, which can be told to fail -------------------------------


class MemmoveCarrier(ForeignCarrier):
    name = "memmove"
    batch_descriptors = 64
    batch_bytes = 1 << 20

    def __init__(self, packing: Packing = "packed") -> None:
        super().__init__(
            host=None, secret=None, flavour="", costs_of="memmove", packing=packing, costs=None
        )
        self.fails: Callable[[Job], None] | None = None
        self.moved = 0  # descriptors

    def register_one(self, region: MemoryRegion) -> None: ...

    def unregister_one(self, region: MemoryRegion) -> None: ...

    def _address(self) -> bytes:
        return str(id(self)).encode()

    def _attach(self, endpoint: ForeignEndpoint) -> Any: ...

    def _detach(self, handle: Any) -> None: ...

    def _carry(self, job: Job, peer: ForeignPeer, batch: Arrays, *, reading: bool) -> None:
        if self.fails is not None:
            self.fails(job)
        self.moved += len(batch)
        for src, dst, length in zip(batch.src, batch.dst, batch.length, strict=True):
            ctypes.memmove(int(dst), int(src), int(length))

    def _shut(self) -> None: ...


@dataclass
class Two:
    owner: MemmoveCarrier
    user: MemmoveCarrier
    theirs: np.ndarray
    ours: np.ndarray
    link: ForeignPeer

    def copies(self, *, reading: bool, count: int = 4000) -> Arrays:
        rng = np.random.default_rng(count)
        there, here = (rng.permutation(SIZE // 128)[:count] * 128 for _ in range(2))
        there, here = there + self.theirs.ctypes.data, here + self.ours.ctypes.data
        length = rng.integers(1, 129, count)
        return Arrays(there, here, length) if reading else Arrays(here, there, length)

    def expected(self, copies: Arrays, *, reading: bool) -> np.ndarray:
        src, dst = (self.theirs, self.ours) if reading else (self.ours, self.theirs)
        found = dst.copy()
        for a, b, n in zip(copies.src, copies.dst, copies.length, strict=True):
            a, b = a - src.ctypes.data, b - dst.ctypes.data
            found[b : b + n] = src[a : a + n]
        return found


@pytest.fixture
def two() -> Iterator[Two]:
    rng = np.random.default_rng(3)
    theirs, ours = (rng.integers(0, 256, SIZE, dtype=np.uint8) for _ in range(2))
    owner, user = MemmoveCarrier(), MemmoveCarrier()
    for carrier, memory in ((owner, theirs), (user, ours)):
        carrier.register([MemoryRegion(memory.ctypes.data, SIZE)])
    yield Two(owner, user, theirs, ours, user.connect(owner.endpoint(), soon()))
    user.close()
    owner.close()
    assert threads_left("kvferry-memmove") == threads_left("kvferry-desk") == []


@pytest.mark.parametrize("reading", [True, False])
def test_few_long_copies_instead_of_many_short_ones(two: Two, reading: bool) -> None:
    copies = two.copies(reading=reading)
    expected = two.expected(copies, reading=reading)
    before = two.user.moved
    (two.user.read if reading else two.user.write)(two.link, copies).wait(soon())
    assert np.array_equal(two.ours if reading else two.theirs, expected)
    assert two.user.moved - before == 1
    assert two.user.counters["packed"] == 1
    assert two.owner.counters["desk_gathered" if reading else "desk_scattered"] == 1


@pytest.mark.parametrize("reading", [True, False])
@pytest.mark.parametrize("whose", ["owner", "user"])
def test_without_a_free_slot_runs_go_directly(two: Two, reading: bool, whose: str) -> None:
    slots = getattr(two, whose)._slots
    while slots.take() is not None:
        pass
    copies = two.copies(reading=reading)
    expected = two.expected(copies, reading=reading)
    (two.user.read if reading else two.user.write)(two.link, copies).wait(soon())
    assert np.array_equal(two.ours if reading else two.theirs, expected)
    assert two.user.moved > len(copies)


def test_a_failed_transfer_gives_its_slots_back_unless_bytes_may_come(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(job: Job) -> None:
        raise TransferError("no")

    def fail_open(job: Job) -> None:
        job.late_bytes = True
        raise TransferError("no, and who knows")

    monkeypatch.setattr(foreign, "GRACE_SECONDS", 0.0)
    owned, used = two.owner._slots, two.user._slots
    for fails, reading, lost_here, lost_there in (
        (fail, True, 0, 0),
        (fail, False, 0, 0),
        (fail_open, True, 1, 0),
        (fail_open, False, 1, 1),
    ):
        two.user.fails = fails
        here, there = used.retired + lost_here, owned.retired + lost_there
        start = two.user.read if reading else two.user.write
        with pytest.raises(TransferError, match="no"):
            start(two.link, two.copies(reading=reading)).wait(soon())
        assert until(lambda n=there: (owned.retired, owned.free) == (n, SLOTS - n))
        assert until(lambda n=here: (used.retired, used.free) == (n, SLOTS - n))


def test_cancelled_while_the_desk_does_not_answer(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two.owner._desk, "_request", lambda stream: time.sleep(0.5) or True)
    transfer = two.user.read(two.link, two.copies(reading=True))
    with pytest.raises(DeadlineExceeded):
        transfer.wait(soon(0.1))
    begin = time.monotonic()
    transfer.cancel()
    assert time.monotonic() - begin < 2
    with pytest.raises(Cancelled):
        transfer.wait(soon())


def test_cancelled_while_the_desk_drips(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole answers would take 6 s or more, and no byte is later than the last one by a stall."""
    dripped = threading.Event()

    def lie(stream: Stream, header: Header, slot: Slot, *_: object) -> None:
        if dripped.is_set():
            drip(stream.send, Header(Say.READY, header.request, 0, slot.offset).pack(), 0.2)
        else:
            dripped.set()
            drip(stream.send, Header(Say.ERROR, header.request, 2000).pack() + b"x" * 2000, 0.005)

    monkeypatch.setattr(two.owner._desk, "_lend_read", lie)
    transfer = two.user.read(two.link, two.copies(reading=True))
    assert dripped.wait(5)
    begin = time.monotonic()
    transfer.cancel()
    assert time.monotonic() - begin < 2
    with pytest.raises(Cancelled):
        transfer.wait(soon())
    monkeypatch.setattr(desk_visit, "STALL_SECONDS", 0.5)  # and where nobody cancels
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="has not answered"):
        two.user.read(two.link, two.copies(reading=True)).wait(soon())
    assert time.monotonic() - begin < 3
    two.user.disconnect(two.link)
    assert two.user._peers == []
    assert until(lambda: two.user._slots.free == SLOTS)


def test_cancelled_while_the_desk_drips_that_it_has_applied(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told to: so nobody can say that no byte comes later. But the threads are free."""
    dripped = threading.Event()
    plain = Stream.send

    def send(stream: Stream, data: bytes, deadline: float | None = None) -> None:
        if len(data) == HEADER.size and Header.unpack(data).kind == Say.DONE:
            dripped.set()
            drip(lambda byte: plain(stream, byte), data, 0.2)
        else:
            plain(stream, data, deadline)

    monkeypatch.setattr(Stream, "send", send)
    monkeypatch.setattr(desk_visit, "APPLIED_SECONDS", 0.3)
    transfer = two.user.write(two.link, two.copies(reading=False))
    assert dripped.wait(5)
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="may still arrive"):
        transfer.cancel(seconds=1.0)
    with pytest.raises(Cancelled):
        transfer.wait(soon(0.1))
    two.user.disconnect(two.link)
    assert time.monotonic() - begin < 3
    assert two.user._peers == []


@pytest.mark.parametrize("ends", [True, False])
def test_a_cancelled_write_that_the_desk_applies_is_seen_to_its_end(
    two: Two, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """The desk was told to apply, and is slow: `cancel` waits for it, or says that it did not."""
    assert two.owner._desk is not None and two.owner._desk.memory is not None
    applying, go_on = threading.Event(), threading.Event()
    scatter = two.owner._desk.memory.scatter

    def slow(*arguments: Any) -> None:
        applying.set()
        go_on.wait(0.5 if ends else 30)
        scatter(*arguments)

    monkeypatch.setattr(two.owner._desk.memory, "scatter", slow, raising=False)
    monkeypatch.setattr(desk_visit, "APPLIED_SECONDS", 10.0 if ends else 0.2)
    copies = two.copies(reading=False)
    expected = two.expected(copies, reading=False)
    transfer = two.user.write(two.link, copies)
    assert applying.wait(10)
    before = two.theirs.copy()
    if ends:
        transfer.cancel()
        at_once = two.theirs.copy()
        time.sleep(1)
        assert np.array_equal(two.theirs, at_once)  # no byte of it came later
    else:
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="may still arrive"):
            transfer.cancel(seconds=1.0)
        assert time.monotonic() - begin < 5
        assert np.array_equal(two.theirs, before)
        go_on.set()
        assert until(lambda: np.array_equal(two.theirs, expected))  # as it said
    with pytest.raises(Cancelled):
        transfer.wait(soon())
    assert until(lambda: two.user._slots.free == SLOTS)  # the library had done with it
    assert until(lambda: two.owner._slots.free == SLOTS)


def test_a_stall_after_the_desk_was_told_to_apply_may_bring_late_bytes(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert two.owner._desk is not None and two.owner._desk.memory is not None
    go_on = threading.Event()
    monkeypatch.setattr(two.owner._desk.memory, "scatter", lambda *_: go_on.wait(30), raising=False)
    monkeypatch.setattr(desk_visit, "STALL_SECONDS", 0.1)
    monkeypatch.setattr(desk_visit, "APPLIED_SECONDS", 0.1)
    transfer = two.user.write(two.link, two.copies(reading=False))
    with pytest.raises(DeadlineExceeded, match="has not answered"):
        transfer.wait(soon())
    with pytest.raises(DeadlineExceeded, match="may still arrive"):
        transfer.cancel(seconds=0.5)
    go_on.set()


def test_no_visitor_comes_in_beside_close(opened: Open) -> None:
    """`close` runs as soon as the thread that accepts lets go of the lock."""
    desk, lock, closed = opened.desk, opened.desk._lock, threading.Event()

    class Between:
        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()
            if threading.current_thread() is desk._acceptor and not closed.is_set():
                closed.set()
                other = threading.Thread(target=desk.close, args=(0.2,))
                other.start()
                other.join()

    desk._lock = Between()  # type: ignore[assignment]
    with socket.create_connection(("127.0.0.1", desk.port)) as visitor:
        visitor.settimeout(2)
        assert visitor.recv(100) in (b"", FULL)
    assert closed.is_set()
    assert threads_left("kvferry-desk-serve") == []


def test_a_desk_that_lends_memory_outside_of_its_staging_is_refused(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = two.ours.copy()
    monkeypatch.setattr(Visit, "ask", lambda *_: 1 << 40)
    transfer = two.user.read(two.link, two.copies(reading=True))
    with pytest.raises(TransferError, match="staging memory"):
        transfer.wait(soon())
    assert np.array_equal(two.ours, before)


def test_a_peer_that_does_not_pack_is_reached_directly(two: Two) -> None:
    plain = MemmoveCarrier("direct")
    plain.register([MemoryRegion(two.theirs.ctypes.data, SIZE)])
    link = two.user.connect(plain.endpoint(), soon())
    copies = two.copies(reading=True)
    expected = two.expected(copies, reading=True)
    two.user.read(link, copies).wait(soon())
    assert np.array_equal(two.ours, expected) and two.user.counters["packed"] == 0
    plain.close()


def test_a_desk_that_is_full_or_cannot_be_reached_is_done_without(
    two: Two, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for broken in ("full", "unreachable"):
        if broken == "full":
            monkeypatch.setattr(desk_module, "MOST_VISITORS", 0)
        else:
            assert two.owner._desk is not None
            two.owner._desk.port = 1
        link = two.user.connect(two.owner.endpoint(), soon())
        copies = two.copies(reading=True)
        expected, before = two.expected(copies, reading=True), two.user.moved
        two.user.read(link, copies).wait(soon())
        assert np.array_equal(two.ours, expected)
        assert two.user.moved - before > 3000
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "port 1 " in caplog.text


@pytest.mark.parametrize("slot_bytes", [0, -1, 1 << 60])
def test_endpoints_whose_slots_make_no_sense_are_refused(two: Two, slot_bytes: int) -> None:
    good = ForeignEndpoint.decode(two.owner.endpoint(), "memmove")
    bad = msgspec.msgpack.encode(msgspec.structs.replace(good, slot_bytes=slot_bytes))
    with pytest.raises(KvferryError, match="slots of"):
        two.user.connect(bad, soon())


def test_what_was_not_measured_is_not_packed() -> None:
    assert not Choice("nobody-measured-this").may_pack
    assert Choice("nobody-measured-this", "packed").may_pack
    assert Choice("tcp").may_pack and not Choice("tcp", "direct").may_pack
