"""Gathering, scattering and covering runs, against plain loops; and what the cost model chooses."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from kvferry.errors import DescriptionError, OutOfBounds, TransferError
from kvferry.transport.base import MemoryRegion
from kvferry.transport.cost import (
    ENVIRONMENT,
    MARGIN,
    Choice,
    Cost,
    Costs,
    Mode,
    load_costs,
    read_costs,
    shipped_costs,
)
from kvferry.transport.cover import pieces
from kvferry.transport.host import HostMemory
from kvferry.transport.local_move import MOST_GAP_BYTES, LocalMover
from kvferry.transport.regions import Arrays, RegionTable

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


@pytest.mark.parametrize("most_gap", [0, 100, 5000])
def test_covers_hold_every_run_and_stay_in_their_region(most_gap: int) -> None:
    rng = np.random.default_rng(most_gap)
    ends = [(10_000, 60_000), (60_050, 100_000), (200_000, 300_000)]
    regions = RegionTable.of([MemoryRegion(a, b - a) for a, b in ends])
    src = np.concatenate([rng.permutation(np.arange(a, b - 50, 80)) for a, b in ends])
    src[:600] = np.sort(src[:600])
    src = np.append(src, [59_990, 60_050])  # a small gap, but not ours
    length = np.append(rng.integers(1, 51, len(src) - 2), [10, 10])
    copies = Arrays(src, src, length.astype(np.int64))
    seen = 0
    for part, covers in pieces(regions, copies, most_gap, 6000):
        assert regions.first_outside(covers.address, covers.length) == -1
        assert covers.bytes <= 6000
        staged = np.concatenate(
            [np.arange(a, a + n) for a, n in zip(covers.address, covers.length, strict=True)]
        )
        for run, at, size in zip(part.src, covers.at, part.length, strict=True):
            assert staged[at : at + size].tolist() == list(range(run, run + size))
        seen += len(part)
        assert len(covers.address) <= len(part)
    assert seen == len(copies)


def costs(**tcp: Cost) -> Costs:
    return Costs("test", "2026-01-01", "none", {"tcp": tcp})  # type: ignore[arg-type]


def test_the_cheaper_mode_is_chosen_unless_one_is_forced() -> None:
    table = costs(direct=Cost(0, 1e-6, 1e-10), packed=Cost(1e-4, 1e-8, 3e-10))
    choice = Choice("tcp", costs=table)
    assert choice.mode(100_000, 100_000 * 64) == "packed"
    assert choice.mode(100_000, 100_000 * 65536) == "direct"
    assert choice.mode(10, 640) == "direct"  # not worth its fixed cost
    assert Choice("tcp", "packed", table).mode(1, 1 << 30) == "packed"
    assert Choice("tcp", "direct", table).mode(1 << 20, 1 << 20) == "direct"
    assert Choice("pigeon", costs=table).mode(1 << 20, 1 << 20) == "direct"  # nothing is known
    with pytest.raises(DescriptionError, match="auto, direct, packed"):
        Choice("tcp", "tight")  # type: ignore[arg-type]


def apart(address: np.ndarray, length: np.ndarray) -> int:
    pairs = zip(address.tolist(), length.tolist(), strict=True)
    ends = [a + n for a, n in pairs]
    return 1 + sum(a != end for a, end in zip(address[1:].tolist(), ends[:-1], strict=True))


def test_what_cannot_pay_is_seen_without_looking_at_the_runs() -> None:
    """The quick look of `local` decides nothing else than the long one, recomputed here."""
    rng = np.random.default_rng(0)
    regions = RegionTable.of([MemoryRegion(0, 1 << 30)])
    seen = set()
    for _ in range(40):
        per_run, per_byte = rng.uniform(0, 1, 2) * (1e-6, 1e-9)
        packed = Cost(0, *rng.uniform(0, 1, 2) * (1e-7, 1e-9))
        both: dict[Mode, Cost] = {"direct": Cost(0, per_run, per_byte), "packed": packed}
        mover = LocalMover(Choice("local", costs=Costs("test", "", "", {"local": both})))
        gap = min(int(per_run / per_byte), MOST_GAP_BYTES)
        for size, here, there in itertools.product((16, 256, 4096), (1, 2, 9), (1, 2, 9)):
            at = np.arange(200, dtype=np.int64) * size
            length = np.full(200, size, dtype=np.int64)
            runs = Arrays(at * there, at * here, length)
            mine, theirs = apart(runs.dst, length), apart(runs.src, length)
            count, near = 200 * size, (there - 1) * size <= gap
            read = count + (199 * (there - 1) * size if near else 0)
            staged = (1 if near else 100.5) * per_run + read * per_byte + packed.seconds(200, count)
            pays = staged < MARGIN * ((mine + theirs) / 2 * per_run + count * per_byte)
            assert mover._covers_pay(regions, runs, gap) == pays
            gain = (theirs - 1) / 2 * per_run
            gathers = mine < theirs and packed.seconds(theirs, count) < MARGIN * gain
            assert mover._gather_pays(runs) == gathers
            seen |= {("read", pays), ("write", gathers)}
    assert len(seen) == 4


def test_costs_are_found_and_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert load_costs() == shipped_costs()
    own = tmp_path / "kvferry" / "costs.json"
    own.parent.mkdir()
    own.write_text('{"name": "mine", "date": "d", "command": "c", "carriers": {}}')
    assert load_costs().name == "mine"
    own.write_text("{")
    assert load_costs() == shipped_costs()  # said in the log; an engine starts all the same
    monkeypatch.setenv(ENVIRONMENT, str(own))
    with pytest.raises(DescriptionError, match="calibrate"):
        load_costs()
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "none"))
    with pytest.raises(DescriptionError, match="KVFERRY_COSTS names"):
        load_costs()
    negative = b'{"name":"","date":"","command":"","carriers":{"tcp":{"direct":{"batch_seconds":-1,'
    negative += b'"descriptor_seconds":0,"byte_seconds":0}}}}'
    with pytest.raises(DescriptionError, match="negative"):
        read_costs(negative, "it")
