"""Host names, resolved on threads that nobody else needs.

libzmq resolves names on its one I/O thread, and `getaddrinfo` has no deadline: a request that names
a host whose name server is slow would hold up every message of the process. So whoever connects
asks here first, and connects to an address. An address is taken as it is, without a thread, and so
is `localhost`: servers without a host listen on IPv4's loopback.

    asked --a thread is free--> looked up --> its addresses, in the system's order, or why not
      '----nobody waits any more when its turn comes--> not looked up

A name that many ask for is looked up once at a time, and anew for everyone who asks later: where a
name points may change. A lookup cannot be stopped; it may keep its thread, of which there are a few
and which no process waits for at its end. Names then wait for the others, or for their deadline;
addresses, and connections that are made already, never do.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from kvferry.errors import AuthenticationError, DeadlineExceeded, HandoverError, PeerLost
from kvferry.net.keys import HOW_TO_MAKE_ONE
from kvferry.workers import Threads

log = logging.getLogger("kvferry")

MOST_THREADS = 16  # a lookup that times out takes glibc 10 s for each name server
MOST_QUEUED = 4096  # names that wait for a thread; more are refused at once
MOST_ADDRESSES = 8  # of one name, that are tried one after the other
LOCALHOST = "127.0.0.1"
BUSY = "too many others are being resolved"


Admits = Callable[[str], bool]  # whether a host may be dialed, by what it is called


def is_loopback(host: str) -> bool:
    address = literal(host)
    return address is not None and ipaddress.ip_address(address).is_loopback


@dataclass(frozen=True, slots=True)
class Reach:
    """Where this engine may listen, and whom it may dial: by names and addresses that peers tell.

    Without a configured secret both are loopback's alone. `admits` narrows what is dialed
    (`peers` of an engine's configuration); nothing is resolved to find out.
    """

    configured: bool  # whether there is a secret
    admits: Admits | None = None

    def require(self, host: str) -> None:
        """Refuse to dial a host."""
        if not self.configured and not is_loopback(host):
            raise AuthenticationError(
                f"the peer {host!r:.80} is on another host, and no secret is configured; set the "
                "same secret on both engines"
            )
        if self.admits is not None and not self.admits(host):
            raise AuthenticationError(
                f"the peer {host!r:.80} is not among the hosts that `peers` names"
            )

    def require_listening(self, host: str) -> None:
        """Refuse to listen on a network without a secret."""
        if not self.configured and not is_loopback(host):
            raise AuthenticationError(
                f"cannot listen on {host} without a secret: whoever reaches it could read and "
                f"write KV caches. Configure `secret_file` on all engines ({HOW_TO_MAKE_ONE}), or "
                "leave `host` out, for engines of one user on one host"
            )


def literal(host: str) -> str | None:
    """The address that a host is written as, without brackets; None where it is a name."""
    if host == "localhost":
        return LOCALHOST
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        return None
    return bare


def at_port(address: str, port: str | int) -> str:
    """Of an address without brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def look_up(host: str) -> tuple[str, ...]:
    """The addresses of a name, the one to try first first; takes as long as the system does."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(where[0]) for *_, where in found))[:MOST_ADDRESSES]


@dataclass(slots=True, eq=False)
class _Question:
    host: str
    deadline: float  # of whoever waits longest
    answer: Future[tuple[str, ...]] = field(default_factory=Future)


class Names:
    """Looks names up. Any method, from any thread; none waits but `resolved`."""

    def __init__(self, look_up: Callable[[str], tuple[str, ...]] = look_up) -> None:
        self._look_up = look_up
        self._lock = threading.Lock()
        self._asked: dict[str, _Question] = {}  # queued or looked up now
        self._most_asked = MOST_THREADS + MOST_QUEUED
        self._threads = Threads("kvferry-names", MOST_THREADS)

    def ask(self, host: str, deadline: float) -> Future[tuple[str, ...]]:
        """A name's addresses, or `PeerLost`. May be late: the caller watches its deadline."""
        with self._lock:
            question = self._asked.get(host)
            if question is not None:
                question.deadline = max(question.deadline, deadline)
                return question.answer
            question, problem = _Question(host, deadline), BUSY
            if len(self._asked) < self._most_asked:
                try:
                    self._threads.submit(partial(self._answer, question))
                    self._asked[host] = question
                    return question.answer
                except HandoverError as error:
                    problem = str(error)
        question.answer.set_exception(_unresolved(host, problem))
        return question.answer

    def resolved(self, host: str, deadline: float) -> tuple[str, ...]:
        """The same for one who may wait; a host that is an address already is that."""
        address = literal(host)
        if address is not None:
            return (address,)
        try:
            return self.ask(host, deadline).result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise DeadlineExceeded(f"the host name {host!r:.80} was not resolved in time") from None

    def _answer(self, question: _Question) -> None:
        """By one of the threads."""
        with self._lock:
            late = question.deadline <= time.monotonic()
            if late:
                del self._asked[question.host]  # whoever asks from now on asks anew
        found: tuple[str, ...] = ()
        error = BUSY
        if not late:
            try:
                found, error = self._look_up(question.host), "it has no address"
            except (OSError, UnicodeError, ValueError) as problem:
                error = str(problem)
            except Exception as problem:  # ours: whoever waits is told
                log.exception("the host name %r could not be resolved", question.host)
                error = repr(problem)
            with self._lock:
                del self._asked[question.host]
        if found:
            question.answer.set_result(found)
        else:
            question.answer.set_exception(_unresolved(question.host, error))


def dial(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to the first address of a host at which somebody listens, by the deadline.

    Raises what connecting does (`OSError`; `ValueError` of what is no address), or `PeerLost` and
    `DeadlineExceeded` of a name.
    """
    found = NAMES.resolved(host, deadline)
    problem: Exception = TimeoutError("it was not reached in time")
    for number, address in enumerate(found):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:  # one that drops what it is sent leaves time for the others
            return socket.create_connection((address, port), left / (len(found) - number))
        except OSError as error:
            problem = error
    raise problem


def _unresolved(host: str, why: str) -> PeerLost:
    return PeerLost(f"the host name {host!r:.80} cannot be resolved: {why}")


NAMES = Names()  # of this process: its threads are bounded together
