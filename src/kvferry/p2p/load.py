"""One load: a request's cache out of producers' memory, step by step, on a thread of its own.

1. **meet** the remote engine: the directory's welcome, plans, connections. Once per incarnation,
   and on another thread (`meetings`), so that an engine that never answers holds up no load.
   In push mode, sources that can be stopped now **write** (`offers`); the rest is for the others.
2. **claim** the hold at every source rank that concerns us, all at once. A claim may be parked.
3. **read** by carrier, edge by edge, all at once, in slices.
4. **check**, where that was asked for: digests of what was read, compared with the sources' own.
5. the **last word**, `done`, to every source rank; and while it travels,
6. **zero** the bytes of loaded blocks that nothing covers, and layers that the source has not. Only
   if all sources answer that the hold was still open is the load good: the bytes were read from
   blocks that nobody reused meanwhile.

What is said to sources, and what their answers mean, is in `words`. Whatever fails, they are told
`failed` (best effort, nobody waits for their answers). Every step ends by the load's deadline, or
when the load is cancelled. `Loading.run` returns or raises only when no byte of its transfers can
arrive any more: the blocks may be used again right after. A load that shares its ticket with other
requests (`keep_open`) asks whether the hold is open instead of closing it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvferry.errors import Cancelled, ChecksumError
from kvferry.layout.model import CacheModel
from kvferry.layout.parts import Ints
from kvferry.p2p.acquaintances import Acquaintances
from kvferry.p2p.comparing import require_equal
from kvferry.p2p.offers import Arrived, Offering, Offers
from kvferry.p2p.pieces import post_reads
from kvferry.p2p.remote import Remote, Source
from kvferry.p2p.stats import ConsumerTally
from kvferry.p2p.ticket import Ticket
from kvferry.p2p.transfers import await_transfer, end_transfers
from kvferry.p2p.watch import Clock, Watch
from kvferry.p2p.words import Calls, Words
from kvferry.plan import Bound, EdgePlan, Uncovered, bind, uncovered, whole_blocks
from kvferry.plan.landing import require_distinct_blocks
from kvferry.plan.tail import padded_tokens
from kvferry.transport.base import Transfer
from kvferry.transport.memory import Memory
from kvferry.wire.messages import Claimed, Refused, ReplyBody

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

    model: CacheModel
    known: Acquaintances
    words: Words
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

    def run(self, remote: Remote, load: Load, watch: Watch, clock: Clock) -> Loaded:
        try:
            self._require_distinct_blocks(remote, load)
            written = self._let_write(remote, load, watch, clock) if self._offers else NOTHING
            read = [source for source in remote.sources if source not in written.delivered]
            claimed = self.words.claim(remote, read, load.ticket, watch)
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
            self.words.require_open(remote, load.ticket, words, watch)
            clock.stop("confirm")
        except BaseException:
            if not load.keep_open:
                deadline = time.monotonic() + WORD_SECONDS
                self.words.say(remote.sources, load.ticket, "failed", deadline)
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

        def answer(call: Future[ReplyBody]) -> ReplyBody:
            reply = self.words.answer(remote, call, watch)
            if isinstance(reply, Refused) and reply.reason == "stale":
                self.known.forget(remote)  # else, only the ticket is void
            return reply

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
            arrived = offers.arrive(watch, answer)
            clock.split("wait", "push", arrived.write_seconds)
            return arrived
        finally:
            offers.close()

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
                self.words.caller,
                ticket.hold_id,
                bound,
                memory,
                watch.deadline,
                lambda call: self.words.answer(remote, call, watch),
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

    def _last_words(self, sources: Sequence[Source], load: Load, watch: Watch) -> Calls:
        """To every source that was read; one that wrote has said its own already."""
        if load.keep_open:
            return self.words.ask_open(sources, load.ticket, watch.deadline)
        return self.words.say(sources, load.ticket, "done", watch.deadline)
