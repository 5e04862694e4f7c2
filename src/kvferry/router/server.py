# SPDX-License-Identifier: Apache-2.0
"""The router's listening sockets: TLS, draining, and a restart that loses no connection.

A router that is told to stop (SIGTERM, SIGINT) closes its listening sockets. Requests in flight go
on, for `drain_seconds`. Idle connections stay for a moment: a client that uses one just then gets
its answer, with `Connection: close`.

A restart hands the listening sockets over. The new router, started with `--take-over`, asks the old
one for them at a Unix socket in this user's private directory:

    new                                     old
    connects                          -->
                                      <--   its listening sockets (SCM_RIGHTS)
    probes its engines
    accepts connections, says "ready" -->
                                            stops accepting, drains, ends

Both have the same sockets, with one queue of connections. So one of them listens at any moment, and
no connection is lost in a closed queue. If the new router fails before it is ready, the old one
goes on.

With TLS, a connection counts, and has its deadline, before the handshake: a client that connects
and says nothing takes one place among connections, like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import socket
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from kvferry.errors import DescriptionError
from kvferry.net.keys import runtime_directory
from kvferry.net.names import at_port
from kvferry.router.clients import ClientConnection, Guard

log = logging.getLogger(__name__)
_HELLO = b"kvferry router 1"
_READY = b"ready"
_STARTUP_FAILURE = 3  # the exit status of uvicorn, which names it elsewhere in each version
_MAX_SOCKETS = 16  # for the addresses of one host name
_HAND_OVER_SECONDS = 30.0  # for either side of a hand-over to do its part
_LINGER_SECONDS = 1.0  # for which idle connections stay when the router drains
_POLL_SECONDS = 0.05
_HINTS = {
    errno.EADDRNOTAVAIL: "; no interface of this host has this address; choose another --host",
    errno.EACCES: "; ports below 1024 need a privilege; choose another --port",
}


@dataclass(frozen=True, slots=True)
class Listen:
    """Where and how the router listens."""

    host: str = "127.0.0.1"
    port: int = 8000
    tls_cert: Path | None = None
    tls_key: Path | None = None
    take_over: bool = False  # from the router that has the port

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise DescriptionError("TLS needs a certificate and its key; name both, or neither")

    def tls(self) -> ssl.SSLContext | None:
        """Raises DescriptionError."""
        if self.tls_cert is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # 1.2 or newer
        try:
            # An encrypted key must not make the router ask at a terminal.
            context.load_cert_chain(self.tls_cert, self.tls_key, password=lambda: "")
        except (OSError, ssl.SSLError, ValueError) as error:
            raise DescriptionError(
                f"cannot use the certificate {self.tls_cert} with the key {self.tls_key}: {error}"
            ) from None
        return context


class RouterServer(uvicorn.Server):
    """uvicorn's server, on sockets that can be taken over and handed over."""

    def __init__(self, settings: uvicorn.Config, listen: Listen, guard: Guard) -> None:
        super().__init__(settings)
        self._listen = listen
        self._guard = guard
        self._door: _Door | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        listen, other = self._listen, None
        mine: list[socket.socket] = []
        if listen.take_over and listen.port:
            mine, other = await asyncio.to_thread(_take_over, listen)
        try:
            mine = mine or _bind(listen.host, listen.port)
        except OSError as error:
            hint = _HINTS.get(error.errno or 0, "")
            if error.errno == errno.EADDRINUSE:
                hint = "; choose another --port"
                if not listen.take_over:
                    hint += ", or --take-over if a kvferry router has it"
            log.error("cannot listen on %s: %s%s", at_port(listen.host, listen.port), error, hint)
            sys.exit(_STARTUP_FAILURE)
        await super().startup(sockets=mine)
        if self.should_exit:  # it was told to stop meanwhile: the other router keeps the port
            return
        port = mine[0].getsockname()[1]
        try:
            self._door = _Door(_door_path(listen.host, port), mine, self._leave)
        except (OSError, DescriptionError) as error:
            log.warning("this router cannot hand its port over: %s", error)
        if other is not None:
            with other:
                try:
                    other.sendall(_READY)
                except OSError as error:  # it ended, or gave up; the port is this router's too
                    log.warning("the other router did not hear that this one is ready: %s", error)
        scheme = "http" if listen.tls_cert is None else "https"
        log.info("the router is running on %s://%s", scheme, at_port(listen.host, port))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._door is not None:
            self._door.close()
        for server in self.servers:
            server.close()
        self._guard.stopping = True  # a handshake may still be under way
        connections: set[ClientConnection] = self.server_state.connections  # type: ignore[assignment]
        for connection in connections:
            connection.drain()
        end = time.monotonic() + _LINGER_SECONDS
        while time.monotonic() < end and any(c.idle for c in connections):
            await asyncio.sleep(_POLL_SECONDS)
        await super().shutdown(sockets)

    def _leave(self) -> None:
        log.info("another router has the port now; this one drains")
        self.should_exit = True


