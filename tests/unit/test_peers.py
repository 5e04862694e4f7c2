"""What is known of an engine is forgotten once, and never instead of what was learned since."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry import CacheModel, Component, EngineShape, Group, Rank, RankLayout
from kvferry.carriers.null import NullCarrier
from kvferry.errors import DeadlineExceeded, HandoverError, IncompatibleError, UnknownEngine
from kvferry.handover.deadline import Deadline
from kvferry.handover.describe import engine_info, rank_info
from kvferry.handover.load import Introductions
from kvferry.handover.peers import (
    RETRY_SECONDS,
    PeerKey,
    Peers,
    Remote,
    ask_directory,
    require_welcome,
)
from kvferry.net.messages import RankInfo, Refused, Welcome
from kvferry.topology import TransferTopology

KEY = PeerKey("p", "1", "h:1")


def acquaintances(met: dict[PeerKey, Remote]) -> Peers:
    nothing: Any = None
    topology: Any = SimpleNamespace(engine_id="d", unregister_remote_engine=lambda name: None)
    return Peers(nothing, nothing, topology, nothing, [], _remotes=met)


def remote(*sources: Any) -> Remote:
    nothing: Any = None
    return Remote(nothing, nothing, sources)


def test_two_loads_that_lost_a_peer_forget_it_once() -> None:
    met: dict[PeerKey, Remote] = {}
    people = acquaintances(met)
    old, new = remote(), remote()
    met[KEY] = old
    people.forget(old)
    assert KEY not in met
    met[KEY] = new
    people.forget(old)
    assert met[KEY] is new


def test_connections_are_given_back_by_the_last_that_uses_them() -> None:
    met: dict[PeerKey, Remote] = {}
    people = acquaintances(met)
    gone: list[str] = []
    source = SimpleNamespace(carrier=SimpleNamespace(disconnect=gone.append), peer="peer")
    lost = remote(source)
    met[KEY] = lost
    ticket: Any = SimpleNamespace(engine_id="p", incarnation="1", directory="h:1")
    watch = Deadline(time.monotonic() + 60)
    first, second = people.meet(ticket, watch), people.using(ticket)
    assert first is second is lost
    people.forget(lost)
    assert KEY not in met and people.using(ticket) is None
    people.leave(first)
    assert gone == []
    people.leave(first)
    assert gone == ["peer"]
    people.forget(lost)
    assert gone == ["peer"]


def test_an_engine_is_met_though_its_last_life_cannot_be_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A library may raise about a peer that died. The new life's loads must not wait for that."""
    left: list[str] = []

    def disconnect(peer: str) -> None:
        left.append(peer)
        raise OSError("it is gone")

    carrier = SimpleNamespace(name="line", disconnect=disconnect)
    peers: Any = (SimpleNamespace(carrier=carrier, peer=peer) for peer in ("one", "two"))
    old, new = remote(*peers), remote()
    people = acquaintances({PeerKey("p", "0", "h:1"): old})
    monkeypatch.setattr("kvferry.handover.peers.ask_directory", lambda *_: None)
    monkeypatch.setattr(Peers, "plan_with", lambda *_: new)
    ticket: Any = SimpleNamespace(engine_id="p", incarnation="1", directory="h:1")
    assert people.meet(ticket, Deadline(time.monotonic() + 60)) is new
    assert left == ["one", "two"] and caplog.text.count("was not given back") == 2


def test_a_directory_that_was_starting_when_it_fell_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last answer says more than that the time was over."""
    monkeypatch.setattr("kvferry.handover.peers.ASK_AGAIN_SECONDS", 0.0)
    starting = Refused("busy", "no ranks yet")
    answers: list[Future[Any]] = [Future(), Future()]
    answers[0].set_result(starting)
    caller: Any = SimpleNamespace(call=lambda *_: answers.pop(0))
    engine = engine_info("d", "i", MLA, D, {})
    assert ask_directory(caller, "h:1", engine, Deadline(time.monotonic() + 1.0), 60) is starting
    assert answers == []
    answers.append(Future())
    with pytest.raises(DeadlineExceeded):  # one that never answered
        ask_directory(caller, "h:1", engine, Deadline(time.monotonic() + 0.02), 60)


def test_an_engine_that_is_starting_is_not_called_incompatible() -> None:
    """Failed loads are counted by the kind of their error."""
    with pytest.raises(HandoverError, match="no ranks yet"):
        require_welcome(Refused("busy", "no ranks yet"), KEY)
    with pytest.raises(IncompatibleError):
        require_welcome(Refused("version", "another version"), KEY)


class Late(NullCarrier):
    """A carrier that does not connect in time at first."""

    name = "late"
    asked = 0

    def connect(self, endpoint: bytes, deadline: float) -> Any:
        self.asked += 1
        if self.asked == 1:
            raise DeadlineExceeded("the owner of the peer's memory does not answer")
        return super().connect(endpoint, deadline)


def test_a_carrier_that_was_late_is_tried_again_beside_the_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else all loads would take the slower way until the peer falls idle for ten minutes."""
    late, null = Late(), NullCarrier()
    gone: list[str] = []
    for carrier in (late, null):
        monkeypatch.setattr(carrier, "disconnect", lambda peer, by=carrier: gone.append(by.name))
    people, welcome = strangers(D, D, [late, null])
    monkeypatch.setattr("kvferry.handover.peers.ask_directory", lambda *_: welcome)
    ticket: Any = SimpleNamespace(engine_id="p", incarnation="1", directory="h:1")
    first = people.meet(ticket, Deadline(time.monotonic() + 60))

    def carriers(known: Remote) -> list[str]:
        return [s.carrier.name for s in known.sources if s.carrier is not None]

    assert carriers(first) == ["null"] and not people.wants_retry(first)
    soon = time.monotonic() + RETRY_SECONDS
    with monkeypatch.context() as patch:
        patch.setattr("kvferry.handover.peers.time.monotonic", lambda: soon)
        assert people.wants_retry(first) and not people.wants_retry(first)
        people.meet_again(ticket, first, 60)
    second = people.using(ticket)
    assert second is not None and carriers(second) == ["late"] and gone == []
    people.forget(first)  # a load that lost the old connection
    assert people.using(ticket) is second
    people.leave(first)
    assert gone == ["null"] and math.isinf(second.retry_at)


