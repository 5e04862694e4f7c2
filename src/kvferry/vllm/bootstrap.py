"""The bootstrap address of a Mooncake-style deployment: where proxies and decode engines ask.

A proxy for vLLM's MooncakeConnector knows an address for each prefill server, asks it `GET /query`,
and gets engine ids by data-parallel rank. It names one of them, and the address, to the decode
engine, which asks the same address where that engine's directory is. Ours is such a server:

    GET  /query     {"0": {"engine_id": …, "worker_addr": {}, "kvferry": {host, port, incarnation}}}
    POST /register  from data-parallel ranks that have no server of their own; its body is
                    authenticated by an HMAC in the header X-Kvferry-Mac

Strangers may connect too: `http_server` bounds what they can take of it. What is registered is
bounded by what an asker reads, and never replaces the engine's own entry.

What it answers is a hint and no secret: whoever listens at the named directory must prove to know
the secret before anything else is said, and a wrong incarnation makes every claim stale.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from kvferry.errors import HandoverError, ProtocolError, TransferError
from kvferry.p2p.http_server import Answer, Asked, HttpServer
from kvferry.p2p.ticket import is_host, is_text
from kvferry.units import require_port
from kvferry.vllm.addresses import host_port
from kvferry.wire.keys import Key
from kvferry.wire.names import Reach, at_port, dial, literal

MOST_BYTES = 1 << 20  # of a message; an engine of a thousand ranks has less
MAC = "X-Kvferry-Mac"
PURPOSE = "bootstrap"  # of the key that registrations are authenticated by
MOST_ENTRIES = MOST_BYTES - (1 << 10)  # of all registrations; an answer has a head too
MOST_RANKS = 4096  # data-parallel


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where an engine's directory is."""

    engine_id: str
    host: str
    port: int
    incarnation: str

    def entry(self, ranks: Mapping[int, Mapping[int, str]]) -> dict[str, Any]:
        where = {k: v for k, v in asdict(self).items() if k != "engine_id"}
        return {"engine_id": self.engine_id, "worker_addr": ranks, "kvferry": where}

    @classmethod
    def read(cls, entry: Any, address: str) -> Whereabouts:
        """An engine's entry, from whoever answered at an address: trust nothing."""
        ours = entry.get("kvferry") if isinstance(entry, dict) else None
        if not isinstance(ours, dict):
            raise ProtocolError(
                f"the engine at {address} runs vLLM's own MooncakeConnector, which does not speak "
                "kvferry's protocol; run kvferry's connector on both sides"
            )
        engine_id, host, inc = (entry.get("engine_id"), ours.get("host"), ours.get("incarnation"))
        port = ours.get("port")
        if not (is_text(engine_id) and is_host(host) and is_text(inc)):
            raise ProtocolError(f"the entry of an engine at {address} is damaged: {entry!r:.200}")
        if type(port) is not int or not 0 < port < 1 << 16:  # True is no port
            raise ProtocolError(f"the entry of an engine at {address} has port {port!r:.40}")
        return cls(str(engine_id), str(host), port, str(inc))


