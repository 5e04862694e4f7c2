"""The router before real HTTP servers on loopback that speak the little that it needs."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn

from kvferry.errors import DescriptionError
from kvferry.router.api import (
    Answer,
    ApiError,
    Generation,
    Limits,
    RouterConfig,
    StreamSink,
    base_url,
    ticket_of,
)
from kvferry.router.clients import Guard
from kvferry.router.fleet.engines import UpstreamEngine
from kvferry.router.flow import ClientReply, Router
from kvferry.router.guard import Quota, RequestMemory, address_of
from kvferry.router.placing import RequestWay
from kvferry.router.server import Listen, RouterServer
from router_cluster import (
    CHUNKS,
    PARAMS,
    QUICK,
    WHOLE,
    FakeEngine,
    Server,
    cluster,
    decoders,
    quick,
)
from waiting import wait_until


@pytest.fixture(autouse=True)
def _show_log(caplog: pytest.LogCaptureFixture) -> None:
    """Of a test that fails, what the router did for each request."""
    caplog.set_level("INFO", logger="kvferry.router")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prefill_then_decode_with_its_ticket(path: str) -> None:
    with cluster() as c:
        sent = {
            "model": "m",
            "messages": [{"role": "user", "content": "hé"}],
            "max_tokens": 9,
            "min_tokens": 4,
            "n": 2,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "kv_transfer_params": {"remote_host": "evil"},
        }
        headers = {"X-Request-Id": "abc-1", "Authorization": "Bearer s3cret", "X-Own": "1"}
        got = c.client.post(path, json=sent, headers=headers)
        assert got.status_code == 200
        assert got.content == WHOLE  # n choices and usage as they came, to the byte
        assert got.headers["x-kvferry-path"] == "prefill+decode"
        assert got.headers.get_list("x-request-id") == ["abc-1"]

        (p,), (d,) = c.prefill[0].seen, c.decode[0].seen
        assert p.path == d.path == path
        for seen in (p, d):
            assert seen.headers["x-request-id"] == "abc-1"
            assert seen.headers["authorization"] == "Bearer s3cret"
            assert seen.headers["x-own"] == "1"
        left_out = ("min_tokens", "stream_options")
        assert p.body == {k: v for k, v in sent.items() if k not in left_out} | {
            "max_tokens": 1,
            "max_completion_tokens": 1,
            "n": 1,
            "stream": False,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        ticket = PARAMS % b"p0"
        assert d.raw.count(ticket) == 1  # unchanged to the byte
        assert d.body == sent | {"kv_transfer_params": json.loads(ticket)}
        c.expect("requests_total", 'outcome="ok"', count=1)
        c.expect("in_flight", count=0)


def test_request_id_is_made_where_none_or_a_bad_one_came() -> None:
    with cluster() as c:
        ids = [c.complete().headers["x-request-id"] for _ in range(2)]
        ids.append(c.complete({"X-Request-Id": "has space"}).headers["x-request-id"])
        assert len(set(ids)) == 3
        assert all(re.fullmatch("[0-9a-f]{32}", i) for i in ids)
        assert [s.headers["x-request-id"] for s in c.prefill[0].seen] == ids
        assert [s.headers["x-request-id"] for s in c.decode[0].seen] == ids


def test_streams_arrive_chunk_by_chunk_and_unchanged() -> None:
    with cluster() as c:
        c.decode[0].always = "gate"
        c.decode[0].gate.release()
        body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
        with c.client.stream("POST", "/v1/completions", json=body) as got:
            assert got.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert got.headers["x-engine"] == "e"
            assert got.headers["x-kvferry-path"] == "prefill+decode"
            chunks = got.iter_raw()
            for i, expected in enumerate(CHUNKS):  # each comes while the engine holds the next
                assert next(chunks) == expected
                if i == 0:
                    c.expect("in_flight", count=1)
                c.decode[0].gate.release()
            assert list(chunks) == []
        assert c.prefill[0].seen[0].body["stream"] is False
        assert "stream_options" not in c.prefill[0].seen[0].body
        assert c.decode[0].seen[0].body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("act", ["500", "503", "drop", "hang", "302"])
def test_prefill_is_tried_elsewhere(act: str) -> None:
    with cluster(prefill=2, limits=quick(prefill_seconds=1.0) if act == "hang" else QUICK) as c:
        c.prefill[0].script = c.prefill[1].script = script = [act]  # whoever is first
        got = c.complete()
        assert got.content == WHOLE and script == []
        assert got.headers["x-kvferry-path"] == "prefill+decode"
        assert [len(p.seen) for p in c.prefill] == [1, 1]
        c.expect("retries_total", 'stage="prefill"', count=1)
        c.expect("fallbacks_total", 'reason="prefill_failed"', count=0)


@pytest.mark.parametrize(("act", "tries"), [("500", 2), ("drop", 2), ("not_json", 1)])
def test_prefill_that_fails_everywhere_falls_back(act: str, tries: int) -> None:
    with cluster(prefill=3, limits=quick(tries=tries)) as c:
        for p in c.prefill:
            p.always = act if act != "not_json" else "ok"
            p.name = p.name if act != "not_json" else '"broken'
        got = c.complete()
        assert got.content == WHOLE
        assert got.headers["x-kvferry-path"] == "decode-only"
        assert sum(len(p.seen) for p in c.prefill) == tries
        assert "kv_transfer_params" not in c.decode[0].seen[0].body
        c.expect("fallbacks_total", 'reason="prefill_failed"', count=1)
        c.expect("requests_total", 'outcome="ok"', count=1)


@pytest.mark.parametrize("act", ["500", "drop", "hang", "break_early"])
def test_a_ticket_that_decode_may_have_used_is_not_used_again(act: str) -> None:
    limits = quick(answer_seconds=1.0) if act == "hang" else QUICK
    with cluster(decode=2, limits=limits) as c:
        c.decode[0].script = c.decode[1].script = [act]
        streamed = act == "break_early"
        got = c.complete(stream=streamed)
        assert got.content == (b"".join(CHUNKS) if streamed else WHOLE)
        assert got.headers["x-kvferry-path"] == "prefill+decode"
        assert [len(d.seen) for d in c.decode] == [1, 1]
        assert len(c.prefill[0].seen) == 2
        c.expect("retries_total", 'stage="decode"', count=1)
        c.expect("retries_total", 'stage="prefill_again"', count=1)
        c.expect("retries_total", 'stage="prefill"', count=0)


def test_a_ticket_that_no_decode_engine_saw_is_used_elsewhere() -> None:
    with cluster(decode=2, limits=quick(probe_every_seconds=60)) as c:
        c.servers["d0"].kill()  # the router has not noticed
        got = [c.complete() for _ in range(2)]
        assert [g.headers["x-kvferry-path"] for g in got] == ["prefill+decode"] * 2
        assert len(c.prefill[0].seen) == len(c.decode[1].seen) == 2
        c.expect("retries_total", 'stage="decode"', count=1)  # then it had noticed
        assert c.up() == {"p0": True, "d0": False, "d1": True}
        health = c.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")


@pytest.mark.parametrize(("act", "limits"), [("break", QUICK), ("stall", quick(chunk_seconds=0.5))])
def test_after_the_first_byte_the_stream_breaks(act: str, limits: Limits) -> None:
    with cluster(decode=2, limits=limits) as c:
        for d in c.decode:
            d.always = act
        body = {"prompt": "x", "stream": True}
        got = c.client.post("/v1/completions", json=body)
        assert got.status_code == 200
        *events, error, end = got.content.split(b"\n\n")
        assert b"".join(event + b"\n\n" for event in events) == b"".join(CHUNKS[:2])
        code = "engine_timeout" if act == "stall" else "engine_failed"
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == code
        assert end == b""
        assert sum(len(d.seen) for d in c.decode) == len(c.prefill[0].seen) == 1
        c.expect("requests_total", 'outcome="broken_stream"', count=1)
        c.expect("retries_total", 'stage="decode"', count=0)


def test_prefill_engine_goes_and_comes_back() -> None:
    with cluster() as c:
        assert c.complete().headers["x-kvferry-path"] == "prefill+decode"
        c.servers["p0"].kill()
        got = c.complete()
        assert got.headers["x-kvferry-path"] == "decode-only" and got.content == WHOLE
        wait_until(lambda: c.up() == {"p0": False, "d0": True})
        assert c.complete().headers["x-kvferry-path"] == "decode-only"
        assert c.metric("fallbacks_total", 'reason="no_prefill_engine"') >= 1
        url = re.escape(c.servers["p0"].url)
        c.expect("engine_up", f'engine="{url}",role="prefill"', count=0)
        c.servers["p0"].start()
        wait_until(lambda: c.up()["p0"])
        assert c.complete().headers["x-kvferry-path"] == "prefill+decode"


def test_probes_take_an_engine_out_and_in_by_thresholds() -> None:
    with cluster(limits=quick(fail_after=3)) as c:
        c.prefill[0].health = 500
        wait_until(lambda: not c.up()["p0"])
        reasons = [e["reason"] for e in c.client.get("/health").json()["engines"]]
        assert reasons == ["/health answered 500", None]
        c.prefill[0].health = 200
        wait_until(lambda: c.up()["p0"])
    fleet = decoders("ab", quick(fail_after=2, recover_after=2))
    a, b = fleet.engines
    assert fleet.pick("decode") is None
    a.probed_well()  # the first probe counts alone
    b.failed("x")
    b.probed_well()
    assert (a.up, b.up) == (True, False)
    b.probed_well()
    a.failed("once")
    a.answered()
    a.failed("once")
    assert (a.up, b.up) == (True, True)
    a.failed("twice")
    b.failed("refused", refused=True)
    assert (a.up, b.up, a.reason) == (False, False, "twice")


def test_when_an_engine_is_expected_back() -> None:
    now = [0.0]
    limits = quick(recover_after=1, probe_every_seconds=2.0, start_seconds=30.0)
    fleet = decoders("ab", limits, clock=lambda: now[0])
    a, b = fleet.engines

    def away(engine: UpstreamEngine, seconds: float) -> None:
        engine.failed("gone", refused=True)
        now[0] += seconds
        engine.probed_well()

    assert fleet.absence("decode") == (30.0, None)
    a.probed_well()
    assert fleet.absence("decode") == (30.0, None)  # it was there when the router started
    b.failed("gone", refused=True)
    now[0] += 12
    assert fleet.absence("decode") == (18.0, None)
    now[0] += 60
    assert fleet.absence("decode") == (2.0, None)  # overdue: after the next probe
    b.probed_well()
    for seconds in (40, 50, 5000):  # the last one was no start
        away(a, seconds)
    assert fleet.absence("decode") == (50.0, 50.0)
    a.failed("gone", refused=True)
    now[0] += 20
    b.failed("gone", refused=True)
    now[0] += 5
    assert fleet.absence("decode") == (25.0, 50.0)  # the first one to be back


@dataclass
class FakeRequest:
    """What a reply needs of a client's request."""

    sent: list[bytes] = field(default_factory=list)
    aborted: bool = False

    def begin(self, status: int, headers: Any) -> None:
        pass

    def write(self, data: bytes, last: bool = False) -> bool:
        self.sent.append(data)
        return False

    def cut(self, data: bytes) -> None:
        self.sent.append(data)

    def abort(self) -> None:
        self.aborted = True

    async def drained(self) -> None:
        pass


