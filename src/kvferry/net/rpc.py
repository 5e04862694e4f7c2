"""Calls to servers of peers: many at once, one thread, every call with a deadline.

A call ends with the peer's reply, or with an error: `DeadlineExceeded`, `PeerLost` where nobody
listens or the connection broke, `AuthenticationError` where the peer does not take our secret. A
connection, a line, is made by the first call to an address and kept. Only what comes on that line
answers a call: a reply to another line's call is dropped and counted.

An address whose host is a name waits for its line until the name is resolved, on a thread of
`wire.names`; calls to others go on. Where a name has several addresses, they are tried in order,
each for a part of the time (`lines`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

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

IDLE_SECONDS = 1.0
CLOSE_SECONDS = 5.0


@dataclass(slots=True)
class _Call:
    future: Future[ReplyBody]
    address: str
    deadline: float
    what: str


@dataclass(slots=True)
class _Unresolved:
    """An address whose name is being looked up, and the calls that wait for it."""

    answer: Future[tuple[str, ...]]
    frames: dict[int, bytes] = field(default_factory=dict)


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
        self.counters: Counter[str] = Counter()
        self._lines: dict[str, Line] = {}
        self._unresolved: dict[str, _Unresolved] = {}
        self._calls: dict[int, _Call] = {}
        self._ids = itertools.count(1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-caller", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there are too many already
            self._woken.close(linger=0)
            self._waker.close(linger=0)
            raise

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
                self._guarded(lambda: self._move_on(poller))
        except zmq.ContextTerminated:
            pass
        finally:
            self._end_calls(None, PeerLost("kvferry is shutting down"))
            for line in self._lines.values():
                line.close()
            self._woken.close(linger=0)

    def _guarded(self, action: object) -> None:
        try:
            action()  # type: ignore[operator]
        except zmq.ContextTerminated:
            raise
        except Exception:
            log.exception("kvferry's caller goes on after an error")

    def _patience_ms(self) -> int:
        now = time.monotonic()
        due = min((call.deadline for call in self._calls.values()), default=now + IDLE_SECONDS)
        moves_on = min((line.connect_by for line in self._lines.values()), default=due)
        seconds = min(IDLE_SECONDS, due - now, moves_on - now)
        return max(0, int(seconds * 1000) + 1)

    def _send_all(self, poller: zmq.Poller) -> None:
        for address in [a for a, waiting in self._unresolved.items() if waiting.answer.done()]:
            self._resolved(address, self._unresolved.pop(address), poller)
        while not self._inbox.queue.empty():
            body, call = self._inbox.queue.get()
            number = next(self._ids)
            self._calls[number] = call
            try:
                self._send(number, encode(Request(number, body)), call, poller)
            except Exception as error:
                self._not_sent(number, error)

    def _send(self, number: int, frame: bytes, call: _Call, poller: zmq.Poller) -> None:
        line = self._lines.get(call.address)
        if line is None:
            self._sockets.require_trusted(call.address)
            host, _, port = call.address.rpartition(":")
            address = literal(host)
            if address is None:
                self._resolve(host, call).frames[number] = frame
                return
            line = self._connect(call.address, [at_port(address, port)], poller)
        line.send(number, frame, call.deadline)

    def _resolve(self, host: str, call: _Call) -> _Unresolved:
        """Have a host's name looked up, or let one more call wait for that."""
        waiting = self._unresolved.get(call.address)
        if waiting is None or not waiting.answer.done():
            answer = self._sockets.names.ask(host, call.deadline)  # asked already: wanted longer
            if waiting is None:
                waiting = self._unresolved[call.address] = _Unresolved(answer)
                answer.add_done_callback(lambda _: self._look_again())
        return waiting

    def _look_again(self) -> None:
        """A name was resolved; called by the thread that did so."""
        with self._inbox.lock:
            if not self._stop.is_set():
                self._wake()

    def _resolved(self, address: str, waiting: _Unresolved, poller: zmq.Poller) -> None:
        error = waiting.answer.exception()
        if error is not None:
            self._end_calls(address, error)
            return
        port = address.rpartition(":")[2]
        found = [at_port(one, port) for one in waiting.answer.result()]
        self._open(address, found, waiting.frames, poller)

    def _open(
        self, address: str, found: list[str], frames: dict[int, bytes], poller: zmq.Poller
    ) -> None:
        """Make a line, and send what waited for it; some of those calls may be over by now."""
        wanted = {number: frame for number, frame in frames.items() if number in self._calls}
        try:
            self._connect(address, found, poller)
            for number, frame in wanted.items():
                self._send(number, frame, self._calls[number], poller)
        except Exception as error:
            for number in wanted:
                self._not_sent(number, error)

    def _not_sent(self, number: int, error: Exception) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return  # it ended meanwhile
        if isinstance(error, KvferryError):
            call.future.set_exception(error)
        elif isinstance(error, (zmq.ZMQError, OSError, ValueError)):  # no address, a full queue
            call.future.set_exception(PeerLost(f"{call.address} cannot be reached: {error}"))
        else:  # ours, not the peer's; whoever waits is told at once
            log.error("a %s could not be sent", call.what, exc_info=error)
            call.future.set_exception(HandoverError(f"internal error: {error!r}"))

    def _connect(self, address: str, found: list[str], poller: zmq.Poller) -> Line:
        line = self._lines[address] = Line.open(self._sockets, address, found)
        poller.register(line.socket, zmq.POLLIN)
        poller.register(line.monitor, zmq.POLLIN)
        return line

    def _receive(self, line: Line) -> None:
        while line.socket.poll(0):
            frame = b"".join(line.socket.recv_multipart())  # several frames are no reply of ours
            try:
                reply = decode_reply(frame)
            except ProtocolError as error:
                log.warning("a peer sent %.300r", str(error))
                continue
            call = self._calls.get(reply.id)
            if call is None:
                self.counters["late replies"] += 1
            elif call.address != line.address:  # it answers for somebody else
                if not self.counters["misdirected replies"]:
                    log.warning(
                        "%s answers a call to %s; this and others of the kind are dropped",
                        line.address,
                        call.address,
                    )
                self.counters["misdirected replies"] += 1
            else:
                del self._calls[reply.id]
                call.future.set_result(reply.body)

    def _watch(self, address: str, line: Line, poller: zmq.Poller) -> None:
        """End the calls of a connection that broke; the next call makes a new one."""
        error = line.hear()
        if isinstance(error, PeerLost) and not line.greeted and line.others:
            self._try_next(address, line, poller)
        elif error is not None:
            self._hang_up(address, poller)
            self._end_calls(address, error)

    def _move_on(self, poller: zmq.Poller) -> None:
        """Leave addresses that were not reached in their time."""
        now = time.monotonic()
        for address, line in list(self._lines.items()):
            if line.not_reached(now):
                self._try_next(address, line, poller)

    def _try_next(self, address: str, line: Line, poller: zmq.Poller) -> None:
        self._hang_up(address, poller)
        self._open(address, line.others, line.unsaid, poller)

    def _hang_up(self, address: str, poller: zmq.Poller) -> None:
        line = self._lines.pop(address)
        poller.unregister(line.socket)
        poller.unregister(line.monitor)
        line.close()

    def _end_calls(self, address: str | None, error: BaseException) -> None:
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
                if call.address in self._unresolved:
                    why = f"the name of {call.address} was not resolved in time for a {call.what}"
                else:
                    why = f"{call.address} did not answer a {call.what} in time"
                call.future.set_exception(DeadlineExceeded(why))
        # a line on which nobody ever spoke, and nobody waits, is not worth its descriptors
        for address in late - {call.address for call in self._calls.values()} if late else ():
            self._unresolved.pop(address, None)
            if address in self._lines and not self._lines[address].greeted:
                self._hang_up(address, poller)


