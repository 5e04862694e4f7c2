"""A producer: the directory of an engine, and the rank that holds blocks for readers.

What happens when a request finishes prefill:

1. The scheduler issues a `Ticket` (engine, incarnation, an unguessable hold id, a digest of the
   prompt) into the response, and sends the hold with its blocks to all workers with the next step.
2. Each worker calls `ProducerRank.open_hold`. Claims that came earlier were parked, and are
   answered now; a claim of another incarnation or of a closed hold is refused at once.
3. Consumer ranks read the blocks by a carrier, without any help from here, and then each sends one
   last word. The answer says whether the hold was still open: only that makes a load count. Or they
   offer their own blocks, which are written from here (`deliveries`): then the answer to the offer
   is the last word, and it says `delivered` only if the hold was open until after the last byte.
4. When all readers have spoken, or the lease ran out, the hold is closed, and only then appears in
   `take_closed`, which the engine reports so that the blocks are freed.

When a consumer dies, its holds run out. When it stalls past the lease, the hold is closed before
the blocks are reused, and its last word is refused, so that it discards what it read. When this
process dies, consumers lose their connection; a new one has another incarnation, which voids old
tickets.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.carriers.host import Memory
from kvferry.errors import KvferryError
from kvferry.handover.checksum import Summing, decode_runs, digest, named
from kvferry.handover.describe import (
    read_model,
    read_shape,
    require_plannable,
    require_same_meaning,
)
from kvferry.handover.holds import Closed, Hold, HoldOrder, HoldTable, Why
from kvferry.handover.push import CannotWrite, Pushed, Pusher
from kvferry.handover.stats import ProducerStats
from kvferry.handover.wakeup import Wakeup
from kvferry.layout.model import require_same_cache
from kvferry.net.messages import (
    VERSION,
    Claim,
    Claimed,
    Closing,
    Complete,
    Delivered,
    EngineInfo,
    Hello,
    Introduce,
    Introduced,
    Look,
    Offer,
    RankInfo,
    Reader,
    Reason,
    Refused,
    Renew,
    Renewed,
    ReplyBody,
    Request,
    Seen,
    SeenRank,
    Sum,
    Summed,
    Welcome,
    refusal,
)
from kvferry.net.rpc import Sockets
from kvferry.net.server import ENTRY_BYTES, Packed, Server, kept_bytes, pack
from kvferry.plan.assign import assign

DEFAULT_LEASE_SECONDS = 60.0
MOST_PATIENCE_SECONDS = 600.0  # of claims and offers

log = logging.getLogger("kvferry")


@dataclass(frozen=True, slots=True)
class _Sender:
    """Where a parked claim is to be answered."""

    identity: bytes
    request_id: int
    claim: Claim | Offer
    until: float  # by our clock; parked or under way


class ProducerRank(Server):
    """The holds of one worker, and the thread that answers for them."""

    def __init__(
        self,
        sockets: Sockets,
        incarnation: str,
        *,
        host: str | None = None,
        port: int = 0,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        pusher: Pusher | None = None,
        memory: Memory | None = None,
        bell: Wakeup | None = None,
    ) -> None:
        """What the rank can do for consumers beside holding.

        `pusher` writes what they offer; without one, they are told to read. `memory`: what
        checksums are made of; without it, readers that ask are refused. `bell`: rung when a hold
        has closed.
        """
        super().__init__(sockets, host, port, "kvferry-producer")
        self._summing = Summing(memory) if memory is not None else None
        self.incarnation = incarnation
        self._table: HoldTable[_Sender] = HoldTable(lease_seconds)
        self._deliveries = Deliveries(pusher, self._table, self.counters, self._report)
        self._closed: list[Closed] = []
        self._closed_lock, self._bell = threading.Lock(), bell or Wakeup()

    # Called by the engine

    def open_hold(self, order: HoldOrder) -> None:
        """Make a request's blocks claimable. Its last kernels must have finished writing."""

        def work() -> None:
            waited, closed = self._table.add(order, time.monotonic())
            for sender in waited:
                body = self._take_up(sender)
                if body is not None:
                    self.reply(sender.identity, sender.request_id, body)
            closed = closed or self._table.settle(order.hold_id)
            if closed is not None:
                self._report(closed)

        self.submit(work)

    def withdraw(self, hold_id: str) -> None:
        """Close a hold now, or when it arrives: its request was aborted, or preempted."""

        def work() -> None:
            closed, waited = self._table.withdraw(hold_id)
            if closed is not None:
                self._report(closed)
            for sender in waited:
                self.reply(sender.identity, sender.request_id, refuse_closed("withdrawn"))

        self.submit(work)

    def reset(self, incarnation: str) -> None:
        """Be another one from now on: all holds are withdrawn, all tickets are void."""

        def work() -> None:
            self.incarnation = incarnation
            for hold_id in list(self._table.open):
                closed, _ = self._table.withdraw(hold_id)
                if closed is not None:
                    self._report(closed)
            for sender in self._table.unpark_all():  # their holds will have other ids
                self.reply(sender.identity, sender.request_id, refuse_closed("withdrawn"))

        self.submit(work)

    def take_closed(self) -> list[Closed]:
        """Holds closed since the last call, each exactly once. Safe from any thread."""
        with self._closed_lock:
            closed, self._closed = self._closed, []
        return closed

    def stats(self) -> ProducerStats:
        """What this rank holds, and how its holds ended. Safe from any thread."""
        return ProducerStats(
            holds_open=len(self._table.open),
            parked=self._table.parked,
            holds_delivered=self.counters["closed: delivered"],
            holds_failed=self.counters["closed: failed"],
            holds_expired=self.counters["closed: expired"],
            holds_withdrawn=self.counters["closed: withdrawn"],
            claims=self.counters["claims"],
            pushes_now=self._deliveries.under_way,
            pushes_done=self.counters["pushes done"],
            pushes_failed=self.counters["pushes failed"],
            bytes_pushed=self.counters["bytes pushed"],
        )

    @property
    def open_holds(self) -> int:
        return len(self._table.open)

    @property
    def parked_claims(self) -> int:
        return self._table.parked

    # Called by the server's thread

    def answer(self, sender: bytes, request: Request) -> ReplyBody | Packed | None:
        body = request.body
        if isinstance(body, Hello | Look):
            return Refused("malformed", "this is a rank; the directory answers a hello")
        refused = refuse_version(body.version)
        if refused is not None:
            return refused
        if body.incarnation != self.incarnation:
            return Refused(
                "stale", "the ticket is from before this engine restarted; prefill again"
            )
        match body:
            case Claim() | Offer():
                if isinstance(body, Offer):  # without the frame, which may be longer
                    body = msgspec.structs.replace(body, tables=body.tables.copy())
                until = time.monotonic() + min(body.patience_seconds, MOST_PATIENCE_SECONDS)
                return self._claim(_Sender(sender, request.id, body, until))
            case Introduce():
                self._deliveries.introduce(body)
                return Introduced()
            case Complete():
                return self._complete(body)
            case Sum():
                return self._sum(sender, request.id, body)
            case Renew():
                now = time.monotonic()
                found = {h: self._table.find(h, now) for h in body.hold_ids}
                return Renewed(
                    [h for h, hold in found.items() if isinstance(hold, Hold)],
                    [h for h, hold in found.items() if isinstance(hold, str)],
                )

    def _claim(self, sender: _Sender) -> ReplyBody | Packed | None:
        """Answer a claim or an offer now, or park it until its hold arrives."""
        if self._table.find(sender.claim.hold_id, time.monotonic()) is None:
            return self._park(sender)
        return self._take_up(sender)

    def _take_up(self, sender: _Sender) -> ReplyBody | Packed | None:
        """The answer about a hold that is known; None where a push has begun."""
        claim = sender.claim
        hold = self._table.find(claim.hold_id, time.monotonic())
        if not isinstance(hold, Hold):
            return refuse_closed(hold or "withdrawn")
        if claim.digest != hold.order.digest:
            return Refused(
                "digest", "the ticket is for another prompt than the request it came with"
            )
        if isinstance(claim, Offer):
            refused = self._deliveries.refuse(claim, hold)
            if refused is not None:
                return refused
        if not hold.announce(claim.reader, claim.readers):
            return Refused("busy", "too many engines read this hold, or this rank's holds")
        self.counters["claims"] += 1
        if isinstance(claim, Offer):
            return self._push(sender, claim, hold)
        if hold.packed is None:  # all replies that wait for readers share this one copy
            hold.packed = pack(Claimed(hold.order.tokens, [list(ids) for ids in hold.order.tables]))
        packed: Packed = hold.packed
        return packed

    def _park(self, sender: _Sender) -> ReplyBody | None:
        if not sender.claim.patience_seconds > 0:  # nor NaN
            return Refused("expired", "the hold has not arrived, and the claim does not wait")
        if not self._table.park(
            sender.claim.hold_id,
            sender,
            sender.until,
            bytes_=kept_bytes(sender.claim),
            sender=sender.identity,
        ):
            return Refused("busy", "too many claims wait for holds that have not arrived")
        self.counters["parked"] += 1
        return None

    # Offers

    def _push(self, sender: _Sender, offer: Offer, hold: Hold) -> ReplyBody | None:
        """Have the offered blocks written; the answer comes when they are."""

        def done(outcome: Pushed | KvferryError) -> None:
            self.submit(lambda: self._pushed(sender, offer, outcome))

        return self._deliveries.start(offer, hold, sender.until - time.monotonic(), done)

    def _pushed(self, sender: _Sender, offer: Offer, outcome: Pushed | KvferryError) -> None:
        self.reply(sender.identity, sender.request_id, self._deliveries.ended(offer, outcome))

    def _complete(self, last: Complete) -> ReplyBody:
        was_open, closed = self._table.last_word(
            last.hold_id, last.reader, last.readers, last.outcome, time.monotonic()
        )
        self.counters[f"last words: {last.outcome}"] += 1
        self._deliveries.cancel(last.hold_id, last.reader)  # it wants nothing any more
        if closed is not None:
            self._report(closed)
        return Closing(was_open)

    def _sum(self, sender: bytes, request_id: int, asked: Sum) -> ReplyBody | None:
        """Checked here, made on the other thread, answered from here again."""
        if self._summing is None:
            return Refused("malformed", "this rank makes no checksums")
        algorithm = named(asked.algorithm, self._summing.memory)
        address, length = decode_runs(asked.runs, algorithm)
        hold = self._table.find(asked.hold_id, time.monotonic())
        if not isinstance(hold, Hold):
            return refuse_closed(hold or "withdrawn")

        hold_id = asked.hold_id  # so that the frame's runs are not kept a second time

        def work(memory: Memory) -> None:
            reply: ReplyBody
            try:
                reply = Summed(digest(memory, address, length, algorithm))
            except KvferryError as error:  # a run outside of the registered memory
                reply = refusal("malformed", error)
            except Exception as error:  # the reader waits: it is told, whatever it was
                self.complain("sum", "a checksum could not be made: %.200r", error)
                reply = refusal("busy", f"the checksum could not be made: {error!r}")
            self.submit(lambda: self._summed(sender, request_id, hold_id, reply))

        kept = ENTRY_BYTES + address.nbytes + length.nbytes
        if not self._summing.submit(work, kept, sender):
            return Refused("busy", "too many checksums wait to be made")
        return None

    def _summed(self, sender: bytes, request_id: int, hold_id: str, reply: ReplyBody) -> None:
        hold = self._table.find(hold_id, time.monotonic())
        if not isinstance(hold, Hold):  # the bytes may be another request's by now
            reply = refuse_closed(hold or "withdrawn")
        self.counters["sums" if isinstance(reply, Summed) else "refused sums"] += 1
        self.reply(sender, request_id, reply)

    def tick(self, now: float) -> None:
        self._deliveries.tidy(now)
        closed, impatient = self._table.expire(now)
        for one in closed:
            self._report(one)
        for sender in impatient:
            self.reply(
                sender.identity,
                sender.request_id,
                Refused("expired", "the hold did not arrive while the claim could wait"),
            )

    def next_deadline(self) -> float | None:
        return self._table.next_deadline()

    def close(self) -> None:
        self._deliveries.close()
        super().close()
        if self._summing is not None:
            self._summing.close()

    def _report(self, closed: Closed) -> None:
        self.counters[f"closed: {closed.why}"] += 1
        self._deliveries.cancel(closed.hold_id)  # its blocks are about to be used again
        with self._closed_lock:
            self._closed.append(closed)
        self._bell.ring()


