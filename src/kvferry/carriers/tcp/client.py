"""The tcp carrier's asking end: authenticated connections to a server.

A `TcpPeer` keeps a peer's idle connections and its threads; `Streams` are the connections that one
transfer uses, one for each thread that works on it.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvferry.carriers.base import (
    Memory,
    MemoryRegion,
    RegionTable,
)
from kvferry.carriers.host import joined
from kvferry.carriers.tcp.frames import (
    HEADER,
    HELLO_BYTES,
    INCARNATION_BYTES,
    MAC_BYTES,
    MAX_BODY_BYTES,
    NONCE_BYTES,
    ROW_BYTES,
    FrameHeader,
    FrameKind,
    Session,
    TcpStream,
    error_of,
    receive_runs,
    send_runs,
    table_bytes,
    table_of,
)
from kvferry.carriers.transfer import CANCEL_SECONDS, Job, Workers
from kvferry.copies import Copies, Ints
from kvferry.errors import (
    AuthenticationError,
    Cancelled,
    DeadlineExceeded,
    PeerLost,
    ProtocolError,
    TransferError,
)
from kvferry.net.names import dial

IDLE_SECONDS = 300.0  # a connection unused for longer is not used again; servers close theirs later


class TcpEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """Where a carrier listens, and which start of it this is."""

    carrier: str
    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    incarnation: bytes

    @classmethod
    def decode(cls, raw: bytes) -> TcpEndpoint:
        try:
            endpoint = _endpoints.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"this is not the endpoint of a tcp carrier: {error}") from None
        if endpoint.carrier != "tcp" or len(endpoint.incarnation) != INCARNATION_BYTES:
            raise ProtocolError(f"this is not the endpoint of a tcp carrier: {endpoint.carrier!r}")
        return endpoint


_endpoints = msgspec.msgpack.Decoder(TcpEndpoint)  # made once: its first use is on many threads


class TcpConnection:
    """Used by one transfer at a time. After an error that `in_step` does not know, close it."""

    def __init__(self, stream: TcpStream, regions: RegionTable) -> None:
        self.stream, self.regions = stream, regions
        self.in_step = True  # both sides agree on the next byte, and no answer is awaited
        self._request = 0  # the newest
        self._ahead: Copies | None = None  # the copies that it asks for, if sent before its turn
        self._unsent: bytes | memoryview = b""  # bytes of that request
        self._used = time.monotonic()

    @classmethod
    def open(
        cls,
        endpoint: TcpEndpoint,
        secret: bytes,
        incarnation: bytes,
        deadline: float,
        stall_seconds: float,
    ) -> TcpConnection:
        stream = TcpStream(_dial(endpoint, deadline), stall_seconds)
        try:
            regions = _shake_hands(stream, endpoint, secret, incarnation, deadline)
        except BaseException:
            stream.close()
            raise
        return cls(stream, regions)

    def usable(self) -> bool:
        """Whether the next transfer may have it. One that became readable while idle has ended."""
        return time.monotonic() - self._used < IDLE_SECONDS and not self.stream.wait_readable(0)

    def read(self, memory: Memory, copies: Copies, following: Copies | None = None) -> None:
        """`following` are the copies that are read next: they are asked for before these bytes have
        come, so that the peer goes on with them at once."""
        if self._ahead is not copies:
            self.stream.send(self._question(FrameKind.READ, copies.src, copies.length))
        self._ahead = None
        here, length = joined(copies.dst, copies.length)  # while the request travels
        self._expect(FrameKind.DATA, int(length.sum()))
        self.in_step = False
        if following is not None:
            # The peer reads nothing while it sends: bytes beyond the sockets' buffers wait here.
            question = self._question(FrameKind.READ, following.src, following.length)
            self._unsent = self.stream.send_some(question)
            self._ahead = following
        receive_runs(self.stream, memory, here, length)
        self.stream.send(self._unsent)
        self._unsent = b""
        self._done()

    def write(self, memory: Memory, copies: Copies, grant: bytes = b"") -> None:
        kind = FrameKind.GRANTED if grant else FrameKind.WRITE
        self.stream.send(self._question(kind, copies.dst, copies.length, grant))
        here, length = joined(copies.src, copies.length)
        self._expect(FrameKind.GO, 0)
        self.in_step = False
        send_runs(self.stream, memory, here, length)
        self._expect(FrameKind.APPLIED, 0)
        self._done()

    def _question(self, kind: FrameKind, address: Ints, length: Ints, grant: bytes = b"") -> bytes:
        there, lengths = joined(address, length)
        body = grant + table_bytes(there, lengths)
        self._request += 1
        self.in_step = False
        return FrameHeader(kind, self._request, len(body), int(lengths.sum())).pack() + body

    def _expect(self, kind: FrameKind, payload_bytes: int) -> None:
        header, body = _frame(self.stream, time.monotonic() + self.stream.stall_seconds)
        if header.kind == FrameKind.ERROR:
            self.in_step = header.request == self._request
            raise error_of(body)
        found = (header.kind, header.request, header.payload_bytes)
        if found != (kind, self._request, payload_bytes):
            raise ProtocolError(
                f"expected frame {kind.name} of request {self._request} with {payload_bytes} "
                f"bytes, found kind {header.kind} of {header.request} with {header.payload_bytes}"
            )

    def _done(self) -> None:
        self.in_step = self._ahead is None
        self._used = time.monotonic()


def _frame(stream: TcpStream, deadline: float) -> tuple[FrameHeader, bytes]:
    header = FrameHeader.unpack(stream.recv(HEADER.size, deadline))
    return header, stream.recv(header.body_bytes, deadline)


def _dial(endpoint: TcpEndpoint, deadline: float) -> socket.socket:
    where = f"{endpoint.host}:{endpoint.port}"
    if time.monotonic() >= deadline:
        raise DeadlineExceeded(f"no time left to connect to {where}")
    try:
        return dial(endpoint.host, endpoint.port, deadline)
    except TimeoutError:
        raise DeadlineExceeded(f"{where} did not answer by the deadline") from None
    except ConnectionError as error:
        raise PeerLost(f"nobody listens at {where}: {error}") from None
    except (OSError, ValueError, OverflowError) as error:  # also a host that is no name
        raise TransferError(f"cannot connect to {where}: {error}") from None


def _shake_hands(
    stream: TcpStream, endpoint: TcpEndpoint, secret: bytes, incarnation: bytes, deadline: float
) -> RegionTable:
    """Prove the secret, see it proven, and learn which regions the peer has registered."""
    header, hello = _frame(stream, deadline)
    if header.kind == FrameKind.ERROR:
        raise error_of(hello)
    if header.kind != FrameKind.HELLO or len(hello) != HELLO_BYTES:
        raise ProtocolError(f"expected a greeting, found a frame of kind {header.kind}")
    if hello[NONCE_BYTES:] != endpoint.incarnation:
        raise PeerLost(
            f"another carrier listens at {endpoint.host}:{endpoint.port} now: the peer restarted. "
            "Ask for its new endpoint"
        )
    nonce = secrets.token_bytes(NONCE_BYTES)
    session = Session(hello[:NONCE_BYTES], nonce, endpoint.incarnation, incarnation)
    auth = nonce + incarnation + session.client_mac(secret)
    stream.send(FrameHeader(FrameKind.AUTH, 0, len(auth)).pack() + auth, deadline)
    header, welcome = _frame(stream, deadline)
    if header.kind == FrameKind.ERROR:
        raise error_of(welcome)
    mac, table = welcome[:MAC_BYTES], welcome[MAC_BYTES:]
    if header.kind != FrameKind.WELCOME or len(welcome) < MAC_BYTES or len(table) % ROW_BYTES:
        raise ProtocolError(f"expected a welcome, found a frame of kind {header.kind}")
    if not hmac.compare_digest(mac, session.server_mac(secret, table)):
        raise AuthenticationError(
            f"{endpoint.host}:{endpoint.port} does not know the shared secret; nothing was sent"
        )
    pairs = zip(*(a.tolist() for a in table_of(table)), strict=True)
    return RegionTable.of([MemoryRegion(address, length) for address, length in pairs])


MAX_REGIONS = (MAX_BODY_BYTES - MAC_BYTES) // ROW_BYTES  # that one welcome can name


CONNECT_SECONDS = 10.0  # for the connections after a peer's first, which has the caller's deadline
TRANSFERS_PER_PEER = 4  # at a time


@dataclass(frozen=True, slots=True)
class Own:
    """This side's part of every connection."""

    incarnation: bytes
    stall_seconds: float
    streams_per_transfer: int


