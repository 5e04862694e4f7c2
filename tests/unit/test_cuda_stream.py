"""How copies become kernel launches: on a device that is none, with a kernel written down again.

The kernel here reads nothing but the numbers that it is handed, item by item. Its bytes are
compared with loops over the copies, which share nothing with the code under test.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import host_device
from host_device import COUNT, CopyKernel, HostDevice
from kvferry.carriers import MemoryRegion, make_carrier
from kvferry.carriers.base import TransferState
from kvferry.carriers.cuda import carrier as carrier_module
from kvferry.carriers.cuda import kernels, stream
from kvferry.carriers.cuda.carrier import CudaTransfer, CudaTransfers
from kvferry.carriers.cuda.driver import CudaError
from kvferry.carriers.cuda.kernels import Kernel
from kvferry.carriers.cuda.stream import (
    LAUNCH_BYTES,
    Mapped,
    Pool,
    StreamBuffers,
    best_chunk,
    launches,
)
from kvferry.copies import Copies, Ints, StridedCopies
from kvferry.errors import Cancelled, DeadlineExceeded, OutOfBounds, PeerLost, TransferError
from kvferry.plan.bind import _constant

SIZE = 4 << 20
FAR = 1 << 44  # the peer's addresses are not ours


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

    def placed(self, copies: StridedCopies, pieces: int = 1) -> StridedCopies:
        """Offsets as addresses; with more pieces, each has as many rows."""
        each = len(copies.src_rows) // pieces
        theirs = copies.src_rows + FAR * (1 + np.arange(len(copies.src_rows)) // each)
        return replace(copies, src_rows=theirs, dst_rows=copies.dst_rows + self.ours.ctypes.data)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[CopyKernel]:
    """Kernels in the order of their use; they run on the host."""
    found: list[CopyKernel] = []

    def kernel(device: Any, chunk: int, *, search: bool, fill: bool, grain: int) -> Kernel:
        found.append(CopyKernel(chunk, search, fill, grain))
        return Kernel(found[-1], chunk, COUNT)  # type: ignore[arg-type]

    host_device.use(monkeypatch)
    monkeypatch.setattr(kernels, "kernel", kernel)
    return found


def buffers(triton: bool = True) -> StreamBuffers:
    return StreamBuffers(HostDevice(), triton=triton)  # type: ignore[arg-type]


def strided(
    rng: np.random.Generator, rows: int, segments: int, steps: int, slot: int
) -> StridedCopies:
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
    return StridedCopies(sr, dr, ss, ds, lengths, sk, dk)


def expected(copies: StridedCopies, memories: Memories) -> np.ndarray:
    out = np.zeros(SIZE, dtype=np.uint8)
    for sr, dr in zip(copies.src_rows.tolist(), copies.dst_rows.tolist(), strict=True):
        for sk, dk in zip(copies.src_steps.tolist(), copies.dst_steps.tolist(), strict=True):
            for s, d, n in zip(
                copies.src_segments.tolist(),
                copies.dst_segments.tolist(),
                copies.lengths.tolist(),
                strict=True,
            ):
                out[dr + d + dk : dr + d + dk + n] = memories.theirs[sr + s + sk : sr + s + sk + n]
    return out


@pytest.mark.parametrize("lengths", ["one", "equal", "uneven", "some empty"])
@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize(
    ("rows", "segments", "steps", "slot"),
    [(4, 30, 5, 1040), (4, 3, 1, 64), (4, 7, 1, 16384), (4, 9000, 1, 32)],
    ids=["strided", "so few that the kernel reads them itself", "chunks", "long: in pieces"],
)
def test_what_is_copied(
    used: list[CopyKernel],
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    segments: int,
    steps: int,
    slot: int,
    pieces: int,
    lengths: str,
) -> None:
    monkeypatch.setattr(stream, "PIECEWISE_BYTES", 0)
    if segments > 1000 and lengths in ("uneven", "some empty"):  # a loop would search for minutes
        segments = 300
        monkeypatch.setattr(stream, "TOGETHER_NUMBERS", 0)
        monkeypatch.setattr(stream, "LEAST_PIECE", 16)
    memories, on = Memories.make(), buffers()
    copies = strided(np.random.default_rng(slot), rows, segments, steps, slot)
    if lengths == "one":
        copies = replace(copies, lengths=_constant(slot - 16, segments))
    elif lengths == "equal":
        copies = replace(copies, lengths=np.full(segments, slot - 16))
    elif lengths == "some empty":
        copies.lengths[::2] = 0
    queued = list(on.steps(memories.placed(copies, pieces), memories.src(pieces), memories.dst()))
    assert sum(queued) == int(copies.lengths.sum()) * rows * steps
    assert np.array_equal(memories.ours, expected(copies, memories))
    assert on.end is not None and on.end.done()
    if lengths != "some empty":
        assert used[-1].search == (lengths == "uneven")
        assert (used[-1].launches > 1) == (segments in (9000, 300))


@pytest.mark.parametrize("together", [True, False])
def test_a_used_cache_is_one_launch(
    used: list[CopyKernel], monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """Each layer is a region. A request's blocks are a long run, and the region's last block."""
    if not together:
        monkeypatch.setattr(stream, "TOGETHER_NUMBERS", 0)
    memories, layers, blocks, block = Memories.make(), 4, 64, 256
    rows = np.arange(layers, dtype=np.int64) * (blocks * block)
    starts, lengths = np.array([3, blocks - 1]) * block, np.array([40, 1]) * block
    zero = np.zeros(1, dtype=np.int64)
    copies = StridedCopies(rows, rows, starts, starts[::-1] // 4, lengths, zero, zero)
    here = rows + memories.ours.ctypes.data
    theirs = [MemoryRegion(FAR + row, blocks * block) for row in rows.tolist()]
    ours = [MemoryRegion(row, blocks * block) for row in here.tolist()]
    src = Mapped.of([(theirs, memories.theirs.ctypes.data - FAR)])
    dst = Mapped.of([(ours, 0)])
    placed = memories.placed(copies)
    assert list(buffers().steps(placed, src, dst)) == [41 * block * layers]
    assert np.array_equal(memories.ours, expected(copies, memories))
    assert [one.launches for one in used] == [1]
    for bad in (
        replace(placed, lengths=lengths + 16),  # the last one leaves its region
        replace(placed, dst_segments=np.array([24 * block + 16, 0])),
        replace(placed, src_segments=np.array([-16, 0])),
        replace(placed, lengths=np.array([block, (1 << 63) - 1])),  # no sum with it fits
    ):
        with pytest.raises(OutOfBounds):
            list(buffers().steps(bad, src, dst))


@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("fill", [False, True])
def test_single_copies_of_any_integers(used: list[CopyKernel], triton: bool, fill: bool) -> None:
    """Addresses and lengths have no common divisor; without Triton, the driver copies each."""
    memories, on = Memories.make(), buffers(triton)
    memories.ours[:] = 7
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 900, 200)
    src, dst = (rng.permutation(200) * 1000 + rng.integers(0, 16, 200) for _ in range(2))
    copies = Copies(src + FAR, dst + memories.ours.ctypes.data, lengths.astype(np.int32))  # type: ignore[arg-type]
    on.copy(copies, memories.src(), memories.dst(), fill=fill)
    out = np.full(SIZE, 7, dtype=np.uint8)
    for s, d, n in zip(src.tolist(), dst.tolist(), lengths.tolist(), strict=True):
        out[d : d + n] = 0 if fill else memories.theirs[s : s + n]
    assert np.array_equal(memories.ours, out)
    assert bool(used) == triton


@pytest.mark.parametrize("apart", [False, True], ids=["one region", "rows in two regions"])
def test_more_segments_than_a_window(
    used: list[CopyKernel], monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """Cut into several batches, which take turns with the slots."""
    monkeypatch.setattr(stream, "WINDOW", 16)
    memories, on = Memories.make(), buffers()
    copies = strided(np.random.default_rng(5), 4, 100, 3, 64)
    pieces = 2 if apart else 1
    on.copy(memories.placed(copies, pieces), memories.src(pieces), memories.dst())
    assert np.array_equal(memories.ours, expected(copies, memories))
    assert len(used) == 7


def test_copies_in_regions_that_lie_apart(used: list[CopyKernel]) -> None:
    """Neither one region nor one for each row: every copy is placed by itself."""
    src = np.random.default_rng(2).integers(1, 256, 300, dtype=np.uint8)
    dst = np.zeros(300, dtype=np.uint8)
    base = src.ctypes.data
    theirs = Mapped.of(
        [([MemoryRegion(1000, 100)], base - 1000), ([MemoryRegion(1100, 50)], base + 200 - 1100)]
    )
    ours = Mapped.of([([MemoryRegion(dst.ctypes.data, 300)], 0)])
    to = dst.ctypes.data + np.array([0, 100, 200])
    copies = Copies(np.array([1010, 1100, 5]), to, np.array([20, 30, 0]))
    buffers().copy(copies, theirs, ours)
    out = np.zeros(300, dtype=np.uint8)
    out[:20], out[100:130] = src[10:30], src[200:230]
    assert np.array_equal(dst, out)


@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("segments", [50, 9000])
def test_copies_that_leave_registered_memory(
    used: list[CopyKernel], monkeypatch: pytest.MonkeyPatch, segments: int, triton: bool
) -> None:
    """The last of many, on either side: nothing is copied."""
    if segments == 9000:
        monkeypatch.setattr(stream, "WINDOW", 4096)  # also of the batches before it
    memories = Memories.make()
    good = memories.placed(strided(np.random.default_rng(2), 4, segments, 1, 64))
    good = replace(good, lengths=np.full(segments, 64))

    def last(array: Ints, value: int) -> Ints:
        out = array.copy()
        out[-1] = value
        return out

    bad = (
        replace(good, src_segments=last(good.src_segments, SIZE)),
        replace(good, src_segments=last(good.src_segments, -SIZE)),
        replace(good, src_segments=last(good.src_segments, (1 << 63) - 1)),
        replace(good, dst_segments=last(good.dst_segments, SIZE - 63)),
        replace(good, dst_rows=good.dst_rows + SIZE),
        replace(good, dst_steps=good.dst_steps - 1 - good.dst_segments.min()),
        replace(good, lengths=last(good.lengths, -64)),
        replace(good, lengths=last(good.lengths, 1 << 62)),
        replace(good, lengths=_constant(-64, segments)),
        replace(good, lengths=_constant(SIZE, segments)),
    )
    for copies in bad:
        with pytest.raises(OutOfBounds, match="nothing was copied"):
            buffers(triton).copy(copies, memories.src(), memories.dst())
    assert not any(kernel.launches for kernel in used) and not memories.ours.any()
    assert not list(
        buffers(triton).steps(good.of_segments(slice(0)), memories.src(), Mapped.of([]))
    )


@pytest.mark.parametrize(
    ("address", "length"),
    [(999, 1), (1999, 2), (1500, 600), (2499, 2), (-1, 1), (1000, -1), ((1 << 63) - 1, 1)],
)
def test_the_seam_of_two_allocations(used: list[CopyKernel], address: int, length: int) -> None:
    """They lie side by side in the peer's memory, and not here."""
    src = Mapped.of([([MemoryRegion(1000, 1000)], 50), ([MemoryRegion(2000, 500)], -700)])
    dst = Mapped.of([([MemoryRegion(9000, 3000)], 0)])
    for good in (0, 3):
        sources = np.append(np.full(good, 1000), address)
        targets, lengths = np.full(good + 1, 9000), np.append(np.full(good, 8), length)
        with pytest.raises(OutOfBounds, match="the peer registered"):
            buffers().copy(Copies(sources, targets, lengths), src, dst)