# --------------------------------------------------------------------------------------------------
# An engine's directory: tells consumers who its ranks are; runs beside the scheduler.
#
# A consumer says `hello` once per incarnation and is told all ranks, or refused with the reason:
# another version, another model, bytes that mean something else. What the consumer would refuse is
# refused here too, so that both logs say it. A doctor may `look` without being judged.
# --------------------------------------------------------------------------------------------------

MOST_JUDGED = 256  # verdicts about consumers that the directory remembers
# What a connection may have of this thread for judging, in a minute. An engine is judged once, in
# some milliseconds; one that describes itself anew all the time is told to ask again.
JUDGING_SECONDS = 1.0
JUDGING_PERIOD_SECONDS = 60.0


def refuse_version(version: int) -> Refused | None:
    if version == VERSION:
        return None
    return Refused(
        "version",
        f"the peer speaks version {version}, this engine {VERSION}; run the same kvferry on both",
    )


class Directory(Server):
    """Tells consumers who the engine's ranks are; runs beside the scheduler."""

    def __init__(
        self,
        sockets: Sockets,
        engine: EngineInfo | None = None,
        *,
        host: str | None = None,
        port: int = 0,
    ) -> None:
        super().__init__(sockets, host, port, "kvferry-directory")
        self.engine = engine  # None: not described yet; callers ask again
        self._ranks: list[RankInfo] = []
        self._welcome: Packed | None = None
        self._judged: OrderedDict[bytes, Refused | None] = OrderedDict()
        self._judging: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # since when, spent

    def set_ranks(self, ranks: list[RankInfo]) -> None:
        """All workers' own descriptions, of all stages."""

        def work() -> None:
            self._ranks, self._welcome = list(ranks), None

        self.submit(work)

    def set_engine(self, engine: EngineInfo, ranks: list[RankInfo]) -> None:
        """Who the engine is, from now on: its first description, or a new incarnation."""

        def work() -> None:
            self.engine, self._ranks, self._welcome = engine, list(ranks), None
            self._judged.clear()

        self.submit(work)

    def answer(self, sender: bytes, request: Request) -> ReplyBody | Packed | None:
        body = request.body
        if not isinstance(body, Hello | Look):
            return Refused("malformed", "this is the directory; it answers only a hello")
        refused = refuse_version(body.version)
        if refused is None and self.engine is None:
            refused = Refused("busy", "this engine has not described itself yet; ask again")
        if refused is None and isinstance(body, Hello):
            refused = self._verdict(sender, body.engine)
        if refused is not None or self.engine is None:
            return refused
        if isinstance(body, Look):
            return self._seen(self.engine)
        if self._welcome is None:
            self._welcome = pack(Welcome(self.engine, self._ranks))
        return self._welcome

    def _seen(self, us: EngineInfo) -> Seen:
        ranks = [SeenRank(r.pp_rank, r.tp_rank, r.address, r.carriers) for r in self._ranks]
        return Seen(us.engine_id, us.incarnation, us.model, us.shape, ranks)

    def _verdict(self, sender: bytes, consumer: EngineInfo) -> Refused | None:
        """Judge a description once; all ranks of an engine send the same."""
        key = hashlib.sha256(msgspec.msgpack.encode(consumer)).digest()
        if key not in self._judged:
            begun = time.monotonic()
            since, spent = self._judging.get(sender, (begun, 0.0))
            if since + JUDGING_PERIOD_SECONDS <= begun:
                since, spent = begun, 0.0
            if spent > JUDGING_SECONDS:
                return Refused("busy", "this peer describes itself too often; ask again later")
            verdict = self._judged[key] = self._judge(consumer)
            if verdict is not None:
                who = f"{consumer.engine_id:.80}"
                self.complain(who, "engine %r is refused: %.2000s", who, verdict.message)
            self._judging[sender] = since, spent + time.monotonic() - begun
            for memory in (self._judged, self._judging):
                while len(memory) > MOST_JUDGED:
                    memory.popitem(last=False)
        self._judged.move_to_end(key)
        return self._judged[key]

    def _judge(self, consumer: EngineInfo) -> Refused | None:
        """Refuse here what the consumer would refuse, so that both logs say it."""
        assert self.engine is not None
        try:
            require_same_meaning(self.engine, consumer)
            ours, theirs = read_model(self.engine), read_model(consumer)
            require_same_cache(ours, theirs, frozenset({"draft"}))
            shapes = read_shape(self.engine), read_shape(consumer)
            require_plannable(ours, *shapes)
            assign(ours, *shapes)
        except KvferryError as error:
            return refusal("model", error)
        return None


