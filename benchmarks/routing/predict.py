# SPDX-License-Identifier: Apache-2.0
"""What `kvferry simulate` says of first tokens that were measured.

`calibrate` measures what one request costs on idle engines, as a client sees it: a prompt by its
tokens, a step by the streams that run, a hand-over by its tokens. `predict` replays the requests
through modelled engines with these rates, and compares medians.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import numpy as np

from benchmarks.routing.conversations import (
    ANSWER_SECONDS,
    WORDS,
    Ask,
    StreamClient,
    as_trace,
)
from kvferry.errors import KvferryError
from kvferry.simulate.engine import CopyCost, EngineRates, PrefillCost, StepTime
from kvferry.simulate.run import FleetShape, Plan, Policy, simulate

MOST_OFF = 0.2
SIZES = (32, 128, 320, 640, 960, 1280)  # tokens of a prompt
EACH = 5  # requests of one size, of which the median counts
STREAMS = 4
STREAM_TOKENS = 48
CACHE_BYTES = float(1 << 30)  # VLLM_CPU_KVCACHE_SPACE
CHUNK_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Prediction:
    case: str
    policy: Policy
    measured_ms: float  # median of first tokens
    predicted_ms: float

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
    measured_seconds: Sequence[float],
) -> Prediction:
    plan = Plan(policy, FleetShape(prefill=1, decode=decode), rates)
    predicted = simulate(as_trace(asks), plan).first_token.p50
    return Prediction(case, policy, statistics.median(measured_seconds) * 1e3, predicted * 1e3)


async def calibrate(prefill: str, decode: str, bytes_per_token: int) -> EngineRates:
    """What idle engines cost."""
    dice = random.Random(3)

    def text(tokens: int) -> str:
        return " ".join(f"t{token}" for token in dice.choices(WORDS, k=tokens))

    async with StreamClient(decode) as d:
        for size in SIZES:  # what happens only once
            await d.ask(text(size))
        by_tokens, handed = [], []
        for size in SIZES:
            firsts, loads = [], []
            for _ in range(EACH):
                firsts.append((await d.ask(text(size))).first_seconds)
                loads.append(await _handed_over(prefill, d, text(size)))
            by_tokens.append(statistics.median(firsts))
            handed.append(statistics.median(loads))
        one = await _step_seconds(d, [text(64)])
        many = await _step_seconds(d, [text(64) for _ in range(STREAMS)])
    growth = max(0.0, (many - one) / (STREAMS - 1))
    fixed, each, square = _curve(SIZES, by_tokens, 2)
    load_fixed, load_each = _curve(SIZES, [seconds - one for seconds in handed], 1)
    return EngineRates(
        bytes_per_token=bytes_per_token,
        cache_bytes=CACHE_BYTES,
        prefill=PrefillCost(fixed, each, each / (2 * square) if square > 0 else np.inf),
        step=StepTime(one - growth, growth),
        transfer=CopyCost(load_fixed, bytes_per_token / load_each),
        chunk_tokens=CHUNK_TOKENS,
        about="tiny engines, idle, as a client sees them",
        command="python -m benchmarks.routing --part engines",
    )


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


def _curve(sizes: Sequence[int], seconds: Sequence[float], degree: int) -> list[float]:
    """Coefficients of a polynomial with none below 0, the constant first; by relative error."""
    matrix = np.vander(np.asarray(sizes, float), degree + 1, increasing=True)
    weights = 1 / np.asarray(seconds)
    while True:
        found, *_ = np.linalg.lstsq(matrix * weights[:, None], np.ones(len(sizes)), rcond=None)
        negative = [at for at, value in enumerate(found) if value < 0]
        if not negative:
            return [float(value) for value in found]
        matrix[:, negative[-1]] = 0.0  # then its coefficient is 0
