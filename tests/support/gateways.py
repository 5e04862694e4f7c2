"""What existing gateways send to a prefill and a decode engine.

    vllm-router   recorded from the program itself (PyPI), into tests/fixtures/gateways;
                  `python tests/support/gateways.py` records again
    llm-d         the routing sidecar of a decode engine, which is no Python program: built here by
                  the flow of its source (llm-d-router, pkg/sidecar/proxy, August 2026)

Both know two styles. NIXL's: the prefill engine is asked first, and its `kv_transfer_params` go to
the decode engine. Mooncake's: both engines get one `transfer_id`, and the decode engine is told
where the prefill engine's bootstrap answers.
"""

from __future__ import annotations

import contextlib
import copy
import http.client
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from kvferry.handover.ticket import Ticket
from vllm_engines import free_port, open_log

Style = Literal["nixl", "mooncake"]
STYLES: tuple[Style, ...] = ("nixl", "mooncake")
Json = dict[str, Any]
PARAMS = "kv_transfer_params"
VERSION = "0.1.16"
RECORDED = Path(__file__).parents[1] / "fixtures" / "gateways" / f"vllm-router-{VERSION}.json"
ANSWER_SECONDS = 120.0
START_SECONDS = 60.0
# What clients ask for in the recording. `min_tokens` and `stream_options` are fields that an engine
# refuses in a request for one token.
COMPLETION: Json = {
    "model": "tiny",
    "prompt": [5, 6, 7],
    "max_tokens": 8,
    "min_tokens": 3,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}
STREAM: Json = {
    **COMPLETION,
    "stream": True,
    "stream_options": {"include_usage": True},
}
CHAT: Json = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "t5 t6 t7"}],
    "max_completion_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}
ASKED = {
    "completion": ("/v1/completions", COMPLETION),
    "stream": ("/v1/completions", STREAM),
    "chat": ("/v1/chat/completions", CHAT),
}
TICKET = Ticket("p", "life", "hold", "digest", 3, "127.0.0.1", 4567, "cmpl-1").to_params()


def program() -> str | None:
    """Where vllm-router is: KVFERRY_VLLM_ROUTER, this environment, or the path."""
    beside = Path(sys.executable).parent / "vllm-router"
    named = os.environ.get("KVFERRY_VLLM_ROUTER") or (str(beside) if beside.exists() else None)
    return named or shutil.which("vllm-router")


@contextlib.contextmanager
def vllm_router(
    style: Style, prefill: str, decode: str, bootstrap: int | None, log: Path
) -> Iterator[str]:
    """The program before two engines; its URL."""
    found, port = program(), free_port()
    assert found is not None
    command = [found, "--host", "127.0.0.1", "--port", str(port), "--vllm-pd-disaggregation"]
    command += ["--prometheus-port", str(free_port()), "--policy", "round_robin"]
    command += ["--worker-startup-check-interval", "1", "--kv-connector", style]
    command += ["--prefill", prefill, *([str(bootstrap)] if bootstrap is not None else [])]
    command += ["--decode", decode]
    with open_log(log) as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


class Reply(NamedTuple):
    status: int
    body: bytes

    def json(self) -> Json:
        assert self.status == 200, self.body
        loaded: Json = json.loads(self.body)
        return loaded

    def token_ids(self) -> list[int]:
        """Of the only choice, streamed or not."""
        assert self.status == 200, self.body
        if not self.body.startswith(b"data:"):
            tokens: list[int] = self.json()["choices"][0]["token_ids"]
            return tokens
        lines = [x.removeprefix(b"data: ") for x in self.body.splitlines() if x]
        assert lines.pop() == b"[DONE]"
        events = [json.loads(x) for x in lines]
        return [t for e in events for c in e["choices"] for t in c["token_ids"] or ()]


