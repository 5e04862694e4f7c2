# SPDX-License-Identifier: Apache-2.0
"""The fleet: its engines, their health and load, the choice by load, and HTTP to them.

An engine has one role or both. It is added, changed, drained and removed while the router runs:

    added     it is probed at once, and gets requests when it is up
    draining  it gets no new requests; its running ones end, and so do those that hold its tickets
    removed   after draining, or at once; what still runs there goes on to its end

An engine goes down after `fail_after` failures in a row, of probes and requests together, or at
once when it accepts no connection. A good probe ends a row of probes, an answered request ends
both. Only probes bring an engine back: `recover_after` good ones in a row.
After the start one good probe is enough, so that the router is ready at once.

A probe can be good where requests fail. So an engine that comes back is on trial: it gets one
request at a time, until one is answered. Answers may take minutes, so good probes raise that number
slowly. A trial that fails takes the engine out again, each time for twice as long, up to
`trial_seconds`. Only an engine whose host refused a connection meanwhile was started again, and is
used in full at once.

A plain 500 is the request's failure, not the engine's. Otherwise one bad request, tried on every
engine, would take all engines down.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from kvferry.errors import DescriptionError, KvferryError
from kvferry.router.api import (
    ROLES,
    Answer,
    EngineSpec,
    Headers,
    Limits,
    StreamSink,
    end_to_end,
)
from kvferry.router.choice import Role
from kvferry.router.fleet.connections import (
    BrokenAnswer,
    EngineConnection,
    EngineTransport,
    NoConnection,
    address_of_url,
)
from kvferry.router.guard import RequestMemory, Turns
from kvferry.router.live import Placed
from kvferry.router.spans import RequestSpans

log = logging.getLogger(__name__)
# What happened to an engine. `up` again after `down` may be another process.
ChangeKind = Literal["added", "changed", "draining", "removed", "up", "down"]
AfterDrain = Literal["remove", "stay"]
PROBE = "probe"  # during which an engine may fail, besides requests
_REMEMBERED = 5  # absences, whose median is the usual one
# An engine that was not reached for less than this, and whose host never refused a connection, was
# only cut off: none starts as fast.
LEAST_START_SECONDS = 15.0
# A longer absence says nothing about the next one: an operator took the engine out.
_LONGEST_START_SECONDS = 900.0


class UpstreamEngine:
    """One engine: its address, its roles, its health, and its load."""

    def __init__(
        self,
        spec: EngineSpec,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        changed: Callable[[UpstreamEngine, ChangeKind], None] = lambda engine, kind: None,
    ) -> None:
        """`changed` is called when the engine goes up or down."""
        self.spec = spec
        self.draining: AfterDrain | None = None  # what comes after it, while it drains
        self.removed = False
        self.up = False
        self.trial = 0  # up, but only for so many requests at a time; 0: not on trial
        self.gone = False  # down, and its host runs without it
        self.restarted = False  # when it last came up, it was probably another process
        self.starts = 0  # how often it came up
        self.down_since: float | None = None  # while it is down
        self.away_seconds: float | None = None  # how long it was last down; None: never
        self.reason = "its first probe is pending"  # why it is down
        self.in_flight = 0
        self.reserved = 0  # requests that will come here when another engine has prefilled
        self.tickets = 0  # requests that hold a ticket of this engine, not yet used
        self.picked = 0  # when it was last chosen by load, as a count of choices
        self.failures = 0  # of requests and probes, since the start
        self.failed_probes = 0
        self._limits = limits
        # In a row. A good probe says nothing about requests: only an answered one does.
        self._bad_probes = self._bad_requests = 0
        self._good_in_a_row = limits.recover_after - 1  # the first probe counts alone
        self._trials_failed = 0  # in a row
        self._clock = clock
        self._changed = changed

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def roles(self) -> frozenset[Role]:
        return self.spec.roles

    @property
    def role(self) -> str:
        """Its roles in one word, for people: `prefill`, `decode` or `prefill+decode`."""
        return "+".join(role for role in ROLES if role in self.spec.roles)

    @property
    def open(self) -> bool:
        """Whether it is meant to get requests; it may have no room for more."""
        return self.up and self.draining is None and not self.removed

    @property
    def load(self) -> int:
        """Requests that are there, or on their way."""
        return self.in_flight + self.reserved

    @property
    def room(self) -> int:
        """How many more requests it gets now."""
        if not self.open:
            return 0
        most = self.trial or self._limits.max_running
        return max(0, most - self.in_flight - self.reserved)

    @property
    def idle(self) -> bool:
        """Whether it can be stopped without disturbing a request of this router."""
        return not (self.in_flight or self.reserved or self.tickets)

    def answered(self) -> bool:
        """A request got an answer. Returns whether that ended a trial."""
        self._bad_probes = self._bad_requests = 0
        if not self.trial:
            return False
        self.trial = self._trials_failed = 0
        log.info("%s engine %s has passed its trial", self.role, self.url)
        return True

    def failed(
        self, reason: str, *, refused: bool = False, cut_off: bool = False, during: str = PROBE
    ) -> None:
        """A request or a probe failed. `refused`: the engine accepted no connection. `cut_off`:
        perhaps its host was not reached."""
        self.failures += 1
        self._good_in_a_row = 0
        if during == PROBE:
            self.failed_probes += 1
            self._bad_probes += 1
        else:
            self._bad_requests += 1
        enough = 1 if refused or self.trial else self._limits.fail_after
        fell = self.up and self._bad_probes + self._bad_requests >= enough
        if fell:
            self.up = False
            if self.trial:
                self.trial = 0
                self._trials_failed += 1
            log.warning("%s engine %s is down: %s (%s)", self.role, self.url, reason, during)
        elif self.failures == 1 and not self.starts:
            every = self._limits.probe_every_seconds
            text = "%s engine %s is not up yet: %s; it is asked again every %g s"
            log.info(text, self.role, self.url, reason, every)
        if not self.up:
            self.reason = reason
            self.gone |= refused and not cut_off
            if self.down_since is None:
                self.down_since = self._clock()
        if fell:
            self._changed(self, "down")

    def probed_well(self) -> None:
        self._bad_probes = 0
        self._good_in_a_row += 1
        if self.up or self._good_in_a_row < self._limits.recover_after:
            if self.trial and self._good_in_a_row % self._limits.recover_after == 0:
                self.trial = min(2 * self.trial, self._limits.max_running)
            return
        away = None if self.down_since is None else self._clock() - self.down_since
        started = away is None or self.gone
        if started:
            self._trials_failed = 0
        elif away is not None and away < self._until_trial():
            return
        late = away is not None and away >= LEAST_START_SECONDS
        self.restarted = self.gone or late
        self.up, self.trial, self.gone = True, int(not started), False
        self._bad_requests = 0
        self.reason = ""
        self.starts += 1
        self.away_seconds, self.down_since = away, None
        after = "" if away is None else f", after {away:.1f} s"
        on_trial = " on trial" if self.trial else ""
        log.info("%s engine %s is up%s%s", self.role, self.url, on_trial, after)
        self._changed(self, "up")

    def _until_trial(self) -> float:
        """How long it stays down at least, after the trials that it failed."""
        if not self._trials_failed:
            return 0.0
        shortest = self._limits.probe_every_seconds * self._limits.recover_after
        doubled = shortest * 2.0 ** min(self._trials_failed, 30)
        return min(doubled, self._limits.trial_seconds)


# HTTP to engines: every wait has a deadline, and every failure is an `EngineFailure`.

# Less than the 5 s after which uvicorn, and so vLLM, closes an idle connection. A connection that
# closes while the router sends on it looks like an engine that failed.
_KEEPALIVE_SECONDS = 2.0
_HEALTH_BYTES = 64 << 10  # of the answer to a probe; vLLM's is empty
# Other 5xx are failures of the request, not of the engine.
_ENGINE_IS_ILL = (502, 503, 504)
_TROUBLE = (NoConnection, BrokenAnswer, TimeoutError)


@dataclass(slots=True)
class Incoming:
    """One request of a client, and a record of what the router did for it."""

    request_id: bytes
    method: str
    path: str
    headers: Headers  # that engines get, with Authorization: never log them
    held: RequestMemory
    client: str = ""  # address or key, for turns and shares of the line
    trail: list[str] = field(default_factory=list)  # for the log
    placed: Placed | None = None  # for the page, as soon as engines are chosen
    spans: RequestSpans | None = None  # None: the router sends no traces

    def part(self, name: str, engine: str = "") -> None:
        """The next part of its way begins, for traces."""
        if self.spans is not None:
            self.spans.part(name, engine)

    def failed(self, why: str) -> None:
        """An engine failed it."""
        self.trail.append(why)
        if self.spans is not None:
            self.spans.part_failed(why)

    def __str__(self) -> str:
        return f"request {self.request_id.decode()}"


class EngineFailure(KvferryError):
    """An engine gave no usable answer."""

    def __init__(
        self,
        engine: UpstreamEngine,
        reason: str,
        *,
        delivered: bool = True,
        timed_out: bool = False,
        answer: Answer | None = None,
    ) -> None:
        super().__init__(f"{engine.role} engine {engine.url}: {reason}")
        self.engine = engine
        self.delivered = delivered  # False only if the engine saw nothing of the request
        self.timed_out = timed_out
        self.answer = answer  # a 5xx

    @property
    def broke_off(self) -> bool:
        """The engine saw the request, and its connection ended."""
        return self.delivered and not self.timed_out and self.answer is None


class AnswerTooLong(EngineFailure):
    """An answer that is not streamed has more than max_answer_bytes."""


class Fleet:
    """All engines, by role, and the connections to them."""

    def __init__(
        self,
        specs: Iterable[EngineSpec],
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        ca_file: Path | None = None,
    ) -> None:
        """`ca_file`: authorities that sign the engines' certificates; None: the system's."""
        self.turns = Turns(limits.max_queued, limits.address_share, self._decode_room, clock)
        self._limits = limits
        self._clock = clock
        self._engines: dict[str, UpstreamEngine] = {}  # by URL
        self._picks = 0
        # Hears of each change, on the event loop; it must return at once.
        self.changed: Callable[[UpstreamEngine, ChangeKind], None] = lambda engine, kind: None
        self._absences: dict[Role, deque[float]] = {
            role: deque(maxlen=_REMEMBERED) for role in ROLES
        }
        self._probing: asyncio.TaskGroup | None = None  # while the router runs
        self._checks: dict[UpstreamEngine, asyncio.Task[None]] = {}
        self.transport = EngineTransport(
            trusting(ca_file), _KEEPALIVE_SECONDS, limits.connect_seconds
        )
        for spec in specs:
            if not spec.is_name:
                self.add(spec)

    # Members

    @property
    def engines(self) -> list[UpstreamEngine]:
        """All engines, in the order in which they were added."""
        return list(self._engines.values())

    def with_role(self, role: Role) -> list[UpstreamEngine]:
        return [engine for engine in self._engines.values() if role in engine.roles]

    def get(self, url: str) -> UpstreamEngine | None:
        return self._engines.get(url)

    def add(self, spec: EngineSpec) -> UpstreamEngine:
        """Add an engine, or take back one that drains. Raises DescriptionError."""
        engine = self._engines.get(spec.url)
        if engine is not None:
            if engine.draining is None:
                raise DescriptionError(
                    f"the engine {spec.url} is in the fleet already, as {engine.role}; change it, "
                    "or remove it first"
                )
            engine.draining = None
            engine.spec = spec
            log.info("%s engine %s gets requests again", engine.role, engine.url)
            self._tell(engine, "changed")
            return engine
        engine = UpstreamEngine(spec, self._limits, self._clock, self._tell)
        self._engines[spec.url] = engine
        log.info("%s engine %s is added (%s)", engine.role, engine.url, spec.source)
        self._tell(engine, "added")
        if self._probing is not None:
            self._probing.create_task(self._keep_probing(engine, at_once=True))
        return engine

    def change(self, engine: UpstreamEngine, spec: EngineSpec) -> None:
        """Change roles, weight or event addresses of an engine, which keeps its requests."""
        if spec.url != engine.url:
            message = f"an engine keeps its address: expected {engine.url}, found {spec.url}"
            raise DescriptionError(f"{message}; add the new address and remove the old one")
        if spec != engine.spec:
            engine.spec = spec
            log.info("engine %s is %s now", engine.url, engine.role)
            self._tell(engine, "changed")

    def drain(self, engine: UpstreamEngine, then: AfterDrain = "remove") -> None:
        """Send it nothing new. When the last request there has ended, remove it, or let it stay."""
        if engine.draining != then:
            engine.draining = then
            left = "is removed" if then == "remove" else "stays, without requests"
            log.info("%s engine %s drains, then %s", engine.role, engine.url, left)
            self._tell(engine, "draining")
        self._remove_if_drained(engine)

    def remove(self, engine: UpstreamEngine) -> None:
        """Forget it at once. What runs there goes on to its end."""
        if engine.removed:
            return
        engine.removed = True
        del self._engines[engine.url]
        running = f", {engine.in_flight} requests still run there" if engine.in_flight else ""
        log.info("%s engine %s is removed%s", engine.role, engine.url, running)
        self._tell(engine, "removed")

    @contextmanager
    def reserved(self, engine: UpstreamEngine) -> Iterator[None]:
        """Count a request for this engine while another engine prefills it."""
        engine.reserved += 1
        try:
            yield
        finally:
            engine.reserved -= 1
            # Later: the request may go to the engine now, before anything else runs.
            asyncio.get_running_loop().call_soon(self._left, engine)

    def ticket_ended(self, engine: UpstreamEngine) -> None:
        """A ticket of this engine was used, or never will be."""
        engine.tickets -= 1
        self._remove_if_drained(engine)

    def _left(self, engine: UpstreamEngine) -> None:
        """A request left an engine, which may have room for another one."""
        self._remove_if_drained(engine)
        self.turns.give()

    def _remove_if_drained(self, engine: UpstreamEngine) -> None:
        if engine.draining == "remove" and engine.idle:
            self.remove(engine)

    def _tell(self, engine: UpstreamEngine, kind: ChangeKind) -> None:
        if kind == "up":
            away = engine.away_seconds
            if away is not None and away <= _LONGEST_START_SECONDS:
                for role in engine.roles:
                    self._absences[role].append(away)
        self.turns.stir(lambda besides: not self.some_up("decode", besides))
        self.turns.give()
        try:
            self.changed(engine, kind)
        except Exception:  # an error there must not keep the fleet from changing
            log.exception("the router did not take in that %s is %s", engine.url, kind)

    # Choice by load

    def some_up(self, role: Role, besides: Collection[UpstreamEngine] = ()) -> bool:
        return any(engine.open and engine not in besides for engine in self.with_role(role))

    def pick(self, role: Role, besides: Collection[UpstreamEngine] = ()) -> UpstreamEngine | None:
        """The engine with room that has the least load for its weight; equals in turn."""
        fit = [e for e in self.with_role(role) if e.room and e not in besides]
        best = min(fit, key=lambda e: (e.load / e.spec.weight, e.picked), default=None)
        if best is not None:
            self._picks += 1
            best.picked = self._picks
        return best

    def _decode_room(self, besides: Collection[UpstreamEngine]) -> int:
        room = 0
        for engine in self._engines.values():  # each request asks, so properties would cost much
            if engine.up and "decode" in engine.spec.roles and engine not in besides:
                room += engine.room
        return room

    def absence(self, role: Role) -> tuple[float, float | None]:
        """Seconds until an engine should be up, and the usual absence, or None if none was seen.

        An engine that is overdue may come at any moment: that is after `recover_after` probes.
        """
        seen = self._absences[role]
        usual = statistics.median(seen) if seen else None
        expected = self._limits.start_seconds if usual is None else usual
        now = self._clock()
        away = [now - e.down_since for e in self.with_role(role) if e.down_since is not None]
        late = 0.0 if away else expected
        left = min((expected - seconds for seconds in away if seconds < expected), default=late)
        soonest = self._limits.probe_every_seconds * self._limits.recover_after
        return max(left, soonest), usual

    # HTTP

    async def probe_all(self) -> None:
        """Learn each engine's state, before the first request."""
        await asyncio.gather(*(self._probe(engine) for engine in self.engines))

    async def run(self) -> None:
        """Probe the engines until cancelled, then close all connections to them."""
        try:
            async with asyncio.TaskGroup() as self._probing:
                for engine in self.engines:
                    known = engine.starts or engine.failures
                    self._probing.create_task(self._keep_probing(engine, at_once=not known))
                await asyncio.Event().wait()
        finally:
            self._probing = None
            for check in self._checks.values():
                check.cancel()
            self.transport.close()

    @asynccontextmanager
    async def ask(
        self,
        engine: UpstreamEngine,
        asked: Incoming,
        body: bytes,
        seconds: float,
        *,
        plain: bool = False,
    ) -> AsyncIterator[Answer]:
        """An engine's answer within `seconds`: complete, or the first bytes of a stream. `plain`:
        the router reads it, so it must not be compressed.

        The request counts at the engine for the time of a `with`. If the answer is incomplete then,
        its connection is closed, and the engine aborts. Raises EngineFailure if there is no answer,
        or a 5xx.
        """
        passed_on = asked.headers if asked.spans is None else asked.spans.passed_on(asked.headers)
        headers = [*passed_on, (b"x-request-id", asked.request_id)]
        if plain:
            headers = [field for field in headers if field[0] != b"accept-encoding"]
            headers.append((b"accept-encoding", b"identity"))
        until = asyncio.get_running_loop().time() + seconds
        held, got, rest = asked.held.bytes, None, None
        engine.in_flight += 1
        try:
            try:
                at = address_of_url(engine.url + asked.path)
                got = await self.transport.ask(at, asked.method.encode(), headers, body, until)
                passed, status = end_to_end(got.head.headers), got.head.status
                if _is_stream(status, passed):
                    content = await got.read(until)
                    rest = partial(_pass_on, engine, got, self._limits.chunk_seconds, asked)
                else:
                    content = await self._whole(engine, got, asked.held, until)
            except _TROUBLE as error:
                raise _failure(engine, error, seconds, str(asked)) from error
            answer = Answer(status, passed, content, rest)
            if not 200 <= status < 600:
                raise EngineFailure(engine, f"HTTP {status}, which is no answer")
            if status >= 500:
                if status in _ENGINE_IS_ILL:
                    engine.failed(f"HTTP {status}", during=str(asked))
                raise EngineFailure(engine, f"HTTP {status}", answer=answer)
            if engine.answered():
                self.turns.give()  # a trial has ended
            yield answer
        finally:
            asked.held.add(held - asked.held.bytes)
            if got is not None:
                got.done()
            engine.in_flight -= 1
            self._remove_if_drained(engine)
            if "decode" in engine.roles:
                self.turns.ended()

    async def check(self, engine: UpstreamEngine) -> None:
        """Probe an engine that broke off, now: it may have died. One probe serves all requests."""
        task = self._checks.get(engine)
        if task is None:
            task = self._checks[engine] = asyncio.create_task(self._probe(engine))
            task.add_done_callback(lambda done: self._checks.pop(engine, None))
        await asyncio.wait({task})  # leaves the probe to the others if this request is cancelled

    async def _whole(
        self, engine: UpstreamEngine, answer: EngineConnection, held: RequestMemory, until: float
    ) -> bytes:
        """An answer that is not streamed, of at most max_answer_bytes."""
        parts: list[bytes] = []
        size, most = 0, self._limits.max_answer_bytes
        while chunk := await answer.read(until):
            size += len(chunk)
            if size > most:
                raise AnswerTooLong(engine, f"its answer has more than {most} bytes")
            held.add(len(chunk))
            parts.append(chunk)
        return b"".join(parts)

    async def _keep_probing(self, engine: UpstreamEngine, at_once: bool) -> None:
        """Probe until the engine is removed, which lets a probe that is under way end."""
        while not engine.removed:
            if not at_once:
                # Not all engines at the same moment: their answers would hold up the streams.
                share = random.uniform(0.8, 1.2)
                await asyncio.sleep(self._limits.probe_every_seconds * share)
            at_once = False
            try:
                await self._probe(engine)
            except Exception:  # without probes, the engine's state would never change again
                log.exception("the probe of %s broke", engine.url)

    async def _probe(self, engine: UpstreamEngine) -> None:
        """Ask for the engine's health, and update its state."""
        seconds = self._limits.probe_seconds
        try:
            at = address_of_url(f"{engine.url}/health")
            until = asyncio.get_running_loop().time() + seconds
            status, _ = await self.transport.fetch(b"GET", at, _HEALTH_BYTES, until)
        except _TROUBLE as error:
            _failure(engine, error, seconds, PROBE)
            return
        if 200 <= status < 300:
            engine.probed_well()
            self.turns.give()  # if that widened a trial
        else:
            engine.failed(f"/health answered {status}")


