"""The tcp carrier's receiving end: serves registered memory to peers that have the key.

One thread accepts, and one serves each connection. The cost of a connection is bounded from its
first byte: there is a deadline for the handshake, no more than `max_pending` connections that have
not finished it, and no allocation above one frame's table. Where too many have not finished, a new
connection takes the place of the oldest, or of the oldest of one address, if that address has more
than half of them. A peer finishes within milliseconds, so strangers do not keep it out.

Nothing is written before every descriptor of a frame was checked, and nothing without a grant,
unless the owner has made all of its memory writable. Whatever a peer sends, the answer is a frame
of data, a frame of error or a closed connection, and one of the `counters`. It never ends a thread
that others need.

A grant is a set of ranges of own memory that peers may write if they know its unguessable id. The
owner opens a grant for the ranges of one transfer, and closes it when it wants the memory back.
Every granted write names its grant, and all its ranges are checked against it before the first byte
is taken. Closing ends the connections that write under the grant at that moment, waits until their
threads have left the memory, and takes nothing more, whatever a peer that stalled, was stopped or
lies sends later. It also says how many bytes were written, as counted on this side.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvferry.carriers.base import (
    GRANT_BYTES,
    Memory,
    RegionTable,
)
from kvferry.carriers.host import HostMemory, joined
from kvferry.carriers.liveness import hang_up, ours_alone
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
    Session,
    TcpStream,
    error_frame,
    receive_runs,
    send_runs,
    table_bytes,
    table_of,
)
from kvferry.copies import Ints
from kvferry.errors import DeadlineExceeded, PeerLost, ProtocolError, TransferError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of connections, threads and time that peers may use."""

    max_connections: int = 1024
    max_pending: int = 64  # connections that have not authenticated yet
    handshake_seconds: float = 5.0
    frame_seconds: float = 10.0  # from a frame's first byte to the end of its table
    stall_seconds: float = 30.0  # without any progress; see frames.py for slow progress
    idle_seconds: float = 900.0  # between two requests
    goodbye_seconds: float = 1.0  # for a refused peer to read why


