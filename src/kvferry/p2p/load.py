"""One load: a request's cache out of producers' memory, step by step, on a thread of its own.

1. **meet** the remote engine: the directory's welcome, plans, connections. Once per incarnation.
   In push mode, sources that can be stopped now **write** (`offers`); the rest is for the others.
2. **claim** the hold at every source rank that concerns us, all at once. A claim may be parked.
3. **read** by carrier, edge by edge, all at once, in slices.
4. **check**, where that was asked for: digests of what was read, compared with the sources' own.
5. the **last word**, `done`, to every source rank; and while it travels,
6. **zero** the bytes of loaded blocks that nothing covers, and layers that the source has not. Only
   if all sources answer that the hold was still open is the load good: the bytes were read from
   blocks that nobody reused meanwhile.

Whatever fails, the sources are told `failed` (best effort, nobody waits for their answers). Every
step ends by the load's deadline, or when the load is cancelled. `Loading.run` returns or raises
only when no byte of its transfers can arrive any more: the blocks may be used again right after. A
load that shares its ticket with other requests (`keep_open`) asks whether the hold is open instead
of closing it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvferry.errors import Cancelled, ChecksumError, HandoverError, KvferryError, StaleTicket
from kvferry.layout.model import CacheModel
from kvferry.layout.rank import Ints
from kvferry.p2p.acquaintances import Acquaintances
from kvferry.p2p.caller import Caller
from kvferry.p2p.comparing import require_equal
from kvferry.p2p.offers import Arrived, Offering, Offers
from kvferry.p2p.pieces import post_reads
from kvferry.p2p.remote import Remote, Source
from kvferry.p2p.stats import ConsumerTally
from kvferry.p2p.ticket import Ticket
from kvferry.p2p.transfers import await_transfer, end_transfers
from kvferry.p2p.watch import Clock, Watch
from kvferry.plan import Bound, EdgePlan, Uncovered, bind, uncovered, whole_blocks
from kvferry.plan.landing import require_distinct_blocks
from kvferry.plan.tail import padded_tokens
from kvferry.transport.base import Transfer
from kvferry.transport.memory import Memory
from kvferry.wire.messages import (
    VERSION,
    Claim,
    Claimed,
    Closing,
    Complete,
    Outcome,
    Reader,
    Refused,
    Renew,
    Renewed,
    ReplyBody,
)

log = logging.getLogger("kvferry")

WORD_SECONDS = 5.0  # for a last word after something failed
NOTHING = Arrived(0, 0, (), ())


@dataclass(frozen=True, slots=True)
class Load:
    """What the scheduler asks a rank to load."""

    request_id: str
    ticket: Ticket
    tables: tuple[tuple[int, ...], ...]  # this engine's blocks, for each of its tables
    skip: int
    seconds: float  # from now to its deadline
    keep_open: bool = False

    @property
    def blocks(self) -> int:
        return sum(len(table) for table in self.tables)


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a load ended."""

    request_id: str
    error: str = ""  # empty: all bytes are there
    bytes: int = 0
    descriptors: int = 0
    pushed: bool = False  # whether a source wrote any of it
    seconds: dict[str, float] = field(default_factory=dict)  # by step
    zeroed_bytes: int = 0  # of layers that the source does not have

    @property
    def ok(self) -> bool:
        return not self.error


