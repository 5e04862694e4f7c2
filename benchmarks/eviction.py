# SPDX-License-Identifier: Apache-2.0
"""Traces of requests, replayed through the pool's eviction policy and others.

A trace is JSON lines with `timestamp` (milliseconds) and `hash_ids`, the request's blocks in prefix
order, equal ids for equal prefixes. A request hits the blocks of its longest prefix that is there;
the hit rate is hits over blocks of all requests. `replay_store` replays it through the embedded
store itself, with its own index and eviction. Beside it:

    lru                 the least recently used block goes
    optimum             Belady's: the block whose next use is farthest goes, or never comes in
    S3-FIFO             a queue for newcomers, one for those that were used there, and ghosts

`tune` chooses the policy's constants on the first half hour. Nothing after the first half is
replayed until the choice is made. Candidates run by the store's rules (`replay_rules`), at four
capacities. A candidate is admissible if it hits no less than LRU at any of them; of those, the one
with the highest mean ratio to LRU is best. From the first value of every row of the grid on, one
constant is moved at a time, in the grid's order, to its best value, and kept where nothing is
better by `WORTH`, until a whole sweep changes nothing. Then the choice and the policies above are
replayed over the whole trace.
"""

from __future__ import annotations

import heapq
import json
import multiprocessing
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import scratch
from kvferry.carriers.base import MemoryRegion
from kvferry.errors import DescriptionError
from kvferry.pool.embedded.arena import ALIGN
from kvferry.pool.embedded.eviction import BAR_SECONDS, BATCH_SHARE, FEW_OBJECTS
from kvferry.pool.embedded.policy import (
    LEARNED_FLOATS,
    ConversationPolicy,
    History,
    Tuning,
)
from kvferry.pool.embedded.store import EmbeddedStore
from kvferry.pool.store import Ints, Outcome, Slices

OBJECT_BYTES = 64  # a block's stand-in: with its header it takes one page of the arena
NEVER = 1 << 60
CAPACITIES = (1000, 3000, 10_000, 30_000)
WORTH = 0.002  # of the mean ratio to LRU: less is noise
SWEEPS = 4
OURS = "as it is"
GRID: dict[str, tuple[float, ...]] = {
    "turn_classes": (1, 2, 4, 8),
    "unseen_tail": (0, 1, 2),
    "shortest_chain": (1, 2, 3),
    "prior_starts": (5, 20, 80),
    "prior_return_s": (100, 200, 400),
    "fade_s": (15, 60, 240),
    "patience": (1, 2, 4, 8),
    "count_decay": (0.99, 0.999, 1.0),
}


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
    kvferry_halves: tuple[float, float]
    lru_halves: tuple[float, float]

    @property
    def over_lru(self) -> float:
        return self.kvferry / self.lru if self.lru else float("inf")


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


def prefix_hits(blocks: list[int], kept: Mapping[int, object]) -> int:
    for at, block in enumerate(blocks):
        if block not in kept:
            return at
    return len(blocks)


def replay(trace: Trace, capacity: int) -> CapacityResult:
    ours, lru = replay_store(trace, capacity), replay_lru(trace, capacity)
    best = replay_optimum(trace, capacity)
    return CapacityResult(
        blocks=capacity,
        kvferry=ours.whole,
        lru=lru.whole,
        optimum=best.whole,
        kvferry_halves=(ours.first, ours.second),
        lru_halves=(lru.first, lru.second),
    )


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


def replay_optimum(trace: Trace, capacity: int) -> Rates:
    uses: list[list[int]] = [[]] * len(trace.blocks)
    seen: dict[int, int] = {}
    for at in range(len(trace.blocks) - 1, -1, -1):
        uses[at] = [seen.get(block, NEVER) for block in trace.blocks[at]]
        seen.update(dict.fromkeys(trace.blocks[at], at))
    kept: dict[int, int] = {}  # by their next use
    heap: list[tuple[int, int]] = []
    hits = []
    for blocks, following in zip(trace.blocks, uses, strict=True):
        hits.append(prefix_hits(blocks, kept))
        for block, use in zip(blocks, following, strict=True):
            if use == NEVER:
                kept.pop(block, None)
                continue
            kept[block] = use
            heapq.heappush(heap, (-use, block))
        while len(kept) > capacity:
            use, block = heapq.heappop(heap)
            if kept.get(block) == -use:
                del kept[block]
    return rates_of(trace, hits)


