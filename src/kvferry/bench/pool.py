"""`kvferry bench pool`: hit rates on a trace, lookups, and bandwidth beside what is there anyway.

One run, on one machine, all contenders taking turns in rounds, the best round of each: on a shared
machine that is what compares. Objects are `OBJECT_BYTES` long and made of ranges that lie scattered
in a buffer larger than the caches; saving gathers them, loading scatters them.

    memcpy          one memmove per range, over the same scatter, from one buffer to the other
    embedded        the embedded store, memory tier: checksums verified on every load
    embedded disk   its disk tier: objects come up from files (the page cache is warm)
    file            plain files, written and read whole by one call per object, no checksum
    lmdb            the same bytes in LMDB, gathered and scattered by the same code
    mooncake        Mooncake Store through our `Store`
    mooncake direct its client with the same lists
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.bench.pool_trace import CapacityResult, Trace, read_trace, replay, synthetic_trace
from kvferry.pool import embedded_index as ix
from kvferry.pool.embedded import EmbeddedStore
from kvferry.pool.embedded_copy import move
from kvferry.pool.store import Outcome, Ranges, Slices, Store
from kvferry.transport.base import MemoryRegion

CAPACITIES = (500, 1000, 3000, 10_000, 30_000, 100_000)
QUICK_CAPACITIES = (1000, 3000)
INDEXED = 1_000_000
LOOKUP_KEYS = 256  # keys of one question: a prompt of a few thousand tokens on a few ranks
LOOKUPS = 2000
OBJECT_BYTES = 1 << 20
RANGE_BYTES = 64 << 10
BATCH_OBJECTS = 64
BUFFER_BYTES = 128 << 20
GB = 1e9


@dataclass(frozen=True, slots=True)
class Lookup:
    store: str
    indexed: int
    keys_per_lookup: int
    per_second: float  # keys
    p50_us: float  # of one lookup
    p99_us: float


@dataclass(frozen=True, slots=True)
class Bandwidth:
    store: str
    op: str  # save or load
    gb_s: float
    of_memcpy: float


@dataclass(frozen=True, slots=True)
class PoolBench:
    trace: str
    requests: int
    hit_rates: tuple[CapacityResult, ...]
    lookup: Lookup
    lookup_beside: tuple[Lookup, ...]
    bandwidth: tuple[Bandwidth, ...]
    notes: tuple[str, ...]


def run(trace_path: Path | None, say: Callable[[str], None], *, quick: bool = False) -> PoolBench:
    notes: list[str] = []
    if trace_path is None:
        trace: Trace = synthetic_trace(800 if quick else 3000)
        notes.append("no trace was given: hit rates are of synthetic conversations")
    else:
        trace = read_trace(trace_path)
    rates = []
    for capacity in QUICK_CAPACITIES if quick else CAPACITIES:
        say(f"replaying {len(trace.blocks):,} requests with room for {capacity:,} blocks")
        rates.append(replay(trace, capacity))
    indexed = INDEXED // 10 if quick else INDEXED
    say(f"lookups among {indexed:,} objects")
    lookup, beside = lookups(indexed)
    say("bandwidth")
    bandwidth = tuple(bandwidths(3 if quick else 12, notes))
    return PoolBench(
        trace=trace_path.name if trace_path else "synthetic",
        requests=len(trace.blocks),
        hit_rates=tuple(rates),
        lookup=lookup,
        lookup_beside=tuple(beside),
        bandwidth=bandwidth,
        notes=tuple(notes),
    )


@contextlib.contextmanager
def scratch(in_memory: bool = True) -> Iterator[Path]:
    base = "/dev/shm" if in_memory and Path("/dev/shm").is_dir() else None
    path = Path(tempfile.mkdtemp(prefix="kvferry-bench-", dir=base))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


# --- lookups -----------------------------------------------------------------------------------


def lookups(indexed: int) -> tuple[Lookup, list[Lookup]]:
    """Questions of which half the keys exist, in random order."""
    keys = [f"tenant/model/full/{n:032x}/layout/0" for n in range(indexed)]
    rng = np.random.default_rng(1)
    asked = []
    for _ in range(LOOKUPS):
        old = rng.integers(0, indexed, LOOKUP_KEYS // 2).tolist()
        asked.append([keys[n] for n in old] + [f"{keys[n]}x" for n in old])
    with scratch() as directory:
        slots = 1 << (2 * indexed - 1).bit_length()
        store = EmbeddedStore(directory, 1 << 20, slots=slots, threads=1)
        index = store._room.index
        for first in range(0, indexed, 50_000):  # records alone: a lookup touches nothing else
            low, high = ix.hash_keys(keys[first : first + 50_000])
            rows = index.claim(low, high, 0.0)
            index.state[rows[rows >= 0]] = ix.MEMORY
        deadline = time.monotonic() + 600

        def ask(batch: list[str]) -> int:
            return int(store.exists(batch, deadline).sum())

        ours = _time_lookups("embedded", indexed, asked, ask)
        index.state[:] = ix.FREE
        store.close()
    return ours, [found for found in [_lmdb_lookups(keys, asked)] if found]


def _time_lookups(
    name: str, indexed: int, asked: list[list[str]], ask: Callable[[list[str]], int]
) -> Lookup:
    for batch in asked[:50]:
        ask(batch)
    took = []
    for batch in asked:
        begin = time.perf_counter()
        found = ask(batch)
        took.append(time.perf_counter() - begin)
        assert found >= len(batch) // 2 * 0.999
    p50, p99 = np.percentile(np.array(took) * 1e6, [50, 99]).tolist()
    total = len(asked) * LOOKUP_KEYS
    return Lookup(name, indexed, LOOKUP_KEYS, total / sum(took), p50, p99)


def _lmdb_lookups(keys: list[str], asked: list[list[str]]) -> Lookup | None:
    try:
        lmdb: Any = importlib.import_module("lmdb")
    except ImportError:
        return None
    with scratch() as directory:
        env = lmdb.open(str(directory), map_size=4 << 30, sync=False, writemap=True, map_async=True)
        with env.begin(write=True) as writing:
            for key in keys:
                writing.put(key.encode(), b"12345678", append=True)

        def ask(batch: list[str]) -> int:
            with env.begin(buffers=True) as reading:
                return sum(reading.get(key.encode()) is not None for key in batch)

        try:
            return _time_lookups("lmdb", len(keys), asked, ask)
        finally:
            env.close()


# --- bandwidth ---------------------------------------------------------------------------------


class _Scatter:
    """Objects as scattered ranges of one buffer, and where they go in another."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.source = rng.integers(0, 256, BUFFER_BYTES, dtype=np.uint8)
        self.landing = np.zeros(BUFFER_BYTES, dtype=np.uint8)
        per = OBJECT_BYTES // RANGE_BYTES
        shape = (BATCH_OBJECTS, per)
        slots = BUFFER_BYTES // RANGE_BYTES

        def places(base: int) -> NDArray[np.int64]:
            chosen = rng.permutation(slots)[: BATCH_OBJECTS * per].astype(np.int64)
            return chosen.reshape(shape) * RANGE_BYTES + base

        self.src = places(int(self.source.ctypes.data))
        self.dst = places(int(self.landing.ctypes.data))
        self.length = np.full(per, RANGE_BYTES, dtype=np.int64)
        self.offset = np.arange(per, dtype=np.int64) * RANGE_BYTES
        self.ranges = [Ranges(a, self.length) for a in self.src]
        self.slices = [Slices(self.offset, a, self.length) for a in self.dst]
        self.regions = [
            MemoryRegion(int(b.ctypes.data), b.nbytes) for b in (self.source, self.landing)
        ]
        self.bytes = BATCH_OBJECTS * OBJECT_BYTES

    def memcpy(self) -> None:
        memmove = ctypes.memmove
        for a, b in zip(self.src.ravel().tolist(), self.dst.ravel().tolist(), strict=True):
            memmove(b, a, RANGE_BYTES)

    def right(self) -> bool:
        """Whether what lies in the landing is what was saved."""
        src = self.src - self.source.ctypes.data
        dst = self.dst - self.landing.ctypes.data
        return all(
            np.array_equal(self.source[a : a + RANGE_BYTES], self.landing[b : b + RANGE_BYTES])
            for a, b in zip(src.ravel().tolist(), dst.ravel().tolist(), strict=True)
        )