def test_strided_copies_that_make_no_sense() -> None:
    good = strided(np.random.default_rng(3), 2, 5, 3, 64)
    for change in (
        {"lengths": good.lengths[:-1]},
        {"src_rows": good.src_rows[:0]},
        {"dst_steps": good.dst_steps[:2]},
    ):
        with pytest.raises(TransferError, match="on both sides"):
            replace(good, **change)


def test_launches_are_bounded() -> None:
    parts = list(launches(1, 5 << 20, 20 << 30))
    assert len(parts) >= 20
    assert all((end - begin) * 4096 <= LAUNCH_BYTES for _, begin, end in parts)
    assert parts[0][1] == 0 and parts[-1][2] == 5 << 20
    assert all(a[2] == b[1] for a, b in itertools.pairwise(parts))


def test_chunks_fit_the_lengths() -> None:
    def of(*lengths: int) -> int:
        return best_chunk(np.asarray(lengths, dtype=np.int64))

    sizes = (16, 64, 256, 1024, 4096, 1 << 24)
    assert [of(n) for n in sizes] == [64, 64, 256, 1024, 4096, 4096]
    assert of(*[250] * 1000) == 256
    assert of(*[256] * 1000, 16 << 20) in kernels.TUNING


class Peer:
    """A peer that lives, until a test says otherwise."""

    near = True

    def __init__(self) -> None:
        self.held = 0
        self.lost = False

    def hold(self) -> None:
        self.held += 1

    def release(self) -> None:
        self.held -= 1

    def check(self) -> None:
        if self.lost:
            raise PeerLost("the peer is gone")


