"""Small rooms of the pool: calls without deadlines, blocks that are watched, states."""

from __future__ import annotations

import socket
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ipv6 import has_ipv6
from kvferry.errors import StoreError
from kvferry.layout.model import Residency
from kvferry.pool import lookup
from kvferry.pool.keys import ContentChain
from kvferry.pool.lookup import EvictionWatch
from kvferry.pool.mooncake import MooncakeStore, MooncakeStoreConfig
from kvferry.pool.objects import TableKind
from kvferry.pool.scheduler import WholeState, states_to_save
from kvferry.workers import LateCalls
from waiting import soon, wait_until


def test_a_call_gets_an_idle_thread() -> None:
    calls, seen = LateCalls("x"), set()
    for _ in range(20):
        seen.add(calls("look", threading.get_ident, soon()))
        wait_until(lambda: not calls._threads._tasks)
    assert len(seen) == 1 and threading.get_ident() not in seen
    calls.close()
    wait_until(lambda: not any(t.ident in seen for t in threading.enumerate()))


def test_a_call_that_hangs_keeps_nobody_waiting() -> None:
    calls, release = LateCalls("x"), threading.Event()
    while not calls.hanging:  # one that no thread had begun by its deadline does not count
        with pytest.raises(StoreError, match="deadline"):
            calls("look", lambda: release.wait(5), soon(0.05))
    assert calls("look", lambda: 7, soon()) == 7
    assert calls.hanging == 1
    release.set()
    wait_until(lambda: calls.hanging == 0)


def test_too_many_that_hang() -> None:
    calls, release = LateCalls("x", most_hanging=2), threading.Event()
    while calls.hanging < 2:  # one that no thread had begun by its deadline does not count
        with pytest.raises(StoreError, match="deadline"):
            calls("look", lambda: release.wait(5), soon(0.02))
    with pytest.raises(StoreError, match="hang; look refused"):
        calls("look", lambda: 7, soon())
    release.set()
    wait_until(lambda: calls.hanging == 0)
    assert calls("look", lambda: 7, soon()) == 7


def test_errors_of_calls() -> None:
    calls = LateCalls("x")

    def fail(error: BaseException) -> Any:
        raise error

    with pytest.raises(StoreError, match="look failed: KeyError"):
        calls("look", lambda: fail(KeyError(1)), soon())
    own = StoreError("said so")
    with pytest.raises(StoreError) as caught:
        calls("look", lambda: fail(own), soon())
    assert caught.value is own


class Objects:
    """A store, as far as watching goes."""

    def __init__(self, *keys: str) -> None:
        self.keys, self.asked = set(keys), 0

    def exists(self, keys: list[str], deadline: float) -> Any:
        self.asked += len(keys)
        return np.array([key in self.keys for key in keys])


def test_what_is_gone_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "PERIOD_SECONDS", 0.0)
    monkeypatch.setattr(lookup, "BLOCKS_AT_A_TIME", 2)
    seen = EvictionWatch()
    store: Any = Objects("a0", "a1", "b0", "c0")
    for name in "abc":
        seen.add(name, [f"{name}0", f"{name}1"] if name == "a" else [f"{name}0"])
    for _ in range(2):  # a round
        seen.look(store, soon())
    assert store.asked == 3 + 3 and not seen.has_gone  # a and b; c and a again
    store.keys -= {"a1", "c0"}
    for _ in range(2):
        seen.look(store, soon())
    assert sorted(seen.take_gone()) == ["a", "c"] and not seen.has_gone
    seen.look(store, soon())
    assert seen.take_gone() == []


def test_what_came_back_is_not_told_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers heard of the new copy last, so that is what they must go on believing."""
    monkeypatch.setattr(lookup, "PERIOD_SECONDS", 0.0)
    seen, store = EvictionWatch(), Objects()
    for name in "ab":
        seen.add(name, [name])
    seen.look(store, soon())  # type: ignore[arg-type]
    seen.add("a", ["a"])
    assert seen.take_gone() == ["b"]


def test_after_a_reset_all_is_told_as_gone_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router takes 0.3 seconds for all at once, and its requests wait."""
    monkeypatch.setattr(lookup, "TOLD_AT_A_TIME", 2)
    seen = EvictionWatch()
    for name in "abcd":
        seen.add(name, [name])
    seen.lose_all()
    assert seen.take_gone() == ["a", "b"] and seen.has_gone
    seen.add("c", ["c"])
    assert seen.take_gone() == ["d"] and not seen.has_gone


def test_a_mooncake_client_that_is_refused_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the master's address is one of IPv6."""
    client = SimpleNamespace(setup=lambda *_: -1)
    module = SimpleNamespace(MooncakeDistributedStore=lambda: client)
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    host, family = ("::1", socket.AF_INET6) if has_ipv6() else ("127.0.0.1", socket.AF_INET)
    with socket.create_server((host, 0), family=family) as master:
        port = master.getsockname()[1]
        config = MooncakeStoreConfig(f"[{host}]:{port}", local_hostname="here")
        with pytest.raises(StoreError, match="code -1"):
            MooncakeStore(config)
    threads = threading.enumerate
    wait_until(lambda: not any(t.name.startswith("kvferry-Mooncake") for t in threads()))


def test_only_states_at_the_ends_of_blocks_are_saved() -> None:
    kinds = [
        TableKind(0, ("full",), 16, Residency("full")),
        TableKind(1, ("state",), 32, Residency("state")),
    ]
    chain = ContentChain()
    chain.cover(range(100), 100)
    states = [
        WholeState(1, 7, 64),
        WholeState(1, 8, 80),  # inside a block
        WholeState(1, 0, 32),  # no block
        WholeState(1, 9, 128),  # tokens that are not final
        WholeState(0, 5, 32),  # no state
    ]
    (found,) = states_to_save(kinds, chain, states, null_block=0)
    assert (found.table, found.numbers, found.block_ids) == (1, (1,), (7,))
    assert found.contents == (chain.digests(32)[1],)
