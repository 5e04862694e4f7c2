"""The router as a server and an ASGI application: routes, bodies, disconnects and status pages.

`ApiRoute` serves a route of the API. Each of its requests ends in one of `metrics.OUTCOMES`, and in
one line of the log. `Status` serves /health, /metrics and a page for people.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send
from uvicorn.config import LOGGING_CONFIG

from kvferry.net.names import is_loopback
from kvferry.router import metrics
from kvferry.router.api import (
    ApiError,
    Headers,
    Limits,
    RouterConfig,
    end_to_end,
    request_id_of,
)
from kvferry.router.engines import EngineFailure, UpstreamEngine, keep_probing
from kvferry.router.flow import ClientGone, ClientReply, Router
from kvferry.router.guard import ClientConnection, Guard, Incoming, RequestMemory, address_of
from kvferry.units import require_port

log = logging.getLogger(__name__)


def make_app(config: RouterConfig) -> Starlette:
    """The router as an ASGI application. It can start only once, because it owns connections."""
    router = Router(config)
    status = Status(router)
    generate = ApiRoute(router, router.generate)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        probe = router.upstream.probe
        await asyncio.gather(*(probe(engine) for engine in router.engines))
        every = config.limits.probe_every_seconds
        probing = [asyncio.create_task(keep_probing(e, probe, every)) for e in router.engines]
        try:
            yield
        finally:
            for task in probing:
                task.cancel()
            await asyncio.gather(*probing, return_exceptions=True)
            await router.upstream.close()

    app = Starlette(
        routes=[
            Route("/v1/completions", generate, methods=["POST"]),
            Route("/v1/chat/completions", generate, methods=["POST"]),
            Route("/v1/models", ApiRoute(router, router.pass_on), methods=["GET"]),
            Route("/health", status.health),
            Route("/metrics", status.metrics),
            Route("/", status.page),
        ],
        exception_handlers={HTTPException: _no_such_route},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a redirect would point to any host that a client names
    return app


def serve(
    prefill: Sequence[str],
    decode: Sequence[str],
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    limits: Limits | None = None,
    log_level: str = "info",
) -> None:
    """Serve until SIGINT or SIGTERM, then accept no more requests and finish the running ones.

    Raises DescriptionError for a bad address of an engine or a bad port.
    """
    require_port(port)
    config = RouterConfig(tuple(prefill), tuple(decode), limits or Limits())

    class Guarded(ClientConnection):
        guard = Guard(config.limits)

    settings = uvicorn.Config(
        make_app(config),
        host=host,
        port=port,
        log_config=_logging(log_level),
        access_log=False,  # `ApiRoute` logs each request with what was done for it
        server_header=False,
        http=Guarded,
        loop="asyncio",  # uvloop buffers a whole answer before it reports a client that reads none
        ws="none",
        backlog=Guarded.guard.backlog,
        proxy_headers=False,  # quotas count the address that really connects
        timeout_graceful_shutdown=math.ceil(config.limits.drain_seconds),
    )
    if not is_loopback(host):
        log.warning(
            "listening on %s: the router does not authenticate clients itself; "
            "engines see the clients' Authorization headers",
            host,
        )
    with suppress(KeyboardInterrupt):  # drained by then
        uvicorn.Server(settings).run()


async def _no_such_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = f"{request.method} {request.scope['path']} is not served by the router"
    answer = ApiError(status, "not_found" if status == 404 else "method_not_allowed", message)
    extra = error.headers if isinstance(error, HTTPException) else None
    return Response(answer.body, status, extra, "application/json")


def _logging(level: str) -> dict[str, Any]:
    """uvicorn's logging, with ours beside it. No header of a request is ever logged."""
    config: dict[str, Any] = copy.deepcopy(LOGGING_CONFIG)
    ours = {"handlers": ["default"], "level": level.upper(), "propagate": False}
    config["loggers"]["kvferry"] = ours
    return config


Serve = Callable[[Incoming, ClientReply], Coroutine[Any, Any, None]]

# An engine's server may refuse long headers by closing the connection, which looks like a failed
# engine. These limits are a guess at what engines take.
_MAX_HEADER_BYTES = 32 << 10
_MAX_HEADERS = 128


class ApiRoute:
    """One route of the API."""

    def __init__(self, router: Router, serve: Serve) -> None:
        self._router = router
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        router = self._router
        held = RequestMemory(router.memory, address_of(scope.get("client")))
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
        except asyncio.CancelledError:  # the router stops before this request has ended
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
        held: RequestMemory,
    ) -> str:
        """Serve the request, or answer with an error. Returns how it ended."""
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
            # The server closes the connection, because the answer is incomplete.
            asked.trail.append(str(error))
            return "broken_stream"
        except Exception:  # a bug of the router
            log.exception("request %s broke the router", asked.request_id.decode())
            if not reply.started:
                answer = ApiError(500, "internal_error", "the router failed; its log says why")
                with suppress(ClientGone):
                    await reply.whole(answer.status, answer.headers, answer.body)
            return "internal"

    async def _read_body(self, headers: Headers, receive: Receive, held: RequestMemory) -> bytes:
        """The body, if there is memory for it and it comes in time. Raises ApiError.

        The server reads on and discards the rest of a refused body, so that the client gets to
        read the reason. The guard closes the connection after `header_seconds`.
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
        size = fresh = 0  # fresh: bytes within the current progress_seconds
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
    """Do the work. If the client disconnects, cancel it and raise ClientGone.

    This cancels by anyio, like httpx. If asyncio's own cancellation meets httpx at the wrong
    moment, the connection to the engine is never used again and never closed.
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


_PAGE = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
_NO_RESOURCES = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


class Status:
    """The pages /health, /metrics and / of one router."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def health(self, request: Request) -> Response:
        """200 while requests can be served: `ok`, or `degraded` if an engine is down."""
        state = self._state()
        engines = [
            {
                "url": engine.url,
                "role": engine.role,
                "healthy": engine.up,
                "in_flight": engine.in_flight,
                "reason": engine.reason or None,
            }
            for engine in self._router.engines
        ]
        body = {"status": state, "in_flight": self._router.places.taken, "engines": engines}
        return JSONResponse(body, status_code=503 if state == "down" else 200)

    async def metrics(self, request: Request) -> Response:
        router = self._router
        held_bytes = router.memory.quota.taken
        text = router.metrics.render(router.engines, router.places.taken, held_bytes)
        return PlainTextResponse(text, media_type=metrics.CONTENT_TYPE)

    async def page(self, request: Request) -> Response:
        counts = self._router.metrics
        html = _PAGE.substitute(
            state=self._state(),
            in_flight=self._router.places.taken,
            engines="".join(_row(engine) for engine in self._router.engines),
            requests=_counted(counts.requests),
            retries=_counted(counts.retries),
            fallbacks=_counted(counts.fallbacks),
        )
        return HTMLResponse(html, headers=_NO_RESOURCES)

    def _state(self) -> str:
        if not self._router.decode.some_up():
            return "down"
        return "ok" if all(engine.up for engine in self._router.engines) else "degraded"


def _row(engine: UpstreamEngine) -> str:
    state = "up" if engine.up else "down"
    cells = (engine.role, engine.url, state, str(engine.in_flight), engine.reason)
    return f'<tr class="{state}">' + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>\n"


def _counted(counts: dict[str, int]) -> str:
    return "".join(
        f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{count}</td></tr>\n"
        for name, count in counts.items()
        if count
    )
