"""What every carrier must do, on every carrier; `local` and `tcp` between real processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from carrier_peer import (
    BIG,
    FIRST,
    KINDS,
    PAGE,
    SECOND,
    TOTAL,
    Kind,
    Memory,
    Peer,
    copies,
    owner,
    soon,
    user,
)

from kvferry.carriers import Carrier, Transfer, TransferState, make_carrier
from kvferry.carriers.null import Faults, NullCarrier
from kvferry.copies import Copies
from kvferry.errors import (
    AuthenticationError,
    Cancelled,
    DeadlineExceeded,
    DescriptionError,
    KvferryError,
    OutOfBounds,
    PeerLost,
    TransferError,
)
from scattered import copy_scattered

PROMPT_SECONDS = 8.0  # "at once", on a busy machine
CARRIERS = ["null", "local", "tcp"]
LONG_ROUNDS = 400  # of BIG bytes: seconds of work on any carrier


@dataclass
class Pair:
    """A peer's memory, this process's, and what moves bytes between them."""

    kind: Kind
    peer: Peer
    memory: Memory
    carrier: Carrier
    link: Any

    def start(self, direction: str, remote: Any, local: Any, length: Any) -> Transfer:
        """Offsets into both memories."""
        there = np.asarray(remote, dtype=np.int64) + self.peer.address
        here = np.asarray(local, dtype=np.int64) + self.memory.address
        if direction == "read":
            return self.carrier.read(self.link, copies(there, here, length))
        return self.carrier.write(self.link, copies(here, there, length))

    def move(self, direction: str, remote: Any, local: Any, length: Any) -> None:
        self.start(direction, remote, local, length).wait(soon())

    def ends(self, direction: str) -> tuple[np.ndarray, np.ndarray]:
        """Source and destination."""
        there, here = self.peer.memory.bytes, self.memory.bytes
        return (there, here) if direction == "read" else (here, there)

    def long(self, direction: str) -> Transfer:
        """One that takes seconds."""
        at = np.full(LONG_ROUNDS, FIRST[0])
        return self.start(direction, at, at, np.full(LONG_ROUNDS, BIG))


@cache
def own_memory() -> Memory:
    return Memory.anonymous()


@cache
def noise() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, TOTAL, dtype=np.uint8)


def make_pair(kind: Kind, peer: Peer) -> Iterator[Pair]:
    memory = own_memory()
    with user(kind, memory) as carrier:
        yield Pair(kind, peer, memory, carrier, carrier.connect(peer.endpoint, soon()))


@pytest.fixture(scope="module", params=CARRIERS)
def standing(request: pytest.FixtureRequest) -> Iterator[tuple[Kind, Peer]]:
    """A peer that tests share; those that end it make their own."""
    kind = KINDS[request.param]
    with owner(kind) as peer:
        yield kind, peer


@pytest.fixture
def pair(standing: tuple[Kind, Peer]) -> Iterator[Pair]:
    yield from make_pair(*standing)


@pytest.fixture(params=CARRIERS)
def mortal(request: pytest.FixtureRequest) -> Iterator[Pair]:
    kind = KINDS[request.param]
    with owner(kind) as peer:
        yield from make_pair(kind, peer)


both_ways = pytest.mark.parametrize("direction", ["read", "write"])


@both_ways
@pytest.mark.parametrize("length", [1, 3, 4095, 4096, 65537, (1 << 20) + 1, BIG])
def test_one_copy_of_any_length(pair: Pair, direction: str, length: int) -> None:
    src, dst = pair.ends(direction)
    src[:] = noise()
    dst[:] = 0
    remote, local = FIRST[0] + 7, FIRST[0] + 11
    from_, to = (remote, local) if direction == "read" else (local, remote)
    pair.move(direction, remote, local, length)
    assert np.array_equal(dst[to : to + length], src[from_ : from_ + length])
    dst[to : to + length] = 0
    assert not dst.any()  # nothing else was written


@both_ways
@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("remote_gap", [0, 1])
def test_short_runs_with_gaps(pair: Pair, direction: str, size: int, remote_gap: int) -> None:
    """Blocks of 16 tokens from random places in both regions, of each token one run. Here, the gap
    after it is as long; there, it is too, or the runs touch."""
    rng = np.random.default_rng(size)

    def tokens(gap: int) -> np.ndarray:
        step = (1 + gap) * size
        first, second = (
            begin + rng.permutation(room // (16 * step))[:count] * 16 * step
            for (begin, room), count in ((FIRST, 700), (SECOND, 100))
        )
        return (np.concatenate((first, second))[:, None] + np.arange(16) * step).ravel()

    remote, local = tokens(remote_gap), tokens(1)
    src, dst = pair.ends(direction)
    src[:] = noise()
    dst[:] = 0
    from_, to = (remote, local) if direction == "read" else (local, remote)
    pair.move(direction, remote, local, np.full(len(remote), size))
    expected = np.zeros_like(dst)
    within = np.arange(size)
    expected[to[:, None] + within] = src[from_[:, None] + within]
    assert np.array_equal(dst, expected)


@both_ways
@pytest.mark.parametrize("count", [1023, 1024, 1025, 200_000])
def test_many_scattered_copies(pair: Pair, direction: str, count: int) -> None:
    rng = np.random.default_rng(count)
    src, dst = pair.ends(direction)
    src[:] = noise()
    dst[:] = 0
    slot = 64
    slots = FIRST[1] // slot
    length = rng.integers(0, slot + 1, count)  # some are empty, some touch their neighbours
    sources, targets = (FIRST[0] + rng.permutation(slots)[:count] * slot for _ in range(2))
    expected = np.zeros(TOTAL, dtype=np.uint8)
    copy_scattered(src, sources, expected, targets, length)
    remote, local = (sources, targets) if direction == "read" else (targets, sources)
    pair.move(direction, remote, local, length)
    assert np.array_equal(dst, expected)


@both_ways
def test_both_regions_and_their_edges(pair: Pair, direction: str) -> None:
    src, dst = pair.ends(direction)
    src[:] = noise() | 1
    dst[:] = 0
    at = np.array([FIRST[0], FIRST[0] + FIRST[1] - 5, SECOND[0], SECOND[0] + SECOND[1] - 5])
    pair.move(direction, at, at, np.full(4, 5))
    for offset in at:
        assert np.array_equal(dst[offset : offset + 5], src[offset : offset + 5])
    assert np.count_nonzero(dst) == 20


@both_ways
def test_nothing_to_do(pair: Pair, direction: str) -> None:
    _, dst = pair.ends(direction)
    dst[:] = 9
    pair.move(direction, [], [], [])
    pair.move(direction, [FIRST[0]] * 3, [FIRST[0]] * 3, [0] * 3)
    assert (dst == 9).all()


FAR = (1 << 63) - 1
OUTSIDE: dict[str, tuple[Callable[[int], int], int]] = {
    "before": (lambda base: base + FIRST[0] - 1, 1),
    "straddles-start": (lambda base: base + FIRST[0] - 1, 2),
    "straddles-end": (lambda base: base + FIRST[0] + FIRST[1] - 1, 2),
    "between": (lambda base: base + FIRST[0] + FIRST[1], 1),
    "over-the-gap": (lambda base: base + FIRST[0], FIRST[1] + PAGE + SECOND[1]),
    "after": (lambda base: base + SECOND[0] + SECOND[1], 1),
    "null-page": (lambda base: 0, 1),
    "negative": (lambda base: -1, 1),
    "most-negative": (lambda base: -(1 << 63), 1),
    "huge-length": (lambda base: base + FIRST[0], FAR),
    "wraps-around": (lambda base: base + FIRST[0], FAR - 4096),
    "negative-length": (lambda base: base + FIRST[0], -1),
    "most-negative-length": (lambda base: base + FIRST[0], -(1 << 63)),
    "far": (lambda base: FAR, 1),
}


@both_ways
@pytest.mark.parametrize("whose", ["remote", "local"])
def test_out_of_bounds_writes_nothing(pair: Pair, direction: str, whose: str) -> None:
    """Also where all but the last of many copies are good."""
    good = 40_000
    pair.memory.bytes[:] = noise()
    pair.peer.memory.bytes[:] = ~noise()
    before = [m.copy() for m in (pair.memory.bytes, pair.peer.memory.bytes)]
    for case, (address_of, length) in OUTSIDE.items():
        for count in (0, good) if case in ("before", "negative", "huge-length") else (0,):
            offsets = FIRST[0] + np.arange(count) * 64
            remote, local = pair.peer.address + offsets, pair.memory.address + offsets
            bad_there = pair.peer.address + FIRST[0]
            bad_here = pair.memory.address + FIRST[0]
            if whose == "remote":
                bad_there = address_of(pair.peer.address)
            else:
                bad_here = address_of(pair.memory.address)
            there, here = np.append(remote, bad_there), np.append(local, bad_here)
            lengths = np.append(np.full(count, 32), length)
            if direction == "read":
                transfer = pair.carrier.read(pair.link, copies(there, here, lengths))
            else:
                transfer = pair.carrier.write(pair.link, copies(here, there, lengths))
            with pytest.raises(OutOfBounds):
                transfer.wait(soon())
            assert transfer.poll() is TransferState.FAILED, case
    assert np.array_equal(pair.memory.bytes, before[0])
    assert np.array_equal(pair.peer.memory.bytes, before[1])
    pair.move(direction, FIRST[0], FIRST[0], 100)  # and it still works
    src, dst = pair.ends(direction)
    assert np.array_equal(dst[FIRST[0] : FIRST[0] + 100], src[FIRST[0] : FIRST[0] + 100])


def test_arrays_that_make_no_sense_are_refused(pair: Pair) -> None:
    three, two = np.zeros(3, dtype=np.int64), np.zeros(2, dtype=np.int64)
    for bad in (
        Copies(three, two, three),
        Copies(three.reshape(3, 1), three.reshape(3, 1), three.reshape(3, 1)),
        Copies(three.astype(float), three, three),  # type: ignore[arg-type]
    ):
        with pytest.raises(TransferError, match="copies are"):
            pair.carrier.read(pair.link, bad).wait(soon())


@both_ways
def test_many_transfers_at_once(pair: Pair, direction: str) -> None:
    rng = np.random.default_rng(5)
    src, dst = pair.ends(direction)
    src[:] = noise()
    dst[:] = 0
    per, size, threads = 500, 1024, 6
    where = FIRST[0] + np.arange(threads * 8 * per) * size
    order = rng.permutation(len(where))
    errors: list[BaseException] = []

    def one(thread: int) -> None:
        try:
            started = []
            for batch in range(8):
                which = order[(thread * 8 + batch) * per :][:per]
                at = where[which]
                started.append(pair.start(direction, at, at, np.full(per, size)))
            for transfer in started:
                transfer.wait(soon())
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=one, args=(i,)) for i in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not errors
    end = FIRST[0] + len(where) * size
    assert np.array_equal(dst[FIRST[0] : end], src[FIRST[0] : end])
    assert not dst[end:].any()


HELD_SECONDS = 0.005  # an engine's step must not wait longer than this for the interpreter
SWITCH_SECONDS = 0.0005


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Python code lets others run that often; so only single calls can hold the interpreter."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    yield
    sys.setswitchinterval(before)


def starved_seconds() -> dict[str, float]:
    """How long each thread was ready to run and had no processor: the machine is shared."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return found


