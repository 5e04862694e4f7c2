# SPDX-License-Identifier: Apache-2.0
"""The carrier between any two hosts: one-sided reads and writes over TCP.

The owner of memory runs a `TcpServer` (server.py), to which readers and writers connect. Frames,
their authentication, and how an end moves a frame's bytes are in frames.py. A transfer has
connections of its own (`Streams`), from a small pool per peer (`TcpPeer`). So a transfer is
cancelled by closing them, and transfers do not wait for each other. A batch is cut into frames that
the server's limits allow. A few connections share the frames: one asks, gathers or scatters while
another one's bytes are on their way. A read requests its next frame while the frame before it
arrives.

    cancelled read    nothing is received any more once `cancel` returns
    cancelled write   this side stops sending and waits until the server has closed: then all that
                      was on the way has either been applied or is gone
    failed            an error on one connection ends the others in the same way
    no connection     a transfer fails only if its first connection cannot be opened; without the
                      others, the first one carries their frames
    grant closed      the owner closes the connections that write under it, and no others

Without a secret, peers must be of this user (net/keys.py), and the carrier listens on loopback
only. A peer may write only granted ranges, unless the owner makes all of its memory `writable`.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from kvferry.carriers.base import (
    GrantingCarrier,
    Memory,
    MemoryRegion,
    RegionTable,
    StagedMemory,
    Transfer,
    checked,
    decode_endpoint,
    slices,
)
from kvferry.carriers.host import joined
from kvferry.carriers.tcp.frames import (
    HEADER,
    HELLO_BYTES,
    INCARNATION_BYTES,
    MAC_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_REGIONS,
    NONCE_BYTES,
    ROW_BYTES,
    FrameHeader,
    FrameKind,
    TcpStream,
    error_of,
    frame,
    mac,
    receive_runs,
    send_runs,
)
from kvferry.carriers.tcp.server import STILL_USED, ServerLimits, TcpServer
from kvferry.carriers.transfer import CANCEL_SECONDS, Job, Workers, share
from kvferry.copies import Copies, Ints, table_bytes, table_of
from kvferry.errors import AuthenticationError, Cancelled, PeerLost, ProtocolError, TransferError
from kvferry.net.keys import Key
from kvferry.net.names import EVERYWHERE, LOCALHOST, Admits, Reach, dial, source_address
from kvferry.units import require_port

log = logging.getLogger(__name__)

STREAMS_PER_TRANSFER = 2
# Staged memory is gathered, crosses the bus and is sent, in this order. The steps of several
# connections overlap (H200: 14 GB/s by four, 8 by two).
STAGED_STREAMS_PER_TRANSFER = 4
# A small frame costs a round trip that nothing hides, a large one leaves the other connection
# without work. So a transfer has about this many frames, within these bounds.
FRAMES_PER_TRANSFER = 8
LEAST_FRAME_BYTES = 4 << 20
IDLE_SECONDS = 300.0  # a connection unused for longer is not used again; servers close theirs later
CONNECT_SECONDS = 10.0  # for the connections after a peer's first, which has the caller's deadline
TRANSFERS_PER_PEER = 4  # at a time


class TcpEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """Where a carrier listens, and its incarnation."""

    carrier: Literal["tcp"]
    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    incarnation: Annotated[
        bytes, msgspec.Meta(min_length=INCARNATION_BYTES, max_length=INCARNATION_BYTES)
    ]

    @classmethod
    def decode(cls, raw: bytes) -> TcpEndpoint:
        return decode_endpoint(_endpoints, raw, "tcp")


_endpoints = msgspec.msgpack.Decoder(TcpEndpoint)


class TcpCarrier(GrantingCarrier):
    """`host` and `port`: where to listen. `advertise`: the host that peers dial.

    `memory` is required if the registered memory is a GPU's (`StagedMemory`). `writable` lets peers
    write all registered memory without a grant. `admits` says which of the hosts that endpoints
    name may be dialed.
    """

    name = "tcp"

    def __init__(
        self,
        *,
        secret: bytes | str | None = None,
        host: str | None = None,
        port: int = 0,
        advertise: str | None = None,
        limits: ServerLimits | None = None,
        memory: Memory | None = None,
        streams_per_transfer: int | None = None,
        writable: bool = False,
        admits: Admits | None = None,
    ) -> None:
        key = Key.of(secret)
        self._reach = Reach(key.configured, admits)
        if host is None:
            host = EVERYWHERE[0] if key.configured else LOCALHOST
        self._reach.require_listening(host)
        self._host, self._port, self._advertise = host, require_port(port), advertise
        self.limits = limits or ServerLimits()
        self.incarnation = secrets.token_bytes(INCARNATION_BYTES)
        self.key = key.derive("tcp")
        self.server = TcpServer(self.key, self.incarnation, self.limits, writable=writable)
        usual = STREAMS_PER_TRANSFER
        if isinstance(memory, StagedMemory):
            self.server.staged, usual = memory, STAGED_STREAMS_PER_TRANSFER
        self.streams_per_transfer = streams_per_transfer or usual
        self._lock = threading.Lock()
        self._endpoint: bytes | None = None
        self._peers: list[TcpPeer] = []
        self._closed = False

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        table = RegionTable.of([*self.server.regions.regions(), *regions])
        if len(table) > MAX_REGIONS:
            raise TransferError(
                f"{len(table)} separate regions; the tcp carrier takes at most {MAX_REGIONS}"
            )
        self.server.regions = table

    def endpoint(self) -> bytes:
        """The first call begins to listen."""
        with self._lock:
            if self._closed:
                raise TransferError("the carrier is closed")
            if self._endpoint is None:
                family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
                try:
                    listener = socket.create_server(
                        (self._host, self._port), family=family, backlog=1024
                    )
                except OSError as error:
                    raise TransferError(
                        f"cannot listen on {self._host}:{self._port}: {error}"
                    ) from None
                port = listener.getsockname()[1]
                self.server.listen(listener)
                host = self._advertise or _reachable(self._host)
                self._endpoint = msgspec.msgpack.encode(
                    TcpEndpoint("tcp", host, port, self.incarnation)
                )
            return self._endpoint

    def connect(self, endpoint: bytes, deadline: float) -> TcpPeer:
        found = TcpEndpoint.decode(endpoint)
        self._reach.require(found.host)
        peer = TcpPeer(self, found)
        peer.connect(deadline)
        with self._lock:
            if not self._closed:
                self._peers.append(peer)
                return peer
        peer.close(CANCEL_SECONDS)
        raise Cancelled("the carrier was closed")

    def write_granted(self, peer: TcpPeer, copies: Copies, grant: bytes) -> Transfer:
        return self.submit(peer, copies, reading=False, grant=grant)

    def submit(
        self, peer: TcpPeer, copies: Copies, *, reading: bool, grant: bytes = b""
    ) -> Transfer:
        def work(job: Job) -> None:
            ours, theirs = self.server.regions, peer.regions
            arrays = checked(copies, ours=ours, theirs=theirs, reading=reading)
            total = sum(int(part.length.sum()) for part in arrays.windows())
            if total == 0:
                return
            frame = min(max(total // FRAMES_PER_TRANSFER, LEAST_FRAME_BYTES), MAX_PAYLOAD_BYTES)
            streams = Streams(peer, job, reading=reading, grant=grant)
            try:
                with job.woken_by(streams.end):
                    streams.join()  # before the helpers: they can be done without
                    share(
                        job,
                        slices(arrays, frame),
                        streams.carry,
                        peer.helpers,
                        self.streams_per_transfer - 1,
                        ahead=reading,
                        join=streams.join,
                    )
            finally:
                streams.give_back()

        return peer.workers.submit(Job(work, "a tcp read" if reading else "a tcp write"))

    def open_grant(self, address: Ints, length: Ints) -> bytes:
        self.server.regions.require("this carrier", address, length)
        return self.server.grants.open(RegionTable.of_arrays(address, length))

    def close_grant(self, grant: bytes, seconds: float) -> int:
        return self.server.grants.close(grant, seconds)

    def disconnect(self, peer: TcpPeer) -> None:
        with self._lock:
            if peer in self._peers:
                self._peers.remove(peer)
        peer.close(CANCEL_SECONDS)

    def close(self) -> None:
        until = time.monotonic() + CANCEL_SECONDS
        with self._lock:
            self._closed = True
            peers, self._peers = self._peers, []
        for peer in peers:
            peer.end_soon()
        self.server.close(CANCEL_SECONDS)
        for peer in peers:
            peer.close(max(0.0, until - time.monotonic()))


class TcpConnection:
    """Used by one transfer at a time. Close it if it is not `in_step` after an error."""

    def __init__(
        self, stream: TcpStream, regions: RegionTable, staged: StagedMemory | None
    ) -> None:
        self.stream, self.regions = stream, regions  # the peer's
        self._staged = staged  # this side's, if it is not host memory
        self.in_step = True  # both sides agree on the next byte, and no answer is awaited
        self._request = 0  # number of the newest one
        self._ahead: Copies | None = None  # the copies of the newest request, if it was sent ahead
        self._used = time.monotonic()

    @classmethod
    def open(cls, own: TcpCarrier, endpoint: TcpEndpoint, deadline: float) -> TcpConnection:
        stream = TcpStream(dial(endpoint.host, endpoint.port, deadline), own.limits.stall_seconds)
        try:
            regions = _shake_hands(stream, own, endpoint, deadline)
            return cls(stream, regions, own.server.staged)
        except BaseException:
            stream.close()
            raise

    def usable(self) -> bool:
        """Whether the next transfer may use it. If it is readable while idle, it has ended."""
        return time.monotonic() - self._used < IDLE_SECONDS and not self.stream.wait_readable(0)

    def read(self, copies: Copies, following: Copies | None = None) -> None:
        """Read these copies. `following` are the copies to read next: they are requested before
        these bytes have come, so that the peer sends them without a pause."""
        if self._ahead is not copies:
            self.stream.send(self._question(FrameKind.READ, copies.src, copies.length))
        self._ahead = None
        here, length = joined(copies.dst, copies.length)  # while the request travels
        self._expect(FrameKind.DATA, int(length.sum()))
        self.in_step = False
        unsent = memoryview(b"")
        if following is not None:
            # The peer reads nothing while it sends: bytes that the buffers do not take wait.
            question = self._question(FrameKind.READ, following.src, following.length)
            unsent = self.stream.send_some(question)
            self._ahead = following
        receive_runs(self.stream, self._staged, here, length)
        self.stream.send(unsent)
        self._done()

    def write(self, copies: Copies, grant: bytes = b"") -> None:
        kind = FrameKind.GRANTED if grant else FrameKind.WRITE
        self.stream.send(self._question(kind, copies.dst, copies.length, grant))
        here, length = joined(copies.src, copies.length)
        self._expect(FrameKind.GO)
        self.in_step = False
        send_runs(self.stream, self._staged, here, length)
        self._expect(FrameKind.APPLIED)
        self._done()

    def _question(self, kind: FrameKind, address: Ints, length: Ints, grant: bytes = b"") -> bytes:
        there, lengths = joined(address, length)
        body = grant + table_bytes(there, lengths)
        self._request += 1
        self.in_step = False
        return frame(kind, self._request, body, int(lengths.sum()))

    def _expect(self, kind: FrameKind, payload_bytes: int = 0) -> None:
        header, body = _receive(self.stream, time.monotonic() + self.stream.stall_seconds)
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


class TcpPeer:
    """A server that this carrier is connected to, and the connections that are not in use."""

    def __init__(self, own: TcpCarrier, endpoint: TcpEndpoint) -> None:
        self._own, self._endpoint = own, endpoint
        self.regions = RegionTable.of([])
        self._idle: list[TcpConnection] = []
        self._lock = threading.Lock()
        self._closed = False
        self.workers = Workers("kvferry-tcp", TRANSFERS_PER_PEER)
        self.helpers = Workers(
            "kvferry-tcp-help", TRANSFERS_PER_PEER * (own.streams_per_transfer - 1)
        )

    def connect(self, deadline: float) -> None:
        connection = TcpConnection.open(self._own, self._endpoint, deadline)
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
                by = time.monotonic() + CONNECT_SECONDS
                return TcpConnection.open(self._own, self._endpoint, by)
            if connection.usable():
                return connection
            connection.stream.close()

    def put(self, connection: TcpConnection, *, keep: bool = True) -> None:
        """Give a connection back. It is closed if it is out of step or was shut down."""
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

    def end_soon(self) -> None:
        """End the transfers, without waiting for that."""
        with self._lock:
            self._closed = True
        self.workers.end_soon()
        self.helpers.end_soon()

    def close(self, seconds: float) -> None:
        self.end_soon()
        self.workers.close(seconds)
        left = len(self.workers.busy)
        if left:
            log.warning(STILL_USED, left, "transfers", CANCEL_SECONDS)
        for connection in self._idle:
            connection.stream.close()
        self._idle.clear()


class Streams:
    """The connections of one transfer, one for each thread that carries frames of it."""

    def __init__(self, peer: TcpPeer, job: Job, *, reading: bool, grant: bytes) -> None:
        self._peer, self._job, self._reading, self._grant = peer, job, reading, grant
        self._mine: dict[int, TcpConnection] = {}  # by thread
        self._lock, self._over = threading.Lock(), False
        self._failed: list[Exception] = []
        self._ended: set[TcpConnection] = set()

    def join(self) -> None:
        """Give this thread a connection, if it has none."""
        if threading.get_ident() in self._mine:
            return
        connection = self._peer.take()
        with self._lock:
            late = self._over
            if not late:
                self._mine[threading.get_ident()] = connection
        if late:
            self._peer.put(connection)
            raise Cancelled("the transfer was over before its connection was open")
        self._job.checkpoint()  # after `end` can see the connection: no cancel is missed
        if self._failed:
            raise self._failed[0]

    def carry(self, part: Copies, following: Copies | None) -> None:
        try:
            connection = self._mine[threading.get_ident()]
            if self._reading:
                connection.read(part, following)
            else:
                connection.write(part, self._grant)
        except Exception as error:
            self._failed.append(error)
            if self._failed[0] is error:
                self.end(but=threading.get_ident())  # this one may still be in step
            raise self._failed[0] from None  # the first error caused the later ones

    def end(self, but: int | None = None) -> None:
        """From any thread: end the frames under way. The peer still confirms applied writes."""
        for thread, connection in list(self._mine.items()):
            if thread == but:
                continue
            self._ended.add(connection)
            if self._reading:
                connection.stream.abort()
            else:
                connection.stream.stop_sending()

    def give_back(self) -> None:
        """Return the connections, when no thread uses them any more. One that a thread still opens
        is returned by that thread."""
        with self._lock:
            self._over = True
        for connection in self._mine.values():
            ended = connection in self._ended
            if not self._reading and (ended or not connection.in_step):
                # sent bytes may be on their way into the peer's memory: wait until the peer closes
                self._job.late_bytes |= not connection.stream.drain(CANCEL_SECONDS)
            self._peer.put(connection, keep=not ended)


def _shake_hands(
    stream: TcpStream, own: TcpCarrier, endpoint: TcpEndpoint, deadline: float
) -> RegionTable:
    """Prove the key, see it proven, and learn which regions the peer has registered."""
    hello = _greeting(stream, FrameKind.HELLO, deadline)
    if len(hello) != HELLO_BYTES:
        raise ProtocolError(f"a HELLO has {HELLO_BYTES} bytes, found {len(hello)}")
    if hello[NONCE_BYTES:] != endpoint.incarnation:
        raise PeerLost(
            f"another carrier listens at {endpoint.host}:{endpoint.port} now: the peer restarted. "
            "Ask for its new endpoint"
        )
    nonce = secrets.token_bytes(NONCE_BYTES)
    said = (hello[:NONCE_BYTES], nonce, endpoint.incarnation, own.incarnation)
    auth = nonce + own.incarnation + mac(own.key, b"client", *said)
    stream.send(frame(FrameKind.AUTH, 0, auth), deadline)
    welcome = _greeting(stream, FrameKind.WELCOME, deadline)
    proof, table = welcome[:MAC_BYTES], welcome[MAC_BYTES:]
    if not hmac.compare_digest(proof, mac(own.key, b"server", *said, table)):
        raise AuthenticationError(
            f"{endpoint.host}:{endpoint.port} does not know the shared secret; nothing was sent"
        )
    if len(table) % ROW_BYTES:
        raise ProtocolError(f"{len(table)} bytes are not a table of regions")
    pairs = zip(*(column.tolist() for column in table_of(table)), strict=True)
    return RegionTable.of([MemoryRegion(address, length) for address, length in pairs])


def _greeting(stream: TcpStream, kind: FrameKind, deadline: float) -> bytes:
    """The body of a frame of the handshake."""
    header, body = _receive(stream, deadline)
    if header.kind == FrameKind.ERROR:
        raise error_of(body)
    if header.kind != kind:
        raise ProtocolError(f"expected a frame {kind.name}, found one of kind {header.kind}")
    return body


def _receive(stream: TcpStream, deadline: float) -> tuple[FrameHeader, bytes]:
    header = FrameHeader.unpack(stream.recv(HEADER.size, deadline))
    return header, stream.recv(header.body_bytes, deadline)


def _reachable(host: str) -> str:
    """The address at which peers reach a server that listens on `host`."""
    if host not in EVERYWHERE:
        return host
    somewhere = "2001:db8::1" if ":" in host else "192.0.2.1"  # for documentation; no host has it
    with contextlib.suppress(OSError):
        return source_address(somewhere, 9)
    return "::1" if ":" in host else LOCALHOST
