# SPDX-License-Identifier: Apache-2.0
"""The router as a server and an ASGI application: routes, disconnects and status pages.

`ApiRoute` serves a route of the API. Each of its requests ends in one of `flow.OUTCOMES`, and in
one line of the log. `Status` serves /health and /metrics; `page` serves a page for people.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import math
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn
from prometheus_client import disable_created_metrics, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.config import LOGGING_CONFIG

from kvferry.net.names import is_loopback
from kvferry.router.admin import METHODS as ADMIN_METHODS
from kvferry.router.admin import PATH as ADMIN_PATH
from kvferry.router.admin import Admin
from kvferry.router.api import (
    ApiError,
    Limits,
    RouterConfig,
    client_seconds,
    end_to_end,
    request_id_of,
)
from kvferry.router.clients import ClientConnection, ClientRequest
from kvferry.router.fleet.engines import EngineFailure, Incoming, UpstreamEngine
from kvferry.router.flow import ClientReply, Router
from kvferry.router.guard import (
    LIVE_STREAM,
    ClientGone,
    Guard,
    RequestMemory,
    read_body,
    require_short,
)
from kvferry.router.page.serve import LivePage, LiveStream
from kvferry.router.server import Listen, RouterServer, TlsConnection
from kvferry.router.spans import sending
from kvferry.units import require_port

log = logging.getLogger(__name__)
COMPLETIONS = ("/v1/completions", "/v1/chat/completions")


def make_app(config: RouterConfig) -> Starlette:
    """The router as an ASGI application. It can start only once, because it owns connections."""
    router = Router(config)
    status, page = Status(router), LivePage(router.live)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with (
            sending() as router.spans,
            router.sources.running(),
            router.fleet.running(),
            router.placing.running(),
            router.live.looking(),
        ):
            yield

    admin = []
    if config.token is not None:
        admin.append(Route(ADMIN_PATH, Admin(router, config.token).engines, methods=ADMIN_METHODS))
    app = Starlette(
        routes=[
            *admin,
            Route("/health", status.health),
            Route("/metrics", status.metrics),
            Route("/live", page.state),
            Route(LIVE_STREAM, LiveStream(router.live, config.limits), methods=["GET"]),
            Route("/", page.page),
        ],
        exception_handlers={HTTPException: _no_such_route},
        lifespan=lifespan,
    )
    app.state.router = router
    # Served without ASGI, by `ClientConnection`.
    app.state.api = dict.fromkeys(COMPLETIONS, ApiRoute(router, ("POST",), router.generate))
    app.state.api["/v1/models"] = ApiRoute(router, ("GET", "HEAD"), router.pass_on)
    app.router.redirect_slashes = False  # a redirect would point to any host that a client names
    return app


def connections_of(
    app: Starlette, limits: Limits, tls: ssl.SSLContext | None = None
) -> type[ClientConnection]:
    """The class of a server's connections, with one guard for all of them."""

    class Plain(ClientConnection):
        guard = Guard(limits)
        routes = app.state.api

    if tls is None:
        return Plain

    class Secure(TlsConnection, Plain):
        context = tls  # type: ignore[assignment]  # not None here
        handshake_seconds = limits.header_seconds

    return Secure


def serve(config: RouterConfig, listen: Listen) -> None:
    """Serve until SIGINT or SIGTERM, then accept no more requests and finish the running ones.

    Raises DescriptionError for a bad port or certificate.
    """
    require_port(listen.port)
    tls = listen.tls()
    disable_created_metrics()  # type: ignore[no-untyped-call]
    # uvicorn's logging, with ours beside it. No header but X-Request-Id is ever logged. The format
    # is as uvicorn's, whose own formatter copies each record for the sake of colours.
    logging_config: dict[str, Any] = copy.deepcopy(LOGGING_CONFIG)
    logging_config["formatters"]["default"] = {"format": "%(asctime)s %(levelname)s: %(message)s"}
    ours = {"handlers": ["default"], "level": "INFO", "propagate": False}
    logging_config["loggers"]["kvferry"] = ours
    logging_config["loggers"]["opentelemetry"] = ours  # of a collector that does not answer
    app = make_app(config)
    connections = connections_of(app, config.limits, tls)
    settings = uvicorn.Config(
        app,
        log_config=logging_config,
        access_log=False,  # `ApiRoute` logs each request with what was done for it
        server_header=False,
        http=connections,
        loop="asyncio",  # uvloop buffers a whole answer before it reports a client that reads none
        ws="none",
        backlog=connections.guard.backlog,
        proxy_headers=False,  # quotas count the address that really connects
        timeout_graceful_shutdown=math.ceil(config.limits.drain_seconds),
    )
    if not is_loopback(listen.host):
        if config.api_keys_file is None:
            log.warning(
                "listening on %s: the router does not authenticate clients itself; "
                "engines see the clients' Authorization headers",
                listen.host,
            )
        if tls is None and (config.token is not None or config.api_keys_file is not None):
            log.warning(
                "listening on %s without TLS: keys and tokens pass in the clear", listen.host
            )

    def draining() -> None:
        app.state.router.draining = True

    # A full collection stops every stream: for 32 ms with all modules' objects, else for 0.1 ms.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # a request makes hundreds of objects, few in circles
    with suppress(KeyboardInterrupt):  # drained by then
        RouterServer(settings, listen, draining).run()


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = "not_found" if error.status_code == 404 else "method_not_allowed"
    message = f"{request.method} {request.scope['path']} is not served by the router"
    answer = ApiError(error.status_code, code, message).answer
    return Response(answer.body, answer.status, error.headers, "application/json")


