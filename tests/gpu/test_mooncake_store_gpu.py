"""Mooncake Store for a cache on a GPU: its client reads and writes device memory, or buffers of the
host with checksums."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from device_peer import DeviceBytes, device_bytes

pytest.importorskip("mooncake.store", exc_type=ImportError)

from kvferry.carriers import MemoryRegion
from kvferry.carriers.cuda.staging import DeviceMemory
from kvferry.pool.mooncake import MooncakeStore
from kvferry.pool.store import Outcome, Slices, Store
from kvferry.pool.wrappers import CheckedStore
from mooncake_master import Master

PAGE, LAYERS, OBJECTS = 64 << 10, 8, 12
SIZE = PAGE * LAYERS * OBJECTS


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    started = Master(tmp_path_factory.mktemp("mooncake") / "log")
    yield started
    started.close()


@pytest.fixture
def cache() -> Iterator[DeviceBytes]:
    with device_bytes(SIZE) as made:
        yield made


@pytest.mark.parametrize("checked", [False, True])
def test_objects_and_parts_of_them(
    cache: DeviceBytes, master: Master, tmp_path: Path, checked: bool
) -> None:
    region = MemoryRegion(cache.address, SIZE)
    store: Store = MooncakeStore(master.config(256 << 20, 64 << 20))
    if checked:
        store = CheckedStore(store, DeviceMemory([region]))
    store.register([region])
    data = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    cache[:] = data
    pages = np.arange(LAYERS) * (PAGE * OBJECTS)
    length = np.full(LAYERS, PAGE, dtype=np.int64)
    deadline = time.monotonic() + 60
    keys = [f"{checked}/{n}" for n in range(OBJECTS)]
    objects = [Slices.whole(cache.address + pages + n * PAGE, length) for n in range(OBJECTS)]
    assert store.put(keys, objects, deadline) == [Outcome.DONE] * OBJECTS
    assert store.exists(keys, deadline).all()
    expected = np.zeros_like(data)
    wanted = []
    for n in range(OBJECTS):  # of every second object all of it, of the others a part of each page
        first, size = (0, PAGE) if n % 2 else (PAGE // 4, PAGE // 2)
        to = pages + n * PAGE + first
        offset = np.arange(LAYERS) * PAGE + first
        wanted.append(Slices(offset, cache.address + to, np.full(LAYERS, size)))
        for at in to.tolist():
            expected[at : at + size] = data[at : at + size]
    cache[:] = 0
    assert store.get(keys, wanted, deadline) == [Outcome.DONE] * OBJECTS
    assert np.array_equal(cache[:], expected)
    store.close()
