"""The eviction policy: what it learns from requests, and what it holds worth keeping."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.eviction import (
    Trace,
    read_trace,
    replay_lru,
    replay_optimum,
    replay_store,
    synthetic_trace,
)
from kvferry.errors import DescriptionError
from kvferry.pool.embedded.index import hash_keys
from kvferry.pool.embedded.policy import LEARNED_FLOATS, ConversationPolicy, History
from kvferry.pool.embedded.store import EmbeddedStore
from pool_peers import tiers_of


def make(rows: int = 1000) -> tuple[ConversationPolicy, History]:
    history = History(
        *(np.zeros(rows) for _ in range(2)),
        *(np.zeros(rows, dtype=np.uint16) for _ in range(4)),
        np.zeros(rows, dtype=np.uint8),
    )
    policy = ConversationPolicy(history, np.zeros(LEARNED_FLOATS))
    policy.reset()
    return policy, history


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def test_turns_are_recognised() -> None:
    policy, history = make()
    policy.observe(np.arange(5), np.zeros(5, dtype=bool), 0.0)
    assert set(history.turns[:5]) == {1} and list(history.depth[:5]) == [0, 1, 2, 3, 4]
    # the next turn replaces the last, part-filled block and adds two
    chain = rows(0, 1, 2, 3, 10, 11)
    policy.observe(chain, np.array([True] * 4 + [False] * 2), 60.0)
    assert set(history.turns[chain]) == {2}
    assert history.turns[4] == 1  # not part of it any more
    # another conversation that begins alike is no next turn
    other = rows(0, 1, 20, 21)
    policy.observe(other, np.array([True, True, False, False]), 61.0)
    assert set(history.turns[other]) == {1}
    assert list(history.shared[[0, 1, 2]]) == [1, 1, 0]


def test_what_goes_first() -> None:
    policy, _ = make()
    policy.observe(np.arange(4), np.zeros(4, dtype=bool), 0.0)
    scores = policy.scores(np.arange(3), 5.0)
    assert scores[0] > scores[1] > scores[2]  # the end before the beginning
    long_talk, short_talk = np.arange(100, 108), np.arange(200, 208)
    for turn in range(6):
        policy.observe(long_talk, np.full(8, turn > 0), 60.0 * turn)
    policy.observe(short_talk, np.zeros(8, dtype=bool), 300.0)
    late = 330.0
    assert policy.scores(rows(103), late)[0] > policy.scores(rows(203), late)[0]
    policy.go_last(rows(203))
    assert policy.scores(rows(203), late)[0] > policy.scores(rows(103), late)[0]


def test_unnamed_objects_age_like_lru() -> None:
    policy, history = make()
    history.forget(np.arange(50), 0.0)
    policy.touch(np.arange(50), 0.0)
    history.last[:50] = np.arange(50) * 3.0
    scores = policy.scores(np.arange(50), 150.0)
    assert (np.diff(scores) > 0).all()


def test_the_store_replays_a_trace(tmp_path: Path) -> None:
    """Through the real index and eviction; synthetic conversations, so that this needs no data."""
    trace = synthetic_trace(600)
    lines = [
        f'{{"timestamp": {s * 1000}, "hash_ids": {b}}}'
        for s, b in zip(trace.seconds, trace.blocks, strict=True)
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    assert read_trace(tmp_path / "t.jsonl").blocks == trace.blocks
    capacity = 200
    ours, lru = replay_store(trace, capacity), replay_lru(trace, capacity)
    best = replay_optimum(trace, capacity)
    assert lru.whole < ours.whole < best.whole
    assert ours.whole > 1.15 * lru.whole
    everything = replay_store(trace, 20_000)
    assert everything == replay_lru(trace, 20_000) == replay_optimum(trace, 20_000)


def test_reference_figures() -> None:
    """Hit rates of LRU and the optimum that others found on this trace (where it is at hand)."""
    path = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
    if not path.exists():
        pytest.skip("the trace is not here")
    trace = read_trace(path)
    assert trace.total == 288_500
    assert replay_lru(trace, 1000).whole == pytest.approx(0.044, abs=1e-3)
    assert replay_lru(trace, 10_000).whole == pytest.approx(0.211, abs=1e-3)
    assert replay_optimum(trace, 1000).whole == pytest.approx(0.179, abs=1e-3)
    assert replay_optimum(trace, 3000).whole == pytest.approx(0.290, abs=1e-3)


def test_bad_traces(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"timestamp": 1}\n')
    for name in ("a", "b"):
        with pytest.raises(DescriptionError, match="hash_ids"):
            read_trace(tmp_path / name)
    assert Trace([0.0, 10.0], [[1], [2]]).half == 1


def test_ghosts_give_way(tmp_path: Path) -> None:
    """History is bounded: many more keys than records, and the newest are known."""
    store = EmbeddedStore(tmp_path, 1 << 20, slots=256)
    soon = time.monotonic() + 30
    for first in range(0, 4000, 40):
        store.access([f"k{n}" for n in range(first, first + 40)], soon)
    index = tiers_of(store).index
    known = index.find(*hash_keys([f"k{n}" for n in range(3960, 4000)])) >= 0
    assert known.mean() > 0.9
    assert store.counters()["ghosts"] <= 256
    assert not store.exists([f"k{n}" for n in range(4000)], soon).any()
    store.close()
