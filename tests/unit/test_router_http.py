"""The router's own HTTP: what a client may send, whole and broken, and what comes back."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import h11
import pytest
from uvicorn.server import ServerState

from kvferry.router.api import Answer, Limits
from kvferry.router.app import connections_of
from kvferry.router.clients import ClientRequest
from kvferry.router.http1 import (
    MAX_HEAD_BYTES,
    Body,
    HeadTooLong,
    HttpError,
    read_answer,
    read_request,
    split_head,
)
from router_cluster import CHUNKS, WHOLE, Cluster, cluster, quick
from waiting import wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
ASK = b'{"prompt":"x"}'
GOOD = HEAD + b"Content-Length: %d\r\n\r\n" % len(ASK) + ASK
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


# Heads


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"POST / HTTP/1.1\r\n", "one Host"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nHost: b\r\n", "one Host"),
        (b"POST /  HTTP/1.1\r\nHost: a\r\n", "first line"),
        (b"POST / HTTP/2.0\r\nHost: a\r\n", "first line"),
        (b"POST / http/1.1\r\nHost: a\r\n", "first line"),
        (b"POST /\xff HTTP/1.1\r\nHost: a\r\n", "first line"),
        (b"P\x00 / HTTP/1.1\r\nHost: a\r\n", "first line"),
        (b" POST / HTTP/1.1\r\nHost: a\r\n", "first line"),
        (b"POST / HTTP/1.1\r\nHost : a\r\n", "name, a colon"),
        (b"POST / HTTP/1.1\r\n Host: a\r\n", "name, a colon"),
        (b"POST / HTTP/1.1\r\nHost: a\r\n continued\r\n", "name, a colon"),
        (b"POST / HTTP/1.1\r\nHost: a\nX: b\r\n", "name, a colon"),
        (b"POST / HTTP/1.1\r\nHost: a\rX: b\r\n", "name, a colon"),
        (b"POST / HTTP/1.1\r\nHost: a\x00\r\n", "name, a colon"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nno colon\r\n", "name, a colon"),
        (HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n", "contradict"),
        (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 1\r\n", "contradict"),
        (HEAD + b"Content-Length: 1\r\nContent-Length: 1\r\n", "said once"),
        (HEAD + b"Content-Length: 1, 1\r\n", "one number"),
        (HEAD + b"Content-Length: +1\r\n", "one number"),
        (HEAD + b"Content-Length: 0x1\r\n", "one number"),
        (HEAD + b"Content-Length: -1\r\n", "one number"),
        (HEAD + b"Content-Length: \r\n", "one number"),
        (HEAD + b"Content-Length: 1" + b"0" * 18 + b"\r\n", "one number"),
        (HEAD + b"Transfer-Encoding: gzip\r\n", "chunked"),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n", "chunked"),
        (HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", "chunked"),
        (HEAD + b"Transfer-Encoding: \x0bchunked\r\n", "name, a colon"),
        (HEAD.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n", "HTTP/1.0"),
    ],
)
def test_heads_that_could_be_read_in_two_ways_are_refused(head: bytes, why: str) -> None:
    with pytest.raises(HttpError, match=why):
        read_request(head)


def test_a_head_is_read() -> None:
    head = read_request(
        b"PATCH /a%20b?c=d HTTP/1.1\r\nhOsT:x\r\nX-Odd: \t a: b\xe9 \r\nConnection: x, Close\r\n"
        b"Expect: 100-Continue\r\nContent-Length: 3\r\nX-Empty:\r\n"
    )
    assert (head.method, head.target) == ("PATCH", b"/a%20b?c=d")
    assert head.headers[:2] == [(b"host", b"x"), (b"x-odd", b"a: b\xe9")]
    assert head.headers[-1] == (b"x-empty", b"")
    assert not head.keeps and head.is_1_1 and head.continues and not head.body.whole
    old = read_request(b"GET / HTTP/1.0\r\n")
    assert not old.keeps and not old.is_1_1 and old.body.whole
    assert read_request(b"GET / HTTP/1.1\r\nHost: x\r\n").keeps


def test_where_a_head_ends() -> None:
    assert split_head(b"a\r\nb\r\n\r\nrest") == (b"a\r\nb\r\n", b"rest")
    assert split_head(b"a\r\nb\r\n") is None
    for broken in (b"a\nb\n\n", b"a\r\nb\n\r\n", b"a\x00"):
        with pytest.raises(HttpError):
            split_head(broken)
    for long in (b"a" * (MAX_HEAD_BYTES + 1), b"a" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n"):
        with pytest.raises(HeadTooLong):
            split_head(long)


def test_heads_are_never_read_otherwise_than_h11_reads_them() -> None:
    """What both accept means the same to both. What h11 refuses, the router refuses."""
    dice = random.Random(3)
    lines = [b"Host: x", b"Content-Length: 3", b"Transfer-Encoding: chunked", b"X: y", b"A:b "]
    lines += [b"content-length: 4", b"Connection: close", b"X : y", b" fold", b"X:\ty", b"Host: z"]
    lines += [b"Transfer-Encoding: identity", b"Content-Length: 3,3", b"B: \x01", b"C", b"D: \xff"]
    same = 0
    for _ in range(5000):
        chosen = [dice.choice(lines) for _ in range(dice.randint(0, 3))]
        head = b"\r\n".join([b"POST /p HTTP/1.1", b"Host: x", *chosen, b""])
        if dice.random() < 0.3:
            at = dice.randrange(len(head) - 2)
            odd = dice.choice([b"\r", b"\n", b" ", b"\x00", b":", b"\xff"])
            head = head[:at] + odd + head[at + 1 :]
        try:
            ours = read_request(head)
        except HttpError:
            continue
        theirs = h11.Connection(h11.SERVER)
        theirs.receive_data(head + b"\r\n")
        event = theirs.next_event()  # raises where h11 refuses
        assert isinstance(event, h11.Request), head
        assert ours.headers == [(bytes(k), bytes(v)) for k, v in event.headers], head
        assert (ours.method.encode(), ours.target) == (event.method, event.target)
        said = dict(event.headers)
        assert ours.body.chunked == (b"transfer-encoding" in said)
        same += 1
    assert same > 500


def test_answers_without_a_body() -> None:
    for status in (b"204 No", b"304 No"):
        assert read_answer(b"HTTP/1.1 " + status + b"\r\nContent-Length: 5\r\n").body.whole
    assert read_answer(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n", to_head=True).body.whole
    until_the_end = read_answer(b"HTTP/1.1 200\r\n").body
    assert until_the_end.ends_with_connection and not until_the_end.whole


# Bodies


def test_a_body_leaves_what_is_behind_it() -> None:
    plain = Body(False, 3)
    plain.receive(b"ab")
    plain.receive(b"cnext")
    assert (plain.take(), plain.rest, plain.whole) == (b"abc", b"next", True)
    chunked = Body(True, 0)
    chunked.receive(b"3\r\nabc\r\n")  # alone, as the events of a stream come
    assert chunked.take() == b"abc" and not chunked.whole
    chunked.receive(b"1\r\nd\r\n0\r\nX: y\r\n\r\nnext")
    assert (chunked.take(), chunked.rest, chunked.whole) == (b"d", b"next", True)


BROKEN_CHUNKS = {
    "no number": b"x\r\n",
    "sign": b"+1\r\na\r\n",
    "negative": b"-1\r\na\r\n",
    "prefix": b"0x1\r\na\r\n",
    "underscore": b"1_0\r\n",
    "space": b" 1\r\na\r\n",
    "too many digits": b"f" * 16 + b"\r\n",
    "bare newline": b"1\nab\r\n",
    "newline in an extension": b"1;a\nb\r\na\r\n",
    "longer than it says": b"1\r\nab\r\n",
    "shorter than it says": b"2\r\na\r\n\r\n0\r\n\r\n",
    "wrong end": b"1\r\na\n1\r\n",
    "empty": b"\r\n",
    "long extension": b"1;" + b"y" * (MAX_HEAD_BYTES + 1),
    "newline in a trailer": b"0\r\nX: y\n\nGET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "trailer without a name": b"0\r\nxy\r\n\r\n",
}


@pytest.mark.parametrize("what", BROKEN_CHUNKS)
def test_chunks_that_are_none(what: str) -> None:
    data = BROKEN_CHUNKS[what]
    least = 1 + len(data) // 2000  # byte by byte, unless that takes seconds
    for cut in (len(data), least, 2 * least):
        body, refused = Body(True, 0), False
        try:
            for at in range(0, len(data), cut):
                body.receive(data[at : at + cut])
        except HttpError:
            refused = True
        assert refused, (what, cut)


@pytest.mark.parametrize(
    "data",
    [
        *(b"5\r\nhello\r\n", b"05\r\nhello\r\n", b"5;a=b\r\nhello\r\n", b"5 \r\nhello\r\n"),
        *(b"0x5\r\nhello\r\n", b"g\r\nhello\r\n", b"5\r\nhell\r\n\r\n", b"5\r\nhelloXX"),
        *(b"4\r\n\r\n\r\n\r\n", b"5\r\nhello\r\n3\r\nabc\r\n", b"0\r\n\r\n", b"00\r\n\r\n"),
    ],
)
def test_a_chunk_at_once_is_read_like_one_byte_by_byte(data: bytes) -> None:
    def read(pieces: list[bytes]) -> tuple[bytes, bool, bytes] | None:
        body = Body(True, 0)
        try:
            for piece in pieces:
                body.receive(piece)
            if not body.whole:
                body.receive(b"2\r\nok\r\n0\r\n\r\nrest")
        except HttpError:
            return None
        return body.take(), body.whole, body.rest

    assert read([data]) == read([data[at : at + 1] for at in range(len(data))])


# The router


@contextmanager
def connected(c: Cluster) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", c.router.port), timeout=10) as sock:
        yield sock


def received(sock: socket.socket, *, until: bytes = b"") -> bytes:
    """What comes until the connection ends, or until `until` has come."""
    data = b""
    with suppress(ConnectionError):
        while not (until and until in data):
            piece = sock.recv(1 << 16)
            if not piece:
                break
            data += piece
    return data


def statuses(data: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"Content-Length: 14\r\nTransfer-Encoding: chunked\r\n\r\n" + ASK,
        HEAD + b"Content-Length: 14\r\nContent-Length: 15\r\n\r\n" + ASK,
        HEAD + b"X-Bad : y\r\n\r\n",
        b"GET /health HTTP/1.1\nHost: x\n\n",
        b"\x16\x03\x01\x00garbage",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"1\r\nabc\r\n",
    ],
)
def test_what_is_no_http_is_answered_400_and_reaches_no_engine(sent: bytes) -> None:
    with cluster() as c, connected(c) as sock:
        sock.sendall(sent + GOOD)
        got = received(sock)
        assert statuses(got) == [400] and b"connection: close" in got
        assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
        assert not c.decode[0].seen and not c.prefill[0].seen
        assert c.complete().content == WHOLE
        c.expect("in_flight", count=0)


def test_a_head_without_end() -> None:
    with cluster() as c, connected(c) as sock:
        with suppress(ConnectionError):
            sock.sendall(HEAD + b"X: " + b"y" * (2 * MAX_HEAD_BYTES))
        assert statuses(received(sock)) == [431]


def test_requests_that_come_together_are_answered_in_their_order() -> None:
    with cluster() as c, connected(c) as sock:
        last = HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        sock.sendall(b"\r\n" + GOOD + HEALTH + GOOD.replace(b"/v1", b"/v2") + GOOD + last)
        got = received(sock)
        assert statuses(got) == [200, 200, 404, 200, 200]
        assert got.count(WHOLE) == 2 and got.endswith(b"}")
        assert len(c.decode[0].seen) == 2


def test_requests_sent_ahead_are_answered_one_in_a_turn_of_the_loop() -> None:
    """Also those that no route takes: otherwise one client's would keep all others waiting."""

    async def run() -> list[int]:
        ours = socket.socket()
        kept, counts = KeptAnswers({"peername": ("127.0.0.1", 1), "socket": ours}), []
        connection = connections_of({}, Limits())(ServerState())
        connection.connection_made(kept)
        connection.data_received(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n" * 4)
        while len(statuses(kept.written)) < 4:
            counts.append(len(statuses(kept.written)))
            await asyncio.sleep(0)
        connection.connection_lost(None)
        ours.close()
        return counts

    assert sorted(set(asyncio.run(run()))) == [0, 1, 2, 3]


class KeptAnswers(asyncio.Transport):
    written = b""

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def test_a_request_byte_by_byte() -> None:
    with cluster() as c, connected(c) as sock:
        for byte in (
            CHUNKED + b"5\r\n" + ASK[:5] + b"\r\n9;x=y\r\n" + ASK[5:] + b"\r\n0\r\nA: b\r\n\r\n"
        ):
            sock.sendall(bytes([byte]))
        assert WHOLE in received(sock, until=WHOLE)
        assert c.decode[0].seen[0].body["prompt"] == "x"
        assert "transfer-encoding" not in c.decode[0].seen[0].headers


def test_expect_100_continue() -> None:
    with cluster() as c, connected(c) as sock:
        expects = b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(ASK)
        sock.sendall(HEAD + expects)
        assert received(sock, until=b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(ASK + GOOD)
        got = b""
        while got.count(WHOLE) < 2:
            got += received(sock, until=WHOLE)
        assert "expect" not in c.decode[0].seen[0].headers
        # A refusal comes before the body. What the client sends then, a body or the next request,
        # nobody can tell: the connection ends.
        sock.sendall(HEAD.replace(b"/v1", b"/v2") + expects)
        got = received(sock)
        assert statuses(got) == [404] and b"connection: close" in got
        assert len(c.decode[0].seen) == 2


def test_http_1_0_gets_its_answer_with_the_end_of_the_connection() -> None:
    with cluster() as c:
        stream = b'{"prompt":"x","stream":true}'
        for body, expected in ((ASK, WHOLE), (stream, b"".join(CHUNKS))):
            with connected(c) as sock:
                head = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
                sock.sendall(head + body)
                head, _, answer = received(sock).partition(b"\r\n\r\n")
                assert answer == expected and b"connection: close" in head
                assert b"transfer-encoding" not in head


def test_http_1_0_notices_a_stream_that_is_cut() -> None:
    with cluster() as c, connected(c) as sock:
        c.decode[0].always = "break"
        body = b'{"prompt":"x","stream":true}'
        sock.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body))
        sock.sendall(body)
        answer = b""
        with pytest.raises(ConnectionResetError):
            while piece := sock.recv(1 << 16):
                answer += piece
        assert b"".join(CHUNKS[:2]) + b'data: {"error"' in answer
        c.expect("requests_total", 'outcome="broken_stream"', count=1)


