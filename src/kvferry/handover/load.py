# SPDX-License-Identifier: Apache-2.0
"""One load: a consumer rank fetches a request's cache from producer ranks, on one load thread.

The steps:

1. **meet** the producer engine: its directory's welcome, the plans, the connections. This happens
   once per incarnation, on a thread of `peers.Meetings`, so that an engine that never answers
   delays no load.
2. **offer** (push mode only): let sources write if their carrier can revoke writes (`Offers`).
   The following steps concern the other sources.
3. **claim** the hold at every source rank, all at once. A source parks a claim whose hold has not
   arrived yet.
4. **read** by carrier from all sources at once, in slices.
5. **check** (optional): compare digests of the bytes that arrived with digests from the sources.
6. send the **last word**, `done`, to every source rank, also if the load reads nothing from it.
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
    unable (to an offer)               claims and reads from that source instead
    unmet (to an offer)                introduces itself again, and offers once more; then reads
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

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvferry.carriers.base import Memory, Transfer, is_granting
from kvferry.copies import Copies, table_bytes
from kvferry.errors import (
    Cancelled,
    ChecksumError,
    DeadlineExceeded,
    HandoverError,
    KvferryError,
    StaleTicket,
)
from kvferry.handover.checksum import common, digest, parts
from kvferry.handover.deadline import Clock, Deadline, await_transfer, end_for_good, end_transfers
from kvferry.handover.peers import Peers, Remote, Source
from kvferry.handover.ticket import Ticket
from kvferry.layout.placement import Ints
from kvferry.net.messages import (
    MOST_OFFERED_IDS,
    VERSION,
    Claim,
    Claimed,
    Closing,
    Complete,
    Delivered,
    Introduce,
    Offer,
    Outcome,
    RankInfo,
    Refused,
    Renew,
    Renewed,
    ReplyBody,
    RequestBody,
    Sum,
    Summed,
    pack_tables,
)
from kvferry.plan import Bound, EdgePlan, Uncovered, bind, uncovered, whole_blocks
from kvferry.plan.bind import landing, require_distinct_blocks
from kvferry.plan.pieces import padded_tokens

log = logging.getLogger("kvferry")

WORD_SECONDS = 5.0  # for a last word after a failure


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
    request_id: str
    error: str = ""  # a message; empty: the load is good
    bytes: int = 0
    descriptors: int = 0
    pushed: bool = False  # whether a source wrote any of it
    seconds: dict[str, float] = field(default_factory=dict)  # by step
    zeroed_bytes: int = 0  # in layers that the producer lacks
    kind: str = ""  # class of the error, by which failures are counted

    @property
    def ok(self) -> bool:
        return not self.error


@dataclass(slots=True)
class ConsumerStats:
    abandoned_now: int = 0  # loads that ended and are not reported: bytes may still arrive
    quarantined_blocks: int = 0  # that those keep


# Takes a load's number of blocks. Counts the ended load while bytes of it may still arrive.
Abandoned = Callable[[int], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, eq=False)
class Loading:
    """The steps of loads into one rank's memory. It keeps no state of a single load."""

    peers: Peers
    bases: Ints  # addresses of this rank's regions
    everything: EdgePlan  # covers all bytes of this rank's blocks
    zero: Callable[[Ints, Ints], None]
    abandoned: Abandoned
    introductions: Introductions | None = None  # push mode
    checked: Memory | None = None  # this rank's memory, if digests are compared

    def run(self, remote: Remote, load: Load, watch: Deadline, clock: Clock) -> Loaded:
        client = HoldClient(self.peers, remote, load.ticket, watch)
        try:
            watch.require_wanted()
            if not watch.left:  # the peer is not to blame
                raise DeadlineExceeded("the load waited for a thread until its deadline")
            require_distinct_blocks(
                self.peers.topology.model,
                self.peers.layout,
                remote.shape,
                tokens=load.ticket.tokens,
                skip=load.skip,
                dst_tables=load.tables,
            )
            written = Arrived()
            if self.introductions is not None:
                written = self._let_write(self.introductions, client, load, clock)
            read = [source for source in remote.sources if source not in written.delivered]
            claimed = client.claim(read)
            clock.stop("claim")
            bound = self._bind(remote, load, claimed)
            clock.stop("bind")
            rest = self._read(client, load, bound, clock)
            moved = sum(b.bytes for b in bound.values())
            descriptors = sum(b.descriptors for b in bound.values())
            if self.checked is not None:
                require_equal(client, bound, self.checked)
                clock.stop("check")
            # A source that wrote has counted its own last word.
            words = client.ask_open(read) if load.keep_open else client.say(read, "done")
            zeroed = self._zero_rest(rest)  # while the last words travel
            clock.stop("zero")
            client.require_open(words)
            clock.stop("confirm")
        except BaseException:
            if not load.keep_open:
                client.say(remote.sources, "failed", time.monotonic() + WORD_SECONDS)
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
        self, introductions: Introductions, client: HoldClient, load: Load, clock: Clock
    ) -> Arrived:
        """Let sources write if they can be stopped. No source can write after this returns."""
        offers = Offers(introductions, client, load, self.abandoned)
        try:
            offers.open(self.bases)
            clock.stop("offer")
            arrived = offers.arrive()
            clock.split("wait", "push", arrived.write_seconds)
            return arrived
        finally:
            offers.close()

    def _bind(
        self, remote: Remote, load: Load, claimed: dict[Source, Claimed]
    ) -> dict[Source, Bound]:
        """Bind each source's plan to block addresses. The copies themselves are made later."""
        tokens = padded_tokens(
            remote.pair.model, remote.shape, self.peers.layout.shape, load.ticket.tokens
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
        self, client: HoldClient, load: Load, bound: dict[Source, Bound], clock: Clock
    ) -> list[Uncovered]:
        """Read all copies. Meanwhile, find the bytes to zero."""
        transfers: list[Transfer] = []
        try:
            post_reads(bound, transfers, client.watch)
            rest = self._rest(client.remote, load)
            for transfer in transfers:
                await_transfer(transfer, client.watch)
            clock.stop("read")
            return rest
        except BaseException as error:
            end_transfers(transfers, lambda: self.abandoned(load.blocks))
            if not isinstance(error, Cancelled):
                self.peers.forget(client.remote)
            raise

    def _rest(self, remote: Remote, load: Load) -> list[Uncovered]:
        """Bytes that no source covers, then the layers that the producer lacks."""
        where: dict[str, Any] = {
            "tokens": load.ticket.tokens,
            "skip": load.skip,
            "dst_tables": load.tables,
            "dst_bases": self.bases,
        }
        rest = [uncovered(self.everything, remote.shape, **where)]
        if remote.lacking is not None:
            rest.append(whole_blocks(remote.lacking, **where))
        return rest

    def _zero_rest(self, rest: list[Uncovered]) -> int:
        """Zero these bytes. Returns how many lie in layers that the producer lacks."""
        for part in rest:
            if len(part.address):
                self.zero(part.address, part.length)
        return sum(part.bytes for part in rest[1:])


