"""What a hostile client or engine may do to the router, done to the real process."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import httpx
import pytest

from router_process import LARGE_ANSWER_BYTES, RouterProcess, post, read_answer, router_process
from waiting import wait_until

MIB = 1 << 20
# Small, so that what is not bounded by them shows. One address may hold 32 MiB, of 16 MiB bodies.
SMALL = {"max_body_bytes": 16 * MIB, "max_answer_bytes": 16 * MIB, "max_held_bytes": 64 * MIB}
# What may be held, and what interpreters and allocators take beside it.
MOST_GROWTH = 64 * MIB + 96 * MIB
# A good client gets its answer in a few milliseconds. The bound is the feature; machines are slow.
PROMPT_SECONDS = 10.0


def ask(router: RouterProcess, source: str = "127.0.0.1", **more: object) -> httpx.Response:
    """A good client's request."""
    transport = httpx.HTTPTransport(local_address=source)
    with httpx.Client(transport=transport, trust_env=False, timeout=PROMPT_SECONDS) as client:
        url = f"http://127.0.0.1:{router.port}/v1/completions"
        return client.post(url, json={"prompt": "hello"} | more)


def gauge(router: RouterProcess, name: str) -> int:
    text = httpx.get(f"http://127.0.0.1:{router.port}/metrics", trust_env=False).text
    (line,) = [x for x in text.splitlines() if x.startswith(f"kvferry_router_{name} ")]
    return int(line.split()[1])


