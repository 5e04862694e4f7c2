# SPDX-License-Identifier: Apache-2.0
"""Which object goes when room is needed: the one whose bytes are least likely to be read soon.

The conversation decides, not the block. A request names its blocks in prefix order (`observe`). If
it continues from the end of an earlier request, it is that conversation's next turn. If it shares
only a beginning, several conversations share that beginning. So a record keeps:

    turns, last   turn of the conversation that came last, and when
    depth, chain  place in that request's prefix, and how many blocks the request had
    shared, first how many conversations began here, and since when

`returns[class, age]` counts the next turns by age of the previous one and by the number of turns so
far, `starts[class]` the turns that could have had a next one. Records outlive their objects
(ghosts), so returns to evicted ones count too. These counts give, for each class and age, the best
rate of hits per second that a block is kept:

    max over t of  P(next turn within t | none so far) / E[time kept until then or t]

A shared beginning has a rate of its own, its visits over its life, fading when they stop. The
larger of both is the block's score. Among equals the deepest goes first, because without its
predecessors a block is worth nothing. The score of a chain's last block is scaled by how often last
blocks were hit. Objects that no request has named age by their last use, which is LRU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.pool.store import Bools, Ints

Floats = NDArray[np.float64]

# Seconds since the last turn: finer for ages at which most conversations return.
AGE_EDGES_S = np.array(
    [0, 10, 20, 30, 45, 60, 90, 120, 180, 240, 360, 480, 720, 960, 1440, 1920, 2880, 5760.0]
)
AGES = len(AGE_EDGES_S) - 1
MOST_CLASSES = 8
RECORD_CLASS = MOST_CLASSES  # of objects that go last
TAIL_PRIOR = 2.0
DEPTH_WEIGHT = 1e-6  # per block of depth: breaks ties only
GO_LAST_SCORE = 1e6  # above any rate of hits


@dataclass(frozen=True, slots=True)
class Tuning:
    """The policy's constants, chosen on the first half hour of a trace (benchmarks/eviction.py)."""

    turn_classes: int = 4  # conversations are told apart by turns up to here; at most MOST_CLASSES
    unseen_tail: int = 2  # blocks at a request's end that its next turn may replace
    shortest_chain: int = 3  # fewer common blocks do not make a conversation
    prior_starts: float = 80.0  # turns that the prior counts for
    prior_return_s: float = 100.0
    fade_s: float = 60.0  # added to a beginning's age, so that two visits at once prove little
    patience: float = 1.0  # mean gaps without a visit after which a shared beginning is at 1/e
    refresh_every: int = 256  # requests between two tables
    count_decay: float = 0.99  # of the counts, per refresh: a half after 18,000 requests
    tail_decay: float = 0.9  # of the counts about last blocks, per refresh


