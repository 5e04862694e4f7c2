"""How fast the embedded store answers questions with a million objects indexed, beside LMDB."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.bench.pool_scratch import scratch
from kvferry.pool import embedded_index as ix
from kvferry.pool.embedded import EmbeddedStore

LOOKUP_KEYS = 256  # keys of one question: a prompt of a few thousand tokens on a few ranks
LOOKUPS = 2000


@dataclass(frozen=True, slots=True)
class Lookup:
    store: str
    indexed: int
    keys_per_lookup: int
    per_second: float  # keys
    p50_us: float  # of one lookup
    p99_us: float


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
