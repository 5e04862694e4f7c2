"""The router while its only decode engine, a process of its own, dies and starts again."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from router_process import EngineProcess, RouterProcess, router_process
from waiting import wait_until

LIMITS = {"probe_every_seconds": 0.1, "connect_seconds": 1.0, "probe_seconds": 1.0}


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    engine = EngineProcess()
    try:
        yield engine
    finally:
        engine.kill()


def ask(router: RouterProcess, prompt: str = "x", stream: bool = False) -> httpx.Response:
    url = f"http://127.0.0.1:{router.port}/v1/completions"
    body = {"prompt": prompt, "stream": stream}
    return httpx.post(url, json=body, trust_env=False, timeout=30)


def metric(router: RouterProcess, name: str) -> float:
    text = httpx.get(f"http://127.0.0.1:{router.port}/metrics", trust_env=False).text
    found = re.search(rf"^kvferry_router_{re.escape(name)} ([\d.]+)$", text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])


def test_requests_wait_for_an_engine_that_starts_again(engine: EngineProcess) -> None:
    engine.kill()
    engine.start(answer_seconds=30.0)
    with (
        router_process(LIMITS | {"wait_seconds": 60.0}, decode_url=engine.url) as router,
        ThreadPoolExecutor(4) as clients,
    ):
        running = clients.submit(ask, router)  # dies with the engine, and is asked again
        wait_until(lambda: router.prefill.asked == 1)
        engine.kill()
        wait_until(lambda: metric(router, "waiting") == 1)
        new = [clients.submit(ask, router) for _ in range(3)]
        wait_until(lambda: metric(router, "waiting") == 4)
        engine.start()
        for answer in (running, *new):
            assert answer.result().status_code == 200
            assert answer.result().headers["x-kvferry-path"] == "prefill+decode"
        assert metric(router, 'requests_total{outcome="ok"}') == 4
        assert metric(router, "waiting") == 0


def test_503_says_when_an_engine_should_be_back(engine: EngineProcess) -> None:
    limits = LIMITS | {"wait_seconds": 0.3, "start_seconds": 40.0}
    with router_process(limits, decode_url=engine.url) as router:
        assert ask(router).status_code == 200
        engine.kill()
        got = ask(router)
        assert (got.status_code, got.json()["error"]["code"]) == (503, "no_decode_engine")
        assert 38 <= int(got.headers["retry-after"]) <= 40  # nothing is known of this engine yet
        assert "usually" not in got.json()["error"]["message"]
        engine.start()
        wait_until(lambda: ask(router).status_code == 200)
        engine.kill()
        got = ask(router)
        assert got.status_code == 503
        assert int(got.headers["retry-after"]) <= 10  # it came back within seconds
        assert "a lost one usually is back after" in got.json()["error"]["message"]


def test_a_cut_stream_ends_with_an_error_event(engine: EngineProcess) -> None:
    with router_process(LIMITS, decode_url=engine.url) as router:
        got = cut(router, engine.kill)
        assert got[0] == {"n": 1}
        assert [e["error"]["code"] for e in got[1:]] == ["engine_failed"]
        wait_until(lambda: metric(router, 'requests_total{outcome="broken_stream"}') == 1)
        engine.start()


def test_a_router_that_stops_ends_its_streams(engine: EngineProcess) -> None:
    with router_process(LIMITS | {"drain_seconds": 0.5}, decode_url=engine.url) as router:
        got = cut(router, lambda: router.process.send_signal(signal.SIGTERM))
        assert got[0] == {"n": 1}
        assert [e["error"]["code"] for e in got[1:]] == ["router_stopped"]
        router.process.wait(60)
        assert any("stopped 200" in line for line in router.log)


def cut(router: RouterProcess, end: object) -> list[dict]:
    """The events of a stream; after its first one, `end` is called. httpx refuses a body that
    breaks off."""
    url = f"http://127.0.0.1:{router.port}/v1/completions"
    body = {"prompt": "torn", "stream": True}
    with httpx.stream("POST", url, json=body, trust_env=False, timeout=30) as answer:
        chunks = answer.iter_bytes()
        data = next(chunks)
        assert data == b'data: {"n": 1}\n\n'  # not a part of the next one
        assert callable(end)
        end()
        data += b"".join(chunks)
    assert data.endswith(b"\n\n") and b"[DONE]" not in data
    return [json.loads(event.removeprefix("data: ")) for event in data.decode().split("\n\n")[:-1]]