class Bootstrap:
    """A server for one engine, and for those that register with it."""

    def __init__(self, host: str | None, port: int, secret: str | None) -> None:
        self._entries: dict[str, dict[str, Any]] = {}
        self._own: set[str] = set()
        self._answer = Answer.of(200, {})  # to a query
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
            taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
            raise HandoverError(
                f"the bootstrap cannot listen at {at_port(where, port)}: {error}; "
                + (
                    "set bootstrap_port, or VLLM_MOONCAKE_BOOTSTRAP_PORT, to a free port"
                    if taken
                    else "set host to an address of this host"
                )
            ) from None
        self.port = int(listener.getsockname()[1])
        self._server = HttpServer(listener, self._asked, "kvferry-bootstrap")

    def put(self, dp_rank: int, entry: Mapping[str, Any]) -> None:
        """The engine's own entry."""
        with self._lock:
            self._own.add(str(dp_rank))
            self._put(str(dp_rank), entry)

    def _put(self, dp_rank: str, entry: Mapping[str, Any]) -> None:
        """With the lock held."""
        entries = {**self._entries, dp_rank: dict(entry)}
        answer = Answer.of(200, entries)
        if len(answer.json) > MOST_ENTRIES and dp_rank not in self._own:
            raise ProtocolError(
                f"with this registration there would be more than {MOST_ENTRIES} bytes of them"
            )
        self._entries, self._answer = entries, answer

    def _asked(self, asked: Asked) -> Answer:
        """On the server's thread."""
        if asked.method == "GET" and asked.path == "/query":
            return self._answer
        if asked.method != "POST" or asked.path != "/register":
            return Answer.of(404, {"detail": "ask GET /query, or POST /register"})
        try:
            self._register(asked.body, asked.headers.get(MAC.lower(), ""))
        except (ProtocolError, ValueError, RecursionError) as error:
            return Answer.of(400, {"detail": str(error)})
        return Answer.of(200, {"status": "ok"})

    def _register(self, body: bytes, mac: str) -> None:
        told_mac = mac.encode(errors="replace")  # a header may hold what a digest never does
        if not hmac.compare_digest(told_mac, _mac(self._key, body).encode()):
            raise ProtocolError("this registration does not prove to know our secret")
        told = json.loads(body)
        rank = told.get("dp_rank") if isinstance(told, dict) else None
        if type(rank) is not int or not 0 <= rank < MOST_RANKS:
            raise ProtocolError(f"a registration names its dp_rank, from 0 to {MOST_RANKS - 1}")
        if "kvferry" not in told:
            raise ProtocolError(
                "this bootstrap belongs to kvferry's connector, and a worker of vLLM's own "
                "MooncakeConnector wants to register; run one of the two on all engines"
            )
        Whereabouts.read(told, "a registration")
        with self._lock:
            if str(rank) in self._own:
                raise ProtocolError(f"dp_rank {rank} is the bootstrap's own rank, not another's")
            self._put(str(rank), {k: v for k, v in told.items() if k != "dp_rank"})

    def close(self) -> None:
        self._server.close()


def _mac(key: bytes, body: bytes) -> str:
    return hmac.new(key, body, hashlib.sha256).hexdigest()


def register(
    server: str, dp_rank: int, entry: Mapping[str, Any], secret: str | None, seconds: float
) -> None:
    """Tell another engine's bootstrap of this one."""
    body = json.dumps({"dp_rank": dp_rank, **entry}).encode()
    mac = _mac(Key.of(secret).derive(PURPOSE), body)
    status, answer = _ask(server, "POST", "/register", seconds, body, {MAC: mac})
    if status != 200:
        raise HandoverError(f"the bootstrap at {server} does not take us: {answer!r:.300}")


def query(server: str, engine_id: str, seconds: float) -> Whereabouts:
    """Ask a bootstrap where an engine is."""
    status, answer = _ask(server, "GET", "/query", seconds)
    try:
        entries = json.loads(answer) if status == 200 else None
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, dict):
        raise ProtocolError(f"{server} is no bootstrap: it answered /query with status {status}")
    for entry in entries.values():
        if isinstance(entry, dict) and entry.get("engine_id") == engine_id:
            return Whereabouts.read(entry, server)
    told = [e.get("engine_id") for e in entries.values() if isinstance(e, dict)]
    raise ProtocolError(
        f"the bootstrap at {server} knows engines {told!r:.200}, not {engine_id!r:.80}; the "
        "prefill engine may have restarted: the proxy must ask /query again"
    )


def _ask(
    server: str,
    method: str,
    path: str,
    seconds: float,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:
    """One HTTP exchange: no redirects, no proxies, bounded in time and size, however slowly the
    other side sends, and its name is resolved."""
    host, port = host_port(server)
    deadline = time.monotonic() + seconds
    said = {"Host": at_port(host, port), "Content-Length": str(len(body or b"")), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in said.items())
    question = f"{method} {path} HTTP/1.0\r\n{head}\r\n".encode() + (body or b"")
    try:
        with dial(host, port, deadline) as connection:
            connection.sendall(question)
            answer = http.client.HTTPResponse(cast(Any, _Received(connection, deadline)))
            answer.begin()
            return answer.status, answer.read()
    except (
        OSError,
        ValueError,
        OverflowError,  # it announces more bytes than there are numbers for
        http.client.HTTPException,
        TransferError,
    ) as error:
        raise HandoverError(
            f"the bootstrap at {at_port(host, port)} does not answer: {error}"
        ) from None


class _Received:
    """All that a server sends until it closes, for `http.client` to read."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._data = io.BytesIO()
        while self._data.tell() <= MOST_BYTES:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("it did not answer in time")
            connection.settimeout(left)
            data = connection.recv(1 << 16)
            if not data:
                break
            self._data.write(data)
        else:
            raise ValueError(f"it sends more than {MOST_BYTES} bytes")
        self._data.seek(0)

    def makefile(self, *args: Any, **kwargs: Any) -> Any:
        return self._data
