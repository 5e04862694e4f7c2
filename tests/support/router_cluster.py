"""Engines that answer as told, real HTTP servers on loopback, and the router before them."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn

from kvferry.router.api import EngineSpec, Limits, RouterConfig
from kvferry.router.app import RouterApp, connections_of
from kvferry.router.fleet.engines import Fleet
from kvferry.router.placing import Placer
from waiting import wait_until

QUICK = Limits(
    connect_seconds=5.0,
    prefill_seconds=10.0,
    first_byte_seconds=10.0,
    answer_seconds=10.0,
    chunk_seconds=10.0,
    client_seconds=5.0,
    probe_every_seconds=0.05,
    probe_seconds=5.0,
    wait_seconds=0.2,
)
PARAMS = (
    b'{"do_remote_prefill": true, "remote_engine_id": "%s", "remote_block_ids": [[1,  2]],'
    b' "remote_port": 5600, "odd": 1.50, "big": 123456789012345678901234567890}'
)
WHOLE = (
    b'{ "id":"x", "choices" : [{"text":"a"},{"text":"b"}],"usage":{"prompt_tokens":7,"odd":1.0} }\n'
)
CHUNKS = [b'data: {"t": "%d"}\n\n' % i for i in range(3)] + [b"data: [DONE]\n\n"]


@dataclass
class Seen:
    path: str
    headers: dict[str, str]
    raw: bytes
    done: str = ""  # "", "answered" or "aborted"

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw)


@dataclass
class FakeEngine:
    """An engine that answers as told: `script` for the next requests, `always` for the others.

    ok, no_ticket, an HTTP status; drop: closes the connection in an answer; hang: answers
    nothing; break: closes the connection after two chunks; gate: a chunk per release of `gate`.
    """

    name: str
    always: str = "ok"
    script: list[str] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    health: int = 200
    metrics: bytes = b""  # of vLLM's; empty: there are none
    cached: int | None = None  # tokens that it says it had, in answers that are not streamed
    coding: bytes = b""  # that its streams are said to have
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/health":
            await respond(send, self.health, b"", "text/plain")
            return
        if scope["path"] == "/metrics":
            await respond(send, 200 if self.metrics else 404, self.metrics, "text/plain")
            return
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message.get("body", b""), message.get("more_body", False)
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        seen = Seen(scope["path"], headers, raw)
        self.seen.append(seen)
        work = asyncio.create_task(self.answer(seen, send))
        gone = asyncio.create_task(receive())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            seen.done = "answered" if work.done() else "aborted"
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def answer(self, seen: Seen, send: Any) -> None:
        act = self.script.pop(0) if self.script else self.always
        if act == "drop":
            headers = [(b"content-length", b"9")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            return
        if act == "hang":
            await asyncio.sleep(60)
        if act.isdigit():
            await respond(send, int(act), b'{"error": {"message":  "%s"}}' % act.encode())
        elif seen.path == "/v1/models":
            await respond(send, 200, b'{"object":"list",  "data":[{"id":"m"}]}')
        elif (seen.body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            params = b"null" if act == "no_ticket" else PARAMS % self.name.encode()
            usage = self.usage()
            await respond(send, 200, b'{"id": "p",%s "kv_transfer_params":%s}' % (usage, params))
        elif seen.body.get("stream"):
            await self.stream(act, send)
        else:
            await respond(send, 200, WHOLE if self.cached is None else b"{%s}" % self.usage()[:-1])

    def usage(self) -> bytes:
        if self.cached is None:
            return b""
        return b'"usage":{"prompt_tokens_details":{"cached_tokens":%d}},' % self.cached

    async def stream(self, act: str, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-engine", b"e")]
        if self.coding:
            headers.append((b"content-encoding", self.coding))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if act == "break_early":
            return
        for i, chunk in enumerate(CHUNKS):
            while act == "gate" and not self.gate.acquire(blocking=False):
                await asyncio.sleep(0.002)
            if act == "break" and i == 2:
                return
            if act == "stall" and i == 2:
                await asyncio.sleep(60)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def respond(send: Any, status: int, body: bytes, kind: str = "application/json") -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class QuickServer(uvicorn.Server):
    """uvicorn's server, made to stop quickly, and to break connections if told."""

    break_off = False

    async def main_loop(self) -> None:
        """As uvicorn's, which looks every 100 ms whether it has to stop."""
        await self.on_tick(0)
        while not self.should_exit:
            await asyncio.sleep(0.005)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.break_off:
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        await super().shutdown(sockets)
        if self.break_off:  # connections that were accepted so late that uvicorn has not seen them
            for transport in list(asyncio.get_running_loop()._transports.values()):  # type: ignore[attr-defined]
                transport.abort()
            await asyncio.sleep(0)