@dataclass
class Rest:
    """A stream behind its first bytes."""

    parts: tuple[bytes, ...]
    breaks: bool = False

    async def pass_on(self, sink: StreamSink) -> None:
        for part in self.parts:
            sink.take(part, False)
        if self.breaks:
            raise OSError
        sink.take(b"", True)


@pytest.mark.parametrize("size", range(1, 12))
def test_events_that_come_in_pieces_are_counted(size: int) -> None:
    placing = Router(RouterConfig((), ("http://engine",))).placing
    stream = b"".join(CHUNKS)
    first, *rest = (stream[at : at + size] for at in range(0, len(stream), size))

    async def run() -> None:
        reply = ClientReply(FakeRequest(), b"id")  # type: ignore[arg-type]
        way = RequestWay(placing, None, 100, 10, streamed=True)
        way.decode("http://engine", handed_over=False)
        way.first()
        reply.saw = way.saw
        await reply.send(Answer(200, [], first, Rest(tuple(rest)).pass_on))
        way.served(handed_over=False)

    asyncio.run(run())
    assert placing.meters.output_tokens(None) == len(CHUNKS)


def test_streams_pass_event_by_event() -> None:
    def passed(first: bytes, *rest: bytes, headers: Any = (), cut: bool = False) -> list[bytes]:
        request = FakeRequest()

        async def run() -> None:
            reply = ClientReply(request, b"id")  # type: ignore[arg-type]
            answer = Answer(200, list(headers), first, Rest(rest, cut).pass_on)
            if not cut:
                await reply.send(answer)
                return
            with pytest.raises(OSError):
                await reply.send(answer)
            await reply.cut("code", "why")
            assert request.aborted == (not request.sent[-1].startswith(b"data: "))

        asyncio.run(run())
        return [part for part in request.sent if part]

    large = b"x" * (100 << 10)
    gzip = [(b"content-encoding", b"gzip")]
    assert passed(b"a\n", b"\nb", b"\r\n\r\nc\n\nd") == [b"a\n\n", b"b\r\n\r\nc\n\n", b"d"]
    assert passed(b"a", b"b", headers=gzip) == [b"a", b"b"]
    assert passed(large, b"y\n\n") == [large, b"y\n\n"]
    event = b'data: {"error":{"message":"why","type":"server_error","param":null,'
    event += b'"code":"code"}}\n\n'
    assert passed(b"a\n\nb", b"c", cut=True) == [b"a\n\n", event]
    assert passed(b"a", cut=True) == [event]
    assert passed(b"a\n\n", headers=gzip, cut=True) == [b"a\n\n"]  # the connection breaks
    assert passed(b"a\n\n", large, cut=True) == [b"a\n\n", large]
    assert passed(b"a\n\n", large, b"y\n\n", cut=True) == [b"a\n\n", large, b"y\n\n", event]