class ApiRoute:
    """One route of the API. `answer` gets a request and its body, and answers it."""

    def __init__(
        self,
        router: Router,
        methods: Collection[str],
        answer: Callable[[Incoming, bytes, ClientReply], Awaitable[None]],
    ) -> None:
        self._router = router
        self._methods = methods
        self._answer = answer

    async def serve(self, request: ClientRequest) -> None:
        router = self._router
        headers, address, method = request.head.headers, request.address, request.head.method
        held = RequestMemory(router.memory, address)
        asked = Incoming(
            request_id_of(headers), method, request.path, end_to_end(headers), held, address
        )
        if router.spans is not None:
            asked.spans = router.spans.request(method, asked.path, asked.request_id, asked.headers)
        if not any(name == b"accept-encoding" for name, _ in asked.headers):
            asked.headers.append((b"accept-encoding", b"identity"))
        reply = ClientReply(request, asked.request_id, lambda: router.draining)
        begun = time.monotonic()
        outcome = "internal"
        try:
            outcome = await self._outcome(asked, request, reply)
        except asyncio.CancelledError:  # the router stops before this request has ended
            outcome = "stopped"
            await reply.cut("router_stopped", "the router stopped in the middle of this answer")
            raise
        finally:
            held.close()
            router.requests[outcome] += 1
            request_id = asked.request_id.decode()
            router.live.ended(outcome, asked.placed, request_id, asked.trail)
            ended = time.monotonic()
            if outcome == "ok":
                router.latency["request_seconds"].observe(ended - begun)
                if method == "POST":
                    router.latency["first_byte_seconds"].observe(reply.began - begun)
            log.info(
                "%s %s %s: %s %d, %.3f s [%s]",
                request_id,
                method,
                asked.path,
                outcome,
                reply.status,
                ended - begun,
                "; ".join(asked.trail),
            )
            if asked.spans is not None:
                asked.spans.ended(outcome, reply.status, asked.placed)

    async def _outcome(self, asked: Incoming, request: ClientRequest, reply: ClientReply) -> str:
        """Serve the request, or answer with an error. Returns how it ended."""
        router, headers = self._router, request.head.headers
        deadline: _Deadline | None = None
        try:
            try:
                if asked.method not in self._methods:
                    raise self._not_allowed(asked)
                if router.keys is not None:
                    asked.client = router.keys.require(headers)
                if router.engine_key is not None:
                    asked.headers = router.engine_key.replace(asked.headers)
                seconds = client_seconds(headers, router.limits.answer_seconds)
                if seconds is not None:
                    deadline = _Deadline(request, seconds)
                body = request.whole_body(router.limits.max_body_bytes)
                if body is None:
                    body = await read_body(headers, request.receive, asked.held, router.limits)
                else:
                    require_short(headers)
                    asked.held.add(len(body))
                router.places.enter(request.address)
                try:
                    await self._answer(asked, body, reply)
                finally:
                    router.places.leave(request.address)
            except ApiError as error:
                await reply.send(error.answer)
            return _by_status(reply.status)
        except ClientGone:
            return "client_gone"
        except asyncio.CancelledError:
            # The connection cancels the task of a client that is gone, and a deadline does so too.
            if not (request.gone or (deadline is not None and deadline.over)):
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            if request.gone or deadline is None:
                return "client_gone"
            asked.trail.append(deadline.message)
            with suppress(ClientGone):
                if reply.status:
                    await reply.cut("deadline_exceeded", deadline.message)
                else:
                    late = ApiError(504, "deadline_exceeded", deadline.message)
                    await reply.send(late.answer)
            return "deadline"
        except EngineFailure as error:
            asked.failed(str(error))
            how = "fell silent" if error.timed_out else "broke off"
            await reply.cut(
                "engine_timeout" if error.timed_out else "engine_failed",
                f"the decode engine {how} in the middle of this answer",
            )
            return "broken_stream"
        except Exception:  # a bug of the router
            log.exception("request %s broke the router", asked.request_id.decode())
            if reply.status:
                request.abort()
            else:
                ours = ApiError(500, "internal_error", "the router failed; its log says why")
                with suppress(ClientGone):
                    await reply.send(ours.answer)
            return "internal"
        finally:
            if deadline is not None:
                deadline.cancel()

    def _not_allowed(self, asked: Incoming) -> ApiError:
        message = f"{asked.method} {asked.path} is not served by the router"
        error = ApiError(405, "method_not_allowed", message)
        error.answer.headers.append((b"allow", ", ".join(self._methods).encode()))
        return error


