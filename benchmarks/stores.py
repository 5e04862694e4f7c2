# SPDX-License-Identifier: Apache-2.0
"""Lookups, saves and loads of the pool's stores, beside LMDB, Mooncake's client and memcpy.

Lookups: how fast the embedded store answers while a million objects are indexed.

Bandwidth: objects are `OBJECT_BYTES` long. Their ranges lie scattered in a buffer that is larger
than the processor's caches: a save gathers them, a load scatters them. All contenders take turns in
rounds. A figure is the best round of each. A ratio is the median over many turns of two contenders,
because other programs slow both turns down alike.

    memcpy          one memmove per range, over the same scatter, from one buffer to the other
    embedded        the embedded store, memory tier: checksums verified on every load
    embedded disk   its disk tier: objects come up from files (the page cache is warm)
    lmdb            the same bytes in LMDB, gathered and scattered by the same code
    mooncake        Mooncake Store through our `Store`
    mooncake direct its client with the same lists
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.measuring import Timed, in_turns, scratch, timed
from kvferry.bench.transport import seconds_of
from kvferry.carriers.base import MemoryRegion
from kvferry.carriers.host import copy_runs
from kvferry.pool.embedded import index as ix
from kvferry.pool.embedded.store import EmbeddedStore
from kvferry.pool.mooncake import MooncakeStore
from kvferry.pool.store import Outcome, Slices, Store
from mooncake_master import Master

LOOKUP_KEYS = 256  # keys of one question: a prompt of a few thousand tokens on a few ranks
LOOKUPS = 2000
OBJECT_BYTES = 1 << 20
RANGE_BYTES = 64 << 10
BATCH_OBJECTS = 64
BUFFER_BYTES = 128 << 20
TURNS = 10  # of each pair, for every round
GB = 1e9
Contender = tuple[str, str]  # store, and save or load
# Contenders whose ratio is a target, and what each is measured against.
PAIRS: tuple[tuple[Contender, Contender], ...] = (
    (("embedded", "load"), ("memcpy", "load")),
    (("mooncake", "save"), ("mooncake direct", "save")),
    (("mooncake", "load"), ("mooncake direct", "load")),
)


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
        store = EmbeddedStore(directory, 1 << 20, slots=slots)
        index = store._tiers.index
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


def bandwidths(
    rounds: int, notes: list[str], say: Callable[[str], None] = lambda _: None
) -> tuple[list[Bandwidth], dict[Contender, float]]:
    """Rates, and the median ratio of each of `PAIRS` that was measured."""
    scatter = _Scatter()
    took: dict[Contender, list[float]] = {}
    ratios: dict[Contender, float] = {}
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(scratch())
        disk = stack.enter_context(scratch(in_memory=False))
        plenty = 4 * scatter.bytes
        embedded = EmbeddedStore(memory / "embedded", plenty)
        # A memory tier for a quarter of the objects: most loads come from files.
        tiers = EmbeddedStore(memory / "tiers", scatter.bytes // 4, disk / "tiers", plenty)
        stack.callback(embedded.close)
        stack.callback(tiers.close)
        contenders: dict[Contender, Timed] = {
            ("memcpy", "load"): lambda: seconds_of(scatter.memcpy),
            **_of_store("embedded", embedded, scatter),
            **_of_store("embedded disk", tiers, scatter),
            **_lmdb(stack, memory / "lmdb", scatter),
            **_mooncake(stack, scatter, notes),
        }
        for attempt in range(rounds):
            say(f"bandwidth, round {attempt + 1} of {rounds}")
            for name, task in contenders.items():
                scatter.landing[:: 1 << 12] = 0
                took.setdefault(name, []).append(task())
                if attempt == 0 and name[1] == "load" and not scatter.right():
                    raise AssertionError(f"{name} loaded other bytes than were saved")
        for mine, other in PAIRS:
            if mine in contenders and other in contenders:
                say(f"{' '.join(mine)} beside {other[0]}, in turns")
                _, of_turns = in_turns(contenders[mine], contenders[other], TURNS * rounds)
                ratios[mine] = float(np.median(of_turns))
    memcpy = min(took["memcpy", "load"])
    rates = [
        Bandwidth(store, op, scatter.bytes / min(times) / GB, memcpy / min(times))
        for (store, op), times in took.items()
    ]
    return rates, ratios


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
    with scratch() as directory:
        if (env := _open_lmdb(directory, 4 << 30)) is None:
            return None
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


def _open_lmdb(directory: Path, size: int) -> Any:
    """A database that need not outlive the machine, or None where LMDB is not installed."""
    try:
        lmdb: Any = importlib.import_module("lmdb")
    except ImportError:
        return None
    return lmdb.open(str(directory), map_size=size, sync=False, writemap=True, map_async=True)


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
        self.ranges = [Slices.whole(a, self.length) for a in self.src]
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


def _of_store(name: str, store: Store, scatter: _Scatter) -> dict[Contender, Timed]:
    """Save fresh objects each time, load them."""
    store.register(scatter.regions)
    names = [f"bench/{n}" for n in range(BATCH_OBJECTS)]

    def later() -> float:
        return time.monotonic() + 60

    def save() -> float:
        store.remove(names, later())
        return timed(lambda: store.put(names, scatter.ranges, later()), Outcome.DONE)

    def load() -> float:
        return timed(lambda: store.get(names, scatter.slices, later()), Outcome.DONE)

    return {(name, "save"): save, (name, "load"): load}


def _lmdb(
    stack: contextlib.ExitStack, directory: Path, scatter: _Scatter
) -> dict[Contender, Timed]:
    directory.mkdir()
    if (env := _open_lmdb(directory, 1 << 30)) is None:
        return {}
    stack.callback(env.close)
    staging = np.zeros(OBJECT_BYTES, dtype=np.uint8)
    at = int(staging.ctypes.data) + scatter.offset

    def save() -> None:
        with env.begin(write=True) as writing:
            for n, src in enumerate(scatter.src):
                copy_runs(src, at, scatter.length)
                writing.put(b"bench/%d" % n, staging.data)

    def load() -> None:
        with env.begin(buffers=True) as reading:
            for n, dst in enumerate(scatter.dst):
                value = np.frombuffer(reading.get(b"bench/%d" % n), dtype=np.uint8)
                copy_runs(int(value.ctypes.data) + scatter.offset, dst, scatter.length)

    return {("lmdb", "save"): lambda: seconds_of(save), ("lmdb", "load"): lambda: seconds_of(load)}


def _mooncake(
    stack: contextlib.ExitStack, scatter: _Scatter, notes: list[str]
) -> dict[Contender, Timed]:
    """With a master of our own on loopback, where Mooncake is installed."""
    try:
        folder = stack.enter_context(scratch())
        master = stack.enter_context(contextlib.closing(Master(folder / "master.log")))
        store = MooncakeStore(master.config(4 * scatter.bytes, 64 << 20))
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
        return timed(
            lambda: client.batch_put_from_multi_buffers(names, scatter.src.tolist(), lengths), 0
        )

    def load() -> float:
        return timed(
            lambda: client.batch_get_into_multi_buffers(names, scatter.dst.tolist(), lengths),
            OBJECT_BYTES,
        )

    return {**ours, ("mooncake direct", "save"): save, ("mooncake direct", "load"): load}