def test_least_in_flight_then_in_turn() -> None:
    fleet = decoders("abc")
    a, b, c = fleet.engines
    for engine in fleet.engines:
        engine.probed_well()
    assert [fleet.pick("decode") for _ in range(4)] == [a, b, c, a]
    b.in_flight = c.in_flight = 1
    assert fleet.pick("decode") is a
    a.in_flight = 2
    assert [fleet.pick("decode") for _ in range(2)] == [b, c]
    assert fleet.pick("decode", besides={b, c}) is a


def test_4xx_is_the_answer() -> None:
    with cluster(prefill=2, decode=2) as c:
        for engines in (c.decode, c.prefill):
            for status in (400, 404, 429):
                for engine in engines:
                    engine.always = str(status)
                got = c.complete()
                assert got.status_code == status
                assert got.content == b'{"error": {"message":  "%d"}}' % status
        assert sum(len(d.seen) for d in c.decode) == 3  # not asked when the prefill refuses
        assert sum(len(p.seen) for p in c.prefill) == 6


def test_the_page_knows_engines_that_never_were_up() -> None:
    with cluster(decode_urls=["http://127.0.0.1:1"]) as c:
        c.servers["d0"].kill()
        wait_until(lambda: not c.client.get("/health").json()["engines"][1]["healthy"])
        was_up = [engine["was_up"] for engine in c.client.get("/live").json()["engines"]]
        assert was_up == [True, True, False]  # p0, d0, and nobody
    (engine,) = Router(RouterConfig((), ("http://engine",))).now().engines
    assert (engine.was_up, engine.reason) == (False, "its first probe is pending")


