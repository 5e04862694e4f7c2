# SPDX-License-Identifier: Apache-2.0
"""Calls to servers of peers: many at once, on one thread, each with a deadline.

A `Caller` makes the calls. A call ends with the peer's reply or with an error: `DeadlineExceeded`,
`PeerLost` if the peer does not listen or the connection broke, `AuthenticationError` if the peer
does not accept our key. The first call to an address opens a connection, a `Line`, which is kept.
A reply counts only if it comes on the line of its call; any other is dropped and counted.

If the host is a name, the calls to it wait until the name is resolved, on a thread of `net.names`.
The addresses of a name are tried in order:

    opened --the peer accepts the connection--> connected --the keys fit--> greeted
       |                                            |--it breaks--> opened again, once
       |                                            '--it breaks again, or the keys differ--> over
       '--the address refuses, or its time to connect is over--> the next address; if there is no
                                                                 other: over

A server that cannot read our greeting, because its key differs, closes the connection. So does the
kernel when a server dies. If it died, the second connection is refused.

An address that drops packets never answers. So if there are other addresses, each gets a part of
the time of the calls that wait. No request was sent on a line that is not connected, so its calls
can be sent on another line. The last address has all the time that is left, and so has a connected
one, because an overloaded host may need seconds for the handshake.

`Sockets` makes the ZMQ sockets. Both ends derive CURVE keys from the secret, or from the key of
this user (`net.keys`). A client reaches only a server with the right key, and a server admits only
clients with the right key. Without a secret, servers listen on loopback, and clients do not leave
it.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from kvferry.errors import (
    AuthenticationError,
    DeadlineExceeded,
    HandoverError,
    KvferryError,
    PeerLost,
    ProtocolError,
)
from kvferry.net.keys import Key
from kvferry.net.messages import (
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    ReplyBody,
    Request,
    RequestBody,
    decode_reply,
    encode,
)
from kvferry.net.names import LOCALHOST, NAMES, Admits, Names, Reach, at_port, literal
from kvferry.units import require_port

log = logging.getLogger("kvferry")

IDLE_SECONDS = 1.0  # the most between two checks of deadlines
CLOSE_SECONDS = 5.0
CONNECT_SECONDS = 2.0  # for an address with others after it; enough to repeat a lost packet
LEAST_CONNECT_SECONDS = 0.2  # also if a call has less time: a far address needs it
# A peer that is silent for three of these is lost with its host. A dead process is noticed at once.
HEARTBEAT_MS = 10_000
LINGER_MS = 0  # a closing socket drops unsent messages; deadlines handle the rest
HANDSHAKE_MS = 20_000  # an overloaded host may need seconds
READ_AHEAD = 48  # requests of one connection, of up to 1 MiB each, that wait for a server's thread
MOST_REPLIES = 256  # that wait on one line; and to read before the next check of deadlines
MOST_SOCKETS = 65_000  # of a process; three for each peer. ZMQ's default is 1023, its most 65535

MONITORED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
)

# libzmq's events when a peer closes the connection during the handshake; then it connects again
BROKEN_HANDSHAKE = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_DISCONNECTED,
    zmq.EVENT_CONNECT_RETRIED,
)


class SocketThread:
    """A thread that owns ZMQ sockets. Other threads hand it work through `submit`, so the state of
    its subclass needs no locks."""

    def __init__(self, name: str) -> None:
        self.counters: Counter[str] = Counter()
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        self._poller.register(self._eventfd, zmq.POLLIN)
        self._stop = threading.Event()
        self._wake_lock = threading.Lock()  # the thread is woken while `_eventfd` is open
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> bool:
        """Have the thread do this work soon. False if the thread ends. Any thread may call it."""
        with self._wake_lock:
            if self._stop.is_set():
                return False
            self._work.put(work)
            os.eventfd_write(self._eventfd, 1)
            return True

    def close(self) -> None:
        with self._wake_lock:
            if self._stop.is_set():
                return
            self._stop.set()
            os.eventfd_write(self._eventfd, 1)
        if self._thread.ident is None:  # the thread was never started
            self._end()
        else:
            self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            os.close(self._eventfd)

    def next_deadline(self) -> float | None:
        """When the thread must take its next turn, or None."""
        return None

    def _turn(self, ready: Mapping[object, int]) -> None:
        """Serve the sockets that are ready, and end work whose deadline is over."""

    def _failed(self, error: Exception) -> None:
        log.error("%s goes on after an error", self._thread.name, exc_info=error)

    def _end(self) -> None:
        """Close the thread's sockets."""

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                ready = dict(self._poller.poll(self._patience_ms()))
                if self._eventfd in ready:
                    os.eventfd_read(self._eventfd)
                while not self._work.empty():
                    self._guarded(self._work.get())
                self._guarded(self._turn, ready)
        except zmq.ContextTerminated:
            pass
        finally:
            self._end()

    def _guarded(self, action: Callable[..., object], *arguments: object) -> None:
        try:
            action(*arguments)
        except zmq.ContextTerminated:
            raise
        except Exception as error:
            self._failed(error)

    def _patience_ms(self) -> int:
        due = self.next_deadline()
        seconds = IDLE_SECONDS if due is None else min(IDLE_SECONDS, due - time.monotonic())
        return max(0, int(seconds * 1000) + 1)  # rounded up, so not before the deadline


