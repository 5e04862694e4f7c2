# SPDX-License-Identifier: Apache-2.0
"""Where each request goes: the view of caches, the costs of engines, the choice, its outcome.

`Placer` belongs to one router. It follows the engines' events into the index, asks engines for
their metrics, and hears of engines that come and go. `RequestWay` is one request's part of it.

Without tokens there is no choice to make: the caller takes the engine with the fewest requests. The
same is true of a router that was told to place by load alone.

What an engine held is forgotten at once when it was started again (`UpstreamEngine.restarted`), or
its events tell that another process publishes (`cache.events`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Mapping, Set
from random import Random

from prometheus_client import CollectorRegistry, Histogram

from kvferry.router.api import EngineSpec, Generation, Headers, RouterConfig
from kvferry.router.cache.events import EventSource, EventStreams
from kvferry.router.cache.index import CacheIndex, PromptChain
from kvferry.router.cache.prompts import AskedPrompt, LocalTokenizer, PromptChains
from kvferry.router.choice import Decision, EngineView, Holding, PromptView, Role, place
from kvferry.router.fleet.connections import BrokenAnswer, NoConnection, address_of_url
from kvferry.router.fleet.engines import ChangeKind, Fleet, UpstreamEngine
from kvferry.router.rates import (
    EngineMeter,
    EngineMetrics,
    FleetMeter,
    PrefillVisit,
    StreamVisit,
)

log = logging.getLogger(__name__)

SOURCES = ("local", "handover", "pool", "none")
CHOICES = (
    "alone",  # computed where it is decoded
    "handed_over",
    "by_load",  # without tokens: the engine with the fewest requests
)
_REGRET_BUCKETS = (-1, -0.1, -0.01, 0, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_MOST_REQUESTS = 1_000_000  # at one engine, whatever its metrics say
_METRICS_BYTES = 8 << 20  # of an engine's answer; vLLM's has about 100 KB
# Name, labels and value of the samples that count. The pattern begins with fixed bytes, so that
# other lines, which are hundreds, are passed over in C: else no stream would move for 0.5 ms.
_SAMPLE = re.compile(
    rb"\nvllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|cache_config_info)"
    rb"(?:\{(.*)\})? ([0-9.eE+-]+)(?![^\n])"
)
_LABEL = re.compile(rb'(num_gpu_blocks|block_size)="(\d{1,12})"')
# Of a prompt whose tokens are not known, until it counts as computed.
_GUESSED_SECONDS = 1.0
_CACHED = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,9})')


class Placer:
    """The view, the rates and the choice of one router."""

    def __init__(self, fleet: Fleet, config: RouterConfig, registry: CollectorRegistry) -> None:
        """Raises DescriptionError if there is no tokenizer where one was named."""
        self.by_cost = config.place == "cost"
        self.index = CacheIndex(config.limits.max_index_blocks)
        self.meters = FleetMeter()
        self.hit_tokens = Counter(dict.fromkeys(SOURCES, 0))  # of prompts, by where they came from
        self.choices = Counter(dict.fromkeys(CHOICES, 0))
        self.regret = Histogram(
            "kvferry_router_regret_seconds",
            "First byte of streams, less the least that any choice was expected to take.",
            registry=registry,
            buckets=_REGRET_BUCKETS,
        )
        tokenizer = LocalTokenizer(config.tokenizer) if config.tokenizer is not None else None
        self.prompts = PromptChains(
            fleet.transport, tokenizer=tokenizer, seconds=config.limits.tokenize_seconds
        )
        self._fleet, self._limits = fleet, config.limits
        self.random = Random()
        self._followers: dict[str, EventStreams] = {}
        self._running = False
        fleet.changed = self._changed

    async def run(self) -> None:
        """Follow events and metrics until cancelled."""
        if not self.by_cost:
            return
        self._running = True
        for engine in self._fleet.engines:
            self._follow(engine.spec)
        try:
            await self._poll_metrics()
        finally:
            self._running = False
            ending = [streams.stop() for streams in self._followers.values()]
            await asyncio.gather(*ending, return_exceptions=True)
            self.prompts.close()

    async def look(self, path: str, headers: Headers, wanted: Generation) -> RequestWay:
        """One request's placement, with its tokens if these are to be had."""
        chain: PromptChain | None = None
        if self.by_cost and (asked := self._any_engine()) is not None:
            found = self.prompts.at_once(asked.url, path, wanted.fields)
            if isinstance(found, AskedPrompt):
                found = await self.prompts.chain(asked.url, found, headers)
            chain = found
        output_tokens = self.meters.output_tokens(wanted.max_tokens())
        return RequestWay(self, chain, len(wanted.body), output_tokens, wanted.streamed)

    def views(self, failed: Mapping[Role, Set[UpstreamEngine]]) -> list[EngineView]:
        """All engines, as the choice needs them, without the roles in which they failed."""
        pooled, some = self.index.pooled(), failed["prefill"] | failed["decode"]

        def roles(engine: UpstreamEngine) -> frozenset[Role]:
            if engine not in some:
                return engine.roles
            return frozenset(role for role in engine.roles if engine not in failed[role])

        return [
            self.meters.view(
                engine.url,
                roles(engine),
                up=engine.room > 0,
                pooled=engine.url in pooled,
                weight=engine.spec.weight,
            )
            for engine in self._fleet.engines
        ]

    def meter(self, engine: str) -> EngineMeter:
        """An engine's own. A removed engine has one that is not shown anywhere."""
        return self.meters[engine] if self._fleet.get(engine) is not None else EngineMeter()

    def sent(self, engine: str, chain: PromptChain) -> None:
        """An engine gets a prompt, which it will hold."""
        if self._fleet.get(engine) is not None:  # else it was removed, and its requests go on
            told = self.meters[engine].metrics
            sizes = (0, 0) if told is None else (told.block_tokens, told.cache_tokens)
            self.index.sent(engine, chain, *sizes)

    # Engines come and go

    def _changed(self, engine: UpstreamEngine, kind: ChangeKind) -> None:
        if kind == "removed":
            self._unfollow(engine.url)
            self.index.remove(engine.url)
            self.prompts.forget(engine.url)
            self.meters.keep(e.url for e in self._fleet.engines)
        elif kind == "up":
            if engine.restarted:
                self.prompts.forget(engine.url)
            if (streams := self._followers.get(engine.url)) is not None:
                streams.came_up(engine.restarted)
            elif engine.restarted:
                self.index.forget(engine.url)
        elif kind in ("added", "changed") and self._running:
            self._follow(engine.spec)

    def _follow(self, spec: EngineSpec) -> None:
        """Follow an engine's events, where it publishes them."""
        source = None if spec.events is None else EventSource(spec.events, spec.replay)
        old = self._followers.get(spec.url)
        if (old.source if old is not None else None) == source:
            return
        self._unfollow(spec.url)
        if source is not None:
            streams = self._followers[spec.url] = EventStreams(self.index, spec.url, source)
            streams.start()

    def _unfollow(self, url: str) -> None:
        if (streams := self._followers.pop(url, None)) is not None:
            streams.stop()
            self.index.forget(url)

    def _any_engine(self) -> UpstreamEngine | None:
        """An engine to ask for tokens: the one with the fewest requests."""
        up = [engine for engine in self._fleet.with_role("decode") if engine.up]
        return min(up, key=lambda engine: engine.load, default=None)

    # Metrics

    async def _poll_metrics(self) -> None:
        """Ask all engines in turn, spread over `metrics_seconds`, so that no stream waits for all
        of their answers."""
        async with asyncio.TaskGroup() as group:
            while True:
                engines = self._fleet.engines
                for engine in engines:
                    if engine.up:
                        group.create_task(self._ask_metrics(engine))
                    await asyncio.sleep(self._limits.metrics_seconds / len(engines))
                if not engines:
                    await asyncio.sleep(self._limits.metrics_seconds)

    async def _ask_metrics(self, engine: UpstreamEngine) -> None:
        try:
            at = address_of_url(f"{engine.url}/metrics")
            until = asyncio.get_running_loop().time() + self._limits.probe_seconds
            status, text = await self._fleet.transport.fetch(b"GET", at, _METRICS_BYTES, until)
            found = read_metrics(text) if 200 <= status < 300 else None
            if found is not None:
                self.meter(engine.url).told(found)
        except (NoConnection, BrokenAnswer, TimeoutError):
            return  # whether it is down, probes find out
        except Exception:  # without the poll, nothing would be known of any engine's load
            log.exception("the metrics of %s broke the poll", engine.url)


