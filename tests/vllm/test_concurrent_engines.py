"""Many clients at once before real engines with few blocks, and a fifth of the clients goes away.

300 requests, 32 at a time, come through the router to a prefill and a decode engine of other
blocks. 40 prompts share prefixes and repeat. Prompts are prefilled in chunks, and all that is in
flight needs several times the blocks that there are. Every token that comes is that of an engine
alone, and when all is over nothing is left on the engines or in the router.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

import httpx

from router_process import RouterProcess
from tiny_models import llama_config, make_model
from vllm_engines import Engine
from vllm_pairs import USAGE, ids, prompt, reaches, settled, started

pytestmark = pytest.mark.matrix
REQUESTS, AT_ONCE, TOKENS = 300, 32, 6
LONG = 60  # tokens that leaving clients ask for
FEW_BLOCKS = {"p": (32, 100), "d": (64, 24)}  # block size and blocks; one of them is vLLM's null
CHUNK = 96  # tokens a step; most prompts are longer
SECONDS = 240.0  # for all requests


class Client(NamedTuple):
    tokens: list[int]
    streams: bool
    leaves: str = ""  # "": stays; else "early" or "in the middle"


Engines = tuple[Engine, Engine, dict[tuple[int, ...], list[int]]]  # and the right answers


class Seen(NamedTuple):
    client: Client
    ids: list[int]
    ended: bool
    seconds: float


def prompts() -> list[list[int]]:
    """40 of 40 to 200 tokens: eight beginnings of 33 to 152 tokens, five ends to each."""
    return [
        prompt(family, 33 + 17 * family) + prompt(100 + 5 * family + end, 7 + 10 * end)
        for family in range(8)
        for end in range(5)
    ]


def clients(seed: int) -> list[Client]:
    dice, asked = random.Random(seed), prompts()
    made = []
    for number in range(REQUESTS):
        leaves = ("early", "in the middle")[number // 5 % 2] if number % 5 == 4 else ""
        streams = leaves == "in the middle" or dice.random() < 0.5
        made.append(Client(dice.choice(asked), streams, leaves))
    return made


class Crowd:
    """The clients of one run. Those that leave early do so at any moment of a usual request."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/completions"
        self._took = [1.0]
        self._dice = random.Random(7)

    async def ask_all(self, asking: list[Client]) -> list[Seen]:
        turns = asyncio.Semaphore(AT_ONCE)
        limits = httpx.Limits(max_connections=None)

        async def one(client: Client) -> Seen:
            async with turns:
                return await self._ask(http, client)

        async with httpx.AsyncClient(timeout=SECONDS, limits=limits) as http:
            async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(client)) for client in asking]
            return [task.result() for task in tasks]

    async def _ask(self, http: httpx.AsyncClient, client: Client) -> Seen:
        begun, got = time.monotonic(), list[int]()
        share = self._dice.random() * statistics.median(self._took)
        try:
            async with asyncio.timeout(share if client.leaves == "early" else None):
                ended = await self._answer(http, client, got)
        except TimeoutError:
            ended = False
        seconds = time.monotonic() - begun
        if ended:
            self._took.append(seconds)
        return Seen(client, got, ended, seconds)

    async def _answer(self, http: httpx.AsyncClient, client: Client, got: list[int]) -> bool:
        """Gather tokens; whether the answer came to its end."""
        body = {
            "model": "tiny",
            "prompt": client.tokens,
            "max_tokens": LONG if client.leaves else TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": client.streams,
        }
        async with http.stream("POST", self._url, json=body) as answer:
            if not client.streams or answer.status_code != 200:
                said = await answer.aread()
                assert answer.status_code == 200, said
                got += json.loads(said)["choices"][0]["token_ids"]
                return True
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return True
                if line.startswith("data: "):
                    got += json.loads(line[6:])["choices"][0]["token_ids"]
                    if client.leaves == "in the middle":
                        return False
        raise AssertionError("the stream broke off")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("concurrent")
    make_model(folder / "tiny", llama_config(num_hidden_layers=2))
    return folder


