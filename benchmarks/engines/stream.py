# SPDX-License-Identifier: Apache-2.0
"""A stream of mixed requests at rising rates, through a prefill and a decode engine or one alone.

Requests arrive at random moments (Poisson), the same for all. The parent is the router: what a
prefill engine answers goes on to the decode engine. A request is good if its first token came
within a second of its arrival, and its others 50 ms apart in the mean. What has not ended some
seconds after the last arrival is not good.
"""

from __future__ import annotations

import html
import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.engines.fleet import Answer, Engine, Fleet, next_answers
from benchmarks.engines.report import Report
from kvferry.errors import KvferryError

SHORTEST, LONGEST = 500, 16_000
OUT_TOKENS = 64
FIRST_SECONDS = 1.0
GAP_SECONDS = 0.05
DRAIN_SECONDS = 6.0
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
    requests: int
    good: int
    strict: int  # good, and no single gap longer than allowed
    first_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    goodput: float = 0.0  # good requests a second: the rate, times the share that is good


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
    requests: int,
    longest: int = LONGEST,
) -> list[Point]:
    """All rates, one after another, until the time is up."""
    points: list[Point] = []
    try:
        for one in filter(None, (prefill, decode)):
            one.call("reset")
        for rate in rates:
            points.append(at_rate(who, prefill, decode, mix(requests, rate, longest), rate, fleet))
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
    return summed_up(who, rate, coming)


def summed_up(who: str, rate: float, coming: Sequence[Coming]) -> Point:
    ended = [one for one in coming if one.answer is not None and len(one.answer.times) > 1]
    good = [one for one in ended if one.good(statistics.mean(one.gaps))]
    return Point(
        who,
        rate,
        len(coming),
        len(good),
        sum(one.good(max(one.gaps)) for one in ended),
        [one.first * 1e3 for one in ended],
        [gap * 1e3 for one in ended for gap in one.gaps],
        rate * len(good) / len(coming),
    )


def show(report: Report, point: Point) -> None:
    first, gaps = percentiles(point.first_ms), percentiles(point.gap_ms)
    report.row(
        "Stream",
        engine=point.who,
        rate=point.rate,
        requests=point.requests,
        ended=len(point.first_ms),
        good=point.good,
        good_in_every_gap=point.strict,
        goodput=f"{point.goodput:.2f} /s",
        first_token_p50_ms=first[0],
        first_token_p99_ms=first[1],
        gap_p50_ms=gaps[0],
        gap_p99_ms=gaps[1],
    )


def percentiles(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The median and the 99th percentile."""
    if not values:
        return None, None
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


WIDTH, HEIGHT, LEFT, TOP = 420, 260, 60, 30
COLOURS = ("#1f6fb4", "#d1622b", "#4d8f3a", "#7b5ea7")


def plot(points: Sequence[Point], path: Path) -> None:
    """Goodput and the 99th percentile of gaps by rate, as an SVG."""
    charts: tuple[tuple[str, dict[tuple[str, float], float | None]], ...] = (
        ("good requests a second", {(p.who, p.rate): p.goodput for p in points}),
        (
            "gap between tokens, p99, ms",
            {
                (p.who, p.rate): percentiles(p.gap_ms)[1]
                for p in points
                if 2 * len(p.first_ms) >= p.requests  # of few that ended, little can be said
            },
        ),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * (WIDTH + LEFT) + 40}" '
        f'height="{HEIGHT + 3 * TOP + 30}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (title, values) in enumerate(charts):
        parts += chart(title, values, LEFT + number * (WIDTH + LEFT + 20))
    path.write_text("\n".join([*parts, "</svg>"]))


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def chart(title: str, values: dict[tuple[str, float], float | None], left: int) -> list[str]:
    known = {key: value for key, value in values.items() if value is not None}
    most_x = max((rate for _, rate in known), default=1.0) * 1.05
    most_y = max(known.values(), default=1.0) * 1.1 or 1.0
    bottom = TOP + HEIGHT

    def at(rate: float, value: float) -> str:
        return f"{left + rate / most_x * WIDTH:.1f},{bottom - value / most_y * HEIGHT:.1f}"

    parts = [
        f'<text x="{left}" y="{TOP - 10}" font-weight="bold">{html.escape(title)}</text>',
        f'<path d="M{left} {TOP}V{bottom}H{left + WIDTH}" fill="none" stroke="#555"/>',
        f'<text x="{left + WIDTH}" y="{bottom + 32}" text-anchor="end">requests a second</text>',
    ]
    for share in (0.25, 0.5, 0.75, 1.0):
        y = bottom - share * HEIGHT
        parts.append(f'<path d="M{left} {y}h{WIDTH}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{_short(share * most_y)}</text>'
        )
    for rate in sorted({rate for _, rate in known}):
        x = left + rate / most_x * WIDTH
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{rate:g}</text>')
    for number, who in enumerate(dict.fromkeys(who for who, _ in values)):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(at(rate, value) for (name, rate), value in known.items() if name == who)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x, y = left + 10 + 130 * number, bottom + 52
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 15}" y="{y}">{html.escape(who)}</text>')
    return parts
