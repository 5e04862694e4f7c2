"""A producer rank that writes: consumers' blocks are filled from here, where they can be revoked.

A consumer rank introduces itself once (its engine, its layout, its carriers' endpoints), and then
offers blocks: a grant of its carrier, its block tables, how much it has already. What happens to an
offer, on a thread of its own:

    plan      the edge from this rank to that one, once; both sides compute it alike (`targets`)
    connect   by the carrier that the offer names, once; in a part of the offer's time (`targets`)
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
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvferry.errors import Cancelled, HandoverError, KvferryError
from kvferry.layout.model import CacheModel
from kvferry.layout.rank import RankLayout
from kvferry.p2p.incarnations import are_siblings
from kvferry.p2p.targets import Origin, Target, Unreachable, Unused
from kvferry.p2p.threads import Threads
from kvferry.p2p.transfers import await_transfer, end_transfers
from kvferry.p2p.watch import Watch
from kvferry.plan import Copies, bind
from kvferry.transport.base import Carrier, GrantingCarrier, Transfer, is_granting
from kvferry.wire.messages import EngineInfo, Offer, RankInfo, Reader, read_tables

log = logging.getLogger("kvferry")

PUSH_THREADS = 256  # started when needed
THREADS_PER_TARGET = 4  # at a time; as many transfers as a peer of the tcp carrier has
IDLE_SECONDS = 60.0  # without an offer, before connections are given back; plans are kept
MOST_TARGETS = 1024  # consumer ranks that are remembered; others introduce themselves again
TARGETS_BYTES = 256 << 20  # of what they told: 1,024 with 100 layers in 10 groups are 30 MB
MOST_PUSHES = 4096  # offers that are queued or under way
PUSHES_BYTES = 256 << 20  # of their tables, as for those that wait for holds
SLICE_DESCRIPTORS = 65_536  # bound at a time, so that no NumPy call takes long


@dataclass(frozen=True, slots=True)
class Pushed:
    bytes: int
    descriptors: int
    seconds: float  # of writing alone: not of the queue, nor of planning and connecting


Key = tuple[str, str, int, int]  # engine, incarnation, pp, tp


def key_of(reader: Reader) -> Key:
    return (reader.engine_id, reader.incarnation, reader.pp_rank, reader.tp_rank)


@dataclass(slots=True, eq=False)
class _Lane:
    """The way to one target: what is written to it, and what waits for that."""

    target: Target
    running: int = 0
    queue: deque[_Push] = field(default_factory=deque)  # empty, unless something runs
    used: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class _Push:
    lane: _Lane
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
        self._origin = Origin(engine, model, layout, optional_roles)
        self._bases = np.asarray(bases, dtype=np.int64)
        self._carriers: dict[str, GrantingCarrier] = {c.name: c for c in carriers if is_granting(c)}
        self._lock = threading.Lock()
        self._targets: OrderedDict[Key, _Lane] = OrderedDict()
        self._pushes: set[_Push] = set()
        self._pushes_bytes = self._targets_bytes = 0
        self._unused: list[Unused] = []
        self._threads = Threads("kvferry-push", PUSH_THREADS)
        self._next_tidy = time.monotonic() + IDLE_SECONDS
        self._closed = False

    @property
    def under_way(self) -> int:
        return len(self._pushes)

    def introduce(self, engine: EngineInfo, info: RankInfo) -> None:
        """Remember a consumer rank. A new incarnation of its engine voids the old one."""
        key = (engine.engine_id, engine.incarnation, info.pp_rank, info.tp_rank)
        target = Target.of(engine, info)
        with self._lock:
            known = self._targets.get(key)
            if self._closed or (known and known.target.is_like(target)):
                return
            void = [k for k in self._targets if k == key or _supersedes(key, k)]
            old = [self._targets.pop(k) for k in void]
            self._targets[key] = _Lane(target)
            self._targets_bytes += target.bytes - sum(lane.target.bytes for lane in old)
            while len(self._targets) > MOST_TARGETS or self._targets_bytes > TARGETS_BYTES:
                old.append(self._targets.popitem(last=False)[1])
                self._targets_bytes -= old[-1].target.bytes
        for lane in old:
            self._drop(lane)
        self._give_back_later()

    def can_serve(self, tokens: int, held: int) -> bool:
        """Whether a hold of so many tokens has what an offer of so many wants."""
        return tokens == held if self._origin.model.of_one_length else tokens <= held

    def knows(self, reader: Reader) -> bool:
        return key_of(reader) in self._targets

    def start(
        self,
        offer: Offer,
        tables: list[list[int]],
        patience_seconds: float,
        done: Callable[[Pushed | KvferryError], None],
    ) -> bool:
        """Write a hold's blocks; False: too many. `done` is called once, and must not wait."""
        watch = Watch(time.monotonic() + patience_seconds)
        with self._lock:
            lane = self._targets.get(key_of(offer.reader))
            full = self._pushes_bytes + len(offer.tables) > PUSHES_BYTES
            if self._closed or lane is None or len(self._pushes) >= MOST_PUSHES or full:
                return False
            push = _Push(lane, offer, tables, watch, done)
            self._targets.move_to_end(key_of(offer.reader))
            self._pushes.add(push)
            self._pushes_bytes += len(offer.tables)
            lane.queue.append(push)
            refused: KvferryError | None = None
            try:
                self._start_next(lane)
            except KvferryError as error:  # no thread at all: nothing runs, nothing else is queued
                refused = error
                lane.queue.clear()
                self._leave(push)
        if refused is not None:
            done(Unreachable(f"nothing can be written from here: {refused}"))
        return True

    def _leave(self, push: _Push) -> None:
        """With the lock held: a push has ended."""
        if push in self._pushes:
            self._pushes.remove(push)
            self._pushes_bytes -= len(push.offer.tables)

    def _start_next(self, lane: _Lane) -> None:
        """With the lock held: put a target's next push on a thread, if it may have one more."""
        lane.used = time.monotonic()
        if lane.queue and lane.running < THREADS_PER_TARGET and not self._closed:
            self._threads.submit(partial(self._run, lane.queue[0]))
            lane.queue.popleft()
            lane.running += 1

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
            for lane in self._targets.values():  # a push that comes now connects again
                if not lane.running and lane.used + IDLE_SECONDS <= now:
                    self._unused += lane.target.take_peers()
        self._give_back_later()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            lanes = list(self._targets.values())
            self._targets.clear()
            for push in self._pushes:
                push.watch.give_up()
        for lane in lanes:
            self._drop(lane)
        self._threads.close()
        self._give_back()

    # One push

    def _run(self, push: _Push) -> None:
        try:
            outcome: Pushed | KvferryError = self._write(push)
        except KvferryError as error:
            outcome = error
        except Exception as error:
            log.exception("writing hold %s failed", push.offer.hold_id)
            outcome = HandoverError(f"internal error: {error!r}")
        try:
            with self._lock:
                self._leave(push)
                push.lane.running -= 1
                self._start_next(push.lane)  # this thread, at least, can do it
        finally:
            push.done(outcome)

    def _write(self, push: _Push) -> Pushed:
        target, offer, watch = push.lane.target, push.offer, push.watch
        watch.require_wanted()
        carrier = self._carriers.get(offer.carrier)
        if carrier is None:
            raise Unreachable(f"this engine does not write by {offer.carrier!r}")
        edge = target.edge(self._origin)
        peer = target.peer(carrier, watch)
        bound = bind(
            edge.plan,
            tokens=offer.tokens,
            skip=offer.skip,
            src_tables=push.tables,
            dst_tables=read_tables(offer.tables),
            src_bases=self._bases,
            dst_bases=edge.bases,
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

    # Targets that are left

    def _drop(self, lane: _Lane) -> None:
        """Forget a target; what was queued for it ends here, what runs ends by itself."""
        with self._lock:
            orphans = list(lane.queue)
            lane.queue.clear()
            for push in orphans:
                self._leave(push)
            for push in self._pushes:
                if push.lane is lane:
                    push.watch.give_up()
            self._unused += lane.target.take_peers(drop=True)
        for push in orphans:
            push.done(Cancelled("the consumer restarted, or this engine is shutting down"))

    def _give_back_later(self) -> None:
        """On a thread that may wait for a peer to let go."""
        if self._closed or not self._unused:
            return
        try:
            self._threads.submit(self._give_back)
        except KvferryError as error:
            log.warning("connections that are not used are kept for now: %s", error)

    def _give_back(self) -> None:
        with self._lock:
            unused, self._unused = self._unused, []
        for one in unused:
            try:
                self._carriers[one.carrier].disconnect(one.peer)
            except Exception:  # nobody looks at what becomes of it
                log.exception("connections to %s were not given back", one.engine_id)


def _supersedes(new: Key, old: Key) -> bool:
    """Whether a rank's engine lives another life than before."""
    return new[0] == old[0] and new[1] != old[1] and not are_siblings(new[1], old[1])
