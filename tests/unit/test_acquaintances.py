"""What is known of an engine is forgotten once, and never instead of what was learned since."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from kvferry.p2p.acquaintances import Acquaintances

KEY = ("p", "1")


def remote() -> Any:
    return SimpleNamespace(engine=SimpleNamespace(engine_id="p", incarnation="1"), sources=())


def known(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def test_two_loads_that_lost_a_peer_forget_it_once() -> None:
    nothing: Any = None
    people = Acquaintances(nothing, nothing, nothing, nothing, [])
    old, new = remote(), remote()
    people._remotes[KEY] = known(old)
    people.forget(old)
    assert KEY not in people._remotes
    pending: Future[Any] = Future()
    people._remotes[KEY] = pending  # a third load is meeting it again
    people.forget(old)
    assert people._remotes[KEY] is pending
    people._remotes[KEY] = known(new)
    people.forget(old)
    assert people._remotes[KEY].result() is new
