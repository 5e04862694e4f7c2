"""The router as an application, and as a server."""

from __future__ import annotations

import asyncio
import copy
import ipaddress
import logging
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.config import LOGGING_CONFIG

from kvferry.router.api import ApiError
from kvferry.router.config import Limits, RouterConfig
from kvferry.router.door import Door
from kvferry.router.engines import keep_probing
from kvferry.router.flow import Router
from kvferry.router.guard import Connection, Guard
from kvferry.router.status import Status
from kvferry.units import require_port

log = logging.getLogger(__name__)


def make_app(config: RouterConfig) -> Starlette:
    """The router as an ASGI application. It starts once: its connections end with it."""
    router = Router(config)
    status = Status(router)
    generate = Door(router, router.generate)

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
            Route("/v1/models", Door(router, router.pass_on), methods=["GET"]),
            Route("/health", status.health),
            Route("/metrics", status.metrics),
            Route("/", status.page),
        ],
        exception_handlers={HTTPException: _no_such_route},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a redirect would name whatever host the client names
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
    """Serves until SIGINT or SIGTERM; then takes no more requests and ends those it has.

    Raises DescriptionError for engines that cannot be addressed, and for a port that is none.
    """
    require_port(port)
    config = RouterConfig(tuple(prefill), tuple(decode), limits or Limits())

    class Guarded(Connection):
        guard = Guard(config.limits)

    settings = uvicorn.Config(
        make_app(config),
        host=host,
        port=port,
        log_config=_logging(log_level),
        access_log=False,  # the door logs each request with what was done for it
        server_header=False,
        http=Guarded,
        loop="asyncio",  # uvloop takes a whole answer before it says that the client does not read
        ws="none",
        backlog=Guarded.guard.backlog,
        proxy_headers=False,  # quotas are for the address that really connects
        timeout_graceful_shutdown=math.ceil(config.limits.drain_seconds),
    )
    if not _is_loopback(host):
        log.warning(
            "listening on %s: the router authenticates nobody itself; "
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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
