"""The local carrier: whom it takes for its peer, and what it does where it may not reach it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from carrier_peer import FIRST, KINDS, TOTAL, Memory, Peer, copies, owner, soon, user

from kvferry.carriers import MemoryRegion, host
from kvferry.carriers.local import LocalCarrier, LocalEndpoint, _start_ticks
from kvferry.errors import PeerLost, PermissionDenied

KIND = KINDS["local"]


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with owner(KIND) as peer:
        yield peer


@pytest.fixture(scope="module")
def memory() -> Memory:
    return Memory.anonymous()


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
        with pytest.raises(PermissionDenied, match="no process of this user answers"):
            carrier.connect(peer.endpoint, soon())


@pytest.mark.parametrize(
    "changes",
    [{"boot": "another"}, {"pid_namespace": "pid:[1]"}],
    ids=["another-host", "another-container"],
)
def test_a_peer_elsewhere_is_left_to_another_carrier(peer: Peer, changes: dict[str, str]) -> None:
    with (
        contextlib.closing(LocalCarrier()) as carrier,
        pytest.raises(PermissionDenied, match="the peer runs"),
    ):
        carrier.connect(altered(peer.endpoint, **changes), soon())


def test_what_the_system_forbids_is_left_to_another_carrier(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionDenied("ptrace is restricted here")

    monkeypatch.setattr(host, "read", forbidden)
    with (
        contextlib.closing(LocalCarrier()) as carrier,
        pytest.raises(PermissionDenied, match="ptrace is restricted here"),
    ):
        carrier.connect(peer.endpoint, soon())


def test_another_carrier_of_this_process(memory: Memory) -> None:
    mine = np.arange(4096, dtype=np.uint8)
    other = LocalCarrier()
    other.register([MemoryRegion(mine.ctypes.data, mine.nbytes)])
    with user(KIND, memory) as carrier, contextlib.closing(other):
        link = carrier.connect(other.endpoint(), soon())
        carrier.read(link, copies(mine.ctypes.data, memory.address + FIRST[0], 64)).wait(soon())
        assert np.array_equal(memory.bytes[FIRST[0] : FIRST[0] + 64], mine[:64])
        other.close()
        with pytest.raises(PeerLost):
            carrier.read(link, copies(mine.ctypes.data, memory.address + FIRST[0], 64)).wait(soon())