# --------------------------------------------------------------------------------------------------
# What a producer rank makes of offers: who may be written to, and whether a write has counted.
#
# The `Pusher` writes, on threads of its own, and knows nothing of holds. Here, on the server's
# thread, is what surrounds it:
#
#     an offer comes    a rank that cannot write does not know the consumer, or holds something else
#                        than the offer asks for, refuses; else the write begins, or is queued
#     a write has ended it counts only if its hold is open still, after the last byte; unless others
#                        share the ticket, that is the reader's last word, and may close the hold
#     a hold is closed   what is being written of it is given up: its blocks will be used again
# --------------------------------------------------------------------------------------------------


def refuse_closed(why: Why) -> Refused:
    return Refused("closed", f"the hold is closed ({why}); prefill again")


class Deliveries:
    """Of one rank, for its server's thread alone; without a pusher, offers are refused."""

    def __init__(
        self,
        pusher: Pusher | None,
        table: HoldTable[Any],
        counters: Counter[str],
        report: Callable[[Closed], None],
    ) -> None:
        self.pusher, self._table, self._counters, self._report = pusher, table, counters, report

    @property
    def under_way(self) -> int:
        return self.pusher.under_way if self.pusher else 0

    def introduce(self, body: Introduce) -> None:
        if self.pusher is not None:
            self.pusher.introduce(body.engine, body.rank)

    def refuse(self, offer: Offer, hold: Hold) -> Refused | None:
        """Why an offer cannot be taken; None where it can."""
        if self.pusher is None:
            return Refused("unable", "this engine writes nothing; read")
        if not self.pusher.knows(offer.reader):
            return Refused("unmet", "a rank offers its blocks, but has not introduced itself")
        if not self.pusher.can_serve(offer.tokens, hold.order.tokens):
            return Refused(
                "digest",
                f"the ticket promises {offer.tokens} tokens, this rank holds {hold.order.tokens}",
            )
        return None

    def start(
        self,
        offer: Offer,
        hold: Hold,
        patience_seconds: float,
        done: Callable[[Pushed | KvferryError], None],
    ) -> Refused | None:
        """Have the offered blocks written; `done` is called from another thread.

        `patience_seconds` is what is left of the offer's: it may have been parked for most of them.
        """
        if not patience_seconds > 0:  # nor NaN
            return Refused("expired", "the offer has no time left")
        assert self.pusher is not None  # it was not refused
        if not self.pusher.start(offer, hold.order.tables, patience_seconds, done):
            return Refused("busy", "too many offers wait to be written")
        return None

    def ended(self, offer: Offer, outcome: Pushed | KvferryError) -> Delivered | Refused:
        """A write has ended; what its reader is told."""
        body: Delivered | Refused
        if isinstance(outcome, KvferryError):
            reason: Reason = "unable" if isinstance(outcome, CannotWrite) else "transfer"
            body = refusal(reason, f"{type(outcome).__name__}: {outcome}")
        elif not self._still_open(offer):
            why = self._table.find(offer.hold_id, time.monotonic())
            body = refuse_closed(why if isinstance(why, str) else "withdrawn")
        else:
            body = Delivered(offer.grant, outcome.bytes, outcome.descriptors, outcome.seconds)
            self._counters["bytes pushed"] += outcome.bytes
        self._counters["pushes done" if isinstance(body, Delivered) else "pushes failed"] += 1
        return body

    def _still_open(self, offer: Offer) -> bool:
        now = time.monotonic()
        if offer.keep_open:
            return isinstance(self._table.find(offer.hold_id, now), Hold)
        was_open, closed = self._table.last_word(
            offer.hold_id, offer.reader, offer.readers, "done", now
        )
        self._counters["last words: done"] += was_open
        if closed is not None:
            self._report(closed)
        return was_open

    def cancel(self, hold_id: str, reader: Reader | None = None) -> None:
        """Give up what is written of a hold, to one reader or to all."""
        if self.pusher is not None:
            self.pusher.cancel(hold_id, reader)

    def tidy(self, now: float) -> None:
        if self.pusher is not None:
            self.pusher.tidy(now)

    def close(self) -> None:
        if self.pusher is not None:
            self.pusher.close()
