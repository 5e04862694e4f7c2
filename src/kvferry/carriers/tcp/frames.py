# SPDX-License-Identifier: Apache-2.0
"""The tcp carrier's protocol on the wire, and the streams that carry it.

Every frame is a header of 32 bytes and `body_bytes` more, little-endian:

    magic "KVFT" · version u16 · kind u16 · request u64 · body_bytes u64 · payload_bytes u64

    server                                      client
    HELLO   nonce_s, server incarnation  ---->
                                         <----  AUTH     nonce_c, client incarnation, mac_c
    WELCOME mac_s, table of regions      ---->
                                         <----  READ     table, payload_bytes = its sum
    DATA    payload_bytes of payload     ---->
                                         <----  WRITE    table, payload_bytes = its sum
    GO                                   ---->           after every descriptor was checked
                                         <----           payload
    APPLIED                              ---->           after every byte is in place
                                         <----  GRANTED  grant, table, payload_bytes: a WRITE into
                                                         ranges that the owner opened (server.py)
    ERROR   code u32, text               ---->           in place of any answer

    mac_c = HMAC-SHA256(key, "client" | nonce_s | nonce_c | both incarnations)
    mac_s = HMAC-SHA256(key, "server" | nonce_s | nonce_c | both incarnations | regions)

A table is rows of (address i64, length i64): ranges of the server's memory, in the order in which
the payload comes. Requests are numbered upwards on each connection; a number that does not rise is
a replay. Both sides prove that they have the key (net/keys.py) before they send anything else.
Bytes are neither encrypted nor signed: an attacker who can change packets can change caches.

A payload is the bytes of its ranges one after another, whichever way an end moves them:

    host memory    the kernel sends from, and receives into, the ranges themselves, 1,024 a call
    a GPU's        chunk by chunk (cuda/staging.py)

A `TcpStream` is one connected socket that blocks. A call returns when all of its bytes have moved.
It raises when the peer closes, when another thread calls `abort()`, and when its time is up: after
`stall_seconds` without progress, or at the deadline that it was given. Without a deadline, its time
is also up when the peer is slower than `SLOWEST_BYTES_PER_SECOND`. One thread uses a stream at a
time, and only that thread closes the descriptor, so no call ever runs on a descriptor that was
given away again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import hmac
import os
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import numpy as np

from kvferry.carriers.base import GRANT_BYTES, StagedMemory
from kvferry.carriers.host import Vectors, libc
from kvferry.copies import Ints
from kvferry.errors import (
    AuthenticationError,
    DeadlineExceeded,
    KvferryError,
    OutOfBounds,
    PeerLost,
    ProtocolError,
    TransferError,
)
from kvferry.net.names import hang_up, keep_alive, ours_alone

MAGIC = b"KVFT"
VERSION = 2  # since 2, the key is stretched, and writes need a grant
HEADER = struct.Struct("<4sHHQQQ")
ROW_BYTES = 16
NONCE_BYTES = 32
INCARNATION_BYTES = 16
MAC_BYTES = 32
HELLO_BYTES = NONCE_BYTES + INCARNATION_BYTES
AUTH_BYTES = NONCE_BYTES + INCARNATION_BYTES + MAC_BYTES
ERROR_CODE = struct.Struct("<I")
ERROR_TEXT_BYTES = 512

# One frame's limits. 32 Ki rows are half a MiB and one NumPy window; 256 MiB keep the round trip
# per frame under a percent of its time at 10 GB/s.
MAX_ROWS = 1 << 15
MAX_PAYLOAD_BYTES = 256 << 20
MAX_BODY_BYTES = MAX_ROWS * ROW_BYTES + GRANT_BYTES
MAX_REGIONS = (MAX_BODY_BYTES - MAC_BYTES) // ROW_BYTES  # that one WELCOME can name


class FrameKind(IntEnum):
    HELLO = 1
    AUTH = 2
    WELCOME = 3
    READ = 4
    DATA = 5
    WRITE = 6
    GO = 7
    APPLIED = 8
    ERROR = 9
    GRANTED = 10


class Code(IntEnum):
    MALFORMED = 1
    UNAUTHENTICATED = 2
    OUT_OF_BOUNDS = 3
    REPLAYED = 5
    BUSY = 6
    REVOKED = 7


_ERRORS: dict[int, type[KvferryError]] = {
    Code.MALFORMED: ProtocolError,
    Code.UNAUTHENTICATED: AuthenticationError,
    Code.OUT_OF_BOUNDS: OutOfBounds,
    Code.REPLAYED: ProtocolError,
    Code.BUSY: TransferError,
    Code.REVOKED: PeerLost,
}


@dataclass(frozen=True, slots=True)
class FrameHeader:
    kind: int
    request: int
    body_bytes: int = 0
    payload_bytes: int = 0

    def pack(self) -> bytes:
        return HEADER.pack(
            MAGIC, VERSION, self.kind, self.request, self.body_bytes, self.payload_bytes
        )

    @classmethod
    def unpack(cls, raw: bytes) -> FrameHeader:
        """Refuses other protocols, another version, and sizes that no frame has."""
        magic, version, kind, request, body_bytes, payload_bytes = HEADER.unpack(raw)
        if magic != MAGIC:
            raise ProtocolError(f"a frame begins with {magic!r}; kvferry's begin with {MAGIC!r}")
        if version != VERSION:
            raise ProtocolError(
                f"the peer speaks version {version} of the tcp carrier's protocol, this is version "
                f"{VERSION}; run the same release of kvferry on both sides"
            )
        if body_bytes > MAX_BODY_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
            raise ProtocolError(
                f"a frame of {body_bytes} + {payload_bytes} bytes; at most {MAX_BODY_BYTES} + "
                f"{MAX_PAYLOAD_BYTES} are allowed"
            )
        return cls(kind, request, body_bytes, payload_bytes)


def frame(kind: FrameKind, request: int, body: bytes = b"", payload_bytes: int = 0) -> bytes:
    return FrameHeader(kind, request, len(body), payload_bytes).pack() + body


def error_frame(request: int, code: Code, text: str) -> bytes:
    return frame(FrameKind.ERROR, request, ERROR_CODE.pack(code) + text.encode()[:ERROR_TEXT_BYTES])


def error_of(body: bytes) -> KvferryError:
    """The error that an ERROR frame's body stands for."""
    if len(body) < ERROR_CODE.size:
        return ProtocolError("the peer sent an error without a code")
    (code,) = ERROR_CODE.unpack_from(body)
    text = body[ERROR_CODE.size :].decode(errors="replace")
    return _ERRORS.get(code, TransferError)(f"the peer refused: {text}")