def test_a_carrier_that_was_late_once_does_not_use_up_the_time_of_a_handshake() -> None:
    """With several ranks to meet, none would be left for the carriers behind it."""
    late, null = Late(), NullCarrier()
    people, welcome = strangers(replace(D, tp=1, pp=4), replace(D, tp=1, pp=4), [late, null])
    remote = people.plan_with(welcome, KEY, time.monotonic() + 10)
    assert [s.carrier and s.carrier.name for s in remote.sources] == ["null"] * 4
    assert late.asked == 1
    alone, welcome = strangers(replace(D, tp=1, pp=4), replace(D, tp=1, pp=4), [late])
    assert len(alone.plan_with(welcome, KEY, time.monotonic() + 10).sources) == 4


def test_an_engine_that_was_forgotten_while_it_was_met_again_stays_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = Late()
    gone: list[Any] = []
    monkeypatch.setattr(late, "disconnect", gone.append)
    late.asked = 1
    people, welcome = strangers(D, D, [late])
    ticket: Any = SimpleNamespace(engine_id="p", incarnation="1", directory="h:1")
    monkeypatch.setattr("kvferry.handover.peers.ask_directory", lambda *_: welcome)
    first = people.meet(ticket, Deadline(time.monotonic() + 60))

    def lost(*_: Any) -> Welcome:
        people.forget(first)
        return welcome

    monkeypatch.setattr("kvferry.handover.peers.ask_directory", lost)
    people.meet_again(ticket, first, 60)
    assert people.using(ticket) is None and len(gone) == 1  # the new one; a load has the other
    with pytest.raises(UnknownEngine):
        people.topology.get_engine_info(KEY.name)
    people.leave(first)
    assert len(gone) == 2


LATENT = Component("latent", 1, (72,), 2, "replicated")
MLA = CacheModel("mla", (Group("latent", tuple(range(4)), (LATENT,)),))
D = EngineShape(tp=2, block_size=32)


def strangers(
    shape: EngineShape, memory: EngineShape, carriers: list[NullCarrier]
) -> tuple[Peers, Welcome]:
    """A rank, and the welcome of an engine whose ranks have the memory of another shape."""
    ours = RankLayout.build(MLA, D, Rank(0, 1), 8)
    topology = TransferTopology("d", MLA, D, ours.rank)
    caller: Any = None
    people = Peers(caller, engine_info("d", "i", MLA, D, {}), topology, ours, carriers)
    endpoints = {carrier.name: carrier.endpoint() for carrier in carriers}
    ranks = [
        rank_info(layout, [0] * len(layout.regions), "h:1", "1", endpoints)
        for layout in (RankLayout.build(MLA, memory, rank, 8) for rank in memory.ranks)
    ]
    return people, Welcome(engine_info("p", "1", MLA, shape, {}), ranks)


def shake_hands(shape: EngineShape, memory: EngineShape) -> tuple[Remote, TransferTopology]:
    people, welcome = strangers(shape, memory, [NullCarrier()])
    return people.plan_with(welcome, KEY, time.monotonic() + 10), people.topology


def test_the_handshake_meets_and_reads_as_the_topology_says() -> None:
    shape = EngineShape(tp=8, pp=2, block_size=64, kernel_block_size=16)
    remote, topology = shake_hands(shape, shape)
    assert {s.rank: s.readers for s in remote.sources} == topology.partners(KEY.name)
    for stage in range(2):
        met = [s for s in remote.sources if s.rank.pp == stage]
        assert [s.rank.tp for s in met] == topology.target_remote_ranks(KEY.name, stage)
        read = [s.rank.tp for s in met if s.plan is not None]
        assert read == topology.source_ranks(KEY.name, stage)
    assert topology.replicates_kv_cache(KEY.name)
    assert topology.get_engine_info(KEY.name).remote_physical_blocks_per_logical == 4


def test_what_was_introduced_to_earlier_incarnations_is_not_kept() -> None:
    """An engine that is reset with each new set of weights has thousands of them."""
    sent: list[str] = []
    caller = SimpleNamespace(call=lambda address, body, until: sent.append(body.incarnation))
    people = acquaintances({})
    people.caller = caller  # type: ignore[assignment]
    introductions = Introductions(people, RankInfo(0, 0, "h:3", "i", {}, [], [], 0))
    for incarnation in ("1", "2", "3"):
        source: Any = SimpleNamespace(address="h:2", incarnation=incarnation)
        introductions.make(source)
        introductions.make(source)
    assert sent == ["1", "2", "3"] and len(introductions._made) == 1
    introductions.forget(source)
    introductions.make(source)
    assert sent == ["1", "2", "3", "3"]
