# SPDX-License-Identifier: Apache-2.0
"""Time that the router adds before the first byte of a stream, on one core.

Three kinds of processes: the routers, pinned to one core; an engine that answers after a known time
(`engine.py`); and this client. The last two share another core, where there is one. Requests come
as a Poisson process, whether or not earlier ones have been answered, over connections that are
kept. All cases take turns in one run, so that other programs slow all of them down alike.

    engine alone        the client asks the engine
    load                a router with decode engines only: one request, passed on
    load, handed over   and with prefill engines: two requests to engines for each of the client's.
                        The prefill is answered at once
    cost, token ids     the router reads the prompt, looks up who holds it, and compares all ways
    cost, text          and asks the engine for the tokens of every prompt first

Every second prompt begins as an earlier one did. No two are equal, so nothing is remembered.
`router ms` is the processor time of the router's process for one request with all its events, which
a busy machine does not change much.

A first byte that waits for another program's turn on the core says nothing about the router. So a
round in which other programs had more than `most_others` of the processor time is done again, as
long as `patience_seconds` last. `others` is their share in the rounds that count.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import python_path
from benchmarks.measuring import ProcessorShares, cpu_seconds, percentile
from benchmarks.report import Shown, at_most, sheet
from benchmarks.routing.engine import DONE
from kvferry.errors import KvferryError

P99_ADDED_MS = 5.0  # at most
DECODE, PREFILL = 4, 2  # engines
STEP_SECONDS = 0.01
WARM_UP_SECONDS = 1.0
START_SECONDS = 60.0
END_SECONDS = 30.0  # for the last answers of a round
ALONE = "engine alone"


@dataclass(frozen=True, slots=True)
class Load:
    per_second: float
    seconds: float  # of a round
    rounds: int
    tokens: int = 1000  # of a prompt
    delay_ms: float = 20.0  # until the engine's first byte
    events: int = 8  # of an answer
    most_others: float = 1.0  # share of the processor time, in a round that counts
    patience_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class CaseResult:
    case: str
    requests: int
    p50_ms: float  # first byte
    p99_ms: float
    added_p50_ms: float  # to the engine's alone
    added_p99_ms: float
    router_ms: float  # of processor time, a request
    others: float  # share of all processor time that other programs had


@dataclass(slots=True)
class _Case:
    name: str
    port: int
    as_text: bool = False
    router: subprocess.Popen[bytes] | None = None
    seconds: list[float] = field(default_factory=list)  # until the first byte
    cpu_seconds: float = 0.0
    others: list[float] = field(default_factory=list)


def measure(load: Load) -> list[CaseResult]:
    gc.disable()  # the client's pauses are not the router's
    dice = random.Random(1)
    with ExitStack() as stack:
        cores = sorted(os.sched_getaffinity(0))
        stack.callback(os.sched_setaffinity, 0, cores)
        os.sched_setaffinity(0, cores[1:] or cores)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-routing-")))
        engine, ports = stack.enter_context(_engines(load))
        decode = [f"--decode=http://127.0.0.1:{port}" for port in ports[:DECODE]]
        prefill = [f"--prefill=http://127.0.0.1:{port}" for port in ports[DECODE:]]

        def router(name: str, *arguments: str) -> tuple[int, subprocess.Popen[bytes]]:
            return stack.enter_context(_router(folder / f"{name}.log", cores[0], arguments))

        passing = router("load", "--place=load", *decode)
        handing = router("handed-over", "--place=load", *decode, *prefill)
        costing = router("cost", "--place=cost", *decode, *prefill)
        cases = [
            _Case(ALONE, ports[0]),
            _Case("load", passing[0], router=passing[1]),
            _Case("load, handed over", handing[0], router=handing[1]),
            _Case("cost, token ids", costing[0], router=costing[1]),
            _Case("cost, text", costing[0], as_text=True, router=costing[1]),
        ]
        ours = [os.getpid(), engine.pid, passing[1].pid, handing[1].pid, costing[1].pid]
        for case in cases:
            asyncio.run(_round(load, case, min(load.seconds, WARM_UP_SECONDS), dice))
        deadline = time.monotonic() + load.patience_seconds
        for case in cases * load.rounds:
            while True:
                shares = ProcessorShares(ours)
                before = _cpu_seconds(case.router)
                taken = asyncio.run(_round(load, case, load.seconds, dice))
                _, others = shares.busy_and_others()
                if others <= load.most_others or time.monotonic() > deadline:
                    break
            case.seconds += taken
            case.cpu_seconds += _cpu_seconds(case.router) - before
            case.others.append(others)
    gc.enable()
    alone = cases[0].seconds
    return [_result(case, alone) for case in cases]


def _result(case: _Case, alone: Sequence[float]) -> CaseResult:
    p50, p99 = (percentile(case.seconds, share) * 1e3 for share in (0.5, 0.99))
    return CaseResult(
        case.name,
        len(case.seconds),
        p50,
        p99,
        p50 - percentile(alone, 0.5) * 1e3,
        p99 - percentile(alone, 0.99) * 1e3,
        case.cpu_seconds / len(case.seconds) * 1e3,
        statistics.fmean(case.others),
    )


def as_json(load: Load, results: Sequence[CaseResult]) -> dict[str, Any]:
    return {"load": asdict(load), "cases": [asdict(each) for each in results]}


def tables(load: Load, results: Sequence[CaseResult]) -> Shown:
    columns = {
        "case": "{r.case}",
        "requests": "{r.requests:,}",
        "p50": "{r.p50_ms:.1f}",
        "p99": "{r.p99_ms:.1f}",
        "added p50": "{r.added_p50_ms:.1f}",
        "added p99": "{r.added_p99_ms:.1f}",
        "router ms": "{r.router_ms:.2f}",
        "others": "{r.others:.0%}",
    }
    title = (
        f"{load.per_second:g} streams a second of {load.events} events, prompts of {load.tokens:,} "
        f"tokens, the engine's first byte after {load.delay_ms:g} ms. Milliseconds:"
    )
    verdicts = [
        at_most(f"{each.case}, added p99", each.added_p99_ms, P99_ADDED_MS, "{:.1f} ms")
        for each in results
        if each.case != ALONE
    ]
    return [sheet(title, results, columns)], verdicts


# The client


async def _round(load: Load, case: _Case, seconds: float, dice: random.Random) -> list[float]:
    """The seconds until the first byte, of all requests of one round."""
    gc.collect()
    client = _Client(case.port, load.events)
    count = max(1, round(load.per_second * seconds))
    requests = list(_requests(count, load.tokens, case.as_text, dice))
    tasks, due = [], time.perf_counter()
    for request in requests:
        due += dice.expovariate(load.per_second)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(client.ask(request)))
    async with asyncio.timeout(END_SECONDS):
        taken = await asyncio.gather(*tasks)
    client.close()
    return taken


class _Client:
    def __init__(self, port: int, events: int) -> None:
        self._port, self._events = port, events
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, request: bytes) -> float:
        """Seconds until the first byte of a stream, which is read to its end."""
        while self._idle and self._idle[-1][0].at_eof():  # idle for too long
            self._idle.pop()[1].close()
        if not self._idle:
            self._idle.append(await asyncio.open_connection("127.0.0.1", self._port))
        reader, writer = self._idle.pop()
        begun, first = time.perf_counter(), 0.0
        writer.write(request)
        answer = b""
        while not answer.endswith(b"\r\n0\r\n\r\n"):
            data = await reader.read(1 << 16)
            answer += data
            if not first and b"data:" in answer:
                first = time.perf_counter() - begun
            if not data or not answer.startswith(b"HTTP/1.1 200"):
                raise KvferryError(
                    f"expected a stream, found {answer[:400]!r}; 429 means that this machine is "
                    "too slow or too busy for the rate: ask for less with --per-second"
                )
        if DONE not in answer or answer.count(b"data:") != self._events + 1:
            raise KvferryError(f"not the engine's answer: {answer[:300]!r}")
        self._idle.append((reader, writer))
        return first

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


def _requests(count: int, tokens: int, as_text: bool, dice: random.Random) -> Iterator[bytes]:
    prompts: list[list[int]] = []
    for number in range(count):
        begin = dice.choice(prompts)[: tokens * 3 // 4] if number % 2 else []
        prompts.append(begin + dice.choices(range(100_000), k=tokens - len(begin)))
        words = " ".join(map(str, prompts[-1]))
        prompt = f'"{words}"' if as_text else f"[{words.replace(' ', ', ')}]"
        body = f'{{"model": "m", "prompt": {prompt}, "stream": true, "max_tokens": 8}}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        yield (head + body).encode()


# Processes


@contextmanager
def _engines(load: Load) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """The process of all engines, and their ports."""
    numbers = (DECODE + PREFILL, load.delay_ms / 1e3, STEP_SECONDS, load.events)
    command = [sys.executable, "-m", "benchmarks.routing.engine", *map(str, numbers)]
    environment = os.environ | {"PYTHONPATH": python_path()}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield process, [int(port) for port in process.stdout.readline().split()]
        finally:
            process.kill()


@contextmanager
def _router(
    log: Path, core: int, arguments: Sequence[str]
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """The port and the process of a router that runs on one core."""
    command = [sys.executable, "-m", "kvferry", "router", "--port", "0", *arguments]
    with log.open("wb") as file, subprocess.Popen(command, stderr=file) as process:
        try:
            os.sched_setaffinity(process.pid, {core})
            deadline = time.monotonic() + START_SECONDS
            while not (found := re.search(r"running on http://127.0.0.1:(\d+)", log.read_text())):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise KvferryError(f"the router did not start: {log.read_text()[-1000:]}")
                time.sleep(0.1)
            yield int(found[1]), process
        finally:
            process.kill()


def _cpu_seconds(process: subprocess.Popen[bytes] | None) -> float:
    return 0.0 if process is None else cpu_seconds({process.pid})
