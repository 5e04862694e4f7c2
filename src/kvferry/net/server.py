# SPDX-License-Identifier: Apache-2.0
"""A server: one thread that answers messages, and never stops because of one.

A subclass answers a request with a reply, or with None if it replies later. Other threads hand work
to the server's thread through `submit`. So all state belongs to this thread and needs no locks.

A peer may be faulty even if it has the key, so its costs are bounded (docs/protocol.md, "Limits").
Requests and other things that the server keeps for a peer are charged to a `Budget` first; without
room, the request is refused as `busy`. `ConnectionLimit` bounds what libzmq does not. Log lines
that a peer can cause are written once a minute (`complain`).
"""

from __future__ import annotations

import logging
import resource
import socket as sockets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvferry.errors import KvferryError, ProtocolError
from kvferry.net.messages import (
    Claim,
    Offer,
    Refused,
    Reply,
    ReplyBody,
    Request,
    decode_request,
    encode,
    read_id,
    refusal,
)
from kvferry.net.rpc import HEARTBEAT_MS, Sockets, SocketThread

log = logging.getLogger("kvferry")

MOST_FRAMES = 256  # requests to answer before the next check of deadlines
SHARED_BYTES = 16 << 10  # of a reply's body; a shorter one is faster copied than shared
COMPLAIN_SECONDS = 60.0  # between two log lines about the same thing
MOST_COMPLAINTS = 20  # log lines in that time, about all things
MOST_WAITING = 256  # connections without a request; more than engines that start at one moment
SHARE_OF_DESCRIPTORS = 8  # at most one in this many descriptors: the engine needs the others
UNREAD_BYTES = 64 << 20  # of one connection: 48 requests of 1 MiB that are read ahead, and buffers
ALL_UNREAD_BYTES = 512 << 20  # of all connections
MOST_WAITING_FRAMES = 8  # kept of a message; kvferry's messages have two
MOST_EVENTS = 256  # events to read before the next requests
LOOK_SECONDS = 0.25  # between two checks of unread bytes
FRAME_BYTES = 96  # of a frame on the wire, without its content: more than ZMTP and CURVE add
RECEIVED_AT = 128  # offset of tcpi_bytes_received in Linux's tcp_info
# Of the structs, tuples, list and heap entries around a kept message; measured with tracemalloc.
ENTRY_BYTES = 1024