LEARNED_FLOATS = MOST_CLASSES * AGES + MOST_CLASSES + 4


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

    def __init__(self, history: History, learned: Floats, tuning: Tuning | None = None) -> None:
        cells = MOST_CLASSES * AGES
        self.tuning = tuning or Tuning()
        self.history = history
        self._returns = learned[:cells].reshape(MOST_CLASSES, AGES)
        self._starts = learned[cells : cells + MOST_CLASSES]
        self._rest = learned[cells + MOST_CLASSES : LEARNED_FLOATS]  # tail hits, tails, requests
        self._table: Floats | None = None
        self._table_of = -1.0

    def reset(self) -> None:
        """Set the prior, before the first request of a new store."""
        t = self.tuning
        kind = np.arange(MOST_CLASSES)[:, None]
        density = np.exp(-AGE_EDGES_S[:-1] / t.prior_return_s) * np.diff(AGE_EDGES_S)
        chance = np.minimum(0.8, 0.25 + 0.1 * kind)
        self._returns[:] = t.prior_starts * chance * density / t.prior_return_s
        self._starts[:] = t.prior_starts
        self._rest[:] = (TAIL_PRIOR, TAIL_PRIOR, 0.0, 0.0)

    def observe(self, rows: Ints, known: Bools, now: float) -> None:
        """One request: the records of its blocks in prefix order, and which of them are old."""
        count = len(rows)
        if count == 0:
            return
        h, t = self.history, self.tuning
        matched = count if bool(known.all()) else int(np.argmin(known))
        turn, goes_on = 1, False
        if matched >= t.shortest_chain:
            parent = int(rows[matched - 1])
            before = int(h.chain[parent])
            if 0 <= before - matched <= t.unseen_tail:
                goes_on = True
                turn = min(int(h.turns[parent]) + 1, 0xFFFF)
                age = max(0.0, now - float(h.last[parent]))
                cell = min(AGES, int(np.searchsorted(AGE_EDGES_S, age, side="right"))) - 1
                self._returns[min(int(h.klass[parent]), MOST_CLASSES - 1), cell] += 1
                self._rest[0] += before == matched
                self._rest[1] += 1
        if not goes_on:
            head = rows[:matched]
            h.shared[head] = np.minimum(h.shared[head], 0xFFFE) + 1
        fresh = rows[~known]
        h.first[fresh] = now
        h.shared[fresh] = 0
        klass = min(turn, t.turn_classes) - 1
        self._starts[klass] += 1
        h.last[rows] = now
        h.turns[rows] = turn
        h.depth[rows] = np.minimum(np.arange(count), 0xFFFF)
        h.chain[rows] = min(count, 0xFFFF)
        h.klass[rows] = klass
        self._rest[2] += 1
        if self._rest[2] % t.refresh_every == 0:
            self._rest[:2] *= t.tail_decay
            self._returns *= t.count_decay
            self._starts *= t.count_decay

    def touch(self, rows: Ints, now: float) -> None:
        """Note that these were read outside of any observed request."""
        self.history.last[rows] = now

    def go_last(self, rows: Ints) -> None:
        """Small records that everything else needs: evicted after all other objects."""
        self.history.klass[rows] = RECORD_CLASS

    def scores(self, rows: Ints, now: float) -> Floats:
        """Objects with a lower score go first."""
        h = self.history
        table = self._rates()
        age = np.maximum(now - h.last[rows], 0.0)
        cells = np.searchsorted(AGE_EDGES_S, age, side="right") - 1
        depth, chain = h.depth[rows].astype(np.int64), h.chain[rows].astype(np.int64)
        score = table[np.minimum(h.klass[rows], RECORD_CLASS), cells]
        last_block = (chain > 0) & (depth == chain - 1)
        score = np.where(last_block, score * min(self._last_block_hit(), 1.0), score)
        score = np.maximum(score, self._shared_rate(rows, age, now))
        # Older first among objects of one class and age, deeper first among those of one request.
        return np.asarray(score * (1.0 - DEPTH_WEIGHT * np.minimum(depth, 1000)) - 1e-12 * age)

    def _shared_rate(self, rows: Ints, age: Floats, now: float) -> Floats:
        """Visits a second of beginnings that several conversations share."""
        h, t = self.history, self.tuning
        visits = h.shared[rows].astype(np.float64)
        rate = visits / (np.maximum(now - h.first[rows], 0.0) + t.fade_s)
        return np.asarray(rate * np.exp(-age * rate / t.patience))

    def _rates(self) -> Floats:
        seen = float(self._rest[2]) // self.tuning.refresh_every
        if self._table is None or seen != self._table_of:
            self._table, self._table_of = _rates(self._returns, self._starts), seen
        return self._table

    def learned(self) -> dict[str, float]:
        """The chance of another turn after one, and after many."""
        chance = np.minimum(self._returns.sum(axis=1) / np.maximum(self._starts, 1e-9), 1.0)
        return {
            "requests": float(self._rest[2]),
            "return_after_one_turn": round(float(chance[0]), 3),
            "return_after_many_turns": round(float(chance[self.tuning.turn_classes - 1]), 3),
            "last_block_hit": round(self._last_block_hit(), 3),
        }

    def _last_block_hit(self) -> float:
        """Of the turns that went on, the share that hit the last block of the turn before."""
        return float(self._rest[0] / max(self._rest[1], 1e-9))


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
    table[RECORD_CLASS] = GO_LAST_SCORE
    return table
