# SPDX-License-Identifier: Apache-2.0
"""Where a request is served: expected seconds of every way, and the cheapest of them.

Pure functions, without a clock or I/O. The router and `kvferry simulate` run the same code.

`options` adds up, for every way to serve a request, the expected seconds to its first token (the
table in docs/routing.md). A prefix that another engine holds is used by prefilling there, so that
engine needs the prefill role: no other engine sends its cache away. Each option also carries the
seconds that other requests lose by it (`Option.harm_seconds`, weighed by `Weights`).

`choose` takes the option with the smallest sum of both. Sums that are nearly equal count as equal.
Of equal options, those with most cached tokens are kept, so that a conversation stays where its
cache is. Of these, two are drawn at random and the less loaded one is taken, so that two routers
that see the same figures do not send everything to one engine.

Records are msgspec's structs: dozens are made for each request, and a frozen dataclass takes eight
times as long to make. Engines are named by their URL.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from operator import attrgetter
from random import Random
from typing import Annotated, Literal

import msgspec

Role = Literal["prefill", "decode"]
Tier = Literal["gpu", "cpu", "pool"]  # medium of the event: GPU, CPU, STORAGE
# Where the cached tokens of an option are: at the engine that decodes, at the engine that prefills,
# in the pool; "none" if every token is computed.
Source = Literal["local", "handover", "pool", "none"]
PARTS = ("queue", "load", "prefill", "transfer", "decode")  # in the order in which they happen
# Where they are read from a file.
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class Rate(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Seconds by tokens: `fixed_seconds + token_seconds * work(tokens, cached)`."""

    fixed_seconds: NotNegative
    token_seconds: Positive
    # The context whose attention costs as much again as all the rest of a token does.
    attention_tokens: Positive = math.inf

    def work(self, tokens: int, cached: int = 0) -> float:
        """Tokens, plus what their attention to `cached` and to each other costs, in tokens."""
        return tokens + tokens * (2 * cached + tokens) / (2 * self.attention_tokens)

    def seconds(self, tokens: int, cached: int = 0) -> float:
        """For `tokens` that follow `cached` ones; 0 for none."""
        if tokens <= 0:
            return 0.0
        return self.fixed_seconds + self.token_seconds * self.work(tokens, cached)


class Holding(msgspec.Struct, frozen=True, gc=False):
    """Leading tokens of one prompt that an engine (or the pool) holds."""

    engine: str  # its URL; of the pool: ""
    tokens: int
    tier: Tier


class PromptView(msgspec.Struct, frozen=True):
    """One request, as known when it is placed."""

    tokens: int  # of the prompt
    holdings: tuple[Holding, ...] = ()
    may_hand_over: bool = True  # False: it must be computed where it is decoded
    output_tokens: int = 256  # that are expected; what the client allows is an upper bound


class EngineView(msgspec.Struct, frozen=True):
    """One engine, as known when a request is placed."""

    name: str
    roles: frozenset[Role]
    waiting_tokens: int  # prefill work (`Rate.work`) queued or under way there
    running: int  # requests that decode there, or are on their way to it
    prefill: Rate
    step_seconds: float  # of one decode step at its load
    up: bool = True  # and has room for a request
    free_blocks: float = 1.0  # share of its cache that no running request holds; 1.0: not known
    cache_tokens: int = 0  # that its cache holds; 0: not known
    waiting: int = 0  # requests that it has not let in
    step_growth_seconds: float = 0.0  # by which one more running request makes a step longer
    receive: Rate = Rate(0.0, 0.0)  # a hand-over to it, by tokens
    pool: Rate | None = None  # a load from the pool, by tokens; None: it reads no pool


class Option(msgspec.Struct, frozen=True):
    """One way to serve a request."""

    decode: str
    prefill: str | None  # None: computed where it is decoded
    seconds: float  # expected time to first token
    parts: dict[str, float]  # by PARTS; they add up to `seconds`
    cached_tokens: int
    source: Source
    harm_seconds: float = 0.0  # that other requests lose by it, weighted

    @property
    def cost(self) -> float:
        """The value by which options are compared."""
        return self.seconds + self.harm_seconds


class Decision(msgspec.Struct, frozen=True):
    chosen: Option
    options: tuple[Option, ...]  # the cheapest first; `chosen` is one of them
    why: str  # one plain sentence


# The choice

