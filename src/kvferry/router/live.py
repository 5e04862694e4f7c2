# SPDX-License-Identifier: Apache-2.0
"""The router's page: problems, their place and time, and why each request went where it did.

The event loop feeds `LiveState` while it serves requests. Once a second `look` compares the engines
with their last state. That gives the list of changes, the present problems, and when each began.
`snapshot` is all of it as JSON, made once after a look for any number of readers. It is served at
/live, within the page at /, and by `LiveStream` as server-sent events. No viewer has a queue: one
that reads slowly misses states, and one that reads nothing is dropped like any client.

The page is one file. Its policy allows its own style and script by their hashes, a connection back
to the router, and nothing else. Texts of clients and engines become text nodes, never HTML.

Everything is bounded: decisions, changes and latencies by number, counts by a window of time. Texts
that clients and engines choose (request ids, failures) are cut, and shown as text only.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

import msgspec

from kvferry.router.api import Answer, ApiError, Headers, Limits
from kvferry.router.choice import PARTS, Decision
from kvferry.router.clients import ClientRequest, require_method
from kvferry.router.guard import ClientGone, Quota

log = logging.getLogger(__name__)

# The page's names for the sources of flows that are not engines.
CLIENTS, POOL = "clients", "pool"
LOOK_SECONDS = 1.0  # between two looks at the engines, and so between two snapshots
_DECISIONS = 50
_OPTIONS = 6  # of one decision, the cheapest; 8 prefill and 8 decode engines give 72
_CHANGES = 100
_FAILURES = 20
_TEXT = 300  # characters of a sentence or a name
_FLOW_SECONDS = 60  # flows and outcomes are of the last minute
_HIT_SECONDS = 300  # hit rates and latencies vary more, so they are of the last five
_FLOWS = 1024  # the busiest; 32 prefill and 32 decode engines make as many
_LATENCIES = 2048  # of all engines together; sorting them takes 0.3 ms, once a second
_LATENCIES_EACH = 256
_POINT_SECONDS = 5.0  # a point of the curves; 120 of them are ten minutes
_POINTS = 120
_FAILED = ("engine_error", "unavailable", "deadline", "broken_stream", "stopped", "internal")

_RETRY_SECONDS = 10.0  # after a refusal; viewers stay long
_SOURCE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
_STATE_MARK = "<!--state-->"

K = TypeVar("K")
Severity = Literal["critical", "warning", "note"]


class CacheNow(msgspec.Struct, frozen=True):
    """One engine's cache, as far as the router knows it."""

    state: str  # live, replaying, estimated, lost
    blocks: int = 0
    hit_rate: float | None = None  # of the prompts that went there; `LiveState` fills it in


class EngineNow(msgspec.Struct, frozen=True, kw_only=True):
    """One engine at this moment. None: not known."""

    url: str
    roles: Sequence[str]
    up: bool
    was_up: bool = True  # or should be by now; until then, failed probes mean that it starts
    draining: bool = False
    trial: bool = False  # its requests failed; it gets few until one is answered
    reason: str = ""  # why it is down
    down_seconds: float | None = None  # for how long it has been
    in_flight: int = 0
    failures: int = 0  # of requests, since the router's start
    failed_probes: int = 0
    waiting_tokens: int | None = None
    running: int | None = None
    prefill_tokens_per_second: float | None = None
    step_ms: float | None = None
    cache: CacheNow | None = None


class RouterNow(msgspec.Struct, frozen=True, kw_only=True):
    """The router at this moment."""

    engines: Sequence[EngineNow]
    in_flight: int
    most_in_flight: int
    waiting: int  # requests that wait for a decode engine
    problems: Mapping[str, str] = {}  # warnings of other parts: a key, and what is wrong


