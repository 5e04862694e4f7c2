"""Who waits at a server's door: connections on which no request has come yet.

Whoever reaches the port can open connections, say nothing, and use up the process's descriptors;
libzmq drops them only after its handshake's time, and has no limit of its own. So the server sees
every connection that is accepted, and where more than a share of the descriptors wait, it shuts the
oldest down. A peer that knows the secret needs milliseconds to be greeted and then asks at once;
from its first request on it does not wait any more, and is never shut down from here.
"""

from __future__ import annotations

import resource
import socket as sockets
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

MOST_WAITING = 256  # connections; more than engines that start at the same moment
SHARE_OF_DESCRIPTORS = 8  # one of so many parts, where that is less: engines need the others


def most_waiting() -> int:
    """By the limit that the process has now: engines raise it when they start."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    part = MOST_WAITING if limit == resource.RLIM_INFINITY else limit // SHARE_OF_DESCRIPTORS
    return max(8, min(MOST_WAITING, part))


class Door:
    """For the thread of its server alone."""

    def __init__(self, socket: zmq.Socket[bytes], port: int) -> None:
        self._socket, self._port = socket, port
        self._waiting: OrderedDict[int, Any] = OrderedDict()  # peers by descriptor, oldest first
        address = f"inproc://door-{id(self)}"
        socket.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.events = socket.context.socket(zmq.PAIR)
        self.events.setsockopt(zmq.RCVHWM, 0)  # libzmq's thread must not wait for this one
        self.events.connect(address)

    def receive(self) -> list[bytes]:
        """A message that is there; its sender waits no more."""
        if not self._waiting:
            return self._socket.recv_multipart()
        first, *more = self._socket.recv_multipart(copy=False)
        with suppress(zmq.ZMQError):
            self._waiting.pop(first.get(zmq.SRCFD), None)
        return [first.bytes, *(frame.bytes for frame in more)]

    def look(self) -> int:
        """Take in who came and went; how many were shut down because too many wait."""
        while self.events.poll(0):
            event = recv_monitor_message(self.events)
            descriptor = event["value"]
            self._waiting.pop(descriptor, None)
            if event["event"] == zmq.EVENT_ACCEPTED:
                peer = self._peer(descriptor)
                if peer is not None:
                    self._waiting[descriptor] = peer
        shut = 0
        most = most_waiting()
        while len(self._waiting) > most:
            descriptor, peer = self._waiting.popitem(last=False)
            shut += self._shut(descriptor, peer)
        return shut

    def close(self) -> None:
        with suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self.events.close(linger=0)

    def _peer(self, descriptor: int, expected: Any = None) -> Any:
        """Who is at the other end; None where it is no connection of this server any more.

        The descriptor is libzmq's, which may have closed it by now: it is only looked at, and shut
        down only if it is the connection that was accepted.
        """
        try:
            borrowed = sockets.socket(sockets.AF_INET6, sockets.SOCK_STREAM, 0, descriptor)
        except OSError:
            return None
        try:
            if borrowed.getsockname()[1] != self._port:
                return None
            peer = borrowed.getpeername()
            if expected is not None and peer == expected:
                borrowed.shutdown(sockets.SHUT_RDWR)
            return peer
        except OSError:
            return None
        finally:
            borrowed.detach()

    def _shut(self, descriptor: int, peer: Any) -> bool:
        return bool(self._peer(descriptor, peer) == peer)
