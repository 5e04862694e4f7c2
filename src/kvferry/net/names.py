# SPDX-License-Identifier: Apache-2.0
"""Host names, resolved on threads of their own, the hosts that an engine may dial, and sockets.

libzmq resolves names on its one I/O thread, and `getaddrinfo` has no deadline. A single host with a
slow name server would hold up every message of the process. So callers resolve a name here, and
connect to an address. An address needs no thread. Neither does `localhost`, which is 127.0.0.1:
servers without a host listen on IPv4's loopback.

A lookup cannot be stopped, and may occupy its thread for long. There are a few such threads, of
which one name gets half at most; the process does not wait for them when it ends. If all are
occupied, other names wait, until their callers give them up. Addresses and open connections never
wait.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from kvferry.errors import (
    AuthenticationError,
    DeadlineExceeded,
    KvferryError,
    PeerLost,
    TransferError,
    text_of,
)
from kvferry.net.keys import HOW_TO_MAKE_ONE
from kvferry.workers import Threads

MOST_THREADS = 16  # a lookup that times out takes 10 s for each name server (glibc)
MOST_WAITING = 4096  # lookups that wait for a thread, also cancelled ones; others are refused
MOST_ADDRESSES = 8  # addresses of one name that are tried, one after the other
KEEPALIVE_PROBES = 3
LOCALHOST = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")  # hosts to listen on, and not to dial

Admits = Callable[[str], bool]  # whether a host may be dialed, by its name or address


def is_loopback(host: str) -> bool:
    address = literal(host)
    return address is not None and ipaddress.ip_address(address).is_loopback


@dataclass(frozen=True, slots=True)
class Reach:
    """Where this engine may listen, and which hosts it may dial: without a secret, loopback only.

    `admits` restricts the hosts further (`peers` of an engine's configuration). Hosts are judged as
    peers name them, without a lookup.
    """

    configured: bool  # whether there is a secret
    admits: Admits | None = None

    def require(self, host: str) -> None:
        """Refuse a host that must not be dialed."""
        if not self.configured and not is_loopback(host):
            raise AuthenticationError(
                f"the peer {host!r:.80} is on another host, and no secret is configured; set the "
                "same secret on both engines"
            )
        if self.admits is not None and not self.admits(host):
            raise AuthenticationError(
                f"the peer {host!r:.80} is not among the hosts that `peers` names; add it there"
            )

    def require_listening(self, host: str) -> None:
        """Refuse to listen on a network without a secret."""
        if not self.configured and not is_loopback(host):
            raise AuthenticationError(
                f"cannot listen on {host} without a secret: any process that reaches it could read "
                f"and write KV caches. Configure `secret_file` on all engines ({HOW_TO_MAKE_ONE}), "
                "or leave `host` out, for engines of one user on one host"
            )


def literal(host: str) -> str | None:
    """The host's address without brackets, or None if the host is a name."""
    if host == "localhost":
        return LOCALHOST
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        return None
    return bare


def at_port(address: str, port: str | int) -> str:
    """`address:port`, with brackets around an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def look_up(host: str) -> tuple[str, ...]:
    """The addresses of a name in the order to try them. This call has no deadline."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(where[0]) for *_, where in found))[:MOST_ADDRESSES]


class Names:
    """Looks names up. Any thread may call any method. Only `resolved` waits."""

    def __init__(self, look_up: Callable[[str], tuple[str, ...]] = look_up) -> None:
        self._look_up = look_up
        self._threads = Threads("kvferry-names", MOST_THREADS, most_waiting=MOST_WAITING)

    def ask(self, host: str) -> Future[tuple[str, ...]]:
        """A name's addresses, or `PeerLost`. A caller that leaves before cancels the lookup."""
        try:
            return self._threads.call(partial(self._find, host), lane=host)
        except KvferryError as error:
            refused: Future[tuple[str, ...]] = Future()
            refused.set_exception(_unresolved(host, error))
            return refused

    def resolved(self, host: str, deadline: float) -> tuple[str, ...]:
        """The addresses of a host, for a caller that may wait. An address is returned as it is."""
        address = literal(host)
        if address is not None:
            return (address,)
        asked = self.ask(host)
        try:
            return asked.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            asked.cancel()
            raise DeadlineExceeded(f"the host name {host!r:.80} was not resolved in time") from None

    def _find(self, host: str) -> tuple[str, ...]:
        try:
            found = self._look_up(host)
        except Exception as error:  # a bug of ours too: callers that wait get it
            raise _unresolved(host, text_of(error)) from None
        if not found:
            raise _unresolved(host, "it has no address")
        return found


def dial(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to the first address of a host that accepts one, by the deadline. `PeerLost` if
    no process listens there."""
    found = NAMES.resolved(host, deadline)
    problem: Exception = TimeoutError()
    for number, address in enumerate(found):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:  # an address that never answers leaves time for the others
            return socket.create_connection((address, port), left / (len(found) - number))
        except (OSError, ValueError, OverflowError) as error:
            problem = error
    if isinstance(problem, TimeoutError):
        raise DeadlineExceeded(f"{host}:{port} did not answer by the deadline")
    if isinstance(problem, ConnectionError):
        raise PeerLost(f"no process listens at {host}:{port}: {problem}")
    raise TransferError(f"cannot connect to {host}:{port}: {problem}")


def source_address(host: str, port: int) -> str:
    """The address from which this host sends to another, or `OSError`. Sends nothing."""
    problem = OSError(f"no route to {host}")
    for family, kind, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
        except OSError as error:
            problem = error
    raise problem


_ours: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def ours_alone(sock: socket.socket) -> socket.socket:
    """The same socket, which forked children of this process close.

    A connection ends once the last process that has it lets go; while a child lived, peers would
    take its dead parent for alive. A child only closes its copies: a shutdown would end them for
    both.
    """
    _ours.add(sock)
    return sock


def keep_alive(sock: socket.socket, idle_seconds: int, probe_seconds: int) -> None:
    """Have the kernel end a TCP connection whose other host is silent for `idle_seconds` and after
    that for three probes."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def hang_up(sock: socket.socket) -> None:
    """End the connection, also where another process has a copy of it. Idempotent."""
    with contextlib.suppress(OSError):  # it was not connected any more
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _begin_in_child() -> None:
    for sock in list(_ours):  # no other thread is here, and nothing is waited for
        with contextlib.suppress(Exception):
            sock.close()


os.register_at_fork(after_in_child=_begin_in_child)


def _unresolved(host: str, why: object) -> PeerLost:
    return PeerLost(f"the host name {host!r:.80} cannot be resolved: {why}")


NAMES = Names()  # one for the process, which bounds its threads
