# SPDX-License-Identifier: Apache-2.0
"""A trace through a policy and modelled engines, and what came of it.

`cost` is the router's own `kvferry.router.choice.choose.place`. It sees the engines' caches as
their events would tell them, at once. The others are what routers do without such a view:

    round-robin   engines in turn
    least-loaded  the engine with the fewest requests
    prefix-hash   the engine that a hash of the prompt's first blocks names (rendezvous hashing, so
                  that few prompts move when engines come and go); the next one if it has more than
                  1.25 times the mean of requests (bounded loads)

In a fleet with prefill engines, these three always hand over, and choose both engines in their way.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Literal, get_args

from kvferry.errors import DescriptionError
from kvferry.router.choice.choose import DEFAULT, Weights, place
from kvferry.router.choice.model import Holding, PromptView, Role
from kvferry.simulate.engine import (
    BlockMap,
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
MOST_ENGINES = 256
PERCENTILES = (50, 90, 99)
_BOUNDED_LOAD = 1.25
_POINTS = 200  # of a distribution, for plots


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
        count = shape.both + shape.prefill + shape.decode
        if not shape.both + shape.decode or count > MOST_ENGINES:
            raise DescriptionError(
                f"a fleet has at least one engine that decodes, and {MOST_ENGINES} at most; "
                f"{text!r} has {shape.both + shape.decode} that decode, {count} in all"
            )
        return shape

    def roles(self) -> list[frozenset[Role]]:
        kinds: list[tuple[int, frozenset[Role]]] = [
            (self.both, frozenset(("prefill", "decode"))),
            (self.prefill, frozenset(("prefill",))),
            (self.decode, frozenset(("decode",))),
        ]
        return [roles for count, roles in kinds for _ in range(count)]

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
    seed: int = 1
    hash_blocks: int = 2  # of a prompt, that prefix-hash looks at
    first_token_seconds: float = 2.0  # of a good request, at most
    token_seconds: float = 0.05  # and for each later token, on average
    weights: Weights = DEFAULT


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
    engines: str
    requests: int
    refused: int  # larger than an engine's cache
    seconds: float  # from the first arrival to the last token
    offered_per_second: float
    tokens: int  # of all prompts that were served
    hit_tokens: dict[str, int]  # by source
    first_token: Percentiles
    token: Percentiles  # seconds for each token after the first, of requests
    gap: Percentiles  # seconds between two tokens, of tokens
    good_per_second: float
    good_share: float
    handed_over: int
    expected_error: float  # median of |expected - actual| / actual first token; nan: not expected
    uses: tuple[EngineUse, ...]
    first_tokens: tuple[float, ...]  # at equal shares, for plots
    real_seconds: float

    @property
    def hit_rate(self) -> float:
        cached = sum(count for source, count in self.hit_tokens.items() if source != "none")
        return cached / self.tokens if self.tokens else 0.0


def simulate(trace: Trace, plan: Plan) -> SimulationResult:
    """Run a whole trace."""
    return _Run(trace, plan).run()


class _Run:
    def __init__(self, trace: Trace, plan: Plan) -> None:
        self._trace, self._plan = trace, plan
        self._clock, self._gaps = VirtualClock(), Gaps()
        self._map = BlockMap()
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
        roles = plan.shape.roles()
        counts: Counter[str] = Counter()
        self._engines: list[ModelledEngine] = []
        for index, role in enumerate(roles):
            kind = "E" if len(role) == 2 else "P" if "prefill" in role else "D"
            counts[kind] += 1
            self._engines.append(
                ModelledEngine(
                    f"{kind}{counts[kind]}",
                    role,
                    rates,
                    trace.block_tokens,
                    PrefixCache(blocks, self._map, 1 << index),
                    self._pool,
                    self._clock,
                    self._gaps,
                    self._ended.append,
                )
            )
        self._by_name = {engine.name: engine for engine in self._engines}
        self._policy = _POLICIES[plan.policy](self)

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
        job = self._policy(request)
        job.decode.assigned += 1
        job.computed_on.submit(job)

    # Policies: from a request to a job

    def cost(self) -> Callable[[TraceRequest], SimulatedRequest]:
        random, by_name, weights = Random(self._plan.seed), self._by_name, self._plan.weights
        names = {1 << index: engine.name for index, engine in enumerate(self._engines)}
        block_tokens = self._trace.block_tokens

        def policy(request: TraceRequest) -> SimulatedRequest:
            holdings = [
                Holding(names[bit], count * block_tokens, "gpu")
                for bit, count in self._map.leading(request.blocks).items()
            ]
            if self._pool is not None and (count := self._pool.leading(request.blocks)):
                holdings.append(Holding("", count * block_tokens, "pool"))
            prompt = PromptView(request.tokens, tuple(holdings))
            decision = place(prompt, [e.view() for e in self._engines], random, weights=weights)
            assert decision is not None
            chosen = decision.chosen
            prefill = by_name[chosen.prefill] if chosen.prefill is not None else None
            return SimulatedRequest(request, by_name[chosen.decode], prefill, chosen.seconds)

        return policy

    def round_robin(self) -> Callable[[TraceRequest], SimulatedRequest]:
        turn = 0

        def policy(request: TraceRequest) -> SimulatedRequest:
            nonlocal turn
            turn += 1
            return self._job(request, lambda engines: engines[turn % len(engines)])

        return policy

    def least_loaded(self) -> Callable[[TraceRequest], SimulatedRequest]:
        random = Random(self._plan.seed)

        def pick(engines: list[ModelledEngine]) -> ModelledEngine:
            least = min(engine.load for engine in engines)
            return random.choice([engine for engine in engines if engine.load == least])

        return lambda request: self._job(request, pick)

    def prefix_hash(self) -> Callable[[TraceRequest], SimulatedRequest]:
        def policy(request: TraceRequest) -> SimulatedRequest:
            first = request.blocks[: self._plan.hash_blocks]

            def pick(engines: list[ModelledEngine]) -> ModelledEngine:
                most = _BOUNDED_LOAD * (sum(e.load for e in engines) + 1) / len(engines)
                ranked = sorted(engines, key=lambda engine: _rank(engine.name, first))
                return next((e for e in ranked if e.load + 1 <= math.ceil(most)), ranked[0])

            return self._job(request, pick)

        return policy

    def _job(
        self, request: TraceRequest, pick: Callable[[list[ModelledEngine]], ModelledEngine]
    ) -> SimulatedRequest:
        decode = pick([e for e in self._engines if "decode" in e.roles])
        only = [e for e in self._engines if "decode" not in e.roles]
        return SimulatedRequest(request, decode, pick(only) if only else None)

    def _result(self, real_seconds: float) -> SimulationResult:
        plan, trace = self._plan, self._trace
        served = [job for job in self._ended if not job.refused]
        if not served:
            raise DescriptionError(
                f"none of {len(self._ended)} requests fits into an engine's cache of "
                f"{self._engines[0].cache.most} blocks; give more blocks"
            )
        first = sorted(job.first_token - job.request.seconds for job in served)
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
        return SimulationResult(
            policy=plan.policy,
            engines=str(plan.shape),
            requests=len(self._ended),
            refused=len(self._ended) - len(served),
            seconds=seconds,
            offered_per_second=len(self._ended) / (trace.seconds or 1.0),
            tokens=sum(job.request.tokens for job in served),
            hit_tokens=dict(hits),
            first_token=Percentiles.of(first),
            token=Percentiles.of(later),
            gap=Percentiles(*(self._gaps.percentile(share / 100) for share in PERCENTILES)),
            good_per_second=good / (seconds or 1.0),
            good_share=good / len(self._ended),
            handed_over=sum(job.prefill is not None for job in served),
            expected_error=_percentile(errors, 0.5),
            uses=tuple(
                EngineUse(e.name, e.busy_seconds / (seconds or 1.0), decoded[e], e.computed_tokens)
                for e in self._engines
            ),
            first_tokens=tuple(_percentile(first, at / _POINTS) for at in range(_POINTS + 1)),
            real_seconds=real_seconds,
        )


_POLICIES: dict[Policy, Callable[[_Run], Callable[[TraceRequest], SimulatedRequest]]] = {
    "cost": _Run.cost,
    "round-robin": _Run.round_robin,
    "prefix-hash": _Run.prefix_hash,
    "least-loaded": _Run.least_loaded,
}


def _rank(engine: str, blocks: Sequence[int]) -> bytes:
    return hashlib.blake2b(f"{engine} {blocks}".encode(), digest_size=8).digest()


def _token_seconds(job: SimulatedRequest) -> float:
    return (job.ended - job.first_token) / (job.request.output_tokens - 1)


def _percentile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed; nan if there are none."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
