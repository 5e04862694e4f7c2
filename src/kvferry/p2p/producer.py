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

import logging
import threading
import time
from dataclasses import dataclass

import msgspec

from kvferry.errors import KvferryError
from kvferry.p2p.bell import Bell
from kvferry.p2p.budget import ENTRY_BYTES, kept_bytes
from kvferry.p2p.checksum import Summing, decode_runs, digest, named
from kvferry.p2p.deliveries import Deliveries, refuse_closed
from kvferry.p2p.directory import refuse_version
from kvferry.p2p.holds import Closed, Hold, HoldTable
from kvferry.p2p.push import Pushed, Pusher
from kvferry.p2p.server import Packed, Server, pack
from kvferry.p2p.stats import ProducerStats
from kvferry.transport.memory import Memory
from kvferry.wire.messages import (
    Claim,
    Claimed,
    Closing,
    Complete,
    Hello,
    Introduce,
    Introduced,
    Look,
    Offer,
    Refused,
    Renew,
    Renewed,
    ReplyBody,
    Request,
    Sum,
    Summed,
    refusal,
)
from kvferry.wire.sockets import Sockets

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
        bell: Bell | None = None,
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
        self._closed_lock, self._bell = threading.Lock(), bell or Bell()

    # Called by the engine

    def open_hold(
        self, hold_id: str, request_id: str, digest: str, tokens: int, tables: list[list[int]]
    ) -> None:
        """Make a request's blocks claimable. Its last kernels must have finished writing."""

        def work() -> None:
            now = time.monotonic()
            waited, closed = self._table.add(hold_id, request_id, digest, tokens, tables, now)
            for sender in waited:
                body = self._take_up(sender)
                if body is not None:
                    self.reply(sender.identity, sender.request_id, body)
            closed = closed or self._table.settle(hold_id)
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
        if claim.digest != hold.digest:
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
            hold.packed = pack(Claimed(hold.tokens, hold.tables))
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
