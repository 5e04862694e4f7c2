"""The engines that a consumer rank has met: one handshake per incarnation, made when first needed.

Loads that need the same engine at the same time share one handshake. A handshake that failed is
made again by the next load; an engine whose peers were lost is forgotten, and met again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvferry.errors import Cancelled, DeadlineExceeded
from kvferry.layout.rank import RankLayout
from kvferry.p2p.caller import Caller
from kvferry.p2p.remote import Remote, knows_all_ranks
from kvferry.p2p.remote import meet as meet_remote
from kvferry.p2p.ticket import Ticket
from kvferry.p2p.watch import Watch
from kvferry.topology import TransferTopology
from kvferry.transport.base import Carrier
from kvferry.wire.messages import VERSION, EngineInfo, Hello, ReplyBody

ASK_AGAIN_SECONDS = 0.2  # where a directory does not know all its ranks yet

log = logging.getLogger("kvferry")


@dataclass(slots=True)
class Acquaintances:
    """Remote engines by (engine id, incarnation). Any method, from any thread."""

    caller: Caller
    engine: EngineInfo  # ours
    topology: TransferTopology
    layout: RankLayout
    carriers: Sequence[Carrier]
    _remotes: dict[tuple[str, str], Future[Remote]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def meet(self, ticket: Ticket, watch: Watch) -> Remote:
        """The remote engine of a ticket; one handshake for all loads that need it at once."""
        key = (ticket.engine_id, ticket.incarnation)
        while True:
            with self._lock:
                known = self._remotes.get(key)
                mine = known is None
                if known is None:
                    known = self._remotes[key] = Future()
            if mine:
                return self._make_known(known, key, ticket, watch)
            try:
                return watch.result(known)
            except (Cancelled, DeadlineExceeded):
                if watch.over or not known.done():
                    raise  # else it was the other load that ran out of time: try ourselves

    def _make_known(
        self, known: Future[Remote], key: tuple[str, str], ticket: Ticket, watch: Watch
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
            known.set_exception(error)
            raise
        with self._lock:  # a new incarnation voids all that was known of the engine
            others = [
                k for k, f in self._remotes.items() if k[0] == key[0] and k != key and f.done()
            ]
            void = [self._remotes.pop(other) for other in others]
        for old in void:
            if old.exception() is None:
                _disconnect(old.result())
        known.set_result(remote)
        log.debug("kvferry: met %s", remote.describe())
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
            met = known is not None and known.done() and known.exception() is None
            if met and known is not None and known.result() is remote:
                del self._remotes[key]


def _disconnect(remote: Remote) -> None:
    """Give back the connections to an engine that is no more."""
    for source in remote.sources:
        if source.carrier is not None:
            source.carrier.disconnect(source.peer)