def made(folder: Path, name: str) -> Engine:
    """Its policy for failed loads is the one that a user gets."""
    block, blocks = FEW_BLOCKS[name]
    engine = Engine(name, folder / "tiny", folder / f"{name}.log", block_size=block)
    engine.connector = {"lease_seconds": 15.0, "load_seconds": 60.0}
    engine.transfer = {"kv_load_failure_policy": "recompute"}
    engine.arguments = ["--num-gpu-blocks-override", str(blocks), "--max-model-len", "512"]
    engine.arguments += ["--max-num-batched-tokens", str(CHUNK), "--enable-chunked-prefill"]
    return engine


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[Engines]:
    alone = Engine("alone", folder / "tiny", folder / "alone.log")
    _, p, d = started(alone, made(folder, "p"), made(folder, "d"))
    with p, d:
        with alone:
            answers = [ids(alone.complete(t, max_tokens=TOKENS))[0] for t in prompts()]
        assert len(set(map(tuple, answers))) == len(answers)  # or a mix-up would not show
        yield p, d, dict(zip(map(tuple, prompts()), answers, strict=True))


def nothing_left(engine: Engine) -> None:
    assert settled(engine), engine.metric(USAGE)
    levels = ["holds_open", "held_blocks", "claims_parked", "loads_abandoned", "blocks_quarantined"]
    names = [f"vllm:kvferry_{level}" for level in levels]
    for name in [*names, "vllm:num_requests_running", "vllm:num_requests_waiting", USAGE]:
        assert reaches(lambda: engine.metric(name), 0), f"{engine.name} {name}"  # noqa: B023


def nothing_left_in(router: RouterProcess) -> None:
    def metric(name: str) -> float:
        text = httpx.get(f"http://127.0.0.1:{router.port}/metrics", timeout=10).text
        found = [x for x in text.splitlines() if x.startswith(f"kvferry_router_{name}")]
        assert found, text
        return sum(float(x.rsplit(" ", 1)[1]) for x in found)

    for name in ("in_flight", "waiting", "engine_in_flight", "held_bytes"):
        assert reaches(lambda: metric(name), 0), name  # noqa: B023


@pytest.mark.parametrize("seed", [1, 2])
def test_no_wrong_token_and_nothing_left(engines: Engines, seed: int) -> None:
    p, d, right = engines
    counted = {
        "loads": (d, "vllm:kvferry_loads_total"),
        "computed on d": (d, "vllm:kvferry_requests_computed_here_total"),
        "tokens that p had": (p, "vllm:prefix_cache_hits_total"),
        "tokens that d had": (d, "vllm:prefix_cache_hits_total"),
        "preempted on d": (d, "vllm:num_preemptions_total"),
        "holds expired": (p, "vllm:kvferry_holds_closed_total", "expired"),
        "failed": (d, "vllm:kvferry_load_failures_total"),
        "cancelled": (d, "vllm:kvferry_load_failures_total", "Cancelled"),
    }
    before = {what: count(*which) for what, which in counted.items()}
    # By load, every prompt is handed over; by cost, an idle decode engine computes it itself.
    router = RouterProcess([p, d], {}, None, more=["--place", "load"])
    try:
        begun = time.monotonic()
        crowd = Crowd(f"http://127.0.0.1:{router.port}")
        seen = asyncio.run(crowd.ask_all(clients(seed)))
        took = time.monotonic() - begun
        nothing_left_in(router)
    finally:
        router.stop()
    for client, got, ended, _ in seen:
        assert got[:TOKENS] == right[tuple(client.tokens)][: len(got)], client
        # Who leaves early may have the answer by then.
        assert client.leaves == "early" or ended != bool(client.leaves), client
        assert client.leaves or len(got) == TOKENS, client
    nothing_left(p)
    nothing_left(d)
    now = {what: int(count(*which) - before[what]) for what, which in counted.items()}
    waits = [x.seconds for x in seen if not x.client.leaves]
    middle, longest = statistics.median(waits), max(waits)
    print(f"{len(seen)} in {took:.0f} s, median {middle:.2f} s, longest {longest:.2f} s: {now}")
    assert len(seen) - len(waits) == REQUESTS // 5
    assert now["loads"] > REQUESTS // 4  # the others met full holds: d computed them
    assert now["tokens that p had"] > 0 < now["tokens that d had"]
    assert now["failed"] == now["cancelled"]


def count(engine: Engine, name: str, reason: str = "") -> float:
    """A metric of an engine, of one reason where one is given."""
    lines = httpx.get(f"{engine.url}/metrics", timeout=10).text.splitlines()
    asked = [x for x in lines if x.startswith(name) and (not reason or f'"{reason}"' in x)]
    return sum(float(x.rsplit(" ", 1)[1]) for x in asked)
