"""Finding a producer that a request names without a ticket: both engines got the request at once.

A decode request in Mooncake style names a bootstrap address, an engine id and a transfer id; in the
style of NixlPushConnector's proxy, the engine's directory and nothing that tells its incarnation. A
thread asks; the scheduler looks for the answer whenever vLLM asks it about the request, and never
waits. An answer serves the requests of the next second; then it is asked for anew, because the
engine may have been reset or restarted, and one that was kept serves where no answer comes soon.
Clients name these addresses, and some may be silent: `meetings` bounds what they can hold up.

What is found becomes an ordinary ticket. The hold's id is derived, on both sides alike, from the
producer's incarnation and the transfer id; the digest is of the consumer's own prompt. A claim that
comes before the prefill is done waits at the producer's ranks, as every early claim does; one for a
prefill that was aborted, or not held, is refused there as soon as that is known.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvferry.errors import AuthenticationError, HandoverError, KvferryError, ProtocolError
from kvferry.p2p.caller import Caller
from kvferry.p2p.meetings import Meetings
from kvferry.p2p.ticket import MARK, is_host, is_text
from kvferry.vllm.addresses import host_port
from kvferry.vllm.bootstrap import Whereabouts, query
from kvferry.vllm.config import FerryConfig, Style
from kvferry.wire.messages import VERSION, EngineInfo, Hello, Refused, Welcome
from kvferry.wire.names import is_loopback
from kvferry.wire.sockets import Sockets

AGAIN_SECONDS = 0.05  # between two, while the engine is starting
FRESH_SECONDS = 1.0  # after these, an answer is asked for anew
PATIENCE_SECONDS = 0.2  # for the new one, before the last one is used
KEEP_SECONDS = 300.0  # and that is used no longer than this
MOST_KEPT = 4096
CHILD = re.compile(r"^\d+_")  # vLLM's request ids of the samples of one `n > 1` request
SUFFIX = re.compile(r"-[0-9a-f]{8}$")  # that vLLM adds to each id


@dataclass(frozen=True, slots=True)
class Place:
    """Where to ask for a producer, and what to ask for."""

    engine_id: str
    address: str  # of a bootstrap or of a directory
    bootstrap: bool


@dataclass(frozen=True, slots=True)
class Appointment:
    """A request that named its producer, and what both call the transfer."""

    place: Place
    name: str


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question, and what the one before it brought."""

    at: float
    answer: Future[tuple[float, Whereabouts]]  # and when it came
    before: tuple[float, Whereabouts] | None

    @property
    def known(self) -> tuple[float, Whereabouts] | None:
        """The latest answer, if any was good."""
        if self.answer.done() and not self.answer.exception():
            return self.answer.result()
        return self.before

    def stale(self, now: float) -> bool:
        if not self.answer.done():
            return False
        return now > max(self.at, self.known[0] if self.known else 0.0) + FRESH_SECONDS


def transfer_name(params: Mapping[str, Any], request_id: str, style: Style) -> str | None:
    """What producer and consumer call a request; None where only a ticket can tell."""
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


def appointment(params: Mapping[str, Any], request_id: str, style: Style) -> Appointment:
    """Where a request without a ticket of ours sends us, or why it cannot."""
    name = transfer_name(params, request_id, style)
    engine_id = params.get("remote_engine_id")
    if name is not None and isinstance(engine_id, str) and is_text(engine_id):
        if name.startswith("transfer ") and params.get("remote_bootstrap_addr"):
            host, port = host_port(params["remote_bootstrap_addr"])
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            return Appointment(Place(engine_id, address, True), name)
        directory = _directory(params) if style == "push" else None
        if directory is not None and not params.get("remote_block_ids"):
            return Appointment(Place(engine_id, directory, False), name)
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
    raise ProtocolError(
        f"kv_transfer_params ask for a remote prefill, but hold no kvferry ticket ({MARK!r}); the "
        "prefill engine must run kvferry too, and the proxy pass its answer on unchanged"
    )


def _directory(params: Mapping[str, Any]) -> str | None:
    host, port = params.get("remote_host"), params.get("remote_port")
    if not is_host(host) or type(port) is not int or not 0 < port < 1 << 16:
        return None
    return f"{'127.0.0.1' if host == 'localhost' else host}:{port}"


