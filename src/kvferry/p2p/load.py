"""One load: a request's cache out of producers' memory, step by step, on a thread of its own.

1. **meet** the remote engine: the directory's welcome, plans, connections. Once per incarnation.
2. **claim** the hold at every source rank that concerns us, all at once. A claim may be parked.
3. **read** by carrier, edge by edge, all at once, in slices.
4. **check**, where that was asked for: digests of what was read, compared with the sources' own.
5. **zero** the bytes of loaded blocks that nothing covers.
6. the **last word**, `done`, to every source rank. Only if all of them answer that the hold was
   still open is the load good: the bytes were read from blocks that nobody reused meanwhile.

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

from kvferry.errors import (
    Cancelled,
    ChecksumError,
    DeadlineExceeded,
    HandoverError,
    KvferryError,
    StaleTicket,
)
from kvferry.layout.rank import Ints
from kvferry.p2p.acquaintances import Acquaintances
from kvferry.p2p.caller import Caller
from kvferry.p2p.checksum import digest, encode_runs, parts
from kvferry.p2p.remote import Remote, Source
from kvferry.p2p.stats import Tally
from kvferry.p2p.ticket import Ticket
from kvferry.p2p.watch import Clock, Watch
from kvferry.plan import Bound, Copies, EdgePlan, bind, uncovered
from kvferry.transport.base import Transfer, TransferState
from kvferry.transport.memory import Memory
from kvferry.transport.regions import Arrays
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
    Sum,
    Summed,
)

log = logging.getLogger("kvferry")

TRANSFER_LOOK_SECONDS = 0.1  # between two looks at whether a transfer is still wanted
SLICE_DESCRIPTORS = 65_536  # bound at a time, so that no NumPy call takes long
ABANDONED_LOOK_SECONDS = 1.0
WORD_SECONDS = 5.0  # for a last word after something failed


@dataclass(frozen=True, slots=True)
class Load:
    """What the scheduler asks a rank to load."""

    request_id: str
    ticket: Ticket
    tables: tuple[tuple[int, ...], ...]  # this engine's blocks, for each of its tables
    skip: int
    seconds: float  # from now to its deadline
    keep_open: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a load ended."""

    request_id: str
    error: str = ""  # empty: all bytes are there
    bytes: int = 0
    descriptors: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # by step

    @property
    def ok(self) -> bool:
        return not self.error


