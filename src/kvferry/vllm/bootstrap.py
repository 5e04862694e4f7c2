# SPDX-License-Identifier: Apache-2.0
"""How two engines that got a request at the same time find each other, without a ticket.

In Mooncake style, a proxy knows an address for each prefill server. It sends `GET /query` there,
and gets engine ids by data-parallel rank. It sends one id, the address and a transfer id to the
decode engine, which asks the same address for that engine's directory. `Bootstrap` is such a
server:

    GET  /query     {"0": {"engine_id": …, "worker_addr": {}, "kvferry": {host, port, incarnation}}}
    POST /register  from data-parallel ranks that have no server of their own; its body is
                    authenticated by an HMAC in the header X-Kvferry-Mac

Any process may connect: the HTTP server bounds the resources that a connection can take. Registered
entries are bounded by the size that a client reads, and never replace the engine's own entry.

In the style of NixlPushConnector's proxy, the request names the directory itself, but no
incarnation. On the decode engine, `Rendezvous` asks the bootstrap or the directory.

An answer becomes an ordinary ticket. Both engines derive the hold's id from the producer's
incarnation and the name that both have for the request. The digest is of the consumer's own prompt.

An answer is only a hint. The directory that it names must first prove that it knows the secret, and
with a wrong incarnation every claim is stale.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import io
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Annotated, Any, cast

import msgspec

from kvferry.errors import (
    AuthenticationError,
    HandoverError,
    KvferryError,
    ProtocolError,
    TransferError,
)
from kvferry.handover.deadline import Deadline
from kvferry.handover.describe import read_shape
from kvferry.handover.peers import Meetings, PeerKey, ask_directory
from kvferry.handover.ticket import NO_TICKET, Ticket, is_host, is_text
from kvferry.layout.shape import EngineShape
from kvferry.net.http import HttpAnswer, HttpRequest, HttpServer
from kvferry.net.keys import Key
from kvferry.net.messages import EngineInfo, Refused, Welcome
from kvferry.net.names import Reach, at_port, dial, literal
from kvferry.net.rpc import Caller, Sockets
from kvferry.units import MOST_PORT, require_port
from kvferry.vllm.config import FerryConfig, Style, host_port

log = logging.getLogger("kvferry")

MOST_BYTES = 1 << 20  # of a message; an engine of a thousand ranks has less
MAC = "X-Kvferry-Mac"
PURPOSE = "bootstrap"  # of the key that authenticates registrations
MOST_ENTRIES = MOST_BYTES - (1 << 10)  # of all registrations; the rest is for an answer's head
MOST_RANKS = 4096  # data-parallel
TELL_AGAIN_SECONDS = 1.0  # from a failed registration to the next attempt
REFRESH_SECONDS = 30.0  # the server may have restarted, and then knows nothing
FRESH_SECONDS = 1.0  # after this time, `Rendezvous` asks anew
PATIENCE_SECONDS = 0.2  # for the new answer, before the last one is used
KEEP_SECONDS = 300.0  # an answer is used no longer than this
MOST_KEPT = 4096  # answers
CHILD = re.compile(r"^\d+_")  # vLLM's request ids of the samples of one `n > 1` request
SUFFIX = re.compile(r"-[0-9a-f]{8}$")  # that vLLM adds to each id


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where an engine's directory is."""

    engine_id: str
    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=MOST_PORT)]
    incarnation: str

    def entry(self, ranks: Mapping[int, Mapping[int, str]]) -> dict[str, Any]:
        ours = {"host": self.host, "port": self.port, "incarnation": self.incarnation}
        return {"engine_id": self.engine_id, "worker_addr": ranks, "kvferry": ours}

    @classmethod
    def read(cls, entry: Mapping[str, Any], address: str) -> Whereabouts:
        """Read and check an engine's entry. Any server may have sent it."""
        ours = entry.get("kvferry")
        if not isinstance(ours, dict):
            raise ProtocolError(
                f"the engine at {address} runs vLLM's own MooncakeConnector, which does not speak "
                "kvferry's protocol; run kvferry's connector on both sides"
            )
        with contextlib.suppress(msgspec.ValidationError):
            found = msgspec.convert({**ours, "engine_id": entry.get("engine_id")}, cls)
            if is_text(found.engine_id) and is_host(found.host) and is_text(found.incarnation):
                return found
        raise ProtocolError(f"the entry of an engine at {address} is damaged: {entry!r:.200}")


