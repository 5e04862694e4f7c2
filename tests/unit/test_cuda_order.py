"""Whether queued work still finds its bytes, on a device that does it as late as it may.

Whatever has ended by the device's word is used again at once: caches and arenas are overwritten,
staging buffers are filled again, memory is freed. So work that was queued and is still to come
would read or write wrong bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import xxhash

import late_device
from host_device import HostDevice
from kvferry.carriers.base import MemoryRegion, Ready, RegionTable
from kvferry.carriers.cuda import bus as buses
from kvferry.carriers.cuda import carrier, staging, stream
from kvferry.carriers.cuda.bus import Bus, BusObjects
from kvferry.carriers.cuda.carrier import CudaTransfer, CudaTransfers
from kvferry.carriers.cuda.driver import CudaError
from kvferry.carriers.cuda.staging import DeviceMemory, Width
from kvferry.carriers.cuda.stream import Mapped, Pool, StreamBuffers
from kvferry.copies import Copies
from kvferry.errors import TransferError
from late_device import LateEvent, LateStream
from waiting import soon, wait_until

SEEDS = range(6)
CHUNK, RUN, RUNS = 4096, 2048, 6
Array = np.ndarray[Any, Any]


@pytest.fixture(params=SEEDS)
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(request.param)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> HostDevice:
    return late_device.use(monkeypatch, int(rng.integers(1 << 30)))


def memory_of(size: int) -> Array:
    whole = np.zeros(size + 16, dtype=np.uint8)
    first = -whole.ctypes.data % 16
    return whole[first : first + size]


@pytest.mark.parametrize("way", ["direct", "staged"])
def test_saves_behind_steps_and_loads(
    on: HostDevice, rng: np.random.Generator, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts of a save are under way at once, behind the step that computes their blocks. When
    a part is over, the next step overwrites its blocks. Loads likewise."""
    monkeypatch.setattr(buses, "DIRECT_BYTES", RUN if way == "direct" else 1 << 40)
    monkeypatch.setattr(buses, "EARLY_BYTES", 0)
    monkeypatch.setattr(buses, "GAP_BYTES", 3 * RUN)
    monkeypatch.setattr(buses, "SCRATCH_BYTES", 2000)
    monkeypatch.setattr(buses, "LANE_SLOTS", 2)
    blocks, early_runs = 12, 4
    cache, host = memory_of(blocks * RUNS * RUN), memory_of(blocks * RUNS * RUN)
    layers = cache.reshape(RUNS, blocks, RUN)
    region = MemoryRegion(cache.ctypes.data, cache.nbytes)
    bus = Bus([region], piece_bytes=RUNS * RUN)
    bus.pin(host.ctypes.data, host.nbytes, lambda first, size: size)
    wait_until(lambda: bus.pinned_bytes == host.nbytes)
    early_memory = RegionTable.of([MemoryRegion(cache.ctypes.data, early_runs * blocks * RUN)])
    step, ends = LateStream(), [LateEvent() for _ in range(8)]
    LateEvent.by_handle = dict(enumerate(ends, 1))

    def objects(numbers: Array) -> BusObjects:
        count = len(numbers)
        at = cache.ctypes.data + np.arange(RUNS) * (blocks * RUN) + numbers[:, None] * RUN
        return BusObjects(
            host.ctypes.data + numbers * (RUNS * RUN),
            np.full(count, RUNS * RUN),
            np.full(count, RUNS),
            np.tile(np.arange(RUNS) * RUN, count),
            at.reshape(-1),
            np.full(count * RUNS, RUN),
        )

    def compute(numbers: Array, bytes_: Array, handle: int) -> Ready:
        """A step that writes these blocks: their first layers, and after an event the others."""
        for event, low, high in ((handle, 0, early_runs), (handle + 1, early_runs, RUNS)):
            part = bytes_[:, low:high].swapaxes(0, 1).copy()

            def write(low: int = low, high: int = high, part: Array = part) -> None:
                layers[low:high, numbers] = part

            step.add(write)
            ends[event - 1].record(step)
        return Ready(handle + 1, handle, early_memory)

    before: list[tuple[Any, Array, Array]] = []
    for number in range(6):
        some = rng.permutation(blocks // 2) + (number % 2) * (blocks // 2)
        bytes_ = rng.integers(0, 256, (len(some), RUNS, RUN), dtype=np.uint8)
        ready = compute(some, bytes_, 1 + 2 * (number % 2))
        before.append((bus.out(objects(some), CHUNK, soon(), ready), some, bytes_))
        if number:
            require_saved(host, *before.pop(0))
    require_saved(host, *before.pop(0))
    step.synchronize()

    loads: list[tuple[Any, Array, Array]] = []

    def require_loaded(crossing: Any, some: Array, bytes_: Array) -> None:
        assert crossing.finish().tolist() == hashes_of(bytes_)
        host.reshape(blocks, -1)[some] = 1  # their extents are others' now
        assert np.array_equal(layers[:, some].swapaxes(0, 1), bytes_)

    for number in range(6):
        some = rng.permutation(blocks // 2) + (number % 2) * (blocks // 2)
        bytes_ = rng.integers(0, 256, (len(some), RUNS, RUN), dtype=np.uint8)
        host.reshape(blocks, RUNS, RUN)[some] = bytes_
        loads.append((bus.back(objects(some), CHUNK, soon()), some, bytes_))
        if number:
            require_loaded(*loads.pop(0))
    require_loaded(*loads.pop(0))
    for begin, memory in ((bus.out, host), (bus.back, cache)):  # given up
        begin(objects(np.arange(blocks)), CHUNK, soon()).close()
        memory[:] = 3
        run_all()
        assert (memory == 3).all()
    bus.close()


def require_saved(host: Array, crossing: Any, some: Array, bytes_: Array) -> None:
    assert crossing.finish().tolist() == hashes_of(bytes_)
    saved = host.reshape(-1, RUNS, RUN)
    assert np.array_equal(saved[some], bytes_)
    saved[some] = 0


def hashes_of(objects: Array) -> list[int]:
    return [
        xxhash.xxh3_64_intdigest(one.tobytes()[first : first + CHUNK])
        for one in objects
        for first in range(0, RUNS * RUN, CHUNK)
    ]


def test_staging_buffers(
    on: HostDevice, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent and received through small buffers; some transfers are given up in the middle."""
    monkeypatch.setattr(staging, "WIDE", Width(1100, 1024))
    monkeypatch.setattr(stream, "LEAST_SLOT_NUMBERS", 8)  # slots grow, and give memory back
    cache = memory_of(1 << 16)
    memory = DeviceMemory([MemoryRegion(cache.ctypes.data, cache.nbytes)])
    for _ in range(8):
        count = int(rng.integers(2, 30))
        length = rng.integers(1, 1500, count)
        address = cache.ctypes.data + rng.permutation(40)[:count] * 1600
        places = [slice(a, a + n) for a, n in zip(address - cache.ctypes.data, length, strict=True)]
        sends, receives = rng.permutation([0, int(rng.integers(1, 4))])  # chunks; 0: all
        cache[:] = rng.integers(0, 256, cache.nbytes, dtype=np.uint8)
        dense = np.concatenate([cache[place] for place in places])
        sent = memory.outgoing(address, length)
        got = list[Array]()
        for chunk in sent:
            got.append(chunk.copy())
            chunk[:] = 7
            if len(got) == sends:
                break
        sent.close()
        cache[:] = 0
        found = np.concatenate(got)
        assert np.array_equal(found, dense[: len(found)]) and (sends or len(found) == len(dense))
        dense, done = rng.integers(1, 256, len(dense), dtype=np.uint8), 0
        received = memory.incoming(address, length)
        for turn, chunk in enumerate(received, 1):
            chunk[:] = dense[done : done + len(chunk)]
            done += len(chunk)
            if turn == receives:
                break
        received.close()
        bounds = [0, *np.cumsum(length).tolist()]
        if not receives:
            for place, (first, last) in zip(places, pairwise(bounds), strict=True):
                assert np.array_equal(cache[place], dense[first:last])
        before = cache.copy()
        run_all()
        assert np.array_equal(cache, before)  # nothing comes later
        memory.zero(address, length)
        assert not any(cache[place].any() for place in places)
    memory.close()


@pytest.mark.parametrize("cancelled", [False, True])
def test_transfers(
    on: HostDevice, rng: np.random.Generator, cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several tables each, beside each other, with few slots; ended or given up."""
    monkeypatch.setattr(carrier, "QUEUED_BYTES", int(rng.choice([250, 2000])))
    monkeypatch.setattr(carrier, "CANCEL_SECONDS", 30.0)
    monkeypatch.setattr(stream, "LAUNCH_BYTES", 300)
    monkeypatch.setattr(stream, "LEAST_SLOT_NUMBERS", 8)
    monkeypatch.setattr(stream, "WINDOW", 7)
    monkeypatch.setattr(stream, "PIECEWISE_BYTES", 0)
    monkeypatch.setattr(stream, "TOGETHER_NUMBERS", 0)
    monkeypatch.setattr(stream, "LEAST_PIECE", 2)
    size, transfers = 1 << 14, CudaTransfers()
    theirs, ours = memory_of(size), memory_of(size)
    pool = Pool(on, lambda: StreamBuffers(on, triton=True))  # type: ignore[arg-type]
    sides = [Mapped.of([([MemoryRegion(m.ctypes.data, size)], 0)]) for m in (theirs, ours)]
    for _ in range(4):
        theirs[:], ours[:] = rng.integers(1, 256, size, dtype=np.uint8), 0
        under_way, expected = [], ours.copy()
        cells = rng.permutation(64)
        for part in np.array_split(cells, 3):
            length = rng.integers(1, 256, len(part))
            src, dst = rng.permutation(64)[: len(part)] * 256, part * 256
            for s, d, n in zip(src.tolist(), dst.tolist(), length.tolist(), strict=True):
                expected[d : d + n] = theirs[s : s + n]
            copies = Copies(src + theirs.ctypes.data, dst + ours.ctypes.data, length)

            def steps(on: StreamBuffers, copies: Copies = copies) -> Any:
                return on.steps(copies, *sides)

            under_way.append(CudaTransfer(transfers, pool, Peer(), steps, "a read"))  # type: ignore[arg-type]
        for transfer in under_way:
            if cancelled:
                transfer.cancel()
                with pytest.raises(TransferError):
                    transfer.wait(soon())
            else:
                transfer.wait(soon())
        before = ours.copy()
        assert cancelled or np.array_equal(before, expected)
        theirs[:] = 0
        run_all()
        assert np.array_equal(ours, before)
    pool.close()


@pytest.mark.parametrize("what", ["save", "load", "send", "receive", "transfer"])
@pytest.mark.parametrize("way", ["direct", "staged"])
def test_what_fails_in_the_middle_leaves_nothing_under_way(
    on: HostDevice,
    rng: np.random.Generator,
    what: str,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver refuses one call. When the error has come, the memory is others', and the buffers
    serve the next one."""
    monkeypatch.setattr(buses, "DIRECT_BYTES", RUN if way == "direct" else 1 << 40)
    monkeypatch.setattr(staging, "WIDE", Width(3 * RUN, RUN))
    monkeypatch.setattr(stream, "WINDOW", 3)
    count = 8
    size = count * RUN
    cache, host = memory_of(size), memory_of(size)
    region = MemoryRegion(cache.ctypes.data, size)
    bus = Bus([region], piece_bytes=2 * RUN)
    bus.pin(host.ctypes.data, size, lambda first, size: size)
    wait_until(lambda: bus.pinned_bytes == size)
    memory, transfers = DeviceMemory([region]), CudaTransfers()
    pool = Pool(on, lambda: StreamBuffers(on, triton=True))  # type: ignore[arg-type]
    number = np.arange(count, dtype=np.int64)
    length, one = np.full(count, RUN), np.ones(count, dtype=np.int64)
    here, there = host.ctypes.data + number * RUN, cache.ctypes.data + number * RUN
    objects = BusObjects(here, length, one, one - 1, there, length)
    sides = [Mapped.of([([MemoryRegion(m.ctypes.data, size)], 0)]) for m in (cache, host)]

    def steps(buffers: StreamBuffers) -> Any:
        return buffers.steps(Copies(there, here, length), *sides)

    def work() -> None:
        if what == "save":
            bus.out(objects, CHUNK, soon()).finish()
        elif what == "load":
            bus.back(objects, CHUNK, soon()).finish()
        elif what == "send":
            memory.gather(there, length, host)
        elif what == "receive":
            memory.scatter(host, there, length)
        else:
            CudaTransfer(transfers, pool, Peer(), steps, "a read").wait(soon())  # type: ignore[arg-type]

    plain = LateStream.add
    for _ in range(4):
        fails = int(rng.integers(1, 25))
        calls = iter(range(1, 1 << 20))

        def add(self: LateStream, *of: Any, fails: int = fails, calls: Any = calls) -> None:
            if next(calls) == fails:
                raise CudaError("no resources")
            plain(self, *of)

        for memory_ in (cache, host):
            memory_[:] = rng.integers(0, 256, size, dtype=np.uint8)
        with monkeypatch.context() as patch, contextlib.suppress(CudaError):
            patch.setattr(LateStream, "add", add)
            work()
        for memory_ in (cache, host):
            memory_[:] = rng.integers(0, 256, size, dtype=np.uint8)
        before = cache.copy(), host.copy()
        run_all()
        assert np.array_equal(cache, before[0]) and np.array_equal(host, before[1])
        work()
        assert np.array_equal(cache, host) and not np.array_equal(*before)
    bus.close()
    memory.close()
    pool.close()


class Peer:
    """It lives."""

    near = True

    def hold(self) -> None: ...

    release = check = hold


def run_all() -> None:
    for one in late_device.queues.streams:
        one.synchronize()


def test_the_device_is_late(on: HostDevice) -> None:
    """A copy into memory that is used again too early: without a wait, the bytes are wrong."""
    src, dst = memory_of(64), memory_of(64)
    src[:] = 5
    first, event = LateStream(), LateEvent()
    first.copy(dst.ctypes.data, src.ctypes.data, 64)
    event.record(first)
    assert not dst.any()
    src[:32] = 6
    event.wait()
    assert dst[:32].tolist() == [6] * 32 and dst[32:].tolist() == [5] * 32
    second = LateStream()
    ctypes.memset(dst.ctypes.data, 0, 64)
    waiting = LateEvent()
    waiting.record(first)
    second.wait_for(waiting)
    second.add(partial(ctypes.memset, dst.ctypes.data, 9, 64))
    second.synchronize()
    assert waiting.done() and dst.all()
