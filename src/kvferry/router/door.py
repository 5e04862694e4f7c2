"""Where requests come in: limits, request ids, clients that leave, and what is logged.

An ASGI application per route. Each request ends in exactly one of metrics.OUTCOMES.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import anyio
from starlette.types import Message, Receive, Scope, Send

from kvferry.router.api import ApiError, Headers, Incoming, end_to_end, request_id_of
from kvferry.router.flow import Reply, Router
from kvferry.router.guard import Held, address_of
from kvferry.router.upstream import EngineFailure

log = logging.getLogger(__name__)
Serve = Callable[[Incoming, Reply], Coroutine[Any, Any, None]]

# A server may refuse long headers by closing the connection; then the engine seems to have failed.
# The limits are a choice, not what some engine is known to take.
_MAX_HEADER_BYTES = 32 << 10
_MAX_HEADERS = 128
# An answer is written in pieces of this size. The server takes the next one when the client has
# read most of the last.
_PIECE_BYTES = 64 << 10


class ClientGone(Exception):
    """The client closed its connection, or stopped reading or writing."""


class ClientReply:
    """The way back to one client; every send has a deadline."""

    def __init__(self, send: Send, request_id: bytes, client_seconds: float) -> None:
        self.started = False
        self.status = 0
        self._raw_send = send
        self._request_id = request_id
        self._client_seconds = client_seconds

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        for at in range(0, len(body), _PIECE_BYTES):
            await self.chunk(body[at : at + _PIECE_BYTES])
        await self.end()

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        self.status = status
        headers = [*headers, (b"x-request-id", self._request_id)]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def chunk(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._client_seconds):
                await self._raw_send(message)
        except (TimeoutError, OSError) as error:
            raise ClientGone from error


class Door:
    """One route of the API."""

    def __init__(self, router: Router, serve: Serve) -> None:
        self._router = router
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        router = self._router
        held = Held(router.memory, address_of(scope.get("client")))
        headers: Headers = list(scope["headers"])
        asked = Incoming(
            request_id_of(headers), scope["method"], scope["path"], end_to_end(headers), held
        )
        if not any(name == b"accept-encoding" for name, _ in asked.headers):
            asked.headers.append((b"accept-encoding", b"identity"))
        reply = ClientReply(send, asked.request_id, router.limits.client_seconds)
        begun = time.monotonic()
        outcome = "internal"
        try:
            outcome = await self._outcome(asked, headers, receive, reply, held)
        except asyncio.CancelledError:  # the router stops, and this did not end in time
            outcome = "stopped"
            raise
        finally:
            held.close()
            router.metrics.requests[outcome] += 1
            log.info(
                "%s %s %s: %s %d, %.3f s [%s]",
                asked.request_id.decode(),
                asked.method,
                asked.path,
                outcome,
                reply.status,
                time.monotonic() - begun,
                "; ".join(asked.trail),
            )

    async def _outcome(
        self,
        asked: Incoming,
        headers: Headers,
        receive: Receive,
        reply: ClientReply,
        held: Held,
    ) -> str:
        """Serves, answers what goes wrong, and says how it ended."""
        try:
            try:
                asked.body = await self._read_body(headers, receive, held)
                with self._router.places.request(held.address):
                    await _unless_gone(self._serve(asked, reply), receive)
            except ApiError as error:
                await reply.whole(error.status, error.headers, error.body)
            return _by_status(reply.status)
        except ClientGone:
            return "client_gone"
        except EngineFailure as error:
            # Returning before the answer is complete makes the server close the connection.
            asked.trail.append(str(error))
            return "broken_stream"
        except Exception:  # a fault of ours: the client is told, and the log says which
            log.exception("request %s broke the router", asked.request_id.decode())
            if not reply.started:
                answer = ApiError(500, "internal_error", "the router failed; its log says why")
                with suppress(ClientGone):
                    await reply.whole(answer.status, answer.headers, answer.body)
            return "internal"

    async def _read_body(self, headers: Headers, receive: Receive, held: Held) -> bytes:
        """All of the body, if there is room for it and it comes in time. Raises ApiError.

        The server goes on reading, and forgets, what comes of a body that is refused. So the
        client gets to read why. The guard closes the connection after `header_seconds`.
        """
        limits, loop = self._router.limits, asyncio.get_running_loop()
        if (
            len(headers) > _MAX_HEADERS
            or sum(len(k) + len(v) for k, v in headers) > _MAX_HEADER_BYTES
        ):
            most = f"at most {_MAX_HEADERS} headers, of {_MAX_HEADER_BYTES} bytes together"
            raise ApiError(431, "headers_too_large", most)
        too_large = ApiError(
            413, "body_too_large", f"the body may have {limits.max_body_bytes} bytes at most"
        )
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and int(value) > limits.max_body_bytes:
                raise too_large
        parts: list[bytes] = []
        size = fresh = 0  # fresh: of the current progress_seconds
        end, more = loop.time() + limits.body_seconds, True
        progress = limits.progress_seconds
        try:
            async with asyncio.timeout_at(min(end, loop.time() + progress)) as deadline:

                def drop() -> None:
                    if not deadline.expired():
                        deadline.reschedule(loop.time())

                with self._router.memory.upload(held, drop):
                    while more:
                        message = await receive()
                        if message["type"] == "http.disconnect":
                            raise ClientGone
                        data: bytes = message.get("body", b"")
                        size, fresh = size + len(data), fresh + len(data)
                        if size > limits.max_body_bytes:
                            raise too_large
                        held.add(len(data))
                        parts.append(data)
                        more = message.get("more_body", False)
                        if fresh >= limits.progress_bytes:
                            deadline.reschedule(min(end, loop.time() + progress))
                            fresh = 0
        except TimeoutError:
            if held.dropped:
                raise held.refusal() from None
            timeout = ApiError(
                408,
                "request_timeout",
                f"the body must come within {limits.body_seconds:g} s, and {limits.progress_bytes} "
                f"bytes of it every {progress:g} s; {size} bytes came",
            )
            timeout.headers.append((b"connection", b"close"))
            raise timeout from None
        return b"".join(parts)


def _by_status(status: int) -> str:
    if status < 400:
        return "ok"
    if status in (429, 503):
        return "busy" if status == 429 else "unavailable"
    return "client_error" if status < 500 else "engine_error"


async def _unless_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Does the work; cancels it and raises ClientGone when the client closes its connection.

    By anyio, because httpx is written for it: a connection to an engine on which asyncio's own
    cancellation meets httpx at the wrong moment is never used again, and never closed.
    """
    leaving = asyncio.create_task(_disconnect(receive))
    with anyio.CancelScope() as scope:
        leaving.add_done_callback(lambda task: None if task.cancelled() else scope.cancel())
        try:
            await work
        finally:
            leaving.cancel()
    if scope.cancelled_caught:
        raise ClientGone


async def _disconnect(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
