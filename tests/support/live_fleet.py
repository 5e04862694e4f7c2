"""The router's page over an invented fleet: real state, page and stream, made-up traffic.

`python tests/support/live_fleet.py PORT` serves it, for people who change the page. Ten minutes of
traffic have passed when it starts.
"""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import uvicorn

from kvferry.router.api import Limits
from kvferry.router.app import connections_of, status_route
from kvferry.router.choice import Decision, Option, reason
from kvferry.router.clients import LIVE_STREAM
from kvferry.router.live import (
    CacheNow,
    EngineNow,
    LiveState,
    LiveStream,
    Placed,
    RouterNow,
)
from waiting import wait_until

_LIMITS = Limits()


class Fleet:
    """Engines and their traffic. `ahead` seconds have passed that the machine has not seen."""

    def __init__(
        self, prefill: int = 2, decode: int = 3, seed: int = 1, stands_still: bool = False
    ) -> None:
        """`stands_still`: its clock moves by `pass_time` alone."""
        self.stands_still = stands_still
        self.ahead = 0.0
        self.random = random.Random(seed)
        self.waiting = 0
        self.open: list[tuple[float, Placed, Option]] = []
        self.down_at: dict[str, float] = {}
        urls = [f"http://10.0.0.{i + 11}:8100" for i in range(prefill)]
        roles = ["prefill"] * prefill + ["decode"] * decode
        urls += [f"http://10.0.0.{i + 21}:8200" for i in range(decode)]
        self.engines = {
            url: EngineNow(url=url, roles=[role], up=True)
            for url, role in zip(urls, roles, strict=True)
        }
        self.live = LiveState(self.now, self.clock, lambda: time.time() + self.ahead - 600)

    def clock(self) -> float:
        return self.ahead + (0.0 if self.stands_still else time.monotonic())

    def change(self, url: str, **fields: Any) -> None:
        if fields.get("up") is False:
            self.down_at[url] = self.clock()
        self.engines[url] = msgspec.structs.replace(self.engines[url], **fields)

    def now(self) -> RouterNow:
        return RouterNow(
            engines=[self._engine(engine) for engine in self.engines.values()],
            in_flight=len(self.open),
            most_in_flight=1024,
            waiting=self.waiting,
        )

    def pass_time(self, seconds: float) -> None:
        """Traffic of so many seconds, at once."""
        for _ in range(round(seconds)):
            self.ahead += 1
            self.one_second()
            self.live.look()

    def one_second(self, requests: float = 5.5) -> None:
        for _ in range(int(requests + self.random.random())):
            self.place(f"chatcmpl-{self.random.randbytes(8).hex()}")
        due = [entry for entry in self.open if entry[0] <= self.clock()]
        self.open = [entry for entry in self.open if entry[0] > self.clock()]
        for _, placed, _ in due:
            self.end("ok", placed)

    def end(self, outcome: str, placed: Placed | None = None, *trail: str) -> None:
        request_id = placed.request_id if placed else f"chatcmpl-{self.random.randbytes(8).hex()}"
        self.live.ended(outcome, placed, request_id, trail)

    def place(self, request_id: str) -> None:
        prefills = [u for u, e in self.engines.items() if e.up and "prefill" in e.roles]
        decodes = [u for u, e in self.engines.items() if e.up and "decode" in e.roles]
        if not decodes:
            self.end("unavailable")
            return
        tokens = int(self.random.lognormvariate(7.6, 0.9))
        options = []
        for decode in decodes:
            for prefill in (None, *prefills):
                options.append(self._option(tokens, prefill, decode))
        options.sort(key=lambda option: option.seconds)
        chosen = options[0]
        decision = Decision(chosen, tuple(options), reason(chosen, options))
        own = self.random.lognormvariate(-7, 0.5)
        placed = self.live.decided(request_id, tokens, decision, own)
        took = chosen.seconds * self.random.lognormvariate(0.02, 0.18)
        self.live.answered(placed, took, prefill=chosen.prefill, decode=chosen.decode)
        self.live.served(placed, chosen.cached_tokens)
        ends = self.clock() + self.random.lognormvariate(1.4, 0.6)
        self.open.append((ends, placed, chosen))

    def _option(self, tokens: int, prefill: str | None, decode: str) -> Option:
        share = self.random.random() ** 2 if self.random.random() < 0.45 else 0.0
        cached = int(share * tokens) // 16 * 16
        source = "none"
        if cached:
            source = "handover" if prefill else self.random.choice(["local", "local", "pool"])
        parts = {
            "queue": self.random.expovariate(20) + (0.0 if prefill else 0.06),
            "load": cached * 4e-6 if source == "pool" else 0.0,
            "prefill": 0.01 + (tokens - cached) * 9e-5 * (1.0 if prefill else 1.4),
            "transfer": 0.004 + tokens * 3e-6 if prefill else 0.0,
            "decode": 0.012,
        }
        seconds = sum(parts.values())
        return Option(decode, prefill, seconds, parts, cached, source)  # type: ignore[arg-type]

    def _engine(self, engine: EngineNow) -> EngineNow:
        url = engine.url
        here = [o for _, _, o in self.open if url in (o.decode, o.prefill)]
        decodes = "decode" in engine.roles
        return msgspec.structs.replace(
            engine,
            in_flight=len(here) if engine.up and decodes else len(here) // 6,
            running=len(here) if engine.up and decodes else None,
            waiting_tokens=120 * len(here) if engine.up else None,
            prefill_tokens_per_second=(7_900.0 if decodes else 11_200.0) if engine.up else None,
            step_ms=14.2 + 0.3 * len(here) if engine.up and decodes else None,
            down_seconds=None if engine.up else self.clock() - self.down_at[url],
            cache=engine.cache or CacheNow("live", 18_400 + len(here)),
        )


