"""The local carrier: whom it takes for its peer, and what it does where it may not reach it."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from carrier_peer import FIRST, KINDS, TOTAL, Memory, Peer, copies, owner, soon, user

from kvferry.carriers import MemoryRegion, host
from kvferry.carriers.local import LocalCarrier, LocalEndpoint, LocalPeer, _start_ticks
from kvferry.errors import AuthenticationError, PeerLost, PermissionDenied

KIND = KINDS["local"]


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with owner(KIND) as peer:
        yield peer


@pytest.fixture(scope="module")
def memory() -> Memory:
    return Memory.anonymous()


def moves(carrier: LocalCarrier, endpoint: bytes, peer: Peer, memory: Memory) -> None:
    """Bytes arrive, both ways."""
    link = carrier.connect(endpoint, soon())
    there, here = peer.address + FIRST[0], memory.address + FIRST[0]
    at = slice(FIRST[0], FIRST[0] + 3000)
    peer.memory.bytes[at] = np.random.default_rng(1).integers(0, 256, 3000, dtype=np.uint8)
    memory.bytes[at] = 0
    carrier.read(link, copies(there, here, 3000)).wait(soon())
    assert np.array_equal(memory.bytes[at], peer.memory.bytes[at])
    memory.bytes[at] = 77
    carrier.write(link, copies(here, there, 3000)).wait(soon())
    assert (peer.memory.bytes[at] == 77).all()


def test_short_runs_are_read_with_what_lies_between_them(
    peer: Peer, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[int] = []
    read = host.read

    def counting(pid: int, src: Any, dst: Any, length: Any) -> int:
        handed.append(len(length))
        return read(pid, src, dst, length)

    at = FIRST[0] + (np.arange(1000)[:, None] * 4096 + np.arange(16) * 128).ravel()
    peer.memory.bytes[:] = np.random.default_rng(2).integers(0, 256, TOTAL, dtype=np.uint8)
    memory.bytes[:] = 0
    with user(KIND, memory) as carrier:
        link = carrier.connect(peer.endpoint, soon())
        monkeypatch.setattr(host, "read", counting)
        carrier.read(
            link, copies(at + peer.address, at + memory.address, np.full(len(at), 64))
        ).wait(soon())
    wanted = np.zeros(TOTAL, dtype=np.uint8)
    bytes_of = at[:, None] + np.arange(64)
    wanted[bytes_of] = peer.memory.bytes[bytes_of]
    assert np.array_equal(memory.bytes, wanted)
    assert len(at) // 16 <= sum(handed) < len(at) // 8  # a range for each block


def altered(endpoint: bytes, **changes: object) -> bytes:
    found = LocalEndpoint.decode(endpoint)
    return msgspec.msgpack.encode(msgspec.structs.replace(found, **changes))


def test_a_recycled_pid_is_noticed(peer: Peer) -> None:
    """Another process has the number; it even may have started at the same tick."""
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True
    ) as other:
        carrier = LocalCarrier()
        try:
            with pytest.raises(PeerLost, match="restarted"):
                carrier.connect(altered(peer.endpoint, pid=other.pid), soon())
            ticks = _start_ticks(other.pid)
            same = altered(peer.endpoint, pid=other.pid, start_ticks=ticks)
            with pytest.raises(PeerLost, match="not the peer any more"):
                carrier.connect(same, soon())
            with pytest.raises(PeerLost, match="restarted"):
                carrier.connect(altered(peer.endpoint, start_ticks=1), soon())
            with pytest.raises(PeerLost, match="not the peer any more"):
                carrier.connect(altered(peer.endpoint, token=b"t" * 16), soon())
        finally:
            carrier.close()
            other.kill()


def test_a_closed_carrier_is_noticed_in_a_process_that_lives(memory: Memory) -> None:
    """Its process goes on, its memory may be someone else's by now."""
    with owner(KIND) as peer, user(KIND, memory) as carrier:
        link = carrier.connect(peer.endpoint, soon())
        there, here = peer.address + FIRST[0], memory.address + FIRST[0]
        carrier.read(link, copies(there, here, 10)).wait(soon())
        peer.close_carrier()
        for start, pair in ((carrier.read, (there, here)), (carrier.write, (here, there))):
            with pytest.raises(PeerLost, match="not the peer any more"):
                start(link, copies(*pair, 10)).wait(soon())
        with pytest.raises(PeerLost):
            carrier.connect(peer.endpoint, soon())


def test_a_carrier_of_this_process_is_reached_by_tcp(memory: Memory) -> None:
    """Whoever names this process as the owner cannot have it read itself."""
    mine = np.arange(4096, dtype=np.uint8)
    other = LocalCarrier()
    other.register([MemoryRegion(mine.ctypes.data, mine.nbytes)])
    with user(KIND, memory) as carrier, contextlib.closing(other):
        link = carrier.connect(other.endpoint(), soon())
        assert isinstance(link, LocalPeer)
        assert "this very process" in link.detour
        carrier.read(link, copies(mine.ctypes.data, memory.address + FIRST[0], 64)).wait(soon())
        assert np.array_equal(memory.bytes[FIRST[0] : FIRST[0] + 64], mine[:64])


@pytest.mark.parametrize(
    "changes",
    [{"boot": "another"}, {"pid_namespace": "pid:[1]"}],
    ids=["another-host", "another-container"],
)
def test_falls_back_where_the_peer_is_elsewhere(
    peer: Peer, memory: Memory, changes: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with user(KIND, memory) as carrier, caplog.at_level(logging.WARNING):
        assert isinstance(carrier, LocalCarrier)
        before = peer.counters()
        moves(carrier, altered(peer.endpoint, **changes), peer, memory)
        moves(carrier, altered(peer.endpoint, **changes), peer, memory)
    after = peer.counters()
    assert after["reads"] == before.get("reads", 0) + 2
    assert after["writes"] == before.get("writes", 0) + 2
    assert len([r for r in caplog.records if "falls back to tcp" in r.message]) == 1


def test_falls_back_where_the_system_forbids(
    peer: Peer, memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionDenied("ptrace is restricted here")

    monkeypatch.setattr(host, "read", forbidden)
    monkeypatch.setattr(host, "write", forbidden)
    with user(KIND, memory) as carrier, caplog.at_level(logging.WARNING):
        assert isinstance(carrier, LocalCarrier)
        moves(carrier, peer.endpoint, peer, memory)
    assert "ptrace is restricted here" in caplog.text


def test_goes_directly_where_it_may(
    peer: Peer, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    with user(KIND, memory) as carrier, caplog.at_level(logging.DEBUG):
        assert isinstance(carrier, LocalCarrier)
        before = peer.counters()
        moves(carrier, peer.endpoint, peer, memory)
    assert peer.counters() == before
    assert not caplog.records


def test_the_fallback_needs_the_secret(peer: Peer) -> None:
    other = LocalCarrier(force_fallback=True, secret="another than its peer's")
    with contextlib.closing(other), pytest.raises(AuthenticationError):
        other.connect(peer.endpoint, soon())
