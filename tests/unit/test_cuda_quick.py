"""What the cuda carrier's short way queues: its launches, done by loops on host memory.

The lane is a stand-in that uploads at once and whose kernel is written down here again, item
by item; nothing but the numbers that it is handed tells it what to copy.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.carriers import MemoryRegion
from kvferry.carriers.cuda import buffers
from kvferry.carriers.cuda import kernels as kernels_module
from kvferry.carriers.cuda.buffers import Mapped
from kvferry.carriers.cuda.work import CudaRuns
from kvferry.copies import Copies, Ints
from kvferry.plan.bind import _constant

SIZE = 4 << 20
FAR = 1 << 44  # the peer's addresses are not ours
COUNT = 4  # chunks of a program


@dataclass
class Kernel:
    """The copy kernel: `chunk` bytes an item, all addresses and lengths multiples of `grain`."""

    chunk: int
    search: bool
    grain: int
    launches: int = 0
    items: int = 0

    def launch(self, grid: int, stream: Any, values: list[int]) -> None:
        tables, (length, src_shift, dst_shift) = values[:8], values[8:11]
        segments, steps, chunks, rounds, begin, end = values[11:17]
        assert grid == -(-(end - begin) // COUNT)
        assert 2**rounds > segments
        self.launches += 1
        self.items += end - begin

        def at(table: int, index: int) -> int:
            return ctypes.c_int64.from_address(tables[table] + 8 * index).value

        for item in range(begin, end):
            if self.search:
                outer, within = divmod(item, chunks)
                row, step = divmod(outer, steps)
                segment = max(s for s in range(segments) if at(7, s) <= within)
                chunk, full = within - at(7, segment), at(6, segment)
            else:
                copy, chunk = divmod(item, chunks)
                outer, step = divmod(copy, steps)
                row, segment = divmod(outer, segments)
                full = length
            done = chunk * self.chunk
            size = min(self.chunk, full - done)
            src = at(0, row) + at(2, segment) + at(4, step) + done + src_shift
            dst = at(1, row) + at(3, segment) + at(5, step) + done + dst_shift
            assert size > 0 and (src | dst | size) % self.grain == 0
            ctypes.memmove(dst, src, size)


@dataclass
class Lane:
    """One slot, whose memory on the device holds rubbish until it is copied there."""

    kernels: bool = True
    ended: bool = False
    device: Any = field(default_factory=lambda: SimpleNamespace(ordinal=0))
    stream: Any = None

    def slot(self, numbers: int) -> Any:
        self.numbers = np.full(numbers, -1, dtype=np.int64)
        self.there = np.full(numbers, -1, dtype=np.int64)
        return SimpleNamespace(
            numbers=self.numbers,
            address=self.numbers.ctypes.data,
            there=self.there.ctypes.data,
        )

    def upload(self, dst: int, src: int, size: int) -> None:
        ctypes.memmove(dst, src, size)

    def mark_end(self) -> None:
        self.ended = True


@dataclass
class Memories:
    """The peer's bytes, by addresses of its own, and ours."""

    theirs: np.ndarray
    ours: np.ndarray

    @classmethod
    def make(cls) -> Memories:
        noise = np.random.default_rng(0).integers(1, 256, SIZE, dtype=np.uint8)
        return cls(noise, np.zeros(SIZE, dtype=np.uint8))

    def src(self, pieces: int = 1) -> Mapped:
        """By so many addresses that have nothing to do with each other."""
        regions = [MemoryRegion(FAR * (1 + i), SIZE) for i in range(pieces)]
        return Mapped.of(([r], self.theirs.ctypes.data - r.address) for r in regions)

    def dst(self) -> Mapped:
        return Mapped.of([([MemoryRegion(self.ours.ctypes.data, SIZE)], 0)])


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    used: list[Kernel] = []

    def ready(device: Any, chunk: int, search: bool, grain: int) -> tuple[Kernel, int]:
        used.append(Kernel(chunk, search, grain))
        return used[-1], COUNT

    monkeypatch.setattr(kernels_module, "ready", ready)
    return used


