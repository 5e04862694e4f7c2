"""Mutated HTTP requests for the real router, many on a connection.

A frame is one request. Most are whole HTTP with odd content, so that the router goes on to the next
one; then comes one whose HTTP is damaged, after which the router closes the connection. So frames
go in batches, one connection each, in one piece or in several, many connections at once. After each
round of frames the router must answer a good request in time, know no failure of its own, hold no
more memory or descriptors than before, and think that its engines are well.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from router_process import RouterProcess, post, read_answer, router_process

_MIB = 1 << 20
_LIMITS = {
    "max_connections": 256,
    "max_body_bytes": _MIB,
    "max_answer_bytes": _MIB,
    "max_held_bytes": 64 * _MIB,
    "header_seconds": 0.5,
    "body_seconds": 2.0,
    "progress_seconds": 0.5,
    "client_seconds": 2.0,
    "drain_seconds": 2.0,
}
_ROUND_FRAMES = 2_000
_AT_ONCE = 24  # connections
# How long a client waits for the next byte. Some leave early. For the others the router closes the
# connection by its own deadlines, which are far shorter than the last.
_QUIET_SECONDS = (0.02, 0.2, 15.0, 15.0, 15.0, 15.0, 15.0, 15.0)
_BATCH_SECONDS = 60.0  # for one connection
_GOOD_SECONDS = 10.0  # for a good request, on a machine that does other things
_SETTLE_SECONDS = 20.0  # for connections to end by the router's deadlines
_MOST_GROWTH_BYTES = 64 * _MIB  # _LIMITS bounds what may be held; allocators keep some of it
_MOST_MORE_FILES = 16
# Answers that mean that a client's request broke the router, or made an engine look ill.
_NEVER = ("500", "502", "504")

_LAST = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
_PATHS = [b"/v1/completions", b"/v1/chat/completions", b"/v1/models", b"/health", b"/metrics"]
_PATHS += [b"/admin/engines", b"/admin/engines?url=http://10.9.9.9:1"]
_TOKEN = "a token of the admin API".replace(" ", "-")
_ODD_PATHS = [b"/", b"/v1/completions/", b"//v1/models", b"*", b"http://evil/v1/models", b"/%00"]
_ODD_PATHS += [b"/v1/completions?a=%0d%0a", b"/\xff", b"/" + b"a" * 9000, b"/%zz", b"evil:80", b""]
_METHODS = [b"DELETE", b"PATCH", b"HEAD", b"PUT", b"CONNECT", b"OPTIONS", b"P\x00", b"", b"P" * 300]
_VERSIONS = [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.1 ", b"http/1.1", b""]
_ODD_HEADERS = [
    b"Connection: upgrade\r\nUpgrade: websocket",
    b"Connection: keep-alive, authorization, content-length, x-own",
    b"Expect: what",
    b"X-Forwarded-For: 10.0.0.1, \xff",
    b"X-Request-Id: \r\nX-Request-Id: " + b"r" * 200,
    b"X-Request-Id: has space",
    b"X-Kvferry-Path: mine",
    b"Authorization: Bearer \xe9\xff",
    b"Authorization: Bearer " + _TOKEN.encode(),
    b"Authorization: Bearer " + _TOKEN.encode() + b"\r\nAuthorization: Bearer x",
    b"X-Request-Timeout: soon\r\nTimeout: Second-1",
    b"X-Request-Timeout: 1e999",
    b"Accept-Encoding: gzip, br",
    b"Content-Encoding: gzip",
    b"Content-Type: multipart/form-data; boundary=",
    b"TE: trailers",
    b"Trailer: x",
    b"Folded: a\r\n b",
    b"Long: " + b"l" * 9000,
    b"\r\n".join(b"N%d: 1" % i for i in range(200)),
]
_BROKEN_HEADERS = [
    b"Connection: close",
    b"Expect: 100-continue",
    b"Host: [::1",
    b"Host: evil\x00",
    b"Content-Length: 5\r\nContent-Length: 6",
    b"Content-Length: -1",
    b"Content-Length: +3",
    b"Content-Length: 99999999999999999999999999",
    b"Content-Length: 0x10",
    b"Content-Length: 1048577",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: identity",
    b"Transfer-Encoding: \x0bchunked",
    b"Bad Name: 1",
    b"No-Colon",
    b": empty",
    b"Null: \x00",
    b"Space : 1",
    b"Bare: a\nb: c",
    b"Long: " + b"l" * 40_000,
]
_ODD_JSON = [
    b"null", b"true", b"-1", b"0", b"1e999", b"-0.0", b"NaN", b"9" * 5000, b'""', b'"\xff"',
    b'"\\ud800"', b'"\\u0000"', b"[]", b"{}", b"[[1,2],[3]]", b'["a","b"]', b"[1,2,3]", b'[""',
    b"[" * 2000, b"[" * 100 + b"]" * 100, b'{"a":' * 600 + b"1" + b"}" * 600, b" ", b"",
    b"[" + b",".join([b'"x"'] * 2000) + b"]", b"[" + b",".join([b"7"] * 3000) + b"]",
]  # fmt: skip
_FIELDS = [
    b"prompt", b"prompt_embeds", b"messages", b"stream", b"stream_options", b"max_tokens", b"n",
    b"logprobs", b"echo", b"prompt_logprobs", b"best_of", b"min_tokens", b"kv_transfer_params",
    b"kv\\u005ftransfer_params", b"\\ud800", b"\xff", b"", b"model", b"max_completion_tokens",
    b"url", b"roles", b"draining", b"weight", b"source",
]  # fmt: skip
_PARAMS = [
    b'{"do_remote_decode":true}',
    b'{"do_remote_prefill":true,"remote_host":"10.9.9.9","remote_port":1}',
    b'{"remote_block_ids":[[' + b"1," * 3000 + b"1]]}",
    b'{"remote_engine_id":{"deep":[[[[[]]]]]},"tp_size":-1}',
]


class FuzzFailure(AssertionError):
    """The router did what it must not do for any input."""


def run(frames: int, seed: int) -> dict[str, int]:
    """Sends `frames` mutated requests; counts by what became of them. Raises FuzzFailure."""
    random = Random(seed)
    counts: Counter[str] = Counter()
    with (
        _token_file() as token,
        router_process(_LIMITS, more=["--token-file", token]) as router,
    ):
        router.decode.chunks_of_stream = router.prefill.chunks_of_stream = 2
        _round(router, random, min(frames, 200), counts)  # what is imported and cached at first
        _check_good(router, seed)
        memory, files = router.memory_bytes(), router.files()
        while counts["frames"] < frames:
            _round(router, random, min(_ROUND_FRAMES, frames - counts["frames"]), counts)
            _check_good(router, seed)
            _check_grown(router, memory, files, seed)
    return dict(counts)


@contextmanager
def _token_file() -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(_TOKEN)
        file.flush()
        yield file.name


def _round(router: RouterProcess, random: Random, frames: int, counts: Counter[str]) -> None:
    batches = _batches(random, frames)

    async def send_all() -> None:
        for batch in batches:
            await _exchange(router.port, *batch, counts)

    async def many() -> None:
        await asyncio.gather(*(send_all() for _ in range(_AT_ONCE)))

    asyncio.run(many())


def _batches(random: Random, frames: int) -> Iterator[tuple[list[bytes], int, str, float]]:
    """What is sent on a connection, in pieces; how many frames; from where; how patiently."""
    while frames > 0:
        count = min(frames, random.choice([1, 2, 4, 8, 16]))
        frames -= count
        data = b"".join(_whole(random) for _ in range(count - 1)) + _broken(random) + _LAST
        cuts = sorted(random.randrange(len(data)) for _ in range(random.choice([0, 0, 1, 5])))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        source = f"127.0.0.{random.randint(1, 4)}"
        yield pieces, count, source, random.choice(_QUIET_SECONDS)


async def _exchange(
    port: int, pieces: list[bytes], frames: int, source: str, quiet: float, counts: Counter[str]
) -> None:
    """Sends one batch and reads what comes back, until the router closes or waits."""
    answers = bytearray()
    counts["frames"] += frames
    end = "closed"
    try:
        async with asyncio.timeout(_BATCH_SECONDS):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, local_addr=(source, 0)
            )
            try:
                for piece in pieces:
                    writer.write(piece)
                    await asyncio.sleep(0)
                while data := await asyncio.wait_for(reader.read(1 << 16), quiet):
                    answers += data
            except TimeoutError:
                if quiet == max(_QUIET_SECONDS):
                    raise
                end = "left"
            except ConnectionError:
                end = "reset"
            finally:
                writer.transport.abort()
                with suppress(ConnectionError):
                    await writer.wait_closed()
    except TimeoutError:
        raise FuzzFailure(f"a connection hung: {b''.join(pieces)[:2000]!r}") from None
    counts[end] += 1
    for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers):
        counts[f"{status[:1].decode()}xx"] += 1
        if status.decode() in _NEVER:
            raise FuzzFailure(f"answered {status.decode()} to {b''.join(pieces)[:4000]!r}")


def _check_good(router: RouterProcess, seed: int) -> None:
    """A good request is answered in time, and the router has not seen a failure of its own."""
    if router.process.poll() is not None:
        raise FuzzFailure(f"seed {seed}: the router died: {''.join(router.log[-30:])}")
    with router.connect("127.0.0.9") as sock:
        sock.settimeout(_GOOD_SECONDS)
        sock.sendall(post(b'{"prompt":"hello"}'))
        try:
            status, body = read_answer(sock)
        except OSError as error:
            raise FuzzFailure(f"seed {seed}: a good request got no answer: {error!r}") from None
        if (status, body) != (200, b'{"choices":[{"text":"fine"}]}'):
            raise FuzzFailure(f"seed {seed}: a good request was answered {status} {body[:500]!r}")
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        _, health = read_answer(sock)
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        _, metrics = read_answer(sock)
    if json.loads(health)["status"] != "ok":
        raise FuzzFailure(f"seed {seed}: requests made an engine look ill: {health!r}")
    log = "".join(router.log)
    if b'outcome="internal"} 0\n' not in metrics or "Traceback" in log:
        raise FuzzFailure(f"seed {seed}: the router failed inside: {log[-8000:]}")
    router.log.clear()


def _check_grown(router: RouterProcess, memory: int, files: int, seed: int) -> None:
    end = time.monotonic() + _SETTLE_SECONDS
    while (now := router.files()) > files + _MOST_MORE_FILES:
        if time.monotonic() > end:
            raise FuzzFailure(f"seed {seed}: descriptors grew from {files} to {now}")
        time.sleep(0.05)
    if (grown := router.memory_bytes() - memory) > _MOST_GROWTH_BYTES:
        raise FuzzFailure(f"seed {seed}: the router's memory grew by {grown} bytes")


def _whole(random: Random) -> bytes:
    """A request that ends where it says; its path, headers and JSON may be anything."""
    headers = [b"Host: x"]
    if random.random() < 0.2:
        headers.insert(random.randint(0, 1), random.choice(_ODD_HEADERS))
    path = random.choice(_PATHS[:2] if random.random() < 0.8 else _PATHS)
    method = b"POST" if path in _PATHS[:2] else b"GET"
    if random.random() < 0.05:
        path = random.choice([p for p in _ODD_PATHS if p.isascii() and p])
    body = _body(random)
    if random.random() < 0.5:
        size = random.choice([50, 500, 5000])
        headers.append(b"Transfer-Encoding: chunked")
        parts = [body[at : at + size] for at in range(0, len(body), size)]
        body = b"".join(b"%x\r\n%s\r\n" % (len(x), x) for x in [*parts, b""])
    else:
        headers.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join((method + b" " + path + b" HTTP/1.1", *headers, b"", body))


def _broken(random: Random) -> bytes:
    """A request whose HTTP is wrong in one place or in a few."""
    first = [b"POST", random.choice(_PATHS), b"HTTP/1.1"]
    headers, body = [b"Host: x"], _body(random)
    length = b"Content-Length: %d" % len(body)
    match random.randrange(6):
        case 0:
            odd = random.choice([(0, _METHODS), (1, _ODD_PATHS), (2, _VERSIONS)])
            first[odd[0]] = random.choice(odd[1])
        case 1:
            headers = [random.choice(_BROKEN_HEADERS), *headers]
        case 2:
            length = b"Content-Length: %d" % max(0, len(body) + random.choice([-9, -1, 1, 99]))
        case 3:
            length, body = b"Transfer-Encoding: chunked", _chunked(random, body)
        case _:
            frame = b"\r\n".join((b" ".join(first), *headers, length, b"", body))
            return _damaged(random, frame)
    return b"\r\n".join((b" ".join(first), *headers, length, b"", body))


def _body(random: Random) -> bytes:
    if random.random() < 0.1:
        return random.choice(_ODD_JSON)
    fields = [b'"prompt":"hello"'] if random.random() < 0.8 else []
    while random.random() < 0.6:
        name = random.choice(_FIELDS)
        values = _PARAMS if b"transfer" in name and random.random() < 0.8 else _ODD_JSON
        fields.append(b'"%s":%s' % (name, random.choice(values)))
    return b"{" + b",".join(fields) + b"}"


def _chunked(random: Random, body: bytes) -> bytes:
    out = []
    size = random.choice([1, 7, 100, 5000])
    for at in range(0, len(body), size):
        part = body[at : at + size]
        length = b"%x" % len(part)
        if random.random() < 0.05:
            wrong = [b"%x" % (len(part) + 1), b"-1", b"", b"g", b"f" * 30, b"1;x=" + b"y" * 300]
            length = random.choice([*wrong, b"1 "])
        out.append(length + b"\r\n" + part + b"\r\n")
    ends = [b"0\r\n\r\n"] * 12 + [b"0\r\nA: b\r\n\r\n", b"0\r\nbad\r\n\r\n", b"0\r\n", b""]
    return b"".join(out) + random.choice(ends)


def _damaged(random: Random, frame: bytes) -> bytes:
    data = bytearray(frame)
    for _ in range(random.choice([1, 1, 2, 5])):
        at = random.randrange(len(data) + 1)
        match random.randrange(5):
            case 0:
                data[at : at + 1] = bytes([random.randrange(256)])
            case 1:
                del data[at : at + random.randint(1, 20)]
            case 2:
                data[at:at] = random.randbytes(random.randint(1, 20))
            case 3:
                data[at:at] = data[at : at + random.randint(1, 200)]
            case 4:
                del data[at:]
    return bytes(data)