class TcpPeer:
    """A server that this carrier is connected to, and the connections that are not in use."""

    def __init__(self, own: Own, endpoint: TcpEndpoint, secret: bytes) -> None:
        self.endpoint = endpoint
        self.regions = RegionTable.of([])
        self._own, self._secret = own, secret
        self._idle: list[TcpConnection] = []
        self._lock = threading.Lock()
        self._closed = False
        self.workers = Workers("kvferry-tcp", TRANSFERS_PER_PEER)
        self.helpers = Workers(
            "kvferry-tcp-help", TRANSFERS_PER_PEER * (own.streams_per_transfer - 1)
        )

    def connect(self, deadline: float) -> None:
        connection = self._open(deadline)
        self.regions = connection.regions
        self.put(connection)

    def take(self) -> TcpConnection:
        """A connection for one transfer: an idle one that still works, or a new one."""
        while True:
            with self._lock:
                if self._closed:
                    raise Cancelled("the carrier was closed")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._open(time.monotonic() + CONNECT_SECONDS)
            if connection.usable():
                return connection
            connection.stream.close()

    def put(self, connection: TcpConnection, *, keep: bool = True) -> None:
        """Give it back, or close it: where it is out of step, and where it was shut down."""
        with self._lock:
            keep = keep and not self._closed and connection.in_step
            if keep:
                self._idle.append(connection)
                ended = []
            else:  # the others may have ended with it
                ended = [connection, *(c for c in self._idle if not c.usable())]
                self._idle = [c for c in self._idle if c not in ended]
        for connection in ended:
            connection.stream.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.workers.close()
        self.helpers.close()
        for connection in self._idle:
            connection.stream.close()
        self._idle.clear()

    def _open(self, deadline: float) -> TcpConnection:
        return TcpConnection.open(
            self.endpoint,
            self._secret,
            self._own.incarnation,
            deadline,
            self._own.stall_seconds,
        )


