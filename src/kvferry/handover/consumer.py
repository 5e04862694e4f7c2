# SPDX-License-Identifier: Apache-2.0
"""A consumer rank: loads requests' caches from producers' memory, each load on its own thread.

`load.py` has the steps of one load. This module is what the engine calls:

    start     begins a load and returns at once
    accept    takes a load that begins later; it can be cancelled before
    take_done returns the loads that ended, each exactly once, good or failed with a reason
    cancel    gives a load up; it still appears in `take_done`, as failed
    release   sends the last word about a ticket that needs no load

A load appears in `take_done` only when no byte of it can arrive any more: the engine may reuse its
blocks right after. A load takes a load thread only once its engine is met (`peers.Meetings`). The
loads of one directory use at most half of these threads, however long their claims are parked.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from kvferry.carriers.base import Carrier, Memory, is_granting
from kvferry.errors import Cancelled, KvferryError
from kvferry.handover.deadline import Clock, Deadline
from kvferry.handover.describe import rank_info
from kvferry.handover.load import (
    WORD_SECONDS,
    ConsumerStats,
    HoldClient,
    Introductions,
    Load,
    Loaded,
    Loading,
)
from kvferry.handover.peers import Meetings, Peers, Remote
from kvferry.handover.ticket import Ticket
from kvferry.handover.wakeup import Action, Wakeup
from kvferry.layout.model import CacheModel
from kvferry.layout.placement import Ints, RankLayout
from kvferry.net.messages import EngineInfo, Outcome
from kvferry.net.rpc import Caller, Sockets
from kvferry.plan import everything_plan
from kvferry.topology import TransferTopology
from kvferry.workers import Threads

log = logging.getLogger("kvferry")

Mode = Literal["pull", "push"]
# Started when needed. Most of them wait, for example for a prefill that still runs.
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
        wakeup: Wakeup | None = None,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        """`mode` "push": sources write if their carrier can revoke writes; otherwise we read.

        `checked`: compare what arrives in this memory with checksums of the sources. Such loads
        read in both modes. `wakeup`: rung when a load has ended. `zero` clears runs of our memory.
        `replica` of `replicas`: this worker among those of one rank, which all load by reading.
        """
        self._caller = Caller(sockets)
        self._threads = Threads("kvferry-load", LOAD_THREADS)
        self._meetings = Meetings("kvferry-meet")
        self._stats = ConsumerStats()
        self.topology = TransferTopology(
            engine.engine_id, model, layout.shape, layout.rank, optional_roles
        )
        self._peers = Peers(
            self._caller, engine, self.topology, layout, list(carriers), replica, replicas
        )
        introductions = None
        if mode == "push" and checked is None and replicas == 1:
            endpoints = {c.name: c.endpoint() for c in carriers if is_granting(c)}
            info = rank_info(layout, bases, "", engine.incarnation, endpoints)
            introductions = Introductions(self._peers, info)
        self._loading = Loading(
            self._peers,
            np.asarray(bases, dtype=np.int64),
            everything_plan(model, layout),
            zero,
            self._abandoned,
            introductions,
            checked,
        )
        self._lock, self._wakeup = threading.Lock(), wakeup or Wakeup()
        self._done: list[Loaded] = []
        self._running: dict[str, Deadline] = {}

    # Called by the engine

    def start(self, load: Load) -> None:
        self.accept(load)("")

    def accept(self, load: Load) -> Action:
        """Take a load. It begins when the result is called, or fails if that is with an error."""
        watch = Deadline(time.monotonic() + load.seconds)
        with self._lock:
            self._running[load.request_id] = watch
        return partial(self._begin, load, watch)

    def cancel(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._running:
                self._running[request_id].give_up()

    def release(self, ticket: Ticket, outcome: Outcome) -> None:
        """Send this rank's last word about a ticket without a load. Nothing waits for the answer.

        If it does not get through, the hold expires at the producer.
        """
        watch = Deadline(time.monotonic() + WORD_SECONDS)
        self._once_met(ticket, watch, partial(self._release, ticket, outcome), _not_released)

    def take_done(self) -> list[Loaded]:
        with self._lock:
            done, self._done = self._done, []
        return done

    @property
    def busy(self) -> bool:
        return bool(self._running)

    @property
    def links(self) -> list[tuple[str, str]]:
        """The carriers to all sources that this rank has met, each with the reason for it."""
        met = self._peers.engines.values()
        sources = [source for remote in met for source in remote.sources]
        return [(s.carrier.name, s.why) for s in sources if s.carrier is not None]

    def stats(self) -> ConsumerStats:
        with self._lock:
            return replace(self._stats)

    def close(self) -> None:
        with self._lock:
            for watch in self._running.values():
                watch.give_up()
        self._meetings.close()
        self._threads.close()
        self._caller.close()

    # One load

    def _begin(self, load: Load, watch: Deadline, error: str) -> None:
        if not error:
            work = partial(self._run, load, watch, Clock())
            self._once_met(load.ticket, watch, work, partial(self._not_met, load))
            return
        if not load.keep_open:
            self.release(load.ticket, "failed")
        self._end(Loaded(load.request_id, error, kind=error.partition(":")[0]))

    def _once_met(
        self,
        ticket: Ticket,
        watch: Deadline,
        work: Callable[[Remote], None],
        fail: Callable[[KvferryError], None],
    ) -> None:
        """Run `work` on a load thread once the ticket's engine is met, or else call `fail`."""

        def run(remote: Remote) -> None:
            try:
                work(remote)
            finally:
                self._peers.leave(remote)

        def submit(remote: Remote) -> None:
            try:
                self._threads.submit(partial(run, remote), ticket.directory)
            except BaseException:
                self._peers.leave(remote)
                raise

        def meet(seconds: float) -> None:
            watch.require_wanted()
            submit(self._peers.meet(ticket, watch, seconds))

        try:
            watch.require_wanted()
            remote = self._peers.using(ticket)
            if remote is None:
                self._meetings.submit(ticket.directory, meet, fail)
                return
            submit(remote)
        except KvferryError as error:
            fail(error)
            return
        if self._peers.wants_retry(remote):
            self._meet_again(ticket, remote)

    def _meet_again(self, ticket: Ticket, remote: Remote) -> None:
        """Try all carriers once more, on a thread. Until then, loads use the one there is."""

        def failed(error: KvferryError) -> None:
            log.info("engine %r was not met again: %s", ticket.engine_id, error)

        try:
            again = partial(self._peers.meet_again, ticket, remote)
            self._meetings.submit(ticket.directory, again, failed)
        except KvferryError as error:
            failed(error)

    def _not_met(self, load: Load, error: KvferryError) -> None:
        if isinstance(error, Cancelled) and not load.keep_open:
            self.release(load.ticket, "failed")
        self._end(Loaded(load.request_id, str(error), kind=type(error).__name__))

    def _run(self, load: Load, watch: Deadline, clock: Clock, remote: Remote) -> None:
        clock.stop("meet")
        try:
            result = self._loading.run(remote, load, watch, clock)
        except KvferryError as error:
            kind = type(error).__name__
            result = Loaded(load.request_id, str(error), seconds=clock.spent, kind=kind)
        except Exception as error:
            log.exception("loading request %s failed", load.request_id)
            words, kind = f"internal error: {error!r}", "internal error"
            result = Loaded(load.request_id, words, seconds=clock.spent, kind=kind)
        self._end(result)

    def _end(self, result: Loaded) -> None:
        with self._lock:
            self._running.pop(result.request_id, None)
            self._done.append(result)
        self._wakeup.ring()
        if not result.ok:
            log.warning("request %s: not loaded: %s", result.request_id, result.error)

    @contextlib.contextmanager
    def _abandoned(self, blocks: int) -> Iterator[None]:
        """Count a load that is over while it keeps its blocks."""
        with self._lock:
            self._stats.abandoned_now += 1
            self._stats.quarantined_blocks += blocks
        try:
            yield
        finally:
            with self._lock:
                self._stats.abandoned_now -= 1
                self._stats.quarantined_blocks -= blocks

    def _release(self, ticket: Ticket, outcome: Outcome, remote: Remote) -> None:
        watch = Deadline(time.monotonic() + WORD_SECONDS)  # it may have waited for a thread
        client = HoldClient(self._peers, remote, ticket, watch)
        try:
            for call in client.say(remote.sources, outcome).values():
                client.answer(call)
        except KvferryError as error:
            _not_released(error)


def _not_released(error: KvferryError) -> None:
    log.info("the hold of a ticket was not released, and will expire: %s", error)
