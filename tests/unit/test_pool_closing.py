"""A rank that is closed while it saves and loads: what the store has is waited for, what it does
not have yet is not begun, and each job still has its last word."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvferry.pool.orders import LoadOrder, PoolCounters, PoolLoaded, Saved, SaveOrder, TableBlocks
from kvferry.pool.rank import Loader, Pace, PoolRank, Saver
from kvferry.pool.store import Outcome
from waiting import wait_until

BATCH_OBJECTS = Pace().save_objects
BLOCKS = 3 * BATCH_OBJECTS
ORDER = SaveOrder(
    1,
    (TableBlocks(0, tuple(range(BLOCKS)), tuple(range(BLOCKS)), tuple(map(str, range(BLOCKS)))),),
    30.0,
)


class Slow:
    """A store whose calls wait until they may go on; what happened to it, in order."""

    name = "slow"

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.entered: list[str] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.gets_last = False  # a get ends after the put has

    def _slowly(self, what: str, keys: list[str]) -> list[Outcome]:
        self.entered.append(what)
        self.begun.set()
        assert self.go_on.wait(20)
        if what == "get" and self.gets_last:
            wait_until(lambda: "put" in self.seen)
        self.seen.append(what)
        return [Outcome.DONE] * len(keys)

    def exists(self, keys: list[str], deadline: float) -> Any:
        return np.zeros(len(keys), dtype=bool)

    def put(self, keys: list[str], objects: Any, deadline: float) -> list[Outcome]:
        return self._slowly("put", keys)

    def get(self, keys: list[str], wanted: Any, deadline: float) -> list[Outcome]:
        return self._slowly("get", keys)

    def close(self) -> None:
        self.seen.append("close")


def scope() -> Any:
    return SimpleNamespace(
        memory={0: SimpleNamespace(object_bytes=1, blocks=lambda _, ids: [None] * len(ids))},
        bases=None,
        my_turn=lambda table, numbers: np.arange(len(numbers)),
        keys=lambda table, contents: list(contents),
    )


def saved(saver: Saver) -> list[Saved]:
    """The reports of jobs, once there is one."""
    found: list[Saved] = []
    wait_until(lambda: bool(found.extend(saver.take_done())) or bool(found))
    return found


def rank(store: Any, saver: Saver, loader: Loader) -> PoolRank:
    made = PoolRank.__new__(PoolRank)  # no memory, no layouts: all of it that `close` is about
    made._store, made._saver, made._loader = store, saver, loader
    return made


def reads_slowly(monkeypatch: Any, loader: Loader, store: Slow) -> None:
    """In the place of a load: one chunk, read like others."""

    def load(running: Any, scope: Any) -> PoolLoaded:
        store.get(["a"], None, 0.0)
        return PoolLoaded("r")

    monkeypatch.setattr(loader, "_load", load)


def test_a_save_ends_after_the_batch_at_hand() -> None:
    store: Any = Slow()
    saver = Saver(store, PoolCounters())
    saver.start(ORDER, scope())
    assert store.begun.wait(30)
    saver.close(0.0)
    store.go_on.set()
    failed = tuple((0, n) for n in range(BATCH_OBJECTS, BLOCKS))
    assert saved(saver) == [Saved(1, failed)] and store.seen == ["put"]


def test_the_store_is_closed_after_what_it_has(monkeypatch: Any) -> None:
    """Both at once, not one after the other, and nothing of them comes after its end."""
    store: Any = Slow()
    store.gets_last = True
    saver, loader = Saver(store, PoolCounters()), Loader(store, PoolCounters())
    made = rank(store, saver, loader)
    reads_slowly(monkeypatch, loader, store)
    saver.start(ORDER, scope())
    loader.start(LoadOrder("r", (), {}, (), 30.0), None)  # type: ignore[arg-type]
    wait_until(lambda: len(store.entered) == 2)
    threading.Timer(0.2, store.go_on.set).start()
    made.close()
    assert sorted(store.seen[:-1]) == ["get", "put"] and store.seen[-1] == "close"


def test_a_load_after_the_end() -> None:
    """Nobody is left to read: it is told so, at once."""
    store: Any = Slow()
    loader = Loader(store, PoolCounters())
    loader.close(1.0)
    loader.start(LoadOrder("r", (), {}, (), 30.0), None)  # type: ignore[arg-type]
    wait_until(lambda: not loader.running)
    (ended,) = loader.take_done()
    assert not ended.ok and "shutting down" in ended.error


def test_a_load_that_hangs_is_not_waited_for(monkeypatch: Any) -> None:
    store: Any = Slow()
    loader = Loader(store, PoolCounters())
    reads_slowly(monkeypatch, loader, store)
    loader.start(LoadOrder("r", (), {}, (), -10.0), None)  # type: ignore[arg-type]
    assert store.begun.wait(30) and loader.take_done()[0].hung
    began = time.monotonic()
    loader.close(10.0)
    assert time.monotonic() - began < 5
    store.go_on.set()
    wait_until(lambda: not loader.running)


def test_an_idle_step_waits_for_no_load_that_has_ended() -> None:
    store: Any = Slow()
    saver, loader = Saver(store, PoolCounters()), Loader(store, PoolCounters())
    made = rank(store, saver, loader)
    loader.start(LoadOrder("r", (), {}, (), 30.0), None)  # type: ignore[arg-type]
    wait_until(lambda: not loader.running)
    began = time.monotonic()
    made.wait_done(10.0)
    assert time.monotonic() - began < 5
    made.close()


def test_an_end_that_was_taken_does_not_end_the_next_wait(monkeypatch: Any) -> None:
    """An idle step would leave at once, and take the interpreter's lock from the load it began."""
    store: Any = Slow()
    ended = threading.Event()
    saver, loader = Saver(store, PoolCounters(), ended), Loader(store, PoolCounters(), ended)
    made = rank(store, saver, loader)
    made._ended = ended
    loader.start(LoadOrder("a", (), {}, (), 30.0), None)  # type: ignore[arg-type]
    wait_until(lambda: not loader.running)
    assert [loaded.request_id for loaded in made.take().loaded] == ["a"]
    reads_slowly(monkeypatch, loader, store)
    loader.start(LoadOrder("b", (), {}, (), 30.0), None)  # type: ignore[arg-type]
    assert store.begun.wait(30)
    began = time.monotonic()
    made.wait_done(0.05)
    assert time.monotonic() - began >= 0.05
    store.go_on.set()
    made.close()
