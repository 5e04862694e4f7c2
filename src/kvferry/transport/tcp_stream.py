"""One connected socket: exact and vectored I/O, and a deadline on every operation.

The socket blocks, with the kernel's own timeouts. A call waits for the whole of what it was given
(`MSG_WAITALL`), so that Python runs once per 1,024 vectors. It comes back early when the time is
up, when the peer closes, and when another thread calls `abort()`. Its time is up without progress
for `stall_seconds`, at the deadline that it was given, and without one when the peer is slower than
`SLOWEST_BYTES_PER_SECOND`: one that sends a byte now and then holds nobody for ever.

One thread uses a stream at a time, and only it closes the descriptor; `abort()` from elsewhere
just shuts the connection down. So no call ever runs on a descriptor that was given away again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from kvferry.errors import DeadlineExceeded, PeerLost, TransferError
from kvferry.transport.forks import hang_up, ours_alone
from kvferry.transport.iovec import Vectors, libc

# A host that vanished is noticed on idle connections too, after about a minute.
KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
# Over all of one call, after `stall_seconds`. No network that carries caches is as slow as this.
SLOWEST_BYTES_PER_SECOND = 64 << 10
SHORTEST_TIMEOUT_SECONDS = 0.001  # zero would mean: for ever
_TIMEVAL = struct.Struct("ll")

# descriptor, message header, flags -> bytes moved, or -1 with errno set
_Call = Callable[[int, Any, int], int]


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


class Stream:
    """Everything raises `PeerLost` when the other side is gone, `DeadlineExceeded` when late."""

    def __init__(self, sock: socket.socket, stall_seconds: float) -> None:
        self._sock = ours_alone(sock)
        self._lock = threading.Lock()
        self._closed = False
        self._aborted = False
        self._message = _MessageHeader()
        self._timeouts = {socket.SO_RCVTIMEO: -1.0, socket.SO_SNDTIMEO: -1.0}
        self.stall_seconds = stall_seconds
        self.bytes_in = self.bytes_out = 0
        sock.settimeout(None)
        if sock.family != socket.AF_UNIX:
            # Buffers are left to the kernel: it lets them grow to tcp_rmem and tcp_wmem, which is
            # usually far more than what SO_RCVBUF may ask for.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, data: bytes | memoryview, deadline: float | None = None) -> None:
        """All of `data`, by the deadline, or else as the module's text says."""
        if deadline is None:
            deadline = self._patience(len(data))
        view = memoryview(data)
        while view:
            self._limit(socket.SO_SNDTIMEO, deadline)
            try:
                view = view[self._sock.send(view, socket.MSG_NOSIGNAL) :]
            except OSError as error:
                raise self._error(error.errno or errno.EIO, "sending to") from None
        self.bytes_out += len(data)

    def send_some(self, data: bytes) -> memoryview:
        """What of it the socket takes at once; the rest is returned."""
        try:
            sent = self._sock.send(data, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise self._error(error.errno or errno.EIO, "sending to") from None
        self.bytes_out += sent
        return memoryview(data)[sent:]

    def recv(self, count: int, deadline: float | None = None, *, end_ok: bool = False) -> bytes:
        """Exactly `count` bytes; none where the peer closed before the first and that is fine."""
        data = bytearray(count)
        return bytes(data) if self.recv_into(memoryview(data), deadline, end_ok=end_ok) else b""

    def recv_some(self, most: int) -> bytes:
        """What is there now, which may be nothing."""
        try:
            got = self._sock.recv(most, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise self._error(error.errno or errno.EIO, "waiting for") from None
        if not got:
            raise self._error(0, "waiting for")
        self.bytes_in += len(got)
        return got

    def recv_into(
        self, view: memoryview, deadline: float | None = None, *, end_ok: bool = False
    ) -> bool:
        """Fill `view`; false where the peer closed before the first byte and that is fine."""
        count = len(view)
        if deadline is None:
            deadline = self._patience(count)
        while view:
            self._limit(socket.SO_RCVTIMEO, deadline)
            try:
                got = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
            except OSError as error:
                raise self._error(error.errno or errno.EIO, "waiting for") from None
            if got == 0:
                if end_ok and len(view) == count:
                    return False
                raise self._error(0, "waiting for")
            view = view[got:]
        self.bytes_in += count
        return True

    def send_vectors(self, vectors: Vectors) -> None:
        self._limit(socket.SO_SNDTIMEO, None)
        self._move(_message_call("sendmsg"), socket.MSG_NOSIGNAL, vectors)
        self.bytes_out += vectors.bytes

    def recv_vectors(self, vectors: Vectors) -> None:
        """Bytes go straight to where the vectors point."""
        self._limit(socket.SO_RCVTIMEO, None)
        self._move(_message_call("recvmsg"), socket.MSG_WAITALL, vectors)
        self.bytes_in += vectors.bytes

    def wait_readable(self, seconds: float) -> bool:
        """Whether there is something to read, or an end to see, within that time."""
        fd = self._sock.fileno()
        if fd < 0:  # closed, or this is a forked child
            return True
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def drain(self, seconds: float) -> bool:
        """Say that no more will be sent, and throw away what comes; whether the peer closed."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        try:
            while True:
                self._limit(socket.SO_RCVTIMEO, deadline)
                if not self._sock.recv(1 << 16):
                    return True
        except DeadlineExceeded:
            return False
        except OSError as error:
            return error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK)

    def stop_sending(self) -> None:
        """From any thread: end what is being sent; what comes in is still read."""
        self._shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        """From any thread: end whatever runs on this stream, and all that will."""
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

    def _move(self, call: _Call, flags: int, vectors: Vectors) -> None:
        message, doing = self._message, "moving bytes to or from"
        total, done = vectors.bytes, 0
        deadline = self._patience(total)
        while done < total:
            if self._aborted:
                raise self._error(0, doing)
            message.vectors, message.vector_count = vectors.head()
            moved = call(self._sock.fileno(), ctypes.byref(message), flags)
            if moved > 0:
                done += moved
                vectors.advance(done)
                if done < total and time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"{doing} the peer is too slow: {done} of {total} bytes in the time for all"
                    )
                continue
            code = ctypes.get_errno() if moved < 0 else 0
            if code != errno.EINTR:
                raise self._error(code, doing)

    def _patience(self, count: int) -> float:
        """The deadline of a call for so many bytes that was given none."""
        return time.monotonic() + self.stall_seconds + count / SLOWEST_BYTES_PER_SECOND

    def _limit(self, option: int, deadline: float | None) -> None:
        """Tell the kernel how long the next call may take."""
        seconds = self.stall_seconds
        if deadline is not None:
            seconds = min(seconds, deadline - time.monotonic())
            if seconds <= 0:
                raise DeadlineExceeded("the peer did not answer by the deadline")
        seconds = max(seconds, SHORTEST_TIMEOUT_SECONDS)
        if self._timeouts[option] != seconds:
            whole = int(seconds)
            value = _TIMEVAL.pack(whole, int((seconds - whole) * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, option, value)
            self._timeouts[option] = seconds

    def _error(self, code: int, doing: str) -> TransferError:
        """What this error number means."""
        if self._aborted:
            return PeerLost(f"the connection was ended on this side while {doing} the peer")
        if code in (errno.EAGAIN, errno.EWOULDBLOCK):
            return DeadlineExceeded(
                f"{doing} the peer took longer than allowed (no progress for up to "
                f"{self.stall_seconds:g} s)"
            )
        if code == errno.EFAULT:
            return TransferError("an address on this side is not mapped; was the memory freed?")
        why = os.strerror(code) if code else "the connection was closed"
        return PeerLost(f"{doing} the peer: {why}")


@cache
def _message_call(name: str) -> _Call:
    """`sendmsg` or `recvmsg` of the C library, which release the interpreter's lock."""
    function = getattr(libc(), name)
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
    function.restype = ctypes.c_ssize_t
    call: _Call = function
    return call
