"""Whether a peer still lives, told by one idle TCP connection.

The data planes of libraries say late, vaguely or never that a peer is gone. So the owner of memory
listens beside them, and a visitor keeps its connection open. The kernel closes it when the process
ends, however it ends; keep-alive notices a host that vanishes within
`IDLE_SECONDS + PROBES * PROBE_SECONDS`. This is all that is ever sent on it:

    visitor  -> owner    MAGIC, the token that the endpoint names
    owner    -> visitor  the incarnation that the endpoint names
    owner    -> visitor  GOODBYE, where its carrier is being closed

A visitor that reads a goodbye, or anything else, takes the peer for lost. Bytes of the peer may
still be under way then, because its library may still be at work. Only the end of the connection
says that none are: an owner closes it after its library, and the kernel with all other connections
of the process. A network that fails says nothing.

Neither side takes another process for its peer: a process that got the same port has neither the
token nor the incarnation. Both are capabilities, not secrets on the wire: the connection is not
encrypted.

No forked child keeps a copy of these sockets (`ours_alone`). `hang_up` shuts a connection down
first: that holds for all copies, also for one that a child got in the microseconds before the
socket was named there.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import select
import selectors
import socket
import threading
import time
from typing import Any

from kvferry.errors import DeadlineExceeded, PeerLost, TransferError
from kvferry.net.names import dial, hang_up, ours_alone

log = logging.getLogger(__name__)

MAGIC = b"kvferry-pulse-1\n"
GOODBYE = b"\n"
LEAVE, END = b"\1", b"\0"  # to the owner's thread
TOKEN_BYTES = 16
GREETING_SECONDS = 5.0  # a visitor that has not greeted by then is sent away
GREETING_LOOK_SECONDS = 1.0  # between two looks for such visitors
MOST_VISITORS = 4096
MOST_UNGREETED = 64  # a new visitor takes the place of the oldest of these
IDLE_SECONDS, PROBE_SECONDS, PROBES = 5, 2, 3
GRACE_TICK_SECONDS = 0.005
PAUSE_SECONDS = 0.2  # before the next accept, where the system has no descriptor left


class PulseServer:
    """The owner's side: greets visitors and keeps their connections, on one thread."""

    def __init__(self, host: str) -> None:
        self.token, self.incarnation = (secrets.token_bytes(TOKEN_BYTES) for _ in range(2))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, 0), family=family, backlog=128)
        except OSError as error:
            raise TransferError(
                f"cannot listen on {host}: {error}; `host` must be an address of this machine"
            ) from None
        self._listener = ours_alone(listener)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._waker, self._woken = (ours_alone(end) for end in socket.socketpair())
        # what each one has said, and until when it must have greeted: 0 once it has
        self._visitors: dict[socket.socket, tuple[bytes, float]] = {}
        self._short = False  # the last one could not be accepted
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._loop, name="kvferry-pulse", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Visitors see that this carrier is being closed, and no new ones are greeted."""
        self._wake(LEAVE)

    def close(self) -> None:
        """Visitors see that this carrier is gone. Idempotent."""
        self._wake(END)
        if self._thread is not threading.current_thread():
            self._thread.join(GREETING_SECONDS)
        self._waker.close()

    def _wake(self, what: bytes) -> None:
        with contextlib.suppress(OSError):  # closed already, or this is a forked child
            self._waker.send(what)

    def _loop(self) -> None:
        try:
            with self._selector, self._woken:
                self._selector.register(self._listener, selectors.EVENT_READ)
                self._selector.register(self._woken, selectors.EVENT_READ)
                self._greet_and_keep()
        finally:
            for one in (self._listener, *self._visitors):
                hang_up(one)
            self._visitors.clear()

    def _greet_and_keep(self) -> None:
        while True:
            look_again = any(until for _, until in self._visitors.values())
            found = self._selector.select(GREETING_LOOK_SECONDS if look_again else None)
            ready: list[Any] = [key.fileobj for key, _ in found]
            if self._woken in ready:
                if END in self._woken.recv(16):
                    return
                self._say_goodbye()
                continue
            for one in ready:
                if one is self._listener:
                    self._welcome()
                elif one in self._visitors:  # a newer one may have taken its place just now
                    self._hear(one)
            now = time.monotonic()
            for one, (_, until) in list(self._visitors.items()):
                if until and until < now:
                    self._drop(one)

    def _say_goodbye(self) -> None:
        if self._listener.fileno() < 0:  # it was said before
            return
        self._selector.unregister(self._listener)
        hang_up(self._listener)
        for visitor, (_, until) in list(self._visitors.items()):
            with contextlib.suppress(OSError):
                if not until:  # it has greeted
                    visitor.send(GOODBYE)
                    continue
            self._drop(visitor)

    def _welcome(self) -> None:
        try:
            visitor, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it has left again
            return
        except OSError as error:  # it still waits, and would be seen again at once
            level = logging.DEBUG if self._short else logging.WARNING
            log.log(level, "no pulse connection is accepted for a while: %s", error)
            self._short = True
            time.sleep(PAUSE_SECONDS)
            return
        self._short = False
        ours_alone(visitor)
        if len(self._visitors) >= MOST_VISITORS:
            hang_up(visitor)
            return
        ungreeted = [one for one, (_, until) in self._visitors.items() if until]
        if len(ungreeted) >= MOST_UNGREETED:
            self._drop(ungreeted[0])
        try:
            visitor.setblocking(False)
            _keep_alive(visitor)
            self._selector.register(visitor, selectors.EVENT_READ)
        except OSError as error:
            log.debug("a pulse connection failed: %s", error)
            hang_up(visitor)
            return
        self._visitors[visitor] = (b"", time.monotonic() + GREETING_SECONDS)

    def _hear(self, visitor: socket.socket) -> None:
        heard, until = self._visitors[visitor]
        expected = MAGIC + self.token
        try:
            got = visitor.recv(len(expected) + 1)
            heard += got
            if got and until and len(heard) < len(expected):
                self._visitors[visitor] = (heard, until)
                return
            if got and until and hmac.compare_digest(heard, expected):
                self._visitors[visitor] = (b"", 0.0)
                visitor.send(self.incarnation)
                return
        except OSError as error:
            log.debug("a pulse connection failed: %s", error)
        self._drop(visitor)  # it has ended, or says something else

    def _drop(self, visitor: socket.socket) -> None:
        del self._visitors[visitor]
        self._selector.unregister(visitor)
        hang_up(visitor)


class Liveness:
    """The visitor's side: asked before, during and after transfers; has no thread."""

    def __init__(self, connection: socket.socket, where: str) -> None:
        self._connection, self._where = connection, where
        self._lock = threading.Lock()
        self._lost = self._gone = False
        self._words = select.poll()  # silence costs no exception, as `recv` would make one
        self._words.register(connection, select.POLLIN)

    @classmethod
    def connect(
        cls, host: str, port: int, token: bytes, incarnation: bytes, deadline: float
    ) -> Liveness:
        where = f"{host}:{port}"
        connection = ours_alone(dial(host, port, deadline))
        with contextlib.ExitStack() as unless_greeted:
            unless_greeted.callback(connection.close)
            try:
                _keep_alive(connection)
                connection.sendall(MAGIC + token)
                answer = b""
                while len(answer) < TOKEN_BYTES:
                    connection.settimeout(max(0.001, deadline - time.monotonic()))
                    got = connection.recv(TOKEN_BYTES - len(answer))
                    if not got:
                        raise PeerLost(f"{where} is not the peer any more: it has another token")
                    answer += got
            except TimeoutError:
                raise DeadlineExceeded(f"{where} does not greet in time") from None
            except OSError as error:
                raise PeerLost(f"{where} closed the connection: {error}") from None
            if not hmac.compare_digest(answer, incarnation):
                raise PeerLost(f"{where} is not the peer any more: it restarted")
            unless_greeted.pop_all()
        connection.setblocking(False)
        return cls(connection, where)

    def alive(self, grace_seconds: float = 0.0) -> bool:
        """Whether the peer is there; looks for its end for that long."""
        until = time.monotonic() + grace_seconds
        while not self._look():
            if time.monotonic() >= until:
                return True
            time.sleep(GRACE_TICK_SECONDS)
        return False

    def gone(self) -> bool:
        """Whether the connection has ended: nothing that the peer began is under way any more."""
        if not self._look():
            return False
        with self._lock:
            try:
                while not self._gone:
                    self._gone = not self._connection.recv(16)
            except ConnectionResetError:
                self._gone = True
            except OSError:  # silence after a goodbye, an outage, or we have left
                pass
            return self._gone

    def require_alive(self) -> None:
        if self._look():
            raise PeerLost(f"the peer at {self._where} is gone: it died or closed its carrier")

    def close(self) -> None:
        with self._lock:
            self._lost = True
            hang_up(self._connection)

    def _look(self) -> bool:
        """Whether the end was seen; any word but silence is one."""
        with self._lock:
            if self._connection.fileno() < 0:  # in a forked child: it is the parent's
                self._lost = True
            if not self._lost:
                try:
                    self._lost = bool(self._words.poll(0))
                except InterruptedError:
                    pass
                except OSError:
                    self._lost = True
            return self._lost


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