Calls = dict[Source, Future[ReplyBody]]
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, eq=False)
class HoldClient:
    """Talks with the source ranks of one hold, for one load or release.

    It judges the answers (see the module's table).
    """

    peers: Peers
    remote: Remote
    ticket: Ticket
    watch: Deadline

    def call(
        self, source: Source, body: RequestBody, deadline: float | None = None
    ) -> Future[ReplyBody]:
        until = self.watch.deadline if deadline is None else deadline
        return self.peers.caller.call(source.address, body, until)

    def answer(self, call: Future[ReplyBody]) -> ReplyBody:
        return self.first([call])[1]

    def first(self, calls: Sequence[Future[ReplyBody]]) -> tuple[Future[ReplyBody], ReplyBody]:
        """The first of these calls that is answered, and its answer."""
        try:
            call = self.watch.first(calls)
            reply = call.result()
        except Cancelled:
            raise
        except KvferryError:
            self.peers.forget(self.remote)  # it may have restarted; the next load meets it again
            raise
        if isinstance(reply, Refused) and reply.reason == "stale":
            self.peers.forget(self.remote)  # other refusals void the ticket alone
        return call, reply

    def claim(self, sources: Sequence[Source]) -> dict[Source, Claimed]:
        ticket, patience = self.ticket, self.watch.left
        calls = {
            source: self.call(
                source,
                Claim(
                    VERSION,
                    source.incarnation,
                    ticket.hold_id,
                    ticket.digest,
                    self.peers.reader,
                    source.readers,
                    patience,
                ),
            )
            for source in sources
        }
        claimed = {}
        for source, call in calls.items():
            reply = _require(source, self.answer(call), Claimed, "claim")
            exact = self.peers.topology.model.of_one_length and reply.tokens != ticket.tokens
            if exact or reply.tokens < ticket.tokens:
                raise HandoverError(
                    f"the ticket promises {ticket.tokens} tokens, {source} holds {reply.tokens}"
                )
            claimed[source] = reply
        self.watch.require_wanted()
        return claimed

    def say(
        self, sources: Sequence[Source], outcome: Outcome, deadline: float | None = None
    ) -> Calls:
        hold_id, reader = self.ticket.hold_id, self.peers.reader
        return {
            source: self.call(
                source,
                Complete(VERSION, source.incarnation, hold_id, reader, source.readers, outcome),
                deadline,
            )
            for source in sources
        }

    def ask_open(self, sources: Sequence[Source]) -> Calls:
        """Ask these sources whether the hold is open, and leave it open."""
        return {
            source: self.call(source, Renew(VERSION, source.incarnation, [self.ticket.hold_id]))
            for source in sources
        }

    def require_open(self, calls: Calls) -> None:
        """Require of every answer that the hold was open. Takes answers to `say` or `ask_open`."""
        for source, call in calls.items():
            reply = self.answer(call)
            was_open = isinstance(reply, Closing) and reply.was_open
            was_open |= isinstance(reply, Renewed) and self.ticket.hold_id in reply.open
            if not was_open:
                raise StaleTicket(
                    f"{source} closed the hold before the load was over; the bytes that were read "
                    "are discarded"
                )