def test_without_decode_engine_503() -> None:
    with cluster() as c:
        c.servers["d0"].kill()
        wait_until(lambda: not c.up()["d0"])
        got = c.complete(stream=True)
        assert got.status_code == 503
        seconds = got.headers["retry-after"]  # of 30, what is left of them
        assert 20 <= int(seconds) <= 30 and "x-request-id" in got.headers
        assert got.json()["error"] == {
            "message": "no decode engine is up (1 cannot connect); /health of the router names "
            f"them; ask again in {seconds} s",
            "type": "server_error",
            "param": None,
            "code": "no_decode_engine",
        }
        assert c.prefill[0].seen == []  # no prefill for nobody
        assert c.client.get("/v1/models").status_code == 503
        health = c.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "down")
        c.expect("requests_total", 'outcome="unavailable"', count=2)
        # Clients do not see the engines' addresses; the log and the page have them.
        url = c.servers["d0"].url
        assert url not in got.text
        trails = [failure["trail"] for failure in c.client.get("/live").json()["failures"]]
        assert all(f"no decode engine is up: {url} (cannot connect: " in t for t in trails), trails


def test_of_many_engines_that_are_down_few_are_named() -> None:
    urls = [f"http://127.0.0.1:{port}" for port in range(1, 8)]
    with cluster(prefill=0, decode=1, decode_urls=urls, token="a-token-of-some-length") as c:
        bearer = {"Authorization": "Bearer a-token-of-some-length"}
        query = {"url": c.servers["d0"].url}
        drained = {"draining": "stay"}
        c.client.patch("/admin/engines", params=query, json=drained, headers=bearer)
        assert (
            c.complete()
            .json()["error"]["message"]
            .startswith("no decode engine is up (7 cannot connect, 1 draining); /health ")
        )
        trail = c.client.get("/live").json()["failures"][0]["trail"]
        assert trail.count("http://") == 3 and trail.endswith(", and 5 more")


