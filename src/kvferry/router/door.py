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

from starlette.types import Message, Receive, Scope, Send

from kvferry.router.api import ApiError, Headers, Incoming, end_to_end, request_id_of
from kvferry.router.config import Limits
from kvferry.router.flow import Reply, Router
from kvferry.router.upstream import EngineFailure

log = logging.getLogger(__name__)
Serve = Callable[[Incoming, Reply], Coroutine[Any, Any, None]]

_RETRY_SECONDS = 1.0  # after a 429; requests end all the time


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
        await self._send({"type": "http.response.body", "body": body})

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
        metrics, limits = self._router.metrics, self._router.limits
        headers: Headers = list(scope["headers"])
        asked = Incoming(
            request_id_of(headers), scope["method"], scope["path"], end_to_end(headers), b""
        )
        if not any(name == b"accept-encoding" for name, _ in asked.headers):
            asked.headers.append((b"accept-encoding", b"identity"))
        reply = ClientReply(send, asked.request_id, limits.client_seconds)
        begun = time.monotonic()
        metrics.in_flight += 1
        outcome = "internal"
        try:
            outcome = await self._outcome(asked, headers, receive, reply)
        except asyncio.CancelledError:  # the router stops, and this did not end in time
            outcome = "stopped"
            raise
        finally:
            metrics.in_flight -= 1
            metrics.requests[outcome] += 1
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
        self, asked: Incoming, headers: Headers, receive: Receive, reply: ClientReply
    ) -> str:
        """Serves, answers what goes wrong, and says how it ended."""
        limits = self._router.limits
        try:
            try:
                if self._router.metrics.in_flight > limits.max_in_flight:
                    message = f"{limits.max_in_flight} requests are in flight; try again soon"
                    raise ApiError(429, "too_many_requests", message, _RETRY_SECONDS)
                asked.body = await _read_body(headers, receive, limits)
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


def _by_status(status: int) -> str:
    if status < 400:
        return "ok"
    if status in (429, 503):
        return "busy" if status == 429 else "unavailable"
    return "client_error" if status < 500 else "engine_error"


async def _read_body(headers: Headers, receive: Receive, limits: Limits) -> bytes:
    """All of the body, if it is not too large and comes in time."""
    # Closing tells a client that is still sending that nobody reads.
    too_large = ApiError(
        413, "body_too_large", f"the body may have {limits.max_body_bytes} bytes at most"
    )
    too_large.headers.append((b"connection", b"close"))
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value) > limits.max_body_bytes:
            raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.client_seconds):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                data: bytes = message.get("body", b"")
                size += len(data)
                if size > limits.max_body_bytes:
                    raise too_large
                parts.append(data)
                more = message.get("more_body", False)
    except TimeoutError:
        timeout = ApiError(408, "request_timeout", "the body did not come in time")
        timeout.headers.append((b"connection", b"close"))
        raise timeout from None
    return b"".join(parts)


async def _unless_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Does the work; cancels it and raises ClientGone when the client closes its connection."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
