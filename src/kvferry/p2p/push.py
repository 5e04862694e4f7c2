"""A producer rank that writes: consumers' blocks are filled from here, where they can be revoked.

A consumer rank introduces itself once (its engine, its layout, its carriers' endpoints), and then
offers blocks: a grant of its carrier, its block tables, how much it has already. What happens to an
offer, on a thread of its own:

    plan      the edge from this rank to that one, once; both sides compute it alike
    connect   by the carrier that the offer names, once
    bind      the hold's blocks to the offered ones
    write     in slices, under the grant; each is checked against it over there, before its bytes
    report    to the producer's server, which alone knows whether the hold was open all the time

A write ends early when the hold is closed, when the consumer gives up, and when the consumer takes
its grant back, which needs no word from here: this side may be stopped or gone. A consumer rank has
few threads at a time, so that one that is stopped does not hold up others; its connections are
given back when it has offered nothing for a while.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.errors import Cancelled, HandoverError, KvferryError
from kvferry.layout.model import CacheModel
from kvferry.layout.rank import RankLayout
from kvferry.layout.shape import Rank
from kvferry.p2p.describe import read_layout, read_model, read_shape, require_same_meaning
from kvferry.p2p.incarnations import are_siblings
from kvferry.p2p.transfers import await_transfer, end_transfers
from kvferry.p2p.watch import Watch
from kvferry.plan import Copies, EdgePlan, bind, plan_pair
from kvferry.transport.base import Carrier, GrantingCarrier, Transfer, is_granting
from kvferry.wire.messages import EngineInfo, Offer, RankInfo, Reader

log = logging.getLogger("kvferry")

PUSH_THREADS = 256  # started when needed
THREADS_PER_TARGET = 4  # at a time; as many transfers as a peer of the tcp carrier has
IDLE_SECONDS = 60.0  # without an offer, before connections are given back; plans are kept
MOST_TARGETS = 1024  # consumer ranks that are remembered; others introduce themselves again
MOST_PUSHES = 4096  # offers that are queued or under way
SLICE_DESCRIPTORS = 65_536  # bound at a time, so that no NumPy call takes long


class Unreachable(HandoverError):
    """This rank cannot write to that consumer; it may read instead."""


@dataclass(frozen=True, slots=True)
class Pushed:
    bytes: int
    descriptors: int
    seconds: float  # of writing alone: not of the queue, nor of planning and connecting


Key = tuple[str, str, int, int]  # engine, incarnation, pp, tp


def key_of(reader: Reader) -> Key:
    return (reader.engine_id, reader.incarnation, reader.pp_rank, reader.tp_rank)


@dataclass(slots=True, eq=False)
class _Target:
    """A consumer rank that introduced itself; planned and connected when first needed."""

    engine: EngineInfo
    info: RankInfo
    running: int = 0
    queue: deque[_Push] = field(default_factory=deque)
    used: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)
    plan: EdgePlan | None = None
    bases: tuple[int, ...] = ()
    peers: dict[str, Any] = field(default_factory=dict)  # by carrier


@dataclass(slots=True, eq=False)
class _Push:
    target: _Target
    offer: Offer
    tables: list[list[int]]  # of the hold
    watch: Watch
    done: Callable[[Pushed | KvferryError], None]


class Pusher:
    """Writes for one producer rank. Any method, from any thread; none waits."""

    def __init__(
        self,
        engine: EngineInfo,
        model: CacheModel,
        layout: RankLayout,
        bases: Sequence[int],
        carriers: Sequence[Carrier],
        optional_roles: frozenset[str] = frozenset({"draft"}),
    ) -> None:
        self._engine, self._model, self._layout = engine, model, layout
        self._bases = np.asarray(bases, dtype=np.int64)
        self._carriers: dict[str, GrantingCarrier] = {c.name: c for c in carriers if is_granting(c)}
        self._optional_roles = optional_roles
        self._lock = threading.Lock()
        self._targets: OrderedDict[Key, _Target] = OrderedDict()
        self._pushes: set[_Push] = set()
        self._threads = ThreadPoolExecutor(PUSH_THREADS, thread_name_prefix="kvferry-push")
        self._next_tidy = time.monotonic() + IDLE_SECONDS
        self._closed = False

    @property
    def under_way(self) -> int:
        return len(self._pushes)

    def introduce(self, engine: EngineInfo, info: RankInfo) -> None:
        """Remember a consumer rank. A new incarnation of its engine voids the old one."""
        key = (engine.engine_id, engine.incarnation, info.pp_rank, info.tp_rank)
        with self._lock:
            known = self._targets.get(key)
            if self._closed or (known and (known.engine, known.info) == (engine, info)):
                return
            void = [k for k in self._targets if k == key or _supersedes(key, k)]
            old = [self._targets.pop(k) for k in void]
            self._targets[key] = _Target(engine, info)
            while len(self._targets) > MOST_TARGETS:
                old.append(self._targets.popitem(last=False)[1])
        for target in old:
            self._drop(target)
            self._later(self._disconnect, target)

    def can_serve(self, tokens: int, held: int) -> bool:
        """Whether a hold of so many tokens has what an offer of so many wants."""
        return tokens == held if self._model.of_one_length else tokens <= held

    def knows(self, reader: Reader) -> bool:
        return key_of(reader) in self._targets

    def start(
        self,
        offer: Offer,
        tables: list[list[int]],
        patience_seconds: float,
        done: Callable[[Pushed | KvferryError], None],
    ) -> bool:
        """Write a hold's blocks; `done` is called once, from another thread. False: too many."""
        watch = Watch(time.monotonic() + patience_seconds)
        with self._lock:
            target = self._targets.get(key_of(offer.reader))
            if self._closed or target is None or len(self._pushes) >= MOST_PUSHES:
                return False
            push = _Push(target, offer, tables, watch, done)
            self._targets.move_to_end(key_of(offer.reader))
            self._pushes.add(push)
            target.queue.append(push)
            self._start_next(target)
        return True

    def _start_next(self, target: _Target) -> None:
        """With the lock held: put a target's next push on a thread, if it may have one more."""
        target.used = time.monotonic()
        if target.queue and target.running < THREADS_PER_TARGET and not self._closed:
            target.running += 1
            self._threads.submit(self._run, target.queue.popleft())

    def cancel(self, hold_id: str, reader: Reader | None = None) -> None:
        """Give up what is written of a hold, to one reader or to all."""
        with self._lock:
            for push in self._pushes:
                offer = push.offer
                if offer.hold_id == hold_id and (reader is None or offer.reader == reader):
                    push.watch.give_up()

    def tidy(self, now: float) -> None:
        """Give back connections that were not used for a while; called now and then."""
        if now < self._next_tidy:
            return
        self._next_tidy = now + IDLE_SECONDS / 2
        with self._lock:
            if self._closed:
                return
            for target in self._targets.values():
                if target.peers and not target.running and target.used + IDLE_SECONDS <= now:
                    self._later(self._retire, target)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            targets = list(self._targets.values())
            self._targets.clear()
            for push in self._pushes:
                push.watch.give_up()
        for target in targets:
            self._drop(target)
        self._threads.shutdown(wait=False)
        for target in targets:
            self._disconnect(target)

    # One push

    def _run(self, push: _Push) -> None:
        try:
            outcome: Pushed | KvferryError = self._write(push)
        except KvferryError as error:
            outcome = error
        except Exception as error:
            log.exception("writing hold %s failed", push.offer.hold_id)
            outcome = HandoverError(f"internal error: {error!r}")
        with self._lock:
            self._pushes.discard(push)
            push.target.running -= 1
            self._start_next(push.target)
        push.done(outcome)

    def _write(self, push: _Push) -> Pushed:
        target, offer, watch = push.target, push.offer, push.watch
        watch.require_wanted()
        carrier = self._carriers.get(offer.carrier)
        if carrier is None:
            raise Unreachable(f"this engine does not write by {offer.carrier!r}")
        plan = self._plan(target)
        peer = self._peer(target, carrier, watch)
        bound = bind(
            plan,
            tokens=offer.tokens,
            skip=offer.skip,
            src_tables=push.tables,
            dst_tables=offer.tables,
            src_bases=self._bases,
            dst_bases=target.bases,
        )
        transfers: list[Transfer] = []
        begun = time.monotonic()
        try:
            for piece in bound.slices(SLICE_DESCRIPTORS):
                watch.require_wanted()
                mine = Copies(piece.src.copy(), piece.dst.copy(), piece.length.copy())
                transfers.append(carrier.write_granted(peer, mine, offer.grant))
            for transfer in transfers:
                await_transfer(transfer, watch)
        except BaseException:
            end_transfers(transfers, contextlib.nullcontext)
            raise
        return Pushed(bound.bytes, bound.descriptors, time.monotonic() - begun)

    def _plan(self, target: _Target) -> EdgePlan:
        with target.lock:
            if target.plan is None:
                require_same_meaning(self._engine, target.engine)
                shape = read_shape(target.engine)
                pair = plan_pair(
                    self._model,
                    self._layout.shape,
                    shape,
                    dst_model=read_model(target.engine),
                    optional_roles=self._optional_roles,
                )
                layout, bases = read_layout(target.info, shape)
                rank = Rank(target.info.pp_rank, target.info.tp_rank)
                edge = pair.edge(self._layout.rank, rank)
                target.plan = pair.plan(edge, self._layout, layout)
                target.bases = tuple(bases)
            return target.plan

    def _peer(self, target: _Target, carrier: GrantingCarrier, watch: Watch) -> Any:
        with target.lock:
            if carrier.name not in target.peers:
                endpoint = target.info.carriers.get(carrier.name)
                if endpoint is None:
                    raise Unreachable(f"the consumer has no endpoint of {carrier.name!r}")
                try:
                    target.peers[carrier.name] = carrier.connect(endpoint, watch.deadline)
                except KvferryError as error:
                    raise Unreachable(
                        f"{carrier.name} does not reach the consumer: {error}"
                    ) from None
            return target.peers[carrier.name]

    def _drop(self, target: _Target) -> None:
        """Forget a target; what was queued for it ends here, what runs ends by itself."""
        with self._lock:
            orphans = list(target.queue)
            target.queue.clear()
            self._pushes.difference_update(orphans)
            for push in self._pushes:
                if push.target is target:
                    push.watch.give_up()
        for push in orphans:
            push.done(Cancelled("the consumer restarted, or this engine is shutting down"))

    def _later(self, action: Callable[[_Target], None], target: _Target) -> None:
        """On a thread that may wait: for a connection being made, or for a peer to let go."""

        def guarded() -> None:
            try:
                action(target)
            except Exception:  # nobody looks at what becomes of it
                log.exception("connections to %s were not given back", target.engine.engine_id)

        with contextlib.suppress(RuntimeError):  # closed meanwhile, which disconnects all
            self._threads.submit(guarded)

    def _retire(self, target: _Target) -> None:
        """Give idle connections back, unless a push came meanwhile."""
        with target.lock:
            with self._lock:
                if target.running or target.queue:
                    return
            peers, target.peers = target.peers, {}
        self._disconnect_all(peers)

    def _disconnect(self, target: _Target) -> None:
        with target.lock:
            peers, target.peers = target.peers, {}
        self._disconnect_all(peers)

    def _disconnect_all(self, peers: dict[str, Any]) -> None:
        for name, peer in peers.items():
            self._carriers[name].disconnect(peer)


def _supersedes(new: Key, old: Key) -> bool:
    """Whether a rank's engine lives another life than before."""
    return new[0] == old[0] and new[1] != old[1] and not are_siblings(new[1], old[1])