class Streams:
    """The connections that one transfer uses: one for each thread that works on it."""

    def __init__(self, peer: TcpPeer, job: Job, *, reading: bool, grant: bytes) -> None:
        self._peer, self._job, self._reading, self._grant = peer, job, reading, grant
        self._mine: dict[int, TcpConnection] = {}  # by thread
        self._failed: list[Exception] = []
        self._ended: set[TcpConnection] = set()

    def carry(self, memory: Memory, part: Copies, following: Copies | None) -> None:
        try:
            connection = self._mine.get(threading.get_ident()) or self._take()
            if self._reading:
                connection.read(memory, part, following)
            else:
                connection.write(memory, part, self._grant)
        except Exception as error:
            self._failed.append(error)
            if self._failed[0] is error:
                self.end(but=threading.get_ident())  # its own may still be in step
            raise self._failed[0] from None  # later errors are its consequences

    def end(self, but: int | None = None) -> None:
        """From any thread: end the frames under way. A peer still confirms applied ones."""
        for thread, connection in list(self._mine.items()):
            if thread == but:
                continue
            self._ended.add(connection)
            if self._reading:
                connection.stream.abort()
            else:
                connection.stream.stop_sending()

    def give_back(self) -> None:
        """When no thread works any more."""
        for connection in self._mine.values():
            ended = connection in self._ended
            if not self._reading and (ended or not connection.in_step):
                # sent bytes may still be on their way into the peer's memory: wait until they end
                self._job.late_bytes |= not connection.stream.drain(CANCEL_SECONDS)
            self._peer.put(connection, keep=not ended)

    def _take(self) -> TcpConnection:
        connection = self._peer.take()
        self._mine[threading.get_ident()] = connection
        self._job.checkpoint()  # after it can be ended: a cancel comes either before or after
        if self._failed:
            raise self._failed[0]
        return connection
