# SPDX-License-Identifier: Apache-2.0
"""The hand-over on one card: a prefill engine, and decode engines with the same and other blocks.

The prefill engine computes a prompt once, which is also the time of computing. Each round empties
the decode engine's own cache, asks the prefill engine again (which finds the prompt in its cache
and holds its blocks), and hands the request over. Timed is the decode engine alone: from the
request to its first token. Then the decode engine gets the prompt once more: a full local hit.

A second part lets a decode engine decode another request meanwhile, and looks at the gaps between
that one's tokens. That engine runs as `vllm serve` runs it, with its core in a process of its own:
there, another thread takes new prompts apart and hashes them, which otherwise counts as a step. It
also gets requests of which nothing is loaded, because a connector says at once that it has come:
what these cost is vLLM's own.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.engines.fleet import APART, FERRY, Answer, Engine, Fleet
from benchmarks.measuring import middle
from benchmarks.report import Report, at_least, at_most
from benchmarks.timed import FILE, FREE, Times
from kvferry.errors import KvferryError
from vllm_engines import nixl_environment

PREFILL, DECODE, BLOCKS, ORDER, SERVED = (
    "prefill",
    "decode, same blocks",
    "decode, blocks of 64",
    "decode, NHD",
    "decode, as served",
)
NIXL_PREFILL, NIXL_DECODE = "NIXL prefill", "NIXL decode"
ROUNDS = 4
NIXL_ROUNDS = 2
NIXL_MOST_TOKENS = 32_000  # 128,000 would take it half a minute
OTHER_TOKENS = 128  # of the request that is decoded meanwhile
OTHER_MOST = 8_000
USUAL_SECONDS = 0.3
BEYOND_HIT_MS = 15.0
STEP = 1.3  # times its usual length
OF_NIXL = 50.0  # times its transfer, from so many tokens on
OF_NIXL_FROM = 8_000
_seeds = itertools.count(1_000_000)


@dataclass(slots=True)
class Found:
    """Of one pair of engines and one length."""

    computing: float
    first: list[Answer] = field(default_factory=list)
    hits: list[Answer] = field(default_factory=list)

    @property
    def first_token(self) -> float:
        return middle([one.first_token for one in self.first])

    @property
    def load(self) -> float:
        return middle([one.load for one in self.first])

    @property
    def hit(self) -> float:
        return middle([one.first_token for one in self.hits])


def make_engines(fleet: Fleet, lengths: Sequence[int], least: int) -> list[Engine]:
    """kvferry's engines, not started. Only the first two are large enough for the longest, and have
    at least so many tokens."""
    longest = max(lengths)
    room = max(least, longest + max(longest // 32, 16 * fleet.block))
    usual = int(min(longest, NIXL_MOST_TOKENS) * 1.25) + 16 * fleet.block
    engines = [
        fleet.engine(PREFILL, room, transfer=FERRY),
        fleet.engine(DECODE, room, transfer=FERRY),
        fleet.engine(BLOCKS, usual, block=64, transfer=FERRY),
    ]
    if fleet.gpu:  # the CPU's attention has one order
        order = {"VLLM_KV_CACHE_LAYOUT": "NHD"}
        engines.append(fleet.engine(ORDER, usual, transfer=FERRY, environment=order))
    apart = {**APART, FILE: str(fleet.shared / "times")}
    timed = {"kv_connector": "FreeConnector", "kv_connector_module_path": "benchmarks.timed.ours"}
    engines.append(fleet.engine(SERVED, usual, transfer=timed, environment=apart))
    return engines


def make_nixl(fleet: Fleet, lengths: Sequence[int], least: int) -> list[Engine]:
    tokens = max(least, int(min(max(lengths), NIXL_MOST_TOKENS) * 2.5) + 16 * fleet.block)
    transfer = {"kv_connector": "NixlConnector", "kv_buffer_device": "cuda" if fleet.gpu else "cpu"}
    engines = []
    for name in (NIXL_PREFILL, NIXL_DECODE):
        environment = nixl_environment()
        if fleet.gpu:
            del environment["UCX_NET_DEVICES"]  # it moves device memory by other ways
        engines.append(fleet.engine(name, tokens, transfer=transfer, environment=environment))
    return engines


class Handover:
    """Measures pairs as they come, and judges at the end."""

    def __init__(self, fleet: Fleet, report: Report) -> None:
        self.fleet, self.report = fleet, report
        self.found: dict[tuple[str, int], Found] = {}

    def measure(self, prefill: Engine, decode: Engine, lengths: Sequence[int]) -> None:
        rounds = NIXL_ROUNDS if decode.name == NIXL_DECODE else ROUNDS
        try:
            for one in (prefill, decode):
                one.ask(next(_seeds), min(lengths))  # first steps
            for length in lengths:
                if length <= decode.arguments["max_model_len"] - 2:
                    self._measure(prefill, decode, length, rounds)
        except KvferryError as error:
            self.report.failed("Hand-over", decode.name, f"{error}")

    def _measure(self, prefill: Engine, decode: Engine, length: int, rounds: int) -> None:
        seed = length  # the same for all decode engines: the prefill engine computes it once
        computed = prefill.prefill(seed, length)
        earlier = self.found.get((DECODE, length))
        computing = earlier.computing if earlier and computed.cached else computed.first_token
        found = self.found[decode.name, length] = Found(computing)
        handed = computed
        for number in range(rounds):
            if number:
                handed = prefill.prefill(seed, length)
            decode.call("reset")
            found.first.append(decode.ask(seed, length, 2, handed.params))
        found.hits = [decode.ask(seed, length, 2) for _ in range(rounds)]
        least = min(one.external for one in found.first)
        self.report.row(
            "Hand-over",
            {
                "first_token_ms": [one.first_token * 1e3 for one in found.first],
                "load_ms": [one.load * 1e3 for one in found.first],
                "hit_ms": [one.first_token * 1e3 for one in found.hits],
            },
            engine=decode.name,
            tokens=length,
            computing_ms=found.computing * 1e3,
            first_token_ms=found.first_token * 1e3,
            first_of_all_ms=found.first[0].first_token * 1e3,
            load_ms=found.load * 1e3,
            local_hit_ms=found.hit * 1e3,
            loaded=f"{least / length:.1%}",
        )

    def beside_another(self, prefill: Engine, decode: Engine, lengths: Sequence[int]) -> None:
        """Loads while the decode engine decodes another request."""
        try:
            cache = decode.arguments["max_model_len"]
            most = min(OTHER_MOST, cache // 5)
            fitting = [n for n in lengths if n + OTHER_TOKENS + most <= cache]
            for length in fitting:  # what is done once
                seed = next(_seeds)
                decode.ask(seed, length, 2, prefill.prefill(seed, length).params)
            spent = Times(self.fleet.shared / "times")
            other = decode.add(next(_seeds), OTHER_TOKENS, most)
            windows: list[tuple[int, str, float, float]] = []
            own: dict[int, float] = {}
            for length in fitting:
                for _ in range(ROUNDS):
                    seed = next(_seeds)
                    handed = prefill.prefill(seed, length)
                    time.sleep(USUAL_SECONDS)
                    spent.clear()
                    got = decode.ask(seed, length, 2, handed.params)
                    own[length] = max(own.get(length, 0.0), spent.longest())
                    windows.append((length, "load", got.added, got.times[0]))
                    time.sleep(USUAL_SECONDS)
                    hit = decode.ask(seed, length, 2)
                    windows.append((length, "local hit", hit.added, hit.times[0]))
                    time.sleep(USUAL_SECONDS)
                    free = decode.ask(next(_seeds), length, 2, {FREE: True})
                    windows.append((length, "free", free.added, free.times[0]))
                    time.sleep(USUAL_SECONDS)
                    still = time.monotonic()
                    windows.append((length, "usual", still - USUAL_SECONDS / 2, still))
            decode.call("abort", which=[other])
            times = decode.answer(other)["times"]
        except KvferryError as error:
            self.report.failed("Another request's steps", decode.name, f"{error}")
            return
        gaps = list(itertools.pairwise(times))
        for length in fitting:
            by_kind = {
                kind: [
                    later - earlier
                    for tokens, what, begin, end in windows
                    if (tokens, what) == (length, kind)
                    for earlier, later in gaps
                    if later > begin and earlier < end
                ]
                for kind in ("usual", "load", "free", "local hit")
            }
            if not all(by_kind.values()):
                self.report.failed(
                    "Another request's steps", decode.name, f"it ended before {length:,} tokens"
                )
                continue
            usual = statistics.median(by_kind["usual"])
            longest, free_longest = max(by_kind["load"]), max(by_kind["free"])
            self.report.row(
                "Another request's steps",
                {kind: [gap * 1e3 for gap in found] for kind, found in by_kind.items()},
                tokens=length,
                usual_ms=usual * 1e3,
                longest_usual_ms=max(by_kind["usual"]) * 1e3,
                longest_while_loading_ms=longest * 1e3,
                longest_where_nothing_is_loaded_ms=free_longest * 1e3,
                longest_with_a_local_hit_ms=max(by_kind["local hit"]) * 1e3,
                times_usual=f"{longest / usual:.2f} x",
                connectors_own_ms=own[length] * 1e3,
            )
            bar = f"hand-over: {length:,} tokens, longest step of another request"
            self.report.judge(at_most(bar, longest / usual, STEP, "{:.2f} x"))
            share = (longest - free_longest) / usual
            bar = f"hand-over: {length:,} tokens, that step, more than if nothing is loaded"
            self.report.judge(at_most(bar, share, STEP - 1, "{:.2f} usual steps"))

    def judge(self) -> None:
        for (name, length), found in self.found.items():
            if name == NIXL_DECODE or not found.first:
                continue
            what = f"hand-over: {length:,} tokens, {name}"
            beyond = (found.first_token - found.hit) * 1e3
            bar = f"{what}, first token beyond a full local hit"
            self.report.judge(at_most(bar, beyond, BEYOND_HIT_MS, "{:.1f} ms"))
            theirs = self.found.get((NIXL_DECODE, length))
            if theirs is not None and length >= OF_NIXL_FROM and found.load:
                bar, times = f"{what}, transfer beside NIXL's", theirs.load / found.load
                note = f" ({found.load * 1e3:.1f} and {theirs.load * 1e3:.0f} ms)"
                self.report.judge(at_least(bar, times, OF_NIXL, "{:.0f} x", note))
