# SPDX-License-Identifier: Apache-2.0
"""A decode engine's scheduler keeps holds open while its requests queue.

The scheduler calls `watch` for a request with a ticket, and `drop` when the request's load has
ended or the request is over. In between, the renewer's thread sends a `Renew` to every rank of the
producer now and then. Long engine steps do not delay this thread. The first `Renew` comes soon, but
a request that is loaded right away needs none, because its claim renews the lease. The renewer asks
the producer's directory for its ranks once per incarnation.

    watched --renewed at all ranks--> watched
    watched --closed at all ranks---> forgotten
    watched --engine restarted------> forgotten: the ticket is stale
    watched --several failures in a row--> kept, but its engine is asked no more until a new ticket
                                           of that engine comes; one line in the log says so

Early tickets. If both engines get a request at the same time, its hold may not be there yet. The
renewer then asks the producer's first rank often (`watch(early=True)`), and `arrived` tells the
scheduler when to reserve blocks: not before the prompt is computed.

    early --open at the first rank--------------> watched
    early --closed, engine restarted or silent--> gone

The renewer never fails a load. A hold without renewals expires at the producer, and the load then
fails there. When this engine dies, its renewals stop, and its holds expire.

A silent producer delays the renewals of others by two calls at most, and early tickets of others
not at all. Directories that have not answered yet are asked a few at a time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import wait as wait_all
from dataclasses import dataclass, field
from functools import partial

from kvferry.errors import HandoverError, IncompatibleError, KvferryError, StaleTicket
from kvferry.handover.holds import DEFAULT_LEASE_SECONDS
from kvferry.handover.peers import PeerKey, require_welcome
from kvferry.handover.ticket import Ticket
from kvferry.net.messages import VERSION, EngineInfo, Hello, Refused, Renew, Renewed, ReplyBody
from kvferry.net.rpc import Caller, Sockets

log = logging.getLogger("kvferry")

RENEWALS = 4  # of a lease; three may be lost before it runs out
DEFAULT_INTERVAL_SECONDS = DEFAULT_LEASE_SECONDS / RENEWALS
CALL_SECONDS = 5.0
FIRST_RENEWAL = 1 / 8  # of the interval, after a new ticket
MOST_FAILURES = 3  # in a row; then the producer counts as dead
MOST_HELLOS = 64  # directories asked in one round: each needs sockets, and some may be silent
MOST_HOLDS_PER_CALL = 4096  # ids of 32 characters, far below the size limit of a message
CLOSE_SECONDS = 5.0
EARLY_SECONDS = 0.01  # between two questions about holds that have not arrived, to one engine
FAILED_SECONDS = 1.0  # the same, after a question that was not answered


@dataclass(frozen=True, slots=True)
class _Address:
    """A rank's server."""

    address: str
    incarnation: str


@dataclass(slots=True)
class _Engine:
    """A producer engine."""

    holds: dict[str, set[_Address]] = field(default_factory=dict)  # ranks that closed each hold
    ranks: list[_Address] = field(default_factory=list)  # empty: ask the directory
    failures: int = 0
    early: set[str] = field(default_factory=set)  # holds that have not arrived
    asking: bool = False  # a question about them is under way
    ask_at: float = 0.0  # when the next is due

    @property
    def asked(self) -> bool:
        return self.failures < MOST_FAILURES


