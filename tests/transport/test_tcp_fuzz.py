"""Bad frames at the tcp server: nothing is written, nothing grows, all are counted."""

from __future__ import annotations

import socket

import pytest
from carrier_peer import threads_left

from fuzz.tcp_frames import CANARY, INCARNATION, SECRET, Target, exactly, frame, run
from kvferry.carriers.base import MemoryRegion, RegionTable
from kvferry.carriers.tcp.frames import HEADER, FrameHeader, FrameKind
from kvferry.carriers.tcp.server import ServerLimits, TcpServer
from no_threads import no_threads
from waiting import wait_until


@pytest.fixture
def target() -> Target:
    return Target()


def test_bad_frames() -> None:
    assert sum(run(20_000, seed=11).values()) >= 20_000
    assert threads_left("kvferry-tcp") == []


def test_slow_and_silent_peers_are_let_go() -> None:
    target = Target()
    limits = ServerLimits(handshake_seconds=1, frame_seconds=0.5, idle_seconds=0.5, max_pending=3)
    target.server = TcpServer(SECRET, INCARNATION, limits)
    target.server.regions = RegionTable.of([MemoryRegion(target.address, CANARY)])
    silent = [target.open() for _ in range(4)]  # the last takes the place of the first
    wait_until(lambda: target.server.counters["late"] >= 3)
    friend = target.friend()
    friend.sendall(frame(FrameKind.READ, 1, b"x" * 16, 16)[:20])  # half a header
    idle = target.friend()
    wait_until(lambda: target.server.counters.total() >= 7)
    assert target.server.counters == {"evicted": 1, "truncated": 1, "late": 4, "idle": 1}
    for sock in (*silent, friend, idle):
        sock.close()
    target.server.close(5)


def test_no_thread_for_a_connection(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told to come again, and nothing is left of it."""
    with no_threads(monkeypatch, "kvferry-tcp-serve"):
        ours, theirs = socket.socketpair()
        assert not target.server.attach(theirs)
    assert FrameHeader.unpack(exactly(ours, HEADER.size)).kind == FrameKind.ERROR
    ours.close()
    assert target.server.counters == {"busy": 1}
    target.friend().close()
    target.server.close(5)
    assert threads_left("kvferry-tcp") == []
