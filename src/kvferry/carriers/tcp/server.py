# SPDX-License-Identifier: Apache-2.0
"""The tcp carrier's receiving end: serves registered memory to peers that have the key.

One thread accepts, and one serves each connection. The cost of a connection is bounded from its
first byte: there is a deadline for the handshake, no more than `max_pending` connections that have
not finished it, and no allocation above one frame's table. If too many have not finished, a new
connection replaces the oldest of them. If one address has more than half of them, it replaces the
oldest of that address.

Nothing is written before every descriptor of a frame was checked, and nothing without a grant,
unless the owner has made all of its memory writable. Whatever a peer sends, the answer is a frame
of data, a frame of error or a closed connection, and one of the `counters`.

A grant is a set of ranges of own memory that peers may write if they know its unguessable id.
Closing a grant ends the connections that write under it at that moment, waits until their threads
have left the memory, and refuses later writes. It returns how many bytes were written, as counted
on this side.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field

from kvferry.carriers.base import GRANT_BYTES, RegionTable, StagedMemory
from kvferry.carriers.host import joined
from kvferry.carriers.tcp.frames import (
    AUTH_BYTES,
    HEADER,
    INCARNATION_BYTES,
    MAX_PAYLOAD_BYTES,
    NONCE_BYTES,
    ROW_BYTES,
    Code,
    FrameHeader,
    FrameKind,
    TcpStream,
    error_frame,
    frame,
    mac,
    receive_runs,
    send_runs,
)
from kvferry.copies import Ints, table_bytes, table_of
from kvferry.errors import DeadlineExceeded, PeerLost, ProtocolError, TransferError
from kvferry.net.names import hang_up, ours_alone

log = logging.getLogger(__name__)

STILL_USED = (
    "%d tcp %s did not end within %g s; they may still read and write registered memory, which "
    "must not be freed yet"
)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of connections, threads and time that peers may use."""

    max_connections: int = 1024
    max_pending: int = 64  # connections that have not authenticated yet
    handshake_seconds: float = 5.0
    # from a frame's first byte to the end of its table, once the peer has the answer before it
    frame_seconds: float = 10.0
    stall_seconds: float = 30.0  # without any progress; see frames.py for slow progress
    idle_seconds: float = 900.0  # between two requests
    # at `max_connections`, one that has been idle for longer makes way for a new one
    spare_idle_seconds: float = 5.0
    goodbye_seconds: float = 1.0  # for a refused peer to read why


