"""The tcp carrier's own promises: secrets, the owner's checks, revoking, connections."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from carrier_peer import copies, soon, threads_left

from kvferry.carriers import MemoryRegion, TransferState
from kvferry.carriers.base import (
    RegionTable,
    StagedMemory,
    slices,
)
from kvferry.carriers.host import HostMemory, Vectors
from kvferry.carriers.tcp import carrier as tcp_carrier
from kvferry.carriers.tcp import frames
from kvferry.carriers.tcp.carrier import (
    STREAMS_PER_TRANSFER,
    TRANSFERS_PER_PEER,
    TcpCarrier,
    TcpEndpoint,
    TcpPeer,
)
from kvferry.carriers.tcp.frames import HEADER, FrameHeader, FrameKind, TcpStream
from kvferry.carriers.tcp.server import FrameRefused, Grants, ServerLimits
from kvferry.copies import Copies, table_bytes
from kvferry.errors import (
    AuthenticationError,
    DeadlineExceeded,
    KvferryError,
    OutOfBounds,
    PeerLost,
    TransferError,
)
from no_threads import no_threads
from waiting import require_for, wait_until

SIZE = 8 << 20
RIGHT, WRONG = "the right secret", "another secret of the same kind"
EVERYTHING = RegionTable.of([MemoryRegion(0, (1 << 62))])


class End:
    """A carrier and its memory."""

    def __init__(
        self,
        secret: str | None = "a secret for these tests",
        limits: ServerLimits | None = None,
        *,
        writable: bool = True,
    ) -> None:
        self.memory = np.zeros(SIZE, dtype=np.uint8)
        self.carrier = TcpCarrier(secret=secret, host="127.0.0.1", limits=limits, writable=writable)
        self.carrier.register([MemoryRegion(self.address, SIZE)])

    @property
    def address(self) -> int:
        return self.memory.ctypes.data


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    a, b = End(), End()
    yield a, b
    a.carrier.close()
    b.carrier.close()


def long_write(src: End, dst: End) -> tuple[np.ndarray, ...]:
    rounds = 2000
    return (
        np.full(rounds, src.address),
        np.full(rounds, dst.address),
        np.full(rounds, SIZE),
    )


@pytest.mark.parametrize("secrets", [(RIGHT, WRONG), (RIGHT, None), (None, WRONG)])
def test_secrets_that_differ(secrets: tuple[str | None, str | None]) -> None:
    owner, user = End(secrets[0]), End(secrets[1])
    with pytest.raises(AuthenticationError, match="secret"):
        user.carrier.connect(owner.carrier.endpoint(), soon())
    assert owner.carrier.server.counters["unauthenticated"] == 1
    owner.carrier.close()
    user.carrier.close()


def test_the_owner_checks_every_descriptor_itself(ends: tuple[End, End]) -> None:
    """A peer that does not look before it asks gets the same answer, and the connection lives."""
    owner, user = ends
    outside = np.zeros(4096, dtype=np.uint8)  # mapped there, not registered
    peer = user.carrier.connect(owner.carrier.endpoint(), soon())
    peer.regions = EVERYTHING
    for there in (outside.ctypes.data, owner.address - 1, owner.address + SIZE - 5, 8):
        user.memory[:] = 1
        good = owner.address + np.arange(100) * 64
        addresses = np.append(good, there)
        local = np.full(101, user.address)
        lengths = np.full(101, 10)
        with pytest.raises(OutOfBounds, match="the peer refused"):
            user.carrier.write(peer, copies(local, addresses, lengths)).wait(soon())
        with pytest.raises(OutOfBounds, match="the peer refused"):
            user.carrier.read(peer, copies(addresses, local, lengths)).wait(soon())
    assert not owner.memory.any()
    assert not outside.any()
    assert owner.carrier.server.counters["out_of_bounds"] == 8
    assert owner.carrier.server.counters["connections"] == 1
    user.carrier.write(peer, copies(user.address, owner.address, 10)).wait(soon())
    assert owner.memory[:10].all()


def test_a_closed_server_does_not_say_that_it_is_busy() -> None:
    """A connection that came in meanwhile ends: its owner is gone, and must not be tried again."""
    end = End()
    end.carrier.close()
    ours, theirs = socket.socketpair()
    with ours:
        assert not end.carrier.server.attach(theirs)
        ours.settimeout(10)
        assert ours.recv(100) == b""


def test_the_owner_closes_while_it_is_written_to(ends: tuple[End, End]) -> None:
    owner, user = ends
    user.memory[:] = 9
    peer = user.carrier.connect(owner.carrier.endpoint(), soon())
    transfer = user.carrier.write(peer, copies(*long_write(user, owner)))
    wait_until(owner.memory.any)
    owner.carrier.close()
    owner.memory[:] = 0  # it may be freed now
    with pytest.raises(PeerLost):
        transfer.wait(soon(5))
    assert not owner.memory.any()


def test_connections_are_reused_and_few(ends: tuple[End, End]) -> None:
    owner, user = ends
    peer = user.carrier.connect(owner.carrier.endpoint(), soon())
    for _ in range(20):
        user.carrier.read(peer, copies(owner.address, user.address, 100)).wait(soon())
    assert owner.carrier.server.counters["connections"] == 1
    many = [user.carrier.read(peer, copies(owner.address, user.address, SIZE)) for _ in range(50)]
    for transfer in many:
        transfer.wait(soon())
    # A helper's connection may come too late for its transfer: then the next one uses it.
    helpers = TRANSFERS_PER_PEER * (STREAMS_PER_TRANSFER - 1)
    most = TRANSFERS_PER_PEER * STREAMS_PER_TRANSFER + helpers
    assert owner.carrier.server.counters["connections"] <= most


def test_a_connection_that_the_owner_dropped_is_replaced() -> None:
    owner = End(limits=ServerLimits(idle_seconds=0.1))
    user = End()
    peer = user.carrier.connect(owner.carrier.endpoint(), soon())
    wait_until(lambda: owner.carrier.server.counters["idle"])
    user.carrier.read(peer, copies(owner.address, user.address, 100)).wait(soon())
    assert owner.carrier.server.counters["connections"] == 2
    owner.carrier.close()
    user.carrier.close()


def test_an_idle_connection_makes_way_for_a_new_reader() -> None:
    owner = End(limits=ServerLimits(max_connections=1, spare_idle_seconds=0.0))
    users = [End(), End()]

    def works(do: Callable[[], object]) -> bool:
        """Whether there was room. There is none for the moment until the other one is idle."""
        with contextlib.suppress(TransferError):
            do()
            return True
        return False

    with contextlib.ExitStack() as stack:
        for end in (owner, *users):
            stack.callback(end.carrier.close)
        peers: list[TcpPeer] = []
        for user in users:
            connect = partial(user.carrier.connect, owner.carrier.endpoint(), soon())
            wait_until(lambda: works(lambda: peers.append(connect())))  # noqa: B023
        for number in (0, 1, 0):  # each takes the other's place
            user, peer = users[number], peers[number]
            owner.memory[:100] = 1 + number
            few = copies(owner.address, user.address, 100)
            wait_until(lambda: works(lambda: user.carrier.read(peer, few).wait(soon())))  # noqa: B023
            assert (user.memory[:100] == 1 + number).all()
        assert owner.carrier.server.counters["evicted"] == 4 and owner.carrier.server.serving == 1


def test_no_room_is_an_error_and_passes() -> None:
    owner = End(limits=ServerLimits(max_connections=1, spare_idle_seconds=3600.0))
    first, second = End(), End()
    first.carrier.connect(owner.carrier.endpoint(), soon())
    with pytest.raises(TransferError, match="no room"):
        second.carrier.connect(owner.carrier.endpoint(), soon())
    first.carrier.close()

    def connected() -> bool:
        with contextlib.suppress(KvferryError):
            second.carrier.connect(owner.carrier.endpoint(), soon())
            return True
        return False

    wait_until(connected)
    for end in (owner, second):
        end.carrier.close()


@pytest.mark.parametrize("reading", [True, False])
def test_without_room_for_more_connections_the_first_one_carries_all(reading: bool) -> None:
    owner, user = End(limits=ServerLimits(max_connections=1)), End()
    with contextlib.closing(owner.carrier), contextlib.closing(user.carrier):
        peer = user.carrier.connect(owner.carrier.endpoint(), soon())
        src, dst = (owner, user) if reading else (user, owner)
        start = user.carrier.read if reading else user.carrier.write

        def refused() -> int:
            src.memory[:] = dst.memory[0] + 1
            start(peer, copies(src.address, dst.address, SIZE)).wait(soon())
            assert np.array_equal(src.memory, dst.memory)
            return owner.carrier.server.counters["busy"]

        wait_until(lambda: refused() >= 3)
        assert user.carrier._peers == [peer] and owner.carrier.server.serving == 1


def test_a_transfer_does_not_wait_for_a_connection_that_it_does_not_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner accepts a second connection, and says nothing on it."""
    monkeypatch.setattr(tcp_carrier, "CONNECT_SECONDS", 60.0)
    owner, user = End(), End()
    peer, silent = user.carrier.connect(owner.carrier.endpoint(), soon()), list[socket.socket]()
    monkeypatch.setattr(owner.carrier.server, "attach", lambda sock, _: silent.append(sock))
    with contextlib.closing(owner.carrier), contextlib.closing(user.carrier):

        def asked() -> bool:
            user.carrier.read(peer, copies(owner.address, user.address, SIZE)).wait(soon(20))
            return bool(silent)

        wait_until(asked)
        monkeypatch.undo()

        def served() -> bool:
            while silent:  # helpers of several transfers may have connected
                silent.pop().close()
            asked()
            return owner.carrier.server.serving >= 2

        wait_until(served)
    assert threads_left("kvferry-tcp") == []


