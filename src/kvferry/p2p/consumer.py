"""A consumer rank: loads requests out of producers' memory.

One load, on a thread of its own:

1. **meet** the remote engine: the directory's welcome, plans, connections. Once per incarnation.
2. **claim** the hold at every source rank that concerns us, all at once. A claim may be parked.
3. **read** by carrier, edge by edge, all at once, in slices.
4. **zero** the bytes of loaded blocks that nothing covers.
5. the **last word**, `done`, to every source rank. Only if all of them answer that the hold was
   still open is the load good: the bytes were read from blocks that nobody reused meanwhile.

Whatever fails, the sources are told `failed` (best effort), and the request is reported failed,
once, with the reason. Every step ends by the load's deadline. A load that shares its ticket with
other requests (`keep_open`) asks whether the hold is open instead of closing it; `release` sends
the last word when the scheduler says that nobody needs the ticket any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from kvferry.errors import Cancelled, DeadlineExceeded, HandoverError, KvferryError, StaleTicket
from kvferry.layout.model import CacheModel
from kvferry.layout.rank import Ints, RankLayout
from kvferry.p2p.caller import Caller
from kvferry.p2p.remote import Remote, Source, meet
from kvferry.p2p.ticket import Ticket
from kvferry.plan import Copies, bind, everything_plan, uncovered
from kvferry.transport.base import Carrier, Transfer
from kvferry.wire.messages import (
    VERSION,
    Claim,
    Claimed,
    Closing,
    Complete,
    EngineInfo,
    Hello,
    Outcome,
    Reader,
    Refused,
    Renew,
    Renewed,
    ReplyBody,
)
from kvferry.wire.sockets import Sockets

log = logging.getLogger("kvferry")

LOAD_THREADS = 8
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
        self._carriers, self._zero, self._optional = list(carriers), zero, optional_roles
        self._caller = Caller(sockets)
        self._all = everything_plan(model, layout)
        self._pool = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="kvferry-load")
        self._remotes: dict[tuple[str, str], Future[Remote]] = {}
        self._lock = threading.Lock()
        self._done: list[Loaded] = []
        self._cancelled: set[str] = set()
        self._running: set[str] = set()
        rank = layout.rank
        self._reader = Reader(engine.engine_id, engine.incarnation, rank.pp, rank.tp)

    # Called by the engine

    def start(self, load: Load) -> None:
        """Begin a load; returns at once."""
        with self._lock:
            self._running.add(load.request_id)
        self._pool.submit(self._run, load, time.monotonic() + load.seconds)

    def cancel(self, request_id: str) -> None:
        """Give a load up; it is still reported, as failed."""
        with self._lock:
            if request_id in self._running:
                self._cancelled.add(request_id)

    def release(self, ticket: Ticket, outcome: Outcome, seconds: float = WORD_SECONDS) -> None:
        """Say our last word about a ticket without loading: not needed, or not needed any more."""
        self._pool.submit(self._release, ticket, outcome, time.monotonic() + seconds)

    def take_done(self) -> list[Loaded]:
        """Loads that ended since the last call, each exactly once."""
        with self._lock:
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        with self._lock:
            self._cancelled |= self._running
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._caller.close()

    # One load

    def _run(self, load: Load, deadline: float) -> None:
        clock = _Clock()
        try:
            result = self._load(load, deadline, clock)
        except KvferryError as error:
            result = Loaded(
                load.request_id, f"{type(error).__name__}: {error}", seconds=clock.spent
            )
        except Exception as error:
            log.exception("loading request %s failed", load.request_id)
            result = Loaded(load.request_id, f"internal error: {error!r}", seconds=clock.spent)
        with self._lock:
            self._running.discard(load.request_id)
            self._cancelled.discard(load.request_id)
            self._done.append(result)
        if not result.ok:
            log.warning("request %s: not loaded: %s", load.request_id, result.error)

    def _load(self, load: Load, deadline: float, clock: _Clock) -> Loaded:
        remote = self._meet(load.ticket, deadline)
        clock.stop("meet")
        try:
            claimed = self._claim(remote, load.ticket, deadline)
            self._require_wanted(load)
            clock.stop("claim")
            moved, descriptors = self._read(remote, load, claimed, deadline, clock)
            self._zero_rest(remote, load)
            clock.stop("zero")
            self._confirm(remote, load, deadline)
            clock.stop("confirm")
        except BaseException:
            if not load.keep_open:
                self._say(remote, load.ticket, "failed", time.monotonic() + WORD_SECONDS)
            raise
        return Loaded(load.request_id, "", moved, descriptors, clock.spent)

    def _meet(self, ticket: Ticket, deadline: float) -> Remote:
        """The remote engine of a ticket; one handshake for all loads that need it at once."""
        key = (ticket.engine_id, ticket.incarnation)
        with self._lock:
            known = self._remotes.get(key)
            if known is None:
                known = self._remotes[key] = Future()
                mine = True
            else:
                mine = False
        if mine:
            try:
                hello = Hello(VERSION, self.engine)
                welcome = wait_for(self._caller.call(ticket.directory, hello, deadline), deadline)
                remote = meet(
                    welcome,
                    ticket.incarnation,
                    self.engine,
                    self.model,
                    self.layout,
                    self._carriers,
                    deadline,
                    self._optional,
                )
                known.set_result(remote)
            except BaseException as error:
                with self._lock:
                    del self._remotes[key]  # the next load tries again
                known.set_exception(error)
                raise
        return wait_for(known, deadline)

    def _claim(self, remote: Remote, ticket: Ticket, deadline: float) -> dict[Source, Claimed]:
        patience = max(0.0, deadline - time.monotonic())
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
                deadline,
            )
            for source in remote.sources
        }
        claimed = {}
        for source, call in calls.items():
            reply = self._answer(remote, call, deadline)
            if isinstance(reply, Refused):
                raise StaleTicket(f"rank {tuple(source.rank)} refuses the claim: {reply.message}")
            if not isinstance(reply, Claimed):
                raise HandoverError(f"a claim was answered with a {type(reply).__name__}")
            if reply.tokens < ticket.tokens:
                raise HandoverError(
                    f"the ticket promises {ticket.tokens} tokens, rank {tuple(source.rank)} holds "
                    f"{reply.tokens}"
                )
            claimed[source] = reply
        return claimed

    def _answer(self, remote: Remote, call: Future[ReplyBody], deadline: float) -> ReplyBody:
        try:
            return wait_for(call, deadline)
        except KvferryError:
            self._forget(remote)  # the peer may have restarted: meet it again next time
            raise

    def _forget(self, remote: Remote) -> None:
        with self._lock:
            self._remotes.pop((remote.engine.engine_id, remote.engine.incarnation), None)

    def _read(
        self,
        remote: Remote,
        load: Load,
        claimed: dict[Source, Claimed],
        deadline: float,
        clock: _Clock,
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
                self._wait(transfer, load, deadline)
            clock.stop("read")
        except BaseException as error:
            for transfer in transfers:
                transfer.cancel()
            if not isinstance(error, Cancelled):
                self._forget(remote)
            raise
        return moved, descriptors

    def _wait(self, transfer: Transfer, load: Load, deadline: float) -> None:
        """Wait for a transfer, and look now and then whether anyone still wants it."""
        while True:
            self._require_wanted(load)
            try:
                transfer.wait(min(deadline, time.monotonic() + 0.1))
                return
            except DeadlineExceeded:
                if time.monotonic() >= deadline:
                    raise

    def _require_wanted(self, load: Load) -> None:
        if load.request_id in self._cancelled:
            raise Cancelled("the request was given up")

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

    def _confirm(self, remote: Remote, load: Load, deadline: float) -> None:
        """The load counts only if every source kept the hold open until after the last byte."""
        if not load.keep_open:
            for closing in self._say(remote, load.ticket, "done", deadline):
                if not isinstance(closing, Closing) or not closing.was_open:
                    raise StaleTicket("a source closed the hold before the load was over")
            return
        renew = Renew(VERSION, load.ticket.incarnation, [load.ticket.hold_id])
        calls = []
        for source in remote.sources:
            ask = Renew(VERSION, source.incarnation, renew.hold_ids)
            calls.append(self._caller.call(source.address, ask, deadline))
        for call in calls:
            reply = self._answer(remote, call, deadline)
            if not isinstance(reply, Renewed) or reply.closed:
                raise StaleTicket("a source closed the hold before the load was over")

    def _say(
        self, remote: Remote, ticket: Ticket, outcome: Outcome, deadline: float
    ) -> list[ReplyBody | None]:
        """Our last word to every source; None for those that did not answer."""
        calls = [
            self._caller.call(
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
        ]
        replies: list[ReplyBody | None] = []
        for call in calls:
            try:
                replies.append(self._answer(remote, call, deadline))
            except KvferryError as error:
                log.debug("a source did not hear %r: %s", outcome, error)
                replies.append(None)
        return replies

    def _release(self, ticket: Ticket, outcome: Outcome, deadline: float) -> None:
        try:
            self._say(self._meet(ticket, deadline), ticket, outcome, deadline)
        except KvferryError as error:
            log.info("the hold of a ticket was not released, and will expire: %s", error)


class _Clock:
    """Seconds spent, by step."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._last = time.monotonic()

    def stop(self, step: str) -> None:
        now = time.monotonic()
        self.spent[step] = now - self._last
        self._last = now


T = TypeVar("T")


def wait_for(future: Future[T], deadline: float) -> T:
    """A future's result by a deadline."""
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        raise DeadlineExceeded("the peer did not answer in time") from None