@both_ways
def test_other_threads_keep_running(pair: Pair, direction: str, quick_switches: None) -> None:
    """No call holds the interpreter's lock for long.

    The thread that holds it can itself be without a processor. So the longest such time of any
    thread does not count, and of a few transfers the best one does.
    """
    count = pair.kind.second
    where = FIRST[0] + np.random.default_rng(2).permutation(count) * 128
    length = np.full(count, 64)

    def longest_wait() -> float:
        waits, last, starved = [0.0], time.perf_counter(), starved_seconds()
        transfer = pair.start(direction, where, where[::-1], length)
        while transfer.poll() is TransferState.RUNNING:
            time.sleep(0.0002)
            now, before = time.perf_counter(), starved
            starved = starved_seconds()
            worst = max(starved[thread] - before.get(thread, 0.0) for thread in starved)
            waits.append(now - last - worst)
            last = time.perf_counter()
        transfer.wait(soon())
        return max(waits)

    found = []
    while not found or (min(found) >= HELD_SECONDS and len(found) < 15):
        found.append(longest_wait())
    assert min(found) < HELD_SECONDS, [f"{seconds * 1e3:.1f} ms" for seconds in found]


@both_ways
def test_a_deadline_leaves_the_transfer_running(pair: Pair, direction: str) -> None:
    transfer = pair.long(direction)
    with pytest.raises(DeadlineExceeded):
        transfer.wait(time.monotonic() + 0.02)
    with pytest.raises(DeadlineExceeded):
        transfer.wait(time.monotonic() - 1)
    assert transfer.poll() is TransferState.RUNNING
    transfer.cancel()


