"""Calls to servers of peers: many at once, on one thread, each with a deadline.

A `Caller` makes the calls. A call ends with the peer's reply or with an error: `DeadlineExceeded`,
`PeerLost` if the peer does not listen or the connection broke, `AuthenticationError` if the peer
does not accept our key. The first call to an address opens a connection, a `Line`, which is kept.
A reply counts only if it comes on the line of its call; any other is dropped and counted.

If the host is a name, the calls to it wait until the name is resolved, on a thread of `net.names`.
Calls to other addresses go on. The addresses of a name are tried in order:

    opened --the peer accepts the connection--> connected --the keys fit--> greeted
       |                                            '--it breaks, or the keys differ--> over
       '--the address refuses, or its time to connect is over--> the next address; if there is no
                                                                 other: over

An address that refuses does so at once. An address that drops packets never answers, and the system
would try it for minutes. So if there are other addresses, each gets a part of the time of the
calls that wait. No request was sent on a line that is not connected, so its calls can be sent on
another line. The last address has all the time that is left. So has a connected one, because an
overloaded host may need seconds for the handshake.

`Sockets` makes the ZMQ sockets. Both ends derive CURVE keys from the secret, or from the key of
this user (`net.keys`). A client reaches only a server with the right key, and a server admits only
clients with the right key. So every message is authenticated and encrypted, and cannot be replayed.
Without a secret, servers listen on loopback, and clients do not leave it.
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

IDLE_SECONDS = 1.0  # the most between two checks of deadlines
CLOSE_SECONDS = 5.0
CONNECT_SECONDS = 2.0  # for an address with others after it; enough to repeat a lost packet
LEAST_CONNECT_SECONDS = 0.2  # also if a call has less time: a far address needs it
# A peer that is silent for three of these is lost with its host. A dead process is noticed at once.
HEARTBEAT_MS = 10_000
LINGER_MS = 0  # a closing socket drops unsent messages; deadlines handle the rest
HANDSHAKE_MS = 20_000  # an overloaded host may need seconds
READ_AHEAD = 48  # requests of one connection, of up to 1 MiB each, that wait for a server's thread
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


class Caller:
    """Makes calls. Any thread may call `call` and `close`; one thread of its own does the rest."""

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
        except RuntimeError:  # the process has too many threads
            self._woken.close(linger=0)
            self._waker.close(linger=0)
            raise

    def call(self, address: str, body: RequestBody, deadline: float) -> Future[ReplyBody]:
        """Send a request to `host:port`. The future always ends by the deadline."""
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
        with contextlib.suppress(zmq.Again):  # full: the thread will wake anyway
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
        """Ask for a lookup of the host's name, or join the lookup that is under way."""
        waiting = self._unresolved.get(call.address)
        if waiting is None or not waiting.answer.done():
            # asking again extends the lookup's deadline
            answer = self._sockets.names.ask(host, call.deadline)
            if waiting is None:
                waiting = self._unresolved[call.address] = _Unresolved(answer)
                answer.add_done_callback(lambda _: self._look_again())
        return waiting

    def _look_again(self) -> None:
        """Wake the caller's thread. Called by the thread that has resolved a name."""
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
        """Open a line, and send the calls that waited for it and have not ended meanwhile."""
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
            return  # the call has ended meanwhile
        if isinstance(error, KvferryError):
            call.future.set_exception(error)
        elif isinstance(error, (zmq.ZMQError, OSError, ValueError)):  # a bad address, a full queue
            call.future.set_exception(PeerLost(f"{call.address} cannot be reached: {error}"))
        else:  # a bug of ours; the caller learns of it at once
            log.error("a %s could not be sent", call.what, exc_info=error)
            call.future.set_exception(HandoverError(f"internal error: {error!r}"))

    def _connect(self, address: str, found: list[str], poller: zmq.Poller) -> Line:
        line = self._lines[address] = Line.open(self._sockets, address, found)
        poller.register(line.socket, zmq.POLLIN)
        poller.register(line.monitor, zmq.POLLIN)
        return line

    def _receive(self, line: Line) -> None:
        while line.socket.poll(0):
            frame = b"".join(line.socket.recv_multipart())  # a large reply comes in two frames
            try:
                reply = decode_reply(frame)
            except ProtocolError as error:
                log.warning("a peer sent %.300r", str(error))
                continue
            call = self._calls.get(reply.id)
            if call is None:
                self.counters["late replies"] += 1
            elif call.address != line.address:  # the peer answers another peer's call
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
        """End the calls of a line that is over. The next call to its address opens a new line."""
        error = line.hear()
        if isinstance(error, PeerLost) and not line.greeted and line.others:
            self._try_next(address, line, poller)
        elif error is not None:
            self._hang_up(address, poller)
            self._end_calls(address, error)

    def _move_on(self, poller: zmq.Poller) -> None:
        """Leave addresses whose time to connect is over."""
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
        # close lines that never connected and that no call waits for: they cost descriptors
        for address in late - {call.address for call in self._calls.values()} if late else ():
            self._unresolved.pop(address, None)
            if address in self._lines and not self._lines[address].greeted:
                self._hang_up(address, poller)


