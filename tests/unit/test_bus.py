"""Objects over the bus, on a device that is none: pieces, borders of registered memory, deadlines,
and the embedded store above it. `tests/gpu` has the same on a real one."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

import host_device
from host_device import HostDevice
from kvferry.carriers.base import MemoryRegion, Ready, RegionTable
from kvferry.carriers.cuda import bus as buses
from kvferry.carriers.cuda.bus import Bus, BusObjects, Crossing
from kvferry.carriers.cuda.driver import Rows
from kvferry.carriers.cuda.staging import DeviceMemory
from kvferry.errors import TransferError
from kvferry.pool.embedded import device
from kvferry.pool.embedded.device import DeviceStore
from kvferry.pool.embedded.eviction import Tiers
from kvferry.pool.embedded.store import EmbeddedStore
from kvferry.pool.store import Outcome, Slices
from kvferry.pool.wrappers import StagedStore
from pool_peers import tiers_of
from waiting import require_for, soon, wait_until

Lane = buses._Lane

CHUNK = 4096


@pytest.fixture(params=["direct", "staged"])
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDevice]:
    found = host_device.use_bus(monkeypatch)
    monkeypatch.setattr(buses, "DIRECT_BYTES", 1024 if request.param == "direct" else 1 << 40)
    monkeypatch.setattr(device, "PIN_AFTER_SECONDS", 0.0)
    yield found
    wait_until(lambda: not (found.live or host_device.made or found.registered))


def some_objects(
    rng: np.random.Generator,
    device: np.ndarray,
    host: np.ndarray,
    count: int,
    alike: bool,
    even: bool,
) -> tuple[BusObjects, list[tuple[int, int, int, int]]]:
    """Objects with gaps between them on the host; and all copies: object, offset, address, size.

    even  all runs have one length
    """
    run = int(rng.integers(1, 4)) * 1024
    lengths = rng.integers(40, 1500, count) * 8
    if even:
        lengths[:] = int(rng.integers(1, 5)) * run
    if alike:
        lengths[:] = lengths[0]
    steps = int(lengths.max()) + rng.integers(0, 3, count) * 64 * (not alike)
    places = host.ctypes.data + np.cumsum(steps) - steps
    order = rng.permutation(count) if not alike else np.arange(count)
    copies: list[tuple[int, int, int, int]] = []
    at = device.ctypes.data + -device.ctypes.data % 16
    for number in range(count):
        cuts = np.unique(rng.integers(0, lengths[number] // 8, 3) * 8)
        if even:
            cuts = np.arange(run, lengths[number], run)
        bounds = [0, *cuts[cuts > 0].tolist(), int(lengths[number])]
        for a, b in pairwise(bounds):
            copies.append((number, a, at, b - a))
            at += b - a + (0 if alike else int(rng.integers(0, 3)) * 16)
    assert at < device.ctypes.data + len(device)
    owner, offset, address, size = (np.array(c, dtype=np.int64) for c in zip(*copies, strict=True))
    runs = np.bincount(owner, minlength=count)
    return BusObjects(places[order], lengths, runs, offset, address, size), copies


@pytest.mark.parametrize("seed", range(8))
def test_every_byte_out_and_back(
    on: HostDevice, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    device = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
    host = np.full(1 << 20, 0xAB, dtype=np.uint8)
    region = MemoryRegion(device.ctypes.data, device.nbytes)
    bus = Bus([region], piece_bytes=30_000)
    monkeypatch.setattr(buses, "PIN_BYTES", 10_000)
    bus.pin(host.ctypes.data, host.nbytes, lambda first, size: size)
    wait_until(lambda: bus.pinned_bytes == host.nbytes)
    count = int(rng.integers(1, 40))
    objects, copies = some_objects(rng, device, host, count, seed % 3 == 0, seed % 2 == 0)
    direct = buses.DIRECT_BYTES == 1024 and seed % 2 == 0
    monkeypatch.setattr(Lane, "queue_staged" if direct else "queue_direct", None)
    monkeypatch.setattr(buses, "FEW_COPIES", 1 << 20)
    monkeypatch.setattr(buses, "SCRATCH_BYTES", 2000 if seed % 2 else 1 << 20)
    expected = host.copy()
    hashes = []
    for number in range(len(objects)):
        runs = [ctypes.string_at(a, n) for owner, _, a, n in copies if owner == number]
        data = np.frombuffer(b"".join(runs), dtype=np.uint8)
        at = int(objects.place[number]) - host.ctypes.data
        expected[at : at + len(data)] = data
        for first in range(0, len(data), CHUNK):
            hashes.append(xxhash.xxh3_64_intdigest(data[first : first + CHUNK].tobytes()))
    assert bus.out(objects, CHUNK, soon()).finish().tolist() == hashes
    assert np.array_equal(host, expected)
    before = device.copy()
    for _, _, address, size in copies:
        ctypes.memset(address, 0, size)
    assert bus.back(objects, CHUNK, soon()).finish().tolist() == hashes
    assert np.array_equal(device, before)
    bus.close()


def twenty(device: np.ndarray, host: np.ndarray) -> BusObjects:
    """Objects of one run, at equal distances on both sides."""
    number = np.arange(20, dtype=np.int64)
    length = np.full(20, 8192, dtype=np.int64)
    places = host.ctypes.data + number * 12_288
    one = np.ones(20, dtype=np.int64)
    return BusObjects(places, length, one, one - 1, device.ctypes.data + number * 8192, length)


def test_neighbours_cross_in_one_copy(on: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[tuple[int, int]] = []
    plain = host_device.Stream.copy_rows

    def counted(self: Any, some: Rows, **how: Any) -> None:
        rows.extend(zip(some.width.tolist(), some.height.tolist(), strict=True))
        plain(self, some, **how)

    monkeypatch.setattr(host_device.Stream, "copy_rows", counted)
    device = np.zeros(1 << 20, dtype=np.uint8)
    host = np.zeros(1 << 20, dtype=np.uint8)
    bus = Bus([MemoryRegion(device.ctypes.data, device.nbytes)])
    objects = twenty(device, host)
    bus.out(objects, CHUNK, soon()).finish()
    assert rows == [(8192, 20)]
    bus.close()


def test_copies_to_the_host_let_others_pass(
    on: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every `GAP_BYTES` a word goes the other way on a stream that waits for the bus, and the
    bus waits for it."""
    happened: list[tuple[str, Any, Any]] = []
    wait, record = host_device.Stream.wait_for, host_device.Event.record

    def waits(self: Any, event: Any, **how: Any) -> None:
        happened.append(("waits", self, event))
        wait(self, event, **how)

    def records(self: Any, stream: Any, **how: Any) -> None:
        happened.append(("records", stream, self))
        record(self, stream, **how)

    def word(self: Any, dst: int, src: int, size: int) -> None:
        if size == 8:
            happened.append(("word", self, None))
        host_device.Stream.copy(self, dst, src, size)

    monkeypatch.setattr(host_device.Stream, "wait_for", waits)
    monkeypatch.setattr(host_device.Event, "record", records)
    monkeypatch.setattr(host_device.Stream, "copy_at_once", word)
    monkeypatch.setattr(buses, "GAP_BYTES", 16_384)
    device, host = np.zeros(1 << 20, dtype=np.uint8), np.zeros(1 << 20, dtype=np.uint8)
    number = np.arange(16, dtype=np.int64)
    places = host.ctypes.data + number * 12_288 + number * number * 512  # a copy each
    length, one = np.full(16, 8192, dtype=np.int64), np.ones(16, dtype=np.int64)
    objects = BusObjects(places, length, one, one - 1, device.ctypes.data + number * 8192, length)
    bus = Bus([MemoryRegion(device.ctypes.data, device.nbytes)])
    bus.pin(host.ctypes.data, host.nbytes, lambda first, size: size)
    wait_until(lambda: bus.pinned_bytes == host.nbytes)
    bus.out(objects, CHUNK, soon()).finish()
    words = [at for at, (what, _, _) in enumerate(happened) if what == "word"]
    assert len(words) >= 7  # of 128 KiB
    for at in words:
        begins, waits_for, (_, aside, _), ends, goes_on = happened[at - 2 : at + 3]
        _, crossing, begin = begins
        assert begins[0] == ends[0] == "records" and crossing is not aside
        assert waits_for == ("waits", aside, begin)
        assert ends[1] is aside and goes_on == ("waits", crossing, ends[2])
    happened.clear()
    bus.back(objects, CHUNK, soon()).finish()
    assert "word" not in {what for what, _, _ in happened}  # small copies to the device pass anyway
    bus.close()