def send(url: str, path: str, body: Json, headers: list[tuple[str, str]]) -> Reply:
    """One POST. A header may come twice."""
    where, data = urlsplit(url), json.dumps(body).encode()
    connection = http.client.HTTPConnection(where.netloc, timeout=ANSWER_SECONDS)
    try:
        connection.putrequest("POST", path)
        for name, value in [*headers, ("content-length", str(len(data)))]:
            connection.putheader(name, value)
        connection.endheaders(data)
        answer = connection.getresponse()
        return Reply(answer.status, answer.read())
    finally:
        connection.close()


# llm-d's sidecar


def llm_d(
    style: Style, prefill: str, decode: str, path: str, asked: Json, bootstrap: int | None = None
) -> Reply:
    """What the sidecar of a decode engine does with a request that has `x-prefiller-host-port`."""
    request_id = str(uuid.uuid4())
    # The gateway before it gives each request an id. The sidecar adds its own, and passes both on.
    headers = [("content-type", "application/json"), ("x-request-id", "gateway-1")]
    if style == "mooncake":
        return _llm_d_mooncake(prefill, decode, path, asked, headers, bootstrap)
    headers.append(("x-request-id", request_id))
    nothing = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    params = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(nothing)}
    first = {k: v for k, v in asked.items() if k != "stream_options"}
    first |= {"stream": False, "max_tokens": 1, "max_completion_tokens": 1, PARAMS: params}
    answer = send(prefill, path, through_go(first), headers)
    if answer.status != 200:
        return answer
    # Without the field in the answer, the decode engine gets null.
    second = {**asked, PARAMS: through_go(answer.json()).get(PARAMS)}
    return send(decode, path, through_go(second), headers)


def _llm_d_mooncake(
    prefill: str,
    decode: str,
    path: str,
    asked: Json,
    headers: list[tuple[str, str]],
    bootstrap: int | None,
) -> Reply:
    """Both engines at once. The prefill engine's answer is read and dropped."""
    address, transfer_id = f"http://127.0.0.1:{bootstrap}", f"xfer-{uuid.uuid4()}"
    with urllib.request.urlopen(f"{address}/query", timeout=5) as answer:
        rank, told = next(iter(json.load(answer).items()))
    params = {"do_remote_prefill": False, "do_remote_decode": True, "transfer_id": transfer_id}
    first = {k: v for k, v in asked.items() if k != "stream_options"}
    first |= {"stream": False, "max_tokens": 1, PARAMS: params}
    if "max_completion_tokens" in asked:
        first["max_completion_tokens"] = 1
    params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer_id}
    params |= {"remote_bootstrap_addr": address, "remote_engine_id": told["engine_id"]}
    second = {**asked, PARAMS: params}
    ranked = [*headers, ("x-data-parallel-rank", rank)]
    with ThreadPoolExecutor(1) as pool:
        prefilled = pool.submit(send, prefill, path, through_go(first), ranked)
        reply = send(decode, path, through_go(second), headers)
        assert prefilled.result(ANSWER_SECONDS).status == 200
    return reply


