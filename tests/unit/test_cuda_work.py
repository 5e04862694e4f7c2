"""How copies are cut for the GPU: against loops that share nothing with it. Needs no GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from kvferry.carriers import MemoryRegion, make_carrier
from kvferry.carriers.cuda.buffers import LAUNCH_BYTES, Mapped, launches, place
from kvferry.carriers.cuda.work import (
    CHUNKS,
    CudaRuns,
    Work,
    best_chunk,
    gathering,
    reverse,
    runs_of,
)
from kvferry.copies import Copies
from kvferry.errors import OutOfBounds, TransferError

ONE = np.zeros(1, dtype=np.int64)


def ints(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


def some_runs(seed: int, uniform: bool) -> CudaRuns:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 20_000, 50)
    if uniform:
        lengths[:] = 640
    sides = [(rng.integers(0, 1 << 40, n) * 4) for n in (3, 3, 50, 50, 4, 4)]
    return CudaRuns(sides[0], sides[1], sides[2], sides[3], lengths, sides[4], sides[5])


@pytest.mark.parametrize("uniform", [True, False])
def test_every_chunk_is_found_once(uniform: bool) -> None:
    """The kernel's arithmetic, item by item, covers every byte of every copy once."""
    runs = some_runs(1, uniform)
    work = Work.of(runs)
    seen: set[tuple[int, int, int, int]] = set()
    moved = 0
    for row, begin, end in launches(work):
        for item in range(begin, end):
            if work.length:
                copy, chunk = divmod(item, work.chunks)
                outer, step = divmod(copy, len(runs.src_steps))
                r, segment = divmod(outer, len(runs.lengths))
            else:
                outer, within = divmod(item, work.chunks)
                r, step = divmod(outer, len(runs.src_steps))
                segment = int(np.searchsorted(work.firsts, within, side="right")) - 1
                chunk = within - int(work.firsts[segment])
            key = (row + r, segment, step, chunk)
            assert key not in seen
            seen.add(key)
            size = min(int(runs.lengths[segment]) - chunk * work.chunk, work.chunk)
            assert size > 0
            moved += size
    assert moved == runs.bytes == int(runs.lengths.sum()) * 12
    assert 2 ** work.search_rounds() >= len(runs.lengths)


def test_launches_are_bounded() -> None:
    long = CudaRuns.of_arrays(Copies(ints(0), ints(0), ints(20 << 30)))
    work = Work.of(long)
    parts = list(launches(work))
    assert len(parts) >= 20
    assert all((end - begin) * work.chunk <= LAUNCH_BYTES for _, begin, end in parts)
    assert parts[0][1] == 0 and parts[-1][2] == work.items_per_row
    assert all(a[2] == b[1] for a, b in itertools.pairwise(parts))


def test_chunks_fit_the_lengths() -> None:
    assert [best_chunk(ints(n)) for n in (16, 64, 256, 1024, 4096, 1 << 24)] == [
        64,
        64,
        256,
        1024,
        4096,
        4096,
    ]
    assert best_chunk(np.full(1000, 250)) == 256
    many_short_one_long = np.append(np.full(1000, 256), 16 << 20)
    assert best_chunk(many_short_one_long) in CHUNKS


def test_grain() -> None:
    runs = CudaRuns.of_arrays(Copies(ints(16, 32), ints(0, 160), ints(16, 4096)))
    assert runs.grain() == 16
    assert replace(runs, lengths=ints(16, 20)).grain() == 4
    assert replace(runs, src_rows=ints(8)).grain() == 4
    assert replace(runs, dst_steps=ints(3)).grain() == 1


def test_gathered_runs_lie_one_after_another() -> None:
    runs = some_runs(2, uniform=False)
    out = gathering((runs.src_rows, runs.src_segments, runs.src_steps), runs.lengths, 1000)
    at = 1000
    for row in out.dst_rows:
        for step in out.dst_steps:
            for segment, length in zip(out.dst_segments, out.lengths, strict=True):
                assert row + step + segment == at
                at += int(length)
    assert at == 1000 + runs.bytes
    back = reverse(out)
    assert back.src_rows is out.dst_rows and back.dst_steps is out.src_steps


def every(runs: CudaRuns, src_shift: int = 0, dst_shift: int = 0) -> set[tuple[int, int, int]]:
    return {
        (s + src_shift, d + dst_shift, n)
        for part in runs.arrays()
        for s, d, n in zip(part.src.tolist(), part.dst.tolist(), part.length.tolist(), strict=True)
    }


def test_places() -> None:
    """In one region, in one for each row, and copy by copy: the same copies, shifted."""
    src = Mapped.of([([MemoryRegion(1000, 1000)], 50), ([MemoryRegion(2000, 500)], -700)])
    dst = Mapped.of([([MemoryRegion(9000, 3000)], 0)])
    in_one = CudaRuns.of_arrays(Copies(ints(1000, 1200), ints(9000, 9500), ints(100, 800)))
    ((placed, shifts),) = place(in_one, src, dst, reading=True)
    assert placed is in_one and (shifts.src, shifts.dst) == (50, 0)
    rows = CudaRuns(
        ints(1000, 2000), ints(9000, 10000), ints(0, 300), ints(0, 300), ints(10, 20), ONE, ONE
    )
    ((placed, shifts),) = place(rows, src, dst, reading=True)
    assert every(placed, shifts.src, shifts.dst) == {
        (1050, 9000, 10),
        (1350, 9300, 20),
        (1300, 10000, 10),
        (1600, 10300, 20),
    }
    mixed = CudaRuns.of_arrays(Copies(ints(1000, 2000, 5), ints(9000, 9100, 5), ints(10, 20, 0)))
    found: set[tuple[int, int, int]] = set()
    for placed, shifts in place(mixed, src, dst, reading=True):
        found |= every(placed, shifts.src, shifts.dst)
    assert found == {(1050, 9000, 10), (1300, 9100, 20)}


@pytest.mark.parametrize(
    ("address", "length"),
    [(999, 1), (1999, 2), (1500, 600), (2499, 2), (-1, 1), (1000, -1), ((1 << 63) - 1, 1)],
)
def test_what_is_outside_is_refused(address: int, length: int) -> None:
    """Also over the seam of two allocations that lie side by side there, and not here."""
    src = Mapped.of([([MemoryRegion(1000, 1000)], 50), ([MemoryRegion(2000, 500)], -700)])
    dst = Mapped.of([([MemoryRegion(9000, 3000)], 0)])
    for good in (0, 3):
        sources = np.append(np.full(good, 1000), address)
        targets, lengths = np.full(good + 1, 9000), np.append(np.full(good, 8), length)
        with pytest.raises(OutOfBounds, match="the peer registered"):
            place(CudaRuns.of_arrays(Copies(sources, targets, lengths)), src, dst, reading=True)


def test_strided_copies_that_make_no_sense() -> None:
    runs = some_runs(3, uniform=False)
    assert runs_of(runs).copies == 600
    with pytest.raises(TransferError, match="copies are"):
        runs_of(replace(runs, lengths=runs.lengths[:-1]))
    with pytest.raises(TransferError, match="copies are"):
        runs_of(replace(runs, src_steps=runs.src_steps.astype(float)))  # type: ignore[arg-type]


def test_without_a_driver_the_carrier_says_so() -> None:
    try:
        carrier = make_carrier("cuda")
    except TransferError as error:
        assert "NVIDIA driver" in str(error) or "GPU" in str(error)
    else:
        carrier.close()
