# SPDX-License-Identifier: Apache-2.0
"""A stream of mixed requests at rising rates, through a prefill and a decode engine or one alone.

Requests arrive at random moments (Poisson), the same for all. The parent is the router: what a
prefill engine answers goes on to the decode engine. A request is good if its first token came
within a second of its arrival, and its others 50 ms apart in the mean. What has not ended some
seconds after the last arrival is not good.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engines.fleet import Answer, Engine, Fleet, next_answers
from benchmarks.measuring import percentile
from benchmarks.report import Report
from kvferry.cli import page
from kvferry.cli.page import Curve
from kvferry.errors import KvferryError

SHORTEST, LONGEST = 500, 16_000
OUT_TOKENS = 64
REQUESTS = 50  # at each rate
CACHE_TOKENS = 100_000  # of each engine: what is held and what is decoded, and room for both
FIRST_SECONDS = 1.0
GAP_SECONDS = 0.05
DRAIN_SECONDS = 6.0
PLOT_WIDTH, PLOT_HEIGHT = page.WIDTH + page.KEY, page.HEIGHT + 20
COLOURS = ("#1f6fb4", "#d1622b", "#4d8f3a")
_seeds = itertools.count(5_000_000)


@dataclass(slots=True)
class Coming:
    """A request, and what became of it."""

    after: float  # seconds from the start to its arrival
    tokens: int
    arrived: float = 0.0
    answer: Answer | None = None

    @property
    def first(self) -> float:
        assert self.answer is not None
        return self.answer.times[0] - self.arrived

    @property
    def gaps(self) -> list[float]:
        assert self.answer is not None
        return [later - earlier for earlier, later in itertools.pairwise(self.answer.times)]

    def good(self, gap: float) -> bool:
        return self.answer is not None and self.first <= FIRST_SECONDS and gap <= GAP_SECONDS


@dataclass(slots=True)
class Point:
    """One system at one rate."""

    who: str
    rate: float
    coming: list[Coming]

    @property
    def ended(self) -> list[Coming]:
        return [one for one in self.coming if one.answer and len(one.answer.times) > 1]

    @property
    def good(self) -> int:
        return sum(one.good(statistics.mean(one.gaps)) for one in self.ended)

    @property
    def good_in_every_gap(self) -> int:
        return sum(one.good(max(one.gaps)) for one in self.ended)

    @property
    def goodput(self) -> float:
        """Good requests a second: the rate, times the share that is good."""
        return self.rate * self.good / len(self.coming)

    @property
    def load_ms(self) -> list[float]:
        """From the decode engine's order to the report of its end."""
        return [one.answer.load * 1e3 for one in self.ended if one.answer and one.answer.load]

    @property
    def gap_ms(self) -> list[float]:
        return [gap * 1e3 for one in self.ended for gap in one.gaps]


def mix(count: int, rate: float, longest: int) -> list[Coming]:
    """The same for the same rate: lengths spread evenly over their logarithm."""
    chance = random.Random(f"{count} {rate}")
    shortest = min(SHORTEST, longest // 2)
    moments = itertools.accumulate(chance.expovariate(rate) for _ in range(count))
    return [
        Coming(after, int(math.exp(chance.uniform(math.log(shortest), math.log(longest)))))
        for after in moments
    ]


def run(
    fleet: Fleet,
    report: Report,
    who: str,
    prefill: Engine | None,
    decode: Engine,
    rates: Sequence[float],
    longest: int,
) -> list[Point]:
    """All rates, one after another, until the time is up."""
    points: list[Point] = []
    try:
        for one in filter(None, (prefill, decode)):
            one.call("reset")
        for rate in rates:
            points.append(at_rate(who, prefill, decode, mix(REQUESTS, rate, longest), rate, fleet))
            show(report, points[-1])
    except KvferryError as error:
        report.failed("Stream", who, f"{error}")
    return points


def at_rate(
    who: str,
    prefill: Engine | None,
    decode: Engine,
    coming: list[Coming],
    rate: float,
    fleet: Fleet,
) -> Point:
    engines = [one for one in (prefill, decode) if one is not None]
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    under_way: dict[tuple[str, int], tuple[Coming, int]] = {}  # with the seed of its prompt
    waiting = list(reversed(coming))
    began = time.monotonic()
    end = min(began + coming[-1].after + DRAIN_SECONDS, fleet.deadline)
    while (waiting or under_way) and time.monotonic() < end:
        now = time.monotonic()
        while waiting and began + waiting[-1].after <= now:
            one, seed = waiting.pop(), next(_seeds)
            one.arrived = began + one.after
            if prefill is None:
                number = decode.add(seed, one.tokens, OUT_TOKENS)
            else:
                number = prefill.add(seed, one.tokens, 1, asked)
            under_way[(prefill or decode).name, number] = one, seed
        until = began + waiting[-1].after if waiting else end
        for engine, number, record in next_answers(engines, min(until, end) - time.monotonic()):
            if (engine.name, number) not in under_way:
                continue
            one, seed = under_way.pop((engine.name, number))
            if engine is prefill:
                handed = record["params"]
                number = decode.add(seed, one.tokens, OUT_TOKENS, handed)
                under_way[decode.name, number] = one, seed
            else:
                one.answer = Answer.read(record)
    for engine in engines:
        engine.call("abort", which=[])
    return Point(who, rate, coming)


def show(report: Report, point: Point) -> None:
    first, gaps = percentiles([one.first * 1e3 for one in point.ended]), percentiles(point.gap_ms)
    report.row(
        "Stream",
        engine=point.who,
        rate=point.rate,
        requests=len(point.coming),
        ended=len(point.ended),
        good=point.good,
        good_in_every_gap=point.good_in_every_gap,
        goodput=f"{point.goodput:.2f} /s",
        first_token_p50_ms=first[0],
        first_token_p99_ms=first[1],
        gap_p50_ms=gaps[0],
        gap_p99_ms=gaps[1],
        handed_over=sum(bool(one.answer.load) for one in point.ended if one.answer),
        load_p50_ms=percentiles(point.load_ms)[0],
    )


def percentiles(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The median and the 99th percentile."""
    if not values:
        return None, None
    return statistics.median(values), percentile(values, 0.99)


def plot(points: Sequence[Point], path: Path) -> None:
    """Goodput and 99th percentile of gaps by rate: two plots in one SVG, one above the other."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{PLOT_WIDTH}" height="{2 * PLOT_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (title, values) in enumerate(
        (
            ("good requests a second", {(p.who, p.rate): p.goodput for p in points}),
            (
                "gap between tokens, p99, ms",
                {
                    (p.who, p.rate): percentile(p.gap_ms, 0.99)
                    for p in points
                    # of few that ended, little can be said
                    if p.gap_ms and 2 * len(p.ended) >= len(p.coming)
                },
            ),
        )
    ):
        lines = [
            Curve(who, colour, [(rate, y) for (name, rate), y in values.items() if name == who])
            for who, colour in zip(dict.fromkeys(p.who for p in points), COLOURS, strict=False)
        ]
        parts.append(f'<g transform="translate(0 {number * PLOT_HEIGHT + 20})">')
        parts.append(f'<text x="20" font-weight="bold">{title}</text>')
        if drawn := [line for line in lines if line.points]:
            parts.append(page.plot(drawn, "requests a second", ""))
        parts.append("</g>")
    path.write_text("\n".join([*parts, "</svg>"]))
