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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvferry.carriers.base import Arrays, Memory, Transfer
from kvferry.errors import Cancelled, ChecksumError, HandoverError, KvferryError, StaleTicket
from kvferry.handover.checksum import Algorithm, common, digest, encode_runs, parts
from kvferry.handover.deadline import Clock, Deadline, await_transfer, end_transfers
from kvferry.handover.peers import Peers, Remote, Source
from kvferry.handover.push import Arrived, Offers, WriteOffering
from kvferry.handover.stats import ConsumerTally
from kvferry.handover.ticket import Ticket
from kvferry.layout.model import CacheModel
from kvferry.layout.placement import Ints
from kvferry.net.messages import (
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
    Sum,
    Summed,
)
from kvferry.net.rpc import Caller
from kvferry.plan import Bound, Copies, EdgePlan, Uncovered, bind, uncovered, whole_blocks
from kvferry.plan.bind import require_distinct_blocks
from kvferry.plan.pieces import padded_tokens

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
    known: Peers
    words: HoldClient
    bases: Ints  # of this rank's regions
    everything: EdgePlan  # all that this rank's blocks hold
    zero: Callable[[Ints, Ints], None]
    tally: ConsumerTally
    offering: WriteOffering | None = None  # where sources are let write
    checked: Memory | None = None  # where digests are compared, the memory that is read into

    @property
    def _offers(self) -> bool:
        """Whether sources are let write. What is compared by digests is read."""
        return self.offering is not None and self.checked is None

    def run(self, remote: Remote, load: Load, watch: Deadline, clock: Clock) -> Loaded:
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

    def _let_write(self, remote: Remote, load: Load, watch: Deadline, clock: Clock) -> Arrived:
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
        watch: Deadline,
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
        watch: Deadline,
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

    def _last_words(self, sources: Sequence[Source], load: Load, watch: Deadline) -> Calls:
        """To every source that was read; one that wrote has said its own already."""
        if load.keep_open:
            return self.words.ask_open(sources, load.ticket, watch.deadline)
        return self.words.say(sources, load.ticket, "done", watch.deadline)


# --------------------------------------------------------------------------------------------------
# What a load reads, piece by piece, and how many of them at once.
#
# A piece is what a carrier is given in one call: a slice of copies, bound when it is asked for, so
# that no NumPy call takes long; or a whole strided batch, where the carrier takes it as it is.
# --------------------------------------------------------------------------------------------------

SLICE_DESCRIPTORS = 65_536
# Slices under way at once, if there are not more sources. Each keeps a carrier's threads busy, and
# an engine's step waits for the interpreter behind all of them (benchmarks/stall.py).
LEAST_FLYING = 2


def post_reads(bound: Mapping[Source, Bound], transfers: list[Transfer], watch: Deadline) -> None:
    """Have all of it read; what was begun is in `transfers`, also where this raises."""
    most = max(LEAST_FLYING, len(bound))
    for source, piece in _in_turn(bound):
        assert source.carrier is not None
        if len(transfers) >= most and not _takes_strided(source):
            await_transfer(transfers[-most], watch)
        transfers.append(source.carrier.read(source.peer, piece))


def _takes_strided(source: Source) -> bool:
    """Whether its carrier takes a whole batch as it is, and queues it elsewhere than here."""
    return source.carrier is not None and source.carrier.takes_strided


def _in_turn(bound: Mapping[Source, Bound]) -> Iterator[tuple[Source, Any]]:
    """A piece of each source after the other."""
    left = [(source, _pieces(source, copies)) for source, copies in bound.items()]
    while left:
        for turn in list(left):
            piece = next(turn[1], None)
            if piece is None:
                left.remove(turn)
            else:
                yield turn[0], piece


def _pieces(source: Source, copies: Bound) -> Iterator[Any]:
    if _takes_strided(source):
        yield from copies.batches
        return
    for piece in copies.slices(SLICE_DESCRIPTORS):
        yield Copies(piece.src.copy(), piece.dst.copy(), piece.length.copy())


# --------------------------------------------------------------------------------------------------
# A consumer's side of checksums: what arrived, compared with what each source holds.
#
# Slice by slice: all sources digest theirs while we digest ours. `checksum` says why this is sound.
# --------------------------------------------------------------------------------------------------

