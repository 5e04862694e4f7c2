# SPDX-License-Identifier: Apache-2.0
"""An engine that computes nothing: `python -m benchmarks.routing.engine PORTS DELAY STEP EVENTS`.

It listens on PORTS free ports, so that one process is several engines, and prints them in one line.
A prefill is answered at once, with a ticket. Any other completion is a stream: the first event
after DELAY seconds, then one every STEP seconds, EVENTS in all. `/tokenize` splits a text at its
spaces into token ids. `/metrics` is as long as vLLM's.
"""

from __future__ import annotations

import asyncio
import json
import sys

DONE = b"data: [DONE]\n\n"
_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
_TICKET = b'{"id":"p","kv_transfer_params":{"do_remote_prefill":true,"remote_port":1}}'
_METRICS = b"".join(
    [
        b'vllm:num_requests_running{engine="0",model_name="m"} 1.0\n',
        b'vllm:num_requests_waiting{engine="0",model_name="m"} 0.0\n',
        b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.1\n',
        b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="50000"} 1.0\n',
        *(
            b'vllm:histogram_%d_seconds_bucket{engine="0",le="%d.0",model_name="m"} 0.0\n' % (h, at)
            for h in range(30)
            for at in range(20)
        ),
    ]
)


class Engine(asyncio.Protocol):
    """One connection. Requests come one after another, as the router and the client send them."""

    def __init__(self, delay: float, step: float, events: int) -> None:
        self._delay, self._step, self._events = delay, step, events
        self._loop = asyncio.get_running_loop()
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, mark, body = self._data.partition(b"\r\n\r\n")
        if not mark:
            return
        _, found, after = head.lower().partition(b"content-length:")
        if len(body) < (int(after.split(b"\r\n", 1)[0]) if found else 0):
            return
        self._data = b""
        self._answer(head.split(b" ", 2)[1].decode(), body)

    def _answer(self, path: str, body: bytes) -> None:
        if path == "/v1/completions":
            if b'"do_remote_decode":true' in body:
                self._whole(_TICKET)
            else:
                self._loop.call_later(self._delay, self._event, 0)
        elif path == "/tokenize":
            tokens = [int(word) for word in json.loads(body)["prompt"].split()]
            self._whole(json.dumps({"tokens": tokens, "count": len(tokens)}).encode())
        elif path in ("/health", "/metrics", "/v1/models"):
            self._whole({"/health": b"", "/metrics": _METRICS, "/v1/models": _MODELS}[path])
        else:
            self._whole(b"{}", b"404 Not Found")

    def _event(self, number: int) -> None:
        if self._transport.is_closing():
            return
        last = number == self._events
        data = DONE if last else b'data: {"choices":[{"index":0,"text":" %d"}]}\n\n' % number
        chunk = b"%x\r\n%s\r\n" % (len(data), data)
        self._transport.write((b"" if number else _STREAM) + chunk + b"0\r\n\r\n" * last)
        if not last:
            self._loop.call_later(self._step, self._event, number + 1)

    def _whole(self, body: bytes, status: bytes = b"200 OK") -> None:
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % (status, len(body)) + body)


async def main(ports: int, delay: float, step: float, events: int) -> None:
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(lambda: Engine(delay, step, events), "127.0.0.1", 0, backlog=1024)
        for _ in range(ports)
    ]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))
