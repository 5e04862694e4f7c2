"""Traces of requests, replayed through the embedded store's own index and eviction.

A trace is JSON lines with `timestamp` (milliseconds) and `hash_ids`, the request's blocks in prefix
order, equal ids for equal prefixes. A request hits the blocks of its longest prefix that is there;
the hit rate is hits over blocks of all requests. Beside ours:

    lru                 the least recently used block goes
    optimum             Belady's: the block whose next use is farthest goes, or never comes in
    optimum_leaf_first  the same with ties (one request's blocks) resolved deepest first, which
                        is better for prefixes
"""

from __future__ import annotations

import heapq
import json
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvferry.errors import DescriptionError
from kvferry.pool.embedded import EmbeddedStore
from kvferry.pool.embedded_arena import ALIGN
from kvferry.pool.embedded_open import MakePolicy
from kvferry.pool.policy import ConversationPolicy
from kvferry.pool.store import Outcome, Ranges
from kvferry.transport.base import MemoryRegion

OBJECT_BYTES = 64  # a block's stand-in: with its header it takes one page of the arena
NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by arrival: when, and which blocks."""

    seconds: list[float]
    blocks: list[list[int]]

    @property
    def half(self) -> int:
        """Requests of the first half of the time (30 minutes of a trace of one hour)."""
        middle = (self.seconds[0] + self.seconds[-1]) / 2
        middle = 1800.0 if 3000 < self.seconds[-1] < 4000 else middle
        return int(np.searchsorted(self.seconds, middle))

    def first_half(self) -> Trace:
        return Trace(self.seconds[: self.half], self.blocks[: self.half])

    @property
    def total(self) -> int:
        return sum(map(len, self.blocks))


@dataclass(frozen=True, slots=True)
class Rates:
    """Hit rate of the first half, the second, and the whole."""

    first: float
    second: float
    whole: float


@dataclass(frozen=True, slots=True)
class CapacityResult:
    blocks: int
    kvferry: float
    lru: float
    optimum: float
    optimum_leaf_first: float
    kvferry_halves: tuple[float, float]
    lru_halves: tuple[float, float]
    optimum_halves: tuple[float, float]


def read_trace(path: Path) -> Trace:
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        rows.sort(key=lambda row: row["timestamp"])
        trace = Trace([r["timestamp"] / 1000 for r in rows], [r["hash_ids"] for r in rows])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DescriptionError(
            f"cannot read the trace {path}: {error!r}; expected JSON lines with timestamp "
            "(milliseconds) and hash_ids"
        ) from None
    if not trace.blocks:
        raise DescriptionError(f"the trace {path} has no requests")
    return trace


def synthetic_trace(requests: int = 3000, seed: int = 1) -> Trace:
    """Conversations over a common first block: turns are geometric, pauses are lognormal."""
    rng = np.random.default_rng(seed)
    ids = iter(range(1, 1 << 40))
    events: list[tuple[float, list[int]]] = []
    while len(events) < requests:
        at = float(rng.uniform(0, 3600))
        chain = [0, *(next(ids) for _ in range(int(rng.integers(2, 40))))]
        stay = float(rng.beta(1, 2))  # how likely this user is to go on
        while at < 3600:
            events.append((at, list(chain)))
            if rng.random() > stay:
                break
            at += float(rng.lognormal(4.8, 0.9))
            chain = chain[:-1] + [next(ids) for _ in range(int(rng.integers(2, 6)))]
    events.sort(key=lambda event: event[0])
    return Trace([e[0] for e in events], [e[1] for e in events])


def rates_of(trace: Trace, hits: list[int]) -> Rates:
    count = np.array([len(b) for b in trace.blocks])
    hit, half = np.array(hits), trace.half
    parts = (slice(0, half), slice(half, None), slice(None))
    return Rates(*(round(float(hit[p].sum() / max(1, count[p].sum())), 4) for p in parts))


def replay_lru(trace: Trace, capacity: int) -> Rates:
    kept: OrderedDict[int, None] = OrderedDict()
    hits = []
    for blocks in trace.blocks:
        hits.append(prefix_hits(blocks, kept))
        for block in reversed(blocks):  # the end of a prefix goes before its beginning
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > capacity:
            kept.popitem(last=False)
    return rates_of(trace, hits)


def replay_optimum(trace: Trace, capacity: int, leaf_first: bool) -> Rates:
    uses: list[list[int]] = [[]] * len(trace.blocks)
    seen: dict[int, int] = {}
    for at in range(len(trace.blocks) - 1, -1, -1):
        uses[at] = [seen.get(block, NEVER) for block in trace.blocks[at]]
        seen.update(dict.fromkeys(trace.blocks[at], at))
    kept: dict[int, tuple[int, int]] = {}
    heap: list[tuple[int, int, int]] = []
    hits = []
    for at, blocks in enumerate(trace.blocks):
        hits.append(prefix_hits(blocks, kept))
        for depth, (block, following) in enumerate(zip(blocks, uses[at], strict=True)):
            if following == NEVER:
                kept.pop(block, None)
                continue
            rank = (following, depth if leaf_first else 0)
            kept[block] = rank
            heapq.heappush(heap, (-rank[0], -rank[1], block))
        while len(kept) > capacity:
            following, depth, block = heapq.heappop(heap)
            if kept.get(block) == (-following, -depth):
                del kept[block]
    return rates_of(trace, hits)


def prefix_hits(blocks: list[int], kept: Mapping[int, object]) -> int:
    for at, block in enumerate(blocks):
        if block not in kept:
            return at
    return len(blocks)


def replay_store(
    trace: Trace, capacity: int, make_policy: MakePolicy = ConversationPolicy
) -> Rates:
    """The real store: its index, its policy, its eviction, objects of one page each."""
    now = [trace.seconds[0]]
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="kvferry-bench-", dir=base))
    store = EmbeddedStore(
        directory,
        capacity * ALIGN,
        slots=1 << 18,
        threads=1,
        clock=lambda: now[0],
        make_policy=make_policy,
    )
    try:
        source = np.zeros(OBJECT_BYTES, dtype=np.uint8)
        store.register([MemoryRegion(source.ctypes.data, source.nbytes)])
        one = Ranges(
            np.array([source.ctypes.data], dtype=np.int64),
            np.array([OBJECT_BYTES], dtype=np.int64),
        )
        hits = []
        for seconds, blocks in zip(trace.seconds, trace.blocks, strict=True):
            now[0] = seconds
            deadline = time.monotonic() + 60
            keys = [f"trace/{block}" for block in blocks]
            there = store.exists(keys, deadline)
            hits.append(len(keys) if bool(there.all()) else int(np.argmin(there)))
            store.access(keys, deadline)
            new = [key for key, old in zip(keys, there.tolist(), strict=True) if not old]
            outcomes = store.put(new, [one] * len(new), deadline)
            assert set(outcomes) <= {Outcome.DONE, Outcome.DECLINED}, outcomes
        return rates_of(trace, hits)
    finally:
        store.close()
        shutil.rmtree(directory, ignore_errors=True)


def replay(trace: Trace, capacity: int) -> CapacityResult:
    ours, lru = replay_store(trace, capacity), replay_lru(trace, capacity)
    best, leaf = (replay_optimum(trace, capacity, leaf_first=x) for x in (False, True))
    return CapacityResult(
        blocks=capacity,
        kvferry=ours.whole,
        lru=lru.whole,
        optimum=best.whole,
        optimum_leaf_first=leaf.whole,
        kvferry_halves=(ours.first, ours.second),
        lru_halves=(lru.first, lru.second),
        optimum_halves=(best.first, best.second),
    )
