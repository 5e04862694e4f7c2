"""`kvferry router` in a process of its own, before small real engines on loopback.

`router_process.py PORT SECONDS` is such an engine in a process of its own, which a test can kill.
It answers a completion after SECONDS.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forkserver
from waiting import PATIENCE_SECONDS, wait_until

LARGE_ANSWER_BYTES = 8 << 20
HELD_EVENTS = [b'data: {"n": %d}\n\n' % n for n in range(4)] + [b"data: [DONE]\n\n"]
_START_SECONDS = 60.0


class _Handler(BaseHTTPRequestHandler):
    """Answers by the prompt: `large`, `endless`, `torn`, `held`, or anything else."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # heads and bodies are written apart
    server: Engine

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(60)

    def do_GET(self) -> None:
        if self.path == "/health" and self.server.endless_health:
            self._endless("text/plain")
        else:
            self._whole(b'{"object":"list","data":[]}')

    def do_HEAD(self) -> None:
        self._whole(b"")

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        if self.path.endswith(("/render", "/tokenize")):
            self.send_error(404)
            return
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            body = {}
        self.server.asked += 1
        if "do_remote_decode" in (body.get("kv_transfer_params") or {}):
            self._whole(b'{"id":"p","kv_transfer_params":{"remote_port":1}}')
        elif body.get("prompt") == "torn":
            self._torn()
        elif body.get("prompt") == "held":
            self._held()
        elif body.get("stream") is True:
            self._endless("text/event-stream", chunks=self.server.chunks_of_stream)
        elif body.get("prompt") == "endless":
            self._endless("application/json")
        elif body.get("prompt") == "large":
            self._whole(b'"' + b"x" * (LARGE_ANSWER_BYTES - 2) + b'"')
        else:
            time.sleep(self.server.answer_seconds)
            self._whole(b'{"choices":[{"text":"fine"}]}')

    def _torn(self) -> None:
        """One and a half events, then nothing until the process ends."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for chunk in (b'data: {"n": 1}\n\n', b'data: {"n"'):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        time.sleep(60)

    def _held(self) -> None:
        """One event; the others when the test says so."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for number, event in enumerate(HELD_EVENTS):
            if number == 1:
                self.server.go_on.wait(60)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.wfile.write(b"0\r\n\r\n")

    def _whole(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _endless(self, kind: str, chunks: int | None = None) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        chunk = b"data: x\n\n" * 4096
        with suppress(OSError):
            while not self.server.stopped and chunks != 0:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                chunks = None if chunks is None else chunks - 1
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


class Engine(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256
    asked = 0
    endless_health = False
    chunks_of_stream: int | None = None  # of 36 KiB; None: without end
    stopped = False
    answer_seconds = 0.0
    context: ssl.SSLContext | None = None  # for https

    def __init__(self, address: tuple[str, int], handler: type[_Handler] = _Handler) -> None:
        super().__init__(address, handler)
        self.go_on = threading.Event()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """On the connection's own thread, which may wait for a handshake."""
        if self.context is not None:
            request.settimeout(60)
            with self.context.wrap_socket(request, server_side=True) as secure:
                super().finish_request(secure, client_address)
        else:
            super().finish_request(request, client_address)

    def handle_error(self, *args: object) -> None:
        """Routers close connections in the middle of an answer; that is no news."""

    @property
    def url(self) -> str:
        scheme = "http" if self.context is None else "https"
        return f"{scheme}://127.0.0.1:{self.server_address[1]}"


class EngineProcess:
    """An engine that can be killed and started again, at the same address."""

    def __init__(self, answer_seconds: float = 0.0) -> None:
        self.port = 0
        self.start(answer_seconds)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, answer_seconds: float = 0.0) -> None:
        command = [sys.executable, __file__, str(self.port), str(answer_seconds)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class _Forked:
    """A router in a fork of a Python that has imported it. What it offers is a Popen's."""

    def __init__(self, arguments: Sequence[str], files: int | None) -> None:
        here, there = forkserver.context.Pipe(duplex=False)
        self._process = forkserver.context.Process(
            target=_be_a_router, args=(there, arguments, dict(os.environ), files), daemon=True
        )
        self._process.start()
        there.close()
        self.stderr = os.fdopen(os.dup(here.fileno()), errors="replace")
        here.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("router", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _be_a_router(
    stderr: Connection, arguments: Sequence[str], environment: dict[str, str], files: int | None
) -> None:
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    os.environ.clear()
    os.environ.update(environment)
    _few_files(files)
    sys.argv = ["kvferry", *arguments]
    from kvferry.cli.main import app

    app()


def _few_files(files: int | None) -> None:
    if files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))


class RouterProcess:
    """`forked`: in a fork of a Python that has imported it, which starts sooner."""

    process: _Forked | subprocess.Popen[str]

    def __init__(
        self,
        engines: list[Engine],
        limits: dict[str, float],
        files: int | None,
        decode_url: str | None = None,
        more: Sequence[str] = (),
        port: int = 0,
        program: Sequence[str] = ("-m", "kvferry"),
        forked: bool = False,
    ) -> None:
        prefill, decode = engines
        arguments = ["router", "--port", str(port), *more]
        arguments += ["--prefill", prefill.url, "--decode", decode_url or decode.url]
        for name, value in limits.items():
            arguments += ["--limit", f"{name}={value}"]
        self.prefill, self.decode = prefill, decode
        self.log: list[str] = []
        self.port = 0
        if forked:
            self.process = _Forked(arguments, files)
        else:
            self.process = subprocess.Popen(
                [sys.executable, *program, *arguments],
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: _few_files(files),
            )
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        wait_until(lambda: self.port > 0 or self.process.poll() is not None, _START_SECONDS)
        if not self.port:
            self.stop()
            raise AssertionError("".join(self.log))

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"running on https?://127.0.0.1:(\d+)", line):
                self.port = int(found[1])

    def peak_bytes(self) -> int:
        """The most memory that the router's process ever had."""
        return self._memory("VmHWM")

    def memory_bytes(self) -> int:
        return self._memory("VmRSS")

    def _memory(self, name: str) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(rf"{name}:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) << 10

    def files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def connect(self, source: str = "127.0.0.1", receive_bytes: int = 0) -> socket.socket:
        """A connection of an attacker; its kernel takes `receive_bytes` unread, where given.

        Where too many wait to be accepted, the kernel drops it, and would try again after a second,
        two, and four. This tries again at once.
        """
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            sock = socket.socket()
            try:
                if receive_bytes:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
                sock.bind((source, 0))
                sock.settimeout(0.1)
                sock.connect(("127.0.0.1", self.port))
                sock.settimeout(20)
                return sock
            except TimeoutError:
                sock.close()
                if time.monotonic() > until:
                    raise
            except BaseException:
                sock.close()
                raise

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def router_process(
    limits: dict[str, float] | None = None,
    files: int | None = None,
    decode_url: str | None = None,
    more: Sequence[str] = (),
    engine_tls: ssl.SSLContext | None = None,
) -> Iterator[RouterProcess]:
    """`decode_url`: the decode engine, instead of the one in this process. `more`: arguments."""
    engines = [Engine(("127.0.0.1", 0)) for _ in range(2)]
    for engine in engines:
        engine.context = engine_tls
    threads = [threading.Thread(target=e.serve_forever, args=(0.05,), daemon=True) for e in engines]
    for thread in threads:
        thread.start()
    try:
        router = RouterProcess(engines, limits or {}, files, decode_url, more, forked=True)
        try:
            yield router
        finally:
            router.stop()
    finally:
        for engine in engines:
            engine.stopped = True
            engine.shutdown()
            engine.server_close()
        for thread in threads:
            thread.join(10)


def refuses(port: int) -> bool:
    """Whether nothing listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def post(body: bytes, length: int | None = None, path: str = "/v1/completions") -> bytes:
    """A request's bytes; `length`: the Content-Length that it claims."""
    length = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
    return head.encode() + body


def read_answer(sock: socket.socket) -> tuple[int, bytes]:
    """An answer's status and body. Raises OSError where the connection ends before."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _more(sock)
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    while length is not None and len(body) < int(length[1]):
        body += _more(sock)
    return int(head.split()[1]), body


def main() -> None:
    engine = Engine(("127.0.0.1", int(sys.argv[1])))
    engine.answer_seconds = float(sys.argv[2])
    print(engine.server_address[1], flush=True)
    engine.serve_forever()


def _more(sock: socket.socket) -> bytes:
    data = sock.recv(1 << 16)
    if not data:
        raise ConnectionError("the router closed the connection")
    return data


if __name__ == "__main__":
    main()
