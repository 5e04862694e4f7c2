"""Loads and saves for which the system has no thread or too few; loads that wait for a device."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_pool_closing import saved, scope

from kvferry.pool import rank as load_module
from kvferry.pool.hits import Segment
from kvferry.pool.keys import Fragment
from kvferry.pool.orders import LoadOrder, PoolCounters, Saved, SaveOrder, TableBlocks
from kvferry.pool.rank import Loader, Saver
from kvferry.pool.store import Outcome
from kvferry.workers import Threads
from no_threads import no_threads
from waiting import require_for, wait_until


class Store:
    """Keeps the order of what happens; `get` waits while it is told to."""

    name = "ordered"

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.may_go = threading.Event()
        self.may_go.set()

    def exists(self, keys: list[str], deadline: float) -> Any:
        return np.zeros(len(keys), dtype=bool)

    def put(self, keys: list[str], objects: Any, deadline: float) -> list[Outcome]:
        self.seen.append("put")
        return [Outcome.DONE] * len(keys)

    def get(self, keys: list[str], wanted: Any, deadline: float) -> list[Outcome]:
        self.seen.append("get")
        assert self.may_go.wait(20)
        return [Outcome.DONE] * len(keys)


class Plan:
    """One object of 16 tokens."""

    theirs = type("", (), {"block_tokens": staticmethod(lambda group: 16)})

    @staticmethod
    def bind(*_: Any) -> Any:
        one = type("", (), {"length": np.ones(1, dtype=np.int64)})
        return type(
            "",
            (),
            {"slices": [one], "fragments": [Fragment(0, 0, 0)], "blocks": [0], "starts": [0]},
        )


SCOPE: Any = SimpleNamespace(
    metadata=None,
    plan=lambda _: Plan,
    own_blocks=lambda *_: None,
    bases=np.zeros(1, dtype=np.int64),
)
SAVE = SaveOrder(1, (TableBlocks(0, (0, 1), (0, 1), ("a", "b")),), 30.0)


def order(name: str, seconds: float = 30.0) -> LoadOrder:
    return LoadOrder(name, (Segment("x", "g", 0, 16),), {("x", 0): ("aa",)}, ((1,),), seconds)


def ended(loader: Loader, count: int) -> list[Any]:
    found: list[Any] = []
    wait_until(lambda: bool(found.extend(loader.take_done())) or len(found) >= count)
    return found


@pytest.fixture
def store() -> Any:
    return Store()


@pytest.fixture
def loader(store: Any, monkeypatch: Any) -> Any:
    monkeypatch.setattr(load_module.PoolKey, "build_prefix", lambda *_: "one/")
    made = Loader(store, PoolCounters())
    yield made
    store.may_go.set()
    made.close()


def test_a_load_without_a_thread_has_failed(loader: Loader, store: Any, monkeypatch: Any) -> None:
    """And nothing of it happens later."""
    with no_threads(monkeypatch, "kvferry-load-one"):
        loader.start(order("r"), SCOPE)
        (end,) = loader.take_done()
        assert not end.ok and not end.hung and end.bad_from == 0
        assert not loader.running and loader.take_done() == [] and store.seen == []
    loader.start(order("again"), SCOPE)
    assert [(e.request_id, e.ok) for e in ended(loader, 1)] == [("again", True)]


def test_loads_that_queue_are_not_hung(loader: Loader, store: Any, monkeypatch: Any) -> None:
    """More than have a thread, behind some that the store keeps: they hold no blocks."""
    monkeypatch.setattr(load_module, "HUNG_SECONDS", 0.2)
    loader._threads._most = 2
    store.may_go.clear()
    for name in "ab":
        loader.start(order(name, 1.0), SCOPE)
    wait_until(lambda: store.seen == ["get", "get"])
    for name in "cd":
        loader.start(order(name, 0.1), SCOPE)
    found = {end.request_id: end for end in ended(loader, 4)}
    assert {name for name, end in found.items() if end.hung} == {"a", "b"}
    assert not any(end.ok for end in found.values()) and store.seen == ["get", "get"]
    store.may_go.set()
    recovered: list[str] = []
    wait_until(lambda: bool(recovered.extend(loader.take_recovered())) or len(recovered) == 2)
    require_for(0.05, lambda: loader.take_done() == [])
    assert sorted(recovered) == ["a", "b"]
    assert store.seen == ["get", "get"], "one that was given up began"


def test_a_load_begins_after_its_fence(loader: Loader, store: Any, monkeypatch: Any) -> None:
    """Until then, a step under way may write the blocks that it was given."""
    written = threading.Event()

    class Written:
        event = 0

        def wait(self) -> None:
            assert written.wait(20)
            store.seen.append("fence")

    class Broken(Written):
        def wait(self) -> None:
            raise ZeroDivisionError

    loader.start(order("r"), SCOPE, Written())
    require_for(0.05, lambda: store.seen == [])
    written.set()
    assert ended(loader, 1)[0].ok and store.seen == ["fence", "get"]
    monkeypatch.setattr(load_module, "HUNG_SECONDS", 0.05)
    written.clear()
    loader.start(order("late", 0.05), SCOPE, Written())
    (end,) = ended(loader, 1)
    assert not end.ok and not end.hung, "it has written nothing"
    written.set()
    wait_until(lambda: store.seen == ["fence", "get", "fence"])
    require_for(0.05, lambda: store.seen == ["fence", "get", "fence"])
    assert loader.take_done() == []
    loader.start(order("broken"), SCOPE, Broken())
    (end,) = ended(loader, 1)
    assert "ZeroDivisionError" in end.error and store.seen == ["fence", "get", "fence"]


class Fenced(Store):
    """Puts as a device does: in parts, whose ends may wait."""

    register = access = put_bytes = get_bytes = remove = close = lambda *_: None

    def put_after(self, keys: Any, objects: Any, deadline: float, fence: Any) -> list[Outcome]:
        assert self.may_go.wait(20)
        fence.quiet()
        return super().put(keys, objects, deadline)


def test_the_end_of_a_save_hurries_if_another_waits() -> None:
    quiet: list[str] = []
    store = Fenced()
    store.may_go.clear()
    saver = Saver(store, PoolCounters())
    for name in "abc":
        fence: Any = SimpleNamespace(ready=None, wait=None, quiet=lambda n=name: quiet.append(n))
        saver.start(SAVE, scope(), fence)
    store.may_go.set()
    wait_until(lambda: len(store.seen) == 3)
    assert quiet == ["c"]
    saver.close()


def test_the_end_of_a_save_does_not_hurry_for_one_that_no_thread_took(monkeypatch: Any) -> None:
    """And of several tables, one waits: the blocks of all are pinned until the last is saved."""
    quiet: list[str] = []
    store, fence = Fenced(), SimpleNamespace(ready=None, wait=None, quiet=lambda: quiet.append(""))
    saver = Saver(store, PoolCounters())
    with no_threads(monkeypatch, "kvferry-save"):
        saver.start(SAVE, scope(), fence)
    assert [one.failed for one in saver.take_done()] == [((0, 0), (0, 1))]
    saver.start(SaveOrder(2, SAVE.tables * 2, 30.0), scope(), fence)
    wait_until(lambda: len(store.seen) == 2)
    assert quiet == [""]
    saver.close()


def test_nobody_takes_the_place_of_a_stuck_thread(monkeypatch: Any) -> None:
    crew, go_on = Threads("kvferry-load", 1, most_stuck=4), threading.Event()
    stuck = crew.call(lambda: go_on.wait(20))
    wait_until(stuck.running)
    behind = crew.call(lambda: 7)
    with no_threads(monkeypatch, "kvferry-load"):
        assert not crew.give_up(stuck)
    go_on.set()
    assert behind.result(30) == 7, "the one thread there is goes on"
    crew.close()


def test_a_save_without_a_thread_has_its_last_word(store: Any, monkeypatch: Any) -> None:
    saver = Saver(store, PoolCounters())
    with no_threads(monkeypatch, "kvferry-save"):
        saver.start(SAVE, scope())
        assert saver.take_done() == [Saved(1, ((0, 0), (0, 1)))]
    saver.start(SAVE, scope())
    assert saved(saver) == [Saved(1)] and store.seen == ["put"]
    saver.close()
