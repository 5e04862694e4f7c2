"""What the router's page shows: bounds, problems, the stream's viewers, and hostile texts."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from kvferry.router import live as live_module
from kvferry.router.api import Answer, Limits
from kvferry.router.choice import PARTS, Decision, Option
from kvferry.router.guard import ClientGone
from kvferry.router.live import (
    CacheNow,
    EngineNow,
    LiveState,
    LiveStream,
    Recent,
    RouterNow,
    SlidingCounts,
)
from live_fleet import Fleet, Served

P, D, E = "http://p:1", "http://d:2", "http://e:3"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&\u2028'\"<!--json-->"


class World:
    """A router's state that a test sets, with a clock that a test moves."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.asked = 0
        self.broken = False  # whether it cannot be looked at
        self.engines: dict[str, EngineNow] = {}
        self.waiting = 0
        self.said: dict[str, str] = {}
        for url, role in ((P, "prefill"), (D, "decode"), (E, "decode")):
            self.set(url, roles=[role], up=True)
        self.live = LiveState(self.now, lambda: self.time, lambda: self.time + 1e9)

    def set(self, url: str, **fields: Any) -> None:
        old = self.engines.get(url)
        if old is None:
            self.engines[url] = EngineNow(url=url, **fields)
        else:
            self.engines[url] = msgspec.structs.replace(old, **fields)

    def now(self) -> RouterNow:
        if self.broken:
            raise ZeroDivisionError
        self.asked += 1
        return RouterNow(
            engines=list(self.engines.values()),
            in_flight=4,
            most_in_flight=8,
            waiting=self.waiting,
            problems=self.said,
        )

    def after(self, seconds: float) -> dict[str, Any]:
        """Look once, after so many seconds; what is shown then."""
        self.time += seconds
        self.live.look()
        return json.loads(self.live.snapshot())

    def problems(self, seconds: float = 1.0) -> dict[str, tuple[str, float]]:
        """By what they say: how bad, and for how long."""
        shown = self.after(seconds)
        return {
            f"{p['where']} {p['what']}".strip(): (p["severity"], shown["time"] - p["since"])
            for p in shown["problems"]
        }


def option(
    prefill: str | None = P,
    decode: str = D,
    seconds: float = 0.2,
    cached: int = 0,
    source: str = "",
) -> Option:
    parts = dict.fromkeys(PARTS, seconds / len(PARTS))
    kind: Any = source or ("handover" if cached else "none")
    return Option(decode, prefill, seconds, parts, cached, kind)


def decision(*options: Option, why: str = "it is the cheapest") -> Decision:
    return Decision(options[0], options, why)


def test_decisions_are_few_and_the_newest_come_first() -> None:
    world = World()
    for i in range(200):
        world.live.decided(f"r{i}" * 500, 10, decision(option()))
    shown = world.after(1)["decisions"]
    assert [d["number"] for d in shown] == list(range(200, 150, -1))
    assert all(len(d["request_id"]) <= 300 for d in shown)


def test_of_many_options_the_cheapest_are_shown_and_the_chosen_one() -> None:
    world = World()
    options = tuple(option(None, f"http://d:{i}", i / 10 + 0.1) for i in range(40))
    world.live.decided("a", 10, Decision(options[0], options, "w" * 5000))
    world.live.decided("b", 10, Decision(options[30], options, ""))
    second, first = world.after(1)["decisions"]
    assert [o["decode"] for o in first["options"]] == [f"http://d:{i}" for i in range(6)]
    assert [o["chosen"] for o in first["options"]] == [True] + 5 * [False]
    assert len(first["why"]) == 300
    assert [o["decode"] for o in second["options"]][-2:] == ["http://d:4", "http://d:30"]
    assert second["options"][-1]["chosen"]
    assert second["expected_ms"] == 3100.0
    assert sum(second["options"][0]["parts"].values()) == pytest.approx(100)