class Renewer:
    """Renews the holds of all watched tickets every `interval_seconds`."""

    def __init__(
        self,
        sockets: Sockets,
        engine: EngineInfo,
        *,
        interval_seconds: float = DEFAULT_INTERVAL_SECONDS,
        call_seconds: float = CALL_SECONDS,
    ) -> None:
        self._caller = Caller(sockets)
        self._hello = Hello(VERSION, engine)
        self._interval_seconds, self._call_seconds = interval_seconds, call_seconds
        self._engines: dict[PeerKey, _Engine] = {}
        self._of_hold: dict[str, PeerKey] = {}
        self._condition = threading.Condition()
        self._due = time.monotonic()  # time of the next round
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="kvferry-renewer", daemon=True)
        self._thread.start()

    def watch(self, ticket: Ticket, *, early: bool = False) -> None:
        """Keep a ticket's hold open from now on. `early`: it may not have arrived."""
        key = PeerKey.of(ticket)
        with self._condition:
            if self._stopped or self._of_hold.get(ticket.hold_id) == key:
                return
            self._drop(ticket.hold_id)
            self._of_hold[ticket.hold_id] = key
            engine = self._engines.setdefault(key, _Engine())
            engine.holds[ticket.hold_id] = set()
            if not engine.asked:
                engine.failures = MOST_FAILURES - 1  # one more try
            if early:
                engine.early.add(ticket.hold_id)
                self._condition.notify()
            soon = time.monotonic() + self._interval_seconds * FIRST_RENEWAL
            if soon < self._due:
                self._due = soon
                self._condition.notify()

    def drop(self, hold_id: str) -> None:
        """Stop renewing a hold. An unknown hold is no error."""
        with self._condition:
            self._drop(hold_id)

    def arrived(self, hold_id: str) -> bool | None:
        """Whether a hold that came early is open now; None: not yet; False: it is gone."""
        with self._condition:
            key = self._of_hold.get(hold_id)
            if key is None:
                return False
            if hold_id not in self._engines[key].early:
                return True
            return None if self._engines[key].asked else False

    @property
    def watched(self) -> int:
        with self._condition:
            return len(self._of_hold)

    def close(self) -> None:
        with self._condition:
            self._stopped = True
            self._condition.notify()
        self._caller.close()  # ends the calls for which the thread waits
        self._thread.join(CLOSE_SECONDS)

    def _drop(self, hold_id: str) -> None:
        key = self._of_hold.pop(hold_id, None)
        if key is not None:
            engine = self._engines[key]
            engine.holds.pop(hold_id, None)
            engine.early.discard(hold_id)
            if not engine.holds:
                del self._engines[key]

    # The thread

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._stopped and (left := self._next() - time.monotonic()) > 0:
                    self._condition.wait(left if left < math.inf else None)
                if self._stopped:
                    return
                due = self._due <= time.monotonic()
                if due:
                    self._due = time.monotonic() + self._interval_seconds
                engines = {k: e for k, e in self._engines.items() if e.asked}
            try:
                self._ask_early()
                if due:
                    self._round(engines)
            except Exception:
                log.exception("kvferry's renewer goes on after an error")

    def _round(self, engines: dict[PeerKey, _Engine]) -> None:
        """Renew at all known ranks, and ask directories for the ranks of other engines."""
        known = {key: engine for key, engine in engines.items() if engine.ranks}
        unknown = {key: engine for key, engine in engines.items() if not engine.ranks}
        renewals = self._renew(known)
        hellos = {where: self._call(where, self._hello) for where in _some(unknown)}
        fresh = {key: engine for key, engine in unknown.items() if key.directory in hellos}
        self._wait(hellos.values())
        for key in fresh:
            try:
                fresh[key].ranks = _ranks(key, hellos[key.directory])
            except (StaleTicket, IncompatibleError) as error:
                self._forget(key, str(error))
            except KvferryError as error:
                self._failed(key, fresh[key], error)
        renewals += self._renew(fresh)
        self._wait(call for _, _, call in renewals)
        errors: dict[PeerKey, KvferryError] = {}
        for key, rank, call in renewals:
            try:
                self._note(key, rank, _renewed(call))
            except StaleTicket as error:
                self._forget(key, str(error))
            except KvferryError as error:
                errors[key] = error
        for key in {key for key, _, _ in renewals}:
            if key in errors:
                self._failed(key, engines[key], errors[key])
            else:
                engines[key].failures = 0

    def _renew(
        self, engines: dict[PeerKey, _Engine]
    ) -> list[tuple[PeerKey, _Address, Future[ReplyBody]]]:
        return [
            (key, rank, self._call(rank.address, Renew(VERSION, rank.incarnation, holds)))
            for key, engine in engines.items()
            for rank in engine.ranks
            for holds in self._open_at(engine, rank)
        ]

    def _call(self, address: str, body: Hello | Renew) -> Future[ReplyBody]:
        return self._caller.call(address, body, time.monotonic() + self._call_seconds)

    def _wait(self, calls: Iterable[Future[ReplyBody]]) -> None:
        left = set(calls)
        until = time.monotonic() + self._call_seconds + 1.0  # the calls end earlier themselves
        while left and (now := time.monotonic()) < until:
            pause = min(until - now, EARLY_SECONDS)
            left = wait_all(left, timeout=pause).not_done
            self._ask_early()

    def _next(self) -> float:
        return min(self._due, self._early_due())

    def _early_due(self) -> float:
        """When a producer is to be asked about holds that have not arrived."""
        waiting = (e.ask_at for e in self._engines.values() if e.early and e.asked and not e.asking)
        return min(waiting, default=math.inf)

    def _ask_early(self) -> None:
        """Ask about holds that have not arrived, one question to an engine; wait for none."""
        now, questions = time.monotonic(), []
        with self._condition:
            hellos = sum(e.asking and not e.ranks for e in self._engines.values())
            for key, engine in self._engines.items():
                if not engine.early or engine.asking or not engine.asked or engine.ask_at > now:
                    continue
                if engine.ranks:
                    rank, holds = engine.ranks[0], list(engine.early)[:MOST_HOLDS_PER_CALL]
                    body: Hello | Renew = Renew(VERSION, rank.incarnation, holds)
                    questions.append((key, engine, rank.address, body))
                elif hellos < MOST_HELLOS:
                    hellos += 1
                    questions.append((key, engine, key.directory, self._hello))
                else:
                    engine.ask_at = now + FAILED_SECONDS
                    continue
                engine.asking = True
        for key, engine, address, body in questions:
            call = self._call(address, body)
            call.add_done_callback(partial(self._told_early, key, engine, body))

    def _told_early(
        self, key: PeerKey, engine: _Engine, body: Hello | Renew, call: Future[ReplyBody]
    ) -> None:
        """Called by the caller's thread."""
        pause = EARLY_SECONDS
        try:
            if isinstance(body, Renew):
                self._arrive(key, _renewed(call))
            else:
                engine.ranks = _ranks(key, call)
                pause = 0.0
            engine.failures = 0
        except (StaleTicket, IncompatibleError) as error:
            self._forget(key, str(error))
        except KvferryError as error:
            self._failed(key, engine, error)
            pause = FAILED_SECONDS
        finally:
            with self._condition:
                engine.asking, engine.ask_at = False, time.monotonic() + pause
                self._condition.notify()

    def _arrive(self, key: PeerKey, renewed: Renewed) -> None:
        with self._condition:
            engine = self._engines.get(key)
            if engine is not None:
                engine.early.difference_update(renewed.open)
                for hold in set(renewed.closed) & engine.early:
                    self._drop(hold)

    def _open_at(self, engine: _Engine, rank: _Address) -> list[list[str]]:
        with self._condition:
            holds = [hold for hold, closed in engine.holds.items() if rank not in closed]
        step = MOST_HOLDS_PER_CALL
        return [holds[start : start + step] for start in range(0, len(holds), step)]

    def _note(self, key: PeerKey, rank: _Address, renewed: Renewed) -> None:
        """Note which holds are closed at this rank. Forget those that all ranks have closed."""
        with self._condition:
            engine = self._engines.get(key)
            for hold in renewed.closed if engine is not None else ():
                if engine is not None and hold in engine.holds:
                    engine.holds[hold].add(rank)
                    if engine.holds[hold] >= set(engine.ranks):
                        self._drop(hold)

    def _forget(self, key: PeerKey, why: str) -> None:
        with self._condition:
            holds = list(self._engines[key].holds) if key in self._engines else []
            for hold in holds:
                self._drop(hold)
        if holds:
            log.info(
                "%d holds of engine %r are no longer renewed: %s", len(holds), key.engine_id, why
            )

    def _failed(self, key: PeerKey, engine: _Engine, error: KvferryError) -> None:
        engine.failures += 1
        engine.ranks = []  # the ranks may have moved
        if not engine.asked:
            log.warning(
                "engine %r at %s does not answer; its holds are no longer renewed: %s",
                key.engine_id,
                key.directory,
                error,
            )


