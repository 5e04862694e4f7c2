"""The embedded store for a cache on a GPU: objects through pinned buffers, whole and in parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from device_peer import DeviceBytes

from kvferry.carriers import MemoryRegion
from kvferry.carriers.cuda.driver import device
from kvferry.carriers.cuda.staging import DeviceMemory

pytest.importorskip("xxhash")

from kvferry.pool.embedded.store import EmbeddedStore
from kvferry.pool.store import Outcome, Ranges, Slices
from kvferry.pool.wrappers import StagedStore

SIZE = 64 << 20
BLOCK, LAYERS = 48 << 10, 20  # of each object: a page of each layer, far apart
OBJECTS = 30


@pytest.fixture
def cache() -> Iterator[DeviceBytes]:
    on = device(0)
    with on.current():
        address = on.allocate(SIZE)
    yield DeviceBytes(on, address, SIZE)
    with on.current():
        on.free(address)


def test_objects_and_parts_of_them(cache: DeviceBytes, tmp_path: Path) -> None:
    data = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    cache[:] = data
    region = MemoryRegion(cache.address, SIZE)
    inner = EmbeddedStore(tmp_path / "store", 256 << 20, slots=1 << 12)
    store = StagedStore(inner, DeviceMemory([region]), stage_bytes=4 << 20)
    store.register([region])
    step = SIZE // LAYERS // 4096 * 4096
    pages = np.arange(LAYERS) * step
    length = np.full(LAYERS, BLOCK, dtype=np.int64)
    deadline = time.monotonic() + 60
    keys = [f"block/{n}" for n in range(OBJECTS)]
    objects = [Ranges(cache.address + pages + n * BLOCK, length) for n in range(OBJECTS)]
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
    store.close()
