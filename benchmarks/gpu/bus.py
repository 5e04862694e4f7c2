# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu.bus`: blocks between a GPU's cache and pinned memory, and the embedded
store above it, beside a plain pinned copy.

The cache has 32 layers of 64 KiB pages, as Llama 8B with blocks of 16 tokens; an object is one
block of all layers.
"""

from __future__ import annotations

import time
from contextlib import closing

import numpy as np

from benchmarks.measuring import scratch, timed
from kvferry.carriers.base import MemoryRegion
from kvferry.carriers.cuda import bus as buses
from kvferry.carriers.cuda.bus import Bus
from kvferry.carriers.cuda.driver import CudaStream, Device, Rows, device
from kvferry.carriers.cuda.staging import DeviceMemory
from kvferry.pool.embedded import device as device_store
from kvferry.pool.embedded.device import DeviceStore
from kvferry.pool.embedded.store import EmbeddedStore
from kvferry.pool.store import Outcome, Slices

LAYERS, BLOCKS, PAGE = 32, 4096, 64 << 10
OBJECTS, OBJECT = 512, LAYERS * PAGE
WIDTHS = (PAGE, 16 << 10, 8 << 10)
EXTENT = OBJECT + 4096
STORE_BYTES = 6 << 30
ROUNDS = 4
GB = 1e9


def main() -> None:
    on = device(0)
    with on.current():
        cache, stream = on.allocate(LAYERS * BLOCKS * PAGE), CudaStream()
        host = on.pinned(OBJECTS * EXTENT).ctypes.data
        rows(on, cache, host, stream)
        on.free_pinned(host)
    store(cache)


def rows(on: Device, cache: int, host: int, stream: CudaStream) -> None:
    ids = np.random.default_rng(0).permutation(BLOCKS)[:OBJECTS].tolist()

    def by_object(width: int) -> Rows:
        """Blocks that lie anywhere: a copy for each."""
        return Rows.of(
            [
                (host + n * EXTENT, width, cache + i * PAGE, BLOCKS * PAGE, width, LAYERS)
                for n, i in enumerate(ids)
            ]
        )

    def by_layer(width: int) -> Rows:
        """Neighbouring blocks: a copy for each layer."""
        return Rows.of(
            [
                (host + n * width, EXTENT, cache + n * BLOCKS * PAGE, PAGE, width, OBJECTS)
                for n in range(LAYERS)
            ]
        )

    whole = Rows.of([(host, OBJECT, cache, OBJECT, OBJECT, OBJECTS)])
    print("| copies | out GB/s | back GB/s |\n|---|---|---|")
    for name, copies in (
        ("one, contiguous", whole),
        *((f"a block each, pages of {w >> 10} KiB", by_object(w)) for w in WIDTHS),
        (f"a layer each, pages of {PAGE >> 10} KiB", by_layer(PAGE)),
    ):
        total = int((copies.width * copies.height).sum())
        rates = [_rate(total, copies, outward, stream) for outward in (True, False)]
        print(f"| {name} | {rates[0]:.1f} | {rates[1]:.1f} |", flush=True)


def _rate(total: int, copies: Rows, outward: bool, stream: CudaStream) -> float:
    best = 0.0
    for _ in range(ROUNDS):
        stream.synchronize()
        began = time.perf_counter()
        stream.copy_rows(copies, outward=outward)
        stream.synchronize()
        best = max(best, total / (time.perf_counter() - began) / GB)
    return best


def store(cache: int) -> None:
    region = MemoryRegion(cache, LAYERS * BLOCKS * PAGE)
    device_store.PIN_AFTER_SECONDS = 0.0
    bus = Bus([region])
    with (
        scratch() as folder,
        closing(
            DeviceStore(EmbeddedStore(folder / "store", STORE_BYTES), DeviceMemory([region]), bus)
        ) as made,
    ):
        made.register([region])
        began = time.monotonic()
        while bus.pinned_bytes < STORE_BYTES and time.monotonic() < began + 60:
            time.sleep(0.05)
        print(f"\npinned {bus.pinned_bytes / GB:.1f} GB in {time.monotonic() - began:.1f} s\n")
        print("| store, checksums on | put GB/s | get GB/s |\n|---|---|---|")
        for way, least in (("direct", buses.DIRECT_BYTES), ("staged", 1 << 40)):
            buses.DIRECT_BYTES = least
            print(f"| {way} | {_put(made, way):.1f} | {_get(made, way):.1f} |", flush=True)


def _objects(made: DeviceStore, seed: int) -> list[Slices]:
    ids = np.random.default_rng(seed).permutation(BLOCKS)[:OBJECTS].astype(np.int64)
    first = made._regions.regions()[0].address + np.arange(LAYERS, dtype=np.int64) * (BLOCKS * PAGE)
    length = np.full(LAYERS, PAGE, dtype=np.int64)
    return [Slices.whole(first + i * PAGE, length) for i in ids.tolist()]


def _keys(way: str, number: int) -> list[str]:
    return [f"{way}/{number}/{n:064x}" for n in range(OBJECTS)]


def _put(made: DeviceStore, way: str) -> float:
    """GB/s of the better of two: the first one touches records and pages."""
    best = 0.0
    for number in range(2):
        keys, objects = _keys(way, number), _objects(made, number)
        seconds = timed(lambda: made.put(keys, objects, time.monotonic() + 60), Outcome.DONE)  # noqa: B023
        best = max(best, OBJECTS * OBJECT / seconds / GB)
    return best


def _get(made: DeviceStore, way: str) -> float:
    best, offset, keys = 0.0, np.arange(LAYERS, dtype=np.int64) * PAGE, _keys(way, 1)
    for number in range(ROUNDS):
        wanted = [Slices(offset, o.address, o.length) for o in _objects(made, number)]
        seconds = timed(lambda: made.get(keys, wanted, time.monotonic() + 60), Outcome.DONE)  # noqa: B023
        best = max(best, OBJECTS * OBJECT / seconds / GB)
    return best


if __name__ == "__main__":
    main()