def test_a_decision_has_the_best_of_the_other_ways() -> None:
    world = World()
    alone, handed = option(None, D, 0.035), option(P, D, 0.402)
    many = [option(None, D, 0.1 + i / 1000) for i in range(9)]
    world.live.decided("a", 10, decision(alone, handed, option(P, E, 0.5)))
    world.live.decided("b", 10, decision(handed, alone))
    world.live.decided("c", 10, decision(*many, handed))  # which is not among the six shown
    world.live.decided("d", 10, decision(alone))
    world.live.decided("e", 10, Decision(option(None, D, math.nan), (), "by load"))
    shown = world.after(1)["decisions"]
    assert [d["other_ms"] for d in shown] == [None, None, 402, 35, 402]


def test_windows_forget() -> None:
    now = 0.0
    counts = SlidingCounts[str](60, lambda: now)
    for second in range(120):
        now = float(second)
        counts.add("a", 2)
        counts.add("zero", 0)
    assert counts.totals()["a"] == 2 * 61  # of seconds 59 to 119
    now = 179.0
    assert counts.totals()["a"] == 2
    now = 181.0
    assert not counts.totals()
    now = 300.0
    counts.add("later", 1)
    assert dict(counts.totals()) == {"later": 1}


def test_percentiles_are_of_the_last_answers() -> None:
    now = 0.0
    recent = Recent(300, 100, lambda: now)
    assert recent.percentiles_ms() == {"p50": None, "p90": None, "p99": None}
    recent.add(0.004)
    assert recent.percentiles_ms() == {"p50": 4, "p90": 4, "p99": 4}
    for i in range(300, 0, -1):
        recent.add(i / 1000)
    assert recent.percentiles_ms() == {"p50": 50, "p90": 90, "p99": 99}
    now = 301.0
    recent.add(0.007)
    assert recent.percentiles_ms() == {"p50": 7, "p90": 7, "p99": 7}


def test_flows_and_hits_are_of_what_happened() -> None:
    world = World()
    for url in (P, D, E):
        world.set(url, cache=CacheNow("live", 5))
    world.after(1)
    live = world.live
    both = live.decided("a", 1000, decision(option(P, D, cached=400)), router_seconds=0.002)
    live.answered(both, 0.25, prefill=P, decode=E)  # D was gone
    alone = live.decided("b", 100, decision(option(None, D, cached=80, source="pool")))
    live.answered(alone, None, prefill=None, decode=D)
    live.served(both, 400)
    live.served(alone, 60)
    unknown = live.decided("c", 0, decision(option(None, D, math.nan)))
    live.answered(unknown, 0.05, prefill=None, decode=D)
    live.served(unknown, 7)  # of which the router has not counted any
    live.ended("ok", both)
    shown = world.after(1)
    flows = {
        (f["from"], f["to"]): (f["requests_per_minute"], f["tokens_per_minute"])
        for f in shown["flows"]
    }
    assert flows == {
        ("clients", P): (1, 1000),
        (P, E): (1, 1000),
        ("clients", D): (2, 100),
        ("pool", D): (1, 60),
    }
    assert shown["hit_tokens"] == {"local": 0, "handover": 400, "pool": 60, "none": 640}
    third, second, first = shown["decisions"]
    assert first["chosen"] == {"prefill": P, "decode": D, "source": "handover"}
    assert first["served"] == {"prefill": P, "decode": E}
    assert (first["actual_ms"], first["outcome"]) == (250, "ok")
    assert (second["actual_ms"], second["outcome"], second["cached"]) == (None, None, 60)
    assert third["expected_ms"] is None
    assert shown["latency"]["first_token_ms"] == {"p50": 50, "p90": 250, "p99": 250}
    assert shown["latency"]["router_ms"]["p99"] == 2
    rates = {e["url"]: e["cache"]["hit_rate"] for e in shown["engines"]}
    assert rates == {P: 0.4, D: 0.6, E: None}
    medians = {e["url"]: e["first_token_ms"]["p50"] for e in shown["engines"]}
    assert medians == {P: 250, D: 50, E: 250}
    assert world.after(400)["flows"] == []
    assert world.after(1)["hit_tokens"] == dict.fromkeys(("local", "handover", "pool", "none"), 0)