@both_ways
def test_after_cancel_no_byte_arrives(pair: Pair, direction: str) -> None:
    src, dst = pair.ends(direction)
    src[:] = 7
    transfer = pair.long(direction)
    queued = [pair.long(direction) for _ in range(8)]  # more than there are threads
    time.sleep(0.05)
    begin = time.monotonic()
    for one in (transfer, *queued):
        one.cancel()
    assert time.monotonic() - begin < PROMPT_SECONDS
    dst[:] = 0
    time.sleep(0.05)
    assert not dst.any()
    for one in (transfer, *queued):
        assert one.poll() is TransferState.FAILED
        with pytest.raises(Cancelled):
            one.wait(soon())
        one.cancel()  # as often as you like
    pair.move(direction, FIRST[0], FIRST[0], 100)  # the peer is as good as before
    assert (dst[FIRST[0] : FIRST[0] + 100] == 7).all()


def test_cancel_after_the_end_changes_nothing(pair: Pair) -> None:
    transfer = pair.start("read", FIRST[0], FIRST[0], 10)
    transfer.wait(soon())
    transfer.cancel()
    transfer.wait(soon())
    assert transfer.poll() is TransferState.DONE


@both_ways
def test_close_ends_what_runs(standing: tuple[Kind, Peer], direction: str) -> None:
    for pair in make_pair(*standing):
        started = [pair.long(direction) for _ in range(6)]
        time.sleep(0.02)
        begin = time.monotonic()
        pair.carrier.close()
        pair.carrier.close()
        assert time.monotonic() - begin < PROMPT_SECONDS
        src, dst = pair.ends(direction)
        src[:], dst[:] = 5, 0
        time.sleep(0.05)
        assert not dst.any()
        for transfer in started:
            with pytest.raises(Cancelled):
                transfer.wait(soon(1))
        with pytest.raises(Cancelled):
            pair.start(direction, FIRST[0], FIRST[0], 1).wait(soon(1))


