"""The router's traces, with OpenTelemetry's SDK, its exporter, and a collector on loopback."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs the extra 'otel'")

from kvferry.router.choice import PARTS
from kvferry.router.spans import ENDPOINTS, RouterSpans
from otlp_collector import Collector, attributes
from router_cluster import CHUNKS, Cluster, cluster, quick
from waiting import wait_until

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{CLIENT}-01", "tracestate": "vendor=1"}
ERROR = 2  # a status, in the protocol
STARTED = """
import asyncio, sys
from kvferry.router.api import RouterConfig
from kvferry.router.app import RouterApp

async def start():
    app = RouterApp(RouterConfig((), ("http://127.0.0.1:1",)))
    async with app.running():
        assert app.router.spans is None

asyncio.run(start())
sys.exit(any(name.startswith("opentelemetry") for name in sys.modules))
"""


@pytest.fixture(autouse=True)
def no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """OpenTelemetry's threads draw from `random`, which Hypothesis does not allow in other tests of
    this process."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")  # seconds, of an export that gets nowhere
    before = set(threading.enumerate())
    yield
    wait_until(lambda: not set(threading.enumerate()) - before, 60, "a thread is left")


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", made.endpoint)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds between two batches
    before = set(threading.enumerate())
    yield made
    # The SDK sends what is left before its thread ends, and tries again for long where it cannot.
    made.go_on.set()
    wait_until(lambda: not set(threading.enumerate()) - before, 60, "a sender is left")
    made.close()


def trace(collector: Collector, count: int, trace_id: str = TRACE) -> list[Any]:
    """The spans of one trace, as soon as there are `count`; in the order in which they began."""

    def found() -> list[Any]:
        return [span for span in collector.spans if span.trace_id.hex() == trace_id]

    wait_until(lambda: len(found()) >= count)
    spans = sorted(found(), key=lambda span: span.start_time_unix_nano)
    assert len(spans) == count, [span.name for span in spans]
    return spans


def test_a_stream_is_a_span_with_its_parts(collector: Collector) -> None:
    with cluster() as c:
        assert c.complete(HEADERS, stream=True).status_code == 200
        root, *parts = trace(collector, 5)
        assert root.name == "POST /v1/completions"
        assert root.parent_span_id.hex() == CLIENT
        assert [part.name for part in parts] == ["place", "prefill", "decode", "stream"]
        times = [root.start_time_unix_nano]
        for part in parts:
            assert part.parent_span_id == root.span_id
            times += [part.start_time_unix_nano, part.end_time_unix_nano]
        assert [*times, root.end_time_unix_nano] == sorted([*times, root.end_time_unix_nano])
        assert collector.services == {"kvferry-router"}

        (p,), (d,) = c.prefill[0].seen, c.decode[0].seen
        for seen, part in ((p, parts[1]), (d, parts[2])):
            assert seen.headers["traceparent"] == f"00-{TRACE}-{part.span_id.hex()}-01"
            assert seen.headers["tracestate"] == "vendor=1"
        p_url, d_url = c.servers["p0"].url, c.servers["d0"].url
        assert [attributes(part).get("server.address") for part in parts[1:3]] == [p_url, d_url]
        told = attributes(root)
        assert told["kvferry.outcome"] == "ok" and told["http.response.status_code"] == 200
        assert told["kvferry.request_id"] == p.headers["x-request-id"]
        assert (told["kvferry.prefill"], told["kvferry.decode"]) == (p_url, d_url)
        assert "kvferry.expected_seconds" not in told  # it was placed by load


def test_a_request_without_a_trace_begins_one(collector: Collector) -> None:
    with cluster(prefill=0) as c:
        assert c.complete().status_code == 200
        (seen,) = c.decode[0].seen
        trace_id, span_id = seen.headers["traceparent"].split("-")[1:3]
        root, place, decode = trace(collector, 3, trace_id)
        assert not root.parent_span_id and decode.span_id.hex() == span_id
        assert (place.name, decode.name) == ("place", "decode")


def test_the_figures_of_the_decision(collector: Collector) -> None:
    with cluster(place="cost") as c:
        got = c.complete(HEADERS, prompt=list(range(100)), stream=True)
        assert "alone" in got.headers["x-kvferry-decision"]
        root, *parts = trace(collector, 4)
        assert [part.name for part in parts] == ["place", "decode", "stream"]
        told = attributes(root)
        assert (told["kvferry.tokens"], told["kvferry.cached_tokens"]) == (100, 0)
        assert (told["kvferry.source"], told["kvferry.options"]) == ("none", 2)
        spent = {part: told.get(f"kvferry.expected.{part}_seconds", 0.0) for part in PARTS}
        assert sum(spent.values()) == pytest.approx(told["kvferry.expected_seconds"])
        assert spent["prefill"] > 0 and told["kvferry.actual_seconds"] > 0
        assert "kvferry.prefill" not in told and "computes it" in told["kvferry.why"]


