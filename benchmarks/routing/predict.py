# SPDX-License-Identifier: Apache-2.0
"""What `kvferry simulate` says of first tokens that were measured.

`Calibration` measures what one request costs on idle engines, as a client sees it: a prompt by its
tokens, a step by the streams that run, a hand-over by its tokens. What single requests through a
router take longer than that is the router's time. `predict` replays all requests through modelled
engines with these rates, and compares medians.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx
import msgspec
import numpy as np

from benchmarks.routing.conversations import (
    ANSWER_SECONDS,
    WORDS,
    Ask,
    StreamClient,
    as_trace,
)
from kvferry.errors import KvferryError
from kvferry.router.choice import Rate
from kvferry.simulate.engine import CopyCost, EngineRates, StepTime
from kvferry.simulate.run import FleetShape, Plan, Policy, simulate

MOST_OFF = 0.2
SIZES = (32, 128, 320, 640, 960, 1280)  # tokens of a prompt
EACH = 3  # requests of one size, each time
STREAMS = 4
SINGLES, SINGLE_TOKENS, SINGLE_SECONDS = 9, 320, 0.7
STREAM_TOKENS = 48
CACHE_BYTES = float(1 << 30)  # VLLM_CPU_KVCACHE_SPACE
CHUNK_TOKENS = 2048
MOST_ATTENTION_TOKENS = 1e9  # where attention costs too little to be seen
LEAST_TOKEN_SECONDS = 1e-9  # where a token costs too little to be seen, computed or loaded


@dataclass(frozen=True, slots=True)
class Prediction:
    case: str
    policy: Policy
    measured_ms: float  # median of first tokens
    predicted_ms: float
    router_ms: float  # that single requests took longer through the router than the engines did

    @property
    def ratio(self) -> float:
        return self.predicted_ms / self.measured_ms

    @property
    def met(self) -> bool:
        return abs(self.ratio - 1) <= MOST_OFF


def predict(
    case: str,
    policy: Policy,
    asks: Sequence[Ask],
    rates: EngineRates,
    decode: int,
    single_seconds: Sequence[float],
    measured_seconds: Sequence[float],
) -> Prediction:
    """`single_seconds`: first tokens of `single_asks`, one at a time, through the router."""
    shape = FleetShape(prefill=1, decode=decode)

    def median(asks: Sequence[Ask], rates: EngineRates) -> float:
        return simulate(as_trace(asks), Plan(policy, shape, rates)).first_token.p50

    router = max(0.0, statistics.median(single_seconds) - median(single_asks(), rates))
    predicted = median(asks, msgspec.structs.replace(rates, router_seconds=router))
    measured = statistics.median(measured_seconds)
    return Prediction(case, policy, measured * 1e3, predicted * 1e3, router * 1e3)


def single_asks() -> list[Ask]:
    """Prompts that share nothing, at times at which nothing else runs."""
    dice = random.Random(5)
    texts = (tuple(dice.choices(WORDS, k=SINGLE_TOKENS)) for _ in range(SINGLES))
    return [Ask(SINGLE_SECONDS * at, at, text) for at, text in enumerate(texts)]


class Calibration:
    """What one request costs on idle engines. Measured as often as wanted; medians count."""

    def __init__(self) -> None:
        self.computed: dict[int, list[float]] = {size: [] for size in SIZES}
        self.handed: dict[int, list[float]] = {size: [] for size in SIZES}
        self.steps: dict[int, list[float]] = {1: [], STREAMS: []}
        self._dice = random.Random(3)

    async def measure(self, prefill: str, decode: str) -> None:
        async with StreamClient(decode) as client:
            for size in SIZES:
                for again in range(EACH + 1):
                    computed = (await client.ask(self._text(size))).first_seconds
                    handed = await _handed_over(prefill, client, self._text(size))
                    if again:  # the first of a size pays for what happens only once
                        self.computed[size].append(computed)
                        self.handed[size].append(handed)
            for count, steps in self.steps.items():
                prompts = [self._text(SIZES[0]) for _ in range(count)]
                steps += [await _step_seconds(client, prompts) for _ in range(EACH)]

    def rates(self, bytes_per_token: int) -> EngineRates:
        one, many = (statistics.median(steps) for steps in self.steps.values())
        growth = max(0.0, (many - one) / (STREAMS - 1))
        fixed, each, square = _curve(self.computed, 2)
        each = max(each, LEAST_TOKEN_SECONDS)
        attention = each / (2 * square) if square > 0 else MOST_ATTENTION_TOKENS
        # The first token of a hand-over is the load, and a step.
        loads = {size: [s - one for s in seconds] for size, seconds in self.handed.items()}
        load_fixed, load_each = _curve(loads, 1)
        return EngineRates(
            bytes_per_token=bytes_per_token,
            cache_bytes=CACHE_BYTES,
            prefill=Rate(fixed, each, attention),
            step=StepTime(one - growth, growth),
            transfer=CopyCost(load_fixed, bytes_per_token / max(load_each, LEAST_TOKEN_SECONDS)),
            chunk_tokens=CHUNK_TOKENS,
            about="tiny engines, one request at a time, as a client sees them",
            command="python -m benchmarks.routing --part engines",
        )

    def _text(self, tokens: int) -> str:
        return " ".join(f"t{token}" for token in self._dice.choices(WORDS, k=tokens))


async def _step_seconds(client: StreamClient, prompts: Sequence[str]) -> float:
    """Between two tokens of streams that run together."""
    told = await asyncio.gather(*(client.ask(p, max_tokens=STREAM_TOKENS) for p in prompts))
    return statistics.median((t.seconds - t.first_seconds) / (STREAM_TOKENS - 1) for t in told)


async def _handed_over(prefill: str, decode: StreamClient, prompt: str) -> float:
    """The decode engine's first token, for a prompt that the other engine has computed."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    body |= {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    async with httpx.AsyncClient(timeout=ANSWER_SECONDS, trust_env=False) as http:
        answer = (await http.post(f"{prefill}/v1/completions", json=body)).json()
    ticket = answer.get("kv_transfer_params")
    if not ticket:
        raise KvferryError(f"the prefill engine gave no ticket: {answer}")
    return (await decode.ask(prompt, kv_transfer_params=ticket)).first_seconds


def _curve(seen: Mapping[int, Sequence[float]], degree: int) -> list[float]:
    """Seconds by size: a polynomial with no coefficient below 0, by relative error."""
    sizes = np.asarray(list(seen), dtype=np.float64)
    weights = 1 / np.asarray([statistics.median(seconds) for seconds in seen.values()])
    matrix = np.vander(sizes, degree + 1, increasing=True) * weights[:, None]
    while True:
        found, *_ = np.linalg.lstsq(matrix, np.ones(len(sizes)), rcond=None)
        negative = [at for at, value in enumerate(found) if value < -1e-12]
        if not negative:
            return [max(0.0, float(value)) for value in found]
        matrix[:, negative[-1]] = 0.0  # then its coefficient is 0
