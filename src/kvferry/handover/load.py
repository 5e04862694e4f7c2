"""One load: a consumer rank fetches a request's cache from producer ranks, on one load thread.

The steps:

1. **meet** the producer engine: its directory's welcome, the plans, the connections. This happens
   once per incarnation, on a thread of `peers.Meetings`, so that an engine that never answers
   delays no load.
2. **offer** (push mode only): let sources write if their carrier can revoke writes (`push.Offers`).
   The following steps concern the other sources.
3. **claim** the hold at every source rank, all at once. A source parks a claim whose hold has not
   arrived yet.
4. **read** by carrier from all sources at once, in slices.
5. **check** (optional): compare digests of the bytes that arrived with digests from the sources.
6. send the **last word**, `done`, to every source rank, also to those that nothing is read from.
7. meanwhile, **zero** bytes of the loaded blocks that no source covers, and layers that the
   producer lacks.
8. **confirm**: the load is good only if every source answers that the hold was still open. Then no
   other request can have reused the blocks while they were read.

A load that shares its ticket with other requests (`keep_open`) sends `Renew` instead of a last
word, which leaves the hold open.

What happens when something fails:

    a source answers                   the load
    stale                              fails; the engine is forgotten, the ticket is void
    closed, expired                    fails; the ticket is void
    another refusal, or nonsense       fails
    nothing in time, or disconnects    fails; the engine is forgotten, the next load meets it again

If this engine cancels the load, the load fails. If this engine dies during the load, sources hear
nothing more from it, and the hold expires at the producer (`producer.py`).

A load that fails sends `failed` to all its sources, unless other requests share its ticket. It does
not wait for their answers. Every step ends at the load's deadline, or when the load is cancelled.
`Loading.run` returns or raises only when no byte of its transfers can arrive any more, because the
engine may reuse the blocks then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvferry.carriers.base import (
    Memory,
    Transfer,
)
from kvferry.copies import Copies
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
from kvferry.plan import Bound, EdgePlan, Uncovered, bind, uncovered, whole_blocks
from kvferry.plan.bind import require_distinct_blocks
from kvferry.plan.pieces import padded_tokens

WORD_SECONDS = 5.0  # for a last word after a failure
NOTHING = Arrived(0, 0, ())


@dataclass(frozen=True, slots=True)
class Load:
    """The scheduler's order to load a request's cache into one rank."""

    request_id: str
    ticket: Ticket
    tables: tuple[tuple[int, ...], ...]  # this engine's block ids, by block table
    skip: int  # leading tokens that this engine has already
    seconds: float  # from now to the deadline
    keep_open: bool = False  # other requests share the ticket

    @property
    def blocks(self) -> int:
        return sum(len(table) for table in self.tables)


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a load ended."""

    request_id: str
    error: str = ""  # empty: the load is good
    bytes: int = 0
    descriptors: int = 0
    pushed: bool = False  # whether a source wrote any of it
    seconds: dict[str, float] = field(default_factory=dict)  # by step
    zeroed_bytes: int = 0  # in layers that the producer lacks

    @property
    def ok(self) -> bool:
        return not self.error


@dataclass(frozen=True, slots=True, eq=False)
class Loading:
    """The steps of loads into one rank's memory. It keeps no state of a single load."""

    model: CacheModel
    known: Peers
    words: HoldClient
    bases: Ints  # addresses of this rank's regions
    everything: EdgePlan  # covers all bytes of this rank's blocks
    zero: Callable[[Ints, Ints], None]
    tally: ConsumerTally
    offering: WriteOffering | None = None  # push mode
    checked: Memory | None = None  # this rank's memory, if digests are compared

    def run(self, remote: Remote, load: Load, watch: Deadline, clock: Clock) -> Loaded:
        try:
            require_distinct_blocks(
                self.model,
                self.known.layout,
                remote.shape,
                tokens=load.ticket.tokens,
                skip=load.skip,
                dst_tables=load.tables,
            )
            written = NOTHING
            if self.offering is not None and self.checked is None:  # checksums are for reads
                written = self._let_write(self.offering, remote, load, watch, clock)
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
            zeroed = self._zero_rest(rest)  # while the last words travel
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

    def _let_write(
        self, offering: WriteOffering, remote: Remote, load: Load, watch: Deadline, clock: Clock
    ) -> Arrived:
        """Let sources write if they can be stopped. No source can write after this returns."""

        def answer(call: Future[ReplyBody]) -> ReplyBody:
            reply = self.words.answer(remote, call, watch)
            if isinstance(reply, Refused) and reply.reason == "stale":
                self.known.forget(remote)  # other refusals void the ticket alone
            return reply

        offers = Offers(offering, remote, lambda: self.tally.abandoned(load.blocks))
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
        """Bind each source's plan to block addresses. The copies themselves are made later."""
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
        """Read all copies. Meanwhile, find the bytes to zero."""
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
        """Bytes that no source covers, then the layers that the producer lacks."""
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
        """Zero these bytes. Returns how many lie in layers that the producer lacks."""
        for part in rest:
            if len(part.address):
                self.zero(part.address, part.length)
        return sum(part.bytes for part in rest[1:])

    def _last_words(self, sources: Sequence[Source], load: Load, watch: Deadline) -> Calls:
        """Tell every source that was read. A source that wrote has counted its own last word."""
        if load.keep_open:
            return self.words.ask_open(sources, load.ticket, watch.deadline)
        return self.words.say(sources, load.ticket, "done", watch.deadline)