def test_an_engine_that_is_not_up_yet_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with cluster(decode_urls=["http://127.0.0.1:1"]) as c:
        failures = 'engine="http://127.0.0.1:1",role="decode"'
        wait_until(lambda: c.metric("engine_failures_total", failures) > 2)
    said = [r.getMessage() for r in caplog.records if "not up yet" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("decode engine http://127.0.0.1:1 is not up yet: cannot connect: ")
    every = QUICK.probe_every_seconds
    assert said[0].endswith(f"; it is asked again every {every:g} s")


@pytest.mark.parametrize(
    ("act", "status"), [("500", 500), ("drop", 502), ("hang", 504), ("killed", 503)]
)
def test_when_every_try_fails(act: str, status: int) -> None:
    seconds = 0.3 if act == "hang" else QUICK.answer_seconds
    with cluster(limits=quick(answer_seconds=seconds, probe_every_seconds=60)) as c:
        c.decode[0].always = act
        if act == "killed":
            c.servers["d0"].kill()
        got = c.complete()
        assert got.status_code == status
        assert got.json()["error"]["message"]
        outcome = "unavailable" if status == 503 else "engine_error"
        c.expect("requests_total", f'outcome="{outcome}"', count=1)


def test_a_client_that_leaves_aborts_at_the_engines() -> None:
    with cluster() as c:
        c.decode[0].always = "gate"
        c.decode[0].gate.release()
        body = {"prompt": "x", "stream": True}
        with c.client.stream("POST", "/v1/completions", json=body) as got:
            assert next(got.iter_raw()) == CHUNKS[0]
        wait_until(lambda: c.decode[0].seen[0].done == "aborted")
        c.prefill[0].always = "hang"
        where = c.client.base_url.host, c.client.base_url.port
        raw = json.dumps(body).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection(where) as client:
            client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
            wait_until(lambda: len(c.prefill[0].seen) == 2)
        wait_until(lambda: c.prefill[0].seen[1].done == "aborted")
        c.expect("requests_total", 'outcome="client_gone"', count=2)
        c.expect("in_flight", count=0)
        assert all(c.up().values())  # not the engines' fault


def test_too_many_requests() -> None:
    with cluster(limits=quick(max_in_flight=1)) as c:
        c.decode[0].script = ["gate"]
        body = {"prompt": "x", "stream": True}
        c.decode[0].gate.release()
        with c.client.stream("POST", "/v1/completions", json=body) as got:
            chunks = got.iter_raw()
            next(chunks)
            refused = c.complete()
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "rate_limit_error"
            c.decode[0].gate.release(10)
            assert b"".join(chunks) == b"".join(CHUNKS[1:])
        c.expect("in_flight", count=0)
        assert c.complete().status_code == 200
        c.expect("requests_total", 'outcome="busy"', count=1)


def test_a_place_in_flight_is_for_requests_that_have_come_and_by_address() -> None:
    body = {"prompt": "x", "stream": True}
    with cluster(limits=quick(max_in_flight=2, address_share=0.5, max_held_bytes=1 << 30)) as c:
        c.decode[0].script = ["gate"]
        c.decode[0].gate.release()
        host, port = c.client.base_url.host, c.client.base_url.port or 0
        other = httpx.HTTPTransport(local_address="127.0.0.2")
        with (
            socket.create_connection((host, port)) as unfinished,
            httpx.Client(base_url=c.client.base_url, transport=other, trust_env=False) as client,
            c.client.stream("POST", "/v1/completions", json=body) as got,
        ):
            unfinished.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
            )
            chunks = got.iter_raw()
            next(chunks)
            c.expect("in_flight", count=1)
            refused = c.complete()
            assert refused.status_code == 429
            assert "1 of your address" in refused.json()["error"]["message"]
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
            c.decode[0].gate.release(10)
            assert b"".join(chunks) == b"".join(CHUNKS[1:])


def test_memory_is_shared_by_address() -> None:
    free, mib = 64 << 10, 1 << 20
    memory = Quota(8 * mib, 0.5)
    a, b, c = (RequestMemory(memory, address) for address in "abc")
    a.add(free)
    assert memory.taken == 0  # usual prompts always get in
    a.add(2 * mib)
    assert memory.taken == 4 * mib  # as it came, and as it goes
    with pytest.raises(ApiError) as refused:
        a.add(1)
    answer = refused.value.answer
    assert answer.status == 429 and b'"too_many_bytes"' in answer.body
    b.add(free + 2 * mib)
    with pytest.raises(ApiError) as refused:
        c.add(free + 1)
    answer = refused.value.answer
    assert answer.status == 503 and b'"router_full"' in answer.body
    for held in (a, b, c):
        held.close()
    assert memory.taken == 0
    for client, key in (
        (("10.0.0.1", 1), "10.0.0.1"),
        (("::ffff:10.0.0.1", 1), "10.0.0.1"),
        (("2001:db8:1:2:3::4", 1), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1), "fe80::/64"),
        (None, ""),
    ):
        assert address_of(client) == key