def test_a_peer_without_progress_is_given_up() -> None:
    """The owner's accept queue takes the connection, but nobody ever answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = TcpEndpoint("tcp", "127.0.0.1", silent.getsockname()[1], b"i" * 16)
        user = End()
        with pytest.raises(DeadlineExceeded):
            user.carrier.connect(msgspec.msgpack.encode(endpoint), soon(0.3))
        user.carrier.close()


def test_a_peer_that_drips_its_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows the secret. Its APPLIED would be whole after 3 s, each byte long before a stall."""
    plain, dripped = TcpStream.send, threading.Event()

    def send(stream: TcpStream, data: bytes, *how: Any, **more: Any) -> None:
        if len(data) != HEADER.size or FrameHeader.unpack(data).kind != FrameKind.APPLIED:
            plain(stream, data, *how, **more)
            return
        dripped.set()
        with contextlib.suppress(TransferError):
            for n in range(len(data)):
                plain(stream, data[n : n + 1])
                time.sleep(0.3)

    monkeypatch.setattr(TcpStream, "send", send)
    monkeypatch.setattr(tcp_carrier, "CANCEL_SECONDS", 0.2)
    owner, user = End(), End(limits=ServerLimits(stall_seconds=0.5))
    peer = user.carrier.connect(owner.carrier.endpoint(), soon())
    for cancels in (False, True):
        dripped.clear()
        transfer = user.carrier.write(peer, copies(user.address, owner.address, 100))
        assert dripped.wait(30)
        if not cancels:
            with pytest.raises(DeadlineExceeded):
                transfer.wait(soon())
        with pytest.raises(DeadlineExceeded, match="may still arrive"):
            transfer.cancel()  # nobody has said that all is in place
        assert transfer.poll() is TransferState.FAILED
    begin = time.monotonic()
    user.carrier.close()
    assert time.monotonic() - begin < 6.0  # not until the last byte has dripped: nine and a half
    owner.carrier.close()
    assert threads_left("kvferry-tcp") == []