@both_ways
def test_disconnect_ends_that_peer_only(pair: Pair, direction: str) -> None:
    other = pair.carrier.connect(pair.peer.endpoint, soon())
    transfer = pair.long(direction)
    time.sleep(0.02)
    pair.carrier.disconnect(pair.link)
    pair.carrier.disconnect(pair.link)
    with pytest.raises(Cancelled):
        transfer.wait(soon(PROMPT_SECONDS))
    with pytest.raises(Cancelled):
        pair.start(direction, FIRST[0], FIRST[0], 1).wait(soon(PROMPT_SECONDS))
    pair.link = other
    pair.move(direction, FIRST[0], FIRST[0], 1)


@both_ways
def test_peer_killed_in_the_middle(mortal: Pair, direction: str) -> None:
    transfer = mortal.long(direction)
    time.sleep(0.1)
    assert transfer.poll() is TransferState.RUNNING
    mortal.peer.kill()
    with pytest.raises(PeerLost):
        transfer.wait(soon(PROMPT_SECONDS))
    with pytest.raises(PeerLost):
        mortal.start(direction, FIRST[0], FIRST[0], 1).wait(soon(PROMPT_SECONDS))
    with pytest.raises(PeerLost):
        mortal.carrier.connect(mortal.peer.endpoint, soon(PROMPT_SECONDS))


