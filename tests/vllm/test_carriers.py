"""The conformance suite on the carriers that need a library, with the real libraries.

The tests are those of tests/transport/test_conformance.py, on other carriers; here is what differs.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import test_conformance as suite
from carrier_peer import BIG, FIRST, KINDS, SECOND, SECRET, Kind, Peer, copies, owner, soon
from test_conformance import (  # noqa: F401, the tests and their fixtures
    Pair,
    make_pair,
    pair,
    quick_switches,
    test_a_deadline_leaves_the_transfer_running,
    test_a_restarted_peer_is_another_peer,
    test_after_cancel_no_byte_arrives,
    test_arrays_that_make_no_sense_are_refused,
    test_both_regions_and_their_edges,
    test_cancel_after_the_end_changes_nothing,
    test_close_ends_what_runs,
    test_disconnect_ends_that_peer_only,
    test_many_scattered_copies,
    test_many_transfers_at_once,
    test_nothing_to_do,
    test_one_copy_of_any_length,
    test_other_threads_keep_running,
    test_out_of_bounds_writes_nothing,
    test_peer_killed_in_the_middle,
    test_short_runs_with_gaps,
)
from test_short_runs import test_token_major_caches_are_handed_over as token_major_caches

from kvferry.carriers import MemoryRegion
from kvferry.carriers.base import RegionTable
from kvferry.carriers.library import mooncake, shared
from kvferry.carriers.library.shared import LibraryEndpoint
from kvferry.demo.run import run_demo

LIBRARIES = {"mooncake": "mooncake.engine", "nixl": "nixl._api"}


def kind_of(name: str) -> Kind:
    kind = KINDS[name]
    pytest.importorskip(LIBRARIES[kind.name], reason=f"needs the library of the carrier {name}")
    return kind


@pytest.fixture(scope="module", params=list(LIBRARIES))
def standing(request: pytest.FixtureRequest) -> Iterator[tuple[Kind, Peer]]:
    kind = kind_of(request.param)
    with owner(kind) as peer:
        yield kind, peer


@pytest.fixture(params=list(LIBRARIES))
def mortal(request: pytest.FixtureRequest) -> Iterator[Pair]:
    kind = kind_of(request.param)
    with owner(kind) as peer:
        yield from make_pair(kind, peer)


@pytest.mark.parametrize("name", list(LIBRARIES))
@suite.both_ways
def test_a_peer_that_stops_answering(
    name: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX on one host is one-sided and does not even notice; over TCP it does."""
    kind_of(name)
    monkeypatch.setenv("UCX_TLS", "tcp")
    suite.test_a_peer_that_stops_answering(name, direction)


def test_batches_that_mooncake_refuses_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limits are set far below our batches. The blocks count as in use for a while."""
    kind = kind_of("mooncake")
    monkeypatch.setenv("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "16")
    monkeypatch.setenv("MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "16")
    with owner(kind) as peer:
        for pair in make_pair(kind, peer):
            at = FIRST[0] + np.random.default_rng(3).permutation(3000) * 64
            transfer = pair.start("read", at, at[::-1], np.full(3000, 64))
            with pytest.raises(suite.TransferError, match="MAX_QUEUED_TRANSFERS_PER_PEER is less"):
                transfer.wait(soon())
            assert not transfer.settled()


@pytest.mark.parametrize("name", list(LIBRARIES))
def test_what_cannot_be_taken_back_is_abandoned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled while the peer stands still: the memory is in use until the bytes have ended. No
    other peer waits for that."""
    kind = kind_of(name)
    monkeypatch.setenv("UCX_TLS", "tcp")
    with owner(kind) as peer, owner(kind) as other:
        for pair in make_pair(kind, peer):
            assert peer.process is not None
            os.kill(peer.process.pid, signal.SIGSTOP)
            try:
                transfer: Any = pair.start("read", FIRST[0], FIRST[0], BIG)
                with pytest.raises(suite.DeadlineExceeded):
                    transfer.wait(soon(0.2))
                with pytest.raises(suite.DeadlineExceeded, match="may still arrive"):
                    transfer.cancel(seconds=0.2)
                assert transfer.poll() is suite.TransferState.RUNNING
                assert transfer.abandoned and not transfer.settled()
                other.memory.bytes[:] = 8
                link = pair.carrier.connect(other.endpoint, soon())
                from_, to = other.address + SECOND[0], pair.memory.address + SECOND[0]
                pair.carrier.read(link, copies(from_, to, 1000)).wait(soon())
                assert (pair.memory.bytes[SECOND[0] : SECOND[0] + 1000] == 8).all()
            finally:
                os.kill(peer.process.pid, signal.SIGCONT)
            with pytest.raises(suite.Cancelled):
                transfer.wait(soon())
            assert transfer.settled()