Calls = dict[Source, Future[ReplyBody]]


@dataclass(frozen=True, slots=True, eq=False)
class HoldClient:
    """Sends claims and last words of one rank, and judges the answers (see the module's table).

    It keeps no state of a single load.
    """

    reader: Reader  # this rank, as producers count it
    model: CacheModel
    known: Peers
    caller: Caller

    def answer(self, remote: Remote, call: Future[ReplyBody], watch: Deadline) -> ReplyBody:
        try:
            return watch.result(call)
        except Cancelled:
            raise
        except KvferryError:
            self.known.forget(remote)  # the peer may have restarted; the next load meets it again
            raise

    def claim(
        self, remote: Remote, sources: Sequence[Source], ticket: Ticket, watch: Deadline
    ) -> dict[Source, Claimed]:
        """Claim the hold at these sources. Returns when all have answered."""
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
        """Send this rank's last word to these sources."""
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
        """Ask these sources whether the hold is open, and leave it open."""
        return {
            source: self.caller.call(
                source.address, Renew(VERSION, source.incarnation, [ticket.hold_id]), deadline
            )
            for source in sources
        }

    def require_open(self, remote: Remote, ticket: Ticket, calls: Calls, watch: Deadline) -> None:
        """Require of every answer that the hold was open. Takes answers to `say` or `ask_open`."""
        for source, call in calls.items():
            reply = self.answer(remote, call, watch)
            was_open = isinstance(reply, Closing) and reply.was_open
            was_open |= isinstance(reply, Renewed) and ticket.hold_id in reply.open
            if not was_open:
                raise StaleTicket(
                    f"rank {tuple(source.rank)} closed the hold before the load was over; what was "
                    "read is discarded"
                )


# Reading. A carrier gets one piece per call: a slice of copies, or a whole strided batch if the
# carrier takes those. A slice is bound just before its call, so that no NumPy call takes long.

SLICE_DESCRIPTORS = 65_536
# Slices in flight at once, or one per source if there are more sources. Each slice keeps a
# carrier's threads busy, and the engine's step competes with them for the interpreter
# (benchmarks/stall.py).
LEAST_FLYING = 2


def post_reads(bound: Mapping[Source, Bound], transfers: list[Transfer], watch: Deadline) -> None:
    """Start all reads. `transfers` has those that were started, even if this raises."""
    most = max(LEAST_FLYING, len(bound))
    for source, piece in _in_turn(bound):
        assert source.carrier is not None
        if len(transfers) >= most and not _takes_strided(source):
            await_transfer(transfers[-most], watch)
        transfers.append(source.carrier.read(source.peer, piece))


def _takes_strided(source: Source) -> bool:
    """Whether the source's carrier takes a whole strided batch and queues it itself."""
    return source.carrier is not None and source.carrier.takes_strided


def _in_turn(bound: Mapping[Source, Bound]) -> Iterator[tuple[Source, Any]]:
    """Pieces of all sources, one source after the other in turn."""
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


# Checking. Slice by slice, all sources digest their bytes while this rank digests its own.
# `checksum.py` says why this is sound.

Asked = tuple[Source, Copies, Future[ReplyBody]]


def require_equal(
    caller: Caller,
    hold_id: str,
    bound: Mapping[Source, Bound],
    memory: Memory,
    deadline: float,
    answer: Callable[[Future[ReplyBody]], ReplyBody],
) -> None:
    """Raise `ChecksumError` if bytes here differ from the source's. The hold must be open."""
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
    source: Source, part: Copies, by: Algorithm, ours: bytes, reply: ReplyBody
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