# Options of one request: alone on the best decode engines, and pairs of the best of both roles.
MOST_ALONE = 16
MOST_PREFILL = 6
MOST_DECODE = 8
# A request that was handed over joins D's batch after the step that runs, which is a chunk of
# prefill if D has any: vLLM's max_num_batched_tokens.
CHUNK_TOKENS = 8192
# So many requests wait on any busy engine for the step that runs. Only more of them are a queue.
WAIT_FOR_A_STEP = 4


@dataclass(frozen=True, slots=True)
class Weights:
    """The weight of each effect, relative to a second before this request's first token."""

    # Sums within this share of the best, or this many seconds, are equal: predictions are no
    # better. More spreads a conversation over engines, less makes herds.
    tie_share: float = 0.02
    tie_seconds: float = 0.005
    # A second in which a stream stands still, for each stream: people read more slowly than engines
    # write, so a short stop is hardly seen.
    stream: float = 0.05
    # A second of prefill, for each request behind it; one comes, whatever waits now.
    work: float = 1.0
    # A second that an answer takes longer.
    decode: float = 0.05


DEFAULT = Weights()


def place(
    prompt: PromptView,
    engines: Iterable[EngineView],
    random: Random,
    weights: Weights = DEFAULT,
) -> Decision | None:
    """The decision for one request; None if no decode engine can take it."""
    usable = [e for e in engines if e.up]
    found = options(prompt, usable, weights)
    return choose(found, usable, random, weights) if found else None


def options(
    prompt: PromptView, engines: Sequence[EngineView], weights: Weights = DEFAULT
) -> list[Option]:
    """The ways to serve a request, the cheapest first; 64 at most."""
    costs = _Costs(prompt, engines, weights)
    decode = [costs.of(e) for e in engines if "decode" in e.roles]
    prefill = []
    if prompt.may_hand_over:
        prefill = [costs.of(e) for e in engines if "prefill" in e.roles]
    best = nsmallest(MOST_DECODE, decode, _of_decode)
    pairs = [
        costs.option(p, d)
        for p in nsmallest(MOST_PREFILL, prefill, _of_prefill)
        for d in best
        if p.engine is not d.engine
    ]
    alone = nsmallest(MOST_ALONE, map(costs.option, decode, decode), _cost)
    return sorted([*alone, *pairs], key=_cost)


def choose(
    options: Sequence[Option],
    engines: Iterable[EngineView],
    random: Random,
    weights: Weights = DEFAULT,
) -> Decision:
    """The cheapest of some options, which come cheapest first."""
    limit = options[0].cost + max(weights.tie_seconds, weights.tie_share * options[0].cost)
    equal = [option for option in options if option.cost <= limit]
    most = max(option.cached_tokens for option in equal)
    equal = [option for option in equal if option.cached_tokens == most]
    chosen = equal[0]
    if len(equal) > 1:
        load = {e.name: _load(e) for e in engines}
        drawn = random.sample(equal, 2)  # in random order
        chosen = min(drawn, key=lambda o: load[o.decode] + (load[o.prefill] if o.prefill else 0.0))
    return Decision(chosen, tuple(options), reason(chosen, options))


# The costs of one option


class _EngineCost(msgspec.Struct, gc=False):
    """The part of one engine in the cost of any option that uses it."""

    engine: EngineView
    load: float  # of what the pool has of the prompt
    prefill: float  # of the rest
    cached: int
    source: Source
    queue: float  # until it begins with this prompt: its prefills are over, and there are blocks
    entry: float  # until a computed prompt can enter: a step is over, and there are blocks
    transfer: float  # of what it does not hold
    prefill_harm: float
    decode_harm: float