def test_head_requests_have_no_body() -> None:
    with cluster() as c, connected(c) as sock:
        for path in (b"/health", b"/v1/models", b"/nothing"):
            sock.sendall(b"HEAD %s HTTP/1.1\r\nHost: x\r\n\r\n" % path)
            got = received(sock, until=b"\r\n\r\n")
            assert got.endswith(b"\r\n\r\n")
            assert statuses(got) == [404 if path == b"/nothing" else 200]
        sock.sendall(HEALTH)
        assert b'"status":"ok"' in received(sock, until=b"}]}")


def test_a_body_that_breaks_behind_its_answer_gets_no_second_one() -> None:
    """Whoever shares the connection would take it for the answer to the next request."""
    with cluster() as c, connected(c) as sock:
        sock.sendall(
            HEAD.replace(b"/v1/completions", b"/nothing")
            + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n"
        )
        assert statuses(received(sock, until=b"}}")) == [404]
        sock.sendall(b"zz\r\n")
        assert received(sock) == b""


def test_methods_that_a_route_does_not_have() -> None:
    with cluster() as c:
        for method, path, allowed in (
            ("GET", "/v1/completions", "POST"),
            ("POST", "/v1/models", "GET, HEAD"),
            ("POST", "/live/stream", "GET"),
        ):
            got = c.client.request(method, path)
            assert (got.status_code, got.json()["error"]["code"]) == (405, "method_not_allowed")
            assert got.headers["allow"] == allowed
        assert c.client.post("/v1/completions?a=b", json={"prompt": "x"}).content == WHOLE
        assert c.client.post("/v1/%63ompletions", json={"prompt": "x"}).content == WHOLE


