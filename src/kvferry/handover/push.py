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
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from kvferry.carriers.base import Carrier, GrantingCarrier, Transfer, is_granting
from kvferry.errors import Cancelled, DeadlineExceeded, HandoverError, KvferryError, StaleTicket
from kvferry.handover.deadline import Deadline, Stuck, await_transfer, end_for_good, end_transfers
from kvferry.handover.describe import (
    read_layout,
    read_model,
    read_shape,
    require_plannable,
    require_same_meaning,
)
from kvferry.handover.peers import Remote, Source
from kvferry.handover.stats import ConsumerTally
from kvferry.handover.ticket import are_siblings
from kvferry.layout.model import CacheModel
from kvferry.layout.placement import Ints, RankLayout
from kvferry.layout.shape import Rank
from kvferry.net.messages import (
    MOST_OFFERED_IDS,
    VERSION,
    Delivered,
    EngineInfo,
    Introduce,
    Offer,
    RankInfo,
    Reader,
    Refused,
    ReplyBody,
    pack_tables,
    read_tables,
)
from kvferry.net.rpc import Caller
from kvferry.net.server import ENTRY_BYTES
from kvferry.plan import Copies, EdgePlan, bind, plan_pair
from kvferry.plan.bind import landing
from kvferry.workers import Threads

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
    tables: Sequence[Sequence[int]]  # of the hold
    watch: Deadline
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
        tables: Sequence[Sequence[int]],
        patience_seconds: float,
        done: Callable[[Pushed | KvferryError], None],
    ) -> bool:
        """Write a hold's blocks; False: too many. `done` is called once, and must not wait."""
        watch = Deadline(time.monotonic() + patience_seconds)
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
            done(CannotWrite(f"nothing can be written from here: {refused}"))
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
            raise CannotWrite(f"this engine does not write by {offer.carrier!r}")
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


# --------------------------------------------------------------------------------------------------
# A consumer rank that a producer rank writes to: planned and connected to when first needed.
#
# A connection is made by the push that needs it first; others that come meanwhile wait for it, and
# can be given up. Making one takes a part of an offer's time and no more: where a firewall drops
# what we send, the consumer is told so while it can still read. For some seconds after that, others
# are told at once.
#
# A target is dropped when its engine restarted or this one ends. Nobody waits for a connection that
# is being made just then: whoever makes it gives it back.
# --------------------------------------------------------------------------------------------------

CONNECT_SECONDS = 2.0  # for a connection, where the offer has them: a lost packet is sent again
MOST_CONNECT_SECONDS = 10.0  # a peer that is reached at all is reached within these
RETRY_SECONDS = 30.0  # after a connection failed; until then, consumers read


