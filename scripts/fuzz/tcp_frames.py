"""Bad frames at the tcp carrier's server, with the secret and without.

Nine of ten come from a peer that has authenticated, are answered one by one, and leave their
connection in step: the last frame of each connection is a good one, and must be served. The tenth
ends its connection. Memory around what is registered is watched, and so is the server's own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from kvferry.carriers.base import MemoryRegion, RegionTable
from kvferry.carriers.tcp.frames import (
    AUTH_BYTES,
    ERROR_CODE,
    HEADER,
    HELLO_BYTES,
    INCARNATION_BYTES,
    MAGIC,
    MAX_BODY_BYTES,
    MAX_PAYLOAD_BYTES,
    NONCE_BYTES,
    VERSION,
    Code,
    FrameHeader,
    FrameKind,
    mac,
)
from kvferry.carriers.tcp.server import ServerLimits, TcpServer

SECRET = b"known to friends"
INCARNATION = b"s" * INCARNATION_BYTES
CLIENT = b"c" * INCARNATION_BYTES
CANARY = 1 << 20
AT_ONCE = 40  # connections; fewer than may be pending
PER_CONNECTION, BURST = 5_000, 100
GROWTH_BYTES = 48 << 20


def run(frames: int, seed: int) -> dict[str, int]:
    """Send that many; what became of them, by the server's own counters."""
    rng = Random(seed)
    answered = Target(goodbye_seconds=60)  # for us to read an answer; the machine can be busy
    expected = _answered(answered, rng, frames * 9 // 10)
    ended = Target()
    sent = _ended(ended, rng, frames - frames * 9 // 10)
    for target in (answered, ended):
        assert np.array_equal(target.memory, target.before), "memory was written"
        target.server.close(10)
    assert answered.server.counters == expected, (answered.server.counters, expected)
    found = ended.server.counters
    assert set(found) <= {"malformed", "unauthenticated", "truncated"}, found
    assert found.total() == sent, (found, sent)
    return dict(expected + found)


class Target:
    """A server over memory that is watched."""

    def __init__(self, goodbye_seconds: float = 1.0) -> None:
        self.memory = np.random.default_rng(0).integers(0, 256, 3 * CANARY, dtype=np.uint8)
        self.before = self.memory.copy()
        self.address = self.memory.ctypes.data + CANARY  # the third in the middle is registered
        patient = ServerLimits(
            handshake_seconds=60, frame_seconds=60, goodbye_seconds=goodbye_seconds
        )
        self.server = TcpServer(SECRET, INCARNATION, patient, writable=True)
        self.server.regions = RegionTable.of([MemoryRegion(self.address, CANARY)])

    def open(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.settimeout(30)
        assert self.server.attach(theirs)
        return ours

    def friend(self) -> socket.socket:
        """A connection that has authenticated."""
        sock = self.open()
        hello = exactly(sock, HEADER.size + HELLO_BYTES)[HEADER.size :]
        sock.sendall(auth(hello, SECRET))
        header = FrameHeader.unpack(exactly(sock, HEADER.size))
        assert header.kind == FrameKind.WELCOME
        exactly(sock, header.body_bytes)
        return sock

    def bad_table(self, rng: Random) -> bytes:
        """Ranges of which one is not inside the registered memory."""
        rows = self._rows(rng)
        rows[rng.randrange(len(rows))] = rng.choice(
            (
                (self.address - 1, 1),
                (self.address + CANARY - 1, 2),
                (rng.randrange(-(1 << 63), 0), 5),
                (rng.randrange(1 << 62, 1 << 63), 5),
                (self.address, rng.randrange(-(1 << 63), 1)),
                (self.address, rng.randrange(CANARY + 1, 1 << 63)),
                ((1 << 63) - 1, (1 << 63) - 1),
            )
        )
        return packed(rows)

    def good_table(self, rng: Random) -> tuple[bytes, int]:
        rows = self._rows(rng)
        return packed(rows), sum(length for _, length in rows)

    def _rows(self, rng: Random) -> list[tuple[int, int]]:
        return [
            (self.address + rng.randrange(CANARY - 64), rng.randrange(1, 64))
            for _ in range(rng.randrange(1, 6))
        ]


def packed(rows: list[tuple[int, int]]) -> bytes:
    return b"".join(struct.pack("<qq", *row) for row in rows)


def _answered(target: Target, rng: Random, frames: int) -> Counter[str]:
    expected: Counter[str] = Counter()
    growth_from = sent = 0
    while sent < frames:
        with target.friend() as sock, sock.makefile("rb") as answers:
            request = 1
            for _ in range(PER_CONNECTION // BURST):
                bad = []
                for _ in range(min(BURST, frames - sent)):
                    bad.append(in_step(target, rng, request))
                    request += bad[-1][1] is not Code.REPLAYED
                sock.sendall(b"".join(data for data, _ in bad))
                for _, code in bad:
                    header = FrameHeader.unpack(answers.read(HEADER.size))
                    body = answers.read(header.body_bytes)
                    assert header.kind == FrameKind.ERROR
                    assert ERROR_CODE.unpack_from(body)[0] == code
                    expected[code.name.lower()] += 1
                sent += len(bad)
            # after all that, the same connection still serves what is good
            table, total = target.good_table(rng)
            sock.sendall(frame(FrameKind.READ, request, table, total))
            header = FrameHeader.unpack(answers.read(HEADER.size))
            assert (header.kind, header.payload_bytes) == (FrameKind.DATA, total)
            assert len(answers.read(total)) == total
            expected["reads"] += 1
        growth_from = growth_from or rss_bytes()
    assert rss_bytes() - growth_from < GROWTH_BYTES, "the server grew"
    return expected


def _ended(target: Target, rng: Random, frames: int) -> int:
    with target.open() as sock:
        hello = exactly(sock, HEADER.size + HELLO_BYTES)[HEADER.size :]
        recorded = auth(hello, SECRET)  # worth something on this connection only
    ways = final_frames(target, recorded)
    growth_from, sent = 0, 1
    while sent <= frames:
        socks = [target.open() for _ in range(AT_ONCE)]
        for sock in socks:
            hello = exactly(sock, HEADER.size + HELLO_BYTES)[HEADER.size :]
            if rng.random() < 0.2:
                data = auth(hello, SECRET) + friends_last_words(target, rng)
            else:
                data = ways[rng.randrange(len(ways))](rng, hello)
            with contextlib.suppress(BrokenPipeError):  # refused before all was said
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
        for sock in socks:
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(4096):
                    pass
            sock.close()
        sent += AT_ONCE
        growth_from = growth_from or (rss_bytes() if sent > 2000 else 0)
    assert rss_bytes() - (growth_from or rss_bytes()) < GROWTH_BYTES, "the server grew"
    return sent


def exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        assert more, "the server closed the connection"
        data += more
    return data


def auth(hello: bytes, secret: bytes) -> bytes:
    nonce = os.urandom(NONCE_BYTES)
    said = (hello[:NONCE_BYTES], nonce, hello[NONCE_BYTES:], CLIENT)
    body = nonce + CLIENT + mac(secret, b"client", *said)
    return FrameHeader(FrameKind.AUTH, 0, len(body)).pack() + body


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def frame(kind: int, request: int, body: bytes, payload_bytes: int) -> bytes:
    return FrameHeader(kind, request, len(body), payload_bytes).pack() + body


def in_step(target: Target, rng: Random, request: int) -> tuple[bytes, Code]:
    """A bad frame after which the next one can be read, and what it must be answered with."""
    kind = rng.choice((FrameKind.READ, FrameKind.WRITE))
    table, total = target.good_table(rng)
    match rng.randrange(7):
        case 0:  # a good one, again
            return frame(kind, rng.randrange(0, request), table, total), Code.REPLAYED
        case 1:
            other = rng.choice([0, 1, 2, 3, 5, 7, 8, 9, 10, 255, 65535])
            return frame(other, request, table, total), Code.MALFORMED
        case 2:
            cut = rng.randrange(1, 16)
            return frame(kind, request, table[:-cut], total), Code.MALFORMED
        case 3:
            wrong = rng.choice([0, total - 1, total + 1, MAX_PAYLOAD_BYTES])
            return frame(kind, request, table, wrong), Code.MALFORMED
        case 4:
            return frame(kind, request, b"", total), Code.MALFORMED
        case 5:
            return frame(kind, request, os.urandom(32), total), Code.OUT_OF_BOUNDS
        case _:
            return frame(kind, request, target.bad_table(rng), total), Code.OUT_OF_BOUNDS


def final_frames(target: Target, recorded_auth: bytes) -> list[Callable[[Random, bytes], bytes]]:
    """Ways to end a connection, given the server's greeting; nobody has authenticated."""

    def header(rng: Random) -> tuple[bytes, int]:
        table, total = target.good_table(rng)
        return frame(FrameKind.WRITE, 1, table, total) + b"x" * total, total

    def mutated(rng: Random, hello: bytes) -> bytes:
        """An authentication with a few bits flipped."""
        data = bytearray(auth(hello, SECRET))
        for at in rng.sample(range(len(data)), rng.randrange(1, 4)):
            data[at] ^= 1 << rng.randrange(8)
        return bytes(data) + header(rng)[0]

    def huge(rng: Random, hello: bytes) -> bytes:
        body = rng.randrange(MAX_BODY_BYTES + 1, (1 << 63) - 1)
        return HEADER.pack(MAGIC, VERSION, int(FrameKind.AUTH), 0, body, body) + os.urandom(64)

    def version(rng: Random, hello: bytes) -> bytes:
        good = auth(hello, SECRET)
        return good[:4] + struct.pack("<H", rng.randrange(VERSION + 1, 65536)) + good[6:]

    return [
        lambda rng, hello: rng.randbytes(rng.randrange(1, 400)),
        lambda rng, hello: header(rng)[0],
        lambda rng, hello: recorded_auth + header(rng)[0],
        lambda rng, hello: auth(hello, rng.randbytes(16)) + header(rng)[0],
        lambda rng, hello: auth(hello, b"") + header(rng)[0],
        lambda rng, hello: auth(hello, SECRET)[: rng.randrange(1, HEADER.size + AUTH_BYTES)],
        lambda rng, hello: hello,
        lambda rng, hello: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        mutated,
        huge,
        version,
    ]


def friends_last_words(target: Target, rng: Random) -> bytes:
    """What ends an authenticated connection: cut or broken before a payload could begin."""
    table, total = target.good_table(rng)
    good = frame(FrameKind.WRITE, 1, table, total)
    match rng.randrange(4):
        case 0:
            return good[: rng.randrange(1, len(good))]
        case 1:
            return rng.randbytes(HEADER.size + 64)
        case 2:
            return good[:4] + b"\xff\xff" + good[6:] + b"x" * total
        case _:
            return HEADER.pack(MAGIC, VERSION, 6, 1, 16, MAX_PAYLOAD_BYTES + 1) + table[:16]