class TcpServer:
    """Serves `regions` of memory on every connection of `listener`."""

    def __init__(
        self, key: bytes, incarnation: bytes, limits: ServerLimits, *, writable: bool = False
    ) -> None:
        self._key, self._incarnation, self._limits = key, incarnation, limits
        self._lock = threading.Lock()
        self._pending: dict[TcpStream, str] = {}  # with the client's address, the oldest first
        self._serving: set[TcpStream] = set()  # those that have authenticated
        self._idle: dict[TcpStream, float] = {}  # between requests, since when; the longest first
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._listener: socket.socket | None = None
        self.regions = RegionTable.of([])
        self.grants = Grants()
        self._writable = writable  # whether writes need no grant
        self.staged: StagedMemory | None = None  # None: host memory
        self.counters: Counter[str] = Counter()

    @property
    def serving(self) -> int:
        return len(self._serving)

    def listen(self, listener: socket.socket) -> None:
        thread = threading.Thread(
            target=self._accept, args=(listener,), name="kvferry-tcp-accept", daemon=True
        )
        self._listener = ours_alone(listener)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no thread for it
            hang_up(listener)
            raise TransferError(f"no thread can be started to accept peers: {error}") from None
        self._threads.add(thread)

    def attach(self, sock: socket.socket, address: str = "") -> bool:
        """Serve one connection on a thread of its own. False if there is no room for it."""
        try:
            stream = TcpStream(sock, self._limits.stall_seconds)
        except OSError:  # gone already
            sock.close()
            return False
        if self._begin(stream, address):
            return True
        if not self._closed:
            self._count("busy")
            with suppress(TransferError):
                text = "no room for another connection; try again later"
                stream.send(error_frame(0, Code.BUSY, text), time.monotonic() + 0.1)
        stream.close()
        return False

    def _begin(self, stream: TcpStream, address: str) -> bool:
        thread = threading.Thread(
            target=self._serve, args=(stream,), name="kvferry-tcp-serve", daemon=True
        )
        with self._lock:  # the start too: `close` joins every thread in `_threads`
            connections = len(self._pending) + len(self._serving)
            full = connections >= self._limits.max_connections
            if self._closed or (full and not self._end_idle()):
                return False
            self._make_way()
            try:
                thread.start()
            except RuntimeError:  # the system has no thread for it
                return False
            self._pending[stream] = address
            self._threads.add(thread)
        return True

    def _end_idle(self) -> bool:
        """With the lock held: end the connection that has been idle longest. Its reader opens
        another one when it needs it. False if all were used a moment ago."""
        stream, since = next(iter(self._idle.items()), (None, 0.0))
        if stream is None or time.monotonic() - since < self._limits.spare_idle_seconds:
            return False
        del self._idle[stream]
        self._serving.discard(stream)
        stream.abort()  # its thread closes it
        self.counters["evicted"] += 1
        return True

    def _make_way(self) -> None:
        """With the lock held: if too many connections are pending, end one of them."""
        if len(self._pending) < self._limits.max_pending:
            return
        crowd, count = Counter(self._pending.values()).most_common(1)[0]
        crowded = 2 * count > len(self._pending)
        oldest = next(s for s, where in self._pending.items() if where == crowd or not crowded)
        del self._pending[oldest]
        oldest.abort()  # its thread closes it
        self.counters["evicted"] += 1

    def close(self, seconds: float) -> None:
        """Returns when no connection uses memory any more, or after `seconds`. Idempotent."""
        until = time.monotonic() + seconds
        with self._lock:
            self._closed = True
            listener, self._listener = self._listener, None
            threads = list(self._threads)
            for stream in (*self._serving, *self._pending):
                stream.abort()
        if listener is not None:
            hang_up(listener)  # wakes the thread that accepts
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        left = sum(thread.is_alive() for thread in threads)
        if left:
            log.warning(STILL_USED, left, "connections", seconds)

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                sock, address = listener.accept()
            except OSError as error:
                if self._closed:
                    return
                self._count("accept_failed")  # out of descriptors, or the client went away
                log.debug("accept failed: %s", error)
                time.sleep(0.05)
                continue
            self._count("connections")
            try:
                self.attach(sock, str(address[0]))
            except Exception:
                self._count("internal")
                log.exception("a connection could not be served")

    def _serve(self, stream: TcpStream) -> None:
        try:
            self._handshake(stream)
            self._converse(stream)
        except (FrameRefused, ProtocolError) as error:
            # where the next frame begins is unknown
            with suppress(TransferError):  # the peer may not read
                self._refuse(stream, 0, error)
            stream.drain(self._limits.goodbye_seconds)
        except DeadlineExceeded:
            self._count("late")
        except PeerLost:
            self._count("truncated")
        except TransferError as error:  # our memory is not mapped
            self._count("internal")
            log.warning("a peer's request failed on this side: %s", error)
        except Exception:
            self._count("internal")
            log.exception("a connection ended by an error of ours")
        finally:
            with self._lock:  # before the peer sees the end, so that it can connect again
                self._pending.pop(stream, None)
                self._serving.discard(stream)
                self._threads.discard(threading.current_thread())
            stream.close()

    def _converse(self, stream: TcpStream) -> None:
        last = 0  # number of the newest request
        while self._next_request(stream):
            # a reader sends the rest of a request that it sent ahead when it has the last answer
            seconds = self._limits.frame_seconds + stream.unconfirmed_seconds()
            deadline = time.monotonic() + seconds
            raw = stream.recv(HEADER.size, deadline, end_ok=True)
            if not raw:
                return
            header = FrameHeader.unpack(raw)
            body = stream.recv(header.body_bytes, deadline)
            try:
                if header.request <= last:
                    raise FrameRefused(Code.REPLAYED, f"request {header.request} came before")
                last = header.request
                self._fulfil(stream, header, body)
            except FrameRefused as refused:
                self._refuse(stream, header.request, refused)
        self._count("idle")

    def _next_request(self, stream: TcpStream) -> bool:
        """Wait for a request; False if none comes for too long."""
        with self._lock:
            self._idle[stream] = time.monotonic()
        try:
            return stream.wait_readable(self._limits.idle_seconds)
        finally:
            with self._lock:
                self._idle.pop(stream, None)

    def _fulfil(self, stream: TcpStream, header: FrameHeader, body: bytes) -> None:
        """Check all of a request, then move its bytes."""
        grant, address, length = self._checked(header, body)
        # counted first, so that a peer that has its answer finds it counted
        if header.kind == FrameKind.READ:
            self._count("reads")
            data = frame(FrameKind.DATA, header.request, payload_bytes=header.payload_bytes)
            stream.send(data, more=True)
            send_runs(stream, self.staged, address, length)
            return
        granted = header.kind == FrameKind.GRANTED
        with self.grants.writing(grant, stream, address, length) if granted else nullcontext():
            stream.send(frame(FrameKind.GO, header.request))
            receive_runs(stream, self.staged, address, length)
        self._count("writes")
        stream.send(frame(FrameKind.APPLIED, header.request))

    def _handshake(self, stream: TcpStream) -> None:
        deadline = time.monotonic() + self._limits.handshake_seconds
        nonce = secrets.token_bytes(NONCE_BYTES)
        stream.send(frame(FrameKind.HELLO, 0, nonce + self._incarnation), deadline)
        raw = stream.recv(HEADER.size, deadline, end_ok=True)
        if not raw:
            raise PeerLost("the peer closed before it said anything")
        if FrameHeader.unpack(raw) != FrameHeader(FrameKind.AUTH, 0, AUTH_BYTES):
            raise FrameRefused(Code.UNAUTHENTICATED, "a peer must authenticate first")
        body = stream.recv(AUTH_BYTES, deadline)
        client_nonce, rest = body[:NONCE_BYTES], body[NONCE_BYTES:]
        client, proof = rest[:INCARNATION_BYTES], rest[INCARNATION_BYTES:]
        said = (nonce, client_nonce, self._incarnation, client)
        if not hmac.compare_digest(proof, mac(self._key, b"client", *said)):
            text = "the shared secrets differ, or one side has none; give both the same"
            raise FrameRefused(Code.UNAUTHENTICATED, text)
        with self._lock:
            if self._closed or self._pending.pop(stream, None) is None:
                raise PeerLost("it was sent away before it had authenticated")
            self._serving.add(stream)
        table = table_bytes(self.regions.starts, self.regions.ends - self.regions.starts)
        welcome = mac(self._key, b"server", *said, table) + table
        stream.send(frame(FrameKind.WELCOME, 0, welcome), deadline)

    def _checked(self, header: FrameHeader, body: bytes) -> tuple[bytes, Ints, Ints]:
        """The frame's grant, if any, and its ranges, all of them inside registered memory."""
        if header.kind not in (FrameKind.READ, FrameKind.WRITE, FrameKind.GRANTED):
            raise FrameRefused(Code.MALFORMED, f"a frame of kind {header.kind} is not a request")
        if header.kind == FrameKind.WRITE and not self._writable:
            raise FrameRefused(Code.REVOKED, "nothing is written here without a grant")
        grant = body[:GRANT_BYTES] if header.kind == FrameKind.GRANTED else b""
        body = body[len(grant) :]
        if len(body) == 0 or len(body) % ROW_BYTES:
            raise FrameRefused(Code.MALFORMED, f"{len(body)} bytes are not a table of ranges")
        address, length = table_of(body)
        if int(length.min()) <= 0 or int(length.max()) > MAX_PAYLOAD_BYTES:
            raise FrameRefused(Code.OUT_OF_BOUNDS, "a range is empty, negative or too long")
        _require_inside(self.regions, address, length, "the memory that is registered here")
        if int(length.sum()) != header.payload_bytes:
            raise FrameRefused(Code.MALFORMED, "a frame's ranges do not sum to its payload")
        return grant, *joined(address, length)

    def _refuse(self, stream: TcpStream, request: int, error: FrameRefused | ProtocolError) -> None:
        code = error.code if isinstance(error, FrameRefused) else Code.MALFORMED
        self._count(code.name.lower())
        deadline = time.monotonic() + self._limits.goodbye_seconds
        stream.send(error_frame(request, code, str(error)), deadline)

    def _count(self, what: str) -> None:
        with self._lock:
            self.counters[what] += 1


