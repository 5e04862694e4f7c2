"""The router's view of caches beside real vLLM: its publisher, its block pool, its tokenizer."""

from __future__ import annotations

import asyncio
import json
import math
import os
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="this tier runs in the environment with vLLM")

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

from kvferry.router.api import Generation
from kvferry.router.cache.events import EventSource, EventStreams
from kvferry.router.cache.index import CacheIndex, Namespace, PromptChain
from kvferry.router.cache.prompts import (
    CHAT,
    COMPLETION,
    AskedPrompt,
    LocalTokenizer,
    PromptChains,
    _TokenSource,
)
from kvferry.router.fleet.connections import EngineTransport
from tiny_models import TINY, llama_config, make_model
from vllm_engines import ENVIRONMENT, Engine
from waiting import PATIENCE_SECONDS

TOLD_ENGINE = Path(__file__).parents[1] / "support" / "told_engine.py"
SECONDS = 300.0


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "gemma3",
        *(pytest.param(k, marks=pytest.mark.matrix) for k in ("gpt-oss", "qwen3-next", "mistral")),
    ],
)
def test_the_index_says_what_the_block_pool_holds(kind: str, tmp_path: Path) -> None:
    """Shared prefixes, equal prompts at once, salts, evictions, a reset, a router that comes late:
    the assertions are in `told_engine`."""
    model = make_model(tmp_path / "model", TINY.get(kind, llama_config()))
    done = subprocess.run(
        [sys.executable, str(TOLD_ENGINE), str(model), kind, str(tmp_path)],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=SECONDS,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SUMMARY ")]
    summary = json.loads(line.removeprefix("SUMMARY "))
    assert summary["rounds"] == 14 and summary["hits"] > 50 and summary["evicted"] > 20, summary
    kinds = {
        "llama": ["full_attention"],
        "mistral": ["sliding_window"],
        "qwen3-next": ["full_attention", "mamba"],
    }
    assert summary["kinds"] == kinds.get(kind, ["full_attention", "sliding_window"])


def test_vllms_publisher(tmp_path: Path) -> None:
    """Its frames, its replay, its buffer's end, and another one at the same address."""
    source = EventSource(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    index = CacheIndex()
    part = index.part("engine")

    def publisher() -> ZmqEventPublisher:
        return ZmqEventPublisher(0, source.events, source.replay, buffer_steps=5)

    def stored(number: int) -> BlockStored:
        return BlockStored(
            block_hashes=[number],
            parent_block_hash=None,
            token_ids=[number] * 16,
            block_size=16,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )

    def held(number: int) -> int:
        found = index.holdings(PromptChain(Namespace(), [*[number] * 16, 1]))
        return sum(holding.tokens for holding in found)

    async def until(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while part.replaying or not condition():
                await asyncio.sleep(0.01)

    async def inside() -> None:
        first = publisher()
        for number in range(3):
            first.publish(KVEventBatch(ts=0.0, events=[stored(number)]))
        stream = EventStreams(index, "engine", source)
        task = asyncio.create_task(stream.run())
        try:
            await until(lambda: part.state == "live" and held(2))
            removed = BlockRemoved(block_hashes=[1], medium="GPU", group_idx=0)
            first.publish(KVEventBatch(ts=0.0, events=[removed, stored(3)]))
            await until(lambda: held(3))
            assert [held(number) for number in range(4)] == [16, 0, 16, 16]
            first.publish(KVEventBatch(ts=0.0, events=[AllBlocksCleared()]))
            await until(lambda: not held(3))
            first.publish(KVEventBatch(ts=0.0, events=[stored(4)]))
            await until(lambda: held(4))
            await asyncio.to_thread(first.shutdown)
            second = publisher()
            try:
                await until(lambda: not held(4) and part.state == "live")
                for number in range(10, 20):
                    second.publish(KVEventBatch(ts=0.0, events=[stored(number)]))
                await until(lambda: held(19))
                assert held(10) and part.state == "live" and part.lost_events == 0
                # a router that comes now gets what is left of the buffer
                other_index = CacheIndex()
                late = other_index.part("engine")
                other = asyncio.create_task(EventStreams(other_index, "engine", source).run())
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while late.replaying or late.known < 5:
                        await asyncio.sleep(0.01)
                assert late.state == "lost" and late.known == 5
                other.cancel()
                await asyncio.wait({other})
            finally:
                await asyncio.to_thread(second.shutdown)
        finally:
            task.cancel()
            await asyncio.wait({task})

    asyncio.run(inside())


def test_prompts_are_tokenized_as_the_engine_does(tmp_path: Path) -> None:
    """What the router expects an engine to have cached is what the engine reports."""
    model = make_model(tmp_path / "model")
    source = EventSource(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": source.events,
        "replay_endpoint": source.replay,
    }
    arguments = ["--kv-events-config", json.dumps(events), "--enable-prompt-tokens-details"]
    arguments += ["--enable-scale-out"]  # for /render
    with Engine("told", model, tmp_path / "log", block_size=32, arguments=arguments) as engine:
        engine.start().wait_ready()
        asyncio.run(_ask_and_compare(engine, model, source))


async def _chain(
    prompts: PromptChains, url: str, path: str, fields: dict[str, Any]
) -> PromptChain | None:
    found = prompts.at_once(url, path, fields)
    return await prompts.chain(url, found, []) if isinstance(found, AskedPrompt) else found


async def _ask_and_compare(engine: Engine, model: Path, source: EventSource) -> None:
    words = [" ".join(f"t{(7 * n + seed) % 500 + 3}" for n in range(150)) for seed in range(3)]
    system = {"role": "system", "content": words[0]}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    tools = {"tools": [tool], "tool_choice": "none", "chat_template_kwargs": {"x": 1}}
    turns = [system, {"role": "user", "content": words[1]}]
    asked: list[tuple[str, dict[str, Any]]] = [
        (COMPLETION, {"prompt": words[0]}),
        (COMPLETION, {"prompt": list(range(10, 200))}),
        (COMPLETION, {"prompt": f"{words[0]} {words[2]}", "add_special_tokens": False}),
        (CHAT, {"messages": turns}),
        (CHAT, {"messages": turns, **tools}),
        (CHAT, {"messages": [*turns, {"role": "user", "content": words[2]}]}),
        (CHAT, {"messages": turns, "cache_salt": "secret"}),
        (CHAT, {"messages": turns, "add_generation_prompt": False, "reasoning_effort": "low"}),
    ]
    index = CacheIndex()
    part = index.part(engine.url)
    stream = EventStreams(index, engine.url, source)
    task = asyncio.create_task(stream.run())
    client = httpx.AsyncClient(trust_env=False, timeout=SECONDS)
    transport = EngineTransport(ssl.create_default_context(), 2.0, 1.0)
    rendered = PromptChains(transport, seconds=PATIENCE_SECONDS)
    tokenized = PromptChains(transport, seconds=PATIENCE_SECONDS)
    tokenized._engines[engine.url] = _TokenSource(engine.url, render_at=math.inf)
    local = PromptChains(transport, seconds=PATIENCE_SECONDS, tokenizer=LocalTokenizer(model))
    ways = (rendered, tokenized, local)
    cached = 0
    try:
        for path, body in [*asked, *asked]:
            body = {"model": "tiny", "temperature": 0, "max_tokens": 4, **body}
            fields = Generation(json.dumps(body).encode()).fields
            chains = [await _chain(p, engine.url, path, fields) for p in ways]
            chain = chains[0]
            assert chain is not None, (path, rendered.counts)
            for other in chains[1:]:
                assert other is not None and other.digests(1) == chain.digests(1), (path, body)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while part.state != "live":
                    await asyncio.sleep(0.01)
            expected = max((h.tokens for h in index.holdings(chain)), default=0)
            before = stream.applied
            answer = await client.post(engine.url + path, json=body)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            assert usage["prompt_tokens"] == chain.tokens
            assert (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0) == expected
            cached += expected
            if chain.tokens - expected >= 32:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while stream.applied == before:
                        await asyncio.sleep(0.01)
                    await asyncio.sleep(0.2)  # for what the last tokens fill
        assert cached > 1000
        assert rendered.counts["asked"] == len(asked) - 1 and rendered.counts["remembered"] >= 7
    finally:
        for prompts in ways:
            prompts.close()
        transport.close()
        await client.aclose()
        task.cancel()
        await asyncio.wait({task})
