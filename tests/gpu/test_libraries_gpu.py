"""NIXL (UCX alone) and Mooncake (TCP) over device memory: two processes, one GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import device_peer
import numpy as np
import pytest
from carrier_peer import FIRST, SECOND, Peer, copies
from device_peer import LIBRARIES, DeviceArea, DeviceKind

from kvferry.carriers import Carrier
from kvferry.errors import OutOfBounds, PeerLost
from scattered import copy_scattered

SECONDS = 60.0


@pytest.fixture(scope="module")
def area() -> DeviceArea:
    return DeviceArea.allocate()


@pytest.fixture(scope="module", params=sorted(LIBRARIES))
def kind(request: pytest.FixtureRequest) -> DeviceKind:
    module = {"nixl": "nixl", "mooncake": "mooncake.engine"}[request.param]
    pytest.importorskip(module, exc_type=ImportError)
    return LIBRARIES[request.param]


@pytest.fixture(scope="module")
def peer(kind: DeviceKind) -> Iterator[Peer]:
    with device_peer.owner(kind) as found:
        yield found


@pytest.fixture(scope="module")
def carrier(kind: DeviceKind, area: DeviceArea) -> Iterator[Carrier]:
    with device_peer.user(kind, area) as made:
        yield made


def scattered(seed: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Copies that overlap on neither side, of odd lengths, in both regions; offsets."""
    rng = np.random.default_rng(seed)
    cell = 512
    cells = np.concatenate([np.arange(at, at + size - cell, cell) for at, size in (FIRST, SECOND)])
    src, dst = (rng.choice(cells, count, replace=False) for _ in range(2))
    return src, dst, rng.integers(1, cell, count)


@pytest.mark.parametrize("reading", [True, False])
def test_scattered(area: DeviceArea, peer: Peer, carrier: Any, reading: bool) -> None:
    mine, theirs = area.bytes, peer.memory.bytes
    rng = np.random.default_rng(5)
    for memory in (mine, theirs):
        memory[:] = rng.integers(0, 256, len(memory), dtype=np.uint8)
    src, dst, length = scattered(7, 500)
    source, sink = (theirs, mine) if reading else (mine, theirs)
    expected = sink.copy()
    copy_scattered(source.copy(), src, expected, dst, length)
    own, other = area.address, peer.address
    bases = (other, own) if reading else (own, other)
    wanted = copies(src + bases[0], dst + bases[1], length)
    there = carrier.connect(peer.endpoint, time.monotonic() + SECONDS)
    try:
        start = carrier.read if reading else carrier.write
        start(there, wanted).wait(time.monotonic() + SECONDS)
    finally:
        carrier.disconnect(there)
    assert (sink.copy() == expected).all()


def test_out_of_bounds(area: DeviceArea, peer: Peer, carrier: Carrier) -> None:
    there = carrier.connect(peer.endpoint, time.monotonic() + SECONDS)
    gap = np.array([FIRST[0] + FIRST[1]])
    one = np.ones(1, dtype=np.int64)
    try:
        with pytest.raises(OutOfBounds):
            wanted = copies(gap + peer.address, gap * 0 + FIRST[0] + area.address, one)
            carrier.read(there, wanted).wait(time.monotonic() + SECONDS)
    finally:
        carrier.disconnect(there)


def test_a_peer_that_dies(kind: DeviceKind, area: DeviceArea, carrier: Carrier) -> None:
    with device_peer.owner(kind) as mortal:
        there = carrier.connect(mortal.endpoint, time.monotonic() + SECONDS)
        mortal.kill()
        at = np.array([FIRST[0]])
        wanted = copies(at + mortal.address, at + area.address, np.array([64]))
        with pytest.raises(PeerLost):
            carrier.read(there, wanted).wait(time.monotonic() + SECONDS)
        carrier.disconnect(there)
