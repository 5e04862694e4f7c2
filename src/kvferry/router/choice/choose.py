# SPDX-License-Identifier: Apache-2.0
"""From a prompt and the engines to a decision. Pure functions, without a clock.

For every way to serve a request, `options` adds up the expected seconds to its first token:

    computed where     D's queue, the load of what the pool has (if that is faster than computing),
      it is decoded    D's prefill of the rest, a decode step
    prefill on P,      P's queue, load and prefill in the same way, the transfer of what D does not
      decode on D      hold, at most one chunk of D's own prefills, a decode step

A prefix that another engine holds is used by prefilling there, so that engine needs the prefill
role: no other engine sends its cache away.

The first token of this request is not all that counts. Each option carries the seconds that others
lose by it (`Option.harm_seconds`, weighed by `Weights`): a prefill stops the streams that decode on
the same engine and delays the prefills that come after it, and one more stream makes every step of
an engine longer.

`choose` takes the option with the smallest sum of both. Sums that are nearly equal count as equal.
Of equal options, those with most cached tokens are kept, so that a conversation stays where its
cache is. Of the kept ones, two are drawn and the less loaded one is taken, so that two routers that
see the same figures do not send everything to one engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from kvferry.router.choice.model import Decision, EngineView, Option, PromptView, Rate, Source

# Options of one request: alone on the best decode engines, and pairs of the best of both roles.
MOST_ALONE = 16
MOST_PREFILL = 6
MOST_DECODE = 8
# A request that was handed over joins D's batch after the step that runs, which is a chunk of
# prefill if D has any: vLLM's max_num_batched_tokens.
CHUNK_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Weights:
    """What counts how much, against a second before this request's first token."""

    # Sums within this share of the best, or this many seconds, are equal: predictions are no
    # better. More spreads a conversation over engines, less makes herds.
    tie_share: float = 0.05
    tie_seconds: float = 0.005
    # A second in which a stream stands still, for each stream.
    stream: float = 0.05
    # A second of prefill, for the requests that will wait behind it.
    work: float = 1.0
    # A second that all later tokens of a stream take longer.
    decode: float = 0.02
    # With fewer free blocks an engine may stop streams to make room.
    scarce_blocks: float = 0.05
    scarce_seconds: float = 2.0


DEFAULT = Weights()


def place(
    prompt: PromptView,
    engines: Iterable[EngineView],
    random: Random,
    besides: Collection[str] = (),
    weights: Weights = DEFAULT,
) -> Decision | None:
    """The decision for one request; None if no decode engine can take it.

    besides  engines that failed this request
    """
    usable = [e for e in engines if e.up and not e.draining and e.name not in besides]
    found = options(prompt, usable, weights)
    return choose(found, usable, random, weights) if found else None


def options(
    prompt: PromptView, engines: Sequence[EngineView], weights: Weights = DEFAULT
) -> list[Option]:
    """The ways to serve a request, the cheapest first; 64 at most."""
    held = _Held(prompt)
    decode = [e for e in engines if "decode" in e.roles]
    prefill = [e for e in engines if "prefill" in e.roles] if prompt.may_hand_over else []
    computes = {e.name: held.compute(prompt, e) for e in [*decode, *prefill]}
    alone = [_alone(prompt, e, computes[e.name], weights) for e in decode]
    first = sorted(prefill, key=lambda e: _prefill_cost(e, computes[e.name], weights))
    second = sorted(decode, key=lambda e: _decode_cost(prompt, held, e, weights))
    pairs = [
        _pair(prompt, held, p, computes[p.name], d, weights)
        for p in first[:MOST_PREFILL]
        for d in second[:MOST_DECODE]
        if p is not d
    ]
    if prompt.tokens <= 0 and pairs:
        # Without a size nothing can be weighed. Whoever set up prefill engines wants them used.
        alone = []
    alone = sorted(alone, key=_cost)[:MOST_ALONE]
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
    drawn = random.sample(equal, min(2, len(equal)))  # in random order
    if len(drawn) == 2:
        load = {e.name: _queue(e) + e.running * e.step_seconds for e in engines}
        drawn.sort(key=lambda o: load[o.decode] + (load[o.prefill] if o.prefill else 0.0))
    return Decision(drawn[0], tuple(options), _why(drawn[0], options))


# One option


class _Compute(NamedTuple):
    """A prompt, computed on one engine."""

    load_seconds: float
    seconds: float
    cached: int
    source: Source