def test_a_lost_liveness_connection_is_not_the_end_of_the_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the network fails for a while: callers that wait are told, and the memory is in use
    until NIXL has let go of it."""
    kind = kind_of("nixl")
    monkeypatch.setenv("UCX_TLS", "tcp")
    at = FIRST[0] + np.arange(4000) * 1024
    with owner(kind) as peer:
        for pair in make_pair(kind, peer):
            assert peer.process is not None
            peer.memory.bytes[:] = 7
            pair.move("read", at, at, np.full(4000, 500))
            pair.memory.bytes[:] = 0
            carrier: Any = pair.carrier
            real = carrier._move

            def held_up(*given: Any, real: Any = real, **named: Any) -> None:
                os.kill(peer.process.pid, signal.SIGSTOP)  # type: ignore[union-attr]
                real(*given, **named)

            monkeypatch.setattr(carrier, "_move", held_up)
            try:
                transfer: Any = pair.start("read", at, at, np.full(4000, 500))
                time.sleep(0.3)
                pair.link.liveness._connection.shutdown(socket.SHUT_RD)
                with pytest.raises(suite.PeerLost):
                    transfer.wait(soon(5))
                assert transfer.poll() is suite.TransferState.FAILED and not transfer.settled()
                with pytest.raises(suite.DeadlineExceeded, match="may still arrive"):
                    transfer.cancel(seconds=0.2)
                assert transfer.abandoned and not transfer.settled()
            finally:
                os.kill(peer.process.pid, signal.SIGCONT)
            until = soon(20)
            while not transfer.settled() and time.monotonic() < until:
                time.sleep(0.01)
            assert transfer.settled()
            pair.memory.bytes[:] = 9
            time.sleep(0.5)
            assert (pair.memory.bytes == 9).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protocol": "rdma", "device": "no_such_0"}, "use rdma with no_such_0, and this host has"),
        ({"protocol": "carrier pigeon"}, "is one of tcp, rdma"),
        ({"protocol": ""}, "is one of tcp, rdma"),
        ({"device": "mlx5_0"}, "device 'mlx5_0' is for protocol rdma"),
        ({"protocl": "tcp"}, "has no option protocl; it has host, secret, protocol"),
    ],
)
def test_mooncake_is_not_replaced_in_silence(options: dict[str, Any], message: str) -> None:
    kind_of("mooncake")
    with pytest.raises(suite.TransferError, match=message):
        suite.make_carrier("mooncake", **options)


def test_mooncake_by_tcp_says_so_to_its_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which would take RDMA wherever there is a device."""
    kind_of("mooncake")
    seen: dict[str, str] = {}

    class Engine:
        def initialize(self, *asked: str) -> int:
            seen.update(os.environ)
            return -202

    monkeypatch.setattr(mooncake, "engine_class", lambda: Engine)
    monkeypatch.setattr(shared, "RDMA_DEVICES", tmp_path)
    with pytest.raises(suite.TransferError, match="code -202"):
        suite.make_carrier("mooncake")
    assert "MC_FORCE_TCP" in seen and "MC_FORCE_TCP" not in os.environ
    with pytest.raises(suite.TransferError, match="no RDMA device"):
        suite.make_carrier("mooncake", protocol="rdma")
    (tmp_path / "mlx5_0").mkdir()
    seen.clear()
    with pytest.raises(suite.TransferError, match="code -202"):  # it came so far
        suite.make_carrier("mooncake", protocol="rdma", device="mlx5_0")
    assert "MC_FORCE_TCP" not in seen
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    with pytest.raises(suite.TransferError, match="MC_FORCE_TCP is set"):
        suite.make_carrier("mooncake", protocol="rdma", device="mlx5_0")


