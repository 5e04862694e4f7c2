"""The router's process, the engines' processes, and what must be left when all is over."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from chaos.outcome import Broken
from chaos.router.clients import Ended
from router_process import RouterProcess
from vllm_engines import free_port

PREFILL, DECODE = 2, 3
# A request that tries everything takes less than `clients.DEADLINE_SECONDS`. Few places, so that
# rushes fill the line and the places.
LIMITS = {
    "connect_seconds": 1.0,
    "prefill_seconds": 2.0,
    "first_byte_seconds": 2.0,
    "answer_seconds": 3.0,
    "chunk_seconds": 2.0,
    "client_seconds": 3.0,
    "header_seconds": 3.0,
    "progress_seconds": 2.0,
    "wait_seconds": 2.0,
    "queue_seconds": 3.0,
    "drain_seconds": 20.0,
    "tokenize_seconds": 0.5,
    "metrics_seconds": 0.3,
    "probe_every_seconds": 0.1,
    "probe_seconds": 1.0,
    "trial_seconds": 1.0,
    "max_running": 8,
    "max_queued": 32,
    "max_in_flight": 48,
    "address_share": 1.0,
}
# Of a prefill. Hand-overs pay where others compute faster than the decode engine.
_TOKEN_MICROSECONDS = {"prefill": 10, "decode": 400}
_FOLDER = Path(__file__).parent
_SETTLE_SECONDS = 30.0
_POLL_SECONDS = 0.05
# Connections to engines that are idle for a moment: one for probes and one for metrics each.
_MORE_FILES = 2 * (PREFILL + DECODE)
# Memory that the interpreter keeps, caches that fill. The router of 200 faults grew by less than
# a quarter of this.
_MORE_BYTES = 48 << 20
_HANDED_OVER = re.compile(r"; prefill http\S+ 200;.* decode http\S+ 200")
_LINE = re.compile(r"(c[\w-]+) POST /v1/completions: (\w+) (\d+),")
_BUGS = ("Traceback", "broke the router", "exception was never retrieved", "never awaited")


class EngineProcess:
    """An engine that can be killed and started again, at the same addresses."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.port, self.events_port, self.replay_port = (free_port() for _ in range(3))
        self.stopped = False
        self._start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def spec(self) -> dict[str, Any]:
        """For the admin API."""
        return {
            "url": self.url,
            "roles": [self.role],
            "events": f"tcp://127.0.0.1:{self.events_port}",
            "replay": f"tcp://127.0.0.1:{self.replay_port}",
        }

    @property
    def dead(self) -> bool:
        return self.process.poll() is not None

    def _start(self) -> None:
        numbers = (self.port, self.events_port, self.replay_port, _TOKEN_MICROSECONDS[self.role])
        command = [sys.executable, str(_FOLDER / "engine.py"), *map(str, numbers)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise OSError(f"the engine at {self.url} did not start")

    async def start(self) -> None:
        await asyncio.to_thread(self._start)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.stopped = True

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.stopped = False


@dataclass(slots=True)
class Level:
    """What the router's process has while nothing is asked of it."""

    files: int
    tasks: Counter[str]
    memory_bytes: int


@dataclass(slots=True)
class World:
    engines: list[EngineProcess]
    client: httpx.AsyncClient
    folder: Path
    token: str
    port: int = 0
    routers: list[RouterProcess] = field(default_factory=list)  # the last one serves
    ended: list[Ended] = field(default_factory=list)

    @property
    def router(self) -> RouterProcess:
        return self.routers[-1]

    def of_role(self, role: str) -> list[EngineProcess]:
        return [engine for engine in self.engines if engine.role == role]

    async def start_router(self, *, take_over: bool = False) -> None:
        """Start a router; with `take_over`, in place of the last one, which drains and ends."""
        more = ["--token-file", str(self.folder / "token")]
        for engine in self.engines:
            if engine not in (self.of_role("prefill")[0], self.of_role("decode")[0]):
                more += [f"--{engine.role}", engine.url]
            spec = engine.spec
            more += ["--engine-events", f"{engine.url}={spec['events']},{spec['replay']}"]
        if take_over:
            more.append("--take-over")
        pair: list[Any] = [self.of_role("prefill")[0], self.of_role("decode")[0]]
        program = (str(_FOLDER / "observed.py"), str(self.folder / "tasks"))
        limits: dict[str, float] = dict(LIMITS)
        made = await asyncio.to_thread(
            lambda: RouterProcess(pair, limits, None, None, more, self.port, program=program)
        )
        self.routers.append(made)
        self.port = made.port

    async def admin(self, method: str, engine: EngineProcess, body: Any = None) -> None:
        answer = await self.client.request(
            method,
            f"http://127.0.0.1:{self.port}/admin/engines",
            params=None if method == "POST" else {"url": engine.url},
            json=body,
            headers={"authorization": f"Bearer {self.token}"},
        )
        # 404, 409: what was asked for is so already, because an engine was drained meanwhile.
        if answer.status_code not in (200, 201, 404, 409):
            raise Broken(f"the admin API: {method} {engine.url}: {answer.text}")

    async def tell(self, engine: EngineProcess, *acts: str, events: str = "ok") -> None:
        """Let an engine fail its next requests so."""
        said = {"acts": acts, "events": events}
        (await self.client.post(f"{engine.url}/fault", json=said)).raise_for_status()

    async def repair(self) -> None:
        """All engines live, answer well, and are in the fleet."""
        for engine in self.engines:
            if engine.dead:
                await engine.start()
            elif engine.stopped:
                engine.go_on()
            await self.tell(engine)
            await self.admin("POST", engine, engine.spec)

    async def live(self) -> dict[str, Any]:
        answer = await self.client.get(f"http://127.0.0.1:{self.port}/live")
        return dict(answer.json())

    async def metrics(self) -> str:
        return (await self.client.get(f"http://127.0.0.1:{self.port}/metrics")).text

    async def all_up(self) -> None:
        wanted = {engine.url for engine in self.engines}

        async def missing() -> str:
            seen = {e["url"]: e["up"] for e in (await self.live())["engines"]}
            return "" if seen == dict.fromkeys(wanted, True) else f"engines: {seen}"

        await self._until(missing)

    async def settled(self, before: Level | None = None) -> Level:
        """Wait until the router holds nothing, and not more than `before`. Raises Broken."""
        now: Level | None = None

        async def left() -> str:
            nonlocal now
            if found := await self._held():
                return found
            if found := self._unsaid():
                return found
            now = Level(self.router.files(), await self._tasks(), self.router.memory_bytes())
            if before is None:
                return ""
            if more := now.tasks - before.tasks:
                return f"tasks: {dict(more)}"
            if now.files > before.files + _MORE_FILES:
                return f"{now.files} open files, {before.files} before"
            return ""

        await self._until(left)
        assert now is not None
        if before is not None and now.memory_bytes > before.memory_bytes + _MORE_BYTES:
            was, has = before.memory_bytes >> 20, now.memory_bytes >> 20
            raise Broken(f"the router has {has} MiB of memory; it had {was} MiB")
        for router in self.routers[:-1]:
            if router.process.poll() is None:
                raise Broken("a router that was replaced has not ended")
        return now

    async def _held(self) -> str:
        """What the router still counts, in words; empty: nothing."""
        text, live = await self.metrics(), await self.live()
        gauges = ("in_flight", "waiting", "held_bytes", "engine_in_flight")
        for name, labels, value in re.findall(r"^kvferry_router_(\w+)(\{.*\})? (\S+)$", text, re.M):
            if name in gauges and float(value):
                return f"{name}{labels} is {value}"
        for engine in live["engines"]:
            if engine["waiting_tokens"] or engine["running"]:
                return f"work is counted that is over: {engine}"
        return await self._strangers()

    async def no_strangers(self) -> None:
        """Wait until the index has no engine that was removed. Raises Broken."""
        await self._until(self._strangers)

    async def _strangers(self) -> str:
        text, live = await self.metrics(), await self.live()
        known = set(re.findall(r'^kvferry_router_cache_blocks\{engine="([^"]+)"', text, re.M))
        strange = known - {engine["url"] for engine in live["engines"]}
        return f"the index has engines that were removed: {sorted(strange)}" if strange else ""

    def read_log(self) -> dict[str, tuple[str, int]]:
        """Outcome and status of each request by its name. Raises Broken."""
        said: dict[str, tuple[str, int]] = {}
        for router in self.routers:
            for line in list(router.log):
                if any(word in line for word in _BUGS):
                    at = router.log.index(line)
                    raise Broken("a bug: " + "".join(router.log[at : at + 30]))
                if found := _LINE.search(line):
                    name, outcome, status = found[1], found[2], int(found[3])
                    if name in said:
                        raise Broken(f"{name} ended twice: {said[name]}, {outcome} {status}")
                    said[name] = (outcome, status)
        return said

    def handed_over(self) -> int:
        """Requests that one engine prefilled and another one decoded."""
        return sum(bool(_HANDED_OVER.search(line)) for r in self.routers for line in list(r.log))

    def _unsaid(self) -> str:
        """Compare what clients saw with what the router says. Raises Broken."""
        said = self.read_log()
        for ended in self.ended:
            name = ended.asked.name
            if name not in said:
                if ended.end == "left":  # maybe before the router knew of it
                    continue
                return f"{name} ({ended.end}) has no outcome"
            outcome, status = said[name]
            fits = {
                "right": outcome == "ok",
                "garbage": outcome in ("ok", "broken_stream"),
                "cut": outcome in ("broken_stream", "client_gone", "stopped"),
                "refused": status == ended.status and outcome != "ok",
                "left": outcome != "internal",
            }
            if not fits[ended.end]:
                raise Broken(f"{name} ended as {ended.end} {ended.status}: {outcome} {status}")
        return ""

    async def _tasks(self) -> Counter[str]:
        path, process = self.folder / "tasks", self.router.process.pid
        path.unlink(missing_ok=True)
        os.kill(process, signal.SIGUSR1)

        async def missing() -> str:
            return "" if path.exists() else "the router does not say which tasks it has"

        await self._until(missing)
        return Counter(json.loads(path.read_text())["tasks"])

    async def _until(self, missing: Callable[[], Any]) -> None:
        """Wait until `missing` says nothing. Raises Broken with its last word."""
        end = asyncio.get_running_loop().time() + _SETTLE_SECONDS
        while what := await missing():
            if asyncio.get_running_loop().time() > end:
                raise Broken(f"after {_SETTLE_SECONDS:g} s: {what}")
            await asyncio.sleep(_POLL_SECONDS)


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    """A router before two prefill and three decode engines."""
    engines: list[EngineProcess] = []
    with tempfile.TemporaryDirectory() as name:
        folder, token = Path(name), secrets.token_hex(16)
        (folder / "token").touch(0o600)
        (folder / "token").write_text(token)
        before = os.environ.get("KVFERRY_RUNTIME_DIR")
        os.environ["KVFERRY_RUNTIME_DIR"] = str(folder / "run")
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            made = World(engines, client, folder, token)
            try:
                for role in ["prefill"] * PREFILL + ["decode"] * DECODE:
                    engines.append(EngineProcess(role))
                await made.start_router()
                yield made
            finally:
                for router in made.routers:
                    router.stop()
                for engine in engines:
                    engine.kill()
                if before is None:
                    del os.environ["KVFERRY_RUNTIME_DIR"]
                else:
                    os.environ["KVFERRY_RUNTIME_DIR"] = before
