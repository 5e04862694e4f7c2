"""A consumer rank: loads requests out of producers' memory, each on a thread of its own.

`load` says what a load does, step by step. Here is what its engine sees: loads begin without
waiting, each is reported exactly once, failed with a reason or good, and never before its last byte
can have arrived. `release` sends the last word about a ticket that nobody needs (any more).

Whoever may send requests may name any directory, also one that never answers. So an engine is met
on other threads (`meetings`), and only a load whose engine is met takes a load thread. The loads of
one directory have half of these at most (`threads`), however long its claims are parked.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import numpy as np

from kvferry.carriers.base import Carrier, Memory, is_granting
from kvferry.errors import Cancelled, KvferryError
from kvferry.handover.deadline import Clock, Deadline
from kvferry.handover.describe import rank_info
from kvferry.handover.load import WORD_SECONDS, HoldClient, Load, Loaded, Loading
from kvferry.handover.peers import Known, Meetings, Peers, Remote
from kvferry.handover.push import WriteOffering
from kvferry.handover.stats import ConsumerStats, ConsumerTally
from kvferry.handover.ticket import Ticket
from kvferry.handover.wakeup import Wakeup
from kvferry.layout.model import CacheModel
from kvferry.layout.placement import Ints, RankLayout
from kvferry.net.messages import EngineInfo, Outcome, Reader
from kvferry.net.rpc import Caller, Sockets
from kvferry.plan import everything_plan
from kvferry.topology import TransferTopology
from kvferry.workers import Threads

log = logging.getLogger("kvferry")

Mode = Literal["pull", "push"]
# Started when needed. Most wait, some for a prefill that is not done, and hold up no others.
LOAD_THREADS = 512


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
        mode: Mode = "pull",
        checked: Memory | None = None,
        bell: Wakeup | None = None,
    ) -> None:
        """What sources do, and how far they are trusted.

        `mode` "push": sources write, where their carrier lets us stop them; else we read.
        `checked`: compare what arrives in this memory with checksums of the sources'; it is read,
        whatever the mode. `bell`: rung when a load has ended.
        """
        self.engine, self.model, self.layout = engine, model, layout
        self._caller = Caller(sockets)
        self._threads = Threads("kvferry-load", LOAD_THREADS)
        self._meetings = Meetings("kvferry-meet")
        rank = layout.rank
        reader = Reader(engine.engine_id, engine.incarnation, rank.pp, rank.tp)
        self._tally = ConsumerTally()
        offering = None
        if mode == "push" and checked is None:
            endpoints = {c.name: c.endpoint() for c in carriers if is_granting(c)}
            offering = WriteOffering(
                reader,
                engine,
                rank_info(layout, bases, "", engine.incarnation, endpoints),
                np.asarray(bases, dtype=np.int64),
                self._caller,
                self._tally,
            )
        self.topology = TransferTopology.of(engine.engine_id, model, layout, optional_roles)
        known = Peers(self._caller, engine, self.topology, layout, list(carriers))
        self._words = HoldClient(reader, model, known, self._caller)
        self._loading = Loading(
            model,
            known,
            self._words,
            np.asarray(bases, dtype=np.int64),
            everything_plan(model, layout),
            zero,
            self._tally,
            offering,
            checked,
        )
        self._lock, self._bell = threading.Lock(), bell or Wakeup()
        self._done: list[Loaded] = []
        self._running: dict[str, Deadline] = {}

    # Called by the engine

    def start(self, load: Load) -> None:
        """Begin a load; returns at once."""
        watch = Deadline(time.monotonic() + load.seconds)
        with self._lock:
            self._running[load.request_id] = watch
        work = partial(self._run, load, watch, Clock())
        try:
            self._once_met(load.ticket, watch, work, partial(self._not_met, load))
        except KvferryError as error:
            self.fail(load, f"{type(error).__name__}: it did not begin: {error}")

    def fail(self, load: Load, why: str) -> None:
        """Report a load that must not begin as failed, and tell its sources."""
        if not load.keep_open:
            self.release(load.ticket, "failed")
        self._end(Loaded(load.request_id, why))

    def cancel(self, request_id: str) -> None:
        """Give a load up; it is still reported, as failed."""
        with self._lock:
            if request_id in self._running:
                self._running[request_id].give_up()

    def release(self, ticket: Ticket, outcome: Outcome, seconds: float = WORD_SECONDS) -> None:
        """Say our last word about a ticket without loading: not needed, or not needed any more."""
        watch = Deadline(time.monotonic() + seconds)
        try:
            self._once_met(ticket, watch, partial(self._release, ticket, outcome, watch), _expires)
        except KvferryError as error:
            _expires(error)
        except Exception:  # nobody looks at what becomes of it
            log.exception("the hold of a ticket was not released, and will expire")

    def take_done(self) -> list[Loaded]:
        """Loads that ended since the last call, each exactly once."""
        with self._lock:
            done, self._done = self._done, []
        return done

    @property
    def busy(self) -> bool:
        """Whether a load is under way."""
        return bool(self._running)

    def stats(self) -> ConsumerStats:
        """What this rank has loaded and what it has not. Safe from any thread."""
        with self._lock:
            running = len(self._running)
        return self._tally.snapshot(running)

    def close(self) -> None:
        """Give all loads up; their threads end soon after."""
        with self._lock:
            for watch in self._running.values():
                watch.give_up()
        self._meetings.close()
        self._threads.close()
        self._caller.close()

    # One load

    def _once_met(
        self,
        ticket: Ticket,
        watch: Deadline,
        work: Callable[[Remote], None],
        fail: Callable[[KvferryError], None],
    ) -> None:
        """Have work done on a load thread when a ticket's engine is met; `fail`: it will not be."""
        everyone = self._loading.known

        def run(known: Known) -> None:
            try:
                work(known.remote.result())
            finally:
                everyone.leave(known)

        def go(known: Known) -> None:
            try:
                self._threads.submit(partial(run, known), ticket.directory)
            except BaseException:
                everyone.leave(known)
                raise

        def meet(seconds: float) -> None:
            watch.require_wanted()
            go(everyone.meet(ticket, watch, seconds))

        known = everyone.using(ticket)
        if known is not None:
            go(known)
        else:
            self._meetings.submit(ticket.directory, meet, fail)

    def _not_met(self, load: Load, error: KvferryError) -> None:
        if isinstance(error, Cancelled) and not load.keep_open:
            self.release(load.ticket, "failed")
        self._end(Loaded(load.request_id, f"{type(error).__name__}: {error}"))

    def _run(self, load: Load, watch: Deadline, clock: Clock, remote: Remote) -> None:
        clock.stop("meet")
        try:
            result = self._loading.run(remote, load, watch, clock)
        except KvferryError as error:
            result = Loaded(
                load.request_id, f"{type(error).__name__}: {error}", seconds=clock.spent
            )
        except Exception as error:
            log.exception("loading request %s failed", load.request_id)
            result = Loaded(load.request_id, f"internal error: {error!r}", seconds=clock.spent)
        self._end(result)

    def _end(self, result: Loaded) -> None:
        if result.ok:
            self._tally.done(result.bytes, result.descriptors, result.seconds, pushed=result.pushed)
        else:
            self._tally.failed(result.error.partition(":")[0], result.seconds)
        with self._lock:
            self._running.pop(result.request_id, None)
            self._done.append(result)
        self._bell.ring()
        if not result.ok:
            log.warning("request %s: not loaded: %s", result.request_id, result.error)

    def _release(self, ticket: Ticket, outcome: Outcome, watch: Deadline, remote: Remote) -> None:
        try:
            calls = self._words.say(remote.sources, ticket, outcome, watch.deadline)
            for call in calls.values():
                self._words.answer(remote, call, watch)
        except KvferryError as error:
            _expires(error)
        except Exception:  # nobody looks at what becomes of it
            log.exception("the hold of a ticket was not released, and will expire")


def _expires(error: KvferryError) -> None:
    log.info("the hold of a ticket was not released, and will expire: %s", error)