class Server:
    """An ASGI application under uvicorn in a thread; can be killed and started again."""

    def __init__(self, app: Any, limits: Limits | None = None) -> None:
        """`limits`: of a router, whose clients get its own connections."""
        self.app, self.limits, self.port = app, limits, 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def placing(self) -> Placer:
        """Of a router, to look at."""
        return self.app.router.placing

    def start(self) -> None:
        sock = socket.socket(proto=socket.IPPROTO_TCP)  # else asyncio sets no TCP_NODELAY
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", self.port))
        self.port = sock.getsockname()[1]
        config = uvicorn.Config(
            self.app,
            log_config=None,
            ws="none",
            loop="asyncio",  # as `serve` has it, whatever is installed
            http="auto" if self.limits is None else connections_of(self.app.routes, self.limits),
            lifespan="off" if self.limits is None else "on",
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        self.server = QuickServer(config)
        self.thread = threading.Thread(target=self.server.run, args=([sock],), daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started)

    def tell_to_stop(self, *, at_once: bool = True) -> None:
        self.server.break_off = at_once
        self.server.should_exit = True

    def kill(self) -> None:
        self.tell_to_stop()
        self.join()

    def join(self) -> None:
        self.thread.join(30)
        assert not self.thread.is_alive()


@dataclass
class Cluster:
    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    servers: dict[str, Server]
    client: httpx.Client
    router: Server

    def complete(self, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        body = {"model": "m", "prompt": "hello", **more}
        return self.client.post("/v1/completions", json=body, headers=headers)

    def metric(self, name: str, label: str = "") -> int:
        text = self.client.get("/metrics").text
        found = re.search(
            rf"^kvferry_router_{name}(?:{{{label}}})? (\d+)(?:\.0)?$", text, re.MULTILINE
        )
        assert found is not None, text
        return int(found[1])

    def expect(self, name: str, label: str = "", *, count: int) -> None:
        """Waits: a client may have all of its answer a moment before the router counts it."""
        wait_until(lambda: self.metric(name, label) == count)

    def up(self) -> dict[str, bool]:
        engines = self.client.get("/health").json()["engines"]
        names = {s.url: name for name, s in self.servers.items()}
        return {names[e["url"]]: e["healthy"] for e in engines}


@contextmanager
def cluster(
    prefill: int = 1, decode: int = 1, limits: Limits = QUICK, **config: Any
) -> Iterator[Cluster]:
    """`config`: more of a RouterConfig, and `decode_urls`: more decode engines.

    Requests are placed by load, so that engines get nothing that a test did not send.
    """
    config.setdefault("place", "load")
    ps = [FakeEngine(f"p{i}") for i in range(prefill)]
    ds = [FakeEngine(f"d{i}") for i in range(decode)]
    with ExitStack() as stack:
        servers = {engine.name: Server(engine) for engine in ps + ds}
        for server in servers.values():
            stack.callback(server.join)
        given = RouterConfig(
            tuple(servers[p.name].url for p in ps),
            tuple(servers[d.name].url for d in ds) + tuple(config.pop("decode_urls", ())),
            limits,
            **config,
        )
        router = Server(RouterApp(given), limits)
        stack.callback(router.join)
        for server in servers.values():
            stack.callback(server.tell_to_stop)
        stack.callback(router.tell_to_stop, at_once=False)
        client = stack.enter_context(httpx.Client(base_url=router.url, trust_env=False, timeout=10))
        yield Cluster(ps, ds, servers, client, router)


def quick(**changes: Any) -> Limits:
    return Limits(**{n: changes.get(n, getattr(QUICK, n)) for n in Limits.__slots__})


def decoders(names: str, limits: Limits = QUICK, **more: Any) -> Fleet:
    """A fleet of decode engines with names of one letter; it sends nothing."""
    return Fleet([EngineSpec(f"http://{n}", frozenset(["decode"])) for n in names], limits, **more)