class FrameRefused(Exception):
    """A frame that is answered with an error."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(slots=True)
class _Grant:
    ranges: RegionTable
    writing: set[TcpStream] = field(default_factory=set)
    applied_bytes: int = 0
    closing: bool = False


class Grants:
    """All open grants of one server. Any method, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)  # notified when a stream leaves a grant
        self._open: dict[bytes, _Grant] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, ranges: RegionTable) -> bytes:
        grant = secrets.token_bytes(GRANT_BYTES)
        with self._lock:
            self._open[grant] = _Grant(ranges)
        return grant

    def close(self, grant: bytes, seconds: float) -> int:
        """Close a grant. Returns the bytes written under it, or 0 if it was closed before."""
        with self._left:
            entry = self._open.get(grant)
            if entry is None:
                return 0
            entry.closing = True
            for stream in entry.writing:
                stream.abort()
            if not self._left.wait_for(lambda: not entry.writing, seconds):
                raise DeadlineExceeded(
                    f"{len(entry.writing)} writers did not leave a grant within {seconds:g} s; "
                    "close it again"
                )
            return entry.applied_bytes if self._open.pop(grant, None) else 0

    @contextmanager
    def writing(
        self, grant: bytes, stream: TcpStream, address: Ints, length: Ints
    ) -> Iterator[None]:
        """Entered while a stream's payload is received. Refuses ranges that are not granted."""
        with self._lock:
            entry = self._open.get(grant)
            if entry is None or entry.closing:
                raise FrameRefused(Code.REVOKED, "there is no such grant, or it was taken back")
            _require_inside(entry.ranges, address, length, "what was granted")
            entry.writing.add(stream)
        total = 0
        try:
            yield
            total = int(length.sum())
        finally:
            with self._left:
                entry.applied_bytes += total
                entry.writing.discard(stream)
                self._left.notify_all()


def _require_inside(regions: RegionTable, address: Ints, length: Ints, what: str) -> None:
    bad = regions.first_outside(address, length)
    if bad >= 0:
        where = f"{int(length[bad])} bytes at {int(address[bad]):#x}"
        raise FrameRefused(Code.OUT_OF_BOUNDS, f"{where} are not inside {what}; nothing was copied")
