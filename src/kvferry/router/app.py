# SPDX-License-Identifier: Apache-2.0
"""The router as a server: its routes, the end of each request, and its status.

`ApiRoute` serves a route of the API. Each of its requests ends in one of `flow.OUTCOMES`, and in
one line of the log. `status_route` serves what the router knows by itself: /health, /metrics, the
page for people (`live`), the admin API (`admin`).
"""

from __future__ import annotations

import asyncio
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

from kvferry.net.names import is_loopback
from kvferry.router.api import (
    Answer,
    ApiError,
    Limits,
    RouterConfig,
    client_seconds,
    end_to_end,
    json_answer,
    request_id_of,
)
from kvferry.router.clients import (
    LIVE_STREAM,
    ClientConnection,
    ClientRequest,
    Guard,
    Route,
    require_method,
)
from kvferry.router.fleet import admin
from kvferry.router.fleet.engines import EngineFailure, Incoming, UpstreamEngine
from kvferry.router.flow import ClientReply, Router
from kvferry.router.guard import (
    RETRY_SECONDS,
    ClientGone,
    RequestMemory,
    read_body,
)
from kvferry.router.live import LiveStream
from kvferry.router.server import Listen, RouterServer, TlsConnection
from kvferry.router.spans import RequestSpans, RouterSpans
from kvferry.units import require_port

log = logging.getLogger(__name__)
COMPLETIONS = ("/v1/completions", "/v1/chat/completions")


class RouterApp:
    """One router, as uvicorn runs it. It can start only once, because it owns connections."""

    def __init__(self, config: RouterConfig) -> None:
        self.router = router = Router(config)
        text = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
        self.routes: dict[str, Route] = {
            **dict.fromkeys(COMPLETIONS, ApiRoute(router, ("POST",), router.generate).serve),
            "/v1/models": ApiRoute(router, ("GET", "HEAD"), router.pass_on).serve,
            "/health": status_route(lambda _: health(router)),
            "/metrics": status_route(lambda _: Answer(200, text, metrics_text(router).encode())),
            "/": status_route(lambda _: router.live.page()),
            "/live": status_route(lambda _: router.live.as_json()),
            LIVE_STREAM: LiveStream(router.live, config.limits).serve,
        }
        if config.token is not None:
            engines = admin.Admin(router, config.token).engines
            self.routes[admin.PATH] = status_route(engines, admin.METHODS)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI's start and stop. Requests go to `ClientConnection` instead."""
        await receive()
        async with self.running():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        router = self.router
        router.spans = RouterSpans.from_environment()
        tasks: list[asyncio.Task[None]] = []
        try:
            await router.sources.names.refresh()
            await router.fleet.probe_all()
            for part in (router.sources, router.fleet, router.placing, router.live):
                tasks.append(asyncio.create_task(part.run()))
                tasks[-1].add_done_callback(_log_failure)
            await asyncio.sleep(0)  # each of them begins
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if router.spans is not None:
                router.spans.close()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("a part of the router has ended", exc_info=task.exception())


def connections_of(
    routes: Mapping[str, Route], limits: Limits, tls: ssl.SSLContext | None = None
) -> type[ClientConnection]:
    """The class of a server's connections, with one guard for all of them."""
    made: dict[str, Any] = {"guard": Guard(limits), "routes": routes}
    if tls is None:
        return type("PlainConnection", (ClientConnection,), made)
    made |= {"context": tls, "handshake_seconds": limits.header_seconds}
    return type("SecureConnection", (TlsConnection,), made)


def serve(config: RouterConfig, listen: Listen) -> None:
    """Serve until SIGINT or SIGTERM, then accept no more requests and finish the running ones.

    Raises DescriptionError for a bad port or certificate.
    """
    require_port(listen.port)
    tls = listen.tls()
    disable_created_metrics()  # type: ignore[no-untyped-call]
    app = RouterApp(config)
    connections = connections_of(app.routes, config.limits, tls)
    settings = uvicorn.Config(
        app,
        log_config=_LOGGING,
        server_header=False,
        http=connections,
        lifespan="on",
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

    # Each request writes a line, and no line names a thread, a process or a place in the code.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # as the documentation of `logging` says

    # A full collection stops every stream: for 32 ms with all modules' objects, else for 0.1 ms.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # a request makes hundreds of objects, few in circles
    with suppress(KeyboardInterrupt):  # drained by then
        RouterServer(settings, listen, connections.guard).run()


# Loggers of kvferry, of uvicorn, and of OpenTelemetry, for a collector that does not answer. The
# only header that is ever logged is X-Request-Id.
_LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "%(asctime)s %(levelname)s: %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain"}},
    "loggers": {
        name: {"handlers": ["stderr"], "level": "INFO", "propagate": False}
        for name in ("kvferry", "uvicorn", "opentelemetry")
    },
}


