# SPDX-License-Identifier: Apache-2.0
"""Push mode on a producer rank: it writes into blocks that consumer ranks offer, and can revoke.

A consumer rank introduces itself once (engine, layout, endpoints of its carriers). `Target` is what
this rank knows of it. Each of its offers (`load.Offers`) then runs on a thread of the `Pusher`:

    plan      the edge from this rank to that one, once; both sides compute the same
    connect   by the carrier that the offer names, once, within part of the offer's time
    bind      the hold's blocks to the offered ones
    write     in slices; the consumer checks each against the grant before it takes the bytes
    report    to the producer's server, which knows whether the hold was open all the time

A write ends early when the hold closes, when the consumer gives up, and when the consumer dies or
revokes its grant. One consumer rank gets few threads at a time, so that a stopped one does not
delay others. Its connections are closed when it has offered nothing for a while.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from kvferry.carriers.base import Carrier, GrantingCarrier, Transfer, is_granting
from kvferry.errors import Cancelled, DeadlineExceeded, HandoverError, KvferryError
from kvferry.handover.deadline import TRANSFER_LOOK_SECONDS, Deadline, await_transfer, end_transfers
from kvferry.handover.describe import (
    read_layout,
    read_model,
    read_shape,
    require_plannable,
    require_same_meaning,
)
from kvferry.handover.ticket import supersedes
from kvferry.layout.model import CacheModel
from kvferry.layout.placement import RankLayout
from kvferry.net.messages import EngineInfo, Offer, RankInfo, Reader, read_tables
from kvferry.net.server import ENTRY_BYTES
from kvferry.plan import EdgePlan, bind, plan_pair
from kvferry.workers import Threads

log = logging.getLogger("kvferry")

OPTIONAL_ROLES = frozenset({"draft"})  # layers of these roles may be missing on one side
PUSH_THREADS = 256  # started when needed
THREADS_PER_TARGET = 4  # at a time; a peer of the tcp carrier has as many transfers
IDLE_SECONDS = 60.0  # without an offer; then connections are closed, and plans are kept
MOST_TARGETS = 1024  # consumer ranks remembered; forgotten ones introduce themselves again
TARGETS_BYTES = 256 << 20  # for descriptions; 1,024 ranks of 100 layers in 10 groups need 30 MB
MOST_PUSHES = 4096  # offers queued or under way
PUSHES_BYTES = 256 << 20  # for the block tables of these offers
SLICE_DESCRIPTORS = 65_536  # bound at a time, so that no NumPy call takes long
FLYING = 2  # slices bound and under way at once: all of a long prompt's could take 500 MB
CONNECT_SECONDS = 2.0  # for a connection, if the offer allows: enough to resend a lost packet
MOST_CONNECT_SECONDS = 10.0  # a peer that can be reached is reached within this time
RETRY_SECONDS = 30.0  # after a failed connection; until then, consumers are told to read


@dataclass(frozen=True, slots=True)
class Pushed:
    bytes: int
    descriptors: int
    seconds: float  # spent on writing, without queueing, planning and connecting


class Pusher:
    """Writes for one producer rank. Any method, from any thread; no method waits."""

    def __init__(
        self,
        engine: EngineInfo,
        model: CacheModel,
        layout: RankLayout,
        bases: Sequence[int],
        carriers: Sequence[Carrier],
    ) -> None:
        self._engine, self._model, self._layout = engine, model, layout
        self._bases = np.asarray(bases, dtype=np.int64)
        self._carrier: GrantingCarrier | None = next(filter(is_granting, carriers), None)
        self._lock = threading.Lock()
        self._targets: OrderedDict[Reader, Target] = OrderedDict()
        self._pushes: set[_Push] = set()
        self._pushes_bytes = self._targets_bytes = 0
        self._threads = Threads("kvferry-push", PUSH_THREADS, per_lane=THREADS_PER_TARGET)
        self._next_tidy = time.monotonic() + IDLE_SECONDS
        self._closed = False

    def introduce(self, engine: EngineInfo, info: RankInfo) -> None:
        """Remember a consumer rank. A new incarnation of its engine voids the old one."""
        key = Reader(engine.engine_id, engine.incarnation, info.pp_rank, info.tp_rank)
        target = Target.of(engine, info)
        with self._lock:
            known = self._targets.get(key)
            if self._closed or (known and known.is_like(target)):
                return
            void = [
                k
                for k in self._targets
                if k == key
                or (k.engine_id == key.engine_id and supersedes(key.incarnation, k.incarnation))
            ]
            old = {self._targets.pop(k) for k in void}
            self._targets[key] = target
            self._targets_bytes += target.bytes - sum(one.bytes for one in old)
            while len(self._targets) > MOST_TARGETS or self._targets_bytes > TARGETS_BYTES:
                _, oldest = self._targets.popitem(last=False)
                self._targets_bytes -= oldest.bytes
                old.add(oldest)
            for push in self._pushes:
                if push.target in old:
                    push.watch.give_up()
        self._disconnect_later([one.take_peer(drop=True) for one in old])

    def can_serve(self, tokens: int, held: int) -> bool:
        """Whether a hold of `held` tokens can serve an offer for `tokens`."""
        return tokens == held if self._model.of_one_length else tokens <= held

    def knows(self, reader: Reader) -> bool:
        return reader in self._targets

    def start(
        self,
        offer: Offer,
        tables: Sequence[Sequence[int]],
        patience_seconds: float,
        done: Callable[[Pushed | KvferryError], None],
    ) -> bool:
        """Write a hold's blocks; False if too many writes wait. `done` is called once.

        `done` must not wait.
        """
        watch = Deadline(time.monotonic() + patience_seconds)
        with self._lock:
            target = self._targets.get(offer.reader)
            full = self._pushes_bytes + len(offer.tables) > PUSHES_BYTES
            if self._closed or target is None or len(self._pushes) >= MOST_PUSHES or full:
                return False
            push = _Push(target, offer, tables, watch, done)
            self._targets.move_to_end(offer.reader)
            self._pushes.add(push)
            self._pushes_bytes += len(offer.tables)
            target.used = time.monotonic()
        try:
            self._threads.submit(partial(self._run, push), lane=str(offer.reader))
        except KvferryError as error:
            self._leave(push)
            done(CannotWrite(f"nothing can be written from here: {error}"))
        return True

    def _leave(self, push: _Push) -> None:
        with self._lock:
            self._pushes.remove(push)
            self._pushes_bytes -= len(push.offer.tables)
            push.target.used = time.monotonic()

    def cancel(self, hold_id: str, reader: Reader | None = None) -> None:
        """Give up the writes of a hold, to one reader or to all."""
        with self._lock:
            for push in self._pushes:
                offer = push.offer
                if offer.hold_id == hold_id and (reader is None or offer.reader == reader):
                    push.watch.give_up()

    def tidy(self, now: float) -> None:
        """Close connections that were unused for a while. The server calls this now and then."""
        if now < self._next_tidy:
            return
        self._next_tidy = now + IDLE_SECONDS / 2
        with self._lock:
            if self._closed:
                return
            busy = {push.target for push in self._pushes}
            idle = [
                target
                for target in self._targets.values()
                if target not in busy and target.used + IDLE_SECONDS <= now
            ]
            unused = [one.take_peer() for one in idle]
        self._disconnect_later(unused)  # a later push connects again

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for push in self._pushes:
                push.watch.give_up()
            left = [one.take_peer(drop=True) for one in self._targets.values()]
            self._targets.clear()
        self._threads.close()
        self._disconnect(left)

    # One push

    def _run(self, push: _Push) -> None:
        try:
            outcome: Pushed | KvferryError = self._write(push)
        except KvferryError as error:
            outcome = error
        except Exception as error:
            log.exception("writing hold %s failed", push.offer.hold_id)
            outcome = HandoverError(f"internal error: {error!r}")
        self._leave(push)
        push.done(outcome)

    def _write(self, push: _Push) -> Pushed:
        target, offer, watch = push.target, push.offer, push.watch
        watch.require_wanted()
        carrier = self._carrier
        if carrier is None or carrier.name != offer.carrier:
            raise CannotWrite(f"this engine does not write by {offer.carrier!r}")
        plan, bases = target.plan(self._engine, self._model, self._layout)
        peer = target.peer(carrier, watch)
        bound = bind(
            plan,
            tokens=offer.tokens,
            skip=offer.skip,
            src_tables=push.tables,
            dst_tables=read_tables(offer.tables),
            src_bases=self._bases,
            dst_bases=bases,
        )
        transfers: list[Transfer] = []
        begun = time.monotonic()
        try:
            for piece in bound.slices(SLICE_DESCRIPTORS):
                watch.require_wanted()
                if len(transfers) >= FLYING:
                    await_transfer(transfers[-FLYING], watch)
                transfers.append(carrier.write_granted(peer, piece, offer.grant))
            for transfer in transfers:
                await_transfer(transfer, watch)
        except BaseException:
            end_transfers(transfers, contextlib.nullcontext)
            raise
        return Pushed(bound.bytes, bound.descriptors, time.monotonic() - begun)

    def _disconnect_later(self, peers: list[Any]) -> None:
        """Close connections on a push thread, because a peer may be slow to let go."""
        try:
            if any(peer is not None for peer in peers):
                self._threads.submit(partial(self._disconnect, peers))
        except KvferryError as error:
            log.warning("unused connections stay open until this engine ends: %s", error)

    def _disconnect(self, peers: list[Any]) -> None:
        for peer in peers:
            if peer is None or self._carrier is None:
                continue
            try:
                self._carrier.disconnect(peer)
            except Exception:  # no caller waits for the result
                log.exception("a connection of %s was not given back", self._carrier.name)


@dataclass(slots=True, eq=False)
class _Push:
    target: Target
    offer: Offer
    tables: Sequence[Sequence[int]]  # of the hold
    watch: Deadline
    done: Callable[[Pushed | KvferryError], None]


class CannotWrite(HandoverError):
    """This rank cannot write to that consumer. The consumer may read instead."""


@dataclass(slots=True, eq=False)
class Target:
    """A consumer rank that this rank writes to. Any method, from any thread.

    Its description stays encoded until it is needed. One push at a time connects; others wait for
    it. Connecting takes only part of an offer's time: if a firewall drops packets, the consumer
    learns it while it can still read. For some seconds after such a failure, pushes fail at once.

    A target is dropped when its engine has restarted or this engine shuts down. If a push is
    connecting at that moment, that push closes the new connection.
    """

    packed_engine: bytes
    packed_info: bytes
    used: float = field(default_factory=time.monotonic)  # when a push last began or ended
    _plan: tuple[EdgePlan, tuple[int, ...]] | None = None
    _planning: threading.Lock = field(default_factory=threading.Lock)
    _connecting: threading.Lock = field(default_factory=threading.Lock)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # never held while waiting
    _peer: Any = None  # the connection
    _failed: tuple[float, str] = (-math.inf, "")  # when it last failed to connect, and why
    _dropped: bool = False

    @classmethod
    def of(cls, engine: EngineInfo, info: RankInfo) -> Target:
        encode = msgspec.msgpack.encode
        return cls(encode(engine), encode(info))

    @property
    def info(self) -> RankInfo:
        return msgspec.msgpack.decode(self.packed_info, type=RankInfo)

    @property
    def bytes(self) -> int:
        return ENTRY_BYTES + len(self.packed_engine) + len(self.packed_info)

    def is_like(self, other: Target) -> bool:
        return (self.packed_engine, self.packed_info) == (other.packed_engine, other.packed_info)

    def plan(
        self, engine: EngineInfo, model: CacheModel, layout: RankLayout
    ) -> tuple[EdgePlan, tuple[int, ...]]:
        """The plan of what a rank with this layout writes there, and the addresses of the target's
        regions. Both sides compute the same plan."""
        with self._planning:
            if self._plan is None:
                theirs = msgspec.msgpack.decode(self.packed_engine, type=EngineInfo)
                require_same_meaning(engine, theirs)
                shape = read_shape(theirs)
                require_plannable(model, layout.shape, shape)
                pair = plan_pair(
                    model,
                    layout.shape,
                    shape,
                    dst_model=read_model(theirs),
                    optional_roles=OPTIONAL_ROLES,
                )
                there, bases = read_layout(self.info, shape)
                plan = pair.plan(pair.edge(layout.rank, there.rank), layout, there)
                self._plan = plan, tuple(bases)
            return self._plan

    def peer(self, carrier: GrantingCarrier, watch: Deadline) -> Any:
        """The connection. `CannotWrite` is raised while there is time to read."""
        left = watch.left
        wait = min(max(CONNECT_SECONDS, left / 4), left / 2, MOST_CONNECT_SECONDS)
        deadline = time.monotonic() + wait
        while not self._connecting.acquire(timeout=TRANSFER_LOOK_SECONDS):
            watch.require_wanted()
            if time.monotonic() >= deadline:
                raise CannotWrite(f"{carrier.name} has not reached the consumer yet")
        try:
            watch.require_wanted()
            with self._lock:
                self._require_not_dropped()
                if self._peer is not None:
                    return self._peer
            when, why = self._failed
            if time.monotonic() < when + RETRY_SECONDS:
                raise CannotWrite(why)
            return self._connect(carrier, deadline)
        finally:
            self._connecting.release()

    def take_peer(self, *, drop: bool = False) -> Any:
        """Remove and return the connection, if there is one; the caller closes it. `drop`: allow no
        new one."""
        with self._lock:
            self._dropped |= drop
            taken, self._peer = self._peer, None
        return taken

    def _require_not_dropped(self) -> None:
        if self._dropped:
            raise Cancelled("the consumer restarted, or this engine is shutting down")

    def _connect(self, carrier: GrantingCarrier, deadline: float) -> Any:
        in_haste = deadline - time.monotonic() < CONNECT_SECONDS / 2
        try:
            endpoint = self.info.carriers.get(carrier.name)
            if endpoint is None:
                raise HandoverError("it named no endpoint")
            peer = carrier.connect(endpoint, deadline)
        except KvferryError as error:
            why = f"{carrier.name} does not reach the consumer: {error}"
            if not (in_haste and isinstance(error, DeadlineExceeded)):
                self._failed = time.monotonic(), why
            raise CannotWrite(why) from None
        try:
            with self._lock:
                self._require_not_dropped()
                self._peer = peer
        except Cancelled:
            carrier.disconnect(peer)
            raise
        return peer
