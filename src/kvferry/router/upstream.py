"""HTTP to engines: one request, with a deadline on every wait and one kind of failure."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import httpx

from kvferry.errors import KvferryError
from kvferry.router.api import Headers, Incoming, end_to_end
from kvferry.router.config import Limits
from kvferry.router.engines import Engine

# Below the 5 s after which uvicorn, and so vLLM, closes an idle connection: one that is closed
# while we send on it looks like an engine that failed.
_KEEPALIVE_SECONDS = 2.0
_IDLE_CONNECTIONS = 256
_HEALTH_BYTES = 64 << 10  # of the answer to a probe; vLLM's is empty
# Other 5xx are failures of the request, not of the engine.
_ENGINE_IS_ILL = (502, 503, 504)


class Stream:
    """The rest of a streamed answer."""

    def __init__(self, engine: Engine, chunks: AsyncIterator[bytes], chunk_seconds: float) -> None:
        self._engine = engine
        self._chunks = chunks
        self._chunk_seconds = chunk_seconds

    async def next(self) -> bytes:
        """The next bytes as they come; b"" at the end. Raises EngineFailure."""
        try:
            with anyio.fail_after(self._chunk_seconds):
                return await anext(self._chunks, b"")
        except (httpx.HTTPError, TimeoutError) as error:
            raise _failure(self._engine, error, f"{self._chunk_seconds:g} s") from error


@dataclass(frozen=True, slots=True)
class Answer:
    """An engine's answer, as it came."""

    status: int
    headers: Headers
    body: bytes  # all of it; of a stream, the first bytes
    stream: Stream | None = None


class EngineFailure(KvferryError):
    """An engine gave no usable answer."""

    def __init__(
        self,
        engine: Engine,
        reason: str,
        *,
        delivered: bool = True,
        timed_out: bool = False,
        answer: Answer | None = None,
    ) -> None:
        super().__init__(f"{engine.role} engine {engine.url}: {reason}")
        self.reason = reason
        self.delivered = delivered  # False only where it surely saw nothing of the request
        self.timed_out = timed_out
        self.answer = answer  # a 5xx


class AnswerTooLong(EngineFailure):
    """An answer that is not streamed has more than max_answer_bytes."""


class Upstream:
    """Connections to all engines."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # trust_env: no proxies, no .netrc; what clients authorize themselves with stays theirs.
        self._client = httpx.AsyncClient(
            trust_env=False,
            timeout=httpx.Timeout(None, connect=limits.connect_seconds),
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=_IDLE_CONNECTIONS,
                keepalive_expiry=_KEEPALIVE_SECONDS,
            ),
        )

    async def close(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def ask(
        self, engine: Engine, asked: Incoming, body: bytes, seconds: float
    ) -> AsyncIterator[Answer]:
        """An engine's answer: complete, or the first bytes of a stream, within `seconds`.

        Raises EngineFailure where none came, or a 5xx. Leaving the context closes what is still
        open, upon which the engine aborts the request.
        """
        request = httpx.Request(
            asked.method,
            engine.url + asked.path,
            headers=[*asked.headers, (b"x-request-id", asked.request_id)],
            content=body,
        )
        response: httpx.Response | None = None
        held_before = asked.held.bytes
        with engine.busy():
            try:
                try:
                    with anyio.fail_after(seconds):
                        response = await self._client.send(request, stream=True)
                        chunks = response.aiter_raw()
                        streamed = _is_stream(response)
                        if streamed:
                            content = await anext(chunks, b"")
                        else:
                            content = await self._whole(engine, chunks, asked)
                except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
                    raise _failure(engine, error, f"{seconds:g} s") from error
                status, headers = response.status_code, end_to_end(response.headers.raw)
                if not 200 <= status < 600:
                    raise EngineFailure(engine, f"HTTP {status}, which is no answer")
                if status >= 500:
                    reason = f"HTTP {status}"
                    if status in _ENGINE_IS_ILL:
                        engine.failed(reason)
                    raise EngineFailure(engine, reason, answer=Answer(status, headers, content))
                engine.answered()
                rest = Stream(engine, chunks, self._limits.chunk_seconds) if streamed else None
                yield Answer(status, headers, content, rest)
            finally:
                if response is not None:
                    await response.aclose()
                asked.held.add(held_before - asked.held.bytes)

    async def _whole(self, engine: Engine, chunks: AsyncIterator[bytes], asked: Incoming) -> bytes:
        """All of an answer that is not streamed, within max_answer_bytes."""
        parts: list[bytes] = []
        size, most = 0, self._limits.max_answer_bytes
        async for chunk in chunks:
            size += len(chunk)
            if size > most:
                raise AnswerTooLong(engine, f"its answer has more than {most} bytes")
            asked.held.add(len(chunk))
            parts.append(chunk)
        return b"".join(parts)

    async def probe(self, engine: Engine) -> None:
        """Asks for the engine's health, and tells it the result."""
        try:
            with anyio.fail_after(self._limits.probe_seconds):
                async with self._client.stream("GET", f"{engine.url}/health") as response:
                    size = 0  # read to its end, the connection is kept
                    async for chunk in response.aiter_raw():
                        size += len(chunk)
                        if size > _HEALTH_BYTES:
                            break
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            _failure(engine, error, f"{self._limits.probe_seconds:g} s")
            return
        if response.is_success:
            engine.probed_well()
        else:
            engine.failed(f"/health answered {response.status_code}")


def _is_stream(response: httpx.Response) -> bool:
    kind = response.headers.get("content-type", "")
    return response.status_code == 200 and kind.lower().startswith("text/event-stream")


def _failure(engine: Engine, error: Exception, waited: str) -> EngineFailure:
    """What an exception says about the engine; tells the engine, too."""
    refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
    timed_out = isinstance(error, TimeoutError | httpx.TimeoutException)
    if isinstance(error, TimeoutError):
        reason = f"silent for {waited}"
    else:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
    if not isinstance(error, httpx.LocalProtocolError):  # that one is the client's
        engine.failed(reason, refused=refused)
    return EngineFailure(engine, reason, delivered=not refused, timed_out=timed_out)