Asked = tuple[Source, Arrays, Future[ReplyBody]]


def require_equal(
    caller: Caller,
    hold_id: str,
    bound: Mapping[Source, Bound],
    memory: Memory,
    deadline: float,
    answer: Callable[[Future[ReplyBody]], ReplyBody],
) -> None:
    """`ChecksumError` where bytes differ from their source's, as long as the hold is open."""
    by = {source: common(memory, source.sums) for source in bound}
    left = {source: parts(copies, by[source]) for source, copies in bound.items()}
    while left:
        asked: list[Asked] = []
        for source, more in list(left.items()):
            part = next(more, None)
            if part is None:
                del left[source]
                continue
            runs = encode_runs(part.src, part.length)
            question = Sum(VERSION, source.incarnation, hold_id, runs, by[source].name)
            call = caller.call(source.address, question, deadline)
            asked.append((source, part, call))
        for source, part, call in asked:
            ours = digest(memory, part.dst, part.length, by[source])
            _require_same(source, part, by[source], ours, answer(call))


def _require_same(
    source: Source, part: Arrays, by: Algorithm, ours: bytes, reply: ReplyBody
) -> None:
    who = f"rank {tuple(source.rank)}"
    if not isinstance(reply, Summed):
        why = reply.message if isinstance(reply, Refused) else type(reply).__name__
        raise HandoverError(f"{who} gives no checksum: {why}")
    if reply.digest != ours:
        raise ChecksumError(
            f"{who}: {len(part)} runs of {int(part.length.sum())} bytes arrived differently than "
            f"the source holds them ({by.name} {reply.digest.hex()} there, {ours.hex()} here); "
            "nothing of this load is used. The carrier or the network between the two engines "
            "damages bytes"
        )


# --------------------------------------------------------------------------------------------------
# What a consumer rank says to a hold's sources, and what it makes of their answers.
#
# A **claim** asks every source at once for the hold's blocks; it may be parked there until the hold
# arrives. The **last word** goes to every source, also to those that nothing is read from: `done`,
# `failed` or `not needed`. Its answer says whether the hold was open, which alone makes a load
# count. Where other requests share the ticket, the same is asked without closing the hold.
#
#     a source answers                    what follows
#     stale                               the engine is forgotten, the ticket is void
#     closed, expired                     the ticket is void
#     refused otherwise, or nonsense      the load fails
#     nothing in time, or is gone         the load fails; the engine is forgotten, and met again
# --------------------------------------------------------------------------------------------------

Calls = dict[Source, Future[ReplyBody]]


@dataclass(frozen=True, slots=True, eq=False)
class HoldClient:
    """One rank's; holds no state of any single load."""

    reader: Reader  # who we are, to producers
    model: CacheModel
    known: Peers
    caller: Caller

    def answer(self, remote: Remote, call: Future[ReplyBody], watch: Deadline) -> ReplyBody:
        try:
            return watch.result(call)
        except Cancelled:
            raise
        except KvferryError:
            self.known.forget(remote)  # the peer may have restarted: meet it again next time
            raise

    def claim(
        self, remote: Remote, sources: Sequence[Source], ticket: Ticket, watch: Deadline
    ) -> dict[Source, Claimed]:
        """What each of these sources holds, when all have answered."""
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

    def say(
        self, sources: Sequence[Source], ticket: Ticket, outcome: Outcome, deadline: float
    ) -> Calls:
        """Send our last word to these sources."""
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

    def ask_open(self, sources: Sequence[Source], ticket: Ticket, deadline: float) -> Calls:
        """Ask these sources whether the hold is open, and leave it so."""
        return {
            source: self.caller.call(
                source.address, Renew(VERSION, source.incarnation, [ticket.hold_id]), deadline
            )
            for source in sources
        }

    def require_open(self, remote: Remote, ticket: Ticket, calls: Calls, watch: Deadline) -> None:
        """Whichever was asked: every source kept the hold open until after the last byte."""
        for source, call in calls.items():
            reply = self.answer(remote, call, watch)
            was_open = isinstance(reply, Closing) and reply.was_open
            was_open |= isinstance(reply, Renewed) and ticket.hold_id in reply.open
            if not was_open:
                raise StaleTicket(
                    f"rank {tuple(source.rank)} closed the hold before the load was over; what was "
                    "read is discarded"
                )