def test_of_many_flows_the_busiest_are_shown() -> None:
    world = World()
    for number in [*range(2000), 1999]:
        live = world.live.decided("r", 10, decision(option(None, f"http://d:{number}")))
        world.live.answered(live, 0.1, prefill=None, decode=f"http://d:{number}")
    flows = world.after(1)["flows"]
    assert len(flows) == 1024 and flows[0]["to"] == "http://d:1999"


def test_what_is_wrong_with_engines_and_since_when() -> None:
    world = World()
    assert world.problems() == {}
    assert world.live.state() == "ok"
    world.set(D, up=False, reason="cannot connect", down_seconds=30.0)
    assert world.problems() == {
        f"{D} Down: cannot connect. 1 other decode engine is up.": ("warning", 30)
    }
    assert world.live.state() == "degraded"
    world.set(D, reason="silent for 2 s", down_seconds=31.0)  # the same problem
    assert world.problems() == {
        f"{D} Down: silent for 2 s. 1 other decode engine is up.": ("warning", 31)
    }
    world.set(E, up=False, reason="silent")
    found = world.problems()
    assert found["No decode engine is up. Requests wait, then get 503."] == ("critical", 0)
    assert found[f"{E} Down: silent. No other decode engine is up."] == ("warning", 0)
    assert next(iter(found)).startswith("No decode")  # the worst comes first
    assert world.live.state() == "down"
    assert world.problems(5)["No decode engine is up. Requests wait, then get 503."][1] == 5
    for url in (D, E):
        world.set(url, up=True, reason="", down_seconds=None)
    world.set(P, up=False, draining=True, reason="gone")
    found = world.problems()
    assert {severity for severity, _ in found.values()} == {"warning", "note"}
    assert any(what.startswith("No prefill engine is up.") for what in found)
    world.set(P, up=True, draining=False)
    world.set(D, cache=CacheNow("lost"))
    world.set(E, draining=True, in_flight=3)
    assert set(world.problems()) == {
        f"{D} Cache events are lost. Its cache is estimated from what was sent there.",
        f"{E} Draining: 3 requests left, new ones go elsewhere.",
    }
    world.set(D, cache=CacheNow("live"))
    world.set(E, draining=False, trial=True)
    world.said = {"fleet": "fleet.toml is not TOML"}
    assert set(world.problems()) == {
        f"{E} On trial: probes are good, but requests failed. It gets few until one works.",
        "fleet.toml is not TOML",
    }
    world.set(E, trial=False)
    world.said = {}
    assert world.problems() == {}


def test_what_is_wrong_with_requests() -> None:
    world = World()
    world.after(1)
    for outcome in ["ok"] * 6 + ["engine_error"] * 3 + ["broken_stream", "busy", "unauthorized"]:
        world.live.ended(outcome, None)
    world.waiting = 2
    assert world.problems() == {
        "4 of 12 requests failed in the last minute: 3 engine error, 1 broken stream.": (
            "warning",
            0,
        ),
        "1 requests were refused with 429 in the last minute; 4 of 8 places are taken.": (
            "warning",
            0,
        ),
        "2 requests wait for a decode engine.": ("warning", 0),
        "1 requests in the last minute had no key, or a wrong one.": ("note", 0),
    }
    world.live.ended("engine_error", None)
    world.waiting = 0
    # The numbers change, the problem stays.
    found = world.problems(9)
    assert [since for _, since in found.values()] == [9, 9, 9]
    assert world.problems(120) == {}


def test_the_last_failures_say_what_was_done() -> None:
    world = World()
    world.live.ended("ok", None, "good", ["decode http://d:2 200"])
    world.live.ended("client_error", None, "theirs", ["decode http://d:2 400"])
    for i in range(30):
        world.live.ended("engine_error", None, f"bad-{i}", [f"decode engine {D}: gone", "x" * 900])
    shown = world.after(1)["failures"]
    assert [f["request_id"] for f in shown] == [f"bad-{i}" for i in range(29, 9, -1)]
    assert shown[0]["outcome"] == "engine_error"
    assert shown[0]["trail"].startswith(f"decode engine {D}: gone; xxx")
    assert len(shown[0]["trail"]) == 300