def test_bodies_that_are_refused() -> None:
    with cluster(limits=quick(max_body_bytes=1000, body_seconds=1.0)) as c:
        assert c.complete(prompt="x" * 900).status_code == 200
        for content in (b"x" * 1001, iter([b"x" * 600, b"x" * 600])):
            got = c.client.post("/v1/completions", content=content)
            assert got.status_code == 413
            assert got.json()["error"]["code"] == "body_too_large"
        for content in (b"", b"[1]", b'{"prompt": ', b"\xff", b'{"a":' + b"[" * 900):
            got = c.client.post("/v1/completions", content=content)
            assert (got.status_code, got.json()["error"]["code"]) == (400, "invalid_json")
        with socket.create_connection((c.client.base_url.host, c.client.base_url.port or 0)) as s:
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
            assert s.recv(99).startswith(b"HTTP/1.1 408")  # a body that never comes
        assert len(c.prefill[0].seen) == 1
        assert c.client.get("/v1/completions").status_code == 405
        assert c.client.post("/v1/embeddings").json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"prompt": ["a", "b"]}, "batch"),  # one ticket would serve both: wrong tokens
        ({"prompt": [[1, 2], [3]]}, "batch"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "prompt_logprobs"),
        ({"prompt": []}, None),
        ({"prompt": [1, 2]}, None),
        ({"prompt": ["a"], "echo": True, "prompt_logprobs": None}, None),
        ({"prompt": [[1, 2]], "logprobs": 1}, None),
    ],
)
def test_what_cannot_be_handed_over(more: dict[str, Any], reason: str | None) -> None:
    assert Generation(json.dumps({"prompt": "x"} | more).encode()).decode_only_because() == reason


def test_a_request_has_1024_fields_at_most() -> None:
    def body(count: int) -> bytes:
        return json.dumps({str(i): 1 for i in range(count)}).encode()

    assert len(Generation(body(1024)).fields) == 1024
    for count in (1025, 450_000):  # fewer than the colons that are allowed
        with pytest.raises(ApiError, match="1024 fields at most") as refused:
            Generation(body(count))
        assert b'"too_many_fields"' in refused.value.answer.body


def test_decode_only_requests_go_as_they_came() -> None:
    with cluster() as c:
        raw = b'{ "prompt":["a", "b"],"seed":1.0 }'
        got = c.client.post("/v1/completions", content=raw)
        assert got.headers["x-kvferry-path"] == "decode-only"
        assert c.decode[0].seen[0].raw == raw and c.prefill[0].seen == []
        c.expect("fallbacks_total", 'reason="batch"', count=1)
        c.prefill[0].always = "no_ticket"
        got = c.complete(kv_transfer_params={"remote_host": "evil"})
        assert got.headers["x-kvferry-path"] == "decode-only"
        assert c.decode[0].seen[1].body == {"model": "m", "prompt": "hello"}
        c.expect("fallbacks_total", 'reason="no_ticket"', count=1)
    assert ticket_of(b'{"kv_transfer_params": {} }') == ticket_of(b"{}") == b""
    with cluster(prefill=0) as c:
        assert c.complete().headers["x-kvferry-path"] == "decode-only"
        assert c.client.get("/health").json()["status"] == "ok"


def test_models_health_metrics_and_page() -> None:
    with cluster(decode=2) as c:
        c.decode[0].script = c.decode[1].script = ["500"]
        headers = {"Authorization": "Bearer s3cret"}
        got = c.client.get("/v1/models", headers=headers)
        assert got.content == b'{"object":"list",  "data":[{"id":"m"}]}'
        assert {d.seen[0].headers["authorization"] for d in c.decode} == {"Bearer s3cret"}
        assert "x-kvferry-path" not in got.headers
        health = c.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "ok")
        text = c.client.get("/metrics")
        assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
        sample = re.compile(r'kvferry_router_\w+({\w+="[^"]*"(,\w+="[^"]*")*})? [\d.e+-]+')
        for line in text.text.splitlines():
            assert line.startswith("# ") or sample.fullmatch(line), line
        page = c.client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert all(s.url in page.text for s in c.servers.values())
        assert not re.search(r"(src|href)=|@import|url\(", page.text)
        assert "s3cret" not in page.text + text.text + health.text