class _Costs:
    """The costs of one request on any of these engines."""

    def __init__(self, prompt: PromptView, engines: Sequence[EngineView], weights: Weights) -> None:
        self._tokens, self._output = prompt.tokens, prompt.output_tokens
        self._weights = weights
        self._waiting = sum([e.waiting for e in engines]) / max(1, len(engines))
        self._held: dict[str, int] = {}  # leading tokens, by engine
        self._cpu: dict[str, int] = {}
        self._pool = 0
        most = max(0, prompt.tokens - 1)  # the last token is computed in any case
        for holding in prompt.holdings:
            tokens = min(holding.tokens, most)
            if holding.tier == "pool":
                self._pool = max(self._pool, tokens)
            else:
                tier = self._held if holding.tier == "gpu" else self._cpu
                tier[holding.engine] = max(tokens, tier.get(holding.engine, 0))

    def option(self, p: _EngineCost, d: _EngineCost) -> Option:
        """Computed on P, decoded on D, which may be the same."""
        alone = p is d
        parts = {
            "queue": d.queue if alone else p.queue + d.entry,
            "load": p.load,
            "prefill": p.prefill,
            "transfer": 0.0 if alone else d.transfer,
            "decode": d.engine.step_seconds,
        }
        prefill = None if alone else p.engine.name
        source: Source = "handover" if prefill and p.source == "local" else p.source
        seconds, harm = sum(parts.values()), p.prefill_harm + d.decode_harm
        return Option(d.engine.name, prefill, seconds, parts, p.cached, source, harm)

    def of(self, engine: EngineView) -> _EngineCost:
        """From the engine's own cache, or with a load if that is faster."""
        tokens, prefill, weights = self._tokens, engine.prefill, self._weights
        local = self._held.get(engine.name, 0)
        load, seconds, cached = 0.0, prefill.seconds(tokens - local, local), local
        source: Source = "local" if local else "none"
        pooled = self._cpu.get(engine.name, 0)
        if engine.pool is not None:
            pooled = max(pooled, self._pool)
        if pooled > local:
            more = engine.pool.seconds(pooled - local) if engine.pool is not None else 0.0
            rest = prefill.seconds(tokens - pooled, pooled)
            if more + rest < seconds:
                load, seconds, cached, source = more, rest, pooled, "pool"
        room, waiting = self._room(engine), engine.waiting_tokens
        # The fixed part is mostly a step that the streams take as well, and HTTP.
        work = max(0.0, seconds - prefill.fixed_seconds)
        behind = engine.waiting if engine.waiting > WAIT_FOR_A_STEP else self._waiting
        step = engine.step_seconds + engine.running * engine.step_growth_seconds
        return _EngineCost(
            engine,
            load,
            seconds,
            cached,
            source,
            max(waiting * prefill.token_seconds, room),
            max(min(waiting, CHUNK_TOKENS) * prefill.token_seconds, room),
            engine.receive.seconds(tokens - local),
            work * (weights.work * (1 + behind) + weights.stream * engine.running),
            weights.decode * self._output * step,
        )

    def _room(self, engine: EngineView) -> float:
        """Until there are blocks: running requests free theirs over the time of an answer.

        Requests that wait already are taken to be as large as those that run.
        """
        free = engine.free_blocks * engine.cache_tokens
        used = engine.cache_tokens - free
        ahead = engine.waiting * used / max(1, engine.running)
        missing = self._tokens + self._output + ahead - free
        if missing <= 0 or used <= 0:
            return 0.0
        return missing / used * self._output * engine.step_seconds


def _of_prefill(p: _EngineCost) -> float:
    """The part of P in the cost of any pair."""
    return p.queue + p.load + p.prefill + p.prefill_harm


def _of_decode(d: _EngineCost) -> float:
    """The part of D in the cost of any pair."""
    return d.entry + d.transfer + d.engine.step_seconds + d.decode_harm


_cost = attrgetter("cost")


def _load(engine: EngineView) -> float:
    """How loaded an engine is, for ties alone."""
    prefills = engine.waiting_tokens * engine.prefill.token_seconds
    return prefills + (engine.running + engine.waiting) * engine.step_seconds


# The sentence


def reason(chosen: Option, options: Sequence[Option]) -> str:
    """Why this option, in words that an operator reads at night."""
    if chosen.cached_tokens:
        where = {"local": "there", "handover": f"on {chosen.prefill}", "pool": "in the pool"}
        held = f"{chosen.cached_tokens} tokens are cached {where[chosen.source]}"
    else:
        held = "no engine that is free enough holds a part of it"
        if all(option.cached_tokens == 0 for option in options):
            held = "nothing of it is cached"
    soon = f"first token in {chosen.seconds * 1000:.0f} ms"
    if chosen.prefill is None:
        text = f"{soon} if {chosen.decode} computes it"
        other = next((o for o in options if o.prefill is not None), None)
        instead = "with a hand-over"
    else:
        text = f"{soon} if {chosen.prefill} hands it over to {chosen.decode}"
        other = next((o for o in options if o.prefill is None), None)
        instead = "if it is computed where it is decoded"
    if other is not None:
        text += f", in {other.seconds * 1000:.0f} ms {instead}"
        if other.seconds < chosen.seconds:
            text += ", at the cost of other requests"
    return f"{text}; {held}"
