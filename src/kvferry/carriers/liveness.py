# SPDX-License-Identifier: Apache-2.0
"""Whether a peer still lives, told by one idle TCP connection.

The data planes of libraries say late, vaguely or never that a peer is gone. So the owner of memory
listens beside them, and a visitor keeps its connection open. The kernel closes it when the process
ends, however it ends; keep-alive notices a host that vanishes within
`IDLE_SECONDS + KEEPALIVE_PROBES * PROBE_SECONDS`. This is all that is ever sent on it:

    visitor  -> owner    MAGIC, the token that the endpoint names
    owner    -> visitor  the incarnation that the endpoint names
    owner    -> visitor  GOODBYE, where its carrier is being closed

A visitor that reads a goodbye, or anything else, takes the peer for lost. Bytes of the peer may
still be under way then. None are once the connection has ended, because an owner closes it after
its library. Another process that gets the same port later knows neither token nor incarnation.

No forked child keeps a copy of these sockets (`ours_alone`), and `hang_up` ends all copies.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import select
import socket
import threading
import time
from typing import Annotated

import msgspec

from kvferry.errors import DeadlineExceeded, PeerLost, TransferError
from kvferry.net.guests import Guest, GuestServer
from kvferry.net.names import dial, hang_up, keep_alive, ours_alone

MAGIC = b"kvferry-liveness-1\n"
GOODBYE = b"\n"
TOKEN_BYTES = 16
Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
GREETING_SECONDS = 5.0  # a visitor that has not greeted by then is sent away
MOST_VISITORS = 4096
IDLE_SECONDS, PROBE_SECONDS = 5, 2
GRACE_TICK_SECONDS = 0.005


class LivenessServer(GuestServer):
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
        self.port = int(listener.getsockname()[1])
        super().__init__(listener, "kvferry-liveness")

    def leave(self) -> None:
        """Tell visitors that this carrier is being closed, and greet no new ones."""
        self.soon(self._say_goodbye)

    async def serve(self, guest: Guest) -> None:
        if len(self.guests) > MOST_VISITORS:
            return
        keep_alive(guest.connection, IDLE_SECONDS, PROBE_SECONDS)
        expected = MAGIC + self.token
        async with asyncio.timeout(GREETING_SECONDS):
            while len(guest.received) < len(expected):
                got = await self.receive(guest, len(expected) + 1)
                if not got:
                    return
                guest.received += got
        if hmac.compare_digest(guest.received, expected):
            guest.pending = False
            await self._loop.sock_sendall(guest.connection, self.incarnation)
            await self.receive(guest, 1)  # until the visitor leaves, or says anything

    def _say_goodbye(self) -> None:
        if self.stop_listening():
            for guest, task in self.guests.items():
                with contextlib.suppress(OSError):
                    if not guest.pending:
                        guest.connection.send(GOODBYE)
                        continue
                task.cancel()


class Liveness:
    """The visitor's side. Carriers ask it before, during and after transfers. It has no thread."""

    def __init__(self, connection: socket.socket, where: str) -> None:
        self._connection, self._where = connection, where
        self._lock = threading.Lock()
        self._lost = self._gone = False
        self._words = select.poll()  # raises no exception while the peer is silent
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
                keep_alive(connection, IDLE_SECONDS, PROBE_SECONDS)
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
        """Whether the peer lives. Watches for its end for `grace_seconds`."""
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
            except OSError:  # silence after a goodbye, a network error, or our own `close`
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
        """Whether the peer's end was seen. Any byte from the peer counts as its end."""
        with self._lock:
            if self._connection.fileno() < 0:  # a forked child, which closed its copy
                self._lost = True
            if not self._lost:
                try:
                    self._lost = bool(self._words.poll(0))
                except InterruptedError:
                    pass
                except OSError:
                    self._lost = True
            return self._lost
