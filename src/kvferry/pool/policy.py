"""Which object goes when room is needed: the one whose bytes are least likely to be read soon.

What decides is the conversation, not the block. A request names its blocks in prefix order
(`observe`). Where it goes on from the end of an earlier request, it is that conversation's next
turn; where it shares only a beginning, the beginning is shared by several. So a record keeps:

    turns, last   turn of the conversation that came last, and when
    depth, chain  place in that request's prefix, and how many blocks the request had
    shared, first how many conversations began here, and since when

The return of conversations is learned as it is seen: `returns[class, age]` counts the next turns
by age of the previous one and by the number of turns so far, `starts[class]` the turns that could
have had a next one. Records outlive their objects (ghosts), so returns to evicted ones count too.
From these counts comes, for each class and age, the best rate of hits for the time that a block
would have to be kept:

    max over t of  P(next turn within t | none so far) / E[time kept until then or t]

which looks past the pause in which nobody has typed an answer yet. A shared beginning has a rate of
its own, its visits over its life, fading when they stop. The larger of both is the block's score.
Among equals the deepest goes first, because without its predecessors a block is worth nothing; the
last block of a chain counts as much as last blocks were seen to be hit. Objects that no request has
named have one turn and age by their last use, which is LRU.

All state lies in arrays that the caller owns (shared memory), and all of this is NumPy over rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Seconds since the last turn. Fine where conversations return (a median of two minutes).
AGE_EDGES_S = np.array(
    [0, 10, 20, 30, 45, 60, 90, 120, 180, 240, 360, 480, 720, 960, 1440, 1920, 2880, 5760.0]
)
AGES = len(AGE_EDGES_S) - 1
TURN_CLASSES = 8  # one to seven turns so far, eight and more
RECORD_CLASS = TURN_CLASSES  # small records that everything else needs; they go last
UNSEEN_TAIL = 1  # blocks at a request's end that its next turn may replace: the part-filled one
SHORTEST_CHAIN = 2  # one common block alone does not make a conversation

PRIOR_STARTS = 20.0  # turns that the prior counts for: it is gone within a minute of traffic
PRIOR_RETURN_S = 200.0
PRIOR_FADE_S = 60.0  # added to a shared life, so that two visits at once prove little
SHARED_PATIENCE = 4.0  # mean gaps without a visit after which a shared beginning has faded to 1/e
TAIL_PRIOR = 2.0
REFRESH_EVERY = 256  # requests between two tables
TAIL_DECAY = 0.9  # per refresh
COUNT_DECAY = 0.999  # per refresh: half of a count is gone after 180,000 requests
DEPTH_WEIGHT = 1e-6  # per block of depth: breaks ties only
PINNED_SCORE = 1e6

LEARNED_FLOATS = TURN_CLASSES * AGES + TURN_CLASSES + 4


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """One entry per record."""

    last: Floats
    first: Floats
    turns: NDArray[np.uint16]
    depth: NDArray[np.uint16]
    chain: NDArray[np.uint16]
    shared: NDArray[np.uint16]
    klass: NDArray[np.uint8]

    def forget(self, rows: Ints, now: float) -> None:
        """Records that begin anew."""
        self.last[rows] = now
        self.first[rows] = now
        for field in (self.turns, self.depth, self.chain, self.shared, self.klass):
            field[rows] = 0


class ConversationPolicy:
    """Scores of records, learned from the requests of all processes that share `learned`."""

    name = "conversations"

    def __init__(self, history: History, learned: Floats) -> None:
        cells = TURN_CLASSES * AGES
        self._history = history
        self._returns = learned[:cells].reshape(TURN_CLASSES, AGES)
        self._starts = learned[cells : cells + TURN_CLASSES]
        self._rest = learned[cells + TURN_CLASSES : LEARNED_FLOATS]  # tail hits, tails, requests
        self._table: Floats | None = None
        self._table_of = -1.0

    def reset(self) -> None:
        """Before the first request of a new store: the prior."""
        kind = np.arange(TURN_CLASSES)[:, None]
        density = np.exp(-AGE_EDGES_S[:-1] / PRIOR_RETURN_S) * np.diff(AGE_EDGES_S) / PRIOR_RETURN_S
        self._returns[:] = PRIOR_STARTS * np.minimum(0.8, 0.25 + 0.1 * kind) * density
        self._starts[:] = PRIOR_STARTS
        self._rest[:] = (TAIL_PRIOR, TAIL_PRIOR, 0.0, 0.0)

    def observe(self, rows: Ints, known: Bools, now: float) -> None:
        """One request: the records of its blocks in prefix order, and which of them are old."""
        count = len(rows)
        if count == 0:
            return
        h = self._history
        matched = count if bool(known.all()) else int(np.argmin(known))
        turn, goes_on = 1, False
        if matched >= SHORTEST_CHAIN:
            parent = int(rows[matched - 1])
            before = int(h.chain[parent])
            if 0 <= before - matched <= UNSEEN_TAIL:
                goes_on = True
                turn = min(int(h.turns[parent]) + 1, 0xFFFF)
                age = max(0.0, now - float(h.last[parent]))
                cell = min(AGES, int(np.searchsorted(AGE_EDGES_S, age, side="right"))) - 1
                self._returns[min(int(h.klass[parent]), TURN_CLASSES - 1), cell] += 1
                self._rest[0] += before == matched
                self._rest[1] += 1
        if not goes_on:
            head = rows[:matched]
            h.shared[head] = np.minimum(h.shared[head], 0xFFFE) + 1
        fresh = rows[~known]
        h.first[fresh] = now
        h.shared[fresh] = 0
        klass = min(turn, TURN_CLASSES) - 1
        self._starts[klass] += 1
        h.last[rows] = now
        h.turns[rows] = turn
        h.depth[rows] = np.minimum(np.arange(count), 0xFFFF)
        h.chain[rows] = min(count, 0xFFFF)
        h.klass[rows] = klass
        self._rest[2] += 1
        if self._rest[2] % REFRESH_EVERY == 0:
            self._rest[:2] *= TAIL_DECAY
            self._returns *= COUNT_DECAY
            self._starts *= COUNT_DECAY

    def touch(self, rows: Ints, now: float) -> None:
        """Read, or put again, outside of any request that was told."""
        self._history.last[rows] = now

    def pin(self, rows: Ints) -> None:
        self._history.klass[rows] = RECORD_CLASS

    def scores(self, rows: Ints, now: float) -> Floats:
        """The higher, the longer to be kept."""
        h = self._history
        table = self._rates()
        age = np.maximum(now - h.last[rows], 0.0)
        cells = np.searchsorted(AGE_EDGES_S, age, side="right") - 1
        depth, chain = h.depth[rows].astype(np.int64), h.chain[rows].astype(np.int64)
        score = table[np.minimum(h.klass[rows], RECORD_CLASS), cells]
        tails = float(self._rest[0] / max(self._rest[1], 1e-9))
        score = np.where((chain > 0) & (depth == chain - 1), score * min(tails, 1.0), score)
        visits = h.shared[rows].astype(np.float64)
        rate = visits / (np.maximum(now - h.first[rows], 0.0) + PRIOR_FADE_S)
        score = np.maximum(score, rate * np.exp(-age * rate / SHARED_PATIENCE))
        # Older first among objects of one class and age, deeper first among those of one request.
        return np.asarray(score * (1.0 - DEPTH_WEIGHT * np.minimum(depth, 1000)) - 1e-12 * age)

    def _rates(self) -> Floats:
        seen = float(self._rest[2]) // REFRESH_EVERY
        if self._table is None or seen != self._table_of:
            self._table, self._table_of = _rates(self._returns, self._starts), seen
        return self._table

    def learned(self) -> dict[str, float]:
        """For people: the chance of another turn after one, and after many."""
        chance = np.minimum(self._returns.sum(axis=1) / np.maximum(self._starts, 1e-9), 1.0)
        return {
            "requests": float(self._rest[2]),
            "return_after_one_turn": round(float(chance[0]), 3),
            "return_after_many_turns": round(float(chance[-1]), 3),
            "last_block_hit": round(float(self._rest[0] / max(self._rest[1], 1e-9)), 3),
        }


def _rates(returns: Floats, starts: Floats) -> Floats:
    """By class and age: the best rate of hits per second of keeping (module docstring)."""
    width = np.diff(AGE_EDGES_S)
    share = returns / np.maximum(starts, 1e-9)[:, None]
    share = share * np.minimum(1.0, 0.98 / np.maximum(share.sum(axis=1), 1e-9))[:, None]
    left = 1.0 - np.cumsum(share, axis=1)
    before = np.concatenate((np.ones((len(share), 1)), left[:, :-1]), axis=1)
    kept = width * (before + left) / 2
    table = np.zeros((len(share) + 1, AGES + 1))
    for age in range(AGES):
        hits, cost = np.cumsum(share[:, age:], axis=1), np.cumsum(kept[:, age:], axis=1)
        table[:-1, age] = (hits / cost).max(axis=1)
    table[RECORD_CLASS] = PINNED_SCORE
    return table