def _require(source: Source, reply: ReplyBody, kind: type[Answer], request: str) -> Answer:
    if isinstance(reply, Refused):
        void = reply.reason in ("stale", "closed", "expired")
        error = StaleTicket if void else HandoverError
        raise error(f"{source} refuses the {request}: {reply.message}")
    if not isinstance(reply, kind):
        raise HandoverError(f"{source} answered the {request} with a {type(reply).__name__}")
    return reply


# Push mode. For every source whose carrier can revoke writes, a load opens a grant of exactly the
# bytes that the source's edge covers, and offers it. Carriers that cannot revoke (shared memory of
# one host, CUDA IPC, RDMA) get no offer; the load reads through them. `push.py` is the source's
# side.

CLOSE_GRANT_SECONDS = 5.0  # for a writer to stop; closing its connection usually does it at once
INTRODUCE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Arrived:
    """What sources wrote. The other sources have to be read."""

    bytes: int = 0
    descriptors: int = 0
    delivered: tuple[Source, ...] = ()
    write_seconds: float = 0.0  # of the slowest source, by its own clock


class Introductions:
    """Describes this rank's memory to the sources that may write to it, once to each."""

    def __init__(self, peers: Peers, info: RankInfo) -> None:
        self._peers, self._info = peers, info
        self._made: dict[str, str] = {}  # incarnations, by address: a reset brings a new one
        self._lock = threading.Lock()

    def make(self, source: Source) -> None:
        """Introduce this rank to a source, once. This does not wait for the answer.

        The offer follows on the same connection, so it arrives after the introduction.
        """
        with self._lock:  # so that no other load's offer overtakes it
            if self._made.get(source.address) == source.incarnation:
                return
            self._made[source.address] = source.incarnation
            introduce = Introduce(VERSION, source.incarnation, self._peers.engine, self._info)
            until = time.monotonic() + INTRODUCE_SECONDS
            self._peers.caller.call(source.address, introduce, until)

    def forget(self, source: Source) -> None:
        with self._lock:
            self._made.pop(source.address, None)


@dataclass(slots=True, eq=False)
class _Offered:
    source: Source
    offer: Offer
    bytes: int  # that the source has to write
    call: Future[ReplyBody]
    open: bool = True
    again: bool = False  # offered a second time