@pytest.mark.parametrize("backends", [[], ["POSIX"]])
def test_nixl_needs_a_backend_that_reaches_peers(backends: list[str]) -> None:
    kind_of("nixl")
    with pytest.raises(suite.TransferError, match=r"backend|register"):
        made = suite.make_carrier("nixl", backends=backends)
        made.endpoint()


def test_neighbours_are_registered_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies may cross from one into the other. Where that is refused, the carrier still closes."""
    kind_of("nixl")
    here, there, broken = (suite.make_carrier("nixl") for _ in range(3))
    memory, mine = (np.full(8192, value, dtype=np.uint8) for value in (5, 0))
    try:
        at = memory.ctypes.data
        for first in (at, at + 4096):
            there.register([MemoryRegion(first, 4096)])
        here.register([MemoryRegion(mine.ctypes.data, 8192)])
        link = here.connect(there.endpoint(), soon())
        here.read(link, copies(at, mine.ctypes.data, 8192)).wait(soon())
        assert (mine == 5).all()

        def refuse(regions: Any, **named: Any) -> Any:
            raise RuntimeError("ulimit -l")

        broken.register([MemoryRegion(at, 4096)])
        monkeypatch.setattr(broken._agent, "register_memory", refuse)  # type: ignore[attr-defined]
        with pytest.raises(suite.TransferError, match="ulimit -l"):
            broken.register([MemoryRegion(at + 4096, 4096)])
    finally:
        for carrier in (here, there, broken):
            carrier.close()


@pytest.mark.parametrize("name", list(LIBRARIES))
def test_a_closed_carrier_connects_to_nobody(name: str) -> None:
    """As when a load begins while its engine ends: no error of ours is logged then."""
    kind_of(name)
    carrier = suite.make_carrier(name)
    endpoint = carrier.endpoint()
    carrier.close()
    with pytest.raises(suite.Cancelled, match="the carrier was closed"):
        carrier.connect(endpoint, soon())


def outside_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # documentation's network: nothing is sent
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


@pytest.mark.parametrize("name", list(LIBRARIES))
def test_no_endpoint_has_a_library_reach_its_own_process_or_any_host(name: str) -> None:
    """An attacker gives an engine its own endpoint back, with regions of its choice, or sends it
    elsewhere."""
    kind_of(name)
    private = np.full(4096, 7, dtype=np.uint8)
    victim = suite.make_carrier(name, secret=SECRET, admits=lambda host: host != "127.0.0.2")
    try:
        cache = np.zeros(4096, dtype=np.uint8)
        victim.register([MemoryRegion(cache.ctypes.data, cache.nbytes)])
        own = LibraryEndpoint.decode(victim.endpoint(), name)
        for lie, words in (
            ({"regions": [(private.ctypes.data, private.nbytes)]}, "this very process"),
            ({"host": "127.0.0.2", "address": b"127.0.0.2:9"}, "`peers`"),
        ):
            with pytest.raises(suite.KvferryError, match=words):
                victim.connect(msgspec.msgpack.encode(msgspec.structs.replace(own, **lie)), soon(5))
        with owner(kind_of(name)) as peer:
            found = LibraryEndpoint.decode(peer.endpoint, name)
            if name == "mooncake":
                lie = msgspec.msgpack.encode(msgspec.structs.replace(found, address=b"127.0.0.3:9"))
                with pytest.raises(suite.KvferryError, match=r"names '127.0.0.3:9'"):
                    victim.connect(lie, soon(20))
            link = victim.connect(peer.endpoint, soon(20))
            there = copies(peer.address, cache.ctypes.data, 64)  # mapped there, not registered
            with pytest.raises(suite.KvferryError, match="not inside the memory"):
                victim.read(link, there).wait(soon(20))
        assert not cache.any()
    finally:
        victim.close()


@pytest.mark.parametrize("name", list(LIBRARIES))
def test_what_differs_or_opens_up_is_said(name: str, caplog: pytest.LogCaptureFixture) -> None:
    kind = kind_of(name)
    with owner(kind) as peer:
        for pair in make_pair(kind, peer):
            other = suite.make_carrier("nixl" if name == "mooncake" else "mooncake")
            for carrier, endpoint in ((other, peer.endpoint), (pair.carrier, other.endpoint())):
                with pytest.raises(suite.KvferryError, match="endpoint"):
                    carrier.connect(endpoint, soon(5))
            other.close()
    with pytest.raises(suite.TransferError, match="peers dial"):
        suite.make_carrier(name, host="0.0.0.0")
    caplog.clear()
    for host in ("127.0.0.1", outside_address()):
        suite.make_carrier(name, host=host, secret=SECRET).close()
    with pytest.raises(suite.AuthenticationError, match="without a secret"):
        suite.make_carrier(name, host=outside_address())
    caplog.records.pop()
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == (2 if name == "mooncake" else 1)  # it listens everywhere
    assert all("has no authentication" in words for words in warned)


def test_idle_is_idle(standing: tuple[Kind, Peer]) -> None:
    """No thread of a library spins while nothing moves."""
    for _ in make_pair(*standing):
        begin = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - begin < 0.2


def test_the_backends_check_bounds_too(standing: tuple[Kind, Peer]) -> None:
    """Behind our own check, which is taken away here."""
    for both in make_pair(*standing):
        link = both.carrier.connect(both.peer.endpoint, soon())
        link.regions = RegionTable.of([MemoryRegion(both.peer.address, suite.TOTAL)])
        both.memory.bytes[:] = 9
        here = both.memory.address + FIRST[0]
        outside = copies(both.peer.address + FIRST[0] - 64, here, 64)
        with pytest.raises(suite.TransferError, match="regist"):
            both.carrier.read(link, outside).wait(soon())
        assert (both.memory.bytes == 9).all()


def test_nixl_forgets_a_peer_and_meets_it_again() -> None:
    """An older connection can still be used then."""
    kind_of("nixl")
    here, there = (suite.make_carrier("nixl") for _ in range(2))
    mine, theirs = (np.zeros(128 * 1024, dtype=np.uint8) for _ in range(2))
    try:
        for carrier, memory in ((here, mine), (there, theirs)):
            carrier.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
        at = np.random.default_rng(1).permutation(128) * 1024
        to = at[::-1]  # so that no neighbours can be joined
        every = copies(theirs.ctypes.data + at, mine.ctypes.data + to, np.full(128, 1024))

        def read(link: Any, value: int) -> None:
            theirs[:] = value
            here.read(link, every).wait(soon())
            assert (mine == value).all()

        older = here.connect(there.endpoint(), soon())
        read(older, 1)
        here._agent.remove_remote_agent(older.handle)  # type: ignore[attr-defined]
        newer = here.connect(there.endpoint(), soon())
        read(newer, 2)
        read(older, 3)
    finally:
        here.close()
        there.close()


@pytest.mark.parametrize("name", list(LIBRARIES))
def test_token_major_caches(name: str) -> None:
    """Producer and consumer of different tp, checksums on."""
    kind_of(name)
    token_major_caches(name)


@pytest.mark.parametrize("name", list(LIBRARIES))
def test_the_demo_runs_over_it(name: str) -> None:
    kind_of(name)
    shapes = ("demo", "tp=1,block=16,order=LBNHC", "tp=1,block=24,order=LBHNC")
    result = run_demo(*shapes, min_bytes=4 << 20, requests=5, transport=name)
    assert result.ok and result.method == name
