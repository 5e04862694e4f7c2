"""Buffers beside a GPU: how many there are, which are in use, and what is left when one fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import host_device
from host_device import HostDevice
from kvferry.carriers import MemoryRegion
from kvferry.carriers.checksum import mix_on_host
from kvferry.carriers.cuda import kernels, staging
from kvferry.carriers.cuda.driver import CudaError
from kvferry.carriers.cuda.staging import (
    CHUNK_BYTES,
    PIECE_BYTES,
    RING_CHUNKS,
    DeviceMemory,
    StagingBuffers,
    Width,
)
from kvferry.carriers.cuda.stream import LEAST_SLOT_NUMBERS, StreamBuffers, _Slot
from kvferry.errors import TransferError
from waiting import require_for, wait_until

WIDE_BYTES = 2 * PIECE_BYTES + RING_CHUNKS * CHUNK_BYTES
SIZE = 3 << 20


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDevice]:
    found = host_device.use(monkeypatch)
    yield found
    assert not found.live and not host_device.made  # whatever happened, all was given back


@pytest.mark.parametrize("what", ["allocate", "pinned"])
def test_a_slot_that_cannot_grow_stays_as_it_was(
    on: HostDevice, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(size: int) -> None:
        raise CudaError("out of memory")

    slot = _Slot(on)  # type: ignore[arg-type]
    before = slot.there, slot.address, len(slot.numbers)
    with monkeypatch.context() as patch:
        patch.setattr(on, what, fail)
        for _ in range(2):
            with pytest.raises(CudaError):
                slot.hold(2 * LEAST_SLOT_NUMBERS)
        assert (slot.there, slot.address, len(slot.numbers)) == before
        assert set(on.live) == {slot.there, slot.address}
    slot.hold(2 * LEAST_SLOT_NUMBERS)
    assert set(on.live) == {slot.there, slot.address} and slot.there != before[0]
    assert len(slot.numbers) >= 2 * LEAST_SLOT_NUMBERS
    slot.free()


@pytest.mark.parametrize("room", [0, PIECE_BYTES, 2 * PIECE_BYTES - 1])
def test_buffers_that_cannot_be_made_leaves_nothing(on: HostDevice, room: int) -> None:
    on.room = room
    with pytest.raises(CudaError):
        StagingBuffers(on)  # type: ignore[arg-type]
    assert not on.live and not host_device.made
    on.room = 2 * PIECE_BYTES
    StagingBuffers(on).free()  # type: ignore[arg-type]


@pytest.mark.parametrize("number", range(1, 4))
def test_buffers_without_all_of_its_events_leaves_none(
    on: HostDevice, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = host_device.Handle.__init__

    def some(self: host_device.Handle) -> None:
        if len(host_device.made) == number:
            raise CudaError("out of memory")
        begin(self)

    monkeypatch.setattr(host_device.Handle, "__init__", some)
    with pytest.raises(CudaError):
        StreamBuffers(on)  # type: ignore[arg-type]
    assert not host_device.made


def memory_of(count: int) -> tuple[np.ndarray, DeviceMemory]:
    data = np.random.default_rng(count).integers(0, 256, SIZE, dtype=np.uint8)
    memory = DeviceMemory([MemoryRegion(data.ctypes.data, SIZE)])
    assert memory.warmed.wait(30)  # buffers of its own are idle
    return data, memory


def test_an_engine_that_sleeps_has_no_memory(
    on: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It falls asleep while a peer reads and another one writes: no kernel touches its cache from
    then on. When it is awake, all goes on."""
    monkeypatch.setattr(staging, "WIDE", Width(8192, 4096))
    data, memory = memory_of(5)
    before, awake = data.copy(), [True]
    monkeypatch.setattr(staging, "has_memory", lambda address: awake[0])
    runs = np.asarray([data.ctypes.data]), np.asarray([SIZE])
    sending, receiving = memory.outgoing(*runs), memory.incoming(*runs)
    for _ in range(2):
        next(sending)
        next(receiving)[:] = 0
    awake[0] = False
    for going_on in (sending, receiving):
        with pytest.raises(TransferError, match="no memory"):
            list(going_on)
    for ask in (memory.mix, memory.zero, lambda *_: list(memory.outgoing(*runs))):
        with pytest.raises(TransferError, match="no memory"):
            ask(*runs)
    assert np.array_equal(data, before)
    awake[0] = True
    memory.zero(*runs)
    assert not data.any()
    memory.close()


