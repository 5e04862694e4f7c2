# SPDX-License-Identifier: Apache-2.0
"""The engines: which are up, which one is next, and HTTP to them.

An engine is up or down. It goes down after `fail_after` failures in a row, of probes and requests
together, or at once when it accepts no connection. Only probes bring it back: `recover_after` good
ones in a row. After the start one good probe is enough, so that the router is ready at once.
Requests wait a moment for an engine to come back (`EngineGroup.wait_up`). The router remembers how
long engines stayed away, and tells clients when to ask again.

A plain 500 is the request's failure, not the engine's. Otherwise one bad request, tried on every
engine, would take all engines down.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import anyio
import httpx

from kvferry.errors import KvferryError
from kvferry.router.api import Answer, Headers, Limits, end_to_end
from kvferry.router.guard import RequestMemory

log = logging.getLogger(__name__)
Role = Literal["prefill", "decode"]
# Of how many absences the usual one is the median.
_REMEMBERED = 5
# A longer absence says nothing about the next one: somebody took the engine out.
_LONGEST_START_SECONDS = 900.0


class UpstreamEngine:
    """One engine: its address, its health, and its load."""

    def __init__(
        self,
        url: str,
        role: Role,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        came_up: Callable[[float | None], None] = lambda seconds: None,
    ) -> None:
        """`came_up` gets how long the engine was away; None if it was never seen to fail."""
        self.url = url
        self.role: Role = role
        self.up = False
        self.starts = 0  # how often it came up
        self.down_since: float | None = None  # while it is down
        self.reason = "not probed yet"  # why it is down
        self.in_flight = 0
        self.failures = 0  # since the start
        self._limits = limits
        self._failed_in_a_row = 0
        self._good_in_a_row = limits.recover_after - 1  # the first probe counts alone
        self._clock = clock
        self._came_up = came_up

    def answered(self) -> None:
        """A request got an answer."""
        self._failed_in_a_row = 0

    def failed(self, reason: str, *, refused: bool = False, during: str = "probe") -> None:
        """A request or a probe failed. `refused`: the engine accepted no connection."""
        self.failures += 1
        self._good_in_a_row = 0
        self._failed_in_a_row += 1
        if self.up and (refused or self._failed_in_a_row >= self._limits.fail_after):
            self.up = False
            log.warning("%s engine %s is down: %s (%s)", self.role, self.url, reason, during)
        if not self.up:
            self.reason = reason
            if self.down_since is None:
                self.down_since = self._clock()

    def probed_well(self) -> None:
        self._failed_in_a_row = 0
        self._good_in_a_row += 1
        if not self.up and self._good_in_a_row >= self._limits.recover_after:
            self.up = True
            self.reason = ""
            self.starts += 1
            away = None if self.down_since is None else self._clock() - self.down_since
            self.down_since = None
            after = "" if away is None else f", after {away:.1f} s"
            log.info("%s engine %s is up%s", self.role, self.url, after)
            self._came_up(away)


class EngineGroup:
    """The engines of one role."""

    def __init__(
        self,
        urls: Sequence[str],
        role: Role,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engines = [UpstreamEngine(url, role, limits, clock, self._came_up) for url in urls]
        self.waiting = 0  # requests that wait for one of them
        self._limits = limits
        self._clock = clock
        self._absences: deque[float] = deque(maxlen=_REMEMBERED)
        self._one_is_up = asyncio.Event()
        self._in_turn = list(self.engines)  # the last one that was picked is last

    def some_up(self, besides: Collection[UpstreamEngine] = ()) -> bool:
        return any(engine.up and engine not in besides for engine in self.engines)

    def pick(self, besides: Collection[UpstreamEngine] = ()) -> UpstreamEngine | None:
        """The engine that is up with the fewest requests in flight; equal ones in turn."""
        up = [engine for engine in self._in_turn if engine.up and engine not in besides]
        if not up:
            return None
        best = min(up, key=lambda engine: engine.in_flight)
        self._in_turn.remove(best)
        self._in_turn.append(best)
        return best

    async def wait_up(self, seconds: float) -> float:
        """Wait until an engine is up, for at most `seconds`. Returns how long that took."""
        begun = time.monotonic()
        self.waiting += 1
        try:
            with anyio.move_on_after(seconds):
                while not self.some_up():
                    await self._one_is_up.wait()
        finally:
            self.waiting -= 1
        return time.monotonic() - begun

    def absence(self) -> tuple[float, float | None]:
        """Seconds until an engine should be up, and the usual absence, or None if none was seen.

        An engine that is overdue may come at any moment: that is after `recover_after` probes.
        """
        usual = statistics.median(self._absences) if self._absences else None
        expected = self._limits.start_seconds if usual is None else usual
        now = self._clock()
        away = [now - e.down_since for e in self.engines if e.down_since is not None]
        late = 0.0 if away else expected
        left = min((expected - seconds for seconds in away if seconds < expected), default=late)
        soonest = self._limits.probe_every_seconds * self._limits.recover_after
        return max(left, soonest), usual

    def _came_up(self, away: float | None) -> None:
        if away is not None and away <= _LONGEST_START_SECONDS:
            self._absences.append(away)
        self._one_is_up.set()  # wakes all that wait
        self._one_is_up.clear()


# HTTP to engines. Every wait has a deadline, and every failure is an `EngineFailure`.

# Less than the 5 s after which uvicorn, and so vLLM, closes an idle connection. A connection that
# closes while the router sends on it looks like an engine that failed.
_KEEPALIVE_SECONDS = 2.0
_IDLE_CONNECTIONS = 256
_HEALTH_BYTES = 64 << 10  # of the answer to a probe; vLLM's is empty
# Other 5xx are failures of the request, not of the engine.
_ENGINE_IS_ILL = (502, 503, 504)
_TROUBLE = (httpx.HTTPError, httpx.InvalidURL, TimeoutError)


@dataclass(slots=True)
class Incoming:
    """One request of a client, and a record of what the router did for it."""

    request_id: bytes
    method: str
    path: str
    headers: Headers  # that engines get, with Authorization: never log them
    held: RequestMemory
    trail: list[str] = field(default_factory=list)  # for the log

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
        self.delivered = delivered  # False only if the engine saw nothing of the request
        self.timed_out = timed_out
        self.answer = answer  # a 5xx

    @property
    def broke_off(self) -> bool:
        """The engine saw the request, and its connection ended."""
        return self.delivered and not self.timed_out and self.answer is None


class AnswerTooLong(EngineFailure):
    """An answer that is not streamed has more than max_answer_bytes."""


class Upstream:
    """Connections to all engines."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._checks: dict[UpstreamEngine, asyncio.Task[None]] = {}
        # Not trust_env: no proxies and no .netrc, so that clients' credentials stay unchanged.
        self._client = httpx.AsyncClient(
            trust_env=False,
            timeout=httpx.Timeout(None, connect=limits.connect_seconds),
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=_IDLE_CONNECTIONS,
                keepalive_expiry=_KEEPALIVE_SECONDS,
            ),
        )

    @asynccontextmanager
    async def probing(self, engines: Sequence[UpstreamEngine]) -> AsyncIterator[None]:
        """Know each engine's state at the start, and keep it true until the end."""
        await asyncio.gather(*(self._probe(engine) for engine in engines))
        tasks = [asyncio.create_task(self._keep_probing(engine)) for engine in engines]
        try:
            yield
        finally:
            tasks += self._checks.values()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.aclose()

    @asynccontextmanager
    async def ask(
        self, engine: UpstreamEngine, asked: Incoming, body: bytes, seconds: float
    ) -> AsyncIterator[Answer]:
        """An engine's answer within `seconds`: complete, or the first bytes of a stream.

        Raises EngineFailure if there is no answer, or a 5xx. Leaving the context closes the
        connection if the answer is incomplete, and the engine then aborts the request.
        """
        request = httpx.Request(
            asked.method,
            engine.url + asked.path,
            headers=[*asked.headers, (b"x-request-id", asked.request_id)],
            content=body,
        )
        response: httpx.Response | None = None
        held_before = asked.held.bytes
        engine.in_flight += 1
        try:
            try:
                with anyio.fail_after(seconds):
                    response = await self._client.send(request, stream=True)
                    chunks, rest = response.aiter_raw(), None
                    if _is_stream(response):
                        content = await anext(chunks, b"")
                        rest = self._rest(engine, chunks, str(asked))
                    else:
                        content = await self._whole(engine, chunks, asked.held)
            except _TROUBLE as error:
                raise _failure(engine, error, seconds, str(asked)) from error
            status = response.status_code
            answer = Answer(status, end_to_end(response.headers.raw), content, rest)
            if not 200 <= status < 600:
                raise EngineFailure(engine, f"HTTP {status}, which is no answer")
            if status >= 500:
                if status in _ENGINE_IS_ILL:
                    engine.failed(f"HTTP {status}", during=str(asked))
                raise EngineFailure(engine, f"HTTP {status}", answer=answer)
            engine.answered()
            yield answer
        finally:
            engine.in_flight -= 1
            asked.held.add(held_before - asked.held.bytes)
            if response is not None:
                await response.aclose()

    async def check(self, engine: UpstreamEngine) -> None:
        """Probe an engine that broke off, now: it may have died. One probe serves all requests."""
        task = self._checks.get(engine)
        if task is None:
            task = self._checks[engine] = asyncio.create_task(self._probe(engine))
            task.add_done_callback(lambda done: self._checks.pop(engine, None))
        await asyncio.wait({task})  # leaves the probe to the others if this request is cancelled

    async def _whole(
        self, engine: UpstreamEngine, chunks: AsyncIterator[bytes], held: RequestMemory
    ) -> bytes:
        """An answer that is not streamed, of at most max_answer_bytes."""
        parts: list[bytes] = []
        size, most = 0, self._limits.max_answer_bytes
        async for chunk in chunks:
            size += len(chunk)
            if size > most:
                raise AnswerTooLong(engine, f"its answer has more than {most} bytes")
            held.add(len(chunk))
            parts.append(chunk)
        return b"".join(parts)

    async def _rest(
        self, engine: UpstreamEngine, chunks: AsyncIterator[bytes], during: str
    ) -> AsyncIterator[bytes]:
        """A stream after its first bytes. Raises EngineFailure."""
        seconds = self._limits.chunk_seconds
        while True:
            try:
                with anyio.fail_after(seconds):
                    data = await anext(chunks, b"")
            except _TROUBLE as error:
                raise _failure(engine, error, seconds, during) from error
            if not data:
                return
            yield data

    async def _keep_probing(self, engine: UpstreamEngine) -> None:
        while True:
            await asyncio.sleep(self._limits.probe_every_seconds)
            try:
                await self._probe(engine)
            except Exception:  # without probes, the engine's state would never change again
                log.exception("the probe of %s broke", engine.url)

    async def _probe(self, engine: UpstreamEngine) -> None:
        """Ask for the engine's health, and update its state."""
        seconds = self._limits.probe_seconds
        try:
            with anyio.fail_after(seconds):
                async with self._client.stream("GET", f"{engine.url}/health") as response:
                    size = 0  # the connection can be reused only after the answer's end
                    async for chunk in response.aiter_raw():
                        size += len(chunk)
                        if size > _HEALTH_BYTES:
                            break
        except _TROUBLE as error:
            _failure(engine, error, seconds, "probe")
            return
        if response.is_success:
            engine.probed_well()
        else:
            engine.failed(f"/health answered {response.status_code}")


def _is_stream(response: httpx.Response) -> bool:
    kind = response.headers.get("content-type", "")
    return response.status_code == 200 and kind.lower().startswith("text/event-stream")


def _failure(
    engine: UpstreamEngine, error: Exception, seconds: float, during: str
) -> EngineFailure:
    """Turn an exception into an EngineFailure, and update the engine's state."""
    refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
    timed_out = isinstance(error, TimeoutError | httpx.TimeoutException)
    if isinstance(error, TimeoutError):
        reason = f"silent for {seconds:g} s"
    else:
        why = "cannot connect" if refused else "no answer in time" if timed_out else "no answer"
        reason = f"{why}: {error}".removesuffix(": ")
    if not isinstance(error, httpx.LocalProtocolError):  # the client's fault
        engine.failed(reason, refused=refused, during=during)
    return EngineFailure(engine, reason, delivered=not refused, timed_out=timed_out)
