# SPDX-License-Identifier: Apache-2.0
"""The router's connections to engines, against servers on loopback that answer byte by byte."""

from __future__ import annotations

import asyncio
import errno
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import h11
import pytest

import kvferry.router.fleet.connections as connections_module
from kvferry.router.fleet.connections import (
    BrokenAnswer,
    EngineTransport,
    NoConnection,
    address_of_url,
)
from kvferry.router.http1 import Body, HttpError

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Odd: A\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Server:
    """Reads one request, then does as told, until the connection is closed."""

    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
    port: int = 0
    connections: int = 0
    requests: list[bytes] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                await self.answer(reader, writer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()


def bytes_of(*parts: bytes, close: bool = False) -> Server:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if close:
            writer.close()

    return Server(answer)


@dataclass
class Client:
    """Asks one server through a pool."""

    pool: EngineTransport
    url: str

    async def get(self, *headers: tuple[bytes, bytes]) -> Got:
        answer = await self.pool.ask(address_of_url(self.url), b"GET", list(headers), b"")
        try:
            pieces = []
            while data := await answer.read():
                pieces.append(data)
        finally:
            answer.done()
        return Got(answer.head.status, answer.head.headers, pieces)


@dataclass
class Got:
    status: int
    headers: list[tuple[bytes, bytes]]
    pieces: list[bytes]

    @property
    def content(self) -> bytes:
        return b"".join(self.pieces)


@dataclass
class Sink:
    """Where a stream goes; a client that reads no more after `most` bytes."""

    most: float = float("inf")
    taken: list[bytes] = field(default_factory=list)
    go_on: Callable[[], None] | None = None
    ended: bool = False

    def take(self, data: bytes, last: bool) -> bool:
        self.taken.append(data)
        self.ended |= last
        return self.bytes > self.most

    def on_drain(self, go_on: Callable[[], None] | None) -> None:
        self.go_on = go_on

    @property
    def bytes(self) -> int:
        return sum(map(len, self.taken))


@asynccontextmanager
async def asking(
    server: Server, idle_seconds: float = 5.0
) -> AsyncIterator[tuple[Client, EngineTransport]]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    pool = EngineTransport(ssl.create_default_context(), idle_seconds, 1.0)
    try:
        async with asyncio.timeout(20):
            yield Client(pool, f"http://127.0.0.1:{server.port}/x"), pool
    finally:
        pool.close()
        listening.close()
        for writer in server.writers:
            writer.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_connection_is_used_again_and_answers_are_as_they_came() -> None:
    async def run() -> None:
        server = bytes_of(WHOLE)
        async with asking(server) as (client, _):
            for _ in range(3):
                answer = await client.get((b"X-Mine", b"b"))
                assert (answer.status, answer.content) == (200, b"ok")
                assert (b"x-odd", b"A") in answer.headers
            assert server.connections == 1
            assert b"GET /x HTTP/1.1\r\n" in server.requests[2]
            assert b"X-Mine: b\r\n" in server.requests[2]

    asyncio.run(run())


def test_an_answer_in_single_bytes_is_whole() -> None:
    body = b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
    parts = [bytes([byte]) for byte in b"HTTP/1.1 103 Early Hints\r\n\r\n" + CHUNKED + body]

    async def run() -> None:
        server = bytes_of(*parts)
        async with asking(server) as (client, _):
            assert (await client.get()).content == b"abcdefg"
            assert (await client.get()).content == b"abcdefg"
            assert server.connections == 1

    asyncio.run(run())


def test_chunks_that_come_together_are_one_piece() -> None:
    async def run() -> None:
        server = bytes_of(CHUNKED + b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n")
        async with asking(server) as (client, _):
            assert (await client.get()).pieces == [b"ab"]

    asyncio.run(run())


def test_bodies_are_as_h11_reads_them_however_they_come() -> None:
    dice = random.Random(4)
    for _ in range(2000):
        chunks = [bytes(dice.choices(b"ab\r\n0", k=dice.randint(1, 9))) for _ in range(5)]
        marks = [b"", b";x=1", b"  "]
        body = b"".join(b"%X%s\r\n%s\r\n" % (len(c), dice.choice(marks), c) for c in chunks)
        body += dice.choice([b"0\r\n\r\n", b"00\r\nx: y\r\n\r\n"])
        if damaged := dice.random() < 0.5:
            at = dice.randrange(len(body) - 16)
            body = body[:at] + dice.choice([b"", b"\r", b"\n", b"7", b"x"]) + body[at + 1 :]
        cuts = sorted(dice.choices(range(len(body) + 1), k=3))
        parts = [body[a:b] for a, b in pairwise([0, *cuts, len(body)])]
        expected, found = by_h11(parts), by_us(parts)
        # Trailers are not read, and a line without a return waits for one.
        open_end = damaged and (found is None or not found[1])
        assert open_end or found == expected, body


def by_h11(parts: list[bytes]) -> tuple[bytes, bool] | None:
    """What has come, and whether it is whole; None: that is no body."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(CHUNKED)
    connection.next_event()
    got = b""
    for part in filter(None, parts):
        connection.receive_data(part)
        while True:
            try:
                event = connection.next_event()
            except h11.RemoteProtocolError:
                return None
            if not isinstance(event, h11.Data):
                break
            got += bytes(event.data)
    return got, connection.their_state is h11.DONE


def by_us(parts: list[bytes]) -> tuple[bytes, bool] | None:
    body = Body(chunked=True, length=0)
    try:
        for part in filter(None, parts):
            body.receive(part)
    except HttpError:
        return None
    return b"".join(body.parts), body.whole


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (b"", "without an answer"),
        (CHUNKED + b"x\r\nab", "no chunk"),
        (CHUNKED + b"1\r\nabc\r\n0\r\n\r\n", "no chunk"),
        (CHUNKED + b"1\r\nab", "no chunk ends"),
        (CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 1\r\n\r\n"), "contradict"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "understood"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "once"),
        (b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok", "CR LF"),
        (CHUNKED + b"1;" + b"y" * (200 << 10), "too long"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "without an answer"),
        (CHUNKED + b"5\r\nab", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab", "closed the connection"),
        (b"\x00garbage\r\n\r\n", "illegal"),
        (b"HTTP/1.1 101 Switch\r\nupgrade: x\r\n\r\n", "upgrade"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * (200 << 10), ""),
    ],
)
def test_an_answer_that_is_none_is_an_error_and_its_connection_goes(
    answer: bytes, what: str
) -> None:
    async def run() -> None:
        async with asking(bytes_of(answer, close=True)) as (client, pool):
            with pytest.raises(BrokenAnswer, match=f"(?i){what}"):
                await client.get()
            assert not pool.connections and not pool._idle

    asyncio.run(run())


def test_an_answer_that_ends_with_its_connection_is_whole_and_the_next_gets_a_new_one() -> None:
    async def run() -> None:
        server = bytes_of(b"HTTP/1.1 200 OK\r\n\r\nto the end", close=True)
        async with asking(server) as (client, pool):
            for count in (1, 2):
                assert (await client.get()).content == b"to the end"
                assert server.connections == count and not pool.connections

    asyncio.run(run())


def test_a_connection_that_was_closed_a_moment_ago_is_not_used() -> None:
    async def run() -> None:
        server = bytes_of(WHOLE)
        async with asking(server) as (client, _):
            await client.get()
            server.writers[0].transport.abort()
            await asyncio.sleep(0)  # the server's loop closes it; the client's has not looked
            time.sleep(0.05)
            assert (await client.get()).content == b"ok"
            assert server.connections == 2

    asyncio.run(run())


def test_bytes_that_nobody_asked_for_are_not_the_next_answer() -> None:
    async def run() -> None:
        server = bytes_of(WHOLE)
        async with asking(server, idle_seconds=60.0) as (client, pool):
            await client.get()
            server.writers[0].write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
            await until(lambda: not pool.connections)
            assert (await client.get()).content == b"ok"

    asyncio.run(run())


def test_bytes_behind_an_answer_are_not_the_next_one() -> None:
    async def run() -> None:
        server = bytes_of(WHOLE + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        async with asking(server) as (client, _):
            for count in (1, 2):
                assert (await client.get()).content == b"ok"
                assert server.connections == count

    asyncio.run(run())


@pytest.mark.parametrize("sent", [b"", CHUNKED + b"1\r\na\r\n"])
def test_a_cancelled_request_closes_its_connection(sent: bytes) -> None:
    async def run() -> None:
        gone = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(sent)
            assert await reader.read() == b""
            gone.set()

        server = Server(answer)
        async with asking(server) as (client, pool):
            task = asyncio.create_task(client.get())
            await until(lambda: bool(server.requests))
            await asyncio.sleep(0.05)  # what was sent has probably come
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not pool.connections
            await asyncio.wait_for(gone.wait(), 30)

    asyncio.run(run())


def test_an_engine_waits_for_a_client_that_does_not_read() -> None:
    size, sent = 64 << 20, 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(bytes(1 << 20))
            await writer.drain()
            sent += 1 << 20

    async def run() -> None:
        async with asking(Server(answer)) as (client, pool):
            got = await pool.ask(address_of_url(client.url), b"GET", [], b"")
            await asyncio.sleep(0.3)
            (connection,) = pool.connections
            assert connection._unread_bytes < 1 << 20 and sent < size // 2
            read = 0
            while data := await got.read():
                read += len(data)
            assert read == size
            got.done()

    asyncio.run(run())


def test_a_stream_passes_without_waiting_for_its_request() -> None:
    chunks = [b"5\r\nab", b"cde\r\n", b"2\r\nfg\r\n0\r\n", b"\r\n"]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        for chunk in chunks:
            await asyncio.sleep(0.02)
            writer.write(chunk)

    async def run() -> None:
        async with asking(Server(answer)) as (client, pool):
            for _ in range(2):
                got, sink = await pool.ask(address_of_url(client.url), b"GET", [], b""), Sink()
                await got.pass_on(sink, 5.0)
                got.done()
                assert sink.taken == [b"ab", b"cde", b"fg", b""] and sink.ended
                assert sink.go_on is None and idle(pool) == 1

    asyncio.run(run())


def test_a_stream_waits_for_a_client_that_does_not_read_and_is_not_silent_meanwhile() -> None:
    size, sent = 8 << 20, 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16

    async def run() -> None:
        async with asking(Server(answer)) as (client, pool):
            got, sink = await pool.ask(address_of_url(client.url), b"GET", [], b""), Sink(most=1000)
            passing = asyncio.create_task(got.pass_on(sink, 0.2))
            await asyncio.sleep(0.6)  # longer than an engine may be silent
            assert not passing.done() and sink.bytes <= 128 << 10
            sink.most = float("inf")
            assert sink.go_on is not None
            sink.go_on()
            await passing
            assert sink.bytes == size and sink.ended
            got.done()

    asyncio.run(run())


def test_a_stream_that_was_ahead_of_its_client_goes_on() -> None:
    """Reading had stopped, as much lay unread before there was somebody to pass it to."""
    size = 1 << 20

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + bytes(size))
        await writer.drain()

    async def run() -> None:
        async with asking(Server(answer)) as (client, pool):
            got, sink = await pool.ask(address_of_url(client.url), b"GET", [], b""), Sink()
            await until(lambda: not got._transport.is_reading())
            await got.pass_on(sink, 5.0)
            assert sink.bytes == size and sink.ended
            got.done()

    asyncio.run(run())


def test_a_stream_without_a_length_that_is_reset_is_no_whole_one() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\ndata: 1\n\n")
        await asyncio.sleep(0.05)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def run() -> None:
        async with asking(Server(answer)) as (client, pool):
            got, sink = await pool.ask(address_of_url(client.url), b"GET", [], b""), Sink()
            with pytest.raises(BrokenAnswer):
                await got.pass_on(sink, 5.0)
            got.done()
            assert not sink.ended and not pool.connections

    asyncio.run(run())


def test_a_head_has_no_body_to_wait_for() -> None:
    server = bytes_of(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n")

    async def run() -> None:
        async with asking(server) as (client, pool):
            for _ in range(2):
                got = await pool.ask(address_of_url(client.url), b"HEAD", [], b"")
                assert got.head.status == 200 and await got.read() == b""
                got.done()
            assert server.connections == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("sent", "close", "error", "what"),
    [
        (b"1\r\na\r\n", False, TimeoutError, None),
        (b"1\r\na\r\n", True, BrokenAnswer, "closed the connection"),
        (b"1\r\na\r\nx\r\n", False, BrokenAnswer, "no chunk"),
    ],
)
def test_a_stream_that_breaks_or_falls_silent_is_an_error(
    sent: bytes, close: bool, error: type[Exception], what: str | None
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        await asyncio.sleep(0.05)
        writer.write(sent)
        if close:
            writer.close()

    async def run() -> None:
        async with asking(Server(answer)) as (client, pool):
            got, sink = await pool.ask(address_of_url(client.url), b"GET", [], b""), Sink()
            with pytest.raises(error, match=what):
                await got.pass_on(sink, 0.3 if error is TimeoutError else 30.0)
            got.done()
            assert not sink.ended and b"".join(sink.taken) in (b"", b"a")
            assert not pool.connections

    asyncio.run(run())


def idle(pool: EngineTransport) -> int:
    return sum(map(len, pool._idle.values()))


def expire(pool: EngineTransport) -> None:
    for connection in pool.connections:
        connection.expires -= 60.0


def test_idle_connections_expire() -> None:
    async def run() -> None:
        server = bytes_of(WHOLE)
        async with asking(server, idle_seconds=60.0) as (client, pool):
            await asyncio.gather(*(client.get() for _ in range(5)))
            assert server.connections == 5 and len(pool.connections) == idle(pool) == 5
            expire(pool)
            await client.get()
            assert server.connections == 6 and len(pool.connections) == idle(pool) == 1
            await asyncio.gather(client.get(), client.get())
            next(iter(pool._idle[address_of_url(client.url).origin])).expires -= 60.0
            await client.get()  # on the newest one; the oldest has expired
            assert server.connections == 7 and len(pool.connections) == idle(pool) == 1

    asyncio.run(run())


def test_a_name_that_is_looked_up_for_long_keeps_no_other_engine_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    over, lookup = threading.Event(), socket.getaddrinfo

    def slow(host: str, *more: Any, **named: Any) -> Any:
        asked.append(host)
        if host == "dead.example":
            over.wait(20)
        return lookup("127.0.0.1" if host == "good.example" else host, *more, **named)

    monkeypatch.setattr("socket.getaddrinfo", slow)

    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
        async with asking(bytes_of(WHOLE)) as (client, pool):
            pool._connect_seconds = 0.2
            dead = address_of_url("http://dead.example:1/health")
            for _ in range(6):  # as probes do
                with pytest.raises(NoConnection, match=r"no connection in 0\.2 s"):
                    await pool.ask(dead, b"GET", [], b"")
            pool._connect_seconds = 10.0
            client.url = f"http://good.example:{client.url.rpartition(':')[2]}"
            assert (await client.get()).content == b"ok"
            assert asked.count("dead.example") == 1
            over.set()

    try:
        asyncio.run(run())
    finally:
        over.set()


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_an_engine_is_reached_while_its_name_cannot_be_looked_up(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, over, lookup = threading.Event(), threading.Event(), socket.getaddrinfo

    def breaks(host: str, *more: Any, **named: Any) -> Any:
        if host == "engine.example" and broken.is_set():
            if how == "hangs":
                over.wait(20)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return lookup("127.0.0.1" if host == "engine.example" else host, *more, **named)

    monkeypatch.setattr("socket.getaddrinfo", breaks)

    async def run() -> None:
        async with asking(bytes_of(WHOLE, close=True)) as (client, _):
            client.url = f"http://engine.example:{client.url.rpartition(':')[2]}"
            assert (await client.get()).content == b"ok"
            broken.set()
            for _ in range(2):
                assert (await client.get()).content == b"ok"
            client.url = client.url.replace("engine", "other")
            with pytest.raises(NoConnection):
                await client.get()
            over.set()

    try:
        asyncio.run(run())
    finally:
        over.set()


def test_a_refused_connection() -> None:
    async def run() -> None:
        async with asking(bytes_of(WHOLE)) as (client, _):
            pass
        with pytest.raises(NoConnection):
            await client.get()

    asyncio.run(run())


@pytest.mark.parametrize("order", [1, -1])
def test_one_address_that_refuses_tells_more_than_one_without_a_way(
    order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a name with an address of IPv6, on a host that has none."""

    async def run() -> None:
        async with asking(bytes_of(WHOLE)) as (client, _):
            pass

        async def addresses(name: str) -> list[str]:
            return ["127.0.0.1", "fd00::1"][::order]

        loop = asyncio.get_running_loop()
        connect = loop.create_connection

        async def no_ipv6(make: Any, host: str, *rest: Any, **options: Any) -> Any:
            if ":" in host:
                raise OSError(errno.ENETUNREACH, "Network is unreachable")
            return await connect(make, host, *rest, **options)

        monkeypatch.setattr(loop, "create_connection", no_ipv6)
        monkeypatch.setattr(connections_module, "addresses", addresses)
        client.url = client.url.replace("127.0.0.1", "engine")
        with pytest.raises(NoConnection) as caught:
            await client.get()
        assert isinstance(caught.value.__cause__, ConnectionRefusedError)

    asyncio.run(run())


def test_addresses() -> None:
    def parts(url: str) -> tuple[str, int, bool, bytes, bytes]:
        at = address_of_url(url)
        return at.origin.host, at.origin.port, at.origin.secure, at.host, at.target

    assert parts("http://e:81/a/v1") == ("e", 81, False, b"e:81", b"/a/v1")
    assert parts("https://e") == ("e", 443, True, b"e", b"/")
    assert parts("http://[::1]:9/x") == ("::1", 9, False, b"[::1]:9", b"/x")