def test_40_unfinished_uploads() -> None:
    part = b'{"prompt":"' + b"x" * (15 * MIB)
    answers: list[tuple[int, str]] = []
    with router_process(SMALL) as router, ExitStack() as stack:
        assert ask(router).status_code == 200
        before = router.peak_bytes()
        attackers = [stack.enter_context(router.connect(f"127.0.0.{2 + i % 4}")) for i in range(40)]
        sent = threading.Semaphore(0)

        def upload(i: int) -> None:
            with suppress(OSError):
                attackers[i].sendall(post(part, length=len(part) + 1))
            sent.release()
            with suppress(OSError):
                status, body = read_answer(attackers[i])
                answers.append((status, json.loads(body)["error"]["code"]))

        threads = [threading.Thread(target=upload, args=(i,)) for i in range(40)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert sent.acquire(timeout=60)
        for source in ("127.0.0.2", "127.0.0.9"):  # an attacker's address, and another
            assert ask(router, source).status_code == 200
        assert router.peak_bytes() - before < MOST_GROWTH
        for thread in threads:
            thread.join(60)
        assert {(429, "too_many_bytes"), (503, "router_full")} & set(answers)
        assert (408, "request_timeout") in answers  # those that had room, and did not go on
        wait_until(lambda: gauge(router, "held_bytes") == 0)


@pytest.mark.parametrize(
    "half",
    [b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Half: ", post(b"{", length=99)],
    ids=["headers", "body"],
)
def test_256_half_sent_requests(half: bytes) -> None:
    """More than the router has descriptors for."""
    limits = {"header_seconds": 3, "progress_seconds": 3}
    with router_process(limits, files=256) as router, ThreadPoolExecutor(32) as pool:
        attackers = list(pool.map(lambda _: router.connect(), range(256)))
        for attacker in attackers:
            with suppress(OSError):
                attacker.sendall(half)
        for source in ("127.0.0.1", "127.0.0.9"):
            assert ask(router, source).status_code == 200
        for attacker in attackers:  # those that were not evicted have a deadline
            with attacker, suppress(ConnectionError):
                while attacker.recv(1 << 16):
                    pass
        assert not any("out of system resource" in line for line in router.log)


@pytest.mark.parametrize("answered_early", [False, True])
def test_a_trickled_body(answered_early: bool) -> None:
    """Also one that is sent on after its answer."""
    limits = {"header_seconds": 1, "progress_seconds": 1}
    with router_process(limits) as router, router.connect() as attacker:
        path = "/nothing" if answered_early else "/v1/completions"
        attacker.sendall(post(b"", length=10_000, path=path))
        stop = threading.Event()

        def trickle() -> None:
            with suppress(OSError):
                while not stop.wait(0.05):
                    attacker.sendall(b" ")

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            status, body = read_answer(attacker)
            if answered_early:
                assert status == 404
            else:
                assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
            with suppress(ConnectionError):
                assert attacker.recv(1) == b""
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize("asked", ["large", "stream", "pipelined"])
def test_clients_that_read_nothing(asked: str) -> None:
    with router_process(SMALL | {"client_seconds": 1, "header_seconds": 1}) as router:
        wanted = {"prompt": "large"} if asked == "large" else {"prompt": "x", "stream": True}
        request = post(json.dumps(wanted).encode())
        count = 24
        if asked == "pipelined":
            count = 8  # each has the router write a thousand answers before its kernel is full
            request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 1800
        assert ask(router).status_code == 200
        before, files = router.peak_bytes(), router.files()
        with ExitStack() as stack:
            for i in range(count):
                source = f"127.0.0.{2 + i % 4}"
                attacker = stack.enter_context(router.connect(source, receive_bytes=4096))
                attacker.sendall(request)
            wait_until(lambda: router.files() >= files + 4)
            # The attackers have not closed their ends: the router closes its own.
            wait_until(lambda: router.files() <= files + 4)
            assert ask(router).status_code == 200
            assert router.peak_bytes() - before < MOST_GROWTH
        assert (gauge(router, "in_flight"), gauge(router, "held_bytes")) == (0, 0)


def test_engines_that_answer_without_end() -> None:
    with router_process(SMALL | {"probe_every_seconds": 0.1, "probe_seconds": 60}) as router:
        assert len(ask(router, prompt="large").content) == LARGE_ANSWER_BYTES
        before = router.peak_bytes()
        router.decode.endless_health = True
        for _ in range(3):
            got = ask(router, prompt="endless")
            assert (got.status_code, got.json()["error"]["code"]) == (502, "answer_too_long")
        assert ask(router).status_code == 200
        assert router.peak_bytes() - before < MOST_GROWTH
        wait_until(lambda: gauge(router, "held_bytes") == 0)


def test_a_body_of_a_million_fields() -> None:
    with router_process(SMALL) as router:
        body = b"{" + b",".join(b'"%x":1' % i for i in range(1_500_000)) + b"}"
        ask(router, text="x" * len(body))  # as many bytes, that are harmless
        before = router.peak_bytes()
        with router.connect() as attacker:
            attacker.sendall(post(body))
            status, answer = read_answer(attacker)
        assert (status, json.loads(answer)["error"]["code"]) == (400, "too_many_fields")
        assert router.peak_bytes() - before < 64 * MIB


def test_clients_that_leave_keep_no_connection_to_an_engine() -> None:
    """They leave at every moment, also while httpx takes or gives back a connection."""
    with router_process() as router:
        router.prefill.chunks_of_stream = router.decode.chunks_of_stream = 2
        assert ask(router).status_code == 200
        files = router.files()
        request = post(b'{"prompt":"x","stream":true}') * 8

        def leave(i: int) -> None:
            end = time.monotonic() + i % 30 * 0.01
            with router.connect() as attacker, suppress(OSError):
                attacker.sendall(request)
                while (left := end - time.monotonic()) > 0:
                    attacker.settimeout(left)
                    attacker.recv(1 << 16)

        with ThreadPoolExecutor(32) as pool:
            list(pool.map(leave, range(800)))
        wait_until(lambda: router.files() <= files + 2)
        assert ask(router).status_code == 200


def test_a_get_with_a_body_is_not_another_request_at_the_engine() -> None:
    """The engine here reads no body of a GET: it would take one for the next request."""
    with router_process() as router, router.connect() as attacker:
        smuggled = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
        for _ in range(3):
            attacker.sendall(post(smuggled, path="/v1/models").replace(b"POST", b"GET", 1))
            assert read_answer(attacker)[0] == 200
        assert ask(router).content == b'{"choices":[{"text":"fine"}]}'
        assert router.decode.asked == 1