def test_a_restarted_peer_is_another_peer(mortal: Pair) -> None:
    mortal.move("read", FIRST[0], FIRST[0], 10)
    mortal.peer.kill()
    with owner(mortal.kind) as again:
        again.memory.bytes[:] = noise()
        link = mortal.carrier.connect(again.endpoint, soon())
        here = mortal.memory.address + FIRST[0]
        mortal.carrier.read(link, copies(again.address + FIRST[0], here, 1000)).wait(soon())
        at = slice(FIRST[0], FIRST[0] + 1000)
        assert np.array_equal(mortal.memory.bytes[at], again.memory.bytes[at])
        with pytest.raises(PeerLost):
            mortal.start("read", FIRST[0], FIRST[0], 10).wait(soon(PROMPT_SECONDS))


@pytest.mark.parametrize("name", ["tcp"])
@both_ways
def test_a_peer_that_stops_answering(name: str, direction: str) -> None:
    """It is late, not lost; and when it goes on, so do the bytes."""
    kind = KINDS[name]
    with owner(kind) as peer:
        for pair in make_pair(kind, peer):
            assert peer.process is not None
            os.kill(peer.process.pid, signal.SIGSTOP)
            try:
                transfer = pair.start(direction, FIRST[0], FIRST[0], BIG)
                with pytest.raises(DeadlineExceeded):
                    transfer.wait(soon(0.3))
            finally:
                os.kill(peer.process.pid, signal.SIGCONT)
            transfer.wait(soon())


def test_endpoints_of_nobody() -> None:
    for name in ("null", "local", "tcp-open"):
        carrier = KINDS[name].carrier()
        for endpoint in (b"", b"\x00" * 40, os.urandom(200)):
            with pytest.raises(KvferryError):
                carrier.connect(endpoint, soon(1))
        carrier.close()


def test_tcp_without_a_secret_stays_on_loopback() -> None:
    kind = KINDS["tcp-open"]
    with owner(kind) as peer:
        assert b"127.0.0.1" in peer.endpoint
        for pair in make_pair(kind, peer):
            pair.peer.memory.bytes[:] = noise()
            pair.move("read", FIRST[0], FIRST[0], 5000)
            at = slice(FIRST[0], FIRST[0] + 5000)
            assert np.array_equal(pair.memory.bytes[at], noise()[at])
    with pytest.raises(AuthenticationError, match="openssl rand"):
        make_carrier("tcp", host="0.0.0.0")
    with pytest.raises(DescriptionError, match="at least 16 bytes, found 5"):
        make_carrier("tcp", secret="short")


def test_carriers_by_name() -> None:
    with pytest.raises(TransferError, match="local, tcp"):
        make_carrier("pigeon")
    with pytest.raises(TransferError, match="speed"):
        make_carrier("tcp", speed=3)


def test_null_stalls_until_cancelled() -> None:
    with owner(KINDS["null"]) as peer:
        for pair in make_pair(KINDS["null"], peer):
            assert isinstance(pair.carrier, NullCarrier)
            pair.carrier.faults = Faults(stall_at=1)
            transfer = pair.start("read", FIRST[0], FIRST[0], 10)
            with pytest.raises(DeadlineExceeded):
                transfer.wait(soon(0.05))
            transfer.cancel()