@dataclass(slots=True)
class Placed:
    """One decision and its outcome. The request keeps it until the end."""

    number: int  # of this decision, since the start
    time: float
    request_id: str
    tokens: int  # 0: not known
    decision: Decision
    cached: int
    prefill: str | None  # that served it; retries may change engines
    decode: str
    answered: bool = False
    actual_ms: float | None = None
    outcome: str | None = None  # None: in flight

    def shown(self) -> dict[str, object]:
        chosen = self.decision.chosen
        return {
            "number": self.number,
            "time": self.time,
            "request_id": self.request_id,
            "tokens": self.tokens,
            "cached": self.cached,
            "chosen": _way(chosen.prefill, chosen.decode) | {"source": chosen.source},
            "served": _way(self.prefill, self.decode) if self.answered else None,
            "expected_ms": _ms(chosen.seconds),
            "other_ms": _other_ms(self.decision),
            "actual_ms": self.actual_ms,
            "outcome": self.outcome,
            "why": _cut(self.decision.why),
            "options": _options(self.decision),
        }


class Problem(msgspec.Struct, frozen=True):
    severity: Severity
    where: str  # an engine's URL, or empty: the router
    what: str
    since: float = 0.0  # wall clock


class Change(msgspec.Struct, frozen=True):
    time: float
    where: str
    what: str
    good: bool


class Point(msgspec.Struct):
    """Five seconds of the curves."""

    requests: int = 0  # that ended
    failed: int = 0
    p50: float | None = None  # milliseconds to the first token
    p99: float | None = None


