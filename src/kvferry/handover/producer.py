# SPDX-License-Identifier: Apache-2.0
"""The producer: a rank that holds blocks for readers, and its engine's directory.

What happens when a request finishes prefill:

1. The scheduler puts a `Ticket` into the response: engine, incarnation, an unguessable hold id and
   a digest of the prompt. With the next step it sends the hold and its blocks to all workers.
2. Each worker calls `ProducerRank.open_hold`. The rank then answers claims that came earlier and
   were parked. It refuses claims of another incarnation or of a closed hold at once.
3. Consumer ranks read the blocks by a carrier, without help from this process. Each then sends one
   last word. The answer says whether the hold was still open; only then does the load count.
   In push mode, a consumer rank offers its own blocks instead and this rank's `Pusher` writes them.
   Its answer to the offer then stands for the last word: it is `Delivered` only if the hold was
   open until after the last byte.
4. The rank closes the hold when all readers have spoken, or when the lease has run out. Only then
   does the hold appear in `take_closed`. The engine reports it, and vLLM frees the blocks.

What happens when something fails:

    a decode engine dies in    no renewal and no last word comes; the hold closes as "expired", and
    the middle of a load       its blocks are freed. A write to that engine ends when its connection
                               breaks, or when the hold closes
    a consumer stalls longer   the hold closes before its blocks are reused; the late last word is
    than the lease             refused, and the consumer discards what it read
    this process dies          consumers lose their connections and fail their loads; the next
                               process has a new incarnation, which voids the old tickets
    this process stalls        consumers' loads fail at their deadlines
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

import msgspec

from kvferry.carriers.base import Memory
from kvferry.errors import KvferryError
from kvferry.handover.checksum import Summing, decode_runs, digest, named
from kvferry.handover.holds import DEFAULT_LEASE_SECONDS, Closed, Hold, HoldOrder, HoldTable, Why
from kvferry.handover.push import CannotWrite, Pushed, Pusher
from kvferry.handover.wakeup import Wakeup
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

MOST_PATIENCE_SECONDS = 600.0  # for parked claims and offers

log = logging.getLogger("kvferry")


@dataclass(frozen=True, slots=True)
class _Sender:
    """Where to send the answer to a claim or an offer that waits."""

    identity: bytes
    request_id: int
    claim: Claim | Offer
    until: float  # by this rank's clock


class ProducerRank(Server):
    """The holds of one worker, and the thread that answers for them.

    The `Pusher` writes on its own threads and knows nothing about holds. This rank's thread decides
    which offers are written, and which writes count:

        an offer comes     refused if this rank has no pusher, does not know the consumer, or holds
                           other tokens than the offer wants; otherwise the write begins or queues
        a write has ended  it counts only if the hold is still open. It is also the reader's last
                           word and may close the hold, unless other requests share the ticket
        a hold closes      its writes are given up, because its blocks will be reused
    """

    def __init__(
        self,
        sockets: Sockets,
        incarnation: str,
        *,
        host: str | None = None,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        pusher: Pusher | None = None,
        memory: Memory | None = None,
        wakeup: Wakeup | None = None,
    ) -> None:
        """`pusher` writes to offered blocks; without one, consumers are told to read.

        `memory` is what checksums cover; without it, requests for checksums are refused. `wakeup`
        is rung when a hold has closed.
        """
        super().__init__(sockets, host, 0, "kvferry-producer")
        self._summing = Summing(memory) if memory is not None else None
        self.incarnation = incarnation
        self._table: HoldTable[_Sender] = HoldTable(lease_seconds)
        self._pusher = pusher
        self._closed: list[Closed] = []
        self._closed_lock, self._wakeup = threading.Lock(), wakeup or Wakeup()

    # Called by the engine

    def open_hold(self, order: HoldOrder) -> None:
        """Open a hold. The kernels that write its blocks must have finished."""

        def work() -> None:
            waited, closed = self._table.add(order, time.monotonic())
            for sender in waited:
                body = self._take_up(sender)
                if body is not None:
                    self.reply(sender.identity, sender.request_id, body)
            self._report(closed or self._table.settle(order.hold_id))

        self.submit(work)

    def withdraw(self, hold_id: str) -> None:
        """Close a hold now, or when it arrives. The request was aborted or is not held."""

        def work() -> None:
            closed, waited = self._table.withdraw(hold_id)
            self._report(closed)
            self._refuse_all(waited, refuse_closed("withdrawn"))

        self.submit(work)

    def reset(self, incarnation: str) -> None:
        """Start a new incarnation: withdraw all holds, and void all tickets."""

        def work() -> None:
            self.incarnation = incarnation
            for hold_id in list(self._table.open):
                self._report(self._table.withdraw(hold_id)[0])
            # The holds that these claims wait for will have other ids.
            self._refuse_all(self._table.unpark_all(), refuse_closed("withdrawn"))

        self.submit(work)

    def take_closed(self) -> list[Closed]:
        """Holds closed since the last call, each exactly once. Safe from any thread."""
        with self._closed_lock:
            closed, self._closed = self._closed, []
        return closed

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
                if isinstance(body, Offer):  # a copy, so that the frame's bytes are not kept
                    body = msgspec.structs.replace(body, tables=body.tables.copy())
                until = time.monotonic() + min(body.patience_seconds, MOST_PATIENCE_SECONDS)
                asked = _Sender(sender, request.id, body, until)
                arrived = self._table.find(body.hold_id) is not None
                return self._take_up(asked) if arrived else self._park(asked)
            case Introduce():
                if self._pusher is not None:
                    self._pusher.introduce(body.engine, body.rank)
                return Introduced()
            case Complete():
                return self._complete(body)
            case Sum():
                return self._sum(sender, request.id, body)
            case Renew():
                now = time.monotonic()
                found = {h: self._table.renew(h, now) for h in body.hold_ids}
                return Renewed(
                    [h for h, hold in found.items() if isinstance(hold, Hold)],
                    [h for h, hold in found.items() if isinstance(hold, str)],
                )

    def _take_up(self, sender: _Sender) -> ReplyBody | Packed | None:
        """Answer a claim or an offer whose hold has arrived. None: a write has begun."""
        claim = sender.claim
        hold = self._table.renew(claim.hold_id, time.monotonic())
        if not isinstance(hold, Hold):
            return refuse_closed(hold)
        if claim.digest != hold.order.digest:
            return Refused(
                "digest", "the ticket is for another prompt than the request it came with"
            )
        refused = self._refuse(claim, hold) if isinstance(claim, Offer) else None
        if refused is not None:
            return refused
        if not hold.announce(claim.reader, claim.readers):
            return Refused("busy", "too many engines read this hold")
        if isinstance(claim, Offer):
            return self._push(sender, claim, hold)
        if hold.packed is None:  # all replies that wait for readers share this one copy
            hold.packed = pack(Claimed(hold.order.tokens, [list(ids) for ids in hold.order.tables]))
        packed: Packed = hold.packed
        return packed

    def _park(self, sender: _Sender) -> ReplyBody | None:
        """Let a claim or an offer wait until its hold arrives."""
        if not sender.claim.patience_seconds > 0:  # also refuses NaN
            return Refused("expired", "the hold has not arrived, and the claim does not wait")
        if not self._table.park(
            sender.claim.hold_id,
            sender,
            sender.until,
            bytes_=kept_bytes(sender.claim),
            sender=sender.identity,
        ):
            return Refused("busy", "too many claims wait for holds that have not arrived")
        return None

    def _refuse(self, offer: Offer, hold: Hold) -> Refused | None:
        """Why the offer is refused, or None."""
        if self._pusher is None:
            return Refused("unable", "this engine writes nothing; read")
        if not self._pusher.knows(offer.reader):
            return Refused("unmet", "a rank offers its blocks, but has not introduced itself")
        if not self._pusher.can_serve(offer.tokens, hold.order.tokens):
            return Refused(
                "digest",
                f"the ticket promises {offer.tokens} tokens, this rank holds {hold.order.tokens}",
            )
        return None

    def _push(self, sender: _Sender, offer: Offer, hold: Hold) -> Refused | None:
        """Write to the offered blocks. The answer follows when the write has ended."""
        patience = sender.until - time.monotonic()  # the offer may have been parked before
        if not patience > 0:  # also refuses NaN
            return Refused("expired", "the offer has no time left")

        def done(outcome: Pushed | KvferryError) -> None:
            def answer() -> None:
                self.reply(sender.identity, sender.request_id, self._pushed(offer, outcome))

            self.submit(answer)

        assert self._pusher is not None  # the offer was not refused
        if not self._pusher.start(offer, hold.order.tables, patience, done):
            return Refused("unable", "too many offers wait to be written; read")
        return None

    def _pushed(self, offer: Offer, outcome: Pushed | KvferryError) -> Delivered | Refused:
        """Count a write that has ended. Returns the answer to its reader."""
        body: Delivered | Refused
        hold = self._table.find(offer.hold_id)
        if not isinstance(hold, Hold):  # another request may have overwritten the bytes
            body = refuse_closed(hold)
        elif isinstance(outcome, KvferryError):
            reason: Reason = "unable" if isinstance(outcome, CannotWrite) else "transfer"
            body = refusal(reason, str(outcome))
        else:
            self._delivered(offer)
            body = Delivered(offer.grant, outcome.bytes, outcome.descriptors, outcome.seconds)
        self.counters["pushes done" if isinstance(body, Delivered) else "pushes failed"] += 1
        return body

    def _delivered(self, offer: Offer) -> None:
        """A write is its reader's last word, unless others share the ticket."""
        now = time.monotonic()
        if offer.keep_open:
            self._table.renew(offer.hold_id, now)
            return
        _, closed = self._table.last_word(offer.hold_id, offer.reader, offer.readers, "done", now)
        self.counters["last words: done"] += 1
        self._report(closed)

    def _complete(self, last: Complete) -> ReplyBody:
        was_open, closed = self._table.last_word(
            last.hold_id, last.reader, last.readers, last.outcome, time.monotonic()
        )
        self.counters[f"last words: {last.outcome}"] += 1
        if self._pusher is not None:
            self._pusher.cancel(last.hold_id, last.reader)  # this reader is finished
        self._report(closed)
        return Closing(was_open)

    def _sum(self, sender: bytes, request_id: int, asked: Sum) -> ReplyBody | None:
        """Check the question here, digest on the checksum thread, and answer from here again."""
        if self._summing is None:
            return Refused("malformed", "this rank makes no checksums")
        algorithm = named(asked.algorithm, self._summing.memory)
        address, length = decode_runs(asked.runs, algorithm)
        hold = self._table.renew(asked.hold_id, time.monotonic())
        if not isinstance(hold, Hold):
            return refuse_closed(hold)

        hold_id = asked.hold_id  # so that `work` does not keep `asked` and its runs

        def work(memory: Memory) -> None:
            reply: ReplyBody
            try:
                reply = Summed(digest(memory, address, length, algorithm))
            except KvferryError as error:  # a run outside of the registered memory
                reply = refusal("malformed", error)
            except Exception as error:  # the reader waits for an answer, whatever failed
                self.complain("sum", "a checksum could not be made: %.200r", error)
                reply = refusal("busy", f"the checksum could not be made: {error!r}")
            self.submit(lambda: self._summed(sender, request_id, hold_id, reply))

        kept = ENTRY_BYTES + address.nbytes + length.nbytes
        if not self._summing.submit(work, kept, sender):
            return Refused("busy", "too many checksums wait to be made")
        return None

    def _summed(self, sender: bytes, request_id: int, hold_id: str, reply: ReplyBody) -> None:
        hold = self._table.renew(hold_id, time.monotonic())
        if not isinstance(hold, Hold):  # another request may have overwritten the bytes
            reply = refuse_closed(hold)
        self.reply(sender, request_id, reply)

    def tick(self, now: float) -> None:
        """Close holds whose lease ran out. The thread calls this at `next_deadline`, or earlier."""
        if self._pusher is not None:
            self._pusher.tidy(now)
        closed, impatient = self._table.expire(now)
        for one in closed:
            self._report(one)
        late = Refused("expired", "the hold did not arrive while the claim could wait")
        self._refuse_all(impatient, late)

    def next_deadline(self) -> float | None:
        return self._table.next_deadline()

    def close(self) -> None:
        if self._pusher is not None:
            self._pusher.close()
        super().close()
        if self._summing is not None:
            self._summing.close()

    def _refuse_all(self, waited: list[_Sender], refusal: Refused) -> None:
        for sender in waited:
            self.reply(sender.identity, sender.request_id, refusal)

    def _report(self, closed: Closed | None) -> None:
        """Let the engine take a hold that has just closed, if one has."""
        if closed is None:
            return
        self.counters[f"closed: {closed.why}"] += 1
        if self._pusher is not None:
            self._pusher.cancel(closed.hold_id)  # the engine may reuse its blocks soon
        with self._closed_lock:
            self._closed.append(closed)
        self._wakeup.ring()


