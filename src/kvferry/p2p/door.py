"""A server's connections, as the system sees them: those that libzmq itself does not limit.

Whoever reaches the port can open connections, say nothing, and use up the process's descriptors;
libzmq drops them only after its handshake's time. So where more connections than a share of the
descriptors *wait*, the oldest are shut down. A peer that knows the secret is greeted within
milliseconds and then asks at once; from its first request on it does not wait any more.

A message of many frames is kept by libzmq until its last one, however many there are, and only
finished messages count for its limits. So what a connection has received is compared with what the
server's thread got of it, now and then, and where too much lies between, it is shut down, too.
"""

from __future__ import annotations

import resource
import socket as sockets
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

MOST_WAITING = 256  # connections; more than engines that start at the same moment
SHARE_OF_DESCRIPTORS = 8  # one of so many parts, where that is less: engines need the others
UNREAD_BYTES = 64 << 20  # of one connection: 48 requests of 1 MiB that are read ahead, and buffers
ALL_UNREAD_BYTES = 512 << 20  # of all connections
MOST_FRAMES = 8  # kept of a message; ours have two
MOST_EVENTS = 256  # taken in before requests are looked at again
LOOK_SECONDS = 0.25  # between two looks at what is unread
FRAME_BYTES = 96  # of one frame on the wire, beside its content: more than ZMTP and CURVE add
RECEIVED_AT = 128  # offset of tcpi_bytes_received in Linux's tcp_info
FAILED = (  # handshakes
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def most_waiting() -> int:
    """By the limit that the process has now: engines raise it when they start."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    part = MOST_WAITING if limit == resource.RLIM_INFINITY else limit // SHARE_OF_DESCRIPTORS
    return max(8, min(MOST_WAITING, part))


@dataclass(slots=True)
class _Guest:
    peer: Any  # address, by which a descriptor that was used again is noticed
    taken_bytes: int = 0


class Door:
    """For the thread of its server alone."""

    def __init__(self, socket: zmq.Socket[bytes], port: int) -> None:
        self._socket, self._port = socket, port
        self._guests: dict[int, _Guest] = {}  # by descriptor
        self._waiting: OrderedDict[int, None] = OrderedDict()  # those of them, oldest first
        self._next_look = time.monotonic()
        self.strangers = 0  # whose handshake failed
        address = f"inproc://door-{id(self)}"
        socket.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | FAILED)
        self.events = socket.context.socket(zmq.PAIR)
        self.events.setsockopt(zmq.RCVHWM, 0)  # libzmq's thread must not wait for this one
        self.events.connect(address)

    def receive(self) -> list[bytes]:
        """A message that is there; its sender waits no more."""
        sender = self._socket.recv(copy=False)
        try:
            descriptor = sender.get(zmq.SRCFD)
        except zmq.ZMQError:
            descriptor = -1
        guest = self._guests.get(descriptor)
        frames = [sender.bytes]
        while self._socket.getsockopt(zmq.RCVMORE):
            frame = self._socket.recv()
            if len(frames) < MOST_FRAMES:
                frames.append(frame)
            elif guest is not None and descriptor in self._guests:
                self._shut(descriptor)  # no message of ours has as many
        if guest is not None:
            self._waiting.pop(descriptor, None)
            guest.taken_bytes += sum(map(len, frames[1:])) + FRAME_BYTES * len(frames)
        return frames

    def look(self) -> int:
        """Take in who came and went; how many were shut down because too many wait."""
        for _ in range(MOST_EVENTS):
            if not self.events.poll(0):
                break
            event = recv_monitor_message(self.events)
            if event["event"] & FAILED:
                self.strangers += 1
                continue
            descriptor = event["value"]
            self._forget(descriptor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                with suppress(OSError), _Borrowed(descriptor) as connection:
                    self._guests[descriptor] = _Guest(connection.getpeername())
                    self._waiting[descriptor] = None
        too_many = list(self._waiting)[: max(0, len(self._waiting) - most_waiting())]
        return sum(self._shut(descriptor) for descriptor in too_many)

    def look_at_unread(self) -> int:
        """How many were shut down because too much of what they sent is in no request."""
        now = time.monotonic()
        if now < self._next_look:
            return 0
        self._next_look = now + LOOK_SECONDS
        unread = sorted(((self._unread(d), d) for d in self._guests), reverse=True)
        total, shut = sum(count for count, _ in unread), 0
        for count, descriptor in unread:
            if count <= UNREAD_BYTES and total <= ALL_UNREAD_BYTES:
                break
            total -= count
            shut += self._shut(descriptor)
        return shut

    def close(self) -> None:
        with suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self.events.close(linger=0)

    def _unread(self, descriptor: int) -> int:
        guest = self._guests[descriptor]
        with suppress(OSError), _Borrowed(descriptor) as connection:
            told = connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, RECEIVED_AT + 8)
            received = int.from_bytes(told[RECEIVED_AT:], "little")
            guest.taken_bytes = min(guest.taken_bytes, received)  # frames were counted generously
            return received - guest.taken_bytes
        return 0

    def _shut(self, descriptor: int) -> bool:
        """Only if it is still the connection that was accepted; libzmq closes it then."""
        guest = self._guests[descriptor]
        self._forget(descriptor)
        with suppress(OSError), _Borrowed(descriptor) as connection:
            if (connection.getsockname()[1], connection.getpeername()) == (self._port, guest.peer):
                connection.shutdown(sockets.SHUT_RDWR)
                return True
        return False

    def _forget(self, descriptor: int) -> None:
        self._guests.pop(descriptor, None)
        self._waiting.pop(descriptor, None)


class _Borrowed:
    """A descriptor of libzmq's as a socket, for a moment; it needs no descriptor of its own."""

    def __init__(self, descriptor: int) -> None:
        self._socket = sockets.socket(sockets.AF_INET6, sockets.SOCK_STREAM, 0, descriptor)

    def __enter__(self) -> sockets.socket:
        return self._socket

    def __exit__(self, *_: object) -> None:
        self._socket.detach()
