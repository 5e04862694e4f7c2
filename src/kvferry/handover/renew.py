# SPDX-License-Identifier: Apache-2.0
"""A decode engine's scheduler keeps holds open while its requests queue and load.

Between `watch` and `drop`, the renewer's thread sends a `Renew` to every rank of the producer: the
first after 1/32 of the lease, then every quarter of it. Long engine steps do not delay this thread.
A claim renews the lease too. The renewer asks the producer's directory for its ranks once per
incarnation.

    watched --renewed at all ranks--> watched
    watched --closed at all ranks---> forgotten
    watched --engine restarted------> forgotten: the ticket is stale
    watched --several failures in a row--> kept, but its engine is asked no more until a new ticket
                                           of that engine comes; one line in the log says so

Early tickets. If both engines get a request at the same time, its hold may not be there yet. The
renewer then asks the producer's first rank often (`watch(early=True)`), and `arrived` tells the
scheduler when to reserve blocks: not before the prompt is computed. If thousands of early tickets
wait, each question names some of them, in turn.

    early --open at a rank----------------------> watched
    early --closed, engine restarted or silent--> gone

The renewer never fails a load. A hold without renewals expires at the producer, and the load then
fails there. The thread waits for no answer, so a silent producer delays no other one. Directories
that have not answered yet are asked a few at a time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from kvferry.errors import HandoverError, IncompatibleError, KvferryError, StaleTicket
from kvferry.handover.peers import PeerKey, require_welcome
from kvferry.handover.ticket import Ticket
from kvferry.net.messages import VERSION, EngineInfo, Hello, Refused, Renew, Renewed, ReplyBody
from kvferry.net.rpc import Caller, Sockets

log = logging.getLogger("kvferry")

RENEWALS = 4  # of a lease; three may be lost before it runs out
CALL_SECONDS = 5.0
FIRST_RENEWAL = 1 / 8  # of the interval, after a new ticket
MOST_FAILURES = 3  # in a row; then the producer counts as dead
MOST_HELLOS = 64  # directories asked at once: each needs sockets, and some may be silent
MOST_HOLDS_PER_CALL = 4096  # of at most `MOST_HOLD_BYTES`: half of the size limit of a message
CLOSE_SECONDS = 5.0
EARLY_SECONDS = 0.01  # between two questions about holds that have not arrived, to one engine
FAILED_SECONDS = 1.0  # the same, after a question that was not answered
MOST_EARLY_PER_CALL = 256  # such holds in one question; its rank needs 0.1 ms for them


@dataclass(frozen=True, slots=True)
class _Address:
    address: str
    incarnation: str


@dataclass(slots=True)
class _Producer:
    renew_at: float  # when its holds are next renewed
    holds: dict[str, set[_Address]] = field(default_factory=dict)  # ranks that closed each hold
    early: dict[str, None] = field(default_factory=dict)  # holds that have not arrived, in turn
    early_at: float = 0.0  # when it is next asked about them
    ranks: list[_Address] = field(default_factory=list)  # empty: ask the directory
    calls: int = 0  # to its ranks, under way
    error: KvferryError | None = None  # of one of these
    failures: int = 0

    @property
    def asked(self) -> bool:
        return self.failures < MOST_FAILURES

    @property
    def due(self) -> float:
        """When to ask it next; never while a call is under way."""
        if self.calls or not self.asked:
            return math.inf
        return min(self.renew_at, self.early_at) if self.early else self.renew_at

    def next_early(self) -> list[str]:
        """Holds that have not arrived, to ask about now. They come last the next time."""
        asked = list(islice(self.early, MOST_EARLY_PER_CALL))
        for hold in asked:
            del self.early[hold]
        self.early |= dict.fromkeys(asked)
        return asked


class Renewer:
    """Renews the holds of all watched tickets every `interval_seconds`."""

    def __init__(self, sockets: Sockets, interval_seconds: float) -> None:
        self._caller = Caller(sockets)
        self._hello: Hello | None = None
        self._interval_seconds = interval_seconds
        self._engines: dict[PeerKey, _Producer] = {}
        self._of_hold: dict[str, PeerKey] = {}
        self._asking: set[str] = set()  # directories
        self._condition = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="kvferry-renewer", daemon=True)
        self._thread.start()

    def introduce(self, engine: EngineInfo) -> None:
        """This engine's description, for directories. Until it is there, none is asked."""
        with self._condition:
            self._hello = Hello(VERSION, engine)
            self._condition.notify()

    def watch(self, ticket: Ticket, *, early: bool = False) -> None:
        """Keep a ticket's hold open from now on. `early`: it may not have arrived."""
        key = PeerKey.of(ticket)
        with self._condition:
            if self._stopped or self._of_hold.get(ticket.hold_id) == key:
                return
            self._drop(ticket.hold_id)
            self._of_hold[ticket.hold_id] = key
            soon = time.monotonic() + self._interval_seconds * FIRST_RENEWAL
            engine = self._engines.setdefault(key, _Producer(soon))
            engine.renew_at = min(engine.renew_at, soon)
            engine.holds[ticket.hold_id] = set()
            if not engine.asked:
                engine.failures = MOST_FAILURES - 1  # one more try
            if early:
                engine.early[ticket.hold_id] = None
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
            engine.early.pop(hold_id, None)
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
                questions = self._questions(time.monotonic())
            for address, body, told in questions:
                until = time.monotonic() + CALL_SECONDS
                self._caller.call(address, body, until).add_done_callback(told)

    def _next(self) -> float:
        if self._hello is None:
            return math.inf
        return min((self._due(*one) for one in self._engines.items()), default=math.inf)

    def _due(self, key: PeerKey, engine: _Producer) -> float:
        waits = key.directory in self._asking or len(self._asking) >= MOST_HELLOS
        return math.inf if waits and not engine.ranks else engine.due

    def _questions(self, now: float) -> list[tuple[str, Hello | Renew, _Told]]:
        """The questions to send now, each with the callback for its answer."""
        due = {key: e for key, e in self._engines.items() if self._due(key, e) <= now}
        questions: list[tuple[str, Hello | Renew, _Told]] = []
        for key, engine in due.items():
            if not engine.ranks:
                continue
            if engine.renew_at <= now:
                engine.renew_at = now + self._interval_seconds
                asked = [(rank, holds) for rank in engine.ranks for holds in _open_at(engine, rank)]
            else:
                asked = [(engine.ranks[0], engine.next_early())]
            engine.calls = len(asked)
            for rank, holds in asked:
                body = Renew(VERSION, rank.incarnation, holds)
                questions.append((rank.address, body, partial(self._renewed, key, engine, rank)))
        assert self._hello is not None
        unknown = {key: engine for key, engine in due.items() if not engine.ranks}
        for directory in _in_turn(unknown)[: MOST_HELLOS - len(self._asking)]:
            self._asking.add(directory)
            questions.append((directory, self._hello, partial(self._welcomed, directory)))
        return questions

    # Called by the caller's thread

    def _welcomed(self, directory: str, call: Future[ReplyBody]) -> None:
        with self._condition:
            self._asking.discard(directory)
            for key, engine in list(self._engines.items()):
                if key.directory != directory or engine.ranks or not engine.asked:
                    continue
                try:
                    engine.ranks = _ranks(key, call.result())
                    engine.renew_at = time.monotonic()
                except (StaleTicket, IncompatibleError) as error:
                    self._forget(key, str(error))
                except KvferryError as error:
                    self._failed(key, engine, error)
            self._condition.notify()

    def _renewed(
        self, key: PeerKey, engine: _Producer, rank: _Address, call: Future[ReplyBody]
    ) -> None:
        with self._condition:
            try:
                self._note(engine, rank, _renewal(call.result()))
            except StaleTicket as error:
                self._forget(key, str(error))
            except KvferryError as error:
                engine.error = error
            engine.calls -= 1
            if not engine.calls:
                failed, engine.error = engine.error, None
                engine.early_at = time.monotonic() + EARLY_SECONDS
                if failed is None:
                    engine.failures = 0
                else:
                    self._failed(key, engine, failed)
            self._condition.notify()

    def _note(self, engine: _Producer, rank: _Address, renewed: Renewed) -> None:
        """Forget holds that all ranks have closed, and early ones that a rank has closed."""
        for hold in renewed.open:
            engine.early.pop(hold, None)
        for hold in engine.holds.keys() & set(renewed.closed):
            engine.holds[hold].add(rank)
            if hold in engine.early or engine.holds[hold] >= set(engine.ranks):
                self._drop(hold)

    def _forget(self, key: PeerKey, why: str) -> None:
        holds = list(self._engines[key].holds) if key in self._engines else []
        for hold in holds:
            self._drop(hold)
        if holds:
            log.info(
                "%d holds of engine %r are no longer renewed: %s", len(holds), key.engine_id, why
            )

    def _failed(self, key: PeerKey, engine: _Producer, error: KvferryError) -> None:
        engine.failures += 1
        engine.ranks = []  # the ranks may have moved
        now = time.monotonic()
        engine.renew_at, engine.early_at = now + self._interval_seconds, now + FAILED_SECONDS
        if not engine.asked:
            log.warning(
                "engine %r at %s does not answer; its holds are no longer renewed: %s",
                key.engine_id,
                key.directory,
                error,
            )