def test_the_live_state_tells_what_happened() -> None:
    with cluster(decode=2, limits=quick(probe_every_seconds=60.0)) as c:
        assert c.complete({"X-Request-Id": "</script>1"}, stream=True).status_code == 200
        c.expect("requests_total", 'outcome="ok"', count=1)
        urls = {name: server.url for name, server in c.servers.items()}
        first = next(name for name in ("d0", "d1") if c.decode[int(name[1])].seen)
        other = "d1" if first == "d0" else "d0"
        c.decode[int(other[1])].script = ["drop"]
        assert c.complete().status_code == 200
        c.expect("requests_total", 'outcome="ok"', count=2)
        c.prefill[0].script = ["no_ticket"]
        c.decode[0].script = c.decode[1].script = ["400"]
        assert c.complete().status_code == 400
        c.expect("requests_total", 'outcome="client_error"', count=1)

        def state() -> dict[str, Any]:
            return c.client.get("/live").json()

        wait_until(lambda: len(state()["decisions"]) == 3)  # a state may be a second old
        now = state()
        refused, retried, plain = now["decisions"]
        assert (plain["request_id"], plain["outcome"]) == ("</script>1", "ok")
        assert plain["served"] == {"prefill": urls["p0"], "decode": urls[first]}
        assert plain["actual_ms"] > 0
        assert retried["chosen"]["decode"] == urls[other]
        assert retried["served"] == {"prefill": urls["p0"], "decode": urls[first]}
        assert retried["actual_ms"] is None  # it was not streamed
        assert refused["outcome"] == "client_error"
        assert refused["chosen"]["prefill"] is None
        assert refused["why"] == "decode-only: no_ticket"
        flows = {(f["from"], f["to"]): f["requests_per_minute"] for f in now["flows"]}
        assert flows["clients", urls["p0"]] == flows[urls["p0"], urls[first]] == 2
        assert now["outcomes"] == {"ok": 2, "client_error": 1}
        page = c.client.get("/")
        assert "\\u003c/script\\u003e1" in page.text
        assert "</script>1" not in page.text


def test_the_live_state_of_requests_that_are_placed_by_cost() -> None:
    with cluster(decode=2, place="cost") as c:
        prompt = list(range(1000))  # token ids: nothing has to be tokenized
        for _ in range(2):
            assert c.complete(prompt=prompt, stream=True).status_code == 200
        c.expect("requests_total", 'outcome="ok"', count=2)

        def state() -> dict[str, Any]:
            return c.client.get("/live").json()

        wait_until(lambda: [d["outcome"] for d in state()["decisions"]] == ["ok", "ok"])
        now = state()
        second, first = now["decisions"]
        assert (first["tokens"], first["cached"]) == (1000, 0)
        assert len(first["options"]) == 4  # two decode engines, with and without the prefill engine
        assert [o["chosen"] for o in first["options"]].count(True) == 1
        assert first["expected_ms"] > 0 and first["actual_ms"] > 0
        assert first["why"]
        # The engine of the first is believed to hold the prompt: the second one goes there.
        assert second["chosen"]["decode"] == first["served"]["decode"]
        assert second["cached"] >= 900
        assert now["hit_tokens"][second["chosen"]["source"]] == second["cached"]
        assert now["hit_tokens"]["none"] == 2000 - second["cached"]
        assert now["latency"]["router_ms"]["p50"] > 0
        flows = [f for f in now["flows"] if f["from"] == "clients"]
        assert sum(f["tokens_per_minute"] for f in flows) == 2000
        computer = second["served"]["prefill"] or second["served"]["decode"]
        views = {e["url"]: e["cache"] for e in now["engines"]}
        assert views[computer]["state"] == "estimated"
        assert views[computer]["blocks"] > 0
        assert views[computer]["hit_rate"] == pytest.approx(second["cached"] / 2000, abs=1e-3)


def test_latencies_are_histograms() -> None:
    with cluster() as c:
        assert c.complete().status_code == 200
        c.expect("request_seconds_count", count=1)
        assert c.client.get("/v1/models").status_code == 200
        c.expect("request_seconds_count", count=2)
        c.decode[0].script = ["400"]
        assert c.complete().status_code == 400
        c.expect("requests_total", 'outcome="client_error"', count=1)
        for name, count in (("request", 2), ("first_byte", 1), ("prefill", 2)):
            c.expect(f"{name}_seconds_count", count=count)
            c.expect(f"{name}_seconds_bucket", r'le="\+Inf"', count=count)