async def _pass_on(
    engine: UpstreamEngine,
    answer: EngineConnection,
    seconds: float,
    asked: Incoming,
    sink: StreamSink,
) -> None:
    """A stream after its first bytes. Raises EngineFailure."""
    try:
        await answer.pass_on(sink, seconds)
    except _TROUBLE as error:
        raise _failure(engine, error, seconds, str(asked)) from error


def trusting(ca_file: Path | None) -> ssl.SSLContext:
    """The TLS context that verifies engines' certificates. Raises DescriptionError."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise DescriptionError(f"cannot read certificates from {ca_file}: {error}") from None


def _is_stream(status: int, headers: Headers) -> bool:
    kind = next((value for name, value in headers if name == b"content-type"), b"")
    return status == 200 and kind.lower().startswith(b"text/event-stream")


def _failure(
    engine: UpstreamEngine, error: Exception, seconds: float, during: str
) -> EngineFailure:
    """Turn an exception into an EngineFailure, and update the engine's state."""
    refused = isinstance(error, NoConnection)
    cut_off = not isinstance(error.__cause__, ConnectionRefusedError)
    timed_out = isinstance(error, TimeoutError) or getattr(error, "timed_out", False)
    if isinstance(error, TimeoutError):
        reason = f"silent for {seconds:g} s"
    else:
        why = "cannot connect" if refused else "no answer in time" if timed_out else "no answer"
        reason = f"{why}: {error}".removesuffix(": ")
    engine.failed(reason, refused=refused, cut_off=cut_off, during=during)
    return EngineFailure(engine, reason, delivered=not refused, timed_out=timed_out)