def test_a_request_that_waits_for_its_turn(collector: Collector) -> None:
    limits = quick(max_running=1, queue_seconds=20.0, first_byte_seconds=20.0)
    with cluster(prefill=0, limits=limits) as c, ThreadPoolExecutor(2) as pool:
        c.decode[0].script = ["gate"]
        first = pool.submit(c.complete, stream=True)
        wait_until(lambda: c.decode[0].seen)
        second = pool.submit(c.complete, HEADERS)
        c.expect("waiting", count=1)
        c.decode[0].gate.release(len(CHUNKS))
        assert first.result(20).status_code == second.result(20).status_code == 200
        root, *parts = trace(collector, 4)
        assert [part.name for part in parts] == ["place", "wait", "decode"]
        assert attributes(root)["kvferry.outcome"] == "ok"


def test_an_engine_that_fails(collector: Collector) -> None:
    with cluster(prefill=2) as c:
        c.prefill[0].always = c.prefill[1].always = "500"
        c.decode[0].always = "break"
        assert b"engine_failed" in c.complete(HEADERS, stream=True).content
        root, *parts = trace(collector, 6)
        names = ["place", "prefill", "prefill", "decode", "stream"]
        assert [part.name for part in parts] == names
        assert [part.status.code for part in parts] == [0, ERROR, ERROR, 0, ERROR]
        assert parts[1].status.message.endswith("HTTP 500")
        assert (root.status.code, root.status.message) == (ERROR, "broken_stream")
        sent = [seen.headers["traceparent"] for p in c.prefill for seen in p.seen]
        assert len(set(sent)) == 2


def test_what_a_client_does_not_want_traced(collector: Collector) -> None:
    with cluster() as c:
        c.complete({"traceparent": f"00-{TRACE}-{CLIENT}-00"})
        (p,), (d,) = c.prefill[0].seen, c.decode[0].seen
        for seen in (p, d):
            version, trace_id, span_id, flags = seen.headers["traceparent"].split("-")
            assert (version, trace_id, flags) == ("00", TRACE, "00") and span_id != CLIENT
        c.complete({"traceparent": f"00-{'1' * 32}-{CLIENT}-01"})
        trace(collector, 4, "1" * 32)
        assert {span.trace_id.hex() for span in collector.spans} == {"1" * 32}


@pytest.mark.parametrize("bad", ["", "nonsense", f"00-{'0' * 32}-{CLIENT}-01", "00-é-1-1"])
def test_a_traceparent_that_is_none(collector: Collector, bad: str) -> None:
    with cluster(prefill=0) as c:
        assert c.complete({"traceparent": bad.encode("latin-1")}).status_code == 200
        (seen,) = c.decode[0].seen
        assert seen.headers["traceparent"] != bad
        trace(collector, 3, seen.headers["traceparent"].split("-")[1])


# Off, and out of order


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("off")
def test_off_the_clients_context_passes_as_it_came() -> None:
    with cluster() as c:
        c.complete(HEADERS)
        for seen in (*c.prefill[0].seen, *c.decode[0].seen):
            assert {name: seen.headers[name] for name in HEADERS} == HEADERS


@pytest.mark.usefixtures("off")
def test_off_nothing_is_imported() -> None:
    assert subprocess.run([sys.executable, "-c", STARTED], timeout=300).returncode == 0


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")]
)
def test_switched_off(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert RouterSpans.from_environment() is None


def answers(c: Cluster) -> None:
    for number in range(30):
        got = c.complete(prompt=f"{number}", stream=True)
        assert got.status_code == 200 and got.content.endswith(b"[DONE]\n\n")


def test_a_collector_that_does_not_answer(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are answered, spans beyond the queue are dropped, and the router stops."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "120")
    collector.go_on.clear()
    with cluster() as c:
        answers(c)
        wait_until(lambda: collector.asked > 0)
        assert not collector.spans
        begun = time.monotonic()
    assert time.monotonic() - begun < 20


def test_a_collector_that_is_away(collector: Collector) -> None:
    collector.close()
    with cluster() as c:
        answers(c)


def test_the_extra_is_missing(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with cluster() as c:
        assert c.complete().status_code == 200
    assert "no traces: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set, but" in caplog.text
    assert "[otel]" in caplog.text and not collector.asked


def test_a_bad_variable(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    with cluster() as c:
        assert c.complete().status_code == 200
    assert "but OpenTelemetry does not start" in caplog.text