def test_curves_are_of_ten_minutes() -> None:
    world = World()
    for second in range(13 * 60):
        placed = world.live.decided("a", 10, decision(option()))
        world.live.answered(placed, 0.4 if second < 400 else 1.6, prefill=P, decode=D)
        world.after(1)
    points = world.after(1)["points"]
    assert len(points) == 120
    assert (points[0]["p50"], points[-1]["p50"]) == (400, 1600)


def test_changes_are_told_once_and_the_last_ones_kept() -> None:
    world = World()
    said: Callable[[], list[tuple[str, str, bool]]] = lambda: [  # noqa: E731
        (c["where"], c["what"], c["good"]) for c in world.after(1)["changes"]
    ]
    assert said() == [("", "The router started with 3 engines.", True)]
    world.set(D, up=False, reason="cannot connect", down_seconds=0.0)
    assert said()[0] == (D, "down: cannot connect", False)
    world.set(D, down_seconds=12.0)
    assert len(said()) == 2
    world.set(D, up=True, down_seconds=None, reason="")
    assert said()[0] == (D, "up, after 12 s", True)
    world.set(E, draining=True, cache=CacheNow("live"))
    assert said()[:2] == [(E, "cache view live, was not known", True), (E, "draining", True)]
    world.set(E, draining=False, cache=CacheNow("lost"), roles=["prefill", "decode"])
    assert said()[:3] == [
        (E, "cache view lost, was live", False),
        (E, "is now for prefill and decode", True),
        (E, "takes requests again", True),
    ]
    del world.engines[E]
    world.set("http://new:4", roles=["decode"], up=True)
    assert said()[:2] == [(E, "removed", True), ("http://new:4", "added for decode", True)]
    for _ in range(100):
        world.set(D, up=not world.engines[D].up, reason="x" * 1000)
        changes = said()
    assert len(changes) == 100
    assert max(len(what) for _, what, _ in changes) < 320
    assert len(world.after(700)["changes"]) == 100


def test_recent_failures_of_an_engine_are_counted() -> None:
    world = World()
    world.set(D, failures=7, failed_probes=3)  # before the first look: not known when
    world.after(1)
    world.set(D, failures=9, failed_probes=8)
    shown = world.after(1)["engines"]
    recent = {e["url"]: (e["recent_failures"], e["recent_failed_probes"]) for e in shown}
    assert recent == {P: (0, 0), D: (2, 5), E: (0, 0)}
    late = world.after(301)["engines"][1]
    assert (late["recent_failures"], late["recent_failed_probes"]) == (0, 0)
    # an engine that was removed and added again has failed less than before
    world.set(D, failures=1, failed_probes=0)
    again = world.after(1)["engines"][1]
    assert (again["recent_failures"], again["recent_failed_probes"]) == (0, 0)


def test_an_engine_that_never_was_up_has_not_failed() -> None:
    world = World()
    world.set(D, up=False, was_up=False, reason="cannot connect", failed_probes=1)
    world.after(1)
    world.set(D, failed_probes=5)
    assert list(world.problems()) == [
        f"{D} Not up yet: cannot connect. 1 other decode engine is up."
    ]
    world.set(D, up=True, was_up=True, reason="", failed_probes=6)
    assert world.after(1)["engines"][1]["recent_failed_probes"] == 0
    world.set(D, up=False, reason="silent for 2 s", failed_probes=8)
    assert list(world.problems()) == [f"{D} Down: silent for 2 s. 1 other decode engine is up."]
    assert world.after(1)["engines"][1]["recent_failed_probes"] == 2


def test_one_snapshot_serves_all_readers() -> None:
    world = World()
    world.after(1)
    asked, first = world.asked, world.live.snapshot()
    assert all(world.live.snapshot() is first for _ in range(1000))
    assert world.asked == asked
    world.time += 1
    world.live.look()
    assert world.live.snapshot() != first