def replay_store(trace: Trace, capacity: int) -> Rates:
    """The real store: its index, its policy, its eviction, objects of one page each."""
    now = [trace.seconds[0]]
    with (
        scratch() as directory,
        closing(
            EmbeddedStore(directory, capacity * ALIGN, slots=1 << 18, clock=lambda: now[0])
        ) as store,
    ):
        source = np.zeros(OBJECT_BYTES, dtype=np.uint8)
        store.register([MemoryRegion(source.ctypes.data, source.nbytes)])
        one = Slices.whole(
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


# The store's rules as a model


class _Kept:
    """Which rows of the policy's history are kept: admission and eviction without index and memory.

    The rules are those of `kvferry.pool.embedded.eviction`: newcomers take free room, the most
    valuable first; the next displaces the least valuable block that is kept, if that is worth less,
    else it is declined; where many are kept, victims are taken in batches, and a newcomer that is
    worth less than the last victim is declined for a while.
    """

    def __init__(self, policy: ConversationPolicy, rows: int, capacity: int) -> None:
        self._policy, self._capacity = policy, capacity
        self.kept = np.zeros(rows, dtype=bool)
        self._count = 0
        self._bar, self._bar_at = 0.0, -1e18

    def admit(self, new: Ints, now: float) -> None:
        scores = self._policy.scores(new, now)
        order = np.argsort(-scores, kind="stable")
        new, scores = new[order], scores[order]
        free = self._capacity - self._count
        came, new, worth = new[:free], new[free:], scores[free:]
        if len(new):
            came = np.concatenate((came, self._displace(new, worth, now)))
        self.kept[came] = True
        self._count += len(came)

    def _displace(self, new: Ints, worth: np.ndarray, now: float) -> Ints:
        """Those of `new` that got the place of others."""
        if 0 <= now - self._bar_at < BAR_SECONDS:
            new, worth = new[worth >= self._bar], worth[worth >= self._bar]
            if len(new) == 0:
                return new
        rows = np.flatnonzero(self.kept)
        scores = self._policy.scores(rows, now)
        many = len(rows) > FEW_OBJECTS
        count = min(len(rows), max(len(new), self._capacity // BATCH_SHARE if many else 0))
        lowest = np.argpartition(scores, count - 1)[:count] if count < len(rows) else slice(None)
        victims = np.arange(len(rows))[lowest]
        victims = victims[np.argsort(scores[victims], kind="stable")]
        against = np.minimum(np.arange(len(new)), len(victims) - 1)
        better = worth > scores[victims[against]]
        if not better.all():
            if many:
                self._bar, self._bar_at = float(scores[victims[0]]), now
            victims = victims[: int(better.sum())]
        self.kept[rows[victims]] = False
        self._count -= len(victims)
        return new[better]


def replay_rules(trace: Trace, capacity: int, tuning: Tuning | None = None) -> Rates:
    names, flat = np.unique(np.concatenate(trace.blocks), return_inverse=True)
    requests = np.split(flat, np.cumsum([len(blocks) for blocks in trace.blocks])[:-1])
    count = len(names)
    history = History(
        last=np.zeros(count),
        first=np.zeros(count),
        turns=np.zeros(count, dtype=np.uint16),
        depth=np.zeros(count, dtype=np.uint16),
        chain=np.zeros(count, dtype=np.uint16),
        shared=np.zeros(count, dtype=np.uint16),
        klass=np.zeros(count, dtype=np.uint8),
    )
    policy = ConversationPolicy(history, np.zeros(LEARNED_FLOATS), tuning)
    policy.reset()
    store = _Kept(policy, count, capacity)
    seen = np.zeros(count, dtype=bool)
    hits = []
    for now, rows in zip(trace.seconds, requests, strict=True):
        there = store.kept[rows]
        hits.append(len(rows) if bool(there.all()) else int(np.argmin(there)))
        policy.observe(rows, seen[rows], now)
        seen[rows] = True
        if not there.all():
            store.admit(rows[~there], now)
    return rates_of(trace, hits)


# Another policy


def replay_s3_fifo(trace: Trace, capacity: int, small_share: float = 0.1) -> Rates:
    """A small queue for newcomers, a large one for those that were used there, and ghosts."""
    small: deque[int] = deque()
    large: deque[int] = deque()
    ghosts: OrderedDict[int, None] = OrderedDict()
    kept: dict[int, int] = {}  # uses since it came, at most three
    in_small: set[int] = set()
    most_small = max(1, int(capacity * small_share))
    hits = []

    def evict() -> None:
        while small and (len(in_small) > most_small or not large):
            block = small.popleft()
            in_small.discard(block)
            if kept[block] > 0:
                kept[block] = 0
                large.append(block)
                continue
            del kept[block]
            ghosts[block] = None
            if len(ghosts) > capacity:
                ghosts.popitem(last=False)
            return
        while large:
            block = large.popleft()
            if kept[block] > 0:
                kept[block] -= 1
                large.append(block)
                continue
            del kept[block]
            return

    for blocks in trace.blocks:
        hits.append(prefix_hits(blocks, kept))
        for block in blocks:
            if block in kept:
                kept[block] = min(3, kept[block] + 1)
                continue
            while len(kept) >= capacity:
                evict()
            kept[block] = 0
            if ghosts.pop(block, 0) is None:
                large.append(block)
            else:
                small.append(block)
                in_small.add(block)
    return rates_of(trace, hits)


OTHERS: dict[str, Callable[[Trace, int], Rates]] = {"LRU": replay_lru, "S3-FIFO": replay_s3_fifo}


# The choice of constants


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replay of the first half at all capacities."""

    sweep: int
    constant: str
    value: float
    hit_rates: tuple[float, ...]
    mean_ratio: float  # to LRU
    worst_ratio: float
    taken: bool


@dataclass(frozen=True, slots=True)
class Compared:
    """A policy over the whole trace, by capacity."""

    name: str
    first: tuple[float, ...]
    second: tuple[float, ...]
    whole: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TuneResult:
    trace: str
    first_half_requests: int
    capacities: tuple[int, ...]
    lru: tuple[float, ...]  # first half
    candidates: tuple[Candidate, ...]
    chosen: dict[str, float]
    shipped: dict[str, float]
    policies: tuple[Compared, ...]


_traces: dict[str, Trace] = {}  # of a worker process: the first half, and the whole


def _begin(path: Path) -> None:
    whole = read_trace(path)
    _traces.update(whole=whole, first=whole.first_half())


def _replay(part: str, policy: str, tuning: Tuning, capacity: int) -> Rates:
    if policy in OTHERS:
        return OTHERS[policy](_traces[part], capacity)
    return replay_rules(_traces[part], capacity, tuning)


class _Search:
    def __init__(self, pool: ProcessPoolExecutor, say: Callable[[str], None]) -> None:
        self._pool, self._say = pool, say
        self._known: dict[Tuning, tuple[float, ...]] = {}
        self.tried: list[Candidate] = []
        jobs = self.submit("first", "LRU", Tuning())
        self.lru = tuple(job.result().whole for job in jobs)

    def submit(self, part: str, policy: str, tuning: Tuning) -> list[Future[Rates]]:
        """A replay at each capacity."""
        return [self._pool.submit(_replay, part, policy, tuning, c) for c in CAPACITIES]

    def evaluate(self, tunings: list[Tuning]) -> list[tuple[float, ...]]:
        jobs = {
            tuning: self.submit("first", OURS, tuning)
            for tuning in tunings
            if tuning not in self._known
        }
        for tuning, of_capacity in jobs.items():
            self._known[tuning] = tuple(job.result().whole for job in of_capacity)
        return [self._known[tuning] for tuning in tunings]

    def _worth(self, rates: tuple[float, ...]) -> tuple[float, float]:
        ratio = np.array(rates) / np.array(self.lru)
        return float(ratio.mean()), float(ratio.min())

    def move(self, current: Tuning, sweep: int, constant: str) -> Tuning:
        """The best value of one constant, the others as they are."""
        options = [_with(current, constant, value) for value in GRID[constant]]
        found = self.evaluate(options)
        (mine,) = self.evaluate([current])
        best, best_worth = current, _admissible(*self._worth(mine)) + WORTH
        for option, rates in zip(options, found, strict=True):
            worth = _admissible(*self._worth(rates))
            if worth > best_worth:
                best, best_worth = option, worth
        for option, rates in zip(options, found, strict=True):
            mean, worst = self._worth(rates)
            value = getattr(option, constant)
            one = Candidate(sweep, constant, value, rates, mean, worst, option == best)
            self.tried.append(one)
            self._say(
                f"sweep {sweep}  {constant:15}{value:>8g}  mean {mean:.4f}  worst {worst:.4f}"
                + ("  taken" if one.taken else "")
            )
        return best


def _admissible(mean: float, worst: float) -> float:
    """Candidates that lose to LRU anywhere come after all that do not."""
    return mean if worst >= 1.0 else mean - 1e3 * (1.0 - worst)


def tune(path: Path, say: Callable[[str], None]) -> TuneResult:
    trace = read_trace(path)
    context = multiprocessing.get_context("spawn")
    count = max(1, min(8, os.cpu_count() or 1))
    with ProcessPoolExecutor(count, context, _begin, (path,)) as pool:
        search = _Search(pool, say)
        tuning = Tuning(**{name: values[0] for name, values in GRID.items()})  # type: ignore[arg-type]
        for sweep in range(1, SWEEPS + 1):
            before = tuning
            for constant in GRID:
                tuning = search.move(tuning, sweep, constant)
            if tuning == before:
                break
        say("the choice is made; now the whole trace")
        jobs = {name: search.submit("whole", name, tuning) for name in (OURS, *OTHERS)}
        compared = []
        for name, of_capacity in jobs.items():
            rates = [job.result() for job in of_capacity]
            parts = ([getattr(one, part) for one in rates] for part in ("first", "second", "whole"))
            compared.append(Compared(name, *map(tuple, parts)))
    return TuneResult(
        trace=path.name,
        first_half_requests=trace.half,
        capacities=CAPACITIES,
        lru=search.lru,
        candidates=tuple(search.tried),
        chosen=asdict(tuning),
        shipped=asdict(Tuning()),
        policies=tuple(compared),
    )


def _with(tuning: Tuning, constant: str, value: float) -> Tuning:
    changed: dict[str, Any] = {constant: value}
    return replace(tuning, **changed)
