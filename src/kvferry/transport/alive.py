"""Whether another process of this host still lives: a connection that it holds open.

Who owns memory listens (`Beacon`), and tells peers where and with which two tokens (`Sign`). A peer
connects, says the first token and hears the second, so that another program that has got the port
cannot be taken for the owner. From then on nothing is said: when the owner dies or closes, the
kernel ends the connection, and `Watch.require` raises. Looking costs one system call.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import threading
import time

import msgspec

from kvferry.errors import DeadlineExceeded, PeerLost, TransferError

TOKEN_BYTES = 16
MOST_CONNECTIONS = 4096
HANDSHAKE_SECONDS = 5.0  # for a connection to say its token
STOP_SECONDS = 5.0


class Sign(msgspec.Struct, frozen=True, array_like=True):
    """Where an owner can be watched."""

    host: str
    port: int
    question: bytes
    answer: bytes

    def valid(self) -> bool:
        return len(self.question) == TOKEN_BYTES == len(self.answer) and 0 < self.port < 65536

    def watch(self, deadline: float) -> Watch:
        """Connect to the owner; `PeerLost` where it is gone."""
        where = f"{self.host}:{self.port}"
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"no time left to connect to {where}")
        try:
            sock = socket.create_connection((self.host, self.port), timeout=left)
        except TimeoutError:
            raise DeadlineExceeded(f"{where} did not answer by the deadline") from None
        except OSError as error:
            raise PeerLost(f"the peer is gone: nobody listens at {where} ({error})") from None
        try:
            sock.sendall(self.question)
            heard = b""
            while len(heard) < TOKEN_BYTES and (some := sock.recv(TOKEN_BYTES - len(heard))):
                heard += some
            if not hmac.compare_digest(heard, self.answer):
                raise PeerLost(f"another program listens at {where} now: the peer restarted")
            sock.setblocking(False)
        except TimeoutError:
            sock.close()
            raise DeadlineExceeded(f"{where} did not answer by the deadline") from None
        except OSError as error:
            sock.close()
            raise PeerLost(f"the peer at {where} is gone: {error}") from None
        except BaseException:
            sock.close()
            raise
        return Watch(sock, where)


class Watch:
    """One side of the connection: whether the other is still there. From any thread."""

    def __init__(self, sock: socket.socket, where: str) -> None:
        self._sock, self._where = sock, where
        self._lost = ""

    def require(self) -> None:
        """Raise `PeerLost` unless the owner lives and has not closed."""
        if not self._lost:
            try:
                some = self._sock.recv(1)
                self._lost = "it says what it should not" if some else "it died or closed"
            except BlockingIOError:
                return
            except OSError as error:
                self._lost = str(error)
        raise PeerLost(f"the peer at {self._where} is gone: {self._lost}. Ask for its new endpoint")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()


class Beacon:
    """The owner's end: one thread, which holds all connections open until `stop`."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family, backlog=128)
        except OSError as error:
            raise TransferError(f"cannot listen on {host}: {error}") from None
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        question, answer = (secrets.token_bytes(TOKEN_BYTES) for _ in range(2))
        self.sign = Sign(host, port, question, answer)
        self._wake, self._woken = socket.socketpair()
        self._pending: dict[socket.socket, tuple[bytes, float]] = {}  # heard, until when
        self._known: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._run, name="kvferry-alive", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Peers notice at once. Idempotent."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(HANDSHAKE_SECONDS if self._pending else None):
                    sock = key.fileobj
                    assert isinstance(sock, socket.socket)
                    if sock is self._woken:
                        self._end()
                        return
                    if sock is self._listener:
                        self._accept(selector)
                    elif not self._hear(sock):
                        self._forget(selector, sock)
                now = time.monotonic()
                for sock in [s for s, (_, until) in self._pending.items() if until < now]:
                    self._forget(selector, sock)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it went away, or there is no descriptor left
            time.sleep(0.01)
            return
        if len(self._pending) + len(self._known) >= MOST_CONNECTIONS:
            sock.close()
            return
        sock.setblocking(False)
        self._pending[sock] = (b"", time.monotonic() + HANDSHAKE_SECONDS)
        selector.register(sock, selectors.EVENT_READ)

    def _hear(self, sock: socket.socket) -> bool:
        """Whether the connection stays."""
        heard, until = self._pending.get(sock, (b"", 0.0))
        try:
            some = sock.recv(TOKEN_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not some or sock in self._known:  # gone, or talking out of turn
            return False
        heard += some
        if len(heard) < TOKEN_BYTES:
            self._pending[sock] = (heard, until)
            return True
        if not hmac.compare_digest(heard, self.sign.question):
            return False
        try:
            sock.send(self.sign.answer)
        except OSError:
            return False
        del self._pending[sock]
        self._known.add(sock)
        return True

    def _forget(self, selector: selectors.BaseSelector, sock: socket.socket) -> None:
        self._pending.pop(sock, None)
        self._known.discard(sock)
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(sock)
        sock.close()

    def _end(self) -> None:
        for sock in (*self._pending, *self._known, self._listener, self._wake, self._woken):
            sock.close()
        self._pending.clear()
        self._known.clear()