class Offers:
    """The offers of one load. The caller must call `close`, whatever happens.

    A source has delivered if as many bytes arrived under its grant as the plan says and as the
    source claims. This rank closes all grants before the load is reported, without help from the
    sources. A source that is stopped, gone or lying cannot write after that.
    """

    def __init__(
        self, introductions: Introductions, client: HoldClient, load: Load, abandoned: Abandoned
    ) -> None:
        self._introductions, self._client, self._load = introductions, client, load
        self._abandoned = abandoned
        self._offered: list[_Offered] = []

    def open(self, bases: Ints) -> None:
        """Open a grant for each source that can be revoked, and offer it."""
        load, client = self._load, self._client
        if load.blocks > MOST_OFFERED_IDS:
            return
        packed = pack_tables(load.tables)
        for source in client.remote.sources:
            carrier = source.carrier
            if source.plan is None or not is_granting(carrier):
                continue
            land = landing(
                source.plan,
                tokens=load.ticket.tokens,
                skip=load.skip,
                dst_tables=load.tables,
                dst_bases=bases,
            )
            offer = Offer(
                VERSION,
                source.incarnation,
                load.ticket.hold_id,
                load.ticket.digest,
                client.peers.reader,
                source.readers,
                client.watch.left,
                carrier.name,
                carrier.open_grant(land.address, land.length),
                load.ticket.tokens,
                load.skip,
                packed,
                load.keep_open,
            )
            one = _Offered(source, offer, land.bytes, Future())
            self._offered.append(one)  # from here on, `close` closes the grant
            self._call(one)

    def arrive(self) -> Arrived:
        """Wait until every source has written or declined. Raise on the first other answer."""
        waiting = list(self._offered)
        delivered: list[Source] = []
        moved = descriptors = 0
        seconds = 0.0
        while waiting:
            call, reply = self._client.first([one.call for one in waiting])
            one = next(one for one in waiting if one.call is call)
            if isinstance(reply, Refused) and reply.reason == "unmet" and not one.again:
                one.again = True
                self._introductions.forget(one.source)
                self._call(one)
                continue
            waiting.remove(one)
            if isinstance(reply, Refused) and reply.reason in ("unable", "unmet"):
                log.info("%s is read instead: %s", one.source, reply.message)
                self._close(one)
                continue
            said = _require(one.source, reply, Delivered, "offer")
            came = self._close(one)
            if not said.bytes == came == one.bytes or said.grant != one.offer.grant:
                raise HandoverError(
                    f"{one.source} says that it wrote {said.bytes} bytes, {came} arrived and "
                    f"{one.bytes} were due; the bytes that came are discarded"
                )
            moved, descriptors = moved + came, descriptors + said.descriptors
            seconds = max(seconds, said.write_seconds)
            delivered.append(one.source)
        return Arrived(moved, descriptors, tuple(delivered), seconds)

    def close(self) -> None:
        """Revoke all grants. After this returns, no byte of these offers can arrive."""
        for one in self._offered:
            if one.open:
                self._close(one)

    def _call(self, one: _Offered) -> None:
        self._introductions.make(one.source)
        one.call = self._client.call(one.source, one.offer)

    def _close(self, one: _Offered) -> int:
        """Close a grant. Returns how many bytes came under it."""
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

        end_for_good(end, lambda: self._abandoned(self._load.blocks))
        one.open = False
        return came


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
    return iter(copies.batches) if _takes_strided(source) else copies.slices(SLICE_DESCRIPTORS)


# Checking. Slice by slice, all sources digest their bytes while this rank digests its own.
# `checksum.py` says why this is sound.


def require_equal(client: HoldClient, bound: Mapping[Source, Bound], memory: Memory) -> None:
    """Raise `ChecksumError` if bytes here differ from the source's. The hold must be open."""
    by = {source: common(memory, source.sums) for source in bound}
    left = {source: parts(copies, by[source]) for source, copies in bound.items()}
    while left:
        asked: list[tuple[Source, Copies, Future[ReplyBody]]] = []
        for source, more in list(left.items()):
            part = next(more, None)
            if part is None:
                del left[source]
                continue
            runs = table_bytes(part.src, part.length)
            hold_id, algorithm = client.ticket.hold_id, by[source].name
            question = Sum(VERSION, source.incarnation, hold_id, runs, algorithm)
            asked.append((source, part, client.call(source, question)))
        for source, part, call in asked:
            ours = digest(memory, part.dst, part.length, by[source])
            theirs = _require(source, client.answer(call), Summed, "checksum").digest
            if theirs != ours:
                client.peers.forget(client.remote)
                raise ChecksumError(
                    f"{source}: {len(part)} runs of {int(part.length.sum())} bytes arrived "
                    f"differently than the source holds them ({by[source].name} "
                    f"{theirs.hex()} there, {ours.hex()} here); nothing of this load is "
                    "used. The carrier or the network between the two engines damages bytes"
                )