class TcpServer:
    """Serves `regions` of `memory` on every connection of `listener`."""

    def __init__(
        self,
        key: bytes,
        incarnation: bytes,
        limits: ServerLimits,
        *,
        writable: bool = False,
    ) -> None:
        self._key, self._incarnation, self._limits = key, incarnation, limits
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)  # a connection has ended
        self._pending: dict[TcpStream, str] = {}  # to the client's address, the oldest first
        self._serving: dict[TcpStream, bytes] = {}  # to the client's incarnation
        self._threads: set[threading.Thread] = set()
        self._barred: set[bytes] = set()
        self._closed = False
        self._listener: socket.socket | None = None
        self.regions = RegionTable.of([])
        self.grants = Grants()
        self._writable = writable  # whether writes need no grant
        self.memory: Memory = HostMemory([])
        self.counters: Counter[str] = Counter()

    def listen(self, listener: socket.socket) -> None:
        self._listener = ours_alone(listener)
        thread = threading.Thread(
            target=self._accept, args=(listener,), name="kvferry-tcp-accept", daemon=True
        )
        self._threads.add(thread)
        thread.start()

    def attach(self, sock: socket.socket, address: str = "") -> bool:
        """Serve one connection on a thread of its own; whether there is room for it."""
        try:
            stream = TcpStream(sock, self._limits.stall_seconds)
        except OSError:  # gone already
            sock.close()
            return False
        thread = threading.Thread(
            target=self._serve, args=(stream,), name="kvferry-tcp-serve", daemon=True
        )
        with self._lock:  # also the start: `close` joins every thread that it finds here
            room = not (
                self._closed
                or len(self._pending) + len(self._serving) >= self._limits.max_connections
            )
            if room:
                self._make_way()
                try:
                    thread.start()
                except RuntimeError:  # the system has no thread for it
                    room = False
                else:
                    self._pending[stream] = address
                    self._threads.add(thread)
        if not room:
            self._count("busy")
            with contextlib.suppress(TransferError):
                text = "no room for another connection; try again later"
                stream.send(error_frame(0, Code.BUSY, text), time.monotonic() + 0.1)
            stream.close()
        return room

    def _make_way(self) -> None:
        """With the lock held: send one away that has not authenticated, where there are many."""
        if len(self._pending) < self._limits.max_pending:
            return
        crowd, count = Counter(self._pending.values()).most_common(1)[0]
        crowded = 2 * count > len(self._pending)
        oldest = next(s for s, where in self._pending.items() if where == crowd or not crowded)
        del self._pending[oldest]
        oldest.abort()  # its thread closes it
        self.counters["evicted"] += 1

    def revoke(self, incarnation: bytes, seconds: float) -> None:
        """End this peer's frames under way and let it in no more; no byte of it arrives later."""
        with self._lock:
            self._barred.add(incarnation)
        self._end_and_wait(incarnation, seconds)
        self._count("revoked")

    def readmit(self, incarnation: bytes) -> None:
        with self._lock:
            self._barred.discard(incarnation)

    def close(self, seconds: float) -> None:
        """Idempotent. Returns when no connection touches memory any more."""
        with self._lock:
            self._closed = True
            listener, self._listener = self._listener, None
            threads = list(self._threads)
        if listener is not None:
            hang_up(listener)  # wakes the thread that accepts
        with contextlib.suppress(DeadlineExceeded):
            self._end_and_wait(None, seconds)
        until = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _end_and_wait(self, incarnation: bytes | None, seconds: float) -> None:
        def theirs() -> list[TcpStream]:
            if incarnation is None:
                return [*self._serving, *self._pending]
            return [s for s, who in self._serving.items() if who == incarnation]

        with self._left:
            for stream in theirs():
                stream.abort()
            if not self._left.wait_for(lambda: not theirs(), seconds):
                raise DeadlineExceeded(f"a peer's connections did not end within {seconds:g} s")

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
            self._converse(stream)
        except FrameRefused as refused:
            self._answer(stream, 0, refused)
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
            self._leave(stream, threading.current_thread())

    def _leave(self, stream: TcpStream, thread: threading.Thread) -> None:
        with self._left:
            self._pending.pop(stream, None)
            self._serving.pop(stream, None)
            self._threads.discard(thread)
            self._left.notify_all()
        stream.close()

    def _converse(self, stream: TcpStream) -> None:
        self._handshake(stream)
        last = 0  # number of the newest request
        while stream.wait_readable(self._limits.idle_seconds):
            deadline = time.monotonic() + self._limits.frame_seconds
            raw = stream.recv(HEADER.size, deadline, end_ok=True)
            if not raw:
                return
            header = _unpack(raw)
            body = stream.recv(header.body_bytes, deadline)
            try:
                if header.request <= last:
                    raise FrameRefused(Code.REPLAYED, f"request {header.request} came before")
                last = header.request
                grant, address, length = self._checked(header, body)
                if header.kind == FrameKind.GRANTED:
                    with self.grants.writing(grant, stream, address, length):
                        stream.send(FrameHeader(FrameKind.GO, header.request).pack())
                        receive_runs(stream, self.memory, address, length)
                    self._count("writes")
                    stream.send(FrameHeader(FrameKind.APPLIED, header.request).pack())
                    continue
            except FrameRefused as refused:
                self._answer(stream, header.request, refused)
                continue
            # counted before the peer can know: a peer that has an answer finds it counted
            if header.kind == FrameKind.READ:
                self._count("reads")
                answer = FrameHeader(FrameKind.DATA, header.request, 0, header.payload_bytes)
                stream.send(answer.pack())
                send_runs(stream, self.memory, address, length)
            else:
                stream.send(FrameHeader(FrameKind.GO, header.request).pack())
                receive_runs(stream, self.memory, address, length)
                self._count("writes")
                stream.send(FrameHeader(FrameKind.APPLIED, header.request).pack())
        self._count("idle")

    def _handshake(self, stream: TcpStream) -> None:
        deadline = time.monotonic() + self._limits.handshake_seconds
        nonce = secrets.token_bytes(NONCE_BYTES)
        hello = nonce + self._incarnation
        stream.send(FrameHeader(FrameKind.HELLO, 0, len(hello)).pack() + hello, deadline)
        raw = stream.recv(HEADER.size, deadline, end_ok=True)
        if not raw:
            raise PeerLost("the peer closed before it said anything")
        header = _unpack(raw)
        if header != FrameHeader(FrameKind.AUTH, 0, AUTH_BYTES):
            raise FrameRefused(Code.UNAUTHENTICATED, "a peer must authenticate first", fatal=True)
        body = stream.recv(AUTH_BYTES, deadline)
        client_nonce, rest = body[:NONCE_BYTES], body[NONCE_BYTES:]
        client, mac = rest[:INCARNATION_BYTES], rest[INCARNATION_BYTES:]
        session = Session(nonce, client_nonce, self._incarnation, client)
        if not hmac.compare_digest(mac, session.client_mac(self._key)):
            text = "the shared secrets differ, or one side has none; give both the same"
            raise FrameRefused(Code.UNAUTHENTICATED, text, fatal=True)
        with self._lock:
            barred = client in self._barred
            evicted = stream not in self._pending
            if not (barred or self._closed or evicted):
                del self._pending[stream]
                self._serving[stream] = client
        if evicted:
            raise PeerLost("it was sent away before it had authenticated")
        if barred:
            raise FrameRefused(Code.REVOKED, "this peer's access was revoked", fatal=True)
        table = table_bytes(self.regions.starts, self.regions.ends - self.regions.starts)
        welcome = session.server_mac(self._key, table) + table
        stream.send(FrameHeader(FrameKind.WELCOME, 0, len(welcome)).pack() + welcome, deadline)

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
        bad = self.regions.first_outside(address, length)
        if bad >= 0:
            text = (
                f"{int(length[bad])} bytes at {int(address[bad]):#x} are not inside the memory "
                "that is registered here; nothing was copied"
            )
            raise FrameRefused(Code.OUT_OF_BOUNDS, text)
        if int(length.sum()) != header.payload_bytes:
            raise FrameRefused(Code.MALFORMED, "a frame's ranges do not sum to its payload")
        return grant, *joined(address, length)

    def _answer(self, stream: TcpStream, request: int, refused: FrameRefused) -> None:
        self._count(refused.code.name.lower())
        deadline = time.monotonic() + self._limits.goodbye_seconds
        frame = error_frame(request, refused.code, refused.text)
        if refused.fatal:
            with contextlib.suppress(TransferError):  # a peer that does not listen is not told
                stream.send(frame, deadline)
        else:
            stream.send(frame, deadline)

    def _count(self, what: str) -> None:
        with self._lock:
            self.counters[what] += 1


