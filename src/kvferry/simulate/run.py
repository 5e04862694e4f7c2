# SPDX-License-Identifier: Apache-2.0
"""A trace through a policy and modelled engines, and what came of it.

`cost` is the router's own `kvferry.router.choice.place`. It sees the engines' caches as
their events would tell them, at once. The others are what routers do without such a view:

    round-robin   engines in turn
    least-loaded  the engine with the fewest requests
    prefix-hash   the engine that a hash of the prompt's first blocks names (rendezvous hashing);
                  the next one if it has more than 1.25 times the mean of requests (bounded loads)

In a fleet with prefill engines, these three always hand over, and choose both engines in their way.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from random import Random
from typing import Literal, get_args

from kvferry.errors import DescriptionError
from kvferry.router.choice import Holding, PromptView, Role, place
from kvferry.simulate.engine import (
    EngineRates,
    Gaps,
    ModelledEngine,
    ModelledPool,
    PrefixCache,
    SimulatedRequest,
    VirtualClock,
)
from kvferry.simulate.trace import Trace, TraceRequest

Policy = Literal["cost", "round-robin", "prefix-hash", "least-loaded"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
PERCENTILES = (50, 90, 99)
_BOUNDED_LOAD = 1.25
_HASHED_BLOCKS = 2  # of a prompt, that prefix-hash looks at


@dataclass(frozen=True, slots=True)
class FleetShape:
    """Engines by what they do: `8` all do both, `4P4D` are four of each."""

    both: int = 0
    prefill: int = 0
    decode: int = 0

    @classmethod
    def read(cls, text: str) -> FleetShape:
        if found := re.fullmatch(r"(\d+)P(\d+)D", text.strip().upper()):
            shape = cls(prefill=int(found[1]), decode=int(found[2]))
        elif re.fullmatch(r"\d+", text.strip()):
            shape = cls(both=int(text))
        else:
            raise DescriptionError(f"cannot read the engines {text!r}; write 8, or 4P4D")
        if not shape.both + shape.decode:
            raise DescriptionError(f"a fleet has an engine that decodes; {text!r} has none")
        return shape

    def roles(self) -> list[frozenset[Role]]:
        return [
            *[frozenset[Role](("prefill", "decode"))] * self.both,
            *[frozenset[Role](("prefill",))] * self.prefill,
            *[frozenset[Role](("decode",))] * self.decode,
        ]

    def __str__(self) -> str:
        return str(self.both) if self.both else f"{self.prefill}P{self.decode}D"


@dataclass(frozen=True, slots=True)
class Plan:
    """One simulation."""

    policy: Policy
    shape: FleetShape
    rates: EngineRates
    blocks: int | None = None  # of one engine's cache; None: as many as the rates say
    pool_blocks: int = 0  # 0: there is no pool
    speed: float = 1.0  # requests come so many times as fast as in the trace
    seed: int = 1
    first_token_seconds: float = 2.0  # of a good request, at most
    token_seconds: float = 0.05  # and for each later token, on average


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        ordered = sorted(values)
        return cls(*(_percentile(ordered, share / 100) for share in PERCENTILES))


@dataclass(frozen=True, slots=True)
class EngineUse:
    name: str
    busy_share: float
    requests: int  # that decoded there
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class SimulationResult:
    policy: Policy
    speed: float
    engines: str
    requests: int
    refused: int  # larger than an engine's cache
    seconds: float  # from the first arrival to the last token
    offered_per_second: float
    tokens: int  # of all prompts that were served
    hit_tokens: dict[str, int]  # by source
    hit_rate: float  # share of these tokens that were not computed
    first_token: Percentiles
    token: Percentiles  # seconds for each token after the first, of requests
    gap: Percentiles  # seconds between two tokens, of tokens
    good_per_second: float
    good_share: float
    handed_over: int
    expected_error: float | None  # median of |expected - actual| / actual first token
    uses: tuple[EngineUse, ...]
    real_seconds: float


def simulate(trace: Trace, plan: Plan) -> SimulationResult:
    """Run a whole trace."""
    return _Run(trace.faster(plan.speed), plan).run()


class _Run:
    def __init__(self, trace: Trace, plan: Plan) -> None:
        self._trace, self._plan = trace, plan
        self._clock, self._gaps = VirtualClock(), Gaps()
        self._ended: list[SimulatedRequest] = []
        rates = plan.rates
        blocks = plan.blocks
        if blocks is None:
            blocks = int(rates.cache_bytes / rates.bytes_per_token / trace.block_tokens)
        if blocks < 1:
            raise DescriptionError(f"an engine's cache needs at least one block, not {blocks}")
        if plan.pool_blocks and rates.pool is None:
            raise DescriptionError("a pool needs `pool` in the rates; there is none")
        self._pool = ModelledPool(plan.pool_blocks) if plan.pool_blocks else None
        self._random, self._turn = Random(plan.seed), 0
        self._engines: list[ModelledEngine] = []
        counts: Counter[str] = Counter()
        for roles in plan.shape.roles():
            kind = "E" if len(roles) == 2 else "P" if "prefill" in roles else "D"
            counts[kind] += 1
            self._engines.append(
                ModelledEngine(
                    f"{kind}{counts[kind]}",
                    roles,
                    rates,
                    trace.block_tokens,
                    PrefixCache(blocks),
                    self._pool,
                    self._clock,
                    self._gaps,
                    self._ended.append,
                )
            )

    def run(self) -> SimulationResult:
        begun = time.perf_counter()
        for request in self._trace.requests:
            at = request.seconds + self._plan.rates.router_seconds
            self._clock.at(at, partial(self._arrive, request))
        self._clock.run()
        if len(self._ended) != len(self._trace.requests):
            raise AssertionError("a request of the simulation did not end exactly once")
        return self._result(time.perf_counter() - begun)

    def _arrive(self, request: TraceRequest) -> None:
        job = self._by_cost(request) if self._plan.policy == "cost" else self._by_rule(request)
        job.decode.assigned += 1
        job.computed_on.submit(job)

    def _by_cost(self, request: TraceRequest) -> SimulatedRequest:
        size, engines = self._trace.block_tokens, self._engines
        holdings = [Holding(e.name, e.cache.leading(request.blocks) * size, "gpu") for e in engines]
        if self._pool is not None:
            holdings.append(Holding("", self._pool.leading(request.blocks) * size, "pool"))
        prompt = PromptView(request.tokens, tuple(holdings))
        decision = place(prompt, [engine.view() for engine in engines], self._random)
        assert decision is not None
        chosen, by_name = decision.chosen, {engine.name: engine for engine in engines}
        prefill = by_name[chosen.prefill] if chosen.prefill is not None else None
        return SimulatedRequest(request, by_name[chosen.decode], prefill, chosen.seconds)

    def _by_rule(self, request: TraceRequest) -> SimulatedRequest:
        self._turn += 1
        decode = self._pick(request, [e for e in self._engines if "decode" in e.roles])
        only = [e for e in self._engines if "decode" not in e.roles]
        return SimulatedRequest(request, decode, self._pick(request, only) if only else None)

    def _pick(self, request: TraceRequest, engines: list[ModelledEngine]) -> ModelledEngine:
        if self._plan.policy == "round-robin":
            return engines[self._turn % len(engines)]
        if self._plan.policy == "least-loaded":
            least = min(engine.load for engine in engines)
            return self._random.choice([engine for engine in engines if engine.load == least])
        first = request.blocks[:_HASHED_BLOCKS]
        most = _BOUNDED_LOAD * (sum(engine.load for engine in engines) + 1) / len(engines)
        ranked = sorted(
            engines, key=lambda e: blake2b(f"{e.name} {first}".encode(), digest_size=8).digest()
        )
        return next((e for e in ranked if e.load + 1 <= math.ceil(most)), ranked[0])

    def _result(self, real_seconds: float) -> SimulationResult:
        plan, trace = self._plan, self._trace
        served = [job for job in self._ended if not job.refused]
        if not served:
            raise DescriptionError(
                f"none of {len(self._ended)} requests fits into an engine's cache of "
                f"{self._engines[0].cache.most} blocks; give more blocks"
            )
        first = [job.first_token - job.request.seconds for job in served]
        later = [_token_seconds(job) for job in served if job.request.output_tokens > 1]
        good = sum(
            job.first_token - job.request.seconds <= plan.first_token_seconds
            and (job.request.output_tokens < 2 or _token_seconds(job) <= plan.token_seconds)
            for job in served
        )
        hits: Counter[str] = Counter({"local": 0, "handover": 0, "pool": 0, "none": 0})
        for job in served:
            hits[job.source] += job.cached_tokens
            hits["none"] += job.request.tokens - job.cached_tokens
        start = trace.requests[0].seconds
        seconds = max(job.ended for job in served) - start
        errors = sorted(
            abs(job.expected_seconds - actual) / actual
            for job in served
            if (actual := job.first_token - job.request.seconds - plan.rates.router_seconds) > 0
            and not math.isnan(job.expected_seconds)
        )
        decoded = Counter(job.decode for job in served)
        tokens = sum(job.request.tokens for job in served)
        return SimulationResult(
            policy=plan.policy,
            speed=plan.speed,
            engines=str(plan.shape),
            requests=len(self._ended),
            refused=len(self._ended) - len(served),
            seconds=seconds,
            offered_per_second=len(self._ended) / (trace.seconds or 1.0),
            tokens=tokens,
            hit_tokens=dict(hits),
            hit_rate=1 - hits["none"] / tokens,
            first_token=Percentiles.of(first),
            token=Percentiles.of(later),
            gap=Percentiles(*(self._gaps.percentile(share / 100) for share in PERCENTILES)),
            good_per_second=good / (seconds or 1.0),
            good_share=good / len(self._ended),
            handed_over=sum(job.prefill is not None for job in served),
            expected_error=_percentile(errors, 0.5) if errors else None,
            uses=tuple(
                EngineUse(e.name, e.busy_seconds / (seconds or 1.0), decoded[e], e.computed_tokens)
                for e in self._engines
            ),
            real_seconds=real_seconds,
        )


def _token_seconds(job: SimulatedRequest) -> float:
    return (job.ended - job.first_token) / (job.request.output_tokens - 1)


def _percentile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed; nan if there are none."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
