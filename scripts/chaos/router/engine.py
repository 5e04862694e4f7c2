"""An engine whose tokens follow from the prompt alone, and which fails as it is told.

    python engine.py PORT EVENTS_PORT REPLAY_PORT MICROSECONDS_PER_TOKEN

It prefills, decodes, tokenizes, has metrics, and publishes KV events with a replay, as vLLM does. A
decode computes its tokens from the ticket's prompt if it has a ticket: a ticket that came to
another request gives wrong tokens, as a wrong cache would. POST /fault sets what happens to the
next requests.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import OrderedDict
from hashlib import blake2b
from typing import Any

import msgspec
import zmq
import zmq.asyncio

BLOCK_TOKENS = 16
CACHE_BLOCKS = 300
TOKEN_SECONDS = 0.004
SLOW_SECONDS = 0.7
SILENT_SECONDS = 60.0
_REMEMBERED_BATCHES = 1000
_HASH_MASK = (1 << 63) - 1


def seed_of(prompt: str) -> str:
    return blake2b(prompt.encode(), digest_size=16).hexdigest()


def token(seed: str, number: int) -> int:
    """Token `number` of the answer to the prompt with this seed."""
    digest = blake2b(f"{seed}:{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % 50_000


class Cache:
    """The blocks that this engine holds, and the events that tell of them."""

    def __init__(self, events_port: int, replay_port: int) -> None:
        context = zmq.asyncio.Context()
        self._pub, self._replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._pub.bind(f"tcp://127.0.0.1:{events_port}")
        self._replay.bind(f"tcp://127.0.0.1:{replay_port}")
        self.events = "ok"
        self._number = 0
        self._sent: list[tuple[int, bytes]] = []
        self._held: OrderedDict[int, None] = OrderedDict()

    def cached(self, tokens: list[int]) -> int:
        count = 0
        for name in _names(tokens):
            if name not in self._held:
                break
            count += BLOCK_TOKENS
        return min(count, len(tokens) - 1)

    async def compute(self, tokens: list[int]) -> None:
        names = _names(tokens)
        known = next((i for i, n in enumerate(names) if n not in self._held), len(names))
        for name in names:
            self._held[name] = None
            self._held.move_to_end(name)
        events: list[dict[str, Any]] = []
        if names[known:]:
            parent = names[known - 1] if known else None
            ids = tokens[known * BLOCK_TOKENS : len(names) * BLOCK_TOKENS]
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": names[known:],
                    "parent_block_hash": parent,
                    "token_ids": ids,
                    "block_size": BLOCK_TOKENS,
                    "medium": "GPU",
                }
            )
        dropped = []
        while len(self._held) > CACHE_BLOCKS:
            dropped.append(self._held.popitem(last=False)[0])
        if dropped:
            events.append({"type": "BlockRemoved", "block_hashes": dropped, "medium": "GPU"})
        if events:
            await self._publish(events)

    async def _publish(self, events: list[dict[str, Any]]) -> None:
        number, payload = self._number, msgspec.msgpack.encode([1.0, events, 0])
        self._number += 1
        if self.events == "garbage":
            payload = b"\xc1" + payload[:-3]
        self._sent.append((number, payload))
        del self._sent[:-_REMEMBERED_BATCHES]
        if self.events == "garbage":
            await self._pub.send_multipart([b"", b"no number", b"\x00" * 40])
        if self.events != "lost":
            await self._pub.send_multipart([b"", number.to_bytes(8, "big"), payload])

    async def answer_replays(self) -> None:
        while True:
            client, *_, start = await self._replay.recv_multipart()
            first = int.from_bytes(start, "big")
            for number, payload in list(self._sent):
                if number >= first:
                    told = [client, b"", b"", number.to_bytes(8, "big"), payload]
                    await self._replay.send_multipart(told)
            await self._replay.send_multipart([client, b"", b"", b"\xff" * 8, b""])


def _names(tokens: list[int]) -> list[int]:
    """The hashes of all whole blocks, each chained to the one before."""
    names, last = [], b""
    for at in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        text = last + repr(tokens[at : at + BLOCK_TOKENS]).encode()
        last = blake2b(text, digest_size=8).digest()
        names.append(int.from_bytes(last, "big") & _HASH_MASK)
    return names


class Engine:
    def __init__(self, cache: Cache, token_microseconds: int) -> None:
        self._cache = cache
        self._token_seconds = 1e-6 * token_microseconds  # of a prefill
        self._acts: list[str] = []  # what happens to the next completions
        self._running = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, request by request."""
        try:
            while await self._one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError):  # OSError: also a TimeoutError
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request. False: the connection has to end."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        path = first.split()[1]
        lengths = [line for line in lines if line.lower().startswith("content-length:")]
        body = await reader.readexactly(int(lengths[0].partition(":")[2])) if lengths else b""
        if path == "/v1/completions":
            self._running += 1
            try:
                return await self._complete(json.loads(body), reader, writer)
            finally:
                self._running -= 1
        status, answer = 200, b"{}"
        if path == "/fault":
            said = json.loads(body)
            self._acts, self._cache.events = list(said["acts"]), said["events"]
        elif path == "/v1/models":
            answer = b'{"object":"list","data":[{"id":"m"}]}'
        elif path == "/tokenize":
            tokens = list(json.loads(body)["prompt"].encode())
            answer = json.dumps({"tokens": tokens, "count": len(tokens)}).encode()
        elif path == "/metrics":
            answer = (
                f"vllm:num_requests_running {self._running}.0\nvllm:num_requests_waiting 0.0\n"
                "vllm:kv_cache_usage_perc 0.1\n"
                f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",'
                f'num_gpu_blocks="{CACHE_BLOCKS}"}} 1.0\n'
            ).encode()
        elif path != "/health":
            status = 404
        writer.write(_whole(status, answer))
        await writer.drain()
        return True

    async def _complete(
        self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        act = self._acts.pop(0) if self._acts else ""
        if act == "slow":
            await asyncio.sleep(SLOW_SECONDS)
        elif act == "silent":
            async with asyncio.timeout(SILENT_SECONDS):
                await reader.read(1)  # until the router gives up
            return False
        elif act == "early":
            return False
        elif act == "no HTTP":
            writer.write(b"\x00\xffHTTP? \r\n\r\n" * 20)
            return False
        elif act == "endless head":
            writer.write(b"HTTP/1.1 200 OK\r\nx-long: " + b"y" * (1 << 20))
            await writer.drain()
            return False
        elif act.isdigit():
            writer.write(_whole(int(act), b'{"error":{"message":"as told"}}'))
            await writer.drain()
            return True
        prompt, params = asked["prompt"], asked.get("kv_transfer_params") or {}
        tokens = list(prompt.encode())
        cached = self._cache.cached(tokens)
        if "of" not in params:
            await asyncio.sleep(0.002 + self._token_seconds * (len(tokens) - cached))
        await self._cache.compute(tokens)
        usage = {
            "prompt_tokens": len(tokens),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if params.get("do_remote_decode"):
            ticket = {"do_remote_prefill": True, "of": seed_of(prompt)}
            answer: dict[str, Any] = {"id": "p", "usage": usage, "kv_transfer_params": ticket}
            return await self._write_whole(writer, json.dumps(answer).encode(), act)
        seed = params.get("of") or seed_of(prompt)
        count = int(asked["max_tokens"])
        if asked.get("stream"):
            return await self._stream(writer, seed, count, act)
        await asyncio.sleep(count * TOKEN_SECONDS)
        text = " ".join(str(token(seed, n)) for n in range(count))
        answer = {"choices": [{"text": text}], "usage": usage}
        return await self._write_whole(writer, json.dumps(answer).encode(), act)

    async def _write_whole(self, writer: asyncio.StreamWriter, body: bytes, act: str) -> bool:
        if act == "bad JSON":
            body = body[: len(body) // 2]
        change = {"long length": 100, "short length": -7}.get(act, 0)
        written = _whole(200, body, change)
        writer.write(written[: len(written) // 2] if act == "cut" else written)
        await writer.drain()
        return act not in ("cut", "long length")

    async def _stream(self, writer: asyncio.StreamWriter, seed: str, count: int, act: str) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for number in range(count):
            if number == count // 2 and act in ("cut", "long length", "short length"):
                writer.write(b"ff\r\ndata: {")  # a chunk that does not end
                writer.transport.abort() if act == "cut" else await writer.drain()
                return False
            if number == count // 2 and act == "bad JSON":
                writer.write(_chunk(b"data: {]\xff\n\n"))
                return False
            text = json.dumps({"choices": [{"text": str(token(seed, number))}]})
            writer.write(_chunk(b"data: %s\n\n" % text.encode()))
            await writer.drain()
            await asyncio.sleep(TOKEN_SECONDS)
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()
        return True


def _whole(status: int, body: bytes, length_change: int = 0) -> bytes:
    length = len(body) + length_change
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {length}"
    return head.encode() + b"\r\n\r\n" + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def main() -> None:
    port, events_port, replay_port, token_microseconds = map(int, sys.argv[1:])
    cache = Cache(events_port, replay_port)
    engine = Engine(cache, token_microseconds)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", port, backlog=512)
    print("ready", flush=True)
    async with server:
        await asyncio.gather(server.serve_forever(), cache.answer_replays())


if __name__ == "__main__":
    asyncio.run(main())