class _Held:
    """Leading tokens of a prompt, by where they are. The last token is computed in any case."""

    def __init__(self, prompt: PromptView) -> None:
        most = max(0, prompt.tokens - 1)
        self.gpu: dict[str, int] = {}
        self.cpu: dict[str, int] = {}
        self.pool = 0
        for holding in prompt.holdings:
            tokens = min(holding.tokens, most)
            if holding.tier == "pool":
                self.pool = max(self.pool, tokens)
            else:
                tier = self.gpu if holding.tier == "gpu" else self.cpu
                tier[holding.engine] = max(tokens, tier.get(holding.engine, 0))

    def compute(self, prompt: PromptView, engine: EngineView) -> _Compute:
        """From the engine's own cache, or with a load if that is faster."""
        local = self.gpu.get(engine.name, 0)
        seconds = engine.prefill.seconds(prompt.tokens - local, local)
        loaded = self.cpu.get(engine.name, 0)
        if engine.pool is not None:
            loaded = max(loaded, self.pool)
        if loaded > local:
            load = engine.pool.seconds(loaded - local) if engine.pool is not None else 0.0
            rest = engine.prefill.seconds(prompt.tokens - loaded, loaded)
            if load + rest < seconds:
                return _Compute(load, rest, loaded, "pool")
        return _Compute(0.0, seconds, local, "local" if local else "none")


def _alone(prompt: PromptView, engine: EngineView, compute: _Compute, weights: Weights) -> Option:
    parts = {
        "queue": _queue(engine),
        "load": compute.load_seconds,
        "prefill": compute.seconds,
        "transfer": 0.0,
        "decode": engine.step_seconds,
    }
    harm = _prefill_harm(engine, compute, weights) + _decode_harm(prompt, engine, weights)
    seconds = sum(parts.values())
    return Option(engine.name, None, seconds, parts, compute.cached, compute.source, harm)


def _pair(
    prompt: PromptView,
    held: _Held,
    p: EngineView,
    compute: _Compute,
    d: EngineView,
    weights: Weights,
) -> Option:
    parts = {
        "queue": _queue(p) + _chunk(d),
        "load": compute.load_seconds,
        "prefill": compute.seconds,
        "transfer": _transfer(prompt, held, d, d.links.get(p.name, d.receive)),
        "decode": d.step_seconds,
    }
    source: Source = "handover" if compute.source == "local" else compute.source
    harm = _prefill_harm(p, compute, weights) + _decode_harm(prompt, d, weights)
    return Option(d.name, p.name, sum(parts.values()), parts, compute.cached, source, harm)


def _prefill_cost(engine: EngineView, compute: _Compute, weights: Weights) -> float:
    """What P adds to the cost of any pair."""
    seconds = _queue(engine) + compute.load_seconds + compute.seconds
    return seconds + _prefill_harm(engine, compute, weights)


def _decode_cost(prompt: PromptView, held: _Held, engine: EngineView, weights: Weights) -> float:
    """What D adds to the cost of any pair, over its usual link."""
    transfer = _transfer(prompt, held, engine, engine.receive)
    harm = _decode_harm(prompt, engine, weights)
    return _chunk(engine) + transfer + engine.step_seconds + harm


def _queue(engine: EngineView) -> float:
    return engine.waiting_tokens * engine.prefill.token_seconds


def _chunk(engine: EngineView) -> float:
    return min(engine.waiting_tokens, CHUNK_TOKENS) * engine.prefill.token_seconds


def _transfer(prompt: PromptView, held: _Held, d: EngineView, link: Rate) -> float:
    return link.seconds(prompt.tokens - held.gpu.get(d.name, 0))


def _prefill_harm(engine: EngineView, compute: _Compute, weights: Weights) -> float:
    return compute.seconds * (weights.work + weights.stream * engine.running)


def _decode_harm(prompt: PromptView, engine: EngineView, weights: Weights) -> float:
    step = engine.step_seconds + engine.running * engine.step_growth_seconds
    harm = weights.decode * prompt.output_tokens * step
    if engine.free_blocks < weights.scarce_blocks:
        harm += weights.scarce_seconds * (1 - engine.free_blocks / weights.scarce_blocks)
    return harm


def _cost(option: Option) -> float:
    return option.cost


# The sentence


def _why(chosen: Option, options: Sequence[Option]) -> str:
    """Why this option, in words that an operator reads at night."""
    if chosen.cached_tokens:
        where = {"local": "there", "handover": f"on {chosen.prefill}", "pool": "in the pool"}
        held = f"{chosen.cached_tokens} tokens are cached {where[chosen.source]}"
    else:
        held = "no engine that is free enough holds a part of it"
        if all(option.cached_tokens == 0 for option in options):
            held = "nothing of it is cached"
    if chosen.prefill is None:
        text = f"computed where it is decoded, on {chosen.decode}, because {held}"
        other = next((o for o in options if o.prefill is not None), None)
        kind = "a hand-over"
    else:
        text = f"prefill on {chosen.prefill}, decode on {chosen.decode}, because {held}"
        other = next((o for o in options if o.prefill is None), None)
        kind = "computing it where it is decoded"
    text += f"; first token expected after {chosen.seconds * 1000:.0f} ms"
    if other is not None:
        text += f", {kind} would take {other.seconds * 1000:.0f} ms"
        if other.seconds < chosen.seconds:
            text += " and cost other requests more"
    return text
