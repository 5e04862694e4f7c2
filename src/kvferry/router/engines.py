"""The engines: which are up, which one is next, and HTTP to them.

An engine is up or down. It goes down after `fail_after` failures in a row, of probes and requests
together, or at once when it accepts no connection. Only probes bring it back: `recover_after` good
ones in a row. After the start one good probe is enough, so that the router is ready at once.

A plain 500 is the request's failure, not the engine's. Otherwise one bad request, tried on every
engine, would take all engines down.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Sequence
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


class UpstreamEngine:
    """One engine: its address, its health, and its load."""

    def __init__(self, url: str, role: Role, limits: Limits) -> None:
        self.url = url
        self.role: Role = role
        self.up = False
        self.reason = "not probed yet"  # why it is down
        self.in_flight = 0
        self.failures = 0  # since the start
        self._limits = limits
        self._failed_in_a_row = 0
        self._good_in_a_row = limits.recover_after - 1  # the first probe counts alone

    def answered(self) -> None:
        """A request got an answer."""
        self._failed_in_a_row = 0

    def failed(self, reason: str, *, refused: bool = False) -> None:
        """A request or a probe failed. `refused`: the engine accepted no connection."""
        self.failures += 1
        self._good_in_a_row = 0
        self._failed_in_a_row += 1
        if self.up and (refused or self._failed_in_a_row >= self._limits.fail_after):
            self.up = False
            log.warning("%s engine %s is down: %s", self.role, self.url, reason)
        if not self.up:
            self.reason = reason

    def probed_well(self) -> None:
        self._failed_in_a_row = 0
        self._good_in_a_row += 1
        if not self.up and self._good_in_a_row >= self._limits.recover_after:
            self.up = True
            self.reason = ""
            log.info("%s engine %s is up", self.role, self.url)


class EngineGroup:
    """The engines of one role."""

    def __init__(self, urls: Sequence[str], role: Role, limits: Limits) -> None:
        self.engines = [UpstreamEngine(url, role, limits) for url in urls]
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


class AnswerTooLong(EngineFailure):
    """An answer that is not streamed has more than max_answer_bytes."""


class Upstream:
    """Connections to all engines."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
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
                        rest = self._rest(engine, chunks)
                    else:
                        content = await self._whole(engine, chunks, asked.held)
            except _TROUBLE as error:
                raise _failure(engine, error, seconds) from error
            status = response.status_code
            answer = Answer(status, end_to_end(response.headers.raw), content, rest)
            if not 200 <= status < 600:
                raise EngineFailure(engine, f"HTTP {status}, which is no answer")
            if status >= 500:
                if status in _ENGINE_IS_ILL:
                    engine.failed(f"HTTP {status}")
                raise EngineFailure(engine, f"HTTP {status}", answer=answer)
            engine.answered()
            yield answer
        finally:
            engine.in_flight -= 1
            asked.held.add(held_before - asked.held.bytes)
            if response is not None:
                await response.aclose()

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
        self, engine: UpstreamEngine, chunks: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """A stream after its first bytes. Raises EngineFailure."""
        seconds = self._limits.chunk_seconds
        while True:
            try:
                with anyio.fail_after(seconds):
                    data = await anext(chunks, b"")
            except _TROUBLE as error:
                raise _failure(engine, error, seconds) from error
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
            _failure(engine, error, seconds)
            return
        if response.is_success:
            engine.probed_well()
        else:
            engine.failed(f"/health answered {response.status_code}")


def _is_stream(response: httpx.Response) -> bool:
    kind = response.headers.get("content-type", "")
    return response.status_code == 200 and kind.lower().startswith("text/event-stream")


def _failure(engine: UpstreamEngine, error: Exception, seconds: float) -> EngineFailure:
    """Turn an exception into an EngineFailure, and update the engine's state."""
    refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
    timed_out = isinstance(error, TimeoutError | httpx.TimeoutException)
    if isinstance(error, TimeoutError):
        reason = f"silent for {seconds:g} s"
    else:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
    if not isinstance(error, httpx.LocalProtocolError):  # the client's fault
        engine.failed(reason, refused=refused)
    return EngineFailure(engine, reason, delivered=not refused, timed_out=timed_out)