class LiveState:
    """The state that the page shows. All calls come from the thread of the event loop."""

    def __init__(
        self,
        now: Callable[[], RouterNow],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._now = now
        self._clock = clock
        self._wall = wall
        self._begun = wall()
        self._number = 0
        self._decisions: deque[Placed] = deque(maxlen=_DECISIONS)
        # By source (an engine's URL, CLIENTS or POOL) and target.
        self._flow_requests = SlidingCounts[tuple[str, str]](_FLOW_SECONDS, clock)
        self._flow_tokens = SlidingCounts[tuple[str, str]](_FLOW_SECONDS, clock)
        self._outcomes = SlidingCounts[str](_FLOW_SECONDS, clock)
        self._hits = SlidingCounts[str](_HIT_SECONDS, clock)
        # By engine and what is counted: failures, failed_probes, tokens (computed or cached there),
        # cached.
        self._of_engines = SlidingCounts[tuple[str, str]](_HIT_SECONDS, clock)
        self._first_tokens = Recent(_HIT_SECONDS, _LATENCIES, clock)
        self._router_times = Recent(_HIT_SECONDS, _LATENCIES, clock)
        self._by_engine: dict[str, Recent] = {}
        self._changes: deque[Change] = deque(maxlen=_CHANGES)
        self._failed: deque[dict[str, object]] = deque(maxlen=_FAILURES)
        self._points: deque[Point] = deque(maxlen=_POINTS)
        self._point, self._point_begun = Point(), clock()  # the one that is being gathered
        self._engines: dict[str, EngineNow] | None = None  # at the last look
        self._problems: dict[str, Problem] = {}
        self._snapshot = b""  # is made when it is first asked for after a look
        self.published = asyncio.Event()  # is set, and replaced, at each look

    def decided(
        self,
        request_id: str,
        tokens: int,
        decision: Decision,
        router_seconds: float | None = None,
    ) -> Placed:
        """A request was placed. `router_seconds`: the time to read and place it."""
        chosen = decision.chosen
        self._number += 1
        placed = Placed(
            number=self._number,
            time=self._wall(),
            request_id=_cut(request_id),
            tokens=tokens,
            decision=decision,
            cached=chosen.cached_tokens,
            prefill=chosen.prefill,
            decode=chosen.decode,
        )
        self._decisions.append(placed)
        if router_seconds is not None:
            self._router_times.add(router_seconds)
        return placed

    def answered(
        self,
        placed: Placed,
        first_token_seconds: float | None,
        *,
        prefill: str | None,
        decode: str,
    ) -> None:
        """The answer begins. `first_token_seconds` is None where the answer is not streamed."""
        placed.prefill, placed.decode, placed.answered = prefill, decode, True
        tokens = placed.tokens
        if prefill is not None:
            self._flow(CLIENTS, prefill, tokens)
            self._flow(prefill, decode, tokens)
        else:
            self._flow(CLIENTS, decode, tokens)
        if first_token_seconds is not None:
            placed.actual_ms = _ms(first_token_seconds)
            self._first_tokens.add(first_token_seconds)
            for url in {decode, prefill} - {None}:
                if url in self._by_engine:  # else it was removed
                    self._by_engine[url].add(first_token_seconds)

    def served(self, placed: Placed, cached_tokens: int) -> None:
        """The answer is complete, and so many tokens of its prompt were cached."""
        placed.cached = cached = min(cached_tokens, placed.tokens)
        source, computer = placed.decision.chosen.source, placed.prefill or placed.decode
        if source == "pool" and cached:
            self._flow(POOL, computer, cached)
        # An engine may have had more than the router knew of.
        self._hits.add("local" if source == "none" else source, cached)
        self._hits.add("none", placed.tokens - cached)
        self._of_engines.add((computer, "tokens"), placed.tokens)
        self._of_engines.add((computer, "cached"), cached)

    def ended(
        self, outcome: str, placed: Placed | None, request_id: str = "", trail: Sequence[str] = ()
    ) -> None:
        """A request ended, placed or not. `trail`: the steps that the router took for it."""
        self._outcomes.add(outcome, 1)
        self._point.requests += 1
        if outcome in _FAILED:
            self._point.failed += 1
            failure = {"time": self._wall(), "request_id": _cut(request_id), "outcome": outcome}
            self._failed.append(failure | {"trail": _cut("; ".join(trail))})
        if placed is not None:
            placed.outcome = outcome

    async def run(self) -> None:
        """Look once a second, until cancelled."""
        while True:
            try:
                self.look()
            except Exception:  # without looks, the page would stand still and not say why
                log.exception("the router's page could not be brought up to date")
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Compare the engines with their last state, and wake the viewers."""
        now = self._now()
        engines = {engine.url: engine for engine in now.engines}
        wall = self._wall()
        for change in changes(self._engines, engines, wall):
            self._changes.append(change)
        before = self._engines or {}
        for url, engine in engines.items():
            if (old := before.get(url)) is None:
                continue
            # One that was removed and added again has failed less than before.
            failures = max(0, engine.failures - old.failures)
            self._of_engines.add((url, "failures"), failures)
            if old.was_up:
                probes = max(0, engine.failed_probes - old.failed_probes)
                self._of_engines.add((url, "failed_probes"), probes)
        recent = self._by_engine
        self._by_engine = {
            url: recent.get(url) or Recent(_HIT_SECONDS, _LATENCIES_EACH, self._clock)
            for url in engines
        }
        self._engines = engines
        if self._clock() - self._point_begun >= _POINT_SECONDS:
            ordered = self._first_tokens.since(self._point_begun)
            self._point.p50, self._point.p99 = (percentile_ms(ordered, p) for p in (50, 99))
            self._points.append(self._point)
            self._point, self._point_begun = Point(), self._clock()
        self._update_problems(now, wall)
        self._snapshot = b""
        self.published.set()
        self.published = asyncio.Event()

    def snapshot(self) -> bytes:
        """The whole state as JSON, at most a second old."""
        self._snapshot = self._snapshot or msgspec.json.encode(self._all())
        return self._snapshot

    def as_json(self) -> Answer:
        """The answer to /live."""
        kind = (b"content-type", b"application/json")
        return Answer(200, [*_HEADERS, kind], self.snapshot())

    def page(self) -> Answer:
        """The answer to /."""
        html = _SOURCE.replace(_STATE_MARK, _inside_html(self.snapshot()))
        kind = (b"content-type", b"text/html; charset=utf-8")
        policy = (b"content-security-policy", _POLICY.encode())
        return Answer(200, [*_HEADERS, kind, policy], html.encode())

    def problems(self) -> list[Problem]:
        """The worst first, of equal ones the latest first."""
        worst: dict[str, int] = {"critical": 0, "warning": 1, "note": 2}
        return sorted(self._problems.values(), key=lambda p: (worst[p.severity], -p.since, p.where))

    def state(self) -> str:
        """`down` if requests cannot be served, `degraded` if something is wrong, else `ok`."""
        severities = {problem.severity for problem in self._problems.values()}
        if "critical" in severities:
            return "down"
        return "degraded" if "warning" in severities else "ok"

    def _flow(self, source: str, target: str, tokens: int) -> None:
        self._flow_requests.add((source, target), 1)
        self._flow_tokens.add((source, target), tokens)

    def _update_problems(self, now: RouterNow, wall: float) -> None:
        found = engine_problems(now, wall) | request_problems(self._outcomes.totals(), now)
        for key, problem in found.items():
            old = self._problems.get(key)
            since = old.since if old is not None else problem.since or wall
            found[key] = msgspec.structs.replace(problem, since=since)
        self._problems = found

    def _all(self) -> dict[str, object]:
        now = self._now()
        hits, requests = self._hits.totals(), self._flow_requests.totals()
        tokens = self._flow_tokens.totals()
        busiest = sorted(requests, key=lambda key: (tokens[key], requests[key]), reverse=True)
        per_minute = 60 / _FLOW_SECONDS
        return {
            "time": self._wall(),
            "started": self._begun,
            "state": self.state(),
            "in_flight": now.in_flight,
            "waiting": now.waiting,
            "problems": self.problems(),
            "changes": list(reversed(self._changes)),
            "engines": [self._engine(engine) for engine in now.engines],
            "flows": [
                {
                    "from": flow[0],
                    "to": flow[1],
                    "requests_per_minute": requests[flow] * per_minute,
                    "tokens_per_minute": tokens[flow] * per_minute,
                }
                for flow in busiest[:_FLOWS]
            ],
            "hit_tokens": {s: hits[s] for s in ("local", "handover", "pool", "none")},
            "latency": {
                "first_token_ms": self._first_tokens.percentiles_ms(),
                "router_ms": self._router_times.percentiles_ms(),
            },
            "outcomes": (outcomes := dict(self._outcomes.totals())),  # of the last minute
            "failed": sum(outcomes.get(name, 0) for name in _FAILED),
            "points": list(self._points),
            "failures": list(reversed(self._failed)),
            "decisions": [placed.shown() for placed in reversed(self._decisions)],
        }

    def _engine(self, engine: EngineNow) -> dict[str, object]:
        url, recent = engine.url, self._by_engine.get(engine.url)
        counts = self._of_engines.totals()
        shown = msgspec.structs.asdict(engine)
        shown["reason"] = _cut(engine.reason)
        shown["first_token_ms"] = recent.percentiles_ms() if recent is not None else None
        if engine.cache is not None and (tokens := counts[url, "tokens"]):
            rate = round(counts[url, "cached"] / tokens, 4)
            shown["cache"] = msgspec.structs.replace(engine.cache, hit_rate=rate)
        shown["recent_failures"] = counts[url, "failures"]
        shown["recent_failed_probes"] = counts[url, "failed_probes"]
        return shown


# Problems. Pure functions; a key tells problems apart, so that each has its own beginning.


def engine_problems(now: RouterNow, wall: float) -> dict[str, Problem]:
    """Engines that are down, draining, or whose caches the router does not know."""
    found = {f"router {key}": Problem("warning", "", _cut(s)) for key, s in now.problems.items()}
    up = {role for engine in now.engines if engine.up for role in engine.roles}
    if "decode" not in up:
        what = "No decode engine is up. Requests wait, then get 503."
        found["decode"] = Problem("critical", "", what)
    elif "prefill" not in up and any("prefill" in engine.roles for engine in now.engines):
        what = "No prefill engine is up. Decode engines compute every prompt themselves."
        found["prefill"] = Problem("warning", "", what)
    for engine in now.engines:
        if not engine.up:
            since = 0.0 if engine.down_seconds is None else wall - engine.down_seconds
            rest = sum(other.up and set(engine.roles) <= set(other.roles) for other in now.engines)
            word = "Down" if engine.was_up else "Not up yet"
            what = f"{word}: {_cut(engine.reason)}. {rest or 'No'} other {'/'.join(engine.roles)} "
            what += "engine is up." if rest < 2 else "engines are up."
            # An engine that is being taken out may end.
            severity: Severity = "note" if engine.draining else "warning"
            found[f"down {engine.url}"] = Problem(severity, engine.url, what, since)
        elif engine.trial:
            what = "On trial: probes are good, but requests failed. It gets few until one works."
            found[f"trial {engine.url}"] = Problem("warning", engine.url, what)
        elif engine.draining:
            what = f"Draining: {engine.in_flight} requests left, new ones go elsewhere."
            found[f"drain {engine.url}"] = Problem("note", engine.url, what)
        state = engine.cache.state if engine.cache is not None and engine.up else ""
        if state == "lost":
            what = "Cache events are lost. Its cache is estimated from what was sent there."
            found[f"cache {engine.url}"] = Problem("warning", engine.url, what)
        elif state == "replaying":
            what = "Cache events were missed and are being replayed."
            found[f"cache {engine.url}"] = Problem("note", engine.url, what)
    return found


def request_problems(outcomes: Mapping[str, int], now: RouterNow) -> dict[str, Problem]:
    """Problems of the requests of the last minute."""
    found: dict[str, Problem] = {}
    ended = sum(outcomes.values())
    failed = {name: count for name in _FAILED if (count := outcomes.get(name, 0))}
    if failed:
        kinds = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in failed.items())
        what = f"{sum(failed.values())} of {ended} requests failed in the last minute: {kinds}."
        found["failed"] = Problem("warning", "", what)
    if busy := outcomes.get("busy", 0):
        full = f"{now.in_flight} of {now.most_in_flight} places are taken"
        what = f"{busy} requests were refused with 429 in the last minute; {full}."
        found["busy"] = Problem("warning", "", what)
    if unknown := outcomes.get("unauthorized", 0):
        what = f"{unknown} requests in the last minute had no key, or a wrong one."
        found["unauthorized"] = Problem("note", "", what)
    if now.waiting:
        what = f"{now.waiting} requests wait for a decode engine."
        found["waiting"] = Problem("warning", "", what)
    return found


def changes(
    before: Mapping[str, EngineNow] | None, after: Mapping[str, EngineNow], wall: float
) -> list[Change]:
    """Changes of the engines since the last look; `before` is None at the first look."""
    if before is None:
        return [Change(wall, "", f"The router started with {len(after)} engines.", True)]
    found: list[Change] = []
    for url, new in after.items():
        old = before.get(url)
        if old is None:
            found.append(Change(wall, url, f"added for {' and '.join(new.roles)}", True))
            continue
        if old.up != new.up:
            what = "up" if new.up else f"down: {_cut(new.reason)}"
            if new.up and old.down_seconds is not None:
                what = f"up, after {old.down_seconds:.0f} s"
            found.append(Change(wall, url, what, new.up))
        if old.draining != new.draining:
            what = "draining" if new.draining else "takes requests again"
            found.append(Change(wall, url, what, True))  # an operator's order, and no trouble
        if set(old.roles) != set(new.roles):
            found.append(Change(wall, url, f"is now for {' and '.join(new.roles)}", True))
        states = [engine.cache.state if engine.cache else "not known" for engine in (old, new)]
        if states[0] != states[1]:
            what = f"cache view {states[1]}, was {states[0]}"
            found.append(Change(wall, url, what, states[1] not in ("lost", "replaying")))
    found += [Change(wall, url, "removed", True) for url in before if url not in after]
    return found


# Bounded memories


class SlidingCounts(Generic[K]):
    """Counts by key over the last `seconds`, to the second."""

    def __init__(self, seconds: int, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._buckets: deque[tuple[int, dict[K, int]]] = deque()
        self._second = -1  # of the last bucket
        self._bucket: dict[K, int] = {}
        self._totals: Counter[K] = Counter()

    def add(self, key: K, amount: int) -> None:
        second = int(self._clock())
        if second != self._second:
            self.totals()
            self._second, self._bucket = second, {}
            self._buckets.append((second, self._bucket))
        self._bucket[key] = self._bucket.get(key, 0) + amount
        self._totals[key] += amount

    def totals(self) -> Counter[K]:
        oldest = self._clock() - self._seconds
        while self._buckets and self._buckets[0][0] < oldest:
            for key, amount in self._buckets.popleft()[1].items():
                self._totals[key] -= amount
                if not self._totals[key]:
                    del self._totals[key]
        return self._totals


class Recent:
    """The last durations: at most `most` of them, none older than `seconds`."""

    def __init__(self, seconds: int, most: int, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._values: deque[tuple[float, float]] = deque(maxlen=most)

    def add(self, duration_seconds: float) -> None:
        self._values.append((self._clock(), duration_seconds))

    def since(self, oldest: float) -> list[float]:
        """The smallest first."""
        return sorted([duration for when, duration in self._values if when >= oldest])

    def percentiles_ms(self) -> dict[str, float | None]:
        values = self.since(self._clock() - self._seconds)
        return {f"p{share}": percentile_ms(values, share) for share in (50, 90, 99)}


def percentile_ms(ordered: Sequence[float], share: int) -> float | None:
    """The smallest of the ordered seconds that `share` percent do not exceed, in milliseconds."""
    if not ordered:
        return None
    return _ms(ordered[math.ceil(len(ordered) * share / 100) - 1])


def _options(decision: Decision) -> list[dict[str, object]]:
    """The cheapest options, and the chosen one if it is none of them."""
    options = list(decision.options[:_OPTIONS])
    if decision.options and decision.chosen not in options:
        options[-1] = decision.chosen
    return [
        _way(option.prefill, option.decode)
        | {
            "expected_ms": _ms(option.seconds),
            "parts": {part: _ms(option.parts[part]) for part in PARTS if option.parts.get(part)},
            "cached": option.cached_tokens,
            "source": option.source,
            "chosen": option == decision.chosen,
        }
        for option in options
    ]


def _other_ms(decision: Decision) -> float | None:
    """Expected time of the best option of the other kind, with or without a hand-over, or None."""
    alone = decision.chosen.prefill is None
    others = (o.seconds for o in decision.options if (o.prefill is None) is not alone)
    return _ms(min(others, default=math.nan))


def _way(prefill: str | None, decode: str) -> dict[str, object]:
    return {"prefill": prefill, "decode": decode}


def _ms(seconds: float) -> float | None:
    """Milliseconds to a hundredth; None if the time is not known."""
    return round(seconds * 1000, 2) if math.isfinite(seconds) else None


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"


# Serving it


class LiveStream:
    """The route /live/stream."""

    def __init__(self, live: LiveState, limits: Limits) -> None:
        self._live = live
        self.viewers = Quota(limits.max_viewers, limits.address_share)

    async def serve(self, request: ClientRequest) -> None:
        viewers = ("viewers of the page", "too_many_viewers", _RETRY_SECONDS)
        try:
            require_method(request, ("GET",))
            with self.viewers.place(request.address, *viewers):
                await self._show(request)
        except ApiError as error:
            request.answer(error.answer)

    async def _show(self, request: ClientRequest) -> None:
        """Send each new state, until the viewer is gone, which cancels this."""
        try:
            events = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
            request.begin(200, [*_HEADERS, *events])
            while True:
                published = self._live.published
                request.write(b"data: %s\n\n" % self._live.snapshot())
                await request.drained()
                await published.wait()
        except ClientGone:
            pass
        except Exception:  # the answer has begun, so the connection's end must say it
            log.exception("the stream of a viewer of the page at %s broke", request.address)
            request.abort()


def _hash_of(tag: str) -> str:
    """The content-security-policy's name of the page's only style or script."""
    found = re.search(rf"<{tag}>(.*?)</{tag}>", _SOURCE, re.DOTALL)
    assert found is not None
    digest = hashlib.sha256(found[1].encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


_POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src {_hash_of('style')}",
        f"script-src {_hash_of('script')}",
        "connect-src 'self'",
        "require-trusted-types-for 'script'",  # the browser refuses any text as HTML
        "trusted-types 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS: Headers = [
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


def _inside_html(json: bytes) -> str:
    """Escape characters that could end an element; JSON has them in strings only."""
    text = json.decode()
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text