_Told = Callable[[Future[ReplyBody]], None]


def _open_at(engine: _Producer, rank: _Address) -> list[list[str]]:
    """The holds that this rank has not closed, as many at a time as one question takes."""
    holds = [hold for hold, closed in engine.holds.items() if rank not in closed]
    step = MOST_HOLDS_PER_CALL
    return [holds[start : start + step] for start in range(0, len(holds), step)]


def _in_turn(unknown: dict[PeerKey, _Producer]) -> list[str]:
    """Directories to ask: those with the fewest failures first, hosts in turn."""
    failures = {key.directory: engine.failures for key, engine in unknown.items()}
    turns: Counter[str] = Counter()
    order: list[tuple[int, int, str]] = []
    for directory, failed in sorted(failures.items(), key=lambda item: item[1]):
        host = directory.rpartition(":")[0]
        order.append((failed, turns[host], directory))
        turns[host] += 1
    return [directory for *_, directory in sorted(order)]


def _ranks(key: PeerKey, reply: ReplyBody) -> list[_Address]:
    welcome = require_welcome(reply, key)
    if not welcome.ranks:
        raise HandoverError("its directory does not know its ranks yet")
    return [_Address(info.address, info.incarnation) for info in welcome.ranks]


def _renewal(reply: ReplyBody) -> Renewed:
    if isinstance(reply, Refused) and reply.reason == "stale":
        raise StaleTicket(reply.message)
    if not isinstance(reply, Renewed):
        raise HandoverError(f"a renewal was answered with {reply}")
    return reply