def test_a_peer_that_drips_what_it_writes_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes would be there after 30 s. The server's thread does not wait for them."""
    monkeypatch.setattr(frames, "SLOWEST_BYTES_PER_SECOND", 1 << 30)
    owner, user = End(limits=ServerLimits(stall_seconds=0.3)), End()
    peer = user.carrier.connect(owner.carrier.endpoint(), soon())
    stream = peer.take().stream
    ranges = table_bytes(np.array([owner.address]), np.array([300]))
    stream.send(FrameHeader(FrameKind.WRITE, 1, len(ranges), 300).pack() + ranges)
    assert FrameHeader.unpack(stream.recv(HEADER.size)).kind == FrameKind.GO
    with pytest.raises(PeerLost):
        for _ in range(300):
            stream.send(b"x")
            time.sleep(0.1)
    counters = owner.carrier.server.counters
    assert counters["late"] == 1 and counters["writes"] == 0
    stream.close()
    for end in (owner, user):
        end.carrier.close()


@pytest.mark.parametrize("way", ["send", "recv", "send_vectors", "recv_vectors"])
def test_signals_do_not_stretch_a_wait(way: str) -> None:
    """A profiler may interrupt each of the thread's calls. The peer neither reads nor writes."""
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    (mine, other), memory = socket.socketpair(), np.zeros(SIZE, dtype=np.uint8)
    stream = TcpStream(mine, 0.3)
    what = {
        "send": memory.data,
        "recv": 100,
        "send_vectors": Vectors.of(np.array([memory.ctypes.data]), np.array([SIZE])),
        "recv_vectors": Vectors.of(np.array([memory.ctypes.data]), np.array([SIZE])),
    }[way]
    thread: list[int] = []

    def wait() -> None:
        thread.append(threading.get_ident())
        with pytest.raises(DeadlineExceeded, match="no progress"):
            getattr(stream, way)(what)

    def over() -> bool:
        if thread and not waits.done():
            signal.pthread_kill(thread[0], signal.SIGUSR1)
        return waits.done()

    with contextlib.ExitStack() as last, other, contextlib.closing(stream):
        # after the thread's end: a signal that it has yet to take would end this process
        last.callback(signal.signal, signal.SIGUSR1, before)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(wait)
            try:
                wait_until(over, 10.0)
            finally:
                stream.abort()
            waits.result()