def mac(key: bytes, role: bytes, *said: bytes) -> bytes:
    """The proof that a role, b"client" or b"server", has the key; the module's text defines it."""
    return hmac.digest(key, b"".join((role, *said)), hashlib.sha256)


def send_runs(stream: TcpStream, staged: StagedMemory | None, address: Ints, length: Ints) -> None:
    """Send the ranges' bytes, of host memory or of a GPU's. The caller has checked the ranges and
    joined neighbours."""
    if staged is None:
        stream.send_vectors(Vectors.of(address, length))
        return
    with closing(staged.outgoing(address, length)) as chunks:
        for chunk in chunks:
            stream.send(chunk.data)


def receive_runs(
    stream: TcpStream, staged: StagedMemory | None, address: Ints, length: Ints
) -> None:
    """Receive bytes into the ranges."""
    if staged is None:
        stream.recv_vectors(Vectors.of(address, length))
        return
    with closing(staged.incoming(address, length)) as chunks:
        for chunk in chunks:
            stream.recv_into(chunk.data)


# A host that vanished is noticed on idle connections too, after about a minute.
SILENT_SECONDS, PROBE_SECONDS = 30, 10
# The least mean rate of a call without a deadline, which has `stall_seconds` more.
SLOWEST_BYTES_PER_SECOND = 64 << 10
# A system call that waits returns after this time, and the thread looks at the clock. The kernel
# cannot keep a longer time, because it begins anew when a signal interrupts a call.
TICK_SECONDS = 0.1
_TIMEVAL = struct.Struct("ll")
_INT = struct.Struct("i")


