"""Stores that take their time: slow to open, stuck in one call, slow to be asked; and layouts that
cannot be read. One of them never costs the others."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_pool_faults import FAST, Pair, all_ended, cases, sequence, simple

from dir_store import DirStore
from kvferry.layout import EngineShape, RankLayout
from kvferry.layout.hf import load_model
from kvferry.pool import lookup
from kvferry.pool import rank as load_module
from kvferry.pool.keys import KeyMetadata
from kvferry.pool.layout_registry import LayoutRegistry, PoolLayout, make_layout
from kvferry.pool.orders import PoolCounters
from kvferry.pool.scheduler import PoolLimits
from kvferry.verify.oracle import CaseDict


@pytest.fixture(scope="module")
def case() -> CaseDict:
    return cases(1, simple)[0]


@pytest.fixture
def pair(case: CaseDict, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(case, tmp_path, FAST)
    yield made
    made.close()


def test_a_store_that_opens_slowly(pair: Pair, monkeypatch: Any) -> None:
    """Misses while it opens, under steady lookups; hits once it is open. It is opened once."""
    monkeypatch.setattr(lookup, "STUCK_SECONDS", 0.05)
    tokens = sequence(pair.case)
    pair.engine("src").save("w", tokens)
    opened, open_now = [], threading.Event()

    def slowly() -> Any:
        opened.append(1)
        assert open_now.wait(60)
        return pair.open_store()

    reader = pair.engine("dst", open_lookups=slowly)
    for number in range(50):
        assert reader.matched(f"r{number}", [*tokens, number]) == 0
    # The first waits for its deadline. The others do not wait.
    counters = reader.scheduler.counters
    assert 1 <= counters["lookup_timeouts"] <= 2 and counters["lookup_refused"] >= 48
    open_now.set()
    more = itertools.count(50)
    reader.until(lambda: reader.matched(f"r{(n := next(more))}", [*tokens, n]) > 0)
    assert len(opened) == 1


def test_a_store_that_cannot_be_opened_is_not_tried_by_each_lookup(
    pair: Pair, monkeypatch: Any
) -> None:
    monkeypatch.setattr(lookup, "OPEN_AGAIN_SECONDS", 60.0)
    tokens = sequence(pair.case)
    tried = []

    def fails() -> Any:
        tried.append(1)
        raise OSError("nobody listens")

    reader = pair.engine("dst", open_lookups=fails)
    for number in range(20):
        assert reader.matched(f"r{number}", [*tokens, number]) == 0
    assert len(tried) == 1
    reader.scheduler._lookups._open_after = 0.0  # type: ignore[union-attr]
    assert reader.matched("later", [*tokens, 99]) == 0 and len(tried) == 2


def test_steps_that_are_slower_than_any_answer(pair: Pair, monkeypatch: Any) -> None:
    """More time between two questions than an answer may be old: it is given all the same."""
    tokens = sequence(pair.case)
    pair.engine("src").save("w", tokens)
    reader = pair.engine("dst", limits=PoolLimits(lookup_seconds=60))
    reader.until(lambda: reader.scheduler.counters["layouts_published"] > 0)
    monkeypatch.setattr(lookup, "OLDEST_ANSWER_SECONDS", 0.05)
    tracker = reader.scheduler.track("r", tuple)
    found: list[int | None] = []
    while pair.case["tokens"] not in found:
        assert len(found) < 50, found
        found.append(reader.scheduler.matched("r", tracker, tokens, 0))
        time.sleep(0.2)
    assert found[0] is None and found[1] is None, "an old answer is asked for once more"


def test_loads_that_have_not_begun_are_not_hung(pair: Pair, monkeypatch: Any) -> None:
    """One load more than there are threads, all of which hang: it fails, and holds no blocks."""
    # threads that hang are replaced after this: long after the last load's deadline
    monkeypatch.setattr(load_module, "HUNG_SECONDS", 3.0)
    tokens = sequence(pair.case)
    pair.engine("src").save("w", tokens)
    reader = pair.engine("dst", limits=PoolLimits(lookup_seconds=5, load_seconds=1.0))
    count = load_module.Pace().threads
    names = [f"r{n}" for n in range(count + 1)]
    found = {name: reader.matched(name, tokens) for name in names}
    release = threading.Event()
    entered: list[int] = []
    pair.faults["get"] = lambda *_: entered.append(1) or (release.wait(30) and None)
    for name in names[:count]:
        reader.scheduler.allocated(name, reader.tables, found[name])
    reader.step()
    reader.until(lambda: len(entered) == count * len(reader.ranks))
    late = reader.load(names[-1], found[names[-1]])
    assert all(not end.ok and not end.hung for end in late), late
    reader.until(lambda: all(len(reader.ends.get(n, ())) == len(reader.ranks) for n in names))
    assert all(end.hung for name in names[:count] for end in reader.ends[name])
    assert reader.scheduler.quarantined_blocks > 0
    pair.faults.clear()
    reader.scheduler.limits = PoolLimits()  # the machine may be busy: the next load has time
    assert reader.matched("after", tokens) == found["r0"]
    assert all(end.ok for end in reader.load("after", found["r0"])), "others wait behind the stuck"
    release.set()
    all_ended(reader)
    assert all(not rank._loader._crew.stuck for rank in reader.ranks.values())


def test_too_many_stuck_threads(pair: Pair, monkeypatch: Any) -> None:
    """Threads are not replaced without end; loads then fail by their deadlines, unhung."""
    monkeypatch.setattr(load_module, "HUNG_SECONDS", 0.05)
    monkeypatch.setattr(load_module, "MOST_LOST_THREADS", 1)
    tokens = sequence(pair.case)
    pair.engine("src").save("w", tokens)
    reader = pair.engine("dst", limits=PoolLimits(lookup_seconds=5, load_seconds=1.0))
    count = load_module.Pace().threads
    names = [f"r{n}" for n in range(count + 3)]
    found = {name: reader.matched(name, tokens) for name in names}
    release = threading.Event()
    entered: list[int] = []
    pair.faults["get"] = lambda *_: entered.append(1) or (release.wait(30) and None)
    for name in names[:count]:
        reader.scheduler.allocated(name, reader.tables, found[name])
    reader.until(
        lambda: all(len(reader.ends.get(n, ())) == len(reader.ranks) for n in names[:count])
    )
    assert all(end.hung for name in names[:count] for end in reader.ends[name])
    replaced = names[count]  # is read by the one thread that took a stuck one's place
    assert all(end.hung for end in reader.load(replaced, found[replaced]))
    assert len(entered) == (count + 1) * len(reader.ranks)
    # the thread that ends a load at its deadline may have to wait for a busy machine
    monkeypatch.setattr(load_module, "HUNG_SECONDS", 30.0)
    for name in names[count + 1 :]:
        assert all(not end.ok and not end.hung for end in reader.load(name, found[name]))
    assert len(entered) == (count + 1) * len(reader.ranks)
    release.set()
    all_ended(reader)


def test_a_process_with_a_hung_load_ends() -> None:
    """Nobody joins a thread that the store keeps."""
    code = """
