# SPDX-License-Identifier: Apache-2.0
"""Real engines behind real routers: one prefill and two decode engines, conversations, streams.

All cases take turns in one run, over the same prompts at the same times:

    kvferry, cost              engines with FerryConnector
    kvferry, load              the same engines, `--place load`: always handed over
    vllm-router, round_robin   the same engines
    vllm-router, cache_aware   engines with vLLM's NixlConnector

The last two need `--vllm-router PROGRAM`. Each time a router is started anew, sees some other
conversations first, and then finds empty caches. While one set of engines is asked, the other one
is stopped (SIGSTOP), because some connectors have threads that never rest: `idle` says what share
of the processors such engines take while nobody asks them.

    first token   while requests come at their times
    hits          tokens of these prompts that no engine computed, by the engines' own counters
    a second      requests answered, where each conversation goes on as soon as it is answered
    wrong         answers that are not those of one engine alone

`predict` compares the first tokens with what `kvferry simulate` says.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import require_vllm
from benchmarks.measuring import ProcessorShares, awake, pause, percentile
from benchmarks.report import Shown, sheet
from benchmarks.routing.conversations import (
    BLOCK_TOKENS,
    Ask,
    StreamClient,
    Told,
    at_their_times,
    conversations,
    one_after_another,
)
from benchmarks.routing.predict import Calibration, Prediction, predict, single_asks
from kvferry.errors import KvferryError
from kvferry.simulate.engine import EngineRates
from kvferry.simulate.run import Policy
from router_process import RouterProcess
from tiny_models import llama_config, make_model
from vllm_engines import Engine, events_of, free_port, nixl_environment, open_log, publish_events
from vllm_pairs import post, started

LAYERS = 4
CHUNK_TOKENS = 2048  # max_num_batched_tokens
DECODE = 2  # engines
START_SECONDS = 60.0  # of a router
IDLE_SECONDS = 3.0  # of looking
RESET_SECONDS = 60.0  # for the blocks of ended requests to come back
CONVERSATIONS, WARM_UP = 6, 3
FERRY, NIXL = "FerryConnector", "NixlConnector"
COMPUTED = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"}'


@dataclass(frozen=True, slots=True)
class Case:
    """A router before one set of engines, and the policy of `kvferry simulate` that is like it."""

    name: str
    connector: str
    arguments: tuple[str, ...]
    like: Policy | None = None
    theirs: bool = False  # vllm-router


CASES = (
    Case("kvferry, cost", FERRY, ("--place=cost",), "cost"),
    Case("kvferry, load", FERRY, ("--place=load",), "least-loaded"),
    Case("vllm-router, round_robin", FERRY, ("--policy=round_robin",), "round-robin", theirs=True),
    Case("vllm-router, cache_aware", NIXL, ("--policy=cache_aware",), theirs=True),
)


@dataclass(frozen=True, slots=True)
class RealResult:
    case: str
    requests: int
    prompt_tokens: int
    hit_tokens: int
    p50_ms: float  # first token
    p99_ms: float
    per_second: float
    wrong: int
    others: float  # share of all processor time that other programs had meanwhile


@dataclass(frozen=True, slots=True)
class RealRun:
    results: list[RealResult]
    predictions: list[Prediction]
    rates: dict[str, EngineRates]  # by connector
    idle: dict[str, float]  # share of all processor time that idle engines take, by connector


@dataclass(slots=True)
class _Seen:
    """What one case has shown so far."""

    singles: list[Told] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    hit_tokens: int = 0
    prompt_tokens: int = 0
    wrong: int = 0
    rush_seconds: float = 0.0
    others: list[float] = field(default_factory=list)


def measure(rounds: int, vllm_router: Path | None) -> RealRun:
    """Raises KvferryError if an engine or a router does not do its part."""
    require_vllm("bench-routing")
    cases = [case for case in CASES if not case.theirs or vllm_router is not None]
    asks = conversations(CONVERSATIONS)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-routing-")))
        model = make_model(folder / "tiny", llama_config(num_hidden_layers=LAYERS))
        fleets = {}
        for connector in dict.fromkeys(case.connector for case in cases):
            fleets[connector] = fleet = _Fleet(connector, model, folder)
            stack.callback(fleet.kill)
            fleet.start()
            pause(fleet.engines)
        first = fleets[cases[0].connector]
        with first.awake():
            right = asyncio.run(_alone(first.prefill.url, asks))
        seen = {case.name: _Seen() for case in cases}
        costs = {connector: Calibration() for connector in fleets}
        idle = {}
        for number in range(rounds):
            for connector, fleet in fleets.items():
                with fleet.awake():
                    _say(f"round {number + 1}: what engines with {connector} cost")
                    idle[connector] = _idle_share(fleet)
                    asyncio.run(costs[connector].measure(fleet.prefill.url, fleet.decode[0].url))
            for case in cases if number % 2 == 0 else reversed(cases):
                _say(f"round {number + 1}: {case.name}")
                fleet = fleets[case.connector]
                with fleet.awake(), _router(case, fleet, vllm_router, folder) as url:
                    _round(url, fleet, asks, right, seen[case.name])
        rates = {name: each.rates(_cache_bytes_per_token()) for name, each in costs.items()}
        predictions = []
        for case in cases:
            if case.like is not None:
                singles = [each.first_seconds for each in seen[case.name].singles]
                told = [each.first_seconds for each in seen[case.name].told]
                cost = rates[case.connector]
                found = predict(case.name, case.like, asks, cost, DECODE, singles, told)
                predictions.append(found)
        results = [_result(case.name, seen[case.name], len(asks) * rounds) for case in cases]
        return RealRun(results, predictions, rates, idle)


def _round(url: str, fleet: _Fleet, asks: Sequence[Ask], right: Sequence[str], seen: _Seen) -> None:
    asyncio.run(one_after_another(url, conversations(WARM_UP, seed=2)))
    seen.singles += asyncio.run(at_their_times(url, single_asks()))
    fleet.forget()
    before, shares = fleet.computed_tokens(), fleet.shares()
    told = asyncio.run(at_their_times(url, asks))
    _, others = shares.busy_and_others()
    tokens = sum(len(ask.tokens) for ask in asks)
    seen.prompt_tokens += tokens
    seen.hit_tokens += tokens - (fleet.computed_tokens() - before)
    seen.told += told
    seen.wrong += sum(each.text != text for each, text in zip(told, right, strict=True))
    seen.others.append(others)
    fleet.forget()
    seen.rush_seconds += asyncio.run(one_after_another(url, asks))


def _result(name: str, seen: _Seen, requests: int) -> RealResult:
    first = [told.first_seconds * 1e3 for told in seen.told]
    return RealResult(
        name,
        len(first),
        seen.prompt_tokens,
        seen.hit_tokens,
        statistics.median(first),
        percentile(first, 0.99),
        requests / seen.rush_seconds,
        seen.wrong,
        statistics.fmean(seen.others),
    )


def as_json(ran: RealRun) -> dict[str, Any]:
    predictions = [msgspec.to_builtins(p) | {"ratio": p.ratio} for p in ran.predictions]
    told: dict[str, Any] = msgspec.to_builtins(ran)
    return told | {"predictions": predictions}


def tables(ran: RealRun) -> Shown:
    routers = {
        "case": "{r.case}",
        "requests": "{r.requests}",
        "hit tokens": "{r.hit_tokens:,} of {r.prompt_tokens:,}",
        "first token p50 ms": "{r.p50_ms:.0f}",
        "p99 ms": "{r.p99_ms:.0f}",
        "requests a second": "{r.per_second:.2f}",
        "wrong": "{r.wrong}",
        "others": "{r.others:.0%}",
    }
    beside = {
        "case": "{r.case}",
        "measured": "{r.measured_ms:.0f}",
        "simulated": "{r.predicted_ms:.0f}",
        "router": "{r.router_ms:.0f}",
        "policy": "{r.policy}",
        "ratio": "{r.ratio:.2f}",
        "met": "{r.met}",
    }
    notes = []
    for connector, rates in ran.rates.items():
        share = f"idle engines take {ran.idle[connector] * 100:.0f} % of the processors"
        notes.append(f"{connector}: {share}; rates: {msgspec.json.encode(rates).decode()}")
    return [
        sheet("Routers", ran.results, routers),
        sheet("First token p50, ms", ran.predictions, beside),
    ], notes


async def _alone(url: str, asks: Sequence[Ask]) -> list[str]:
    async with StreamClient(url) as client:
        return [(await client.ask(ask.prompt)).text for ask in asks]


def _cache_bytes_per_token() -> int:
    config = llama_config(num_hidden_layers=LAYERS)
    heads: int = config["num_key_value_heads"] * config["head_dim"]
    return LAYERS * 2 * heads * 4  # fp32


def _say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def _idle_share(fleet: _Fleet) -> float:
    shares = fleet.shares()
    time.sleep(IDLE_SECONDS)
    busy, others = shares.busy_and_others()
    return busy - others


# Engines


class _Fleet:
    """One prefill engine, and some that decode."""

    def __init__(self, connector: str, model: Path, folder: Path) -> None:
        names = ["p", *(f"d{number + 1}" for number in range(DECODE))]
        self.engines = [_engine(connector, f"{connector}-{n}", model, folder) for n in names]
        self.prefill, *self.decode = self.engines

    def start(self) -> None:
        _say(f"starting {', '.join(engine.name for engine in self.engines)}")
        started(*self.engines)

    def kill(self) -> None:
        for engine in self.engines:
            engine.kill()

    @contextmanager
    def awake(self) -> Iterator[None]:
        with awake(self.engines):
            for engine in self.engines:
                engine.wait_ready(START_SECONDS)
            yield

    def shares(self) -> ProcessorShares:
        """Of the processors, from now on."""
        return ProcessorShares({os.getpgrp(), *(engine.pid for engine in self.engines)})

    def forget(self) -> None:
        """Empty all caches."""
        deadline = time.monotonic() + RESET_SECONDS
        for engine in self.engines:
            while not _forgets(engine):
                if time.monotonic() > deadline:
                    raise KvferryError(f"{engine.name} keeps blocks of requests that have ended")
                engine.complete([5], max_tokens=1)  # a step, in which it hears of ended transfers
                time.sleep(0.2)

    def computed_tokens(self) -> int:
        return round(sum(engine.metric(COMPUTED) for engine in self.engines))


def _forgets(engine: Engine) -> bool:
    status, told = post(f"{engine.url}/reset_prefix_cache")
    return status == 200 and bool(told["success"])


def _engine(connector: str, name: str, model: Path, folder: Path) -> Engine:
    made = Engine(name, model, folder / f"{name}.log", block_size=BLOCK_TOKENS, connector={})
    made.arguments = ["--max-num-batched-tokens", str(CHUNK_TOKENS)]
    made.arguments += ["--enable-prompt-tokens-details"]
    made.environment = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache
    if connector == NIXL:
        made.transfer = {"kv_connector": connector, "kv_buffer_device": "cpu"}
        made.transfer |= {"kv_connector_module_path": None}
        made.environment |= nixl_environment()
    return publish_events(made)


# Routers


@contextmanager
def _router(case: Case, fleet: _Fleet, program: Path | None, folder: Path) -> Iterator[str]:
    """The address of a router that serves."""
    if not case.theirs:
        more = [*case.arguments, *(f"--decode={engine.url}" for engine in fleet.decode[1:])]
        more += [f"--engine-events={events_of(engine)}" for engine in fleet.engines]
        pair: list[Any] = [fleet.prefill, fleet.decode[0]]
        ours = RouterProcess(pair, {}, None, more=more)
        try:
            yield f"http://127.0.0.1:{ours.port}"
        finally:
            ours.stop()
            (folder / "kvferry.log").write_text("".join(ours.log))
        return
    port, log = free_port(), folder / "vllm-router.log"
    command = [str(program), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    command += ["--port", str(port), "--prometheus-port", str(free_port()), *case.arguments]
    command += ["--prefill", fleet.prefill.url]
    command += [word for engine in fleet.decode for word in ("--decode", engine.url)]
    with open_log(log) as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            _wait_healthy(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def _wait_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/readiness", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise KvferryError(f"vllm-router did not start: {log.read_text(errors='replace')[-1000:]}")