def status_route(
    answer: Callable[[ClientRequest], Answer | Awaitable[Answer]],
    methods: Collection[str] = ("GET", "HEAD"),
) -> Route:
    """A route that the router answers at once, by itself."""

    async def serve(request: ClientRequest) -> None:
        try:
            require_method(request, methods)
            found = answer(request)
            answered = found if isinstance(found, Answer) else await found
        except ApiError as error:
            answered = error.answer
        except ClientGone:
            return
        except Exception:  # a bug of the router
            log.exception("%s %s broke the router", request.head.method, request.path)
            answered = _broken().answer
        request.answer(answered)

    return serve


def _broken() -> ApiError:
    return ApiError(500, "internal_error", "the router failed; its log says why")


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
        request_id = asked.request_id.decode()
        if router.spans is not None:
            asked.spans = RequestSpans(
                router.spans, method, request.path, request_id, asked.headers
            )
        if not any(name == b"accept-encoding" for name, _ in asked.headers):
            asked.headers.append((b"accept-encoding", b"identity"))
        reply = ClientReply(request, asked.request_id)
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
            router.live.ended(outcome, asked.placed, request_id, asked.trail)
            ended = time.monotonic()
            if outcome == "ok":
                router.latency["request_seconds"].observe(ended - begun)
                if method == "POST":
                    router.latency["first_byte_seconds"].observe(reply.began - begun)
            done = f"{outcome} {reply.status}, {ended - begun:.3f} s [{'; '.join(asked.trail)}]"
            log.info("%s %s %s: %s", request_id, method, asked.path, done)
            if asked.spans is not None:
                asked.spans.ended(outcome, reply.status, asked.placed)

    async def _outcome(self, asked: Incoming, request: ClientRequest, reply: ClientReply) -> str:
        """Serve the request, or answer with an error. Returns how it ended."""
        router, headers = self._router, request.head.headers
        seconds: float | None = None
        deadline = asyncio.timeout(None)
        try:
            try:
                require_method(request, self._methods)
                if router.keys is not None:
                    asked.client = router.keys.require(headers)
                if router.engine_key is not None:
                    asked.headers = router.engine_key.replace(asked.headers)
                seconds = client_seconds(headers, router.limits.answer_seconds)
                async with asyncio.timeout(seconds) as deadline:
                    await self._serve(asked, request, reply)
            except ApiError as error:
                await reply.send(error.answer)
            return _by_status(reply.status)
        except ClientGone:
            return "client_gone"
        except asyncio.CancelledError:
            if not request.gone:
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            return "client_gone"
        except EngineFailure as error:
            asked.failed(str(error))
            how = "fell silent" if error.timed_out else "broke off"
            await reply.cut(
                "engine_timeout" if error.timed_out else "engine_failed",
                f"the decode engine {how} in the middle of this answer",
            )
            return "broken_stream"
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                message = f"the deadline of {seconds:g} s that this request named is over"
                asked.trail.append(message)
                with suppress(ClientGone):
                    if reply.status:
                        await reply.cut("deadline_exceeded", message)
                    else:
                        await reply.send(ApiError(504, "deadline_exceeded", message).answer)
                return "deadline"
            # A bug of the router. All other timeouts are an engine's error, or the request's.
            log.exception("request %s broke the router", asked.request_id.decode())
            if reply.status:
                request.abort()
            else:
                with suppress(ClientGone):
                    await reply.send(_broken().answer)
            return "internal"

    async def _serve(self, asked: Incoming, request: ClientRequest, reply: ClientReply) -> None:
        router, headers = self._router, request.head.headers
        body = request.whole_body(router.limits.max_body_bytes)
        if body is None:
            body = await read_body(headers, request.read, asked.held, router.limits)
        else:
            asked.held.add(len(body))
        in_flight = ("requests in flight", "too_many_requests", RETRY_SECONDS)
        with router.places.place(request.address, *in_flight):
            await self._answer(asked, body, reply)


