# SPDX-License-Identifier: Apache-2.0
"""Conversations that share system prompts, and a client that streams their answers.

Prompts are text, because other routers compare prompts as text. The tiny models' tokenizer has one
token a word. A conversation's next prompt continues the one before. Requests come at fixed times,
whether or not earlier ones have been answered, so that all routers, and a simulation, get the same.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx

from kvferry.errors import KvferryError
from kvferry.simulate.trace import Trace, TraceRequest

BLOCK_TOKENS = 32  # the CPU build takes multiples of it
ANSWER_TOKENS = 8
SYSTEMS, SYSTEM_TOKENS = 2, 256
TURNS = 5
TURN_TOKENS = (60, 180)
PAUSE_SECONDS = 6.0  # between two turns of a conversation, on average
ANSWER_SECONDS = 120.0  # for one whole answer
WORDS = range(3, 500)  # of the tiny models


@dataclass(frozen=True, slots=True)
class Ask:
    seconds: float  # since the beginning
    conversation: int
    tokens: tuple[int, ...]

    @property
    def prompt(self) -> str:
        return " ".join(f"t{token}" for token in self.tokens)


@dataclass(frozen=True, slots=True)
class Told:
    """An answer, as the client saw it."""

    first_seconds: float  # until the first token
    seconds: float  # until the end
    text: str


def conversations(count: int, seed: int = 1) -> list[Ask]:
    """All requests of some conversations, in order of time."""
    dice = random.Random(seed)
    systems = [dice.choices(WORDS, k=SYSTEM_TOKENS) for _ in range(SYSTEMS)]
    asks = []
    for number in range(count):
        said, at = list(systems[number % SYSTEMS]), dice.uniform(0, PAUSE_SECONDS)
        for _ in range(TURNS):
            said = said + dice.choices(WORDS, k=dice.randint(*TURN_TOKENS))
            asks.append(Ask(at, number, tuple(said)))
            at += dice.uniform(0.5, 1.5) * PAUSE_SECONDS
    return sorted(asks, key=lambda ask: ask.seconds)


def as_trace(asks: Sequence[Ask]) -> Trace:
    """The same requests for `kvferry simulate`'s engines."""
    numbers: dict[tuple[int, ...], int] = {}  # of blocks, by all tokens up to their end

    def blocks(tokens: tuple[int, ...]) -> Iterator[int]:
        for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
            yield numbers.setdefault(tokens[:end], len(numbers))

    requests = (
        TraceRequest(ask.seconds, len(ask.tokens), ANSWER_TOKENS, tuple(blocks(ask.tokens)))
        for ask in asks
    )
    return Trace(tuple(requests), BLOCK_TOKENS)


class StreamClient:
    """Streams completions from one address."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, trust_env=False)

    async def __aenter__(self) -> StreamClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, prompt: str, **more: object) -> Told:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, **more}
        begun, first, text = time.perf_counter(), 0.0, []
        async with (
            asyncio.timeout(ANSWER_SECONDS),
            self._http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            if answer.status_code != 200:
                said = (await answer.aread())[:300]
                raise KvferryError(f"expected a stream, found {answer.status_code}: {said!r}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if not event.get("choices"):
                    raise KvferryError(f"the stream broke off: {line[:300]}")
                text.append(event["choices"][0]["text"])
                first = first or time.perf_counter() - begun
        return Told(first, time.perf_counter() - begun, "".join(text))


async def at_their_times(url: str, asks: Sequence[Ask]) -> list[Told]:
    """Ask each at its time. The answers are in the order of the requests."""
    async with StreamClient(url) as client, asyncio.TaskGroup() as group:
        begun, tasks = time.perf_counter(), []
        for ask in asks:
            await asyncio.sleep(max(0.0, begun + ask.seconds - time.perf_counter()))
            tasks.append(group.create_task(client.ask(ask.prompt)))
    return [task.result() for task in tasks]


async def one_after_another(url: str, asks: Sequence[Ask]) -> float:
    """Ask all conversations at once, each turn as soon as the one before is answered: seconds."""
    by_conversation: dict[int, list[Ask]] = {}
    for ask in asks:
        by_conversation.setdefault(ask.conversation, []).append(ask)
    begun = time.perf_counter()
    async with StreamClient(url) as client, asyncio.TaskGroup() as group:

        async def converse(turns: Sequence[Ask]) -> None:
            for turn in turns:
                await client.ask(turn.prompt)

        for turns in by_conversation.values():
            group.create_task(converse(turns))
    return time.perf_counter() - begun
