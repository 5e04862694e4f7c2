"""The null carrier's faults: each does what it says, once, at the copy that it names."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from carrier_peer import copies, soon

from kvferry.carriers import MemoryRegion, host
from kvferry.carriers.null import Fabric, Faults, NullCarrier, NullPeer
from kvferry.copies import Copies
from kvferry.errors import DeadlineExceeded, PeerLost, PermissionDenied, TransferError

COUNT, SIZE = 16, 64


@dataclass
class Ends:
    carrier: NullCarrier
    other: NullCarrier
    peer: NullPeer
    here: np.ndarray
    there: np.ndarray

    def all(self) -> Copies:
        offsets = np.arange(COUNT) * SIZE
        src, dst = self.there.ctypes.data + offsets, self.here.ctypes.data + offsets
        return copies(src, dst, np.full(COUNT, SIZE))

    def read(self) -> None:
        self.carrier.read(self.peer, self.all()).wait(soon())

    def wrong(self) -> list[int]:
        """Copies, counted from 1, that did not arrive as they were."""
        same = (self.here == self.there).reshape(COUNT, SIZE).all(axis=1)
        return (np.flatnonzero(~same) + 1).tolist()


@pytest.fixture
def ends() -> Iterator[Ends]:
    fabric = Fabric()
    carrier, other = NullCarrier(fabric), NullCarrier(fabric)
    here = np.zeros(COUNT * SIZE, dtype=np.uint8)
    there = np.random.default_rng(0).integers(1, 256, COUNT * SIZE, dtype=np.uint8)
    carrier.register([MemoryRegion(here.ctypes.data, here.nbytes)])
    other.register([MemoryRegion(there.ctypes.data, there.nbytes)])
    peer = carrier.connect(other.endpoint(), soon())
    yield Ends(carrier, other, peer, here, there)
    carrier.close()
    other.close()


def test_without_faults(ends: Ends) -> None:
    ends.read()
    assert ends.wrong() == []


@pytest.mark.parametrize("at", [1, 7, COUNT])
def test_fails_at_a_copy_and_only_there(ends: Ends, at: int) -> None:
    ends.carrier.faults = Faults(fail_at=at)
    with pytest.raises(TransferError, match=f"copy {at} was told to fail"):
        ends.read()
    assert ends.wrong() == list(range(at, COUNT + 1))
    ends.read()
    assert ends.wrong() == []


def test_copies_count_across_transfers(ends: Ends) -> None:
    ends.carrier.faults = Faults(fail_at=COUNT + 3)
    ends.read()
    ends.here[:] = 0
    with pytest.raises(TransferError, match="told to fail"):
        ends.read()
    assert ends.wrong() == list(range(3, COUNT + 1))


def test_stalls(ends: Ends) -> None:
    ends.carrier.faults = Faults(stall_at=5, stall_seconds=1)
    begin = time.monotonic()
    transfer = ends.carrier.read(ends.peer, ends.all())
    with pytest.raises(DeadlineExceeded):
        transfer.wait(soon(0.5))
    assert ends.wrong() == list(range(5, COUNT + 1))
    transfer.wait(soon())
    assert time.monotonic() - begin >= 1
    assert ends.wrong() == []


def test_corrupts_and_says_nothing(ends: Ends) -> None:
    ends.carrier.faults = Faults(corrupt_at=3)
    ends.read()
    assert ends.wrong() == [3]
    assert np.count_nonzero(ends.here != ends.there) == 1


def test_fabrics_do_not_see_each_other(ends: Ends) -> None:
    stranger = NullCarrier(Fabric())
    with pytest.raises(PeerLost):
        stranger.connect(ends.other.endpoint(), soon())
    stranger.close()


def test_works_in_a_sandbox_without_the_system_call(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionDenied("no")

    monkeypatch.setattr(host, "read", forbidden)
    ends.read()
    assert ends.wrong() == []
