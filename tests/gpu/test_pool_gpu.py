"""The embedded store for a cache on a GPU: objects through buffers and by the device itself, whole
and in parts."""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from device_peer import DeviceBytes, device_bytes

from kvferry.carriers import MemoryRegion
from kvferry.carriers.base import Ready, RegionTable
from kvferry.carriers.cuda import bus as buses
from kvferry.carriers.cuda.bus import Bus
from kvferry.carriers.cuda.driver import CudaEvent, CudaStream, device
from kvferry.carriers.cuda.staging import DeviceMemory
from waiting import wait_until

pytest.importorskip("xxhash")

from kvferry.pool.embedded import device as devices
from kvferry.pool.embedded.device import DeviceStore
from kvferry.pool.embedded.store import EmbeddedStore
from kvferry.pool.store import Outcome, Slices
from kvferry.pool.wrappers import StagedStore

SIZE = 64 << 20
BLOCK, LAYERS = 48 << 10, 20  # of each object: a page of each layer, far apart
OBJECTS = 30


@pytest.fixture
def shared_path() -> Iterator[Path]:
    """A folder in memory: the driver does not register files of every file system."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture
def cache() -> Iterator[DeviceBytes]:
    with device_bytes(SIZE) as made:
        yield made


@pytest.mark.parametrize("direct", [True, False])
def test_objects_and_parts_of_them(
    cache: DeviceBytes, shared_path: Path, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buses, "PIN_BYTES", 1 << 20)  # objects cross the borders of registrations
    data = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    cache[:] = data
    region = MemoryRegion(cache.address, SIZE)
    inner = EmbeddedStore(shared_path / "store", 256 << 20, slots=1 << 12)
    monkeypatch.setattr(devices, "PIN_AFTER_SECONDS", 0.0)
    store: StagedStore
    if direct:
        bus = Bus([region], piece_bytes=5 << 20)
        store = DeviceStore(inner, DeviceMemory([region]), bus)
        wait_until(lambda: bus.pinned_bytes == 256 << 20, 60)
        monkeypatch.setattr(StagedStore, "put", None)  # not by buffers
        monkeypatch.setattr(StagedStore, "get", None)
    else:
        store = StagedStore(inner, DeviceMemory([region]), stage_bytes=4 << 20)
    store.register([region])
    step = SIZE // LAYERS // 4096 * 4096
    pages = np.arange(LAYERS) * step
    length = np.full(LAYERS, BLOCK, dtype=np.int64)
    deadline = time.monotonic() + 60
    keys = [f"block/{n}" for n in range(OBJECTS)]
    objects = [Slices.whole(cache.address + pages + n * BLOCK, length) for n in range(OBJECTS)]
    assert store.put(keys, objects, deadline) == [Outcome.DONE] * OBJECTS
    cache[:] = 0
    expected = np.zeros(SIZE, dtype=np.uint8)
    wanted = []
    for n in range(OBJECTS):  # the middle third of each page, of every second object all of it
        first, size = (0, BLOCK) if n % 2 else (BLOCK // 3 + 1, BLOCK // 3)
        to = pages + n * BLOCK + first
        wanted.append(
            Slices(np.arange(LAYERS) * BLOCK + first, cache.address + to, np.full(LAYERS, size))
        )
        for at in to.tolist():
            expected[at : at + size] = data[at : at + size]
    with ThreadPoolExecutor(4) as threads:  # as loads come
        shares = [list(range(i, OBJECTS, 4)) for i in range(4)]
        told = threads.map(
            lambda share: store.get([keys[i] for i in share], [wanted[i] for i in share], deadline),
            shares,
        )
        assert {outcome for some in told for outcome in some} == {Outcome.DONE}
    assert np.array_equal(cache[:], expected)
    # a processor reads what the device wrote, and finds its checksums right
    assert inner.verify(deadline)[:2] == (OBJECTS, 0)
    store.close()


def test_a_damaged_object_is_found(cache: DeviceBytes, shared_path: Path) -> None:
    """One byte of the arena changes: the device's hash differs, and the object is removed."""
    region = MemoryRegion(cache.address, SIZE)
    cache[:] = np.random.default_rng(2).integers(0, 256, SIZE, dtype=np.uint8)
    inner = EmbeddedStore(shared_path / "store", 64 << 20, slots=1 << 12)
    store = DeviceStore(inner, DeviceMemory([region]), Bus([region]))
    store.register([region])
    deadline = time.monotonic() + 60
    size = np.array([600_000], dtype=np.int64)
    objects = [Slices.whole(cache.address + np.array([n << 20]), size) for n in range(3)]
    assert store.put(["a", "b", "c"], objects, deadline) == [Outcome.DONE] * 3
    with inner.lending(["b"]) as lent:
        ctypes.memset(int(lent.place[0]) + 599_999, 7, 1)
    zero = np.zeros(1, dtype=np.int64)
    wanted = [Slices(zero, o.address, size) for o in objects]
    outcomes = store.get(["a", "b", "c"], wanted, deadline)
    assert outcomes == [Outcome.DONE, Outcome.CORRUPT, Outcome.DONE]
    assert store.exists(["a", "b", "c"], deadline).tolist() == [True, False, True]
    store.close()


def _handle(event: CudaEvent) -> int:
    return int(event.handle.value or 0)


STEP_ROUNDS = 300  # of a gigabyte that is set to zero: some 70 ms, in which a save is queued


@dataclass
class StepEnd:
    """A `Fence` after a step."""

    end: CudaEvent

    @property
    def ready(self) -> Ready:
        return Ready(_handle(self.end))

    def wait(self) -> None:
        self.end.wait()

    def quiet(self) -> None:
        pass


