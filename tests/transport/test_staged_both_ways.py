"""Two sides read from and write to each other at once, with buffers for one transfer each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from carrier_peer import copies, soon

import host_device
from kvferry.carriers import MemoryRegion, make_carrier
from kvferry.carriers.base import Carrier
from kvferry.carriers.cuda import staging
from kvferry.carriers.cuda.staging import DeviceMemory

SIZE = 8 << 20


@contextmanager
def side(seed: int) -> Iterator[tuple[np.ndarray, Carrier]]:
    data = np.random.default_rng(seed).integers(0, 256, 4 * SIZE, dtype=np.uint8)
    region = MemoryRegion(data.ctypes.data, data.nbytes)
    memory = DeviceMemory([region])
    assert memory.warmed.wait(30)
    carrier = make_carrier("tcp", host="127.0.0.1", memory=memory, writable=True)
    carrier.register([region])
    try:
        yield data, carrier
    finally:
        carrier.close()
        memory.close()


def test_transfers_that_wait_for_each_others_buffers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has quarters: what it is read from, written to, reads into and writes from."""
    on = host_device.use(monkeypatch)
    monkeypatch.setattr(staging, "MOST_BUFFERS", 1)
    monkeypatch.setattr(staging, "NARROW_AFTER_SECONDS", 0.02)
    with side(1) as (ours, here), side(2) as (theirs, there):
        before = ours.copy(), theirs.copy()
        started = []
        for near, far, carrier, other in ((ours, theirs, here, there), (theirs, ours, there, here)):
            peer = carrier.connect(other.endpoint(), soon())
            at = np.random.default_rng(3).permutation(SIZE // 4096) * 4096
            mine, its = near.ctypes.data + at, far.ctypes.data + at
            for part in range(4):
                some = slice(part * len(at) // 4, (part + 1) * len(at) // 4)
                size = np.full(len(at[some]), 4096)
                reading = copies(its[some], mine[some] + 2 * SIZE, size)
                started.append(carrier.read(peer, reading))
                writing = copies(mine[some] + 3 * SIZE, its[some] + SIZE, size)
                started.append(carrier.write(peer, writing))
        for transfer in started:
            transfer.wait(soon(25))  # before anything stalls
        for found, (was, other_was) in ((ours, before), (theirs, before[::-1])):
            quarters = [found[n * SIZE : (n + 1) * SIZE] for n in range(4)]
            assert np.array_equal(quarters[0], was[:SIZE])
            assert np.array_equal(quarters[1], other_was[3 * SIZE :])
            assert np.array_equal(quarters[2], other_was[:SIZE])
            assert np.array_equal(quarters[3], was[3 * SIZE :])
    assert not on.live and not host_device.made