class SlowEvent(host_device.Event):
    """Done when the test says so."""

    reached = threading.Event()

    def done(self) -> bool:
        return self.reached.is_set()

    done_yet = done


@dataclass
class Copying:
    """Transfers of one carrier, without the carrier."""

    memories: Memories = field(default_factory=Memories.make)
    peer: Peer = field(default_factory=Peer)
    transfers: CudaTransfers = field(default_factory=CudaTransfers)

    def __post_init__(self) -> None:
        on: Any = HostDevice()
        self.pool = Pool(on, lambda: StreamBuffers(on, triton=True))
        self.copies = strided(np.random.default_rng(6), 2, 40, 1, 64)

    def read(self) -> CudaTransfer:
        def steps(on: StreamBuffers) -> Iterator[int]:
            copies = self.memories.placed(self.copies)
            return on.steps(copies, self.memories.src(), self.memories.dst())

        return CudaTransfer(self.transfers, self.pool, self.peer, steps, "a read")  # type: ignore[arg-type]

    @property
    def right(self) -> bool:
        return np.array_equal(self.memories.ours, expected(self.copies, self.memories))


@pytest.fixture
def copying(used: list[CopyKernel], monkeypatch: pytest.MonkeyPatch) -> Copying:
    monkeypatch.setattr(stream, "CudaEvent", SlowEvent)
    SlowEvent.reached.clear()
    return Copying()