def _bind(host: str, port: int) -> list[socket.socket]:
    """Sockets at all addresses of the host, at one port. Raises OSError."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        sock = socket.socket(family, kind, protocol)  # a protocol: asyncio sets TCP_NODELAY by it
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if bound:  # port 0 means one port for all
            address = (address[0], bound[0].getsockname()[1], *address[2:])
        sock.bind(address)
        bound.append(sock)
        if len(bound) == _MAX_SOCKETS:
            break
    return bound


# Handing over


def _door_path(host: str, port: int) -> Path:
    """The Unix socket of the router that has this port. Raises DescriptionError."""
    return runtime_directory() / f"router-{host.replace('/', '_') or '*'}-{port}"


def _take_over(listen: Listen) -> tuple[list[socket.socket], socket.socket | None]:
    """Ask the router with this port for its sockets. Called on a thread.

    Returns them, and the connection on which to say that this router is ready; None: there is no
    such router.
    """
    door = socket.socket(socket.AF_UNIX)
    door.settimeout(_HAND_OVER_SECONDS)
    try:
        door.connect(str(_door_path(listen.host, listen.port)))
        said, numbers, _, _ = socket.recv_fds(door, 64, _MAX_SOCKETS)
        taken = [socket.socket(fileno=number) for number in numbers]
        if said != _HELLO or not taken:
            for sock in taken:
                sock.close()
            raise OSError(f"it said {said!r:.60}, with {len(taken)} sockets")
    except (OSError, DescriptionError) as error:
        door.close()
        log.warning("there is no router to take over from, this one listens by itself: %s", error)
        return [], None
    log.info("taking over from the router at port %d", listen.port)
    return taken, door


class _Door:
    """The Unix socket at which a router hands its sockets over, in place of an older one."""

    def __init__(self, path: Path, mine: list[socket.socket], leave: Callable[[], None]) -> None:
        """`leave` is called when another router has them. Raises OSError."""
        self._path = path
        self._door = socket.socket(socket.AF_UNIX)
        part = path.with_name(f".{secrets.token_hex(4)}")
        try:
            self._door.bind(str(part))  # the directory is this user's alone
            self._door.listen(4)
            self._door.setblocking(False)
            part.rename(path)
        except OSError:
            self._door.close()
            part.unlink(missing_ok=True)
            raise
        self._inode = path.stat().st_ino
        self._task = asyncio.create_task(self._serve(mine, leave))

    def close(self) -> None:
        self._task.cancel()
        self._door.close()
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:  # not the next router's
                self._path.unlink()

    async def _serve(self, mine: list[socket.socket], leave: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            other, _ = await loop.sock_accept(self._door)
            with other:
                try:
                    other.setblocking(False)
                    socket.send_fds(other, [_HELLO], [sock.fileno() for sock in mine])
                    async with asyncio.timeout(_HAND_OVER_SECONDS):
                        said = await loop.sock_recv(other, len(_READY))
                except OSError as error:  # also a TimeoutError
                    log.warning("a hand-over of the port came to nothing: %s", error)
                    continue
            if said == _READY:
                leave()
                return


# TLS


class TlsConnection(ClientConnection):
    """A client's connection that begins with a TLS handshake; a subclass names the context."""

    context: ssl.SSLContext
    handshake_seconds: float

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._handshake: asyncio.Task[None] | None = None
        self._early: list[bytes] | None = []  # came with the end of the handshake; None: it is over

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.admit(transport)
        if self.transport.is_closing():  # not admitted
            return
        self.transport.pause_reading()  # until the handshake reads
        self._handshake = self.loop.create_task(self._shake_hands(self.transport))

    def data_received(self, data: bytes) -> None:
        if self._early is None:
            super().data_received(data)
        else:
            self._early.append(data)

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        try:
            made = await self.loop.start_tls(
                transport,
                self,
                self.context,
                server_side=True,
                ssl_handshake_timeout=self.handshake_seconds,
            )
        except OSError:  # also ssl.SSLError: not a client of ours
            made = None
        if made is None or made.is_closing():
            transport.abort()
            self.guard.forget(self)  # asyncio does not tell of one that is lost in its handshake
            return
        self.transport = made
        self.opened()
        early, self._early = self._early or [], None
        for data in early:
            self.data_received(data)
