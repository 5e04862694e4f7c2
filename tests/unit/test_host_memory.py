"""Gathering, scattering and covering runs, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.carriers.base import (
    MemoryRegion,
    RegionTable,
)
from kvferry.carriers.host import HostMemory
from kvferry.carriers.local import MOST_STEP_BYTES, covers, covers_pay
from kvferry.copies import Copies
from kvferry.errors import OutOfBounds, TransferError

KINDS = ("equal", "few lengths", "many lengths", "long")


class Some:
    """Three regions, and runs in them that do not overlap."""

    def __init__(self, seed: int, kind: str) -> None:
        rng = np.random.default_rng(seed)
        slot = {"equal": 600, "few lengths": 512, "many lengths": 700, "long": 100_000}[kind]
        count = 40 if kind == "long" else 1500
        self.arrays = [rng.integers(0, 256, slot * count, dtype=np.uint8) for _ in range(3)]
        self.memory = HostMemory([MemoryRegion(a.ctypes.data, a.nbytes) for a in self.arrays])
        which, number = rng.integers(0, 3, count), rng.permutation(count)
        step = 1 if kind == "many lengths" else 64
        size = int(rng.integers(1, slot // step + 1)) * step
        self.length = {
            "equal": np.full(count, min(size, slot)),
            "few lengths": rng.choice([0, 64, 128, 512], count),
            "many lengths": rng.integers(0, slot + 1, count),
            "long": rng.choice([1, 16384, 16385, 99_999], count),
        }[kind].astype(np.int64)
        self.places = [(int(w), int(n) * slot) for w, n in zip(which, number, strict=True)]
        self.address = np.array([self.arrays[w].ctypes.data + at for w, at in self.places])
        self.rng = rng

    def bytes(self) -> bytes:
        runs = zip(self.places, self.length.tolist(), strict=True)
        return b"".join(self.arrays[w][at : at + n].tobytes() for (w, at), n in runs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_gather_scatter_and_zero(kind: str, seed: int) -> None:
    some = Some(seed, kind)
    total = int(some.length.sum())
    into = np.full(total + 3, 7, dtype=np.uint8)
    some.memory.gather(some.address, some.length, into)
    assert into[:total].tobytes() == some.bytes()
    assert (into[total:] == 7).all()

    fresh = some.rng.integers(0, 256, total, dtype=np.uint8)
    expected = [a.copy() for a in some.arrays]
    done = 0
    for (which, at), size in zip(some.places, some.length.tolist(), strict=True):
        expected[which][at : at + size] = fresh[done : done + size]
        done += size
    some.memory.scatter(fresh, some.address, some.length)
    assert all(map(np.array_equal, some.arrays, expected))

    for (which, at), size in zip(some.places, some.length.tolist(), strict=True):
        expected[which][at : at + size] = 0
    some.memory.zero(some.address, some.length)
    assert all(map(np.array_equal, some.arrays, expected))


def test_nothing_outside_is_touched() -> None:
    some = Some(1, "equal")
    before = [a.copy() for a in some.arrays]
    end = some.arrays[0].ctypes.data + some.arrays[0].nbytes
    buffer = np.zeros(1 << 22, dtype=np.uint8)
    for address, length in ((end, 1), (end - 1, 2), (0, 1), (-1, 1), (end - 8, 1 << 62), (end, -5)):
        runs, sizes = np.append(some.address, address), np.append(some.length, length)
        for act in (
            lambda r=runs, s=sizes: some.memory.gather(r, s, buffer),
            lambda r=runs, s=sizes: some.memory.scatter(buffer, r, s),
            lambda r=runs, s=sizes: some.memory.zero(r, s),
        ):
            with pytest.raises(OutOfBounds):
                act()
    with pytest.raises(TransferError, match="buffer"):
        some.memory.gather(some.address, some.length, np.zeros(4, dtype=np.uint8))
    assert all(map(np.array_equal, some.arrays, before))
    HostMemory([]).gather(np.array([], np.int64), np.array([], np.int64), buffer)


@pytest.mark.parametrize("step", [80, 700, MOST_STEP_BYTES, MOST_STEP_BYTES + 1])
def test_covers_hold_every_run_and_stay_in_their_region(step: int) -> None:
    rng = np.random.default_rng(step)
    ends = [(10_000, 60_000), (60_050, 100_000), (200_000, 300_000)]
    regions = RegionTable.of([MemoryRegion(a, b - a) for a, b in ends])
    src = np.concatenate([np.arange(a, b - 50, step) for a, b in ends])
    some = rng.permutation(len(src))[: len(src) // 3]
    src[some] = src[rng.permutation(some)]  # some are out of order
    src = np.append(src, [59_990, 60_050])  # a small gap, but not ours
    length = np.append(rng.integers(1, 51, len(src) - 2), [10, 10]).astype(np.int64)
    address, sizes, at = covers(regions, src, length)
    assert regions.first_outside(address, sizes) == -1
    assert (len(address) < len(src)) == (step <= MOST_STEP_BYTES)
    staged = np.concatenate([np.arange(a, a + n) for a, n in zip(address, sizes, strict=True)])
    for run, begin, size in zip(src, at, length, strict=True):
        assert staged[begin : begin + size].tolist() == list(range(run, run + size))


@pytest.mark.parametrize(
    ("step", "size", "pays"),
    [(128, 64, True), (1024, 512, True), (1025, 512, False), (64, 64, False), (2048, 1025, False)],
)
def test_covers_pay_for_short_runs_with_short_gaps(step: int, size: int, pays: bool) -> None:
    at = np.arange(200, dtype=np.int64) * step
    length = np.full(200, size, dtype=np.int64)
    assert covers_pay(Copies(at, at, length)) == pays
    assert not covers_pay(Copies(at[::-1], at, length))
    assert not covers_pay(Copies(at, at, np.append(length[:-1], 4096)))