FAILED = (  # handshakes
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

Packed = zmq.Frame  # an encoded reply, of which many peers share one copy


def pack(body: ReplyBody) -> Packed:
    return zmq.Frame(msgspec.msgpack.encode(body), copy=True)


class Server(SocketThread):
    """One ROUTER socket and the thread that owns it."""

    def __init__(self, sockets: Sockets, host: str | None, port: int, name: str) -> None:
        self._socket, self.port = sockets.server(host, port)
        super().__init__(name)
        self._door = ConnectionLimit(self._socket, self.port)
        self._complained: dict[str, float] = {}
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._door.events, zmq.POLLIN)

    # For subclasses

    def answer(self, sender: bytes, request: Request) -> ReplyBody | Packed | None:
        """The reply, or None to reply later."""
        raise ProtocolError("this server answers no requests")

    def tick(self, now: float) -> None:
        """End work whose deadline is over."""

    def reply(self, sender: bytes, request_id: int, body: ReplyBody | Packed) -> None:
        """Send a reply. If the peer does not take it, drop it."""
        if not isinstance(body, zmq.Frame):
            self._send([sender, encode(Reply(request_id, body))])
            return
        head = b"\x92" + msgspec.msgpack.encode(request_id)  # an array of two: id, body
        if len(body) < SHARED_BYTES:
            self._send([sender, head + body.bytes])
        else:  # two frames, which together are one MessagePack message
            self._send([sender, head, body])

    def complain(self, what: str, message: str, *values: object) -> None:
        """Log a warning that a peer can cause, at most once a minute about `what`, and at most
        `MOST_COMPLAINTS` about all things. Any thread may call it."""
        now = time.monotonic()
        recent = {k: when for k, when in self._complained.items() if now < when + COMPLAIN_SECONDS}
        if what in recent or len(recent) >= MOST_COMPLAINTS:
            self.counters["complaints not logged"] += 1
            return
        self._complained = {**recent, what: now}
        error = next((v for v in values if isinstance(v, Exception)), None)
        log.warning(message, *values, exc_info=error)

    def _send(self, frames: list[Any]) -> None:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.counters["unsent"] += 1
            log.debug("a reply could not be sent: %s", error)

    # The thread

    def _turn(self, ready: Mapping[object, int]) -> None:
        if self._door.events in ready:
            self._guarded(self._watch_door)
        self._guarded(self._watch_unread)
        if self._socket in ready:
            self._guarded(self._take_frames)
        self._guarded(self.tick, time.monotonic())

    def _failed(self, error: Exception) -> None:
        self.counters["internal errors"] += 1
        text = "kvferry's %s goes on after an error: %.200r"
        self.complain("error", text, self._thread.name, error)

    def _end(self) -> None:
        self._door.close()
        self._socket.close(linger=0)

    def _watch_door(self) -> None:
        strangers, silent = self._door.look()
        self._count_and_complain(
            strangers,
            "strangers",
            "%s refused a connection that does not have our key. Is it an engine with another "
            "secret or of another user, or one of vLLM's own connectors? Run kvferry's connector "
            "with the same secret on both sides",
        )
        self._count_and_complain(
            silent,
            "silent connections closed",
            "%s closes connections without a request, because there are more than "
            f"{most_waiting()}: does something scan its port, or use another secret?",
        )

    def _watch_unread(self) -> None:
        text = "%s closes connections whose requests never end; is a peer faulty?"
        self._count_and_complain(self._door.look_at_unread(), "flooding connections closed", text)

    def _count_and_complain(self, count: int, what: str, text: str) -> None:
        if count:
            self.counters[what] += count
            self.complain(what, text, self._thread.name)

    def _take_frames(self) -> None:
        for _ in range(MOST_FRAMES):
            if not self._socket.poll(0):
                return
            self._guarded(self._take, self._door.receive())

    def _take(self, frames: list[bytes]) -> None:
        self.counters["messages"] += 1
        if len(frames) != 2:
            self.counters["malformed"] += 1
            return
        sender, frame = frames
        try:
            request = decode_request(frame)
        except ProtocolError as error:
            self.counters["malformed"] += 1
            self.reply(sender, read_id(frame) or 0, refusal("malformed", error))
            return
        try:
            body = self.answer(sender, request)
        except KvferryError as error:
            body = refusal("malformed", error)
        except Exception as error:
            self.counters["internal errors"] += 1
            text = "kvferry's %s could not answer: %.200r"
            self.complain("answer", text, self._thread.name, error)
            body = refusal("malformed", f"this message could not be answered: {error!r}")
        if body is not None:
            if isinstance(body, Refused):
                self.counters[f"refused {body.reason}"] += 1
            self.reply(sender, request.id, body)