def an_incident(fleet: Fleet) -> None:
    """Ten minutes, in which one engine came back, one did not, and one lost its events."""
    urls = list(fleet.engines)
    fleet.pass_time(240)
    fleet.change(urls[0], up=False, reason="cannot connect: All connection attempts failed")
    fleet.pass_time(41)
    fleet.change(urls[0], up=True, reason="")
    fleet.pass_time(172)
    silent = "silent for 2 s"
    fleet.change(urls[-1], up=False, reason=silent, failed_probes=2)
    lost, served = urls[-1], [entry for entry in fleet.open if entry[2].decode == urls[-1]]
    fleet.open = [entry for entry in fleet.open if entry[2].decode != lost]
    for _, placed, option in served:
        trail = [f"prefill {option.prefill} 200"] if option.prefill else []
        trail += [f"decode {lost} 200", f"decode engine {lost}: {silent}"]
        fleet.end("broken_stream", placed, *trail)
    fleet.pass_time(30)
    fleet.change(urls[-2], cache=CacheNow("lost", 0))
    fleet.pass_time(117 - 100)
    fleet.change(urls[-2], cache=CacheNow("estimated", 6_150))
    fleet.pass_time(100)


class PageApp:
    """The page of a fleet. `traffic` is called once a second."""

    def __init__(
        self, fleet: Fleet, traffic: Callable[[], None] | None, limits: Limits = _LIMITS
    ) -> None:
        self._live, self._traffic, self._limits = fleet.live, traffic, limits
        self.stream = LiveStream(fleet.live, limits)
        self._routes = {
            "/": status_route(lambda _: fleet.live.page()),
            "/live": status_route(lambda _: fleet.live.as_json()),
            LIVE_STREAM: self.stream.serve,
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        tasks = [asyncio.create_task(self._go_on()), asyncio.create_task(self._live.run())]
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for task in tasks:
            task.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    def settings(self, **more: Any) -> uvicorn.Config:
        connections = connections_of(self._routes, self._limits)
        return uvicorn.Config(
            self, http=connections, loop="asyncio", lifespan="on", ws="none", **more
        )

    async def _go_on(self) -> None:
        while self._traffic is not None:
            await asyncio.sleep(1)
            self._traffic()


class Served:
    """A fleet's page on loopback, from a thread of its own; can be stopped and started again."""

    def __init__(self, fleet: Fleet, traffic: bool = True, limits: Limits = _LIMITS) -> None:
        self.fleet = fleet
        self._app = PageApp(fleet, fleet.one_second if traffic else None, limits)
        self.viewers = self._app.stream.viewers
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/"

    def start(self) -> None:
        sock = socket.create_server(("127.0.0.1", self._port))
        self._port = sock.getsockname()[1]
        self._server = uvicorn.Server(
            self._app.settings(log_config=None, timeout_graceful_shutdown=1)
        )
        self._loop: asyncio.AbstractEventLoop | None = None

        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self._server.serve([sock])

        self._thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)

    def do(self, what: Callable[[], object]) -> None:
        """Run it in the thread that owns the fleet."""

        async def run() -> None:
            what()

        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


if __name__ == "__main__":
    fleet = Fleet()
    an_incident(fleet)
    app, port = PageApp(fleet, fleet.one_second), int(sys.argv[1])
    print(f"http://127.0.0.1:{port}/", flush=True)
    uvicorn.Server(app.settings(port=port, log_level="warning")).run()