class Directory(Server):
    """Tells consumers where the engine's ranks are. It runs in the scheduler's process.

    A consumer says `Hello` once per incarnation. The directory answers with all ranks, or refuses
    another version. The consumer compares model, meaning and shapes (`peers.py`). `kvferry doctor`
    sends a `Look`, which needs no description of an engine.
    """

    def __init__(
        self,
        sockets: Sockets,
        engine: EngineInfo | None = None,
        *,
        host: str | None = None,
        port: int = 0,
    ) -> None:
        super().__init__(sockets, host, port, "kvferry-directory")
        self.engine = engine  # None until the engine is described; callers ask again
        self._ranks: list[RankInfo] = []
        self._welcome: Packed | None = None

    def set_engine(self, engine: EngineInfo, ranks: list[RankInfo]) -> None:
        """Set the engine's first description, or that of a new incarnation.

        `ranks` are the descriptions of all workers, of all pipeline stages.
        """

        def work() -> None:
            self.engine, self._ranks, self._welcome = engine, list(ranks), None

        self.submit(work)

    def answer(self, sender: bytes, request: Request) -> ReplyBody | Packed | None:
        body = request.body
        if not isinstance(body, Hello | Look):
            return Refused("malformed", "this is the directory; it answers only a hello")
        refused = refuse_version(body.version)
        if refused is not None:
            return refused
        if self.engine is None:
            return Refused("busy", "this engine has not described itself yet; ask again")
        if isinstance(body, Look):
            us = self.engine
            ranks = [SeenRank(r.pp_rank, r.tp_rank, r.address, r.carriers) for r in self._ranks]
            return Seen(us.engine_id, us.incarnation, us.model, us.shape, ranks)
        if self._welcome is None:
            self._welcome = pack(Welcome(self.engine, self._ranks))
        return self._welcome


def refuse_version(version: int) -> Refused | None:
    if version == VERSION:
        return None
    return Refused(
        "version",
        f"the peer speaks version {version}, this engine {VERSION}; run the same kvferry on both",
    )


def refuse_closed(why: Why | None) -> Refused:
    """`why` is None if this rank does not know the hold: it never came, or closed long ago."""
    return Refused("closed", f"the hold is closed ({why or 'not known any more'}); prefill again")