@dataclass(slots=True)
class _Call:
    future: Future[ReplyBody]
    address: str
    deadline: float
    what: str


@dataclass(slots=True)
class _Unresolved:
    """An address whose name is looked up, and the encoded calls that wait for it."""

    answer: Future[tuple[str, ...]]
    frames: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class _Inbox:
    """Calls for the caller's thread. The lock also guards the socket that wakes the thread."""

    queue: queue.SimpleQueue[tuple[RequestBody, _Call]] = field(default_factory=queue.SimpleQueue)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True, eq=False)
class Line:
    """The connection of a `Caller` to one address. Only the caller's thread uses it."""

    address: str  # as in the call: a name or an address
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    others: list[str]  # the other addresses of its name, to try if this one is not reached
    unsaid: dict[int, bytes] = field(default_factory=dict)  # calls sent before it was greeted
    connect_by: float = math.inf  # after that, the next address is tried
    connected: bool = False
    greeted: bool = False  # whether its handshake succeeded

    @classmethod
    def open(cls, sockets: Sockets, address: str, found: list[str]) -> Line:
        """A line to the first of these addresses. libzmq connects in the background."""
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
        """Send a call, or queue it until the line connects. `deadline` is the call's."""
        self.socket.send(frame, zmq.NOBLOCK)
        if not self.others or self.greeted:
            return
        self.unsaid[number] = frame
        if not self.connected:
            now = time.monotonic()
            share = min(CONNECT_SECONDS, (deadline - now) / (len(self.others) + 1))
            self.connect_by = min(self.connect_by, now + max(LEAST_CONNECT_SECONDS, share))

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


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MOST_SOCKETS)  # must be set before the first socket
    return context


@dataclass(slots=True)
class Sockets:
    """Makes the sockets of one process, all with the key of the secret or of this user.

    `admits` says which of the hosts that peers name may be called.
    """

    secret: str | None = field(default=None, repr=False)
    admits: Admits | None = None
    context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=_context)
    names: Names = NAMES
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
        require_port(port)  # libzmq accepts larger numbers, and listens at another port
        bound = LOCALHOST if host in (None, "localhost") else host  # as in `net.names`
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
        """A DEALER socket to `host:port`. libzmq connects it in the background.

        The host must be an address: libzmq would resolve a name on its I/O thread. `prepare` sets
        options and monitors, which must be set before the socket connects.
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
        except BaseException:  # also an interrupt: no other code would close the socket
            socket.close(linger=0)
            raise
        return socket

    def require_trusted(self, address: str) -> None:
        """Refuse a host that must not be called. Its name is judged without a lookup."""
        self._reach.require(address.rpartition(":")[0])

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

    def _pair(self, who: str) -> tuple[bytes, bytes]:
        with self._lock:
            if who not in self._keys:
                self._keys[who] = _keypair(self._key, who)
            return self._keys[who]

    def _admit(self) -> None:
        """Start the thread that admits clients with the derived key, if it does not run yet."""
        public, _ = self._pair("client")
        with self._lock:
            if self._authenticator is None:
                self._authenticator = ThreadAuthenticator(self.context)
                self._authenticator.start()
                self._authenticator.configure_curve_callback(
                    domain="*", credentials_provider=_OnlyThisKey(public)
                )


def _keypair(key: Key, who: str) -> tuple[bytes, bytes]:
    """A public and a secret CURVE key, which every process with the key derives alike."""
    private = z85.encode(key.derive(f"curve {who}"))
    return zmq.curve_public(private), private


@dataclass(frozen=True, slots=True)
class _OnlyThisKey:
    key: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.key
