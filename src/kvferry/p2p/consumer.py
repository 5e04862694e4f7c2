"""A consumer rank: loads requests out of producers' memory.

One load, on a thread of its own:

1. **meet** the remote engine: the directory's welcome, plans, connections. Once per incarnation.
2. **claim** the hold at every source rank that concerns us, all at once. A claim may be parked.
3. **read** by carrier, edge by edge, all at once, in slices.
4. **zero** the bytes of loaded blocks that nothing covers.
5. the **last word**, `done`, to every source rank. Only if all of them answer that the hold was
   still open is the load good: the bytes were read from blocks that nobody reused meanwhile.

Whatever fails, the sources are told `failed` (best effort, nobody waits for their answers), and
the request is reported failed, once, with the reason. Every step ends by the load's deadline, or
when the load is cancelled. A load is never reported before its transfers have ended: its blocks may
be used again right after. A load that shares its ticket with other requests (`keep_open`) asks
whether the hold is open instead of closing it; `release` sends the last word when the scheduler
says that nobody needs the ticket any more.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from kvferry.errors import (
    Cancelled,
    DeadlineExceeded,
    HandoverError,
    KvferryError,
    StaleTicket,
)
from kvferry.layout.model import CacheModel
from kvferry.layout.rank import Ints, RankLayout
from kvferry.p2p.acquaintances import Acquaintances
from kvferry.p2p.caller import Caller
from kvferry.p2p.remote import Remote, Source
from kvferry.p2p.ticket import Ticket
from kvferry.p2p.watch import Clock, Watch
from kvferry.plan import Copies, bind, everything_plan, uncovered
from kvferry.transport.base import Carrier, Transfer, TransferState
from kvferry.wire.messages import (
    VERSION,
    Claim,
    Claimed,
    Closing,
    Complete,
    EngineInfo,
    Outcome,
    Reader,
    Refused,
    Renew,
    Renewed,
    ReplyBody,
)
from kvferry.wire.sockets import Sockets

log = logging.getLogger("kvferry")

LOAD_THREADS = 64  # started when needed; most wait, and none may wait for a stranger's dead peer
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


class ConsumerRank:
    def __init__(
        self,
        sockets: Sockets,
        engine: EngineInfo,
        model: CacheModel,
        layout: RankLayout,
        bases: Sequence[int],
        carriers: Sequence[Carrier],
        *,
        zero: Callable[[Ints, Ints], None],
        optional_roles: frozenset[str] = frozenset(),
    ) -> None:
        self.engine, self.model, self.layout = engine, model, layout
        self._bases = np.asarray(bases, dtype=np.int64)
        self._zero = zero
        self._caller = Caller(sockets)
        self._all = everything_plan(model, layout)
        self._pool = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="kvferry-load")
        self._known = Acquaintances(
            self._caller, engine, model, layout, list(carriers), optional_roles
        )
        self._lock = threading.Condition()  # notified when a load has ended
        self._done: list[Loaded] = []
        self._running: dict[str, Watch] = {}
        rank = layout.rank
        self._reader = Reader(engine.engine_id, engine.incarnation, rank.pp, rank.tp)

    # Called by the engine

    def start(self, load: Load) -> None:
        """Begin a load; returns at once."""
        watch = Watch(time.monotonic() + load.seconds)
        with self._lock:
            self._running[load.request_id] = watch
        self._pool.submit(self._run, load, watch)

    def cancel(self, request_id: str) -> None:
        """Give a load up; it is still reported, as failed."""
        with self._lock:
            if request_id in self._running:
                self._running[request_id].give_up()

    def release(self, ticket: Ticket, outcome: Outcome, seconds: float = WORD_SECONDS) -> None:
        """Say our last word about a ticket without loading: not needed, or not needed any more."""
        self._pool.submit(self._release, ticket, outcome, Watch(time.monotonic() + seconds))

    def take_done(self) -> list[Loaded]:
        """Loads that ended since the last call, each exactly once."""
        with self._lock:
            done, self._done = self._done, []
        return done

    def wait_done(self, seconds: float) -> None:
        """Wait for a load to end, if any is under way; for engines with nothing else to do."""
        with self._lock:
            if self._running and not self._done:
                self._lock.wait(seconds)

    def close(self) -> None:
        """Give all loads up; their threads end soon after."""
        with self._lock:
            for watch in self._running.values():
                watch.give_up()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._caller.close()

    # One load

    def _run(self, load: Load, watch: Watch) -> None:
        clock = Clock()
        try:
            result = self._load(load, watch, clock)
        except KvferryError as error:
            result = Loaded(
                load.request_id, f"{type(error).__name__}: {error}", seconds=clock.spent
            )
        except Exception as error:
            log.exception("loading request %s failed", load.request_id)
            result = Loaded(load.request_id, f"internal error: {error!r}", seconds=clock.spent)
        with self._lock:
            self._running.pop(load.request_id, None)
            self._done.append(result)
            self._lock.notify_all()
        if not result.ok:
            log.warning("request %s: not loaded: %s", load.request_id, result.error)

    def _load(self, load: Load, watch: Watch, clock: Clock) -> Loaded:
        try:
            remote = self._known.meet(load.ticket, watch)
        except Cancelled:
            if not load.keep_open:
                self._later(load.ticket, "failed")
            raise
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
                self._say(remote, load.ticket, "failed", time.monotonic() + WORD_SECONDS)
            raise
        return Loaded(load.request_id, "", moved, descriptors, clock.spent)

    def _claim(self, remote: Remote, ticket: Ticket, watch: Watch) -> dict[Source, Claimed]:
        patience = max(0.0, watch.deadline - time.monotonic())
        calls = {
            source: self._caller.call(
                source.address,
                Claim(
                    VERSION,
                    source.incarnation,
                    ticket.hold_id,
                    ticket.digest,
                    self._reader,
                    source.readers,
                    patience,
                ),
                watch.deadline,
            )
            for source in remote.sources
        }
        claimed = {}
        for source, call in calls.items():
            reply = self._answer(remote, call, watch)
            who = f"rank {tuple(source.rank)}"
            if isinstance(reply, Refused):
                if reply.reason == "stale":
                    self._known.forget(remote)
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

    def _answer(self, remote: Remote, call: Future[ReplyBody], watch: Watch) -> ReplyBody:
        try:
            return watch.result(call)
        except Cancelled:
            raise
        except KvferryError:
            self._known.forget(remote)  # the peer may have restarted: meet it again next time
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
                    dst_bases=self._bases,
                )
                moved, descriptors = moved + bound.bytes, descriptors + bound.descriptors
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
                self._known.forget(remote)
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
            self._all,
            remote.shape,
            tokens=load.ticket.tokens,
            skip=load.skip,
            dst_tables=load.tables,
            dst_bases=self._bases,
        )
        if len(rest.address):
            self._zero(rest.address, rest.length)

    def _confirm(self, remote: Remote, load: Load, watch: Watch) -> None:
        """The load counts only if every source kept the hold open until after the last byte."""
        if load.keep_open:
            calls = self._ask_open(remote, load.ticket, watch.deadline)
        else:
            calls = self._say(remote, load.ticket, "done", watch.deadline)
        for source, call in calls.items():
            reply = self._answer(remote, call, watch)
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
            source: self._caller.call(
                source.address, Renew(VERSION, source.incarnation, [ticket.hold_id]), deadline
            )
            for source in remote.sources
        }

    def _say(
        self, remote: Remote, ticket: Ticket, outcome: Outcome, deadline: float
    ) -> dict[Source, Future[ReplyBody]]:
        """Send our last word to every source."""
        return {
            source: self._caller.call(
                source.address,
                Complete(
                    VERSION,
                    source.incarnation,
                    ticket.hold_id,
                    self._reader,
                    source.readers,
                    outcome,
                ),
                deadline,
            )
            for source in remote.sources
        }

    def _later(self, ticket: Ticket, outcome: Outcome) -> None:
        with contextlib.suppress(RuntimeError):  # the pool is shut down: the hold expires
            self.release(ticket, outcome)

    def _release(self, ticket: Ticket, outcome: Outcome, watch: Watch) -> None:
        try:
            remote = self._known.meet(ticket, watch)
            for call in self._say(remote, ticket, outcome, watch.deadline).values():
                self._answer(remote, call, watch)
        except KvferryError as error:
            log.info("the hold of a ticket was not released, and will expire: %s", error)


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
