"""Calls to servers of peers: many at once, one thread, every call with a deadline.

A call ends with the peer's reply, or with an error: `DeadlineExceeded`, `PeerLost` where nobody
listens or the connection broke, `AuthenticationError` where the peer does not take our secret. A
connection is made by the first call to an address and kept.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvferry.errors import (
    AuthenticationError,
    DeadlineExceeded,
    HandoverError,
    KvferryError,
    PeerLost,
    ProtocolError,
)
from kvferry.wire.messages import ReplyBody, Request, RequestBody, decode_reply, encode
from kvferry.wire.sockets import Sockets

log = logging.getLogger("kvferry")

IDLE_SECONDS = 1.0
CLOSE_SECONDS = 5.0
HEARTBEAT_MS = (
    10_000  # silent for three of these: its host is lost (a dead process is noticed at once)
)
MONITORED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
)


@dataclass(slots=True)
class _Call:
    future: Future[ReplyBody]
    address: str
    deadline: float
    what: str


@dataclass(slots=True)
class _Line:
    """A connection to one address."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    greeted: bool = False  # whether its handshake ever succeeded


@dataclass(slots=True)
class _Inbox:
    """Work for the caller's thread, and the socket that wakes it."""

    queue: queue.SimpleQueue[tuple[RequestBody, _Call]] = field(default_factory=queue.SimpleQueue)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Caller:
    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        self._inbox = _Inbox()
        address = f"inproc://kvferry-caller-{id(self)}"
        self._woken = sockets.context.socket(zmq.PULL)
        self._woken.bind(address)
        self._waker = sockets.context.socket(zmq.PUSH)
        self._waker.connect(address)
        self._lines: dict[str, _Line] = {}
        self._calls: dict[int, _Call] = {}
        self._ids = itertools.count(1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-caller", daemon=True)
        self._thread.start()

    def call(self, address: str, body: RequestBody, deadline: float) -> Future[ReplyBody]:
        """Send a request to `host:port`; the future ends by the deadline in every case."""
        future: Future[ReplyBody] = Future()
        call = _Call(future, address, deadline, type(body).__name__.lower())
        with self._inbox.lock:
            if self._stop.is_set():
                future.set_exception(PeerLost("kvferry is shutting down"))
                return future
            self._inbox.queue.put((body, call))
            self._wake()
        return future

    def close(self) -> None:
        with self._inbox.lock:
            if self._stop.is_set():
                return
            self._stop.set()
            self._wake()
        self._thread.join(CLOSE_SECONDS)
        self._waker.close(linger=0)

    def _wake(self) -> None:
        with contextlib.suppress(zmq.Again):  # it has many wakes before it already
            self._waker.send(b"", zmq.NOBLOCK)

    # The thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        try:
            while not self._stop.is_set():
                ready = dict(poller.poll(self._patience_ms()))
                while self._woken.poll(0):
                    self._woken.recv()
                self._guarded(lambda: self._send_all(poller))
                for address, line in list(self._lines.items()):
                    if line.socket in ready:
                        self._guarded(lambda line=line: self._receive(line))
                    if line.monitor in ready:
                        self._guarded(lambda a=address, x=line: self._watch(a, x, poller))
                self._expire(poller)
        except zmq.ContextTerminated:
            pass
        finally:
            self._end_calls(None, PeerLost("kvferry is shutting down"))
            for line in self._lines.values():
                line.socket.disable_monitor()
                line.socket.close(linger=0)
                line.monitor.close(linger=0)
            self._woken.close(linger=0)

    def _guarded(self, action: object) -> None:
        try:
            action()  # type: ignore[operator]
        except zmq.ContextTerminated:
            raise
        except Exception:
            log.exception("kvferry's caller goes on after an error")

    def _patience_ms(self) -> int:
        due = min((call.deadline for call in self._calls.values()), default=None)
        seconds = IDLE_SECONDS if due is None else min(IDLE_SECONDS, due - time.monotonic())
        return max(0, int(seconds * 1000) + 1)

    def _send_all(self, poller: zmq.Poller) -> None:
        while not self._inbox.queue.empty():
            body, call = self._inbox.queue.get()
            try:
                line = self._line(call.address, poller)
                number = next(self._ids)
                line.socket.send(encode(Request(number, body)), zmq.NOBLOCK)
                self._calls[number] = call
            except KvferryError as error:
                call.future.set_exception(error)
            except (zmq.ZMQError, OSError, ValueError) as error:  # no address, a full queue
                call.future.set_exception(PeerLost(f"{call.address} cannot be reached: {error}"))
            except Exception as error:  # ours, not the peer's; whoever waits is told at once
                log.exception("a %s could not be sent", call.what)
                call.future.set_exception(HandoverError(f"internal error: {error!r}"))

    def _line(self, address: str, poller: zmq.Poller) -> _Line:
        if address not in self._lines:
            monitors: list[zmq.Socket[bytes]] = []

            def prepare(socket: zmq.Socket[bytes]) -> None:
                socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
                socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
                monitors.append(socket.get_monitor_socket(MONITORED))

            try:
                line = _Line(self._sockets.client(address, prepare), monitors[0])
            except BaseException:
                for monitor in monitors:
                    monitor.close(linger=0)
                raise
            poller.register(line.socket, zmq.POLLIN)
            poller.register(line.monitor, zmq.POLLIN)
            self._lines[address] = line
        return self._lines[address]

    def _receive(self, line: _Line) -> None:
        while line.socket.poll(0):
            frame = b"".join(line.socket.recv_multipart())  # several frames are no reply of ours
            try:
                reply = decode_reply(frame)
            except ProtocolError as error:
                log.warning("a peer sent %s", error)
                continue
            call = self._calls.pop(reply.id, None)
            if call is not None:
                call.future.set_result(reply.body)

    def _watch(self, address: str, line: _Line, poller: zmq.Poller) -> None:
        """End the calls of a connection that broke; the next call makes a new one."""
        while line.monitor.poll(0):
            event = recv_monitor_message(line.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                line.greeted = True
                continue
            if event == zmq.EVENT_CONNECT_RETRIED and not line.greeted:
                error: Exception = PeerLost(f"nobody listens at {address}")
            elif line.greeted:
                error = PeerLost(f"the connection to {address} broke")
            else:
                error = AuthenticationError(
                    f"{address} does not take our secret (or is no kvferry); configure the same "
                    "secret on both engines"
                )
            self._hang_up(address, poller)
            self._end_calls(address, error)
            return

    def _hang_up(self, address: str, poller: zmq.Poller) -> None:
        line = self._lines.pop(address)
        poller.unregister(line.socket)
        poller.unregister(line.monitor)
        line.socket.disable_monitor()
        line.socket.close(linger=0)
        line.monitor.close(linger=0)

    def _end_calls(self, address: str | None, error: Exception) -> None:
        for number, call in list(self._calls.items()):
            if address is None or call.address == address:
                del self._calls[number]
                call.future.set_exception(error)
        while address is None and not self._inbox.queue.empty():
            self._inbox.queue.get()[1].future.set_exception(error)

    def _expire(self, poller: zmq.Poller) -> None:
        now = time.monotonic()
        late = set()
        for number, call in list(self._calls.items()):
            if call.deadline <= now:
                del self._calls[number]
                late.add(call.address)
                call.future.set_exception(
                    DeadlineExceeded(f"{call.address} did not answer a {call.what} in time")
                )
        # a line on which nobody ever spoke, and nobody waits, is not worth its descriptors
        for address in late - {call.address for call in self._calls.values()} if late else ():
            if address in self._lines and not self._lines[address].greeted:
                self._hang_up(address, poller)