def test_layers_that_are_final_early_are_copied_early(
    shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step fills all layers but one, computes on, and fills that one. Its save has the right
    bytes, and ends in less than half the time after the step."""
    on, part, layers = device(0), 32 << 20, 16
    size, pages = part * layers, part >> 16
    with on.current():
        cache, scratch, new = on.allocate(size), on.allocate(1 << 30), on.allocate(size)
        step, early, last = CudaStream(), CudaEvent(), CudaEvent()
    region = MemoryRegion(cache, size)
    bus = Bus([region])
    monkeypatch.setattr(devices, "PIN_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(StagedStore, "put", None)  # not by buffers
    inner = EmbeddedStore(shared_path / "store", 4 << 30, slots=1 << 14)
    store = DeviceStore(inner, DeviceMemory([region]), bus)
    store.register([region])
    wait_until(lambda: bus.pinned_bytes == 4 << 30, 60)
    length = np.full(layers, 1 << 16, dtype=np.int64)
    order = np.random.default_rng(3).permutation(pages)
    objects = [Slices.whole(cache + np.arange(layers) * part + (n << 16), length) for n in order]
    data = np.random.default_rng(4).integers(0, 256, size, dtype=np.uint8)
    seen = DeviceBytes(on, cache, size)
    DeviceBytes(on, new, size)[:] = data
    first = RegionTable.of([MemoryRegion(cache, part * (layers - 1))])

    def save(name: str, ready: Ready) -> float:
        """Seconds from the step's end until all is saved."""
        seen[:] = 0
        ended: list[float] = []
        with on.current():
            step.copy(cache, new, part * (layers - 1))
            early.record(step)
            for _ in range(STEP_ROUNDS):
                step.zero(scratch, 1 << 30)
            step.copy(cache + size - part, new + size - part, part)
            last.record(step)

        def wait() -> None:
            last.wait()
            ended.append(time.monotonic())

        fence = SimpleNamespace(ready=ready, wait=wait, quiet=lambda: None)
        keys = [f"{name}/{n}" for n in range(pages)]
        deadline = time.monotonic() + 60
        assert store.put_after(keys, objects, deadline, fence) == [Outcome.DONE] * pages
        took = time.monotonic() - ended[0]
        seen[:] = 0
        offset = np.arange(layers, dtype=np.int64) << 16
        wanted = [Slices(offset, one.address, length) for one in objects]
        assert store.get(keys, wanted, deadline) == [Outcome.DONE] * pages
        assert np.array_equal(seen[:], data)
        return took

    at_once = Ready(_handle(last), _handle(early), first)
    after = Ready(_handle(last))
    save("kernels may be compiled", after)
    took = [(save(f"early/{n}", at_once), save(f"late/{n}", after)) for n in range(5)]
    early_seconds, late_seconds = (sorted(some)[2] for some in zip(*took, strict=True))
    assert early_seconds < late_seconds / 2, took
    store.close()
    with on.current():
        for address in (cache, scratch, new):
            on.free(address)
        step.destroy()


def test_tokens_pass_a_save(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a step reach the host while its blocks are saved, though the copy engine had
    the blocks first."""
    on, size, pages = device(0), 1 << 30, 512
    with on.current():
        cache, scratch, there = on.allocate(size), on.allocate(size), on.allocate(256)
        here, (step, tokens) = on.pinned(256).ctypes.data, (CudaStream(), CudaStream())
        computed = CudaEvent()
        sampled, copied = CudaEvent(timing=True), CudaEvent(timing=True)
    region = MemoryRegion(cache, size)
    bus = Bus([region])
    arena = 3 << 30
    monkeypatch.setattr(devices, "PIN_AFTER_SECONDS", 0.0)
    inner = EmbeddedStore(shared_path / "store", arena, slots=1 << 12)
    store = DeviceStore(inner, DeviceMemory([region]), bus)
    store.register([region])
    wait_until(lambda: bus.pinned_bytes == arena, 60)
    length = np.full(32, 64 << 10, dtype=np.int64)
    order = np.random.default_rng(3).permutation(pages)
    objects = [
        Slices.whole(cache + np.arange(32) * (pages << 16) + (n << 16), length) for n in order
    ]
    monkeypatch.setattr(StagedStore, "put", None)  # not by buffers

    def tokens_wait(gap_bytes: int, thread: ThreadPoolExecutor) -> float:
        """Milliseconds that the tokens of a step come late."""
        monkeypatch.setattr(buses, "GAP_BYTES", gap_bytes)
        waits: list[float] = []
        for number in range(4):
            keys = [f"block/{gap_bytes}/{number}/{n}" for n in range(pages)]
            with on.current():
                for _ in range(STEP_ROUNDS):
                    step.zero(scratch, size)
                computed.record(step)
                step.zero(scratch, 1 << 20)
                sampled.record(step)
                tokens.wait_for(sampled)
                tokens.copy(here, there, 256)
                copied.record(tokens)
            save = thread.submit(
                store.put_after, keys, objects, time.monotonic() + 60, StepEnd(computed)
            )
            assert save.result() == [Outcome.DONE] * pages
            with on.current():
                tokens.synchronize()
            waits.append(copied.milliseconds_since(sampled))
            inner.evict(size, time.monotonic() + 60)
        return sorted(waits[1:])[1]  # kernels may be compiled in the first round

    with ThreadPoolExecutor(1) as thread:
        assert tokens_wait(buses.GAP_BYTES, thread) < 5.0
        assert tokens_wait(1 << 60, thread) > 5.0  # without gaps: the 20 ms of all blocks
    store.close()
    with on.current():
        for address in (cache, scratch, there):
            on.free(address)
        on.free_pinned(here)
        for stream in (step, tokens):
            stream.destroy()