def strided(rng: np.random.Generator, rows: int, segments: int, steps: int, slot: int) -> CudaRuns:
    """Offsets; every copy has a slot of its own on both sides."""
    assert rows * segments * steps * slot <= SIZE
    sides: list[tuple[Ints, Ints, Ints]] = [
        (
            np.arange(rows, dtype=np.int64) * (segments * steps * slot),
            rng.permutation(segments).astype(np.int64) * (steps * slot),
            rng.permutation(steps).astype(np.int64) * slot,
        )
        for _ in range(2)
    ]
    (sr, ss, sk), (dr, ds, dk) = sides
    lengths = rng.integers(1, slot // 16 + 1, segments) * 16
    return CudaRuns(sr, dr, ss, ds, lengths, sk, dk)


def expected(runs: CudaRuns, memories: Memories) -> np.ndarray:
    out = np.zeros(SIZE, dtype=np.uint8)
    for sr, dr in zip(runs.src_rows.tolist(), runs.dst_rows.tolist(), strict=True):
        for sk, dk in zip(runs.src_steps.tolist(), runs.dst_steps.tolist(), strict=True):
            for s, d, n in zip(
                runs.src_segments.tolist(),
                runs.dst_segments.tolist(),
                runs.lengths.tolist(),
                strict=True,
            ):
                out[dr + d + dk : dr + d + dk + n] = memories.theirs[sr + s + sk : sr + s + sk + n]
    return out


def placed(runs: CudaRuns, memories: Memories, pieces: int = 1) -> CudaRuns:
    each = len(runs.src_rows) // pieces
    theirs = runs.src_rows + FAR * (1 + np.arange(len(runs.src_rows)) // each)
    return replace(runs, src_rows=theirs, dst_rows=runs.dst_rows + memories.ours.ctypes.data)


@pytest.mark.parametrize("lengths", ["one", "equal", "uneven"])
@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize(
    ("rows", "segments", "steps", "slot"),
    [(4, 30, 5, 1040), (4, 3, 1, 64), (4, 7, 1, 16384), (4, 9000, 1, 32)],
    ids=["strided", "so few that the kernel reads them itself", "chunks", "long: in pieces"],
)
def test_what_is_queued(
    kernels: list[Kernel],
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    segments: int,
    steps: int,
    slot: int,
    pieces: int,
    lengths: str,
) -> None:
    if segments > 1000 and lengths == "uneven":  # searching by a loop would take minutes
        segments = 300
        monkeypatch.setattr(buffers, "TOGETHER_NUMBERS", 0)
        monkeypatch.setattr(buffers, "LEAST_PIECE", 16)
    memories, lane = Memories.make(), Lane()
    runs = strided(np.random.default_rng(slot), rows, segments, steps, slot)
    if lengths == "one":
        runs = replace(runs, lengths=_constant(slot - 16, segments))
    elif lengths == "equal":
        runs = replace(runs, lengths=np.full(segments, slot - 16))
    bytes_ = buffers.queue(
        lane,  # type: ignore[arg-type]
        placed(runs, memories, pieces),
        memories.src(pieces),
        memories.dst(),
        1 << 30,
    )
    assert bytes_ == int(runs.lengths.sum()) * rows * steps
    assert np.array_equal(memories.ours, expected(runs, memories))
    assert lane.ended and kernels[-1].search == (lengths == "uneven")
    if segments in (9000, 300):
        assert kernels[-1].launches > 1


def test_single_copies(kernels: list[Kernel]) -> None:
    """Three arrays, of any integers; a grain of one."""
    memories, lane = Memories.make(), Lane()
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 900, 200)
    src, dst = (rng.permutation(200) * 1000 + rng.integers(0, 16, 200) for _ in range(2))
    copies = Copies(src + FAR, dst + memories.ours.ctypes.data, lengths.astype(np.int32))  # type: ignore[arg-type]
    assert buffers.queue(lane, copies, memories.src(), memories.dst(), 1 << 30)  # type: ignore[arg-type]
    out = np.zeros(SIZE, dtype=np.uint8)
    for s, d, n in zip(src.tolist(), dst.tolist(), lengths.tolist(), strict=True):
        out[d : d + n] = memories.theirs[s : s + n]
    assert np.array_equal(memories.ours, out)


@pytest.mark.parametrize("segments", [50, 9000])
def test_what_is_not_for_here(kernels: list[Kernel], segments: int) -> None:
    """Wrong copies and unusual ones: nothing is queued, the other way says why."""
    memories = Memories.make()
    good = placed(strided(np.random.default_rng(2), 4, segments, 1, 64), memories)
    good = replace(good, lengths=np.full(segments, 64))
    last = segments - 1

    def changed(array: Ints, value: int) -> Ints:
        out = array.copy()
        out[last] = value
        return out

    bad = (
        replace(good, src_segments=changed(good.src_segments, SIZE)),
        replace(good, src_segments=changed(good.src_segments, -SIZE)),
        replace(good, src_segments=changed(good.src_segments, (1 << 63) - 1)),
        replace(good, dst_segments=changed(good.dst_segments, SIZE - 63)),
        replace(good, dst_rows=good.dst_rows + SIZE),
        replace(good, dst_steps=good.dst_steps - 1 - good.dst_segments.min()),
        replace(good, lengths=changed(good.lengths, 0)),
        replace(good, lengths=changed(good.lengths, -64)),
        replace(good, lengths=changed(good.lengths, 1 << 62)),
        replace(good, lengths=good.lengths[:-1]),
        replace(good, lengths=_constant(-64, segments)),
        replace(good, lengths=_constant(SIZE, segments)),
        replace(good, src_segments=good.src_segments.astype(float)),  # type: ignore[arg-type]
        replace(good, src_segments=good.src_segments.reshape(1, -1)),
        replace(good, src_rows=good.src_rows[:0], dst_rows=good.dst_rows[:0]),
        SimpleNamespace(src=3, dst=4, length=5),
    )
    for copies in bad:
        lane = Lane()
        assert not buffers.queue(lane, copies, memories.src(), memories.dst(), 1 << 30)  # type: ignore[arg-type]
        assert not lane.ended
    lane = Lane()
    assert not buffers.queue(lane, good, memories.src(), memories.dst(), good.bytes - 1)  # type: ignore[arg-type]
    assert not any(kernel.launches for kernel in kernels) and not memories.ours.any()
    assert buffers.queue(lane, good, memories.src(), memories.dst(), good.bytes)  # type: ignore[arg-type]
    assert memories.ours.any()