def through_go(value: Any) -> Any:
    """JSON as a Go program passes it on that reads it without types: numbers are doubles."""
    if isinstance(value, dict):
        return {key: through_go(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [through_go(one) for one in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return int(float(value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


# vllm-router's recorded requests


class Sent(NamedTuple):
    """One request of a gateway to an engine."""

    to: str  # prefill or decode
    path: str
    headers: dict[str, str]
    body: Json


def recording(style: Style, name: str) -> list[Sent]:
    """What vllm-router sent for the request of that name in `ASKED`."""
    return [Sent(**one) for one in json.loads(RECORDED.read_text())[style][name]]


def replayed(
    style: Style,
    name: str,
    prompt: Json,
    prefill: str,
    decode: str,
    bootstrap: int | None = None,
    engine_id: str = "",
) -> Reply:
    """Send the recorded requests with another prompt, and the real engine's answer and addresses.

    `prompt`: the field with the prompt.
    """
    told: Json | None = None
    reply = Reply(0, b"")
    transfer_id, request = f"xfer-{uuid.uuid4()}", uuid.uuid4().hex
    for one in recording(style, name):
        body = copy.deepcopy(one.body) | prompt
        request_id = one.headers["x-request-id"].replace("0" * 32, request)
        headers = one.headers | {"x-request-id": request_id}
        if style == "mooncake":
            body[PARAMS]["transfer_id"] = transfer_id
            if one.to == "decode":
                body[PARAMS]["remote_bootstrap_addr"] = f"http://127.0.0.1:{bootstrap}"
                body[PARAMS]["remote_engine_id"] = engine_id
        elif one.to == "decode":
            body[PARAMS] = told
        url = prefill if one.to == "prefill" else decode
        reply = send(url, one.path, body, list(headers.items()))
        if one.to == "prefill":
            told = reply.json().get(PARAMS)
    return reply


def record(folder: Path) -> dict[str, dict[str, list[Json]]]:
    """Run vllm-router before two servers that only take requests down."""
    return {style: _record(style, folder) for style in STYLES}


def _record(style: Style, folder: Path) -> dict[str, list[Json]]:
    sent: list[Sent] = []
    with contextlib.ExitStack() as stack:
        prefill, decode, bootstrap = (
            stack.enter_context(_taking_down(role, sent))
            for role in ("prefill", "decode", "bootstrap")
        )
        port = urlsplit(bootstrap).port if style == "mooncake" else None
        log = folder / f"{style}.log"
        url = stack.enter_context(vllm_router(style, prefill, decode, port, log))
        made = {}
        for name, (path, body) in ASKED.items():
            sent.clear()
            assert send(url, path, body, [("content-type", "application/json")]).status == 200
            made[name] = [_plain(one, [prefill, decode, bootstrap]) for one in sent]
    return made


def _plain(one: Sent, urls: list[str]) -> Json:
    """Without what differs from run to run."""
    text = json.dumps(one._asdict())
    for url, name in zip(urls, ("PREFILL", "DECODE", "BOOTSTRAP"), strict=True):
        text = text.replace(urlsplit(url).netloc, name)
    loaded: Json = json.loads(text)
    request_id = loaded["headers"]["x-request-id"]
    assert len(request_id.rpartition("_")[2]) == 32
    loaded["headers"]["x-request-id"] = request_id[:-32] + "0" * 32
    if "transfer_id" in (params := loaded["body"][PARAMS]):
        assert params["transfer_id"].startswith("xfer-")
        params["transfer_id"] = "xfer-0"
    return loaded


@contextlib.contextmanager
def _taking_down(role: str, sent: list[Sent]) -> Iterator[str]:
    """A server that answers as an engine would; its URL."""
    answers: Mapping[str, Json] = {
        "/query": {"0": {"engine_id": "p", "worker_addr": {}}},
        "/v1/models": {"object": "list", "data": [{"id": "tiny", "object": "model"}]},
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(json.dumps(answers.get(self.path, {})).encode(), "application/json")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            leave = ("host", "content-length", "accept")
            headers = {k.lower(): v for k, v in self.headers.items() if k.lower() not in leave}
            sent.append(Sent(role, self.path, headers, body))
            if body.get("stream"):
                self.answer(b"data: [DONE]\n\n", "text/event-stream")
                return
            told: Json = {"id": "1", "choices": []}
            if role == "prefill":
                told[PARAMS] = TICKET
            self.answer(json.dumps(told).encode(), "application/json")

        def answer(self, data: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    import tempfile

    if program() is None:
        sys.exit(f"needs vllm-router {VERSION}: install it, or name it in KVFERRY_VLLM_ROUTER")
    with tempfile.TemporaryDirectory() as folder:
        RECORDED.parent.mkdir(parents=True, exist_ok=True)
        RECORDED.write_text(json.dumps(record(Path(folder)), indent=1) + "\n")
    print(f"wrote {RECORDED}")
