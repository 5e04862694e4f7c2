"""Clients of the router: each request ends in exactly one outcome, and every token is compared.

    right      200, complete, and every token is the expected one
    cut        a stream that says it is not complete: an error event, or a connection that breaks
    garbage    200, with what a faulty engine wrote; no JSON, so no client takes it for tokens
    refused    an error in OpenAI's format
    left       the client left by its own choice

Anything else is `Broken`.
"""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import h11

from chaos.outcome import Broken
from chaos.router.engine import seed_of, token

# Three tries of both stages with the limits of `world.LIMITS`, waits between them, and a machine
# that is busy.
DEADLINE_SECONDS = 60.0
_PREFIXES = 6  # prompts share one of so many beginnings
_SLOW_BYTES = 2048  # that a slow client's kernel takes ahead

Manner = Literal["plain", "stream", "slow", "leaves", "half a body"]
End = Literal["right", "cut", "garbage", "refused", "left"]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, chosen by the seed."""

    name: str  # its X-Request-Id
    manner: Manner
    prompt: str
    max_tokens: int
    wait_seconds: float  # before it is sent
    patience_seconds: float  # of a client that leaves

    @classmethod
    def random(cls, rng: Random, name: str, manner: Manner) -> Asked:
        shared = f"prefix {rng.randrange(_PREFIXES)} " * rng.choice((2, 10, 40))
        return cls(
            name,
            manner,
            f"{shared}{name} " + "x" * rng.randrange(200),
            rng.randrange(1, 30),
            rng.uniform(0, 0.3),
            rng.uniform(0, 0.2),
        )

    def to_send(self) -> bytes:
        body = json.dumps(
            {
                "model": "m",
                "prompt": self.prompt,
                "max_tokens": self.max_tokens,
                "stream": self.manner not in ("plain", "half a body"),
            }
        )
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: router\r\nConnection: close\r\n"
            f"X-Request-Id: {self.name}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return (head + body).encode()

    def tokens(self) -> list[int]:
        seed = seed_of(self.prompt)
        return [token(seed, number) for number in range(self.max_tokens)]


@dataclass(slots=True)
class Got:
    status: int = 0
    body: bytes = b""
    complete: bool = False
    headers: dict[bytes, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ended:
    asked: Asked
    end: End
    status: int  # 0: none was seen


async def ask(asked: Asked, port: int) -> Ended:
    """Send one request, and compare what comes back. Raises Broken."""
    await asyncio.sleep(asked.wait_seconds)
    got = Got()
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            left = await _exchange(asked, port, got)
    except TimeoutError:
        raise Broken(
            f"{asked.name} ({asked.manner}) has no end in {DEADLINE_SECONDS:g} s"
        ) from None
    if left:
        return Ended(asked, "left", got.status)
    return Ended(asked, _judge(asked, got), got.status)


async def _exchange(asked: Asked, port: int, got: Got) -> bool:
    """Whether the client left."""
    sock = socket.socket()
    sock.setblocking(False)
    if asked.manner == "slow":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BYTES)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=_SLOW_BYTES)
    try:
        data = asked.to_send()
        if asked.manner == "half a body":
            writer.write(data[:-20])
            await writer.drain()
            await asyncio.sleep(asked.patience_seconds)
            return True
        writer.write(data)
        try:
            if asked.manner == "leaves":
                async with asyncio.timeout(asked.patience_seconds):
                    await _read(reader, got, 0.0)
            else:
                await _read(reader, got, 0.02 if asked.manner == "slow" else 0.0)
        except TimeoutError:
            if asked.manner == "leaves":
                return True
            raise
        return False
    finally:
        writer.transport.abort()


async def _read(reader: asyncio.StreamReader, got: Got, pause_seconds: float) -> None:
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="GET", target="/", headers=[("host", "router")]))
    parser.send(h11.EndOfMessage())
    while True:
        try:
            event = parser.next_event()
        except h11.RemoteProtocolError:
            return  # the connection broke in the middle of the answer
        if isinstance(event, h11.Response):
            got.status, got.headers = event.status_code, dict(event.headers)
        elif isinstance(event, h11.Data):
            got.body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            got.complete = True
            return
        elif isinstance(event, h11.ConnectionClosed):
            return
        else:
            try:
                parser.receive_data(await reader.read(1 << 16))
            except OSError:
                return
            await asyncio.sleep(pause_seconds)


def _judge(asked: Asked, got: Got) -> End:
    who = f"{asked.name} ({asked.manner})"
    if not got.status:
        raise Broken(f"{who} got no answer: its connection was closed")
    if got.headers.get(b"x-request-id", b"").decode() != asked.name:
        raise Broken(f"{who} got the answer of {got.headers.get(b'x-request-id')!r}")
    if got.status != 200:
        error = _json(got.body)
        if not got.complete or not isinstance(error, dict) or "message" not in error["error"]:
            raise Broken(f"{who} got {got.status} without an error: {got.body!r:.300}")
        return "refused"
    if not got.headers[b"content-type"].startswith(b"text/event-stream"):
        return _judge_whole(asked, got, who)
    return _judge_stream(asked, got, who)


def _judge_whole(asked: Asked, got: Got, who: str) -> End:
    if not got.complete:
        raise Broken(f"{who}: an answer that is not streamed was cut: {got.body!r:.300}")
    answer = _json(got.body)
    if answer is None:
        return "garbage"
    if [int(word) for word in answer["choices"][0]["text"].split()] != asked.tokens():
        raise Broken(f"{who} got wrong tokens: {answer!r:.300}")
    return "right"


def _judge_stream(asked: Asked, got: Got, who: str) -> End:
    tokens: list[int] = []
    end: End | None = None
    for event in got.body.split(b"\n\n")[:-1]:
        data = event.removeprefix(b"data: ")
        said = _json(data)
        if end is not None and end != "garbage":
            raise Broken(f"{who}: its stream goes on after its end: {event!r:.300}")
        if data == b"[DONE]":
            end = "right"
        elif said is None:
            end = "garbage"
        elif "error" in said:
            end = "cut"
        else:
            tokens.append(int(said["choices"][0]["text"]))
    expected = asked.tokens()
    if tokens != expected[: len(tokens)] or (end == "right" and tokens != expected):
        raise Broken(f"{who} got wrong tokens: {tokens}, expected {expected}")
    if end is None and got.complete:
        raise Broken(f"{who}: its stream ended well, without [DONE] and without an error")
    if end == "right" and not got.complete:
        raise Broken(f"{who}: [DONE] came, the end of the answer did not")
    return end or "cut"


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None