class CannotWrite(HandoverError):
    """This rank cannot write to that consumer; it may read instead."""


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The rank that writes."""

    engine: EngineInfo
    model: CacheModel
    layout: RankLayout
    optional_roles: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class TargetEdge:
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
    _edge: TargetEdge | None = None
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

    def edge(self, origin: Origin) -> TargetEdge:
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
                self._edge = TargetEdge(plan, tuple(bases))
            return self._edge

    def peer(self, carrier: GrantingCarrier, watch: Deadline) -> Any:
        """The connection by this carrier. `Unreachable` comes while there is time to read."""
        now = time.monotonic()
        left = watch.deadline - now
        wait = min(max(CONNECT_SECONDS, left / 4), left / 2, MOST_CONNECT_SECONDS)
        patience = Deadline(now + wait, watch.given_up)
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
            except CannotWrite:  # if only because the other had less time, try ourselves
                continue
            except DeadlineExceeded:
                raise CannotWrite(f"{carrier.name} has not reached the consumer yet") from None

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
            raise CannotWrite(why)

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
                error = CannotWrite(f"{carrier.name} does not reach the consumer: {raised}")
            in_haste = (
                isinstance(raised, DeadlineExceeded) and deadline - begun < CONNECT_SECONDS / 2
            )
            with self._lock:
                del self._peers[carrier.name]
                if isinstance(error, CannotWrite) and not in_haste:
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


# --------------------------------------------------------------------------------------------------
# A consumer rank that lets producers write: it opens its blocks, and takes them back.
#
# For every source whose carrier can be revoked, a load opens a *grant* of exactly the bytes that
# the source's edge covers, and offers it. The source writes, and answers `delivered`; the load
# counts that source as done if as many bytes arrived here, under that grant, as the plan says, and
# as the source claims. Where a carrier cannot be revoked (same-host memory, CUDA IPC, RDMA) nothing
# is offered: the answer to a parked claim is the signal, and the consumer reads.
#
# Whatever happens, all grants of a load are closed before it is reported, by this side alone. A
# source that is stopped, gone or lying cannot write after that; its blocks may be used again.
#
#     source answers         the load
#     delivered              counts it, after its own count of bytes
#     refused: unable        claims and reads from that source instead
#     refused: unmet         introduces itself again, and offers once more
#     refused: anything else fails
#     nothing                fails at its deadline, or when the connection breaks
# --------------------------------------------------------------------------------------------------

CLOSE_GRANT_SECONDS = 5.0  # for a writer to leave; its connection is shut down, so it is at once
INTRODUCE_SECONDS = 10.0


@dataclass(slots=True, eq=False)
class _Offered:
    source: Source
    offer: Offer
    bytes: int  # that are due
    call: Future[ReplyBody]
    open: bool = True
    again: bool = False  # whether it was offered twice


@dataclass(frozen=True, slots=True)
class Arrived:
    """What sources wrote, and those that would rather be read."""

    bytes: int
    descriptors: int
    delivered: tuple[Source, ...]
    declined: tuple[Source, ...]
    write_seconds: float = 0.0  # of the source that wrote longest, as it says


@dataclass(frozen=True, slots=True, eq=False)
class WriteOffering:
    """How one consumer rank offers its blocks."""

    reader: Reader
    engine: EngineInfo
    info: RankInfo  # our own memory, as producers have to know it
    bases: Ints
    caller: Caller
    tally: ConsumerTally
    _introduced: set[tuple[str, str]] = field(default_factory=set)  # addresses, incarnations
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def takes(self, source: Source, tables: tuple[tuple[int, ...], ...]) -> bool:
        ids = sum(len(table) for table in tables)
        return source.plan is not None and is_granting(source.carrier) and ids <= MOST_OFFERED_IDS

    def introduce(self, source: Source) -> None:
        """Sent ahead of the offer on the same connection, so that nobody waits for its answer."""
        key = (source.address, source.incarnation)
        with self._lock:  # so that no other load's offer comes before it
            if key in self._introduced:
                return
            self._introduced.add(key)
            introduce = Introduce(VERSION, source.incarnation, self.engine, self.info)
            self.caller.call(source.address, introduce, time.monotonic() + INTRODUCE_SECONDS)

    def forget(self, source: Source) -> None:
        with self._lock:
            self._introduced.discard((source.address, source.incarnation))


class Offers:
    """The offers of one load. Close them, whatever happens."""

    def __init__(
        self,
        offering: WriteOffering,
        remote: Remote,
        stuck: Stuck,
    ) -> None:
        self._offering, self._remote, self._stuck = offering, remote, stuck
        self._offered: list[_Offered] = []

    @property
    def sources(self) -> set[Source]:
        return {one.source for one in self._offered}

    def open(
        self,
        *,
        hold_id: str,
        digest: str,
        tokens: int,
        skip: int,
        tables: tuple[tuple[int, ...], ...],
        keep_open: bool,
        watch: Deadline,
    ) -> None:
        """Open and offer what each source that can be revoked is to write."""
        offering = self._offering
        packed = pack_tables(tables)
        for source in self._remote.sources:
            carrier = source.carrier
            if not offering.takes(source, tables) or not is_granting(carrier):
                continue
            assert source.plan is not None
            land = landing(
                source.plan, tokens=tokens, skip=skip, dst_tables=tables, dst_bases=offering.bases
            )
            offer = Offer(
                VERSION,
                source.incarnation,
                hold_id,
                digest,
                offering.reader,
                source.readers,
                max(0.0, watch.deadline - time.monotonic()),
                carrier.name,
                carrier.open_grant(land.address, land.length),
                tokens,
                skip,
                packed,
                keep_open,
            )
            one = _Offered(source, offer, land.bytes, Future())
            self._offered.append(one)  # from here on it is closed, whatever happens
            self._call(one, watch)

    def arrive(self, watch: Deadline, answer: Callable[[Future[ReplyBody]], ReplyBody]) -> Arrived:
        """Wait until every source has written or declined; raise the first other answer."""
        waiting = list(self._offered)
        delivered: list[Source] = []
        declined: list[Source] = []
        moved = descriptors = 0
        seconds = 0.0
        while waiting:
            call = watch.first([one.call for one in waiting])
            one = next(one for one in waiting if one.call is call)
            reply = answer(call)
            if isinstance(reply, Refused) and reply.reason == "unmet" and not one.again:
                one.again = True
                self._offering.forget(one.source)
                self._call(one, watch)
                continue
            waiting.remove(one)
            if isinstance(reply, Refused) and reply.reason == "unable":
                log.info("rank %s is read: %s", tuple(one.source.rank), reply.message)
                self._close(one)
                declined.append(one.source)
                continue
            said = _delivered(one, reply)
            came = self._close(one)
            if not said.bytes == came == one.bytes or said.grant != one.offer.grant:
                raise HandoverError(
                    f"rank {tuple(one.source.rank)} says that it wrote {said.bytes} bytes, {came} "
                    f"arrived and {one.bytes} were due; what came is discarded"
                )
            moved, descriptors = moved + came, descriptors + said.descriptors
            seconds = max(seconds, said.write_seconds)
            delivered.append(one.source)
        return Arrived(moved, descriptors, tuple(delivered), tuple(declined), seconds)

    def close(self) -> None:
        """Take all grants back. No byte of any arrives after this returns."""
        for one in self._offered:
            if one.open:
                self._offering.tally.revoked()
                self._close(one)

    def _call(self, one: _Offered, watch: Deadline) -> None:
        self._offering.introduce(one.source)
        one.call = self._offering.caller.call(one.source.address, one.offer, watch.deadline)

    def _close(self, one: _Offered) -> int:
        """Bytes that came under a grant, when no more can."""
        carrier, came = one.source.carrier, 0
        assert is_granting(carrier)

        def end() -> bool:
            nonlocal came
            try:
                came = carrier.close_grant(one.offer.grant, CLOSE_GRANT_SECONDS)
            except DeadlineExceeded as error:
                log.error("a load that is over keeps its blocks: %s", error)
                return False
            return True

        end_for_good(end, self._stuck)
        one.open = False
        return came


def _delivered(one: _Offered, reply: ReplyBody) -> Delivered:
    who = f"rank {tuple(one.source.rank)}"
    if isinstance(reply, Refused):
        if reply.reason in ("stale", "closed", "expired"):
            raise StaleTicket(f"{who} refuses the offer: {reply.message}")
        raise HandoverError(f"{who} refuses the offer: {reply.message}")
    if not isinstance(reply, Delivered):
        raise HandoverError(f"{who} answered an offer with a {type(reply).__name__}")
    return reply