@dataclass(frozen=True, slots=True, eq=False)
class Loading:
    """The steps of loads into one rank's memory; holds no state of any single load."""

    reader: Reader  # who we are, to producers
    model: CacheModel
    known: Acquaintances
    caller: Caller
    bases: Ints  # of this rank's regions
    everything: EdgePlan  # all that this rank's blocks hold
    zero: Callable[[Ints, Ints], None]
    tally: ConsumerTally
    offering: Offering | None = None  # where sources are let write
    checked: Memory | None = None  # where digests are compared, the memory that is read into

    @property
    def _offers(self) -> bool:
        """Whether sources are let write. What is compared by digests is read."""
        return self.offering is not None and self.checked is None

    def run(self, load: Load, watch: Watch, clock: Clock) -> Loaded:
        with self.known.meet(load.ticket, watch) as remote:
            clock.stop("meet")
            return self._fetch(remote, load, watch, clock)

    def _fetch(self, remote: Remote, load: Load, watch: Watch, clock: Clock) -> Loaded:
        try:
            self._require_distinct_blocks(remote, load)
            written = self._let_write(remote, load, watch, clock) if self._offers else NOTHING
            read = [source for source in remote.sources if source not in written.delivered]
            claimed = self._claim(remote, read, load.ticket, watch)
            clock.stop("claim")
            bound = self._bind(remote, load, claimed)
            clock.stop("bind")
            rest = self._read(remote, load, bound, watch, clock)
            moved = sum(b.bytes for b in bound.values())
            descriptors = sum(b.descriptors for b in bound.values())
            if self.checked is not None:
                self._check(remote, load.ticket, bound, self.checked, watch)
                self.tally.checked(moved)
                clock.stop("check")
            words = self._last_words(read, load, watch)
            zeroed = self._zero_rest(rest)  # while they travel
            clock.stop("zero")
            self._require_open(remote, load, words, watch)
            clock.stop("confirm")
        except BaseException:
            if not load.keep_open:
                self.say(remote, load.ticket, "failed", time.monotonic() + WORD_SECONDS)
            raise
        return Loaded(
            load.request_id,
            "",
            moved + written.bytes,
            descriptors + written.descriptors,
            seconds=clock.spent,
            pushed=bool(written.delivered),
            zeroed_bytes=zeroed,
        )

    def _require_distinct_blocks(self, remote: Remote, load: Load) -> None:
        require_distinct_blocks(
            self.model,
            self.known.layout,
            remote.shape,
            tokens=load.ticket.tokens,
            skip=load.skip,
            dst_tables=load.tables,
        )

    def _let_write(self, remote: Remote, load: Load, watch: Watch, clock: Clock) -> Arrived:
        """Let those sources write that can be stopped. However it ends, none can write any more."""
        assert self.offering is not None
        offers = Offers(self.offering, remote, lambda: self.tally.abandoned(load.blocks))
        try:
            offers.open(
                hold_id=load.ticket.hold_id,
                digest=load.ticket.digest,
                tokens=load.ticket.tokens,
                skip=load.skip,
                tables=load.tables,
                keep_open=load.keep_open,
                watch=watch,
            )
            clock.stop("offer")
            arrived = offers.arrive(watch, lambda call: self.answer(remote, call, watch))
            clock.split("wait", "push", arrived.write_seconds)
            return arrived
        except StaleTicket:
            self.known.forget(remote)
            raise
        finally:
            offers.close()

    def _claim(
        self, remote: Remote, sources: Sequence[Source], ticket: Ticket, watch: Watch
    ) -> dict[Source, Claimed]:
        patience = max(0.0, watch.deadline - time.monotonic())
        calls = {
            source: self.caller.call(
                source.address,
                Claim(
                    VERSION,
                    source.incarnation,
                    ticket.hold_id,
                    ticket.digest,
                    self.reader,
                    source.readers,
                    patience,
                ),
                watch.deadline,
            )
            for source in sources
        }
        claimed = {}
        for source, call in calls.items():
            reply = self.answer(remote, call, watch)
            who = f"rank {tuple(source.rank)}"
            if isinstance(reply, Refused):
                if reply.reason == "stale":
                    self.known.forget(remote)
                if reply.reason in ("stale", "closed", "expired"):
                    raise StaleTicket(f"{who} refuses the claim: {reply.message}")
                raise HandoverError(f"{who} refuses the claim: {reply.message}")
            if not isinstance(reply, Claimed):
                raise HandoverError(f"{who} answered a claim with a {type(reply).__name__}")
            exact = self.model.of_one_length and reply.tokens != ticket.tokens
            if exact or reply.tokens < ticket.tokens:
                raise HandoverError(
                    f"the ticket promises {ticket.tokens} tokens, {who} holds {reply.tokens}"
                )
            claimed[source] = reply
        watch.require_wanted()
        return claimed

    def answer(self, remote: Remote, call: Future[ReplyBody], watch: Watch) -> ReplyBody:
        try:
            return watch.result(call)
        except Cancelled:
            raise
        except KvferryError:
            self.known.forget(remote)  # the peer may have restarted: meet it again next time
            raise

    def _bind(
        self, remote: Remote, load: Load, claimed: dict[Source, Claimed]
    ) -> dict[Source, Bound]:
        """What is to be read, by source; small, whatever the number of copies."""
        tokens = padded_tokens(
            remote.pair.model, remote.shape, self.known.layout.shape, load.ticket.tokens
        )
        return {
            source: bind(
                source.plan,
                tokens=tokens,
                skip=load.skip,
                src_tables=hold.tables,
                dst_tables=load.tables,
                src_bases=source.bases,
                dst_bases=self.bases,
            )
            for source, hold in claimed.items()
            if source.plan is not None and source.carrier is not None
        }

    def _read(
        self,
        remote: Remote,
        load: Load,
        bound: dict[Source, Bound],
        watch: Watch,
        clock: Clock,
    ) -> list[Uncovered]:
        """Read all of it; meanwhile, find what is to be zeroed."""
        transfers: list[Transfer] = []
        try:
            post_reads(bound, transfers, watch)
            rest = self._rest(remote, load)
            for transfer in transfers:
                await_transfer(transfer, watch)
            clock.stop("read")
            return rest
        except BaseException as error:
            end_transfers(transfers, lambda: self.tally.abandoned(load.blocks))
            if not isinstance(error, Cancelled):
                self.known.forget(remote)
            raise

    def _check(
        self,
        remote: Remote,
        ticket: Ticket,
        bound: dict[Source, Bound],
        memory: Memory,
        watch: Watch,
    ) -> None:
        try:
            require_equal(
                self.caller,
                ticket.hold_id,
                bound,
                memory,
                watch.deadline,
                lambda call: self.answer(remote, call, watch),
            )
        except ChecksumError:
            self.known.forget(remote)
            raise

    def _rest(self, remote: Remote, load: Load) -> list[Uncovered]:
        """What nothing covers, and what is of layers that the source has not."""
        where: dict[str, Any] = {
            "skip": load.skip,
            "dst_tables": load.tables,
            "dst_bases": self.bases,
        }
        tokens = load.ticket.tokens
        rest = [uncovered(self.everything, remote.shape, tokens=tokens, **where)]
        if remote.lacking is not None:
            rest.append(whole_blocks(remote.lacking, tokens=tokens, **where))
        return rest

    def _zero_rest(self, rest: list[Uncovered]) -> int:
        """Zero it; how much of that is of layers that the source has not."""
        for part in rest:
            if len(part.address):
                self.zero(part.address, part.length)
        return sum(part.bytes for part in rest[1:])

    def _last_words(
        self, sources: Sequence[Source], load: Load, watch: Watch
    ) -> dict[Source, Future[ReplyBody]]:
        """To every source that was read; one that wrote has said its own already."""
        if load.keep_open:
            return self._ask_open(sources, load.ticket, watch.deadline)
        return self._say(sources, load.ticket, "done", watch.deadline)

    def _require_open(
        self, remote: Remote, load: Load, words: dict[Source, Future[ReplyBody]], watch: Watch
    ) -> None:
        """The load counts only if every source kept the hold open until after the last byte."""
        for source, call in words.items():
            reply = self.answer(remote, call, watch)
            was_open = isinstance(reply, Closing) and reply.was_open
            was_open |= isinstance(reply, Renewed) and load.ticket.hold_id in reply.open
            if not was_open:
                raise StaleTicket(
                    f"rank {tuple(source.rank)} closed the hold before the load was over; what was "
                    "read is discarded"
                )

    def _ask_open(
        self, sources: Sequence[Source], ticket: Ticket, deadline: float
    ) -> dict[Source, Future[ReplyBody]]:
        return {
            source: self.caller.call(
                source.address, Renew(VERSION, source.incarnation, [ticket.hold_id]), deadline
            )
            for source in sources
        }

    def say(
        self, remote: Remote, ticket: Ticket, outcome: Outcome, deadline: float
    ) -> dict[Source, Future[ReplyBody]]:
        """Send our last word to every source."""
        return self._say(remote.sources, ticket, outcome, deadline)

    def _say(
        self, sources: Sequence[Source], ticket: Ticket, outcome: Outcome, deadline: float
    ) -> dict[Source, Future[ReplyBody]]:
        return {
            source: self.caller.call(
                source.address,
                Complete(
                    VERSION,
                    source.incarnation,
                    ticket.hold_id,
                    self.reader,
                    source.readers,
                    outcome,
                ),
                deadline,
            )
            for source in sources
        }
