"""One load: a request's cache out of producers' memory, step by step, on a thread of its own.

1. **meet** the remote engine: the directory's welcome, plans, connections. Once per incarnation.
2. **claim** the hold at every source rank that concerns us, all at once. A claim may be parked.
3. **read** by carrier, edge by edge, all at once, in slices.
4. **zero** the bytes of loaded blocks that nothing covers.
5. the **last word**, `done`, to every source rank. Only if all of them answer that the hold was
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

from kvferry.errors import Cancelled, DeadlineExceeded, HandoverError, KvferryError, StaleTicket
from kvferry.layout.rank import Ints
from kvferry.p2p.acquaintances import Acquaintances
from kvferry.p2p.caller import Caller
from kvferry.p2p.remote import Remote, Source
from kvferry.p2p.ticket import Ticket
from kvferry.p2p.watch import Clock, Watch
from kvferry.plan import Copies, EdgePlan, bind, uncovered
from kvferry.transport.base import Transfer, TransferState
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

TRANSFER_LOOK_SECONDS = 0.1  # between two looks at whether a transfer is still wanted
SLICE_DESCRIPTORS = 65_536  # bound at a time, so that no NumPy call takes long
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

    def run(self, load: Load, watch: Watch, clock: Clock) -> Loaded:
        remote = self.known.meet(load.ticket, watch)
        clock.stop("meet")
        try:
            claimed = self._claim(remote, load.ticket, watch)
            clock.stop("claim")
            moved, descriptors = self._read(remote, load, claimed, watch, clock)
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

    def _read(
        self,
        remote: Remote,
        load: Load,
        claimed: dict[Source, Claimed],
        watch: Watch,
        clock: Clock,
    ) -> tuple[int, int]:
        transfers: list[Transfer] = []
        moved = descriptors = 0
        try:
            for source, hold in claimed.items():
                if source.plan is None or source.carrier is None:
                    continue
                bound = bind(
                    source.plan,
                    tokens=load.ticket.tokens,
                    skip=load.skip,
                    src_tables=hold.tables,
                    dst_tables=load.tables,
                    src_bases=source.bases,
                    dst_bases=self.bases,
                )
                moved, descriptors = moved + bound.bytes, descriptors + bound.descriptors
                if getattr(source.carrier, "takes_strided", False):
                    read: Any = source.carrier.read
                    transfers.extend(read(source.peer, batch) for batch in bound.batches)
                    continue
                for piece in bound.slices(SLICE_DESCRIPTORS):
                    mine = Copies(piece.src.copy(), piece.dst.copy(), piece.length.copy())
                    transfers.append(source.carrier.read(source.peer, mine))
            clock.stop("bind")
            for transfer in transfers:
                self._wait(transfer, watch)
            clock.stop("read")
        except BaseException as error:
            _end_transfers(transfers)
            if not isinstance(error, Cancelled):
                self.known.forget(remote)
            raise
        return moved, descriptors

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


def _end_transfers(transfers: Sequence[Transfer]) -> None:
    """Cancel all. Returns only when no byte of any can arrive: their blocks are used again."""
    left = list(transfers)
    while left:
        try:
            left[-1].cancel()
            left.pop()
        except DeadlineExceeded as error:
            log.error("a failed load keeps its blocks until its transfer has ended: %s", error)
            if left[-1].poll() is not TransferState.RUNNING:
                left.pop()