def test_the_state_has_what_the_page_reads() -> None:
    fleet = Fleet()
    fleet.pass_time(90)
    fleet.live.decided("x", 5, decision(option()))
    fleet.live.look()
    shown = json.loads(fleet.live.snapshot())
    engine = {"url", "roles", "up", "draining", "reason", "in_flight", "waiting_tokens"}
    engine |= {"running", "prefill_tokens_per_second", "step_ms", "cache"}
    engine |= {"recent_failures", "recent_failed_probes"}
    assert engine <= set(shown["engines"][0])
    assert set(shown["engines"][0]["cache"]) == {"state", "blocks", "hit_rate"}
    assert set(shown["flows"][0]) == {"from", "to", "requests_per_minute", "tokens_per_minute"}
    assert set(shown["hit_tokens"]) == {"local", "handover", "pool", "none"}
    assert set(shown["latency"]["first_token_ms"]) == {"p50", "p90", "p99"}
    fields = {"time", "request_id", "tokens", "cached", "chosen", "expected_ms", "actual_ms", "why"}
    assert fields <= set(shown["decisions"][0])
    assert {"prefill", "decode", "expected_ms", "parts"} <= set(shown["decisions"][0]["options"][0])
    assert len(fleet.live.snapshot()) < 200_000


class Elements(HTMLParser):
    """All elements of a page with their attributes, and the text inside scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self._now = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._now = tag
        if tag in self.inside:
            self.inside[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._now = ""

    def handle_data(self, data: str) -> None:
        if self._now in self.inside:
            self.inside[self._now][-1] += data


def test_hostile_texts_stay_text() -> None:
    def page_of(text: str) -> tuple[Elements, Any]:
        fleet = Fleet(prefill=1, decode=1)
        for url in list(fleet.engines):
            engine = fleet.engines.pop(url)
            evil = msgspec.structs.replace(engine, url=url + text, reason=text, up=False)
            fleet.engines[url + text] = evil
            fleet.down_at[url + text] = fleet.clock()
        fleet.live.decided(text, 5, decision(option(text, text), why=text))
        fleet.live.look()
        served = Served(fleet, traffic=False)
        answer = httpx.get(served.url, trust_env=False)
        served.stop()
        page = Elements()
        page.feed(answer.text)
        return page, (answer, json.loads(fleet.live.snapshot()))

    evil, (answer, state) = page_of(HOSTILE)
    good, _ = page_of("fine")
    assert [tag for tag, _ in evil.found] == [tag for tag, _ in good.found]
    code, embedded = evil.inside["script"]
    assert code == good.inside["script"][0]
    shown = json.loads(embedded)
    assert shown["decisions"][0]["request_id"] == HOSTILE
    assert shown["engines"] == state["engines"]
    # What the policy allows is exactly the page's own style and script.
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy and policy.startswith("default-src 'none';")
    assert "require-trusted-types-for 'script'" in policy
    for text, kind in ((code, "script"), (evil.inside["style"][0], "style")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    for tag, attributes in evil.found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
    assert "innerHTML" not in code and "insertAdjacentHTML" not in code
    assert answer.headers["cache-control"] == "no-store"


@dataclass
class Viewer:
    """What the stream needs of a viewer's request. `task` serves it."""

    address: str = "127.0.0.1"
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    events: list[bytes] = field(default_factory=list)
    reads: asyncio.Event = field(default_factory=asyncio.Event)
    head: Any = field(default_factory=lambda: SimpleNamespace(method="GET"))

    def begin(self, status: int, headers: Any) -> None:
        self.status, self.headers = status, dict(headers)

    def write(self, data: bytes) -> None:
        self.events.append(data)

    async def drained(self) -> None:
        await self.reads.wait()

    def answer(self, answer: Answer) -> None:
        self.begin(answer.status, answer.headers)
        self.events.append(answer.body)

    def abort(self) -> None:
        self.status = -1

    def served_by(self, stream: LiveStream, reads: bool = True) -> asyncio.Task[None]:
        if reads:
            self.reads.set()
        return asyncio.create_task(stream.serve(self))  # type: ignore[arg-type]