class RequestWay:
    """One request's way to its engines."""

    def __init__(
        self,
        placing: Placer,
        chain: PromptChain | None,
        body_bytes: int,
        output_tokens: int,
        streamed: bool,
    ) -> None:
        self.decision: Decision | None = None  # the last one
        self.actual_seconds: float | None = None  # until the first byte of a stream
        self._placing = placing
        self._chain = chain
        self._output_tokens = output_tokens
        self._streamed = streamed
        # Without tokens a prompt still counts on the engine that computes it: 4 bytes make one.
        self._guessed_tokens = max(1, body_bytes // 4)
        self._begun = time.monotonic()
        self._holdings: tuple[Holding, ...] = ()
        self._prefill: PrefillVisit | None = None
        self._stream: StreamVisit | None = None
        self._computed_on: str | None = None
        self._handed_tokens = 0  # that the decode engine loads from another one
        self._asked_at = 0.0
        self._events = 0
        self._cached: int | None = None  # tokens that the engine says it had

    @property
    def tokens(self) -> int:
        """Of the prompt; 0: not known."""
        return 0 if self._chain is None else self._chain.tokens

    @property
    def cached_tokens(self) -> int:
        """Of the prompt: as the engine says that computed it, else as was expected."""
        if self._cached is not None:
            return min(self._cached, self.tokens)
        if self.decision is None:
            return 0
        chosen = self.decision.chosen
        if self._computed_on not in (None, chosen.prefill or chosen.decode):
            return self._held(self._computed_on)  # the chosen engine failed
        return chosen.cached_tokens

    def choose(
        self,
        *,
        may_hand_over: bool,
        not_prefill: Set[UpstreamEngine],
        not_decode: Set[UpstreamEngine],
    ) -> Decision | None:
        """The way for the next try. None: without tokens there is nothing to choose by."""
        if self._chain is None:
            return None
        views = self._placing.views({"prefill": not_prefill, "decode": not_decode})
        self._holdings = tuple(self._placing.index.holdings(self._chain))
        prompt = PromptView(self.tokens, self._holdings, may_hand_over, self._output_tokens)
        self.decision = place(prompt, views, self._placing.random)
        return self.decision

    def summary(self) -> bytes:
        """The decision for a header. Clients do not see the engines' addresses."""
        assert self.decision is not None
        chosen = self.decision.chosen
        way = "alone" if chosen.prefill is None else "handed-over"
        return (
            f"{way}; source={chosen.source}; tokens={self.tokens}; cached={chosen.cached_tokens}; "
            f"expected-ms={chosen.seconds * 1000:.0f}; options={len(self.decision.options)}"
        ).encode()

    def prefilled(self, answer: bytes) -> None:
        """The prefill engine has answered well."""
        self._computed()
        self._read_cached(answer)

    def decode(self, engine: str, *, handed_over: bool) -> None:
        """The request goes to the engine that answers."""
        self.ended()
        self._stream = self._placing.meter(engine).stream()
        self._asked_at = time.monotonic()
        self._handed_tokens = max(0, self.tokens - self._held(engine)) if handed_over else 0
        if not handed_over:
            self.compute(engine, decoded_elsewhere=False)
        elif self._chain is not None:
            self._placing.sent(engine, self._chain)

    def first(self) -> None:
        """The first bytes of a stream came."""
        assert self._stream is not None
        now = time.monotonic()
        self.actual_seconds = now - self._begun
        self._stream.first()
        if self._handed_tokens:
            self._stream.meter.received(self._handed_tokens, now - self._asked_at)
        else:
            self._computed()
        if self.decision is not None:
            best = min(option.seconds for option in self.decision.options)
            self._placing.regret.observe(self.actual_seconds - best)

    def saw(self, data: bytes) -> None:
        """Whole events of the answer went by, or all of it."""
        self._events += data.count(b"\n\n")
        # Of a hand-over, the engine counts what was handed over as cached.
        if b"cached_tokens" in data and not self._handed_tokens:
            self._read_cached(data)

    def served(self, *, handed_over: bool) -> None:
        """The request was answered well: what it got from where counts from now on."""
        placing = self._placing
        if self._streamed and self._events > 1:
            placing.meters.answered(self._events)
        if self.decision is None:
            placing.choices["by_load"] += 1
            return
        placing.choices["handed_over" if handed_over else "alone"] += 1
        chosen = self.decision.chosen
        source = "local" if chosen.source == "none" else chosen.source
        placing.hit_tokens[source] += self.cached_tokens
        placing.hit_tokens["none"] += self.tokens - self.cached_tokens

    def ended(self) -> None:
        """Nothing of it counts on any engine. May be called again."""
        self._drop_prefill()
        if self._stream is not None:
            self._stream.ended(self._events)
            self._stream = None
        self._events = 0

    def _held(self, engine: str | None) -> int:
        """Leading tokens that an engine holds on its device."""
        return max(
            (h.tokens for h in self._holdings if h.engine == engine and h.tier == "gpu"), default=0
        )

    def compute(self, engine: str, *, decoded_elsewhere: bool) -> None:
        """The prompt goes to `engine` to be computed there."""
        self._drop_prefill()
        if self._chain is not None:
            self._placing.sent(engine, self._chain)
        self._computed_on = engine
        self._prefill = self._placing.meter(engine).prefill(
            self.tokens or self._guessed_tokens,
            self._held(engine),
            decoded_elsewhere=decoded_elsewhere,
            known=self._chain is not None,
        )
        if not decoded_elsewhere and not self._streamed:
            # Its answer says nothing about when the prompt was computed.
            seconds = _GUESSED_SECONDS if self.decision is None else self.decision.chosen.seconds
            asyncio.get_running_loop().call_later(seconds, self._prefill.dropped)

    def _computed(self) -> None:
        if self._prefill is not None:
            self._prefill.computed()
            self._prefill = None

    def _drop_prefill(self) -> None:
        if self._prefill is not None:
            self._prefill.dropped()
            self._prefill = None

    def _read_cached(self, data: bytes) -> None:
        """What the engine that computed the prompt says it had of it, where it says that."""
        if found := _CACHED.search(data):
            self._cached = int(found[1])


def read_metrics(text: bytes) -> EngineMetrics | None:
    """What vLLM says on /metrics; None if it is not vLLM. Data-parallel ranks are added up.

    Raises ValueError for values that are no numbers.
    """
    sums: Counter[bytes] = Counter()
    usage: list[float] = []
    cache_tokens = block_tokens = 0
    for name, labels, value in _SAMPLE.findall(b"\n" + text):
        if name in (b"num_requests_running", b"num_requests_waiting"):
            sums[name] += round(min(_MOST_REQUESTS, max(0.0, float(value))))
        elif name == b"kv_cache_usage_perc":
            usage.append(min(1.0, max(0.0, float(value))))
        elif name == b"cache_config_info":
            sizes = {key: int(size) for key, size in _LABEL.findall(labels)}
            block_tokens = sizes.get(b"block_size", 0)
            cache_tokens += sizes.get(b"num_gpu_blocks", 0) * block_tokens
    if b"num_requests_running" not in sums:
        return None
    return EngineMetrics(
        running=sums[b"num_requests_running"],
        waiting=sums[b"num_requests_waiting"],
        used_blocks=sum(usage) / len(usage) if usage else 0.0,
        cache_tokens=cache_tokens,
        block_tokens=block_tokens,
    )