def _by_status(status: int) -> str:
    if status < 400:
        return "ok"
    odd = {401: "unauthorized", 429: "busy", 503: "unavailable"}
    return odd.get(status, "client_error" if status < 500 else "engine_error")


def health(router: Router) -> Answer:
    """200 while requests can be served: `ok`, or `degraded` if an engine is down."""
    fleet = router.fleet
    well = all(engine.up or engine.draining for engine in fleet.engines)
    state = "down" if not fleet.some_up("decode") else "ok" if well else "degraded"
    engines = [
        {
            "url": engine.url,
            "role": engine.role,
            "healthy": engine.up,
            "draining": engine.draining,
            "in_flight": engine.in_flight,
            "reason": engine.reason or None,
        }
        for engine in fleet.engines
    ]
    body = {"status": state, "in_flight": router.places.taken, "engines": engines}
    return json_answer(body, 503 if state == "down" else 200)


def metrics_text(router: Router) -> str:
    """All counts since the start, in Prometheus' text format."""
    placing = router.placing
    engines, files, budget = router.fleet.engines, router.sources.files, router.budget
    lines: list[str] = []

    def add(name: str, what: str, samples: Mapping[str, int] | int) -> None:
        kind = "counter" if name.endswith("_total") else "gauge"
        name = f"kvferry_router_{name}"
        lines.extend((f"# HELP {name} {what}", f"# TYPE {name} {kind}"))
        samples = {"": samples} if isinstance(samples, int) else samples
        lines.extend(f"{name}{labels} {value}" for labels, value in samples.items())

    def by(label: str, counts: Mapping[str, int]) -> dict[str, int]:
        return {f'{{{label}="{value}"}}': count for value, count in counts.items()}

    def each(of: Callable[[UpstreamEngine], int]) -> dict[str, int]:
        return {f'{{engine="{_escape(e.url)}",role="{e.role}"}}': of(e) for e in engines}

    add("requests_total", "Requests by how they ended.", by("outcome", router.requests))
    add("retries_total", "Engines asked again.", by("stage", router.retries))
    alone = by("reason", router.fallbacks)
    add("fallbacks_total", "Requests decoded without a prefill engine.", alone)
    add("in_flight", "Requests that are being served.", router.places.taken)
    add("waiting", "Requests that wait for a decode engine.", router.fleet.turns.waiting)
    used = {f'{{file="{f.name}",result="used"}}': f.used for f in files}
    bad = {f'{{file="{f.name}",result="refused"}}': f.refused for f in files}
    add("reloads_total", "Contents of watched files.", used | bad)
    good = by("file", {f.name: int(not f.problem) for f in files})
    add("file_good", "Whether what a watched file says now is used.", good)
    add("dns_failures_total", "Names that were not resolved.", router.sources.names.failures)
    add("retries_refused_total", "Retries that the budget refused.", budget.refused)
    add("retry_budget", "Retries that are left now.", int(budget.left))
    add("held_bytes", "Charged for bodies and answers.", router.memory.taken)
    add("engine_up", "Whether the engine gets requests.", each(lambda e: int(e.up)))
    draining = each(lambda e: int(e.draining is not None))
    add("engine_draining", "Whether the engine drains, or is drained.", draining)
    add("engine_trial", "Requests that it gets at a time, on trial.", each(lambda e: e.trial))
    add("engine_in_flight", "Requests at the engine.", each(lambda e: e.in_flight))
    add("engine_failures_total", "Failed probes, requests.", each(lambda e: e.failures))
    hits = by("source", placing.hit_tokens)
    add("prompt_tokens_total", "Tokens of prompts, by where they came from.", hits)
    add("choices_total", "Requests by how they were placed.", by("way", placing.choices))
    asked = by("how", placing.prompts.counts)
    add("tokenized_total", "Prompts by how their tokens were found.", asked)
    known, lost = {}, {}
    for url, part in placing.index.stats().items():
        engine = f'engine="{_escape(url)}"'
        known[f'{{{engine},state="{part.state}"}}'] = part.size
        lost[f"{{{engine}}}"] = part.lost_events
    add("cache_blocks", "Blocks that the router believes an engine holds.", known)
    add("cache_lost_events_total", "Batches of KV events that were lost.", lost)
    return "\n".join(lines) + "\n" + generate_latest(router.registry).decode()


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
