"""Hostile HTTP to a real bootstrap in a child process, with a secret and without.

Requests are made as a proxy or a rank makes them, then spoiled: other methods, paths, lengths and
headers, bodies that are almost a registration, signed or not, whole, cut, drop by drop, several at
once, or never read. After every few of them a good `/query` must be answered in time with the
engine's own entry untouched. The child may not end, answer with a 500, log a traceback, take an
unsigned registration, nor grow in threads, memory or descriptors.

    python scripts/fuzz/bootstrap.py 100000 1    # frames, seed
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import io
import json
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

from kvferry.net.keys import Key

SECRET = "a secret of the fuzzer, 0123456789abcdef"
OTHER = "another secret of the fuzzer"
ANSWER_SECONDS = 5.0  # for a good query, whatever else goes on
QUERY_EVERY = 50
LOOK_EVERY = 1000  # frames between two looks at the child's threads, memory and descriptors
LEFT_OPEN = 300  # connections that trickle or never read, at a time: more than the server's places
MORE_THREADS, MORE_MIB, MORE_DESCRIPTORS = 2, 64, 300
OWN = {
    "engine_id": "own",
    "worker_addr": {},
    "kvferry": {"host": "h", "port": 9, "incarnation": "i"},
}
SHAPES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 4096, 1 << 40, 10**400, 1.5, "", "x", "x" * 600, "\ud800", "h;h", "::1",
    [], [[]], {}, {"kvferry": {}}, float("nan"),
)  # fmt: skip
METHODS = ("GET", "POST", "PUT", "HEAD", "OPTIONS", "get", "", "G" * 300, "\x00")
PATHS = (
    "/query", "/register", "/", "", "*", "/query?x=" + "y" * 500, "/query#a", "//query", "/QUERY",
    "/query/../register", "http://h/query", "/%71uery", "/register?", "/\xff",
)  # fmt: skip
VERSIONS = ("HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "http/1.1", "", "HTTP/1.1 x")
LENGTHS = ("-1", "+1", "0x10", "1e3", "", " ", "9" * 30, "1048577", "1048576", "\u0661", "1, 2")


class Broken(AssertionError):
    """What the server may never do."""


@dataclass(slots=True)
class Child:
    """The server's process."""

    process: subprocess.Popen[bytes]
    port: int
    log: Any
    before: tuple[int, float, int] = (0, 0.0, 0)

    @classmethod
    def start(cls, secret: str) -> Child:
        log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `stop`)
        process = subprocess.Popen(
            [sys.executable, __file__, "serve", secret],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        assert process.stdout is not None
        told = process.stdout.readline()
        if not told:
            log.seek(0)
            raise Broken(f"the bootstrap did not start: {log.read()[-2000:]!r}")
        return cls(process, int(told), log)

    def size(self) -> tuple[int, float, int]:
        """Threads, MiB, descriptors."""
        if self.process.poll() is not None:
            raise Broken(f"the bootstrap ended with status {self.process.returncode}")
        root = Path(f"/proc/{self.process.pid}")
        status = dict(
            line.split(":", 1) for line in (root / "status").read_text().splitlines() if ":" in line
        )
        mib = int(status["VmRSS"].split()[0]) / 1024
        return int(status["Threads"]), mib, len(list((root / "fd").iterdir()))

    def look(self) -> None:
        now = self.size()
        grown = [new - old for new, old in zip(now, self.before, strict=True)]
        for what, more, most in zip(
            ("threads", "MiB", "descriptors"),
            grown,
            (MORE_THREADS, MORE_MIB, MORE_DESCRIPTORS),
            strict=True,
        ):
            if more > most:
                raise Broken(f"the bootstrap has {more:.0f} more {what} than at its start")
        self.log.seek(0)
        if b"Traceback" in (logged := self.log.read()):
            raise Broken(f"the bootstrap logged {logged[-2000:]!r}")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise Broken("the bootstrap did not end") from None
        finally:
            self.process.stdout.close()
            self.log.close()


def registration(rng: random.Random) -> bytes:
    """A rank's body, whole or spoiled somewhere."""
    where: dict[str, Any] = {"host": "127.0.0.1", "port": rng.randrange(1, 1 << 16)}
    where["incarnation"] = f"i{rng.randrange(9)}"
    told: dict[str, Any] = {"dp_rank": rng.randrange(1, 64), "engine_id": f"e{rng.randrange(99)}"}
    told |= {"worker_addr": {"0": {"0": "tcp://127.0.0.1:1"}}, "kvferry": where}
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        part = rng.choice((told, where))
        name = rng.choice([*part, "more", "dp_rank"])
        if rng.random() < 0.3:
            part.pop(name, None)
        else:
            part[name] = rng.choice(SHAPES)
    if rng.random() < 0.01:
        told["worker_addr"] = "x" * rng.randrange(1 << 18)
    body = json.dumps(told).encode()
    if rng.random() < 0.1:
        body = rng.choice((b"[" * 100_000, b"", b"null", b"\xff" * 40, b"9" * 5000, body[:-1]))
    if rng.random() < 0.1:
        body = flipped(rng, body)
    return body


def flipped(rng: random.Random, data: bytes) -> bytes:
    spoiled = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        if spoiled:
            spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
    return bytes(spoiled)


@cache
def key(secret: str) -> bytes:
    """Of a bootstrap with that secret; of this user's where it is empty."""
    return Key.of(secret or None).derive("bootstrap")


def mac(secret: str, body: bytes) -> str:
    return hmac.new(key(secret), body, hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Frame:
    data: bytes
    signed: bool = False  # whether it may register somebody
    whole: bool = True  # whether an answer may be expected before we stop sending


def frame(rng: random.Random, secret: str) -> Frame:
    """One request, or what is sent in its place."""
    kind = rng.random()
    if kind < 0.03:
        return Frame(rng.randbytes(rng.randrange(1, 4000)), whole=False)
    post = rng.random() < 0.6
    method, path = ("POST", "/register") if post else ("GET", "/query")
    body = registration(rng) if post else b""
    signed = post and rng.random() < 0.5
    headers = [("Host", "h"), ("Content-Length", str(len(body)))]
    if signed:
        headers.append((rng.choice(("X-Kvferry-Mac", "x-kvferry-mac")), mac(secret, body)))
    elif rng.random() < 0.3:
        spoiled = rng.choice(("", "0" * 64, "\xe9" * 64, mac(OTHER, body), mac(secret, body)[:-1]))
        headers.append(("X-Kvferry-Mac", spoiled))
    version = "HTTP/1.1"
    spoil = rng.random()
    if spoil < 0.08:
        method = rng.choice(METHODS)
    elif spoil < 0.16:
        path = rng.choice(PATHS)
    elif spoil < 0.20:
        version = rng.choice(VERSIONS)
    elif spoil < 0.28:
        headers[1] = ("Content-Length", rng.choice(LENGTHS))
    elif spoil < 0.31:
        headers.append(("Content-Length", rng.choice(LENGTHS)))
    elif spoil < 0.34:
        headers.append(("Transfer-Encoding", rng.choice(("chunked", "identity", "x"))))
    elif spoil < 0.37:
        headers += [(f"X-{i}", "v") for i in range(rng.choice((50, 70, 2000)))]
    elif spoil < 0.40:
        headers.append(("X-Long", "v" * rng.choice((100, 16_000, 17_000, 200_000))))
    elif spoil < 0.43:
        headers.append((rng.choice(("", " ", "A B", "\t", ":", "\x00")), "v"))
    elif spoil < 0.45:
        headers.append(("Expect", "100-continue"))
    ends = rng.choice(("\n", "\r", "\n\r")) if rng.random() < 0.03 else "\r\n"
    lines = [f"{method} {path} {version}", *(f"{name}: {value}" for name, value in headers)]
    data = (ends.join(lines) + ends * 2).encode("latin-1", "replace") + body
    whole = True
    if rng.random() < 0.08:
        data, whole = data[: rng.randrange(len(data))], False
    elif rng.random() < 0.05:
        data = flipped(rng, data)
    if rng.random() < 0.03:
        data *= rng.randrange(2, 6)  # pipelined
    return Frame(data, signed, whole)


@dataclass(slots=True)
class Fuzzer:
    child: Child
    secret: str
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    open: deque[socket.socket] = field(default_factory=deque)

    def connect(self, seconds: float = ANSWER_SECONDS) -> socket.socket:
        """From one of a few addresses, so that quotas by address meet too."""
        source = (f"127.0.0.{self.rng.randrange(1, 9)}", 0)
        made = socket.create_connection(("127.0.0.1", self.child.port), seconds, source)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return made

    def send(self, one: Frame) -> None:
        connection = self.connect()
        fate = self.rng.random()
        if fate < 0.03:  # a drop now and then; or nobody ever reads the answer
            with contextlib.suppress(OSError):
                connection.sendall(one.data[: self.rng.randrange(1, 60)])
            self.leave_open(connection)
            return
        with connection:
            try:
                if fate < 0.06:
                    cut = self.rng.randrange(len(one.data) + 1)
                    connection.sendall(one.data[:cut])
                    connection.sendall(one.data[cut:])
                else:
                    connection.sendall(one.data)
                if fate > 0.97:
                    self.counts["left before the answer"] += 1
                    return
                connection.shutdown(socket.SHUT_WR)
                answer = received(connection)
            except TimeoutError:
                raise Broken(f"no answer and no end after {one.data[:300]!r}") from None
            except OSError:
                self.counts["hung up on"] += 1
                return
        self.judge(one, answer)

    def leave_open(self, connection: socket.socket) -> None:
        self.counts["left open"] += 1
        self.open.append(connection)
        while len(self.open) > LEFT_OPEN:
            self.open.popleft().close()
        with contextlib.suppress(OSError):
            self.rng.choice(self.open).send(b"a")

    def judge(self, one: Frame, answer: bytes) -> None:
        if not answer:
            self.counts["closed"] += 1
            return
        status, body = parsed(answer)
        if status not in (200, 400, 404):
            raise Broken(f"status {status} after {one.data[:300]!r}")
        if not one.signed and b'"ok"' in body:
            raise Broken(f"an unsigned registration was taken: {one.data[:600]!r}")
        self.counts["registered" if b'"ok"' in body else str(status)] += 1

    def query(self) -> None:
        """What a proxy asks; its answer comes in time, and the engine's own entry is as it was."""
        try:
            with self.connect() as connection:
                connection.sendall(b"GET /query HTTP/1.1\r\nHost: h\r\n\r\n")
                status, body = parsed(received(connection))
        except OSError as error:
            raise Broken(f"a good query was not answered: {error!r}") from None
        if status != 200 or json.loads(body).get("0") != OWN:
            raise Broken(f"a good query was answered with {status} {body[:300]!r}")

    def run(self, frames: int) -> Counter[str]:
        self.query()
        self.child.before = self.child.size()
        for number in range(frames):
            self.send(frame(self.rng, self.secret))
            if number % QUERY_EVERY == 0:
                self.query()
            if number % LOOK_EVERY == 0:
                self.child.look()
        self.query()
        self.child.look()
        if frames >= LOOK_EVERY and not self.counts["registered"]:
            raise Broken("no good registration was taken: is it signed as `register` signs it?")
        return self.counts

    def close(self) -> None:
        while self.open:
            self.open.pop().close()


def received(connection: socket.socket) -> bytes:
    data = bytearray()
    while part := connection.recv(1 << 16):
        data += part
    return bytes(data)


def parsed(answer: bytes) -> tuple[int, bytes]:
    """An answer that any client could read, or it is broken."""
    stream = types.SimpleNamespace(makefile=lambda *_, **__: io.BytesIO(answer))
    reply = http.client.HTTPResponse(cast(Any, stream))
    try:
        reply.begin()
        body = reply.read()
        json.loads(body)
    except (http.client.HTTPException, ValueError) as error:
        raise Broken(f"no answer of HTTP and JSON: {error!r}: {answer[:300]!r}") from None
    return reply.status, body


def run(frames: int, seed: int) -> dict[str, int]:
    """Send so many requests, half of them to a bootstrap with a secret; counts by outcome."""
    counts: Counter[str] = Counter()
    for number, secret in enumerate((SECRET, "")):
        child = Child.start(secret)
        fuzzer = Fuzzer(child, secret, random.Random(f"{seed} {number}"))
        try:
            counts += fuzzer.run((frames + 1 - number) // 2)
        finally:
            fuzzer.close()
            child.stop()
    return dict(counts)


def serve(secret: str) -> None:
    """The child: a bootstrap until its standard input ends."""
    from kvferry.vllm.bootstrap import Bootstrap

    bootstrap = Bootstrap(None, 0, secret or None)
    bootstrap.put(0, OWN)
    print(bootstrap.port, flush=True)
    sys.stdin.buffer.read()
    bootstrap.close()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        print(run(int(sys.argv[1]), int(sys.argv[2])))