def bandwidths(rounds: int, notes: list[str]) -> Iterator[Bandwidth]:
    scatter = _Scatter()
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(scratch())
        disk = stack.enter_context(scratch(in_memory=False))
        contenders: dict[tuple[str, str], Callable[[], float]] = {
            ("memcpy", "load"): lambda: _seconds(scatter.memcpy),
            **_embedded(stack, memory / "embedded", scatter),
            **_embedded_disk(stack, memory / "tiers", disk / "tiers", scatter),
            **_files(disk / "files", scatter),
            **_lmdb(stack, memory / "lmdb", scatter),
            **_mooncake(stack, scatter, notes),
        }
        best: dict[tuple[str, str], float] = {}
        for attempt in range(rounds):
            for name, task in contenders.items():
                scatter.landing[:: 1 << 12] = 0
                took = task()
                if attempt == 0 and name[1] == "load" and not scatter.right():
                    raise AssertionError(f"{name} loaded other bytes than were saved")
                best[name] = min(best.get(name, took), took)
    memcpy = best["memcpy", "load"]
    for (store, op), took in best.items():
        yield Bandwidth(store, op, scatter.bytes / took / GB, memcpy / took)


def _seconds(task: Callable[[], object]) -> float:
    begin = time.perf_counter()
    task()
    return time.perf_counter() - begin