class ConnectionLimit:
    """Shuts down connections that libzmq does not limit. Only its server's thread uses it.

    A client without the key can open connections, send nothing, and use up the process's
    descriptors. So if too many connections wait for their first request, the oldest are shut down.

    libzmq keeps a message of many frames until the last frame comes, and its limits count complete
    messages only. So `look_at_unread` compares the bytes that each connection has received with the
    bytes that the server's thread got. If the difference is too large, it shuts the connection
    down. Heartbeats never reach the server's thread, so one in each interval counts as taken.
    """

    def __init__(self, socket: zmq.Socket[bytes], port: int) -> None:
        self._socket, self._port = socket, port
        self._guests: dict[int, _Guest] = {}  # by descriptor, the oldest first
        self._next_look = time.monotonic()
        address = f"inproc://door-{id(self)}"
        socket.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | FAILED)
        self.events = socket.context.socket(zmq.PAIR)
        self.events.setsockopt(zmq.RCVHWM, 0)  # libzmq's thread must not wait for this thread
        self.events.connect(address)

    def receive(self) -> list[bytes]:
        """Receive a message. From now on its connection does not count as waiting."""
        sender = self._socket.recv(copy=False)
        try:
            descriptor = sender.get(zmq.SRCFD)
        except zmq.ZMQError:
            descriptor = -1
        guest = self._guests.get(descriptor)
        frames = [sender.bytes]
        while self._socket.getsockopt(zmq.RCVMORE):
            frame = self._socket.recv()
            if len(frames) < MOST_WAITING_FRAMES:
                frames.append(frame)
            elif guest is not None and descriptor in self._guests:
                self._shut(descriptor)  # no message of kvferry has this many
        if guest is not None:
            guest.waits = False
            guest.taken_bytes += sum(map(len, frames[1:])) + FRAME_BYTES * len(frames)
        return frames

    def look(self) -> tuple[int, int]:
        """Read connection events: how many handshakes failed, and how many connections were shut
        down because too many wait."""
        strangers = 0
        for _ in range(MOST_EVENTS):
            if not self.events.poll(0):
                break
            event = recv_monitor_message(self.events)
            if event["event"] & FAILED:
                strangers += 1
                continue
            descriptor = event["value"]
            self._guests.pop(descriptor, None)
            if event["event"] == zmq.EVENT_ACCEPTED:
                with suppress(OSError), _borrowed(descriptor) as connection:
                    self._guests[descriptor] = _Guest(connection.getpeername())
        waiting = [descriptor for descriptor, guest in self._guests.items() if guest.waits]
        too_many = waiting[: max(0, len(waiting) - most_waiting())]
        return strangers, sum(self._shut(descriptor) for descriptor in too_many)

    def look_at_unread(self) -> int:
        """Shut down connections with too many unread bytes, and return how many there were."""
        now = time.monotonic()
        if now < self._next_look:
            return 0
        seconds, self._next_look = now - self._next_look + LOOK_SECONDS, now + LOOK_SECONDS
        beats = FRAME_BYTES * seconds * 1000 / HEARTBEAT_MS
        unread = sorted(((self._unread(d, beats), d) for d in self._guests), reverse=True)
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

    def _unread(self, descriptor: int, beats: float) -> float:
        """Bytes that were not taken. `beats`: those of heartbeats since the last look, at most."""
        guest = self._guests[descriptor]
        with suppress(OSError), _borrowed(descriptor) as connection:
            told = connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, RECEIVED_AT + 8)
            received = int.from_bytes(told[RECEIVED_AT:], "little")
            # both are upper bounds: FRAME_BYTES of a message, and the heartbeats
            guest.taken_bytes = min(guest.taken_bytes + beats, received)
            return received - guest.taken_bytes
        return 0

    def _shut(self, descriptor: int) -> bool:
        """Shut a connection down, if its descriptor is still its own; libzmq then closes it."""
        guest = self._guests.pop(descriptor)
        with suppress(OSError), _borrowed(descriptor) as connection:
            if (connection.getsockname()[1], connection.getpeername()) == (self._port, guest.peer):
                connection.shutdown(sockets.SHUT_RDWR)
                return True
        return False


def most_waiting() -> int:
    """How many connections may wait. The process's limit is read anew: engines raise it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    part = MOST_WAITING if limit == resource.RLIM_INFINITY else limit // SHARE_OF_DESCRIPTORS
    return max(8, min(MOST_WAITING, part))


@dataclass(slots=True, eq=False)
class Budget:
    """Bounds the bytes of all senders. One sender may take half. Any thread may use it."""

    limit_bytes: int
    used_bytes: int = 0
    _senders: dict[bytes, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, count: int, sender: bytes = b"") -> bool:
        """Charge this many bytes. If they are too many, charge nothing and return False."""
        with self._lock:
            mine = self._senders.get(sender, 0) + count
            if self.used_bytes + count > self.limit_bytes or mine > self.limit_bytes // 2:
                return False
            self.used_bytes += count
            self._senders[sender] = mine
            return True

    def give_back(self, count: int, sender: bytes = b"") -> None:
        with self._lock:
            self.used_bytes -= count
            left = self._senders.pop(sender, 0) - count
            if left:
                self._senders[sender] = left


def kept_bytes(kept: Claim) -> int:
    """Bytes that a message takes while it waits. A text of 512 characters may take 2 KiB."""
    reader = kept.reader
    texts = (kept.incarnation, kept.hold_id, kept.digest, reader.engine_id, reader.incarnation)
    tables = len(kept.tables) if isinstance(kept, Offer) else 0
    return ENTRY_BYTES + tables + sum(map(getsizeof, texts))


@dataclass(slots=True)
class _Guest:
    peer: Any  # its address; a reused descriptor has another one
    waits: bool = True  # for its first request
    taken_bytes: float = 0  # that the server's thread has received, and heartbeats


@contextmanager
def _borrowed(descriptor: int) -> Iterator[sockets.socket]:
    """One of libzmq's descriptors as a Python socket, without a duplicate descriptor."""
    connection = sockets.socket(sockets.AF_INET6, sockets.SOCK_STREAM, 0, descriptor)
    try:
        yield connection
    finally:
        connection.detach()
