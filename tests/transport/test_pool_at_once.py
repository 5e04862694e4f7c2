"""Lookups that the scheduler's thread answers itself, because the store's index is its own host's
memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.pool import lookup
from kvferry.pool.embedded.store import EmbeddedStore
from kvferry.pool.lookup import Lookups
from kvferry.verify.oracle import CaseDict, Oracle
from pool_cases import pool_case
from pool_engine import SmallEngine
from waiting import wait_until


@pytest.fixture(scope="module")
def case() -> CaseDict:
    for index in range(4000):
        case = pool_case(5, index, both_whole=True)
        if case is not None and not case["skip"] and not Oracle(case).errors():
            return case
    raise AssertionError("too few cases")


class Pair:
    """A writer that has saved a prompt, and a reader that asks by itself."""

    def __init__(self, case: CaseDict, path: Path) -> None:
        self.oracle, self.case = Oracle(case), case
        self.tokens = [(7919 + 31 * i) % 50_000 for i in range(case["tokens"] + 1)]
        self.store: Callable[[], EmbeddedStore] = lambda: EmbeddedStore(path, 64 << 20)
        self.writer = SmallEngine(case, "src", self.store)
        self.writer.fill(self.oracle)
        self.writer.save("w", self.tokens)
        self.writer.published()
        self.reader = SmallEngine(case, "dst", self.store, at_once=True)

    def ask(self, name: str) -> int | None:
        """Once, as the scheduler does in one step."""
        tracker = self.reader.scheduler.track(name, tuple)
        return self.reader.scheduler.matched(name, tracker, self.tokens, 0)

    def until_at_once(self) -> None:
        """Until the reader's thread has opened its store and knows the layouts."""
        names = iter(range(10_000))
        wait_until(lambda: self.ask(f"first {next(names)}") == self.case["tokens"])


@pytest.fixture
def pair(case: CaseDict, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(case, tmp_path / "store")
    yield made
    made.writer.close()
    made.reader.close()


def test_an_answer_comes_with_the_question(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    access = EmbeddedStore.access

    def heard(self: EmbeddedStore, keys: Any, deadline: float) -> None:
        told.append(threading.current_thread().name)
        access(self, keys, deadline)

    monkeypatch.setattr(EmbeddedStore, "access", heard)
    pair.until_at_once()
    told.clear()
    asked: list[str] = []
    look_up = Lookups._look_up

    def watched(self: Lookups, question: Any) -> Any:
        asked.append(threading.current_thread().name)
        return look_up(self, question)

    monkeypatch.setattr(Lookups, "_look_up", watched)
    assert pair.ask("r") == pair.case["tokens"]
    assert asked == [threading.main_thread().name]
    wait_until(lambda: told != [])  # eviction learns of it, by the other thread
    assert set(told) == {"kvferry-lookup"}
    (end, *_) = pair.reader.load("r", pair.case["tokens"])
    assert end.ok and pair.reader.wrong_bytes(pair.oracle) == 0


def test_a_store_in_use_is_not_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread has it, for as long as it likes."""
    pair.until_at_once()
    go_on, inside = threading.Event(), threading.Event()
    refresh = lookup.LayoutRegistry.refresh

    def slow(self: Any, store: Any, deadline: float) -> None:
        inside.set()
        assert go_on.wait(20)
        refresh(self, store, deadline)

    monkeypatch.setattr(lookup.LayoutRegistry, "refresh", slow)
    assert inside.wait(20)
    assert pair.ask("r") is None
    go_on.set()
    wait_until(lambda: pair.ask("r") == pair.case["tokens"])


def test_a_layout_that_is_new_is_found_soon(case: CaseDict, tmp_path: Path) -> None:
    """Also by an engine that asks all the time, and never by its thread."""
    made = Pair(case, tmp_path / "store")
    early = SmallEngine(case, "dst", made.store, at_once=True, tenant="other")
    late: list[SmallEngine] = []
    tokens, name = made.tokens, iter(range(100_000))

    def found() -> bool:
        tracker = early.scheduler.track(n := f"r{next(name)}", tuple)
        hit = early.scheduler.matched(n, tracker, tokens, 0)
        if not late:
            late.append(SmallEngine(case, "src", made.store, tenant="other"))
            late[0].fill(made.oracle)
            late[0].save("w", tokens)
            late[0].published()
        return hit == case["tokens"]

    wait_until(found)
    for engine in (made.writer, made.reader, early, *late):
        engine.close()