class _MessageHeader(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("vectors", ctypes.c_void_p),
        ("vector_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    ]


class TcpStream:
    """Methods raise `PeerLost` if the peer is gone, and `DeadlineExceeded` if it is late."""

    def __init__(self, sock: socket.socket, stall_seconds: float) -> None:
        self._sock = ours_alone(sock)
        self._lock = threading.Lock()
        self._closed = False
        self._aborted = False
        self._message = _MessageHeader()
        self.stall_seconds = stall_seconds
        sock.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            tick = _TIMEVAL.pack(0, int(TICK_SECONDS * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, option, tick)
        if sock.family != socket.AF_UNIX:
            # no buffer sizes: the kernel lets buffers grow further than a process may ask for
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(sock, SILENT_SECONDS, PROBE_SECONDS)

    def send(
        self, data: bytes | memoryview, deadline: float | None = None, *, more: bool = False
    ) -> None:
        """Send all of `data` by the deadline; without one, see the module's text. With `more`, the
        kernel may keep it until the next bytes: a header that travels alone wakes the peer twice.
        """
        call, at, count = _call("send"), _address(data), len(data)
        flags = socket.MSG_NOSIGNAL | (socket.MSG_MORE if more else 0)

        def step(done: int) -> int:
            return call(self._sock.fileno(), at + done, count - done, flags)

        self._repeat(step, count, "sending to", deadline)

    def send_some(self, data: bytes) -> memoryview:
        """Send as much as the socket takes at once, and return the rest."""
        try:
            sent = self._sock.send(data, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise self._error(error.errno or errno.EIO, "sending to") from None
        return memoryview(data)[sent:]

    def recv(self, count: int, deadline: float | None = None, *, end_ok: bool = False) -> bytes:
        """Exactly `count` bytes; with `end_ok`, none if the peer closed before the first."""
        data = bytearray(count)
        return bytes(data) if self.recv_into(memoryview(data), deadline, end_ok=end_ok) else b""

    def recv_into(
        self, view: memoryview, deadline: float | None = None, *, end_ok: bool = False
    ) -> bool:
        """Fill `view`; with `end_ok`, return False if the peer closed before the first byte."""
        call, at, count = _call("recv"), _address(view), len(view)

        def step(done: int) -> int:
            return call(self._sock.fileno(), at + done, count - done, socket.MSG_WAITALL)

        return self._repeat(step, count, "waiting for", deadline, end_ok=end_ok)

    def send_vectors(self, vectors: Vectors) -> None:
        self._move(vectors, "sendmsg", socket.MSG_NOSIGNAL, "sending to")

    def recv_vectors(self, vectors: Vectors) -> None:
        """Bytes go straight to where the vectors point."""
        self._move(vectors, "recvmsg", socket.MSG_WAITALL, "waiting for")

    def wait_readable(self, seconds: float) -> bool:
        """Whether bytes, or the end of the connection, can be read within that time."""
        fd = self._sock.fileno()
        if fd < 0:  # closed, or this is a forked child
            return True
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def unconfirmed_seconds(self) -> float:
        """How long the bytes that the peer's kernel has not confirmed yet may take to arrive."""
        (count,) = _INT.unpack(fcntl.ioctl(self._sock, termios.TIOCOUTQ, bytes(_INT.size)))
        return float(count) / SLOWEST_BYTES_PER_SECOND

    def drain(self, seconds: float) -> bool:
        """Stop sending, and discard the bytes that come. Returns whether the peer closed."""
        self.stop_sending()
        sink, deadline = memoryview(bytearray(1 << 16)), time.monotonic() + seconds
        try:
            while True:
                self.recv_into(sink, deadline)
        except DeadlineExceeded:
            return False
        except PeerLost:
            return True

    def stop_sending(self) -> None:
        """From any thread: stop sending. Bytes that come are still read."""
        self._shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        """From any thread: end the call that runs on this stream, and all later ones."""
        self._aborted = True
        self._shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """By the thread that uses the stream. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                hang_up(self._sock)

    def _shutdown(self, how: int) -> None:
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(how)

    def _move(self, vectors: Vectors, name: str, flags: int, doing: str) -> None:
        call, message = _call(name), self._message

        def step(done: int) -> int:
            if done:
                vectors.advance(done)
            message.vectors, message.vector_count = vectors.head()
            return call(self._sock.fileno(), ctypes.byref(message), flags)

        self._repeat(step, vectors.bytes, doing)

    def _repeat(
        self,
        step: Callable[[int], int],
        total: int,
        doing: str,
        deadline: float | None = None,
        *,
        end_ok: bool = False,
    ) -> bool:
        """Call `step` with the number of bytes that are done, until all are. It returns how many
        more it did, or -1 with errno set."""
        done, stalls = 0, time.monotonic() + self.stall_seconds
        if deadline is None:
            deadline = stalls + total / SLOWEST_BYTES_PER_SECOND
        while done < total:
            if self._aborted:
                raise self._error(0, doing)
            if time.monotonic() > min(deadline, stalls):
                raise DeadlineExceeded(
                    f"{doing} the peer took longer than allowed: {done} of {total} bytes, and no "
                    f"progress for up to {self.stall_seconds:g} s"
                )
            moved = step(done)
            if moved == 0 and done == 0 and end_ok:
                return False
            code = ctypes.get_errno() if moved < 0 else 0
            if moved <= 0 and code not in (errno.EAGAIN, errno.EINTR):
                raise self._error(code, doing)
            if moved > 0:
                done, stalls = done + moved, time.monotonic() + self.stall_seconds
        return True

    def _error(self, code: int, doing: str) -> TransferError:
        if self._aborted:
            return PeerLost(f"the connection was ended on this side while {doing} the peer")
        if code == errno.EFAULT:
            return TransferError("an address on this side is not mapped; was the memory freed?")
        why = os.strerror(code) if code else "the connection was closed"
        return PeerLost(f"{doing} the peer: {why}")


@cache
def _call(name: str) -> Callable[..., int]:
    """A call of the C library that moves bytes: it releases the interpreter's lock, and returns
    when a signal interrupts it."""
    function = getattr(libc(), name)
    where = (ctypes.c_void_p,) if name.endswith("msg") else (ctypes.c_void_p, ctypes.c_size_t)
    function.argtypes = (ctypes.c_int, *where, ctypes.c_int)
    function.restype = ctypes.c_ssize_t
    call: Callable[..., int] = function
    return call


def _address(data: bytes | memoryview) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data)
