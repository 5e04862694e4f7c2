"""The tcp carrier's asking end: one authenticated connection to a server."""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from typing import Annotated

import msgspec

from kvferry.errors import (
    AuthenticationError,
    DeadlineExceeded,
    PeerLost,
    ProtocolError,
    TransferError,
)
from kvferry.transport.base import Ints, MemoryRegion
from kvferry.transport.iovec import joined
from kvferry.transport.memory import Memory
from kvferry.transport.regions import Arrays, RegionTable
from kvferry.transport.tcp_frames import (
    HEADER,
    HELLO_BYTES,
    INCARNATION_BYTES,
    MAC_BYTES,
    MAX_BODY_BYTES,
    NONCE_BYTES,
    ROW_BYTES,
    Header,
    Kind,
    Session,
    error_of,
    table_bytes,
    table_of,
)
from kvferry.transport.tcp_payload import receive_runs, send_runs
from kvferry.transport.tcp_stream import Stream
from kvferry.wire.names import dial

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


class Connection:
    """Used by one transfer at a time. After an error that `in_step` does not know, close it."""

    def __init__(self, stream: Stream, regions: RegionTable) -> None:
        self.stream, self.regions = stream, regions
        self.in_step = True  # both sides agree on what comes next, and nothing is asked for
        self._request = 0  # the newest
        self._ahead: Arrays | None = None  # what that one is for, where it was sent before its turn
        self._unsent: bytes | memoryview = b""  # of it
        self._used = time.monotonic()

    @classmethod
    def open(
        cls,
        endpoint: TcpEndpoint,
        secret: bytes,
        incarnation: bytes,
        deadline: float,
        stall_seconds: float,
    ) -> Connection:
        stream = Stream(_dial(endpoint, deadline), stall_seconds)
        try:
            regions = _shake_hands(stream, endpoint, secret, incarnation, deadline)
        except BaseException:
            stream.close()
            raise
        return cls(stream, regions)

    def usable(self) -> bool:
        """Whether the next transfer may have it. One that became readable while idle has ended."""
        return time.monotonic() - self._used < IDLE_SECONDS and not self.stream.wait_readable(0)

    def read(self, memory: Memory, copies: Arrays, following: Arrays | None = None) -> None:
        """`following` is what is read next: asked for before these bytes have come, so that the
        peer goes on with it at once."""
        if self._ahead is not copies:
            self.stream.send(self._question(Kind.READ, copies.src, copies.length))
        self._ahead = None
        here, length = joined(copies.dst, copies.length)  # while the request travels
        self._expect(Kind.DATA, int(length.sum()))
        self.in_step = False
        if following is not None:
            # The peer reads nothing while it sends: what does not fit into the sockets waits here.
            question = self._question(Kind.READ, following.src, following.length)
            self._unsent = self.stream.send_some(question)
            self._ahead = following
        receive_runs(self.stream, memory, here, length)
        self.stream.send(self._unsent)
        self._unsent = b""
        self._done()

    def write(self, memory: Memory, copies: Arrays, grant: bytes = b"") -> None:
        kind = Kind.GRANTED if grant else Kind.WRITE
        self.stream.send(self._question(kind, copies.dst, copies.length, grant))
        here, length = joined(copies.src, copies.length)
        self._expect(Kind.GO, 0)
        self.in_step = False
        send_runs(self.stream, memory, here, length)
        self._expect(Kind.APPLIED, 0)
        self._done()

    def _question(self, kind: Kind, address: Ints, length: Ints, grant: bytes = b"") -> bytes:
        there, lengths = joined(address, length)
        body = grant + table_bytes(there, lengths)
        self._request += 1
        self.in_step = False
        return Header(kind, self._request, len(body), int(lengths.sum())).pack() + body

    def _expect(self, kind: Kind, payload_bytes: int) -> None:
        header, body = _frame(self.stream, time.monotonic() + self.stream.stall_seconds)
        if header.kind == Kind.ERROR:
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


def _frame(stream: Stream, deadline: float) -> tuple[Header, bytes]:
    header = Header.unpack(stream.recv(HEADER.size, deadline))
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
    stream: Stream, endpoint: TcpEndpoint, secret: bytes, incarnation: bytes, deadline: float
) -> RegionTable:
    """Prove the secret, see it proven, and learn what is registered over there."""
    header, hello = _frame(stream, deadline)
    if header.kind == Kind.ERROR:
        raise error_of(hello)
    if header.kind != Kind.HELLO or len(hello) != HELLO_BYTES:
        raise ProtocolError(f"expected a greeting, found a frame of kind {header.kind}")
    if hello[NONCE_BYTES:] != endpoint.incarnation:
        raise PeerLost(
            f"another carrier listens at {endpoint.host}:{endpoint.port} now: the peer restarted. "
            "Ask for its new endpoint"
        )
    nonce = secrets.token_bytes(NONCE_BYTES)
    session = Session(hello[:NONCE_BYTES], nonce, endpoint.incarnation, incarnation)
    auth = nonce + incarnation + session.client_mac(secret)
    stream.send(Header(Kind.AUTH, 0, len(auth)).pack() + auth, deadline)
    header, welcome = _frame(stream, deadline)
    if header.kind == Kind.ERROR:
        raise error_of(welcome)
    mac, table = welcome[:MAC_BYTES], welcome[MAC_BYTES:]
    if header.kind != Kind.WELCOME or len(welcome) < MAC_BYTES or len(table) % ROW_BYTES:
        raise ProtocolError(f"expected a welcome, found a frame of kind {header.kind}")
    if not hmac.compare_digest(mac, session.server_mac(secret, table)):
        raise AuthenticationError(
            f"{endpoint.host}:{endpoint.port} does not know the shared secret; nothing was sent"
        )
    pairs = zip(*(a.tolist() for a in table_of(table)), strict=True)
    return RegionTable.of([MemoryRegion(address, length) for address, length in pairs])


MAX_REGIONS = (MAX_BODY_BYTES - MAC_BYTES) // ROW_BYTES  # what one welcome can name