def test_a_transfer_ends_when_the_device_has(copying: Copying) -> None:
    transfer = copying.read()
    assert transfer.poll() is TransferState.RUNNING and not transfer.settled()
    with pytest.raises(DeadlineExceeded, match="it goes on"):
        transfer.wait(0.0)
    SlowEvent.reached.set()
    transfer.wait(0.0)
    assert transfer.poll() is TransferState.DONE and copying.right and copying.peer.held == 0


def test_a_large_transfer_is_queued_in_steps(
    copying: Copying, used: list[CopyKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than the limit is queued at once; a thread that looks goes on with it."""
    monkeypatch.setattr(carrier_module, "QUEUED_BYTES", 1)
    monkeypatch.setattr(stream, "LAUNCH_BYTES", 512)
    transfer = copying.read()
    begun = used[-1].launches
    assert begun == 1 and not transfer.settled()
    SlowEvent.reached.set()
    looks = sum(1 for _ in iter(transfer.settled, True))
    assert looks > 2 and used[-1].launches > begun + 2
    transfer.wait(0.0)
    assert copying.right


def test_a_cancelled_transfer_queues_no_more(
    copying: Copying, used: list[CopyKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrier_module, "QUEUED_BYTES", 1)
    monkeypatch.setattr(carrier_module, "CANCEL_SECONDS", 0.01)
    monkeypatch.setattr(stream, "LAUNCH_BYTES", 512)
    transfer = copying.read()
    with pytest.raises(DeadlineExceeded, match="bytes may still come"):
        transfer.cancel()
    assert not transfer.settled()
    SlowEvent.reached.set()
    transfer.cancel()
    with pytest.raises(Cancelled):
        transfer.wait(0.0)
    assert used[-1].launches == 1 and copying.peer.held == 0 and transfer.settled()


def test_a_stuck_device_is_waited_for_once(
    copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many transfers are under way, a peer is disconnected, or a carrier closed, within
    one limit."""
    monkeypatch.setattr(carrier_module, "CANCEL_SECONDS", 0.2)
    stuck = [copying.read() for _ in range(20)]
    began = time.monotonic()
    copying.transfers.close()
    assert time.monotonic() - began < 10 * 0.2
    SlowEvent.reached.set()
    for transfer in stuck:
        with pytest.raises(Cancelled):
            transfer.wait(0.0)


def test_too_many_transfers_wait_for_their_turn(
    copying: Copying, used: list[CopyKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrier_module, "MOST_BEGUN", 2)
    monkeypatch.setattr(carrier_module, "SWEPT_FROM", 1)
    first, second, third, fourth = (copying.read() for _ in range(4))
    assert len(used) == 2 and not third.settled()
    fourth.cancel()
    with pytest.raises(Cancelled):
        fourth.wait(0.0)
    fifth = copying.read()
    SlowEvent.reached.set()
    assert third.begun is fifth.begun is False
    first.wait(0.0)  # an end lets the next one begin
    assert third.begun and not fifth.begun and len(used) == 3
    fifth.settled()  # it looks at the others, which have ended
    assert fifth.poll() is TransferState.DONE and copying.right and len(used) == 4
    assert second.settled() and third.settled() and copying.peer.held == 0


def test_a_transfer_whose_peer_ended_is_lost(copying: Copying) -> None:
    transfer = copying.read()
    copying.peer.lost = True
    SlowEvent.reached.set()
    with pytest.raises(PeerLost):
        transfer.wait(0.0)


def test_no_thread_takes_a_lost_transfer_for_a_good_one(copying: Copying) -> None:
    """Two threads look at a transfer when it ends: while one of them checks the peer, the other
    one has no answer yet."""
    transfer, seen, other = copying.read(), list[TransferState](), threading.Event()

    def ask() -> None:
        seen.append(transfer.poll())
        other.set()

    asking = threading.Thread(target=ask)

    def check() -> None:
        asking.start()
        assert not other.wait(0.1)
        raise PeerLost("the peer is gone")

    copying.peer.check = check  # type: ignore[method-assign]
    SlowEvent.reached.set()
    with pytest.raises(PeerLost):
        transfer.wait(0.0)
    asking.join(10)
    assert seen == [TransferState.FAILED]


def test_a_device_that_failed_ends_transfers_and_closes(
    copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some errors a device refuses everything, also its context and what frees memory."""
    transfer, other = copying.read(), copying.read()

    def refuse(*_: object) -> Any:
        raise CudaError("an illegal memory access was encountered")

    SlowEvent.reached.set()
    other.wait(0.0)  # its buffers are idle
    for of, name in ((SlowEvent, "done_yet"), (host_device.Handle, "destroy")):
        monkeypatch.setattr(of, name, refuse)
    monkeypatch.setattr(HostDevice, "current", refuse)
    with pytest.raises(CudaError, match="illegal"):
        transfer.wait(0.0)
    assert transfer.settled() and copying.peer.held == 0 and not copying.transfers.left
    copying.pool.close()


def test_closing_ends_transfers(copying: Copying) -> None:
    transfer = copying.read()
    SlowEvent.reached.set()
    copying.transfers.close()
    assert transfer.settled()
    with pytest.raises(Cancelled, match="closed"):
        copying.read().wait(0.0)


def test_without_a_driver_the_carrier_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """An option of earlier versions is accepted."""
    try:
        carrier = make_carrier("cuda", workers=4)
    except TransferError as error:
        assert "NVIDIA driver" in str(error) or "GPU" in str(error)
    else:
        carrier.close()
    assert "`workers` has no effect" in caplog.text