@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
@pytest.mark.parametrize("when", ["body", "answer", "stream"])
def test_a_client_that_leaves(how: str, when: str) -> None:
    with cluster(prefill=0) as c:
        c.decode[0].always = "gate" if when == "stream" else "hang"
        stream = b'{"prompt":"x","stream":true}'
        with connected(c) as sock:
            head = HEAD + b"Content-Length: %d\r\n\r\n" % len(stream)
            sock.sendall(head + (stream if when != "body" else stream[:9]))
            if when == "stream":
                c.decode[0].gate.release()
                received(sock, until=CHUNKS[0])
            elif when == "answer":
                wait_until(lambda: len(c.decode[0].seen) == 1)
            if how == "half-close":
                sock.shutdown(socket.SHUT_WR)
                received(sock)
            elif how == "reset":
                linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        c.expect("requests_total", 'outcome="client_gone"', count=1)
        c.expect("in_flight", count=0)
        c.expect("held_bytes", count=0)
        if when != "body":
            wait_until(lambda: c.decode[0].seen[0].done == "aborted")


def test_an_answer_that_is_not_read_yet_is_not_cut_for_a_new_client() -> None:
    size = 16 << 20  # more than the kernel takes

    async def route(request: ClientRequest) -> None:
        request.answer(Answer(200, [], bytes(size)))

    async def run() -> int:
        loop, state = asyncio.get_running_loop(), ServerState()
        made = connections_of({"/": route}, Limits(max_connections=2, address_share=1.0))
        server = await loop.create_server(lambda: made(server_state=state), "127.0.0.1", 0)
        at = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*at)
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        others = [await asyncio.open_connection(*at) for _ in range(2)]
        assert await others[0][0].read() == b""  # idle, and so it gave way
        whole = len(await reader.readexactly(size))
        for _, other in [(reader, writer), *others]:
            other.close()
        server.close()
        return whole

    assert asyncio.run(run()) == size


def test_a_stream_that_its_client_reads_at_once_is_counted_as_ok() -> None:
    """Its end is written before the request's task wakes up, and the client may be gone by then."""
    with cluster() as c:
        body = b'{"prompt":"x","stream":true}'
        for _ in range(20):
            with connected(c) as sock:
                sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                assert b"[DONE]" in received(sock, until=b"0\r\n\r\n")
        c.expect("requests_total", 'outcome="ok"', count=20)


def test_a_body_that_is_refused_is_read_and_dropped() -> None:
    limits = quick(max_body_bytes=100_000)
    with cluster(limits=limits) as c, connected(c) as sock:
        large = b"x" * 300_000
        sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(large) + large + GOOD)
        got = received(sock, until=WHOLE)
        assert statuses(got) == [413, 200]
        whole = b"y" * 100_001  # comes in one piece, and is as large
        sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(whole) + whole)
        assert statuses(received(sock, until=b"}}")) == [413]