def _of_store(
    name: str, store: Store, scatter: _Scatter
) -> dict[tuple[str, str], Callable[[], float]]:
    """Save fresh objects each time, load them."""
    store.register(scatter.regions)
    names = [f"bench/{n}" for n in range(BATCH_OBJECTS)]

    def later() -> float:
        return time.monotonic() + 60

    def save() -> float:
        store.remove(names, later())
        begin = time.perf_counter()
        outcomes = store.put(names, scatter.ranges, later())
        took = time.perf_counter() - begin
        assert set(outcomes) == {Outcome.DONE}, outcomes
        return took

    def load() -> float:
        begin = time.perf_counter()
        outcomes = store.get(names, scatter.slices, later())
        took = time.perf_counter() - begin
        assert set(outcomes) == {Outcome.DONE}, outcomes
        return took

    return {(name, "save"): save, (name, "load"): load}


def _embedded(
    stack: contextlib.ExitStack, directory: Path, scatter: _Scatter
) -> dict[tuple[str, str], Callable[[], float]]:
    store = EmbeddedStore(directory, 4 * scatter.bytes)
    stack.callback(store.close)
    return _of_store("embedded", store, scatter)


def _embedded_disk(
    stack: contextlib.ExitStack, directory: Path, disk: Path, scatter: _Scatter
) -> dict[tuple[str, str], Callable[[], float]]:
    """A memory tier for a quarter of the objects: most loads come from files."""
    store = EmbeddedStore(directory, scatter.bytes // 4, disk, 4 * scatter.bytes)
    stack.callback(store.close)
    return _of_store("embedded disk", store, scatter)


def _files(directory: Path, scatter: _Scatter) -> dict[tuple[str, str], Callable[[], float]]:
    directory.mkdir()
    staging = np.zeros(OBJECT_BYTES, dtype=np.uint8)
    at = int(staging.ctypes.data) + scatter.offset
    paths = [directory / str(n) for n in range(BATCH_OBJECTS)]

    def save() -> None:
        for path, src in zip(paths, scatter.src, strict=True):
            move(src, at, scatter.length)
            with path.open("wb", buffering=0) as file:
                file.write(staging.data)

    def load() -> None:
        for path, dst in zip(paths, scatter.dst, strict=True):
            with path.open("rb", buffering=0) as file:
                os.preadv(file.fileno(), [staging.data], 0)
            move(at, dst, scatter.length)

    return {("file", "save"): lambda: _seconds(save), ("file", "load"): lambda: _seconds(load)}


def _lmdb(
    stack: contextlib.ExitStack, directory: Path, scatter: _Scatter
) -> dict[tuple[str, str], Callable[[], float]]:
    try:
        lmdb: Any = importlib.import_module("lmdb")
    except ImportError:
        return {}
    directory.mkdir()
    env = lmdb.open(str(directory), map_size=1 << 30, sync=False, writemap=True, map_async=True)
    stack.callback(env.close)
    staging = np.zeros(OBJECT_BYTES, dtype=np.uint8)
    at = int(staging.ctypes.data) + scatter.offset

    def save() -> None:
        with env.begin(write=True) as writing:
            for n, src in enumerate(scatter.src):
                move(src, at, scatter.length)
                writing.put(b"bench/%d" % n, staging.data)

    def load() -> None:
        with env.begin(buffers=True) as reading:
            for n, dst in enumerate(scatter.dst):
                value = np.frombuffer(reading.get(b"bench/%d" % n), dtype=np.uint8)
                move(int(value.ctypes.data) + scatter.offset, dst, scatter.length)

    return {("lmdb", "save"): lambda: _seconds(save), ("lmdb", "load"): lambda: _seconds(load)}


def _mooncake(
    stack: contextlib.ExitStack, scatter: _Scatter, notes: list[str]
) -> dict[tuple[str, str], Callable[[], float]]:
    """With a master of our own on loopback, where Mooncake is installed."""
    from kvferry.bench.pool_mooncake import master, store_of

    try:
        address = stack.enter_context(master())
        store = store_of(address, 4 * scatter.bytes)
    except Exception as error:
        notes.append(f"Mooncake was not measured: {error}")
        return {}
    stack.callback(store.close)
    ours = _of_store("mooncake", store, scatter)
    client = store._client
    names = [f"direct/{n}" for n in range(BATCH_OBJECTS)]
    lengths = [scatter.length.tolist()] * BATCH_OBJECTS

    def save() -> float:
        client.batch_remove(names, True)
        begin = time.perf_counter()
        codes = client.batch_put_from_multi_buffers(names, scatter.src.tolist(), lengths)
        took = time.perf_counter() - begin
        assert set(codes) == {0}, codes
        return took

    def load() -> float:
        begin = time.perf_counter()
        counts = client.batch_get_into_multi_buffers(names, scatter.dst.tolist(), lengths)
        took = time.perf_counter() - begin
        assert set(counts) == {OBJECT_BYTES}, counts
        return took

    return {**ours, ("mooncake direct", "save"): save, ("mooncake direct", "load"): load}
