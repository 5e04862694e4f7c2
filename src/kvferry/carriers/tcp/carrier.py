# SPDX-License-Identifier: Apache-2.0
"""The carrier between any two hosts: one-sided reads and writes over TCP.

The owner of memory runs a `TcpServer` (server.py), to which readers and writers connect
(client.py). Frames, their authentication, and how an end moves a frame's bytes are in frames.py. A
transfer has connections of its own, from a small pool per peer. So a transfer is cancelled by
closing them, and transfers do not wait for each other. A batch is cut into frames that the server's
limits allow. A few connections share the frames: one asks, gathers or scatters while another one's
bytes are on their way. A frame to be read is asked for while the frame before it arrives.

    cancelled read    nothing is received any more once `cancel` returns
    cancelled write   this side stops sending and waits until the server has closed: then all that
                      was on the way has either been applied or is gone
    failed            on one connection: the other one is ended the same way
    grant closed      the owner closes the connections that write under it, and no others

Without a secret, peers must be of this user (net/keys.py), and the carrier listens on loopback
only. A peer may write only granted ranges, unless the owner makes all of its memory `writable`.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence

import msgspec

from kvferry.carriers.base import (
    GrantingCarrier,
    Memory,
    MemoryRegion,
    RegionTable,
    Transfer,
    is_staged,
    require_all,
    slices,
)
from kvferry.carriers.host import HostMemory
from kvferry.carriers.tcp.client import Own, Streams, TcpEndpoint, TcpPeer
from kvferry.carriers.tcp.frames import INCARNATION_BYTES, MAX_PAYLOAD_BYTES, MAX_REGIONS
from kvferry.carriers.tcp.server import ServerLimits, TcpServer
from kvferry.carriers.transfer import CANCEL_SECONDS, Job, share
from kvferry.copies import Copies, Ints
from kvferry.errors import Cancelled, TransferError
from kvferry.net.keys import Key
from kvferry.net.names import Admits, Reach, source_address
from kvferry.units import require_port

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


class TcpCarrier(GrantingCarrier):
    """`host` and `port`: where to listen. `advertise`: the host that peers dial.

    `memory` is needed where the memory to be registered is not a host's (`StagedMemory`).
    `writable` lets peers write anything here without a grant. `admits` says which hosts may be
    dialed, of those that endpoints name.
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
            host = EVERYWHERE[0] if key.configured else LOOPBACK
        self._reach.require_listening(host)
        self._host, self._port, self._advertise = host, require_port(port), advertise
        self.limits = limits or ServerLimits()
        self.incarnation = secrets.token_bytes(INCARNATION_BYTES)
        usual = STREAMS_PER_TRANSFER
        if memory is not None and is_staged(memory):
            usual = STAGED_STREAMS_PER_TRANSFER
        self._own = Own(
            key.derive("tcp"),
            self.incarnation,
            self.limits.stall_seconds,
            streams_per_transfer or usual,
        )
        self._server = TcpServer(self._own.key, self.incarnation, self.limits, writable=writable)
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
        """Requests that the server has served and refused, by kind."""
        return self._server.counters

    @property
    def serving(self) -> int:
        """Connections that others have to this carrier's memory."""
        return self._server.serving

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
                        (self._host, self._port), family=family, backlog=1024
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

    def connect(self, endpoint: bytes, deadline: float) -> TcpPeer:
        found = TcpEndpoint.decode(endpoint)
        self._reach.require(found.host)
        peer = TcpPeer(self._own, found)
        peer.connect(deadline)
        with self._lock:
            if not self._closed:
                self._peers.append(peer)
                return peer
        peer.close()
        raise Cancelled("the carrier was closed")

    def read(self, peer: TcpPeer, copies: Copies) -> Transfer:
        return self._submit(peer, copies, reading=True)

    def write(self, peer: TcpPeer, copies: Copies) -> Transfer:
        return self._submit(peer, copies, reading=False)

    def write_granted(self, peer: TcpPeer, copies: Copies, grant: bytes) -> Transfer:
        return self._submit(peer, copies, reading=False, grant=grant)

    def _submit(
        self, peer: TcpPeer, copies: Copies, *, reading: bool, grant: bytes = b""
    ) -> Transfer:
        def work(job: Job) -> None:
            arrays, ours = Copies.of(copies), self._server.regions
            src, dst = (peer.regions, ours) if reading else (ours, peer.regions)
            require_all(arrays, src, dst, reading=reading)
            total = sum(int(part.length.sum()) for part in arrays.windows())
            if total == 0:
                return
            memory = self._server.memory
            frame = min(max(total // FRAMES_PER_TRANSFER, LEAST_FRAME_BYTES), MAX_PAYLOAD_BYTES)
            streams = Streams(peer, job, reading=reading, grant=grant)
            try:
                with job.woken_by(streams.end):
                    share(
                        job,
                        slices(arrays, frame),
                        lambda part, following: streams.carry(memory, part, following),
                        peer.helpers,
                        self._own.streams_per_transfer - 1,
                        ahead=reading,
                    )
            finally:
                streams.give_back()

        return peer.workers.submit(Job(work, "a tcp read" if reading else "a tcp write"))

    def open_grant(self, address: Ints, length: Ints) -> bytes:
        self._server.regions.require("this carrier", address, length)
        return self._server.grants.open(RegionTable.of_arrays(address, length))

    def close_grant(self, grant: bytes, seconds: float) -> int:
        return self._server.grants.close(grant, seconds)

    @property
    def open_grants(self) -> int:
        return len(self._server.grants)

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


def _reachable(host: str) -> str:
    """The address under which peers find a server that listens everywhere."""
    if host not in EVERYWHERE:
        return host
    somewhere = "2001:db8::1" if ":" in host else "192.0.2.1"  # for documentation: no host has it
    with contextlib.suppress(OSError):
        return source_address(somewhere, 9)
    return "::1" if ":" in host else LOOPBACK
