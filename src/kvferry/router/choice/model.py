# SPDX-License-Identifier: Apache-2.0
"""The records of a choice: what is known of a prompt and of engines, and what follows from it.

They are msgspec's structs: dozens are made for each request, and a frozen dataclass takes eight
times as long to make. Seconds are expected seconds; engines are named by their URL.
"""

from __future__ import annotations

import math
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
    """What is known of one request when it is placed."""

    tokens: int  # of the prompt; 0: not known
    holdings: tuple[Holding, ...] = ()
    may_hand_over: bool = True  # False: it must be computed where it is decoded
    output_tokens: int = 256  # that are expected; what the client allows is an upper bound


class EngineView(msgspec.Struct, frozen=True):
    """What is known of one engine when a request is placed."""

    name: str
    roles: frozenset[Role]
    waiting_tokens: int  # prefill work (`Rate.work`) queued or under way there
    running: int  # requests that decode there, or are on their way to it
    prefill: Rate
    step_seconds: float  # of one decode step at its load
    up: bool = True
    draining: bool = False
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
        """What options are compared by."""
        return self.seconds + self.harm_seconds


class Decision(msgspec.Struct, frozen=True):
    chosen: Option
    options: tuple[Option, ...]  # the cheapest first; `chosen` is one of them
    why: str  # one plain sentence
