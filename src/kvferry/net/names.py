# SPDX-License-Identifier: Apache-2.0
"""Host names, resolved on threads of their own, the hosts that an engine may dial, and sockets.

libzmq resolves names on its one I/O thread, and `getaddrinfo` has no deadline. A single host with a
slow name server would hold up every message of the process. So callers resolve a name here, and
connect to an address. An address needs no thread. Neither does `localhost`, which is 127.0.0.1:
servers without a host listen on IPv4's loopback.

    asked --a thread is free--> looked up --> its addresses in the system's order, or an error
      '--its deadline is over before its turn--> an error, without a lookup

Callers that ask for the same name at the same time share one lookup. A later caller gets a new
lookup, because the addresses of a name may change. A lookup cannot be stopped, and may occupy its
thread for long. There are a few such threads; the process does not wait for them when it ends. If
all are occupied, other names wait until their deadline. Addresses and open connections never wait.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from kvferry.errors import (
    AuthenticationError,
    DeadlineExceeded,
    HandoverError,
    PeerLost,
    TransferError,
)
from kvferry.net.keys import HOW_TO_MAKE_ONE
from kvferry.workers import Threads

log = logging.getLogger("kvferry")

MOST_THREADS = 16  # a lookup that times out takes 10 s for each name server (glibc)
MOST_QUEUED = 4096  # names that wait for a thread; further names are refused at once
MOST_ADDRESSES = 8  # addresses of one name that are tried, one after the other
LOCALHOST = "127.0.0.1"
BUSY = "too many others are being resolved"


Admits = Callable[[str], bool]  # whether a host may be dialed, by its name or address


def is_loopback(host: str) -> bool:
    address = literal(host)
    return address is not None and ipaddress.ip_address(address).is_loopback


@dataclass(frozen=True, slots=True)
class Reach:
    """Where this engine may listen, and which hosts it may dial.

    Without a configured secret, both are loopback only. `admits` restricts the hosts further
    (`peers` of an engine's configuration). Hosts are judged as peers name them, without a lookup.
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
        self._threads = Threads("kvferry-names", MOST_THREADS)
        self.begin()

    def begin(self) -> None:
        """Also in a forked child, where no thread answers the questions of its parent."""
        self._lock = threading.Lock()
        self._asked: dict[str, _Question] = {}  # queued or looked up now

    def ask(self, host: str, deadline: float) -> Future[tuple[str, ...]]:
        """A name's addresses, or `PeerLost`. May be late: the caller watches its deadline."""
        with self._lock:
            question = self._asked.get(host) or _Question(deadline)
            question.deadline = max(question.deadline, deadline)
            if host not in self._asked:
                try:
                    if len(self._asked) >= MOST_THREADS + MOST_QUEUED:
                        raise HandoverError(BUSY)
                    question.answer = self._threads.call(partial(self._find, host, question))
                    self._asked[host] = question
                except HandoverError as error:
                    question.answer.set_exception(_unresolved(host, error))
            return question.answer

    def resolved(self, host: str, deadline: float) -> tuple[str, ...]:
        """The addresses of a host, for a caller that may wait. An address is returned as it is."""
        address = literal(host)
        if address is not None:
            return (address,)
        try:
            return self.ask(host, deadline).result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise DeadlineExceeded(f"the host name {host!r:.80} was not resolved in time") from None

    def _find(self, host: str, question: _Question) -> tuple[str, ...]:
        """By one of the threads."""
        with self._lock:
            if question.deadline <= time.monotonic():
                del self._asked[host]  # later callers ask anew
                raise _unresolved(host, BUSY)
        try:
            found = self._look_up(host)
        except (OSError, ValueError) as error:
            raise _unresolved(host, error) from None
        except Exception as error:  # a bug of ours: callers that wait get it
            log.exception("the host name %r could not be resolved", host)
            raise _unresolved(host, repr(error)) from None
        finally:
            with self._lock:
                del self._asked[host]
        if not found:
            raise _unresolved(host, "it has no address")
        return found


@dataclass(slots=True, eq=False)
class _Question:
    deadline: float  # the latest of its callers'
    answer: Future[tuple[str, ...]] = field(default_factory=Future)


def dial(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to the first address of a host that accepts one, by the deadline.

    `DeadlineExceeded`, `PeerLost` if no process listens there, or another `TransferError`.
    """
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
    """The address from which this host sends to another. Asks for a route, and sends nothing.

    `OSError` if the name cannot be resolved or there is no route.
    """
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

    A connection ends, and a port is free, once the last process that has it lets go; while a child
    lived, peers would take its dead parent for alive. A child only closes its copies, which its
    parent does not notice; a shutdown would end them for both. Programs that are started by `exec`
    get none of these descriptors.
    """
    _ours.add(sock)
    return sock


def hang_up(sock: socket.socket) -> None:
    """End the connection, also where another process has a copy of it. Idempotent."""
    with contextlib.suppress(OSError):  # it was not connected any more
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _begin_in_child() -> None:
    NAMES.begin()
    for sock in list(_ours):  # no other thread is here, and nothing is waited for
        with contextlib.suppress(Exception):
            sock.close()


os.register_at_fork(after_in_child=_begin_in_child)


def _unresolved(host: str, why: object) -> PeerLost:
    return PeerLost(f"the host name {host!r:.80} cannot be resolved: {why}")


NAMES = Names()  # one for the process, which bounds its threads