@dataclass(frozen=True, slots=True)
class BootstrapPlace:
    """Where to ask for a producer, and what to ask for."""

    engine_id: str
    address: str  # of a bootstrap or of a directory
    bootstrap: bool


@dataclass(frozen=True, slots=True)
class Appointment:
    """The producer that a request named, and the name by which both engines know the request."""

    place: BootstrapPlace
    name: str


def appointment(params: Mapping[str, Any], request_id: str, style: Style) -> Appointment:
    """The producer that a request without a ticket names; raises if it names none."""
    name = transfer_name(params, request_id, style)
    engine_id = params.get("remote_engine_id")
    if name is not None and isinstance(engine_id, str) and is_text(engine_id):
        if name.startswith("transfer ") and params.get("remote_bootstrap_addr"):
            host, port = host_port(params["remote_bootstrap_addr"])
            return Appointment(BootstrapPlace(engine_id, at_port(host, port), True), name)
        directory = _directory(params) if style == "push" else None
        if directory is not None and not params.get("remote_block_ids"):
            return Appointment(BootstrapPlace(engine_id, directory, False), name)
    if params.get("remote_block_ids"):
        raise ProtocolError(
            "it comes with block ids of vLLM's own NixlConnector, and holds no kvferry ticket; run "
            "kvferry's connector on the prefill engine too"
        )
    if params.get("transfer_id"):
        raise ProtocolError(
            "it names a transfer_id, but not remote_engine_id and remote_bootstrap_addr; this is "
            f"the {style} style: the proxy and both engines must use the same"
        )
    raise ProtocolError(NO_TICKET)


def transfer_name(params: Mapping[str, Any], request_id: str, style: Style) -> str | None:
    """The name by which producer and consumer know a request; None: they need a ticket."""
    if style in ("mooncake", "ferry") and params.get("transfer_id"):
        name = params["transfer_id"]
        if not is_text(name):
            raise ProtocolError("transfer_id must be a text of at most 512 characters")
        return f"transfer {name}"
    if style == "push":
        return f"request {SUFFIX.sub('', CHILD.sub('', request_id))}"
    return None


def derived_hold(incarnation: str, name: str) -> str:
    return hashlib.sha256(f"{incarnation}\n{name}".encode()).hexdigest()


