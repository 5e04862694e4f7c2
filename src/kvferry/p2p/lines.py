"""A line: the connection of a `Caller` to one address, and what became of it.

    opened --somebody takes the connection--> connected --the secret is right--> greeted
      |                                          '--it breaks, or is none of ours--> over
      '--nobody listens, or its time to connect is over--> the next address of its name; over,
                                                           where there is no other

An address that refuses says so at once. One that drops what it is sent says nothing, and the system
would try for minutes; so where a name has other addresses, it gets a part of the time of the calls
that wait. Nothing was said on a line that is not connected: its calls can be said again elsewhere.
The last address has all the time that is left, and so has one that is connected: who is overloaded
may take seconds to greet.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvferry.errors import AuthenticationError, KvferryError, PeerLost
from kvferry.wire.sockets import Sockets

CONNECT_SECONDS = 2.0  # for an address that has others after it: a lost packet is sent again
LEAST_CONNECT_SECONDS = 0.2  # one call in haste does not keep others from an address far away
HEARTBEAT_MS = (
    10_000  # silent for three of these: its host is lost (a dead process is noticed at once)
)
MONITORED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
)


@dataclass(slots=True, eq=False)
class Line:
    """For its caller's thread alone."""

    address: str  # as it was called, by a name or not
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    others: list[str]  # that its name also stands for, to try if this one is not reached
    unsaid: dict[int, bytes] = field(default_factory=dict)  # sent before there was anyone
    connect_by: float = math.inf  # or else the others are tried
    connected: bool = False
    greeted: bool = False  # whether its handshake ever succeeded

    @classmethod
    def open(cls, sockets: Sockets, address: str, found: list[str]) -> Line:
        """To the first of these addresses; connecting goes on in the background."""
        monitors: list[zmq.Socket[bytes]] = []

        def prepare(socket: zmq.Socket[bytes]) -> None:
            socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
            monitors.append(socket.get_monitor_socket(MONITORED))

        try:
            socket = sockets.client(found[0], prepare)
        except BaseException:
            for monitor in monitors:
                monitor.close(linger=0)
            raise
        return cls(address, socket, monitors[0], found[1:])

    def send(self, number: int, frame: bytes, deadline: float) -> None:
        """Send a call, or have it wait for the connection; `deadline` is the call's."""
        self.socket.send(frame, zmq.NOBLOCK)
        if not self.others or self.greeted:
            return
        self.unsaid[number] = frame
        if not self.connected:
            now = time.monotonic()
            share = min(CONNECT_SECONDS, (deadline - now) / (len(self.others) + 1))
            self.connect_by = min(self.connect_by, now + max(LEAST_CONNECT_SECONDS, share))

    def not_reached(self, now: float) -> bool:
        """Whether its time to connect is over; not while there is news of it, to be heard first."""
        return self.connect_by <= now and not self.monitor.poll(0)

    def hear(self) -> KvferryError | None:
        """Take in what became of it; why it is over, where it is."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_CONNECTED:
                self.connected, self.connect_by = True, math.inf
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.greeted = True
                self.unsaid.clear()
            elif self.greeted:
                return PeerLost(f"the connection to {self.address} broke")
            elif event == zmq.EVENT_CONNECT_RETRIED:
                return PeerLost(f"nobody listens at {self.address}")
            else:
                return AuthenticationError(
                    f"{self.address} does not take our secret (or is no kvferry); configure the "
                    "same secret on both engines. Without one, both must run as the same user on "
                    "one host, and in containers share /dev/shm"
                )
        return None

    def close(self) -> None:
        self.socket.disable_monitor()
        self.socket.close(linger=0)
        self.monitor.close(linger=0)