class Rendezvous:
    """Asks for producers on threads of its own; answers are looked up without waiting."""

    def __init__(self, config: FerryConfig, sockets: Sockets) -> None:
        self._config = config
        self._sockets = sockets
        self._caller: Caller | None = None
        self._engine: EngineInfo | None = None
        self._told = threading.Event()  # who we are
        self._closed = False
        self._meetings = Meetings("kvferry-rendezvous", config.bootstrap_seconds)
        self._lock = threading.Lock()
        self._asked: dict[Place, _Asked] = {}

    def introduce(self, engine: EngineInfo) -> None:
        """Who we are; directories ask for it."""
        self._engine = engine
        self._told.set()

    def find(self, place: Place) -> Whereabouts | None:
        """A producer, or None while it is asked for; raises why it cannot be found."""
        now = time.monotonic()
        with self._lock:
            asked = self._asked.get(place)
            if asked is None or asked.stale(now):
                asked = self._ask_anew(place, asked, now)
        last = asked.before[1] if asked.before is not None else None
        if not asked.answer.done():
            return last if now > asked.at + PATIENCE_SECONDS else None
        error = asked.answer.exception()
        if error is None:
            return asked.answer.result()[1]
        if last is not None and type(error) is HandoverError:  # nobody answers
            return last
        self.forget(place)  # the next request asks again
        raise error

    def forget(self, place: Place) -> None:
        """A load by what is known of it failed."""
        with self._lock:
            asked = self._asked.get(place)
            if asked is not None and asked.answer.done():
                del self._asked[place]

    def _ask_anew(self, place: Place, before: _Asked | None, now: float) -> _Asked:
        known = before.known if before is not None else None
        if known is not None and now > known[0] + KEEP_SECONDS:
            known = None
        if before is None and len(self._asked) >= MOST_KEPT:
            self._asked.pop(next(iter(self._asked)))
        answer: Future[tuple[float, Whereabouts]] = Future()

        def ask(seconds: float) -> None:
            found = self._found_at(place, seconds)
            answer.set_result((time.monotonic(), found))

        try:
            self._require_allowed(place)
            self._meetings.submit(place.address, ask, answer.set_exception)
        except AuthenticationError as error:
            answer.set_exception(error)
        except KvferryError as error:  # no more threads, too many questions, or we are closed
            answer.set_exception(HandoverError(f"{place.address} cannot be asked: {error}"))
        asked = self._asked[place] = _Asked(now, answer, known)
        return asked

    def _require_allowed(self, place: Place) -> None:
        host = place.address.rsplit(":", 1)[0]
        if not self._config.admits(host):
            raise AuthenticationError(
                f"the request names a producer at {host}, which is not among the configured peers"
            )
        if not self._config.secret and not is_loopback(host):
            raise AuthenticationError(
                f"the request names a producer at {host}, on another host, and no secret is "
                "configured; set the same secret on both engines"
            )

    def _found_at(self, place: Place, seconds: float) -> Whereabouts:
        deadline = time.monotonic() + seconds
        while True:
            try:
                if place.bootstrap:
                    found = query(place.address, place.engine_id, seconds)
                else:
                    found = self._hello(place, deadline)
                break
            except _NotYet as error:
                if time.monotonic() + AGAIN_SECONDS > deadline or self._closed:
                    raise HandoverError(str(error)) from None
                time.sleep(AGAIN_SECONDS)
        if not self._config.admits(found.host):
            raise AuthenticationError(
                f"the engine {found.engine_id!r:.80} is at {found.host}, which is not among the "
                "configured peers"
            )
        return found

    def _hello(self, place: Place, deadline: float) -> Whereabouts:
        if not self._told.wait(max(0.0, deadline - time.monotonic())) or self._engine is None:
            raise HandoverError("this engine's workers have not described themselves")
        with self._lock:
            if self._caller is None:
                self._caller = Caller(self._sockets)
        call = self._caller.call(place.address, Hello(VERSION, self._engine), deadline)
        reply = call.result(max(0.0, deadline - time.monotonic()) + 1.0)
        if isinstance(reply, Refused):
            if reply.reason == "busy":
                raise _NotYet(reply.message)
            raise HandoverError(f"the engine at {place.address} refuses us: {reply.message}")
        if not isinstance(reply, Welcome):
            raise HandoverError(f"{place.address} answered a hello with {type(reply).__name__}")
        if reply.engine.engine_id != place.engine_id:
            raise HandoverError(
                f"the request names engine {place.engine_id!r:.80}, and at {place.address} is "
                f"{reply.engine.engine_id!r:.80}"
            )
        host, port = place.address.rsplit(":", 1)
        return Whereabouts(place.engine_id, host, int(port), reply.engine.incarnation)

    def close(self) -> None:
        self._closed = True
        self._told.set()
        self._meetings.close()
        if self._caller is not None:
            self._caller.close()


class _NotYet(KvferryError):
    """The engine is there, and not ready."""