class Caller(SocketThread):
    """Makes calls. Any thread may call `call` and `close`; one thread of its own does the rest."""

    def __init__(self, sockets: Sockets) -> None:
        super().__init__("kvferry-caller")
        self._sockets = sockets
        self._lines: dict[str, Line] = {}  # by address, as in the call
        self._unresolved: dict[str, Future[tuple[str, ...]]] = {}  # lookups that calls wait for
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        try:
            self.start()
        except RuntimeError:  # the process has too many threads
            self.close()
            raise

    def call(self, address: str, body: RequestBody, deadline: float) -> Future[ReplyBody]:
        """Send a request to `host:port`. The future always ends by the deadline."""
        call = _Call(next(self._numbers), address, body, deadline)
        if not self.submit(partial(self._begin, call)):
            call.future.set_exception(PeerLost("kvferry is shutting down"))
        return call.future

    def next_deadline(self) -> float | None:
        calls = (call.deadline for call in self._calls.values())
        lines = (line.connect_by for line in self._lines.values())
        return min(itertools.chain(calls, lines), default=None)

    # The thread

    def _turn(self, ready: Mapping[object, int]) -> None:
        for line in list(self._lines.values()):
            if line.socket in ready:
                self._guarded(self._receive, line)
            if line.monitor in ready:
                self._guarded(self._watch, line)
        self._expire()
        now = time.monotonic()
        for line in [line for line in self._lines.values() if line.not_reached(now)]:
            self._try_next(line)

    def _end(self) -> None:
        while not self._work.empty():
            self._guarded(self._work.get())
        self._end_calls(list(self._calls.values()), PeerLost("kvferry is shutting down"))
        for line in self._lines.values():
            line.close()

    def _begin(self, call: _Call) -> None:
        self._calls[call.number] = call
        if not self._stop.is_set():
            self._send(call)

    def _send(self, call: _Call) -> None:
        """Send a call on the line to its address, or have it wait until its host is resolved."""
        try:
            frame = encode(Request(call.number, call.body))
            line = self._lines.get(call.address)
            if line is None:
                host, _, port = call.address.rpartition(":")
                self._sockets.reach.require(host)  # a name is judged without a lookup
                address = literal(host)
                if address is None:
                    self._look_up(host, call)
                    return
                line = self._connect(call.address, [at_port(address, port)])
            if line.send(frame, call.deadline):
                return
            self._watch(line)  # if the line is over, this ends all its calls, or sends them anew
            if call.number in self._calls and self._lines.get(call.address) is line:
                raise PeerLost(f"too many calls to {call.address} wait")
        except Exception as error:
            self._end_calls([call], _not_sent(call, error))

    def _look_up(self, host: str, call: _Call) -> None:
        """Ask for a lookup of the host's name, unless one is under way."""
        if call.address not in self._unresolved:
            answer = self._unresolved[call.address] = self._sockets.names.ask(host)
            resolved = partial(self._resolved, call.address)
            answer.add_done_callback(lambda found: self.submit(partial(resolved, found)))

    def _resolved(self, address: str, found: Future[tuple[str, ...]]) -> None:
        if self._unresolved.get(address) is not found:
            return  # its calls have ended meanwhile
        del self._unresolved[address]
        error = found.exception()
        if error is not None:
            self._end_calls(self._calls_to(address), error)
        else:
            port = address.rpartition(":")[2]
            self._open(address, [at_port(one, port) for one in found.result()])

    def _open(self, address: str, found: list[str]) -> None:
        """Open a line to the first of these addresses, and send the calls that wait for it."""
        waiting = self._calls_to(address)
        try:
            self._connect(address, found)
        except Exception as error:
            for call in waiting:
                self._end_calls([call], _not_sent(call, error))
        else:
            for call in waiting:
                if call.number in self._calls:  # not if the line is over already
                    self._send(call)

    def _connect(self, address: str, found: list[str]) -> Line:
        line = self._lines[address] = Line.open(self._sockets, address, found)
        self._poller.register(line.socket, zmq.POLLIN)
        self._poller.register(line.monitor, zmq.POLLIN)
        return line

    def _receive(self, line: Line) -> None:
        """All replies that wait on a line; but a peer that floods us does not keep the thread."""
        for _ in range(MOST_REPLIES):
            if not line.socket.poll(0):
                return
            frame = b"".join(line.socket.recv_multipart())  # a large reply comes in two frames
            try:
                reply = decode_reply(frame)
            except ProtocolError as error:
                self._drop("malformed replies", line, str(error))
                continue
            call = self._calls.get(reply.id)
            if call is None:
                self.counters["late replies"] += 1
            elif call.address != line.address:
                self._drop("misdirected replies", line, f"it answers a call to {call.address}")
            else:
                del self._calls[reply.id]
                call.future.set_result(reply.body)

    def _drop(self, what: str, line: Line, why: str) -> None:
        """Count a reply that no faultless peer sends. The first of a kind is logged."""
        if not self.counters[what]:
            text = "%s sends %s, which are dropped (%.300s); is it of another release, or faulty?"
            log.warning(text, line.address, what, why)
        self.counters[what] += 1

    def _watch(self, line: Line) -> None:
        """End the calls of a line that is over. The next call to its address opens a new line."""
        error = line.hear()
        if isinstance(error, PeerLost) and not line.greeted and line.others:
            self._try_next(line)
        elif error is not None:
            self._guarded(self._receive, line)  # replies that came before the line broke
            self._hang_up(line)
            self._end_calls(self._calls_to(line.address), error)

    def _try_next(self, line: Line) -> None:
        self._hang_up(line)
        self._open(line.address, line.others)

    def _hang_up(self, line: Line) -> None:
        del self._lines[line.address]
        self._poller.unregister(line.socket)
        self._poller.unregister(line.monitor)
        line.close()

    def _calls_to(self, address: str) -> list[_Call]:
        return [call for call in self._calls.values() if call.address == address]

    def _end_calls(self, calls: list[_Call], error: BaseException) -> None:
        for call in calls:
            del self._calls[call.number]
            call.future.set_exception(error)

    def _expire(self) -> None:
        now = time.monotonic()
        late = [call for call in self._calls.values() if call.deadline <= now]
        for call in late:
            why = f"{call.address} did not answer a {call.what} in time"
            if call.address in self._unresolved:
                why = f"the name of {call.address} was not resolved in time for a {call.what}"
            self._end_calls([call], DeadlineExceeded(why))
        if not late:
            return
        # close lines that never connected and that no call waits for: they cost descriptors
        waited_for = {call.address for call in self._calls.values()}
        for address in {call.address for call in late} - waited_for:
            lookup = self._unresolved.pop(address, None)
            if lookup is not None:
                lookup.cancel()
            line = self._lines.get(address)
            if line is not None and not line.greeted:
                self._hang_up(line)