async def gone(*tasks: asyncio.Task[None]) -> None:
    """As a connection does when its client leaves."""
    for task in tasks:
        task.cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def test_all_viewers_get_the_same_states() -> None:
    async def run() -> None:
        world = World()
        stream = LiveStream(world.live, Limits())
        good, other, slow, deaf = viewers = [Viewer() for _ in range(4)]
        tasks = [viewer.served_by(stream, viewer is not deaf) for viewer in viewers]
        await until(lambda: stream.viewers.taken == 4 and slow.events)
        slow.reads.clear()
        for number in range(1, 4):
            await until(lambda n=number: len(good.events) == len(other.events) == n)
            world.after(1)
        await until(lambda: len(other.events) == 4)
        assert good.status == 200
        assert good.headers[b"content-type"] == b"text/event-stream"
        assert good.events[:4] == other.events[:4]
        assert len(set(good.events)) == 4
        for event in good.events:
            assert event.startswith(b"data: {") and event.endswith(b"}\n\n")
            assert event.count(b"\n") == 2
        assert (len(slow.events), len(deaf.events)) == (2, 1)  # the last one was not taken
        await gone(*tasks)
        assert stream.viewers.taken == 0

    asyncio.run(run())


def test_a_slow_viewer_misses_states_and_nothing_is_kept_for_it() -> None:
    async def run() -> None:
        world = World()
        stream = LiveStream(world.live, Limits())
        viewer = Viewer()
        task = viewer.served_by(stream)
        await until(lambda: len(viewer.events) == 1)
        viewer.reads.clear()
        for _ in range(50):
            world.after(1)
            await asyncio.sleep(0)
        assert len(viewer.events) == 2  # one that it has not read
        viewer.reads.set()
        await until(lambda: len(viewer.events) >= 3)
        world.after(1)
        latest = world.live.snapshot()
        await until(lambda: viewer.events[-1] == b"data: %s\n\n" % latest)
        assert len(viewer.events) <= 4
        await gone(task)

    asyncio.run(run())


def test_viewers_have_places_and_give_them_back() -> None:
    async def run() -> None:
        world = World()
        stream = LiveStream(world.live, Limits(max_viewers=4))  # two for one address
        viewers = [Viewer("10.0.0.1") for _ in range(3)]
        viewers += [Viewer("10.0.0.2"), Viewer("10.0.0.3"), Viewer("10.0.0.4")]
        tasks = [viewer.served_by(stream) for viewer in viewers]
        await until(lambda: all(v.status for v in viewers))
        assert [v.status for v in viewers] == [200, 200, 429, 200, 200, 429]
        assert viewers[2].headers[b"retry-after"] == b"10"
        assert b"too_many_viewers" in viewers[2].events[0]
        await gone(tasks[0])
        late = Viewer("10.0.0.4")
        tasks.append(late.served_by(stream))
        await until(lambda: late.status == 200)
        await gone(*tasks)
        assert stream.viewers.taken == 0

    asyncio.run(run())


def test_a_stream_that_breaks_ends_its_connection_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        world = World()
        stream = LiveStream(world.live, Limits())
        broken, left, good = viewers = [Viewer() for _ in range(3)]
        tasks = [viewer.served_by(stream) for viewer in viewers]
        await until(lambda: all(viewer.events for viewer in viewers))

        def fail(error: Exception) -> Callable[[bytes], None]:
            def write(data: bytes) -> None:
                raise error

            return write

        broken.write = fail(ZeroDivisionError())  # type: ignore[method-assign]
        left.write = fail(ClientGone())  # type: ignore[method-assign]
        world.after(1)
        await until(lambda: tasks[0].done() and tasks[1].done() and len(good.events) == 2)
        assert [viewer.status for viewer in viewers] == [-1, 200, 200]
        assert not tasks[0].exception() and not tasks[1].exception()
        assert caplog.text.count("the stream of a viewer of the page at 127.0.0.1 broke") == 1
        assert "ZeroDivisionError" in caplog.text and stream.viewers.taken == 1
        await gone(*tasks)

    asyncio.run(run())


def test_a_look_that_fails_does_not_end_the_page(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live_module, "LOOK_SECONDS", 0.01)

    async def run() -> None:
        world = World()
        task = asyncio.create_task(world.live.run())
        world.broken = True
        await until(lambda: "could not be brought up to date" in caplog.text)
        world.broken = False
        asked = world.asked
        await until(lambda: world.asked > asked)
        await gone(task)

    asyncio.run(run())
