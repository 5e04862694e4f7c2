"""Viewers of the router's page, at the real process."""

from __future__ import annotations

import json
import signal
import socket
import time
from contextlib import ExitStack

import httpx

from router_process import RouterProcess, read_answer, router_process
from waiting import wait_until

ASK = b"GET /live/stream HTTP/1.1\r\nHost: x\r\n\r\n"
# A router that waited for its viewers would take `drain_seconds`.
STOP_SECONDS, DRAIN_SECONDS = 20.0, 60.0


def first_event(viewer: socket.socket) -> dict[str, object]:
    data = b""
    while b"\n\n" not in data.partition(b"\r\n\r\n")[2]:
        more = viewer.recv(1 << 16)
        assert more, data
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    assert b" 200 " in head and b"text/event-stream" in head
    return dict(json.loads(body.partition(b"data: ")[2].partition(b"\n\n")[0]))


def view(router: RouterProcess, source: str = "127.0.0.1") -> socket.socket:
    viewer = router.connect(source)
    viewer.sendall(ASK)
    return viewer


def test_a_router_that_stops_lets_its_viewers_go() -> None:
    with router_process({"drain_seconds": DRAIN_SECONDS}) as router, view(router) as viewer:
        assert first_event(viewer)["state"] == "ok"
        begun = time.monotonic()
        router.process.send_signal(signal.SIGTERM)
        router.process.wait(DRAIN_SECONDS)
        assert time.monotonic() - begun < STOP_SECONDS
        assert "Traceback" not in "".join(router.log)


def test_viewers_count_as_connections_and_have_few_places() -> None:
    limits = {"max_viewers": 4, "max_connections": 16}
    with router_process(limits) as router, ExitStack() as stack:
        sources = [f"127.0.0.{2 + i}" for i in range(4)]
        viewers = [stack.enter_context(view(router, source)) for source in sources]
        for viewer in viewers:
            first_event(viewer)
        late = stack.enter_context(view(router, "127.0.0.9"))
        status, body = read_answer(late)
        assert (status, json.loads(body)["error"]["code"]) == (429, "too_many_viewers")
        # Clients come and go as before, and the page is there for all.
        for _ in range(40):
            answer = httpx.get(f"http://127.0.0.1:{router.port}/live", trust_env=False)
            assert answer.json()["state"] == "ok"
        for viewer in viewers:
            assert viewer.recv(1 << 16)
        viewers[0].close()

        def has_a_place() -> bool:
            with view(router, "127.0.0.9") as again:
                return again.recv(1 << 16).startswith(b"HTTP/1.1 200 ")

        wait_until(has_a_place)