@dataclass(frozen=True, slots=True, eq=False)
class Loading:
    """The steps of loads into one rank's memory; holds no state of any single load."""

    reader: Reader  # who we are, to producers
    known: Acquaintances
    caller: Caller
    bases: Ints  # of this rank's regions
    everything: EdgePlan  # all that this rank's blocks hold
    zero: Callable[[Ints, Ints], None]
    checked: Memory | None = None  # where digests are compared, the memory that is read into
    tally: Tally = field(default_factory=Tally)

    def run(self, load: Load, watch: Watch, clock: Clock) -> Loaded:
        remote = self.known.meet(load.ticket, watch)
        clock.stop("meet")
        try:
            claimed = self._claim(remote, load.ticket, watch)
            clock.stop("claim")
            bound = self._bind(load, claimed)
            self._read(remote, bound, watch, clock)
            moved = sum(b.bytes for b in bound.values())
            descriptors = sum(b.descriptors for b in bound.values())
            if self.checked is not None:
                self._check(remote, load.ticket, bound, self.checked, watch)
                self.tally.checked(moved)
                clock.stop("check")
            self._zero_rest(remote, load)
            clock.stop("zero")
            self._confirm(remote, load, watch)
            clock.stop("confirm")
        except BaseException:
            if not load.keep_open:
                self.say(remote, load.ticket, "failed", time.monotonic() + WORD_SECONDS)
            raise
        return Loaded(load.request_id, "", moved, descriptors, clock.spent)

    def _claim(self, remote: Remote, ticket: Ticket, watch: Watch) -> dict[Source, Claimed]:
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
            for source in remote.sources
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
            if reply.tokens < ticket.tokens:
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

    def _bind(self, load: Load, claimed: dict[Source, Claimed]) -> dict[Source, Bound]:
        """What is to be read, by source; small, whatever the number of copies."""
        return {
            source: bind(
                source.plan,
                tokens=load.ticket.tokens,
                skip=load.skip,
                src_tables=hold.tables,
                dst_tables=load.tables,
                src_bases=source.bases,
                dst_bases=self.bases,
            )
            for source, hold in claimed.items()
            if source.plan is not None and source.carrier is not None
        }

    def _read(self, remote: Remote, bound: dict[Source, Bound], watch: Watch, clock: Clock) -> None:
        transfers: list[Transfer] = []
        try:
            for source, copies in bound.items():
                assert source.carrier is not None
                if getattr(source.carrier, "takes_strided", False):
                    read: Any = source.carrier.read
                    transfers.extend(read(source.peer, batch) for batch in copies.batches)
                    continue
                for piece in copies.slices(SLICE_DESCRIPTORS):
                    mine = Copies(piece.src.copy(), piece.dst.copy(), piece.length.copy())
                    transfers.append(source.carrier.read(source.peer, mine))
            clock.stop("bind")
            for transfer in transfers:
                self._wait(transfer, watch)
            clock.stop("read")
        except BaseException as error:
            _end_transfers(transfers, self.tally)
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
        """Compare digests, slice by slice; all sources work on theirs while we do on ours."""
        left = {source: parts(copies) for source, copies in bound.items()}
        while left:
            asked: list[tuple[Source, Arrays, Future[ReplyBody]]] = []
            for source, more in list(left.items()):
                part = next(more, None)
                if part is None:
                    del left[source]
                    continue
                runs = encode_runs(part.src, part.length)
                sum_ = Sum(VERSION, source.incarnation, ticket.hold_id, runs)
                asked.append((source, part, self.caller.call(source.address, sum_, watch.deadline)))
            for source, part, call in asked:
                ours = digest(memory, part.dst, part.length)
                reply = self.answer(remote, call, watch)
                who = f"rank {tuple(source.rank)}"
                if not isinstance(reply, Summed):
                    why = reply.message if isinstance(reply, Refused) else type(reply).__name__
                    raise HandoverError(f"{who} gives no checksum: {why}")
                if reply.digest != ours:
                    self.known.forget(remote)
                    raise ChecksumError(
                        f"{who}: {len(part)} runs of {int(part.length.sum())} bytes arrived "
                        f"differently than the source holds them (xxh3 {reply.digest.hex()} there, "
                        f"{ours.hex()} here); nothing of this load is used. The carrier or the "
                        "network between the two engines damages bytes"
                    )

    def _wait(self, transfer: Transfer, watch: Watch) -> None:
        """Wait for a transfer, and look now and then whether anyone still wants it."""
        while True:
            watch.require_wanted()
            try:
                transfer.wait(min(watch.deadline, time.monotonic() + TRANSFER_LOOK_SECONDS))
                return
            except DeadlineExceeded:
                if time.monotonic() >= watch.deadline or transfer.poll() is TransferState.FAILED:
                    raise

    def _zero_rest(self, remote: Remote, load: Load) -> None:
        rest = uncovered(
            self.everything,
            remote.shape,
            tokens=load.ticket.tokens,
            skip=load.skip,
            dst_tables=load.tables,
            dst_bases=self.bases,
        )
        if len(rest.address):
            self.zero(rest.address, rest.length)

    def _confirm(self, remote: Remote, load: Load, watch: Watch) -> None:
        """The load counts only if every source kept the hold open until after the last byte."""
        if load.keep_open:
            calls = self._ask_open(remote, load.ticket, watch.deadline)
        else:
            calls = self.say(remote, load.ticket, "done", watch.deadline)
        for source, call in calls.items():
            reply = self.answer(remote, call, watch)
            was_open = isinstance(reply, Closing) and reply.was_open
            was_open |= isinstance(reply, Renewed) and load.ticket.hold_id in reply.open
            if not was_open:
                raise StaleTicket(
                    f"rank {tuple(source.rank)} closed the hold before the load was over; what was "
                    "read is discarded"
                )

    def _ask_open(
        self, remote: Remote, ticket: Ticket, deadline: float
    ) -> dict[Source, Future[ReplyBody]]:
        return {
            source: self.caller.call(
                source.address, Renew(VERSION, source.incarnation, [ticket.hold_id]), deadline
            )
            for source in remote.sources
        }

    def say(
        self, remote: Remote, ticket: Ticket, outcome: Outcome, deadline: float
    ) -> dict[Source, Future[ReplyBody]]:
        """Send our last word to every source."""
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
            for source in remote.sources
        }


def _end_transfers(transfers: Sequence[Transfer], tally: Tally) -> None:
    """Cancel all. Returns only when no byte of any can arrive: their blocks are used again.

    A transfer that its carrier cannot end is *abandoned*: it counts as such, and its load stays
    unreported, until the carrier returns.
    """
    left = list(transfers)
    while left:
        try:
            left[-1].cancel()
            left.pop()
        except DeadlineExceeded as error:
            log.error("a failed load keeps its blocks until its transfer has ended: %s", error)
            with tally.abandoning():
                _outlast(left.pop())


def _outlast(transfer: Transfer) -> None:
    """Until the carrier has nothing under way any more, however long that takes."""
    while transfer.poll() is TransferState.RUNNING:
        try:
            transfer.wait(time.monotonic() + ABANDONED_LOOK_SECONDS)
        except DeadlineExceeded:
            continue
        except KvferryError:
            return
