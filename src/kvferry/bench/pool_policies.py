"""Policies that were tried and not taken, so that anyone can measure them again.

Variants of ours run in the real store. Those that look at single blocks run in plain Python; each
admits every block, and gives up the end of a request before its beginning where it has the choice.
"""

from __future__ import annotations

from collections import ChainMap, Counter, OrderedDict, deque
from collections.abc import Callable

import numpy as np

from kvferry.bench.pool_trace import Rates, Trace, prefix_hits, rates_of, replay_lru
from kvferry.pool.policy import MOST_CLASSES, ConversationPolicy, Floats, Ints

LONG_REQUEST_BLOCKS = 16


class NoShared(ConversationPolicy):
    """Beginnings that conversations share are worth what their last conversation is."""

    name = "no rate for shared beginnings"

    def shared_rate(self, rows: Ints, age: Floats, now: float) -> Floats:
        return np.zeros(len(rows))


class SlowFade(ConversationPolicy):
    """Shared beginnings fade with the inverse of their age."""

    name = "shared beginnings fade hyperbolically"

    def shared_rate(self, rows: Ints, age: Floats, now: float) -> Floats:
        h, t = self.history, self.tuning
        visits = h.shared[rows].astype(np.float64)
        rate = visits / (np.maximum(now - h.first[rows], 0.0) + t.fade_s)
        return np.asarray(rate / (1 + age * rate / t.patience))


class ByLength(ConversationPolicy):
    """Half as many classes by turns, each for short and for long requests."""

    name = "classes by length as well"

    def class_of(self, turn: int, blocks: int) -> int:
        half = max(1, min(self.tuning.turn_classes, MOST_CLASSES) // 2)
        return min(turn, half) - 1 + half * (blocks >= LONG_REQUEST_BLOCKS)


VARIANTS: tuple[type[ConversationPolicy], ...] = (
    ConversationPolicy,
    NoShared,
    SlowFade,
    ByLength,
)


def replay_lfu(trace: Trace, capacity: int) -> Rates:
    """The block that was used least often goes, the older one of equals."""
    kept: dict[int, int] = {}
    uses: Counter[int] = Counter()
    levels: dict[int, OrderedDict[int, None]] = {}
    hits = []
    for blocks in trace.blocks:
        hits.append(prefix_hits(blocks, kept))
        for block in reversed(blocks):
            uses[block] += 1
            if block in kept:
                del levels[kept[block]][block]
            elif len(kept) >= capacity:
                level = min(n for n, some in levels.items() if some)
                victim, _ = levels[level].popitem(last=False)
                del kept[victim]
            kept[block] = uses[block]
            levels.setdefault(uses[block], OrderedDict())[block] = None
    return rates_of(trace, hits)


def replay_segmented(trace: Trace, capacity: int, protected_share: float = 0.8) -> Rates:
    """LRU in two segments: what is hit again is protected."""
    probation: OrderedDict[int, None] = OrderedDict()
    protected: OrderedDict[int, None] = OrderedDict()
    both: ChainMap[int, None] = ChainMap(protected, probation)
    most = int(capacity * protected_share)
    hits = []
    for blocks in trace.blocks:
        hits.append(prefix_hits(blocks, both))
        for block in reversed(blocks):
            if block in protected:
                protected.move_to_end(block)
            elif block in probation:
                del probation[block]
                protected[block] = None
                if len(protected) > most:
                    probation[protected.popitem(last=False)[0]] = None
            else:
                probation[block] = None
            while len(probation) + len(protected) > capacity:
                (probation or protected).popitem(last=False)
    return rates_of(trace, hits)


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


BY_BLOCK: dict[str, Callable[[Trace, int], Rates]] = {
    "LRU": replay_lru,
    "LFU": replay_lfu,
    "segmented LRU": replay_segmented,
    "S3-FIFO": replay_s3_fifo,
}
