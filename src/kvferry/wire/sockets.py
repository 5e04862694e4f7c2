"""ZMQ sockets that talk to those who have our key, and to nobody else.

Both ends derive CURVE keys from the secret, or from the key of this user where none is configured
(keys.py): a client reaches only a server with the right key, and the server admits only clients
with the right key, so every message is authenticated, encrypted and cannot be replayed. Without a
secret, servers listen on loopback, and clients do not leave it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from kvferry.errors import HandoverError
from kvferry.units import require_port
from kvferry.wire.keys import Key
from kvferry.wire.messages import MAX_REPLY_BYTES, MAX_REQUEST_BYTES
from kvferry.wire.names import LOCALHOST, NAMES, Admits, Names, Reach

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
