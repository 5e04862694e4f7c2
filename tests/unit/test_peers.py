"""What is known of an engine is forgotten once, and never instead of what was learned since."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from kvferry.handover.deadline import Deadline
from kvferry.handover.peers import Known, PeerKey, Peers

KEY = PeerKey("p", "1", "h:1")


def acquaintances(met: dict[PeerKey, Known]) -> Peers:
    nothing: Any = None
    topology: Any = SimpleNamespace(engine_id="d", unregister_remote_engine=lambda name: None)
    return Peers(nothing, nothing, topology, nothing, [], _remotes=met)


def remote() -> Any:
    return SimpleNamespace(sources=())


def known(value: Any) -> Known:
    made = Known("p")
    made.remote.set_result(value)
    return made


def test_two_loads_that_lost_a_peer_forget_it_once() -> None:
    met: dict[PeerKey, Known] = {}
    people = acquaintances(met)
    old, new = remote(), remote()
    met[KEY] = known(old)
    people.forget(old)
    assert KEY not in met
    pending = Known("p")
    met[KEY] = pending  # a third load is meeting it again
    people.forget(old)
    assert met[KEY] is pending
    met[KEY] = known(new)
    people.forget(old)
    assert met[KEY].remote.result() is new


def test_connections_are_given_back_by_the_last_that_uses_them() -> None:
    met: dict[PeerKey, Known] = {}
    people = acquaintances(met)
    gone: list[str] = []
    source = SimpleNamespace(carrier=SimpleNamespace(disconnect=gone.append), peer="peer")
    lost = remote()
    lost.sources = (source,)
    met[KEY] = known(lost)
    ticket: Any = SimpleNamespace(engine_id="p", incarnation="1", directory="h:1")
    watch = Deadline(time.monotonic() + 60)
    first, second = people.meet(ticket, watch), people.using(ticket)
    assert first is second and first.remote.result() is lost
    people.forget(lost)
    assert KEY not in met and people.using(ticket) is None
    people.leave(first)
    assert gone == []
    people.leave(first)
    assert gone == ["peer"]
    people.forget(lost)
    assert gone == ["peer"]
