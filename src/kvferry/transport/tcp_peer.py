"""What a tcp carrier keeps for a peer: idle connections, threads, and a transfer's own streams."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from kvferry.errors import Cancelled
from kvferry.transport.jobs import CANCEL_SECONDS, Job, Workers
from kvferry.transport.memory import Memory
from kvferry.transport.regions import Arrays, RegionTable
from kvferry.transport.tcp_client import Connection, TcpEndpoint

CONNECT_SECONDS = 10.0  # for the connections after a peer's first, which has the caller's deadline
TRANSFERS_PER_PEER = 4  # at a time


@dataclass(frozen=True, slots=True)
class Own:
    """What this side brings to every connection."""

    incarnation: bytes
    stall_seconds: float
    streams_per_transfer: int


class TcpPeer:
    """A server that this carrier is connected to, and the connections that are not in use."""

    def __init__(self, own: Own, endpoint: TcpEndpoint, secret: bytes) -> None:
        self.endpoint = endpoint
        self.regions = RegionTable.of([])
        self._own, self._secret = own, secret
        self._idle: list[Connection] = []
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
            self._own.incarnation,
            deadline,
            self._own.stall_seconds,
        )


class Streams:
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