class Rendezvous:
    """Finds the producer of a request without a ticket.

    A thread asks. The scheduler looks for the answer whenever vLLM asks about the request, and
    never waits. An answer serves the requests of the next second. Then a thread asks again, because
    the engine may have been reset or restarted. If no new answer comes soon, the older one serves.
    Clients name these addresses, and some may be silent: `Meetings` bounds the threads and the time
    that they take.
    """

    def __init__(
        self, config: FerryConfig, sockets: Sockets, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` measures the age of answers. One thread, the scheduler's, calls `find`, `shape`
        and `forget`."""
        self._clock = clock
        self._reach = Reach(config.secret is not None, config.admits)
        self._sockets = sockets
        self._caller: Caller | None = None
        self._engine: EngineInfo | None = None
        self._told = threading.Event()  # set by `introduce`
        self._closed = False
        self._meetings = Meetings("kvferry-rendezvous", config.bootstrap_seconds)
        self._lock = threading.Lock()
        self._asked: dict[BootstrapPlace, _Asked] = {}
        self._shapes: dict[PeerKey, EngineShape] = {}

    def introduce(self, engine: EngineInfo) -> None:
        """Set this engine's description, which directories ask for."""
        self._engine = engine
        self._told.set()

    def find(self, place: BootstrapPlace) -> Whereabouts | None:
        """A producer, or None while a thread asks for it. Raises if it cannot be found. If there
        is no answer at all, the last one serves."""
        now = self._clock()
        asked = self._asked.get(place)
        if asked is None:
            if len(self._asked) >= MOST_KEPT:
                self._asked.pop(next(iter(self._asked)))
            asked = self._asked[place] = _Asked(now, self._ask(place))
        if asked.answer.done():
            error = asked.answer.exception()
            if error is None:
                asked.known = asked.answer.result()
            elif asked.last(now) is None or type(error) is not HandoverError:
                del self._asked[place]  # the next request asks again
                raise error
            assert asked.known is not None
            if now <= max(asked.at, asked.known[0]) + FRESH_SECONDS:
                return asked.known[1]
            asked.at, asked.answer = now, self._ask(place)
        return asked.last(now) if now > asked.at + PATIENCE_SECONDS else None

    def shape(self, ticket: Ticket, since: float) -> EngineShape | None:
        """The shape of a ticket's engine, or None while a thread asks for it. Raises if the engine
        cannot be found or the ticket is stale. `since`: when the ticket came; an older answer may
        be of an earlier incarnation.
        """
        place = BootstrapPlace(ticket.engine_id, ticket.directory, bootstrap=False)
        key = PeerKey.of(ticket)
        if key not in self._shapes:
            found = self.find(place)
            if found is not None and found.incarnation != ticket.incarnation:
                asked = self._asked.get(place)
                if asked is not None and asked.at >= since and asked.answer.done():
                    raise HandoverError(
                        f"engine {ticket.engine_id!r:.80} was restarted or reset since it issued "
                        "the ticket"
                    )
                self.forget(place)
        return self._shapes.get(key)

    def forget(self, place: BootstrapPlace) -> None:
        """Drop the answer for this place, so that the next request asks again."""
        asked = self._asked.get(place)
        if asked is not None and asked.answer.done():
            del self._asked[place]

    def _ask(self, place: BootstrapPlace) -> Future[tuple[float, Whereabouts]]:
        answer: Future[tuple[float, Whereabouts]] = Future()

        def ask(seconds: float) -> None:
            found = self._found_at(place, seconds)
            answer.set_result((self._clock(), found))

        try:
            self._reach.require(place.address.rsplit(":", 1)[0])
            self._meetings.submit(place.address, ask, answer.set_exception)
        except AuthenticationError as error:
            answer.set_exception(error)
        except KvferryError as error:  # no more threads, too many questions, or we are closed
            answer.set_exception(HandoverError(f"{place.address} cannot be asked: {error}"))
        return answer

    def _found_at(self, place: BootstrapPlace, seconds: float) -> Whereabouts:
        if place.bootstrap:
            found = query(place.address, place.engine_id, seconds)
        else:
            found = self._hello(place, seconds)
        self._reach.require(found.host)
        return found

    def _hello(self, place: BootstrapPlace, seconds: float) -> Whereabouts:
        watch = Deadline(time.monotonic() + seconds)
        if not self._told.wait(seconds) or self._engine is None:
            raise HandoverError("this engine's workers have not described themselves")
        with self._lock:
            if self._closed:  # `Meetings` still runs questions that waited
                raise HandoverError("kvferry is shutting down")
            if self._caller is None:
                self._caller = Caller(self._sockets)
        reply = ask_directory(self._caller, place.address, self._engine, watch, seconds)
        if isinstance(reply, Refused):
            raise HandoverError(f"the engine at {place.address} refuses us: {reply.message}")
        if not isinstance(reply, Welcome):
            raise HandoverError(f"{place.address} answered a hello with {type(reply).__name__}")
        if reply.engine.engine_id != place.engine_id:
            raise HandoverError(
                f"the request names engine {place.engine_id!r:.80}, and at {place.address} is "
                f"{reply.engine.engine_id!r:.80}"
            )
        host, port = place.address.rsplit(":", 1)
        while len(self._shapes) >= MOST_KEPT:
            self._shapes.pop(next(iter(self._shapes)))
        key = PeerKey(place.engine_id, reply.engine.incarnation, place.address)
        self._shapes[key] = read_shape(reply.engine)
        return Whereabouts(place.engine_id, host, int(port), reply.engine.incarnation)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._told.set()
        self._meetings.close()
        if self._caller is not None:
            self._caller.close()


class Bootstrap:
    """A server for one engine, and for those that register with it."""

    def __init__(self, host: str | None, port: int, secret: str | None) -> None:
        self._entries: dict[str, dict[str, Any]] = {}  # by data-parallel rank
        self._own = ""  # the rank of this engine
        self._answer = HttpAnswer.of(200, {})  # to a query
        self._lock = threading.Lock()
        key = Key.of(secret)
        self._key = key.derive(PURPOSE)
        if host is not None:
            Reach(key.configured).require_listening(host)
        where = "127.0.0.1" if host is None else literal(host) or host
        family = socket.AF_INET6 if ":" in where else socket.AF_INET
        try:
            listener = socket.create_server(
                (where, require_port(port)), family=family, backlog=1024
            )
        except OSError as error:
            raise HandoverError(
                f"the bootstrap cannot listen at {at_port(where, port)}: {error}; set host to an "
                "address of this host, and bootstrap_port (or VLLM_MOONCAKE_BOOTSTRAP_PORT) to a "
                "free port"
            ) from None
        self.port = int(listener.getsockname()[1])
        self._server = HttpServer(listener, self._asked, "kvferry-bootstrap")

    def put(self, dp_rank: int, entry: Mapping[str, Any]) -> None:
        """Set the engine's own entry."""
        with self._lock:
            self._own = str(dp_rank)
            self._put(self._own, entry)

    def _put(self, dp_rank: str, entry: Mapping[str, Any]) -> None:
        """Call it with the lock held."""
        entries = {**self._entries, dp_rank: dict(entry)}
        answer = HttpAnswer.of(200, entries)
        if len(answer.json) > MOST_ENTRIES and dp_rank != self._own:
            raise ProtocolError(
                f"with this registration there would be more than {MOST_ENTRIES} bytes of them"
            )
        self._entries, self._answer = entries, answer

    def _asked(self, asked: HttpRequest) -> HttpAnswer:
        """Answer a request, on the server's thread."""
        if asked.method == "GET" and asked.path == "/query":
            return self._answer
        if asked.method != "POST" or asked.path != "/register":
            return HttpAnswer.of(404, {"detail": "ask GET /query, or POST /register"})
        try:
            self._register(asked.body, asked.headers.get(MAC.lower(), ""))
        except (ProtocolError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return HttpAnswer.of(400, {"detail": str(error)})
        return HttpAnswer.of(200, {"status": "ok"})

    def _register(self, body: bytes, mac: str) -> None:
        told_mac = mac.encode(errors="replace")  # a header may have any characters
        if not hmac.compare_digest(told_mac, _mac(self._key, body).encode()):
            raise ProtocolError(
                "this registration does not prove to know our secret; a worker of vLLM's own "
                "MooncakeConnector knows none: run kvferry's connector on all engines"
            )
        told = msgspec.json.decode(body, type=dict[str, Any])
        rank = told.get("dp_rank")
        if type(rank) is not int or not 0 <= rank < MOST_RANKS:
            raise ProtocolError(f"a registration names its dp_rank, from 0 to {MOST_RANKS - 1}")
        Whereabouts.read(told, "a registration")
        with self._lock:
            if str(rank) == self._own:
                raise ProtocolError(f"dp_rank {rank} is the bootstrap's own rank, not another's")
            self._put(str(rank), {k: v for k, v in told.items() if k != "dp_rank"})

    def close(self) -> None:
        self._server.close()


def register(
    server: str, dp_rank: int, entry: Mapping[str, Any], secret: str | None, seconds: float
) -> None:
    """Register this engine at another engine's bootstrap."""
    body = msgspec.json.encode({"dp_rank": dp_rank, **entry})
    mac = _mac(Key.of(secret).derive(PURPOSE), body)
    status, answer = _ask(server, "POST", "/register", seconds, body, {MAC: mac})
    if status != 200:
        raise HandoverError(f"the bootstrap at {server} does not take us: {answer!r:.300}")


def query(server: str, engine_id: str, seconds: float) -> Whereabouts:
    """Ask a bootstrap where an engine is."""
    status, answer = _ask(server, "GET", "/query", seconds)
    try:
        entries = msgspec.json.decode(answer, type=dict[str, dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        entries = None
    if status != 200 or entries is None:
        raise ProtocolError(f"{server} is no bootstrap: it answered /query with status {status}")
    for entry in entries.values():
        if entry.get("engine_id") == engine_id:
            return Whereabouts.read(entry, server)
    told = [entry.get("engine_id") for entry in entries.values()]
    raise ProtocolError(
        f"the bootstrap at {server} knows engines {told!r:.200}, not {engine_id!r:.80}; the "
        "prefill engine may have restarted: the proxy must ask /query again"
    )


class Registration:
    """Keeps a data-parallel rank without a bootstrap registered at another engine's.

    Ranks start in any order, and the rank with the bootstrap may start late or restart. So a thread
    registers again and again; neither an engine's start nor its reset waits for it.
    """

    def __init__(self, server: str, secret: str | None, seconds: float) -> None:
        """`seconds` is for one attempt."""
        self._server, self._secret, self._seconds = server, secret, seconds
        self._told: tuple[int, Mapping[str, Any]] = (0, {})
        self._changed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvferry-register", daemon=True)

    def put(self, dp_rank: int, entry: Mapping[str, Any]) -> None:
        """Set the engine's own entry, which the thread sends to the server from now on."""
        self._told = (dp_rank, entry)
        self._changed.set()
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    def _run(self) -> None:
        pause, failed = 0.0, False
        while True:
            self._changed.wait(pause)
            self._changed.clear()
            if self._closed:
                return
            dp_rank, entry = self._told
            try:
                register(self._server, dp_rank, entry, self._secret, self._seconds)
            except Exception as error:  # go on, because no other thread registers the rank
                if not failed:
                    log.warning(
                        "kvferry: requests by transfer id cannot reach data-parallel rank %d until "
                        "it has registered, which is tried again and again: %s",
                        dp_rank,
                        error,
                        exc_info=None if isinstance(error, KvferryError) else error,
                    )
                pause, failed = TELL_AGAIN_SECONDS, True
            else:
                if failed:
                    log.info(
                        "kvferry: data-parallel rank %d is registered at %s", dp_rank, self._server
                    )
                pause, failed = REFRESH_SECONDS, False


@dataclass(slots=True)
class _Asked:
    """The latest question for a producer, and the latest good answer."""

    at: float
    answer: Future[tuple[float, Whereabouts]]  # and when it came
    known: tuple[float, Whereabouts] | None = None

    def last(self, now: float) -> Whereabouts | None:
        """The latest good answer, if it is not too old to serve without a new one."""
        if self.known is None or now > self.known[0] + KEEP_SECONDS:
            return None
        return self.known[1]


def _directory(params: Mapping[str, Any]) -> str | None:
    host, port = params.get("remote_host"), params.get("remote_port")
    if not is_host(host) or type(port) is not int or not 0 < port <= MOST_PORT:
        return None
    return at_port(literal(str(host)) or str(host), port)


def _mac(key: bytes, body: bytes) -> str:
    return hmac.new(key, body, hashlib.sha256).hexdigest()


def _ask(
    server: str,
    method: str,
    path: str,
    seconds: float,
    body: bytes = b"",
    headers: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, bytes]:
    """One HTTP exchange without redirects and proxies. It is bounded in size and in time, however
    slowly the name is resolved or the server sends."""
    host, port = host_port(server)
    deadline = time.monotonic() + seconds
    said = {"Host": at_port(host, port), "Content-Length": str(len(body)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in said.items())
    question = f"{method} {path} HTTP/1.0\r\n{head}\r\n".encode() + body
    try:
        with dial(host, port, deadline) as connection:
            connection.sendall(question)
            data = io.BytesIO(_received(connection, deadline))
            stream = SimpleNamespace(makefile=lambda *_, **__: data)
            answer = http.client.HTTPResponse(cast(Any, stream))
            answer.begin()
            return answer.status, answer.read()
    except (
        OSError,
        ValueError,
        OverflowError,  # the announced length is too large for an integer
        http.client.HTTPException,
        TransferError,
    ) as error:
        raise HandoverError(
            f"the bootstrap at {at_port(host, port)} does not answer: {error}"
        ) from None


def _received(connection: socket.socket, deadline: float) -> bytes:
    """All bytes that a server sends before it closes the connection."""
    received = bytearray()
    while len(received) <= MOST_BYTES:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it did not answer in time")
        connection.settimeout(left)
        data = connection.recv(1 << 16)
        if not data:
            return bytes(received)
        received += data
    raise ValueError(f"it sends more than {MOST_BYTES} bytes")
