"""A consumer rank that a producer rank writes to: planned and connected to when first needed.

A connection is made by the push that needs it first; others that come meanwhile wait for it, and
can be given up. Making one takes a part of an offer's time and no more: where a firewall drops what
we send, the consumer is told so while it can still read. For some seconds after that, others are
told at once.

A target is dropped when its engine restarted or this one ends. Nobody waits for a connection that
is being made just then: whoever makes it gives it back.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.errors import Cancelled, DeadlineExceeded, HandoverError, KvferryError
from kvferry.layout.model import CacheModel
from kvferry.layout.rank import RankLayout
from kvferry.layout.shape import Rank
from kvferry.p2p.budget import ENTRY_BYTES
from kvferry.p2p.describe import (
    read_layout,
    read_model,
    read_shape,
    require_plannable,
    require_same_meaning,
)
from kvferry.p2p.watch import Watch
from kvferry.plan import EdgePlan, plan_pair
from kvferry.transport.base import GrantingCarrier
from kvferry.wire.messages import EngineInfo, RankInfo

CONNECT_SECONDS = 2.0  # for a connection, where the offer has them: a lost packet is sent again
MOST_CONNECT_SECONDS = 10.0  # a peer that is reached at all is reached within these
RETRY_SECONDS = 30.0  # after a connection failed; until then, consumers read


class Unreachable(HandoverError):
    """This rank cannot write to that consumer; it may read instead."""


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The rank that writes."""

    engine: EngineInfo
    model: CacheModel
    layout: RankLayout
    optional_roles: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """What goes from the origin to a target, and where the target's regions lie."""

    plan: EdgePlan
    bases: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Unused:
    """A connection that is to be given back."""

    engine_id: str
    carrier: str
    peer: Any


@dataclass(slots=True, eq=False)
class Target:
    """Any method, from any thread. What the rank told of itself stays packed until it is needed."""

    engine_id: str
    packed_engine: bytes
    packed_info: bytes
    _edge: Edge | None = None
    _planning: threading.Lock = field(default_factory=threading.Lock)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # held for moments
    _peers: dict[str, Future[Any]] = field(default_factory=dict)  # by carrier; made, or being made
    _failed: dict[str, tuple[float, str]] = field(default_factory=dict)  # when, and why
    _dropped: bool = False

    @classmethod
    def of(cls, engine: EngineInfo, info: RankInfo) -> Target:
        encode = msgspec.msgpack.encode
        return cls(engine.engine_id, encode(engine), encode(info))

    @property
    def info(self) -> RankInfo:
        return msgspec.msgpack.decode(self.packed_info, type=RankInfo)

    @property
    def bytes(self) -> int:
        return ENTRY_BYTES + len(self.packed_engine) + len(self.packed_info)

    def is_like(self, other: Target) -> bool:
        mine, theirs = (self.packed_engine, self.packed_info), other.packed_engine
        return mine == (theirs, other.packed_info)

    def edge(self, origin: Origin) -> Edge:
        """Planned once; both sides compute it alike."""
        with self._planning:
            if self._edge is None:
                engine = msgspec.msgpack.decode(self.packed_engine, type=EngineInfo)
                info = self.info
                require_same_meaning(origin.engine, engine)
                shape = read_shape(engine)
                require_plannable(origin.model, origin.layout.shape, shape)
                pair = plan_pair(
                    origin.model,
                    origin.layout.shape,
                    shape,
                    dst_model=read_model(engine),
                    optional_roles=origin.optional_roles,
                )
                layout, bases = read_layout(info, shape)
                rank = Rank(info.pp_rank, info.tp_rank)
                plan = pair.plan(pair.edge(origin.layout.rank, rank), origin.layout, layout)
                self._edge = Edge(plan, tuple(bases))
            return self._edge

    def peer(self, carrier: GrantingCarrier, watch: Watch) -> Any:
        """The connection by this carrier. `Unreachable` comes while there is time to read."""
        now = time.monotonic()
        left = watch.deadline - now
        wait = min(max(CONNECT_SECONDS, left / 4), left / 2, MOST_CONNECT_SECONDS)
        patience = Watch(now + wait, watch.given_up)
        while True:
            with self._lock:
                self._require_wanted(carrier.name)
                made = self._peers.get(carrier.name)
                mine = made is None
                if made is None:
                    made = self._peers[carrier.name] = Future()
            if mine:
                return self._connect(carrier, made, patience.deadline)
            if made.done():
                return made.result()
            try:
                return patience.result(made)
            except Unreachable:  # if only because the other had less time, try ourselves
                continue
            except DeadlineExceeded:
                raise Unreachable(f"{carrier.name} has not reached the consumer yet") from None

    def take_peers(self, *, drop: bool = False) -> list[Unused]:
        """Its connections, for the caller to give back; dropped, it gets no others."""
        with self._lock:
            self._dropped |= drop
            made = [name for name, peer in self._peers.items() if peer.done()]
            return [Unused(self.engine_id, name, self._peers.pop(name).result()) for name in made]

    def _require_wanted(self, carrier: str) -> None:
        if self._dropped:
            raise Cancelled("the consumer restarted, or this engine is shutting down")
        when, why = self._failed.get(carrier, (0.0, ""))
        if why and time.monotonic() < when + RETRY_SECONDS:
            raise Unreachable(why)

    def _connect(self, carrier: GrantingCarrier, made: Future[Any], deadline: float) -> Any:
        begun = time.monotonic()
        try:
            endpoint = self.info.carriers.get(carrier.name)
            if endpoint is None:
                raise HandoverError("it named no endpoint")
            peer = carrier.connect(endpoint, deadline)
        except BaseException as raised:
            error: BaseException = raised
            if isinstance(raised, KvferryError):
                error = Unreachable(f"{carrier.name} does not reach the consumer: {raised}")
            in_haste = (
                isinstance(raised, DeadlineExceeded) and deadline - begun < CONNECT_SECONDS / 2
            )
            with self._lock:
                del self._peers[carrier.name]
                if isinstance(error, Unreachable) and not in_haste:
                    self._failed[carrier.name] = (time.monotonic(), str(error))
            made.set_exception(error)
            raise error from None
        with self._lock:
            dropped = self._dropped
            if dropped:
                del self._peers[carrier.name]
            else:
                made.set_result(peer)
        if dropped:
            error = Cancelled("the consumer restarted, or this engine is shutting down")
            made.set_exception(error)
            carrier.disconnect(peer)
            raise error
        return peer
