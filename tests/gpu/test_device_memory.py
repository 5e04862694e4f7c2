"""Device memory by kernel: every alignment, every length, gathered, scattered, zeroed; strided."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace

import numpy as np
import pytest
from carrier_peer import soon
from device_peer import DeviceBytes

from kvferry.carriers import MemoryRegion, make_carrier
from kvferry.carriers.cuda import kernels
from kvferry.carriers.cuda.driver import device, driver, has_memory
from kvferry.carriers.cuda.kernels import warm
from kvferry.carriers.cuda.staging import DeviceMemory
from kvferry.carriers.cuda.stream import ANYWHERE, StreamBuffers
from kvferry.carriers.host import HostMemory
from kvferry.copies import Copies, StridedCopies
from kvferry.errors import OutOfBounds, TransferError
from kvferry.handover.checksum import MIX128, XXH3, digest
from scattered import copy_scattered

SIZE = 32 << 20


@pytest.fixture(scope="module")
def buffers():
    on = device(0)
    with on.current():
        addresses = [on.allocate(SIZE) for _ in range(2)]
    yield [DeviceBytes(on, address, SIZE) for address in addresses]
    with on.current():
        for address in addresses:
            on.free(address)


@pytest.fixture(scope="module", params=[True, False], ids=["kernel", "copies"])
def stream(request):
    on = device(0)
    with on.current():
        made = StreamBuffers(on, triton=request.param)
        yield made
        made.free()


def run(stream: StreamBuffers, copies: Copies | StridedCopies, *, fill: bool = False) -> None:
    stream.begin()
    stream.copy(copies, ANYWHERE, ANYWHERE, fill=fill)
    stream.finish()


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)


LENGTHS = [*range(1, 50), 63, 64, 65, 255, 256, 257, 1000, 1023, 1024, 1025, 4095, 4096, 4097, 9999]


@pytest.mark.parametrize("uniform", [True, False])
def test_every_alignment_and_length(stream, buffers, uniform) -> None:
    src, dst = buffers
    data = noise(1)
    src[:] = data
    phases = [(a, b) for a in range(16) for b in range(16)]
    cases = [(a, b, n) for a, b in phases for n in LENGTHS]
    batches = [[c for c in cases if c[2] == n] for n in LENGTHS] if uniform else [cases]
    dst[:] = 7
    expected = np.full(SIZE, 7, dtype=np.uint8)
    slot = 10240
    for batch in batches:
        for first in range(0, len(batch), SIZE // slot):
            some = np.asarray(batch[first : first + SIZE // slot])
            at = np.arange(len(some), dtype=np.int64) * slot
            from_, to, length = at + some[:, 0], at[::-1] + some[:, 1], some[:, 2].copy()
            run(stream, Copies(from_ + src.address, to + dst.address, length))
            copy_scattered(data, from_, expected, to, length)
            assert np.array_equal(dst[:], expected)


@pytest.mark.parametrize("seed", range(6))
def test_long_and_short_together(stream, buffers, seed) -> None:
    """16 MiB and 16 bytes in one batch; lengths of any grain."""
    rng = np.random.default_rng(seed)
    src, dst = buffers
    data = noise(seed)
    src[:], dst[:] = data, 0
    grain = (16, 4, 1)[seed % 3]
    lengths = np.concatenate(
        [rng.integers(0, 300 // grain, 5000) * grain, [(16 << 20) // 3 // grain * grain] * 2]
    )
    rng.shuffle(lengths)
    starts = np.cumsum(lengths + grain * rng.integers(0, 3, len(lengths)))
    starts = np.concatenate([[0], starts[:-1]])
    order = rng.permutation(len(lengths))
    targets = np.empty_like(starts)
    ends = np.cumsum(lengths[order])
    targets[order] = ends - lengths[order]
    run(stream, Copies(starts + src.address, targets + dst.address, lengths))
    expected = np.zeros(SIZE, dtype=np.uint8)
    copy_scattered(data, starts, expected, targets, lengths)
    assert np.array_equal(dst[:], expected)


def strided(rng: np.random.Generator, grain: int, uniform: bool) -> StridedCopies:
    """Offsets of runs that do not overlap."""
    rows, segments, steps, slot = 7, 65, 5, 8192
    lengths = rng.integers(0, slot // grain, segments) * grain
    if uniform:
        lengths[:] = 304
    sides = []
    for _ in range(2):
        order = rng.permutation(segments).astype(np.int64)
        sides.append(
            (
                rng.permutation(rows).astype(np.int64) * segments * steps * slot,
                order * steps * slot,
                rng.permutation(steps).astype(np.int64) * slot,
            )
        )
    (sr, ss, sk), (dr, ds, dk) = sides
    return StridedCopies(sr, dr, ss, ds, lengths, sk, dk)


def at(runs: StridedCopies, src: int, dst: int) -> StridedCopies:
    return replace(runs, src_rows=runs.src_rows + src, dst_rows=runs.dst_rows + dst)


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("grain", [16, 4, 1])
def test_strided_runs(stream, buffers, grain, uniform) -> None:
    src, dst = buffers
    data = noise(grain)
    src[:], dst[:] = data, 3
    runs = strided(np.random.default_rng(grain), grain, uniform)
    expected = np.full(SIZE, 3, dtype=np.uint8)
    for arrays in runs.singly(1 << 17):
        copy_scattered(data, arrays.src, expected, arrays.dst, arrays.length)
    run(stream, at(runs, src.address, dst.address))
    assert np.array_equal(dst[:], expected)
    run(stream, at(runs, src.address, dst.address), fill=True)
    for arrays in runs.singly(1 << 17):
        zeros = np.zeros(8192, dtype=np.uint8)
        copy_scattered(zeros, np.zeros_like(arrays.src), expected, arrays.dst, arrays.length)
    assert np.array_equal(dst[:], expected)


def test_gather_scatter_zero(buffers) -> None:
    rng = np.random.default_rng(3)
    src, dst = buffers
    data = noise(2)
    src[:], dst[:] = data, 9
    memory = DeviceMemory([MemoryRegion(b.address, SIZE) for b in buffers])
    count = 40_000
    lengths = rng.integers(0, 600, count)
    slots = rng.permutation(count).astype(np.int64) * 700 + rng.integers(0, 16, count)
    total = int(lengths.sum())
    buffer = np.empty(total, dtype=np.uint8)
    memory.gather(slots + src.address, lengths, buffer)
    expected = np.empty(total, dtype=np.uint8)
    copy_scattered(data, slots, expected, np.cumsum(lengths) - lengths, lengths)
    assert np.array_equal(buffer, expected)
    memory.scatter(buffer, slots + dst.address, lengths)
    there = np.full(SIZE, 9, dtype=np.uint8)
    copy_scattered(data, slots, there, slots, lengths)
    assert np.array_equal(dst[:], there)
    memory.zero(slots + dst.address, lengths)
    copy_scattered(np.zeros(700, np.uint8), np.zeros_like(slots), there, slots, lengths)
    assert np.array_equal(dst[:], there)
    outside = np.asarray([max(src.address, dst.address) + SIZE - 1])
    with pytest.raises(OutOfBounds):
        memory.gather(outside, np.asarray([2]), buffer)
    with pytest.raises(OutOfBounds):
        memory.zero(outside, np.asarray([2]))
    with pytest.raises(TransferError, match="a buffer of"):
        memory.gather(slots + src.address, lengths, buffer[:-1])
    memory.close()


def test_chunks_of_long_and_short_runs(buffers) -> None:
    """More than two halves and a ring hold, through both again and again; and given up midway."""
    src, dst = buffers
    data = noise(5)
    src[:], dst[:] = data, 1
    memory = DeviceMemory([MemoryRegion(b.address, SIZE) for b in buffers])
    wait_until_compiled()
    lengths = np.concatenate([np.full(30_000, 512), [5 << 20, 3, 11 << 20]])
    starts = np.cumsum(lengths) - lengths
    order = np.random.default_rng(5).permutation(len(lengths))
    address, length = starts[order], lengths[order]
    for again in range(3):
        dst[:] = again
        got = np.concatenate([c.copy() for c in memory.outgoing(address + src.address, length)])
        expected = np.empty(len(got), dtype=np.uint8)
        copy_scattered(data, address, expected, np.cumsum(length) - length, length)
        assert np.array_equal(got, expected)
        done = 0
        for chunk in memory.incoming(address + dst.address, length):
            chunk[:] = got[done : done + len(chunk)]
            done += len(chunk)
        there = np.full(SIZE, again, dtype=np.uint8)
        copy_scattered(data, starts, there, starts, lengths)
        assert np.array_equal(dst[:], there)
        for left in (memory.outgoing, memory.incoming):
            chunks = left(address + src.address, length)
            next(chunks)
            chunks.close()  # the lane comes back with nothing under way
        src[:] = data
    memory.close()


@pytest.mark.parametrize("grain", [16, 8, 1])
@pytest.mark.parametrize("even", [True, False])
def test_checksums_of_device_memory_are_those_of_the_same_bytes(buffers, grain, even) -> None:
    """By a kernel where runs are aligned, else through the host; mix128 and xxh3."""
    rng = np.random.default_rng(grain)
    src, _ = buffers
    data = noise(6)
    src[:] = data
    there = DeviceMemory([MemoryRegion(src.address, SIZE)])
    here = HostMemory([MemoryRegion(data.ctypes.data, SIZE)])
    for length in (16, 304, 512, 8192, 70_000):
        count = min(40_000, SIZE // (length + 16))
        lengths = np.full(count, length // grain * grain)
        if not even:
            lengths = rng.integers(1, length // grain + 1, count) * grain
        slots = rng.permutation(count).astype(np.int64) * ((length + 16) // 16 * 16)
        slots += rng.integers(0, 16 // grain, count) * grain
        for algorithm in (MIX128, XXH3):
            found = digest(there, slots + src.address, lengths, algorithm)
            assert found == digest(here, slots + data.ctypes.data, lengths, algorithm)
        at = int(slots[count // 2])
        src[at : at + 1] = int(data[at]) ^ 1
        for algorithm in (MIX128, XXH3):
            found = digest(there, slots + src.address, lengths, algorithm)
            assert found != digest(here, slots + data.ctypes.data, lengths, algorithm)
        src[at : at + 1] = int(data[at])
    with pytest.raises(OutOfBounds):
        there.mix(np.asarray([src.address + SIZE]), np.asarray([16]))
    there.close()


def test_no_request_waits_for_a_compiler(buffers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that zero and mix, and staging buffers, are there before the first request."""
    src, _ = buffers
    memory = DeviceMemory([MemoryRegion(src.address, SIZE)])
    assert memory.warmed.wait(120)
    monkeypatch.setattr(kernels, "compiled", lambda *_: pytest.fail("compiled late"))
    for size in (64, 256, 1024, 4096, 65536):
        slots = src.address + np.arange(0, SIZE, 4 * size)
        for lengths in (np.full(len(slots), size), np.resize([size, size // 2], len(slots))):
            src[:] = 7
            memory.zero(slots, lengths)
            expected = np.full(SIZE, 7, dtype=np.uint8)
            for begin, length in zip(slots - src.address, lengths, strict=True):
                expected[begin : begin + length] = 0
            assert np.array_equal(src[:], expected)
            memory.mix(slots, lengths)
    memory.close()


def wait_until_compiled() -> None:
    on = device(0)
    with on.current():
        warm(on)


def test_strided_copies_are_checked(buffers) -> None:
    src, dst = buffers
    carrier = make_carrier("cuda")
    carrier.register([MemoryRegion(src.address, SIZE), MemoryRegion(dst.address, SIZE)])
    other = make_carrier("cuda")
    other.register([MemoryRegion(src.address, SIZE), MemoryRegion(dst.address, SIZE)])
    peer = carrier.connect(other.endpoint(), soon())
    data = noise(4)
    src[:], dst[:] = data, 0
    runs = at(strided(np.random.default_rng(8), 16, False), src.address, dst.address)
    carrier.read(peer, runs).wait(soon())
    expected = np.zeros(SIZE, dtype=np.uint8)
    for arrays in strided(np.random.default_rng(8), 16, False).singly(1 << 17):
        copy_scattered(data, arrays.src, expected, arrays.dst, arrays.length)
    assert np.array_equal(dst[:], expected)
    dst[:] = 0
    for bad in (
        replace(runs, src_rows=runs.src_rows - (64 << 20)),
        replace(runs, dst_steps=runs.dst_steps + (64 << 20)),
        replace(runs, lengths=np.append(runs.lengths[:-1], 1 << 40)),
        replace(runs, lengths=np.append(runs.lengths[:-1], -16)),
        replace(runs, src_segments=np.append(runs.src_segments[:-1], 1 << 62)),
    ):
        with pytest.raises(OutOfBounds):
            carrier.read(peer, bad).wait(soon())
    with pytest.raises(TransferError, match="on both sides"):
        carrier.read(peer, replace(runs, lengths=runs.lengths[:-1])).wait(soon())
    assert not dst.any()
    carrier.close()
    other.close()


def test_an_engine_that_sleeps_has_no_memory() -> None:
    """As vLLM's allocator does it: addresses stay, and what lies behind them goes and comes back.
    The device is as good as before."""
    on, calls, size = device(0), driver(), 4 << 20
    allocation = ctypes.create_string_buffer(struct.pack("<iiiiQQ", 1, 0, 1, 0, 0, 0))  # cuda.h
    access = ctypes.create_string_buffer(struct.pack("<iii", 1, 0, 3))
    at, handle, bytes_ = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t(size)
    zero = ctypes.c_uint64(0)

    def wake() -> None:
        calls.call("cuMemCreate", ctypes.byref(handle), bytes_, allocation, zero)
        calls.call("cuMemMap", at, bytes_, ctypes.c_size_t(0), handle, zero)
        calls.call("cuMemSetAccess", at, bytes_, access, ctypes.c_size_t(1))

    def sleep() -> None:
        calls.call("cuMemUnmap", at, bytes_)
        calls.call("cuMemRelease", handle)

    with on.current():
        calls.call("cuMemAddressReserve", ctypes.byref(at), bytes_, ctypes.c_size_t(0), zero, zero)
        wake()
    data = np.random.default_rng(9).integers(0, 256, size, dtype=np.uint8)
    there, runs = DeviceBytes(on, at.value, size), (np.array([at.value]), np.array([size]))
    memory, got = DeviceMemory([MemoryRegion(at.value, size)]), np.zeros(size, dtype=np.uint8)
    assert memory.warmed.wait(120)
    for _ in range(2):
        with on.current():
            assert has_memory(at.value)  # a kernel without memory would fail all later tests
        there[:] = data
        memory.gather(*runs, got)
        assert np.array_equal(got, data)
        with on.current():
            sleep()
            assert not has_memory(at.value)
        for ask in (memory.zero, memory.mix, lambda *_: memory.gather(*runs, got)):
            with pytest.raises(TransferError, match="no memory"):
                ask(*runs)
        with on.current():
            wake()
    memory.zero(*runs)
    assert not there.any()
    memory.close()
    with on.current():
        sleep()
        calls.call("cuMemAddressFree", at, bytes_)


def test_host_memory_is_refused() -> None:
    carrier = make_carrier("cuda")
    host = np.zeros(4096, dtype=np.uint8)
    with pytest.raises(TransferError, match="device memory"):
        carrier.register([MemoryRegion(host.ctypes.data, 4096)])
    carrier.close()
