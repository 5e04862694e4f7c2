"""The carrier between any two hosts: one-sided reads and writes over TCP.

The owner of memory runs a `Server` (tcp_server.py); who reads or writes connects to it
(tcp_client.py). Frames and their authentication are in tcp_frames.py; how an end moves a frame's
bytes, direct or packed, in tcp_payload.py. A transfer has connections of its own, from a small
pool per peer, so that cancelling it is closing them, and transfers do not wait for each other. A
batch is cut into frames that the server's limits allow; a few connections share them, so that one
asks, gathers or scatters while another one's bytes are on their way. A frame to be read is asked
for while the one before it arrives.

    cancelled read    nothing is received any more once `cancel` returns
    cancelled write   this side stops sending and waits until the server has closed: then all that
                      was on the way has either been applied or is gone
    failed            on one connection: the other one is ended the same way
    revoked           the owner closes all connections of a peer, and lets it in no more
    grant closed      the owner closes the connections that write under it, and no others

Without a secret, it listens on loopback only, unless a host was configured.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence

import msgspec

from kvferry.errors import Cancelled, TransferError
from kvferry.transport.base import CopyArrays, Ints, MemoryRegion, Transfer
from kvferry.transport.cost import Choice, Costs, Packing
from kvferry.transport.host import HostMemory
from kvferry.transport.jobs import CANCEL_SECONDS, Job, Workers, share
from kvferry.transport.memory import Memory, is_staged
from kvferry.transport.regions import Arrays, RegionTable, require_all, slices
from kvferry.transport.tcp_client import MAX_REGIONS, Connection, TcpEndpoint
from kvferry.transport.tcp_frames import INCARNATION_BYTES, MAX_PAYLOAD_BYTES
from kvferry.transport.tcp_server import Server, ServerLimits

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0  # for the connections after a peer's first, which has the caller's deadline
TRANSFERS_PER_PEER = 4  # at a time
STREAMS_PER_TRANSFER = 2
# Memory that is staged is gathered, crosses the bus and is sent one after another: while some
# connections are at one of these, others are at the next (H200: 14 GB/s by four, 8 by two).
STAGED_STREAMS_PER_TRANSFER = 4
# A small frame costs a round trip that nothing hides, a large one leaves the other connection
# without work. So a transfer has about this many frames, within these bounds.
FRAMES_PER_TRANSFER = 8
LEAST_FRAME_BYTES = 4 << 20
LOOPBACK = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")


class TcpPeer:
    """A server that this carrier is connected to, and the connections that are not in use."""

    def __init__(self, carrier: TcpCarrier, endpoint: TcpEndpoint, secret: bytes) -> None:
        self.endpoint = endpoint
        self.regions = RegionTable.of([])
        self._carrier, self._secret = carrier, secret
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._closed = False
        self.workers = Workers("kvferry-tcp", TRANSFERS_PER_PEER)
        self.helpers = Workers(
            "kvferry-tcp-help", TRANSFERS_PER_PEER * (carrier.streams_per_transfer - 1)
        )

    def connect(self, deadline: float) -> None:
        connection = self._open(deadline)
        self.regions = connection.regions
        self.put(connection)

    def take(self) -> Connection:
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

    def put(self, connection: Connection, *, keep: bool = True) -> None:
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

    def _open(self, deadline: float) -> Connection:
        return Connection.open(
            self.endpoint,
            self._secret,
            self._carrier.incarnation,
            deadline,
            self._carrier.limits.stall_seconds,
            self._carrier.choice,
        )


class _Streams:
    """The connections that one transfer uses: one for each thread that works on it."""

    def __init__(self, peer: TcpPeer, job: Job, *, reading: bool, grant: bytes) -> None:
        self._peer, self._job, self._reading, self._grant = peer, job, reading, grant
        self._mine: dict[int, Connection] = {}  # by thread
        self._failed: list[Exception] = []
        self._ended: set[Connection] = set()

    def carry(self, memory: Memory, part: Arrays, following: Arrays | None) -> None:
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
            raise self._failed[0] from None  # what came after is its consequence

    def end(self, but: int | None = None) -> None:
        """From any thread: end what is under way. What a peer applies, it still confirms."""
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
                # what was sent may still be on its way into the peer's memory: see it end
                self._job.late_bytes |= not connection.stream.drain(CANCEL_SECONDS)
            self._peer.put(connection, keep=not ended)

    def _take(self) -> Connection:
        connection = self._peer.take()
        self._mine[threading.get_ident()] = connection
        self._job.checkpoint()  # after it can be ended: a cancel comes either before or after
        if self._failed:
            raise self._failed[0]
        return connection


class TcpCarrier:
    """`host` and `port` say where to listen, `advertise` what peers dial. See the module's text.

    `memory` is what gathers and scatters for packed mode, where the memory to be registered is not
    plain host memory; `packing` forces a mode on this end, for what it reads, writes and serves.
    """

    name = "tcp"
    can_revoke = True

    def __init__(
        self,
        *,
        secret: bytes | str | None = None,
        host: str | None = None,
        port: int = 0,
        advertise: str | None = None,
        limits: ServerLimits | None = None,
        memory: Memory | None = None,
        packing: Packing = "auto",
        costs: Costs | None = None,
        streams_per_transfer: int | None = None,
    ) -> None:
        self._secret = secret.encode() if isinstance(secret, str) else secret or b""
        if host is None:
            host = EVERYWHERE[0] if self._secret else LOOPBACK
        elif not self._secret and not _is_loopback(host):
            log.warning(
                "the tcp carrier listens on %s without a shared secret: whoever reaches this "
                "address can read and write the caches registered here",
                host,
            )
        self._host, self._port, self._advertise = host, port, advertise
        self.limits = limits or ServerLimits()
        self.incarnation = secrets.token_bytes(INCARNATION_BYTES)
        self.choice = Choice("tcp", packing, costs)
        usual = STREAMS_PER_TRANSFER
        if memory is not None and is_staged(memory):
            usual = STAGED_STREAMS_PER_TRANSFER
        self.streams_per_transfer = streams_per_transfer or usual
        self._server = Server(self._secret, self.incarnation, self.limits, self.choice)
        self._memory = memory
        if memory is not None:
            self._server.memory = memory
        self._regions: list[MemoryRegion] = []
        self._lock = threading.Lock()
        self._endpoint: bytes | None = None
        self._peers: list[TcpPeer] = []
        self._closed = False

    @property
    def counters(self) -> Mapping[str, int]:
        """What the server has served and refused, by kind."""
        return self._server.counters

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        table = RegionTable.of([*self._regions, *regions])
        if len(table) > MAX_REGIONS:
            raise TransferError(
                f"{len(table)} separate regions; the tcp carrier takes at most {MAX_REGIONS}"
            )
        self._regions += regions
        if self._memory is None:
            self._server.memory = HostMemory(self._regions)
        self._server.regions = table

    def endpoint(self) -> bytes:
        """Listens from the first call on."""
        with self._lock:
            if self._closed:
                raise TransferError("the carrier is closed")
            if self._endpoint is None:
                family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
                try:
                    listener = socket.create_server(
                        (self._host, self._port), family=family, backlog=128
                    )
                except OSError as error:
                    raise TransferError(
                        f"cannot listen on {self._host}:{self._port}: {error}"
                    ) from None
                port = listener.getsockname()[1]
                self._server.listen(listener)
                host = self._advertise or _reachable(self._host)
                self._endpoint = msgspec.msgpack.encode(
                    TcpEndpoint("tcp", host, port, self.incarnation)
                )
            return self._endpoint

    def connect(self, endpoint: bytes, deadline: float, *, secret: bytes | None = None) -> TcpPeer:
        """`secret`: the peer's, where it differs from this carrier's own."""
        peer = TcpPeer(
            self, TcpEndpoint.decode(endpoint), self._secret if secret is None else secret
        )
        peer.connect(deadline)
        with self._lock:
            if not self._closed:
                self._peers.append(peer)
                return peer
        peer.close()
        raise Cancelled("the carrier was closed")

    def read(self, peer: TcpPeer, copies: CopyArrays) -> Transfer:
        return self._submit(peer, copies, reading=True)

    def write(self, peer: TcpPeer, copies: CopyArrays) -> Transfer:
        return self._submit(peer, copies, reading=False)

    def write_granted(self, peer: TcpPeer, copies: CopyArrays, grant: bytes) -> Transfer:
        return self._submit(peer, copies, reading=False, grant=grant)

    def _submit(
        self, peer: TcpPeer, copies: CopyArrays, *, reading: bool, grant: bytes = b""
    ) -> Transfer:
        def work(job: Job) -> None:
            arrays = self._require(peer, copies, reading=reading)
            total = sum(int(part.length.sum()) for part in arrays.windows())
            if total == 0:
                return
            memory = self._server.memory
            frame = min(max(total // FRAMES_PER_TRANSFER, LEAST_FRAME_BYTES), MAX_PAYLOAD_BYTES)
            streams = _Streams(peer, job, reading=reading, grant=grant)
            try:
                with job.woken_by(streams.end):
                    share(
                        job,
                        slices(arrays, frame),
                        lambda part, following: streams.carry(memory, part, following),
                        peer.helpers,
                        self.streams_per_transfer - 1,
                        ahead=reading,
                    )
            finally:
                streams.give_back()

        return peer.workers.submit(Job(work, "a tcp read" if reading else "a tcp write"))

    def revoke(self, endpoint: bytes, seconds: float = CANCEL_SECONDS) -> None:
        """Stop the carrier with this endpoint from reaching memory here, now and later.

        When it returns, no byte of that peer arrives any more. `DeadlineExceeded` if a connection
        does not end in time.
        """
        self._server.revoke(TcpEndpoint.decode(endpoint).incarnation, seconds)

    def open_grant(self, address: Ints, length: Ints) -> bytes:
        self._server.regions.require("this carrier", address, length)
        return self._server.grants.open(RegionTable.of_arrays(address, length))

    def close_grant(self, grant: bytes, seconds: float) -> int:
        return self._server.grants.close(grant, seconds)

    @property
    def open_grants(self) -> int:
        return len(self._server.grants)

    def require_grants(self) -> None:
        self._server.granted_only = True

    def readmit(self, endpoint: bytes) -> None:
        self._server.readmit(TcpEndpoint.decode(endpoint).incarnation)

    def disconnect(self, peer: TcpPeer) -> None:
        with self._lock:
            if peer in self._peers:
                self._peers.remove(peer)
        peer.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            peers, self._peers = self._peers, []
        for peer in peers:
            peer.close()
        self._server.close(CANCEL_SECONDS)

    def _require(self, peer: TcpPeer, copies: CopyArrays, *, reading: bool) -> Arrays:
        """The copies, checked."""
        arrays = Arrays.of(copies)
        ours = self._server.regions
        src, dst = (peer.regions, ours) if reading else (ours, peer.regions)
        require_all(arrays, src, dst, reading=reading)
        return arrays


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _reachable(host: str) -> str:
    """The address under which peers find a server that listens everywhere."""
    if host not in EVERYWHERE:
        return host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    somewhere = "2001:db8::1" if ":" in host else "192.0.2.1"  # documentation: nothing is sent
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((somewhere, 9))
        found: str = probe.getsockname()[0]
        return found
    return LOOPBACK if family == socket.AF_INET else "::1"