def test_buffers_are_bounded_and_no_thread_waits_for_ever(
    on: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Senders whose peers take nothing hold all buffers; more come and go through."""
    monkeypatch.setattr(staging, "MOST_BUFFERS", 2)
    monkeypatch.setattr(staging, "NARROW_AFTER_SECONDS", 0.05)
    data, memory = memory_of(1)
    address, length = data.ctypes.data + np.arange(0, SIZE, 3000), np.full(SIZE // 3000 + 1, 3000)
    length[-1] = SIZE % 3000
    held = [memory.outgoing(address, length) for _ in range(5)]
    first = [next(chunks) for chunks in held]
    assert on.most_bytes < 3 * WIDE_BYTES  # and not five
    assert [len(chunk) for chunk in first[1:3]] == [SIZE, 256 << 10]
    landed = np.zeros(SIZE, dtype=np.uint8)
    memory.gather(address, length, landed)
    assert np.array_equal(landed, data)
    fresh = landed[::-1].copy()
    memory.scatter(fresh, address, length)
    assert np.array_equal(data, fresh)
    for chunks in held:
        chunks.close()
    assert sum(m.nbytes for m in on.live.values()) < 3 * WIDE_BYTES  # narrow ones are gone
    monkeypatch.setattr(staging, "NARROW_AFTER_SECONDS", 0.0)
    wide = memory.outgoing(address, length)
    assert len(next(wide)) == SIZE  # an idle one: else it would be narrow
    wide.close()
    memory.close()


def test_sums_that_no_kernel_computes_are_computed_by_the_processor(
    on: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton fails for single forms of a kernel."""
    data, memory = memory_of(4)
    begin = -(-data.ctypes.data // 16) * 16
    runs = np.asarray([begin + 64, begin]), np.asarray([32, 48])
    expected = mix_on_host(memory, *runs)

    def fail(*_: object) -> None:
        raise TransferError("Triton does not compile mix_runs")

    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(kernels, "load", fail)
    assert memory.mix(*runs) == expected
    memory.close()


def test_one_that_comes_back_in_time_is_taken(
    on: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "MOST_BUFFERS", 1)
    monkeypatch.setattr(staging, "NARROW_AFTER_SECONDS", 30.0)
    data, memory = memory_of(2)
    runs = np.asarray([data.ctypes.data]), np.asarray([SIZE])
    held = memory.outgoing(*runs)
    next(held)
    got: list[int] = []
    waiter = threading.Thread(target=lambda: got.extend(len(c) for c in memory.outgoing(*runs)))
    waiter.start()
    require_for(0.05, lambda: not got)
    held.close()
    waiter.join(10)
    assert got == [SIZE]  # one wide chunk
    memory.close()


def test_buffers_that_was_made_in_vain_is_not_counted(
    on: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "MOST_BUFFERS", 1)
    room, on.room = on.room, 0
    data, memory = memory_of(3)
    runs = np.asarray([data.ctypes.data]), np.asarray([SIZE])
    for _ in range(3):
        with pytest.raises(CudaError):
            next(memory.outgoing(*runs))
    on.room = room
    chunks = memory.outgoing(*runs)
    assert len(next(chunks)) == SIZE  # wide
    chunks.close()
    memory.close()


def test_idle_buffers_beyond_a_few_are_freed(
    on: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "KEPT_BUFFERS", 1)
    monkeypatch.setattr(staging, "LINGER_SECONDS", 60.0)
    data, memory = memory_of(4)
    runs = np.asarray([data.ctypes.data]), np.asarray([SIZE])
    held = [memory.outgoing(*runs) for _ in range(4)]
    for chunks in held:
        next(chunks)
    for chunks in held:
        chunks.close()
    assert sum(m.nbytes for m in on.live.values()) >= 4 * WIDE_BYTES  # not between two requests
    monkeypatch.setattr(staging, "LINGER_SECONDS", 0.0)
    steps, plain = threading.Event(), StagingBuffers.free

    def free(buffers: StagingBuffers) -> None:
        """Waits for the engine's steps, as a device does."""
        steps.wait(60)
        plain(buffers)

    monkeypatch.setattr(StagingBuffers, "free", free)
    began = time.monotonic()
    list(memory.outgoing(*runs))
    assert time.monotonic() - began < 30  # a transfer does not wait for them
    steps.set()
    wait_until(lambda: sum(m.nbytes for m in on.live.values()) < 2 * WIDE_BYTES)
    assert sum(m.nbytes for m in on.live.values()) >= WIDE_BYTES
    memory.close()
    memory._pool._freeing.join(10)