def _unpack(raw: bytes) -> FrameHeader:
    try:
        return FrameHeader.unpack(raw)
    except ProtocolError as error:
        raise FrameRefused(Code.MALFORMED, str(error), fatal=True) from None


class FrameRefused(Exception):
    """A frame that is answered with an error."""

    def __init__(self, code: Code, text: str, *, fatal: bool = False) -> None:
        super().__init__(text)
        self.code, self.text = code, text
        self.fatal = fatal  # the connection ends: later frames cannot be told apart


@dataclass(slots=True)
class _Grant:
    ranges: RegionTable
    writing: set[TcpStream] = field(default_factory=set)
    applied_bytes: int = 0


class Grants:
    """All open grants of one server. Any method, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)  # a stream is through with a grant
        self._open: dict[bytes, _Grant] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, ranges: RegionTable) -> bytes:
        grant = secrets.token_bytes(GRANT_BYTES)
        with self._lock:
            self._open[grant] = _Grant(ranges)
        return grant

    def close(self, grant: bytes, seconds: float) -> int:
        """Bytes written under it; none arrives after this returns. 0 where it is closed already."""
        with self._left:
            entry = self._open.get(grant)
            if entry is None:
                return 0
            del self._open[grant]
            for stream in entry.writing:
                stream.abort()
            if not self._left.wait_for(lambda: not entry.writing, seconds):
                self._open[grant] = _Grant(RegionTable.of([]), entry.writing, entry.applied_bytes)
                raise DeadlineExceeded(
                    f"{len(entry.writing)} writers did not leave a grant within {seconds:g} s; "
                    "close it again"
                )
            return entry.applied_bytes

    @contextlib.contextmanager
    def writing(
        self, grant: bytes, stream: TcpStream, address: Ints, length: Ints
    ) -> Iterator[None]:
        """While a stream's payload is taken into these ranges; refuses ranges without a grant."""
        with self._lock:
            entry = self._open.get(grant)
            if entry is None:
                raise FrameRefused(Code.REVOKED, "there is no such grant, or it was taken back")
            bad = entry.ranges.first_outside(address, length)
            if bad >= 0:
                text = (
                    f"{int(length[bad])} bytes at {int(address[bad]):#x} are not inside what was "
                    "granted; nothing was copied"
                )
                raise FrameRefused(Code.OUT_OF_BOUNDS, text)
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
