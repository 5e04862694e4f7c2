"""The engines that a consumer rank has met: one handshake per incarnation, made when first needed.

Loads that need the same engine at the same time share one handshake. A handshake that failed is
made again by the next load; an engine whose peers were lost is forgotten, and met again. So is one
that nothing was loaded from for a while: it may be gone, and its successor has another name. Its
connections are given back when the last load that uses them has left.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvferry.errors import Cancelled, DeadlineExceeded
from kvferry.layout.rank import RankLayout
from kvferry.p2p.caller import Caller
from kvferry.p2p.remote import Remote, disconnect, knows_all_ranks
from kvferry.p2p.remote import meet as meet_remote
from kvferry.p2p.ticket import Ticket
from kvferry.p2p.watch import Watch
from kvferry.topology import TransferTopology
from kvferry.transport.base import Carrier
from kvferry.wire.messages import VERSION, EngineInfo, Hello, ReplyBody

IDLE_SECONDS = 600.0  # an engine without a load is forgotten after this long
ASK_AGAIN_SECONDS = 0.2  # where a directory does not know all its ranks yet


@dataclass(slots=True, eq=False)
class Known:
    """An engine that was met, or is being met."""

    directory: str  # where it was met
    remote: Future[Remote] = field(default_factory=Future)
    users: int = 0  # loads that have it, or wait for it
    used: float = field(default_factory=time.monotonic)  # when a load last left it
    forgotten: bool = False  # the last user gives its connections back


@dataclass(slots=True)
class Acquaintances:
    """Remote engines by (engine id, incarnation). Any method, from any thread."""

    caller: Caller
    engine: EngineInfo  # ours
    topology: TransferTopology
    layout: RankLayout
    carriers: Sequence[Carrier]
    _remotes: dict[tuple[str, str], Known] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def meet(self, ticket: Ticket, watch: Watch) -> Iterator[Remote]:
        """The remote engine of a ticket, while it is used; one handshake for all that need it."""
        key = (ticket.engine_id, ticket.incarnation)
        while True:
            with self._lock:
                known = self._remotes.get(key)
                mine = known is None
                if known is None:
                    known = self._remotes[key] = Known(ticket.directory)
                known.users += 1
            try:
                if mine:
                    remote = self._make_known(known, key, ticket, watch)
                else:
                    remote = watch.result(known.remote)
            except (Cancelled, DeadlineExceeded):
                self._leave(known)
                if mine or watch.over or not known.remote.done():
                    raise
                continue  # it was the other load that ran out of time: try ourselves
            except BaseException:
                self._leave(known)
                if mine or known.directory == ticket.directory:
                    raise
                continue  # its ticket named another address than ours does
            try:
                yield remote
            finally:
                self._leave(known)
            return

    def _leave(self, known: Known) -> None:
        now = time.monotonic()
        with self._lock:
            known.users -= 1
            known.used = now
            over = [known] if known.forgotten and known.users == 0 else self._idle(now)
        for one in over:
            _disconnect(one)

    def _idle(self, now: float) -> list[Known]:
        """With the lock held: engines that were not used for long, which are forgotten now."""
        idle = [
            key
            for key, known in self._remotes.items()
            if not known.users and known.used + IDLE_SECONDS <= now
        ]
        over = [self._remotes.pop(key) for key in idle]
        for known in over:
            known.forgotten = True
        return over

    def _make_known(
        self, known: Known, key: tuple[str, str], ticket: Ticket, watch: Watch
    ) -> Remote:
        try:
            remote = meet_remote(
                self._ask_directory(ticket, watch),
                ticket,
                self.engine,
                self.topology,
                self.layout,
                self.carriers,
                watch.deadline,
            )
        except BaseException as error:
            with self._lock:
                if self._remotes.get(key) is known:
                    del self._remotes[key]  # the next load tries again
            known.remote.set_exception(error)
            raise
        with self._lock:  # a new incarnation voids all that was known of the engine
            others = [
                k
                for k, other in self._remotes.items()
                if k[0] == key[0] and k != key and other.remote.done()
            ]
            void = [self._remotes.pop(other) for other in others]
            idle = [old for old in void if not old.users]
            for old in void:
                old.forgotten = True
        for old in idle:
            _disconnect(old)
        known.remote.set_result(remote)
        return remote

    def _ask_directory(self, ticket: Ticket, watch: Watch) -> ReplyBody:
        """Its welcome; asked again while its workers are still starting."""
        hello = Hello(VERSION, self.engine)
        while True:
            welcome = watch.result(self.caller.call(ticket.directory, hello, watch.deadline))
            again = time.monotonic() + ASK_AGAIN_SECONDS
            if knows_all_ranks(welcome) or again >= watch.deadline:
                return welcome
            watch.pause(ASK_AGAIN_SECONDS)

    def forget(self, remote: Remote) -> None:
        """Meet it again next time; a handshake that was made since is kept."""
        key = (remote.engine.engine_id, remote.engine.incarnation)
        with self._lock:
            known = self._remotes.get(key)
            if known is None or not known.remote.done() or known.remote.exception() is not None:
                return
            if known.remote.result() is not remote:
                return
            del self._remotes[key]
            known.forgotten = True
            idle = not known.users
        if idle:
            _disconnect(known)


def _disconnect(known: Known) -> None:
    """Give back the connections to an engine that is no more, or was lost."""
    if known.remote.done() and known.remote.exception() is None:
        disconnect(known.remote.result().sources)