# --------------------------------------------------------------------------------------------------
# A line: the connection of a `Caller` to one address, and what became of it.
#
#     opened --somebody takes the connection--> connected --the secret is right--> greeted
#       |                                          '--it breaks, or is none of ours--> over
#       '--nobody listens, or its time to connect is over--> the next address of its name; over,
#                                                            where there is no other
#
# An address that refuses says so at once. One that drops what it is sent says nothing, and the
# system would try for minutes; so where a name has other addresses, it gets a part of the time of
# the calls that wait. Nothing was said on a line that is not connected: its calls can be said again
# elsewhere. The last address has all the time that is left, and so has one that is connected: who
# is overloaded may take seconds to greet.
# --------------------------------------------------------------------------------------------------

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


# --------------------------------------------------------------------------------------------------
# ZMQ sockets that talk to those who have our key, and to nobody else.
#
# Both ends derive CURVE keys from the secret, or from the key of this user where none is configured
# (keys.py): a client reaches only a server with the right key, and the server admits only clients
# with the right key, so every message is authenticated, encrypted and cannot be replayed. Without a
# secret, servers listen on loopback, and clients do not leave it.
# --------------------------------------------------------------------------------------------------

LINGER_MS = 0  # a closing socket drops what it could not send; deadlines handle the rest
HANDSHAKE_MS = 20_000  # a host that is overloaded may take seconds
READ_AHEAD = 48  # requests of one connection that wait for a server's thread, of up to 1 MiB each
MOST_SOCKETS = 65_000  # of a process; three for each peer. ZMQ's own limit is 1023 (and 65535)


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MOST_SOCKETS)  # counts only before its first socket
    return context