def _some(unknown: dict[PeerKey, _Engine]) -> list[str]:
    """Directories to ask in this round: those with the fewest failures first, hosts in turn."""
    failures = {key.directory: engine.failures for key, engine in unknown.items()}
    turns: Counter[str] = Counter()
    order: list[tuple[int, int, str]] = []
    for directory, failed in sorted(failures.items(), key=lambda item: item[1]):
        host = directory.rpartition(":")[0]
        order.append((failed, turns[host], directory))
        turns[host] += 1
    return [directory for *_, directory in sorted(order)[:MOST_HELLOS]]


def _ranks(key: PeerKey, call: Future[ReplyBody]) -> list[_Address]:
    reply = _reply(call)
    if isinstance(reply, Refused) and reply.reason == "busy":  # the engine is still starting
        raise HandoverError(reply.message)
    welcome = require_welcome(reply, key)
    if not welcome.ranks:
        raise HandoverError("its directory does not know its ranks yet")
    return [_Address(info.address, info.incarnation) for info in welcome.ranks]


def _renewed(call: Future[ReplyBody]) -> Renewed:
    reply = _reply(call)
    if isinstance(reply, Refused) and reply.reason == "stale":
        raise StaleTicket(reply.message)
    if not isinstance(reply, Renewed):
        raise HandoverError(f"a renewal was answered with {reply}")
    return reply


def _reply(call: Future[ReplyBody]) -> ReplyBody:
    if not call.done():
        raise HandoverError("it did not answer in time")
    return call.result()
