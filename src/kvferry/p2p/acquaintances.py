"""The engines that a consumer rank has met: one handshake per incarnation, made when first needed.

A handshake has a short time of its own (`meetings`), far less than a load: its directory may be
somebody who takes connections and says nothing. Loads that need the same engine at the same time
share one handshake. A handshake that failed is made again by the next load; an engine whose peers
were lost is forgotten, and met again. So is one that nothing was loaded from for a while: it may be
gone, and its successor has another name. Its connections are given back when the last load that
uses them has left.

What a directory says counts for the tickets that name this directory: a ticket that tells another
is met there, whatever is known of an engine of the same name. A new incarnation of an engine voids
those before it, but for children of the same engine, which live side by side.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvferry.errors import Cancelled, DeadlineExceeded
from kvferry.layout.rank import RankLayout
from kvferry.p2p.caller import Caller
from kvferry.p2p.incarnations import are_siblings
from kvferry.p2p.meetings import MEET_SECONDS
from kvferry.p2p.remote import Remote, disconnect, knows_all_ranks, topology_name
from kvferry.p2p.remote import meet as meet_remote
from kvferry.p2p.ticket import Ticket
from kvferry.p2p.watch import Watch
from kvferry.topology import TransferTopology
from kvferry.transport.base import Carrier
from kvferry.wire.messages import VERSION, EngineInfo, Hello, ReplyBody

IDLE_SECONDS = 600.0  # an engine without a load is forgotten after this long
ASK_AGAIN_SECONDS = 0.2  # where a directory does not know all its ranks yet
STARTING = 4  # times as long as for a silent directory is waited for one that says it is starting


@dataclass(frozen=True, slots=True)
class Key:
    """An engine's life, and who told of it."""

    engine_id: str
    incarnation: str
    directory: str

    @classmethod
    def of(cls, ticket: Ticket) -> Key:
        return cls(ticket.engine_id, ticket.incarnation, ticket.directory)

    def voids(self, other: Key) -> bool:
        """Whether an engine that lives this life has ended that one."""
        return (
            self.engine_id == other.engine_id
            and self.incarnation != other.incarnation
            and not are_siblings(self.incarnation, other.incarnation)
        )


@dataclass(slots=True, eq=False)
class Known:
    """An engine that was met, or is being met."""

    name: str  # in our topology
    remote: Future[Remote] = field(default_factory=Future)
    users: int = 0  # loads that have it, or wait for it
    used: float = field(default_factory=time.monotonic)  # when a load last left it
    forgotten: bool = False  # the last user gives its connections back

    @property
    def met(self) -> bool:
        return self.remote.done() and self.remote.exception() is None

    def is_of(self, remote: Remote) -> bool:
        return self.met and self.remote.result() is remote


@dataclass(slots=True)
class Acquaintances:
    """Remote engines. Any method, from any thread."""

    caller: Caller
    engine: EngineInfo  # ours
    topology: TransferTopology
    layout: RankLayout
    carriers: Sequence[Carrier]
    _remotes: dict[Key, Known] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def engines(self) -> dict[Key, Known]:
        """Those that were met, or are being met; a copy."""
        with self._lock:
            return dict(self._remotes)

    def using(self, ticket: Ticket) -> Known | None:
        """The engine of a ticket, if it is met; it is kept until the caller says `leave`."""
        with self._lock:
            known = self._remotes.get(Key.of(ticket))
            if known is None or not known.met:
                return None
            known.users += 1
            return known

    def meet(self, ticket: Ticket, watch: Watch, seconds: float = MEET_SECONDS) -> Known:
        """The same for one that may have to be met first, in these seconds; one handshake for all
        that need it."""
        key = Key.of(ticket)
        while True:
            with self._lock:
                known = self._remotes.get(key)
                mine = known is None
                if known is None:
                    known = self._remotes[key] = Known(self._free_name(key))
                known.users += 1
            try:
                if mine:
                    self._make_known(known, key, ticket, watch, seconds)
                else:
                    watch.result(known.remote)
                return known
            except (Cancelled, DeadlineExceeded):
                self.leave(known)
                if mine or watch.over or not known.remote.done():
                    raise
                # it was the other load that ran out of time: try ourselves
            except BaseException:
                self.leave(known)
                raise

    def _free_name(self, key: Key) -> str:
        """With the lock held: what our topology calls an engine and nobody who is met beside it.

        It has the engine's id to itself, but for siblings and for what other directories tell.
        """
        taken = {
            known.name
            for other, known in self._remotes.items()
            if not (key.voids(other) and known.remote.done())
        }
        name = plain = topology_name(self.topology, key.engine_id)
        numbers = itertools.count(2)
        while name in taken:
            name = f"{plain} ({next(numbers)})"
        return name

    def _drop(self, key: Key) -> Known:
        """With the lock held: forget one that nobody is meeting just now."""
        known = self._remotes.pop(key)
        known.forgotten = True
        if all(known.name != other.name for other in self._remotes.values()):
            self.topology.unregister_remote_engine(known.name)
        return known

    def leave(self, known: Known) -> None:
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
        return [self._drop(key) for key in idle]

    def _make_known(
        self, known: Known, key: Key, ticket: Ticket, watch: Watch, seconds: float
    ) -> None:
        try:
            welcome = self._ask_directory(ticket, watch, seconds)
            remote = meet_remote(
                welcome,
                ticket,
                self.engine,
                self.topology,
                self.layout,
                self.carriers,
                min(watch.deadline, time.monotonic() + seconds),
                known.name,
            )
        except BaseException as error:
            with self._lock:
                self._drop(key)  # the next load tries again, and may find it otherwise
                self.topology.unregister_remote_engine(known.name)
            known.remote.set_exception(error)
            raise
        with self._lock:  # a new incarnation voids all that was known of the engine
            void = [k for k, old in self._remotes.items() if key.voids(k) and old.remote.done()]
            idle = [old for old in map(self._drop, void) if not old.users]
        for old in idle:
            _disconnect(old)
        known.remote.set_result(remote)

    def _ask_directory(self, ticket: Ticket, watch: Watch, seconds: float) -> ReplyBody:
        """Its welcome; asked again while its workers are still starting."""
        hello = Hello(VERSION, self.engine)
        last = min(watch.deadline, time.monotonic() + STARTING * seconds)
        while True:
            now = time.monotonic()
            brief = Watch(min(watch.deadline, now + seconds), watch.given_up)
            welcome = brief.result(self.caller.call(ticket.directory, hello, brief.deadline))
            if knows_all_ranks(welcome) or time.monotonic() + ASK_AGAIN_SECONDS >= last:
                return welcome
            watch.pause(ASK_AGAIN_SECONDS)

    def forget(self, remote: Remote) -> None:
        """Meet it again next time; a handshake that was made since is kept."""
        with self._lock:
            keys = [key for key, known in self._remotes.items() if known.is_of(remote)]
            idle = [known for known in map(self._drop, keys) if not known.users]
        for known in idle:
            _disconnect(known)


def _disconnect(known: Known) -> None:
    """Give back the connections to an engine that is no more, or was lost."""
    if known.met:
        disconnect(known.remote.result().sources)
