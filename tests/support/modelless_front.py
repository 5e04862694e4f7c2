"""The little of vLLM's HTTP API that proxies use, before an engine without a model."""

from __future__ import annotations

import json
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from modelless import Modelless

ANSWER_SECONDS = 60.0


class Front:
    """Serves /v1/completions for prompts of token ids; answers {} to every GET."""

    def __init__(self, engine: Modelless) -> None:
        self.engine, self.lock, self.over = engine, threading.Lock(), False
        front = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer({})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                name = self.headers.get("X-Request-Id") or secrets.token_hex(8)
                self.answer(front.complete(f"cmpl-{name}-0-{secrets.token_hex(4)}", body))

            def answer(self, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        for work in (self.server.serve_forever, self.step):
            threading.Thread(target=work, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def step(self) -> None:
        while not self.over:
            with self.lock:
                self.engine.step()
            time.sleep(0.001)

    def complete(self, name: str, body: Any) -> dict[str, Any]:
        with self.lock:
            params = body.get("kv_transfer_params") or {}
            self.engine.add(name, body["prompt"], body["max_tokens"], **params)
        deadline = time.monotonic() + ANSWER_SECONDS
        while name not in self.engine.ended:
            assert time.monotonic() < deadline, f"{name} was not answered"
            time.sleep(0.002)
        told = {"choices": [{"token_ids": self.engine.tokens[name]}]}
        return {**told, "kv_transfer_params": self.engine.params.get(name)}

    def close(self) -> None:
        self.over = True
        self.server.shutdown()
        self.server.server_close()
        with self.lock:
            self.engine.close()
