"""The small HTTP server: good requests are answered beside clients that take all they can."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from kvferry.net import http
from kvferry.net.http import HttpAnswer, HttpRequest, HttpServer

SECONDS = 10.0


def answer(asked: HttpRequest) -> HttpAnswer:
    if asked.path == "/broken":
        raise KeyError("a mistake of ours")
    body = asked.body.decode()
    return HttpAnswer.of(200, [asked.method, asked.path, asked.headers.get("x-a"), body])


@pytest.fixture
def port() -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = HttpServer(listener, answer, "kvferry-test-http")
    yield int(listener.getsockname()[1])
    server.close()
    server.close()
    assert "kvferry-test-http" not in {thread.name for thread in threading.enumerate()}


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), SECONDS)


def received(connection: socket.socket) -> bytes:
    """All bytes until the server closes."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(1 << 16):
            data += more
    return data


def ask(port: int, *parts: bytes) -> tuple[int, object]:
    with connected(port) as connection:
        for part in parts:
            connection.sendall(part)
        head, _, body = received(connection).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def test_a_request_may_come_in_any_parts(port: int) -> None:
    whole = b"POST /x?y=1 HTTP/1.1\r\nX-A: b\r\nContent-Length: 5\r\n\r\nhello"
    assert ask(port, whole) == (200, ["POST", "/x", "b", "hello"])
    assert ask(port, *(whole[n : n + 1] for n in range(len(whole)))) == ask(port, whole)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (b"hello\r\n\r\n", "a method, a path"),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", "a colon"),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 65 + b"\r\n", "65 headers"),
        (b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "two different"),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", "Content-Length"),
        (b"GET / HTTP/1.1\r\nContent-Length: 2000000\r\n\r\n" + bytes(1 << 19), "2000000 bytes"),
        (b"GET / HTTP/1.1\r\nA: " + b"a" * http.MOST_HEAD, "request head"),
    ],
)
def test_a_bad_request_is_told_why(port: int, request_: bytes, words: str) -> None:
    """Also a client that goes on sending gets its answer."""
    with connected(port) as connection:
        connection.sendall(request_)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        head, _, body = received(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 400 ") and words in json.loads(body)["detail"]


def test_an_error_of_ours(port: int, caplog: pytest.LogCaptureFixture) -> None:
    assert ask(port, b"GET /broken HTTP/1.1\r\n\r\n")[0] == 500
    assert "could not answer" in caplog.text
    assert ask(port, b"GET / HTTP/1.1\r\n\r\n")[0] == 200


def test_the_oldest_connection_makes_way(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MOST_PER_ADDRESS", 3)
    monkeypatch.setattr(http, "REQUEST_SECONDS", 60.0)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(port)) for _ in range(3)]
        assert ask(port, b"GET / HTTP/1.1\r\n\r\n")[0] == 200
        assert received(silent[0]) == b""
        silent[1].sendall(b"GET / HTTP/1.1\r\n\r\n")  # the others are still served
        assert received(silent[1]).startswith(b"HTTP/1.0 200 ")


def test_unfinished_requests_share_a_bound_of_bytes(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MOST_RECEIVED", 100_000)
    monkeypatch.setattr(http, "REQUEST_SECONDS", 60.0)
    head = b"POST / HTTP/1.1\r\nContent-Length: 90000\r\n\r\n"
    with connected(port) as first, connected(port) as second:
        first.sendall(head + bytes(60_000))
        second.sendall(head + b"a" * 60_000)
        assert received(first) == b""
        second.sendall(b"a" * 30_000)
        assert received(second).startswith(b"HTTP/1.0 200 ")
