"""The embedded store's admission and eviction as a model: the same policy, no index and no memory.

What takes time in a replay through the store is all that a real store does beside deciding. Here a
block is a row of the policy's history, and whether it is kept is one boolean. The rules are those
of `embedded_room`: newcomers take free room, the most valuable first; the next displaces the least
valuable block that is kept, if that is worth less, else it is declined; where many are kept,
victims are taken in batches, and who is worth less than the last victim is declined for a while.
"""

from __future__ import annotations

import numpy as np

from kvferry.bench.pool_trace import Rates, Trace, rates_of
from kvferry.pool.embedded_open import MakePolicy
from kvferry.pool.embedded_room import BAR_SECONDS, BATCH_SHARE, FEW_OBJECTS
from kvferry.pool.policy import LEARNED_FLOATS, ConversationPolicy, History, Ints


class _Kept:
    """Which rows are kept."""

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


def replay_rules(
    trace: Trace, capacity: int, make_policy: MakePolicy = ConversationPolicy
) -> Rates:
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
    policy = make_policy(history, np.zeros(LEARNED_FLOATS))
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