def test_a_refused_peer_that_sends_on_is_left_in_time() -> None:
    mine, other = socket.socketpair()
    stream, until = TcpStream(mine, 30.0), soon(10)

    def flood() -> None:
        with other, contextlib.suppress(OSError):
            while time.monotonic() < until:
                other.sendall(bytes(1 << 16))

    with ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(flood)
        assert not stream.drain(0.2)
        stream.close()
        flooding.result()


@pytest.mark.parametrize("slow_link", [True, False], ids=["a slow link", "a peer that stops"])
def test_a_request_may_wait_for_the_answer_before_it(
    slow_link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader sends the rest of its next request once it has the bytes of the one before. While
    those are on a slow link, its time is not over. But it ends, if the reader takes no bytes."""
    slowest = 1 << (10 if slow_link else 30)
    monkeypatch.setattr(frames, "SLOWEST_BYTES_PER_SECOND", slowest)
    owner, user = End(limits=ServerLimits(frame_seconds=0.2)), End()
    with contextlib.closing(owner.carrier), contextlib.closing(user.carrier):
        endpoint, size = owner.carrier.endpoint(), 256 << 10
        listener = owner.carrier.server._listener
        assert listener is not None
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * size)  # its sockets inherit it
        stream = user.carrier.connect(endpoint, soon()).take().stream
        with contextlib.closing(stream):
            rows = table_bytes(np.array([owner.address]), np.array([size]))
            first, second = (frames.frame(FrameKind.READ, n, rows, size) for n in (1, 2))
            stream.send(first + second[:40])
            if slow_link:
                require_for(1.0, lambda: not owner.carrier.server.counters["late"])
                for rest in (second[40:], b""):
                    stream.recv(HEADER.size + size, soon())
                    stream.send(rest)
            else:
                wait_until(lambda: owner.carrier.server.counters["late"])
    assert owner.carrier.server.counters["reads"] == 1 + slow_link


def test_memory_that_was_freed_is_an_error_not_a_crash(ends: tuple[End, End]) -> None:
    owner, user = ends
    gone = mmap.mmap(-1, 1 << 20)
    address = np.frombuffer(gone, dtype=np.uint8).ctypes.data
    # as good as unmapped, but nobody else can get the address meanwhile
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), 1 << 20, 0) == 0
    owner.carrier.register([MemoryRegion(address, 1 << 20)])
    user.carrier.register([MemoryRegion(address, 1 << 20)])  # and on this side
    peer = user.carrier.connect(owner.carrier.endpoint(), soon())
    for start, pair in (
        (user.carrier.read, (address, user.address)),
        (user.carrier.write, (user.address, address)),
        (user.carrier.read, (owner.address, address)),
        (user.carrier.write, (address, owner.address)),
    ):
        transfer = start(peer, copies(*pair, 1 << 20))
        with pytest.raises(TransferError):
            transfer.wait(soon(5))
        assert transfer.poll() is TransferState.FAILED
    user.carrier.read(peer, copies(owner.address, user.address, 10)).wait(soon())


def test_without_a_thread_to_accept_no_port_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with contextlib.closing(TcpCarrier(port=port)) as carrier:
        refusing = no_threads(monkeypatch, "kvferry-tcp-accept")
        with refusing, pytest.raises(TransferError, match="no thread"):
            carrier.endpoint()
        assert TcpEndpoint.decode(carrier.endpoint()).port == port


def test_nothing_is_left_behind(ends: tuple[End, End]) -> None:
    owner, user = ends
    peer = user.carrier.connect(owner.carrier.endpoint(), soon())
    user.carrier.read(peer, copies(owner.address, user.address, 100)).wait(soon())
    user.carrier.close()
    owner.carrier.close()
    assert threads_left("kvferry-tcp") == []
    with pytest.raises(TransferError, match="closed"):
        owner.carrier.endpoint()


# Grants


def ranges(end: End, *pairs: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(pairs, dtype=np.int64)
    return end.address + table[:, 0], table[:, 1]


def test_a_grant_lets_its_ranges_be_written_and_nothing_else() -> None:
    owner, user = End(writable=False), End()
    with contextlib.closing(owner.carrier), contextlib.closing(user.carrier):
        _write_under_grants(owner, user)


def _write_under_grants(owner: End, user: End) -> None:
    user.memory[:] = 7
    grant = owner.carrier.open_grant(*ranges(owner, (1000, 100), (1100, 100), (5000, 10)))
    other = owner.carrier.open_grant(*ranges(owner, (9000, 100)))
    assert len(grant) == 16
    assert grant != other
    peer = user.carrier.connect(owner.carrier.endpoint(), soon())

    def write(at: int, count: int, under: bytes) -> None:
        one = copies(user.address, owner.address + at, count)
        user.carrier.write_granted(peer, one, under).wait(soon())

    with pytest.raises(PeerLost, match="without a grant"):
        user.carrier.write(peer, copies(user.address, owner.address, 10)).wait(soon())
    for at, count in ((999, 5), (1150, 51), (4990, 20), (9000, 1), (0, SIZE)):
        with pytest.raises(OutOfBounds, match="not inside what was granted"):
            write(at, count, grant)
    with pytest.raises(PeerLost, match="no such grant"):
        write(1000, 10, bytes(16))
    assert not owner.memory.any()
    write(1050, 100, grant)  # ranges that touch are one
    write(5000, 10, grant)
    assert owner.memory.sum() == 7 * 110
    assert owner.carrier.close_grant(grant, 5.0) == 110
    assert owner.carrier.close_grant(grant, 5.0) == 0  # idempotent
    with pytest.raises(PeerLost, match="no such grant"):
        write(5000, 10, grant)
    write(9000, 100, other)  # others live on, on the same connection
    assert owner.carrier.close_grant(other, 5.0) == 100
    assert len(owner.carrier.server.grants) == 0
    assert user.carrier.server.counters["writes"] == 0
    with pytest.raises(OutOfBounds):
        owner.carrier.open_grant(*ranges(owner, (SIZE - 5, 10)))


def test_closing_a_grant_stops_its_writers_and_no_others(ends: tuple[End, End]) -> None:
    owner, user = ends
    user.memory[:] = 9
    half = SIZE // 2
    grants = [owner.carrier.open_grant(*ranges(owner, (at, half))) for at in (0, half)]
    peer = user.carrier.connect(owner.carrier.endpoint(), soon())

    def long(at: int, rounds: int) -> tuple[np.ndarray, ...]:
        there = np.full(rounds, owner.address + at)
        return np.full(rounds, user.address), there, np.full(rounds, half)

    first = user.carrier.write_granted(peer, copies(*long(0, 2000)), grants[0])
    second = user.carrier.write_granted(peer, copies(*long(half, 300)), grants[1])
    wait_until(lambda: owner.memory[0] and owner.memory[half])
    written = owner.carrier.close_grant(grants[0], 10.0)
    owner.memory[:half] = 0  # used again
    with pytest.raises(PeerLost):
        first.wait(soon(10))
    second.wait(soon(30))
    assert not owner.memory[:half].any()
    assert 0 <= written < 2000 * half  # whole frames
    assert owner.carrier.close_grant(grants[1], 5.0) == 300 * half
    assert owner.memory[half:].all()


def test_a_writer_that_leaves_a_grant_late_is_counted() -> None:
    """It was in the memory when the owner first closed the grant, and had all of its bytes."""
    grants, (mine, other) = Grants(), socket.socketpair()
    stream, where = TcpStream(mine, 1.0), (np.array([1000]), np.array([64]))
    grant = grants.open(RegionTable.of_arrays(*where))
    with other, contextlib.closing(stream):
        with grants.writing(grant, stream, *where):
            with pytest.raises(DeadlineExceeded, match="did not leave a grant"):
                grants.close(grant, 0.01)
            with pytest.raises(FrameRefused, match="no such grant"):
                grants.writing(grant, stream, *where).__enter__()
        assert grants.close(grant, 1.0) == 64
        assert (grants.close(grant, 1.0), len(grants)) == (0, 0)


def test_a_grant_that_two_threads_close_is_closed_for_neither_before_its_writers_left() -> None:
    grants, (mine, other) = Grants(), socket.socketpair()
    stream, where = TcpStream(mine, 1.0), (np.array([1000]), np.array([64]))
    grant = grants.open(RegionTable.of_arrays(*where))
    with other, contextlib.closing(stream), ThreadPoolExecutor(1) as pool:
        with grants.writing(grant, stream, *where):
            first = pool.submit(grants.close, grant, 30.0)
            wait_until(lambda: stream._aborted)
            with pytest.raises(DeadlineExceeded, match="did not leave a grant"):
                grants.close(grant, 0.01)
            with pytest.raises(FrameRefused, match="no such grant"):
                grants.writing(grant, stream, *where).__enter__()
        assert first.result(30) == 64
        assert (grants.close(grant, 1.0), len(grants)) == (0, 0)


class Elsewhere(StagedMemory):
    """Memory that no pointer reaches, as far as the carrier knows: it hands out chunks."""

    CHUNK_BYTES = 1 << 20

    def __init__(self, memory: np.ndarray) -> None:
        self._host = HostMemory([MemoryRegion(memory.ctypes.data, memory.nbytes)])
        self.gathered = self.scattered = 0

    def gather(self, address: np.ndarray, length: np.ndarray, into: np.ndarray) -> None:
        self._host.gather(address, length, into)
        self.gathered += int(length.sum())

    def scatter(self, source: np.ndarray, address: np.ndarray, length: np.ndarray) -> None:
        self._host.scatter(source, address, length)
        self.scattered += int(length.sum())

    def zero(self, address: np.ndarray, length: np.ndarray) -> None:
        self._host.zero(address, length)

    def outgoing(self, address: np.ndarray, length: np.ndarray) -> Iterator[np.ndarray]:
        for part in slices(Copies(address, address, length), self.CHUNK_BYTES):
            chunk = np.empty(int(part.length.sum()), dtype=np.uint8)
            self.gather(part.src, part.length, chunk)
            yield chunk

    def incoming(self, address: np.ndarray, length: np.ndarray) -> Iterator[np.ndarray]:
        for part in slices(Copies(address, address, length), self.CHUNK_BYTES):
            chunk = np.empty(int(part.length.sum()), dtype=np.uint8)
            yield chunk
            self.scatter(chunk, part.dst, part.length)


def test_staged_memory_moves_in_chunks() -> None:
    """Also long runs, in both directions, by server and client."""
    rng = np.random.default_rng(3)
    arrays = [rng.integers(0, 256, SIZE, dtype=np.uint8) for _ in range(2)]
    memories = [Elsewhere(a) for a in arrays]
    carriers = [
        TcpCarrier(secret=RIGHT, host="127.0.0.1", memory=m, writable=True) for m in memories
    ]
    for carrier, array in zip(carriers, arrays, strict=True):
        carrier.register([MemoryRegion(array.ctypes.data, array.nbytes)])
    owner, user = carriers
    peer = user.connect(owner.endpoint(), soon())
    length = np.array([3 << 20, 700_001, 5000, 1])
    here = arrays[1].ctypes.data + np.array([0, 3 << 20, 5 << 20, 7 << 20])
    there = arrays[0].ctypes.data + np.array([7, 4 << 20, 6 << 20, (7 << 20) + 9])
    user.read(peer, copies(there, here, length)).wait(soon())
    total = int(length.sum())
    assert (memories[0].gathered, memories[1].scattered) == (total, total)
    for a, b, n in zip(there, here, length, strict=True):
        first, second = a - arrays[0].ctypes.data, b - arrays[1].ctypes.data
        assert np.array_equal(arrays[0][first : first + n], arrays[1][second : second + n])
    arrays[1][:] = 5
    user.write(peer, copies(here, there, length)).wait(soon())
    assert (memories[1].gathered, memories[0].scattered) == (total, total)
    assert int(np.count_nonzero(arrays[0] == 5)) >= total
    for carrier in carriers:
        carrier.close()


class Hanging(Elsewhere):
    """Memory whose device does not answer until it is told to."""

    def __init__(self, end: End) -> None:
        super().__init__(end.memory)
        self.uses, self.answers = 0, threading.Event()
        end.carrier.server.staged = self

    def outgoing(self, address: np.ndarray, length: np.ndarray) -> Iterator[np.ndarray]:
        self.uses += 1
        assert self.answers.wait(60)
        yield from super().outgoing(address, length)

    def incoming(self, address: np.ndarray, length: np.ndarray) -> Iterator[np.ndarray]:
        self.uses += 1
        assert self.answers.wait(60)
        yield from super().incoming(address, length)


@pytest.mark.parametrize("hangs", ["owner", "user"])
def test_memory_that_is_used_after_close_is_in_the_log(
    hangs: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp_carrier, "CANCEL_SECONDS", 0.1)
    owner, user = End(), End()
    stuck = owner if hangs == "owner" else user
    memory = Hanging(stuck)
    try:
        peer = user.carrier.connect(owner.carrier.endpoint(), soon())
        user.carrier.read(peer, copies(owner.address, user.address, 100))
        wait_until(lambda: memory.uses)
        stuck.carrier.close()
        (line,) = [one.getMessage() for one in caplog.records]
        assert "did not end within 0.1 s" in line and "must not be freed" in line
    finally:
        memory.answers.set()
        for end in (user, owner):
            end.carrier.close()
    assert threads_left("kvferry-tcp") == []


def test_a_carrier_closes_all_peers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them hangs. The time to wait is that of one."""
    owner, user = End(), End()
    memory = Hanging(user)
    try:
        for n in range(1, 13):
            peer = user.carrier.connect(owner.carrier.endpoint(), soon())
            user.carrier.read(peer, copies(owner.address, user.address, 100))
            wait_until(lambda n=n: memory.uses == n)
        monkeypatch.setattr(tcp_carrier, "CANCEL_SECONDS", 1.0)
        begin = time.monotonic()
        user.carrier.close()
        assert time.monotonic() - begin < 9.0  # one after the other, it would be twelve
    finally:
        memory.answers.set()
        owner.carrier.close()
    assert threads_left("kvferry-tcp") == []