import threading, time
from kvferry.workers import Threads
threads = Threads("kvferry-load", 2, most_stuck=4)
stuck = [threads.call(threading.Event().wait) for _ in range(2)]
while not all(f.running() for f in stuck): time.sleep(0.01)
assert all(map(threads.give_up, stuck))
assert threads.call(lambda: 7).result(60) == 7
"""
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)


def layout(shape: str) -> PoolLayout:
    model = load_model("llama-3.1-8b")
    parsed = EngineShape.parse(shape)
    ranks = [RankLayout.build(model, parsed, rank, 4) for rank in parsed.ranks]
    return make_layout(model, {"dtype": "x"}, ranks)


@pytest.mark.parametrize(
    ("theirs", "ours", "readable"),
    [
        ("interior=opaque:A", "interior=opaque:A,pp=2", True),
        ("interior=opaque:A,tp=2", "interior=opaque:A", False),
        ("interior=opaque:A,block=32", "interior=opaque:A", False),
        ("interior=opaque:A", "interior=opaque:B", False),
        ("interior=opaque:A", "interior=opaque", False),
        ("tp=2,block=32,order=LBNHC", "tp=1", True),
    ],
)
def test_what_cannot_be_planned_is_not_promised(
    tmp_path: Path, theirs: str, ours: str, readable: bool
) -> None:
    """A layout that no plan bridges is refused when it is met, not at each load."""
    metadata, store = KeyMetadata.of("", "m", {}), DirStore(str(tmp_path))
    writer, reader, counters = layout(theirs), layout(ours), PoolCounters()
    assert writer.id != reader.id
    LayoutRegistry(metadata, writer, PoolCounters()).refresh(store, time.monotonic() + 5)
    registry = LayoutRegistry(metadata, reader, counters)
    registry.refresh(store, time.monotonic() + 5)
    assert (writer.id in {x.id for x in registry.layouts}) == readable
    assert counters["layouts_refused"] == (0 if readable else 1)