def _by_status(status: int) -> str:
    if status < 400:
        return "ok"
    odd = {401: "unauthorized", 429: "busy", 503: "unavailable"}
    return odd.get(status, "client_error" if status < 500 else "engine_error")


class _Deadline:
    """The time that a client gave its request. When it is over, the request's task is cancelled."""

    def __init__(self, request: ClientRequest, seconds: float) -> None:
        self.over = False
        self.message = f"the deadline of {seconds:g} s that this request named is over"
        self._request = request
        self._timer = asyncio.get_running_loop().call_later(seconds, self._end)

    def cancel(self) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        if not self._request.answered and self._request.task is not None:
            self.over = True
            self._request.task.cancel()


class Status:
    """/health and /metrics of one router."""

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
                "draining": engine.draining,
                "in_flight": engine.in_flight,
                "reason": engine.reason or None,
            }
            for engine in self._router.fleet.engines
        ]
        body = {"status": state, "in_flight": self._router.places.taken, "engines": engines}
        return JSONResponse(body, status_code=503 if state == "down" else 200)

    async def metrics(self, request: Request) -> Response:
        """All counts since the start, in Prometheus' text format."""
        router = self._router
        lines: list[str] = []

        def add(name: str, kind: str, what: str, samples: Mapping[str, int]) -> None:
            name = f"kvferry_router_{name}"
            lines.extend((f"# HELP {name} {what}", f"# TYPE {name} {kind}"))
            lines.extend(f"{name}{labels} {value}" for labels, value in samples.items())

        def by(label: str, counts: Mapping[str, int]) -> dict[str, int]:
            return {f'{{{label}="{value}"}}': count for value, count in counts.items()}

        engines = router.fleet.engines

        def each(of: Callable[[UpstreamEngine], int]) -> dict[str, int]:
            return {f'{{engine="{_escape(e.url)}",role="{e.role}"}}': of(e) for e in engines}

        ended = by("outcome", router.requests)
        add("requests_total", "counter", "Requests by how they ended.", ended)
        again = by("stage", router.retries)
        add("retries_total", "counter", "Engines asked again, before the first byte.", again)
        alone = by("reason", router.fallbacks)
        add("fallbacks_total", "counter", "Requests decoded without a prefill engine.", alone)
        add("in_flight", "gauge", "Requests that are being served.", {"": router.places.taken})
        waiting = router.fleet.turns.waiting
        add("waiting", "gauge", "Requests that wait for a decode engine.", {"": waiting})
        files = router.sources.files
        used = {f'{{file="{f.name}",result="used"}}': f.used for f in files}
        bad = {f'{{file="{f.name}",result="refused"}}': f.refused for f in files}
        add("reloads_total", "counter", "Contents of watched files.", used | bad)
        good = {f'{{file="{f.name}"}}': int(not f.problem) for f in files}
        add("file_good", "gauge", "Whether what a watched file says now is used.", good)
        unresolved = {"": router.sources.names.failures}
        add("dns_failures_total", "counter", "Names that were not resolved.", unresolved)
        budget = router.budget
        refused = {"": budget.refused}
        add("retries_refused_total", "counter", "Retries that the budget refused.", refused)
        add("retry_budget", "gauge", "Retries that are left now.", {"": int(budget.left)})
        add("held_bytes", "gauge", "Charged for bodies and answers.", {"": router.memory.taken})
        add("engine_up", "gauge", "Whether the engine gets requests.", each(lambda e: int(e.up)))
        draining = each(lambda e: int(e.draining is not None))
        add("engine_draining", "gauge", "Whether the engine drains, or is drained.", draining)
        trial = each(lambda e: e.trial)
        add("engine_trial", "gauge", "Requests that it gets at a time, on trial.", trial)
        add("engine_in_flight", "gauge", "Requests at the engine.", each(lambda e: e.in_flight))
        failures = each(lambda e: e.failures)
        add("engine_failures_total", "counter", "Failed probes, requests.", failures)
        placing = router.placing
        hits = by("source", placing.hit_tokens)
        add("prompt_tokens_total", "counter", "Tokens of prompts, by where they came from.", hits)
        ways = by("way", placing.choices)
        add("choices_total", "counter", "Requests by how they were placed.", ways)
        asked = by("how", placing.prompts.counts)
        add("tokenized_total", "counter", "Prompts by how their tokens were found.", asked)
        known, lost = {}, {}
        for url, stats in placing.index.stats().items():
            engine = f'engine="{_escape(url)}"'
            known[f'{{{engine},state="{stats.state}"}}'] = stats.blocks + stats.estimated_blocks
            lost[f"{{{engine}}}"] = stats.lost_events
        add("cache_blocks", "gauge", "Blocks that the router believes an engine holds.", known)
        add("cache_lost_events_total", "counter", "Batches of KV events that were lost.", lost)
        text = "\n".join(lines) + "\n" + generate_latest(router.registry).decode()
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _state(self) -> str:
        fleet = self._router.fleet
        if not fleet.some_up("decode"):
            return "down"
        well = all(engine.up or engine.draining for engine in fleet.engines)
        return "ok" if well else "degraded"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