@pytest.mark.parametrize("behind_a_step", [True, False])
def test_a_full_queue_does_not_keep_the_interpreters_lock(
    on: HostDevice, behind_a_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a step nothing leaves the queue: a call that keeps the lock would stop the engine."""
    calls: list[
        tuple[Any, bool]
    ] = []  # of the stream that copies, and whether others run meanwhile
    copy, wait = host_device.Stream.copy_rows, host_device.Stream.wait_for
    record = host_device.Event.record

    def copies(self: Any, rows: Rows, *, waits: bool = False, **how: Any) -> None:
        calls.append((self, waits))
        copy(self, rows, waits=waits, **how)

    def waits_for(self: Any, event: Any, *, waits: bool = False) -> None:
        if calls:
            calls.append((self, waits))
        wait(self, event)

    def records(self: Any, stream: Any, *, waits: bool = False) -> None:
        if calls:
            calls.append((stream, waits))
        record(self, stream)

    monkeypatch.setattr(host_device.Stream, "copy_rows", copies)
    monkeypatch.setattr(host_device.Stream, "wait_for", waits_for)
    monkeypatch.setattr(host_device.Event, "record", records)
    monkeypatch.setattr(buses, "MOST_AHEAD", 2)
    device, host = np.ones(1 << 20, dtype=np.uint8), np.zeros(1 << 20, dtype=np.uint8)
    bus = Bus([MemoryRegion(device.ctypes.data, device.nbytes)], piece_bytes=30_000)
    bus.pin(host.ctypes.data, host.nbytes, lambda first, size: size)
    wait_until(lambda: bus.pinned_bytes == host.nbytes)
    number = np.arange(16, dtype=np.int64)
    places = host.ctypes.data + number * 12_288 + number * number * 512  # a copy each
    length, one = np.full(16, 8192, dtype=np.int64), np.ones(16, dtype=np.int64)
    objects = BusObjects(places, length, one, one - 1, device.ctypes.data + number * 8192, length)
    ready = Ready(77) if behind_a_step else None
    with monkeypatch.context() as patch:
        if behind_a_step:
            patch.setitem(host_device.ahead, 77, lambda: None)
        bus.out(objects, CHUNK, soon(), ready).finish()
    copying = calls[0][0]
    assert {waits for stream, waits in calls if stream is copying} == {behind_a_step}
    assert sum(host == 1) == 16 * 8192
    bus.close()


def test_copies_are_cut_for_the_gaps() -> None:
    """By hand: a copy that is too large, pieces that end where they should, and every byte once."""
    rows = Rows.of([(0, 100, 5000, 200, 10, 7), (9000, 1, 700, 1, 64, 1), (9100, 8, 800, 16, 4, 4)])
    cut, bounds = rows.cut(32)
    assert list(zip(cut.host.tolist(), cut.height.tolist(), strict=True)) == [
        (0, 3),
        (300, 3),
        (600, 1),
        (9000, 1),
        (9100, 4),
    ]
    assert cut.device.tolist() == [5000, 5600, 6200, 700, 800]
    assert bounds == [0, 1, 2, 3, 5]
    assert rows.cut(1 << 40) == (rows, [0, 3])
    even = Rows.of([(n * 8, 8, n * 8, 8, 8, 1) for n in range(8)])
    assert even.cut(32)[1] == [0, 4, 8]  # a piece that is full has no gap before its last copy
    assert Rows.of([]).cut(32)[1] == [0]


def test_no_copy_reaches_over_the_end_of_registered_memory(
    on: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While memory is being registered: objects on both sides of where it ends now."""
    device = np.zeros(1 << 20, dtype=np.uint8)
    host = np.zeros(1 << 20, dtype=np.uint8)
    seen: list[tuple[int, int]] = []
    plain = host_device.Stream.copy_rows

    def watched(self: Any, some: Rows, **how: Any) -> None:
        ends = some.host + (some.height - 1) * some.host_pitch + some.width
        seen.extend(zip(some.host.tolist(), ends.tolist(), strict=True))
        plain(self, some, **how)

    monkeypatch.setattr(host_device.Stream, "copy_rows", watched)
    monkeypatch.setattr(buses, "PIN_BYTES", 50_000)
    bus = Bus([MemoryRegion(device.ctypes.data, device.nbytes)])
    bus.pin(host.ctypes.data, host.nbytes, lambda first, size: min(size, 100_000))
    wait_until(lambda: bus.pinned_bytes == 100_000)
    objects = twenty(device, host)
    bus.out(objects, CHUNK, soon()).finish()
    borders = [host.ctypes.data + at for at in range(50_000, 1 << 20, 50_000)]
    assert seen and not [b for b in borders for low, high in seen if low < b < high]
    bus.close()


def test_memory_is_registered_late_but_not_later_than_it_is_used(on: HostDevice) -> None:
    device = np.zeros(1 << 20, dtype=np.uint8)
    host = np.zeros(1 << 20, dtype=np.uint8)
    bus = Bus([MemoryRegion(device.ctypes.data, device.nbytes)])
    bus.pin(host.ctypes.data, host.nbytes, lambda first, size: size, 3600.0)
    require_for(0.05, lambda: bus.pinned_bytes == 0)
    bus.out(twenty(device, host), CHUNK, soon()).finish()
    wait_until(lambda: bus.pinned_bytes == host.nbytes)
    bus.close()


def test_a_busy_bus_and_a_late_one(on: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buses, "OUT_LANES", 1)
    device = np.zeros(1 << 16, dtype=np.uint8)
    host = np.zeros(1 << 16, dtype=np.uint8)
    bus = Bus([MemoryRegion(device.ctypes.data, device.nbytes)])
    one = np.array([4096], dtype=np.int64)
    objects = BusObjects(
        np.array([host.ctypes.data]),
        one,
        one // one,
        one - one,
        one - one + device.ctypes.data,
        one,
    )
    crossing = bus.out(objects, CHUNK, soon())
    bus.warm()  # a request that comes before it is no failure
    with pytest.raises(TransferError, match="busy until the deadline"):
        bus.out(objects, CHUNK, time.monotonic() + 0.05)
    crossing.close()
    with pytest.raises(TransferError, match="not moved in time"):
        bus.out(objects, CHUNK, time.monotonic() - 1)
    bus.out(objects, CHUNK, soon()).finish()
    bus.close()


def test_memory_that_is_not_registered(on: HostDevice) -> None:
    device = np.zeros(1 << 16, dtype=np.uint8)
    bus = Bus([MemoryRegion(device.ctypes.data, 4096)])
    one = np.array([4096], dtype=np.int64)
    address = np.array([device.ctypes.data + 8])
    objects = BusObjects(one, one, one // one, one - one, address, one)
    with pytest.raises(TransferError, match="not inside"):
        bus.out(objects, CHUNK, soon())
    bus.close()


# The store

PAGE, LAYERS, OBJECTS = 3072, 5, 40


def cache_and_store(
    place: Path, *, size: int = 8 << 20, disk: bool = False
) -> tuple[np.ndarray, EmbeddedStore, DeviceStore]:
    room = np.random.default_rng(5).integers(0, 256, LAYERS * OBJECTS * PAGE + 16, dtype=np.uint8)
    first = -room.ctypes.data % 16
    cache = room[first : first + LAYERS * OBJECTS * PAGE]
    region = MemoryRegion(cache.ctypes.data, cache.nbytes)
    below = {"disk_directory": place / "disk", "disk_bytes": 8 << 20} if disk else {}
    inner = EmbeddedStore(place / "store", size, slots=1 << 12, **below)
    memory = DeviceMemory([region])
    assert memory.warmed.wait(30)
    bus = Bus([region], piece_bytes=50_000)
    store = DeviceStore(inner, memory, bus)
    store.register([region])
    wait_until(lambda: bus.pinned_bytes == size)
    return cache, inner, store


def blocks(cache: np.ndarray, numbers: range) -> list[Slices]:
    layers = cache.ctypes.data + np.arange(LAYERS, dtype=np.int64) * (OBJECTS * PAGE)
    size = np.full(LAYERS, PAGE, dtype=np.int64)
    return [Slices.whole(layers + n * PAGE, size) for n in numbers]


def whole(objects: list[Slices]) -> list[Slices]:
    offset = np.arange(LAYERS, dtype=np.int64) * PAGE
    return [Slices(offset, ranges.address, ranges.length) for ranges in objects]


def names(numbers: range) -> list[str]:
    return [f"ns/{n:04d}" for n in numbers]


def test_the_device_writes_what_a_processor_reads(
    on: HostDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, inner, store = cache_and_store(tmp_path)
    before, every = cache.copy(), range(OBJECTS)
    for way in ("put", "get"):  # not through buffers
        monkeypatch.setattr(StagedStore, way, None)
    if buses.DIRECT_BYTES == 1024:
        monkeypatch.setattr(Lane, "queue_staged", None)
    objects = blocks(cache, every)
    assert store.put(names(every), objects, soon()) == [Outcome.DONE] * OBJECTS
    assert store.put(names(every), objects, soon()) == [Outcome.EXISTS] * OBJECTS
    assert inner.verify(soon()) == (OBJECTS, 0, 0, "")
    cache[:] = 0
    assert store.get(names(every), whole(objects), soon()) == [Outcome.DONE] * OBJECTS
    assert np.array_equal(cache, before)
    other = np.zeros_like(cache)  # a processor's cache
    inner.register([MemoryRegion(other.ctypes.data, other.nbytes)])
    wanted = whole(blocks(other, every))
    assert inner.get(names(every), wanted, soon()) == [Outcome.DONE] * OBJECTS
    assert np.array_equal(other, before)
    assert inner.counters()["hits"] == 2 * OBJECTS
    store.close()


def test_the_device_reads_what_a_processor_wrote(
    on: HostDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And parts of it: two layers, a third of each page."""
    cache, inner, store = cache_and_store(tmp_path)
    before, every = cache.copy(), range(OBJECTS)
    inner.register([MemoryRegion(cache.ctypes.data, cache.nbytes)])
    objects = blocks(cache, every)
    assert inner.put(names(every), objects, soon()) == [Outcome.DONE] * OBJECTS
    monkeypatch.setattr(StagedStore, "get", None)
    cache[:] = 0
    part = np.array([1024, 3 * PAGE + 1024], dtype=np.int64)
    size = np.array([1024, 1024], dtype=np.int64)
    wanted = [Slices(part, o.address[[0, 3]] + 1024, size) for o in objects]
    assert store.get(names(every), wanted, soon()) == [Outcome.DONE] * OBJECTS
    expected = np.zeros_like(before).reshape(LAYERS, OBJECTS, 3, 1024)
    expected[[0, 3], :, 1] = before.reshape(LAYERS, OBJECTS, 3, 1024)[[0, 3], :, 1]
    assert np.array_equal(cache, expected.reshape(-1))
    store.close()


def test_objects_of_which_nothing_fits(on: HostDevice, tmp_path: Path) -> None:
    """Nothing is wanted of one, and of others more than they have: the rest of the batch comes."""
    cache, _, store = cache_and_store(tmp_path)
    before, some = cache.copy(), range(5)
    objects = blocks(cache, some)
    assert store.put(names(some), objects, soon()) == [Outcome.DONE] * 5
    cache[:] = 0
    wanted, none = whole(objects), np.zeros(0, dtype=np.int64)
    wanted[1] = Slices(none, none, none)
    wanted[2] = Slices(wanted[2].offset + 8, wanted[2].address, wanted[2].length)
    wanted[3] = Slices(wanted[3].offset - 8, wanted[3].address, wanted[3].length)
    found = store.get(names(some), wanted, soon())
    assert [found[n] for n in (0, 1, 4)] == [Outcome.DONE] * 3
    assert Outcome.DONE not in (found[2], found[3])
    now, then = (c.reshape(LAYERS, OBJECTS, PAGE) for c in (cache, before))
    assert np.array_equal(now[:, [0, 4]], then[:, [0, 4]]) and not now[:, 1:4].any()
    store.close()


def test_nothing_is_put_and_nothing_is_got(on: HostDevice, tmp_path: Path) -> None:
    _, _, store = cache_and_store(tmp_path)
    assert store.put([], [], soon()) == store.get([], [], soon()) == []
    store.close()


def require_loaded(store: DeviceStore, cache: Any, final: Any, count: int) -> None:
    """The first objects come back as they were in the end; closes the store."""
    cache[:] = 0
    some = range(count)
    assert store.get(names(some), whole(blocks(cache, some)), soon()) == [Outcome.DONE] * count
    shape = (LAYERS, OBJECTS, PAGE)
    assert np.array_equal(cache.reshape(shape)[:, :count], final.reshape(shape)[:, :count])
    store.close()


@pytest.mark.parametrize("broken", [False, True])
def test_a_put_is_queued_before_its_bytes_are_final(
    on: HostDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """The device waits for the step that computes them, by itself; or the buffers' thread does."""
    cache, _, store = cache_and_store(tmp_path)
    final, some = cache.copy(), range(6)
    cache[:] = 0
    waited: list[str] = []

    def computed() -> None:
        waited.append("device")
        cache[:] = final

    def wait() -> None:
        waited.append("here")
        cache[:] = final

    host_device.ahead[77] = computed
    if broken:
        monkeypatch.setattr(Bus, "out", lambda *_: (_ for _ in ()).throw(TransferError("lost")))

    def quiet() -> None:
        waited.append("for a quiet moment")
        assert "device" in waited and not store.exists(names(some), soon()).any()

    fence = SimpleNamespace(ready=Ready(77), wait=wait, quiet=quiet)
    objects = blocks(cache, some)
    assert store.put_after(names(some), objects, soon(), fence) == [Outcome.DONE] * 6
    assert waited[0] == ("here" if broken else "device")
    assert waited.count("for a quiet moment") == (not broken)  # though there are several parts
    host_device.ahead.clear()
    require_loaded(store, cache, final, 6)


def test_layers_that_are_final_early_are_copied_early(
    on: HostDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three layers cross while the step computes the others, which cross after it."""
    monkeypatch.setattr(buses, "DIRECT_BYTES", 1024)
    monkeypatch.setattr(buses, "EARLY_BYTES", 0)
    monkeypatch.setattr(StagedStore, "put", None)
    monkeypatch.setattr(Lane, "queue_staged", None)
    cache, _, store = cache_and_store(tmp_path)
    final, some, copied = cache.copy(), range(6), [0]
    layers, expected = cache.reshape(LAYERS, -1), final.reshape(LAYERS, -1)
    cache[:] = 0
    copy_rows = buses.CudaStream.copy_rows

    def counted(*args: Any, **named: Any) -> None:
        copied[0] += 1
        copy_rows(*args, **named)

    def first_layers() -> None:
        layers[:3] = expected[:3]

    def last_layers() -> None:
        assert copied[0] >= 1
        layers[3:] = expected[3:]

    monkeypatch.setattr(buses.CudaStream, "copy_rows", counted)
    host_device.ahead.update({76: first_layers, 77: last_layers})
    early = RegionTable.of([MemoryRegion(cache.ctypes.data, 3 * layers.shape[1])])
    fence = SimpleNamespace(ready=Ready(77, 76, early), wait=lambda: None, quiet=lambda: None)
    objects = blocks(cache, some)
    assert store.put_after(names(some), objects, soon(), fence) == [Outcome.DONE] * 6
    assert copied == [2]
    host_device.ahead.clear()
    require_loaded(store, cache, final, 6)


def test_what_was_copied_too_early_is_found(
    on: HostDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All memory is said to be final before it is: the hashes are of what it is in the end."""
    monkeypatch.setattr(buses, "DIRECT_BYTES", 1024)
    monkeypatch.setattr(buses, "EARLY_BYTES", 0)
    cache, _, store = cache_and_store(tmp_path)
    final, some = cache.copy(), range(6)
    cache[:] = 0

    def computed() -> None:
        cache[:] = final

    host_device.ahead.update({76: lambda: None, 77: computed})
    everything = RegionTable.of([MemoryRegion(cache.ctypes.data, cache.nbytes)])
    fence = SimpleNamespace(ready=Ready(77, 76, everything), wait=lambda: None, quiet=lambda: None)
    objects = blocks(cache, some)
    assert store.put_after(names(some), objects, soon(), fence) == [Outcome.DONE] * 6
    host_device.ahead.clear()
    assert store.get(names(some), whole(objects), soon()) == [Outcome.CORRUPT] * 6
    store.close()


@pytest.mark.parametrize("early", ["none", "others", "last runs", "of some objects", "few bytes"])
def test_what_is_not_the_same_for_all_objects_waits_for_the_end(
    early: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buses, "EARLY_BYTES", 1 << 20 if early == "few bytes" else 0)
    memory = {
        "none": [],
        "others": [MemoryRegion(1 << 30, 1 << 20)],
        "last runs": [MemoryRegion(3 << 20, 2 << 20)],
        "of some objects": [MemoryRegion(1 << 20, 2048)],
        "few bytes": [MemoryRegion(1 << 20, 1 << 20)],
    }[early]
    count, runs, size = 3, 4, 1024
    address = (np.arange(1, runs + 1) << 20) + np.arange(count)[:, None] * size
    objects = BusObjects(
        np.arange(count) * runs * size,
        np.full(count, runs * size),
        np.full(count, runs),
        np.tile(np.arange(runs) * size, count),
        address.reshape(-1),
        np.full(count * runs, size),
    )
    ready = Ready(2, 1, RegionTable.of(memory))
    assert buses.by_readiness(objects, ready) == [(2, objects)]


def test_copies_are_the_runs_whatever_their_distances() -> None:
    """Every byte of every run once, and none across the border of two registrations."""
    rng = np.random.default_rng(4)
    joined = cut = 0
    for _ in range(300):
        count, runs = int(rng.integers(1, 12)), int(rng.integers(1, 5))
        size = 1024 * int(rng.integers(1, 3))
        pitch = size + 1024 * int(rng.integers(0, 3))
        first = (1 << 40) + rng.choice([size, 2 * pitch * runs], 1) * np.arange(count)
        if rng.random() < 0.5:  # some blocks lie elsewhere
            first[rng.random(count) < 0.4] += 1 << 30
        address = first[:, None] + np.arange(runs) * pitch * (1 + (rng.random() < 0.3))
        if rng.random() < 0.2:
            address[count // 2] = address[count // 2, ::-1]
        place = (1 << 20) + np.arange(count) * (runs * size + 512 * int(rng.integers(0, 2)))
        starts = [1 << 20, (1 << 20) + int(rng.integers(1, count * runs * size + 2))]
        one = np.ones(count, dtype=np.int64)
        objects = BusObjects(
            place,
            one * (runs * size),
            one * runs,
            np.tile(np.arange(runs) * size, count),
            address.reshape(-1),
            np.full(count * runs, size),
        )
        rows = buses.run_rows(objects, starts)
        expected = {
            (int(place[n]) + run * size + at, int(address[n, run]) + at)
            for n in range(count)
            for run in range(runs)
            for at in range(0, size, 256)
        }
        found = list[tuple[int, int]]()
        fields = (rows.host, rows.host_pitch, rows.device, rows.device_pitch)
        for copy in zip(*fields, rows.width, rows.height, strict=True):
            host, host_pitch, there, there_pitch, width, height = map(int, copy)
            end = host + (height - 1) * host_pitch + width
            assert not any(host < border < end for border in starts)
            for row in range(height):
                here, far = host + row * host_pitch, there + row * there_pitch
                found += [(here + at, far + at) for at in range(-here % 256, width, 256)]
            cut += width < size
            joined += height > runs
        aligned = {pair for pair in expected if pair[0] % 256 == 0}
        assert len(found) == len(set(found)) and set(found) == aligned
    assert joined > 20 and cut > 20


@pytest.mark.parametrize("parts", [(64, 256), (2, 3)])
def test_what_is_damaged_gone_or_on_disk(
    on: HostDevice, tmp_path: Path, parts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one part, and in many: some have nothing that crosses the bus."""
    monkeypatch.setattr(device, "FIRST_OBJECTS", parts[0])
    monkeypatch.setattr(device, "GET_OBJECTS", parts[1])
    cache, inner, store = cache_and_store(tmp_path, disk=True)
    before, every = cache.copy(), range(OBJECTS)
    objects = blocks(cache, every)
    assert store.put(names(every), objects, soon()) == [Outcome.DONE] * OBJECTS
    with inner.lending(["ns/0003", "ns/0004"]) as lent:
        ctypes.memset(int(lent.place[0]) + LAYERS * PAGE - 1, 1, 1)
        ctypes.memset(int(lent.place[1]) - 1, 1, 1)  # of the header
    inner.remove(["ns/0005"], soon())
    to_disk(inner, ["ns/0006", "ns/0007"])
    cache[:] = 0
    found = store.get(names(every), whole(objects), soon())
    assert found[3:6] == [Outcome.CORRUPT, Outcome.CORRUPT, Outcome.MISSING]
    assert set(found[:3] + found[6:]) == {Outcome.DONE}
    gone = [3, 4, 5]
    now, then = (c.reshape(LAYERS, OBJECTS, PAGE) for c in (cache, before))
    kept = [n for n in every if n not in gone]
    assert np.array_equal(now[:, kept], then[:, kept])
    assert inner.exists(["ns/0003", "ns/0004"], soon()).tolist() == [False, False]
    store.close()


class Gone(BaseException):
    """Not an Exception."""


@pytest.mark.parametrize("how", ["all read", "no thread", "one raises", "too late"])
def test_what_is_on_disk_is_read_by_several_threads(
    on: HostDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """No thread writes to the cache any more when the call returns, in whatever way it ends."""
    monkeypatch.setattr(device, "READERS", 3)
    monkeypatch.setattr(device, "PARALLEL_BYTES", LAYERS * PAGE)
    cache, inner, store = cache_and_store(tmp_path, disk=True)
    before, every = cache.copy(), range(OBJECTS)
    objects = blocks(cache, every)
    assert store.put(names(every), objects, soon()) == [Outcome.DONE] * OBJECTS
    to_disk(inner, names(every))
    cache[:] = 0
    plain, begun, under_way = EmbeddedStore._read, threading.Barrier(3), []
    readers: set[str] = set()

    def read(self: EmbeddedStore, key: str | None, *rest: Any) -> Outcome:
        mine = threading.current_thread().name
        if how in ("all read", "one raises") and mine not in readers:
            begun.wait(30)
        readers.add(mine)
        under_way.append(key)
        try:
            if how == "one raises" and key == names(every)[0]:
                raise Gone
            time.sleep(0.01)
            return plain(self, key, *rest)
        finally:
            under_way.remove(key)

    monkeypatch.setattr(EmbeddedStore, "_read", read)
    if how == "no thread":
        store._readers.close()
    deadline = time.monotonic() + 0.05 if how == "too late" else soon()
    if how == "one raises":
        with pytest.raises(Gone):
            store.get(names(every), whole(objects), deadline)
    else:
        found = store.get(names(every), whole(objects), deadline)
        assert set(found) >= {Outcome.FAILED} if how == "too late" else {Outcome.DONE} == set(found)
        right = [outcome is Outcome.DONE for outcome in found]
        now, then = (c.reshape(LAYERS, OBJECTS, PAGE) for c in (cache, before))
        assert np.array_equal(now[:, right], then[:, right])
        assert not now[:, [not one for one in right]].any()
    assert not under_way
    if how != "too late":
        assert len(readers) == (1 if how == "no thread" else 3)
    store.close()


def to_disk(store: EmbeddedStore, keys: list[str]) -> None:
    """Move these objects from memory to disk."""
    tiers = tiers_of(store)
    tiers.evict_rows(tiers.index.find(*buses_keys(keys)), soon())


def buses_keys(keys: list[str]) -> tuple[np.ndarray, np.ndarray]:
    from kvferry.pool.embedded.index import hash_keys

    return hash_keys(keys)


def test_an_object_that_goes_while_it_is_read(
    on: HostDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its extent is another object's by then: what was read must not count."""
    cache, inner, store = cache_and_store(tmp_path)
    objects = blocks(cache, range(2))
    assert store.put(names(range(2)), objects, soon()) == [Outcome.DONE] * 2
    plain, again = Bus.back, []

    def meanwhile(self: Bus, moved: BusObjects, chunk: int, deadline: float) -> Crossing:
        crossing = plain(self, moved, chunk, deadline)
        if not again:
            again.append(inner.remove(["ns/0001"], soon()))
        return crossing

    monkeypatch.setattr(Bus, "back", meanwhile)
    found = store.get(names(range(2)), whole(objects), soon())
    assert found == [Outcome.DONE, Outcome.MISSING] and again == [1]
    store.close()


def test_a_bus_that_fails(on: HostDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts and gets go through buffers; nothing of what the bus began is left."""
    cache, inner, store = cache_and_store(tmp_path)
    before, some = cache.copy(), range(4)
    objects = blocks(cache, some)

    def broken(*_: object) -> None:
        raise TransferError("an illegal memory access was encountered")

    with monkeypatch.context() as failing:
        failing.setattr(Bus, "out", broken)
        assert store.put(names(some), objects, soon()) == [Outcome.DONE] * 4
    assert inner.verify(soon()) == (4, 0, 0, "")
    inner.clear(soon())
    with monkeypatch.context() as failing:
        failing.setattr(Crossing, "finish", broken)
        assert store.put(names(some), objects, soon()) == [Outcome.DONE] * 4
    assert inner.counters()["memory_bytes"] == 4 * tiers_of(inner).index.extent.max()
    cache[:] = 0
    with monkeypatch.context() as failing:
        failing.setattr(Bus, "back", broken)
        assert store.get(names(some), whole(objects), soon()) == [Outcome.DONE] * 4
    shape = (LAYERS, OBJECTS, PAGE)
    assert np.array_equal(cache.reshape(shape)[:, :4], before.reshape(shape)[:, :4])
    store.close()


def test_what_has_arrived_is_not_read_again(
    on: HostDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bus fails in the third part of a get: the first one is in its place already."""
    monkeypatch.setattr(device, "FIRST_OBJECTS", 4)
    monkeypatch.setattr(device, "GET_OBJECTS", 4)
    cache, _, store = cache_and_store(tmp_path)
    some, calls, buffered = range(12), list[int](), list[str]()
    before, objects = cache.copy(), blocks(cache, range(12))
    assert store.put(names(some), objects, soon()) == [Outcome.DONE] * 12
    cache[:] = 0
    plain, by_buffers = Bus.back, StagedStore.get

    def fails(self: Bus, *arguments: Any) -> Crossing:
        calls.append(1)
        if len(calls) == 3:
            raise TransferError("no more")
        return plain(self, *arguments)

    def noted(self: StagedStore, keys: list[str], *arguments: Any) -> list[Outcome]:
        buffered.extend(keys)
        return by_buffers(self, keys, *arguments)

    monkeypatch.setattr(Bus, "back", fails)
    monkeypatch.setattr(StagedStore, "get", noted)
    assert store.get(names(some), whole(objects), soon()) == [Outcome.DONE] * 12
    assert buffered == names(range(4, 12))
    shape = (LAYERS, OBJECTS, PAGE)
    assert np.array_equal(cache.reshape(shape)[:, :12], before.reshape(shape)[:, :12])
    store.close()


@pytest.mark.parametrize("limit", ["MOST_RUNS", "MOST_HASHES"])
def test_a_get_of_large_objects_crosses_in_smaller_parts(
    on: HostDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """More hashes or runs than one crossing takes."""
    cache, _, store = cache_and_store(tmp_path)
    before, every = cache.copy(), range(OBJECTS)
    objects = blocks(cache, every)
    assert store.put(names(every), objects, soon()) == [Outcome.DONE] * OBJECTS
    cache[:] = 0
    monkeypatch.setattr(device, "MOST_RUNS", 12 * LAYERS)
    monkeypatch.setattr(device, "MOST_HASHES", 12 * LAYERS if limit == "MOST_RUNS" else 3)
    monkeypatch.setattr(buses, limit, getattr(device, limit))
    monkeypatch.setattr(StagedStore, "get", None)  # not by buffers
    assert store.get(names(every), whole(objects), soon()) == [Outcome.DONE] * OBJECTS
    assert np.array_equal(cache, before)
    store.close()


def test_a_put_that_fails_between_its_parts(
    on: HostDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is under way ends before its extents are given back."""
    monkeypatch.setattr(device, "PUT_OBJECTS", 4)
    cache, inner, store = cache_and_store(tmp_path)
    some, order = range(12), list[str]()
    plain, close, abandon = Bus.out, Crossing.close, Tiers.abandon

    def fails_at_last(self: Bus, *arguments: Any) -> Crossing:
        if order.count("begun") == 2:
            raise RuntimeError("out of memory")
        order.append("begun")
        return plain(self, *arguments)

    def ended(self: Crossing) -> None:
        order.extend(["ended"] if self._lane is not None else [])
        close(self)

    def given_back(self: Tiers, wishes: list[Any]) -> None:
        order.extend(["given back"] if wishes else [])
        abandon(self, wishes)

    monkeypatch.setattr(Bus, "out", fails_at_last)
    monkeypatch.setattr(Crossing, "close", ended)
    monkeypatch.setattr(Tiers, "abandon", given_back)
    with pytest.raises(RuntimeError):
        store.put(names(some), blocks(cache, some), soon())
    # the third part is given back, then the second one, which was under way
    assert order == ["begun", "begun", "given back", "ended", "given back"]
    assert inner.exists(names(some), soon()).tolist() == [True] * 4 + [False] * 8
    assert inner.counters()["memory_bytes"] == 4 * tiers_of(inner).index.extent.max()
    store.close()