def _keypair(key: Key, who: str) -> tuple[bytes, bytes]:
    """Public and secret CURVE key that everybody who has the key can derive."""
    private = z85.encode(key.derive(f"curve {who}"))
    return zmq.curve_public(private), private


@dataclass(slots=True)
class Sockets:
    """Makes sockets of one process, all with the same key: the secret's, or this user's.

    `admits` says which hosts may be called, of those that peers name.
    """

    secret: str | None = field(default=None, repr=False)
    admits: Admits | None = None
    context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=_context)
    names: Names = NAMES  # of hosts
    _authenticator: ThreadAuthenticator | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _key: Key = field(init=False)
    _keys: dict[str, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)
    _reach: Reach = field(init=False)

    def __post_init__(self) -> None:
        self._key = Key.of(self.secret)
        self._reach = Reach(self._key.configured, self.admits)

    def server(self, host: str | None, port: int = 0) -> tuple[zmq.Socket[bytes], int]:
        """A bound ROUTER socket and its port. `host` None: loopback."""
        require_port(port)  # libzmq takes others too, and listens somewhere else
        bound = LOCALHOST if host in (None, "localhost") else host  # as `names` has it
        assert bound is not None
        self._reach.require_listening(bound)
        socket = self.context.socket(zmq.ROUTER)
        self._prepare(socket, MAX_REQUEST_BYTES)
        socket.setsockopt(zmq.RCVHWM, READ_AHEAD)
        self._admit()
        socket.curve_publickey, socket.curve_secretkey = self._pair("server")
        socket.curve_server = True
        address = f"tcp://{bound}"
        try:
            if port:
                socket.bind(f"{address}:{port}")
            else:
                port = socket.bind_to_random_port(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise HandoverError(f"cannot listen at {bound}:{port}: {error}") from None
        return socket, port

    def client(
        self, address: str, prepare: Callable[[zmq.Socket[bytes]], None] | None = None
    ) -> zmq.Socket[bytes]:
        """A DEALER socket to `host:port`; connecting goes on in the background.

        The host is an address: a name would be resolved by the thread that moves all messages.
        `prepare` sets options and monitors, which count only if set before connecting.
        """
        Reach(self._key.configured).require(address.rpartition(":")[0])
        socket = self.context.socket(zmq.DEALER)
        try:
            self._prepare(socket, MAX_REPLY_BYTES)
            socket.curve_serverkey, _ = self._pair("server")
            socket.curve_publickey, socket.curve_secretkey = self._pair("client")
            if prepare is not None:
                prepare(socket)
            socket.connect(f"tcp://{address}")
        except BaseException:  # also an interrupt: nobody else would close it
            socket.close(linger=0)
            raise
        return socket

    def require_trusted(self, address: str) -> None:
        """Refuse hosts that may not be called; by what they are called, not resolved."""
        self._reach.require(address.rpartition(":")[0])

    def close(self) -> None:
        with self._lock:
            if self._authenticator is not None:
                self._authenticator.stop()
                self._authenticator = None
        self.context.destroy(linger=LINGER_MS)

    def _prepare(self, socket: zmq.Socket[bytes], most_bytes: int) -> None:
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)  # a peer that sends more is cut off
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.IPV6, 1)

    def _pair(self, who: str) -> tuple[bytes, bytes]:
        with self._lock:
            if who not in self._keys:
                self._keys[who] = _keypair(self._key, who)
            return self._keys[who]

    def _admit(self) -> None:
        """Start the thread that admits clients with the derived key, once."""
        public, _ = self._pair("client")
        with self._lock:
            if self._authenticator is None:
                self._authenticator = ThreadAuthenticator(self.context)
                self._authenticator.start()
                self._authenticator.configure_curve_callback(
                    domain="*", credentials_provider=_OnlyThisKey(public)
                )


@dataclass(frozen=True, slots=True)
class _OnlyThisKey:
    key: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.key