@dataclass(slots=True)
class _Call:
    number: int
    address: str
    body: RequestBody
    deadline: float
    future: Future[ReplyBody] = field(default_factory=Future)

    @property
    def what(self) -> str:
        return type(self.body).__name__.lower()


def _not_sent(call: _Call, error: Exception) -> KvferryError:
    """The error of a call that could not be sent."""
    if isinstance(error, KvferryError):
        return error
    if isinstance(error, (zmq.ZMQError, OSError, ValueError)):  # a bad address, a full queue
        return PeerLost(f"{call.address} cannot be reached: {error}")
    log.error("a %s could not be sent", call.what, exc_info=error)  # a bug of ours
    return HandoverError(f"internal error: {error!r}")


@dataclass(slots=True, eq=False)
class Line:
    """The connection of a `Caller` to one address. Only the caller's thread uses it."""

    address: str  # as in the call: a name or an address
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    others: list[str]  # the other addresses of its name, to try if this one is not reached
    connect_by: float = math.inf  # after that, the next address is tried
    connected: bool = False
    greeted: bool = False  # whether its handshake succeeded
    broken: int = 0  # events of its first broken handshake that were heard

    @classmethod
    def open(cls, sockets: Sockets, address: str, found: list[str]) -> Line:
        """A line to the first of these addresses. libzmq connects in the background."""
        socket = sockets.client(found[0])
        line = cls(address, socket, socket.get_monitor_socket(MONITORED), found[1:])
        try:
            socket.connect(f"tcp://{found[0]}")
        except BaseException:  # also an interrupt: no other code would close the sockets
            line.close()
            raise
        return line

    def send(self, frame: bytes, deadline: float) -> bool:
        """Send a call, or queue it until the line connects. `deadline` is the call's. Returns False
        if its queue is full, or if the peer broke the handshake already."""
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        if self.others and not self.connected:
            now = time.monotonic()
            share = min(CONNECT_SECONDS, (deadline - now) / (len(self.others) + 1))
            self.connect_by = min(self.connect_by, now + max(LEAST_CONNECT_SECONDS, share))
        return True

    def not_reached(self, now: float) -> bool:
        """Whether its time to connect is over. False while it has events that `hear` must read."""
        return self.connect_by <= now and not self.monitor.poll(0)

    def hear(self) -> KvferryError | None:
        """Read the line's events. Return an error if the line is over, else None."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_CONNECTED:
                self.connected, self.connect_by = True, math.inf
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.greeted = True
            elif self.greeted:
                return PeerLost(f"the connection to {self.address} broke")
            elif event in BROKEN_HANDSHAKE[self.broken : self.broken + 1]:
                self.broken += 1
            elif event == zmq.EVENT_CONNECT_RETRIED:
                return PeerLost(f"no process listens at {self.address}")
            else:
                return AuthenticationError(
                    f"{self.address} does not take our secret (or it is no kvferry, or a proxy "
                    "without its server); configure the same secret on both engines. Without one, "
                    "both must run as the same user on one host, and in containers share /dev/shm"
                )
        return None

    def close(self) -> None:
        self.socket.disable_monitor()
        self.socket.close(linger=0)
        self.monitor.close(linger=0)


class Sockets:
    """Makes the sockets of one process, all with the key of the secret or of this user.

    `admits` says which of the hosts that peers name may be called.
    """

    def __init__(
        self, secret: str | None = None, admits: Admits | None = None, *, names: Names = NAMES
    ) -> None:
        self._key = Key.of(secret)
        self.reach = Reach(self._key.configured, admits)
        self.names = names
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, MOST_SOCKETS)  # must be set before the first socket
        self._authenticator: ThreadAuthenticator | None = None
        self._lock = threading.Lock()

    def server(self, host: str | None, port: int = 0) -> tuple[zmq.Socket[bytes], int]:
        """A bound ROUTER socket and its port. `host` None: loopback."""
        require_port(port)  # libzmq accepts larger numbers, and listens at another port
        bound = LOCALHOST if host is None or host == "localhost" else host  # as in `net.names`
        self.reach.require_listening(bound)
        self._admit()
        socket = self.context.socket(zmq.ROUTER)
        self._prepare(socket, MAX_REQUEST_BYTES)
        socket.setsockopt(zmq.RCVHWM, READ_AHEAD)
        socket.curve_publickey, socket.curve_secretkey = self._pair("server")
        socket.curve_server = True
        try:
            socket.bind(f"tcp://{bound}:{port or '*'}")
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise HandoverError(f"cannot listen at {bound}:{port}: {error}") from None
        return socket, int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def client(self, address: str) -> zmq.Socket[bytes]:
        """A DEALER socket for `address:port`, to be connected when its monitor is set."""
        Reach(self._key.configured).require(address.rpartition(":")[0])
        socket = self.context.socket(zmq.DEALER)
        self._prepare(socket, MAX_REPLY_BYTES)
        socket.setsockopt(zmq.RCVHWM, MOST_REPLIES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        socket.curve_serverkey, _ = self._pair("server")
        socket.curve_publickey, socket.curve_secretkey = self._pair("client")
        return socket

    def close(self) -> None:
        with self._lock:
            if self._authenticator is not None:
                self._authenticator.stop()
                self._authenticator = None
        self.context.destroy(linger=LINGER_MS)

    def _prepare(self, socket: zmq.Socket[bytes], most_bytes: int) -> None:
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)  # libzmq disconnects a peer that sends more
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.IPV6, 1)

    def _pair(self, role: str) -> tuple[bytes, bytes]:
        """A public and a secret CURVE key, which every process with the key derives alike."""
        private = z85.encode(self._key.derive(f"curve {role}"))
        return zmq.curve_public(private), private

    def _admit(self) -> None:
        """Start the thread that admits clients with the derived key, if it does not run yet."""
        public, _ = self._pair("client")
        with self._lock:
            if self._authenticator is None:
                authenticator = ThreadAuthenticator(self.context)
                only_ours = SimpleNamespace(callback=lambda domain, key: key == public)
                authenticator.configure_curve_callback("*", only_ours)
                try:
                    authenticator.start()
                except BaseException:  # the next server starts another one
                    authenticator.stop()
                    raise
                self._authenticator = authenticator