def test_a_request_that_finds_an_engine_down_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with cluster(decode=2, limits=quick(probe_every_seconds=60.0)) as c:
        c.servers["d0"].kill()
        for number in range(2):
            assert c.complete({"X-Request-Id": f"req-{number}"}).status_code == 200
        assert re.search(
            r"decode engine \S+ is down: cannot connect.* \(request req-\d\)", caplog.text
        )


def test_serve_drains_and_keeps_secrets_out_of_its_log() -> None:
    engine = FakeEngine("d0", always="gate")
    server = Server(engine)
    command = [sys.executable, "-m", "kvferry", "router", "--port", "0", "--decode", server.url]
    router = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert router.stderr is not None
        log = ""
        while not (found := re.search(r"running on (http://127.0.0.1:\d+)", log)):
            line = router.stderr.readline()
            assert line, log
            log += line
        body = {"prompt": "x", "stream": True}
        headers = {"Authorization": "Bearer s3cret", "X-Request-Id": "req-7"}
        engine.gate.release()
        url = found[1] + "/v1/completions"
        with (
            httpx.Client(trust_env=False) as client,
            client.stream("POST", url, json=body, headers=headers) as got,
        ):
            chunks = got.iter_raw()
            assert next(chunks) == CHUNKS[0]
            router.send_signal(signal.SIGTERM)
            for line in router.stderr:
                log += line
                if "Shutting down" in line:
                    break
            with pytest.raises(httpx.ConnectError):  # no new requests
                httpx.get(found[1] + "/health", trust_env=False)
            engine.gate.release(10)
            assert b"".join(chunks) == b"".join(CHUNKS[1:])  # those in flight end well
        log += router.communicate(timeout=30)[1]
        stamp = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO: +"
        assert re.search(stamp + "req-7 POST /v1/completions: ok 200", log, re.M), log
        assert all(re.match(stamp, line) for line in log.splitlines()), log
        assert "s3cret" not in log
    finally:
        router.kill()
        router.communicate()
        server.kill()


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EADDRINUSE, "choose another --port, or --take-over if a kvferry router has it"),
        (errno.EADDRNOTAVAIL, "no interface of this host has this address; choose another --host"),
        (errno.EACCES, "ports below 1024 need a privilege; choose another --port"),
    ],
)
def test_a_router_that_cannot_listen_says_what_to_do(
    number: int, advice: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("kvferry.router.server._bind", refuse)
    settings = uvicorn.Config("no:app", log_config=None)
    with pytest.raises(SystemExit):
        asyncio.run(RouterServer(settings, Listen(), Guard(QUICK)).startup())
    assert caplog.messages[-1].endswith(f"{os.strerror(number)}; {advice}")


def test_configurations_that_are_refused() -> None:
    assert base_url("host:80/") == "http://host:80"
    assert base_url("https://[::1]:8000/v1") == "https://[::1]:8000"
    assert RouterConfig((), ("h:1",)).specs()[0].url == "http://h:1"
    for prefill, decode in (
        (("h:1",), ()),
        (("h:1",), ("http://h:1/",)),
        ((), ("ftp://h",)),
        ((), ("http://h:port",)),
        ((), ("http://h/?a=1",)),
        ((), ("http://gpu..local:1",)),
        ((), (f"dns://{'long' * 20}.local:1",)),
    ):
        with pytest.raises(DescriptionError):
            RouterConfig(prefill, decode)
    for port in (0, 65536):
        with pytest.raises(DescriptionError, match="expected tcp://host:port"):
            RouterConfig((), ("h:1",), events=(f"h:1=tcp://h:{port}",))
    with pytest.raises(DescriptionError) as error:
        base_url("http://me:s3cret@h:1")
    assert "s3cret" not in str(error.value)
    assert Limits.read(["tries=5", "body_seconds=2.5"]) == Limits(tries=5, body_seconds=2.5)
    for text, message in (
        ("tries=0", "tries must be more than 0"),
        ("tries=1.5", "tries must be a whole number, not '1.5'"),
        ("body_seconds", "body_seconds must be a number, not ''"),
        ("body_seconds=nan", "body_seconds must be more than 0"),
        ("drain_seconds=inf", "drain_seconds must be more than 0, and finite"),
        ("patience=9", "'patience' is no limit of the router; there are: tries, "),
        ("address_share=2", "address_share must be 1 at most"),
        ("max_held_bytes=1000", "must be 134217728 at least"),
    ):
        with pytest.raises(DescriptionError, match=message):
            Limits.read([text])
